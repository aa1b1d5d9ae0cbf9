"""Well-known faulty versions of what ppod.py adds: each must be caught, by name, by a check that ppod.py passes.

Those of what it shares with ppo.py stand in test_ppo.py. "Published" are those of the authors' code.
"""

from functools import partial

import pytest
from gymnasium import spaces

from tests.against_loops import test_ppod as loops
from tests.by_hand import test_ppod as by_hand
from tests.probes import test_ppod as probes
from tests.tools import by_name, mutant, passes

FEATURES = partial(loops.test_features_of_sequences, view="vector", recurrent=True)
CHUNKS = partial(loops.test_chunks_play_on_where_the_rollout_was, view="vector", length=4)
LOSS = partial(loops.test_loss, action_space=spaces.Discrete(2), more={})
CLIPPED_LOSS = partial(loops.test_loss, action_space=spaces.Discrete(2), more=loops.CLIPPED)
TRAINING = partial(loops.test_training, more={})
NORMALISED = partial(
    loops.test_training, more={"anneal_lr": False, "normalize_obs": True, "normalize_reward": True}
)  # fmt: skip
INTEGERS = partial(loops.test_actions_as_the_environment_takes_them, name="Box of integers")
FROM_5 = partial(loops.test_actions_as_the_environment_takes_them, name="Discrete from 5")
BACK_FROM_5 = partial(loops.test_actions_of_the_environment_as_the_agent_has_them, name="Discrete from 5")
DRAWN = partial(loops.test_evaluations_can_draw_actions, sample_actions=True)
FAILURES = partial(probes.test_failures_are_no_reward_demos, threshold=None, good=0)

