"""What masks are worth on Taxi-v4: ppo_masked.py beside its two ablations, scored exactly, and the figure of all three.

    python benchmarks/ppo_masked_taxi.py [--seeds 1 2 3 4 5] [--jobs 1] [--flags "…"]

Every run is `python ppo_masked.py --seed SEED --eval-every 10000`, with nothing, `--no-mask` or `--naive-mask`. The
score of saved weights is the expected return of the deterministic policy over all start states and Taxi's own limit of
200 steps, walked through the transition table: no luck is in it. (A greedy policy in a deterministic environment has
one return per start state.) Writes benchmarks/results/ppo_masked_taxi.json and .png, and prints a table.
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
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
VARIANTS = {"masked": "", "naive mask": "--naive-mask", "no mask": "--no-mask"}
MILESTONES = 50_000, 100_000, 200_000, 300_000

sys.path.insert(0, str(ROOT))
import ppo_masked  # noqa: E402


def taxi_tables():
    """(next state, reward, terminated, mask of valid actions), each (500, 6), and the start distribution (500,)."""
    taxi = gym.make("Taxi-v4").unwrapped
    table = [[taxi.P[state][action][0] for action in range(6)] for state in range(500)]
    assert all(len(taxi.P[state][action]) == 1 for state in range(500) for action in range(6))  # no chance in it
    _, states, rewards, terminated = np.array(table).transpose(2, 0, 1)
    masks = np.array([taxi.action_mask(state) for state in range(500)], bool)
    return states.astype(int), rewards, terminated.astype(bool), masks, np.array(taxi.initial_state_distrib)


def exact_score(policy, tables, limit=200):
    """(mean, standard deviation) of the return over the start distribution; `policy` (500,) has an action per state."""
    next_states, rewards, terminated, _, start = tables
    state, total, playing = np.arange(500), np.zeros(500), np.ones(500, bool)
    for _ in range(limit):
        action = policy[state]
        total += playing * rewards[state, action]
        playing &= ~terminated[state, action]
        state = next_states[state, action]
    mean = start @ total
    return float(mean), float(np.sqrt(start @ (total - mean) ** 2))


def best_score(tables):
    """The score of an optimal policy, by value iteration."""
    next_states, rewards, terminated, *_ = tables
    values = np.zeros(500)
    for _ in range(200):
        choices = rewards + ~terminated * values[next_states]
        values = choices.max(1)
    return exact_score(choices.argmax(1), tables)


def run(variant, seed, flags, tables):
    """[(step, exact mean, exact deviation)] of all weights that one run saves, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "ppo_masked.py"), "--seed", str(seed), "--eval-every", "10000"]
        command += [*shlex.split(VARIANTS[variant]), *shlex.split(flags)]
        command += ["--eval-episodes", "1", "--no-progress", "--run-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(done.stderr)
        points, masks = [], tables[3] | (variant == "no mask")
        for path in Path(folder, "models").glob("[0-9]*.pt"):
            agent = ppo_masked.load(folder, path.stem)
            policy = agent.mode(np.arange(500), masks)[:, 0]
            points.append((int(path.stem), *exact_score(policy, tables)))
        seconds = json.loads(Path(folder, "summary.json").read_text())["seconds"]
    points.sort()
    print(f"{variant:10s} seed {seed}: {points[-1][1]:8.2f} after {points[-1][0]:,} steps, {seconds:.0f} s", flush=True)
    return points, seconds


def at(points, milestone):
    """The score of the first saved weights at or after that many steps (those of the end, for the end)."""
    return next((mean for step, mean, _ in points if step >= milestone), points[-1][1])


def draw(results, best, path):
    """Mean over seeds, and each seed as a thin line, of all variants."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    for (name, entry), color in zip(results.items(), ("tab:blue", "tab:orange", "tab:green")):
        curves = [np.array(points).T for points in entry["curves"]]
        grid = np.linspace(max(c[0, 0] for c in curves), min(c[0, -1] for c in curves), 200)
        for curve in curves:
            axis.plot(curve[0], curve[1], color=color, alpha=0.25, linewidth=0.8)
        mean = np.mean([np.interp(grid, c[0], c[1]) for c in curves], 0)
        axis.plot(grid, mean, color=color, linewidth=2, label=f"{name}, mean of {len(curves)} seeds")
    axis.axhline(best, color="black", linestyle=":", label=f"optimum, {best:.2f}")
    axis.set(xlabel="environment steps", ylabel="expected return, over all start states", ylim=(-210, 20))
    axis.set(title="Taxi-v4: what action masks are worth")
    axis.grid(alpha=0.3)
    axis.legend(loc="center")
    figure.savefig(path, dpi=120)


def main():
    """Run, save, draw, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--flags", default="")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--redraw", action="store_true", help="only draw the figure again, from the saved results")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    if args.redraw:
        report = json.loads(Path(RESULTS / "ppo_masked_taxi.json").read_text())
        draw(report["results"], report["optimum"], RESULTS / "ppo_masked_taxi.png")
        return
    tables = taxi_tables()
    best, spread = best_score(tables)
    results = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for variant in args.variants:
            runs = list(pool.map(lambda seed, v=variant: run(v, seed, args.flags, tables), args.seeds))
            results[variant] = {
                "milestones": {m: [round(at(points, m), 3) for points, _ in runs] for m in MILESTONES},
                "seconds": [round(seconds, 1) for _, seconds in runs],
                "curves": [points for points, _ in runs],
            }
    print(f"\noptimum {best:.2f} ± {spread:.2f}\n\n| steps |", *(f"{name} |" for name in results))
    print("|---|" + "---|" * len(results))
    for m in MILESTONES:
        cells = [entry["milestones"][m] for entry in results.values()]
        print(f"| {m:,} |", *(f"{statistics.mean(cell):.2f} (worst {min(cell):.2f}) |" for cell in cells))
    if not args.no_save:
        report = {"seeds": args.seeds, "flags": args.flags, "optimum": best, "jobs_side_by_side": args.jobs}
        report |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores"}
        report |= {"versions": {name: version(name) for name in ("torch", "gymnasium", "numpy")}, "results": results}
        RESULTS.mkdir(exist_ok=True)
        Path(RESULTS / "ppo_masked_taxi.json").write_text(json.dumps(report))
        draw(results, best, RESULTS / "ppo_masked_taxi.png")


if __name__ == "__main__":
    main()
