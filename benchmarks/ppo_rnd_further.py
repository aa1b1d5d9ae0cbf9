"""How far ppo_rnd.py gets in harder tasks of MiniGrid, with the settings that solve MultiRoom-N4-S5.

    python benchmarks/ppo_rnd_further.py [ENV_ID …] [--seeds 1 2] [--steps 1000000]
    python benchmarks/ppo_rnd_further.py --seeds      # only the table, from the saved results

Each run is merged into benchmarks/results/ppo_rnd_further.json as soon as it ends: the mean return of the last 100
training episodes, the best such mean on the way, the share of 100 episodes of the final weights (deterministic actions,
drawn actions) that reach the goal, and the curve.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ppo_rnd_multiroom import ROOT, read, successes

RESULTS = Path(__file__).parent / "results" / "ppo_rnd_further.json"
ENV_IDS = ["MiniGrid-MultiRoom-N6-v0", "MiniGrid-KeyCorridorS3R3-v0", "MiniGrid-DoorKey-16x16-v0"]
AS_TUNED = "--num-envs 16 --num-minibatches 8 --learning-rate 1e-3"


def run(env_id, seed, steps):
    """Train once; merge figures and curve into the results."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--env-id {env_id} --seed {seed} --total-timesteps {steps} {AS_TUNED}"
        command = [sys.executable, str(ROOT / "ppo_rnd.py"), *flags.split(), "--run-dir", folder]
        command += ["--no-progress", "--eval-every", "1000000000"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(done.stderr)
        with Path(folder, "metrics.csv").open() as file:
            rows = [{name: float(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
        deterministic, drawn = successes("ppo_rnd.py", folder)
    names = ["step", "return_mean", "intrinsic_reward", "predictor_loss"]
    entry = {"return_mean": rows[-1]["return_mean"], "success": deterministic, "success_drawn": drawn}
    entry["best_return_mean"] = max(row["return_mean"] for row in rows if row["episodes"] >= 100)
    entry |= {"steps": int(rows[-1]["step"]), "seconds": round(rows[-1]["seconds"], 1), "flags": flags}
    entry |= {"columns": names, "curve": [[float(f"{row[name]:.4g}") for name in names] for row in rows[4::5]]}
    print(f"{env_id}, seed {seed}: {entry['return_mean']:.3f}, success {deterministic}, {drawn}", flush=True)
    report = saved()
    report["results"].setdefault(env_id, {})[str(seed)] = entry
    RESULTS.write_text(json.dumps(report) + "\n")


def saved():
    """The results so far."""
    results = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    return {"results": results} | {name: read()[name] for name in ("machine", "versions")}


def main():
    """Run, save, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env_ids", nargs="*", default=ENV_IDS, metavar="ENV_ID")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args()
    for seed in args.seeds:
        for env_id in args.env_ids:
            run(env_id, seed, args.steps)
    print("\n| | steps | return of the last 100 episodes: seeds | best on the way | success, drawn actions |")
    print("|---|---|---|---|---|")
    for env_id, runs in saved()["results"].items():
        columns = [f"{max(entry['steps'] for entry in runs.values()):,}"]
        for name in ("return_mean", "best_return_mean", "success_drawn"):
            columns.append(", ".join(f"{entry[name]:.3f}" for entry in runs.values()))
        print("|", " | ".join([env_id, *columns]), "|")


if __name__ == "__main__":
    main()
