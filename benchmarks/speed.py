"""Speed of the scripts beside Stable-Baselines3 and sb3-contrib with the same settings.

    python benchmarks/speed.py [NAME …] [--repeats 5] [--venv FOLDER]
    python benchmarks/speed.py async        # ppo.py with --async-envs beside ppo.py without it, in slow environments

NAME: as in PAIRS below; none: all of them. Figures are environment steps per second inside training; set-up, the
first steps and evaluations are left out. The two sides run in alternation, on one thread, in processes of their own,
and the ratio is the median over the pairs. Peers are installed into a virtual environment in FOLDER. Writes
benchmarks/results/speed.json or async_envs.json, and prints a line for each. Nothing else should run meanwhile.
"""

import argparse
import csv
import statistics
import sys
import tempfile
from pathlib import Path

from common import ROOT, call, read, stamp, write
from peers import interpreter

NEVER = "--eval-every 1000000000 --checkpoint-every 1000000000 --eval-episodes 1 --no-progress"

# What a peer does, with `model` to be trained; then how many steps to leave out, and how many to time.
HEAD = """
import time, torch
torch.set_num_threads({threads})
from stable_baselines3 import DQN, PPO, SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
import numpy as np
common = dict(device="cpu", seed=1)
"""
TAIL = """
model.learn({warm_up})
begin = time.perf_counter()
model.learn({steps}, reset_num_timesteps=False)
print("RATE", {steps} / (time.perf_counter() - begin))
"""
PPO = """
model = PPO("MlpPolicy", make_vec_env("CartPole-v1", 4, seed=1), n_steps=128, batch_size=128, n_epochs=4,
            learning_rate=2.5e-4, ent_coef=0.01, policy_kwargs=dict(net_arch=[64, 64]), **common)
"""
DQN = """
model = DQN("MlpPolicy", make_vec_env("CartPole-v1", 1, seed=1), train_freq=4, gradient_steps=1, batch_size=64,
            learning_starts=1_000, buffer_size=10_000, learning_rate=2.5e-4, target_update_interval=500,
            exploration_fraction=0.5, policy_kwargs=dict(net_arch=[64, 64]), **common)
"""
TD3 = """
model = TD3("MlpPolicy", "Pendulum-v1", learning_rate=1e-3, batch_size=256, learning_starts=256, train_freq=1,
            gradient_steps=1, action_noise=NormalActionNoise(np.zeros(1), 0.1 * np.ones(1)),
            policy_kwargs=dict(net_arch=[256, 256]), **common)
"""
SAC = """
model = SAC("MlpPolicy", "Pendulum-v1", learning_rate=1e-3, batch_size=256, learning_starts=256, train_freq=1,
            gradient_steps=1, policy_kwargs=dict(net_arch=[256, 256]), **common)
"""
MASKED = """
from sb3_contrib import MaskablePPO
from sb3_contrib.common.wrappers import ActionMasker
mask = lambda env: env.unwrapped.action_mask(env.unwrapped.s)
envs = make_vec_env("Taxi-v4", n_envs=8, seed=1, wrapper_class=ActionMasker, wrapper_kwargs=dict(action_mask_fn=mask))
model = MaskablePPO("MlpPolicy", envs, n_steps=128, batch_size=256, n_epochs=4, learning_rate=2.5e-4, ent_coef=0.01,
                    policy_kwargs=dict(net_arch=[64, 64]), **common)
"""
SEE = """
import minigrid
from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper
see = lambda env: ImgObsWrapper(RGBImgPartialObsWrapper(env))
make_envs = lambda num_envs: make_vec_env("MiniGrid-DoorKey-5x5-v0", num_envs, seed=1, wrapper_class=see)
"""
PPO_IMAGES = f"""{SEE}
model = PPO("CnnPolicy", make_envs(8), n_steps=128, batch_size=256, n_epochs=4, learning_rate=5e-4, ent_coef=0.01,
            **common)
"""
DQN_IMAGES = f"""{SEE}
model = DQN("CnnPolicy", make_envs(1), train_freq=4, gradient_steps=1, batch_size=32, learning_starts=200,
            buffer_size=10_000, learning_rate=1e-3, target_update_interval=500, exploration_fraction=0.5, **common)
"""
ROLLOUT = "--num-steps 128 --num-minibatches 4 --update-epochs 4 --learning-rate 2.5e-4 --gamma 0.99 --gae-lambda 0.95"
ROLLOUT += " --ent-coef 0.01"
REPLAY = "--env-id Pendulum-v1 --hidden-sizes 256 256 --batch-size 256 --learning-starts 256 --gamma 0.99"
DQN_FLAGS = "--env-id CartPole-v1 --num-envs 1 --train-frequency 4 --gradient-steps 1 --batch-size 64 --no-double"
DQN_FLAGS += " --hidden-sizes 64 64 --learning-starts 1000 --buffer-size 10000 --learning-rate 2.5e-4 --no-anneal-lr"
DQN_FLAGS += " --tau 1 --target-network-frequency 500 --exploration-fraction 0.5 --no-normalize-obs"
PIXELS = "--env-id MiniGrid-DoorKey-5x5-v0"
PIXELS += " --wrappers minigrid.wrappers.RGBImgPartialObsWrapper minigrid.wrappers.ImgObsWrapper"
PPO_PIXELS = f"{PIXELS} --num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4"
PPO_PIXELS += " --learning-rate 5e-4 --gamma 0.99 --gae-lambda 0.95 --ent-coef 0.01"
DQN_PIXELS = f"{PIXELS} --num-envs 1 --train-frequency 4 --batch-size 32 --no-double --learning-starts 200"
DQN_PIXELS += " --buffer-size 10000 --no-anneal-lr --target-network-frequency 500 --exploration-fraction 0.5"
# name: (script, flags, steps to leave out, steps to time, the peer's code). Runs are as long as real ones, since the
# 200 rows of metrics.csv would take a larger part of shorter ones.
PAIRS = {
    "PPO": ("ppo", f"--env-id CartPole-v1 --num-envs 4 {ROLLOUT}", 8_192, 200_000, PPO),
    "DQN": ("dqn", DQN_FLAGS, 2_000, 50_000, DQN),
    "TD3": ("ddpg_td3", f"{REPLAY} --exploration-noise 0.1", 400, 10_000, TD3),
    "SAC": ("sac", REPLAY, 400, 5_000, SAC),
    "PPO, images": ("ppo", PPO_PIXELS, 2_048, 6_144, PPO_IMAGES),
    "PPO, images, two threads": ("ppo", PPO_PIXELS, 2_048, 6_144, PPO_IMAGES),
    "DQN, images": ("dqn", DQN_PIXELS, 500, 1_500, DQN_IMAGES),
    "masked PPO": ("ppo_masked", f"--env-id Taxi-v4 --num-envs 8 {ROLLOUT}", 8_192, 200_000, MASKED),
}

