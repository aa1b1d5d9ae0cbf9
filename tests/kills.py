"""Kill a run again and again, resume it each time, and compare what it leaves behind with an unbroken run, bit for bit.

    python tests/kills.py ppo.py                                        # the names of the configurations
    python tests/kills.py ppo.py LunarLander --kills 20 --seed 1

The moments are drawn at random: the first two before the first checkpoint, the others up to two checkpoints after the
run was resumed. Prints one line; exit code 1 if weights, figures, evaluations, checkpoints or the list of files differ.
The verdict is kept in benchmarks/results/kills.json, one for each script and configuration. The configurations are
`kills` in script_table.py; the tests in tests/runs use the functions below.
"""

import argparse
import csv
import hashlib
import importlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE / "runs")]
from script_table import SCRIPTS  # noqa: E402

RESULTS = HERE.parent / "benchmarks/results/kills.json"


def surroundings(**extra):
    """Environment variables of a run: threads that sleep while they wait, no window, no CUDA device, our modules."""
    path = os.pathsep.join([str(HERE / "runs"), str(HERE), os.environ.get("PYTHONPATH", "")])
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
    """Those flags that name code of the tests: a run folder may not ask for it, so --resume needs them again."""
    pairs = zip(flags, flags[1:])
    return [word for flag, value in pairs if flag in ("--env-id", "--wrappers") and "_envs" in value
            for word in (flag, value)]  # fmt: skip


# --------------------------------------------------------------------------------------------------- two run folders


def table(path):
    """The rows of a csv file, header first, without the columns that hold times."""
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    kept = [i for i, name in enumerate(header) if name not in ("seconds", "sps")]
    assert len(kept) < len(header) and all(len(row) == len(header) for row in rows), path
    return [[row[i] for i in kept] for row in [header, *rows]]


def saved(path, script):
    """A file of weights, or a checkpoint without its times (and metrics.csv, which is compared by itself)."""
    state = script.read_state(path)
    if "run" in state:
        step, seconds, episodes, evaluations, _, _ = state["run"]
        assert seconds > 0
        without_times = [(step, *scores) for step, _, *scores in evaluations]
        state["run"] = {"step": step, "episodes": episodes, "evaluations": without_times}
    return state


def script_of(run):
    """The module of the script that made this run folder."""
    return importlib.import_module(json.loads((run / "config.json").read_text())["script"])


def summary(path):
    """summary.json without its times."""
    figures = json.loads(path.read_text())
    return {name: value for name, value in figures.items() if name not in ("seconds", "steps_per_second")}


def difference(one, other, where):
    """Where two nests of dicts, sequences, tensors and arrays differ first, or ""."""
    if type(one) is not type(other):
        return f"{where}: {type(one)}, {type(other)}"
    if isinstance(one, np.ndarray):
        return "" if one.dtype == other.dtype and np.array_equal(one, other) else where
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
    script = script_of(one)
    readers = {"metrics.csv": table, "evaluations.csv": table, "summary.json": summary}
    for name in files[0]:
        read = partial(saved, script=script) if name.endswith(script.STATE) else readers.get(name)
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
    written, seen = 0, 0  # checkpoints so far, and when the last was written
    rng = random.Random(seed)
    config, checkpoint = folder / run / "config.json", folder / run / f"checkpoint{script_of(unbroken).STATE}"
    done, early = 0, 0
    while True:
        stamp = config.stat().st_mtime_ns if config.exists() else 0
        begin = ["--resume", run, "--no-progress", *given_again(flags)] if stamp else [*flags, "--run-dir", run]
        process = start(folder, script, *begin)
        try:
            if done < kills:
                while process.poll() is None and not (config.exists() and config.stat().st_mtime_ns != stamp):
                    time.sleep(0.002)  # until it has made, or put back, its folder
                share = 0.8 * number * (done + 1) / kills  # of its checkpoints: the last kill must find it at work
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


def keep(script, name, **result):
    """Put a verdict into RESULTS, beside those of other scripts and configurations."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(script, {})[name] = result
    ordered = {script: dict(sorted(results[script].items())) for script in sorted(results)}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")


def main():
    """Run one configuration; print the verdict, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("name", nargs="?", help="a configuration of the script; without it, all are listed")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the moments; the run has the seed 1")
    args = parser.parse_args()
    known = SCRIPTS[args.script].kills
    if args.name not in known:
        sys.exit("\n".join(f"{name}: {flags}" for name, flags in known.items()))
    flags = ["--no-progress", *known[args.name].split()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(HERE.parent / args.script, folder)
        shell(folder, args.script, *flags, "--run-dir", "unbroken")
        done, early = kill_and_resume(folder, args.script, "killed", flags, args.kills, folder / "unbroken", args.seed)
        number, _ = checkpoints(folder / "unbroken")
        found = run_difference(folder / "unbroken", folder / "killed")
        versions = json.loads((folder / "unbroken/config.json").read_text())["versions"]
        text = hashlib.sha256((folder / args.script).read_bytes()).hexdigest()[:12]
    shown = " ".join(flags[1:]).replace(f"{HERE.parent}/", "")
    verdict = f"DIFFERENT, {found}" if found else "the same, bit for bit"
    kills = f"{done} kills, {early} before the first of {number} checkpoints"
    print(f"{args.script}, {args.name} ({shown}): {kills}: {verdict}")
    keep(
        args.script,
        args.name,
        flags=shown,
        kills=done,
        before_the_first_checkpoint=early,
        checkpoints=number,
        verdict=verdict,
        seed=args.seed,
        sha256_of_the_script=text,
        versions=versions,
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
    )
    sys.exit(bool(found) or done < args.kills)


if __name__ == "__main__":
    main()
