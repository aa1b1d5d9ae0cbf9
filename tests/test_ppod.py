"""What ppod.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes that stand above it in `catches`; "published" are those of the
authors' code. What ppod.py shares with ppo.py is the same text there (test_shared_code.py) and has its tests in
test_ppo.py and test_run.py.
"""

import copy
import importlib
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from run_folder import command, content, kill_and_resume
from tools import Chance, Walk, catches, close, fails, flat, rehearse, watched

LINE, TWO = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)
DEMOS = Path(__file__).parent.parent / "demos"


class Draws:
    """Stands for a generator: `random()` gives the planned numbers, a choice falls on the last, or the likeliest."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)
        self.random = lambda: self.numbers.pop(0)
        self.integers = lambda n: n - 1
        self.choice = lambda n, p=(1,): int(np.argmax(p))


def make_demo(script, length=3, total=1.0, terminated=True, **fields):
    """A Demo whose observations are 0, 1, 2, …, whose actions are 0, 1, 0, …; of its rewards only the last is not 0."""
    obs = np.arange(length + 1, dtype=np.float32)[:, None]
    rewards = np.zeros(length, np.float32)
    rewards[-1] = total
    return script.Demo(obs, np.arange(length)[:, None] % 2, rewards, terminated, total, **fields)


def store(script, reward=(), value=(), **given):
    """A PPODBuffer of one slot that holds these demos; rho is 0.1 and phi 0.3."""
    demos = script.PPODBuffer(script.Args(**given), 1, LINE, TWO)
    for demo in reward:
        demos.add(demos.reward_demos, demo)
    for demo in value:
        demos.add(demos.value_demos, demo)
    return demos


def play(script, demos, *episodes):
    """Show the PPODBuffer a rollout of episodes (rewards, values, end); observation t of episode k is 100 k + t.

    Behind an episode that is terminated (t) or cut off (c) comes its reset row: final observation, reward 99, value 99.
    """
    rows = []
    for k, (rewards, values, end) in enumerate(episodes):
        last = len(rewards) - 1
        rows += [
            (100 * k + t, *numbers, end if t == last else "", False) for t, numbers in enumerate(zip(rewards, values))
        ]
        if end:
            rows.append((100 * k + last + 1, 99, 99, "", True))
    obs, rewards, values, ends, reset_rows = (np.array(column)[:, None] for column in zip(*rows))
    rollout = script.SequenceBuffer(len(rows), 1, LINE, TWO)
    rollout.obs[:-1, :, 0], rollout.rewards, rollout.reset_rows = obs, rewards.astype(np.float32), reset_rows
    rollout.obs[-1] = obs[-1] + 1
    rollout.terminated, rollout.truncated = ends == "t", ends == "c"
    demos.track_potential_demos(rollout, torch.tensor(np.concatenate([values, values[:1]])))


# ------------------------------------------------------------------------------------------------- a lesson, by hand


@catches(
    "PPODBuffer.sample_demo, borders that do not add up: u < self.rho + self.phi -> u < self.phi",
    "PPODBuffer.sample_demo, the share of an empty list goes to the other: if self.rho <= u < -> if u <",
    "PPODBuffer.sample_demo, value demos drawn uniformly: len(probabilities), p=probabilities -> len(probabilities)",
    "PPODBuffer.sample_demo, always the first reward demo: rng.integers(len(self.reward_demos)) -> 0",
)
def test_what_comes_next(script):
    """rho 0.1, phi 0.3: a draw u < 0.1 is a reward demo, u < 0.4 a value demo, else the environment; so it is where the
    list is empty. Of reward demos here the last is drawn, of value demos the likeliest."""
    other, reward, low, high = (make_demo(script, max_value=value) for value in (0, 0, 1, 3))
    for rewards, values, expected in (
        ([other, reward], [low, high], [reward, high, high, None, None]),
        ([reward], [], [reward, None, None, None, None]),
        ([], [high], [None, high, high, None, None]),
    ):
        demos, draws = store(script, rewards, values), Draws(0.05, 0.1, 0.39, 0.4, 0.99)
        assert [demos.sample_demo(draws) for _ in expected] == expected


@catches(
    "replay_probabilities, the worst preferred: v = v - v.min() -> pass",
    "replay_probabilities, 0/0: v = np.ones_like(v) -> pass",
    "replay_probabilities, a power overflows: (v / v.max()) ** alpha -> v**alpha",
    "replay_probabilities, no alpha: ** alpha -> ** 1",
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the mistakes
def test_priorities(script):
    """Values 1, 2, 4: alpha 1 gives 1/7, 2/7, 4/7; alpha 2 gives 1/21, 4/21, 16/21; alpha 0 a third each.

    -3, -2, -1 count from the lowest: 0, 1, 2, so 0, 1/3, 2/3. With -3 and 1 and alpha 2 the bare formula prefers the
    worst, 9/10 to 1/10; zeros would be 0/0, and 10^30 to the power of 100 is too large for any number.
    """
    p = script.replay_probabilities
    close(p([1, 2, 4], 1), np.array([1, 2, 4]) / 7)
    close(p([1, 2, 4], 2), np.array([1, 4, 16]) / 21)
    close(p([1, 2, 4], 0), [1 / 3] * 3)
    close(p([-3, -2, -1], 1), [0, 1 / 3, 2 / 3])
    close(p([-3, 1], 2), [0, 1])
    close(p([0, 0], 10), [0.5, 0.5])
    close(p([-2, -2], 10), [0.5, 0.5])
    close(p([1e30, 1e30], 100), [0.5, 0.5])


@catches(
    "PPODBuffer.anneal_parameters, a share of what is left: self.args.phi / size, -> self.phi / size,",
    "PPODBuffer.anneal_parameters, the sum changes: self.phi = total - self.rho -> self.phi = self.args.phi - self.rho",
    "PPODBuffer.anneal_parameters, without value demos: if not self.value_demos: -> if False:",
    "PPODBuffer.anneal_parameters, beyond the sum: min(self.rho + self.args.phi / size, total) -> "
    "self.rho + self.args.phi / size",
    "PPODBuffer.add_reward_demo, room is made first: self.anneal_parameters() -> "
    "self.check_demo_buffer_capacity(); self.anneal_parameters()",
)
def test_annealing(script):
    """Room for 3 value demos at the start: each new reward demo moves 0.3/3 = 0.1 from phi to rho, until phi is 0.

    By their current number, 3, then 2, then 1: 0.3/3, 0.3/2, 0.3/1, cut where phi is 0. Without any, nothing moves.
    That comes before eviction: where a new reward demo evicts one of two, it moves 0.3/2 = 0.15.
    """
    for by, expected in (
        ("capacity", [(0.2, 0.2), (0.3, 0.1), (0.4, 0), (0.4, 0)]),
        ("current", [(0.2, 0.2), (0.35, 0.05), (0.4, 0), (0.4, 0)]),
    ):
        demos = store(script, value=[make_demo(script) for _ in range(3)], anneal_by=by)
        demos.value_capacity = 3
        for rho_and_phi in expected:
            demos.anneal_parameters()
            close([demos.rho, demos.phi], rho_and_phi)
            if len(demos.value_demos) > 1:
                demos.value_demos.pop()
    demos = store(script)
    demos.value_capacity = 3
    with np.errstate(all="ignore"):
        demos.anneal_parameters()
    assert (demos.rho, demos.phi) == (0.1, 0.3)
    demos = store(script, [], [make_demo(script), make_demo(script)], demo_capacity=2, anneal_by="current")
    demos.add_reward_demo(make_demo(script))
    assert len(demos.value_demos) == 1
    close(demos.rho, 0.25)


@catches(
    "PPODBuffer.check_demo_buffer_capacity, a person's demo dropped: if not demo.human -> if True",
    "PPODBuffer.check_demo_buffer_capacity, the shortest goes: max(from_agents -> min(from_agents",
    "PPODBuffer.check_demo_buffer_capacity, the oldest goes: min(self.value_demos, key=lambda demo: demo.max_value) -> "
    "self.value_demos[0]",
    "PPODBuffer.check_demo_buffer_capacity, the highest value demo goes: min(self.value_demos -> max(self.value_demos",
    "PPODBuffer.add_reward_demo, published, a new best demo empties the list: self.add(self.reward_demos, demo) -> "
    "self.add(self.reward_demos, demo); self.reward_demos = [demo]",
)
def test_capacity(script):
    """Capacity 3. H is a person's. Value demos A 0.5, B 0.2, C 0.9 go lowest first: B, then A and C for reward demos 1
    and 2; then the longest of an agent goes, 2 (6 steps) for 3 (5 steps). H (9 steps) stays, whatever the agent finds.
    """
    demo = lambda **fields: make_demo(script, **fields)
    H, A, B, C = demo(human=True, length=9), demo(max_value=0.5), demo(max_value=0.2), demo(max_value=0.9)
    one, two, three = demo(length=3), demo(length=6), demo(length=5, total=7.0)
    demos = store(script, [H], [A, B, C], demo_capacity=3)
    demos.check_demo_buffer_capacity()
    assert (demos.reward_demos, demos.value_demos) == ([H], [A, C])
    for new, reward, value in ((one, [H, one], [C]), (two, [H, one, two], []), (three, [H, one, three], [])):
        demos.add_reward_demo(new)
        assert (demos.reward_demos, demos.value_demos) == (reward, value)


@catches(
    "as_demo, a cut is a termination: bool(terminated and length == len(rewards)) -> True",
    "as_demo, cut, and terminated all the same: bool(terminated and length == len(rewards)) -> bool(terminated)",
    "as_demo, published, return of what is left: rewards.sum(dtype=np.float64) -> rewards[:length].sum()",
    "as_demo, last reward lost: [-1]) + 1 -> [-1])",
    "PPODBuffer.__init__, 0.0 is none: args.initial_reward_threshold -> args.initial_reward_threshold or None",
    "PPODBuffer.finish_episode, the last value: t, i], values.max() -> t, i], values[-1]",
    "PPODBuffer.track_potential_demos, reset rows stay: rows = rows[~buffer.reset_rows[rows, i]] -> pass",
)
def test_what_an_episode_becomes(script):
    """Rewards 0 1 0 2 0 0: what comes after the last positive one is cut off, so four steps are left, truncated; the
    return is 3 and the highest value 0.9. Rewards 0 1 -5: two are left, but the return is -4. 0 0 0: all is kept.

    The threshold is 0.0: 3 and 0 reach it, -4 is a value demo.
    """
    demos = store(script, initial_reward_threshold=0.0)
    first = [0, 1, 0, 2, 0, 0], [0.2, 0.9, 0.4, 0.3, 0.1, 0.05], "t"
    second, third, fourth = ([0, 1, -5], [0.1, 0.2, 0.3], "t"), ([0, 0, 0], [-1, -2, -3], "c"), ([0, 3], [0, 0], "t")
    play(script, demos, second, third, first, fourth)
    assert (len(demos.reward_demos), len(demos.value_demos)) == (3, 1)
    nothing, cut, whole = demos.reward_demos
    (negative,) = demos.value_demos
    assert [len(demo.rewards) for demo in (cut, negative, nothing, whole)] == [4, 2, 3, 2]
    assert [demo.total for demo in (cut, negative, nothing, whole)] == [3, -4, 0, 3]
    assert [demo.terminated for demo in (cut, negative, nothing, whole)] == [False, False, False, True]
    close([demo.max_value for demo in (cut, negative, nothing)], [0.9, 0.3, -1])
    assert cut.obs.ravel().tolist() == [200, 201, 202, 203, 204]
    assert nothing.obs.ravel().tolist() == [100, 101, 102, 103]


@catches(
    "PPODBuffer.add_reward_demo, the threshold falls: if is_good(lowest, self.reward_threshold): -> if True:",
    "PPODBuffer.add_reward_demo, the threshold stays: self.reward_threshold = lowest -> pass",
    "is_good, an equal return does not do: threshold - 1e-6 -> threshold + 1e-6",
    "is_good, a little less is not forgiven: threshold - 1e-6 * max(1, abs(threshold)) -> threshold",
)
def test_threshold(script):
    """Capacity 3, a person's demo of 5, threshold 1. Returns 2, 1.5, 2, 4, 3, 1.9: the threshold is the lowest in the
    list, 2 (1.5 fails, 2 reaches it); with 4 one of the twos goes, with 3 the other: now it is 3. It never falls.

    A sum of float32 that is meant to be 0.9 is a little less.
    """
    demos = store(script, [make_demo(script, total=5.0, human=True)], demo_capacity=3, initial_reward_threshold=1.0)
    returns = []
    for total in (2, 1.5, 2, 4, 3, 1.9):
        length = int(20 - total)  # the better, the shorter
        play(script, demos, ([0] * length + [total], [0] * (length + 1), "t"))
        returns.append((sorted(demo.total for demo in demos.reward_demos), demos.reward_threshold))
    lists = [[2, 5], [2, 5], [2, 2, 5], [2, 4, 5], [3, 4, 5], [3, 4, 5]]
    assert returns == list(zip(lists, [2, 2, 2, 2, 3, 3]))
    demos.add_reward_demo(make_demo(script, total=0.5, length=1))  # as a supplementary demo may be
    assert demos.reward_threshold == 3
    total = float(np.float32(0.9)) - 1e-8
    assert total < 0.9 and script.is_good(total, 0.9) and not script.is_good(total - 0.01, 0.9)
    assert script.is_good(-200.0, -200.0) and not script.is_good(-200.01, -200.0)


@catches(
    "is_good, any return does: total > 0 -> True",
    "is_good, 0 does: total > 0 -> total >= 0",
    "PPODBuffer.add_reward_demo, a demo of 0 sets the threshold: is_good(lowest, self.reward_threshold) -> "
    "(self.reward_threshold is None or lowest > self.reward_threshold)",
    "PPODBuffer.add_reward_demo, any positive return for ever: is_good(lowest, self.reward_threshold) -> "
    "self.reward_threshold is not None",
)
def test_without_threshold_a_return_must_be_positive(script):
    """Returns 0, -1, 0.5, 0.2, 0.7: 0.5 is the first good one; then 0.2 is too low.

    With supplementary demos of 0 and -3: a positive return still is needed, and any will do. A demo of 0.3 and room for
    three: the two longest go, the lowest of the rest is 0.2, and 0.1 is too low.
    """
    episodes = lambda *totals: [([0] * n + [total], [0] * (n + 1), "t") for total, n in totals]
    totals = lambda: sorted(round(demo.total, 3) for demo in demos.reward_demos)
    demos = store(script)
    play(script, demos, *episodes((0, 1), (-1, 1), (0.5, 1), (0.2, 1), (0.7, 1)))
    assert totals() == [0.5, 0.7] and demos.reward_threshold == 0.5
    demos = store(script)
    demos.add_reward_demo(make_demo(script, total=0.0, length=9))
    demos.add_reward_demo(make_demo(script, total=-3.0, length=8))
    play(script, demos, *episodes((0, 1), (-1, 1), (0.5, 2), (0.2, 3)))
    assert totals() == [-3, 0, 0.2, 0.5] and demos.reward_threshold is None and len(demos.value_demos) == 2
    demos.args.demo_capacity = 3
    demos.add_reward_demo(make_demo(script, total=0.3, length=2))
    play(script, demos, *episodes((0.1, 0)))
    assert totals() == [0.2, 0.3, 0.5]
    close(demos.reward_threshold, 0.2)


@catches(
    "PPODBuffer.consider, only worse ones join: demo.max_value > min -> demo.max_value < min",
    "PPODBuffer.consider, capacity forgotten: self.check_demo_buffer_capacity() -> pass",
    "PPODBuffer.finish_episode, values go stale: demo.max_value = float(values.max()) -> pass",
    "PPODBuffer.finish_episode, all values follow: demo.id == buffer.demo_ids[t, i] -> True",
    "PPODBuffer.finish_episode, replays are candidates: if buffer.demo_ids[t, i] == 0: -> if True:",
)
def test_value_demos(script):
    """Room for 2. Highest values 0.5 and 0.3 join; 0.2 and 0.3 do not beat the lowest, 0.4 does (the last value is 0.1
    in all). When the first is replayed and the critic says 0.6 at most, that is its value; a replay is no candidate.
    """
    demos, kept = store(script, demo_capacity=2, initial_reward_threshold=1.0), []
    for value in (0.5, 0.3, 0.2, 0.3, 0.4):
        play(script, demos, ([0, 0, 0], [0, value, 0.1], "t"))
        kept.append(sorted(demo.max_value for demo in demos.value_demos))
    assert kept == [[0.5], [0.3, 0.5], [0.3, 0.5], [0.3, 0.5], [0.4, 0.5]]
    rollout = script.SequenceBuffer(3, 1, LINE, TWO)
    rollout.demo_ids[:], rollout.rewards[2], rollout.terminated[2] = demos.value_demos[0].id, 5, True
    demos.track_potential_demos(rollout, torch.tensor([[0.2], [0.6], [0.3], [0.9]]))
    close([demo.max_value for demo in demos.value_demos], [0.6, 0.4])
    assert not demos.reward_demos


@catches(
    "PPODBuffer.finish_episode, the next episode inherits: self.episodes[i].clear() -> pass",
    "PPODBuffer.track_potential_demos, cut where a rollout ends: enumerate(self.episodes): -> "
    "enumerate(self.episodes):\n            parts.clear()",
)
def test_an_episode_over_three_rollouts(script):
    """Rewards 0 0 | 1 0 | 0 2 0, of which the second rollout shows nothing else; the highest value, 9, is in the first.
    An episode is not cut where a rollout ends, and the next one does not inherit from it.
    """
    demos = store(script, initial_reward_threshold=10.0)
    for part in (([0, 0], [0, 9], ""), ([1, 0], [1, 1], ""), ([0, 2, 0], [1, 1, 1], "t")):
        play(script, demos, part)
    play(script, demos, ([1], [5], "t"))
    one, other = demos.value_demos
    assert (one.total, one.max_value, one.rewards.tolist()) == (3, 9, [0, 0, 1, 0, 0, 2])
    assert one.obs.ravel().tolist() == [0, 1, 0, 1, 0, 1, 2] and (other.total, other.max_value) == (1, 5)


class Critic:
    """In place of an agent: log pi = -1.2 of every action, and the value 0.1 + obs / 10 of four observations."""

    device, certain_log_prob = "cpu", lambda self: 0.0
    critic = staticmethod(lambda features: features)

    def __call__(self, obs, reset_rows, actions, state):
        return torch.full((4, 1), -1.2), 0, 0.1 + obs[:, :, 0] / 10, torch.zeros(4, 1, 0)

    def features(self, obs, reset_rows, state):
        return torch.full((1, 1, 1), 9.0), state


@catches(
    "PPODBuffer.draw_next, writes into the caller's observations: next_obs = next_obs.copy() -> pass",
    "PPODBuffer.show, the agent's actions: buffer.actions[t, i] = demo.actions[at] -> pass",
    "SequenceBuffer.log_probs_and_values, in doubt: log_probs[self.replayed] = agent.certain_log_prob() -> pass",
    "SequenceBuffer.compute_advantages, ends exchanged: terminated, truncated\n -> truncated, terminated\n",
    "SequenceBuffer.compute_advantages, gamma for lambda: args.gamma, args.gae_lambda -> args.gamma, args.gamma**2",
)
def test_replayed_rows(script):
    """A demo of three steps, rewards 0 0 1, terminated; values 0.1 0.2 0.3, gamma = 1/2, lambda = 1; log-probs are 0.

    delta = (0 + 0.2/2 - 0.1, 0 + 0.3/2 - 0.2, 1 - 0.3) = (0, -0.05, 0.7); A_2 = 0.7, A_1 = -0.05 + 0.7/2 = 0.3,
    A_0 = 0.3/2 = 0.15. The ratio is pi itself: with pi = 0.3 and A = 2 the objective is 0.6, its derivative by log pi
    as well; with A = -2 it is clipped, min(-0.6, -1.6), without a gradient. Row 0 is the reset row before.
    """
    demos, rollout = store(script, [make_demo(script)]), script.SequenceBuffer(4, 1, LINE, TWO)
    seen = np.full((1, 1), 7.0)
    rollout.rewards[:], rollout.reset_rows[0], rollout.truncated[:] = 7, True, True  # as the environment behind it did
    for t in range(4):
        demos.show(None, rollout, t, seen, Draws(0.05))
    log_probs, values = rollout.log_probs_and_values(Critic())
    rollout.compute_advantages(log_probs, values, script.Args(gamma=0.5, gae_lambda=1.0))
    close(log_probs[:, 0], [-1.2, 0, 0, 0])
    close(rollout.advantages[1:, 0], [0.15, 0.3, 0.7])
    assert rollout.actions[1:, 0, 0].tolist() == [0, 1, 0] and rollout.terminated[:, 0].tolist() == [0, 0, 0, 1]
    assert rollout.obs.ravel().tolist() == [0, 0, 1, 2, 3] and seen == 7 and not rollout.truncated.any()
    for advantage, objective, derivative in ((2.0, 0.6, 0.6), (-2.0, -1.6, 0.0)):
        log_pi = torch.tensor([math.log(0.3)], requires_grad=True)
        loss = script.policy_loss(log_pi - log_probs[1], torch.tensor([advantage]), 0.2)
        close([-loss.item(), -torch.autograd.grad(loss, log_pi)[0].item()], [objective, derivative])


class Adds(torch.nn.Module):
    """In place of a GRU."""

    def forward(self, x, state):
        return x + state


@catches(
    "RecurrentAgent.features, the state goes on over a reset row: state = state * ~reset_rows[t, :, None] -> pass",
    "RecurrentAgent.features, state zero in every row: state * ~reset_rows[t, :, None] -> 0 * state",
    "RecurrentAgent.features, forgets before the final observation: features.append(state) -> "
    "features.append(state * ~reset_rows[t, :, None])",
    "SequenceBuffer.log_probs_and_values, states after each row: torch.cat([self.state[None], states[:-1]]) -> states",
    "SequenceBuffer.log_probs_and_values, last value without memory: reset_rows[-1:], states[-1] -> "
    "reset_rows[-1:], 0 * states[-1]",
)
def test_recurrent_states(script):
    """A GRU that only adds: inputs 1 2 4 8 16 from the state 32 give 33, 35, 39; row 2 is a reset row, so then 8, 24.

    States before chunks of two steps: 32, 35. The state does not go on over a reset row, but from chunk to chunk.
    """
    agent = script.RecurrentAgent(LINE, TWO, script.Args(gru_size=1))
    agent.trunk_output, agent.gru = lambda obs: obs, Adds()
    rollout = script.SequenceBuffer(4, 1, LINE, TWO)
    rollout.obs[:, 0, 0], rollout.reset_rows[2], rollout.state = [1, 2, 4, 8, 16], True, torch.tensor([[32.0]])
    features, states = agent.features(*map(torch.as_tensor, (rollout.obs[:-1], rollout.reset_rows, rollout.state)))
    close(features.ravel(), [33, 35, 39, 8])
    close(states.ravel(), [33, 35, 0, 8])
    _, values = rollout.log_probs_and_values(agent)
    rollout.advantages = values
    close(rollout.states.ravel(), [32, 33, 35, 0])
    close(rollout.chunks(rollout.states, 2)[0].ravel(), [32, 35])
    close(values, agent.critic(torch.tensor([[33.0], [35], [39], [8], [24]])))


@catches(
    "SequenceBuffer.chunks, time and slots mixed up: movedim(0, 2).flatten(1, 2) -> movedim(0, 1).flatten(1, 2)",
    "SequenceBuffer.minibatches, all in each: field[:, part] -> field",
    "SequenceBuffer.minibatches, only reset rows: if not batch.reset_rows.all() -> if True",
)
def test_chunks(script):
    """Row t of slot e is 10 e + t, T = 4, chunks of 2: 0 1 | 2 3 | 10 11 | 12 13.

    In the order 2 0 3 1, in two minibatches: 10 0, then 11 1; and 12 2, then 13 3. What only resets is left out.
    """
    rollout = script.SequenceBuffer(4, 2, LINE, TWO)
    numbers = 10.0 * torch.arange(2)[None] + torch.arange(5)[:, None]
    rollout.obs[:] = numbers[:, :, None]
    rollout.compute_advantages(numbers[:4], numbers, script.Args())
    rollout.states, rollout.advantages, rollout.returns = 100 + numbers[:4, :, None], numbers[:4], numbers[:4]
    rollout.replayed, order = numbers[:4], SimpleNamespace(permutation=lambda n: np.array([2, 0, 3, 1]))
    one, two = rollout.minibatches(2, 2, order)
    close(one.states.ravel(), [110, 100, 111, 101])
    for name in ("obs", "replayed", "old_log_probs", "old_values", "advantages", "returns"):
        close(getattr(one, name).reshape(2, 2), [[10, 0], [11, 1]])
        close(getattr(two, name).reshape(2, 2), [[12, 2], [13, 3]])
    rollout.reset_rows[:2] = True
    assert len(list(rollout.minibatches(2, 2, order))) == 1


# -------------------------------------------------------------------------- against slow and obvious versions of it


ACTIONS = [  # space, actions as the agent has them, as the environment takes them
    (spaces.Discrete(4, start=5), [[0], [3]], [5, 8]),
    (spaces.Box(-0.5, 0.25, (2,), np.float64), [[-2, 0.125], [3, 0]], [[-0.5, 0.125], [0.25, 0]]),
    (spaces.Box(-3, 9, (2,), np.int64), [[8.9, -7], [0.4, 0.6]], [[9, -3], [0, 1]]),
    (spaces.MultiDiscrete([2, 3]), [[1, 2], [0, 1]], [[1, 2], [0, 1]]),
    (spaces.MultiBinary((2, 2)), [[1, 0, 1, 1], [0, 0, 0, 1]], [[[1, 0], [1, 1]], [[0, 0], [0, 1]]]),
]


@catches(
    "to_env, truncates: np.rint(actions) -> actions",
    "to_env, bounds forgotten: np.clip(actions, space.low, space.high) -> actions",
    'to_env, start forgotten: getattr(space, "start", 0) -> 0',
    'from_env, start forgotten: getattr(space, "start", 0) -> 0',
    "from_env, any action will do: if not all(action in space for action in actions) -> if False",
)
def test_actions(script):
    """There and, what is in the space, back again."""
    for space, own, expected in ACTIONS:
        actions = script.to_env(np.array(own), space)
        close(actions, expected)
        assert all(action in space for action in actions) and actions.dtype == space.dtype
        back = script.from_env(actions, space)
        assert back.shape == np.shape(own) and back.dtype == (np.float32 if isinstance(space, spaces.Box) else np.int64)
        close(script.to_env(back, space), expected)
        assert isinstance(space, spaces.Box) or back.tolist() == own
        for wrong in (actions + 100, actions + 0.5, actions - 100):
            with fails(f"an action is not in {space}"):
                script.from_env(wrong, space)


def make_agent(script, view=LINE, action_space=TWO, **given):
    """A RecurrentAgent with weights and biases that are all but small, and its Args."""
    args = script.Args(**{"gru_size": 8, "chunk_length": 8, "hidden_sizes": (8,)} | given)
    torch.manual_seed(0)
    agent = script.RecurrentAgent(view, action_space, args)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    return agent, args


def slow_features(agent, obs, reset_rows, state):
    """What the heads see of one slot's rows, one at a time; (features, states after each)."""
    features, states = [], []
    for row, reset_row in zip(obs, reset_rows):
        x = row.flatten().float()
        if agent.patches is not None:
            x = agent.patches.conv(row.float().permute(2, 0, 1)).clamp(min=0).flatten()
        x = agent.trunk(x)
        if agent.gru is not None:
            x = state = agent.gru(x, state)
        features.append(x)
        if reset_row:
            state = torch.zeros_like(state)
        states.append(state)
    return torch.stack(features), torch.stack(states)


