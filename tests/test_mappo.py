"""mappo.py: the adapter, buffers, returns, losses and updates against arithmetic done by hand and slow, obvious loops;
games whose best play is known; and whole runs.

The `check_…` functions take the implementation they judge, so that the tests at the end can hand them faulty ones.
"""

import copy
import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import gymnasium as gym
import hypothesis.extra.numpy as hnp
import mappo_envs  # noqa: F401  (its environments are named by id)
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import mappo
from mappo import Args, OnPolicyActorBuffer, OnPolicyCriticBufferEP, OnPolicyCriticBufferFP

SPREAD = "mpe2.simple_spread_v3"
THREE = spaces.Discrete(3)


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


def differ(actual, expected):
    """AssertionError if all numbers agree."""
    assert np.abs(np.asarray(actual) - np.asarray(expected)).max() > 1e-3


class Fixed:
    """A generator whose permutations are known."""

    def __init__(self, *permutations):
        self.permutations = list(permutations)

    def permutation(self, size):
        permutation = np.array(self.permutations.pop(0))
        assert sorted(permutation) == list(range(size))
        return permutation


def arguments(env_id=SPREAD, **more):
    """Args for a small run without a progress bar."""
    small = dict(num_envs=2, num_steps=10, update_epochs=2, eval_episodes=2, progress=False, hidden_sizes=(16, 16))
    return Args(env_id=env_id, **small | dict(data_chunk_length=5, num_minibatches=1, learning_rate=7e-4) | more)


class Played:
    """Everything after some rollouts: args, team, environments, buffers, run; `rows` has all rows of the last one."""

    def __init__(self, args, rollouts=1, rows=None):
        self.args, self.envs = args, mappo.make_envs(args, args.num_envs)
        self.team = mappo.make_agent(args, self.envs)
        for network in self.team.networks:  # large weights: outputs must depend on what they depend on
            with torch.no_grad():
                network.flat.mul_(2).add_(
                    0.1 * torch.randn(network.flat.shape, generator=torch.Generator().manual_seed(0))
                )
        self.actors, self.critic = mappo.make_buffers(args, self.team)
        N = args.num_envs
        states = np.stack([b.rnn_states[0] for b in self.actors]), self.critic.rnn_states_critic[0].copy()
        obs, _ = self.envs.reset(seed=args.seed)
        self.run = SimpleNamespace(step=0, episodes=[], obs=obs, reset_rows=np.zeros(N, bool), returns=np.zeros(N))
        self.run.rnn_states, self.run.rnn_states_critic = states
        self.rng = np.random.default_rng(0)
        mappo.begin(self.team, self.actors, self.critic, self.run)
        for i in range(rollouts):
            if i:
                for buffer in (*self.actors, self.critic):
                    buffer.after_update()
            mappo.rollout(self.team, self.envs, self.actors, self.critic, args, self.run, self.rng)


# -------------------------------------------------------------------------------------------------- the adapter


def direct(seed):
    """simple_spread_v3 itself, reset, and the seed that a TeamEnv reset with `seed` gives it."""
    from mpe2 import simple_spread_v3

    env = simple_spread_v3.parallel_env()
    return env, env.reset(seed=int(gym.utils.seeding.np_random(seed)[0].integers(2**31)))[0]


def test_rows_are_what_pettingzoo_returns():
    """Fails if observations, rewards or ends are not those of the environment, or land in the wrong place or row.

    A row of simple_spread: 1 number for the beginning, 3 for who is alive, 3 x 18 observations, which are the state.
    """
    envs = mappo.make_envs(arguments(), 2)
    (layout, _), n = envs.get_attr("layout"), 3
    assert layout.alive == slice(1, 4) and layout.observations == [slice(4, 22), slice(22, 40), slice(40, 58)]
    assert layout.state == slice(4, 58) and all(part == slice(58, 58) for part in layout.available)
    assert envs.single_observation_space.shape == (58,) and len(envs.single_action_space.spaces) == 3
    rows, _ = envs.reset(seed=5)
    twins, obs = zip(*(direct(seed) for seed in (5, 6)))
    rng = np.random.default_rng(0)
    for t in range(25):
        close(rows[:, 0], [float(t == 0)] * 2)
        close(rows[:, layout.alive], np.ones((2, n)))
        for row, observed in zip(rows, obs):
            close(row[layout.state], np.concatenate(list(observed.values())))
        actions = rng.integers(5, size=(n, 2))
        rows, rewards, terminated, truncated, infos = envs.step(tuple(actions))
        steps = [twin.step(dict(zip(twin.possible_agents, action))) for twin, action in zip(twins, actions.T)]
        obs = [step[0] for step in steps]
        own = [list(step[1].values()) for step in steps]
        close(infos["rewards"], own)
        close(rewards, np.sum(own, 1))
        assert not terminated.any() and not infos["terminated"].any() and (truncated == (t == 24)).all()
    close(rows[:, layout.alive], np.ones((2, n)))  # the final observation is there, though all agents are gone
    close(rows[0, layout.state], np.concatenate(list(obs[0].values())))
    close(rows[0, layout.state], twins[0].state())
    rows, rewards, terminated, truncated, infos = envs.step(tuple(actions))  # the reset row
    close(rows[:, 0], [1, 1])
    assert not rewards.any() and not truncated.any() and not infos["rewards"].any()


def test_agents_of_different_kinds():
    """Fails if the agents' places are those of equal agents, or if a group of actions goes to another agent."""
    args = arguments("mpe2.simple_speaker_listener_v4", share_policy=False)
    envs = mappo.make_envs(args, 2)
    layout = envs.get_attr("layout")[0]
    assert layout.observations == [slice(3, 6), slice(6, 17)] and layout.state == slice(3, 17)
    team = mappo.make_agent(args, envs)
    speaker, listener = team.act(envs.reset(seed=0)[0])
    assert speaker.shape == listener.shape == (2,) and team.actors[0].sizes == [3] and team.actors[1].sizes == [5]
    args = arguments("mpe2.simple_speaker_listener_v4", share_policy=True)
    with pytest.raises(mappo.UserError, match="--no-share-policy"):
        mappo.make_agent(args, envs)


def test_factored_actions_are_those_of_the_environment():
    """Fails if a pair of factors becomes another action than mpe2 means by it, or another agent's actions are split.

    simple_reference has 5 moves and 10 messages in one number, move + 5 · message, so (2, 7) is 2 + 35 = 37. The
    speaker of simple_speaker_listener has 3 messages and its listener 5 moves: there is nothing to split by 5.
    """
    args = arguments("mpe2.simple_reference_v3", action_factor=5)
    split, plain = mappo.make_envs(args, 2), mappo.make_envs(arguments(args.env_id, action_factor=0), 2)
    assert [space.nvec.tolist() for space in split.single_action_space.spaces] == [[5, 10]] * 2
    assert mappo.make_agent(args, split).actors[0].sizes == [5, 10]
    close(split.reset(seed=3)[0], plain.reset(seed=3)[0])
    one, other = np.array([[2, 7], [0, 0]]), np.array([[4, 9], [3, 1]])  # of the agents, in two environments
    rows = split.step((one, other))[0]
    close(rows, plain.step((np.array([37, 0]), np.array([49, 8])))[0])
    heard = [rows[:, part][:, -10:].argmax(1).tolist() for part in split.get_attr("layout")[0].observations]
    assert heard == [[9, 1], [7, 0]]  # each hears the other
    env = gym.Env()
    env.action_space = spaces.Tuple([spaces.Discrete(6, start=10), spaces.Box(-1, 1, (2,))])
    env.layout = mappo.Layout(None, None, None, [slice(3, 3)] * 2)
    pair, box = mappo.FactoredActions(env, 3).action((np.array([2, 1]), np.array([0.5, 0])))
    assert pair == 10 + 2 + 3 * 1 and box.tolist() == [0.5, 0]
    with pytest.raises(mappo.UserError, match="larger multiple of action_factor = 5"):
        mappo.make_envs(arguments("mpe2.simple_speaker_listener_v4", action_factor=5), 1)
    with pytest.raises(mappo.UserError, match="action masks"):
        mappo.make_envs(arguments("mappo_envs:tictactoe", action_factor=3), 1)


def scripted(*scripts, **more):
    """A vector environment of two Scripted ones, and its layout."""
    kwargs = json.dumps({"scripts": scripts, **more})
    envs = mappo.make_envs(arguments("mappo_envs:Scripted", env_kwargs=kwargs), 1)
    return envs, envs.get_attr("layout")[0]


def test_the_dead_and_how_episodes_end():
    """Fails if the dead are not told from the living, observe anything, or decide how an episode ends.

    Agent a terminates at step 1, b is truncated at step 3: the episode is truncated. In the second episode b is
    truncated at step 1 and a terminates at step 2: the last to act terminated, and so did the episode.
    """
    first = {"a": [1, "terminated"], "b": [3, "truncated"]}
    envs, layout = scripted(first, {"a": [2, "terminated"], "b": [1, "truncated"]})
    assert layout == mappo.Layout(slice(1, 3), [slice(3, 4), slice(4, 5)], slice(5, 7), [slice(7, 7)] * 2)
    rows, _ = envs.reset(seed=0)  # the constructor has reset it once: this is the script's second episode
    action = (np.zeros(1, np.int64),) * 2
    close(rows[0], [1, 1, 1, 10, 110, 1, 0])
    expected = [
        # begins, alive a and b, observations of a and b, state; reward, terminated, truncated; terminated of a and b
        ([0, 1, 0, 11, 0, 1, 1], 3, False, False, [False, False]),
        ([0, 1, 0, 12, 0, 1, 2], 1, True, False, [True, False]),  # the last row: who acted last has an observation
        ([1, 1, 1, 20, 120, 2, 0], 0, False, False, [False, False]),
        ([0, 0, 1, 0, 121, 2, 1], 3, False, False, [True, False]),
        ([0, 0, 1, 0, 122, 2, 2], 2, False, False, [False, False]),
        ([0, 0, 1, 0, 123, 2, 3], 2, False, True, [False, False]),
        ([1, 1, 1, 30, 130, 3, 0], 0, False, False, [False, False]),
    ]
    for row, reward, terminated, truncated, own in expected:
        rows, rewards, *ends, infos = envs.step(action)
        close(rows[0], row)
        assert (rewards[0], ends[0][0], ends[1][0]) == (reward, terminated, truncated)
        assert infos["terminated"][0].tolist() == own


