"""The milestones, written from scratch in small scripts of their own: what differs from exercises on the big scripts.

Fixed numbers, known mistakes and hints are tested in tests/test_exercises.py, as those of all exercises are.
"""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "exercises"))

import check  # noqa: E402
import forms  # noqa: E402
import release  # noqa: E402
import runner  # noqa: E402
import start  # noqa: E402
from forms import EXERCISES  # noqa: E402

SOUND = runpy.run_path(str(Path(__file__).with_name("solutions_scratch.py")))["SOUND"]
every_milestone = pytest.mark.parametrize("name", SOUND)


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    """No result depends on how busy the machine is."""
    monkeypatch.setattr(check, "LIMITS", dict.fromkeys(check.LIMITS, 10**6))


def student_of(folder, name, solution):
    """A Student, whose file is the working copy with a solution below it."""
    path = folder / EXERCISES[name].file
    path.write_text(start.working_copy(EXERCISES[name]) + solution, encoding="utf-8")
    return check.Student(EXERCISES[name], path)


def call(module, monkeypatch, folder, *arguments):
    """main() of a module in this process, in a folder. Returns its exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
    return module.main()


@every_milestone
def test_the_script_is_small_and_learning_is_all_blank(name):
    """100 to 150 given lines; all that stands below "what learns" is the student's; the pins are the repository's."""
    exercise, source = EXERCISES[name], (ROOT / EXERCISES[name].script).read_text(encoding="utf-8")
    given, learns = source.split("# ===== what learns\n")
    assert 100 <= len([line for line in given.splitlines() if line]) <= 150
    functions = set(start.definitions(learns)) - {"ReplayBuffer", "ReplayBuffer.__init__"}
    assert functions == set(exercise.blanks)
    pins = re.findall(r'"([^"\s]+==[^"]+)"', source.split("# ///")[1])
    assert pins and all(pin in (ROOT / "requirements.txt").read_text() for pin in pins)


def test_what_is_given_is_the_same_in_all_three():
    """As in the big scripts: the same name has the same source. Networks and what builds them differ."""
    sources = {}
    for name in SOUND:
        source = (ROOT / EXERCISES[name].script).read_text(encoding="utf-8")
        lines = source.split("# ===== what learns\n")[0].splitlines()
        for found, node in start.definitions("\n".join(lines)).items():
            if found not in ("Args", "make_agent", "Agent") and "." not in found:
                sources.setdefault(found, set()).add("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    assert {"Recorder", "draw_curve", "make_env", "evaluate"} <= sources.keys()
    assert all(len(texts) == 1 for texts in sources.values())


@pytest.mark.slow
def test_stage_by_stage_in_a_copy_of_its_own(tmp_path, monkeypatch, capsys):
    """start.py writes my_work/build_reinforce.py; each function that is written brings its points."""
    copy, results = tmp_path / "my_work/build_reinforce.py", tmp_path / "results.json"
    call(start, monkeypatch, tmp_path, "build-reinforce")
    assert "Work in my_work/build_reinforce.py" in capsys.readouterr().out
    blank, functions = copy.read_text(), re.split(r"\n(?=def )", SOUND["build-reinforce"])
    scores = []
    for written in range(5):
        copy.write_text(blank + "\n".join(functions[: written + 1]))
        call(check, monkeypatch, tmp_path, "build-reinforce", "--up-to", 1, "--json", results, "--work", "my_work")
        scores.append(sum(test["score"] for test in json.loads(results.read_text())["tests"]))
    assert scores == [0, 11, 27, 44, 50]  # two, five, eight and nine of nine cases
    call(check, monkeypatch, tmp_path, "build-reinforce", "--up-to", 1)
    capsys.readouterr()
    call(start, monkeypatch, tmp_path, "--progress")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("build-reinforce")]
    assert line.split() == ["build-reinforce", "build_reinforce.py", "1", "of", "3", "steps"]


@pytest.mark.slow
def test_importing_a_small_original_is_noticed(tmp_path, monkeypatch):
    """Also where the fence does not hide it."""
    path = ROOT / EXERCISES["build-dqn"].script
    source = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("other", {str(path)!r})
other = importlib.util.module_from_spec(spec)
__import__("sys").modules["other"] = other
spec.loader.exec_module(other)
epsilon_at, train = other.epsilon_at, other.train
"""
    with pytest.raises(check.Failed, match="imports or opens an original of the repository, build_dqn.py"):
        student_of(tmp_path, "build-dqn", source).answers()
    monkeypatch.setattr(check, "hidden_files", list)
    with pytest.raises(check.Failed, match="imports or opens an original of the repository, build_dqn.py"):
        student_of(tmp_path, "build-dqn", source).answers()


