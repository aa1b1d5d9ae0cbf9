"""What each improvement contributes: rainbow.py, rainbow.py with each switch off in turn, and dqn.py.

    python benchmarks/rainbow_ablation.py [--env-ids CartPole-v1 Acrobot-v1 LunarLander-v3] [--seeds 1 2 3 4 5]
                                          [--steps 50000] [--variants Rainbow "no noisy" DQN …] [--jobs 1]
    python benchmarks/rainbow_ablation.py --seeds    # only the figure and the table, from the saved results

Every run has the tuned settings of its script, never stops early, and takes --steps environment steps, or as many as
its script has tuned for the environment. It is evaluated 20 times on the way (20 episodes each); its score is the mean
return of 100 episodes of its final weights, on other seeds. Each run is merged into
benchmarks/results/rainbow_ablation.json as soon as it ends. The figure, rainbow_ablation.png, has on the left the mean
over seeds of the evaluations, on the right the scores: the seeds, their mean, and its 95 % interval (Student's t).
"""

import argparse
import csv
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from threading import Lock

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "rainbow_ablation.json"
SWITCHES = ["double", "prioritized", "dueling", "multi-step", "distributional", "noisy"]
VARIANTS = {"Rainbow": ("rainbow.py", "")}
VARIANTS |= {f"no {switch}": ("rainbow.py", f"--no-{switch}") for switch in SWITCHES}
VARIANTS |= {"DQN": ("dqn.py", "")}
T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]  # Student's t for 1, 2, … degrees of freedom
writing = Lock()


def call(script, *flags):
    """What a script prints when it is called with these flags."""
    command = [sys.executable, str(ROOT / script), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def tuned_steps(script, env_id):
    """The number of steps that a script has tuned for an environment."""
    code = f"import {script[:-3]} as m; print(m.tuned(env_id='{env_id}').total_timesteps)"
    return int(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout)


def commit(script):
    """The commit that last changed a script."""
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", script]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def run(env_id, variant, seed, steps):
    """Train once; merge the evaluations and the score into the results."""
    script, switch = VARIANTS[variant]
    steps = steps or tuned_steps(script, env_id)
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--env-id {env_id} --seed {seed} --total-timesteps {steps} --stop-at-return None {switch}"
        flags += f" --eval-every {math.ceil(steps / 20)} --eval-episodes 20 --no-progress --run-dir {folder}"
        call(script, *flags.split())
        line = call(script, *f"--evaluate {folder} --model last --eval-episodes 100 --seed {seed + 500}".split())
        summary = json.loads(Path(folder, "summary.json").read_text())
        with Path(folder, "evaluations.csv").open() as file:
            curve = [[int(row["step"]), float(row["return_mean"])] for row in csv.DictReader(file)]
    entry = {"score": float(line.split("weights: ")[1].split()[0]), "steps": summary["global_step"]}
    entry |= {"seconds": round(summary["seconds"], 1), "commit": commit(script), "curve": curve}
    print(f"{env_id}, {variant}, seed {seed}: {entry['score']:.1f} after {entry['steps']:,} steps", flush=True)
    with writing:
        report = read()
        report["results"].setdefault(env_id, {}).setdefault(variant, {})[str(seed)] = entry
        report |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores"}
        report |= {"versions": {name: version(name) for name in ("torch", "gymnasium", "numpy")}}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(report) + "\n")


def read():
    """The results so far."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"results": {}}


def interval(scores):
    """Half the width of the 95 % interval of the mean; NaN of one seed."""
    degrees = len(scores) - 1
    if degrees == 0:
        return math.nan
    t = T_975[degrees - 1] if degrees <= len(T_975) else 1.96
    return t * statistics.stdev(scores) / math.sqrt(len(scores))


def draw(results):
    """A row for each environment: evaluations on the left, scores on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6 * len(results)), layout="constrained")
    axes = figure.subplots(len(results), 2, width_ratios=(3, 2), squeeze=False)
    for (env_id, variants), (left, right) in zip(results.items(), axes):
        for place, variant in enumerate(variants):
            runs = variants[variant].values()
            length = min(len(entry["curve"]) for entry in runs)
            curves = np.array([entry["curve"][:length] for entry in runs], float)
            bold = variant in ("Rainbow", "DQN")
            style = {"color": "black", "linestyle": "--"} if variant == "DQN" else {"color": f"C{place}"}
            mean = curves[:, :, 1].mean(0)
            left.plot(curves[:, :, 0].mean(0), mean, linewidth=2.5 if bold else 1, label=variant, **style)
            if bold:
                band = curves[:, :, 1].min(0), curves[:, :, 1].max(0)
                left.fill_between(curves[:, :, 0].mean(0), *band, alpha=0.15, color=style["color"], linewidth=0)
            scores = [entry["score"] for entry in runs]
            right.plot(scores, [place] * len(scores), "o", markersize=4, alpha=0.4, color=style["color"])
            half = interval(scores)
            right.errorbar(statistics.mean(scores), place, xerr=half, fmt="D", capsize=4, color=style["color"])
        seeds = max(len(runs) for runs in variants.values())
        left.set(title=f"{env_id}: mean of up to {seeds} seeds (bands: worst to best)", ylabel="return, evaluations")
        left.legend(fontsize=8)
        left.xaxis.set_major_formatter("{x:,.0f}")
        right.set(title="final weights: mean and 95 % interval", xlabel="return, 100 episodes")
        right.set_yticks(range(len(variants)), list(variants))
        right.invert_yaxis()
        every = [entry["score"] for runs in variants.values() for entry in runs.values()]
        margin = 0.05 * (max(every) - min(every))
        right.set_xlim(min(every) - margin, max(every) + margin)  # intervals of two or three seeds are wider than that
        for axis in (left, right):
            axis.grid(alpha=0.3)
    axes[-1][0].set_xlabel("environment steps")
    figure.savefig(RESULTS.with_suffix(".png"), dpi=110)


def table(results):
    """Print a line for each environment and variant."""
    print("\n| environment | variant | seeds | mean | 95 % interval | worst seed | steps | seconds, median |")
    print("|---|---|---|---|---|---|---|---|")
    for env_id, variants in results.items():
        for variant, runs in variants.items():
            scores = [entry["score"] for entry in runs.values()]
            half = interval(scores)
            steps = max(entry["steps"] for entry in runs.values())
            seconds = statistics.median(entry["seconds"] for entry in runs.values())
            cells = env_id, variant, " ".join(sorted(runs, key=int)), f"{statistics.mean(scores):.1f}"
            print("|", " | ".join([*cells, f"± {half:.1f}", f"{min(scores):.1f}", f"{steps:,}", f"{seconds:.0f}"]), "|")


def main():
    """Run, save, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-ids", nargs="*", default=["CartPole-v1", "Acrobot-v1", "LunarLander-v3"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--steps", type=int, help="of every run; default: what its script has tuned")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    args = parser.parse_args()
    plans = [(e, v, seed, args.steps) for seed in args.seeds for e in args.env_ids for v in args.variants]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda plan: run(*plan), plans))
    results = read()["results"]
    if not results:
        raise SystemExit("there are no results yet")
    results = {e: {v: runs[v] for v in VARIANTS if v in runs} for e, runs in results.items()}
    draw(results)
    table(results)


if __name__ == "__main__":
    main()