def test_masks_come_from_info_or_from_the_observation():
    """Fails if a mask is lost, given to another agent, or if an agent without a valid action has none or several."""
    script = {"a": [2, "truncated"], "b": [2, "truncated"]}
    envs, layout = scripted(script, masks={"a": [0, 1, 1], "b": [0, 0, 0]}, own_state=False)
    assert layout.available == [slice(5, 8), slice(8, 11)] and layout.state == slice(3, 5)
    rows, _ = envs.reset(seed=0)
    close(rows[0, 5:], [0, 1, 1, 1, 0, 0])
    envs = mappo.make_envs(arguments("mappo_envs:tictactoe"), 1)
    layout = envs.get_attr("layout")[0]
    rows, _ = envs.reset(seed=0)
    close(rows[0, layout.available[0]], np.ones(9))
    close(rows[0, layout.available[1]], np.arange(9) == 0)  # who waits has a no-op
    rows, *_ = envs.step((np.array([4]), np.array([0])))
    close(rows[0, layout.available[0]], np.arange(9) == 0)
    close(rows[0, layout.available[1]], np.arange(9) != 4)


def test_masks_that_come_late_are_refused():
    """Fails if masks that are not in the first row, where there is then no room for them, end in a traceback."""
    kwargs = json.dumps(
        {"scripts": [{"a": [2, "truncated"], "b": [2, "truncated"]}], "masks": {"a": [0, 1, 1], "b": [1, 1, 0]}}
    )
    envs = mappo.make_envs(arguments("mappo_envs:MoreMasks", env_kwargs=kwargs), 1)
    envs.reset(seed=0)
    with pytest.raises(mappo.UserError, match="a has 3 action masks"):
        envs.step((np.zeros(1, np.int64),) * 2)


def test_no_illegal_move_in_a_turn_based_game():
    """Fails if masks do not bind: tic-tac-toe ends at once, at a price of 1, with an illegal move."""
    played = Played(arguments("mappo_envs:tictactoe", num_envs=4, num_steps=100))
    assert len(played.run.episodes) > 30 and {total for _, total in played.run.episodes} == {0.0}
    for buffer in played.actors:
        chosen = np.take_along_axis(buffer.available_actions[:-1], buffer.actions, -1)
        assert (chosen[buffer.masks[:-1] > 0] == 1).all()
        waiting = buffer.available_actions[:-1].sum(-1) == 1
        close(buffer.action_log_probs[waiting], np.zeros((waiting.sum(), 1)))


def test_processes_give_the_same_as_one():
    """Fails if --async-envs loses or mixes up anything."""
    envs = [mappo.make_envs(arguments(async_envs=async_envs), 2) for async_envs in (False, True)]
    assert isinstance(envs[1], gym.vector.AsyncVectorEnv)
    assert envs[0].get_attr("layout") == envs[1].get_attr("layout")
    rows = [e.reset(seed=1)[0] for e in envs]
    rng = np.random.default_rng(0)
    for _ in range(30):
        close(*rows, 0)
        actions = tuple(rng.integers(5, size=(3, 2)))
        (*one, first), (*two, second) = (e.step(actions) for e in envs)
        for a, b in zip(one, two):
            close(a, b, 0)
        close(first["rewards"], second["rewards"], 0)
        rows = one[0], two[0]
    envs[1].close()


CARRIED = [SPREAD, "mpe2.simple_reference_v3", "mpe2.simple_speaker_listener_v4"]


@pytest.mark.parametrize("env_id", [*CARRIED, "mappo_envs:Meet"])
@pytest.mark.parametrize("steps", [0, 7, 25, 26, 60])
def test_environments_are_carried_over(env_id, steps):
    """Fails if an unpickled environment goes on in another way than the one that was pickled."""
    args = arguments(env_id, max_episode_return=1e9, max_episode_steps=12 if steps == 7 else None)
    envs = mappo.make_envs(args, 2)
    envs.reset(seed=3)
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(steps + 60)]
    for action in actions[:steps]:
        envs.step(action)
    twin = cloudpickle.loads(cloudpickle.dumps(envs))
    for action in actions[steps:]:
        for a, b in zip(envs.step(action)[:4], twin.step(action)[:4]):
            close(a, b, 0)


def test_limits_truncate():
    """Fails if --max-episode-steps or --max-episode-return terminate, or do nothing."""
    for limit in ({"max_episode_steps": 3}, {"max_episode_return": 5.0}):
        envs = mappo.make_envs(arguments("mappo_envs:Scripted", env_kwargs=json.dumps(LONG), **limit), 1)
        envs.reset(seed=0)
        ends = [envs.step((np.zeros(1, np.int64),) * 2)[2:4] for _ in range(3)]
        assert [(bool(a[0]), bool(b[0])) for a, b in ends[:2]] == [
            (False, False),
            (False, "max_episode_return" in limit),
        ]
        assert not ends[2][0][0] and ends[2][1][0] == ("max_episode_steps" in limit)


LONG = {"scripts": [{"a": [99, "terminated"], "b": [99, "terminated"]}]}


# ----------------------------------------------------------------------------------------------------- buffers


def actor_buffer(T, N, hidden=1):
    """obs[t, e] = 10 e + t, recurrent state 100 + 10 e + t; actions, log-probs and advantages equal observations."""
    buffer = OnPolicyActorBuffer(T, N, 1, THREE, 0, hidden)
    buffer.obs[..., 0] = 10 * np.arange(N) + np.arange(T + 1)[:, None]
    buffer.rnn_states[..., 0, 0] = 100 + buffer.obs[..., 0]
    buffer.actions[:], buffer.action_log_probs[:] = buffer.obs[:-1], buffer.obs[:-1]
    return buffer, buffer.obs[:-1].copy()


def check_chunks(recurrent_batches):
    """T = 4 steps, 2 environments, chunks of 2, shuffled to 2, 0, 3, 1; two minibatches of two chunks each.

    Environment by environment the observations are 0 1 2 3 | 10 11 12 13, so chunk 2 is 10 11 and chunk 0 is 0 1.
    Time is the slow axis: 10, 0 (first steps), 11, 1 (second steps). States: of the first steps only, 110 and 100.
    Then chunks 3 and 1: 12, 2, 13, 3 with states 112 and 102.
    """
    buffer, _ = actor_buffer(4, 2)
    fields = [buffer.obs[:-1]]
    batches = list(recurrent_batches(fields, buffer.rnn_states, 2, 2, Fixed([2, 0, 3, 1])))
    for ((obs,), states), rows, firsts in zip(batches, ([10, 0, 11, 1], [12, 2, 13, 3]), ([110, 100], [112, 102])):
        close(obs[:, 0], rows)
        close(states, np.reshape(firsts, (2, 1, 1)))
    # Whole rollouts ("naive"): one minibatch of both environments, in the order 1, 0; then one minibatch for each.
    ((obs,), states), *none = recurrent_batches(fields, buffer.rnn_states, 1, 4, Fixed([1, 0]))
    close(obs[:, 0], [10, 0, 11, 1, 12, 2, 13, 3])
    close(states[:, 0, 0], [110, 100])
    assert not none
    two = list(recurrent_batches(fields, buffer.rnn_states, 2, 4, Fixed([1, 0])))
    close([obs[:, 0] for (obs,), _ in two], [[10, 11, 12, 13], [0, 1, 2, 3]])
    close([states[:, 0, 0] for _, states in two], [[110], [100]])


def test_chunks_by_hand():
    check_chunks(mappo.recurrent_batches)


def test_generators_by_hand():
    """Fails if a generator of a buffer cuts, shuffles or orders otherwise than check_chunks says, in any field."""
    buffer, advantages = actor_buffer(4, 2)
    generators = [
        (buffer.recurrent_generator_actor(advantages, 2, 2, Fixed([2, 0, 3, 1])), [[10, 0, 11, 1], [12, 2, 13, 3]]),
        (buffer.naive_recurrent_generator_actor(advantages, 1, Fixed([1, 0])), [[10, 0, 11, 1, 12, 2, 13, 3]]),
        (buffer.naive_recurrent_generator_actor(advantages, 2, Fixed([1, 0])), [[10, 11, 12, 13], [0, 1, 2, 3]]),
        # Flat, rows are time-major: 0 10 1 11 2 12 3 13.
        (buffer.feed_forward_generator_actor(advantages, 1, Fixed(range(8))), [[0, 10, 1, 11, 2, 12, 3, 13]]),
        (buffer.feed_forward_generator_actor(advantages, 3, Fixed([7, 0, 1, 6, 5, 4, 2, 3])),
         [[13, 0, 10], [3, 12, 2], [1, 11]]),
    ]  # fmt: skip
    for generator, expected in generators:
        batches = list(generator)
        assert len(batches) == len(expected)
        for batch, rows in zip(batches, expected):
            for field in (batch.obs, batch.actions, batch.log_probs, batch.advantages):
                close(field[:, 0], rows)
            close(batch.rnn_states[:, 0, 0], [100 + x for x in rows[: len(batch.rnn_states)]])
            assert batch.actions.dtype == torch.int64 and batch.masks.shape == batch.factor.shape == (len(rows), 1)
    assert len(batches[0].rnn_states) == 3  # single rows have a state each


def check_join(join_agents):
    """Agents share an RNN, the second agent's numbers are 1000 larger. Joined, time is still the slow axis."""
    batches = []
    for extra in (0, 1000):
        buffer, advantages = actor_buffer(4, 2)
        for x in (buffer.obs, buffer.rnn_states, buffer.actions, advantages):
            x += extra
        batches.append(next(buffer.recurrent_generator_actor(advantages, 2, 2, Fixed([2, 0, 3, 1]))))
    joined = join_agents(batches)
    for field in (joined.obs, joined.actions, joined.advantages):
        close(field[:, 0], [10, 0, 1010, 1000, 11, 1, 1011, 1001])
    close(joined.rnn_states[:, 0, 0], [110, 100, 1110, 1100])


def test_join_by_hand():
    check_join(mappo.join_agents)


