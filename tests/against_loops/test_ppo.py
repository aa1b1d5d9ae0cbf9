"""The functions of ppo.py against slow and obvious versions of them, on random input."""

import math
from itertools import product
from types import SimpleNamespace
from unittest import mock

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.probes.envs import Walk
from tests.tools import IN_ORDER, close, rehearse

THREE = spaces.Box(-np.inf, np.inf, (3,))  # an observation of three numbers
ACTION_SPACES = {  # space, actions as the agent has them, as the environment takes them
    "Discrete": (spaces.Discrete(3), [[0], [2]], [0, 2]),
    "Discrete from 5": (spaces.Discrete(3, start=5), [[0], [2]], [5, 7]),
    "MultiDiscrete": (spaces.MultiDiscrete([2, 3]), [[0, 2]], [[0, 2]]),
    "MultiDiscrete from": (
        spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 10], [0, -1]]),
        [[0, 2, 3, 1]],
        [[[1, 12], [3, 0]]],
    ),
    "MultiBinary": (spaces.MultiBinary(3), [[0, 1, 1]], [[0, 1, 1]]),
    "MultiBinary 2 x 2": (spaces.MultiBinary((2, 2)), [[0, 1, 1, 0]], [[[0, 1], [1, 0]]]),
    "Box": (  # clipped to the bounds
        spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32)),
        [[-3.0, 7.0], [0.5, 3.0], [3.0, -7.0]],
        [[-1, 5], [0.5, 3], [1, 0]],
    ),
    "Box 2 x 1, float64": (spaces.Box(-2, 2, (2, 1), np.float64), [[-3.0, 0.5]], [[[-2], [0.5]]]),
    "Box of integers": (  # and rounded
        spaces.Box(np.array([-3, 0]), np.array([3, 9]), dtype=np.int64),
        [[2.9, 2.4], [-2.9, 9.4], [-9.0, 99.0]],
        [[3, 2], [-3, 9], [-3, 9]],
    ),
}
every_action_space = pytest.mark.parametrize("name", ACTION_SPACES)
FRACTIONS = st.sampled_from([0, 0.25, 0.5, 0.75, 1])  # exact in binary, so that nothing has to be forgiven
CLIPS = st.sampled_from([0.5, 1.0, 2.5])


# --------------------------------------------------------------------------------------------------------- estimators


@st.composite
def rollouts(draw):
    """(rewards, values, next_values, terminated, truncated, log_ratios), each (T, N) float64 or bool.

    Next values are the values of the next row, except after an episode's end, where they are the final observation's.
    """
    shape = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    numbers = lambda shape: draw(hnp.arrays(np.int64, shape, elements=st.integers(-4, 4))).astype(float)
    terminated, truncated = (draw(hnp.arrays(bool, shape, elements=st.booleans())) for _ in range(2))
    rewards, values, log_ratios = numbers(shape), numbers((shape[0] + 1, shape[1])), numbers(shape) / 2
    next_values = np.where(terminated | truncated, numbers(shape), values[1:])
    return tuple(map(torch.as_tensor, (rewards, values[:-1], next_values, terminated, truncated, log_ratios)))


def episodes(terminated, truncated):
    """(first step, last step) of every episode, or part of one, in one environment's flags."""
    first = 0
    for t, ended in enumerate(zip(terminated, truncated)):
        if any(ended) or t == len(terminated) - 1:
            yield first, t
            first = t + 1


def bootstrap(next_values, terminated, t):
    """What is to come after step t, according to the critic."""
    return 0 if terminated[t] else next_values[t]


def slow_returns(rewards, values, next_values, terminated, truncated, _, gamma):
    """(R - V, R) of one environment: sum_k gamma^k r_{t+k} to the episode's end, plus the bootstrap there."""
    returns = []
    for first, last in episodes(terminated, truncated):
        for t in range(first, last + 1):
            rewarded = sum(gamma ** (k - t) * rewards[k] for k in range(t, last + 1))
            returns.append(rewarded + gamma ** (last + 1 - t) * bootstrap(next_values, terminated, last))
    return [r - v for r, v in zip(returns, values)], returns


