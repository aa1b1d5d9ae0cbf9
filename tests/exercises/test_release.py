"""What release.py makes: the zip that grades uploads at Gradescope, answer notes, and a bug hunt for each student.

The zip is unpacked into a folder laid out like /autograder and run against uploads that are right, wrong, missing and
hostile, with a small exercise and its first step.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
for folder in (ROOT / "exercises", ROOT / "tests"):
    sys.path.insert(0, str(folder))

import answers  # noqa: E402
import check  # noqa: E402
import forms  # noqa: E402
import gradescope  # noqa: E402
import release  # noqa: E402
import runner  # noqa: E402
import start  # noqa: E402
from forms import EXERCISES, HUNTS, POOLS, BadInput, find  # noqa: E402

NAME, SCRIPT = "epsilon-greedy", "qlearning.py"
SOLUTION = """
def epsilon_greedy(values, epsilon, rng):
    if rng.random() < epsilon:
        return rng.randrange(len(values))
    return rng.choice([a for a, value in enumerate(values) if value == max(values)])
"""
FENCED = runner.fence_version() >= 1 or bool(check.other_user())  # whether anything can be kept from a process


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    """No result depends on how busy the machine is."""
    monkeypatch.setattr(check, "LIMITS", dict.fromkeys(check.LIMITS, 10**6))


# --------------------------------------------------------------------------------------------------------- Gradescope


@pytest.fixture
def autograder(tmp_path):
    """A folder like Gradescope's /autograder: source, which holds what was in the zip, submission and results."""
    archive = gradescope.write_zip([find(NAME)], tmp_path / "autograder.zip", up_to=1)
    folder = tmp_path / "autograder"
    for name in ("source", "submission", "results"):
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o777)
    for path in [tmp_path, *tmp_path.parents][:3]:
        path.chmod(0o755)  # or the fence would not be what keeps others out
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder / "source")
        modes = {info.filename: info.external_attr >> 16 for info in opened.infolist()}
    assert modes["setup.sh"] & modes["run_autograder"] & stat.S_IXUSR
    return folder


def grade(folder, path=os.environ["PATH"]):
    """Run run_autograder as Gradescope does. Returns (its exit code, results.json or None, all that it printed)."""
    environment = {"PATH": path, "SOURCE": str(folder / "source"), "PYTHON": sys.executable, "HOME": str(folder)}
    done = subprocess.run(
        ["bash", folder / "source/run_autograder"], cwd="/", env=environment, capture_output=True, text=True
    )
    results = folder / "results/results.json"
    return done.returncode, json.loads(results.read_text()) if results.exists() else None, done.stdout + done.stderr


def upload(folder, **files):
    """Put files into the submission."""
    for name, text in files.items():
        (folder / "submission" / f"{name}.py").write_text(text)


def fingerprint(folder):
    """A digest of the names, permissions and contents of a folder, but for compiled files."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts):
        digest.update(f"{path} {path.stat().st_mode}".encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


def scores(results):
    return [(test["score"], test["max_score"]) for test in results["tests"]]


def test_a_right_and_a_wrong_upload(autograder):
    """Fails if the zip lacks anything that grading needs, or gives points for nothing."""
    copy = start.working_copy(find(NAME))
    for source, expected in [(copy + SOLUTION, [(16, 16), (17, 17), (17, 17)]), (copy, [(0, 16), (0, 17), (0, 17)])]:
        upload(autograder, qlearning=source)
        code, results, printed = grade(autograder)
        assert code == 0 and scores(results) == expected, printed
    assert "still blank" in results["tests"][0]["output"]


def test_a_missing_upload_is_told_under_its_name(autograder):
    """Fails if results of an earlier upload stay, or if students would read that the grader crashed."""
    (autograder / "results/results.json").write_text('{"score": 100}')
    upload(autograder, my_solution=SOLUTION)
    code, results, _ = grade(autograder)
    assert code == 0 and scores(results) == [(0, 100)] and "score" not in results
    assert (
        SCRIPT in results["tests"][0]["name"] and f"there is no ../submission/{SCRIPT}" in results["tests"][0]["output"]
    )


HOSTILE = """
import os, pathlib
for folder in ("SOURCE", "RESULTS", "SUBMISSION"):
    for path in [pathlib.Path(folder, "new.py"), *pathlib.Path(folder).rglob("*")]:
        try:
            path.write_text('{"score": 1000}')
        except OSError:
            pass
