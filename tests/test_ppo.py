"""What ppo.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes that stand above it in `catches`. The run section has its tests in
test_run.py.
"""

import math
from itertools import product
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import tools
import torch
from gymnasium import spaces
from reference import ppo as reference
from run_folder import check_evaluation, check_refused, kill_and_resume
from tools import IN_ORDER, Probe, Walk, catches, close, flat, rehearse, watched

NUMBER, THREE = (spaces.Box(-np.inf, np.inf, (size,)) for size in (1, 3))  # observations of as many numbers
TWO = spaces.Discrete(2)
log = lambda *ratios: torch.tensor(ratios).log()
column = lambda *numbers: torch.tensor(numbers)[:, None]  # of one environment, a step each: (T, 1)

# ------------------------------------------------------------------------------- a lesson, by hand: gamma = 0.5 always


@catches(
    "compute_returns, truncation is termination: * ~terminated -> * ~(terminated | truncated)",
    "compute_returns, leaks across truncation: terminated | truncated -> terminated",
    "compute_returns, leaks across termination: terminated | truncated -> truncated",
    "compute_returns, rewards in place of returns: return returns -> return rewards",
    "compute_returns, the rollout's end is an end: next_return = next_values[-1] -> next_return = 0 * next_values[-1]",
    "compute_returns, the value counts twice: gamma * next_return -> gamma * (next_return + ends[t] * next_values[t])",
    "compute_gae, truncation is termination: * ~terminated -> * ~(terminated | truncated)",
    "compute_gae, leaks across truncation: ~(terminated | truncated) -> ~terminated",
    "compute_gae, leaks across termination: ~(terminated | truncated) -> ~truncated",
    "compute_gae, truncated step left out: = deltas[t] -> = deltas[t] * ~truncated[t]",
    "compute_gae, no gamma in the trace: gamma * gae_lambda -> gae_lambda",
    "compute_gae, no lambda in the trace: gamma * gae_lambda -> gamma",
    "compute_gae, advantages in place of returns: advantages + values -> advantages",
    "compute_gae, the trace ends after a step: next_advantage = advantages[t] -> next_advantage = deltas[t]",
)
def test_returns_and_gae(script):
    """R: the rollout ends with 5 + 6/2 = 8, before it 6 + 8/2 = 10 and 5 + 10/2 = 10. Cut off, 4 + 8/2 = 8; before it
    3 + 8/2 = 7. Terminated, 2; before it 1 + 2/2 = 2. A: lambda = 0.5 as well, so that traces decay by 1/4.

    delta_6 = 5 + 6/2 - 4   = 4      A_6 = 4                  the rollout ends, the episode does not
    delta_5 = 6 + 4/2 - 3   = 5      A_5 = 5 + 4/4 = 6
    delta_4 = 5 + 3/2 - 2.5 = 4      A_4 = 4 + 6/4 = 5.5      that is 4 + 5/4 + 4/16: the trace goes over two steps
    delta_3 = 4 + 8/2 - 2   = 6      A_3 = 6                  truncated: bootstrap, but no trace
    delta_2 = 3 + 2/2 - 1.5 = 2.5    A_2 = 2.5 + 6/4 = 4
    delta_1 = 2 - 1         = 1      A_1 = 1                  terminated: neither
    delta_0 = 1 + 1/2 - 0.5 = 1      A_0 = 1 + 1/4 = 1.25
    """
    rewards, values = column(1.0, 2, 3, 4, 5, 6, 5), column(0.5, 1, 1.5, 2, 2.5, 3, 4)
    next_values = column(1.0, 99, 2, 8, 3, 4, 6)  # of the true successors
    terminated = column(0, 1, 0, 0, 0, 0, 0) > 0  # so that 99 must not count
    truncated = column(0, 0, 0, 1, 0, 0, 0) > 0  # so that 8 counts, but nothing of what comes after
    returns = script.compute_returns(rewards, next_values, terminated, truncated, 0.5)
    close(returns.ravel(), [2, 2, 7, 8, 10, 10, 8])
    rollout = rewards, values, next_values, terminated, truncated
    advantages, returns = script.compute_gae(*rollout, 0.5, 0.5)
    close(advantages.ravel(), [1.25, 1, 4, 6, 5.5, 6, 4])
    close(returns.ravel(), [1.75, 2, 5.5, 8, 8, 9, 8])  # A + V
    close(script.compute_gae(*rollout, 0.5, 0.0)[0].ravel(), [1, 1, 2.5, 6, 4, 5, 4])  # lambda = 0 leaves the deltas


