"""Exercises of weeks 6 to 8: returns, advantages, PPO's losses, distributions."""

import math

import numpy as np
from inputs import FLAGS, ROLLOUT, normal, refuses, rollout, share, slopes, tensor, tensors, together, uniform
from mechanism import exercise

CARTPOLE = {"env_id": "CartPole-v1", "total_timesteps": 100_000, "num_envs": 32, "num_steps": 64, "num_minibatches": 8,
            "learning_rate": 2e-3, "gamma": 0.98, "gae_lambda": 0.9, "ent_coef": 0.0, "seed": 1, "update_epochs": 4,
            "anneal_lr": True, "normalize_obs": False, "normalize_reward": False}  # fmt: skip


DIED, CUT, BOTH = ([1], []), ([], [1]), ([1], [1])  # what happened in row 1
ENDS = {
    "reading the flags one row too early, as if they belonged to the row before": "terminated, truncated = "
    "terminated.roll(-1, 0), truncated.roll(-1, 0)",
    "reading the flags one row too late": "terminated, truncated = terminated.roll(1, 0), truncated.roll(1, 0)",
    "letting what ends in one environment end in all": "terminated, truncated = "
    "terminated | terminated.any(1, True), truncated | truncated.any(1, True)",
    "ignoring how the last row ended": "terminated, truncated = terminated.clone(), truncated.clone(); "
    "terminated[-1] = truncated[-1] = False",
}


def before(line):
    """The mistakes of ENDS, each in front of a line of the original."""
    return {message: f"{line} -> {change}; {line}" for message, change in ENDS.items()}


def returns_of(*ends):
    """A case of three steps."""
    return tensors("compute_returns", **rollout({"rewards": [1, 2, 3], "next_values": [10, 20, 8]}, *ends), gamma=0.5)


exercise(
    "policy-gradient",
    course="week 6, 20 minutes, easy: the policy gradient as a loss",
    cut="reinforce.py: policy_gradient_loss",
    task="write the loss whose gradient, negated, is the policy gradient: torch differentiates the log-probabilities. "
    "log_probs and advantages are (B,); the advantages are numbers, nothing flows back through them. Return a mean.",
    cases={
        "one row with A = 2, then with A = -2. (loss, its slope by log pi) of each | S&B, eq. 13.11, and its sign": (
            together(
                tensors("policy_gradient_loss", by=["log_probs"], log_probs=[-0.5], advantages=[2.0]),
                tensors("policy_gradient_loss", by=["log_probs"], log_probs=[-0.5], advantages=[-2.0]),
            )
        ),
        "two rows | what happens last: the mean over the batch": tensors(
            "policy_gradient_loss", by=["log_probs"], log_probs=[-0.5, -1.0], advantages=[2.0, 4.0]
        ),
    },
    random=tensors("policy_gradient_loss", by=["log_probs"], log_probs=normal("B"), advantages=normal("B")),
    mistakes={
        "not negating it: this climbs down the hill": "return -(log -> return (log",
        "adding the rows up: the loss is their mean": ").mean() -> ).sum()",
        "taking probabilities for their logarithms": "(log_probs * -> (log_probs.exp() *",
        "leaving the advantages out": "log_probs * advantages -> log_probs",
        "losing the gradient on the way: a detach, or a number where a tensor is needed": "(log_probs * -> "
        "(log_probs.detach() *",
    },
    learn=({"env_id": "CartPole-v1", "learning_rate": 5e-3, "total_timesteps": 60_000, "seed": 1}, 100.0),
)

