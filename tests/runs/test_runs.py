"""Whole runs of every script: copied away alone, run, killed, resumed, evaluated, fed with bad input, and learning.

SCRIPTS says what the tests must know of a script: to bring a script over is to add its entry there. What a user would
do at a shell runs as a process of its own where that matters; the rest goes through `train` and `main` in this process,
each time with the process's random generators in another state. The environments stand in run_envs.py. Flags are
written as one text, words apart.
"""

import contextlib
import csv
import dataclasses
import errno
import functools
import importlib.metadata
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import gymnasium as gym
import kills
import numpy as np
import pytest
import run_envs
import torch
from kills import given_again, run_difference, shell, table, torch_file

slow = pytest.mark.slow


def words(*parts):
    """All words of all parts."""
    return [word for part in parts for word in str(part).split()]


def of(name, **kwargs):
    """Flags of an environment of run_envs.py with arguments for its constructor."""
    return f"--env-id run_envs:{name}-v0 --env-kwargs {json.dumps(kwargs, separators=(',', ':'))}"


def lines(text):
    """The entries of a table written as text: they stand on lines of their own, or between bars."""
    return [line.strip() for line in re.split(r"\n| \| ", text) if line.strip()]


# ------------------------------------------------------------------------------------------------------- the scripts


@dataclasses.dataclass(kw_only=True)
class Script:
    """What the tests must know of a script; they add what they are about."""

    name: str
    fast: str  # flags of short runs on CartPole-v1 with four environments, at most 128 steps a loop
    one: str  # with one environment, at most 32 steps a loop
    learn: str  # to learn Match (run_envs.py) in a second or two, to more than 0.95
    learn_images: str  # what to add for images
    actions: list  # of Match, that it learns
    observations: list
    kinds: dict  # of environments, to be killed in: three checkpoints within some tens of milliseconds
    options: list  # each has an effect, and learns CartPole
    out_of_range: str  # numbers that only this script has, see OUT_OF_RANGE
    refused: str  # flags that only this script refuses, see REFUSED
    diverges: str  # flags with which the loss becomes infinite or NaN
    misfits: str  # flags that do not fit a finished run, see MISFITS

    @functools.cached_property
    def module(self):
        return importlib.import_module(self.name.removesuffix(".py"))

    def scramble(self):
        """Put the generators that all of a process share into another state: no run may depend on them."""
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(int.from_bytes(os.urandom(4), "little"))

    def train(self, *flags):
        """`train` in this process; the summary."""
        self.scramble()
        return self.module.train(self.module.tuned(*words("--no-progress", *flags)))

    def main(self, *flags):
        """What `python script flags…` does, in this process; the exit code."""
        self.scramble()
        with patch.object(sys, "argv", [self.name, *words(*flags)]):
            try:
                self.module.main()
            except SystemExit as stop:
                return stop.code or 0
        return 0


KINDS = {
    "CartPole": "--env-id CartPole-v1",
    "LunarLander": "--env-id LunarLander-v3 --max-episode-steps 40",
    "reset not clean": "--env-id run_envs:Unclean-v0",
    "own wrapper": "--env-id CartPole-v1 --wrappers run_envs.Own --max-episode-steps 40",
    "BipedalWalker": "--env-id BipedalWalker-v3 --max-episode-steps 40",
    "images": of("Match", observation="channels_last"),
    "toy text": "--env-id Taxi-v4 --max-episode-steps 30",
    "MiniGrid": "--env-id MiniGrid-Empty-5x5-v0 --max-episode-steps 20",
    "return limit": "--env-id CartPole-v1 --max-episode-return 8",
    "stopped early": "--env-id CartPole-v1 --stop-at-return 5 --max-episode-steps 10 --total-timesteps 1000000",
}
PPO_KINDS = {
    "V-trace, normalised": "--env-id Pendulum-v1 --wrappers gymnasium.wrappers.TimeAwareObservation --estimator vtrace "
    "--max-episode-steps 40 --normalize-obs --normalize-reward --target-kl 0.02",
    **KINDS,
    "plain returns": "--env-id FrozenLake-v1 --estimator vanilla --normalize-reward",
}
PPO_SMALL = "--num-envs 2 --num-steps 32 --num-minibatches 2 --update-epochs 2 --eval-episodes 1"
PPO = Script(
    name="ppo.py",
    fast="--num-envs 4 --num-steps 32 --num-minibatches 4 --update-epochs 2 --eval-episodes 4",
    one="--num-envs 1 --num-steps 32 --num-minibatches 4 --update-epochs 2 --eval-episodes 2",
    learn="--num-envs 8 --num-steps 32 --num-minibatches 4 --learning-rate 5e-3 --gamma 0.5 --ent-coef 0 "
    "--total-timesteps 3000 --eval-every 100000",
    learn_images="--total-timesteps 1500 --learning-rate 1e-3",
    actions=words("discrete box integers multidiscrete multibinary"),
    observations=words("dict matrix channels_last discrete multibinary multidiscrete tuple channels_first"),
    kinds={  # the first five are tested often, and the first two of the observations
        name: f"{PPO_SMALL} --total-timesteps 150 --checkpoint-every 60 --eval-every 90 {flags}"
        for name, flags in PPO_KINDS.items()
    },
    options=lines("""--estimator vtrace --update-epochs 2 | --estimator vanilla | --buffer vtrace --update-epochs 2
        --clip-vloss --clip-vloss-coef 0.01
        --target-kl 0.001 | --normalize-obs | --normalize-reward | --critic-hidden-sizes 32 | --no-anneal-lr
        --hidden-sizes --critic-hidden-sizes 64 64 | --no-norm-adv | --ent-coef 0.01 | --clip-coef 0.1"""),
    out_of_range="""num-steps 0 HUGE | num-minibatches 0 | update-epochs 0 | gae-lambda 2 | clip-coef -0.2 HUGE
        ent-coef nan | target-kl -1 | critic-hidden-sizes -3 | hidden-sizes 100000000""",
    refused="""
        --num-envs 3 --num-steps 5 --num-minibatches 4 -> 15 4 minibatches
        --num-envs 1 --num-steps 2 --num-minibatches 4 -> 2 4 minibatches
        --env-id run_envs:Match-v0 --env-kwargs {"observation":"channels_first"} --normalize-obs -> normalize_obs
        --num-steps 1000000000 -> rollout memory | --hidden-sizes 99999 99999 -> network memory""",
    diverges="--learning-rate 1e15 --vf-coef 1e15 --no-anneal-lr",
    misfits="""--resume run --num-envs 8 -> num_envs | --evaluate run --normalize-obs -> network
        --resume run --hidden-sizes 32 -> hidden_sizes | --evaluate run --hidden-sizes 32 -> network""",
)
SCRIPTS = {program.name: program for program in [PPO]}
ppo_only = pytest.mark.parametrize("program", ["ppo.py"], indirect=True)


# ------------------------------------------------------------------------------------------------- fixtures, helpers


@pytest.fixture(scope="module", params=SCRIPTS)
def program(request):
    return SCRIPTS[request.param]


def each(cases, often=None):
    """Once for every script and every one of cases(script), all but the first `often` of which are slow."""
    pairs = [(name, case, n) for name, script in SCRIPTS.items() for n, case in enumerate(cases(script))]
    marked = [pytest.param(name, case, marks=[slow] if often and n >= often else []) for name, case, n in pairs]
    return pytest.mark.parametrize(("program", "case"), marked, indirect=["program"])


@pytest.fixture
def curve():
    """The learning curve is drawn as users get it: else it is written but empty, which takes no time."""


