"""Speed of mappo.py on simple_spread, and the share of it that the environment takes.

    python benchmarks/mappo_speed.py [--repeats 3] [--steps 8000]

4 environments x 25 steps in one process, 5 epochs of 1 minibatch, two hidden layers of 128, one thread. In alternation:
bare random play through PettingZoo's parallel API, in one environment; and mappo.py, from the first to the last rollout
(set-up, evaluation and curve left out), with the time inside PettingZoo's own `step` and `reset` taken by a stopwatch
around them. Writes benchmarks/results/mappo_speed.json and prints a table.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(ROOT))

from mpe2 import simple_spread_v3  # noqa: E402

import mappo  # noqa: E402

COMMON = dict(num_envs=4, num_steps=25, update_epochs=5, num_minibatches=1, hidden_sizes=(128, 128), progress=False)
VARIANTS = {
    "mappo.py": {},
    "mappo.py --recurrent": {"recurrent": True},
    "mappo.py --state-type FP": {"state_type": "FP"},
    "mappo.py --happo --no-share-policy": {"happo": True, "share_policy": False},
    "mappo.py, its tuned settings": {
        "num_envs": 32,
        "update_epochs": 10,
        "num_minibatches": 8,
        "hidden_sizes": (64, 64),
    },
}
clock = [0.0]


def timed(function):
    """The same function, its time added to the clock."""

    def call(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            clock[0] += time.perf_counter() - start

    return call


def parallel_env(**kwargs):
    """simple_spread_v3 with a stopwatch."""
    env = simple_spread_v3.parallel_env(**kwargs)
    env.step, env.reset = timed(env.step), timed(env.reset)
    return env


def bare(steps):
    """Steps per second of random play."""
    env = simple_spread_v3.parallel_env()
    env.reset(seed=0)
    spaces = [env.action_space(agent) for agent in env.possible_agents]
    joint = [{a: space.sample() for a, space in zip(env.possible_agents, spaces)} for _ in range(200)]
    start = time.perf_counter()
    for t in range(steps):
        if not env.agents:
            env.reset()
        env.step(joint[t % 200])
    return steps / (time.perf_counter() - start)


def ours(steps, settings):
    """(steps per second, the environment's share of the time) of training."""
    measured = {}

    class TimedRun(mappo.Run):
        """A run that looks at the clocks when training begins, and when it is over, before the evaluation."""

        def new_envs(self):
            result = super().new_envs()
            clock[0] = 0.0
            measured["begun"] = time.perf_counter()
            return result

        def write_evaluation(self):
            seconds = time.perf_counter() - measured["begun"]
            measured.update(rate=self.step / seconds, share=clock[0] / seconds)
            super().write_evaluation()

    more = dict(total_timesteps=steps, eval_every=10**9, checkpoint_every=10**9, eval_episodes=1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = mappo.Args(env_id=f"{__name__}:parallel_env", run_dir=f"{folder}/run", **COMMON | more | settings)
        with mock.patch.object(mappo, "Run", TimedRun):
            mappo.train(args)
    return measured["rate"], measured["share"]


def main():
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    args = parser.parse_args()
    rates, shares = {"bare environment": []}, {}
    for _ in range(args.repeats):
        rates["bare environment"].append(bare(args.steps // 2))
        for name in args.variants:
            rate, share = ours(args.steps, VARIANTS[name])
            rates.setdefault(name, []).append(rate)
            shares.setdefault(name, []).append(share)
    report = {"steps_per_second": rates, "environment_share": shares, "steps": args.steps}
    report["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    report["versions"] = {name: version(name) for name in ("torch", "gymnasium", "numpy", "mpe2")}
    (ROOT / "benchmarks/results/mappo_speed.json").write_text(json.dumps(report, indent=1))
    print("| | steps per second, median (min) | share of the environment |\n|---|---|---|")
    for name, values in rates.items():
        share = f"{statistics.median(shares[name]):.0%}" if name in shares else ""
        print(f"| {name} | {statistics.median(values):,.0f} ({min(values):,.0f}) | {share} |")


if __name__ == "__main__":
    main()