for name in ("tasks.py", "check.py"):
    try:
        print("READ", len(pathlib.Path("SOURCE/exercises", name).read_text()))
    except OSError:
        print("NOT READ")
"""


@pytest.mark.skipif(not FENCED, reason="neither Landlock nor another user on this machine")
def test_a_hostile_upload_gets_nothing_and_changes_nothing(autograder):
    """Files beside the right one are never run; the right one cannot read the checks, nor write grader or results."""
    code = HOSTILE
    for name in ("source", "results", "submission"):
        code = code.replace(name.upper(), str(autograder / name))
    mark = autograder / "submission/ran"
    other = f"open({str(mark)!r}, 'w')\n"
    names = "check forms tasks hunts runner table probes cut json argparse sitecustomize usercustomize conftest".split()
    upload(autograder, qlearning=code, **dict.fromkeys(names, other))
    (autograder / "submission/run_autograder").write_text(f"touch {mark}\n")
    grade(autograder)  # sets permissions
    before = fingerprint(autograder / "source"), fingerprint(autograder / "submission")
    result, results, printed = grade(autograder)
    assert result == 0 and "score" not in results and sum(score for score, _ in scores(results)) == 0, printed
    assert before == (fingerprint(autograder / "source"), fingerprint(autograder / "submission"))
    assert not mark.exists() and [path.name for path in (autograder / "results").iterdir()] == ["results.json"]
    assert "READ" not in printed.replace("NOT READ", "")


def test_results_so_far_count_when_the_time_is_up(autograder, tmp_path):
    """Fails if a time limit for all loses the points of steps that were taken, or does not tell."""
    fake = tmp_path / "bin/timeout"  # does what it is told to, and says that it took too long
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nshift 2\n"$@"\nexit 124\n')
    fake.chmod(0o755)
    upload(autograder, qlearning=start.working_copy(find(NAME)) + SOLUTION)
    code, results, printed = grade(autograder, f"{fake.parent}:{os.environ['PATH']}")
    assert code == 0 and sum(score for score, _ in scores(results)) == 50, printed
    assert "the time was up" in results["output"]


def test_the_zip_has_what_it_needs_and_no_more(tmp_path):
    """Fails if a script, a demo or the grader is missing, or if sheets' answers, tests or compiled files are in it."""
    out = gradescope.write_zip([find("hunt-1"), find("ppod-anneal")], tmp_path / "a.zip")
    with zipfile.ZipFile(out) as archive:
        names, run = archive.namelist(), archive.read("run_autograder").decode()
        setup, needed = archive.read("setup.sh").decode(), archive.read("requirements.txt").decode()
    assert {"qlearning.py", "ppod.py", "demos/MountainCar-v0/script.npz", "exercises/check.py"} <= {*names}
    assert not any(part in name for name in names for part in ("__pycache__", "sheets/", "teachers/", "tests/"))
    assert "ppo.py" not in names and "check.py hunt-1 ppod-anneal --up-to 3" in run and " 570 " in run
    assert "-r requirements.txt" in setup and "torch==" in needed and "tyro==" in needed
    for text in (run, setup):
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    with pytest.raises(BadInput, match="there already"):
        gradescope.write_zip([find("hunt-1")], out)


# ------------------------------------------------------------------------------------------------------ answer notes


def solution_lines(task):
    """The longer lines of code that a student has to find."""
    source = (ROOT / task.script).read_text(encoding="utf-8")
    if task.name not in EXERCISES:
        return [plant.old.split("  #")[0] for plant in start.alternatives(task)]
    lines, nodes = source.splitlines(), start.definitions(source)
    bodies = [lines[slice(*start.body_span(source.splitlines(keepends=True), nodes[name]))] for name in task.blanks]
    return [line.split("  #")[0].strip() for body in bodies for line in body]


