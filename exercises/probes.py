"""Environments so small that the right answer is known: for hunts, and for calls of whole loops."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Probe(gym.Env):
    """An environment whose observations count the steps of an episode; `play` gives (reward, terminated, truncated)."""

    observation_space, action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        self.begin()
        return self.observe(), self.info()

    def step(self, action):
        self.at += 1
        reward, terminated, truncated = self.play(action)
        return self.observe(), float(reward), bool(terminated), bool(truncated), self.info()

    def begin(self):
        pass

    def observe(self):
        return np.full(1, self.at, np.float32)

    def info(self):
        return {}


class Walk(Probe):
    """Three steps, whatever is done; they pay 1, 2 and 3. The last one ends the episode as `end` says."""

    def __init__(self, end="terminated"):
        self.end, self.actions = end, []

    def play(self, action):
        self.actions.append(int(action))
        over = self.at == 3
        return self.at, over and self.end == "terminated", over and self.end == "truncated"


class Chain(Walk):
    """As Walk, but with states that are numbered, and one action."""

    observation_space, action_space = spaces.Discrete(4), spaces.Discrete(1)

    def observe(self):
        return self.at


class Fork(Probe):
    """In state 0, action 0 ends the episode and pays 0.2, action 1 leads to state 1, where only action 1 pays 1."""

    observation_space = spaces.Discrete(2)

    def begin(self):
        self.state = 0

    def observe(self):
        return self.state

    def play(self, action):
        if self.state == 0 and action == 1:
            self.state = 1
            return 0, False, False
        return 0.2 if self.state == 0 else action == 1, True, False


class Casino(Fork):
    """In state 0, actions 5 to 9 end the episode and pay nothing; 0 to 4 lead to state 1, where each wins or loses 1.

    On average a game costs 0.1, so state 1 is worth -0.1: but the highest of ten noisy estimates says otherwise.
    """

    action_space = spaces.Discrete(10)

    def play(self, action):
        if self.state == 0 and action < 5:
            self.state = 1
            return 0, False, False
        return self.np_random.choice([-1.1, 0.9]) if self.state == 1 else 0, True, False


class Endless(Probe):
    """Every step pays 1 and leads back to where it began; after five steps somebody stops the clock."""

    observation_space = spaces.Box(0, 1, (1,))

    def __init__(self, continuous=False):
        self.action_space = spaces.Box(-1, 1, (1,)) if continuous else spaces.Discrete(2)

    def observe(self):
        return np.zeros(1, np.float32)

    def play(self, action):
        return 1, False, self.at == 5


class Later(Probe):
    """Two steps; the second pays 1, unless its action is 0."""

    def play(self, action):
        return self.at == 2 and action == 1, self.at == 2, False


class Long(Probe):
    """Episodes of nine steps."""

    def play(self, action):
        return 1, self.at == 9, False


class Mixed(Probe):
    """Episodes take turns: one step that terminates, then three, after which the clock is stopped. Observations count
    the steps of all episodes, and so do rewards.
    """

    observation_space = spaces.Box(0, 99, (1,))
    episodes = count = 0

    def begin(self):
        self.episodes, self.count = self.episodes + 1, self.count + 10

    def observe(self):
        return np.full(1, self.count, np.float32)

    def play(self, action):
        self.count += 1
        short = self.episodes % 2 == 1
        return self.count, short, not short and self.at == 3


class Cue(Probe):
    """One step; the observation is -1 or 1 (more by `offset`); the action that goes with it, 0 or 1, pays 1."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))

    def __init__(self, offset=0):
        self.offset = offset

    def begin(self):
        self.cue = int(self.np_random.integers(2))

    def observe(self):
        return np.full(1, self.offset + (2 * self.cue - 1 if self.at == 0 else 0), np.float32)

    def play(self, action):
        return action == self.cue, True, False


