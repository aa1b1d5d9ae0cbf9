"""What qlearning.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes above it in `catches`. test_run.py tests the run section.
"""

import math
import os
import pickle
import random
import subprocess
import sys
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import matplotlib.image
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from reference import qlearning as reference
from run_folder import check_evaluation, check_refused, command, kill_and_resume
from tools import catches, close, rehearse

import qlearning

ALGORITHMS = "q-learning", "sarsa", "expected-sarsa", "double-q"

# ------------------------------------------------------------------------------------------------- a lesson, by hand


@catches(
    "q_learning_target, no maximum: max(next_values) -> next_values[0]",
    "q_learning_target, gamma forgotten: discount * max -> max",
    "sarsa_target, takes the maximum: next_values[next_action] -> max(next_values)",
    "expected_sarsa_target, epsilon swapped: (epsilon * average + (1 - epsilon) * max -> "
    "((1 - epsilon) * average + epsilon * max",
    "expected_sarsa_target, leaves the best one out: sum(next_values) / -> sum(sorted(next_values)[:-1]) /",
    "double_q_target, maximum of the other table: other_next_values[best] -> max(other_next_values)",
    "double_q_target, judged by the table that chooses: * other_next_values -> * next_values",
)
def test_targets(script):
    """R = 1, discount = 0.5, and the row of the next state is Q(S', .) = (2, 4):

    Q-learning       1 + 0.5 * max(2, 4) = 3
    Sarsa            A' = 0: 1 + 0.5 * 2 = 2
    expected Sarsa   epsilon = 0.5: pi = (1/4, 3/4), 1 + 0.5 * (2/4 + 4 * 3/4) = 2.75; epsilon = 0 is Q-learning
    double           Q1(S', .) = (2, 4) chooses action 1, Q2(S', .) = (7, 3) judges it: 1 + 0.5 * 3 = 2.5

    A discount of 0 leaves the reward.
    """
    row = [2.0, 4.0]
    assert script.q_learning_target(1.0, 0.5, row) == 3 and script.sarsa_target(1.0, 0.5, row, 0) == 2
    assert script.expected_sarsa_target(1.0, 0.5, row, 0.5) == 2.75
    assert script.expected_sarsa_target(1.0, 0.5, row, 0.0) == 3
    assert script.double_q_target(1.0, 0.5, row, [7.0, 3.0]) == 2.5
    assert script.q_learning_target(1.0, 0.0, row) == script.double_q_target(1.0, 0.0, row, [7.0, 3.0]) == 1


class Chain(gym.Env):
    """States `first` to 3 in a row, one step after the other whatever the action; the step to state n pays n.

    The last step ends the episode (t: terminated, c: cut off, b: both). `kind` makes the rewards.
    """

    observation_space, action_space = spaces.Discrete(4), spaces.Discrete(1)

    def __init__(self, end="t", first=0, kind=float):
        self.end, self.first, self.kind = end, first, kind

    def reset(self, *, seed=None, options=None):
        self.at = self.first
        return self.at, {}

    def step(self, action):
        self.at += 1
        over = self.at == 3
        return self.at, self.kind(self.at), over and self.end in "tb", over and self.end in "cb", {}


def table_for(script, observation_space, action_space, **given):
    """(untrained agent, its Args) for these spaces."""
    args = script.Args(env_id="none", **given)
    envs = SimpleNamespace(single_observation_space=observation_space, single_action_space=action_space)
    return script.make_agent(args, envs), args


def chain(script, tables, *worlds, rng=None, **given):
    """Episodes in Chains from given tables, with alpha = gamma = 0.5: the tables, TD errors, and (return, length)."""
    settings = {"learning_rate": 0.5, "gamma": 0.5} | given
    agent, args = table_for(script, Chain.observation_space, Chain.action_space, **settings)
    agent.tables, errors = [[[q] for q in table] for table in tables], []
    run = SimpleNamespace(step=0, num_episodes=0, log=lambda td_error=None, **_: errors.append(td_error))
    episodes = []
    for world in worlds:
        episodes.append(script.play_episode(agent, world, run, rng or random.Random(0), args))
        assert errors.pop() is None and run.step == sum(length for _, length in episodes)  # epsilon, at the end
    return [[row[0] for row in table] for table in agent.tables], errors, episodes


