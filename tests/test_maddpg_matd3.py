"""What maddpg_matd3.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes that stand above it in `catches`. What it shares with other scripts is
tested there: TeamEnv in test_mappo.py, targets and num_updates in test_ddpg_td3.py, polyak in test_dqn.py.
"""

from functools import cache
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo import ParallelEnv
from reference import maddpg_matd3 as reference
from run_folder import check_refused, command, kill_and_resume
from tools import catches, close, fails, flat, rehearse, vector_env

import maddpg_matd3

# ------------------------------------------------------------------------------------------------- a lesson, by hand


def new_buffer(script, streams, capacity, num_envs, num_agents, n_step):
    """An empty buffer of rows of one number and joint actions of two, with gamma = 1/2."""
    sizes = {"row_size": 1, "action_size": 2, "num_agents": num_agents, "streams": streams}
    return script.OffPolicyBuffer(capacity, num_envs, n_step=n_step, gamma=0.5, **sizes)


def fill(buffer, rewards, ends, took_part=None, first=0):
    """Insert rewards and ends (T, N, G), 1 for a truncation, 2 for a termination. Step t of environment e, with the
    number x = t N + e (its slot, until the ring is full), begins with the row x, ends with x + 0.5; the agents do -x.
    """
    T, N, _ = np.shape(rewards)
    rewards, ends = np.array(rewards, float), np.array(ends)
    took_part = np.ones((T, N, buffer.took_part.shape[2])) if took_part is None else np.array(took_part)
    for t in range(T):
        x = ((first + t) * N + np.arange(N))[:, None].astype(float)
        buffer.insert(x, np.hstack([-x, -x]), took_part[t] > 0, rewards[t], ends[t] == 2, ends[t] > 0, x + 0.5)


by_slot = lambda *numbers: np.reshape(numbers, (-1, 2, 1))  # two environments


