"""The numbers of ppo.py: estimators, losses, distributions, buffers and updates, held against arithmetic done by hand,
against slow and obvious loops on random input, and against environments whose right answer is known.

The `check_…` functions take the implementation they judge, so that the tests at the end can hand them faulty ones: each
known mistake has to be caught, or else the check is worth nothing.
"""

import copy
import csv
import inspect
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from probe_envs import Delayed, Probe, Walk

import ppo

CASES = json.loads(Path(__file__).with_name("cases.json").read_text())["cases"]
BUFFERS = {"vanilla": ppo.RolloutBuffer, "gae": ppo.GAEBuffer, "vtrace": ppo.VTraceBuffer}
ACTION_SPACES = {
    "Discrete": spaces.Discrete(3),
    "Discrete from 5": spaces.Discrete(3, start=5),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiDiscrete from": spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 10], [0, -1]]),
    "MultiBinary": spaces.MultiBinary(3),
    "MultiBinary 2 x 2": spaces.MultiBinary((2, 2)),
    "Box": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32)),
    "Box 2 x 1, float64": spaces.Box(-2, 2, (2, 1), np.float64),
}
TWO = spaces.Discrete(2)
every_action_space = pytest.mark.parametrize("action_space", ACTION_SPACES.values(), ids=ACTION_SPACES.keys())
every_buffer = pytest.mark.parametrize("buffer_class", BUFFERS.values(), ids=BUFFERS.keys())


