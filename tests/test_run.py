"""The run section, which is the same text in every script, with ppo.py: flags, run folder, checkpoints, strangers.

What a user would do at a shell runs as a process of its own where that matters; the rest in this process.
"""

import contextlib
import csv
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import matplotlib.figure
import numpy as np
import pytest
import torch
from run_folder import Killed, command, content
from tools import Walk, catches, close, rehearse, vector_env

SCRIPT = "ppo"
SMALL = (
    "--num-envs 2 --num-steps 8 --num-minibatches 2 --hidden-sizes 8 --eval-episodes 3 --no-progress --no-anneal-lr "
)
RUN = SMALL + "--total-timesteps 150 --checkpoint-every 60 --eval-every 50 --run-dir run "
TESTS = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch, request):
    """Every test works in an empty folder, and draws no curves, which takes most of the time, unless it asks for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    if "script" in request.fixturenames and "curve" not in request.fixturenames:
        script = request.getfixturevalue("script")
        if not isinstance(script, tuple):
            monkeypatch.setattr(script.Run, "draw_curve", lambda run: None)


@pytest.fixture
def curve():
    """Curves are drawn."""


def shell(*words, code=0, **environment):
    """What a process prints on stdout and stderr; it must end with this exit code."""
    environment = os.environ | {"PYTHONPATH": TESTS, "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def table(name, run="run"):
    """{column: numbers} of a CSV file in a run folder."""
    with Path(run, name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {column: [float(row[column]) for row in rows] for column in rows[0]}


def complaint(script, flags, capsys):
    """The one line on stderr of a command that is refused."""
    capsys.readouterr()
    assert command(script, flags) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.isprintable() or err[:-1].isprintable(), err
    return err


# ---------------------------------------------------------------------------------------------------- what it leaves

WITHOUT = """
import os, runpy, sys
for name in ("sysconf", "killpg", "getpgid", "setsid", "fork"):
    delattr(os, name)
for name in ("fcntl", "resource", "pwd", "termios"):
    sys.modules[name] = None
sys.argv = ["ppo.py", *sys.argv[1:]]
runpy.run_path("ppo.py", run_name="__main__")
"""
IMPORTED = "import os, sys, ppo; print(sorted({'matplotlib', 'moviepy'} & set(sys.modules)), os.listdir())"


@pytest.mark.slow
def test_copied_away_alone(script):
    """It runs where nothing but the file is, also without what Windows lacks, leaves a whole folder, and says where the
    curve lies and how to watch the agent, in words that can be pasted.
    """
    shutil.copy(script.__file__, "ppo.py")
    assert shell("-B", "-c", IMPORTED)[0] == "[] ['ppo.py']\n"
    out, err = shell("-B", "-c", WITHOUT, *f"{SMALL} --total-timesteps 300 --eval-every 100".split())
    (run,) = Path("runs").iterdir()
    *_, evaluation, watch = out.splitlines()
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    steps = {f"models/{step:.0f}.pt" for step in table("evaluations.csv", run)["step"]}
    assert files == steps | {"models/best.pt", "checkpoint.pt", "config.json", "metrics.csv"} | {
        "episodes.csv",
        "evaluations.csv",
        "learning_curve.png",
        "summary.json",
    }
    summary = json.loads((run / "summary.json").read_text())
    assert evaluation.startswith(f"last evaluation: {summary['eval_return_mean']:.1f} ") and evaluation.endswith(
        f"{run.as_posix()}/learning_curve.png"
    )
    assert watch.startswith("to watch the best agent: python ppo.py ")
    again, _ = shell(*watch.split("python ")[1].split()[:-1])  # all but --render
    assert again.startswith("best weights: ")
    config = json.loads((run / "config.json").read_text())
    assert config["script"] == "ppo" and config["commit"] == "" and config["versions"]["numpy"] == np.__version__
    assert set(config["args"]) == set(vars(script.Args())) and config["args"]["hidden_sizes"] == [8]
    assert err == ""


def test_commit(script, monkeypatch):
    """The commit of the script's folder, with a mark if something has changed since."""
    here = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    git = lambda *words: subprocess.run(["git", *here, *words], check=True, capture_output=True, text=True).stdout
    Path("ppo.py").write_text("1")
    monkeypatch.setattr(script, "__file__", str(Path("ppo.py").absolute()))
    git("init", "-q")
    git("add", "ppo.py")
    git("commit", "-qm", "first")
    for mark in ("", "-dirty"):
        command(script, f"{SMALL} --total-timesteps 20 --run-dir run{mark}")
        commit = json.loads(Path(f"run{mark}/config.json").read_text())["commit"]
        assert commit == git("rev-parse", "--short", "HEAD").strip() + mark
        Path("ppo.py").write_text("2")


def test_notebook(script):
    """`tuned` applies what is known of an environment, and a misspelt name is a TypeError; `train` returns the summary;
    the agent is loaded with its settings; a UserError ends what cannot go on.
    """
    args = script.tuned(env_id="Pendulum-v1", seed=2, progress=False)
    assert (args.gamma, args.seed, args.total_timesteps) == (0.98, 2, 500_000)
    with pytest.raises(TypeError, match="gama"):
        script.tuned(gama=0.9)
    with pytest.raises(script.UserError, match="hidden_sizes must be a tuple"):
        script.tuned(hidden_sizes=64)
    small = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 40, "progress": False}
    summary = script.train(script.tuned(**small))
    agent = script.load(summary["run_dir"], "last")
    assert agent.args.num_steps == 8 and summary["global_step"] >= 40
    mean, std = script.evaluate(agent, agent.args, 20, agent.args.seed + 10_000)
    assert mean == summary["eval_return_mean"] and std == summary["eval_return_std"]
    with pytest.raises(script.UserError, match="nowhere/config.json is missing"):
        script.load("nowhere")


