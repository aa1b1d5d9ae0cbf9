"""Kill a run again and again, resume it each time, and compare what it leaves behind with an unbroken run, bit for bit.

    python tests/kills.py ppo.py                                        # the names of the configurations
    python tests/kills.py ppo.py LunarLander --kills 30 --seed 1

The moments are drawn at random: the first two before the first checkpoint, the others up to two checkpoints after the
run was resumed. Prints one line; exit code 1 if weights, figures, evaluations, checkpoints or the list of files differ.
The tests in tests/runs use the functions below.
"""

import argparse
import csv
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
FEW = "--num-minibatches 2 --update-epochs 2 --eval-episodes 2 --no-progress --total-timesteps 20000"
SMALL = f"{FEW} --num-envs 4 --num-steps 32 --checkpoint-every 800"
IMAGES = f"{FEW} --update-epochs 1 --num-envs 2 --num-steps 16 --total-timesteps 800 --checkpoint-every 64"
PONG = "--env-id ALE/Pong-v5 --max-episode-steps 100"
LIT = """--env-id run_envs:Match-v0 --env-kwargs {"observation":"channels_last"}"""
CONFIGURATIONS = {
    "ppo.py": {
        "CartPole": f"--env-id CartPole-v1 {SMALL}",
        "LunarLander": f"--env-id LunarLander-v3 {SMALL}",
        "BipedalWalker": f"--env-id BipedalWalker-v3 --max-episode-steps 300 {SMALL}",
        "V-trace": f"--env-id Pendulum-v1 --estimator vtrace --normalize-obs --normalize-reward {SMALL}",
        "images": f"{PONG if importlib.util.find_spec('ale_py') else LIT} {IMAGES}",
        "own wrapper": f"--env-id run_envs:Unclean-v0 --wrappers run_envs.Own --normalize-obs {SMALL}",
    }
}


def surroundings(**extra):
    """Environment variables of a run: threads that sleep while they wait, no window, no CUDA device, our modules."""
    path = os.pathsep.join([str(HERE / "runs"), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "SDL_VIDEODRIVER": "dummy"}
    return os.environ | own | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path} | extra


def start(folder, *line, **variables):
    """`python line…` in `folder`, as a process whose output is collected."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": surroundings(**variables)}
    return subprocess.Popen([sys.executable, *map(str, line)], cwd=folder, **pipes)


def shell(folder, *line, code=0, **variables):
    """Run `python line…` in `folder`, expect the exit code; (stdout, stderr)."""
    process = start(folder, *line, **variables)
    out, err = process.communicate()
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out, err


def given_again(flags):
    """Those flags that name code of ours: a run folder may not ask for it, so --resume needs them again."""
    pairs = zip(flags, flags[1:])
    return [word for flag, value in pairs if flag in ("--env-id", "--wrappers") and "run_envs" in value
            for word in (flag, value)]  # fmt: skip


# --------------------------------------------------------------------------------------------------- two run folders


def table(path):
    """The rows of a csv file, header first, without the columns that hold times."""
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    kept = [i for i, name in enumerate(header) if name not in ("seconds", "sps")]
    assert len(kept) < len(header) and all(len(row) == len(header) for row in rows), path
    return [[row[i] for i in kept] for row in [header, *rows]]


def torch_file(path):
    """A file of weights, or a checkpoint without its times (and metrics.csv, which is compared by itself)."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    if "run" in state:
        step, seconds, episodes, evaluations, _ = state["run"]
        assert seconds > 0
        without_times = [(step, *scores) for step, _, *scores in evaluations]
        state["run"] = {"step": step, "episodes": episodes, "evaluations": without_times}
    return state


def summary(path):
    """summary.json without its times."""
    figures = json.loads(path.read_text())
    return {name: value for name, value in figures.items() if name not in ("seconds", "steps_per_second")}


def difference(one, other, where):
    """Where two nests of dicts, sequences and tensors differ first, or ""."""
    if type(one) is not type(other):
        return f"{where}: {type(one)}, {type(other)}"
    if isinstance(one, torch.Tensor):
        return "" if one.dtype == other.dtype and torch.equal(one, other) else where
    if isinstance(one, dict):
        if list(one) != list(other):
            return f"{where}: {list(one)}, {list(other)}"
        parts = [(one[key], other[key], f"{where}/{key}") for key in one]
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)} entries"
        parts = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(one, other))]
    else:
        return "" if repr(one) == repr(other) else f"{where}: {one!r}, {other!r}"
    return next(filter(None, (difference(*part) for part in parts)), "")


