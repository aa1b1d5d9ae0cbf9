"""Judge a working copy that start.py wrote. An exercise has up to three steps, of which the first that fails is the
last; a hunt has one.

    1. the written functions on numbers that can be followed with a pencil,
    2. the same on random inputs, always the same ones: what comes out has to be what the original gives,
    3. a run that has to learn: the mean minus the deviation of its evaluation must reach a threshold (under a minute).

    python exercises/check.py gae                        # judges my_work/ppo.py
    python exercises/check.py gae --up-to 1              # the first step only
    python exercises/check.py gae --hint                 # a question that leads on; --hint 2 says more
    python exercises/check.py gae --json results.json    # writes the results in Gradescope's format as well

The exit code is 0 if all that was asked for has passed, 1 if something failed, 2 if there was nothing to judge.

The student's code never runs in this process, but in processes of runner.py, each in a folder of its own, with a limit
of time. What comes back from them is judged here.
"""

import argparse
import codecs
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from copies import is_begun
from mechanism import HERE, HUNTS, ROOT, BadInput, Reference, find, hints, judge, plain, quoted, run_main

NUMBERS = HERE / "numbers.json"  # of a handout, which has no originals
# Seconds until a process is ended, many times what it takes: an answer, one that trains a network, runs, imports.
LIMITS = {"answers": 10, "trains": 240, "learn": 1200, "score": 240, "load": 120}
STARTING = 120  # seconds until Python itself must have begun
BEGUN = '{"begun": true}\r\n'  # runner.py's first line; more may be there by the time that somebody looks
MOST = 2**26  # bytes of prints, or of answers
ENDED = "your code has ended its process"
PASSED_ON = """PATH HOME USERPROFILE APPDATA SYSTEMROOT PYTHONPATH PYTHONUSERBASE LD_LIBRARY_PATH DYLD_LIBRARY_PATH
OMP_NUM_THREADS KMP_DUPLICATE_LIB_OK SDL_VIDEODRIVER""".split()


def run_child(folder, script, **request):
    """Do what is asked for to a script in a process of its own, which works in a folder: (answers, prints, its end).

    Its end is "" if it came to it by itself.
    """
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= {"TMPDIR": str(folder), "TEMP": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}
    command = [sys.executable, "-u", str(HERE / "runner.py"), json.dumps(request | {"script": str(script)})]
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as printed:  # without a name: not to be replaced
        pipes = {"stdin": subprocess.DEVNULL, "stdout": answers, "stderr": printed}
        process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes)
        try:
            trains = request["what"] == "answers" and not find(request["task"]).quick
            end = attend(process, answers, printed, LIMITS["trains" if trains else request["what"]])
        finally:
            with contextlib.suppress(OSError):  # also what it has started itself, where there are process groups
                os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
            process.wait()
        answers.seek(0)
        printed.seek(0)
        found = []
        for line in answers.read(MOST).decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                words = json.loads(line)
                found += [words] if isinstance(words, dict) else []
        return found, printed.read(4000).decode(errors="replace"), end


def attend(process, answers, printed, limit):
    """Wait for a process: how it was ended, in words. Each answer may take `limit` seconds.

    A dot every ten seconds says that it is still at work.
    """
    allowed, told, size = STARTING, time.monotonic(), 0
    deadline = time.monotonic() + allowed
    while process.poll() is None:
        time.sleep(0.02)
        written = os.fstat(answers.fileno()).st_size
        if written > size:
            allowed = limit if written > len(BEGUN) else LIMITS["load"]
            deadline, size = time.monotonic() + allowed, written
        if time.monotonic() > deadline:
            return f"given up after {allowed:g} seconds. Is there a loop that never ends?"
        if max(os.fstat(file.fileno()).st_size for file in (answers, printed)) > MOST:
            return "your code prints without an end"
        if time.monotonic() > told + 10:
            told += 10
            print(" .", end="", flush=True)
    return ""


new_folder = functools.partial(tempfile.TemporaryDirectory, prefix="check-", ignore_cleanup_errors=True)