@pytest.mark.parametrize("name", [*EXERCISES, *HUNTS, *POOLS])
def test_answer_notes_are_complete(name):
    """Fails if the solution, a known mistake, a hint, or a bug and how one sees it, is missing."""
    task = find(name)
    notes = answers.answers([task])
    assert notes.startswith("# For teachers") and all(line in notes for line in solution_lines(task))
    if name in EXERCISES:
        assert all(mistake in notes for case in task.cases for mistake in case.mistakes)
        assert all(hint in notes for hint in [*forms.hints(name)[0], forms.hints(name)[1]])
    else:
        for plant in start.alternatives(task):
            assert (
                plant.where in notes and plant.hint in notes and all(line in notes for line in plant.new.splitlines())
            )


def test_answer_notes_have_the_arithmetic():
    """Fails if the comments beside the expected numbers get lost, also those of cases that exercises share."""
    assert "4, 2 + 0.4 x 4 = 3.6, 1 + 0.4 x 3.6 = 2.44" in answers.answers([find("gae")])
    shared = (ROOT / "exercises/tasks.py").read_text().split("\nPLAIN_DQN = Case(")[1].split("\n)\n")[0]
    assert "#" in shared and shared in answers.answers([find("dqn-target")])


def test_a_handout_holds_nothing_of_the_teachers(tmp_path):
    out = release.release(["epsilon-greedy"], tmp_path / "handout")
    texts = {path.name: path.read_text(encoding="utf-8") for path in out.iterdir()}
    assert not {"answers.py", "gradescope.py", "release.py", "start.py", "sheets", "teachers"} & {*texts}
    assert not any("For teachers" in text for text in texts.values())


def call(monkeypatch, folder, *arguments):
    """release.py's main() in a folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["release.py", *map(str, arguments)])
    release.main()


def test_the_command_line(tmp_path, monkeypatch, capsys):
    call(monkeypatch, tmp_path, "--answers", "gae", "hunt-5", "--out", "notes/gae.md")
    assert "hunt-5" in (tmp_path / "notes/gae.md").read_text() and "not for students" in capsys.readouterr().out
    call(monkeypatch, tmp_path, "--gradescope", "gae", "--up-to", "1", "--minutes", "20")
    assert "20 minutes" in capsys.readouterr().out
    assert b"--up-to 1" in zipfile.ZipFile(tmp_path / "autograder.zip").read("run_autograder")
    for arguments, words in [
        (["--answers", "gae", "--out", "notes/gae.md"], "there already"),
        (["--gradescope", "gae", "hunt-5", "--out", "b.zip"], "give each other away"),
        (["hunt-ppo"], "drawn from a number"),
        (["gae", "--student", "3"], "a number is for"),
        (["--answers", "hunt-ppo", "--student", "3"], "leave --student out"),
    ]:
        with pytest.raises(BadInput, match=words):
            call(monkeypatch, tmp_path, *arguments)
        assert not (tmp_path / "handout").exists() and not (tmp_path / "b.zip").exists()


# ------------------------------------------------------------------------------------------- a bug for each student


@pytest.mark.parametrize("name", POOLS)
def test_neighbours_have_different_bugs(name, tmp_path):
    """The same number draws the same bug, the next number another one, all are drawn, and none tells its number."""
    pool = find(name)
    bugs = [(start.drawn(pool, n).plant.where, start.drawn(pool, n).plant.new) for n in range(4711, 4731)]
    assert bugs == [(start.drawn(pool, n).plant.where, start.drawn(pool, n).plant.new) for n in range(4711, 4731)]
    assert all(bug != following for bug, following in zip(bugs, bugs[1:]))
    assert len({*bugs}) == len(start.alternatives(pool)) >= 3
    for number in (4711, 4712):
        out, plant = release.release([name], tmp_path / f"{number}", number), start.drawn(pool, number).plant
        texts = {path.name: path.read_text(encoding="utf-8") for path in out.iterdir()}
        assert texts[pool.script] == start.planted((ROOT / pool.script).read_text(), start.drawn(pool, number))
        assert " ".join(plant.hint.split()) in " ".join(texts["README.md"].split())
        others = [p.hint for p in start.alternatives(pool) if p.hint != plant.hint]
        assert plant.hint in texts["hunts.py"] and not any(hint in texts["hunts.py"] for hint in others)
        assert not any(str(number) in text for file, text in texts.items() if file != pool.script)
        for file in texts.keys() - {pool.script}:
            assert "Plant(" not in texts[file] and "drawn(" not in texts[file] and "members" in texts["hunts.py"]
            assert not any(p.new in texts[file] or p.old in texts[file] for p in start.alternatives(pool))
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / str(n)).iterdir()} for n in (4711, 4712))
    differing = {file for file in one if one[file] != other[file]}
    assert differing == {pool.script, "README.md", "hunts.py"}  # the bug, and its hint


def test_a_pool_has_all_hunts_of_its_script():
    """Fails if a check is left out: a student's bug could then stay unseen."""
    for pool in POOLS.values():
        assert list(pool.members) == [hunt.name for hunt in HUNTS.values() if hunt.script == pool.script]
    counts = {name: len(start.alternatives(pool)) for name, pool in POOLS.items()}
    assert counts == {"hunt-qlearning": 3, "hunt-dqn": 5, "hunt-ppo": 6, "hunt-es": 3}  # docs/exercises.md says so