def close(actual, expected, atol=1e-5):
    """AssertionError unless all numbers agree; shapes as well."""
    actual, expected = (torch.as_tensor(np.asarray(x), dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-5)


def differ(actual, expected):
    """AssertionError if all numbers agree."""
    assert np.abs(np.asarray(actual) - np.asarray(expected)).max() > 1e-3


def column(numbers):
    """Numbers of one environment as a tensor (T, 1)."""
    return torch.tensor(numbers, dtype=torch.float32)[:, None]


def flags(numbers):
    """Noughts and ones of one environment as a boolean tensor (T, 1)."""
    return torch.tensor(numbers, dtype=torch.bool)[:, None]


def make_agent(action_space=ACTION_SPACES["Discrete"], observation_space=None, **args):
    """An Agent for the given spaces; three numbers are its observation unless said otherwise."""
    args = ppo.Args(env_id="none", **args)
    return ppo.Agent(observation_space or spaces.Box(-np.inf, np.inf, (3,)), action_space, args)


def make_buffer(buffer_class, num_steps, num_envs, action_space=ACTION_SPACES["Discrete"], observation_size=3, **more):
    """A buffer on the CPU with gamma = 0.5."""
    observation_space = spaces.Box(-np.inf, np.inf, (observation_size,))
    return buffer_class(num_steps, num_envs, observation_space, action_space, "cpu", 0.5, **more)


# ------------------------------------------------------------------------------------ estimators, computed by hand


def step_arguments(case):
    """(rewards, values, next_values, terminated, truncated), each (T, 1), of a case."""
    inputs = CASES[case]["inputs"]
    numbers = (column(inputs[name]) for name in ("rewards", "values", "next_values"))
    return (*numbers, *(flags(inputs[name]) for name in ("terminated", "truncated")))


def check_gae(compute_gae):
    """gamma = lambda = 0.5, so that traces decay by 0.25. Terminated after step 1, truncated after step 3.

    delta_0 = 1 + 0.5 * 1 - 0.5 = 1      A_0 = 1 + 0.25 * 1 = 1.25
    delta_1 = 2 - 1 = 1                  A_1 = 1                     (terminated: neither bootstrap nor trace)
    delta_2 = 3 + 0.5 * 2 - 1.5 = 2.5    A_2 = 2.5 + 0.25 * 6 = 4
    delta_3 = 4 + 0.5 * 8 - 2 = 6        A_3 = 6                     (truncated: bootstrap, but no trace)
    delta_4 = 5 + 0.5 * 3 - 2.5 = 4      A_4 = 4 + 0.25 * 5 = 5.25
    delta_5 = 6 + 0.5 * 4 - 3 = 5        A_5 = 5                     (the rollout ends, the episode does not)
    """
    advantages, returns = compute_gae(*step_arguments("gae_term_and_trunc"), 0.5, 0.5)
    close(advantages[:, 0], CASES["gae_term_and_trunc"]["expected"]["advantages"])
    close(returns[:, 0], CASES["gae_term_and_trunc"]["expected"]["returns"])  # A + V
    # lambda = 0 leaves the deltas.
    advantages, _ = compute_gae(*step_arguments("gae_term_and_trunc"), 0.5, 0.0)
    close(advantages[:, 0], CASES["gae_term_and_trunc"]["expected"]["deltas"])


def check_returns(compute_returns):
    """gamma = 0.5, the same rollout: 6 + 0.5 * 4 = 8; 5 + 0.5 * 8 = 9; truncated, 4 + 0.5 * 8 = 8; 3 + 0.5 * 8 = 7;
    terminated, 2; 1 + 0.5 * 2 = 2.
    """
    rewards, _, next_values, terminated, truncated = step_arguments("gae_term_and_trunc")
    returns = compute_returns(rewards, next_values, terminated, truncated, 0.5)
    close(returns[:, 0], CASES["discounted_returns_term_and_trunc"]["expected"]["returns"])


def check_vtrace(compute_vtrace):
    """gamma = 0.5, ratios 2, 0.5, 4, terminated after step 1. With rho clipped at 1.5 and c at 1:

    rho = 1.5, 0.5, 1.5      c = 1, 0.5, 1
    v_2 = 3 + 1.5 (3 + 0.5 * 4 - 3) = 6                              A_2 = 1.5 (3 + 0.5 * 4 - 3) = 3
    v_1 = 2 + 0.5 (4 - 2) = 3                                        A_1 = 0.5 (4 - 2) = 1
    v_0 = 1 + 1.5 (1 + 0.5 * 2 - 1) + 0.5 * 1 (3 - 2) = 3            A_0 = 1.5 (1 + 0.5 * 3 - 1) = 2.25

    With both clipped at 1: v_2 = 5, v_1 = 3, v_0 = 1 + 1 + 0.5 = 2.5; A = 2, 1, 1 + 0.5 * 3 - 1 = 1.5.
    """
    case = CASES["vtrace_clip_and_terminal"]
    step, log_ratios = step_arguments("vtrace_clip_and_terminal"), column(case["inputs"]["ratios"]).log()
    advantages, targets = compute_vtrace(*step, log_ratios, 0.5, 1.5, 1.0)
    close(targets[:, 0], case["expected"]["targets"])
    close(advantages[:, 0], case["expected"]["advantages"])
    advantages, targets = compute_vtrace(*step, log_ratios, 0.5)
    close(targets[:, 0], case["expected"]["clips_1_1"]["targets"])
    close(advantages[:, 0], case["expected"]["clips_1_1"]["advantages"])
    _, targets = compute_vtrace(*step, torch.zeros(3, 1), 0.5)  # 3 + 2 = 5; 4; 1 + 0.5 * 4 = 3
    close(targets[:, 0], case["expected"]["ratios_1_targets"])
    # A c clipped lower than rho: c_0 = 0.25 gives v_0 = 1 + 1.5 + 0.5 * 0.25 (3 - 2) = 2.625.
    _, targets = compute_vtrace(*step, log_ratios, 0.5, 1.5, 0.25)
    close(targets[:, 0], [2.625, 3, 6])
    # Truncated after step 0 as well: its target is 1 + 1.5 (1 + 0.5 * 2 - 1) = 2.5, with nothing of what comes after,
    # and its successor's target is its successor's value: A_0 = 1.5 (1 + 0.5 * 2 - 1) = 1.5.
    step = (*step[:4], flags([1, 0, 0]))
    advantages, targets = compute_vtrace(*step, log_ratios, 0.5, 1.5, 1.0)
    close(targets[:, 0], [2.5, 3, 6])
    close(advantages[:, 0], [1.5, 1, 3])


def test_gae_by_hand():
    """Fails if the mask of the bootstrap or of the trace is wrong, or if a known faulty formula gave the same."""
    check_gae(ppo.compute_gae)
    for numbers in CASES["gae_term_and_trunc"]["known_wrong"].values():
        differ(numbers, CASES["gae_term_and_trunc"]["expected"]["advantages"])


def test_returns_by_hand():
    """Fails if a return goes on past an episode's end, or starts from anything but V where something was cut off."""
    check_returns(ppo.compute_returns)
    for numbers in CASES["discounted_returns_term_and_trunc"]["known_wrong"].values():
        differ(numbers, CASES["discounted_returns_term_and_trunc"]["expected"]["returns"])


def test_vtrace_by_hand():
    """Fails if a clip, a mask or a weight is missing."""
    check_vtrace(ppo.compute_vtrace)


def test_known_wrong_numbers_are_what_the_faulty_formulas_give():
    """Fails if a `known_wrong` of cases.json is not what its name says: then it would show nothing."""
    case = CASES["gae_term_and_trunc"]
    rewards, values, next_values, terminated, truncated = step_arguments("gae_term_and_trunc")
    wrong, _ = ppo.compute_gae(rewards, values, next_values, terminated | truncated, truncated, 0.5, 0.5)
    close(wrong[:, 0], case["known_wrong"]["truncation_treated_as_termination"])
    reset_value = next_values.clone()
    reset_value[3] = case["inputs"]["value_of_reset_obs_at_4"]
    wrong, _ = ppo.compute_gae(rewards, values, reset_value, terminated, torch.zeros_like(truncated), 0.5, 0.5)
    close(wrong[:, 0], case["known_wrong"]["truncation_ignored_bootstraps_reset_obs_and_leaks"])
    deltas = (rewards + 0.5 * next_values * ~terminated - values) * ~truncated
    wrong = ppo.backwards(deltas, 0.25 * ~(terminated | truncated), torch.zeros(1))
    close(wrong[:, 0], case["known_wrong"]["harl_bad_masks_zeroes_the_truncated_step"])

    case = CASES["discounted_returns_term_and_trunc"]
    own_value = torch.where(truncated, (values - rewards) / 0.5, next_values)  # r + gamma x = V(s_t)
    wrong = ppo.compute_returns(rewards, own_value, terminated, truncated, 0.5)
    close(wrong[:, 0], case["known_wrong"]["harl_use_proper_time_limits_True_returns"])
    wrong = ppo.compute_returns(rewards, next_values, terminated | truncated, truncated, 0.5)
    close(wrong[:, 0], case["known_wrong"]["harl_use_proper_time_limits_False_returns"])

    case = CASES["vtrace_clip_and_terminal"]["known_wrong"]["returns_in_place_of_rewards_and_unmasked_bootstrap"]
    advantages, targets = vtrace_of_returns_without_mask(
        *step_arguments("vtrace_clip_and_terminal"), column([2, 0.5, 4]).log(), 0.5, 1.5, 1.0, unmasked_value=3.0
    )
    close(targets[:, 0], case["targets"])
    close(advantages[:, 0], case["advantages"])


def vtrace_of_returns_without_mask(rewards, values, nexts, terminated, truncated, log_ratios, gamma, rho, c, *_, **kw):
    """A published faulty V-trace: returns stand in for rewards, and a terminal step bootstraps from the next row."""
    rewards = ppo.compute_returns(rewards, nexts, terminated, truncated, gamma)
    nexts = torch.where(terminated, torch.full_like(nexts, kw.get("unmasked_value", 3.0)), nexts)
    rhos, cs = log_ratios.exp().clamp(max=rho), log_ratios.exp().clamp(max=c)
    corrections = ppo.backwards(rhos * (rewards + gamma * nexts - values), gamma * cs * ~terminated, torch.zeros(1))
    next_targets = torch.cat([(values + corrections)[1:], nexts[-1:]])
    return rhos * (rewards + gamma * next_targets - values), values + corrections


def check_both_counts_as_terminated(estimates):
    """`estimates` maps a name to a function of (r, V, V', terminated, truncated) that gives returns or targets.

    One step with reward 1, after which V' = 50 must not count, although the step is truncated as well.
    """
    for name, estimate in estimates.items():
        one = torch.ones(1, 1)
        both = estimate(one, 7 * one, 50 * one, one.bool(), one.bool())
        assert both.item() == 1, name
        truncated = estimate(one, 7 * one, 50 * one, ~one.bool(), one.bool())
        assert truncated.item() == 1 + 0.5 * 50, name


ESTIMATES = {
    "returns": lambda r, v, n, te, tr: ppo.compute_returns(r, n, te, tr, 0.5),
    "gae": lambda r, v, n, te, tr: ppo.compute_gae(r, v, n, te, tr, 0.5, 0.5)[1],
    "vtrace": lambda r, v, n, te, tr: ppo.compute_vtrace(r, v, n, te, tr, torch.zeros_like(r), 0.5)[1],
}


def test_terminated_wins_over_truncated():
    """Fails if a step that is both bootstraps."""
    check_both_counts_as_terminated(ESTIMATES)


class Critic:
    """Stands in for an Agent where only values matter: log-probs and entropies are 0."""

    def __init__(self, value):
        self.value = value

    def __call__(self, obs, actions):
        return torch.zeros(len(obs)), torch.zeros(len(obs)), self.value(obs)


def play(buffer, envs, sample, obs, reset_rows, to_env=lambda actions: actions.ravel()):
    """Fill the buffer as `train` does. Returns (obs, reset_rows) for the next rollout."""
    for _ in range(buffer.num_steps):
        actions = sample(obs)
        next_obs, rewards, terminated, truncated, _ = envs.step(to_env(actions))
        buffer.add(obs, actions, rewards, terminated, truncated, reset_rows, next_obs)
        obs, reset_rows = next_obs, terminated | truncated
    return obs, reset_rows


@every_buffer
def test_native_cartpole_sets_both_flags_and_termination_wins(buffer_class):
    """Fails if a whole rollout bootstraps after a pole that falls in the very step in which time runs out.

    V is 50 everywhere, gamma 0.5, each reward 1: last steps of episodes are worth 1 or, cut off, 1 + 25.
    """
    envs = ppo.make_envs(ppo.Args(env_id="CartPole-v1", max_episode_steps=9), 32)
    assert type(envs).__name__ == "CartPoleVectorEnv"
    assert envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP
    buffer = make_buffer(buffer_class, 12, 32, spaces.Discrete(2), 4)
    obs, _ = envs.reset(seed=0)
    play(buffer, envs, lambda obs: np.zeros((32, 1), np.int64), obs, np.zeros(32, bool))
    buffer.compute_returns(*buffer.evaluate(Critic(lambda obs: torch.full((len(obs),), 50.0))))
    both, cut_off = buffer.terminated & buffer.truncated, buffer.truncated & ~buffer.terminated
    assert both.any() and cut_off.any()
    assert (buffer.returns[torch.as_tensor(both)] == 1).all()
    assert (buffer.returns[torch.as_tensor(cut_off)] == 26).all()
    assert (buffer.rewards[buffer.reset_rows] == 0).all() and buffer.reset_rows.any()


# ---------------------------------------------------------------------- estimators, against slow and obvious loops

FRACTIONS = st.sampled_from([0, 0.25, 0.5, 0.75, 1])  # exact in binary, so that nothing has to be forgiven


@st.composite
def rollouts(draw):
    """(rewards, values, next_values, terminated, truncated, log_ratios), each (T, N) float64 or bool.

    Next values are the values of the next row, except after an episode's end, where they are the final observation's.
    """
    shape = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    numbers = lambda shape: draw(hnp.arrays(np.int64, shape, elements=st.integers(-4, 4))).astype(float)
    terminated, truncated = (draw(hnp.arrays(bool, shape, elements=st.booleans())) for _ in range(2))
    rewards, values, log_ratios = numbers(shape), numbers((shape[0] + 1, shape[1])), numbers(shape) / 2
    next_values = np.where(terminated | truncated, numbers(shape), values[1:])
    return tuple(map(torch.as_tensor, (rewards, values[:-1], next_values, terminated, truncated, log_ratios)))


def episodes(terminated, truncated):
    """(first step, last step) of every episode, or part of one, in one environment's flags."""
    first = 0
    for t, ended in enumerate(zip(terminated, truncated)):
        if any(ended) or t == len(terminated) - 1:
            yield first, t
            first = t + 1


def bootstrap(next_values, terminated, t):
    """What is to come after step t, according to the critic."""
    return 0 if terminated[t] else next_values[t]


def slow_returns(rewards, next_values, terminated, truncated, gamma):
    """sum_k gamma^k r_{t+k} to the episode's end, and there the bootstrap; lists of one environment."""
    returns = []
    for first, last in episodes(terminated, truncated):
        for t in range(first, last + 1):
            rewarded = sum(gamma ** (k - t) * rewards[k] for k in range(t, last + 1))
            returns.append(rewarded + gamma ** (last + 1 - t) * bootstrap(next_values, terminated, last))
    return returns


def slow_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """The definition (arXiv 1506.02438, eq. 16): n-step advantages, averaged with weights (1 - lambda) lambda^(n-1)."""
    advantages = []
    for first, last in episodes(terminated, truncated):
        for t in range(first, last + 1):
            average, length = 0, last + 1 - t
            for n in range(1, length + 1):
                n_step = sum(gamma**k * rewards[t + k] for k in range(n)) - values[t]
                n_step += gamma**n * bootstrap(next_values, terminated, t + n - 1)
                weight = gae_lambda ** (n - 1) * (1 - gae_lambda if n < length else 1)  # the longest takes the rest
                average += weight * n_step
            advantages.append(average)
    return advantages, [a + v for a, v in zip(advantages, values)]


def slow_vtrace(rewards, values, next_values, terminated, truncated, log_ratios, gamma, rho_clip, c_clip):
    """The definition (arXiv 1802.01561, eq. 1): v_s = V_s + sum_t gamma^(t-s) c_s … c_{t-1} rho_t delta_t."""
    targets, advantages = list(values), []
    rho, c = ([min(clip, math.exp(x)) for x in log_ratios] for clip in (rho_clip, c_clip))
    for first, last in episodes(terminated, truncated):
        for s in range(first, last + 1):
            for t in range(s, last + 1):
                delta = rewards[t] + gamma * bootstrap(next_values, terminated, t) - values[t]
                targets[s] += gamma ** (t - s) * math.prod(c[s:t]) * rho[t] * delta
        for s in range(first, last + 1):
            successor = targets[s + 1] if s < last else bootstrap(next_values, terminated, s)
            advantages.append(rho[s] * (rewards[s] + gamma * successor - values[s]))
    return advantages, targets


def check_returns_against_loop(compute_returns, rollout, gamma):
    rewards, _, *rest = rollout[:5]
    expected = [slow_returns(*(x[:, n].tolist() for x in (rewards, *rest)), gamma) for n in range(rewards.shape[1])]
    close(compute_returns(rewards, *rest, gamma), np.transpose(expected))


def check_gae_against_loop(compute_gae, rollout, gamma, gae_lambda):
    expected = [
        slow_gae(*(x[:, n].tolist() for x in rollout[:5]), gamma, gae_lambda) for n in range(rollout[0].shape[1])
    ]
    for actual, lists in zip(compute_gae(*rollout[:5], gamma, gae_lambda), zip(*expected)):
        close(actual, np.transpose(lists))


def check_vtrace_against_loop(compute_vtrace, rollout, gamma, rho_clip, c_clip):
    clips = gamma, rho_clip, c_clip
    expected = [slow_vtrace(*(x[:, n].tolist() for x in rollout), *clips) for n in range(rollout[0].shape[1])]
    for actual, lists in zip(compute_vtrace(*rollout, *clips), zip(*expected)):
        close(actual, np.transpose(lists))


@given(rollouts(), FRACTIONS)
def test_returns_against_loop(rollout, gamma):
    """Fails if the recursion is not the sum it stands for, for any pattern of ends."""
    check_returns_against_loop(ppo.compute_returns, rollout, gamma)


@given(rollouts(), FRACTIONS, FRACTIONS)
def test_gae_against_loop(rollout, gamma, gae_lambda):
    """Fails if the recursion is not the weighted average of n-step advantages, for any pattern of ends."""
    check_gae_against_loop(ppo.compute_gae, rollout, gamma, gae_lambda)


@given(rollouts(), FRACTIONS, st.sampled_from([0.5, 1.0, 2.5]), st.sampled_from([0.5, 1.0, 2.5]))
def test_vtrace_against_loop(rollout, gamma, rho_clip, c_clip):
    """Fails if the recursion is not the sum over products of ratios, for any pattern of ends."""
    check_vtrace_against_loop(ppo.compute_vtrace, rollout, gamma, rho_clip, c_clip)


@given(rollouts(), FRACTIONS)
def test_estimators_agree_where_they_should(rollout, gamma):
    """Fails if, on policy and with lambda = 1, V-trace, GAE and plain returns are not the same."""
    rewards, values, next_values, terminated, truncated, log_ratios = rollout
    _, gae = ppo.compute_gae(rewards, values, next_values, terminated, truncated, gamma, 1.0)
    _, vtrace = ppo.compute_vtrace(*rollout[:5], torch.zeros_like(log_ratios), gamma, 1.0, 1.0)
    returns = ppo.compute_returns(rewards, next_values, terminated, truncated, gamma)
    close(gae, returns)
    close(vtrace, returns)


class PathBuffer:
    """A ring, filled one step and finished one path at a time, as buffers are often written: a twin to compare with."""

    def __init__(self, size, gamma, lam, start=0):
        self.size, self.gamma, self.lam, self.next, self.path_start = size, gamma, lam, start, start
        self.rewards, self.values, self.advantages, self.returns = np.zeros((4, size))

    def store(self, reward, value):
        slot = self.next % self.size
        self.rewards[slot], self.values[slot] = reward, value
        self.next += 1

    def finish_path(self, last_value):
        slots = np.arange(self.path_start, self.next) % self.size
        values = np.append(self.values[slots], last_value)
        deltas = self.rewards[slots] + self.gamma * values[1:] - values[:-1]
        for i, slot in enumerate(slots):
            self.advantages[slot] = sum((self.gamma * self.lam) ** k * delta for k, delta in enumerate(deltas[i:]))
            rewards = np.append(self.rewards[slots][i:], last_value)
            self.returns[slot] = sum(self.gamma**k * reward for k, reward in enumerate(rewards))
        self.path_start = self.next


@pytest.mark.parametrize("end, last_value", [("terminal", 0), ("cutoff_last_val_2", 2)])
def test_one_path_by_hand(end, last_value):
    """gamma = lambda = 0.5, rewards 1, 2, 3, values 0.5, 1, 1.5; fails if V(s_T) counts after the terminal state.

    Terminal: deltas 1 + 0.5 - 0.5 = 1, 2 + 0.75 - 1 = 1.75, 3 - 1.5 = 1.5; A_2 = 1.5, A_1 = 1.75 + 0.25 * 1.5 = 2.125,
    A_0 = 1 + 0.25 * 2.125 = 1.53125; R = 3, 2 + 1.5 = 3.5, 1 + 1.75 = 2.75. Cut off at V = 2: the last delta is 2.5.
    """
    case = CASES["path_buffer_terminal_and_wrap"]
    expected, slots = case["expected"][end], case["expected"]["ring_slots"]
    rewards, values = column(case["inputs"]["rewards"]), column(case["inputs"]["values"])
    next_values = torch.cat([values[1:], torch.full((1, 1), 2.0)])
    terminated, truncated = flags([0, 0, end == "terminal"]), flags([0, 0, end != "terminal"])
    advantages, _ = ppo.compute_gae(rewards, values, next_values, terminated, truncated, 0.5, 0.5)
    close(advantages[:, 0], expected["adv"])
    close(ppo.compute_returns(rewards, next_values, terminated, truncated, 0.5)[:, 0], expected["ret"])
    differ(expected["adv"], case["known_wrong"]["last_value_of_the_last_stored_state"]["adv"])
    differ(expected["ret"], case["known_wrong"]["rewards_in_place_of_returns"])
    ring = PathBuffer(4, 0.5, 0.5, start=3)
    for reward, value in zip(case["inputs"]["rewards"], case["inputs"]["values"]):
        ring.store(reward, value)
    ring.finish_path(last_value)
    close(ring.advantages[slots], expected["adv"])
    close(ring.returns[slots], expected["ret"])


@given(rollouts(), FRACTIONS, FRACTIONS)
def test_walk_through_paths_equals_gae(rollout, gamma, gae_lambda):
    """Fails if compute_gae is not what a buffer gives that closes each path with 0 (terminal) or V(s_T) (cut off)."""
    rewards, values, next_values, terminated, truncated, _ = rollout
    num_steps, num_envs = rewards.shape
    expected = np.zeros((2, num_steps, num_envs))
    for n in range(num_envs):
        paths = PathBuffer(num_steps, gamma, gae_lambda)
        for t in range(num_steps):
            paths.store(rewards[t, n].item(), values[t, n].item())
            if terminated[t, n]:
                paths.finish_path(0)
            elif truncated[t, n] or t == num_steps - 1:
                paths.finish_path(next_values[t, n].item())
        expected[:, :, n] = paths.advantages, paths.returns
    close(ppo.compute_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda)[0], expected[0])
    close(ppo.compute_returns(rewards, next_values, terminated, truncated, gamma), expected[1])


