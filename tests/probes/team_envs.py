"""PettingZoo parallel environments for the tests of scripts for teams: tiny games whose best play is known, and
scripted ones. `tests.probes.team_envs:Matrix` is an id that such a script takes.
"""

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class Game(ParallelEnv):
    """Two agents, "a" and "b"; a subclass says what they observe and what `play(actions)` leads to."""

    metadata = {"name": "game"}
    actions, size = 2, 1

    def __init__(self, render_mode=None, **options):
        self.possible_agents, self.render_mode = ["a", "b"], render_mode
        vars(self).update(options)

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (self.size,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(self.actions)

    def reset(self, seed=None, options=None):
        self.rng, self.agents, self.t = np.random.default_rng(seed), list(self.possible_agents), 0
        self.start()
        return self.all(self.observe), self.all(lambda agent: {})

    def step(self, actions):
        assert set(actions) == set(self.agents)
        reward, terminated, truncated = self.play(actions)
        self.t += 1
        obs = self.all(self.observe)
        result = self.all(lambda a: reward), self.all(lambda a: terminated), self.all(lambda a: truncated)
        infos = self.all(lambda a: {})
        if terminated or truncated:
            self.agents = []
        return obs, *result, infos

    def all(self, function):
        return {agent: function(agent) for agent in self.agents}

    def start(self):
        pass

    def observe(self, agent):
        return np.zeros(self.size, np.float32)


class Matrix(Game):
    """One step; the payoff depends on both actions. Best: (2, 0), worth 2 x 3; a lone deviation from it costs."""

    actions = 3
    PAYOFF = np.array([[0, 1, 0], [1, 2, 0], [3, 0, 0]])

    def play(self, actions):
        return float(self.PAYOFF[actions["a"], actions["b"]]), True, False


class Meet(Game):
    """Meet in the middle: on the cells 0 to 4, "a" starts at 0 or 1 and "b" at 4 or 3; left, stay, right.

    Reward 1 for each as both reach cell 2, which ends the episode; 0.1 less per step. Truncated after 10 steps.
    """

    actions, size = 3, 2

    def start(self):
        self.cell = {"a": int(self.rng.integers(2)), "b": 4 - int(self.rng.integers(2))}

    def observe(self, agent):
        other = "b" if agent == "a" else "a"
        return np.array([self.cell[agent] - 2, self.cell[other] - 2], np.float32)

    def play(self, actions):
        for agent, action in actions.items():
            self.cell[agent] = min(max(self.cell[agent] + int(action) - 1, 0), 4)
        met = self.cell == {"a": 2, "b": 2}
        return met - 0.1, met, self.t == 9 and not met


class Recall(Game):
    """Three steps: the first row shows each agent a sign, the last action has to be that sign. Needs a memory."""

    def start(self):
        self.sign = {agent: int(self.rng.integers(2)) for agent in self.possible_agents}

    def observe(self, agent):
        return np.array([2 * self.sign[agent] - 1 if self.t == 0 else 0], np.float32)

    def play(self, actions):
        last = self.t == 2
        return float(last and actions == self.sign), last, False


class Target(Game):
    """One step in a Box of integers from -3 to 4; each should play 2, and pays the distance."""

    def action_space(self, agent):
        return spaces.Box(-3, 4, (1,), np.int64)

    def play(self, actions):
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), f"{action!r} is not in the space"
        return -sum(abs(float(action[0]) - 2) for action in actions.values()), True, False


class Edges(Game):
    """Three steps that pay 1 each; `how` says what is unusual about the dicts at their edges."""

    metadata = {}

    def __init__(self, how="", **options):
        self.how = how
        super().__init__(**options)

    def observation_space(self, agent):
        if self.how != "keys":
            return super().observation_space(agent)
        return spaces.Dict(goal=spaces.Box(0, 9, (2,)), place=spaces.Discrete(3), action_mask=spaces.MultiBinary(2))

    def observe(self, agent):
        if self.how != "keys":
            return np.full(1, self.t, np.float32)
        return {"goal": np.array([self.t, 7], np.float32), "place": 1, "action_mask": np.array([0, 1], np.int8)}

    def start(self):
        if self.how == "newcomer":
            self.agents = ["a"]

    def play(self, actions):
        return 1.0, self.t == 2, False

    def step(self, actions):
        acted = list(self.agents)
        obs, rewards, terminated, truncated, infos = super().step(actions)
        if self.how == "numbers":
            terminated = {agent: np.int64(end) for agent, end in terminated.items()}
            truncated = {agent: int(end) for agent, end in truncated.items()}
        if self.how == "newcomer" and self.t == 1:  # of whose end nothing is said, for it has not acted
            self.agents = list(self.possible_agents)
            obs = self.all(self.observe)
            rewards, terminated, truncated = ({a: d[a] for a in acted} for d in (rewards, terminated, truncated))
        if self.how == "no last observation" and not self.agents:
            obs = {}
        return obs, rewards, terminated, truncated, infos

    def state(self):
        if self.how == "growing state":
            return np.zeros(2 + self.t)
        if self.how == "dict of state":
            return {"t": self.t}
        raise NotImplementedError


