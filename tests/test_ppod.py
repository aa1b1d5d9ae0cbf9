"""ppod.py: demos and what is done with them, by hand; the GRU; replays in rollouts; whole runs.

The `check_…` functions take the module that they judge, so that faulty versions of ppod.py can be handed to them: each
of these has to be caught. What ppod.py shares with ppo.py, character for character, is tested there.
"""

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
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import ppod_envs
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from probe_envs import Walk

import ppod
from ppod import Args, Demo, PPODBuffer, SequenceBuffer, UserError, load, train

SOURCE = Path(ppod.__file__).read_text()
LINE, TWO = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)
SMALL = dict(num_envs=4, num_steps=32, num_minibatches=2, gru_size=8, chunk_length=8, hidden_sizes=(8,))
SMALL |= dict(eval_episodes=2, progress=False)
SMALL_FLAGS = "--num-envs 4 --num-steps 32 --num-minibatches 2 --gru-size 8 --chunk-length 8 --hidden-sizes 8".split()
SMALL_FLAGS += "--eval-episodes 2 --no-progress".split()


@pytest.fixture(autouse=True)
def one_thread():
    """`train` sets the number of threads of this process: put it back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def mutant(*replacements):
    """ppod.py as a module of its own, with each (old, new) text replaced; what is replaced must be there once."""
    source = SOURCE
    for old, new in replacements:
        assert source.count(old) == 1, f"{source.count(old)} times: {old}"
        source = source.replace(old, new)
    module = types.ModuleType("mutant")
    module.__file__ = ppod.__file__
    sys.modules["mutant"] = module  # dataclasses look there
    exec(compile(source, "mutant", "exec"), module.__dict__)
    return module


def caught(check, *replacements):
    """The check has to fail for ppod.py with these replacements."""
    with np.errstate(all="ignore"), pytest.raises((AssertionError, ValueError)):
        check(mutant(*replacements))


class Draws:
    """Stands for a generator whose `random()` gives the planned numbers; choices within a list are the first."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0)

    def integers(self, n):
        return 0

    def choice(self, n, p):
        return 0


def make_demo(module=ppod, length=3, total=1.0, human=False, max_value=0.0, terminated=True, first=0.0):
    """A Demo in LINE and TWO: observations first, first + 1, …; only the last reward is not 0."""
    obs = np.stack([first + np.arange(length + 1), np.arange(length + 1) == 0], 1).astype(np.float32)
    rewards = np.zeros(length, np.float32)
    rewards[-1] = total
    actions = np.arange(length)[:, None] % 2
    return module.Demo(obs, actions, rewards, terminated, total, human, max_value)


def store(module=ppod, num_envs=1, reward=(), value=(), **args):
    """A PPODBuffer that holds these demos."""
    demos = module.PPODBuffer(module.Args(env_id="Nothing-v0", **args), num_envs, LINE, TWO)
    for name, listed in (("reward_demos", reward), ("value_demos", value)):
        for demo in listed:
            demos.add(getattr(demos, name), demo)
    return demos


def rollout_of(episodes, module=ppod, steps=None):
    """A SequenceBuffer with one slot that shows `episodes`: (rewards, values, end), one after the other.

    end is "terminated", "truncated" or "" (unfinished). Observation t of episode k is 100 k + t.
    """
    rows = []  # obs, reward, terminated, truncated, reset row, value
    for k, (rewards, values, end) in enumerate(episodes):
        for t, (reward, value) in enumerate(zip(rewards, values)):
            over = t + 1 == len(rewards)
            rows.append((100 * k + t, reward, over and end == "terminated", over and end == "truncated", False, value))
        if end:
            rows.append((100 * k + len(rewards), 0, False, False, True, -7))
    steps = steps or len(rows)
    buffer = module.SequenceBuffer(steps, 1, spaces.Box(-np.inf, np.inf, (2,)), TWO, 0, 1)
    for obs, reward, terminated, truncated, reset_row, _ in rows:
        following = [[obs + 1, 0]]
        buffer.add([[obs, 0]], [[0]], [reward], [terminated], [truncated], [reset_row], [0], following)
    for t, (obs, *_) in enumerate(rows[1:]):
        buffer.obs[t + 1] = [[obs, 0]]
    buffer.values = torch.tensor([[row[-1]] for row in rows] + [[0.0]], dtype=torch.float32)
    return buffer


# ------------------------------------------------------------------------------------------- what comes next, by hand


def check_source(m):
    """rho = 0.1, phi = 0.3: u < 0.1 is a reward demo, u < 0.4 a value demo; an empty list means the environment."""
    draws = 0.05, 0.1, 0.39, 0.4, 0.99
    for reward, value, expected in (
        ([make_demo(m)], [make_demo(m)], "reward value value env env"),
        ([make_demo(m)], [], "reward env env env env"),
        ([], [make_demo(m)], "env value value env env"),
    ):
        demos, rng = store(m, reward=reward, value=value, rho=0.1, phi=0.3), Draws(*draws)
        kinds = {id(d): "reward" for d in demos.reward_demos} | {id(d): "value" for d in demos.value_demos}
        drawn = [demos.sample_demo(rng) for _ in draws]
        assert [kinds.get(id(demo), "env") for demo in drawn] == expected.split()


def test_source():
    """Fails if an empty list's share goes to the other list, or if the borders are off."""
    check_source(ppod)
    caught(check_source, ("if u < self.rho + self.phi and self.value_demos", "if u < self.phi and self.value_demos"))
    caught(check_source, ("if u < self.rho:", "if u < self.rho and self.reward_demos:"))


def check_priority(m):
    """Values 1, 2, 4: alpha 1 gives 1/7, 2/7, 4/7; alpha 2 gives 1/21, 4/21, 16/21; alpha 0 a third each.

    With -3 and 1 and alpha 2 the bare formula prefers the worst, 9/10 to 1/10; with zeros it divides 0 by 0.
    """
    p = m.replay_probabilities
    np.testing.assert_allclose(p([1, 2, 4], 1), np.array([1, 2, 4]) / 7)
    np.testing.assert_allclose(p([1, 2, 4], 2), np.array([1, 4, 16]) / 21)
    np.testing.assert_allclose(p([1, 2, 4], 0), [1 / 3] * 3)
    np.testing.assert_allclose(p([0, 0], 10), [0.5, 0.5])
    np.testing.assert_allclose(p([-2, -2, -2], 10), [1 / 3] * 3)
    np.testing.assert_allclose(p([-3, 1], 2), [0, 1])
    np.testing.assert_allclose(p([-3, -2, -1], 1), [0, 1 / 3, 2 / 3])
    np.testing.assert_allclose(p([1e30, 1e30], 100), [0.5, 0.5])


def test_priority():
    """Fails for a priority that ranks very negative values first, divides 0 by 0, or overflows."""
    check_priority(ppod)
    caught(check_priority, ("v = v - min(v.min(), 0)", "pass"))
    caught(check_priority, ("v / v.max() if v.max() > 0 else np.ones_like(v)", "v"))
    caught(check_priority, ("if v.max() > 0 else np.ones_like(v)", ""))


values = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=8)


@given(values, st.floats(0, 20), st.data())
def test_priority_is_a_distribution_that_follows_the_value(v, alpha, data):
    """Fails if p is negative, not finite, does not sum to 1, or falls when a value rises."""
    p = ppod.replay_probabilities(v, alpha)
    assert np.isfinite(p).all() and (p >= 0).all() and p.sum() == pytest.approx(1)
    assert all(p[i] <= p[j] + 1e-12 for i in range(len(v)) for j in range(len(v)) if v[i] <= v[j])
    i = data.draw(st.integers(0, len(v) - 1))
    raised = [*v]
    raised[i] += data.draw(st.floats(0, 1e6))
    assert ppod.replay_probabilities(raised, alpha)[i] >= p[i] - 1e-12


def test_value_demos_are_drawn_by_priority_and_reward_demos_uniformly():
    """1000 draws each; alpha = 1, values 1 and 3: a quarter and three quarters. Four standard deviations are 55, 63."""
    rng = np.random.default_rng(1)
    low, high = make_demo(max_value=1), make_demo(max_value=3)
    demos = store(value=[low, high], rho=0.0, phi=1.0, alpha=1.0)
    assert abs(sum(demos.sample_demo(rng) is high for _ in range(1000)) - 750) < 55
    demos = store(reward=[low, high], rho=1.0, phi=0.0, alpha=1.0)
    assert abs(sum(demos.sample_demo(rng) is high for _ in range(1000)) - 500) < 63


# ------------------------------------------------------------------------------------------------- annealing, by hand


