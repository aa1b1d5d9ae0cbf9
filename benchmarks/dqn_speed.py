"""Speed and memory of dqn.py beside Stable-Baselines3's DQN, at equal settings, in alternation, on one thread.

    pip install stable-baselines3==2.9.2        # in this or another virtual environment
    python benchmarks/dqn_speed.py [--peer-python PATH] [--repeats 3] [--steps 10000]

CartPole-v1, without double DQN (which the peer lacks) and with it, in three settings: an update of 64 transitions every
4 steps with two hidden layers of 64, in one environment and in four, and CleanRL's, an update of 128 transitions every
10 steps with hidden layers of 120 and 84. Rates are environment steps per CPU second of the process inside training,
without its first 2,000 steps: on an idle machine these are seconds of the clock, on a busy one they still compare.
Memory is the peak resident size. Writes benchmarks/results/dqn_speed.json and prints a table.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SB3 = """
import time, torch
torch.set_num_threads(1)
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
model = DQN("MlpPolicy", make_vec_env("CartPole-v1", {num_envs}, seed=1), train_freq={train_frequency} // {num_envs},
            gradient_steps=1, batch_size={batch_size}, learning_starts=1_000, buffer_size=10_000, learning_rate=2.5e-4,
            target_update_interval=500, exploration_fraction=0.5, policy_kwargs=dict(net_arch={hidden_sizes}),
            device="cpu", seed=1)
model.learn(2_000)
begin = time.process_time()
model.learn({steps}, reset_num_timesteps=False)
print("RATE", {steps} / (time.process_time() - begin))
"""
OURS = """
import sys, tempfile, time
sys.path.insert(0, {root!r})
import dqn

write_row, times = dqn.Run.write_row, []
dqn.Run.write_row = lambda run: times.append((run.step, time.process_time())) or write_row(run)
with tempfile.TemporaryDirectory() as folder:
    dqn.train(dqn.Args(
        num_envs={num_envs}, train_frequency={train_frequency}, gradient_steps=1, batch_size={batch_size},
        double={double}, hidden_sizes=tuple({hidden_sizes}), learning_starts=1_000, buffer_size=10_000,
        learning_rate=2.5e-4, anneal_lr=False, target_network_frequency=500, tau=1.0,
        exploration_fraction=0.5,
        total_timesteps=2_000 + {steps}, eval_every=10**9, checkpoint_every=10**9, eval_episodes=1, progress=False,
        run_dir=folder))
warm, end = next(x for x in times if x[0] >= 2_000), times[-1]
print("RATE", (end[0] - warm[0]) / (end[1] - warm[1]))
"""
SMALL = {"train_frequency": 4, "batch_size": 64, "hidden_sizes": [64, 64]}
SETTINGS = {
    "every 4 steps, batch 64, 64-64": SMALL | {"num_envs": 1},
    "the same in 4 environments": SMALL | {"num_envs": 4},
    "every 10 steps, batch 128, 120-84": {
        "num_envs": 1,
        "train_frequency": 10,
        "batch_size": 128,
        "hidden_sizes": [120, 84],
    },
}


def run(python, code):
    """(steps per CPU second, peak resident MB) of a child process on one thread."""
    reader = f"import resource, subprocess, sys; r = subprocess.run({[python, '-c', code]!r}); "
    reader += "print('PEAK', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024); sys.exit(r.returncode)"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", reader], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.split("RATE")[1].split()[0]), float(done.stdout.split("PEAK")[1])


def main():
    """Measure, print, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    code = (
        "import torch as t, gymnasium as g, stable_baselines3 as s; print(s.__version__, t.__version__, g.__version__)"
    )
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread used",
        "python": platform.python_version(),
        "steps": args.steps,
        "stable_baselines3, torch, gymnasium": subprocess.check_output(
            [args.peer_python, "-c", code], text=True
        ).strip(),
    }
    for name, setting in SETTINGS.items():
        results = {"Stable-Baselines3": [], "dqn.py --no-double": [], "dqn.py": []}
        for _ in range(args.repeats):
            given = setting | {"steps": args.steps, "root": str(ROOT)}
            results["Stable-Baselines3"].append(run(args.peer_python, SB3.format(**given)))
            results["dqn.py --no-double"].append(run(sys.executable, OURS.format(**given, double=False)))
            results["dqn.py"].append(run(sys.executable, OURS.format(**given, double=True)))
        rates = {label: [rate for rate, _ in runs] for label, runs in results.items()}
        peaks = {label: [peak for _, peak in runs] for label, runs in results.items()}
        report[name] = {"steps_per_cpu_second": rates, "peak_megabytes": peaks}
        path = Path(__file__).parent / "results" / "dqn_speed.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(report, indent=1))
        print(name)
        for label, runs in rates.items():
            ratios = [rate / base for rate, base in zip(runs, rates["Stable-Baselines3"])]
            print(
                f"  {label:20s} {statistics.median(runs):8,.0f} steps/s (min {min(runs):,.0f}, max {max(runs):,.0f})  "
                f"{statistics.median(ratios):5.2f} x SB3 (pairwise median, min {min(ratios):.2f})  "
                f"peak {max(peaks[label]):.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
