"""Whole runs of qlearning.py: what only a table has. It needs no torch, its files are npz, it draws values.png.

What all scripts have in common is tested in test_runs.py.
"""

import csv
import dataclasses
import errno
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from kills import kill_and_resume, shell, surroundings

import qlearning
from qlearning import Args, UserError, evaluate, load, read_state, train, tuned
from tests.probes import table_envs
from tests.runs import run_envs  # noqa: F401  (registers its environments)

slow = pytest.mark.slow
SMALL = "--total-timesteps 3000 --eval-every 1000 --eval-episodes 2 --no-progress".split()
NOT_SLIPPERY = '{"is_slippery": false}'


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
    step, _, episodes, evaluations, _ = read_state(Path(run, "checkpoint.npz"))["run"]
    return step, episodes, [(step, *scores) for step, _, *scores in evaluations]


def assert_same_run(one, other):
    """Two finished runs agree, bit for bit, in everything but the time they took."""
    assert rows(one) == rows(other) and steps_and_returns(one) == steps_and_returns(other)
    tables = [sorted(str(path.relative_to(run)) for path in Path(run).rglob("*.npz")) for run in (one, other)]
    assert tables[0] == tables[1] and len(tables[0]) >= 3
    for name in tables[0]:
        q = [read_state(Path(run, name))["agent"]["q"] for run in (one, other)]
        assert np.array_equal(*q), name


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


def test_notebook(finished):
    """Fails if the final table is not what was evaluated, or not what is read back."""
    agent = load(finished, "last")
    summary = json.loads((finished / "summary.json").read_text())
    result = evaluate(agent, agent.args, 2, agent.args.seed + 10_000)
    assert result == (summary["eval_return_mean"], summary["eval_return_std"])
    assert np.array_equal(agent.state_dict()["q"], np.load(finished / "checkpoint.npz")["q"])
    for env_id, settings in qlearning.TUNED.items():
        assert {name: getattr(tuned(env_id=env_id), name) for name in settings} == settings


def test_evaluate_prints_mean_and_deviation(finished, copied, capsys):
    """Fails if best, last or a step plays another table than the saved one, or if the seed is ignored."""
    step = steps_and_returns()[0]
    for model, file in (("best", "models/best.npz"), ("last", "checkpoint.npz"), (step, f"models/{step}.npz")):
        assert main("--evaluate", "run", "--model", model, "--eval-episodes", 3, "--seed", 7) == 0
        (line,) = capsys.readouterr().out.splitlines()
        agent = load("run")
        agent.load_state_dict(read_state(finished / file)["agent"])
        mean, std = evaluate(agent, agent.args, 3, 7 + 2 * 10_000)
        assert f"{mean:.2f} ± {std:.2f}" in line and "3 episodes" in line


def test_same_seed_same_run(finished, no_pictures):
    """Fails if anything random is not seeded by --seed, if --config loses an argument, or if the seed is ignored."""
    random.seed(1)
    np.random.seed(2)
    assert main("--config", finished / "config.json", "--run-dir", "again") == 0
    assert_same_run(finished, "again")
    assert main("--config", finished / "config.json", "--run-dir", "other", "--seed", 2) == 0
    assert rows(finished) != rows("other")


# ----------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("env_id", ["CliffWalking-v1", "FrozenLake8x8-v1", "Taxi-v4", "Blackjack-v1", "MountainCar-v0"])
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