def policy(agent, output):
    """The distribution of actions that the network's output means."""
    if agent.continuous:
        return torch.distributions.Independent(torch.distributions.Normal(output, agent.log_std.exp()), 1)
    return torch.distributions.Categorical(logits=output)


@catches(
    "RecurrentAgent.features, one reset row for all: ~reset_rows[t, :, None] -> ~reset_rows[t].any()",
    "RecurrentAgent.features, steps and slots exchanged: unflatten(0, reset_rows.shape) -> "
    "unflatten(0, reset_rows.T.shape).transpose(0, 1)",
    "GridPatches.forward, rows and columns exchanged: movedim(3, 1) -> movedim(3, 1).transpose(2, 3)",
    "RecurrentAgent.sample, deviation 1: self.log_std.exp() * noise -> noise",
    "RecurrentAgent.sample, no noise: (output + noise).split -> output.split",
    "RecurrentAgent.sample, the least likely: logits.argmax(1) -> logits.argmin(1)",
    "RecurrentAgent.sample, the state before: actions.cpu().numpy(), states[0] -> actions.cpu().numpy(), state",
    "RecurrentAgent.draw_noise, normal where Gumbel is due: if self.continuous else rng.gumbel -> ",
    "RecurrentAgent.certain_log_prob, density 1: if not self.continuous -> if True",
    "RecurrentAgent.certain_log_prob, of a unit Gaussian: self.log_std + 0.5 -> 0 * self.log_std + 0.5",
)
def test_network_and_actions(script):
    """Vectors and grids, with a GRU and without: the whole rollout at once, and step by step in acting, give what the
    slow version gives. Actions are exactly what the noise asks for, and noise is distributed as it should be: 20,000
    draws of a Gumbel variable have the mean 0.577 and the variance 1.645 (4 sigma: 0.036, 0.1). Of a demonstrator, who
    plays the mean, the density is that of the mean.
    """
    rng, T, B, box, two = np.random.default_rng(0), 7, 3, spaces.Box(-9, 9, (2,)), spaces.MultiDiscrete([2, 3])
    for view, recurrent, space in (((5,), True, two), ((4, 3, 2), False, box)):
        dtype = np.uint8 if len(view) == 3 else np.float32
        agent, _ = make_agent(script, spaces.Box(0, 3, view, dtype), space, recurrent=recurrent)
        obs, reset_rows = rng.integers(0, 4, (T, B, *view)).astype(dtype), rng.random((T, B)) < 0.3
        state, noise = torch.randn(B, agent.state_size), agent.draw_noise(rng, T, B)
        assert agent.state_size == 8 * recurrent
        with torch.no_grad():
            features, states = agent.features(torch.tensor(obs), torch.tensor(reset_rows), state)
            for i in range(B):
                expected = slow_features(agent, torch.tensor(obs[:, i]), reset_rows[:, i], state[i])
                close(features[:, i], expected[0], atol=1e-4)
                close(states[:, i], expected[1], atol=1e-4)
            for t in range(T):
                actions, state = agent.sample(obs[t], reset_rows[t], state, noise[t])
                close(state, states[t], atol=1e-4)
                output = agent.actor(features[t])
                if space is box:
                    close(actions, output + agent.log_std.exp() * noise[t], atol=1e-4)
                else:
                    first, second = (output + noise[t]).split([2, 3], 1)
                    close(actions, torch.stack([first.argmax(1), second.argmax(1)], 1))
        mean = torch.zeros(1, 2)
        close(agent.certain_log_prob(), policy(agent, mean).log_prob(mean)[0] if space is box else 0)
        noise = agent.draw_noise(rng, 100, 100)
        assert abs(noise.mean() - (0 if space is box else 0.577)) < 0.036
        assert abs(noise.var() - (1 if space is box else 1.645)) < 0.1


