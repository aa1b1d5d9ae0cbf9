"""maddpg_matd3.py: buffers, targets and updates against arithmetic done by hand and slow, obvious twins; games whose
best play is known; and whole runs, killed and resumed.

The `check_…` functions take the implementation they judge, so that the tests at the end can hand them faulty ones.
"""

import copy
import csv
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import maddpg_envs  # noqa: F401  (its environments are named by id)
import mappo_envs  # noqa: F401
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import maddpg_matd3 as maddpg
from maddpg_matd3 import Agents, Args, OffPolicyBufferEP, OffPolicyBufferFP

SPREAD = "mpe2.simple_spread_v3"
QUICK = dict(hidden_sizes=(32, 32), batch_size=64, learning_starts=200, train_frequency=4, num_envs=4, gamma=0.9)
QUICK |= dict(
    output_penalty=1e-2, actor_learning_rate=3e-3, critic_learning_rate=3e-3, tau=0.02, eval_every=10**9, progress=False
)
TINY = "--num-envs 3 --hidden-sizes 8 --batch-size 16 --learning-starts 60 --eval-episodes 2 --no-progress".split()
TIME_COLUMNS = ("seconds", "sps")


@pytest.fixture(autouse=True)
def one_thread():
    """`train` sets the number of threads of this process: put it back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def close(actual, expected, atol=1e-5):
    """AssertionError unless shapes and all numbers agree."""
    actual, expected = (torch.as_tensor(np.asarray(x), dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-5)


# ------------------------------------------------------------------------------------------------- buffers, by hand


def fill(buffer, rewards, dones, terms=None, valid=None, first=0):
    """Insert rows of rewards and ends, (T, N, G), of n agents; two numbers each observe, a third is what they do.

    Step t of environment e, which has the number x = t N + e, begins in state x, in which agent i observes 1000 i + x,
    and ends in x + 0.5. The action is -x, and available is what the binary digits of t say: first its value, then 1.
    """
    rewards, dones = np.asarray(rewards, float), np.asarray(dones)
    T, N, G = rewards.shape
    n = buffer.obs.shape[2]
    terms = dones if terms is None else np.asarray(terms)
    valid = np.ones((T, N, n)) if valid is None else np.asarray(valid)
    for t in range(T):
        x = ((first + t) * N + np.arange(N))[:, None].astype(float)
        states = [np.repeat(y, G, 0).reshape(N, G, 1) if G > 1 else y for y in (x, x + 0.5)]
        obs = [[1000 * i + y + np.zeros((1, 1 + i)) for i in range(n)] for y in (x, x + 0.5)]
        choices = [[np.hstack([np.full_like(x, (first + t + more) % 2), np.ones_like(x)])] * n for more in (0, 1)]
        done, term = dones[t], terms[t]
        if G == 1 and n == 1:
            done, term = done[:, 0], term[:, 0]  # (N,) is as good as (N, 1)
        row = states[0], obs[0], [-x] * n, choices[0], rewards[t], done, [valid[t][:, [i]] for i in range(n)], term
        buffer.insert(*row, states[1], obs[1], choices[1])


def make_buffer(buffer_class, capacity, num_envs, num_agents, n_step, gamma=0.5):
    sizes = 1, list(range(1, num_agents + 1)), [1] * num_agents, [2] * num_agents
    return buffer_class(capacity, num_envs, *sizes, n_step, gamma)


REWARDS = np.reshape([1, 10, 2, 20, 3, 30, 4, 40], (4, 2, 1))
DONES, TERMS = np.reshape([0, 0, 1, 0, 0, 1, 0, 0], (4, 2, 1)), np.reshape([0, 0, 1, 0, 0, 0, 0, 0], (4, 2, 1))


def check_ep(buffer_class):
    """gamma = 0.5, three steps, two environments of four steps each: slots 0 2 4 6 and 1 3 5 7. Environment 0
    terminates in slot 2, environment 1 is truncated in slot 5; slots 6 and 7 are the newest. Q' is 8 everywhere.

    from   reward                          discount      last slot   target
    0      1 + 0.5 * 2 = 2                 0.25          2           2, for it terminated
    1      10 + 0.5 * 20 + 0.25 * 30 = 27.5  0.125       5           27.5 + 0.125 * 8 = 28.5
    2      2                               0.5           2           2
    3      20 + 0.5 * 30 = 35              0.25          5           35 + 0.25 * 8 = 37
    4      3 + 0.5 * 4 = 5                 0.25          6           5 + 2 = 7
    5      30                              0.5           5           30 + 4 = 34
    6      4                               0.5           6           8
    7      40                              0.5           7           44
    """
    for agents in (1, 2):
        buffer = make_buffer(buffer_class, 8, 2, agents, 3)
        fill(buffer, REWARDS, DONES, TERMS)
        batch = buffer.get(np.arange(8))
        close(batch.rewards, np.array([[2, 27.5, 2, 35, 5, 30, 4, 40]]).T)
        close(batch.gammas, np.array([[0.25, 0.125, 0.5, 0.25, 0.25, 0.5, 0.5, 0.5]]).T)
        close(batch.dones, np.array([[1, 1, 1, 1, 0, 1, 0, 0]]).T)
        close(batch.terms, np.array([[1, 0, 1, 0, 0, 0, 0, 0]]).T)
        last = np.array([2, 5, 2, 5, 6, 5, 6, 7])
        close(batch.next_share_obs[:, 0], last + 0.5)
        for i in range(agents):
            close(batch.next_obs[i, :, 0], 1000 * i + last + 0.5)
            close(batch.next_available_actions[i, :, 0], (last // 2 + 1) % 2)
            close(batch.obs[i, :, 0], 1000 * i + np.arange(8))
            close(batch.available_actions[i, :, 0], np.arange(8) // 2 % 2)
            close(batch.actions[i, :, 0], -np.arange(8))
        close(batch.share_obs[:, 0], np.arange(8))
        row = batch.rewards[:, 0], torch.full((1, 8), 8.0), batch.terms[:, 0], batch.gammas[:, 0]
        close(maddpg.critic_targets(*row), [2, 28.5, 2, 37, 7, 34, 8, 44])


def check_wrap(buffer_class):
    """One step more, rewards 5 and 50, takes slots 0 and 1, so that 2 and 3 are the oldest, 0 and 1 the newest.

    From 4: 3 + 0.5 * 4 + 0.25 * 5 = 6.25; from 6: 4 + 0.5 * 5 = 6.5; from 7: 40 + 0.5 * 50 = 65; from 0 and 1 nothing
    follows: what stands in slots 2 and 3 was before.
    """
    buffer = make_buffer(buffer_class, 8, 2, 1, 3)
    fill(buffer, REWARDS, DONES, TERMS)
    fill(buffer, [[[5], [50]]], [[[0], [0]]], first=4)
    batch = buffer.get(np.array([2, 3, 4, 5, 6, 7, 0, 1]))
    close(batch.rewards[:, 0], [2, 35, 6.25, 30, 6.5, 65, 5, 50])
    close(batch.gammas[:, 0], [0.5, 0.25, 0.125, 0.5, 0.25, 0.25, 0.5, 0.5])
    close(batch.next_share_obs[:, 0], [2.5, 5.5, 8.5, 5.5, 8.5, 9.5, 8.5, 9.5])


def check_fp(buffer_class):
    """gamma = 0.5, two steps, one environment, two agents. Agent 0 is done in step 0, and from then on dead; agent 1
    gets 1, 2, 3 and is done, as the environment is, in step 2. Rows: all of agent 0, then all of agent 1.

    Agent 0: 1, and two steps that it did not take part in. Agent 1: 1 + 0.5 * 2 = 2, 2 + 0.5 * 3 = 3.5, 3.
    """
    buffer = make_buffer(buffer_class, 3, 1, 2, 2)
    fill(buffer, [[[1, 1]], [[0, 2]], [[0, 3]]], [[[1, 0]], [[1, 0]], [[1, 1]]], valid=[[[1, 1]], [[0, 1]], [[0, 1]]])
    batch = buffer.get(np.arange(3))
    close(batch.rewards, np.array([[1, 0, 0, 2, 3.5, 3]]).T)
    close(batch.gammas, np.array([[0.5, 0.5, 0.5, 0.25, 0.25, 0.5]]).T)
    close(batch.dones, np.array([[1, 1, 1, 0, 1, 1]]).T)
    close(batch.valid_transitions, np.array([[1, 0, 0, 1, 1, 1]]).T)
    close(batch.next_share_obs[:, 0], [0.5, 1.5, 2.5, 1.5, 2.5, 2.5])  # last steps 0 1 2 | 1 2 2
    close(batch.next_obs[1, :, 1], [1000.5, 1001.5, 1002.5, 1001.5, 1002.5, 1002.5])  # agent 1, at the end of each
    assert batch.share_obs.shape == (6, 1) and batch.obs.shape == (2, 3, 2) and batch.next_obs.shape == (2, 6, 2)


def check_rows_that_reset(buffer_class):
    """Environment 1 plays two steps while 0 plays three: the second row only resets it, nobody takes part.

    Its two steps, rewards 10 and 30, follow one another in slots 1 and 3.
    """
    buffer = make_buffer(buffer_class, 8, 2, 1, 2)
    valid = [[[1], [1]], [[1], [0]], [[1], [1]]]
    fill(buffer, [[[1], [10]], [[2], [0]], [[4], [30]]], [[[0], [1]], [[0], [0]], [[0], [0]]], valid=valid)
    assert buffer.sizes.tolist() == [3, 2]
    batch = buffer.get(np.array([0, 2, 4, 1, 3]))
    close(batch.rewards[:, 0], [2, 4, 4, 10, 30])
    close(batch.share_obs[:, 0], [0, 2, 4, 1, 5])


CHECKS = {OffPolicyBufferEP: [check_ep, check_wrap, check_rows_that_reset], OffPolicyBufferFP: [check_fp]}


@pytest.mark.parametrize("buffer_class", CHECKS)
def test_buffers_by_hand(buffer_class):
    for check in CHECKS[buffer_class]:
        check(buffer_class)


def test_what_restarts_is_cut():
    """Fails if a sample reaches from an episode that was broken off into the next one, of another environment too.

    Environment 0 restarts after slot 2: 1 + 0.5 * 2 = 2, then nothing; environment 1 goes on: 10 + 5 + 10 = 25.
    """
    buffer = make_buffer(OffPolicyBufferEP, 10, 2, 1, 3)
    buffer.cut(np.array([True, True]))  # of nothing, there is nothing to cut
    fill(buffer, [[[1], [10]], [[2], [10]]], np.zeros((2, 2, 1)))
    buffer.cut(np.array([True, False]))
    fill(buffer, [[[4], [40]]], np.zeros((1, 2, 1)), first=2)
    batch = buffer.get(np.arange(4))
    close(batch.rewards[:, 0], [2, 25, 2, 30])
    close(batch.gammas[:, 0], [0.25, 0.125, 0.5, 0.25])
    assert not batch.terms.any()


@pytest.mark.parametrize("buffer_class", CHECKS)
def test_sample(buffer_class):
    """Fails if what is not stored is drawn, if anything that is stored is not, or if some steps come more often."""
    buffer, rng, G = make_buffer(buffer_class, 12, 2, 2, 1), np.random.default_rng(0), 1
    if buffer_class is OffPolicyBufferFP:
        G = 2
    with pytest.raises(ValueError, match="cannot sample 1 of 0 stored steps"):
        buffer.sample(1, rng)
    valid = np.ones((4, 2, 2))
    valid[1:3, 1] = 0  # environment 0 has stored four steps, environment 1 two: 0 2 4 6 and 1 7
    fill(buffer, np.ones((4, 2, G)), np.zeros((4, 2, G)), valid=valid)
    with pytest.raises(ValueError, match="cannot sample 7 of 6 stored steps"):
        buffer.sample(7, rng)
    drawn = np.concatenate([buffer.sample(6, rng).share_obs[:6, 0] for _ in range(1000)])
    numbers, counts = np.unique(drawn, return_counts=True)
    assert numbers.tolist() == [0, 1, 2, 4, 6, 7] and 900 < counts.min() and counts.max() < 1100
    fill(buffer, np.ones((9, 2, G)), np.zeros((9, 2, G)), first=4)  # full: 12 slots, the last six steps of each
    drawn = np.concatenate([buffer.sample(12, rng).share_obs[:12, 0] for _ in range(100)])
    assert np.unique(drawn).tolist() == list(range(14, 26))


def windows(change):
    """A buffer class whose windows(t, e) is what `change` makes of the arguments and the buffer."""
    return lambda base: type("Faulty", (base,), {"windows": change})


def walk(stops):
    """windows(t, e) that goes on from step to step unless stops(buffer, last, e, g, newest)."""

    def changed(self, t, e):
        g, newest = np.arange(self.streams)[:, None], (self.positions[e] - 1) % self.steps
        last = np.repeat(t[None], self.streams, 0)
        rewards, discounts = self.rewards[last, e, g], np.full(last.shape, self.gamma, np.float32)
        for _ in range(self.n_step - 1):
            goes_on = ~stops(self, last, e, g, newest)
            last = np.where(goes_on, (last + 1) % self.steps, last)
            rewards += goes_on * discounts * self.rewards[last, e, g]
            discounts[goes_on] *= self.gamma
        return rewards, discounts, last

    return windows(changed)


def always_gamma_to_the_n(self, t, e):
    rewards, discounts, last = maddpg.OffPolicyBuffer.windows(self, t, e)
    return rewards, np.full_like(discounts, self.gamma**self.n_step), last


def first_slot_of_next(self, t, e):
    rewards, discounts, last = maddpg.OffPolicyBuffer.windows(self, t, e)
    return rewards, discounts, np.repeat(t[None], self.streams, 0)


def environment_major(base):
    """A buffer whose rows of streams go sample by sample, not stream by stream."""

    def get(self, slots):
        batch = base.get(self, slots)
        names = "share_obs rewards dones valid_transitions terms next_share_obs gammas".split()
        turned = {
            name: getattr(batch, name).unflatten(0, (-1, len(slots))).transpose(0, 1).flatten(0, 1) for name in names
        }
        return batch._replace(**turned)

    return type("Faulty", (base,), {"get": get})


def masks_by_done(base):
    """A buffer that hands over `done` for `term`."""
    return type("Faulty", (base,), {"get": lambda self, slots: (b := base.get(self, slots))._replace(terms=b.dones)})


def stores_all(base):
    """A buffer that also stores rows that reset."""

    def insert(self, *row):
        row = list(row)
        row[6] = [np.ones_like(valid) for valid in row[6]]
        base.insert(self, *row)

    return type("Faulty", (base,), {"insert": insert})


def one_position(base):
    """A buffer in which all environments go on at the same slot."""

    def insert(self, *row):
        base.insert(self, *row)
        self.positions[:] = self.positions.max()

    return type("Faulty", (base,), {"insert": insert})


def mask_of_the_next_episode(base):
    """A buffer that has next what is available now."""
    return type("Faulty", (base,), {"insert": lambda self, *row: base.insert(self, *row[:-1], row[3])})


EP, FP = OffPolicyBufferEP, OffPolicyBufferFP
FAULTY_BUFFERS = {
    "sums beyond the end": (check_ep, walk(lambda b, last, e, g, newest: last == newest)(EP)),
    "sums beyond truncations": (check_ep, walk(lambda b, last, e, g, new: b.terms[last, e, g] | (last == new))(EP)),
    "gamma to the n": (check_ep, windows(always_gamma_to_the_n)(EP)),
    "next of the first step": (check_ep, windows(first_slot_of_next)(EP)),
    "done for term": (check_ep, masks_by_done(EP)),
    "next mask of now": (check_ep, mask_of_the_next_episode(EP)),
    "sums beyond the newest": (check_wrap, walk(lambda b, last, e, g, newest: b.dones[last, e, g])(EP)),
    "stops at the last slot": (
        check_wrap, walk(lambda b, last, e, g, new: b.dones[last, e, g] | (last == new) | (last == b.steps - 1))(EP)),
    "stores rows that reset": (check_rows_that_reset, stores_all(EP)),
    "one position for all": (check_rows_that_reset, one_position(EP)),
    "ends of the environment only": (
        check_fp, walk(lambda b, last, e, g, new: b.dones[last, e].all(-1) | (last == new))(FP)),
    "ends of any agent": (check_fp, walk(lambda b, last, e, g, new: b.dones[last, e].any(-1) | (last == new))(FP)),
    "environment-major": (check_fp, environment_major(FP)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTY_BUFFERS)
def test_faulty_buffers_are_caught(name):
    """Fails if the numbers above could not tell a known mistake from the truth."""
    check, faulty = FAULTY_BUFFERS[name]
    with pytest.raises(AssertionError):
        check(faulty)


# ------------------------------------------------------------------------------- buffers, by a slow, obvious twin


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_buffers_equal_lists_that_forget(seed, num_envs, agents, n_step, fp):
    """Fails if any sample of any slot, after any number of steps, is not what a walk along lists of steps gives."""
    rng, G = np.random.default_rng(seed), agents if fp else 1
    capacity = num_envs * int(rng.integers(2, 7)) + int(rng.integers(num_envs))
    buffer = make_buffer(FP if fp else EP, capacity, num_envs, agents, n_step, 0.9)
    played = [[] for _ in range(num_envs)]
    for t in range(int(rng.integers(1, 15))):
        rewards, ends = rng.normal(size=(1, num_envs, G)), rng.integers(4, size=(1, num_envs, G))
        valid = rng.integers(4, size=(1, num_envs, agents)) > 0
        fill(buffer, rewards, ends < 2, ends < 1, valid, first=t)
        for e in range(num_envs):
            if valid[0, e].any():
                step = dict(number=t * num_envs + e, rewards=rewards[0, e], ends=ends[0, e], valid=valid[0, e])
                played[e] = [*played[e], step][-(capacity // num_envs) :]
    assert buffer.sizes.tolist() == [len(steps) for steps in played]
    for e, steps in enumerate(played):
        begin = (buffer.positions[e] - len(steps)) % buffer.steps
        for k, first in enumerate(steps):
            batch = buffer.get(np.array([(begin + k) % buffer.steps * num_envs + e]))
            close(batch.obs[:, 0, 0], 1000 * np.arange(agents) + first["number"])
            close(batch.valid_transitions[:, 0], first["valid"])
            for g in range(G):
                total, discount, last = 0.0, 1.0, None
                for step in steps[k : k + n_step]:
                    total += discount * step["rewards"][g]
                    discount, last = discount * 0.9, step
                    if step["ends"][g] < 2:
                        break
                close([batch.rewards[g, 0], batch.gammas[g, 0]], [total, discount])
                assert (batch.dones[g, 0], batch.terms[g, 0]) == (last["ends"][g] < 2, last["ends"][g] < 1)
                close(batch.next_share_obs[g], [last["number"] + 0.5])
                close(batch.next_obs[:, g, 0], 1000 * np.arange(agents) + last["number"] + 0.5)
    restored = make_buffer(FP if fp else EP, capacity, num_envs, agents, n_step, 0.9)
    restored.load_state_dict(buffer.state_dict())
    for name in (*buffer.arrays, "positions", "sizes"):
        assert (getattr(restored, name) == getattr(buffer, name)).all(), name


# ---------------------------------------------------------------------------------------------- targets and draws


def check_put_in(put_in):
    """Two agents, one row; they did 1 and 2, and would now do 10 and 20: (10, 2) in the first's turn, then (1, 20)."""
    own, old = torch.tensor([[[10.0]], [[20.0]]]), torch.tensor([[[1.0]], [[2.0]]])
    close(put_in(own, old)[:, 0, :, 0], [[10, 2], [1, 20]])


