"""Where a GPU is worth it, and speed beside the peers on it.

    pip install "gymnasium[mujoco]" ale-py
    python benchmarks/gpu.py [--parts sizes speed] [--peers FOLDER]
    python benchmarks/gpu.py --device cpu --quick      # tries the command itself where there is no GPU; writes nothing

* sizes: steps per second on the CPU and on the GPU, for networks of several sizes on vectors, and on images.
* speed: --peers is a folder with clones of vwxyzjn/cleanrl and pytorch-labs/LeanRL, whose scripts of the same
  algorithms are run beside, with the steps per second that they print last.

Rates of ours are those of training between a fifth of the steps and the end. Each result is merged into
benchmarks/results/gpu.json as soon as it is there. Two other commands need a GPU: `pytest -m cuda`, and
`python benchmarks/scores.py ppo.py ALE/Pong-v5 --flags="--device cuda"`.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from common import ROOT, read, write
from speed import ours

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


def keep(args, part, name, entry):
    """Print a result, and merge it into gpu.json with where it was measured, unless this is only a trial."""
    print(f"{part}, {name}: {entry}", flush=True)
    if args.quick:
        return
    report = read("gpu")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    report.setdefault(part, {})[name] = entry
    report["device"] = {"name": gpu, "torch": torch.__version__}
    write("gpu", report)


def rate(script, flags, steps, *more):
    """Steps per second of training between a fifth of the steps and the end; None if the script fails."""
    text = (ROOT / script).read_text(encoding="utf-8")
    try:
        return round(ours(text, Path(script).stem, " ".join([flags, *more]), steps // 5, steps - steps // 5), 1)
    except SystemExit as error:
        print(error, file=sys.stderr)
        return None


def median_rate(repeats, *run):
    """The median of so many rates, or None."""
    rates = [rate(*run) for _ in range(repeats)]
    return None if None in rates else statistics.median(rates)


def peer_rate(folder, script, env_id, steps):
    """Steps per second that a peer's script prints last; None if it prints none. Ten minutes at most."""
    command = [sys.executable, script, "--env-id", env_id, "--total-timesteps", str(steps)]
    settings = {"cwd": folder, "env": os.environ | {"WANDB_MODE": "disabled"}, "text": True, "capture_output": True}
    try:
        printed = subprocess.run(command, timeout=600, **settings).stdout
    except subprocess.TimeoutExpired as stopped:
        printed = (stopped.stdout or b"").decode()
    found = RATE_OF_A_PEER.findall(printed)
    return float(found[-1][0] or found[-1][1]) if found else None


def sizes(args):
    """CPU against GPU."""
    for name, (script, flags, steps) in SIZES.items():
        if args.quick and "CartPole, 64" not in name:
            continue
        steps = steps // 20 if args.quick else steps
        rates = {device: median_rate(args.repeats, script, flags, steps, "--device", device)
                 for device in ("cpu", args.device)}  # fmt: skip
        keep(args, "sizes", name, rates)


def speed(args):
    """Ours beside the peers."""
    for name, (script, flags, steps, clean, lean, env_id) in SPEED.items():
        if args.quick:
            flags, steps = "--env-id Pendulum-v1", 1_000 if script == "ddpg_td3.py" else 3_000
        if args.quick and script == "dqn.py":
            continue
        rates = {"ours": median_rate(args.repeats, script, flags, steps, "--device", args.device)}
        if args.peers:
            rates["CleanRL"] = peer_rate(args.peers / "cleanrl", f"cleanrl/{clean}.py", env_id, steps)
            rates["LeanRL"] = peer_rate(args.peers / "LeanRL", f"leanrl/{lean}.py", env_id, steps)
        keep(args, "speed", name, rates)


def main():
    """Run the parts in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"sizes": sizes, "speed": speed}
    parser.add_argument("--parts", nargs="*", default=list(parts), choices=list(parts))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peers", type=Path, metavar="FOLDER")
    parser.add_argument("--repeats", type=int, default=3, help="of every rate; the median counts")
    parser.add_argument("--quick", action="store_true", help="small runs, only to try the command")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: --device cpu --quick tries the command without one")
    if args.quick:
        args.repeats = 1
    for part in args.parts:
        parts[part](args)


if __name__ == "__main__":
    main()
