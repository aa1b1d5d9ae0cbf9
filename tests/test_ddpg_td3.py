"""ddpg_td3.py: its numbers against arithmetic done by hand and against a slow, obvious twin; its learning against
environments whose right answer is known; whole runs, killed and resumed; bad input.

The `check_…` functions take the implementation they judge, so that known mistakes can be handed to them as well: each
has to be caught, or else the check is worth nothing.
"""

import contextlib
import copy
import csv
import dataclasses
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import run_envs  # noqa: F401  (registers its environments)
import td3_envs  # noqa: F401
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ddpg_td3
from ddpg_td3 import ActorCritic, Adam, Args, FusedAdam, ReplayBuffer, Transitions, evaluate, load, train

SOURCE = Path(ddpg_td3.__file__).read_bytes()
TIME_COLUMNS = ("seconds", "sps")
OBS = spaces.Box(-np.inf, np.inf, (3,))
ACT = spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32))
QUICK = dict(hidden_sizes=(32, 32), batch_size=64, learning_starts=100, actor_learning_rate=3e-3, gamma=0.5, tau=0.02)
QUICK |= dict(critic_learning_rate=3e-3, eval_every=10**9, torch_threads=1, progress=False)
TINY = "--hidden-sizes 8 --batch-size 16 --learning-starts 40 --eval-episodes 2 --no-progress".split()


def close(actual, expected, atol=1e-6):
    """AssertionError unless all numbers agree; shapes as well."""
    actual, expected = (torch.as_tensor(np.asarray(x), dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-5)


def make_agent(obs=OBS, act=ACT, **args):
    """(ActorCritic, its Args, its optimisers) for the given spaces."""
    args = Args(**{"env_id": "none", "hidden_sizes": (8, 8)} | args)
    agent = ActorCritic(obs, act, args)
    adam = SimpleNamespace(actor=FusedAdam(agent.actor.flat, 1e-8), critic=FusedAdam(agent.critics.flat, 1e-8))
    return agent, args, adam


def random_batch(rng, size=16, obs=3, act=2):
    """Transitions of random numbers."""
    fields = [rng.normal(size=(size, obs)), rng.uniform(-1, 1, (size, act)), rng.normal(size=size) * 3]
    fields = [torch.as_tensor(field, dtype=torch.float32) for field in [*fields, rng.normal(size=(size, obs))]]
    return Transitions(*fields, torch.as_tensor(rng.random(size) < 0.3))


@pytest.fixture(autouse=True)
def one_thread():
    """`train` sets the number of threads of this process: put it back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# -------------------------------------------------------------------------------------------- targets, by hand


def check_smoothed(smoothed):
    """mu'(s') = 0 and raw noise 0.8: clipped to 0.5. 0.9 + 0.3 leaves [-1, 1]: 1. -0.4 - 0.2 = -0.6 is within."""
    actions = smoothed(torch.tensor([0.0, 0.9, -0.4]), torch.tensor([0.8, 0.3, -0.2]), 0.5)
    close(actions, [0.5, 1.0, -0.6])


def check_targets(critic_targets):
    """r = 1, gamma = 0.9, Q'_1 = 2, Q'_2 = 3: y = 1 + 0.9 * 2 = 2.8, and 1 where the step terminates.

    The second row has the lower value in the other critic: -1 + 0.9 * 4 = 2.6.
    """
    rewards, values = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([[2.0, 2.0, 7.0], [3.0, 3.0, 4.0]])
    close(critic_targets(rewards, values, torch.tensor([False, True, False]), 0.9), [2.8, 1, 2.6])
    close(critic_targets(rewards[:1], values[1:, :1], torch.tensor([False]), 0.9), [3.7])  # a single critic: DDPG


def check_critic_loss(critic_loss):
    """y = (1, 3). Q_1 = (2, 5): (1 + 4) / 2 = 2.5. Q_2 = (1, 0): (0 + 9) / 2 = 4.5. Their sum is 7."""
    close(critic_loss(torch.tensor([[2.0, 5.0], [1.0, 0.0]]), torch.tensor([1.0, 3.0])), 7)


def check_polyak(polyak):
    """tau = 0.01 from 0 towards 1 is 0.01, then 0.01 + 0.01 * 0.99 = 0.0199. The source stays."""
    target, source = torch.zeros(2), torch.ones(2)
    polyak(target, source, 0.01)
    close(target, [0.01, 0.01])
    polyak(target, source, 0.01)
    close(target, [0.0199, 0.0199])
    close(source, [1, 1])


def caught(check, mistake):
    """Whether `check` refuses a faulty implementation."""
    with contextlib.suppress(AssertionError):
        check(mistake)
        return False
    return True


FAULTY = {
    "noise not clipped": (check_smoothed, lambda a, e, c: (a + e).clamp(-1, 1)),
    "action not clipped": (check_smoothed, lambda a, e, c: a + e.clamp(-c, c)),
    "clipped together": (check_smoothed, lambda a, e, c: (a + e).clamp(-c, c)),
    "maximum of the critics": (check_targets, lambda r, q, t, g: r + g * q.amax(0) * ~t),
    "mean of the critics": (check_targets, lambda r, q, t, g: r + g * q.mean(0) * ~t),
    "first critic only": (check_targets, lambda r, q, t, g: r + g * q[0] * ~t),
    "bootstraps after termination": (check_targets, lambda r, q, t, g: r + g * q.amin(0)),
    "bootstraps only after termination": (check_targets, lambda r, q, t, g: r + g * q.amin(0) * t),
    "loss averaged over critics": (check_critic_loss, lambda q, y: (q - y).square().mean()),
    "loss summed over the batch": (check_critic_loss, lambda q, y: (q - y).square().sum()),
    "absolute errors": (check_critic_loss, lambda q, y: (q - y).abs().mean(1).sum()),
    "tau the wrong way round": (check_polyak, lambda t, s, tau: t.copy_((1 - tau) * s + tau * t)),
    "source moves": (check_polyak, lambda t, s, tau: s.lerp_(t, tau)),
}


def test_targets_by_hand():
    """Fails if a formula differs from the paper's."""
    check_smoothed(ddpg_td3.smoothed)
    check_targets(ddpg_td3.critic_targets)
    check_critic_loss(ddpg_td3.critic_loss)
    check_polyak(ddpg_td3.polyak)


@pytest.mark.parametrize("name", FAULTY)
def test_known_mistakes_are_caught(name):
    """Fails if the numbers above could not tell a known mistake from the truth."""
    assert caught(*FAULTY[name])


# -------------------------------------------------------------------------------------------- an update, by hand


