"""ppo.py in environments of one or two steps, whose right answer is known: each isolates one thing."""

from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.against_loops.test_ppo import ACTION_SPACES
from tests.probes.envs import Delayed, Probe, Walk
from tests.tools import rehearse, vector_env

ESTIMATORS = "gae", "vtrace", "vanilla"


def solve(script, *makers, **settings):
    """Train for some hundred steps. Returns (agent, mean return of the evaluation at the end)."""
    easy = {"num_envs": 8, "num_steps": 32, "num_minibatches": 2, "learning_rate": 3e-2, "gamma": 0.5}
    easy |= {"hidden_sizes": (16,), "ent_coef": 0.0, "total_timesteps": 1_000, "eval_episodes": 8}
    run = rehearse(script, *makers, **easy | settings)
    return run.agent, run.evaluations[-1][2]


def value_of(agent, number):
    """V of an observation."""
    return agent.value(torch.tensor([[number]], dtype=torch.float32)).item()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("end, value", [("terminated", 1), ("truncated", 2)])
def test_value_at_the_end(script, estimator, end, value):
    """One step with reward 1. Terminated, that is all: V = 1. Truncated, it would go on: V = 1 / (1 - 0.5) = 2.

    Fails if truncation is treated as termination, or the other way round, anywhere between environment and critic.
    """
    agent, _ = solve(script, lambda: Probe(end=end), estimator=estimator)
    assert abs(value_of(agent, 0) - value) < 0.1


