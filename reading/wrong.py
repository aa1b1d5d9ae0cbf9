"""What the lessons give: with each of their known mistakes, and in the calls whose numbers the figures start with.

A lesson is a test between the first two rulers of tests/test_<script>.py: numbers worked out by hand.
"""

import functools
import importlib
import inspect
import math
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

REPO = Path(__file__).resolve().parents[1]
# A change that breaks a line for a test's sake, and that nobody would write: it is left out of the pages.
NO_HUMAN = re.compile(
    r"\b(if|and|or|while) (True|False)\b|[&|] (True|False)\b|\b77\b|\b9+\b|1e9|\b0 \* |^(True|False)$|\blambda"
)
NUMBER = re.compile(r"(?<![\w.])-?(?:inf|nan|\d+\.?\d*(?:e[-+]?\d+)?)")
FIGURES = {  # script: {the function where a figure of figures.js stands: what the figure computes as well}
    "ppo": {"compute_gae": [], "compute_vtrace": [], "policy_loss": []},
    "dqn": {"td_targets": []},
    "rainbow": {"NStepBuffer": [], "SumTree": [], "project": []},
    "qlearning": {"q_learning_target": ["sarsa_target", "expected_sarsa_target", "double_q_target"]},
    "es": {"es_gradient": ["make_candidates", "centered_ranks"]},
    "sac": {"squashed_gaussian": []},
}
MOST = 30  # calls of a function that are handed over


def by_hand(lines, number):
    """Whether this line of a test file lies between its first two rulers, where the lessons are."""
    return sum(line.startswith("# -----") for line in lines[:number]) == 1


def numbers(message, name):
    """The numbers of one of the arrays in a message of numpy.testing, as short texts; [] if there are many."""
    part = re.search(rf" {name}: (.*?)(?= DESIRED: |\Z)", message, re.S)
    found = NUMBER.findall(part[1]) if part and "..." not in part[1] else []
    return [f"{float(x):.4g}".replace("-", "−") for x in found] if len(found) <= 8 else []


def plain(x):
    """Tensors, arrays and named tuples as lists of numbers; None in place of what JSON cannot hold."""
    x = x.tolist() if hasattr(x, "tolist") else x
    if isinstance(x, (list, tuple)):
        return [plain(part) for part in x]
    return x if isinstance(x, (bool, int, str)) or isinstance(x, float) and math.isfinite(x) else None


def recorded(script, names, calls):
    """The script as another module, in which calls of these functions and classes from outside are appended to `calls`."""
    inside = []

    def wrap(name, function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            given = plain([x for key, x in bound.arguments.items() if key != "self"])
            inside.append(name)
            result = function(*args, **kwargs)
            inside.pop()
            if not inside and sum(call[0] == name for call in calls) < MOST:
                calls.append([name, given, plain(result)])
            return result

        return wrapper

    module = ModuleType(script.__name__)
    vars(module).update(vars(script))
    for name in names:
        part = getattr(script, name)
        if isinstance(part, type):
            methods = {x for x, f in vars(part).items() if inspect.isfunction(f) and (x[0] != "_" or x == "__init__")}
            wrapped = type(name, (part,), {x: wrap(f"{name}.{x}", vars(part)[x]) for x in methods})
        else:
            wrapped = wrap(name, part)
        setattr(module, name, wrapped)
    return module


def run_lessons(name, mistakes=True):
    """({mistake: (numbers that it gives, those that are right)}, {figure's function: calls}) of a script's lessons."""
    sys.path[:0] = [x for x in (str(REPO), str(REPO / "tests")) if x not in sys.path]
    importlib.import_module("conftest")
    tools = importlib.import_module("tools")
    tests, script = importlib.import_module(f"test_{name}"), importlib.import_module(name)
    lines = Path(tests.__file__).read_text(encoding="utf-8").split("\n")
    gave, calls = {}, {at: [] for at in FIGURES.get(name, {})}
    for test in [x for key, x in vars(tests).items() if key.startswith("test_")]:
        if not by_hand(lines, test.__code__.co_firstlineno) or list(inspect.signature(test).parameters) != ["script"]:
            continue
        for at, others in FIGURES.get(name, {}).items():
            if any(f"script.{x}(" in inspect.getsource(test) for x in [at, *others]):
                test(recorded(script, [at, *others], calls[at]))
        for mistake in getattr(test, "mistakes", ()) if mistakes else ():
            try:
                with warnings.catch_warnings(action="ignore"):
                    test(tools.with_mistake(script, mistake))
            except AssertionError as error:
                got, right = numbers(str(error), "ACTUAL"), numbers(str(error), "DESIRED")
                if got and right:
                    gave[mistake] = got, right
    return gave, calls
