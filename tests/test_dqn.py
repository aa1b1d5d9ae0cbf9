"""dqn.py: targets, gradients, replay buffers and the sum tree against arithmetic done by hand and slow, obvious loops;
probe environments whose values are known; whole runs, killed and resumed, and one short run per option.

The `check_…` functions take the implementation they judge, so that known mistakes can be shown to be caught.
"""

import collections
import contextlib
import csv
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import dqn_envs  # noqa: F401  (registers its environments)
import gymnasium as gym
import numpy as np
import pytest
import run_envs  # noqa: F401  (registers its environments)
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from probe_envs import Delayed, Probe, Walk

import dqn
from dqn import Args, FrameStackBuffer, NStepBuffer, ReplayBuffer, SumTree, load, train

VECTOR, TWO = spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(2)
STACK = spaces.Box(0, 255, (3, 2, 2), np.uint8)


def close(actual, expected, atol=1e-5):
    """AssertionError unless all numbers agree; shapes as well."""
    actual, expected = (torch.as_tensor(np.asarray(x), dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-5)


@pytest.fixture(autouse=True)
def one_thread():
    """`train` sets the number of threads of this process: put it back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------ targets and gradient


def check_targets(td_targets):
    """Three transitions, the second of which terminated; discounts 0.5, 0.5 and, over two steps, 0.25.

    DQN     1 + 0.5 max(1, 3) = 2.5     2     3 + 0.25 max(4, 2) = 4
    double  The online network prefers actions 0, 1, 1:   1 + 0.5 * 1 = 1.5     2     3 + 0.25 * 2 = 3.5
    """
    rewards, discounts = torch.tensor([1.0, 2, 3]), torch.tensor([0.5, 0.5, 0.25])
    terminated = torch.tensor([False, True, False])
    target_q, online_q = torch.tensor([[1.0, 3], [5, 9], [4, 2]]), torch.tensor([[2.0, 1], [0, 1], [1, 2]])
    close(td_targets(rewards, terminated, discounts, target_q), [2.5, 2, 4])
    close(td_targets(rewards, terminated, discounts, target_q, online_q), [1.5, 2, 3.5])


def targets_without_mask(r, terminated, g, target_q, online_q=None):
    return dqn.td_targets(r, torch.zeros_like(terminated), g, target_q, online_q)


def targets_never_double(r, terminated, g, target_q, online_q=None):
    return dqn.td_targets(r, terminated, g, target_q)


def targets_of_the_online_network(r, terminated, g, target_q, online_q=None):
    return dqn.td_targets(r, terminated, g, target_q if online_q is None else online_q)


def targets_with_roles_exchanged(r, terminated, g, target_q, online_q=None):
    return dqn.td_targets(r, terminated, g, target_q if online_q is None else online_q, target_q)


def targets_masked_rewards(r, terminated, g, target_q, online_q=None):
    return ~terminated * dqn.td_targets(r, terminated, g, target_q, online_q)


def test_targets_by_hand():
    """Fails if termination does not cut, or if double DQN chooses or values actions with the wrong network."""
    check_targets(dqn.td_targets)


def test_huber_by_hand():
    """Fails if errors beyond 1 weigh quadratically: 0.5 * 0.5^2 = 0.125, 0.5 at 1, 3 - 0.5 = 2.5."""
    errors = torch.tensor([0, 0.5, -0.5, 1, -1, 3, -3.0])
    close(dqn.huber(errors), [0, 0.125, 0.125, 0.5, 0.5, 2.5, 2.5])
    close(dqn.huber(errors), torch.nn.functional.smooth_l1_loss(errors, 0 * errors, reduction="none"))


def make_agent(observation_space=VECTOR, actions=3, seed=1, **args):
    """A QNetwork with random biases, so that nothing is zero by chance."""
    args = {"hidden_sizes": (8, 5)} | args
    agent = dqn.QNetwork(observation_space, spaces.Discrete(actions), Args(env_id="none", seed=seed, **args))
    agent.flat.add_(0.1 * torch.randn(len(agent.flat), generator=torch.Generator().manual_seed(seed)))
    return agent


def random_batch(size=16, actions=3, seed=0):
    rng = np.random.default_rng(seed)
    obs, next_obs = torch.from_numpy(rng.normal(size=(2, size, 2)).astype(np.float32))
    chosen, rewards = torch.from_numpy(rng.integers(actions, size=(size, 1))), torch.from_numpy(rng.normal(size=size))
    terminated = torch.from_numpy(rng.random(size) < 0.3)
    discounts = torch.from_numpy(rng.choice([0.9, 0.81], size=size).astype(np.float32))
    return dqn.NStepTransitions(obs, chosen, 3 * rewards.float(), next_obs, terminated, discounts)


def check_gradient(td_gradient, dueling=False, normalize_obs=False, autograd=False):
    """The gradient is that of the textbook's loss, written out for one transition at a time."""
    agent, target = (make_agent(seed=seed, dueling=dueling, normalize_obs=normalize_obs) for seed in (1, 2))
    agent.fits_numpy = not autograd  # autograd: as for images, and on a GPU
    if normalize_obs:
        agent.obs_stats.update(np.random.default_rng(3).normal(2, 3, (50, 2)))
        target.obs_stats = agent.obs_stats
    batch, weights = random_batch(), torch.linspace(0.1, 1, 16)
    for double, w in ((True, 1), (False, 1), (True, weights)):
        losses, errors = [], []
        for i in range(16):
            obs, next_obs = batch.obs[i : i + 1], batch.next_obs[i : i + 1]
            with torch.no_grad():
                future = target(next_obs)[0]
                best = (agent(next_obs)[0] if double else future).argmax()
                y = batch.rewards[i] + (0 if batch.terminated[i] else batch.discounts[i] * future[best])
            error = y - agent(obs)[0, batch.actions[i, 0]]
            losses.append(0.5 * error**2 if abs(error) < 1 else abs(error) - 0.5)
            errors.append(error.item())
        loss = (torch.stack(losses) * w).mean()
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(agent.parameters()))])
        gradient, found, q = td_gradient(agent, target, batch, w, double)
        close(found, errors)
        close(gradient, expected)
        close(q, agent(batch.obs).detach().gather(1, batch.actions)[:, 0])
        assert max(map(abs, errors)) > 1  # the clipping has something to clip


@pytest.mark.parametrize("more", [{}, {"dueling": True}, {"normalize_obs": True}], ids=["plain", "dueling", "normed"])
@pytest.mark.parametrize("autograd", [False, True])
def test_gradient_is_that_of_the_textbook(more, autograd):
    """Fails if target and online network, weights, clipping or the mean are mixed up in the gradient, or a layer is."""
    check_gradient(dqn.td_gradient, autograd=autograd, **more)


def gradient_with(**changes):
    """td_gradient with something wrong about its arguments."""

    def td_gradient(agent, target, batch, weights, double):
        given = dict(agent=agent, target=target, batch=batch, weights=weights, double=double)
        return dqn.td_gradient(**given | {name: change(given) for name, change in changes.items()})

    return td_gradient


def test_dueling_by_hand():
    """V = 1, A = (1, 2, 6), mean 3: Q = 1 + (-2, -1, 3) = (-1, 0, 4). Fails for V + A or V + A - max A."""
    for output in (torch.tensor([[1.0, 1, 2, 6]]), np.array([[1.0, 1, 2, 6]])):
        close(dqn.dueling_values(output), [[-1, 0, 4]])


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("normalize_obs", [False, True])
def test_predicting_in_numpy_equals_torch(dueling, normalize_obs):
    """Fails if acting or targets see another network than the gradient does."""
    agent = make_agent(dueling=dueling, normalize_obs=normalize_obs)
    obs = np.random.default_rng(0).normal(1, 5, (20, 2))
    if normalize_obs:
        agent.obs_stats.update(obs)
    expected = agent(torch.tensor(obs)).detach()
    close(agent.predict_in_numpy(obs), expected)
    close(agent.predict(torch.tensor(obs)), expected)
    assert (agent.greedy(obs) == expected.argmax(1).numpy()).all()
    assert len(set(agent.greedy(obs))) > 1


