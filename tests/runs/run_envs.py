"""Environments and wrappers for whole runs. `--env-id run_envs:Match-v0` imports this module, which registers them.

`MatchBox-v0` and its like have continuous actions. run_envs_teams.py makes PettingZoo environments of them.
"""

from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

# Four cues, two bits each. Every action space below that a script can learn has one right action per cue.
BITS = [(0, 0), (0, 1), (1, 0), (1, 1)]
ACTIONS = {
    "discrete": spaces.Discrete(4, start=-1),
    "box": spaces.Box(np.array([-0.5, 0.0]), np.array([1.0, 0.25]), dtype=np.float64),
    "integers": spaces.Box(np.array([-2, 0]), np.array([1, 3]), dtype=np.int64),
    "multidiscrete": spaces.MultiDiscrete([2, 3]),
    "multibinary": spaces.MultiBinary(2),
    "text": spaces.Text(3),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))),
    "dict": spaces.Dict(left=spaces.Discrete(2)),
    "huge": spaces.Discrete(10**9),
    "empty": spaces.Box(-1, 1, (0,)),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.int64),
}
OBSERVATIONS = {
    "vector": spaces.Box(-1, 1, (3,), np.float64),
    "matrix": spaces.Box(0, 5, (2, 2), np.int64),
    "discrete": spaces.Discrete(4, start=2),
    "multibinary": spaces.MultiBinary(2),
    "multidiscrete": spaces.MultiDiscrete([2, 3]),
    "dict": spaces.Dict(bit=spaces.Discrete(2), inner=spaces.Dict(number=spaces.Box(-1, 1, (1,)))),
    "tuple": spaces.Tuple((spaces.MultiBinary(1), spaces.Discrete(2))),
    "channels_first": spaces.Box(0, 255, (2, 36, 44), np.uint8),
    "channels_last": spaces.Box(0, 255, (44, 36, 3), np.uint8),
    "sequence": spaces.Sequence(spaces.Discrete(2)),
    "graph": spaces.Graph(spaces.Box(0, 1, (1,)), None),
    "huge": spaces.Discrete(10**9),
    "empty": spaces.Box(-1, 1, (0,)),
}


class Match(gym.Env):
    """Four steps, each of which shows a cue and pays up to 1/4 for the action that belongs to it: at best 1 in all.

    A wrong discrete action pays nothing; a Box action pays less, the further it is from its corner of the Box.
    Actions that are not in the space are an error: they must arrive clipped, shifted and typed as the space says.
    """

    def __init__(self, actions="discrete", observation="vector"):
        self.action_space, self.observation_space = ACTIONS[actions], OBSERVATIONS[observation]
        self.actions, self.observation = actions, observation

    def draw(self):
        self.cue = int(self.np_random.integers(4))
        first, second = BITS[self.cue]
        if "channels" in self.observation:  # one lit quadrant of four
            image = np.zeros((2, 36, 44) if self.observation == "channels_first" else (3, 44, 36), np.uint8)
            image[:, 18 * first : 18 * (first + 1), 18 * second : 18 * (second + 1)] = 255
            return image if self.observation == "channels_first" else np.moveaxis(image, 0, -1)
        return {
            "vector": lambda: np.array([2 * first - 1, 2 * second - 1, self.np_random.uniform(-1, 1)]),
            "matrix": lambda: np.array([[first, 2], [3, second]]),
            "discrete": lambda: self.cue + 2,
            "multibinary": lambda: np.array([first, second], np.int8),
            "multidiscrete": lambda: np.array([first, 2 * second]),
            "dict": lambda: {"bit": first, "inner": {"number": np.array([2 * second - 1], np.float32)}},
            "tuple": lambda: (np.array([first], np.int8), second),
            "sequence": lambda: (first, second),
            "graph": lambda: spaces.GraphInstance(np.zeros((1, 1), np.float32), None, None),
            "huge": lambda: self.cue,
            "empty": lambda: np.zeros(0, np.float32),
        }[self.observation]()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.draw(), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        first, second = BITS[self.cue]
        if isinstance(self.action_space, spaces.Box):
            low, high = self.action_space.low, self.action_space.high
            corner = np.where([first, second], high, low)
            reward = 1 - np.mean(np.abs(action - corner) / (high - low))
        else:
            right = {"discrete": self.cue - 1, "multidiscrete": (first, 2 * second), "multibinary": (first, second)}
            reward = float(np.all(action == np.array(right[self.actions])))
        self.steps += 1
        return self.draw(), reward / 4, self.steps == 4, False, {}


