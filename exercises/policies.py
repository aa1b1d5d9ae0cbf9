"""Exercises of weeks 6 to 8: returns, advantages, PPO's losses, distributions."""

import math

import numpy as np
import probes  # noqa: F401  (registers its environments)
from mechanism import exercise, refuses, slopes, tensor

CARTPOLE = {"env_id": "CartPole-v1", "total_timesteps": 100_000, "num_envs": 32, "num_steps": 64, "num_minibatches": 8,
            "learning_rate": 2e-3, "gamma": 0.98, "gae_lambda": 0.9, "ent_coef": 0.0, "seed": 1}  # fmt: skip


def columns(numbers):
    """{name: numbers of one environment} as tensors (T, 1)."""
    return {name: tensor(column)[:, None] for name, column in numbers.items()}


def beside(first, second):
    """Two environments side by side: tensors (T, 2)."""
    import torch

    return {name: torch.cat([first[name], second[name]], 1) for name in first}


def ends(terminated=(), truncated=(), rows=3):
    """The two flags (rows, 1) of one environment, set in these rows."""
    flags = {"terminated": terminated, "truncated": truncated}
    return {name: tensor(np.array([[t in where] for t in range(rows)])) for name, where in flags.items()}


def random_rollout(rng, *names):
    """Tensors (T, N) of these names, with both flags; any row may have ended, in one way or in both."""
    shape = rng.integers(1, 7), rng.integers(1, 5)
    given = {name: tensor(3 * rng.normal(size=shape)) for name in names}
    return given | {name: tensor(rng.random(shape) < 0.35) for name in ("terminated", "truncated")}


# The changes that several of the functions below have in common, as prefixes to a line.
EARLY = "terminated, truncated = terminated.roll(-1, 0), truncated.roll(-1, 0); "
LATE = "terminated, truncated = terminated.roll(1, 0), truncated.roll(1, 0); "
ALL_END = "terminated, truncated = terminated | terminated.any(1, True), truncated | truncated.any(1, True); "
LAST = "terminated, truncated = terminated.clone(), truncated.clone(); terminated[-1] = truncated[-1] = False; "


def returns_of(*given):
    """compute_returns of three steps with rewards 1, 2, 3, next values 10, 20, 8 and gamma 0.5 in each environment."""

    def call(m):
        steps = [columns({"rewards": [1, 2, 3], "next_values": [10, 20, 8]}) | ends(*flags) for flags in given]
        return m.compute_returns(**(steps[0] if len(steps) == 1 else beside(*steps)), gamma=0.5)

    return call


exercise(
    "returns",
    topic="discounted returns, backwards in time",
    cut="ppo.py: compute_returns",
    course="week 6, 30 minutes",
    task="write the discounted returns R_t = r_t + gamma R_{t+1}, from the last row back to the first. All tensors are "
    "(T, N): time, environments; terminated and truncated hold booleans. next_values[t] is the value of the state that "
    "step t led to. Where a step terminated, nothing follows it; where it was truncated, and after the last row, that "
    "value stands for all that follows.",
    cases={
        "rewards 1, 2, 3, next values 10, 20, 8, gamma 0.5, no end "
        "| the order of the loop, what it begins with, and what it collects": returns_of(()),
        "the same, but row 1 terminated | what follows a row that terminated, and which row that is": returns_of(
            ([1],)
        ),
        "the same, but row 1 was truncated | what follows a row that was truncated": returns_of(([], [1])),
        "the same, but row 1 terminated and was truncated at once: terminated wins "
        "| rows where both flags are set": returns_of(([1], [1])),
        "the same, but the last row terminated | what follows the last row: it may have ended": returns_of(([2],)),
        "two environments with the same numbers: row 1 terminated in the first, was truncated in the second "
        "| what the flags of a row are: a boolean for each environment, not one": returns_of(([1],), ([], [1])),
    },
    random=lambda m, rng: m.compute_returns(**random_rollout(rng, "rewards", "next_values"), gamma=rng.random()),
    mistakes={
        "returning the results in the order in which they were computed, last one first": "return returns -> "
        "return returns.flip(0)",
        "beginning at 0: what follows the last row is worth its next value": "= next_values[-1] -> "
        "= 0 * next_values[-1]",
        "going forwards in time": "reversed(range(len(rewards))) -> range(len(rewards))",
        "forgetting gamma": "gamma * next_return -> next_return",
        "bootstrapping in every row: 1 + 0.5 x 10 and so on are one-step targets": "torch.where(ends[t], "
        "next_values[t], next_return) -> next_values[t]",
        "not cutting the sum where an episode ends": "ends = terminated | truncated -> ends = terminated & False",
        "adding the next value although the episode terminated": "* ~terminated -> * 1",
        "reading the flags one row too early, as if they belonged to the row before": "next_values = next_values -> "
        f"{EARLY}next_values = next_values",
        "reading the flags one row too late": f"next_values = next_values -> {LATE}next_values = next_values",
        "treating truncation as death: the clock was stopped, what would have come is worth the next value": ""
        "* ~terminated -> * ~(terminated | truncated)",
        "not cutting the sum where an episode was cut off": "ends = terminated | truncated -> ends = terminated",
        "letting truncation win where both are set": "* ~terminated -> * ~(terminated & ~truncated)",
        "letting what ends in one environment end in all": f"next_values = next_values -> "
        f"{ALL_END}next_values = next_values",
        "ignoring how the last row ended": f"next_values = next_values -> {LAST}next_values = next_values",
        "adding the next value twice where the last row was truncated": "next_return = next_values[-1] -> "
        "next_return = next_values[-1]; rewards = rewards.clone(); "
        "rewards[-1] += gamma * next_values[-1] * (truncated[-1] & ~terminated[-1])",
    },
    learn=(CARTPOLE | {"estimator": "vanilla"}, 200.0),
)