# ------------------------------------------------------------------------------------------------- losses and update


def log(*ratios):
    """Log-ratios that one can follow."""
    return torch.tensor(ratios).log()


def check_policy_loss(policy_loss):
    """eps = 0.2. Each: ratio, advantage, objective min(r A, clip(r) A), and its derivative with respect to log r."""
    table = [
        (1.0, 2.0, 2.0, 2.0),
        (1.1, 2.0, 2.2, 2.2),  # inside
        (1.5, 2.0, 2.4, 0.0),  # good and likelier already: 1.2 * 2, nothing more to gain
        (0.5, 2.0, 1.0, 1.0),  # good but less likely: bring it back
        (1.1, -2.0, -2.2, -2.2),  # inside
        (1.5, -2.0, -3.0, -3.0),  # bad and likelier: bring it back
        (0.5, -2.0, -1.6, 0.0),  # bad and less likely already: 0.8 * -2
        (1.5, 0.0, 0.0, 0.0),
    ]
    for ratio, advantage, objective, derivative in table:
        log_ratio = log(ratio).requires_grad_()
        loss = policy_loss(log_ratio, torch.tensor([advantage]), 0.2)
        close(loss.item(), -objective)
        close(torch.autograd.grad(loss, log_ratio)[0], [-derivative])
    ratios, advantages, objectives, _ = zip(*table)
    close(
        policy_loss(log(*ratios), torch.tensor(advantages), 0.2).item(), -np.mean(objectives)
    )  # the mean over a batch


def test_policy_loss_by_hand():
    """Fails if the clip is one-sided, on the wrong side, or lets a gradient through."""
    check_policy_loss(ppo.policy_loss)


def textbook_policy_loss(log_ratios, advantages, clip_coef):
    """Equation 7 of the PPO paper as it stands there, negated."""
    ratios = log_ratios.exp()
    return -torch.min(ratios * advantages, ratios.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()


@given(
    hnp.arrays(np.float64, 6, elements=st.floats(-2, 2)),
    hnp.arrays(np.float64, 6, elements=st.floats(-5, 5)),
    st.sampled_from([0, 0.1, 0.2, 0.5]),
)
def test_policy_loss_is_that_of_the_paper(log_ratios, advantages, clip_coef):
    """Fails if A + eps |A| is not the clipped term wherever it matters, in value or in gradient."""
    ratios = np.exp(log_ratios)  # exactly on the edge the derivative is a matter of taste
    log_ratios[np.isclose(ratios, 1 + clip_coef, atol=1e-6) | np.isclose(ratios, 1 - clip_coef, atol=1e-6)] = 1
    results = []
    for loss_of in (ppo.policy_loss, textbook_policy_loss):
        x = torch.tensor(log_ratios, requires_grad=True)
        loss = loss_of(x, torch.tensor(advantages), clip_coef)
        results.append((loss.item(), torch.autograd.grad(loss, x)[0]))
    close(results[0][0], results[1][0])
    close(results[0][1], results[1][1])


def test_value_loss_by_hand():
    """Fails if the half is missing, the smaller of the two errors is taken, or the clip lets a gradient through."""
    case = CASES["value_clip_loss"]
    old, new, target = (torch.tensor([float(case["inputs"][name])]) for name in ("old", "new", "ret"))
    new.requires_grad_()
    clipped = ppo.value_loss(new, old, target, case["inputs"]["clip"])
    close(clipped.item(), case["expected"]["loss"])  # 0.5 max((2 - 3)^2, (1 + 0.2 - 3)^2) = 0.5 * 3.24
    assert torch.autograd.grad(clipped, new)[0].item() == 0
    for wrong in case["known_wrong"].values():
        differ(clipped.item(), wrong)
    plain = ppo.value_loss(new, old, target)
    close(plain.item(), case["expected"]["unclipped"])  # 0.5 (2 - 3)^2
    close(torch.autograd.grad(plain, new)[0], [-1])  # (2 - 3)
    # A value that has moved away from its target is not let off: max((0.5 - 3)^2, (0.8 - 3)^2) = 6.25.
    new = torch.tensor([0.5], requires_grad=True)
    loss = ppo.value_loss(new, old, target, 0.2)
    close(loss.item(), 3.125)
    close(torch.autograd.grad(loss, new)[0], [-2.5])
    two = ppo.value_loss(torch.tensor([2.0, 0.5]), old.expand(2), target.expand(2), 0.2)
    close(two.item(), (1.62 + 3.125) / 2)


def test_normalize_by_hand():
    """Fails if the deviation is the sample's: [1, 3] has mean 2 and population deviation 1; or if 0 / 0 gives NaN."""
    case = CASES["adv_normalise_idempotent"]
    close(ppo.normalize(torch.tensor([1.0, 3.0])), case["expected"]["normalised"])
    close(ppo.normalize(torch.tensor([4.0, 4.0, 4.0])), [0, 0, 0])
    close(ppo.normalize(torch.tensor([4.0])), [0])


def test_approximate_kl_by_hand():
    """r = 2: 2 - 1 - log 2 = 0.306853; r = 1: 0; r = 1/2: 1/2 - 1 + log 2 = 0.193147. Fails if it can be negative."""
    close(ppo.approximate_kl(log(2.0, 1.0, 0.5)).item(), (0.306853 + 0.193147) / 3)
    assert ppo.approximate_kl(log(0.5)).item() > 0


@pytest.mark.parametrize("scale", [1e-4, 0.1, 10.0])
def test_adam_is_that_of_torch(scale):
    """Fails if a moment, a bias correction, eps or the shortening of long gradients is not torch's; 200 steps.

    Gradients shorter and longer than the limit 0.5, and a learning rate that falls, as in training.
    """
    rng = np.random.default_rng(0)
    parameters = [random_parameter(rng, 4, 3), random_parameter(rng, 3)]
    flat = torch.cat([p.detach().flatten() for p in parameters])
    ours, theirs = ppo.Adam(flat), torch.optim.Adam(parameters, eps=1e-5)
    for step in range(200):
        gradients = [scale * random_parameter(rng, *p.shape).detach() for p in parameters]
        learning_rate = 1e-2 * (1 - step / 200)
        ours.step(torch.cat([g.flatten() for g in gradients]), learning_rate, 0.5)
        for p, g in zip(parameters, gradients):
            p.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        theirs.param_groups[0]["lr"] = learning_rate
        theirs.step()
        close(flat, torch.cat([p.detach().flatten() for p in parameters]), atol=1e-6)


def random_parameter(rng, *shape):
    """Normally distributed numbers."""
    return torch.nn.Parameter(torch.tensor(rng.standard_normal(shape), dtype=torch.float32))


def random_batch(agent, size=12, seed=0):
    """A Batch of rows on which the policy has already moved, and a few of whose ratios leave the clip range."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    obs = rng.standard_normal((size, 3)).astype(np.float32)
    actions = torch.as_tensor(agent.sample(obs, rng))
    with torch.no_grad():
        log_probs, _, values = agent(torch.as_tensor(obs), actions)
    noise = torch.randn(4, size, generator=generator)
    fields = log_probs + 0.3 * noise[0], values + 0.3 * noise[1], 2 * noise[2] + 1, values + noise[3]
    return ppo.Batch(torch.as_tensor(obs), actions, *fields)


@every_action_space
@pytest.mark.parametrize("norm_adv, clip_vloss", [(True, False), (False, True)])
def test_minibatch_gradient_is_that_of_the_textbook_loss(action_space, norm_adv, clip_vloss):
    """Fails if a term, its sign or its weight is wrong, or a parameter is left out; distributions are torch's own."""
    agent = make_agent(action_space, norm_adv=norm_adv, clip_vloss=clip_vloss)
    args = ppo.Args(env_id="none", norm_adv=norm_adv, clip_vloss=clip_vloss, ent_coef=0.03, vf_coef=0.7, clip_coef=0.15)
    batch = random_batch(agent)
    gradient, figures, log_ratios = ppo.minibatch_gradient(agent, batch, args)

    pi = torch_distributions(agent, agent.actor(batch.obs))
    ratios = (sum(d.log_prob(a) for d, a in zip(pi, batch.actions.T)) - batch.log_probs).exp()
    assert (ratios > 1.15).any() and (ratios < 0.85).any()
    advantages, values = batch.advantages, agent.critic(batch.obs).squeeze(1)
    if norm_adv:
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    pg = textbook_policy_loss(ratios.log(), advantages, 0.15)
    errors = (values - batch.returns) ** 2
    if clip_vloss:
        near = batch.values + (values - batch.values).clamp(-0.2, 0.2)
        errors = torch.maximum(errors, (near - batch.returns) ** 2)
    entropy = sum(d.entropy() for d in pi).mean()
    loss = pg - 0.03 * entropy + 0.7 * 0.5 * errors.mean()
    expected = torch.autograd.grad(loss, list(agent.parameters()))
    close(gradient, torch.cat([g.flatten() for g in expected]))
    close(figures, torch.stack([loss, pg, 0.5 * errors.mean(), entropy]).detach())
    close(log_ratios, ratios.log().detach())


def torch_distributions(agent, output):
    """One of torch's distributions for each column of the actions, from the network's output (B, outputs)."""
    if agent.continuous:
        scale = agent.log_std.exp()
        return [torch.distributions.Normal(output[:, i], scale[i]) for i in range(output.shape[1])]
    return [torch.distributions.Categorical(logits=part) for part in output.split(agent.sizes, 1)]


# ---------------------------------------------------------------------------------------- normalisers of observations


def test_running_mean_std_by_hand():
    """Rows 1, 3 and then 5, 5, 6: mean 20 / 5 = 4, variance (9 + 1 + 1 + 1 + 4) / 5 = 3.2; fails if a merge forgets
    the distance between the means.
    """
    stats = ppo.RunningMeanStd(1)
    stats.update(np.array([[1.0], [3.0]]))
    close([stats.mean.item(), stats.var.item(), stats.count.item()], [2, 1, 2])
    stats.update(np.array([[5.0], [5.0], [6.0]]))
    close([stats.mean.item(), stats.var.item(), stats.count.item()], [4, 3.2, 5])
    close(stats(torch.tensor([[4.0], [4 + 3.2**0.5], [1000.0], [-1000.0]])), [[0], [1], [10], [-10]])  # clipped to ±10


@given(st.lists(hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(2)), elements=st.floats(-8, 8, width=16))))
def test_running_mean_std_against_numpy(batches):
    """Fails if merging batches is not the same as seeing all rows at once, or no batch is not the identity."""
    stats = ppo.RunningMeanStd(2)
    for batch in batches:
        stats.update(batch)
    rows = np.concatenate(batches).astype(np.float64) if batches else None
    close(stats.mean, rows.mean(0) if batches else [0, 0], atol=1e-4)
    close(stats.var, rows.var(0) if batches else [1, 1], atol=1e-4)
    assert stats.count.item() == (len(rows) if batches else 0)


