"""Environments and a wrapper of a user's own, as `--env-id run_worlds:Faulty-v0`: each does one thing that is odd."""

import os
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Plain(gym.Env):
    """Episodes of ten steps, each of which pays 1; the observation is drawn at random."""

    observation_space, action_space = spaces.Box(-9, 9, (2,)), spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    render_mode = None

    def __init__(self, render_mode=None, leave=None):
        self.render_mode = render_mode
        if leave:  # a sign that somebody's arguments were executed
            Path(leave).touch()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self.observe(), {}

    def observe(self):
        return self.np_random.normal(size=2).astype(np.float32)

    def step(self, action):
        self.at += 1
        return self.observe(), 1.0, False, self.at == 10, {}

    def render(self):
        return np.zeros((32, 32, 3), np.uint8)


class Faulty(Plain):
    """At step `at` of an episode its observation or its reward is NaN or infinite, or it raises."""

    def __init__(self, field, at, value="nan", **kwargs):
        super().__init__(**kwargs)
        self.field, self.fatal, self.value = field, at, value

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self.at == self.fatal:
            if self.field == "raises":
                raise {"nan": KeyError, "gym": gym.error.InvalidAction}[self.value]("from within")
            obs, reward = (obs, float(self.value)) if self.field == "reward" else (obs * float(self.value), reward)
        return obs, reward, *rest


class Picture(Plain):
    """Pictures for the CNN, in episodes of ten steps."""

    observation_space = spaces.Box(0, 255, (36, 36, 3), np.uint8)

    def observe(self):
        return self.np_random.integers(256, size=(36, 36, 3), dtype=np.uint8)


class Grey(Picture):
    """Pictures without channels, which no network here takes."""

    observation_space = spaces.Box(0, 255, (36, 36), np.uint8)


class Scaled(Picture):
    """Pictures from 0 to 1."""

    observation_space = spaces.Box(0, 1, (36, 36, 3))


class Camera(Picture):
    """A picture beside a number."""

    observation_space = spaces.Dict(picture=Grey.observation_space, speed=spaces.Box(0, 1, ()))


class Broken(Plain):
    """Its constructor or its reset raises."""

    def __init__(self, where, **kwargs):
        super().__init__(**kwargs)
        self.where = where
        if where == "constructor":
            raise KeyError("from within")

    def reset(self, **given):
        if self.where == "reset":
            raise KeyError("from within")
        return super().reset(**given)


class Double(gym.RewardWrapper):
    """Pays twice as much; may raise."""

    def __init__(self, env, raises=False):
        super().__init__(env)
        if raises:
            raise KeyError("from within")

    def reward(self, reward):
        return 2 * reward


class Blind(Plain):
    """Its constructor does not take render_mode."""

    def __init__(self):
        super().__init__()


class Unseen(Plain):
    """Takes render_mode, but cannot render."""

    def render(self):
        raise NotImplementedError("from within")


class Endless(Plain):
    """An episode that never ends."""

    def step(self, action):
        obs, reward, *_, info = super().step(action)
        return obs, reward, False, False, info


class Own(gym.Wrapper):
    """A wrapper of a user's own; says that it was executed."""

    def __init__(self, env):
        super().__init__(env)
        Path(os.environ.get("LEAVE", os.devnull)).touch()


class Mistaken(Plain):
    """Its constructor names an argument wrongly."""

    def __init__(self, leave):
        super().__init__(leaf="from within")


gym.register("Plain-v0", Plain)
gym.register("Mistaken-v0", Mistaken)
gym.register("Blind-v0", Blind)
gym.register("Unseen-v0", Unseen)
gym.register("Endless-v0", Endless)
gym.register("Faulty-v0", Faulty)
gym.register("Picture-v0", Picture)
gym.register("Grey-v0", Grey)
gym.register("Scaled-v0", Scaled)
gym.register("Camera-v0", Camera)
gym.register("RaisesEarly-v0", Broken)
