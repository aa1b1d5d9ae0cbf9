"""What ppo_rnd.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes that stand above it in `catches`. What ppo_rnd.py shares with ppo.py,
the run section above all, is the same text there (test_shared_code.py), with its tests in test_ppo.py and test_run.py.
"""

import math
from contextlib import contextmanager
from decimal import Decimal
from functools import cache
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from reference import ppo_rnd as reference
from run_folder import kill_and_resume
from tools import IN_ORDER, Chance, Probe, Walk, catches, close, flat, rehearse, vector_env

import ppo_rnd

NUMBER = spaces.Box(-np.inf, np.inf, (1,))  # an observation of one number
column = lambda *numbers: torch.tensor(numbers)[:, None]  # of one environment, a step each: (T, 1)

# Five rows: the episode ends in row 1, row 2 is the reset row. It holds the final observation, whose value is 100; what
# the policy did there was ignored, and whatever the reset led to is no reward of it (99 must not count).
NOVELTY = column(1.0, 2, 99, 3, 4)
VALUES = column(1.0, 2, 100, 4, 6, 8)  # 8 of the observation that the rollout ends with
RESET_ROWS = column(0, 0, 1, 0, 0) > 0
PLAYED = [0, 1, 3, 4]


# ------------------------------------------------------------------------------------------------- a lesson, by hand
@catches(
    "compute_intrinsic_gae, the trace has the reset row: reset_rows[t], next_advantage, -> reset_rows[t] & False, 0,",
    "compute_intrinsic_gae, as truncated: torch.where(reset_rows[t], next_value, values[t]) -> values[t]",
    "compute_intrinsic_gae, ends with the episode: next_advantage, advantages[t] -> 0 * next_advantage, advantages[t]",
    "compute_intrinsic_gae, nothing follows the rollout: next_value = values[-1] -> next_value = 0 * values[-1]",
    "compute_intrinsic_gae, an end in the last row: = values[-1] -> = values[-1] * (len(rewards) > 2)",
    "compute_intrinsic_gae, no lambda: gamma * gae_lambda * -> gamma * ",
    "compute_intrinsic_gae, advantages for returns: advantages + values[:-1] -> advantages",
)
def test_intrinsic_gae(script):
    """gamma = lambda = 0.5, so that traces decay by 1/4; the successor of row 1 is row 3.

    delta_4 = 4 + 8/2 - 6 = 2      A_4 = 2                   the rollout ends, the episode does not
    delta_3 = 3 + 6/2 - 4 = 2      A_3 = 2 + 2/4 = 2.5
    delta_1 = 2 + 4/2 - 2 = 2      A_1 = 2 + 2.5/4 = 2.625   the episode ends, curiosity does not
    delta_0 = 1 + 2/2 - 1 = 1      A_0 = 1 + 2.625/4 = 1.65625

    The same rows as two rollouts, cut behind row 1: the value of the final observation, 100, stands for what follows,
    for that of the next episode is not yet known: A_1 = 2 + 100/2 - 2 = 50, A_0 = 1 + 50/4 = 13.5. Cut behind row 2, a
    rollout ends with the first observation of an episode, of value 4: A_1 = 2 + 4/2 - 2 = 2, A_0 = 1 + 2/4 = 1.5.
    """
    gae = lambda rows, values: script.compute_intrinsic_gae(NOVELTY[rows], VALUES[values], RESET_ROWS[rows], 0.5, 0.5)
    advantages, returns = gae(slice(0, 5), slice(0, 6))
    close(advantages[PLAYED].ravel(), [1.65625, 2.625, 2.5, 2])
    close(returns[PLAYED].ravel(), [2.65625, 4.625, 6.5, 8])  # A + V
    close(gae(slice(0, 2), slice(0, 3))[0].ravel(), [13.5, 50])
    close(gae(slice(2, 5), slice(2, 6))[0][1:].ravel(), [2.5, 2])
    close(gae(slice(0, 3), slice(0, 4))[0][:2].ravel(), [1.5, 2])