SLOW = f"--env-id CartPole-v1 --num-envs 8 {ROLLOUT} --wrappers benchmarks.ddp.Slow"  # 2 ms a step


def ours(script, flags, warm_up, steps, threads=1):
    """Steps per second of a script, between the first row after the warm-up and the last."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / f"{script}.py", *flags.split(), *NEVER.split()]
        times = "--total-timesteps", warm_up + steps
        call(*command, *times, "--run-dir", f"{folder}/run", OMP_NUM_THREADS=str(threads))
        with Path(folder, "run/metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    warm = next(row for row in rows if float(row["step"]) >= warm_up)
    taken = float(rows[-1]["step"]) - float(warm["step"])
    return taken / (float(rows[-1]["seconds"]) - float(warm["seconds"]))


def async_envs(repeats):
    """How many times as fast ppo.py is if eight environments of 2 ms a step have a process each."""
    pairs = []
    for _ in range(repeats):
        pairs.append([ours("ppo", f"{SLOW} {flag}", 2_048, 10_240) for flag in ("--async-envs", "--no-async-envs")])
    entry = stamp("ppo.py") | {
        "gains": [round(fast / slow, 3) for fast, slow in pairs],
        "async": [round(fast) for fast, _ in pairs],
        "sync": [round(slow) for _, slow in pairs],
    }
    write("async_envs", {"2 ms a step": entry})
    gains = entry["gains"]
    print(f"--async-envs: {statistics.median(gains):.2f}  ({min(gains):.2f} to {max(gains):.2f})")


def main():
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--venv", default=str(ROOT / "benchmarks/.peers"), metavar="FOLDER")
    args = parser.parse_args()
    if args.names == ["async"]:
        async_envs(args.repeats)
        return
    for name in args.names or PAIRS:
        script, flags, warm_up, steps, code = PAIRS[name]
        threads = 2 if "two threads" in name else 1
        pairs = []
        for _ in range(args.repeats):
            tail = TAIL.format(warm_up=warm_up, steps=steps)
            printed, _ = call(interpreter("peer", args.venv), "-c", HEAD.format(threads=threads) + code + tail)
            pairs.append((ours(script, flags, warm_up, steps, threads), float(printed.split("RATE")[1])))
        ratios = [mine / other for mine, other in pairs]
        entry = stamp(f"{script}.py", flags.split()[1]) | {
            "ratios": [round(ratio, 3) for ratio in ratios],
            "ours": [round(mine) for mine, _ in pairs],
            "other": [round(other) for _, other in pairs],
        }
        write("speed", read("speed") | {name: entry})
        print(f"{name}: {statistics.median(ratios):.2f}  ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
