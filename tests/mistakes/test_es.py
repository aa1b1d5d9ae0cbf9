"""Well-known faulty versions of what stands in es.py: each must be caught, by name."""

from functools import partial

import pytest

from tests.against_loops import test_es as loops
from tests.by_hand import test_es as by_hand
from tests.tools import by_name, mutant, passes

RANKS = partial(by_hand.test_centered_ranks, returns=[5, 5, 1, 9], ranks=[0, 0, -1 / 2, 1 / 2])
QUADRATIC = {kind: partial(loops.test_gradient_of_a_quadratic, kind=kind) for kind in ("exact", "random")}
PENDULUM = partial(loops.test_all_at_once_as_one_by_one, name="Pendulum, normalised")
FORWARD = partial(loops.test_forward, hidden_sizes=(5,))
SPREAD = {
    name: partial(
        loops.test_a_generation_does_not_depend_on_the_processes.hypothesis.inner_test, name=name, processes=3, seed=0
    )
    for name in loops.SPREAD
}

MISTAKES = {  # (where it is made, what catches it): {name: text that stands there -> what stands there in its place}
    ("make_candidates", by_hand.test_candidates_are_mirrored): {
        "all plus, then all minus": "axis=1 -> axis=0",
        "no mirror image": "theta - sigma -> theta + sigma",
        "sigma forgotten": "theta + sigma * noise -> theta + noise",
    },
    ("es_gradient", by_hand.test_step): {
        "without the mirror image": "(plus - minus) -> plus",
        "descends": "(plus - minus) -> (minus - plus)",
        "sigma forgotten": "(len(fitnesses) * sigma) -> len(fitnesses)",
        "a sum, not a mean": "(len(fitnesses) * sigma) -> sigma",
        "divided by the pairs": "len(fitnesses) -> len(noise)",
    },
    ("es_gradient", QUADRATIC["exact"]): {
        "signs forgotten": "(plus - minus) -> (plus + minus)",
        "sigma squared": "* sigma) -> * sigma**2)",
        "halves instead of pairs": "reshape(-1, 2).T -> reshape(2, -1)",
    },
    ("es_gradient", QUADRATIC["random"]): {"one of a pair": "(plus - minus) -> plus"},
    ("centered_ranks", RANKS): {
        "ranks by order": "ranks = (smaller + not_larger - 1) / 2 -> "
        "ranks = np.argsort(np.argsort(returns, kind='stable'))",
        "the lowest rank of equals": "(smaller + not_larger - 1) / 2 -> smaller",
        "by N": "(len(returns) - 1) -> len(returns)",
    },
    ("shape_fitness", by_hand.test_step): {
        "not standardised": "(returns - returns.mean()) / returns.std() -> returns",
        "sample deviation": "returns.std() -> returns.std(ddof=1)",
    },
    ("shape_fitness", by_hand.test_fitness): {
        "mean not taken away": "(returns - returns.mean()) -> returns",
        "eight of 0.07 x 100": "round(elite * len(returns), 6) -> elite * len(returns)",
        "rounded down": "math.ceil -> math.floor",
        "counted from the worst of the elite": "[-num_elite - 1] -> [-num_elite]",
        "away from the best": "np.maximum(fitnesses - best_outside, 0) -> "
        "np.where(fitnesses > best_outside, fitnesses, 0)",
    },
    ("ars_gradient", by_hand.test_ars): {
        "top directions by their mean": "pairs.max(1) -> pairs.mean(1)",
        "by their difference": "pairs.max(1) -> abs(pairs[:, 0] - pairs[:, 1])",
        "deviation of all returns": "pairs[top].std() -> pairs.std()",
        "sample deviation": "pairs[top].std() -> pairs[top].std(ddof=1)",
        "divided by the candidates": "(len(top) * -> (2 * len(top) *",
        "the worst directions": "-pairs.max -> pairs.max",
        "noise of other directions": "noise[top] -> noise[: len(top)]",
    },
    ("move_theta", by_hand.test_equal_returns_change_nothing): {
        "steps where nothing can be learnt": "if returns.std() > 1e-6: -> if True:"
    },
    ("move_theta", by_hand.test_weight_decay_and_adam): {
        "decay grows": "gradient - args.weight_decay -> gradient + args.weight_decay",
        "decay times the length": "* policy.theta\n -> * policy.theta.norm()\n",
        "Adam ascends": "= -ascent -> = ascent",
        "without the learning rate": "args.learning_rate * ascent -> ascent",
    },
    ("Policy.layers", FORWARD): {
        "inputs and outputs exchanged": "outputs, inputs), biases -> inputs, outputs).swapaxes(-1, -2), biases",
        "biases of the layer before": "biases = parameters[..., first : first + outputs] -> "
        "biases = parameters[..., :outputs]",
    },
    ("forward", FORWARD): {
        "no tanh": "x = np.tanh(x) -> pass",
        "tanh of the inputs": "if i > 0: -> if True:",
        "no biases": " + biases -> ",
    },
    ("Policy.to_env", by_hand.test_actions_as_the_space_says): {
        "start of a Discrete forgotten": " + space.start -> ",
        "not squashed": "if space.is_bounded(): -> if False:",
        "squashed where there is no bound": "if space.is_bounded(): -> if True:",
        "integers cut off": "np.rint(actions) -> actions",
    },
    ("ObservationStats.normalize", by_hand.test_normalised_observations): {
        "divided by the variance": "np.sqrt(np.maximum(variance, 1e-8)) -> np.maximum(variance, 1e-8)",
        "mean of squares for variance": " - mean**2 -> ",
        "not clipped": "np.clip(x, -10, 10) -> x",
    },
    ("play_candidates", by_hand.test_a_population_of_four): {
        "plays on after a truncation": "~(terminated | truncated) -> ~terminated",
        "steps of the finished counted": "int(playing.sum()) -> len(playing)",
        "observations of the finished": "seen[playing] += sums_of(obs[playing]) -> seen += sums_of(obs)",
    },
    ("play_candidates", loops.test_native_cartpole_as_one_by_one): {
        "rewards of the finished counted": "rewards * playing -> rewards",
    },
    ("play_candidates", PENDULUM): {
        "the last reward lost": "rewards * playing -> rewards * playing * ~truncated",
        "acts on another's observation": "policy.features(obs) -> policy.features(obs[::-1])",
        "acts with another's weights": "policy.layers(candidates) -> policy.layers(candidates[::-1])",
    },
    ("play_candidates", loops.test_statistics_hold_every_observation_acted_upon_once): {
        "final observations in the statistics": "outputs = forward -> playing_on = playing.copy()\n"
        "        seen[:, 0] += ~playing[:, None]\n        outputs = forward",
    },
    ("Slots", PENDULUM): {"pairs do not start alike": "seeds[self.pairs].repeat(2) -> np.tile(seeds[self.pairs], 2)"},
    ("OneEpisode", by_hand.test_a_population_of_four): {
        "slots play on": "if self.over: -> if False:",
        "begins anew by itself": "if seed is not None: -> if True:",
    },
    ("play_generation", loops.test_episodes_per_candidate_are_averaged): {
        "sum of the episodes": "episode_returns / len(episode_seeds) -> episode_returns",
        "last episode": "returns = returns + -> returns = ",
        "all episodes start alike": "slots, seeds, -> slots, episode_seeds[0],",
    },
    ("play_generation", SPREAD["CartPole"]): {
        "steps of this process": 'sum(part["steps"] for part in parts) -> parts[0]["steps"]',
        "noise of other pairs": "noise[slots.pairs] -> noise[: len(slots.pairs)]",
    },
    ("play_generation", SPREAD["Pendulum, normalised"]): {
        "observations of one process": 'np.concatenate([part["seen"] for part in parts]) -> parts[0]["seen"]'
    },
    ("play_candidates", SPREAD["drawn actions"]): {
        "actions drawn by process": "[slots.candidates] -> [: len(candidates)]"
    },
    ("ShareOfSlots", SPREAD["CartPole"]): {
        "first states by process": "self.all_envs.unwrapped.state[:, self.candidates] -> self.env.unwrapped.state"
    },
    ("draw_noise", loops.test_noise_comes_from_its_seeds): {
        "one generator for all": "np.random.default_rng(seed).standard_normal(size, np.float32) for seed in seeds -> "
        "rng.standard_normal(size, np.float32) for rng in [np.random.default_rng(seeds[0])] * len(seeds)",
        "the process's generator": "np.random.default_rng(seed).standard_normal(size, np.float32) -> "
        "np.random.standard_normal(size).astype(np.float32)",
    },
    ("draw_seeds", loops.test_seeds_differ): {
        "the same in each generation": "[args.seed, generation] -> [args.seed]",
        "the same for each seed": "[args.seed, generation] -> [generation]",
        "one state for all pairs": "seeds[pairs:].reshape(-1, pairs) -> seeds[:1].repeat(3 * pairs).reshape(-1, pairs)",
    },
    ("draw_action_noise", loops.test_action_noise): {
        "no temperature": "args.action_noise * noise -> noise",
        "normal for logits": "rng.gumbel(size=shape) if policy.discrete else rng -> rng",
    },
    ("exchange", loops.test_an_error_in_one_process_ends_all): {
        "the end of another unheard": "if has_ended: -> if False:"
    },
}


@pytest.mark.parametrize("where, check, change", **by_name(MISTAKES))
def test_mistake_is_caught(script, where, check, change):
    """Fails if a known mistake passes the check that is there for it, or if the script does not pass this check."""
    old, new = change.split(" -> ")
    assert passes(check, script)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check(mutant(script, where, old, new))