def slow_gae(rewards, values, next_values, terminated, truncated, _, gamma, gae_lambda):
    """The definition (arXiv 1506.02438, eq. 16): n-step advantages, averaged with weights (1 - lambda) lambda^(n-1)."""
    advantages = []
    for first, last in episodes(terminated, truncated):
        for t in range(first, last + 1):
            average, length = 0, last + 1 - t
            for n in range(1, length + 1):
                n_step = sum(gamma**k * rewards[t + k] for k in range(n)) - values[t]
                n_step += gamma**n * bootstrap(next_values, terminated, t + n - 1)
                weight = gae_lambda ** (n - 1) * (1 - gae_lambda if n < length else 1)  # the longest takes the rest
                average += weight * n_step
            advantages.append(average)
    return advantages, [a + v for a, v in zip(advantages, values)]


def slow_vtrace(rewards, values, next_values, terminated, truncated, log_ratios, gamma, rho_clip, c_clip):
    """The definition (arXiv 1802.01561, eq. 1): v_s = V_s + sum_t gamma^(t-s) c_s … c_{t-1} rho_t delta_t."""
    targets, advantages = list(values), []
    rho, c = ([min(clip, math.exp(x)) for x in log_ratios] for clip in (rho_clip, c_clip))
    for first, last in episodes(terminated, truncated):
        for s in range(first, last + 1):
            for t in range(s, last + 1):
                delta = rewards[t] + gamma * bootstrap(next_values, terminated, t) - values[t]
                targets[s] += gamma ** (t - s) * math.prod(c[s:t]) * rho[t] * delta
        for s in range(first, last + 1):
            successor = targets[s + 1] if s < last else bootstrap(next_values, terminated, s)
            advantages.append(rho[s] * (rewards[s] + gamma * successor - values[s]))
    return advantages, targets


def for_each_env(slow, rollout, *more):
    """(advantages, returns), each a tensor (T, N), by a function of one environment's lists."""
    results = [slow(*[x[:, n].tolist() for x in rollout], *more) for n in range(rollout[0].shape[1])]
    return [torch.tensor(lists).T for lists in zip(*results)]


@pytest.mark.shared("compute_returns")
@settings(max_examples=50)
@given(rollout=rollouts(), gamma=FRACTIONS)
def test_returns(script, rollout, gamma):
    """Fails if the recursion is not the sum it stands for, for any pattern of ends."""
    rewards, _, next_values, terminated, truncated, _ = rollout
    actual = script.compute_returns(rewards, next_values, terminated, truncated, gamma)
    close(actual, for_each_env(slow_returns, rollout, gamma)[1])


@pytest.mark.shared("compute_gae")
@settings(max_examples=50)
@given(rollout=rollouts(), gamma=FRACTIONS, gae_lambda=FRACTIONS)
def test_gae(script, rollout, gamma, gae_lambda):
    """Fails if the recursion is not the weighted average of n-step advantages, for any pattern of ends."""
    advantages, returns = script.compute_gae(*rollout[:5], gamma, gae_lambda)
    expected = for_each_env(slow_gae, rollout, gamma, gae_lambda)
    close(advantages, expected[0])
    close(returns, expected[1])


@pytest.mark.shared("compute_vtrace")
@settings(max_examples=50)
@given(rollout=rollouts(), gamma=FRACTIONS, rho_clip=CLIPS, c_clip=CLIPS)
def test_vtrace(script, rollout, gamma, rho_clip, c_clip):
    """Fails if the recursion is not the sum over products of ratios, for any pattern of ends."""
    advantages, targets = script.compute_vtrace(*rollout, gamma, rho_clip, c_clip)
    expected = for_each_env(slow_vtrace, rollout, gamma, rho_clip, c_clip)
    close(advantages, expected[0])
    close(targets, expected[1])


# ------------------------------------------------------------------------------------------------ losses and optimiser


