"""mappo.py's functions against slow, obvious versions of them; its rows against PettingZoo's own; its updates against
what the arguments say."""

from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.by_hand.test_mappo import THREE, Shuffled, column, critic_buffer
from tests.team_tools import SPREAD, arguments, played, rehearse_team
from tests.tools import close

slow = pytest.mark.slow
# Rewards of single agents differ; who dies when differs from episode to episode, and the last end decides.
DEATHS = [{"a": [3, "terminated"], "b": [4, "truncated"]}, {"a": [6, "terminated"], "b": [2, "truncated"]}]


def differ(actual, expected):
    """AssertionError if all numbers agree."""
    assert np.abs(np.asarray(actual) - np.asarray(expected)).max() > 1e-3


# ---------------------------------------------------------------------------------------------- rows of environments


def make(script, env_id=SPREAD, num_envs=1, **more):
    """A vector environment, and the layout of its rows."""
    envs = script.make_envs(arguments(script, env_id, **more), num_envs)
    return envs, envs.get_attr("layout")[0]


def test_rows_are_what_pettingzoo_returns(script):
    """Fails if observations, rewards or ends are not those of the environment, or land in the wrong place or row.

    A row of simple_spread: 1 number for the beginning, 3 for who is alive, 3 x 18 observations, which are the state.
    """
    from mpe2 import simple_spread_v3

    envs, layout = make(script, num_envs=2)
    assert layout.alive == slice(1, 4) and layout.observations == [slice(4, 22), slice(22, 40), slice(40, 58)]
    assert layout.state == slice(4, 58) and all(part == slice(58, 58) for part in layout.available)
    assert envs.single_observation_space.shape == (58,) and len(envs.single_action_space.spaces) == 3
    assert envs.spec.max_episode_steps == 25  # evaluations and the distance of checkpoints go by it
    rows, _ = envs.reset(seed=5)
    twins = [simple_spread_v3.parallel_env() for _ in range(2)]
    obs = [twin.reset(seed=seed)[0] for twin, seed in zip(twins, (5, 6))]
    rng = np.random.default_rng(0)
    for t in range(25):
        close(rows[:, 0], [float(t == 0)] * 2)
        close(rows[:, layout.alive], np.ones((2, 3)))
        for row, observed in zip(rows, obs):
            close(row[layout.state], np.concatenate(list(observed.values())))
        actions = rng.integers(5, size=(3, 2))
        rows, rewards, terminated, truncated, infos = envs.step(tuple(actions))
        steps = [twin.step(dict(zip(twin.possible_agents, action))) for twin, action in zip(twins, actions.T)]
        obs = [step[0] for step in steps]
        own = [list(step[1].values()) for step in steps]
        close(infos["rewards"], own)
        close(rewards, np.sum(own, 1))
        assert not terminated.any() and not infos["terminated"].any() and (truncated == (t == 24)).all()
    close(rows[:, layout.alive], np.ones((2, 3)))  # the final observation is there, though all agents are gone
    close(rows[0, layout.state], np.concatenate(list(obs[0].values())))
    rows, rewards, _, truncated, infos = envs.step(tuple(actions))  # the reset row
    close(rows[:, 0], [1, 1])
    assert not rewards.any() and not truncated.any() and not infos["rewards"].any()


def test_agents_of_different_kinds(script):
    """Fails if the agents' places are those of equal agents, or if a group of actions goes to another agent."""
    envs, layout = make(script, "mpe2.simple_speaker_listener_v4", 2)
    assert layout.observations == [slice(3, 6), slice(6, 17)] and layout.state == slice(3, 17)
    team = script.make_agent(arguments(script, "mpe2.simple_speaker_listener_v4", share_policy=False), envs)
    speaker, listener = team.act(envs.reset(seed=0)[0])
    assert speaker.shape == listener.shape == (2,)
    assert [actor.output_sizes for actor in team.actors] == [[3], [5]]


def test_factored_actions_are_those_of_the_environment(script):
    """Fails if a pair of factors becomes another action than mpe2 means by it, or another agent's actions are split.

    simple_reference has 5 moves and 10 messages in one number, move + 5 · message, so (2, 7) is 2 + 35 = 37.
    """
    env_id = "mpe2.simple_reference_v3"
    split, layout = make(script, env_id, 2, action_factor=5)
    plain, _ = make(script, env_id, 2)
    assert [space.nvec.tolist() for space in split.single_action_space.spaces] == [[5, 10]] * 2
    assert script.make_agent(arguments(script, env_id), split).actors[0].output_sizes == [5, 10]
    close(split.reset(seed=3)[0], plain.reset(seed=3)[0])
    one, other = np.array([[2, 7], [0, 0]]), np.array([[4, 9], [3, 1]])  # of the agents, in two environments
    rows = split.step((one, other))[0]
    close(rows, plain.step((np.array([37, 0]), np.array([49, 8])))[0])
    heard = [rows[:, part][:, -10:].argmax(1).tolist() for part in layout.observations]
    assert heard == [[9, 1], [7, 0]]  # each hears the other
    env = gym.Env()
    env.action_space = spaces.Tuple([spaces.Discrete(6, start=10), spaces.Box(-1, 1, (2,))])
    env.layout = script.Layout(None, None, None, [slice(3, 3)] * 2)
    pair, box = script.FactoredActions(env, 3).action((np.array([2, 1]), np.array([0.5, 0])))
    assert pair == 10 + 2 + 3 * 1 and box.tolist() == [0.5, 0]


