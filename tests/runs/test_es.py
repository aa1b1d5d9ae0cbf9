"""Whole runs of es.py: what only a population has. Several processes, generations, statistics, ARS.

What all scripts have in common is tested in test_runs.py.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import run_envs  # noqa: F401  (registers its environments)
from kills import run_difference, saved, surroundings, table
from script_table import ES, words

import es

slow = pytest.mark.slow
QUICK = "--population-size 10 --hidden-sizes 4 --eval-episodes 2 --no-progress --num-generations 6"
ONE_OF_TWO = """
import os
import gymnasium as gym
import run_envs

class Second(run_envs.Faulty):
    def __init__(self, field="reward", at=25):
        super().__init__(field, at if os.environ.get("RANK") == "1" else 10**9)

class Broken(run_envs.Endless):
    def step(self, action):
        if os.environ.get("RANK") == "1":
            raise OSError("from within step")
        return super().step(action)

for env in (Second, Broken):
    gym.register(f"{env.__name__}-v0", env, disable_env_checker=True)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Every test works in an empty folder, without a window; the picture of the curve is an empty file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(es.Run, "draw_curve", lambda run: (run.dir / "learning_curve.png").touch())


def together(*flags, processes=2, code=0):
    """`torchrun es.py flags…`, alone in its folder; (what it printed, the lines of es.py's on stderr)."""
    shutil.copy(es.__file__, ".")
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, "es.py", *words(*flags)]
    variables = surroundings()
    variables["PYTHONPATH"] += ":."
    done = subprocess.run([sys.executable, *map(str, line)], env=variables, capture_output=True, text=True, timeout=300)
    assert bool(done.returncode) == bool(code), done.stderr
    own = [line for line in done.stderr.splitlines() if line.startswith("es.py: ")]
    if code:  # torchrun reports, in words of its own, which exit code it has met first
        assert re.search(rf"exitcode +: {code}", done.stderr), done.stderr
    return done.stdout, own


# ------------------------------------------------------------------------------------------------------ the run folder


