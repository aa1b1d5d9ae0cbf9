"""Well-known faulty versions of what stands in ddpg_td3.py: each must be caught, by name, by a check that it passes.

Those of RunningMeanStd, Adam and the environments stand in test_ppo.py.
"""

from functools import partial

import pytest

from tests.against_loops import test_ddpg_td3 as loops
from tests.by_hand import test_ddpg_td3 as by_hand
from tests.probes import test_ddpg_td3 as probes
from tests.tools import by_name, mutant, passes

TWIN = partial(
    loops.check_updates, target_noise=1.0, normalize_obs=True, max_grad_norm=0.3, anneal_lr=True, policy_frequency=2
)
REPLAY = partial(
    loops.test_replay_buffer_equals_a_list_that_forgets.hypothesis.inner_test, num_envs=3, capacity=5, seed=1
)
DUE = {
    name: partial(by_hand.test_updates_due, settings=settings, steps=steps, due=due)
    for name, settings, steps, due in (
        ("start", {}, (8, 13), 3),
        ("batch", {"batch_size": 15}, (10, 17), 2),
        ("rare", {"train_frequency": 4, "gradient_steps": 3}, (8, 17), 6),
    )
}
ENVIRONMENTS = partial(
    loops.test_updates_do_not_depend_on_the_number_of_environments, num_envs=3, train_frequency=1, gradient_steps=1
)
ANEW = partial(loops.test_what_belongs_to_episodes_begins_anew_with_them, noise="ou")
IMAGES = partial(loops.test_images_have_a_cnn_for_each_network, shape=(36, 40, 3))

