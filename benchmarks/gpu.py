"""Everything that needs a GPU, in one command: tests, speed beside the peers, where a GPU is worth it, Atari.

    pip install "gymnasium[mujoco]" ale-py
    python benchmarks/gpu.py [--parts tests sizes speed atari] [--peers FOLDER] [--seeds 1 2 3] [--atari-steps 3000000]
    python benchmarks/gpu.py --device cpu --quick      # tries the command itself where there is no GPU

* tests: `pytest -m cuda`.
* sizes: steps per second on the CPU and on the GPU, for networks of several sizes on vectors, and on images.
* speed: with and without --compile; --peers is a folder with clones of vwxyzjn/cleanrl and pytorch-labs/LeanRL, whose
  scripts of the same algorithms are run beside, with the steps per second that they print last.
* atari: ppo.py and rainbow.py on ALE/Pong-v5, a curve of each first seed and the final evaluations.

Rates of ours are those of training between a fifth of the steps and the end, from metrics.csv. Each result is merged
into benchmarks/results/gpu.json as soon as it is there, so a run that was broken off loses nothing; curves lie beside.
"""

import argparse
import csv
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "gpu.json"
PONG = "--env-id ALE/Pong-v5"
CHEETAH = "--env-id HalfCheetah-v5"
UPDATES_SOON = "--learning-starts 1000 --buffer-size 20000"
# name: script, flags, steps. On the CPU and on the GPU.
SIZES = {
    "ppo.py, Pong": ("ppo.py", f"{PONG} --num-envs 8", 20_000),
    "dqn.py, Pong": ("dqn.py", f"{PONG} {UPDATES_SOON}", 6_000),
}
for size in (64, 256, 1024):
    layers = f"--hidden-sizes {size} {size}"
    ppo, dqn = (f"--env-id CartPole-v1 --stop-at-return None {more} {layers}" for more in ("--num-envs 8", ""))
    SIZES |= {
        f"ppo.py, CartPole, {size}-{size}": ("ppo.py", ppo, 60_000),
        f"dqn.py, CartPole, {size}-{size}": ("dqn.py", dqn, 20_000),
        f"ddpg_td3.py, Pendulum, {size}-{size}": ("ddpg_td3.py", f"--env-id Pendulum-v1 {layers}", 5_000),
    }
# name: script, flags, steps, the peers' scripts (CleanRL's folder cleanrl/, LeanRL's leanrl/), the peers' flags.
SPEED = {
    "PPO, Pong": (
        "ppo.py", f"{PONG} --num-envs 8", 100_000,
        "ppo_atari_envpool", "ppo_atari_envpool_torchcompile", "Pong-v5",
    ),
    "PPO, HalfCheetah": (
        "ppo.py", f"{CHEETAH} --num-envs 1 --num-steps 2048 --num-minibatches 32 --update-epochs 10", 60_000,
        "ppo_continuous_action", "ppo_continuous_action_torchcompile", "HalfCheetah-v4",
    ),
    "TD3, HalfCheetah": (
        "ddpg_td3.py", f"{CHEETAH} --learning-starts 1000", 20_000,
        "td3_continuous_action", "td3_continuous_action_torchcompile", "HalfCheetah-v4",
    ),
    "DQN, CartPole": (
        "dqn.py", "--env-id CartPole-v1 --num-envs 1 --train-frequency 10 --gradient-steps 1 --stop-at-return None",
        30_000, "dqn", "dqn_torchcompile", "CartPole-v1",
    ),
}  # fmt: skip
RATE_OF_A_PEER = re.compile(r"SPS: *([\d.]+)|([\d.]+) sps")


def keep(part, name, entry):
    """Merge a result into gpu.json, with where it was measured."""
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    report.setdefault(part, {})[name] = entry
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    report["machine"] = f"{gpu}, {platform.machine()}, {os.cpu_count()} cores"
    report["versions"] = {name: version(name) for name in ("torch", "gymnasium", "numpy")}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{part}, {name}: {entry}", flush=True)


def call(*command, seconds=3600, **settings):
    """What a command prints; what it says when it fails. It is stopped after so many seconds, and counts as it is."""
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=seconds, **settings)
    except subprocess.TimeoutExpired as stopped:
        return 0, (stopped.stdout or b"").decode()
    return done.returncode, done.stdout + done.stderr


def train(script, flags, steps, folder, *more):
    """Run a script for so many steps, without evaluations on the way; an error text, or ""."""
    command = [sys.executable, str(ROOT / script), *flags.split(), "--total-timesteps", str(steps), *more]
    command += ["--eval-every", "1000000000", "--checkpoint-every", "1000000000", "--no-progress", "--run-dir", folder]
    code, text = call(*command)
    return text[-500:] if code else ""


