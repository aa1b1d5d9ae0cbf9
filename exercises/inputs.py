"""Calls for the tables: on fixed numbers, or on random ones, which are drawn anew for each call.

    tensors("compute_gae", rewards=[[1], [3]], …, gamma=0.5)        # a call of a module; lists become tensors
    tensors("compute_gae", rewards=normal("TN"), …, gamma=share)    # of a module and a generator: sizes T and N too

`arrays` and `lists` make NumPy arrays and lists instead.
"""

from functools import partial
from operator import attrgetter

import numpy as np
import probes  # noqa: F401  (registers its environments)


class Draw:
    """Random numbers of one call. Sizes are digits, or letters: a letter is the same size wherever it stands."""

    def __init__(self, rng):
        self.rng, self.sizes = rng, {}

    def shape(self, letters):
        for letter in letters:
            self.sizes.setdefault(letter, int(letter) if letter.isdigit() else int(self.rng.integers(1, 6)))
        return [self.sizes[letter] for letter in letters]


def normal(letters="", scale=1.0):
    return lambda draw: scale * draw.rng.normal(size=draw.shape(letters))


def uniform(low, high, letters=""):
    return lambda draw: draw.rng.uniform(low, high, draw.shape(letters))


def share(draw):
    """A number from 0 to 1."""
    return draw.rng.random()


def flags(letters, chance=0.35):
    return lambda draw: draw.rng.random(draw.shape(letters)) < chance


def whole(low, high, letters=""):
    """Whole numbers from low to high - 1; `high` may be the letter of a size."""
    return lambda draw: draw.rng.integers(
        low, draw.shape(high)[0] if isinstance(high, str) else high, draw.shape(letters)
    )


def pick(*options):
    """One of these, which may be drawn themselves."""

    def draw_one(draw):
        option = options[draw.rng.integers(len(options))]
        return option(draw) if callable(option) else option

    return draw_one


def call(convert, function, by=(), **given):
    """Of a module: what its function gives; with `by`, names of arguments, its slopes by these as well."""

    def run(m, rng=None):
        draw, ready = Draw(rng), {}
        for name, x in given.items():
            x = x(draw) if callable(x) else x
            x = x.item() if getattr(x, "ndim", None) == 0 else x
            ready[name] = convert(x) if isinstance(x, (list, np.ndarray)) else x
        for name in by:
            ready[name].requires_grad_()
        result = attrgetter(function)(m)(**ready)
        if not by:
            return result
        return result, [slopes(y, *(ready[name] for name in by)) for y in as_tuple(result)]

    return run


def tensor(numbers):
    """A new tensor: of float32, but booleans, and arrays of whole numbers, stay what they are."""
    import torch

    kind = np.asarray(numbers).dtype.kind
    stays = kind == "b" or kind == "i" and isinstance(numbers, np.ndarray)
    return torch.tensor(numbers, dtype=None if stays else torch.float32)


def as_list(numbers):
    return numbers.tolist() if isinstance(numbers, np.ndarray) else list(numbers)


tensors, arrays, lists = partial(call, tensor), partial(call, np.array), partial(call, as_list)


def together(*calls):
    """Several calls as one."""
    return lambda m, *rng: [each(m, *rng) for each in calls]


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def slopes(y, *tensors):
    """The derivatives of the sum of y, tensors; zeros if y does not depend on one."""
    import torch

    if not getattr(y, "requires_grad", False):
        return [torch.zeros_like(x) for x in tensors]
    found = torch.autograd.grad(y.sum(), tensors, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if slope is None else slope for x, slope in zip(tensors, found)]


def refuses(call):
    """A call that gives whether this one raises a ValueError."""

    def run(m):
        try:
            call(m)
        except ValueError:
            return True
        return False

    return run


def rollout(numbers, *ends):
    """Lists (3, N) of {name: numbers}, the same in all environments. For each of these `ends` has the rows in which
    terminated, and those in which truncated is set. After an end, the last row's value is that of another episode.
    """
    if ends and "values" in numbers:
        numbers = numbers | {"values": [*numbers["values"][:-1], numbers["values"][-1] - 1]}
    ends = ends or [((), ())]
    given = {name: [[x] * len(ends) for x in column] for name, column in numbers.items()}
    for i, name in enumerate(("terminated", "truncated")):
        given[name] = [[t in rows[i] for rows in ends] for t in range(3)]
    return given


ROLLOUT = dict.fromkeys(("rewards", "values", "next_values"), normal("TN", 3.0))
FLAGS = dict.fromkeys(("terminated", "truncated"), flags("TN"))
