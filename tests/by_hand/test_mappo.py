"""The numbers of MAPPO and HAPPO, worked out by hand: a lesson to be read beside mappo.py.

Arrays are time-major. Most tests number what they store, so that an answer says where each number went.
"""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.tools import close

THREE = spaces.Discrete(3)


class Shuffled:
    """A generator whose permutation is known."""

    def __init__(self, *order):
        self.order = order

    def permutation(self, size):
        assert sorted(self.order) == list(range(size))
        return np.array(self.order)


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)[:, None]


# -------------------------------------------------------------------------------------------------------- returns


def critic_buffer(script, gae_lambda, rewards, values, masks=None, bad_masks=None, agents=()):
    """A buffer of one environment with these rows, one number for each step; gamma = 0.5."""
    kind = script.OnPolicyCriticBufferFP if agents else script.OnPolicyCriticBufferEP
    buffer = kind(len(rewards), 1, *agents, 1, gamma=0.5, gae_lambda=gae_lambda)
    shape = (-1, 1, *[1 for _ in agents], 1)
    buffer.rewards[:] = np.reshape(rewards, shape)
    buffer.value_preds[:] = np.reshape(values, shape)
    for name, given in (("masks", masks), ("bad_masks", bad_masks)):
        getattr(buffer, name)[:] = 1 if given is None else np.reshape(given, shape)
    buffer.active_masks[:] = buffer.masks
    next_value = buffer.value_preds[-1].copy()
    buffer.value_preds[-1] = -1  # compute_returns is told the last value
    return buffer, next_value


PLAYED = [0, 1, 3, 4, 6, 7]


def test_returns(script):
    """gamma = lambda = 0.5: traces decay by 0.25. Row 2 resets after a termination, row 5 after a truncation; they hold
    the values of the final states, 99, which must not matter, and 8.

    delta_0 = 1 + 0.5 * 1 - 0.5 = 1      A_0 = 1 + 0.25 * 1 = 1.25
    delta_1 = 2 - 1 = 1                  A_1 = 1                     (terminated: neither bootstrap nor trace)
    delta_3 = 3 + 0.5 * 2 - 1.5 = 2.5    A_3 = 2.5 + 0.25 * 6 = 4
    delta_4 = 4 + 0.5 * 8 - 2 = 6        A_4 = 6                     (truncated: bootstrap, but no trace)
    delta_6 = 5 + 0.5 * 3 - 2.5 = 4      A_6 = 4 + 0.25 * 5 = 5.25
    delta_7 = 6 + 0.5 * 4 - 3 = 5        A_7 = 5                     (the rollout ends, the episode does not)

    Without GAE: 6 + 0.5 * 4 = 8; 5 + 0.5 * 8 = 9; 4 + 0.5 * 8 = 8; 3 + 0.5 * 8 = 7; 2; 1 + 0.5 * 2 = 2.
    """
    rows = dict(rewards=[1, 2, 0, 3, 4, 0, 5, 6], values=[0.5, 1, 99, 1.5, 2, 8, 2.5, 3, 4])
    ends = dict(masks=[1, 1, 0, 1, 1, 0, 1, 1, 1], bad_masks=[1, 1, 1, 1, 1, 0, 1, 1, 1])
    buffer, next_value = critic_buffer(script, 0.5, **rows, **ends)
    buffer.compute_returns(next_value)
    close(buffer.advantages[PLAYED, 0, 0], [1.25, 1, 4, 6, 5.25, 5])
    close(buffer.returns[PLAYED, 0, 0], [1.75, 2, 5.5, 8, 7.75, 8])  # A + V
    buffer, next_value = critic_buffer(script, None, **rows, **ends)
    buffer.compute_returns(next_value)
    close(buffer.returns[PLAYED, 0, 0], [2, 2, 7, 8, 9, 8])
    close(buffer.advantages[PLAYED, 0, 0], [1.5, 1, 5.5, 6, 6.5, 5])  # R - V


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
def test_return_at_a_death(script, gae_lambda):
    """FP, two agents; the first dies in step 0. The team gets 1, 2, 4, and the episode terminates. What an agent does
    in step 0 is worth R_0 = 1 + 0.5 * 2 + 0.25 * 4 = 3 to the team, whether or not it lives on; R_1 = 2 + 0.5 * 4 = 4,
    R_2 = 4. The critic knows that: it says 3, 4, 4 for who lives, and 3, V(0), V(0) for who died. No advantage is left
    if V(0) = 4. Were V(0) never trained, 0, the return at death would be 1 with lambda = 0. So dead rows are trained.
    """
    rows = dict(rewards=[1, 2, 4], values=[3, 4, 4, 77], masks=[1, 1, 1, 0])
    buffer, next_value = critic_buffer(script, gae_lambda, **rows, agents=(2,))
    buffer.compute_returns(next_value)
    for agent in range(2):
        close(buffer.returns[:, 0, agent, 0], [3, 4, 4])
        close(buffer.advantages_of(agent), np.zeros((3, 1, 1)))
    (batch,) = buffer.feed_forward_generator_critic(1, Shuffled(*range(6)))
    close(batch.returns[:, 0], [3, 3, 4, 4, 4, 4])
    assert batch.active_masks.all()  # rows 1 and 2 of the first agent count: V(0) learns 4
    buffer.value_preds[1:, 0, 0] = 0
    buffer.compute_returns(next_value)
    untrained = {0.0: 1, 0.5: 1 + 0.5 * (0.5 * 2 + 0.25 * 2), 1.0: 3}  # 0.5: half of it is sampled, delta by delta
    close(buffer.returns[0, 0, 0, 0], untrained[gae_lambda])