exercise(
    "returns",
    course="week 6, 30 minutes, medium: discounted returns, backwards in time",
    cut="ppo.py: compute_returns",
    task="write the discounted returns G_t = r_t + gamma G_{t+1}, from the last row back to the first. All tensors are "
    "(T, N): time, environments; terminated and truncated hold booleans. next_values[t] is the value of the state that "
    "step t led to. Where a step terminated, nothing follows it; where it was truncated, and after the last row, that "
    "value stands for all that follows.",
    cases={
        "no end | the order of the loop, what it begins with, and what it collects": returns_of(),
        "row 1 terminated | what follows a row that terminated, and which row that is": returns_of(DIED),
        "row 1 was truncated | what follows a row that was truncated": returns_of(CUT),
        "row 1 terminated and was truncated: terminated wins | rows where both flags are set": returns_of(BOTH),
    },
    random=tensors("compute_returns", rewards=normal("TN", 3.0), next_values=normal("TN", 3.0), **FLAGS, gamma=share),
    mistakes={
        "returning the results in the order in which they were computed, last one first": "return returns -> "
        "return returns.flip(0)",
        "beginning at 0: what follows the last row is worth its next value": "= next_values[-1] -> "
        "= 0 * next_values[-1]",
        "going forwards in time": "reversed(range(len(rewards))) -> range(len(rewards))",
        "forgetting gamma": "gamma * next_return -> next_return",
        "not cutting the sum where an episode ends": "ends = terminated | truncated -> ends = terminated & False",
        "adding the next value although the episode terminated": "* ~terminated -> * 1",
        "treating truncation as death: the clock was stopped, what would have come is worth the next value": ""
        "* ~terminated -> * ~(terminated | truncated)",
        "not cutting the sum where an episode was cut off": "ends = terminated | truncated -> ends = terminated",
        **before("next_values = next_values"),
        "adding the next value twice where the last row was truncated": "next_return = next_values[-1] -> "
        "next_return = next_values[-1]; rewards = rewards.clone(); "
        "rewards[-1] += gamma * next_values[-1] * (truncated[-1] & ~terminated[-1])",
    },
    learn=(CARTPOLE | {"estimator": "vanilla"}, 200.0),
)

STEPS = {"rewards": [1, 3, 6], "values": [2, 4, 6], "next_values": [4, 6, 8]}
GAE_MISTAKES = {
    "taking the value of the next row, which need not be where the step led to": ""
    "next_values * ~terminated -> torch.cat([values[1:], next_values[-1:]]) * ~terminated",
    "bootstrapping from the value of a state after termination": "next_values * ~terminated -> next_values * 1",
    "treating truncation as death: the clock was stopped, the future is worth the next value": ""
    "next_values * ~terminated -> next_values * ~(terminated | truncated)",
    "letting the sum run on into the next episode: the trace must be cut": "~(terminated | truncated) -> ~truncated",
    "letting the sum run on after a truncation, into the next episode": "~(terminated | truncated) -> ~terminated",
    "not looking at the ends of episodes": (
        "next_values * ~terminated -> next_values * 1",
        "~(terminated | truncated) -> ~(terminated & False)",
    ),
}


def gae_of(*ends):
    """A case of three steps."""
    return tensors("compute_gae", **rollout(STEPS, *ends), gamma=0.5, gae_lambda=0.8)


exercise(
    "gae",
    course="week 6, 45 minutes, medium: generalised advantage estimation",
    cut="ppo.py: compute_gae",
    task="write GAE: its recursion runs backwards in time, and begins with an advantage of 0 after the last row. All "
    "tensors are (T, N): time, environments; terminated and truncated hold booleans; next_values[t] is the value of "
    "the state that step t led to. A step that terminated has no future: its next value counts for nothing. A step "
    "that was truncated has a future. Both cut the sum over t. The returns are advantages + values.",
    cases={
        "no end | eqs. 11 and 16 in the docstring": gae_of(),
        "row 1 terminated | what a terminated step does to its delta, and what it does to the decay": gae_of(DIED),
        "row 1 was truncated | where truncated must count, and where it must not": gae_of(CUT),
        "one row 1 terminated, one was truncated | what the second index of a tensor (T, N) is": gae_of(DIED, CUT),
    },
    random=tensors("compute_gae", **ROLLOUT, **FLAGS, gamma=share, gae_lambda=share),
    mistakes={
        "forgetting lambda: the sum decays by gamma lambda": "gamma * gae_lambda * -> gamma *",
        "forgetting gamma: the sum decays by gamma lambda": "gamma * gae_lambda * -> gae_lambda *",
        "forgetting to subtract the values": "* ~terminated - values -> * ~terminated",
        "leaving the last row out: the loop begins a row too early | the range of the loop, at its upper end": (
            "torch.empty_like(rewards) -> torch.zeros_like(rewards)",
            "reversed(range(len(rewards))) -> reversed(range(len(rewards) - 1))",
        ),
        "leaving row 0 out: the loop stops a row early | the range of the loop, at its lower end": (
            "torch.empty_like(rewards) -> torch.zeros_like(rewards)",
            "reversed(range(len(rewards))) -> reversed(range(1, len(rewards)))",
        ),
        **GAE_MISTAKES,
        **before("deltas = rewards"),
    },
    learn=(CARTPOLE, 200.0),
)


