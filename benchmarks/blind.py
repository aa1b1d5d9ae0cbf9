"""CartPole without velocities: only who remembers the last observation knows them. benchmarks.blind:BlindCartPole-v0"""

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv


def make(**kwargs):
    """CartPole that shows the position of the cart and the angle of the pole."""
    env = CartPoleEnv(**kwargs)
    shown = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[::2], shown)


gym.register("BlindCartPole-v0", make, max_episode_steps=500)