def rate(script, flags, steps, *more):
    """Steps per second of training once it is warm; None, and the error's text on the screen, where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        error = train(script, flags, steps, folder, "--eval-episodes", "1", *more)
        if error:
            print(error, file=sys.stderr)
            return None
        with Path(folder, "metrics.csv").open() as file:
            rows = [(int(row["step"]), float(row["seconds"])) for row in csv.DictReader(file)]
    first = next(row for row in rows if row[0] >= steps / 5)
    return round((rows[-1][0] - first[0]) / (rows[-1][1] - first[1]), 1)


def median_rate(repeats, *run):
    """The median of so many rates, or None."""
    rates = [rate(*run) for _ in range(repeats)]
    return None if None in rates else statistics.median(rates)


def peer_rate(folder, script, env_id, steps):
    """Steps per second that a peer's script prints last; None if it prints none. Ten minutes at most."""
    command = [sys.executable, script, "--env-id", env_id, "--total-timesteps", str(steps)]
    _, text = call(*command, cwd=folder, seconds=600, env=os.environ | {"WANDB_MODE": "disabled"})
    found = RATE_OF_A_PEER.findall(text)
    return float(found[-1][0] or found[-1][1]) if found else None


def tests(args):
    """The tests that need a GPU."""
    variables = os.environ | {"TEST_DEVICE": args.device}
    files = ["tests/runs/test_gpu.py", "-k", "dqn.py and cpus"] if args.quick else ["tests"]
    _, text = call(sys.executable, "-m", "pytest", "-q", "-m", "cuda", *files, cwd=ROOT, env=variables)
    keep("tests", "pytest -m cuda", text.strip().splitlines()[-1])


def sizes(args):
    """CPU against GPU."""
    for name, (script, flags, steps) in SIZES.items():
        if args.quick and "CartPole, 64" not in name:
            continue
        steps = steps // 20 if args.quick else steps
        rates = {device: median_rate(args.repeats, script, flags, steps, "--device", device)
                 for device in ("cpu", args.device)}  # fmt: skip
        keep("sizes", name, rates)


def speed(args):
    """Ours beside the peers."""
    for name, (script, flags, steps, clean, lean, env_id) in SPEED.items():
        if args.quick:
            flags, steps = "--env-id Pendulum-v1", 1_000 if script == "ddpg_td3.py" else 3_000
        if args.quick and script == "dqn.py":
            continue
        rates = {"ours": median_rate(args.repeats, script, flags, steps, "--device", args.device)}
        if script == "ppo.py" and not args.quick:
            rates["ours, --compile"] = median_rate(
                args.repeats, script, flags, steps, "--device", args.device, "--compile"
            )
        if args.peers:
            rates["CleanRL"] = peer_rate(args.peers / "cleanrl", f"cleanrl/{clean}.py", env_id, steps)
            rates["LeanRL"] = peer_rate(args.peers / "LeanRL", f"leanrl/{lean}.py", env_id, steps)
        keep("speed", name, rates)


def atari(args):
    """Pong, learned."""
    env_id, steps = ("CartPole-v1", 2_000) if args.quick else ("ALE/Pong-v5", args.atari_steps)
    for script in ("ppo.py", "rainbow.py"):
        for seed in args.seeds:
            begin = time.time()
            with tempfile.TemporaryDirectory() as folder:
                flags = f"--env-id {env_id} --seed {seed} --device {args.device} --eval-every {steps // 10}"
                command = [*flags.split(), "--total-timesteps", str(steps), "--no-progress", "--run-dir", folder]
                code, text = call(sys.executable, str(ROOT / script), *command, seconds=24 * 3600)
                if code:
                    raise SystemExit(text)
                with Path(folder, "evaluations.csv").open() as file:
                    curve = [[int(row["step"]), float(row["return_mean"])] for row in csv.DictReader(file)]
                if seed == args.seeds[0] and not args.quick:
                    shutil.copy(Path(folder, "learning_curve.png"), RESULTS.with_name(f"gpu_{script[:-3]}_Pong.png"))
            keep("atari", f"{script}, {env_id}, seed {seed}", {"seconds": round(time.time() - begin), "curve": curve})


def main():
    """Run the parts in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"tests": tests, "sizes": sizes, "speed": speed, "atari": atari}
    parser.add_argument("--parts", nargs="*", default=list(parts), choices=list(parts))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peers", type=Path, metavar="FOLDER")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--repeats", type=int, default=3, help="of every rate; the median counts")
    parser.add_argument("--atari-steps", type=int, default=3_000_000)
    parser.add_argument("--quick", action="store_true", help="small runs, only to try the command")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: --device cpu --quick tries the command without one")
    if args.quick:
        global RESULTS
        RESULTS = Path(tempfile.mkdtemp()) / "gpu.json"
        args.repeats, args.seeds = 1, args.seeds[:1]
    for part in args.parts:
        parts[part](args)
    print(RESULTS)


if __name__ == "__main__":
    main()
