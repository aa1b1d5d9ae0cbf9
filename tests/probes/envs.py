"""Environments so small that the right answer is known: each isolates one thing that an algorithm has to get right."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Walk(gym.Env):
    """Episodes of planned lengths and ends, whatever the action; the observation says where in the plan we are.

    `plan` holds pairs (length, end), end being "terminated", "truncated" or "both"; it is repeated for ever. The
    observation is (name, episode, step), the reward of the step that leads to it is 10 episode + step.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,))

    def __init__(self, plan, name=0, action_space=None):
        self.plan, self.name, self.episode = plan, name, -1
        self.action_space = action_space or spaces.Discrete(2)

    def observe(self):
        return np.array([self.name, self.episode, self.at], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.at = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        length, end = self.plan[self.episode % len(self.plan)]
        self.at += 1
        assert self.at <= length, "stepped after the end of the episode"
        over = self.at == length
        flags = over and end in ("terminated", "both"), over and end in ("truncated", "both")
        return self.observe(), 10.0 * self.episode + self.at, *flags, {}


class Probe(gym.Env):
    """One-step episodes; the observation, drawn anew in each, is -1 or 1 (`varied`) or always 0."""

    observation_space = spaces.Box(-1, 1, (1,))

    def __init__(self, action_space=None, varied=False, end="terminated", reward=lambda obs, action: 1.0):
        self.action_space = action_space or spaces.Discrete(2)
        self.varied, self.end, self.reward = varied, end, reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = np.full(1, self.np_random.choice([-1, 1]) if self.varied else 0, np.float32)
        return self.obs, {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        reward = float(self.reward(self.obs[0], action))
        return self.obs.copy(), reward, self.end == "terminated", self.end == "truncated", {}


class Delayed(gym.Env):
    """Two steps; only the second is rewarded, as the first action deserves. The observation is the step's number."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 2, (1,))

    def __init__(self, reward=lambda first_action: 1.0):
        self.reward = reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.at += 1
        if self.at == 1:
            self.first_action = action
        reward = self.reward(self.first_action) if self.at == 2 else 0.0
        return np.full(1, self.at, np.float32), reward, self.at == 2, False, {}
