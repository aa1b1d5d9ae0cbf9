"""Steps per second of qlearning.py beside those of the environment alone, in one process, in alternation.

    python benchmarks/qlearning_speed.py [--env-id Taxi-v4] [--steps 100000] [--repeats 5]

"Alone" is the plain loop that does nothing but step the environment, and reset it where an episode ends: once with
actions drawn beforehand at random, and once with the very actions that the run took, so that it resets as often as the
run did (a trained taxi is done in 13 steps, a random one in 200). Learning is timed as a whole, rows of metrics.csv and
all, but without evaluations and checkpoints. Writes benchmarks/results/qlearning_speed.json and prints a table.
"""

import argparse
import contextlib
import csv
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

import gymnasium as gym
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import qlearning  # noqa: E402

ALGORITHMS = ("q-learning", "sarsa", "expected-sarsa", "double-q")


class Noted(gym.Wrapper):
    """Notes every action."""

    taken = []

    def step(self, action):
        self.taken.append(action)
        return self.env.step(action)


def alone(env_id, actions):
    """Steps per second of the environment with these actions."""
    env = gym.make(env_id)
    env.reset(seed=1)
    begun = time.perf_counter()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return len(actions) / (time.perf_counter() - begun)


def learning(env_id, steps, algorithm, wrappers=()):
    """Steps per second of a run, as its metrics.csv has them before the evaluation at its end."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        never = dict(eval_every=10**9, checkpoint_every=10**9, eval_episodes=1, progress=False)
        more = dict(total_timesteps=steps, algorithm=algorithm, wrappers=wrappers, run_dir=folder)
        qlearning.train(qlearning.tuned(env_id=env_id, **never, **more))
        *_, last = csv.DictReader(Path(folder, "metrics.csv").open())
        return float(last["sps"])


def main():
    """Measure, print, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default="Taxi-v4")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    qlearning.Run.draw_curve = qlearning.draw_values = lambda *_: None  # after the run: not timed, but slow
    drawn = np.random.default_rng(0).integers(gym.make(args.env_id).action_space.n, size=args.steps).tolist()
    learning(args.env_id, args.steps, "q-learning", (f"{__name__}.Noted",))  # also warms up
    taken = Noted.taken[: args.steps]
    rates = {name: [] for name in ("environment alone", "environment alone, the run's actions", *ALGORITHMS)}
    for _ in range(args.repeats):
        rates["environment alone"].append(alone(args.env_id, drawn))
        rates["environment alone, the run's actions"].append(alone(args.env_id, taken))
        for algorithm in ALGORITHMS:
            rates[algorithm].append(learning(args.env_id, args.steps, algorithm))
    report = {
        "environment": args.env_id,
        "steps": args.steps,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one used",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("gymnasium", "numpy")},
        "steps_per_second": rates,
    }
    path = Path(__file__).parent / "results" / "qlearning_speed.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1))
    for name, values in rates.items():
        shares = [
            [value / base for value, base in zip(values, rates[f"environment alone{which}"])]
            for which in ("", ", the run's actions")
        ]
        print(
            f"{name:38s} {statistics.median(values):9,.0f} steps/s   of the environment alone: "
            f"{statistics.median(shares[0]):.0%} (min {min(shares[0]):.0%}), "
            f"with the same actions {statistics.median(shares[1]):.0%} (min {min(shares[1]):.0%})"
        )


if __name__ == "__main__":
    main()