STEPS = {"rewards": [1, 3, 6], "values": [2, 4, 6], "next_values": [4, 6, 8]}
OTHERS = {"rewards": [2, 1, 5], "values": [1, 2, 3], "next_values": [2, 3, 6]}
GAE = ("rewards", "values", "next_values")


def gae_of(*flags, two=False):
    """(advantages, returns) of three steps; gamma 0.5, lambda 0.8. With `two`, of a second environment beside it."""

    def call(m):
        steps = columns(STEPS) | ends(*flags)
        if two:
            steps = beside(steps, columns(OTHERS) | ends([], [1]))
        return m.compute_gae(**steps, gamma=0.5, gae_lambda=0.8)

    return call


GAE_ROWS = "rewards 1, 3, 6, values 2, 4, 6, next values 4, 6, 8, gamma 0.5, lambda 0.8: (advantages, returns)"
exercise(
    "gae",
    topic="generalised advantage estimation",
    cut="ppo.py: compute_gae",
    course="week 6, 45 minutes",
    task="write GAE: its recursion runs backwards in time, and begins with an advantage of 0 after the last row. All "
    "tensors are (T, N): time, environments; next_values[t] is the value of the state that step t led to. A step that "
    "terminated has no future: its next value counts for nothing. One that was truncated has one. Both cut the sum "
    "over t. The returns are advantages + values.",
    cases={
        f"{GAE_ROWS}; no end | eqs. 11 and 16 in the docstring": gae_of(),
        f"{GAE_ROWS}; row 1 terminated "
        "| what a terminated step does to its delta, and what it does to the decay": gae_of([1]),
        f"{GAE_ROWS}; row 1 was truncated | where truncated must count, and where it must not": gae_of([], [1]),
        f"{GAE_ROWS}; row 1 terminated and was truncated at once: terminated wins "
        "| rows where both flags are set": gae_of([1], [1]),
        f"{GAE_ROWS}; the last row terminated | how the last row ended: that counts as well": gae_of([2]),
        f"{GAE_ROWS}; row 1 terminated. A second environment: rewards 2, 1, 5, values 1, 2, 3, next values 2, "
        "3, 6; row 1 was truncated "
        "| what the second index of a tensor (T, N) stands for": gae_of([1], two=True),
    },
    random=lambda m, rng: m.compute_gae(**random_rollout(rng, *GAE), gamma=rng.random(), gae_lambda=rng.random()),
    mistakes={
        "forgetting lambda: the sum decays by gamma lambda": "gamma * gae_lambda * -> gamma *",
        "forgetting gamma: the sum decays by gamma lambda": "gamma * gae_lambda * -> gae_lambda *",
        "stopping at the temporal differences: that is lambda = 0": "gamma * gae_lambda * -> 0 *",
        "forgetting to subtract the values": "* ~terminated - values -> * ~terminated",
        "forgetting to discount the next value": "rewards + gamma * next_values -> rewards + next_values",
        "returning something else than advantages + values as returns": "advantages + values -> rewards + values",
        "not looking at the ends of episodes": (
            "next_values * ~terminated -> next_values",
            "~(terminated | truncated) -> ~(terminated & False)",
        ),
        "letting the sum run on into the next episode: the trace must be cut": "~(terminated | truncated) -> "
        "~truncated",
        "bootstrapping from the value of a state after termination": "next_values * ~terminated -> next_values",
        "reading the flags one row too early, as if they belonged to the row before (done and next_done exchanged)": ""
        f"deltas = rewards -> {EARLY}deltas = rewards",
        "reading the flags one row too late (done and next_done exchanged)": f"deltas = rewards -> "
        f"{LATE}deltas = rewards",
        "treating truncation as death: the clock was stopped, the future is worth the next value": ""
        "next_values * ~terminated -> next_values * ~(terminated | truncated)",
        "letting the sum run on after a truncation, into the next episode": "~(terminated | truncated) -> ~terminated",
        "letting truncation win where both are set": "next_values * ~terminated -> "
        "next_values * ~(terminated & ~truncated)",
        "letting what ends in one environment end in all": f"deltas = rewards -> {ALL_END}deltas = rewards",
        "mixing the environments: each has an advantage of its own": "next_advantage = advantages[t] -> "
        "next_advantage = advantages[t] = advantages[t].mean()",
        "ignoring how the last row ended": f"deltas = rewards -> {LAST}deltas = rewards",
    },
    learn=(CARTPOLE, 200.0),
)