def linear_agent(**args):
    """mu(s) = tanh(w s + b), Q_k(s, a) = c_k s + d_k a + e_k, on one-dimensional states and actions."""
    one = spaces.Box(-1, 1, (1,))
    agent, args, adam = make_agent(one, one, hidden_sizes=(), **args)
    with torch.no_grad():
        agent.actor.flat.copy_(torch.tensor([0.5, 0.0]))  # w, b
        agent.target_actor.flat.copy_(torch.tensor([0.0, 0.0]))
        agent.critics.weights[0].copy_(torch.tensor([[[1.0], [2.0]], [[0.0], [-3.0]]]))  # (critic, c and d, 1)
        agent.critics.biases[0].zero_()
        agent.target_critics.weights[0].copy_(torch.tensor([[[2.0], [9.0]], [[1.0], [9.0]]]))
        agent.target_critics.biases[0].zero_()
    return agent, args, adam


def spy_gradients(monkeypatch):
    """The gradients that update_networks hands to Adam, in order."""
    gradients, flat_gradient = [], ddpg_td3.flat_gradient
    spied = lambda *given: gradients.append(flat_gradient(*given)) or gradients[-1]
    monkeypatch.setattr(ddpg_td3, "flat_gradient", spied)
    return gradients


def test_update_by_hand(monkeypatch):
    """s = 1, a = 0.5, r = 1, s' = 2, gamma = 0.5, no target noise, mu'(s') = 0.

    Q'_1 = 2 * 2 = 4, Q'_2 = 1 * 2 = 2: y = 1 + 0.5 * 2 = 2.
    Q_1 = 1 + 2 * 0.5 = 2, error 0: no gradient. Q_2 = -3 * 0.5 = -1.5, error -3.5: dL/dQ_2 = -7, so that
    dL/d(c, d, e)_2 = -7 (s, a, 1) = (-7, -3.5, -7), and Adam's first step is +lr on each of them.
    The actor: u = w s + b = 0.5, mu = tanh 0.5; J = Q_1(s, mu(s)) with d_1 = 2, which Adam has left alone (gradient 0).
    d(-J)/d(w, b) = -2 (1 - mu^2) (s, 1).
    """
    gradients = spy_gradients(monkeypatch)
    rates = dict(actor_learning_rate=0.1, critic_learning_rate=0.01)
    agent, args, adam = linear_agent(gamma=0.5, target_noise=0.0, policy_frequency=1, tau=0.25, **rates)
    row = [torch.tensor(x) for x in ([[1.0]], [[0.5]], [1.0], [[2.0]], [False])]
    rng = np.random.default_rng(0)
    figures = ddpg_td3.update_networks(agent, adam, Transitions(*row), 1, 1, args, rng)
    assert len(gradients) == 2
    close(gradients[0], [0, 0, -7, -3.5, 0, -7])  # (c, d) of both critics, then e of both
    slope = -2 * (1 - math.tanh(0.5) ** 2)
    close(gradients[1], [slope, slope])
    close(figures, [12.25, (2 - 1.5) / 2, -(1 + 2 * math.tanh(0.5))])
    close(agent.critics.flat, [1, 2, 0.01, -2.99, 0, 0.01])
    close(agent.actor.flat, [0.6, 0.1])
    close(agent.target_actor.flat, [0.15, 0.025])  # a quarter of the way
    close(agent.target_critics.flat, [1.75, 7.25, 0.7525, 6.0025, 0, 0.0025])

    # The same step, terminated: y = 1. Errors 1 and -2.5, dL/dQ = 2 and -5.
    gradients.clear()
    agent, args, adam = linear_agent(gamma=0.5, target_noise=0.0, policy_frequency=2, **rates)
    row[-1] = torch.tensor([True])
    figures = ddpg_td3.update_networks(agent, adam, Transitions(*row), 1, 0.5, args, rng)
    close(gradients[0], [2, 1, -5, -2.5, 2, -5])
    assert len(gradients) == 1 and figures[2].isnan()  # the actor's turn comes with the second update
    close(agent.critics.flat[:2], [0.995, 1.995])  # the learning rate is annealed to one half
    close(agent.target_critics.flat[:2], [2, 9])


def test_policy_delay_counts_critic_updates(monkeypatch):
    """Fails if 10 critic updates with a delay of 2 are not 5 of the actor and of the targets, whatever the steps."""
    gradients, moved = spy_gradients(monkeypatch), []
    monkeypatch.setattr(ddpg_td3, "polyak", lambda *_: moved.append(1))
    agent, args, adam = make_agent(policy_frequency=2)
    rng = np.random.default_rng(0)
    for n in range(1, 11):
        ddpg_td3.update_networks(agent, adam, random_batch(rng), n, 1, args, rng)
    sizes = [len(g) for g in gradients]
    assert sizes.count(len(agent.critics.flat)) == 10 and sizes.count(len(agent.actor.flat)) == 5
    assert len(moved) == 2 * 5


# ------------------------------------------------------------------------------------------ a slow, obvious twin


class Twin:
    """TD3 with plain nn.Linear networks, one after the other, torch.optim.Adam and deep copies: nothing clever."""

    def __init__(self, agent, args):
        self.args, self.stats = args, agent.obs_stats
        linears = [m for m in agent.actor if isinstance(m, nn.Linear)]
        self.actor = self.mlp([(m.weight, m.bias) for m in linears], nn.Tanh())
        self.critics = [
            self.mlp([(w[k].T, b[k, 0]) for w, b in zip(agent.critics.weights, agent.critics.biases)], nn.Identity())
            for k in range(len(agent.critics.weights[0]))
        ]
        self.target_actor, self.target_critics = copy.deepcopy((self.actor, self.critics))
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), args.actor_learning_rate)
        parameters = [p for critic in self.critics for p in critic.parameters()]
        self.critic_adam, self.parameters = torch.optim.Adam(parameters, args.critic_learning_rate), parameters

    def normal(self, obs):
        return ((obs - self.stats.mean) / (self.stats.var + 1e-8) ** 0.5).clip(-10, 10)

    @staticmethod
    def mlp(layers, last):
        modules = []
        for weight, bias in layers:
            linear = nn.Linear(weight.shape[1], weight.shape[0])
            linear.weight.data, linear.bias.data = weight.detach().clone(), bias.detach().clone()
            modules += [linear, nn.ReLU()]
        return nn.Sequential(*modules[:-1], last)

    def update(self, batch, number, anneal, rng):
        args = self.args
        if self.stats is not None:
            batch = batch._replace(obs=self.normal(batch.obs), next_obs=self.normal(batch.next_obs))
        self.actor_adam.param_groups[0]["lr"] = anneal * args.actor_learning_rate
        self.critic_adam.param_groups[0]["lr"] = anneal * args.critic_learning_rate
        with torch.no_grad():
            a = self.target_actor(batch.next_obs)
            if args.target_noise > 0:
                noise = torch.as_tensor(rng.standard_normal(a.shape, np.float32)) * args.target_noise
                a = torch.clamp(a + torch.clamp(noise, -args.noise_clip, args.noise_clip), -1, 1)
            x = torch.cat([batch.next_obs, a], 1)
            future = torch.stack([critic(x).squeeze(1) for critic in self.target_critics]).min(0).values
            y = torch.where(batch.terminated, batch.rewards, batch.rewards + args.gamma * future)
        x = torch.cat([batch.obs, batch.actions], 1)
        loss = sum(nn.functional.mse_loss(critic(x).squeeze(1), y) for critic in self.critics)
        self.critic_adam.zero_grad()
        loss.backward()
        if args.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, args.max_grad_norm)
        self.critic_adam.step()
        if number % args.policy_frequency == 0:
            loss = -self.critics[0](torch.cat([batch.obs, self.actor(batch.obs)], 1)).mean()
            self.actor_adam.zero_grad()
            loss.backward()
            if args.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.actor.parameters(), args.max_grad_norm)
            self.actor_adam.step()
            for target, source in zip([self.target_actor, *self.target_critics], [self.actor, *self.critics]):
                for slow, fast in zip(target.parameters(), source.parameters()):
                    slow.data = args.tau * fast.data + (1 - args.tau) * slow.data


