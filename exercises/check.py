"""Judge a working copy that start.py wrote. An exercise has three steps, of which the first that fails is the last:

    1. the written functions on fixed numbers (no time at all),
    2. a whole run in a probe environment, one so small that the right answer is known (seconds),
    3. a run that has to learn: the mean minus the deviation of its evaluation must reach a threshold (under a minute).

A hunt has one: whether the script does what it should.

    python exercises/check.py gae                        # judges my_work/ppo.py
    python exercises/check.py gae --up-to 1              # the fixed numbers only
    python exercises/check.py gae --hint                 # a question that leads on; --hint 2 and 3 say more
    python exercises/check.py gae --json results.json    # writes the results in Gradescope's format as well

The exit code is 0 if all that was asked for has passed, 1 if something failed, 2 if there was nothing to judge.

The student's code never runs here, but in processes of runner.py, which know no expected number. What they leave behind
is judged here: answers, and the weights of a run, which the original script loads and evaluates.
"""

import argparse
import contextlib
import csv
import functools
import io
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from cut import cut_calls
from forms import TABLES, BadInput, Exercise, close, find, hints, load_tables, plain, run_main, shape
from runner import in_words, loaded

load_tables()
HERE = Path(__file__).resolve().parent
ORIGINALS = HERE.parent if (HERE / "start.py").is_file() else None  # a handout has none
FOLDERS = [str(ORIGINALS), str(HERE / "scripts")] if ORIGINALS else []  # that originals stand in
POINTS = {1: 50, 2: 20, 3: 30}  # of the steps of an exercise; of 100 for the steps that there are
LIMITS = {1: 60, 2: 240, 3: 1200}  # seconds until a step is given up: many times what it takes
STARTING = 120  # seconds until Python itself must have begun
NOBODY = 65534  # the user whom a student's code runs as, if the grader is root
PASSED_ON = "PATH HOME LANG LC_ALL PYTHONPATH LD_LIBRARY_PATH OMP_NUM_THREADS".split()  # of the environment


class Failed(Exception):
    """What a student has to be told; the step has failed."""


@dataclass
class Trained:
    """What a run of the student's script left behind."""

    summary: dict  # mean and deviation of the original's own evaluation of the agent
    agent: object  # with the last weights, loaded by the original
    metrics: list  # the rows of metrics.csv, dicts of floats


@dataclass
class Part:
    """The result of one case, or of a step that is not made of cases."""

    name: str
    points: int
    problem: str | None  # None: passed


@dataclass
class Step:
    """The result of one step."""

    name: str
    parts: list
    printed: str = ""  # by the student's code
    seconds: float = 0.0
    reached: bool = True

    @property
    def problem(self):
        """The first thing that is wrong, or None."""
        return next((part.problem for part in self.parts if part.problem), None)


# ------------------------------------------------------------------------------------- a process for the student's code


@dataclass
class Child:
    """What is left of a process."""

    answers: list = field(default_factory=list)  # what it wrote, dicts
    printed: str = ""
    code: int | None = None  # its exit code; None if its time was up
    ended: str = ""  # the same in words
    files: dict = field(default_factory=dict)  # {name: bytes} of its run


@functools.cache
def other_user():
    """The options with which a process belongs to nobody in particular; {} if that cannot be done."""
    options = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    try:
        done = subprocess.run([sys.executable, "-c", "import numpy"], capture_output=True, cwd="/", **options)
    except (OSError, ValueError):  # we are not root, or this Python is for its owner only
        return {}
    return options if done.returncode == 0 else {}


def hidden_files():
    """What no student's code has to read: expected numbers, originals, tests."""
    if ORIGINALS is None:
        return [*(HERE / table for table in TABLES), HERE / "__pycache__"]
    return [HERE, ORIGINALS / "tests", ORIGINALS / ".git", ORIGINALS / "__pycache__", *ORIGINALS.glob("*.py")]


