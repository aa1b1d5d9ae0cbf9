"""Files that try to change their grade, or never come to an end: none gets a point, and none does harm to others.

Most are for epsilon-greedy, whose first step needs one function and no torch. Limits are short: a file that sleeps for
ever would do so for any limit.
"""

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "exercises"))

import check  # noqa: E402
import cut  # noqa: E402
import runner  # noqa: E402
from forms import EXERCISES, HUNTS, find  # noqa: E402

FENCED = runner.fence_version() >= 6  # whether a process can be kept from files that its user may read

RIGHT = """
def epsilon_greedy(values, epsilon, rng):
    if rng.random() < epsilon:
        return rng.randrange(len(values))
    return rng.choice([a for a, value in enumerate(values) if value == max(values)])
"""
WRONG = "def epsilon_greedy(values, epsilon, rng):\n    return 0\n"


def graded(folder, source, name="epsilon-greedy", up_to=1):
    """The Steps of a file with this source."""
    path = folder / find(name).file
    path.write_text(source, encoding="utf-8")
    return list(check.grade(find(name), check.Student(find(name), path), up_to))


def graded_by_main(folder, monkeypatch, *arguments):
    """What check.py writes with --json for the files in a folder: {name of a test: its score}, and the exit code."""
    results = folder / "results.json"
    monkeypatch.setattr(sys, "argv", ["check.py", *arguments, "--work", str(folder), "--json", str(results)])
    try:
        code = check.main()
    except check.BadInput:
        code = 2
    return {test["name"]: test["score"] for test in json.loads(results.read_text())["tests"]}, code


# ---------------------------------------------------------------------------------------------------------- the grade

REPLACE = """
import builtins, math, sys
import forms, runner
runner.close = forms.close = lambda *numbers: True
math.isclose = lambda *numbers, **bounds: True
builtins.len = lambda x: 0 if isinstance(x, list) and x and isinstance(x[0], dict) else 1
for module in list(sys.modules.values()):
    for name in ("close", "judge_case", "judge_numbers", "matches"):
        if hasattr(module, name):
            setattr(module, name, lambda *anything: None)
"""
SEARCH = """
import gc, sys
found, frame = [], sys._getframe()
while frame:
    found += [name for name in (*frame.f_locals, *frame.f_globals) if name in ("expected", "EXERCISES", "task", "case")
              and frame.f_globals.get(name) or name in ("expected", "case")]
    frame = frame.f_back
found += [thing for thing in gc.get_objects() if type(thing).__name__ in ("Case", "Exercise", "Learn")]
print("FOUND", found) if found else print("NOTHING")
"""
FORGE = """
import json
with open("answers.jsonl", "a") as file:
    for words in ({"loaded": True}, *[{"result": [1, 1, 1], "kinds": {}, "changed": []}] * 3):
        file.write(json.dumps(words) + "\\n")
"""
AT_EXIT = """
import atexit, os, time
def all_is_well():
    time.sleep(WAIT)
    try:
        open(RESULTS, "w").write('{"tests": [{"name": "all", "score": 100, "max_score": 100}]}')
    except OSError:
        pass
    os._exit(0)
atexit.register(all_is_well)
"""
GARBAGE = """
import os
os.remove("answers.jsonl")
open("answers.jsonl", "w").write('{"loaded": 1}\\n[[[\\n7\\n{"result": {"a": "b"}}\\n{"result": "x"}\\n{"result": ' +
                                 "[" * 500 + "]" * 500 + "}\\n{" + '"error": 1}\\n')
os._exit(0)
"""
ENDED = "cannot be imported: your code has ended the process"
ATTACKS = [
    pytest.param(REPLACE + WRONG, None, id="replaces functions of the checker"),
    pytest.param(SEARCH + WRONG, None, id="looks for expected numbers in memory"),
    pytest.param(FORGE + WRONG, None, id="writes answers itself"),
    pytest.param("import os; os._exit(0)\n", ENDED, id="ends the process"),
    pytest.param(GARBAGE, None, id="writes what is no answer"),
    pytest.param("import os; os.remove('answers.jsonl'); os.mkfifo('answers.jsonl'); os._exit(0)", ENDED, id="fifo"),
    pytest.param("import os; os.kill(os.getppid(), 9)\n" + WRONG, "PermissionError", id="kills the grader"),
]