# ------------------------------------------------------------------------------------------------------- PPO's losses


def loss_and_slope(loss, names, *rows):
    """For each row of arguments: (loss of a batch of this row alone, its derivative by the first argument)."""

    def call(m):
        return [with_slope(m, loss, names, [[number] for number in row[:-1]], row[-1]) for row in rows]

    return call


def with_slope(m, loss, names, batches, clip_coef):
    """(a loss of these batches, its derivatives by the first of them)."""
    given = {name: tensor(batch) for name, batch in zip(names.split(), batches)}
    x = given[names.split()[0]].requires_grad_()
    value = getattr(m, loss)(**given, clip_coef=clip_coef)
    return value, slopes(value, x)[0]


def random_loss(loss, names):
    """The loss of random batches and its derivatives."""

    def call(m, rng):
        batches = rng.normal(size=(len(names.split()), rng.integers(1, 7))).tolist()
        return with_slope(m, loss, names, batches, rng.uniform(0.05, 1.0))

    return call


def surrogates(*rows):
    """(loss, its derivative by log r) of each row (r, advantage) alone, epsilon 0.2."""
    return loss_and_slope("policy_loss", "log_ratios advantages", *[(math.log(r), a, 0.2) for r, a in rows])


PLAIN, CLIPPED = "ratios * advantages", "clipped * advantages"
exercise(
    "clip",
    topic="PPO's clipped surrogate objective",
    cut="ppo.py: policy_loss",
    course="week 7, 30 minutes",
    task="write the loss: the objective, negated, for a minimum is what gradient descent looks for. You get the "
    "logarithm of the ratio r = pi / pi_old and the advantage of each row (B,), and return the mean, a tensor.",
    cases={
        "four rows, one by one, epsilon 0.2: r = 1.5 and 0.5 with advantage 2, then with -2. (loss, its "
        "derivative by log r) of each "
        "| eq. 7, which stands at the top of the script, for A > 0 and for A < 0": surrogates(
            (1.5, 2.0), (0.5, 2.0), (1.5, -2.0), (0.5, -2.0)
        ),
        "two rows within the range, one by one: r = 1.1 with advantage 2, r = 0.9 with -2. (loss, its "
        "derivative) "
        "| what clipping does to a ratio that lies within the range: nothing": surrogates((1.1, 2.0), (0.9, -2.0)),
        "the rows r = 1.5 and r = 0.5 with advantage 2 in one batch, epsilon 0.2 "
        "| what happens last: the mean over the batch": lambda m: m.policy_loss(
            log_ratios=tensor([1.5, 0.5]).log(), advantages=tensor([2.0, 2.0]), clip_coef=0.2
        ),
    },
    random=random_loss("policy_loss", "log_ratios advantages"),
    mistakes={
        "returning a loss for each row: the mean is asked for": ".mean() -> ",
        "not negating it: this is the objective, not a loss": "-torch.min -> torch.min",
        "not clipping": f"torch.min({PLAIN}, {CLIPPED}) -> ({PLAIN})",
        "always taking the clipped term: the minimum keeps the way back open": f"torch.min({PLAIN}, {CLIPPED}) -> "
        f"({CLIPPED})",
        "taking the larger of both terms (a maximum inside, or a minimum of negated terms)": "torch.min -> torch.max",
        "taking log r for r": "log_ratios.exp() -> log_ratios",
        "losing the gradient on the way: a detach, or a number where a tensor is needed": "log_ratios.exp() -> "
        "log_ratios.exp().detach()",
        "keeping the gradient from the clipped term: within the range both terms have it": "ratios.clamp -> "
        "ratios.detach().clamp",
        "adding up over the batch instead of taking the mean": ".mean() -> .sum()",
        "taking the smaller of two means: the minimum is one of each row": f"({PLAIN}, {CLIPPED}).mean() -> "
        f"(({PLAIN}).mean(), ({CLIPPED}).mean())",
        "writing 0.2 where clip_coef belongs": "(1 - clip_coef, 1 + clip_coef) -> (0.8, 1.2)",
    },
    learn=(CARTPOLE, 200.0),
)

