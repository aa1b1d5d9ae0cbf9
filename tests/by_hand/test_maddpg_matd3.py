"""The numbers of MADDPG and MATD3, worked out by hand: a lesson to be read beside maddpg_matd3.py.

Steps lie in slots: step t of environment e in slot t N + e, N being the number of environments.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.tools import close


def fill(buffer, rewards, dones, terms=None, valid=None, first=0):
    """Insert rewards and ends (T, N, G). Step t of environment e, with the number x = t N + e, begins in state x and
    ends in x + 0.5; agent i observes 1000 i + x, and does -x. Available are t's last binary digit, and 1.
    """
    (T, N, G), n = np.shape(rewards), len(buffer.obs)
    terms = dones if terms is None else terms
    rewards, valid = np.array(rewards, float), np.array(np.ones((T, N, n)) if valid is None else valid)
    for t in range(T):
        x = ((first + t) * N + np.arange(N))[:, None].astype(float)
        state = lambda y: np.repeat(y[:, None], G, 1)
        obs = lambda y: [1000 * i + np.repeat(y, i + 1, 1) for i in range(n)]  # i + 1 numbers for agent i
        masks = lambda digit: [np.hstack([np.full_like(x, digit % 2), np.ones_like(x)])] * n
        now = state(x), obs(x), [-x] * n, masks(first + t), rewards[t], dones[t], valid[t], terms[t]
        buffer.insert(*now, state(x + 0.5), obs(x + 0.5), masks(first + t + 1))


def new_buffer(script, kind, capacity, num_envs, num_agents, n_step):
    """An empty buffer with gamma = 1/2."""
    sizes = 1, list(range(1, num_agents + 1)), [1] * num_agents, [2] * num_agents
    return getattr(script, f"OffPolicyBuffer{kind}")(capacity, num_envs, *sizes, n_step, gamma=0.5)


by_slot = lambda *numbers: np.reshape(numbers, (-1, 2, 1))  # two environments
REWARDS = by_slot(1, 10, 2, 20, 3, 30, 4, 40)
DONES, TERMS = by_slot(0, 0, 1, 0, 0, 1, 0, 0) > 0, by_slot(0, 0, 1, 0, 0, 0, 0, 0) > 0


@pytest.mark.parametrize("agents", [1, 2])
def test_three_steps(script, agents):
    """Slots 0 2 4 6 and 1 3 5 7. Environment 0 terminates in slot 2, environment 1 is truncated in slot 5; slots 6 and
    7 are the newest. Q' is 8 everywhere.

    from   reward                            discount   last slot   target
    0      1 + 0.5 * 2 = 2                   0.25       2           2, for it terminated
    1      10 + 0.5 * 20 + 0.25 * 30 = 27.5  0.125      5           27.5 + 0.125 * 8 = 28.5
    2      2                                 0.5        2           2
    3      20 + 0.5 * 30 = 35                0.25       5           35 + 0.25 * 8 = 37
    4      3 + 0.5 * 4 = 5                   0.25       6           5 + 2 = 7
    5      30                                0.5        5           30 + 4 = 34
    6      4                                 0.5        6           8
    7      40                                0.5        7           44
    """
    buffer = new_buffer(script, "EP", 8, 2, agents, n_step=3)
    fill(buffer, REWARDS, DONES, TERMS)
    batch = buffer.get(np.arange(8))
    column = lambda *numbers: np.array(numbers)[:, None]
    close(batch.rewards, column(2, 27.5, 2, 35, 5, 30, 4, 40))
    close(batch.gammas, column(0.25, 0.125, 0.5, 0.25, 0.25, 0.5, 0.5, 0.5))
    close(batch.dones, column(1, 1, 1, 1, 0, 1, 0, 0))
    close(batch.terms, column(1, 0, 1, 0, 0, 0, 0, 0))
    last = column(2, 5, 2, 5, 6, 5, 6, 7)
    close(batch.share_obs, column(*range(8)))
    close(batch.next_share_obs, last + 0.5)
    for i in range(agents):
        close(batch.obs[i], 1000 * i + np.repeat(column(*range(8)), i + 1, 1))
        close(batch.next_obs[i], 1000 * i + np.repeat(last + 0.5, i + 1, 1))
        close(batch.actions[i], -column(*range(8)))
        close(batch.available_actions[i][:, 0], np.arange(8) // 2 % 2)
        close(batch.next_available_actions[i][:, 0], (last[:, 0] // 2 + 1) % 2)
    columns = batch.rewards[:, 0], torch.full((1, 8), 8.0), batch.terms[:, 0], batch.gammas[:, 0]
    close(script.critic_targets(*columns), [2, 28.5, 2, 37, 7, 34, 8, 44])


def test_the_ring_is_full(script):
    """One step more, rewards 5 and 50, takes slots 0 and 1: now 2 and 3 are the oldest, 0 and 1 the newest.

    From 4: 3 + 0.5 * 4 + 0.25 * 5 = 6.25; from 6: 4 + 0.5 * 5 = 6.5; from 7: 40 + 0.5 * 50 = 65; from 0 and 1 nothing
    follows: what stands in slots 2 and 3 was before.
    """
    buffer = new_buffer(script, "EP", 8, 2, 1, n_step=3)
    fill(buffer, REWARDS, DONES, TERMS)
    fill(buffer, by_slot(5, 50), by_slot(0, 0) > 0, first=4)
    batch = buffer.get(np.array([2, 3, 4, 5, 6, 7, 0, 1]))
    close(batch.rewards[:, 0], [2, 35, 6.25, 30, 6.5, 65, 5, 50])
    close(batch.gammas[:, 0], [0.5, 0.25, 0.125, 0.5, 0.25, 0.25, 0.5, 0.5])
    close(batch.next_share_obs[:, 0], [2.5, 5.5, 8.5, 5.5, 8.5, 9.5, 8.5, 9.5])


def test_each_agent_has_a_window(script):
    """Two steps, two agents. Agent 0 is done in step 0, and from then on dead; agent 1 gets 1, 2, 3 and is done, as the
    environment is, in step 2. Rows: all of agent 0, then all of agent 1.

    Agent 0: 1, and two steps that it did not take part in. Agent 1: 1 + 0.5 * 2 = 2, 2 + 0.5 * 3 = 3.5, 3.
    """
    buffer = new_buffer(script, "FP", 3, 1, 2, n_step=2)
    dones = np.array([[[1, 0]], [[1, 0]], [[1, 1]]]) > 0
    fill(buffer, [[[1, 1]], [[0, 2]], [[0, 3]]], dones, valid=[[[1, 1]], [[0, 1]], [[0, 1]]])
    batch = buffer.get(np.arange(3))
    close(batch.rewards, np.array([[1, 0, 0, 2, 3.5, 3]]).T)
    close(batch.gammas, np.array([[0.5, 0.5, 0.5, 0.25, 0.25, 0.5]]).T)
    close(batch.dones, np.array([[1, 1, 1, 0, 1, 1]]).T)
    close(batch.valid_transitions, np.array([[1, 0, 0, 1, 1, 1]]).T)
    last = np.array([0, 1, 2, 1, 2, 2])
    close(batch.next_share_obs[:, 0], last + 0.5)
    close(batch.next_obs[1][:, 1], 1000 + last + 0.5)  # what agent 1 observes at the end of each of the six windows
    assert batch.share_obs.shape == (6, 1) and batch.obs[1].shape == (3, 2) and batch.next_obs[1].shape == (6, 2)


def test_rows_that_reset_and_restarts(script):
    """Environment 1 plays two steps while 0 plays three: the second row only resets it, nobody takes part. Its steps,
    10 and 30, follow one another in slots 1 and 3. Then all begin anew: 30 and 4 are the last of their windows.
    """
    buffer = new_buffer(script, "EP", 8, 2, 1, n_step=2)
    buffer.cut()  # of nothing, there is nothing to cut
    fill(buffer, by_slot(1, 10, 2, 0, 4, 30), by_slot(0, 1, 0, 0, 0, 0) > 0, valid=by_slot(1, 1, 1, 0, 1, 1))
    batch = buffer.get(np.array([0, 2, 4, 1, 3]))
    close(batch.rewards[:, 0], [2, 4, 4, 10, 30])
    close(batch.share_obs[:, 0], [0, 2, 4, 1, 5])
    buffer.cut()
    fill(buffer, by_slot(100, 100), by_slot(0, 0) > 0, first=3)
    batch = buffer.get(np.array([2, 4, 1, 3, 5]))
    close(batch.rewards[:, 0], [4, 4, 10, 30, 100])
    close(batch.terms[:, 0], [0, 0, 1, 0, 0])  # cut, but not terminated: Q' counts


def test_whose_turn_it_is(script):
    """Two agents did 1 and 2, and would now do 10 and 20: (10, 2) in the first's turn, then (1, 20)."""
    did, would = [torch.tensor([[x]]) for x in (1, 2)], [torch.tensor([[x]]) for x in (10, 20)]
    close(torch.cat(script.in_turn(would, did), dim=1), [[10, 2], [1, 20]])