def test_the_dead_and_how_episodes_end(script):
    """Fails if the dead are not told from the living, observe anything, or decide how an episode ends.

    Agent a terminates at step 1, b is truncated at step 3: the episode is truncated. In the second episode b is
    truncated at step 1 and a terminates at step 2: the last to act terminated, and so did the episode.
    """
    scripts = {"a": [1, "terminated"], "b": [3, "truncated"]}, {"a": [2, "terminated"], "b": [1, "truncated"]}
    envs, layout = make(script, "Scripted", env_kwargs={"scripts": scripts})
    assert layout == script.Layout(slice(1, 3), [slice(3, 4), slice(4, 5)], slice(5, 7), [slice(7, 7)] * 2)
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
    envs, _ = make(script, "Scripted", env_kwargs={"scripts": [{"a": [1, "terminated"], "b": [1, "truncated"]}]})
    envs.reset(seed=0)
    _, _, terminated, truncated, _ = envs.step(action)
    assert not terminated and truncated  # not all who acted last terminated


def test_masks_come_from_info_or_from_the_observation(script):
    """Fails if a mask is lost, given to another agent, or if an agent without a valid action has none or several."""
    scripts, masks = [{"a": [2, "truncated"], "b": [2, "truncated"]}], {"a": [0, 1, 1], "b": [0, 0, 0]}
    kwargs = {"scripts": scripts, "masks": masks, "own_state": False}
    envs, layout = make(script, "Scripted", env_kwargs=kwargs)
    assert layout.available == [slice(5, 8), slice(8, 11)] and layout.state == slice(3, 5)
    close(envs.reset(seed=0)[0][0, 5:], [0, 1, 1, 1, 0, 0])
    envs, layout = make(script, "tictactoe")
    rows, _ = envs.reset(seed=0)
    close(rows[0, layout.available[0]], np.ones(9))
    close(rows[0, layout.available[1]], np.arange(9) == 0)  # who waits has a no-op
    rows, *_ = envs.step((np.array([4]), np.array([0])))
    close(rows[0, layout.available[0]], np.arange(9) == 0)
    close(rows[0, layout.available[1]], np.arange(9) != 4)


@slow
def test_processes_give_the_same_as_one(script):
    """Fails if --async-envs loses or mixes up anything."""
    envs = [make(script, num_envs=2, async_envs=async_envs)[0] for async_envs in (False, True)]
    assert isinstance(envs[1], gym.vector.AsyncVectorEnv) and envs[1].spec.max_episode_steps == 25
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


# ---------------------------------------------------------------------------------------------------------- buffers


def test_shapes(script):
    """Fails if what is there before a step has other than T + 1 rows, what a step brings other than T."""
    actor = script.OnPolicyActorBuffer(5, 3, 7, spaces.Box(-1, 1, (2, 2)), 4, 6)
    assert actor.obs.shape == (6, 3, 7) and actor.rnn_states.shape == (6, 3, 1, 6)
    assert actor.available_actions.shape == (6, 3, 4) and actor.masks.shape == actor.active_masks.shape == (6, 3, 1)
    assert actor.actions.shape == (5, 3, 4) and actor.actions.dtype == np.float32
    assert actor.action_log_probs.shape == actor.factor.shape == (5, 3, 1)
    ep, fp = script.OnPolicyCriticBufferEP(5, 3, 7, 6), script.OnPolicyCriticBufferFP(5, 3, 2, 7, 6)
    for buffer, streams in ((ep, (3,)), (fp, (3, 2))):
        assert buffer.share_obs.shape == (6, *streams, 7) and buffer.rnn_states_critic.shape == (6, *streams, 1, 6)
        assert buffer.masks.shape == buffer.bad_masks.shape == buffer.value_preds.shape == (6, *streams, 1)
        assert buffer.rewards.shape == (5, *streams, 1) and buffer.active_masks.shape == (6, *streams, 1)
        buffer.compute_returns(np.zeros((*streams, 1)))
        assert buffer.returns.shape == buffer.advantages.shape == (5, *streams, 1)


def test_after_update(script):
    """T = 2: row 2 becomes row 0, of all that stands before a step; what steps brought is left alone."""
    buffer = script.OnPolicyActorBuffer(2, 1, 1, THREE, 3, 1)
    critic = script.OnPolicyCriticBufferEP(2, 1, 1, 1)
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


def test_insert(script):
    """Fails if a field lands in another row or field, or if the full buffer does not begin again."""
    buffer = script.OnPolicyActorBuffer(2, 1, 1, THREE, 3, 1)
    ep, fp = script.OnPolicyCriticBufferEP(2, 1, 1, 1), script.OnPolicyCriticBufferFP(2, 1, 1, 1, 1)
    for t in (0, 1, 2):
        here, after = t % 2, t % 2 + 1
        buffer.insert(10 + t, 20 + t, 30 + t, 40 + t, 50 + t, 60 + t, 70 + t)
        assert buffer.actions[here] == 30 + t and buffer.action_log_probs[here] == 40 + t
        values = buffer.obs, buffer.rnn_states, buffer.masks, buffer.active_masks, buffer.available_actions
        assert [x[after].ravel()[0] - t for x in values] == [10, 20, 50, 60, 70]
        for critic in (ep, fp):
            critic.insert(11 + t, 21 + t, 31 + t, 41 + t, 51 + t, 61 + t, 71 + t)
            assert critic.value_preds[here] == 31 + t and critic.rewards[here] == 41 + t
            values = critic.share_obs, critic.rnn_states_critic, critic.masks, critic.bad_masks, critic.active_masks
            assert [x[after].item() - t for x in values] == [11, 21, 51, 61, 71]
    buffer.insert(0, 0, 0, 0, 0)
    ep.insert(0, 0, 0, 0, 0, 1)
    assert buffer.active_masks[2] == ep.active_masks[2] == 0  # unless given, the masks
    fp = script.OnPolicyCriticBufferFP(1, 3, 2, 1)  # what three environments have for both of their agents
    fp.insert(0, np.zeros((3, 2, 1, 0)), 0, column(1, 2, 3).numpy(), column(1, 0, 1).numpy(), column(1, 1, 0).numpy())
    close(fp.rewards[0, ..., 0], [[1, 1], [2, 2], [3, 3]])
    close(fp.masks[1, ..., 0], [[1, 1], [0, 0], [1, 1]])
    close(fp.bad_masks[1, ..., 0], [[1, 1], [1, 1], [0, 0]])


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


