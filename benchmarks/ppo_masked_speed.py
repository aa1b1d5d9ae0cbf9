"""Speed and memory of ppo_masked.py beside sb3-contrib's MaskablePPO, at equal settings, in alternation, on one thread.

    pip install sb3-contrib==2.9.2        # in this or another virtual environment
    python benchmarks/ppo_masked_speed.py [--peer-python PATH] [--repeats 5]

Taxi-v4, 8 environments x 128 steps, 4 epochs x 4 minibatches, two hidden layers of 64, learning rate 2.5e-4. Rates are
environment steps per second inside training (set-up, compilation and the first 8,192 steps left out); memory is the
peak resident size of the whole process. Writes benchmarks/results/ppo_masked_speed.json and prints a table.
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
WARM_UP = 8_192
PEER = f"""
import time, torch
torch.set_num_threads(1)
from sb3_contrib import MaskablePPO
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.env_util import make_vec_env
mask = lambda env: env.unwrapped.action_mask(env.unwrapped.s)
envs = make_vec_env("Taxi-v4", n_envs=8, seed=1, wrapper_class=ActionMasker, wrapper_kwargs=dict(action_mask_fn=mask))
model = MaskablePPO("MlpPolicy", envs, n_steps=128, batch_size=256, n_epochs=4, learning_rate=2.5e-4, ent_coef=0.01,
                    policy_kwargs=dict(net_arch=[64, 64]), device="cpu", seed=1)
model.learn({WARM_UP})
start = time.perf_counter()
model.learn(40_960, reset_num_timesteps=False)
print("RATE", 40_960 / (time.perf_counter() - start))
"""
FLAGS = "--num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4 --learning-rate 2.5e-4 --gamma 0.99"
FLAGS += " --gae-lambda 0.95 --ent-coef 0.01 --total-timesteps 90000"


def run(command):
    """(stdout, peak resident MB) of a child process on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    reader = f"import resource, subprocess, sys; r = subprocess.run({command!r}); "
    reader += "print('PEAK', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024); sys.exit(r.returncode)"
    done = subprocess.run([sys.executable, "-c", reader], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout, float(done.stdout.split("PEAK")[-1])


def ours(*more):
    """(steps per second after the warm-up, peak MB) of one run of ppo_masked.py."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "ppo_masked.py"),
            *FLAGS.split(),
            *more,
            "--no-progress",
            "--run-dir",
            folder,
        ]
        _, peak = run([*command, "--eval-every", "1000000000", "--checkpoint-every", "1000000000"])
        rows = list(csv.DictReader(Path(folder, "metrics.csv").open()))[:-1]
    warm = next(row for row in rows if int(row["step"]) >= WARM_UP)
    steps = int(rows[-1]["step"]) - int(warm["step"])
    return steps / (float(rows[-1]["seconds"]) - float(warm["seconds"])), peak


def peer(python):
    """(steps per second after the warm-up, peak MB) of sb3-contrib."""
    output, peak = run([python, "-c", PEER])
    return float(output.split("RATE")[1].split()[0]), peak


def main():
    """Measure, print, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    results = {"sb3-contrib MaskablePPO": [], "ppo_masked.py": [], "ppo_masked.py --compile": []}
    for _ in range(args.repeats):
        results["sb3-contrib MaskablePPO"].append(peer(args.peer_python))
        results["ppo_masked.py"].append(ours())
        results["ppo_masked.py --compile"].append(ours("--compile"))
    code = "import torch as t, gymnasium as g, sb3_contrib as s; print(s.__version__, t.__version__, g.__version__)"
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread used",
        "python": platform.python_version(),
        "sb3_contrib, torch, gymnasium": subprocess.check_output([args.peer_python, "-c", code], text=True).strip(),
        "steps_per_second": {name: [rate for rate, _ in runs] for name, runs in results.items()},
        "peak_megabytes": {name: [peak for _, peak in runs] for name, runs in results.items()},
    }
    path = Path(__file__).parent / "results" / "ppo_masked_speed.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1))
    base = [rate for rate, _ in results["sb3-contrib MaskablePPO"]]
    for name, runs in results.items():
        rates, peaks = zip(*runs)
        ratios = [rate / b for rate, b in zip(rates, base)]
        print(
            f"{name:24s} {statistics.median(rates):9,.0f} steps/s (min {min(rates):,.0f}, max {max(rates):,.0f})  "
            f"{statistics.median(ratios):5.2f} x sb3-contrib (pairwise median, min {min(ratios):.2f})  "
            f"peak {max(peaks):.0f} MB"
        )


if __name__ == "__main__":
    main()