def test_running_mean_std_far_from_zero():
    """Fails if the variance is E[x^2] - E[x]^2, or summed in float32: both lose it where the mean is large."""
    rows = 10_000 + np.random.default_rng(0).standard_normal((50, 40, 2))
    stats = ppo.RunningMeanStd(2)
    for batch in rows:
        stats.update(batch.astype(np.float32))
    close(stats.var, rows.reshape(-1, 2).var(0), atol=0.02)


def test_scale_rewards_by_hand():
    """gamma = 0.5; fails if an episode's end does not restart the return, or if a reset row is counted.

    Before the rollout the discounted return is 2. Rewards 1, 2 (end), 0 (reset row), 4, 1:
    returns 0.5 * 2 + 1 = 2, 0.5 * 2 + 2 = 3, -, 4, 0.5 * 4 + 1 = 3. Of 2, 3, 4, 3 the mean is 3, the variance 1 / 2.
    """
    buffer, stats = make_buffer(ppo.RolloutBuffer, 5, 1), ppo.RunningMeanStd(())
    buffer.rewards[:, 0] = rewards = np.array([1, 2, 0, 4, 1])
    buffer.truncated[1], buffer.reset_rows[2] = True, True
    after = ppo.scale_rewards(buffer, stats, np.array([2.0]))
    close([stats.mean.item(), stats.var.item(), stats.count.item()], [3, 0.5, 4])
    close(buffer.rewards[:, 0], rewards / 0.5**0.5)
    close(after, [3])
    # An end in the last row: the next rollout starts from nothing.
    buffer.rewards[:, 0], buffer.terminated[4] = rewards, True
    close(ppo.scale_rewards(buffer, stats, after), [0])
    # One return only, so that the deviation is 0, and rewards are clipped to ±10.
    for sign in (1, -1):
        buffer = make_buffer(ppo.RolloutBuffer, 1, 2)
        buffer.rewards[:] = 3 * sign
        ppo.scale_rewards(buffer, ppo.RunningMeanStd(()), np.zeros(2))
        close(buffer.rewards, [[10 * sign, 10 * sign]])


@given(rollouts(), FRACTIONS)
def test_scale_rewards_against_loop(rollout, gamma):
    """Fails if the statistics are not those of a walk through the real steps of each environment alone."""
    rewards, _, _, terminated, truncated, _ = (x.numpy() for x in rollout)
    num_steps, num_envs = rewards.shape
    buffer = make_buffer(ppo.RolloutBuffer, num_steps, num_envs)
    buffer.gamma, buffer.truncated[:] = gamma, False
    expected, last = [], np.zeros(num_envs)
    for n in range(num_envs):
        total, reset = 0, False
        for t in range(num_steps):
            buffer.reset_rows[t, n] = reset
            if not reset:
                buffer.rewards[t, n], buffer.terminated[t, n] = rewards[t, n], terminated[t, n] | truncated[t, n]
                total = total * gamma + rewards[t, n]
                expected.append(total)
                total *= not buffer.terminated[t, n]
            reset = buffer.terminated[t, n]
        last[n] = total
    original, stats = buffer.rewards, ppo.RunningMeanStd(())
    close(ppo.scale_rewards(buffer, stats, np.zeros(num_envs)), last)
    close(
        [stats.mean.item(), stats.var.item(), stats.count.item()], [np.mean(expected), np.var(expected), len(expected)]
    )
    close(buffer.rewards, np.clip(original / np.sqrt(np.var(expected) + 1e-8), -10, 10), atol=1e-3)


# --------------------------------------------------------------------------------------------------- distributions


def test_categorical_by_hand():
    """Probabilities 0.1, 0.2, 0.7. Fails if logits are not normalised (here they are shifted by 5)."""
    pi = ppo.Categorical(torch.tensor([[0.1, 0.2, 0.7]]).log().expand(3, 3) + 5, [3])
    close(pi.log_prob(torch.tensor([[0], [1], [2]])), [math.log(0.1), math.log(0.2), math.log(0.7)])
    entropy = -(0.1 * math.log(0.1) + 0.2 * math.log(0.2) + 0.7 * math.log(0.7))  # 0.8018
    close(pi.entropy(), [entropy] * 3)
    # Two factors: (1/4, 3/4) and (1/2, 1/4, 1/4); actions (1, 2): log 3/4 + log 1/4. Entropies add up.
    logits = torch.tensor([[0.25, 0.75, 0.5, 0.25, 0.25]]).log()
    pi = ppo.Categorical(logits, [2, 3])
    close(pi.log_prob(torch.tensor([[1, 2]])), [math.log(3 / 16)])
    close(pi.entropy(), [0.562335 + 1.5 * math.log(2)])


def test_diagonal_gaussian_by_hand():
    """Mean 0, deviation 2, action 2: -1/2 - log 2 - log sqrt(2 pi) = -0.5 - 0.693147 - 0.918939; fails if a sign or the
    constant is wrong. Entropy log 2 + (1 + log 2 pi) / 2 = 0.693147 + 1.418939. Two dimensions add up.
    """
    pi = ppo.DiagonalGaussian(torch.zeros(1, 1), torch.tensor([2.0]).log())
    close(pi.log_prob(torch.tensor([[2.0]])), [-2.112086])
    close(pi.entropy(), [2.112086])
    pi = ppo.DiagonalGaussian(torch.tensor([[0.0, 1.0]]), torch.tensor([2.0, 1.0]).log())
    close(pi.log_prob(torch.tensor([[2.0, 1.0]])), [-2.112086 - 0.918939])
    close(pi.entropy(), [2.112086 + 1.418939])


@every_action_space
def test_distributions_are_those_of_torch(action_space):
    """Fails if log-probs or entropies of a space's actions, seen through the whole agent, are not torch's."""
    agent, rng = make_agent(action_space), np.random.default_rng(0)
    with torch.no_grad():  # away from the nearly uniform policy of the start
        agent.flat += 0.5 * torch.as_tensor(rng.standard_normal(len(agent.flat)), dtype=torch.float32)
    obs = rng.standard_normal((7, 3)).astype(np.float32)
    actions = torch.as_tensor(agent.sample(obs, rng))
    assert actions.shape == (7, math.prod(action_space.shape))
    log_probs, entropies, values = agent(torch.as_tensor(obs), actions)
    pi = torch_distributions(agent, agent.actor(torch.as_tensor(obs)))
    assert len(pi) == actions.shape[1]
    close(log_probs.detach(), sum(d.log_prob(a) for d, a in zip(pi, actions.T)).detach())
    close(entropies.detach(), sum(d.entropy() for d in pi).detach())
    assert values.shape == (7,)
    if isinstance(action_space, spaces.MultiBinary):  # a bit with logits (a, b) is Bernoulli with the logit b - a
        logits = agent.actor(torch.as_tensor(obs)).view(7, -1, 2)
        bits = torch.distributions.Bernoulli(logits=logits[..., 1] - logits[..., 0])
        close(log_probs.detach(), bits.log_prob(actions.float()).sum(1).detach())
        close(entropies.detach(), bits.entropy().sum(1).detach())


def with_output(agent, numbers):
    """The agent, whose actor now gives these numbers for every observation."""
    with torch.no_grad():
        agent.actor[-1].weight.zero_()
        agent.actor[-1].bias.copy_(torch.tensor(numbers))
    return agent


def chi_square(counts, probabilities):
    """Pearson's statistic of counts against probabilities."""
    expected = np.asarray(probabilities) * np.sum(counts)
    return float(np.sum((np.asarray(counts) - expected) ** 2 / expected))


@pytest.mark.parametrize(
    "action_space, factors",
    [
        (spaces.Discrete(3), [[0.1, 0.2, 0.7]]),
        (spaces.MultiDiscrete([2, 3]), [[0.25, 0.75], [0.5, 0.3, 0.2]]),
        (spaces.MultiBinary(2), [[0.9, 0.1], [0.4, 0.6]]),
    ],
    ids=["Discrete", "MultiDiscrete", "MultiBinary"],
)
def test_actions_are_drawn_with_their_probabilities(action_space, factors):
    """Fails if the Gumbel noise is not Gumbel's, or shared between factors. 20,000 draws; a statistic above 25.8 would
    come up once in 10,000 seeds (5 degrees of freedom), and uniform actions give one in the thousands.
    """
    agent = with_output(make_agent(action_space), [math.log(p) for factor in factors for p in factor])
    actions = agent.sample(np.zeros((20_000, 3), np.float32), np.random.default_rng(0))
    joint = np.array([math.prod(ps) for ps in itertools.product(*factors)])
    index = np.ravel_multi_index(actions.T, [len(factor) for factor in factors])
    counts = np.bincount(index, minlength=len(joint))
    assert chi_square(counts, joint) < 25.8
    assert chi_square(counts, np.full(len(joint), 1 / len(joint))) > 1000


def test_gaussian_actions_have_their_mean_and_deviation():
    """Fails if log_std is not the logarithm of the deviation. 20,000 draws: 5 standard errors of room."""
    agent = with_output(make_agent(ACTION_SPACES["Box"]), [3.0, -1.0])
    with torch.no_grad():
        agent.log_std.copy_(torch.tensor([0.5, 2.0]).log())
    actions = agent.sample(np.zeros((20_000, 3), np.float32), np.random.default_rng(0))
    assert actions.dtype == np.float32
    assert np.all(np.abs(actions.mean(0) - [3, -1]) < 5 * np.array([0.5, 2]) / 20_000**0.5)
    assert np.all(np.abs(actions.std(0) / [0.5, 2] - 1) < 5 / 40_000**0.5)
    assert abs(np.corrcoef(actions.T)[0, 1]) < 5 / 20_000**0.5
    within = np.mean(np.abs(actions[:, 0] - 3) < 0.5)  # one deviation: 68.27 % of a normal variable
    assert abs(within - 0.6827) < 5 * (0.6827 * 0.3173 / 20_000) ** 0.5


# ------------------------------------------------------------------------------------------------------------- acting

TO_ENV = {
    "Discrete": ([[0], [2]], [0, 2], np.int64),
    "Discrete from 5": ([[0], [2]], [5, 7], np.int64),
    "MultiDiscrete": ([[0, 2]], [[0, 2]], np.int64),
    "MultiDiscrete from": ([[0, 2, 3, 1]], [[[1, 12], [3, 0]]], np.int64),
    "MultiBinary": ([[0, 1, 1]], [[0, 1, 1]], np.int8),
    "MultiBinary 2 x 2": ([[0, 1, 1, 0]], [[[0, 1], [1, 0]]], np.int8),
    "Box": ([[-3.0, 7.0], [0.5, 3.0], [3.0, -7.0]], [[-1, 5], [0.5, 3], [1, 0]], np.float32),
    "Box 2 x 1, float64": ([[-3.0, 0.5]], [[[-2], [0.5]]], np.float64),
}


@pytest.mark.parametrize("name", TO_ENV)
def test_actions_as_the_environment_takes_them(name):
    """Fails if an offset, a bound, the shape or the type is not the space's own."""
    action_space, (actions, expected, dtype) = ACTION_SPACES[name], TO_ENV[name]
    agent = make_agent(action_space)
    taken = agent.to_env(np.array(actions, np.float32 if agent.continuous else np.int64))
    assert taken.dtype == dtype and taken.tolist() == expected
    assert all(action_space.contains(action) for action in taken)


@every_action_space
def test_one_observation(action_space):
    """Fails if a batch of one loses its first dimension, acting or learning."""
    agent, obs = make_agent(action_space), np.zeros((1, 3), np.float32)
    assert agent.act(obs).shape == (1, *action_space.shape) and action_space.contains(agent.act(obs)[0])
    actions = agent.sample(obs, np.random.default_rng(0))
    for tensor in agent(torch.as_tensor(obs), torch.as_tensor(actions)):
        assert tensor.shape == (1,)


