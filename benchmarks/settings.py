"""What a setting is worth where nobody has tuned: each one halved, doubled or switched.

    python benchmarks/settings.py [ppo dqn sac] [--seeds 11 12] [--names NAME …] [--changes=CHANGE …] [--draw]

Quick environments of unknown.py's choosing half, and its numbers of steps. The effect of a change is the gain over
random play that it leaves, as a share of the gain with the defaults: 1 is no effect. Writes
benchmarks/results/settings.json, a seed at a time, skips what is there, and draws docs/settings.png.
"""

import argparse
import json
import sys

from common import ROOT, call, keep, missing, stamp
from results_page import effects
from unknown import ENVIRONMENTS

SUITES = {  # script: (environments, changes)
    "ppo": (
        ["Large rewards", "Double pendulum", "Reacher", "CartPole swing-up"],
        ["--update-epochs 5", "--update-epochs 20", "--num-minibatches 16", "--num-minibatches 64",
         "--learning-rate 1.5e-4", "--learning-rate 6e-4", "--no-normalize-obs", "--no-normalize-reward",
         "--ent-coef 0", "--ent-coef 0.01", "--anneal-lr", "--gamma 0.98", "--gamma 0.995", "--num-steps 512",
         "--num-steps 2048", "--gae-lambda 0.9", "--gae-lambda 0.975", "--clip-coef 0.1", "--clip-coef 0.4",
         "--init-std 0.37"],
    ),
    "dqn": (
        ["Breakout", "FlappyBird"],
        ["--learning-rate 5e-4", "--learning-rate 2e-3", "--no-anneal-lr", "--train-frequency 8",
         "--train-frequency 2", "--batch-size 64", "--batch-size 256", "--gamma 0.98", "--gamma 0.995",
         "--target-network-frequency 250", "--target-network-frequency 1000", "--no-double", "--clip-error",
         "--exploration-fraction 0.1", "--exploration-fraction 0.4", "--end-e 0.1", "--normalize-obs",
         "--normalize-reward", "--hidden-sizes 128 128"],
    ),
    "sac": (
        ["CartPole swing-up", "Double pendulum"],
        ["--critic-learning-rate 1e-3", "--actor-learning-rate 1e-3", "--train-frequency 2", "--policy-frequency 1",
         "--normalize-obs", "--normalize-reward", "--gamma 0.98", "--tau 0.01", "--batch-size 128"],
    ),
}  # fmt: skip
BASE = {"dqn": "--no-normalize-reward"}  # flags of all runs of a script


def draw():
    """A panel for each script, a row for each change, a dot for each environment."""
    from matplotlib.figure import Figure

    rows = {script: effects(script) for script in SUITES}
    figure = Figure(figsize=(8, 14), layout="constrained")
    panels = figure.subplots(len(rows), sharex=True, height_ratios=[len(changes) + 3 for changes in rows.values()])
    for axes, (script, changes) in zip(panels, rows.items(), strict=True):
        order = list(reversed(changes))
        axes.hlines(order, 0, 3.6, color="#dddddd", linewidth=1)
        for name in SUITES[script][0]:
            here = [change for change in order if name in changes[change]]
            axes.plot([changes[change][name] for change in here], here, "o", markersize=4, label=name)
        axes.axvline(1, color="gray", linestyle="--")
        axes.set_title(f"{script}.py", loc="left")
        axes.legend(fontsize=8)
    panels[-1].set_xlabel("gain over random play, as a share of the gain with the defaults")
    figure.savefig(ROOT / "docs" / "settings.png", dpi=100)


def main():
    """Measure what is missing, then draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", default=list(SUITES), metavar="ppo, dqn or sac")
    parser.add_argument("--seeds", nargs="*", type=int, default=[11, 12])
    parser.add_argument("--names", nargs="*", choices=ENVIRONMENTS, metavar="NAME")
    parser.add_argument(
        "--changes", action="append", metavar="CHANGE", help="as --changes='--gamma 0.98'; may be repeated"
    )
    parser.add_argument("--draw", action="store_true", help="only draw what is measured")
    args = parser.parse_args()
    runs = [
        (script, seed, change, name)
        for script in args.scripts
        for seed in args.seeds
        for change in args.changes or ["random", "defaults", *SUITES[script][1]]
        for name in args.names or SUITES[script][0]
        if ENVIRONMENTS[name][0] == "continuous" or "init-std" not in change
    ]
    for script, seed, change, name in [] if args.draw else runs:
        stamped = stamp(f"{script}.py", ENVIRONMENTS[name][1])
        key = f"{script} {name} {change}"
        if missing("settings", key, stamped["text"], [seed]):
            side = "random" if change == "random" else "ours"
            flags = BASE.get(script, "") + ("" if change in ("random", "defaults") else f" {change}")
            command = [sys.executable, ROOT / "benchmarks" / "unknown.py", script, "--names", name, "--one", side]
            printed, _ = call(*command, "--seeds", seed, f"--flags={flags}")
            figures = json.loads(printed.split("FIGURES")[1])
            keep("settings", key, stamped, seed, {field: figures[field] for field in ("returns", "seconds")})
    draw()


if __name__ == "__main__":
    main()