@pytest.fixture(autouse=True)
def threads(request, tmp_path, monkeypatch):
    """Every test works in an empty folder, without a window, on one thread; the numbers of threads it asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    if "program" in request.fixturenames and "curve" not in request.fixturenames:
        module = request.getfixturevalue("program").module
        draw = lambda run: module.write_file(run.dir / "learning_curve.png", lambda file: file.write(b"a curve"))
        monkeypatch.setattr(module.Run, "draw_curve", draw)
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    return asked


IMPORT_AND_RUN = """if True:
    import json, os, random, runpy, sys, numpy, torch
    before = random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()
    import SCRIPT
    after = random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()
    loaded = sorted({"matplotlib", "moviepy"} & set(sys.modules))
    print(json.dumps([before == after, loaded, torch.cuda.is_initialized(), os.listdir()]))
    sys.argv[0] = "SCRIPT.py"
    runpy.run_path("SCRIPT.py", run_name="__main__")"""


@pytest.fixture(scope="module")
def finished(program, tmp_path_factory):
    """The folder of a short run on CartPole, left by a process that had nothing but the script, and a terminal without
    a ±. Only to be read. Beside it lie what the process printed (first what importing did), and what lay in its folder.
    """
    folder = tmp_path_factory.mktemp("finished")
    shutil.copy(program.module.__file__, folder)
    code = ["-B", "-c", IMPORT_AND_RUN.replace("SCRIPT", program.name.removesuffix(".py"))]
    out, err = shell(
        folder, *code, *words(program.fast, "--total-timesteps 1000 --eval-every 400"), PYTHONIOENCODING="ascii"
    )
    (run,) = (folder / "runs").iterdir()
    folder.joinpath("seen.json").write_text(json.dumps([out, err, sorted(os.listdir(folder)), run.name]))
    return run.rename(folder / "run")


@pytest.fixture
def copied(finished):
    """A copy of the finished run: the folder `run`."""
    return shutil.copytree(finished, Path("run"))


def snapshot(folder=Path()):
    """All that lies in a folder."""
    return {path: path.is_file() and path.read_bytes() for path in sorted(folder.rglob("*"))}


def is_plain(err):
    """Whether this is one line or two, short, without traceback, boxes or colours."""
    marks = ("Traceback", "usage:", "│", "---", "\r", "\x1b")
    return err.endswith("\n") and 10 < len(err) < 1200 and err.count("\n") <= 2 and not any(m in err for m in marks)


def says(err, expected):
    """Whether all words stand in the message, however it spells the names of flags."""
    return all(word.replace("-", "_") in err.replace("-", "_") for word in words(expected))


@pytest.fixture
def complaint(program, capfd):
    """complaint(*flags): what these flags make the script say on stderr; it must end with 2 and write nothing."""

    def call(*flags, plain=True):
        before = snapshot()
        capfd.readouterr()
        code = program.main(*flags)
        out, err = capfd.readouterr()
        assert code == 2 and out == "" and snapshot() == before
        assert is_plain(err) if plain else err and "Traceback" not in err, err
        return err

    return call


def rows(path="run/metrics.csv"):
    """The rows of a csv file as dicts of numbers."""
    with Path(path).open(newline="") as file:
        return [{name: float(cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def summary(run="run"):
    return json.loads(Path(run, "summary.json").read_text())


def config(run="run"):
    return json.loads(Path(run, "config.json").read_text())


def checkpoint(run="run"):
    return torch_file(Path(run, "checkpoint.pt"))


def episode_returns():
    return [total for _, total in checkpoint()["run"]["episodes"]]


# ----------------------------------------------------------------------------------------------- copied away, alone


def test_copied_alone_it_leaves_a_complete_run_folder(program, finished):
    """Fails if the script imports a sibling or warns, or if a part of the run folder or the last lines are missing."""
    out, err, beside, name = json.loads(finished.with_name("seen.json").read_text())
    assert beside == sorted([program.name, "runs"]) and name.startswith(f"CartPole-v1__{program.name[:-3]}__1__")
    parts = "config.json metrics.csv evaluations.csv learning_curve.png checkpoint.pt models summary.json"
    assert sorted(os.listdir(finished)) == sorted(parts.split())  # no videos, no *.tmp

    final = summary(finished)
    assert final["eval_episodes"] == 4 and 1000 <= final["global_step"] < 1000 + 128
    assert final["steps_per_second"] == pytest.approx(final["global_step"] / final["seconds"])
    evaluation, curve = lines(out)[-2:]
    assert evaluation.startswith("evaluation") and f"{final['eval_return_mean']:.1f} ? " in evaluation
    assert f"runs/{name}/learning_curve.png" in curve
    bar = [line for line in re.split(r"[\r\n]+", err) if line.strip()]
    assert "mean return" in err and all("steps/s" in line for line in bar)  # the progress bar and no warnings

    header = (finished / "metrics.csv").read_text().splitlines()[0].split(",")
    assert header[:4] == ["step", "seconds", "sps", "return_mean"]
    steps = [row["step"] for row in rows(finished / "metrics.csv")]
    assert steps == sorted(set(steps)) and steps[-1] == final["global_step"]
    assert all(np.isfinite(list(row.values())).all() for row in rows(finished / "metrics.csv")[1:])

    evaluations = rows(finished / "evaluations.csv")
    assert [row["step"] // 400 for row in evaluations] == [1, 2, 2]
    for name in ("return_mean", "return_std"):
        assert evaluations[-1][name] == pytest.approx(final[f"eval_{name}"], rel=1e-6)
    saved = {f"{row['step']:.0f}.pt" for row in evaluations}
    assert set(os.listdir(finished / "models")) == saved | {"best.pt"}
    best = max(evaluations, key=lambda row: (row["return_mean"], row["step"]))["step"]
    stored = [torch_file(finished / f"models/{name}.pt") for name in ("best", f"{best:.0f}")]
    assert not kills.difference(*stored, "best.pt")

    from matplotlib.image import imread

    picture = imread(finished / "learning_curve.png")
    assert picture.shape[0] >= 600 and picture.shape[1] >= 800
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20  # something is drawn


def test_config_holds_arguments_versions_and_machine(program, finished):
    """Fails if an argument is left out of config.json, or a value is the default rather than the one used."""
    stored = config(finished)
    assert set(stored["args"]) == {field.name for field in dataclasses.fields(program.module.Args)}
    given = {name[2:].replace("-", "_") for name in words(program.fast, "--total-timesteps") if name[:2] == "--"}
    for name, value in program.module.TUNED["CartPole-v1"].items():
        assert name in given or stored["args"][name] == value, name
    assert stored["args"]["total_timesteps"] == 1000
    for name in ("torch", "gymnasium", "numpy"):
        assert stored["versions"][name] == importlib.metadata.version(name)
    assert "Python" in stored["machine"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_config_names_the_commit(program, monkeypatch):
    """Fails if the commit of the script's folder or its mark of changes is wrong; a tag must not hide the hash."""

    def git(*line):
        who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
        return subprocess.run(["git", *who, *line], check=True, capture_output=True, text=True).stdout.strip()

    Path(program.name).write_text("a script")
    for line in ("init -q", f"add {program.name}", "commit -q -m one", "tag -a v1 -m tag"):
        git(*line.split())
    monkeypatch.setattr(program.module, "__file__", str(Path(program.name).absolute()))
    program.train(program.one, "--total-timesteps 10 --run-dir clean")
    Path(program.name).write_text("changed")
    program.train(program.one, "--total-timesteps 10 --run-dir dirty")
    commit = git("rev-parse", "HEAD")
    assert [config(name)["commit"] for name in ("clean", "dirty")] == [commit, f"{commit}-dirty"]


def test_importing_does_nothing(program, finished):
    """Fails if the import seeds, writes, prints, starts CUDA, or imports a plotting library."""
    first = lines(json.loads(finished.with_name("seen.json").read_text())[0])[0]
    assert json.loads(first) == [True, [], False, [program.name]]


# -------------------------------------------------------------------------------------------------------- evaluation


