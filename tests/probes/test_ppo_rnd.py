"""ppo_rnd.py in environments of one or two steps, whose right answer is known: what the two kinds of rewards do."""

from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.probes.envs import Delayed, Probe
from tests.tools import rehearse, vector_env


class Television(gym.Env):
    """One-step episodes without any reward. Action 1 shows three random numbers, action 0 what one has seen: zeros."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-1, 1, (3,))

    def __init__(self, end="terminated"):
        self.end = end

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        picture = action * self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return picture, 0.0, self.end == "terminated", self.end == "truncated", {}


def solve(script, *makers, **settings):
    """Train for some hundred steps. Returns the Run."""
    easy = {"num_envs": 8, "num_steps": 32, "num_minibatches": 2, "learning_rate": 2e-2, "gamma": 0.5}
    easy |= {"intrinsic_gamma": 0.5, "hidden_sizes": (16,), "ent_coef": 0.0, "total_timesteps": 1_500}
    names = {"buffer": "CuriousBuffer", "loss": "curious_loss"}
    return rehearse(script, *makers, **names, **easy | {"eval_episodes": 8} | settings)


def values_of(agent, number):
    """(V_ext, V_int) of an observation."""
    obs = torch.tensor([[number]], dtype=torch.float32)
    return agent.value(obs).item(), agent.intrinsic_value(obs).item()


@pytest.mark.parametrize(
    "episodic, end, extrinsic, intrinsic",
    [(False, "terminated", 1, 2), (False, "truncated", 2, 2), (True, "terminated", 1, 1), (True, "truncated", 2, 2)],
)
def test_values_at_the_end(script, episodic, end, extrinsic, intrinsic):
    """One step with reward 1 and novelty 1, gamma 0.5 for both. Extrinsic: V = 1, or truncated 1 / (1 - 0.5) = 2.

    Intrinsic: always 2, for after the episode comes the next, which is as new. With --episodic as extrinsic. Fails if
    an end reaches the wrong critic anywhere between environment and networks.
    """
    settings = {"episodic": episodic, "normalize_intrinsic": False}
    with mock.patch.object(script.RND, "novelty", lambda self, obs: torch.ones(obs.shape[:2])):
        agent = solve(script, lambda: Probe(end=end), **settings).agent
    values = values_of(agent, 0)
    assert abs(values[0] - extrinsic) < 0.1 and abs(values[1] - intrinsic) < 0.1


def test_intrinsic_discount(script):
    """Reward 1 after the second of two steps, and novelty 1 of all but the first one's observation; intrinsic_gamma 0.

    V_ext(s_1) = 1, V_ext(s_0) = 0.5; V_int(s_0) = 0 and V_int(s_1) = 1. Fails if a discount is the other's, or if
    novelty is not that of the observation that the step led to.
    """
    novelty = lambda self, obs: torch.tensor(obs[:, :, 0] > 1).float()  # of the final observation, 2
    settings = {"intrinsic_gamma": 0.0, "normalize_intrinsic": False}
    with mock.patch.object(script.RND, "novelty", novelty):
        agent = solve(script, Delayed, **settings).agent
    for number, extrinsic, intrinsic in ((0, 0.5, 0), (1, 1, 1)):
        values = values_of(agent, number)
        assert abs(values[0] - extrinsic) < 0.1 and abs(values[1] - intrinsic) < 0.1


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("episodic", [False, True])
def test_curiosity(script, episodic, end):
    """Nothing is rewarded; only after action 1 there is something new to see. Fails if novelty does not make an action
    likelier: if it is that of the observation before the step, if it goes to another row, or has the wrong sign.
    """
    run = solve(script, lambda: Television(end), episodic=episodic)
    assert run.agent.act(np.zeros((1, 3), np.float32)) == 1
    assert run.figures["entropy"][-1] < 0.3


def test_without_curiosity(script):
    """Fails if --intrinsic-coef 0 leaves something of it: the policy stays as even as it was at first."""
    run = solve(script, Television, intrinsic_coef=0.0, normalize_obs=False, learning_rate=1e-3)
    assert run.figures["entropy"][-1] > 0.6


def test_what_was_seen_often_is_not_new(script):
    """Fails if the predictor does not learn, or learns what was never seen as well."""
    run = solve(script, lambda: Probe(varied=True), predictor_learning_rate=1e-3)
    often = run.parts["rnd"].novelty(np.array([[[-1], [1]]], np.float32)).mean()
    never = run.parts["rnd"].novelty(np.array([[[-0.1], [0.1]]], np.float32)).mean()
    assert often < 0.02 * never
    first, last = run.figures["predictor_loss"][0], run.figures["predictor_loss"][-1]
    assert last < 0.02 * first


def test_random_play_begins_the_statistics(script):
    """Observations are -1 and 1: mean 0, variance 1, after 100 steps of 8 environments. Fails if the first rollout has
    no statistics, or if they are not made anew in the same way with the same seed.
    """
    args = script.Args(env_id="none", num_envs=8)
    make_envs = lambda *_: vector_env([lambda: Probe(varied=True)], 8)
    with mock.patch.object(script, "make_envs", make_envs):
        stats = [script.make_rnd(args, make_envs(), "cpu").obs_stats for _ in range(2)]
    assert stats[0].count == 800 and abs(stats[0].mean) < 0.2 and abs(stats[0].var - 1) < 0.05
    assert stats[0].mean == stats[1].mean