def check_gumbel_softmax(gumbel_softmax):
    """Logits (0, log 3), noise (1, 0), temperature 2: softmax of (0.5, log(3) / 2) = (1.648721, 1.732051) / 3.380772
    = (0.487676, 0.512324), so the draw is (0, 1): log 3 = 1.0986 is more than 1. The gradient of 5 times its first
    entry is that of 5 times the soft one: 5 / 2 * 0.487676 * (0.512324, -0.512324) = (0.624620, -0.624620).
    """
    logits = torch.tensor([0.0, 3.0]).log().nan_to_num(neginf=0.0).requires_grad_()
    draw = gumbel_softmax(logits, torch.tensor([1.0, 0.0]), 2.0)
    close(draw.detach(), [0, 1])
    (gradient,) = torch.autograd.grad(5 * draw[0], logits)
    close(gradient, [0.624620, -0.624620])


def hard_without_gradient(logits, noise, temperature):
    soft = maddpg.gumbel_softmax(logits, noise, temperature)
    return soft.detach() + 0 * logits


FAULTY = {
    "all at once": (check_put_in, lambda own, old: own.transpose(0, 1).expand(len(own), -1, -1, -1)),
    "others' turns": (check_put_in, lambda own, old: maddpg.put_in(own.flip(0), old).flip(0)),
    "old ones put in": (check_put_in, lambda own, old: maddpg.put_in(old, own)),
    "soft draws": (check_gumbel_softmax, lambda x, g, t: ((x + g) / t).softmax(-1)),
    "no gradient": (check_gumbel_softmax, hard_without_gradient),
    "noise ignored": (check_gumbel_softmax, lambda x, g, t: maddpg.gumbel_softmax(x, 0 * g, t)),
    "temperature ignored": (check_gumbel_softmax, lambda x, g, t: maddpg.gumbel_softmax(x, g, 1.0)),
    "noise not tempered": (check_gumbel_softmax, lambda x, g, t: maddpg.gumbel_softmax(x, t * g, t)),
}


