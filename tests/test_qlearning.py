"""qlearning.py: its update rules against arithmetic done by hand and against slow, obvious versions on random worlds;
its greedy policies against the exact optimum; whole runs: copied away, without torch, killed, resumed, fed bad input.

The checks of the update rules take the module they judge, so that known mistakes can be handed to them: each of these
has to be caught, or else the check is worth nothing.
"""

import csv
import dataclasses
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import run_envs  # noqa: F401  (registers its environments)
import table_envs
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import qlearning
from benchmarks.qlearning_exact import best_return, exact_return, optimal_values
from qlearning import Args, evaluate, load, train

SOURCE = Path(qlearning.__file__).read_text(encoding="utf-8")
ALGORITHMS = ("q-learning", "sarsa", "expected-sarsa", "double-q")
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
NOT_SLIPPERY = '{"is_slippery": false}'


def make_agent(module, env, **args):
    """(agent, args) for an environment, of the module that is judged."""
    args = module.Args(env_id="none", **args)
    fake = SimpleNamespace(single_observation_space=env.observation_space, single_action_space=env.action_space)
    return module.make_agent(args, fake), args


def new_run():
    return SimpleNamespace(step=0, episodes=[])


# --------------------------------------------------------------------------------------- targets, computed by hand


def check_targets(module):
    """R = 1, gamma = 0.5, Q(S', .) = (2, 4):

    Q-learning       1 + 0.5 * max(2, 4) = 3
    Sarsa            A' = 0: 1 + 0.5 * 2 = 2
    expected Sarsa   epsilon = 0.5: pi = (1/4, 3/4), 1 + 0.5 * (2/4 + 4 * 3/4) = 2.75; epsilon = 0 is Q-learning
    double           Q1(S', .) = (2, 4) chooses action 1, Q2(S', .) = (7, 3) judges it: 1 + 0.5 * 3 = 2.5
    terminated       discount = 0: 1
    """
    assert module.q_learning_target(1.0, 0.5, [2.0, 4.0]) == 3
    assert module.sarsa_target(1.0, 0.5, [2.0, 4.0], 0) == 2
    assert module.expected_sarsa_target(1.0, 0.5, [2.0, 4.0], 0.5) == 2.75
    assert module.expected_sarsa_target(1.0, 0.5, [2.0, 4.0], 0.0) == 3
    assert module.double_q_target(1.0, 0.5, [2.0, 4.0], [7.0, 3.0]) == 2.5
    assert module.q_learning_target(1.0, 0.0, [2.0, 4.0]) == 1
    assert module.double_q_target(1.0, 0.0, [2.0, 4.0], [7.0, 3.0]) == 1


def check_ends(module):
    """Three steps in a row, 0 -> 1 -> 2 -> 3 with rewards 1, 2, 3, alpha = gamma = 0.5, and Q(3) = 8 to begin with.

    Terminated: Q(3) must not count.    Q(0) = 0.5 (1 + 0.5 * 0) = 0.5    Q(1) = 0.5 * 2 = 1    Q(2) = 0.5 * 3 = 1.5
    Truncated: Q(3) stands for the rest.                                   Q(2) = 0.5 (3 + 0.5 * 8) = 3.5
    Both: terminated wins. In the second episode (terminated) Q(0) = 0.5 + 0.5 (1 + 0.5 * 1 - 0.5) = 1.
    """
    for algorithm in ("q-learning", "sarsa", "expected-sarsa"):
        for end, last in (("terminated", 1.5), ("truncated", 3.5), ("both", 1.5)):
            env = table_envs.Chain(end=end)
            agent, args = make_agent(module, env, algorithm=algorithm, learning_rate=0.5, gamma=0.5)
            agent.tables[0][3][0] = 8.0
            run, rng = new_run(), random.Random(0)
            errors = module.play_episode(agent, env, run, rng, args)
            assert np.array(agent.tables).ravel().tolist() == [0.5, 1, last, 8], (algorithm, end)
            assert errors == 1 + 2 + 2 * last and (run.step, run.episodes) == (3, [(3, 6.0)])
            module.play_episode(agent, env, run, rng, args)
            assert agent.tables[0][0] == [1.0] and run.episodes[1] == (6, 6.0)
    # An episode that reaches the limit of steps is cut off there, which is a truncation.
    agent, args = make_agent(module, env, learning_rate=0.5, gamma=0.5, max_episode_steps=2)
    agent.tables[0][2][0] = 8.0
    run = new_run()
    module.play_episode(agent, env, run, random.Random(0), args)
    assert run.step == 2 and agent.tables[0][1] == [3.0]  # 0.5 (2 + 0.5 * 8)


# ------------------------------------------------------------------------- every step against an obvious version


class Recorder:
    """Notes, at each step of an environment, the state, the tables before it, and what happened."""

    spec = None

    def __init__(self, env, agent):
        self.env, self.agent, self.steps = env, agent, []

    def reset(self):
        self.at, info = self.env.reset()
        return self.at, info

    def step(self, action):
        before, state = np.array(self.agent.tables), self.at
        self.at, reward, terminated, truncated, info = self.env.step(action)
        self.steps.append((before, state, action, reward, self.at, terminated, truncated))
        return self.at, reward, terminated, truncated, info


def expected_tables(step, following, algorithm, alpha, gamma, epsilon):
    """All tables that one step may lead to, by the formulas as the book has them."""
    before, s, a, r, s2, terminated, truncated = step
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
            yield learner, after


def check_every_step(module, seed=0, episodes=40):
    """Each step of each algorithm on a random world changes the tables as the formula says, and nothing else."""
    for algorithm in ALGORITHMS:
        fixed = dict(algorithm=algorithm, learning_rate=0.3, gamma=0.8, epsilon_start=0.4, epsilon_min=0.4)
        env = table_envs.RandomWorld(seed)
        env.reset(seed=seed)
        agent, args = make_agent(module, env, **fixed)
        recorder, rng, run = Recorder(env, agent), random.Random(seed), new_run()
        for _ in range(episodes):
            module.play_episode(agent, recorder, run, rng, args)
        assert run.step == len(recorder.steps) and len(run.episodes) == episodes
        learners = []
        end = (np.array(agent.tables), *[None] * 6)
        for step, following in itertools.pairwise([*recorder.steps, end]):
            candidates = expected_tables(step, following, algorithm, 0.3, 0.8, 0.4)
            found = [learner for learner, after in candidates if np.allclose(after, following[0], atol=1e-12, rtol=0)]
            assert found, (algorithm, step, following[0])
            learners.append(found[0])
        assert set(learners) == set(range(len(agent.tables)))
        if algorithm == "double-q":
            assert 0.25 < np.mean(learners) < 0.75