@catches(
    "CuriousBuffer.compute_advantages, gamma: decays = args.intrinsic_gamma -> decays = 0.25",
    "CuriousBuffer.compute_advantages, always episodic: if args.episodic -> if True",
    "CuriousBuffer.compute_advantages, never episodic: if args.episodic -> if False",
    "CuriousBuffer.compute_advantages, weights: args.extrinsic_coef * ext -> args.intrinsic_coef * ext",
    "CuriousBuffer.compute_advantages, one critic: intrinsic_values, on -> 0 * intrinsic_values, on",
    "CuriousBuffer.metrics, reset rows counted: ~self.reset_rows -> self.reset_rows | True",
    "CuriousBuffer.metrics, of other returns: rows.returns.cpu() -> rows.intrinsic_returns.cpu()",
)
def test_two_rewards_two_discounts(script):
    """The rollout above, with a reward of 8 for the step that terminates; V_ext = 1, 2, 100, 4, 6, 8 as well.

    gamma = lambda = 0.5: A_ext = 0 + 6/4 = 1.5; 8 - 2 = 6; -; 6/2 - 4 - 2/4 = -1.5; 8/2 - 6 = -2. So 2 A_ext + A_int =
    4.65625, 14.625, -0.5, -2. `episodic`: A_int = 1, 0, 2.5, 2 gives 4, 12, -0.5, -2. With intrinsic_gamma 0 novelty
    counts only at once: A_int = 0, 0, -1, -2 gives 3, 12, -4, -6. Extrinsic returns are A_ext + V = 2.5, 8, 2.5, 4, of
    variance 5.0625. The errors A_ext have the variance 10.125: 1 - 2 = -1 of it is explained.
    """
    for options, advantages, intrinsic_returns in (
        ({}, [4.65625, 14.625, -0.5, -2], [2.65625, 4.625, 6.5, 8]),
        ({"episodic": True}, [4, 12, -0.5, -2], [2, 2, 6.5, 8]),
        ({"intrinsic_gamma": 0.0}, [3, 12, -4, -6], [1, 2, 3, 4]),
        ({"extrinsic_coef": 1.0, "intrinsic_coef": 0.0}, [1.5, 6, -1.5, -2], [2.65625, 4.625, 6.5, 8]),
    ):
        args = script.Args(**{"gamma": 0.5, "intrinsic_gamma": 0.5, "gae_lambda": 0.5} | options)
        buffer = script.CuriousBuffer(5, 1, NUMBER, spaces.Discrete(2))
        buffer.rewards[1], buffer.terminated[1], buffer.reset_rows[2] = 8, True, True
        buffer.intrinsic_rewards = NOVELTY
        buffer.compute_advantages(torch.zeros(5, 1), VALUES, VALUES, args)
        (batch,) = buffer.minibatches(1, IN_ORDER)
        close(batch.advantages, advantages)
        close(batch.returns, [2.5, 8, 2.5, 4])
        close(batch.intrinsic_returns, intrinsic_returns)
        close(buffer.metrics()["explained_variance"], -1)


@catches(
    "RND.forward, half the sum: .mean(1) -> .sum(1) / 2",
    "RND.forward, not clipped: .clamp(-5, 5) -> ",
    "RND.forward, not normalised: self.obs_stats(obs.float()) -> obs.float()",
    "RND.__init__, target learns: self.target.requires_grad_(False) -> 0",
    "RND.__init__, predictor no deeper: extra_layers=2 -> extra_layers=0",
    "RND.loss, rounded down: math.ceil -> int",
)
def test_novelty(script):
    """g(x) = (x, 0, 0, 2x), f(x) = (0, 3x, 0, 0): squared errors x^2, 9x^2, 0, 4x^2, of which the mean is 3.5 x^2.

    Observations 3, 5, -1, 99, -99 become x = 0, 1, -2, 5, -5 (clipped). The predictor learns from a quarter of five,
    rounded up: 0 and 3.5. Of 3.5 the derivative in the weights of g is 2 (g - f) x / 4.
    """
    rnd = script.RND(NUMBER, 1)
    outputs = [[m.out_features for m in network if hasattr(m, "weight")] for network in (rnd.target, rnd.predictor)]
    assert outputs == [[256, 128], [256, 256, 256, 128]] and not rnd.target[0].weight.requires_grad
    rnd.predictor, rnd.target = torch.nn.Linear(1, 4, bias=False), torch.nn.Linear(1, 4, bias=False)
    rnd.predictor.weight.data, rnd.target.weight.data = column(1.0, 0, 0, 2), column(0.0, 3, 0, 0)
    rnd.obs_stats.update(np.array([[1.0], [5.0]]))  # mean 3, deviation 2
    obs = column(3, 5, -1, 99, -99)
    close(rnd(obs), [0, 3.5, 14, 87.5, 87.5])
    close(rnd.loss(obs, 0.25), 3.5 / 2)
    rnd(column(5.0)).mean().backward()
    close(rnd.predictor.weight.grad.ravel(), [0.5, -1.5, 0, 1])


