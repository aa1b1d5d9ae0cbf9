"""Curiosity against none on MiniGrid-MultiRoom-N4-S5-v1: ppo_rnd.py, what it is without its parts, and ppo.py.

    python benchmarks/ppo_rnd_multiroom.py [--seeds 1 2 3 4 5] [--variants RND "no curiosity" PPO …]
    python benchmarks/ppo_rnd_multiroom.py --seeds     # only the figure and the table, from the saved results

Every run has the tuned settings of ppo_rnd.py and 400,000 environment steps; ppo.py is given the same by flags. Columns
of the table: the mean return of the last 100 training episodes (actions drawn); how many of 100 episodes of the final
weights reach the goal, with deterministic and with drawn actions, on layouts that no training episode had. Each run is
merged into benchmarks/results/ppo_rnd_multiroom.json as soon as it ends; the figure is ppo_rnd_multiroom.png.
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
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "ppo_rnd_multiroom.json"
ENV_ID = "MiniGrid-MultiRoom-N4-S5-v1"
AS_TUNED = "--num-envs 16 --num-minibatches 8 --learning-rate 1e-3 --total-timesteps 400000"  # for ppo.py
VARIANTS = {
    "RND": ("ppo_rnd.py", ""),
    "episodic intrinsic returns": ("ppo_rnd.py", "--episodic"),
    "intrinsic rewards not normalised": ("ppo_rnd.py", "--no-normalize-intrinsic"),
    "no curiosity": ("ppo_rnd.py", "--intrinsic-coef 0"),
    "PPO": ("ppo.py", AS_TUNED),
}


def successes(script, folder):
    """Shares of 100 episodes whose return is positive, with deterministic and with drawn actions."""
    sys.path.insert(0, str(ROOT))
    module = import_module(Path(script).stem)
    agent = module.load(folder, "last")
    rng = np.random.default_rng(0)
    drawn = SimpleNamespace(act=lambda obs: agent.to_env(agent.sample(obs, rng)))
    shares = []
    for player in (agent, drawn):
        # One episode after the other, since evaluate() gives the mean of returns, and here we count those above 0.
        returns = [module.evaluate(player, agent.args, 1, 1_000_000 + seed)[0] for seed in range(100)]
        shares.append(sum(total > 0 for total in returns) / len(returns))
    return shares


def run(variant, seed):
    """Train once; merge figures and curve into the results."""
    script, flags = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / script), "--env-id", ENV_ID, "--seed", str(seed), *flags.split()]
        command += ["--no-progress", "--eval-every", "1000000000", "--run-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(done.stderr)
        summary = json.loads(Path(folder, "summary.json").read_text())
        with Path(folder, "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        deterministic, drawn = successes(script, folder)
    names = ["step", "return_mean", *[name for name in ("intrinsic_reward", "predictor_loss") if name in rows[0]]]
    curve = [[float(f"{float(row[name]):.4g}") for name in names] for row in rows[1::2]]
    entry = {"return_mean": float(rows[-1]["return_mean"]), "success": deterministic, "success_drawn": drawn}
    entry |= {"steps": summary["global_step"], "seconds": round(summary["seconds"], 1), "flags": flags}
    entry |= {"columns": names, "curve": curve}
    print(f"{variant}, seed {seed}: {entry['return_mean']:.3f}, success {deterministic}, {drawn}", flush=True)
    report = read()
    report["results"].setdefault(variant, {})[str(seed)] = entry
    RESULTS.write_text(json.dumps(report) + "\n")


def read():
    """The results so far."""
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"env_id": ENV_ID, "results": {}}
    report |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    return report | {"versions": {name: version(name) for name in ("torch", "gymnasium", "numpy", "minigrid")}}


def draw(results):
    """Mean over seeds, with the range from the worst to the best: returns above, intrinsic rewards below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for variant, runs in results.items():
        for axis, name in zip(axes, ("return_mean", "intrinsic_reward")):
            columns = next(iter(runs.values()))["columns"]
            if name not in columns:
                continue
            length = min(len(entry["curve"]) for entry in runs.values())
            curves = np.array([entry["curve"][:length] for entry in runs.values()], float)
            steps, values = curves[:, :, 0].mean(0), curves[:, :, columns.index(name)]
            (line,) = axis.plot(steps, values.mean(0), label=f"{variant}, {len(runs)} seed{'s' * (len(runs) > 1)}")
            axis.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
            if variant == "PPO":
                line.set_linestyle("--")
    axes[0].set(title=ENV_ID, ylabel="mean return of the last 100 training episodes")
    axes[1].set(xlabel="environment steps", ylabel="mean intrinsic reward", yscale="log")
    axes[0].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_formatter("{x:,.0f}")
    figure.savefig(RESULTS.with_suffix(".png"), dpi=110)


def table(results):
    """Print a line for each variant: means over seeds, the worst seed in brackets."""
    print("\n| | seeds | return, last 100 episodes | success, deterministic | success, drawn | steps | seconds |")
    print("|---|---|---|---|---|---|---|")
    for variant, runs in results.items():
        cells = [variant, " ".join(sorted(runs))]
        for name in ("return_mean", "success", "success_drawn"):
            figures = [entry[name] for entry in runs.values()]
            cells.append(f"{statistics.mean(figures):.3f} ({min(figures):.3f})")
        cells.append(f"{max(entry['steps'] for entry in runs.values()):,}")
        cells.append(f"{statistics.median(entry['seconds'] for entry in runs.values()):.0f}")
        print("|", " | ".join(cells), "|")


def main():
    """Run, save, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args()
    for seed in args.seeds:
        for variant in args.variants:
            run(variant, seed)
    results = read()["results"]
    results = {variant: results[variant] for variant in VARIANTS if variant in results}
    draw(results)
    table(results)


if __name__ == "__main__":
    main()
