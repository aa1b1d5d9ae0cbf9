"""The numbers of evolution strategies and ARS, worked out by hand: a lesson to be read beside es.py."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from tests.probes.population_envs import Notes, policy_for
from tests.tools import close


def policy_of(*theta):
    """What `move_theta` needs of a policy."""
    return SimpleNamespace(theta=nn.Parameter(torch.tensor(theta, dtype=torch.float32), requires_grad=False))


def test_candidates_are_mirrored(script):
    """theta = (1, 2), sigma = 0.5: theta ± 0.5 (1, 0) and theta ± 0.5 (2, -1), the two of a pair side by side."""
    noise = np.array([[1.0, 0.0], [2.0, -1.0]])
    close(script.make_candidates(np.array([1.0, 2.0]), noise, 0.5), [[1.5, 2], [0.5, 2], [2, 1.5], [0, 2.5]])


def test_gradient(script):
    """1/(N sigma) sum_i F_i eps_i, sigma = 0.5.

    One pair, fitnesses 1 and 3 of eps = 1 and -1:   1 x 1 + 3 x (-1) = -2, over 2 x 0.5.
    Two pairs, 4, 1 of ±(1, 0) and 0, 2 of ±(1, 3):  (3 (1, 0) - 2 (1, 3)) / (4 x 0.5) = (1, -6) / 2.
    """
    close(script.es_gradient(np.array([1.0, 3.0]), np.ones((1, 1)), 0.5), [-2.0])
    noise = np.array([[1.0, 0.0], [1.0, 3.0]])
    close(script.es_gradient(np.array([4.0, 1.0, 0.0, 2.0]), noise, 0.5), [0.5, -3.0])


@pytest.mark.parametrize(
    ("returns", "ranks"),
    [
        ([10, 30, 20, 40], [-1 / 2, 1 / 6, -1 / 6, 1 / 2]),  # ranks 0, 2, 1, 3 of 3, minus 1/2
        ([5, 5, 1, 9], [0, 0, -1 / 2, 1 / 2]),  # the fives share ranks 1 and 2: 1.5 / 3 - 1/2 = 0
        ([7, 7, 7, 0], [1 / 6, 1 / 6, 1 / 6, -1 / 2]),  # ranks 1, 2 and 3: 2 / 3 - 1/2
        ([500, 500], [0, 0]),
    ],
)
def test_centered_ranks(script, returns, ranks):
    """Fails, in the lines with ties, for ranks by order: there the second of a pair would always win."""
    close(script.centered_ranks(np.array(returns, float)), ranks)


def test_fitness(script):
    """Standardised 1, 3, 3, 5: mean 3, variance (4 + 0 + 0 + 4) / 4 = 2. An elite of half counts from the third best.

    0.07 of a hundred are seven, though 0.07 * 100 is a little more in floating point; of four, 0.3 (1.2) are two.
    """
    returns = np.array([1.0, 3.0, 2.0, 6.0])
    close(script.shape_fitness(np.array([1.0, 3.0, 3.0, 5.0]), "standardized"), np.array([-2, 0, 0, 2]) / math.sqrt(2))
    close(script.shape_fitness(returns, "raw"), returns)
    close(script.shape_fitness(returns, "raw", elite=0.5), [0, 1, 0, 4])  # 3 - 2 and 6 - 2
    close(script.shape_fitness(returns, "raw", elite=0.3), [0, 1, 0, 4])
    close(script.shape_fitness(returns, "centered-rank", elite=0.25), [0, 0, 0, 1 / 3])  # 1/2 - 1/6
    close(script.shape_fitness(-returns, "raw", elite=0.25), [1, 0, 0, 0])  # -1 - (-2): never away from the best
    seven = script.shape_fitness(np.arange(100.0), "raw", elite=0.07)
    close(seven[-8:], [0, 1, 2, 3, 4, 5, 6, 7])


def test_step(script):
    """theta = 0, sigma 0.5, one pair: +eps = 1 returns 1, -eps = -1 returns 3. Mean 2, deviation 1: fitnesses -1, 1.

    sum F eps = -1 x 1 + 1 x (-1) = -2;  alpha / (N sigma) = 0.1 / (2 x 0.5) = 0.1: theta becomes -0.2.
    Equal returns: nothing to learn. Then 40, 20: mean 30, deviation 10, fitnesses 1, -1: back to 0.
    """
    args = script.Args(fitness="standardized", optimizer="ascent", learning_rate=0.1, sigma=0.5)
    policy = policy_of(0)
    for returns, theta in (([1.0, 3.0], -0.2), ([3.0, 3.0], -0.2), ([40.0, 20.0], 0.0)):
        script.move_theta(policy, None, np.array(returns), np.ones((1, 1), np.float32), args)
        close(policy.theta, [theta])


def test_weight_decay_and_adam(script):
    """Ascent: the gradient (1, -6) / 2 of above, minus 0.5 theta, is (0.5 - 0.5, -3 - 1); times 0.1.

    Adam's first step is the learning rate times the sign: 0.1 (0, -1), and 0 where there is no slope.
    """
    returns, noise = np.array([4.0, 1.0, 0.0, 2.0]), np.array([[1.0, 0.0], [1.0, 3.0]], np.float32)
    settings = dict(fitness="raw", sigma=0.5, learning_rate=0.1, weight_decay=0.5)
    policy = policy_of(1, 2)
    figures = script.move_theta(policy, None, returns, noise, script.Args(optimizer="ascent", **settings))
    close(policy.theta, [1, 2 - 0.4])
    close(figures["gradient_norm"], math.hypot(0.5, 3))
    close(figures["update_norm"], 0.4)
    close(figures["weight_norm"], math.hypot(1, 1.6))
    policy = policy_of(1, 2)
    optimizer = script.Adam([policy.theta], lr=0.1, eps=1e-5)
    script.move_theta(policy, optimizer, returns, noise, script.Args(optimizer="adam", **settings))
    close(policy.theta, [1, 1.9])


def test_equal_returns_change_nothing(script):
    """Fails if weight decay or Adam's momentum move theta, or if Adam counts a step, where nothing can be learnt."""
    policy, args, noise = policy_of(1, 2), script.Args(weight_decay=0.1), np.ones((2, 2), np.float32)
    optimizer = script.Adam([policy.theta], lr=0.1)
    script.move_theta(policy, optimizer, np.array([1.0, 2, 3, 4]), noise, args)
    before, m = policy.theta.clone(), optimizer.m.clone()
    figures = script.move_theta(policy, optimizer, np.full(4, 3.3), noise, args)
    assert torch.equal(policy.theta, before) and torch.equal(optimizer.m, m) and optimizer.t == 1
    assert figures["update_norm"] == figures["gradient_norm"] == 0


