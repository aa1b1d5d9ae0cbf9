"""The environments of run_envs.py as PettingZoo parallel environments: `--env-id run_envs_teams:Endless`."""

from functools import partial

import run_envs
from pettingzoo import ParallelEnv
from pettingzoo.utils import BaseParallelWrapper


class Team(ParallelEnv):
    """Two agents in one environment: both see what it shows, "a" alone acts, and each gets half of the reward."""

    def __init__(self, env, **kwargs):
        self.env = env(**kwargs)
        self.metadata = {"name": type(self.env).__name__} | self.env.metadata
        self.render_mode = self.env.render_mode
        self.possible_agents = ["a", "b"]

    def observation_space(self, agent):
        return self.env.observation_space

    def action_space(self, agent):
        return self.env.action_space

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        obs, info = self.env.reset(seed=seed)
        return self.each(obs), self.each(info)

    def step(self, actions):
        assert set(actions) == set(self.agents)
        obs, reward, terminated, truncated, info = self.env.step(actions["a"])
        result = tuple(self.each(value) for value in (obs, reward / 2, terminated, truncated, info))
        if terminated or truncated:
            self.agents = []
        return result

    def each(self, value):
        return dict.fromkeys(self.possible_agents, value)

    def render(self):
        return self.env.render()


class Own(BaseParallelWrapper):
    """A user's own wrapper: it counts over all episodes, and holds what cannot be pickled."""

    def __init__(self, env):
        super().__init__(env)
        self.life = 0
        self.weights = (1 / n for n in range(1, 10**9))

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        self.life += 1
        more = next(self.weights) / len(rewards)
        rewards = {agent: reward + more for agent, reward in rewards.items()}
        if self.life % 37 == 0:
            truncated = dict.fromkeys(truncated, True)
            self.env.agents = []
        return obs, rewards, terminated, truncated, infos


for name, (env, kwargs) in run_envs.ENVIRONMENTS.items():
    globals()[name] = partial(Team, env, **kwargs)
    globals()[f"{name}Box"] = partial(Team, env, actions="box", **kwargs)