def test_gumbel_softmax(script):
    """Logits (0, log 3), noise (1, 0), temperature 2: softmax of (0.5, log(3) / 2) = (1.648721, 1.732051) / 3.380772
    = (0.487676, 0.512324), so the draw is (0, 1): log 3 = 1.0986 is more than 1. The gradient of 5 times its first
    entry is that of 5 times the soft one: 5 / 2 * 0.487676 * (0.512324, -0.512324) = (0.624620, -0.624620).
    """
    logits = torch.tensor([1.0, 3.0]).log().requires_grad_()
    draw = script.gumbel_softmax(logits, torch.tensor([1.0, 0.0]), 2.0)
    close(draw, [0, 1])
    close(torch.autograd.grad(5 * draw[0], logits)[0], [0.624620, -0.624620])


def test_td3_target(script):
    """mu'(s') = 0, noise 0.8, cut off at 0.5; near the bound at 1. y = 1 + 0.9 min(2, 3) = 2.8, or 1 at an end; the
    target moves from 0 by 0.01 of the way to 1. In steps 1 to 20 training is due after 12, 16 and 20.
    """
    close(script.smoothed(torch.tensor([0.0, 0.9]), torch.tensor([0.8, 0.3]), 0.5), [0.5, 1])
    y = script.critic_targets(torch.ones(2), torch.tensor([[2.0, 2], [3, 3]]), torch.tensor([False, True]), 0.9)
    close(y, [2.8, 1])
    target, source = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    target.weight.data.fill_(0), source.weight.data.fill_(1)
    script.polyak(target, source, 0.01)
    close(target.weight, [[0.01]])
    args = script.Args(learning_starts=5, batch_size=10, train_frequency=4, gradient_steps=2)
    assert script.updates_due(0, 20, args) == 3 * 2 and script.updates_due(12, 15, args) == 0