@catches(
    "compute_vtrace, truncation is termination: * ~terminated -> * ~(terminated | truncated)",
    "compute_vtrace, leaks: ~(terminated | truncated) -> ~terminated",
    "compute_vtrace, bootstraps from the terminal state: * ~terminated -> * 1",
    "compute_vtrace, R for r: rewards + -> compute_returns(rewards, next_values, terminated, truncated, gamma) +",
    "compute_vtrace, weighs the advantages as well: return advantages -> return rho * advantages",
    "compute_vtrace, V in place of v: deltas[t] + gamma * next_correction -> deltas[t]",
    "compute_vtrace, rho carries back: gamma * c[t] -> gamma * rho[t]",
)
def test_vtrace(script):
    """pi/mu = 2, 1/2, 4; rho at most 1.5 and c at most 1: rho = 1.5, 0.5, 1.5 and c = 1, 0.5, 1. gamma = 0.5.

    v_2 = 3 + 1.5 (3 + 4/2 - 3) = 6                      A_2 = 3 + 4/2 - 3 = 2
    v_1 = 2 + 0.5 (4 - 2) = 3                            A_1 = 4 - 2 = 2               terminated
    v_0 = 1 + 1.5 (1 + 2/2 - 1) + 1/2 (3 - 2) = 3        A_0 = 1 + 3/2 - 1 = 1.5
    """
    rewards, values, next_values = column(1.0, 4, 3), column(1.0, 2, 3), column(2.0, 99, 4)
    terminated, truncated = column(0, 1, 0) > 0, column(0, 0, 0) > 0
    step, ratios = (rewards, values, next_values, terminated, truncated), column(2.0, 0.5, 4.0)

    def vtrace(rho_clip, c_clip, ratios=ratios):
        rho, c = ratios.clamp(max=rho_clip), ratios.clamp(max=c_clip)
        return torch.cat(script.compute_vtrace(*step, rho, c, 0.5), dim=1).T  # A, v

    close(vtrace(1.5, 1.0), [[1.5, 2, 2], [3, 3, 6]])
    close(vtrace(1.0, 1.0), [[1.5, 2, 2], [2.5, 3, 5]])  # both at most 1: v_0 = 1 + 1 + 1/2 (3 - 2)
    close(vtrace(1.5, 0.25)[1], [2.625, 3, 6])  # c_0 = 1/4: v_0 = 1 + 1.5 + 1/8 (3 - 2)
    close(vtrace(1.5, 1.5)[1], [3.25, 3, 6])  # c_0 = 3/2: v_0 = 1 + 1.5 + 3/4 (3 - 2)
    close(vtrace(1.0, 1.0, ratios**0)[1], [3, 4, 5])  # pi = mu: 1 + 4/2, 4, 3 + 4/2
    truncated[0] = True  # then v_0 = 1 + 1.5 = 2.5, and v_1 in A_0 is V_1: 1 + 2/2 - 1
    close(vtrace(1.5, 1.0), [[1, 2, 2], [2.5, 3, 6]])


@catches(
    'RolloutBuffer.compute_advantages, rewards-to-go are forgotten: or args.value_target == "returns" -> ',
    'RolloutBuffer.compute_advantages, the advantages change as well: if args.estimator == "vanilla":\n -> if True:\n',
)
def test_value_targets(script):
    """Rewards 1, 2, 3, values 1, 1, 1, terminated after the third step; gamma = lambda = 0.5.

    t  delta                A                  A + V  rewards-to-go
    0  1 + 1/2 - 1 = 0.5    0.5 + 2/4 = 1      2      1 + 3.5/2 = 2.75
    1  2 + 1/2 - 1 = 1.5    1.5 + 2/4 = 2      3      2 + 3/2 = 3.5
    2  3 - 1 = 2            2                  3      3
    """
    buffer = script.RolloutBuffer(3, 1, NUMBER, TWO)
    buffer.rewards[:, 0], buffer.terminated[2] = [1, 2, 3], True
    log_probs, values = torch.zeros(3, 1), torch.tensor([[1.0], [1], [1], [99]])
    for target, returns in (("estimator", [2, 3, 3]), ("returns", [2.75, 3.5, 3])):
        args = script.Args(gamma=0.5, gae_lambda=0.5, value_target=target)
        buffer.compute_advantages(log_probs, values, log_probs, args)
        close(buffer.rows.advantages[:, 0], [1, 2, 2])
        close(buffer.rows.returns[:, 0], returns)


@catches(
    "RolloutBuffer.compute_advantages, bootstraps from the reset: next_values = values[:-1], values[1:] -> "
    "next_values = values[:-1], values[[1, 3, 3, 4]]",
    "RolloutBuffer.compute_advantages, from the state itself: values[:-1], values[1:] -> values[:-1], values[:-1]",
    "RolloutBuffer.compute_advantages, from the last stored: next_values = values[:-1], values[1:] -> "
    "next_values = values[:-1], values[[1, 2, 3, 3]]",
    "RolloutBuffer.compute_advantages, normalised: returns - old_values -> normalize(returns - old_values)",
    "RolloutBuffer.minibatches, reset rows drawn: ~self.reset_rows -> self.obs[1:] > 0",
    "RolloutBuffer.explained_variance, of all rows: ~self.reset_rows -> self.reset_rows | True",
    "RolloutBuffer.explained_variance, uncentred: errors.var(correction=0) -> (errors**2).mean()",
)
def test_reset_rows(script):
    """V(s) = s. In row 1 the episode is cut off; row 2 is a reset row, which holds its last observation, 8.

    Returns 1 + 6/2 = 4; 2 + 8/2 = 6; -; 3 + 4/2 = 5.
    """
    buffer = script.RolloutBuffer(4, 1, NUMBER, TWO)
    buffer.obs[:, 0, 0], buffer.rewards[:, 0] = [1, 2, 8, 3, 4], [1, 2, 0, 3]
    buffer.truncated[1], buffer.reset_rows[2] = True, True
    log_probs, values = torch.zeros(4, 1), torch.tensor(buffer.obs[:, :, 0])
    buffer.compute_advantages(log_probs, values, log_probs, script.Args(estimator="vanilla", gamma=0.5))
    (batch,) = buffer.minibatches(1, IN_ORDER)
    close(torch.stack([batch.obs[:, 0], batch.returns, batch.advantages]), [[1, 2, 3], [4, 6, 5], [3, 4, 2]])
    close(buffer.explained_variance(), 0)  # both R = 4, 6, 5 and R - V = 3, 4, 2 have the variance 2/3


