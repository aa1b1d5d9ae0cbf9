"""Where a GPU is worth it, and speed beside the peers on it.

    pip install "gymnasium[mujoco]" ale-py
    python benchmarks/gpu.py [NAME …] [--repeats 3] [--peers FOLDER]
    python benchmarks/gpu.py --device cpu --steps 3000      # tries the command itself where there is no GPU

NAME: as in RUNS below; none: all of them. Figures are steps per second of training, between a fifth of the steps and
the end, on the CPU and on the GPU. --peers is a folder with clones of vwxyzjn/cleanrl and pytorch-labs/LeanRL, whose
scripts of the same algorithms are run beside, with the steps per second that they print last. Each result goes into
benchmarks/results/gpu.json as soon as it is there; with --steps nothing is written. Two other commands need a GPU:
`pytest -m cuda`, and `python benchmarks/scores.py ppo.py ALE/Pong-v5 --flags="--device cuda"`.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from common import read, write
from speed import ours

CARTPOLE = "--env-id CartPole-v1 --stop-at-return None"
PONG = "--env-id ALE/Pong-v5"
CHEETAH = "--env-id HalfCheetah-v5"
ROLLOUT = "--num-envs 1 --num-steps 2048 --num-minibatches 32 --update-epochs 10"
REPLAY = "--num-envs 1 --train-frequency 10 --gradient-steps 1"
RUNS = {  # name: script, flags, steps
    "PPO, Pong": ("ppo.py", f"{PONG} --num-envs 8", 100_000),
    "PPO, HalfCheetah": ("ppo.py", f"{CHEETAH} {ROLLOUT}", 60_000),
    "TD3, HalfCheetah": ("ddpg_td3.py", f"{CHEETAH} --learning-starts 1000", 20_000),
    "DQN, CartPole": ("dqn.py", f"{CARTPOLE} {REPLAY}", 30_000),
    "DQN, Pong": ("dqn.py", f"{PONG} --learning-starts 1000 --buffer-size 20000", 6_000),
}
for size in (64, 256, 1024):
    layers = f"--hidden-sizes {size} {size}"
    RUNS |= {
        f"PPO, CartPole, {size}-{size}": ("ppo.py", f"{CARTPOLE} --num-envs 8 {layers}", 60_000),
        f"DQN, CartPole, {size}-{size}": ("dqn.py", f"{CARTPOLE} {layers}", 20_000),
        f"TD3, Pendulum, {size}-{size}": ("ddpg_td3.py", f"--env-id Pendulum-v1 {layers}", 5_000),
    }
PEERS = {  # name: CleanRL's script (LeanRL's has _torchcompile behind it), its environment
    "PPO, Pong": ("ppo_atari_envpool", "Pong-v5"),
    "PPO, HalfCheetah": ("ppo_continuous_action", "HalfCheetah-v4"),
    "TD3, HalfCheetah": ("td3_continuous_action", "HalfCheetah-v4"),
    "DQN, CartPole": ("dqn", "CartPole-v1"),
}
RATE_OF_A_PEER = re.compile(r"SPS: *([\d.]+)|([\d.]+) sps")


def rate(script, flags, steps, repeats):
    """The median of so many rates of a script; None if it fails."""
    try:
        rates = [ours(Path(script).stem, flags, steps // 5, steps - steps // 5) for _ in range(repeats)]
    except SystemExit as error:
        print(error, file=sys.stderr)
        return None
    return round(statistics.median(rates), 1)


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


def main():
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peers", type=Path, metavar="FOLDER")
    parser.add_argument("--repeats", type=int, default=3, help="of every rate; the median counts")
    parser.add_argument("--steps", type=int, help="of every run, to try the command; nothing is written")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: --device cpu --steps 3000 tries the command without one")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    for name in args.names or RUNS:
        script, flags, steps = RUNS[name]
        steps = args.steps or steps
        entry = {kind: rate(script, f"{flags} --device {kind}", steps, args.repeats) for kind in ("cpu", args.device)}
        if args.peers and name in PEERS:
            peer, env_id = PEERS[name]
            entry["CleanRL"] = peer_rate(args.peers / "cleanrl", f"cleanrl/{peer}.py", env_id, steps)
            entry["LeanRL"] = peer_rate(args.peers / "LeanRL", f"leanrl/{peer}_torchcompile.py", env_id, steps)
        print(f"{name}: {entry}", flush=True)
        if not args.steps:
            write("gpu", read("gpu") | {name: entry | {"device": device, "torch": torch.__version__}})


if __name__ == "__main__":
    main()
