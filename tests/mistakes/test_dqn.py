"""Well-known faulty versions of what stands in dqn.py: each must be caught, by name, by a check that dqn.py passes."""

from functools import partial

import pytest

from tests.against_loops import test_dqn as loops
from tests.by_hand import test_dqn as by_hand
from tests.tools import by_name, mutant, passes

TRAINING = {name: partial(loops.test_training, name=name) for name in loops.TRAININGS}
LOSS = {double: partial(by_hand.test_loss, double=double) for double in (True, False)}
PLANS = [[(3, True), (2, False)], [(1, False)], [(4, True)]]
RING = partial(loops.test_ring.hypothesis.inner_test, plans=PLANS, capacity=7, steps=20, saved=False)
SAVED_RING = partial(loops.test_ring.hypothesis.inner_test, plans=PLANS, capacity=7, steps=20, saved=True)
NETWORK = partial(loops.test_network, normalize_obs=True, hidden_sizes=(8, 5))
CHANNELS_LAST = partial(loops.test_images, shape=(36, 40, 3))

MISTAKES = {  # (where it is made, what catches it): {name: text that stands there -> what stands there in its place}
    ("td_targets", by_hand.test_targets): {
        "no mask": "* ~terminated -> * 1",
        "termination masks the reward": "return rewards -> return ~terminated * rewards",
        "never double": "if online_q is None -> if True",
        "values of the online network": "* target_q.gather -> * (target_q if online_q is None else online_q).gather",
        "double the wrong way round": "best = -> if online_q is not None:\n"
        "        target_q, online_q = online_q, target_q\n    best =",
        "lowest value": ".argmax( -> .argmin(",
        "not discounted": "gamma * ~terminated -> ~terminated",
        "all pairs": ".squeeze(1) -> ",
    },
    ("dqn_loss", LOSS[True]): {
        "never double": "if args.double -> if False",
        "online network as target": "target_q = target( -> target_q = agent(",
        "the target network chooses": "online_q = agent( -> online_q = target(",
        "target of the state itself": "target_q = target(batch.next_obs) -> target_q = target(batch.obs)",
        "sum over the batch": "huber_loss(q, targets) -> huber_loss(q, targets, reduction='sum')",
        "squared errors": "huber_loss -> mse_loss",
        "half of the squares": "nn.functional.huber_loss(q, targets) -> 0.5 * nn.functional.mse_loss(q, targets)",
        "absolute errors": "huber_loss -> l1_loss",
        "mean of the targets logged": "q.mean() -> targets.mean()",
    },
    ("dqn_loss", LOSS[False]): {
        "always double": "if args.double -> if True",
        "the targets are moved as well": "with torch.no_grad(): -> if True:",
    },
    ("dqn_loss", by_hand.test_small_errors_weigh_as_squares): {
        "absolute errors": "huber_loss -> l1_loss",
        "twice Huber's": "nn.functional.huber_loss(q, targets) -> 2 * nn.functional.huber_loss(q, targets)",
    },
    ("polyak", by_hand.test_target_network_follows): {
        "exchanged": "target_weights.lerp_(weights, tau) -> weights.lerp_(target_weights, tau)",
        "the other share": "lerp_(weights, tau) -> lerp_(weights, 1 - tau)",
        "forgotten": "target_weights.lerp_ -> target_weights.lerp",
    },
    ("linear_schedule", by_hand.test_schedule): {
        "goes on falling": "max(0.0, 1 - step / duration) -> (1 - step / duration)",
        "rises": "1 - step / duration -> step / duration",
    },
    ("ReplayBuffer.add", by_hand.test_ring): {
        "reset rows stored": "~reset_rows -> reset_rows | True",
        "truncation terminates": "terminated[played] -> (terminated | truncated)[played]",
        "no wrap": "(self.position + count) % self.capacity -> (self.position + count) % (self.capacity + 1)",
        "begins at slot 0 too early": "slots = -> self.position %= max(1, self.capacity - count); slots =",
        "size counts steps": "self.size + count -> self.size + 1",
        "obs stored as next_obs": "= next_obs[played] -> = obs[played]",
        "obs of the reset": "= obs[played] -> = next_obs[played]",
    },
    ("ReplayBuffer.add", RING): {
        "reset rows stored": "~reset_rows -> reset_rows | True",
        "rewards of other rows": "rewards[played] -> rewards[:count]",
        "only the first environment's reset row": "~reset_rows -> ~(reset_rows & (np.arange(len(reset_rows)) == 0))",
        "size not bounded": "min(self.size + count, self.capacity) -> self.size + count",
    },
    ("ReplayBuffer.sample", by_hand.test_ring): {"more than there is": "batch_size > self.size -> False"},
    ("ReplayBuffer.sample", loops.test_sampling_is_uniform): {
        "empty slots drawn": "rng.integers(self.size -> rng.integers(self.capacity",
        "the last one never drawn": "rng.integers(self.size -> rng.integers(self.size - 1",
        "the same ones always": "rng.integers -> np.random.default_rng(0).integers",
        "without replacement": "rng.integers(self.size, size=batch_size) -> rng.permutation(self.size - 1)",
    },
    ("ReplayBuffer.state_dict", SAVED_RING): {
        "position lost": '"position": self.position -> "position": 0',
        "zeros": "getattr(self, name)[: self.size] -> 0 * getattr(self, name)[: self.size]",
    },
    ("ReplayBuffer.load_state_dict", SAVED_RING): {"only obs restored": "in Transitions._fields -> in ['obs']"},
    ("ReplayBuffer.__init__", CHANNELS_LAST): {"pixels as floats": "np.uint8 if -> np.float32 if"},
    ("ReplayBuffer.__init__", loops.test_what_is_stored_has_few_bytes): {
        "double precision": "else np.float32\n -> else np.float64\n",
        "continuous actions cut off": "np.float32 if isinstance -> np.int64 if isinstance",
    },
    ("QNetwork.features", NETWORK): {"not normalised": "obs if self.obs_stats is None -> obs if True"},
    ("relu_mlp", NETWORK): {
        "tanh": "nn.ReLU() -> nn.Tanh()",
        "ReLU on the outputs": "outputs), gain=1.0) -> outputs), gain=1.0), nn.ReLU()",
    },
    ("QNetwork.greedy", NETWORK): {"the worst action": "argmax -> argmin"},
    ("QNetwork.explore", loops.test_exploration): {
        "best where random is due": "at_random, any_actions, -> ~at_random, any_actions,",
        "never the last action": "rng.integers(self.num_actions -> rng.integers(self.num_actions - 1",
        "all environments at once": "rng.random(len(obs)) -> rng.random()",
    },
    ("QNetwork.to_env", loops.test_actions_are_shifted_and_typed): {
        "start forgotten": "actions + self.action_space.start -> actions"
    },
    ("train", TRAINING["double"]): {
        "no copy of the network": "copy.deepcopy(agent) -> agent",
        "gradients add up": "optimizer.zero_grad() -> 0",
        "learning rate kept": "if args.anneal_lr -> if False",
        "epsilon stays": "args.end_e, exploration_steps -> args.start_e, exploration_steps",
        "epsilon falls over the whole run": "args.exploration_fraction * args.total_timesteps -> args.total_timesteps",
        "epsilon falls at once": "args.exploration_fraction * args.total_timesteps -> args.exploration_fraction",
        "always random": "agent.explore(obs, epsilon, rng) -> agent.explore(obs, 1.0, rng)",
        "reset rows stored": "terminated, truncated, reset_rows, next_obs) -> "
        "terminated, truncated, reset_rows & False, next_obs)",
        "truncation terminates": "learned_rewards, terminated, -> learned_rewards, terminated | truncated,",
        "obs and next_obs exchanged": "buffer.add(obs, -> buffer.add(next_obs,",
        "one copy early": "if step % args.target -> if (step + 1) % args.target",
        "nothing is copied": "polyak(target, agent, -> polyak(agent, target,",
        "one gradient step": "range(args.gradient_steps) -> range(1)",
        "starts early": "step >= learning_starts -> step >= args.batch_size",
        "rewards clipped unasked": "if args.clip_reward -> if True",
    },
    ("train", TRAINING["plain"]): {
        "learning rate lowered unasked": "if args.anneal_lr -> if True",
        "gradients not shortened": "args.max_grad_norm -> 1e9",
    },
    ("train", TRAINING["normalised"]): {
        "target network has statistics of its own": "target.obs_stats = agent.obs_stats -> 0",
        "reset rows in the statistics": "obs.reshape(args.num_envs, -1)[~reset_rows] -> obs.reshape(args.num_envs, -1)",
        "statistics of the observations after": "update(obs.reshape -> update(next_obs.reshape",
        "statistics stay as they began": "if args.normalize_obs -> if False",
        "tau forgotten": "polyak(target, agent, args.tau) -> polyak(target, agent, 1.0)",
    },
    ("train", TRAINING["clipped rewards"]): {
        "rewards not clipped": "if args.clip_reward -> if False",
        "reported returns clipped": "run.count(next_obs, rewards, -> run.count(next_obs, learned_rewards,",
        "gradients not shortened": "args.max_grad_norm -> 1e9",
    },
    ("train", by_hand.test_periods): {
        "copies wait for updates": "if step % args.target_network_frequency == 0: -> "
        "if step % args.target_network_frequency == 0 and step % args.train_frequency == 0:",
        "reset rows do it again": "range(step_before + 1, -> range(min(step_before + 1, run.step),",
        "the step after": "% args.train_frequency == 0 -> % args.train_frequency == 1",
    },
    ("train", by_hand.test_periods_with_several_environments): {
        "one update for all environments": "for step in range(step_before + 1, -> for step in range(run.step,",
        "one copy late": "for step in range(step_before + 1, run.step + 1) -> for step in range(step_before, run.step)",
    },
    ("train", loops.test_figures): {
        "exploration of no steps": "max(1, args.exploration_fraction * args.total_timesteps) -> "
        "max(100, args.exploration_fraction * args.total_timesteps)"
    },
}


@pytest.mark.parametrize("where, check, change", **by_name(MISTAKES))
def test_mistake_is_caught(script, where, check, change):
    """Fails if a known mistake passes the check that is there for it, or if the script does not pass this check."""
    assert passes(check, script)
    faulty = mutant(script, where, *change.split(" -> "))
    with pytest.raises(AssertionError):
        check(faulty)
