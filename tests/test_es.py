"""What es.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes that stand above it in `catches`. What es.py shares with ppo.py, the
run section above all, is the same text there (test_shared_code.py) and has its tests in test_ppo.py and test_run.py.
"""

import math
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from reference import es as reference
from run_folder import check_evaluation, check_refused, command, content, kill_and_resume
from tools import Chance, Probe, Walk, catches, close, rehearse

import es

# ------------------------------------------------------------------------------------------------- a lesson, by hand


@catches(
    "make_candidates, all plus, then all minus: axis=1 -> axis=0",
    "make_candidates, no mirror image: theta - sigma * noise] -> theta + sigma * noise]",
    "make_candidates, sigma forgotten: [theta + sigma * noise -> [theta + noise",
)
def test_candidates_are_mirrored(script):
    """theta = (1, 2), sigma = 0.5: theta ± 0.5 (1, 0) and theta ± 0.5 (2, -1), the two of a pair side by side."""
    candidates = script.make_candidates(np.array([1.0, 2.0]), np.array([[1.0, 0.0], [2.0, -1.0]]), 0.5)
    close(candidates, [[1.5, 2], [0.5, 2], [2, 1.5], [0, 2.5]])


@catches(
    "es_gradient, without the mirror image: (plus - minus) -> plus",
    "es_gradient, descends: (plus - minus) -> (minus - plus)",
    "es_gradient, sigma forgotten: (len(fitnesses) * sigma) -> len(fitnesses)",
    "es_gradient, a sum and no mean: (len(fitnesses) * sigma) -> sigma",
    "es_gradient, divided by the pairs: (len(fitnesses) -> (len(noise)",
    "es_gradient, signs forgotten: (plus - minus) -> (plus + minus)",
    "es_gradient, sigma squared: * sigma) -> * sigma**2)",
    "es_gradient, halves instead of pairs: reshape(-1, 2).T -> reshape(2, -1)",
)
def test_gradient(script):
    """1/(N sigma) sum_i F_i eps_i, sigma = 0.5.

    One pair, fitnesses 1 and 3 of eps = 1 and -1:   1 x 1 + 3 x (-1) = -2, over 2 x 0.5.
    Two pairs, 4, 1 of ±(1, 0) and 0, 2 of ±(1, 3):  (3 (1, 0) - 2 (1, 3)) / (4 x 0.5) = (1, -6) / 2.

    Of a quadratic function, -1/2 (x - c)ᵀ A (x - c), the directions sqrt(3) e_k, for which sum eps eps' / 3 = 1, give
    the exact gradient, -A (theta - c) = (0.05, -2.8, 5.31).
    """
    close(script.es_gradient(np.array([1.0, 3.0]), np.ones((1, 1)), 0.5), [-2.0])
    noise = np.array([[1.0, 0.0], [1.0, 3.0]])
    close(script.es_gradient(np.array([4.0, 1.0, 0.0, 2.0]), noise, 0.5), [0.5, -3.0])
    A, c = np.array([[2.0, 0.5, 0], [0.5, 1.0, -0.3], [0, -0.3, 3.0]]), np.array([1.0, -2.0, 0.5])
    theta, noise = np.array([0.3, 0.7, -1.0]), math.sqrt(3) * np.eye(3)
    candidates = script.make_candidates(theta, noise, 0.4) - c
    close(script.es_gradient([-0.5 * x @ A @ x for x in candidates] * np.ones(6), noise, 0.4), -A @ (theta - c))


@catches(
    "centered_ranks, ranks by order: ranks = (smaller + not_larger - 1) / 2 -> ranks = returns.argsort().argsort()",
    "centered_ranks, the lowest rank of equals: (smaller + not_larger - 1) / 2 -> smaller",
    "centered_ranks, by N: (len(returns) - 1) -> len(returns)",
)
def test_ranks(script):
    """10, 30, 20, 40 have ranks 0, 2, 1, 3 of 3, minus 1/2. Equal returns share: in 5, 5, 1, 9 the fives ranks 1 and 2,
    1.5 / 3 - 1/2 = 0; in 7, 7, 7, 0 the sevens ranks 1, 2 and 3, 2 / 3 - 1/2.
    """
    close(script.centered_ranks(np.array([10, 30, 20, 40])), [-1 / 2, 1 / 6, -1 / 6, 1 / 2])
    close(script.centered_ranks(np.array([5, 5, 1, 9])), [0, 0, -1 / 2, 1 / 2])
    close(script.centered_ranks(np.array([7, 7, 7, 0])), [1 / 6, 1 / 6, 1 / 6, -1 / 2])