MISTAKES = {  # (where it is made, what catches it): {name: text that stands there -> what stands there in its place}
    ("PPODBuffer.sample_demo", by_hand.test_what_comes_next): {
        "borders that do not add up": "if u < self.rho + self.phi -> if u < self.phi",
        "share of an empty list goes to the other": "if u < self.rho: -> if u < self.rho and self.reward_demos:",
    },
    ("PPODBuffer.sample_demo", loops.test_value_demos_are_drawn_by_priority_and_reward_demos_uniformly): {
        "value demos drawn uniformly": "len(probabilities), p=probabilities -> len(probabilities)",
        "always the first reward demo": "rng.integers(len(self.reward_demos)) -> 0",
    },
    ("replay_probabilities", by_hand.test_priorities): {
        "the worst preferred": "v = v - v.min() -> pass",
        "0/0": "v = np.ones_like(v) -> pass",
        "power overflows": "(v / v.max()) ** alpha -> v**alpha",
        "no alpha": "** alpha -> ** 1",
    },
    ("PPODBuffer.anneal_parameters", by_hand.test_annealing): {
        "share of phi as it is": "self.rho + self.args.phi / size -> self.rho + self.phi / size",
        "sum not constant": "self.phi = total - self.rho -> self.phi = self.args.phi - self.rho",
        "without value demos": "if not self.value_demos: -> if False:",
        "rho grows beyond the sum": "min(self.rho + self.args.phi / size, total) -> self.rho + self.args.phi / size",
    },
    ("PPODBuffer.add_reward_demo", loops.test_annealing_comes_before_eviction): {
        "room is made first": "self.anneal_parameters() -> self.check_demo_buffer_capacity(); self.anneal_parameters()",
    },
    ("PPODBuffer.check_demo_buffer_capacity", by_hand.test_capacity): {
        "a person's demo dropped": "if not demo.human -> if True",
        "the shortest goes": "max(from_agents -> min(from_agents",
        "the oldest value demo goes": "min(self.value_demos, key=lambda demo: demo.max_value) -> self.value_demos[0]",
        "the highest value demo goes": "min(self.value_demos -> max(self.value_demos",
    },
    ("PPODBuffer.add_reward_demo", by_hand.test_capacity): {
        "published: a new best demo empties the list": "self.add(self.reward_demos, demo) -> "
        "self.add(self.reward_demos, demo); self.reward_demos = [demo]",
    },
    ("as_demo", by_hand.test_what_an_episode_becomes): {
        "a cut is a termination": "bool(terminated and length == len(rewards)) -> True",
        "cut, and terminated all the same": "bool(terminated and length == len(rewards)) -> bool(terminated)",
        "published: return of what is left": "rewards.sum(dtype=np.float64) -> rewards[:length].sum()",
        "last reward lost": "[-1]) + 1 -> [-1])",
    },
    ("PPODBuffer.__init__", by_hand.test_what_an_episode_becomes): {
        "published: threshold 0.0 is none": "args.initial_reward_threshold -> args.initial_reward_threshold or None",
    },
    ("PPODBuffer.track_potential_demos", by_hand.test_what_an_episode_becomes): {
        "published: the last value for the highest": "terminated[t, i], episode_values.max() -> "
        "terminated[t, i], episode_values[-1]",
    },
    ("PPODBuffer.extend_episode", by_hand.test_what_an_episode_becomes): {
        "reset rows belong to an episode": "~rollout.reset_rows[begin:end, i] -> rollout.rewards[begin:end, i] < 100",
    },
    ("PPODBuffer.add_reward_demo", by_hand.test_threshold): {
        "the threshold falls": "if is_good(lowest, self.reward_threshold): -> if True:",
        "the threshold stays": "self.reward_threshold = lowest -> pass",
    },
    ("PPODBuffer.add_reward_demo", by_hand.test_demos_that_earned_nothing_set_no_threshold): {
        "a demo of 0 sets the threshold": "is_good(lowest, self.reward_threshold) -> "
        "(self.reward_threshold is None or lowest > self.reward_threshold)",
        "any positive return for ever": "is_good(lowest, self.reward_threshold) -> self.reward_threshold is not None",
    },
    ("is_good", by_hand.test_threshold): {"an equal return does not do": "threshold - 1e-6 -> threshold + 1e-6"},
    ("is_good", by_hand.test_without_threshold_and_demos_only_a_positive_return_is_good): {
        "any return does": "total > 0 -> True",
        "0 does": "total > 0 -> total >= 0",
    },
    ("PPODBuffer.consider", by_hand.test_value_demos): {
        "only worse ones join": "demo.max_value > min -> demo.max_value < min",
        "capacity forgotten": "self.check_demo_buffer_capacity() -> pass",
    },
    ("PPODBuffer.track_potential_demos", by_hand.test_value_demos): {
        "judged by the last value": "terminated[t, i], episode_values.max() -> terminated[t, i], episode_values[-1]",
        "values go stale": "demo.max_value = float(episode_values.max()) -> pass",
        "replays are candidates": "if rollout.demo_ids[t, i] > 0: -> if rollout.demo_ids[t, i] > 99:",
    },
    ("PPODBuffer.track_potential_demos", by_hand.test_an_episode_over_three_rollouts): {
        "the next episode inherits": "self.episodes[i] = [] -> pass",
    },
    ("PPODBuffer.extend_episode", by_hand.test_an_episode_over_three_rollouts): {
        "cut where a rollout ends": "self.episodes[i].append(part) -> self.episodes[i] = [part]",
    },
    ("PPODBuffer.draw_sources", by_hand.test_replayed_rows): {
        "writes into the caller's observations": "obs = obs.copy() -> pass",
    },
    ("PPODBuffer.show_replays", by_hand.test_replayed_rows): {
        "writes into the caller's arrays": "array.copy() for -> array for",
        "the agent's actions": "actions[i] = demo.actions[t] -> pass",
    },
    ("SequenceBuffer.log_probs_and_values", by_hand.test_replayed_rows): {
        "a demonstrator in doubt": "log_probs[replayed] = agent.certain_log_prob() -> pass",
    },
    ("SequenceBuffer.compute_advantages", by_hand.test_replayed_rows): {
        "ends exchanged": "terminated, truncated\n -> truncated, terminated\n",
        "gamma for lambda": "args.gamma, args.gae_lambda -> args.gamma, args.gamma**2",
    },
    ("RecurrentAgent.certain_log_prob", loops.test_a_gaussian_demonstrator): {
        "density 1": "if not self.continuous -> if True",
    },
    ("RecurrentAgent.features", by_hand.test_recurrent_states): {
        "state goes on over a reset row": "state = state * ~reset_rows[t, :, None] -> pass",
        "state zero in every row": "state * ~reset_rows[t, :, None] -> 0 * state",
        "forgets before the final observation": "features.append(state) -> "
        "features.append(state * ~reset_rows[t, :, None])",
    },
    ("SequenceBuffer.log_probs_and_values", by_hand.test_recurrent_states): {
        "states after each row": "torch.cat([self.state[None], states[:-1]]) -> states",
        "last value without memory": "agent.value(obs[-1], states[-1]) -> agent.value(obs[-1], 0 * states[-1])",
    },
    ("SequenceBuffer.chunks", loops.test_chunks): {
        "time and slots mixed up": "movedim(0, 2).flatten(1, 2) -> movedim(0, 1).flatten(1, 2)",
    },
    ("SequenceBuffer.minibatches", loops.test_chunks): {
        "state of the last step of a chunk": "(self.states, length)[0] -> (self.states, length)[-1]",
    },
    ("sequence_loss", LOSS): {
        "reset rows learnt": "trained = ~batch.reset_rows -> trained = batch.reset_rows | True",
        "reset rows in the mean of advantages": "normalize(advantages) -> normalize(batch.advantages)[trained]",
        "replays in the figures": "[~batch.replayed[trained]] -> ",
        "entropy of reset rows": "entropies[trained].mean() -> entropies.mean()",
        "entropy punished": "- args.ent_coef * entropy -> + args.ent_coef * entropy",
    },
    ("sequence_loss", CLIPPED_LOSS): {
        "always normalised": "if args.norm_adv: -> if True:",
        "never clipped": "if args.clip_vloss else None -> if False else None",
    },
    ("sequence_loss", loops.test_figures_of_nothing_but_replays): {"mean of nothing": "if len(own) == 0: -> if False:"},
    ("to_env", INTEGERS): {
        "truncates": "np.rint(actions) -> actions",
        "bounds forgotten": "np.clip(actions, space.low, space.high) -> actions",
    },
    ("to_env", FROM_5): {"start forgotten": 'getattr(space, "start", 0) -> 0'},
    ("from_env", BACK_FROM_5): {"start forgotten": 'getattr(space, "start", 0) -> 0'},
    ("RecurrentAgent.act", loops.test_act_remembers_and_forgets): {
        "remembers nothing": "actions, self.state = -> actions, _ =",
    },
    ("RecurrentAgent.begin_episodes", loops.test_act_remembers_and_forgets): {
        "remembers the last episode": "self.state = -> "
        'if episodes != len(getattr(self, "state", ())):\n            self.state =',
    },
    ("RecurrentAgent.sample", loops.test_gaussian_actions_have_their_mean_and_deviation): {
        "log_std for std": "detach().exp() -> detach()",
        "noise unasked": "0 if rng is None else rng.standard_normal(output.shape, np.float32) -> "
        "np.random.standard_normal(output.shape)",
    },
    ("GridPatches.one_hot", loops.test_cells_enter_one_hot): {
        "pictures pass": ".long(), size) -> .long().clamp(max=size - 1), size)"
    },
    ("GridPatches.forward", loops.test_patches_are_seen_alike_wherever_they_are): {
        "rows and columns exchanged": "movedim(3, 1) -> movedim(3, 1).transpose(2, 3)",
    },
}
MISTAKES_OF_RUNS = {  # the same, of whole rollouts
    ("is_good", FAILURES): {"failures become reward demos": "total > 0 -> True"},
    ("PPODBuffer.draw_next", loops.test_replays): {
        "the environment is seen in mid-episode": "& shows_env & self.needs_reset -> & shows_env & False",
    },
    ("PPODBuffer.show_replays", loops.test_replays): {
        "every demo ends terminated": "is_last and demo.terminated -> is_last",
        "no demo ends terminated": "is_last and demo.terminated -> False",
        "reward of the environment behind a reset row": "rewards[reset_rows] = 0 -> pass",
        "end of the environment behind a reset row": "terminated[reset_rows] = False -> pass",
    },
    ("PPODBuffer.draw_sources", loops.test_replays): {
        "the last demo's environment is seen": "self.needs_reset[i] = True -> pass",
        "the environment before the demo": "obs[i] = demo.obs[0] -> pass",
        "a demo goes on where it was": "self.position[i] = 0 -> pass",
    },
    ("PPODBuffer.track_potential_demos", loops.test_replays): {
        "replays are candidates": "if rollout.demo_ids[t, i] > 0: -> if rollout.demo_ids[t, i] > 99:",
    },
    ("train", loops.test_replays): {
        "replays counted": "real = ~reset_rows & (demo_ids == 0) -> real = ~reset_rows",
        "returns of replays counted": "ended & real -> ended",
        "observations change places": "obs = step.next_obs -> obs = step.next_obs[::-1]",
        "no replay at first": "obs = demos.restart(obs, rng) -> pass",
    },
    ("RecurrentAgent.features", FEATURES): {
        "one reset row for all": "~reset_rows[t, :, None] -> ~reset_rows[t].any()",
        "steps and slots exchanged": "unflatten(0, reset_rows.shape) -> "
        "unflatten(0, reset_rows.T.shape).transpose(0, 1)",
    },
    ("SequenceBuffer.minibatches", CHUNKS): {
        "state of the last step of a chunk": "(self.states, length)[0] -> (self.states, length)[-1]",
    },
    ("train", TRAINING): {
        "gradients add up": "optimizer.zero_grad() -> 0",
        "gradients as long as they are": "nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm) -> 0",
        "learning rate stays": "if args.anneal_lr: -> if False:",
    },
    ("train", NORMALISED): {
        "learning rate falls": "if args.anneal_lr: -> if True:",
        "reset rows in the statistics": "buffer.played_obs() -> buffer.obs[:-1].reshape(-1, 3)",
        "rewards as they are": "if args.normalize_reward: -> if False:",
    },
    ("train", loops.test_target_kl): {"limit forgotten": "> args.target_kl -> > 1e9"},
    ("train", loops.test_rewards_that_are_learnt_from): {
        "signs learnt unasked": "buffer.rewards = np.sign(buffer.rewards) -> pass",
    },
    ("RecurrentAgent.begin_episodes", DRAWN): {
        "other draws in each evaluation": "default_rng(self.seed) -> default_rng()"
    },
    ("RecurrentAgent.act", DRAWN): {"likeliest only": "self.rng if self.sample_actions else None -> None"},
}


def catch(script, where, check, change):
    """AssertionError unless the script passes this check, and does not with this change."""
    assert passes(check, script)
    faulty = mutant(script, where, *change.split(" -> "))
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeWarning)):
        check(faulty)


@pytest.mark.parametrize("where, check, change", **by_name(MISTAKES))
def test_mistake_is_caught(script, where, check, change):
    """Fails if a known mistake passes the check that is there for it, or if the script does not pass this check."""
    catch(script, where, check, change)


@pytest.mark.slow
@pytest.mark.parametrize("where, check, change", **by_name(MISTAKES_OF_RUNS))
def test_mistake_of_a_run_is_caught(script, where, check, change):
    """The same."""
    catch(script, where, check, change)