NORMALIZER = SimpleNamespace(denormalize=lambda values: 2 * values + 1)


@settings(max_examples=50)
@given(rollouts(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([None, 0.0, 0.7, 1.0]))
def test_returns_against_a_walk(script, rollout, gamma, gae_lambda):
    """Fails if any stream is mixed with another, any end is taken for another kind, or EP and FP differ."""
    rewards, values, ends = rollout
    T, N, n, _ = rewards.shape
    fp = script.OnPolicyCriticBufferFP(T, N, n, 1, gamma=gamma, gae_lambda=gae_lambda)
    fp.rewards[:], fp.value_preds[:] = rewards, (values - 1) / 2
    fp.masks[:], fp.bad_masks[:] = (ends > 1)[..., None, None], (ends > 0)[..., None, None]
    fp.compute_returns(fp.value_preds[-1].copy(), NORMALIZER)
    walked_lambda = 1 if gae_lambda is None else gae_lambda
    for e in range(N):
        for a in range(n):
            walk = by_walking(rewards[:, e, a, 0], values[:, e, a, 0], ends[:, e], gamma, walked_lambda)
            close(fp.advantages[:, e, a, 0], walk, 1e-3)
            close(fp.returns[:, e, a, 0], walk + values[:-1, e, a, 0], 1e-3)
    ep = script.OnPolicyCriticBufferEP(T, N, 1, gamma=gamma, gae_lambda=gae_lambda)
    for name in ("rewards", "value_preds", "masks", "bad_masks"):
        getattr(ep, name)[:] = getattr(fp, name)[:, :, 0]
    ep.compute_returns(ep.value_preds[-1].copy(), NORMALIZER)
    close(ep.returns, fp.returns[:, :, 0], 1e-4)


def test_returns_of_normalised_values(script):
    """The critic predicts normalised values, mean 1 and deviation 2: 0, 0.5 and, next, 0.25 stand for 1, 2 and 1.5.

    Without GAE, and with lambda = 1: R_1 = 1 + 0.5 * 1.5 = 1.75, R_0 = 1 + 0.5 * 1.75 = 1.875.
    lambda = 0.5: A_1 = 1 + 0.75 - 2 = -0.25, A_0 = 1 + 0.5 * 2 - 1 + 0.25 * -0.25 = 0.9375.
    """
    normalizer = SimpleNamespace(denormalize=lambda values: 2 * values + 1)
    for gae_lambda, expected in ((None, [1.875, 1.75]), (1, [1.875, 1.75]), (0.5, [1.9375, 1.75])):
        buffer, next_value = critic_buffer(script, gae_lambda, rewards=[1, 1], values=[0, 0.5, 0.25])
        buffer.compute_returns(next_value, normalizer)
        close(buffer.returns[:, 0, 0], expected)
        close(buffer.value_preds[:, 0, 0], [0, 0.5, 0.25])  # left as they were
    close(buffer.advantages[:, 0, 0], [0.9375, -0.25])


def test_chunks_of_agents(script):
    """FP, x[t, e, a] = 100 a + 10 e + t, T = 2: chunk k is of environment k // 2 and agent k % 2."""
    buffer = script.OnPolicyCriticBufferFP(2, 2, 2, 1, 1)
    buffer.share_obs[..., 0] = 100 * np.arange(2) + 10 * np.arange(2)[:, None] + np.arange(3)[:, None, None]
    buffer.rnn_states_critic[..., 0, 0] = 1000 + buffer.share_obs[..., 0]
    chunks = np.array([[0, 1], [100, 101], [10, 11], [110, 111]])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        (batch,) = buffer.recurrent_generator_critic(1, 2, Shuffled(*order))
        close(batch.share_obs[:, 0], chunks[order].T.ravel())
        close(batch.rnn_states_critic[:, 0, 0], 1000 + chunks[order][:, 0])
    (batch,) = buffer.feed_forward_generator_critic(1, Shuffled(*range(8)))
    close(batch.share_obs[:, 0], [0, 100, 10, 110, 1, 101, 11, 111])


def test_normalised_advantages(script):
    """1, 2, 9, 3, of which the third is not active: mean 2, deviation sqrt(2/3) = 0.816497."""
    normalized = script.normalize_active(np.array([1.0, 2, 9, 3]), np.array([1, 1, 0, 1]))
    close(normalized[[0, 1, 3]], [-1.2247298715752986, 0, 1.2247298715752986], 1e-6)


def test_ratios_of_what_is_not_active(script):
    """Ratios 1 and, not active, e^200, which is infinite: it must reach neither loss, figures nor gradient as a NaN."""
    log_probs = column(1, 201).requires_grad_()
    batch = script.ActorBatch(**dict.fromkeys(script.ActorBatch._fields, column(1, 1)))
    batch = batch._replace(active_masks=column(1, 0))
    loss, figures = script.team_policy_loss(lambda *inputs: (log_probs, column(0, 0)), batch, script.Args())
    loss.backward()
    close([loss.item(), figures["approx_kl"].item(), figures["clip_fraction"].item()], [-1, 0, 0])
    close(log_probs.grad, column(-1, 0))


def test_mean_of_what_is_active(script):
    """(1 + 2 + 3) / 3 = 2; none active: 0, not NaN."""
    close(script.active_mean(column(1, 2, 100, 3), column(1, 1, 0, 1)), 2)
    close(script.active_mean(column(1, 2), column(0, 0)), 0)


def test_explained_variance(script):
    """Returns 1, 2, 3 and, not active, 99; values 1, 1, 3: 1 - Var(R - V) / Var(R) = 1 - (2/9) / (2/3)."""
    buffer = script.OnPolicyCriticBufferEP(4, 1, 1)
    buffer.returns[:, 0, 0] = [1, 2, 99, 3]
    buffer.advantages[:, 0, 0] = [0, 1, 50, 0]
    buffer.active_masks[2] = 0
    close(buffer.explained_variance(), 2 / 3)
    buffer.active_masks[:] = 0
    assert buffer.explained_variance() == 0


# ------------------------------------------------------------------------------------------ value normaliser, losses


@given(st.lists(hnp.arrays(np.float32, (3, 1), elements=st.floats(-100, 100, width=32)), min_size=1, max_size=5))
def test_value_norm_against_weights(script, batches):
    """The k-th last batch weighs beta^k."""
    norm = script.ValueNorm(0.7)
    for batch in batches:
        norm.update(torch.as_tensor(batch))
    weights = 0.7 ** np.arange(len(batches))[::-1]
    mean = np.average([batch.mean(dtype=np.float64) for batch in batches], weights=weights)
    square = np.average([np.square(batch, dtype=np.float64).mean() for batch in batches], weights=weights)
    close(norm.mean_and_std(), [mean, max(square - mean**2, 0.01) ** 0.5], 1e-4)
    copied = script.ValueNorm(0.7)
    copied.load_state_dict(norm.state_dict())
    assert copied.mean_and_std() == norm.mean_and_std()


def test_value_norm_far_from_zero(script):
    """Fails in single precision: returns around 10,000 with a deviation of 1. Nothing seen changes nothing."""
    norm = script.ValueNorm()
    norm.update(torch.tensor([9_999.0, 10_001.0]))
    norm.update(torch.zeros(0))
    close(norm.mean_and_std(), [10_000, 1], 1e-3)


@given(hnp.arrays(np.float32, (6, 2), elements=st.floats(-20, 20, width=32)), st.sampled_from([0.5, 10.0]))
def test_huber_loss(script, numbers, delta):
    values, returns = torch.as_tensor(numbers).split(1, 1)
    slow = [e**2 / 2 if abs(e) <= delta else delta * (abs(e) - delta / 2) for e in (values - returns).ravel().tolist()]
    close(script.huber_value_loss(values, values, returns, torch.ones(6, 1), delta), np.mean(slow), 1e-4)


# ---------------------------------------------------------------------------------------------- networks and acting


@pytest.mark.parametrize("recurrent", [False, True])
def test_one_step_after_the_other_is_all_at_once(script, recurrent):
    """Fails if acting and learning compute different functions, or if a reset row leaves a state behind."""
    torch.manual_seed(0)
    network = script.TeamNetwork(4, (8, 6), 3, recurrent, 1.0)
    assert network.hidden_size == (6 if recurrent else 0)
    x, h = torch.randn(5, 2, 4), torch.randn(2, 1, network.hidden_size)
    masks = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1], [1, 1.0]])[..., None]
    together, last = network(x.flatten(0, 1), h, masks.flatten(0, 1))
    states = h.numpy()
    for t in range(5):
        output, states = network.step(x[t].numpy(), states, masks[t].numpy())
        close(output, together.view(5, 2, 3)[t], 1e-4)
        assert not recurrent or (np.abs(states).sum((1, 2)) > 0).tolist() == (masks[t, :, 0] > 0).tolist()
    close(states, last)