@catches(
    "RecurrentAgent.act, remembers nothing: actions, self.state = -> actions, _ =",
    "RecurrentAgent.act, noise unasked: if self.args.sample_actions else 0 -> ",
    "RecurrentAgent.act, likeliest only: if self.args.sample_actions -> if False",
    "RecurrentAgent.begin_episodes, remembers the last episode: self.state = -> "
    'if episodes != len(getattr(self, "state", ())):\n            self.state =',
    "RecurrentAgent.begin_episodes, other draws in each evaluation: default_rng(self.args.seed) -> default_rng()",
)
def test_evaluations(script):
    """`act` remembers within an episode, and forgets the last one. Logits (ln 3, 0): --sample-actions takes the first
    in 3 of 4 steps, independently, the same in each evaluation; else it is the first always. (4.6 sigma: 0.02)
    """
    agent, _ = make_agent(script, spaces.Box(-1, 1, (3,)), spaces.Box(-100, 100, (1,)))
    obs = np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)
    agent.begin_episodes(2)
    first = [agent.act(x) for x in obs]
    agent.begin_episodes(2)
    close([agent.act(x) for x in obs], first)
    assert not np.allclose(first[0], agent.act(obs[0]))
    agent.act(obs[0][:1])  # another number of slots: these must be new episodes
    close(agent.act(obs[0]), first[0])
    for sample_actions in (False, True):
        agent, _ = make_agent(script, recurrent=False, sample_actions=sample_actions)
        agent.actor.weight.data.zero_()
        agent.actor.bias.data[:] = torch.tensor([math.log(3), 0])
        agent.begin_episodes(10_000)
        one, two = [agent.act(np.zeros((10_000, 1), np.float32)) for _ in range(2)]
        agent.begin_episodes(10_000)
        close(agent.act(np.zeros((10_000, 1), np.float32)), one)
        assert abs((one == 0).mean() - (0.75 if sample_actions else 1)) < 0.02
        assert abs((one == two).mean() - (0.75**2 + 0.25**2 if sample_actions else 1)) < 0.02