@catches("RND.forward, images not in bytes: x = 255 * x -> pass")
def test_novelty_of_images(script):
    """Each pixel is normalised by itself; what enters the convolutions lies in [-5, 5]."""
    rnd, entered = script.RND(spaces.Box(0, 255, (2, 36, 40), np.uint8), 2), []
    rnd.predictor[0].convolutions.register_forward_pre_hook(lambda module, x: entered.append(x[0]))
    seen, obs = np.random.default_rng(0).integers(0, 256, (2, 9, 2, 36, 40), np.uint8)
    rnd.obs_stats.update(seen)
    rnd(torch.tensor(obs))
    close(entered[0], ((obs - seen.mean(0)) / seen.std(0)).clip(-5, 5), atol=1e-4)


@catches(
    "RND.scale, reset rows counted: G[~reset_rows] -> G.flatten()",
    "RND.scale, reset rows in the sum: torch.where(reset_rows[t], self.sums, -> torch.where(reset_rows[t] & False, 0,",
    "RND.scale, begins anew with the episode: torch.where(reset_rows[t], self.sums, -> torch.where(reset_rows[t], 0.0,",
    "RND.scale, deviation of the rewards: G[~reset_rows] -> novelty[~reset_rows]",
    "RND.scale, mean subtracted: return novelty / -> return (novelty - self.sum_stats.mean) /",
    "RND.scale, not discounted: gamma * self.sums -> self.sums",
    "RND.scale, begins anew with the rollout: G = torch.z -> self.sums = 0 * self.sums; G = torch.z",
    "RND.scale, of this rollout: self.sum_stats.update -> self.sum_stats = RunningMeanStd(); self.sum_stats.update",
)
def test_scale(script):
    """gamma = 0.5, novelty 4, 0, (reset row: 5), 9, 2, 6: G = 4; 0 + 4/2 = 2; -; 9 + 2/2 = 10; 2 + 10/2 = 7; 6 + 7/2 =
    9.5, with the mean 6.5 and the variance (6.25 + 20.25 + 12.25 + 0.25 + 9)/5 = 9.6, so 9 becomes 2.9047.

    Novelty 2, 3 in one environment and 6, 1 in another: G = 2, 4 and 6, 4, of variance 2. Fails if G runs over the
    environments of a step, 2, 7 and 3, 2.5 (variance 3.92). Then novelty 4 in both: G = 4 + 4/2 = 6 twice, and of 2, 4,
    6, 4, 6, 6 the variance is 20/9. Fails if G begins anew with the rollout (2, 4, 6, 4, 4, 4: 4/3).
    """
    rnd = script.RND(NUMBER, 1)
    scaled = rnd.scale(column(4.0, 0, 5, 9, 2, 6), np.array([[0], [0], [1], [0], [0], [0]], bool), 0.5)
    close([rnd.sum_stats.var.item(), rnd.sum_stats.count.item()], [9.6, 5])
    close(scaled[[0, 1, 3, 4, 5]].ravel(), np.array([4, 0, 9, 2, 6]) / math.sqrt(9.6))
    rnd = script.RND(NUMBER, 2)
    first, second = torch.tensor([[2.0, 6], [3, 1]]), torch.tensor([[4.0, 4]])
    close(rnd.scale(first, np.zeros((2, 2), bool), 0.5), first / math.sqrt(2))
    close(rnd.scale(second, np.zeros((1, 2), bool), 0.5), second / math.sqrt(20 / 9))


@catches(
    "make_rnd, what resets led to as well: reset_rows = terminated | truncated -> pass",
    "make_rnd, no random play: range(args.random_steps) -> range(0)",
    "RND.update_obs_stats, reset rows as well: next_obs[t][~reset_rows[t]] -> next_obs[t]",
)
def test_statistics_of_observations(script):
    """Episodes of two steps; an observation says which step: 1, 2, (reset: 0), 1, 2, (reset: 0), 1. Of those that steps
    led to, 1, 2, 1, 2, 1, the mean is 1.4 and the variance 0.24.
    """
    envs = vector_env([lambda: Walk([(2, "t")])], 1)
    args, check = script.Args(num_envs=1, random_steps=7), mock.Mock()
    rnd = script.make_rnd(SimpleNamespace(args=args, envs=envs, check_finite=check), "cpu")
    close([rnd.obs_stats.count, rnd.obs_stats.mean[2], rnd.obs_stats.var[2]], [5, 1.4, 0.24])


