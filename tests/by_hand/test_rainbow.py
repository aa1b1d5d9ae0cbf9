"""The numbers of Rainbow, worked out by hand: a lesson to be read beside rainbow.py. DQN's are in test_dqn.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.tools import close

NUMBER, TWO = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)
SUPPORT = torch.tensor([-2.0, -1, 0, 1, 2])  # five atoms, a distance of 1 apart


def test_project(script):
    """gamma = 0.5. A return that is certain to be z = 1 or 2 becomes y = r + 0.5 z. The atoms are -2, -1, 0, 1, 2.

    r     z       y        the probability goes
    0.5   1       1        to atom 1: y falls on it
    0.25  1       0.75     to 0 and 1, a quarter and three quarters: y is three times as near to 1
    3     2       4        to 2: y is beyond the end
    -4    2      -3        to -2: the other end
    -1.5  any    -1.5      to -2 and -1, a half each: it terminated, so nothing follows
    1     2      1.25      to 1 and 2, three quarters and one, with 0.125 for gamma: three steps, gamma^3
    """
    rewards = torch.tensor([0.5, 0.25, 3, -4, -1.5, 1])
    terminated = torch.tensor([0, 0, 0, 0, 1, 0]) > 0
    gamma = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 0.125])
    probs = torch.eye(5)[[3, 3, 4, 4, 4, 4]]
    projected = script.project(rewards, terminated, gamma, probs, SUPPORT)
    expected = [[0, 0, 0, 1, 0], [0, 0, 0.25, 0.75, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]]
    close(projected, [*expected, [0, 0, 0, 0.75, 0.25]])


def test_project_keeps_probability_and_mean(script):
    """p = (0.1, 0.2, 0.4, 0.2, 0.1), whose mean is 0, under r = 0.5 and gamma = 0.5: y = -0.5, 0, 0.5, 1, 1.5.

    -0.5: 0.05 to -1 and to 0   0: 0.2 to 0   0.5: 0.2 to 0 and to 1   1: 0.2 to 1   1.5: 0.05 to 1 and to 2
    Sums: 0, 0.05, 0.45, 0.45, 0.05, together 1; mean -0.05 + 0.45 + 0.1 = 0.5 = r. With r = 1.5 the same, one further:
    0, 0, 0.05, 0.45, 0.45 and 0.05 at 3, which is cut off at 2. The sum is 1, the mean 1.45: less than 1.5.
    """
    probs = torch.tensor([[0.1, 0.2, 0.4, 0.2, 0.1]]).expand(2, 5)
    projected = script.project(torch.tensor([0.5, 1.5]), torch.zeros(2) > 0, 0.5, probs, SUPPORT)
    close(projected, [[0, 0.05, 0.45, 0.45, 0.05], [0, 0, 0.05, 0.45, 0.5]])
    close(projected.sum(1), [1, 1])
    close((projected * SUPPORT).sum(1), [0.5, 1.45])


def table(*log_probs):
    """A network that gives these log-probs (actions, atoms) on the atoms 0 and 1 for every observation."""
    probs = torch.tensor(log_probs)[None]
    network = lambda obs: (probs * torch.tensor([0.0, 1])).sum(2)
    network.log_probs = lambda obs: probs.log()
    network.support = torch.tensor([0.0, 1])
    return network


def test_distributional_loss(script):
    """Atoms 0 and 1, so that Q is the probability of 1. Two actions, and action 0 was taken; r = 0.5, gamma^n = 0.5.

    The network says (0.8, 0.2) and (0.4, 0.6): Q = 0.2, 0.6. The target network: (0, 1) and (0.5, 0.5), Q' = 1, 0.5.
    Double: the network's choice is action 1, of which the target network says (0.5, 0.5). y is 0.5 or 1: 0.25 to 0 and
    0.75 to 1. KL = 0.25 ln(0.25 / 0.8) + 0.75 ln(0.75 / 0.2) = -0.2908 + 0.9913 = 0.7005; mean target 0.75.
    Not double: action 0 with (0, 1), y is 1 for certain, KL = ln(1 / 0.2) = 1.6094 (and 0 ln 0 = 0).
    """
    agent, target = table([0.8, 0.2], [0.4, 0.6]), table([0.0, 1.0], [0.5, 0.5])
    number = torch.tensor([[0.0]])
    half = torch.tensor([0.5])
    batch = script.NStepTransitions(number, torch.tensor([[0]]), half, number, torch.zeros(1) > 0, half)
    for double, divergence, mean in ((True, 0.7005, 0.75), (False, 1.6094, 1.0)):
        losses, errors, figures = script.distributional_losses(agent, target, batch, script.Args(double=double))
        close(losses, [divergence], atol=1e-4)
        close(errors, losses)
        close([figures["q"], figures["target_min"], figures["target_max"]], [0.2, mean, mean])


def test_td_losses(script):
    """Two actions, action 1 was taken, over two steps with rewards that sum to 3; gamma^2 = 0.25.

    Q = (2, 1), Q'(s') = (4, 8), Q(s') = (2, 1). Double: action 0, y = 3 + 0.25 x 4 = 4, error 3, Huber 3 - 0.5 = 2.5.
    Not double: action 1, y = 3 + 0.25 x 8 = 5, error 4, Huber 3.5. Terminated: y = 3, error 2, Huber 1.5.
    """
    agent, target = (lambda obs: torch.tensor([[2.0, 1]])), (lambda obs: torch.tensor([[4.0, 8]]))
    for double, terminated, error in ((True, 0, 3), (False, 0, 4), (True, 1, 2)):
        step = torch.tensor([[1]]), torch.tensor([3.0]), None, torch.tensor([terminated]) > 0, torch.tensor([0.25])
        losses, errors, _ = script.td_losses(
            agent, target, script.NStepTransitions(None, *step), script.Args(double=double)
        )
        close(losses, [error - 0.5])
        close(errors, [error])


def test_noisy_layer(script):
    """Numbers drawn: e_in = (4, -9), e_out = (1, -0.25), so f(e_in) = (2, -3), f(e_out) = (1, -0.5).

    noise_W = ((1 x 2, 1 x -3), (-0.5 x 2, -0.5 x -3)) = ((2, -3), (-1, 1.5)), noise_b = (1, -0.5). With W = ((1, 2),
    (3, 4)), sigma_W = ((0.1, 0.2), (0.3, 0.4)), b = (5, 6), sigma_b = (0.5, 1) the weights are ((1.2, 1.4), (2.7, 4.6))
    and the biases (5.5, 5.5). For x = (1, 10): y = (1.2 + 14 + 5.5, 2.7 + 46 + 5.5) = (20.7, 54.2). In evaluation
    there is no noise: (1 + 20 + 5, 3 + 40 + 6) = (26, 49).
    """
    noisy = script.NoisyLinear(2, 2, sigma=0.5)
    close(noisy.sigma_weight, np.full((2, 2), 0.5 / 2**0.5))
    close(noisy.sigma_bias, np.full(2, 0.5 / 2**0.5))
    noisy.weight.data = torch.tensor([[1.0, 2], [3, 4]])
    noisy.bias.data = torch.tensor([5.0, 6])
    noisy.sigma_weight.data = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    noisy.sigma_bias.data = torch.tensor([0.5, 1])
    drawn = iter([np.array([4.0, -9]), np.array([1.0, -0.25])])
    noisy.draw_noise(SimpleNamespace(standard_normal=lambda size: next(drawn)))
    x = torch.tensor([[1.0, 10]])
    close(noisy(x), [[20.7, 54.2]])
    noisy.eval()
    close(noisy(x), [[26, 49]])


def test_dueling(script):
    """V = 1, A = (1, 2, 6) with the mean 3: Q = 1 + (-2, -1, 3) = (-1, 0, 4). Fails for V + A or V + A - max A.

    With two atoms, each by itself: V = (1, 0), A = (1, 5), (2, 5), (6, 2), means 3 and 4.
    """
    one = script.dueling_values(torch.tensor([[[1.0]]]), torch.tensor([[[1.0], [2], [6]]]))
    close(one, [[[-1], [0], [4]]])
    two = script.dueling_values(torch.tensor([[[1.0, 0]]]), torch.tensor([[[1.0, 5], [2, 5], [6, 2]]]))
    close(two, [[[-1, 1], [0, 1], [4, -2]]])


def add(buffer, rewards, ends="", resets=""):
    """One step of N environments, whose obs are the rewards; `ends`: a letter for each, t terminated, c truncated."""
    obs = np.array(rewards, np.float32)[:, None]
    terminated, truncated = (np.array([end == kind for end in ends.ljust(len(obs))]) for kind in "tc")
    reset_rows = np.array([mark == "r" for mark in resets.ljust(len(obs))])
    actions = np.zeros((len(obs), 1), int)
    return buffer.add(obs, actions, obs[:, 0], terminated, truncated, reset_rows, obs + 0.5).tolist()


def test_n_step_windows(script):
    """n = 3, gamma = 0.5, two environments; the first terminates in step 1, the second is truncated in step 2.

    rewards  step   0   1   2      3      slots 0, 1: 1 + 0.5 x 2 = 2 and 2, both over with step 1
          env 0     1   2t  reset  4      slot 2: 10 + 0.5 x 20 + 0.25 x 30 = 27.5, three steps, gamma^3 = 0.125
          env 1     10  20  30c    reset  slots 3, 4: 20 + 0.5 x 30 = 35 and 30, from the final observation on

    Nothing is stored of windows that are open: neither steps 0 and 1 of env 1 before step 2, nor step 3 of env 0. With
    Q' = 8 the targets are 2, 2, 27.5 + 0.125 x 8 = 28.5, 35 + 0.25 x 8 = 37 and 30 + 0.5 x 8 = 34.
    """
    buffer = script.NStepBuffer(6, NUMBER, TWO, num_envs=2, n_step=3, gamma=0.5)
    written = [add(buffer, [1, 10]), add(buffer, [2, 20], "t-"), add(buffer, [3, 30], "-c", "r-")]
    assert written == [[], [0, 1], [2, 3, 4]] and add(buffer, [4, 40], "--", "-r") == [] and buffer.size == 5
    batch = buffer.get(np.arange(5))
    close(batch.obs.ravel(), [1, 2, 10, 20, 30])
    close(batch.rewards, [2, 2, 27.5, 35, 30])
    close(batch.next_obs.ravel(), [2.5, 2.5, 30.5, 30.5, 30.5])
    close(batch.discounts, [0.25, 0.5, 0.125, 0.25, 0.5])
    assert batch.terminated.tolist() == [True, True, False, False, False]
    y = script.td_targets(batch.rewards, batch.terminated, batch.discounts, torch.full((5, 2), 8.0))
    close(y, [2, 2, 28.5, 37, 34])
    assert add(buffer, [5, 50]) == [] and add(buffer, [6, 60]) == [5]  # 4 + 0.5 x 5 + 0.25 x 6 = 8
    assert add(buffer, [7, 70], "-t") == [0, 1, 2, 3]  # the ring begins anew: 5 + 3 + 1.75, then 50 + 30 + 17.5, …
    close(buffer.rewards, [9.75, 97.5, 95, 70, 30, 8])
    assert buffer.size == 6
    buffer.begin_episodes()  # a checkpoint: steps 6 and 7 of env 0, whose windows are open, are given up
    assert add(buffer, [8, 80], "t-") == [4] and buffer.rewards[4] == 8


def test_one_step(script):
    """n = 1: every step is a transition at once. Fails if more than what is there is sampled."""
    buffer = script.NStepBuffer(3, NUMBER, TWO, num_envs=2, n_step=1, gamma=0.5)
    assert add(buffer, [1, 2], "tc") == [0, 1]
    close(buffer.discounts, [0.5, 0.5, 0])
    with pytest.raises(ValueError, match="cannot sample 3 of 2 stored transitions"):
        buffer.sample(3, np.random.default_rng(0))
    slots, weights, batch = buffer.sample(2, np.random.default_rng(0))
    close(weights, [1, 1])
    close(batch.rewards, buffer.rewards[slots])


def test_sum_tree(script):
    """Errors 1, -4, 16 in three slots; alpha = 0.5, priorities 1, 2, 4, sum 7. Weights with beta = 1: 1, 1/2, 1/4.

    Four draws, one from each quarter of the sum, all from its middle: 0.875, 2.625, 4.375, 6.125. The first is less
    than 1, slot 0; the second less than 1 + 2, slot 1; the others slot 2. In a batch without slot 0 the largest is 1/2.
    beta = 0: all weights are 1. A new transition in slot 1 gets the highest priority so far, 4, also later on.
    """
    tree = script.SumTree(3, alpha=0.5)
    tree.update(np.arange(3), np.array([1.0, -4, 16]))
    close(tree.nodes, [0, 7, 3, 4, 1, 2, 4, 0], atol=1e-4)
    middle = SimpleNamespace(random=lambda size: np.full(size, 0.5))
    for beta, expected in ((1, [1, 0.5, 0.25, 0.25]), (0.5, [1, 0.5**0.5, 0.5, 0.5]), (0, [1, 1, 1, 1])):
        slots, weights = tree.sample(4, middle, beta)
        assert slots.tolist() == [0, 1, 2, 2]
        close(weights, expected)
    slots, weights = tree.sample(2, middle, 1)  # 1.75 and 5.25
    assert slots.tolist() == [1, 2]
    close(weights, [1, 0.5])
    tree.update(np.array([2]), np.array([1.0]))
    tree.add(np.array([1]))
    close(tree.nodes[4:], [1, 4, 1, 0], atol=1e-4)