# -------------------------------------------------------------------------------------------------------- buffers


def actor_buffer(script, T, N, extra=0):
    """obs[t, e] = 10 e + t, recurrent state 100 + 10 e + t; actions, log-probs and advantages equal observations."""
    buffer = script.OnPolicyActorBuffer(T, N, 1, THREE, 0, 1)
    buffer.obs[..., 0] = 10 * np.arange(N) + np.arange(T + 1)[:, None] + extra
    buffer.rnn_states[..., 0, 0] = 100 + buffer.obs[..., 0]
    buffer.actions[:] = buffer.obs[:-1]
    buffer.action_log_probs[:] = buffer.obs[:-1]
    return buffer, buffer.obs[:-1].copy()


GENERATORS = {  # of 4 steps in 2 environments: 0 1 2 3 and 10 11 12 13
    # Chunks of 2 steps, environment by environment: 0 1 | 2 3 | 10 11 | 12 13, shuffled to 2, 0, 3, 1, in two parts.
    # Time is the slow axis: 10, 0 (first steps), 11, 1 (second steps).
    "recurrent": (2, [2], [2, 0, 3, 1], [[10, 0, 11, 1], [12, 2, 13, 3]], 2),
    # Whole rollouts: one minibatch of both environments, in the order 1, 0; then one minibatch for each.
    "naive_recurrent": (1, [], [1, 0], [[10, 0, 11, 1, 12, 2, 13, 3]], 4),
    "naive_recurrent, two": (2, [], [1, 0], [[10, 11, 12, 13], [0, 1, 2, 3]], 4),
    # Single rows, flat: 0 10 1 11 2 12 3 13.
    "feed_forward": (1, [], range(8), [[0, 10, 1, 11, 2, 12, 3, 13]], 1),
    "feed_forward, three": (3, [], [7, 0, 1, 6, 5, 4, 2, 3], [[13, 0, 10], [3, 12, 2], [1, 11]], 1),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators(script, name):
    """Fails if a generator cuts, shuffles or orders otherwise, in any field of either buffer. Of the recurrent states
    those before a chunk's first step are given: 110 and 100 with the chunks 10 11 and 0 1."""
    parts, chunk, order, expected, length = GENERATORS[name]
    form = name.split(",")[0]
    buffer, advantages = actor_buffer(script, 4, 2)
    generator = getattr(buffer, f"{form}_generator_actor")(advantages, parts, *chunk, Shuffled(*order))
    for batch, rows in zip(generator, expected, strict=True):
        for field in (batch.obs, batch.actions, batch.log_probs, batch.advantages):
            close(field[:, 0], rows)
        close(batch.rnn_states[:, 0, 0], [100 + x for x in rows[: len(rows) // length]])
        assert batch.actions.dtype == torch.int64
        assert batch.masks.shape == batch.factor.shape == batch.active_masks.shape == (len(rows), 1)
    critic = script.OnPolicyCriticBufferEP(4, 2, 1, 1)
    critic.share_obs[:], critic.rnn_states_critic[:] = buffer.obs, buffer.rnn_states
    critic.value_preds[:], critic.returns[:] = buffer.obs, buffer.obs[:-1]
    generator = getattr(critic, f"{form}_generator_critic")(parts, *chunk, Shuffled(*order))
    for batch, rows in zip(generator, expected, strict=True):
        for field in (batch.share_obs, batch.value_preds, batch.returns):
            close(field[:, 0], rows)
        close(batch.rnn_states_critic[:, 0, 0], [100 + x for x in rows[: len(rows) // length]])


def test_agents_who_share_a_policy_join(script):
    """The second agent's numbers are 1000 larger. Joined, time is still the slow axis."""
    batches = []
    for extra in (0, 1000):
        buffer, advantages = actor_buffer(script, 4, 2, extra)
        batches.append(next(buffer.recurrent_generator_actor(advantages, 2, 2, Shuffled(2, 0, 3, 1))))
    joined = script.join_agents(batches)
    for field in (joined.obs, joined.actions, joined.advantages):
        close(field[:, 0], [10, 0, 1010, 1000, 11, 1, 1011, 1001])
    close(joined.rnn_states[:, 0, 0], [110, 100, 1110, 1100])


# ------------------------------------------------------------------------------------------ normaliser and losses


def test_value_norm(script):
    """beta = 0.9. At first mean 0 and variance 0.01 (its floor). After [1, 3]: mean 2, E[R²] = 5, variance 1.

    Then [5, 5]: E[R] <- 0.9 * 0.1 * 2 + 0.1 * 5 = 0.68, weight 0.9 * 0.1 + 0.1 = 0.19: mean 68/19 = 3.578947;
    E[R²] <- 0.9 * 0.1 * 5 + 0.1 * 25 = 2.95: 295/19 - (68/19)² = 2.717452.
    """
    norm = script.ValueNorm(0.9)
    close(norm.denormalize(torch.ones(1)), [0.1])
    norm.update(torch.tensor([[1.0], [3.0]]))
    close(norm.mean_and_std(), [2, 1])
    close(norm.normalize(np.array([3.0])), [1])
    close(norm.denormalize(np.array([1.0])), [3])
    norm.update(torch.tensor([[5.0], [5.0]]))
    close(norm.mean_and_std(), [3.5789473684210527, 2.717451523545707**0.5])


def test_policy_loss(script):
    """eps = 0.2; the last row is not active. Ratios 1.5, 0.5, 1.5, 0.5, 9 with advantages 2, 2, -2, -2, 9:

    min(3, 2.4) = 2.4;  min(1, 1.6) = 1;  min(-3, -2.4) = -3;  min(-1, -1.6) = -1.6;  the mean is -0.3, the loss 0.3.
    """
    ratios, advantages, active = column(1.5, 0.5, 1.5, 0.5, 9), column(2, 2, -2, -2, 9), column(1, 1, 1, 1, 0)
    close(script.active_policy_loss(ratios.log(), advantages, active, 0.2), 0.3)


def test_value_loss(script):
    """Errors 1, -3 and, not active, 50; delta 2: 1/2 and 2 (3 - 1) = 4, mean 2.25.

    Clipped: old 1, new 2, return 3, clip 0.2: the larger of (3 - 2)²/2 and (3 - 1.2)²/2 = 1.62, delta being 10.
    """
    close(script.huber_value_loss(column(1, 0, 50), column(0, 0, 0), column(0, 3, 0), column(1, 1, 0), 2.0), 2.25)
    close(script.huber_value_loss(column(2), column(1), column(3), column(1), 10.0, 0.2), 1.62)
    close(script.huber_value_loss(column(2), column(1), column(3), column(1), 10.0), 0.5)