@pytest.mark.shared("Adam")
@pytest.mark.parametrize("scale", [1e-4, 0.1, 10.0])
def test_adam(script, scale):
    """Fails if a moment, a bias correction, eps or the state is not torch's; 200 steps, with a rate that falls.

    Half-way ours is saved and goes on with other parameters, which have the values of the first, and no gradients.
    """
    rng = np.random.default_rng(0)
    numbers = lambda *shape: torch.tensor(scale * rng.standard_normal(shape), dtype=torch.float32)
    theirs = [torch.nn.Parameter(numbers(4, 3)), torch.nn.Parameter(numbers(3))]
    ours = [torch.nn.Parameter(p.detach().clone()) for p in theirs]
    optimizers = [torch.optim.Adam(theirs, eps=1e-5), script.Adam(ours, eps=1e-5)]
    for step in range(200):
        if step == 100:
            state = optimizers[1].state_dict()
            ours = [torch.nn.Parameter(p.detach().clone()) for p in ours]
            optimizers[1] = script.Adam(ours, eps=1e-5)
            optimizers[1].load_state_dict(state)
        gradients = [numbers(*p.shape) for p in theirs]
        for parameters, optimizer in zip((theirs, ours), optimizers):
            optimizer.zero_grad()
            sum((p * g).sum() for p, g in zip(parameters, gradients)).backward()
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 200)
            optimizer.step()
        for p, q in zip(theirs, ours):
            close(p, q, atol=1e-6)


def make_agent(script, name="Discrete", observation_space=THREE, spread=0.0, **args):
    """An Agent; `spread` is added at random to its weights, for at first its policy is nearly uniform."""
    torch.manual_seed(0)
    agent = script.Agent(observation_space, ACTION_SPACES[name][0], script.Args(**args))
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += spread * torch.randn(parameter.shape)
    return agent


def torch_distributions(agent, obs):
    """One of torch's distributions for each column of the actions."""
    output = agent.actor(agent.features(obs))
    if agent.continuous:
        return [torch.distributions.Normal(mean, std) for mean, std in zip(output.T, agent.log_std.exp())]
    space = agent.action_space
    if isinstance(space, spaces.MultiBinary):
        sizes = [2] * math.prod(space.shape)
    else:
        sizes = space.nvec.ravel().tolist() if isinstance(space, spaces.MultiDiscrete) else [int(space.n)]
    return [torch.distributions.Categorical(logits=part) for part in output.split(sizes, 1)]


def textbook_loss(agent, batch, args):
    """(loss, figures) of PPO written with torch's distributions."""
    pi = torch_distributions(agent, batch.obs)
    log_ratios = sum(d.log_prob(a) for d, a in zip(pi, batch.actions.T)) - batch.old_log_probs
    ratios = log_ratios.exp()
    advantages, values = batch.advantages, agent.critic(agent.features(batch.obs)).squeeze(1)
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    near = torch.where(advantages > 0, ratios.clamp(max=1 + args.clip_coef), ratios.clamp(min=1 - args.clip_coef))
    errors = (values - batch.returns) ** 2
    if args.clip_vloss:
        moved = (values - batch.old_values).clamp(-args.clip_vloss_coef, args.clip_vloss_coef)
        errors = torch.maximum(errors, (batch.old_values + moved - batch.returns) ** 2)
    figures = {
        "policy_loss": -(near * advantages).mean(),
        "value_loss": errors.mean() / 2,
        "entropy": sum(d.entropy() for d in pi).mean(),
        "approx_kl": (ratios - 1 - log_ratios).mean(),
        "clip_fraction": ((ratios > 1 + args.clip_coef) | (ratios < 1 - args.clip_coef)).float().mean(),
    }
    entropy, value = args.ent_coef * figures["entropy"], args.vf_coef * figures["value_loss"]
    loss = figures["policy_loss"] - entropy + value
    return loss, {"loss": loss} | figures


