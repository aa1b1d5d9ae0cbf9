"""Speed of maddpg_matd3.py on simple_spread, and the share of it that the environment takes.

    python benchmarks/maddpg_matd3_speed.py [--repeats 3] [--steps 4000]

Three agents with continuous actions, the tuned settings of the script unless a row says otherwise, one thread. In
alternation: bare random play through PettingZoo's parallel API, in one environment; and maddpg_matd3.py from the first
update on (set-up, evaluation and curve left out), with the time inside PettingZoo's own `step` and `reset` taken by a
stopwatch around them. Writes benchmarks/results/maddpg_matd3_speed.json and prints a table.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import tempfile
import time
from unittest import mock

import mappo_speed  # sets the number of threads, and the path that scripts are found on
from mappo_speed import ROOT, version

import maddpg_matd3

WARM_UP = 400  # steps of random actions
COMMON = maddpg_matd3.TUNED["mpe2.simple_spread_v3"] | {"learning_starts": WARM_UP, "progress": False}
VARIANTS = {
    "maddpg_matd3.py": {},
    "maddpg_matd3.py --algorithm maddpg": {"algorithm": "maddpg"} | maddpg_matd3.ALGORITHMS["maddpg"],
    "maddpg_matd3.py --state-type FP": {"state_type": "FP"},
    "maddpg_matd3.py --no-share-policy": {"share_policy": False},
    "maddpg_matd3.py, discrete actions": {"env_kwargs": "{}"},
}


def ours(steps, settings):
    """(steps per second, the environment's share of the time) of training, from the first update on."""
    begun, ended = [], []

    class Timed(maddpg_matd3.Run):
        def count(self, *given):
            super().count(*given)
            if not begun and self.step >= WARM_UP:
                mappo_speed.clock[0] = 0.0
                begun.extend([time.perf_counter(), self.step])

        def write_evaluation(self):
            ended.extend([time.perf_counter(), self.step, mappo_speed.clock[0]])
            super().write_evaluation()

    more = {"total_timesteps": WARM_UP + steps, "eval_every": 10**9, "checkpoint_every": 10**9, "eval_episodes": 1}
    given = COMMON | more | settings | {"env_id": "mappo_speed:parallel_env"}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        with mock.patch.object(maddpg_matd3, "Run", Timed):
            maddpg_matd3.train(maddpg_matd3.Args(run_dir=f"{folder}/run", **given))
    seconds = ended[0] - begun[0]
    return (ended[1] - begun[1]) / seconds, ended[2] / seconds


def main():
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4000)
    args = parser.parse_args()
    rates, shares = {"bare environment": []}, {}
    for _ in range(args.repeats):
        rates["bare environment"].append(mappo_speed.bare(args.steps))
        for name, settings in VARIANTS.items():
            rate, share = ours(args.steps, settings)
            rates.setdefault(name, []).append(rate)
            shares.setdefault(name, []).append(share)
    report = {"steps_per_second": rates, "environment_share": shares, "steps": args.steps}
    report["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    report["versions"] = {name: version(name) for name in ("torch", "gymnasium", "numpy", "mpe2")}
    (ROOT / "benchmarks/results/maddpg_matd3_speed.json").write_text(json.dumps(report, indent=1))
    print("| | steps per second, median (min) | share of the environment |\n|---|---|---|")
    for name, values in rates.items():
        share = f"{statistics.median(shares[name]):.0%}" if name in shares else ""
        print(f"| {name} | {statistics.median(values):,.0f} ({min(values):,.0f}) | {share} |")


if __name__ == "__main__":
    main()
