"""Worlds of a few states for the tests of qlearning.py, and what its loop needs of a Run."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Notes:
    """What play_episode needs of a Run: steps, episodes, and the TD errors that were logged."""

    def __init__(self):
        self.step = 0
        self.episodes = []
        self.td_errors = []

    def log(self, **figures):
        if "td_error" in figures:
            self.td_errors.append(figures["td_error"])


def new_table(script, env, **settings):
    """(untrained agent, its Args) for an environment."""
    args = script.Args(env_id="none", **settings)
    envs = SimpleNamespace(single_observation_space=env.observation_space, single_action_space=env.action_space)
    return script.make_agent(args, envs), args


class Chain(gym.Env):
    """States 0, 1, 2, 3 in a row, one step after the other whatever the action; the steps pay 1, 2 and 3.

    The last step ends the episode as `end` says: terminated, truncated or both.
    """

    observation_space, action_space = spaces.Discrete(4), spaces.Discrete(1)

    def __init__(self, end="terminated"):
        self.end = end

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return 0, {}

    def step(self, action):
        self.at += 1
        over = self.at == 3
        flags = over and self.end in ("terminated", "both"), over and self.end in ("truncated", "both")
        return self.at, float(self.at), *flags, {}


class RandomWorld(gym.Env):
    """Successors, rewards and ends drawn at random, once, from `seed`; a third of the steps end an episode.

    It notes each step with the tables before it: `steps` has (tables, state, action, reward, next state, flags).
    """

    def __init__(self, seed=0, states=5, actions=3):
        rng = np.random.default_rng(seed)
        self.observation_space, self.action_space = spaces.Discrete(states), spaces.Discrete(actions)
        self.successors = rng.integers(states, size=(states, actions, 2))
        self.rewards = rng.normal(size=(states, actions, 2))
        self.ends = rng.choice(4, size=(states, actions, 2), p=[0.67, 0.16, 0.15, 0.02])  # bits: terminated, truncated
        self.steps = []
        super().reset(seed=seed)

    def reset(self, *, seed=None, options=None):
        self.at = int(self.np_random.integers(self.observation_space.n))
        return self.at, {}

    def step(self, action):
        before = np.array(self.agent.tables), self.at
        outcome = self.at, action, int(self.np_random.integers(2))
        self.at, end, reward = int(self.successors[outcome]), int(self.ends[outcome]), float(self.rewards[outcome])
        terminated, truncated = bool(end & 1), bool(end & 2)
        self.steps.append((*before, action, reward, self.at, terminated, truncated))
        return self.at, reward, terminated, truncated, {}


class Bias(gym.Env):
    """Sutton & Barto, example 6.7. From A (0), right ends with 0; left leads to B (1), where each action ends with a
    reward of mean -0.1 and deviation 1: left is worse, but the largest of many noisy estimates says otherwise.
    """

    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return 0, {}

    def step(self, action):
        if self.at == 1:
            return 0, float(self.np_random.normal(-0.1, 1)), True, False, {}
        self.at = 1
        return 1, 0.0, action >= 5, False, {}  # 5 to 9: right


class Twins(gym.Env):
    """Four cues, shown as two bits in one of several kinds of observation; one of four actions is right for each."""

    KINDS = {
        "tuple": spaces.Tuple((spaces.Discrete(2, start=1), spaces.Discrete(2))),
        "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float64),
        "images": spaces.Box(0, 255, (64, 64, 3), np.uint8),
        "dict": spaces.Dict(bit=spaces.Discrete(2)),
        "boxes": spaces.Tuple((spaces.Box(0, 1, (1,)), spaces.Discrete(2))),
        "numbers": spaces.MultiDiscrete([10**9, 10**9]),
    }
    action_space = spaces.Discrete(4, start=3)

    def __init__(self, kind="tuple"):
        self.kind, self.observation_space = kind, self.KINDS[kind]

    def draw(self):
        self.cue = int(self.np_random.integers(4))
        first, second = divmod(self.cue, 2)
        return (first + 1, second) if self.kind == "tuple" else np.array([9.0 * first - 4, second + 0.5])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.draw(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        reward = float(action == self.cue + 3)
        self.steps += 1
        return self.draw(), reward / 4, self.steps == 4, False, {}


class Halves(gym.ObservationWrapper):
    """Two neighbouring states look the same."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = spaces.Discrete(env.observation_space.n // 2)

    def observation(self, observation):
        return int(observation) // 2


class SinglePrecision(gym.RewardWrapper):
    """Rewards are np.float32, as many environments' are."""

    def reward(self, reward):
        return np.float32(reward)


gym.register("Twins-v0", Twins, disable_env_checker=True)