def verdict(pool, folder, source):
    """What check.py says of a file with this source, in processes of their own."""
    path = folder / pool.script
    path.write_text(source, encoding="utf-8")
    (step,) = check.grade(pool, check.Student(pool, path))
    return step.problem


# The bugs of hunts have tests beside the hunts.
OWN = [(pool.name, i) for pool in POOLS.values() for i in range(len(pool.plants))]
SLOW = {"hunt-dqn", "hunt-ppo"}  # whose checks train networks


@pytest.mark.parametrize("name, i", [pytest.param(*x, marks=[pytest.mark.slow] * (x[0] in SLOW)) for x in OWN])
def test_each_bug_of_a_pool_is_found(name, i, tmp_path):
    """Fails if its text has gone from the script, if it crashes the script, or if no check of the pool sees it."""
    pool = find(name)
    source = start.planted(
        (ROOT / pool.script).read_text(), forms.Hunt(name, pool.script, 1, 1, "", plant=pool.plants[i])
    )
    problem = verdict(pool, tmp_path, source)
    assert problem and "Error" not in problem, problem
    assert pool.plants[i].where.split(".")[-1] not in pool.plants[i].hint.split()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in POOLS])
def test_the_sound_script_passes_a_pool(name, tmp_path):
    assert verdict(find(name), tmp_path, (ROOT / find(name).script).read_text()) is None


@pytest.mark.slow
def test_a_students_handout_stands_alone(tmp_path):
    """The whole way: handed out, judged to be wrong, mended, judged to be right; and start.py makes the same copy."""
    made = release.release(["hunt-es"], tmp_path / "made", 7)
    folder = shutil.copytree(made, tmp_path / "away")
    for code, words in [(1, "FAILED"), (0, "hunt-es is solved")]:
        judged = subprocess.run([sys.executable, "check.py", "hunt-es"], cwd=folder, capture_output=True, text=True)
        assert judged.returncode == code and words in judged.stdout, judged.stdout + judged.stderr
        shutil.copy(ROOT / "es.py", folder)
    begin = [sys.executable, ROOT / "exercises/start.py", "hunt-es", "--number", "7"]
    begun = subprocess.run(begin, cwd=tmp_path, capture_output=True, text=True)
    assert begun.returncode == 0 and (tmp_path / "my_work/es.py").read_text() == (made / "es.py").read_text()


def test_no_script_is_imported_for_a_release():
    """release.py answers at once: torch is not needed to hand something out."""
    code = "import sys, release, answers, gradescope; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "exercises")
    assert importlib.util.find_spec("torch") and done.returncode == 0