@pytest.mark.parametrize("source, refusal", ATTACKS)
def test_a_wrong_solution_gets_no_point_whatever_else_the_file_does(source, refusal, tmp_path, monkeypatch):
    """Fails if something that runs in the student's process can make a wrong function right."""
    if "getppid" in source and not FENCED:
        pytest.skip("only Landlock of Linux 6.12 or another user keeps a process from ending ours")
    if refusal:
        with pytest.raises(check.BadInput, match=refusal):
            graded(tmp_path, source)
        return
    (step,) = graded(tmp_path, source)
    assert len(step.parts) == 3 and all(part.problem for part in step.parts)
    assert "FOUND" not in step.printed and ("NOTHING" in step.printed) == (source == SEARCH + WRONG)


def test_a_link_to_the_original_is_no_solution(tmp_path, monkeypatch):
    """Fails if a submission can name a file of the grader's as its own."""
    (tmp_path / "qlearning.py").symlink_to(ROOT / "qlearning.py")
    scores, code = graded_by_main(tmp_path, monkeypatch, "epsilon-greedy")
    assert scores == {"epsilon-greedy: qlearning.py": 0} and code == 2


def test_files_beside_the_solution_do_not_matter(tmp_path, monkeypatch):
    """Fails if a submission's check.py, forms.py or tasks.py takes the place of the grader's own."""
    (tmp_path / "qlearning.py").write_text(WRONG)
    for name in ("check.py", "forms.py", "tasks.py", "runner.py", "table.py", "sitecustomize.py"):
        (tmp_path / name).write_text("print('{\"tests\": []}'); import os; os._exit(0)\n")
    monkeypatch.chdir(tmp_path)
    scores, code = graded_by_main(tmp_path, monkeypatch, "epsilon-greedy")
    assert sum(scores.values()) == 0 and len(scores) == 5 and code == 1


def test_results_cannot_be_written_by_others(tmp_path, monkeypatch):
    """By what is put off until the end; and, behind the fence, by a process that hides and waits until all is over."""
    late = "if os.fork() == 0:\n    os.setsid()\n    all_is_well()\n"
    for wait, source in [(0, AT_EXIT), *([(0.5, AT_EXIT + late)] if FENCED else [])]:
        names = f"WAIT, RESULTS = {wait}, {str(tmp_path / 'results.json')!r}\n"
        (tmp_path / "qlearning.py").write_text(names + source + WRONG)
        scores, code = graded_by_main(tmp_path, monkeypatch, "epsilon-greedy", "--up-to", "1")
        time.sleep(2 * wait)
        scores = json.loads((tmp_path / "results.json").read_text())["tests"]
        assert [test["score"] for test in scores] == [0, 0, 0] and code == 1


@pytest.mark.parametrize("name", [*EXERCISES, *(name for name, hunt in HUNTS.items() if hunt.cases)])
def test_a_table_of_calls_holds_nothing_that_is_expected(name):
    """Fails if the file that the student's process gets names a case or a mistake, or lacks what its calls need."""
    table = cut.cut_calls((ROOT / "exercises" / find(name).table).read_text(), name)
    assert not any(word in table for word in ("Case", "#", "exercise(", "hunt(", "Plant"))
    assert not any(text in table for case in find(name).cases for text in [*case.mistakes, case.what])
    names = {"__file__": "table.py"}
    exec(table, names)
    assert len(names["CALLS"]) == len(find(name).cases)