def test_ars(script):
    """Pairs (4, 0), (1, 2), (0, 3), (-20, 2.5): their better returns are 4, 2, 3, 2.5, the best two those of the first
    and the third. The returns used, 4, 0, 0, 3: mean 1.75, variance (2.25² + 2 x 1.75² + 1.25²) / 4 = 3.1875.

        (4 (1, 0) - 3 (1, 1)) / (2 x sqrt(3.1875)) = (1, -3) / 3.570714

    All four: 4 (1, 0) - (0, 1) - 3 (1, 1) - 22.5 (2, 0) = (-44, -4); mean -7.5 / 8, variance 436.25 / 8 - 0.9375² =
    53.652344; 4 x sqrt(53.652344) = 29.299104.
    """
    returns = np.array([4.0, 0, 1, 2, 0, 3, -20, 2.5])
    noise = np.array([[1.0, 0], [0, 1], [1, 1], [2, 0]])
    close(script.ars_gradient(returns, noise, 2), [0.280056, -0.840168])
    close(script.ars_gradient(returns, noise, None), [-1.501753, -0.136523])


def test_two_policies_side_by_side(script):
    """Two inputs, one hidden unit, two outputs; theta is (hidden weights, its bias, output weights, their biases).

    First policy, x = (1, 2):   h = tanh(1 x 1 + 0 x 2 - 1) = 0          outputs (3, 4) h + (5, 6) = (5, 6)
    Second policy, x = (2, 1):  h = tanh(0 x 2 + 1 x 1 + 1) = 0.964028   outputs (1, -1) h + (0, 0)
    """
    policy, _, _ = policy_for(script, hidden_sizes=(1,))
    thetas = np.array([[1, 0, -1, 3, 4, 5, 6], [0, 1, 1, 1, -1, 0, 0]], np.float32)
    x = np.array([[1, 2], [2, 1]], np.float32)
    close(script.forward(policy.layers(thetas), x), [[5, 6], [0.964028, -0.964028]])
    close(script.forward(policy.layers(thetas[0]), x), [[5, 6], [3 * 0.761594 + 5, 4 * 0.761594 + 6]])  # tanh(1)