@pytest.mark.parametrize(
    "name, output, mode",
    [
        ("Discrete from 5", [0.1, 0.3, 0.2], [6]),
        ("MultiDiscrete", [0.1, 0.3, -1.0, -2.0, -0.5], [[1, 2]]),
        ("MultiBinary", [0.1, 0.3, 0.3, 0.1, -1.0, 1.0], [[1, 0, 1]]),
        ("Box", [0.25, 9.0], [[0.25, 5]]),
    ],
)
def test_deterministic_actions_are_the_mode(name, output, mode):
    """Fails if act() draws, or picks anything but the likeliest action (the mean, clipped, of a Gaussian)."""
    agent = with_output(make_agent(ACTION_SPACES[name]), output)
    for _ in range(20):
        assert agent.act(np.ones((1, 3), np.float32)).tolist() == mode


def torch_output(agent, obs):
    """What the actor's torch modules give for a NumPy array of observations."""
    with torch.no_grad():
        return agent.actor(agent.features(torch.as_tensor(obs))).numpy()


@every_action_space
@pytest.mark.parametrize("normalize_obs", [False, True])
def test_acting_in_numpy_equals_torch(action_space, normalize_obs):
    """Fails if acting sees other weights or statistics than learning does: at first, after an optimiser's step, after
    new statistics, after load_state_dict, and after a change in place.
    """
    agent, rng = make_agent(action_space, normalize_obs=normalize_obs, hidden_sizes=(16, 8)), np.random.default_rng(0)
    other = make_agent(action_space, normalize_obs=normalize_obs, hidden_sizes=(16, 8), seed=2)
    obs = 3 + 2 * rng.standard_normal((5, 3)).astype(np.float32)
    outputs = []

    def same(agent=agent):
        outputs.append(agent.policy_output(obs))
        close(outputs[-1], torch_output(agent, obs), atol=1e-6)
        assert all(np.abs(outputs[-1] - earlier).max() > 1e-6 for earlier in outputs[:-1])  # it has seen the change

    assert agent.acts_in_numpy
    same()
    ppo.Adam(agent.flat).step(torch.as_tensor(rng.standard_normal(len(agent.flat)), dtype=torch.float32), 0.1, 1e9)
    same()
    if normalize_obs:
        agent.obs_stats.update(obs)
        same()
    agent.load_state_dict(other.state_dict())
    same()
    assert np.array_equal(outputs[-1], other.policy_output(obs))
    with torch.no_grad():
        agent.actor[-1].bias += 1
    same()


def test_every_parameter_is_part_of_the_flat_vector():
    """Fails if a parameter is not a view of the vector that Adam moves."""
    for action_space in (ACTION_SPACES["Box"], ACTION_SPACES["MultiDiscrete"]):
        agent = make_agent(action_space)
        agent.flat.copy_(torch.arange(len(agent.flat)))
        assert torch.cat([p.detach().flatten() for p in agent.parameters()]).equal(agent.flat)


@pytest.mark.parametrize("critic_hidden_sizes, expected", [(None, (8, 5)), ((7,), (7,))])
def test_networks_and_their_initial_weights(critic_hidden_sizes, expected):
    """Fails if a size goes to the wrong network, a layer is not orthogonal with its gain (sqrt 2 inside, 0.01 for the
    actor's output, 1 for the critic's), a bias is not 0, or weights depend on anything but the seed.
    """
    make = lambda seed: make_agent(hidden_sizes=(8, 5), critic_hidden_sizes=critic_hidden_sizes, seed=seed)
    agent = make(1)  # the next one finds torch's own generator in another state, as making a layer draws from it
    assert agent.flat.equal(make(1).flat) and not agent.flat.equal(make(2).flat)
    for network, sizes, last_gain in ((agent.actor, (3, 8, 5, 3), 0.01), (agent.critic, (3, *expected, 1), 1)):
        linears = [module for module in network if isinstance(module, torch.nn.Linear)]
        assert [tuple(m.weight.shape) for m in linears] == list(zip(sizes[1:], sizes))
        for m, gain in zip(linears, [2**0.5] * (len(linears) - 1) + [last_gain]):
            w = m.weight.detach() if m.out_features <= m.in_features else m.weight.detach().T  # the shorter side
            close(w @ w.T / gain**2, np.eye(len(w)))
            assert not m.bias.any()


def test_normalised_observations_reach_actor_and_critic():
    """Statistics: mean 2, variance 4; observation 6 is seen as (6 - 2) / 2 = 2 by both networks."""
    agent, plain = make_agent(normalize_obs=True), make_agent()
    agent.obs_stats.update(np.array([[0.0] * 3, [4.0] * 3]))
    obs, seen, actions = torch.full((1, 3), 6.0), torch.full((1, 3), 2.0), torch.zeros(1, 1, dtype=torch.int64)
    for one, two in zip(agent(obs, actions), plain(seen, actions)):
        close(one.detach(), two.detach())


def test_images_with_channels_first_or_last():
    """Fails if the two layouts are not the same image to the same network, or if pixels are not scaled by 255."""
    first = make_agent(observation_space=spaces.Box(0, 255, (2, 36, 40), np.uint8))
    last = make_agent(observation_space=spaces.Box(0, 255, (36, 40, 2), np.uint8))
    image = np.random.default_rng(0).integers(0, 256, (3, 2, 36, 40), np.uint8)
    close(first.policy_output(image), last.policy_output(np.moveaxis(image, 1, 3)), atol=1e-6)
    close(first.features(torch.as_tensor(image)).detach(), first.trunk(torch.as_tensor(image) / 255).detach())


# ------------------------------------------------------------------------------------------------------------ buffers


def filled(buffer_class=ppo.RolloutBuffer, num_steps=3, num_envs=2, reset_rows=None):
    """A buffer whose fields say where they are: row t of environment e holds 10 e + t, and a fraction per field."""
    buffer = make_buffer(buffer_class, num_steps, num_envs, observation_size=1)
    where = 10 * np.arange(num_envs) + np.arange(num_steps)[:, None]
    buffer.obs[:-1, :, 0], buffer.actions[:, :, 0] = where, where
    for i, name in enumerate(("log_probs", "values", "advantages", "returns"), 1):
        setattr(buffer, name, torch.as_tensor(where, dtype=torch.float32) + i / 8)
    if reset_rows is not None:
        buffer.reset_rows[:] = reset_rows
    return buffer, where


def check_minibatches(buffer_class, reset_rows, num_minibatches):
    """Every row but the reset rows once, all fields of a batch of the same rows, parts as equal as can be."""
    buffer, where = filled(buffer_class, *reset_rows.shape, reset_rows)
    batches = list(buffer.minibatches(num_minibatches, np.random.default_rng(0)))
    for batch in batches:
        place = batch.obs[:, 0]
        assert batch.actions[:, 0].equal(place.long())
        for i, name in enumerate(("log_probs", "values", "advantages", "returns"), 1):
            assert getattr(batch, name).equal(place + i / 8), name
    sizes = [len(batch.obs) for batch in batches]
    assert sorted(x for batch in batches for x in batch.obs[:, 0].tolist()) == sorted(where[~reset_rows].tolist())
    assert len(sizes) == min(num_minibatches, (~reset_rows).sum())  # none is empty: its mean would be NaN
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(
    hnp.arrays(bool, st.tuples(st.integers(1, 8), st.integers(1, 3)), elements=st.booleans()),
    st.integers(1, 9),
    st.sampled_from(list(BUFFERS.values())),
)
def test_minibatches_hold_each_row_once(reset_rows, num_minibatches, buffer_class):
    """Fails if a row is lost, comes twice, or is mixed from several; rows need not divide, nor be there at all."""
    check_minibatches(buffer_class, reset_rows, num_minibatches)


def test_minibatches_in_odd_sizes():
    """Fails at the edges: nothing but reset rows, one row, more minibatches than rows."""
    check_minibatches(ppo.RolloutBuffer, np.ones((4, 2), bool), 3)
    check_minibatches(ppo.RolloutBuffer, np.zeros((1, 1), bool), 1)
    check_minibatches(ppo.RolloutBuffer, np.zeros((1, 1), bool), 4)


def test_flat_batches_are_time_major():
    """Fails if rows are flattened environment by environment. 6 rows in 4 minibatches: 2, 2, 1, 1."""
    case = CASES["rollout_flatten_order"]
    buffer, where = filled()
    assert where.tolist() == case["inputs"]["obs"]
    in_order = SimpleNamespace(permutation=lambda rows: rows)
    batches = list(buffer.minibatches(case["expected"]["num_minibatches"], in_order))
    assert [x for batch in batches for x in batch.obs[:, 0].tolist()] == case["expected"]["flat"]
    assert [len(batch.obs) for batch in batches] == case["expected"]["batch_sizes"]
    assert case["expected"]["flat"] != case["known_wrong"]["environment_major"]


def test_minibatches_are_shuffled_by_the_given_generator():
    """Fails if the order is fixed, or comes from anywhere but the generator."""
    buffer, _ = filled(num_steps=50)
    draw = lambda seed: next(iter(buffer.minibatches(1, np.random.default_rng(seed)))).obs[:, 0].tolist()
    assert draw(0) == draw(0) != draw(1)


def check_advantage_normalisation(buffer_class):
    """8 rows, 6 of them reset rows; advantages 1 and 3 become -1 and 1, however often they are drawn."""
    case = CASES["adv_normalise_idempotent"]
    reset_rows = np.ones((case["inputs"]["size"], 1), bool)
    reset_rows[[2, 5]] = False
    buffer, _ = filled(buffer_class, case["inputs"]["size"], 1, reset_rows)
    buffer.advantages = torch.zeros(case["inputs"]["size"], 1)
    buffer.advantages[[2, 5], 0] = torch.tensor(case["inputs"]["adv"], dtype=torch.float32)
    for _ in range(2):
        (batch,) = buffer.minibatches(1, np.random.default_rng(0))
        close(ppo.normalize(batch.advantages).sort()[0], case["expected"]["normalised"])


@every_buffer
def test_advantages_are_normalised_over_real_rows(buffer_class):
    """Fails if reset rows shift mean or deviation, or if drawing minibatches changes what the buffer holds."""
    check_advantage_normalisation(buffer_class)


# Two environments. Rows of the first: 2 steps (terminated), reset, 3 steps (truncated), reset, 1 step of the next
# episode. Of the second: 1 step (both), reset, 4 steps (truncated), reset, 1 step (both again).
PLANS = [(2, "terminated"), (3, "truncated")], [(1, "both"), (4, "truncated")]


def walks(action_space=TWO):
    """A real vector environment with next-step autoreset, Gymnasium's default."""

    def make(name):
        env = Walk(PLANS[name], name)
        env.action_space = action_space
        return env

    return gym.vector.SyncVectorEnv([lambda: make(0), lambda: make(1)])


def walk_value(obs):
    """V of an observation (name, episode, step): 100 (1 + name) + 10 episode + step, different for every one."""
    return 100 * (1 + obs[..., 0]) + 10 * obs[..., 1] + obs[..., 2]


def walked(buffer_class, **more):
    """A buffer of 8 steps of `walks`, with the values of `walk_value` and estimates computed."""
    buffer, envs = make_buffer(buffer_class, 8, 2, spaces.Discrete(2), **more), walks()
    obs, _ = envs.reset()
    play(buffer, envs, lambda obs: np.zeros((2, 1), np.int64), obs, np.zeros(2, bool))
    buffer.compute_returns(*buffer.evaluate(Critic(walk_value)))
    return buffer