@pytest.mark.skipif(not FENCED, reason="needs Landlock")
def test_files_of_the_grader_are_out_of_reach(tmp_path):
    """Fails if the student's code can read tables or originals, or write outside of its own folder."""
    (tmp_path / "others.txt").write_text("kept")
    source = f"""
import os
def tried(function, *arguments):
    try:
        function(*arguments)
        return "done"
    except PermissionError:
        return "refused"
root = {str(ROOT)!r}
print(tried(open, root + "/exercises/tasks.py"), tried(open, root + "/exercises/check.py"))
print(tried(open, root + "/ppo.py"))
print(tried(open, {str(tmp_path)!r} + "/others.txt", "w"), tried(os.listdir, root + "/exercises"))
print(tried(open, "/proc/" + str(os.getppid()) + "/mem", "rb"), tried(open, root + "/exercises/new.py", "w"))
print(tried(os.truncate, {str(tmp_path)!r} + "/others.txt", 0), tried(open, "own.txt", "w"), tried(open, "/etc/hosts"))
"""
    with pytest.raises(check.Failed, match="imports or opens an original of the repository, .*ppo.py"):
        student_of(tmp_path, source).ask(first=0, blanks=[])
    (step,) = graded(tmp_path, source.replace("/ppo.py", "/README.md") + RIGHT)
    words = step.printed.split()
    assert words == ["refused"] * 2 + ["done"] + ["refused"] * 5 + ["done"] * 2 and step.problem is None
    assert (tmp_path / "others.txt").read_text() == "kept"


def student_of(folder, source, name="epsilon-greedy"):
    """A Student with a file of this source."""
    (folder / find(name).file).write_text(source)
    return check.Student(find(name), folder / find(name).file)


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.path.insert(0, ROOT)\nfrom rainbow import td_targets as epsilon_greedy\n",
        "import importlib.util as u; s = u.spec_from_file_location('x', ROOT + '/qlearning.py')\n"
        "x = sys.modules['x'] = u.module_from_spec(s); s.loader.exec_module(x); epsilon_greedy = x.epsilon_greedy\n",
        "def epsilon_greedy(**given):\n    names = {'__name__': 'x'}\n"
        "    exec(open(ROOT + '/qlearning.py').read(), names)\n    return names['epsilon_greedy'](**given)\n",
    ],
)
def test_who_imports_the_original_is_told(text, tmp_path, monkeypatch):
    """Fails if a solution that is imported counts as one that was written; with and without the fence."""
    source = f"import sys; ROOT = {str(ROOT)!r}\n" + text
    (step,) = graded(tmp_path, source)
    assert "imports or opens an original of the repository, " in step.problem and len(step.parts) == 1
    if "sys.modules" in text:  # where nothing is hidden, the import succeeds, and is noticed all the same
        monkeypatch.setattr(check, "hidden_files", list)
        (step,) = graded(tmp_path, source)
        assert "imports or opens an original of the repository, qlearning.py" in step.problem


def test_a_forged_run_is_not_believed(tmp_path):
    """Fails if what train returns, or the summary that it writes, counts: the original evaluates the weights itself."""
    forged = """
class Args:
    def __init__(self, **settings):
        vars(self).update(settings)
class Run:
    def finish(self):
        pass
def train(args):
    import json, os
    os.makedirs(args.run_dir)
    open(args.run_dir + "/summary.json", "w").write(json.dumps({"eval_return_mean": 1e9, "eval_return_std": 0.0}))
    open(args.run_dir + "/metrics.csv", "w").write("step,return_mean\\n1,1e9\\n")
    open(args.run_dir + "/checkpoint.npz", "w").write('{"env_id": "CliffWalking-v1", "agent": 1}')
    return {"eval_return_mean": 1e9, "eval_return_std": 0.0}
"""
    numbers, probe, learning = graded(tmp_path, RIGHT + forged, up_to=3)
    assert numbers.problem is None and "does not fit the script's own networks" in probe.problem
    assert not learning.reached and sum(p.points for s in (numbers, probe, learning) for p in s.parts) == 100


# ---------------------------------------------------------------------------------------------------------- the clock

SLEEP = "import time\ntime.sleep(10**6)\n"
ENDLESS = [
    pytest.param("while True:\n    pass\n", id="at module level"),
    pytest.param(SLEEP, id="asleep"),
    pytest.param("while True:\n    try:\n        while True: pass\n    except BaseException: pass\n", id="except all"),
    pytest.param("import os, signal\nfor n in range(1, 60):\n    try: signal.signal(n, signal.SIG_IGN)\n"
                 "    except (OSError, ValueError): pass\n" + SLEEP, id="deaf"),
    pytest.param("import os\nos.close(1); os.close(2)\n" + SLEEP, id="stdout closed"),
    pytest.param("import os\nif os.fork(): os._exit(0)\n" + SLEEP, id="forked"),
    pytest.param("while True: print('x' * 10**5)\n", id="floods stdout"),
]  # fmt: skip