def surrogate(r, advantage):
    """The loss of one row, epsilon 0.2, and its derivative by log r."""
    given = {"log_ratios": [math.log(r)], "advantages": [advantage], "clip_coef": 0.2}
    return tensors("policy_loss", by=["log_ratios"], **given)


PLAIN, CLIPPED = "ratios * advantages", "clipped * advantages"
exercise(
    "clip",
    course="week 7, 30 minutes, easy: PPO's clipped surrogate objective",
    cut="ppo.py: policy_loss",
    task="write the loss: the objective, negated, for a minimum is what gradient descent looks for. You get the "
    "logarithm of the ratio r = pi / pi_old and the advantage of each row (B,), and return the mean, a tensor.",
    cases={
        "one row, r = 1.5, then 0.5. (loss, its slope by log r) of each | eq. 7 for A > 0, at the top of the script": (
            together(surrogate(1.5, 2.0), surrogate(0.5, 2.0))
        ),
        "the same with A = -2 | eq. 7 for A < 0": together(surrogate(1.5, -2.0), surrogate(0.5, -2.0)),
        "r = 1.1, within the range | what clipping does to a ratio that lies within the range": surrogate(1.1, 2.0),
        "two rows | what happens last: the mean over the batch": tensors(
            "policy_loss", log_ratios=[math.log(1.5), math.log(0.5)], advantages=[2.0, 2.0], clip_coef=0.2
        ),
    },
    random=tensors(
        "policy_loss", by=["log_ratios"], log_ratios=normal("B"), advantages=normal("B"), clip_coef=uniform(0.05, 1)
    ),
    mistakes={
        "not negating it: this is the objective, not a loss": "-torch.min -> torch.min",
        "not clipping": f"torch.min({PLAIN}, {CLIPPED}) -> ({PLAIN})",
        "always taking the clipped term: the minimum keeps the way back open": f"torch.min({PLAIN}, {CLIPPED}) -> "
        f"({CLIPPED})",
        "taking the larger of both terms (a maximum inside, or a minimum of negated terms)": "torch.min -> torch.max",
        "losing the gradient on the way: a detach, or a number where a tensor is needed": "log_ratios.exp() -> "
        "log_ratios.exp().detach()",
        "taking the smaller of two means: the minimum is one of each row": f"({PLAIN}, {CLIPPED}).mean() -> "
        f"(({PLAIN}).mean(), ({CLIPPED}).mean())",
        "adding the rows up: the loss is their mean": ").mean() -> ).sum()",
        "writing 0.2 where clip_coef belongs": "(1 - clip_coef, 1 + clip_coef) -> (0.8, 1.2)",
    },
    learn=(CARTPOLE, 200.0),
)