@contextmanager
def watched_modes(script, agent, loss):
    """A set of ("acts" or "learns", whether the agent is in train() mode then)."""
    modes = set()
    watch = lambda kind, do: lambda agent, *a, **b: modes.add((kind, agent.training)) or do(agent, *a, **b)
    with mock.patch.object(getattr(script, agent), "sample", watch("acts", getattr(script, agent).sample)):
        with mock.patch.object(script, loss, watch("learns", getattr(script, loss))):
            yield modes


# ---------------------------------------------------------------------------- against a slow and obvious version of it
COMMON = {"num_envs": 2, "num_steps": 7, "num_minibatches": 2, "update_epochs": 2, "gamma": 0.5, "gae_lambda": 0.8}
COMMON |= {"intrinsic_gamma": 0.75, "hidden_sizes": (8,), "critic_hidden_sizes": (6,), "learning_rate": 1e-2, "seed": 3}
COMMON |= {"predictor_learning_rate": 2e-2, "random_steps": 9, "vf_coef": 0.7, "total_timesteps": 30}
TRAININGS = [
    {},
    {"episodic": True, "clip_vloss": True, "normalize_obs": True, "critic_hidden_sizes": None},
    {"normalize_intrinsic": False, "anneal_lr": False, "norm_adv": False, "normalize_reward": True},
    {"extrinsic_coef": 0.5, "intrinsic_coef": 3.0, "predictor_share": 1.0, "clip_reward": True, "target_kl": 0.0},
]


@cache
def slow_training(number):
    """What the slow version gives, with the script as it is: `script` may have a mistake."""
    return reference.train(ppo_rnd.Args(**COMMON | TRAININGS[number]), Chance)


@catches(
    "CuriousAgent.forward, one critic: values, intrinsic_values -> values, values + 0 * intrinsic_values",
    "CuriousBuffer.log_probs_and_values, last value: agent.intrinsic_critic(last -> agent.critic(last",
    "CuriousBuffer.__init__, next_obs is obs: self.obs[1:] -> self.obs[:-1]",
    "CuriousBuffer.minibatches, reset rows learnt: ~self.reset_rows -> self.rewards < 99",
    "CuriousBuffer.scale_rewards, one end ends all: self.truncated[t], 0 -> self.truncated[t].any(), 0",
    "CuriousBuffer.scale_rewards, never begins anew: self.terminated[t] | self.truncated[t], 0 -> False, 0",
    "compute_intrinsic_gae, one reset row for all: reset_rows[t], next_adv -> reset_rows[t].any(), next_adv",
    "curious_loss, intrinsic critic forgotten: (v_loss + intrinsic_v_loss) -> v_loss",
    "curious_loss, returns of the other: batch.intrinsic_returns -> batch.returns",
    "curious_loss, old values of the other: batch.old_intrinsic_values, -> batch.old_values,",
    "curious_loss, never clipped: if args.clip_vloss -> if False",
    "curious_loss, intrinsic values never clipped: intrinsic_returns, clip_vloss -> intrinsic_returns, None",
    "make_rnd, played anew: seed=args.seed -> seed=None",
    "train, novelty of the observation before: rnd.rewards(buffer.next_obs -> rnd.rewards(buffer.obs[:-1]",
    "train, statistics before learning: .get_last_lr()[0]) -> .get_last_lr()[0]); rnd.obs_stats.update(buffer.obs[0])",
    "train, statistics stay: rnd.update_obs_stats(buffer.next_obs, buffer.reset_rows) -> 0",
    "train, reset rows seen by the agent: buffer.obs[:-1][~buffer.reset_rows] -> buffer.obs[:-1]",
    "train, reported returns clipped: run.count(obs, rewards -> run.count(obs, np.sign(rewards)",
    "train, gradients add up: optimizer.zero_grad() -> pass",
    "train, those of the predictor add up: optimizer.zero_grad() -> agent.zero_grad()",
    "train, predictor learns from all rows: args.predictor_share) -> 1)",
    "train, dropout when acting: agent.eval() -> 0",
    "train, no dropout in the loss: agent.train() -> 0",
    "train, predictor never learns: (loss + predictor_loss).backward() -> loss.backward()",
    "train, predictor learns as the agent: args.predictor_learning_rate -> args.learning_rate",
    "train, predictor annealed: lambda _: 1.0] -> lambda _: 0.9]",
    "train, predictor clipped: clip_grad_norm_(agent.parameters(), -> clip_grad_norm_([*agent.parameters(), "
    "*rnd.predictor.parameters()],",
)
def test_training(script):
    """Every weight, metric and return is that of tests/reference/ppo_rnd.py, whatever the options."""
    for number, options in enumerate(TRAININGS):
        metrics, agent, predictor, returns = slow_training(number)
        with watched_modes(script, "CuriousAgent", "curious_loss") as modes:
            run = rehearse(script, Chance, **COMMON | options)
        assert modes == {("acts", False), ("learns", True)}
        assert set(run.all_logged) == set(metrics) and set(script.CURVE) < set(metrics)
        for name in metrics:
            close(run.all_logged[name], metrics[name], atol=1e-3)
        close(flat(run.agent), agent, atol=1e-3)
        close(flat(run.parts["rnd"].predictor), predictor, atol=1e-3)
        close(run.episodes["return"], returns)


