"""The numbers of PPO, worked out by hand: a lesson to be read beside ppo.py. gamma is 0.5 throughout."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.tools import IN_ORDER, close

NUMBER = spaces.Box(-np.inf, np.inf, (1,))  # an observation of one number
log = lambda *ratios: torch.tensor(ratios).log()
column = lambda *numbers: torch.tensor(numbers)[:, None]  # of one environment, a step each: (T, 1)

REWARDS = column(1.0, 2, 3, 4, 5, 6)
VALUES = column(0.5, 1, 1.5, 2, 2.5, 3)
NEXT_VALUES = column(1.0, 99, 2, 8, 3, 4)  # of the true successors
TERMINATED = column(0, 1, 0, 0, 0, 0) > 0  # so that 99 must not count
TRUNCATED = column(0, 0, 0, 1, 0, 0) > 0  # so that 8 counts, but nothing of what comes after
ROLLOUT = REWARDS, VALUES, NEXT_VALUES, TERMINATED, TRUNCATED


@pytest.mark.shared("compute_returns")
def test_returns(script):
    """6 + 4/2 = 8; 5 + 8/2 = 9; cut off, 4 + 8/2 = 8; 3 + 8/2 = 7; terminated, 2; 1 + 2/2 = 2.

    Fails if a return goes on past an episode's end, or begins with anything but V where something was cut off.
    """
    returns = script.compute_returns(REWARDS, NEXT_VALUES, TERMINATED, TRUNCATED, 0.5)
    close(returns.ravel(), [2, 2, 7, 8, 9, 8])


@pytest.mark.shared("compute_gae")
def test_gae(script):
    """lambda = 0.5 as well, so that traces decay by 1/4. Fails if a bootstrap or a trace is not cut where it should be.

    delta_5 = 6 + 4/2 - 3   = 5      A_5 = 5                  the rollout ends, the episode does not
    delta_4 = 5 + 3/2 - 2.5 = 4      A_4 = 4 + 5/4 = 5.25
    delta_3 = 4 + 8/2 - 2   = 6      A_3 = 6                  truncated: bootstrap, but no trace
    delta_2 = 3 + 2/2 - 1.5 = 2.5    A_2 = 2.5 + 6/4 = 4
    delta_1 = 2 - 1         = 1      A_1 = 1                  terminated: neither
    delta_0 = 1 + 1/2 - 0.5 = 1      A_0 = 1 + 1/4 = 1.25
    """
    advantages, returns = script.compute_gae(*ROLLOUT, 0.5, 0.5)
    close(advantages.ravel(), [1.25, 1, 4, 6, 5.25, 5])
    close(returns.ravel(), [1.75, 2, 5.5, 8, 7.75, 8])  # A + V
    close(script.compute_gae(*ROLLOUT, 0.5, 0.0)[0].ravel(), [1, 1, 2.5, 6, 4, 5])  # lambda = 0 leaves the deltas


@pytest.mark.shared("compute_vtrace")
def test_vtrace(script):
    """pi/mu = 2, 1/2, 4; rho at most 1.5 and c at most 1: rho = 1.5, 0.5, 1.5 and c = 1, 0.5, 1.

    v_2 = 3 + 1.5 (3 + 4/2 - 3) = 6                      A_2 = 1.5 (3 + 4/2 - 3) = 3
    v_1 = 2 + 0.5 (4 - 2) = 3                            A_1 = 0.5 (4 - 2) = 1                 terminated
    v_0 = 1 + 1.5 (1 + 2/2 - 1) + 1/2 (3 - 2) = 3        A_0 = 1.5 (1 + 3/2 - 1) = 2.25
    Fails if a clip, a mask or a weight is missing.
    """
    rewards, values, next_values = column(1.0, 4, 3), column(1.0, 2, 3), column(2.0, 99, 4)
    terminated, truncated = column(0, 1, 0) > 0, column(0, 0, 0) > 0
    step = rewards, values, next_values, terminated, truncated
    log_ratios = log(2.0, 0.5, 4.0)[:, None]
    vtrace = lambda *numbers: torch.cat(script.compute_vtrace(*step, *numbers), dim=1).T  # A, v
    close(vtrace(log_ratios, 0.5, 1.5, 1.0), [[2.25, 1, 3], [3, 3, 6]])
    close(vtrace(log_ratios, 0.5), [[1.5, 1, 2], [2.5, 3, 5]])  # both at most 1: v_0 = 1 + 1 + 1/2 (3 - 2)
    close(vtrace(log_ratios, 0.5, 1.5, 0.25)[1], [2.625, 3, 6])  # c_0 = 1/4: v_0 = 1 + 1.5 + 1/8 (3 - 2)
    close(vtrace(0 * log_ratios, 0.5)[1], [3, 4, 5])  # pi = mu: 1 + 4/2, 4, 3 + 4/2
    truncated[0] = True  # then v_0 = 1 + 1.5 = 2.5, and v_1 in A_0 is V_1: 1.5 (1 + 2/2 - 1)
    close(vtrace(log_ratios, 0.5, 1.5, 1.0), [[1.5, 1, 3], [2.5, 3, 6]])


def test_reset_rows(script):
    """V(s) = s. Returns 1 + 6/2 = 4; 2 + 8/2 = 6, cut off at s = 8; -; 3 + 4/2 = 5. Fails if a reset row is used."""
    rows = [  # s, r, truncated, reset row
        (1, 1, False, False),
        (2, 2, True, False),
        (8, 0, False, True),  # the last observation of the episode, and an action that is ignored
        (3, 3, False, False),
    ]
    buffer = script.RolloutBuffer(4, 1, NUMBER, spaces.Discrete(2))
    for t, (obs, reward, truncated, reset_row) in enumerate(rows):
        buffer.add(t, obs, 0, reward, False, truncated, reset_row)
    buffer.obs[4] = 4
    log_probs, values = torch.zeros(4, 1), torch.tensor(buffer.obs[:, :, 0])
    buffer.compute_advantages(log_probs, values, log_probs, script.Args(estimator="vanilla", gamma=0.5))
    (batch,) = buffer.minibatches(1, IN_ORDER)
    close(torch.stack([batch.obs[:, 0], batch.returns, batch.advantages]), [[1, 2, 3], [4, 6, 5], [3, 4, 2]])
    close(buffer.played_obs(), [[1], [2], [3]])
    close(buffer.explained_variance(), 0)  # both R = 4, 6, 5 and R - V = 3, 4, 2 have the variance 2/3


def test_the_ratio_counts_once(script):
    """A bandit: R = 1, 2, 3. mu = 1/2, 1/4, 1/4 played each action as often as it should in four; pi = 0.4, 0.2, 0.4.

    J = sum pi R = 2, and its gradient in the logits is pi (R - J) = -0.4, 0, 0.4. From mu's plays V-trace must get the
    same, each weighted by pi/mu = 0.8, 0.8, 1.6 once. Fails if the surrogate divides by mu again (0.8 becomes 0.64).
    With rho at most 1, R counts 0.8, 1.6, 3; sum mu rho R (1[a] - pi) = 0.4, 0.4, 0.75 - 1.55 pi = -0.22, 0.09, 0.13.
    """
    for rho_clip, gradient in ((2.0, [-0.4, 0, 0.4]), (1.0, [-0.22, 0.09, 0.13])):
        args = script.Args(estimator="vtrace", rho_clip=rho_clip, ent_coef=0.0, vf_coef=0.0, norm_adv=False)
        agent = script.Agent(NUMBER, spaces.Discrete(3), args)
        logits = agent.actor[-1].bias  # all there is where observations are 0; and V = 0
        buffer = script.RolloutBuffer(1, 4, NUMBER, spaces.Discrete(3))
        buffer.add(0, np.zeros((4, 1)), [[0], [0], [1], [2]], [1, 1, 2, 3], True, False, False)
        logits.data = log(0.5, 0.25, 0.25)
        mu_log_probs, _ = buffer.log_probs_and_values(agent)
        logits.data = log(0.4, 0.2, 0.4)
        buffer.compute_advantages(*buffer.log_probs_and_values(agent), mu_log_probs, args)
        (batch,) = buffer.minibatches(1, IN_ORDER)
        close(batch.advantages, [0.8, 0.8, 1.6, 3 * min(1.6, rho_clip)])  # rho R
        loss, _ = script.ppo_loss(agent, batch, args)
        loss.backward()
        close(-logits.grad, gradient)


@pytest.mark.shared("policy_loss")
def test_policy_loss(script):
    """eps = 0.2. Fails if the clip is one-sided, on the wrong side, or lets a gradient through."""
    lines = [  # r, A, min(r A, clip(r) A), its derivative in log r
        (1.0, 2.0, 2.0, 2.0),
        (1.1, 2.0, 2.2, 2.2),  # inside
        (1.5, 2.0, 2.4, 0.0),  # good and likelier already: 1.2 * 2, nothing more to gain
        (0.5, 2.0, 1.0, 1.0),  # good but less likely: bring it back
        (1.1, -2.0, -2.2, -2.2),  # inside
        (1.5, -2.0, -3.0, -3.0),  # bad and likelier: bring it back
        (0.5, -2.0, -1.6, 0.0),  # bad and less likely already: 0.8 * -2
    ]
    ratios, advantages, objectives, derivatives = torch.tensor(lines).T
    log_ratios = ratios.log().requires_grad_()
    loss = script.policy_loss(log_ratios, advantages, 0.2)
    close(loss, -objectives.mean())
    loss.backward()
    close(log_ratios.grad, -derivatives / len(lines))


@pytest.mark.shared("value_loss")
def test_value_loss(script):
    """Old V = 1, return 3. V = 2: (2 - 3)^2/2; clipped to 1.2, (1.2 - 3)^2/2 = 1.62 is more, and no gradient is left.

    V = 0.5 has moved away: (0.5 - 3)^2/2 = 3.125 is more than with 0.8. Fails without the half, or with the smaller.
    """
    values, ones = torch.tensor([2.0, 0.5], requires_grad=True), torch.ones(2)
    for clip_coef, loss, gradient in ((None, 0.5 + 3.125, [-1, -2.5]), (0.2, 1.62 + 3.125, [0, -2.5])):
        actual = script.value_loss(values, ones, 3 * ones, clip_coef)
        close(actual, loss / 2)  # the mean over a batch of two
        close(torch.autograd.grad(actual, values)[0], torch.tensor(gradient) / 2)


@pytest.mark.shared("normalize", "approximate_kl")
def test_normalisation_and_kl(script):
    """1, 3: mean 2, population deviation 1. KL: 2 - 1 - log 2 = 0.306853; 0; 1/2 - 1 + log 2 = 0.193147, not negative.

    Fails if the deviation is the sample's, if 0/0 gives NaN, or if the KL is that of pi from mu.
    """
    close(script.normalize(torch.tensor([1.0, 3.0])), [-1, 1])
    close(script.normalize(torch.tensor([4.0, 4.0])), [0, 0])
    close(script.approximate_kl(log(2.0, 1.0, 0.5)), 0.5 / 3)
    close(script.approximate_kl(log(0.5)), 0.193147)


@pytest.mark.shared("RunningMeanStd")
def test_running_mean_and_deviation(script):
    """1, 3: mean 2, variance 1. Then 5, 5, 6: mean 20/5 = 4, variance (9 + 1 + 1 + 1 + 4)/5 = 3.2. Fails if the merge
    forgets how far the two means are apart, or if results are not clipped to ±10.
    """
    stats = script.RunningMeanStd(1)
    close(stats(torch.tensor([[7.0]])), [[7]])  # nothing seen so far
    stats.update(np.array([[1.0], [3.0]]))
    close([stats.mean.item(), stats.var.item(), stats.count.item()], [2, 1, 2])
    stats.update(np.array([[5.0], [5.0], [6.0]]))
    close([stats.mean.item(), stats.var.item(), stats.count.item()], [4, 3.2, 5])
    close(stats(torch.tensor([[4.0], [4 + math.sqrt(3.2)], [1000.0], [-1000.0]])), [[0], [1], [10], [-10]])


def test_reward_scaling(script):
    """Before, G = 2. Rewards 1, 2 (end), 0 (reset row), 4, 1: G = 1 + 2/2 = 2; 2 + 2/2 = 3; -; 4; 1 + 4/2 = 3, of which
    the mean is 3, the variance 1/2. Fails if G survives an end, is lost between rollouts, or counts reset rows.
    """
    buffer = script.RolloutBuffer(5, 1, NUMBER, spaces.Discrete(2))
    buffer.rewards[:, 0] = rewards = np.array([1, 2, 0, 4, 1])
    buffer.truncated[1], buffer.reset_rows[2], buffer.discounted_returns[:] = True, True, 2
    stats = script.RunningMeanStd()
    buffer.scale_rewards(stats, 0.5)
    close([stats.mean.item(), stats.var.item(), stats.count.item()], [3, 0.5, 4])
    close(buffer.rewards.ravel(), rewards / math.sqrt(0.5))
    close(buffer.discounted_returns, [3])  # for the next rollout


@pytest.mark.shared("categorical", "gaussian")
def test_distributions(script):
    """Factors 1/4, 3/4 and 1/2, 1/4, 1/4, the logits off by 5: log 3/4 + log 1/4; entropies 0.562335 + 1.5 log 2.

    z = 1, deviation 2: -1/2 - log 2 - log sqrt(2 pi) = -2.112086; z = 0, deviation 1: -0.918939. Entropies log 2 +
    1.418939 and 1.418939. Fails if logits are taken for logarithms, or a sign or a constant is wrong.
    """
    log_prob, entropy = script.categorical(log(0.25, 0.75, 0.5, 0.25, 0.25)[None] + 5, torch.tensor([[1, 2]]), [2, 3])
    close(torch.cat([log_prob, entropy]), [math.log(3 / 16), 0.562335 + 1.5 * math.log(2)])
    log_prob, entropy = script.gaussian(torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 1.0]]), log(2.0, 1.0))
    close(torch.cat([log_prob, entropy]), [-2.112086 - 0.918939, 2.112086 + 1.418939])