def test_videos(no_pictures):
    """Fails if --capture-video leaves no film of each evaluation, or --evaluate none of its own."""
    few = "--total-timesteps 60 --eval-every 40 --eval-episodes 1 --max-episode-steps 6 --no-progress".split()
    assert main("--env-id", "FrozenLake-v1", "--capture-video", *few, "--run-dir", "run") == 0
    assert main("--evaluate", "run", "--capture-video", "--eval-episodes", 1) == 0
    films = sorted(Path("run/videos").glob("*.mp4"))
    assert len(films) == 3 and films[-1].name == "best.mp4" and all(film.stat().st_size > 1000 for film in films)


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
        ("--env-id FrozenLak-v1", "FrozenLake"),
        ("--env-id CliffWalking-v9", "v1"),
        ("--env-id no_such_module:Some-v0", "no_such_module"),
        ("--wrappers no.such.Wrapper", "no.such.Wrapper"),
        ("--wrappers gymnasium.wrappers.TransformObservation", "TransformObservation"),
        ("--env-kwargs [1]", "env_kwargs"),
        ('--env-kwargs {"gravitas":1}', "gravitas"),
        ("--env-id Unpicturable-v0 --capture-video", "Unpicturable"),
        ("--env-id Blind-v0 --capture-video", "Blind"),
        ("--algorithm td3", "algorithm td3 sarsa double-q"),
        ("--grid-size 2.5", "grid-size 2.5"),
        ("--grid-size 0", "grid_size"),
        (f"--grid-size {10**30}", "grid_size"),
        ("--learning-rate 1.5", "learning_rate"),
        ("--gamma 1.01", "gamma"),
        ("--epsilon-start 1.2", "epsilon_start"),
        ("--epsilon-min -0.1", "epsilon_min"),
        ("--epsilon-decay 2", "epsilon_decay"),
        ("--exploration-fraction 0", "exploration_fraction"),
        # spaces, and who can handle them; grids that do not fit
        ("--env-id Pendulum-v1", "Box Discrete ppo.py"),
        ("--env-id CartPole-v1 --grid-low -1 --grid-high 1", "4 grid_low 1"),
        ("--env-id CartPole-v1 --grid-low nan --grid-high 1", "grid_low"),
        ('--env-id Twins-v0 --env-kwargs {"kind":"unbounded"}', "inf grid_low grid_high"),
        ("--env-id MountainCar-v0 --grid-low 0.7 -1", "0.7 grid_low"),
        ("--env-id MountainCar-v0 --grid-size 9999", "million grid_size"),
        ('--env-id Twins-v0 --env-kwargs {"kind":"images"}', "million grid_size ppo.py"),
        ('--env-id Twins-v0 --env-kwargs {"kind":"numbers"}', "million ppo.py"),
        ('--env-id Match-v0 --env-kwargs {"observation":"huge"}', "million ppo.py"),
        ('--env-id Twins-v0 --env-kwargs {"kind":"dict"}', "Dict ppo.py"),
        ('--env-id Twins-v0 --env-kwargs {"kind":"boxes"}', "Tuple ppo.py"),
        ('--env-id Match-v0 --env-kwargs {"actions":"multibinary"}', "MultiBinary ppo.py"),
        ("--grid-low 1 --grid-high 2", "grid_low Box"),
    ],
)
def test_bad_flags(flags, words, complaint):
    """Fails if a complaint names nothing, comes with another exit code than 2, or leaves files."""
    err = complaint(*flags.split(" "))
    for word in words.split():
        assert word.replace("-", "_") in err.replace("-", "_"), err


@pytest.mark.parametrize("flag", ["--learning-rate 0.7", "--env-id Taxi-v4", "--seed 9", "--algorithm sarsa"])
def test_resume_refuses_another_algorithm(flag, copied, complaint):
    """Fails if a flag that changes the algorithm is taken, or ignored without a word, when a run is resumed."""
    assert flag.split()[0][2:].replace("-", "_") in complaint("--resume", copied, *flag.split())


# ------------------------------------------------------------------------------------------------- kills, NaNs, limits


class Killed(BaseException):
    """Ends `train` on the spot, as a kill would: nothing in qlearning.py may catch it."""


def train_until(moment, args, error=Killed):
    """`train(args)`, ended at the given one of the moments at which a file is half written, or has been renamed, or a
    row has been added to metrics.csv. False if it came to its end before.
    """
    left = [moment]

    def strike(path=None):
        left[0] -= 1
        if left[0] < 0:
            if path:
                os.truncate(path, os.path.getsize(path) // 2)
            raise error

    def rename(one, other, replace=os.replace):
        strike(one)
        replace(one, other)
        strike()

    def write_row(run, write=qlearning.Run.write_row):
        write(run)
        strike()

    with patch.object(os, "replace", rename), patch.object(qlearning.Run, "write_row", write_row):
        try:
            train(args)
        except (Killed, UserError):
            return True
    return False


KINDS = {
    "cliff, Sarsa": {"algorithm": "sarsa"},
    "taxi, double Q": {"env_id": "Taxi-v4", "algorithm": "double-q", "exploration_fraction": 0.5, "anneal_lr": True},
    "mountain car": {"env_id": "MountainCar-v0", "max_episode_steps": 40},
    "stopped early": {
        "env_id": "FrozenLake-v1",
        "env_kwargs": NOT_SLIPPERY,
        "stop_at_return": 1.0,
        "total_timesteps": 5000,
    },
    "reset not clean, wrapped": {
        "env_id": "Unclean-v0",
        "wrappers": ("tests.runs.run_envs.Own",),
        "grid_low": (-3, -3),
        "grid_high": (3, 3),
        "grid_size": 5,
    },
    "lake, expected Sarsa": {"env_id": "FrozenLake-v1", "algorithm": "expected-sarsa"},
    "blackjack": {"env_id": "Blackjack-v1", "total_timesteps": 120, "checkpoint_every": 40},
    "lander": {"env_id": "LunarLander-v3", "grid_size": 3, "max_episode_steps": 20, "total_timesteps": 100},
}


SLOW = ("lake, expected Sarsa", "blackjack", "lander")


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=slow)], ids=["few", "all"])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=slow) if kind in SLOW else kind for kind in KINDS])
def test_killed_around_every_write(kind, stride, no_pictures):
    """Fails if there is a moment in or between writes at which a kill costs more than the work since the checkpoint,
    for any kind of environment, or if going on is not the same as having gone on.
    """
    small = {"total_timesteps": 250, "checkpoint_every": 80, "eval_every": 120, "eval_episodes": 1, "progress": False}
    given = {name: KINDS[kind][name] for name in ("env_id", "wrappers") if name in KINDS[kind]}
    small |= {"max_episode_steps": 60} | KINDS[kind]
    train(tuned(**small, run_dir="unbroken"))
    for moment in range(1, 1000, stride):
        if not train_until(moment, tuned(**small, run_dir="run")):
            break
        if Path("run/config.json").exists():
            train(tuned(resume="run", **given))
        else:
            train(tuned(**small, run_dir="run"))
        assert_same_run("unbroken", "run")
        shutil.rmtree("run")
    assert moment > 20