def test_by_hand():
    check_put_in(maddpg.put_in)
    check_gumbel_softmax(maddpg.gumbel_softmax)


@pytest.mark.parametrize("name", FAULTY)
def test_known_mistakes_are_caught(name):
    """Fails if the numbers above could not tell a known mistake from the truth."""
    check, mistake = FAULTY[name]
    with pytest.raises(AssertionError):
        check(mistake)


def test_draws_have_the_probabilities_of_the_softmax():
    """20,000 draws with probabilities 0.25 and 0.75 and one action that is not available: 1 % is three deviations."""
    logits = torch.tensor([0.2, 0.6, 0.2]).log().repeat(20_000, 1)
    logits[:, 2] = -1e9
    noise = torch.as_tensor(maddpg.gumbel(logits.shape, np.random.default_rng(0)))
    for temperature in (0.5, 1.0):
        draws = maddpg.gumbel_softmax(logits, noise, temperature)
        close(draws.mean(0), [0.25, 0.75, 0], 0.01)
    noise = maddpg.gumbel(200_000, np.random.default_rng(1))
    close([noise.mean(), noise.std()], [0.57722, np.pi / 6**0.5], 0.01)
    assert noise.dtype == np.float32 and np.isfinite(noise).all()


# ------------------------------------------------------------------------------------------ a slow, obvious twin

BOXES = spaces.Box(-1, 1, (2,)), spaces.Box(np.float32([0, -5, 1]), np.float32([1, 5, 2]))
CHOICES = spaces.Discrete(2), spaces.Discrete(3, start=5)


def make_agents(kind="box", alike=False, **more):
    """(Agents, Args, optimisers) of two agents who observe two and three numbers, or `alike` two each."""
    args = Args(env_id="none", **{"hidden_sizes": (8, 6), "batch_size": 16, "num_envs": 2} | more)
    act = BOXES if kind == "box" else CHOICES
    second = 5 if alike else 6
    available = maddpg.slices([0, 0] if kind == "box" else [2, 2 if alike else 3], second + 2)
    layout = maddpg.Layout(slice(1, 3), [slice(3, 5), slice(5, 5 + second - 3)], slice(3, second + 2), available)
    if alike:
        layout, act = layout._replace(observations=[slice(3, 5), slice(5, 7)], state=slice(3, 7)), (act[0], act[0])
    agents = Agents(layout, act, args)
    adam = SimpleNamespace(
        actor=maddpg.FusedAdam(agents.actors.flat, 1e-8), critic=maddpg.FusedAdam(agents.critics.flat, 1e-8)
    )
    return agents, args, adam


def random_buffer(agents, args, rng, rows=30):
    """A buffer of random steps; agents die, environments end, and some rows reset."""
    buffer, N, n = maddpg.make_off_policy_buffer(args, agents), args.num_envs, agents.num_agents
    G = buffer.streams
    for _ in range(rows):
        obs = [[rng.normal(size=(N, size)) for size in agents.obs_sizes] for _ in range(2)]
        states = [rng.normal(size=(N, G, agents.state_size)) for _ in range(2)]
        available = [[np.zeros((N, 0))] * n] * 2
        actions = [rng.uniform(-1, 1, (N, size)) for size in agents.action_sizes]
        if agents.discrete:
            available = [[rng.integers(2, size=(N, size)) for size in agents.action_sizes] for _ in range(2)]
            for own in (*available[0], *available[1]):
                own[np.arange(N), rng.integers(own.shape[1], size=N)] = 1
            actions = [np.eye(size)[rng.integers(size, size=N)] for size in agents.action_sizes]
        ends = rng.integers(4, size=(N, G))
        valid = [rng.integers(4, size=(N, 1)) > 0 for _ in range(n)]
        row = states[0], obs[0], actions, available[0], rng.normal(size=(N, G)), ends < 2, valid, ends < 1
        buffer.insert(*row, states[1], obs[1], available[1])
    return buffer