@catches(
    "RolloutBuffer.compute_advantages, clipped round the agent now: =old_log_probs, -> =log_probs,",
    "RolloutBuffer.compute_advantages, the ratio is forgotten: log_probs - old_log_probs -> log_probs - log_probs",
    "RolloutBuffer.compute_advantages, rho is not clipped: clamp(max=args.rho_clip) -> clamp(max=99)",
    "compute_vtrace, the ratio counts twice: return advantages -> return rho * advantages",
)
def test_the_ratio_counts_once(script):
    """A bandit: R = 1, 2, 3. pi_old = 1/2, 1/4, 1/4 played each action as often as it should; pi = 0.4, 0.2, 0.4.

    J = sum pi R = 2, and its gradient in the logits is pi (R - J) = -0.4, 0, 0.4. From pi_old's plays V-trace must get
    the same, each weighted by r = pi/pi_old = 0.8, 0.8, 1.6 once; eps = 1 clips none of them. The critic's targets,
    where V = 0, are rho R, with rho = min(rho_clip, r). With eps = 0.2 the last ratio is clipped, and its R has no part
    in the gradient: 1/4 (2 * 0.8 (1, 0, 0) + 0.8 * 2 (0, 1, 0)) - 0.8 pi = 0.4 - 0.32, 0.4 - 0.16, -0.32.
    """
    all_count, clipped = [-0.4, 0, 0.4], [0.08, 0.24, -0.32]
    for rho_clip, eps, gradient in ((2.0, 1.0, all_count), (1.0, 1.0, all_count), (1.0, 0.2, clipped)):
        settings = {"rho_clip": rho_clip, "clip_coef": eps, "ent_coef": 0.0, "vf_coef": 0.0, "norm_adv": False}
        args = script.Args(estimator="vtrace", **settings)
        agent = script.Agent(NUMBER, spaces.Discrete(3), args)
        logits = agent.actor[-1].bias  # all there is where observations are 0; and V = 0
        buffer = script.RolloutBuffer(1, 4, NUMBER, spaces.Discrete(3))
        buffer.actions[0, :, 0], buffer.rewards[0], buffer.terminated[0] = [0, 0, 1, 2], [1, 1, 2, 3], True
        logits.data = log(0.5, 0.25, 0.25)
        old_log_probs, _ = buffer.log_probs_and_values(agent)
        logits.data = log(0.4, 0.2, 0.4)
        buffer.compute_advantages(*buffer.log_probs_and_values(agent), old_log_probs, args)
        (batch,) = buffer.minibatches(1, IN_ORDER)
        close(batch.returns, [0.8, 0.8, 1.6, 3 * min(1.6, rho_clip)])  # rho R
        loss, figures = script.ppo_loss(agent, batch, args)
        loss.backward()
        close(-logits.grad, gradient)
        close(figures["approx_kl"], (2 * 0.8 + 0.8 + 1.6) / 4 - 1 - (3 * math.log(0.8) + math.log(1.6)) / 4)


@catches(
    "policy_loss, clipped above only: clamp(1 - clip_coef, 1 + clip_coef) -> clamp(max=1 + clip_coef)",
    "policy_loss, clipped below only: clamp(1 - clip_coef, 1 + clip_coef) -> clamp(min=1 - clip_coef)",
    "policy_loss, always clipped: torch.min(ratios * advantages, clipped * advantages) -> (clipped * advantages)",
    "policy_loss, larger of the two: torch.min -> torch.max",
    "policy_loss, uphill: return - -> return ",
)
def test_policy_loss(script):
    """eps = 0.2. The clip must work on one side only, and let no gradient through there."""
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


@catches(
    "value_loss, smaller of the two: torch.max -> torch.min",
    "value_loss, without the half: 0.5 * -> ",
    "value_loss, moves freely: old_values + (values - old_values).clamp(-clip_coef, clip_coef) -> values",
    "normalize, sample deviation: correction=0 -> correction=1",
    "approximate_kl, can be negative: log_ratios.exp() - 1 - log_ratios -> -log_ratios",
    "approximate_kl, the other way round: log_ratios.exp() - 1 - log_ratios -> (log_ratios - 1) * log_ratios.exp() + 1",
)
def test_value_loss_normalisation_and_kl(script):
    """Old V = 1, return 3. V = 2: (2 - 3)^2/2; clipped to 1.2, (1.2 - 3)^2/2 = 1.62 is more, and no gradient is left.

    V = 0.5 has moved away: (0.5 - 3)^2/2 = 3.125 is more than with 0.8. Of 1, 3 the mean is 2, the population deviation
    1. KL: 2 - 1 - log 2 = 0.306853; 0; 1/2 - 1 + log 2 = 0.193147.
    """
    values, ones = torch.tensor([2.0, 0.5], requires_grad=True), torch.ones(2)
    for clip_coef, loss, gradient in ((None, 0.5 + 3.125, [-1, -2.5]), (0.2, 1.62 + 3.125, [0, -2.5])):
        actual = script.value_loss(values, ones, 3 * ones, clip_coef)
        close(actual, loss / 2)  # the mean over a batch of two
        close(torch.autograd.grad(actual, values)[0], torch.tensor(gradient) / 2)
    close(script.normalize(torch.tensor([1.0, 3.0])), [-1, 1])
    close(script.normalize(torch.tensor([4.0, 4.0])), [0, 0])
    close(script.approximate_kl(log(2.0, 1.0, 0.5)), 0.5 / 3)
    close(script.approximate_kl(log(0.5)), 0.193147)