exercise(
    "value-clip",
    topic="the value loss, and clipping it",
    cut="ppo.py: value_loss",
    course="week 7, 30 minutes",
    task="write half the mean squared error between values and returns. With clip_coef, compare with the error of the "
    "value that has moved by at most clip_coef from the old one, and let the larger one of both count in each row. All "
    "tensors are (B,); return the mean, a tensor.",
    cases={
        "values 1, 3, 0, returns 2, 5, 3, no clipping | the plain mean squared error": lambda m: m.value_loss(
            values=tensor([1.0, 3.0, 0.0]), old_values=tensor([9.0, 9.0, 9.0]), returns=tensor([2.0, 5.0, 3.0])
        ),
        "two rows, one by one, old value 2, return 5, clip_coef 0.5: values 3 and 0. (loss, its derivative by "
        "the value) of each "
        "| clipped = old value + (value - old value), the bracket held within ± clip_coef": loss_and_slope(
            "value_loss", "values old_values returns", (3.0, 2.0, 5.0, 0.5), (0.0, 2.0, 5.0, 0.5)
        ),
    },
    random=random_loss("value_loss", "values old_values returns"),
    mistakes={
        "forgetting the half": "0.5 * errors -> errors",
        "adding up over the batch instead of taking the mean": "errors.mean() -> errors.sum()",
        "comparing the returns with the old values": "errors = (values -> errors = (old_values",
        "taking the smaller error": "torch.max( -> torch.min(",
        "always taking the clipped value": "torch.max(errors, (clipped - returns) ** 2) -> (clipped - returns) ** 2",
        "not clipping": "if clip_coef is not None -> if False",
        "clipping the value itself instead of how far it has moved": "old_values + (values - old_values).clamp -> "
        "values.clamp",
        "letting the value move by a share of the old one: clip_coef is a distance": "old_values + (values - "
        "old_values).clamp(-clip_coef, clip_coef) -> values.clamp(old_values * (1 - clip_coef), old_values * "
        "(1 + clip_coef))",
        "writing 0.5 where clip_coef belongs": ".clamp(-clip_coef, clip_coef) -> .clamp(-0.5, 0.5)",
        "taking the larger of two means: the maximum is one of each row": "(errors, (clipped - returns) ** 2) -> "
        "(errors.mean(), ((clipped - returns) ** 2).mean())",
    },
    learn=(CARTPOLE | {"clip_vloss": True, "clip_vloss_coef": 10.0}, 200.0),
)

# ------------------------------------------------------------------------------------------------------------ V-trace


def vtrace_of(*flags, rho_clip=1.0, played=None, two=False):
    """(advantages, targets) of three steps with ratios 2, 1/2 and 1, gamma 0.5; if only some are played, of these."""

    def call(m):
        steps = columns(STEPS | {"log_ratios": [math.log(2), math.log(0.5), 0]}) | ends(*flags)
        if two:
            ratios = {"log_ratios": [math.log(0.5), math.log(2), math.log(0.5)]}
            steps = beside(steps, columns(OTHERS | ratios) | ends([], [1]))
        given = {"gamma": 0.5, "rho_clip": rho_clip, "c_clip": 1.0}
        if played is None:
            return m.compute_vtrace(**steps, **given)
        return [x[played] for x in m.compute_vtrace(**steps, **given, played=ends(played)["terminated"])]

    return call


def random_vtrace(m, rng):
    given = random_rollout(rng, *GAE, "log_ratios")
    given |= {"gamma": rng.random(), "rho_clip": rng.uniform(0.3, 3), "c_clip": rng.uniform(0.3, 3)}
    if rng.random() < 0.5:
        return m.compute_vtrace(**given)
    played = tensor(rng.random(given["rewards"].shape) < 0.7)
    advantages, targets = m.compute_vtrace(**given, played=played)
    return (advantages[played], targets[played]) if played.sum() > 1 else targets[played]