def run_child(source, request, table, seconds):
    """A process that does what `request` says to a file with this source, for so many seconds. Returns a Child."""
    child = Child()
    with tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True) as folder:
        grader, work = Path(folder, "grader"), Path(folder, "work")
        for path in (grader, work):
            path.mkdir()
        for name in ("runner.py", "forms.py", "probes.py"):
            shutil.copyfile(HERE / name, grader / name)
        request |= {"hidden": list(map(str, hidden_files())), "originals": FOLDERS}
        (grader / "table.py").write_text(table, encoding="utf-8")
        (grader / "request.json").write_text(json.dumps(request))
        (work / request["script"]).write_bytes(source)
        for path in (Path(folder), grader, *grader.iterdir(), work):
            path.chmod(0o755)
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= {"TMPDIR": str(work), "PYTHONDONTWRITEBYTECODE": "1"}
        if user := other_user():
            os.chown(work, NOBODY, NOBODY)
            environment["HOME"] = str(work)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        command = [sys.executable, "-u", str(grader / "runner.py"), str(grader / "request.json")]
        process = subprocess.Popen(command, cwd=work, env=environment, start_new_session=True, **pipes, **user)
        try:
            child.printed, child.code = attend(process, work / "answers.jsonl", seconds)
        finally:  # also what it has started itself
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
        for line in read_bounded(work / "answers.jsonl").decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(line)
                child.answers += [found] if isinstance(found, dict) else []
        for name in ("metrics.csv", "checkpoint.pt", "checkpoint.npz", "checkpoint.json"):
            if content := read_bounded(work / "run" / name, 2**29):
                child.files[name] = content
    return child


def attend(process, begun, seconds):
    """Wait until a process ends, at most `seconds` after the file `begun` is there. Returns (its prints, exit code).

    Of its prints the first 4,000 bytes are kept; all else is read, so that it never waits, and forgotten.
    """
    printed, pipe, deadline, counting = b"", process.stdout, time.monotonic() + STARTING, False
    os.set_blocking(pipe.fileno(), False)
    while True:
        running = process.poll() is None
        if not counting and begun.exists():
            deadline, counting = time.monotonic() + seconds, True
        ready, _, _ = select.select([pipe], [], [], 0.02 if running else 0)
        part = os.read(pipe.fileno(), 2**16) if ready else None
        if part:
            printed = (printed + part)[:4000]
        if part == b"" and running:  # it has closed its end
            time.sleep(0.02)
        if not (running or part) or time.monotonic() > deadline:
            return printed.decode(errors="replace"), process.returncode


def read_bounded(path, most=2**24):
    """The bytes of an ordinary file, no link and no pipe, of at most this size; else none."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with open(number, "rb") as file:
        content = file.read(most + 1) if stat.S_ISREG(os.fstat(number).st_mode) else b""
        return content if len(content) <= most else b""


class Student:
    """A student's file, and what is done with it. It runs in other processes only."""

    def __init__(self, task, path):
        self.task, self.path = task, Path(path)
        try:
            self.source = self.path.read_bytes()
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error}") from None
        self.printed = ""
        self.given(LIMITS[1])

    def given(self, seconds):
        """All that follows may take so long, in seconds."""
        self.limit, self.deadline = seconds, time.monotonic() + seconds

    def ask(self, others=(), **request):
        """A Child that has done what is asked for. BadInput if the file cannot be imported; Failed if it cheats."""
        table = cut_calls((HERE / self.task.table).read_text(encoding="utf-8"), self.task.name, *others)
        request |= {"script": self.task.file}
        child = run_child(self.source, request, table, max(self.deadline - time.monotonic(), 0.1))
        child.ended = f"your code has ended the process that it ran in (exit code {child.code})"
        if child.code is None:
            child.ended = f"given up after {self.limit:g} seconds. Is there a loop that never ends?"
        self.printed = (self.printed + child.printed)[:4000]
        opened = [answer["opened"] for answer in child.answers if isinstance(answer.get("opened"), list)]
        if opened := sorted({str(name)[:50] for names in opened for name in names}):
            raise Failed(
                f"your file imports or opens an original of the repository, {', '.join(opened)}. Write the functions "
                "yourself: what is imported is not judged."
            )
        refused = next((str(answer["refused"]) for answer in child.answers if "refused" in answer), None)
        if refused is None and not any("loaded" in answer for answer in child.answers):
            refused = f"{self.task.file} cannot be imported: {child.ended}"
        if refused is not None:
            refused = " ".join(refused.split())[:500]
            raise BadInput(refused.replace(self.task.file, str(self.path), 1))
        child.answers = [answer for answer in child.answers if {"result", "error"} & answer.keys()]
        return child

    def answers(self):
        """What the code gives for each case, dicts; where it ends its process, the next case has a new one."""
        found, blanks, wanted = [], list(getattr(self.task, "blanks", ())), len(self.task.cases)
        while len(found) < wanted:
            child = self.ask(first=len(found), blanks=blanks)
            found += child.answers
            if len(found) < wanted:
                found.append({"error": child.ended})
            if child.code is None:
                found += [{"error": "not reached: a case before took all the time"}] * (wanted - len(found))
        return found[:wanted]

    def train(self, before=None, **settings):
        """Run the student's script from beginning to end. Returns a Trained; Failed if it does not come to its end.

        Only `settings` and the defaults of Args count, not the script's TUNED: its table may change, the checks must
        not. `before` is a function of the table that changes the script's module first.
        """
        others = [before.__name__] if before else []
        child = self.ask(others, settings=settings, before=before and before.__name__)
        end = child.answers[0] if child.answers else {"error": child.ended}
        if "error" in end:
            raise Failed(str(end["error"])[:2000])
        with tempfile.TemporaryDirectory() as folder:
            for name, content in child.files.items():
                Path(folder, name).write_bytes(content)
            return trained(original(self.task, self.path), folder, settings)