def weights_of(linears):
    return torch.cat([p.detach().flatten() for linear in linears for p in (linear.weight, linear.bias)])


@settings(max_examples=12)
@given(
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.integers(1, 3),
    st.sampled_from([None, 0.3]),
    st.sampled_from([(), (5,), (8, 4)]),
    st.booleans(),
    st.sampled_from([1.0, 0.3]),
)
def test_six_updates_equal_those_of_the_twin(
    seed, twin_q, target_noise, policy_frequency, max_grad_norm, critic_sizes, normalize_obs, anneal
):
    """Fails if batching the critics, the flat Adam, the targets or the order of the updates changes the algorithm."""
    options = dict(twin_q=twin_q, target_noise=target_noise, policy_frequency=policy_frequency, tau=0.1)
    options |= dict(max_grad_norm=max_grad_norm, critic_hidden_sizes=critic_sizes, actor_learning_rate=1e-2)
    agent, args, adam = make_agent(seed=seed, normalize_obs=normalize_obs, **options)
    if normalize_obs:
        agent.obs_stats.update(np.random.default_rng(seed).normal(0.5, 3, (20, 3)))
    twin, rng, twin_rng = Twin(agent, args), np.random.default_rng(seed), np.random.default_rng(seed)
    for number in range(1, 7):
        batch = random_batch(np.random.default_rng(seed + number))
        ddpg_td3.update_networks(agent, adam, batch, number, anneal, args, rng)
        twin.update(batch, number, anneal, twin_rng)
    for actor, other in ((agent.actor, twin.actor), (agent.target_actor, twin.target_actor)):
        pairs = zip(actor.parameters(), other.parameters())
        assert all(torch.allclose(p, q, atol=2e-5) for p, q in pairs)
    for critics, others in ((agent.critics, twin.critics), (agent.target_critics, twin.target_critics)):
        for k, other in enumerate(others):
            linears = [m for m in other if isinstance(m, nn.Linear)]
            for weight, bias, linear in zip(critics.weights, critics.biases, linears):
                assert torch.allclose(weight[k].T, linear.weight, atol=2e-5)
                assert torch.allclose(bias[k, 0], linear.bias, atol=2e-5)


def test_no_gradient_is_computed_that_is_thrown_away():
    """Counts every multiplication and addition of matrix products: fails if any is wasted (or missing).

    O numbers in an observation, D in an action, layers H wide, K critics, B rows. A row takes A = OH + HH + HD products
    in the actor, C = (O + D)H + HH in a critic (whose last layer, a single column, is no matrix product here). The
    critics: A + KC for the targets, KC forward, KC for the weights and K HH for the inputs, but not those of layer one;
    actor: A + C forward, C backward through the inputs of one critic but not to its weights, A for the actor's weights,
    HH + HD for its inputs. That of the observations to the critic comes with that of the actions.
    """
    obs, D, H, B, K = 3, 2, 16, 32, 2
    A, C = obs * H + H * H + H * D, (obs + D) * H + H * H
    critics, actor = A + K * C + K * C + K * C + K * H * H, A + C + C + A + H * H + H * D
    agent, args, adam = make_agent(hidden_sizes=(H, H), policy_frequency=2)
    rng = np.random.default_rng(0)
    for number, products in ((1, critics), (2, critics + actor)):
        with FlopCounterMode(display=False) as counter:
            ddpg_td3.update_networks(agent, adam, random_batch(rng, B), number, 1, args, rng)
        assert counter.get_total_flops() == 2 * B * products


@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_fused_adam_has_the_numbers_of_adam(max_norm):
    """Fails if the kernel's Adam differs from the one that is written out, on which images on a GPU are trained."""
    flats = torch.ones(2, 50)
    optimizers, generator = (FusedAdam(flats[0], 1e-8), Adam(flats[1], 1e-8)), torch.Generator().manual_seed(0)
    for _ in range(20):
        gradient = torch.randn(50, generator=generator)
        for optimizer in optimizers:
            optimizer.step(gradient, 1e-2, max_norm)
    close(flats[0], flats[1])
    for name, value in optimizers[0].state_dict().items():
        close(value, optimizers[1].state_dict()[name])


def test_twin_critics_start_from_different_weights():
    """Fails if one critic is a copy of the other: trained on the same batches they would stay equal for ever."""
    agent, _, _ = make_agent()
    assert all((p[0] != p[1]).all() for p in agent.critics.parameters())
    assert len(make_agent(twin_q=False)[0].critics.weights[0]) == 1


def test_targets_start_as_copies_with_memory_of_their_own():
    """Fails if a target shares its memory with what it follows (it would not be slow), or starts elsewhere."""
    agent, _, _ = make_agent()
    for target, source in ((agent.target_actor, agent.actor), (agent.target_critics, agent.critics)):
        assert torch.equal(target.flat, source.flat)
        assert target.flat.data_ptr() != source.flat.data_ptr()
        source.flat += 1
        assert not torch.equal(target.flat, source.flat)
        first = next(source.parameters())
        assert torch.equal(first.flatten(), source.flat[: first.numel()])  # parameters are views of the vector


