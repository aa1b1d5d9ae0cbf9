"""Every command of the experiment sheets is one that its script accepts: flags, values, environments. No run is made.

Sheets are Markdown; their commands stand in blocks ```sh, with loops over seeds and settings, which are played here.
Each sheet has a note for teachers, of which it holds nothing; and the course in docs/exercises.md is complete.
"""

import fnmatch
import importlib
import json
import re
import sys
from pathlib import Path

import gymnasium as gym
import minigrid  # noqa: F401  (registers its environments)
import pytest
import tyro

ROOT = Path(__file__).resolve().parent.parent.parent
for folder in (ROOT, ROOT / "exercises", ROOT / "benchmarks"):
    sys.path.insert(0, str(folder))

from forms import EXERCISES, HUNTS, POOLS, load_tables  # noqa: E402
from sheets import BEGIN, END, NONE, RESULTS, commands, figures, table  # noqa: E402

load_tables()

SHEETS = sorted((ROOT / "exercises" / "sheets").glob("week-*.md"))
TEACHERS = ROOT / "exercises" / "teachers"
every_sheet = pytest.mark.parametrize("sheet", SHEETS, ids=lambda path: path.stem)


def accepted(command):
    """The Args of a command such as ["python", "ppo.py", "--seed", "1"]; SystemExit or UserError if it is refused."""
    python, script, *flags = command
    assert python == "python" and (ROOT / script).is_file(), command
    module = importlib.import_module(script.removesuffix(".py"))
    if script == "compare.py":
        return tyro.cli(module.Args, args=flags)
    args = module.tuned(*flags)
    module.check_args(args)
    if script in ("mappo.py", "maddpg_matd3.py"):
        assert callable(importlib.import_module(args.env_id).parallel_env)
    else:
        gym.spec(args.env_id)  # gym.error.Error if there is none
    return args


@every_sheet
def test_every_command_is_accepted(sheet):
    """Fails if a flag, a value or an environment does not exist, or if two commands would make the same run."""
    runs, folders, pictures = [], [], []
    for command in commands(sheet.read_text(encoding="utf-8")):
        args = accepted(command)
        if command[1] == "compare.py":
            pictures += args.run_dirs
            assert args.out.startswith(f"runs/{sheet.stem}-") or args.out == f"runs/{sheet.stem}.png"
            continue
        runs.append((command[1], {name: value for name, value in vars(args).items() if name != "run_dir"}))
        folders.append(args.run_dir)
        assert args.run_dir.startswith(f"runs/{sheet.stem}/") and args.run_dir.endswith(f"-seed-{args.seed}")
    assert len({*folders}) == len(folders) >= 6 and all(runs.count(run) == 1 for run in runs)
    for folder in folders:  # a shell replaces the patterns by the folders they match
        assert any(fnmatch.fnmatchcase(folder, pattern) for pattern in pictures), folder
    for pattern in pictures:
        assert any(fnmatch.fnmatchcase(folder, pattern) for folder in folders), pattern


def test_mistakes_in_commands_are_noticed(capsys):
    """The check above can fail: a flag that does not exist, a value out of range, an unknown environment."""
    for flags in (["--gae-lamda", "1"], ["--seed", "one"], ["--env-id", "CartPole-v9"], ["--gae-lambda", "2"]):
        with pytest.raises((SystemExit, gym.error.Error, importlib.import_module("ppo").UserError)):
            accepted(["python", "ppo.py", *flags])
    capsys.readouterr()


def test_loops_are_played_as_a_shell_does():
    text = (
        'for a in 1 2; do\n    b="--x $a"\n    for c in 3 4; do\n        run $b \\\n            $c\n    done\ndone\nend'
    )
    text = f"words\n```sh\n{text}\n```\n"
    assert commands(text) == [["run", "--x", a, c] for a in "12" for c in "34"] + [["end"]]


def sections(text):
    """{title: text} of the parts of a sheet or of a teacher's note."""
    return dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))


def numbered(text):
    """How many items a numbered list has."""
    return len(re.findall(r"^\d\. ", text, re.MULTILINE))


def test_each_week_has_a_sheet_and_a_note_for_teachers():
    names = [f"week-{week:02}.md" for week in range(1, 13)]
    assert [path.name for path in SHEETS] == names == sorted(path.name for path in TEACHERS.glob("week-*.md"))


@every_sheet
def test_a_sheet_asks_and_does_not_tell(sheet):
    """Fails if predictions come after the run, if a question has no answer for teachers, or if a sheet holds one."""
    asked, answered = (path.read_text(encoding="utf-8") for path in (sheet, TEACHERS / sheet.name))
    assert list(sections(asked)) == ["Before you run", "Run", "Explain"]
    assert list(sections(answered)) == ["Before the run", "What the runs showed", "What a good answer contains"]
    assert numbered(sections(asked)["Before you run"]) == numbered(sections(answered)["Before the run"]) == 3
    explain, good = sections(asked)["Explain"], sections(answered)["What a good answer contains"]
    assert numbered(explain) == numbered(good) == 5
    asked = " ".join(asked.split())
    sentences = re.split(r"(?<=[.:?]) |\n\n|\n[0-9*|]", answered.split("\n", 1)[1])
    for sentence in (" ".join(sentence.split()) for sentence in sentences):
        assert len(sentence) < 30 or sentence not in asked, sentence
    assert "teacher" not in asked.lower()


@every_sheet
def test_figures_are_measured_or_not_given(sheet):
    """Fails if the table in a note for teachers is not that of benchmarks/results/sheets.json."""
    note = (TEACHERS / sheet.name).read_text(encoding="utf-8")
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    text = table(sheet.stem, known[sheet.stem]) if sheet.stem in known else NONE
    assert f"{BEGIN}\n{text}\n{END}" in note


# ----------------------------------------------------------------------------------------------- docs/exercises.md

COURSE = sections((ROOT / "docs" / "exercises.md").read_text(encoding="utf-8"))["A course of twelve weeks"]


def test_the_course_has_every_exercise_hunt_and_sheet():
    """Fails if the course leaves something out, or names what there is not."""
    named = {*re.findall(r"`([a-z0-9-]+)`", COURSE)}
    assert named == {*EXERCISES, *HUNTS, *POOLS}
    assert re.findall(r"\(\.\./exercises/sheets/(week-\d\d\.md)\)", COURSE) == [path.name for path in SHEETS]
    for name, exercise in EXERCISES.items():  # "| `gae` | 45 | …"
        assert re.search(rf"\| `{name}` \| {exercise.minutes} \|", COURSE), name


def test_figures_come_out_of_run_folders(tmp_path):
    """What benchmarks/sheets.py notes of a run, and the table it makes: means over seeds, and what is missing."""
    runs = {}
    for seed, last in (("1", 0.5), ("2", 0.25)):
        (tmp_path / "summary.json").write_text(json.dumps({"eval_return_mean": 100 * last, "global_step": 7}))
        (tmp_path / "metrics.csv").write_text(f"step,q\n1,nan\n2,60\n3,{last}\n")
        runs[seed] = figures("week-04", tmp_path)
    assert runs["1"] == {"evaluation": 50, "steps": 7, "q": 60}
    row, _, missing = table("week-04", {"base": runs}).splitlines()[2:]
    assert row == "| base | 1, 2 | 37.5 | 50, 25 | 60 |"  # (50 + 25) / 2
    assert missing == "Of the sheet's 9 runs 2 have been made; of the others figures are not given."