VTRACE_ROWS = "rewards 1, 3, 6, values 2, 4, 6, next values 4, 6, 8, pi/mu 2, 0.5, 1, gamma 0.5: (advantages, targets)"
exercise(
    "vtrace",
    topic="V-trace: learning from actions of an older policy",
    cut="ppo.py: compute_vtrace",
    course="week 8, 75 minutes",
    task="write V-trace. The recursion of the docstring is one for the corrections v_t - V_t; it runs backwards in "
    "time, as that of compute_gae does, and ends are treated as there. All tensors are (T, N); next_values[t] is the "
    "value of the state that step t led to. Where the episode or the rollout is cut off, v_{t+1} is the next value "
    "itself. `played`, if it is given, is a mask (T, N) of booleans: normalize r + gamma v_{t+1} - V_t over its rows, "
    "and weigh by rho after that. What you return for the other rows is not looked at.",
    cases={
        f"{VTRACE_ROWS}; no end, both bounds 1 "
        "| remark 1 and section 4.2 of arXiv 1802.01561; the docstring has both formulas": vtrace_of(),
        f"{VTRACE_ROWS}; rho_clip 2, c_clip 1 | which bound belongs to which ratio": vtrace_of(rho_clip=2.0),
        f"{VTRACE_ROWS}; both bounds 1, row 1 terminated "
        "| what a terminated step does to its delta, and what it does to the decay": vtrace_of([1]),
        f"{VTRACE_ROWS}; both bounds 1, row 1 was truncated "
        "| where truncated must count, and where it must not": vtrace_of([], [1]),
        f"{VTRACE_ROWS}; both bounds 1, row 1 terminated. A second environment: rewards 2, 1, 5, values 1, 2, "
        "3, next values 2, 3, 6, pi/mu 0.5, 2, 0.5; row 1 was truncated "
        "| what the second index of a tensor (T, N) stands for": vtrace_of([1], two=True),
        f"{VTRACE_ROWS} of rows 0 and 2; rho_clip 2, c_clip 1, row 0 terminated, `played` has the rows 0 and 2 "
        "| the last lines of the docstring": vtrace_of([0], rho_clip=2.0, played=[0, 2]),
    },
    random=random_vtrace,
    draws=30,
    mistakes={
        "not bounding the ratios": (".clamp(max=rho_clip) -> ", ".clamp(max=c_clip) -> "),
        "ignoring the ratios": ("rho = log_ratios -> rho = (0 * log_ratios)", "c = log_ratios -> c = (0 * log_ratios)"),
        "leaving c out of the recursion": "gamma * c[t] * -> gamma *",
        "leaving rho out of the recursion": "rho[t] * deltas[t] -> deltas[t]",
        "leaving rho out of the advantages": "return rho * advantages -> return advantages",
        "taking V(s_{t+1}) instead of v_{t+1} in the advantages": "= deltas[t] + gamma * next_correction -> "
        "= deltas[t]",
        "returning the corrections v - V as targets": "= values[t] + correction -> = correction",
        "exchanging rho_clip and c_clip": "rho = log_ratios -> rho_clip, c_clip = c_clip, rho_clip; rho = log_ratios",
        "taking rho_clip for both bounds": "max=c_clip -> max=rho_clip",
        "taking c_clip for both bounds": "max=rho_clip -> max=c_clip",
        "writing 1 where c_clip belongs": "max=c_clip -> max=1.0",
        "not looking at the ends of episodes": (
            "next_values * ~terminated -> next_values * 1",
            "~(terminated | truncated) -> ~(terminated & False)",
        ),
        "bootstrapping from the value of a state after termination": "* ~terminated -> * 1",
        "carrying corrections back over the end of an episode": "~(terminated | truncated) -> ~truncated",
        "treating truncation as death": "next_values * ~terminated -> next_values * ~(terminated | truncated)",
        "carrying corrections back over a truncation": "~(terminated | truncated) -> ~terminated",
        "adding the next row's correction to the next value where the episode was cut off": "= deltas[t] + gamma * "
        "next_correction -> = deltas[t] + gamma * correction * ~terminated[t]",
        "letting what ends in one environment end in all": f"next_values = next_values -> "
        f"{ALL_END}next_values = next_values",
        "mixing the environments: each has corrections of its own": "return rho * advantages -> "
        "return 0 * rho + (rho * advantages).mean(1, keepdim=True)",
        "not normalising": "if played is not None -> if False",
        "weighing by rho before you normalise": "normalize(advantages[played]) -> "
        "normalize((rho * advantages)[played]); rho = rho**0",
        "normalising over all rows, also those that are not played": "normalize(advantages[played]) -> "
        "normalize(advantages)[played]",
        "ignoring how the last row ended": f"next_values = next_values -> {LAST}next_values = next_values",
    },
    learn=(CARTPOLE | {"estimator": "vtrace"}, 200.0),
)

# ------------------------------------------------------------------------------------------------------ distributions

PENDULUM_BY_PPO = {"env_id": "Pendulum-v1", "num_envs": 16, "num_steps": 64, "num_minibatches": 8, "update_epochs": 10,
                   "learning_rate": 1e-3, "gamma": 0.9, "ent_coef": 0.0, "total_timesteps": 100_000,
                   "seed": 1}  # fmt: skip