@catches(
    "OffPolicyBuffer.windows, sums beyond the end: ~self.dones[last, e, g] & (last -> (last",
    "OffPolicyBuffer.windows, sums beyond truncations: ~self.dones[last -> ~self.terminated[last",
    "OffPolicyBuffer.windows, gamma to the n: discounts, last\n -> 0 * discounts + self.gamma**self.n_step, last\n",
    "OffPolicyBuffer.windows, rewards not discounted: goes_on * discounts * self.rewards -> goes_on * self.rewards",
    "OffPolicyBuffer.windows, what follows the first step: discounts, last\n -> discounts, np.tile(t, (g.size, 1))\n",
    "OffPolicyBuffer.windows, one step too few: range(self.n_step - 1) -> range(self.n_step - 2)",
    "OffPolicyBuffer.windows, sums beyond the newest:  & (last != newest) -> ",
    "OffPolicyBuffer.windows, stops at the last slot: (last != newest) -> (last != newest) & (last != self.steps - 1)",
    "OffPolicyBuffer.windows, the first one's last but one: (self.positions[e] - 1) -> (self.positions[0] - 2)",
    "OffPolicyBuffer.get, dones for terminated: terminated=self.terminated[ -> terminated=self.dones[",
    "OffPolicyBuffer.get, the first step's termination: self.terminated[last, e, g] -> self.terminated[t, e, g]",
    "OffPolicyBuffer.get, row after the first step: self.next_rows[last, e] -> self.next_rows[t, e]",
    "OffPolicyBuffer.get, slots environment by environment: (slots, self.num_envs) -> (slots, self.steps)[::-1]",
    "OffPolicyBuffer.insert, the row after is the row: = next_rows[envs] -> = rows[envs]",
)
def test_three_steps(script):
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

    One step more, rewards 5 and 50, takes slots 0 and 1: they are the newest, and 2 and 3 the oldest. From 4: 3 + 0.5 *
    4 + 0.25 * 5 = 6.25; from 6: 4 + 0.5 * 5 = 6.5; from 7: 40 + 0.5 * 50 = 65; from 0 and 1 nothing follows: what
    stands in slots 2 and 3 was before.
    """
    buffer = new_buffer(script, 1, 8, 2, 2, n_step=3)
    fill(buffer, by_slot(1, 10, 2, 20, 3, 30, 4, 40), by_slot(0, 0, 2, 0, 0, 1, 0, 0))
    batch = buffer.get(np.arange(8))
    close(batch.rewards, [2, 27.5, 2, 35, 5, 30, 4, 40])
    close(batch.discounts, [0.25, 0.125, 0.5, 0.25, 0.25, 0.5, 0.5, 0.5])
    close(batch.terminated, [1, 0, 1, 0, 0, 0, 0, 0])
    close(batch.next_rows[:, 0], np.array([2, 5, 2, 5, 6, 5, 6, 7]) + 0.5)
    y = script.critic_targets(batch.rewards, torch.full((1, 8), 8.0), batch.terminated, batch.discounts)
    close(y, [2, 28.5, 2, 37, 7, 34, 8, 44])
    fill(buffer, by_slot(5, 50), by_slot(0, 0), first=4)
    batch = buffer.get(np.array([2, 3, 4, 5, 6, 7, 0, 1]))
    close(batch.rewards, [2, 35, 6.25, 30, 6.5, 65, 5, 50])
    close(batch.discounts, [0.5, 0.25, 0.125, 0.5, 0.25, 0.25, 0.5, 0.5])
    close(batch.next_rows[:, 0], [2.5, 5.5, 8.5, 5.5, 8.5, 9.5, 8.5, 9.5])


@catches(
    "OffPolicyBuffer.windows, ends of the environment only: ~self.dones[last, e, g] -> ~self.dones[last, e].all(-1)",
    "OffPolicyBuffer.windows, ends of any agent: ~self.dones[last, e, g] -> ~self.dones[last, e].any(-1)",
    "OffPolicyBuffer.get, sample by sample: rewards=rewards.ravel() -> rewards=rewards.T.ravel()",
    "OffPolicyBuffer.get, terminations of the first: terminated[last, e, g] -> terminated[last, e, 0]",
    "OffPolicyBuffer.get, after the first's window: self.next_rows[last, e] -> self.next_rows[last[:1] + 0 * g, e]",
)
def test_each_agent_has_a_window(script):
    """Two steps, two agents. Agent 0 is cut off in step 0, and dead from then on; agent 1 gets 1, 2, 3 and terminates,
    as the environment does, in step 2. First all of agent 0, then all of agent 1.

    Agent 0: 1, and two steps that it did not take part in. Agent 1: 1 + 0.5 * 2 = 2, 2 + 0.5 * 3 = 3.5, 3.
    """
    buffer = new_buffer(script, 2, 3, 1, 2, n_step=2)
    ends, took_part = [[[1, 0]], [[1, 0]], [[1, 2]]], [[[1, 1]], [[0, 1]], [[0, 1]]]
    fill(buffer, [[[1, 1]], [[0, 2]], [[0, 3]]], ends, took_part)
    batch = buffer.get(np.arange(3))
    close(batch.rewards, [1, 0, 0, 2, 3.5, 3])
    close(batch.discounts, [0.5, 0.5, 0.5, 0.25, 0.25, 0.5])
    close(batch.terminated, [0, 0, 0, 0, 1, 1])
    close(batch.next_rows[:, 0], [0.5, 1.5, 2.5, 1.5, 2.5, 2.5])


@catches(
    "OffPolicyBuffer.insert, stores rows that reset: took_part.any(1) -> took_part.any(1) | True",
    "OffPolicyBuffer.insert, one position for all: self.positions[envs] = (t + 1) -> self.positions[:] = (t.max() + 1)",
    "OffPolicyBuffer.cut, a window into the next episode: self.dones[self.positions[envs] - 1, envs] = True -> pass",
    "OffPolicyBuffer.cut, a restart is a termination: self.dones[ -> self.terminated[self.positions - 1] = self.dones[",
    "OffPolicyBuffer.cut, one step late: self.positions[envs] - 1, envs -> self.positions[envs], envs",
    'OffPolicyBuffer.sample, environments equally often: np.searchsorted(ends, drawn, side="right") -> drawn % 2',
    'OffPolicyBuffer.sample, an environment\'s first slot is another\'s: side="right" -> side="left"',
    "OffPolicyBuffer.sample, the newest never: rng.integers(ends[-1] -> rng.integers(ends[-1] - 1",
)
def test_reset_rows_and_restarts(script):
    """Environment 1 plays two steps while 0 plays three: the second row only resets it, nobody takes part. Its steps,
    10 and 30, follow one another in slots 1 and 3. Then all begin anew: 30 and 4 are the last of their windows.
    """
    buffer = new_buffer(script, 1, 10, 2, 1, n_step=2)
    one_of_each = SimpleNamespace(integers=lambda high, size: np.arange(high))
    with fails("cannot sample from an empty buffer"):
        buffer.sample(1, one_of_each)
    fill(buffer, by_slot(1, 10, 2, 0, 4, 30), by_slot(0, 2, 0, 0, 0, 0), by_slot(1, 1, 1, 0, 1, 1))
    batch = buffer.sample(5, one_of_each)  # in slots 0 2 4 1 3
    close(batch.rewards, [2, 4, 4, 10, 30])
    close(batch.rows[:, 0], [0, 2, 4, 1, 5])
    buffer.cut()
    fill(buffer, by_slot(100, 100), by_slot(0, 0), first=3)
    batch = buffer.get(np.array([2, 4, 1, 3, 5]))
    close(batch.rewards, [4, 4, 10, 30, 100])
    close(batch.terminated, [0, 0, 1, 0, 0])  # cut, but not terminated: Q' counts


@catches(
    "Agents.critic_inputs, the state of the first: self.layout.states[i] -> self.layout.states[0]",
    "Agents.new_critics, room for all states: state = self.layout.states[0] -> pass",
)
def test_states_of_each_agent(script):
    """FP: a critic sees what its agent observes, filled up with zeros, and the agent's own state, 4 or 5."""
    states = [slice(5, 6), slice(6, 7)]
    layout = script.Layout(slice(0, 2), [slice(2, 3), slice(3, 5)], slice(5, 7), states, [slice(7, 7)] * 2)
    agents = script.Agents(layout, [spaces.Discrete(2)] * 2, script.Args(state_type="FP"))
    close(agents.critic_inputs(torch.tensor([[1.0, 1, 1, 2, 3, 4, 5]] * 2)), [[1, 0, 4], [2, 3, 5]])
    assert agents.critics[0][0][0].in_features == 3 + 4  # and two actions, one-hot