def check_anneal(m):
    """rho_0 = 0.1, phi_0 = 0.3. Room for 3 value demos at the start: steps of 0.1, until phi is 0.

    By the current size, 3, 2 and 1: 0.3/3 = 0.1, then 0.3/2 = 0.15, then 0.3/1, which is cut at rho = 0.4.
    """
    for by, expected in (
        ("capacity", [(0.2, 0.2), (0.3, 0.1), (0.4, 0), (0.4, 0)]),
        ("current", [(0.2, 0.2), (0.35, 0.05), (0.4, 0), (0.4, 0)]),
    ):
        demos = store(m, value=[make_demo(m) for _ in range(3)], rho=0.1, phi=0.3, anneal_by=by)
        demos.value_capacity = 3
        for rho, phi in expected:
            demos.anneal_parameters()
            assert (demos.rho, demos.phi) == (pytest.approx(rho), pytest.approx(phi, abs=1e-12))
            if len(demos.value_demos) > 1:
                demos.value_demos.pop()
    demos = store(m, rho=0.1, phi=0.3)
    demos.anneal_parameters()
    assert (demos.rho, demos.phi) == (0.1, 0.3)  # no value demos: nothing happens


def test_anneal():
    """Fails if the speed, the bounds or the constant sum are off, or if it happens without value demos."""
    check_anneal(ppod)
    caught(check_anneal, ("self.rho + self.args.phi / size, total", "self.rho + self.phi / size, total"))
    caught(check_anneal, ("self.phi = total - self.rho", "self.phi = self.args.phi - self.rho"))
    caught(check_anneal, ("if self.value_demos:\n            size", "if True:\n            size"))


def check_anneal_before_eviction(m):
    """Capacity 3, a person's demo and two value demos: room for 2, so 0.3/2. The new one evicts a value demo.

    By the current size it is 0.3/2 as well, for the eviction comes afterwards (else 0.3/1).
    """
    for by in ("capacity", "current"):
        demos = store(m, reward=[make_demo(m, human=True)], demo_capacity=3, rho=0.1, phi=0.3, anneal_by=by)
        demos.value_capacity = 2
        for _ in range(2):
            demos.add(demos.value_demos, make_demo(m))
        demos.add_reward_demo(make_demo(m))
        assert len(demos.value_demos) == 1 and demos.rho == pytest.approx(0.25)


def test_anneal_before_eviction():
    """Fails if room is made before the step, so that the current size is another."""
    check_anneal_before_eviction(ppod)
    swapped = "self.check_demo_buffer_capacity()\n        self.anneal_parameters()\n"
    caught(
        check_anneal_before_eviction,
        ("self.anneal_parameters()\n        self.check_demo_buffer_capacity()\n", swapped),
    )


def test_room_for_value_demos_at_the_start(tmp_path):
    """51 less one demo: a new reward demo moves 0.3 / 50."""
    demos = saved_demos(tmp_path, make_demo())
    assert demos.value_capacity == 50
    demos.add(demos.value_demos, make_demo())
    demos.add_reward_demo(make_demo())
    assert demos.rho == pytest.approx(0.1 + 0.3 / 50)


# -------------------------------------------------------------------------------------------------- capacity, by hand


def check_capacity(m):
    """Capacity 3. H comes from a person. Value demos A 0.5, B 0.2, C 0.9 go lowest first; then the longest of R1-R3."""
    name = {}

    def demo(label, **fields):
        made = make_demo(m, **fields)
        name[id(made)] = label
        return made

    def names():
        return ["".join(name[id(d)] for d in demos_) for demos_ in (demos.reward_demos, demos.value_demos)]

    demos = store(m, reward=[demo("H", human=True, length=9)], demo_capacity=3)
    for label, value in (("A", 0.5), ("B", 0.2), ("C", 0.9)):
        demos.add(demos.value_demos, demo(label, max_value=value))
    demos.check_demo_buffer_capacity()
    assert names() == ["H", "AC"]
    demos.add_reward_demo(demo("1", length=3))
    assert names() == ["H1", "C"]
    demos.add_reward_demo(demo("2", length=6))
    assert names() == ["H12", ""]
    demos.add_reward_demo(demo("3", length=5))
    assert names() == ["H13", ""]


def test_capacity():
    """Fails if a person's demo can be dropped, if the shortest goes, or the value demo of highest value."""
    check_capacity(ppod)
    caught(check_capacity, ("if not demo.human]:\n                self.reward", "]:\n                self.reward"))
    caught(check_capacity, ("max(own, key=lambda demo: len(demo.rewards))", "min(own, key=lambda d: len(d.rewards))"))
    caught(check_capacity, ("min(self.value_demos, key=lambda demo: demo.max_value)", "self.value_demos[0]"))


def check_human_survives(m, folder):
    """A person's demo of return 5, an agent's of 5; a new one of 7 joins them. Saved: the agent's, best first."""
    args = dict(target_agent_demos_dir=str(folder), rho=0.1)
    demos = store(m, reward=[make_demo(m, total=5.0, human=True), make_demo(m, total=5.0)], **args)
    demos.add_reward_demo(make_demo(m, total=7.0))
    assert [demo.human for demo in demos.reward_demos] == [True, False, False]
    demos.save_demos()
    saved = [np.load(folder / f"reward/{rank}.npz")["episode_return"] for rank in range(2)]
    assert saved == [7, 5] and len(list(folder.rglob("*.npz"))) == 2


def test_human_survives(tmp_path):
    """Fails if a new best demo empties the list, as published, or if saving loses it."""
    check_human_survives(ppod, tmp_path / "right")
    emptied = "self.add(self.reward_demos, demo)\n        self.reward_demos = [demo]\n        self.anneal"
    faulty = mutant(("self.add(self.reward_demos, demo)\n        self.anneal", emptied))
    with pytest.raises(AssertionError):
        check_human_survives(faulty, tmp_path / "wrong")


# -------------------------------------------------------------------------------------------------- tracking, by hand


def check_track(m):
    """Rewards 0 1 0 2 0 0: four rows are kept, truncated there; the return is 3 and the highest value 0.9.

    Without a positive reward all is kept. Rewards 0 1 -5: two rows are kept, the return is -4, not 1.
    """
    demos = store(m, initial_reward_threshold=0.0)
    first, second = [0, 1, 0, 2, 0, 0], [0.2, 0.9, 0.4, 0.3, 0.1, 0.05]
    demos.track_potential_demos(
        rollout_of(
            [
                ([0, 1, -5], [0.1, 0.2, 0.3], "terminated"),
                ([0, 0, 0], [-1, -2, -3], "truncated"),
                (first, second, "terminated"),
                ([0, 3], [0, 0], "terminated"),
            ],
            m,
        )
    )
    nothing, one, whole = demos.reward_demos
    (negative,) = demos.value_demos
    assert [len(d.rewards) for d in (one, nothing, whole, negative)] == [4, 3, 2, 2]
    assert [d.total for d in (one, nothing, whole, negative)] == [3, 0, 3, -4]
    assert [d.max_value for d in (one, nothing, negative)] == pytest.approx([0.9, -1, 0.3])
    assert [d.terminated for d in (one, nothing, whole, negative)] == [False, False, True, False]
    assert one.obs[:, 0].tolist() == [200, 201, 202, 203, 204] and nothing.obs[:, 0].tolist() == [100, 101, 102, 103]
    assert demos.reward_threshold == 0


def test_track():
    """Fails for the published mistakes: the last value for the highest, the cut demo as terminal, rewards after the
    last positive one lost from the total, the threshold 0.0 read as none."""
    check_track(ppod)
    caught(
        check_track,
        ("actions, rewards, terminated, episode_values.max()", "actions, rewards, terminated, episode_values[-1]"),
    )
    caught(check_track, ("bool(terminated and whole)", "True"))
    caught(check_track, ("bool(terminated and whole)", "bool(terminated)"))
    caught(check_track, ("float(rewards.sum(dtype=np.float64))", "float(rewards[:length].sum())"))
    caught(
        check_track,
        (
            "-math.inf if args.initial_reward_threshold is None else args.initial_reward_threshold",
            "args.initial_reward_threshold or -math.inf",
        ),
    )
    caught(check_track, ("length = positive[-1] + 1 if", "length = positive[-1] if"))
    caught(check_track, ("begins[i] = None, t + 2", "begins[i] = None, t + 1"))


def check_threshold(m):
    """Demos of return 5 and 3: the threshold is 3; 3 joins, 2 does not. With 4 dropped for want of room it rises."""
    demos = store(m, reward=[make_demo(m, total=5.0, human=True)], demo_capacity=3, initial_reward_threshold=1.0)
    returns = []
    for total in (2, 1.5, 2, 4, 3, 1.9):
        length = int(20 - total)  # the better, the shorter
        demos.track_potential_demos(rollout_of([([0] * length + [total], [0] * (length + 1), "terminated")], m))
        returns.append((sorted(d.total for d in demos.reward_demos), demos.reward_threshold))
    assert returns == [
        ([2, 5], 2),  # reaches 1; from now on the lowest return in the list counts
        ([2, 5], 2),
        ([2, 2, 5], 2),
        ([2, 4, 5], 2),  # the longest, one of the twos, goes
        ([3, 4, 5], 3),
        ([3, 4, 5], 3),
    ]
    demos.add_reward_demo(make_demo(m, total=0.5, length=1))  # as a supplementary demo may be
    assert demos.reward_threshold == 3  # never falls


