"""rainbow.py in environments of one or two steps, whose right answer is known: whole trainings that take a second."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.probes.envs import Delayed, Probe, Walk
from tests.rainbow_envs import Frames
from tests.tools import close, rehearse

OFF = dict.fromkeys(["double", "prioritized", "dueling", "multi_step", "distributional", "noisy"], False)
EASY = {"num_envs": 8, "learning_rate": 2e-2, "gamma": 0.5, "hidden_sizes": (16,), "batch_size": 32, "end_e": 0.5}
EASY |= {"learning_starts": 100, "train_frequency": 4, "target_network_frequency": 50, "total_timesteps": 2000}
EASY |= {"buffer_size": 1_000, "eval_episodes": 8, "num_atoms": 21, "v_min": -1.0, "v_max": 3.0, "n_step": 3}
TRAININGS = {
    "all": {},
    "double": OFF | {"double": True},
    "prioritized": OFF | {"prioritized": True},
    "dueling": OFF | {"dueling": True},
    "multi_step": OFF | {"multi_step": True},
    "distributional": OFF | {"distributional": True},
    "noisy": OFF | {"noisy": True},
    "soft target, normalised": {"tau": 0.15, "target_network_frequency": 4, "normalize_obs": True},
}


def slow_but(*fast):
    """Parameters for all of TRAININGS, of which only some are fast enough for every day."""
    return [pytest.param(name, marks=[] if name in fast else [pytest.mark.slow]) for name in TRAININGS]


def solve(script, *makers, name="all", **settings):
    """Train for a second or two. Returns the Run."""
    settings = EASY | TRAININGS[name] | settings
    loss = "distributional_losses" if settings.get("distributional", True) else "td_losses"
    return rehearse(script, *makers, buffer="NStepBuffer", loss=loss, **settings)


def values(agent, *numbers):
    """Q of both actions in these states without noise, one after the other."""
    agent.eval()
    return agent(torch.tensor(numbers, dtype=torch.float32)[:, None]).flatten().tolist()


@pytest.mark.parametrize("name", slow_but("multi_step"))
@pytest.mark.parametrize("end", [pytest.param("terminated", marks=pytest.mark.slow), "truncated"])
def test_value_at_the_end(script, name, end):
    """One step with reward 1. Terminated, that is all: Q = 1. Truncated, it would go on: Q = 1 / (1 - 0.5) = 2.

    Fails if truncation is treated as termination, or the other way round, anywhere between environment and target.
    """
    value = {"terminated": 1, "truncated": 2}[end]
    agent = solve(script, lambda: Probe(end=end), name=name).agent
    atol = 0.4 if name == "noisy" else 0.1  # the mean weights' Q is not the mean of the noisy weights' Q
    close(values(agent, 0), [value, value], atol=atol)


@pytest.mark.parametrize("name", slow_but("all"))
def test_discount(script, name):
    """Reward 1 after the second step: Q(s_1) = 1, Q(s_0) = 0.5. Fails if the discount is missing or applied twice."""
    agent = solve(script, Delayed, name=name).agent
    close(values(agent, 0, 1), [0.5, 0.5, 1, 1], atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_action_that_depends_on_the_observation(script, name):
    """Reward 1 for action 1 where the observation is 1, and for action 0 where it is -1.

    Fails if observations, actions and rewards of different steps are mixed, or if the worse action is chosen.
    """
    reward = lambda obs, action: float(action == (obs > 0))
    run = solve(script, lambda: Probe(varied=True, reward=reward), name=name)
    assert run.evaluations[-1][2] == 1
    if name not in ("all", "noisy", "soft target, normalised"):  # with noise the worse action is soon left alone
        close(values(run.agent, -1, 1), [1, 0, 0, 1], atol=0.1)


@pytest.mark.slow
def test_distribution_of_the_return(script):
    """Action 0 pays 1 or -1, each half of the time; action 1 pays 0 for certain. Both are worth 0.

    Fails if the distribution is a single return, as it would be if only the mean were learnt.
    """
    rng = np.random.default_rng(0)
    reward = lambda obs, action: 0.0 if action else float(rng.choice([-1, 1]))
    agent = solve(script, lambda: Probe(reward=reward), name="distributional", v_min=-2.0, v_max=2.0, num_atoms=5).agent
    probs = agent.log_probs(torch.zeros(1, 1)).exp()[0]
    close(probs, [[0, 0.5, 0, 0.5, 0], [0, 0, 1, 0, 0]], atol=0.1)


@pytest.mark.slow
def test_noise_explores_and_fades(script):
    """Only action 1 pays. With noise alone both actions are tried at first, the better one is found, and sigma shrinks.

    Fails if the noise is not in the acting network, does not change from step to step, or is not learnt.
    """
    run = solve(script, lambda: Probe(reward=lambda obs, action: float(action)), name="noisy", buffer_size=3000)
    actions = run.parts["buffer"].actions[:100, 0]
    assert 5 < actions.sum() < 95 and run.evaluations[-1][2] == 1
    start = 0.5 * (1 + 0.25) / 2  # one input, then 16: 0.5 / 1 and 0.5 / 4
    assert run.figures["sigma"][0] == pytest.approx(start) and run.agent.mean_sigma() < 0.95 * start


class Chain(gym.Env):
    """Seven steps; only the last is rewarded, with 1, whatever the actions. The observation is the step, one-hot."""

    action_space, observation_space = spaces.Discrete(2), spaces.Box(0, 1, (7,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.eye(7, dtype=np.float32)[0], {}

    def step(self, action):
        self.at += 1
        over = self.at == 7
        return np.eye(7, dtype=np.float32)[min(self.at, 6)], float(over), over, False, {}


@pytest.mark.slow
def test_n_steps_carry_a_reward_back_sooner(script):
    """Two copies of the target network carry the last reward back two steps further; in windows of seven, all the way.

    Fails if --n-step changes nothing. (gamma = 1: Q(s_0) = 1 once it has arrived.)
    """
    few = {"gamma": 1.0, "total_timesteps": 1_000, "target_network_frequency": 400, "learning_starts": 50}
    start = torch.eye(7)[:1]
    one, seven = (solve(script, Chain, name="multi_step", n_step=n, **few).agent for n in (1, 7))
    assert one(start).max() < 0.6
    close(seven(start), [[1, 1]], atol=0.2)


@pytest.mark.slow
def test_clipped_rewards(script):
    """Reward 7, learnt as its sign: Q = 1. Fails if clipping is forgotten, or if reported returns are clipped too."""
    run = solve(script, lambda: Probe(reward=lambda obs, action: 7.0), clip_reward=True, name="distributional")
    close(values(run.agent, 0), [1, 1], atol=0.1)
    assert run.evaluations[-1][2] == run.mean_return() == 7


@pytest.mark.parametrize("reward, flag", [(-5.0, "--v-min"), (5.0, "--v-max"), (2.5, None)])
def test_returns_that_leave_the_support_are_named(script, reward, flag, capsys):
    """The support is [-1, 3]; the message comes once. Fails if what lies beyond is cut off in silence."""
    script.say_once.cache_clear()
    low = -1.0 if reward > 0 else -3.0
    few = {"total_timesteps": 150, "v_min": low, "v_max": low + 4}
    run = solve(script, lambda: Probe(reward=lambda obs, action: reward), **few)
    err = capsys.readouterr().err
    assert run.figures["target_max"][-1] == run.figures["target_min"][-1] == reward
    if flag is None:
        assert err == ""
    else:
        assert err.count("\n") == 1 and f"returns leave the support [{low:g}, {low + 4:g}]" in err and flag in err


def test_reset_rows_are_not_stored(script):
    """Three environments with episodes of planned lengths and ends: what is stored is what was played, and no more."""
    plans = [[(3, "terminated"), (4, "truncated")], [(1, "truncated")], [(2, "both")]]
    makers = [lambda n=n: Walk(plans[n], n) for n in range(3)]
    settings = {"num_envs": 3, "total_timesteps": 60, "eval_episodes": 3, "v_max": 900.0}
    run = solve(script, *makers, name="multi_step", n_step=1, **settings)
    buffer = run.parts["buffer"]
    assert buffer.size == run.step >= 60
    obs, next_obs = buffer.obs[: buffer.size], buffer.next_obs[: buffer.size]
    assert (next_obs[:, 2] == obs[:, 2] + 1).all() and (next_obs[:, :2] == obs[:, :2]).all()
    assert (buffer.rewards[: buffer.size] == 10 * obs[:, 1] + next_obs[:, 2]).all()
    for (name, episode, at), terminated in zip(next_obs.astype(int).tolist(), buffer.terminated):
        length, end = plans[name][episode % len(plans[name])]
        assert terminated == (at == length and end != "truncated")


@pytest.mark.slow
def test_stacked_frames_learn(script, monkeypatch):
    """The right action can only be seen in two frames. Fails if stacks are put together in another order."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # images would take all cores
    settings = {"total_timesteps": 1_200, "learning_rate": 5e-4, "train_frequency": 8, "stacked_frames": "yes"}
    settings |= OFF | {"prioritized": True, "batch_size": 16}
    settings = EASY | settings | {"buffer": "FrameStackBuffer", "loss": "td_losses", "eval_episodes": 20}
    assert rehearse(script, Frames, **settings).evaluations[-1][2] > 0.9