# ----------------------------------------------------------------------------------------- a small world, a whole run
EASY = {"num_envs": 8, "num_steps": 32, "num_minibatches": 2, "learning_rate": 2e-2, "hidden_sizes": (16,)}
EASY |= {"gamma": 0.5, "intrinsic_gamma": 0.5, "ent_coef": 0.0, "total_timesteps": 1_000}


class Television(Probe):
    """One-step episodes without any reward. Action 1 shows a random number, action 0 what one has seen: zero."""

    def step(self, action):
        return np.float32([action * self.np_random.uniform(-1, 1)]), 0.0, True, False, {}


def test_the_new_is_sought(script):
    """Only action 1 leads to something new. Without curiosity, nothing is preferred."""
    run = rehearse(script, Television, **EASY)
    assert run.agent.act(np.zeros((1, 1), np.float32)) == 1 and run.all_logged["entropy"][-1] < 0.3
    run = rehearse(script, Television, **EASY | {"intrinsic_coef": 0.0, "learning_rate": 1e-3})
    assert run.all_logged["entropy"][-1] > 0.6


class Odd(Probe):
    """Decimals for rewards; observations without a dimension. test_ppo_masked.py asks for masks, too."""

    observation_space = spaces.Box(-np.inf, np.inf, (), np.float64)

    def __init__(self, huge=1.0, broken=False):
        super().__init__(steps=2)
        self.huge = huge
        self.action_masks = lambda: int("my own mistake") if broken else [1, 1]

    def reset(self, **kwargs):
        return np.array(0 * super().reset()[0][0], float), {}

    def step(self, action):
        _, reward, *rest = super().step(action)
        return np.array(self.huge), Decimal(reward), *rest


@catches(
    "make_rnd, NaN in the statistics: run.check_finite(observation=obs) -> 0",
    "RND.forward, an observation has a dimension: x = x.reshape(len(x), -1) -> pass",
)
def test_odd_environments(script):
    """What Gymnasium takes is taken; numbers beyond float32 are named, in random play as well."""
    try:
        assert set(rehearse(script, Odd, **EASY).episodes["return"]) == {2.0}
    except RuntimeError as error:
        raise AssertionError(error) from error
    with mock.patch.object(script.Run, "new_envs", side_effect=AssertionError("seen too late")):
        with pytest.raises(script.UserError, match="none, after step 0: observation is NaN or infinite"):
            rehearse(script, lambda: Odd(1e300), **EASY)


RUN = "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1 --hidden-sizes 8 --max-episode-steps 20 "
RUN += "--random-steps 5 --total-timesteps 150 --checkpoint-every 50 --eval-every 90 --eval-episodes 1"


@catches(
    "train, curiosity not saved: rnd=rnd, -> ",
    "train, the scheduler is not saved: optimizer, scheduler=scheduler -> optimizer",
    "train, the optimizer is not saved: optimizer=optimizer, -> ",
    "RND.__init__, sums not saved: dtype=torch.float64)) -> dtype=torch.float64), persistent=False)",
)
def test_killed_resumed(script, tmp_path, monkeypatch):
    """In MultiRoom, with its settings where no flag says otherwise; 11 objects, 6 colours, 3 states."""
    kill_and_resume(script, RUN, 9, monkeypatch, tmp_path)
    agent = script.load("run")
    assert agent.args.learning_rate == 1e-3 and agent.actor[0].in_features == 7 * 7 * (11 + 6 + 3)
