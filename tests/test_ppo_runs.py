"""Whole runs of ppo.py: copied into an empty folder, run, killed, resumed, evaluated, fed bad input, and learning.

What a user would do at a shell runs as a process of its own. What needs many short runs goes through `train` or `main`
in this process. The environments made for this file stand in run_envs.py.
"""

import contextlib
import csv
import dataclasses
import importlib.metadata
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import run_envs  # noqa: F401  (registers its environments)
import torch

import ppo
from ppo import Args, evaluate, load, train

SOURCE = Path(ppo.__file__).read_bytes()
TIME_COLUMNS = ("seconds", "sps")

# CartPole in rollouts of 4 x 32 steps: an iteration takes some ten milliseconds.
SMALL = "--num-envs 4 --num-steps 32 --num-minibatches 4 --eval-episodes 4 --no-progress".split()
MATCH = dict(env_id="run_envs:Match-v0", num_envs=8, num_steps=32, num_minibatches=4, learning_rate=3e-3, gamma=0.5)
MATCH |= dict(ent_coef=0.0, total_timesteps=6_000, eval_episodes=20, eval_every=10**9, torch_threads=1, progress=False)
IMAGE = json.dumps({"observation": "channels_last"})


# -------------------------------------------------------------------------------------------------------- helpers


@pytest.fixture
def alone(tmp_path):
    """An empty folder with nothing but ppo.py in it."""
    (tmp_path / "ppo.py").write_bytes(SOURCE)
    return tmp_path


@pytest.fixture(autouse=True)
def one_thread():
    """`train` sets the number of threads of this process: put it back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def command(flags):
    return [sys.executable, "ppo.py", *map(str, flags)]


def surroundings(**extra):
    """Environment variables of a process: one thread, no window, our environments importable, no CUDA device."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | own | extra


