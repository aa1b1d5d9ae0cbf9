"""ppod.py in environments whose right answer is known: values, discount, credit, memory, and what one demo is worth."""

import demo_worlds
import numpy as np
import pytest
import torch
from demo_worlds import Chain, Reach, Recall
from gymnasium import spaces

from tests.probes.envs import Delayed, Probe
from tests.tools import rehearse

NAMES = {"buffer": "SequenceBuffer", "loss": "sequence_loss"}
each_memory = pytest.mark.parametrize("recurrent", [True, False], ids=["GRU", "feed-forward"])


def solve(script, *makers, **settings):
    """Train for some hundred steps, by default without demonstrations. Returns the Run."""
    easy = {"num_envs": 8, "num_steps": 32, "num_minibatches": 2, "learning_rate": 2e-2, "gamma": 0.5, "rho": 0.0}
    easy |= {"phi": 0.0, "chunk_length": 8, "gru_size": 8, "hidden_sizes": (16,), "ent_coef": 0.0}
    return rehearse(script, *makers, **NAMES, **easy | {"total_timesteps": 1_500, "eval_episodes": 8} | settings)


def value_of(agent, *numbers):
    """The value of the last of these observations of an episode."""
    obs = torch.tensor(numbers, dtype=torch.float32)[:, None, None]
    features, _ = agent.features(obs, torch.zeros(len(obs), 1, dtype=torch.bool), torch.zeros(1, agent.state_size))
    return agent.critic(features[-1]).item()


@pytest.mark.parametrize("end, value, recurrent", [("terminated", 1, True), ("truncated", 2, False)])
def test_values_at_the_end(script, end, value, recurrent):
    """One step with reward 1, gamma 0.5: V = 1, or truncated 1 / (1 - 0.5) = 2. Fails if an end reaches the critic as
    another one, anywhere between environment and network. (A GRU tells the final observation from the first one, and
    what it says of that is never trained: then there is no right answer.)"""
    agent = solve(script, lambda: Probe(end=end), recurrent=recurrent).agent
    assert abs(value_of(agent, 0) - value) < 0.1


def test_discount(script):
    """Reward 1 after the second of two steps: V(s_1) = 1, V(s_0) = 0.5. Fails if steps change places."""
    agent = solve(script, Delayed).agent
    assert abs(value_of(agent, 0) - 0.5) < 0.1 and abs(value_of(agent, 0, 1) - 1) < 0.1


@pytest.mark.parametrize("recurrent", [pytest.param(True, marks=pytest.mark.slow), False], ids=["GRU", "feed-forward"])
def test_credit(script, recurrent):
    """Action 1 is right where the observation is 1, action 0 where it is -1. Fails if rewards go to another row."""
    reward = lambda obs, action: float(action == (obs > 0))
    run = solve(script, lambda: Probe(varied=True, reward=reward), recurrent=recurrent, total_timesteps=2_000)
    assert run.evaluations[-1][2] == 1


def test_integer_boxes_are_rounded(script):
    """A Box of the integers from 0 to 9, where the policy's mean is 8.9. Fails if that becomes 8."""
    box = spaces.Box(0, 9, (1,), np.int64)
    agent = solve(script, lambda: Probe(box), total_timesteps=10).agent
    agent.actor.weight.data[:], agent.actor.bias.data[:] = 0, 8.9
    assert agent.act(np.zeros((1, 1), np.float32)).tolist() == [[9]]


@pytest.mark.slow
@each_memory
def test_memory(script, recurrent):
    """Recall asks for a cue that is out of sight: a GRU solves it, without one chance is the best there is."""
    learn = {"gru_size": 16, "total_timesteps": 25_000, "learning_rate": 5e-3, "gamma": 0.99, "ent_coef": 0.01}
    run = solve(script, Recall, recurrent=recurrent, eval_episodes=50, num_minibatches=4, **learn)
    mean = run.evaluations[-1][2]
    assert mean > 0.95 if recurrent else mean < 0.8


# ------------------------------------------------------------------------------------------------------ demonstrations

CHAIN = {"num_envs": 8, "num_steps": 64, "num_minibatches": 4, "learning_rate": 3e-3, "hidden_sizes": (32,)}
CHAIN |= {"recurrent": False, "rho": 0.3, "phi": 0.0, "gamma": 0.99, "eval_episodes": 1, "anneal_lr": False}


def solve_chain(script, folder, steps, **settings):
    """The Run after training on the Chain, whose demonstration lies in the folder."""
    demo_worlds.write_demo(script, folder / "demo.npz", demo_worlds.chain_demo(script), Chain())
    given = {"initial_human_demos_dir": str(folder), "total_timesteps": steps}
    return rehearse(script, Chain, **NAMES, **CHAIN | given | settings)


def test_chain_is_solved_from_one_demo(script, tmp_path):
    """2 ** -12 is the chance of a random policy; one demo shows the way. Fails if replays teach nothing."""
    run = solve_chain(script, tmp_path, 3_000)
    assert run.evaluations[-1][2] == 1
    (human,) = [demo for demo in run.parts["demos"].reward_demos if demo.human]
    assert human.total == 1 and len(run.parts["demos"].reward_demos) > 1


def test_chain_is_not_solved_without(script, tmp_path):
    """The demo is loaded, but never replayed. Fails if the comparison shows nothing, since the task is easy."""
    assert solve_chain(script, tmp_path, 1_500, rho=0.0).evaluations[-1][2] == 0


@pytest.mark.slow
def test_chain_with_a_gru(script, tmp_path):
    """The same with replays over which the GRU's state runs on."""
    run = solve_chain(script, tmp_path, 20_000, recurrent=True, gru_size=32, chunk_length=16)
    assert run.evaluations[-1][2] == 1


def test_value_demos_are_replayed(script, tmp_path):
    """Replays of failures alone teach the critic nothing, but do no harm. Fails if they do not join, stay within the
    capacity or get replayed."""
    run = solve_chain(script, tmp_path, 600, rho=0.0, phi=0.3, initial_reward_threshold=0.5, demo_capacity=20)
    demos = run.parts["demos"]
    assert len(demos.value_demos) == 19 and demos.replayed_rows > 0


@pytest.mark.parametrize("threshold, good", [(None, 0), (0.0, 51), (0.5, 0)])
def test_failures_are_no_reward_demos(script, threshold, good):
    """Nothing but failures, whose return is 0. Fails if they become reward demos, unless the user's threshold is 0."""
    run = rehearse(script, Chain, **NAMES, **CHAIN | {"total_timesteps": 500}, initial_reward_threshold=threshold)
    demos = run.parts["demos"]
    assert len(run.episodes) > 51 and {total for _, total in run.episodes} == {0}
    assert (len(demos.reward_demos), len(demos.value_demos)) == (good, 51 - good)
    assert demos.reward_threshold == threshold and (demos.replayed_rows > 0) == (good > 0)


@pytest.mark.slow
def test_continuous_demo(script, tmp_path):
    """Reach with Box actions: moving at random seldom gets to 5 in 30 steps; the demo moves by 0.45 each time."""
    obs = 0.45 * np.arange(13, dtype=np.float32)[:, None]
    rewards = np.append(np.zeros(11), 1).astype(np.float32)
    demo = script.Demo(obs, np.full((12, 1), 0.9, np.float32), rewards, True, 1.0)
    demo_worlds.write_demo(script, tmp_path / "demo.npz", demo, Reach())
    given = {"initial_human_demos_dir": str(tmp_path), "total_timesteps": 20_000, "gamma": 0.9}
    assert rehearse(script, Reach, **NAMES, **CHAIN | given).evaluations[-1][2] == 1