@functools.cache
def imported(path):
    """The script at `path`, imported once and for all."""
    with contextlib.redirect_stdout(io.StringIO()), loaded(path) as module:
        return module


def original(task, path):
    """The module of the original script: it loads and evaluates what a student's has learnt.

    A handout has none. There the student's file takes its place, in this process: who cheats cheats himself only.
    """
    return imported(ORIGINALS / task.script if ORIGINALS else path)


def trained(module, folder, settings):
    """What a run has left in a folder, as a Trained: `module`, the original, loads the weights and evaluates them."""
    if not hasattr(module, "load_agent"):
        return trained_small(module, folder, settings)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = module.Args(**settings, evaluate=str(folder), model="last")
        try:
            agent = module.load_agent(args)
        except module.UserError as error:
            raise Failed(f"what your run has saved does not fit the script's own networks: {error}") from None
        mean, std = module.evaluate(agent, args, args.eval_episodes, args.seed + module.EVALUATION)
    with open(f"{folder}/metrics.csv") as file:
        metrics = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]
    return Trained({"eval_return_mean": mean, "eval_return_std": std}, agent, metrics)


def trained_small(module, folder, settings):
    """As `trained`, for a small script: its make_agent builds the network, its evaluate plays. Tables are numbers."""
    args, weights, numbers = module.Args(**settings), Path(folder, "checkpoint.pt"), Path(folder, "checkpoint.json")
    if weights.is_file():
        import torch

        agent = module.make_agent(args)
        try:
            agent.load_state_dict(torch.load(weights, weights_only=True))
        except RuntimeError as error:
            raise Failed(f"what your train has returned does not fit the script's own network: {error}") from None
    else:
        agent = plain(json.loads(numbers.read_text()))
    mean, std = module.evaluate(agent, args) if hasattr(module, "evaluate") else (None, None)
    return Trained({"eval_return_mean": mean, "eval_return_std": std}, agent, [])


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
    except Exception:  # a result of another form
        return False


def kind_in_words(kind):
    """A kind as runner.py notes it, in words: "(float32 tensor, int)"."""
    if isinstance(kind, str):
        return kind
    return f"({', '.join(map(kind_in_words, kind[:3]))}{', …' if len(kind) > 3 else ''})"


def is_kind(kind, wanted):
    """Whether a kind is the one that is wanted; "array" stands for arrays of all dtypes."""
    if isinstance(wanted, tuple):
        return isinstance(kind, list) and len(kind) == len(wanted) and all(map(is_kind, kind, wanted))
    return isinstance(kind, str) and kind.endswith(wanted)


def wrong_kind(answer, gives):
    """What to tell a student whose functions return, or change, what they should not; None if they do not."""
    kinds = answer.get("kinds") or {}
    for blank, wanted in gives.items():
        if blank in kinds and kinds[blank] != "NoneType" and not is_kind(kinds[blank], wanted):
            return f"{blank} returned: {kind_in_words(kinds[blank])}. Asked for is: {kind_in_words(wanted)}."
    if changed := answer.get("changed"):
        names = ", ".join(map(str, changed))
        return f"changed in place: {names}. Whoever called still needs the old numbers; make a new tensor or array."


def judge_case(case, answer, gives=()):
    """None if the student's answer is what the Case expects, else what to tell the student."""
    look = f"\nLook next at {case.look}." if case.look else ""
    told = [f"case: {case.what}"]
    try:
        if kind := wrong_kind(answer, dict(gives)):
            return "\n".join([*told, kind]) + look
        if "result" not in answer:
            return "\n".join([*told, str(answer["error"])[:2000]]) + look
        result = plain(answer["result"])
        if close(result, case.expected, case.atol):
            return None
        told += [f"yours:    {short(result)[:1000]}", f"expected: {short(case.expected)}"]
        if shape(result) != shape(case.expected):
            told.append(f"The shapes differ: yours is {form(result)[:200]}, expected is {form(case.expected)}.")
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
        return "\n".join([*told, "what came back is no answer"])  # runner.py never writes such a thing
    named = (message for message, wrong in case.mistakes.items() if matches(result, wrong, case.atol))
    if message := next(named, None):
        told.append(f"This is what one gets by {message}.")
    return "\n".join(told) + look