def shell(folder, *flags, code=0, **variables):
    """Run `python ppo.py flags…` in `folder`, expect the exit code, return the finished process."""
    done = subprocess.run(command(flags), cwd=folder, env=surroundings(**variables), capture_output=True, text=True)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def metrics(run_dir):
    """The text of metrics.csv as rows of cells, header first, without the columns that hold times."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    kept = [i for i, name in enumerate(header) if name not in TIME_COLUMNS]
    assert len(kept) == len(header) - 2 and all(len(row) == len(header) for row in rows)
    return [[row[i] for i in kept] for row in [header, *rows]]


def column(run_dir, name):
    header, *rows = metrics(run_dir)
    return [float(row[header.index(name)]) for row in rows]


def torch_file(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def episode_returns(run_dir):
    return [total for _, total in torch_file(run_dir / "checkpoint.pt")["episodes"]]


def assert_equal(one, other, where=""):
    """Two nests of dicts, lists and tensors are the same, bit for bit; the message says where they are not."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other)):
            assert_equal(a, b, f"{where}[{i}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    else:
        assert one == other, where


def assert_same_run(one, other):
    """Two finished runs agree in everything but the time they took: figures, every saved weight, generators, buffers
    of the optimiser, returns of all episodes, evaluations."""
    assert metrics(one) == metrics(other)
    files = [sorted(path.name for path in (run / "models").iterdir()) for run in (one, other)]
    assert files[0] == files[1]
    for name in files[0]:
        assert_equal(torch_file(one / "models" / name), torch_file(other / "models" / name), name)
    states = [torch_file(run / "checkpoint.pt") for run in (one, other)]
    for state in states:
        assert state.pop("seconds") > 0
    assert_equal(*states, "checkpoint.pt")
    times = ("seconds", "steps_per_second")
    final = [{k: v for k, v in summary(run).items() if k not in times} for run in (one, other)]
    assert final[0] == final[1]


def snapshot(folder):
    """Every file under `folder` with its content."""
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def main(monkeypatch, tmp_path):
    """main(*flags): what `python ppo.py flags…` does in the empty folder tmp_path, in this process; the exit code."""

    def call(*flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["ppo.py", *map(str, flags)])
        try:
            ppo.main()
        except SystemExit as stop:
            return stop.code or 0
        return 0

    return call


@pytest.fixture
def complaint(main, capfd, tmp_path):
    """complaint(*flags): the one line on stderr that these flags must lead to; nothing may be written."""

    def call(*flags):
        before = snapshot(tmp_path)
        capfd.readouterr()
        code, err = main(*flags), capfd.readouterr().err
        assert_one_line(err)
        assert code == 2, err
        assert snapshot(tmp_path) == before
        return err

    return call


def assert_one_line(err):
    assert err.endswith("\n") and err.count("\n") == 1 and len(err) > 10, err
    assert not any(word in err for word in ("Traceback", "usage:", "│", "---", "\r", "\x1b")), err


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a short finished run on CartPole. Only to be read: copy it before changing anything."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "ppo.py").write_bytes(SOURCE)
    done = shell(folder, "--total-timesteps", 1500, "--run-dir", "run", *SMALL)
    assert done.stderr == ""  # no warnings
    return folder / "run"


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run in tmp_path/run."""
    return shutil.copytree(finished, tmp_path / "run")


# ---------------------------------------------------------------------------------------------- copied away, alone


def test_copied_alone_it_leaves_a_complete_run_folder(alone):
    """Fails if ppo.py imports a sibling, or if a part of the run folder or the last two lines are missing."""
    flags = "--total-timesteps 3000 --num-envs 4 --num-steps 64 --eval-every 1000 --eval-episodes 3".split()
    done = shell(alone, *flags)
    assert sorted(path.name for path in alone.iterdir()) == ["ppo.py", "runs"]
    (run,) = (alone / "runs").iterdir()
    assert run.name.startswith("CartPole-v1__ppo__1__")

    final = summary(run)
    names = "eval_return_mean eval_return_std eval_episodes global_step seconds steps_per_second".split()
    assert set(names) <= set(final)
    assert final["eval_episodes"] == 3 and 3000 <= final["global_step"] < 3000 + 4 * 64
    assert final["steps_per_second"] == pytest.approx(final["global_step"] / final["seconds"])

    evaluation, curve = done.stdout.splitlines()[-2:]
    assert evaluation.startswith("evaluation") and f"{final['eval_return_mean']:.1f} ±" in evaluation
    assert str(run.relative_to(alone) / "learning_curve.png") in curve
    assert "mean return" in done.stderr and "steps/s" in done.stderr  # the progress bar

    header = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert header[:4] == ["step", "seconds", "sps", "return_mean"]
    steps = column(run, "step")
    assert steps == sorted(set(steps)) and steps[-1] == final["global_step"]
    for name in header:
        if name not in TIME_COLUMNS:
            assert np.isfinite(column(run, name)[1:]).all(), name

    evaluations = torch_file(run / "checkpoint.pt")["evaluations"]
    assert [step // 1000 for step, _, _ in evaluations] == [1, 2, 3]
    saved = {path.name for path in (run / "models").iterdir()}
    assert saved == {"best.pt"} | {f"{step}.pt" for step, _, _ in evaluations}
    best = torch_file(run / "models/best.pt")["step"]
    assert max(mean for _, mean, _ in evaluations) == dict((step, mean) for step, mean, _ in evaluations)[best]
    assert evaluations[-1] == (final["global_step"], final["eval_return_mean"], final["eval_return_std"])
    assert not list(run.rglob("*.tmp"))

    from matplotlib.image import imread

    picture = imread(run / "learning_curve.png")
    assert picture.shape[0] >= 600 and picture.shape[1] >= 800
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20  # something is drawn


def test_config_holds_arguments_versions_and_machine(finished):
    """Fails if an argument is left out of config.json, or a value is the default rather than the one used."""
    config = json.loads((finished / "config.json").read_text())
    assert set(config["args"]) == {field.name for field in dataclasses.fields(Args)}
    given = {"total_timesteps": 1500, "num_envs": 4, "num_steps": 32, "learning_rate": 2e-3, "progress": False}
    assert given | config["args"] == config["args"]  # 2e-3 comes from TUNED
    for name in ("torch", "gymnasium", "numpy"):
        assert config["versions"][name] == importlib.metadata.version(name)
    assert "Python" in config["machine"]
    assert {"commit", "dirty"} <= set(config["git"])


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_config_names_the_commit(alone):
    """Fails if the commit of the script's repository or its dirty flag is wrong; a tag must not hide the hash."""

    def git(*words):
        who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
        return subprocess.run(["git", *who, *words], cwd=alone, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", "ppo.py")
    git("commit", "-q", "-m", "one file")
    tiny = "--total-timesteps 64 --num-envs 1 --num-steps 64 --eval-episodes 1 --no-progress --run-dir".split()
    shell(alone, *tiny, "clean")
    with (alone / "ppo.py").open("a") as file:
        file.write("# changed\n")
    shell(alone, *tiny, "dirty")
    for name in ("clean", "dirty"):
        stored = json.loads((alone / name / "config.json").read_text())["git"]
        assert stored == {"commit": git("rev-parse", "HEAD").strip(), "dirty": name == "dirty"}


def test_evaluate_prints_mean_and_deviation(finished, main, capsys):
    """Fails if best, last or a step plays other weights than the saved ones, or if the seed or episodes are ignored."""
    step = summary(finished)["global_step"]
    for model, file in (("best", "models/best.pt"), ("last", "checkpoint.pt"), (step, f"models/{step}.pt")):
        assert main("--evaluate", finished, "--model", model, "--eval-episodes", 3, "--seed", 7) == 0
        (line,) = capsys.readouterr().out.splitlines()
        agent = load(finished)
        agent.load_state_dict(torch_file(finished / file)["agent"])
        mean, std = evaluate(agent, Args(evaluate=str(finished)), 3, 7 + 10_000)
        assert f"{mean:.2f} ± {std:.2f}" in line and "3 episodes" in line


def test_evaluate_as_a_process_writes_nothing(finished, tmp_path):
    """Fails if evaluation trains, or leaves anything behind."""
    before = snapshot(finished.parent)
    done = shell(finished.parent, "--evaluate", "run")
    assert "±" in done.stdout and "4 episodes" in done.stdout  # as many as the run's own evaluations had
    after = snapshot(finished.parent)
    assert {k: v for k, v in after.items() if "__pycache__" not in str(k)} == before


def test_render_shows_the_agent(copied, main, monkeypatch):
    """Fails if --render does not open a window (here: a driver without a screen)."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    made, make_envs = [], ppo.make_envs
    monkeypatch.setattr(ppo, "make_envs", lambda *args: made.append(args[2:]) or make_envs(*args))
    assert main("--evaluate", copied, "--render", "--eval-episodes", 1, "--max-episode-steps", 10) == 0
    assert any("human" in rest for rest in made)


# ----------------------------------------------------------------------------------------------------- determinism


def test_config_of_a_run_reproduces_it_and_flags_win(finished, main, tmp_path):
    """Fails if an argument is not taken from --config, if it wins over a flag, or if anything random is not seeded."""
    assert main("--config", finished / "config.json", "--run-dir", "again") == 0
    assert_same_run(finished, tmp_path / "again")
    assert main("--config", finished / "config.json", "--run-dir", "other", "--seed", 2, "--num-steps", 16) == 0
    args = json.loads((tmp_path / "other/config.json").read_text())["args"]
    assert (args["seed"], args["num_steps"], args["num_envs"]) == (2, 16, 4)
    assert metrics(finished) != metrics(tmp_path / "other")


@pytest.mark.parametrize(
    "flags",
    ["--env-id CartPole-v1", "--env-id Pendulum-v1 --normalize-obs --normalize-reward --buffer vtrace"],
    ids=["discrete", "continuous, normalised"],
)
def test_same_seed_same_run(flags, alone):
    """Fails if two processes with the same seed differ in one bit of weights or figures, or two seeds do not differ."""
    flags = [*flags.split(), *SMALL, "--total-timesteps", 1000, "--max-episode-steps", 40]
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        shell(alone, *flags, "--run-dir", name, "--seed", seed, PYTHONHASHSEED=str(len(name)))
    assert_same_run(alone / "one", alone / "two")
    assert metrics(alone / "one") != metrics(alone / "three")
    weights = [torch_file(alone / name / "checkpoint.pt")["agent"] for name in ("one", "three")]
    assert not any(torch.equal(weights[0][k], weights[1][k]) for k in weights[0] if k.endswith("weight"))


def test_generators_of_the_process_do_not_matter(finished, main, tmp_path):
    """Fails if a run depends on the generators that a notebook shares with everybody."""
    torch.manual_seed(123)
    np.random.seed(456)
    random.seed(789)
    assert main("--config", finished / "config.json", "--run-dir", "again") == 0
    assert_same_run(finished, tmp_path / "again")


# -------------------------------------------------------------------------------------------------------- notebook


def test_notebook(tmp_path, monkeypatch, capsys):
    """Fails if the tuned values do not apply to Args(…), if what is given does not win, or if results differ."""
    monkeypatch.chdir(tmp_path)
    plain = {field.name: field.default for field in dataclasses.fields(Args)}
    tuned = ppo.TUNED["CartPole-v1"]
    differing = [name for name in tuned if tuned[name] != plain[name]]
    assert "learning_rate" in differing
    assert {name: getattr(Args(env_id="CartPole-v1"), name) for name in tuned} == tuned
    assert {name: getattr(Args(), name) for name in tuned} == tuned  # CartPole is the default
    for name in differing:  # the dataclass default is a value like any other where it is given
        assert getattr(Args(env_id="CartPole-v1", **{name: plain[name]}), name) == plain[name]
    assert Args(env_id="Nothing-v0").learning_rate == plain["learning_rate"]

    args = Args(env_id="CartPole-v1", total_timesteps=2000, num_envs=4, num_steps=64, eval_episodes=3, progress=False)
    other = dataclasses.replace(args, seed=5, learning_rate=plain["learning_rate"])
    assert (other.seed, other.learning_rate, other.num_envs) == (5, plain["learning_rate"], 4)
    assert other.gamma == tuned["gamma"] and args.seed == 1

    final = train(args)
    (run,) = (tmp_path / "runs").iterdir()
    assert final == summary(run)
    last = load(run, "last")
    assert evaluate(last, args, 3, args.seed + 10_000) == (final["eval_return_mean"], final["eval_return_std"])
    mean, std = evaluate(load(str(run)), args)
    assert 5 < mean <= 500 and std >= 0
    actions = last.act(np.zeros((6, 4), np.float32))
    assert actions.shape == (6,) and set(actions) <= {0, 1}


def test_notebook_trains_again_with_replaced_arguments(tmp_path, monkeypatch):
    """Fails if a run leaves marks in its Args that keep a changed copy of them from being trained."""
    monkeypatch.chdir(tmp_path)
    args = Args(total_timesteps=64, num_envs=1, num_steps=64, eval_episodes=1, progress=False)
    train(args)
    train(dataclasses.replace(args, seed=2))
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_normalisers_come_back(tmp_path):
    """Fails if the running means are not saved with the weights: the loaded agent would then play differently."""
    small = dict(num_envs=4, num_steps=64, total_timesteps=1000, eval_episodes=3, progress=False)
    args = Args(env_id="Pendulum-v1", normalize_obs=True, normalize_reward=True, run_dir=str(tmp_path / "run"), **small)
    final = train(args)
    last = load(tmp_path / "run", "last")
    assert evaluate(last, args, 3, args.seed + 10_000) == (final["eval_return_mean"], final["eval_return_std"])
    last.obs_stats.mean += 0.1
    assert evaluate(last, args, 3, args.seed + 10_000)[0] != final["eval_return_mean"]  # they do matter


def test_two_runs_in_the_same_second(tmp_path, monkeypatch):
    """Fails if the second run is refused, or (two processes at once) writes its rows between those of the first."""
    monkeypatch.chdir(tmp_path)
    for learning_rate in (1e-3, 2e-3):  # as in a sweep
        small = dict(total_timesteps=32, num_envs=1, num_steps=64, eval_episodes=1, progress=False)
        train(Args(learning_rate=learning_rate, **small))
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 2 and all(len(metrics(run)) == 2 for run in runs)


def test_importing_does_nothing(alone):
    """Fails if the import seeds, writes, prints, or asks for CUDA or a plotting library."""
    lines = (
        "import random, numpy, torch; states = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1]",
        "import sys, os, ppo; assert 'matplotlib' not in sys.modules and not torch.cuda.is_initialized()",
        "assert states[0] == random.getstate() and torch.equal(states[1], torch.get_rng_state())",
        "assert (states[2] == numpy.random.get_state()[1]).all() and os.listdir() == ['ppo.py']",
    )
    python = [sys.executable, "-B", "-c", "\n".join(lines)]
    done = subprocess.run(python, cwd=alone, env=surroundings(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---------------------------------------------------------------------------------------------------- kill, resume


def kill_and_resume(folder, run, flags, kills, longest, seed):
    """Kill -9 a run `kills` times, each time at a random moment after its next checkpoint, and resume it each time.

    `longest` is the most seconds between that checkpoint and the kill. At last it may finish. Returns the number of
    kills that found it at work.
    """
    rng, done, stamp = random.Random(seed), 0, None
    checkpoint = folder / run / "checkpoint.pt"
    argv = [*flags, "--run-dir", run]
    while True:
        process = subprocess.Popen(
            command(argv), cwd=folder, env=surroundings(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            if done < kills:
                while process.poll() is None and (not checkpoint.exists() or checkpoint.stat().st_mtime_ns == stamp):
                    time.sleep(0.002)
                time.sleep(rng.uniform(0, longest))
                process.kill()
            _, err = process.communicate()
        finally:
            process.kill()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, err
            return done
        done, stamp, argv = done + 1, checkpoint.stat().st_mtime_ns, ["--resume", run, "--no-progress"]


KILLED = {
    "CartPole": ["--env-id", "CartPole-v1", *SMALL],
    "Taxi": ["--env-id", "Taxi-v4", *SMALL, "--max-episode-steps", "60"],
    "wrapped, normalised, V-trace": [
        *["--env-id", "CartPole-v1", *SMALL, "--wrappers", "gymnasium.wrappers.TimeAwareObservation"],
        *"--normalize-obs --normalize-reward --buffer vtrace".split(),
    ],
    "continuous, return limit": [
        *["--env-id", "Pendulum-v1", *SMALL, "--max-episode-return", "-30", "--max-episode-steps", "50"],
        *"--normalize-obs --normalize-reward --target-kl 0.02".split(),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kills", "steps", "longest"),
    [
        ("CartPole", 2, 20_000, 0.1),
        pytest.param("CartPole", 20, 90_000, 0.15, marks=pytest.mark.slow),
        pytest.param("Taxi", 8, 60_000, 0.3, marks=pytest.mark.slow),
        pytest.param("wrapped, normalised, V-trace", 8, 60_000, 0.3, marks=pytest.mark.slow),
        pytest.param("continuous, return limit", 8, 60_000, 0.3, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(name, kills, steps, longest, alone):
    """Fails if a checkpoint lacks anything that the rest of the run depends on, or is ever found half written."""
    flags = [*KILLED[name], "--total-timesteps", steps, "--checkpoint-every", 128]
    shell(alone, *flags, "--run-dir", "unbroken")
    assert kill_and_resume(alone, "killed", flags, kills, longest, seed=kills) == kills
    assert_same_run(alone / "unbroken", alone / "killed")
    assert len(list((alone / "killed").glob("envs_*.pkl"))) == 1  # states of environments do not pile up


class Killed(BaseException):
    """Ends `train` on the spot, as a kill would: nothing in ppo.py may catch it."""


def train_until(event, args, monkeypatch):
    """`train(args)`, ended at the `event`-th moment that matters for what is on disk; False if it finished before.

    Moments: a file is half written, has been renamed, is to be removed; a row has been added to metrics.csv.
    """
    left = [event]

    def moment(cleanup=lambda: None):
        left[0] -= 1
        if left[0] < 0:
            cleanup()
            raise Killed

    def patched(function, before=None, after=None):
        def call(*given, **options):
            if before:
                moment()
            result = function(*given, **options)
            if after:
                moment(lambda: after(*given))
            return result

        return call

    def halve(path):
        os.truncate(path, os.path.getsize(path) // 2)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", patched(torch.save, after=lambda state, path: halve(path)))
        patch.setattr(Path, "write_bytes", patched(Path.write_bytes, after=lambda path, content: halve(path)))
        patch.setattr(Path, "write_text", patched(Path.write_text, after=lambda path, content: halve(path)))
        patch.setattr(os, "replace", patched(os.replace, after=lambda *_: None))
        patch.setattr(ppo, "log_row", patched(ppo.log_row, after=lambda *_: None))
        patch.setattr(Path, "unlink", patched(Path.unlink, before=True))
        try:
            train(args)
        except Killed:
            return False
    return True


@pytest.mark.parametrize(
    "given",
    [
        dict(env_id="CartPole-v1"),
        dict(env_id="CartPole-v1", stop_at_return=5.0, max_episode_steps=10, total_timesteps=10**6),
        dict(env_id="Taxi-v4", max_episode_steps=30),
        dict(env_id="FrozenLake-v1", buffer="vanilla", normalize_reward=True),
        dict(
            env_id="CartPole-v1",
            wrappers=("gymnasium.wrappers.TimeAwareObservation",),
            max_episode_steps=40,
            normalize_obs=True,
            normalize_reward=True,
            buffer="vtrace",
        ),
        dict(env_id="Pendulum-v1", max_episode_return=-30.0, max_episode_steps=50, normalize_obs=True),
    ],
    ids=lambda given: ", ".join(map(str, given.values())),
)
def test_killed_around_every_write(given, tmp_path, monkeypatch):
    """Fails if there is a moment in or between writes at which a kill costs more than the work since the checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo, "draw_curve", lambda *_: None)  # takes longer than all the rest, and nothing reads it
    small = dict(num_envs=2, num_steps=32, num_minibatches=2, update_epochs=2, eval_episodes=1, progress=False)
    small |= dict(total_timesteps=5 * 64, checkpoint_every=64, eval_every=150, run_dir="unbroken")
    if "stop_at_return" in given:  # 100 episodes are needed
        small |= dict(num_envs=8, checkpoint_every=300, eval_every=600)
    small |= given
    train(Args(**small))
    deaths = 0
    for event in range(1000):
        run = tmp_path / f"killed{event}"
        if train_until(event, Args(**small | {"run_dir": str(run)}), monkeypatch):
            break
        if (run / "checkpoint.pt").exists():
            train(Args(resume=str(run)))
            assert_same_run(tmp_path / "unbroken", run)
            deaths += 1
        shutil.rmtree(run, ignore_errors=True)
    assert deaths >= 12


def test_left_over_files_do_not_hurt(copied, finished, main):
    """Fails if --resume takes the state of environments from another file than the one checkpoint.pt names."""
    for name in ("envs_999999.pkl", "envs_5.pkl", "checkpoint.pt.tmp", "envs_1.pkl.tmp", "metrics.csv.tmp"):
        (copied / name).write_bytes(b"half of some")
    assert main("--resume", copied) == 0
    assert_same_run(finished, copied)


def test_environment_that_cannot_be_carried_over_restarts_its_episodes(alone):
    """Fails if a resumed run goes on with environments that have lost their state and does not say so."""
    flags = [*SMALL, "--env-id", "LunarLander-v3", "--total-timesteps", 2500]
    flags += ["--checkpoint-every", 128, "--eval-every", 10**6]
    assert kill_and_resume(alone, "run", flags, 1, 0, seed=0) == 1
    done = shell(alone, "--resume", "run")  # finished by now, but it says the same
    assert "LunarLander-v3" in done.stdout and "episodes restart" in done.stdout
    steps = column(alone / "run", "step")
    assert steps == sorted(set(steps)) and steps[-1] == summary(alone / "run")["global_step"] >= 2500
    assert not list((alone / "run").glob("envs_*.pkl"))


def test_wrappers_of_other_people_are_not_carried_over(tmp_path, monkeypatch, capsys):
    """Fails if the state of a wrapper nobody has tested is pickled and trusted."""
    monkeypatch.chdir(tmp_path)
    args = Args(wrappers=("run_envs_wrapper.Same",), total_timesteps=64, num_envs=1, num_steps=64, eval_episodes=1)
    (tmp_path / "run_envs_wrapper.py").write_text("import gymnasium\nclass Same(gymnasium.Wrapper): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    train(dataclasses.replace(args, run_dir="run", progress=False))
    assert not list((tmp_path / "run").glob("envs_*.pkl"))
    train(Args(resume="run", total_timesteps=200))
    assert "episodes restart" in capsys.readouterr().out


def test_resume_of_a_finished_run_changes_nothing(copied, finished, main, capsys):
    """Fails if a finished run is trained on."""
    assert main("--resume", copied) == 0
    assert_same_run(finished, copied)
    assert capsys.readouterr().out.splitlines()[-2].startswith("evaluation")


def test_resume_of_a_run_that_stopped_early_changes_nothing(tmp_path, monkeypatch):
    """Fails if a run that has reached --stop-at-return trains on when it is resumed."""
    monkeypatch.chdir(tmp_path)
    args = Args(stop_at_return=10.0, num_envs=4, num_steps=64, eval_episodes=2, progress=False, run_dir="run")
    train(args)
    before = summary(tmp_path / "run"), metrics(tmp_path / "run")
    train(Args(resume="run"))
    assert before[0]["global_step"] == summary(tmp_path / "run")["global_step"]
    assert before[1] == metrics(tmp_path / "run")


def test_resume_with_more_steps_goes_on(copied, main):
    """Fails if a resumed run cannot be prolonged, or begins anew."""
    before = metrics(copied)
    assert main("--resume", copied, "--total-timesteps", 2500) == 0
    after = metrics(copied)
    assert after[: len(before)] == before and 2500 <= column(copied, "step")[-1] < 2500 + 128
    assert summary(copied)["global_step"] == column(copied, "step")[-1]


def test_resumed_with_fewer_steps_than_it_has_taken(alone):
    """Fails if a run that was killed before its first evaluation, and is resumed when it is over, ends badly."""
    flags = [*SMALL, "--total-timesteps", 100_000, "--checkpoint-every", 128, "--eval-every", 10**6]
    process = subprocess.Popen(command([*flags, "--run-dir", "run"]), cwd=alone, env=surroundings())
    while process.poll() is None and len(list((alone / "run").glob("metrics.csv"))) == 0:
        time.sleep(0.01)
    time.sleep(0.3)
    process.kill()
    process.wait()
    assert "evaluation: " in shell(alone, "--resume", "run", "--total-timesteps", 10).stdout
    assert json.loads((alone / "run/summary.json").read_text())["global_step"] > 10


def test_a_prolonged_run_that_is_killed_can_be_resumed(copied, main, monkeypatch):
    """Fails if the new number of steps is forgotten, so that --resume takes the run for finished."""
    changed = Args(resume=str(copied), total_timesteps=4000, checkpoint_every=128)
    assert not train_until(12, changed, monkeypatch)
    assert main("--resume", copied) == 0
    assert summary(copied)["global_step"] >= 4000
    assert json.loads((copied / "config.json").read_text())["args"]["total_timesteps"] == 4000


@pytest.mark.parametrize("flag", ["--learning-rate 0.5", "--env-id Acrobot-v1", "--seed 9", "--num-envs 8"])
def test_resume_refuses_another_algorithm(flag, copied, complaint):
    """Fails if a flag that changes the algorithm is taken, or ignored without a word, when a run is resumed."""
    assert flag.split()[0][2:].replace("-", "_") in complaint("--resume", copied, *flag.split())


def test_resume_needs_a_checkpoint(copied, complaint, tmp_path):
    """Fails if a folder that holds no run, or a run without checkpoint, ends in a traceback."""
    (copied / "checkpoint.pt").unlink()
    assert "checkpoint.pt" in complaint("--resume", copied)
    (tmp_path / "empty").mkdir()
    assert "config.json" in complaint("--resume", "empty")
    assert "config.json" in complaint("--resume", "missing")


@pytest.mark.parametrize("part", ["envs", "metrics.csv"])
@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_resume_of_a_damaged_run(part, damage, copied, complaint):
    """Fails if a run folder from which a file is missing or damaged ends in a traceback."""
    (path,) = copied.glob("envs_*.pkl") if part == "envs" else [copied / part]
    path.unlink() if damage == "missing" else path.write_bytes(b"\x80garbage\n,,\n")
    assert path.name in complaint("--resume", copied)


def test_resume_from_a_file_that_holds_only_weights(copied, complaint):
    """Fails if a checkpoint without optimiser and generators (a model copied over it) ends in a traceback."""
    shutil.copy(copied / "models/best.pt", copied / "checkpoint.pt")
    assert "checkpoint.pt" in complaint("--resume", copied)


def test_interrupted_with_ctrl_c_it_says_how_to_go_on(alone):
    """Fails if Ctrl-C ends in a traceback, or if what it says does not lead on."""
    flags = [*SMALL, "--total-timesteps", 10**7, "--checkpoint-every", 128, "--eval-every", 10**7, "--run-dir", "run"]

    def listen():  # where the tests run in the background, children would be born deaf to Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = dict(env=surroundings(), stderr=subprocess.PIPE, text=True, preexec_fn=listen)
    process = subprocess.Popen(command(flags), cwd=alone, **pipes)
    try:
        while process.poll() is None and not (alone / "run/checkpoint.pt").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "--resume run" in err and "Traceback" not in err
    shell(alone, "--resume", "run", "--total-timesteps", torch_file(alone / "run/checkpoint.pt")["step"] + 200)


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        # environments
        ("--env-id CartPol-v1", "CartPole"),
        ("--env-id cartpole-v1", "CartPole"),
        ("--env-id LunarLandr-v3", "LunarLander"),
        ("--env-id CartPole-v9", "v1"),
        ("--env-id Qwertyuiop-v0", "Qwertyuiop"),
        ("--env-id no_such_module:Some-v0", "no_such_module"),
        ("--env-id", "env-id"),
        # types and names of flags
        ("--learning-rte 0.1", "learning-rte"),
        ("--foo", "foo"),
        ("nonsense", "nonsense"),
        ("--num-envs 2.5", "num-envs 2.5"),
        ("--num-envs many", "num-envs many"),
        ("--gamma high", "gamma high"),
        ("--buffer replay", "buffer replay gae vtrace vanilla"),
        ("--hidden-sizes 64 wide", "wide"),
        ("--total-timesteps 1e5", "total-timesteps"),
        # ranges
        ("--gamma 1.5", "gamma 1.5"),
        ("--gamma -0.1", "gamma"),
        ("--gamma nan", "gamma nan"),
        ("--gae-lambda 2", "gae_lambda"),
        ("--learning-rate -1", "learning_rate"),
        ("--learning-rate nan", "learning_rate nan"),
        ("--clip-coef -0.2", "clip_coef"),
        ("--ent-coef nan", "ent_coef"),
        ("--target-kl -1", "target_kl"),
        ("--num-envs 0", "num_envs 0"),
        ("--num-steps 0", "num_steps"),
        ("--num-minibatches 0", "num_minibatches"),
        ("--update-epochs 0", "update_epochs"),
        ("--total-timesteps 0", "total_timesteps"),
        ("--eval-episodes 0", "eval_episodes"),
        ("--eval-every -5", "eval_every"),
        ("--checkpoint-every -5", "checkpoint_every"),
        ("--max-episode-steps 0", "max_episode_steps"),
        ("--max-episode-return nan", "max_episode_return"),
        ("--stop-at-return nan", "stop_at_return"),
        ("--hidden-sizes 64 0", "hidden_sizes"),
        ("--critic-hidden-sizes -3", "critic_hidden_sizes"),
        ("--torch-threads -1", "torch_threads"),
        ("--seed -1", "seed"),
        # at odds with each other
        ("--num-envs 3 --num-steps 5 --num-minibatches 4", "15 num_minibatches 4"),
        ("--num-envs 1 --num-steps 2 --num-minibatches 4", "num_minibatches"),
        (f"--env-id run_envs:Match-v0 --normalize-obs --env-kwargs {IMAGE.replace(' ', '')}", "normalize_obs"),
        # wrappers, arguments of the environment, device, files
        ("--wrappers no.such.Wrapper", "no.such.Wrapper"),
        ("--wrappers gymnasium.wrappers.NoSuchWrapper", "NoSuchWrapper"),
        ("--wrappers gymnasium.wrappers", "gymnasium.wrappers"),
        ("--wrappers gymnasium.wrappers.TransformObservation", "TransformObservation"),
        ("--env-kwargs {nonsense", "env_kwargs"),
        ("--env-kwargs [1]", "env_kwargs"),
        ("--env-kwargs {\"gravitas\":1}", "gravitas"),
        ("--device gpu", "gpu"),
        ("--device cuda:999", "cuda:999"),
        ("--device meta", "meta"),
        ("--run-dir taken", "taken"),
        ("--run-dir taken/deeper", "taken"),
        ("--config missing.json", "missing.json"),
        ("--resume missing", "missing"),
        ("--evaluate missing", "missing"),
        # spaces
        ("--env-id run_envs:Match-v0 --env-kwargs {\"actions\":\"text\"}", "Text Discrete MultiBinary"),
        ("--env-id run_envs:Match-v0 --env-kwargs {\"actions\":\"tuple\"}", "Tuple Discrete"),
        ("--env-id run_envs:Match-v0 --env-kwargs {\"actions\":\"dict\"}", "Dict Discrete"),
        ("--env-id run_envs:Match-v0 --env-kwargs {\"observation\":\"sequence\"}", "Sequence"),
        ("--env-id run_envs:Match-v0 --env-kwargs {\"observation\":\"graph\"}", "Graph"),
    ],
)  # fmt: skip
def test_bad_flags(flags, words, complaint, tmp_path):
    """Fails if the complaint is longer than a line, names nothing, comes with another exit code, or leaves files."""
    (tmp_path / "taken").write_text("a file, not a folder")
    err = complaint(*flags.split(" "))
    for word in words.split():
        assert word.replace("-", "_") in err.replace("-", "_"), err


