"""The critic's states EP and FP, with and without a GRU, and HAPPO, side by side in one figure.

    python benchmarks/mappo_variants.py [--env-id mpe2.simple_spread_v3] [--steps 150000] [--seeds 1 2 3]
        [--variants EP FP "EP, GRU" "FP, GRU" HAPPO]

Every run has the tuned settings. Adds to benchmarks/results/mappo_variants.json, where runs of other seeds and
variants stay, and draws benchmarks/results/mappo_variants.png from all of them.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
VARIANTS = {
    "EP": [],
    "FP": ["--state-type", "FP"],
    "EP, GRU": ["--recurrent", "--data-chunk-length", "5"],
    "FP, GRU": ["--state-type", "FP", "--recurrent", "--data-chunk-length", "5"],
    "HAPPO": ["--happo", "--no-share-policy"],
}


def curve(env_id, variant, steps, seed):
    """What one run came to: steps and mean returns of training, and the last evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "mappo.py"), "--env-id", env_id, "--seed", str(seed), *VARIANTS[variant]]
        command += ["--total-timesteps", str(steps), "--eval-every", str(10**9), "--eval-episodes", "100"]
        subprocess.run([*command, "--no-progress", "--run-dir", folder], check=True)
        with open(f"{folder}/metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))[4::5]  # the first rows have fewer than 100 episodes
        summary = json.loads(Path(folder, "summary.json").read_text())
    returns = [round(float(row["return_mean"]), 2) for row in rows]
    return {"steps": [int(row["step"]) for row in rows], "return_mean": returns, "summary": summary}


def draw(report, path):
    """The mean over seeds of each variant, with its range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    for name, runs in report["runs"].items():
        length = min(len(run["steps"]) for run in runs.values())
        returns = np.array([run["return_mean"][:length] for run in runs.values()])
        steps = next(iter(runs.values()))["steps"][:length]
        seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
        (line,) = axis.plot(steps, returns.mean(0), label=f"{name}, {seeds}")
        axis.fill_between(steps, returns.min(0), returns.max(0), color=line.get_color(), alpha=0.2)
    axis.set(
        xlabel="environment steps",
        ylabel="return summed over agents, mean of 100 training episodes",
        title=report["env_id"],
    )
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)


def main():
    """Run, merge, draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default="mpe2.simple_spread_v3")
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args()
    path = RESULTS / "mappo_variants.json"
    for seed in args.seeds:
        for variant in args.variants:
            run = curve(args.env_id, variant, args.steps, seed)
            report = json.loads(path.read_text()) if path.exists() else {"env_id": args.env_id, "runs": {}}
            report["runs"].setdefault(variant, {})[str(seed)] = run
            path.write_text(json.dumps(report))
            draw(report, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
