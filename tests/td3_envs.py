"""Environments for tests/test_ddpg_td3.py. `--env-id td3_envs:Aim-v0` imports this module, which registers them."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Aim(gym.Env):
    """One-step episodes: a target of -1 or 1 is shown, the reward is 1 - (action - target / 2)^2. At best 1."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (1,))

    def __init__(self, end="terminated"):
        self.end = end

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = np.full(1, self.np_random.choice([-1, 1]), np.float32)
        return self.obs, {}

    def step(self, action):
        reward = 1 - float(action[0] - self.obs[0] / 2) ** 2
        return self.obs.copy(), reward, self.end == "terminated", self.end == "truncated", {}


class Later(gym.Env):
    """Two steps. The action of the first is rewarded, with 1 - action^2, only after the second."""

    observation_space, action_space = spaces.Box(0, 2, (2,)), spaces.Box(-1, 3, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.first = 0, 0.0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.at += 1
        if self.at == 1:
            self.first = float(action[0])
        reward = 1 - self.first**2 if self.at == 2 else 0.0
        return np.array([self.at, abs(self.first) / 2], np.float32), reward, self.at == 2, False, {}


class Push(gym.Env):
    """Starting from 0, an action of up to ±1 moves by a tenth of it, and costs action^2 / 10. Reaching ±1 pays 3.

    There are twenty steps. Who does nothing gets 0.
    """

    observation_space, action_space = spaces.Box(-3, 3, (1,)), spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.x = 0, 0.0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.at += 1
        self.x += 0.1 * float(action[0])
        there = abs(self.x) >= 1
        return (
            np.array([self.x], np.float32),
            3.0 * there - 0.1 * float(action[0]) ** 2,
            there,
            self.at == 20 and not there,
            {},
        )


class Unbounded(Aim):
    """Has no bound on its second action."""

    action_space = spaces.Box(np.array([-1, -np.inf]), np.array([1, np.inf]), dtype=np.float64)


class FaultyBox(gym.Env):
    """Episodes of ten steps. In step `at` of its life (not of the episode) it returns NaN as the named field."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (1,))

    def __init__(self, field, at):
        self.field, self.at, self.life = field, at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        self.life += 1
        bad = {self.field: np.nan} if self.life == self.at else {}
        obs = np.array([0, bad.get("observation", 0)], np.float32)
        return obs, bad.get("reward", 1.0), self.steps == 10, False, {}


for env in (Aim, Later, Push, Unbounded, FaultyBox):
    gym.register(f"{env.__name__}-v0", env, disable_env_checker=True)