def test_threshold():
    """Fails if the threshold falls, is not met by an equal return, or is not the lowest return in the list."""
    check_threshold(ppod)
    lowest = "max(self.reward_threshold, min(d.total for d in self.reward_demos))"
    caught(check_threshold, (lowest, "min(d.total for d in self.reward_demos)"))
    caught(check_threshold, (lowest, "self.reward_threshold"))
    caught(check_threshold, ("if demo.total >= self.reward_threshold:", "if demo.total > self.reward_threshold:"))


@pytest.mark.parametrize(("given", "expected"), [(None, 3), (0.0, 0), (7.0, 7)])
def test_initial_threshold(given, expected, tmp_path):
    """Given, it holds, 0.0 as well; else it is the lowest return among the demos that were loaded."""
    demos = saved_demos(tmp_path, make_demo(total=5.0), make_demo(total=3.0), initial_reward_threshold=given)
    assert demos.reward_threshold == expected


def check_value_demos(m):
    """Room for 2. Values 0.5 and 0.3 join; 0.2 and 0.3 do not beat the lowest, 0.4 does, not at its last step."""
    demos = store(m, demo_capacity=2, initial_reward_threshold=1.0)
    kept = []
    for value in (0.5, 0.3, 0.2, 0.3, 0.4):
        demos.track_potential_demos(rollout_of([([0, 0, 0], [0, value, 0.1], "terminated")], m))
        kept.append(sorted(round(d.max_value, 3) for d in demos.value_demos))
    assert kept == [[0.5], [0.3, 0.5], [0.3, 0.5], [0.3, 0.5], [0.4, 0.5]]
    assert {d.id for d in demos.value_demos} == {1, 3}  # ids are never given twice


def test_value_demos():
    """Fails if candidates are judged by their last value, or replace better ones."""
    check_value_demos(ppod)
    caught(
        check_value_demos,
        ("actions, rewards, terminated, episode_values.max()", "actions, rewards, terminated, episode_values[-1]"),
    )
    caught(check_value_demos, ("demo.max_value > min(d.max_value", "demo.max_value < min(d.max_value"))


def check_episode_over_rollouts(m):
    """One episode of 7 steps over three rollouts, the second of which it fills; the highest value is in the first."""
    demos = store(m, initial_reward_threshold=10.0)
    parts = [([0, 0], [0, 9], ""), ([1, 0], [1, 1], ""), ([0, 2, 0], [1, 1, 1], "terminated")]
    for rewards, values_, end in parts:
        demos.track_potential_demos(rollout_of([(rewards, values_, end)], m))
    (demo,) = demos.value_demos
    assert (demo.total, demo.max_value, demo.rewards.tolist()) == (3, 9, [0, 0, 1, 0, 0, 2])
    assert demo.obs[:, 0].tolist() == [0, 1, 0, 1, 0, 1, 2]
    demos.track_potential_demos(rollout_of([([1], [5], "terminated")], m))
    assert [d.total for d in demos.value_demos] == [3, 1]


def test_episode_over_rollouts():
    """Fails if an episode is cut where a rollout ends, or if the next one inherits from it."""
    check_episode_over_rollouts(ppod)
    caught(
        check_episode_over_rollouts, ("old = self.episodes[i] or [x[:0] for x in new]", "old = [x[:0] for x in new]")
    )
    caught(check_episode_over_rollouts, ("self.episodes[i], begins[i] = None, t + 2", "begins[i] = t + 2"))


def check_refresh(m):
    """A value demo that was replayed gets the highest value of this time; the replay itself is no candidate."""
    demos = store(m, value=[make_demo(m, max_value=0.9), make_demo(m, max_value=0.1)], initial_reward_threshold=0.0)
    rollout = rollout_of([([0, 0, 1], [0.2, 0.4, 0.3], "terminated")], m)
    rollout.demo_ids[:3] = 1
    demos.track_potential_demos(rollout)
    assert [d.max_value for d in demos.value_demos] == [pytest.approx(0.4), 0.1] and not demos.reward_demos


def test_refresh():
    """Fails if priorities go stale, or if a replay is taken for an episode of the agent."""
    check_refresh(ppod)
    caught(check_refresh, ("demo.max_value = float(episode_values.max())", "pass"))
    caught(check_refresh, ("                continue\n            demo = as_demo", "            demo = as_demo"))


# ------------------------------------------------------------------------------------------- replays in the rollout


class Stub:
    """An agent that always takes action 0 and counts steps in its state, from 1 where an episode begins."""

    action_space = TWO

    def sample(self, rows, state, rng):
        return np.zeros((len(rows), 1), int), np.where(rows[:, -1:] > 0, 1, state + 1).astype(np.float32)


PLANS = [[(3, "terminated"), (2, "truncated")], [(1, "truncated"), (4, "both")], [(6, "terminated")]]


def walk_envs(module=ppod):
    """Three slots with Walks; the observation is (slot, episode, step)."""
    return module.EpisodeStarts(gym.vector.SyncVectorEnv([lambda i=i: Walk(PLANS[i], i) for i in range(3)]))


def walk_demo(module, length, terminated):
    """A demo whose observations are (-1, length, step) and whose rewards are -step; its actions are 1."""
    obs = np.zeros((length + 1, 4), np.float32)
    obs[:, 0], obs[:, 1], obs[:, 2], obs[0, 3] = -1, length, np.arange(length + 1), 1
    rewards = -np.arange(1, length + 1, dtype=np.float32)
    return module.Demo(obs, np.ones((length, 1), int), rewards, terminated, float(rewards.sum()))


