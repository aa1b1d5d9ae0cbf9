"""Whole runs of every script: copied away alone, run, killed, resumed, evaluated, fed with bad input, and learning.

script_table.py says what the tests must know of a script: to bring a script over is to add its row there. A test runs
for every script, or for ppo.py alone if it is about nothing but the run section, which is the same text in all scripts
(`once`); what a script may have in a version of its own is tried for ppo.py and for those that have one (`own`).

What a user would do at a shell runs as a process of its own where that matters; the rest goes through `train` and
`main` in this process, each time with the random generators in another state. The environments stand in run_envs.py.
"""

import contextlib
import csv
import dataclasses
import errno
import importlib
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
from types import SimpleNamespace

import gymnasium as gym
import kills
import numpy as np
import pytest
import run_envs
import torch
from kills import given_again, run_difference, saved, shell, table
from script_table import SCRIPTS, lines, words

slow = pytest.mark.slow


# ------------------------------------------------------------------------------------------------- fixtures, helpers


@pytest.fixture(scope="module", params=SCRIPTS)
def program(request):
    return SCRIPTS[request.param]


def where(condition):
    """Only for the scripts for which condition(script) is true."""
    names = [name for name, script in SCRIPTS.items() if condition(script)]
    return pytest.mark.parametrize("program", names, indirect=True)


FIRST = next(iter(SCRIPTS.values()))  # ppo.py
once = where(lambda script: script is FIRST)
twice = where(lambda script: script is FIRST or script is next(s for s in SCRIPTS.values() if s.explores))


def own(*names):
    """For ppo.py, and for the scripts in which one of these functions of ppo.py is missing or another."""
    return where(lambda script: script is FIRST or script.has_own(*names))


def marked(name):
    """The name of a script; slow, but for two that differ in most."""
    return pytest.param(name, marks=[] if name in ("ppo.py", "qlearning.py") else [slow])


two_fast = pytest.mark.parametrize("program", [marked(name) for name in SCRIPTS], indirect=True)


def has(*flags):
    """For the scripts that have all of these flags."""
    return where(lambda script: script.has(*flags))


def each(cases, fast=0):
    """Once for every script and every one of cases(script), all but the first `fast` of which are slow."""
    pairs = [(name, case, n) for name, script in SCRIPTS.items() for n, case in enumerate(cases(script))]
    marked = [pytest.param(name, case, marks=[slow] if n >= fast else []) for name, case, n in pairs]
    return pytest.mark.parametrize(("program", "case"), marked, indirect=["program"])


@pytest.fixture
def curve():
    """Pictures are drawn as users get them: else they are written but empty, which takes no time."""


@pytest.fixture(autouse=True)
def threads(request, tmp_path, monkeypatch):
    """Every test works in an empty folder, without a window, on one thread; the numbers of threads it asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    if "program" in request.fixturenames and "curve" not in request.fixturenames:
        program = request.getfixturevalue("program")
        empty = lambda folder, name: program.module.write_file(folder / name, lambda file: file.write(b"a picture"))
        monkeypatch.setattr(program.module.Run, "draw_curve", lambda run: empty(run.dir, "learning_curve.png"))
        for function, name in program.draws.items():
            draw = lambda folder, *_, name=name: empty(folder, name)
            monkeypatch.setattr(program.module, function, draw)
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
    """The folder of a short run at home, left by a process that had nothing but the script, and a terminal without
    a ±. Only to be read. Beside it lie what the process printed (first what importing did), and what lay in its folder.
    """
    folder = tmp_path_factory.mktemp("finished")
    shutil.copy(program.module.__file__, folder)
    code = ["-B", "-c", IMPORT_AND_RUN.replace("SCRIPT", program.name.removesuffix(".py"))]
    flags = words(program.home, program.fast, "--total-timesteps 1000 --eval-every 400")
    out, err = shell(folder, *code, *flags, PYTHONIOENCODING="ascii")
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
    """complaint(*flags): what these flags make the script say on stderr; it must end with 2 and write nothing. All that
    it may print is what it has seen of the environments."""

    def call(*flags, plain=True):
        before = snapshot()
        capfd.readouterr()
        code = program.main(*flags)
        out, err = capfd.readouterr()
        assert code == 2 and snapshot() == before
        assert out == "" or program.prints and all(line.startswith(program.prints) for line in out.splitlines()), out
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


def checkpoint(program, run="run"):
    return saved(Path(run, f"checkpoint{program.module.STATE}"), program.module)


def episode_returns(program):
    return [total for _, total in checkpoint(program)["run"]["episodes"]]


def is_finite(weights):
    """Whether a nest of dicts holds no NaN and no infinity."""
    if isinstance(weights, dict):
        return all(map(is_finite, weights.values()))
    return bool(np.isfinite(np.asarray(weights)).all())


# ----------------------------------------------------------------------------------------------- copied away, alone


@two_fast
def test_copied_alone_it_leaves_a_complete_run_folder(program, finished):
    """Fails if the script imports a sibling or warns, or if a part of the run folder or the last lines are missing."""
    out, err, beside, name = json.loads(finished.with_name("seen.json").read_text())
    ending, env_id = program.module.STATE, config(finished)["args"]["env_id"]
    assert beside == sorted([program.name, "runs"])
    assert name.startswith(f"{re.sub('[/:]', '-', env_id)}__{program.name[:-3]}__1__")
    parts = f"config.json metrics.csv evaluations.csv learning_curve.png checkpoint{ending} models summary.json"
    assert set(os.listdir(finished)) == {*parts.split(), *program.draws.values()}  # no videos, no *.tmp

    final = summary(finished)
    assert final["eval_episodes"] == 4 and 1000 <= final["global_step"] < 1000 + program.stride
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
    whole = rows(finished / "metrics.csv")[-1 if program.explores else 1 :]  # who explores begins to learn later on
    assert all(np.isfinite(list(row.values())).all() for row in whole)

    evaluations = rows(finished / "evaluations.csv")
    *due, last = [row["step"] for row in evaluations]
    assert len(due) >= 1 and [step // 400 for step in due] == sorted({step // 400 for step in due} - {0})
    assert last == final["global_step"] and (program.stride > 128 or len(due) == 2)
    for name in ("return_mean", "return_std"):
        assert evaluations[-1][name] == pytest.approx(final[f"eval_{name}"], rel=1e-6)
    models = {f"{row['step']:.0f}{ending}" for row in evaluations}
    assert set(os.listdir(finished / "models")) == models | {f"best{ending}"}
    best = max(evaluations, key=lambda row: (row["return_mean"], row["step"]))["step"]
    stored = [saved(finished / f"models/{name}{ending}", program.module) for name in ("best", f"{best:.0f}")]
    assert not kills.difference(*stored, "best")

    from matplotlib.image import imread

    picture = imread(finished / "learning_curve.png")
    assert picture.shape[0] >= 600 and picture.shape[1] >= 800
    assert len(np.unique(picture[::4, ::4].reshape(-1, picture.shape[2]), axis=0)) > 20  # something is drawn


@two_fast
def test_config_holds_arguments_versions_and_machine(program, finished):
    """Fails if an argument is left out of config.json, or a value is the default rather than the one used."""
    stored = config(finished)
    assert set(stored["args"]) == {field.name for field in dataclasses.fields(program.module.Args)}
    flags = words(program.home, program.fast, "--total-timesteps 1000 --eval-every 400")
    for name, value in vars(program.module.tuned(*flags)).items():
        value = list(value) if isinstance(value, tuple) else value
        assert stored["args"][name] == value, name
    assert stored["args"]["total_timesteps"] == 1000 and stored["args"]["checkpoint_every"] == 0  # as given
    assert set(stored["versions"]) == {"torch", "gymnasium", "numpy"} & set(sys.modules)
    for name, value in stored["versions"].items():
        assert value == importlib.metadata.version(name)
    assert "Python" in stored["machine"]


@slow
@once
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


@two_fast
def test_importing_does_nothing(program, finished):
    """Fails if the import seeds, writes, prints, starts CUDA, or imports a plotting library."""
    first = lines(json.loads(finished.with_name("seen.json").read_text())[0])[0]
    assert json.loads(first) == [True, [], False, [program.name]]


# -------------------------------------------------------------------------------------------------------- evaluation


def test_evaluate_prints_mean_and_deviation(program, copied, capsys):
    """Fails if best, last or a step plays other weights than the saved ones, if seed or episodes are ignored, if an
    evaluation trains or leaves anything behind, or if by default it has not the run's number of episodes."""
    before, step, module = snapshot(), summary()["global_step"], program.module
    for model, file in (("best", "models/best"), ("last", "checkpoint"), (step, f"models/{step}")):
        assert program.main(f"--evaluate run --model {model} --eval-episodes 3 --seed 7") == 0
        (line,) = capsys.readouterr().out.splitlines()
        agent = module.load("run")
        agent.load_state_dict(module.read_state(copied / f"{file}{module.STATE}")["agent"])
        mean, std = module.evaluate(agent, agent.args, 3, 7 + 2 * module.EVALUATION)
        assert f"{mean:.2f} ± {std:.2f}" in line and "3 episodes" in line
    assert program.main("--evaluate run") == 0 and "4 episodes" in capsys.readouterr().out
    assert snapshot() == before


