"""The steps of qlearning.py against slow and obvious versions of them, on random worlds and grids."""

import itertools
import random

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.qlearning_exact import best_return, exact_return, optimal_values
from tests.probes.table_envs import Chain, Notes, RandomWorld, SinglePrecision, new_table

ALGORITHMS = ("q-learning", "sarsa", "expected-sarsa", "double-q")
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def play(script, algorithm, seed, episodes, epsilon):
    """A RandomWorld in which some episodes have been played, and its agent."""
    env, rng, run = RandomWorld(seed), random.Random(seed), Notes()
    constant = {"learning_rate": 0.3, "gamma": 0.8, "epsilon_start": epsilon, "epsilon_min": epsilon}
    env.agent, args = new_table(script, env, algorithm=algorithm, **constant)
    for _ in range(episodes):
        script.play_episode(env.agent, env, run, rng, args)
    assert run.step == len(env.steps) and len(run.episodes) == episodes
    return env


def tables_after(step, following, algorithm, alpha=0.3, gamma=0.8, epsilon=0.4):
    """[(the table that learns, all tables)] that a step may lead to, by the formulas as the book has them."""
    before, s, a, r, s2, terminated, truncated = step
    found = []
    for learner in range(len(before)):
        q, other = before[learner], before[1 - learner] if len(before) == 2 else None
        if algorithm == "q-learning":
            nexts = [max(q[s2])]
        elif algorithm == "sarsa":  # A' is the next action taken; where there is none, any that epsilon-greedy may draw
            nexts = q[s2] if terminated or truncated else [q[s2, following[2]]]
        elif algorithm == "expected-sarsa":
            pi = np.full(len(q[s2]), epsilon / len(q[s2]))
            pi[np.argmax(q[s2])] += 1 - epsilon
            nexts = [pi @ q[s2]]
        else:
            nexts = [other[s2, np.argmax(q[s2])]]
        for value in nexts:
            after = before.copy()
            after[learner, s, a] += alpha * (r + (0 if terminated else gamma * value) - q[s, a])
            found.append((learner, after))
    return found


@each_algorithm
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_every_step(script, algorithm, seed):
    """Fails if, somewhere on a random world, a step changes the tables otherwise than its formula says."""
    env = play(script, algorithm, seed, episodes=10, epsilon=0.4)
    end = (np.array(env.agent.tables), *[None] * 6)
    for step, following in itertools.pairwise([*env.steps, end]):
        candidates = tables_after(step, following, algorithm)
        assert any(np.allclose(after, following[0], atol=1e-12, rtol=0) for _, after in candidates), step


def test_double_q_improves_either_table(script):
    """Fails if one of the two tables learns more often than the other."""
    env = play(script, "double-q", 0, episodes=200, epsilon=0.4)
    changes = [following[0] != step[0] for step, following in itertools.pairwise(env.steps)]
    shares = np.any(changes, axis=(2, 3)).mean(0)
    assert all(0.4 < share < 0.6 for share in shares), shares


@each_algorithm
def test_actions(script, algorithm):
    """Fails if, with epsilon = 0, an action is not the best one of the table as it is then (of two tables: of their
    sum), or if Sarsa does not take the action that it has put into its last update.
    """
    env = play(script, algorithm, 3, episodes=60, epsilon=0.0)
    for earlier, step in itertools.pairwise(env.steps):
        in_an_episode = not (earlier[5] or earlier[6])
        tables = earlier[0] if algorithm == "sarsa" and in_an_episode else step[0]
        values = tables.sum(0)[step[1]]
        assert values[step[2]] >= values.max() - 1e-12, step


@given(
    bounds=st.lists(st.tuples(st.floats(-5, 5), st.floats(0.5, 5)), min_size=1, max_size=3),
    size=st.integers(1, 7),
    numbers=st.lists(st.floats(-12, 12), min_size=3, max_size=3),
)
def test_bins(script, bounds, size, numbers):
    """Fails if a number is put in another bin than floor((x - low) / (high - low) * size), cut to the grid, is."""
    low, high = np.array([a for a, _ in bounds]), np.array([a + width for a, width in bounds])
    numbers = np.array(numbers[: len(bounds)])
    env = Chain()
    env.observation_space = spaces.Box(low, high, dtype=np.float64)
    agent, _ = new_table(script, env, grid_size=size)
    places = (numbers - low) / (high - low) * size
    exact = np.clip(np.floor(places), 0, size - 1)
    for digit, place, right in zip(np.unravel_index(agent.state(numbers), agent.bins), places, exact):
        assert digit == right or abs(place - round(place)) < 1e-9  # on an edge, rounding decides


def test_the_exact_reference():
    """Fails if the benchmark's exact evaluation or optimum is wrong: known figures of these environments."""
    lake, cliff, taxi = (gym.make(env_id) for env_id in ("FrozenLake-v1", "CliffWalking-v1", "Taxi-v4"))
    assert best_return(cliff, 1000) == -13 and best_return(taxi, 200) == pytest.approx(7.93)
    assert best_return(lake, 100) == pytest.approx(0.744, abs=5e-4)
    assert exact_return(cliff, np.zeros(48, int), 100) == -100  # always up: never arrives
    assert optimal_values(gym.make("FrozenLake-v1", is_slippery=False), 0.9)[:, 0].max() == pytest.approx(0.9**5)
    policy = np.random.default_rng(0).integers(4, size=16)
    total, games = 0.0, 3000
    for seed in range(games):  # by playing
        obs, _ = lake.reset(seed=seed)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = lake.step(int(policy[obs]))
            total, over = total + reward, terminated or truncated
    assert exact_return(lake, policy, 100) == pytest.approx(total / games, abs=0.02)


def test_the_table_keeps_double_precision(script):
    """Fails if rewards in np.float32 make numbers of the table np.float32: resumed, a run would go on otherwise."""
    env = SinglePrecision(gym.make("CliffWalking-v1", max_episode_steps=50))
    agent, args = new_table(script, env, learning_rate=0.3)
    script.play_episode(agent, env, Notes(), random.Random(0), args)
    numbers = [q for row in agent.tables[0] for q in row]
    assert {type(q) for q in numbers} == {float} and -0.3 in numbers