def gaussian_of(mean, actions, log_std):
    """(log-probs, entropies) of lists."""
    return lambda m: m.gaussian(mean=tensor(mean), actions=tensor(actions), log_std=tensor(log_std))


def gaussian_slopes(m, mean=((1.0,),), actions=((3.0,),), log_std=(0.0,)):
    """Slopes of the log-prob by mean and by log_std, of the entropy by log_std."""
    mean, log_std = tensor(mean).requires_grad_(), tensor(log_std).requires_grad_()
    log_probs, entropies = m.gaussian(mean=mean, actions=tensor(actions), log_std=log_std)
    return [*slopes(log_probs, mean, log_std), *slopes(entropies, log_std)]


def random_gaussian(m, rng):
    rows, dimensions = rng.integers(1, 5, 2)
    given = {"mean": rng.normal(size=(rows, dimensions)), "actions": rng.normal(size=(rows, dimensions))}
    given["log_std"] = rng.normal(size=dimensions)
    return *gaussian_of(**given)(m), gaussian_slopes(m, **given)


exercise(
    "log-probs",
    topic="continuous actions: log-probability and entropy",
    cut="ppo.py: gaussian",
    course="week 8, 25 minutes",
    task="write log-density and entropy of a Gaussian whose dimensions are independent. mean and actions are (B, D), "
    "log_std, the logarithm of the standard deviation, is (D,), the same for all rows. Return two tensors (B,): also "
    "the entropies, although they are all alike. Gradients have to flow. math.pi and math.e are at hand; write it out "
    "instead of calling torch.distributions.",
    cases={
        "mean 1, action 3, log_std 0: (log-probs, entropies) "
        "| log of exp(-z^2 / 2) / (sigma sqrt(2 pi)), and log(sigma sqrt(2 pi e))": gaussian_of(
            [[1.0]], [[3.0]], [0.0]
        ),
        "two dimensions, deviations 2 and 1, means 0, 0 and 1, 0, actions 4, 1 and 1, 0: (log-probs, "
        "entropies) "
        "| the sum over dimensions": gaussian_of(
            [[0.0, 0.0], [1.0, 0.0]], [[4.0, 1.0], [1.0, 0.0]], [math.log(2), 0.0]
        ),
        "mean 1, action 3, log_std 0: slopes of the log-prob by mean and by log_std, of the entropy by log_std "
        "| what turns a tensor into a number: .item(), .detach(), NumPy": gaussian_slopes,
    },
    random=random_gaussian,
    mistakes={
        "forgetting 1 / sqrt(2 pi)": " - 0.5 * math.log(2 * math.pi)\n -> \n",
        "the wrong sign: a larger distance from the mean is less likely": "log_density.sum(1), -> -log_density.sum(1),",
        "forgetting the half before the square": "-0.5 * z**2 -> -(z**2)",
        "returning the density, not its logarithm": "log_density.sum(1), -> log_density.sum(1).exp(),",
        "taking log_std for the deviation itself": "/ log_std.exp() -> / log_std",
        "forgetting e in the entropy": " * math.e -> ",
        "dividing by the variance instead of the deviation": "/ log_std.exp() -> / log_std.exp() ** 2",
        "forgetting to take away log_std": "z**2 - log_std -> z**2",
        "taking the mean over dimensions: probabilities multiply, so logarithms add up": "log_density.sum(1), -> "
        "log_density.mean(1),",
        "forgetting log_std in the entropy": "entropy = log_std -> entropy = 0 * log_std",
        "taking the negated log-prob of this action for the entropy": "entropy.sum().expand(len(mean)) -> "
        "-log_density.sum(1)",
        "cutting gradients off": "z = (actions - mean) -> log_std = log_std.detach(); z = (actions - mean.detach())",
    },
    learn=(PENDULUM_BY_PPO, -700.0),
)


def squashed_of(mean, log_std, noise, half_range=(1.0,)):
    """(actions, log-densities) of lists, with the slopes of the log-densities by the mean."""

    def call(m):
        at = tensor(mean).requires_grad_()
        given = {"log_std": tensor(log_std), "noise": tensor(noise), "half_range": tensor(half_range)}
        actions, log_densities = m.squashed_gaussian(mean=at, **given)
        return actions, log_densities, slopes(log_densities, at)[0]

    return call


def random_squashed(m, rng):
    rows, dimensions = rng.integers(1, 5, 2)
    mean, log_std, noise = rng.normal(size=(3, rows, dimensions))
    return squashed_of(2 * mean, log_std, noise, rng.uniform(0.5, 3, dimensions))(m)