ACTION_SPACES = {
    "Discrete": THREE, "from 5": spaces.Discrete(3, start=5), "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "Box": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32)),
    "integers": spaces.Box(np.array([-2, 0]), np.array([3, 9]), dtype=np.int64),
}  # fmt: skip


@pytest.mark.parametrize("name, masked", [*[(name, False) for name in ACTION_SPACES], ("Discrete", True)])
def test_sampled_log_probs_are_those_learned_with(script, name, masked):
    """Fails if the log-probs that acting stores are not those of the very same policy when it learns, if an action is
    not in its space, or one that is not available is drawn."""
    space = ACTION_SPACES[name]
    torch.manual_seed(0)
    policy = script.AgentPolicy(4, space, arguments(script))
    for parameter in policy.parameters():
        parameter.data += torch.randn(parameter.shape)
    obs, states = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32), np.zeros((50, 1, 0), np.float32)
    masks, available = np.ones((50, 1), np.float32), np.ones((50, 3 if masked else 0), np.float32)
    if masked:
        available[::2, 1] = available[::3, 2] = 0
    inputs = obs, states, masks, available
    actions, log_probs, _ = policy.sample(*inputs, np.random.default_rng(0))
    learned, entropies = policy(*map(torch.as_tensor, (*inputs, actions)))
    close(learned, log_probs, 1e-4)
    assert log_probs.shape == entropies.shape == (50, 1) and torch.isfinite(entropies).all()
    if masked:
        assert (np.take_along_axis(available, actions, 1) == 1).all()
        only = (available.sum(1) == 1)[:, None]
        close(entropies.detach()[only], np.zeros(only.sum()))
    assert all(space.contains(action) for action in script.to_space(space, actions))
    mode, _ = policy.mode(*inputs)
    likeliest, _ = policy(*map(torch.as_tensor, (*inputs, mode)))
    assert (likeliest >= learned - 1e-5).all() or len(policy.output_sizes) > 1