def check_replays(m):
    """30 rollouts of 3 slots, replays of two demos half of the time: every row is what it should be.

    A slot's rows are, over and over: all of an episode or of a demo, from its first observation to its last, then one
    reset row that holds the final observation. The environment of a replaying slot is not seen; afterwards it begins a
    new episode. Tracked episodes, returns and steps are those of the environment alone.
    """
    envs, rng = walk_envs(m), np.random.default_rng(3)
    args = m.Args(env_id="Walk", rho=0.5, phi=0.0, initial_reward_threshold=1e9, demo_capacity=10**6)
    demos = m.PPODBuffer(args, 3, envs.view, TWO)
    for length, terminated in ((2, True), (5, False)):
        demos.add(demos.reward_demos, walk_demo(m, length, terminated))
    obs, _ = envs.reset(seed=1)
    run = types.SimpleNamespace(step=0, replayed_rows=0, episodes=[], obs=obs, reset_rows=np.ones(3, bool))
    run.returns, run.state = np.zeros(3), np.zeros((3, 1), np.float32)
    rows = [[] for _ in range(3)]
    buffer = m.SequenceBuffer(7, 3, envs.single_observation_space, TWO, 1, 7)
    for _ in range(30):
        m.play_or_replay(Stub(), envs, buffer, demos, args, run, rng)
        buffer.values = torch.zeros(8, 3)
        demos.track_potential_demos(buffer)
        for t in range(7):
            for i in range(3):
                fields = (buffer.obs[t, i].tolist(), int(buffer.actions[t, i, 0]), float(buffer.rewards[t, i]))
                flags = (bool(buffer.terminated[t, i]), bool(buffer.truncated[t, i]), bool(buffer.reset_rows[t, i]))
                rows[i].append((*fields, *flags, int(buffer.demo_ids[t, i]), buffer.obs[t + 1, i].tolist()))
    finished, real_rows, replayed, total_returns = [], 0, 0, []
    for i, slot in enumerate(rows):
        assert slot[0][5]  # the first row is a reset row: here the slot draws for the first time
        t = 1
        while t < len(slot):
            start, demo_id = slot[t][0], slot[t][6]
            assert start[2:] == [0, 1]
            length, end = (2 * demo_id + demo_id // 2, "") if demo_id else PLANS[i][int(start[1]) % len(PLANS[i])]
            episode = slot[t : t + length]
            for k, (obs, action, reward, terminated, truncated, reset_row, ident, following) in enumerate(episode):
                last = k + 1 == length
                assert obs == [*start[:2], k, float(k == 0)] and following == [*start[:2], k + 1, 0]
                assert not reset_row and ident == demo_id and action == (1 if demo_id else 0)
                assert start[0] == (-1 if demo_id else i)
                assert reward == (-(k + 1) if demo_id else 10 * start[1] + k + 1)
                if demo_id:
                    assert (terminated, truncated) == (last and demo_id == 1, last and demo_id == 2)
                else:
                    assert (terminated, truncated) == (
                        last and end in ("terminated", "both"),
                        last and end in ("truncated", "both"),
                    )
            real_rows += 0 if demo_id else len(episode)
            replayed += len(episode) if demo_id else 0
            if len(episode) == length:
                if not demo_id:
                    finished.append((i, start[1], length))
                    total_returns.append(sum(row[2] for row in episode))
                if t + length < len(slot):
                    final = slot[t + length]
                    assert final[5] and final[2:5] == (0, False, False) and final[0] == [*start[:2], length, 0]
            t += length + 1
    assert (run.step, run.replayed_rows) == (real_rows, replayed) and replayed > 100 and real_rows > 100
    assert sorted(total for _, total in run.episodes) == sorted(total_returns)
    tracked = sorted((int(d.obs[0, 0]), d.obs[0, 1], len(d.rewards)) for d in demos.value_demos)
    assert tracked == sorted(finished)
    for demo in demos.value_demos:
        assert demo.obs[:, 2].tolist() == list(range(len(demo.rewards) + 1)) and demo.obs[0, 3] == 1


def test_replays():
    """Fails if the environment behind a replay is seen, counted or tracked, or if any row of a replay is not the
    demo's own."""
    check_replays(ppod)
    caught(check_replays, ("shown[i], self.away[i] = self.away[i], False", "shown[i], self.away[i] = False, False"))
    caught(check_replays, ("next_obs[i], self.away[i] = demo.obs[0], True", "self.away[i] = True"))
    caught(check_replays, ("over and demo.terminated, over and not demo.terminated", "over, False"))
    caught(check_replays, ("real = ~run.reset_rows & (demo_ids == 0)", "real = ~run.reset_rows"))
    caught(check_replays, ("if demo_id := rollout.demo_ids[t, i]:", "if demo_id := 0:"))
    caught(check_replays, ("over = run.reset_rows & real", "over = run.reset_rows"))
    caught(check_replays, ("self.ended = self.ended & ~which", "pass"))


def check_replayed_rows(m):
    """A demo of three steps, rewards 0 0 1, values 0.1 0.2 0.3, gamma = lambda = 1/2, terminated. Log-probs are 0.

    delta = (0 + 0.1 - 0.1, 0 + 0.15 - 0.2, 1 - 0.3) = (0, -0.05, 0.7); A_2 = 0.7, A_1 = -0.05 + 0.7/4 = 0.125,
    A_0 = 0.125/4 = 0.03125. pi(a|s) = 0.3 is the ratio: with A = 2 the objective is 0.6, and so is its derivative by
    log pi; with A = -2 it is clipped, max(0.6, 1.6), and has no gradient.
    """
    demo = make_demo(m, length=3, total=1.0)
    demos, envs = store(m, reward=[demo], rho=1.0, phi=0.0), walk_envs(m)

    class Critic:
        def __call__(self, rows, actions, state):
            shape = rows.shape[:2]
            return torch.full(shape, -1.2), None, 0.1 + 0.1 * rows[:, :, 0], torch.zeros(*shape, 0)

        def certain_log_prob(self):
            return 0.0

    buffer = m.SequenceBuffer(4, 1, spaces.Box(-np.inf, np.inf, (2,)), TWO, 0, 1)
    obs, reset_rows = np.zeros((1, 2), np.float32), np.ones(1, bool)
    for _ in range(4):
        actions, step = np.zeros((1, 1), int), [np.zeros((1, 2), np.float32), *np.zeros((3, 1))]
        step[2:] = np.zeros((2, 1), bool)
        ids = demos.replay(envs, reset_rows, actions, step, Draws(0.5))
        buffer.add(obs, actions, *step[1:], reset_rows, ids, step[0])
        obs, reset_rows = step[0], step[2] | step[3]
    buffer.evaluate(Critic())
    buffer.compute_returns(0.5, 0.5)
    assert buffer.log_probs[:, 0].tolist() == pytest.approx([-1.2, 0, 0, 0])  # row 0 only resets
    assert buffer.advantages[1:, 0].tolist() == pytest.approx([0.03125, 0.125, 0.7])
    assert buffer.actions[1:, 0, 0].tolist() == [0, 1, 0] and buffer.terminated[:, 0].tolist() == [0, 0, 0, 1]
    for advantage, objective, derivative in ((2.0, 0.6, 0.6), (-2.0, -1.6, 0.0)):
        log_ratio = torch.tensor([math.log(0.3)], requires_grad=True)
        loss = m.policy_loss(log_ratio - buffer.log_probs[1], torch.tensor([advantage]), 0.2)
        (gradient,) = torch.autograd.grad(-loss, log_ratio)
        assert -loss.item() == pytest.approx(objective) and gradient.item() == pytest.approx(derivative)


def test_replayed_rows():
    """Fails if the behaviour of the demonstrator is not certain, or if GAE takes its end for another."""
    check_replayed_rows(ppod)
    caught(check_replayed_rows, ("] = agent.certain_log_prob()", "] += 0.0"))
    caught(
        check_replayed_rows,
        (
            'terminated, truncated = self.tensors("rewards", "terminated", "truncated")',
            'terminated, truncated = self.tensors("rewards", "truncated", "terminated")',
        ),
    )


def agent_of(observation_space=LINE, action_space=TWO, **args):
    """A RecurrentAgent with weights that are all but small."""
    args = Args(env_id="Nothing-v0", **SMALL | args)
    agent = ppod.RecurrentAgent(observation_space, action_space, args)
    with torch.no_grad():
        agent.flat += 0.3 * torch.randn(agent.flat.shape, generator=torch.Generator().manual_seed(7))
    return agent, args


def random_rollout(agent, space, T=32, N=4, chunk_length=8, seed=0):
    """A SequenceBuffer of random rows: episodes of random lengths, a third of them replays."""
    rng = np.random.default_rng(seed)
    low, dtype = (0, np.uint8) if space.dtype == np.uint8 else (-np.inf, np.float32)
    rows = spaces.Box(low, 255 if low == 0 else np.inf, (math.prod(space.shape) + 1,), dtype)
    buffer = SequenceBuffer(T, N, rows, agent.action_space, agent.state_size, chunk_length)
    shape = (T + 1, N, *rows.shape)
    buffer.obs[:] = rng.integers(0, 4, shape) if space.dtype == np.uint8 else rng.standard_normal(shape)
    buffer.reset_rows[1:] = rng.random((T - 1, N)) < 0.15
    buffer.truncated[:-1] = buffer.reset_rows[1:]
    buffer.obs[0, :, -1] = 0
    buffer.obs[1:, :, -1] = buffer.reset_rows
    for i in range(N):
        ids = np.cumsum(buffer.reset_rows[:, i])
        buffer.demo_ids[:, i] = np.where(ids % 3 == 1, ids, 0)
    agent.action_space.seed(seed)
    actions = np.array([agent.action_space.sample() for _ in range(T * N)])
    buffer.actions[:] = ppod.from_env(actions, agent.action_space).reshape(T, N, -1)
    buffer.rewards[:] = rng.standard_normal((T, N))
    buffer.state[:] = 0.5 * rng.standard_normal(buffer.state.shape)
    return buffer


def test_statistics_leave_out_replays():
    """Fails if rows of replays or reset rows enter approx_kl and clip_fraction, or reset rows the loss."""
    agent, args = agent_of()
    buffer = random_rollout(agent, LINE)
    buffer.evaluate(agent)
    buffer.compute_returns(0.9, 0.9)
    (batch,) = buffer.minibatches(1, np.random.default_rng(1))
    _, losses, own = ppod.sequence_gradient(agent, batch, args)
    real = ~buffer.reset_rows & (buffer.demo_ids == 0)
    assert len(own) == real.sum() < (~buffer.reset_rows).sum() < buffer.reset_rows.size
    torch.testing.assert_close(own, torch.zeros_like(own), atol=1e-5, rtol=0)  # nothing has moved yet
    at_reset = torch.as_tensor(buffer.reset_rows)
    buffer.advantages[at_reset], buffer.returns[at_reset], buffer.log_probs[at_reset] = 1e6, 1e6, -50
    (batch,) = buffer.minibatches(1, np.random.default_rng(1))
    torch.testing.assert_close(ppod.sequence_gradient(agent, batch, args)[1], losses)


# ------------------------------------------------------------------------------------------------------------ the GRU

VIEWS = {"vector": spaces.Box(-1, 1, (3,)), "grid": spaces.Box(0, 255, (2, 2, 3), np.uint8)}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("recurrent", [True, False], ids=["GRU", "feed-forward"])
def test_acting_step_by_step_is_the_same_as_learning_in_sequences(view, recurrent):
    """NumPy, one step at a time, against torch, the whole rollout at once. Fails if a state is not reset, or is reset
    where no episode begins, or if the two differ in any gate."""
    agent, _ = agent_of(view, spaces.Discrete(3), recurrent=recurrent)
    buffer = random_rollout(agent, view)
    state, logits, states = buffer.state, [], []
    for rows in buffer.obs:
        output, state = agent.policy_output(rows, state)
        logits.append(output)
        states.append(state)
    with torch.no_grad():
        features, after = agent.states(torch.as_tensor(buffer.obs), torch.as_tensor(buffer.state))
        torch.testing.assert_close(torch.as_tensor(np.array(logits)), agent.actor(features), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.as_tensor(np.array(states)), after, atol=1e-5, rtol=1e-4)


def check_gru(m):
    """Against torch.nn.GRU, run on each stretch between two beginnings of episodes by itself."""
    args = m.Args(env_id="Nothing-v0", **SMALL)
    agent = m.RecurrentAgent(LINE, TWO, args)
    rng = np.random.default_rng(2)
    rows = torch.as_tensor(rng.standard_normal((12, 3, 2)), dtype=torch.float32)
    rows[:, :, 1] = torch.as_tensor(rng.random((12, 3)) < 0.3).float()
    start = torch.as_tensor(rng.standard_normal((3, 8)), dtype=torch.float32)
    gru = torch.nn.GRU(8, 8)
    with torch.no_grad():
        pairs = (gru.weight_ih_l0, agent.gru_input.weight), (gru.weight_hh_l0, agent.gru_state.weight)
        biases = (gru.bias_ih_l0, agent.gru_input.bias), (gru.bias_hh_l0, agent.gru_state.bias)
        for theirs, ours in (*pairs, *biases):
            ours += 0.2 * torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
            theirs.copy_(ours)
        _, states = agent.states(rows, start)
        x = agent.trunk(rows[:, :, :1].flatten(0, 1)).tanh().view(12, 3, 8)
        for i in range(3):
            state = start[i][None]
            for t in range(12):
                state = gru(x[t, i][None], torch.zeros_like(state) if rows[t, i, 1] else state)[1]
                assert torch.allclose(states[t, i], state[0], atol=1e-5), (t, i)


def test_gru():
    """Fails if a gate is wrong, or if the state is not zero at the beginning of an episode within a sequence."""
    check_gru(ppod)
    caught(check_gru, ("state = state * ~starts\n", "pass\n"))
    caught(
        check_gru, ("update * state + (1 - update) * candidate\n            states", "candidate\n            states")
    )
    caught(check_gru, ("+ reset * recurrent[:, 2 * H :]).tanh()", "+ recurrent[:, 2 * H :]).tanh()"))


def check_chunks(m):
    """obs[t, e] = 10 e + t, states 100 more, T = 4, two slots, chunks of 2, order 2 0 3 1, two minibatches.

    Chunks are 0 1 | 2 3 | 10 11 | 12 13; chunks 2 and 0 side by side are, time by time, 10 0, 11 1.
    """
    buffer = m.SequenceBuffer(4, 2, spaces.Box(-np.inf, np.inf, (1,)), TWO, 1, 2)
    numbers = 10.0 * torch.arange(2)[None] + torch.arange(5)[:, None]
    buffer.obs[:] = numbers[:, :, None]
    buffer.values, buffer.states = numbers, 100 + numbers[:4, :, None]
    buffer.log_probs = buffer.advantages = buffer.returns = numbers[:4]

    class Order:
        def permutation(self, n):
            return np.array([2, 0, 3, 1])

    one, two = buffer.minibatches(2, Order())
    assert one.obs.flatten().tolist() == [10, 0, 11, 1] and two.obs.flatten().tolist() == [12, 2, 13, 3]
    assert one.state.flatten().tolist() == [110, 100] and two.state.flatten().tolist() == [112, 102]
    for name in ("log_probs", "values", "advantages", "returns"):
        assert getattr(two, name).tolist() == [[12, 2], [13, 3]]


def test_chunks():
    """Fails if time and slots are mixed up in any field, or if the state is not that before the chunk's first row."""
    check_chunks(ppod)
    caught(check_chunks, (".movedim(0, 2).flatten(1, 2)", ".movedim(0, 1).flatten(1, 2)"))
    caught(check_chunks, ("self.chunks(self.states)[0]", "self.chunks(self.states)[-1]"))


@pytest.mark.parametrize("chunk_length", [1, 4, 32])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_chunks_play_on_where_the_rollout_was(view, chunk_length):
    """Fails if the log-probs or values of any chunk differ from those of the whole rollout while the weights are the
    same: the ratio of the first minibatch has to be 1."""
    agent, _ = agent_of(view)
    buffer = random_rollout(agent, view, chunk_length=chunk_length)
    buffer.evaluate(agent)
    buffer.compute_returns(0.9, 0.9)
    seen = 0
    for batch in buffer.minibatches(2, np.random.default_rng(1)):
        log_probs, _, values_, _ = agent(batch.obs, batch.actions, batch.state)
        own = batch.trained & ~batch.replayed
        torch.testing.assert_close(log_probs[own], batch.log_probs[own], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(values_[batch.trained], batch.values[batch.trained], atol=1e-5, rtol=1e-4)
        assert (batch.log_probs[batch.replayed] == 0).all()
        seen += batch.trained.sum()
    assert seen == (~buffer.reset_rows).sum()


def test_cells_enter_one_hot():
    """A cell (door, blue, locked) = (4, 2, 2) lights inputs 4, 11 + 2 and 17 + 2; a number too large, the last one."""
    agent, _ = agent_of(VIEWS["grid"])
    cells = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    cells[0, 0, 1] = torch.tensor([4, 2, 2])
    cells[0, 1, 1] = 200
    lit = [np.flatnonzero(x).tolist() for x in agent.patches.one_hot(cells).reshape(4, 21).numpy()]
    assert lit == [[0, 11, 17], [4, 11 + 2, 17 + 2], [0, 11, 17], [10, 11 + 5, 17 + 3]]


def test_patches_are_seen_alike_wherever_they_are():
    """Fails if the weights differ over the view, or if rows, columns and features get mixed up: features of a patch by
    a loop over its cells."""
    torch.manual_seed(0)
    patches = ppod.GridPatches((5, 4, 3), torch.Generator().manual_seed(1), features=2)
    cells = torch.randint(0, 4, (3, 5, 4, 3), dtype=torch.uint8)
    out = patches(cells.flatten(1)).detach().unflatten(1, (2, 3, 2))  # features, 5 - 2 places across, 4 - 2 down
    assert patches.num_outputs == 12
    for b, f, x, y in np.ndindex(3, 2, 3, 2):
        total = patches.conv.bias[f].item()
        for i, j in np.ndindex(3, 3):
            one_hot = patches.one_hot(cells[b, x + i, y + j][None, None, None])[0, 0, 0]
            total += (patches.conv.weight[f, :, i, j] * one_hot).sum().item()
        assert out[b, f, x, y].item() == pytest.approx(max(0.0, total), abs=1e-5)


def test_a_gaussian_demonstrator():
    """The log-density at the mean, log std = (0.5, -1): -(0.5 - 1) - log 2 pi; so that pi/mu is at most 1."""
    agent, _ = agent_of(action_space=spaces.Box(-1, 1, (2,)))
    with torch.no_grad():
        agent.log_std[:] = torch.tensor([0.5, -1.0])
    assert agent.certain_log_prob() == pytest.approx(0.5 - math.log(2 * math.pi), abs=1e-6)


def test_act_remembers_and_forgets():
    """Fails if `act` forgets within an episode, or remembers the last one."""
    agent, _ = agent_of(VIEWS["vector"], spaces.Box(-100, 100, (1,)))
    rows = np.random.default_rng(0).standard_normal((5, 2, 4)).astype(np.float32)
    rows[:, :, -1] = 0
    rows[0, :, -1] = 1
    first = [agent.act(x) for x in rows]
    again = [agent.act(x) for x in rows]
    np.testing.assert_array_equal(first, again)
    rows[3, :, -1] = 1
    other = [agent.act(x) for x in rows]
    assert not np.allclose(first[4], other[4]) and np.allclose(first[2], other[2])


def test_evaluations_can_draw_actions():
    """Logits (ln 3, 0): --sample-actions takes the first in 3 of 4 steps, anew at each start, else in all of them."""
    for sample_actions in (False, True):
        agent, _ = agent_of(action_space=spaces.Discrete(2), recurrent=False, sample_actions=sample_actions)
        with torch.no_grad():
            agent.actor.weight.zero_()
            agent.actor.bias[:] = torch.tensor([math.log(3), 0])
        starts = np.ones((10_000, 2), np.float32)
        first, second, again = agent.act(starts), agent.act(starts * [1, 0]), agent.act(starts)
        np.testing.assert_array_equal(first, again)
        if sample_actions:
            assert abs((first == 0).mean() - 0.75) < 0.02  # 4.6 standard deviations
            assert abs((first == second).mean() - (0.75**2 + 0.25**2)) < 0.02  # independent
        else:
            assert (first == 0).all() and (second == 0).all()


# --------------------------------------------------------------------------------------------------------- demo files

CHAIN = "ppod_envs:DemoChain-v0"


def chain_args(**more):
    return Args(env_id=CHAIN, **more)


def chain_demo(length=24):
    """The demo that solves a Chain."""
    obs = np.concatenate([np.eye(length + 1), np.eye(length + 1)[:, :1]], 1).astype(np.float32)
    actions = np.array([[ppod_envs.right_choice(t)] for t in range(length)])
    rewards = np.zeros(length, np.float32)
    rewards[-1] = 1
    return Demo(obs, actions, rewards, True, 1.0)


def write_chain_demo(folder, name="demo.npz", **changes):
    """Save the Chain's demo; `changes` replace or (None) remove fields of the file."""
    view, actions = spaces.Box(0, 1, (25,), np.float32), spaces.Discrete(2)
    path = Path(folder, name)
    ppod.save_demo(path, chain_demo(), chain_args(), view, actions)
    if changes:
        with np.load(path) as file:
            fields = {k: v for k, v in (dict(file) | changes).items() if v is not None}
        np.savez(path, **fields)
    return path


def saved_demos(folder, *demos, **args):
    """A PPODBuffer that began with these demos, from files."""
    for k, demo in enumerate(demos):
        ppod.save_demo(Path(folder, f"{k}.npz"), demo, Args(env_id="Nothing-v0"), LINE, TWO)
    loaded = PPODBuffer(Args(env_id="Nothing-v0", initial_human_demos_dir=str(folder), **args), 1, LINE, TWO)
    loaded.load_initial_demos()
    return loaded


SPACES = {
    "Discrete from -1": spaces.Discrete(4, start=-1),
    "Box": spaces.Box(np.array([-0.5, 0.0]), np.array([1.0, 0.25]), dtype=np.float64),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(2),
}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_demo_comes_back_from_its_file(space, tmp_path):
    """Fails if saving and loading loses or changes anything: actions of every kind, the cut, the whole return."""
    view = spaces.Box(0, 255, (2, 2, 3), np.uint8)
    space.seed(1)
    actions = ppod.from_env(np.array([space.sample() for _ in range(5)]), space)
    obs = np.random.default_rng(1).integers(0, 4, (6, 13)).astype(np.uint8)
    obs[:, -1] = np.arange(6) == 0
    demo = ppod.as_demo(obs, actions, np.array([0, 1, 2, -5, 0], np.float32), True)
    args = Args(env_id="Nothing-v0", env_kwargs='{"size": 3, "a": 1}', wrappers=("some.Wrapper",))
    ppod.save_demo(tmp_path / "sub/demo.npz", demo, args, view, space)
    same = dataclasses.replace(args, env_kwargs='{"a":1, "size":3}')
    loaded = PPODBuffer(same, 1, view, space).load_demo(tmp_path / "sub/demo.npz", human=True)
    for name in ("obs", "actions", "rewards"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(demo, name), name)
    assert (loaded.terminated, loaded.total, loaded.human) == (False, -2, True)
    with np.load(tmp_path / "sub/demo.npz", allow_pickle=False) as file:
        assert file["observation"].shape == (3, 2, 2, 3) and file["action"].shape == (3, *space.shape)
        assert file["truncated"] and not file["terminated"] and json.loads(str(file["env_id"])) == "Nothing-v0"
        assert all(action in space for action in file["action"])
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["demo.npz"]


def test_fields_that_may_be_missing(tmp_path):
    """A file without the return of the episode: it is the sum of the rewards."""
    path = write_chain_demo(tmp_path, episode_return=None)
    demos = PPODBuffer(chain_args(), 1, spaces.Box(0, 1, (25,)), TWO)
    assert demos.load_demo(path, human=True).total == 1


BAD = {
    "another environment": (dict(env_id=json.dumps("CartPole-v1")), "CartPole-v1"),
    "other kwargs": (dict(env_kwargs=json.dumps({"length": 3})), "env_kwargs"),
    "other wrappers": (dict(wrappers=json.dumps(["some.Wrapper"])), "wrappers"),
    "another shape": (dict(observation=np.zeros((24, 7)), final_observation=np.zeros(7)), "(25, 7)"),
    "too few actions": (dict(action=np.zeros(23, int)), "(23,)"),
    "actions that are none": (dict(action=np.full(24, 2)), "action"),
    "broken actions": (dict(action=np.full(24, 0.5)), "whole numbers"),
    "NaN": (dict(reward=np.full(24, np.nan)), "NaN"),
    "no rewards": (dict(reward=None), "reward"),
    "no steps": (dict(reward=np.zeros(0), action=np.zeros(0, int), observation=np.zeros((0, 25))), "do not fit"),
    "objects": (dict(reward=np.array([None] * 24, object)), "allow_pickle"),
}


@pytest.mark.parametrize(("changes", "word"), BAD.values(), ids=BAD)
def test_bad_demo_files(changes, word, tmp_path, capsys):
    """At start-up a bad file ends the run with a message that names it; a supplementary one is skipped."""
    path = write_chain_demo(tmp_path / "demos", **changes)
    with pytest.raises(UserError, match="demo.npz") as error:
        train(chain_args(initial_agent_demos_dir=str(path.parent), run_dir=str(tmp_path / "run"), **SMALL))
    assert word in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "run").exists()
    demos = PPODBuffer(chain_args(supplementary_demos_dir=str(path.parent)), 1, spaces.Box(0, 1, (25,)), TWO)
    demos.load_supplementary_demos()
    err = capsys.readouterr().err
    assert not demos.reward_demos and err.count("\n") == 1 and "demo.npz" in err and word in err


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 half of a zip", None])
def test_damaged_demo_files(content, tmp_path):
    """Fails if a damaged file ends in anything but a message that names it. None: a whole file, cut in half."""
    path = write_chain_demo(tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    with pytest.raises(UserError, match="demo.npz"):
        PPODBuffer(chain_args(), 1, spaces.Box(0, 1, (25,)), TWO).load_demo(path, human=True)


def test_supplementary_demos_are_taken_once(tmp_path, capsys):
    """Fails if a file is taken twice, also after a resume, or if one that was half written is never looked at again."""
    write_chain_demo(tmp_path, "a.npz")
    bad = tmp_path / "b.npz"
    bad.write_bytes(b"half")
    args = chain_args(supplementary_demos_dir=str(tmp_path), demo_capacity=4)
    demos = PPODBuffer(args, 1, spaces.Box(0, 1, (25,)), TWO)
    counts = []
    for step in range(4):
        if step == 2:
            write_chain_demo(tmp_path, "b.npz")
            os.utime(bad, ns=(1, 1))
        demos.load_supplementary_demos()
        counts.append(len(demos.reward_demos))
        again = PPODBuffer(args, 1, spaces.Box(0, 1, (25,)), TWO)
        again.load_state_dict(demos.state_dict())
        demos = again
    assert counts == [1, 1, 2, 2] and capsys.readouterr().err.count("skipped") == 1
    assert not any(demo.human for demo in demos.reward_demos)


def test_too_many_initial_demos(tmp_path):
    """Fails if demos beyond the capacity are dropped without a word."""
    for k in range(3):
        write_chain_demo(tmp_path, f"{k}.npz")
    with pytest.raises(UserError, match="3 demos exceed demo_capacity = 2"):
        saved = PPODBuffer(
            chain_args(initial_human_demos_dir=str(tmp_path), demo_capacity=2), 1, spaces.Box(0, 1, (25,)), TWO
        )
        saved.load_initial_demos()


def test_saved_demos_are_the_best(tmp_path):
    """The two best of an agent's reward demos and the two highest value demos, in folders of their own."""
    reward = [make_demo(total=t) for t in (2.0, 4.0, 3.0)] + [make_demo(total=9.0, human=True)]
    value = [make_demo(total=0.0, max_value=v, first=10 * v) for v in (0.1, 0.3, 0.2)]
    demos = store(reward=reward, value=value, num_agent_demos_to_save=2, target_agent_demos_dir=str(tmp_path))
    demos.save_demos()
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert files == ["reward", "reward/0.npz", "reward/1.npz", "value", "value/0.npz", "value/1.npz"]
    assert [float(np.load(tmp_path / f"reward/{i}.npz")["episode_return"]) for i in (0, 1)] == [4, 3]
    assert [float(np.load(tmp_path / f"value/{i}.npz")["observation"][0, 0]) for i in (0, 1)] == [3, 2]


def test_state_of_the_store_comes_back():
    """Fails if anything that a PPODBuffer knows is missing from a checkpoint, replays of dropped demos included."""
    demos = store(num_envs=3, reward=[make_demo(total=2.0)], value=[make_demo(max_value=0.2)], rho=0.2, phi=0.3)
    demos.replays[1], demos.position[1] = make_demo(length=7), 4
    demos.replays[1].id = 77
    demos.replays[2], demos.away[:] = demos.reward_demos[0], [False, True, True]
    demos.rho, demos.phi, demos.reward_threshold, demos.seen = 0.3, 0.2, 1.5, {"a.npz": 0}
    demos.episodes[0] = [np.ones((2, 3), np.float32)] * 4
    import io

    file = io.BytesIO()
    torch.save(demos.state_dict(), file)
    file.seek(0)
    other = PPODBuffer(demos.args, 3, LINE, TWO)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.replays[2] is other.reward_demos[0] and other.replays[0] is None
    for name, value in vars(demos).items():
        if name in ("args", "view", "action_space"):
            continue
        one, two = (
            [[vars(d) if isinstance(d, Demo) else d for d in x] if isinstance(x, list) else x]
            for x in (value, getattr(other, name))
        )
        np.testing.assert_equal(two, one, name)


# ---------------------------------------------------------------------------------------------------------- recording


def test_record_by_keyboard(tmp_path, monkeypatch, capsys):
    """A person plays three episodes: the two good ones are saved, and can be loaded; the keys are shown."""

    def play(env, keys_to_action, noop, wait_on_player):
        assert keys_to_action == {"0": 0, "1": 1} and wait_on_player
        for wrong_at in (None, 3, None):
            obs, _ = env.reset()
            for at in range(24):
                action = ppod_envs.right_choice(at) ^ (at == wrong_at)
                obs, reward, terminated, truncated, _ = env.step(action)
                assert obs.shape == (26,) and env.render_mode == "rgb_array"
                if terminated or truncated:
                    break

    import gymnasium.utils.play

    monkeypatch.setattr(gymnasium.utils.play, "play", play)
    monkeypatch.setattr(ppod_envs.DemoChain, "metadata", {"render_modes": ["rgb_array"]}, raising=False)
    monkeypatch.setattr(ppod_envs.DemoChain, "__init__", lambda self, render_mode=None: chain_init(self, render_mode))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppod.py", "--record-demo", "--env-id", CHAIN])
    ppod.main()
    out = capsys.readouterr().out
    assert "action 0" in out and "escape" in out and out.count("->") == 2
    files = sorted((tmp_path / "demos" / CHAIN).iterdir())
    assert [path.name for path in files] == ["0.npz", "1.npz"]
    demo = PPODBuffer(chain_args(), 1, spaces.Box(0, 1, (25,)), TWO).load_demo(files[0], human=True)
    np.testing.assert_array_equal(demo.obs, chain_demo().obs)
    np.testing.assert_array_equal(demo.actions, chain_demo().actions)


def chain_init(self, render_mode, init=ppod_envs.DemoChain.__init__):
    init(self)
    self.render_mode = render_mode


def test_keys_are_real(monkeypatch, tmp_path):
    """gymnasium.utils.play itself, on a driver without a screen: every key of MiniGrid's and MountainCar's tables is
    an action there. It ends by Escape."""
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pygame.init()
    for env_id in ("MiniGrid-Empty-5x5-v0", "MountainCar-v0"):
        pygame.display.init()
        pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_ESCAPE))
        ppod.record_by_keyboard(Args(env_id=env_id, target_agent_demos_dir=str(tmp_path)))


