"""dqn.py in environments of one or two steps, whose right answer is known: whole trainings that take a second."""

import pytest
import torch

from tests.probes.envs import Delayed, Probe, Walk
from tests.tools import close, rehearse

EASY = {"num_envs": 8, "learning_rate": 4e-2, "gamma": 0.5, "hidden_sizes": (16,), "batch_size": 16, "end_e": 0.5}
EASY |= {"learning_starts": 100, "train_frequency": 8, "target_network_frequency": 80, "total_timesteps": 2000}
EASY |= {"buffer_size": 1_000, "eval_episodes": 8, "buffer": "ReplayBuffer", "loss": "dqn_loss"}
TRAININGS = {
    "as it is": {},
    "plain": {"double": False},
    "soft target": {"tau": 0.2, "target_network_frequency": 8},
    "normalised": {"normalize_obs": True, "tau": 0.2, "target_network_frequency": 8},
}
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


def solve(script, *makers, name="as it is", **settings):
    """Train for a second. Returns the Run."""
    return rehearse(script, *makers, **EASY | TRAININGS[name] | settings)


def values(agent, *numbers):
    """Q of both actions in these states, one after the other."""
    return agent(torch.tensor(numbers, dtype=torch.float32)[:, None]).flatten().tolist()


@pytest.mark.parametrize("name", ["as it is", slow("normalised")])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_value_at_the_end(script, name, end):
    """One step with reward 1. Terminated, that is all: Q = 1. Truncated, it would go on: Q = 1 / (1 - 0.5) = 2.

    Fails if truncation is treated as termination, or the other way round, anywhere between environment and target.
    """
    value = {"terminated": 1, "truncated": 2}[end]
    agent = solve(script, lambda: Probe(end=end), name=name).agent
    close(values(agent, 0), [value, value], atol=0.1)


@pytest.mark.parametrize(
    "name, num_envs",
    [("normalised", 8), ("as it is", 8), slow("as it is", 1), slow("plain", 8), slow("soft target", 8)],
)
def test_discount(script, name, num_envs):
    """Reward 1 after the second step: Q(s_1) = 1, Q(s_0) = 0.5. Fails if the discount is missing or applied twice."""
    agent = solve(script, Delayed, name=name, num_envs=num_envs).agent
    close(values(agent, 0, 1), [0.5, 0.5, 1, 1], atol=0.1)


@pytest.mark.parametrize("name", ["as it is", slow("plain"), slow("soft target")])
def test_action_that_depends_on_the_observation(script, name):
    """Reward 1 for action 1 where the observation is 1, and for action 0 where it is -1.

    Fails if observations, actions and rewards of different steps are mixed, or if the worse action is chosen.
    """
    reward = lambda obs, action: float(action == (obs > 0))
    run = solve(script, lambda: Probe(varied=True, reward=reward), name=name)
    close(values(run.agent, -1, 1), [1, 0, 0, 1], atol=0.1)
    assert run.evaluations[-1][2] == 1


def test_clipped_rewards(script):
    """Reward 7, learnt as its sign: Q = 1. Fails if clipping is forgotten, or if reported returns are clipped too."""
    run = solve(script, lambda: Probe(reward=lambda obs, action: 7.0), clip_reward=True)
    close(values(run.agent, 0), [1, 1], atol=0.1)
    assert run.evaluations[-1][2] == run.mean_return() == 7


def test_reset_rows_are_not_stored(script):
    """Three environments with episodes of planned lengths and ends: what is stored is what was played, and no more."""
    plans = [[(3, "terminated"), (4, "truncated")], [(1, "truncated")], [(2, "both")]]
    makers = [lambda n=n: Walk(plans[n], n) for n in range(3)]
    run = solve(script, *makers, num_envs=3, total_timesteps=60, eval_episodes=3)
    buffer = run.parts["buffer"]
    assert buffer.size == run.step >= 60
    obs, next_obs = buffer.obs[: buffer.size], buffer.next_obs[: buffer.size]
    assert (next_obs[:, 2] == obs[:, 2] + 1).all() and (next_obs[:, :2] == obs[:, :2]).all()
    assert (buffer.rewards[: buffer.size] == 10 * obs[:, 1] + next_obs[:, 2]).all()
    for (name, episode, at), terminated in zip(next_obs.astype(int).tolist(), buffer.terminated):
        length, end = plans[name][episode % len(plans[name])]
        assert terminated == (at == length and end != "truncated")


def test_the_network_that_is_evaluated_is_the_one_that_learns(script):
    """Fails if models hold the target network, or a network of its own is given to the optimiser."""
    run = solve(script, Probe, total_timesteps=300, target_network_frequency=10**6)
    start = script.make_agent(run.args, run.envs).state_dict()
    moved = lambda network: any(not torch.equal(start[name], p) for name, p in network.state_dict().items())
    assert moved(run.agent) and not moved(run.parts["target"])