def test_infinite_learning_rate(complaint):
    """Fails if a value with which nothing can be learnt passes for being within its range."""
    assert "learning_rate" in complaint("--learning-rate", "inf")


def test_seed_too_large(complaint):
    """Fails if a seed that the generators do not take ends in a traceback."""
    assert "seed" in complaint("--seed", 2**70)


def test_a_run_is_never_overwritten(copied, complaint):
    """Fails if --run-dir of an earlier run is written to."""
    assert "holds a run" in complaint("--run-dir", copied)


@pytest.mark.parametrize("flags", ["--gamma 1.5", "--env-id CartPol-v1", "--foo", "--config bad.json"])
def test_bad_input_as_a_process(flags, alone):
    """Fails if the start of the script, outside of main, changes what main does with bad input."""
    (alone / "bad.json").write_text("{")
    before = snapshot(alone)
    done = shell(alone, *flags.split(), code=2, PYTHONDONTWRITEBYTECODE="1")
    assert_one_line(done.stderr)
    assert done.stdout == "" and snapshot(alone) == before


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_bad_flag_without_utf8(encoding, alone):
    """Fails if the complaint about a flag depends on what the terminal can draw."""
    done = shell(alone, "--num-envs", "many", code=2, PYTHONIOENCODING=encoding)
    assert_one_line(done.stderr)
    assert "num-envs" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_bad_flag_at_a_terminal(alone):
    """Fails if at a terminal, where tyro draws in colours, the complaint is not one plain line."""
    terminal, inner = os.openpty()
    try:
        variables = surroundings(TERM="xterm-256color", COLUMNS="80")
        done = subprocess.run(
            command(["--num-envs", "many"]), cwd=alone, env=variables, stdout=inner, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(inner)
        os.close(terminal)
    assert done.returncode == 2
    assert_one_line(done.stderr)
    assert "num-envs" in done.stderr


def without(package, folder):
    """Environment variables for a process that does not find a package, whether or not it is installed."""
    lines = (
        "import importlib.machinery",
        "find = importlib.machinery.PathFinder.find_spec",
        f"hide = lambda name, *rest: None if name.split('.')[0] == {package!r} else find(name, *rest)",
        "importlib.machinery.PathFinder.find_spec = hide",
    )
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text("\n".join(lines))  # which Python imports when it starts
    return {"PYTHONPATH": str(folder / "site")}


@pytest.mark.parametrize(
    ("env_id", "package", "install"),
    [
        ("HalfCheetah-v5", "mujoco", "gymnasium[mujoco]"),
        ("ALE/Pong-v5", "ale_py", "ale-py"),
        ("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid"),
    ],
)
def test_missing_package(env_id, package, install, alone):
    """Fails if the message for an environment whose package is missing does not say how to install it."""
    done = shell(alone, "--env-id", env_id, code=2, **without(package, alone))
    assert_one_line(done.stderr)
    assert "pip install" in done.stderr and install in done.stderr and not (alone / "runs").exists()


def test_missing_moviepy(alone):
    """Fails if --capture-video without the package that writes films ends in a traceback, or after work was done."""
    done = shell(alone, "--capture-video", "--total-timesteps", 64, *SMALL, code=2, **without("moviepy", alone))
    assert_one_line(done.stderr)
    assert "pip install moviepy" in done.stderr and not (alone / "runs").exists()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("not JSON", "config.json"),
        ("", "config.json"),
        ("[1, 2]", "config.json"),
        ("{}", "config.json"),
        ('{"args": 3}', "config.json"),
        ('{"args": ["seed"]}', "config.json"),
        ("\udcff\udcfe", "config.json"),
        ('{"args": {"seed": 1, "exploration_fraction": 0.1}}', "exploration_fraction"),
        ('{"args": {"learning_rate": "fast"}}', "learning_rate"),
        ('{"args": {"num_envs": 2.5}}', "num_envs"),
        ('{"args": {"num_envs": true}}', "num_envs"),
        ('{"args": {"anneal_lr": 1}}', "anneal_lr"),
        ('{"args": {"seed": null}}', "seed"),
        ('{"args": {"env_id": 7}}', "env_id"),
        ('{"args": {"env_id": ["CartPole-v1"]}}', "env_id"),
        ('{"args": {"buffer": "replay"}}', "buffer"),
        ('{"args": {"hidden_sizes": [64, "a"]}}', "hidden_sizes"),
        ('{"args": {"hidden_sizes": [[64]]}}', "hidden_sizes"),
        ('{"args": {"hidden_sizes": 64}}', "hidden_sizes"),
        ('{"args": {"wrappers": "a.b"}}', "wrappers"),
        ('{"args": {"gamma": NaN}}', "gamma"),
        ('{"args": {"gamma": 7}}', "gamma"),
        ('{"args": {"env_kwargs": {}}}', "env_kwargs"),
        ('{"args": {"target_kl": "small"}}', "target_kl"),
    ],
)
def test_malformed_config(content, word, complaint, tmp_path):
    """Fails if a config that is none, is of another script or holds a wrong type is taken or not named."""
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    assert word in complaint("--config", "config.json")
    (tmp_path / "run").mkdir()
    shutil.move(tmp_path / "config.json", tmp_path / "run/config.json")
    assert word in complaint("--evaluate", "run")


