"""What the lessons give: with each known mistake, and in the calls whose numbers the figures start with.

A lesson, worked out by hand, is a test between the first two rulers of tests/test_<script>.py.
"""

import importlib
import inspect
import io
import math
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import numpy as np

REPO = Path(__file__).resolve().parents[1]
FIGURES = {  # script: {the function where a figure stands: what else the figure computes}
    "ppo": {"compute_gae": [], "compute_vtrace": [], "policy_loss": []},
    "dqn": {"td_targets": []},
    "rainbow": {"NStepBuffer": [], "SumTree": [], "project": []},
    "qlearning": {"q_learning_target": ["sarsa_target", "expected_sarsa_target"]},
    "es": {"es_gradient": ["make_candidates", "centered_ranks"]},
    "sac": {"squashed_gaussian": []},
}


def by_hand(lines, number):
    """Whether this line of a test file lies between its first two rulers, where the lessons are."""
    return sum(line.startswith("# -----") for line in lines[:number]) == 1


def plain(x):
    """Tensors, arrays and named tuples as lists of numbers; None for what JSON cannot hold."""
    x = x.tolist() if hasattr(x, "tolist") else x
    if isinstance(x, (list, tuple)):
        return [plain(part) for part in x]
    return x if isinstance(x, (bool, int, str)) or isinstance(x, float) and math.isfinite(x) else None


def record(test, script, names, calls):
    """Run a test; append the calls of these functions and classes: [name, {argument: value}, result]."""
    codes, inside = {}, []
    for name in (x for x in names if hasattr(script, x)):
        part = getattr(script, name)
        methods = {f"{name}.{key}": f for key, f in vars(part).items()} if isinstance(part, type) else {name: part}
        codes.update({f.__code__: key for key, f in methods.items() if inspect.isfunction(f)})

    def hook(frame, event, result):  # Python calls it whenever a function begins or returns
        code = frame.f_code
        if code in codes and event == "call":
            names = code.co_varnames[: code.co_argcount]
            inside.append([codes[code], {x: plain(frame.f_locals[x]) for x in names if x != "self"}, None])
            calls.extend(inside if len(inside) == 1 else [])  # not what they call themselves
        elif code in codes and event == "return":
            inside.pop()[2] = plain(result)

    sys.setprofile(hook)
    try:
        test(script)
    finally:
        sys.setprofile(None)


def run_lessons(name, mistakes=True):
    """({mistake: (its numbers, the right ones)}, {figure's function: calls}) of a script's lessons."""
    sys.path[:0] = [x for x in (str(REPO), str(REPO / "tests")) if x not in sys.path]
    importlib.import_module("conftest")
    tools, tests = importlib.import_module("tools"), importlib.import_module(f"test_{name}")
    script, lines = importlib.import_module(name), inspect.getsource(tests).split("\n")
    gave, calls = {}, {at: [] for at in FIGURES.get(name, {})}

    def close(actual, expected, **given):
        try:
            tools.close(actual, expected, **given)
        except AssertionError:
            pair = (np.ravel(plain(x)).astype(float) for x in (actual, expected))
            texts = ([f"{number:.4g}".replace("-", "−") for number in numbers] for numbers in pair)
            raise AssertionError(*texts) from None

    quiet = redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore")
    with quiet[0], quiet[1], mock.patch.object(tests, "close", close):
        for test in [x for key, x in vars(tests).items() if key.startswith("test_")]:
            needs = [*inspect.signature(test).parameters]
            if needs != ["script"] or not by_hand(lines, test.__code__.co_firstlineno):
                continue
            for at, others in FIGURES.get(name, {}).items():
                if any(f"script.{x}(" in inspect.getsource(test) for x in [at, *others]):
                    record(test, script, [at, *others], calls[at])
            for mistake in getattr(test, "mistakes", ()) if mistakes else ():
                try:
                    test(tools.with_mistake(script, mistake))
                except AssertionError as error:
                    if len(error.args) == 2 and max(map(len, error.args)) <= 8:
                        gave[mistake] = error.args
    return gave, {at: [call for call in found if len(str(call)) < 2000][:30] for at, found in calls.items()}