@catches(
    "play_episode, truncated is treated as terminated: 0.0 if terminated else -> 0.0 if terminated or truncated else",
    "play_episode, terminated bootstraps: 0.0 if terminated else args.gamma -> args.gamma",
    "play_episode, truncated wins: 0.0 if terminated else -> 0.0 if terminated and not truncated else",
    "play_episode, learning rate ignored: += learning_rate * td_error -> += td_error",
    "play_episode, wrong sign: target - q[state][action] -> q[state][action] - target",
    "play_episode, next state's row updated: q[state][action] += -> q[next_state][action] +=",
    "play_episode, errors with turned signs: td_error=abs(td_error) -> td_error=-td_error",
    "play_episode, step not counted: run.step += 1 -> run.step += 0",
    "play_episode, return of the last step: episode_return += reward -> episode_return = reward",
    "play_episode, limit ignored: range(args.max_episode_steps or 27_000) -> range(9)",
)
def test_an_episode(script):
    """0 -> 1 -> 2 -> 3 with rewards 1, 2, 3. alpha = gamma = 0.5. All Q are 0 to begin with, but Q(3) = 8.

    error   terminated: 3 has no future          truncated: nobody plays on, but 3 is worth 8
    0 -> 1  1 + 0.5 * 0 - 0 = 1   Q(0) = 0.5     the same
    1 -> 2  2 + 0.5 * 0 - 0 = 2   Q(1) = 1       the same
    2 -> 3  3 - 0           = 3   Q(2) = 1.5     3 + 0.5 * 8 - 0 = 7   Q(2) = 3.5
    Once more:
    0 -> 1  1 + 0.5 * 1   - 0.5 = 1      Q(0) = 1
    1 -> 2  2 + 0.5 * 1.5 - 1   = 1.75   Q(1) = 1.875     2 + 0.5 * 3.5 - 1 = 2.75   Q(1) = 2.375
    2 -> 3  3 - 1.5             = 1.5    Q(2) = 2.25      3 + 0.5 * 8 - 3.5 = 3.5    Q(2) = 5.25

    Where both are set, terminated wins. A limit of two steps truncates: Q(1) = 0.5 (2 + 0.5 * 8) = 3 if Q(2) = 8.
    """
    terminated = [1, 1.875, 2.25, 8], [1, 2, 3, 1, 1.75, 1.5]
    truncated = [1, 2.375, 5.25, 8], [1, 2, 7, 1, 2.75, 3.5]
    for algorithm in ALGORITHMS[:3]:  # they agree: there is one action
        for end, (table, errors) in {"t": terminated, "c": truncated, "b": terminated}.items():
            tables, found, episodes = chain(script, [[0, 0, 0, 8.0]], Chain(end), Chain(end), algorithm=algorithm)
            assert (tables, found, episodes) == ([table], errors, [(6.0, 3), (6.0, 3)])
    tables, _, episodes = chain(script, [[0, 0, 8.0, 0]], Chain(), max_episode_steps=2)
    assert episodes == [(3.0, 2)] and tables == [[0.5, 3, 8, 0]]
    for kind in (Decimal, np.float32, lambda x: np.array([x])):  # whatever numbers the rewards are
        assert chain(script, [[0, 0, 0, 8.0]], Chain(kind=kind))[0] == [[0.5, 1, 1.5, 8]]


