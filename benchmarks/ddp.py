"""What ppo_ddp.py exchanges, and what a second process brings. Needs an idle machine with two cores or more.

    python benchmarks/ddp.py exchange                 # messages and bytes of a rollout and of an update; seconds
    python benchmarks/ddp.py speed --rounds 3         # one and two processes in turn; four and eight by calculation
    python benchmarks/ddp.py learn --seeds 1 2 3      # LunarLander-v3 to the end, one and two processes in turn

`speed` and `learn` write benchmarks/results/ddp_speed.json and ddp_learn.json.
"""

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "exercises")]
WORLDS = {
    "LunarLander-v3": "--env-id LunarLander-v3 --total-timesteps 49152",
    "2 ms a step": "--env-id LunarLander-v3 --total-timesteps 16384 --wrappers ddp.Slow",
    "CartPole-v1": "--env-id CartPole-v1 --total-timesteps 49152",
}
NO_PAUSES = "--eval-every 1000000000 --checkpoint-every 1000000000 --eval-episodes 1 --no-progress"


class Slow(gym.Wrapper):
    """An environment that computes for 2 ms in each step."""

    def step(self, action):
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:
            pass
        return super().step(action)


def exchange():
    """Count what two processes send in a rollout of LunarLander-v3 with its tuned settings."""
    import torch
    from processes import Threads

    import ppo_ddp

    class Counting(Threads):
        sent = {"all_gather_object": [], "all_reduce": []}

        def meet(self, call, value):
            if self.own.rank == 0:
                size = value.nbytes if isinstance(value, torch.Tensor) else len(pickle.dumps(value))
                self.sent[call].append(size)
            return super().meet(call, value)

    with tempfile.TemporaryDirectory() as folder:
        args = ppo_ddp.tuned(env_id="LunarLander-v3", total_timesteps=100, run_dir=f"{folder}/run", progress=False)

        def work(rank):
            if rank > 0:
                ppo_ddp.exchange("waiting")
            return ppo_ddp.train(args)

        ppo_ddp.evaluate = lambda *_: (0.0, 0.0)
        Counting(2).run(ppo_ddp, work)
    _, *rollout = Counting.sent["all_gather_object"]  # the first: that the run has begun
    moments, gradients, *_ = Counting.sent["all_reduce"]
    print(
        f"a rollout: {len(rollout)} messages, {sum(rollout):,} bytes; {len(Counting.sent['all_reduce']) // 2} updates"
    )
    print(f"an update: 2 messages; moments {moments} bytes, gradients and metrics {gradients:,} bytes")


def train(processes, flags, folder):
    """Train; return the rows of metrics.csv as an array (step, seconds) and the summary."""
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    command = [*launch, str(ROOT / "ppo_ddp.py"), *flags.split(), "--run-dir", folder]
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    rows = np.genfromtxt(f"{folder}/metrics.csv", delimiter=",", skip_header=1, usecols=(0, 1), ndmin=2)
    return rows, json.loads(Path(folder, "summary.json").read_text())


def speed(rounds):
    """Steps a second of one and two processes, from the first row of metrics.csv to the last; the median ratio."""
    results = {}
    for name, flags in WORLDS.items():
        rates = {1: [], 2: []}
        for _ in range(rounds):
            for processes in rates:
                with tempfile.TemporaryDirectory() as folder:
                    rows, _ = train(processes, f"{flags} {NO_PAUSES}", f"{folder}/run")
                steps, seconds = rows[-1] - rows[0]
                rates[processes].append(steps / seconds)
        one, two = (statistics.median(rates[processes]) for processes in rates)
        ratio = statistics.median(second / first for first, second in zip(rates[1], rates[2]))
        exchanging = max(0, 1 / two - 1 / one / 2)  # seconds a step that do not shrink
        table = {1: one, 2: two} | {K: 1 / (1 / one / K + exchanging * K / 2) for K in (4, 8)}
        results[name] = {"steps_per_second": table, "ratio": ratio, "rates": rates}
        calculated = ", ".join(f"{K}: {table[K]:,.0f}" for K in table)
        print(f"{name}: steps a second {calculated} (4 and 8 calculated); two processes: {ratio:.2f} times one")
    (HERE / "results/ddp_speed.json").write_text(json.dumps(results, indent=1) + "\n")


def learn(seeds):
    """Whole runs of LunarLander-v3: scores of the last weights over 100 episodes, and seconds."""
    path = HERE / "results/ddp_learn.json"
    results = [row for row in json.loads(path.read_text()) if row["seed"] not in seeds] if path.exists() else []
    for seed in seeds:
        for processes in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                flags = f"--env-id LunarLander-v3 --seed {seed} --eval-episodes 100 --no-progress"
                _, summary = train(processes, flags, f"{folder}/run")
            row = {"processes": processes, "seed": seed, "seconds": summary["seconds"]}
            results.append(row | {"score": summary["eval_return_mean"]})
            print(results[-1], flush=True)
            path.write_text(json.dumps(results, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["exchange", "speed", "learn"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    if given.what == "exchange":
        exchange()
    elif given.what == "speed":
        speed(given.rounds)
    else:
        learn(given.seeds)


if __name__ == "__main__":
    main()