# ---------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.shared("RunningMeanStd")
def test_running_mean_std_keeps_small_steps(script):
    """100,000 rows of N(1000, 1) and as many of N(1001, 1): mean 1000.50, variance 1.25; the last 2,000 come singly.

    Fails if the state or a sum is rounded to float32, or if the variance is E[x^2] - E[x]^2 in float32.
    """
    rows = np.random.default_rng(0).standard_normal((200_000, 1)) + np.repeat([1000, 1001], 100_000)[:, None]
    stats = script.RunningMeanStd(1)
    for part in np.split(rows, [100_000, *range(198_000, 200_000)]):
        stats.update(part)
    assert abs(stats.mean.item() - rows.mean()) < 1e-8 and abs(stats.var.item() - rows.var()) < 1e-8
    assert abs(stats.mean.item() - 1000.5) < 0.005 and abs(stats.var.item() - 1.25) < 0.005


def test_scaled_rewards_are_clipped(script):
    """Fails if a reward leaves ±10: here G is 3 in both environments, or -3, and so its deviation is 0."""
    for sign in (1, -1):
        buffer = script.RolloutBuffer(1, 2, THREE, spaces.Discrete(3))
        buffer.rewards[:] = 3 * sign
        buffer.scale_rewards(script.RunningMeanStd(), 0.5)
        close(buffer.rewards, [[10 * sign, 10 * sign]])


# -------------------------------------------------------------------------------------------------------------- acting


def with_output(agent, numbers):
    """The agent, whose actor now gives these numbers for every observation."""
    agent.actor[-1].weight.data.zero_()
    agent.actor[-1].bias.data = torch.tensor(numbers)
    return agent


@pytest.mark.parametrize(
    "name, factors",
    [
        ("Discrete", [[0.1, 0.2, 0.7]]),
        ("MultiDiscrete", [[0.25, 0.75], [0.5, 0.3, 0.2]]),
        ("MultiBinary", [[0.9, 0.1], [0.4, 0.6], [0.5, 0.5]]),
    ],
)
def test_actions_are_drawn_with_their_probabilities(script, name, factors):
    """Fails if the Gumbel noise is not Gumbel's, or shared between factors. 20,000 draws; Pearson's statistic exceeds
    30 once in 10,000 seeds (7 degrees of freedom), and would be in the thousands for uniform actions.
    """
    agent = with_output(make_agent(script, name), [math.log(p) for factor in factors for p in factor])
    actions = agent.sample(np.zeros((20_000, 3), np.float32), np.random.default_rng(0))
    expected = 20_000 * np.array([math.prod(ps) for ps in product(*factors)])
    index = np.ravel_multi_index(actions.T, [len(factor) for factor in factors])
    counts = np.bincount(index, minlength=len(expected))
    assert np.sum((counts - expected) ** 2 / expected) < 30


def test_gaussian_actions_have_their_mean_and_deviation(script):
    """Fails if log_std is not the logarithm of the deviation. 20,000 draws: 5 standard errors of room."""
    agent = with_output(make_agent(script, "Box"), [3.0, -1.0])
    agent.log_std.data = torch.tensor([0.5, 2.0]).log()
    actions = agent.sample(np.zeros((20_000, 3), np.float32), np.random.default_rng(0))
    assert actions.dtype == np.float32
    assert np.all(np.abs(actions.mean(0) - [3, -1]) < 5 * np.array([0.5, 2]) / 20_000**0.5)
    assert np.all(np.abs(actions.std(0) / [0.5, 2] - 1) < 5 / 40_000**0.5)
    assert abs(np.corrcoef(actions.T)[0, 1]) < 5 / 20_000**0.5
    within = np.mean(np.abs(actions[:, 0] - 3) < 0.5)  # one deviation: 68.27 % of a normal variable
    assert abs(within - 0.6827) < 5 * (0.6827 * 0.3173 / 20_000) ** 0.5


