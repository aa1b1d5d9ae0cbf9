"""The numbers of Q-learning and its relatives, worked out by hand: a lesson to be read beside qlearning.py."""

import random

import numpy as np
import pytest
from gymnasium import spaces

from tests.probes.table_envs import Chain, Notes, new_table
from tests.tools import close


def test_targets(script):
    """R = 1, discount = 0.5, and the row of the next state is Q(S', .) = (2, 4):

    Q-learning       1 + 0.5 * max(2, 4) = 3
    Sarsa            A' = 0: 1 + 0.5 * 2 = 2
    expected Sarsa   epsilon = 0.5: pi = (1/4, 3/4), 1 + 0.5 * (2/4 + 4 * 3/4) = 2.75; epsilon = 0 is Q-learning
    double           Q1(S', .) = (2, 4) chooses action 1, Q2(S', .) = (7, 3) judges it: 1 + 0.5 * 3 = 2.5

    A discount of 0 leaves the reward. Fails if a formula is not that of the book.
    """
    row = [2.0, 4.0]
    assert script.q_learning_target(1.0, 0.5, row) == 3
    assert script.sarsa_target(1.0, 0.5, row, 0) == 2
    assert script.expected_sarsa_target(1.0, 0.5, row, 0.5) == 2.75
    assert script.expected_sarsa_target(1.0, 0.5, row, 0.0) == 3
    assert script.double_q_target(1.0, 0.5, row, [7.0, 3.0]) == 2.5
    assert script.q_learning_target(1.0, 0.0, row) == script.double_q_target(1.0, 0.0, row, [7.0, 3.0]) == 1


@pytest.mark.parametrize("algorithm", ["q-learning", "sarsa", "expected-sarsa"])  # they agree: there is one action
@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
def test_an_episode(script, algorithm, end):
    """0 -> 1 -> 2 -> 3 with rewards 1, 2, 3. alpha = gamma = 0.5. All Q are 0 to begin with, but Q(3) = 8.

    error   terminated: 3 has no future          truncated: nobody plays on, but 3 is worth 8
    0 -> 1  1 + 0.5 * 0 - 0 = 1   Q(0) = 0.5     the same
    1 -> 2  2 + 0.5 * 0 - 0 = 2   Q(1) = 1       the same
    2 -> 3  3 - 0           = 3   Q(2) = 1.5     3 + 0.5 * 8 - 0 = 7   Q(2) = 3.5
    Once more:
    0 -> 1  1 + 0.5 * 1   - 0.5 = 1      Q(0) = 1
    1 -> 2  2 + 0.5 * 1.5 - 1   = 1.75   Q(1) = 1.875     2 + 0.5 * 3.5 - 1 = 2.75   Q(1) = 2.375
    2 -> 3  3 - 1.5             = 1.5    Q(2) = 2.25      3 + 0.5 * 8 - 3.5 = 3.5    Q(2) = 5.25

    Where both are set, terminated wins. Fails if a bootstrap, the discount, the learning rate or a count is wrong.
    """
    errors, tables = [[1, 2, 3], [1, 1.75, 1.5]], [[0.5, 1, 1.5, 8], [1, 1.875, 2.25, 8]]
    if end == "truncated":
        errors, tables = [[1, 2, 7], [1, 2.75, 3.5]], [[0.5, 1, 3.5, 8], [1, 2.375, 5.25, 8]]
    agent, args = new_table(script, Chain(), algorithm=algorithm, learning_rate=0.5, gamma=0.5)
    agent.tables[0][3] = [8.0]
    run, rng = Notes(), random.Random(0)
    for episode in range(2):
        script.play_episode(agent, Chain(end), run, rng, args)
        assert [row[0] for row in agent.tables[0]] == tables[episode]
        assert run.td_errors[-3:] == errors[episode]
    assert run.step == 6 and run.episodes == [(3, 6.0), (6, 6.0)]  # (step, return)


def test_the_limit_of_steps_truncates(script):
    """Two steps of the three: Q(1) = 0.5 (2 + 0.5 * 8). Fails if the limit counts as termination, or is off by one."""
    agent, args = new_table(script, Chain(), learning_rate=0.5, gamma=0.5, max_episode_steps=2)
    agent.tables[0][2] = [8.0]
    run = Notes()
    script.play_episode(agent, Chain(), run, random.Random(0), args)
    assert run.step == 2 and agent.tables[0][1] == [3.0]


@pytest.mark.parametrize("drawn, tables", [(0.2, [1.5, 4.0]), (0.7, [2.0, 2.5])])
def test_double_q_learning(script, drawn, tables):
    """One step, truncated, with reward 3 from state 2 to 3; alpha = gamma = 0.5; Q1(2) = 2, Q2(2) = 4.

    Q1(3) = -4, Q2(3) = -4: either table learns towards 3 - 2 = 1, Q1 from 2 to 1.5, or Q2 from 4 to 2.5, as is drawn.
    It acts on the sum, Q1 + Q2 = 6 and -8. Fails if both learn, or always the same one.
    """
    env = Chain("truncated")
    env.reset = lambda: (setattr(env, "at", 2), (2, {}))[1]
    agent, args = new_table(script, env, algorithm="double-q", learning_rate=0.5, gamma=0.5)
    agent.tables = [[[0.0], [0.0], [2.0], [-4.0]], [[0.0], [0.0], [4.0], [-4.0]]]
    assert agent.values(2) == [6.0] and agent.values(3) == [-8.0]
    always = random.Random(0)
    always.random = lambda: drawn
    script.play_episode(agent, env, Notes(), always, args)
    assert [table[2][0] for table in agent.tables] == tables