class Doors(Probe):
    """One step; of four doors two are open, as the mask says. The later of the two pays 1; a shut one is an error."""

    observation_space, action_space = spaces.Box(0, 1, (4,)), spaces.Discrete(4)

    def begin(self):
        self.open = np.zeros(4, np.int8)
        self.open[self.np_random.choice(4, 2, replace=False)] = 1

    def observe(self):
        return self.open.astype(np.float32) * (self.at == 0)

    def info(self):
        return {"action_mask": self.open * (self.at == 0)}

    def play(self, action):
        if not self.open[action]:
            raise ValueError(f"door {action} is shut")
        return not self.open[action + 1 :].any(), True, False


class Aim(Probe):
    """One step; the observation is -1 or 1, and the reward is 1 - (action - observation / 2)^2."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (1,))

    def begin(self):
        self.target = np.full(1, self.np_random.choice([-1, 1]), np.float32)

    def observe(self):
        return self.target

    def play(self, action):
        return 1 - (action[0] - self.target[0] / 2) ** 2, True, False


class Password(Probe):
    """Ten right choices out of two pay 1, a wrong one ends the episode: chance finds it once in a thousand times."""

    observation_space = spaces.Box(0, 1, (11,))
    RIGHT = (0, 1, 1, 0, 1, 0, 0, 0, 1, 1)

    def observe(self):
        return np.eye(11, dtype=np.float32)[self.at]

    def play(self, action):
        right = action == self.RIGHT[self.at - 1]
        return right and self.at == 10, not right or self.at == 10, False


class Window(Probe):
    """One step, which pays nothing. Action 1 shows three random numbers, action 0 the zeros with which it began."""

    observation_space = spaces.Box(-1, 1, (3,))

    def begin(self):
        self.seen = np.zeros(3, np.float32)

    def observe(self):
        return self.seen

    def play(self, action):
        self.seen = action * self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return 0, True, False


for env in (Walk, Chain, Fork, Casino, Endless, Later, Long, Mixed, Cue, Doors, Aim, Password, Window):
    gym.register(f"Classroom/{env.__name__}-v0", env, disable_env_checker=True)


class Team:
    """A parallel environment of PettingZoo with the agents "a" and "b", who both get what `reward(actions)` says.

    The first observation shows each agent a sign of its own, -1 or 1; the others are what `later` says.
    """

    metadata = {"name": "team"}
    steps, actions, render_mode = 1, 2, None

    def __init__(self, render_mode=None, **options):
        self.possible_agents = ["a", "b"]
        vars(self).update(options)

    @property
    def unwrapped(self):
        return self

    @property
    def num_agents(self):
        return len(self.agents)

    @property
    def max_num_agents(self):
        return len(self.possible_agents)

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(self.actions)

    def reset(self, seed=None, options=None):
        rng, self.agents, self.t = np.random.default_rng(seed), list(self.possible_agents), 0
        self.sign = {agent: int(rng.integers(2)) for agent in self.agents}
        obs = {agent: np.full(1, 2 * sign - 1, np.float32) for agent, sign in self.sign.items()}
        return obs, {agent: {} for agent in self.agents}

    def step(self, actions):
        self.t += 1
        over, reward = self.t == self.steps, float(self.reward(actions))
        everyone = lambda x: dict.fromkeys(self.possible_agents, x)
        if over:
            self.agents = []
        return (
            everyone(np.full(1, self.later(), np.float32)),
            everyone(reward),
            everyone(over),
            everyone(False),
            everyone({}),
        )

    def later(self):
        return float(self.t == self.steps)

    def state(self):
        raise NotImplementedError

    def render(self):
        pass

    def close(self):
        pass


class Fortune(Team):
    """One step, which pays 1000 to both agents, whatever they do."""

    def reward(self, actions):
        return 1000


class Recall(Team):
    """Three steps; the last actions have to be the signs of the first observation, which pays 1: needs a memory."""

    steps = 3

    def reward(self, actions):
        return self.t == 3 and actions == self.sign


class Patience(Team):
    """Three steps, of which the last pays 1 to both agents, whatever they do. Observations count the steps."""

    steps = 3

    def later(self):
        return self.t / 10

    def reward(self, actions):
        return self.t == 3


class Ayes(Team):
    """One step, which pays 1 to both for every agent whose action is 1."""

    def reward(self, actions):
        return sum(actions.values())
