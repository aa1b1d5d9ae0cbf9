"""Whole runs of ppo_rnd.py: what only this script has to bring through a run folder. The rest is in test_runs.py."""

import csv
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import ppo_rnd as script

FEW = ["--num-envs", "2", "--num-steps", "16", "--num-minibatches", "2", "--update-epochs", "2", "--eval-episodes", "1"]
FEW += ["--random-steps", "10", "--eval-every", "100", "--checkpoint-every", "64", "--no-progress"]
PICTURES = ["--wrappers", "minigrid.wrappers.RGBImgPartialObsWrapper", "minigrid.wrappers.ImgObsWrapper"]
KINDS = {
    "rooms": ["--env-id", "MiniGrid-MultiRoom-N2-S4-v0", "--max-episode-steps", "20"],
    "images": ["--env-id", "MiniGrid-Empty-5x5-v0", "--max-episode-steps", "20", *PICTURES],
    "LunarLander": ["--env-id", "LunarLander-v3", "--max-episode-steps", "30", "--normalize-obs", "--normalize-reward"],
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def same(one, other):
    """Whether two nests of dicts and tensors are equal, bit for bit."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("kind", ["rooms", "LunarLander", pytest.param("images", marks=pytest.mark.slow)])
def test_resume(kind):
    """Killed after the second of its checkpoints, a run goes on to the same weights, statistics and figures. Fails if
    predictor, target, optimiser, a statistic or a running sum is not saved, or if random play is counted twice.
    """
    flags = [*KINDS[kind], *FEW, "--total-timesteps", "250"]
    script.train(script.tuned(*flags, "--run-dir", "whole"))
    write, written = script.Run.write_checkpoint, []

    def write_and_die(run):
        write(run)
        written.append(run.step)
        if len(written) == 2:
            raise KeyboardInterrupt

    with mock.patch.object(script.Run, "write_checkpoint", write_and_die), pytest.raises(KeyboardInterrupt):
        script.train(script.tuned(*flags, "--run-dir", "killed"))
    assert 100 < written[-1] < 200
    script.train(script.tuned("--resume", "killed", "--no-progress"))
    states = [torch.load(Path(run, "checkpoint.pt"), weights_only=True) for run in ("whole", "killed")]
    for part in ("agent", "optimizer", "rnd", "predictor_optimizer"):
        assert same(states[0][part], states[1][part]), part
    assert states[0]["rnd"]["sums"].all() and states[0]["rnd"]["obs_stats.count"] > 200
    tables = [list(csv.DictReader(Path(run, "metrics.csv").open())) for run in ("whole", "killed")]
    for one, other in zip(*tables, strict=True):
        assert all(one[name] == other[name] for name in one if name not in ("seconds", "sps"))


def test_the_default_environment():
    """Fails if plain `python ppo_rnd.py` does not run MultiRoom with its settings, or a figure is missing or NaN."""
    args = script.tuned("--total-timesteps", "600", "--run-dir", "run", "--no-progress", "--num-steps", "16")
    assert args.env_id == "MiniGrid-MultiRoom-N4-S5-v1" and args.learning_rate == 1e-3 and args.num_envs == 16
    script.train(args)
    rows = list(csv.DictReader(Path("run/metrics.csv").open()))
    assert all(float(row[name]) == float(row[name]) for row in rows for name in script.FIGURES)
    assert float(rows[-1]["predictor_loss"]) < float(rows[0]["predictor_loss"])
    assert Path("run/learning_curve.png").exists() and "intrinsic_reward" in script.CURVE
    mean, _ = script.evaluate(script.load("run"), args, 1)
    assert mean >= 0


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--intrinsic-gamma 1.5", "intrinsic_gamma"),
        ("--predictor-share 0", "predictor_share"),
        ("--predictor-share 2", "predictor_share"),
        ("--random-steps -1", "random_steps"),
        ("--intrinsic-coef nan", "intrinsic_coef"),
        ("--extrinsic-coef -1", "extrinsic_coef"),
        ("--predictor-learning-rate -1", "predictor_learning_rate"),
        ("--num-envs 3 --num-steps 5 --num-minibatches 4", "do not divide into 4"),
    ],
)
def test_bad_input(flags, words, capsys):
    """Fails if what cannot be is not refused in a line that names it, or if anything has been written by then."""
    command = ["ppo_rnd.py", "--env-id", "CartPole-v1", *flags.split()]
    with mock.patch.object(sys, "argv", command), pytest.raises(SystemExit) as stop:
        script.main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and words in err and "Traceback" not in err and not list(Path().iterdir())


def test_a_rollout_of_nothing_but_reset_rows():
    """Fails if a rollout in which the only environment only resets gives NaN: one environment, one step."""
    flags = (
        "--env-id CartPole-v1 --num-envs 1 --num-steps 1 --num-minibatches 1 --max-episode-steps 2 --eval-episodes 1"
    )
    script.train(script.tuned(*flags.split(), "--total-timesteps", "12", "--no-progress", "--run-dir", "run"))
    rows = list(csv.DictReader(Path("run/metrics.csv").open()))
    assert all(row["intrinsic_reward"] != "nan" for row in rows)