def test_evaluate_prints_mean_and_deviation(program, copied, capsys):
    """Fails if best, last or a step plays other weights than the saved ones, if seed or episodes are ignored, if an
    evaluation trains or leaves anything behind, or if by default it has not the run's number of episodes."""
    before, step, module = snapshot(), summary()["global_step"], program.module
    for model, file in (("best", "models/best.pt"), ("last", "checkpoint.pt"), (step, f"models/{step}.pt")):
        assert program.main(f"--evaluate run --model {model} --eval-episodes 3 --seed 7") == 0
        (line,) = capsys.readouterr().out.splitlines()
        agent = module.load("run")
        agent.load_state_dict(torch_file(copied / file)["agent"])
        mean, std = module.evaluate(agent, agent.args, 3, 7 + 2 * module.EVALUATION)
        assert f"{mean:.2f} ± {std:.2f}" in line and "3 episodes" in line
    assert program.main("--evaluate run") == 0 and "4 episodes" in capsys.readouterr().out
    assert snapshot() == before


def test_evaluation_counts_nothing_after_an_episode_ended(program):
    """Fails if what the next episode in an evaluation's slot pays is counted, or the last reward of the episode is not:
    here an episode's return is its length, and the lengths differ."""
    lengths, env = [], gym.make("run_envs:Uneven-v0")
    for seed in range(5, 17):
        env.reset(seed=seed)
        lengths.append(env.unwrapped.left)
    assert len(set(lengths)) > 4
    uneven = "--env-id run_envs:Uneven-v0"
    program.train(program.one, uneven, "--total-timesteps 10 --run-dir run")
    agent = program.module.load("run", env_id="run_envs:Uneven-v0")
    assert program.module.evaluate(agent, agent.args, 12, 5) == pytest.approx((np.mean(lengths), np.std(lengths)))


def test_evaluation_of_endless_episodes_ends(program, curve):
    """Fails if an environment without a limit of its own keeps the evaluation from ending, or the curve (of no
    episode) from being drawn."""
    final = program.train(program.one, "--env-id run_envs:Endless-v0 --total-timesteps 30 --run-dir run")
    assert final["eval_return_mean"] == 1000
    assert ",nan," in Path("run/metrics.csv").read_text()  # no episode has ended: there is no mean return


def test_render_shows_the_agent(program, copied, monkeypatch):
    """Fails if --render does not open a window (here: a driver without a screen)."""
    modes, make = [], gym.make_vec
    monkeypatch.setattr(gym, "make_vec", lambda *given, **k: modes.append(k.get("render_mode")) or make(*given, **k))
    assert program.main("--evaluate run --render --eval-episodes 1 --max-episode-steps 10") == 0
    assert "human" in modes


# --------------------------------------------------------------------------------------------- determinism, notebook


def test_config_of_a_run_reproduces_it_and_flags_win(program, finished):
    """Fails if an argument is not taken from --config or wins over a flag, or if anything random is not seeded, so that
    another process (with another hash seed, and generators in another state) gets other numbers."""
    assert program.main(f"--config {finished}/config.json --run-dir again --no-progress") == 0
    assert not run_difference(finished, Path("again"))
    assert program.main(f"--config {finished}/config.json --run-dir other --seed 2 --eval-episodes 2") == 0
    args = config("other")["args"]
    assert (args["seed"], args["eval_episodes"], args["total_timesteps"]) == (2, 2, 1000)
    weights = [checkpoint(run)["agent"] for run in (finished, "other")]
    assert not any(torch.equal(weights[0][k], weights[1][k]) for k in weights[0] if k.endswith("weight"))
    assert table(finished / "metrics.csv") != table(Path("other/metrics.csv"))


def test_notebook(program):
    """Fails if tuned values do not apply in a notebook, if what is given does not win, if Args takes arguments by
    position, if a run leaves marks in its Args, if `train`, `load` and `evaluate` disagree on a figure, or if anything
    but a UserError comes out of `load`."""
    module = program.module
    with pytest.raises(TypeError):
        module.Args("CartPole-v1", "{}")
    plain, settings = vars(module.Args()), module.TUNED["CartPole-v1"]
    differing = [name for name in settings if settings[name] != plain[name]]
    assert "learning_rate" in differing
    assert {name: getattr(module.tuned(env_id="CartPole-v1"), name) for name in settings} == settings
    for name in differing:  # the plain default is a value like any other where it is given
        assert getattr(module.tuned(env_id="CartPole-v1", **{name: plain[name]}), name) == plain[name]
    assert vars(module.tuned(env_id="Nothing-v0")) == plain | {"env_id": "Nothing-v0"}

    args = module.tuned(*words(program.fast, "--total-timesteps 600 --eval-episodes 3 --no-progress"))
    final = module.train(args)
    (run,) = Path("runs").iterdir()
    assert final == summary(run)
    last, seed = module.load(run, "last"), args.seed + module.EVALUATION
    assert module.evaluate(last, args, 3, seed) == (final["eval_return_mean"], final["eval_return_std"])
    mean, std = module.evaluate(module.load(str(run)), args)
    assert 5 < mean <= 500 and std >= 0
    actions = last.act(np.zeros((6, 4), np.float32))
    assert actions.shape == (6,) and set(actions) <= {0, 1}
    module.train(dataclasses.replace(args, total_timesteps=100, seed=2))
    (second,) = set(Path("runs").iterdir()) - {run}
    assert config(second)["args"]["seed"] == 2 and summary(second)["global_step"] < 300
    with pytest.raises(module.UserError, match=r"config\.json"):
        module.load("nowhere")
    with pytest.raises(module.UserError, match=r"models/7\.pt"):
        module.load(run, 7)


def test_two_runs_at_the_same_moment(program, monkeypatch):
    """Fails if a second run that begins within the same second is refused, or writes into the folder of the first."""
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    for _ in range(2):
        program.train(program.one, "--total-timesteps 10")
    assert [len(rows(run / "metrics.csv")) for run in Path("runs").iterdir()] == [1, 1]


@ppo_only
def test_normalisers_come_back(program):
    """Fails if the running means are not saved with the weights: the loaded agent would then play differently."""
    flags = "--env-id Pendulum-v1 --normalize-obs --normalize-reward --total-timesteps 600 --run-dir run"
    final = program.train(program.fast, flags)
    last = program.module.load("run", "last")
    play = lambda: program.module.evaluate(last, last.args, 4, 1 + program.module.EVALUATION)
    assert play() == (final["eval_return_mean"], final["eval_return_std"])
    last.obs_stats.mean += 0.1
    assert play() != (final["eval_return_mean"], final["eval_return_std"])  # they do matter


# ------------------------------------------------------------------------------------------------------------- kills


class Killed(BaseException):
    """Ends `train` on the spot, as a kill would: no script may catch it."""


