"""qlearning.py in worlds whose right answer is known: what its greedy policies are worth is computed, not played."""

import json
import random
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import run_envs  # noqa: F401  (registers its environments)

from benchmarks.qlearning_exact import best_return, exact_return, optimal_values
from tests.probes.table_envs import Bias, Notes, new_table

ALGORITHMS = ("q-learning", "sarsa", "expected-sarsa", "double-q")
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
NOT_SLIPPERY = {"env_kwargs": '{"is_slippery": false}'}


def learn(script, env_id, **settings):
    """Train with the settings of TUNED, but without a folder. Returns the Run."""

    class Rehearsal(script.Run):
        open_folder = write_row = write_checkpoint = draw_curve = lambda self: None
        finish = lambda self: self

        def write_evaluation(self):
            mean, std = script.evaluate(self.agent, self.args, self.args.eval_episodes)
            self.evaluations.append((self.step, self.seconds, mean, std))

    quiet = {"progress": False, "eval_every": 10**9, "eval_episodes": 1}
    with mock.patch.multiple(script, Run=Rehearsal, draw_values=lambda *_: None):
        return script.train(script.tuned(env_id=env_id, **quiet | settings))


def value(run, steps):
    """The exact return of the final greedy policy over an episode of at most `steps` steps."""
    policy = np.array(run.agent.tables).sum(0).argmax(1)
    return exact_return(gym.make(run.args.env_id, **json.loads(run.args.env_kwargs)), policy, steps)


@each_algorithm
def test_frozen_lake_without_slipping(script, algorithm):
    """Fails if the greedy policy misses the goal, or values on its way are not gamma to the steps that are left."""
    run = learn(script, "FrozenLake-v1", algorithm=algorithm, total_timesteps=20_000, **NOT_SLIPPERY)
    assert value(run, 100) == 1
    if algorithm == "q-learning":  # the others learn of a policy that explores
        table = run.agent.tables[0]
        assert max(table[14]) == pytest.approx(1, abs=1e-3) and max(table[0]) == pytest.approx(0.99**5, abs=0.01)


@pytest.mark.parametrize("algorithm, least", [("q-learning", -13), ("double-q", -17)])
def test_cliff_walking(script, algorithm, least):
    """Fails if Q-learning does not find the shortest way, 13 steps along the edge of the cliff, or if double Q, which
    has half as many steps for each of its tables, needs more than the 17 of the safe way.
    """
    assert value(learn(script, "CliffWalking-v1", algorithm=algorithm), 1000) >= least


def test_sarsa_keeps_away_from_the_cliff(script):
    """Fails if Sarsa learns the values of the best policy rather than of the one that explores (example 6.6)."""
    constant = {"epsilon_start": 0.1, "epsilon_min": 0.1, "total_timesteps": 60_000}
    assert -21 <= value(learn(script, "CliffWalking-v1", algorithm="sarsa", **constant), 1000) <= -15


OPTIONS = {
    "linear exploration": {"exploration_fraction": 0.5},
    "slower exploration": {"epsilon_decay": 0.995},
    "not annealed": {"anneal_lr": False},
    "small steps": {"learning_rate": 0.2},
    "discounted": {"gamma": 0.95},
    **{algorithm: {"algorithm": algorithm} for algorithm in ALGORITHMS[1:]},
}


@pytest.fixture(scope="module")
def default_run():
    """CliffWalking with the settings of TUNED."""
    import qlearning

    return learn(qlearning, "CliffWalking-v1")


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_learns(script, option, default_run):
    """Fails if an option keeps CliffWalking from being learnt (random play: far below -1000), or has no effect."""
    run = learn(script, "CliffWalking-v1", **OPTIONS[option])
    assert run.evaluations[-1][2] >= -21
    assert run.episodes != default_run.episodes


def test_taxi(script):
    """Fails if the greedy policy is clearly worse than the optimum of 7.93."""
    assert value(learn(script, "Taxi-v4", total_timesteps=100_000), 200) > 7.5


def test_double_q_is_less_biased(script):
    """Fails if double Q-learning is as fond of the maximum of noise as Q-learning is (example 6.7, figure 6.5)."""
    shares = {}
    constant = {"gamma": 1.0, "epsilon_start": 0.1, "epsilon_min": 0.1}
    for algorithm in ("q-learning", "double-q"):
        lefts = 0
        for seed in range(100):
            env, run, rng = Bias(), Notes(), random.Random(seed)
            env.reset(seed=seed)
            agent, args = new_table(script, env, algorithm=algorithm, **constant)
            for _ in range(100):
                script.play_episode(agent, env, run, rng, args)
            lefts += np.argmax(agent.values(0)) < 5
        shares[algorithm] = lefts / 100
    assert shares["q-learning"] > shares["double-q"] + 0.1, shares


KINDS = {
    "Discrete": ("Match-v0", {"observation": "discrete"}, {}),
    "MultiDiscrete": ("Match-v0", {"observation": "multidiscrete"}, {}),
    "Box of integers": ("Match-v0", {"observation": "matrix"}, {"grid_size": 6}),
    "Box": ("Match-v0", {"observation": "vector"}, {"grid_size": 2}),
    "Tuple": ("Twins-v0", {"kind": "tuple"}, {}),
    "Box without bounds": (
        "Twins-v0",
        {"kind": "unbounded"},
        {"grid_size": 2, "grid_low": (0.0, 0.0), "grid_high": (1.0, 2.0)},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_observation(script, kind):
    """Fails if a number in the observation does not reach the table, or an action arrives without its offset."""
    env_id, kwargs, settings = KINDS[kind]
    few = {"gamma": 0.0, "learning_rate": 0.3, "total_timesteps": 4000, "eval_episodes": 20}
    run = learn(script, env_id, env_kwargs=json.dumps(kwargs), **few | settings)
    assert run.evaluations[-1][2:] == (1, 0)


@pytest.mark.slow
@each_algorithm
def test_taxi_with_the_tuned_settings(script, algorithm):
    """Fails if an algorithm does not come close to the optimum of 7.93; Sarsa, which expects to stumble, less so."""
    assert value(learn(script, "Taxi-v4", algorithm=algorithm), 200) >= (7.8 if algorithm == "q-learning" else 7.3)


@pytest.mark.slow
def test_slippery_frozen_lake(script):
    """Fails if the learning rate is not annealed well enough for the values of a world of chance to settle."""
    run = learn(script, "FrozenLake-v1")
    lake = gym.make("FrozenLake-v1")
    assert best_return(lake, 100) >= value(run, 100) >= 0.72
    assert np.abs(np.array(run.agent.tables[0]).max(1) - optimal_values(lake, run.args.gamma).max(0)).max() < 0.05


@pytest.mark.slow
def test_mountain_car_on_a_grid(script):
    """Fails if a grid over a Box does not let the car learn to leave the valley (random play: -200)."""
    run = learn(script, "MountainCar-v0", total_timesteps=500_000, eval_episodes=50)
    assert run.evaluations[-1][2] > -175