def test_rows_of_a_real_vector_environment():
    """Fails if the row after an end is not marked, or if the observation in it is not the episode's final one."""
    buffer = walked(ppo.RolloutBuffer)
    first = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 1, 3), (0, 2, 0), (0, 2, 1)]
    second = [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 1, 4), (1, 2, 0), (1, 2, 1)]
    assert buffer.obs.swapaxes(0, 1).tolist() == [list(map(list, rows)) for rows in (first, second)]
    assert buffer.rewards.T.tolist() == [[1, 2, 0, 11, 12, 13, 0, 21], [1, 0, 11, 12, 13, 14, 0, 21]]
    assert buffer.reset_rows.T.astype(int).tolist() == [[0, 0, 1, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0, 1, 0]]
    assert buffer.terminated.T.astype(int).tolist() == [[0, 1, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 1]]
    assert buffer.truncated.T.astype(int).tolist() == [[0, 0, 0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1, 0, 1]]


def check_bootstrap(buffer_class):
    """Discounted returns by hand, gamma = 0.5, V of the true final observation where an episode is cut off.

    First: 1 + 2 / 2 = 2, 2 | 11 + 46.75 / 2, 12 + 69.5 / 2 = 46.75, 13 + 113 / 2 = 69.5 | 21 + 121 / 2 = 81.5
    Second: 1 | 11 + 48.75 / 2, 12 + 73.5 / 2 = 48.75, 13 + 121 / 2 = 73.5, 14 + 214 / 2 = 121 | 21
    """
    buffer = walked(buffer_class)
    first = [2, 2, 34.375, 46.75, 69.5, 81.5]
    second = [1, 35.375, 48.75, 73.5, 121, 21]
    for n, expected in enumerate((first, second)):
        close(buffer.returns[:, n][~buffer.reset_rows[:, n]], expected)


def test_returns_bootstrap_from_the_final_observation():
    """Fails if the value of the next episode's first observation, or of nothing, follows a truncated step."""
    check_bootstrap(ppo.RolloutBuffer)


@every_buffer
def test_buffers_give_what_the_pure_functions_give(buffer_class):
    """Fails if a buffer hands its estimator other numbers than these, written out here."""
    buffer = walked(buffer_class)
    real = ~buffer.reset_rows
    values = torch.tensor([[100, 101, 0, 110, 111, 112, 0, 120], [200, 0, 210, 211, 212, 213, 0, 220]]).T.float()
    # 102 and 201 and the last 221 follow terminated steps: they are there, but must not count.
    nexts = torch.tensor([[101, 102, 0, 111, 112, 113, 0, 121], [201, 0, 211, 212, 213, 214, 0, 221]]).T.float()
    close(buffer.values[real], values[real])
    rewards, terminated, truncated = map(torch.as_tensor, (buffer.rewards, buffer.terminated, buffer.truncated))
    if buffer_class is ppo.RolloutBuffer:
        returns = ppo.compute_returns(rewards, nexts, terminated, truncated, 0.5)
        advantages = returns - values
    elif buffer_class is ppo.GAEBuffer:
        advantages, returns = ppo.compute_gae(rewards, values, nexts, terminated, truncated, 0.5, buffer.gae_lambda)
    else:
        step = rewards, values, nexts, terminated, truncated
        advantages, returns = ppo.compute_vtrace(*step, torch.zeros_like(values), 0.5)
    close(buffer.advantages[real], advantages[real])
    close(buffer.returns[real], returns[real])


def test_parameters_reach_the_estimators():
    """Fails if lambda or a clip is not handed on: other values have to give other numbers."""
    assert not walked(ppo.GAEBuffer, gae_lambda=0.0).advantages.equal(walked(ppo.GAEBuffer, gae_lambda=1.0).advantages)
    half = walked(ppo.VTraceBuffer, rho_clip=0.5, c_clip=1.0)
    step = half.tensors("rewards", "terminated", "truncated")
    values = walk_value(torch.as_tensor(half.obs))
    for rho, c in ((0.5, 1.0), (1.0, 0.5)):
        buffer = walked(ppo.VTraceBuffer, rho_clip=rho, c_clip=c)
        one = torch.zeros(8, 2)
        expected = ppo.compute_vtrace(step[0], values[:-1], values[1:], *step[1:], one, 0.5, rho, c)
        close(buffer.advantages, expected[0])
        close(buffer.returns, expected[1])


def agent_and_rollout(buffer_class, action_space=TWO, rollouts=1, num_steps=6, seed=1, **args):
    """(args, agent, buffer) with the last of several rollouts, played by the agent in `walks`; always the same."""
    args = ppo.Args(
        env_id="none", num_steps=num_steps, num_envs=2, num_minibatches=2, update_epochs=3, seed=seed, **args
    )
    envs = walks(action_space)
    agent = ppo.Agent(envs.single_observation_space, action_space, args)
    buffer = make_buffer(buffer_class, num_steps, 2, action_space)
    rng = np.random.default_rng(seed)
    (obs, _), reset_rows = envs.reset(), np.zeros(2, bool)
    for _ in range(rollouts):
        obs, reset_rows = play(buffer, envs, lambda obs: agent.sample(obs, rng), obs, reset_rows, agent.to_env)
    return args, agent, buffer


def test_vtrace_recomputes_before_later_epochs():
    """Fails if later epochs go on with the first one's values or ratios, or clip against anything but behaviour."""
    _, agent, buffer = agent_and_rollout(ppo.VTraceBuffer)
    buffer.compute_returns(*buffer.evaluate(agent))
    behaviour, returns = buffer.log_probs.clone(), buffer.returns.clone()
    for step in range(2):  # twice, so that the second is not compared with the first's policy
        with torch.no_grad():
            agent.flat += 0.05 * torch.randn(len(agent.flat), generator=torch.Generator().manual_seed(step))
        buffer.before_epoch(agent)
        log_probs, values = buffer.evaluate(agent)
        assert buffer.log_probs.equal(behaviour) and not log_probs.equal(behaviour)
        assert buffer.values.equal(values[:-1])
        rewards, terminated, truncated = buffer.tensors("rewards", "terminated", "truncated")
        ratios = log_probs - behaviour
        expected = ppo.compute_vtrace(rewards, values[:-1], values[1:], terminated, truncated, ratios, 0.5)
        close(buffer.advantages, expected[0])
        close(buffer.returns, expected[1])
        differ(buffer.returns, returns)


@pytest.mark.parametrize("buffer_class", [ppo.RolloutBuffer, ppo.GAEBuffer])
def test_other_buffers_keep_their_estimates(buffer_class):
    """Fails if a later epoch changes what the paper computes once per rollout."""
    _, agent, buffer = agent_and_rollout(buffer_class)
    buffer.compute_returns(*buffer.evaluate(agent))
    before = [x.clone() for x in (buffer.log_probs, buffer.values, buffer.advantages, buffer.returns)]
    agent.flat += 0.05
    buffer.before_epoch(agent)
    assert all(map(torch.equal, before, (buffer.log_probs, buffer.values, buffer.advantages, buffer.returns)))


def test_evaluate_in_parts():
    """Fails if a rollout longer than one piece of `evaluate` (8192 rows) comes back in another order."""
    agent, buffer = make_agent(), make_buffer(ppo.RolloutBuffer, 4100, 2)
    buffer.obs[:] = np.random.default_rng(0).standard_normal(buffer.obs.shape)
    log_probs, values = buffer.evaluate(agent)
    for t, n in ((0, 1), (2047, 0), (4096, 1), (4099, 0)):
        log_prob, _, value = agent(torch.as_tensor(buffer.obs[t, n][None]), torch.zeros(1, 1, dtype=torch.int64))
        close([log_probs[t, n], values[t, n]], [log_prob.item(), value.item()])
    _, _, value = agent(torch.as_tensor(buffer.obs[4100, 1][None]), torch.zeros(1, 1, dtype=torch.int64))
    close(values[4100, 1], value.item())


# ------------------------------------------------------------------------------------------------------ a whole update


@every_action_space
def test_first_ratios_are_one(action_space):
    """Fails if what acted and what learns disagree about an action's probability; with no learning all stay at 1."""
    args, agent, buffer = agent_and_rollout(ppo.VTraceBuffer, action_space)
    seen = []

    def watch(agent, batch, args):
        result = ppo.minibatch_gradient(agent, batch, args)
        seen.append(result[2].abs().max().item())
        return result

    ppo.learn(agent, ppo.Adam(agent.flat), buffer, 0.0, args, np.random.default_rng(0), watch)
    assert len(seen) == 6 and max(seen) < 1e-6  # 3 epochs of 2 minibatches
    seen.clear()
    ppo.learn(agent, ppo.Adam(agent.flat), buffer, 1e-2, args, np.random.default_rng(0), watch)
    assert seen[0] < 1e-6 < seen[1]


@pytest.mark.parametrize("target_kl, gradient_steps", [(None, 6), (1e-12, 2), (1e9, 6)])
def test_kl_stop(target_kl, gradient_steps):
    """Fails if the limit is not checked per minibatch: the first has a KL of 0, the second, after a step, more."""
    args, agent, buffer = agent_and_rollout(ppo.GAEBuffer, target_kl=target_kl)
    calls = []
    count = lambda *arguments: calls.append(1) or ppo.minibatch_gradient(*arguments)
    figures = ppo.learn(agent, ppo.Adam(agent.flat), buffer, 1e-2, args, np.random.default_rng(0), count)
    assert len(calls) == gradient_steps
    assert all(map(math.isfinite, figures.values()))


def test_figures_of_an_update():
    """Fails if a logged figure is not what its name says: means over all gradient steps, or over all rows of them."""
    args, agent, buffer = agent_and_rollout(ppo.GAEBuffer, rollouts=2)
    losses, log_ratios = [], []

    def watch(agent, batch, args):
        result = ppo.minibatch_gradient(agent, batch, args)
        losses.append(result[1].numpy())
        log_ratios.extend(result[2].tolist())
        return result

    figures = ppo.learn(agent, ppo.Adam(agent.flat), buffer, 0.1, args, np.random.default_rng(0), watch)
    for i, name in enumerate(("loss", "policy_loss", "value_loss", "entropy")):
        close(figures[name], np.mean(losses, 0)[i])
    ratios, real = np.exp(log_ratios), ~buffer.reset_rows
    assert (ratios > 1.2).any() and (ratios < 0.8).any() and len(ratios) == 3 * real.sum()
    close(figures["approx_kl"], np.mean(ratios - 1 - np.log(ratios)))
    close(figures["clip_fraction"], np.mean((ratios > 1.2) | (ratios < 0.8)))
    returns, values = buffer.returns.numpy()[real], buffer.values.numpy()[real]
    close(figures["explained_variance"], 1 - np.var(returns - values) / np.var(returns))


def test_before_epoch_is_called_between_epochs():
    """Fails if V-trace is recomputed before the first epoch (nothing has changed) or not before each later one."""
    args, agent, buffer = agent_and_rollout(ppo.GAEBuffer)
    calls = []
    buffer.before_epoch = calls.append
    ppo.learn(agent, ppo.Adam(agent.flat), buffer, 1e-2, args, np.random.default_rng(0))
    assert calls == [agent, agent]


def textbook_update(agent, buffer, learning_rate, args, rng):
    """PPO with GAE, one environment and one episode at a time, torch's optimiser and distributions."""
    values = agent.critic(torch.as_tensor(buffer.obs)).squeeze(-1).detach().double().numpy()
    rows = []
    for t, n in itertools.product(range(buffer.num_steps), range(buffer.num_envs)):
        if not buffer.reset_rows[t, n]:
            ends = buffer.terminated[:, n] | buffer.truncated[:, n]
            last = next((k for k in range(t, buffer.num_steps) if ends[k]), buffer.num_steps - 1)
            advantage = 0
            for k in range(t, last + 1):
                successor = 0 if buffer.terminated[k, n] else values[k + 1, n]
                delta = buffer.rewards[k, n] + buffer.gamma * successor - values[k, n]
                advantage += (buffer.gamma * buffer.gae_lambda) ** (k - t) * delta
            rows.append((t, n, advantage, advantage + values[t, n]))
    obs = torch.stack([torch.as_tensor(buffer.obs[t, n]) for t, n, _, _ in rows])
    actions = torch.stack([torch.as_tensor(buffer.actions[t, n]) for t, n, _, _ in rows])
    advantages, returns = torch.tensor([row[2:] for row in rows], dtype=torch.float32).T
    log_prob = lambda rows: sum(
        d.log_prob(a) for d, a in zip(torch_distributions(agent, agent.actor(obs[rows])), actions[rows].T)
    )
    old = log_prob(slice(None)).detach()
    optimizer = torch.optim.Adam(agent.parameters(), learning_rate, eps=1e-5)
    for _ in range(args.update_epochs):
        for part in np.array_split(rng.permutation(len(rows)), args.num_minibatches):
            pi = torch_distributions(agent, agent.actor(obs[part]))
            a = (advantages[part] - advantages[part].mean()) / (advantages[part].std(correction=0) + 1e-8)
            loss = textbook_policy_loss(log_prob(part) - old[part], a, args.clip_coef)
            loss = loss - args.ent_coef * sum(d.entropy() for d in pi).mean()
            errors = (agent.critic(obs[part]).squeeze(1) - returns[part]) ** 2
            loss = loss + args.vf_coef * 0.5 * errors.mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()