def test_critic_chunks_by_hand():
    """x[t, e, a] = 100 a + 10 e + t, T = 2, two environments and agents: chunk k is environment k // 2, agent k % 2."""
    buffer = OnPolicyCriticBufferFP(2, 2, 2, 1, 1)
    numbers = 100 * np.arange(2) + 10 * np.arange(2)[:, None] + np.arange(3)[:, None, None]
    buffer.share_obs[..., 0], buffer.rnn_states_critic[..., 0, 0], buffer.value_preds[..., 0] = (
        numbers,
        1000 + numbers,
        numbers,
    )
    buffer.compute_returns(buffer.value_preds[-1])
    chunks = [0, 1], [100, 101], [10, 11], [110, 111]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        (batch,) = buffer.recurrent_generator_critic(1, 2, Fixed(order))
        expected = np.array([chunks[i] for i in order])
        close(batch.share_obs[:, 0], expected.T.ravel())
        close(batch.value_preds[:, 0], expected.T.ravel())
        close(batch.rnn_states_critic[:, 0, 0], 1000 + expected[:, 0])
    (batch,) = buffer.feed_forward_generator_critic(1, Fixed(range(8)))
    close(batch.share_obs[:, 0], [0, 100, 10, 110, 1, 101, 11, 111])
    (batch,) = buffer.naive_recurrent_generator_critic(1, Fixed([1, 0, 2, 3]))
    close(batch.share_obs[:, 0], [100, 0, 10, 110, 101, 1, 11, 111])


def test_shapes():
    """Fails if what is there before a step has other than T + 1 rows, what a step brings other than T."""
    box = spaces.Box(-1, 1, (2, 2))
    actor = OnPolicyActorBuffer(5, 3, 7, box, 4, 6)
    assert actor.obs.shape == (6, 3, 7) and actor.rnn_states.shape == (6, 3, 1, 6)
    assert actor.available_actions.shape == (6, 3, 4) and actor.masks.shape == actor.active_masks.shape == (6, 3, 1)
    assert actor.actions.shape == (5, 3, 4) and actor.actions.dtype == np.float32
    assert actor.action_log_probs.shape == (5, 3, 1)
    for buffer, streams in (
        (OnPolicyCriticBufferEP(5, 3, 7, 6), (3,)),
        (OnPolicyCriticBufferFP(5, 3, 2, 7, 6), (3, 2)),
    ):
        assert buffer.share_obs.shape == (6, *streams, 7) and buffer.rnn_states_critic.shape == (6, *streams, 1, 6)
        assert buffer.masks.shape == buffer.bad_masks.shape == buffer.value_preds.shape == (6, *streams, 1)
        assert buffer.rewards.shape == (5, *streams, 1)
        buffer.compute_returns(np.zeros((*streams, 1)))
        assert buffer.returns.shape == buffer.advantages.shape == (5, *streams, 1)


def test_after_update_by_hand():
    """T = 2: row 2 becomes row 0, of all that stands before a step; what steps brought is left alone."""
    buffer = OnPolicyActorBuffer(2, 1, 1, THREE, 3, 1)
    critic = OnPolicyCriticBufferEP(2, 1, 1, 1)
    before = buffer.obs, buffer.rnn_states, buffer.available_actions, critic.share_obs, critic.rnn_states_critic
    for x in before:
        x[:] = np.array([5, 6, 7]).reshape(3, *[1] * (x.ndim - 1))
    masks = buffer.masks, buffer.active_masks, critic.masks, critic.bad_masks, critic.active_masks
    for x in masks:
        x[:, 0, 0] = [1, 1, 0]
    steps = buffer.actions, buffer.action_log_probs, critic.rewards, critic.value_preds
    for x in steps:
        x[:2, 0, 0] = [8, 9]
    buffer.factor[:] = 3
    buffer.after_update()
    critic.after_update()
    assert all((x[0] == 7).all() and (x[1] == 6).all() for x in before) and all(x[0] == 0 and x[1] == 1 for x in masks)
    assert all(x[:2].ravel().tolist() == [8, 9] for x in steps) and (buffer.factor == 1).all()


def test_insert():
    """Fails if a field lands in another row or field, or if the full buffer does not begin again."""
    buffer, critic = OnPolicyActorBuffer(2, 1, 1, THREE, 3, 1), OnPolicyCriticBufferEP(2, 1, 1, 1)
    for t in (0, 1, 2):
        buffer.insert(10 + t, 20 + t, 30 + t, 40 + t, 50 + t, 60 + t, 70 + t)
        critic.insert(11 + t, 21 + t, 31 + t, 41 + t, 51 + t, 61 + t, 71 + t)
        here, after = t % 2, t % 2 + 1
        assert buffer.actions[here] == 30 + t and buffer.action_log_probs[here] == 40 + t
        values = buffer.obs, buffer.rnn_states, buffer.masks, buffer.active_masks, buffer.available_actions
        assert [x[after].ravel()[0] - t for x in values] == [10, 20, 50, 60, 70]
        assert critic.value_preds[here] == 31 + t and critic.rewards[here] == 41 + t
        values = critic.share_obs, critic.rnn_states_critic, critic.masks, critic.bad_masks, critic.active_masks
        assert [x[after].item() - t for x in values] == [11, 21, 51, 61, 71]
    buffer.insert(0, 0, 0, 0, 0)
    assert buffer.active_masks[2] == 0  # unless given, the masks


# ------------------------------------------------------------------------------------------------ masks of a rollout


def test_masks_and_active_masks_by_hand():
    """Three environments, two agents, of which these end in the first step: [a], [a, b], [].

    masks: 0 where all have ended: [1, 0, 1]. active_masks: 0 for the dead, and in the row that only resets the
    environment for everybody: [[0, 1], [0, 0], [1, 1]]. One row on, the second environment is in a new episode, and a
    of the first still dead: [[0, 1], [1, 1], [1, 1]].
    """
    end = {"a": [1, "terminated"], "b": [9, "terminated"]}, {"a": [1, "terminated"], "b": [1, "terminated"]}
    scripts = [*end, {"a": [9, "terminated"], "b": [9, "terminated"]}]
    played = {}
    for env, script in enumerate(scripts):
        kwargs = json.dumps({"scripts": [script]})
        for kind in ("EP", "FP"):
            args = arguments("mappo_envs:Scripted", env_kwargs=kwargs, num_envs=1, num_steps=5, state_type=kind)
            played[env, kind] = Played(args)
    masks = np.array([played[env, "EP"].critic.masks[1, 0, 0] for env in range(3)])
    close(masks, [1, 0, 1])
    for row, expected in ((1, [[0, 1], [0, 0], [1, 1]]), (2, [[0, 1], [1, 1], [1, 1]])):
        close([[b.active_masks[row, 0, 0] for b in played[env, "EP"].actors] for env in range(3)], expected)
        close([played[env, "FP"].critic.active_masks[row, 0, :, 0] for env in range(3)], expected)
        for env in range(3):
            assert all(b.masks[row] == (not (row == 1 and env == 1)) for b in played[env, "EP"].actors)
            assert (played[env, "FP"].critic.masks[row] == (not (row == 1 and env == 1))).all()
    assert (played[1, "EP"].critic.bad_masks == 1).all()  # no end was a truncation


def test_death_is_of_one_environment_until_its_end():
    """Fails if a death reaches another environment, or outlasts its own episode; and FP sees zeros for the dead.

    Environments 0 and 1 follow the same two scripts, but the second is one episode on.
    """
    scripts = [{"a": [1, "terminated"], "b": [2, "truncated"]}, {"a": [3, "terminated"], "b": [3, "truncated"]}]
    args = arguments("mappo_envs:Scripted", env_kwargs=json.dumps({"scripts": scripts}), state_type="FP", num_envs=1)
    played = Played(args)  # a constructor has reset the environment: episode 1 comes first
    active = np.concatenate([b.active_masks[:, 0] for b in played.actors], 1)
    alive = [[1, 1], [1, 1], [1, 1], [0, 0]]  # episode 1: three steps, reset row
    alive += [[1, 1], [0, 1], [0, 0]]  # episode 2: a dies after its first step
    alive += [[1, 1], [1, 1], [1, 1], [0, 0]]
    close(active, alive)
    critic = played.critic
    close(critic.active_masks[:, 0, :, 0], alive)
    close(critic.masks[:, 0, 0, 0], np.max(alive, 1))
    close(critic.bad_masks[:, 0, 0, 0], np.max(alive, 1))  # all ends were truncations: some agent was truncated
    rewards = [3, 3, 3, 0, 3, 2, 0, 3, 3, 3]  # of all agents together, for each
    close(critic.rewards[:, 0, :, 0], np.repeat(np.array(rewards)[:, None], 2, 1))
    dead = np.zeros((11, 2), bool)
    dead[5, 0] = dead[6, 0] = True  # also in the final observation: a was not there any more
    assert not critic.share_obs[:, 0][dead].any()
    assert critic.share_obs[3, 0].any(1).all() and critic.share_obs[6, 0, 1].any()
    close(critic.share_obs[5, 0, 1], [121, 2, 1])  # the agent's observation, and the state


def test_multiwalker():
    """Fails if walkers that fall are still asked for actions, or come back before their environment is reset."""
    args = arguments(
        "pettingzoo.sisl.multiwalker_v9", env_kwargs='{"terminate_on_fall": false}', num_envs=2, num_steps=200
    )
    played = Played(args)
    active = np.concatenate([b.active_masks for b in played.actors], 2)  # (T + 1, N, n)
    masks = played.actors[0].masks[..., 0] > 0
    assert (active.sum(2)[masks] < 3).any() and not active[~masks].any() and len(played.run.episodes) >= 2
    revived = (active[1:] > active[:-1]).any(2)
    assert (revived <= ~masks[:-1]).all()  # only right after a reset row
    figures = mappo.update(*optimizers(played))
    assert all(np.isfinite(list(figures.values())))


def optimizers(played):
    """The arguments of `update` after a rollout."""
    adams = [mappo.Adam(network.flat) for network in played.team.networks]
    return played.team, adams, played.actors, played.critic, 1e-3, played.args, played.rng


# ----------------------------------------------------------------------------------------------------- returns

TERM_AND_TRUNC = dict(rewards=[1, 2, 0, 3, 4, 0, 5, 6], values=[0.5, 1, 99, 1.5, 2, 8, 2.5, 3, 4])
TERM_AND_TRUNC |= dict(masks=[1, 1, 0, 1, 1, 0, 1, 1, 1], bad_masks=[1, 1, 1, 1, 1, 0, 1, 1, 1])
PLAYED = [0, 1, 3, 4, 6, 7]