@catches("Run.add_row, the past is 0: [math.nan] * len(table -> [0.0] * len(table")
def test_tables(script):
    """Columns begin when they are first logged, NaN before; a row holds the means since the last; 200 rows in a run."""
    never = {"eval_every": 10**9, "checkpoint_every": 10**9, "total_timesteps": 400, "run_dir": "run"}
    run = script.Run(script.Args(**never, progress=False), mock.Mock(num_envs=1))
    run.start(mock.Mock())
    run.has_ended = np.zeros(1, bool)
    for step, figures in ((1, {"loss": 1.0}), (2, {"loss": 4.0, "late": torch.tensor(7.0)}), (3, {}), (4, {"late": 1})):
        run.step = step
        run.log(**figures)
        run.write_what_is_due()
    metrics = table("metrics.csv")
    assert metrics["step"] == [2, 4]
    close(metrics["loss"], [2.5, np.nan])
    close(metrics["late"], [7, 1])
    run.add_row("metrics", {"later": 5})
    close(table("metrics.csv")["later"], [np.nan, np.nan, 5])
    with pytest.raises(ValueError, match="pair"):
        run.log(pair=np.ones(2))
    for name in ("episodes", "step"):  # which the run has itself; others that its functions use are free
        with pytest.raises(TypeError, match=name):
            run.add_row("metrics", dict(episodes=1, **{name: 1}) if name == "episodes" else {name: 1})
    run.log(name=1.0, table=2.0, self_=3.0)


@catches(
    "Run.new_envs, seconds by the clock on the wall: self.check_finite(observation=obs) -> self.begun = time.time()",
)
def test_times(script, monkeypatch):
    """Seconds are those of a clock that nobody sets, and go on after a resumption."""
    command(script, RUN)
    before = table("metrics.csv")["seconds"]
    assert before == sorted(before) and 0 < before[-1] < 600
    command(script, "--resume run --total-timesteps 300 --no-progress")
    after = table("metrics.csv")
    assert after["seconds"][: len(before)] == before and after["seconds"] == sorted(after["seconds"])


@catches(
    "Run.finish, no curve where a kill came before it: self.draw_curve() -> 0",
    "Run.draw_curve, rows without a bound: np.fmax.accumulate -> np.array",
    "Run.draw_curve, gaps where nothing was logged: if y == y -> if True",
)
def test_curve(script, curve):
    """The mean is called what it is; each panel has a title; a range from -11,000 to -13 is drawn on a symlog axis.

    It is drawn at both checkpoints, at the end, and where a run is resumed that was killed after its last checkpoint.
    """
    drawn = []
    saved = lambda figure, *_, **__: drawn.append(figure)
    with mock.patch.object(matplotlib.figure.Figure, "savefig", saved):
        command(script, RUN)
        command(script, "--resume run --no-progress")
        run = SimpleNamespace(num_episodes=2, metrics={"step": [9], "return_mean": [-13]})
        run.episodes = {"step": [1, 9], "return": [-11_000, -13], "length": [1, 1]}
        run.evaluations = {"step": [9], "seconds": [1], "return_mean": [-13], "return_std": [0]}
        run.args, run.dir = script.Args(), Path("run")
        script.Run.draw_curve(run)
    assert len(drawn) == 2 + 1 + 1 + 1
    returns, *panels = drawn[-2].axes
    (label,) = [line.get_label() for line in returns.lines if line.get_label().startswith("mean")]
    ended = len(script.read_state("run/checkpoint.pt")["run"]["episodes"]["step"])
    assert label == f"mean of the last {ended} episodes" and 0 < ended < 100
    assert returns.get_title() == "ppo.py: CartPole-v1, seed 1" and returns.get_yscale() == "linear"
    assert [panel.get_title() for panel in panels] == list(script.CURVE.values())
    assert drawn[-1].axes[0].get_yscale() == "symlog"
    name = list(script.CURVE)[0]
    for bound, lines in ((2.5, 2), (9.0, 1)):  # a dashed line where a bound is known and near; not every row has it
        run.metrics |= {"step": [1, 9], "return_mean": [1, 1], name: [1.0, 2.0], f"{name}_bound": [bound, np.nan]}
        with mock.patch.object(matplotlib.figure.Figure, "savefig", saved):
            script.Run.draw_curve(run)
        assert len(drawn[-1].axes[1].lines) == lines
    run.metrics = {"step": [1, 2, 3], name: [1.0, np.nan, 2.0]}  # a line through what is known
    with mock.patch.object(matplotlib.figure.Figure, "savefig", saved):
        script.Run.draw_curve(run)
    assert drawn[-1].axes[1].lines[0].get_xdata().tolist() == [1, 3]


# ----------------------------------------------------------------------------------------------- counting, evaluating