@catches(
    "shape_fitness, not standardised: (returns - returns.mean()) / (returns.std() or 1.0) -> returns",
    "shape_fitness, sample deviation: returns.std() -> returns.std(ddof=1)",
    "shape_fitness, divided by 0: (returns.std() or 1.0) -> returns.std()",
    "shape_fitness, mean not taken away: (returns - returns.mean()) -> returns",
    "shape_fitness, eight of 0.07 x 100: round(elite * len(returns), 6) -> elite * len(returns)",
    "shape_fitness, rounded down: math.ceil -> math.floor",
    "shape_fitness, counted from the worst of the elite: [-num_elite - 1] -> [-num_elite]",
    "shape_fitness, away from the best: np.maximum(fitnesses - best_outside, 0) -> "
    "fitnesses * (fitnesses > best_outside)",
)
def test_fitness(script):
    """Standardised 1, 3, 3, 5: mean 3, variance (4 + 0 + 0 + 4) / 4 = 2. An elite of half counts from the third best.

    0.07 of a hundred are seven, though 0.07 * 100 is a little more in floating point; of four, 0.3 (1.2) are two.
    """
    returns = np.array([1.0, 3.0, 2.0, 6.0])
    close(script.shape_fitness(np.array([1.0, 3.0, 3.0, 5.0]), "standardized"), np.array([-2, 0, 0, 2]) / math.sqrt(2))
    close(script.shape_fitness(np.full(4, 3.3), "standardized"), np.zeros(4))
    close(script.shape_fitness(returns, "raw"), returns)
    close(script.shape_fitness(returns, "raw", elite=0.5), [0, 1, 0, 4])  # 3 - 2 and 6 - 2
    close(script.shape_fitness(returns, "raw", elite=0.3), [0, 1, 0, 4])
    close(script.shape_fitness(returns, "centered-rank", elite=0.25), [0, 0, 0, 1 / 3])  # 1/2 - 1/6
    close(script.shape_fitness(-returns, "raw", elite=0.25), [1, 0, 0, 0])  # -1 - (-2): never away from the best
    close(script.shape_fitness(np.arange(100.0), "raw", elite=0.07)[-8:], [0, 1, 2, 3, 4, 5, 6, 7])


@catches(
    "ars_gradient, top directions by their mean: pairs.max(1) -> pairs.mean(1)",
    "ars_gradient, by their difference: pairs.max(1) -> abs(pairs[:, 0] - pairs[:, 1])",
    "ars_gradient, deviation of all returns: pairs[top].std() -> pairs.std()",
    "ars_gradient, sample deviation: pairs[top].std() -> pairs[top].std(ddof=1)",
    "ars_gradient, divided by the candidates: (len(top) * -> (2 * len(top) *",
    "ars_gradient, the worst directions: -pairs.max -> pairs.max",
    "ars_gradient, noise of other directions: noise[top] -> noise[: len(top)]",
)
def test_ars(script):
    """Pairs (4, 0), (1, 2), (0, 3), (-20, 2.5): their better returns are 4, 2, 3, 2.5, the best two those of the first
    and the third. The returns used, 4, 0, 0, 3: mean 1.75, variance (2.25² + 2 x 1.75² + 1.25²) / 4 = 3.1875.

        (4 (1, 0) - 3 (1, 1)) / (2 sqrt(3.1875)) = (1, -3) / 3.570714

    All four: 4 (1, 0) - (0, 1) - 3 (1, 1) - 22.5 (2, 0) = (-44, -4); mean -7.5 / 8, variance 436.25 / 8 - 0.9375² =
    53.652344; 4 x sqrt(53.652344) = 29.299104.
    """
    returns = np.array([4.0, 0, 1, 2, 0, 3, -20, 2.5])
    noise = np.array([[1.0, 0], [0, 1], [1, 1], [2, 0]])
    close(script.ars_gradient(returns, noise, 2), [0.280056, -0.840168])
    close(script.ars_gradient(returns, noise, None), [-1.501753, -0.136523])