def test_import_minari(tmp_path, monkeypatch):
    """Fails if an episode of a (stubbed) Minari dataset does not become a demo that can be loaded."""
    demo = chain_demo()
    episode = types.SimpleNamespace(
        id=4,
        observations=demo.obs[:, :-1],
        actions=demo.actions[:, 0],
        rewards=demo.rewards.astype(float),
        terminations=np.arange(24) == 23,
        truncations=np.zeros(24, bool),
    )

    class Dataset(list):
        def iterate_episodes(self):
            return iter(self)

    stub = types.SimpleNamespace(load_dataset=lambda name: Dataset([episode]) if name == "chain/one" else 1 / 0)
    monkeypatch.setitem(sys.modules, "minari", stub)
    ppod.import_minari(chain_args(import_minari="chain/one", target_agent_demos_dir=str(tmp_path)))
    loaded = PPODBuffer(chain_args(), 1, spaces.Box(0, 1, (25,)), TWO).load_demo(tmp_path / "4.npz", human=True)
    np.testing.assert_array_equal(loaded.obs, demo.obs)
    assert loaded.terminated and loaded.total == 1
    with pytest.raises(UserError, match="chain/two"):
        ppod.import_minari(chain_args(import_minari="chain/two"))
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(UserError, match="pip install minari"):
        ppod.import_minari(chain_args(import_minari="chain/one"))