@every_action_space
def test_actions_as_the_environment_takes_them(script, name):
    """Fails if an offset, a bound, the rounding, the shape or the type is not the space's own, in a batch or alone."""
    space, actions, expected = ACTION_SPACES[name]
    agent = make_agent(script, name)
    taken = agent.to_env(np.array(actions, np.float32 if agent.continuous else np.int64))
    assert taken.dtype == space.dtype and taken.tolist() == expected
    assert all(space.contains(action) for action in taken)
    obs = np.zeros((1, 3), np.float32)
    assert agent.act(obs).shape == (1, *space.shape) and space.contains(agent.act(obs)[0])
    actions = agent.sample(obs, np.random.default_rng(0))
    assert [x.shape for x in agent(torch.as_tensor(obs), torch.as_tensor(actions))] == [(1,)] * 3


@pytest.mark.parametrize(
    "name, output, mode",
    [
        ("Discrete from 5", [0.1, 0.3, 0.2], [6]),
        ("MultiDiscrete", [0.1, 0.3, -1.0, -2.0, -0.5], [[1, 2]]),
        ("MultiBinary", [0.1, 0.3, 0.3, 0.1, -1.0, 1.0], [[1, 0, 1]]),
        ("Box", [0.25, 9.0], [[0.25, 5]]),
    ],
)
def test_deterministic_actions_are_the_mode(script, name, output, mode):
    """Fails if act() draws, or picks anything but the likeliest action (the mean, clipped, of a Gaussian)."""
    agent = with_output(make_agent(script, name), output)
    assert all(agent.act(np.ones((1, 3), np.float32)).tolist() == mode for _ in range(20))


@pytest.mark.parametrize("name", ["Discrete", "MultiBinary", "Box"])
def test_acting_in_numpy_equals_torch(script, name):
    """Fails if acting sees other weights or statistics than learning does: at first, after an optimiser's step, after
    new statistics, after load_state_dict (which has to bring the statistics as well), and after a change in place.
    """
    make = lambda spread: make_agent(script, name, spread=spread, normalize_obs=True, hidden_sizes=(16, 8))
    agent, other, rng = make(0.0), make(0.1), np.random.default_rng(0)
    obs = 3 + 2 * rng.standard_normal((5, 3)).astype(np.float32)
    other.obs_stats.update(2 * obs)
    optimizer = script.Adam(agent.parameters(), lr=0.1)
    seen = []

    def same():
        seen.append(agent.policy_output(obs))
        close(seen[-1], agent.actor(agent.features(torch.as_tensor(obs))), atol=1e-6)
        assert all(np.abs(seen[-1] - earlier).max() > 1e-6 for earlier in seen[:-1]), "it has not seen the change"

    same()
    (sum(p.sum() for p in agent.parameters())).backward()
    optimizer.step()
    same()
    agent.obs_stats.update(obs)
    same()
    agent.load_state_dict(other.state_dict())
    same()
    assert np.array_equal(seen[-1], other.policy_output(obs))
    agent.actor[-1].bias.data += 1
    same()


def test_acting_in_numpy_is_for_few_rows_and_small_layers(script):
    """Fails if NumPy's threads are made to fight over large matrices, or if a small network does not act in NumPy."""
    for inputs, rows, in_torch in ((3, 32, False), (3, 33, True), (128, 1, False), (129, 1, True), (1029, 1, True)):
        agent, calls = make_agent(script, observation_space=spaces.Box(-1, 1, (inputs,))), []
        agent.actor.register_forward_hook(lambda *_: calls.append(1))
        agent.policy_output(np.zeros((rows, inputs), np.float32))
        assert bool(calls) == in_torch, (inputs, rows)
    with mock.patch("torch.set_num_threads") as set_num_threads, mock.patch("os.cpu_count", return_value=7):
        script.choose_device(script.Args())
        script.choose_device(script.Args(device="cpu"), image=True)
    assert [call.args for call in set_num_threads.call_args_list] == [(1,), (7,)]


