"""Environments for tests/test_ppod.py. `--env-id ppod_envs:DemoChain-v0` imports this module, which registers them."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class DemoChain(gym.Env):
    """Pays 1 after `length` right choices out of two and nothing before; a wrong one ends the episode.

    Which choice is right differs from place to place, so that chance finds the end with probability 2 ** -length.
    """

    action_space = spaces.Discrete(2)

    def __init__(self, length=24):
        self.length = length
        self.observation_space = spaces.Box(0, 1, (length + 1,), np.float32)

    def observe(self):
        return np.eye(self.length + 1, dtype=np.float32)[self.at]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self.observe(), {}

    def step(self, action):
        if action != right_choice(self.at):
            return self.observe(), 0.0, True, False, {}
        self.at += 1
        return self.observe(), float(self.at == self.length), self.at == self.length, False, {}


def right_choice(at):
    """The choice that leads on from place `at` of a Chain."""
    return at * (at + 1) // 2 % 2


class Recall(gym.Env):
    """Shows a cue of -1 or 1, then twice nothing, and pays 1 for the choice that the cue asked for: needs memory."""

    action_space, observation_space = spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.at = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        self.at += 1
        over = self.at == 3
        return np.array([0, self.at], np.float32), float(over and action == self.cue), over, False, {}


class Reach(gym.Env):
    """One dimension, Box actions in [-1, 1]: move to 5, where a reward of 1 ends the episode; truncated after 30."""

    action_space, observation_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.steps = 0.0, 0
        return np.array([self.at], np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.at, self.steps = self.at + 0.5 * float(action[0]), self.steps + 1
        there = self.at >= 5
        return np.array([self.at], np.float32), float(there), there, self.steps == 30 and not there, {}


for env in (DemoChain, Recall, Reach):
    gym.register(f"{env.__name__}-v0", env, disable_env_checker=True)