@catches(
    'make_optimizer, downhill: True, "fused" -> False, "fused"',
    "make_optimizer, no weight decay: args.weight_decay, -> 0.0,",
    'make_optimizer, always Adam: == "ascent" -> == "sgd"',
    "move_theta, steps where nothing can be learnt: if gradient.any(): -> if True:",
    "move_theta, rewards have a unit: if gradient.any(): -> if returns.std() > 1e-6:",
    "ars_gradient, rewards have a unit: pairs[top].std() or 1.0 -> max(pairs[top].std(), 1e-8)",
    "move_theta, ARS forgotten: if args.ars: -> if False:",
)
def test_step(script):
    """theta = 0, sigma 0.5, one pair: +eps = 1 returns 1, -eps = -1 returns 3. Mean 2, deviation 1: fitnesses -1, 1.

    sum F eps = -1 x 1 + 1 x (-1) = -2; alpha / (N sigma) = 0.1 / (2 x 0.5) = 0.1: theta becomes -0.2.
    Equal returns: nothing to learn. Then 40, 20: mean 30, deviation 10, fitnesses 1, -1: back to 0.

    Weight decay: the gradient (1, -6) / 2 of test_gradient, minus 0.5 theta, is (0.5 - 0.5, -3 - 1); times 0.1.
    Adam's first step is the learning rate times the sign: 0.1 (0, -1). Equal returns leave theta as it is, and Adam's
    moments and its count of steps; so do three equally best of four, where the elite is half: none is better than the
    best outside. ARS with the better of two directions: 4 / (1 x 2) times (1, 0), deviation 2. Ranks of 4, 1, 0, 2:
    1/2, -1/6, -1/2, 1/6; (2/3 (1, 0) - 2/3 (1, 3)) / (4 x 0.5) = (0, -1). These two have no unit: a billionth of the
    returns gives the same step.
    """

    def step(theta, *generations, **given):
        policy = SimpleNamespace(theta=torch.nn.Parameter(torch.tensor(theta), requires_grad=False))
        args = script.Args(**{"optimizer": "ascent", "learning_rate": 0.1, "sigma": 0.5, "fitness": "raw"} | given)
        optimizer, thetas = script.make_optimizer(args, policy), []
        for returns in generations:
            noise = np.array([[1.0, 0.0], [1.0, 3.0]], np.float32)[: len(returns) // 2, : len(theta)]
            metrics = script.move_theta(policy, optimizer, np.array(returns), noise, args)
            thetas.append(policy.theta.tolist())
        return thetas, metrics, optimizer

    close(step([0.0], [1.0, 3.0], [3.0, 3.0], [40.0, 20.0], fitness="standardized")[0], [[-0.2], [-0.2], [0]])
    returns = [4.0, 1.0, 0.0, 2.0]
    thetas, metrics, _ = step([1.0, 2.0], returns, weight_decay=0.5)
    close(thetas, [[1, 2 - 0.4]])
    close(list(metrics.values()), [math.hypot(0.5, 3), 0.4, math.hypot(1, 1.6)])
    thetas, metrics, adam = step([1.0, 2.0], returns, [3.3] * 4, optimizer="adam", weight_decay=0.5)
    close(thetas, [[1, 1.9], [1, 1.9]])
    assert adam.state_dict()["state"][0]["step"] == 1 and metrics["update_norm"] == metrics["gradient_norm"] == 0
    thetas, _, adam = step([1.0, 2.0], [0.0, 1.0, 0.0, 2.0], [7.0, 7.0, 7.0, 1.0], optimizer="adam", elite=0.5)
    assert thetas[0] == thetas[1] and adam.state_dict()["state"][0]["step"] == 1
    for unit in (1, 1e-9):
        small = [unit * x for x in returns]
        close(step([0.0, 0.0], small, fitness="centered-rank")[0], [[0, -0.1]])
        close(step([0.0, 0.0], [unit * x for x in (4, 0, 1, 2)], ars=True, top_directions=1)[0], [[0.1 * 4 / 2, 0]])


def policy_for(script, observation_space=None, action_space=None, **given):
    """An untrained FlatPolicy, of two inputs and two actions unless something else is said."""
    vectors = spaces.Box(-np.inf, np.inf, (2,))
    args = script.Args(**{"hidden_sizes": ()} | given)
    return script.FlatPolicy(observation_space or vectors, action_space or spaces.Discrete(2), args)


@catches(
    "FlatPolicy.layers, inputs and outputs exchanged: (outputs, inputs)), biases -> (inputs, outputs)).mT, biases",
    "FlatPolicy.layers, biases of the layer before: biases = parameters[..., first : first + outputs] -> "
    "biases = parameters[..., :outputs]",
    "forward, no tanh: x = x.tanh() -> pass",
    "forward, tanh of the inputs: if i > 0: -> if True:",
    "forward, no biases:  + biases -> ",
    "first_theta, outputs that are not 0: parts[-2].zero_() -> parts[-2]",
)
def test_two_policies_side_by_side(script):
    """Two inputs, one hidden unit, two outputs; theta is (hidden weights, its bias, output weights, their biases).

    First policy, x = (1, 2):   h = tanh(1 x 1 + 0 x 2 - 1) = 0          outputs (3, 4) h + (5, 6) = (5, 6)
    Second policy, x = (2, 1):  h = tanh(0 x 2 + 1 x 1 + 1) = 0.964028   outputs (1, -1) h + (0, 0)
    The first one for both:     h = 0; tanh(2 - 1) = 0.761594            outputs (5, 6); (3, 4) h + (5, 6)

    Untrained: the columns of the first layer's weights have length sqrt 2 and are at right angles. All else is 0, so
    that the first action is taken.
    """
    policy = policy_for(script, hidden_sizes=(1,))
    thetas = torch.tensor([[1, 0, -1, 3, 4, 5, 6.0], [0, 1, 1, 1, -1, 0, 0]])
    x = torch.tensor([[1, 2], [2, 1.0]])
    close(script.forward(policy.layers(thetas), x), [[5, 6], [0.964028, -0.964028]])
    close(script.forward(policy.layers(thetas[0]), x), [[5, 6], [3 * 0.761594 + 5, 4 * 0.761594 + 6]])
    policy.theta.copy_(thetas[1])
    assert policy.act(x.numpy()).tolist() == [0, 0] and policy.act(-9 * x.numpy()).tolist() == [1, 1]
    policy = policy_for(script, hidden_sizes=(3,))
    weights, _ = policy.layers(policy.theta)[0]
    close(weights, policy.theta[:6].view(3, 2))
    close(weights.T @ weights, 2 * np.eye(2))
    assert not policy.theta[6:].any() and policy.act(x.numpy()).tolist() == [0, 0]


@catches(
    "FlatPolicy.to_env, start of a Discrete forgotten:  + space.start -> ",
    "FlatPolicy.to_env, not squashed: np.where(self.bounded, squashed, outputs) -> outputs",
    "FlatPolicy.to_env, squashed where there is no bound: np.where(self.bounded, squashed, outputs) -> squashed",
    "is_bounded, all dimensions or none: .ravel() -> .all()",
    "FlatPolicy.to_env, integers cut off: np.rint(actions) -> actions",
)
def test_actions_as_the_space_says(script):
    """A Discrete action is the argmax, shifted. A dimension of a Box that has two bounds is squashed into them, others
    are clipped; integers are rounded: in [0, 4], tanh(0.5) = 0.4621 is 2 + 2 x 0.4621 = 2.924, of integers 3. Where
    both bounds are 2, the action is 2; where they are float32's largest numbers, there is none."""
    to_env = lambda space, outputs: policy_for(script, action_space=space).to_env(torch.tensor(outputs))
    assert to_env(spaces.Discrete(3, start=5), [[0, 2, 1], [3, 2, 1.0]]).tolist() == [6, 5]
    space = spaces.Box(np.array([[-1], [0]], np.float32), np.array([[1], [4]], np.float32))
    actions = to_env(space, [[0, 0], [99, -99], [0.5, 0.5]])
    close(actions[:, :, 0], [[0, 2], [1, 0], [0.462117, 2.924234]])
    assert actions.dtype == np.float32 and all(space.contains(action) for action in actions)
    actions = to_env(spaces.Box(0, 4, (2,), np.int64), [[0.5, -0.5]])
    assert actions.tolist() == [[3, 1]] and actions.dtype == np.int64
    # 127 + 128 is more than an int8 can hold; -0.5 + 127.5 x 0.4621 = 58.4
    assert to_env(spaces.Box(-128, 127, (2,), np.int8), [[0.5, -99.0]]).tolist() == [[58, -128]]
    largest = np.finfo(np.float32).max
    low, high = np.array([0, -np.inf, 0, 2, -largest]), np.array([np.inf, 1, 4, 2, largest])
    actions = to_env(spaces.Box(low, high, dtype=np.float64), [[-2.0, 3, 0.5, 9, 9], [5, -6, -99, -9, -9]])
    close(actions, [[0, 1, 2.924234, 2, 9], [5, -6, 0, 2, -9]])


@catches(
    "ObservationStats.forward, divided by the variance: .sqrt() -> ",
    "ObservationStats.forward, mean of squares for variance:  - mean**2 -> ",
    "ObservationStats.forward, not clipped: x.clamp(-10, 10) -> x",
    "ObservationStats.add, the last ones only: self.sums += -> self.sums = 0 * self.sums +",
    "sums_of, squares forgotten: x**2 -> x",
    "FlatPolicy.act, not normalised: self.features(obs) -> torch.from_numpy(obs).float()",
    "FlatPolicy.act, one observation for a batch: if obs.shape[1:] != self.observation_shape: -> if False:",
)
def test_normalised_observations(script):
    """Four observations; sums 8, 0, 4 and of squares 52, 4, 4: means 2, 0, 1, variances 13 - 4 = 9, 1, 0."""
    policy = policy_for(script, spaces.Box(-9, 9, (3,)), normalize_obs=True)
    close(policy.features(np.array([[5.0, -99, 1]])), [[5, -10, 1]])  # nothing seen yet
    policy.obs_stats.add(script.sums_of(np.array([[2.0, 1, 1], [6, -1, 1]])).sum(0))
    policy.obs_stats.add(np.array([[2.0] * 3, [0, 0, 2], [12, 2, 2]]))
    close(policy.obs_stats.sums, [[4] * 3, [8, 0, 4], [52, 4, 4]])
    close(policy.features(np.array([[5.0, -0.5, 1], [200, -200, 1.5]])), [[1, -0.5, 0], [10, -10, 10]])
    policy.theta[3] = 1.0  # the second action for numbers above 0: of 1 and 3 only for 3, which becomes 1/3
    assert policy.act(np.array([[1.0, 0, 0], [3, 0, 0]])).tolist() == [0, 1]
    try:
        policy.act(np.array([3.0, 0, 0]))
        raise AssertionError("taken for a batch")
    except (ValueError, RuntimeError) as error:
        assert "act(obs[None])[0]" in str(error)


# ------------------------------------------------------------------------------------- a population in environments


@catches(
    "play_candidates, plays on after a truncation: ~(terminated | truncated) -> ~terminated",
    "play_candidates, steps of the finished counted: steps += playing -> steps += 1",
    "play_candidates, observations of the finished: seen[playing] += sums_of(obs[playing]) -> seen += sums_of(obs)",
    "OneEpisode.step, slots play on: if self.over: -> if False:",
    "OneEpisode.step, after a truncation: self.over = terminated or truncated -> self.over = terminated",
    "OneEpisode.reset, begins anew by itself: if seed is not None: -> if True:",
)
def test_a_population_of_four(script):
    """Episodes of 1, 2, 6 and 6 steps, which pay 1, 2, … 6 and, when begun anew, 11, 12, … 16.

    The slots of candidates 0 and 1 are neither counted, stepped nor begun anew while the others go on.
    """
    policy = policy_for(script, spaces.Box(-99, 99, (3,)), normalize_obs=True)
    args, run = script.Args(max_episode_steps=9), SimpleNamespace(check_finite=lambda **values: None)
    plans = (1, "t"), (2, "c"), (6, "b"), (6, "t")

    def make_vec(*_, wrappers, **__):
        return gym.vector.SyncVectorEnv([lambda plan=plan: wrappers[-1](Walk([plan])) for plan in plans])

    with mock.patch.object(script.gym, "make_vec", make_vec):
        envs = script.make_envs(args, 4)
    for expected in ([1, 3, 21, 21], [11, 23, 81, 81]):
        candidates, seeds = torch.zeros(4, 8), np.array([3, 4])
        played = script.play_candidates(policy, candidates, np.arange(4), envs, seeds, args, run)
        close(played["returns"], expected)
        close(played["steps"], [1, 2, 6, 6])
        close(played["seen"][:, 0, 2], [1, 2, 6, 6])  # observations acted upon; their third entries are 0, 1, … 5
        close(played["seen"][3, 1:, 2], [15, 55])  # sum and sum of squares of these


class ChanceInBox(Chance):
    """The same, with an action in [0, 2]."""

    action_space = spaces.Box(0, 2, (1,))

    def step(self, action):
        return super().step(float(action[0]))


COMMON = {"population_size": 6, "episodes_per_candidate": 2, "num_generations": 3, "hidden_sizes": (3,), "seed": 5}
TRAININGS = [
    (Chance, {}),
    (Chance, {"normalize_obs": True, "action_noise": 0.7, "hidden_sizes": (), "weight_decay": 0.1}),
    (ChanceInBox, {"optimizer": "ascent", "learning_rate": 0.4, "fitness": "raw", "episodes_per_candidate": 1}),
    (ChanceInBox, {"action_noise": 0.5, "normalize_obs": True, "hidden_sizes": (4, 3), "sigma": 0.3}),
]
METRICS = "population_mean", "return_std", "return_max", "gradient_norm", "update_norm", "weight_norm"


@cache
def slow_training(number):
    """What the slow version gives, with the script as it is: `script` may have a mistake."""
    world, options = TRAININGS[number]
    return reference.train(es.Args(**COMMON | options), world, discrete=world is Chance)


@catches(
    "play_candidates, pairs do not start alike: seeds[numbers // 2] -> seeds[numbers % 3]",
    "play_candidates, the same noise in all generations: np.random.default_rng(seeds) -> np.random.default_rng(0)",
    "play_candidates, rewards of the finished counted: rewards * playing -> rewards",
    "play_candidates, the last reward lost: rewards * playing -> rewards * playing * ~truncated",
    "play_candidates, acts on another's observation: policy.features(obs) -> policy.features(obs[::-1].copy())",
    "play_candidates, acts with another's weights: policy.layers(candidates) -> policy.layers(candidates.flip(0))",
    "play_candidates, final observations as well: steps += playing -> steps += playing\n"
    "        seen += sums_of(obs) * playing[:, None, None]",
    'train, sum of the episodes: played["returns"] / args.episodes_per_candidate -> played["returns"]',
    "play_generation, last episode: played[name][numbers] += -> played[name][numbers] =",
    "count_candidates, sum of the episodes: total / episodes, -> total,",
    "play_generation, all episodes start alike: envs, seeds, -> envs, episode_seeds[0],",
    "draw_noise, the same for all: np.random.default_rng(seed) -> np.random.default_rng(seeds[0])",
    "draw_noise, the process's generator: np.random.default_rng(seed) -> np.random.default_rng()",
    "draw_seeds, the same in each generation: [args.seed, generation] -> [args.seed]",
    "draw_seeds, the same for each seed: [args.seed, generation] -> [generation]",
    "draw_seeds, one state for all pairs: seeds[pairs:].reshape -> seeds[:1].repeat(len(seeds) - pairs).reshape",
    "draw_action_noise, no temperature: args.action_noise * noise -> noise",
    "draw_action_noise, normal for logits: rng.gumbel(size=shape) if policy.discrete else rng -> rng",
    "draw_action_noise, one for all candidates: noise, dtype -> noise[:1].repeat(len(noise), 0), dtype",
    'train, statistics never updated: policy.obs_stats.add(played["seen"].sum(0)) -> pass',
    "train, statistics before the step: metrics = move_theta -> policy.obs_stats and policy.obs_stats.add("
    'played["seen"].sum(0)); metrics = move_theta',
)
def test_training(script):
    """Three generations: every weight, sum, metric and return is that of tests/reference/es.py, whatever the options.

    Without OneEpisode, the slots play on after a candidate's end.
    """
    for number, (world, options) in enumerate(TRAININGS):
        theta, metrics, episodes, seen = slow_training(number)
        run = rehearse(script, world, **COMMON | options)
        close(run.agent.theta, theta, atol=1e-3)
        close(np.transpose([run.episodes["step"], run.episodes["return"]]), episodes, atol=1e-3)
        assert run.step == episodes[-1][0] == len(seen)
        close(sum(run.episodes["length"]), len(seen) / run.args.episodes_per_candidate)
        close([run.all_logged[name] for name in METRICS], np.transpose(metrics), atol=1e-3)
        if run.agent.obs_stats is not None:
            close(run.agent.obs_stats.sums[:, 1], [len(seen), *(np.sum(np.power(seen, k), 0)[1] for k in (1, 2))])


# ------------------------------------------------------------------------------------------------- several processes


@catches(
    "play_generation, steps of this process: for name in played:\n            played[name][theirs] -> "
    'for name in ("returns", "seen"):\n            played[name][theirs]',
    "play_generation, noise of other pairs: noise[pairs] -> noise[: len(pairs)]",
    "play_generation, returns of this process: played[name][theirs] = arrays[name][theirs] -> pass",
    "play_candidates, actions drawn by process: action_noise[numbers] -> action_noise[: len(numbers)]",
    "play_candidates, first states by process: seeds[numbers // 2] -> seeds[np.arange(len(numbers)) // 2]",
    "candidates_of_this_process, everybody plays all: processes)[rank] -> 1)[0]",
)
def test_a_generation_does_not_depend_on_the_processes(script):
    """Nobody's noise, first state or drawn actions depend on the process that plays it, and each process hears of all
    returns, steps and observations. Of 5 pairs, two processes play 3 and 2.
    """
    cases = [{"env_id": "CartPole-v1", "max_episode_return": 30.0, "action_noise": 0.3}]
    cases += [{"env_id": "Pendulum-v1", "normalize_obs": True, "max_episode_steps": 20, "hidden_sizes": (3,)}]
    for options in cases:
        args, parts = script.Args(**{"population_size": 10, "hidden_sizes": ()} | options), []
        noise_seeds, (episode_seeds, *_) = script.draw_seeds(args, 3)

        def generation(rank=0, processes=1, exchange=lambda value: [value]):
            run = SimpleNamespace(check_finite=lambda **values: None)
            with mock.patch.multiple(script, process=lambda: (rank, processes), exchange=exchange):
                numbers = script.candidates_of_this_process(args)
                envs = script.make_envs(args, len(numbers))
                policy = script.make_agent(args, envs)
                noise = script.draw_noise(noise_seeds, len(policy.theta))
                played = script.play_generation(policy, noise, [episode_seeds], numbers, envs, args, run)
            return {name: array.tolist() for name, array in played.items()}, len(numbers)

        alone = generation()
        for rank in (0, 1):  # each tells its part; then each hears of both parts
            generation(rank, 2, lambda part: [parts.append(part) or part])
        together = [generation(rank, 2, lambda part: parts) for rank in (0, 1)]
        assert sum(alone[0]["steps"]) > 10 and [each[0] for each in together] == [alone[0]] * 2
        assert [each[1] for each in together] == [6, 4]


@catches(
    "exchange, waits or complains: end_with_the_others(error, code) -> raise",
    "end_with_the_others, as if all were well: os._exit(code) -> os._exit(0)",
    "end_with_the_others, complains always: if code != 0 -> if True",
)
def test_ends_with_the_others(script, capsys):
    """If another process has ended, this one says so and fails; before the run begins, it ends in silence."""
    gone = mock.Mock(**{"get_world_size.return_value": 2, "all_gather_object.side_effect": RuntimeError("closed")})
    end_now = mock.patch.object(script.os, "_exit", lambda code: sys.exit(code))
    with end_now, mock.patch.object(script, "distributed", gone), mock.patch.object(script.time, "sleep"):
        for code, said in ((0, False), (1, True)):
            try:
                script.exchange("x", code=code)
            except BaseException as end:
                assert isinstance(end, SystemExit) and end.code == code
            assert ("has lost the others: closed" in capsys.readouterr().err) == said


@catches("start_run, each its own checkpoint: > 1 -> > 9")
def test_one_checkpoint_for_all(script):
    """A machine with an older checkpoint, or none, does not go on with the others."""
    run = SimpleNamespace(step=300, seconds=7.5, start=lambda: None)
    for others, refused in (([(300, 7.5)], False), ([(0, 0.0)], True)):
        with mock.patch.object(script, "exchange", lambda value, others=others: [value, *others]):
            try:
                script.start_run(run)
                assert not refused
            except script.UserError as error:
                assert refused and "another checkpoint" in str(error)


SPREAD = {
    "CartPole": "--env-id CartPole-v1 --max-episode-steps 60",
    "Pendulum": "--env-id Pendulum-v1 --max-episode-steps 30 --normalize-obs --action-noise 0.3",
    "stopped": "--env-id Pendulum-v1 --max-episode-steps 10 --eval-every 150 --stop-at-return -500",
    "no pairs": "--population-size 2",  # for three processes
}


@pytest.mark.slow
def test_films_of_a_run(script, tmp_path, monkeypatch):
    """Its environments stand still until they are seeded: also the one that is tried before training."""
    monkeypatch.chdir(tmp_path)
    assert command(script, "--total-timesteps 3000 --capture-video --no-progress --run-dir run") == 0
    assert list(Path("run/videos").rglob("*.mp4"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPREAD)
def test_three_processes_give_the_numbers_of_one(script, name, tmp_path, monkeypatch):
    """Bit for bit, also if an evaluation ends the run; and what is wrong in all of them, only one of them says."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(script.__file__, "es.py")
    flags = "--population-size 10 --hidden-sizes 4 --eval-episodes 2 --no-progress --num-generations 6 "
    flags += f"--total-timesteps 100000 --checkpoint-every 100 --run-dir run {SPREAD[name]}"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "es.py"]
    done = subprocess.run([*line, *flags.split()], capture_output=True, text=True, timeout=300)
    complaints = re.findall("^es.py: .*", done.stderr, re.M)
    if name == "no pairs":
        assert len(complaints) == 1 and re.search(r"exitcode +: 2", done.stderr)
        return
    assert (done.returncode, len(done.stdout.splitlines()), complaints) == (0, 5 + (name == "stopped"), []), done.stderr
    together = content(script)
    resumed = subprocess.run([*line, "--resume", "run", "--no-progress"], capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0 and content(script) == together, resumed.stderr  # all have loaded the checkpoint
    shutil.rmtree("run")
    assert command(script, flags) == 0 and content(script) == together


# -------------------------------------------------------------------------------- worlds whose right answer is known

OPTIONS = {
    "default": {},
    "raw ascent": {"fitness": "raw", "optimizer": "ascent", "learning_rate": 0.1},
    "an elite": {"fitness": "standardized", "elite": 0.5, "optimizer": "ascent"},
    "ARS": {"ars": True, "optimizer": "ascent", "top_directions": 4, "normalize_obs": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_learns(script, name):
    """Action 0 is right at -1, action 1 at 1, two times in each episode."""
    world = lambda: Probe(lambda obs, action: action == (obs > 0), steps=2, varied=True)
    given = {"hidden_sizes": (), "population_size": 16, "num_generations": 30, "eval_episodes": 8} | OPTIONS[name]
    run = rehearse(script, world, **given)
    assert run.evaluations["return_mean"] == [2] and run.step == 30 * 16 * 2


def test_rewards_have_no_unit(script):
    """A billionth of all rewards: the same theta, bit for bit, by ranks; up to rounding, by ARS."""
    for options, atol in (({}, 0), (OPTIONS["ARS"], 1e-5)):
        thetas = []
        for unit in (1, 1e-9):
            world = lambda: Probe(lambda obs, action: unit * (action == (obs > 0)), steps=2, varied=True)
            run = rehearse(script, world, num_generations=3, population_size=16, hidden_sizes=(), **options)
            thetas.append(run.agent.theta.tolist())
        assert any(thetas[0]) and np.allclose(*thetas, rtol=0, atol=atol)


@catches(
    "count_candidates, num_generations forgotten: args.num_generations) -> None)",
    "train, old environments after a checkpoint: if run.write_what_is_due(): -> if run.write_what_is_due() and False:",
    "start_es_run, rare checkpoints: args.checkpoint_every or tenth -> run.checkpoint_every",
)
def test_what_ends_the_run(script):
    """Four candidates take three steps each. 25 steps are reached in the third generation; if num_generations is given,
    that many are played. An evaluation that reaches stop_at_return ends the run as well, candidates that do so do not.
    After a checkpoint, all environments are new.
    """
    made, four = [], {"population_size": 4, "hidden_sizes": ()}
    world = lambda: made.append(1) or Probe(steps=3)
    for steps in (5, 99):
        assert rehearse(script, world, **four, num_generations=2, total_timesteps=steps).step == 24
    run = rehearse(script, world, **four, total_timesteps=25, checkpoint_every=0)
    assert run.step == 36 and run.checkpoint_every == 3
    made.clear()
    rehearse(script, world, **four, total_timesteps=36, checkpoint_every=12)
    assert len(made) == 4 + 4 * 3 + 1  # at first; after 0, 12 and 24 steps; for the evaluation
    assert rehearse(script, world, **four, stop_at_return=3, eval_every=50).evaluations["step"] == [60]


@catches("set_total, each round: 10 * done // total > 10 * (done - 1) // total -> True")
def test_ten_evaluations_of_a_run_of_generations_that_grow(script):
    """Each of 100 generations is longer than the one before; after every tenth, an evaluation is due."""
    run, last, due = SimpleNamespace(args=script.Args(), step=0, bar=SimpleNamespace()), 0, []
    for done in range(1, 101):
        run.step += done
        script.set_total(run, done, 100)
        if run.step // run.eval_every > last // run.eval_every:
            due.append(done)
            last = run.step
    assert due == list(range(10, 101, 10)) and run.args.total_timesteps == run.step


# ------------------------------------------------------------------------------------------------------- whole runs


@catches(
    "make_slots, returns of the wrapper: wrappers.insert(0, partial(TrueReturn, -> wrappers.append(partial(TrueReturn,",
    'count_candidates, returns of the wrapper: played["true_returns"] -> played["returns"]',
)
def test_returns_before_a_wrapper_changes_rewards(script, tmp_path, monkeypatch):
    """The wrapper pays 7 for each of five steps, from which theta learns; CartPole's 1 is what counts."""
    monkeypatch.setattr(script.Run, "draw_curve", lambda run: None)
    monkeypatch.chdir(tmp_path)
    flags = "--wrappers gymnasium.wrappers.ClipReward(min_reward=7) --max-episode-steps 5 --population-size 4 "
    assert command(script, f"{flags} --episodes-per-candidate 2 --num-generations 1 --run-dir run --no-progress") == 0
    run = script.read_state("run/checkpoint.pt")["run"]
    assert run["episodes"]["return"] == [5.0] * 4 and run["evaluations"]["return_mean"] == [5]
    assert run["metrics"]["population_mean"] == [35] and run["step"] == 2 * 4 * 5


class Huge(Probe):
    """What its field gives in the second step is more than float32 can hold."""

    field = "reward"

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self.at == 2:
            obs, reward = (obs, 1e300) if self.field == "reward" else (obs - np.inf, reward)
        return obs, reward, *rest


@catches(
    "play_candidates, learns from infinities: run.check_finite(observation=obs, reward=rewards) -> pass",
    "play_candidates, infinite observations: (observation=obs, reward=rewards) -> (reward=rewards)",
    "make_slots, the user's own error is hidden: except MISTYPED -> except Exception",
)
def test_faults_of_an_environment(script, monkeypatch):
    """Numbers that float32 cannot hold end the run with a line; what an environment raises keeps its traceback."""
    for Huge.field in ("reward", "observation"):
        try:
            rehearse(script, lambda: Huge(steps=3), num_generations=2, population_size=4, hidden_sizes=())
            raise AssertionError("it went on")
        except script.UserError as error:
            assert f"after step 0: {Huge.field} is NaN or infinite" in str(error)
    gym.register("Broken-v0", lambda **kwargs: {}["missing"])
    try:
        script.make_envs(script.Args(env_id="Broken-v0"), 1)
        raise AssertionError("it was made")
    except KeyError as error:
        assert error.args == ("missing",)
    except script.UserError:
        raise AssertionError("his error is hidden") from None


RUN = "--env-id CartPole-v1 --population-size 4 --hidden-sizes 3 --normalize-obs --max-episode-steps 40 "
RUN += "--action-noise 1 --num-generations 5 --checkpoint-every 150 --eval-every 200 --eval-episodes 3"


@catches(
    "train, optimizer not saved: agent=policy, optimizer=optimizer) -> agent=policy)",
    "ObservationStats.__init__, statistics not saved: dtype=torch.float64) -> dtype=torch.float64), persistent=False",
    "train, counted by process: generation = run.num_episodes // args.population_size -> "
    "generation = run.at = vars(run).get('at', 0) + 1",
)
def test_killed_resumed_evaluated(script, tmp_path, monkeypatch, capsys):
    """--evaluate plays the best weights, in other episodes than those that chose them, and changes nothing."""
    kill_and_resume(script, RUN, 6, monkeypatch, tmp_path)
    check_evaluation(script, capsys)


@catches(
    'method_settings, ARS brings nothing: ARS if args.ars and "ars" not in settings else settings -> settings',
    'method_settings, ARS replaces what was tuned with it: and "ars" not in settings -> ',
)
def test_settings_of_the_method(script):
    """--ars brings its settings along, and what was tuned for another method does not apply; what is given wins."""
    plain, tuned = vars(script.Args()), lambda **given: vars(script.tuned(**given))
    assert tuned(ars=True, sigma=0.5, hidden_sizes=(8,)) == plain | script.ARS | {"sigma": 0.5, "hidden_sizes": (8,)}
    assert tuned(env_id="Swimmer-v5", ars=True)["learning_rate"] == 0.4


@catches("tuned, as many generations as before: free = FREE[3:] if any -> free = FREE[3:] if True or any")
def test_prolonged(script, tmp_path, monkeypatch, capsys):
    """A run of two generations, resumed with --num-generations 3, ends where one of three does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script.Run, "draw_curve", lambda run: None)
    short = "--population-size 4 --eval-episodes 1 --no-progress"
    assert command(script, f"{short} --num-generations 2 --run-dir two") == 0
    assert command(script, "--resume two --no-progress --num-generations 3") == 0
    assert command(script, f"{short} --num-generations 3 --run-dir three") == 0
    two, three = (script.load(folder, "last").theta for folder in ("two", "three"))
    assert torch.equal(two, three)


@catches("train, weights that are not finite go on: run.check_finite(length_of_theta -> dict(length_of_theta")
def test_refused(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script.Run, "draw_curve", lambda run: None)
    refused = {"--population-size 3": "pairs", "--env-id Blackjack-v1 --elite 7": "elite", "--sigma 0": "sigma"}
    refused |= {"--ars --elite 0.5": "ars", "--top-directions 3": "top", "--ars --top-directions 65": "top"}
    refused |= {"--env-id CarRacing-v3": "ppo.py", "--episodes-per-candidate 0": "episodes_per_candidate"}
    refused |= {"--num-generations 0": "num_generations"}
    check_refused(script, refused, tmp_path, monkeypatch, capsys)
    huge = "--learning-rate 1e15 --weight-decay 1e15 --optimizer ascent --fitness raw --population-size 4 --run-dir run"
    assert command(script, f"{huge} --total-timesteps 900 --eval-episodes 1 --no-progress") == 2
    assert "length_of_theta is NaN or infinite" in capsys.readouterr().err and not Path("run/checkpoint.pt").exists()