# ------------------------------------------------------------------------------------------------ replays, row by row

PLANS = [[(3, "t"), (2, "c")], [(1, "c"), (4, "b")], [(6, "t")]]
REPLAYS = {1: (2, "t"), 2: (5, "c")}  # length and end of the demos, by their number


def walk_demo(script, length, end):
    """A demo whose observations are (-1, length, step), whose rewards are -1, -2, … and whose actions are all 1."""
    obs = np.array([[-1, length, t] for t in range(length + 1)], np.float32)
    rewards = -np.arange(1, length + 1, dtype=np.float32)
    return script.Demo(obs, np.ones((length, 1), int), rewards, end == "t", float(rewards.sum()))


def train_with(script, demos, *makers, **given):
    """(Run, the calls of its loss): three slots, of which each replays one of these demos half of the time."""

    def with_demos(args, envs):
        buffer = script.PPODBuffer(args, args.num_envs, envs.single_observation_space, envs.single_action_space)
        for demo in demos:
            buffer.add(buffer.reward_demos, demo)
        return buffer

    small = {"num_envs": 3, "num_steps": 8, "chunk_length": 4, "num_minibatches": 1, "update_epochs": 1, "gru_size": 3}
    small |= {"hidden_sizes": (4,), "rho": 0.5, "phi": 0.0, "initial_reward_threshold": 1e9, "demo_capacity": 10**6}
    patch = mock.patch.object(script, "make_demo_buffer", with_demos)
    with patch, watched(script, "sequence_loss", "SequenceBuffer") as calls:
        return rehearse(script, *makers, **small | given), calls


