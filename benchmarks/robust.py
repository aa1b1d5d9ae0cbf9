"""How far dqn.py's settings for CartPole-v1 may be wrong before it fails: one setting at a time is halved or doubled.

    python benchmarks/robust.py [--seeds 1 2]      # two seeds of each setting, 80 s a run

Asked: no mean Q beyond 1.5 times its bound, max r / (1 - gamma), and no score below 400. Scores are those of scores.py.
Writes benchmarks/results/robust.json, a run at a time; skips what is there for the script's text.
"""

import argparse
import csv
import sys

from common import ROOT, keep, missing, number, read, stamp, table
from scores import folder_of, measure

sys.path.insert(0, str(ROOT))
import dqn  # noqa: E402

ENV_ID = "CartPole-v1"


def variants():
    """{name: flags}, made from the settings that a plain run has."""
    args = dqn.tuned(env_id=ENV_ID)
    found = {"as tuned": ""} | {f"gamma {gamma}": f"--gamma {gamma}" for gamma in (0.98, 0.99)}
    for name in ("learning_rate", "target_network_frequency"):
        for factor in (0.5, 2):
            value = getattr(args, name)
            found[f"{name} x {factor}"] = f"--{name.replace('_', '-')} {type(value)(value * factor)}"
    return {name: flags for name, flags in found.items() if flags != f"--gamma {args.gamma}"}


def largest_q(folder):
    """The largest mean Q of a run, as a share of its bound."""
    with (folder / "metrics.csv").open() as file:
        rows = [(float(row["q"]), float(row["q_bound"])) for row in csv.DictReader(file)]
    return round(max(q / bound for q, bound in rows if bound > 0), 3)  # False for NaN: no update, or no copy, yet


def main():
    """Measure what is missing; print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2])
    seeds = parser.parse_args().seeds
    stamped = stamp("dqn.py", ENV_ID)
    for name, flags in variants().items():
        for seed in missing("robust", name, stamped["text"], seeds):
            run = ("dqn.py", ENV_ID, seed, flags, stamped["text"])
            figures = measure(*run)
            keep("robust", name, stamped, seed, {"returns": figures["returns"], "q": largest_q(folder_of(*run))})
    rows = [
        [name, *[", ".join(map(number, entry[field])) for field in ("returns", "q")]]
        for name, entry in read("robust").items()
    ]
    print(table(["setting", "score of each seed", "largest mean Q / bound"], *rows))


if __name__ == "__main__":
    main()
