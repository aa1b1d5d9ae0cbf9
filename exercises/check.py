"""Judge a working copy that start.py wrote. An exercise has three steps, of which the first that fails is the last:

    1. the written functions on fixed numbers (no time at all),
    2. a whole run in a probe environment, one so small that the right answer is known (seconds),
    3. a run that has to learn: the mean minus the deviation of its evaluation must reach a threshold (under a minute).

A hunt has one: whether the script does what it should.

    python exercises/check.py gae                        # judges my_work/ppo.py
    python exercises/check.py gae --up-to 1              # the fixed numbers only
    python exercises/check.py gae --json results.json    # writes the results in Gradescope's format as well

The exit code is 0 if all that was asked for has passed, 1 if something failed, 2 if there was nothing to judge.
"""

import argparse
import contextlib
import csv
import io
import json
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from _thread import interrupt_main
from dataclasses import dataclass
from pathlib import Path

import hunts  # noqa: F401  (fills the table)
import tasks  # noqa: F401
from forms import BadInput, Exercise, close, find, plain, run_main, shape

HERE = Path(__file__).resolve().parent
POINTS = {1: 50, 2: 20, 3: 30}  # of the steps of an exercise; a hunt has the sum
LIMITS = {1: 60, 2: 240, 3: 1200}  # seconds until a step is given up: many times what it takes


@dataclass
class Trained:
    """What a run of the student's script left behind."""

    summary: dict  # what train returned
    agent: object  # with the last weights, loaded from the run folder
    metrics: list  # the rows of metrics.csv, dicts of floats


@dataclass
class Step:
    """The result of one step."""

    name: str
    points: int
    problem: str | None  # None: passed
    seconds: float = 0.0
    reached: bool = True


# ------------------------------------------------------------------------------------------------ the student's code


@contextlib.contextmanager
def loaded(path):
    """The script at `path` as a module, under its own name until the end. BadInput if it cannot be imported."""
    path = Path(path)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}") from None
    module, before = types.ModuleType(path.stem), sys.modules.get(path.stem)
    module.__file__ = str(path.resolve())
    sys.modules[path.stem] = module  # dataclasses and dotted paths of wrappers look here
    try:
        try:
            exec(compile(source, module.__file__, "exec"), vars(module))
        except SyntaxError as error:
            raise BadInput(f"{path}, line {error.lineno}: {error.msg}") from None
        except ModuleNotFoundError as error:
            raise BadInput(f"{path} needs {error.name}: pip install -r requirements.txt") from None
        except (Exception, SystemExit) as error:
            raise BadInput(f"{path}{place(error, module)} cannot be imported: {in_words(error)}") from None
        yield module
    finally:
        sys.modules.pop(path.stem)
        if before:
            sys.modules[path.stem] = before


def place(error, module):
    """Where in the student's file an error came up, as ", line 12, in compute_gae"; empty if it did not."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == module.__file__]
    return f", line {frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def in_words(error):
    """Kind and message of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def explained(error, module):
    """What to tell a student whose code raised this."""
    if isinstance(error, NotImplementedError) and str(error).startswith("exercise:"):
        return f"{in_words(error)}\nThis function is still blank{place(error, module)}."
    if isinstance(error, getattr(module, "UserError", ())):
        return f"the script gave up: {error}"
    if where := place(error, module):
        return f"{Path(module.__file__).name}{where}: {in_words(error)}"
    return f"what your code returned is of no use: {in_words(error)}\nIs there a return missing, or one thing too many?"


def train(module, **settings):
    """Run the student's script from beginning to end. Returns a Trained. All it prints is swallowed.

    Only `settings` and the defaults of Args count, not the script's TUNED: its table may change, the checks must not.
    """
    # Scripts without "# ===== run" still have an earlier form, in which Args itself fills in what TUNED has.
    getattr(module, "TUNED", {}).clear()
    quiet = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, quiet, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        once = {"eval_every": 10**9, "checkpoint_every": 10**9}  # at the end
        args = module.Args(**once | settings, run_dir=f"{folder}/run", progress=False)
        summary = module.train(args)
        with open(f"{folder}/run/metrics.csv") as file:
            metrics = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
        # A file may not ask for a team's environment of ours: it is given again.
        given = {"env_id": args.env_id} if hasattr(module, "untrusted_team") else {}
        return Trained(summary, module.load(f"{folder}/run", "last", **given), metrics)


# ------------------------------------------------------------------------------------------------------------- steps


def short(x):
    """Nested lists of numbers as text."""
    if isinstance(x, list):
        return f"[{', '.join(map(short, x))}]"
    return f"{x:.4f}".rstrip("0").rstrip(".") if abs(x) < 1e6 else f"{x:.4g}"


def form(x):
    """The shape of nested lists as text, or those of its parts where these differ."""
    return " with ".join(map(form, x)) if None in shape(x) else str(shape(x))


def matches(result, wrong, atol):
    """Whether a result is what a known mistake gives: its numbers, or what passes its test."""
    if not callable(wrong):
        return close(result, wrong, atol)
    try:
        return bool(wrong(result))
    except (TypeError, IndexError, ValueError):  # a result of another form
        return False


def judge_case(case, module):
    """None if the student's code gives what the Case expects, else what to tell the student."""
    look = f"\nLook next at {case.look}." if case.look else ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = plain(case.call(module))
    except (Exception, SystemExit) as error:
        return f"case: {case.what}\n{explained(error, module)}{look}"
    if close(result, case.expected, case.atol):
        return None
    lines = [f"case: {case.what}", f"yours:    {short(result)}", f"expected: {short(case.expected)}"]
    if shape(result) != shape(case.expected):
        lines.append(f"The shapes differ: yours is {form(result)}, expected is {form(case.expected)}.")
    named = (message for message, wrong in case.mistakes.items() if matches(result, wrong, case.atol))
    if message := next(named, None):
        lines.append(f"This is what one gets by {message}.")
    return "\n".join(lines) + look