@pytest.mark.parametrize("critic_hidden_sizes, expected", [(None, (8, 5)), ((7,), (7,)), ((), ())])
def test_networks_and_their_initial_weights(script, critic_hidden_sizes, expected):
    """Fails if a size goes to the wrong network, a layer is not orthogonal with its gain (sqrt 2 inside, 0.01 for the
    actor's output, 1 for the critic's), a bias is not 0, or weights depend on anything but the seed.
    """
    agent = make_agent(script, hidden_sizes=(8, 5), critic_hidden_sizes=critic_hidden_sizes)
    for network, sizes, last_gain in ((agent.actor, (3, 8, 5, 3), 0.01), (agent.critic, (3, *expected, 1), 1)):
        linears = [module for module in network if isinstance(module, torch.nn.Linear)]
        assert [tuple(m.weight.shape) for m in linears] == list(zip(sizes[1:], sizes))
        for m, gain in zip(linears, [2**0.5] * (len(linears) - 1) + [last_gain]):
            w = m.weight.detach() if m.out_features <= m.in_features else m.weight.detach().T  # the shorter side
            close(w @ w.T / gain**2, np.eye(len(w)))
            assert not m.bias.any()
    envs = SimpleNamespace(single_observation_space=THREE, single_action_space=spaces.Discrete(3))
    one, same, other = (script.make_agent(script.Args(seed=seed), envs).actor[0].weight for seed in (1, 1, 2))
    assert one.equal(same) and not one.equal(other)


def test_what_actor_and_critic_see(script):
    """Statistics: mean 2, variance 4; observation 6 is seen as (6 - 2) / 2 = 2 by both. Fails if one sees it raw, or if
    images with channels first and last are not the same image to the same network, or are not scaled by 255.
    """
    agent, plain = make_agent(script, normalize_obs=True), make_agent(script)
    agent.obs_stats.update(np.array([[0.0] * 3, [4.0] * 3]))
    obs, seen, actions = torch.full((1, 3), 6.0), torch.full((1, 3), 2.0), torch.zeros(1, 1, dtype=torch.int64)
    for one, two in zip(agent(obs, actions), plain(seen, actions)):
        close(one, two)
    close(agent.value(obs), plain.value(seen))
    first, last = (
        make_agent(script, observation_space=spaces.Box(0, 255, shape, np.uint8))
        for shape in ((2, 36, 40), (36, 40, 2))
    )
    image = np.random.default_rng(0).integers(0, 256, (3, 2, 36, 40), np.uint8)
    outputs = first.policy_output(image)
    close(outputs, last.policy_output(np.moveaxis(image, 1, 3)), atol=1e-6)
    hidden = first.cnn.linear(first.cnn.convolutions(torch.as_tensor(image) / 255)).relu()
    close(outputs, first.actor(hidden))
    close(first.value(torch.as_tensor(image)), first.critic(hidden).squeeze(1))


# -------------------------------------------------------------------------------------------------------------- buffer


@settings(max_examples=50)
@given(
    reset_rows=hnp.arrays(bool, st.tuples(st.integers(1, 8), st.integers(1, 3)), elements=st.booleans()),
    num_minibatches=st.integers(1, 9),
)
def test_minibatches(script, reset_rows, num_minibatches):
    """Every row but the reset rows once, all fields of a batch of the same rows, parts as equal as can be, none empty.

    Row t of environment n holds 10 n + t, and a fraction per field. Fails if a row is lost, comes twice or is mixed.
    """
    buffer = script.RolloutBuffer(*reset_rows.shape, spaces.Box(-1, 1, (1,)), spaces.Discrete(3))
    where = 10 * np.arange(reset_rows.shape[1]) + np.arange(len(reset_rows))[:, None]
    buffer.obs[:-1, :, 0], buffer.actions[:, :, 0], buffer.reset_rows[:] = where, where, reset_rows
    names = script.Batch._fields[2:]  # all but obs and actions
    for i, name in enumerate(names, 1):
        setattr(buffer, name, torch.as_tensor(where, dtype=torch.float32) + i / 8)
    for rng in (np.random.default_rng(0), IN_ORDER):
        batches = list(buffer.minibatches(num_minibatches, rng))
        for batch in batches:
            place = batch.obs[:, 0]
            assert batch.actions[:, 0].equal(place.long())
            assert all(getattr(batch, name).equal(place + i / 8) for i, name in enumerate(names, 1))
        sizes = [len(batch.obs) for batch in batches]
        rows = [row for batch in batches for row in batch.obs[:, 0].tolist()]
        assert sorted(rows) == sorted(where[~reset_rows].tolist())
        assert len(sizes) == min(num_minibatches, (~reset_rows).sum())
        assert not sizes or max(sizes) - min(sizes) <= 1
    assert rows == where[~reset_rows].tolist()  # in order, they are time-major