class Student:
    """A student's file, and what is done with it. It runs in other processes only."""

    def __init__(self, task, path, draws=True):
        self.task, self.path, self.printed = task, Path(path), ""
        self.draws = draws
        try:
            self.source = self.path.read_bytes().removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n")
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error}") from None
        if not NUMBERS.exists() and not is_begun(task, self.source.decode(errors="replace")):
            raise BadInput(f"{task.name} has not been begun in {path}: {start(task, self.path.parent)}")

    def ask(self, folder, **request):
        """The answers of a process, and how it was ended. BadInput if the file cannot be imported."""
        script = Path(folder, self.task.file)
        script.write_bytes(self.source)
        found, printed, end = run_child(folder, script, task=self.task.name, **request)
        self.printed = (self.printed + printed)[:4000]
        refused = next((str(each["refused"]) for each in found if "refused" in each), None)
        if refused is None and not any("loaded" in each for each in found):
            refused = f"{self.task.file} cannot be imported: {end or ENDED}"
        if refused is not None:
            raise BadInput(" ".join(refused.split())[:500].replace(self.task.file, str(self.path), 1))
        return [each for each in found if {"result", "error"} & each.keys()], end

    def answers(self):
        """What the code gives for each case, dicts. After one that does not end, or ends its process, comes a new one.

        Random inputs are not reached after a case that was ended: it fails the first step.
        """
        found, cases = [], self.task.calls()
        wanted, pencil = len(cases), sum(case.step == 1 for case in cases)
        while len(found) < wanted:
            with new_folder() as folder:
                answers, end = self.ask(folder, what="answers", first=len(found))
            found += answers
            if len(found) < wanted:
                found.append({"error": end or ENDED})
            if end and len(found) >= pencil:
                found += [{"error": "not reached: a case before did not end"}] * (wanted - len(found))
        return list(map(as_answer, found[:wanted]))

    def learned(self):
        """(mean, deviation) of an evaluation after a run, or what went wrong. The original evaluates, if it is here."""
        with new_folder() as folder, new_folder() as other:
            answers, end = self.ask(folder, what="learn")
            if not answers or "error" in answers[0]:
                return answers[0]["error"] if answers else end or ENDED
            Path(other, "run").mkdir()
            for path in Path(folder, "run").glob("checkpoint.*"):
                if path.is_file() and not path.is_symlink():
                    shutil.copyfile(path, Path(other, "run", path.name))
            script = self.path.resolve() if NUMBERS.exists() else ROOT / self.task.script
            answers, _, end = run_child(other, script, what="score", task=self.task.name)
        found = next((each for each in answers if {"result", "error"} & each.keys()), {"error": end or ENDED})
        return found.get("result") or found["error"]


def as_answer(found):
    """What a process wrote, as mechanism.answer makes it; anything else is an error."""
    try:
        notes = {"kinds": {str(blank): str(kind) for blank, kind in found.get("kinds", {}).items()}}
        notes |= {name: list(map(str, found.get(name, []))) for name in ("changed", "strays")}
        notes["calls"] = [[str(call), None if gave is None else plain(gave)] for call, gave in found.get("calls", [])]
        notes |= {"raised": str(found["raised"])} if "raised" in found else {}
        return ({"result": plain(found["result"])} if "result" in found else {"error": str(found["error"])}) | notes
    except (AttributeError, TypeError, ValueError, RecursionError):
        return {"error": "what came back is no answer", "kinds": {}, "changed": [], "strays": [], "calls": []}


def steps(task):
    """[(name, points)] of the steps of a task."""
    if not task.blanks:
        return [("what the script does", 100)]
    if not task.learn:
        return [("numbers to follow with a pencil", 70), ("random inputs", 30)]
    learning = f"learning {task.learn[0]['env_id']}"
    return [("numbers to follow with a pencil", 50), ("random inputs", 20), (learning, 30)]


def grade(task, student, up_to=3, begin=lambda words: None):
    """Yield the results of each of the first `up_to` steps; after one that fails, the others are not reached."""
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))[task.name] if NUMBERS.exists() else None
    reference = Reference(task, numbers)
    pencil = sum(case.step == 1 for case in reference.calls)
    failed = None
    for number, (name, points) in enumerate(steps(task)[:up_to], 1):
        title = f"{task.name}: {name}"
        if failed:
            yield as_tests(title, points, [f"not reached: step {failed} comes first"])
            continue
        student.printed = ""
        begin(f"step {number} of {len(steps(task))}, {name}")
        if number == 1:  # one process answers all of both steps
            answers = student.answers()
            problems = judge(answers, reference)
            found = problems[:pencil]
            found = with_picture(student, found, answers, reference)
        elif number == 2:
            found = [next(filter(None, problems[pencil:]), None)]
        else:
            found = [judge_learning(task, student.learned())]
        failed = number if any(found) else None
        yield as_tests(title, points, found, student.printed)


def with_picture(student, problems, answers, reference):
    """The problems; the first of them, where it can be drawn, as a picture beside the student's file as well."""
    i = next((i for i, problem in enumerate(problems) if problem), 0)
    table, yours, expected = reference.calls[i].table, answers[i].get("result"), reference.at(i)["result"]
    path = student.path.with_name(f"{student.task.name}.png")
    if not student.draws or not problems[i] or not table or not table.save(path, yours, expected):
        return problems
    return [*problems[:i], f"{problems[i]}\nAs a picture: {path}", *problems[i + 1 :]]