@catches(
    "play_episode, always the first table: random() < 0.5 -> random() < 2",
    "play_episode, judges its own choice: q[next_state], other[next_state] -> q[next_state], q[next_state]",
    "play_episode, another table's error: td_error = target - q -> td_error = target - agent.tables[0]",
)
def test_double_q_learning(script):
    """One step, truncated, with reward 3 from state 2 to 3; alpha = gamma = 0.5; Q1 = 2, -4 and Q2 = 4, -8.

    A number below 0.5 is drawn: Q1 learns towards 3 - 4 = -1, from 2 to 0.5. Else Q2 towards 3 - 2 = 1, from 4 to 2.5.
    """
    for drawn, values in ((0.2, [0.5, 4.0]), (0.7, [2.0, 2.5])):
        rng = SimpleNamespace(random=lambda: drawn, randrange=lambda n: 0)
        tables = [0, 0, 2.0, -4.0], [0, 0, 4.0, -8.0]
        tables, _, _ = chain(script, tables, Chain("c", first=2), rng=rng, algorithm="double-q")
        assert [table[2] for table in tables] == values


@catches(
    "epsilon_greedy, the wrong way round: rng.random() < epsilon -> rng.random() > epsilon",
    "epsilon_greedy, ties go to the first: if values.count(best) == 1 -> if True",
    "epsilon_greedy, one action is never explored: rng.randrange(len(values)) -> rng.randrange(len(values) - 1)",
)
def test_epsilon_greedy(script):
    """Two of four actions are equally best, epsilon = 0.4: probabilities 0.1, 0.1 + 0.3, 0.1, 0.1 + 0.3."""
    rng = random.Random(0)
    draws = [script.epsilon_greedy([1.0, 2.0, -1.0, 2.0], 0.4, rng) for _ in range(20_000)]
    close(np.bincount(draws) / 20_000, [0.1, 0.4, 0.1, 0.4], atol=0.015)


@catches(
    "schedules, decays per step: args.epsilon_decay**episode -> args.epsilon_decay**step",
    "schedules, falls below its floor: max(args.epsilon_min, -> max(0.0,",
    "schedules, the linear one ignores its fraction: args.exploration_fraction * -> 1 *",
    "schedules, by steps whatever is given: done, total = episode, args.num_episodes -> pass",
)
def test_schedules(script):
    """Per episode: 0.8, 0.8 * 0.5 = 0.4, 0.8 * 0.5^2 = 0.2, then the floor of 0.15.

    Linear over half of 1,000 steps, from 0.8 to 0.15: at step 200, 0.8 - 0.65 * 200 / 500 = 0.54.
    The learning rate, from 0.4 to 0 over the whole run: at step 200, 0.4 * 0.8 = 0.32.

    By episodes, of ten: after 2, epsilon is 0.8 - 0.65 * 2 / 5 = 0.54 and the learning rate 0.4 * 0.8, whatever
    the steps.
    """
    common = {"epsilon_start": 0.8, "epsilon_min": 0.15, "epsilon_decay": 0.5, "learning_rate": 0.4}
    args = script.Args(**common)
    close([script.schedules(args, 900, n) for n in range(4)], [(0.8, 0.4), (0.4, 0.4), (0.2, 0.4), (0.15, 0.4)])
    args = script.Args(**common, exploration_fraction=0.5, anneal_lr=True, total_timesteps=1000)
    close([script.schedules(args, step, 7) for step in (0, 200, 1010)], [(0.8, 0.4), (0.54, 0.32), (0.15, 0)])
    args = script.Args(**common, exploration_fraction=0.5, anneal_lr=True, total_timesteps=1000, num_episodes=10)
    close([script.schedules(args, 999, n) for n in (0, 2, 10)], [(0.8, 0.4), (0.54, 0.32), (0.15, 0)])