@catches(
    "RunningMeanStd.update, forgets the distance of the means: self.var += weight * (1 - weight) * delta**2 -> ",
    "RunningMeanStd.update, sample deviation: correction=0 -> correction=1",
    "RunningMeanStd.forward, not clipped: .clamp(-10, 10) -> ",
    'RunningMeanStd, float32: "mean", torch.zeros(shape, dtype=torch.float64) -> "mean", torch.zeros(shape)',
)
def test_running_mean_and_deviation(script):
    """1, 3: mean 2, variance 1. Then 5, 5, 6: mean 20/5 = 4, variance (9 + 1 + 1 + 1 + 4)/5 = 3.2.

    10,000 zeros and a one have the mean 1 / 10,001 also far from 0, where float32 has steps of 6e-5.
    """
    stats = script.RunningMeanStd(1)
    close(stats(torch.tensor([[7.0]])), [[7]])  # nothing seen so far
    stats.update(np.array([[1.0], [3.0]]))
    close([stats.mean.item(), stats.var.item(), stats.count.item()], [2, 1, 2])
    stats.update(np.array([[5.0], [5.0], [6.0]]))
    close([stats.mean.item(), stats.var.item(), stats.count.item()], [4, 3.2, 5])
    close(stats(torch.tensor([[4.0], [4 + math.sqrt(3.2)], [1000.0], [-1000.0]])), [[0], [1], [10], [-10]])
    stats = script.RunningMeanStd(1)
    stats.update(np.full((10_000, 1), 1000.0))
    stats.update(np.array([[1001.0]]))
    close(stats.mean - 1000, [1 / 10_001], atol=1e-9)


@catches(
    "RolloutBuffer.scale_rewards, survives an end: self.terminated[t] | self.truncated[t] -> self.terminated[t]",
    "RolloutBuffer.scale_rewards, one end ends all: np.where(self.terminated[t] | self.truncated[t], 0, X[t]) -> "
    "X[t] * (1 - (self.terminated[t] | self.truncated[t]).max())",
    "RolloutBuffer.scale_rewards, counts reset rows: [~self.reset_rows] -> [self.reset_rows | True]",
    "RolloutBuffer.scale_rewards, always begins anew: X = np -> self.rewards_so_far[:] = 0; X = np",
    "RolloutBuffer.scale_rewards, not clipped: -10, 10) -> -1e9, 1e9)",
)
def test_reward_scaling(script):
    """gamma = 0.5, and G was 2 in the first environment, 0 in the second.

    rewards    1                2 (cut off)     0 (reset)  4    1
    G          1 + 2/2 = 2      2 + 2/2 = 3     -          4    1 + 4/2 = 3
    rewards    2 (terminated)   0 (reset)       4          1    3
    G          2                -               4          3    3 + 3/2 = 4.5

    The mean of these eight G is 25.5/8 = 3.1875, that of their squares 87.25/8; so the variance is 0.74609375. Where
    all G are 3, the deviation is 0, and rewards are clipped to ±10.
    """
    buffer = script.RolloutBuffer(5, 2, NUMBER, TWO)
    buffer.rewards[:] = rewards = np.array([[1, 2], [2, 0], [0, 4], [4, 1], [1, 3]])
    buffer.truncated[1, 0], buffer.terminated[0, 1] = True, True
    buffer.reset_rows[2, 0], buffer.reset_rows[1, 1] = True, True
    buffer.rewards_so_far[0] = 2
    stats = script.RunningMeanStd()
    buffer.scale_rewards(stats, script.Args(gamma=0.5))
    close([stats.mean.item(), stats.var.item(), stats.count.item()], [3.1875, 0.74609375, 8])
    close(buffer.rewards, rewards / math.sqrt(0.74609375))
    close(buffer.rewards_so_far, [3, 4.5])  # for the next rollout
    for sign in (1, -1):
        buffer = script.RolloutBuffer(1, 2, NUMBER, TWO)
        buffer.rewards[:] = 3 * sign
        buffer.scale_rewards(script.RunningMeanStd(), script.Args(gamma=0.5))
        close(buffer.rewards, [[10 * sign, 10 * sign]])


@catches(
    "categorical, logits for logarithms: factor_logits.log_softmax(dim=1) -> factor_logits",
    "categorical, entropy of the last factor: sum(entropies) -> entropies[-1]",
    "categorical, all factors take the first one's category: actions[:, i] -> actions[:, 0]",
    "gaussian, deviation for its logarithm: - log_std - -> - log_std.exp() -",
    "gaussian, the entropy of one dimension: entropy.sum() -> entropy.mean()",
)
def test_distributions(script):
    """Factors 1/4, 3/4 and 1/2, 1/4, 1/4, the logits off by 5: log 3/4 + log 1/2; entropies 0.562335 + 1.5 log 2.

    z = 1, deviation 2: -1/2 - log 2 - log sqrt(2 pi) = -2.112086; z = 0, deviation 1: -0.918939. Entropies log 2 +
    1.418939 and 1.418939.
    """
    log_prob, entropy = script.categorical(log(0.25, 0.75, 0.5, 0.25, 0.25)[None] + 5, torch.tensor([[1, 0]]), [2, 3])
    close(torch.cat([log_prob, entropy]), [math.log(3 / 8), 0.562335 + 1.5 * math.log(2)])
    log_prob, entropy = script.gaussian(torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 1.0]]), log(2.0, 1.0))
    close(torch.cat([log_prob, entropy]), [-2.112086 - 0.918939, 2.112086 + 1.418939])