class Twin:
    """MATD3 with a network of plain nn.Linear per agent, agent after agent, torch.optim.Adam, and deep copies."""

    def __init__(self, agents, args, anneal):
        self.agents, self.args, self.n = agents, args, agents.num_agents
        self.actors = [self.mlp(agents.actors, k) for k in range(len(agents.actors.biases[0]))]
        self.critics = [self.mlp(agents.critics, k) for k in range(len(agents.critics.biases[0]))]
        self.target_actors, self.target_critics = copy.deepcopy((self.actors, self.critics))
        self.adam = {}
        for name, nets in (("actor", self.actors), ("critic", self.critics)):
            parameters = [p for net in nets for p in net.parameters()]
            self.adam[name] = torch.optim.Adam(parameters, anneal * getattr(args, f"{name}_learning_rate"))

    @staticmethod
    def mlp(nets, k):
        modules = []
        for weight, bias in zip(nets.weights, nets.biases):
            linear = nn.Linear(*weight.shape[1:])
            linear.weight.data, linear.bias.data = weight[k].detach().T.clone(), bias[k, 0].detach().clone()
            modules += [linear, nn.ReLU()]
        return nn.Sequential(*modules[:-1])

    def act(self, actors, i, obs, available, noise):
        """(What agent i does, as wide as the widest action, the mean square of what its network says)."""
        output = actors[i % len(actors)](obs)
        size, filled = self.agents.action_sizes[i], torch.zeros_like(output)
        if self.agents.discrete:
            logits = torch.where(available[:, :size] > 0, output[:, :size], -1e9)
            soft = ((logits + noise[:, :size]) / self.args.gumbel_temperature).softmax(1)
            hard = nn.functional.one_hot((logits + noise[:, :size]).argmax(1), size)
            filled[:, :size] = hard + soft - soft.detach()
        else:
            filled[:, :size] = torch.tanh(output[:, :size])
            if noise is not None:
                filled[:, :size] = (filled + noise.clamp(-self.args.noise_clip, self.args.noise_clip)).clamp(-1, 1)[
                    :, :size
                ]
        return filled, output.square().mean(1)

    def update(self, batch, number, rng):
        args, n, B = self.args, self.n, batch.obs.shape[1]
        streams, sets = len(batch.rewards) // B, self.agents.critic_sets
        shape = (n, streams * B, max(self.agents.action_sizes))
        noise = [None] * n
        if self.agents.discrete:
            noise = torch.as_tensor(maddpg.gumbel(shape, rng))
        elif args.target_noise:
            noise = torch.as_tensor(args.target_noise * rng.standard_normal(shape, np.float32))
        losses, weights = [], 0.0
        for g in range(streams):
            rows = slice(g * B, (g + 1) * B)
            with torch.no_grad():
                there = [
                    self.act(self.target_actors, i, batch.next_obs[i, rows], batch.next_available_actions[i, rows],
                             noise[i] if noise[i] is None else noise[i][rows])[0]
                    for i in range(n)
                ]  # fmt: skip
                x = torch.cat([batch.next_share_obs[rows], *there], 1)
                future = torch.stack([critic(x)[:, 0] for critic in self.target_critics[g % sets :: sets]]).amin(0)
                y = batch.rewards[rows, 0] + batch.gammas[rows, 0] * torch.where(batch.terms[rows, 0], 0, future)
            x = torch.cat([batch.share_obs[rows], *batch.actions], 1)
            valid = batch.valid_transitions[rows, 0] if streams > 1 else torch.ones(B)
            for critic in self.critics[g % sets :: sets]:
                losses.append(((critic(x)[:, 0] - y) ** 2 * valid).sum())
            weights = weights + valid.sum()
        self.step("critic", sum(losses) / max(weights, 1))
        if number % args.policy_frequency:
            return
        noise = torch.as_tensor(maddpg.gumbel((n, B, shape[2]), rng)) if self.agents.discrete else [None] * n
        losses = []
        for i in range(n):
            together = list(batch.actions)
            together[i], size = self.act(self.actors, i, batch.obs[i], batch.available_actions[i], noise[i])
            states = batch.share_obs[i * B : (i + 1) * B] if streams > 1 else batch.share_obs
            values = self.critics[i % sets](torch.cat([states, *together], 1))[:, 0]
            worth = values - args.output_penalty * size
            losses.append((worth * batch.valid_transitions[i * B : (i + 1) * B, 0]).sum())
        self.step("actor", -sum(losses) / max(batch.valid_transitions.sum(), 1))
        for slow_nets, nets in ((self.target_actors, self.actors), (self.target_critics, self.critics)):
            for slow, fast in zip(slow_nets, nets):
                for p, q in zip(slow.parameters(), fast.parameters()):
                    p.data = self.args.tau * q.data + (1 - self.args.tau) * p.data

    def step(self, name, loss):
        for adam in self.adam.values():
            adam.zero_grad()
        loss.backward()
        if self.args.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.adam[name].param_groups[0]["params"], self.args.max_grad_norm)
        self.adam[name].step()


TWINS = {
    "MATD3": {},
    "MADDPG": {"algorithm": "maddpg"},
    "FP": {"state_type": "FP"},
    "FP, MADDPG": {"state_type": "FP", "algorithm": "maddpg", "critic_hidden_sizes": ()},
    "shared": {"share_policy": True, "alike": True},
    "shared, FP": {"share_policy": True, "alike": True, "state_type": "FP", "n_step": 3},
    "discrete": {"kind": "discrete", "n_step": 2, "gumbel_temperature": 0.7},
    "discrete, FP": {"kind": "discrete", "state_type": "FP", "policy_frequency": 1, "n_step": 3},
    "discrete, shared": {"kind": "discrete", "share_policy": True, "alike": True, "max_grad_norm": 0.1},
    "large penalty": {"output_penalty": 1.0, "kind": "discrete"},
    "short gradients": {"max_grad_norm": 0.1, "critic_hidden_sizes": (5,)},
}


@pytest.mark.parametrize("name", TWINS)
def test_updates_equal_those_of_the_twin(name):
    """Fails if stacking networks, filling up, masking the dead, or the order of the updates changes the algorithm."""
    for seed in range(3):
        agents, args, adam = make_agents(**dict(seed=seed, tau=0.1, actor_learning_rate=1e-2) | TWINS[name])
        rngs = [np.random.default_rng(seed) for _ in range(3)]
        buffer, twin = random_buffer(agents, args, rngs[2]), Twin(agents, args, 0.5)
        for number in range(1, 7):
            batch = buffer.sample(args.batch_size, rngs[2])
            maddpg.update_agents(agents, adam, batch, number, 0.5, args, rngs[0])
            twin.update(batch, number, rngs[1])
        assert rngs[0].bit_generator.state == rngs[1].bit_generator.state
        for kind in ("actors", "critics", "target_actors", "target_critics"):
            for k, other in enumerate(getattr(twin, kind)):
                linears, nets = [m for m in other if isinstance(m, nn.Linear)], getattr(agents, kind)
                assert len(linears) == len(nets.weights)
                for weight, bias, linear in zip(nets.weights, nets.biases, linears):
                    close(weight[k].T.detach(), linear.weight.detach(), 3e-5)
                    close(bias[k, 0].detach(), linear.bias.detach(), 3e-5)


def test_update_by_hand(monkeypatch):
    """Two agents, mu^i(o) = tanh(w^i o), Q(s, a, b) = s + 2 a - 3 b, Q' = 4 s without twin or noise; all biases 0.

    A sample: s = 1, both observe 1, a = 0.5, b = 1, R = 1, k = 2 with gamma 0.5: 0.25, s' = 2, all mu' = 0.
    y = 1 + 0.25 * 4 * 2 = 3. Q = 1 + 1 - 3 = -1, dL/dQ = 2 (-1 - 3) = -8: dL/d(s, a, b, e) = -8 (1, 0.5, 1, 1).
    Adam's first step is lr in each direction: with 0.1, Q becomes 1.1 s + 2.1 a - 2.9 b + 0.1.
    Actors: J = 1/2 ( Q(s, tanh w^1, 1) + Q(s, 0.5, tanh w^2) ), so d(-J)/dw^1 = -2.1 / 2 (1 - tanh(w^1)^2), and for the
    other + 2.9 / 2 (…): each sees the old action of the other.
    """
    agents, args, adam = make_agents(
        alike=True, hidden_sizes=(), algorithm="maddpg", output_penalty=0.0, critic_learning_rate=0.1, tau=0.25
    )
    with torch.no_grad():
        for network in (agents.actors, agents.critics, agents.target_actors, agents.target_critics):
            network.flat.zero_()
        agents.actors.weights[0][0, 0, 0], agents.actors.weights[0][1, 0, 0] = 0.3, -0.2
        agents.critics.weights[0][0, [0, 4, 6], 0] = torch.tensor([1.0, 2.0, -3.0])  # state (4), a (2), b (2)
        agents.target_critics.weights[0][0, 0, 0] = 4.0
    gradients, flat_gradient = [], maddpg.flat_gradient
    monkeypatch.setattr(maddpg, "flat_gradient", lambda *x: gradients.append(flat_gradient(*x)) or gradients[-1])
    one, nothing = torch.ones(1, 1), torch.zeros(2, 1, 0, dtype=torch.bool)
    obs = torch.tensor([[[1.0, 0]], [[1.0, 0]]])
    batch = maddpg.OffPolicyBatch(
        share_obs=torch.tensor([[1.0, 0, 0, 0]]), obs=obs, actions=torch.tensor([[[0.5, 0]], [[1.0, 0]]]),
        available_actions=nothing, rewards=one, dones=~one.bool(), valid_transitions=torch.ones(2, 1),
        terms=~one.bool(), next_share_obs=torch.tensor([[2.0, 0, 0, 0]]), next_obs=obs, next_available_actions=nothing,
        gammas=one / 4,
    )  # fmt: skip
    figures = maddpg.update_agents(agents, adam, batch, 1, 1, args, np.random.default_rng(0))
    close(gradients[0], [-8, 0, 0, 0, -4, 0, -8, 0, -8])
    squashed = np.tanh([0.3, -0.2])
    slopes = np.array([-2.1, 2.9]) / 2 * (1 - squashed**2)
    close(gradients[1], [slopes[0], 0, 0, 0, slopes[1], 0, 0, 0, slopes[0], 0, slopes[1], 0])  # weights, then biases
    values = 1.1 + 2.1 * squashed[0] - 2.9 + 0.1, 1.1 + 2.1 * 0.5 - 2.9 * squashed[1] + 0.1
    close(figures, [16, -1, -np.mean(values)])
    close(agents.target_critics.weights[0][0, [0, 4], 0].detach(), [4 + 0.25 * (1.1 - 4), 0.25 * 2.1])


