"""Make a demonstration of the sparse MountainCar: always push the way the car is rolling.

    python demos/solve_mountaincar.py [--seed 0]

All flags are ppod.py's own. The file is in --target-agent-demos-dir, by default my_demos/MountainCar-v0; the one of
seed 0 is demos/MountainCar-v0/script.npz.
"""

import argparse

import record


def main():
    """Play one episode and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, flags = parser.parse_known_args()
    ppod = record.load_script(record.SCRIPT)
    recorder = record.Recorder(ppod, ppod.tuned("--env-id", "MountainCar-v0", *flags, seed=0))
    (_, velocity), _ = recorder.reset()
    over = False
    while not over:
        (_, velocity), _, terminated, truncated, _ = recorder.step(2 if velocity >= 0 else 0)
        over = terminated or truncated


if __name__ == "__main__":
    main()