# ---------------------------------------------------------------------------------------------------------- learning

CHAIN_RUN = dict(num_envs=8, num_steps=64, num_minibatches=4, learning_rate=3e-3, hidden_sizes=(32,), progress=False)
CHAIN_RUN |= dict(recurrent=False, rho=0.3, phi=0.0, eval_every=10**9, eval_episodes=1, anneal_lr=False)


def solves_chain(folder, steps=15_000, **changes):
    """The evaluation after a run on Chain; by default with its demo."""
    write_chain_demo(folder / "demos")
    given = CHAIN_RUN | dict(initial_human_demos_dir=str(folder / "demos"), run_dir=str(folder / "run"))
    return train(chain_args(total_timesteps=steps, **given | changes))["eval_return_mean"]


def test_chain_is_solved_from_one_demo(tmp_path):
    """2 ** -24 is the chance of a random policy; one demo shows the way."""
    assert solves_chain(tmp_path) == 1


def test_chain_is_not_solved_without(tmp_path):
    """The demo is loaded, but never replayed. Fails if the comparison shows nothing, since the task is easy."""
    assert solves_chain(tmp_path, rho=0.0) == 0


def test_chain_with_a_gru(tmp_path):
    """The same with --recurrent and replays in which the state runs on."""
    small = dict(recurrent=True, gru_size=32, chunk_length=16)
    assert solves_chain(tmp_path, 20_000, **small) == 1