def test_epsilon_greedy(script):
    """Two of four actions are equally best, epsilon = 0.4: probabilities 0.1, 0.1 + 0.3, 0.1, 0.1 + 0.3.

    Fails if epsilon is turned round, if random actions leave one out, or if ties go to the first.
    """
    rng = random.Random(0)
    draws = [script.epsilon_greedy([1.0, 2.0, -1.0, 2.0], 0.4, rng) for _ in range(20_000)]
    close(np.bincount(draws) / 20_000, [0.1, 0.4, 0.1, 0.4], atol=0.015)
    assert {script.epsilon_greedy([1.0, 2.0, -1.0], 0.0, rng) for _ in range(200)} == {1}
    assert {script.epsilon_greedy([0.0, 0.0, 0.0], 0.0, rng) for _ in range(200)} == {0, 1, 2}


def test_schedules(script):
    """Per episode: 0.8, 0.8 * 0.5 = 0.4, 0.8 * 0.5^2 = 0.2, then the floor of 0.15.

    Linear over half of 1,000 steps, from 0.8 to 0.15: at step 200, 0.8 - 0.65 * 200 / 500 = 0.54.
    The learning rate, from 0.4 to 0 over the whole run: at step 250, 0.4 * 0.75 = 0.3.
    Fails if a schedule has another shape, goes by the wrong clock, or below its end after the last step.
    """
    common = {"epsilon_start": 0.8, "epsilon_min": 0.15, "epsilon_decay": 0.5}
    common |= {"total_timesteps": 1000, "learning_rate": 0.4}
    args = script.Args(**common)
    close(
        [script.schedules(args, 900, episode) for episode in range(4)],
        [(0.8, 0.4), (0.4, 0.4), (0.2, 0.4), (0.15, 0.4)],
    )
    args = script.Args(**common, exploration_fraction=0.5, anneal_lr=True)
    for step, epsilon, alpha in (
        (0, 0.8, 0.4),
        (200, 0.54, 0.32),
        (250, 0.475, 0.3),
        (500, 0.15, 0.2),
        (1010, 0.15, 0),
    ):
        close(script.schedules(args, step, 7), (epsilon, alpha))


def table_of(script, space, **settings):
    """A table for observations from this space, and two actions."""
    env = Chain()
    env.observation_space, env.action_space = space, spaces.Discrete(2, start=5)
    return new_table(script, env, **settings)[0]


def test_rows_of_integers(script):
    """The numbers of an observation are the digits of its row: (2, 1) of 3 x 4 is row 2 * 4 + 1 = 9.

    (1, 0, 1, 2) of 2 x 2 x 2 x 3: 1 * 12 + 0 * 6 + 1 * 3 + 2 = 17. Fails if a space's start or a radix is forgotten.
    """
    agent = table_of(script, spaces.Discrete(4, start=-2))
    assert [agent.state(obs) for obs in (-2, -1, 0, 1)] == [0, 1, 2, 3] and agent.shape == (1, 4, 2)
    agent = table_of(script, spaces.MultiDiscrete([3, 4], start=[0, 5]))
    assert agent.state(np.array([2, 6])) == 9 and agent.shape == (1, 12, 2)
    agent = table_of(script, spaces.MultiDiscrete([[2, 2], [2, 3]]))
    assert agent.state(np.array([[1, 0], [1, 2]])) == 17
    agent = table_of(script, spaces.Tuple((spaces.Discrete(3), spaces.Discrete(4, start=5))))
    assert agent.state((2, 6)) == 9
    assert {agent.state((a, b)) for a in range(3) for b in range(5, 9)} == set(range(12))


def test_rows_of_a_grid(script):
    """A grid of 4 x 4 over [-1, 1] x [0, 8]: bins of 0.5 and of 2. What lies outside goes to the bin at the edge.

    Fails if the grid has a bin more or less, or if an edge is where it should not be.
    """
    box = spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 8.0]), dtype=np.float64)
    agent = table_of(script, box, grid_size=4)
    rows = {(-1.0, 0.0): 0, (-0.51, 1.9): 0, (-0.49, 2.1): 1 * 4 + 1, (0.99, 7.9): 15, (5.0, -3.0): 12, (-9.0, 99.0): 3}
    rows[1.0, 8.0] = 15  # the upper bound belongs to the last bin
    assert {obs: agent.state(np.array(obs, np.float32)) for obs in rows} == rows
    assert table_of(script, box, grid_size=4, grid_low=(-1.0, 0.0), grid_high=(3.0, 8.0)).state(np.array([0.5, 0])) == 4
    agent.tables[0][0], agent.tables[0][15] = [1.0, 0.0], [-1.0, 0.0]
    assert agent.act(np.array([[-1.0, 0.0], [0.99, 7.9]], np.float32)).tolist() == [5, 6]  # actions begin at 5
