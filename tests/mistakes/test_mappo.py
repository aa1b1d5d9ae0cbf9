"""Well-known faulty versions of what stands in mappo.py: each must be caught, by name, by a check that it passes."""

from functools import partial

import pytest

from tests.against_loops import test_mappo as loops
from tests.by_hand import test_mappo as by_hand
from tests.probes import test_mappo as probes
from tests.tools import by_name, mutant, passes

DENORMALISED = "values = value_normalizer.denormalize(values)"
HARLS = "values = np.concatenate([value_normalizer.denormalize(values[:-1]), values[-1:]])"
CHUNKS = partial(by_hand.test_generators, name="recurrent")
ROWS = partial(by_hand.test_generators, name="feed_forward")
GRU = partial(loops.test_one_step_after_the_other_is_all_at_once, recurrent=True)
MASKED = partial(loops.test_sampled_log_probs_are_those_learned_with, name="Discrete", masked=True)
MISTAKES = {  # (where it is made, what catches it): {name: text that stands there -> what stands there in its place}
    ("CriticBuffer.compute_returns", by_hand.test_returns): {
        "truncation is termination": "np.maximum(goes_on, was_cut_off) -> goes_on",
        "termination is truncation": "np.maximum(goes_on, was_cut_off) -> np.ones_like(goes_on)",
        "ends ignored": "goes_on = self.masks[1:] -> goes_on = np.ones_like(self.masks[1:])",
        "ends a row too late": "goes_on = self.masks[1:] -> goes_on = self.masks[:-1]",
        "next value ignored": "self.value_preds[-1] = next_value -> pass",
        "no gamma in the trace": "self.gamma * gae_lambda -> gae_lambda",
        "advantages for returns": "self.advantages + values[:-1] -> self.advantages",
        "rollout without an end": "1.0 if self.gae_lambda is None -> 0.9 if self.gae_lambda is None",
    },
    ("CriticBuffer.compute_returns", loops.test_returns_of_normalised_values): {
        "not denormalised": f"{DENORMALISED} -> pass",
        "denormalised twice": f"{DENORMALISED} -> {DENORMALISED}; {DENORMALISED}",
        "last row not denormalised": f"{DENORMALISED} -> {HARLS}",
        "denormalised in place": f"{DENORMALISED} -> values[:] = value_normalizer.denormalize(values)",
    },
    ("CriticBuffer.explained_variance", loops.test_explained_variance): {
        "over all rows": "active = self.active_masks[:-1] > 0 -> active = self.masks[:-1] > 0"
    },
    ("recurrent_batches", CHUNKS): {
        "chunks across environments": "x.swapaxes(0, 1).un -> x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).un",
        "chunk-major batches": "steps.flatten(0, 1) -> steps.swapaxes(0, 1).flatten(0, 1)",
        "states after the first steps": "steps[0] if -> steps[-1] if",
        "not shuffled": 'rng.permutation(len(chunks["masks"])) -> range(len(chunks["masks"]))',
    },
    ("feed_forward_batches", ROWS): {"environment by environment": "x.flatten(0, 1) -> x.swapaxes(0, 1).flatten(0, 1)"},
    ("OnPolicyCriticBufferFP.fields", loops.test_chunks_of_agents): {
        "agents before environments": "x.flatten(1, 2) -> x.swapaxes(1, 2).flatten(1, 2)"
    },
    ("OnPolicyCriticBufferFP.insert", loops.test_insert): {
        "environments for agents": "x[:, None] -> np.broadcast_to(x.T, (1, 3))[0][: 2, None]"
    },
    ("OnPolicyActorBuffer.after_update", loops.test_after_update): {
        "active masks begin anew": "self.active_masks, -> ",
        "M is kept": "self.factor[:] = 1 -> pass",
    },
    ("CriticBuffer.after_update", loops.test_after_update): {"bad masks begin anew": "self.bad_masks, -> "},
    ("join_agents", by_hand.test_agents_who_share_a_policy_join): {
        "agents joined on the time axis": "torch.cat(parts, dim=1) -> torch.cat(parts, dim=0)"
    },
    ("ValueNorm.mean_and_std", by_hand.test_value_norm): {
        "not debiased": "max(self.weight.item(), 1e-5) -> 1.0",
        "no floor": "max(variance, 1e-2) -> variance",
    },
    ("ValueNorm.update", by_hand.test_value_norm): {
        "forgetful": "self.mean.lerp_(returns.mean(), 1 - self.beta) -> self.mean.copy_(returns.mean() * self.weight)",
        "mean of squares for square of means": "returns.square().mean() -> returns.mean().square()",
    },
    ("normalize_active", loops.test_normalised_advantages): {
        "normalised over all": "advantages[active > 0] -> advantages",
        "sample deviation": "some.std() -> some.std(ddof=1)",
    },
    ("active_mean", loops.test_mean_of_what_is_active): {"mean over all": "active.sum().clamp(min=1) -> len(x)"},
    ("active_policy_loss", by_hand.test_policy_loss): {
        "not clipped": "torch.min(ratios * advantages, clipped * advantages) -> ratios * advantages",
        "max for min": "torch.min -> torch.max",
        "uphill": "return - -> return ",
        "all weigh": ", active) -> , torch.ones_like(active))",
    },
    ("team_policy_loss", loops.test_ratios_of_what_is_not_active): {
        "masked after exp()": "(log_probs - batch.log_probs) * active -> log_probs - batch.log_probs"
    },
    ("huber_value_loss", by_hand.test_value_loss): {
        "squares": "    errors = nn ->     errors = 0.5 * (values - returns) ** 2\n    unused = nn",
        "value clip ignored": "clip_coef is not None -> clip_coef == 77",
        "min for max": "torch.max -> torch.min",
    },
    ("TeamNetwork.forward", GRU): {"a state survives the reset row": "h = h * mask_t -> pass"},
    ("AgentPolicy.mask_unavailable", MASKED): {"masks do not bind": "== 0, -1e9 -> == 0, 0.0"},
    ("AgentPolicy.sample", loops.test_actions_are_drawn_with_their_probabilities): {
        "no noise": "logits_or_means + noise -> logits_or_means",
        "normal noise": "rng.gumbel( -> rng.normal(",
    },
    ("to_space", loops.test_actions_as_the_environment_takes_them): {
        "cut off": "np.rint(actions) -> actions",
        "bounds forgotten": "np.clip(actions, space.low, space.high) -> actions",
        "start forgotten": 'getattr(space, "start", 0) -> 0',
    },
    ("TeamEnv.step", loops.test_the_dead_and_how_episodes_end): {
        "ends with the first agent": "not any(goes_on) -> not all(goes_on)",
        "any who terminated decides": "all(terminated.get(name, True) -> any(terminated.get(name, True)",
        "the last to act is dead": "playing if over else goes_on -> goes_on",
    },
    ("TeamEnv.row", loops.test_masks_come_from_info_or_from_the_observation): {
        "no valid action": "np.arange(len(mask)) == 0 -> mask"
    },
    ("FactoredActions.action", loops.test_factored_actions_are_those_of_the_environment): {
        "factors exchanged": "action[0] + self.size * action[1] -> action[1] + self.size * action[0]"
    },
    ("Team.act", loops.test_recurrent_evaluation_remembers_and_forgets): {
        "remembers the last episode": "self.memory[:, team_rows[:, 0] == 1] = 0 -> pass",
        "remembers nothing": "self.memory[:, team_rows[:, 0] == 1] = 0 -> self.memory[:] = 0",
    },
    ("untrusted_team", partial(probes.test_what_a_file_may_ask_for, asked="env_id my_module:Game")): {
        "any environment": "not re.fullmatch(TRUSTED_TEAMS, args.env_id) -> False"
    },
}
SEPARATE = partial(loops.test_an_update_is_what_the_arguments_say, name="separate")
HAPPO = partial(loops.test_an_update_is_what_the_arguments_say, name="HAPPO")
SEES = partial(loops.test_learning_sees_what_acting_did, name="recurrent", scripted=False)
CUT = partial(loops.test_limits_truncate, limit={"max_episode_steps": 3})
FP_ALIVE = "np.stack([masks * alive for alive in parts.alive], 1) if args.state_type == 'FP' else None"
IN_TRAINING = {  # what takes longer to catch
    ("TeamNetwork.forward", loops.test_final_values_know_the_episode): {
        "forgets before the final state": "self.gru(x_t, h) -> self.gru(x_t, h * mask_t)"
    },
    ("Team.sample", SEES): {"masks of another row": "buffer.masks[t] -> buffer.masks[t - 1]"},
    ("Team.values", SEES): {"masks of another row": "buffer.masks[t].reshape -> buffer.masks[t - 1].reshape"},
    ("Team.share_obs", loops.test_death_is_of_one_environment_until_its_end): {
        "the dead see the state": "parts.state * parts.alive[i] -> parts.state"
    },
    ("train", loops.test_masks_and_active_masks): {
        "V(0) is not trained": f"masks, bad_masks) -> masks, bad_masks, {FP_ALIVE})",
        "the dead are active": "masks * parts.alive[i] -> masks",
    },
    ("train", CUT): {"truncation is termination": "truncated & ~terminated -> truncated & False"},
    ("train", loops.test_a_termination_on_the_last_step_allowed_is_none_of_the_limit): {
        "truncation wins": "truncated & ~terminated -> truncated"
    },
    ("train", SEES): {"rollouts begin anew": "buffer.after_update() -> pass"},
    ("train", SEPARATE): {
        "gradients add up": "critic_optimizer.zero_grad() -> 0",
        "gradients not shortened": "args.max_grad_norm -> 1e9",
        "learning rate kept": "if args.anneal_lr -> if False",
    },
    ("train", loops.test_the_critics_targets_are_normalised_returns): {
        "reset rows in the mean": "critic_buffer.active_masks[:-1] > 0 -> critic_buffer.active_masks[:-1] > -1"
    },
    ("mappo_update", SEPARATE): {
        "gradients add up": "optimizer.zero_grad() -> 0",
        "gradients not shortened": "args.max_grad_norm -> 1e9",
        "one epoch": "range(args.update_epochs) -> range(1)",
    },
    ("team_policy_loss", HAPPO): {
        "entropy lowered": "- args.ent_coef -> + args.ent_coef",
        "M forgotten": "batch.factor * batch.advantages -> batch.advantages",
    },
    ("team_value_loss", SEPARATE): {
        "targets not normalised": "value_norm.normalize(batch.returns) -> batch.returns",
        "values clipped unasked or not": "if args.clip_vloss -> if not args.clip_vloss",
    },
    ("happo_update", loops.test_happo_hands_on_the_product_of_ratios): {
        "M not handed on": "factor = factor * ratios_now(actor, buffer) -> pass",
        "the last ratio alone": "factor = factor * ratios_now -> factor = ratios_now",
        "always the same order": "rng.permutation(team.num_agents) -> range(team.num_agents)",
        "one's own ratio": "buffer.factor[:] = factor -> buffer.factor[:] = 1.1 * factor",
    },
    ("ratios_now", loops.test_happo_hands_on_the_product_of_ratios): {
        "upside down": 'log_probs - rows["log_probs"] -> rows["log_probs"] - log_probs'
    },
    ("normalized_advantages", loops.test_advantages_of_each_agent): {
        "the first agent's for all": "advantages_of(i) -> advantages_of(0)",
        "the dead weigh": "buffer.active_masks[:-1] -> buffer.masks[:-1]",
    },
    ("OnPolicyCriticBufferFP.advantages_of", loops.test_advantages_of_each_agent): {
        "another's": "self.advantages[:, :, agent] -> self.advantages[:, :, agent - 1]"
    },
    ("actor_minibatches", probes.test_one_environment_one_step): {
        "learns from nothing": "if batch.active_masks.any(): -> if True:"
    },
}


def check_mistake(script, where, check, change):
    assert passes(check, script)
    faulty = mutant(script, where, *change.split(" -> "))
    with pytest.raises(AssertionError):
        check(faulty)


@pytest.mark.parametrize("where, check, change", **by_name(MISTAKES))
def test_mistake_is_caught(script, where, check, change):
    """Fails if a known mistake passes the check that is there for it, or if the script does not pass this check."""
    check_mistake(script, where, check, change)


@pytest.mark.slow
@pytest.mark.parametrize("where, check, change", **by_name(IN_TRAINING))
def test_mistake_in_training_is_caught(script, where, check, change):
    """The same for mistakes that a short training shows."""
    check_mistake(script, where, check, change)
