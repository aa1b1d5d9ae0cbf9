"""PettingZoo parallel environments for the tests of maddpg_matd3.py: games with continuous actions whose best play is
known, games of chance, and some that the script has to refuse.
"""

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from tests.probes.team_envs import Game, Matrix


class Steep(Matrix):
    """The matrix game with a higher prize: best are (2, 0), worth 2 x 5, also against chance; a safe (1, 1) gets 4."""

    PAYOFF = np.array([[0, 1, 0], [1, 2, 0], [5, 0, 0]])


class Duet(Game):
    """One step; each agent is shown a sign, the actions should be those signs times (0.5, -1), in bounds of -1 and 3.

    Reward for each: 1 - (a - 0.5 sign)^2 - (b + sign)^2, sign being the other agent's, which only the other is shown;
    with `shown` both see their own. Without it, the best is to play 0: on average 1 - 0.25 - 1 = -0.25 for each.
    """

    low, high, shown = -1, 3, True

    def action_space(self, agent):
        return spaces.Box(self.low, self.high, (1,), np.float32)

    def start(self):
        self.sign = {agent: float(self.rng.choice([-1, 1])) for agent in self.possible_agents}

    def observe(self, agent):
        return np.array([self.sign[agent] if self.shown else 0], np.float32)

    def play(self, actions):
        a, b = (float(actions[agent][0]) for agent in "ab")
        return 1 - (a - 0.5 * self.sign["a"]) ** 2 - (b + self.sign["b"]) ** 2, True, False


class MeetHalfway(Game):
    """Meet in the middle: on a line, "a" starts left, "b" right of 0, and each moves by up to 0.5 a step.

    Each is told its own place and that of the other, and gets -|own place| - |distance| after each of five steps, so
    that the best is to go to 0 as fast as possible. Truncated after five steps, or with `dies` "a" terminates after
    two, and "b" goes on alone.
    """

    size, dies = 2, False

    def action_space(self, agent):
        return spaces.Box(-1, 1, (1,), np.float32)

    def start(self):
        self.place = {"a": -float(self.rng.uniform(0.5, 1)), "b": float(self.rng.uniform(0.5, 1))}

    def observe(self, agent):
        other = "b" if agent == "a" else "a"
        return np.array([self.place[agent], self.place[other]], np.float32)

    def step(self, actions):
        assert set(actions) == set(self.agents), "the dead must not act"
        for agent, action in actions.items():
            self.place[agent] += 0.5 * float(action[0])
        self.t += 1
        distance = abs(self.place["a"] - self.place["b"])
        rewards = self.all(lambda agent: -abs(self.place[agent]) - distance)
        dead = "a" if self.dies and self.t == 2 else None
        result = self.all(self.observe), rewards, self.all(lambda a: a == dead), self.all(lambda a: self.t == 5)
        infos = self.all(lambda agent: {})
        self.agents = [agent for agent in self.agents if agent != dead and self.t < 5]
        return *result, infos


class Solo(Duet):
    """One agent: the same for "a" alone, and 0.25 more or less does not matter: reward 1 - (a - 0.5 sign)^2."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.possible_agents = ["a"]

    def play(self, actions):
        return 1 - (float(actions["a"][0]) - 0.5 * self.sign["a"]) ** 2, True, False


class Unbounded(Duet):
    """A game whose actions have no bounds."""

    low, high = -np.inf, np.inf


class Uneven(Duet):
    """A game in which one agent's actions are discrete and the other's are not."""

    def action_space(self, agent):
        return spaces.Discrete(2) if agent == "b" else super().action_space(agent)


class Pay(Duet):
    """One step, whatever is done: each gets 1, "b" twice as much. `end` says how it ends; always the same to see."""

    end = "terminated"

    def observe(self, agent):
        return np.zeros(1, np.float32)

    def play(self, actions):
        return 1.0, self.end == "terminated", self.end == "truncated"

    def step(self, actions):
        obs, rewards, *ends = super().step(actions)
        return obs, {"a": 1.0, "b": 2.0}, *ends


class Chance(ParallelEnv):
    """Whatever is done: random observations and rewards, random deaths, ends and masks.

    Agent i observes i + 2 numbers and has i + 2 actions, or a Box of i + 2 numbers; or all have two, if they are alike.
    """

    metadata = {"name": "chance"}

    def __init__(self, discrete=False, alike=False, agents=2, render_mode=None):
        self.possible_agents = [f"agent {i}" for i in range(agents)]
        self.sizes = {agent: 2 if alike else i + 2 for i, agent in enumerate(self.possible_agents)}
        self.discrete = discrete
        self.render_mode = render_mode

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (self.sizes[agent],), np.float32)

    def action_space(self, agent):
        size = self.sizes[agent]
        return spaces.Discrete(size) if self.discrete else spaces.Box(-2, np.arange(1, size + 1, dtype=np.float32))

    def reset(self, seed=None, options=None):
        self.rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        return self.observe(self.agents)

    def observe(self, agents):
        infos = {}
        for agent in agents:
            mask = self.rng.integers(2, size=self.sizes[agent])
            mask[self.rng.integers(self.sizes[agent])] = 1
            infos[agent] = {"action_mask": mask} if self.discrete else {}
        return {agent: self.rng.normal(size=self.sizes[agent]).astype(np.float32) for agent in agents}, infos

    def step(self, actions):
        agents = self.agents
        assert set(actions) == set(agents)
        obs, infos = self.observe(agents)
        rewards = {agent: self.rng.normal() for agent in agents}
        over = self.rng.random() < 0.1
        terminated = {agent: bool(self.rng.random() < 0.2) for agent in agents}
        truncated = {agent: over and not terminated[agent] for agent in agents}
        self.agents = [agent for agent in agents if not terminated[agent] and not over]
        return obs, rewards, terminated, truncated, infos
