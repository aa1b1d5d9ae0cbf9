"""Kill runs at random moments, resume them, and compare what they come to with an unbroken run, bit for bit.

    python benchmarks/kills.py [NAME …] [--kills 30]      # NAME: as in RUNS below; none: all of them

A chain is a run that is killed (SIGKILL) after a random time and resumed, again and again, until it is over; then all
numbers in its folder but times must equal those of the unbroken run. Chains follow each other until there were enough
kills. Writes benchmarks/results/kills.json: for each name the number of kills, of chains, and of chains that differed,
with the hash of the script's text. Needs a system with fork (Linux, macOS).
"""

import argparse
import contextlib
import hashlib
import importlib
import multiprocessing
import os
import random
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, read, write

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from run_folder import content  # noqa: E402

SHORT = "--eval-episodes 5 --total-timesteps"
VTRACE = "--estimator vtrace --normalize-obs --normalize-reward"
RUNS = {  # name: script and flags
    "ppo CartPole": f"ppo --checkpoint-every 4000 {SHORT} 30000",
    "ppo LunarLander": f"ppo --env-id LunarLander-v3 --checkpoint-every 9000 {SHORT} 40000",
    "ppo BipedalWalker": f"ppo --env-id BipedalWalker-v3 --checkpoint-every 9000 {SHORT} 30000",
    "ppo V-trace": f"ppo --env-id Pendulum-v1 {VTRACE} --checkpoint-every 4000 {SHORT} 20000",
    "ppo images": f"ppo --env-id run_worlds:Picture-v0 --num-steps 32 --checkpoint-every 512 {SHORT} 3000",
    "ppo own wrapper": f"ppo --env-id Acrobot-v1 --wrappers run_worlds.Own --checkpoint-every 4000 {SHORT} 20000",
    "ppo_ddp CartPole": f"ppo_ddp --checkpoint-every 4000 {SHORT} 30000",
    "ppo_masked Taxi": f"ppo_masked --checkpoint-every 4000 {SHORT} 20000",
    "ppo_rnd CartPole": f"ppo_rnd --env-id CartPole-v1 --checkpoint-every 2000 {SHORT} 8000",
    "ppod CartPole": f"ppod --env-id CartPole-v1 --recurrent --checkpoint-every 2000 {SHORT} 8000",
    "reinforce CartPole": f"reinforce --checkpoint-every 4000 {SHORT} 30000",
    "dqn CartPole": f"dqn --learning-starts 500 --checkpoint-every 1000 {SHORT} 6000",
    "rainbow CartPole": f"rainbow --learning-starts 500 --checkpoint-every 500 {SHORT} 3000",
    "td3 Pendulum": f"ddpg_td3 --learning-starts 500 --checkpoint-every 500 {SHORT} 3000",
    "sac Pendulum": f"sac --learning-starts 500 --checkpoint-every 500 {SHORT} 2000",
    "es CartPole": f"es --checkpoint-every 4000 {SHORT} 40000",
    "qlearning CliffWalking": f"qlearning --checkpoint-every 2000 {SHORT} 10000",
    "mappo spread": f"mappo --checkpoint-every 4000 {SHORT} 12000",
    "maddpg spread": f"maddpg_matd3 --learning-starts 500 --checkpoint-every 500 {SHORT} 2000",
}


def play(script, flags):
    """What the command line does, silently; in a process of its own."""
    sys.argv = [f"{script.__name__}.py", *shlex.split(flags), "--no-progress"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        script.main()


def run(script, flags, seconds=None):
    """Run to the end, or for so many seconds; whether it came to its end."""
    process = multiprocessing.get_context("fork").Process(target=play, args=(script, flags))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    if process.exitcode not in (0, -9):
        sys.exit(f"exit code {process.exitcode}: {flags}")
    return process.exitcode == 0


def chain(script, flags, longest, rng):
    """Kill and resume a run until it is over; the number of kills."""
    own = re.findall(r"--(?:env-id|wrappers) \S+", flags)
    kills = 0
    begin = f"{flags} --run-dir run"
    while not run(script, begin, rng.uniform(0, longest)):
        kills += 1
        if Path("run/config.json").exists():
            begin = f"--resume run {' '.join(own) if ':' in flags or '--wrappers' in flags else ''}"
    return kills


def main():
    """Kill, compare, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--kills", type=int, default=30)
    args = parser.parse_args()
    for name in args.names or RUNS:
        script_name, flags = RUNS[name].split(" ", 1)
        script = importlib.import_module(script_name)
        rng = random.Random(name)
        kills, chains, differing = 0, 0, 0
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            begun = time.monotonic()
            run(script, f"{flags} --run-dir run")
            longest = 0.6 * (time.monotonic() - begun)
            unbroken = content(script)
            while kills < args.kills:
                Path("run").rename(f"run{chains}")
                kills += chain(script, flags, longest, rng)
                chains += 1
                resumed = content(script)
                different = [path for path in {**unbroken, **resumed} if unbroken.get(path) != resumed.get(path, 0)]
                differing += bool(different)
                print(*different, end="" if not different else "\n")
            os.chdir(ROOT)
        text = hashlib.sha256(Path(script.__file__).read_bytes()).hexdigest()
        entry = {"flags": RUNS[name], "kills": kills, "chains": chains, "differing": differing, "sha256": text}
        write("kills", read("kills") | {name: entry})
        print(f"{name}: {kills} kills in {chains} runs, {differing} differ from the unbroken one", flush=True)


if __name__ == "__main__":
    main()