MULTI = spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 10], [0, -1]])
LOGITS = [0.1, 0.3, -1.0, -2.0, -0.5, 0.0, 0.1, 0.2, 0.3, 1.0, 0.0]
BOX = spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32))  # clips
INTEGERS = spaces.Box(np.array([-3, 0]), np.array([3, 9]), dtype=np.int64)  # and rounds
# [-1, 1] becomes [0, 5] by 2.5 a + 2.5, [-3, 3] by 3 a, [0, 9] by 4.5 a + 4.5; what is beyond is clipped
CLIPPED = [[-3, 0.2], [0.5, -0.6], [3, -7]], [[-1, 3], [0.5, 1], [1, 0]]
ROUNDED = [[0.9, 0.1], [-0.9, 1.2], [-3, 5]], [[3, 5], [-3, 9], [-3, 9]]
HALF = spaces.Box(np.array([0, -np.inf], np.float32), np.array([np.inf, np.inf], np.float32))  # what has no two bounds
ACTIONS = {  # space; actions as the agent has them, as the environment takes them; an output, and the likeliest then
    "Discrete from 5": (spaces.Discrete(3, start=5), [[0], [2]], [5, 7], [0.1, 0.3, 0.2], [6]),
    "MultiDiscrete": (MULTI, [[0, 2, 3, 1]], [[[1, 12], [3, 0]]], LOGITS, [[[2, 12], [3, -1]]]),
    "MultiBinary": (spaces.MultiBinary(3), [[0, 1, 1]], [[0, 1, 1]], [0.1, 0.3, 0.3, 0.1, -1.0, 1.0], [[1, 0, 1]]),
    "Box": (BOX, *CLIPPED, [0.25, 0.6], [[0.25, 4]]),
    "half a Box": (HALF, [[-2.5, 5], [9, -9]], [[0, 5], [9, -9]], [7.0, -5.0], [[7, -5]]),
    "Box of integers": (INTEGERS, *ROUNDED, [0.6, -0.8], [[2, 1]]),
}


def make_agent(script, name="Box", output=None, observation_space=THREE):
    """An Agent, whose weights are not nearly 0, or whose actor gives this output for every observation."""
    torch.manual_seed(0)
    agent = script.Agent(observation_space, ACTIONS[name][0], script.Args())
    for parameter in agent.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    if output is not None:
        agent.actor[-1].weight.data.zero_()
        agent.actor[-1].bias.data = torch.tensor(output)
    return agent


@catches(
    "Agent.to_env, truncates: np.rint(actions) -> actions",
    "Agent.to_env, bounds forgotten: np.clip(actions, space.low, space.high) -> actions",
    "Agent.to_env, not stretched: self.action_scale * actions + self.action_bias -> actions",
    "scale_and_bias, the whole width: high / 2 - low / 2 -> high - low",
    "scale_and_bias, bounds where there are none: low[~bounded] = -1 -> low[~bounded] = -3",
    'Agent.to_env, start forgotten: getattr(space, "start", 0) -> 0',
    "Agent.sample, normal for all: rng.standard_normal if self.continuous else rng.gumbel -> rng.standard_normal",
    "Agent.sample, all alike: draw(size=output.shape) -> draw(size=output.shape[1:])",
    "Agent.sample, no noise: noise if self.continuous else noise -> noise if self.continuous else 0",
    "Agent.sample, log_std for std: self.log_std.exp() -> self.log_std",
)
def test_actions(script):
    """Each kind of action as the environment takes it; the likeliest; and draws in their proportions.

    20,000 draws: Pearson's statistic exceeds 30 once in 10,000 seeds, and would be in the thousands for uniform
    actions; a Gaussian's mean and deviation have five standard errors of room.
    """
    for name, (space, actions, expected, output, likeliest) in ACTIONS.items():
        agent = make_agent(script, name, output)
        played = agent.to_env(np.array(actions))
        close(played, expected)
        assert played.dtype == space.dtype and all(space.contains(action) for action in played)
        close(agent.act(np.ones((1, 3), np.float32)), likeliest)
    draw = lambda agent: agent.sample(nothing, np.random.default_rng(0))
    nothing, factors = np.zeros((20_000, 3), np.float32), [[0.9, 0.1], [0.4, 0.6], [0.5, 0.5]]
    agent = make_agent(script, "MultiBinary", np.log(factors, dtype=np.float32).ravel())
    counts = np.bincount(np.ravel_multi_index(draw(agent).T, (2, 2, 2)), minlength=8)
    expected = 20_000 * np.array([math.prod(ps) for ps in product(*factors)])
    assert np.sum((counts - expected) ** 2 / expected) < 30
    agent = make_agent(script, "Box", [3.0, -1.0])
    agent.log_std.data = log(0.5, 2.0)
    actions = draw(agent)
    assert np.all(np.abs(actions.mean(0) - [3, -1]) < 5 * np.array([0.5, 2]) / 20_000**0.5)
    assert np.all(np.abs(actions.std(0) / [0.5, 2] - 1) < 5 / 40_000**0.5)