def test_actions_as_the_environment_takes_them(script):
    """Fails if a Box of integers is cut off (2.7 to 2) rather than rounded, or Discrete loses its first number."""
    box, start = ACTION_SPACES["integers"], ACTION_SPACES["from 5"]
    assert script.to_space(box, np.array([[2.7, -1.0], [-0.6, 8.4], [7.0, 99.0]])).tolist() == [[3, 0], [-1, 8], [3, 9]]
    assert script.to_space(box, np.zeros((1, 2))).dtype == np.int64
    assert script.to_space(start, np.array([[0], [2]])).tolist() == [5, 7]
    assert script.to_space(ACTION_SPACES["MultiDiscrete"], np.array([[1, 2]])).tolist() == [[1, 2]]


def test_actions_are_drawn_with_their_probabilities(script):
    """Fails if the draws are not those of the policy: 20,000 of them, with a third action that is not available."""
    policy = script.AgentPolicy(1, THREE, arguments(script))
    for parameter in policy.parameters():
        parameter.data[:] = 0
    policy.network.mlp[-1].bias.data = torch.tensor([0.2, 0.6, 0.2]).log()
    ones = np.ones((20_000, 1), np.float32)
    available = ones * np.array([1, 1, 0], np.float32)
    states = np.zeros((20_000, 1, 0), np.float32)
    actions, log_probs, _ = policy.sample(ones, states, ones, available, np.random.default_rng(0))
    close(np.bincount(actions[:, 0], minlength=3) / 20_000, [0.25, 0.75, 0], 0.01)
    close(np.exp(log_probs[actions == 1]), [0.75] * (actions == 1).sum())


VARIANTS = {
    "feed-forward": {}, "separate": {"share_policy": False}, "FP": {"state_type": "FP"},
    "recurrent": {"recurrent": True}, "recurrent, separate": {"recurrent": True, "share_policy": False},
    "recurrent, FP": {"recurrent": True, "state_type": "FP"}, "whole": {"recurrent": True, "data_chunk_length": 0},
    "HAPPO": {"recurrent": True, "share_policy": False, "happo": True},
    "Box": {"env_kwargs": {"continuous_actions": True}, "recurrent": True},
}  # fmt: skip
SCRIPTED = {"env_id": "Scripted", "env_kwargs": {"scripts": DEATHS, "masks": {"a": [0, 1, 1], "b": [1, 1, 1]}}}


FAST = [("recurrent, FP", False), ("separate", True), ("HAPPO", True)]
SEEN = [pytest.param(n, s, marks=[] if (n, s) in FAST else [slow]) for n in VARIANTS for s in (False, True)]


@pytest.mark.parametrize("name, scripted", SEEN)
def test_learning_sees_what_acting_did(script, name, scripted):
    """Fails if any minibatch's log-probs or values under unchanged weights differ from those stored while acting.

    So it fails if recurrent states are stored a row too early or late, are not reset after a reset row, or are reset
    before the final state was valued; if chunks, agents or environments are mixed up. First rows come from
    after_update; episodes end at different times. HAPPO's factor stays 1.
    """
    if scripted and name == "Box":
        pytest.skip("the scripted environment is discrete")
    world = SCRIPTED if scripted else {"max_episode_steps": 7}
    run = played(script, rollouts=3, **world | VARIANTS[name] | {"num_envs": 3})
    assert any((rollout.critic.masks[:-1] == 0).any() for rollout in run.rollouts)
    for one, following in zip(run.rollouts, run.rollouts[1:]):
        for before, after in zip([*one.actors, one.critic], [*following.actors, following.critic]):
            for field in ("masks", "active_masks", "obs" if before is not one.critic else "share_obs"):
                close(getattr(after, field)[0], getattr(before, field)[-1], 0)
    for call in run.calls:
        batch = call.batch
        if call.kind == "actor":
            inputs = batch.obs, batch.rnn_states, batch.masks, batch.available_actions, batch.actions
            active = batch.active_masks > 0
            close(call.network(*inputs)[0][active], batch.log_probs[active], 1e-4)
            close(batch.factor, torch.ones_like(batch.factor), 1e-4)
        else:
            close(call.network(batch.share_obs, batch.rnn_states_critic, batch.masks)[0], batch.value_preds, 1e-4)
    assert max(map(float, run.figures["approx_kl"])) < 1e-6


