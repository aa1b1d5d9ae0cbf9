"""What ppod.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes above it in `catches`; "published" are those of the authors' code.
"""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import tools
import torch
from gymnasium import spaces
from reference.ppo import distributions, log_prob, textbook_loss
from run_folder import check_refused, command, content, kill_and_resume
from tools import Chance, Drift, Walk, catches, close, fails, flat, rehearse

LINE, TWO = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)


def planned(*numbers):
    """Stands for a generator: these numbers decide what a slot shows; of demos the likeliest or last is drawn."""
    draws = iter(numbers)

    def choice(options, p=(1,)):
        if isinstance(options, tuple):  # reward, value or environment
            return options[int(np.searchsorted(np.cumsum(p), next(draws), side="right"))]
        return int(np.argmax(p))

    return SimpleNamespace(integers=lambda n: n - 1, choice=choice)


def make_demo(script, length=3, total=1.0, **fields):
    """A Demo whose observations are 0, 1, 2, …, whose actions are 0, 1, 0, …; of its rewards only the last is not 0."""
    obs = np.arange(length + 1, dtype=np.float32)[:, None]
    rewards = np.append(np.zeros(length - 1), total).astype(np.float32)
    return script.Demo(obs, np.arange(length)[:, None] % 2, rewards, True, total, **fields)


def store(script, reward=(), value=(), slots=1, **given):
    """A PPODBuffer that holds these demos; rho is 0.1 and phi 0.3."""
    demos = script.PPODBuffer(script.Args(**given), slots, LINE, TWO)
    for demo in reward:
        demos.reward_demos.append(demo)
    for demo in value:
        demos.value_demos.append(demo)
    return demos


def play(script, demos, rewards, values, end, first=0, replayed=None):
    """Show the PPODBuffer a rollout: an episode or (end "") a part of it, whose observations are first, first + 1, …

    Behind an episode that is terminated (t) or cut off (c) comes its reset row, here with reward 99 and value 99.
    """
    steps, rows = len(rewards), len(rewards) + len(end)
    rollout = script.SequenceBuffer(rows, 1, LINE, TWO)
    rollout.obs[:, 0, 0] = first + np.arange(rows + 1)
    rollout.rewards[:, 0] = [*rewards, 99][:rows]
    rollout.reset_rows[steps:], rollout.demos[:steps] = True, replayed
    rollout.terminated[steps - 1], rollout.truncated[steps - 1] = end == "t", end == "c"
    rollout.old_values = torch.tensor([*values, 99, 99], dtype=torch.float64)[: rows + 1, None]
    demos.track_potential_demos(rollout)


# ------------------------------------------------------------------------------------------------- a lesson, by hand


@catches(
    "PPODBuffer.sample_demo, rho and phi exchanged: p=[self.rho, self.phi, -> p=[self.phi, self.rho,",
    'PPODBuffer.sample_demo, the share of an empty list goes to the other: if kind == "value" and -> if kind in '
    '("reward", "value") and',
    "PPODBuffer.sample_demo, value demos drawn uniformly: len(probabilities), p=probabilities -> len(probabilities)",
    "PPODBuffer.sample_demo, always the first reward demo: rng.integers(len(self.reward_demos)) -> 0",
    "PPODBuffer.restart, all slots may replay: np.arange(len(obs)) > 0 -> np.ones(len(obs), bool)",
    "PPODBuffer.restart, replays go on: self.episodes = [[] for _ in self.episodes] -> pass",
    "PPODBuffer.restart, environments are taken for used ones: self.replays = [None] * len(obs) -> self.replays[0] = "
    "None",
)
def test_what_comes_next(script):
    """rho 0.1, phi 0.3: a draw u < 0.1 is a reward demo, u < 0.4 a value demo, else the environment; so it is where the
    list is empty. Of reward demos here the last is drawn, of value demos the likeliest.

    After a checkpoint the first slot shows its new environment, whatever is drawn: there must be a step that counts.
    """
    other, reward, low, high = (make_demo(script, max_value=value) for value in (0, 0, 1, 3))
    for rewards, values, expected in (
        ([other, reward], [low, high], [reward, high, high, None, None]),
        ([reward], [], [reward, None, None, None, None]),
        ([], [high], [None, high, high, None, None]),
    ):
        demos, draws = store(script, rewards, values), planned(0.05, 0.1, 0.39, 0.4, 0.99)
        assert [demos.sample_demo(draws) for _ in expected] == expected
    demos = store(script, [reward], slots=3)
    demos.replays, demos.episodes = [reward] * 3, [[1], [], [2]]
    used = SimpleNamespace(reset=lambda options: (np.full((3, 1), 99.0), {}))  # nothing is to be reset
    assert demos.restart(used, np.full((3, 1), 7.0), planned(0.99, 0.05, 0.05)).ravel().tolist() == [7, 7, 0]
    assert demos.replays == [None, None, reward]
    assert demos.episodes == [[], [], []]