def test_first_critic_alone_has_the_values_of_the_first():
    """Fails if the actor follows another critic than Q_1."""
    agent, _, _ = make_agent()
    batch = random_batch(np.random.default_rng(0))
    close(
        agent.critics(batch.obs, batch.actions, count=1).detach(), agent.critics(batch.obs, batch.actions)[:1].detach()
    )


# ----------------------------------------------------------------------------------------------- acting, exploring


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_actions_are_scaled_to_the_bounds_of_each_dimension(dtype):
    """-1 -> low, 0 -> the middle, 1 -> high, also for unequal bounds; fails if an action leaves its space."""
    low, high = np.array([[-1, 0], [10, -0.1]], dtype), np.array([[1, 5], [30, 0.3]], dtype)
    space = spaces.Box(low, high, dtype=dtype)
    agent, _, _ = make_agent(act=space)
    actions = agent.to_env(np.array([[-1] * 4, [0] * 4, [1] * 4], np.float32))
    close(actions, [low, (low + high) / 2, high])
    assert actions.dtype == dtype and all(space.contains(action) for action in actions)
    obs = np.random.default_rng(0).normal(size=(50, 3)) * 100
    assert all(space.contains(action) for action in agent.act(obs))


def test_integer_actions_are_rounded():
    """Between -2 and 3, -0.84 is -1.6, 0.16 is 0.9 and 0.84 is 2.6: -2, 1, 3. Fails if they are cut towards 0."""
    agent, _, _ = make_agent(act=spaces.Box(-2, 3, (1,), np.int64))
    close(agent.to_env(np.array([[-1], [-0.84], [0.16], [0.84], [1]])), [[-2], [-2], [1], [3], [3]])


def test_numpy_policy_is_the_actor():
    """Fails if acting in NumPy and the actor's forward pass differ, also after the weights have changed."""
    agent, args, adam = make_agent(normalize_obs=True)
    rng = np.random.default_rng(0)
    agent.obs_stats.update(rng.normal(3, 2, (50, 3)))
    for number in range(1, 5):
        batch = random_batch(rng)
        ddpg_td3.update_networks(agent, adam, batch, number, 1, args, rng)
        close(agent.policy(batch.obs.numpy()), agent.actor(agent.observe(batch.obs)).detach(), 1e-5)


def explorer(**args):
    """(agent, run, args) for three environments past their uniform beginning, with mu = 0."""
    agent, args, _ = make_agent(**{"learning_starts": 10} | args)
    agent.actor.flat.zero_()
    rows = SimpleNamespace(step=10, obs=np.zeros((3, 3)), noise=np.zeros((3, 2)), reset_rows=np.zeros(3, bool))
    return agent, rows, args


def test_uniform_actions_until_learning_starts():
    """Fails if the first actions do not fill [-1, 1] evenly, or go on for a step too many."""
    agent, run, args = explorer(exploration_noise=0.0)
    rng = np.random.default_rng(0)
    run.step = 9
    drawn = np.concatenate([ddpg_td3.explore(agent, run, args, rng) for _ in range(500)])
    close(np.quantile(drawn, [0, 0.25, 0.5, 0.75, 1]), [-1, -0.5, 0, 0.5, 1], 0.06)
    run.step = 10
    close(ddpg_td3.explore(agent, run, args, rng), np.zeros((3, 2)))


def test_gaussian_noise():
    """Fails if the noise is not white, not of the given deviation, or not clipped at the bounds."""
    agent, run, args = explorer(exploration_noise=0.25)
    rng = np.random.default_rng(0)
    drawn = np.array([ddpg_td3.explore(agent, run, args, rng) for _ in range(2000)])
    close(drawn.std((0, 1)), [0.25, 0.25], 0.01)
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(drawn[:, 0, 0], drawn[:, 0, 1])[0, 1]) < 0.06  # dimensions and environments differ
    assert abs(np.corrcoef(drawn[:, 0, 0], drawn[:, 1, 0])[0, 1]) < 0.06
    agent, run, args = explorer(exploration_noise=5.0)
    assert np.abs(ddpg_td3.explore(agent, run, args, rng)).max() == 1


def test_ornstein_uhlenbeck_noise():
    """x <- (1 - theta) x + sigma N: without sigma, 0.8 fades to 0.6 with theta = 0.25, and a reset row makes it 0.

    Its deviation settles at sigma / sqrt(1 - (1 - theta)^2) = 0.1 / sqrt(1 - 0.75^2) = 0.1512, and its
    autocorrelation is 1 - theta. Fails if it is not carried on, or is carried over into the next episode.
    """
    agent, run, args = explorer(noise="ou", ou_theta=0.25, exploration_noise=0.0)
    rng = np.random.default_rng(0)
    run.noise[:], run.reset_rows[1] = 0.8, True
    close(ddpg_td3.explore(agent, run, args, rng), [[0.6, 0.6], [0, 0], [0.6, 0.6]])
    agent, run, args = explorer(noise="ou", ou_theta=0.25, exploration_noise=0.1)
    drawn = np.array([ddpg_td3.explore(agent, run, args, rng) for _ in range(4000)])
    close(drawn.std(), 0.1 / math.sqrt(1 - 0.75**2), 0.005)
    close(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1], 0.75, 0.02)


# --------------------------------------------------------------------------------------------------- replay buffer


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(4, 9), st.integers(0, 10**6))
def test_replay_buffer_equals_a_list_that_forgets(num_envs, capacity, seed):
    """Fails if a reset row is stored, the oldest is not the one that goes, or fields get out of step."""
    rng, stored = np.random.default_rng(seed), []
    buffer = ReplayBuffer(capacity, spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (1,)))
    for _ in range(12):
        row = [rng.random((num_envs, 2)), rng.random((num_envs, 1)), rng.random(num_envs)]
        ended, reset_rows = rng.random((2, num_envs)) < 0.4
        next_obs = rng.random((num_envs, 2))
        buffer.add(*row, ended, ~ended, reset_rows, next_obs)
        stored += [[x[n] for x in (*row, next_obs, ended)] for n in range(num_envs) if not reset_rows[n]]
        stored = stored[-capacity:]
        assert buffer.size == len(stored)
        if stored:
            held = sorted(zip(*(getattr(buffer, name)[: buffer.size].tolist() for name in Transitions._fields)))
            expected = sorted(tuple(np.float32(x).tolist() for x in entry) for entry in stored)
            assert held == expected
            batch = buffer.sample(len(stored), rng)
            assert [row in held for row in zip(*(field.tolist() for field in batch))] == [True] * len(stored)
    with pytest.raises(ValueError, match="cannot sample"):
        buffer.sample(buffer.size + 1, rng)


