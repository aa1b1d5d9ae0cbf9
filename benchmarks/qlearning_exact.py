"""What the greedy policies of qlearning.py are worth exactly, beside the optimum, over five seeds and all algorithms.

    python benchmarks/qlearning_exact.py [--seeds 1 2 3 4 5]

The toy-text environments come with their whole transition table, `env.unwrapped.P`. So nothing has to be played: the
expected return of a policy over an episode is a sum over that table, and the optimum comes from value iteration. Each
run is `python qlearning.py --env-id ENV --algorithm ALGORITHM --seed SEED` with the flags shown; the policy is that of
the final table. Writes benchmarks/results/qlearning_exact.json and prints a table.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ("q-learning", "sarsa", "expected-sarsa", "double-q")
# (environment, arguments of its constructor, steps of the longest episode)
TASKS = {
    "CliffWalking-v1": ("CliffWalking-v1", {}, 1000),
    "Taxi-v4": ("Taxi-v4", {}, 200),
    "FrozenLake-v1": ("FrozenLake-v1", {}, 100),
    "FrozenLake-v1, not slippery": ("FrozenLake-v1", {"is_slippery": False}, 100),
}


def arrays(env):
    """(p, r, start): p (A, S, S) to states in which the episode goes on, r (A, S) the mean reward, start (S,)."""
    table, start = env.unwrapped.P, np.asarray(env.unwrapped.initial_state_distrib)
    p, r = np.zeros((len(table[0]), len(table), len(table))), np.zeros((len(table[0]), len(table)))
    for state, actions in table.items():
        for action, outcomes in actions.items():
            for probability, successor, reward, terminated in outcomes:
                r[action, state] += probability * reward
                p[action, state, successor] += probability * (not terminated)
    return p, r, start / start.sum()


def exact_return(env, policy, steps):
    """The expected undiscounted return of a policy (S,) over an episode of at most `steps` steps."""
    p, r, start = arrays(env)
    states, values = np.arange(len(start)), np.zeros(len(start))
    for _ in range(steps):
        values = r[policy, states] + p[policy, states] @ values
    return float(start @ values)


def optimal_values(env, gamma=1.0, sweeps=10_000):
    """Q* (A, S) by value iteration: Q(s, a) <- r + gamma sum_s' p max_a' Q(s', a')   (Sutton & Barto, eq. 4.10)."""
    p, r, _ = arrays(env)
    q = np.zeros_like(r)
    for _ in range(sweeps):
        previous, q = q, r + gamma * p @ q.max(0)
        if np.abs(q - previous).max() < 1e-12:
            break
    return q


def best_return(env, steps):
    """The highest expected return that any policy, even one that sees the clock, has within `steps` steps."""
    p, r, start = arrays(env)
    values = np.zeros(len(start))
    for _ in range(steps):
        values = (r + p @ values).max(0)
    return float(start @ values)


def learnt_return(task, algorithm, seed, flags):
    """(exact return of the final greedy policy, summary of the run)."""
    env_id, kwargs, steps = TASKS[task]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "qlearning.py"), "--env-id", env_id, "--env-kwargs", json.dumps(kwargs)]
        command += ["--algorithm", algorithm, "--seed", str(seed), "--no-progress", "--run-dir", folder, *flags]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(done.stderr)
        policy = np.load(Path(folder, "checkpoint.npz"))["q"].sum(0).argmax(1)
        return exact_return(gym.make(env_id, **kwargs), policy, steps), json.loads(
            Path(folder, "summary.json").read_text()
        )


def main():
    """Train, evaluate, print, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--algorithms", nargs="*", default=list(ALGORITHMS))
    parser.add_argument("--flags", default="", help="further flags of qlearning.py")
    args = parser.parse_args()
    path = Path(__file__).parent / "results" / "qlearning_exact.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    for task in args.tasks:
        env_id, kwargs, steps = TASKS[task]
        optimum = best_return(gym.make(env_id, **kwargs), steps)
        for algorithm in args.algorithms:
            runs = [learnt_return(task, algorithm, seed, shlex.split(args.flags)) for seed in args.seeds]
            returns = [value for value, _ in runs]
            report[f"{task}, {algorithm} {args.flags}".strip()] = {
                "seeds": args.seeds,
                "exact_returns": returns,
                "optimum": optimum,
                "steps": [summary["global_step"] for _, summary in runs],
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "versions": {name: version(name) for name in ("gymnasium", "numpy")},
            }
            path.write_text(json.dumps(report, indent=1))
            print(
                f"{task:30s} {algorithm:15s} mean {statistics.mean(returns):8.3f}  worst {min(returns):8.3f}  "
                f"optimum {optimum:7.3f}  steps {max(report[f'{task}, {algorithm} {args.flags}'.strip()]['steps']):,}",
                flush=True,
            )


if __name__ == "__main__":
    main()
