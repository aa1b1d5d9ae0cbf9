"""es.py against slow and obvious versions: the paper's sum, ranks counted one by one, candidates played one by one."""

import json
import math
import threading
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.probes.population_envs import Notes, policy_for, randomize
from tests.tools import close

A, CENTRE = np.array([[2.0, 0.5, 0], [0.5, 1.0, -0.3], [0, -0.3, 3.0]]), np.array([1.0, -2.0, 0.5])


# ------------------------------------------------------------------------------------------------------- the estimate


@pytest.mark.parametrize("kind", ["exact", "random"])
def test_gradient_of_a_quadratic(script, kind):
    """The estimate of -1/2 (x - c)' A (x - c) is the analytic gradient -A (theta - c), about (-0.05, -2.9, 5.3).

    Directions sqrt(3) e_k have sum eps eps' / 3 = 1, so that the estimate is exact; random ones come near it.
    """
    theta, sigma = np.array([0.3, 0.7, -1.0]), 0.4
    noise, atol = math.sqrt(3) * np.eye(3), 1e-9
    if kind == "random":
        noise, atol = np.random.default_rng(0).normal(size=(200_000, 3)), 0.1
    candidates = script.make_candidates(theta, noise, sigma) - CENTRE
    returns = -0.5 * np.einsum("ni,ij,nj->n", candidates, A, candidates)
    np.testing.assert_allclose(script.es_gradient(returns, noise, sigma), -A @ (theta - CENTRE), atol=atol)