def test_what_is_stored_is_the_true_successor(tmp_path, monkeypatch):
    """Fails if after a truncation the first observation of the next episode is stored, or a truncation as an end."""
    kept = []
    monkeypatch.setattr(ddpg_td3, "update_networks", lambda *given: torch.zeros(3))
    add = ReplayBuffer.add
    monkeypatch.setattr(ReplayBuffer, "add", lambda self, *row: kept.append(self) or add(self, *row))
    small = QUICK | dict(env_id="Pendulum-v1", max_episode_steps=7, num_envs=2, total_timesteps=300, eval_episodes=1)
    train(Args(**small, run_dir=str(tmp_path / "run")))
    buffer = kept[-1]
    assert buffer.size == 300 and not buffer.terminated.any()
    cos, sin, speed = buffer.obs[:300].T  # Pendulum: angles move by speed * 0.05, which no reset does
    angles = [np.arctan2(o[:300, 1], o[:300, 0]) for o in (buffer.obs, buffer.next_obs)]
    moved = (angles[1] - angles[0] + np.pi) % (2 * np.pi) - np.pi
    close(moved, buffer.next_obs[:300, 2] * 0.05, 1e-4)


# ------------------------------------------------------------------------------------------------------- arguments


def test_algorithm_sets_three_flags_and_what_is_given_wins():
    """Fails if TD3 is not DDPG plus three settings, or if they cannot be mixed."""
    three = lambda **given: [getattr(Args(**given), name) for name in ("twin_q", "target_noise", "policy_frequency")]
    assert three() == three(algorithm="td3") == [True, 0.2, 2]
    assert three(algorithm="ddpg") == three(algorithm="ddpg", env_id="Pendulum-v1") == [False, 0.0, 1]
    lander = dict(env_id="LunarLanderContinuous-v3")  # tuned: DDPG with noise on the target's actions
    assert three(**lander) == three(**lander, algorithm="ddpg") == [False, 0.2, 1]
    assert three(**lander, algorithm="td3") == [True, 0.2, 2]
    assert three(**lander, policy_frequency=3) == [False, 0.2, 3]
    assert three(algorithm="ddpg", twin_q=True) == [True, 0.0, 1]
    assert three(target_noise=0.0) == [True, 0.0, 2]
    assert three(algorithm="ddpg", policy_frequency=2, target_noise=0.1) == [False, 0.1, 2]
    others = [dataclasses.asdict(Args(algorithm=name)) for name in ("td3", "ddpg")]
    differing = {name for name in others[0] if others[0][name] != others[1][name]}
    assert differing == {"algorithm", "twin_q", "target_noise", "policy_frequency"}


def test_algorithm_and_config(finished, main, tmp_path):
    """Fails if --algorithm beside --config keeps the three flags of the other one, or --config alone changes them."""
    config = finished / "config.json"
    assert (Args(config=str(config)).twin_q, Args(config=str(config)).algorithm) == (True, "td3")
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"args": {"algorithm": "ddpg", "target_noise": 0.1}}))
    args = Args(config=str(own))
    assert (args.algorithm, args.twin_q, args.target_noise, args.policy_frequency) == ("ddpg", False, 0.1, 1)
    assert Args(config=str(own), algorithm="ddpg").target_noise == 0.1  # what it is already: nothing to set
    mixed = Args(config=str(config), algorithm="ddpg", policy_frequency=3)
    assert (mixed.twin_q, mixed.target_noise, mixed.policy_frequency, mixed.batch_size) == (False, 0.0, 3, 16)
    assert main("--config", config, "--algorithm", "ddpg", "--run-dir", "ddpg", "--total-timesteps", 60) == 0
    args = json.loads((tmp_path / "ddpg/config.json").read_text())["args"]
    assert (args["twin_q"], args["policy_frequency"], args["batch_size"]) == (False, 1, 16)
    assert main("--config", tmp_path / "ddpg/config.json", "--run-dir", "again") == 0  # a mixture is kept as it was
    again = json.loads((tmp_path / "again/config.json").read_text())["args"]
    assert {name for name in args if args[name] != again[name]} == {"config", "run_dir"}


