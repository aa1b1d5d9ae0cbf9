"""What a listener returns that is told its goal: the most that talking can bring in mpe2's tasks with messages.

    python benchmarks/listener.py [--episodes 1000]

It hears the goal one step late, as a message arrives, and then flies there as fast as the task's physics allow. With
continuous actions, each axis is steered so that its distance is 0 two steps later, if a force in [-1, 1] can do that.
With discrete ones (rest, or a push of 1 along one axis), it looks three steps ahead. "Deaf" is a listener that never
hears anything and flies to the middle of the landmarks. Returns are summed over agents, as scripts count them. Writes
benchmarks/results/listener.json.
"""

import argparse
import importlib
import itertools

import numpy as np
from common import number, write

SPEAKER = {"listener_0": 0, "agent_0": 1, "agent_1": 0}  # which agent knows whose goal
SPEED, DAMPING, FORCE = 0.1, 0.25, 5.0  # of mpe2: x += 0.1 v; v <- 0.75 v + 0.1 * 5 u
MOVES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])  # the forces of mpe2's discrete actions
PLANS = np.array(list(itertools.product(range(5), repeat=3)))  # all sequences of three actions


def push(agent, goal):
    """The force u, one number an axis, that brings the agent to a point in two steps, clipped to [-1, 1].

    x'' = x + 0.1 v + 0.1 (0.75 v + 0.5 u) = goal
    """
    rest = goal - agent.state.p_pos - SPEED * (2 - DAMPING) * agent.state.p_vel
    return np.clip(rest / (SPEED * SPEED * FORCE), -1, 1)


def best_move(agent, goal):
    """The first action of the best plan: the least squared distance to the goal, summed until two steps after it."""
    places, speeds = agent.state.p_pos, agent.state.p_vel
    cost = 0
    for forces in [*MOVES[PLANS].swapaxes(0, 1), 0, 0]:
        places = places + SPEED * speeds
        speeds = (1 - DAMPING) * speeds + SPEED * FORCE * forces
        cost = cost + ((places - goal) ** 2).sum(axis=-1)
    return PLANS[np.argmin(cost), 0]


def play(env, seed, hears):
    """The return of an episode, summed over agents."""
    env.reset(seed=seed)
    world, total, t = env.unwrapped.world, 0.0, 0
    middle = np.mean([landmark.state.p_pos for landmark in world.landmarks], axis=0)
    while env.agents:
        spaces = {name: env.action_space(name) for name in env.agents}
        actions = {name: np.zeros(space.shape, space.dtype) for name, space in spaces.items()}
        for agent in world.agents:
            if agent.movable:
                goal = world.agents[SPEAKER[agent.name]].goal_b.state.p_pos if hears and t > 0 else middle
                if spaces[agent.name].shape:
                    right, up = push(agent, goal)
                    actions[agent.name][1:5] = np.clip([-right, right, -up, up], 0, 1)
                else:
                    actions[agent.name] = best_move(agent, goal)
        _, rewards, _, _, _ = env.step(actions)
        total += sum(rewards.values())
        t += 1
    return total


def main():
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    given = parser.parse_args()
    report = {}
    for env_id in ("mpe2.simple_speaker_listener_v4", "mpe2.simple_reference_v3"):
        for name in ("told", "deaf", "told, discrete", "deaf, discrete"):
            env = importlib.import_module(env_id).parallel_env(continuous_actions="discrete" not in name)
            returns = [play(env, seed, "told" in name) for seed in range(given.episodes)]
            error = np.std(returns) / given.episodes**0.5
            print(f"{env_id}, {name}: {number(np.mean(returns))} ± {number(error)}")
            report[f"{env_id}, {name}"] = {"returns": [round(np.mean(returns), 3)], "error": round(error, 3)}
    write("listener", report)


if __name__ == "__main__":
    main()