class Strike:
    """Counts the moments at which something in the folder `run` is about to change, and raises at moment `at`.

    Python tells of every file that is opened, renamed or removed (audit events). A file can also be struck when it has
    been opened but is empty, or half written and about to be renamed; a table with half a row. An `error` that `lasts`
    is raised at all later moments as well, as by a full disk.
    """

    def __init__(self, at, error=Killed, lasts=False):
        self.at, self.error, self.lasts, self.count = at, error, lasts, 0

    def __call__(self, event, args):
        if event not in ("open", "os.rename", "os.remove", "os.mkdir") or isinstance(args[0], int):
            return
        path = Path(os.fsdecode(args[0])).absolute()
        mode = str(args[1]) if event == "open" else "w"
        if not path.is_relative_to(Path("run").absolute()) or not set(mode) & set("wxa+"):
            return
        self.moment(lambda: None)
        if event == "os.rename":
            self.moment(lambda: os.truncate(path, path.stat().st_size // 2))
        elif "a" in mode:
            self.moment(lambda: os.write(os.open(path, os.O_WRONLY | os.O_APPEND), b"12,3"))
        elif event == "open":
            self.moment(lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))

    def moment(self, damage):
        self.count += 1
        if self.count == self.at + 1 or (self.lasts and self.count > self.at):
            self.lasts or damage()
            raise self.error


WATCHING = [None]
sys.addaudithook(lambda event, args: WATCHING[0] and WATCHING[0](event, args))


@contextlib.contextmanager
def watched_by(strike):
    WATCHING[0] = strike
    try:
        yield
    finally:
        WATCHING[0] = None


def struck(strike, program, *flags):
    """`train` with these flags, struck; what it raised, or None if it came to its end."""
    try:
        with watched_by(strike):
            program.train(*flags)
    except (Killed, program.module.UserError) as error:
        return error
    return None


def strike_until(condition, program, flags):
    """Strike the run `run` at later and later moments until it leaves behind what is wanted."""
    for moment in range(0, 999, 4):
        shutil.rmtree("run", ignore_errors=True)
        if isinstance(struck(Strike(moment), program, flags), Killed) and condition():
            return


def strike_and_go_on(program, flags, moments, strikes=lambda moment: Strike(moment)):
    """Strike a run at these moments: going on must lead to the same as a run that was not struck, bit for bit.

    It goes on with --resume, and before the first checkpoint also with the same command. Returns what was raised before
    the first checkpoint, and after it.
    """
    program.train(flags, "--run-dir unbroken")
    early, late = [], []
    for moment in moments:
        shutil.rmtree("run", ignore_errors=True)
        error = struck(strikes(moment), program, flags, "--run-dir run")
        if error is None:
            break
        if Path("run/checkpoint.pt").exists():
            late.append(error)
        else:
            early.append(error)
            if Path("run").exists():
                shutil.copytree("run", "same")
            program.train(flags, "--run-dir same")
            assert not run_difference(Path("unbroken"), Path("same")), f"the same command, moment {moment}"
            shutil.rmtree("same")
            if not Path("run/config.json").exists():  # nothing tells what it was to be
                with pytest.raises(program.module.UserError, match=r"config\.json"):
                    program.train("--resume run")
                continue
        resume = words("--resume run", *given_again(words(flags)))
        struck(Strike(moment % 11), program, *resume)  # and killed once more, while it finds its way back
        program.train(*resume)
        assert not run_difference(Path("unbroken"), Path("run")), f"--resume, moment {moment}"
    return early, late


@each(lambda script: script.kinds, often=5)
@pytest.mark.parametrize(
    "moments", [range(13, 60, 31), pytest.param(range(0, 999, 3), marks=slow)], ids=["two", "many"]
)
def test_killed_around_every_write(program, case, moments):
    """Fails if there is a moment in or between writes at which a kill costs more than the work since the last
    checkpoint, for any kind of environment: what a run then ends with must be the same, bit for bit."""
    if case == "CartPole":
        moments = range(0, 999, 1 if moments.step == 3 else 9)
    early, late = strike_and_go_on(program, program.kinds[case], moments)
    assert early and late


def test_files_are_written_whole_or_not_at_all(program):
    """Fails if there is a moment at which half a file, or none, can be found in the place of one."""
    path, old, new, moment = Path("run/file"), b"old" * 999, b"new" * 999, 0
    path.parent.mkdir()
    while not path.exists() or path.read_bytes() != new:
        path.write_bytes(old)
        with contextlib.suppress(Killed), watched_by(Strike(moment)):
            program.module.write_file(path, lambda file: file.write(new))
        assert path.read_bytes() in (old, new)
        moment += 1
    assert moment > 4


def test_disk_full_or_read_only_from_some_moment_on(program):
    """Fails if a full or read-only disk leads to a traceback, to words that do not say what could not be written, or to
    a run folder that cannot be gone on with once there is space."""
    full = lambda moment: OSError(number := (errno.ENOSPC, errno.EROFS)[moment % 2], os.strerror(number))
    strikes = lambda moment: Strike(moment, full(moment), lasts=True)
    early, late = strike_and_go_on(program, program.kinds["CartPole"], range(0, 999, 11), strikes)
    assert early and late
    for error in early + late:
        assert isinstance(error, program.module.UserError) and "cannot" in str(error), error
        assert "No space left" in str(error) or "Read-only" in str(error)


@pytest.mark.parametrize("size", [3_000, 60_000])
def test_no_space_left(size, program, finished, capfd):
    """Fails if a file that the system refuses to write (here: one longer than `size`) ends in a traceback, or if what
    is left cannot be gone on with, or the same command does not work, once there is space."""
    command = f"--config {finished}/config.json --no-progress --run-dir"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        code = program.main(command, "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capfd.readouterr().err
    assert code == 2 and is_plain(err) and "cannot write" in err
    shutil.copytree("run", "same")
    assert program.main("--resume run --no-progress") == 0 and not run_difference(finished, Path("run"))
    if not Path("same/checkpoint.pt").exists():
        assert program.main(command, "same") == 0 and not run_difference(finished, Path("same"))


CAMPAIGN = [(script, name) for script, names in kills.CONFIGURATIONS.items() for name in names]


@slow
@pytest.mark.parametrize(("name", "case"), CAMPAIGN, ids=[f"{script}-{name}" for script, name in CAMPAIGN])
def test_killed_at_random_moments(name, case):
    """Fails if a checkpoint lacks anything that the rest of the run depends on, or is ever found half written."""
    shutil.copy(SCRIPTS[name].module.__file__, ".")
    flags = words(kills.CONFIGURATIONS[name][case])
    steps = flags.index("--checkpoint-every") + 1
    flags += ["--total-timesteps", str(8 * int(flags[steps]))]
    shell(Path(), name, *flags, "--run-dir", "unbroken")
    assert kills.kill_and_resume(Path(), name, "killed", flags, 3, Path("unbroken"))[0] == 3
    assert not run_difference(Path("unbroken"), Path("killed"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_or_interrupted_it_goes_on(number, program, finished, tmp_path):
    """Fails if a process that was killed at a random moment cannot be gone on with, or if Ctrl-C ends in a traceback or
    does not say how to go on."""
    shutil.copy(program.module.__file__, tmp_path)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # else a child in the background is deaf to it
    process = kills.start(tmp_path, program.name, *words(f"--config {finished}/config.json --run-dir run"))
    signal.signal(signal.SIGINT, handler)
    try:
        while process.poll() is None and not Path("run/metrics.csv").exists():
            time.sleep(0.002)
        time.sleep(0.05 + random.random() / 10)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    if number == signal.SIGINT:
        assert process.returncode == 130 and "--resume run" in err and "Traceback" not in err
    program.train("--resume run")
    assert not run_difference(finished, Path("run"))


# ------------------------------------------------------------------------------------------------------------ resume


def half_files(run):
    for name in words("checkpoint.pt metrics.csv config.json summary.json evaluations.csv learning_curve.png"):
        Path(run, f"{name}.tmp").write_bytes(b"half of some")


MISFITS = """
--run-dir run -> holds a run | --config run/config.json --run-dir run -> holds a run
--evaluate run --env-id Acrobot-v1 -> CartPole-v1 | --resume run --seed 9 -> seed
--evaluate run --model 12345 -> 12345.pt | --resume run --env-id Acrobot-v1 -> env_id
--resume run --learning-rate 0.5 -> learning_rate"""
LEFT = {
    "a finished run": lambda run: None,
    "a run that wrote no checkpoint": lambda run: (run / "checkpoint.pt").unlink(),
    "half files": lambda run: (half_files(run), (run / "checkpoint.pt").unlink()),
    "a table without rows": lambda run: (run / "metrics.csv").write_text(""),
    "a table of garbage": lambda run: (run / "metrics.csv").write_bytes(b"\x80garbage\n,,\n" * 9999),
    "no table": lambda run: (run / "metrics.csv").unlink(),
    "no curve and no best model": lambda run: ((run / "summary.json").unlink(), (run / "models/best.pt").unlink()),
}


@pytest.mark.parametrize("left", LEFT)
def test_resume_restores_a_run(left, program, copied, finished, capsys):
    """Fails if a finished run is trained on, or does not say what came of it; if a run that was killed before its first
    checkpoint does not begin anew; or if a left-over or damaged file hurts."""
    LEFT[left](copied)
    assert program.main("--resume run --no-progress") == 0
    assert not run_difference(finished, copied)
    assert capsys.readouterr().out.splitlines()[-2].startswith("evaluation")


def test_stop_at_return_stops_early(program):
    """Fails if the run goes on, stops before the mean of 100 training episodes has reached the value, or goes on when
    it is resumed."""
    program.train(program.fast, "--stop-at-return 22 --total-timesteps 100000 --eval-every 1000000 --run-dir run")
    *earlier, last = rows()
    reached = lambda row: row["return_mean"] >= 22 and row["episodes"] >= 100
    assert reached(last) and not any(map(reached, earlier)) and last["step"] < 60_000
    assert last["return_mean"] == pytest.approx(np.mean(episode_returns()[-100:]), rel=1e-6)
    assert summary()["global_step"] == last["step"]
    shutil.copytree("run", "before")
    program.train("--resume run")
    assert not run_difference(Path("before"), Path("run"))


def test_resume_with_more_steps_goes_on_and_can_be_killed(program, copied):
    """Fails if a finished run cannot be prolonged, begins anew, or forgets when it is killed that it was prolonged."""
    before = table(Path("run/metrics.csv"))
    assert isinstance(struck(Strike(40), program, "--resume run --total-timesteps 2000"), Killed)
    assert config()["args"]["total_timesteps"] == 2000
    program.train("--resume run")
    after = table(Path("run/metrics.csv"))
    assert after[: len(before)] == before and 2000 <= rows()[-1]["step"] < 2000 + 128
    assert summary()["global_step"] == rows()[-1]["step"]


def test_resumed_with_fewer_steps_or_other_evaluations(program):
    """Fails if a run that was killed before its first evaluation, and is resumed when it is over, ends badly; or if the
    models of evaluations stay that do not belong to the run that is resumed."""
    flags = f"{program.fast} --total-timesteps 2000 --checkpoint-every 128 --eval-every 1000000 --run-dir run"
    strike_until(lambda: Path("run/checkpoint.pt").exists(), program, flags)
    assert program.train("--resume run --total-timesteps 10")["global_step"] > 10
    assert len(rows("run/evaluations.csv")) == 1

    flags = f"{program.fast} --total-timesteps 500 --eval-every 128 --run-dir run"
    strike_until(lambda: Path("run/models/best.pt").exists(), program, flags)
    program.train("--resume run --eval-every 1000000")
    (evaluation,) = rows("run/evaluations.csv")
    assert sorted(os.listdir("run/models")) == [f"{evaluation['step']:.0f}.pt", "best.pt"]


@each(lambda script: lines(MISFITS) + lines(script.misfits))
def test_what_does_not_fit_a_run(program, case, copied, complaint):
    """Fails if a flag that changes the algorithm is taken, or ignored without a word, when a run is resumed; if weights
    go into another environment or network; or if a run is written over."""
    flags, expected = case.split(" -> ")
    assert says(complaint(flags), expected)


# --------------------------------------------------------------------------------------------------------- bad input

# flags -> words in the message. HUGE is a number of 400 digits, LONG a word of 300 letters, DEEP 100,000 brackets.
REFUSED = """
--env-id CartPol-v1 -> CartPole | --env-id cartpole-v1 -> CartPole | --env-id CartPole-v9 -> v1
--env-id LunarLandr-v3 -> LunarLander | --env-id Qwertyuiop-v0 -> Qwertyuiop | --env-id= -> ID
--env-id MiniGird-Empty-5x5-v0 -> MiniGird | --env-id MiniGrid-Emty-5x5-v0 -> MiniGrid-Empty
--env-id no_such_module:Some-v0 -> no_such_module | --env-id run_envs:Mach-v0 -> Match
--wrappers no.such.Wrapper -> no.such.Wrapper | --wrappers nosuch -> nosuch
--wrappers gymnasium.wrappers.NoSuchWrapper -> NoSuchWrapper
--wrappers gymnasium.wrappers -> gymnasium.wrappers | --wrappers os.getcwd -> os.getcwd
--wrappers gymnasium.wrappers.TransformObservation -> TransformObservation
--env-kwargs {nonsense -> env_kwargs | --env-kwargs [1] -> env_kwargs | --env-kwargs DEEP -> env_kwargs
--env-kwargs {"gravitas":1} -> gravitas
--env-kwargs {"render_mode":"human","vectorization_mode":"sync"} -> env_kwargs
--device gpu -> gpu | --device cuda:999 -> cuda:999 | --device meta -> meta | --device= -> device
--run-dir taken -> taken | --run-dir taken/deeper -> taken | --run-dir /proc/deeper -> /proc/deeper
--config missing.json -> missing.json | --config taken -> taken | --config . -> config.json
--resume missing -> missing config.json | --resume taken -> taken config.json | --resume . -> config.json
--evaluate missing -> missing config.json
--run-dir LONG -> aaaa | --config LONG -> aaaa | --resume LONG -> aaaa | --evaluate LONG -> aaaa
--run-dir= -> empty | --config= -> empty | --resume= -> empty | --evaluate= -> empty
--resume a --run-dir b -> resume run_dir | --resume a --evaluate b -> resume evaluate
--env-id run_envs:Unpicturable-v0 --capture-video -> Unpicturable
--env-id run_envs:Blind-v0 --capture-video -> Blind"""
SPACES = {"actions": "text Text | tuple Tuple | dict Dict | huge 1000000000 | empty Box"}
SPACES |= {"observation": "sequence Sequence | graph Graph | huge memory | empty Box"}
OUT_OF_RANGE = """
gamma 1.5 -0.1 nan HUGE | learning-rate -1 nan inf | num-envs 0 10000000 HUGE | total-timesteps 0 HUGE | hidden-sizes 0
eval-episodes 0 HUGE | eval-every -5 HUGE | checkpoint-every -5 | stop-at-return nan | max-episode-return nan HUGE
max-episode-steps 0 HUGE | seed -1 1180591620717411303424 HUGE"""
TYROS = """
--env-id -> env-id | --learning-rte 0.1 -> learning-rte | --foo -> foo | nonsense -> nonsense | --no-seed -> seed
--num-envs 2.5 -> num-envs 2.5 | --num-envs many -> num-envs many | --gamma high -> gamma high
--hidden-sizes 64 wide -> wide | --total-timesteps 1e5 -> total-timesteps"""


def expand(case):
    """(flags, words in the message) of a line of the tables above."""
    for name, value in (("HUGE", "9" * 400), ("LONG", "a" * 300), ("DEEP", "[" * 100_000)):
        case = case.replace(name, value)
    return case.split(" -> ")


def out_of_range(text):
    """The lines of a table of flags and numbers as lines like those above."""
    split = [line.split() for line in lines(text)]
    return [f"--{name} {number} -> {name}" for name, *numbers in split for number in numbers]


def refused_spaces():
    """Spaces of Match that no script can handle, as such lines."""
    pairs = [(kind, *line.split()) for kind, text in SPACES.items() for line in lines(text)]
    return [f"{of('Match', **{kind: name})} -> {word}" for kind, name, word in pairs]


@pytest.fixture
def little_memory():
    """Three GB beyond what this process has: who asks for more gets a MemoryError, and the machine lives on."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 3 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def all_refused(script):
    """All flags that a script refuses in words of its own."""
    numbers = out_of_range(OUT_OF_RANGE) + out_of_range(script.out_of_range)
    return lines(REFUSED) + refused_spaces() + numbers + lines(script.refused)


@each(all_refused)
def test_bad_flags(program, case, complaint, little_memory):
    """Fails if the complaint is longer than two lines, names nothing, comes with another exit code, or leaves files; or
    if a misspelt name is answered with the advice to install what does not exist."""
    Path("taken").write_text("a file, not a folder")
    flags, expected = expand(case)
    err = complaint(flags)
    assert says(err, expected) and "pip install" not in err, err


@pytest.mark.parametrize("case", lines(TYROS))
def test_flags_that_are_none(case, program, complaint):
    """Fails if a flag that does not exist, or a value of the wrong type, is taken or not named (in tyro's words)."""
    flags, expected = expand(case)
    assert says(complaint(flags, plain=False), expected)


@slow
@pytest.mark.parametrize("flags", ["--num-envs many", "--gamma 1.5", "--config bad.json"])
def test_bad_input_as_a_process(flags, program, tmp_path):
    """Fails if the start of the script, outside of main, changes what main does with bad input, or if the complaint
    depends on what the terminal can draw: here one without UTF-8, and (stdout) one with colours."""
    shutil.copy(program.module.__file__, tmp_path)
    Path("bad.json").write_text("{")
    before = snapshot()
    terminal, inner = os.openpty()
    variables = kills.surroundings(PYTHONIOENCODING="ascii", PYTHONDONTWRITEBYTECODE="1", TERM="xterm-256color")
    line = [sys.executable, program.name, *words(flags)]
    done = subprocess.run(line, env=variables, stdout=inner, stderr=subprocess.PIPE, text=True)
    os.close(inner)
    with contextlib.suppress(OSError), os.fdopen(terminal) as screen:
        assert screen.read() == ""
    assert done.returncode == 2 and snapshot() == before and "Traceback" not in done.stderr
    assert is_plain(done.stderr) or "many" in done.stderr  # which tyro says


@pytest.mark.parametrize(
    "case",
    [
        "--env-id HalfCheetah-v5 -> mujoco gymnasium[mujoco]",
        "--env-id ALE/Pong-v5 -> ale_py ale-py",
        "--env-id MiniGrid-Empty-5x5-v0 -> minigrid minigrid",
        "--capture-video -> moviepy moviepy",
    ],
)
def test_missing_package(case, program, complaint, monkeypatch):
    """Fails if the message about a missing package does not say how to install it, or comes after work was done."""
    flags, names = case.split(" -> ")
    package, install = names.split()
    for name in [name for name in sys.modules if name.startswith((f"{package}.", "gymnasium.envs.mujoco."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # its import now fails
    assert says(complaint(flags, program.fast), f"pip install {install}")


@pytest.mark.parametrize("where", ["Init", "Reset", "Step", "Render"])
def test_what_an_environment_raises_keeps_its_traceback(where, program):
    """Fails if an error of the environment's own (here: an OSError) passes for something else, such as a full disk."""
    film = "--capture-video" if where == "Render" else ""
    with pytest.raises(OSError, match=f"from within {where.lower()}"):
        program.main(program.one, f"--env-id run_envs:Raises{where}-v0 --run-dir run --no-progress", film)


DEEP = "[" * 100_000 + "]" * 100_000
NO_CONFIG = ["not JSON", "", "[1, 2]", "{}", DEEP, "9" * 5000, '{"args": 3}', '{"args": ["seed"]}', "\udcff\udcfe"]
NO_CONFIG += [f'{{"args": {{"hidden_sizes": {DEEP}}}}}', f'{{"args": {{"seed": {"9" * 5000}}}}}']
MISTYPED = """
"no_such_argument": 0.1 -> no_such_argument | "learning_rate": "fast" -> learning_rate | "num_envs": 2.5 -> num_envs
"num_envs": true -> num_envs | "progress": 1 -> damaged | "seed": null -> seed | "seed": {"a": 1} -> seed
"seed": HUGE -> seed | "env_id": 7 -> env_id | "env_id": null -> env_id | "hidden_sizes": [64, "a"] -> hidden_sizes
"hidden_sizes": [[64]] -> hidden_sizes | "wrappers": "a.b" -> wrappers | "wrappers": ["--help"] -> damaged
"gamma": NaN -> gamma | "gamma": 7 -> gamma | "gamma": 1e999 -> gamma
"env_kwargs": "[]" -> env_kwargs | "env_kwargs": "DEEP" -> env_kwargs
"max_episode_steps": "small" -> max_episode_steps"""
CONFIGS = ["--config run/config.json --run-dir new --total-timesteps 10", "--evaluate run", "--resume run"]


@pytest.mark.parametrize("number", range(len(NO_CONFIG)))
def test_no_config(number, program, copied, complaint):
    """Fails if a file that is no config, or nested or long beyond reason, is taken or ends in a traceback."""
    Path("run/config.json").write_bytes(NO_CONFIG[number].encode(errors="surrogateescape"))
    assert all("config.json" in complaint(flags) for flags in CONFIGS)
    assert len(complaint("--config run/checkpoint.pt")) < 500  # nor is such a file printed


@pytest.mark.parametrize("case", lines(MISTYPED))
def test_mistyped_config(case, program, copied, complaint):
    """Fails if a config of another script, or one that holds a wrong type, is taken or the argument is not named."""
    content, expected = expand(case)
    Path("run/config.json").write_text(f'{{"args": {{{content}}}}}')
    assert all(says(complaint(flags), expected) for flags in CONFIGS)


class Bomb:
    """Unpickling this creates a file named `executed` in the working directory."""

    def __reduce__(self):
        return exec, ("open('executed', 'w').close()",)


def bomb(path):
    path.write_bytes(pickle.dumps({"env_id": "CartPole-v1", "agent": Bomb()}, protocol=2))


def bomb_zip(path):
    torch.save({"env_id": "CartPole-v1", "agent": Bomb()}, path)


def changed(change):
    """A damage that changes the dict in the file."""

    def damage(path):
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return damage


DAMAGES = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(random.Random(0).randbytes(5000)),
    "text": lambda path: path.write_text("weights\n"),
    "pickle with code": bomb,
    "zip with code": bomb_zip,
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a list": lambda path: torch.save([1, 2], path),
    "another environment": changed(lambda state: state.update(env_id="Acrobot-v1")),
    "no weights": changed(lambda state: state.pop("agent")),
    "a weight missing": changed(lambda state: state["agent"].pop(list(state["agent"])[0])),
    "another shape": changed(lambda state: state["agent"].update({list(state["agent"])[0]: torch.zeros(3, 3)})),
}
ONLY_CHECKPOINTS = {  # what hurts no model
    "weights alone": changed(lambda state: [state.pop(key) for key in list(state) if key not in ("env_id", "agent")]),
    "fewer counters": changed(lambda state: state.update(run=[1])),
    "counters of other types": changed(lambda state: state.update(run=["a" for _ in state["run"]])),
}


@pytest.mark.parametrize("damage", [*DAMAGES, *ONLY_CHECKPOINTS])
def test_damaged_weights(damage, program, copied, complaint):
    """Fails if a damaged or foreign file of weights is taken, runs code, or ends in a traceback; a model copied over
    the checkpoint is one, too."""
    (DAMAGES | ONLY_CHECKPOINTS)[damage](copied / "checkpoint.pt")
    assert damage == "missing" or "run" in complaint("--resume run")
    if damage in DAMAGES:
        DAMAGES[damage](copied / "models/best.pt")
        assert "checkpoint.pt" in complaint("--evaluate run --model last")
        assert "best.pt" in complaint("--evaluate run")
    assert not Path("executed").exists()


@pytest.mark.parametrize("make", [bomb, bomb_zip])
def test_bombs_go_off_without_care(make):
    """Fails if the files above run no code when they are loaded carelessly: then the tests of them prove nothing."""
    make(Path("bomb.pt"))
    with contextlib.suppress(RuntimeError):  # what has been executed is not what was expected
        torch.load("bomb.pt", weights_only=False)
    assert Path("executed").exists()


# --------------------------------------------------------------------------------------- the run folder of a stranger

PAYLOAD = """
import gymnasium, run_envs
open("executed", "w").close()
class Wrap(gymnasium.Wrapper): pass
gymnasium.register("Payload-v0", run_envs.Endless)
"""
ASKING = [  # what a config asks for that executes the payload
    {"env_id": "payload:Payload-v0"},
    {"env_id": "run.payload:Payload-v0"},  # of the module in the run folder
    {"wrappers": ["payload.Wrap"]},
    {"wrappers": ["run.payload.Wrap"]},
    {"wrappers": ["payload:Wrap"]},
    {"wrappers": ["run_envs.mark"]},  # a function
    {"wrappers": ["gymnasium.wrappers.mark"]},  # the same, within reach of a library that has imported it
    {"wrappers": ["gymnasium.wrappers.Marking"]},
    {"env_id": "Loader-v0", "env_kwargs": '{"path":"run/payload.py"}'},  # an environment that executes a file
    {"env_id": "Loader-v0", "env_kwargs": '{"path":"payload.py"}'},
    {"env_id": "Loader-v0", "env_kwargs": '{"path":"run\\u002fpayload.py"}'},
]


class Marking(gym.Wrapper):
    """A wrapper that leaves a file."""

    def __init__(self, env):
        super().__init__(run_envs.mark(env))


@pytest.fixture
def payload(copied, monkeypatch):
    """A module that leaves the file `executed` when it is imported: here, and in the run folder."""
    for folder in ("run", "."):
        Path(folder, "payload.py").write_text(PAYLOAD)
    for name, value in (("mark", run_envs.mark), ("Marking", Marking)):
        monkeypatch.setattr(gym.wrappers, name, value, raising=False)
    for name in ("payload", "run.payload", "run"):
        sys.modules.pop(name, None)
    gym.registry.pop("Payload-v0", None)


@pytest.mark.parametrize("asked", ASKING, ids=lambda asked: str(list(asked.values())[-1]))
def test_config_of_a_stranger_executes_nothing(asked, program, payload, complaint):
    """Fails if what a config.json asks for is executed, if the message does not say which flag would allow it, or (to
    show that this test can fail) if nothing is executed where the same is given on the command line."""
    stored = config()
    stored["args"] |= asked
    Path("run/config.json").write_text(json.dumps(stored))
    for flags in CONFIGS:
        assert says(complaint(flags), f"--{list(asked)[-1]}")
    with pytest.raises(program.module.UserError, match="trust"):
        program.module.load("run")
    assert not Path("executed").exists()
    again = [f"--{name} {value[0] if isinstance(value, list) else value}" for name, value in asked.items()]
    assert program.main(program.one, CONFIGS[0], "--no-progress", *again) == 0
    assert Path("executed").exists()


WRITING = [  # what a config asks for that would write to `elsewhere`
    {"run_dir": "elsewhere"},
    {"run-dir": "elsewhere"},
    {"wrappers": ["--run-dir=elsewhere"]},
    {"wrappers": ["--run-dir", "elsewhere"]},
    {"run_dir=elsewhere": True},
    {"tyro-write-completion": ["bash", "elsewhere"]},
    {"wrappers": ["--tyro-write-completion", "bash", "elsewhere"]},
]


@pytest.mark.parametrize("asked", WRITING, ids=str)
def test_config_of_a_stranger_writes_nowhere_else(asked, program, copied):
    """Fails if a file names where anything is written."""
    stored = config()
    stored["args"] |= asked
    Path("run/config.json").write_text(json.dumps(stored))
    for flags in ("--config run/config.json --total-timesteps 100", *CONFIGS):
        program.main(flags, "--no-progress")
        assert not Path("elsewhere").exists()


LINKS = "metrics.csv config.json checkpoint.pt evaluations.csv summary.json learning_curve.png models/best.pt".split()


@pytest.mark.parametrize("name", ["models", "videos", "videos/best.mp4", *LINKS, *(f"{name}.tmp" for name in LINKS)])
def test_links_in_a_run_folder_lead_nowhere(name, program, copied, capfd):
    """Fails if anything outside a run folder is written or removed because a link in it leads there."""
    path, elsewhere = copied.absolute() / name, Path("elsewhere").absolute()
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(elsewhere)
    elif name == "videos":
        elsewhere.mkdir()
        (elsewhere / "best.mp4").write_text("precious")
    else:
        elsewhere.write_text("precious")
    path.symlink_to(elsewhere)
    before = snapshot(elsewhere) or elsewhere.read_bytes()
    if "videos" in name:
        program.main("--evaluate run --capture-video --eval-episodes 1 --max-episode-steps 5")
    program.main("--resume run --no-progress --total-timesteps 1200", "--capture-video" if name == "videos" else "")
    assert (snapshot(elsewhere) or elsewhere.read_bytes()) == before
    err = capfd.readouterr().err
    assert err == "" or is_plain(err), err
    if path.is_symlink() and "." in name:  # it was not replaced: careless writing would have gone through it
        path.write_text("through the link")
        assert elsewhere.read_text() == "through the link"


def test_code_of_ones_own_is_given_again(program, complaint):
    """Fails if a run with an environment and a wrapper of the user's own cannot be played, resumed or begun again, or
    if the message of what is missing does not lead on."""
    own, module = "--env-id run_envs:Match-v0 --wrappers run_envs.Own", program.module
    program.train(program.one, own, "--total-timesteps 10 --run-dir run")
    for flags in CONFIGS:
        assert "--env-id run_envs:Match-v0" in complaint(flags)
        assert "--wrappers run_envs.Own" in complaint(flags, "--env-id run_envs:Match-v0")
        assert program.main(flags, own, "--no-progress") == 0
    with pytest.raises(module.UserError, match="run_envs:Match-v0"):
        module.load("run")
    agent = module.load("run", env_id="run_envs:Match-v0", wrappers=("run_envs.Own",))
    assert module.evaluate(agent, agent.args, 2)[0] > 1  # the wrapper pays 1 + 1/2 + …


# -------------------------------------------------------------------------------------------------------------- NaNs


@pytest.mark.parametrize("field", ["observation", "reward"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_nan_from_the_environment_ends_the_run(field, value, program, capsys):
    """Fails if a NaN is learnt from, if the message names another step or field, or if it reaches a checkpoint."""
    flags = f"{program.one} {of('Faulty', field=field, at=75, value=value)} --total-timesteps 40 --run-dir run"
    program.train(flags)
    step, again = checkpoint()["run"]["step"], "--no-progress --env-id run_envs:Faulty-v0"
    capsys.readouterr()
    assert program.main("--resume run --total-timesteps 1000", again) == 2
    err = capsys.readouterr().err
    assert is_plain(err) and f"run_envs:Faulty-v0, step {step + 75}: {field}" in err  # new environments since then
    assert not any(word in err for word in {"observation", "reward", "loss"} - {field})
    assert checkpoint()["run"]["step"] == step and all(w.isfinite().all() for w in checkpoint()["agent"].values())
    for model in ("last", "best"):
        assert program.main(f"--evaluate run --model {model}", again) == 0
        assert "10.00 ± 0.00" in capsys.readouterr().out
    assert program.main("--resume run --total-timesteps", step + 40, again) == 0  # sound for another 74 steps


def test_nan_in_one_of_many_environments_and_at_once(program, capsys):
    """Fails if the step named is that of the rollout's end or counts rows, or if the first reset is not checked."""
    assert program.main(program.fast, of("Faulty", field="reward", at=75), "--checkpoint-every 999 --no-progress") == 2
    assert "step 300: reward" in capsys.readouterr().err
    assert program.main(program.one, of("Faulty", field="first_observation", at=1), "--no-progress") == 2
    assert "step 0: observation" in capsys.readouterr().err


def test_message_stands_on_a_line_of_its_own(program, capfd):
    """Fails if the message stands amid the progress bar, or if an infinite reward passes unseen where only signs are
    learnt from."""
    clip = "--clip-reward" if "clip_reward" in vars(program.module.Args()) else ""
    assert program.main(program.one, of("Faulty", field="reward", at=50, value="inf"), clip) == 2
    err = capfd.readouterr().err
    (line,) = [line for line in re.split("[\r\n]", err) if line.startswith(program.name)]
    assert line.endswith("step 50: reward is NaN or infinite") and "Traceback" not in err


def test_loss_that_is_not_finite_ends_the_run(program, capsys):
    """Fails if weights that have become NaN are saved or trained on."""
    flags = f"{program.diverges} --total-timesteps 5000 --no-progress --run-dir run"
    assert program.main(program.one, flags) == 2
    err = capsys.readouterr().err
    assert is_plain(err) and says(err, "CartPole-v1 step loss"), err
    assert not Path("run/checkpoint.pt").exists() and not os.listdir("run/models")


# --------------------------------------------------------------------------------------------------- limits, options


@pytest.mark.parametrize("env_id", ["run_envs:Endless-v0", "CartPole-v1"])
@pytest.mark.parametrize(("limit", "most"), [("--max-episode-steps 7", 7), ("--max-episode-return 8.5", 9)])
def test_limits_truncate(env_id, limit, most, program, monkeypatch):
    """Fails if a limit is ignored, reached late, carried over to the next episode, or taken for a termination (which
    would cut the value off)."""
    ends, make = [], program.module.make_envs

    def watched(*given):
        envs = make(*given)
        step = envs.step
        envs.step = lambda actions: (result := step(actions), ends.append(np.array(result[2:4])))[0]
        return envs

    monkeypatch.setattr(program.module, "make_envs", watched)
    flags = f"--env-id {env_id} {limit} --total-timesteps 600 --eval-episodes 3 --run-dir run"
    final = program.train(program.fast, flags)
    returns = episode_returns()
    assert len(returns) > 50 and max(returns) == most and final["eval_return_mean"] <= most
    terminated = np.concatenate([end[0] for end in ends])
    truncated = np.concatenate([end[1] for end in ends])
    assert truncated.sum() >= returns.count(most) > 0
    if "Endless" in env_id:
        assert set(returns) == {most} and not terminated.any() and final["eval_return_std"] == 0


@ppo_only
def test_target_kl_ends_updates_early(program, monkeypatch):
    """Fails if --target-kl does nothing, or is not asked after each epoch."""
    steps, step = [], program.module.Adam.step
    monkeypatch.setattr(program.module.Adam, "step", lambda *args: steps.append(1) or step(*args))
    counts = []
    for target in ("", "--target-kl 1000000", "--target-kl 1e-7"):
        flags = "--learning-rate 0.03 --no-anneal-lr --update-epochs 4 --total-timesteps 600"
        program.train(program.fast, flags, target, f"--run-dir run{len(counts)}")
        counts.append(len(steps) / len(rows(f"run{len(counts)}/metrics.csv")))
        steps.clear()
    assert counts == [16, 16, 4]  # four minibatches an epoch


def film(path):
    """(seconds, frames' shape, whether two frames differ) of an mp4."""
    from moviepy import VideoFileClip

    with contextlib.closing(VideoFileClip(str(path))) as clip:
        first, last = clip.get_frame(0), clip.get_frame(clip.duration - 1e-3)
        return clip.duration, first.shape, bool((first != last).any())


def test_capture_video(program):
    """Fails if no film is made of an evaluation or of --evaluate, if it cannot be played, or if --evaluate films
    because the run did."""
    flags = "--total-timesteps 200 --eval-every 100 --eval-episodes 1 --max-episode-steps 40 --run-dir run"
    program.train(program.fast, flags, "--capture-video")
    films = [f"{row['step']:.0f}.mp4" for row in rows("run/evaluations.csv")]
    assert sorted(os.listdir("run/videos")) == sorted(films) and len(films) == 2
    assert program.main("--evaluate run") == 0 and len(os.listdir("run/videos")) == 2
    assert program.main("--evaluate run --capture-video") == 0
    for name in ("best.mp4", films[0]):
        seconds, shape, moves = film(Path("run/videos", name))
        assert 0 < seconds < 10 and min(shape[:2]) >= 200 and moves


# -------------------------------------------------------------------------------------------------- it learns at all


def learnt(program, flags, **kwargs):
    """Whether Match with these arguments is learnt: at random it pays less than 0.6, at best 1."""
    env, total = gym.make("run_envs:Match-v0", **kwargs), 0
    env.action_space.seed(0)
    for episode in range(50):
        env.reset(seed=episode)
        total += sum(env.step(env.action_space.sample())[1] for _ in range(4))
    assert total / 50 < 0.6
    return program.train(program.learn, flags, of("Match", **kwargs), "--run-dir run")["eval_return_mean"] > 0.95


@each(lambda script: script.actions)
def test_every_action_space_learns(program, case, threads):
    """Fails if an action arrives unclipped, unshifted, not as an integer or out of order, if its log-probability is
    another's, or if vectors are learnt on more than one thread."""
    assert learnt(program, "", actions=case) and set(threads) == {1}


@each(lambda script: script.observations, often=2)
def test_every_observation_kind_learns(program, case):
    """Fails if a part of the observation does not reach the network, or channels are taken for rows."""
    image = "channels" in case
    assert learnt(program, program.learn_images if image else "", observation=case)
    agent = program.module.load("run", env_id="run_envs:Match-v0")
    assert program.module.evaluate(agent, agent.args, 20)[0] > 0.95
    assert agent.image == image


@pytest.fixture(scope="module")
def plain_table(program, tmp_path_factory):
    """The table of a short run without any option."""
    run = tmp_path_factory.mktemp("plain") / "run"
    program.train(program.fast, "--total-timesteps 200 --run-dir", run)
    return table(run / "metrics.csv")


@each(lambda script: script.options)
def test_every_option_has_an_effect(program, case, plain_table):
    """Fails if an option is taken and forgotten."""
    program.train(program.fast, "--total-timesteps 200 --run-dir run", case)
    assert table(Path("run/metrics.csv")) != plain_table


@slow
@each(lambda script: script.options)
def test_every_option_learns(program, case):
    """Fails if an option keeps CartPole from being learnt (random play: 22)."""
    flags = "--total-timesteps 40000 --eval-every 1000000 --run-dir run"
    assert program.train(flags, case)["eval_return_mean"] > 120


@ppo_only
def test_clipped_rewards(program, monkeypatch):
    """Fails if something else than signs is learnt from, or if reported returns are sums of signs (4, not 1)."""
    seen, compute = [], program.module.compute_gae
    watched = lambda rewards, *rest: seen.append(rewards.numpy().copy()) or compute(rewards, *rest)
    monkeypatch.setattr(program.module, "compute_gae", watched)
    assert learnt(program, "--clip-reward")
    assert set(np.unique(seen)) == {0, 1} and max(episode_returns()) == 1


@slow
@ppo_only
def test_compiled_it_learns(program):
    """Fails if the compiled loss has another gradient, or compilation breaks on an option."""
    assert learnt(program, "--compile --clip-vloss")


def test_minigrid_just_works(program):
    """Fails if an observation that holds text keeps plain `--env-id MiniGrid-…` from working."""
    pytest.importorskip("minigrid")
    flags = "--env-id MiniGrid-Empty-5x5-v0 --total-timesteps 200 --eval-episodes 2 --no-progress --run-dir run"
    assert program.main(flags) == 0
    assert program.module.load("run").act(np.zeros((2, 7 * 7 * 21), np.float32)).shape == (2,)


@ppo_only
@pytest.mark.parametrize("flags", ["--num-steps 1 --num-minibatches 1", "--num-steps 8 --num-minibatches 8"])
def test_one_environment_few_steps(program, flags):
    """Fails if a rollout or minibatch of nothing but reset rows is learnt from, or turns statistics into NaN."""
    flags += " --num-envs 1 --total-timesteps 40 --eval-every 100 --run-dir run"
    for normalize in ("", "--normalize-obs --normalize-reward"):
        final = program.train(program.learn, of("Match"), flags, normalize)
        assert final["global_step"] >= 40 and len(episode_returns()) >= 10
        assert all(weight.isfinite().all() for weight in checkpoint()["agent"].values())
        shutil.rmtree("run")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("observation", ["vector", "channels_last"])
def test_weights_of_a_gpu_load_on_a_cpu(observation, program, tmp_path):
    """Fails if a file saved on a GPU needs one to be loaded, or if --device cuda does not learn."""
    image = observation != "vector"
    assert learnt(program, f"{program.learn_images if image else ''} --device cuda", observation=observation)
    agent = program.module.load("run", env_id="run_envs:Match-v0")
    assert str(agent.device) == ("cuda" if image else "cpu")  # auto
    shutil.copy(program.module.__file__, tmp_path)
    own = ("--env-id", "run_envs:Match-v0")
    for model in ("best", "last"):  # a process that sees no GPU
        out, _ = shell(tmp_path, program.name, *own, "--evaluate", "run", "--model", model)
        assert float(out.split(": ")[1].split()[0]) > 0.9
    shell(tmp_path, program.name, *own, "--resume", "run", "--device", "cpu", "--total-timesteps", 5500)
