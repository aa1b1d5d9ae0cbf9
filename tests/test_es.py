"""The numbers of es.py, held against arithmetic done by hand, against slow and obvious loops on random input, and
against environments whose right answer is known; then whole runs, in one process and in several.

The `check_…` functions take the implementation they judge, so that the tests can hand them faulty ones: each known
mistake has to be caught, or else the check is worth nothing. The environments made for this file stand in es_envs.py.
"""

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

import es_envs  # noqa: F401  (registers its environments)
import gymnasium as gym
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from earlier_runs import assert_one_line, assert_same_run, column, metrics, summary, surroundings, torch_file
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import es
from es import Args, evaluate, load, train

SOURCE = Path(es.__file__).read_bytes()
FLOATS = st.floats(-100, 100, width=32)
SMALL = dict(population_size=8, hidden_sizes=(4,), eval_episodes=2, eval_every=10**9, progress=False)


def close(actual, expected, atol=1e-6):
    """AssertionError unless all numbers agree; shapes as well."""
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=1e-5)
    assert np.shape(actual) == np.shape(expected)


def theta(*numbers):
    """What `move_theta` needs of a policy: its parameters."""
    return SimpleNamespace(flat=torch.tensor(numbers, dtype=torch.float32))


def agent_for(env_id="CartPole-v1", **given):
    """(Args, an untrained policy) for an environment."""
    plain = {"normalize_obs": False, "action_noise": 0.0, "episodes_per_candidate": 1}  # whatever is tuned
    args = Args(env_id=env_id, **plain | given)
    envs = es.make_envs(args, 1)
    return args, es.make_agent(args, envs)


def randomize(agent, seed=0):
    """Give the last layer, which begins with zeros, something to say."""
    agent.flat.copy_(torch.randn(len(agent.flat), generator=torch.Generator().manual_seed(seed)))


def caught(check, faulty):
    """Whether a check notices a faulty implementation."""
    try:
        check(faulty)
    except (AssertionError, ValueError):
        return True
    return False


# ------------------------------------------------------------------------------------------------ numbers by hand


def check_step(learn):
    """theta = 0, sigma 0.5, one pair: +eps = 1 returns 1, -eps = -1 returns 3. Mean 2, deviation 1: fitnesses -1, 1.
    sum F eps = -1 x 1 + 1 x (-1) = -2; alpha / (N sigma) = 0.1 / (2 x 0.5) = 0.1: theta becomes -0.2."""
    args = Args(fitness="standardized", optimizer="ascent", learning_rate=0.1, sigma=0.5)
    policy = theta(0)
    learn(policy, None, np.array([1.0, 3.0]), np.ones((1, 1), np.float32), args)
    close(policy.flat, [-0.2])
    learn(policy, None, np.array([3.0, 3.0]), np.ones((1, 1), np.float32), args)  # equal: nothing to learn
    close(policy.flat, [-0.2])
    learn(policy, None, np.array([40.0, 20.0]), np.ones((1, 1), np.float32), args)  # mean 30, deviation 10: 1, -1
    close(policy.flat, [0.0])


def test_step_by_hand():
    check_step(es.move_theta)


def learn_with(shape=es.shape_fitness, gradient=es.es_gradient):
    """A version of `move_theta` in which a part is another."""

    def learn(policy, optimizer, returns, noise, args):
        if returns.std() > 1e-6:
            step = gradient(shape(returns, args.fitness, args.elite), noise, args.sigma)
            policy.flat += args.learning_rate * torch.from_numpy(step)

    return learn


@pytest.mark.parametrize(
    "faulty",
    [
        learn_with(shape=lambda returns, *_: returns),  # not standardised
        learn_with(shape=lambda returns, *_: (returns - returns.mean()) / returns.std(ddof=1)),  # sample deviation
        learn_with(gradient=lambda F, eps, sigma: F[::2] @ eps / len(F) / sigma),  # without the mirror image
        learn_with(gradient=lambda F, eps, sigma: -es.es_gradient(F, eps, sigma)),  # descends
        learn_with(gradient=lambda F, eps, sigma: es.es_gradient(F, eps, 1)),  # sigma forgotten
        learn_with(gradient=lambda F, eps, sigma: es.es_gradient(F, eps, sigma) * len(F)),  # a sum, not a mean
        learn_with(gradient=lambda F, eps, sigma: es.es_gradient(F, eps, sigma) * 2),  # divided by the pairs
    ],
)
def test_faulty_steps_are_caught(faulty):
    assert caught(check_step, faulty)


def test_step_without_shaping_by_hand():
    """The formula with raw returns: sum = 1 x 1 + 3 x (-1) = -2, over N sigma = 1. (Not the step above.)"""
    close(es.es_gradient(np.array([1.0, 3.0]), np.ones((1, 1)), 0.5), [-2.0])


def test_gradient_of_two_pairs_by_hand():
    """Fitnesses 4, 1 for ±(1, 0) and 0, 2 for ±(1, 3): (3 (1, 0) - 2 (1, 3)) / (4 x 0.5) = (1, -6) / 2."""
    noise = np.array([[1.0, 0.0], [1.0, 3.0]])
    close(es.es_gradient(np.array([4.0, 1.0, 0.0, 2.0]), noise, 0.5), [0.5, -3.0])


@pytest.mark.parametrize(
    ("returns", "ranks"),
    [
        ([10, 30, 20, 40], [-1 / 2, 1 / 6, -1 / 6, 1 / 2]),  # ranks 0, 2, 1, 3 of 3, minus 1/2
        ([5, 5, 1, 9], [0, 0, -1 / 2, 1 / 2]),  # the fives share ranks 1 and 2: 1.5 / 3 - 1/2 = 0
        ([7, 7, 7, 0], [1 / 6, 1 / 6, 1 / 6, -1 / 2]),  # ranks 1, 2 and 3: 2 / 3 - 1/2
        ([500, 500], [0, 0]),
    ],
)
def test_centered_ranks_by_hand(returns, ranks):
    """Fails, in the lines with ties, for ranks by order: there the second of a pair would always win."""
    close(es.centered_ranks(np.array(returns, float)), ranks)