@catches(
    "Agent.__init__, first policy not uniform: outputs, gain=0.01 -> outputs, gain=1.0",
    "Agent.__init__, deviation for its logarithm: math.log(args.init_std) -> args.init_std",
    "Agent.features, not normalised: obs if self.obs_stats is None -> obs if True",
    "NatureCNN.forward, not scaled: images / 255 -> images / 1.0",
    "RunningMeanStd, not saved: zeros(shape, dtype=torch.float64) -> zeros(shape).double(), persistent=False",
)
def test_networks(script):
    """Layers are orthogonal with gains sqrt 2, in the end 0.01 and 1; both networks see normalised observations, as
    loaded weights do; images with channels first and last are the same to the CNN, scaled to [0, 1]. A Box's first
    actions have the deviation init_std.
    """
    close(script.Agent(THREE, ACTIONS["Box"][0], script.Args(init_std=0.37)).log_std.exp(), [0.37, 0.37])
    envs = SimpleNamespace(single_observation_space=THREE, single_action_space=spaces.Discrete(3))
    given = {"hidden_sizes": (8, 5), "critic_hidden_sizes": (7,), "normalize_obs": True}
    agent, loaded = (script.make_agent(script.Args(seed=seed, **given), envs) for seed in (1, 2))
    for network, sizes, last_gain in ((agent.actor, (3, 8, 5, 3), 0.01), (agent.critic, (3, 7, 1), 1)):
        layers = [module for module in network if isinstance(module, torch.nn.Linear)]
        assert [tuple(m.weight.shape) for m in layers] == list(zip(sizes[1:], sizes))
        for m, gain in zip(layers, [2**0.5] * (len(layers) - 1) + [last_gain]):
            w = m.weight.detach() if m.out_features <= m.in_features else m.weight.detach().T  # the shorter side
            close(w @ w.T / gain**2, np.eye(len(w)))
            assert not m.bias.any()
    agent.obs_stats.update(np.array([[0.0] * 3, [4.0] * 3]))  # mean 2, variance 4: 6 is seen as (6 - 2) / 2 = 2
    loaded.load_state_dict(agent.state_dict())
    shown, seen = torch.full((1, 3), 6.0), torch.full((1, 3), 2.0)
    for one in (agent, loaded):
        close(one.actor(one.features(shown)), agent.actor(seen))
        close(one(shown, torch.zeros(1, 1, dtype=torch.int64))[2], agent.critic(seen)[0])
    images = np.random.default_rng(0).integers(0, 256, (3, 2, 36, 40), np.uint8)
    for shown in (images, np.moveaxis(images, 1, 3)):
        agent = make_agent(script, observation_space=spaces.Box(0, 255, shown.shape[1:], np.uint8))
        hidden = agent.cnn.linear(agent.cnn.convolutions(torch.as_tensor(images) / 255)).relu()
        close(agent.sample(shown), agent.actor(hidden))
        close(agent(torch.as_tensor(shown), torch.zeros(3, 2))[2], agent.critic(hidden)[:, 0])


@catches(
    "RolloutBuffer.minibatches, rows lost: np.flatnonzero(~self.reset_rows) -> np.flatnonzero(~self.reset_rows)[:4]",
    "RolloutBuffer.minibatches, not shuffled: rng.permutation -> ",
    "RolloutBuffer.minibatches, another generator: rng.permutation -> np.random.default_rng(0).permutation",
    "RolloutBuffer.minibatches, rows mixed: field.flatten(0, 1) for -> field.transpose(0, int(field is "
    "self.rows.advantages)).flatten(0, 1) for",
)
def test_minibatches(script):
    """Every row but the reset rows once, all fields of a batch of the same rows, parts as equal as can be.

    Row t of environment n holds 100 n + t, and a fraction per field.
    """
    all_rows, some = np.zeros((50, 2), bool), np.array([[1, 0], [0, 0], [0, 1]]) > 0
    for reset_rows, num_minibatches in ((all_rows, 3), (some, 3), (some, 4)):
        buffer = script.RolloutBuffer(*reset_rows.shape, NUMBER, spaces.Discrete(3))
        where = 100 * np.arange(reset_rows.shape[1]) + np.arange(len(reset_rows))[:, None]
        buffer.obs[:-1, :, 0], buffer.actions[:, :, 0], buffer.reset_rows[:] = where, where, reset_rows
        parts = dict(zip(script.Batch._fields[2:], torch.arange(1, 7) / 8))  # of all but obs and actions
        fields = {name: torch.as_tensor(where, dtype=torch.float32) + part for name, part in parts.items()}
        buffer.rows = script.Batch(torch.as_tensor(buffer.obs[:-1]), torch.as_tensor(buffer.actions), **fields)
        orders = []
        for seed in (0, 0, 1):
            batches = list(buffer.minibatches(num_minibatches, np.random.default_rng(seed)))
            for batch in batches:
                place = batch.obs[:, 0]
                assert batch.actions[:, 0].equal(place.long())
                assert all(getattr(batch, name).equal(place + part) for name, part in parts.items())
            sizes = [len(batch.obs) for batch in batches]
            orders.append([row for batch in batches for row in batch.obs[:, 0].tolist()])
            assert sorted(orders[-1]) == sorted(where[~reset_rows].tolist())
            assert len(sizes) == num_minibatches and max(sizes) - min(sizes) <= 1
        assert orders[0] == orders[1] and (len(orders[0]) < 100 or orders[0] != orders[2])


# ----------------------------------------------------------------------------------------------------- whole trainings