def test_actions_as_the_space_says(script):
    """A Discrete action is the argmax, shifted; a Box action is squashed into its bounds, or clipped; integers round:
    in [0, 4], tanh(0.5) = 0.4621 is 2 + 2 x 0.4621 = 2.924, of integers 3."""
    policy, _, _ = policy_for(script)
    policy.action_space = spaces.Discrete(3, start=5)
    assert policy.to_env(np.array([[0, 2, 1], [3, 2, 1.0]])).tolist() == [6, 5]
    policy.discrete = False
    policy.action_space = spaces.Box(np.array([[-1], [0]], np.float32), np.array([[1], [4]], np.float32))
    actions = policy.to_env(np.array([[0, 0], [99, -99], [0.5, 0.5]], np.float32))
    close(actions[:, :, 0], [[0, 2], [1, 0], [0.462117, 2.924234]])
    assert actions.dtype == np.float32 and all(policy.action_space.contains(a) for a in actions)
    policy.action_space = spaces.Box(0, 4, (2,), np.int64)
    actions = policy.to_env(np.array([[0.5, -0.5]]))
    assert actions.tolist() == [[3, 1]] and actions.dtype == np.int64
    policy.action_space = spaces.Box(-128, 127, (2,), np.int8)  # 127 + 128 is more than an int8 can hold
    assert policy.to_env(np.array([[0.5, -99.0]])).tolist() == [[58, -128]]  # -0.5 + 127.5 x 0.4621 = 58.4
    policy.action_space = spaces.Box(np.array([0, -np.inf]), np.array([np.inf, 1]), dtype=np.float64)
    close(policy.to_env(np.array([[-2, 3], [5, -6]], np.float32)), [[0, 1], [5, -6]])


def test_normalised_observations(script):
    """Four observations; sums 8, 0, 4 and of squares 52, 4, 4: means 2, 0, 1, variances 13 - 4 = 9, 1, 0."""
    policy, _, _ = policy_for(script, "Pendulum-v1", normalize_obs=True)
    close(policy.features(np.array([[5.0, -99, 1]])), [[5, -10, 1]])  # nothing seen yet
    policy.obs_stats.add(np.array([[4.0] * 3, [8.0, 0, 4], [52.0, 4, 4]]))
    close(policy.features(np.array([[5.0, -0.5, 1], [200, -200, 1.5]])), [[1, -0.5, 0], [10, -10, 10]])


def test_a_population_of_four(script):
    """Whoever waits gets 1 a step, six times at most; candidate 0 leaves at once, the others wait: 0, 6, 6, 6 in
    1 + 3 x 6 steps. Fails if the slot of candidate 0 is counted, stepped or begun anew while the others go on."""
    policy, args, slots = policy_for(script, normalize_obs=True)
    candidates = np.zeros((4, 6), np.float32)
    candidates[1:, -1] = 1  # the bias of waiting; without it both actions are equal, and the first is taken
    envs = [env.unwrapped for env in slots.envs.unwrapped.envs]
    for seeds in ([3, 4], [5, 6]):
        for env in envs:
            env.log.clear()
        run = Notes()
        returns, seen = script.play_candidates(policy, candidates, slots, np.array(seeds), None, args, run)
        assert returns.tolist() == [0, 6, 6, 6] and run.step == 19
        assert seen[:, 0, 0].tolist() == [1, 6, 6, 6]  # observations acted upon; their second entries are 0, 1, … 5
        assert seen[3, 1:, 1].tolist() == [15, 55]  # sum and sum of squares of these
        assert envs[0].log == [("reset", seeds[0]), ("step", 0)]
        assert envs[3].log == [("reset", seeds[1])] + [("step", 1)] * 6
