"""Demonstrations, and environments that need them, for the tests of ppod.py.

`--env-id demo_worlds:Chain-v0` imports this module, which registers the environments.
"""

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

LINE, TWO = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)


class Draws:
    """Stands for a generator: `random()` gives the planned numbers, the choice within a list is always the first."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)
        self.random = lambda: self.numbers.pop(0)
        self.integers = self.choice = lambda n, p=None: 0


def make_demo(script, length=3, total=1.0, terminated=True, **fields):
    """A Demo whose observations are 0, 1, 2, …, whose actions are 0, 1, 0, …; of its rewards only the last is not 0."""
    obs = np.arange(length + 1, dtype=np.float32)[:, None]
    rewards = np.zeros(length, np.float32)
    rewards[-1] = total
    return script.Demo(obs, np.arange(length)[:, None] % 2, rewards, terminated, total, **fields)


def store(script, reward=(), value=(), **settings):
    """A PPODBuffer of one slot that holds these demos; rho is 0.1 and phi 0.3."""
    demos = script.PPODBuffer(script.Args(**settings), 1, LINE, TWO)
    for listed, given in ((demos.reward_demos, reward), (demos.value_demos, value)):
        for demo in given:
            demos.add(listed, demo)
    return demos


def play(script, demos, *episodes):
    """Show the PPODBuffer a rollout of episodes (rewards, values, end); observation t of episode k is 100 k + t.

    Behind an episode that is "terminated" or "truncated" comes its reset row: final observation, reward 99, value 99.
    """
    rows = []
    for k, (rewards, values, end) in enumerate(episodes):
        last = len(rewards) - 1
        rows += [(100 * k + t, *numbers, t == last and end, False) for t, numbers in enumerate(zip(rewards, values))]
        if end:
            rows.append((100 * k + last + 1, 99, 99, "", True))
    obs, rewards, values, ends, reset_rows = (np.array(column)[:, None] for column in zip(*rows))
    rollout = script.SequenceBuffer(len(rows), 1, LINE, TWO)
    rollout.obs[:-1, :, 0], rollout.rewards, rollout.reset_rows = obs, rewards.astype(np.float32), reset_rows
    rollout.obs[-1] = obs[-1] + 1
    rollout.terminated, rollout.truncated = ends == "terminated", ends == "truncated"
    demos.track_potential_demos(rollout, torch.tensor(np.concatenate([values, values[:1]])))


class Critic:
    """In place of an agent: log pi = -1.2 of every action, and the value 0.1 + obs / 10 of four observations."""

    device = "cpu"

    def __call__(self, obs, reset_rows, actions, state):
        return torch.full((4, 1), -1.2), 0, 0.1 + obs[:, :, 0] / 10, torch.zeros(4, 1, 0)

    def value(self, obs, state):
        return torch.full((1,), 9.0)

    def certain_log_prob(self):
        return 0.0


class Adds(torch.nn.Module):
    """In place of a GRU."""

    def forward(self, x, state):
        return x + state


# ---------------------------------------------------------------------------------------------------- environments


class Chain(gym.Env):
    """Pays 1 after 12 right choices out of two and nothing before; a wrong one ends the episode.

    Which choice is right differs from place to place, so that chance finds the end once in 2^12 times.
    """

    LENGTH = 12
    action_space = TWO
    observation_space = spaces.Box(0, 1, (LENGTH + 1,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def observe(self):
        return np.eye(self.LENGTH + 1, dtype=np.float32)[self.at]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self.observe(), {}

    def step(self, action):
        if action != right_choice(self.at):
            return self.observe(), 0.0, True, False, {}
        self.at += 1
        over = self.at == self.LENGTH
        return self.observe(), float(over), over, False, {}

    def render(self):
        return np.full((64, 64, 3), self.at, np.uint8)


def right_choice(at):
    """The choice that leads on from place `at` of a Chain."""
    return at * (at + 1) // 2 % 2


def chain_demo(script):
    """The demo that solves a Chain."""
    length = Chain.LENGTH
    actions = np.array([[right_choice(t)] for t in range(length)])
    rewards = np.append(np.zeros(length - 1), 1).astype(np.float32)
    return script.Demo(np.eye(length + 1, dtype=np.float32), actions, rewards, True, 1.0)


def write_demo(script, path, demo, env, **settings):
    """Save a demo as of the environment "none", or the one that is given."""
    args = script.Args(**{"env_id": "none"} | settings)
    script.save_demo(path, demo, args, env.observation_space, env.action_space)
    return path


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


for env in (Chain, Recall, Reach):
    gym.register(f"{env.__name__}-v0", env, disable_env_checker=True)
