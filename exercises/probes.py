"""Environments so small that the right answer is known: for hunts, and for calls of whole loops."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Probe(gym.Env):
    """An environment whose observations count the steps of an episode. After `steps` of them it is over, as `end` says;
    `reward` says what a step pays.
    """

    observation_space, action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)
    steps, end = 1, "terminated"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        self.begin()
        return self.observe(), {}

    def step(self, action):
        self.at += 1
        reward = float(self.reward(action))
        over = self.at == self.steps
        flags = over and self.end == "terminated", over and self.end == "truncated"
        return self.observe(), reward, *flags, {}

    def begin(self):
        pass

    def observe(self):
        return np.full(1, self.at, np.float32)


class Walk(Probe):
    """Three steps, whatever is done; they pay 1, 2 and 3."""

    steps = 3

    def __init__(self, end="terminated"):
        self.end = end

    def reward(self, action):
        return self.at


class Chain(Walk):
    """As Walk, but with states that are numbered, and one action."""

    observation_space, action_space = spaces.Discrete(4), spaces.Discrete(1)

    def observe(self):
        return self.at


class Endless(Probe):
    """Every step pays 1 and leads back to where it began; after five steps somebody stops the clock."""

    observation_space = spaces.Box(0, 1, (1,))
    steps, end = 5, "truncated"

    def __init__(self, continuous=False):
        self.action_space = spaces.Box(-1, 1, (1,)) if continuous else spaces.Discrete(2)

    def observe(self):
        return np.zeros(1, np.float32)

    def reward(self, action):
        return 1


class Later(Probe):
    """Two steps; the second pays 1, unless its action is 0."""

    steps = 2

    def reward(self, action):
        return self.at == 2 and action == 1


class Cue(Probe):
    """One step; the observation is -1 or 1 (more by `offset`); the action that goes with it, 0 or 1, pays 1."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))

    def __init__(self, offset=0):
        self.offset = offset

    def begin(self):
        self.cue = int(self.np_random.integers(2))

    def observe(self):
        return np.full(1, self.offset + (2 * self.cue - 1 if self.at == 0 else 0), np.float32)

    def reward(self, action):
        return action == self.cue


class Window(Probe):
    """One step, which pays nothing. Action 1 shows three random numbers, action 0 the zeros with which it began."""

    observation_space = spaces.Box(-1, 1, (3,))

    def begin(self):
        self.seen = np.zeros(3, np.float32)

    def observe(self):
        return self.seen

    def reward(self, action):
        self.seen = action * self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return 0


class Lottery(Probe):
    """One step; it pays 20 one time in ten, and else nothing."""

    def reward(self, action):
        return 20 * (self.np_random.random() < 0.1)


for env in (Walk, Chain, Endless, Later, Cue, Window, Lottery):
    gym.register(f"Classroom/{env.__name__}-v0", env, disable_env_checker=True)
gym.register("Classroom/CutWalk-v0", Walk, disable_env_checker=True, kwargs={"end": "truncated"})


class Ayes:
    """A parallel environment of PettingZoo: one step, which pays both agents 1 for each of them whose action is 1."""

    metadata, render_mode, possible_agents = {"name": "ayes"}, None, ["a", "b"]

    def __init__(self, render_mode=None):
        self.unwrapped = self

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return {agent: np.zeros(1, np.float32) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        self.agents = []
        of_each = np.ones(1, np.float32), float(sum(actions.values())), True, False, {}
        return tuple(dict.fromkeys(self.possible_agents, part) for part in of_each)

    def close(self):
        pass
