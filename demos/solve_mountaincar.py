"""Make the demonstration of the sparse MountainCar in demos/: always push the way the car is rolling.

python demos/solve_mountaincar.py [--seed 0] [--folder demos/MountainCar-v0]
"""

import argparse
from pathlib import Path

import record

HERE = Path(__file__).resolve().parent


def main():
    """Play one episode and save it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=str(HERE / "MountainCar-v0"))
    given = parser.parse_args()
    ppod = record.load_script(record.SCRIPT)
    args = ppod.tuned(env_id="MountainCar-v0", seed=given.seed, target_agent_demos_dir=given.folder)
    recorder = record.Recorder(ppod, args)
    (_, velocity), _ = recorder.reset()
    over = False
    while not over:
        (_, velocity), _, terminated, truncated, _ = recorder.step(2 if velocity >= 0 else 0)
        over = terminated or truncated


if __name__ == "__main__":
    main()