def critic_buffer(
    buffer_class=OnPolicyCriticBufferEP, gae_lambda=0.5, rewards=(), values=(), masks=None, bad_masks=None
):
    """A buffer of one environment with these rows, gamma = 0.5; with FP, of two agents: the second's values are + 1."""
    agents = (2,) if buffer_class is OnPolicyCriticBufferFP else ()
    buffer = buffer_class(len(rewards), 1, *agents, 1, gamma=0.5, gae_lambda=gae_lambda)
    shape = (-1, 1, *[1] * len(agents), 1)
    buffer.rewards[:] = np.reshape(rewards, shape)
    buffer.value_preds[:] = np.reshape(values, shape)
    if agents:
        buffer.value_preds[:, :, 1] += 1
    buffer.masks[:] = 1 if masks is None else np.reshape(masks, shape)
    buffer.bad_masks[:] = 1 if bad_masks is None else np.reshape(bad_masks, shape)
    return buffer, buffer.value_preds[-1].copy()


def check_compute_returns(compute_returns):
    """gamma = lambda = 0.5: traces decay by 0.25. Row 2 resets after a termination, row 5 after a truncation; they hold
    the values of the final states, 99, which must not matter, and 8.

    delta_0 = 1 + 0.5 * 1 - 0.5 = 1      A_0 = 1 + 0.25 * 1 = 1.25
    delta_1 = 2 - 1 = 1                  A_1 = 1                     (terminated: neither bootstrap nor trace)
    delta_3 = 3 + 0.5 * 2 - 1.5 = 2.5    A_3 = 2.5 + 0.25 * 6 = 4
    delta_4 = 4 + 0.5 * 8 - 2 = 6        A_4 = 6                     (truncated: bootstrap, but no trace)
    delta_6 = 5 + 0.5 * 3 - 2.5 = 4      A_6 = 4 + 0.25 * 5 = 5.25
    delta_7 = 6 + 0.5 * 4 - 3 = 5        A_7 = 5                     (the rollout ends, the episode does not)
    """
    buffer, next_value = critic_buffer(**TERM_AND_TRUNC)
    buffer.value_preds[-1] = -1  # next_value is what counts
    compute_returns(buffer, next_value)
    close(buffer.advantages[PLAYED, 0, 0], [1.25, 1, 4, 6, 5.25, 5])
    close(buffer.returns[PLAYED, 0, 0], [1.75, 2, 5.5, 8, 7.75, 8])  # A + V
    # Without GAE: 6 + 0.5 * 4 = 8; 5 + 0.5 * 8 = 9; 4 + 0.5 * 8 = 8; 3 + 0.5 * 8 = 7; 2; 1 + 0.5 * 2 = 2.
    buffer, next_value = critic_buffer(gae_lambda=None, **TERM_AND_TRUNC)
    compute_returns(buffer, next_value)
    close(buffer.returns[PLAYED, 0, 0], [2, 2, 7, 8, 9, 8])
    close(buffer.advantages[PLAYED, 0, 0], [1.5, 1, 5.5, 6, 6.5, 5])  # R - V


def test_returns_by_hand():
    check_compute_returns(mappo.CriticBuffer.compute_returns)


def test_each_agent_has_its_own_returns():
    """Fails if FP mixes agents: the first has the numbers of EP; the second's values are 1 larger."""
    one, next_value = critic_buffer(**TERM_AND_TRUNC)
    one.compute_returns(next_value)
    two, next_value = critic_buffer(OnPolicyCriticBufferFP, **TERM_AND_TRUNC)
    two.compute_returns(next_value)
    close(two.returns[:, :, 0], one.returns)
    other, next_value = critic_buffer(**TERM_AND_TRUNC | {"values": [v + 1 for v in TERM_AND_TRUNC["values"]]})
    other.compute_returns(next_value)
    close(two.returns[:, :, 1], other.returns)


NORMALIZER = SimpleNamespace(denormalize=lambda values: 2 * values + 1)


def check_normalized_returns(compute_returns):
    """The critic predicts normalised values, mean 1 and deviation 2: 0, 0.5 and, next, 0.25 stand for 1, 2 and 1.5.

    Without GAE, and with lambda = 1: R_1 = 1 + 0.5 * 1.5 = 1.75, R_0 = 1 + 0.5 * 1.75 = 1.875.
    lambda = 0.5: A_1 = 1 + 0.75 - 2 = -0.25, A_0 = 1 + 0.5 * 2 - 1 + 0.25 * -0.25 = 0.9375.
    """
    for gae_lambda, expected in ((None, [1.875, 1.75]), (1, [1.875, 1.75]), (0.5, [1.9375, 1.75])):
        buffer, next_value = critic_buffer(gae_lambda=gae_lambda, rewards=[1, 1], values=[0, 0.5, 0.25])
        compute_returns(buffer, next_value, NORMALIZER)
        close(buffer.returns[:, 0, 0], expected)
        close(buffer.value_preds[:, 0, 0], [0, 0.5, 0.25])  # left as they were
    close(buffer.advantages[:, 0, 0], [0.9375, -0.25])


def test_normalized_returns_by_hand():
    check_normalized_returns(mappo.CriticBuffer.compute_returns)


@st.composite
def rollouts(draw):
    """A random rollout of FP buffers: T, N, n and arrays; reset rows follow ends."""
    T, N, n = draw(st.integers(1, 7)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    numbers = st.floats(-5, 5, width=32)
    rewards, values = (draw(hnp.arrays(np.float32, (T + extra, N, n, 1), elements=numbers)) for extra in (0, 1))
    ends = draw(hnp.arrays(np.int64, (T + 1, N), elements=st.integers(0, 4)))  # 0: truncated, 1: terminated
    ends[0] = 4
    for t in range(1, T + 1):
        ends[t][ends[t - 1] < 2] = 4  # what follows a reset row is none
    return rewards, values, ends


def by_walking(rewards, values, ends, gamma, gae_lambda):
    """Advantages of a single stream (T,): the sum of (gamma lambda)^k delta along what was played from there."""
    advantages = []
    for t in range(len(rewards)):
        total, weight = 0.0, 1.0
        for k in range(t, len(rewards)):
            total += weight * (rewards[k] + gamma * values[k + 1] * (ends[k + 1] != 1) - values[k])
            weight *= gamma * gae_lambda
            if ends[k + 1] < 2:
                break
        advantages.append(total)
    return np.array(advantages)


@given(rollouts(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([None, 0.0, 0.7, 1.0]))
def test_returns_against_a_walk(rollout, gamma, gae_lambda):
    """Fails if any stream is mixed with another, or any end is taken for another kind."""
    rewards, values, ends = rollout
    T, N, n, _ = rewards.shape
    fp = OnPolicyCriticBufferFP(T, N, n, 1, gamma=gamma, gae_lambda=gae_lambda)
    fp.rewards[:], fp.value_preds[:] = rewards, (values - 1) / 2
    fp.masks[:], fp.bad_masks[:] = (ends > 1)[..., None, None], (ends > 0)[..., None, None]
    fp.compute_returns(fp.value_preds[-1].copy(), NORMALIZER)
    for e in range(N):
        for a in range(n):
            walk = by_walking(
                rewards[:, e, a, 0], values[:, e, a, 0], ends[:, e], gamma, 1 if gae_lambda is None else gae_lambda
            )
            close(fp.advantages[:, e, a, 0], walk, 1e-3)
            close(fp.returns[:, e, a, 0], walk + values[:-1, e, a, 0], 1e-3)
    ep = OnPolicyCriticBufferEP(T, N, 1, gamma=gamma, gae_lambda=gae_lambda)
    ep.rewards[:], ep.value_preds[:], ep.masks[:], ep.bad_masks[:] = (
        x[:, :, 0] for x in (rewards, fp.value_preds, fp.masks, fp.bad_masks)
    )
    ep.compute_returns(ep.value_preds[-1].copy(), NORMALIZER)
    close(ep.returns, fp.returns[:, :, 0], 1e-4)


# ------------------------------------------------------------------------------------------------ value normaliser


def check_value_norm(norm_class):
    """beta = 0.9. At first mean 0 and variance 0.01 (its floor). After [1, 3]: mean 2, E[R²] = 5, variance 1.

    Then [5, 5]: E[R] <- 0.9 * 0.1 * 2 + 0.1 * 5 = 0.68, weight 0.9 * 0.1 + 0.1 = 0.19: mean 68/19 = 3.578947;
    E[R²] <- 0.9 * 0.1 * 5 + 0.1 * 25 = 2.95: 295/19 - (68/19)² = 2.717452.
    """
    norm = norm_class(0.9)
    close(norm.denormalize(torch.ones(1)), [0.1])
    norm.update(torch.tensor([[1.0], [3.0]]))
    close(norm.mean_and_std(), [2, 1])
    close(norm.normalize(np.array([3.0])), [1])
    close(norm.denormalize(np.array([1.0])), [3])
    norm.update(torch.tensor([[5.0], [5.0]]))
    close(norm.mean_and_std(), [3.5789473684210527, 2.717451523545707**0.5])


def test_value_norm_by_hand():
    check_value_norm(mappo.ValueNorm)


@given(st.lists(hnp.arrays(np.float32, (3, 1), elements=st.floats(-100, 100, width=32)), min_size=1, max_size=5))
def test_value_norm_against_weights(batches):
    """The k-th last batch weighs beta^k."""
    norm = mappo.ValueNorm(0.7)
    for batch in batches:
        norm.update(torch.as_tensor(batch))
    weights = 0.7 ** np.arange(len(batches))[::-1]
    mean = np.average([batch.mean(dtype=np.float64) for batch in batches], weights=weights)
    square = np.average([np.square(batch, dtype=np.float64).mean() for batch in batches], weights=weights)
    close(norm.mean_and_std(), [mean, max(square - mean**2, 0.01) ** 0.5], 1e-4)
    copied = mappo.ValueNorm(0.7)
    copied.load_state_dict(norm.state_dict())
    assert copied.mean_and_std() == norm.mean_and_std()


def test_value_norm_far_from_zero():
    """Fails in single precision: returns around 10,000 with a deviation of 1."""
    norm = mappo.ValueNorm()
    norm.update(torch.tensor([9_999.0, 10_001.0]))
    close(norm.mean_and_std(), [10_000, 1], 1e-3)


# ----------------------------------------------------------------------------------------------------------- losses


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)[:, None]


def check_normalize(normalize_active):
    """Advantages 1, 2, 9, 3, of which the third is not active: mean 2, deviation sqrt(2/3) = 0.816497."""
    normalized = normalize_active(np.array([1.0, 2, 9, 3]), np.array([1, 1, 0, 1]))
    close(normalized[[0, 1, 3]], [-1.2247298715752986, 0, 1.2247298715752986], 1e-6)


def check_active_mean(active_mean):
    """Losses 1, 2, 100, 3, of which the third is not active: (1 + 2 + 3) / 3 = 2. None active: 0, not NaN."""
    close(active_mean(column(1, 2, 100, 3), column(1, 1, 0, 1)), 2)
    close(active_mean(column(1, 2), column(0, 0)), 0)


def check_actor_loss(actor_loss):
    """eps = 0.2; the last row is not active. Ratios 1.5, 0.5, 1.5, 0.5, 9 with advantages 2, 2, -2, -2, 9:

    min(3, 2.4) = 2.4;  min(1, 1.6) = 1;  min(-3, -2.4) = -3;  min(-1, -1.6) = -1.6;  the mean is -0.3, the loss 0.3.
    """
    ratios, advantages, active = column(1.5, 0.5, 1.5, 0.5, 9), column(2, 2, -2, -2, 9), column(1, 1, 1, 1, 0)
    close(actor_loss(ratios.log(), advantages, active, 0.2), 0.3)


def check_critic_loss(huber_value_loss):
    """Errors 1, -3 and, not active, 50; delta 2: 1/2 and 2 (3 - 1) = 4, mean 2.25.

    Clipped: old 1, new 2, return 3, clip 0.2: the larger of (3 - 2)²/2 and (3 - 1.2)²/2 = 1.62, delta being 10.
    """
    close(huber_value_loss(column(1, 0, 50), column(0, 0, 0), column(0, 3, 0), column(1, 1, 0), 2.0), 2.25)
    close(huber_value_loss(column(2), column(1), column(3), column(1), 10.0, 0.2), 1.62)
    close(huber_value_loss(column(2), column(1), column(3), column(1), 10.0), 0.5)


LOSSES = {
    "normalize_active": check_normalize, "active_mean": check_active_mean, "actor_loss": check_actor_loss,
    "huber_value_loss": check_critic_loss,
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses_by_hand(name):
    LOSSES[name](getattr(mappo, name))


@given(hnp.arrays(np.float32, (6, 3), elements=st.floats(-20, 20, width=32)), st.sampled_from([0.5, 10.0]))
def test_critic_loss_is_torchs_huber(numbers, delta):
    values, old, returns = torch.as_tensor(numbers).split(1, 1)
    plain = mappo.huber_value_loss(values, old, returns, torch.ones(6, 1), delta)
    close(plain, torch.nn.functional.huber_loss(values, returns, delta=delta), 1e-4)


@given(hnp.arrays(np.float32, (6, 2), elements=st.floats(-2, 2, width=32)), st.sampled_from([0.1, 0.3]))
def test_actor_loss_is_that_of_the_paper(numbers, eps):
    log_ratios, advantages = torch.as_tensor(numbers).split(1, 1)
    r = log_ratios.exp()
    paper = -torch.min(r * advantages, r.clamp(1 - eps, 1 + eps) * advantages).mean()
    close(mappo.actor_loss(log_ratios, advantages, torch.ones(6, 1), eps), paper, 1e-4)


# --------------------------------------------------------------------------------------------- networks and acting


@pytest.mark.parametrize("recurrent", [False, True])
def test_numpy_and_torch_agree(recurrent):
    """Fails if acting and learning compute different functions, step after step; or if weights are copied only once."""
    network = mappo.Net(4, (8, 6), 3, recurrent, torch.Generator().manual_seed(0), 1.0)
    assert network.hidden_size == (6 if recurrent else 0)
    assert (
        sum(p.numel() for p in network.parameters())
        == len(network.flat)
        == sum(a.size for a in network.arrays.values())
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        network.flat.add_(torch.randn(network.flat.shape, generator=generator))
        x, h = torch.randn(5, 2, 4, generator=generator), torch.randn(2, 1, network.hidden_size, generator=generator)
        masks = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1], [1, 1.0]])[..., None]
        with torch.no_grad():
            together = network(x.flatten(0, 1), h, masks.flatten(0, 1)).view(5, 2, 3)
        states = h.numpy()
        for t in range(5):
            output, states = network.infer(x[t].numpy(), states)
            close(output, together[t], 1e-4)
            states = states * masks[t, :, :, None].numpy()  # a reset row leaves nothing behind