@slow
def test_evaluation_counts_nothing_after_an_episode_ended(program):
    """Fails if what the next episode in an evaluation's slot pays is counted, or the last reward of the episode is not:
    here an episode's return is its length, and the lengths differ."""
    lengths, env = [], gym.make("run_envs:Uneven-v0")
    for seed in range(5, 17):
        env.reset(seed=seed)
        lengths.append(env.unwrapped.left)
    assert len(set(lengths)) > 4
    program.train(program.one, program.world("Uneven"), "--total-timesteps 10 --run-dir run")
    agent = program.module.load("run", env_id=program.env_id("Uneven"))
    assert program.module.evaluate(agent, agent.args, 12, 5) == pytest.approx((np.mean(lengths), np.std(lengths)))


@slow
def test_evaluation_of_endless_episodes_ends(program, curve):
    """Fails if an environment without a limit of its own keeps the evaluation from ending, or the curve (of no
    episode) from being drawn."""
    final = program.train(program.one, program.world("Endless"), "--total-timesteps 30 --run-dir run")
    assert final["eval_return_mean"] == 1000
    if not episode_returns(program):  # where training does not play episodes to their end
        assert ",nan," in Path("run/metrics.csv").read_text()  # there is no mean return


@slow
@own("make_envs", "make_vector_envs")
def test_render_shows_the_agent(program, copied, monkeypatch):
    """Fails if --render does not open a window (here: a driver without a screen)."""
    modes, make = [], program.module.make_envs
    keep = lambda args, number, mode=None: [make(args, number, mode), modes.append(mode)][0]
    monkeypatch.setattr(program.module, "make_envs", keep)
    assert program.main("--evaluate run --render --eval-episodes 1 --max-episode-steps 10") == 0
    assert "human" in modes


# --------------------------------------------------------------------------------------------- determinism, notebook


