"""Well-known faulty versions of what stands in maddpg_matd3.py: each must be caught, by name."""

from functools import partial

import pytest
import torch

from tests.against_loops import test_maddpg_matd3 as loops
from tests.by_hand import test_maddpg_matd3 as by_hand
from tests.tools import by_name, mutant, passes

THREE_STEPS = partial(by_hand.test_three_steps, agents=2)
TWIN = {case: partial(loops.test_training_equals_that_of_the_twin, case=case) for case in loops.TWINS}
DEAD = partial(loops.test_nobody_learns_from_what_the_dead_did, discrete=False, state_type="FP")
DEAD_EP = partial(loops.test_nobody_learns_from_what_the_dead_did, discrete=False, state_type="EP")
STORED = {kind: partial(loops.test_deaths_and_ends_are_stored, state_type=kind) for kind in ("EP", "FP")}
DEATH = {kind: partial(loops.test_a_death_is_of_one_environment, state_type=kind) for kind in ("EP", "FP")}
BEST = {discrete: partial(loops.test_best_actions, discrete=discrete) for discrete in (False, True)}
NETWORKS = partial(loops.test_which_networks_there_are, state_type="EP", share_policy=True)
EP_SAMPLE = partial(loops.test_sample, kind="EP")
GOES_ON = "~self.dones[last, e, g] & (last != newest)"

