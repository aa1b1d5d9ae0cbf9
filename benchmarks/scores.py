"""Scores of a script with its TUNED settings, over several seeds.

    python benchmarks/scores.py ppo.py CartPole-v1 LunarLander-v3 [--seeds 1 2 3 4 5] [--flags="…"]
    python benchmarks/scores.py ppo.py CartPole-v1 LunarLander-v3 --random    # what random actions get
    python benchmarks/scores.py ppo.py CartPole-v1 LunarLander-v3 --confirm 50000    # scores of another text

Every run is the plain command `python ppo.py --env-id ENV_ID --seed SEED --eval-episodes 100`. The score is the mean
return of 100 further deterministic episodes of its final weights. Runs lie in runs/scores, so one that was killed is
resumed. Writes benchmarks/results/ppo_scores.json, a seed at a time; skips what is there for the script's text.

--confirm is for scores that were measured on another text of the script. It trains seed 1 for so many steps with the
commit that was measured, and with today's text. If all that metrics.csv has of both is the same, to the last digit, the
scores hold for today's text as well, and the entry says so.
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

from common import ROOT, call, keep, missing, read, stamp, text_of, thin, write
from text import lengths_of

sys.path.insert(0, str(ROOT))


def folder_of(script, env_id, seed, flags, text):
    """Where a run lies. Many flags become their checksum: a name has at most 255 characters."""
    flags = flags if len(flags) < 100 else f"{zlib.crc32(flags.encode()):x}"
    return ROOT / "runs" / "scores" / re.sub(r"[^\w.=-]+", "_", f"{Path(script).stem} {env_id} {flags} {seed} {text}")


def train(script, env_id, seed, flags, text):
    """(folder, memory) of one run. A run of the same text that was begun is gone on with."""
    folder = folder_of(script, env_id, seed, flags, text)
    if (folder / "summary.json").exists():
        return folder, None
    begin = ["--env-id", env_id, "--seed", seed, "--eval-episodes", 100, *shlex.split(flags), "--run-dir", folder]
    begun = (folder / "config.json").exists()
    _, memory = call(sys.executable, ROOT / script, *(["--resume", folder] if begun else begin), "--no-progress")
    return folder, memory


def measure(script, env_id, seed, flags, text):
    """Figures of one run."""
    folder, memory = train(script, env_id, seed, flags, text)
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


def metrics_of(folder):
    """{column: its texts} of a run's metrics.csv."""
    with (folder / "metrics.csv").open() as file:
        head, *rows = csv.reader(file)
    return dict(zip(head, zip(*rows, strict=True), strict=True))


def random_return(script, env_id):
    """The mean return of 100 episodes of random actions; of a team, the sum over agents."""
    module = import_module(Path(script).stem)
    args = module.tuned(env_id=env_id)
    space = module.make_envs(args, 100).action_space
    space.seed(0)
    return module.evaluate(SimpleNamespace(act=lambda obs: space.sample()), args)[0]


def script_at(commit, script):
    """A script as a commit has it, among the other files of that commit."""
    folder = ROOT / "runs" / "commits" / commit
    if not folder.exists():
        call("git", "-C", ROOT, "worktree", "add", "--detach", folder, commit)
    return folder / script


def confirm(name, key, stamped, steps):
    """Whether both texts of a script train alike; if so, the entry holds for today's text as well."""
    entry = read(name)[key]
    env_id, _, flags = key.partition(" ")
    measured = script_at(entry["commit"], stamped["script"])
    if text_of(measured, env_id) != entry["text"]:
        return False  # of a file that was not committed, or hashed in another way
    if lengths_of(measured, env_id) != lengths_of(stamped["script"], env_id):
        return False
    flags = f"{flags} --total-timesteps {steps} --eval-episodes 1"
    runs = []
    for file, text in ((measured, entry["text"]), (stamped["script"], stamped["text"])):
        folder, _ = train(file, env_id, 1, flags, text)
        runs.append(metrics_of(folder))
    columns = runs[0].keys() & runs[1].keys() - {"seconds"}
    same = all(runs[0][column] == runs[1][column] for column in columns)
    if same:
        write(name, read(name) | {key: entry | stamped | {"measured": entry.get("measured", entry["commit"])}})
    return same


def main():
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script")
    parser.add_argument("env_ids", nargs="+")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--flags", default="")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--confirm", type=int, metavar="STEPS")
    args = parser.parse_args()
    for env_id in args.env_ids:
        stamped = stamp(args.script, env_id)
        if args.random:
            key = f"{Path(args.script).stem} {env_id}"
            for seed in missing("random", key, stamped["text"], [0]):
                keep("random", key, stamped, seed, {"returns": round(random_return(args.script, env_id), 3)})
            continue
        name, key = f"{Path(args.script).stem}_scores", f"{env_id} {args.flags}".strip()
        if args.confirm and read(name)[key]["text"] != stamped["text"]:
            print(key, "the same" if confirm(name, key, stamped, args.confirm) else "another", flush=True)
        for seed in [] if args.confirm else missing(name, key, stamped["text"], args.seeds):
            figures = measure(args.script, env_id, seed, args.flags, stamped["text"])
            keep(name, key, stamped, seed, figures)
            print(env_id, seed, {field: value for field, value in figures.items() if field != "curves"}, flush=True)


if __name__ == "__main__":
    main()