def test_minibatches_are_shuffled_by_the_given_generator(script):
    """Fails if the order is fixed, or comes from anywhere but the generator."""
    buffer = script.RolloutBuffer(50, 2, spaces.Box(-1, 1, (1,)), spaces.Discrete(3))
    buffer.obs[:-1, :, 0] = np.arange(100).reshape(50, 2)
    for name in script.Batch._fields[2:]:
        setattr(buffer, name, torch.zeros(50, 2))
    draw = lambda seed: next(buffer.minibatches(1, np.random.default_rng(seed))).obs[:, 0].tolist()
    assert draw(0) == draw(0) != draw(1)


# ----------------------------------------------------------------------------------------------------- whole trainings

# Rows of the first environment: 2 steps (terminated), reset, 3 steps (truncated); of the second: 1 step (both), reset,
# 4 steps (truncated). So that a rollout of 6 steps has 10 rows to learn from, and the next one begins with reset rows.
PLANS = [[(2, "terminated"), (3, "truncated")], [(1, "both"), (4, "truncated")]]
SHORT = {"num_envs": 2, "num_steps": 6, "num_minibatches": 2, "update_epochs": 3, "gamma": 0.5, "hidden_sizes": (16,)}
SHORT |= {"clip_coef": 0.15, "clip_vloss_coef": 0.3, "ent_coef": 0.03, "vf_coef": 0.7, "learning_rate": 1e-2}
SHORT |= {"total_timesteps": 15}  # two rollouts


def walk(script, name="Discrete", **args):
    """A Run in two environments that walk according to PLANS."""
    makers = [lambda i=i: Walk(PLANS[i], i, ACTION_SPACES[name][0]) for i in range(2)]
    return rehearse(script, *makers, watch=True, **SHORT | args)


def textbook_training(script, run):
    """The agent after the same training done the slow way. On the way, every logged figure is compared."""
    args, agent, figures = run.args, run.calls[0].agent, run.figures
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    vtrace = slow_vtrace, args.rho_clip, args.c_clip
    slow = {"vanilla": (slow_returns,), "gae": (slow_gae, args.gae_lambda), "vtrace": vtrace}[args.estimator]
    seen, totals, total = [], [], np.zeros(2)  # observations, and discounted returns, so far
    for i, call in enumerate(run.calls):
        number, k = divmod(i, args.update_epochs * args.num_minibatches)  # of the rollout, of the step in its update
        if k == 0:
            obs, actions = torch.tensor(call.buffer.obs), torch.tensor(call.buffer.actions)
            terminated, truncated = torch.tensor(call.buffer.terminated), torch.tensor(call.buffer.truncated)
            played = ~call.buffer.reset_rows
            place = {tuple(obs[t, n].tolist()): (t, n) for t, n in zip(*np.nonzero(played))}
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 - len(seen) / 15 if args.anneal_lr else 1)
            close(figures["learning_rate"][number], optimizer.param_groups[0]["lr"])
            if args.normalize_obs and seen:
                agent.obs_stats.mean[:] = torch.tensor(np.mean(seen, 0))
                agent.obs_stats.var[:] = torch.tensor(np.var(seen, 0))
            seen += obs[:-1][played].double().tolist()
            rewards = (10 * obs[:-1, :, 1] + obs[:-1, :, 2] + 1) * torch.tensor(played)  # as Walk gives them
            if args.clip_reward:
                rewards = rewards.sign()
            if args.normalize_reward:
                for t in range(6):
                    total = total * 0.5 + rewards[t].numpy()
                    totals += total[played[t]].tolist()
                    total = total * ~(terminated | truncated)[t].numpy()
                rewards = rewards / np.std(totals)
        if k == 0 or (args.estimator == "vtrace" and k % args.num_minibatches == 0):
            pi = torch_distributions(agent, obs[:-1].flatten(0, 1))
            log_probs = sum(d.log_prob(a) for d, a in zip(pi, actions.flatten(0, 1).T)).detach().view(6, 2)
            values = agent.critic(agent.features(obs.flatten(0, 1))).detach().view(7, 2)
            if k == 0:
                mu_log_probs = log_probs
            rollout = rewards, values[:-1], values[1:], terminated, truncated, log_probs - mu_log_probs
            advantages, returns = for_each_env(*slow[:1], rollout, args.gamma, *slow[1:])
        if k == 0:
            errors, targets = (returns - values[:-1])[played].numpy(), returns[played].numpy()
            close(figures["explained_variance"][number], 1 - errors.var() / targets.var())
        assert set(map(tuple, call.batch.obs.tolist())) <= set(place), "a reset row is trained on"
        rows = tuple(np.transpose([place[tuple(o)] for o in call.batch.obs.tolist()]))
        fields = obs[:-1], actions, log_probs, values[:-1], advantages, returns
        loss, expected = textbook_loss(agent, script.Batch(*[field[rows] for field in fields]), args)
        for name, figure in expected.items():
            close(figures[name][i], figure, atol=1e-4)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
    return agent, len(seen)


