"""Environments for unknown.py: known tasks in which one thing is unusual. As --env-id: worlds:Actions-v0 …"""

from functools import partial

import gymnasium as gym
import minatar.gym
import numpy as np
from gymnasium.wrappers import RescaleAction, TransformObservation, TransformReward

minatar.gym.register_envs()  # its package does not do so when it is imported


def rescaled(env):
    """Observations of a Box in another unit: 10,000 times as large."""
    space = env.observation_space
    larger = gym.spaces.Box(1e4 * space.low, 1e4 * space.high, dtype=np.float32)
    return TransformObservation(env, lambda obs: np.float32(1e4 * obs), larger)


WORLDS = {  # id: the task, what is done to it, and its number of steps
    "Actions-v0": ("Pendulum-v1", partial(RescaleAction, min_action=30.0, max_action=1017.0), 200),
    "Large-v0": ("Acrobot-v1", partial(TransformReward, func=lambda reward: 1000 * reward), 500),
    "Small-v0": ("CartPole-v1", partial(TransformReward, func=lambda reward: 0.001 * reward), 500),
    "Units-v0": ("Acrobot-v1", rescaled, 500),
    "Offset-v0": ("Pendulum-v1", partial(TransformReward, func=lambda reward: reward + 100), 200),
    "Long-v0": ("Pendulum-v1", lambda env: env, 3000),
    "Taxi-v0": ("Taxi-v4", lambda env: env, 200),
    "Rainy-v0": ("Taxi-v4", lambda env: env, 200),
}


def make(task, change, steps, **kwargs):
    """The changed task."""
    return change(gym.make(task, max_episode_steps=steps, **kwargs))


for world, (task, change, steps) in WORLDS.items():
    gym.register(world, partial(make, task, change, steps))
