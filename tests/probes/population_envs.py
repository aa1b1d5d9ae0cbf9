"""Environments for the tests of es.py, and what its functions need of a Run and of a policy."""

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces


class Patience(gym.Env):
    """Action 1 waits, action 0 leaves: an episode ends by leaving or after `longest` steps. Waiting pays 1, leaving 0.

    The first observation is drawn in [-1, 1]; then its second entry counts the steps. Every step of the life of an
    environment is noted in `log`, so that a test sees what the slots did.
    """

    observation_space, action_space = spaces.Box(-100, 100, (2,)), spaces.Discrete(2)

    def __init__(self, longest=6):
        self.longest, self.log = longest, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.steps = self.np_random.uniform(-1, 1), 0
        self.log.append(("reset", seed))
        return np.array([self.start, 0], np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.steps += 1
        self.log.append(("step", int(action)))
        obs = np.array([self.start, self.steps], np.float32)
        return obs, float(action), action == 0, self.steps == self.longest, {}


class Target(gym.Env):
    """One-step episodes: the nearer the Box action is to `target` on average, the less is taken away. No observation.

    With `bounds` the action space is [-bounds, bounds], else unbounded.
    """

    observation_space = spaces.Box(0, 1, (1,))

    def __init__(self, target=(0.5, -0.25), bounds=None):
        self.target = np.array(target, np.float32)
        self.action_space = spaces.Box(-(bounds or np.inf), bounds or np.inf, self.target.shape)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return np.zeros(1, np.float32), -float(np.square(action - self.target).sum()), True, False, {}


class Constant(gym.Env):
    """Episodes of three steps that pay 2 each, whatever the action."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), 2.0, self.steps == 3, False, {}


for env in (Patience, Target, Constant):
    gym.register(f"{env.__name__}-v0", env, disable_env_checker=True)


class Notes:
    """What play_generation needs of a Run."""

    def __init__(self, generation=0):
        self.step = 0
        self.generation = lambda: generation

    def check_finite(self, **values):
        for name, value in values.items():
            assert np.isfinite(value).all(), name


def policy_for(script, env_id="Patience-v0", **settings):
    """(untrained policy, its Args, its Slots), with a population of four unless something else is said."""
    args = script.Args(env_id=env_id, **{"population_size": 4, "hidden_sizes": ()} | settings)
    envs = script.make_envs(args, args.population_size)
    return script.make_agent(args, envs), args, script.Slots(envs, args)


def randomize(policy, seed=0):
    """Give the last layer, which begins with zeros, something to say."""
    policy.theta.copy_(torch.randn(len(policy.theta), generator=torch.Generator().manual_seed(seed)))