def judge_numbers(task, student, points):
    """Step 1, or a hunt that is judged by calls: a Part for each case, with equal shares of the points."""
    equal = shares([1] * len(task.cases), points)
    judged = [judge_case(case, found, getattr(task, "gives", ())) for case, found in zip(task.cases, student.answers())]
    return [Part(f"case {i}", share, problem) for i, (share, problem) in enumerate(zip(equal, judged), 1)]


def judge_probe(task, student):
    """Step 2, or a hunt that is judged by a run."""
    judge = task.probe if isinstance(task, Exercise) else task.check
    return judge(original(task, student.path), student.train)


def judge_learning(task, student):
    """Step 3."""
    summary = student.train(**task.learn.settings).summary
    mean, std, least = summary["eval_return_mean"], summary["eval_return_std"], task.learn.threshold
    if mean - std >= least:
        return None
    settings = " ".join(f"{name}={value}" for name, value in task.learn.settings.items())
    return (
        f"At the end the evaluation is {mean:.1f} ± {std:.1f}: mean minus deviation is {mean - std:.1f}, needed are "
        f"{least}.\nThe numbers and the probe were right, so look for what they do not show: other shapes, larger "
        f"batches, a dtype, changes in place.\nThe settings were {settings}"
    )


def steps(task):
    """[(number, name, judge)] of an Exercise or a Hunt."""
    if not isinstance(task, Exercise):
        return [(2, "what the script does", judge_numbers if task.cases else judge_probe)]
    found = [(1, "fixed numbers", judge_numbers)]
    if task.probe:
        found.append((2, "a probe environment", judge_probe))
    if task.learn:
        where = f" on {task.learn.settings['env_id']}" if "env_id" in task.learn.settings else ""
        found.append((3, f"learning{where}", judge_learning))
    return found


def shares(weights, total=100):
    """Whole points in proportion to the weights, which add up to `total`."""
    ends = [total * sum(weights[: i + 1]) // sum(weights) for i in range(len(weights))]
    return [end - begin for begin, end in zip([0, *ends], ends)]


def grade(task, student, up_to=3):
    """Yield the Step of each of the first `up_to` steps; after one that fails, the others are not reached."""
    if getattr(task, "members", ()):
        yield grade_pool(task, student)
        return
    failed, points_of = None, shares([POINTS[number] for number, _, _ in steps(task)])
    for i, ((number, name, judge), points) in enumerate(zip(steps(task), points_of), 1):
        if i > up_to:
            return
        if failed:
            yield Step(name, [Part(name, points, f"not reached: step {failed} comes first")], reached=False)
            continue
        begun, student.printed = time.time(), ""
        student.given(LIMITS[number])
        try:
            if judge is judge_numbers:
                parts = judge(task, student, points)
            else:
                parts = [Part(name, points, judge(task, student))]
        except (Failed, BadInput) as error:
            if i == 1 and isinstance(error, BadInput):
                raise
            parts = [Part(name, points, str(error))]
        except Exception as error:  # what a forged run left behind can break a probe in any way
            parts = [Part(name, points, f"what your run has left behind is of no use: {in_words(error)}")]
        step = Step(name, parts, student.printed, time.time() - begun)
        failed = i if step.problem else None
        yield step


def grade_pool(pool, student):
    """The Step of a hunt whose bug was drawn: the checks of all hunts on this script have to pass, whichever it was."""
    begun, printed, problem = time.time(), "", None
    for name in pool.members:
        (step,) = grade(find(name), Student(find(name), student.path))
        printed, problem = printed + step.printed, step.problem
        if problem:
            break
    name = "what the script does"
    return Step(name, [Part(name, sum(POINTS.values()), problem)], printed, time.time() - begun)


# ------------------------------------------------------------------------------------------------------ command line


def work_file(task, folder=None):
    """The Path of the student's file: in `folder`, else in a handout beside this file, else in my_work."""
    path = Path(folder or (HERE if (HERE / task.file).is_file() else "my_work"), task.file)
    if not path.is_file():
        begin = f": begin with python exercises/start.py {task.name}" if ORIGINALS else ""
        raise BadInput(f"there is no {path}{begin}")
    if path.is_symlink():  # it could lead to the original
        raise BadInput(f"{path} is a link; what is judged has to be a file")
    return path


def show(task, student, up_to, done):
    """Grade one file, printing as it goes, and calling done(step) after each. Returns the Steps."""
    print(f"{task.name}: {student.path}", flush=True)
    results = []
    for i, step in enumerate(grade(task, student, up_to), 1):
        results.append(step)
        done(step)
        if not step.reached:
            continue
        verdict = "FAILED" if step.problem else f"passed in {step.seconds:.1f} s"
        right = sum(part.problem is None for part in step.parts)
        if step.problem and right:
            verdict += f", {right} of {len(step.parts)} cases are right"
        print(f"  step {i} of {len(steps(task))}, {step.name}: {verdict}")
        for line in [*(step.problem or "").splitlines(), *printed_lines(step)]:
            print(f"    {printable(line)}", flush=True)
    if all(step.problem is None for step in results):
        whole = len(results) == len(steps(task))
        print(f"  {task.name} is solved" if whole else f"  {task.name} is right up to here")
        if whole and hints(task.name)[1]:
            print(*textwrap.wrap(hints(task.name)[1], 100), sep="\n")
    return results


def printable(text):
    """The text without what would move a cursor or change a terminal's colours."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def printed_lines(step):
    """What the student's code printed in a step, each line marked as his own, or hers."""
    lines = step.printed.splitlines()
    return [f"printed | {line[:200]}" for line in lines[:20]] + ["printed | …"] * (len(lines) > 20)


def write_json(path, tests):
    """Write results as Gradescope reads them: https://gradescope-autograders.readthedocs.io/en/latest/specs/"""
    path = Path(path)
    try:
        written = path.with_name(f"{path.name}.tmp")
        written.write_text(json.dumps({"tests": tests}, indent=1))
        os.replace(written, path)  # a reader finds the results of all steps so far, never a half
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error}") from None