def test_ranks_by_order_are_caught():
    by_order = np.argsort(np.argsort([5, 5, 1, 9], kind="stable")) / 3 - 0.5
    assert not np.allclose(by_order, [0, 0, -1 / 2, 1 / 2])


def test_fitness_by_hand():
    """Standardised 1, 3, 3, 5: mean 3, variance (4 + 4) / 4 = 2. An elite of half counts from the third best."""
    returns = np.array([1.0, 3.0, 2.0, 6.0])
    close(es.shape_fitness(np.array([1.0, 3.0, 3.0, 5.0]), "standardized"), np.array([-2, 0, 0, 2]) / math.sqrt(2))
    close(es.shape_fitness(returns, "raw"), returns)
    close(es.shape_fitness(returns, "raw", elite=0.5), [0, 1, 0, 4])  # 3 - 2 and 6 - 2
    close(es.shape_fitness(returns, "raw", elite=0.3), [0, 1, 0, 4])  # 1.2 of 4: two
    close(es.shape_fitness(returns, "centered-rank", elite=0.25), [0, 0, 0, 1 / 3])  # 1/2 - 1/6
    close(es.shape_fitness(-returns, "raw", elite=0.25), [1, 0, 0, 0])  # -1 - (-2): never away from the best


def check_ars(gradient):
    """Pairs (4, 0), (1, 2), (0, 3), (-20, 2.5): their better returns are 4, 2, 3, 2.5: the best two are the first and
    the third. The returns used, 4, 0, 0, 3: mean 1.75, variance (2.25² + 2 x 1.75² + 1.25²) / 4 = 12.75 / 4 = 3.1875.
    (4 (1, 0) - 3 (1, 1)) / (2 x sqrt(3.1875)) = (1, -3) / 3.570714."""
    returns = np.array([4.0, 0, 1, 2, 0, 3, -20, 2.5])
    noise = np.array([[1.0, 0], [0, 1], [1, 1], [2, 0]])
    close(gradient(returns, noise, 2), [0.280056, -0.840168])
    # all four: 4 (1, 0) - (0, 1) - 3 (1, 1) - 22.5 (2, 0) = (-44, -4); mean -7.5 / 8, variance 436.25 / 8 - 0.9375²
    # = 53.652344; 4 x sqrt(53.652344) = 29.299104
    close(gradient(returns, noise, None), [-1.501753, -0.136523])


def test_ars_by_hand():
    check_ars(es.ars_gradient)


def faulty_ars(best=lambda pairs: pairs.max(1), std=lambda pairs, top: pairs[top].std(), divisor=lambda b: b):
    def gradient(returns, noise, top_directions):
        pairs = returns.reshape(-1, 2)
        top = np.argsort(-best(pairs), kind="stable")[:top_directions]
        return (pairs[top] @ [1, -1]) @ noise[top] / divisor(len(top)) / std(pairs, top)

    return gradient


def test_faulty_ars_is_caught():
    check_ars(faulty_ars())
    assert caught(check_ars, faulty_ars(best=lambda pairs: pairs.mean(1)))  # top directions by their mean
    assert caught(check_ars, faulty_ars(best=lambda pairs: np.abs(pairs[:, 0] - pairs[:, 1])))
    assert caught(check_ars, faulty_ars(std=lambda pairs, top: pairs.std()))  # deviation of all returns
    assert caught(check_ars, faulty_ars(std=lambda pairs, top: pairs[top].std(ddof=1)))
    assert caught(check_ars, faulty_ars(divisor=lambda b: 2 * b))


def test_weight_decay_and_adam_by_hand():
    """Ascent: gradient (1, -6)/2 as above, minus 0.5 theta: (0.5 - 0.5, -3 - 1), times 0.1. Adam's first step is the
    learning rate times the sign: 0.1 (0, -1), and 0 where the gradient is 0."""
    returns, noise = np.array([4.0, 1.0, 0.0, 2.0]), np.array([[1.0, 0.0], [1.0, 3.0]], np.float32)
    args = dict(fitness="raw", sigma=0.5, learning_rate=0.1, weight_decay=0.5)
    policy = theta(1, 2)
    figures = es.move_theta(policy, None, returns, noise, Args(optimizer="ascent", **args))
    close(policy.flat, [1, 2 - 0.4])
    assert figures["gradient_norm"] == pytest.approx(math.hypot(0.5, 3))
    assert figures["update_norm"] == pytest.approx(0.4) and figures["weight_norm"] == pytest.approx(math.hypot(1, 1.6))
    policy = theta(1, 2)
    es.move_theta(policy, es.Adam(policy.flat), returns, noise, Args(optimizer="adam", **args))
    close(policy.flat, [1, 1.9], atol=1e-5)


def test_equal_returns_change_nothing():
    """Fails if weight decay or Adam's momentum move theta, or if Adam counts a step, where nothing can be learnt."""
    policy, args = theta(1, 2), Args(weight_decay=0.1)
    optimizer, noise = es.Adam(policy.flat), np.ones((2, 2), np.float32)
    es.move_theta(policy, optimizer, np.array([1.0, 2, 3, 4]), noise, args)
    before = policy.flat.clone(), {name: value.clone() for name, value in optimizer.state.items()}
    figures = es.move_theta(policy, optimizer, np.full(4, 3.3), noise, args)
    assert torch.equal(policy.flat, before[0]) and figures["update_norm"] == figures["gradient_norm"] == 0
    assert all(torch.equal(optimizer.state[name], value) for name, value in before[1].items())


# --------------------------------------------------------------------------------------------- gradient estimates


A, CENTRE = np.array([[2.0, 0.5, 0], [0.5, 1.0, -0.3], [0, -0.3, 3.0]]), np.array([1.0, -2.0, 0.5])


def quadratic(points):
    """-1/2 (x - c)' A (x - c); its gradient is -A (x - c)."""
    return -0.5 * np.einsum("ni,ij,nj->n", points - CENTRE, A, points - CENTRE)


def check_quadratic(gradient):
    """Directions sqrt(3) e_k have sum eps eps' / 3 = 1, so that the estimate is exact; random ones come near it."""
    point, sigma = np.array([0.3, 0.7, -1.0]), 0.4
    expected = -A @ (point - CENTRE)
    for noise, atol in ((math.sqrt(3) * np.eye(3), 1e-9), (np.random.default_rng(0).normal(size=(200_000, 3)), 0.1)):
        returns = quadratic(es.make_candidates(point, noise, sigma))
        np.testing.assert_allclose(gradient(returns, noise, sigma), expected, atol=atol)