@catches(
    "gumbel_softmax, soft draws: return hard + (soft - soft.detach()) -> return soft",
    "gumbel_softmax, no gradient: (soft - soft.detach()) -> 0 * soft",
    "gumbel_softmax, gradient upside down: (soft - soft.detach()) -> (soft.detach() - soft)",
    "gumbel_softmax, noise ignored: ((logits + noise) / temperature) -> (logits / temperature)",
    "gumbel_softmax, temperature ignored: ((logits + noise) / temperature) -> (logits + noise)",
    "gumbel_softmax, noise not tempered: ((logits + noise) / temperature) -> (logits / temperature + noise)",
)
def test_gumbel_softmax(script):
    """Logits (0, log 3), noise (1, 0), temperature 2: softmax of (0.5, log(3) / 2) = (1.648721, 1.732051) / 3.380772
    = (0.487676, 0.512324), so the draw is (0, 1): log 3 = 1.0986 is more than 1. The gradient of 5 times its first
    entry is that of 5 times the soft one: 5 / 2 * 0.487676 * (0.512324, -0.512324) = (0.624620, -0.624620).
    """
    logits = torch.tensor([1.0, 3.0]).log().requires_grad_()
    draw = script.gumbel_softmax(logits, torch.tensor([1.0, 0.0]), 2.0)
    close(draw, [0, 1])
    close(torch.autograd.grad(5 * draw[0], logits)[0], [0.624620, -0.624620])


TWO_BOXES = spaces.Box(-1, 1, (2,)), spaces.Box(np.float32([0, -5, 1]), np.float32([1, 5, 2]))
TWO_CHOICES = spaces.Discrete(2), spaces.Discrete(3, start=5)


def two_agents(script, action_spaces=TWO_BOXES, masks=False, obs_sizes=(2, 3), **settings):
    """Agents without hidden layers, whose state is what they observe. A row: alive (2), observations, masks."""
    observations = script.slices(obs_sizes, 2)
    end = observations[-1].stop
    available = script.slices([2, 3] if masks else [0, 0], end)
    state = slice(2, end)
    layout = script.Layout(slice(0, 2), observations, state, [state] * 2, available)
    return script.Agents(layout, action_spaces, script.Args(**{"hidden_sizes": ()} | settings))


def set_weights(network, weight, bias):
    """Set those of a network of one layer."""
    for parameter, value in zip(network[0].parameters(), (weight, bias)):
        parameter.data[:] = torch.as_tensor(value)