def run_difference(one, other):
    """Where two finished runs differ in anything but the time they took, or "": files, figures, every saved weight,
    the optimiser and the returns of all episodes in the checkpoint, evaluations, the summary."""
    files = [sorted(str(path.relative_to(run)) for path in run.rglob("*")) for run in (one, other)]
    if files[0] != files[1]:
        return f"files: {sorted(set(files[0]) ^ set(files[1]))}"
    readers = {"metrics.csv": table, "evaluations.csv": table, "summary.json": summary}
    for name in files[0]:
        read = torch_file if name.endswith(".pt") else readers.get(name)
        if read and (found := difference(read(one / name), read(other / name), name)):
            return found
    return ""


# -------------------------------------------------------------------------------------------------------------- kills


def checkpoints(run):
    """(number of checkpoints of a finished run, seconds between two of them)."""
    args = json.loads((run / "config.json").read_text())["args"]
    figures = json.loads((run / "summary.json").read_text())
    number = figures["global_step"] / args["checkpoint_every"]
    return round(number), figures["seconds"] / number


def kill_and_resume(folder, script, run, flags, kills, unbroken, seed=0):
    """Kill -9 the run `run` in `folder` at `kills` random moments, resume it each time, let it finish at last.

    `unbroken`: the folder of the same run, unbroken, from which the moments are estimated. Returns how many kills found
    it at work, and how many of these came before its first checkpoint.
    """
    number, between = checkpoints(unbroken)
    ending = next(unbroken.glob("checkpoint.*")).suffix
    written, seen = 0, 0  # checkpoints so far, and when the last was written
    rng = random.Random(seed)
    config, checkpoint = folder / run / "config.json", folder / run / f"checkpoint{ending}"
    done, early = 0, 0
    while True:
        stamp = config.stat().st_mtime_ns if config.exists() else 0
        begin = ["--resume", run, "--no-progress", *given_again(flags)] if stamp else [*flags, "--run-dir", run]
        process = start(folder, script, *begin)
        try:
            if done < kills:
                while process.poll() is None and not (config.exists() and config.stat().st_mtime_ns != stamp):
                    time.sleep(0.002)  # until it has made, or put back, its folder
                share = (
                    0.8 * number * (done + 1) / kills
                )  # of its checkpoints: the last kill must still find it at work
                due = time.time() + rng.uniform(0, between if done < 2 or written > share else 2 * between)
                while process.poll() is None and time.time() < due:
                    time.sleep(0.002)
                    if checkpoint.exists() and checkpoint.stat().st_mtime_ns != seen:
                        written, seen = written + 1, checkpoint.stat().st_mtime_ns
                        if written > share:
                            due = min(due, time.time() + rng.uniform(0, between / 2))
                process.kill()
            _, err = process.communicate()
        finally:
            process.kill()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, err
            return done, early
        done += 1
        early += not checkpoint.exists()


def main():
    """Run one configuration; print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=CONFIGURATIONS)
    parser.add_argument("name", nargs="?", help="a configuration of the script; without it, all are listed")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1, help="of the moments; the run has the seed 1")
    args = parser.parse_args()
    known = CONFIGURATIONS[args.script]
    if args.name not in known:
        sys.exit("\n".join(f"{name}: {flags}" for name, flags in known.items()))
    flags = known[args.name].split()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(HERE.parent / args.script, folder)
        shell(folder, args.script, *flags, "--run-dir", "unbroken")
        done, early = kill_and_resume(folder, args.script, "killed", flags, args.kills, folder / "unbroken", args.seed)
        number, _ = checkpoints(folder / "unbroken")
        found = run_difference(folder / "unbroken", folder / "killed")
    (env_id,) = re.findall(r"--env-id (\S+)", known[args.name])
    verdict = f"DIFFERENT, {found}" if found else "the same, bit for bit"
    kills = f"{done} kills, {early} before the first of {number} checkpoints"
    print(f"{args.script}, {args.name} ({env_id}): {kills}: {verdict}")
    sys.exit(bool(found) or done < args.kills)


if __name__ == "__main__":
    main()