class Bomb:
    """Unpickling this creates a file named `executed` in the working directory."""

    def __reduce__(self):
        return exec, ("open('executed', 'w').close()",)


def evil(path):
    with path.open("wb") as file:
        pickle.dump({"env_id": "CartPole-v1", "agent": Bomb()}, file)


def evil_zip(path):
    torch.save({"env_id": "CartPole-v1", "agent": Bomb()}, path)


def changed(change):
    """A damage that changes the dict in the file."""

    def damage(path):
        state = torch_file(path)
        change(state)
        torch.save(state, path)

    return damage


DAMAGES = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(random.Random(0).randbytes(5000)),
    "text": lambda path: path.write_text("weights\n"),
    "pickle with code": evil,
    "zip with code": evil_zip,
    "missing": lambda path: path.unlink(),
    "a list": lambda path: torch.save([1, 2], path),
    "another environment": changed(lambda state: state.update(env_id="Acrobot-v1")),
    "no weights": changed(lambda state: state.pop("agent")),
    "a weight missing": changed(lambda state: state["agent"].pop("actor.0.weight")),
    "another shape": changed(lambda state: state["agent"].update({"actor.0.weight": torch.zeros(3, 3)})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights(damage, copied, complaint, tmp_path):
    """Fails if a damaged or foreign file of weights is taken, runs code, or ends in a traceback."""
    for file, flags in (
        ("models/best.pt", ["--evaluate", copied]),
        ("checkpoint.pt", ["--evaluate", copied, "--model", "last"]),
        ("checkpoint.pt", ["--resume", copied]),
    ):
        intact = (copied / file).read_bytes()
        DAMAGES[damage](copied / file)
        assert Path(file).name in complaint(*flags)
        assert not (tmp_path / "executed").exists()
        (copied / file).write_bytes(intact)


def test_bombs_go_off_without_care(tmp_path, monkeypatch):
    """The files above would run code if they were loaded carelessly: else the test of them could not fail."""
    monkeypatch.chdir(tmp_path)
    for make in (evil, evil_zip):
        make(tmp_path / "bomb.pt")
        with contextlib.suppress(RuntimeError):  # what has been executed is not what was expected
            torch.load(tmp_path / "bomb.pt", weights_only=False)
        (tmp_path / "executed").unlink()


def test_weights_of_another_run(copied, complaint):
    """Fails if weights are loaded into another environment or network, or a missing model is not named."""
    assert "CartPole-v1" in complaint("--evaluate", copied, "--env-id", "Acrobot-v1")
    assert "network" in complaint("--evaluate", copied, "--hidden-sizes", 32)
    assert "network" in complaint("--evaluate", copied, "--normalize-obs")
    assert "12345.pt" in complaint("--evaluate", copied, "--model", 12345)


def test_load_in_a_notebook_raises_user_errors(copied, tmp_path):
    """Fails if `load` lets anything but a UserError through."""
    with pytest.raises(ppo.UserError, match=r"config\.json"):
        load(tmp_path / "nowhere")
    with pytest.raises(ppo.UserError, match=r"models/7\.pt"):
        load(copied, 7)


# ----------------------------------------------------------------------------------------------------------- NaNs


@pytest.mark.parametrize("field", ["observation", "reward"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_nan_from_the_environment_ends_the_run(field, value, main, capsys, tmp_path):
    """Fails if a NaN is learnt from, if the message names another step, or if it reaches the checkpoint."""
    kwargs = json.dumps({"field": field, "at": 333, "value": value})
    flags = ["--env-id", "run_envs:Faulty-v0", "--env-kwargs", kwargs, "--num-envs", 1, "--num-steps", 32]
    flags += ["--checkpoint-every", 60, "--eval-every", 60, "--eval-episodes", 2, "--no-progress", "--run-dir", "run"]
    assert main(*flags) == 2
    err = capsys.readouterr().err
    assert_one_line(err)
    assert "run_envs:Faulty-v0" in err and "step 333:" in err and field in err
    assert not any(word in err for word in {"observation", "reward", "loss"} - {field})
    state = torch_file(tmp_path / "run/checkpoint.pt")
    assert 200 < state["step"] < 333 and all(torch.isfinite(weight).all() for weight in state["agent"].values())
    for model in ("last", "best"):
        assert main("--evaluate", "run", "--model", model) == 0
        assert "10.00 ± 0.00" in capsys.readouterr().out
    assert main("--resume", "run", "--total-timesteps", 600) == 0  # new environments, which stay sound until 333


def test_nan_in_one_of_many_environments(main, capsys):
    """Fails if the step named is that of the rollout's end, or counts rows instead of steps."""
    kwargs = json.dumps({"field": "reward", "at": 75})
    flags = ["--env-id", "run_envs:Faulty-v0", "--env-kwargs", kwargs, "--num-envs", 4, "--num-steps", 32]
    assert main(*flags, "--no-progress", "--run-dir", "run", "--eval-episodes", 2) == 2
    assert "step 300:" in capsys.readouterr().err


def test_nan_at_once(main, capsys):
    """Fails if the observation of the very first reset is not checked."""
    kwargs = json.dumps({"field": "first observation", "at": 1})
    flags = ["--env-id", "run_envs:Faulty-v0", "--env-kwargs", kwargs, "--num-envs", 2, "--num-steps", 32]
    assert main(*flags, "--no-progress", "--run-dir", "run") == 2
    err = capsys.readouterr().err
    assert_one_line(err)
    assert "step 0:" in err and "observation" in err


def test_message_stands_on_a_line_of_its_own(alone):
    """Fails if the progress bar is still open when the message is printed."""
    kwargs = json.dumps({"field": "reward", "at": 100})
    flags = ["--env-id", "run_envs:Faulty-v0", "--env-kwargs", kwargs, "--num-envs", 1, "--num-steps", 32]
    done = shell(alone, *flags, "--eval-episodes", 1, code=2)
    lines = [line.strip() for line in done.stderr.replace("\r", "\n").splitlines() if line.strip()]
    assert "Traceback" not in done.stderr
    assert lines[-1].startswith("ppo.py:") and "step 100" in lines[-1]


def test_infinite_reward_with_clipped_rewards(main, capsys):
    """Fails if --clip-reward, which learns from signs, hides an infinite reward from the check."""
    kwargs = json.dumps({"field": "reward", "at": 50, "value": "inf"})
    flags = ["--env-id", "run_envs:Faulty-v0", "--env-kwargs", kwargs, "--num-envs", 1, "--num-steps", 32]
    assert main(*flags, "--clip-reward", "--no-progress", "--total-timesteps", 100, "--eval-episodes", 1) == 2
    assert "step 50: reward" in capsys.readouterr().err


def test_loss_that_is_not_finite_ends_the_run(main, capsys, tmp_path):
    """Fails if weights that have become NaN are saved or trained on."""
    flags = ["--learning-rate", "1e30", "--no-anneal-lr", *SMALL, "--total-timesteps", 5000, "--run-dir", "run"]
    assert main(*flags) == 2
    err = capsys.readouterr().err
    assert_one_line(err)
    assert "CartPole-v1" in err and "step " in err and "loss" in err
    state = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)
    assert state["step"] == 0  # it happens in the first rollouts: the checkpoint from before them stays, and is good
    assert all(value.isfinite().all() for value in state["agent"].values())
    assert [path.name for path in (tmp_path / "run/models").iterdir()] == []


# ---------------------------------------------------------------------------------------------- limits and options


@pytest.mark.parametrize("env_id", ["run_envs:Endless-v0", "CartPole-v1"])
def test_max_episode_steps_truncates(env_id, tmp_path, monkeypatch):
    """Fails if the limit is ignored, off by one, or taken for a termination (which would cut the value off)."""
    monkeypatch.chdir(tmp_path)
    seen, add = [], ppo.RolloutBuffer.add
    monkeypatch.setattr(ppo.RolloutBuffer, "add", lambda self, *row: seen.append(row[3:5]) or add(self, *row))
    small = dict(num_envs=2, num_steps=50, num_minibatches=2, eval_episodes=3, progress=False, run_dir="run")
    final = train(Args(env_id=env_id, max_episode_steps=7, total_timesteps=600, **small))
    returns = episode_returns(tmp_path / "run")
    assert len(returns) > 50 and max(returns) == 7 and final["eval_return_mean"] <= 7
    terminated, truncated = (np.concatenate(flags) for flags in zip(*seen))
    assert truncated.sum() >= returns.count(7) > 0
    if "Endless" in env_id:
        assert set(returns) == {7} and not terminated.any() and final["eval_return_std"] == 0


@pytest.mark.parametrize("env_id", ["run_envs:Endless-v0", "CartPole-v1"])
def test_max_episode_return_truncates(env_id, tmp_path, monkeypatch):
    """Fails if the limit is ignored, reached late, carried over to the next episode, or taken for a termination."""
    monkeypatch.chdir(tmp_path)
    seen, add = [], ppo.RolloutBuffer.add
    monkeypatch.setattr(ppo.RolloutBuffer, "add", lambda self, *row: seen.append(row[3:5]) or add(self, *row))
    small = dict(num_envs=2, num_steps=50, num_minibatches=2, eval_episodes=3, progress=False, run_dir="run")
    final = train(Args(env_id=env_id, max_episode_return=8.5, total_timesteps=600, **small))
    returns = episode_returns(tmp_path / "run")
    assert len(returns) > 50 and max(returns) == 9 and final["eval_return_mean"] <= 9
    terminated, truncated = (np.concatenate(flags) for flags in zip(*seen))
    assert truncated.sum() == returns.count(9) and not (terminated & truncated).any()
    if "Endless" in env_id:
        assert set(returns) == {9} and not terminated.any()


def test_evaluation_of_endless_episodes_ends(tmp_path, monkeypatch):
    """Fails if an environment without a limit of its own keeps the evaluation from ending."""
    monkeypatch.chdir(tmp_path)
    args = dict(env_id="run_envs:Endless-v0", total_timesteps=64, num_envs=2, num_steps=32, num_minibatches=1)
    final = train(Args(**args, eval_episodes=2, progress=False, run_dir="run"))
    assert final["eval_return_mean"] == 1000
    assert ",nan," in (tmp_path / "run/metrics.csv").read_text()  # no episode has ended: there is no mean return


def test_stop_at_return_stops_early(tmp_path, monkeypatch):
    """Fails if the run goes on, or stops before the mean of 100 training episodes has reached the value."""
    monkeypatch.chdir(tmp_path)
    train(Args(stop_at_return=60.0, total_timesteps=150_000, eval_episodes=3, progress=False, run_dir="run"))
    run = tmp_path / "run"
    *earlier, last = zip(column(run, "return_mean"), column(run, "episodes"))
    assert last[0] >= 60 and last[1] >= 100 and not any(mean >= 60 and n >= 100 for mean, n in earlier)
    assert last[0] == pytest.approx(np.mean(episode_returns(run)[-100:]), rel=1e-6)
    assert summary(run)["global_step"] == column(run, "step")[-1] < 100_000


def test_target_kl_ends_updates_early(tmp_path, monkeypatch):
    """Fails if --target-kl is checked once per epoch, or not at all: after long steps few minibatches are within it."""
    monkeypatch.chdir(tmp_path)
    steps, step = [], ppo.Adam.step
    monkeypatch.setattr(ppo.Adam, "step", lambda *args: steps.append(1) or step(*args))
    small = dict(num_envs=4, num_steps=32, num_minibatches=4, update_epochs=4, progress=False)
    small |= dict(learning_rate=0.03, anneal_lr=False)
    counts = []
    for target in (None, 1e-4):
        train(Args(target_kl=target, total_timesteps=1000, eval_episodes=1, run_dir=f"run{target}", **small))
        counts.append(len(steps) / len(column(tmp_path / f"run{target}", "step")))
        steps.clear()
    assert counts[0] == 16 and 1 <= counts[1] < 4


def video(path):
    """(seconds, frames' shape, whether two frames differ) of an mp4."""
    from moviepy import VideoFileClip

    clip = VideoFileClip(str(path))
    try:
        first, last = clip.get_frame(0), clip.get_frame(clip.duration - 1e-3)
        return clip.duration, first.shape, bool((first != last).any())
    finally:
        clip.close()


def test_capture_video(alone):
    """Fails if no film is made of an evaluation or of --evaluate, or if it cannot be played."""
    flags = (
        "--total-timesteps 500 --num-envs 4 --num-steps 64 --eval-every 300 --eval-episodes 2 --max-episode-steps 60"
    )
    shell(alone, *flags.split(), "--run-dir", "run", "--capture-video")
    steps = [step for step, _, _ in torch_file(alone / "run/checkpoint.pt")["evaluations"]]
    assert [film.name for film in sorted((alone / "run/videos").iterdir())] == [f"{step}.mp4" for step in steps]
    shell(alone, "--evaluate", "run", "--capture-video")
    films = list((alone / "run/videos").glob("*.mp4"))
    assert len(films) == len(steps) + 1 >= 2
    for film in films:
        seconds, shape, moves = video(film)
        assert 0 < seconds < 10 and min(shape[:2]) >= 200 and moves


def test_capture_video_needs_pictures(complaint):
    """Fails if a run that cannot be filmed finds that out only at its first evaluation, after work has been done."""
    err = complaint("--env-id", "run_envs:Unpicturable-v0", "--capture-video", "--total-timesteps", 2000)
    assert "Unpicturable" in err


# -------------------------------------------------------------------------------------------------- it learns at all


def random_score(kwargs, episodes=200):
    """Mean return of random actions on Match."""
    env = gym.make("Match-v0", **kwargs)
    env.action_space.seed(0)
    total = 0
    for episode in range(episodes):
        env.reset(seed=episode)
        done = False
        while not done:
            _, reward, done, _, _ = env.step(env.action_space.sample())
            total += reward
    env.close()
    return total / episodes


@pytest.mark.parametrize("actions", ["discrete", "box", "multidiscrete", "multibinary"])
def test_every_action_space_learns(actions, tmp_path):
    """Fails if an action arrives unclipped, unshifted or out of order, or if its log-probability is another's."""
    kwargs = {"actions": actions}
    assert random_score(kwargs) < 0.6
    final = train(Args(**MATCH, env_kwargs=json.dumps(kwargs), run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] > 0.95


@pytest.mark.parametrize(
    "observation",
    ["matrix", "discrete", "multibinary", "multidiscrete", "dict", "tuple", "channels_first", "channels_last"],
)
def test_every_observation_kind_learns(observation, tmp_path):
    """Fails if a part of the observation does not reach the network, or channels are taken for rows."""
    kwargs = {"observation": observation}
    assert random_score(kwargs) < 0.6
    image = "channels" in observation
    few = {"total_timesteps": 3_000, "learning_rate": 1e-3, "device": "cpu"} if image else {}
    final = train(Args(**MATCH | few, env_kwargs=json.dumps(kwargs), run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] > 0.95
    assert evaluate(load(tmp_path / "run"), Args(evaluate=str(tmp_path / "run")), 20)[0] > 0.95
    assert load(tmp_path / "run").image == image


OPTIONS = {
    "gae": {},
    "vtrace": {"buffer": "vtrace"},
    "vanilla": {"buffer": "vanilla"},
    "value clipping": {"clip_vloss": True},
    "KL stop": {"target_kl": 0.01},
    "normalised observations": {"normalize_obs": True},
    "normalised rewards": {"normalize_reward": True},
    "critic's own sizes": {"critic_hidden_sizes": (32,)},
    "no hidden layers in the actor": {"hidden_sizes": (), "critic_hidden_sizes": (64, 64)},
    "advantages not normalised": {"norm_adv": False},
    "learning rate not annealed": {"anneal_lr": False},
    "entropy bonus": {"ent_coef": 0.01},
    "narrow clipping": {"clip_coef": 0.1},
}


def cartpole(run_dir, **options):
    return train(Args(total_timesteps=40_000, eval_every=10**9, progress=False, run_dir=str(run_dir), **options))


@pytest.fixture(scope="module")
def default_metrics(tmp_path_factory):
    run = tmp_path_factory.mktemp("default") / "run"
    cartpole(run)
    return metrics(run)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_learns(option, tmp_path, default_metrics):
    """Fails if an option keeps CartPole from being learnt (random play: 22), or has no effect at all."""
    final = cartpole(tmp_path / "run", **OPTIONS[option])
    assert final["eval_return_mean"] > 120
    assert (metrics(tmp_path / "run") == default_metrics) == (option == "gae")


def test_clipped_rewards(tmp_path, monkeypatch):
    """Fails if something else than signs is learnt from, or if reported returns are sums of signs (4, not 1)."""
    learnt, learn = [], ppo.learn
    monkeypatch.setattr(ppo, "learn", lambda *given: learnt.append(given[2].rewards.copy()) or learn(*given))
    final = train(Args(**MATCH, clip_reward=True, run_dir=str(tmp_path / "run")))
    assert set(np.unique(learnt)) == {0, 1}
    assert final["eval_return_mean"] > 0.95 and max(episode_returns(tmp_path / "run")) == 1


@pytest.mark.slow
def test_compiled_it_learns(tmp_path):
    """Fails if the compiled loss has another gradient, or compilation breaks on an option."""
    assert cartpole(tmp_path / "run", compile=True, clip_vloss=True)["eval_return_mean"] > 120


# ---------------------------------------------------------------------------------------------------------- corners


def test_one_environment_one_step(tmp_path):
    """Fails if a rollout that consists of nothing but a reset row has to be learnt from."""
    small = MATCH | dict(num_envs=1, num_steps=1, num_minibatches=1, total_timesteps=40, run_dir=str(tmp_path / "run"))
    final = train(Args(**small))
    assert final["global_step"] == 40
    assert len(episode_returns(tmp_path / "run")) == 10


def test_one_environment_one_step_normalised(tmp_path):
    """As above: statistics of no rows must not turn into NaN."""
    small = MATCH | dict(num_envs=1, num_steps=1, num_minibatches=1, total_timesteps=40, run_dir=str(tmp_path / "run"))
    assert train(Args(**small, normalize_obs=True, normalize_reward=True))["global_step"] == 40


def test_more_minibatches_than_sound_rows(tmp_path):
    """Fails if a minibatch that reset rows have emptied is learnt from."""
    small = MATCH | dict(num_envs=1, num_steps=8, num_minibatches=8, total_timesteps=100, run_dir=str(tmp_path / "run"))
    assert train(Args(**small))["global_step"] >= 100


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("observation", ["vector", "channels_last"])
def test_weights_of_a_gpu_load_on_a_cpu(observation, alone):
    """Fails if a file saved on a GPU needs one to be loaded, or if --device cuda does not learn."""
    kwargs = json.dumps({"observation": observation})
    few = {"total_timesteps": 3_000, "learning_rate": 1e-3, "run_dir": str(alone / "run"), "device": "cuda"}
    args = Args(**MATCH | few | {"env_kwargs": kwargs})
    assert train(args)["eval_return_mean"] > 0.9
    assert str(load(alone / "run").device) == ("cuda" if observation == "channels_last" else "cpu")  # auto
    for model in ("best", "last"):  # a process that sees no GPU
        mean = shell(alone, "--evaluate", "run", "--model", model).stdout.split(": ")[1].split()[0]
        assert float(mean) > 0.9
    shell(alone, "--resume", "run", "--device", "cpu", "--total-timesteps", 3500)
