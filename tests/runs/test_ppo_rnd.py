"""Whole runs of ppo_rnd.py: what only its default environment shows. The rest is in test_runs.py."""

import csv
from pathlib import Path

import pytest

import ppo_rnd as script


@pytest.mark.slow
def test_the_default_environment(tmp_path, monkeypatch):
    """Fails if plain `python ppo_rnd.py` does not run MultiRoom with its settings, if a figure is missing or NaN, or if
    what novelty is measured with is saved as it was at the beginning."""
    monkeypatch.chdir(tmp_path)
    args = script.tuned("--total-timesteps", "600", "--run-dir", "run", "--no-progress", "--num-steps", "16")
    args.eval_episodes = 1
    assert args.env_id == "MiniGrid-MultiRoom-N4-S5-v1" and args.learning_rate == 1e-3 and args.num_envs == 16
    script.train(args)
    rows = list(csv.DictReader(Path("run/metrics.csv").open()))
    assert all(float(row[name]) == float(row[name]) for row in rows for name in script.FIGURES)
    assert float(rows[-1]["predictor_loss"]) < float(rows[0]["predictor_loss"])
    assert Path("run/learning_curve.png").exists() and "intrinsic_reward" in script.CURVE
    rnd = script.read_state("run/checkpoint.pt")["rnd"]
    assert rnd["sums"].all() and rnd["obs_stats.count"] > 600
    mean, _ = script.evaluate(script.load("run"), args, 1)
    assert mean >= 0
