"""Speed of ddpg_td3.py beside Stable-Baselines3's TD3, at equal settings, in alternation, and beside arithmetic itself.

    pip install stable-baselines3==2.9.2        # in this or another virtual environment
    python benchmarks/ddpg_td3_speed.py [--peer-python PATH] [--repeats 3]

TD3 on Pendulum-v1, networks of 256-256, batches of 256, one update per step, Gaussian noise of 0.1, learning rate 1e-3.
All on one thread. Rates are steps per second once updates run (set-up and the first 400 steps left out, for both). The
limit is the rate at which this machine multiplies float32 matrices of 256 x 256, measured in alternation as well,
divided by the 0.392 GFLOP that a step takes at least. Writes benchmarks/results/ddpg_td3_speed.json, prints a table.
"""

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_UP, STEPS = 400, 1_000
SB3 = f"""
import sys, time, numpy as np, torch
torch.set_num_threads(1)
from stable_baselines3 import TD3
from stable_baselines3.common.noise import NormalActionNoise
noise = NormalActionNoise(np.zeros(1), 0.1 * np.ones(1))
model = TD3("MlpPolicy", "Pendulum-v1", learning_rate=1e-3, batch_size=256, learning_starts=256, train_freq=1,
            gradient_steps=1, action_noise=noise, policy_kwargs=dict(net_arch=[256, 256]), device="cpu", seed=1)
model.learn({WARM_UP})
start = time.perf_counter()
model.learn({STEPS}, reset_num_timesteps=False)
print("RATE", {STEPS} / (time.perf_counter() - start))
"""
MATRICES = """
import sys, time, torch
torch.set_num_threads(1)
x, y = torch.randn(2, 256, 256)
for _ in range(300):
    start = time.perf_counter()
    for _ in range(20):
        torch.mm(x, y)
    best = min(time.perf_counter() - start, globals().get("best", 1e9))
print("RATE", 20 * 2 * 256**3 / best)
"""
EQUAL = "--env-id Pendulum-v1 --hidden-sizes 256 256 --batch-size 256 --learning-starts 256 --exploration-noise 0.1"
EQUAL += f" --actor-learning-rate 1e-3 --critic-learning-rate 1e-3 --gamma 0.99 --total-timesteps {WARM_UP + STEPS}"
EQUAL += " --eval-every 1000000000 --checkpoint-every 1000000000 --eval-episodes 1 --no-progress"
VARIANTS = {"ddpg_td3.py": "", "ddpg_td3.py --bf16": "--bf16"}


def flop_per_step(obs=3, actions=1, hidden=256, batch=256, critics=2, policy_frequency=2):
    """Floating-point operations of a step's matrix products when none is wasted: a test counts those of ddpg_td3.py.

    An actor takes A products per row, a critic C. Critics: targets, forward, gradients of weights and of hidden layers.
    Actor: forward, through one critic and back, gradients of its weights and hidden layers.
    """
    A = obs * hidden + hidden**2 + hidden * actions
    C = (obs + actions) * hidden + hidden**2 + hidden
    critic_update = A + 3 * critics * C + critics * (hidden**2 + hidden)
    actor_update = 2 * A + 2 * C + hidden**2 + hidden * actions
    return 2 * batch * (critic_update + actor_update / policy_frequency)


def rate(command):
    """The number that a child process prints after RATE."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.split("RATE")[1].split()[0])


def ours(flags):
    """Steps per second after the warm-up of one run of ddpg_td3.py."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "ddpg_td3.py"), *EQUAL.split(), *flags.split(), "--run-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        rows = list(csv.DictReader(Path(folder, "metrics.csv").open()))
    warm = next(row for row in rows if int(row["step"]) >= WARM_UP)
    return (int(rows[-1]["step"]) - int(warm["step"])) / (float(rows[-1]["seconds"]) - float(warm["seconds"]))


def main():
    """Measure, print, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rates = {name: [] for name in ["Stable-Baselines3", *VARIANTS, "arithmetic limit"]}
    for _ in range(args.repeats):
        rates["Stable-Baselines3"].append(rate([args.peer_python, "-c", SB3]))
        for name, flags in VARIANTS.items():
            rates[name].append(ours(flags))
        flops = rate([sys.executable, "-c", MATRICES])
        rates["arithmetic limit"].append(flops / flop_per_step())
    code = (
        "import torch as t, gymnasium as g, stable_baselines3 as s; print(s.__version__, t.__version__, g.__version__)"
    )
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread used",
        "python": platform.python_version(),
        "stable_baselines3, torch, gymnasium": subprocess.check_output(
            [args.peer_python, "-c", code], text=True
        ).strip(),
        "gflop_per_step": flop_per_step() / 1e9,
        "steps_per_second": rates,
    }
    path = Path(__file__).parent / "results" / "ddpg_td3_speed.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1))
    print("| | steps per second, median | beside SB3, pairwise median (min) | share of the limit |\n|---|---|---|---|")
    limit = statistics.median(rates["arithmetic limit"])
    for name, values in rates.items():
        ratios = [value / base for value, base in zip(values, rates["Stable-Baselines3"])]
        print(
            f"| {name} | {statistics.median(values):.0f} | {statistics.median(ratios):.2f} ({min(ratios):.2f}) | "
            f"{statistics.median(values) / limit:.0%} |"
        )


if __name__ == "__main__":
    main()