def test_chain_from_a_supplementary_demo(tmp_path):
    """The demo is found in the folder that is watched; it counts as an agent's."""
    (tmp_path / "watched").mkdir()
    write_chain_demo(tmp_path / "watched")
    changes = dict(initial_human_demos_dir=None, supplementary_demos_dir=str(tmp_path / "watched"))
    assert solves_chain(tmp_path, **changes) == 1


def test_chain_from_a_value_demo(tmp_path, monkeypatch):
    """All but the last step of the demo as a value demo: replays alone teach the critic nothing without a reward, so
    phi does no harm and no good: what is tested is that value demos join, are replayed and are refreshed."""
    solves_chain(tmp_path, 4_000, rho=0.0, phi=0.3, initial_reward_threshold=0.5)
    state = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)
    assert len(state["demos"]["ids"]["value_demos"]) == 50 and state["replayed_rows"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [True, False])
def test_memory(recurrent, tmp_path):
    """Recall asks for a cue that is out of sight: a GRU solves it, without one chance is the best there is."""
    args = Args(
        env_id="ppod_envs:Recall-v0",
        total_timesteps=25_000,
        **dict(recurrent=recurrent, gru_size=16, hidden_sizes=(16,), chunk_length=8, num_envs=8, num_steps=32),
        **dict(learning_rate=5e-3, eval_episodes=50, eval_every=10**9, progress=False, run_dir=str(tmp_path / "run")),
    )
    mean = train(args)["eval_return_mean"]
    assert mean > 0.95 if recurrent else mean < 0.8


def test_continuous_demo(tmp_path):
    """Reach with Box actions: moving at random seldom gets to 5 in 30 steps; the demo moves by 0.45 each time."""
    view, actions = spaces.Box(-np.inf, np.inf, (1,)), spaces.Box(-1, 1, (1,), np.float32)
    T = 12
    obs = np.stack([0.45 * np.arange(T + 1), np.arange(T + 1) == 0], 1).astype(np.float32)
    demo = Demo(obs, np.full((T, 1), 0.9, np.float32), (np.arange(T) == T - 1).astype(np.float32), True, 1.0)
    args = Args(
        env_id="ppod_envs:Reach-v0",
        total_timesteps=20_000,
        **dict(initial_human_demos_dir=str(tmp_path / "demos"), run_dir=str(tmp_path / "run")),
        **CHAIN_RUN | dict(gamma=0.9),
    )
    ppod.save_demo(tmp_path / "demos/0.npz", demo, args, view, actions)
    assert train(args)["eval_return_mean"] == 1


# ---------------------------------------------------------------------------------------------------------- whole runs


def surroundings():
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | own


def shell(folder, *flags, code=0):
    """Run `python ppod.py flags…` in `folder`, expect the exit code, return the finished process."""
    words = [sys.executable, "ppod.py", *map(str, flags)]
    done = subprocess.run(words, cwd=folder, env=surroundings(), capture_output=True, text=True)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def alone(tmp_path):
    """An empty folder with nothing but ppod.py in it."""
    (tmp_path / "ppod.py").write_text(SOURCE)
    return tmp_path


