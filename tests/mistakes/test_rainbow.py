"""Well-known faulty versions of what rainbow.py adds to dqn.py: each must be caught by a check that rainbow.py passes.

Those of what the two share stand in test_dqn.py.
"""

from functools import partial

import pytest

from tests.against_loops import test_rainbow as loops
from tests.by_hand import test_rainbow as by_hand
from tests.tools import by_name, mutant, passes

TRAINING = partial(loops.check_training, off=[])
SCALAR = partial(loops.check_training, off=["noisy", "distributional"])
EPSILON = partial(loops.check_training, off=["noisy", "prioritized"])
ONE_STEP = partial(loops.check_training, off=["multi_step", "dueling"])
NETWORK = partial(loops.test_network, dueling=True, distributional=True, noisy=True)
LOSSES = {
    (distributional, double): partial(loops.test_losses, distributional=distributional, double=double)
    for distributional in (True, False)
    for double in (True, False)
}
PLAY = {"plans": [[(3, True), (5, False)], [(5, True)]], "n": 2, "steps": 24, "restarts": [9, 15], "saved": False}
WINDOWS = partial(loops.test_n_step_windows.hypothesis.inner_test, capacity=31, **PLAY)
SAVED_WINDOWS = partial(loops.test_n_step_windows.hypothesis.inner_test, capacity=11, **PLAY | {"saved": True})
STACKS = partial(loops.test_frame_stacks.hypothesis.inner_test, capacity=60, **PLAY)
SAVED_STACKS = partial(loops.test_frame_stacks.hypothesis.inner_test, capacity=11, **PLAY | {"saved": True})
PRIORITIES = [3.0, 0.5, 0.0, 2.0, 0.25, 8.0, 1.0]
TREE = partial(loops.test_tree.hypothesis.inner_test, priorities=PRIORITIES, batch_size=7, seed=3)

ALGORITHM_1_WITH_ITS_BUG = """position = (y - support[0]) / distance
    lower, upper = position.floor().long(), position.ceil().long()
    projected = torch.zeros_like(probs)
    projected.scatter_add_(1, lower, probs * (upper - position))
    return projected.scatter_add_(1, upper, probs * (position - lower))"""