def test_nobody_learns_from_what_the_dead_did():
    """Fails if an agent's actor, or with FP its critic, changes with what happened in steps that it took no part in."""
    for kind, state_type in (("box", "EP"), ("box", "FP"), ("discrete", "FP")):
        weights = []
        for garbage in (False, True):
            agents, args, adam = make_agents(kind, state_type=state_type, policy_frequency=1)
            buffer = random_buffer(agents, args, np.random.default_rng(0))
            dead = buffer.valid_transitions == 0
            assert dead[: buffer.sizes.min()].any()
            if garbage:
                buffer.obs[dead] += 3
                if state_type == "FP":
                    buffer.rewards[dead] += 77
                    buffer.share_obs[dead] -= 5
            rng = np.random.default_rng(1)
            for number in (1, 2):
                maddpg.update_agents(agents, adam, buffer.sample(40, rng), number, 1, args, rng)
            weights.append(torch.cat([agents.actors.flat, agents.critics.flat]).clone())
        assert torch.equal(*weights), (kind, state_type)


# ---------------------------------------------------------------------------------------------- acting, exploring


def rows_of(agents, rng, N=20):
    """Random rows of a TeamEnv with this layout, everybody alive; of the choices, some are not available."""
    layout = agents.layout
    rows = rng.normal(size=(N, max(layout.available[-1].stop, layout.state.stop))).astype(np.float32)
    rows[:, layout.alive] = 1
    for part in layout.available:
        rows[:, part] = rng.integers(2, size=rows[:, part].shape)
        rows[:, part.start : part.stop][:, :1] = 1
    return rows


@pytest.mark.parametrize("kind", ["box", "discrete"])
@pytest.mark.parametrize("share", [False, True])
def test_numpy_and_torch_agree(kind, share):
    """Fails if acting and learning compute different actions, also once weights have changed; or leave their spaces."""
    agents, args, adam = make_agents(kind, alike=share, share_policy=share, policy_frequency=1)
    rng = np.random.default_rng(0)
    buffer = random_buffer(agents, args, rng)
    for number in (1, 2):
        maddpg.update_agents(agents, adam, buffer.sample(16, rng), number, 1, args, rng)
        rows = rows_of(agents, rng)
        obs, available = agents.views(rows)
        outputs = agents.outputs(obs)
        x = torch.as_tensor(maddpg.pad(obs)).transpose(0, 1)
        mask = torch.as_tensor(maddpg.pad(available)).transpose(0, 1)
        sure = SimpleNamespace(standard_exponential=lambda shape, dtype: np.ones(shape, dtype))  # noise of 0
        chosen = agents.choose(agents.actors, x, mask, sure)[0].detach().transpose(0, 1)
        for i, size in enumerate(agents.action_sizes):
            close(agents.best(outputs, available)[:, i, :size], chosen[:, i, :size], 1e-5)
            assert not chosen[:, i, size:].any()
        for i, (actions, space) in enumerate(zip(agents.act(rows), agents.action_spaces)):
            assert all(space.contains(action) for action in actions)
            if kind == "discrete":
                assert (available[i][np.arange(20), actions - space.start] == 1).all()


def test_actions_are_stretched_to_the_bounds_of_each_agent():
    """-1 -> low, 0 -> the middle, 1 -> high; one-hot -> the choice, from the space's start on."""
    agents, _, _ = make_agents()
    first, second = agents.to_env(np.stack([np.full((2, 3), x) for x in (-1, 0, 1)]))
    close(first, [[-1, -1], [0, 0], [1, 1]])
    close(second, [[0, -5, 1], [0.5, 0, 1.5], [1, 5, 2]])
    agents, _, _ = make_agents("discrete")
    first, second = agents.to_env(np.array([[[0, 1, 0], [0, 0, 1]], [[1, 0, 0], [1, 0, 0]]]))
    assert first.tolist() == [1, 0] and second.tolist() == [7, 5]


def explorer(kind, **more):
    agents, args, _ = make_agents(kind, learning_starts=10, **more)
    run = SimpleNamespace(step=10, obs=rows_of(agents, np.random.default_rng(0), 3))
    return agents, run, args


def test_exploration_with_noise():
    """Fails if the first actions are not uniform, or the noise has not the given deviation, or leaves the bounds."""
    agents, run, args = explorer("box", exploration_noise=0.25)
    agents.actors.flat.zero_()
    rng = np.random.default_rng(0)
    drawn = np.array([maddpg.explore_together(agents, run, args, rng) for _ in range(2000)])
    close(drawn.std((0, 1)), np.full((2, 3), 0.25), 0.01)
    assert abs(np.corrcoef(drawn[:, 0, 0, 0], drawn[:, 0, 1, 0])[0, 1]) < 0.06  # agents differ, and environments
    assert abs(np.corrcoef(drawn[:, 0, 0, 0], drawn[:, 1, 0, 0])[0, 1]) < 0.06
    run.step = 9
    drawn = np.array([maddpg.explore_together(agents, run, args, rng) for _ in range(500)])
    close(np.quantile(drawn, [0, 0.25, 0.5, 0.75, 1]), [-1, -0.5, 0, 0.5, 1], 0.06)
    agents, run, args = explorer("box", exploration_noise=9.0)
    assert np.abs(maddpg.explore_together(agents, run, args, rng)).max() == 1


def test_exploration_by_draws():
    """Fails if discrete actions are not drawn from the softmax of what is available, or, at first, evenly from that."""
    agents, run, args = explorer("discrete")
    agents.actors.flat.zero_()
    with torch.no_grad():
        agents.actors.biases[-1][1, 0] = torch.tensor([0.2, 0.6, 0.2]).log()
    run.obs[:, agents.layout.available[1]] = [1, 1, 0]
    rng = np.random.default_rng(0)
    for step, expected in ((10, [0.25, 0.75, 0]), (9, [0.5, 0.5, 0])):
        run.step = step
        drawn = np.concatenate([maddpg.explore_together(agents, run, args, rng) for _ in range(3000)])
        close(drawn[:, 1].mean(0), expected, 0.02)
        assert (drawn.sum(2) == 1).all() and not drawn[:, 0, 2].any()  # agent 0 has two choices only


# ------------------------------------------------------------------------------------------------- what is stored


class Played:
    """Agents, environments and a buffer after some random steps of an environment."""

    def __init__(self, env_id, steps, **more):
        args = Args(env_id=env_id, **{"num_envs": 1, "learning_starts": 10**9, "batch_size": 16, "seed": 0} | more)
        self.args, self.envs = args, maddpg.make_envs(args, args.num_envs)
        self.agents = maddpg.make_agent(args, self.envs)
        self.buffer, rng = maddpg.make_off_policy_buffer(args, self.agents), np.random.default_rng(0)
        N = args.num_envs
        self.run = SimpleNamespace(step=0, episodes=[], reset_rows=np.zeros(N, bool), returns=np.zeros(N))
        self.run.obs, _ = self.envs.reset(seed=0)
        self.rows = []
        for _ in range(steps):
            self.rows.append((self.run.obs, self.run.reset_rows))
            maddpg.play_together(self.agents, self.envs, self.buffer, self.run, args, rng)

    def stored(self, name, env=0):
        return getattr(self.buffer, name)[: self.buffer.sizes[env], env]


SCRIPTS = [
    {"a": [1, "terminated"], "b": [2, "truncated"]},
    {"a": [3, "truncated"], "b": [1, "terminated"]},
    {"a": [2, "terminated"], "b": [2, "terminated"]},
]