def rows_of(calls, i):
    """What slot i shows, row after row: dicts."""
    names = "obs actions rewards terminated truncated reset_rows demo_ids".split()
    for call in calls:
        for t in range(8):
            row = {name: getattr(call.buffer, name)[t, i].tolist() for name in names}
            yield row | {"next_obs": call.buffer.obs[t + 1, i].tolist()}


@catches(
    "PPODBuffer.draw_next, the environment is seen in mid-episode: to_reset[i] = self.needs_reset[i] -> pass",
    "PPODBuffer.draw_next, the last demo's environment is seen: self.needs_reset[i] = True -> pass",
    "PPODBuffer.draw_next, the environment before the demo: next_obs[i] = demo.obs[0] -> pass",
    "PPODBuffer.draw_next, a demo goes on where it was: self.position[i] = 0 -> self.position[i] %= 2",
    "PPODBuffer.draw_next, the old observation of what was reset: next_obs[to_reset] = first_obs[to_reset] -> pass",
    "PPODBuffer.show, every demo ends terminated: is_last and demo.terminated -> is_last",
    "PPODBuffer.show, none ends terminated: buffer.terminated[t, i] = is_last and demo.terminated -> "
    "demo.terminated = False",
    "PPODBuffer.show, reward of the environment behind a reset row: buffer.rewards[t, reset_rows] = 0 -> pass",
    "PPODBuffer.show, end of the environment behind a reset row: buffer.terminated[t, reset_rows] = False -> pass",
    "PPODBuffer.show, replays are not counted: self.replayed_rows += 1 -> pass",
    "train, replays counted: real = ~buffer.reset_rows & (buffer.demo_ids == 0) -> real = ~buffer.reset_rows",
    "train, returns of replays counted: & real, ~real -> , ~real",
    "train, no replay at first: obs = demos.restart(envs, obs, rng) -> pass",
    "PPODBuffer.show, what a step led to is not stored: buffer.obs[t + 1] = next_obs -> pass",
)
def test_replays(script):
    """Every row of some twenty rollouts is what it should be: a slot shows, over and over, all of an episode or of a
    demo, from its first observation to its last, then one reset row that holds the final observation. The environment
    of a replaying slot is not seen; afterwards it begins a new episode. Tracked episodes, returns and steps are those
    of the environments alone.
    """
    demos = [walk_demo(script, *REPLAYS[number]) for number in REPLAYS]
    run, calls = train_with(script, demos, *[lambda i=i: Walk(PLANS[i], i) for i in range(3)], total_timesteps=110)
    assert calls[0].buffer.demo_ids[0].any()  # slots draw before their first row
    finished, totals, real_rows, replayed = [], [], 0, 0
    for i in range(3):
        slot, t = list(rows_of(calls, i)), 0
        while t < len(slot):
            (name, number, _), demo = slot[t]["obs"], slot[t]["demo_ids"]
            assert demo or name == i
            length, end = REPLAYS[demo] if demo else PLANS[i][int(number) % len(PLANS[i])]
            episode = slot[t : t + length]
            for k, row in enumerate(episode):
                last = k + 1 == length
                assert (row["obs"], row["next_obs"]) == ([name, number, k], [name, number, k + 1])
                assert (name == -1) == (demo > 0) and row["demo_ids"] == demo and not row["reset_rows"]
                assert row["rewards"] == (-(k + 1) if demo else 10 * number + k + 1)
                assert row["actions"] == [1] or not demo
                assert row["terminated"] == (last and end in "tb") and row["truncated"] == (last and end in "cb")
            if demo:
                replayed += len(episode)
            else:
                real_rows += len(episode)
            if len(episode) == length and not demo:
                finished.append((i, number, length))
                totals.append(sum(row["rewards"] for row in episode))
            if t + length < len(slot):
                final = slot[t + length]
                assert final["reset_rows"] and final["obs"] == [name, number, length]
                assert (final["rewards"], final["terminated"], final["truncated"]) == (0, False, False)
            t += length + 1
    buffer = run.parts["demos"]
    assert (run.step, buffer.replayed_rows) == (real_rows, replayed) and replayed > 40 and real_rows > 40
    assert run.logged["training_rows"][-1] == real_rows + replayed
    assert sorted(total for _, total in run.episodes) == sorted(totals)
    assert sorted((*demo.obs[0, :2], len(demo.rewards)) for demo in buffer.value_demos) == sorted(finished)
    for demo in buffer.value_demos:
        assert demo.obs[:, 2].tolist() == list(range(len(demo.rewards) + 1))


@catches(
    "PPODBuffer.restart, all slots may replay: np.arange(len(obs)) > 0 -> np.ones(len(obs), bool)",
)
def test_a_rollout_of_nothing_but_replays(script):
    """One slot, rollouts of two steps, demos of five, rho = 0.8: from a checkpoint on, training would begin anew for
    ever, with the same draws, if no step counted. (Seed 1 draws a replay first.)"""

    def restart(*given, restart=script.PPODBuffer.restart):
        begun.append(1)
        assert len(begun) < 9, "it begins again and again"
        return restart(*given)

    begun, given = [], {"num_envs": 1, "num_steps": 2, "recurrent": False, "rho": 0.8, "phi": 0.0}
    demos = [walk_demo(script, 5, "t")]
    with mock.patch.object(script.PPODBuffer, "restart", restart):
        run, _ = train_with(script, demos, lambda: Walk([(1, "t")]), total_timesteps=4, checkpoint_every=2, **given)
    assert run.step == 4 and len(begun) == 3 - 1


# ---------------------------------------------------------------------------------------------------- whole training


def textbook_loss(agent, batch, args):
    """(loss, figures) of Sequences with torch's distributions, of all rows but reset rows."""
    played = ~batch.reset_rows
    features, _ = agent.features(batch.obs, batch.reset_rows, batch.states[0])
    pi, values = policy(agent, agent.actor(features)[played]), agent.critic(features)[played][:, 0]
    actions = batch.actions[played] if agent.continuous else batch.actions[played][:, 0]
    advantages, returns, old_values = batch.advantages[played], batch.returns[played], batch.old_values[played]
    ratios, eps = (pi.log_prob(actions) - batch.old_log_probs[played]).exp(), args.clip_coef
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    near = torch.where(advantages > 0, ratios.clamp(max=1 + eps), ratios.clamp(min=1 - eps))
    errors = (values - returns) ** 2
    if args.clip_vloss:
        moved = (values - old_values).clamp(-args.clip_vloss_coef, args.clip_vloss_coef)
        errors = torch.maximum(errors, (old_values + moved - returns) ** 2)
    own, entropy = ratios[~batch.replayed[played]], pi.entropy().mean()
    figures = {"policy_loss": -(near * advantages).mean(), "value_loss": errors.mean() / 2, "entropy": entropy}
    figures["approx_kl"] = (own - 1 - own.log()).sum() / max(1, len(own))
    figures["clip_fraction"] = ((own > 1 + eps) | (own < 1 - eps)).sum() / max(1, len(own))
    loss = figures["policy_loss"] - args.ent_coef * entropy + args.vf_coef * figures["value_loss"]
    return loss, {"loss": loss} | figures


@torch.no_grad()
def check_rollout(script, agent, buffer, noise, args):
    """Actions, log-probs, states, values and advantages of a rollout that `agent` played; its GRU's states after it."""
    reset_rows = torch.tensor(np.append(buffer.reset_rows, [[False] * 3], 0))
    replayed = torch.tensor(buffer.demo_ids > 0)
    features, states = agent.features(torch.tensor(buffer.obs), reset_rows, buffer.state)
    output, values, actions = agent.actor(features[:-1]), agent.critic(features)[..., 0], torch.tensor(buffer.actions)
    drawn = output + agent.log_std.exp() * noise if agent.continuous else (output + noise).argmax(2, keepdim=True)
    close(actions[~replayed], drawn[~replayed], atol=1e-3)
    log_probs = policy(agent, output).log_prob(actions if agent.continuous else actions[..., 0])
    certain = policy(agent, 0 * output).log_prob(0 * output) if agent.continuous else 0 * log_probs
    close(buffer.old_log_probs, torch.where(replayed, certain, log_probs), atol=1e-3)
    close(buffer.states, torch.cat([buffer.state[None], states[:-2]]), atol=1e-3)
    close(buffer.old_values, values[:-1], atol=1e-3)
    steps = [torch.tensor(x) for x in (buffer.rewards, buffer.terminated, buffer.truncated)]
    expected = script.compute_gae(steps[0], values[:-1], values[1:], *steps[1:], args.gamma, args.gae_lambda)
    close(torch.stack([buffer.advantages, buffer.returns]), torch.stack(expected), atol=1e-3)
    return states[-2]