def metrics(run_dir):
    """The rows of metrics.csv as dicts, without the columns that hold times."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in ("seconds", "sps")} for row in csv.DictReader(file)]


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
    """Two finished runs agree in everything but the time they took."""
    assert metrics(one) == metrics(other)
    names = [sorted(path.name for path in (run / "models").iterdir()) for run in (one, other)]
    assert names[0] == names[1]
    for name in [f"models/{name}" for name in names[0]] + ["checkpoint.pt"]:
        states = [torch.load(run / name, weights_only=True) for run in (one, other)]
        for state in states:
            state.pop("seconds", None)
        assert_equal(*states, name)


DOORKEY = ["--env-id", "MiniGrid-DoorKey-5x5-v0", *SMALL_FLAGS, "--max-episode-steps", "20", "--rho", "0.3"]
DOORKEY += "--phi 0.3 --initial-reward-threshold 0.1 --demo-capacity 6 --initial-human-demos-dir demos".split()


def doorkey_demo(folder):
    """A demo of DoorKey-5x5, good or not: 15 random actions and a reward at the end."""
    args = Args(env_id="MiniGrid-DoorKey-5x5-v0")
    envs, rng = ppod.make_envs(args, 1), np.random.default_rng(0)
    obs, actions = [envs.reset(seed=5)[0][0]], rng.integers(0, 7, (15, 1))
    obs += [envs.step(action)[0][0] for action in actions]
    demo = Demo(np.array(obs), actions, (np.arange(15) == 14).astype(np.float32), True, 0.5)
    ppod.save_demo(folder / "demos/0.npz", demo, args, envs.view, envs.single_action_space)


def test_copied_alone_it_leaves_a_complete_run_folder(alone):
    """Fails if ppod.py imports a sibling, if a part of the run folder is missing, or if rows do not add up."""
    doorkey_demo(alone)
    flags = [*DOORKEY, "--total-timesteps", 2000, "--run-dir", "run", "--target-agent-demos-dir", "best"]
    done = shell(alone, *flags, "--num-agent-demos-to-save", 2, "--save-demos-every", 3)
    assert done.stderr == "" and done.stdout.splitlines()[-2].startswith("evaluation")
    run = alone / "run"
    for name in ("config.json", "metrics.csv", "learning_curve.png", "checkpoint.pt", "summary.json", "models/best.pt"):
        assert (run / name).stat().st_size > 0
    rows = metrics(run)
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    assert int(rows[-1]["step"]) == state["step"] >= 2000
    assert int(rows[-1]["training_rows"]) == state["step"] + state["replayed_rows"] and state["replayed_rows"] > 50
    names = "reward_demos value_demos reward_threshold rho phi episodes approx_kl"
    assert set(names.split()) <= set(rows[-1])
    for row in rows:
        assert float(row["rho"]) + float(row["phi"]) == pytest.approx(0.6)
        assert int(row["reward_demos"]) + int(row["value_demos"]) <= 6
    assert 0 < len(list((alone / "best/value").iterdir())) <= 2
    done = shell(alone, "--evaluate", "run", "--eval-episodes", 3)
    assert "±" in done.stdout and "3 episodes" in done.stdout
    shell(
        alone,
        "--record-from",
        "run",
        "--initial-reward-threshold",
        "0",
        "--num-agent-demos-to-save",
        1,
        "--target-agent-demos-dir",
        "recorded",
    )
    assert [path.name for path in (alone / "recorded").iterdir()] == ["0.npz"]


def test_default_without_its_demo(alone):
    """Copied away alone, the default environment has no demo: one line says so."""
    done = shell(alone, code=2)
    assert done.stderr.count("\n") == 1 and "demos/MiniGrid-DoorKey-16x16-v0" in done.stderr
    assert sorted(path.name for path in alone.iterdir()) == ["ppod.py"]


def kill_and_resume(folder, run, flags, kills, longest, seed):
    """Kill -9 a run `kills` times, each time at a random moment after its next checkpoint, and resume it each time."""
    rng, done, stamp, checkpoint = random.Random(seed), 0, None, folder / run / "checkpoint.pt"
    argv = [*flags, "--run-dir", run]
    while True:
        words = [sys.executable, "ppod.py", *map(str, argv)]
        pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        process = subprocess.Popen(words, cwd=folder, env=surroundings(), **pipes)
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
        (DOORKEY, 1, 1_500),
        pytest.param(DOORKEY, 6, 10_000, marks=pytest.mark.slow),
        pytest.param(
            "--env-id CartPole-v1 --initial-reward-threshold 25 --normalize-obs --normalize-reward --demo-capacity 9 "
            "--max-episode-steps 40".split()
            + SMALL_FLAGS,
            4,
            10_000,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["MiniGrid", "MiniGrid, often", "CartPole, normalised"],
)
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(flags, kills, steps, alone):
    """Fails if a checkpoint lacks anything that the rest of the run depends on: demos, replays, states of the GRU."""
    doorkey_demo(alone)
    flags = [*flags, "--total-timesteps", steps, "--checkpoint-every", 128]
    shell(alone, *flags, "--run-dir", "unbroken")
    assert kill_and_resume(alone, "killed", flags, kills, 0.3, seed=kills) == kills
    assert_same_run(alone / "unbroken", alone / "killed")


def test_environment_that_cannot_be_carried_over(tmp_path, capsys):
    """Fails if a replay goes on with rows of the new episode, or if the candidate is stitched from two episodes."""
    write_chain_demo(tmp_path / "demos")
    small = dict(SMALL, initial_human_demos_dir=str(tmp_path / "demos"), rho=0.5, run_dir=str(tmp_path / "run"))
    small |= dict(eval_every=10**9, checkpoint_every=10**9)
    train(chain_args(total_timesteps=300, **small))
    capsys.readouterr()
    train(Args(resume=str(tmp_path / "run"), total_timesteps=600))
    assert "episodes restart" in capsys.readouterr().out
    state = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)
    for fields in state["demos"]["demos"].values():
        places = fields["obs"][:, :-1].argmax(1).tolist()
        assert places[0] == 0 and all(b - a in (0, 1) for a, b in zip(places, places[1:]))
        assert fields["obs"][:, -1].tolist() == [1] + [0] * (len(places) - 1)


def test_same_seed_same_run_and_config(tmp_path, monkeypatch):
    """Fails if anything random is not seeded, or if --config forgets an argument."""
    doorkey_demo(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, *flags in (
        ["one", *DOORKEY, "--total-timesteps", "600"],
        ["two", "--config", "one/config.json"],
        ["three", "--config", "one/config.json", "--seed", "2"],
    ):
        monkeypatch.setattr(sys, "argv", ["ppod.py", *flags, "--run-dir", name])
        ppod.main()
    assert_same_run(tmp_path / "one", tmp_path / "two")
    assert metrics(tmp_path / "one") != metrics(tmp_path / "three")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--env-id MiniGrid-DoorKy-5x5-v0", "DoorKy"),
        ("--env-id MiniGrid-Empty-5x5-v0 --rho 0.8 --phi 0.3", "rho + phi"),
        ("--env-id MiniGrid-Empty-5x5-v0 --rho 1.5", "rho"),
        ("--env-id MiniGrid-Empty-5x5-v0 --rho 1 --phi 0", "environment needs its share"),
        ("--env-id MiniGrid-Empty-5x5-v0 --num-steps 100", "chunk_length"),
        ("--env-id MiniGrid-Empty-5x5-v0 --num-minibatches 5", "num_minibatches"),
        ("--env-id MiniGrid-Empty-5x5-v0 --normalize-obs", "one-hot"),
        ("--env-id MiniGrid-Empty-5x5-v0 --initial-agent-demos-dir nowhere", "nowhere"),
        ("--env-id MiniGrid-Empty-5x5-v0 --supplementary-demos-dir nowhere", "nowhere"),
        ("--env-id CartPole-v1 --anneal-by luck", "anneal-by"),
        ("--env-id CartPole-v1 --demo-capacity 0", "demo_capacity"),
        ("--env-id Pendulum-v1 --record-demo", "Discrete"),
        ("--env-id CartPole-v1 --import-minari nothing/here-v0", "minari"),
        ("--env-id CarRacing-v3", "ppo.py"),
        ("--record-from nowhere", "nowhere"),
        ("--evaluate nowhere", "nowhere"),
    ],
)
def test_bad_input(flags, words, tmp_path, monkeypatch, capfd):
    """One line on stderr, exit code 2, nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppod.py", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        ppod.main()
    err = capfd.readouterr().err
    assert stop.value.code == 2 and words in err and err.count("\n") == 1 and "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["reward", "observation", "first observation"])
def test_nan_in_the_environment(field, tmp_path):
    """Fails if a NaN is trained on; the line names the environment, the step and the field."""
    args = Args(env_id="run_envs:Faulty-v0", env_kwargs=json.dumps({"field": field, "at": 100}), **SMALL)
    with pytest.raises(UserError, match=f"run_envs:Faulty-v0, step .*{field.split()[-1]} is NaN"):
        train(dataclasses.replace(args, run_dir=str(tmp_path / "run")))


def test_notebook(tmp_path, monkeypatch):
    """Fails if `load` gives anything but the agent that was evaluated last."""
    monkeypatch.chdir(tmp_path)
    final = train(Args(env_id="CartPole-v1", total_timesteps=500, max_episode_steps=50, run_dir="run", **SMALL))
    last = load("run", "last")
    assert ppod.evaluate(last, last.args, 2, 1 + 10_000) == (final["eval_return_mean"], final["eval_return_std"])


def test_goal_reward():
    """MountainCar pays 1 at the goal and nothing before: in the committed demo as well."""
    args = Args(env_id="MountainCar-v0")
    assert args.wrappers == ("ppod.GoalReward",)
    demos = PPODBuffer(args, 1, ppod.make_envs(args, 1).view, spaces.Discrete(3))
    demos.load_initial_demos()
    (demo,) = demos.reward_demos
    assert demo.human and demo.terminated and demo.total == 1 and (demo.rewards[:-1] == 0).all()


def test_committed_demo_of_the_default_environment():
    """It replays exactly on the layout that it was recorded on: the last step opens the way to the goal."""
    args = Args()
    envs = ppod.make_envs(args, 1)
    demos = PPODBuffer(args, 1, envs.view, envs.single_action_space)
    demos.load_initial_demos()
    (demo,) = demos.reward_demos
    assert demo.human and demo.terminated and 0.9 < demo.total < 1
    assert demo.total == pytest.approx(1 - 0.9 * len(demo.rewards) / 2560, abs=1e-6)
    assert shutil.which("python")