MISTAKES = {  # (where it is made, what catches it): {name: text that stands there -> what stands there in its place}
    ("smoothed", by_hand.test_target_policy_smoothing): {
        "noise not clipped": "noise.clamp(-clip, clip) -> noise",
        "action not clipped": ").clamp(-1, 1) -> )",
        "clipped together": "(actions + noise.clamp(-clip, clip)).clamp(-1, 1) -> (actions + noise).clamp(-clip, clip)",
    },
    ("critic_targets", by_hand.test_clipped_double_q): {
        "maximum of the critics": "amin(0) -> amax(0)",
        "mean of the critics": "amin(0) -> mean(0)",
        "first critic only": "next_values.amin(0) -> next_values[0]",
        "bootstraps after termination": " * ~terminated -> ",
        "bootstraps only after termination": "~terminated -> terminated",
        "no reward at termination": "return rewards + -> return ~terminated * rewards +",
    },
    ("critic_loss", by_hand.test_critic_loss): {
        "averaged over critics": ".mean(1).sum() -> .mean()",
        "summed over the batch": ".mean(1).sum() -> .sum()",
        "absolute errors": "((values - targets) ** 2) -> (values - targets).abs()",
        "half the square": "(values - targets) ** 2 -> 0.5 * (values - targets) ** 2",
    },
    ("polyak", by_hand.test_polyak): {
        "tau the wrong way round": "(weights, tau) -> (weights, 1 - tau)",
        "source moves": "target_weights.lerp_(weights, tau) -> weights.lerp_(target_weights, tau)",
        "copies": "(weights, tau) -> (weights, 1.0)",
    },
    ("bellman_targets", by_hand.test_an_update): {
        "values of the critics themselves": "in agent.target_critics -> in agent.critics",
        "actions of the actor itself": "agent.target_actor( -> agent.actor(",
        "targets of this state's values": "critic(batch.next_obs, -> critic(batch.obs,",
    },
    ("bellman_targets", loops.test_noise_on_the_targets_actions): {
        "noise of deviation 1": "noise = args.target_noise * -> noise =",
        "one noise for all rows": "standard_normal(next_actions.shape, np.float32) -> "
        "standard_normal((1, next_actions.shape[1]), np.float32) * np.ones(next_actions.shape, np.float32)",
    },
    ("bellman_targets", TWIN): {
        "noise bound forgotten": "args.noise_clip) -> 99.0)",
        "not smoothed": "if args.target_noise > 0 -> if False",
        "first target critic only": "in agent.target_critics] -> in agent.target_critics[:1]]",
    },
    ("actor_loss", by_hand.test_actor_loss): {
        "actor goes downhill": "return -critic -> return critic",
        "sum instead of mean": ".mean() -> .sum()",
    },
    ("train", by_hand.test_an_update): {
        "actor follows the other critic": "agent.critics[0], batch.obs -> agent.critics[-1], batch.obs",
        "learning rates exchanged": "lr=args.actor_learning_rate -> lr=args.critic_learning_rate",
        "actor's target stays": "polyak(agent.target_actor, agent.actor, args.tau) -> 0",
        "critics' targets stay": "polyak(agent.target_critics, agent.critics, args.tau) -> 0",
        "critics' rate not annealed": 'critic_optimizer.param_groups[0]["lr"] = -> unused =',
        "rate of the round's end": "args.critic_learning_rate * (1 - run.step -> "
        "args.critic_learning_rate * (1 - (run.step + args.num_envs)",
        "no delay": "agent.updates % args.policy_frequency == 0 -> True",
        "actor learns from what was done": "actor_loss(agent.actor, -> "
        "actor_loss(lambda obs: batch.actions + 0 * agent.actor(obs),",
    },
    ("train", by_hand.test_delay_counts_critic_updates): {
        "targets do not wait": "            if agent.updates % -> "
        "            polyak(agent.target_critics, agent.critics, args.tau)\n            if agent.updates %",
        "delay counts from the second": "agent.updates % args.policy_frequency == 0 -> "
        "agent.updates % args.policy_frequency == 0 and agent.updates > 2",
    },
    ("train", TWIN): {
        "critics' gradients add up": "critic_optimizer.zero_grad() -> 0",
        "actor's gradients add up": "actor_optimizer.zero_grad() -> 0",
        "critics' gradients not clipped": "clip_grad_norm_(agent.critics.parameters() -> clip_grad_norm_(()",
        "actor's gradients not clipped": "clip_grad_norm_(agent.actor.parameters() -> clip_grad_norm_(()",
        "actor's rate not annealed": 'actor_optimizer.param_groups[0]["lr"] = -> unused =',
        "actor before the critics": "            critic_optimizer.step() -> ",
    },
    ("train", loops.test_no_gradient_is_computed_that_is_thrown_away): {
        "the actor's loss goes into the critic": "backward(inputs=list(agent.actor.parameters())) -> backward()",
        "both critics judge the actor": "loss = actor_loss(agent.actor, agent.critics[0], batch.obs) -> "
        "loss = [actor_loss(agent.actor, critic, batch.obs) for critic in agent.critics][0]",
    },
    ("train", loops.test_what_is_stored): {
        "actions as the environment takes them": "buffer.add(obs, actions, -> buffer.add(obs, 0 * actions,",
        "next observations twice": "buffer.add(obs, -> buffer.add(next_obs,",
        "truncation counts as an end": "rewards, terminated, truncated, reset_rows -> "
        "rewards, terminated | truncated, truncated, reset_rows",
        "reset rows stored": "truncated, reset_rows, next_obs) -> truncated, reset_rows & False, next_obs)",
    },
    ("train", ENVIRONMENTS): {
        "updates per round": "updates_due(step_before, run.step, args) -> "
        "updates_due(step_before, min(run.step, step_before + 1), args)",
        "reset rows are steps": "updates_due(step_before, run.step, args) -> "
        "updates_due(step_before, step_before + args.num_envs, args)",
    },
    ("train", loops.test_first_actions): {
        "a random action too many": "if run.step < args.learning_starts -> if run.step <= args.learning_starts",
        "not clipped": "np.clip(agent.policy(obs) + noise, -1, 1) -> agent.policy(obs) + noise",
        "half of the range": "rng.uniform(-1, 1, noise.shape) -> rng.uniform(0, 1, noise.shape)",
        "what the actor does": "actions = rng.uniform(-1, 1, noise.shape) -> "
        "actions = np.clip(agent.policy(obs) + noise, -1, 1)",
    },
    ("train", ANEW): {
        "noise outlives a restart": "noise = np.zeros((args.num_envs, agent.action_dimensions)) -> "
        "noise = noise if run.step else np.zeros((args.num_envs, agent.action_dimensions))",
        "returns outlive a restart": "discounted_returns = np.zeros(args.num_envs) -> "
        "discounted_returns = discounted_returns if run.step else np.zeros(args.num_envs)",
    },
    ("next_noise", by_hand.test_ornstein_uhlenbeck_noise): {
        "goes on in the next episode": "noise[reset_rows] = 0 -> 0",
        "theta and 1 - theta exchanged": "(1 - theta) * noise -> theta * noise",
        "Gaussian noise lasts": 'if args.noise == "ou" else 1.0 -> if True else 1.0',
    },
    ("next_noise", loops.test_gaussian_noise): {
        "one noise for all environments": "rng.standard_normal(noise.shape) -> rng.standard_normal(noise.shape[1])",
        "variance for deviation": "args.exploration_noise * -> args.exploration_noise**2 *",
    },
    ("updates_due", DUE["start"]): {"one too early": "taken > max( -> taken >= max("},
    ("updates_due", DUE["batch"]): {
        "fewer transitions than a batch": "max(args.learning_starts, args.batch_size) -> args.learning_starts"
    },
    ("updates_due", DUE["rare"]): {
        "gradient steps forgotten": "due += args.gradient_steps -> due += 1",
        "at every step": " and taken % args.train_frequency == 0 -> ",
    },
    ("ReplayBuffer.add", REPLAY): {
        "reset row stored": "played = ~reset_rows -> played = reset_rows | True",
        "next observation of another row": "next_obs[played] -> next_obs[:count]",
        "the newest goes": "self.position = (self.position + count) % self.capacity -> "
        "self.position = min(self.position + count, self.capacity - 1)",
        "size grows for ever": "min(self.size + count, self.capacity) -> self.size + count",
    },
    ("ReplayBuffer.load_state_dict", REPLAY): {"place forgotten": 'self.position = int(state["position"]) -> 0'},
    ("ActorCritic.__init__", loops.test_networks): {
        "one critic is a copy of the other": "append(Critic(observation_space, action_space, critic_sizes)) -> "
        "append(copy.deepcopy(self.critics[0]))",
        "the actor's target is the actor": "copy.deepcopy(self.actor) -> self.actor",
        "the critics' targets are the critics": "copy.deepcopy(self.critics) -> self.critics",
        "targets start elsewhere": "copy.deepcopy(self.actor) -> "
        "Actor(observation_space, action_space, args.hidden_sizes)",
        "no hidden layers become the actor's": "if args.critic_hidden_sizes is None -> if not args.critic_hidden_sizes",
    },
    ("ActorCritic.__init__", IMAGES): {
        "one CNN for all": "        self.target_actor = -> "
        "        self.actor.encoder = self.critics[0].encoder\n        self.target_actor =",
    },
    ("ActorCritic.to_env", by_hand.test_actions_are_stretched_to_the_bounds): {
        "integers cut towards 0": "np.rint(actions) -> np.trunc(actions)",
        "not stretched": "low + share * (high - low) -> actions.reshape(-1, *space.shape)",
    },
    ("ActorCritic.normalized", TWIN): {
        "next observations as they are": "next_obs=self.observe(batch.next_obs) -> "
        "next_obs=batch.next_obs.reshape(len(batch.next_obs), -1)",
    },
    ("ActorCritic.normalized", by_hand.test_statistics): {
        "rewards not clipped": ".clamp(-10, 10) -> ",
        "variance for deviation": "math.sqrt(self.return_stats.var.item() + 1e-8) -> self.return_stats.var.item()",
        "rewards shifted": "(rewards / -> ((rewards - self.return_stats.mean.item()) /",
    },
    ("ActorCritic.update_statistics", by_hand.test_statistics): {
        "returns go on in the next episode": "discounted_returns[reset_rows] = 0 -> 0",
        "reset rows counted in observations": "obs.reshape(len(obs), -1)[~reset_rows] -> obs.reshape(len(obs), -1)",
        "reset rows counted in returns": "discounted_returns[~reset_rows] -> discounted_returns",
        "rewards for returns": "update(discounted_returns[~reset_rows]) -> update(rewards[~reset_rows])",
    },
    ("ActorCritic.policy", loops.test_acting_is_the_actor): {
        "observations as they are": "self.observe(obs) -> obs.reshape(len(obs), -1)"
    },
    ("ActorCritic.mixed_precision", loops.test_bfloat16): {"never": "enabled=self.bf16 -> enabled=False"},
    ("algorithm_settings", probes.test_algorithm_sets_three_flags_and_what_is_given_wins): {
        "a tuned mixture for the other algorithm as well": '{"algorithm": algorithm} | ALGORITHMS[algorithm] -> '
        '{"algorithm": algorithm} | ALGORITHMS[algorithm] | settings',
        "what is tuned never counts": "ALGORITHMS[algorithm] | settings -> settings | ALGORITHMS[algorithm]",
        "the tuned algorithm never counts": 'args.algorithm or settings.get("algorithm") -> args.algorithm or "td3"',
    },
    ("check_algorithm", probes.test_an_algorithm_that_the_settings_contradict): {"never": "given == settings -> False"},
}


@pytest.mark.parametrize("where, check, change", **by_name(MISTAKES))
def test_mistake_is_caught(script, where, check, change):
    """Fails if a known mistake passes the check that is there for it, or if the script does not pass this check."""
    passes(check, script)
    faulty = mutant(script, where, *change.split(" -> "))
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check(faulty)