ACTION_SPACES = {
    "Discrete": THREE, "from 5": spaces.Discrete(3, start=5), "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "Box": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTION_SPACES)
@pytest.mark.parametrize("masked", [False, True])
def test_sampled_log_probs_are_those_learned_with(name, masked):
    """Fails if the log-probs that acting stores are not those of the very same policy in torch."""
    space = ACTION_SPACES[name]
    if masked and not isinstance(space, spaces.Discrete):
        pytest.skip("PettingZoo has masks for Discrete actions only")
    actor = mappo.AgentPolicy(4, space, arguments(), torch.Generator().manual_seed(0))
    actor.flat.add_(torch.randn(actor.flat.shape, generator=torch.Generator().manual_seed(1)))
    obs, states = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32), np.zeros((50, 1, 0), np.float32)
    available = np.ones((50, 3 if masked else 0), np.float32)
    if masked:
        available[::2, 1] = available[::3, 2] = 0
    actions, log_probs, _ = actor.sample(obs, available, states, np.random.default_rng(0))
    tensors = [torch.as_tensor(x) for x in (obs, states, np.ones((50, 1)), available, actions)]
    learned, entropies = actor(*tensors)
    close(learned.detach(), log_probs, 1e-4)
    assert log_probs.shape == (50, 1) and entropies.shape == (50, 1) and np.isfinite(entropies.detach().numpy()).all()
    if masked:
        assert (np.take_along_axis(available, actions, 1) == 1).all()
        only = (available.sum(1) == 1)[:, None]
        close(entropies.detach()[only], np.zeros(only.sum()))
    in_env = actor.to_env(actions)
    assert all(space.contains(action) for action in in_env)
    if name == "from 5":
        assert (in_env == actions[:, 0] + 5).all()
    mode, log_prob, _ = actor.sample(obs, available, states)
    assert (log_prob >= log_probs - 1e-5).all() or name != "Box"
    if name == "Box":
        close(mode, actor.infer(obs, states)[0])


def test_actions_are_drawn_with_their_probabilities():
    """Fails if the draws are not those of the policy: 20,000 of them, with a third action that is not available."""
    actor = mappo.AgentPolicy(1, THREE, arguments(), torch.Generator().manual_seed(0))
    actor.flat.zero_()
    actor.arrays["head.bias"][:] = np.log([0.2, 0.6, 0.2])
    ones = np.ones((20_000, 3), np.float32) * np.array([1, 1, 0], np.float32)
    actions, log_probs, _ = actor.sample(ones[:, :1], ones, np.zeros((20_000, 1, 0)), np.random.default_rng(0))
    close(np.bincount(actions[:, 0], minlength=3) / 20_000, [0.25, 0.75, 0], 0.01)
    close(np.exp(log_probs[actions == 1]), [0.75] * (actions == 1).sum())