def fresh(script, *makers, **given):
    """A Run in environments that `makers` make, which writes nothing."""
    args = script.Args(**{"progress": False, "num_envs": len(makers)} | given)
    with mock.patch.multiple(script, make_envs=lambda *_: vector_env(makers, len(makers)), write_file=mock.Mock()):
        run = script.Run(args, vector_env(makers, len(makers)))
        run.start(mock.Mock())
        return run, *run.new_envs()


@catches(
    "Run.count, only the last begins anew: self.returns[dones] = 0 -> self.returns[np.flatnonzero(dones)[-1:]] = 0",
    "Run.count, reset rows count: (~reset_rows).sum() -> len(reset_rows)",
    "Run.count, reset rows make episodes longer: self.lengths += ~reset_rows -> self.lengths += 1",
    "Run.count, rewards in place of returns: self.returns += rewards -> self.returns = rewards * 1.0",
    "Run.mean_return, a mean of ten: [-100:] -> [-10:]",
    "Run.mean_return, a mean of all: [-100:] -> [-1000:]",
)
def test_count(script):
    """Both environments end at once, after rewards 1, 2 and 5, 6; then both only reset; then 1 and 1, and one ends."""
    no, yes = np.zeros(2, bool), np.ones(2, bool)
    run = fresh(script, lambda: Walk([(9, "t")]), lambda: Walk([(9, "t")]))[0]
    steps = ([1, 5], no, no), ([2, 6], yes, no), ([0, 0], no, yes), ([1, 1], np.array([True, False]), no)
    for rewards, dones, reset_rows in steps:
        run.count(np.zeros((2, 1)), np.array(rewards), dones, reset_rows)
    assert run.episodes == {"step": [4, 4, 6], "return": [3, 11, 1], "length": [2, 2, 1]}
    assert run.step == 6 and run.returns.tolist() == [0, 1] and run.has_ended.all()
    for total in range(200):
        run.add_episode(0, total, 1)
    assert run.mean_return() == 149.5 and run.num_episodes == 203  # 100 to 199


@catches("Run.write_what_is_due, no episode needs to end: self.has_ended.all() -> True",
         "Run.write_what_is_due, one episode is enough: self.has_ended.all() -> self.has_ended.any()")  # fmt: skip
def test_long_episodes_end(script):
    """Checkpoints are due each 10 steps; episodes last 30 and 50 steps, and all come to their end."""
    run = rehearse(script, lambda: Walk([(30, "t")]), lambda: Walk([(50, "c")]), num_envs=2, num_steps=5,
                   num_minibatches=1, total_timesteps=900, checkpoint_every=10)  # fmt: skip
    assert set(run.episodes["length"]) == {30, 50} and run.episodes["length"].count(50) >= 5


@catches("TrueReturn.step, what the wrapper makes of it: np.asarray(reward, float).item() -> 0",
         "true_returns, of wrapped rewards: if args.wrappers -> if False",
         "evaluate, of wrapped ones: true_returns(envs, args, returns + rewards) -> (returns + rewards)")  # fmt: skip
def test_returns_are_true_ones(script):
    """A wrapper of the user's doubles rewards: training sees 2 a step, but the ten steps of an episode return 10."""
    assert command(script, f"{RUN} --env-id run_worlds:Plain-v0 --wrappers run_worlds.Double") == 0
    assert set(script.read_state("run/checkpoint.pt")["run"]["episodes"]["return"]) == {10.0}
    assert set(table("evaluations.csv")["return_mean"]) == {10.0}


@catches(
    "Run.new_envs, seeded alike after each checkpoint: [self.args.seed, self.step] -> [self.args.seed, 0]",
    "Run.new_envs, the seed is forgotten: [self.args.seed, self.step] -> [0, self.step]",
    "Run.new_envs, the environments are not seeded: reset(seed=int(rng.integers(2**31))) -> reset(seed=1)",
    "Run.new_envs, the old ones go on: self.envs = make_envs(self.args, self.envs.num_envs) -> self.envs.old = 1",
    "Run.new_envs, dropout is not seeded: manual_seed(int(rng.integers(2**31))) -> 0",
)
def test_new_envs(script):
    """Episodes and random numbers follow from seed and step, and differ where one of these does."""
    seen = []
    for seed, step in ((1, 0), (1, 0), (1, 500), (2, 0)):
        run = fresh(script, lambda: gym.make("CartPole-v1"), seed=seed)[0]
        run.step = step
        with mock.patch.object(script, "make_envs", lambda *_: vector_env([lambda: gym.make("CartPole-v1")], 1)):
            new, obs, _, rng = run.new_envs()
        assert new is run.envs and new.num_envs == 1 and not hasattr(new, "old")
        new.old = True
        seen.append((obs.tolist(), (rng.random(), torch.rand(1).item())))
    assert seen[0] == seen[1] and len({obs for obs in map(str, seen)}) == 3
    assert len({str(obs) for obs, _ in seen}) == 3