LAYOUT = SimpleNamespace(alive=slice(1, 3), observations=[slice(3, 5), slice(5, 7)], state=slice(3, 7),
                         available=[slice(7, 7)] * 2)  # fmt: skip


def test_an_update(script):
    """Two agents, mu^i(o) = tanh(w^i o), Q(s, a, b) = s + 2 a - 3 b, mu' = 0, Q' = 4 s + a; no twins, noise or biases.

    A sample: s = 1, both observe 1, a = 0.5, b = 1, R = 1, k = 2 with gamma 0.5: 0.25, s' = 2.
    y = 1 + 0.25 * 4 * 2 = 3. Q = 1 + 1 - 3 = -1, L = 16, dL/dQ = 2 (-1 - 3) = -8, times (s, a, b, 1).
    Actors: J = 1/2 ( Q(s, tanh w^1, 1) + Q(s, 0.5, tanh w^2) ), so d(-J)/dw^1 = -2 / 2 (1 - tanh(w^1)^2), and for the
    other + 3 / 2 (…): each sees the old action of the other.
    """
    args = script.Args(twin_q=False, target_noise=0.0, hidden_sizes=())
    agents = script.Agents(LAYOUT, [spaces.Box(-1, 1, (2,))] * 2, args)
    for p in agents.parameters():
        p.data.zero_()
    agents.actors[0][0].weight.data[0, 0] = 0.3
    agents.actors[1][0].weight.data[0, 0] = -0.2
    agents.critics[0][0][0].weight.data[0, [0, 4, 6]] = torch.tensor([1.0, 2, -3])  # state (4), a (2), b (2)
    agents.target_critics[0][0][0].weight.data[0, [0, 4]] = torch.tensor([4.0, 1])
    one, no, masks = torch.ones(1, 1), torch.zeros(1, 1) > 0, [torch.zeros(1, 0) > 0] * 2
    state, obs = torch.tensor([[1.0, 0, 0, 0]]), [torch.tensor([[1.0, 0]])] * 2
    actions = [torch.tensor([[0.5, 0]]), torch.tensor([[1.0, 0]])]
    valid = torch.ones(2, 1)
    batch = script.OffPolicyBatch(state, obs, actions, masks, one, no, valid, no, 2 * state, obs, masks, one / 4)
    targets = script.matd3_targets(agents, batch, args, None)
    close(targets, [3])
    loss, value = script.critics_loss(agents, batch, targets)
    loss.backward()
    close(torch.stack([loss, value]), [16, -1])
    critic = agents.critics[0][0][0]
    close(torch.cat([critic.weight.grad[0], critic.bias.grad]), [-8, 0, 0, 0, -4, 0, -8, 0, -8])
    loss, _ = script.actors_loss(agents, batch, None)
    loss.backward()
    squashed = np.tanh([0.3, -0.2])
    close(loss, -((1 + 2 * squashed[0] - 3) + (1 + 2 * 0.5 - 3 * squashed[1])) / 2)
    close(agents.actors[0][0].weight.grad[0, 0], -2 / 2 * (1 - squashed[0] ** 2))
    close(agents.actors[1][0].weight.grad[0, 0], 3 / 2 * (1 - squashed[1] ** 2))