def test_final_values_know_the_episode(script):
    """Fails if a recurrent critic forgets before it values the final state."""
    run = played(script, rollouts=2, recurrent=True, max_episode_steps=7)
    critic = run.rollouts[-1].critic
    t, e = np.argwhere(critic.masks[:-1, :, 0] == 0)[0]
    assert critic.rnn_states_critic[t, e].any() and not critic.rnn_states_critic[t + 1, e].any()
    ones, state = np.ones((1, 1), np.float32), critic.rnn_states_critic[t, [e]]
    remembering, _ = run.agent.critic.step(critic.share_obs[t, [e]], state, ones)
    forgetful, _ = run.agent.critic.step(critic.share_obs[t, [e]], 0 * state, ones)
    close(remembering, critic.value_preds[t, [e]])
    differ(forgetful, remembering)


def test_recurrent_evaluation_remembers_and_forgets(script):
    """Fails if `act` does not carry its states on, carries them into the next episode or the next evaluation, or acts
    otherwise than in training."""
    run = played(script, "Recall", recurrent=True)
    team = run.agent
    envs, twin = (make(script, "Recall", 2)[0] for _ in range(2))
    team.begin_episodes(2)
    ones = np.ones((2, 1), np.float32)

    def act(rows, before):
        """What `act` makes of rows, whose states must be those after `before`."""
        actions = team.act(rows)
        _, after = team.actors[0].network.step(rows[:, 3:4], before, ones)  # what agent a observes
        close(team.memory[0], after)
        return actions

    actions = act(envs.reset(seed=1)[0], np.zeros((2, 1, 16), np.float32))
    after_first = team.memory.copy()
    act(envs.step(actions)[0], after_first[0])
    differ(team.memory, after_first)
    team.act(twin.reset(seed=1)[0])  # begins: as if nothing had been before
    close(team.memory, after_first)
    team.begin_episodes(2)
    assert not team.memory.any()
    assert team.act(make(script, "Recall", 5)[0].reset(seed=1)[0])[0].shape == (5,)


# --------------------------------------------------------------------------------------------------- masks of rollouts


def test_masks_and_active_masks(script):
    """Three environments, two agents, of which these end in the first step: [a], [a, b], [].

    masks: 0 where all have ended: [1, 0, 1]. active_masks: 0 for the dead, and in the row that only resets the
    environment for everybody: [[0, 1], [0, 0], [1, 1]]. One row on, the second environment is in a new episode, and a
    of the first still dead: [[0, 1], [1, 1], [1, 1]].
    """
    dies, lives = [1, "terminated"], [9, "terminated"]
    scripts = {"a": dies, "b": lives}, {"a": dies, "b": dies}, {"a": lives, "b": lives}
    masks = [1, 0, 1]
    active_masks = [[[0, 1], [0, 0], [1, 1]], [[0, 1], [1, 1], [1, 1]]]
    for env, deaths in enumerate(scripts):
        for state_type in ("EP", "FP"):
            kwargs = {"env_kwargs": {"scripts": [deaths]}, "num_envs": 1, "num_steps": 5, "state_type": state_type}
            (rollout,) = played(script, "Scripted", **kwargs).rollouts
            for buffer in [*rollout.actors, rollout.critic]:
                assert (buffer.masks[1] == masks[env]).all() and (buffer.masks[2] == 1).all()
            for row in (1, 2):
                assert [b.active_masks[row, 0, 0] for b in rollout.actors] == active_masks[row - 1][env]
            assert (rollout.critic.active_masks == rollout.critic.masks).all()  # the critic learns from dead rows, too
            assert (rollout.critic.bad_masks == 1).all()  # no end was a truncation


def test_death_is_of_one_environment_until_its_end(script):
    """Fails if a death outlasts its own episode, if FP sees anything of the dead, or if rewards are not the team's.

    A constructor has reset the environment: episode 1 comes first.
    """
    scripts = [{"a": [1, "terminated"], "b": [2, "truncated"]}, {"a": [3, "terminated"], "b": [3, "truncated"]}]
    kwargs = {"env_kwargs": {"scripts": scripts}, "state_type": "FP", "num_envs": 1}
    (rollout,) = played(script, "Scripted", **kwargs).rollouts
    alive = [[1, 1], [1, 1], [1, 1], [0, 0]]  # episode 1: three steps, reset row
    alive += [[1, 1], [0, 1], [0, 0]]  # episode 2: a dies after its first step
    alive += [[1, 1], [1, 1], [1, 1], [0, 0]]
    close(np.concatenate([b.active_masks[:, 0] for b in rollout.actors], 1), alive)
    critic = rollout.critic
    for agent in range(2):
        close(critic.masks[:, 0, agent, 0], np.max(alive, 1))
        close(critic.bad_masks[:, 0, agent, 0], np.max(alive, 1))  # all ends were truncations: some agent's
        close(critic.rewards[:, 0, agent, 0], [3, 3, 3, 0, 3, 2, 0, 3, 3, 3])  # of all agents together
    dead = np.zeros((11, 2), bool)
    dead[5, 0] = dead[6, 0] = True  # also in the final observation: a was not there any more
    assert not critic.share_obs[:, 0][dead].any()
    assert critic.share_obs[3, 0].any(1).all() and critic.share_obs[6, 0, 1].any()
    close(critic.share_obs[5, 0, 1], [121, 2, 1])  # the agent's observation, and the state