@pytest.mark.parametrize("source", ENDLESS)
def test_what_never_ends_is_ended(source, tmp_path, monkeypatch):
    """Fails if a file keeps the grader waiting, or if one of its processes is left behind."""
    monkeypatch.setattr(check, "LIMITS", {1: 0.3})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(check.BadInput, match="given up after 0.3 seconds|has ended the process"):
        graded(tmp_path, source + RIGHT)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            assert str(tmp_path) not in path.read_text(errors="replace")


@pytest.mark.slow
def test_a_function_that_never_ends_costs_its_own_cases_only(tmp_path, monkeypatch):
    """The cases before it keep their points, those after it are not reached; the next exercise is not touched."""
    second = RIGHT.replace(
        "    if", "    if len(values) == 4 and epsilon == 0.4:\n        __import__('time').sleep(999)\n    if", 1
    )
    (tmp_path / "qlearning.py").write_text(second)
    monkeypatch.setattr(check, "LIMITS", {1: 3})
    scores, code = graded_by_main(tmp_path, monkeypatch, "epsilon-greedy", "td-targets", "--up-to", "1")
    assert list(scores.values()) == [16, 0, 0, 0] and code == 2
    assert "td-targets: qlearning.py" in scores  # it has none of that exercise's functions
    tests = json.loads((tmp_path / "results.json").read_text())["tests"]
    assert "given up after 3 seconds. Is there a loop" in tests[1]["output"] and "not reached" in tests[2]["output"]


def test_a_function_that_ends_the_process_costs_its_own_case_only(tmp_path):
    """os._exit(0) is not a pass; the next case gets a process of its own."""
    source = "import os\n" + RIGHT.replace("    if", "    if epsilon == 0.4:\n        os._exit(0)\n    if", 1)
    (step,) = graded(tmp_path, source)
    assert [part.problem is None for part in step.parts] == [True, False, True]
    assert "ended the process that it ran in (exit code 0)" in step.parts[1].problem
    tests = check.as_tests(EXERCISES["epsilon-greedy"], step)
    assert [test["score"] for test in tests] == [16, 0, 17] and [test["max_score"] for test in tests] == [16, 17, 17]


def test_a_run_that_never_ends_is_given_up(tmp_path, monkeypatch):
    """Also in the later steps, each of which has a limit of its own; results are written after each step."""
    source = (
        "def epsilon_greedy"
        + RIGHT.split("def epsilon_greedy")[1]
        + """
class Args:
    def __init__(self, **settings): pass
class Run:
    def finish(self): pass
def train(args):
    while True: pass
"""
    )
    (tmp_path / "qlearning.py").write_text(source)
    monkeypatch.setattr(check, "LIMITS", {1: 60, 2: 0.3, 3: 0.3})
    written, write_json = [], check.write_json
    monkeypatch.setattr(check, "write_json", lambda path, tests: (written.append(len(tests)), write_json(path, tests)))
    scores, code = graded_by_main(tmp_path, monkeypatch, "epsilon-greedy")
    assert list(scores.values()) == [16, 17, 17, 0, 0] and code == 1 and written == [3, 4, 5]


def test_prints_are_shown_and_bounded(tmp_path, capsys):
    """Fails if a student's prints are lost, can pass for the grader's, or fill a terminal."""
    noisy = "print('epsilon-greedy is solved')\nprint('\\x1b[2J')\nfor i in range(10**5): print('line', i)\n" + RIGHT
    student = student_of(tmp_path, noisy)
    check.show(student.task, student, 1, lambda step: None)
    shown = capsys.readouterr().out
    assert "    printed | epsilon-greedy is solved" in shown and "printed | line 5\n" in shown and "\x1b" not in shown
    assert shown.count("\n") < 30 and "\nepsilon-greedy is solved" not in shown