@catches(
    "replay_probabilities, the worst preferred: v = v - v.min() -> pass",
    "replay_probabilities, 0/0: v = np.ones_like(v) -> pass",
    "replay_probabilities, a power overflows: (v / v.max()) ** alpha -> v**alpha",
    "replay_probabilities, no alpha: ** alpha -> ** 1",
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the mistakes
def test_priorities(script):
    """Where a value is negative, all count from the lowest: the formula alone would prefer -3 to 1, 9/10 to 1/10."""
    for values, alpha, expected in (
        ([1, 2, 4], 1, [1 / 7, 2 / 7, 4 / 7]),
        ([1, 2, 4], 2, [1 / 21, 4 / 21, 16 / 21]),
        ([1, 2, 4], 0, [1 / 3] * 3),
        ([-3, -2, -1], 1, [0, 1 / 3, 2 / 3]),
        ([-3, 1], 2, [0, 1]),
        ([0, 0], 10, [0.5, 0.5]),  # and not 0/0
        ([1e30, 1e30], 100, [0.5, 0.5]),  # though no number is as large as the power
    ):
        close(script.replay_probabilities(values, alpha), expected)


def tell(script, demos, story):
    """Play episodes (return, steps, highest value); the rest of a line is what the lists, threshold and rho are then"""
    for total, steps, highest, *expected, rho in story:
        play(script, demos, [0] * (steps - 1) + [total], [highest] + [-1] * (steps - 1), "t")
        returns = [demo.total for demo in demos.reward_demos]
        assert [returns, [demo.max_value for demo in demos.value_demos], demos.reward_threshold] == expected
        close([demos.rho, demos.phi], [rho, 0.4 - rho])


@catches(
    "PPODBuffer.anneal_parameters, a share of what is left: self.args.phi / M, -> self.phi / M,",
    "PPODBuffer.anneal_parameters, the sum changes: self.phi = total - self.rho -> self.phi = self.args.phi - self.rho",
    "PPODBuffer.anneal_parameters, beyond the sum: / M, total) -> / M, 9)",
    "PPODBuffer.add_reward_demo, room is made first: self.anneal -> self.check_demo_buffer_capacity(); self.anneal",
    "PPODBuffer.check_demo_buffer_capacity, a person's demo dropped: if not demo.human -> if True",
    "PPODBuffer.check_demo_buffer_capacity, the shortest goes: max(droppable -> min(droppable",
    "PPODBuffer.check_demo_buffer_capacity, the oldest goes: demo: demo.max_value -> demo: 0",
    "PPODBuffer.check_demo_buffer_capacity, the highest value demo goes: min(self.value_demos -> max(self.value_demos",
    "PPODBuffer.add_reward_demo, published, one empties the list: self.reward_demos.append(demo) -> "
    "self.reward_demos = [demo]",
    "PPODBuffer.add_reward_demo, the threshold falls: if lowest > (self.reward_threshold or 0): -> if True:",
    "PPODBuffer.add_reward_demo, the threshold stays: self.reward_threshold = lowest -> pass",
    "PPODBuffer.consider, only worse ones join: demo.max_value > min -> demo.max_value < min",
    "PPODBuffer.consider, capacity forgotten: self.check_demo_buffer_capacity() -> pass",
    "is_good, an equal return does not do: threshold - 1e-6 -> threshold + 1e-6",
    "is_good, a little less is not forgiven: threshold - 1e-6 * max(1, abs(threshold)) -> threshold",
)
def test_the_lists(script):
    """Room for four, of which a person's demo takes one: it returned 5 in nine steps and is never dropped.

    Each new reward demo moves 0.3/3 from phi to rho, for at the start there was room for three value demos; or, by
    their current number, 0.3/3, then 0.3/2, then 0.3/1, but no more than is left. After that the list may be too long:
    the lowest value demo goes or, if there is none, the longest reward demo of the agent.
    """
    story = [  # return, steps, highest value; then returns of reward demos, values of value demos, threshold, rho
        (0, 3, 0.5, [5], [0.5], 1, 0.1),
        (0, 3, 0.2, [5], [0.5, 0.2], 1, 0.1),
        (0, 3, 0.9, [5], [0.5, 0.2, 0.9], 1, 0.1),
        (0, 3, 0.2, [5], [0.5, 0.2, 0.9], 1, 0.1),  # no better than the lowest
        (0, 3, 0.4, [5], [0.5, 0.9, 0.4], 1, 0.1),  # better: the lowest goes
        (2, 6, 0.0, [5, 2], [0.5, 0.9], 2, 0.2),  # the lowest return is the new threshold
        (1.5, 2, 0, [5, 2], [0.5, 0.9], 2, 0.2),  # does not reach it
        (2, 5, 0.0, [5, 2, 2], [0.9], 2, 0.3),
        (4, 4, 0.0, [5, 2, 2, 4], [], 2, 0.4),
        (3, 3, 0.0, [5, 2, 4, 3], [], 2, 0.4),  # the agent's longest goes: six steps,
        (3, 2, 0.0, [5, 4, 3, 3], [], 3, 0.4),  # then five
        (1.9, 1, 9, [5, 4, 3, 3], [], 3, 0.4),
    ]
    by_number = [0.1] * 5 + [0.2, 0.2, 0.35] + [0.4] * 4
    other = [(*line, rho) for (*line, _), rho in zip(story, by_number)]
    for anneal_by, lines in (("capacity", story), ("current", other)):
        given = {"demo_capacity": 4, "initial_reward_threshold": 1.0, "anneal_by": anneal_by}
        demos = store(script, [make_demo(script, 9, 5.0, human=True)], **given)
        demos.value_capacity = 3  # as make_demo_buffer would set it
        tell(script, demos, lines)
        demos.add_reward_demo(make_demo(script, 1, 0.5))  # as a supplementary demo may be
        assert demos.reward_threshold == 3
    total = float(np.float32(0.9)) - 1e-8  # a sum of float32 that is meant to be 0.9
    assert total < 0.9 and script.is_good(total, 0.9) and not script.is_good(total - 0.01, 0.9)
    assert script.is_good(-200.0, -200.0) and not script.is_good(-200.01, -200.0)


@catches(
    "is_good, any return does: total > 0 -> True",
    "is_good, 0 does: total > 0 -> total >= 0",
    "PPODBuffer.add_reward_demo, 0 sets the threshold: if lowest -> if self.reward_threshold is None or lowest",
    "PPODBuffer.add_reward_demo, never one: if lowest -> if self.reward_threshold is not None and lowest",
    "PPODBuffer.anneal_parameters, without value demos: if not self.value_demos: -> if False:",
)
def test_without_threshold_a_return_must_be_positive(script):
    """Room for five; two supplementary demos return 0 and -3. Until both are gone, any positive return will do.

    rho grows by 0.3/5 where there are value demos.
    """
    demos = store(script, demo_capacity=5)
    demos.add_reward_demo(make_demo(script, 9, 0.0))
    demos.add_reward_demo(make_demo(script, 8, -3.0))
    story = [
        (0, 1, 0.1, [0, -3], [0.1], None, 0.1),
        (-1, 1, 0.2, [0, -3], [0.1, 0.2], None, 0.1),
        (0.5, 3, 0, [0, -3, 0.5], [0.1, 0.2], None, 0.16),
        (0.25, 4, 0, [0, -3, 0.5, 0.25], [0.2], None, 0.22),
        (0.75, 2, 0, [0, -3, 0.5, 0.25, 0.75], [], None, 0.28),
        (0.75, 2, 0, [-3, 0.5, 0.25, 0.75, 0.75], [], None, 0.28),
        (1, 1, 0.0, [0.5, 0.25, 0.75, 0.75, 1], [], 0.25, 0.28),
        (0.2, 1, 0, [0.5, 0.25, 0.75, 0.75, 1], [], 0.25, 0.28),
    ]
    tell(script, demos, story)


@catches(
    "as_demo, a cut is a termination: bool(terminated and length == len(rewards)) -> True",
    "as_demo, cut, and terminated all the same: bool(terminated and length == len(rewards)) -> bool(terminated)",
    "as_demo, published, return of what is left: rewards.sum(dtype=np.float64) -> rewards[:length].sum()",
    "as_demo, last reward lost: [-1]) + 1 -> [-1])",
    "PPODBuffer.__init__, 0.0 is none: args.initial_reward_threshold -> args.initial_reward_threshold or None",
    "PPODBuffer.finish_episode, the last value: t, i], values.max() -> t, i], values[-1]",
    "PPODBuffer.finish_episode, the next episode inherits: self.episodes[i].clear() -> pass",
    "PPODBuffer.finish_episode, values go stale: demo.max_value = float(values.max()) -> pass",
    "PPODBuffer.finish_episode, replays are candidates: if demo is None: -> if True:",
    "PPODBuffer.track_potential_demos, reset rows stay: rows = rows[~buffer.reset_rows[rows, i]] -> pass",
    "PPODBuffer.track_potential_demos, cut where a rollout ends: parts.append( -> parts.clear(); parts.append(",
)
def test_what_an_episode_becomes(script):
    """Rewards 0 1 | 0 2 | 0 0 over three rollouts: what comes after the last positive one is cut off, so four steps are
    left, truncated; the return is 3 and the highest value 0.9. 0 1 -5: two are left, but the return is -4. 0 0 0: all
    is kept. The threshold is 0.0: 3 and 0 reach it, -4 and -1 become value demos.

    The first of these is replayed, and the critic says 0.6 at most: that is its value. A replay is no candidate.
    """
    demos = store(script, initial_reward_threshold=0.0)
    play(script, demos, [0, 1, -5], [0.1, 0.2, 0.3], "t")
    play(script, demos, [0, 0, 0], [-1, -2, -3], "c", first=100)
    play(script, demos, [0, 1], [0.2, 0.9], "", first=200)
    play(script, demos, [0, 2], [0.4, 0.3], "", first=202)
    play(script, demos, [0, 0], [0.1, 0.05], "t", first=204)
    play(script, demos, [0, 3], [0, 0], "t")
    play(script, demos, [-1], [0.5], "t")
    assert (len(demos.reward_demos), len(demos.value_demos)) == (3, 2)
    (nothing, cut, whole), (negative, minus_one) = demos.reward_demos, demos.value_demos
    for demo, length, first, *expected in (
        (negative, 2, 0, -4, False, 0.3),
        (nothing, 3, 100, 0, False, -1),
        (cut, 4, 200, 3, False, 0.9),
        (whole, 2, 0, 3, True, 0),
        (minus_one, 1, 0, -1, True, 0.5),
    ):
        assert len(demo.rewards) == length and [demo.total, demo.terminated, demo.max_value] == expected
        assert demo.obs.ravel().tolist() == list(range(first, first + length + 1))
    play(script, demos, [0, 0, 5], [0.2, 0.6, 0.3], "t", replayed=negative)
    assert (negative.max_value, minus_one.max_value) == (0.6, 0.5)
    assert (len(demos.reward_demos), len(demos.value_demos)) == (3, 2)


@catches(
    "PPODBuffer.draw_next, writes into the caller's observations: next_obs = next_obs.copy() -> pass",
    "PPODBuffer.insert_replays, the agent's actions: buffer.actions[t, i] = demo.actions[at] -> pass",
    "SequenceBuffer.add_log_probs_and_values, in doubt: log_probs[self.replayed] = agent.demo_log_prob() -> pass",
    "SequenceBuffer.compute_advantages, ends exchanged: terminated, truncated\n -> truncated, terminated\n",
    "SequenceBuffer.compute_advantages, gamma for lambda: args.gamma, args.gae_lambda -> args.gamma, args.gamma",
    "RecurrentAgent.demo_log_prob, density 1: if not self.continuous -> if True",
    "RecurrentAgent.demo_log_prob, of a unit Gaussian: self.log_std + 0.5 -> 0 * self.log_std + 0.5",
)
def test_replayed_rows(script):
    """A demo of three steps, rewards 0 0 1, terminated; V(s) = (s + 1) / 10, so 0.1 0.2 0.3; gamma = 1/2, lambda = 1.

    delta = (0 + 0.2/2 - 0.1, 0 + 0.3/2 - 0.2, 1 - 0.3) = (0, -0.05, 0.7); A_2 = 0.7, A_1 = -0.05 + 0.7/2 = 0.3,
    A_0 = 0.3/2 = 0.15. Log-probs are 0, so that the ratio is pi itself. Row 0 is the reset row before: there the agent
    itself played 0, of probability 0.3. At its mean, a Gaussian of deviations 2 and 1 has density 1 / (2 pi * 2 * 1).
    """
    agent = script.RecurrentAgent(LINE, TWO, script.Args(recurrent=False, hidden_sizes=()))
    agent.critic.weight.data[:], agent.critic.bias.data[:] = 0.1, 0.1
    agent.actor.weight.data[:], agent.actor.bias.data[:] = 0, torch.tensor([0.3, 0.7]).log()
    demos, rollout = store(script, [make_demo(script)]), script.SequenceBuffer(4, 1, LINE, TWO)
    seen = np.full((1, 1), 7.0)
    rollout.rewards[:], rollout.reset_rows[0], rollout.truncated[:] = 7, True, True  # as the environment behind it did
    for t in range(4):
        rollout.obs[t + 1] = demos.insert_replays(None, rollout, t, seen, planned(0.05))
    rollout.add_log_probs_and_values(agent)
    rollout.compute_advantages(script.Args(gamma=0.5, gae_lambda=1.0))
    close(rollout.old_log_probs[:, 0], [math.log(0.3), 0, 0, 0])
    close(rollout.advantages[1:, 0], [0.15, 0.3, 0.7])
    assert rollout.actions[1:, 0, 0].tolist() == [0, 1, 0] and rollout.terminated[:, 0].tolist() == [0, 0, 0, 1]
    assert rollout.obs.ravel().tolist() == [0, 0, 1, 2, 3] and seen == 7 and not rollout.truncated.any()
    agent = script.RecurrentAgent(LINE, spaces.Box(-9, 9, (2,)), script.Args())
    agent.log_std.data = torch.tensor([2.0, 1.0]).log()
    close(agent.demo_log_prob(), -math.log(4 * math.pi))


@catches(
    "RecurrentAgent.features, the state goes on over a reset row: state = state * ~reset_rows[t, :, None] -> pass",
    "RecurrentAgent.features, state zero in every row: state * ~reset_rows[t, :, None] -> 0 * state",
    "RecurrentAgent.features, too early: features.append(state -> features.append(state * ~reset_rows[t, :, None]",
    "RecurrentAgent.features, one reset row for all: ~reset_rows[t, :, None] -> ~reset_rows[t].any()",
    "RecurrentAgent.features, steps and slots exchanged: reset_rows.shape) -> reset_rows.T.shape).transpose(0, 1)",
    "SequenceBuffer.add_log_probs_and_values, states after each row: torch.cat([self.state[None], states[:-1]]) -> "
    "states",
    "SequenceBuffer.add_log_probs_and_values, last value without memory: states[-1] -> 0 * states[-1]",
    "SequenceBuffer.chunks, time and slots mixed up: movedim(0, 2).flatten(1, 2) -> movedim(0, 1).flatten(1, 2)",
    "SequenceBuffer.minibatches, all in each: field[:, part] -> field",
    "SequenceBuffer.minibatches, only reset rows: if not batch.reset_rows.all() -> if True",
)
def test_recurrent_states(script):
    """A GRU that only adds. Slot 0: 1 2 4 8 16 from the state 32 give 33, 35, 39; row 2 is a reset row, so then 8, 24.

    Slot 1: 100 200 400 800 1600 from the state 0, row 0 is a reset row: 100, then 200, 600, 1400, 3000.
    Chunks of two steps, 1 2 | 4 8 | 100 200 | 400 800, begin with the states 32, 35, 0, 200. In the order 2 0 3 1, in
    two minibatches: 100 1, then 200 2; and 400 4, then 800 8. What only resets is left out.
    """
    agent = script.RecurrentAgent(LINE, TWO, script.Args(gru_size=1))
    agent.trunk_output, agent.gru.forward = lambda obs: obs, lambda x, state: x + state
    rollout = script.SequenceBuffer(4, 2, LINE, TWO)
    rollout.obs[:, :, 0] = np.transpose([[1, 2, 4, 8, 16], [100, 200, 400, 800, 1600]])
    rollout.reset_rows[2, 0], rollout.reset_rows[0, 1], rollout.state = True, True, torch.tensor([[32.0], [0]])
    features, states = agent.features(*map(torch.as_tensor, (rollout.obs[:-1], rollout.reset_rows, rollout.state)))
    close(features[..., 0], [[33, 100], [35, 200], [39, 600], [8, 1400]])
    close(states[..., 0], [[33, 0], [35, 200], [0, 600], [8, 1400]])
    rollout.add_log_probs_and_values(agent)
    close(rollout.states[..., 0], [[32, 0], [33, 0], [35, 200], [0, 600]])
    close(rollout.old_values, agent.critic(torch.cat([features, torch.tensor([[[24.0], [3000.0]]])]))[..., 0])
    rollout.compute_advantages(script.Args())
    close(rollout.chunks(rollout.states, 2)[0].ravel(), [32, 35, 0, 200])
    order = SimpleNamespace(permutation=lambda chunks: np.array([2, 0, 3, 1]))
    one, two = rollout.minibatches(2, 2, order)
    close(torch.stack([one.obs, two.obs])[..., 0], [[[100, 1], [200, 2]], [[400, 4], [800, 8]]])
    for name in one._fields:
        batches = torch.stack([getattr(one, name), getattr(two, name)])
        expected = torch.as_tensor(getattr(rollout, name)[:4]).reshape(2, 2, 2, -1)[:, :, [1, 0]]
        close(batches, expected.view_as(batches))
    rollout.reset_rows[:2] = True
    assert len(list(rollout.minibatches(2, 2, order))) == 1


@catches("GridCNN.forward, rows and columns exchanged: movedim(3, 1) -> movedim(3, 1).transpose(2, 3)")
def test_what_the_trunk_sees(script):
    """A grid of 4 x 3 places with two channels, numbered 0 to 23. Feature 0 is channel 1 in the upper right corner of a
    patch: of the two patches 5 and 11. Feature 1 is minus that, so 0. Of vectors, mean 2 and deviation 2: 6 is 2."""
    agent = script.RecurrentAgent(spaces.Box(0, 99, (4, 3, 2), np.uint8), TWO, script.Args(hidden_sizes=()))
    agent.cnn.conv.weight.data.zero_()
    agent.cnn.conv.weight.data[:2, 1, 0, 2] = torch.tensor([1, -1])
    close(agent.trunk_output(torch.arange(24).view(1, 4, 3, 2))[0, :4], [5, 11, 0, 0])
    agent = script.RecurrentAgent(LINE, TWO, script.Args(hidden_sizes=(), normalize_obs=True))
    agent.obs_stats.update(np.array([[0.0], [4.0]]))
    close(agent.trunk_output(torch.tensor([[6.0]])), [[2]])
    with pytest.raises(script.UserError, match="no 3 x 3 patch"):
        script.RecurrentAgent(spaces.Box(0, 99, (2, 3, 2), np.uint8), TWO, script.Args())


@catches(
    "RecurrentAgent.act, remembers nothing: actions, self.state = -> actions, _ =",
    "RecurrentAgent.act, noise unasked: if self.args.sample_actions else 0 -> ",
    "RecurrentAgent.act, likeliest only: if self.args.sample_actions -> if False",
    "RecurrentAgent.begin_episodes, remembers the last episode: self.state = -> "
    "if episodes != len(vars(self).get('state', ())): self.state =",
    "RecurrentAgent.begin_episodes, other draws in each evaluation: default_rng(self.args.seed) -> default_rng()",
    "RecurrentAgent.draw_noise, normal where Gumbel is due: if self.continuous else rng.gumbel -> ",
)
def test_evaluations(script):
    """`act` remembers within an episode (a GRU that adds 1, 2, 4 gives 1, 3, 7) and forgets the last one.

    Logits (ln 3, 0) and (0, 0, 99): --sample-actions takes the first in 3 of 4 steps, independently, the same in each
    evaluation; else it is the first always (4.6 sigma: 0.02). The third of the others it is in any case.
    """
    agent = script.RecurrentAgent(LINE, spaces.Box(-np.inf, np.inf, (1,)), script.Args(gru_size=1))
    agent.trunk_output, agent.gru.forward = lambda obs: obs, lambda x, state: x + state
    agent.actor.weight.data[:] = 1
    for _ in range(2):
        agent.begin_episodes(2)
        close([agent.act(np.full((2, 1), x))[1] for x in (1, 2, 4)], [[1], [3], [7]])
    close(agent.act(np.full((1, 1), 8)), [[8]])  # another number of slots: these must be new episodes
    noise = agent.draw_noise(np.random.default_rng(0), 100, 100)
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05
    for sample_actions in (False, True):
        args = script.Args(recurrent=False, hidden_sizes=(), sample_actions=sample_actions)
        agent = script.RecurrentAgent(LINE, spaces.MultiDiscrete([2, 3]), args)
        agent.actor.bias.data = torch.tensor([math.log(3), 0, 0, 0, 99])
        agent.begin_episodes(10_000)
        one, two = [agent.act(np.zeros((10_000, 1), np.float32)).T for _ in range(2)]
        agent.begin_episodes(10_000)
        close(agent.act(np.zeros((10_000, 1), np.float32)).T, one)
        assert abs((one[0] == 0).mean() - (0.75 if sample_actions else 1)) < 0.02
        assert abs((one[0] == two[0]).mean() - (0.75**2 + 0.25**2 if sample_actions else 1)) < 0.02
        assert (one[1] == 2).all()


# ----------------------------------------------------------------------------------------- whole rollouts, row by row


def train_with(script, demos, *makers, **given):
    """(Run, the calls of its loss): three slots, of which each replays one of these demos half of the time."""

    def with_demos(args, envs):
        buffer = script.PPODBuffer(args, args.num_envs, envs.single_observation_space, envs.single_action_space)
        for demo in demos:
            buffer.reward_demos.append(demo)
        return buffer

    small = {"num_envs": 3, "num_steps": 8, "chunk_length": 4, "num_minibatches": 1, "update_epochs": 1, "gru_size": 3}
    small |= {"anneal_lr": True, "normalize_obs": False, "normalize_reward": False, "ent_coef": 0.01}
    small |= {"hidden_sizes": (4,), "rho": 0.5, "phi": 0.0, "initial_reward_threshold": 1e9, "demo_capacity": 10**6}
    patch = mock.patch.object(script, "make_demo_buffer", with_demos)
    with patch, tools.watched(script, "sequence_loss", "SequenceBuffer") as calls:
        return rehearse(script, *makers, **small | given), calls


@catches(
    "PPODBuffer.draw_next, the environment is seen in mid-episode: to_reset.any() -> False",
    "PPODBuffer.draw_next, the environment before the demo: next_obs[i] = demo.obs[0] -> pass",
    "PPODBuffer.draw_next, a demo goes on where it was: self.position[i] = 0 -> self.position[i] %= 2",
    "PPODBuffer.draw_next, the old observation of what was reset: next_obs[to_reset] = first_obs[to_reset] -> pass",
    "PPODBuffer.insert_replays, every demo ends terminated: is_last and demo.terminated -> is_last",
    "PPODBuffer.insert_replays, none ends terminated: = is_last and demo.terminated -> = demo.terminated = False",
    "PPODBuffer.insert_replays, a reward in a reset row: buffer.rewards[t, reset_rows] = 0 -> pass",
    "PPODBuffer.insert_replays, an end in a reset row: buffer.terminated[t, reset_rows] = False -> pass",
    "PPODBuffer.insert_replays, replays are not counted: self.replayed_rows += 1 -> pass",
    "train, replays counted: reset_rows | buffer.demos[t].astype(bool) -> reset_rows",
    "train, returns of replays counted: reset_rows & ~uncounted, uncounted -> reset_rows, uncounted",
    "train, no replay at first: obs = demo_buffer.restart(envs, obs, rng) -> pass",
    "train, what a step led to is not stored: buffer.obs[t + 1] = obs -> pass",
)
def test_replays(script):
    """Every row of some twenty rollouts is what it should be: a slot shows, over and over, all of an episode or of a
    demo, from its first observation to its last, then one reset row that holds the final observation. The environment
    of a replaying slot is not seen; afterwards it begins a new episode. Tracked episodes, returns and steps are those
    of the environments alone. A demo shows (-1, length, step), pays -1, -2, … and consists of actions 1.
    """
    plans = [[(3, "t"), (2, "c")], [(1, "c"), (4, "b")], [(6, "t")]]
    replays, demos = {1: (2, "t"), 2: (5, "c")}, []  # length and end of the demos, by their number
    for length, end in replays.values():
        obs = np.array([[-1, length, t] for t in range(length + 1)], np.float32)
        rewards = -np.arange(1, length + 1, dtype=np.float32)
        demos.append(script.Demo(obs, np.ones((length, 1), int), rewards, end == "t", float(rewards.sum())))
    run, calls = train_with(script, demos, *[lambda i=i: Walk(plans[i], i) for i in range(3)], total_timesteps=110)
    assert calls[0].buffer.demos[0].any()  # slots draw before their first row
    rows = lambda name: np.concatenate([getattr(call.buffer, name)[:8] for call in calls])
    columns = [rows(name) for name in "obs rewards terminated truncated reset_rows".split()]
    lengths = [None, *(length for length, _ in replays.values())]
    demo_ids = np.vectorize(lambda demo: lengths.index(demo and len(demo.rewards)))(rows("demos"))
    columns.append(demo_ids)
    finished, totals = [], []
    for i in range(3):
        slot, expected = list(zip(*[column[:, i].tolist() for column in columns])), []
        while len(expected) < len(slot):
            (name, number, _), *_, demo = slot[len(expected)]
            assert name == (-1 if demo else i)
            length, end = replays[demo] if demo else plans[i][int(number) % len(plans[i])]
            rewards = [-k if demo else 10 * number + k for k in range(1, length + 1)]
            for k, reward in enumerate(rewards):
                ends = [k + 1 == length and end in kinds for kinds in ("tb", "cb")]
                expected.append(([name, number, k], reward, *ends, False, demo))
            if len(expected) <= len(slot) and not demo:
                finished.append((i, number, length))
                totals.append(sum(rewards))
            expected.append(([name, number, length], 0, False, False, True, 0))
        assert slot == expected[: len(slot)]
    reset_rows = rows("reset_rows")
    real_rows, replayed = (~reset_rows & (demo_ids == 0)).sum(), (demo_ids > 0).sum()
    assert (rows("actions")[demo_ids > 0] == 1).all()
    assert all((call.buffer.obs[-1] == after.buffer.obs[0]).all() for call, after in zip(calls, calls[1:]))
    buffer = run.parts["demos"]
    assert (run.step, buffer.replayed_rows) == (real_rows, replayed) and replayed > 40 and real_rows > 40
    assert run.all_logged["training_rows"][-1] == real_rows + replayed
    assert sorted(run.episodes["return"]) == sorted(totals)
    assert sorted((*demo.obs[0, :2], len(demo.rewards)) for demo in buffer.value_demos) == sorted(finished)
    for demo in buffer.value_demos:
        assert demo.obs[:, 2].tolist() == list(range(len(demo.rewards) + 1))


@torch.no_grad()
def check_rollout(script, agent, buffer, noise, args):
    """Actions, log-probs, states, values and advantages of a rollout that `agent` played; its GRU's states after it."""
    reset_rows = torch.tensor(np.append(buffer.reset_rows, [[False] * 3], 0))
    replayed, actions = torch.tensor(buffer.demos.astype(bool)), torch.tensor(buffer.actions)
    features, states = agent.features(torch.tensor(buffer.obs), reset_rows, buffer.state)
    output, values = agent.actor(features[:-1]), agent.critic(features)[..., 0]
    drawn = output + agent.log_std.exp() * noise if agent.continuous else (output + noise).argmax(2, keepdim=True)
    close(actions[~replayed], drawn[~replayed], atol=1e-3)
    log_probs = log_prob(distributions(agent, output), actions)
    certain = log_prob(distributions(agent, 0 * output), 0 * output) if agent.continuous else 0 * log_probs
    close(buffer.old_log_probs, torch.where(replayed, certain, log_probs), atol=1e-3)
    close(buffer.states, torch.cat([buffer.state[None], states[:-2]]), atol=1e-3)
    close(buffer.old_values, values, atol=1e-3)
    steps = [torch.tensor(x) for x in (buffer.rewards, buffer.terminated, buffer.truncated)]
    expected = script.compute_gae(steps[0], values[:-1], values[1:], *steps[1:], args.gamma, args.gae_lambda)
    close(torch.stack([buffer.advantages, buffer.returns]), torch.stack(expected), atol=1e-3)
    return states[-2]


BOXES = {"anneal_lr": False, "norm_adv": False, "clip_vloss": True, "clip_vloss_coef": 0.01, "clip_reward": True}
BOXES |= {"update_epochs": 4, "target_kl": 1e-12}  # two epochs of four: in the first one nothing has moved
TRAININGS = [
    (Chance, {"update_epochs": 2, "num_minibatches": 2, "target_kl": 1e9}),
    (Drift, BOXES),
    (Chance, {"recurrent": False, "normalize_obs": True, "normalize_reward": True, "num_minibatches": 3}),
]


@catches(
    "train, the GRU's state is lost between rollouts: buffer.state = state -> buffer.state = 0 * state",
    "train, the GRU forgets in acting: sample(obs, reset_rows, state, -> sample(obs, reset_rows, 0 * state,",
    "train, the GRU never forgets: sample(obs, reset_rows, state, -> sample(obs, reset_rows & False, state,",
    "train, one draw for all steps: noise[t] -> noise[0]",
    "train, observations change places: buffer.obs[t + 1] = obs -> buffer.obs[t + 1] = obs[[2, 0, 1]]",
    "train, gradients add up: optimizer.zero_grad() -> pass",
    "train, gradients as long as they are: args.max_grad_norm -> 1e9",
    "train, the learning rate stays: if args.anneal_lr else -> if False else",
    "train, the learning rate falls: if args.anneal_lr else -> if True else",
    "train, reset rows in the statistics: [~buffer.reset_rows]) -> .reshape(-1, 2))",
    "train, only one epoch: range(args.update_epochs) -> range(1)",
    "train, demos keep scaled rewards: demo_buffer.track -> buffer.scale_rewards(agent.return_stats, args); "
    "demo_buffer.track",
    "RecurrentAgent.sample, deviation 1: self.log_std.exp() * noise -> noise",
    "RecurrentAgent.sample, no noise: (output + noise).split -> output.split",
    "RecurrentAgent.sample, the least likely: logits.argmax(1) -> logits.argmin(1)",
    "RecurrentAgent.sample, the state before: actions.cpu().numpy(), states[0] -> actions.cpu().numpy(), state",
    "train, the limit of the KL divergence is forgotten: > args.target_kl -> > 1e9",
    "SequenceBuffer.scale_rewards, signs learnt unasked: if args.clip_reward: -> if True:",
    "SequenceBuffer.scale_rewards, signs not learnt: if args.clip_reward: -> if False:",
    "SequenceBuffer.scale_rewards, as they are: if not args.normalize_reward: -> if True:",
    "SequenceBuffer.compute_advantages, from the state itself: values[1:], terminated -> values[:-1], terminated",
    "SequenceBuffer.add_log_probs_and_values, nobody is certain: self.demos.astype(bool) -> "
    "np.zeros_like(self.reset_rows)",
    "sequence_loss, state of the last step of a chunk: batch.states[0] -> batch.states[-1]",
    "sequence_loss, reset rows learnt: trained = ~batch.reset_rows -> trained = batch.reset_rows | True",
    "sequence_loss, reset rows in the mean: normalize(advantages) -> normalize(batch.advantages)[trained]",
    "sequence_loss, replays in the figures: [~batch.replayed[trained]] -> ",
    "sequence_loss, entropy of reset rows: entropies[trained].mean() -> entropies.mean()",
    "sequence_loss, entropy punished: - args.ent_coef * entropy -> + args.ent_coef * entropy",
    "sequence_loss, always normalised: if args.norm_adv: -> if True:",
    "sequence_loss, never clipped: if args.clip_vloss else None -> if False else None",
    "sequence_loss, mean of nothing: if len(played) > 0: -> if True:",
)
def test_training(script):
    """Some rollouts in three slots, of which some replay, with several options, against the slow versions."""
    for maker, options in TRAININGS:
        rng, noises, drawn = np.random.default_rng(0), [], script.RecurrentAgent.draw_noise
        actions = rng.integers(2, size=(5, 1)) if maker is Chance else rng.random((5, 2), np.float32)
        demo = script.Demo(rng.normal(0, 3, (6, 2)).astype(np.float32), actions, np.ones(5, np.float32), False, 5.0)
        note = lambda *given: noises.append(drawn(*given)) or noises[-1]
        given = {"learning_rate": 0.05, "max_grad_norm": 0.2, "total_timesteps": 24, "gamma": 0.9}
        given |= {"rho": 0.4, "phi": 0.2}
        with mock.patch.object(script.RecurrentAgent, "draw_noise", note):
            run, calls = train_with(script, [demo], maker, **given | options)
        args, step, seen, state, agent = run.args, 0, [], 0 * calls[0].buffer.state, copy.deepcopy(calls[0].agent)
        epochs = 2 if maker is Drift else args.update_epochs
        assert len(calls) == epochs * args.num_minibatches * len(noises) and len(noises) >= 2
        optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
        logged = {name: iter(values) for name, values in run.all_logged.items()}
        for number, (call, after) in enumerate(zip(calls, [*calls[1:], run])):
            rollout, update = divmod(number, len(calls) // len(noises))
            if update == 0:
                close(call.buffer.state, state, atol=1e-3)
                if args.normalize_obs and seen:
                    close(call.agent.obs_stats.mean, np.concatenate(seen).mean(0))
                    agent.obs_stats.load_state_dict(call.agent.obs_stats.state_dict())
                state = check_rollout(script, call.agent, call.buffer, noises[rollout], args)
                optimizer.param_groups[0]["lr"] = 5e-2 * (1 - step / 24 if args.anneal_lr else 1)
                close(run.all_logged["learning_rate"][rollout], optimizer.param_groups[0]["lr"])
                seen.append(call.buffer.obs[:-1][~call.buffer.reset_rows])
                step += (~call.buffer.reset_rows & ~call.buffer.demos.astype(bool)).sum()
            played = ~call.batch.reset_rows
            features, _ = agent.features(call.batch.obs, call.batch.reset_rows, call.batch.states[0])
            pi, values = distributions(agent, agent.actor(features)[played]), agent.critic(features)[played][:, 0]
            rows = script.Sequences(*[field[played] for field in call.batch])
            loss, figures = textbook_loss(pi, values, rows, args, args.norm_adv, ~rows.replayed)
            if rows.replayed.all():  # what the policy has not played says nothing about its moves
                figures = {name: x for name, x in figures.items() if name not in ("approx_kl", "clip_fraction")}
            close([next(logged[name]) for name in figures], [x.item() for x in figures.values()], atol=2e-3)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.2)
            optimizer.step()
            close(flat(after.agent), flat(agent), atol=2e-3)
        assert run.step == step and max(run.all_logged["approx_kl"]) > 0
        if args.normalize_reward:
            close(run.agent.return_stats.count, sum(map(len, seen)))
        assert (max(abs(calls[0].buffer.rewards).ravel()) == 1) == args.clip_reward
        assert max(abs(demo.rewards).max() for demo in run.parts["demos"].value_demos) > 1  # as they were
        others = "learning_rate explained_variance training_rows".split()
        assert set(run.all_logged) == {*others, *figures, *"reward_demos value_demos rho phi reward_threshold".split()}
    batch = calls[0].batch._replace(replayed=torch.ones_like(calls[0].batch.replayed))
    _, figures = script.sequence_loss(agent, batch, args)  # of nothing but replays
    assert "approx_kl" not in figures and "clip_fraction" not in figures and figures["loss"].isfinite()


class Chain(gym.Env):
    """Pays 1 after 12 right choices out of two and nothing before; a wrong one ends the episode. Which choice is right
    differs from place to place, so that chance finds the end once in 2^12 times."""

    RIGHT = [0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0]
    action_space, observation_space = TWO, spaces.Box(0, 1, (13,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return np.eye(13, dtype=np.float32)[0], {}

    def step(self, action):
        wrong = action != self.RIGHT[self.at]
        self.at += not wrong
        solved = self.at == 12
        return np.eye(13, dtype=np.float32)[self.at], float(solved), solved or wrong, False, {}


@pytest.mark.slow
def test_a_chain_is_solved_from_one_demo(script, tmp_path):
    """2 ** -12 is the chance of a random policy; one demo shows the way. Without replays of it nothing is learnt, and
    no failure, whose return is 0, becomes a reward demo.
    """
    rewards = np.append(np.zeros(11), 1).astype(np.float32)
    demo = script.Demo(np.eye(13, dtype=np.float32), np.array(Chain.RIGHT)[:, None], rewards, True, 1.0)
    script.save_demo(tmp_path / "demo.npz", demo, script.Args(env_id="none"), TWO)
    given = {"num_envs": 8, "num_steps": 64, "learning_rate": 3e-3, "anneal_lr": False, "hidden_sizes": (32,)}
    given |= {"num_minibatches": 4, "update_epochs": 4, "ent_coef": 0.01, "recurrent": False, "total_timesteps": 500}
    with_demo = given | {"initial_human_demos_dir": str(tmp_path), "phi": 0.0, "rho": 0.0}
    run = rehearse(script, Chain, **with_demo)
    assert run.evaluations["return_mean"] == [0] and len(run.parts["demos"].reward_demos) == 1
    run = rehearse(script, Chain, **with_demo | {"rho": 0.3, "total_timesteps": 3000})
    (human,) = [demo for demo in run.parts["demos"].reward_demos if demo.human]
    assert run.evaluations["return_mean"] == [1] and human.total == 1 and len(run.parts["demos"].reward_demos) > 1
    demos = rehearse(script, Chain, **given, phi=0.3, rho=0.0, demo_capacity=20).parts["demos"]
    assert (len(demos.reward_demos), len(demos.value_demos)) == (0, 20) and demos.replayed_rows > 0


# ----------------------------------------------------------------------------------------------- files and whole runs

ACTIONS = [  # space, actions as the agent has them, as the environment takes them
    (spaces.Discrete(4, start=5), [[0], [3]], [5, 8]),
    (spaces.Box(-0.5, 0.25, (2,), np.float64), [[-2, 0.5], [1, 0]], [[-0.5, 0.0625], [0.25, -0.125]]),
    (spaces.Box(-3, 9, (2,), np.int64), [[0.95, -2], [-0.45, -0.4]], [[9, -3], [0, 1]]),
    (spaces.MultiDiscrete([[2], [3]]), [[1, 2], [0, 1]], [[[1], [2]], [[0], [1]]]),
    (spaces.MultiBinary((2, 2)), [[1, 0, 1, 1], [0, 0, 0, 1]], [[[1, 0], [1, 1]], [[0, 0], [0, 1]]]),
]


@catches(
    "to_env, truncates: np.rint(actions) -> actions",
    "to_env, bounds forgotten: np.clip(actions, space.low, space.high) -> actions",
    "to_env, not stretched: (scale * actions + bias) -> (actions)",
    'to_env, start forgotten: getattr(space, "start", 0) -> 0',
    'from_env, start forgotten: getattr(space, "start", 0) -> 0',
    "from_env, any action will do: if not all(action in space for action in actions) -> if False",
    "save_demo, the cut is forgotten: demo.obs[:-1] -> demo.obs[1:]",
    "save_demo, the return of what is left: demo.total} -> demo.rewards.sum()}",
    "read_demo, human for all: rewards, bool(file -> rewards, True or bool(file",
)
def test_a_demo_comes_back_from_its_file(script, tmp_path):
    """With actions of every kind, the cut and the whole return, however the JSON of env_kwargs is written."""
    view, path = spaces.Box(0, 255, (2, 2, 3), np.uint8), tmp_path / "sub/demo.npz"
    obs = np.random.default_rng(1).integers(0, 4, (5, 2, 2, 3)).astype(np.uint8)
    args = script.Args(env_id="Nothing-v0", env_kwargs='{"size": 3, "a": 1}', wrappers=("some.Wrapper",))
    for space, own, expected in ACTIONS:
        demo = script.as_demo(obs, np.array(own * 2), np.array([0, 2, -5, 0], np.float32), True)
        script.save_demo(path, demo, args, space)
        with np.load(path, allow_pickle=False) as file:
            assert file["observation"].shape == (2, 2, 2, 3) and file["truncated"] and not file["terminated"]
            assert file["action"].dtype == space.dtype and file["action"].tolist() == expected
            for wrong in (file["action"] + 100, file["action"] + 0.5, file["action"] - 100):
                with fails(f"an action is not in {space}"):
                    script.from_env(wrong, space)
        loaded = script.read_demo(path, replace(args, env_kwargs='{"a":1, "size":3}'), view, space)
        close(loaded.obs, obs[:3])
        close(loaded.rewards, [0, 2])
        close(script.to_env(loaded.actions, space), expected)
        is_box = isinstance(space, spaces.Box)
        assert is_box or loaded.actions.tolist() == own
        assert loaded.actions.dtype == (np.float32 if is_box else np.int64) and loaded.obs.dtype == np.uint8
        assert (loaded.terminated, loaded.total, loaded.human) == (False, -3, False)


def write(script, path, **changes):
    """Save a demo in a file, of which `changes` replace or (None) remove fields."""
    script.save_demo(Path(path), make_demo(script), script.Args(env_id="none"), TWO)
    fields = {name: value for name, value in (dict(np.load(path)) | changes).items() if value is not None}
    np.savez(path, **fields)


BAD = [  # fields of a file, and a word of what is said of it
    ({"env_id": '"CartPole-v1"'}, "CartPole-v1"),
    ({"env_kwargs": '{"length": 3}'}, "env_kwargs"),
    ({"wrappers": '["some.Wrapper"]'}, "wrappers"),
    ({"observation": np.zeros((3, 7)), "final_observation": np.zeros(7)}, "(4, 7)"),
    ({"action": np.zeros(2, int)}, "(2, 1)"),
    ({"action": np.full(3, 0.5)}, "action"),
    ({"reward": np.full(3, np.nan)}, "NaN"),
    ({"reward": np.zeros(0), "action": np.zeros(0, int), "observation": np.zeros((0, 1))}, "(1, 1)"),
    ({"reward": np.array([None], object)}, "allow_pickle"),  # what is pickled may execute anything
    ({"reward": None, "junk": np.zeros(3)}, "reward"),
]


@catches(
    "read_demo, executes: allow_pickle=False -> allow_pickle=True",
    "read_demo, any environment: if json.loads(str(file[name])) != own -> if False",
    "read_demo, NaN: if not all(np.isfinite -> if False and not all(np.isfinite",
    "PPODBuffer.load_supplementary_demos, ends the run: except (OSError, UserError) -> except KeyError",
)
def test_bad_demo_files(script, tmp_path, monkeypatch, capsys):
    """A bad file is skipped with a line that names it and what is wrong; nothing in it is unpickled."""
    monkeypatch.chdir(tmp_path)
    for number, (changes, word) in enumerate(BAD):
        write(script, f"{number}/demo.npz", **changes)
        demos = store(script, supplementary_demos_dir=str(number), env_id="none")
        try:
            demos.load_supplementary_demos()
        except script.UserError:
            raise AssertionError("it ended the run") from None
        error = capsys.readouterr().err
        assert str(Path(str(number), "demo.npz")) in error and word in error and not demos.reward_demos


@catches(
    "make_demo_buffer, the flag is forgotten: if demo_buffer.reward_threshold is None and lowest > 0 -> if lowest > 0",
    "make_demo_buffer, demos of nothing set the threshold: is None and lowest > 0 -> is None",
    "make_demo_buffer, a person's demos may be dropped: replace(demo, human=human) -> demo",
    "make_demo_buffer, too much room: args.demo_capacity - len(demo_buffer.reward_demos) -> args.demo_capacity",
)
def test_initial_demos(script, tmp_path):
    """A person's demo and one of an agent, capacity 51: 49 value demos have room, and the lower return is the
    threshold, unless one is given or it is not positive. Too many demos are refused."""
    envs = SimpleNamespace(single_observation_space=LINE, single_action_space=TWO)
    args = script.Args(env_id="none", initial_human_demos_dir=f"{tmp_path}/5")
    for total in (5, 3, 0, -150):
        script.save_demo(tmp_path / f"{total}/0.npz", make_demo(script, total=float(total)), args, TWO)
    cases = [(3, None, 3), (3, 0.0, 0), (3, 7.0, 7), (0, None, None), (-150, None, None), (-150, -200.0, -200)]
    for other, given, threshold in cases:
        args = replace(args, initial_agent_demos_dir=f"{tmp_path}/{other}", initial_reward_threshold=given)
        demos = script.make_demo_buffer(args, envs)
        assert [(demo.total, demo.human) for demo in demos.reward_demos] == [(5, True), (other, False)]
        assert (demos.reward_threshold, demos.value_capacity) == (threshold, 49)
    with pytest.raises(script.UserError, match="2 demos exceed demo_capacity = 1"):
        script.make_demo_buffer(replace(args, demo_capacity=1), envs)


@catches(
    "PPODBuffer.load_supplementary_demos, taken again and again: if checksum in self.seen: -> if False:",
    "PPODBuffer.state_dict, values are lost: vars(demo) | demo -> vars(demo) | {'max_value': 0.0} | demo",
    "PPODBuffer.load_state_dict, demos stay tensors: demo.arrays(np.asarray) -> demo.arrays(torch.as_tensor)",
    "PPODBuffer.save_demos, never: or self.rollouts % self.args.save_demos_every == 0 -> or False",
    "PPODBuffer.save_demos, a person's are saved: if not demo.human -> if True",
    "PPODBuffer.save_demos, the worst: -demo.total -> demo.total",
    "PPODBuffer.save_demos, the lowest: -demo.max_value -> demo.max_value",
)
def test_supplementary_and_saved_demos(script, tmp_path, monkeypatch, capsys):
    """A file is taken once, also after a resume and if the same is written again; one that was half written is looked
    at again when it has changed. The agent's two best are saved, and the two highest value demos; every second
    rollout, and at the end."""
    monkeypatch.chdir(tmp_path)
    counts, state = [], store(script).state_dict()
    write(script, "new/a.npz")
    Path("new/b.npz").write_bytes(b"half")
    Path("new/folder.npz").mkdir()
    for step in range(4):
        if step == 2:
            write(script, "new/b.npz", episode_return=0.5)
            write(script, "new/c.npz")
        demos = store(script, supplementary_demos_dir="new", env_id="none")
        demos.load_state_dict(state)
        demos.load_supplementary_demos()
        counts.append(len(demos.reward_demos))
        state = demos.state_dict()
    assert counts == [1, 1, 2, 2] and capsys.readouterr().err.count("skipped") == 1 + 4
    reward = [make_demo(script, total=t) for t in (2.0, 4.0, 3.0)] + [make_demo(script, total=9.0, human=True)]
    value = [make_demo(script, length=n, max_value=v) for n, v in ((3, 0.1), (5, 0.3), (4, 0.2))]
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
        same = [np.array_equal(value, vars(new)[name]) for name, value in vars(old).items()]
        assert all(same) and isinstance(new.obs, np.ndarray)


RUN = "--env-id CartPole-v1 --num-envs 4 --num-steps 8 --num-minibatches 2 --gru-size 4 --chunk-length 8 "
RUN += "--update-epochs 1 --hidden-sizes 4 --rho 0.3 --phi 0.3 --demo-capacity 40 --normalize-obs --normalize-reward "
RUN += (
    "--recurrent --max-episode-steps 6 --total-timesteps 250 --checkpoint-every 40 --eval-every 90 --eval-episodes 2 "
)


@catches(
    "train, demos are not saved: scheduler=scheduler, demos=demo_buffer -> scheduler=scheduler",
    "make_demo_buffer, reads the folder again: return demo_buffer\n    for folder -> pass\n    for folder",
)
@pytest.mark.slow
def test_killed_resumed(script, tmp_path, monkeypatch):
    """With a demo and a GRU. Resumed, it needs no folder of demos."""
    (tmp_path / "more").mkdir()
    obs = np.random.default_rng(0).normal(size=(31, 4)).astype(np.float32)
    demo = script.Demo(obs, np.ones((30, 1), int), np.ones(30, np.float32), False, 30.0)
    script.save_demo(tmp_path / "demos/0.npz", demo, script.Args(env_id="CartPole-v1"), TWO)
    folders = f"--initial-human-demos-dir {tmp_path}/demos --supplementary-demos-dir {tmp_path}/more"
    kill_and_resume(script, f"{RUN} {folders}", 5, monkeypatch, tmp_path)
    before = content(script)
    Path("demos/0.npz").unlink()
    Path("more").rmdir()
    assert command(script, "--resume run --no-progress") == 0
    assert content(script) == before
    state = script.read_state("run/checkpoint.pt")["demos"]
    assert state["replayed_rows"] > 50 and sum(demo["human"] for demo in state["reward_demos"]) == 1


def test_refused(script, tmp_path, monkeypatch, capsys):
    refused = {"--num-steps 33 --recurrent": "chunks of 32", "--rho 0.6 --phi 0.4": "rho + phi"}
    refused |= {"--chunk-length 0 --recurrent": "chunks of 0"}
    refused |= {"--num-envs 1 --num-steps 32 --num-minibatches 2 --recurrent": "num_minibatches"}
    refused |= {"--initial-human-demos-dir nowhere": "record.py --env-id CartPole-v1 --target-agent-demos-dir nowhere"}
    refused |= {"--supplementary-demos-dir nowhere": "nowhere"}
    refused |= {f"--target-agent-demos-dir {__file__}": "is a file"}
    refused = {f"--env-id CartPole-v1 {flags}": words for flags, words in refused.items()}
    check_refused(script, refused, tmp_path, monkeypatch, capsys)


def test_pictures(script, tmp_path, monkeypatch):
    """From one demonstration of pictures, with and without a GRU: they stay bytes, and go through the CNN."""
    monkeypatch.chdir(tmp_path)
    picture, env_id = spaces.Box(0, 255, (36, 36, 3), np.uint8), "run_worlds:Picture-v0"
    obs = np.random.default_rng(0).integers(256, size=(7, 36, 36, 3), dtype=np.uint8)
    demo = script.Demo(obs, np.ones((6, 1), int), np.ones(6, np.float32), True, 6.0)
    script.save_demo(tmp_path / "demos/0.npz", demo, script.Args(env_id=env_id), TWO)
    flags = (
        f"--env-id {env_id} --initial-human-demos-dir demos --rho 0.9 --phi 0 --num-envs 2 --num-steps 8 --no-progress "
    )
    flags += (
        "--num-minibatches 1 --chunk-length 8 --gru-size 4 --hidden-sizes 4 --total-timesteps 20 --eval-episodes 1 "
    )
    for gru in ("recurrent", "no-recurrent"):
        assert command(script, f"{flags} --{gru} --run-dir {gru}") == 0
        state = script.read_state(f"{gru}/checkpoint.pt")
        assert state["demos"]["replayed_rows"] > 0 and state["demos"]["reward_demos"][0]["obs"].dtype == torch.uint8
    agent = script.RecurrentAgent(picture, TWO, script.Args(hidden_sizes=()))
    close(agent.trunk_output(torch.tensor(obs)), agent.cnn(torch.tensor(obs)))


def test_a_run_folder_does_not_say_where_demos_are_written(script, tmp_path):
    """A stranger's config.json would write anywhere: the folder comes from the command line alone."""
    args = vars(script.tuned(env_id="CartPole-v1")) | {"target_agent_demos_dir": "/elsewhere", "seed": 7}
    (tmp_path / "config.json").write_text(json.dumps({"script": "ppod", "args": args}))
    again = script.tuned("--resume", str(tmp_path))
    assert again.seed == 7 and again.target_agent_demos_dir is None
    given = script.tuned("--resume", str(tmp_path), "--target-agent-demos-dir", "here")
    assert given.target_agent_demos_dir == "here"


@catches('code_flags, asks for its own wrappers: own.get("wrappers") -> None')
def test_own_wrappers_need_not_be_given_again(script):
    """GoalReward stands in TUNED; with other wrappers, or none of TUNED's, a config.json is a stranger's."""
    own = script.tuned("MountainCar-v0")
    assert script.code_flags(own) == []
    assert script.code_flags(replace(own, wrappers=("ppod.GoalReward", "os.system")))[-1] == "os.system"
    assert script.code_flags(replace(own, env_id="CartPole-v1"))[-1] == "ppod.GoalReward"
    envs = script.make_envs(own, 1)
    envs.reset(seed=0)
    assert envs.step(np.ones(1, int))[1] == 0  # not -1, since the goal is far