@pytest.mark.parametrize("state_type", ["EP", "FP"])
def test_deaths_and_ends_are_stored(state_type):
    """Rewards are 1 and 2 for who takes part. A constructor has reset the environment: the second script comes first.

    Steps 1-3: b terminates in the first, a is truncated in the third. Then two steps after which both terminate, then
    two: a terminates in the first, b is truncated in the second. The rows in between, which reset, are not stored.
    """
    kwargs = json.dumps({"scripts": SCRIPTS, "masks": {"a": [0, 1, 1], "b": [1, 1, 1]}})
    played = Played("mappo_envs:Scripted", 10, env_kwargs=kwargs, state_type=state_type)
    assert played.run.step == 7 and [step for step, _ in played.run.episodes] == [3, 5, 7]
    assert [total for _, total in played.run.episodes] == [5, 6, 5]
    close(played.stored("valid_transitions"), [[1, 1], [1, 0], [1, 0], [1, 1], [1, 1], [1, 1], [0, 1]])
    if state_type == "EP":
        close(played.stored("rewards")[:, 0], [3, 1, 1, 3, 3, 3, 2])
        close(played.stored("dones")[:, 0], [0, 0, 1, 0, 1, 0, 1])
        close(played.stored("terms")[:, 0], [0, 0, 0, 0, 1, 0, 0])
        close(played.stored("share_obs")[:, 0], [[1, t] for t in range(3)] + [[2, 0], [2, 1], [3, 0], [3, 1]])
    else:
        close(played.stored("rewards"), [[1, 2], [1, 0], [1, 0], [1, 2], [1, 2], [1, 2], [0, 2]])
        close(played.stored("dones"), [[0, 1], [0, 1], [1, 1], [0, 0], [1, 1], [1, 0], [1, 1]])
        took_part = played.stored("valid_transitions") > 0
        terms = np.array([[0, 1], [0, 9], [0, 9], [0, 0], [1, 1], [1, 0], [9, 0]])
        close(played.stored("terms")[took_part], terms[took_part])
        close(played.stored("share_obs")[:3, 0], [[10, 1, 0], [11, 1, 1], [12, 1, 2]])  # own observation, then state
        close(played.stored("share_obs")[:3, 1], [[110, 1, 0], [0, 0, 0], [0, 0, 0]])  # zeros once dead
        close(played.stored("next_share_obs")[:3, 0], [[11, 1, 1], [12, 1, 2], [13, 1, 3]])
    # Observations are 100 for agent b, 10 per episode, 1 per step; zero for the dead.
    close(played.stored("obs")[..., 0], [[10, 110], [11, 0], [12, 0], [20, 120], [21, 121], [30, 130], [0, 131]])
    next_obs = [[11, 111], [12, 0], [13, 0], [21, 121], [22, 122], [31, 131], [0, 132]]
    took_part = np.array(next_obs) * (played.stored("next_obs")[..., 0] != 0)
    close(played.stored("next_obs")[..., 0], took_part)
    assert (took_part[:, 0] > 0).sum() >= 5 and (took_part[[2, 4, 6]].any(1)).all()  # final observations are there
    masks = played.stored("available_actions")
    assert (masks[played.stored("valid_transitions")[:, 0] > 0, 0] == [0, 1, 1]).all()


@pytest.mark.parametrize("state_type", ["EP", "FP"])
def test_a_death_is_of_one_environment(state_type):
    """Two environments of two agents; in the first step these are done: [[1, 0], [1, 1]]. Environment 1 resets in the
    second, and in what is stored next all of its agents take part: [[0, 1], [1, 1]], in slots 2 and 3 and later 4.

    Fails if the dead come back with another environment's reset, or if a reset row is stored.
    """
    agents, args, _ = make_agents(alike=True, state_type=state_type, learning_starts=10**9)
    buffer, rows = maddpg.make_off_policy_buffer(args, agents), rows_of(agents, np.random.default_rng(0), 2)
    run = SimpleNamespace(step=0, obs=rows, reset_rows=np.zeros(2, bool), returns=np.zeros(2), episodes=[])
    alive, over = [[[0, 1], [1, 1]]] * 3, [[False, True], [False, False], [False, False]]

    def step(actions):
        following = rows.copy()
        following[:, agents.layout.alive] = alive.pop()
        info = {"rewards": np.ones((2, 2)), "terminated": np.array([[True, False], [True, True]])}
        return following, np.ones(2), np.array(over.pop(0)), np.zeros(2, bool), info

    for _ in range(3):
        maddpg.play_together(agents, SimpleNamespace(step=step), buffer, run, args, np.random.default_rng(0))
    assert buffer.sizes.tolist() == [3, 2] and run.step == 5 and run.episodes == [(2, 1.0)]
    close(buffer.valid_transitions[:3, 0], [[1, 1], [0, 1], [0, 1]])
    close(buffer.valid_transitions[:2, 1], [[1, 1], [1, 1]])
    if state_type == "FP":
        close(buffer.dones[:3, 0], [[1, 0], [1, 0], [1, 0]])
        close(buffer.dones[:2, 1], [[1, 1], [0, 0]])
    else:
        close([buffer.dones[:2, 0, 0], buffer.dones[:2, 1, 0]], [[0, 0], [1, 0]])


def test_masks_are_those_of_the_episode():
    """Tic-tac-toe: fails if a player's mask is another's, or that of the next game, or if a move is not legal."""
    played = Played("mappo_envs:tictactoe", 200, num_envs=2)
    assert len(played.run.episodes) > 20 and {total for _, total in played.run.episodes} == {0.0}
    for env in range(2):
        now, then, done = (
            played.stored(name, env) for name in ("available_actions", "next_available_actions", "dones")
        )
        actions = played.stored("actions", env)
        assert ((actions * now).sum(-1) == 1).all() and (actions.sum(-1) == 1).all()
        for t, ended in enumerate(done[:-1, 0]):
            assert (now[t + 1] == then[t]).all() or ended
        begins = np.flatnonzero(np.r_[True, done[:-1, 0]])
        assert (now[begins, 0] == 1).all() and (now[begins, 1] == (np.arange(9) == 0)).all()  # who waits has a no-op
        ends = np.flatnonzero(done[:, 0])
        full_board = then[ends].reshape(len(ends), -1).sum(1)
        assert (full_board < 9).all()  # a new game's mask would have nine moves, and a no-op


def test_what_is_next_is_the_true_successor():
    """Fails if a new episode's first observation is stored as the old one's last, or a truncation as a termination."""
    played = Played(SPREAD, 80, num_envs=2)
    assert played.run.step == 160 - 2 * 3 == played.buffer.sizes.sum()
    for env in range(2):
        obs, next_obs, dones, terms = (played.stored(name, env) for name in ("obs", "next_obs", "dones", "terms"))
        assert not terms.any() and np.flatnonzero(dones[:, 0]).tolist() == [24, 49, 74]
        goes_on = ~dones[:-1, 0]
        close(obs[1:][goes_on], next_obs[:-1][goes_on])
        moved = next_obs[:, :, 2:4] - obs[:, :, 2:4]  # place; the velocity before says how far, in 0.1 s
        close(moved, 0.1 * obs[:, :, :2], 1e-5)
        close(played.stored("share_obs", env)[:, 0], obs.reshape(len(obs), -1))
        close(played.stored("next_share_obs", env)[:, 0], next_obs.reshape(len(obs), -1))
    assert not np.allclose(played.buffer.rewards[:77, 0], played.buffer.rewards[:77, 1])


def test_multiwalker():
    """Fails if walkers that fall are asked for actions, come back too early, or make the networks learn nonsense."""
    env = dict(num_envs=2, state_type="FP", n_step=3, env_kwargs='{"terminate_on_fall": false, "max_cycles": 100}')
    played = Played("pettingzoo.sisl.multiwalker_v9", 220, **env)
    agents, args, buffer = played.agents, played.args, played.buffer
    assert len(played.run.episodes) >= 2
    for e in range(2):
        valid, dones, terms = (played.stored(name, e) for name in ("valid_transitions", "dones", "terms"))
        assert (valid.sum(1) < 3).any() and (valid.sum(1) > 0).all()
        over = dones.all(1)
        died = (valid > 0) & dones
        assert (terms[died & ~over[:, None]]).all()  # who falls while others walk on has terminated
        for t in range(len(valid) - 1):  # alive next, if alive now and not done, or if a new episode begins
            expected = np.ones(3) if over[t] else (valid[t] > 0) & ~dones[t]
            close(valid[t + 1], expected)
    adam = SimpleNamespace(
        actor=maddpg.FusedAdam(agents.actors.flat, 1e-8), critic=maddpg.FusedAdam(agents.critics.flat, 1e-8)
    )
    for number in (1, 2):
        batch = buffer.sample(64, np.random.default_rng(number))
        assert maddpg.update_agents(agents, adam, batch, number, 1, args, np.random.default_rng(0))[0].isfinite()


