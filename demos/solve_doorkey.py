"""Make a demonstration of MiniGrid's DoorKey: a scripted solver that sees the whole map plays once.

    python demos/solve_doorkey.py [--env-id MiniGrid-DoorKey-16x16-v0] [--seed 1] [--wrappers …]

The solver walks shortest ways: to the key, to the door, to the goal. What is saved is what an agent would have seen,
the partial view, and the actions. All flags are ppod.py's own. The file is in --target-agent-demos-dir, by default
my_demos/ENV_ID; the one of seed 1 is demos/MiniGrid-DoorKey-16x16-v0/solver.npz.
"""

import argparse
from collections import deque

import record

LEFT, RIGHT, FORWARD, PICKUP, TOGGLE = 0, 1, 2, 3, 5
STEPS = (1, 0), (0, 1), (-1, 0), (0, -1)  # east, south, west, north: MiniGrid's directions


def find(grid, kind):
    """The position of the only object of a kind."""
    cells = ((x, y) for x in range(grid.width) for y in range(grid.height))
    return next(cell for cell in cells if getattr(grid.get(*cell), "type", None) == kind)


def way(env, target):
    """The fewest turns and steps after which the agent faces the cell `target`, by breadth-first search."""
    start = (*map(int, env.agent_pos), int(env.agent_dir))
    queue, came = deque([start]), {start: None}
    while queue:
        x, y, direction = state = queue.popleft()
        ahead = x + STEPS[direction][0], y + STEPS[direction][1]
        if ahead == target:
            actions = []
            while came[state]:
                state, action = came[state]
                actions.append(action)
            return actions[::-1]
        cell = env.grid.get(*ahead)
        moves = [(LEFT, (x, y, (direction - 1) % 4)), (RIGHT, (x, y, (direction + 1) % 4))]
        if cell is None or (cell.type == "door" and cell.is_open):
            moves.append((FORWARD, (*ahead, direction)))
        for action, successor in moves:
            if successor not in came:
                came[successor] = state, action
                queue.append(successor)
    raise ValueError(f"no way to {target}")


def solve(env):
    """Yield the actions that fetch the key, open the door and walk to the goal."""
    for kind, action in (("key", PICKUP), ("door", TOGGLE), ("goal", FORWARD)):
        yield from way(env, find(env.grid, kind))
        yield action


def main():
    """Play one episode and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, flags = parser.parse_known_args()
    ppod = record.load_script(record.SCRIPT)
    recorder = record.Recorder(ppod, ppod.tuned(*flags))
    recorder.reset()
    for action in solve(recorder.envs.unwrapped.envs[0].unwrapped):
        recorder.step(action)


if __name__ == "__main__":
    main()