CORRECTION = "2 * (math.log(2) - u - nn.functional.softplus(-2 * u))"
SQUASHED = "(actions, log-densities, slopes of these by the mean)"
exercise(
    "squashed",
    topic="actions through tanh, and their log-density",
    cut="sac.py: squashed_gaussian",
    course="week 8, 35 minutes",
    task="write the actions tanh(u), u = mean + sigma noise, and the log-densities of what the environment plays, the "
    "middle of its bounds + half_range tanh(u). mean, log_std and noise are (B, D), half_range is (D,). The logarithm "
    "of the slope of tanh has to be right where tanh(u) is rounded to 1 as well: the docstring has a form that is; "
    "nn.functional.softplus(x) is log(1 + exp(x)). Write the Gaussian's density of u out, its logarithm rather. "
    "Gradients have to flow.",
    cases={
        f"log_std 0, half_range 1: mean 0, noise 0, then mean 1, noise 0, then mean 0, noise 1. {SQUASHED} "
        "| the sign of the correction, and where the Gaussian is looked up": squashed_of(
            [[0.0], [1.0], [0.0]], [[0.0]] * 3, [[0.0], [0.0], [1.0]]
        ),
        f"means 20 and -50, log_std 0, noise 0, half_range 1. {SQUASHED} "
        "| the second formula in the docstring": squashed_of([[20.0], [-50.0]], [[0.0]] * 2, [[0.0]] * 2),
        f"means (0, 1) and (-1, 0), deviations 1 and 2, noise (1, 0) and (0, 1), half_range (1, 2). {SQUASHED} "
        "| the sum over dimensions, of all terms; half_range: a density over a longer stretch is lower": squashed_of(
            [[0.0, 1.0], [-1.0, 0.0]], [[0.0, math.log(2)]] * 2, [[1.0, 0.0], [0.0, 1.0]], [1.0, 2.0]
        ),
    },
    random=random_squashed,
    mistakes={
        "taking the logarithm of 0 where tanh is rounded to 1": f"{CORRECTION} -> (1 - u.tanh() ** 2).log()",
        "adding a small number, which is far too much where the slope is smaller": f"{CORRECTION} -> "
        "(1 - u.tanh() ** 2 + 1e-6).log()",
        "forgetting the logarithm of the slope": f"{CORRECTION} -> (1 - u.tanh() ** 2)",
        "forgetting the square": f"{CORRECTION} -> (1 - u.tanh()).log()",
        "forgetting the factor 2": "2 * (math.log(2) - u -> (math.log(2) - u",
        "raising e to a large power: softplus does not overflow": "nn.functional.softplus(-2 * u) -> "
        "(1 + (-2 * u).exp()).log()",
        "forgetting the correction": "(log_density - log_slope) -> log_density",
        "correcting in the wrong direction: what is pressed together gets denser": "log_density - log_slope -> "
        "log_density + log_slope",
        "asking for the density of tanh(u) instead of u": "-0.5 * noise**2 -> "
        "-0.5 * ((u.tanh() - mean) / log_std.exp()) ** 2",
        "forgetting half_range": "half_range.log() + 2 -> 2",
        "taking half_range for its logarithm": "half_range.log() + 2 -> half_range + 2",
        "taking the mean over dimensions": ".sum(1) -> .mean(1)",
        "taking log_std for the deviation": "log_std.exp() * noise -> log_std * noise",
        "forgetting to take away log_std": "noise**2 - log_std -> noise**2",
        "returning u, not tanh(u)": "return u.tanh(), -> return u,",
        "cutting gradients off": "u = mean + log_std -> u = mean.detach() + log_std",
    },
)

TAXI = {"env_id": "Taxi-v4", "total_timesteps": 150_000, "num_envs": 16, "learning_rate": 2e-3, "gamma": 0.98,
        "ent_coef": 0.01, "seed": 1}  # fmt: skip
ODDS = [0.0, math.log(3.0), 5.0]  # with the mask below: probabilities 1/4, 3/4, 0
DOORS = [True, True, False]


def masked(m, logits=(ODDS,), mask=(DOORS,), **given):
    """MaskedCategorical of these rows."""
    return m.MaskedCategorical(logits=tensor(logits), mask=tensor(np.array(mask)), **given)


def masked_slopes(m, logits, mask, actions, **given):
    """The derivatives of the log-probabilities of actions, and of the entropies, by the logits."""
    x = tensor(logits).requires_grad_()
    pi = m.MaskedCategorical(logits=x, mask=tensor(np.array(mask)), **given)
    return [*slopes(pi.log_prob(actions=tensor(np.array(actions))), x), *slopes(pi.entropy(), x)]


def two_factors(m):
    """(log-probability of the actions 1 and 0, entropy) of two factors with logits 0, log 3 and 0, 0."""
    pi = masked(m, [[0.0, math.log(3.0), 0.0, 0.0]], [[True] * 4], sizes=[2, 2])
    return pi.log_prob(actions=tensor(np.array([[1, 0]]))), pi.entropy()