@catches(
    "matd3_targets, no target actors: agents.choose(agents.target_actors -> agents.choose(agents.actors",
    "matd3_targets, gamma whatever the window: batch.discounts -> args.gamma",
    "actors_loss, others do what they would now: batch.actions.split(agents.action_sizes, dim=1) -> own",
    "actors_loss, downhill: return -valid_mean(values -> return valid_mean(values",
    "critics_loss, not squared: (values - targets) ** 2 -> (values - targets).abs()",
    "with_own_actions, all at once: joint = list(actions) -> joint = list(own)",
    "with_own_actions, another's turn: joint[i] = own[i] -> joint[-1 - i] = own[-1 - i]",
    "with_own_actions, old ones put in: joint[i] = own[i] -> pass",
)
def test_an_update(script):
    """Two agents, mu^i(o) = tanh(w^i o), Q(s, a, b) = s + 2 a - 3 b, mu' = 0, Q' = 4 s + a; no twins, noise or biases.

    A sample: s = 1, both observe 1, a = 0.5, b = 1, R = 1, k = 2 with gamma 0.5: 0.25, s' = 2.
    y = 1 + 0.25 * 4 * 2 = 3. Q = 1 + 1 - 3 = -1, L = 16, dL/dQ = 2 (-1 - 3) = -8, times (s, a, b, 1).
    Actors, in turn (tanh w^1, 1) and (0.5, tanh w^2): each sees the old action of the other. J = 1/2 ( Q(s, tanh w^1,
    1) + Q(s, 0.5, tanh w^2) ), so d(-J)/dw^1 = -2 / 2 (1 - tanh(w^1)^2), and for the other + 3 / 2 (…).
    """
    agents = two_agents(script, [spaces.Box(-1, 1, (1,))] * 2, obs_sizes=(1, 1), twin_q=False, target_noise=0.0)
    for p in agents.parameters():
        p.data.zero_()
    set_weights(agents.actors[0], 0.3, 0)
    set_weights(agents.actors[1], -0.2, 0)
    set_weights(agents.critics[0][0], [[1, 0, 2, -3]], 0)  # both observations, a, b
    set_weights(agents.target_critics[0][0], [[4, 0, 1, 0]], 0)
    row, one, no = torch.tensor([[1.0, 1, 1, 1]]), torch.ones(1), torch.zeros(1) > 0
    batch = script.OffPolicyBatch(row, torch.tensor([[0.5, 1]]), row[:, :2] > 0, one, no, 2 * row, one / 4)
    targets = script.matd3_targets(agents, batch, agents.args, None)
    close(targets, [3])
    loss, value = script.critics_loss(agents, batch, targets)
    loss.backward()
    close(torch.stack([loss, value]), [16, -1])
    critic = agents.critics[0][0][0]
    close(torch.cat([critic.weight.grad[0], critic.bias.grad]), [-8, -8, -4, -8, -8])
    squashed = np.tanh([0.3, -0.2])
    own, _ = agents.choose(agents.actors, row)
    close(script.with_own_actions(own, batch.actions.split(1, dim=1)), [[squashed[0], 1], [0.5, squashed[1]]])
    loss, squares = script.actors_loss(agents, batch, None)
    loss.backward()
    close(loss, -((1 + 2 * squashed[0] - 3) + (1 + 2 * 0.5 - 3 * squashed[1])) / 2)
    close(squares, (0.3**2 + 0.2**2) / 2)
    close(agents.actors[0][0].weight.grad[0, 0], -2 / 2 * (1 - squashed[0] ** 2))
    close(agents.actors[1][0].weight.grad[0, 0], 3 / 2 * (1 - squashed[1] ** 2))


@catches(
    "Agents.choose, masks ignored: torch.where(available, output, -1e9) -> output",
    "Agents.choose, not squashed: torch.tanh(output) -> output",
    "Agents.act, draws: device=self.device)) -> device=self.device), np.random.default_rng(1))",
    "Agents.to_env, not stretched: scale * action + bias -> action",
    "Agents.to_env, start forgotten: action.argmax(1) + space.start -> action.argmax(1)",
    "Agents.views, nothing is available: rows.new_ones(len(rows), size) > 0 -> rows.new_ones(len(rows), size) > 1",
)
def test_best_actions(script):
    """Outputs (x, -x) and (x, -x, 0): tanh of them, from [-1, 1] to the bounds of the Box, or the largest that is
    available. A choice counts from the space's start.
    """
    x = np.array([1, -2])
    rows = np.hstack([np.ones((2, 2)), np.transpose([x] * 5), [[0, 1, 0, 1, 1], [1, 1, 1, 0, 1]]]).astype(np.float32)
    taken = []
    for kind in [TWO_BOXES], [TWO_CHOICES], [TWO_CHOICES, True]:
        agents = two_agents(script, *kind)
        set_weights(agents.actors[0], [[1, 0], [-1, 0]], 0)
        set_weights(agents.actors[1], [[1, 0, 0], [-1, 0, 0], [0, 0, 0]], 0)
        taken += agents.act(rows)
    close(taken[0], np.tanh([x, -x]).T)
    close(taken[1], np.transpose([0.5 + np.tanh(x) / 2, -5 * np.tanh(x), [1.5, 1.5]]))
    assert [choices.tolist() for choices in taken[2:]] == [[0, 1], [5, 6], [1, 1], [7, 7]]