def test_actions_are_shifted_and_typed():
    """Fails if a Discrete space that begins at another number than 0 gets actions outside of it."""
    agent = dqn.QNetwork(VECTOR, spaces.Discrete(3, start=-1), Args(env_id="none"))
    actions = agent.act(np.random.default_rng(0).normal(0, 9, (50, 2)))
    assert actions.dtype == np.int64 and all(agent.action_space.contains(a) for a in actions)
    everything = agent.to_env(agent.explore(np.zeros((200, 2)), 1.0, np.random.default_rng(0)))
    assert set(everything) == {-1, 0, 1}


def test_exploration():
    """Fails if epsilon is not the share of random actions, or random ones are not uniform. (3 sigma: 0.014)"""
    agent, rng = make_agent(), np.random.default_rng(0)
    obs = np.zeros((10_000, 2))
    greedy = agent.greedy(obs)[0]
    assert (agent.explore(obs, 0.0, rng) == greedy).all()
    shares = np.bincount(agent.explore(obs, 0.3, rng), minlength=3) / 10_000
    close(shares, np.where(np.arange(3) == greedy, 0.8, 0.1), atol=0.015)
    close(np.bincount(agent.explore(obs, 1.0, rng)) / 10_000, np.full(3, 1 / 3), atol=0.015)


def test_linear_schedule_by_hand():
    """From 0.1 to 0.01 in a tenth of 1,000 steps: half way 0.055, and 0.01 for good after step 100."""
    epsilons = [dqn.linear_schedule(0.1, 0.01, 0.1 * 1000, step) for step in (0, 50, 100, 500)]
    close(epsilons, [0.1, 0.055, 0.01, 0.01])


def test_polyak_by_hand():
    """0.1 * 2 + 0.9 * 1 = 1.1. Fails if target and source are exchanged."""
    target, source = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 1.0])
    dqn.polyak(target, source, 0.1)
    close(target, [1.1, 0.1])
    close(source, [2, 1])


# ------------------------------------------------------------------------------------------------------- buffers


def add_step(buffer, rewards, ends=None, reset_rows=None, obs=None):
    """One step of N environments; `ends`: a "t" for each terminated one, a "c" for each truncated, else "-"."""
    N = len(rewards)
    ends, reset_rows = ends or "-" * N, np.array(reset_rows or [False] * N)
    terminated, truncated = (np.array([end == kind for end in ends]) for kind in "tc")
    obs = np.stack([rewards, rewards], 1) if obs is None else obs
    return buffer.add(obs, np.zeros((N, 1), int), np.array(rewards), terminated, truncated, reset_rows, obs + 0.5)


def test_ring_by_hand():
    """Capacity 4, two environments. The third step overwrites the first; its second row only resets, and is left out.

    Fails if reset rows are stored, the ring does not wrap, or more than what is there is sampled.
    """
    buffer = ReplayBuffer(4, VECTOR, TWO)
    assert add_step(buffer, [1.0, 2.0]).tolist() == [0, 1] and buffer.size == 2
    with pytest.raises(ValueError, match="cannot sample 3 of 2 stored transitions"):
        buffer.sample(3, np.random.default_rng(0))
    assert add_step(buffer, [3.0, 4.0], "tc").tolist() == [2, 3]
    assert add_step(buffer, [5.0, 6.0], reset_rows=[False, True]).tolist() == [0]
    assert buffer.rewards.tolist() == [5, 2, 3, 4] and (buffer.size, buffer.position) == (4, 1)
    assert buffer.terminated.tolist() == [False, False, True, False]  # a truncation bootstraps
    assert add_step(buffer, [7.0, 8.0], reset_rows=[True, True]).tolist() == []
    assert add_step(buffer, [7.0, 8.0]).tolist() == [1, 2] and buffer.rewards.tolist() == [5, 7, 8, 4]
    batch = buffer.get(np.array([3, 1]))
    close(batch.obs, [[4, 4], [7, 7]])
    close(batch.next_obs, [[4.5, 4.5], [7.5, 7.5]])
    assert [tuple(x.shape) for x in batch] == [(2, 2), (2, 1), (2,), (2, 2), (2,)]
    assert batch.actions.dtype == torch.int64 and batch.terminated.dtype == torch.bool


def test_sampling_is_uniform():
    """Fails if a slot is left out, drawn before it is filled, or favoured. (chi-square, 9 degrees: 28 has p = 0.001)"""
    buffer, rng = ReplayBuffer(16, VECTOR, TWO), np.random.default_rng(0)
    for i in range(10):
        add_step(buffer, [float(i)])
    drawn = np.concatenate([buffer.sample(10, rng).rewards for _ in range(1000)]).astype(int)
    counts = np.bincount(drawn, minlength=10)
    assert len(counts) == 10 and ((counts - 1000) ** 2 / 1000).sum() < 28


def test_images_stay_bytes():
    """Fails if pixels are stored as floats, which takes four times the memory."""
    buffer = ReplayBuffer(4, spaces.Box(0, 255, (3, 36, 36), np.uint8), TWO)
    assert buffer.obs.dtype == buffer.next_obs.dtype == np.uint8
    buffer = ReplayBuffer(4, spaces.Box(-1, 1, (3,), np.float64), spaces.Box(-1, 1, (2, 2)))
    assert buffer.obs.dtype == np.float32 and buffer.actions.dtype == np.float32 and buffer.actions.shape == (4, 4)


def check_n_step(buffer_class):
    """n = 3, gamma = 0.5, slot = 2 t + environment. Environment 0 terminates at t = 1, environment 1 is cut at t = 2.

    rewards  t  0   1   2   3         from slot 0: 1 + 0.5 * 2 = 2, over; from slot 2: 2, over
          env 0 1   2t  3   4         from slot 1: 10 + 0.5 * 20 + 0.25 * 30 = 27.5
          env 1 10  20  30c 40        from slot 4: 3 + 0.5 * 4 = 5, nothing more is there yet: bootstrap with 0.25
    With Q' = 8 the targets are 2, 27.5 + 0.125 * 8 = 28.5, 2, 35 + 0.25 * 8 = 37, 5 + 0.25 * 8 = 7, …
    Then rewards 5 and 50 overwrite slots 0 and 1: windows from slots 6 and 7 go on there, 4 + 0.5 * 5 = 6.5.
    """
    buffer = buffer_class(8, VECTOR, TWO, num_envs=2, n_step=3, gamma=0.5)
    for rewards, ends in (([1, 10], "--"), ([2, 20], "t-"), ([3, 30], "-c"), ([4, 40], "--")):
        add_step(buffer, np.array(rewards, float), ends)
    batch = buffer.get(np.arange(8))
    close(batch.rewards, [2, 27.5, 2, 35, 5, 30, 4, 40])
    close(batch.discounts, [0.25, 0.125, 0.5, 0.25, 0.25, 0.5, 0.5, 0.5])
    assert batch.terminated.tolist() == [True, False, True] + [False] * 5
    close(batch.next_obs[:, 0], [2.5, 30.5, 2.5, 30.5, 4.5, 30.5, 4.5, 40.5])  # those of slots 2 5 2 5 6 5 6 7
    y = dqn.td_targets(batch.rewards, batch.terminated, batch.discounts, torch.full((8, 2), 8.0))
    close(y, [2, 28.5, 2, 37, 7, 34, 8, 44])
    add_step(buffer, np.array([5.0, 50]))
    batch = buffer.get(np.array([2, 3, 4, 5, 6, 7, 0, 1]))
    close(batch.rewards, [2, 35, 6.25, 30, 6.5, 65, 5, 50])
    close(batch.discounts, [0.5, 0.25, 0.125, 0.5, 0.25, 0.25, 0.5, 0.5])


def test_n_step_by_hand():
    """Fails if windows cross the end of an episode, mix environments, or always discount by gamma^n."""
    check_n_step(NStepBuffer)