@pytest.mark.parametrize("name", ["Discrete", "MultiDiscrete", "Box"])
def test_update_is_that_of_the_textbook(name):
    """Fails if a whole update, of three epochs on a rollout with ends and reset rows, moves the weights elsewhere.

    Rows are shuffled in the same order, as both permute as many rows with the same generator.
    """
    results = []
    for update in (ppo.learn, None):
        args, agent, buffer = agent_and_rollout(ppo.GAEBuffer, ACTION_SPACES[name], rollouts=2)
        start, rng = agent.flat.clone(), np.random.default_rng(0)
        if update:
            ppo.learn(agent, ppo.Adam(agent.flat), buffer, 1e-2, args, rng)
        else:
            textbook_update(agent, buffer, 1e-2, args, rng)
        results.append(agent.flat.clone())
    close(*results, atol=1e-4)
    assert (results[0] - start).abs().max() > 0.01  # 6 steps of up to 0.01: the tolerance is far below what was learnt


def check_reset_rows_weigh_nothing(buffer_class, action_space=TWO, **more):
    """Whatever stands in reset rows, an update gives the same weights and the same figures, bit for bit.

    Only the observation after a truncated step is left alone: it is the final one, from whose value its return goes on.
    """
    args, agent, buffer = agent_and_rollout(buffer_class, action_space, rollouts=2, **more)
    scrambled, other = copy.deepcopy(buffer), agent_and_rollout(buffer_class, action_space, rollouts=2, **more)[1]
    rows = buffer.reset_rows
    assert rows[0].all() and rows[1:].any()  # the second rollout begins with reset rows, as the first ended with ends
    scrambled.actions[rows] = 1e3 if agent.continuous else 1 - buffer.actions[rows]
    scrambled.rewards[rows] = 1e3
    free = rows & ~np.concatenate([np.zeros((1, 2), bool), (buffer.truncated & ~buffer.terminated)[:-1]])
    assert free.any()
    scrambled.obs[:-1][free] = -77
    results = []
    for one_agent, one_buffer in ((agent, buffer), (other, scrambled)):
        figures = ppo.learn(one_agent, ppo.Adam(one_agent.flat), one_buffer, 1e-2, args, np.random.default_rng(0))
        results.append((one_agent.flat, figures))
    assert results[0][0].equal(results[1][0]), "weights differ"
    assert results[0][1] == results[1][1]


@every_buffer
@pytest.mark.parametrize("more", [{}, {"norm_adv": False, "clip_vloss": True}], ids=["normalised", "clipped"])
@pytest.mark.parametrize("action_space", [spaces.Discrete(2), spaces.Box(-1, 1, (1,))], ids=["Discrete", "Box"])
def test_reset_rows_weigh_nothing(buffer_class, action_space, more):
    """Fails if a reset row enters a mean, a minibatch, a trace, the normalisation of advantages or a logged figure."""
    check_reset_rows_weigh_nothing(buffer_class, action_space, **more)


# ------------------------------------------------------------------ whole trainings in environments of one or two steps


def register(entry_point):
    """A new id of an environment."""
    env_id = f"Probe{len(gym.registry)}-v0"
    gym.register(env_id, entry_point)
    return env_id


def solve(run_dir, entry_point, **args):
    """Train for a few thousand steps. Returns (agent, final figures)."""
    settings = {"num_envs": 8, "num_steps": 32, "learning_rate": 1e-2, "gamma": 0.5, "hidden_sizes": (16,)}
    settings |= {"ent_coef": 0.0, "total_timesteps": 5_000, "eval_every": 10**9, "checkpoint_every": 10**9}
    settings |= {"eval_episodes": 8, "progress": False, "run_dir": str(run_dir), "env_id": register(entry_point)}
    summary = ppo.train(ppo.Args(**settings | args))
    return ppo.load(run_dir, "last"), summary


def value_of(agent, *obs):
    """V of an observation."""
    obs = torch.tensor([obs], dtype=torch.float32)
    actions = torch.zeros(
        1, math.prod(agent.action_space.shape), dtype=torch.float32 if agent.continuous else torch.int64
    )
    return agent(obs, actions)[2].item()


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("end, value", [("terminated", 1), ("truncated", 2)])
def test_probe_value_at_the_end(buffer, end, value, tmp_path):
    """One step with reward 1. Terminated, that is all: V = 1. Truncated, it would go on: V = 1 / (1 - 0.5) = 2.

    Fails if truncation is treated as termination, or the other way round, anywhere between environment and critic.
    """
    agent, _ = solve(tmp_path / "run", lambda: Probe(end=end), buffer=buffer)
    assert abs(value_of(agent, 0) - value) < 0.1


@pytest.mark.parametrize("num_envs", [1, 8])
def test_probe_discount(num_envs, tmp_path):
    """Reward 1 after the second step: V(s_1) = 1, V(s_0) = 0.5. Fails if the discount is missing or applied twice."""
    agent, _ = solve(tmp_path / "run", Delayed, num_envs=num_envs)
    assert abs(value_of(agent, 0) - 0.5) < 0.1 and abs(value_of(agent, 1) - 1) < 0.1


def test_probe_observation(tmp_path):
    """The reward is the observation, -1 or 1. Fails if critic and observation do not belong to the same row."""
    agent, _ = solve(tmp_path / "run", lambda: Probe(varied=True, reward=lambda obs, action: obs))
    assert abs(value_of(agent, -1) + 1) < 0.1 and abs(value_of(agent, 1) - 1) < 0.1


def test_probe_clipped_rewards(tmp_path):
    """Reward 7, learnt as its sign: V = 1. Fails if clipping is forgotten, or if reported returns are clipped too."""
    agent, summary = solve(tmp_path / "run", lambda: Probe(reward=lambda obs, action: 7.0), clip_reward=True)
    assert abs(value_of(agent, 0) - 1) < 0.1
    assert summary["eval_return_mean"] == 7
    assert all(row["return_mean"] == 7 for row in metrics(tmp_path / "run"))


def metrics(run_dir):
    """The rows of metrics.csv, as dicts of numbers."""
    with (run_dir / "metrics.csv").open() as file:
        return [{name: float(number) for name, number in row.items()} for row in csv.DictReader(file)]


def hits(target):
    """The share of an action's components that are right."""
    return lambda obs, action: np.mean(np.equal(action, target))


ACTION_PROBES = {
    "Discrete": hits(2),
    "Discrete from 5": hits(6),
    "MultiDiscrete": hits([1, 2]),
    "MultiDiscrete from": hits([[2, 11], [3, -1]]),
    "MultiBinary": hits([1, 0, 1]),
    "Box": lambda obs, action: 1 - np.mean(np.abs(action - [-0.5, 2])),
}


@pytest.mark.parametrize("name", ACTION_PROBES)
def test_probe_action(name, tmp_path):
    """The reward is 1 for one action only. Fails if the policy's gradient has the wrong sign, or an action is not the
    one that was rewarded.
    """
    entry_point = lambda: Probe(ACTION_SPACES[name], reward=ACTION_PROBES[name])
    _, summary = solve(tmp_path / "run", entry_point, total_timesteps=8_000)
    assert summary["eval_return_mean"] > (0.8 if name == "Box" else 0.99)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_probe_action_that_depends_on_the_observation(buffer, tmp_path):
    """1 if the action goes with the observation, else 0. Fails if advantages land on other rows than their actions."""
    probe = lambda: Probe(varied=True, reward=lambda obs, action: action == (obs > 0))
    agent, summary = solve(tmp_path / "run", probe, buffer=buffer)
    assert agent.act(np.array([[-1], [1]], np.float32)).tolist() == [0, 1]
    assert summary["eval_return_mean"] == 1


class Diary(ppo.GAEBuffer):
    """Keeps a copy of each rollout, and the rewards as they came."""

    pages, rewards_received = [], []

    def add(self, obs, actions, rewards, *more):
        self.rewards_received.append(rewards.copy())
        super().add(obs, actions, rewards, *more)

    def compute_returns(self, *arguments):
        names = "obs", "reset_rows", "terminated", "truncated"
        self.pages.append({name: getattr(self, name).copy() for name in names})
        super().compute_returns(*arguments)


def check_reset_rows_and_normalisers_in_a_run(run_dir, monkeypatch):
    """A run of several rollouts, whose episodes end everywhere in them; the agent is read from its checkpoint."""
    monkeypatch.setattr(Diary, "pages", [])
    monkeypatch.setattr(Diary, "rewards_received", [])
    monkeypatch.setattr(ppo, "GAEBuffer", Diary)
    plan = [(2, "terminated"), (3, "truncated"), (1, "both")]
    settings = {"num_envs": 2, "num_steps": 5, "num_minibatches": 2, "total_timesteps": 60}
    agent, summary = solve(
        run_dir, lambda: Walk(plan), normalize_obs=True, normalize_reward=True, eval_episodes=1, **settings
    )
    obs = np.concatenate([page["obs"][:-1] for page in Diary.pages])
    reset_rows = np.concatenate([page["reset_rows"] for page in Diary.pages])
    ends = np.concatenate([page["terminated"] | page["truncated"] for page in Diary.pages])
    assert len(Diary.pages) > 5 and ends[4::5].any(), "no rollout ended with an episode's end"
    assert not reset_rows[0].any() and np.array_equal(reset_rows[1:], ends[:-1])
    real = obs[~reset_rows]
    assert summary["global_step"] == len(real)
    assert agent.obs_stats.count == agent.return_stats.count == len(real)
    close(agent.obs_stats.mean, real.mean(0), atol=1e-4)
    close(agent.obs_stats.var, real.var(0), atol=1e-3)
    totals, total = [], np.zeros(2)
    for rewards, ended in zip(Diary.rewards_received, ends):
        total = total * 0.5 + rewards  # in a reset row 0, after an end
        totals.append(total)
        total = total * ~ended
    close(agent.return_stats.mean, np.array(totals)[~reset_rows].mean(), atol=1e-3)
    close(agent.return_stats.var, np.array(totals)[~reset_rows].var(), atol=1e-2)


def test_reset_rows_and_normalisers_in_a_run(tmp_path, monkeypatch):
    """Fails if a reset row that opens a rollout is forgotten, if steps or statistics count reset rows, or if the
    statistics are not in the checkpoint.
    """
    check_reset_rows_and_normalisers_in_a_run(tmp_path / "run", monkeypatch)


@pytest.mark.parametrize("anneal_lr", [True, False])
def test_annealing(anneal_lr, tmp_path):
    """Fails if the learning rate does not fall linearly with the steps taken before each update, or falls unasked.

    Rollouts of 2 x 5 rows without an episode's end: updates at steps 10, 20, … 50 use 1, 0.8, … 0.2 of 0.01.
    """
    settings = {"num_envs": 2, "num_steps": 5, "num_minibatches": 1, "total_timesteps": 50, "eval_episodes": 1}
    solve(tmp_path / "run", lambda: Walk([(60, "truncated")]), anneal_lr=anneal_lr, **settings)
    rates = [row["learning_rate"] for row in metrics(tmp_path / "run")]
    close(rates, [0.01, 0.008, 0.006, 0.004, 0.002] if anneal_lr else [0.01] * 5, atol=1e-8)


