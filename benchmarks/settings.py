"""What a setting of ppo.py is worth where nobody has tuned: each one halved, doubled or switched.

    python benchmarks/settings.py [--seeds 11 12] [--names NAME …] [--changes CHANGE …] [--draw]

Four quick environments of unknown.py's choosing half, 100,000 steps each. The effect of a change is the gain over
random play that it leaves, as a share of the gain with the defaults: 1 is no effect. Writes
benchmarks/results/settings.json, a seed at a time, skips what is there, and draws docs/settings.png.
"""

import argparse
import json
import sys

from common import ROOT, call, keep, missing, stamp
from results_page import effects
from unknown import ENVIRONMENTS

NAMES = ["Large rewards", "Double pendulum", "Reacher", "CartPole swing-up"]
CHANGES = [
    "--update-epochs 5", "--update-epochs 20", "--num-minibatches 16", "--num-minibatches 64",
    "--learning-rate 1.5e-4", "--learning-rate 6e-4", "--no-normalize-obs", "--no-normalize-reward",
    "--ent-coef 0", "--ent-coef 0.01", "--anneal-lr", "--gamma 0.98", "--gamma 0.995", "--num-steps 512",
    "--num-steps 2048", "--gae-lambda 0.9", "--gae-lambda 0.975", "--clip-coef 0.1", "--clip-coef 0.4",
    "--init-std 0.37",
]  # fmt: skip


def draw():
    """A row for each change, a dot for each environment."""
    from matplotlib.figure import Figure

    rows = effects()
    order = list(reversed(rows))
    figure = Figure(figsize=(8, 7), layout="constrained")
    axes = figure.subplots()
    axes.hlines(order, 0, 2.6, color="#dddddd", linewidth=1)
    for name in NAMES:
        here = [change for change in order if name in rows[change]]
        axes.plot([rows[change][name] for change in here], here, "o", markersize=4, label=name)
    axes.axvline(1, color="gray", linestyle="--")
    axes.set(xlabel="gain over random play, as a share of the gain with the defaults")
    axes.legend(fontsize=8)
    figure.savefig(ROOT / "docs" / "settings.png", dpi=100)


def main():
    """Measure what is missing, then draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[11, 12])
    parser.add_argument("--names", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--changes", nargs="*", default=["random", "defaults", *CHANGES], metavar="CHANGE")
    parser.add_argument("--draw", action="store_true", help="only draw what is measured")
    args = parser.parse_args()
    runs = [
        (seed, change, name)
        for seed in args.seeds
        for change in args.changes
        for name in args.names
        if ENVIRONMENTS[name][0] == "continuous" or "init-std" not in change
    ]
    for seed, change, name in [] if args.draw else runs:
        stamped = stamp("ppo.py", ENVIRONMENTS[name][1])
        if missing("settings", f"{name} {change}", stamped["text"], [seed]):
            side = "random" if change == "random" else "ours"
            flags = "" if change in ("random", "defaults") else change
            command = [sys.executable, ROOT / "benchmarks" / "unknown.py", "ppo", "--names", name, "--one", side]
            printed, _ = call(*command, "--seeds", seed, f"--flags={flags}")
            figures = json.loads(printed.split("FIGURES")[1])
            keep("settings", f"{name} {change}", stamped, seed, {key: figures[key] for key in ("returns", "seconds")})
    draw()


if __name__ == "__main__":
    main()