def test_a_termination_on_the_last_step_allowed_is_none_of_the_limit(script):
    """Matrix terminates after one step, which is all that is allowed: fails if its end counts as a truncation."""
    (rollout,) = played(script, "Matrix", max_episode_steps=1).rollouts
    assert (rollout.critic.masks == 0).any() and (rollout.critic.bad_masks == 1).all()


@pytest.mark.parametrize("limit", [{"max_episode_steps": 3}, {"max_episode_return": 9.0}])
def test_limits_truncate(script, limit):
    """Fails if --max-episode-steps or --max-episode-return terminate, or do nothing: each step pays 3."""
    kwargs = {"env_kwargs": {"scripts": [{"a": [99, "terminated"], "b": [99, "terminated"]}]}, "num_envs": 1}
    (rollout,) = played(script, "Scripted", **kwargs | limit).rollouts
    close(rollout.critic.masks[:, 0, 0], [1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1])
    close(rollout.critic.bad_masks, rollout.critic.masks)


# ------------------------------------------------------------------------------------------------------------ updates


UPDATES = ["HAPPO", "GRU", "separate", "shared", "FP", "GRU, whole rollouts", "no clipping"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[slow] if n > 1 else []) for n, name in enumerate(UPDATES)])
def test_an_update_is_what_the_arguments_say(script, name):
    """10 steps in two environments: 20 rows, or 4 chunks of 5 steps, or 2 of all ten; three rollouts, with reset rows.

    Fails if epochs, minibatches, chunks, learning rates, gradients, their norm or the clipping of values are not as
    asked for, if a term of a loss is missing or weighs something else, or if a figure is not that of active rows. Rates
    are those of a rollout's first step: 1 - 0/60, 1 - 20/60, 1 - 38/60 (two rows were reset rows) and so on.
    """
    more = {"num_minibatches": 2, "update_epochs": 3, "max_grad_norm": 0.7, "ent_coef": 0.3, "clip_vloss_coef": 0.01}
    more |= {"share_policy": name in ("shared", "FP"), "recurrent": name.startswith("GRU"), "happo": name == "HAPPO"}
    more |= {"data_chunk_length": 0 if "whole" in name else 5, "clip_vloss": name != "no clipping"}
    more |= {"state_type": "FP" if name == "FP" else "EP", "learning_rate": 0.01, "huber_delta": 0.5}
    steps, adam_step = [], script.Adam.step

    def watched_step(adam):
        gradients = [p.grad.clone() for p in adam.parameters]
        steps.append((adam.param_groups[0]["lr"], gradients))
        adam_step(adam)

    with mock.patch.object(script.Adam, "step", watched_step):
        run = rehearse_team(script, total_timesteps=60, max_episode_steps=13, **more)
    assert len(run.rollouts) == 4 and len(steps) == len(run.calls)  # of 20, 18, 18 and 20 steps
    actors = [call for call in run.calls if call.kind == "actor"]
    critics = [call for call in run.calls if call.kind == "critic"]
    policies, together = (1, 3) if name in ("shared", "FP") else (3, 1)
    assert len(actors) == policies * 3 * 2 * 4 and len(critics) == 3 * 2 * 4
    length = {"GRU": 5, "GRU, whole rollouts": 10}.get(name, 1)
    assert {(len(c.batch.masks), len(c.batch.rnn_states)) for c in actors} == {(10 * together, 10 * together // length)}
    rows = 30 if name == "FP" else 10
    assert {(len(c.batch.masks), len(c.batch.rnn_states_critic)) for c in critics} == {(rows, rows // length)}
    per_rollout = len(steps) // 4
    rates = [rate for rate, _ in steps[::per_rollout]]
    close(rates, [0.01 * (1 - step / 60) for step in (0, 20, 38, 56)], 1e-9)

    for number, (call, (rate, gradients)) in enumerate(zip(run.calls, steps)):
        assert rate == rates[number // per_rollout]
        shortened = call.gradient * min(1, 0.7 / (call.gradient.norm().item() + 1e-6))
        close(torch.cat([g.flatten() for g in gradients]), shortened, 1e-5)
    for name in ("policy_loss", "entropy", "approx_kl", "clip_fraction"):
        close(run.figures[name], [call.result[1][name] for call in actors])
    close(run.figures["value_loss"], [call.result.item() for call in critics])
    check_losses(script, run, more)


def check_losses(script, run, settings):
    """Every loss against sums over its active rows, by the networks as they are at the end of the run."""
    args = arguments(script, **settings)
    for call in run.calls[-8:]:
        batch = call.batch
        active = batch.active_masks[:, 0] > 0
        if call.kind == "actor":
            loss, figures = script.team_policy_loss(call.network, batch, args)
            inputs = batch.obs, batch.rnn_states, batch.masks, batch.available_actions, batch.actions
            log_probs, entropies = call.network(*inputs)
            r, A = (log_probs - batch.log_probs).exp()[active], (batch.factor * batch.advantages)[active]
            surrogate = torch.min(r * A, r.clamp(0.8, 1.2) * A).mean()
            close(figures["policy_loss"], -surrogate)
            close(figures["entropy"], entropies[active].mean())
            close(figures["approx_kl"], (r - 1 - r.log()).mean())
            close(figures["clip_fraction"], ((r < 0.8) | (r > 1.2)).float().mean())
            close(loss, -surrogate - 0.3 * entropies[active].mean())
        else:
            norm = call.rest[0]
            loss = script.team_value_loss(call.network, batch, norm, args)
            values, _ = call.network(batch.share_obs, batch.rnn_states_critic, batch.masks)
            mean, std = norm.mean_and_std()
            targets, old = (batch.returns - mean) / std, batch.value_preds
            huber = lambda v, targets=targets: torch.nn.functional.huber_loss(v, targets, reduction="none", delta=0.5)
            errors = huber(values)
            if args.clip_vloss:
                errors = torch.max(errors, huber(old + (values - old).clamp(-0.01, 0.01)))
            close(loss, errors[active].mean())


def test_rows_that_are_not_active_weigh_nothing(script, monkeypatch):
    """Fails if what an agent does while it is dead, or in a reset row, changes a single weight."""
    for more in ({}, {"state_type": "FP"}, {"share_policy": False}, {"share_policy": False, "happo": True}):
        weights = []
        for garbage in (False, True):

            def spoil(update, garbage=garbage):
                def call(team, optimizers, actors, critic, *rest):
                    for buffer in actors if garbage else []:
                        idle = buffer.active_masks[:-1, :, 0] == 0
                        assert idle.any()
                        buffer.actions[idle] = (buffer.actions[idle] + 1) % 3
                        buffer.action_log_probs[idle] -= 5
                        buffer.obs[:-1][idle] += 3
                    update(team, optimizers, actors, critic, *rest)

                return call

            with monkeypatch.context() as patch:
                for name in ("mappo_update", "happo_update"):
                    patch.setattr(script, name, spoil(getattr(script, name)))
                kwargs = {"env_kwargs": {"scripts": DEATHS}, "num_envs": 3, "total_timesteps": 20}
                run = rehearse_team(script, "Scripted", **kwargs | more)
            weights.append(torch.cat([p.detach().flatten() for p in run.agent.parameters()]))
        assert torch.equal(*weights), more


@slow
def test_happo_hands_on_the_product_of_ratios(script):
    """Fails if an agent is updated with other than the product of the ratios of all who came before it, or if the order
    is always the same. MAPPO's separate policies know nothing of each other."""
    orders = set()
    for happo in (True, False):
        for seed in range(4):
            settings = {"happo": happo, "share_policy": False, "seed": seed, "update_epochs": 3}
            run = rehearse_team(script, total_timesteps=20, learning_rate=3e-3, **settings)
            (rollout,) = run.rollouts
            actors = [call for call in run.calls if call.kind == "actor"]
            order = [list(run.agent.actors).index(call.network) for call in actors[::3]]
            assert sorted(order) == [0, 1, 2]
            orders.add((happo, *order))
            product = torch.ones(20)
            for i, call in zip(order, actors[::3]):
                buffer = rollout.actors[i]
                close(call.batch.factor[:, 0].sort()[0], product.sort()[0] if happo else np.ones(20), 1e-4)
                obs, actions = torch.as_tensor(buffer.obs[:-1]).flatten(0, 1), torch.as_tensor(buffer.actions).view(20)
                new = torch.distributions.Categorical(logits=call.network.network.mlp(obs)).log_prob(actions)
                ratio = (new.detach() - torch.as_tensor(buffer.action_log_probs).view(20)).exp()
                active = torch.as_tensor(buffer.active_masks[:-1]).view(20) > 0
                product = product * torch.where(active, ratio, 1.0)
            differ(product, np.ones(20))
    assert len({order for order in orders if order[0]}) > 1
    assert {order for order in orders if not order[0]} == {(False, 0, 1, 2)}


def test_advantages_of_each_agent(script):
    """Fails if agents get another's advantages, or if these are not normalised over those who share a policy."""
    for share in (True, False):
        settings = {"share_policy": share, "state_type": "FP", "update_epochs": 1, "env_kwargs": {"scripts": DEATHS}}
        run = rehearse_team(script, "Scripted", total_timesteps=10, **settings)
        (rollout,) = run.rollouts
        A = rollout.critic.advantages  # (T, N, n, 1)
        active = np.stack([b.active_masks[:-1] for b in rollout.actors], 2)
        batches = [call.batch for call in run.calls if call.kind == "actor"]
        assert len(batches) == (1 if share else 2)
        for i, batch in enumerate(batches):
            mine = slice(None) if share else slice(i, i + 1)
            some = A[:, :, mine][active[:, :, mine] > 0]
            expected = (A[:, :, mine] - some.mean()) / (some.std() + 1e-5)
            close(np.sort(batch.advantages.numpy().ravel()), np.sort(expected.ravel()), 1e-4)


def test_the_critics_targets_are_normalised_returns(script):
    """Fails if what is known of returns is not of this rollout, or if reset rows are taken in; the buffer's discounts
    are those of --gamma, --gae-lambda and --no-gae."""
    settings = {"gamma": 0.7, "gae_lambda": 0.3, "update_epochs": 1, "max_episode_steps": 7}
    run = rehearse_team(script, total_timesteps=10, **settings)
    (rollout,) = run.rollouts
    returns = rollout.critic.returns[rollout.critic.masks[:-1] > 0]
    assert returns.size == 18
    close(run.agent.value_norm.mean_and_std(), [returns.mean(), returns.std()], 1e-3)
    for state_type in ("EP", "FP"):
        for gae, expected in ((True, 0.3), (False, None)):
            args = arguments(script, state_type=state_type, gae=gae, **settings)
            envs = script.make_envs(args, 2)
            _, critic = script.make_buffers(args, script.make_agent(args, envs), envs.reset(seed=0)[0])
            assert (critic.gamma, critic.gae_lambda) == (0.7, expected)
