"""Environments so small that the right answer is known; step 2 of an exercise is a run in one of them."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Chain(gym.Env):
    """Three steps from state 0 to state 3, whatever is done; they pay 1, 2 and 3. The last one ends the episode."""

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
        return self.at, float(self.at), over and self.end == "terminated", over and self.end == "truncated", {}


class Walk(gym.Env):
    """As Chain, but the states are vectors, and there are two actions, which make no difference."""

    observation_space, action_space = spaces.Box(0, 3, (1,)), spaces.Discrete(2)

    def __init__(self, end="terminated"):
        self.end, self.actions = end, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.at += 1
        self.actions.append(int(action))
        ends = [self.at == 3 and self.end == end for end in ("terminated", "truncated")]
        return np.full(1, self.at, np.float32), float(self.at), *ends, {}


class Fork(gym.Env):
    """In state 0, action 0 ends the episode and pays 0.2, action 1 leads to state 1, where only action 1 pays 1."""

    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return 0, {}

    def step(self, action):
        if self.at == 0 and action == 1:
            self.at = 1
            return 1, 0.0, False, False, {}
        return self.at, 0.2 if self.at == 0 else float(action == 1), True, False, {}


class Casino(gym.Env):
    """In state 0, actions 5 to 9 end the episode and pay nothing; 0 to 4 lead to state 1, where each wins or loses 1.

    On average a game costs 0.1, so state 1 is worth -0.1: but the highest of ten noisy estimates says otherwise.
    """

    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return 0, {}

    def step(self, action):
        if self.at == 0 and action < 5:
            self.at = 1
            return 1, 0.0, False, False, {}
        return self.at, float(self.np_random.choice([-1.1, 0.9])) if self.at == 1 else 0.0, True, False, {}


class Endless(gym.Env):
    """Every step pays 1 and leads back to where it began; after five steps somebody stops the clock."""

    observation_space = spaces.Box(0, 1, (1,))

    def __init__(self, continuous=False):
        self.action_space = spaces.Box(-1, 1, (1,)) if continuous else spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, False, self.steps == 5, {}


class Later(gym.Env):
    """Two steps; the second pays 1. The observation is the number of the step. Action 0 in the second pays nothing."""

    observation_space, action_space = spaces.Box(0, 2, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.at += 1
        return np.full(1, self.at, np.float32), float(self.at == 2 and action == 1), self.at == 2, False, {}


class Cue(gym.Env):
    """One step; the observation is -1 or 1 (more by `offset`); the action that goes with it, 0 or 1, pays 1."""

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)

    def __init__(self, offset=0):
        self.offset = offset

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue = int(self.np_random.integers(2))
        return np.full(1, self.offset + 2 * self.cue - 1, np.float32), {}

    def step(self, action):
        return np.full(1, self.offset, np.float32), float(action == self.cue), True, False, {}


class Doors(gym.Env):
    """One step; of four doors two are open, as the mask says. The later of the two pays 1; a shut one is an error."""

    observation_space, action_space = spaces.Box(0, 1, (4,)), spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.open = np.zeros(4, np.int8)
        self.open[self.np_random.choice(4, 2, replace=False)] = 1
        return self.open.astype(np.float32), {"action_mask": self.open}

    def step(self, action):
        if not self.open[action]:
            raise ValueError(f"door {action} is shut")
        reward = float(not self.open[action + 1 :].any())
        return np.zeros(4, np.float32), reward, True, False, {"action_mask": np.zeros(4, np.int8)}


class Aim(gym.Env):
    """One step; the observation is -1 or 1, and the reward is 1 - (action - observation / 2)^2."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target = np.full(1, self.np_random.choice([-1, 1]), np.float32)
        return self.target, {}

    def step(self, action):
        return self.target, 1 - float(action[0] - self.target[0] / 2) ** 2, True, False, {}


class Password(gym.Env):
    """Ten right choices out of two pay 1, a wrong one ends the episode: chance finds it once in a thousand times."""

    action_space, observation_space = spaces.Discrete(2), spaces.Box(0, 1, (11,))
    RIGHT = (0, 1, 1, 0, 1, 0, 0, 0, 1, 1)

    def observe(self):
        return np.eye(11, dtype=np.float32)[self.at]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self.observe(), {}

    def step(self, action):
        right = action == self.RIGHT[self.at]
        self.at += int(right)
        return self.observe(), float(self.at == 10), not right or self.at == 10, False, {}


class Window(gym.Env):
    """One step, which pays nothing. Action 1 shows three random numbers, action 0 the zeros with which it began."""

    observation_space, action_space = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return action * self.np_random.uniform(-1, 1, 3).astype(np.float32), 0.0, True, False, {}


for env in (Chain, Walk, Fork, Casino, Endless, Later, Cue, Doors, Aim, Password, Window):
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


class Signs(Team):
    """One step, which pays 1 to the team for every agent whose sign is 1, whatever they do."""

    def reward(self, actions):
        return sum(self.sign.values()) / 2  # to each of the two
