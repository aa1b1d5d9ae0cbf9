"""TD3 on HalfCheetah-v5 over two seeds, side by side, for as many steps as one has patience for.

    pip install "gymnasium[mujoco]"
    python benchmarks/ddpg_td3_halfcheetah.py [--steps 300000] [--seeds 1 2] [--runs runs/halfcheetah]

Each is `python ddpg_td3.py --env-id HalfCheetah-v5 --seed SEED`, with ten deterministic episodes every 25,000 steps and
100 at the end. Nothing in a run depends on how long it is to be, so the same command with more steps goes on with what
there is. Writes ddpg_td3_halfcheetah.json and .png to benchmarks/results/ and prints the last scores.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import matplotlib
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"


def run(seed, steps, folder):
    """Train, or train on, and return the evaluations (step, mean, standard deviation), the last of 100 episodes."""
    begin = ["--resume", folder] if (folder / "checkpoint.pt").exists() else ["--run-dir", folder, "--seed", seed]
    if "--seed" in begin:
        begin += ["--env-id", "HalfCheetah-v5"]
    often = ["--eval-every", 25_000, "--checkpoint-every", 25_000, "--total-timesteps", steps, "--no-progress"]
    command = [sys.executable, ROOT / "ddpg_td3.py", *begin, *often, "--eval-episodes", 10]
    subprocess.run(list(map(str, command)), check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = np.genfromtxt(folder / "evaluations.csv", delimiter=",", names=True, ndmin=1)
    return [[float(row[name]) for name in ("step", "return_mean", "return_std")] for row in rows]


def last_score(seed, folder):
    """Mean and deviation of 100 deterministic episodes of the last weights."""
    flags = f"--model last --eval-episodes 100 --seed {seed + 500} --evaluate".split()
    command = [sys.executable, ROOT / "ddpg_td3.py", *flags, folder]
    words = subprocess.check_output(list(map(str, command)), text=True).split("last weights: ")[1].split()
    return float(words[0]), float(words[2])


def main():
    """Run, save, draw, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/halfcheetah")
    args = parser.parse_args()
    folders = [args.runs / str(seed) for seed in args.seeds]
    args.runs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(args.seeds)) as pool:
        curves = list(pool.map(lambda seed, folder: run(seed, args.steps, folder), args.seeds, folders))
    scores = [last_score(seed, folder) for seed, folder in zip(args.seeds, folders)]
    report = {
        "steps": args.steps,
        "seeds": args.seeds,
        "evaluations: step, mean, standard deviation": curves,
        "last weights, 100 episodes: mean, standard deviation": scores,
        "seconds": [json.loads((folder / "summary.json").read_text())["seconds"] for folder in folders],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, seeds side by side",
        "versions": {name: version(name) for name in ("torch", "gymnasium", "mujoco", "numpy")},
    }
    (RESULTS / "ddpg_td3_halfcheetah.json").write_text(json.dumps(report, indent=1))

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for seed, curve in zip(args.seeds, curves):
        steps, means, deviations = np.array(curve, float).T
        axis.plot(steps, means, "o-", markersize=3, label=f"seed {seed}: evaluations, ± standard deviation")
        axis.fill_between(steps, means - deviations, means + deviations, alpha=0.2)
    axis.axhline(9583, color="black", linestyle="--", label="CleanRL's TD3 after 1,000,000 steps: 9583 ± 126")
    axis.axhspan(9583 - 126, 9583 + 126, color="black", alpha=0.15)
    axis.set(title="HalfCheetah-v5, TD3", xlabel="environment steps", ylabel="return of an episode", xlim=(0, None))
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(RESULTS / "ddpg_td3_halfcheetah.png", dpi=110)
    for seed, (mean, deviation) in zip(args.seeds, scores):
        print(f"seed {seed}: {mean:.0f} ± {deviation:.0f} over 100 episodes after {args.steps:,} steps")


if __name__ == "__main__":
    main()