class Push(Chance):
    """The same with Box actions."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)
    step = lambda self, action: super().step(float(action[0]))


TRAININGS = [
    (Chance, {"update_epochs": 2, "num_minibatches": 2}),
    (Push, {"update_epochs": 3, "anneal_lr": False, "norm_adv": False, "clip_vloss": True, "clip_vloss_coef": 0.01}),
    (Chance, {"recurrent": False, "normalize_obs": True, "normalize_reward": True, "num_minibatches": 3}),
]


@catches(
    "train, the GRU's state is lost between rollouts: buffer.state = state -> buffer.state = 0 * state",
    "train, the GRU forgets in acting: agent.sample(obs, ended, state, -> agent.sample(obs, ended, 0 * state,",
    "train, the GRU never forgets: agent.sample(obs, ended, state, -> agent.sample(obs, ended & False, state,",
    "train, one draw for all steps: noise[t] -> noise[0]",
    "train, observations change places: obs = demos.show(envs, buffer, t, obs, rng) -> "
    "obs = np.roll(demos.show(envs, buffer, t, obs, rng), 1, 0)",
    "train, gradients add up: optimizer.zero_grad() -> pass",
    "train, gradients as long as they are: args.max_grad_norm -> 1e9",
    "train, the learning rate stays: if args.anneal_lr: -> if False:",
    "train, the learning rate falls: if args.anneal_lr: -> if True:",
    "train, reset rows in the statistics: [~buffer.reset_rows]) -> .reshape(-1, 2))",
    "SequenceBuffer.transform_rewards, as they are: if args.normalize_reward: -> if False:",
    "train, only one epoch: range(args.update_epochs) -> range(1)",
    "train, demos keep scaled rewards: demos.track_potential_demos(buffer, values) -> "
    "args.normalize_reward and buffer.scale_rewards(agent.return_stats, args.gamma); "
    "demos.track_potential_demos(buffer, values)",
    "sequence_loss, state of the last step of a chunk: batch.states[0] -> batch.states[-1]",
    "sequence_loss, reset rows learnt: trained = ~batch.reset_rows -> trained = batch.reset_rows | True",
    "sequence_loss, reset rows in the mean: normalize(advantages) -> normalize(batch.advantages)[trained]",
    "sequence_loss, replays in the figures: [~batch.replayed[trained]] -> ",
    "sequence_loss, entropy of reset rows: entropies[trained].mean() -> entropies.mean()",
    "sequence_loss, entropy punished: - args.ent_coef * entropy -> + args.ent_coef * entropy",
    "sequence_loss, always normalised: if args.norm_adv: -> if True:",
    "sequence_loss, never clipped: if args.clip_vloss else None -> if False else None",
    "SequenceBuffer.compute_advantages, from the state itself: values[1:], terminated -> values[:-1], terminated",
    "SequenceBuffer.log_probs_and_values, nobody is certain: self.demo_ids > 0 -> self.demo_ids > 10**9",
)
def test_training(script):
    """Some rollouts in three slots, of which some replay: actions, states, values, advantages, losses, learning rates,
    statistics and weights are those of the slow versions above, whatever the options.
    """
    for maker, options in TRAININGS:
        rng, noises, drawn = np.random.default_rng(0), [], script.RecurrentAgent.draw_noise
        actions = rng.integers(2, size=(5, 1)) if maker is Chance else rng.uniform(-1, 1, (5, 1)).astype(np.float32)
        demo = script.Demo(rng.normal(0, 3, (6, 2)).astype(np.float32), actions, np.ones(5, np.float32), False, 5.0)
        note = lambda *given: noises.append(drawn(*given)) or noises[-1]
        given = {"learning_rate": 0.05, "max_grad_norm": 0.2, "total_timesteps": 24, "gamma": 0.9}
        given |= {"rho": 0.4, "phi": 0.2}
        with mock.patch.object(script.RecurrentAgent, "draw_noise", note):
            run, calls = train_with(script, [demo], maker, **given | options)
        args, step, seen, state, agent = run.args, 0, [], 0 * calls[0].buffer.state, copy.deepcopy(calls[0].agent)
        assert len(calls) == args.update_epochs * args.num_minibatches * len(noises) and len(noises) >= 2
        optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
        for number, (call, after) in enumerate(zip(calls, [*calls[1:], run])):
            rollout, update = divmod(number, len(calls) // len(noises))
            if update == 0:
                close(call.buffer.state, state, atol=1e-3)
                if args.normalize_obs and seen:
                    close(call.agent.obs_stats.mean, np.concatenate(seen).mean(0))
                    agent.obs_stats.load_state_dict(call.agent.obs_stats.state_dict())
                state = check_rollout(script, call.agent, call.buffer, noises[rollout], args)
                optimizer.param_groups[0]["lr"] = 5e-2 * (1 - step / 24 if args.anneal_lr else 1)
                close(run.logged["learning_rate"][rollout], optimizer.param_groups[0]["lr"])
                seen.append(call.buffer.obs[:-1][~call.buffer.reset_rows])
                step += (~call.buffer.reset_rows & (call.buffer.demo_ids == 0)).sum()
            loss, figures = textbook_loss(agent, call.batch, args)
            close([run.logged[name][number] for name in figures], [x.item() for x in figures.values()], atol=2e-3)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.2)
            optimizer.step()
            close(flat(after.agent), flat(agent), atol=2e-3)
        assert run.step == step and max(run.logged["approx_kl"]) > 0
        if args.normalize_reward:
            close(run.agent.return_stats.count, sum(map(len, seen)))
            assert max(abs(demo.rewards).max() for demo in run.parts["demos"].value_demos) > 1
        others = "learning_rate explained_variance training_rows".split()
        assert set(run.logged) == {*others, *figures, *"reward_demos value_demos rho phi reward_threshold".split()}


@catches(
    "train, the limit of the KL divergence is forgotten: > args.target_kl -> > 1e9",
    "SequenceBuffer.transform_rewards, signs learnt unasked: if args.clip_reward: -> if True:",
    "SequenceBuffer.transform_rewards, signs not learnt: if args.clip_reward: -> if False:",
    "sequence_loss, mean of nothing: if len(own) == 0: -> if False:",
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_target_kl_and_clipped_rewards(script):
    """Four epochs, or the first two of each rollout: in the first one nothing has moved yet. Signs are learnt from;
    demos and reported returns are true ones. A minibatch of nothing but replays has figures as well: nothing moved.
    """
    makers = [lambda i=i: Walk(PLANS[i], i) for i in range(3)]
    for target_kl, epochs in ((None, 4), (1e9, 4), (1e-12, 2)):
        given = {"update_epochs": 4, "learning_rate": 1e-2, "target_kl": target_kl, "clip_reward": target_kl is None}
        run, calls = train_with(script, [walk_demo(script, 2, "t")], *makers, total_timesteps=60, **given)
        assert len(calls) == epochs * len(run.logged["learning_rate"])
        rewards = {*np.unique([call.buffer.rewards for call in calls])}
        assert rewards == {-1, 0, 1} if target_kl is None else max(rewards) > 20
        assert max(total for _, total in run.episodes) > 20
        assert max(demo.rewards.max() for demo in run.parts["demos"].value_demos) > 5
    batch = calls[0].batch._replace(replayed=torch.ones_like(calls[0].batch.replayed))
    _, figures = script.sequence_loss(calls[0].agent, batch, run.args)
    assert figures["approx_kl"] == 0 and figures["clip_fraction"] == 0 and figures["loss"].isfinite()


# -------------------------------------------------------------------------------- worlds whose right answer is known


class Chain(gym.Env):
    """Pays 1 after 12 right choices out of two and nothing before; a wrong one ends the episode. Which choice is right
    differs from place to place, so that chance finds the end once in 2^12 times."""

    LENGTH = 12
    RIGHT = [at * (at + 1) // 2 % 2 for at in range(LENGTH)]
    action_space, observation_space = TWO, spaces.Box(0, 1, (LENGTH + 1,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return np.eye(13, dtype=np.float32)[0], {}

    def step(self, action):
        wrong = action != self.RIGHT[self.at]
        self.at += not wrong
        solved = self.at == self.LENGTH
        return np.eye(13, dtype=np.float32)[self.at], float(solved), solved or wrong, False, {}

    def render(self):
        return np.full((64, 64, 3), self.at, np.uint8)


CHAIN = f"{__name__}:Chain-v0"
gym.register("Chain-v0", Chain, disable_env_checker=True)


def write_chain(script, path, **changes):
    """Save the demo that solves a Chain; `changes` replace or (None) remove fields of the file."""
    rewards = np.append(np.zeros(11), 1).astype(np.float32)
    demo = script.Demo(np.eye(13, dtype=np.float32), np.array(Chain.RIGHT)[:, None], rewards, True, 1.0)
    script.save_demo(Path(path), demo, script.Args(env_id=CHAIN), TWO)
    if changes:
        fields = {name: value for name, value in (dict(np.load(path)) | changes).items() if value is not None}
        np.savez(path, **fields)


HARD = {"num_envs": 8, "num_steps": 64, "learning_rate": 3e-3, "hidden_sizes": (32,), "recurrent": False, "rho": 0.3}
HARD |= {"phi": 0.0, "anneal_lr": False}


def test_a_chain_is_solved_from_one_demo(script, tmp_path):
    """2 ** -12 is the chance of a random policy; one demo shows the way. Without replays of it nothing is learnt, and
    no failure, whose return is 0, becomes a reward demo.
    """
    write_chain(script, tmp_path / "demo.npz")
    given = HARD | {"initial_human_demos_dir": str(tmp_path)}
    named = mock.patch.object(script, "demo_identity", lambda args: {"env_id": CHAIN})
    with named:
        run = rehearse(script, Chain, **given | {"rho": 0.0, "total_timesteps": 500})
        assert run.evaluations["return_mean"] == [0] and len(run.parts["demos"].reward_demos) == 1
        run = rehearse(script, Chain, **given, total_timesteps=3000)
    (human,) = [demo for demo in run.parts["demos"].reward_demos if demo.human]
    assert run.evaluations["return_mean"] == [1] and human.total == 1 and len(run.parts["demos"].reward_demos) > 1
    run = rehearse(script, Chain, **HARD | {"phi": 0.3, "rho": 0.0}, total_timesteps=500, demo_capacity=20)
    demos = run.parts["demos"]
    assert (len(demos.reward_demos), len(demos.value_demos)) == (0, 20) and demos.replayed_rows > 0


# -------------------------------------------------------------------------------------------------- files and folders


@catches(
    "save_demo, the cut is forgotten: demo.obs[:-1] -> demo.obs[1:]",
    "save_demo, the return of what is left: demo.total} -> demo.rewards.sum()}",
    "read_demo, human for all: rewards, bool(file -> rewards, True or bool(file",
)
def test_a_demo_comes_back_from_its_file(script, tmp_path):
    """With actions of every kind, the cut and the whole return, however the JSON of env_kwargs is written."""
    view, path = spaces.Box(0, 255, (2, 2, 3), np.uint8), tmp_path / "sub/demo.npz"
    for space, own, _ in ACTIONS:
        actions = script.from_env(script.to_env(np.array(own * 3), space), space)
        obs = np.random.default_rng(1).integers(0, 4, (7, 2, 2, 3)).astype(np.uint8)
        demo = script.as_demo(obs, actions, np.array([0, 1, 2, -5, 0, 0], np.float32), True)
        args = script.Args(env_id="Nothing-v0", env_kwargs='{"size": 3, "a": 1}', wrappers=("some.Wrapper",))
        script.save_demo(path, demo, args, space)
        loaded = script.read_demo(path, replace(args, env_kwargs='{"a":1, "size":3}'), view, space)
        for field in ("obs", "actions", "rewards"):
            close(getattr(loaded, field), getattr(demo, field))
        assert (loaded.terminated, loaded.total, loaded.human) == (False, -2, False) and loaded.obs.dtype == np.uint8
        with np.load(path, allow_pickle=False) as file:
            assert file["observation"].shape == (3, 2, 2, 3) and file["action"].dtype == space.dtype
            assert file["truncated"] and not file["terminated"]


class Bomb:
    """Unpickling this creates a file named `executed`."""

    def __reduce__(self):
        return exec, ("open('executed', 'w').close()",)


BAD = [  # fields of a file, and a word of what is said of it
    ({"env_id": '"CartPole-v1"'}, "CartPole-v1"),
    ({"env_kwargs": '{"length": 3}'}, "env_kwargs"),
    ({"wrappers": '["some.Wrapper"]'}, "wrappers"),
    ({"observation": np.zeros((12, 7)), "final_observation": np.zeros(7)}, "(13, 7)"),
    ({"action": np.zeros(11, int)}, "(11, 1)"),
    ({"action": np.full(12, 0.5)}, "action"),
    ({"reward": np.full(12, np.nan)}, "NaN"),
    ({"reward": np.zeros(0), "action": np.zeros(0, int), "observation": np.zeros((0, 13))}, "(1, 13)"),
    ({"reward": np.array([Bomb()], object)}, "allow_pickle"),
    ({"reward": None, "junk": np.zeros(3)}, "reward"),
]


@catches(
    "read_demo, executes: allow_pickle=False -> allow_pickle=True",
    "read_demo, any environment: if json.loads(str(file[name])) != own -> if False",
    "read_demo, NaN: if not all(np.isfinite -> if False and not all(np.isfinite",
    "PPODBuffer.load_supplementary_demos, ends the run: except UserError as error -> except KeyError as error",
)
def test_bad_demo_files(script, tmp_path, monkeypatch, capsys):
    """At the start a bad file is an error that names it; a supplementary one is skipped with a line. Nothing in it is
    executed."""
    monkeypatch.chdir(tmp_path)
    for number, (changes, word) in enumerate(BAD):
        write_chain(script, f"{number}/demo.npz", **changes)
        demos = chain_store(script, number)
        try:
            script.read_demo(f"{number}/demo.npz", demos.args, *demos.spaces)
            raise AssertionError("it was read")
        except script.UserError as error:
            assert "demo.npz" in str(error) and word in str(error)
        try:
            demos.load_supplementary_demos()
        except script.UserError:
            raise AssertionError("it ended the run") from None
        assert f"{Path(str(number), 'demo.npz')}" in capsys.readouterr().err and not demos.reward_demos
    assert not Path("executed").exists()


def chain_store(script, folder):
    """A PPODBuffer for the Chain that watches a folder."""
    demos = store(script, supplementary_demos_dir=str(folder), env_id=CHAIN)
    demos.spaces = Chain.observation_space, TWO
    return demos


@catches(
    "make_demo_buffer, the flag is forgotten: if demos.reward_threshold is None and lowest > 0 -> if lowest > 0",
    "make_demo_buffer, demos of nothing set the threshold: is None and lowest > 0 -> is None",
    "make_demo_buffer, a person's demos may be dropped: replace(demo, human=human) -> demo",
    "make_demo_buffer, too much room: args.demo_capacity - len(demos.reward_demos) -> args.demo_capacity",
)
def test_initial_demos(script, tmp_path):
    """A person's demo of 5 and an agent's of 3, capacity 51: the threshold is 3 unless given, 49 value demos have room.
    Too many demos are refused. Demos without a positive return set no threshold."""
    envs = SimpleNamespace(single_observation_space=LINE, single_action_space=TWO)
    args = script.Args(env_id="none", initial_human_demos_dir=f"{tmp_path}/5", initial_agent_demos_dir=f"{tmp_path}/3")
    for total in (5, 3, 0, -150):
        script.save_demo(tmp_path / f"{total}/0.npz", make_demo(script, total=float(total)), args, TWO)
    for given, threshold in ((None, 3), (0.0, 0), (7.0, 7)):
        demos = script.make_demo_buffer(replace(args, initial_reward_threshold=given), envs)
        assert [(demo.total, demo.human) for demo in demos.reward_demos] == [(5, True), (3, False)]
        assert (demos.reward_threshold, demos.value_capacity) == (threshold, 49)
    with pytest.raises(script.UserError, match="2 demos exceed demo_capacity = 1"):
        script.make_demo_buffer(replace(args, demo_capacity=1), envs)
    for total in (0, -150):
        poor = script.Args(env_id="none", initial_agent_demos_dir=f"{tmp_path}/{total}")
        for given in (None, -200.0):
            buffer = script.make_demo_buffer(replace(poor, initial_reward_threshold=given), envs)
            assert buffer.reward_threshold == given


@catches(
    "PPODBuffer.load_supplementary_demos, taken again and again: if self.seen.get(path.name) == changed: -> if False:",
    "PPODBuffer.state_dict, values are lost: vars(demo) | demo -> vars(demo) | {'max_value': 0.0} | demo",
    "PPODBuffer.load_state_dict, demos stay tensors: demo.arrays(np.asarray) -> demo.arrays(torch.as_tensor)",
    "PPODBuffer.save_demos, never: or self.rollouts % self.args.save_demos_every == 0 -> or False",
    "PPODBuffer.save_demos, a person's are saved: if not demo.human -> if True",
    "PPODBuffer.save_demos, the worst: -demo.total -> demo.total",
    "PPODBuffer.save_demos, the lowest: -demo.max_value -> demo.max_value",
)
def test_supplementary_and_saved_demos(script, tmp_path, monkeypatch, capsys):
    """A file is taken once, also after a resume; one that was half written is looked at again when it has changed. The
    agent's two best are saved, and the two highest value demos; every second rollout, and at the end."""
    monkeypatch.chdir(tmp_path)
    counts, state = [], store(script).state_dict()
    write_chain(script, "new/a.npz")
    Path("new/b.npz").write_bytes(b"half")
    for step in range(4):
        if step == 2:
            write_chain(script, "new/b.npz")
            os.utime("new/b.npz", ns=(1, 1))
        demos = chain_store(script, "new")
        demos.load_state_dict(state)
        demos.load_supplementary_demos()
        counts.append(len(demos.reward_demos))
        state = demos.state_dict()
    assert counts == [1, 1, 2, 2] and capsys.readouterr().err.count("skipped") == 1
    reward = [make_demo(script, total=t) for t in (2.0, 4.0, 3.0)] + [make_demo(script, total=9.0, human=True)]
    value = [make_demo(script, total=0.0, max_value=v, length=n) for v, n in ((0.1, 3), (0.3, 5), (0.2, 4))]
    given = {"num_agent_demos_to_save": 2, "target_agent_demos_dir": "best", "save_demos_every": 2, "env_id": "none"}
    demos = store(script, reward, value, **given)
    saved = lambda name, what: [np.load(path)[what] for path in sorted(Path("best", name).glob("*.npz"))]
    demos.save_demos(is_finished=False)
    assert not Path("best").exists()
    demos.save_demos(is_finished=False)
    assert saved("reward", "episode_return") == [4, 3] and [len(r) for r in saved("value", "reward")] == [5, 4]
    demos.add_reward_demo(make_demo(script, total=10.0))
    demos.save_demos(is_finished=True)
    assert saved("reward", "episode_return") == [10, 4]
    again = store(script)
    again.load_state_dict(demos.state_dict())
    for old, new in zip(demos.reward_demos + demos.value_demos, again.reward_demos + again.value_demos, strict=True):
        assert all(np.array_equal(getattr(new, name), value) for name, value in vars(old).items())
        assert isinstance(new.obs, np.ndarray)