def test_processes_give_the_same_as_one():
    """Fails if --async-envs loses or mixes up anything, FP rewards included."""
    one, other = (Played(SPREAD, 30, num_envs=2, async_envs=x, state_type="FP") for x in (False, True))
    for name in one.buffer.arrays:
        assert (getattr(one.buffer, name)[:30] == getattr(other.buffer, name)[:30]).all(), name
    other.envs.close()


# ---------------------------------------------------------------------------------------------------------- games


GAMES = {  # environment, settings, steps, the least that has to be reached
    "duet, FP": ("maddpg_envs:Duet", {"state_type": "FP"}, 2500, 1.8),
    "solo": ("maddpg_envs:Solo", {}, 2000, 0.8),
    "matrix": ("maddpg_envs:Steep", {}, 1500, 10.0),
    "matrix, MADDPG": ("maddpg_envs:Steep", {"algorithm": "maddpg", "state_type": "FP"}, 1500, 10.0),
    "halfway, n-step": ("maddpg_envs:MeetHalfway", {"n_step": 3}, 4000, -4.0),
    "halfway, dies": ("maddpg_envs:MeetHalfway", {"state_type": "FP", "env_kwargs": '{"dies": true}'}, 4000, -3.0),
    "meet, FP": ("mappo_envs:Meet", {"share_policy": True, "state_type": "FP", "n_step": 2}, 4000, 1.5),
}


def learned(name, tmp_path, **more):
    """(the mean evaluation return of a short training run, the least that it has to be)."""
    game, given, steps, least = GAMES[name]
    args = QUICK | dict(total_timesteps=steps, exploration_noise=0.3, eval_episodes=50, run_dir=str(tmp_path / "run"))
    return maddpg.train(Args(env_id=game, **args | given | more))["eval_return_mean"], least


@pytest.mark.parametrize("name", GAMES)
def test_games_are_solved(name, tmp_path, monkeypatch):
    """Best play: both follow their own sign, 2 for both (0 is worth -0.5), or 1 alone; (2, 0) gives 2 x 5 in the matrix
    game, a safe (1, 1) but 4; who goes to 0 at once loses 1.5 on average, a little less after a death, who stays 22;
    who meets in at most two steps gets 2 x (1 - 0.2) or more."""
    monkeypatch.setattr(maddpg, "draw_curve", lambda *_: None)
    mean, least = learned(name, tmp_path)
    assert mean >= least


# -------------------------------------------------------------------------------------------------------- whole runs


def shell(folder, *flags, code=0):
    """Run `python maddpg_matd3.py flags…` in `folder`, expect the exit code, return the finished process."""
    done = subprocess.run(command(flags), cwd=folder, env=surroundings(), capture_output=True, text=True)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def command(flags):
    return [sys.executable, "maddpg_matd3.py", *map(str, flags)]


def surroundings():
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | own


def metrics(run_dir):
    """The rows of metrics.csv as dicts, without the columns that hold times."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIME_COLUMNS} for row in csv.DictReader(file)]


def flat_state(state, where=""):
    """{path: value} of a nest of dicts and lists."""
    if isinstance(state, dict | list | tuple):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for name, x in items for k, v in flat_state(x, f"{where}/{name}").items()}
    return {where: state}


def assert_same_run(one, other, checkpoint=True):
    """Two finished runs agree in everything but the time they took: figures, weights, generators, buffer, moments."""
    assert metrics(one) == metrics(other) != []
    names = sorted(path.name for path in (one / "models").iterdir())
    assert names == sorted(path.name for path in (other / "models").iterdir())
    for name in (*["checkpoint.pt"] * checkpoint, *(f"models/{name}" for name in names)):
        a, b = (flat_state(torch.load(run / name, weights_only=True)) for run in (one, other))
        assert a.keys() == b.keys()
        for key in a.keys() - {"/seconds"}:
            same = torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key]
            assert same, f"{name}{key}"


@pytest.fixture
def alone(tmp_path):
    """An empty folder with nothing but maddpg_matd3.py in it."""
    (tmp_path / "maddpg_matd3.py").write_bytes(Path(maddpg.__file__).read_bytes())
    return tmp_path


@pytest.fixture
def main(monkeypatch, tmp_path):
    """main(*flags): what `python maddpg_matd3.py flags…` does in the empty folder tmp_path, in this process."""

    def call(*flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["maddpg_matd3.py", *map(str, flags)])
        try:
            maddpg.main()
        except SystemExit as stop:
            return stop.code or 0
        return 0

    return call


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a short finished run. Only to be read."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "maddpg_matd3.py").write_bytes(Path(maddpg.__file__).read_bytes())
    flags = ["--total-timesteps", 500, "--eval-every", 200, *TINY, "--capture-video", "--run-dir", "run"]
    done = shell(folder, *flags)
    (folder / "run/stdout.txt").write_text(done.stdout)
    return folder / "run"


def test_copied_alone_it_leaves_a_complete_run_folder(finished):
    """Fails if the script imports a sibling, or if a part of the run folder or of the last two lines is missing."""
    lines = (finished / "stdout.txt").read_text().splitlines()
    final = json.loads((finished / "summary.json").read_text())
    assert f"{final['eval_return_mean']:.1f} ±" in lines[-2] and "learning_curve.png" in lines[-1]
    rows = metrics(finished)
    losses = ["critic_loss", "value_mean", "actor_loss"]
    assert list(rows[0]) == ["step", "return_mean", "episodes", "updates", *losses]
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(set(steps)) and steps[-1] == final["global_step"] >= 500 and final["eval_episodes"] == 2
    for row in rows:  # one update per four steps, of all environments together, once learning has started
        assert int(row["updates"]) == max(int(row["step"]), 60) // 4 - 60 // 4
    assert all(np.isfinite(float(rows[-1][name])) for name in losses)
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    assert state["buffer"]["sizes"].sum() == state["step"] and state["envs_file"]
    assert len(state["evaluations"]) == 3 == len(list((finished / "videos").glob("*.mp4")))
    for part in ("actors", "critics", "target_actors", "target_critics"):
        assert any(name.startswith(f"{part}.") for name in state["agent"]), part
    assert (finished / "learning_curve.png").stat().st_size > 10_000
    kwargs = json.loads((finished / "config.json").read_text())["args"]["env_kwargs"]
    assert json.loads(kwargs) == {"continuous_actions": True}  # TUNED: the paper's actions are continuous


def test_evaluate(finished, main, capsys):
    """Fails if --evaluate or load play other weights than the run's last evaluation did."""
    assert main("--evaluate", finished, "--model", "last") == 0
    final = json.loads((finished / "summary.json").read_text())
    assert f"{final['eval_return_mean']:.2f} ± {final['eval_return_std']:.2f}" in capsys.readouterr().out
    agents = maddpg.load(finished)
    one, two = (maddpg.evaluate(agents, agents.args, 3, seed=5) for _ in range(2))
    assert one == two and one[0] < 0


def kill_and_resume(folder, flags, kills, rng):
    """Kill -9 a run `kills` times, each time at a random moment after its next checkpoint, and resume it each time."""
    checkpoint, argv, done, stamp = folder / "killed/checkpoint.pt", [*flags, "--run-dir", "killed"], 0, None
    while True:
        pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        process = subprocess.Popen(command(argv), cwd=folder, env=surroundings(), **pipes)
        try:
            if done < kills:
                while process.poll() is None and (not checkpoint.exists() or checkpoint.stat().st_mtime_ns == stamp):
                    time.sleep(0.002)
                time.sleep(rng.uniform(0, 0.2))
                process.kill()
            _, err = process.communicate()
        finally:
            process.kill()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, err
            return done
        done, stamp, argv = done + 1, checkpoint.stat().st_mtime_ns, ["--resume", "killed", "--no-progress"]


def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(alone):
    """Fails if a checkpoint lacks anything that the rest of the run depends on, or is ever found half written."""
    flags = [*TINY, "--total-timesteps", 2000, "--checkpoint-every", 100, "--eval-every", 900, "--n-step", 3]
    flags += ["--state-type", "FP", "--buffer-size", 400, "--max-episode-steps", 11, "--anneal-lr"]
    shell(alone, *flags, "--run-dir", "unbroken")
    assert kill_and_resume(alone, flags, 2, random.Random(0)) >= 1
    assert_same_run(alone / "unbroken", alone / "killed")


RUNS = {
    "listener": ["--env-id", "mpe2.simple_speaker_listener_v4", "--max-grad-norm", 0.5],
    "discrete": ["--env-kwargs", "{}", "--share-policy", "--algorithm", "maddpg", "--n-step", 2],
}


