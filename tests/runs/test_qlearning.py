"""Whole runs of qlearning.py: what only a table has. It needs no torch, its files are npz, it draws values.png.

What all scripts have in common is tested in test_runs.py.
"""

import csv
import dataclasses
import json
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import run_envs  # noqa: F401  (registers its environments)
from kills import surroundings

import qlearning
from qlearning import Args, read_state, train, tuned
from tests.probes import table_envs

slow = pytest.mark.slow
SMALL = "--total-timesteps 3000 --eval-every 1000 --eval-episodes 2 --no-progress".split()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Every test works in an empty folder, without a window."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing takes longer than most runs here."""
    monkeypatch.setattr(qlearning, "draw_values", lambda *_: None)
    monkeypatch.setattr(qlearning.Run, "draw_curve", lambda _: None)


def main(*flags):
    """What `python qlearning.py flags…` does, in this process; the exit code."""
    with patch.object(sys, "argv", ["qlearning.py", *map(str, flags)]):
        try:
            qlearning.main()
        except SystemExit as stop:
            return stop.code or 0
    return 0


@pytest.fixture
def complaint(capfd):
    """complaint(*flags): what these flags make the script say on stderr; it must end with 2 and write nothing."""

    def call(*flags):
        before = snapshot()
        capfd.readouterr()
        code, err = main(*flags), capfd.readouterr().err
        assert code == 2 and err.endswith("\n") and "Traceback" not in err, err
        assert snapshot() == before
        return err

    return call


def snapshot():
    """All that lies in the working directory."""
    return {path: path.is_file() and path.read_bytes() for path in sorted(Path().rglob("*"))}