def check_actions(module):
    """With epsilon = 0 each action is the best one of the table as it is then (of two tables: of their sum); Sarsa
    takes the action that it has put into its last update.
    """
    for algorithm in ALGORITHMS:
        env = table_envs.RandomWorld(3)
        env.reset(seed=3)
        agent, args = make_agent(
            module, env, algorithm=algorithm, learning_rate=0.9, epsilon_start=0.0, epsilon_min=0.0
        )
        recorder, rng, run = Recorder(env, agent), random.Random(3), new_run()
        for _ in range(60):
            module.play_episode(agent, recorder, run, rng, args)
        for earlier, step in itertools.pairwise(recorder.steps):
            tables = earlier[0] if algorithm == "sarsa" and not (earlier[5] or earlier[6]) else step[0]
            values = tables.sum(0)[step[1]]
            assert values[step[2]] >= values.max() - 1e-12, (algorithm, step)


def check_epsilon_greedy(module):
    """Two of four actions are equally best, epsilon = 0.4: probabilities 0.1, 0.1 + 0.3, 0.1, 0.1 + 0.3."""
    rng = random.Random(0)
    counts = np.bincount([module.epsilon_greedy([1.0, 2.0, -1.0, 2.0], 0.4, rng) for _ in range(20_000)], minlength=4)
    assert np.abs(counts / 20_000 - [0.1, 0.4, 0.1, 0.4]).max() < 0.015
    assert {module.epsilon_greedy([1.0, 2.0, -1.0], 0.0, rng) for _ in range(200)} == {1}
    assert {module.epsilon_greedy([0.0, 0.0, 0.0], 0.0, rng) for _ in range(200)} == {0, 1, 2}


def check_schedules(module):
    """0.8 * 0.5^2 = 0.2 after two episodes, then the floor of 0.15. Linear over half of 1000 steps, from 0.8 to 0.15:
    at step 200, 0.8 - 0.65 * 200 / 500 = 0.54. The learning rate at step 250 of 1000: 0.4 * 0.75 = 0.3.
    """
    common = dict(env_id="none", epsilon_start=0.8, epsilon_min=0.15, epsilon_decay=0.5, total_timesteps=1000)
    common |= dict(learning_rate=0.4)
    args = module.Args(**common)
    assert [module.schedules(args, 900, n)[0] for n in range(4)] == pytest.approx([0.8, 0.4, 0.2, 0.15])
    assert module.schedules(args, 900, 0)[1] == 0.4
    args = module.Args(**common, exploration_fraction=0.5, anneal_lr=True)
    assert [module.schedules(args, t, 7)[0] for t in (0, 200, 500, 900)] == pytest.approx([0.8, 0.54, 0.15, 0.15])
    assert [module.schedules(args, t, 7)[1] for t in (0, 250, 1000)] == pytest.approx([0.4, 0.3, 0.0])
    assert module.schedules(args, 1010, 7) == (0.15, 0)  # the last episode goes on beyond the total


def check_rows(module):
    """Digits of a mixed radix: (2, 1) of 3 x 4 is row 2 * 4 + 1 = 9. What lies outside a grid goes to its edge."""
    made = lambda space, **args: make_agent(
        module, SimpleNamespace(observation_space=space, action_space=spaces.Discrete(2)), **args
    )[0]
    agent = made(spaces.Discrete(4, start=-2))
    assert [agent.state(obs) for obs in (-2, -1, 0, 1)] == [0, 1, 2, 3] and agent.shape == (1, 4, 2)
    agent = made(spaces.MultiDiscrete([3, 4], start=[0, 5]))
    assert agent.state(np.array([2, 6])) == 9 and agent.shape == (1, 12, 2)
    agent = made(spaces.MultiDiscrete([[2, 2], [2, 3]]))
    assert agent.state(np.array([[1, 0], [1, 2]])) == 1 * 12 + 0 * 6 + 1 * 3 + 2
    agent = made(spaces.Tuple((spaces.Discrete(3), spaces.Discrete(4, start=5))))
    assert agent.state((2, 6)) == 9
    rows = {agent.state(obs) for obs in itertools.product(range(3), range(5, 9))}
    assert rows == set(range(12))
    # A grid of 4 x 4 over [-1, 1] x [0, 8]: bins of 0.5 and of 2.
    agent = made(spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 8.0]), dtype=np.float64), grid_size=4)
    for obs, row in (
        ((-1.0, 0.0), 0),
        ((-0.51, 1.9), 0),
        ((-0.49, 2.1), 1 * 4 + 1),
        ((0.99, 7.9), 15),
        ((1.0, 8.0), 15),  # the upper bound belongs to the last bin
        ((5.0, -3.0), 12),
        ((-9.0, 99.0), 3),
    ):
        assert agent.state(np.array(obs, np.float32)) == row, obs
    batch = np.array([[-1.0, 0.0], [0.99, 7.9]], np.float32)
    agent.tables[0][0], agent.tables[0][15] = [1.0, 0.0], [-1.0, 0.0]
    assert agent.act(batch).tolist() == [0, 1]


CHECKS = [check_targets, check_ends, check_every_step, check_actions, check_epsilon_greedy, check_schedules, check_rows]


@pytest.mark.parametrize("check", CHECKS)
def test_numbers(check):
    """Fails if a number differs from the arithmetic in the docstring of the check."""
    check(qlearning)


@settings(max_examples=15)
@given(st.integers(0, 10**6))
def test_every_step_on_random_worlds(seed):
    """Fails if any algorithm updates anything otherwise than its formula says, somewhere on a random world."""
    check_every_step(qlearning, seed, episodes=10)


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(0.5, 5)), min_size=1, max_size=3),
    st.integers(1, 7),
    st.lists(st.floats(-12, 12), min_size=3, max_size=3),
)
def test_bins_on_random_grids(bounds, size, numbers):
    """Fails if a number is put in another bin than floor((x - low) / (high - low) * size), cut to the grid, is."""
    low, high = np.array([a for a, _ in bounds]), np.array([a + width for a, width in bounds])
    env = SimpleNamespace(observation_space=spaces.Box(low, high, dtype=np.float64), action_space=spaces.Discrete(2))
    agent, _ = make_agent(qlearning, env, grid_size=size)
    row = agent.state(np.array(numbers[: len(bounds)]))
    places = (np.array(numbers[: len(bounds)]) - low) / (high - low) * size
    exact = np.clip(np.floor(places), 0, size - 1)
    for digit, place, right in zip(reversed(np.unravel_index(row, [size] * len(bounds))), places[::-1], exact[::-1]):
        assert digit == right or abs(place - round(place)) < 1e-9  # on an edge, rounding decides