def judge_numbers(task, module):
    """Step 1."""
    return next(filter(None, (judge_case(case, module) for case in task.cases)), None)


def judge_probe(task, module):
    """Step 2, and the only one of a hunt."""
    judge = task.probe if isinstance(task, Exercise) else task.check
    try:
        return judge(module, lambda **settings: train(module, **settings))
    except (Exception, SystemExit) as error:
        return explained(error, module)


def judge_learning(task, module):
    """Step 3."""
    try:
        summary = train(module, **task.learn.settings).summary
    except (Exception, SystemExit) as error:
        return explained(error, module)
    mean, std, least = summary["eval_return_mean"], summary["eval_return_std"], task.learn.threshold
    if mean - std >= least:
        return None
    settings = " ".join(f"{name}={value}" for name, value in task.learn.settings.items())
    return (
        f"After {summary['global_step']:,} steps the evaluation is {mean:.1f} ± {std:.1f}: mean minus deviation is "
        f"{mean - std:.1f}, needed are {least}.\nThe numbers and the probe were right, so look for what they do not "
        f"show: other shapes, larger batches, a dtype, changes in place.\nThe settings were {settings}"
    )


def within(seconds, judge, *args):
    """What judge(*args) returns, or a complaint if it takes longer."""
    expired = threading.Event()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs that a shell put into the background ignore it
    timer = threading.Timer(seconds, lambda: (expired.set(), interrupt_main()))
    timer.daemon = True
    timer.start()
    try:
        return judge(*args)
    except KeyboardInterrupt:
        if not expired.is_set():
            raise
        return f"given up after {seconds} seconds. Is there a loop that never ends?"
    finally:
        timer.cancel()


def steps(task):
    """[(number, name, judge)] of an Exercise or a Hunt."""
    if not isinstance(task, Exercise):
        return [(2, "what the script does", judge_probe)]
    learning = f"learning on {task.learn.settings['env_id']}"
    return [
        (1, "fixed numbers", judge_numbers),
        (2, "a probe environment", judge_probe),
        (3, learning, judge_learning),
    ]


def grade(task, module, up_to=3):
    """Yield the Step of each step; after one that fails, the others are not reached."""
    failed = None
    for number, name, judge in steps(task):
        points = POINTS[number] if isinstance(task, Exercise) else sum(POINTS.values())
        if failed or number > max(up_to, steps(task)[0][0]):
            reason = f"not reached: step {failed} comes first" if failed else "was not asked for"
            yield Step(name, points, reason, reached=False)
            continue
        begun = time.time()
        problem = within(LIMITS[number], judge, task, module)
        failed = number if problem else None
        yield Step(name, points, problem, time.time() - begun)


# ------------------------------------------------------------------------------------------------------ command line


def work_file(task, folder=None):
    """The Path of the student's file: in `folder`, else in a handout beside this file, else in my_work."""
    path = Path(folder or (HERE if (HERE / task.script).is_file() else "my_work"), task.script)
    if not path.is_file():
        begin = f": begin with python exercises/start.py {task.name}" if (HERE / "start.py").is_file() else ""
        raise BadInput(f"there is no {path}{begin}")
    return path


def show(task, path, up_to):
    """Grade one file, printing as it goes. Returns the Steps."""
    print(f"{task.name}: {path}")
    results = []
    with loaded(path) as module:
        for i, step in enumerate(grade(task, module, up_to), 1):
            results.append(step)
            if not step.reached:
                continue
            verdict = "FAILED" if step.problem else f"passed in {step.seconds:.1f} s"
            print(f"  step {i} of {len(steps(task))}, {step.name}: {verdict}", flush=True)
            for line in (step.problem or "").splitlines():
                print(f"    {line}")
    if all(step.problem is None for step in results):
        print(f"  {task.name} is solved")
    return results


def write_json(path, tests):
    """Write results as Gradescope reads them: https://gradescope-autograders.readthedocs.io/en/latest/specs/"""
    try:
        Path(path).write_text(json.dumps({"tests": tests}, indent=1))
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error}") from None


def as_test(task, step):
    """A Step as Gradescope has it."""
    score = 0 if step.problem else step.points
    status = "failed" if step.problem else "passed"
    result = {"name": f"{task.name}: {step.name}", "score": score, "max_score": step.points, "status": status}
    return result | {"output": step.problem or "passed"}


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="of exercises and hunts")
    parser.add_argument("--up-to", type=int, choices=(1, 2, 3), default=3, metavar="STEP", help="the last step to take")
    parser.add_argument("--work", metavar="FOLDER", help="where the working copy is (default: my_work)")
    parser.add_argument("--json", metavar="FILE", help="write the results in Gradescope's format as well")
    args = parser.parse_args()
    chosen, tests, complaint, good = [find(name) for name in args.names], [], None, True
    for task in chosen:
        try:
            results = show(task, work_file(task, args.work), args.up_to)
        except BadInput as error:  # with --json there is a file all the same, or Gradescope would report a crash
            complaint = complaint or error
            tests.append(as_test(task, Step("the file", sum(POINTS.values()), str(error))))
            continue
        good &= not any(step.reached and step.problem for step in results)
        tests += [as_test(task, step) for step in results]
    if args.json:
        write_json(args.json, tests)
    if complaint:
        raise complaint
    return 0 if good else 1


if __name__ == "__main__":
    run_main(main)