@slow
def test_config_of_a_run_reproduces_it_and_flags_win(program, finished):
    """Fails if an argument is not taken from --config or wins over a flag, or if anything random is not seeded, so that
    another process (with another hash seed, and generators in another state) gets other numbers."""
    assert program.main(f"--config {finished}/config.json --run-dir again --no-progress") == 0
    assert not run_difference(finished, Path("again"))
    assert program.main(f"--config {finished}/config.json --run-dir other --seed 2 --eval-episodes 2") == 0
    args = config("other")["args"]
    assert (args["seed"], args["eval_episodes"], args["total_timesteps"]) == (2, 2, 1000)
    weights = [checkpoint(program, run)["agent"] for run in (finished, "other")]
    layers = lambda part: [name for name in part if name.endswith(("weight", "q")) and np.ndim(part[name]) > 0]
    weights = [{name: part[name] for name in layers(part)} for part in weights]
    assert not any(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert table(finished / "metrics.csv") != table(Path("other/metrics.csv"))


@slow
def test_notebook(program):
    """Fails if tuned values do not apply in a notebook, if what is given does not win, if Args takes arguments by
    position, if a run leaves marks in its Args, if `train`, `load` and `evaluate` disagree on a figure, or if anything
    but a UserError comes out of `load`."""
    module = program.module
    with pytest.raises(TypeError):
        module.Args("CartPole-v1", "{}")
    plain = vars(module.Args())
    for env_id in module.TUNED:
        used = module.tuned(env_id=env_id)
        settings = module.tuned_settings(used)
        assert {name: getattr(used, name) for name in settings} == settings
    differing = [name for name in settings if settings[name] != plain[name]]
    assert len(differing) >= 2
    for name in differing:  # the plain default is a value like any other where it is given
        assert getattr(module.tuned(env_id=env_id, **{name: plain[name]}), name) == plain[name]
    assert vars(module.tuned(env_id="Nothing-v0")) == plain | {"env_id": "Nothing-v0"}

    args = module.tuned(*words(program.home, program.fast, "--total-timesteps 600 --eval-episodes 3 --no-progress"))
    final = module.train(args)
    (run,) = Path("runs").iterdir()
    assert final == summary(run)
    last, seed = module.load(run, "last"), args.seed + module.EVALUATION
    assert module.evaluate(last, args, 3, seed) == (final["eval_return_mean"], final["eval_return_std"])
    mean, std = module.evaluate(module.load(str(run)), args)
    assert np.isfinite(mean) and std >= 0
    envs = module.make_envs(args, 6)
    obs, _ = envs.reset(seed=0)
    if hasattr(last, "begin_episodes"):
        last.begin_episodes(6)
    assert envs.step(last.act(obs))[1].shape == (6,)
    envs.close()
    module.train(dataclasses.replace(args, total_timesteps=100, seed=2))
    (second,) = set(Path("runs").iterdir()) - {run}
    assert config(second)["args"]["seed"] == 2 and summary(second)["global_step"] < 100 + program.stride
    with pytest.raises(module.UserError, match=r"config\.json"):
        module.load("nowhere")
    with pytest.raises(module.UserError, match=rf"models/7\{module.STATE}"):
        module.load(run, 7)


@slow
@once
def test_two_runs_at_the_same_moment(program, monkeypatch):
    """Fails if a second run that begins within the same second is refused, or writes into the folder of the first."""
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    for _ in range(2):
        program.train(program.one, "--total-timesteps 10")
    assert [len(rows(run / "metrics.csv")) for run in Path("runs").iterdir()] == [1, 1]


@slow
@where(lambda script: script.has("normalize_obs") and hasattr(script.module, "RunningMeanStd"))
def test_normalisers_come_back(program):
    """Fails if the running means are not saved with the weights: the loaded agent would then play differently."""
    module = program.module
    scaled = "--normalize-reward" if program.has("normalize_reward") else ""
    flags = f"--normalize-obs {scaled} --total-timesteps 600 --run-dir run"
    final = program.train(program.home, program.fast, flags)
    last = module.load("run", "last")
    play = lambda: module.evaluate(last, last.args, 4, 1 + module.EVALUATION)
    assert play() == (final["eval_return_mean"], final["eval_return_std"])
    for part in last.modules():
        if isinstance(part, module.RunningMeanStd) and part.mean.numel() > 1:
            part.mean += 1
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
        yield strike
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


def strike_and_go_on(program, flags, number, strikes=Strike):
    """Strike a run at `number` of its moments, or at all: going on must lead to the same as a run that was not struck,
    bit for bit.

    It goes on with --resume, and before the first checkpoint also with the same command. Returns what was raised before
    the first checkpoint, and after it.
    """
    with watched_by(Strike(10**9)) as counter:
        program.train(flags, "--run-dir run")
    unbroken, checkpoint = Path("run").rename("unbroken"), Path(f"run/checkpoint{program.module.STATE}")
    moments = range(counter.count)
    if number:  # in the middle of parts of the same size
        moments = [int((part + 0.5) * counter.count / number) for part in range(number)]
    early, late = [], []
    for moment in moments:
        error = struck(strikes(moment), program, flags, "--run-dir run")
        if checkpoint.exists():
            late.append(error)
        else:
            early.append(error)
            if Path("run").exists():
                shutil.copytree("run", "same")
            program.train(flags, "--run-dir same")
            assert not run_difference(unbroken, Path("same")), f"the same command, moment {moment}"
            shutil.rmtree("same")
            if not Path("run/config.json").exists():  # nothing tells what it was to be
                with pytest.raises(program.module.UserError, match=r"config\.json"):
                    program.train("--resume run")
                shutil.rmtree("run", ignore_errors=True)
                continue
        resume = words("--resume run", *given_again(words(flags)))
        struck(Strike(moment % 11), program, *resume)  # and killed once more, while it finds its way back
        program.train(*resume)
        assert not run_difference(unbroken, Path("run")), f"--resume, moment {moment}"
        shutil.rmtree("run")
    assert all(early) and all(late) and early and late  # each was struck, some before the first checkpoint
    return early, late


@each(lambda script: list(script.kinds)[:1], fast=1)
def test_killed_and_resumed(program, case):
    """Fails if what a killed and resumed run ends with is not the same, bit for bit: an early kill and a late one."""
    strike_and_go_on(program, program.kinds[case], 2)


@slow
@each(lambda script: script.kinds)
def test_killed_around_every_write(program, case):
    """Fails if there is a moment in or between writes at which a kill costs more than the work since the last
    checkpoint, for any kind of environment or state."""
    thoroughly = case == list(program.kinds)[0] and (program is FIRST or program.has_own("write_state"))
    strike_and_go_on(program, program.kinds[case], None if thoroughly else 8)


@once
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


@slow
@twice
def test_disk_full_or_read_only_from_some_moment_on(program):
    """Fails if a full or read-only disk leads to a traceback, to words that do not say what could not be written, or to
    a run folder that cannot be gone on with once there is space."""
    full = lambda moment: OSError(number := (errno.ENOSPC, errno.EROFS)[moment % 2], os.strerror(number))
    strikes = lambda moment: Strike(moment, full(moment), lasts=True)
    early, late = strike_and_go_on(program, list(program.kinds.values())[0], 12, strikes)
    for error in early + late:
        assert isinstance(error, program.module.UserError) and "cannot" in str(error), error
        assert "No space left" in str(error) or "Read-only" in str(error)


@slow
@once
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


@slow
@each(lambda script: list(script.kills)[: 2 if script is FIRST else 1])
def test_killed_at_random_moments(program, case):
    """Fails if a checkpoint lacks anything that the rest of the run depends on, or is ever found half written, in
    processes that know nothing of each other. tests/kills.py kills more often, and in all configurations."""
    shutil.copy(program.module.__file__, ".")
    flags = words("--no-progress", program.kills[case])
    steps = flags.index("--checkpoint-every") + 1
    flags += ["--total-timesteps", str(8 * int(flags[steps]))]
    shell(Path(), program.name, *flags, "--run-dir", "unbroken")
    number = 3 if program is FIRST else 2
    assert kills.kill_and_resume(Path(), program.name, "killed", flags, number, Path("unbroken"))[0] == number
    assert not run_difference(Path("unbroken"), Path("killed"))


@slow
@once
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
    for path in [path for path in run.iterdir() if path.is_file()]:
        path.with_name(f"{path.name}.tmp").write_bytes(b"half of some")


MISFITS = """
--run-dir run -> holds a run | --config run/config.json --run-dir run -> holds a run
--evaluate run --env-id Acrobot-v1 -> CartPole-v1 | --resume run --seed 9 -> seed
--evaluate run --model 12345 -> 12345.pt | --resume run --env-id Acrobot-v1 -> env_id
--resume run --learning-rate 0.5 -> learning_rate"""
LEFT = {
    "a finished run": lambda run: None,
    "a run that wrote no checkpoint": lambda run: next(run.glob("checkpoint*")).unlink(),
    "half files": lambda run: (half_files(run), next(run.glob("checkpoint*")).unlink()),
    "a table without rows": lambda run: (run / "metrics.csv").write_text(""),
    "a table of garbage": lambda run: (run / "metrics.csv").write_bytes(b"\x80garbage\n,,\n" * 9999),
    "no table": lambda run: (run / "metrics.csv").unlink(),
    "no curve and no best model": lambda run: (
        (run / "summary.json").unlink(),
        next(run.glob("models/best*")).unlink(),
        (run / "learning_curve.png").unlink(),
    ),
}


@slow
@twice
@pytest.mark.parametrize("left", LEFT)
def test_resume_restores_a_run(left, program, copied, finished, capsys):
    """Fails if a finished run is trained on, or does not say what came of it; if a run that was killed before its first
    checkpoint does not begin anew; or if a left-over or damaged file hurts."""
    LEFT[left](copied)
    assert program.main("--resume run --no-progress") == 0
    assert not run_difference(finished, copied)
    assert capsys.readouterr().out.splitlines()[-2].startswith("evaluation")


@slow
@once
def test_stop_at_return_stops_early(program):
    """Fails if the run goes on, stops before the mean of 100 training episodes has reached the value, or goes on when
    it is resumed."""
    flags = "--stop-at-return 22 --total-timesteps 100000 --eval-every 1000000 --run-dir run"
    program.train(program.home, program.fast, flags)
    *earlier, last = rows()
    reached = lambda row: row["return_mean"] >= 22 and row["episodes"] >= 100
    assert reached(last) and not any(map(reached, earlier)) and last["step"] < 60_000
    assert last["return_mean"] == pytest.approx(np.mean(episode_returns(program)[-100:]), rel=1e-6)
    assert summary()["global_step"] == last["step"]
    shutil.copytree("run", "before")
    program.train("--resume run")
    assert not run_difference(Path("before"), Path("run"))


@slow
def test_what_decides_to_stop(program, monkeypatch):
    """Fails if training episodes decide although they explore, or evaluations although they do not; or if a run that
    has stopped goes on when it is resumed. Here every training episode returns 5, and evaluations 4, 4, 5."""
    evaluations = []

    def evaluate(*_, **__):
        evaluations.append(5.0 if len(evaluations) >= 2 else 4.0)
        return evaluations[-1], 0.0

    monkeypatch.setattr(program.module, "evaluate", evaluate)
    flags = "--max-episode-steps 5 --stop-at-return 5 --eval-every 400 --total-timesteps 20000 --run-dir run"
    final = program.train(program.one, program.world("Endless"), flags)
    assert set(episode_returns(program)) == {5}
    if program.explores:
        assert evaluations == [4, 4, 5] and final["global_step"] >= 1200
    else:
        assert evaluations == [4, 4] and 100 <= len(episode_returns(program)) < 110
    before = table(Path("run/metrics.csv"))
    again = program.train("--resume run --env-id", program.env_id("Endless"))
    assert again["global_step"] == final["global_step"] and table(Path("run/metrics.csv")) == before


@slow
def test_resume_with_more_steps_goes_on_and_can_be_killed(program, copied):
    """Fails if a finished run cannot be prolonged, begins anew, or forgets when it is killed that it was prolonged."""
    before = table(Path("run/metrics.csv"))
    assert isinstance(struck(Strike(20), program, "--resume run --total-timesteps 2000"), Killed)
    assert config()["args"]["total_timesteps"] == 2000
    program.train("--resume run")
    after = table(Path("run/metrics.csv"))
    assert after[: len(before)] == before and 2000 <= rows()[-1]["step"] < 2000 + program.stride
    assert summary()["global_step"] == rows()[-1]["step"]


@slow
@once
def test_resumed_with_fewer_steps_or_other_evaluations(program):
    """Fails if a run that was killed before its first evaluation, and is resumed when it is over, ends badly; or if the
    models of evaluations stay that do not belong to the run that is resumed."""
    short = f"{program.home} {program.fast} --run-dir run"
    flags = f"{short} --total-timesteps 2000 --checkpoint-every 128 --eval-every 1000000"
    strike_until(lambda: Path("run/checkpoint.pt").exists(), program, flags)
    assert program.train("--resume run --total-timesteps 10")["global_step"] > 10
    assert len(rows("run/evaluations.csv")) == 1

    flags = f"{short} --total-timesteps 500 --eval-every 128"
    strike_until(lambda: Path("run/models/best.pt").exists(), program, flags)
    program.train("--resume run --eval-every 1000000")
    (evaluation,) = rows("run/evaluations.csv")
    assert sorted(os.listdir("run/models")) == [f"{evaluation['step']:.0f}.pt", "best.pt"]


@slow
@once
def test_config_chooses_intervals_anew(program, finished):
    """Fails if a run begun with --config keeps the intervals that its longer or shorter model had chosen for itself; or
    if one that is prolonged does not keep its own."""
    program.train(f"--config {finished}/config.json --run-dir new --eval-every 0 --total-timesteps 4000")
    assert len(rows("new/evaluations.csv")) == 10 and config("new")["args"]["eval_every"] == 0
    program.train("--config new/config.json --run-dir short --total-timesteps 1280")
    assert len(rows("short/evaluations.csv")) == 10
    program.train("--resume short --total-timesteps 1900")
    assert len(rows("short/evaluations.csv")) == 15  # every 128 steps, which is now a fifteenth


@slow
@has("wrappers")
def test_long_before_the_first_row(program, monkeypatch, curve):
    """Fails if a curve is drawn, which happens every half minute, before there is a row to draw: all takes long."""
    clock = iter(range(0, 10**9, 31))
    pretended = SimpleNamespace(time=lambda: next(clock), strftime=time.strftime, time_ns=time.time_ns)
    monkeypatch.setattr(program.module, "time", pretended)
    program.train(program.home, program.one, "--total-timesteps 600 --eval-every 600 --run-dir run")
    assert Path("run/learning_curve.png").exists()


@slow
@where(lambda script: script.steps_vectors and not script.teams)
def test_environments_that_return_the_same_array_again(program):
    """Fails if what an environment has shown is read only after its next step has written over it."""
    scripts = [f"--run-dir {name} --total-timesteps 600" for name in ("copied", "same")]
    for flags, kwargs in zip(scripts, ({}, {"vector_kwargs": {"copy": False}})):
        kwargs = json.dumps(kwargs, separators=(",", ":"))
        program.train(program.one, program.world("Uneven"), "--env-kwargs", kwargs, flags)
    different = [line for line in run_difference(Path("copied"), Path("same")) if "config.json" not in line]
    assert not different


@slow
@where(lambda script: script.name in ("dqn.py", "rainbow.py"))
def test_a_run_of_a_script_with_fewer_flags(program, copied, complaint):
    """Fails if rainbow.py, which has all flags of dqn.py, takes a run of dqn.py for one of its own."""
    stored = config()
    del stored["args"]["tau"]
    Path("run/config.json").write_text(json.dumps(stored | {"script": "simpler"}))
    assert "simpler" in complaint("--resume run") and "simpler" in complaint("--evaluate run")


@slow
@each(lambda script: lines(script.misfits) + (lines(MISFITS) if script is FIRST else []))
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
--env-kwargs {"gravitas":1} -> gravitas | --env-kwargs {"max_episode_steps":9} -> --max-episode-steps
--env-kwargs {"render_mode":"human","vectorization_mode":"sync"} -> env_kwargs
--device gpu -> gpu | --device cuda:999 -> cuda:999 | --device meta -> meta | --device= -> device
--run-dir taken -> taken | --run-dir taken/deeper -> taken | --run-dir /proc/deeper -> /proc/deeper
--config missing.json -> missing.json | --config taken -> taken | --config . -> config.json
--resume missing -> missing config.json | --resume taken -> taken config.json | --resume . -> config.json
--evaluate missing -> missing config.json
--run-dir LONG -> aaaa | --config LONG -> aaaa | --resume LONG -> aaaa | --evaluate LONG -> aaaa
--run-dir= -> empty | --config= -> empty | --resume= -> empty | --evaluate= -> empty
--resume a --run-dir b -> resume run_dir | --resume a --evaluate b -> resume evaluate
--resume a --config b -> resume config | --evaluate a --config b -> evaluate config
--evaluate a --run-dir b -> evaluate run_dir
--env-id run_envs:Unpicturable-v0 --capture-video -> Unpicturable
--env-id run_envs:Blind-v0 --capture-video -> Blind | --env-id run_envs:Grey-v0 --capture-video -> Grey
--env-id run_envs:Promising-v0 --capture-video -> Promising"""
OUT_OF_RANGE = """
gamma 1.5 -0.1 nan HUGE | learning-rate -1 nan inf | num-envs 0 10000000 HUGE | total-timesteps 0 HUGE | hidden-sizes 0
eval-episodes 0 HUGE | eval-every -5 HUGE | checkpoint-every -5 | stop-at-return nan | max-episode-return nan HUGE
max-episode-steps 0 HUGE | seed -1 1180591620717411303424 HUGE"""
OUT_OF_THE_SCRIPTS_RANGE = "gamma 1.5 -0.1 nan | learning-rate -1 nan"  # what RANGES may say
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


def refused_spaces(script):
    """Spaces of Match that a script cannot handle, as such lines."""
    pairs = [("actions", *line.split()) for line in lines(script.no_actions)]
    pairs += [("observation", *line.split()) for line in lines(script.no_observations)]
    return [f"{script.world('Match', **{kind: name})} -> {word}" for kind, name, word in pairs]


@pytest.fixture
def little_memory():
    """Three GB beyond what this process has: who asks for more gets a MemoryError, and the machine lives on."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 3 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def all_refused(script):
    """All flags that a script refuses in words of its own; of what all share, what may be said in other places."""
    common = OUT_OF_RANGE if script is FIRST else OUT_OF_THE_SCRIPTS_RANGE
    numbers = out_of_range(script.out_of_range) + out_of_range(common)
    numbers = [line for line in numbers if script.has(line.split()[0][2:].replace("-", "_"))]
    shared = lines(REFUSED) if script is FIRST or script.has_own("make_vector_envs") and not script.teams else []
    shared = [line for line in shared if script.has("device") or not line.startswith("--device")]
    return lines(script.refused) + refused_spaces(script) + numbers + shared


@each(all_refused, fast=3)
def test_bad_flags(program, case, complaint, little_memory):
    """Fails if the complaint is longer than two lines, names nothing, comes with another exit code, or leaves files; or
    if a misspelt name is answered with the advice to install what does not exist."""
    Path("taken").write_text("a file, not a folder")
    flags, expected = expand(case)
    err = complaint(flags)
    assert says(err, expected) and "pip install" not in err, err


@slow
@own("make_envs", "make_vector_envs", "MiniGridView")
@pytest.mark.parametrize("wrapper", ["RGBImgPartialObsWrapper", "OneHotPartialObsWrapper"])
def test_minigrid_in_other_words(wrapper, program, capsys):
    """Fails if pictures, or what is one-hot already, are read as numbers of objects, colours and states."""
    flags = f"--env-id MiniGrid-Empty-5x5-v0 --wrappers minigrid.wrappers.{wrapper} --total-timesteps 100"
    if program.minigrid:
        assert program.main(program.one, program.minigrid, flags) == 2
        assert "image" in capsys.readouterr().err


@slow
@once
@pytest.mark.parametrize("case", lines(TYROS))
def test_flags_that_are_none(case, program, complaint):
    """Fails if a flag that does not exist, or a value of the wrong type, is taken or not named (in tyro's words)."""
    flags, expected = expand(case)
    assert says(complaint(flags, plain=False), expected)


@slow
@once
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


def missing(script):
    """Flags -> the package that they need, and what to install."""
    if script is FIRST or script.has_own("make_vector_envs") and not script.teams:
        yield "--env-id HalfCheetah-v5 -> mujoco gymnasium[mujoco]"
        yield "--env-id ALE/Pong-v5 -> ale_py ale-py"
        yield "--env-id MiniGrid-Empty-5x5-v0 -> minigrid minigrid"
    if script is FIRST or script.has_own("check_film"):
        yield "--capture-video -> moviepy moviepy"


@slow
@each(missing)
def test_missing_package(program, case, complaint, monkeypatch):
    """Fails if the message about a missing package does not say how to install it, or comes after work was done."""
    flags, names = case.split(" -> ")
    package, install = names.split()
    for name in [name for name in sys.modules if name.startswith((f"{package}.", "gymnasium.envs.mujoco."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # its import now fails
    assert says(complaint(program.home, program.fast, flags), f"pip install {install}")


@slow
@pytest.mark.parametrize("where", ["Init", "Reset", "Step", "Render"])
def test_what_an_environment_raises_keeps_its_traceback(where, program):
    """Fails if an error of the environment's own (here: an OSError) passes for something else, such as a full disk."""
    film = "--capture-video" if where == "Render" else ""
    with pytest.raises(OSError, match=f"from within {where.lower()}"):
        program.main(program.one, program.world(f"Raises{where}"), "--run-dir run --no-progress", film)


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


@slow
@once
@pytest.mark.parametrize("number", range(len(NO_CONFIG)))
def test_no_config(number, program, copied, complaint):
    """Fails if a file that is no config, or nested or long beyond reason, is taken or ends in a traceback."""
    Path("run/config.json").write_bytes(NO_CONFIG[number].encode(errors="surrogateescape"))
    assert all("config.json" in complaint(flags) for flags in CONFIGS)
    assert len(complaint("--config run/checkpoint.pt")) < 500  # nor is such a file printed


@slow
@once
@pytest.mark.parametrize("case", lines(MISTYPED))
def test_mistyped_config(case, program, copied, complaint):
    """Fails if a config of another script, or one that holds a wrong type, is taken or the argument is not named."""
    content, expected = expand(case)
    stored = json.dumps(config()["args"])[1:-1]  # of two values of a name the second counts
    Path("run/config.json").write_text(f'{{"args": {{{stored}, {content}}}}}')
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


def damages(script):
    """What to try: everything with ppo.py, then what a script's own agent and parts complain of.

    Files that are not torch's have their tests beside those of their script.
    """
    if script is FIRST:
        return [*DAMAGES, *ONLY_CHECKPOINTS]
    return ["a weight missing", "another shape", "weights alone"] if script.module.STATE == ".pt" else []


@slow
@each(damages)
def test_damaged_weights(program, case, copied, complaint):
    """Fails if a damaged or foreign file of weights is taken, runs code, or ends in a traceback; a model copied over
    the checkpoint is one, too."""
    (DAMAGES | ONLY_CHECKPOINTS)[case](copied / "checkpoint.pt")
    assert case == "missing" or "run" in complaint("--resume run")
    if case in DAMAGES:
        DAMAGES[case](copied / "models/best.pt")
        assert "checkpoint.pt" in complaint("--evaluate run --model last")
        assert "best.pt" in complaint("--evaluate run")
    assert not Path("executed").exists()


@slow
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
class TeamWrap:
    def __new__(cls, env): return env
gymnasium.register("Payload-v0", run_envs.Endless)
def parallel_env(**kwargs): return __import__("run_envs_teams").Endless()
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


ASKING_TEAMS = [
    {"env_id": "payload"},
    {"env_id": "payload:parallel_env"},
    {"env_id": "run.payload.parallel_env"},
    {"wrappers": ["payload.TeamWrap"]},
    {"wrappers": ["run.payload.TeamWrap"]},
    {"wrappers": ["run_envs.mark"]},
    {"wrappers": ["pettingzoo.utils.wrappers.mark"]},
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
    with contextlib.suppress(ImportError):
        monkeypatch.setattr(importlib.import_module("pettingzoo.utils.wrappers"), "mark", run_envs.mark, raising=False)
    for name in ("payload", "run.payload", "run"):
        sys.modules.pop(name, None)
    gym.registry.pop("Payload-v0", None)


def requests(script):
    """What to ask for in JSON, by which this script may be made to execute the payload."""
    if script is FIRST or script.has_own("untrusted"):
        yield from map(json.dumps, ASKING_TEAMS if script.teams else ASKING)


@slow
@each(requests)
def test_config_of_a_stranger_executes_nothing(program, case, payload, complaint):
    """Fails if what a config.json asks for is executed, if the message does not say which flag would allow it, or (to
    show that this test can fail) if nothing is executed where the same is given on the command line."""
    stored, asked = config(), json.loads(case)
    stored["args"] |= asked
    Path("run/config.json").write_text(json.dumps(stored))
    for flags in CONFIGS:
        assert says(complaint(flags), f"--{list(asked)[-1]}")
    with pytest.raises(program.module.UserError, match="trust"):
        program.module.load("run")
    assert not Path("executed").exists()
    again = [f"--{name} {value[0] if isinstance(value, list) else value}" for name, value in asked.items()]
    assert program.main(program.always, program.one, CONFIGS[0], "--no-progress", *again) == 0
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


@slow
@once
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


@slow
@once
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


@slow
@own("make_envs", "untrusted")
def test_code_of_ones_own_is_given_again(program, complaint):
    """Fails if a run with an environment and a wrapper of the user's own cannot be played, resumed or begun again, or
    if the message of what is missing does not lead on."""
    env_id, wrapper, module = program.env_id("Match"), program.own("Own"), program.module
    own = f"--env-id {env_id} --wrappers {wrapper}"
    program.train(program.always, program.one, own, "--total-timesteps 10 --run-dir run")
    for flags in CONFIGS:
        assert f"--env-id {env_id}" in complaint(flags)
        assert f"--wrappers {wrapper}" in complaint(flags, f"--env-id {env_id}")
        assert program.main(flags, own, "--no-progress") == 0
    with pytest.raises(module.UserError, match=env_id):
        module.load("run")
    agent = module.load("run", env_id=env_id, wrappers=(wrapper,))
    assert module.evaluate(agent, agent.args, 2)[0] > 1  # the wrapper pays 1 + 1/2 + …


# -------------------------------------------------------------------------------------------------------------- NaNs


def not_finite(script):
    """What the environment returns, and as what."""
    return [f"{value} {field}" for value in ("nan", "inf", "-inf") for field in ("observation", "reward")][
        : None if script is FIRST else 2
    ]


@slow
@each(not_finite)
def test_nan_from_the_environment_ends_the_run(program, case, capsys):
    """Fails if a NaN is learnt from, if the message names another step or field, or if it reaches a checkpoint."""
    value, field = case.split()
    faulty, ending = program.world("Faulty", field=field, at=75, value=value), program.module.STATE
    program.train(program.one, faulty, "--total-timesteps 40 --run-dir run")
    step, again = checkpoint(program)["run"]["step"], f"--no-progress --env-id {program.env_id('Faulty')}"
    capsys.readouterr()
    assert program.main("--resume run --total-timesteps 1000", again) == 2
    err = capsys.readouterr().err
    at = f"step {step + 75}: " if program.names_the_step else "step "  # the environments are new since that step
    assert is_plain(err) and f"{program.env_id('Faulty')}, {at}" in err and field in err, err
    assert not any(word in err for word in {"observation", "reward", "loss"} - {field})
    assert checkpoint(program)["run"]["step"] == step
    assert is_finite(program.module.read_state(Path(f"run/checkpoint{ending}"))["agent"])
    for model in ("last", "best"):
        assert program.main(f"--evaluate run --model {model}", again) == 0
        assert "10.00 ± 0.00" in capsys.readouterr().out
    assert program.main("--resume run --total-timesteps", step + 40, again) == 0  # sound for another 74 steps


@slow
def test_nan_at_once(program, capsys):
    """Fails if the first reset is not checked."""
    assert program.main(program.one, program.world("Faulty", field="first_observation", at=1), "--no-progress") == 2
    assert "step 0: observation" in capsys.readouterr().err


@slow
@has("num_envs")
def test_nan_in_one_of_many_environments(program, capsys):
    """Fails if the step named is that of the rollout's end or counts rows."""
    faulty = program.world("Faulty", field="reward", at=75)
    assert program.main(program.fast, faulty, "--checkpoint-every 999 --no-progress") == 2
    assert "step 300: reward" in capsys.readouterr().err


@slow
@where(lambda script: script is FIRST or script.has("clip_reward"))
def test_message_stands_on_a_line_of_its_own(program, capfd):
    """Fails if the message stands amid the progress bar, or if an infinite reward passes unseen where only signs are
    learnt from."""
    clip = "--clip-reward" if program.has("clip_reward") else ""
    assert program.main(program.one, program.world("Faulty", field="reward", at=50, value="inf"), clip) == 2
    err = capfd.readouterr().err
    (line,) = [line for line in re.split("[\r\n]", err) if line.startswith(program.name)]
    assert line.endswith("step 50: reward is NaN or infinite") and "Traceback" not in err


@slow
@where(lambda script: script.diverges)
def test_loss_that_is_not_finite_ends_the_run(program, capsys):
    """Fails if weights that have become NaN are saved or trained on."""
    flags = f"{program.diverges} --total-timesteps 5000 --no-progress --run-dir run"
    assert program.main(program.home, program.one, flags) == 2
    err = capsys.readouterr().err
    assert is_plain(err) and says(err, f"{program.home.split()[1]} step loss"), err
    assert not list(Path("run").glob("checkpoint*")) and not os.listdir("run/models")


# --------------------------------------------------------------------------------------------------- limits, options


@slow
@pytest.mark.parametrize("name", ["Endless", "Uneven"])
@pytest.mark.parametrize(("limit", "most"), [("--max-episode-steps 7", 7), ("--max-episode-return 7.5", 8)])
def test_limits_truncate(name, limit, most, program, monkeypatch):
    """Fails if a limit is ignored, reached late, carried over to the next episode, or taken for a termination (which
    would cut the value off)."""
    ends, make = [], program.module.make_envs

    def watched(*given):
        envs = make(*given)
        step = envs.step
        envs.step = lambda actions: (result := step(actions), ends.append(np.array(result[2:4])))[0]
        return envs

    monkeypatch.setattr(program.module, "make_envs", watched)
    flags = f"{limit} --total-timesteps 600 --eval-episodes 3 --run-dir run"
    final = program.train(program.fast, program.world(name), flags)
    returns = episode_returns(program)
    assert len(returns) > 50 and max(returns) == most and final["eval_return_mean"] <= most
    if name == "Endless":
        assert set(returns) == {most} and final["eval_return_std"] == 0
    if program.steps_vectors:
        terminated = np.concatenate([end[0] for end in ends])
        truncated = np.concatenate([end[1] for end in ends])
        assert truncated.sum() >= returns.count(most) > 0
        assert terminated.any() == (name == "Uneven")


@slow
@has("target_kl", "update_epochs")
def test_target_kl_ends_updates_early(program, monkeypatch):
    """Fails if --target-kl does nothing, or is not asked after each epoch."""
    steps, step = [], program.module.Adam.step
    monkeypatch.setattr(program.module.Adam, "step", lambda *args: steps.append(1) or step(*args))
    counts = []
    for target in ("", "--target-kl 1000000", "--target-kl 1e-7"):
        flags = "--learning-rate 0.03 --no-anneal-lr --update-epochs 4 --total-timesteps 600"
        program.train(program.home, program.fast, flags, target, f"--run-dir run{len(counts)}")
        counts.append(len(steps) / len(rows(f"run{len(counts)}/metrics.csv")))
        steps.clear()
    assert counts[0] == counts[1] == 4 * counts[2] >= 16  # one epoch instead of four, of some minibatches each


def film(path):
    """(seconds, frames' shape, whether two frames differ) of an mp4."""
    from moviepy import VideoFileClip

    with contextlib.closing(VideoFileClip(str(path))) as clip:
        first, last = clip.get_frame(0), clip.get_frame(clip.duration - 1e-3)
        return clip.duration, first.shape, bool((first != last).any())


@slow
@own("make_envs", "check_film", "write_video")
def test_capture_video(program):
    """Fails if no film is made of an evaluation or of --evaluate, if it cannot be played, or if --evaluate films
    because the run did."""
    flags = "--total-timesteps 200 --eval-every 100 --eval-episodes 1 --max-episode-steps 20 --run-dir run"
    program.train(program.home, program.fast, flags, "--capture-video")
    films = [f"{row['step']:.0f}.mp4" for row in rows("run/evaluations.csv")]
    assert sorted(os.listdir("run/videos")) == sorted(films) and len(films) >= 2
    assert program.main("--evaluate run") == 0 and len(os.listdir("run/videos")) == len(films)
    assert program.main("--evaluate run --capture-video") == 0
    for name in ("best.mp4", films[0]):
        seconds, shape, moves = film(Path("run/videos", name))
        assert 0 < seconds < 10 and min(shape[:2]) >= 200 and (moves or seconds < 0.3)


# -------------------------------------------------------------------------------------------------- it learns at all


def learnt(program, flags, **kwargs):
    """Whether Match with these arguments is learnt: at random it pays less than 0.6, at best 1."""
    env, total = gym.make("run_envs:Match-v0", **{"actions": program.actions_are} | kwargs), 0
    env.action_space.seed(0)
    for episode in range(50):
        env.reset(seed=episode)
        total += sum(env.step(env.action_space.sample())[1] for _ in range(4))
    assert total / 50 < 0.6
    world = program.world("Match", **kwargs)
    return program.train(program.learn, world, flags, "--run-dir run")["eval_return_mean"] > 0.95


@slow
@each(lambda script: script.actions)
def test_every_action_space_learns(program, case, threads):
    """Fails if an action arrives unclipped, unshifted, not as an integer or out of order, if its log-probability is
    another's, or if vectors are learnt on more than one thread."""
    assert learnt(program, "", actions=case) and set(threads) == ({1} if program.has("device") else set())


@slow
@each(lambda script: script.observations)
def test_every_observation_kind_learns(program, case):
    """Fails if a part of the observation does not reach the network, or channels are taken for rows."""
    image = "channels" in case
    assert learnt(program, program.learn_images if image else "", observation=case)
    agent = program.module.load("run", env_id=program.env_id("Match"))
    assert program.module.evaluate(agent, agent.args, 20)[0] > 0.95
    assert getattr(agent, "image", False) == image


@pytest.fixture(scope="module")
def plain_table(program, tmp_path_factory):
    """The table of a short run without any option."""
    run = tmp_path_factory.mktemp("plain") / "run"
    program.train(program.home, program.fast, "--total-timesteps 200 --run-dir", run)
    return table(run / "metrics.csv")


@slow
@each(lambda script: script.options)
def test_every_option_has_an_effect(program, case, plain_table):
    """Fails if an option is taken and forgotten."""
    program.train(program.home, program.fast, "--total-timesteps 200 --run-dir run", case)
    assert table(Path("run/metrics.csv")) != plain_table


@slow
@each(lambda script: script.options if script.options_learn else [])
def test_every_option_learns(program, case):
    """Fails if an option keeps CartPole from being learnt (random play: 22)."""
    flags = "--env-id CartPole-v1 --total-timesteps 40000 --eval-every 1000000 --run-dir run"
    assert program.train(flags, case)["eval_return_mean"] > 120


@slow
@where(lambda script: script.has("clip_reward") and not script.has_own("compute_gae"))
def test_clipped_rewards(program, monkeypatch):
    """Fails if something else than signs is learnt from, or if reported returns are sums of signs (4, not 1)."""
    seen, compute = [], program.module.compute_gae
    watched = lambda rewards, *rest: seen.append(rewards.numpy().copy()) or compute(rewards, *rest)
    monkeypatch.setattr(program.module, "compute_gae", watched)
    assert learnt(program, "--clip-reward")
    assert set(np.unique(seen)) == {0, 1} and max(episode_returns(program)) == 1


@slow
@once
def test_compiled_it_learns(program):
    """Fails if the compiled loss has another gradient, or compilation breaks on an option."""
    assert learnt(program, "--compile --clip-vloss")


@slow
@where(lambda script: script.minigrid)
def test_minigrid_just_works(program):
    """Fails if an observation that holds text keeps plain `--env-id MiniGrid-…` from working."""
    pytest.importorskip("minigrid")
    flags = "--env-id MiniGrid-Empty-5x5-v0 --total-timesteps 200 --no-progress --run-dir run"
    assert program.main(flags, program.minigrid) == 0
    agent = program.module.load("run")
    envs = program.module.make_envs(agent.args, 2)
    obs, _ = envs.reset(seed=0)
    assert envs.step(agent.act(obs))[1].shape == (2,) and np.size(obs) >= 2 * 7 * 7 * 21
    envs.close()


@slow
@has("num_steps", "num_minibatches")
@pytest.mark.parametrize("flags", ["--num-steps 1 --num-minibatches 1", "--num-steps 8 --num-minibatches 8"])
def test_one_environment_few_steps(program, flags):
    """Fails if a rollout or minibatch of nothing but reset rows is learnt from, or turns statistics into NaN."""
    flags += " --num-envs 1 --total-timesteps 40 --eval-every 100 --run-dir run"
    if program.has("norm_adv"):
        flags += " --no-norm-adv"  # minibatches of one row have nothing to normalise by, and are refused
    options = [f"--{name.replace('_', '-')}" for name in ("normalize_obs", "normalize_reward") if program.has(name)]
    for normalize in ("", " ".join(options)):
        final = program.train(program.learn, program.world("Match"), flags, normalize)
        assert final["global_step"] >= 40 and len(episode_returns(program)) >= 10
        assert is_finite(checkpoint(program)["agent"])
        assert not np.isnan(list(rows()[-1].values())).any()
        shutil.rmtree("run")


def on_a_gpu(script):
    """Kinds of observation that a script with --device learns."""
    if script.has("device"):
        yield from ["vector", "channels_last"] if script.learn_images else ["vector"]


@slow
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each(on_a_gpu)
def test_weights_of_a_gpu_load_on_a_cpu(program, case, tmp_path):
    """Fails if a file saved on a GPU needs one to be loaded, or if --device cuda does not learn."""
    image = case != "vector"
    assert learnt(program, f"{program.learn_images if image else ''} --device cuda", observation=case)
    agent = program.module.load("run", env_id=program.env_id("Match"))
    assert str(agent.device) == ("cuda" if image else "cpu")  # auto
    shutil.copy(program.module.__file__, tmp_path)
    own = ("--env-id", program.env_id("Match"))
    for model in ("best", "last"):  # a process that sees no GPU
        out, _ = shell(tmp_path, program.name, *own, "--evaluate", "run", "--model", model)
        assert float(out.split(": ")[1].split()[0]) > 0.9
    shell(tmp_path, program.name, *own, "--resume", "run", "--device", "cpu", "--total-timesteps", 5500)
