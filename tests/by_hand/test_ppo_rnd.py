"""The numbers of curiosity, worked out by hand: to be read beside ppo_rnd.py. Its PPO is that of test_ppo.py."""

import math

import numpy as np
import torch
from gymnasium import spaces

from tests.tools import IN_ORDER, close

NUMBER = spaces.Box(-np.inf, np.inf, (1,))  # an observation of one number
column = lambda *numbers: torch.tensor(numbers)[:, None]  # of one environment, a step each: (T, 1)

# Five rows: the episode ends in row 1, row 2 is the reset row. It holds the final observation, whose value is 100; what
# the policy did there was ignored, and whatever the reset led to is no reward of it (99 must not count).
NOVELTY = column(1.0, 2, 99, 3, 4)
VALUES = column(1.0, 2, 100, 4, 6, 8)  # 8 of the observation that the rollout ends with
RESET_ROWS = column(0, 0, 1, 0, 0) > 0
PLAYED = [0, 1, 3, 4]


def test_intrinsic_gae(script):
    """gamma = lambda = 0.5, so that traces decay by 1/4; the successor of row 1 is row 3.

    delta_4 = 4 + 8/2 - 6 = 2      A_4 = 2                   the rollout ends, the episode does not
    delta_3 = 3 + 6/2 - 4 = 2      A_3 = 2 + 2/4 = 2.5
    delta_1 = 2 + 4/2 - 2 = 2      A_1 = 2 + 2.5/4 = 2.625   the episode ends, curiosity does not
    delta_0 = 1 + 2/2 - 1 = 1      A_0 = 1 + 2.625/4 = 1.65625

    Fails if it is episodic (1, 0, 2.5, 2), if it bootstraps from the final observation as after truncation (13.5, 50,
    2.5, 2), if the reset row is a link of the chain (7.977, 27.906, 2.5, 2), or if the rollout's end is the end of
    everything (1.594, 2.375, 1.5, -2).
    """
    advantages, returns = script.compute_intrinsic_gae(NOVELTY, VALUES, RESET_ROWS, 0.5, 0.5)
    close(advantages[PLAYED].ravel(), [1.65625, 2.625, 2.5, 2])
    close(returns[PLAYED].ravel(), [2.65625, 4.625, 6.5, 8])  # A + V
    close(script.compute_intrinsic_gae(NOVELTY, VALUES, RESET_ROWS, 0.5, 0.0)[0][PLAYED].ravel(), [1, 2, 2, 2])


def test_where_a_rollout_is_cut(script):
    """gamma = lambda = 0.5. The rows of test_intrinsic_gae as two rollouts, cut behind the episode's last step.

    Rows 0 and 1: the value of the final observation, 100, stands for what follows, for that of the next episode is not
    yet known: A_1 = 2 + 100/2 - 2 = 50, A_0 = 1 + 50/4 = 13.5. Rows 2 to 4: as ever. A rollout that ends with a reset
    row ends with the first observation of an episode, whose value is 4: A_1 = 2 + 4/2 - 2 = 2, A_0 = 1 + 2/4 = 1.5.
    """
    gae = lambda rows, values: script.compute_intrinsic_gae(NOVELTY[rows], VALUES[values], RESET_ROWS[rows], 0.5, 0.5)
    close(gae(slice(0, 2), slice(0, 3))[0].ravel(), [13.5, 50])
    close(gae(slice(2, 5), slice(2, 6))[0][1:].ravel(), [2.5, 2])
    close(gae(slice(0, 3), slice(0, 4))[0][:2].ravel(), [1.5, 2])


def test_each_environment_has_reset_rows_of_its_own(script):
    """Beside the rollout above, one without an end: A_2 = 99 + 4/2 - 100 + 2.5/4 = 1.625, A_1 = 2 + 100/2 - 2 + 1.625/4
    = 50.40625, A_0 = 1 + 50.40625/4 = 13.6015625. Fails if one environment's reset row is left out of all.
    """
    two = lambda x: torch.cat([x, x], dim=1)
    reset_rows = torch.cat([RESET_ROWS, RESET_ROWS & False], dim=1)
    advantages, _ = script.compute_intrinsic_gae(two(NOVELTY), two(VALUES), reset_rows, 0.5, 0.5)
    close(advantages[PLAYED, 0], [1.65625, 2.625, 2.5, 2])
    close(advantages[:, 1], [13.6015625, 50.40625, 1.625, 2.5, 2])