def as_tests(title, points, problems, printed=""):
    """Results as Gradescope has them: a test for each of these problems (None: passed), which share the points.

    https://gradescope-autograders.readthedocs.io/en/latest/specs/
    """
    lines = [f"printed | {line[:200]}" for line in printed.splitlines()]
    if len(lines) > 20:
        lines[20:] = ["printed | …"]
    tests = []
    for i, problem in enumerate(problems):
        most = points * (i + 1) // len(problems) - points * i // len(problems)
        score, status = (0, "failed") if problem else (most, "passed")
        name = f"{title}, case {i + 1}" if len(problems) > 1 else title
        output = printable("\n".join([problem or "passed", *lines]))
        tests.append({"name": name, "score": score, "max_score": most, "status": status, "output": output})
    return tests


def printable(text):
    """The text without what would move a cursor or change a terminal's colours."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def judge_learning(task, found):
    """None if a run has learnt enough, else what to tell the student."""
    settings, least = task.learn
    if isinstance(found, str):
        return found[:2000]
    mean, std = found
    if mean - std >= least:
        return None
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    return (
        f"At the end the evaluation is {mean:.1f} ± {std:.1f}: mean minus deviation is {mean - std:.1f}, needed are "
        f"{least}.\nThe numbers were right, so look for what they do not show: other shapes, larger batches, changes "
        f"to the rest of the script.\nThe settings were {words}"
    )


def start(task, folder):
    """The command that begins a task in a folder."""
    work = "" if str(folder) == "my_work" else f" --work {quoted(folder)}"
    return f"python exercises/start.py {task.name}{work}"


def work_file(task, folder=None):
    """The Path of the student's file: in `folder`, else in a handout beside this file, else in my_work."""
    path = Path(folder or (HERE if NUMBERS.exists() else "my_work"), task.file)
    if not path.is_file():
        raise BadInput(f"there is no {path}" + ("" if NUMBERS.exists() else f": {start(task, path.parent)}"))
    if path.is_symlink():  # it could lead to another's
        raise BadInput(f"{path} is a link; what is judged has to be a file")
    return path


def show(task, student, up_to, done):
    """Grade one file, printing as it goes, and calling done(tests) after each step. Returns whether all is right."""
    print(f"{task.name}: {student.path}", flush=True)
    good = True
    try:
        for tests in grade(task, student, up_to, lambda words: print(f"  {words}", end="", flush=True)):
            done(tests)
            failed = [test for test in tests if test["status"] == "failed"]
            if good:  # else the step was not reached
                right = len(tests) - len(failed)
                some = f", {right} of {len(tests)} cases are right" if right else ""
                output = failed[0]["output"] if failed else tests[0]["output"].removeprefix("passed").strip("\n")
                print(f": FAILED{some}" if failed else ": passed", *output.splitlines(), sep="\n    ", flush=True)
            good = good and not failed
    except BadInput:
        print(": not judged", flush=True)
        raise
    if good:
        whole = up_to >= len(steps(task))
        print(f"  {task.name} is solved" if whole else f"  {task.name} is right up to here")
        if whole and hints(task.name)[1]:
            print(textwrap.fill(hints(task.name)[1], 100))
    return good


def write_json(path, tests):
    """Write results as Gradescope reads them. A reader finds those of all steps so far, never a half."""
    try:
        written = Path(f"{path}.tmp")
        written.write_text(json.dumps({"tests": tests}, indent=1))
        os.replace(written, path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error}") from None


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="of exercises and hunts")
    parser.add_argument("--up-to", type=int, choices=(1, 2, 3), default=3, metavar="STEP", help="the last step to take")
    parser.add_argument("--work", metavar="FOLDER", help="where the working copy is (default: my_work)")
    parser.add_argument("--hint", nargs="?", type=int, const=1, choices=(1, 2), metavar="LEVEL", help="help me on")
    parser.add_argument("--json", metavar="FILE", help="write the results in Gradescope's format as well")
    args = parser.parse_args()
    if args.json and NUMBERS.exists():
        raise BadInput("a handout is for students: grade from the repository, whose originals judge what was learnt")
    tasks, tests, complaints, good = [find(name) for name in args.names], [], [], True
    if args.hint:
        for task in tasks:
            if task.name in HUNTS:
                raise BadInput(f"the hint of {task.name} is in the second line of its copy")
            print(textwrap.fill(f"{task.name}, hint {args.hint}: {hints(task.name)[0][args.hint - 1]}", 100))
        return 0

    def done(found):
        tests.extend(found)
        if args.json:
            write_json(args.json, tests)

    for task in tasks:
        try:
            good &= show(task, Student(task, work_file(task, args.work), draws=not args.json), args.up_to, done)
        except BadInput as error:  # with --json there is a file all the same, or Gradescope would report a crash
            complaints.append(str(error))
            done(as_tests(f"{task.name}: {task.file}", 100, [str(error)]))
    if args.json:
        print(f"{sum(test['score'] for test in tests)} of {sum(test['max_score'] for test in tests)} points")
    if complaints:
        raise BadInput("; ".join(dict.fromkeys(complaints)))  # each once
    return 0 if good else 1


if __name__ == "__main__":
    run_main(main)
