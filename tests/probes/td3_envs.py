"""For the tests of ddpg_td3.py: small environments with continuous actions, and training on batches that are given."""

from unittest import mock

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from tests.tools import rehearse

OBS = spaces.Box(-np.inf, np.inf, (3,))
ACT = spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32))


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
        reward = 3.0 * there - 0.1 * float(action[0]) ** 2
        return np.array([self.x], np.float32), reward, there, self.at == 20 and not there, {}


class Still(gym.Env):
    """Nothing ever happens: zeros are observed, 0 is paid, and no episode ends."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, self.observation_space.dtype), {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


def new_agent(script, obs_space=OBS, action_space=ACT, seed=1, **settings):
    """An ActorCritic with small networks for these spaces."""
    torch.manual_seed(seed)
    agent = script.ActorCritic(obs_space, action_space, script.Args(**{"hidden_sizes": (8,)} | settings))
    agent.observation_space = obs_space  # for `learn`
    return agent


def random_batch(script, rng, size=16, obs=3, actions=2):
    """Transitions of random numbers, a third of them terminated."""
    columns = [rng.normal(size=(size, obs)), rng.uniform(-1, 1, (size, actions))]
    columns += [rng.normal(size=size) * 3, rng.normal(size=(size, obs))]
    return script.Transitions(*map(torch.Tensor, columns), torch.as_tensor(rng.random(size) < 0.3))


def play(script, *makers, **settings):
    """Train without a folder. Returns the Run, whose part "buffer" is the ReplayBuffer."""
    given = {"hidden_sizes": (32, 32), "batch_size": 32, "learning_starts": 100, "buffer_size": 3_000, "gamma": 0.5}
    given |= {"tau": 0.02, "actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3}
    return rehearse(script, *makers, buffer="ReplayBuffer", loss="polyak", **given | settings)


def collect(script, *makers, **settings):
    """As `play`, without an evaluation."""
    with mock.patch.object(script, "evaluate", lambda *_: (0.0, 0.0)):
        return play(script, *makers, **settings)


def learn(script, agent, batches, **settings):
    """Let `train` make one critic update with each of `batches`, which take the place of what it has played.

    The update number n comes in step n + 1 of len(batches) + 1. Returns the Run.
    """
    batches = list(batches)
    steps = len(batches) + 1
    given = {"learning_starts": 1, "batch_size": 1, "total_timesteps": steps, "num_envs": 1}
    sample = lambda buffer, size, rng: batches.pop(0)
    still = lambda: Still(agent.observation_space, agent.action_space)
    with (
        mock.patch.object(script.ReplayBuffer, "sample", sample),
        mock.patch.object(script, "make_agent", lambda args, envs: agent),
    ):
        run = collect(script, still, **given | settings)
    assert not batches and agent.updates == steps - 1
    return run