@catches(
    "QTable.state, digits in the wrong radix: row * num_bins -> row * 2",
    "make_q_table, start of a Discrete forgotten: range(part.start + 1, part.start + part.n) -> range(1, part.n)",
    "make_q_table, start of a MultiDiscrete forgotten: range(start + 1, start + n) -> range(1, n)",
)
def test_rows_of_integers(script):
    """The numbers of an observation are the digits of its row: (2, 1) of 3 x 4 is row 2 * 4 + 1 = 9.

    (1, 0, 1, 2) of 2 x 2 x 2 x 3: 1 * 12 + 0 * 6 + 1 * 3 + 2 = 17.
    """
    table = lambda space: table_for(script, space, spaces.Discrete(2))[0]
    agent = table(spaces.Discrete(4, start=-2))
    assert [agent.state(obs) for obs in (-2, -1, 0, 1)] == [0, 1, 2, 3] and agent.shape == (1, 4, 2)
    agent = table(spaces.MultiDiscrete([3, 4], start=[0, 5]))
    assert agent.state(np.array([2, 6])) == 9 and agent.shape == (1, 12, 2)
    assert table(spaces.MultiDiscrete([[2, 2], [2, 3]])).state(np.array([[1, 0], [1, 2]])) == 17
    agent = table(spaces.Tuple((spaces.Discrete(3), spaces.Discrete(4, start=5))))
    assert agent.state((2, 6)) == 9
    agent.tables[0][9] = [0.0, 1.0]
    assert agent.act((np.array([2, 0]), np.array([6, 5]))).tolist() == [1, 0]


@catches(
    "box_edges, one bin less: args.grid_size + 1 -> args.grid_size",
    "box_edges, the space's bounds whatever is given: if args.grid_high is None -> if True",
    "QTable.act, actions begin at 0:  + self.first_action -> ",
    "QTable.act, the worst actions: np.argmax -> np.argmin",
    "QTable.act, one observation for a batch: if np.ndim(first) != 1 + len(self.observation_shape): -> if False:",
)
@given(low=st.floats(-5, 5), size=st.integers(1, 7), number=st.floats(-12, 12))
def test_rows_of_a_grid(script, low, size, number):
    """A grid of 4 x 4 over [-1, 1] x [0, 8]: bins of 0.5 and of 2. What lies outside goes to the bin at the edge.

    By chance: the bin of x is floor((x - low) / (high - low) * size), cut to the grid.
    """
    table = lambda low, high, **given: table_for(script, spaces.Box(low, high, dtype=np.float64), ACTIONS, **given)[0]
    ACTIONS, lows, highs = spaces.Discrete(2, start=5), np.array([-1.0, 0.0]), np.array([1.0, 8.0])
    agent = table(lows, highs, grid_size=4)
    rows = {(-1.0, 0.0): 0, (-0.51, 1.9): 0, (-0.49, 2.1): 1 * 4 + 1, (0.99, 7.9): 15, (5.0, -3.0): 12, (-9.0, 99.0): 3}
    assert {obs: agent.state(np.array(obs, np.float32)) for obs in rows} == rows
    try:
        agent.act(np.array([0.99, 7.9]))
        raise AssertionError("taken for a batch")
    except ValueError as error:
        assert "act(np.array([obs]))[0]" in str(error)
    assert agent.state(highs) == 15  # the upper bound belongs to the last bin
    agent.tables[0][0], agent.tables[0][15] = [1.0, 0.0], [-1.0, 0.0]
    assert agent.act(np.array([[-1.0, 0.0], [0.99, 7.9]], np.float32)).tolist() == [5, 6]  # actions begin at 5
    assert table(lows, highs, grid_size=4, grid_low=(-1, 0), grid_high=(3, 8)).state(np.array([0.5, 0])) == 4
    place = (number - low) / 3 * size
    bin = table(np.array([low]), np.array([low + 3]), grid_size=size).state(np.array([number]))
    on_an_edge = abs(place - round(place)) < 1e-9  # there rounding decides
    assert on_an_edge or bin == np.clip(math.floor(place), 0, size - 1)


# ------------------------------------------------------------------------- against a slow and obvious version of it


class World(gym.Env):
    """Successors and rewards (np.float32) drawn at random; a third of the steps end an episode, in all ways."""

    observation_space, action_space = spaces.Discrete(4, start=3), spaces.Discrete(3, start=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(4))
        return self.at + 3, {}

    def step(self, action):
        reward = np.float32(self.np_random.normal() + (self.at + action) % 3)
        self.at = int(self.np_random.integers(4))
        terminated, truncated = self.np_random.random(2) < 0.2
        return self.at + 3, reward, bool(terminated), bool(truncated), {}