VARIANTS = {
    "feed-forward": {}, "separate": {"share_policy": False}, "FP": {"state_type": "FP"},
    "recurrent": {"recurrent": True}, "recurrent, separate": {"recurrent": True, "share_policy": False},
    "recurrent, FP": {"recurrent": True, "state_type": "FP"}, "whole": {"recurrent": True, "data_chunk_length": 0},
    "Box": {"env_kwargs": '{"continuous_actions": true}', "recurrent": True},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("scripted_env", [False, True])
def test_learning_sees_what_acting_did(name, scripted_env):
    """Fails if any minibatch's log-probs or values under unchanged weights differ from those stored while acting.

    So it fails if recurrent states are stored a row too early or late, are not reset after a reset row, or are reset
    before the final state was valued; if chunks, agents or environments are mixed up; if networks differ. The third
    rollout is looked at, so that first rows come from after_update; episodes end at different times.
    """
    if scripted_env and name == "Box":
        pytest.skip("the scripted environment is discrete")
    scripts = [{"a": [3, "terminated"], "b": [4, "truncated"]}, {"a": [6, "terminated"], "b": [1, "truncated"]}]
    one = {
        "env_id": "mappo_envs:Scripted",
        "env_kwargs": json.dumps({"scripts": scripts, "masks": {"a": [0, 1, 1], "b": [1, 1, 1]}}),
    }
    args = arguments(
        **(one if scripted_env else {"max_episode_steps": 7}) | VARIANTS[name], num_envs=3, num_minibatches=1
    )
    played = Played(args, rollouts=3)
    team, rng = played.team, played.rng
    assert (played.critic.masks[:-1] == 0).any()
    played.critic.compute_returns(team.values(played.critic.share_obs[-1], played.critic.rnn_states_critic[-1])[0])
    for actor, members in team.groups:
        parts = [
            mappo.minibatches(played.actors[i], "actor", args, rng, played.actors[i].action_log_probs) for i in members
        ]
        for batch in map(mappo.join_agents, zip(*parts)):
            log_probs, _ = actor(batch.obs, batch.rnn_states, batch.masks, batch.available_actions, batch.actions)
            close(log_probs.detach(), batch.log_probs, 1e-4)
            close(batch.advantages, batch.log_probs, 0)  # given as advantages: the same rows
    for batch in mappo.minibatches(played.critic, "critic", args, rng):
        close(team.critic(batch.share_obs, batch.rnn_states_critic, batch.masks).detach(), batch.value_preds, 1e-4)
    if len(team.groups) > 1:
        close(mappo.ratios(team.actors[0], played.actors[0]), np.ones_like(played.actors[0].factor), 1e-4)


def test_final_values_know_the_episode():
    """Fails if a recurrent critic forgets before it values the final state: two episodes that end in the same one."""
    played = Played(arguments(recurrent=True, max_episode_steps=7), rollouts=2)
    rows, envs = np.nonzero(played.critic.masks[:-1, :, 0] == 0)
    t, e = rows[0], envs[0]
    assert played.critic.rnn_states_critic[t, e].any() and not played.critic.rnn_states_critic[t + 1, e].any()
    forgetful, _ = team_value(played, t, e, np.zeros_like(played.critic.rnn_states_critic[t, [e]]))
    remembering, _ = team_value(played, t, e, played.critic.rnn_states_critic[t, [e]])
    close(remembering, played.critic.value_preds[t, [e]])
    differ(forgetful, remembering)


def team_value(played, t, e, states):
    return played.team.values(played.critic.share_obs[t, [e]], states)


def test_recurrent_evaluation_remembers_and_forgets():
    """Fails if `act` does not carry its states on, or carries them into the next episode."""
    args = arguments("mappo_envs:Recall", recurrent=True)
    played = Played(args)
    envs, twin = mappo.make_envs(args, 2), mappo.make_envs(args, 2)
    rows, _ = envs.reset(seed=1)
    actions = played.team.act(rows)
    after_first = played.team.memory.copy()
    played.team.act(envs.step(actions)[0])
    differ(played.team.memory, after_first)
    played.team.act(twin.reset(seed=1)[0])  # begins: as if nothing had been before
    close(played.team.memory, after_first)
    assert played.team.act(mappo.make_envs(args, 5).reset(seed=1)[0])[0].shape == (5,)


# ------------------------------------------------------------------------------------------------------- updates


def test_rows_that_are_not_active_weigh_nothing():
    """Fails if what an agent does while it is dead, or in a reset row, changes a single weight."""
    scripts = [{"a": [3, "terminated"], "b": [4, "truncated"]}, {"a": [6, "terminated"], "b": [2, "truncated"]}]
    for more in ({}, {"state_type": "FP"}, {"share_policy": False}, {"share_policy": False, "happo": True}):
        weights = []
        for garbage in (False, True):
            args = arguments("mappo_envs:Scripted", env_kwargs=json.dumps({"scripts": scripts}), num_envs=3, **more)
            played = Played(args)
            if garbage:
                for buffer in played.actors:
                    idle = buffer.active_masks[:-1, :, 0] == 0
                    buffer.actions[idle] = (buffer.actions[idle] + 1) % 3
                    buffer.action_log_probs[idle] -= 5
                    buffer.obs[:-1][idle] += 3
                # What is stored as reward of a reset row is never read: the trace ends before it.
                played.critic.rewards[played.critic.masks[:-1] == 0] = 77
            mappo.update(*optimizers(played))
            weights.append(torch.cat([network.flat for network in played.team.networks]).clone())
        assert torch.equal(*weights), more


def test_gradient_is_that_of_the_textbook_loss():
    """Fails if a term of either loss is missing, has the wrong sign or weight, or if M does not multiply A."""
    played = Played(arguments(share_policy=False, ent_coef=0.3, clip_vloss=False), rollouts=2)
    (actor, _), buffer, args = played.team.groups[0], played.actors[0], played.args
    rng = np.random.default_rng(1)
    buffer.action_log_probs += rng.normal(0, 0.3, buffer.action_log_probs.shape)
    buffer.factor[:] = rng.uniform(0.5, 2, buffer.factor.shape)
    (batch,) = buffer.feed_forward_generator_actor(rng.normal(size=buffer.factor.shape).astype(np.float32), 1, rng)
    gradient, (pg_loss, entropy), log_ratios = mappo.actor_gradient(actor, batch, args)
    pi = torch.distributions.Categorical(logits=actor.head(actor.body(batch.obs)))
    r = (pi.log_prob(batch.actions[:, 0]) - batch.log_probs[:, 0]).exp()
    A, active = (batch.advantages * batch.factor)[:, 0], batch.active_masks[:, 0] > 0
    surrogate = torch.min(r * A, r.clamp(0.8, 1.2) * A)[active].mean()
    loss = -surrogate - 0.3 * pi.entropy()[active].mean()
    close(gradient, torch.cat([g.flatten() for g in torch.autograd.grad(loss, actor.leaves)]), 1e-5)
    close([pg_loss, entropy], [-surrogate.item(), pi.entropy()[active].mean().item()])

    critic, norm = played.critic, mappo.ValueNorm()
    critic.compute_returns(np.zeros((2, 1)), None)
    norm.update(torch.as_tensor(critic.returns))
    (batch,) = critic.feed_forward_generator_critic(1, rng)
    gradient, loss = mappo.critic_gradient(played.team.critic, batch, args, norm)
    values = played.team.critic.head(played.team.critic.body(batch.share_obs))
    errors = (values - norm.normalize(batch.returns))[batch.active_masks > 0]
    textbook = torch.nn.functional.huber_loss(errors, torch.zeros_like(errors), delta=10.0)
    close(gradient, torch.cat([g.flatten() for g in torch.autograd.grad(textbook, played.team.critic.leaves)]), 1e-5)


def test_happo_hands_on_the_product_of_ratios(monkeypatch):
    """Fails if an agent is updated with other than the product of the ratios of all who came before it, or if the order
    is always the same. MAPPO's separate policies know nothing of each other."""
    orders = set()
    for happo in (True, False):
        for seed in range(6):
            played = Played(arguments(share_policy=False, happo=happo, update_epochs=3), rollouts=3)  # with a reset row
            team, seen, gradient = played.team, [], mappo.actor_gradient
            numbers = {id(actor): i for i, actor in enumerate(team.actors)}
            old = [copy.deepcopy(b.action_log_probs) for b in played.actors]

            def watch(actor, batch, args):
                number = numbers[id(actor)]
                if not seen or seen[-1][0] != number:
                    seen.append((number, played.actors[number].factor.copy()))
                return gradient(actor, batch, args)

            monkeypatch.setattr(mappo, "actor_gradient", watch)
            played.rng = np.random.default_rng(seed)
            mappo.update(*optimizers(played))
            monkeypatch.setattr(mappo, "actor_gradient", gradient)
            expected = np.ones_like(old[0])
            for number, factor in seen:
                close(factor, expected, 1e-5)
                buffer, actor = played.actors[number], team.actors[number]
                if happo:
                    obs, actions = torch.as_tensor(buffer.obs[:-1]), torch.as_tensor(buffer.actions)
                    new = torch.distributions.Categorical(logits=actor.head(actor.body(obs))).log_prob(actions[..., 0])
                    ratio = np.exp(new.detach().numpy()[..., None] - old[number])
                    expected = expected * np.where(buffer.active_masks[:-1] > 0, ratio, 1)
            assert sorted(number for number, _ in seen) == [0, 1, 2]
            if happo:
                differ(expected, np.ones_like(expected))
                orders.add(tuple(number for number, _ in seen))
            else:
                assert [number for number, _ in seen] == [0, 1, 2]
    assert len(orders) > 1


def test_advantages_of_each_agent(monkeypatch):
    """Fails if agents get another's advantages, or if these are not normalised over those who share a policy."""
    for share in (True, False):
        played = Played(arguments(share_policy=share, state_type="FP", update_epochs=1))
        seen, gradient = [], mappo.actor_gradient

        def watch(actor, batch, args):
            seen.append(batch)
            return gradient(actor, batch, args)

        monkeypatch.setattr(mappo, "actor_gradient", watch)
        mappo.update(*optimizers(played))
        monkeypatch.setattr(mappo, "actor_gradient", gradient)
        A = played.critic.advantages  # (T, N, n, 1)
        active = np.stack([b.active_masks[:-1] for b in played.actors], 2)
        assert len(seen) == (1 if share else 3)
        for i, batch in enumerate(seen):
            mine = slice(None) if share else slice(i, i + 1)
            some = A[:, :, mine][active[:, :, mine] > 0]
            expected = (A[:, :, mine] - some.mean()) / (some.std() + 1e-5)
            close(np.sort(batch.advantages.numpy().ravel()), np.sort(expected.ravel()), 1e-4)
            weighed = batch.advantages[batch.active_masks > 0]
            close([weighed.mean(), weighed.std(correction=0)], [0, 1], 1e-3)


@pytest.mark.parametrize("name", ["separate", "shared", "GRU", "GRU, whole rollouts", "no clipping"])
def test_an_update_is_what_the_arguments_say(name, monkeypatch):
    """10 steps in two environments, the fifth a reset row: 20 rows, or 4 chunks of 5 steps, or 2 of all ten.

    Fails if epochs, minibatches, chunks, learning rate, gradient norm or the clipping of values are not as asked for,
    or if a figure of metrics.csv is not the mean over all of them, of active rows only.
    """
    more = {"share_policy": name == "shared", "recurrent": name.startswith("GRU"), "clip_vloss": name != "no clipping"}
    more |= {
        "num_minibatches": 2,
        "update_epochs": 3,
        "max_grad_norm": 0.7,
        "data_chunk_length": 5,
        "clip_vloss_coef": 0.1,
    }
    if name == "GRU, whole rollouts":
        more["data_chunk_length"] = 0
    played = Played(arguments(**more), rollouts=3)
    rng = np.random.default_rng(0)
    for buffer in played.actors:
        buffer.action_log_probs += rng.normal(0, 0.3, buffer.action_log_probs.shape)
    played.critic.value_preds += rng.normal(0, 0.5, played.critic.value_preds.shape)
    active = played.critic.active_masks[:-1] > 0
    assert 0 < (~active).sum() < 5
    actor_gradient, critic_gradient, seen, valued, taken = mappo.actor_gradient, mappo.critic_gradient, [], [], []

    def watch_actor(actor, batch, args):
        seen.append((batch, actor_gradient(actor, batch, args)))
        return seen[-1][1]

    def watch_critic(critic, batch, args, norm):
        values = critic(batch.share_obs, batch.rnn_states_critic, batch.masks)
        targets, clip_coef = norm.normalize(batch.returns), 0.1 if args.clip_vloss else None
        inputs = values, batch.value_preds, targets, batch.active_masks, args.huber_delta
        valued.append((batch, mappo.huber_value_loss(*inputs, clip_coef).item()))
        return critic_gradient(critic, batch, args, norm)

    monkeypatch.setattr(mappo, "actor_gradient", watch_actor)
    monkeypatch.setattr(mappo, "critic_gradient", watch_critic)
    monkeypatch.setattr(mappo.Adam, "step", lambda self, gradient, *how: taken.append(how))
    team, adams, actors, critic, _, args, rng = optimizers(played)
    figures = mappo.update(team, adams, actors, critic, 0.02, args, rng)

    policies, together = (1, 3) if name == "shared" else (3, 1)
    assert len(seen) == policies * 3 * 2 and len(valued) == 3 * 2
    assert taken == [(0.02, 0.7)] * (len(seen) + len(valued))
    length = {"GRU": 5, "GRU, whole rollouts": 10}.get(name, 1)
    for batch, _ in seen:
        assert len(batch.masks) == 10 * together and len(batch.rnn_states) == 10 * together // length
    for batch, _ in valued:
        assert len(batch.masks) == 10 and len(batch.rnn_states_critic) == 10 // length
    log_r = torch.cat([log_ratios[batch.active_masks > 0] for batch, (_, _, log_ratios) in seen])
    r, values = log_r.exp(), critic.returns - critic.advantages
    expected = dict(zip(("policy_loss", "entropy"), torch.stack([loss for _, (_, loss, _) in seen]).mean(0).tolist()))
    expected |= {"value_loss": np.mean([loss for _, loss in valued]), "approx_kl": (r - 1 - log_r).mean().item()}
    expected["clip_fraction"] = ((r < 0.8) | (r > 1.2)).float().mean().item()
    residual = (critic.returns - values)[active]
    expected["explained_variance"] = 1 - residual.var() / critic.returns[active].var()
    assert figures.keys() == expected.keys()
    close([figures[key] for key in expected], list(expected.values()), 1e-4)


def test_the_critics_buffer_is_what_the_arguments_say():
    """Fails if returns are not those of --gamma, --gae-lambda and --no-gae."""
    for state_type in ("EP", "FP"):
        critic = Played(arguments(gamma=0.7, gae_lambda=0.3, state_type=state_type)).critic
        assert (critic.gamma, critic.gae_lambda) == (0.7, 0.3)
        assert Played(arguments(gae=False, state_type=state_type)).critic.gae_lambda is None


def test_a_termination_on_the_last_step_allowed_is_none_of_the_limit():
    """Matrix terminates after one step, which is all that is allowed: fails if its end counts as a truncation."""
    played = Played(arguments("mappo_envs:Matrix", max_episode_steps=1))
    assert (played.critic.masks == 0).any() and (played.critic.bad_masks == 1).all()


def test_annealing(tmp_path, monkeypatch):
    """The rate of a rollout is that of its first step: 1 - 0/60, 1 - 20/60, 1 - 40/60 of 7e-4 (no episode ends)."""
    monkeypatch.setattr(mappo, "draw_curve", lambda *_: None)
    for anneal_lr, shares in ((True, [1, 2 / 3, 1 / 3]), (False, [1, 1, 1])):
        run = tmp_path / str(anneal_lr)
        mappo.train(arguments(total_timesteps=60, num_envs=2, anneal_lr=anneal_lr, run_dir=str(run)))
        rates = [float(row["learning_rate"]) for row in metrics(run)]
        close(rates[:3], [7e-4 * share for share in shares], 1e-9)


def test_the_critics_targets_are_normalised_returns(monkeypatch):
    """Fails if targets are not normalised, or by what was known before this rollout only."""
    played = Played(arguments(update_epochs=1))
    seen, gradient = [], mappo.critic_gradient
    monkeypatch.setattr(mappo, "critic_gradient", lambda *given: seen.append(given) or gradient(*given))
    mappo.update(*optimizers(played))
    ((_, batch, _, norm),) = seen
    active = played.critic.active_masks[:-1] > 0
    returns = played.critic.returns[active]
    close(norm.mean_and_std(), [returns.mean(), returns.std()], 1e-3)


# ---------------------------------------------------------------------------------------------------------- games


GAMES = {
    "matrix, MAPPO": ("Matrix", {}, 6.0),
    "matrix, HAPPO": ("Matrix", {"happo": True, "share_policy": False}, 6.0),
    "meet": ("Meet", {}, 1.6),
    "meet, HAPPO, FP, no GAE": ("Meet", {"happo": True, "share_policy": False, "state_type": "FP", "gae": False}, 1.6),
    "meet, recurrent, FP, naive": ("Meet", {"recurrent": True, "state_type": "FP", "data_chunk_length": 0}, 1.6),
    "meet, no value norm, no clipping": ("Meet", {"value_norm": False, "clip_vloss": False}, 1.6),
    "recall, recurrent": ("Recall", {"recurrent": True}, 2.0),
}


def learned(name, tmp_path, **more):
    """The mean evaluation return of a short training run."""
    game, given, best = GAMES[name]
    share = {"share_policy": game != "Matrix"}  # both see the same there, but have to act differently
    steps = {"Matrix": 4_000, "Meet": 8_000, "Recall": 12_000}[game]
    args = dict(num_envs=8, num_steps=20, update_epochs=5, learning_rate=3e-3, total_timesteps=steps, eval_episodes=50)
    args |= share | dict(num_minibatches=2, eval_every=10**9, run_dir=str(tmp_path / "run")) | given | more
    return mappo.train(arguments(f"mappo_envs:{game}", **args))["eval_return_mean"], best


SLOW = {"meet, recurrent, FP, naive", "meet, no value norm, no clipping"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in GAMES])
def test_games_are_solved(name, tmp_path, monkeypatch):
    """Best play: (2, 0) gives 2 x 3 in the matrix game (best against chance is (1, 1)); who meets in at most two steps
    gets at least 2 x (1 - 0.2); who remembers both signs gets 2 x 1."""
    monkeypatch.setattr(mappo, "draw_curve", lambda *_: None)
    mean, best = learned(name, tmp_path)
    assert mean >= best - 0.2


