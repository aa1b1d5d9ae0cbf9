"""Score of ppo_masked.py where 55 of 70 actions are invalid at each step: tests/masked_envs.py, Needle-v0.

    python benchmarks/ppo_masked_needle.py [--seeds 1 2 3 4 5]

One right action per step, episodes of 100: the best return is 100, a random valid action earns 6.7. Training takes at
most 2,048 steps; the score is the mean of 20 deterministic episodes of the final weights. Beside it `--naive-mask`,
which does not mask when learning. Writes benchmarks/results/ppo_masked_needle.json and prints a table.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = "--env-id masked_envs:Needle-v0 --num-envs 8 --num-steps 128 --num-minibatches 8 --update-epochs 40"
FLAGS += " --learning-rate 3e-3 --gamma 0 --ent-coef 0 --hidden-sizes 512 --total-timesteps 1950 --eval-every 10000"


def run(seed, *more):
    """The summary of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "ppo_masked.py"), *FLAGS.split(), "--seed", str(seed), *more]
        path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command += ["--no-progress", "--run-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(done.stderr)
        return json.loads(Path(folder, "summary.json").read_text())


def main():
    """Run, save, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    report = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "flags": FLAGS, "seeds": args.seeds}
    for name, more in (("masked", []), ("naive mask", ["--naive-mask"])):
        summaries = [run(seed, *more) for seed in args.seeds]
        returns = [summary["eval_return_mean"] for summary in summaries]
        steps = max(summary["global_step"] for summary in summaries)
        report[name] = {"returns": returns, "steps": steps}
        print(f"{name:10s} mean {statistics.mean(returns):.1f}, worst {min(returns):.1f}, after {steps:,} steps")
    if not args.no_save:
        path = Path(__file__).parent / "results" / "ppo_masked_needle.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