@catches(
    "evaluate, counts after the end: returns[playing] = true_returns(envs, args, returns + rewards)[playing] -> "
    "returns += rewards",
    "evaluate, infinity times 0: returns[playing] = true_returns(envs, args, returns + rewards)[playing] -> "
    "returns += rewards * playing",
    "evaluate, stops too early: or 27_000 -> or 1000",
    "evaluate, ends with the first episode: not playing.any() -> not playing.all()",
    "evaluate, a last reward lost: playing &= ~(terminated | truncated) -> playing &= ~terminated & False",
)
def test_evaluation(script, capsys):
    """Episodes of 2 and 5 steps with returns 1 + 2 and 1 + … + 5: 9 ± 6. What the first pays later is infinite.

    An episode of 1,100 steps is played to its end; where it is cut off, a line says so.
    """

    class Later(Walk):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, (np.inf if self.episode else reward), *rest

    makers = [lambda: Later([(2, "t")]), lambda: Walk([(5, "c")])]
    agent = SimpleNamespace(act=lambda obs: np.zeros(2, int))
    with mock.patch.object(script, "make_envs", lambda *_: vector_env(makers, 2)), np.errstate(invalid="ignore"):
        assert script.evaluate(agent, script.Args(), 2) == (9, 6)
    agent.act = lambda obs: np.zeros(1, int)
    with mock.patch.object(script, "make_envs", lambda *_: vector_env([lambda: Walk([(1100, "t")])], 1)):
        assert script.evaluate(agent, script.Args(), 1) == (1100 * 1101 / 2, 0)
        assert "cut off" not in capsys.readouterr().out
        assert script.evaluate(agent, script.Args(max_episode_steps=10), 1) == (55, 0)
    assert "1 episodes of an evaluation were cut off" in capsys.readouterr().out


@catches(
    "TrueReturn.step, one step late: >= self.limit -> > self.limit",
    "TrueReturn.step, the environment's own end is forgotten: truncated or self -> self",
)
def test_limits_truncate(script):
    """CartPole pays 1 a step: limits of 5 steps or a return of 5 cut its episodes off after 5 steps, all of them."""
    for limit in ({"max_episode_steps": 5}, {"max_episode_return": 5.0}, FIVE_STEPS_NO_LIMIT):
        envs = script.make_envs(script.Args(**limit), 2)
        envs.reset(seed=0)
        ends = []
        for _ in range(18):
            _, _, terminated, truncated, _ = envs.step(np.array([0, 1]))
            assert not terminated.any()
            ends.append(truncated.all())
        assert [t + 1 for t, end in enumerate(ends) if end] == [5, 11, 17]  # between them a step that resets


FIVE_STEPS_NO_LIMIT = {"max_episode_steps": 5, "max_episode_return": 99.0}