@pytest.mark.slow
def test_recall_needs_a_memory(tmp_path, monkeypatch):
    """Fails if the sign leaks into later observations: without memory 2 x 1/4 is the most to expect."""
    monkeypatch.setattr(mappo, "draw_curve", lambda *_: None)
    mean, _ = learned("recall, recurrent", tmp_path, recurrent=False, eval_episodes=200)
    assert mean < 1


# ----------------------------------------------------------------------------------------------------------- runs

TIME_COLUMNS = ("seconds", "sps")
SMALL = "--num-envs 4 --num-steps 25 --num-minibatches 2 --update-epochs 2 --eval-episodes 3 --no-progress".split()


def shell(folder, *flags, code=0):
    """Run `python mappo.py flags…` in `folder`, expect the exit code, return the finished process."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "mappo.py", *map(str, flags)]
    done = subprocess.run(command, cwd=folder, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def alone(tmp_path):
    """An empty folder with nothing but mappo.py in it."""
    (tmp_path / "mappo.py").write_bytes(Path(mappo.__file__).read_bytes())
    return tmp_path


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


def assert_same_run(one, other):
    """Two finished runs agree in everything but the time they took: figures, weights, generators, episodes."""
    assert metrics(one) == metrics(other) != []
    names = sorted(path.name for path in (one / "models").iterdir())
    assert names == sorted(path.name for path in (other / "models").iterdir())
    for name in ("checkpoint.pt", *(f"models/{name}" for name in names)):
        a, b = (flat_state(torch.load(run / name, weights_only=True)) for run in (one, other))
        assert a.keys() == b.keys()
        for key in a.keys() - {"/seconds"}:
            same = torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key]
            assert same, f"{name}{key}"


def test_copied_alone_it_leaves_a_complete_run_folder(alone):
    """Fails if mappo.py imports a sibling, or if a part of the run folder or the last two lines are missing."""
    flags = ["--total-timesteps", 1000, "--eval-every", 400, "--capture-video", "--run-dir", "run", *SMALL]
    done = shell(alone, *flags)
    run = alone / "run"
    assert len(done.stdout.splitlines()) == 3 + done.stdout.count("MoviePy") and "evaluation: -" in done.stdout
    for name in "config.json metrics.csv learning_curve.png checkpoint.pt summary.json models/best.pt".split():
        assert (run / name).stat().st_size > 0
    assert len(list((run / "videos").glob("*.mp4"))) == len(list((run / "models").glob("[0-9]*.pt"))) == 3
    rows = metrics(run)
    assert [int(row["step"]) for row in rows][:3] == [100, 196, 292]  # 4 x 25 steps; then 4 of them are reset rows
    summary = json.loads((run / "summary.json").read_text())
    assert summary["global_step"] == int(rows[-1]["step"]) >= 1000 and summary["eval_episodes"] == 3
    done = shell(alone, "--evaluate", "run", "--eval-episodes", 3)
    assert "best weights: -" in done.stdout
    done = shell(alone, "--evaluate", "run", "--model", "last")
    assert f"{summary['eval_return_mean']:.2f}" in done.stdout


KILLED = {
    "spread": [],
    "recurrent, FP": ["--recurrent", "--state-type", "FP"],
    "HAPPO, continuous": ["--happo", "--no-share-policy", "--env-kwargs", '{"continuous_actions": true}'],
    "reference, limits": ["--env-id", "mpe2.simple_reference_v3", "--max-episode-steps", 11, "--recurrent"],
}


def kill_and_resume(folder, flags, kills, rng):
    """Run, kill with SIGKILL at a random moment, resume, `kills` times; then let it finish."""
    command = [sys.executable, "mappo.py", *map(str, flags), "--run-dir", "killed"]
    done = 0
    env = os.environ | {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy"}
    while done < kills:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while not (folder / "killed/checkpoint.pt").exists() and process.poll() is None:
            time.sleep(0.01)
        if "--resume" in command:
            time.sleep(1.5)  # the start of Python
        time.sleep(rng.uniform(0, 1))
        ended = process.poll() is not None
        process.send_signal(signal.SIGKILL)
        error = process.communicate()[1].decode()
        assert not error, error
        command = [sys.executable, "mappo.py", "--resume", "killed"]
        done += 1
        if ended:
            break
    shell(folder, *command[2:])
    return done


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "recurrent, FP" else pytest.mark.slow) for n in KILLED]
)
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(name, alone):
    """Fails if a checkpoint lacks anything that the rest of the run depends on, or is ever found half written."""
    flags = ["--total-timesteps", 3000, "--checkpoint-every", 90, "--eval-every", 1000, *SMALL, *KILLED[name]]
    shell(alone, *flags, "--run-dir", "unbroken")
    assert kill_and_resume(alone, flags, 2 if name == "recurrent, FP" else 5, random.Random(0)) >= 1
    assert_same_run(alone / "unbroken", alone / "killed")


def test_stopped_and_prolonged_is_the_same(tmp_path, monkeypatch):
    """Fails if a resumed run does not go on exactly: without annealing, 500 + 500 steps are 1,000."""
    monkeypatch.setattr(mappo, "draw_curve", lambda *_: None)
    given = dict(anneal_lr=False, recurrent=True, eval_every=10**9)
    mappo.train(arguments(total_timesteps=400, run_dir=str(tmp_path / "one"), **given))
    mappo.train(Args(resume=str(tmp_path / "one"), total_timesteps=800))
    mappo.train(arguments(total_timesteps=800, run_dir=str(tmp_path / "two"), **given))
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    for name in ("agent", "optimizer_0", "optimizer_1"):
        a, b = (
            flat_state(torch.load(tmp_path / run / "checkpoint.pt", weights_only=True)[name]) for run in ("one", "two")
        )
        assert all(torch.equal(a[key], b[key]) for key in a) and a.keys() == b.keys()


def test_environments_that_are_not_carried_over_restart(tmp_path, monkeypatch, capsys):
    """Fails if a run whose environments cannot be carried over does not say so, or keeps its old recurrent states."""
    monkeypatch.setattr(mappo, "draw_curve", lambda *_: None)
    mappo.train(arguments(total_timesteps=100, run_dir=str(tmp_path / "run"), recurrent=True, async_envs=True))
    begin, seen = mappo.begin, []
    monkeypatch.setattr(mappo, "begin", lambda *given: begin(*given) or seen.append(copy.deepcopy(given)))
    mappo.train(Args(resume=str(tmp_path / "run"), total_timesteps=200))
    assert "episodes restart" in capsys.readouterr().out
    _, actors, critic, run = seen[0]
    assert (run.obs[:, 0] == 1).all() and (critic.masks[0] == 1).all()
    assert not critic.rnn_states_critic[0].any() and not any(b.rnn_states[0].any() for b in actors)


def test_same_seed_same_run(tmp_path, monkeypatch):
    """Fails if anything is drawn from a generator that --seed does not decide, or if --seed decides nothing."""
    monkeypatch.setattr(mappo, "draw_curve", lambda *_: None)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(hash(name) % 1000)
        np.random.seed(hash(name) % 1000)
        given = dict(total_timesteps=300, happo=True, share_policy=False, recurrent=True)
        mappo.train(arguments(seed=seed, run_dir=str(tmp_path / name), **given))
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")


def test_notebook(tmp_path, monkeypatch):
    """Fails if train, load or evaluate cannot be called as the docs say."""
    monkeypatch.chdir(tmp_path)
    mappo.train(arguments("mpe2.simple_speaker_listener_v4", total_timesteps=100, run_dir="run"))
    team = mappo.load("run")
    assert len(team.actors) == 2  # TUNED knows that the agents differ
    one, two = (mappo.evaluate(team, team.args, 4, seed) for seed in (0, 0))
    assert one == two and one[0] < 0


def test_stop_at_return(tmp_path, monkeypatch):
    """Fails if a run goes on although its training episodes are good enough."""
    monkeypatch.setattr(mappo, "draw_curve", lambda *_: None)
    args = arguments("mappo_envs:Matrix", stop_at_return=0.1, total_timesteps=10**6, run_dir=str(tmp_path / "run"))
    assert mappo.train(args)["global_step"] < 5000


@pytest.mark.parametrize("field", ["observation", "reward"])
def test_nan_from_the_environment_ends_the_run(field, tmp_path):
    """Fails if a NaN is learned from, or if the message does not say which field it was in, and when."""
    kwargs = json.dumps({"field": field})
    args = arguments("mappo_envs:Bad", env_kwargs=kwargs, num_envs=1, run_dir=str(tmp_path / "run"))
    with pytest.raises(mappo.UserError, match=f"mappo_envs:Bad, step {3 if field == 'observation' else 4}: {field}"):
        mappo.train(args)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--env-id mpe2.simple_spred_v3", "did you mean mpe2.simple_spread_v3"),
        ("--env-id CartPole-v1", "cannot make CartPole-v1"),
        ("--env-id nosuchpackage.env", "pip install nosuchpackage"),
        ("--env-id json", "cannot make json"),
        ("--env-id mpe2.simple_speaker_listener_v4 --share-policy", "--no-share-policy"),
        ("--happo", "--no-share-policy"),
        ("--env-kwargs [1]", "not a JSON object"),
        ('--env-kwargs {"M":3}', "unexpected keyword"),
        ("--wrappers no.such.wrapper", "no.such.wrapper"),
        ("--num-minibatches 7", "do not divide"),
        ("--recurrent --data-chunk-length 7", "does not divide num_steps"),
        ("--gamma 1.5", "gamma must lie between"),
        ("--env-id mpe2.simple_spread", "did you mean mpe2.simple_spread_v3"),
        ("--env-id mappo_envs.broken", "pip install nosuchdependency"),
        ("--env-id __main__.foo", "cannot make __main__.foo"),
        ('--env-id mpe2.simple_reference_v3 --env-kwargs {"continuous_actions":true}', "--action-factor 0"),
        ("--action-factor 1", "action_factor = 1"),
        ("--hidden-sizes", "at least one layer"),
        ("--torch-threads 99999999999", "torch_threads must lie between"),
        ("--state-type XX", "XX"),
        ("--num-envs 0", "num_envs"),
        ("--foo", "foo"),
        ("--device nothing", "device nothing"),
        ("--resume nowhere", "nowhere"),
        ("--evaluate nowhere", "nowhere"),
        ("--config nowhere.json", "nowhere.json"),
        ("--env-id mappo_envs:Matrix --capture-video", "no render mode rgb_array"),
    ],
)
def test_bad_input_is_one_line(flags, words, tmp_path, monkeypatch, capsys):
    """Fails if bad input ends in a traceback, in several lines, another exit code, or after something was written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mappo.py", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        mappo.main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and words in err and list(tmp_path.iterdir()) == []