@pytest.mark.parametrize("name", RUNS)
def test_stopped_and_prolonged_is_the_same(name, main, tmp_path):
    """Fails if a resumed run does not go on exactly: 300 steps and 300 more are 600; agents of different kinds too."""
    flags = [*TINY, *RUNS[name], "--eval-every", 300, "--checkpoint-every", 100]
    assert main(*flags, "--total-timesteps", 600, "--run-dir", "whole") == 0
    assert main(*flags, "--total-timesteps", 300, "--run-dir", "parts") == 0
    assert main("--resume", "parts", "--total-timesteps", 600) == 0
    a, b = (
        flat_state(torch.load(tmp_path / run / "checkpoint.pt", weights_only=True)["agent"])
        for run in ("whole", "parts")
    )
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_episodes_that_restart_are_cut(main, tmp_path, capsys, monkeypatch):
    """Fails if, where environments cannot be carried over, a sample reaches from before the restart to after it."""
    flags = [*TINY, "--env-id", "maddpg_envs:MeetHalfway", "--n-step", 3, "--run-dir", "run"]
    assert main(*flags, "--total-timesteps", 100) == 0
    before = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["buffer"]
    newest = before["sizes"] - 1
    assert not before["dones"][newest, range(3)].all()  # episodes are broken off
    assert main("--resume", "run", "--total-timesteps", 200) == 0
    assert "episodes restart" in capsys.readouterr().out
    after = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["buffer"]
    assert after["dones"][newest, range(3)].all() and not after["terms"].any()


def test_same_seed_same_run(finished, main, tmp_path):
    """Fails if anything random is not seeded, depends on the process's generators, or if the seed does nothing."""
    torch.manual_seed(123)
    np.random.seed(456)
    flags = "--config", finished / "config.json", "--no-capture-video"
    assert main(*flags, "--run-dir", "again") == 0
    assert_same_run(finished, tmp_path / "again")
    assert main(*flags, "--run-dir", "other", "--seed", 2) == 0
    assert metrics(finished) != metrics(tmp_path / "other")


def test_algorithm_sets_three_flags_and_what_is_given_wins(finished):
    """Fails if MATD3 is not MADDPG plus three settings, or if they cannot be mixed."""
    three = lambda **given: [getattr(Args(**given), name) for name in ("twin_q", "target_noise", "policy_frequency")]
    assert three() == three(algorithm="matd3") == [True, 0.2, 2]
    assert three(algorithm="maddpg") == [False, 0.0, 1]
    assert three(algorithm="maddpg", twin_q=True) == [True, 0.0, 1]
    config = str(finished / "config.json")
    assert (three(config=config), three(config=config, algorithm="maddpg")) == ([True, 0.2, 2], [False, 0.0, 1])
    assert Args(config=config, algorithm="maddpg").batch_size == 16


OPTIONS = {
    "MADDPG": {"algorithm": "maddpg"}, "twin": {"twin_q": False}, "noise": {"target_noise": 0.5},
    "clip": {"noise_clip": 0.1}, "frequency": {"policy_frequency": 3}, "FP": {"state_type": "FP"},
    "actor's rate": {"actor_learning_rate": 1e-4}, "critic's rate": {"critic_learning_rate": 1e-4},
    "annealed": {"anneal_lr": True}, "environments": {"num_envs": 2}, "capacity": {"buffer_size": 99},
    "batch": {"batch_size": 20}, "start": {"learning_starts": 40}, "training": {"train_frequency": 8},
    "steps": {"gradient_steps": 2}, "discount": {"gamma": 0.5}, "n": {"n_step": 2}, "tau": {"tau": 0.5},
    "exploration": {"exploration_noise": 0.9}, "penalty": {"output_penalty": 1.0}, "sizes": {"hidden_sizes": (9,)},
    "critic's sizes": {"critic_hidden_sizes": (9,)}, "norm": {"max_grad_norm": 1e-2},
    "return": {"max_episode_return": -100}, "length": {"max_episode_steps": 3},
}  # fmt: skip


def test_every_option_does_something(tmp_path, monkeypatch):
    """Fails if a flag is taken and ignored: each has to change the weights that a short run ends with."""
    monkeypatch.setattr(maddpg, "draw_curve", lambda *_: None)
    monkeypatch.setattr(maddpg, "evaluate", lambda *_, **__: (0.0, 0.0))
    seen, plain = {}, dict(env_id="maddpg_envs:MeetHalfway", total_timesteps=240, eval_episodes=1, progress=False)
    plain |= dict(batch_size=16, hidden_sizes=(8,), learning_starts=60, num_envs=3, policy_frequency=2)
    discrete = plain | dict(env_id="mappo_envs:Meet")
    runs = {"plain": plain, "discrete": discrete, "shared": discrete | {"share_policy": True}}
    runs |= {"smallest buffer": discrete | {"buffer_size": 18}, "temperature": discrete | {"gumbel_temperature": 2.0}}
    runs |= {name: plain | option for name, option in OPTIONS.items()}
    for name, options in runs.items():
        maddpg.train(Args(**options, run_dir=str(tmp_path / name)))
        state = torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["agent"]
        seen[name] = torch.cat([x.flatten() for x in state.values()]).numpy().tobytes()
    same = [(a, b) for a, b in itertools.combinations(seen, 2) if seen[a] == seen[b]]
    assert not same


def test_stop_at_return_waits_for_an_evaluation(tmp_path, monkeypatch):
    """Fails if training episodes, which explore, decide; or if the run goes on after an evaluation that is enough."""
    monkeypatch.setattr(maddpg, "draw_curve", lambda *_: None)
    options = dict(eval_every=300, eval_episodes=10, stop_at_return=9.0, total_timesteps=9000)
    final = maddpg.train(Args(env_id="maddpg_envs:Steep", **QUICK | options, run_dir=str(tmp_path / "run")))
    evaluations = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["evaluations"]
    assert [mean >= 9 for _, mean, _ in evaluations] == [False] * (len(evaluations) - 1) + [True]
    assert final["global_step"] == evaluations[-1][0] < 5000


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--env-id mpe2.simple_spred_v3", "did you mean mpe2.simple_spread_v3"),
        ("--env-id CartPole-v1", "cannot make CartPole-v1"),
        ("--env-id nosuchpackage.env", "pip install nosuchpackage"),
        ("--env-id mpe2.simple_speaker_listener_v4 --share-policy", "--no-share-policy"),
        ("--env-id maddpg_envs:Unbounded", "bounded Box"),
        ("--env-id maddpg_envs:Uneven", "of all agents alike"),
        ("--env-kwargs [1]", "not a JSON object"),
        ("--algorithm td3", "algorithm"),
        ("--state-type XX", "state-type"),
        ("--n-step 0", "n_step must lie between"),
        ("--gumbel-temperature 0", "gumbel_temperature"),
        ("--tau 1.5", "tau must lie between 0 and 1"),
        ("--buffer-size 10 --batch-size 11", "buffer_size = 10"),
        ("--buffer-size 100000000000000", "buffer_size"),
        ("--device nothing", "device nothing"),
        ("--env-id mappo_envs:Matrix --capture-video", "no render mode rgb_array"),
        ("--resume nowhere", "nowhere/config.json"),
        ("--evaluate nowhere", "nowhere/config.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, words, main, capsys, tmp_path):
    """Fails if bad input ends in a traceback, in another exit code, or in files."""
    code, err = main(*flags.split()), capsys.readouterr().err
    assert code == 2 and words in err and err.count("\n") == 1 and "Traceback" not in err, err
    assert list(tmp_path.iterdir()) == []


def test_resume_refuses_another_algorithm(finished, main, capsys):
    """Fails if a flag that changes the algorithm is taken, or ignored without a word, when a run is resumed."""
    for flag in ("--algorithm maddpg", "--n-step 2", "--state-type FP"):
        assert main("--resume", finished, *flag.split()) == 2
        assert flag.split()[0][2:].replace("-", "_") in capsys.readouterr().err


@pytest.mark.parametrize("field", ["observation", "reward"])
def test_nan_ends_the_run_with_a_line_that_says_where(field, main, capsys, tmp_path):
    """Fails if NaN is learnt from, or if the step or the field is not named."""
    flags = ["--env-id", "mappo_envs:Bad", "--env-kwargs", json.dumps({"field": field}), *TINY, "--num-envs", 1]
    assert main(*flags, "--run-dir", "run") == 2
    err = capsys.readouterr().err
    assert f"mappo_envs:Bad, step {3 if field == 'observation' else 4}: {field}" in err and err.count("\n") == 1


def test_loss_that_is_not_finite_ends_the_run(main, capsys, tmp_path):
    """Fails if weights that have become NaN are saved or trained on."""
    flags = [*TINY, "--critic-learning-rate", "1e30", "--total-timesteps", 600, "--run-dir", "run"]
    assert main(*flags) == 2
    assert "loss" in capsys.readouterr().err
    state = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["agent"]
    assert all(torch.isfinite(weight).all() for weight in state.values())