def test_a_rollout_of_nothing_but_reset_rows(tmp_path):
    """Fails if a rollout in which every environment only resets ends the run: one step each, episodes of one step."""
    settings = {"num_envs": 1, "num_steps": 1, "num_minibatches": 1, "total_timesteps": 6}
    _, summary = solve(tmp_path / "run", Probe, normalize_obs=True, normalize_reward=True, **settings)
    assert summary["global_step"] == 6


# ---------------------------------------------------------------------------------- known mistakes have to be caught


def fixed_rollout():
    """A random rollout (40, 3) of the kind that `rollouts` draws, with ends of every sort."""
    rng = np.random.default_rng(0)
    rewards, final, log_ratios = rng.standard_normal((3, 40, 3))
    values = rng.standard_normal((41, 3))
    terminated, truncated = rng.random((2, 40, 3)) < 0.2
    next_values = np.where(terminated | truncated, final, values[1:])
    return tuple(map(torch.as_tensor, (rewards, values[:-1], next_values, terminated, truncated, log_ratios)))


def check_returns_both_ways(compute_returns):
    check_returns(compute_returns)
    check_returns_against_loop(compute_returns, fixed_rollout(), 0.5)


def check_gae_both_ways(compute_gae):
    check_gae(compute_gae)
    check_gae_against_loop(compute_gae, fixed_rollout(), 0.5, 0.5)


def check_vtrace_both_ways(compute_vtrace):
    check_vtrace(compute_vtrace)
    check_vtrace_against_loop(compute_vtrace, fixed_rollout(), 0.5, 1.5, 1.0)


def truncation_is_termination(estimator):
    """An estimator that takes `truncated` for `terminated`."""
    place = list(inspect.signature(estimator).parameters).index("terminated")

    def faulty(*arguments):
        arguments = list(arguments)
        arguments[place] = arguments[place] | arguments[place + 1]
        return estimator(*arguments)

    return faulty


def truncation_wins(estimator):
    """An estimator that bootstraps where both flags are set."""
    place = list(inspect.signature(estimator).parameters).index("terminated")

    def faulty(*arguments):
        arguments = list(arguments)
        arguments[place] = arguments[place] & ~arguments[place + 1]
        return estimator(*arguments)

    return faulty


def returns_leak(rewards, next_values, terminated, truncated, gamma):
    """The return goes on into the next episode."""
    return ppo.backwards(rewards, gamma * ~terminated, next_values[-1] * ~terminated[-1])


def gae_leaks(cut):
    """The trace is cut only where `cut` says."""

    def faulty(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
        deltas = rewards + gamma * next_values * ~terminated - values
        decay = gamma * gae_lambda * ~cut(terminated, truncated)
        advantages = ppo.backwards(deltas, decay, torch.zeros_like(rewards[0]))
        return advantages, advantages + values

    return faulty


def vtrace_leaks(rewards, values, next_values, terminated, truncated, log_ratios, gamma, rho_clip=1.0, c_clip=1.0):
    """The trace goes on across truncation."""
    rho, c = log_ratios.exp().clamp(max=rho_clip), log_ratios.exp().clamp(max=c_clip)
    deltas = rho * (rewards + gamma * next_values * ~terminated - values)
    corrections = ppo.backwards(deltas, gamma * c * ~terminated, torch.zeros_like(rewards[0]))
    next_targets = next_values + torch.cat([corrections[1:], torch.zeros_like(corrections[:1])])
    return rho * (rewards + gamma * next_targets * ~terminated - values), values + corrections


def vtrace_of_returns(rewards, values, next_values, terminated, truncated, *more):
    """Returns in place of rewards."""
    returns = ppo.compute_returns(rewards, next_values, terminated, truncated, 0.5)
    return ppo.compute_vtrace(returns, values, next_values, terminated, truncated, *more)


def vtrace_without_mask(rewards, values, next_values, terminated, truncated, *more):
    """Bootstraps after a terminal step."""
    return ppo.compute_vtrace(rewards, values, next_values, torch.zeros_like(terminated), terminated | truncated, *more)


def vtrace_without_weight(*arguments):
    """The advantage is not weighted by rho."""
    ratios = arguments[5].exp().clamp(max=arguments[7] if len(arguments) > 7 else 1.0)
    advantages, targets = ppo.compute_vtrace(*arguments)
    return advantages / ratios, targets


def clipped_above_only(log_ratios, advantages, clip_coef):
    """No lower bound of the ratio."""
    ratios = log_ratios.exp()
    return -torch.min(ratios * advantages, ratios.clamp(max=1 + clip_coef) * advantages).mean()


def clipped_below_only(log_ratios, advantages, clip_coef):
    """No upper bound of the ratio."""
    ratios = log_ratios.exp()
    return -torch.min(ratios * advantages, ratios.clamp(min=1 - clip_coef) * advantages).mean()


def clipped_always(log_ratios, advantages, clip_coef):
    """The minimum is forgotten: a ratio that has gone the wrong way gets no gradient back."""
    return -(log_ratios.exp().clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()


class TrainsOnResetRows(ppo.GAEBuffer):
    """Draws minibatches from all rows."""

    def minibatches(self, num_minibatches, rng):
        kept, self.reset_rows = self.reset_rows, np.zeros_like(self.reset_rows)
        batches = list(super().minibatches(num_minibatches, rng))
        self.reset_rows = kept
        return batches


class NormalisesOverAllRows(ppo.GAEBuffer):
    """Normalises advantages once per rollout, reset rows included."""

    def compute_returns(self, *arguments):
        super().compute_returns(*arguments)
        self.advantages = ppo.normalize(self.advantages)


class BootstrapsFromTheReset(ppo.RolloutBuffer):
    """Takes the value of the next episode's first observation, which stands one row after the final one."""

    def compute_returns(self, log_probs, values, *more):
        values = values.clone()
        for t, ended in enumerate(torch.as_tensor(self.terminated | self.truncated)[:-1]):
            values[t + 1][ended] = values[t + 2][ended]
        super().compute_returns(log_probs, values, *more)


class ForgetsTheLastRow(ppo.RolloutBuffer):
    """Drops the rows that do not fill a minibatch."""

    def minibatches(self, num_minibatches, rng):
        batches = list(super().minibatches(num_minibatches, rng))
        return (ppo.Batch(*(field[: len(batches[-1].obs)] for field in batch)) for batch in batches)


class MixesRows(ppo.RolloutBuffer):
    """Flattens one of the fields environment by environment."""

    def minibatches(self, num_minibatches, rng):
        self.advantages = self.advantages.T.reshape(self.advantages.shape)
        return super().minibatches(num_minibatches, rng)


def check_minibatches_of_some_rows(buffer_class):
    check_minibatches(buffer_class, np.array([[0, 0], [1, 0], [0, 1], [0, 0]], bool), 4)


def check_reset_rows_with_normalised_advantages(buffer_class):
    check_reset_rows_weigh_nothing(buffer_class, norm_adv=True)


def check_reset_rows_with_plain_advantages(buffer_class):
    check_reset_rows_weigh_nothing(buffer_class, norm_adv=False)


RETURNS, GAE, VTRACE = ppo.compute_returns, ppo.compute_gae, ppo.compute_vtrace
MISTAKES = {
    "returns: truncation is termination": (check_returns_both_ways, truncation_is_termination(RETURNS), RETURNS),
    "returns: truncation wins": (check_returns_against_loop, truncation_wins(RETURNS), RETURNS),
    "returns: leak": (check_returns_both_ways, returns_leak, RETURNS),
    "gae: truncation is termination": (check_gae_both_ways, truncation_is_termination(GAE), GAE),
    "gae: truncation wins": (check_gae_against_loop, truncation_wins(GAE), GAE),
    "gae: leak across truncation": (check_gae_both_ways, gae_leaks(lambda te, tr: te), GAE),
    "gae: leak across termination": (check_gae_both_ways, gae_leaks(lambda te, tr: tr), GAE),
    "vtrace: truncation is termination": (check_vtrace_both_ways, truncation_is_termination(VTRACE), VTRACE),
    "vtrace: truncation wins": (check_vtrace_against_loop, truncation_wins(VTRACE), VTRACE),
    "vtrace: leak": (check_vtrace_both_ways, vtrace_leaks, VTRACE),
    "vtrace: returns for rewards": (check_vtrace_both_ways, vtrace_of_returns, VTRACE),
    "vtrace: no mask": (check_vtrace_both_ways, vtrace_without_mask, VTRACE),
    "vtrace: both at once": (check_vtrace, vtrace_of_returns_without_mask, VTRACE),
    "vtrace: no weight": (check_vtrace_both_ways, vtrace_without_weight, VTRACE),
    "loss: clipped above only": (check_policy_loss, clipped_above_only, ppo.policy_loss),
    "loss: clipped below only": (check_policy_loss, clipped_below_only, ppo.policy_loss),
    "loss: always clipped": (check_policy_loss, clipped_always, ppo.policy_loss),
    "value of the reset": (check_bootstrap, BootstrapsFromTheReset, ppo.RolloutBuffer),
    "rows lost": (check_minibatches_of_some_rows, ForgetsTheLastRow, ppo.RolloutBuffer),
    "rows mixed": (check_minibatches_of_some_rows, MixesRows, ppo.RolloutBuffer),
    "reset rows drawn": (check_minibatches_of_some_rows, TrainsOnResetRows, ppo.GAEBuffer),
    "reset rows trained on": (check_reset_rows_with_normalised_advantages, TrainsOnResetRows, ppo.GAEBuffer),
    "reset rows normalised": (check_advantage_normalisation, TrainsOnResetRows, ppo.GAEBuffer),
    "reset rows in the mean": (check_reset_rows_with_normalised_advantages, NormalisesOverAllRows, ppo.GAEBuffer),
    "reset rows in the mean, alone": (check_reset_rows_with_plain_advantages, NormalisesOverAllRows, ppo.GAEBuffer),
}
LOOPS = {
    check_returns_against_loop: (0.5,),
    check_gae_against_loop: (0.5, 0.5),
    check_vtrace_against_loop: (0.5, 1.5, 1),
}


@pytest.mark.parametrize("check, faulty, right", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_caught(check, faulty, right):
    """Fails if a known mistake passes the check that is there for it, or if the right version does not."""
    more = (fixed_rollout(), *LOOPS[check]) if check in LOOPS else ()
    check(right, *more)
    with pytest.raises(AssertionError):
        check(faulty, *more)


def test_both_flags_mistake_is_caught():
    """Fails if a step that is both terminated and truncated could bootstrap unnoticed, in any of the estimators."""
    for name, estimate in ESTIMATES.items():
        faulty = lambda r, v, n, te, tr: estimate(r, v, n, te & ~tr, tr)
        with pytest.raises(AssertionError, match=name):
            check_both_counts_as_terminated({name: faulty})


class UnsavedMeanStd(ppo.RunningMeanStd):
    """A normaliser whose numbers are not part of a saved model."""

    def __init__(self, shape):
        super().__init__(shape)
        self._non_persistent_buffers_set.update(("mean", "var", "count"))


def add_without_carry(
    self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs, add=ppo.RolloutBuffer.add
):
    """Which rows only reset is not carried over from one rollout to the next."""
    add(self, obs, actions, rewards, terminated, truncated, reset_rows * (self.row > 0), next_obs)


@pytest.mark.parametrize(
    "name, faulty",
    [("RunningMeanStd", UnsavedMeanStd), ("RolloutBuffer.add", add_without_carry)],
    ids=["unsaved", "carry"],
)
def test_mistake_in_a_run_is_caught(name, faulty, tmp_path, monkeypatch):
    """Fails if an unsaved normaliser, or a reset row forgotten between two rollouts, goes unseen."""
    monkeypatch.setattr(f"ppo.{name}", faulty)
    with pytest.raises(AssertionError):
        check_reset_rows_and_normalisers_in_a_run(tmp_path / "run", monkeypatch)