def test_the_committed_demos(script):
    """MountainCar pays 1 at the goal and nothing before. DoorKey's demo was recorded on the layout of seed 1: played
    there again, it shows the same and earns the same."""
    args = script.tuned(env_id="MountainCar-v0", num_envs=1)
    (demo,) = script.make_demo_buffer(args, script.make_envs(args, 1)).reward_demos
    assert demo.human and demo.terminated and demo.total == 1 and (demo.rewards[:-1] == 0).all()
    args = script.tuned(num_envs=1)
    envs = script.make_envs(args, 1)
    (demo,) = script.make_demo_buffer(args, envs).reward_demos
    close(demo.total, 1 - 0.9 * 47 / 2560)
    (obs, _), total = envs.reset(seed=1), 0
    for t, action in enumerate(demo.actions[:, 0]):
        assert (obs[0] == demo.obs[t]).all()
        obs, rewards, *_ = envs.step(np.array([action]))
        total += rewards[0]
    close(total, demo.total)


# ------------------------------------------------------------------------------------------------------- whole runs

RUN = "--env-id CartPole-v1 --num-envs 4 --num-steps 8 --num-minibatches 2 --gru-size 4 --chunk-length 8 "
RUN += "--update-epochs 1 --hidden-sizes 4 --rho 0.3 --phi 0.3 --demo-capacity 40 --normalize-obs --normalize-reward "
RUN += "--recurrent --total-timesteps 150 --checkpoint-every 40 --eval-every 90 --eval-episodes 2 "