COMMON = {"total_timesteps": 300, "learning_rate": 0.3, "gamma": 0.8, "epsilon_decay": 0.97, "seed": 7}
TRAININGS = [{"algorithm": algorithm} for algorithm in ALGORITHMS]
TRAININGS += [{"anneal_lr": True, "exploration_fraction": 0.5, "algorithm": algorithm} for algorithm in ALGORITHMS]


@cache
def slow_training(number):
    """What the slow version gives, with the script as it is: `script` may have a mistake."""
    return reference.train(qlearning.Args(**COMMON | TRAININGS[number]), World)


@catches(
    "play_episode, draws another action than it updated with: action = next_action -> action = None",
    "play_episode, updated with another action: q[next_state], next_action) -> q[next_state], 0)",
    "play_episode, the action is chosen before the update: target = q_learning_target( -> "
    "next_action = epsilon_greedy(q[next_state], epsilon, rng)\n            target = q_learning_target(",
    "play_episode, rewards as they come: np.asarray(reward, float).item() -> reward",
    "play_episode, actions begin at 0: env.step(action + agent.first_action) -> env.step(action)",
    "QTable.values, acts on one of its tables: if len(self.tables) == 1: -> if True:",
    "play_episode, epsilon of the step before: = schedules(args, run.step, -> = schedules(args, run.step - 1,",
)
def test_training(script):
    """300 steps: every entry of the tables, every TD error and return is that of tests/reference/qlearning.py. The
    numbers of the table remain Python's: a checkpoint would not keep np.float32."""
    for number, options in enumerate(TRAININGS):
        tables, errors, episodes = slow_training(number)
        run = rehearse(script, World, **COMMON | options)
        close(run.agent.tables, tables)
        close(run.all_logged["td_error"], errors)
        close(list(run.episodes.values()), np.transpose(episodes))
        assert {type(q) for table in run.agent.tables for row in table for q in row} == {float}


# -------------------------------------------------------------------------------- worlds whose right answer is known


@pytest.mark.parametrize("algorithm, returns", zip(ALGORITHMS, [[-13], [-17, -15], [-17, -15], [-13, -15, -17]]))
def test_the_cliff(script, algorithm, returns):
    """Q-learning finds the shortest way, 13 steps along the edge of the cliff. Sarsa, which learns what a policy that
    explores is worth, keeps away from it (Sutton & Barto, example 6.6)."""
    given = {"learning_rate": 0.5, "anneal_lr": True, "gamma": 1.0, "total_timesteps": 20_000, "epsilon_start": 0.1}
    given |= {"epsilon_min": 0.1} if "sarsa" in algorithm else {"epsilon_start": 1.0}
    run = rehearse(script, lambda: gym.make("CliffWalking-v1", max_episode_steps=500), algorithm=algorithm, **given)
    assert run.evaluations["return_mean"][-1] in returns


@catches(
    "set_total, the steps decide: total is not None -> False",
    "set_total, an episode too many: * total / done -> * (total + 1) / done",
)
def test_a_run_of_episodes(script):
    """Seven episodes of three steps are a run, whatever total_timesteps says; a tenth of it is three steps."""
    given = {"num_episodes": 7, "eval_every": 0, "epsilon_decay": 0.5, "gamma": 0.5}
    for steps in (5, 10**6):
        run = rehearse(script, Chain, total_timesteps=steps, **given)
        assert run.num_episodes == 7 and run.step == 21 and run.is_finished()
        assert run.evaluations["step"][-3:] == [15, 18, 21] and run.metrics["episodes"][-1] == 7
        close(run.all_logged["epsilon"], [max(0.05, 0.5**n) for n in range(7)])


# ------------------------------------------------------------------------------------------------------- whole runs


