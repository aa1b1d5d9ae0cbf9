"""What a GPU must not change, for every script with --device: `pytest -m cuda`, on a machine that has one.

The tests themselves can be tried without: TEST_DEVICE=cpu pytest -m cuda tests/test_gpu.py.
"""

import importlib
import os
from pathlib import Path

import pytest
import torch
from run_folder import command, content, kill_and_resume

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROLLOUTS = "--num-envs 4 --num-steps 16 --num-minibatches 2"
REPLAYED = "--num-envs 2 --batch-size 16 --learning-starts 40 --buffer-size 100"
TEAM = "--env-id mpe2.simple_spread_v3"
IMAGES = "--env-id run_worlds:Picture-v0"
RUNS = [  # script, flags
    ("ppo", ROLLOUTS),
    ("ppo", f"{ROLLOUTS} {IMAGES}"),
    ("ppo_ddp", ROLLOUTS),
    ("ppo_masked", f"{ROLLOUTS} --env-id Taxi-v4"),
    ("ppo_rnd", f"{ROLLOUTS} --env-id CartPole-v1"),
    ("ppod", f"{ROLLOUTS} --env-id CartPole-v1"),
    ("dqn", f"{REPLAYED} --env-id CartPole-v1"),
    ("dqn", f"{REPLAYED} {IMAGES}"),
    ("rainbow", f"{REPLAYED} --env-id CartPole-v1"),
    ("ddpg_td3", f"{REPLAYED} --env-id Pendulum-v1"),
    ("sac", f"{REPLAYED} --env-id Pendulum-v1"),
    ("reinforce", "--num-envs 2 --env-id CartPole-v1"),
    ("mappo", f"{ROLLOUTS} {TEAM}"),
    ("maddpg_matd3", f"{REPLAYED} {TEAM}"),
]
LENGTH = "--total-timesteps 150 --max-episode-steps 10 --eval-every 1000 --eval-episodes 1 --no-progress"


@pytest.fixture(params=RUNS, ids=" ".join)
def run(request, tmp_path, monkeypatch):
    """(a script, flags) in an empty folder, on a GPU without TF32: it rounds inputs to ten bits, and hides mistakes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    script = importlib.import_module(request.param[0])
    monkeypatch.setattr(script.Run, "draw_curve", lambda run: None)
    return script, request.param[1]


def trained(script, flags, folder):
    """The agent's parameters after training, by name, on the CPU."""
    assert command(script, f"{flags} {LENGTH} --run-dir {folder}") == 0
    state = script.read_state(f"{folder}/checkpoint.pt")["agent"]
    return {name: value.float() for name, value in state.items() if torch.is_tensor(value)}


def test_first_updates_equal_the_cpus(run):
    """From the same weights and with the same draws, the weights after the first updates differ by rounding only."""
    script, flags = run
    if script.__name__ == "reinforce":
        pytest.skip("torch draws its actions, on a GPU other ones")
    cpu = trained(script, f"{flags} --device cpu", "cpu")
    gpu = trained(script, f"{flags} --device {DEVICE}", "gpu")
    assert list(cpu) == list(gpu)
    assert max((cpu[name] - gpu[name]).abs().max() for name in cpu) < 1e-3


def test_killed_resumed_and_evaluated(run, tmp_path, monkeypatch):
    """A run on a GPU that was killed and resumed ends as one that was left alone; its weights load on a CPU."""
    script, flags = run
    kill_and_resume(script, f"{flags} {LENGTH} --checkpoint-every 50 --device {DEVICE}", 5, monkeypatch, tmp_path)
    own = [word for word in flags.split() if "run_worlds" in word]
    given = f"--env-id {own[0]}" if own else ""
    before = content(script)
    assert command(script, f"--evaluate run --eval-episodes 1 --device cpu {given}") == 0 and content(script) == before


def copies(script, flags):
    """How often a run copies memory from the host to the GPU and back, by direction."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        command(script, f"{flags} {LENGTH} --device {DEVICE}")
    found = {event.key: event.count for event in profile.key_averages()}
    return {key: found[key] for key in sorted(found) if key.startswith(("Memcpy HtoD", "Memcpy DtoH"))}


@pytest.mark.skipif(DEVICE != "cuda", reason="only a CUDA device's copies are in the profile")
def test_minibatches_copy_nothing(run):
    """However many minibatches an update has, no more is copied between host and GPU."""
    script, flags = run
    if script.__name__ not in ("ppo", "ppo_ddp"):
        pytest.skip("replayed batches are copied, once each; so are single numbers: statistics, or how many rows count")
    few = copies(script, f"{flags} --num-minibatches 2 --run-dir {Path('few')}")
    many = copies(script, f"{flags} --num-minibatches 8 --run-dir {Path('many')}")
    assert many and many == few