def test_two_rewards_two_discounts(script):
    """The rollout above, with a reward of 8 for the step that terminates; V_ext = 1, 2, 100, 4, 6, 8 as well.

    gamma = lambda = 0.5: A_ext = 0 + 6/4 = 1.5; 8 - 2 = 6; -; 6/2 - 4 - 2/4 = -1.5; 8/2 - 6 = -2. So 2 A_ext + A_int =
    4.65625, 14.625, -0.5, -2. `episodic`: A_int = 1, 0, 2.5, 2 gives 4, 12, -0.5, -2. With intrinsic_gamma 0 novelty
    counts only at once: A_int = 0, 0, -1, -2 gives 3, 12, -4, -6. Fails if both kinds are treated alike.
    """
    for settings, advantages, intrinsic_returns in (
        ({}, [4.65625, 14.625, -0.5, -2], [2.65625, 4.625, 6.5, 8]),
        ({"episodic": True}, [4, 12, -0.5, -2], [2, 2, 6.5, 8]),
        ({"intrinsic_gamma": 0.0}, [3, 12, -4, -6], [1, 2, 3, 4]),
        ({"extrinsic_coef": 1.0, "intrinsic_coef": 0.0}, [1.5, 6, -1.5, -2], [2.65625, 4.625, 6.5, 8]),
    ):
        args = script.Args(**{"gamma": 0.5, "intrinsic_gamma": 0.5, "gae_lambda": 0.5} | settings)
        buffer = script.CuriousBuffer(5, 1, NUMBER, spaces.Discrete(2))
        buffer.rewards[1], buffer.terminated[1], buffer.reset_rows[2] = 8, True, True
        buffer.intrinsic_rewards = NOVELTY
        buffer.compute_advantages(torch.zeros(5, 1), VALUES, VALUES, args)
        (batch,) = buffer.minibatches(1, IN_ORDER)
        close(batch.advantages, advantages)
        close(batch.returns, [2.5, 8, 2.5, 4])  # A_ext + V_ext
        close(batch.intrinsic_returns, intrinsic_returns)
        close(buffer.figures()["intrinsic_reward"], 10 / 4)


def make_rnd(script, num_envs=1):
    """An RND of one number, whose statistics have the mean 3 and the deviation 2."""
    rnd = script.RND(NUMBER, num_envs)
    rnd.obs_stats.update(np.array([[1.0], [5.0]]))
    return rnd


def test_novelty(script):
    """g(x) = (x, 0, 0, 2x), f(x) = (0, 3x, 0, 0): squared errors x^2, 9x^2, 0, 4x^2, of which the mean is 3.5 x^2.

    Observations 3, 5, -1, 99, -99 become x = 0, 1, -2, 5, -5 (clipped). Fails with the sum (14), half the sum (7), half
    the mean (1.75), or without clipping. Only the predictor learns: the derivative in its weights is 2 (g - f) x / 4.
    """
    rnd = make_rnd(script)
    rnd.predictor, rnd.target = torch.nn.Linear(1, 4, bias=False), torch.nn.Linear(1, 4, bias=False)
    rnd.target.requires_grad_(False)
    rnd.predictor.weight.data = column(1.0, 0, 0, 2)
    rnd.target.weight.data = column(0.0, 3, 0, 0)
    obs = np.array([[[3], [5], [-1]], [[99], [-99], [5]]], np.float32)  # two steps of three environments
    close(rnd.novelty(obs), [[0, 3.5, 14], [87.5, 87.5, 3.5]])
    rnd(torch.tensor([[5.0]])).mean().backward()
    close(rnd.predictor.weight.grad.ravel(), [0.5, -1.5, 0, 1])
    assert rnd.target.weight.grad is None