def test_gradient_of_a_quadratic():
    """The estimate is the analytic gradient -A (theta - c), about (-0.05, -2.9, 5.3)."""
    check_quadratic(es.es_gradient)


def test_faulty_gradients_are_caught():
    pairs = lambda F: F.reshape(-1, 2)
    assert caught(check_quadratic, lambda F, eps, sigma: pairs(F)[:, 0] @ eps / len(eps) / sigma / 2)  # one of a pair
    assert caught(check_quadratic, lambda F, eps, sigma: (pairs(F) @ [1, 1]) @ eps / len(F) / sigma)  # signs forgotten
    assert caught(check_quadratic, lambda F, eps, sigma: es.es_gradient(F, eps, sigma) / sigma)
    swapped = lambda F, eps, sigma: es.es_gradient(F.reshape(2, -1).T.ravel(), eps, sigma)  # halves instead of pairs
    assert caught(check_quadratic, swapped)


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=FLOATS),
    st.integers(0, 99),
    st.floats(0.01, 2),
)
def test_gradient_twin(noise, seed, sigma):
    """Against the paper's sum, candidate by candidate."""
    fitnesses = np.random.default_rng(seed).normal(size=2 * len(noise))
    total = np.zeros(noise.shape[1])
    for i, fitness in enumerate(fitnesses):
        total += fitness * (noise[i // 2] if i % 2 == 0 else -noise[i // 2].astype(float))
    close(es.es_gradient(fitnesses, noise, sigma), total / (len(fitnesses) * sigma), atol=1e-3)


@given(hnp.arrays(np.float64, st.integers(2, 12), elements=st.integers(-3, 3).map(float)))
def test_ranks_twin(returns):
    """The rank of a return is the number of smaller ones plus half the number of equal others."""
    ranks = [np.sum(returns < x) + (np.sum(returns == x) - 1) / 2 for x in returns]
    close(es.centered_ranks(returns), np.array(ranks) / (len(returns) - 1) - 0.5)
    assert abs(es.centered_ranks(returns).sum()) < 1e-9


@given(st.integers(1, 8), st.floats(-1e3, 1e3), st.sampled_from(["centered-rank", "raw"]))
def test_antithetic_pairs_cancel_on_a_constant_function(pairs, constant, fitness):
    """Fails for noise without its mirror image: raw returns of a constant function would move theta at random."""
    noise = np.random.default_rng(pairs).normal(size=(pairs, 4))
    fitnesses = es.shape_fitness(np.full(2 * pairs, constant), fitness)
    close(es.es_gradient(fitnesses, noise, 0.1), np.zeros(4))


def test_candidates_are_mirrored():
    candidates = es.make_candidates(np.array([1.0, 2.0]), np.array([[1.0, 0.0], [2.0, -1.0]]), 0.5)
    close(candidates, [[1.5, 2], [0.5, 2], [2, 1.5], [0, 2.5]])


# --------------------------------------------------------------------------------------------------- noise, seeds


def test_noise_comes_from_its_seeds():
    """Fails if the noise of a direction depends on the others, on the process's generators, or on the call before."""
    seeds = np.array([5, 2**32 - 1, 5, 0], np.uint32)
    noise = es.draw_noise(seeds, 1000)
    torch.manual_seed(3)
    assert (es.draw_noise(seeds[1:2], 1000)[0] == noise[1]).all() and (noise[0] == noise[2]).all()
    assert noise.shape == (4, 1000) and noise.dtype == np.float32
    assert np.abs(noise.mean(1)).max() < 0.15 and np.abs(noise.std(1) - 1).max() < 0.1
    assert abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.15


def test_seeds_differ():
    """Fails if generations, seeds, episodes or pairs share noise or first states."""
    args = Args(population_size=20, episodes_per_candidate=3)
    both = [es.draw_seeds(dataclasses.replace(args, seed=s), g) for s in (1, 2) for g in range(50)]
    assert both[0][0].shape == (10,) and both[0][1].shape == (3, 10)
    everything = np.concatenate([np.concatenate([noise, episodes.ravel()]) for noise, episodes in both])
    assert len(np.unique(everything)) == len(everything) == 2 * 50 * 40


# ------------------------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize("hidden_sizes", [(), (5,), (7, 3)])
def test_forward_twin(hidden_sizes):
    """Against torch: candidate i's parameters, put into the network, act on observation i."""
    _, agent = agent_for("Acrobot-v1", hidden_sizes=hidden_sizes)
    rng = np.random.default_rng(0)
    candidates = rng.normal(size=(6, len(agent.flat))).astype(np.float32)
    obs = rng.normal(size=(6, 6)).astype(np.float32)
    batched = es.forward(agent.layers(candidates), obs)
    assert batched.shape == (6, 3) and batched.dtype == np.float32
    for candidate, x, output in zip(candidates, obs, batched):
        agent.flat.copy_(torch.from_numpy(candidate))
        expected = agent.network(torch.from_numpy(x)).numpy()
        close(output, expected, atol=1e-5)
        close(es.forward(agent.layers(agent.flat.numpy()), x[None])[0], expected, atol=1e-5)  # one policy


def test_flat_parameters_are_those_of_the_network():
    """Fails if theta is a copy: what is learnt would not be saved, what is loaded would not act."""
    _, agent = agent_for()
    agent.flat.fill_(0.25)
    assert all((p == 0.25).all() for p in agent.parameters())
    agent.load_state_dict({name: torch.full_like(value, 0.5) for name, value in agent.state_dict().items()})
    assert (agent.flat == 0.5).all()


def test_actions_arrive_as_the_space_says():
    """Fails if a Discrete action is not the shifted argmax, or a Box action not squashed into uneven bounds."""
    _, agent = agent_for()
    agent.action_space = spaces.Discrete(3, start=5)
    assert agent.to_env(np.array([[0, 2, 1], [3, 2, 1.0]])).tolist() == [6, 5]
    agent.action_space = spaces.Box(np.array([[-1], [0]], np.float32), np.array([[1], [4]], np.float32))
    actions = agent.to_env(np.array([[0, 0], [99, -99], [0.5, 0.5]], np.float32))
    close(actions[:, :, 0], [[0, 2], [1, 0], [math.tanh(0.5), 2 + 2 * math.tanh(0.5)]])
    assert actions.dtype == np.float32 and all(agent.action_space.contains(a) for a in actions)
    agent.action_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    actions = agent.to_env(np.array([[1.5, -300]], np.float32))
    close(actions, [[1.5, -300]])
    assert actions.dtype == np.float64
    agent.action_space = spaces.Box(np.array([0, -np.inf]), np.array([np.inf, 1]), dtype=np.float64)
    close(agent.to_env(np.array([[-2, 3], [5, -6]], np.float32)), [[0, 1], [5, -6]])


@given(st.lists(hnp.arrays(np.float64, (5, 3), elements=st.floats(-50, 50)), min_size=1, max_size=4))
def test_observation_statistics_twin(parts):
    """Sums of parts give the mean and the deviation of all rows, and observations are normalised by them."""
    stats = es.ObservationStats(3)
    close(np.array(stats.mean_and_std()), [[0] * 3, [1] * 3])
    for part in parts:
        stats.sums += torch.from_numpy(np.array([np.full(3, len(part)), part.sum(0), np.square(part).sum(0)]))
    rows = np.concatenate(parts)
    mean, std = stats.mean_and_std()
    np.testing.assert_allclose(mean, rows.mean(0), atol=1e-4)
    np.testing.assert_allclose(std, np.maximum(rows.std(0), 1e-4), atol=1e-3)


def test_features_are_normalised_and_clipped():
    _, agent = agent_for("Pendulum-v1", normalize_obs=True)
    agent.obs_stats.sums.copy_(torch.tensor([[4.0] * 3, [8.0, 0, 4], [52.0, 4, 4]]))  # means 2, 0, 1; variances 9, 1, 0
    obs = np.array([[5.0, -0.5, 1], [200, -200, 1.5]])
    close(agent.features(obs, agent.scale()), [[1, -0.5, 0], [10, -10, 10]])


# -------------------------------------------------------------------------------------- playing a whole population


def play_one_by_one(agent, candidates, args, seeds):
    """(returns, steps) by the obvious loop: each candidate by itself, torch's network, one plain environment."""
    returns, steps = [], []
    for i, candidate in enumerate(candidates):
        agent.flat.copy_(torch.from_numpy(candidate))
        kwargs = {} if args.max_episode_steps is None else {"max_episode_steps": args.max_episode_steps}
        env = gym.make(args.env_id, **json.loads(args.env_kwargs), **kwargs)
        obs, _ = env.reset(seed=int(seeds[i // 2]))
        total, count, over = 0.0, 0, False
        while not over:
            x = torch.as_tensor(agent.features(obs[None], agent.scale()))
            action = agent.to_env(agent.network(x).numpy())[0]
            obs, reward, terminated, truncated, _ = env.step(action)
            total, count, over = total + reward, count + 1, terminated or truncated
        returns.append(total)
        steps.append(count)
    return np.array(returns), np.array(steps)


PLAYED = {
    "Acrobot": dict(env_id="Acrobot-v1", max_episode_steps=120),
    "Pendulum, normalised": dict(env_id="Pendulum-v1", normalize_obs=True, max_episode_steps=30),
    "LunarLander": dict(env_id="LunarLander-v3", max_episode_steps=150),
    "Patience": dict(env_id="es_envs:Patience-v0"),
}


@pytest.mark.parametrize("name", PLAYED)
def test_batched_evaluation_equals_one_by_one(name):
    """Fails if a candidate acts on another's observation, if rewards after its end count, if steps are miscounted, if a
    pair does not start alike, or if an environment is left over from the episode before."""
    args, agent = agent_for(**PLAYED[name], population_size=8, hidden_sizes=(8,))
    if agent.obs_stats:
        agent.obs_stats.sums.copy_(torch.tensor([[5.0] * 3, [1.0, 2, 3], [6.0, 9, 40]]))
    slots = es.make_slots(args)
    for generation in (0, 1):
        randomize(agent, generation)
        noise = es.draw_noise(np.arange(4), len(agent.flat))
        candidates = es.make_candidates(agent.flat.numpy(), noise, 0.5)
        seeds = es.draw_seeds(args, generation)[1][0]
        returns, steps, _ = es.play_candidates(agent, candidates, slots.envs, es.begin_episode(slots, seeds), args, 0)
        expected = play_one_by_one(agent, candidates, args, seeds)
        np.testing.assert_allclose(returns, expected[0], rtol=1e-3)  # torch and NumPy differ in the last bit
        assert (steps == expected[1]).all()
        assert name != "Patience" or len(set(steps)) > 1


def test_native_cartpole_equals_one_by_one():
    """The same for the native vector environment, whose first states come from one generator."""
    args, agent = agent_for(population_size=32, hidden_sizes=(), max_episode_steps=60)
    slots = es.make_slots(args)
    randomize(agent)
    candidates = es.make_candidates(agent.flat.numpy(), es.draw_noise(np.arange(16), len(agent.flat)), 2.0)
    obs = es.begin_episode(slots, np.arange(16))
    first = slots.envs.unwrapped.state.copy()
    returns, steps, _ = es.play_candidates(agent, candidates, slots.envs, obs, args, 0)
    assert steps.min() + 10 < steps.max()  # some slots have begun another episode, which must not count
    for i, candidate in enumerate(candidates):
        env = gym.make("CartPole-v1", max_episode_steps=60)
        env.reset()
        env.unwrapped.state, over, count = first[:, i].copy(), False, 0
        x = env.unwrapped.state.astype(np.float32)
        while not over:
            outputs = es.forward(agent.layers(candidate), x[None])
            x, _, terminated, truncated, _ = env.step(int(agent.to_env(outputs)[0]))
            over, count = terminated or truncated, count + 1
        assert (returns[i], steps[i]) == (count, count)


def test_statistics_hold_every_observation_acted_upon_once():
    """Fails if observations of finished candidates, or final ones, enter the statistics, or the first ones do not."""
    log = []
    kwargs = dict(env_id="es_envs:Patience-v0", population_size=6, hidden_sizes=(), normalize_obs=True)
    args, agent = agent_for(**kwargs)
    slots = es.make_slots(args)
    randomize(agent, 1)
    candidates = es.make_candidates(agent.flat.numpy(), es.draw_noise(np.arange(3), len(agent.flat)), 2.0)
    returns, steps, sums = es.play_candidates(
        agent, candidates, slots.envs, es.begin_episode(slots, np.arange(3)), args, 0
    )
    rows = []
    for i, count in enumerate(steps):
        start = gym.make(args.env_id).reset(seed=i // 2)[0][0]
        rows += [[start, t] for t in range(count)]
    assert len(set(steps)) > 1 and not log
    close(sums, [[len(rows)] * 2, np.sum(rows, 0), np.square(rows).sum(0)])


def test_finished_slots_stand_still():
    """Fails if a finished environment is stepped or reset before all others have finished too."""
    args, agent = agent_for("es_envs:Patience-v0", population_size=4, hidden_sizes=())
    slots = es.make_slots(args)
    envs = [env.unwrapped for env in slots.envs.unwrapped.envs]
    candidates = np.zeros((4, len(agent.flat)), np.float32)
    candidates[1:, -1] = 1  # the last bias: wait; candidate 0 leaves at once (both outputs are 0)
    for seeds in ([3, 4], [5, 6]):
        for env in envs:
            env.log.clear()
        returns, steps, _ = es.play_candidates(agent, candidates, slots.envs, es.begin_episode(slots, seeds), args, 0)
        assert returns.tolist() == [0, 6, 6, 6] and steps.tolist() == [1, 6, 6, 6]
        assert envs[0].log == [("reset", seeds[0]), ("step", 0)]
        assert envs[3].log == [("reset", seeds[1])] + [("step", 1)] * 6


def test_pairs_start_alike():
    args, _ = agent_for("Pendulum-v1", population_size=6)
    slots = es.make_slots(args)
    seeds = es.draw_seeds(args, 0)[1][0]
    obs = es.begin_episode(slots, seeds)
    assert (obs[::2] == obs[1::2]).all() and len(np.unique(obs, axis=0)) == 3
    assert (es.begin_episode(slots, seeds) == obs).all()


def test_episodes_per_candidate_are_averaged(tmp_path):
    """Fails if the fitness is the sum or the last of several episodes, or if they all start alike."""
    args, agent = agent_for("Pendulum-v1", population_size=4, max_episode_steps=10, episodes_per_candidate=3)
    slots, run = es.make_slots(args), SimpleNamespace(generation=7, step=0)
    randomize(agent)
    noise = es.draw_noise(np.arange(2), len(agent.flat))
    returns, steps, _ = es.play_generation(agent, noise, slots, args, run)
    candidates = es.make_candidates(agent.flat.numpy(), noise, args.sigma)
    each = [play_one_by_one(agent, candidates, args, seeds)[0] for seeds in es.draw_seeds(args, 7)[1]]
    np.testing.assert_allclose(returns, np.mean(each, 0), rtol=1e-3)
    assert steps == 4 * 10 * 3 and np.std(each, 0).min() > 0.01


def test_action_noise():
    """Fails if a temperature does not give the probabilities of the softmax, or if the deviation is not the given."""
    _, agent = agent_for(hidden_sizes=())
    args, candidates = Args(population_size=20_000, action_noise=0.5), np.arange(20_000)
    draw = es.action_noise(agent, args, 0, 0, es.Slots(None, candidates, None))
    outputs = np.array([[0.3, 0.0]])
    actions = agent.to_env(outputs + draw())
    assert actions.mean() == pytest.approx(1 / (1 + math.exp(0.3 / 0.5)), abs=0.02)
    assert (agent.to_env(outputs + draw()) != actions).any()  # anew in each step
    _, agent = agent_for("Pendulum-v1", hidden_sizes=())
    noise = es.action_noise(agent, args, 0, 0, es.Slots(None, candidates, None))()
    assert noise.shape == (20_000, 1) and noise.std() == pytest.approx(0.5, rel=0.05) and abs(noise.mean()) < 0.02
    again = es.action_noise(agent, args, 0, 0, es.Slots(None, candidates[10:12], None))()
    assert (again == noise[10:12]).all()  # whoever plays the candidate


# --------------------------------------------------------------------------------------- whole runs: what they leave


@pytest.fixture
def alone(tmp_path):
    """An empty folder with nothing but es.py in it."""
    (tmp_path / "es.py").write_bytes(SOURCE)
    return tmp_path


def flags_of(**given):
    """Arguments as flags of a command line."""
    words = []
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return words


def start(folder, *flags, processes=None, **pipes):
    """Start `python es.py flags…` in `folder`, or with torchrun in several processes."""
    python = [sys.executable]
    if processes:
        python += f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
    return subprocess.Popen([*python, "es.py", *map(str, flags)], cwd=folder, env=surroundings(), text=True, **pipes)


def shell(folder, *flags, code=0, processes=None):
    """Run it, expect the exit code, return (stdout, stderr)."""
    process = start(folder, *flags, processes=processes, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out, err


@pytest.fixture
def main(monkeypatch, tmp_path):
    """main(*flags): what `python es.py flags…` does in the empty folder tmp_path, in this process; the exit code."""

    def call(*flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["es.py", *map(str, flags)])
        try:
            es.main()
        except SystemExit as stop:
            return stop.code or 0
        return 0

    return call


def test_copied_alone_it_leaves_a_complete_run_folder(alone):
    """Fails if es.py imports a sibling, or if a part of the run folder or the last two lines are missing."""
    given = SMALL | dict(total_timesteps=3000, eval_every=1000, num_generations=10**6)
    del given["progress"]
    out, err = shell(alone, *flags_of(**given))
    assert sorted(path.name for path in alone.iterdir()) == ["es.py", "runs"]
    (run,) = (alone / "runs").iterdir()
    assert run.name.startswith("CartPole-v1__es__1__")
    final = summary(run)
    assert final["eval_episodes"] == 2 and 3000 <= final["global_step"] < 3000 + 8 * 500
    assert out.splitlines()[-2].startswith("evaluation") and "learning_curve.png" in out.splitlines()[-1]
    assert "mean return" in err and "steps/s" in err  # the progress bar
    header = metrics(run)[0]
    figures = "step return_mean return_std return_max generation episodes gradient_norm update_norm weight_norm"
    assert header == figures.split()
    for name in header:
        assert np.isfinite(column(run, name)).all(), name
    assert column(run, "generation") == list(range(1, len(column(run, "step")) + 1))
    assert column(run, "episodes")[-1] == 8 * column(run, "generation")[-1]
    state = torch_file(run / "checkpoint.pt")
    assert [step // 1000 for step, _, _ in state["evaluations"]][:2] == [1, 2]
    last = [total for _, total in state["episodes"][-8:]]
    assert column(run, "return_mean")[-1] == pytest.approx(np.mean(last)) and column(run, "return_max")[-1] == max(last)
    assert sum(total for _, total in state["episodes"]) == final["global_step"]  # CartPole: a step pays 1
    assert (run / "models/best.pt").exists() and not list(run.rglob("*.tmp"))
    out, _ = shell(alone, "--evaluate", run, "--model", "last", "--eval-episodes", 2)
    assert f"{final['eval_return_mean']:.2f} ± {final['eval_return_std']:.2f} over 2 episodes" in out


def test_notebook(tmp_path, monkeypatch):
    """Fails if Args are not filled in from the tables, if what is given does not win, or if results differ."""
    monkeypatch.chdir(tmp_path)
    plain = {field.name: field.default for field in dataclasses.fields(Args)}
    for env_id, tuned in es.TUNED.items():
        assert {name: getattr(Args(env_id=env_id), name) for name in tuned} == tuned
    ars = Args(env_id="CartPole-v1", ars=True)
    assert {name: getattr(ars, name) for name in es.ARS} == es.ARS
    assert ars.total_timesteps == plain["total_timesteps"]  # what is tuned for another method does not apply
    assert Args(ars=True, sigma=0.5).sigma == 0.5
    final = train(Args(**SMALL, total_timesteps=500, run_dir="run"))
    last = load("run", "last")
    assert evaluate(last, last.args, 2, 1 + es.EVALUATION) == (final["eval_return_mean"], final["eval_return_std"])
    assert set(last.act(np.random.default_rng(0).normal(size=(50, 4)))) == {0, 1}


def test_same_seed_same_run(alone):
    """Fails if two processes with the same seed differ in one bit, or if two seeds do not differ."""
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        shell(alone, *flags_of(**SMALL, total_timesteps=1000, seed=seed, run_dir=name))
    assert_same_run(alone / "one", alone / "two")
    assert metrics(alone / "one") != metrics(alone / "three")


def test_num_generations_and_total_timesteps(tmp_path):
    """Fails if not whichever comes first ends the run, or if the steps of finished candidates are counted."""
    given = SMALL | dict(env_id="es_envs:Constant-v0")
    final = train(Args(**given, num_generations=3, total_timesteps=10**6, run_dir=str(tmp_path / "one")))
    assert final["global_step"] == 3 * 8 * 3 and len(column(tmp_path / "one", "step")) == 3
    final = train(Args(**given, num_generations=30, total_timesteps=25, run_dir=str(tmp_path / "two")))
    assert final["global_step"] == 2 * 8 * 3


def test_stop_at_return(tmp_path):
    """Fails if a run goes on after an evaluation that was good enough."""
    given = SMALL | dict(env_id="es_envs:Constant-v0", eval_every=50, total_timesteps=10**6, stop_at_return=6.0)
    final = train(Args(**given, run_dir=str(tmp_path / "run")))
    assert 50 <= final["global_step"] < 50 + 24
    train(Args(resume=str(tmp_path / "run")))
    assert summary(tmp_path / "run")["global_step"] == final["global_step"]


# ------------------------------------------------------------------------------------------------------ kill, resume

KILLED = {
    "CartPole": dict(env_id="CartPole-v1", total_timesteps=150_000),
    "Pendulum, normalised, ARS": dict(env_id="Pendulum-v1", ars=True, total_timesteps=60_000, max_episode_steps=40),
    "LunarLander": dict(env_id="LunarLander-v3", total_timesteps=60_000, max_episode_steps=120, normalize_obs=True),
}


def kill_and_resume(folder, run, flags, kills, longest, seed):
    """Kill -9 a run `kills` times, each at a random moment after its next checkpoint, and resume it each time."""
    rng, stamp, argv = random.Random(seed), None, [*flags, "--run-dir", run]
    checkpoint = folder / run / "checkpoint.pt"
    for done in range(kills):
        process = start(folder, *argv, stdout=subprocess.DEVNULL)
        while process.poll() is None and (not checkpoint.exists() or checkpoint.stat().st_mtime_ns == stamp):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, longest))
        process.kill()
        if process.wait() != -signal.SIGKILL:  # on a fast machine it may be through before the last kill
            assert done >= kills / 2
            break
        stamp, argv = checkpoint.stat().st_mtime_ns, ["--resume", run, "--no-progress"]
    shell(folder, *argv)


@pytest.mark.parametrize(
    ("name", "kills"),
    [("CartPole", 2), *(pytest.param(name, 6, marks=pytest.mark.slow) for name in KILLED)],
)
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(name, kills, alone):
    """Fails if a checkpoint lacks anything that the rest of the run depends on, or is ever found half written. Box2D's
    environments cannot be carried over, but need not be: every generation resets them with seeds of its own."""
    given = {k: v for k, v in SMALL.items() if k != "hidden_sizes" or not KILLED[name].get("ars")}
    flags = flags_of(**given | KILLED[name], checkpoint_every=100)
    shell(alone, *flags, "--run-dir", "unbroken")
    kill_and_resume(alone, "killed", flags, kills, 0.3, seed=kills)
    assert_same_run(alone / "unbroken", alone / "killed")


class Killed(BaseException):
    """Ends `train` on the spot, as a kill would: nothing in es.py may catch it."""


@pytest.mark.parametrize("given", [dict(), dict(optimizer="ascent", normalize_obs=True)], ids=["adam", "ascent"])
def test_killed_around_every_write(given, tmp_path, monkeypatch):
    """Fails if there is a moment in or between writes at which a kill costs more than the work since the checkpoint."""
    monkeypatch.setattr(es, "draw_curve", lambda *_: None)
    given = SMALL | dict(total_timesteps=600, checkpoint_every=150, eval_every=250, max_episode_steps=20) | given
    train(Args(**given, run_dir=str(tmp_path / "unbroken")))
    deaths = 0
    for event in range(1000):
        run, left = tmp_path / f"killed{event}", [event]

        def mortal(function, halve=False, left=left):
            def call(*words, **options):
                result = function(*words, **options)
                left[0] -= 1
                if left[0] < 0:
                    path = words[1] if function is save else words[0]
                    if halve:
                        os.truncate(path, os.path.getsize(path) // 2)
                    raise Killed
                return result

            return call

        save = torch.save
        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", mortal(save, halve=True))
            patch.setattr(Path, "write_text", mortal(Path.write_text, halve=True))
            patch.setattr(os, "replace", mortal(os.replace))
            patch.setattr(es, "log_row", mortal(es.log_row))
            try:
                train(Args(**given, run_dir=str(run)))
                break
            except Killed:
                pass
        if (run / "checkpoint.pt").exists():
            train(Args(resume=str(run)))
            assert_same_run(tmp_path / "unbroken", run)
            deaths += 1
        shutil.rmtree(run, ignore_errors=True)
    assert deaths >= 12


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a short finished run on CartPole. Only to be read: copy it before changing anything."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(Args(**SMALL, total_timesteps=1000, run_dir=str(run)))
    return run


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run in tmp_path/run."""
    return shutil.copytree(finished, tmp_path / "run")


def test_resume_of_a_finished_run_changes_nothing(copied, finished, main):
    assert main("--resume", copied) == 0
    assert_same_run(finished, copied)


def test_resume_with_more_steps_goes_on(copied, main, tmp_path):
    """Fails if a prolonged run is not the run that had been that long from the start."""
    before = metrics(copied)
    assert main("--resume", copied, "--total-timesteps", 2500) == 0
    assert metrics(copied)[: len(before)] == before and summary(copied)["global_step"] >= 2500
    train(Args(**SMALL, total_timesteps=2500, run_dir=str(tmp_path / "long")))
    assert metrics(copied) == metrics(tmp_path / "long")


# ------------------------------------------------------------------------------------------------ several processes

SPREAD = {
    "CartPole": dict(population_size=10),  # 5 pairs: 3 and 2
    "Acrobot, drawn actions": dict(env_id="Acrobot-v1", max_episode_steps=80, action_noise=0.3, population_size=6),
    "Pendulum, normalised": dict(env_id="Pendulum-v1", normalize_obs=True, max_episode_steps=50),
}


@pytest.mark.parametrize(
    "name", [*list(SPREAD)[:1], *(pytest.param(n, marks=pytest.mark.slow) for n in list(SPREAD)[1:])]
)
def test_two_processes_give_the_numbers_of_one(name, alone):
    """Fails if a candidate's noise, first state or drawn actions depend on the process that plays it, if a candidate is
    played twice or by nobody, or if the second process writes into the run folder."""
    flags = flags_of(**SMALL | SPREAD[name], num_generations=12, checkpoint_every=100)
    shell(alone, *flags, "--run-dir", "one")
    shell(alone, *flags, "--run-dir", "two", processes=2)
    one, two = (metrics(alone / run) for run in ("one", "two"))
    assert len(one) == len(two) == 1 + 12 and one[0] == two[0]
    np.testing.assert_allclose(np.array(one[1:], float), np.array(two[1:], float), rtol=1e-4)
    states = [torch_file(alone / run / "checkpoint.pt")["agent"] for run in ("one", "two")]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-4, atol=1e-5)
    assert summary(alone / "one")["eval_return_mean"] == pytest.approx(summary(alone / "two")["eval_return_mean"])
    if "normalised" not in name:  # then nothing is added up but zeros: the same to the last bit
        assert_same_run(alone / "one", alone / "two")


@pytest.mark.slow
def test_two_processes_resume_and_stop_together(alone):
    """Fails if the second process does not hear of the evaluation that ends the run, or begins anew where the first
    resumes: they would wait for each other for ever."""
    given = SMALL | dict(population_size=4, total_timesteps=300, checkpoint_every=100)
    shell(alone, *flags_of(**given), "--run-dir", "two", processes=2)
    more = ["--total-timesteps", 10_000, "--stop-at-return", 15, "--eval-every", 100]
    shell(alone, "--resume", "two", *more, processes=2)
    shell(alone, *flags_of(**given), "--run-dir", "one")
    shell(alone, "--resume", "one", *more)
    assert_same_run(alone / "one", alone / "two")
    assert 300 < summary(alone / "two")["global_step"] < 10_000


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--env-id CartPol-v1", "CartPole"),
        ("--env-id HalfCheetah-v99", "HalfCheetah"),
        ("--population-size 7", "population_size 7"),
        ("--population-size 0", "population_size"),
        ("--population-size 2.5", "population-size"),
        ("--num-generations 0", "num_generations"),
        ("--episodes-per-candidate 0", "episodes_per_candidate"),
        ("--sigma 0", "sigma"),
        ("--sigma nan", "sigma"),
        ("--learning-rate -1", "learning_rate"),
        ("--weight-decay -1", "weight_decay"),
        ("--elite 0", "elite"),
        ("--elite 1.5", "elite"),
        ("--fitness best", "fitness best"),
        ("--optimizer lbfgs", "lbfgs"),
        ("--action-noise -1", "action_noise"),
        ("--hidden-sizes 64 0", "hidden_sizes"),
        ("--top-directions 4", "top_directions ars"),
        ("--ars --top-directions 65", "top_directions 128"),
        ("--ars --fitness raw", "ars fitness"),
        ("--ars --elite 0.5", "ars elite"),
        ("--num-envs 8", "num-envs"),
        ("--config missing.json", "missing.json"),
        ("--resume missing", "missing"),
        ("--evaluate missing", "missing"),
    ],
)
def test_bad_input_gets_one_plain_line(flags, words, main, capfd, tmp_path):
    """Fails if bad input leads to a traceback, another exit code, a message that does not name it, or a file."""
    assert main(*flags.split()) == 2
    err = capfd.readouterr().err
    assert_one_line(err)
    assert all(word in err for word in words.split()), err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"observation": "channels_last"}, "ppo.py images"),
        ({"observation": "sequence"}, "observations"),
        ({"actions": "multidiscrete"}, "MultiDiscrete ppo.py"),
        ({"actions": "text"}, "Text"),
    ],
)
def test_spaces_it_cannot_handle(kwargs, words, main, capfd):
    assert main("--env-id", "run_envs:Match-v0", "--env-kwargs", json.dumps(kwargs)) == 2
    err = capfd.readouterr().err
    assert_one_line(err)
    assert all(word in err for word in words.split()), err


@pytest.mark.parametrize("flag", ["--sigma 0.5", "--env-id Acrobot-v1", "--seed 9", "--population-size 4", "--ars"])
def test_resume_refuses_another_algorithm(flag, copied, main, capfd):
    assert main("--resume", copied, *flag.split()) == 2
    err = capfd.readouterr().err
    assert_one_line(err)
    assert flag.split()[0][2:].replace("-", "_") in err


@pytest.mark.parametrize("damage", ["half", "garbage", "missing", "weights only"])
def test_damaged_checkpoint(damage, copied, main, capfd):
    path = copied / "checkpoint.pt"
    content = path.read_bytes()
    path.unlink()
    if damage == "weights only":
        shutil.copy(copied / "models/best.pt", path)
    elif damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "half" else b"\x80garbage")
    assert main("--resume", copied) == 2
    err = capfd.readouterr().err
    assert_one_line(err)
    assert "checkpoint.pt" in err


@pytest.mark.parametrize("field", ["observation", "reward", "first observation"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_nan_from_the_environment_ends_the_run(field, value, main, capfd, tmp_path):
    """Fails if a NaN is learnt from, if the message names another step, or if it reaches the checkpoint."""
    kwargs = json.dumps({"field": field, "at": 25, "value": value})  # an episode has ten steps
    given = SMALL | dict(env_id="run_envs:Faulty-v0", population_size=2, checkpoint_every=10, run_dir="run")
    assert main(*flags_of(**given), "--env-kwargs", kwargs) == 2
    err = capfd.readouterr().err
    assert_one_line(err)
    step = 0 if "first" in field else 50  # two candidates side by side, both in their 25th step
    assert "run_envs:Faulty-v0" in err and f"step {step}:" in err and field.split()[-1] in err
    state = torch_file(tmp_path / "run/checkpoint.pt")
    assert state["step"] == (0 if "first" in field else 40)
    assert all(value.isfinite().all() for value in state["agent"].values())


def test_weights_that_are_not_finite_end_the_run(main, capfd, tmp_path):
    given = SMALL | dict(optimizer="ascent", learning_rate=1e38, weight_decay=1e38, run_dir="run")
    assert main(*flags_of(**given)) == 2
    err = capfd.readouterr().err
    assert_one_line(err)
    assert "CartPole-v1" in err and "weights" in err
    assert torch_file(tmp_path / "run/checkpoint.pt")["agent"]["network.0.weight"].isfinite().all()


# ------------------------------------------------------------------------- learning, with each option that changes it

TARGET = dict(env_id="es_envs:Target-v0", hidden_sizes=(), population_size=16, sigma=0.1, learning_rate=0.05)
TARGET |= dict(num_generations=100, eval_every=10**9, eval_episodes=1, progress=False)


@pytest.mark.parametrize(
    "given",
    [
        dict(),
        dict(fitness="standardized"),
        dict(fitness="raw"),
        dict(fitness="raw", optimizer="ascent", learning_rate=0.1),
        dict(elite=0.25),
        dict(fitness="standardized", elite=0.5, optimizer="ascent"),
        dict(ars=True, num_generations=200),
        dict(ars=True, top_directions=4, num_generations=200),
        dict(episodes_per_candidate=2),
        dict(action_noise=0.05, episodes_per_candidate=3),
        dict(hidden_sizes=(8,)),
        dict(env_kwargs='{"bounds": 2}'),
        dict(normalize_obs=True),
        dict(weight_decay=0.001),
    ],
    ids=lambda given: ", ".join(f"{k} {v}" for k, v in given.items()) or "default",
)
def test_every_option_learns(given, tmp_path):
    """The policy has to output (0.5, -0.25): from 0, which costs 0.31, to less than a tenth of that."""
    method = {k: v for k, v in TARGET.items() if k not in es.ARS} if given.get("ars") else TARGET
    assert train(Args(**method | given, run_dir=str(tmp_path / "run")))["eval_return_mean"] > -0.03


def test_weight_decay_keeps_parameters_small(tmp_path):
    final = train(
        Args(**TARGET | dict(weight_decay=0.5, optimizer="ascent", fitness="raw"), run_dir=str(tmp_path / "r"))
    )
    # the gradient 2 (target - bias) meets the decay 0.5 bias: bias = 2 target / 2.5
    weight = torch_file(tmp_path / "r/checkpoint.pt")["agent"]["network.0.bias"]
    close(weight, np.array([0.5, -0.25]) * 2 / 2.5, atol=0.05)
    assert final["eval_return_mean"] < -0.01


@pytest.mark.parametrize(
    ("actions", "observation"),
    [("discrete", "vector"), ("box", "discrete"), ("discrete", "dict"), ("box", "matrix")],
)
def test_spaces_learn(actions, observation, tmp_path):
    """Fails if an observation is not flattened, or an action is shifted, typed or scaled wrongly (an error there)."""
    kwargs = json.dumps({"actions": actions, "observation": observation})
    given = dict(env_id="run_envs:Match-v0", env_kwargs=kwargs, population_size=32, num_generations=60, sigma=0.3)
    given |= dict(hidden_sizes=(16,), learning_rate=0.1, episodes_per_candidate=2, progress=False, eval_every=10**9)
    final = train(Args(**given, normalize_obs=observation == "matrix", run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] > 0.8  # at random 0.25 and 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [dict(), dict(ars=True), dict(hidden_sizes=(), normalize_obs=True, total_timesteps=800_000)],
    ids=["tuned", "ars", "linear"],
)
def test_cartpole_is_solved(given, tmp_path):
    given = dict(total_timesteps=400_000) | given if given else {}
    assert train(Args(**given, progress=False, run_dir=str(tmp_path / "run")))["eval_return_mean"] > 475
