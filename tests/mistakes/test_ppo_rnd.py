"""Well-known faulty versions of what ppo_rnd.py adds: each must be caught, by name, by a check that ppo_rnd.py passes.

Those of what it shares with ppo.py stand in test_ppo.py.
"""

from functools import cache, partial

import pytest

from tests.against_loops import test_ppo_rnd as loops
from tests.by_hand import test_ppo_rnd as by_hand
from tests.probes import test_ppo_rnd as probes
from tests.tools import mutant

TRAINING = partial(loops.test_training, name="as it is")
CURIOSITY = partial(probes.test_curiosity, episodic=False, end="terminated")

OVER_ENVIRONMENTS = """for t in range(novelty.shape[1]):
            self.sums = novelty[:, t] + gamma * self.sums
            all_sums[:, t] = self.sums
        for t in []:"""
MISTAKES = {  # (where it is made, what catches it): {name: text that stands there -> what stands there in its place}
    ("compute_intrinsic_gae", by_hand.test_intrinsic_gae): {
        "reset row in the trace": "torch.where(reset_rows[t], next_advantage, advantages[t]) -> advantages[t]",
        "final observation as after truncation": "torch.where(reset_rows[t], next_value, values[t]) -> values[t]",
        "ends with the episode": "next_advantage, advantages[t]) -> 0 * next_advantage, advantages[t])",
        "nothing comes after the rollout": "next_value = values[-1] -> next_value = 0 * values[-1]",
        "no lambda": "gamma * gae_lambda * -> gamma * ",
        "advantages in place of returns": "advantages + values[:-1] -> advantages",
    },
    ("compute_intrinsic_gae", by_hand.test_where_a_rollout_is_cut): {
        "an end in the last row ends all": "next_value = values[-1] -> next_value = values[-1] * (len(rewards) > 2)",
    },
    ("compute_intrinsic_gae", by_hand.test_each_environment_has_reset_rows_of_its_own): {
        "one reset row for all": "reset_rows[t], next_advantage -> reset_rows[t].any(), next_advantage",
    },
    ("CuriousBuffer.compute_advantages", by_hand.test_two_rewards_two_discounts): {
        "gamma for intrinsic_gamma": "compute_intrinsic_gae(*steps, args.intrinsic_gamma -> "
        "compute_intrinsic_gae(*steps, args.gamma",
        "always episodic": "if args.episodic -> if True",
        "never episodic": "if args.episodic -> if False",
        "weights exchanged": "args.extrinsic_coef * extrinsic -> args.intrinsic_coef * extrinsic",
        "one critic for both": "= intrinsic_rewards, intrinsic_values, reset_rows -> "
        "= intrinsic_rewards, 0 * intrinsic_values, reset_rows",
    },
    ("RND.forward", by_hand.test_novelty): {
        "sum over features": ".mean(1) -> .sum(1)",
        "half the sum": ".mean(1) -> .sum(1) / 2",
        "half the mean": ".mean(1) -> .mean(1) / 2",
        "not clipped": ".clamp(-5, 5) -> ",
        "not normalised": "self.obs_stats(obs.float()) -> obs.float()",
    },
    ("RND.__init__", loops.test_networks): {
        "target learns": "self.target.requires_grad_(False) -> 0",
        "sums not saved": "dtype=torch.float64)) -> dtype=torch.float64), persistent=False)",
    },
    ("RND.scale", by_hand.test_scale): {
        "reset rows counted": "all_sums[~reset_rows] -> all_sums.flatten()",
        "reset rows in the sum": "torch.where(reset_rows[t], self.sums, novelty[t] + gamma * self.sums) -> "
        "novelty[t] + gamma * self.sums",
        "begins anew with the episode": "torch.where(reset_rows[t], self.sums, -> torch.where(reset_rows[t], 0.0,",
        "deviation of the rewards": "all_sums[~reset_rows] -> novelty[~reset_rows]",
        "mean subtracted": "return novelty / -> return (novelty - self.sum_stats.mean) /",
        "own mean subtracted": "return novelty / -> return (novelty - novelty.mean()) /",
        "variance for deviation": "math.sqrt(self.sum_stats.var.item() + 1e-8) -> self.sum_stats.var.item()",
        "not discounted": "gamma * self.sums -> self.sums",
    },
    ("RND.scale", by_hand.test_scale_runs_forward_in_time): {
        "over environments": f"for t in range(len(novelty)): -> {OVER_ENVIRONMENTS}",
        "begins anew with the rollout": "all_sums = -> self.sums = 0 * self.sums; all_sums =",
        "this rollout's deviation": "self.sum_stats.update -> self.sum_stats = RunningMeanStd(); self.sum_stats.update",
    },
    ("curious_loss", by_hand.test_the_loss_has_both_critics): {
        "intrinsic critic forgotten": "(v_loss + intrinsic_v_loss) -> v_loss",
        "intrinsic critic learns the other's returns": "old_intrinsic_values, batch.intrinsic_returns -> "
        "old_intrinsic_values, batch.returns",
        "never clipped": "if args.clip_vloss -> if False",
    },
    ("CuriousAgent.forward", TRAINING): {
        "one critic for both": "self.intrinsic_critic(features).squeeze(1) -> "
        "values + 0 * self.intrinsic_critic(obs)[:, 0]",
    },
    ("CuriousBuffer.log_probs_and_values", TRAINING): {
        "last value of the other critic": "agent.intrinsic_value(obs[-1]) -> agent.value(obs[-1])",
    },
    ("CuriousBuffer.minibatches", TRAINING): {
        "predictor learns the observation before": "actions, obs[1:], -> actions, obs[:-1],",
        "reset rows learnt": "~self.reset_rows -> self.rewards < 99",
    },
    ("CuriousBuffer.figures", TRAINING): {"reset rows counted": "~self.reset_rows -> self.rewards < 99"},
    ("CuriousBuffer.next_obs", TRAINING): {
        "reset rows in the statistics": "[~self.reset_rows] -> .reshape(-1, 3)",
        "the observations before": "self.obs[1:] -> self.obs[:-1]",
    },
    ("make_rnd", TRAINING): {"no random play": "rnd.obs_stats.update(obs) -> 0"},
    ("make_rnd", probes.test_random_play_begins_the_statistics): {"played anew": "seed=args.seed -> seed=None"},
    ("train", TRAINING): {
        "novelty of the observation before": "rnd.rewards(buffer.obs[1:] -> rnd.rewards(buffer.obs[:-1]",
        "statistics stay as they began": "rnd.update_obs_stats(buffer.next_obs()) -> 0",
        "gradients of the predictor add up": "predictor_optimizer.zero_grad() -> 0",
        "predictor learns from all rows": "args.predictor_share) -> 1)",
        "predictor has the agent's learning rate, annealed": "if args.anneal_lr: -> if args.anneal_lr:\n"
        '            predictor_optimizer.param_groups[0]["lr"] = 1e-2 * (1 - run.step / 15)',
    },
    ("train", probes.test_what_was_seen_often_is_not_new): {
        "predictor never learns": "predictor_optimizer.step() -> 0"
    },
    ("train", CURIOSITY): {"novelty of the observation before": "buffer.obs[1:] -> buffer.obs[:-1]"},
}
CASES = {
    f"{where}: {name}": (where, check, *change.split(" -> "))
    for (where, check), changes in MISTAKES.items()
    for name, change in changes.items()
}


@cache
def passes(check, script):
    """Whether the script passes the check, looked at once."""
    check(script)
    return True


@pytest.mark.parametrize("name", CASES)
def test_mistake_is_caught(script, name):
    """Fails if a known mistake passes the check that is there for it, or if the script does not pass this check."""
    where, check, old, new = CASES[name]
    assert passes(check, script)
    faulty = mutant(script, where, old, new)
    with pytest.raises(AssertionError):
        check(faulty)
