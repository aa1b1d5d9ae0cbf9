"""Speed and memory of ppo.py beside Stable-Baselines3's PPO, at equal settings, in alternation, on one thread.

    pip install stable-baselines3==2.9.2        # in this or another virtual environment
    python benchmarks/ppo_speed.py [--peer-python PATH] [--repeats 5] [--earlier COMMIT]

With --earlier, ppo.py as it was at that commit runs in alternation with the present one. The two tricks that ppo.py
keeps for speed are each taken out once, to see what they are worth.

CartPole-v1, 4 environments x 128 steps, 4 epochs x 4 minibatches, two hidden layers of 64, learning rate 2.5e-4. Rates
are environment steps per second inside training (set-up, compilation and the first 8,192 steps left out, for both);
memory is the peak resident size of the whole process. Writes benchmarks/results/ppo_speed.json and prints a table.
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
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 8_192
SB3 = f"""
import time, torch
torch.set_num_threads(1)
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=4, seed=1), n_steps=128, batch_size=128, n_epochs=4,
            learning_rate=2.5e-4, ent_coef=0.01, policy_kwargs=dict(net_arch=[64, 64]), device="cpu", seed=1)
model.learn({WARM_UP})
start = time.perf_counter()
model.learn(60_000, reset_num_timesteps=False)
print("RATE", 60_000 / (time.perf_counter() - start))
"""
EQUAL = "--num-envs 4 --num-steps 128 --num-minibatches 4 --update-epochs 4 --learning-rate 2.5e-4 --gamma 0.99"
EQUAL += " --gae-lambda 0.95 --ent-coef 0.01 --total-timesteps 68000"
EQUAL_32 = EQUAL.replace("--num-envs 4", "--num-envs 32").replace("68000", "500000")
NO_ADAM = {"class Adam:": "from torch.optim import Adam\n\n\nclass OwnAdam:"}
NO_NUMPY = {"    small = x.device": "    small = False and x.device"}
VARIANTS = {  # name: (flags, replacements in the script's text, whether it is the earlier script)
    "ppo.py": (EQUAL, {}, False),
    "ppo.py --compile": (EQUAL + " --compile", {}, False),
    "ppo.py, torch.optim.Adam": (EQUAL, NO_ADAM, False),
    "ppo.py, acting in torch": (EQUAL, NO_NUMPY, False),
    "ppo.py, 32 environments": (EQUAL_32, {}, False),
    "earlier ppo.py": (EQUAL, {}, True),
    "earlier ppo.py, 32 environments": (EQUAL_32, {}, True),
}


def run(command, **kwargs):
    """(stdout, peak resident MB) of a child process on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    reader = f"import resource, subprocess, sys; r = subprocess.run({command!r}); "
    reader += "print('PEAK', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024); sys.exit(r.returncode)"
    done = subprocess.run([sys.executable, "-c", reader], capture_output=True, text=True, env=environment, **kwargs)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout, float(done.stdout.split("PEAK")[-1])


def ours(script, flags, replacements):
    """(steps per second after the warm-up, peak MB) of one run of a script whose text is changed before."""
    with tempfile.TemporaryDirectory() as folder:
        text = script
        for old, new in replacements.items():
            if text.count(old) != 1:
                raise SystemExit(f"{old!r} stands {text.count(old)} times in the script")
            text = text.replace(old, new)
        path = Path(folder, "ppo.py")
        path.write_text(text)
        command = [sys.executable, str(path), *flags.split(), "--no-progress", "--run-dir", f"{folder}/run"]
        _, peak = run([*command, "--eval-every", "1000000000", "--checkpoint-every", "1000000000"])
        rows = list(csv.DictReader(Path(folder, "run", "metrics.csv").open()))
    warm = next(row for row in rows if int(row["step"]) >= WARM_UP)
    steps = int(rows[-1]["step"]) - int(warm["step"])
    return steps / (float(rows[-1]["seconds"]) - float(warm["seconds"])), peak


def peer(python):
    """(steps per second after the warm-up, peak MB) of Stable-Baselines3."""
    output, peak = run([python, "-c", SB3])
    return float(output.split("RATE")[1].split()[0]), peak


def solve_time(script, seed):
    """Seconds from starting the process until the mean of 100 training episodes of CartPole-v1 reaches 475."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ppo.py")
        path.write_text(script)
        command = [sys.executable, str(path), "--stop-at-return", "475", "--seed", str(seed)]
        begun = time.time()
        subprocess.run([*command, "--run-dir", f"{folder}/run"], check=True, capture_output=True)
        rows = list(csv.DictReader(Path(folder, "run", "metrics.csv").open()))
        reached = Path(folder, "run", "metrics.csv").stat().st_mtime - begun
        return reached if float(rows[-1]["return_mean"]) >= 475 else float("inf")


def main():
    """Measure, print, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--earlier", metavar="COMMIT")
    args = parser.parse_args()
    present = (ROOT / "ppo.py").read_text()
    earlier = None
    if args.earlier:
        earlier = subprocess.check_output(["git", "-C", str(ROOT), "show", f"{args.earlier}:ppo.py"], text=True)
    variants = {name: variant for name, variant in VARIANTS.items() if earlier or not variant[2]}
    results = {name: [] for name in ["Stable-Baselines3", *variants]}
    for _ in range(args.repeats):
        results["Stable-Baselines3"].append(peer(args.peer_python))
        for name, (flags, replacements, is_earlier) in variants.items():
            results[name].append(ours(earlier if is_earlier else present, flags, replacements))
    solved = {"ppo.py": [], "earlier ppo.py": []}
    for seed in range(1, 6):
        solved["ppo.py"].append(solve_time(present, seed))
        if earlier:
            solved["earlier ppo.py"].append(solve_time(earlier, seed))
    code = (
        "import torch as t, gymnasium as g, stable_baselines3 as s; print(s.__version__, t.__version__, g.__version__)"
    )
    versions = subprocess.check_output([args.peer_python, "-c", code], text=True).strip()
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread used",
        "python": platform.python_version(),
        "stable_baselines3, torch, gymnasium": versions,
        "steps_per_second": {name: [rate for rate, _ in runs] for name, runs in results.items()},
        "peak_megabytes": {name: [peak for _, peak in runs] for name, runs in results.items()},
        "seconds_from_enter_to_475": solved,
    }
    path = Path(__file__).parent / "results" / "ppo_speed.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1))
    base = [rate for rate, _ in results["Stable-Baselines3"]]
    for name, runs in results.items():
        rates, peaks = zip(*runs)
        ratios = [rate / b for rate, b in zip(rates, base)]
        print(
            f"{name:32s} {statistics.median(rates):9,.0f} steps/s (min {min(rates):,.0f}, max {max(rates):,.0f})  "
            f"{statistics.median(ratios):5.2f} x SB3 (pairwise median, min {min(ratios):.2f})  peak {max(peaks):.0f} MB"
        )
    for name, seconds in solved.items():
        if seconds:
            listed = " ".join(f"{s:.2f}" for s in seconds)
            print(
                f"{name}: from Enter to a mean of 475: median {statistics.median(seconds):.2f} s of seeds 1-5: {listed}"
            )


if __name__ == "__main__":
    main()