VALUES = dict.fromkeys(("values", "old_values", "returns"), normal("B"))
exercise(
    "value-clip",
    course="week 7, 30 minutes, medium: the value loss, and clipping it",
    cut="ppo.py: value_loss",
    task="write half the mean squared error between values and returns. With clip_coef, compare with the error of the "
    "value that has moved by at most clip_coef from the old one, and let the larger one of both count in each row. All "
    "tensors are (B,); return the mean, a tensor.",
    cases={
        "no clipping | the plain mean squared error": tensors(
            "value_loss", values=[1.0, 3.0, 0.0], old_values=[9.0, 9.0, 9.0], returns=[2.0, 5.0, 3.0]
        ),
        "(loss, its derivative by the value) | clipped = old value + (value - old value), held within ± clip_coef": (
            tensors("value_loss", by=["values"], values=[3.0], old_values=[2.0], returns=[5.0], clip_coef=0.5)
        ),
    },
    random=tensors("value_loss", by=["values"], **VALUES, clip_coef=uniform(0.05, 1.0)),
    mistakes={
        "forgetting the half": "0.5 * errors -> errors",
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

CORRECTION = "2 * (math.log(2) - u - nn.functional.softplus(-2 * u))"
SQUASHED = "squashed_gaussian"
GAUSSIANS = {"mean": normal("BD", 2.0), "log_std": normal("BD"), "noise": normal("BD")}
exercise(
    "squashed",
    course="week 8, 35 minutes, hard: actions through tanh, and their log-density",
    cut="sac.py: squashed_gaussian",
    task="write the actions tanh(u), u = mean + sigma noise, and their log-densities. mean, log_std and noise are "
    "(B, D). The logarithm of the slope of tanh has to be right where tanh(u) is rounded to 1 as well: the docstring "
    "has a form that is; nn.functional.softplus(x) is log(1 + exp(x)). Write out the logarithm of the Gaussian "
    "density of u. Gradients have to flow.",
    cases={
        "in the middle, then beside it | the sign of the correction, and where the Gaussian is looked up": tensors(
            SQUASHED, mean=[[0.0], [1.0]], log_std=[[0.0], [0.0]], noise=[[0.0], [1.0]]
        ),
        "far out | the second formula in the docstring": tensors(
            SQUASHED, by=["mean"], mean=[[20.0], [-50.0]], log_std=[[0.0]] * 2, noise=[[0.0]] * 2
        ),
        "two dimensions | the sum over dimensions, of all terms": tensors(
            SQUASHED, mean=[[0.0, 1.0]], log_std=[[0.0, math.log(2)]], noise=[[1.0, 0.0]]
        ),
    },
    random=tensors(SQUASHED, by=["mean"], **GAUSSIANS),
    mistakes={
        "taking the logarithm of 0 where tanh is rounded to 1": f"{CORRECTION} -> (1 - u.tanh() ** 2).log()",
        "adding a small number, which is far too much where the slope is smaller": f"{CORRECTION} -> "
        "(1 - u.tanh() ** 2 + 1e-6).log()",
        "forgetting the correction": "(log_density - log_jacobian) -> log_density",
        "correcting in the wrong direction: what is pressed together gets denser": "log_density - log_jacobian -> "
        "log_density + log_jacobian",
        "asking for the density of tanh(u) instead of u": "-0.5 * noise**2 -> "
        "-0.5 * ((u.tanh() - mean) / log_std.exp()) ** 2",
        "forgetting sigma in the density": "noise**2 - log_std -> noise**2",
        "cutting gradients off": "u = mean + log_std -> u = mean.detach() + log_std",
    },
)

TAXI = {"env_id": "Taxi-v4", "total_timesteps": 150_000, "num_envs": 16, "learning_rate": 2e-3, "gamma": 0.98,
        "ent_coef": 0.01, "seed": 1}  # fmt: skip
ODDS = [0.0, math.log(3.0), 5.0]  # with the mask below: probabilities 1/4, 3/4, 0
DOORS = [True, True, False]


def masked(logits, mask, actions, **given):
    """(log-probabilities of the actions, entropies, their slopes by the logits) of rows."""

    def call(m):
        x = tensor(logits).requires_grad_()
        pi = m.MaskedCategorical(logits=x, mask=mask if mask is None else tensor(mask), **given)
        log_probs, entropies = pi.log_prob(actions=tensor(np.array(actions))), pi.entropy()
        return log_probs, entropies, slopes(log_probs, x), slopes(entropies, x), pi.mode()

    return call


def random_masked(m, rng):
    """Up to three factors, with valid actions; or one factor, given without `sizes`."""
    sizes, rows = rng.integers(2, 5, rng.integers(1, 4)).tolist(), int(rng.integers(1, 5))
    logits, mask = 2 * rng.normal(size=(rows, sum(sizes))), rng.random((rows, sum(sizes))) < 0.6
    actions = np.stack([rng.integers(size, size=rows) for size in sizes], 1)
    for first, action in zip(np.cumsum([0, *sizes]), actions.T):
        mask[np.arange(rows), first + action] = True
    if len(sizes) == 1:
        return masked(logits, mask, actions[:, 0])(m)
    return masked(logits, mask, actions, sizes=sizes)(m)


exercise(
    "masked",
    course="week 8, 60 minutes, hard: a categorical distribution that knows which actions are valid",
    cut="ppo_masked.py: MaskedCategorical.__init__, MaskedCategorical.log_prob, MaskedCategorical.entropy",
    task="self.log_probs is a list with the log-probabilities (…, size) of each factor. The probability of an "
    "invalid action is 0, its logit gets no gradient. | MaskedCategorical.__init__: set self.single (whether "
    "there is one factor, because no `sizes` were given) and self.log_probs, which sample and mode read. "
    "check_masks(array, sizes) raises the error for a row of an array (B, sum of sizes) without a valid "
    "action. | MaskedCategorical.log_prob: add the factors up. | MaskedCategorical.entropy: the entropy is a "
    "number all the same: 0 log 0 counts as 0, in its gradient as well.",
    cases={
        "logits 0, log 3, 5, of which the last is invalid: (log-probability of action 1, entropy, the slopes of both "
        "by the logits, the best action) | what happens to the logits before the softmax": masked([ODDS], [DOORS], [1]),
        "two factors with logits 0, log 3 and 0, 0, all valid; actions 1 and 0 | how they are split, and added up": (
            masked([[0.0, math.log(3.0), 0.0, 0.0]], [[True] * 4], [[1, 0]], sizes=[2, 2])
        ),
        "logits 0, log 3, 5 without a mask | which choices are valid then": masked([ODDS], None, [1]),
        "an action that is invalid: whether its log-probability is minus infinity | what log 0 is": (
            lambda m: m.MaskedCategorical(tensor([ODDS]), tensor([DOORS])).log_prob(tensor(np.array([2]))).isneginf()
        ),
        "a mask without any valid action: is it refused with a ValueError? | check_masks": refuses(
            masked([ODDS], [[False] * 3], [1])
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
        "adding 0 x log 0, which is NaN with logits of minus infinity": "torch.where(mask, log_probs, 0.0) -> "
        "log_probs",
        "one softmax over all factors: each has its own": "[factor.log_softmax(-1) for factor in "
        "logits.split(sizes, -1)] -> list(logits.log_softmax(-1).split(sizes, -1))",
        "losing a factor": "log_prob = log_prob + log_probs -> log_prob = log_probs",
        "letting a state pass in which nothing can be done": "check_masks(mask.reshape(-1, sum(sizes)).cpu().numpy(), "
        "sizes) -> pass",
    },
    learn=(TAXI, -60.0),
)


def vtrace(*ends, rho=(1, 0.5, 1)):
    """A case of three steps with ratios 2, 1/2 and 1; c is at most 1."""
    steps = rollout(STEPS | {"rho": rho, "c": [1, 0.5, 1]}, *ends)
    return tensors("compute_vtrace", **steps, gamma=0.5)


exercise(
    "vtrace",
    course="week 8, 60 minutes, hard: V-trace: learning from actions of an older policy",
    cut="ppo.py: compute_vtrace",
    task="write V-trace. The recursion of the docstring is one for the corrections v_t - V_t; it runs backwards in "
    "time, as that of compute_gae does, and ends are treated as there. All tensors are (T, N); next_values[t] is the "
    "value of the state that step t led to; rho and c are the ratios pi/pi_old, each clipped to its own bound already. "
    "Where the episode or the rollout is cut off, v_{t+1} is the next value itself. The advantages are not weighted by "
    "rho: the ratio in PPO's loss does that.",
    cases={
        "rho 1, 1/2, 1, no end | remark 1 and section 4.2 of arXiv 1802.01561; the docstring has both formulas": (
            vtrace()
        ),
        "rho_0 is 2 | which ratio belongs where": vtrace(rho=(2, 0.5, 1)),
        "row 1 terminated | what a terminated step does to its delta, and what it does to the decay": vtrace(DIED),
        "row 1 was truncated | where truncated must count, and where it must not": vtrace(CUT),
    },
    random=tensors("compute_vtrace", **ROLLOUT, **FLAGS, rho=uniform(0, 2, "TN"), c=uniform(0, 1, "TN"), gamma=share),
    mistakes={
        "weighting the advantages by rho as well": "return advantages -> return rho * advantages",
        "taking V(s_{t+1}) instead of v_{t+1} in the advantages": "= deltas[t] + gamma * next_correction -> "
        "= deltas[t]",
        "exchanging rho and c": "next_values = next_values -> rho, c = c, rho; next_values = next_values",
        "leaving c out": "gamma * c[t] * next -> gamma * next",
        "leaving rho out of the targets": "rho[t] * deltas -> deltas",
        **GAE_MISTAKES,
        **before("next_values = next_values"),
    },
    learn=(CARTPOLE | {"estimator": "vtrace"}, 200.0),
)