class CrossesEnds(NStepBuffer):
    """The next episode is taken for the rest of the last one."""

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs):
        slots = super().add(obs, actions, rewards, terminated & False, truncated & False, reset_rows, next_obs)
        self.terminated[slots] = terminated[~reset_rows]
        return slots


class CrossesTruncations(CrossesEnds):
    """The same, but only where an episode was truncated."""

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs):
        return NStepBuffer.add(self, obs, actions, rewards, terminated, truncated & False, reset_rows, next_obs)


class AlwaysGammaToTheN(NStepBuffer):
    """Bootstraps with gamma^n, however few rewards there were."""

    def get(self, slots):
        batch = super().get(slots)
        return batch._replace(discounts=torch.full_like(batch.discounts, self.gamma**self.n_step))


class MixesEnvironments(NStepBuffer):
    """Slots are taken to follow on each other."""

    def get(self, slots):
        self.next_slot = (np.arange(self.capacity) + 1) % self.capacity
        return super().get(slots)


class BootstrapsFromTheFirst(NStepBuffer):
    """Sums n rewards, but bootstraps from the observation after the first."""

    def get(self, slots):
        return super().get(slots)._replace(next_obs=torch.as_tensor(self.next_obs[slots]))


class TruncationTerminates(NStepBuffer):
    """A truncated step does not bootstrap."""

    def add(self, obs, actions, rewards, terminated, truncated, reset_rows, next_obs):
        return super().add(obs, actions, rewards, terminated | truncated, truncated, reset_rows, next_obs)


class KeepsOldLinks(NStepBuffer):
    """A slot that is written anew still leads where its predecessor led."""

    def add(self, *step):
        old, slots = self.next_slot.copy(), super().add(*step)
        new = self.next_slot[slots] == slots
        self.next_slot[slots[new]] = np.where(self.size == self.capacity, old[slots], slots)[new]
        return slots


def walk(buffer, plans, steps, observe):
    """Play `plans` in a buffer: for each environment (length, terminated) of its episodes, repeated.

    `observe(env, episode, t)` is an observation. The step from t pays 100 env + 10 episode + t + 1. Returns the
    transitions that went in, oldest first, as (env, episode, t, length, terminated); checks the slots that add reports.
    """
    N, log = len(plans), []
    episode, t, reset_rows = np.zeros(N, int), np.zeros(N, int), np.zeros(N, bool)
    for _ in range(steps):
        now = [plans[e][episode[e] % len(plans[e])] for e in range(N)]
        obs = np.array([observe(e, episode[e], t[e]) for e in range(N)])
        rewards = np.array([100.0 * e + 10 * episode[e] + t[e] + 1 for e in range(N)])
        over = ~reset_rows & np.array([t[e] + 1 == now[e][0] for e in range(N)])
        terminated = over & np.array([now[e][1] for e in range(N)])
        new_episode = episode + reset_rows
        next_t = np.where(reset_rows, 0, t + 1)
        next_obs = np.array([observe(e, new_episode[e], next_t[e]) for e in range(N)])
        slots = buffer.add(obs, t[:, None] % 2, rewards, terminated, over & ~terminated, reset_rows, next_obs)
        assert slots.tolist() == [(len(log) + i) % buffer.capacity for i in range(int((~reset_rows).sum()))]
        log += [(e, episode[e], t[e], *now[e]) for e in np.flatnonzero(~reset_rows)]
        episode, t, reset_rows = new_episode, next_t, over
    return log


def expected_batch(log, capacity, observe, n, gamma):
    """{slot: (obs, action, R, next obs, terminated, discount)} of what the ring must hold, by an obvious loop."""
    stored = set((e, episode, t) for e, episode, t, *_ in log)
    expected = {}
    for i in range(max(0, len(log) - capacity), len(log)):
        e, episode, t, length, terminates = log[i]
        R, k = 0.0, 0
        while k < n and t + k < length and (e, episode, t + k) in stored:
            R += gamma**k * (100 * e + 10 * episode + t + k + 1)
            k += 1
        ended = terminates and t + k == length
        expected[i % capacity] = observe(e, episode, t), t % 2, R, observe(e, episode, t + k), ended, gamma**k
    return expected


def check_ring(buffer_class, observation_space, observe, plans, capacity, n, steps):
    """What the buffer returns for every slot is what the obvious loop says; so also after a checkpoint."""
    buffer = buffer_class(capacity, observation_space, TWO, num_envs=len(plans), n_step=n, gamma=0.5)
    log = walk(buffer, plans, steps, observe)
    expected = expected_batch(log, capacity, observe, n, 0.5)
    assert buffer.size == len(expected)
    again = buffer_class(capacity, observation_space, TWO, num_envs=len(plans), n_step=n, gamma=0.5)
    again.load_state_dict(buffer.state_dict())
    slots = np.array(sorted(expected), int)
    for held in (buffer, again):
        batch = held.get(slots)
        for field, column in zip(batch, zip(*(expected[slot] for slot in slots.tolist()))):
            close(field.squeeze(1) if field is batch.actions else field, np.array(column))
    return buffer, log


episode_plans = st.lists(
    st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=4), min_size=1, max_size=3
)


def vector_observation(env, episode, t):
    return np.array([env + 0.5 * t, episode])


def stack_observation(env, episode, t):
    """The last three of the frames of an episode; the two before its first are another's at random, not blank."""
    frames = [(97 * env + 31 * episode + 7 * (t - i)) % 256 for i in (2, 1, 0)]
    return np.array([np.full((2, 2), frame) for frame in frames], np.uint8)


@given(episode_plans, st.integers(6, 20), st.integers(1, 4), st.integers(1, 40))
def test_n_step_against_loop(plans, capacity, n, steps):
    """Fails if any window in any ring is not the one that the loop walks."""
    check_ring(NStepBuffer, VECTOR, vector_observation, plans, capacity, n, steps)


@given(episode_plans, st.integers(6, 20), st.integers(1, 4), st.integers(1, 40))
def test_frame_stacks_against_loop(plans, capacity, n, steps):
    """Fails if a stack is rebuilt wrongly anywhere: first steps, ends, the seam of the ring, several environments."""
    buffer, log = check_ring(FrameStackBuffer, STACK, stack_observation, plans, capacity, n, steps)
    slots = np.arange(buffer.size)
    heads = slots[buffer.previous_slot[slots] == slots]
    assert sorted(buffer.first) == heads.tolist()  # whole observations are kept for these alone


def check_frame_stacks(buffer_class):
    """Two environments, episodes of three and five steps, a ring that wraps twice."""
    plans = [[(3, True), (5, False)], [(5, True)]]
    check_ring(buffer_class, STACK, stack_observation, plans, capacity=11, n=2, steps=24)


class ForgetsTheSeam(FrameStackBuffer):
    """Frames that the ring has overwritten are used for stacks."""

    def add(self, *step):
        first, previous = dict(self.first), self.previous_slot.copy()
        slots = super().add(*step)
        for slot in set(self.first) - set(first) - set(slots.tolist()):
            self.previous_slot[slot] = previous[slot]
        return slots


class PadsWithTheFirstFrame(FrameStackBuffer):
    """An episode is taken to begin with three equal frames."""

    def add(self, obs, *step):
        slots = super().add(obs, *step)
        self.first = {slot: np.stack([stack[-1]] * self.num_frames) for slot, stack in self.first.items()}
        return slots


class LooksBackAcrossEpisodes(FrameStackBuffer):
    """The first stacks of an episode hold frames of the one before."""

    def observations(self, slots):
        at, frames = slots, []
        for _ in range(self.num_frames):
            at = (at - len(self.newest)) % self.capacity
            frames.append(self.next_obs[at])
        return np.stack(frames[::-1], 1)


