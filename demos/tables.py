"""Draw what Q-learning knows of two grid worlds after 10, 100 and 1,000 episodes of one run.

    python demos/tables.py [--path docs/films/tables.png]

qlearning.py trains and draws, as in values.png: the colour is the value of a cell, the arrow its best action.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import gymnasium as gym
import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from record import command_line

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import qlearning  # noqa: E402

EPISODES = (10, 100, 1000)
WORLDS = ("CliffWalking-v1", "FrozenLake-v1")


def tables_of(env_id):
    """The table after each of EPISODES, of a run that ends with the last."""
    tables = []
    play_episode = qlearning.play_episode

    def play_and_copy(agent, env, run, rng, args):
        result = play_episode(agent, env, run, rng, args)
        if run.num_episodes + 1 in EPISODES:
            tables.append(np.array(agent.tables[0]))
        return result

    with TemporaryDirectory() as folder, mock.patch.object(qlearning, "play_episode", play_and_copy):
        given = {"num_episodes": EPISODES[-1], "run_dir": f"{folder}/run", "progress": False}
        qlearning.train(qlearning.tuned(env_id=env_id, **given))
    return tables


def main():
    """Train in both worlds, and draw a row of pictures for each number of episodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=ROOT / "docs/films/tables.png")
    path = parser.parse_args(command_line()).path
    figure = Figure(figsize=(11, 8), layout="constrained")
    parts = figure.subfigures(len(EPISODES), len(WORLDS), width_ratios=(2.6, 1))
    for column, env_id in enumerate(WORLDS):
        world = gym.make(env_id).unwrapped
        for row, q in enumerate(tables_of(env_id)):
            values = np.where((q != 0).any(1), q.max(1), np.nan)
            qlearning.draw_world(parts[row, column], world, values, q.argmax(1))
            parts[row, column].suptitle(f"{env_id} after {EPISODES[row]:,} episodes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    main()
