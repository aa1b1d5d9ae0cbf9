"""Environments with masks, for the tests of ppo_masked.py: `--env-id masked_envs:Cue-v0` registers them."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

ACTIONS = {
    "discrete": spaces.Discrete(4, start=-1),
    "multidiscrete": spaces.MultiDiscrete([2, 3]),
    "multibinary": spaces.MultiBinary(2),
    "box": spaces.Box(-1, 1, (1,)),
}
# Two masks of each kind: what is valid when the coin shows 0, and when it shows 1.
MASKS = {
    "discrete": [[1, 0, 1, 0], [0, 1, 1, 1]],
    "multidiscrete": [[1, 0, 1, 1, 0], [1, 1, 0, 1, 1]],
    "multibinary": [[1, 1, 0, 1], [1, 0, 1, 1]],
    "box": [[1], [1]],
}


def valid(kind, coin, action):
    """Whether the mask allows this action, in the numbers of the space."""
    mask = MASKS[kind][coin]
    if kind == "discrete":
        return bool(mask[action + 1])
    return all(mask[place] for place in ((action[0], 2 + action[1])))


class Cue(gym.Env):
    """Two to four steps; each shows two coins, of which the first decides what is valid. An invalid action is an error.

    The right actions pay 1 in all: the last valid choice of every factor where the second coin shows 1, and the
    first where it shows 0. The mask comes by `source`: info, method or entry; `final` is what it is at the end of an
    episode (zeros, nan or None: not given at all). `lenient` environments ignore invalid actions instead. The masks of
    the step `bad_at` are `bad`.
    """

    def __init__(
        self, source="info", kind="discrete", observation="vector", final="zeros", lenient=False, bad_at=-1, bad=0.0
    ):
        self.source, self.kind, self.observation, self.final, self.lenient = source, kind, observation, final, lenient
        self.bad_at, self.bad, self.life = bad_at, bad, 0
        self.action_space = ACTIONS[kind]
        self.observation_space = {
            "vector": spaces.Box(-1, 2, (2,), np.float64),
            "number": spaces.Discrete(4, start=3),
            "dict": spaces.Dict(first=spaces.Discrete(2), second=spaces.Box(0, 1, (1, 1)), noise=spaces.MultiBinary(3)),
            "text": spaces.Dict(first=spaces.Discrete(2), mission=spaces.Text(3)),
            "image": spaces.Box(0, 255, (36, 36, 3), np.uint8),
            "mask": spaces.Dict(),
        }[observation]
        if source == "entry":
            inner = self.observation_space
            inner = dict(inner.spaces) if isinstance(inner, spaces.Dict) else {"cue": inner}
            mask = spaces.Box(0, 1, (len(MASKS[kind][0]),))
            self.observation_space = spaces.Dict(**inner, action_mask=mask)
        if source == "method":
            self.action_masks = self.method

    def mask(self):
        if self.life == self.bad_at:
            return np.full(len(MASKS[self.kind][0]), self.bad, np.float32)
        return np.array(MASKS[self.kind][self.coins[0]], np.float32)

    def method(self):
        assert not self.over, "asked for masks when the episode was over"
        return self.mask()

    def seen(self, over=False):
        """(observation, info)."""
        self.over = over and self.final is None
        self.coins = [int(coin) for coin in self.np_random.integers(2, size=2)]
        first, second = self.coins
        obs = {
            "vector": np.array([first, 2 * second - 1.0]),
            "number": 3 + 2 * first + second,
            "dict": {
                "first": first,
                "second": np.full((1, 1), second, np.float32),
                "noise": self.np_random.integers(2, size=3).astype(np.int8),
            },
            "text": {"first": first, "mission": "go"},
            "image": np.zeros((36, 36, 3), np.uint8),
        }[self.observation]
        foul = np.full(len(MASKS[self.kind][0]), np.nan if self.final == "nan" else 0, np.float32)
        mask = foul if over else self.mask()
        if self.source == "entry":
            obs = {**(obs if isinstance(obs, dict) else {"cue": obs}), "action_mask": mask}
        return obs, {"action_mask": mask} if self.source == "info" and not (over and self.final is None) else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.length = 0, int(self.np_random.integers(2, 5))
        return self.seen()

    def step(self, action):
        if not self.lenient and not valid(self.kind, self.coins[0], action):
            raise ValueError(f"{action} is invalid where the coins show {self.coins}")
        right = self.right()
        reward = float(np.all(np.asarray(action) == right)) / self.length
        self.steps += 1
        self.life += 1
        over = self.steps == self.length
        obs, info = self.seen(over)
        return obs, reward, over, False, info

    def right(self):
        """The action that pays."""
        mask, place = np.array(MASKS[self.kind][self.coins[0]]), -self.coins[1]
        if self.kind == "discrete":
            return np.flatnonzero(mask)[place] - 1
        return [np.flatnonzero(mask[:2])[place], np.flatnonzero(mask[2:])[place]]


class Needle(gym.Env):
    """70 actions, of which 55 are invalid at each step and one of the other 15 pays 1; episodes of 100 steps.

    The observation is the number of the right action. An invalid action is an error.
    """

    action_space, observation_space = spaces.Discrete(70), spaces.Discrete(70)

    def seen(self):
        self.right = int(self.np_random.integers(70))
        others = self.np_random.permutation(np.delete(np.arange(70), self.right))[:14]
        self.valid = np.zeros(70, bool)
        self.valid[[self.right, *others]] = True
        return self.right

    def action_masks(self):
        return self.valid

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.seen(), {}

    def step(self, action):
        assert self.valid[action], f"{action} is invalid"
        reward = float(action == self.right)
        self.steps += 1
        return self.seen(), reward, False, self.steps == 100, {}


class NativeCues(gym.vector.SyncVectorEnv):
    """Cues as an environment with a vector version of its own, which tells the masks of all slots at once."""

    def __init__(self, num_envs, **kwargs):
        super().__init__([lambda: Cue(**kwargs | {"source": "none"})] * num_envs)

    def action_masks(self):
        return np.array([env.mask() for env in self.envs], bool)


for env in (Cue, Needle):
    gym.register(f"{env.__name__}-v0", env, disable_env_checker=True)
gym.register("NativeCue-v0", Cue, vector_entry_point=NativeCues, disable_env_checker=True)