def turn_based():
    """An environment in which agents take turns."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.env()


class Scripted(ParallelEnv):
    """Agents die, and episodes end, when the script says so.

    Episode e of the environment follows `scripts[e % len]`: {agent: [step of its end, "terminated" or "truncated"]}.
    Agents observe 100 x agent + 10 x episode + step, their reward is agent + 1 per step. With `masks` the actions
    that are valid are given in info, else there are none. With `own_state`, state() is [episode, step].
    """

    metadata = {"name": "scripted"}

    def __init__(self, scripts, masks=None, own_state=True, render_mode=None):
        self.scripts, self.masks, self.own_state, self.render_mode = scripts, masks, own_state, render_mode
        self.possible_agents, self.episode = sorted(scripts[0]), -1

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3)

    def state(self):
        if not self.own_state:
            raise NotImplementedError
        return np.array([self.episode, self.t], np.float32)

    def reset(self, seed=None, options=None):
        self.episode, self.t, self.agents = self.episode + 1, 0, list(self.possible_agents)
        return self.observations(), self.infos()

    def observations(self):
        number = {agent: i for i, agent in enumerate(self.possible_agents)}
        values = {agent: 100 * number[agent] + 10 * self.episode + self.t for agent in self.agents}
        return {agent: np.array([value], np.float32) for agent, value in values.items()}

    def infos(self):
        return {a: {} if self.masks is None else {"action_mask": np.array(self.masks[a], np.int8)} for a in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents), "the dead must not act"
        self.t += 1
        script = self.scripts[self.episode % len(self.scripts)]
        rewards = {agent: 1.0 + self.possible_agents.index(agent) for agent in self.agents}
        ends = {agent: script[agent][1] if script[agent][0] == self.t else None for agent in self.agents}
        terminated, truncated = ({a: e == k for a, e in ends.items()} for k in ("terminated", "truncated"))
        result = self.observations(), rewards, terminated, truncated
        infos = self.infos()
        self.agents = [agent for agent in self.agents if ends[agent] is None]
        return *result, infos


class Widow(Game):
    """Three steps; "a" dies in the first. Only then does the team get anything: 1 in each of the other two steps."""

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.t += 1
        rewards = self.all(lambda agent: float(self.t > 1))
        ends = self.all(lambda agent: agent == "a" or self.t == 3)
        result = self.all(self.observe), rewards, ends, self.all(lambda agent: False), self.all(lambda agent: {})
        self.agents = [agent for agent in self.agents if not ends[agent]]
        return result

    def observe(self, agent):
        return np.eye(3, dtype=np.float32)[min(self.t, 2)]

    size = 3


class Nobody(Matrix):
    """A game that nobody plays."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.possible_agents = []


class Empty(Matrix):
    """A game in which nobody takes part when it begins."""

    def reset(self, seed=None, options=None):
        super().reset(seed)
        self.agents = []
        return {}, {}


class Absent(Matrix):
    """A game that does not show "b" anything when it begins."""

    def reset(self, seed=None, options=None):
        obs, infos = super().reset(seed)
        return {"a": obs["a"]}, infos


class Latecomer(Matrix):
    """A game that begins with an agent nobody has heard of."""

    def reset(self, seed=None, options=None):
        obs, infos = super().reset(seed)
        self.agents.append("c")
        return obs | {"c": obs["a"]}, infos


class MoreMasks(Scripted):
    """The masks of its actions are there from the second row on only, which is too late."""

    def reset(self, seed=None, options=None):
        obs, infos = super().reset(seed, options)
        return obs, {agent: {} for agent in infos}


def tictactoe(render_mode=None):
    """A turn-based game with action masks, of which the waiting player's is empty."""
    from pettingzoo.classic import tictactoe_v3
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel

    return turn_based_aec_to_parallel(tictactoe_v3.env(render_mode=render_mode))


def broken(render_mode=None):
    """An environment that needs a package nobody has."""
    import nosuchdependency  # noqa: F401


NOT_AN_ENVIRONMENT = dict