def test_bad_input_as_a_process(alone):
    done = shell(alone, "--env-id", "mpe2.simple_spred_v3", code=2)
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_resume_refuses_another_algorithm(tmp_path, monkeypatch):
    """Fails if what decides the run can change when it is resumed."""
    monkeypatch.setattr(mappo, "draw_curve", lambda *_: None)
    mappo.train(arguments(total_timesteps=20, run_dir=str(tmp_path / "run")))
    with pytest.raises(mappo.UserError, match="gamma cannot change"):
        mappo.train(Args(resume=str(tmp_path / "run"), gamma=0.5))
    with pytest.raises(mappo.UserError, match="of another script, environment or network"):
        mappo.load(tmp_path / "run", args=Args(evaluate=str(tmp_path / "run"), hidden_sizes=(8, 8)))


def test_one_environment_one_step(tmp_path, monkeypatch):
    """Fails if a rollout that is nothing but a reset row is learned from, or counted."""
    monkeypatch.setattr(mappo, "draw_curve", lambda *_: None)
    args = arguments("mappo_envs:Matrix", num_envs=1, num_steps=1, total_timesteps=5, run_dir=str(tmp_path / "run"))
    mappo.train(args)
    assert [int(row["step"]) for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


# ---------------------------------------------------------------------------------------------- known mistakes


def returns_with(change, normalised=True):
    """compute_returns on a buffer to which `change(buffer, next_value)` was done first."""

    def compute(buffer, next_value, value_normalizer=None):
        values = buffer.value_preds.copy()
        next_value = change(buffer, next_value)
        mappo.CriticBuffer.compute_returns(buffer, next_value, value_normalizer if normalised else None)
        buffer.value_preds[:-1] = values[:-1]

    return compute


def truncation_is_termination(buffer, next_value):
    buffer.bad_masks[:] = 1
    return next_value


def no_end_at_all(buffer, next_value):
    buffer.masks[:] = 1
    return next_value


def termination_is_truncation(buffer, next_value):
    buffer.bad_masks[:] = buffer.masks
    return next_value


def next_value_denormalised_twice(buffer, next_value):
    return 2 * next_value + 1


def no_swap(fields, states, num_mini_batch, length, rng):
    """Chunks cut across environments: time-major rows are taken for stream-major ones."""
    T, S = fields[0].shape[:2]
    swapped = [x.reshape(S, T, *x.shape[2:]).swapaxes(0, 1) for x in fields]
    padded = np.concatenate([states[:T].reshape(S, T, *states.shape[2:]).swapaxes(0, 1), states[:1]])
    yield from mappo.recurrent_batches(swapped, padded, num_mini_batch, length, rng)


def chunk_major(fields, states, num_mini_batch, length, rng):
    """Batches in which each chunk's steps stand together."""
    for (x, *_), first in mappo.recurrent_batches(fields, states, num_mini_batch, length, rng):
        yield [x.reshape(length, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)], first


def last_states(fields, states, num_mini_batch, length, rng):
    """The states after the first steps."""
    yield from mappo.recurrent_batches(fields, np.roll(states, -1, 0), num_mini_batch, length, rng)


class NotDebiased(mappo.ValueNorm):
    def mean_and_std(self):
        return self.mean.item(), max(self.mean_square.item() - self.mean.item() ** 2, 0.01) ** 0.5


class Forgetful(mappo.ValueNorm):
    def update(self, returns):
        self.__init__(self.beta)
        super().update(returns)


def one_after_the_other(batches):
    return mappo.ActorBatch(*(torch.cat(parts) for parts in zip(*batches)))


MISTAKES = {
    "truncation as termination": (check_compute_returns, returns_with(truncation_is_termination)),
    "termination as truncation": (check_compute_returns, returns_with(termination_is_truncation)),
    "ends ignored": (check_compute_returns, returns_with(no_end_at_all)),
    "next value ignored": (check_compute_returns, returns_with(lambda buffer, value: buffer.value_preds[-1])),
    "not denormalised": (check_normalized_returns, returns_with(lambda buffer, value: value, normalised=False)),
    "denormalised twice": (check_normalized_returns, returns_with(next_value_denormalised_twice)),
    "chunks across environments": (check_chunks, no_swap),
    "chunk-major batches": (check_chunks, chunk_major),
    "states after the first steps": (check_chunks, last_states),
    "agents joined on the time axis": (check_join, one_after_the_other),
    "not debiased": (check_value_norm, NotDebiased),
    "forgetful": (check_value_norm, Forgetful),
    "normalised over all": (check_normalize, lambda a, active: (a - a.mean()) / (a.std() + 1e-5)),
    "sample deviation": (check_normalize, lambda a, active: (a - 2) / (a[active > 0].std(ddof=1) + 1e-5)),
    "mean over all": (check_active_mean, lambda x, active: (x * active).mean()),
    "not clipped": (check_actor_loss, lambda log_r, a, active, eps: -mappo.active_mean(log_r.exp() * a, active)),
    "all weigh": (check_actor_loss, lambda log_r, a, active, eps: mappo.actor_loss(log_r, a, active * 0 + 1, eps)),
    "max for min": (check_actor_loss, lambda log_r, a, active, eps: -mappo.actor_loss(log_r, -a, active, eps)),
    "squares": (check_critic_loss, lambda *a: mappo.huber_value_loss(*a[:4], 1e9, *a[5:])),
    "value clip ignored": (check_critic_loss, lambda *a: mappo.huber_value_loss(*a[:5])),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_caught(name):
    """Fails if a check would let a known mistake pass."""
    check, faulty = MISTAKES[name]
    with pytest.raises(AssertionError):
        check(faulty)