@catches(
    "make_table_envs, returns of the wrapper: wrappers.insert(0, partial(TrueReturn, -> "
    "wrappers.append(partial(TrueReturn,",
    "train, returns of the wrapper: true_returns(run.envs, args, [episode_return]) -> [episode_return]",
)
def test_returns_before_a_wrapper_changes_rewards(script, tmp_path, monkeypatch):
    """The wrapper pays 7 for each of nine steps, from which the table learns; -1 each, or -100, is what counts."""
    monkeypatch.setattr(script.Run, "draw_curve", lambda run: None)
    monkeypatch.chdir(tmp_path)
    flags = "--wrappers gymnasium.wrappers.ClipReward(min_reward=7) --max-episode-steps 9 --total-timesteps 100"
    assert command(script, f"{flags} --run-dir run --no-progress") == 0
    state = script.read_state("run/checkpoint.npz")
    assert state["agent"]["q"].max() > 3 and state["run"]["episodes"]["return"][-1] <= -9
    assert state["run"]["evaluations"]["return_mean"][-1] <= -9


RUN = "--total-timesteps 900 --max-episode-steps 60 --checkpoint-every 300 --eval-every 400 --eval-episodes 2 "
RUN += "--exploration-fraction 0.5 --no-anneal-lr --algorithm double-q"


@catches(
    "QTable.state_dict, the first table only: np.array(self.tables) -> np.array(self.tables[:1] * len(self.tables))",
    "train, the generator goes on: env, rng = new_env(run)\n    draw -> env, _ = new_env(run)\n    draw",
)
def test_killed_resumed_evaluated(script, tmp_path, monkeypatch, capsys):
    """--evaluate plays the best table, in other episodes than those that chose it, and changes nothing."""
    monkeypatch.setattr(script, "draw_values", lambda *_: None)
    kill_and_resume(script, RUN, 5, monkeypatch, tmp_path)
    check_evaluation(script, capsys)
    assert command(script, "--resume run --total-timesteps 1800") == 2  # epsilon would jump up again


# Unpickling this creates a file named `executed` in the working directory.
Bomb = type("Bomb", (), {"__reduce__": lambda self: (exec, ("open('executed', 'w').close()",))})


@catches(
    "read_state, executes what it reads: allow_pickle=False -> allow_pickle=True",
    "QTable.load_state_dict, any shape: q.shape != self.shape or -> False or",
    "QTable.load_state_dict, any numbers: not np.isfinite(q).all() -> False",
)
def test_files(script, tmp_path, monkeypatch, capsys):
    """The run's own numbers survive a file bit for bit. A damaged or foreign one is refused, and executes nothing."""
    monkeypatch.chdir(tmp_path)
    path, q = tmp_path / "best.npz", np.random.default_rng(0).normal(size=(1, 4, 4))
    numbers = {"step": 3, "seconds": 0.1 + 0.2, "returns": [-1e-300, 10**12, math.pi], "none": {}}
    numbers["metrics"] = {"step": [1], "loss": [math.nan, math.inf]}
    script.write_file(path, lambda file: script.write_state({"agent": {"q": q}, "run": numbers}, file))
    state = script.read_state(path)
    assert str(state["run"]) == str(numbers) and (state["agent"]["q"] == q).all()
    agent, good = table_for(script, spaces.Discrete(4), spaces.Discrete(4))[0], dict(np.load(path))
    damages = [{"q": np.array([Bomb()], object)}, {"rest": np.array(Bomb(), object)}, {"q": np.zeros((1, 4, 2))}]
    damages += [{"q": np.full((1, 4, 4), np.nan)}, {"q": np.full((1, 4, 4), "one")}, {"rest": np.array("[1]")}]
    files = [pickle.dumps(Bomb()), b"", b"numbers", path.read_bytes()[:300]]
    for damage in [*damages, *files]:
        path.write_bytes(damage) if isinstance(damage, bytes) else np.savez(path, **good | damage)
        try:
            script.read_parts(path, {"agent": agent})
            raise AssertionError(f"taken: {damage}")
        except script.UserError as error:
            assert "best.npz" in str(error) and not Path("executed").exists()