@pytest.mark.parametrize("explores, steps", [(False, 110), (True, 30)])
def test_what_decides_to_stop(script, explores, steps, monkeypatch, capsys):
    """Every training episode returns 5, and evaluations 4, 4, 5: a hundred episodes decide, or the third evaluation."""
    monkeypatch.setattr(script, "EXPLORES", explores)
    run = fresh(script, lambda: Walk([(9, "t")]), stop_at_return=5.0, total_timesteps=1000)[0]
    while not run.is_finished():
        run.step += 10
        run.evaluations["return_mean"].append([4, 4, 5][min(2, run.step // 10 - 1)] if explores else 9)
        run.evaluations["step"].append(run.step)
        for total in [5.0] * 10 if run.step > 10 else [0.0]:
            run.add_episode(0, total, 1)
    assert run.step == steps
    with mock.patch.multiple(run, write_evaluation=mock.DEFAULT, draw_curve=mock.DEFAULT):
        run.evaluations["return_std"] = run.evaluations["return_mean"]
        run.finish()
    assert f"stopped after {steps} steps: stop_at_return 5 is reached" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ bad numbers, bad disks


@pytest.mark.parametrize("field", ["observation", "reward"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_not_finite_ends_the_run(script, field, value, capsys):
    """A line names environment, step and field, in a run with a progress bar as well."""
    kwargs = json.dumps({"field": field, "at": 7, "value": value}, separators=(",", ":"))
    flags = f"{SMALL} --env-id run_worlds:Faulty-v0 --env-kwargs {kwargs} --progress"
    assert command(script, flags) == 2
    line = f"ppo.py: run_worlds:Faulty-v0, after step 12: {field} is NaN or infinite"
    assert line in capsys.readouterr().err


def test_loss_that_is_not_finite_ends_the_run(script, capsys):
    """Weights that have become NaN are not saved."""
    err = complaint(script, f"{RUN} --learning-rate 1e15 --max-grad-norm 1e15 --env-id Pendulum-v1", capsys)
    assert "loss is NaN or infinite" in err
    state = content(script).get("checkpoint.pt")
    assert state is None or "nan" not in str(state["agent"])


RAISING = {  # flags, and the file of the user's in which it happens
    '--env-id run_worlds:RaisesEarly-v0 --env-kwargs {"where":"constructor"}': "run_worlds.py",
    '--env-id run_worlds:RaisesEarly-v0 --env-kwargs {"where":"reset"}': "run_worlds.py",
    '--env-id run_worlds:Faulty-v0 --env-kwargs {"field":"raises","at":3}': "run_worlds.py",
    '--env-id run_worlds:Faulty-v0 --env-kwargs {"field":"raises","at":3,"value":"gym"}': "run_worlds.py",
    "--wrappers run_worlds.Double(raises=True)": "run_worlds.py",
    "--env-id raising_module:Plain-v0": "raising_module.py",
    "--env-id run_worlds:Unseen-v0 --capture-video --run-dir unseen": "run_worlds.py",
    '--env-id run_worlds:Mistaken-v0 --env-kwargs {"leave":""}': "run_worlds.py",
}


@catches("raise_mistyped, any argument is the user's: and not is_given -> and not argument")
def test_what_is_the_users_own_keeps_its_traceback(script, monkeypatch):
    """An error of his environment, wrapper or module names his file: a line would not help him."""
    monkeypatch.syspath_prepend(".")
    Path("raising_module.py").write_text("{}['from within']")
    for flags, file in RAISING.items():
        error = None
        try:
            assert command(script, f"{SMALL} {flags}") != 2, f"{flags}: one line"
        except Exception as raised:
            error = raised
        assert error is not None and "from" in str(error) and not Path("unseen").exists()
        frames = traceback.extract_tb(error.__traceback__)
        frames += traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ else []
        assert file in [Path(frame.filename).name for frame in frames]


def test_disk_full_at_any_moment(script, capsys, monkeypatch):
    """One line, code 2; and once there is space the run goes on to what it would have come to."""
    replace, moments, fatal = os.replace, [0], [10**9]

    def full(source, target):
        moments[0] += 1
        if moments[0] >= fatal[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(script.os, "replace", full)
    assert command(script, RUN) == 0
    unbroken, last = content(script), moments[0]
    for moment in range(1, last + 1, 3):
        shutil.rmtree("run")
        moments[0], fatal[0] = 0, moment
        assert "cannot write run/" in complaint(script, RUN, capsys)
        moments[0] = -(10**9)
        again = "--resume run --no-progress" if Path("run/config.json").exists() else RUN
        assert command(script, again) == 0 and content(script) == unbroken


@catches('write_file, in place: f"{path}.tmp" -> path')
def test_files_are_whole_or_not_there(script):
    """A process that dies while it writes leaves the old file."""
    script.write_file("run/file", lambda file: file.write(b"old"))

    def write(file):
        file.write(b"ne")
        file.flush()
        raise Killed

    with pytest.raises(Killed):
        script.write_file("run/file", write)
    assert Path("run/file").read_bytes() == b"old"


@catches("write_file, the run ends: except PermissionError: -> except ZeroDivisionError:")
def test_a_file_that_is_open_elsewhere(script, monkeypatch, capsys):
    """On Windows a table that another program has opened cannot be replaced: a line says so, and the run goes on."""
    replace = os.replace

    def replace_others(old, new):
        if str(new).endswith("metrics.csv"):
            raise PermissionError(new)
        replace(old, new)

    monkeypatch.setattr(os, "replace", replace_others)
    assert command(script, RUN) == 0 and "metrics.csv is in use" in capsys.readouterr().out
    assert [*Path("run").rglob("*metrics.csv*")] == [Path("run/metrics.csv.tmp")]
    assert len(table("evaluations.csv")["step"]) == 3


@catches('Run.check_alone, nobody looks: ["started"] != self.started: -> ["started"] == 0:')
def test_two_processes_in_one_folder(script, monkeypatch, capsys):
    """A run that is resumed while its first process is still at work: the first one ends, with a line that says so."""
    write_checkpoint, others = script.Run.write_checkpoint, []

    def resume_elsewhere(run):
        write_checkpoint(run)
        if not others:
            others.append("a second process")
            assert command(script, "--resume run --no-progress") == 0

    monkeypatch.setattr(script.Run, "write_checkpoint", resume_elsewhere)
    assert "another process has resumed or removed run: this one ends" in complaint(script, RUN, capsys)
    first = content(script)
    shutil.rmtree("run")
    monkeypatch.setattr(script.Run, "write_checkpoint", write_checkpoint)
    assert command(script, RUN) == 0 and content(script) == first
    shutil.rmtree("run")
    monkeypatch.setattr(script.Run, "write_checkpoint", lambda run: shutil.rmtree("run"))
    assert "resumed or removed" in complaint(script, RUN, capsys)


# --------------------------------------------------------------------------------------------- resuming, evaluating


def test_resume(script, capsys):
    """What would change how the run learns is refused; lengths and intervals may change; a finished run is prolonged,
    one that has too many steps is evaluated, one without a checkpoint begins anew; a second run is not written over it.
    """
    command(script, RUN)
    first, before = content(script), table("metrics.csv")
    assert command(script, "--resume run --no-progress") == 0 and content(script) == first
    assert "gamma changes how a run learns" in complaint(script, "--resume run --gamma 0.5", capsys)
    assert "seed changes" in complaint(script, "--resume run --seed 2", capsys)
    assert "holds a run already" in complaint(script, RUN, capsys)
    assert command(script, "--resume run --no-progress --total-timesteps 300 --eval-every 100") == 0
    after = table("metrics.csv")
    assert after["step"][: len(before["step"])] == before["step"] and after["step"][-1] >= 300
    assert command(script, "--resume run --no-progress --total-timesteps 10") == 0
    Path("run/checkpoint.pt").unlink()
    shutil.copy("run/config.json", "config.json")
    shutil.rmtree("run")
    Path("run").mkdir()
    shutil.copy("config.json", "run")
    assert command(script, "--resume run --no-progress --total-timesteps 150 --eval-every 50") == 0
    assert content(script) == first


def test_resume_where_the_total_is_reached(script):
    """A run that was killed before its first evaluation, and is resumed with fewer steps, is evaluated all the same."""
    with mock.patch.object(script, "evaluate", side_effect=Killed), pytest.raises(Killed):
        command(script, f"{RUN} --eval-every 10000")
    step = script.read_state("run/checkpoint.pt")["run"]["step"]
    assert command(script, f"--resume run --no-progress --total-timesteps {step}") == 0
    assert table("evaluations.csv")["step"] == [step]


ODD = '--env-id run_worlds:Faulty-v0 --env-kwargs {{"field":"{}","at":3,"value":"500"}} '
SHORT = SMALL + "--total-timesteps 40 --run-dir run"
HINTS = {  # flags: the words of the hint, if there is one
    ODD.format("reward") + "--no-normalize-reward": "try --normalize-reward",
    ODD.format("reward"): None,
    ODD.format("observation") + "--no-normalize-obs": "try --normalize-obs",
    ODD.format("observation"): None,
    "--env-id Wide-v0": "mapped to bounds beyond",
    "--env-id CliffWalking-v1 --max-episode-steps 300": "no checkpoint before",
}


@catches(
    "Run.write_what_is_due, over and over: last_row < self.args.total_timesteps / 10 <= -> 0 <",
    "Run.write_what_is_due, too early: last_row < self.args.total_timesteps / 10 <= self.step -> last_row == 0",
    "Run.write_what_is_due, unasked: if self.args.env_id not in TUNED and -> if",
)
def test_hints(script, capsys):
    """Where nobody has tuned, a run says so, and says once what is noticed too late; elsewhere it does not."""
    gym.register("Wide-v0", Wide)
    for flags, words in HINTS.items():
        shutil.rmtree("run", ignore_errors=True)
        assert command(script, f"{SHORT} {flags}") == 0
        out = capsys.readouterr().out
        words, count = words or "beyond", int(words is not None)
        assert "docs/settings.md" in out and out.count(words) == count, (flags, out)
    shutil.rmtree("run")  # an evaluation before an episode has ended says nothing
    assert command(script, f"{SHORT} --env-id Wide-v0 --total-timesteps 800 --eval-every 5") == 0
    assert "no checkpoint before" not in capsys.readouterr().out
    shutil.rmtree("run")
    tuned = {"Wide-v0": {"ent_coef": 0.0}}
    with mock.patch.object(script, "TUNED", tuned):
        assert command(script, f"{SHORT} --env-id Wide-v0") == 0
    out = capsys.readouterr().out
    assert "docs/settings.md" not in out and "beyond" not in out


class Wide(gym.Env):
    """Actions go to 50; an episode takes ten steps."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Box(-50, 50, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.at += 1
        return np.zeros(1, np.float32), 1.0, self.at == 10, False, {}


@catches("evaluate, a process for each episode: async_envs=False -> async_envs=True")
def test_evaluations_stay_in_one_process(script):
    """Where processes are spawned, twenty of them would take a minute to start, and gigabytes."""
    args = script.Args(async_envs=True, env_id="Acrobot-v1", hidden_sizes=(4,), max_episode_steps=5)
    envs = script.make_envs(replace(args, async_envs=False), 1)
    with mock.patch.object(gym.vector, "AsyncVectorEnv", side_effect=AssertionError):
        assert script.evaluate(script.make_agent(args, envs), args, 2) == (-5, 0)


@catches(
    "parse, only ids that are registered: [*gym.registry, *TUNED] -> [*gym.registry]",
    'tuned, an id without its flag: if flags and not flags[0].startswith("-"): -> if False:',
    "tuned, 1e6 behind an equals sign: (--[\\w-]+=)? -> ()?",
    "tuned, numbers with an e are rounded: .15g -> .0f",
    'tuned, a comment is read: if "#" in flags -> if False',
)
def test_short_forms_of_flags(script):
    """`python ppo.py Acrobot` is `python ppo.py --env-id Acrobot-v1`, of plugins too; 2e6 is 2000000."""
    found = None
    with contextlib.suppress(SystemExit):  # of tyro
        found = script.tuned("Acrobot", "--seed", "3")
    assert found == script.tuned(env_id="Acrobot-v1", seed=3)
    with mock.patch.object(gym, "registry", {known: None for known in gym.registry if "MiniGrid" not in known}):
        for env_id in ("MiniGrid-Empty-5x5", "minigrid:MiniGrid-Empty-5x5-v0"):
            assert script.tuned(env_id) == script.tuned(env_id="MiniGrid-Empty-5x5-v0")
    for flags in ("--total-timesteps 2e6", "--total-timesteps=2E6", "--total-timesteps 2000000  # don't stop"):
        found, flags = None, flags.split()
        with contextlib.suppress(SystemExit):
            found = script.tuned(*flags)
        assert found == script.tuned(total_timesteps=2_000_000)
    assert script.tuned("--stop-at-return", "1.25e1").stop_at_return == 12.5
    for folder in ("runs/1e6", "runs/lr=1e6"):
        assert script.tuned("--run-dir", folder).run_dir == folder


def test_config(script):
    """The settings of another run, in another process, give its numbers; flags win over them."""
    command(script, RUN)
    assert command(script, "--config run/config.json --run-dir again --no-progress") == 0
    one, two = content(script), content(script, "again")
    one["summary.json"].pop("run_dir"), two["summary.json"].pop("run_dir")
    assert one == two
    assert command(script, "--config run/config.json --run-dir other --seed 5 --no-progress") == 0
    assert content(script, "other")["metrics.csv"] != one["metrics.csv"]


def test_evaluate(script, capsys, monkeypatch):
    """Best, last or a step plays the weights that were saved; a film is made if asked, and its place is told."""
    command(script, RUN)
    before, last = content(script), table("evaluations.csv")["step"][-1]
    for model, file in (("best", "models/best"), ("last", "checkpoint"), (f"{last:.0f}", f"models/{last:.0f}")):
        agent = script.load("run", model)
        state = script.read_state(f"run/{file}.pt")["agent"]
        assert all(value.equal(state[name]) for name, value in agent.state_dict().items())
        assert command(script, f"--evaluate run --model {model}") == 0
        assert f"{model} weights: " in capsys.readouterr().out
    assert content(script) == before
    assert command(script, "--evaluate run --capture-video --eval-episodes 1") == 0
    folder = capsys.readouterr().out.split("film: ")[1].strip()
    assert list(Path(folder).glob("*.mp4"))
    modes, make = [], gym.make_vec
    with mock.patch.object(gym, "make_vec", lambda *a, **k: modes.append(k.pop("render_mode", 0)) or make(*a, **k)):
        command(script, "--evaluate run --render --eval-episodes 1")
    assert modes == [0, 0, "human"]
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert "there is no display" in complaint(script, "--evaluate run --render", capsys)


@pytest.mark.slow
def test_films_of_a_run(script):
    """A film at each evaluation; what cannot be filmed is refused at once."""
    command(script, RUN + "--capture-video --total-timesteps 100")
    steps = [f"{step:.0f}" for step in table("evaluations.csv")["step"]]
    assert all(list(Path("run/videos", step).glob("*.mp4")) for step in steps)
    assert command(script, f"{SMALL} --env-id run_worlds:Blind-v0 --capture-video") == 2


# ------------------------------------------------------------------------------------- what users and strangers type


def test_package_that_is_missing(script, capsys, monkeypatch):
    """Box2D's environments say what to install, without Gymnasium's advice, which needs a compiler."""
    for name in [name for name in sys.modules if name.startswith(("gymnasium.envs.box2d", "Box2D"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    assert "pip install ufal-pybox2d" in complaint(script, "--env-id LunarLander-v3 --no-progress", capsys)


@catches(
    'set_up_atari, overrules: kwargs.setdefault("frameskip -> kwargs.__setitem__("frameskip',
    'set_up_atari, no sticky actions in films only: "frameskip", 1) -> "repeat_action_probability", 0.0)',
    'set_up_atari, presses FIRE in training only: "use_fire_reset", False -> "use_fire_reset", True',
)
def test_settings_of_atari_that_the_user_gives_stay(script):
    """With and without ale_py's own vector version, whose agents must press FIRE themselves, as in a film."""
    for mode, name in ((None, "reward_clipping"), ("sync", "frameskip")):
        defaults, given = {}, {name: "the user's"}
        script.set_up_atari(defaults, [], mode)
        script.set_up_atari(given, [], mode)
        assert given == defaults | {name: "the user's"}
        assert defaults.get("use_fire_reset", mode is None) is False
        assert "repeat_action_probability" not in defaults  # sticky actions are as the id has them, in films as well


REFUSED = {
    "--env-id Cartpol-v1": "Cartpol",
    "--env-id nosuch:Thing-v0": "nosuch",
    "--env-id run_worlds:Nothing-v0": "gymnasium.register",
    "--env-id importing_module:Plain-v0": "importing_module",
    '--env-kwargs {"lenght":1}': "lenght",
    "--env-kwargs [": "with --env-kwargs [",
    "--env-kwargs 5": "is a JSON object",
    '--env-id MiniGrid-Empty-5x5-v0 --env-kwargs {"foo":1}': "'foo'",
    "--env-id run_worlds:Blind-v0 --capture-video": "'render_mode'",
    "--wrappers gymnasium.wrappers.Nope": "there is no Nope",
    "--wrappers nosuch.Nope": "nosuch",
    "--wrappers Nope": "Nope",
    "--wrappers gymnasium.wrappers.TimeLimit(steps=5)": "'steps'",
    "--wrappers gymnasium.wrappers.TimeLimit(5)": "arguments need names",
    "--wrappers gymnasium.wrappers.TimeLimit(3": "was never closed",
    "--wrappers gymnasium.wrappers.TimeLimit(max_episode_steps=__import__('os'))": "malformed node",
    "--wrappers gymnasium.wrappers.NormalizeReward": "use --normalize-reward",
    "--env-id MiniGrid-Empty-5x5-v0 --wrappers minigrid.wrappers.FullyObsWrapper": "minigrid.wrappers.ImgObsWrapper",
    "--env-id run_worlds:Grey-v0": "FrameStackObservation(stack_size=4)",
    "--env-id run_worlds:Scaled-v0": "images are uint8",
    "--env-id run_worlds:Camera-v0": "a wrapper must choose",
    "--device meta": "no device meta",
    "--total-timesteps 0": "total_timesteps must be at least 1",
    "--num-envs 0": "num_envs must be at least 1",
    "--num-minibatches 0": "num_minibatches must be at least 1",
    "--seed -1": "seed must be at least 0",
    "--hidden-sizes 64 0": "hidden_sizes must be at least 1",
    "--learning-rate -1": "learning_rate must be at least 0",
    "--max-grad-norm nan": "max_grad_norm must be at least 0",
    "--eval-episodes 0": "eval_episodes must be at least 1",
    "--max-episode-steps 0": "max_episode_steps must be at least 1",
    "--resume nowhere": "nowhere/config.json is missing",
    "--evaluate nowhere": "nowhere/config.json is missing",
    "--config nowhere.json": "nowhere.json is missing",
    "--run-dir taken": "taken",
    "--render": "add --evaluate",
    "--resume run --evaluate run": "choose between",
    "--evaluate run --run-dir other": "choose between",
    "--resume run --config run/config.json": "choose between",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused(script, flags, capsys):
    """One plain line that names what is wrong, code 2, and nothing left behind."""
    Path("taken").write_text("a file, not a folder")
    assert REFUSED[flags] in complaint(script, f"--no-progress {flags}", capsys)
    assert [path.name for path in Path().iterdir()] == ["taken"]


def damage(script, what):
    """Damage the checkpoint, the best model or the config of the folder `run`."""
    name, how = what.split(", ")
    path = Path({"checkpoint": "run/checkpoint.pt", "model": "run/models/best.pt", "config": "run/config.json"}[name])
    if how == "missing":
        path.unlink()
    elif how == "cut off":
        path.write_bytes(path.read_bytes()[:-99])
    elif how == "of another network":
        state = script.read_state(path)
        state["agent"]["actor.0.weight"] = torch.zeros(3, 3)
        torch.save(state, path)
    elif how == "a bomb":
        path.write_bytes(pickle.dumps(Bomb()))
    elif how == "of another script":
        path.write_text('{"args": {"buffer_size": 5}}')
    elif how == "of an edited script":
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"args": config["args"] | {"my_flag": 1}}))
    elif how == "of wrong types":
        path.write_text('{"args": {"num_envs": "many"}}')
    else:
        path.write_text("[" * 99_999)


class Bomb:
    """Who unpickles it without care creates a file."""

    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


DAMAGES = [f"checkpoint, {how}" for how in ("cut off", "of another network", "a bomb")]
DAMAGES += [f"model, {how}" for how in ("missing", "cut off", "of another network", "a bomb")]
DAMAGES += [f"config, {how}" for how in ("missing", "cut off", "of another script", "of an edited script", "nested")]
DAMAGES += ["config, of wrong types"]
SAID = ("is missing, damaged or foreign", "is missing, damaged or of another network")


def test_damaged_files(script, capsys):
    """Each gets a line that names it, and nothing in it is executed."""
    command(script, RUN)
    shutil.move("run", "sound")
    for what in DAMAGES:
        shutil.copytree("sound", "run")
        damage(script, what)
        flags = "--resume run --total-timesteps 200" if what.startswith("checkpoint") else "--evaluate run"
        err = complaint(script, f"{flags} --no-progress", capsys)
        assert what.split(",")[0].replace("model", "best.pt") in err and any(words in err for words in SAID), what
        shutil.rmtree("run")
    assert not Path("exploded").exists()
    Path("bomb").write_bytes(pickle.dumps(Bomb()))
    pickle.loads(Path("bomb").read_bytes())
    assert Path("exploded").exists()  # so this test could fail


STRANGE = {
    "env_id": "run_worlds:Plain-v0",
    "env_kwargs": '{"leave": "executed"}',
    "wrappers": ["run_worlds.Own"],
}


def test_config_of_a_stranger_executes_nothing(script, capsys, monkeypatch):
    """Environments, arguments and wrappers from a file must be given again; the message has the very flags, which
    then work. What cannot be printed is not.
    """
    monkeypatch.setenv("LEAVE", "executed")
    flags = f"{RUN} --env-id {STRANGE['env_id']} --wrappers {STRANGE['wrappers'][0]}"
    assert command(script, flags) == 0
    config = json.loads(Path("run/config.json").read_text())
    Path("executed").unlink()
    sys.modules.pop("run_worlds")
    for name in STRANGE:
        asked = config["args"] | {"env_id": "CartPole-v1", "env_kwargs": "{}", "wrappers": []} | {name: STRANGE[name]}
        Path("run/config.json").write_text(json.dumps(config | {"args": asked}))
        for what in ("--evaluate run", "--resume run", "--config run/config.json"):
            err = complaint(script, f"{what} --no-progress", capsys)
            assert "if you trust it, add --env-id" in err and "run_worlds" not in sys.modules
            assert not Path("executed").exists()
        instead = [f"--{name.replace('_', '-')}", "{}" if name == "env_kwargs" else "CartPole-v1"]
        if name != "wrappers":  # what is replaced need not be trusted
            assert script.tuned("--config", "run/config.json", *instead).env_id == "CartPole-v1"
    Path("run/config.json").write_text(json.dumps(config))
    given_again = complaint(script, "--evaluate run", capsys).split("add ")[1]
    with mock.patch.object(sys, "argv", ["ppo.py", "--evaluate", "run", *__import__("shlex").split(given_again)]):
        script.main()
    assert Path("executed").exists()
    asked = config["args"] | {"env_id": "a:\x1b[2Jb\u202e"}
    Path("run/config.json").write_text(json.dumps(config | {"args": asked}))
    complaint(script, "--evaluate run", capsys)
