"""One demonstration against none on MiniGrid-DoorKey-16x16-v0: ppod.py beside itself with `--rho 0 --phi 0`.

    python benchmarks/ppod_doorkey.py [--seeds 1 2 3 4 5] [--variants "PPO+D" PPO …] [--jobs 1]
    python benchmarks/ppod_doorkey.py --seeds          # only draw the figure again, from the saved results

Every run is `python ppod.py --seed SEED` with the flags of its variant; plain PPO gets a million environment steps. The
score is the mean return of 100 episodes of the final weights, actions drawn, on layouts that no training episode had.
The curves are the mean returns of the last 100 training episodes; in their mean a run that has stopped keeps its last.
Each run is merged into benchmarks/results/ppod_doorkey.json as soon as it ends; the figure is ppod_doorkey.png.
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
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
VARIANTS = {
    "PPO+D": [],
    "PPO": "--rho 0 --phi 0 --total-timesteps 990000".split(),
    "PPO+D, rho 0.85, phi 0": "--rho 0.85 --phi 0".split(),
    "PPO+D, GRU": ["--recurrent"],
}


def run(variant, seed):
    """Train once; merge the final evaluation and the curve into the results."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "ppod.py"), "--seed", str(seed), *VARIANTS[variant], "--no-progress"]
        command += ["--eval-every", str(10**9), "--eval-episodes", "100", "--run-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(done.stderr)
        summary = json.loads(Path(folder, "summary.json").read_text())
        with Path(folder, "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    points = rows[:: len(rows) // 100] + rows[-1:]
    names = "step", "training_rows", "return_mean"
    curve = [[int(p[names[0]]), int(p[names[1]]), round(float(p[names[2]]), 4)] for p in points]
    entry = {"return": summary["eval_return_mean"], "std": summary["eval_return_std"], "curve": curve}
    entry |= {"step": summary["global_step"], "seconds": round(summary["seconds"], 1)}
    print(f"{variant:8s} seed {seed}: {entry['return']:.3f} after {entry['step']:,} steps, {entry['seconds']:.0f} s")
    report = read()
    report["results"].setdefault(variant, {})[str(seed)] = entry
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "ppod_doorkey.json").write_text(json.dumps(report, indent=1))


def read():
    """The results so far."""
    path = RESULTS / "ppod_doorkey.json"
    report = json.loads(path.read_text()) if path.exists() else {"results": {}}
    report |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "flags": VARIANTS}
    return report | {"versions": {name: version(name) for name in ("torch", "gymnasium", "numpy", "minigrid")}}


def draw(results):
    """Training returns by environment steps and by training rows: each seed thin, their mean thick."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axis, column, label in zip(figure.subplots(1, 2, sharey=True), (0, 1), ("environment steps", "training rows")):
        for (name, runs), color in zip(results.items(), ("tab:blue", "tab:orange", "tab:green", "tab:red")):
            curves = [np.array(entry["curve"], float) for entry in runs.values()]
            curves = [curve[~np.isnan(curve[:, 2])] for curve in curves]
            for curve in curves:
                axis.plot(curve[:, column], curve[:, 2], color=color, alpha=0.3, linewidth=0.8)
            grid = np.linspace(max(c[0, column] for c in curves), max(c[-1, column] for c in curves), 200)
            mean = np.mean([np.interp(grid, c[:, column], c[:, 2]) for c in curves], 0)
            axis.plot(grid, mean, color=color, linewidth=2, label=f"{name}, mean of {len(curves)} seeds")
            final = [entry["return"] for entry in runs.values()]
            axis.plot([c[-1, column] for c in curves], final, "o", color=color, markersize=4)
        axis.set(xlabel=label)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.grid(alpha=0.3)
        if column == 0:
            axis.set(ylabel="return of the last 100 training episodes\n(dots: final evaluation)")
            axis.legend()
    figure.suptitle("MiniGrid-DoorKey-16x16-v0")
    figure.savefig(RESULTS / "ppod_doorkey.png", dpi=110)


def main():
    """Run, save, draw, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--variants", nargs="*", default=["PPO+D", "PPO"], choices=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda job: run(*job), [(v, seed) for v in args.variants for seed in args.seeds]))
    results = read()["results"]
    draw(results)
    print("\n| variant | mean of seeds | worst seed | steps | seconds, median |\n|---|---|---|---|---|")
    for name, runs in results.items():
        returns, steps = ([entry[k] for entry in runs.values()] for k in ("return", "step"))
        seconds = statistics.median(entry["seconds"] for entry in runs.values())
        print(f"| {name} | {statistics.mean(returns):.3f} | {min(returns):.3f} | {max(steps):,} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