# Rows of the first environment: 2 steps (terminated), reset, 3 steps (cut off); of the second: 1 step (both), reset,
# 4 steps (cut off). So a rollout of 6 steps has 10 rows to learn from, and the next one begins with reset rows.
PLANS = [[(2, "t"), (3, "c")], [(1, "b"), (4, "c")]]
RAW = {"normalize_obs": False, "normalize_reward": False}
SHORT = {"num_envs": 2, "num_steps": 6, "num_minibatches": 2, "update_epochs": 3, "gamma": 0.5, "hidden_sizes": (16,)}
SHORT |= {"clip_coef": 0.15, "clip_vloss_coef": 0.3, "ent_coef": 0.03, "vf_coef": 0.7, "learning_rate": 1e-2}
SHORT |= {"total_timesteps": 15, "anneal_lr": True} | RAW  # two rollouts
TRAININGS = [
    ("Discrete from 5", {"gae_lambda": 0.8}),
    ("MultiBinary", {"norm_adv": False, "clip_vloss": True}),
    ("MultiDiscrete", {"anneal_lr": False, "normalize_obs": True, "normalize_reward": True}),
    ("Box", {"max_grad_norm": 1e9, "clip_reward": True, "estimator": "vanilla"}),
    ("Discrete from 5", {"estimator": "vtrace", "rho_clip": 1.1, "c_clip": 0.9, "norm_adv": False}),
    ("Box of integers", {"estimator": "vtrace", "rho_clip": 0.9, "normalize_obs": True, "clip_vloss": True}),
]


def walk(script, name="Discrete from 5", **args):
    """(a Run in two environments that walk according to PLANS, what its loss saw)."""
    space = mock.patch.object(Walk, "action_space", ACTIONS[name][0])
    with space, watched(script) as calls:
        return rehearse(script, lambda: Walk(PLANS[0], 0), lambda: Walk(PLANS[1], 1), **SHORT | args), calls


@catches(
    "compute_returns, truncation wins: * ~terminated -> * ~(terminated & ~truncated)",
    "compute_gae, truncation wins: * ~terminated -> * ~(terminated & ~truncated)",
    "compute_vtrace, truncation wins: * ~terminated -> * ~(terminated & ~truncated)",
    "compute_vtrace, all environments end at once: continues[t] * -> continues[t].all() *",
    "ppo_loss, entropy lowered: - args.ent_coef -> + args.ent_coef",
    "ppo_loss, value weighs 1: args.vf_coef * v_loss -> v_loss",
    "ppo_loss, ratio inverted: log_probs - batch.old_log_probs -> batch.old_log_probs - log_probs",
    "RolloutBuffer.minibatches, reset rows learnt: ~self.reset_rows -> self.rewards < 99",
    "train, reset row that opens a rollout forgotten: for t in -> reset_rows = reset_rows & False\n        for t in",
    "train, last observation not stored: buffer.obs[-1] = obs -> 0",
    "train, gradients add up: optimizer.zero_grad() -> 0",
    "train, gradients not shortened: args.max_grad_norm -> 1e9",
    "train, learning rate kept: if args.anneal_lr else -> if False else",
    "train, learning rate lowered unasked: if args.anneal_lr else -> if True else",
    'train, estimates made anew, as in V-trace: args.estimator == "vtrace" and epoch > 0 -> epoch > 0',
    "train, V-trace keeps the first estimates: epoch > 0 -> False",
    "train, clipped round what the epoch began with: (log_probs, values, old_log -> (log_probs, values, log",
    "train, reset rows in the statistics: [:-1][~buffer.reset_rows] -> [:-1]",
    "train, statistics updated before learning: buffer.scale_rewards( -> agent.obs_stats and agent.obs_stats.update("
    "buffer.obs[:-1][~buffer.reset_rows])\n        buffer.scale_rewards(",
    "train, reported returns are signs: run.count(obs, rewards, -> run.count(obs, np.sign(rewards),",
)
def test_training(script):
    """Two rollouts, of three epochs each, with ends and reset rows, move the weights where torch's Adam goes along the
    gradient of the textbook's loss, with advantages by the sums above; every figure is the textbook's.
    """
    for name, options in TRAININGS:
        run, calls = walk(script, name, **options)
        start = flat(calls[0].agent)
        agent, steps = reference.train(script, run, calls)
        assert len(calls) == 12 and run.step == steps
        assert (calls[0].buffer.obs[-1] == calls[-1].buffer.obs[0]).all()
        assert sorted(run.episodes["return"])[:3] == [1, 3, 21]
        close(flat(run.agent), flat(agent), atol=1e-4)
        assert (flat(agent) - start).abs().max() > 0.05  # the tolerance is far below what was learnt


@catches("train, limit forgotten: > args.target_kl -> > 1e9")
def test_target_kl(script):
    """It is looked at after each epoch of two minibatches, of which the second has a KL above 0."""
    assert [len(walk(script, target_kl=limit)[1]) for limit in (None, 1e-12, 1e9)] == [12, 4, 12]