def test_pictures(script, tmp_path, capsys):
    """There is one of a grid world and of a grid of two dimensions, also where next to nothing has been learnt."""
    env, small = gym.make("CliffWalking-v1"), spaces.Discrete(24)
    half = gym.wrappers.TransformObservation(env, lambda obs: obs // 2, small)  # not to be taken for the world itself
    for env in (half, gym.make("FrozenLake8x8-v1"), gym.make("MountainCar-v0")):
        agent, args = table_for(script, env.observation_space, env.action_space, algorithm="double-q")
        agent.tables[0][0][0] = 0.5
        script.draw_values(tmp_path, args, agent, env)
        assert (tmp_path / "values.png").exists() == (env is not half)
    picture = matplotlib.image.imread(tmp_path / "values.png")
    assert len(np.unique(picture[::5, ::5].reshape(-1, picture.shape[2]), axis=0)) > 20


@pytest.mark.slow
def test_it_needs_no_torch(script, tmp_path):
    """A whole run where torch cannot be imported: training, all files, --evaluate."""
    code = "from importlib.machinery import PathFinder as P; find = P.find_spec; "
    code += "P.find_spec = lambda name, *rest: None if name.split('.')[0] == 'torch' else find(name, *rest); "
    code += (
        "import qlearning as q; q.train(q.tuned(total_timesteps=2000, run_dir='run', eval_episodes=2)); q.load('run')"
    )
    where = {**os.environ, "PYTHONPATH": str(Path(script.__file__).parent)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=where, check=True)
    names = "config.json metrics.csv evaluations.csv episodes.csv learning_curve.png values.png checkpoint.npz models "
    names += "summary.json"
    assert {path.name for path in Path(tmp_path, "run").iterdir()} == set(names.split())


def test_refused(script, tmp_path, monkeypatch, capsys):
    refused = {"--env-id Pendulum-v1": "Discrete", "--env-kwargs [": "CliffWalking-v1 with --env-kwargs ["}
    refused |= {"--env-id MountainCar-v0 --grid-low 1": "grid_low", "--env-id CartPole-v1": "--grid-low"}
    refused["--env-id MountainCar-v0 --grid-size 9999"] = "too large"
    refused["--grid-size 0"] = refused["--num-episodes 0"] = refused["--exploration-fraction 0"] = "above 0"
    refused["--exploration-fraction -0.5"] = "exploration_fraction must be at least 0"
    refused["--epsilon-start 0"] = "from epsilon_start to epsilon_min"
    check_refused(script, refused, tmp_path, monkeypatch, capsys)
    for space in (spaces.Dict(large=spaces.Discrete(2)), spaces.MultiDiscrete([10**9, 10**9])):
        with pytest.raises(script.UserError, match="large"):
            table_for(script, space, spaces.Discrete(2))


@catches(
    "play_episode, NaN goes on: if not math.isfinite(td_error): -> if False:",
    "QTable.state, a NaN gets a row: if run and not math.isfinite(sum(numbers)): -> if False:",
    "make_table_envs, the user's own error is hidden: except MISTYPED -> except Exception",
)
def test_faults_of_an_environment(script, monkeypatch):
    """A NaN ends the run with a line that names its field; what the environment raises keeps its traceback."""
    for obs, reward, field in ((3, math.nan, "reward"), (np.float64(math.nan), 1.0, "observation")):
        monkeypatch.setattr(World, "step", lambda world, action: (obs, reward, False, False, {}))
        try:
            rehearse(script, World, total_timesteps=9, max_episode_steps=9)
            raise AssertionError("it went on with a NaN")
        except (script.UserError, ValueError, TypeError) as error:
            assert f"{field} is NaN" in str(error)
    gym.register("Broken-v0", lambda **kwargs: {}["missing"])
    try:
        script.make_envs(script.Args(env_id="Broken-v0"), 1)
        raise AssertionError("it was made")
    except KeyError as error:
        assert error.args == ("missing",)
    except script.UserError:
        raise AssertionError("his error is hidden") from None