def test_scale(script):
    """gamma = 0.5, novelty 4, 0, (reset row: 5), 9, 2, 6: G = 4; 0 + 4/2 = 2; -; 9 + 2/2 = 10; 2 + 10/2 = 7; 6 + 7/2 =
    9.5, with the mean 6.5 and the variance (6.25 + 20.25 + 12.25 + 0.25 + 9)/5 = 9.6, so 9 becomes 2.9047.

    Fails with the reset row (variance 11.667), if G begins anew with the episode (7.94), with the deviation of the
    rewards themselves (9.76), or if a mean is subtracted: 0 stays 0.
    """
    rnd = make_rnd(script)
    novelty = column(4.0, 0, 5, 9, 2, 6)
    scaled = rnd.scale(novelty, np.array([[0], [0], [1], [0], [0], [0]], bool), 0.5)
    close([rnd.sum_stats.var.item(), rnd.sum_stats.count.item()], [9.6, 5])
    close(scaled[[0, 1, 3, 4, 5]].ravel(), np.array([4, 0, 9, 2, 6]) / math.sqrt(9.6))
    close(scaled[3], [2.9047])


def test_scale_runs_forward_in_time(script):
    """gamma = 0.5, novelty 2, 3 in one environment and 6, 1 in another: G = 2, 4 and 6, 4, of variance 2.

    Fails if G runs over the environments of a step, 2, 7 and 3, 2.5 (variance 3.92), or with the rewards' own variance
    (3.5). Then novelty 4 in both: G = 4 + 4/2 = 6 twice, and of 2, 4, 6, 4, 6, 6 the variance is 20/9. Fails if G
    begins anew with the rollout (2, 4, 6, 4, 4, 4: 4/3), or if the deviation is that of the last rollout alone.
    """
    rnd = make_rnd(script, num_envs=2)
    first, second = torch.tensor([[2.0, 6], [3, 1]]), torch.tensor([[4.0, 4]])
    close(rnd.scale(first, np.zeros((2, 2), bool), 0.5), first / math.sqrt(2))
    close(rnd.scale(second, np.zeros((1, 2), bool), 0.5), second / math.sqrt(20 / 9))
    close(rnd.state_dict()["sums"], [6, 6])  # a checkpoint holds them


def test_the_loss_has_both_critics(script):
    """V_ext = 2 with return 5: (2 - 5)^2/2 = 4.5. V_int = 3 with return 4: (3 - 4)^2/2 = 0.5. A = 1.5, ratio 1.

    -1.5 + 0.5 (4.5 + 0.5) = 1. The derivatives in the values are 0.5 (2 - 5) = -1.5 and 0.5 (3 - 4) = -0.5. Clipped, so
    that both move from 1 to 1.2 at most, (1.2 - 5)^2/2 = 7.22 and (1.2 - 4)^2/2 = 3.92 are more: -1.5 + 0.5 * 11.14.
    """
    for clip_vloss, expected, gradients in ((False, 1, (-1.5, -0.5)), (True, 4.07, (0, 0))):
        args = script.Args(ent_coef=0.0, vf_coef=0.5, norm_adv=False, clip_vloss=clip_vloss)
        agent = script.Agent(NUMBER, spaces.Discrete(2), args)
        agent.critic[-1].bias.data[:] = 2  # all there is where the observation is 0
        agent.intrinsic_critic[-1].bias.data[:] = 3
        obs, one = torch.zeros(1, 1), torch.ones(1)
        old = torch.log(0.5 * one), one, one  # log-prob of one action of two, and values
        batch = script.Batch(obs, torch.tensor([[1]]), obs, *old, 1.5 * one, 5 * one, 4 * one)
        loss, figures = script.curious_loss(agent, batch, args)
        loss.backward()
        close(loss, expected)
        close([agent.critic[-1].bias.grad.item(), agent.intrinsic_critic[-1].bias.grad.item()], gradients)
        close([figures["value_loss"], figures["intrinsic_value_loss"]], [7.22, 3.92] if clip_vloss else [4.5, 0.5])