class Plain(gym.Env):
    """Two numbers to see, and an action, discrete or box, that changes nothing unless a subclass says so."""

    observation_space = spaces.Box(-1, 1, (2,))

    def __init__(self, actions="discrete"):
        self.action_space = spaces.Discrete(2) if actions == "discrete" else spaces.Box(-1, 1, (1,))


class Endless(Plain):
    """Pays 1 per step and never ends of itself: only limits from outside end its episodes."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.ones(2, np.float32), 1.0, False, False, {}


class Uneven(Endless):
    """Episodes whose length, 1 to 9, depends on the seed alone. Every step pays 1, so the return is the length."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 10))
        return obs, info

    def step(self, action):
        self.left -= 1
        return np.ones(2, np.float32), 1.0, self.left == 0, False, {}


class Faulty(Plain):
    """Episodes of ten steps. In step `at` of its life (not of the episode) it returns `value` as the named field."""

    def __init__(self, field, at, value="nan", actions="discrete"):
        super().__init__(actions)
        self.field, self.at, self.value, self.life = field, at, float(value), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        first = "first" in self.field
        return np.array([0, self.value if first else 0], np.float32), {}

    def step(self, action):
        self.steps += 1
        self.life += 1
        bad = {self.field: self.value} if self.life == self.at else {}
        obs = np.array([0, bad.get("observation", 0)], np.float32)
        return obs, bad.get("reward", 1.0), self.steps == 10, False, {}


class Unclean(Plain):
    """Its reset, even with a seed, leaves traces of what came before: what it has worn away, and its own generator."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,))

    def __init__(self, actions="discrete"):
        super().__init__(actions)
        self.worn = 0.0
        self.noise = np.random.default_rng(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.array([self.worn, self.np_random.normal()], np.float32), {}

    def step(self, action):
        self.steps += 1
        action = float(np.sum(action))
        self.worn += 0.01 * action
        obs = np.array([self.worn, self.noise.normal()], np.float32)
        return obs, action - self.worn, bool(self.noise.random() < 0.1), self.steps == 25, {}


class Own(gym.Wrapper):
    """A user's own wrapper: it counts over all episodes, and holds what cannot be pickled."""

    def __init__(self, env):
        super().__init__(env)
        self.life = 0
        self.weights = (1 / n for n in range(1, 10**9))

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.life += 1
        return obs, reward + next(self.weights), terminated, truncated or self.life % 37 == 0, info


class Raises(Endless):
    """Raises an error of its own in __init__, reset, step or render."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, where, render_mode=None, actions="discrete"):
        super().__init__(actions)
        self.where, self.render_mode, self.steps = where, render_mode, 0
        self.perhaps_raise("init")

    def perhaps_raise(self, where):
        if where == self.where:
            raise OSError(f"from within {where}")

    def reset(self, *, seed=None, options=None):
        self.perhaps_raise("reset")
        return super().reset(seed=seed)

    def step(self, action):
        self.perhaps_raise("step")
        self.steps += 1
        return *super().step(action)[:2], self.steps % 5 == 0, False, {}

    def render(self):
        self.perhaps_raise("render")
        return np.full((64, 64, 3), self.steps, np.uint8)


class Unpicturable(Endless):
    """Has no pictures to film."""

    metadata = {"render_modes": []}


class Blind(Endless):
    """Says that it renders, but its render() gives nothing."""

    metadata = {"render_modes": ["rgb_array", "human"]}

    def __init__(self, render_mode=None, actions="discrete"):
        super().__init__(actions)
        self.render_mode = render_mode

    def render(self):
        return None


class Grey(Blind):
    """Renders one number for each pixel."""

    def render(self):
        return np.zeros((4, 4), np.uint8)


class Promising(Blind):
    """Says that it renders, but has no render()."""

    render = gym.Env.render


class Loader(Endless):
    """Executes the file that it is given."""

    def __init__(self, path, actions="discrete"):
        super().__init__(actions)
        exec(Path(path).read_text())


def mark(env):
    """Not a wrapper, but can be called like one; leaves a file."""
    Path("executed").touch()
    return env


ENVIRONMENTS = {env.__name__: (env, {}) for env in (Match, Endless, Uneven, Faulty, Unclean)}
ENVIRONMENTS |= {env.__name__: (env, {}) for env in (Unpicturable, Blind, Grey, Promising, Loader)}
ENVIRONMENTS |= {f"Raises{where.title()}": (Raises, {"where": where}) for where in ("init", "reset", "step", "render")}
for name, (env, kwargs) in ENVIRONMENTS.items():
    gym.register(f"{name}-v0", env, kwargs=kwargs, disable_env_checker=True)
    gym.register(f"{name}Box-v0", env, kwargs=kwargs | {"actions": "box"}, disable_env_checker=True)