@pytest.mark.parametrize(
    "train, words",
    [
        ("return make_agent(args)", "needed are 150"),
        ("evaluate = lambda *given: (500.0, 0.0); return make_agent(args)", "needed are 150"),
        ("return Agent(4, 2, 7)", "does not fit the script's own network"),
        ("pass", "Is there a return missing"),
        (
            "import os; os.makedirs('run'); open('run/checkpoint.pt', 'w').write('x'); os._exit(0)",
            "has ended the process",
        ),
    ],
)
def test_what_is_learnt_is_judged_by_the_original(train, words, tmp_path):
    """Untrained, foreign, forged and missing networks: none passes, whatever the file itself says of them."""
    text = f"\ndef evaluate(*given):\n    return 500.0, 0.0\n\ndef train(args):\n    {train}\n"
    student = student_of(tmp_path, "build-reinforce", SOUND["build-reinforce"] + text)
    try:
        problem = check.judge_learning(student.task, student)
    except check.Failed as error:
        problem = str(error)
    assert words in problem


STORED = "buffer.add(obs, action, reward, next_obs, terminated)"
FLAGS = 'names = ("rewards", "values", "next_values", "terminated", "truncated")'
NORMALIZED = 'x["log_probs"], normalized(advantages)'


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, old, new, words",
    [
        ("build-dqn", STORED, STORED.replace("terminated", "terminated or truncated"), "truncation taken for the end"),
        ("build-dqn", STORED, STORED.replace("next_obs", "obs"), "Later pays 1 in its second"),
        ("build-ppo", FLAGS, FLAGS.replace('"terminated", "truncated"', '"truncated", "terminated"'), "Later pays 1"),
        ("build-ppo", NORMALIZED, NORMALIZED.replace("(", "(-"), "in Cue, one step long"),
        (
            "build-reinforce",
            "reinforce_loss(*agent(obs), actions,",
            "reinforce_loss(*agent(obs), 1 - actions,",
            "in Cue",
        ),
    ],
)
def test_a_loop_that_puts_right_functions_together_wrongly_fails_in_a_probe(name, old, new, words, tmp_path):
    """Fails if numbers alone decide: in these the functions are right and train is not."""
    assert SOUND[name].count(old) == 1
    student = student_of(tmp_path, name, SOUND[name].replace(old, new))
    assert words in check.judge_probe(student.task, student)


@pytest.mark.slow
@every_milestone
def test_another_solution_passes_every_step(name, tmp_path):
    """The mistakes above are changes to solutions that pass: probes and learning as well."""
    student = student_of(tmp_path, name, SOUND[name])
    assert [step.problem for step in check.grade(student.task, student)] == [None, None, None]


# ------------------------------------------------------------------------------------------- small scripts in general


@pytest.mark.parametrize("left_out, points", [((), [50, 20, 30]), (("probe",), [62, 38]), (("learn",), [71, 29]),
                                              (("probe", "learn"), [100])])  # fmt: skip
def test_an_exercise_may_have_fewer_steps(left_out, points, tmp_path, monkeypatch):
    """The points of what is left out go to the others, in proportion: 50/80 and 30/80, 50/70 and 20/70 of 100."""
    exercise = forms.Exercise(**vars(EXERCISES["build-reinforce"]) | dict.fromkeys(left_out))
    monkeypatch.setattr(check, "judge_numbers", lambda task, student, points: [check.Part("all", points, None)])
    monkeypatch.setattr(check, "judge_probe", lambda task, student: None)
    monkeypatch.setattr(check, "judge_learning", lambda task, student: None)
    student = check.Student(exercise, ROOT / exercise.script)
    results = list(check.grade(exercise, student))
    assert [sum(part.points for part in step.parts) for step in results] == points
    assert not any(step.problem for step in results)
    assert len(list(check.grade(exercise, student, up_to=2))) == min(2, len(points))


def test_a_train_that_returns_numbers(tmp_path):
    """What is no network goes through JSON: a table of values, as lists; evaluate is not asked for."""
    source = "import numpy as np\n\nclass Args:\n    pass\n\ndef train(args):\n    return np.array([[1, 2], [3, 4]])\n"
    (tmp_path / "grid.py").write_text(source)
    with runner.loaded(tmp_path / "grid.py") as module:
        runner.train(module, tmp_path)
        assert check.trained(module, tmp_path / "run", {}).agent == [[1, 2], [3, 4]]


def test_a_handout_of_small_scripts(tmp_path):
    """It has the copies under their own names and this table only, holds no line of a solution, and works."""
    out = release.release(["build-reinforce", "build-ppo"], tmp_path / "handout")
    files = {path.name: path.read_text() for path in out.iterdir()}
    assert {"build_reinforce.py", "build_ppo.py", "tasks_scratch.py"} <= files.keys() and "tasks.py" not in files
    for name in ("build-reinforce", "build-ppo"):
        lines = (ROOT / EXERCISES[name].script).read_text().splitlines()
        nodes = start.definitions("\n".join(lines))
        spans = [start.body_span([f"{line}\n" for line in lines], nodes[blank]) for blank in EXERCISES[name].blanks]
        code = [line.strip() for first, last in spans for line in lines[first:last] if len(line.strip()) > 30]
        assert len(code) > 10 and not [line for line in code for text in files.values() if line in text]
    assert "build-dqn" not in files["tasks_scratch.py"] and "tyro==" in files["requirements.txt"]
    assert "`build_ppo.py`, about" in files["README.md"]