def as_tests(task, step):
    """A Step as Gradescope has it: a test for each of its parts."""
    tests = []
    for part in step.parts:
        name = f"{task.name}: {step.name}" + (f", {part.name}" if part.name != step.name else "")
        score, status = (0, "failed") if part.problem else (part.points, "passed")
        output = printable("\n".join([part.problem or "passed", *printed_lines(step)]))
        tests.append({"name": name, "score": score, "max_score": part.points, "status": status, "output": output})
    return tests


def note_progress(folder, name, results):
    """Remember in a folder of working copies how many steps of an exercise are passed, for start.py --progress."""
    path = Path(folder, ".progress.json")
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_text()) if path.exists() else {}
        passed = sum(step.problem is None for step in results)
        if passed == len(results):  # with --up-to, the steps that were not taken now may have been passed before
            passed = max(passed, known.get(name, [0])[0])
        known[name] = [passed, len(steps(find(name)))]
        path.write_text(json.dumps(known, indent=1))


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="of exercises and hunts")
    parser.add_argument("--up-to", type=int, choices=(1, 2, 3), default=3, metavar="STEP", help="the last step to take")
    parser.add_argument("--work", metavar="FOLDER", help="where the working copy is (default: my_work)")
    parser.add_argument("--hint", nargs="?", type=int, const=1, choices=(1, 2, 3), metavar="LEVEL", help="help me on")
    parser.add_argument("--json", metavar="FILE", help="write the results in Gradescope's format as well")
    args = parser.parse_args()
    if args.json and ORIGINALS is None:
        raise BadInput("a handout is for students: grade from the repository, whose originals judge what was learnt")
    chosen, tests, complaint, good = [find(name) for name in args.names], [], None, True

    if args.hint:
        for task in chosen:
            found = hints(task.name)[0][: args.hint] or [getattr(task, "hint", "")]
            print(f"{task.name}:", *(textwrap.fill(f"{i}. {hint}", 100) for i, hint in enumerate(found, 1)), sep="\n")
        return 0

    def done(task, step):
        tests.extend(as_tests(task, step))
        if args.json:
            write_json(args.json, tests)

    for task in chosen:
        try:
            student = Student(task, work_file(task, args.work))
            results = show(task, student, args.up_to, functools.partial(done, task))
        except BadInput as error:  # with --json there is a file all the same, or Gradescope would report a crash
            complaint = complaint or error
            done(task, Step(task.file, [Part(task.file, sum(POINTS.values()), str(error))]))
            continue
        good &= not any(step.problem for step in results)
        if not args.json and str(student.path.parent.resolve()) not in FOLDERS:
            note_progress(student.path.parent, task.name, results)
    if complaint:
        raise complaint
    return 0 if good else 1


if __name__ == "__main__":
    run_main(main)
