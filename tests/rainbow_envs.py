"""An environment for rainbow.py's tests. `--env-id rainbow_envs:Frames-v0` imports this module, which registers it."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Frames(gym.Env):
    """Observations are stacks of the last three frames (3, 36, 36). Which action is right can be seen in two of them.

    A frame is wholly dark or lit; the right action is 1 if the two newest frames differ, and pays 1/8. Eight steps.
    """

    observation_space = spaces.Box(0, 255, (3, 36, 36), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, stacked=True):
        self.stacked = stacked

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bits, self.steps = list(self.np_random.integers(2, size=3)), 0
        return self.observe(), {}

    def observe(self):
        bits = self.bits[-3:] if self.stacked else self.bits[:-4:-1]  # newest last, or first
        return np.full((36, 36, 3), np.array(bits) * 255, np.uint8).transpose(2, 0, 1)

    def step(self, action):
        reward = float(action == (self.bits[-1] != self.bits[-2])) / 8
        self.bits.append(int(self.np_random.integers(2)))
        self.steps += 1
        return self.observe(), reward, self.steps == 8, False, {}


gym.register("Frames-v0", Frames, disable_env_checker=True)