@catches(
    "Agents.explore, leaves the bounds: .clamp(-1, 1) -> .clamp(-99, 99)",
    "Agents.explore, noise ignored: + noise * -> + 0 * ",
    "Agents.explore, the same noise for all: self.normal(joint.shape, rng) -> self.normal((len(rows), 1), rng)",
    "Agents.random_actions, half the range: rng.uniform(-1, 1 -> rng.uniform(0, 1",
    "Agents.random_actions, masks ignored: np.where(available, rng.random -> np.where(True, rng.random",
    "Agents.random_actions, the first that is available: rng.random(available.shape), -1 -> 1, -1",
    "Agents.choose, masks ignored: torch.where(available, output, -1e9) -> output",
    "Agents.choose, no noise: rng.gumbel(size=output.shape) -> 0 * rng.gumbel(size=output.shape)",
)
def test_exploration(script):
    """Noise of deviation 0.25, of its own in each place, within the bounds; draws from the softmax of what is
    available, (0.2, 0.6, 0.2) without the last; at first evenly from all, or from what is available.
    """
    rng, rows = np.random.default_rng(0), np.ones((3000, 12), np.float32)
    rows[:, 11] = 0
    agents = two_agents(script)
    for actor in agents.actors:
        set_weights(actor, 0, 0)
    close(np.cov(agents.explore(rows, 0.25, rng).T), np.eye(5) * 0.25**2, atol=0.005)
    assert np.abs(agents.explore(rows, 9.0, rng)).max() == 1
    close(np.cov(agents.random_actions(rows, rng).T), np.eye(5) / 3, atol=0.03)  # of a uniform draw from [-1, 1]
    agents = two_agents(script, TWO_CHOICES, masks=True)
    for actor, probabilities in zip(agents.actors, ([0.1, 0.9], [0.2, 0.6, 0.2])):
        set_weights(actor, 0, np.log(probabilities))
    close(agents.explore(rows, 0, rng).mean(0), [0.1, 0.9, 0.25, 0.75, 0], atol=0.03)
    close(agents.random_actions(rows, rng).mean(0), [0.5, 0.5, 0.5, 0.5, 0], atol=0.03)


# -------------------------------------------------------------------------- against slow and obvious versions of it


@catches(
    "OffPolicyBuffer.state_dict, positions lost: from_numpy(self.positions) -> from_numpy(0 * self.positions)",
    'OffPolicyBuffer.load_state_dict, sizes lost: self.sizes[:] = state["sizes"] -> pass',
)
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), N=st.integers(1, 3), n=st.integers(1, 3), n_step=st.integers(1, 5), FP=st.booleans())
def test_buffers_equal_lists_that_forget(script, seed, N, n, n_step, FP):
    """Any sample of any slot, of a buffer that was saved and loaded, is what a walk along a list of steps gives."""
    rng, G, played = np.random.default_rng(seed), n if FP else 1, [[] for _ in range(N)]
    capacity = N * int(rng.integers(2, 7)) + int(rng.integers(N))
    buffer, loaded = (new_buffer(script, G, capacity, N, n, n_step) for _ in range(2))
    for t in range(int(rng.integers(1, 15))):
        rewards, ends = rng.normal(size=(N, G)), rng.choice([0, 0, 1, 2], (N, G))
        took_part = rng.integers(4, size=(N, n)) > 0
        fill(buffer, rewards[None], ends[None], took_part[None], first=t)
        for e in np.flatnonzero(took_part.any(1)):
            facts = {"rewards": rewards[e], "dones": ends[e] > 0, "terminated": ends[e] == 2}
            played[e].append(SimpleNamespace(x=t * N + e, took_part=took_part[e], **facts))
    loaded.load_state_dict(buffer.state_dict())
    assert loaded.sizes.tolist() == [min(len(steps), loaded.steps) for steps in played]
    for e, steps in enumerate(played):
        for k in range(max(0, len(steps) - loaded.steps), len(steps)):
            x, batch = steps[k].x, loaded.get(np.array([k % loaded.steps * N + e]))
            close(torch.cat([batch.rows, batch.actions, batch.took_part], 1)[0], [x, -x, -x, *steps[k].took_part])
            for g in range(G):
                total, discount, last = reference.window(steps[k:], g, n_step, 0.5)
                found = batch.rewards[g], batch.discounts[g], batch.next_rows[g, 0], batch.terminated[g]
                close(found, [total, discount, last.x + 0.5, last.terminated[g]])