def random_masked(m, rng):
    """Up to three factors, with valid actions; or one factor, given without `sizes`."""
    sizes, rows = rng.integers(2, 5, rng.integers(1, 4)).tolist(), int(rng.integers(1, 5))
    logits, mask = 2 * rng.normal(size=(rows, sum(sizes))), rng.random((rows, sum(sizes))) < 0.6
    actions = np.stack([rng.integers(size, size=rows) for size in sizes], 1)
    for first, action in zip(np.cumsum([0, *sizes]), actions.T):
        mask[np.arange(rows), first + action] = True
    given = {"sizes": sizes}
    if len(sizes) == 1:
        given, actions = {}, actions[:, 0]
    pi = masked(m, logits, mask, **given)
    results = pi.log_prob(actions=tensor(actions)), pi.entropy(), pi.mode()
    return *results, *masked_slopes(m, logits, mask, actions, **given)


exercise(
    "masked",
    topic="a categorical distribution that knows which actions are valid",
    cut="ppo_masked.py: MaskedCategorical.__init__, MaskedCategorical.log_prob, MaskedCategorical.entropy",
    course="week 8, 60 minutes",
    task="write the distribution. __init__ sets self.single (whether there is one factor, because no `sizes` were "
    "given) and self.log_probs (a list with the log-probabilities (…, size) of each factor), which sample and mode "
    "read; check_masks(array, sizes) raises the error for a row of an array (B, sum of sizes) without a valid action. "
    "The probability of an invalid action is 0, its logit gets no gradient, and the entropy is a number all the same: "
    "0 log 0 counts as 0, in its gradient as well.",
    cases={
        "logits 0, log 3, 5, of which the last is invalid: the probability of each action "
        "| what happens to the logits before the softmax": lambda m: (
            masked(m, [ODDS] * 3, [DOORS] * 3).log_prob(actions=tensor(np.arange(3))).exp()
        ),
        "the same distribution: its entropy | the entropy's sum, term by term": lambda m: masked(m).entropy(),
        "the derivatives of the log-probability of action 1, and of the entropy, by the logits "
        "| what an invalid logit has to do with the result: nothing": lambda m: masked_slopes(m, [ODDS], [DOORS], [1]),
        "two factors with logits 0, log 3 and 0, 0, all valid: (log-probability of 1 and 0 together, entropy) "
        "| how the factors are split, and added up": two_factors,
        "a mask without any valid action: is it refused with a ValueError? | check_masks": lambda m: refuses(
            lambda: masked(m, mask=[[False] * 3])
        ),
    },
    random=random_masked,
    mistakes={
        "ignoring the mask": "logits = torch.where(mask, logits, -torch.inf) -> pass",
        "masking probabilities without renormalising them: they have to add up to 1": (
            "logits = torch.where(mask, logits, -torch.inf) -> pass",
            "[factor.log_softmax(-1) for factor in logits.split(sizes, -1)] -> [(factor.softmax(-1) * valid).log() "
            "for factor, valid in zip(logits.split(sizes, -1), mask.split(sizes, -1))]",
        ),
        "setting logits of invalid actions to 0, which leaves them a probability": "logits, -torch.inf) -> "
        "logits, 0.0)",
        "taking the mask the wrong way round: True is valid": "torch.where(mask, logits -> torch.where(~mask, logits",
        "adding 0 x log 0, which is NaN with logits of minus infinity": "torch.where(mask, log_probs, 0.0) -> "
        "log_probs",
        "ignoring the mask in the entropy": (
            "logits = torch.where -> self.raw = logits.split(sizes, -1); logits = torch.where",
            "zip(self.log_probs, self.masks): -> zip(self.raw, self.masks):\n            "
            "log_probs, mask = log_probs.log_softmax(-1), mask | True",
        ),
        "forgetting the minus sign": "entropy = entropy - -> entropy = entropy +",
        "taking logarithms to the base 2: nats are asked for": "* finite_log_probs -> * finite_log_probs / math.log(2)",
        "one softmax over all factors: each has its own": "[factor.log_softmax(-1) for factor in "
        "logits.split(sizes, -1)] -> list(logits.log_softmax(-1).split(sizes, -1))",
        "losing a factor": "log_prob = log_prob + log_probs -> log_prob = log_probs",
        "losing a factor of the entropy": "entropy = entropy - (log_probs -> entropy = -(log_probs",
        "letting a state pass in which nothing can be done": "check_masks(mask.reshape(-1, sum(sizes)).cpu().numpy(), "
        "sizes) -> pass",
    },
    learn=(TAXI, -60.0),
)
