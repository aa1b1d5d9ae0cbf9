"""Scores of a script with its TUNED settings, over several seeds.

    python benchmarks/scores.py ppo.py CartPole-v1 LunarLander-v3 [--seeds 1 2 3 4 5] [--flags="…"]
    python benchmarks/scores.py ppo.py CartPole-v1 LunarLander-v3 --random    # what random actions get
    python benchmarks/scores.py ppo.py CartPole-v1 LunarLander-v3 --confirm [--seeds 1]    # of another text

Every run is the plain command `python ppo.py --env-id ENV_ID --seed SEED --eval-episodes 100`. The score is the mean
return of 100 further deterministic episodes of its final weights. Runs lie in runs/scores, so one that was killed is
resumed. Writes benchmarks/results/ppo_scores.json, a seed at a time; skips what is there for the script's text.

--confirm trains one seed of scores that were measured on another text of the script. If it ends with the same return,
steps and curve, to the last digit, the other seeds' figures hold for today's text as well, and the entry says so.
"""

import argparse
import csv
import json
import re
import shlex
import sys
import zlib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from common import ROOT, call, keep, missing, read, stamp, thin, write

sys.path.insert(0, str(ROOT))


def folder_of(script, env_id, seed, flags, text):
    """Where a run lies. Many flags become their checksum: a name has at most 255 characters."""
    flags = flags if len(flags) < 100 else f"{zlib.crc32(flags.encode()):x}"
    return ROOT / "runs" / "scores" / re.sub(r"[^\w.=-]+", "_", f"{Path(script).stem} {env_id} {flags} {seed} {text}")


def measure(script, env_id, seed, flags, text):
    """Figures of one run. A run of the same text that was begun is gone on with."""
    folder = folder_of(script, env_id, seed, flags, text)
    memory = None  # of a run that was over before
    if not (folder / "summary.json").exists():
        begin = ["--env-id", env_id, "--seed", seed, "--eval-episodes", 100, *shlex.split(flags), "--run-dir", folder]
        begun = (folder / "config.json").exists()
        _, memory = call(sys.executable, ROOT / script, *(["--resume", folder] if begun else begin), "--no-progress")
    again = ["--evaluate", folder, "--model", "last", "--eval-episodes", 100, "--seed", 1000 * seed]
    settings = json.loads((folder / "config.json").read_text())["args"]
    if settings.get("wrappers") or ":" in env_id:  # a script asks whether they may be executed
        again += ["--env-id", env_id, "--env-kwargs", settings["env_kwargs"], "--wrappers", *settings["wrappers"]]
    printed, _ = call(sys.executable, ROOT / script, *again)
    run = json.loads((folder / "summary.json").read_text())
    with (folder / "metrics.csv").open() as file:
        rows = [(float(row["step"]), float(row["return_mean"])) for row in csv.DictReader(file)]
    figures = {"returns": float(printed.split("weights: ")[1].split()[0]), "steps": run["global_step"]}
    figures |= {"seconds": round(run["seconds"], 1), "memory": memory}
    return figures | {"curves": thin([row for row in rows if row[1] == row[1]])}  # NaN: no episode was over


def random_return(script, env_id):
    """The mean return of 100 episodes of random actions; of a team, the sum over agents."""
    module = import_module(Path(script).stem)
    args = module.tuned(env_id=env_id)
    space = module.make_envs(args, 100).action_space
    space.seed(0)
    return module.evaluate(SimpleNamespace(act=lambda obs: space.sample()), args)[0]


def confirm(name, key, stamped, seed, figures):
    """Whether a seed gives what was measured on another text; then let the whole entry hold for this one."""
    report = read(name)
    entry = report[key]
    place = entry["seeds"].index(seed)
    same = all(entry[field][place] == figures[field] for field in ("returns", "steps", "curves"))
    if same and entry["text"] != stamped["text"]:
        others = {"measured": entry.get("measured", entry["commit"]), "confirmed": seed}
        report[key] = entry | stamped | others
        write(name, report)
    return same


def main():
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script")
    parser.add_argument("env_ids", nargs="+")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--flags", default="")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--confirm", action="store_true")
    args = parser.parse_args()
    for env_id in args.env_ids:
        stamped = stamp(args.script, env_id)
        if args.random:
            key = f"{Path(args.script).stem} {env_id}"
            for seed in missing("random", key, stamped["text"], [0]):
                keep("random", key, stamped, seed, {"returns": round(random_return(args.script, env_id), 3)})
            continue
        name, key = f"{Path(args.script).stem}_scores", f"{env_id} {args.flags}".strip()
        if args.confirm and missing(name, key, stamped["text"], args.seeds[:1]):
            figures = measure(args.script, env_id, args.seeds[0], args.flags, stamped["text"])
            same = confirm(name, key, stamped, args.seeds[0], figures)
            print(env_id, args.seeds[0], "the same" if same else f"another: {figures['returns']}", flush=True)
        for seed in [] if args.confirm else missing(name, key, stamped["text"], args.seeds):
            figures = measure(args.script, env_id, seed, args.flags, stamped["text"])
            keep(name, key, stamped, seed, figures)
            print(env_id, seed, {field: value for field, value in figures.items() if field != "curves"}, flush=True)


if __name__ == "__main__":
    main()
