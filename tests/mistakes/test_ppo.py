"""Well-known faulty versions of what stands in ppo.py: each must be caught, by name, by a check that ppo.py passes."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.against_loops import test_ppo as loops
from tests.by_hand import test_ppo as by_hand
from tests.probes import test_ppo as probes
from tests.tools import by_name, mutant, passes


def a_rollout():
    """A random rollout (40, 3) with ends of every sort."""
    rng = np.random.default_rng(0)
    rewards, final, log_ratios = rng.standard_normal((3, 40, 3))
    values = rng.standard_normal((41, 3))
    terminated, truncated = rng.random((2, 40, 3)) < 0.2
    next_values = np.where(terminated | truncated, final, values[1:])
    return tuple(map(torch.as_tensor, (rewards, values[:-1], next_values, terminated, truncated, log_ratios)))


RETURNS = partial(loops.test_returns.hypothesis.inner_test, rollout=a_rollout(), gamma=0.5)
GAE = partial(loops.test_gae.hypothesis.inner_test, rollout=a_rollout(), gamma=0.5, gae_lambda=0.5)
VTRACE = partial(loops.test_vtrace.hypothesis.inner_test, rollout=a_rollout(), gamma=0.5, rho_clip=1.5, c_clip=1.0)
ROWS = np.array([[0, 0], [1, 0], [0, 1], [0, 0]], bool)
MINIBATCHES = partial(loops.test_minibatches.hypothesis.inner_test, reset_rows=ROWS, num_minibatches=4)
INTEGERS = partial(loops.test_actions_as_the_environment_takes_them, name="Box of integers")
FROM_5 = partial(loops.test_actions_as_the_environment_takes_them, name="Discrete from 5")
NUMPY = partial(loops.test_acting_in_numpy_equals_torch, name="Discrete")
FACTORS = [[0.25, 0.75], [0.5, 0.3, 0.2]]
DRAWS = partial(loops.test_actions_are_drawn_with_their_probabilities, name="MultiDiscrete", factors=FACTORS)
TRAINING = {name: partial(loops.test_training, name=name) for name in loops.TRAININGS}
TARGET_KL = partial(loops.test_target_kl, target_kl=1e-12, gradient_steps=4)

RETURNS_OF_REWARDS = "compute_returns(rewards, next_values, terminated, truncated, gamma)"
MISTAKES = {  # (where it is made, what catches it): {name: text that stands there -> what stands there in its place}
    ("compute_returns", by_hand.test_returns): {
        "truncation is termination": "* ~terminated -> * ~(terminated | truncated)",
        "leaks across truncation": "terminated | truncated -> terminated",
        "leaks across termination": "terminated | truncated -> truncated",
        "rewards in place of returns": "return returns -> return rewards",
    },
    ("compute_returns", RETURNS): {"truncation wins": "* ~terminated -> * ~(terminated & ~truncated)"},
    ("compute_gae", by_hand.test_gae): {
        "truncation is termination": "* ~terminated -> * ~(terminated | truncated)",
        "leaks across truncation": "~(terminated | truncated) -> ~terminated",
        "leaks across termination": "~(terminated | truncated) -> ~truncated",
        "truncated step left out": "= deltas[t] -> = deltas[t] * ~truncated[t]",
        "no gamma in the trace": "gamma * gae_lambda -> gae_lambda",
        "advantages in place of returns": "advantages + values -> advantages",
    },
    ("compute_gae", GAE): {"truncation wins": "* ~terminated -> * ~(terminated & ~truncated)"},
    ("compute_vtrace", by_hand.test_vtrace): {
        "truncation is termination": "* ~terminated -> * ~(terminated | truncated)",
        "leaks": "~(terminated | truncated) -> ~terminated",
        "bootstraps from the terminal state": "* ~terminated -> * 1",
        "returns for rewards": f"deltas = rewards -> deltas = {RETURNS_OF_REWARDS}",
        "returns for rewards, and no mask": f"* ~terminated -> * 1; rewards = {RETURNS_OF_REWARDS}",
        "no weight": "advantages[t] = rho[t] * -> advantages[t] = ",
        "V in place of v": " + gamma * next_correction) -> )",
        "rho carries back": "gamma * c[t] -> gamma * rho[t]",
        "c is not clipped": ".clamp(max=c_clip) -> ",
    },
    ("compute_vtrace", VTRACE): {"truncation wins": "* ~terminated -> * ~(terminated & ~truncated)"},
    ("RolloutBuffer.compute_advantages", by_hand.test_the_ratio_counts_once): {
        "the ratio counts twice": "old_log_probs = log_probs -> old_log_probs = mu_log_probs",
        "the ratio is forgotten": "log_probs - mu_log_probs -> log_probs - log_probs",
    },
    ("RolloutBuffer.compute_advantages", by_hand.test_reset_rows): {
        "bootstraps from the reset": "rewards, values[1:] -> rewards, values[[1, 3, 3, 4]]",
        "bootstraps from the state itself": "rewards, values[1:] -> rewards, values[:-1]",
        "bootstraps from the last stored state": "rewards, values[1:] -> rewards, values[[1, 2, 3, 3]]",
        "normalises over all rows": "self.returns - values[:-1] -> normalize(self.returns - values[:-1])",
    },
    ("RolloutBuffer.minibatches", by_hand.test_reset_rows): {
        "reset rows drawn": "~self.reset_rows -> self.obs[1:] > 0"
    },
    ("RolloutBuffer.minibatches", TRAINING["gae"]): {"reset rows learnt": "~self.reset_rows -> self.rewards < 99"},
    ("RolloutBuffer.minibatches", MINIBATCHES): {
        "rows lost": "order.tensor_split(num_minibatches) -> order[: len(order) // 4 * 4].tensor_split(4)",
        "rows mixed": "self.advantages.flatten() -> self.advantages.T.flatten()",
        "environment by environment": "np.flatnonzero(~self.reset_rows) -> [0, 4, 6, 1, 3, 7]",
    },
    ("RolloutBuffer.minibatches", loops.test_minibatches_are_shuffled_by_the_given_generator): {
        "not shuffled": "rng.permutation -> ",
        "another generator": "rng.permutation -> np.random.default_rng(0).permutation",
    },
    ("RolloutBuffer.scale_rewards", by_hand.test_reward_scaling): {
        "survives an end": "self.terminated[t] | self.truncated[t] -> self.terminated[t]",
        "counts reset rows": "[~self.reset_rows] -> [self.reset_rows | True]",
        "begins anew with each rollout": "for t in -> self.discounted_returns[:] = 0\n        for t in",
    },
    ("RunningMeanStd.update", by_hand.test_running_mean_and_deviation): {
        "forgets the distance": "squares += -> squares + ",
        "sample deviation": "correction=0 -> correction=1",
    },
    ("RunningMeanStd", loops.test_running_mean_std_keeps_small_steps): {
        "float32": '"mean", torch.zeros(shape, dtype=torch.float64) -> "mean", torch.zeros(shape)'
    },
    ("RunningMeanStd", NUMPY): {
        "not saved": "torch.ones(shape, dtype=torch.float64) -> torch.ones(shape), persistent=False"
    },
    ("categorical", by_hand.test_distributions): {
        "logits for logarithms": "factor_logits.log_softmax(1) -> factor_logits"
    },
    ("gaussian", by_hand.test_distributions): {"deviation for its logarithm": "- log_std - -> - log_std.exp() -"},
    ("policy_loss", by_hand.test_policy_loss): {
        "clipped above only": "clamp(1 - clip_coef, 1 + clip_coef) -> clamp(max=1 + clip_coef)",
        "clipped below only": "clamp(1 - clip_coef, 1 + clip_coef) -> clamp(min=1 - clip_coef)",
        "always clipped": "torch.min(ratios * advantages, clipped * advantages) -> (clipped * advantages)",
        "larger of the two": "torch.min -> torch.max",
        "uphill": "return - -> return ",
    },
    ("value_loss", by_hand.test_value_loss): {
        "smaller of the two": "torch.max -> torch.min",
        "without the half": "0.5 * -> ",
    },
    ("normalize", by_hand.test_normalisation_and_kl): {"sample deviation": "correction=0 -> correction=1"},
    ("approximate_kl", by_hand.test_normalisation_and_kl): {
        "can be negative": "log_ratios.exp() - 1 - log_ratios -> -log_ratios",
        "the other way round": "log_ratios.exp() - 1 - log_ratios -> (log_ratios - 1) * log_ratios.exp() + 1",
    },
    ("ppo_loss", TRAINING["gae"]): {
        "entropy lowered": "- args.ent_coef -> + args.ent_coef",
        "value weighs 1": "args.vf_coef * v_loss -> v_loss",
        "ratio inverted": "log_probs - batch.old_log_probs -> batch.old_log_probs - log_probs",
    },
    ("train", TRAINING["gae"]): {
        "reset row that opens a rollout forgotten": "for t in -> reset_rows = reset_rows & False\n        for t in",
        "gradients add up": "optimizer.zero_grad() -> 0",
        "gradients not shortened": "args.max_grad_norm -> 1e9",
        "learning rate kept": "if args.anneal_lr -> if False",
        "estimates made anew, as in V-trace": 'args.estimator == "vtrace" and epoch > 0 -> epoch > 0',
    },
    ("train", probes.test_rows_of_a_real_vector_environment): {
        "last observation not stored": "buffer.obs[-1] = obs -> 0",
    },
    ("train", TRAINING["gae, normalised"]): {
        "learning rate lowered unasked": "if args.anneal_lr -> if True",
        "reset rows in the statistics": "buffer.played_obs() -> buffer.obs[:-1].reshape(-1, 3)",
        "updated too early": "if args.clip_reward: -> agent.obs_stats.update(buffer.played_obs())\n        if 0:",
    },
    ("train", TRAINING["vtrace"]): {
        "V-trace keeps the first estimates": "epoch > 0 -> False",
        "mu is what the last epoch began with": "for batch in -> mu_log_probs = log_probs\n            for batch in",
    },
    ("train", TARGET_KL): {"limit forgotten": "> args.target_kl -> > 1e9"},
    ("Agent.to_env", INTEGERS): {
        "truncates": "np.rint(actions) -> actions",
        "bounds forgotten": "np.clip(actions, space.low, space.high) -> actions",
    },
    ("Agent.to_env", FROM_5): {"start forgotten": 'getattr(space, "start", 0) -> 0'},
    ("Agent.sample", DRAWS): {
        "no noise": "+ rng.gumbel(size=output.shape) -> ",
        "normal noise": "rng.gumbel -> rng.normal",
        "noise shared by the factors": "size=output.shape) -> size=(20_000, 3))[:, [0, 1, 0, 1, 2]]",
    },
    ("Agent.sample", loops.test_gaussian_actions_have_their_mean_and_deviation): {
        "log_std for std": "detach().exp() -> detach()",
    },
    ("evaluate", probes.test_evaluation): {
        "counts after the end": "rewards * playing -> rewards",
        "ends with the first episode": "not playing.any() -> not playing.all()",
    },
}


@pytest.mark.parametrize("where, check, change", **by_name(MISTAKES))
def test_mistake_is_caught(script, where, check, change):
    """Fails if a known mistake passes the check that is there for it, or if the script does not pass this check."""
    assert passes(check, script)
    faulty = mutant(script, where, *change.split(" -> "))
    with pytest.raises(AssertionError):
        check(faulty)