TRAININGS = {
    "gae": ("Discrete", {"gae_lambda": 0.8}),
    "gae, clipped values": ("MultiBinary", {"norm_adv": False, "clip_vloss": True}),
    "gae, normalised": ("MultiDiscrete", {"anneal_lr": False, "normalize_obs": True, "normalize_reward": True}),
    "gae, signs": ("Box", {"max_grad_norm": 1e9, "clip_reward": True}),
    "vanilla": ("MultiDiscrete from", {"estimator": "vanilla"}),
    "vtrace": ("Discrete from 5", {"estimator": "vtrace", "rho_clip": 1.1, "c_clip": 0.9, "clip_vloss": True}),
    "vtrace, normalised": ("Box of integers", {"estimator": "vtrace", "rho_clip": 0.9, "normalize_obs": True}),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_training(script, name):
    """Fails if two rollouts, of three epochs each, with ends and reset rows, move the weights elsewhere than torch's
    Adam does along the gradient of the textbook's loss, with advantages by the loops above; or if a figure is off.

    V-trace: rho and c against the policy that played; in the batches what policy and critic say before each epoch.
    """
    run = walk(script, TRAININGS[name][0], **TRAININGS[name][1])
    flat = lambda agent: torch.cat([p.detach().flatten() for p in agent.parameters()])
    start = flat(run.calls[0].agent)
    agent, steps = textbook_training(script, run)
    assert len(run.calls) == 12 and run.step == steps and set(run.figures) == set(script.FIGURES)
    close(flat(run.agent), flat(agent), atol=1e-4)
    assert (flat(agent) - start).abs().max() > 0.05  # the tolerance is far below what was learnt


@pytest.mark.parametrize("target_kl, gradient_steps", [(None, 12), (1e-12, 4), (1e9, 12)])
def test_target_kl(script, target_kl, gradient_steps):
    """Fails if the limit is not looked at after each epoch, or ends more than the update. Two rollouts, two
    minibatches; the KL is 0 before the first step of an update, and more after it.
    """
    assert len(walk(script, target_kl=target_kl).calls) == gradient_steps


def test_a_rollout_of_nothing_but_reset_rows(script):
    """Fails if a rollout in which all environments only reset gives NaN: one environment, one step, episodes of one."""
    settings = {"num_envs": 1, "num_steps": 1, "num_minibatches": 1, "norm_adv": False}
    settings |= {"normalize_obs": True, "normalize_reward": True}
    run = rehearse(script, lambda: Walk([(1, "terminated")]), **SHORT | settings)
    assert run.step == 15 and len(run.figures["explained_variance"]) == 29
    assert all(np.isfinite(values).all() for values in run.figures.values())
    assert all(parameter.isfinite().all() for parameter in run.agent.parameters())
