"""Final evaluation scores of a script with its TUNED settings, five seeds each.

    python benchmarks/scores.py ppo.py ENV_ID … [--seeds 1 2 3 4 5] [--jobs 2] [--flags "…"]

Every run is the plain command `python ppo.py --env-id ENV_ID --seed SEED --eval-episodes 100`; the score is the mean of
the last evaluation (100 deterministic episodes of the final weights). Where a run stops as soon as an evaluation is
good enough (--stop-at-return), its final weights play another 100 episodes, and these count; so do its best weights,
those that --evaluate plays, whose score is kept beside that. Merges into benchmarks/results/ppo_scores.json, prints a
table, and, without --flags, keeps the learning curve of the first seed as ppo_ENV_ID.png beside it.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"


def score(script, env_id, seed, flags, keep_curve):
    """The summary of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / script), "--env-id", env_id, "--seed", str(seed), *shlex.split(flags)]
        command += ["--eval-episodes", "100", "--no-progress", "--run-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(done.stderr)
        if keep_curve:
            RESULTS.mkdir(exist_ok=True)
            shutil.copy(
                Path(folder, "learning_curve.png"), RESULTS / f"{Path(script).stem}_{env_id.replace('/', '-')}.png"
            )
        summary = json.loads(Path(folder, "summary.json").read_text())
        if json.loads(Path(folder, "config.json").read_text())["args"].get("stop_at_return") is not None:
            for model, name in (("last", "eval_return_mean"), ("best", "best_return_mean")):
                again = shlex.split(f"--model {model} --eval-episodes 100 --seed {seed + 500} --evaluate")
                command = [sys.executable, str(ROOT / script), *again, folder]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr)
                summary[name] = float(done.stdout.split(f"{model} weights: ")[1].split()[0])
        print(env_id, seed, summary, flush=True)
        return summary


def commit(script):
    """The commit that last changed a script, with a + if it has been changed since."""
    git = ["git", "-C", str(ROOT)]
    last = subprocess.run([*git, "log", "-1", "--format=%h", "--", script], capture_output=True, text=True).stdout
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", script]).returncode
    return last.strip() + "+" * changed


def main():
    """Run, merge, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("script")
    parser.add_argument("env_ids", nargs="+")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--flags", default="")
    args = parser.parse_args()
    path = RESULTS / f"{Path(args.script).stem}_scores.json"
    with ThreadPoolExecutor(args.jobs) as pool:
        for env_id in args.env_ids:
            runs = [
                pool.submit(score, args.script, env_id, seed, args.flags, seed == args.seeds[0] and not args.flags)
                for seed in args.seeds
            ]
            summaries = [run.result() for run in runs]
            report = json.loads(path.read_text()) if path.exists() else {}
            entry = report[f"{env_id} {args.flags}".strip()] = {
                "seeds": args.seeds,
                "returns": [summary["eval_return_mean"] for summary in summaries],
                "steps": [summary["global_step"] for summary in summaries],
                "seconds": [round(summary["seconds"], 1) for summary in summaries],
                "jobs_side_by_side": args.jobs,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "versions": {name: version(name) for name in ("torch", "gymnasium", "numpy")},
                "commit": commit(args.script),
            }
            if "best_return_mean" in summaries[0]:
                entry["returns of the best weights"] = [summary["best_return_mean"] for summary in summaries]
            RESULTS.mkdir(exist_ok=True)
            path.write_text(json.dumps(report, indent=1))
    print("\n| environment | mean of seeds | worst seed | over seeds | steps | seconds |\n|---|---|---|---|---|---|")
    for name, entry in json.loads(path.read_text()).items():
        returns = entry["returns"]
        spread = statistics.pstdev(returns)
        seconds = statistics.median(entry["seconds"])
        print(
            f"| {name} | {statistics.mean(returns):.1f} | {min(returns):.1f} | ± {spread:.1f} | "
            f"{max(entry['steps']):,} | {seconds:.0f} |"
        )


if __name__ == "__main__":
    main()