EASY = {"num_envs": 8, "num_steps": 32, "num_minibatches": 2, "learning_rate": 3e-2, "gamma": 0.5, "ent_coef": 0.0}
EASY |= {
    "hidden_sizes": (16,),
    "total_timesteps": 1500,
    "eval_episodes": 8,
    "update_epochs": 4,
    "anneal_lr": True,
} | RAW
WORLDS = {  # what is learnt, the value that each observation must come to, and the return of the best actions
    "one step that pays 1 and terminates": (Probe, {0: 1}, 1),
    "the same, cut off: it would go on, 1 / (1 - 0.5) = 2": (lambda: Probe(end="c"), {0: 2}, 1),
    "1 after the second step": (lambda: Probe(lambda obs, _: obs == 1, steps=2), {0: 0.5, 1: 1}, 1),
    "1 for action 0 at -1, 1 at 1": (lambda: Probe(lambda o, a: a == (o > 0), varied=True), {-1: 1, 1: 1}, 1),
    "a reward of 7, of which the sign is learnt": (lambda: Probe(lambda *_: 7), {0: 1}, 7),
}


SLOW = [pytest.param(estimator, marks=pytest.mark.slow) for estimator in ("vtrace", "vanilla")]


@pytest.mark.parametrize("estimator", ["gae", *SLOW])
@pytest.mark.parametrize("name", WORLDS)
def test_small_worlds_are_learnt(script, name, estimator):
    """Fails if an end, a discount, an action or a reward is taken for another anywhere between environment and V."""
    world, values, score = WORLDS[name]
    run = rehearse(script, world, **EASY, clip_reward=score == 7, estimator=estimator)
    obs = torch.tensor(list(values))[:, None].float()
    close(run.agent.critic(run.agent.features(obs))[:, 0], list(values.values()), atol=0.1)
    assert run.evaluations["return_mean"][-1] == score


# -------------------------------------------------------------------------------------------- what users change, runs

OWN = "self.actor = nn.Sequential(nn.Linear(inputs, 9), nn.GELU(), nn.Dropout(0.5), nn.Linear(9, outputs))"
COSINE = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)"
EDITS = [
    "mlp, another activation: nn.Tanh() -> nn.ReLU()",
    f"Agent.__init__, an own network with dropout: self.actor = mlp(inputs, sizes, outputs, gain=0.01) -> {OWN}",
    'ppo_loss, one more metric: "loss": loss.detach(), -> "loss": loss.detach(), "ratio": log_ratios.exp().mean(),',
    f"train, an own scheduler: torch.optim.lr_scheduler.LambdaLR(optimizer, factor) -> {COSINE}",
    "train, SGD: torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True) -> "
    "torch.optim.SGD([{'params': agent.actor.parameters(), 'lr': 1.0}, {'params': agent.critic.parameters()}], lr=0.1)",
]


@pytest.mark.parametrize("edit", EDITS)
def test_what_is_changed_is_what_runs(script, edit):
    """What acts is what learns, without dropout; a metric that is added has a column without another edit; a scheduler
    that takes the place of ours is the only one, and is saved; with ours, each group keeps its own rate.
    """
    run = rehearse(tools.with_mistake(script, edit), Probe, **EASY)
    obs = np.random.default_rng(0).normal(size=(5, 1)).astype(np.float32)
    logits = run.agent.actor(run.agent.features(torch.tensor(obs)))
    assert run.agent.sample(obs)[:, 0].tolist() == logits.argmax(1).tolist()
    log_probs, _, _ = run.agent(torch.tensor(obs), torch.zeros(5, 1, dtype=torch.int64))
    close(log_probs, logits.log_softmax(1)[:, 0])
    assert ("ratio" in run.metrics) == ("metric" in edit) and len(set(map(len, run.metrics.values()))) == 1
    rates = run.all_logged["learning_rate"]
    if "scheduler" in edit:
        close(rates[:3], [3e-2 * (1 + math.cos(math.pi * k / 9)) / 2 for k in range(3)])
    if "SGD" in edit:
        groups = run.parts["optimizer"].param_groups
        close(groups[0]["lr"], 10 * groups[1]["lr"])
        close(rates[1], rates[0] * (1 - 128 / 1500))  # every second row of the first rollout was a reset row


RUN = "--num-envs 2 --num-steps 8 --num-minibatches 2 --hidden-sizes 8 --normalize-obs --normalize-reward "
RUN += "--update-epochs 2 --max-episode-steps 20 --total-timesteps 150 --checkpoint-every 60 --eval-every 90 "
RUN += "--eval-episodes 3"


@catches(
    "train, training goes on in the old environments: if run.write_what_is_due(): -> if run.write_what_is_due() and 0:",
    "train, the optimizer is not saved: agent=agent, optimizer=optimizer -> agent=agent, other=agent",
    "train, the scheduler is not saved: optimizer=optimizer, scheduler=scheduler -> optimizer=optimizer",
    "RunningMeanStd, not saved: torch.ones(shape, dtype=torch.float64) -> torch.ones(shape), persistent=False",
)
def test_killed_resumed_evaluated(script, tmp_path, monkeypatch, capsys):
    """--evaluate plays the best weights, in other episodes than those that chose them, and changes nothing."""
    kill_and_resume(script, RUN, 6, monkeypatch, tmp_path)
    check_evaluation(script, capsys)


def test_refused(script, tmp_path, monkeypatch, capsys):
    refused = {"--num-envs 3 --num-steps 3 --num-minibatches 4": "must be at most num_envs * (num_steps // 2)"}
    refused |= {"--num-steps 1": "num_minibatches must be at most", "--device cuda:99": "cuda:99"}
    refused |= {"--init-std 0": "init_std must be more than 0"}
    refused |= {"--num-envs 4 --num-steps 4 --num-minibatches 5": "with norm_adv half of that"}
    check_refused(script, refused, tmp_path, monkeypatch, capsys)