@settings(max_examples=40)
@given(
    pairs=st.integers(1, 6),
    size=st.integers(1, 5),
    seed=st.integers(0, 99),
    sigma=st.floats(0.01, 2),
)
def test_gradient(script, pairs, size, seed, sigma):
    """Against the paper's sum, candidate by candidate."""
    rng = np.random.default_rng(seed)
    noise, fitnesses = rng.normal(size=(pairs, size)), rng.normal(size=2 * pairs)
    total = np.zeros(size)
    for i, fitness in enumerate(fitnesses):
        total += fitness * (noise[i // 2] if i % 2 == 0 else -noise[i // 2])
    close(script.es_gradient(fitnesses, noise, sigma), total / (len(fitnesses) * sigma), atol=1e-6)


@settings(max_examples=40)
@given(returns=hnp.arrays(np.float64, st.integers(2, 12), elements=st.integers(-3, 3).map(float)))
def test_ranks(script, returns):
    """The rank of a return is the number of smaller ones plus half the number of equal others."""
    ranks = [np.sum(returns < x) + (np.sum(returns == x) - 1) / 2 for x in returns]
    close(script.centered_ranks(returns), np.array(ranks) / (len(returns) - 1) - 0.5)
    assert abs(script.centered_ranks(returns).sum()) < 1e-9


@settings(max_examples=50)
@given(size=st.integers(2, 300), hundredths=st.integers(1, 100))
def test_elite(script, size, hundredths):
    """So many of distinct returns count: the share, in whole numbers, rounded up."""
    kept = np.count_nonzero(script.shape_fitness(np.arange(1.0, size + 1), "raw", hundredths / 100))
    assert kept == -(-hundredths * size // 100)


@settings(max_examples=20)
@given(pairs=st.integers(1, 8), constant=st.floats(-1e3, 1e3), fitness=st.sampled_from(["centered-rank", "raw"]))
def test_antithetic_pairs_cancel_on_a_constant_function(script, pairs, constant, fitness):
    """Fails for noise without its mirror image: raw returns of a constant function would move theta at random."""
    noise = np.random.default_rng(pairs).normal(size=(pairs, 4))
    fitnesses = script.shape_fitness(np.full(2 * pairs, constant), fitness)
    close(script.es_gradient(fitnesses, noise, 0.1), np.zeros(4))


# ------------------------------------------------------------------------------------------------------ noise, seeds


def test_noise_comes_from_its_seeds(script):
    """Fails if the noise of a direction depends on the others, on the process's generators, or on the call before."""
    seeds = np.array([5, 2**32 - 1, 5, 0], np.uint32)
    noise = script.draw_noise(seeds, 1000)
    np.random.seed(3)
    torch.manual_seed(3)
    assert (script.draw_noise(seeds[1:2], 1000)[0] == noise[1]).all() and (noise[0] == noise[2]).all()
    assert noise.shape == (4, 1000) and noise.dtype == np.float32
    assert np.abs(noise.mean(1)).max() < 0.15 and np.abs(noise.std(1) - 1).max() < 0.1
    assert abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.15


def test_seeds_differ(script):
    """Fails if generations, seeds, episodes or pairs share noise or first states."""
    runs = [script.Args(population_size=20, episodes_per_candidate=3, seed=seed) for seed in (1, 2)]
    both = [script.draw_seeds(args, generation) for args in runs for generation in range(50)]
    assert both[0][0].shape == (10,) and both[0][1].shape == (3, 10)
    everything = np.concatenate([np.concatenate([noise, episodes.ravel()]) for noise, episodes in both])
    assert len(np.unique(everything)) == len(everything) == 2 * 50 * 40


# --------------------------------------------------------------------------------------------------------- policies


def network_of(script, policy, parameters):
    """The policy with these parameters, as a network of torch."""
    *inputs, outputs = policy.sizes
    network = script.mlp(inputs[0], inputs[1:], outputs, gain=1.0)
    nn.utils.vector_to_parameters(torch.from_numpy(parameters), network.parameters())
    return lambda x: network(torch.as_tensor(x)).detach().numpy()


@pytest.mark.parametrize("hidden_sizes", [(), (5,), (7, 3)])
def test_forward(script, hidden_sizes):
    """Against torch: candidate i's parameters, put into a network, act on observation i."""
    policy, _, _ = policy_for(script, "Acrobot-v1", hidden_sizes=hidden_sizes)
    rng = np.random.default_rng(0)
    candidates = rng.normal(size=(6, len(policy.theta))).astype(np.float32)
    obs = rng.normal(size=(6, 6)).astype(np.float32)
    outputs = script.forward(policy.layers(candidates), obs)
    assert outputs.shape == (6, 3) and outputs.dtype == np.float32
    for candidate, x, output in zip(candidates, obs, outputs):
        network = network_of(script, policy, candidate)
        close(output, network(x), atol=1e-4)
        close(script.forward(policy.layers(candidate), obs), network(obs), atol=1e-4)  # one policy for all rows


def test_what_is_learnt_acts_and_is_saved(script):
    """Fails if theta is a copy: what is learnt would not be saved, or what is loaded would not act."""
    policy, _, _ = policy_for(script, "Acrobot-v1", hidden_sizes=(5,))
    optimizer = script.Adam([policy.theta], lr=0.1)
    assert set(policy.act(np.ones((3, 6)))) == {0}  # zeros in the last layer: all outputs are equal
    policy.theta.grad = torch.ones(len(policy.theta))
    optimizer.step()
    policy.theta[-1] += 1
    saved = {name: value.clone() for name, value in policy.state_dict().items()}
    assert list(saved) == ["theta"] and set(policy.act(np.ones((3, 6)))) == {2}
    policy.theta.zero_()
    policy.load_state_dict(saved)
    assert set(policy.act(np.ones((3, 6)))) == {2} and torch.equal(optimizer.flat, saved["theta"])


@settings(max_examples=30)
@given(parts=st.lists(hnp.arrays(np.float64, (5, 3), elements=st.floats(-50, 50)), min_size=1, max_size=4))
def test_observation_statistics(script, parts):
    """Sums of parts give the mean and the deviation of all rows, and observations are normalised by them."""
    stats = script.ObservationStats(3)
    for part in parts:
        stats.add(script.sums_of(part).sum(0))
    rows = np.concatenate(parts)
    deviation = np.sqrt(np.maximum(rows.var(0), 1e-8))
    if deviation.min() > 0.01 or deviation.max() == 1e-4:
        normalised = np.clip((parts[0] - rows.mean(0)) / deviation, -10, 10)
        np.testing.assert_allclose(stats.normalize(parts[0]), normalised, atol=1e-2)


# ------------------------------------------------------------------------------------- playing a whole population


def play_one_by_one(script, policy, candidates, args, seeds):
    """(returns, steps) by the obvious loop: each candidate by itself, torch's network, one plain environment."""
    returns, steps = [], []
    for i, candidate in enumerate(candidates):
        network = network_of(script, policy, candidate)
        kwargs = {} if args.max_episode_steps is None else {"max_episode_steps": args.max_episode_steps}
        env = gym.make(args.env_id, **json.loads(args.env_kwargs), **kwargs)
        obs, _ = env.reset(seed=int(seeds[i // 2]))
        total, count, over = 0.0, 0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(policy.to_env(network(policy.features(obs[None])))[0])
            total, count, over = total + reward, count + 1, terminated or truncated
        returns.append(total)
        steps.append(count)
    return np.array(returns), np.array(steps)


PLAYED = {
    "Pendulum, normalised": dict(env_id="Pendulum-v1", normalize_obs=True, max_episode_steps=30),
    "LunarLander": dict(env_id="LunarLander-v3", max_episode_steps=100),
    "Patience": dict(env_id="Patience-v0"),
}


@pytest.mark.parametrize("name", PLAYED)
def test_all_at_once_as_one_by_one(script, name):
    """Fails if a candidate acts on another's observation, if rewards after its end count, if steps are miscounted, if a
    pair does not start alike, or if an environment is left over from the episode before."""
    policy, args, slots = policy_for(script, **PLAYED[name], population_size=8, hidden_sizes=(8,))
    if policy.obs_stats:
        policy.obs_stats.add(np.array([[5.0] * 3, [1.0, 2, 3], [6.0, 9, 40]]))
    for generation in (0, 1):
        randomize(policy, generation)
        candidates = script.make_candidates(
            policy.theta.numpy(), script.draw_noise(range(4), len(policy.theta)), sigma=0.5
        )
        _, (seeds,) = script.draw_seeds(args, generation)
        run = Notes()
        returns, _ = script.play_candidates(policy, candidates, slots, seeds, None, args, run)
        expected, steps = play_one_by_one(script, policy, candidates, args, seeds)
        np.testing.assert_allclose(returns, expected, rtol=1e-3)  # torch and NumPy differ in the last bit
        assert run.step == steps.sum()
        assert name != "Patience" or len(set(steps)) > 1


def test_native_cartpole_as_one_by_one(script):
    """The same for the native vector environment, whose first states come from one generator."""
    settings = dict(env_id="CartPole-v1", population_size=32, max_episode_steps=60)
    policy, args, slots = policy_for(script, **settings)
    randomize(policy)
    candidates = script.make_candidates(policy.theta.numpy(), script.draw_noise(range(16), len(policy.theta)), 2.0)
    slots.begin_episode(np.arange(16))
    first = slots.envs.unwrapped.state.copy()
    run = Notes()
    returns, _ = script.play_candidates(policy, candidates, slots, np.arange(16), None, args, run)
    assert returns.min() + 10 < returns.max()  # some slots have begun another episode, which must not count
    for i, candidate in enumerate(candidates):
        env = gym.make("CartPole-v1", max_episode_steps=60)
        env.reset()
        env.unwrapped.state, over, count = first[:, i].copy(), False, 0
        x = env.unwrapped.state.astype(np.float32)
        while not over:
            outputs = script.forward(policy.layers(candidate), x[None])
            x, _, terminated, truncated, _ = env.step(int(policy.to_env(outputs)[0]))
            over, count = terminated or truncated, count + 1
        assert returns[i] == count
    assert run.step == returns.sum()


def test_statistics_hold_every_observation_acted_upon_once(script):
    """Fails if observations of finished candidates, or final ones, enter the statistics, or the first ones do not."""
    policy, args, slots = policy_for(script, population_size=6, normalize_obs=True)
    randomize(policy, 1)
    candidates = script.make_candidates(policy.theta.numpy(), script.draw_noise(range(3), len(policy.theta)), 2.0)
    _, seen = script.play_candidates(policy, candidates, slots, np.arange(3), None, args, Notes())
    counts = [sum(event == "step" for event, _ in env.unwrapped.log) for env in slots.envs.unwrapped.envs]
    assert len(set(counts)) > 1
    for i, count in enumerate(counts):
        start = gym.make(args.env_id).reset(seed=i // 2)[0][0]
        rows = np.array([[start, t] for t in range(count)])
        close(seen[i], [[count] * 2, rows.sum(0), np.square(rows).sum(0)])


def test_pairs_start_alike(script):
    """Fails if the two of a pair differ in their luck at the start, if pairs do not, or if the start is not seeded."""
    _, args, slots = policy_for(script, "Pendulum-v1", population_size=6)
    _, (seeds,) = script.draw_seeds(args, 0)
    obs = slots.begin_episode(seeds)
    assert (obs[::2] == obs[1::2]).all() and len(np.unique(obs, axis=0)) == 3
    assert (slots.begin_episode(seeds) == obs).all()


def test_episodes_per_candidate_are_averaged(script):
    """Fails if the fitness is the sum or the last of several episodes, or if they all start alike."""
    settings = dict(max_episode_steps=10, episodes_per_candidate=3)
    policy, args, slots = policy_for(script, "Pendulum-v1", **settings)
    randomize(policy)
    noise = script.draw_noise(range(2), len(policy.theta))
    _, seeds = script.draw_seeds(args, 7)
    run = Notes(7)
    returns, _ = script.play_generation(policy, noise, seeds, slots, args, run)
    candidates = script.make_candidates(policy.theta.numpy(), noise, args.sigma)
    each = [play_one_by_one(script, policy, candidates, args, some)[0] for some in seeds]
    np.testing.assert_allclose(returns, np.mean(each, 0), rtol=1e-3)
    assert run.step == 4 * 10 * 3 and np.std(each, 0).min() > 0.01


def test_action_noise(script):
    """Fails if a temperature does not give the probabilities of the softmax, or if the deviation is not the given."""
    policy, args, _ = policy_for(script, "CartPole-v1", population_size=20_000, action_noise=0.5)
    rng = np.random.default_rng(0)
    outputs = np.array([[0.6, 0.0]])
    actions = policy.to_env(outputs + script.draw_action_noise(policy, rng, args))
    assert actions.mean() == pytest.approx(1 / (1 + math.exp(0.6 / 0.5)), abs=0.015)
    assert (policy.to_env(outputs + script.draw_action_noise(policy, rng, args)) != actions).any()  # anew in each step
    policy, _, _ = policy_for(script, "Pendulum-v1")
    noise = script.draw_action_noise(policy, rng, args)
    assert noise.shape == (20_000, 1) and noise.std() == pytest.approx(0.5, rel=0.05) and abs(noise.mean()) < 0.02


# --------------------------------------------------------------------------------------------------- several processes


class Threads:
    """In the place of torch.distributed: the processes are threads of this one, and `rank` tells which one it is."""

    def __init__(self, number):
        self.number, self.rank = number, threading.local()
        self.barrier, self.said = threading.Barrier(number, timeout=60), [None] * number

    is_initialized = lambda self: True
    is_torchelastic_launched = lambda self: False
    get_rank = lambda self: self.rank.value
    get_world_size = lambda self: self.number

    def all_gather_object(self, said, value):
        self.said[self.rank.value] = value
        self.barrier.wait()
        said[:] = self.said
        self.barrier.wait()


def in_threads(script, number, work):
    """[work(rank)] of so many processes, or what each has raised; one that has ended says so, as at a process's end."""
    results, processes = [None] * number, Threads(number)

    def call(rank):
        processes.rank.value = rank
        try:
            results[rank] = work(rank)
        except script.UserError as error:
            results[rank] = error
        while not all(has_ended for has_ended, _ in script.tell_all(True, str(results[rank]))):
            pass

    with mock.patch.object(script, "distributed", processes):
        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


SPREAD = {
    "CartPole": dict(env_id="CartPole-v1"),
    "drawn actions": dict(env_id="CartPole-v1", max_episode_return=30.0, action_noise=0.3),  # not the native version
    "Pendulum, normalised": dict(env_id="Pendulum-v1", normalize_obs=True, max_episode_steps=20),
}


@pytest.mark.parametrize("name", SPREAD)
@settings(max_examples=2)
@given(processes=st.integers(2, 5), seed=st.integers(0, 99))
def test_a_generation_does_not_depend_on_the_processes(script, name, processes, seed):
    """Fails if a candidate's noise, first state or drawn actions depend on the process that plays it, if a candidate is
    played twice or by nobody, or if a process does not hear of all returns, steps and observations."""
    args = script.Args(**SPREAD[name], population_size=10, hidden_sizes=(), seed=seed, episodes_per_candidate=2)
    noise_seeds, episode_seeds = script.draw_seeds(args, 3)

    def generation(_):
        envs = script.make_envs(args, 2 * len(script.pairs_of_this_process(args)))
        with lock:
            policy = script.make_agent(args, envs)
        noise = script.draw_noise(noise_seeds, len(policy.theta))
        run = Notes(3)
        slots = script.Slots(envs, args)
        returns, seen = script.play_generation(policy, noise, episode_seeds, slots, args, run)
        return returns.tolist(), seen.tolist(), run.step

    lock = threading.Lock()
    alone = generation(0)
    assert alone[2] > 10 and in_threads(script, processes, generation) == [alone] * processes


def test_an_error_in_one_process_ends_all(script):
    """Fails if the others wait for ever for one that has failed, or do not hear why."""

    def work(rank):
        for turn in range(3):
            if rank == turn == 1:
                raise script.UserError("the disk is full")
            script.exchange(turn)

    results = in_threads(script, 3, work)
    assert [type(result) for result in results] == [script.UserError] * 3
    assert {str(result) for result in results} == {"the disk is full"}


def test_alone_there_is_nobody_to_talk_to(script):
    """Fails if one process needs torch.distributed."""
    assert script.process() == (0, 1) and script.exchange("x") == ["x"]
    assert script.pairs_of_this_process(SimpleNamespace(population_size=6)).tolist() == [0, 1, 2]
