"""What tests of several scripts use: comparison, a script with a mistake put into it, training without a folder."""

import copy
import inspect
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import torch

IN_ORDER = SimpleNamespace(permutation=lambda rows: rows)  # a generator that does not shuffle


def close(actual, expected, atol=1e-5):
    """AssertionError unless all numbers agree; shapes as well."""
    tensors = [x.detach() if isinstance(x, torch.Tensor) else torch.as_tensor(np.array(x)) for x in (actual, expected)]
    actual, expected = (tensor.double() for tensor in tensors)
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-5)


def mutant(script, where, old, new):
    """The script as another module, in whose function, class or method `where` the text `old` has become `new`."""
    part = inspect.getsource(attrgetter(where)(script))
    source = Path(script.__file__).read_text(encoding="utf-8")
    assert source.count(part) == 1 and part.count(old) == 1, f"{old!r} stands {part.count(old)} times in {where}"
    module = ModuleType(script.__name__)
    module.__file__ = script.__file__
    exec(compile(source.replace(part, part.replace(old, new)), f"{script.__name__}, mutant", "exec"), vars(module))
    return module


def by_name(mistakes):
    """Arguments of parametrize: "where, check, change" of every one of {(where, check): {name: change}}."""
    cases = [(key, name, change) for key, changes in mistakes.items() for name, change in changes.items()]
    return {
        "argvalues": [(*key, change) for key, _, change in cases],
        "ids": [f"{where}: {name}" for (where, _), name, _ in cases],
    }


@cache
def passes(check, script):
    """Whether the script passes the check, looked at once."""
    check(script)
    return True


def vector_env(makers, num_envs):
    """A vector environment with next-step autoreset; `makers` take turns in making its environments."""
    return gym.vector.SyncVectorEnv([makers[i % len(makers)] for i in range(num_envs)])


def rehearse(script, *makers, watch=False, buffer="RolloutBuffer", loss="ppo_loss", adapt=None, **settings):
    """Train in environments that `makers` make, without a folder. Returns the Run: with the agent, every logged figure,
    and the evaluations. `watch`: `calls` has the agent, the batch and the buffer as they were at each gradient step.
    `buffer` and `loss` are what the script calls them; `adapt` is what it wraps vector environments in.
    """

    class Rehearsal(script.Run):
        open_folder = write_row = write_checkpoint = draw_curve = lambda self: None
        finish = lambda self: self

        def write_evaluation(self):
            mean, std = script.evaluate(self.agent, self.args, self.args.eval_episodes)
            self.evaluations.append((self.step, self.seconds, mean, std))

    class Buffer(getattr(script, buffer)):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            buffers.append(self)

    def watched_loss(agent, *given):
        *_, batch, args = given
        if watch:
            calls.append(SimpleNamespace(agent=copy.deepcopy(agent), batch=batch, buffer=copy.deepcopy(buffers[-1])))
        return script_loss(agent, *given)

    script_loss = getattr(script, loss)
    buffers, calls = [], []
    quiet = {"progress": False, "eval_every": 10**9, "checkpoint_every": 10**9, "eval_episodes": 1}
    args = script.Args(env_id="none", **quiet | settings)
    adapt = adapt or (lambda envs: envs)
    make_envs = lambda args, num_envs, render_mode=None: adapt(vector_env(makers, num_envs))
    replaced = {"Run": Rehearsal, buffer: Buffer, loss: watched_loss, "make_envs": make_envs}
    with mock.patch.multiple(script, **replaced):
        run = script.train(args)
    run.calls = calls
    return run