@catches(
    "train, demos are not saved: optimizer=optimizer, demos=demos -> optimizer=optimizer",
    "PPODBuffer.restart, replays go on: self.episodes = [[] for _ in self.episodes] -> pass",
    "PPODBuffer.restart, environments are taken for used ones: self.needs_reset[:] = False -> pass",
    "make_demo_buffer, reads the folder again: return demos\n    for folder -> pass\n    for folder",
)
@pytest.mark.slow
def test_killed_resumed(script, tmp_path, monkeypatch):
    """With a demo and a GRU. Resumed, it needs no folder of demos. record.py makes demos of the agent's episodes."""
    obs = np.random.default_rng(0).normal(size=(31, 4)).astype(np.float32)
    demo = script.Demo(obs, np.ones((30, 1), int), np.ones(30, np.float32), False, 30.0)
    script.save_demo(tmp_path / "demos/0.npz", demo, script.Args(env_id="CartPole-v1"), TWO)
    kill_and_resume(script, f"{RUN} --initial-human-demos-dir {tmp_path}/demos", 5, monkeypatch, tmp_path)
    before, agent = content(script), script.load("run")
    Path("demos/0.npz").unlink()
    assert command(script, "--resume run --no-progress") == 0
    assert content(script) == before
    state = script.read_state("run/checkpoint.pt")["demos"]
    assert state["replayed_rows"] > 50 and sum(demo["human"] for demo in state["reward_demos"]) == 1
    limit = "--from-run run --max-episode-steps 5 --num-agent-demos-to-save 2 --initial-reward-threshold"
    assert record(script, monkeypatch, f"{limit} 5 --target-agent-demos-dir recorded") == 0
    assert record(script, monkeypatch, f"{limit} 6 --target-agent-demos-dir none") == 0 and not Path("none").exists()
    space = spaces.Box(-np.inf, np.inf, (4,))
    (demo, _) = [script.read_demo(path, agent.args, space, TWO) for path in sorted(Path("recorded").iterdir())]
    agent.begin_episodes(1)
    assert [int(agent.act(obs[None])[0]) for obs in demo.obs[:-1]] == demo.actions[:, 0].tolist()
    assert demo.total == 5 and not demo.terminated


def record(script, monkeypatch, flags):
    """What `python demos/record.py flags` does with this script; the exit code."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.syspath_prepend(DEMOS)
    module = importlib.import_module("record")
    monkeypatch.setattr(module, "load_script", lambda path: script)
    return command(SimpleNamespace(__name__="record", main=module.main), flags)


def test_record_by_keyboard(script, tmp_path, monkeypatch, capsys):
    """A person plays three episodes: the two good ones are saved, and can be loaded; the keys are shown."""
    import gymnasium.utils.play

    def play(env, keys_to_action, noop, wait_on_player):
        assert keys_to_action == {"0": 0, "1": 1} and wait_on_player and env.render_mode == "rgb_array"
        for wrong_at in (None, 3, None):
            env.reset()
            for at, right in enumerate(Chain.RIGHT):
                *_, terminated, _, _ = env.step(right ^ (at == wrong_at))
                assert env.render().shape == (64, 64, 3)
                if terminated:
                    break

    pytest.importorskip("pygame")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gymnasium.utils.play, "play", play)
    assert record(script, monkeypatch, f"--env-id {CHAIN} --target-agent-demos-dir mine") == 0
    out = capsys.readouterr().out
    assert "action 0" in out and "escape" in out and out.count("->") == 2 and len(list(Path("mine").iterdir())) == 2
    demo = script.read_demo(Path("mine/1.npz"), script.Args(env_id=CHAIN), Chain.observation_space, TWO)
    close(demo.obs, np.eye(13))
    close(demo.actions[:, 0], Chain.RIGHT)
    assert record(script, monkeypatch, "--env-id Pendulum-v1") == 2 and "Discrete" in capsys.readouterr().err


REFUSED = {
    "--env-id CartPole-v1 --num-steps 33 --recurrent": "chunks of 32",
    "--env-id CartPole-v1 --num-envs 1 --num-steps 32 --num-minibatches 2 --recurrent": "num_minibatches",
    "--env-id CartPole-v1 --num-steps 1": "num_steps",
    "--env-id CartPole-v1 --rho 0.6 --phi 0.4": "rho + phi",
    "--env-id CartPole-v1 --initial-human-demos-dir nowhere": "demos/record.py --env-id CartPole-v1",
    "--env-id CartPole-v1 --supplementary-demos-dir nowhere": "nowhere",
    "--env-id MiniGrid-Empty-5x5-v0 --normalize-obs": "normalize_obs",
    "--env-id CarRacing-v3": "ppo.py",
}


def test_refused(script, tmp_path, monkeypatch, capsys):
    """What the user can mend is one line that names it and exit code 2, and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    for flags, word in REFUSED.items():
        assert command(script, flags) == 2 and not list(tmp_path.iterdir())
        err = capsys.readouterr().err
        assert word in err and err.count("\n") == 1