def test_columns(monkeypatch):
    """Fails if a figure of metrics.csv is not what docs/es.md says."""
    ES.train("--env-id CartPole-v1 --max-episode-steps 50", QUICK, "--total-timesteps 100000 --run-dir run")
    header, *rows = table(Path("run/metrics.csv"))
    assert header == ["step", "return_mean", "episodes", *es.FIGURES]
    rows = [dict(zip(header, map(float, row))) for row in rows]
    returns = [total for _, total in saved(Path("run/checkpoint.pt"), es)["run"]["episodes"]]
    assert [row["generation"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for number, row in enumerate(rows):
        generation = returns[10 * number : 10 * number + 10]
        assert row["episodes"] == 10 * number + 10
        assert row["population_mean"] == pytest.approx(sum(generation) / 10)
        assert row["return_max"] == max(generation)
    assert rows[-1]["step"] == sum(returns)  # CartPole: a step pays 1
    assert sorted(saved(Path("run/checkpoint.pt"), es)["agent"]) == ["theta"]


def test_settings_of_the_method():
    """Fails if --ars does not bring its settings along, if what is tuned for another method applies, if an environment
    that was tuned with ARS is not learnt with it, or if what is given does not win."""
    plain, tuned = vars(es.Args()), lambda **given: vars(es.tuned(**given))
    for env_id, settings in es.TUNED.items():
        assert {name: tuned(env_id=env_id)[name] for name in settings} == settings
    assert tuned(env_id="CartPole-v1", ars=True) == plain | es.ARS
    assert tuned(ars=True, sigma=0.5, hidden_sizes=(8,)) == plain | es.ARS | {"sigma": 0.5, "hidden_sizes": (8,)}
    assert tuned(env_id="Swimmer-v5")["ars"] and not tuned(env_id="Swimmer-v5", ars=False)["ars"]


def test_statistics_come_back():
    """Fails if the sums of observations are not saved with the weights: the loaded policy would play differently."""
    flags = "--env-id Pendulum-v1 --max-episode-steps 30 --normalize-obs --ars --hidden-sizes --total-timesteps 500"
    final = ES.train("--population-size 4 --eval-episodes 4 --run-dir run", flags)
    last = es.load("run", "last")
    play = lambda: es.evaluate(last, last.args, 4, 1 + es.EVALUATION)[0]
    assert play() == final["eval_return_mean"]
    last.obs_stats.sums[1] += 500
    assert play() != final["eval_return_mean"]  # they do matter


def test_more_generations(monkeypatch):
    """Fails if a run that --num-generations has ended cannot be prolonged, or then differs from one that was that long
    from the start."""
    home = "--env-id CartPole-v1 --total-timesteps 100000"
    ES.train(home, QUICK, "--run-dir long")
    ES.train(home, QUICK, "--num-generations 3 --run-dir run")
    assert len(table(Path("run/metrics.csv"))) == 1 + 3
    ES.train("--resume run --num-generations 6")
    assert table(Path("run/metrics.csv")) == table(Path("long/metrics.csv"))
    states = [saved(Path(run, "checkpoint.pt"), es) for run in ("run", "long")]
    assert (states[0]["agent"]["theta"] == states[1]["agent"]["theta"]).all()


def test_checkpoints_drop_nothing():
    """Fails if what a run learns depends on how often it writes a checkpoint."""
    for every in (20, 10**6):
        flags = f"--env-id CartPole-v1 --total-timesteps 100000 --checkpoint-every {every} --run-dir every{every}"
        ES.train(QUICK, flags)
    assert table(Path("every20/metrics.csv")) == table(Path("every1000000/metrics.csv"))


@pytest.mark.parametrize(
    "flags",
    [
        "--learning-rate 1e15 --weight-decay 1e15 --optimizer ascent --fitness raw",
        "--learning-rate 1e15 --weight-decay 1e15 --optimizer ascent --ars",
    ],
)
def test_weights_that_are_not_finite_end_the_run(flags, capfd):
    """Fails if weights that have become NaN or infinite are saved or trained on, or end in a traceback."""
    assert ES.main("--env-id CartPole-v1 --no-progress --run-dir run", flags) == 2
    err = capfd.readouterr().err
    assert err.startswith("es.py: CartPole-v1, step ") and "_norm is NaN or infinite" in err and err.count("\n") == 1
    assert not Path("run/checkpoint.pt").exists() and not list(Path("run/models").iterdir())


def test_a_nan_names_its_step(capfd):
    """Fails if the steps of one candidate are counted alone, or those of the generation up to its end."""
    flags = '--population-size 2 --env-id run_envs:Faulty-v0 --env-kwargs {"field":"reward","at":25} --no-progress'
    assert ES.main(flags) == 2
    assert "step 50: reward" in capfd.readouterr().err  # two candidates side by side, both in their 25th step


# ---------------------------------------------------------------------------------------------------- several processes

SPREAD = {
    "CartPole": "--env-id CartPole-v1 --max-episode-steps 60",  # 5 pairs: 2, 2 and 1
    "Pendulum, normalised, drawn": "--env-id Pendulum-v1 --max-episode-steps 30 --normalize-obs --action-noise 0.3",
    "stopped": "--env-id run_envs:Endless-v0 --max-episode-steps 10 --eval-every 150 --stop-at-return 10",
}


@slow
@pytest.mark.parametrize("name", SPREAD)
def test_three_processes_give_the_numbers_of_one(name):
    """Fails if anything depends on the number of processes, bit for bit, or if another process than the first writes
    or prints; also where an evaluation, which only the first one makes, ends the run, and where fewer go on."""
    flags = f"{SPREAD[name]} {QUICK} --total-timesteps 100000 --checkpoint-every 100"
    out, complaints = together(flags, "--run-dir run", processes=3)
    assert len(out.splitlines()) == 3 and not complaints
    ES.train(flags, "--run-dir one")
    assert not run_difference(Path("one"), Path("run"))
    assert len(table(Path("one/metrics.csv"))) == 1 + (2 if name == "stopped" else 6)
    if name == "CartPole":
        together("--resume run --num-generations 9 --no-progress")
        ES.train("--resume one --num-generations 9")
        assert not run_difference(Path("one"), Path("run"))
        assert len(table(Path("one/metrics.csv"))) == 1 + 9


@slow
@pytest.mark.parametrize(
    ("flags", "code", "expected"),
    [
        (f"{QUICK} --run-dir file/run", 2, ["cannot make file/run"]),  # which the first process finds out
        (f"{QUICK} --population-size 2", 2, ["population_size 2 does not divide into pairs, at least one for each"]),
        (f"{QUICK} --env-id one_of_two:Second-v0 --population-size 4", 2, ["Second-v0, step 90: reward is NaN"]),
        (f"{QUICK} --env-id one_of_two:Broken-v0", "[12]", ["Traceback"]),  # it keeps its traceback
        ("--evaluate run", 2, ["--evaluate takes one process"]),
    ],
    ids=["folder", "population", "NaN", "error of the environment", "evaluate"],
)
def test_one_line_in_all(flags, code, expected):
    """Fails if processes wait for each other for ever after one has failed, or if each of them complains."""
    Path("file").touch()
    Path("one_of_two.py").write_text(ONE_OF_TWO)
    if "evaluate" in flags:
        ES.train("--env-id CartPole-v1 --total-timesteps 10", QUICK, "--run-dir run")
    _, complaints = together(flags, code=code)
    assert len(complaints) == 1 and expected[0] in complaints[0], complaints