@slow
@pytest.mark.parametrize(
    "flags",
    [
        "--env-id CliffWalking-v1",
        "--env-id Taxi-v4 --algorithm double-q --exploration-fraction 0.5",
        "--env-id MountainCar-v0 --algorithm sarsa",
        "--env-id Blackjack-v1 --algorithm expected-sarsa",
    ],
)
def test_killed_at_random_moments(flags, kills=8):
    """Fails if a checkpoint lacks anything that the rest of the run depends on, or is ever found half written."""
    shutil.copy(qlearning.__file__, ".")
    flags = [*flags.split(), *"--total-timesteps 60000 --checkpoint-every 300 --eval-episodes 2 --no-progress".split()]
    shell(Path(), "qlearning.py", *flags, "--run-dir", "unbroken")
    assert kill_and_resume(Path(), "qlearning.py", "killed", flags, kills, Path("unbroken"))[0] == kills
    assert_same_run("unbroken", "killed")


@pytest.mark.parametrize("where", ["init", "reset", "step", "render"])
def test_what_an_environment_raises_keeps_its_traceback(where):
    """Fails if an error of the environment's own (here: an OSError) passes for something else, such as a full disk."""
    film = ["--capture-video"] if where == "render" else []
    with pytest.raises(OSError, match=f"from within {where}"):
        main("--env-id", f"Raises{where.title()}-v0", "--grid-size", 2, "--no-progress", *film)


def test_full_disk(no_pictures):
    """Fails if a full disk ends in anything but a UserError that leaves a run to go on with."""
    small = {"total_timesteps": 250, "checkpoint_every": 80, "eval_every": 120, "eval_episodes": 1, "progress": False}
    train(tuned(**small, run_dir="unbroken", max_episode_steps=60))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert train_until(12, tuned(**small, run_dir="run", max_episode_steps=60), error)
    train(tuned(resume="run"))
    assert_same_run("unbroken", "run")


def test_resume_with_more_steps_goes_on(copied, no_pictures):
    """Fails if a finished run is changed by --resume, cannot be prolonged, or begins anew."""
    before = rows()
    assert main("--resume", "run") == 0 and rows() == before
    assert main("--resume", "run", "--total-timesteps", 5000) == 0
    assert rows()[: len(before)] == before and int(rows()[-1]["step"]) == steps_and_returns()[0] >= 5000


@pytest.mark.parametrize("field", ["observation", "reward"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_nan_from_the_environment_ends_the_run(field, value, capsys, no_pictures):
    """Fails if a NaN is learnt from, if the message names another step, or if it reaches the checkpoint."""
    kwargs = json.dumps({"field": field, "at": 133, "value": value})
    flags = ["--env-id", "Faulty-v0", "--env-kwargs", kwargs, "--total-timesteps", 1000, "--eval-every", 100]
    flags += ["--checkpoint-every", 150, "--eval-episodes", 2, "--no-progress", "--run-dir", "run"]
    assert main(*flags) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Faulty-v0, step 133:" in err and field in err
    assert (
        not Path("run/checkpoint.npz").exists() and np.isfinite(read_state("run/models/best.npz")["agent"]["q"]).all()
    )
    assert main("--evaluate", "run") == 0 and "10.00 ± 0.00" in capsys.readouterr().out
    assert (
        main("--env-id", "Faulty-v0", "--env-kwargs", '{"field": "first observation", "at": 1}', "--no-progress") == 2
    )
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "step 0:" in err and "observation" in err


@pytest.mark.parametrize(
    "limit, length", [({"max_episode_steps": 7}, 7), ({"max_episode_return": 8.5}, 9), ({}, 1000)], ids=str
)
def test_limits_truncate(limit, length, no_pictures):
    """Fails if a limit of steps or return is ignored or off by one, or if an endless episode does not end by itself."""
    small = {"env_id": "Endless-v0", "grid_size": 2, "eval_episodes": 2, "progress": False}
    final = train(Args(total_timesteps=3 * length, run_dir="run", **small, **limit))
    assert steps_and_returns()[1] == [[length * (n + 1), length] for n in range(3)]
    assert final["eval_return_mean"] == length and final["global_step"] == 3 * length


def test_stop_at_return(no_pictures):
    """Fails if the run does not stop at the first evaluation that is good enough, whatever its training episodes do."""
    lake = {"env_id": "FrozenLake-v1", "env_kwargs": NOT_SLIPPERY, "total_timesteps": 10**6, "eval_every": 1000}
    final = train(tuned(**lake, eval_episodes=2, stop_at_return=1.0, progress=False, run_dir="run"))
    *earlier, last = steps_and_returns()[2]
    assert last[1] == 1 and all(mean < 1 for _, mean, *_ in earlier) and final["global_step"] == last[0] < 100_000
    assert train(tuned(resume="run"))["global_step"] == last[0]