MISTAKES = {  # (where it is made, what catches it): {name: text that stands there -> what stands there in its place}
    ("OffPolicyBuffer.windows", THREE_STEPS): {
        "sums beyond the end": f"{GOES_ON} -> last != newest",
        "sums beyond truncations": "~self.dones[last -> ~self.terms[last",
        "gamma to the n, however long the window is": "return rewards, discounts, last -> "
        "return rewards, 0 * discounts + self.gamma**self.n_step, last",
        "rewards not discounted": "goes_on * discounts * self.rewards -> goes_on * self.rewards",
        "what follows the first step": "return rewards, discounts, last -> "
        "return rewards, discounts, np.tile(t, (self.streams, 1))",
    },
    ("OffPolicyBuffer.windows", by_hand.test_the_ring_is_full): {
        "sums beyond the newest": f"{GOES_ON} -> ~self.dones[last, e, g]",
        "stops at the last slot": f"goes_on = {GOES_ON} -> goes_on = {GOES_ON} & (last != self.steps - 1)",
        "all have the newest step of the first": "(self.positions[e] - 1) -> (self.positions[0] - 2)",
    },
    ("OffPolicyBuffer.windows", by_hand.test_each_agent_has_a_window): {
        "ends of the environment only": "~self.dones[last, e, g] -> ~self.dones[last, e].all(-1)",
        "ends of any agent": "~self.dones[last, e, g] -> ~self.dones[last, e].any(-1)",
    },
    ("OffPolicyBuffer.get", THREE_STEPS): {
        "done for term": "terms=self.tensor(self.terms[ -> terms=self.tensor(self.dones[",
        "term of the first step": "terms=self.tensor(self.terms[last_t -> terms=self.tensor(self.terms[first_t",
        "state after the first step": "self.next_share_obs[last_t -> self.next_share_obs[first_t",
        "mask now for mask next": "in self.next_available_actions] -> in self.available_actions]",
        "slots environment by environment": "np.divmod(slots, self.num_envs) -> np.divmod(slots, self.steps)[::-1]",
    },
    ("OffPolicyBuffer.get", by_hand.test_each_agent_has_a_window): {
        "sample by sample": "rewards=self.tensor(rewards. -> rewards=self.tensor(rewards.T.",
        "masks of the dead sample by sample": "self.valid_transitions[t, e].T. -> self.valid_transitions[t, e].",
        "observed at the end of the first agent's window": "obs[last_t, of_streams]) -> "
        "obs[np.tile(last[0], self.streams), of_streams])",
    },
    ("OffPolicyBuffer.insert", by_hand.test_rows_that_reset_and_restarts): {
        "stores rows that reset": "valid_transitions.any(1) -> valid_transitions.any(1) | True",
        "one position for all": "self.positions[envs] = (t + 1) -> self.positions[:] = (t.max() + 1)",
    },
    ("OffPolicyBuffer.insert", THREE_STEPS): {
        "next mask of now": "= next_available_actions[i][envs] -> = available_actions[i][envs]",
    },
    ("OffPolicyBuffer.cut", by_hand.test_rows_that_reset_and_restarts): {
        "a window into the next episode": "self.dones[self.positions[envs] - 1, envs] = True -> pass",
        "a restart is a termination": "self.dones[self.positions[envs] - 1, envs] = True -> "
        "self.dones[self.positions[envs] - 1, envs] = self.terms[self.positions[envs] - 1, envs] = True",
        "one step late": "self.positions[envs] - 1, envs -> self.positions[envs], envs",
    },
    ("in_turn", by_hand.test_whose_turn_it_is): {
        "all at once": "[actions[i]] * len(own) -> [own[i]] * len(own)",
        "another's turn": "turns[i] = own[i] -> turns[-1 - i] = own[i]",
        "old ones put in": "turns[i] = own[i] -> turns[i] = actions[i]",
    },
    ("gumbel_softmax", by_hand.test_gumbel_softmax): {
        "soft draws": "return hard + (soft - soft.detach()) -> return soft",
        "no gradient": "(soft - soft.detach()) -> 0 * soft",
        "gradient upside down": "(soft - soft.detach()) -> (soft.detach() - soft)",
        "noise ignored": "(logits + noise) / temperature -> logits / temperature",
        "temperature ignored": "(logits + noise) / temperature -> logits + noise",
        "noise not tempered": "(logits + noise) / temperature -> logits / temperature + noise",
    },
    ("smoothed", by_hand.test_td3_target): {
        "noise not clipped": "noise.clamp(-clip, clip) -> noise",
        "leaves the bounds": ".clamp(-1, 1) -> .clamp(-9, 9)",
    },
    ("critic_targets", by_hand.test_td3_target): {
        "bootstraps at ends": "* ~terminated -> * 1",
        "the higher value": "amin -> amax",
    },
    ("polyak", by_hand.test_td3_target): {"tau of the other": "lerp_(weights, tau) -> lerp_(weights, 1 - tau)"},
    ("updates_due", by_hand.test_td3_target): {
        "too early": "max(args.learning_starts, args.batch_size) -> args.learning_starts",
        "one update per training": "due += args.gradient_steps -> due += 1",
        "counted per loop, not per step": "taken % args.train_frequency == 0 -> taken == step",
    },
    ("matd3_targets", by_hand.test_an_update): {
        "no target actors": "agents.choose(agents.target_actors -> agents.choose(agents.actors",
        "gamma whatever the window": "batch.gammas.squeeze(1) -> args.gamma",
    },
    ("actors_loss", by_hand.test_an_update): {
        "others do what they would now": "in_turn(own, batch.actions) -> [own[i].repeat(2, 1) for i in range(2)]",
        "the penalty's sign": "return -valid_mean(values -> return valid_mean(values",
    },
}  # fmt: skip
MISTAKES_OF_WHOLE_TRAININGS = {
    ("OffPolicyBuffer.sample", EP_SAMPLE): {
        "environments equally often": "np.searchsorted(ends, drawn, side=\"right\") -> drawn % self.num_envs",
        "the newest never": "rng.integers(ends[-1] -> rng.integers(ends[-1] - 1",
        "the first slot of an environment is another's": 'side="right" -> side="left"',
    },
    ("matd3_targets", TWIN["MATD3"]): {
        "no target critics": "for twin in agents.target_critics] -> for twin in agents.critics]",
        "the state before": "twin, batch.next_share_obs -> twin, batch.share_obs",
        "no noise": "args.target_noise > 0 and -> False and",
    },
    ("matd3_targets", TWIN["FP"]): {
        "one critic asked twice": "agents.values(twin, -> agents.values(agents.target_critics[0],",
    },
    ("critics_loss", TWIN["MATD3"]): {
        "one critic learns": "** 2).sum(0) -> ** 2 * torch.tensor([[1], [0]])).sum(0)",
        "not squared": "(values - targets) ** 2 -> (values - targets).abs()",
    },
    ("critics_loss", DEAD): {"learns what the dead got": "valid = batch.valid_transitions.squeeze(1) -> pass"},
    ("actors_loss", DEAD_EP): {"learns what the dead saw": "-valid_mean(values, valid) -> -values.mean()"},
    ("actors_loss", TWIN["FP"]): {
        "everybody in the first one's states": "states = batch.share_obs -> "
        "states = batch.share_obs[: len(batch.obs[0])].repeat(agents.num_agents, 1)",
    },
    ("Agents.values", TWIN["FP"]): {
        "critics in another order": "zip(critics, inputs) -> zip(reversed(critics), inputs)",
    },
    ("Agents.choose", TWIN["discrete"]): {
        "masks ignored": "torch.where(mask, output, -1e9) -> output",
        "temperature ignored": "self.args.gumbel_temperature -> 1.0",
        "the same noise for all agents": "rng.gumbel(size=output.shape) -> 0 * rng.gumbel(size=output.shape)",
    },
    ("Agents.__init__", NETWORKS): {
        "targets are the networks themselves": "copy.deepcopy(self.actors) -> self.actors",
        "twins are one network": "append(self.new_critics(args)) -> append(self.critics[0])",
        "twins begin alike": "append(self.new_critics(args)) -> append(copy.deepcopy(self.critics[0]))",
        "shared actors are copies": "[self.actors[0]] * self.num_agents -> self.actors",
    },
    ("Agents.explore", loops.test_exploration_with_noise): {
        "leaves the bounds": ".clamp(-1, 1) -> .clamp(-99, 99)",
        "noise ignored": "noise * self.normal -> 0 * self.normal",
    },
    ("Agents.explore", loops.test_exploration_by_draws): {
        "masks of another agent": "for mask in available] -> for mask in available[:1] * 2]",
    },
    ("Agents.random_actions", loops.test_exploration_by_draws): {
        "masks ignored": "np.where(mask, rng.random(mask.shape), -1) -> rng.random(mask.shape)",
        "the first that is available": "rng.random(mask.shape), -1 -> 1, -1",
    },
    ("Agents.random_actions", loops.test_exploration_with_noise): {
        "half the range": "rng.uniform(-1, 1 -> rng.uniform(0, 1",
    },
    ("Agents.act", BEST[True]): {"masks ignored": "np.where(mask, output, -np.inf) -> output"},
    ("Agents.act", BEST[False]): {"not squashed": "np.tanh(output) -> output"},
    ("Agents.to_env", loops.test_actions_are_stretched_to_the_bounds_of_each_agent): {
        "not stretched": "low + (action + 1) / 2 * (high - low) -> action",
        "cut off instead of rounded": "np.rint(scaled) -> np.floor(scaled)",
        "start forgotten": "action.argmax(1) + space.start -> action.argmax(1)",
    },
    ("Agents.critic_inputs", STORED["FP"]): {
        "the dead see the state": "return inputs * rows[:, self.layout.alive, None] -> return inputs",
        "the state alone": "inputs[:, i, : self.obs_sizes[i]] = rows[:, part] -> pass",
    },
    ("store_step", STORED["EP"]): {
        "truncation is termination": "took_part, terminated, -> took_part, done,",
        "states now for next": "agents.critic_inputs(next_rows) -> agents.critic_inputs(rows)",
    },
    ("store_step", STORED["FP"]): {
        "everybody gets the sum": 'infos["rewards"] -> rewards[:, None].repeat(2, 1)',
        "a death is no end": "done[:, None] | (next_rows[:, alive] == 0) -> done[:, None].repeat(2, 1)",
    },
    ("store_step", DEATH["EP"]): {"reset rows are stored": " & ~reset_rows[:, None] -> "},
    ("store_step", DEATH["FP"]): {
        "another environment's reset revives": " & ~reset_rows[:, None] -> & ~reset_rows.any()",
        "the dead take part": "(rows[:, alive] == 1) & -> (rows[:, alive] >= 0) &",
    },
    ("train", TWIN["MATD3"]): {
        "actors do not wait": "agents.updates % args.policy_frequency == 0 -> True",
        "target critics stand still": "polyak(agents.target_critics, agents.critics, args.tau) -> pass",
        "target actors stand still": "polyak(agents.target_actors, agents.actors, args.tau) -> pass",
        "gradients add up": "critic_optimizer.zero_grad() -> pass",
        "one learning rate": "lr=args.actor_learning_rate) -> lr=args.critic_learning_rate)",
    },
    ("train", loops.test_a_checkpoint_is_a_restart): {"windows reach over a restart": "buffer.cut() -> 0"},
    ("train", TWIN["large penalty"]): {"penalty forgotten": "+ args.output_penalty * squares -> + 0 * squares"},
    ("train", TWIN["short gradients"]): {
        "the critics' gradients not shortened": "clip_grad_norm_(agents.critics.parameters(), args.max_grad_norm) -> "
        "clip_grad_norm_(agents.critics.parameters(), 1e9)",
    },
    ("train", loops.test_what_is_next_is_the_true_successor): {
        "rows that reset are steps": "reset_rows = terminated | truncated -> reset_rows = terminated & truncated",
    },
}  # fmt: skip


def is_caught(script, where, check, change):
    """Fails if a known mistake passes the check that is there for it, or if the script does not pass this check."""
    assert passes(check, script)
    torch.manual_seed(0)
    faulty = mutant(script, where, *change.split(" -> "))
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError, RuntimeError, IndexError, faulty.UserError)):
        check(faulty)


@pytest.mark.parametrize("where, check, change", **by_name(MISTAKES))
def test_mistake_is_caught(script, where, check, change):
    """Fails if a mistake passes the numbers worked out by hand."""
    is_caught(script, where, check, change)


@pytest.mark.slow
@pytest.mark.parametrize("where, check, change", **by_name(MISTAKES_OF_WHOLE_TRAININGS))
def test_mistake_in_a_training_is_caught(script, where, check, change):
    """Fails if a mistake passes the comparison with what is slow and obvious."""
    is_caught(script, where, check, change)
