"""Where a GPU is worth it: steps per second of training on the CPU and on the GPU, and Stable-Baselines3's on the GPU.

    pip install ale-py opencv-python "gymnasium[mujoco]" stable-baselines3
    python benchmarks/gpu.py [NAME …]
    python benchmarks/gpu.py --device cpu --steps 3000      # tries the command itself where there is no GPU

NAME: as in RUNS below; none: all of them. Rates are those between a fifth of the steps and the end. Runs on the CPU
have one thread; those with images have all cores. Writes benchmarks/results/gpu.json, a row at a time; with --steps
nothing is written. Two other commands need a GPU: `pytest -m cuda`, and
`python benchmarks/scores.py ppo.py ALE/Pong-v5 --flags="--total-timesteps …"`.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from common import call, read, stamp, write
from speed import TAIL, ours

PONG = "--env-id ALE/Pong-v5"
CARTPOLE = "--env-id CartPole-v1 --stop-at-return None"
TD3 = "--learning-starts 256"
RUNS = {  # name: script, flags, steps
    "PPO, Pong": ("ppo", PONG, 30_720),
    "DQN, Pong": ("dqn", f"{PONG} --num-envs 1 --learning-starts 1000 --buffer-size 20000", 5_000),
    "TD3, HalfCheetah": ("ddpg_td3", f"--env-id HalfCheetah-v5 --num-envs 1 {TD3}", 2_500),
}
for size in (64, 1024):
    layers = f"--hidden-sizes {size} {size}"
    RUNS |= {
        f"PPO, CartPole, {size} units": ("ppo", f"{CARTPOLE} {layers}", 20_480),
        f"DQN, CartPole, {size} units": ("dqn", f"{CARTPOLE} {layers} --learning-starts 1000", 6_000),
        f"TD3, Pendulum, {size} units": ("ddpg_td3", f"--env-id Pendulum-v1 {TD3} {layers}", 100_000 // size + 600),
    }
HEAD = """
import time, ale_py
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack
kwargs = dict(frameskip=1, repeat_action_probability=0.0)
pong = lambda num_envs: VecFrameStack(make_atari_env("ALE/Pong-v5", num_envs, seed=1, env_kwargs=kwargs), 4)
"""
PEERS = {  # the same settings
    "PPO, Pong": """
model = PPO("CnnPolicy", pong(8), n_steps=128, batch_size=256, n_epochs=4, learning_rate=2.5e-4, clip_range=0.1,
            ent_coef=0.01, device="{device}")
""",
    "DQN, Pong": """
model = DQN("CnnPolicy", pong(1), buffer_size=20_000, learning_rate=1e-4, batch_size=32, learning_starts=1000,
            target_update_interval=1000, train_freq=4, device="{device}")
""",
}


def peer_rate(name, device, steps):
    """Steps per second of Stable-Baselines3 with the settings of that row."""
    code = HEAD + PEERS[name] + TAIL
    fields = {"device": device, "warm_up": steps // 5, "steps": steps - steps // 5}
    printed, _ = call(sys.executable, "-c", code.format(**fields))
    return float(printed.split("RATE")[1])


def main():
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, help="of every run, to try the command; nothing is written")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: --device cpu --steps 3000 tries the command without one")
    cores = os.cpu_count()

    def rate(name, device):
        script, flags, steps = RUNS[name]
        steps = args.steps or steps
        threads = cores if "Pong" in name and device == "cpu" else 1
        return round(ours(script, f"{flags} --device {device}", steps // 5, steps - steps // 5, threads))

    names = args.names or list(RUNS)
    vectors = [name for name in names if "Pong" not in name]
    with ThreadPoolExecutor(max(cores // 2, 1)) as pool:  # each has a thread: they do not disturb one another
        on_cpu = dict(zip(vectors, pool.map(lambda name: rate(name, "cpu"), vectors)))
    for name in names:
        script, flags, steps = RUNS[name]
        entry = stamp(f"{script}.py", flags.split()[1]) | {"CPU": [on_cpu.get(name) or rate(name, "cpu")]}
        entry["GPU"] = [rate(name, args.device)]
        if name in PEERS:
            entry["Stable-Baselines3"] = [round(peer_rate(name, args.device, args.steps or steps))]
        print(f"{name}: {[entry.get(side) for side in ('CPU', 'GPU', 'Stable-Baselines3')]}", flush=True)
        if not args.steps:
            entry["machine"] += f", {torch.cuda.get_device_name()}"
            write("gpu", read("gpu") | {name: entry})


if __name__ == "__main__":
    main()