@pytest.mark.parametrize(
    ("num_envs", "train_frequency", "gradient_steps"), [(1, 1, 1), (3, 1, 1), (4, 2, 1), (3, 5, 2), (8, 3, 4)]
)
def test_updates_per_step_do_not_depend_on_the_number_of_environments(
    num_envs, train_frequency, gradient_steps, tmp_path, monkeypatch
):
    """Fails if N environments get one update per step of all instead of per step, or if reset rows count as steps."""
    monkeypatch.setattr(ddpg_td3, "update_networks", lambda *given: torch.zeros(3))
    options = dict(train_frequency=train_frequency, gradient_steps=gradient_steps, num_envs=num_envs, eval_episodes=1)
    args = Args(env_id="td3_envs:Push-v0", **QUICK | options, total_timesteps=500, run_dir=str(tmp_path / "run"))
    train(args)
    steps, updates = (column(tmp_path / "run", name) for name in ("step", "updates"))
    for step, count in zip(steps, updates):
        assert count == gradient_steps * (max(step, 100) // train_frequency - 100 // train_frequency)
    assert len(steps) > 50 and updates[-1] > 0


def test_first_update_and_annealing(tmp_path, monkeypatch):
    """Two environments, batches of 20, learning_starts 6: the first update comes once 20 transitions are there.

    Its rate is that of the round's first step: 20 of 40 were done, so 1 - 20/40 = 0.5. Fails if a batch is drawn from
    fewer transitions, or if the rate is that of a round's end, by which the last one would be zero.
    """
    rates = []
    spied = lambda agent, optimizers, batch, updates, anneal, *rest: rates.append(anneal) or torch.zeros(3)
    monkeypatch.setattr(ddpg_td3, "update_networks", spied)
    options = QUICK | dict(num_envs=2, batch_size=20, learning_starts=6, train_frequency=2, anneal_lr=True)
    train(Args(env_id="Pendulum-v1", **options, total_timesteps=40, eval_episodes=1, run_dir=str(tmp_path / "run")))
    close(rates, [1 - step / 40 for step in range(20, 40, 2)])


# --------------------------------------------------------------------------------- environments of known solution


@pytest.mark.parametrize("algorithm", ["td3", "ddpg"])
def test_policy_and_values_of_one_step_episodes(algorithm, tmp_path):
    """The right action is half the target, and then Q = 1. Fails if the actor does not follow the critic uphill."""
    args = Args(env_id="td3_envs:Aim-v0", algorithm=algorithm, **QUICK, total_timesteps=1500, exploration_noise=0.3)
    final = train(dataclasses.replace(args, run_dir=str(tmp_path / "run")))
    agent = load(tmp_path / "run", "last")
    close(agent.act(np.array([[-1.0], [1.0]])), [[-0.5], [0.5]], 0.12)
    assert final["eval_return_mean"] > 0.98
    values = agent.critics(torch.tensor([[1.0], [1.0]]), torch.tensor([[0.5], [-0.5]]))
    close(values.detach(), [[1.0, 0.0]] * len(values), 0.2)


@pytest.mark.parametrize(("end", "value"), [("terminated", 1.0), ("truncated", 2.0)])
def test_value_of_a_truncated_episode_goes_on(end, value, tmp_path):
    """Every step pays 1 at best; gamma = 0.5. Terminated, Q = 1. Truncated, the future is worth Q as well: 2."""
    kwargs = json.dumps({"end": end})
    args = Args(env_id="td3_envs:Aim-v0", env_kwargs=kwargs, **QUICK, total_timesteps=1800, exploration_noise=0.2)
    train(dataclasses.replace(args, run_dir=str(tmp_path / "run")))
    agent = load(tmp_path / "run", "last")
    obs = torch.tensor([[1.0], [-1.0]])
    close(agent.critics(obs, agent.actor(obs)).mean().detach(), value, 0.2)


def test_credit_for_an_earlier_action(tmp_path):
    """The first action (right: 0, in bounds of -1 and 3) is rewarded a step later. Fails if values do not go back."""
    args = Args(env_id="td3_envs:Later-v0", **QUICK | {"gamma": 0.9}, total_timesteps=2500, exploration_noise=0.2)
    assert train(dataclasses.replace(args, run_dir=str(tmp_path / "run")))["eval_return_mean"] > 0.97
    agent = load(tmp_path / "run", "last")
    close(agent.act(np.zeros((1, 2))), [[0.0]], 0.2)
    close(agent.critics(torch.zeros(1, 2), agent.actor(torch.zeros(1, 2)))[0].detach(), [0.9], 0.15)


OPTIONS = {
    "td3": {},
    "ddpg": {"algorithm": "ddpg"},
    "ddpg with a delay": {"algorithm": "ddpg", "policy_frequency": 2},
    "Ornstein-Uhlenbeck": {"noise": "ou"},
    "normalised observations": {"normalize_obs": True},
    "normalised rewards": {"normalize_reward": True},
    "short gradients": {"max_grad_norm": 0.01},
    "learning rates annealed": {"anneal_lr": True},
    "four environments": {"num_envs": 4},
    "every other step, twice": {"train_frequency": 2, "gradient_steps": 2},
    "critic's own sizes": {"critic_hidden_sizes": (48,)},
    "small buffer": {"buffer_size": 400},
    "bfloat16": {"bf16": True},
}
MATCH = QUICK | dict(env_id="run_envs:Match-v0", env_kwargs='{"actions": "box"}', exploration_noise=0.3)


@pytest.fixture(scope="module")
def default_metrics(tmp_path_factory):
    run = tmp_path_factory.mktemp("default") / "run"
    train(Args(**MATCH, total_timesteps=1000, run_dir=str(run)))
    return metrics(run)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_learns(option, tmp_path, default_metrics):
    """Match has float64 actions with unequal bounds: random actions get about 0.5, the best ones 1.

    Fails if an option keeps it from being learnt, or changes nothing at all.
    """
    final = train(Args(**MATCH | OPTIONS[option], total_timesteps=1000, run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] > 0.75
    assert (metrics(tmp_path / "run") == default_metrics) == (option == "td3")
    returns = [total for _, total in torch_file(tmp_path / "run/checkpoint.pt")["episodes"]]
    assert max(returns) <= 1 + 1e-6  # true returns are reported, also of normalised rewards


@pytest.mark.slow
@pytest.mark.parametrize("observation", ["channels_first", "channels_last"])
def test_images_learn(observation, tmp_path):
    """Fails if images do not reach the networks, channels are taken for rows, or a CNN gets no gradient."""
    kwargs = json.dumps({"actions": "box", "observation": observation})
    few = {"env_kwargs": kwargs, "actor_learning_rate": 3e-4, "critic_learning_rate": 1e-3, "hidden_sizes": (64,)}
    few |= {"batch_size": 32, "total_timesteps": 700, "seed": 4}  # with some seeds a tanh saturates at one of the cues
    final = train(Args(**MATCH | few, run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] > 0.75
    assert load(tmp_path / "run").image


def test_images_have_a_trunk_for_each_network():
    """Fails if actor and critics share a CNN (the actor's gradient would move the critics), or both critics do not."""
    agent, args, adam = make_agent(spaces.Box(0, 255, (36, 36, 3), np.uint8), hidden_sizes=(8,))
    pictures = torch.randint(0, 256, (2, 4, 36, 36, 3), dtype=torch.uint8)
    batch = Transitions(pictures[0], torch.zeros(4, 2), torch.ones(4), pictures[1], torch.zeros(4, dtype=torch.bool))
    before = [network.flat.clone() for network in (agent.actor, agent.critics)]
    rng = np.random.default_rng(0)
    ddpg_td3.update_networks(agent, adam, batch, 1, 1, args, rng)
    assert torch.equal(agent.actor.flat, before[0]) and not torch.equal(agent.critics.flat, before[1])
    assert agent.policy(pictures[0].numpy()).shape == (4, 2)
    observed = agent.observe(pictures[0])
    assert observed.shape == (4, 3, 36, 36) and 0.9 < observed.max() <= 1


def test_lasting_noise_finds_what_white_noise_does_not(tmp_path):
    """Push pays 3 for going one way for long; else, every action costs. Fails if --noise ou is no better than white."""
    found = {}
    for noise in ("ou", "gaussian"):
        args = QUICK | dict(env_id="td3_envs:Push-v0", noise=noise, exploration_noise=0.4, gamma=0.95, seed=1)
        final = train(Args(**args, total_timesteps=2000, run_dir=str(tmp_path / noise)))
        found[noise] = final["eval_return_mean"]
    assert found["ou"] > 1 and found["gaussian"] < 0.1


def test_reward_scaling_divides_by_the_deviation_of_the_discounted_return(monkeypatch):
    """Var G = 4: rewards of 3, 100, -100 are learnt from as 1.5, 10, -10. Fails if one is shifted or not cut."""
    seen, targets = [], ddpg_td3.critic_targets
    monkeypatch.setattr(ddpg_td3, "critic_targets", lambda r, *rest: seen.append(r) or targets(r, *rest))
    agent, args, adam = make_agent(normalize_reward=True)
    agent.return_stats.mean.fill_(7)
    agent.return_stats.var.fill_(4)
    batch = random_batch(np.random.default_rng(0), 3)._replace(rewards=torch.tensor([3.0, 100.0, -100.0]))
    ddpg_td3.update_networks(agent, adam, batch, 1, 1, args, np.random.default_rng(0))
    close(seen[0], [1.5, 10, -10])


def test_statistics_by_hand(monkeypatch):
    """Rewards 1, 2 and, in the next episode, 3 with gamma = 0.5: G = 1, 2.5, then 3, and the reset row has none.

    What is observed before steps 0, 1, 2, 3 is 0, 1, 2, 3, but in 2, the reset row, nothing is decided.
    """
    updates, observed, numbers = [], [], itertools.count(1)
    agent, args, _ = make_agent(normalize_reward=True, normalize_obs=True, gamma=0.5, learning_starts=100)
    monkeypatch.setattr(agent.obs_stats, "update", lambda rows: observed.extend(rows[:, 0].tolist()))
    monkeypatch.setattr(agent.return_stats, "update", lambda g: updates.extend(g.tolist()))
    ends = iter([False, True, False, False])
    rewards = iter([1.0, 2.0, 0.0, 3.0])
    outcome = lambda: (np.array([next(rewards)]), np.array([next(ends)]), np.zeros(1, bool), {})
    step = lambda actions: (np.full((1, 3), next(numbers)), *outcome())
    run = SimpleNamespace(step=0, obs=np.zeros((1, 3)), reset_rows=np.zeros(1, bool), returns=np.zeros(1))
    run.noise, run.discounted, run.episodes = np.zeros((1, 2)), np.zeros(1), []
    buffer = ReplayBuffer(10, OBS, ACT)
    for _ in range(4):
        ddpg_td3.play_one_step(agent, SimpleNamespace(step=step), buffer, run, args, np.random.default_rng(0))
    close(updates, [1, 2.5, 3])
    assert observed == [0, 1, 3]
    assert run.step == buffer.size == 3 and run.episodes == [(2, 3.0)]


# -------------------------------------------------------------------------------------------------------- whole runs


def shell(folder, *flags, code=0):
    """Run `python ddpg_td3.py flags…` in `folder`, expect the exit code, return the finished process."""
    done = subprocess.run(command(flags), cwd=folder, env=surroundings(), capture_output=True, text=True)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def command(flags):
    return [sys.executable, "ddpg_td3.py", *map(str, flags)]


def surroundings():
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy", "PYTHONPATH": path}


def metrics(run_dir):
    """The text of metrics.csv as rows of cells, header first, without the columns that hold times."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    kept = [i for i, name in enumerate(header) if name not in TIME_COLUMNS]
    return [[row[i] for i in kept] for row in [header, *rows]]


def column(run_dir, name):
    header, *rows = metrics(run_dir)
    return [float(row[header.index(name)]) for row in rows]


def torch_file(path):
    return torch.load(path, map_location="cpu", weights_only=True)


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
    """Two finished runs agree in everything but the time they took: figures, weights, generators, buffer, moments."""
    assert metrics(one) == metrics(other)
    files = [sorted(path.name for path in (run / "models").iterdir()) for run in (one, other)]
    assert files[0] == files[1]
    for name in files[0]:
        assert_equal(torch_file(one / "models" / name), torch_file(other / "models" / name), name)
    states = [torch_file(run / "checkpoint.pt") for run in (one, other)]
    for state in states:
        assert state.pop("seconds") > 0
    assert_equal(*states, "checkpoint.pt")


@pytest.fixture
def alone(tmp_path):
    """An empty folder with nothing but ddpg_td3.py in it."""
    (tmp_path / "ddpg_td3.py").write_bytes(SOURCE)
    return tmp_path


@pytest.fixture
def main(monkeypatch, tmp_path):
    """main(*flags): what `python ddpg_td3.py flags…` does in the empty folder tmp_path, in this process."""

    def call(*flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["ddpg_td3.py", *map(str, flags)])
        try:
            ddpg_td3.main()
        except SystemExit as stop:
            return stop.code or 0
        return 0

    return call


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a short finished run on Pendulum. Only to be read."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "ddpg_td3.py").write_bytes(SOURCE)
    flags = ["--total-timesteps", 500, "--max-episode-steps", 40, *TINY, "--run-dir", "run"]
    done = shell(folder, *flags)
    assert done.stderr == ""  # no warnings
    return folder / "run"


def test_copied_alone_it_leaves_a_complete_run_folder(alone):
    """Fails if ddpg_td3.py imports a sibling, or a part of the run folder is missing or wrong."""
    flags = "--total-timesteps 400 --hidden-sizes 8 --batch-size 16 --learning-starts 50 --eval-episodes 3".split()
    done = shell(alone, *flags, "--eval-every", 150)
    (run,) = (alone / "runs").iterdir()
    assert run.name.startswith("Pendulum-v1__ddpg_td3__1__")
    final = json.loads((run / "summary.json").read_text())
    assert final["global_step"] == 400 and final["eval_episodes"] == 3
    assert f"{final['eval_return_mean']:.1f} ±" in done.stdout.splitlines()[-2]
    header = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    losses = ["critic_loss", "value_mean", "actor_loss"]
    assert header == ["step", "seconds", "sps", "return_mean", "episodes", "updates", *losses]
    steps = column(run, "step")
    assert steps == sorted(set(steps)) and steps[-1] == 400 and column(run, "updates")[-1] == 350
    assert all(np.isfinite(column(run, name)[-1]) for name in losses)
    state = torch_file(run / "checkpoint.pt")
    assert [step for step, _, _ in state["evaluations"]] == [150, 300, 400]
    names = {path.name for path in (run / "models").iterdir()}
    assert names == {"best.pt", "150.pt", "300.pt", "400.pt"}
    for part in ("actor", "critics", "target_actor", "target_critics"):
        assert any(name.startswith(f"{part}.") for name in state["agent"]), part
    assert {"actor_optimizer", "critic_optimizer", "buffer"} <= set(state) and state["buffer"]["size"] == 400
    assert (run / "learning_curve.png").stat().st_size > 10_000


def test_evaluate(finished, main, capsys):
    """Fails if --evaluate plays other weights than the run's last evaluation did."""
    assert main("--evaluate", finished, "--model", "last") == 0
    final = json.loads((finished / "summary.json").read_text())
    assert f"{final['eval_return_mean']:.2f} ± {final['eval_return_std']:.2f}" in capsys.readouterr().out
    agent = load(finished)
    mean, std = evaluate(agent, agent.args, 3)
    assert mean < 0 < std


KILLED = {
    "td3": ["--normalize-obs", "--normalize-reward", "--num-envs", "2", "--noise", "ou", "--buffer-size", "200"],
    "ddpg": ["--algorithm", "ddpg", "--anneal-lr", "--max-grad-norm", "1", "--bf16"],
}


def kill_and_resume(folder, run, flags, kills, longest, seed):
    """Kill -9 a run `kills` times, each time at a random moment after its next checkpoint, and resume it each time."""
    rng, done, stamp = random.Random(seed), 0, None
    checkpoint, argv = folder / run / "checkpoint.pt", [*flags, "--run-dir", run]
    while True:
        pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        process = subprocess.Popen(command(argv), cwd=folder, env=surroundings(), **pipes)
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
    ("name", "kills", "steps"),
    [
        ("td3", 2, 1500),
        pytest.param("td3", 8, 8000, marks=pytest.mark.slow),
        pytest.param("ddpg", 6, 6000, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(name, kills, steps, alone):
    """Fails if a checkpoint lacks anything that the rest of the run depends on, or is ever found half written."""
    flags = [*KILLED[name], *TINY, "--max-episode-steps", 33, "--total-timesteps", steps, "--checkpoint-every", 100]
    shell(alone, *flags, "--run-dir", "unbroken")
    assert kill_and_resume(alone, "killed", flags, kills, 0.15, seed=kills) == kills
    assert_same_run(alone / "unbroken", alone / "killed")


def test_same_seed_same_run(finished, main, tmp_path):
    """Fails if anything random is not seeded, depends on the process's generators, or if the seed does nothing."""
    torch.manual_seed(123)
    np.random.seed(456)
    assert main("--config", finished / "config.json", "--run-dir", "again") == 0
    assert_same_run(finished, tmp_path / "again")
    assert main("--config", finished / "config.json", "--run-dir", "other", "--seed", 2) == 0
    assert metrics(finished) != metrics(tmp_path / "other")


def test_stop_at_return_waits_for_an_evaluation(tmp_path):
    """Fails if training episodes, which explore, decide; or if the run goes on after an evaluation that is enough."""
    options = dict(eval_every=200, eval_episodes=20, stop_at_return=0.9, total_timesteps=20_000)
    final = train(Args(**MATCH | options, run_dir=str(tmp_path / "run")))
    evaluations = torch_file(tmp_path / "run/checkpoint.pt")["evaluations"]
    assert [mean >= 0.9 for _, mean, _ in evaluations] == [False] * (len(evaluations) - 1) + [True]
    assert final["global_step"] == evaluations[-1][0] < 5000


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--env-id CartPole-v1", "dqn.py or ppo.py"),
        ("--env-id td3_envs:Unbounded-v0", "bounded"),
        ("--env-id Pendlum-v1", "Pendulum"),
        ("--env-id HalfCheetah-v9", "HalfCheetah"),
        ("--algorithm sac", "algorithm"),
        ("--noise pink", "noise"),
        ("--tau 1.5", "tau must lie between 0 and 1"),
        ("--ou-theta -1", "ou_theta"),
        ("--policy-frequency 0", "policy_frequency"),
        ("--gradient-steps 0", "gradient_steps"),
        ("--exploration-noise -0.1", "exploration_noise"),
        ("--max-grad-norm nan", "max_grad_norm"),
        ("--hidden-sizes 0", "hidden_sizes"),
        ("--buffer-size 10 --batch-size 11", "buffer_size = 10"),
        ("--buffer-size 100000000000000", "buffer_size"),
        ("--buffer-size 1000000000000000000", "buffer_size"),
        ("--batch-size many", "batch-size"),
        ("--resume nowhere", "nowhere/config.json"),
        ("--evaluate nowhere", "nowhere/config.json"),
        ("--config nowhere", "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, words, main, capfd, tmp_path):
    """Fails if bad input ends in a traceback, in another exit code, or in files."""
    code, err = main(*flags.split()), capfd.readouterr().err
    assert code == 2 and words in err and err.count("\n") == 1 and "Traceback" not in err, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--algorithm ddpg", "--batch-size 8", "--noise ou"])
def test_resume_refuses_another_algorithm(flag, finished, main, capfd):
    """Fails if a flag that changes the algorithm is taken, or ignored without a word, when a run is resumed."""
    assert main("--resume", finished, *flag.split()) == 2
    assert flag.split()[0][2:].replace("-", "_") in capfd.readouterr().err


def test_resume_goes_on_in_its_own_folder(finished, main, capfd, tmp_path):
    """Fails if a folder that is given beside --resume is ignored without a word."""
    for name in ("--run-dir", "--evaluate"):
        assert main("--resume", finished, name, finished) == 2
        assert "resume goes on in its own run folder" in capfd.readouterr().err


def test_episodes_that_restart_begin_without_noise(tmp_path, monkeypatch, capsys):
    """Fails if lasting noise of a lost episode goes on in the new one, where environments are not carried over."""
    given = dict(env_id="td3_envs:Push-v0", noise="ou", eval_episodes=1, run_dir=str(tmp_path / "run"))
    train(Args(**QUICK, **given, total_timesteps=203))
    assert torch_file(tmp_path / "run/checkpoint.pt")["noise"].any()
    seen, explore = [], ddpg_td3.explore
    spied = lambda agent, run, *rest: seen.append(run.noise.copy()) or explore(agent, run, *rest)
    monkeypatch.setattr(ddpg_td3, "explore", spied)
    train(Args(resume=str(tmp_path / "run"), total_timesteps=206))
    assert "episodes restart" in capsys.readouterr().out and not seen[0].any() and seen[1].any()


@pytest.mark.parametrize("field", ["observation", "reward"])
def test_nan_ends_the_run_with_a_line_that_says_where(field, main, capfd, tmp_path):
    """Fails if NaN is learnt from, or if the step or the field is not named."""
    kwargs = json.dumps({"field": field, "at": 123})
    flags = ["--env-id", "td3_envs:FaultyBox-v0", "--env-kwargs", kwargs, *TINY, "--run-dir", "run"]
    assert main(*flags, "--total-timesteps", 2000, "--checkpoint-every", 50) == 2
    err = capfd.readouterr().err
    assert f"step 123: {field}" in err and err.count("\n") == 1
    state = torch_file(tmp_path / "run/checkpoint.pt")
    assert state["step"] == 100 and all(torch.isfinite(weight).all() for weight in state["agent"].values())


def test_loss_that_is_not_finite_ends_the_run(main, capfd, tmp_path):
    """Fails if weights that have become NaN are saved or trained on."""
    flags = [*TINY, "--critic-learning-rate", "1e30", "--total-timesteps", 600, "--run-dir", "run"]
    assert main(*flags) == 2
    assert "loss" in capfd.readouterr().err
    assert all(torch.isfinite(weight).all() for weight in torch_file(tmp_path / "run/checkpoint.pt")["agent"].values())