def rows(run="run"):
    """The rows of metrics.csv as dicts of texts, without the times."""
    with Path(run, "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in ("seconds", "sps")} for row in csv.DictReader(file)]


def steps_and_returns(run="run"):
    """(step, episodes, evaluations) of a checkpoint, without the times."""
    step, _, episodes, evaluations, *_ = read_state(Path(run, "checkpoint.npz"))["run"]
    return step, episodes, [(step, *scores) for step, _, *scores in evaluations]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a short finished run on CliffWalking. Only to be read."""
    folder = tmp_path_factory.mktemp("finished")
    command = [sys.executable, qlearning.__file__, *SMALL, "--run-dir", "run"]
    done = subprocess.run(command, cwd=folder, env=surroundings(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")  # no warnings
    return folder / "run"


@pytest.fixture
def copied(finished):
    """A copy of the finished run: the folder `run`."""
    return shutil.copytree(finished, Path("run"))


# ------------------------------------------------------------------------------------------------------ without torch

HIDE_TORCH = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
hide = lambda name, *rest: None if name.split(".")[0] == "torch" else find(name, *rest)
importlib.machinery.PathFinder.find_spec = hide
"""


@slow
def test_it_needs_no_torch():
    """Fails if qlearning.py imports torch or a sibling anywhere, or if a part of the run folder is missing."""
    shutil.copy(qlearning.__file__, ".")
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text(HIDE_TORCH)  # which Python imports when it starts
    environment = surroundings() | {"PYTHONPATH": "site"}

    def python(*words):
        return subprocess.run([sys.executable, *map(str, words)], env=environment, capture_output=True, text=True)

    assert "No module named 'torch'" in python("-c", "import torch").stderr  # it is out of reach indeed
    done = python("qlearning.py", "--total-timesteps", 3000, "--eval-every", 1000, "--eval-episodes", 2)
    assert done.returncode == 0, done.stderr
    (run,) = Path("runs").iterdir()
    assert run.name.startswith("CliffWalking-v1__qlearning__1__")
    names = "config.json metrics.csv evaluations.csv learning_curve.png values.png checkpoint.npz models summary.json"
    assert {path.name for path in run.iterdir()} == set(names.split())
    values, evaluation, curve = done.stdout.splitlines()[-3:]
    assert str(run / "values.png") in values and evaluation.startswith("evaluation") and "learning_curve.png" in curve
    assert "mean return" in done.stderr and "steps/s" in done.stderr  # the progress bar
    config = json.loads((run / "config.json").read_text())
    assert set(config["args"]) == {field.name for field in dataclasses.fields(Args)}
    assert set(config["versions"]) == {"gymnasium", "numpy"}

    with np.load(run / "checkpoint.npz") as file:  # as docs/qlearning.md says
        assert file["q"].shape == (1, 48, 4) and file["q"].dtype == np.float64
    evaluated = [step for step, *_ in steps_and_returns(run)[2]]
    saved = {path.name for path in (run / "models").iterdir()}
    assert saved == {"best.npz", *(f"{step}.npz" for step in evaluated)} and len(saved) == 4

    done = python("qlearning.py", "--resume", run, "--total-timesteps", 4000, "--no-progress")
    assert done.returncode == 0, done.stderr
    done = python("qlearning.py", "--evaluate", run, "--model", "last")
    assert "over 2 episodes of CliffWalking-v1" in done.stdout and done.stderr == ""


@slow
def test_metrics(finished):
    """Fails if a column is missing, or is not what docs/qlearning.md says it is."""
    header = "step episodes return_mean epsilon learning_rate td_error".split()
    table = [{name: float(row[name]) for name in header} for row in rows(finished)]
    assert set(rows(finished)[0]) == set(header) and all(np.isfinite(list(row.values())).all() for row in table)
    step, episodes, _ = steps_and_returns(finished)
    assert table[-1]["step"] == step == episodes[-1][0] and table[-1]["episodes"] == len(episodes)
    assert table[-1]["return_mean"] == pytest.approx(np.mean([total for _, total in episodes]))
    assert len(table) < 200 and all(row["step"] in [step for step, _ in episodes] for row in table)
    played = 0  # episodes before a row
    for row in table:
        assert row["epsilon"] == pytest.approx(np.mean(0.99 ** np.arange(played, row["episodes"])))
        played = int(row["episodes"])
    lasts = [step - 1 for step, _ in episodes[: int(table[0]["episodes"])]]  # when they took their last steps
    assert table[0]["learning_rate"] == pytest.approx(np.mean(0.5 * (1 - np.array(lasts) / 3000)))


def test_metrics_have_about_200_rows(no_pictures):
    """Fails if a row is written after every episode of a run of many."""
    train(tuned(env_id="FrozenLake-v1", total_timesteps=2000, eval_episodes=1, progress=False, run_dir="run"))
    assert 100 < len(rows()) <= 210 < len(steps_and_returns()[1])


# ----------------------------------------------------------------------------------------------------------- pictures


DRAWN = [pytest.param(name, marks=slow) for name in "CliffWalking-v1 Taxi-v4 Blackjack-v1 MountainCar-v0".split()]


@pytest.mark.parametrize("env_id", ["FrozenLake8x8-v1", *DRAWN])
def test_picture_of_the_table(env_id, capsys):
    """Fails if the picture is missing or empty, or cannot be drawn where next to nothing has been learnt."""
    from matplotlib.image import imread

    args = tuned(env_id=env_id, algorithm="double-q" if "8x8" in env_id else "q-learning")
    envs = qlearning.make_envs(args, 1)
    agent, env, rng, run = qlearning.make_agent(args, envs), envs.envs[0], random.Random(0), table_envs.Notes()
    env.reset(seed=0)
    for episodes in (1, 100) if env_id != "Taxi-v4" else (1,):  # which takes the longest to draw
        for _ in range(episodes):
            qlearning.play_episode(agent, env, run, rng, args)
        qlearning.draw_values(Path(), args, agent, env)
        assert "values.png" in capsys.readouterr().out
        picture = imread("values.png")
        assert picture.shape[0] >= 500 and picture.shape[1] >= 800
        assert len(np.unique(picture[::5, ::5].reshape(-1, picture.shape[2]), axis=0)) > 20
        Path("values.png").unlink()


@slow
def test_picture_behind_a_link(capsys):
    """Fails if the picture is written through a link that leads out of the run folder."""
    Path("precious").write_text("mine")
    Path("run").mkdir()
    Path("run/values.png").symlink_to(Path("precious").absolute())
    args = tuned(env_id="FrozenLake-v1")
    envs = qlearning.make_envs(args, 1)
    envs.envs[0].reset(seed=0)
    qlearning.draw_values(Path("run"), args, qlearning.make_agent(args, envs), envs.envs[0])
    assert Path("precious").read_text() == "mine" and not Path("run/values.png").is_symlink()


@slow
@pytest.mark.parametrize(
    "settings",
    [
        {"env_id": "CartPole-v1", "grid_low": (-2.4, -3, -0.2, -3), "grid_high": (2.4, 3, 0.2, 3), "grid_size": 6},
        {"env_id": "MountainCar-v0", "wrappers": ("gymnasium.wrappers.TimeAwareObservation",), "grid_size": 3},
        {"env_id": "MountainCar-v0", "grid_size": 2},
        {"env_id": "CliffWalking-v1", "wrappers": ("tests.probes.table_envs.Halves",)},
    ],
    ids=["four numbers", "three numbers", "two bins", "another world"],
)
def test_no_picture(settings):
    """Fails if what cannot be drawn stops the run, or a wrapped observation is taken for the cell of a grid world."""
    train(tuned(total_timesteps=500, eval_episodes=1, progress=False, run_dir="run", **settings))
    assert Path("run/learning_curve.png").exists() and not Path("run/values.png").exists()


# ------------------------------------------------------------------------------------------------------------- damages


class Bomb:
    """Unpickling this creates a file named `executed` in the working directory."""

    def __reduce__(self):
        return exec, ("open('executed', 'w').close()",)


def rewritten(**arrays):
    """A damage that replaces arrays in the file; None removes one."""

    def damage(path):
        state = dict(np.load(path)) | arrays
        np.savez(path, **{name: array for name, array in state.items() if array is not None})

    return damage


DAMAGES = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(random.Random(0).randbytes(5000)),
    "text": lambda path: path.write_text("numbers\n"),
    "pickle with code": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "array of objects with code": rewritten(q=np.array([Bomb()], object)),
    "text with code": rewritten(rest=np.array(Bomb(), object)),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "another environment": rewritten(rest=np.array('{"env_id": "Taxi-v4"}')),
    "no environment": rewritten(rest=np.array("{}")),
    "a list": rewritten(rest=np.array("[1, 2]")),
    "nothing but the table": rewritten(rest=None),
    "no table": rewritten(q=None),
    "another shape": rewritten(q=np.zeros((1, 16, 4))),
    "another type": rewritten(q=np.full((1, 48, 4), "one")),
    "not finite": rewritten(q=np.full((1, 48, 4), np.nan)),
}


@slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tables(damage, copied, complaint):
    """Fails if a damaged or foreign file is taken, runs code, or ends in a traceback."""
    DAMAGES[damage](copied / "models/best.npz")
    assert "best.npz" in complaint("--evaluate", copied)
    DAMAGES[damage](copied / "checkpoint.npz")
    assert "checkpoint.npz" in complaint("--evaluate", copied, "--model", "last")
    if damage != "missing":  # then it was killed before its first checkpoint
        assert "checkpoint.npz" in complaint("--resume", copied)
    assert not Path("executed").exists()


@slow
def test_a_table_is_no_checkpoint(copied, complaint):
    """Fails if a file that lacks the counters of a run ends in a traceback, or begins it anew."""
    shutil.copy(copied / "models/best.npz", copied / "checkpoint.npz")
    assert "damaged" in complaint("--resume", copied)
    assert "12345.npz" in complaint("--evaluate", copied, "--model", 12345)
    assert "CliffWalking-v1" in complaint("--evaluate", copied, "--env-id", "Taxi-v4")
    assert "best.npz" in complaint("--evaluate", copied, "--algorithm", "double-q")


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--algorithm td3", "algorithm td3 sarsa double-q"),
        ("--grid-size 2.5", "grid-size 2.5"),
        ('--env-id Twins-v0 --env-kwargs {"kind":"unbounded"}', "inf grid_low grid_high"),
        ('--env-id Twins-v0 --env-kwargs {"kind":"images"}', "million grid_size ppo.py"),
        ('--env-id Twins-v0 --env-kwargs {"kind":"numbers"}', "million ppo.py"),
        ('--env-id Twins-v0 --env-kwargs {"kind":"dict"}', "Dict ppo.py"),
        ('--env-id Twins-v0 --env-kwargs {"kind":"boxes"}', "Tuple ppo.py"),
    ],
)
def test_bad_flags(flags, words, complaint):
    """Fails if a complaint names nothing, comes with another exit code than 2, or leaves files."""
    err = complaint(*flags.split(" "))
    for word in words.split():
        assert word.replace("-", "_") in err.replace("-", "_"), err


def test_an_endless_episode_ends(no_pictures):
    """Fails if an episode without any limit of its own or the user's is played for ever."""
    small = {"env_id": "Endless-v0", "grid_size": 2, "eval_episodes": 2, "progress": False}
    final = train(Args(total_timesteps=3000, run_dir="run", **small))
    assert steps_and_returns()[1] == [[1000 * (n + 1), 1000] for n in range(3)]
    assert final["eval_return_mean"] == 1000 and final["global_step"] == 3000