@pytest.mark.parametrize("num_envs", [1, 8])
def test_discount(script, num_envs):
    """Reward 1 after the second step: V(s_1) = 1, V(s_0) = 0.5. Fails if the discount is missing or applied twice."""
    agent, _ = solve(script, Delayed, num_envs=num_envs, num_steps=256 // num_envs)
    assert abs(value_of(agent, 0) - 0.5) < 0.1 and abs(value_of(agent, 1) - 1) < 0.1


def test_observation(script):
    """The reward is the observation, -1 or 1. Fails if critic and observation do not belong to the same row."""
    agent, _ = solve(script, lambda: Probe(varied=True, reward=lambda obs, action: obs))
    assert abs(value_of(agent, -1) + 1) < 0.1 and abs(value_of(agent, 1) - 1) < 0.1


def test_clipped_rewards(script):
    """Reward 7, learnt as its sign: V = 1. Fails if clipping is forgotten, or if reported returns are clipped too."""
    agent, mean = solve(script, lambda: Probe(reward=lambda obs, action: 7.0), clip_reward=True)
    assert abs(value_of(agent, 0) - 1) < 0.1 and mean == 7


HITS = {
    "Discrete": 2,
    "Discrete from 5": 6,
    "MultiDiscrete": [1, 2],
    "MultiDiscrete from": [[2, 11], [3, -1]],
    "MultiBinary": [1, 0, 1],
    "Box": [-0.5, 2],
    "Box of integers": [-1, 3],
}


@pytest.mark.parametrize("name", HITS)
def test_action(script, name):
    """The reward is 1 for one action only; in a Box, less by its distance. Fails if the policy's gradient has the wrong
    sign, or an action is not the one that was rewarded.
    """
    space, target = ACTION_SPACES[name][0], HITS[name]
    reward = lambda obs, action: np.mean(np.equal(action, target))
    if isinstance(space, spaces.Box):
        reward = lambda obs, action: 1 - np.mean(np.abs(action - np.array(target)))
    _, mean = solve(script, lambda: Probe(space, reward=reward), total_timesteps=1_500)
    assert mean > (0.8 if name == "Box" else 0.99)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_action_that_depends_on_the_observation(script, estimator):
    """1 if the action goes with the observation, else 0. Fails if advantages land on other rows than their actions."""
    hit = lambda obs, action: action == (obs > 0)
    agent, mean = solve(script, lambda: Probe(varied=True, reward=hit), estimator=estimator)
    assert agent.act(np.array([[-1], [1]], np.float32)).tolist() == [0, 1] and mean == 1


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_credit(script, estimator):
    """The second step is rewarded if the first action was 1. Fails if the reward does not reach that action."""
    agent, mean = solve(script, lambda: Delayed(reward=float), estimator=estimator)
    assert agent.act(np.zeros((1, 1), np.float32)) == 1 and mean == 1


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_native_cartpole_sets_both_flags(script, estimator):
    """V is 50 everywhere, each reward 1: last steps are worth 1 or, cut off, 1 + 25. Fails if a rollout bootstraps
    after a pole that falls in the very step in which time runs out, or if a reset row is rewarded.
    """
    args = script.Args(max_episode_steps=9, estimator=estimator, gamma=0.5)
    envs = script.make_envs(args, 32)
    assert type(envs.unwrapped).__name__ == "CartPoleVectorEnv"
    assert envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP
    buffer = script.RolloutBuffer(12, 32, envs.single_observation_space, envs.single_action_space)
    envs.reset(seed=0)
    reset_rows = np.zeros(32, bool)
    for t in range(12):
        obs, rewards, terminated, truncated, _ = envs.step(np.zeros(32, int))
        buffer.add(t, obs, np.zeros((32, 1)), rewards, terminated, truncated, reset_rows)
        reset_rows = terminated | truncated
    zeros = torch.zeros(12, 32)
    buffer.compute_advantages(zeros, torch.full((13, 32), 50.0), zeros, args)
    both, cut_off = buffer.terminated & buffer.truncated, buffer.truncated & ~buffer.terminated
    assert both.any() and cut_off.any() and buffer.reset_rows.any()
    assert (buffer.returns[torch.as_tensor(both)] == 1).all()
    assert (buffer.returns[torch.as_tensor(cut_off)] == 26).all()
    assert (buffer.rewards[buffer.reset_rows] == 0).all()


def test_rows_of_a_real_vector_environment(script):
    """Fails if the row after an end is not marked, at the start of a rollout as well, if its observation is not the
    episode's last, if flags or rewards stand in other rows, or if a reset row is counted. Two rollouts of 8 steps.
    """
    plans = [(2, "terminated"), (3, "truncated")], [(1, "both"), (4, "truncated")]
    settings = {"num_envs": 2, "num_steps": 8, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 20}
    run = rehearse(script, lambda: Walk(plans[0], 0), lambda: Walk(plans[1], 1), watch=True, **settings)
    one, two = [call.buffer for call in run.calls]
    join = lambda name: np.concatenate([getattr(one, name), getattr(two, name)])
    assert np.array_equal(one.obs[8], two.obs[0])
    obs, rewards = np.concatenate([one.obs[:8], two.obs]), join("rewards")
    for n, lengths in enumerate([(2, 3, 2, 3, 2), (1, 4, 1, 4, 1, 0)]):  # the last step of the second is a reset row
        walked = [(n, e, t) for e, length in enumerate(lengths) for t in range(length + 1)]
        assert obs[:, n].tolist() == list(map(list, walked))
        resets = np.array([t == lengths[e] for _, e, t in walked[:-1]])
        assert np.array_equal(join("reset_rows")[:, n], resets)
        assert rewards[:, n].tolist() == [0 if r else 10 * e + t + 1 for r, (_, e, t) in zip(resets, walked)]
        ends, odd = np.array([t == lengths[e] for _, e, t in walked[1:]]), np.array([e % 2 for _, e, _ in walked[1:]])
        ends &= ~resets
        assert np.array_equal(join("terminated")[:, n], ends & (odd == 0))
        assert np.array_equal(join("truncated")[:, n], ends & ((odd == 1) | (n == 1)))
    assert run.step == 32 - join("reset_rows").sum()
    assert sorted(total for _, total in run.episodes) == [1, 3, 21, 36, 41, 43, 50, 83, 96, 130]


def test_evaluation(script):
    """Episodes of 2 and 5 steps with returns 1 + 2 and 1 + … + 5: 9 ± 6. Fails if an evaluation goes on counting after
    the end of an episode, or ends with the first of them.
    """
    makers = [lambda: Walk([(2, "terminated")]), lambda: Walk([(5, "truncated")])]
    agent = SimpleNamespace(act=lambda obs: np.zeros(2, int))
    with mock.patch.object(script, "make_envs", lambda *arguments: vector_env(makers, 2)):
        assert script.evaluate(agent, script.Args(), 2) == (9, 6)