MISTAKES = {  # (where it is made, what catches it): {name: text that stands there -> what stands there in its place}
    ("project", by_hand.test_project): {
        "lost where it falls on an atom": f"return (probs[:, :, None] * shares).sum(1) -> {ALGORITHM_1_WITH_ITS_BUG}",
        "all to the atom below": "shares = -> "
        "y = support[0] + distance * ((y - support[0]) / distance).floor(); shares =",
        "all to the nearest": "shares = -> y = support[0] + distance * ((y - support[0]) / distance).round(); shares =",
        "lost beyond the ends": "y = y.clamp(support[0], support[-1]) -> pass",
        "goes on after termination": "(discounts * ~terminated)[:, None] -> (discounts * (terminated | True))[:, None]",
        "termination masks the reward": "rewards[:, None] + -> (rewards * ~terminated)[:, None] +",
        "one discount for all": "(discounts * ~terminated)[:, None] -> (discounts[0] * ~terminated)[:, None]",
        "shares exchanged": "(1 - (y[:, :, None] - support).abs() / distance).clamp(min=0) -> "
        "(((y[:, :, None] - support).abs() / distance) % 1)",
        "not discounted": "(discounts * ~terminated) -> (1 * ~terminated)",
        "from atoms to returns": "(probs[:, :, None] * shares).sum(1) -> (probs[:, None, :] * shares).sum(2)",
    },
    ("project", by_hand.test_project_keeps_probability_and_mean): {
        "shared by all atoms": ".clamp(min=0) -> .abs()",
        "lost beyond the ends": "y = y.clamp(support[0], support[-1]) -> pass",
    },
    ("distributional_losses", by_hand.test_distributional_loss): {
        "never double": "if args.double -> if False",
        "always double": "if args.double -> if True",
        "cross-entropy": "torch.xlogy(targets, targets) - targets * log_probs -> -targets * log_probs",
        "KL the wrong way round": "torch.xlogy(targets, targets) - targets * log_probs -> "
        "log_probs.exp() * (log_probs - targets.clamp(min=1e-6).log())",
        "mean over atoms": "targets * log_probs).sum(1) -> targets * log_probs).mean(1)",
        "0 ln 0": "torch.xlogy(targets, targets) -> targets * targets.log()",
        "distribution of the action taken": "next_probs[rows, next_q.argmax(1)] -> "
        "next_probs[rows, batch.actions[:, 0]]",
        "online network as target": "next_probs = target. -> next_probs = agent.",
        "not projected": "batch.rewards, batch.terminated, batch.discounts, best_probs -> "
        "0 * batch.rewards, batch.terminated, 1 + 0 * batch.discounts, best_probs",
    },
    ("distributional_losses", LOSSES[True, True]): {
        "first action": "log_probs(batch.obs)[rows, batch.actions[:, 0]] -> log_probs(batch.obs)[rows, 0]",
        "the targets are moved as well": "with torch.no_grad(): -> if True:",
        "of the same observation": "target.log_probs(batch.next_obs) -> target.log_probs(batch.obs)",
        "the target network chooses": "next_q = agent( -> next_q = target(",
        "errors with a gradient": "return losses, losses.detach(), -> return losses, losses,",
        "Q of the target": "log_probs.detach().exp() * support -> targets * support",
        "gamma for gamma^n": "batch.discounts, best_probs, support) -> 0.9 + 0 * batch.discounts, best_probs, support)",
    },
    ("td_losses", by_hand.test_td_losses): {
        "never double": "if args.double -> if False",
        "always double": "if args.double -> if True",
        "squares": "huber_loss(q, targets, -> mse_loss(q, targets,",
        "signed errors halved": "(targets - q).detach().abs() -> losses.detach()",
        "gamma for gamma^n": "batch.discounts, target_q -> 0.5, target_q",
    },
    ("td_losses", LOSSES[False, True]): {
        "online network as target": "target_q = target( -> target_q = agent(",
        "the targets are moved as well": "with torch.no_grad(): -> if True:",
        "mean over the batch": 'reduction="none" -> reduction="mean"',
    },
    ("NoisyLinear.draw_noise", by_hand.test_noisy_layer): {
        "plain Gaussian noise": "e.sign() * e.abs().sqrt() -> e",
        "sign lost": "e.sign() * -> ",
    },
    ("NoisyLinear.draw_noise", loops.test_noise_of_many_draws): {
        "drawn once": "rng.standard_normal -> np.random.default_rng(0).standard_normal",
        "the same for inputs and outputs": "in (self.input_noise, self.output_noise) -> in (self.input_noise,)",
    },
    ("NoisyLinear.forward", by_hand.test_noisy_layer): {
        "noise in evaluation": "if not self.training -> if False",
        "never any noise": "if not self.training -> if True",
        "no noise in the bias": "self.bias + self.sigma_bias * self.output_noise -> self.bias",
        "sigma forgotten": "self.sigma_weight * torch.outer -> torch.outer",
        "noise of inputs and outputs exchanged": "torch.outer(self.output_noise, self.input_noise) -> "
        "torch.outer(self.input_noise, self.output_noise)",
    },
    ("NoisyLinear.__init__", by_hand.test_noisy_layer): {
        "sigma not divided": "(outputs, inputs), sigma / math.sqrt(inputs) -> (outputs, inputs), sigma",
        "divided by the inputs": "(outputs, inputs), sigma / math.sqrt(inputs) -> (outputs, inputs), sigma / inputs",
    },
    ("dueling_values", by_hand.test_dueling): {
        "V + A": " - advantages.mean(1, keepdim=True) -> ",
        "V + A - max A": "advantages.mean(1, keepdim=True) -> advantages.amax(1, keepdim=True)",
        "mean over atoms": "mean(1, keepdim=True) -> mean(2, keepdim=True)",
        "mean over all": "mean(1, keepdim=True) -> mean()",
    },
    ("RainbowNetwork.__init__", NETWORK): {
        "one value for all atoms": "stream_sizes, self.num_atoms, linear) -> stream_sizes, 1, linear)",
        "noisy body": "hidden_layers(inputs, body_sizes, nn.Linear) -> hidden_layers(inputs, body_sizes, linear)",
        "noise in one stream": "stream_sizes, self.num_atoms, linear) -> stream_sizes, self.num_atoms, nn.Linear)",
        "no hidden layer in the streams": "stream_sizes = args.hidden_sizes[-1:] -> stream_sizes = ()",
        "support between other limits": "args.v_min, args.v_max -> -args.v_max, args.v_max",
    },
    ("RainbowNetwork.log_probs", NETWORK): {"softmax over actions": "log_softmax(2) -> log_softmax(1)"},
    ("RainbowNetwork.outputs", NETWORK): {"no dueling": "dueling_values(value, advantages) -> advantages"},
    ("RainbowNetwork.act", NETWORK): {
        "noise in evaluations": "self.eval() -> pass",
        "no noise after an evaluation": "self.train() -> pass",
    },
    ("RainbowNetwork.mean_sigma", loops.test_sigmas): {"signs cancel out": ".abs().mean() -> .mean()"},
    ("RainbowNetwork.features", loops.test_normalised_observations): {
        "not normalised": "obs if self.obs_stats is None -> obs if True"
    },
    ("RainbowNetwork.explore", loops.test_exploration): {
        "best where random is due": "at_random, any_actions, -> ~at_random, any_actions,"
    },
    ("RainbowNetwork.to_env", loops.test_actions_are_shifted_and_typed): {
        "start forgotten": "actions + self.action_space.start -> actions"
    },
    ("NStepBuffer.add", by_hand.test_n_step_windows): {
        "crosses ends": "ended = terminated[i] or truncated[i] -> ended = False",
        "crosses terminations": "ended = terminated[i] or truncated[i] -> ended = truncated[i]",
        "crosses truncations": "ended = terminated[i] or truncated[i] -> ended = terminated[i]",
        "truncation terminates": "next_obs[i], terminated[i]) -> next_obs[i], ended)",
        "mixes environments": "steps = self.open_steps[i] -> steps = self.open_steps[0]",
        "one transition at the end": "while len(steps) == self.n_step or (ended and steps) -> "
        "if len(steps) == self.n_step or ended",
        "incomplete windows lost": "while len(steps) == self.n_step or (ended and steps): -> "
        "if ended and len(steps) < self.n_step:\n                steps.clear()\n"
        "            while len(steps) == self.n_step:",
        "windows that do not overlap": "steps.popleft() -> steps.clear()",
        "reset rows are steps": "np.flatnonzero(~reset_rows) -> range(len(obs))",
        "one step too many": "len(steps) == self.n_step or -> len(steps) > self.n_step or",
        "another environment's observation": "next_obs[i], terminated[i]) -> next_obs[0], terminated[i])",
    },
    ("NStepBuffer.add", loops.test_a_stack_may_change_after_it_was_added): {
        "the environment's own array": "copy.copy(obs[i]) -> obs[i]"
    },
    ("NStepBuffer.add", loops.test_sampling): {"no priority": "self.tree.add(slots) -> pass"},
    ("NStepBuffer.write", by_hand.test_n_step_windows): {
        "always gamma^n": "self.gamma ** len(steps) -> self.gamma**self.n_step",
        "gamma^(k-1)": "self.gamma ** len(steps) -> self.gamma ** (len(steps) - 1)",
        "rewards not discounted": "self.gamma**k * reward -> reward",
        "discounted from the first on": "self.gamma**k * -> self.gamma ** (k + 1) *",
        "only the first reward": "in enumerate(steps)) -> in list(enumerate(steps))[:1])",
        "observation of the last step": "obs, action, _ = steps[0] -> obs, action, _ = steps[-1]",
        "does not begin anew": "(slot + 1) % self.capacity -> min(slot + 1, self.capacity - 1)",
        "size not bounded": "min(self.size + 1, self.capacity) -> self.size + 1",
        "nothing terminates": "self.terminated[slot] = terminated -> self.terminated[slot] = False",
    },
    ("NStepBuffer.begin_episodes", by_hand.test_n_step_windows): {"windows go on": "steps.clear() -> pass"},
    ("NStepBuffer.begin_episodes", WINDOWS): {"windows go on": "steps.clear() -> pass"},
    ("NStepBuffer.sample", by_hand.test_one_step): {"more than there is": "batch_size > self.size -> False"},
    ("NStepBuffer.sample", loops.test_sampling): {
        "empty slots drawn": "rng.integers(self.size -> rng.integers(self.capacity",
        "the same ones always": "rng.integers(self.size -> np.random.default_rng(0).integers(self.size",
        "other slots than it says": "self.get(slots) -> self.get(slots[::-1])",
    },
    ("NStepBuffer.state_dict", SAVED_WINDOWS): {"position lost": '"position": self.position -> "position": 0'},
    ("NStepBuffer.state_dict", loops.test_sampling): {
        "priorities lost": 'state["tree"] = self.tree.state_dict() -> state["tree"] = SumTree(16, 0.5).state_dict()'
    },
    ("FrameStackBuffer.add", STACKS): {
        "looks back across episodes": "None if terminated[i] or truncated[i] else next_stacks[i] -> next_stacks[i]",
        "pads with the first frame": "tuple(obs[i].copy()) -> (obs[i, -1].copy(),) * len(obs[i])",
        "stacks of another environment": "self.newest[i] or -> self.newest[0] or",
        "oldest frame kept": "*stacks[i][1:] -> *stacks[i][:-1]",
    },
    ("FrameStackBuffer.add", loops.test_every_frame_is_kept_once): {
        "frames stored again": "self.newest[i] or tuple -> tuple",
        "whole stacks kept alive": "next_obs[i, -1].copy() -> next_obs[i].copy()[-1]",
    },
    ("FrameStackBuffer.add", loops.test_a_stack_may_change_after_it_was_added): {
        "the environment's own array": "tuple(obs[i].copy()) -> tuple(obs[i])"
    },
    ("FrameStackBuffer.add", loops.test_what_is_not_a_stack_is_refused): {
        "anything stored": "if not np. -> if 0 and np."
    },
    ("FrameStackBuffer.begin_episodes", STACKS): {
        "stacks go on": "self.newest = -> self.newest = getattr(self, 'newest', None) or"
    },
    ("FrameStackBuffer.load_state_dict", SAVED_STACKS): {
        "obs and next_obs exchanged": "zip((self.obs, self.next_obs) -> zip((self.next_obs, self.obs)"
    },
    ("FrameStackBuffer.state_dict", SAVED_STACKS): {
        "the same frame for all": "stacks.append(places[id(frame)]) -> stacks.append(0)"
    },
    ("SumTree.add", by_hand.test_sum_tree): {"new ones get 1": "self.highest -> 1.0"},
    ("SumTree.update", by_hand.test_sum_tree): {
        "highest of the last batch": "max(self.highest, float(priorities.max())) -> float(priorities.max())",
        "alpha forgotten": "** self.alpha -> ** 1.0",
        "signed errors": "np.abs(errors) -> errors.clip(0)",
        "highest never set": "self.highest = -> highest =",
    },
    ("SumTree.write", TREE): {
        "only the parents of the leaves": "range(self.levels) -> range(1)",
        "added twice": "self.nodes[2 * nodes] + self.nodes[2 * nodes + 1] -> 2 * self.nodes[2 * nodes]",
    },
    ("SumTree.sample", by_hand.test_sum_tree): {
        "no weights": "self.nodes[nodes] ** -beta -> self.nodes[nodes] ** 0",
        "weights the wrong way round": "** -beta -> ** beta",
        "not divided by the largest": "weights / weights.max() -> weights",
        "divided by the sum": "weights / weights.max() -> weights / weights.sum()",
        "one draw for all": "np.arange(batch_size) + rng.random(batch_size) -> 0 * np.arange(batch_size) + 0.5",
    },
    ("SumTree.sample", TREE): {
        "turns wrong": "np.where(go_right, numbers - left, numbers) -> numbers",
        "goes left instead": "numbers >= left -> numbers < left",
        "the highest only": "self.nodes[1] / batch_size -> 0.9 * self.nodes[1] / batch_size",
    },
    ("SumTree.sample", loops.test_tree_never_ends_in_an_empty_slot): {"empty slots": "& (right > 0) -> "},
    ("SumTree.load_state_dict", loops.test_tree_comes_back_from_a_checkpoint): {
        "sums not restored": 'self.write(np.arange(self.leaves), np.asarray(state["priorities"])) -> '
        'self.nodes[self.leaves :] = state["priorities"]',
        "highest lost": 'self.highest = float(state["highest"]) -> pass',
    },
    ("train", TRAINING): {
        "no copy of the network": "copy.deepcopy(agent) -> agent",
        "acts without new noise": "agent.draw_noise(rng)  # with --noisy, this is what explores: -> pass  # ",
        "learns with the noise it has acted with": "agent.draw_noise(rng)  # anew for each update -> pass  # ",
        "no noise in the target": "target.draw_noise(rng) -> pass",
        "one noise for both": "target.draw_noise(rng) -> target.load_state_dict(target.state_dict())",
        "beta runs backwards": "linear_schedule(args.beta, 1, -> linear_schedule(1, args.beta,",
        "beta stays": "linear_schedule(args.beta, 1, args.total -> linear_schedule(args.beta, args.beta, args.total",
        "weights left out": "(weights * losses).mean() -> losses.mean()",
        "weights divided by their sum": "(weights * losses).mean() -> (weights * losses).sum() / weights.sum()",
        "priorities never updated": "buffer.update_priorities(slots, errors) -> pass",
        "weighted errors": "update_priorities(slots, errors) -> update_priorities(slots, weights * errors)",
        "priorities of other slots": "buffer.update_priorities(slots, -> buffer.update_priorities(slots[::-1].copy(),",
        "epsilon beside the noise": "0 if args.noisy else -> ",
        "gradients add up": "optimizer.zero_grad() -> 0",
        "learning rate kept": "if args.anneal_lr -> if False",
        "one gradient step": "range(args.gradient_steps) -> range(1)",
        "nothing is copied": "polyak(target, agent, -> polyak(agent, target,",
        "tau forgotten": "polyak(target, agent, args.tau) -> polyak(target, agent, 1.0)",
        "starts early": "step >= learning_starts and -> ",
        "one update for all environments": "for step in range(step_before + 1, -> for step in range(run.step,",
        "reset rows stored": "terminated, truncated, reset_rows, next_obs) -> "
        "terminated, truncated, reset_rows & False, next_obs)",
        "obs and next_obs exchanged": "buffer.add(obs, -> buffer.add(next_obs,",
        "rewards clipped unasked": "if args.clip_reward -> if True",
    },
    ("train", SCALAR): {
        "never any exploration": "0 if args.noisy else -> 0 *",
        "gradients not shortened": "args.max_grad_norm -> 1e9",
    },
    ("train", EPSILON): {
        "epsilon falls over the whole run": "args.exploration_fraction * args.total_timesteps -> args.total_timesteps",
    },
    ("make_n_step_buffer", ONE_STEP): {"always n steps": "args.n_step if args.multi_step else 1 -> args.n_step"},
    ("make_n_step_buffer", TRAINING): {
        "always one step": "args.n_step if args.multi_step else 1 -> 1",
        "other alpha": "args.alpha if -> 0.6 if",
        "gamma of its own": "n_step, args.gamma, alpha -> n_step, 0.99, alpha",
    },
    ("make_n_step_buffer", EPSILON): {"always by priority": "args.alpha if args.prioritized else None -> args.alpha"},
}


TRAININGS = [TRAINING, SCALAR, EPSILON, ONE_STEP]
CASES = by_name(MISTAKES)
CASES["argvalues"] = [
    pytest.param(*case, marks=[pytest.mark.slow] if case[1] in TRAININGS else []) for case in CASES["argvalues"]
]


@pytest.mark.parametrize("where, check, change", **CASES)
def test_mistake_is_caught(script, where, check, change):
    """Fails if a known mistake passes the check that is there for it, or if the script does not pass this check."""
    assert passes(check, script)
    faulty = mutant(script, where, *change.split(" -> "))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(faulty)
