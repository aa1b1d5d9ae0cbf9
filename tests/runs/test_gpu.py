"""What a GPU must not change, for every script with --device: `pytest -m cuda`, on a machine that has one.

The tests themselves can be tried without: TEST_DEVICE=cpu pytest -m cuda tests/runs/test_gpu.py.
"""

import os
import shutil

import kills
import pytest
import torch
from kills import kill_and_resume, run_difference, shell
from script_table import SCRIPTS, words

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
WITH_DEVICE = [name for name, script in SCRIPTS.items() if script.has("device")]
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=WITH_DEVICE)
def program(request, tmp_path, monkeypatch):
    """A script in an empty folder, on a GPU without TF32: it rounds inputs to ten bits, and hides mistakes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return SCRIPTS[request.param]


def trained(program, folder, *flags):
    """The agent's parameters after training in `folder`, by name, on the CPU."""
    program.train(*flags, "--run-dir", folder)
    state = program.module.read_state(next(folder_of(folder).glob("checkpoint*")))["agent"]
    return {name: value.float().cpu() for name, value in state.items() if torch.is_tensor(value)}


def folder_of(name):
    """The folder of this name, here."""
    return kills.Path(name)


def observations(program):
    """Flags of a short run on vectors, and of one on images if the script learns them."""
    yield program.home
    if program.learn_images:
        yield program.world("Match", observation="channels_last")


def test_first_updates_equal_the_cpus(program):
    """Fails if networks, losses or the optimiser compute something else on a GPU: from the same weights and with the
    same draws, the weights after the first updates differ by rounding only."""
    for n, home in enumerate(observations(program)):
        flags = [program.fast, home, "--total-timesteps 130 --eval-every 100000 --eval-episodes 1"]
        start = trained(program, f"start{n}", *flags, "--learning-rate 0" if program.has("learning_rate") else "")
        cpu = trained(program, f"cpu{n}", *flags, "--device cpu")
        gpu = trained(program, f"gpu{n}", *flags, "--device", DEVICE)
        assert list(cpu) == list(gpu)
        moved = max((cpu[name] - start[name]).abs().max() for name in cpu) if program.has("learning_rate") else 1e-2
        apart = max((cpu[name] - gpu[name]).abs().max() for name in cpu)
        assert moved > 1e-4 and apart < 0.02 * moved


def test_killed_and_resumed_on_a_gpu(program, monkeypatch):
    """Fails if a run on a GPU that was killed and resumed ends otherwise than one that was left alone."""
    before = kills.surroundings
    monkeypatch.setattr(kills, "surroundings", lambda **extra: before(**{"CUDA_VISIBLE_DEVICES": "0"} | extra))
    shutil.copy(program.module.__file__, ".")
    flags = ["--no-progress", *words(next(iter(program.kinds.values()))), "--device", DEVICE]
    shell(".", program.name, *flags, "--run-dir", "unbroken")
    here = folder_of(".")
    done, _ = kill_and_resume(here, program.name, "killed", flags, 2, here / "unbroken")
    assert done == 2 and run_difference(here / "unbroken", here / "killed") == ""
    given = [*kills.given_again(flags), "--evaluate", "killed", "--eval-episodes", 1, "--device", DEVICE]
    out, _ = shell(".", program.name, *given)
    assert "weights: " in out


def copies(program, *flags):
    """How often a run copies memory from the host to the GPU or back."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        program.train(program.fast, program.home, "--total-timesteps 130 --eval-every 100000 --eval-episodes 1", *flags)
    return sum(event.count for event in profile.key_averages() if "Memcpy" in event.key and "DtoD" not in event.key)


@pytest.mark.skipif(DEVICE != "cuda", reason="only a CUDA device's copies are in the profile")
def test_minibatches_copy_nothing(program):
    """Fails if the more minibatches an update has, the more is copied between host and GPU."""
    if not program.has("num_minibatches"):
        pytest.skip("replay buffers lie in host memory: each batch is copied to the GPU, once")
    few = copies(program, "--num-minibatches 2 --run-dir few --device", DEVICE)
    many = copies(program, "--num-minibatches 8 --run-dir many --device", DEVICE)
    assert 0 < many <= few
