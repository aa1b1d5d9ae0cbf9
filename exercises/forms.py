"""What an exercise and a bug hunt consist of. The files in TABLES fill these forms in."""

import difflib
import importlib
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

TABLES = ("tasks_small.py", "tasks_scratch.py", "tasks.py", "hunts.py")  # each needs none of the others
EXERCISES, HUNTS, POOLS = {}, {}, {}  # by name, in the order of the tables; a pool is hunts of one script


class BadInput(Exception):
    """Something that whoever typed the command can mend: shown as one line, with exit code 2."""


@dataclass
class Case:
    """One call of the student's code on fixed numbers, small enough to be worked out by hand."""

    what: str  # the situation, as the student reads it: "two steps, the first terminates"
    call: Callable  # of the student's module, in a process of its own; returns numbers, or tuples, lists, … of them
    expected: object  # the same, as plain lists, worked out by hand
    mistakes: dict = field(default_factory=dict)  # what went wrong -> the numbers one gets so, or a test of the numbers
    look: str = ""  # where to look next
    atol: float = 1e-4  # shares of random draws need more than rounding


@dataclass
class Learn:
    """A run of the student's script that has to reach a score: mean - deviation of its last evaluation."""

    settings: dict  # fields of Args
    threshold: float


class Task:
    """What exercises and hunts have in common."""

    @property
    def file(self):
        """The name of the student's file: the script's, without its folder."""
        return Path(self.script).name


@dataclass
class Exercise(Task):
    """Functions or methods of a script to write, and how a copy of the script with them is judged."""

    name: str
    topic: str
    script: str  # a script of the repository, or a small one, exercises/scripts/NAME.py
    blanks: tuple  # names of functions, or Class.method, whose bodies are taken out
    difficulty: int  # 1 to 3
    minutes: int
    task: str  # what to write, and what is at hand; shown by start.py and written into the first blank
    cases: list  # step 1
    probe: Callable = None  # step 2, if there is one: of the original and train(**settings) -> Trained; what is wrong
    learn: Learn = None  # step 3, if there is one
    gives: dict = field(default_factory=dict)  # blank -> what it has to return: "float32 tensor", a tuple for a pair
    hides: tuple = ()  # functions that would give the solution away: made unreadable in the copy
    table: str = ""  # the file that it stands in


@dataclass
class Plant:
    """A bug: inside the function, method or class `where`, the text `old`, which stands there once, becomes `new`."""

    where: str
    old: str
    new: str
    hint: str = ""  # of a pool's own bugs: as Hunt.hint


@dataclass
class Hunt(Task):
    """A copy of a script with one planted bug. `check` judges what the script does, not what it looks like."""

    name: str
    script: str
    difficulty: int
    minutes: int
    hint: str  # how the learning curve, or what else one sees, differs from that of the sound script
    check: Callable = None  # of the original and train(**settings) -> Trained; None, or what is still wrong
    plant: Plant = None  # left out of handouts
    cases: list = ()  # instead of check: calls of the student's code, as in an exercise
    table: str = ""  # the file that it stands in
    members: tuple = ()  # of a pool, instead of check: the names of the hunts all of whose checks have to pass
    plants: tuple = ()  # of a pool: more bugs that these checks find


def exercise(name, **fields):
    """Put an Exercise into the table."""
    EXERCISES[name] = Exercise(name, **fields)


def hunt(name, **fields):
    """Put a Hunt into the table."""
    HUNTS[name] = Hunt(name, **fields)


def pool(name, **fields):
    """Put a Hunt whose bug is drawn from a number into the table."""
    POOLS[name] = Hunt(name, **fields)


def load_tables():
    """Import the tables, which fills EXERCISES, HUNTS and POOLS. A handout has only those that it needs."""
    for table in TABLES:
        if Path(__file__).with_name(table).is_file():
            importlib.import_module(table.removesuffix(".py"))
        for task in [*EXERCISES.values(), *HUNTS.values(), *POOLS.values()]:
            task.table = task.table or table


def find(name):
    """The Exercise, Hunt or pool of this name. BadInput, with near names, if there is none."""
    if task := EXERCISES.get(name) or HUNTS.get(name) or POOLS.get(name):
        return task
    near = difflib.get_close_matches(name, [*EXERCISES, *HUNTS, *POOLS], n=3, cutoff=0.4)
    raise BadInput(f"there is no exercise {name}" + (f"; did you mean {' or '.join(near)}?" if near else ""))


def hints(name):
    """(three hints, what to know once it is solved) for an exercise, out of hints.md; empty for a hunt."""
    sections = Path(__file__).with_name("hints.md").read_text(encoding="utf-8").split("\n## ")
    for section in sections[1:]:
        title, *parts = re.split(r"\n[123]\. |\n\n", section.strip())
        if title == name:
            *three, known = [" ".join(part.split()) for part in parts]
            return three, known
    return [], ""


def run_main(main):
    """Call main() for a command line; BadInput is one line on stderr and exit code 2."""
    sys.stdout.reconfigure(errors="replace")  # a terminal without some letter gets a ?
    try:
        sys.exit(main())
    except BadInput as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(2)


# What tables write numbers with. torch is imported only when a check runs, for start.py is to answer at once.


def tensor(numbers):
    """A tensor of float32."""
    import torch

    return torch.tensor(numbers, dtype=torch.float32)


def column(numbers):
    """Numbers of one environment as a tensor of float32 (T, 1)."""
    return tensor(numbers)[:, None]


def flags(rows, length=3):
    """Booleans (length, 1), a tensor: True in the given rows."""
    import torch

    return torch.tensor([[t in rows] for t in range(length)])


def plain(x):
    """Tensors, arrays, tuples and single numbers as nested lists of floats."""
    if hasattr(x, "detach"):
        x = x.detach()
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, (list, tuple)):
        return [plain(item) for item in x]
    return float(x)


def shape(x):
    """The lengths of nested lists, None where they are ragged: [[1, 2], [3, 4]] -> (2, 2)."""
    if not isinstance(x, list):
        return ()
    inner = {shape(item) for item in x}
    return (len(x), *(inner.pop() if len(inner) == 1 else (None,) if inner else ()))


def close(a, b, atol=1e-4):
    """Whether nested lists have the same form and nearly the same numbers; a NaN is close to nothing."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(close(x, y, atol) for x, y in zip(a, b))
    return not isinstance(a, list) and not isinstance(b, list) and math.isclose(a, b, rel_tol=1e-5, abs_tol=atol)


def has_nan(x):
    """Whether there is a NaN in nested lists."""
    return any(map(has_nan, x)) if isinstance(x, list) else math.isnan(x)