MISTAKES = {
    "truncated is treated as terminated": ("0.0 if terminated else", "0.0 if terminated or truncated else"),
    "terminated bootstraps": ("0.0 if terminated else args.gamma", "args.gamma"),
    "truncated wins over terminated": ("0.0 if terminated else", "0.0 if terminated and not truncated else"),
    "no maximum": ("reward + discount * max(next_values)", "reward + discount * next_values[0]"),
    "gamma forgotten": ("reward + discount * max(next_values)", "reward + max(next_values)"),
    "Sarsa takes the maximum": ("discount * next_values[next_action]", "discount * max(next_values)"),
    "Sarsa draws another action than it updated with": ("next_state, next_action\n", "next_state, None\n"),
    "expected Sarsa swaps epsilon": ("(epsilon * mean + (1 - epsilon) * max", "((1 - epsilon) * mean + epsilon * max"),
    "expected Sarsa leaves the best one out": ("sum(next_values) / len", "sum(sorted(next_values)[:-1]) / len"),
    "double Q takes the maximum of the other table": ("other_next_values[best]", "max(other_next_values)"),
    "double Q is judged by the table that chooses": ("other_next_values[best]", "next_values[best]"),
    "double Q always updates the first table": ("rng.random() < 0.5", "rng.random() < 2"),
    "double Q acts on one of its tables": ("if len(self.tables) == 1:", "if True:"),
    "the learning rate is ignored": ("+= learning_rate * td_error", "+= td_error"),
    "the error has the wrong sign": ("td_error = target - q[state][action]", "td_error = q[state][action] - target"),
    "the next state's row is updated": ("q[state][action] += learning_rate", "q[next_state][action] += learning_rate"),
    "epsilon the wrong way round": ("if rng.random() < epsilon", "if rng.random() > epsilon"),
    "ties go to the first": ("if values.count(best) == 1:", "if True:"),
    "epsilon decays per step": ("args.epsilon_decay**episode", "args.epsilon_decay**step"),
    "epsilon falls below its floor": ("max(args.epsilon_min, epsilon *", "max(0.0, epsilon *"),
    "the linear schedule ignores its fraction": ("args.exploration_fraction * total", "total"),
    "the grid has one bin less": ("args.grid_size + 1)[1:-1]", "args.grid_size)[1:-1]"),
    "start of a Discrete forgotten": ("range(int(part.start) + 1, int(part.start + part.n))", "range(1, int(part.n))"),
    "digits in the wrong radix": ("row = row * bins +", "row = row * 2 +"),
    "the action is chosen before the update": (
        "target = q_learning_target(reward",
        "next_action, target = epsilon_greedy(q[next_state], epsilon, rng), q_learning_target(reward",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_known_mistakes_are_caught(mistake):
    """Fails if a faulty version passes all checks above: then they would not notice it in qlearning.py either."""
    right, wrong = MISTAKES[mistake]
    assert SOURCE.count(right) == 1, "the line that is to be spoilt is no longer there"
    module = types.ModuleType("faulty")
    exec(compile(SOURCE.replace(right, wrong), "faulty.py", "exec"), module.__dict__)
    for check in CHECKS:
        try:
            check(module)
        except (AssertionError, IndexError):
            return
    pytest.fail(f"no check has noticed: {mistake}")


# ------------------------------------------------------------------------------------- against the exact optimum


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """Drawing takes longer than most runs here; tests of pictures carry the marker `pictures`."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(qlearning, "draw_curve", lambda *_: None)
        monkeypatch.setattr(qlearning, "draw_values", lambda *_: False)


@pytest.fixture
def pictures():
    """Asks for pictures."""


def greedy(agent):
    """The greedy action in each state."""
    return np.array(agent.tables).sum(0).argmax(1)


def learnt(tmp_path, env_id, **args):
    """(agent with the final table, one environment of its kind)."""
    few = dict(eval_episodes=1, eval_every=10**9, progress=False, run_dir=str(tmp_path / "run"))
    args = Args(**{"env_id": env_id} | few | args)
    train(args)
    return load(tmp_path / "run", "last"), qlearning.make_envs(args, 1).envs[0]


def test_the_reference_itself():
    """Fails if the exact evaluation or the optimum is wrong: known figures of these environments."""
    lake, cliff, taxi = (gym.make(env_id) for env_id in ("FrozenLake-v1", "CliffWalking-v1", "Taxi-v4"))
    assert best_return(cliff, 1000) == -13 and best_return(taxi, 200) == pytest.approx(7.93)
    assert best_return(lake, 100) == pytest.approx(0.744, abs=5e-4)
    assert exact_return(cliff, np.zeros(48, int), 100) == -100  # always up: never arrives
    policy = np.random.default_rng(0).integers(4, size=16)
    total, games = 0.0, 3000
    for seed in range(games):  # by playing
        obs, _ = lake.reset(seed=seed)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = lake.step(int(policy[obs]))
            total, over = total + reward, terminated or truncated
    assert exact_return(lake, policy, 100) == pytest.approx(total / games, abs=0.02)


@each_algorithm
def test_not_slippery_frozen_lake_is_solved_exactly(algorithm, tmp_path):
    """Fails if the greedy policy misses the goal, or values on its way are not gamma to the steps that are left."""
    steps = dict(algorithm=algorithm, total_timesteps=20_000, env_kwargs=NOT_SLIPPERY)
    agent, env = learnt(tmp_path, "FrozenLake-v1", **steps)
    assert exact_return(env, greedy(agent), 100) == 1
    if algorithm == "q-learning":  # the others learn of a policy that explores
        assert max(agent.tables[0][14]) == pytest.approx(1, abs=1e-3)
        assert max(agent.tables[0][0]) == pytest.approx(0.99**5, abs=0.01) == optimal_values(env, 0.99)[:, 0].max()


@pytest.mark.parametrize("algorithm", ["q-learning", "double-q"])
def test_cliff_walking_is_solved_exactly(algorithm, tmp_path):
    """Fails if the greedy policy is not the shortest way along the edge of the cliff, which takes 13 steps."""
    agent, env = learnt(tmp_path, "CliffWalking-v1", algorithm=algorithm)
    assert exact_return(env, greedy(agent), 1000) == best_return(env, 1000) == -13


def test_sarsa_keeps_away_from_the_cliff(tmp_path):
    """Fails if Sarsa learns the values of the best policy rather than of the one that explores (example 6.6)."""
    fixed = dict(epsilon_start=0.1, epsilon_min=0.1, total_timesteps=60_000)
    agent, env = learnt(tmp_path, "CliffWalking-v1", algorithm="sarsa", **fixed)
    assert -21 <= exact_return(env, greedy(agent), 1000) <= -15


def test_taxi_is_solved(tmp_path):
    """Fails if the greedy policy is clearly worse than the optimum of 7.93."""
    agent, env = learnt(tmp_path, "Taxi-v4", total_timesteps=100_000)
    assert exact_return(env, greedy(agent), 200) > 7.5


@pytest.mark.slow
@each_algorithm
def test_taxi_with_the_tuned_settings(algorithm, tmp_path):
    """Fails if an algorithm does not come close to the optimum of 7.93; Sarsa, which expects to stumble, less so."""
    agent, env = learnt(tmp_path, "Taxi-v4", algorithm=algorithm)
    assert exact_return(env, greedy(agent), 200) >= (7.8 if algorithm == "q-learning" else 7.3)


@pytest.mark.slow
def test_slippery_frozen_lake(tmp_path):
    """Fails if the learning rate is not annealed well enough for the values of a world of chance to settle."""
    agent, env = learnt(tmp_path, "FrozenLake-v1")
    assert exact_return(env, greedy(agent), 100) >= 0.72
    assert np.abs(np.array(agent.tables[0]).max(1) - optimal_values(env, agent.args.gamma).max(0)).max() < 0.05


def test_double_q_is_less_biased(tmp_path):
    """Fails if double Q-learning is as fond of the maximum of noise as Q-learning is (example 6.7, figure 6.5)."""
    shares = {}
    for algorithm in ("q-learning", "double-q"):
        lefts = 0
        for seed in range(100):
            agent, args = make_agent(qlearning, table_envs.Bias(), algorithm=algorithm, gamma=1.0, epsilon_start=0.1)
            args.epsilon_min, env, run, rng = 0.1, table_envs.Bias(), new_run(), random.Random(seed)
            env.reset(seed=seed)
            for _ in range(100):
                qlearning.play_episode(agent, env, run, rng, args)
            lefts += greedy(agent)[0] < 5
        shares[algorithm] = lefts / 100
    assert shares["q-learning"] > shares["double-q"] + 0.1, shares


# -------------------------------------------------------------------------------------------------- it learns at all


@pytest.mark.parametrize(
    ("env_id", "kwargs", "more"),
    [
        ("run_envs:Match-v0", {"observation": "discrete"}, {}),
        ("run_envs:Match-v0", {"observation": "multidiscrete"}, {}),
        ("run_envs:Match-v0", {"observation": "matrix"}, {"grid_size": 6}),
        ("run_envs:Match-v0", {"observation": "vector"}, {"grid_size": 2}),
        ("table_envs:Twins-v0", {"kind": "tuple"}, {}),
        ("table_envs:Twins-v0", {"kind": "unbounded"}, dict(grid_size=2, grid_low=(0.0, 0.0), grid_high=(1.0, 2.0))),
    ],
    ids=["Discrete", "MultiDiscrete", "Box of integers", "Box", "Tuple", "unbounded Box"],
)  # fmt: skip
def test_every_observation_kind_learns(env_id, kwargs, more, tmp_path):
    """Fails if a number in the observation does not reach the table, or an action arrives without its offset."""
    args = Args(env_id=env_id, env_kwargs=json.dumps(kwargs), gamma=0.0, total_timesteps=4000, learning_rate=0.3,
                eval_every=10**9, progress=False, run_dir=str(tmp_path / "run"), **more)  # fmt: skip
    assert train(args)["eval_return_mean"] == 1
    assert evaluate(load(tmp_path / "run"), args, 20) == (1.0, 0.0)


def learns_cliff_walking(run_dir, **options):
    return train(Args(run_dir=str(run_dir), progress=False, eval_every=10**9, eval_episodes=1, **options))


OPTIONS = {
    "linear exploration": {"exploration_fraction": 0.5},
    "slower exploration": {"epsilon_decay": 0.995},
    "not annealed": {"anneal_lr": False},
    "small steps": {"learning_rate": 0.2},
    "discounted": {"gamma": 0.95},
    **{algorithm: {"algorithm": algorithm} for algorithm in ALGORITHMS[1:]},
}


@pytest.fixture(scope="module")
def default_metrics(tmp_path_factory):
    run = tmp_path_factory.mktemp("default") / "run"
    learns_cliff_walking(run)
    return metrics(run)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_learns(option, tmp_path, default_metrics):
    """Fails if an option keeps CliffWalking from being learnt (random play: far below -1000), or has no effect."""
    assert learns_cliff_walking(tmp_path / "run", **OPTIONS[option])["eval_return_mean"] >= -21
    assert metrics(tmp_path / "run") != default_metrics


@pytest.mark.slow
def test_mountain_car_on_a_grid(tmp_path):
    """Fails if a grid over a Box does not let the car learn to leave the valley (random play: -200)."""
    few = dict(total_timesteps=500_000, eval_episodes=50, eval_every=10**9, progress=False)
    assert train(Args(env_id="MountainCar-v0", run_dir=str(tmp_path / "run"), **few))["eval_return_mean"] > -175


# ------------------------------------------------------------------------------------------------ whole runs: helpers

SMALL = "--total-timesteps 3000 --eval-every 1000 --eval-episodes 2 --no-progress".split()


def surroundings(**extra):
    """Environment variables of a process: one thread, no window, our environments importable."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy", "PYTHONPATH": path} | extra


def command(flags):
    return [sys.executable, "qlearning.py", *map(str, flags)]


def shell(folder, *flags, code=0, **variables):
    """Run `python qlearning.py flags…` in `folder`, expect the exit code, return the finished process."""
    done = subprocess.run(command(flags), cwd=folder, env=surroundings(**variables), capture_output=True, text=True)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def alone(tmp_path):
    """An empty folder with nothing but qlearning.py in it."""
    (tmp_path / "qlearning.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def metrics(run_dir):
    """metrics.csv as rows of cells, header first, without the columns that hold times."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    kept = [i for i, name in enumerate(header) if name not in ("seconds", "sps")]
    assert len(kept) == len(header) - 2 and all(len(row) == len(header) for row in rows)
    return [[row[i] for i in kept] for row in [header, *rows]]


def column(run_dir, name):
    header, *rows = metrics(run_dir)
    return [float(row[header.index(name)]) for row in rows]


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def table_file(path):
    """Everything in an npz file; the text in it as what it says."""
    with np.load(path) as file:
        state = {name: file[name] for name in file}
    return state | {"run": json.loads(str(state["run"]))} if "run" in state else state


def assert_same_run(one, other):
    """Two finished runs agree, bit for bit, in everything but the time they took."""
    assert metrics(one) == metrics(other)
    names = [sorted(path.name for path in (run / "models").iterdir()) for run in (one, other)]
    assert names[0] == names[1]
    for name in ["q_table.npz", *(f"models/{name}" for name in names[0])]:
        first, second = table_file(one / name), table_file(other / name)
        assert list(first) == list(second)
        for state in (first, second):
            state.get("run", {}).pop("seconds", None)
        assert all(np.array_equal(first[key], second[key]) for key in first), name
    final = [
        {k: v for k, v in summary(run).items() if k not in ("seconds", "steps_per_second")} for run in (one, other)
    ]
    assert final[0] == final[1]


def snapshot(folder):
    """Every file under `folder` with its content."""
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def main(monkeypatch, tmp_path):
    """main(*flags): what `python qlearning.py flags…` does in the empty folder tmp_path; the exit code."""

    def call(*flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["qlearning.py", *map(str, flags)])
        try:
            qlearning.main()
        except SystemExit as stop:
            return stop.code or 0
        return 0

    return call


@pytest.fixture
def complaint(main, capfd, tmp_path):
    """complaint(*flags): the one line on stderr that these flags must lead to; nothing may be written."""

    def call(*flags):
        before = snapshot(tmp_path)
        capfd.readouterr()
        code, err = main(*flags), capfd.readouterr().err
        assert_one_line(err)
        assert code == 2, err
        assert snapshot(tmp_path) == before
        return err

    return call


def assert_one_line(err):
    assert err.endswith("\n") and err.count("\n") == 1 and len(err) > 10, err
    assert not any(word in err for word in ("Traceback", "usage:", "│", "---", "\r", "\x1b")), err


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a short finished run on CliffWalking. Only to be read: copy it before changing anything."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "qlearning.py").write_text(SOURCE, encoding="utf-8")
    assert shell(folder, *SMALL, "--run-dir", "run").stderr == ""  # no warnings
    return folder / "run"


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run in tmp_path/run."""
    return shutil.copytree(finished, tmp_path / "run")


# ----------------------------------------------------------------------------------------------- a run, and its folder


def without(package, folder):
    """Environment variables for a process that does not find a package, whether or not it is installed."""
    lines = (
        "import importlib.machinery",
        "find = importlib.machinery.PathFinder.find_spec",
        f"hide = lambda name, *rest: None if name.split('.')[0] == {package!r} else find(name, *rest)",
        "importlib.machinery.PathFinder.find_spec = hide",
    )
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text("\n".join(lines))  # which Python imports when it starts
    return {"PYTHONPATH": str(folder / "site")}


def test_copied_alone_and_without_torch_it_leaves_a_complete_run_folder(alone):
    """Fails if qlearning.py imports torch or a sibling anywhere, or if a part of the run folder is missing."""
    no_torch = without("torch", alone)
    hidden = subprocess.run([sys.executable, "-c", "import torch"], env=surroundings(**no_torch), capture_output=True)
    assert b"No module named 'torch'" in hidden.stderr  # it is out of reach indeed
    done = shell(alone, "--total-timesteps", 3000, "--eval-every", 1000, "--eval-episodes", 2, **no_torch)
    (run,) = (alone / "runs").iterdir()
    assert run.name.startswith("CliffWalking-v1__qlearning__1__")
    made = {path.name for path in run.iterdir()}
    names = {"config.json", "metrics.csv", "learning_curve.png", "values.png", "q_table.npz", "models", "summary.json"}
    assert made == names

    final = summary(run)
    names = "eval_return_mean eval_return_std eval_episodes global_step seconds steps_per_second".split()
    assert set(names) <= set(final) and final["global_step"] >= 3000
    *_, evaluation, curve = done.stdout.splitlines()
    assert evaluation.startswith("evaluation") and f"{final['eval_return_mean']:.1f} ±" in evaluation
    assert str(run.relative_to(alone) / "learning_curve.png") in curve
    assert "mean return" in done.stderr and "steps/s" in done.stderr  # the progress bar
    header = (run / "metrics.csv").read_text().splitlines()[0]
    assert header == "step,seconds,sps,return_mean,episodes,epsilon,learning_rate,td_error"
    steps = column(run, "step")
    assert steps == sorted(set(steps)) and steps[-1] == final["global_step"]
    assert all(np.isfinite(column(run, name)).all() for name in header.split(",")[3:])

    state = table_file(run / "q_table.npz")
    assert state["q"].shape == (1, 48, 4) and state["q"].dtype == np.float64
    evaluations = state["run"]["evaluations"]
    saved = {path.name for path in (run / "models").iterdir()}
    assert saved == {"best.npz"} | {f"{step}.npz" for step, _, _ in evaluations} and len(saved) >= 3
    best = max(mean for _, mean, _ in evaluations)
    last_best = [step for step, mean, _ in evaluations if mean == best][-1]
    assert (run / "models/best.npz").read_bytes() == (run / f"models/{last_best}.npz").read_bytes()
    config = json.loads((run / "config.json").read_text())
    assert set(config["args"]) == {field.name for field in dataclasses.fields(Args)}
    assert set(config["versions"]) == {"gymnasium", "numpy"}

    shell(alone, "--resume", run, "--total-timesteps", 4000, "--no-progress", **no_torch)
    done = shell(alone, "--evaluate", run, "--model", "last", **no_torch)
    assert "over 2 episodes of CliffWalking-v1" in done.stdout and done.stderr == ""


def test_evaluate_prints_mean_and_deviation(finished, main, capsys):
    """Fails if best, last or a step plays another table than the saved one, or if the seed is ignored."""
    step = summary(finished)["global_step"]
    for model, file in (("best", "models/best.npz"), ("last", "q_table.npz"), (step, f"models/{step}.npz")):
        assert main("--evaluate", finished, "--model", model, "--eval-episodes", 3, "--seed", 7) == 0
        (line,) = capsys.readouterr().out.splitlines()
        agent = load(finished)
        agent.load_state_dict(table_file(finished / file))
        mean, std = evaluate(agent, Args(evaluate=str(finished)), 3, 7 + 10_000)
        assert f"{mean:.2f} ± {std:.2f}" in line and "3 episodes" in line


def test_notebook(tmp_path, monkeypatch):
    """Fails if the tuned values do not apply to Args(…), if what is given does not win, or if results differ."""
    monkeypatch.chdir(tmp_path)
    plain = {field.name: field.default for field in dataclasses.fields(Args)}
    for env_id, tuned in qlearning.TUNED.items():
        assert {name: getattr(Args(env_id=env_id), name) for name in tuned} == tuned
        for name in tuned:
            assert getattr(Args(env_id=env_id, **{name: plain[name]}), name) == plain[name]
    args = Args(total_timesteps=2000, eval_episodes=3, progress=False)
    final = train(args)
    (run,) = (tmp_path / "runs").iterdir()
    assert final == summary(run)
    last = load(run, "last")
    assert evaluate(last, last.args, 3, args.seed + 10_000) == (final["eval_return_mean"], final["eval_return_std"])
    train(dataclasses.replace(args, seed=2))  # a run leaves no marks in its Args
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_same_seed_same_run(finished, main, tmp_path):
    """Fails if anything random is not seeded by --seed, if --config loses an argument, or if the seed is ignored."""
    random.seed(1)
    np.random.seed(2)
    assert main("--config", finished / "config.json", "--run-dir", "again") == 0
    assert_same_run(finished, tmp_path / "again")
    assert main("--config", finished / "config.json", "--run-dir", "other", "--seed", 2) == 0
    assert metrics(finished) != metrics(tmp_path / "other")


@pytest.mark.parametrize(
    ("env_id", "more"),
    [
        ("CliffWalking-v1", {}),
        ("FrozenLake8x8-v1", {"algorithm": "double-q"}),
        ("Taxi-v4", {}),
        ("Blackjack-v1", {}),
        ("MountainCar-v0", {}),
    ],
)
def test_picture_of_the_table(env_id, more, tmp_path, pictures):
    """Fails if the picture is missing or empty, or cannot be drawn where next to nothing has been learnt."""
    from matplotlib.image import imread

    args = Args(env_id=env_id, **more)
    envs = qlearning.make_envs(args, 1)
    agent, env, rng, run = qlearning.make_agent(args, envs), envs.envs[0], random.Random(0), new_run()
    env.reset(seed=0)
    for episodes in (1, 100):
        for _ in range(episodes):
            qlearning.play_episode(agent, env, run, rng, args)
        assert qlearning.draw_values(tmp_path, args, agent, env)
        picture = imread(tmp_path / "values.png")
        assert picture.shape[0] >= 500 and picture.shape[1] >= 800
        assert len(np.unique(picture[::5, ::5].reshape(-1, picture.shape[2]), axis=0)) > 20


def test_no_picture_of_many_dimensions(tmp_path, pictures):
    """Fails if a world that cannot be drawn stops the run."""
    bounds = dict(grid_low=(-2.4, -3.0, -0.2, -3.0), grid_high=(2.4, 3.0, 0.2, 3.0), grid_size=6)
    train(Args(env_id="CartPole-v1", total_timesteps=500, progress=False, run_dir=str(tmp_path / "run"), **bounds))
    assert not (tmp_path / "run/values.png").exists() and (tmp_path / "run/learning_curve.png").exists()


def test_a_wrapper_may_change_what_is_drawn(tmp_path, pictures):
    """Fails if the picture takes a wrapped observation for the cell of a grid world."""
    wrappers = ("gymnasium.wrappers.TimeAwareObservation",)
    args = Args(env_id="MountainCar-v0", wrappers=wrappers, grid_size=3)
    envs = qlearning.make_envs(args, 1)
    assert not qlearning.draw_values(tmp_path, args, qlearning.make_agent(args, envs), envs.envs[0])
    args = Args(env_id="CliffWalking-v1", wrappers=("table_envs.Halves",))
    envs = qlearning.make_envs(args, 1)
    assert qlearning.make_agent(args, envs).shape == (1, 24, 4)
    assert not qlearning.draw_values(tmp_path, args, qlearning.make_agent(args, envs), envs.envs[0])


def test_video_and_window(copied, main, monkeypatch):
    """Fails if --capture-video leaves no film of a run or of --evaluate, or --render opens no window."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    few = "--total-timesteps 60 --eval-episodes 1 --max-episode-steps 6 --no-progress --run-dir film".split()
    assert main("--env-id", "FrozenLake-v1", "--capture-video", *few) == 0
    films = list((copied.parent / "film/videos").glob("*.mp4"))
    assert films and all(film.stat().st_size > 1000 for film in films)
    made, make_envs = [], qlearning.make_envs
    monkeypatch.setattr(qlearning, "make_envs", lambda *args: made.append(args[2:]) or make_envs(*args))
    assert main("--evaluate", copied.parent / "film", "--capture-video", "--render", "--eval-episodes", 1) == 0
    assert (copied.parent / "film/videos/best.mp4").stat().st_size > 1000 and any("human" in rest for rest in made)


# ---------------------------------------------------------------------------------------------------- kill, resume


def kill_and_resume(folder, flags, kills, longest, seed):
    """Kill -9 a run `kills` times, each time at a random moment after its next checkpoint, and resume it each time."""
    rng, done, stamp, argv = random.Random(seed), 0, None, [*flags, "--run-dir", "killed"]
    checkpoint = folder / "killed/q_table.npz"
    while True:
        process = subprocess.Popen(
            command(argv), cwd=folder, env=surroundings(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
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
        done, stamp, argv = done + 1, checkpoint.stat().st_mtime_ns, ["--resume", "killed", "--no-progress"]


@pytest.mark.parametrize(
    ("flags", "kills"),
    [
        ("--env-id CliffWalking-v1", 2),
        pytest.param("--env-id Taxi-v4 --algorithm double-q --exploration-fraction 0.5", 8, marks=pytest.mark.slow),
        pytest.param("--env-id MountainCar-v0 --algorithm sarsa", 8, marks=pytest.mark.slow),
        pytest.param("--env-id Blackjack-v1 --algorithm expected-sarsa", 8, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(flags, kills, alone):
    """Fails if a checkpoint lacks anything that the rest of the run depends on, or is ever found half written."""
    flags = [*flags.split(), "--total-timesteps", 60_000, "--checkpoint-every", 300, "--eval-episodes", 2]
    shell(alone, *flags, "--no-progress", "--run-dir", "unbroken")
    assert kill_and_resume(alone, [*flags, "--no-progress"], kills, 0.15, seed=kills) == kills
    assert_same_run(alone / "unbroken", alone / "killed")


class Killed(BaseException):
    """Ends `train` on the spot, as a kill would: nothing in qlearning.py may catch it."""


def train_until(event, args, monkeypatch):
    """`train(args)`, ended at the `event`-th moment that matters for what is on disk; False if it finished before.

    Moments: a file is half written, has been renamed, is to be removed; a row has been added to metrics.csv.
    """
    left = [event]

    def moment(cleanup=lambda: None):
        left[0] -= 1
        if left[0] < 0:
            cleanup()
            raise Killed

    def patched(function, before=None, after=None):
        def call(*given, **options):
            if before:
                moment()
            result = function(*given, **options)
            if after:
                moment(lambda: after(*given))
            return result

        return call

    def halve(path, content):
        os.truncate(path, os.path.getsize(path) // 2)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", patched(Path.write_bytes, after=halve))
        patch.setattr(Path, "write_text", patched(Path.write_text, after=halve))
        patch.setattr(os, "replace", patched(os.replace, after=lambda *_: None))
        patch.setattr(qlearning, "log_row", patched(qlearning.log_row, after=lambda *_: None))
        patch.setattr(Path, "unlink", patched(Path.unlink, before=True))
        try:
            train(args)
        except Killed:
            return False
    return True


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm": "sarsa"},
        {"env_id": "Taxi-v4", "algorithm": "double-q", "exploration_fraction": 0.5, "anneal_lr": True},
        pytest.param({"env_id": "FrozenLake-v1", "algorithm": "expected-sarsa"}, marks=pytest.mark.slow),
        pytest.param({"env_id": "Blackjack-v1"}, marks=pytest.mark.slow),
        {"env_id": "MountainCar-v0", "max_episode_steps": 40},
        pytest.param({"env_id": "LunarLander-v3", "grid_size": 3, "max_episode_steps": 20, "total_timesteps": 100},
                     marks=pytest.mark.slow),
        {"env_id": "FrozenLake-v1", "env_kwargs": NOT_SLIPPERY, "stop_at_return": 1.0, "total_timesteps": 5000},
        {"env_id": "CartPole-v1", "grid_size": 3, "wrappers": ("gymnasium.wrappers.TimeAwareObservation",),
         "grid_low": (-2.4, -3.0, -0.2, -3.0, 0.0), "grid_high": (2.4, 3.0, 0.2, 3.0, 500.0)},
    ],
    ids=lambda given: " ".join(map(str, given.values())),
)  # fmt: skip
def test_killed_around_every_write(given, tmp_path, monkeypatch):
    """Fails if there is a moment in or between writes at which a kill costs more than the work since the checkpoint,
    or if an environment is not, between episodes, what its random generator makes of it.
    """
    monkeypatch.chdir(tmp_path)
    small = dict(total_timesteps=250, checkpoint_every=80, eval_every=120, eval_episodes=1, progress=False)
    small |= {"run_dir": "unbroken", "max_episode_steps": 60} | given
    train(Args(**small))
    deaths = 0
    for event in range(1000):
        run = tmp_path / f"killed{event}"
        if train_until(event, Args(**small | {"run_dir": str(run)}), monkeypatch):
            break
        if (run / "q_table.npz").exists():
            train(Args(resume=str(run)))
            assert_same_run(tmp_path / "unbroken", run)
            deaths += 1
        shutil.rmtree(run, ignore_errors=True)
    assert deaths >= 10


def test_resume_of_a_finished_run_changes_nothing(copied, finished, main, capsys):
    """Fails if a finished run is trained on."""
    assert main("--resume", copied) == 0
    assert_same_run(finished, copied)
    assert capsys.readouterr().out.splitlines()[-2].startswith("evaluation")


def test_resume_with_more_steps_goes_on(copied, main):
    """Fails if a resumed run cannot be prolonged, or begins anew."""
    before = metrics(copied)
    assert main("--resume", copied, "--total-timesteps", 5000) == 0
    after = metrics(copied)
    assert after[: len(before)] == before and column(copied, "step")[-1] >= 5000
    assert summary(copied)["global_step"] == column(copied, "step")[-1]
    assert json.loads((copied / "config.json").read_text())["args"]["total_timesteps"] == 5000


def test_resume_with_fewer_steps_than_were_taken(tmp_path, monkeypatch, main):
    """Fails if a run that is over before its first evaluation has nothing to report."""
    args = Args(
        run_dir=str(tmp_path / "run"),
        total_timesteps=50_000,
        checkpoint_every=1000,
        max_episode_steps=50,
        progress=False,
    )
    assert not train_until(20, args, monkeypatch)
    step = table_file(tmp_path / "run/q_table.npz")["run"]["step"]
    assert 0 < step < 5000
    assert main("--resume", tmp_path / "run", "--total-timesteps", 1000, "--eval-episodes", 2) == 0
    assert summary(tmp_path / "run")["global_step"] >= step


@pytest.mark.parametrize("flag", ["--learning-rate 0.7", "--env-id Taxi-v4", "--seed 9", "--algorithm sarsa"])
def test_resume_refuses_another_algorithm(flag, copied, complaint):
    """Fails if a flag that changes the algorithm is taken, or ignored without a word, when a run is resumed."""
    assert flag.split()[0][2:].replace("-", "_") in complaint("--resume", copied, *flag.split())


@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_resume_of_a_damaged_run(damage, copied, complaint, tmp_path):
    """Fails if a run folder from which something is missing or damaged ends in a traceback."""
    for name in ("metrics.csv", "q_table.npz"):
        intact = (copied / name).read_bytes()
        (copied / name).unlink() if damage == "missing" else (copied / name).write_bytes(b"\x80garbage\n,,\n")
        assert name in complaint("--resume", copied)
        (copied / name).write_bytes(intact)
    shutil.copy(copied / "models/best.npz", copied / "q_table.npz")  # a table, but nothing of the run
    assert "q_table.npz" in complaint("--resume", copied)
    assert "config.json" in complaint("--resume", "nowhere")


def test_interrupted_with_ctrl_c_it_says_how_to_go_on(alone):
    """Fails if Ctrl-C ends in a traceback, or if what it says does not lead on."""
    flags = ["--total-timesteps", 10**8, "--checkpoint-every", 300, "--no-progress", "--run-dir", "run"]
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # in the background, children are born deaf to it
    pipes = dict(env=surroundings(), stderr=subprocess.PIPE, text=True, preexec_fn=listen)
    process = subprocess.Popen(command(flags), cwd=alone, **pipes)
    try:
        while process.poll() is None and not (alone / "run/metrics.csv").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "--resume run" in err and "Traceback" not in err


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--env-id FrozenLak-v1", "FrozenLake"),
        ("--env-id CliffWalking-v9", "v1"),
        ("--env-id no_such_module:Some-v0", "no_such_module"),
        ("--env-id", "env-id"),
        ("--learning-rte 0.1", "learning-rte"),
        ("nonsense", "nonsense"),
        ("--algorithm td3", "algorithm td3 sarsa double-q"),
        ("--grid-size 2.5", "grid-size 2.5"),
        ("--grid-size 0", "grid_size"),
        ("--learning-rate 1.5", "learning_rate"),
        ("--learning-rate nan", "learning_rate nan"),
        ("--gamma 1.01", "gamma"),
        ("--epsilon-start 1.2", "epsilon_start"),
        ("--epsilon-min -0.1", "epsilon_min"),
        ("--epsilon-decay 2", "epsilon_decay"),
        ("--exploration-fraction 0", "exploration_fraction"),
        ("--total-timesteps 0", "total_timesteps"),
        ("--eval-episodes 0", "eval_episodes"),
        ("--eval-every -5", "eval_every"),
        ("--max-episode-return nan", "max_episode_return"),
        ("--seed -1", "seed"),
        ("--wrappers no.such.Wrapper", "no.such.Wrapper"),
        ("--env-kwargs [1]", "env_kwargs"),
        ('--env-kwargs {"gravitas":1}', "gravitas"),
        ("--run-dir taken", "taken"),
        ("--config missing.json", "missing.json"),
        ("--evaluate missing", "missing"),
        # spaces, and who can handle them; grids that do not fit
        ("--env-id Pendulum-v1", "Box Discrete ppo.py"),
        ("--env-id CartPole-v1 --grid-low -1 --grid-high 1", "4 grid_low 1"),
        ("--env-id table_envs:Twins-v0 --env-kwargs {\"kind\":\"unbounded\"}", "inf grid_low grid_high"),
        ("--env-id MountainCar-v0 --grid-low 0.7 -1", "0.7 grid_low"),
        ("--env-id MountainCar-v0 --grid-size 9999", "million grid_size"),
        ("--env-id table_envs:Twins-v0 --env-kwargs {\"kind\":\"huge\"}", "grid_size ppo.py"),
        ("--env-id table_envs:Twins-v0 --env-kwargs {\"kind\":\"dict\"}", "Dict ppo.py"),
        ("--env-id table_envs:Twins-v0 --env-kwargs {\"kind\":\"boxes\"}", "Tuple ppo.py"),
        ("--grid-low 1 --grid-high 2", "grid_low Box"),
        ("--env-id run_envs:Unpicturable-v0 --capture-video", "Unpicturable"),
    ],
)  # fmt: skip
def test_bad_flags(flags, words, complaint, tmp_path):
    """Fails if the complaint is longer than a line, names nothing, comes with another exit code, or leaves files."""
    (tmp_path / "taken").write_text("a file, not a folder")
    err = complaint(*flags.split(" "))
    for word in words.split():
        assert word.replace("-", "_") in err.replace("-", "_"), err


def test_bad_input_as_a_process(alone):
    """Fails if the start of the script, outside of main, changes what main does with bad input."""
    done = shell(alone, "--gamma", "1.5", code=2, PYTHONDONTWRITEBYTECODE="1")
    assert_one_line(done.stderr)
    assert done.stdout == "" and [path.name for path in alone.iterdir()] == ["qlearning.py"]


def test_a_run_is_never_overwritten(copied, complaint):
    """Fails if --run-dir of an earlier run is written to."""
    assert "holds a run" in complaint("--run-dir", copied)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("not JSON", "config.json"),
        ('{"args": 3}', "config.json"),
        ('{"args": {"seed": 1, "learning_starts": 10}}', "learning_starts"),
        ('{"args": {"grid_size": "fine"}}', "grid_size"),
        ('{"args": {"grid_low": [0, "a"]}}', "grid_low"),
        ('{"args": {"algorithm": "td3"}}', "algorithm"),
        ('{"args": {"anneal_lr": 1}}', "anneal_lr"),
    ],
)
def test_malformed_config(content, word, complaint, tmp_path):
    """Fails if a config that is none, is of another script or holds a wrong type is taken or not named."""
    (tmp_path / "config.json").write_text(content)
    assert word in complaint("--config", "config.json")


class Bomb:
    """Unpickling this creates a file named `executed` in the working directory."""

    def __reduce__(self):
        return exec, ("open('executed', 'w').close()",)


def rewritten(**arrays):
    """A damage that replaces arrays in the file; None removes one."""

    def damage(path):
        state = dict(np.load(path)) | arrays
        np.savez(path, **{name: array for name, array in state.items() if array is not None})

    return damage


DAMAGES = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(random.Random(0).randbytes(5000)),
    "text": lambda path: path.write_text("numbers\n"),
    "pickle with code": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "array of objects with code": rewritten(q=np.array([Bomb()], object)),
    "missing": lambda path: path.unlink(),
    "another environment": rewritten(env_id=np.array("Taxi-v4")),
    "no table": rewritten(q=None),
    "another shape": rewritten(q=np.zeros((1, 16, 4))),
    "another type": rewritten(q=np.full((1, 48, 4), "one")),
    "not finite": rewritten(q=np.full((1, 48, 4), np.nan)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tables(damage, copied, complaint, tmp_path):
    """Fails if a damaged or foreign file is taken, runs code, or ends in a traceback."""
    for file, flags in (
        ("models/best.npz", ["--evaluate", copied]),
        ("q_table.npz", ["--evaluate", copied, "--model", "last"]),
        ("q_table.npz", ["--resume", copied]),
    ):
        intact = (copied / file).read_bytes()
        DAMAGES[damage](copied / file)
        assert Path(file).name in complaint(*flags)
        assert not (tmp_path / "executed").exists()
        (copied / file).write_bytes(intact)
    assert "12345.npz" in complaint("--evaluate", copied, "--model", 12345)
    assert "CliffWalking-v1" in complaint("--evaluate", copied, "--env-id", "Taxi-v4")


# --------------------------------------------------------------------------------------------- NaNs, limits, options


@pytest.mark.parametrize("field", ["observation", "reward"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_nan_from_the_environment_ends_the_run(field, value, main, capsys, tmp_path):
    """Fails if a NaN is learnt from, if the message names another step, or if it reaches the checkpoint."""
    kwargs = json.dumps({"field": field, "at": 333, "value": value})
    flags = ["--env-id", "run_envs:Faulty-v0", "--env-kwargs", kwargs, "--total-timesteps", 1000, "--eval-every", 100]
    flags += ["--checkpoint-every", 60, "--eval-episodes", 2, "--no-progress", "--run-dir", "run"]
    assert main(*flags) == 2
    err = capsys.readouterr().err
    assert_one_line(err)
    assert "run_envs:Faulty-v0" in err and "step 333:" in err and field in err
    state = table_file(tmp_path / "run/q_table.npz")
    assert 250 < state["run"]["step"] < 333 and np.isfinite(state["q"]).all()
    assert main("--evaluate", "run", "--model", "last") == 0
    assert "10.00 ± 0.00" in capsys.readouterr().out


def test_nan_at_once(main, capsys):
    """Fails if the observation of a reset is not checked."""
    kwargs = json.dumps({"field": "first observation", "at": 1})
    assert main("--env-id", "run_envs:Faulty-v0", "--env-kwargs", kwargs, "--no-progress", "--run-dir", "run") == 2
    err = capsys.readouterr().err
    assert_one_line(err)
    assert "step 0:" in err and "observation" in err


def test_limits_truncate(tmp_path):
    """Fails if a limit of steps or return is ignored or off by one, or if an endless episode does not end by itself."""
    common = dict(env_id="run_envs:Endless-v0", grid_size=2, eval_episodes=2, progress=False)
    for limit, length in ({"max_episode_steps": 7}, 7), ({"max_episode_return": 8.5}, 9), ({}, 1000):
        run = tmp_path / str(length)
        final = train(Args(total_timesteps=3 * length, run_dir=str(run), **common, **limit))
        returns = [total for _, total in table_file(run / "q_table.npz")["episodes"]]
        assert returns == [length] * 3 and final["eval_return_mean"] == length and final["global_step"] == 3 * length


def test_stop_at_return(tmp_path):
    """Fails if the run does not stop at the first evaluation that is good enough."""
    common = dict(env_id="FrozenLake-v1", env_kwargs=NOT_SLIPPERY, total_timesteps=10**6, eval_every=1000)
    final = train(Args(**common, eval_episodes=2, stop_at_return=1.0, progress=False, run_dir=str(tmp_path / "run")))
    *earlier, last = table_file(tmp_path / "run/q_table.npz")["run"]["evaluations"]
    assert last[1] == 1 and all(mean < 1 for _, mean, _ in earlier) and final["global_step"] == last[0] < 100_000
    assert train(Args(resume=str(tmp_path / "run")))["global_step"] == last[0]