def test_memory_of_a_million_atari_frames():
    """One million transitions of (4, 84, 84) in less than 8 GB, with episodes of 100 steps, shorter than any game's."""
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = FrameStackBuffer(1_000, space, spaces.Discrete(6))
    frames = np.random.default_rng(0).integers(256, size=(1_000, 84, 84), dtype=np.uint8)
    no, yes = np.zeros(1, bool), np.ones(1, bool)
    for t in range(3, 999):
        end = yes if t % 100 == 0 else no
        obs, next_obs = frames[None, t - 3 : t + 1], frames[None, t - 2 : t + 2]
        buffer.add(obs, np.zeros((1, 1), int), np.zeros(1), end, no, no, next_obs)
    size = sum(getattr(buffer, name).nbytes for name in buffer.arrays) + sum(x.nbytes for x in buffer.first.values())
    tree = SumTree(1_000, 0.6)
    assert (size + tree.nodes.nbytes) / 1_000 * 1e6 < 8e9
    close(buffer.get(np.array([996 - 1])).obs[0], frames[995:999])


def test_what_is_not_a_stack_is_refused():
    """Fails if images that are no stacks of frames, newest last, are silently stored as if they were."""
    buffer, no = FrameStackBuffer(4, STACK, TWO), np.zeros(1, bool)
    obs = np.arange(12, dtype=np.uint8).reshape(1, 3, 2, 2)
    with pytest.raises(dqn.UserError, match="stacks of frames"):
        buffer.add(obs, np.zeros((1, 1), int), np.zeros(1), no, no, no, obs + 1)


# ------------------------------------------------------------------------------------------------------ sum tree


def check_tree(tree_class):
    """Priorities 1, 2, 0, 5 (alpha = 1) in slots 0 to 3 of 5: shares 1/8, 2/8, 0, 5/8.

    Importance weights with beta = 0.5 are p^-0.5, divided by the largest: 1, 0.7071, 0.4472 of priorities 1, 2, 5.
    """
    tree, rng = tree_class(5, 1.0), np.random.default_rng(0)
    tree.update(np.arange(4), np.array([1.0, -2, 0, 5]) - np.array([1e-6, -1e-6, 1e-6, 1e-6]))
    assert tree.nodes[1] == pytest.approx(8)
    drawn, weights = tree.sample(8_000, rng, 0.5)
    close(
        np.bincount(drawn, minlength=5) / 8_000, [1 / 8, 2 / 8, 0, 5 / 8, 0], atol=1e-3
    )  # equal parts: hardly any noise
    for slot, weight in ((0, 1), (1, 2**-0.5), (3, 5**-0.5)):
        close(weights[drawn == slot], np.full((drawn == slot).sum(), weight))
    tree.add(np.array([4]))  # the highest so far, 5
    assert tree.nodes[1] == pytest.approx(13)
    tree.update(np.array([3, 4]), np.array([1.0, 1.0]))  # of 8 + 5, 1 + 2 + 1 + 1 are left; the highest stays 5
    tree.add(np.array([2]))
    assert tree.nodes[1] == pytest.approx(10)


def test_tree_by_hand():
    """Fails if shares, weights or the priority of new transitions are wrong."""
    check_tree(SumTree)


def test_alpha_and_beta_by_hand():
    """Errors 1 and 16 with alpha = 0.5: priorities 1 and 4. beta = 1: weights 1 and 1/4; beta = 0: 1 and 1."""
    tree = SumTree(2, 0.5)
    tree.update(np.array([0, 1]), np.array([1.0, 16.0]))
    close(tree.nodes[2:4], [1, 4])
    for beta, weight in ((1, 0.25), (0, 1)):
        slots, weights = tree.sample(100, np.random.default_rng(0), beta)
        close(weights, np.where(slots == 0, 1, weight))
        assert (slots == 1).sum() == 80


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=40),
    st.integers(1, 16),
    st.integers(0, 2**32 - 1),
)
def test_tree_against_cumulative_sums(priorities, batch_size, seed):
    """Fails if the walk through the tree ends elsewhere than a search in the cumulative sum, or in an empty slot."""
    priorities = np.array(priorities)
    if not priorities.any():
        return
    tree = SumTree(len(priorities), 1.0)
    tree.write(np.arange(len(priorities)), priorities)
    inner = np.arange(1, tree.leaves)
    close(tree.nodes[inner], tree.nodes[2 * inner] + tree.nodes[2 * inner + 1], atol=0)
    slots, _ = tree.sample(batch_size, np.random.default_rng(seed), 0.4)
    mass = (np.arange(batch_size) + np.random.default_rng(seed).random(batch_size)) * priorities.sum() / batch_size
    cumulative = np.concatenate([[0], priorities.cumsum()])
    assert (priorities[slots] > 0).all()
    slack = 1e-9 * cumulative[-1]  # the sums were rounded in another order
    assert (cumulative[slots] - slack <= mass).all() and (mass <= cumulative[slots + 1] + slack).all()


def test_tree_never_ends_in_an_empty_slot():
    """Fails if a mass that rounding has made as large as the sum leads to a slot without priority."""
    tree = SumTree(6, 1.0)
    tree.write(np.array([0, 2]), np.array([0.1, 0.2]))
    top = SimpleNamespace(random=lambda size: np.ones(size))  # the upper edge of each part
    assert tree.sample(4, top, 1.0)[0].tolist()[-1] == 2


def test_tree_comes_back_from_a_checkpoint():
    """Fails if priorities, their sums or the highest are lost."""
    tree, again, rng = SumTree(37, 0.6), SumTree(37, 0.6), np.random.default_rng(0)
    tree.add(np.arange(30))
    for _ in range(20):
        tree.update(rng.integers(30, size=5), rng.normal(0, 3, 5))
    again.load_state_dict(tree.state_dict())
    assert (again.nodes == tree.nodes).all() and again.highest == tree.highest > 1


class ForgetsTheHighest(SumTree):
    """New transitions get priority 1."""

    def add(self, slots):
        self.write(slots, 1.0)