class Chance(ParallelEnv):
    """Random observations, deaths, ends, masks and states, whatever is done; rewards by chance and by what is done.
    Agent i observes sizes[i] numbers, and has as many actions, or a Box of as many.
    """

    metadata = {"name": "chance"}
    observation_space = lambda self, agent: spaces.Box(-np.inf, np.inf, (self.sizes[agent],))

    def __init__(self, sizes=(2, 3), discrete=False, own_state=False):
        self.sizes, self.discrete, self.possible_agents = sizes, discrete, list(range(len(sizes)))
        if own_state:
            self.state = lambda: self.rng.normal(size=3)

    def action_space(self, agent):
        size = self.sizes[agent]
        return spaces.Discrete(size) if self.discrete else spaces.Box(-2, np.arange(1, size + 1, dtype=np.float32))

    def reset(self, seed=None, options=None):
        self.rng, self.agents = np.random.default_rng(seed), list(self.possible_agents)
        return self.observe(self.agents)

    def observe(self, agents):
        self.shown = {agent: self.rng.normal(size=self.sizes[agent]).astype(np.float32) for agent in agents}
        masks = {agent: {"action_mask": self.rng.integers(2, size=self.sizes[agent])} for agent in agents}
        return self.shown, masks if self.discrete else {agent: {} for agent in agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        obs, infos = self.observe(actions)
        rewards = {agent: self.rng.normal() + np.sum(action) for agent, action in actions.items()}
        over = self.rng.random() < 0.1
        terminated = {agent: bool(self.rng.random() < 0.2) for agent in actions}
        truncated = {agent: over and not terminated[agent] for agent in actions}
        self.agents = [agent for agent in actions if not terminated[agent] and not over]
        return obs, rewards, terminated, truncated, infos


COMMON = {"num_envs": 2, "hidden_sizes": (8, 6), "batch_size": 6, "learning_starts": 20, "buffer_size": 25, "tau": 0.1}
COMMON |= {"actor_learning_rate": 1e-2, "critic_learning_rate": 2e-2, "gamma": 0.9, "total_timesteps": 50, "seed": 3}
MADDPG = {"algorithm": "maddpg", "twin_q": False, "policy_frequency": 1, "target_noise": 0.0}
MANY = {"share_policy": True, "anneal_lr": True, "max_grad_norm": 0.01}
SHARED = {"state_type": "FP", "share_policy": True, "output_penalty": 1.0, "gradient_steps": 3}
TRAININGS = [  # what Chance is given; settings; how many actors and critics there are
    ({"sizes": (2, 2, 2)}, MADDPG | MANY, 1 + 1),
    ({"sizes": (2, 3, 4), "own_state": True}, {"state_type": "FP", "n_step": 3, "noise_clip": 0.1}, 3 + 6),
    ({}, {}, 2 + 2),
    ({"discrete": True}, {"n_step": 3, "gumbel_temperature": 0.7, "checkpoint_every": 20}, 2 + 2),
    ({"discrete": True, "sizes": (2, 2)}, SHARED, 1 + 2),
]
new_envs = lambda script, game: vector_env([lambda: script.TeamEnv(Chance(**game))], 2)


@cache
def slow_training(number):
    """What the slow version gives, with the script as it is: `script` may have a mistake."""
    game, options, _ = TRAININGS[number]
    args = maddpg_matd3.Args(**{"checkpoint_every": 50} | COMMON | options)
    return reference.train(args, lambda: new_envs(maddpg_matd3, game))


@catches(
    "Agents.__init__, twins are one network: append(self.new_critics()) -> append(self.critics[0])",
    "Agents.__init__, twins begin alike: append(self.new_critics()) -> append(copy.deepcopy(self.critics[0]))",
    "Agents.__init__, targets are the critics themselves: copy.deepcopy(self.critics) -> self.critics",
    "Agents.__init__, targets are the actors themselves: copy.deepcopy(self.actors) -> self.actors",
    "Agents.__init__, shared actors are copies: [self.actors[0]] * self.num_agents -> self.actors",
    "Agents.new_critics, one for all: 1 if args.share_policy else self.num_agents -> 1",
    "Agents.critic_inputs, the state alone: torch.cat([obs, part -> torch.cat([0 * obs, part",
    "Agents.values, critics in another order: zip(critics, inputs) -> zip(reversed(critics), inputs)",
    "Agents.choose, temperature ignored: self.args.gumbel_temperature -> 1.0",
    "make_off_policy_buffer, gamma of another: gamma=args.gamma -> gamma=0.99",
    "store_step, truncation is termination: took_part, rewards, terminated, -> took_part, rewards, dones,",
    "store_step, reset rows are stored:  & ~reset_rows[:, None] -> ",
    "store_step, the row after is the row: dones, next_rows) -> dones, rows)",
    'store_step, everybody gets the sum: infos["rewards"] -> rewards[:, None].repeat(3, 1)',
    'store_step, the environment\'s terminations: infos["terminated"] -> terminated[:, None].repeat(3, 1)',
    "store_step, a death is no end: dones | (next_rows[:, alive] == 0) -> dones.repeat(3, 1)",
    "store_step, another environment's reset revives: ~reset_rows[:, None] -> ~reset_rows.any()",
    "store_step, the dead take part: (rows[:, alive] == 1) -> (rows[:, alive] >= 0)",
    "matd3_targets, no target critics: for twin in agents.target_critics] -> for twin in agents.critics]",
    "matd3_targets, the row before: agents.values(twin, batch.next_rows -> agents.values(twin, batch.rows",
    "matd3_targets, no noise: args.target_noise > 0 and -> False and",
    "matd3_targets, one critic asked twice: agents.values(twin, -> agents.values(agents.target_critics[0],",
    "critics_loss, one critic learns: ** 2).sum(0) -> ** 2)[0]",
    "critics_loss, learns what the dead got: valid = batch.took_part.T.flatten() -> pass",
    "critics_loss, the masks of another: batch.took_part.T.flatten() -> batch.took_part.flatten()",
    "valid_mean, divided by all: valid.sum().clamp(min=1) -> len(valid)",
    "actors_loss, by the second critic: agents.critics[0] -> agents.critics[-1]",
    "actors_loss, learns what the dead saw: -valid_mean(values, valid) -> -values.mean()",
    "actors_loss, rows of another sample: rows.repeat(agents.num_agents, 1) -> rows.repeat_interleave(3, 0)",
    "actors_loss, the penalty of the dead: valid_mean(squares, valid) -> squares.mean()",
    "train, actors do not wait: updates % args.policy_frequency == 0 -> True",
    "train, target critics stand still: polyak(agents.target_critics, agents.critics, args.tau) -> pass",
    "train, target actors stand still: polyak(agents.target_actors, agents.actors, args.tau) -> pass",
    "gradient_step, gradients add up: optimizer.zero_grad() -> pass",
    "train, one learning rate: (), args.actor_learning_rate -> (), args.critic_learning_rate",
    "train, rows that reset are steps: reset_rows = terminated | truncated -> reset_rows = terminated & truncated",
    "train, explores from the start: if run.step < args.learning_starts -> if False",
    "train, explores without noise: rows, args.exploration_noise, rng -> rows, 0.0, rng",
    "train, the rows after for those before: store_step(buffer, agents, rows, -> store_step(buffer, agents, result[0],",
    "train, not annealed: if args.anneal_lr -> if False",
    "train, the actors' rate stands still: actor_scheduler.step() -> pass",
    "train, the critics' rate stands still: critic_scheduler.step() -> pass",
    "train, the critics' gradients too long: critic_optimizer, args) -> critic_optimizer, Args(max_grad_norm=9.0))",
    "train, the actors' gradients too long: actor_optimizer, args) -> actor_optimizer, Args(max_grad_norm=9.0))",
    "train, windows reach over a restart: run.new_envs()\n            buffer.cut() -> run.new_envs()",
    "train, penalty forgotten: + args.output_penalty * squares -> + 0 * squares",
)
def test_training(script):
    """50 steps of two environments whose agents die, with a ring of 12 steps each: all that was logged, returned and
    learnt is what the slow version has. No network is another one, nor remains what another one is.
    """
    for number, (game, options, count) in enumerate(TRAININGS):
        agents, metrics, returns = slow_training(number)
        run = rehearse(script, lambda: script.TeamEnv(Chance(**game)), **COMMON | options)
        networks = [part for part in run.agent.modules() if isinstance(part, torch.nn.Sequential)]  # with the targets
        assert len(networks) == len({flat(network)[0].item() for network in networks}) == 2 * count
        close(run.episodes["return"], returns, atol=1e-3)
        assert set(run.all_logged) == set(metrics)
        for name, values in metrics.items():
            close(run.all_logged[name], values, atol=1e-3)
        close(flat(run.agent), flat(agents), atol=1e-3)


# ------------------------------------------------------------------------------------------ small worlds and whole runs


class Game(Chance):
    """One step. Each of two agents is shown a number; play(numbers, actions) gives the rewards."""

    def __init__(self, play, space, end):
        super().__init__(sizes=(1, 1))
        self.play, self.end, self.action_space = play, end, lambda agent: space

    def step(self, actions):
        rewards = self.play(*[np.ravel([given[0], given[1]]) for given in (self.shown, actions)])
        terminated, truncated = [dict.fromkeys(actions, self.end == end) for end in ("terminated", "truncated")]
        self.agents = []
        return self.shown, dict(enumerate(rewards)), terminated, truncated, {0: {}, 1: {}}


PAYOFF = np.array([[0, 1, 0], [1, 2, 0], [5, 0, 0]])
both_choose = lambda _, actions: [PAYOFF[tuple(actions)]] * 2
half_of_it = lambda numbers, actions: 1 - (actions - numbers / 2) ** 2
GAMES = [  # what it pays, actions, end; EP or FP, the least return, what the best actions are worth to each critic
    (both_choose, spaces.Discrete(3), "truncated", "EP", 9.9, [20]),
    (half_of_it, spaces.Box(-1, 3, (1,)), "terminated", "FP", 1.8, [1, 1]),
]
QUICK = {"hidden_sizes": (32, 32), "batch_size": 64, "learning_starts": 200, "num_envs": 4, "tau": 0.1, "gamma": 0.5}
QUICK |= {"actor_learning_rate": 3e-3, "critic_learning_rate": 5e-3, "total_timesteps": 2500, "eval_episodes": 50}


@pytest.mark.slow
@pytest.mark.parametrize("play, space, end, state_type, least, worth", GAMES)
def test_games_are_solved(script, play, space, end, state_type, least, worth):
    """(2, 0) is worth 5 to both, its neighbours 0, (1, 1) a safe 2. Cut off, it would go on: 10 / (1 - 0.5) = 20. Each
    should do half of what it is shown; that terminates.
    """
    run = rehearse(script, lambda: script.TeamEnv(Game(play, space, end)), state_type=state_type, **QUICK)
    assert run.evaluations["return_mean"][-1] >= least
    agents, row = run.agent, torch.from_numpy(run.parts["buffer"].rows[0, :1]).repeat(len(worth), 1)
    best, _ = agents.choose(agents.actors, row)
    close(agents.values(agents.critics[0], row, torch.cat(best, 1)), worth, atol=0.1 * sum(worth))


@catches("train, never in training: agents.train() -> pass", "train, always in training: agents.eval() -> pass")
def test_dropout_belongs_to_the_losses(script):
    """Networks are in training mode where they learn; who acts, and the targets, are not. A Box may be a point."""
    modes = {"critics_loss": set(), "actors_loss": set(), "matd3_targets": set()}
    replaced = {name: watched(getattr(script, name), modes[name]) for name in modes}
    acts = watched(script.Agents.explore, modes.setdefault("acts", set()))
    with mock.patch.multiple(script, **replaced), mock.patch.object(script.Agents, "explore", acts):
        point = half_of_it, spaces.Box(1, 1, (1,)), "terminated"
        run = rehearse(script, lambda: script.TeamEnv(Game(*point)), **COMMON)
    assert modes == {"critics_loss": {True}, "actors_loss": {True}, "matd3_targets": {False}, "acts": {False}}
    assert flat(run.agent).isfinite().all()


def watched(function, modes):
    """The function, which also notes in which mode the networks of its first argument are."""

    def call(agents, *given):
        modes.update(part.training for part in agents.modules())
        return function(agents, *given)

    return call


RUN = "--num-envs 2 --hidden-sizes 8 --batch-size 8 --learning-starts 20 --buffer-size 60 --n-step 3 --eval-episodes 2 "
RUN += "--total-timesteps 100 --checkpoint-every 30 --eval-every 60 --max-episode-steps 8"


@catches(
    'train, an optimiser is not saved: , "critic_optimizer": critic_optimizer} -> }',
    "train, updates begin anew: updates = num_updates(run.step, args) -> updates = 0",
    "make_agents, the other algorithm's --config: named and all( -> named and not any(",
)
def test_killed_resumed_evaluated(script, tmp_path, monkeypatch, capsys):
    """A run goes on after a kill as if nothing had happened; --evaluate plays its best weights. As --config it has
    MATD3's three settings: --algorithm maddpg alone is refused.
    """
    kill_and_resume(script, RUN, 50, monkeypatch, tmp_path)
    assert command(script, "--evaluate run --eval-episodes 2") == 0
    assert "best weights: -" in capsys.readouterr().out
    assert command(script, "--config run --algorithm maddpg") == 2
    assert "give target_noise, twin_q, policy_frequency as well" in capsys.readouterr().err


@catches(
    "tuned_settings, forgotten: | ALGORITHMS[args.algorithm] -> ",
)
def test_algorithm_sets_three_flags_and_what_is_given_wins(script):
    """MATD3 is MADDPG plus three settings, which can be mixed."""
    three = lambda args: (args.target_noise, args.twin_q, args.policy_frequency)
    assert three(script.tuned()) == (0.2, True, 2) and script.tuned("--algorithm", "maddpg").tau == 0.01
    assert three(script.tuned("--algorithm", "maddpg")) == (0.0, False, 1)
    assert three(script.tuned("--algorithm", "maddpg", "--twin-q")) == (0.0, True, 1)


def test_refused(script, tmp_path, monkeypatch, capsys):
    refused = {"buffer-size 10": "batch_size", "buffer-size 100000000000000": "too large: Unable", "n-step 0": "n_step"}
    refused["share-policy --env-id mpe2.simple_speaker_listener_v4"] = "--no-share-policy"
    refused = {f"--{flags}": words for flags, words in refused.items()}
    check_refused(script, refused, tmp_path, monkeypatch, capsys)
    boxes = [spaces.Box(-1, high, (1,)) for high in (np.inf, np.finfo(np.float32).max)]
    for space in (*boxes, spaces.Box(0, 4, (1,), np.int64), spaces.MultiBinary(2)):
        with pytest.raises(script.UserError, match="all actions must be Discrete, or bounded Boxes"):
            script.make_agents(script.Args(), vector_env([lambda: script.TeamEnv(Game(None, space, None))], 1))