class DoesNotSumUp(SumTree):
    """Only the parents of the leaves are kept up to date."""

    def write(self, slots, priorities):
        nodes = slots + self.leaves
        self.nodes[nodes] = priorities
        self.nodes[nodes // 2] = self.nodes[nodes // 2 * 2] + self.nodes[nodes // 2 * 2 + 1]


class NoWeights(SumTree):
    """Importance weights are left out."""

    def sample(self, batch_size, rng, beta):
        return super().sample(batch_size, rng, 0)


class TurnsWrong(SumTree):
    """The mass of the left child is not taken off on the way to the right."""

    def sample(self, batch_size, rng, beta):
        slots, weights = super().sample(batch_size, rng, beta)
        return np.sort(slots)[::-1], weights


# ------------------------------------------------------------------------------------------------- known mistakes

MISTAKES = {
    "no mask": (check_targets, targets_without_mask),
    "never double": (check_targets, targets_never_double),
    "values of the online network": (check_targets, targets_of_the_online_network),
    "double the wrong way round": (check_targets, targets_with_roles_exchanged),
    "termination masks the reward": (check_targets, targets_masked_rewards),
    "online network as target": (check_gradient, gradient_with(target=lambda g: g["agent"])),
    "weights left out": (check_gradient, gradient_with(weights=lambda g: 1)),
    "always double": (check_gradient, gradient_with(double=lambda g: True)),
    "crosses ends": (check_n_step, CrossesEnds),
    "crosses truncations": (check_n_step, CrossesTruncations),
    "always gamma^n": (check_n_step, AlwaysGammaToTheN),
    "mixes environments": (check_n_step, MixesEnvironments),
    "bootstraps after the first step": (check_n_step, BootstrapsFromTheFirst),
    "truncation terminates": (check_n_step, TruncationTerminates),
    "keeps old links": (check_n_step, KeepsOldLinks),
    "forgets the seam": (check_frame_stacks, ForgetsTheSeam),
    "pads": (check_frame_stacks, PadsWithTheFirstFrame),
    "looks back across episodes": (check_frame_stacks, LooksBackAcrossEpisodes),
    "new ones get 1": (check_tree, ForgetsTheHighest),
    "does not sum up": (check_tree, DoesNotSumUp),
    "no weights": (check_tree, NoWeights),
    "turns wrong": (check_tree, TurnsWrong),
}
RIGHT = {
    check_targets: dqn.td_targets,
    check_gradient: dqn.td_gradient,
    check_n_step: NStepBuffer,
    check_frame_stacks: FrameStackBuffer,
    check_tree: SumTree,
}


@pytest.mark.parametrize("check, faulty", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_caught(check, faulty):
    """Fails if a known mistake passes the check that is there for it, or if the right version does not."""
    check(RIGHT[check])
    with pytest.raises(AssertionError):
        check(faulty)


# ------------------------------------------------------------------ whole trainings in environments of one or two steps


def register(entry_point):
    """A new id of an environment."""
    env_id = f"DqnProbe{len(gym.registry)}-v0"
    gym.register(env_id, entry_point)
    return env_id


SOLVE = dict(num_envs=8, learning_rate=1e-2, gamma=0.5, hidden_sizes=(16,), batch_size=32, learning_starts=100)
SOLVE |= dict(
    train_frequency=2, target_network_frequency=100, buffer_size=2_000, total_timesteps=3_000, eval_every=10**9
)
SOLVE |= dict(gradient_steps=1, checkpoint_every=10**9, eval_episodes=8, progress=False, end_e=0.5)
OPTIONS = {
    "default": {},
    "plain": {"double": False},
    "dueling": {"dueling": True},
    "n-step": {"n_step": 3},
    "prioritized": {"prioritized": True},
    "tau": {"tau": 0.05, "target_network_frequency": 2},
    "all": {"dueling": True, "n_step": 3, "prioritized": True, "normalize_obs": True}
    | {"tau": 0.05, "target_network_frequency": 2},
}
every_option = pytest.mark.parametrize("more", OPTIONS.values(), ids=OPTIONS.keys())


def solve(run_dir, entry_point, **args):
    """Train for a few thousand steps. Returns (agent, final figures)."""
    args = SOLVE | {"run_dir": str(run_dir), "env_id": register(entry_point)} | args
    summary = train(Args(**args))
    return load(run_dir, "last"), summary


def values(agent, *obs):
    """Q of both actions."""
    return agent(torch.tensor([obs], dtype=torch.float32))[0].tolist()


@pytest.mark.parametrize("option", ["default", "n-step", "all"])
@pytest.mark.parametrize("end, value", [("terminated", 1), ("truncated", 2)])
def test_probe_value_at_the_end(option, end, value, tmp_path):
    """One step with reward 1. Terminated, that is all: Q = 1. Truncated, it would go on: Q = 1 / (1 - 0.5) = 2.

    Fails if truncation is treated as termination, or the other way round, anywhere between environment and target.
    """
    agent, _ = solve(tmp_path / "run", lambda: Probe(end=end), **OPTIONS[option])
    close(values(agent, 0), [value, value], atol=0.1)


@pytest.mark.parametrize("option, num_envs", [("default", 1), *((option, 8) for option in OPTIONS)])
def test_probe_discount(option, num_envs, tmp_path):
    """Reward 1 after the second step: Q(s_1) = 1, Q(s_0) = 0.5. Fails if the discount is missing or applied twice."""
    agent, _ = solve(tmp_path / "run", Delayed, num_envs=num_envs, **OPTIONS[option])
    close(values(agent, 0) + values(agent, 1), [0.5, 0.5, 1, 1], atol=0.1)


@pytest.mark.parametrize("option", ["default", "plain", "dueling", "prioritized", "tau"])
def test_probe_action_that_depends_on_the_observation(option, tmp_path):
    """Reward 1 for action 1 where the observation is 1, and for action 0 where it is -1.

    Fails if observations, actions and rewards of different steps are mixed, or if the worse action is chosen.
    """
    reward = lambda obs, action: float(action == (obs > 0))
    agent, summary = solve(tmp_path / "run", lambda: Probe(varied=True, reward=reward), **OPTIONS[option])
    close(values(agent, -1) + values(agent, 1), [1, 0, 0, 1], atol=0.1)
    assert summary["eval_return_mean"] == 1


def test_probe_clipped_rewards(tmp_path):
    """Reward 7, learnt as its sign: Q = 1. Fails if clipping is forgotten, or if reported returns are clipped too."""
    agent, summary = solve(tmp_path / "run", lambda: Probe(reward=lambda obs, action: 7.0), clip_reward=True)
    close(values(agent, 0), [1, 1], atol=0.1)
    assert summary["eval_return_mean"] == 7
    assert column(tmp_path / "run", "return_mean")[-1] == 7


class Chain(gym.Env):
    """Seven steps; only the last is rewarded, with 1, whatever the actions. The observation is the step, one-hot."""

    action_space, observation_space = TWO, spaces.Box(0, 1, (7,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.eye(7, dtype=np.float32)[0], {}

    def step(self, action):
        self.at += 1
        over = self.at == 7
        return np.eye(7, dtype=np.float32)[min(self.at, 6)], float(over), over, False, {}


def test_n_steps_carry_a_reward_back_sooner(tmp_path):
    """Two copies of the target network carry the last reward back two steps further; in windows of seven, all the way.

    Fails if --n-step changes nothing. (gamma = 1: Q(s_0) = 1 once it has arrived.)
    """
    few = dict(gamma=1.0, total_timesteps=1_000, target_network_frequency=400, hidden_sizes=(32,), learning_starts=50)
    one, seven = (solve(tmp_path / f"{n}", Chain, n_step=n, **few)[0] for n in (1, 7))
    start = np.eye(7)[0]
    assert max(values(one, *start)) < 0.6
    close(values(seven, *start), [1, 1], atol=0.2)


# ------------------------------------------------------------------------------------------- the order of a training


def test_epsilon_updates_and_copies_in_the_order_of_the_steps(tmp_path, monkeypatch):
    """The weights after 300 steps are those of the algorithm written down plainly, with lists and torch.optim.Adam.

    Fails if an update, a copy or the schedule of epsilon or of the learning rate is off by a step.
    """
    args = Args(env_id="CartPole-v1", num_envs=1, total_timesteps=300, learning_starts=40, train_frequency=4)
    args.batch_size, args.target_network_frequency, args.buffer_size, args.gradient_steps = 16, 10, 100, 2
    args.exploration_fraction, args.end_e, args.gamma, args.learning_rate, args.double = 0.5, 0.1, 0.9, 0.01, False
    args.hidden_sizes, args.eval_episodes, args.progress, args.run_dir = (16,), 1, False, str(tmp_path / "run")
    args.anneal_lr, args.prioritized, args.n_step, args.tau, args.dueling = True, False, 1, 1.0, False
    train(args)

    envs = gym.make_vec("CartPole-v1", 1)
    agent, target = (dqn.QNetwork(envs.single_observation_space, TWO, args) for _ in range(2))
    optimizer, rng = torch.optim.Adam(agent.parameters(), eps=1e-5), np.random.default_rng(args.seed)
    memory, step, reset = collections.deque(maxlen=100), 0, False
    obs, _ = envs.reset(seed=args.seed)
    writes = 0
    ring = [None] * 100
    while step < 300:
        epsilon = max(0.1, 1 - 0.9 * step / 150)
        lr = 0.01 * (1 - step / 300)
        action = int(agent(torch.tensor(obs)).argmax())
        if rng.random(1)[0] < epsilon:
            action = int(rng.integers(2, size=1)[0])
        next_obs, reward, terminated, truncated, _ = envs.step(np.array([action]))
        if not reset:
            ring[writes % 100] = obs[0], action, reward[0], next_obs[0], terminated[0]
            writes, step = writes + 1, step + 1
            memory.append(step)
        for _ in range(2 if step % 4 == 0 and step >= 40 and not reset else 0):
            batch = [ring[i] for i in rng.integers(len(memory), size=16)]
            loss = 0
            for o, a, r, n, over in batch:
                with torch.no_grad():
                    y = r + 0.9 * (not over) * target(torch.tensor(n)[None])[0].max()
                e = abs(y - agent(torch.tensor(o)[None])[0, a])
                loss = loss + (0.5 * e**2 if e < 1 else e - 0.5) / 16
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        if step % 10 == 0 and not reset:
            target.load_state_dict(agent.state_dict())
        obs, reset = next_obs, bool(terminated[0] | truncated[0])
    close(load(tmp_path / "run", "last").flat, agent.flat, atol=2e-4)


def watch(monkeypatch, **args):
    """Train, and return (steps at which a gradient step was taken, steps at which the target network changed)."""
    agents, updates, copies = [], [], []
    make_agent, learn, play_step = dqn.make_agent, dqn.gradient_step, dqn.play_step

    def watched_learn(*given):
        updates.append(given[-2].step)
        return learn(*given)

    def watched_play(*given):
        run = given[-2]
        if copies == [] or not torch.equal(copies[-1][1], agents[1].flat):
            copies.append((run.step, agents[1].flat.clone()))
        return play_step(*given)

    with monkeypatch.context() as patch:
        patch.setattr(dqn, "make_agent", lambda *a: agents.append(make_agent(*a)) or agents[-1])
        patch.setattr(dqn, "gradient_step", watched_learn)
        patch.setattr(dqn, "play_step", watched_play)
        train(Args(env_id="CartPole-v1", eval_episodes=1, eval_every=10**9, progress=False, **args))
    return updates, [step for step, _ in copies[1:]]


def test_target_is_copied_at_exact_steps(tmp_path, monkeypatch):
    """Every 10 steps, with an update every 4, from step 4 on: at 10, 20, 30, 40. Fails for 20 and 40 alone."""
    args = dict(num_envs=1, train_frequency=4, gradient_steps=1, target_network_frequency=10)
    args |= dict(learning_starts=4, batch_size=4)
    updates, copies = watch(monkeypatch, total_timesteps=48, run_dir=str(tmp_path / "run"), **args)
    assert updates == list(range(4, 49, 4))
    assert copies == [10, 20, 30, 40]


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_as_many_updates_with_several_environments(num_envs, tmp_path, monkeypatch):
    """Every 4 steps, two at a time, from step 20 on. Fails if the ratio of updates to steps depends on num_envs."""
    args = dict(num_envs=num_envs, train_frequency=4, gradient_steps=2, learning_starts=20, batch_size=4)
    updates, _ = watch(monkeypatch, total_timesteps=200, run_dir=str(tmp_path / "run"), **args)
    last = torch_file(tmp_path / "run/checkpoint.pt")["step"]
    assert (
        200 <= last < 200 + num_envs and len(updates) == 2 * (last // 4 - 4) and updates[0] in range(20, 20 + num_envs)
    )


def test_tau_moves_the_target_part_of_the_way(tmp_path, monkeypatch):
    """Fails if the target does not move after each update where both periods are equal."""
    args = dict(num_envs=1, train_frequency=4, gradient_steps=1, target_network_frequency=4, tau=0.5)
    args |= dict(learning_starts=4, batch_size=4)
    updates, copies = watch(monkeypatch, total_timesteps=48, run_dir=str(tmp_path / "run"), **args)
    assert copies == updates[:-1]


def test_reset_rows_are_not_stored(tmp_path, monkeypatch):
    """Three environments with episodes of planned lengths and ends: what is stored is what was played, and no more."""
    plans = [[(3, "terminated"), (4, "truncated")], [(1, "truncated")], [(2, "both")]]
    held = []
    make_buffer = dqn.make_replay_buffer
    monkeypatch.setattr(dqn, "make_replay_buffer", lambda *a: held.append(make_buffer(*a)) or held[-1])
    envs = gym.vector.SyncVectorEnv([lambda p=p, i=i: Walk(p, i) for i, p in enumerate(plans)])
    monkeypatch.setattr(dqn, "make_envs", lambda args, n, *_: envs)
    monkeypatch.setattr(dqn, "evaluate", lambda *_, **__: (0.0, 0.0))
    monkeypatch.setattr(envs, "close", lambda: None)
    train(Args(env_id="none", num_envs=3, total_timesteps=60, run_dir=str(tmp_path / "run"), progress=False))
    (buffer,) = held
    assert buffer.size == torch_file(tmp_path / "run/checkpoint.pt")["step"] >= 60
    obs, next_obs = buffer.obs[: buffer.size], buffer.next_obs[: buffer.size]
    assert (next_obs[:, 2] == obs[:, 2] + 1).all() and (next_obs[:, :2] == obs[:, :2]).all()
    assert (buffer.rewards[: buffer.size] == 10 * obs[:, 1] + next_obs[:, 2]).all()
    for (name, episode, at), terminated in zip(next_obs.astype(int).tolist(), buffer.terminated):
        length, end = plans[name][episode % len(plans[name])]
        assert terminated == (at == length and end != "truncated")


# ------------------------------------------------------------------------------------------------------ whole runs

SOURCE = Path(dqn.__file__).read_bytes()
TIME_COLUMNS = ("seconds", "sps")
SMALL = "--num-envs 2 --batch-size 16 --learning-starts 64 --hidden-sizes 16 --buffer-size 300".split()
SMALL += "--train-frequency 4 --gradient-steps 1 --target-network-frequency 50 --eval-episodes 2 --no-progress".split()
EVERYTHING = "--dueling --n-step 3 --prioritized --tau 0.01 --normalize-obs".split()


@pytest.fixture
def alone(tmp_path):
    """An empty folder with nothing but dqn.py in it."""
    (tmp_path / "dqn.py").write_bytes(SOURCE)
    return tmp_path


def command(flags):
    return [sys.executable, "dqn.py", *map(str, flags)]


def surroundings():
    """Environment variables of a process: one thread, no window, our environments importable, no CUDA device."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | own


def shell(folder, *flags, code=0):
    """Run `python dqn.py flags…` in `folder`, expect the exit code, return the finished process."""
    done = subprocess.run(command(flags), cwd=folder, env=surroundings(), capture_output=True, text=True)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def metrics(run_dir):
    """The text of metrics.csv as rows of cells, header first, without the columns that hold times."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    kept = [i for i, name in enumerate(header) if name not in TIME_COLUMNS]
    assert len(kept) == len(header) - 2 and all(len(row) == len(header) for row in rows)
    return [[row[i] for i in kept] for row in [header, *rows]]


def column(run_dir, name):
    header, *rows = metrics(run_dir)
    return [float(row[header.index(name)]) for row in rows]


def torch_file(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def assert_equal(one, other, where=""):
    """Two nests of dicts, lists and tensors are the same, bit for bit; the message says where they are not."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other)):
            assert_equal(a, b, f"{where}[{i}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    else:
        assert one == other, where


def assert_same_run(one, other):
    """Two finished runs agree in everything but the time they took: figures, weights, generators, replay buffer."""
    assert metrics(one) == metrics(other)
    files = [sorted(path.name for path in (run / "models").iterdir()) for run in (one, other)]
    assert files[0] == files[1]
    for name in files[0]:
        assert_equal(torch_file(one / "models" / name), torch_file(other / "models" / name), name)
    states = [torch_file(run / "checkpoint.pt") for run in (one, other)]
    for state in states:
        assert state.pop("seconds") > 0
    assert_equal(*states, "checkpoint.pt")


def test_copied_alone_it_leaves_a_complete_run_folder(alone):
    """Fails if dqn.py imports a sibling, or if a part of the run folder or the last two lines are missing."""
    done = shell(alone, *"--total-timesteps 2000 --eval-every 1000 --eval-episodes 3 --train-frequency 4".split())
    (run,) = (alone / "runs").iterdir()
    assert run.name.startswith("CartPole-v1__dqn__1__")
    final = summary(run)
    names = "eval_return_mean eval_return_std eval_episodes global_step seconds steps_per_second".split()
    assert set(names) <= set(final) and 2000 <= final["global_step"] < 2100
    evaluation, curve = done.stdout.splitlines()[-2:]
    assert evaluation.startswith("evaluation") and f"{final['eval_return_mean']:.1f} ±" in evaluation
    assert str(run.relative_to(alone) / "learning_curve.png") in curve
    header = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert header == "step seconds sps return_mean episodes epsilon learning_rate loss q".split()
    assert column(run, "step")[-1] == final["global_step"] and math.isfinite(column(run, "loss")[-1])
    assert {path.name for path in (run / "models").iterdir()} >= {"best.pt", f"{final['global_step']}.pt"}
    assert (run / "learning_curve.png").stat().st_size > 10_000 and not list(run.rglob("*.tmp"))
    line = shell(alone, "--evaluate", run, "--model", "last", "--eval-episodes", 3, "--seed", 1).stdout
    assert f"{final['eval_return_mean']:.2f} ± {final['eval_return_std']:.2f} over 3 episodes" in line


def test_same_seed_same_run(tmp_path):
    """Fails if two runs with the same seed differ in one bit of weights or figures, or two seeds do not differ."""
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        args = dict(SOLVE, total_timesteps=600, seed=seed, prioritized=True, n_step=2, run_dir=str(tmp_path / name))
        train(Args(env_id="CartPole-v1", **args))
    assert_same_run(tmp_path / "one", tmp_path / "two")
    assert metrics(tmp_path / "one") != metrics(tmp_path / "three")


def kill_and_resume(folder, run, flags, kills, longest, seed):
    """Kill -9 a run `kills` times, each time at a random moment after its next checkpoint, and resume it each time."""
    rng, done, stamp = random.Random(seed), 0, None
    checkpoint = folder / run / "checkpoint.pt"
    argv = [*flags, "--run-dir", run]
    while True:
        process = subprocess.Popen(
            command(argv), cwd=folder, env=surroundings(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            if done < kills:
                while process.poll() is None and (not checkpoint.exists() or checkpoint.stat().st_mtime_ns == stamp):
                    time.sleep(0.002)
                time.sleep(rng.uniform(0, longest))
                process.kill()
            _, err = process.communicate()
        finally:
            process.kill()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, err
            return done
        done, stamp, argv = done + 1, checkpoint.stat().st_mtime_ns, ["--resume", run, "--no-progress"]


@pytest.mark.parametrize(
    ("flags", "kills", "steps"),
    [
        (EVERYTHING, 2, 1_500),
        pytest.param([], 8, 8_000, marks=pytest.mark.slow),
        pytest.param(EVERYTHING, 8, 6_000, marks=pytest.mark.slow),
    ],
    ids=["everything", "default, often", "everything, often"],
)
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(flags, kills, steps, alone):
    """Fails if a checkpoint lacks anything that the rest of the run depends on, or is ever found half written."""
    flags = [*SMALL, *flags, "--total-timesteps", steps, "--checkpoint-every", 100]
    shell(alone, *flags, "--run-dir", "unbroken")
    assert kill_and_resume(alone, "killed", flags, kills, 0.15, seed=kills) == kills
    assert_same_run(alone / "unbroken", alone / "killed")
    assert len(list((alone / "killed").glob("envs_*.pkl"))) == 1


class Killed(BaseException):
    """Ends `train` on the spot, as a kill would: nothing in dqn.py may catch it."""


def train_until(event, args, monkeypatch):
    """`train(args)`, ended at the `event`-th moment that matters for what is on disk; False if it finished before."""
    left = [event]

    def patched(function, cleanup=lambda *_: None):
        def call(*given, **options):
            result = function(*given, **options)
            left[0] -= 1
            if left[0] < 0:
                cleanup(*given)
                raise Killed
            return result

        return call

    halve = lambda path: os.truncate(path, os.path.getsize(path) // 2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", patched(torch.save, lambda state, path: halve(path)))
        patch.setattr(Path, "write_bytes", patched(Path.write_bytes, lambda path, content: halve(path)))
        patch.setattr(os, "replace", patched(os.replace))
        patch.setattr(dqn, "log_row", patched(dqn.log_row))
        with contextlib.suppress(Killed):
            train(args)
            return True
    return False


FRAMES = dict(env_id="dqn_envs:Frames-v0", stacked_frames="yes", n_step=2, torch_threads=1, batch_size=8)


@pytest.mark.parametrize(
    "given",
    [
        dict(env_id="CartPole-v1"),
        dict(env_id="CartPole-v1", dueling=True, n_step=3, prioritized=True, normalize_obs=True),
        dict(env_id="CartPole-v1", stop_at_return=5.0, max_episode_steps=10, eval_every=40, total_timesteps=10**6),
        pytest.param(dict(env_id="FrozenLake-v1", tau=0.1, max_episode_steps=20), marks=pytest.mark.slow),
    ],
    ids=lambda given: ", ".join(map(str, given.values())),
)
def test_killed_around_every_write(given, tmp_path, monkeypatch):
    """Fails if there is a moment in or between writes at which a kill costs more than the work since the checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dqn, "draw_curve", lambda *_: None)  # takes longer than all the rest, and nothing reads it
    small = dict(num_envs=2, batch_size=8, learning_starts=16, hidden_sizes=(8,), buffer_size=50, eval_episodes=1)
    small |= dict(total_timesteps=120, checkpoint_every=25, eval_every=50, progress=False, run_dir="unbroken") | given
    train(Args(**small))
    deaths = 0
    for event in range(0, 1000, 3):
        run = tmp_path / f"killed{event}"
        if train_until(event, Args(**small | {"run_dir": str(run)}), monkeypatch):
            break
        if (run / "checkpoint.pt").exists():
            train(Args(resume=str(run)))
            assert_same_run(tmp_path / "unbroken", run)
            deaths += 1
        shutil.rmtree(run, ignore_errors=True)
    assert deaths >= 5


def test_frame_stacks_survive_a_checkpoint(tmp_path):
    """Fails if a resumed run on stacked frames samples other stacks than one that was not stopped.

    The environment cannot be carried over, so both runs are resumed from the same checkpoint, one of them twice.
    """
    small = FRAMES | dict(num_envs=2, learning_starts=16, buffer_size=40, eval_episodes=1, total_timesteps=60)
    train(Args(**small, eval_every=10**9, checkpoint_every=10**9, progress=False, run_dir=str(tmp_path / "one")))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    states = []
    for name in ("one", "two"):
        train(Args(resume=str(tmp_path / name), total_timesteps=100))
        states.append(torch_file(tmp_path / name / "checkpoint.pt"))
        states[-1].pop("seconds")
    assert_equal(*states)
    assert len(states[0]["buffer"]["first_slots"]) > 0


def test_resumed_with_new_episodes_windows_do_not_reach_into_them(alone, capsys):
    """Fails if the last steps before a kill are linked with the first steps of the episodes that begin afterwards."""
    flags = [*SMALL, "--env-id", "LunarLander-v3", "--n-step", 3, "--total-timesteps", 150, "--run-dir", "run"]
    shell(alone, *flags)
    before = torch_file(alone / "run/checkpoint.pt")["buffer"]
    done = shell(alone, "--resume", "run", "--total-timesteps", 200)
    assert "episodes restart" in done.stdout
    after = torch_file(alone / "run/checkpoint.pt")["buffer"]
    newest = before["newest"][before["newest"] >= 0]
    assert len(newest) and torch.equal(after["next_slot"][newest], newest)


# ---------------------------------------------------------------------------------------------- bad input, at the shell


@pytest.fixture
def main(monkeypatch, tmp_path):
    """main(*flags): what `python dqn.py flags…` does in the empty folder tmp_path, in this process; the exit code."""

    def call(*flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["dqn.py", *map(str, flags)])
        try:
            dqn.main()
        except SystemExit as stop:
            return stop.code or 0
        return 0

    return call


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--env-id CartPol-v1", "CartPole"),
        ("--env-id Pendulum-v1", "Box Discrete ddpg_td3.py"),
        ("--env-id run_envs:Match-v0 --env-kwargs {\"actions\":\"multibinary\"}", "MultiBinary ppo.py"),
        ("--env-id run_envs:Match-v0 --env-kwargs {\"observation\":\"sequence\"}", "Sequence"),
        ("--env-id dqn_envs:Frames-v0 --normalize-obs", "normalize_obs images"),
        ("--stacked-frames yes", "stacked_frames images"),
        ("--env-id dqn_envs:Frames-v0 --stacked-frames yes --env-kwargs {\"stacked\":false}", "stacks frames"),
        ("--buffer-size 100 --batch-size 128", "buffer_size 100 128"),
        ("--buffer-size 7 --batch-size 4 --num-envs 4", "buffer_size 7 8"),
        ("--n-step 0", "n_step 0"),
        ("--tau 1.5", "tau 1.5"),
        ("--alpha -0.1", "alpha"),
        ("--beta 2", "beta 2"),
        ("--start-e 1.5", "start_e"),
        ("--exploration-fraction 2", "exploration_fraction"),
        ("--train-frequency 0", "train_frequency"),
        ("--gradient-steps 0", "gradient_steps"),
        ("--target-network-frequency 0", "target_network_frequency"),
        ("--batch-size 0", "batch_size"),
        ("--learning-starts -1", "learning_starts"),
        ("--max-grad-norm nan", "max_grad_norm"),
        ("--clip-coef 0.2", "clip-coef"),
        ("--resume missing", "missing"),
        ("--config missing.json", "missing.json"),
    ],
)  # fmt: skip
def test_bad_flags(flags, words, main, capfd, tmp_path):
    """Fails if the complaint is longer than a line, names nothing, or comes with another exit code."""
    assert main(*flags.split(" "), "--no-progress") == 2
    err = capfd.readouterr().err
    assert err.endswith("\n") and err.count("\n") == 1 and "Traceback" not in err, err
    for word in words.split():
        assert word.replace("-", "_") in err.replace("-", "_"), err


def test_bad_input_as_a_process(alone):
    """Fails if the plain line and the exit code are lost between Python and the shell."""
    done = shell(alone, "--gamma", "1.5", code=2)
    assert done.stderr == "dqn.py: gamma must lie between 0 and 1, not be 1.5\n"
    assert [path.name for path in alone.iterdir()] == ["dqn.py"]


@pytest.mark.parametrize("field", ["observation", "reward"])
@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_nan_from_the_environment_ends_the_run(field, value, main, capsys, tmp_path):
    """Fails if it is learned from; environment, step and field must be named."""
    kwargs = json.dumps({"field": field, "at": 35, "value": value}).replace(" ", "")
    flags = ["--env-id", "run_envs:Faulty-v0", "--env-kwargs", kwargs, "--num-envs", 1, "--no-progress"]
    assert main(*flags, "--checkpoint-every", 10, "--run-dir", "run", "--eval-episodes", 1) == 2
    err = capsys.readouterr().err
    assert "Faulty-v0, step 34" in err and field in err
    assert torch_file(tmp_path / "run/checkpoint.pt")["step"] == 30


def test_diverging_weights_end_the_run(main, capsys):
    """Fails if a network that has become NaN goes on, or is saved."""
    assert main("--learning-rate", 1e30, "--no-anneal-lr", *SMALL, "--total-timesteps", 2000) == 2
    assert "NaN or infinite" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- every option

MATCH = SOLVE | dict(env_id="run_envs:Match-v0", torch_threads=1, eval_episodes=20)
MATCH |= dict(hidden_sizes=(64,), learning_rate=3e-3)


SLOW_KINDS = [
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("multibinary", "multidiscrete", "tuple", "matrix")
]


@pytest.mark.parametrize("observation", ["vector", "discrete", "dict", *SLOW_KINDS])
def test_every_observation_kind_learns(observation, tmp_path):
    """Four cues, four actions, the best score is 1, that of chance 0.25. Fails if a kind of observation is garbled."""
    kwargs = json.dumps({"observation": observation})
    final = train(Args(**MATCH, env_kwargs=kwargs, run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] > 0.95


@pytest.mark.parametrize("observation", ["channels_first", "channels_last"])
@pytest.mark.slow
def test_images_learn(observation, tmp_path):
    """The same with images in either layout."""
    kwargs = json.dumps({"observation": observation})
    more = dict(total_timesteps=2_500, learning_rate=5e-4, train_frequency=8)
    final = train(Args(**MATCH | more, env_kwargs=kwargs, run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] > 0.9


@pytest.mark.slow
def test_stacked_frames_learn(tmp_path):
    """The right action can only be seen in two frames. Fails if stacks are rebuilt in another order than played."""
    more = dict(total_timesteps=2_500, learning_rate=5e-4, train_frequency=8)
    args = MATCH | FRAMES | more | dict(batch_size=32, n_step=1, prioritized=True, buffer_size=1_000)
    final = train(Args(**args, run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] > 0.9


CARTPOLE = dict(env_id="CartPole-v1", num_envs=4, total_timesteps=12_000, train_frequency=32, gradient_steps=16)
CARTPOLE |= dict(batch_size=64, gamma=0.98, learning_rate=2e-3, n_step=3, target_network_frequency=128, tau=1.0)
CARTPOLE |= dict(hidden_sizes=(64, 64), exploration_fraction=0.2, end_e=0.04, learning_starts=500, eval_episodes=20)
CARTPOLE |= dict(eval_every=10**9, checkpoint_every=10**9, progress=False)


@every_option
@pytest.mark.slow
def test_every_option_learns_to_balance(more, tmp_path):
    """CartPole in 12,000 steps; chance scores 22. Fails if an option keeps the agent from learning."""
    slower = {"tau": 0.02, "target_network_frequency": 4} if "tau" in more else {}  # than in games of two steps
    assert train(Args(**CARTPOLE | more | slower, run_dir=str(tmp_path / "run")))["eval_return_mean"] > 80


def test_stop_at_return_stops_after_an_evaluation(tmp_path):
    """Fails if the run goes on, or stops at a training episode; a stopped run that is resumed has nothing to do."""
    args = MATCH | dict(total_timesteps=10**6, eval_every=1_000, stop_at_return=0.9, exploration_fraction=0.002)
    final = train(Args(**args, run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] >= 0.9 and final["global_step"] < 30_000
    before = metrics(tmp_path / "run")
    assert train(Args(resume=str(tmp_path / "run"))) == final and metrics(tmp_path / "run") == before


def test_config_of_a_run_reproduces_it(tmp_path):
    """Fails if an argument is not taken from --config."""
    args = dict(SOLVE, total_timesteps=400, n_step=2, prioritized=True, end_e=0.3)
    train(Args(env_id="CartPole-v1", **args, run_dir=str(tmp_path / "one")))
    train(Args(config=str(tmp_path / "one/config.json"), run_dir=str(tmp_path / "two")))
    assert_same_run(tmp_path / "one", tmp_path / "two")
    stored = json.loads((tmp_path / "one/config.json").read_text())["args"]
    assert set(stored) == {field.name for field in dataclasses.fields(Args)}


@pytest.mark.slow
def test_atari(alone):
    """A few hundred steps of Pong through ale-py's vector environment, resumed once. Needs `pip install ale-py`."""
    pytest.importorskip("ale_py")
    flags = "--env-id ALE/Pong-v5 --num-envs 2 --buffer-size 200 --batch-size 8 --learning-starts 50 --eval-episodes 1"
    flags += " --total-timesteps 300 --max-episode-steps 60 --prioritized --n-step 3 --run-dir run --no-progress"
    shell(alone, *flags.split())
    done = shell(alone, "--resume", "run", "--total-timesteps", 360, "--no-progress")
    assert "episodes restart" in done.stdout and summary(alone / "run")["global_step"] >= 360
    stored = torch_file(alone / "run/checkpoint.pt")["buffer"]
    assert stored["obs"].numel() == 0 and stored["next_obs"].shape == (200, 84, 84)
