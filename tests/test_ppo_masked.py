"""What ppo_masked.py does, from numbers worked out by hand, a lesson to be read beside it, to whole runs.

Each test must also fail for each of the mistakes that stand above it in `catches`. What ppo_masked.py shares with
ppo.py is the same text there (test_shared_code.py), with its tests in test_ppo.py and test_run.py.
"""

import json
import math
from contextlib import contextmanager
from functools import cache
from itertools import product
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import tools
import torch
from gymnasium import spaces
from run_folder import check_refused, kill_and_resume
from test_ppo import PLANS
from test_ppo import SHORT as SHORT_PPO
from test_ppo_rnd import Odd, watched_modes
from tools import IN_ORDER, Probe, Walk, catches, close, fails, flat, rehearse, vector_env

import ppo

SHORT = {name: value for name, value in SHORT_PPO.items() if name != "normalize_obs"}  # which it lacks

NUMBER = spaces.Box(-np.inf, np.inf, (1,))  # an observation of one number
LOGITS, ZEROS = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log(), torch.zeros(1, 5)
MASK = torch.tensor([[True, False, True, False]])


@contextmanager
def no_complaint(script):
    """AssertionError if the script complains of what it is given, by a ValueError or a UserError."""
    try:
        yield
    except (ValueError, script.UserError) as error:
        raise AssertionError(error) from error


# ------------------------------------------------------------------------------------------------- a lesson, by hand

HALF = math.log(1 / 2)
CASES = [  # sizes, logits, mask; valid actions, the best first; its log-prob and its slope; entropy and its slope
    (None, LOGITS, [0, 0, 1, 0], [2], 0.0, [0, 0, 0, 0], 0.0, [0, 0, 0, 0]),
    (None, LOGITS, [1, 0, 1, 0], [2, 0], math.log(3 / 4), [-1 / 4, 0, 1 / 4, 0], 0.562335, [0.20599, 0, -0.20599, 0]),
    ([2, 3], ZEROS[:, :5], [1, 0, 1, 1, 0], [[0, 0], [0, 1]], HALF, [0, 0, 1 / 2, -1 / 2, 0], -HALF, [0, 0, 0, 0, 0]),
    ([2, 2], ZEROS[:, :4], [1, 1, 0, 1], [[0, 1], [1, 1]], HALF, [1 / 2, -1 / 2, 0, 0], -HALF, [0, 0, 0, 0]),
]


@catches(
    "MaskedCategorical.__init__, published, zeros in the softmax and not renormalised: torch.where(mask, logits, "
    "-torch.inf)\n        self.log_probs = [factor.log_softmax(-1) for factor in logits.split(sizes, -1)] -> "
    "logits.softmax(-1)\n        self.log_probs = [p.clamp(min=1e-7).log() for p in (logits * mask).split(sizes, -1)]",
    "MaskedCategorical.__init__, -10 added: torch.where(mask, logits, -torch.inf) -> logits - 10.0 * ~mask",
    "MaskedCategorical.__init__, True means invalid: (mask, logits, -torch.inf) -> (mask, -torch.inf, logits)",
    "MaskedCategorical.__init__, masks in another order: mask.bool() -> torch.cat(mask.split(sizes, -1)[::-1], -1) > 0",
    "MaskedCategorical.__init__, one softmax for all: factor.log_softmax(-1) -> factor - logits.logsumexp(-1, True)",
    "MaskedCategorical.entropy, 0 times infinity: torch.where(mask, log_probs, 0.0) -> log_probs",
    "MaskedCategorical.entropy, infinity in a slope: log_probs, 0.0 -> log_probs, torch.finfo(log_probs.dtype).min",
    "MaskedCategorical.mode, of what is unlikely: argmax -> argmin",
    "MaskedCategorical.sample, one draw for all factors: self.join(draws) -> self.join(draws[:1] * len(draws))",
)
def test_masks(script):
    """One valid action is certain, whatever its logit: log-prob 0, entropy 0, nothing to learn. (With mere zeros in the
    softmax it would be log 0.3.)

    Two: 0.1 / 0.4 = 1/4 and 0.3 / 0.4 = 3/4; H = log 4 - 3/4 log 3 = 0.562335. d log p_2 / d l_b = [b = 2] - p_b is
    -1/4 and 1/4; dH / d l_b = -p_b (log p_b + H): -1/4 (-1.3863 + 0.5623) = 0.20599 and minus that. Those of invalid
    logits are 0, times any factor: a log-prob that is finite but huge would overflow, and infinity times 0 is NaN.

    MultiDiscrete: 0 of the first factor; 0 or 1 of the second. MultiBinary: the first bit is free, the second is 1. All
    logits 0: log 1 + log 1/2, entropy 0 + log 2. d log p_a / d l = 1 - 1/2 and 0 - 1/2 in the free factor.
    """
    for sizes, logits, mask, valid, log_prob, slope, entropy, entropy_slope in CASES:
        mask, valid = torch.tensor([mask]) > 0, torch.tensor(valid)
        draws = script.MaskedCategorical(logits.expand(60, -1), mask.expand(60, -1), sizes).sample()
        assert draws.unique(dim=0).tolist() == sorted(valid.tolist())
        x = logits.clone().requires_grad_()
        pi = script.MaskedCategorical(x, mask, sizes)
        assert pi.mode()[0].equal(valid[0])
        log_probs, entropies = (pi.log_prob(valid[:1]), log_prob, slope), (pi.entropy(), entropy, entropy_slope)
        for found, right, gradient in (log_probs, entropies):
            close(found, [right])
            for factor in (1.0, 1.01, -1.01, 100.0):
                (slopes,) = torch.autograd.grad(factor * found, x, retain_graph=True)
                close(slopes, factor * np.array([gradient]), atol=1e-4)
                assert not slopes[~mask].any()
    assert script.MaskedCategorical(LOGITS, MASK).log_prob(torch.tensor([1])).item() == -math.inf
    close(script.MaskedCategorical(LOGITS.expand(4, 4)).log_prob(torch.arange(4)).exp(), [0.1, 0.2, 0.3, 0.4])


@catches(
    "check_masks, nothing valid passes: if not can_act.all() -> if False",
    "check_masks, one factor is enough: first_columns, axis=1).all(axis=1) -> first_columns, axis=1).any(axis=1)",
    "check_masks, NaN is valid: if is_strange.any(): -> if False:",
    "check_masks, another row is named: can_act.argmin() -> can_act.argmax()",
)
def test_refused_masks(script):
    """A mask that leaves nothing, in one factor or in all, or has a NaN or -inf, which as booleans would be True."""
    for sizes, mask, message in (
        (None, [[1, 0, 0], [0, 0, 0], [0, 0, 0]], "row 1: the action mask leaves no valid action"),
        ([1, 2], [[1, 0, 1], [1, 1, 1], [1, 0, 0]], "row 2: the action mask leaves no valid action"),
        (None, [[1, 1, 0], [1, 1, math.nan], [1, 1, 1]], "row 1: the action mask has values other than 0 and 1"),
        (None, [[1, 1, 0], [1, 1, 1], [0, -math.inf, 0]], "row 2: the action mask has values other than 0 and 1"),
    ):
        with fails(message):
            script.MaskedCategorical(torch.zeros(3, 3), torch.tensor(mask), sizes)


KINDS = {  # action space; numbers of choices; masks of the three real rows; actions, of which each is valid
    "Discrete": (spaces.Discrete(3, start=-1), [3], [[1, 0, 1], [0, 1, 0], [1, 1, 1]], [[2], [1], [0]]),
    "MultiDiscrete": (spaces.MultiDiscrete([2, 3]), [2, 3],
                      [[1, 0, 1, 1, 0], [0, 1, 0, 0, 1], [1, 1, 1, 1, 1]], [[0, 1], [1, 2], [1, 0]]),
    "MultiBinary": (spaces.MultiBinary(2), [2, 2],
                    [[1, 1, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1]], [[0, 1], [1, 0], [1, 1]]),
}  # fmt: skip


@catches(
    "MaskableRolloutBuffer.add, reset rows are checked: masks[self.reset_rows[t]] = True -> pass",
    "MaskableRolloutBuffer.add, masks not kept: self.action_masks[t] = masks -> pass",
    "MaskableRolloutBuffer.add, foul masks are kept: check_masks(masks, self.output_sizes) -> pass",
    "MaskableRolloutBuffer.add, masks of before are kept: np.ones_like(self.action_masks[t]) -> self.action_masks[t]",
    "MaskableDictRolloutBuffer.observations, entries swapped: zip(self.shapes, -> zip([*self.shapes][::-1],",
)
def test_a_rollout_with_masks(script):
    """V(s) = s, gamma = 1/2, lambda = 1. Returns 1 + 6/2 = 4; 2 + 8/2 = 6, cut off at s = 8; -; 3 + 4/2 = 5. In a Dict,
    s and 10 s are the entries. The nonsense in the reset row is not looked at, anywhere else it is refused.
    """
    names = "observations", "actions", "old_values", "old_log_prob", "advantages", "returns", "action_masks"
    for is_dict, (space, _, masks, actions) in product((False, True), KINDS.values()):
        name = "MaskableDictRolloutBuffer" if is_dict else "MaskableRolloutBuffer"
        observation = lambda s: {"a": [[s]], "b": [10 * s]} if is_dict else [[s]]
        observation_space = spaces.Dict(a=NUMBER, b=spaces.Discrete(90)) if is_dict else NUMBER
        no_mask = np.full(len(masks[0]), math.nan)
        rows = [  # s, r, truncated, reset row, mask, action
            (1, 1, False, False, masks[0], actions[0]),
            (2, 2, True, False, masks[1], actions[1]),
            (8, 0, False, True, no_mask, actions[0]),  # the last observation of the episode; no action counts
            (3, 3, False, False, masks[2], actions[2]),
        ]
        buffer = getattr(script, name)(4, 1, observation_space, space)
        with no_complaint(script):
            for t, (s, reward, truncated, reset_row, mask, action) in enumerate(rows):
                buffer.add(t, observation(s), [action], reward, False, truncated, [reset_row], [mask])
        buffer.set_obs(4, observation(4))
        values = torch.tensor([[1.0], [2], [8], [3], [4]])
        buffer.compute_advantages(-values[:-1], values, script.Args(gamma=0.5, gae_lambda=1.0))
        (batch,) = buffer.get(batch_size=None, rng=IN_ORDER)
        assert type(batch) is getattr(script, f"{name}Samples") and batch._fields == names
        close((batch.observations["a"] if is_dict else batch.observations).ravel(), [1, 2, 3])
        if is_dict:
            close(batch.observations["b"], [10, 20, 30])
        close(batch.actions, actions)
        close(batch.advantages, [3, 4, 2])
        close(batch.returns, [4, 6, 5])
        assert batch.action_masks.dtype == torch.bool and batch.action_masks.int().tolist() == masks
        assert buffer.action_masks[2].all()
        buffer.add(1, observation(2), [actions[0]], 0, False, False, [False])  # without a mask
        assert buffer.action_masks[1].all()
        with fails("row 0: the action mask has values other than 0 and 1"):
            buffer.add(1, observation(2), [actions[0]], 0, False, False, [False], [no_mask])


@catches(
    "MaskableRolloutBuffer.log_probs_and_values, without masks: actions[part], masks[part] -> actions[part]",
    "masked_ppo_loss, learns without masks: None if args.naive_mask else batch.action_masks -> None",
    "masked_ppo_loss, naive variant has masks: None if args.naive_mask else -> ",
)
def test_the_first_ratio(script):
    """The policy has not moved: r = 1, no KL, nothing clipped. The naive variant, which learns without masks, has
    pi/pi_old = 0.1 / (1/4) = 0.3 / (3/4) = 0.4 and a KL of 0.4 - 1 - log 0.4. Advantages 1 and -1, not normalised: the
    surrogate is 0.4 for the first and clipped to -0.8 for the second.
    """
    for naive_mask, ratio in ((False, 1.0), (True, 0.4)):
        args = script.Args(naive_mask=naive_mask, norm_adv=False, ent_coef=0.0, vf_coef=0.0)
        agent = script.MaskedAgent({"observation": NUMBER}, spaces.Discrete(4), args)
        agent.actor[-1].bias.data = LOGITS[0]  # all there is where observations are 0; and V = 0
        buffer = script.MaskableRolloutBuffer(1, 2, NUMBER, spaces.Discrete(4))
        buffer.add(0, np.zeros((2, 1)), [[0], [2]], [1, -1], True, False, False, MASK.numpy().repeat(2, 0))
        log_probs, values = buffer.log_probs_and_values(agent)
        close(log_probs, [[math.log(0.25), math.log(0.75)]])
        buffer.compute_advantages(log_probs, values, args)
        (batch,) = buffer.minibatches(1, IN_ORDER)
        loss, metrics = script.masked_ppo_loss(agent, batch, args)
        close(metrics["approx_kl"], ratio - 1 - math.log(ratio))
        close(metrics["clip_fraction"], float(naive_mask))
        close(loss, -(0.4 - 0.8) / 2 if naive_mask else 0.0)


# -------------------------------------------------------------------------- against slow and obvious versions of it


@catches(
    "MaskedAgent.sample, no chance in it: if rng is not None: -> if False:",
    "MaskedAgent.sample, acts without masks: (logits, masks, -> (logits, None,",
    "MaskedAgent.sample, not a draw from the softmax: rng.gumbel( -> rng.normal(",
    "MaskedAgent.sample, once for all environments: size=logits.shape -> size=logits.shape[1:]",
    "MaskedCategorical.sample, another generator: generator=generator -> generator=None",
    "MaskedAgent.act, without masks: self.sample(obs, masks -> self.sample(obs, masks | True",
    'MaskedAgent.to_env, start forgotten: getattr(space, "start", 0) -> 0',
)
def test_draws(script):
    """0.1 and 0.3 of four are valid: 1/4 and 3/4 of 20,000 draws, ± 0.015. Without a generator: the most likely."""
    pi = script.MaskedCategorical(LOGITS.expand(20_000, 4), MASK.expand(20_000, 4))
    agent = script.MaskedAgent({"observation": NUMBER}, spaces.Discrete(4, start=-1), script.Args())
    agent.actor[-1].bias.data = LOGITS[0]
    obs, masks = np.zeros((20_000, 1), np.float32), np.tile(MASK.numpy(), (20_000, 1))
    draws = [pi.sample(torch.Generator().manual_seed(3)).numpy() for _ in range(2)]
    assert (draws[0] == draws[1]).all()
    for actions in (draws[0], agent.sample(obs, masks, np.random.default_rng(0))[:, 0]):
        close(np.bincount(actions) / 20_000, [0.25, 0, 0.75], atol=0.015)
    agent.actor[-1].bias.data = torch.tensor([1.0, 4, 2, 3])
    masks = np.array([[1, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], bool)
    assert agent.sample(obs[:3], masks).ravel().tolist() == [2, 1, 0]
    rows = np.concatenate([obs[:3], masks], 1, dtype=np.float32)
    assert agent.act(rows).tolist() == [1, 0, -1]
    with fails("act takes a batch of observations with masks; for one: act(row[None])[0]"):
        agent.act(rows[0])


@catches("MaskedEnvs.mask, a factor for an environment: if isinstance(entry, tuple) -> if False")
def test_masks_of_an_own_vector_environment(script):
    """Gymnasium's vectors say in _action_mask who gave a mask; one's own need not. A Tuple has an array a factor."""
    envs = SimpleNamespace(source="info", INFO="info", ENTRY="entry", METHOD="method", choices=2, num_envs=2)
    masks = {"action_mask": np.array([[1, 0], [0, 1]])}
    assert script.MaskedEnvs.mask(envs, 1, None, masks).tolist() == [0, 1]
    assert script.MaskedEnvs.mask(envs, 1, None, masks | {"_action_mask": [True, False]}).tolist() == [1, 1]
    envs.source = "entry"
    factors = np.array([[1, 0], [0, 1]]), np.array([[1, 1], [1, 0]])  # rows: environments
    found = script.MaskedEnvs.mask(envs, 1, {"action_mask": factors}, {})
    assert np.concatenate(found).tolist() == [0, 1, 1, 0]


@catches(
    "LinearOnEntries.forward, start forgotten: - np.ravel(space.start) -> ",
    "LinearOnEntries.forward, one table for all factors: np.cumsum([0, *output_sizes(space)[:-1]]) -> 0",
    "LinearOnEntries.forward, one entry alone: output = output + x -> output = self.linear.bias + x",
    "LinearOnEntries.__init__, a bias that all states share: if all( -> if not all(",
    "LinearOnEntries.__init__, vectors without a bias: if all( -> if any(",
    "MaskedAgent.__init__, lazy critic: mlp(inputs, critic_sizes, 1 -> mlp(inputs, sizes, 1",
    "MaskedAgent.__init__, eager actor: self.choices, gain=0.01) -> self.choices, gain=1.0)",
)
def test_networks_see_discrete_numbers_as_one_hot_vectors(script):
    """A lookup, of one number or several, from any start, is the linear layer that it stands for; entries may come as
    a dict or side by side. What is learnt of one state changes another only where vectors are seen as well.
    """
    entries = spaces.Dict(
        bits=spaces.MultiBinary(3),
        number=spaces.Discrete(5, start=2),
        numbers=spaces.MultiDiscrete([3, 4], start=[1, -2]),
        vector=spaces.Box(-1, 1, (2, 2)),
    )
    agent = script.MaskedAgent(entries, spaces.Discrete(2), script.Args(hidden_sizes=(8, 6), critic_hidden_sizes=(4,)))
    assert agent.feature_space.shape == (10,) and agent.actor[-1].weight.norm() < 0.02
    assert [len(network) for network in (agent.actor, agent.critic)] == [5, 3]  # linear layers with tanh between them
    numbers = {name: entries[name] for name in ("number", "numbers")}
    states = script.MaskedAgent(numbers, spaces.Discrete(2), script.Args())
    assert [x.actor[0].linear.bias.requires_grad for x in (agent, states)] == [True, False]
    for seed in range(10):
        entries.seed(seed)
        sample = entries.sample()
        one_hot = torch.tensor(np.array([spaces.flatten(entries, sample)])).float()
        batch = {name: torch.as_tensor(np.asarray(sample[name]))[None] for name in entries}
        side_by_side = torch.cat([entry.reshape(1, -1).float() for entry in batch.values()], 1)
        for network in (agent.actor, agent.critic):
            for obs in (batch, side_by_side, side_by_side.numpy()):
                close(network(obs), network[1:](network[0].linear(one_hot)))


@catches(
    "MaskableRolloutBuffer.__init__, masks as floats: sum(self.output_sizes)), bool) -> sum(self.output_sizes)))",
    "MaskableRolloutBuffer.compute_advantages, mask of the next row: on_device(self.action_masks) -> "
    "on_device(np.roll(self.action_masks, -1, 0))",
    "MaskableRolloutBuffer.get, the rest is left out: len(order), size) -> len(order) - size + 1, size)",
    "MaskableRolloutBuffer.get, reset rows drawn: ~self.reset_rows -> self.rewards > -1",
    "MaskableRolloutBuffer.get, always the same order: self.rng if rng -> np.random.default_rng(0) if rng",
    "MaskableRolloutBuffer.minibatches, fewer parts than asked: np.array_split(order, num_minibatches) -> np.split("
    "order, range(-(-len(order) // num_minibatches), len(order), -(-len(order) // num_minibatches)))",
    "MaskableRolloutBuffer.minibatches, not shuffled: rng.permutation -> ",
    "MaskableRolloutBuffer.log_probs_and_values, all at once: 2**22 // choices -> 2**22",
)
def test_batches(script):
    """Every row but the reset rows once, all fields of the same rows, in `minibatches` as many parts as asked, as equal
    as can be, in `get` only the last part short. Every field of row (t, n) tells 10 n + t, its mask in binary.

    Of millions of choices, masks take a byte each, and logits, of four bytes, are never made of all rows at once.
    """
    shuffle, numbers = np.random.default_rng, 10 * np.arange(3) + np.arange(8)[:, None]
    mask_of = lambda numbers: (numbers[:, None] >> np.arange(6) & 1) | (np.arange(6) == 5)
    for reset_rows in (numbers < 0, numbers % 10 == 3, numbers % 5 > 0):
        buffer = script.MaskableRolloutBuffer(8, 3, NUMBER, spaces.Discrete(6))
        for t, row in enumerate(numbers):
            buffer.add(t, row[:, None], row[:, None], row, False, False, reset_rows[t], mask_of(row))
        values = torch.as_tensor(np.vstack([numbers, numbers[:1]]))
        buffer.compute_advantages(values[:-1], values, script.Args(gamma=0.0))  # returns are rewards, the same numbers
        in_parts = list(buffer.minibatches(5, shuffle(1)))
        draws = [[*buffer.get(5, shuffle(1))], in_parts, [*buffer.get(5)], [*buffer.get(5)], [*buffer.get()]]
        for batch in [batch for batches in draws for batch in batches]:
            number = batch.old_values
            assert batch.action_masks.dtype == torch.bool and (batch.action_masks == mask_of(number.numpy())).all()
            for field in (batch.observations[:, 0], batch.actions[:, 0], batch.old_log_prob, batch.returns):
                assert number.equal(field.long())
        played = sorted(numbers[~reset_rows].tolist())
        orders = [[x for batch in batches for x in batch.old_values.tolist()] for batches in draws]
        assert all(sorted(order) == played for order in orders) and orders[0] == orders[1]
        assert len(played) < 20 or len(set(map(tuple, [*orders, played]))) == 5  # but for the first two, all differ
        lengths = [len(batch.actions) for batch in in_parts]
        assert len(lengths) == 5 and max(lengths) - min(lengths) <= 1
        assert all(len(batch.actions) == 5 for batch in draws[0][:-1]) and len(draws[4]) == 1
    buffer = script.MaskableRolloutBuffer(3, 2, NUMBER, spaces.Discrete(2**21))
    with fails("compute_advantages comes first: it makes the rows"):
        list(buffer.get())
    agent = mock.Mock(device="cpu", critic=lambda obs: obs, side_effect=lambda obs, *_: (obs[:, 0], None, obs[:, 0]))
    buffer.log_probs_and_values(agent)
    shapes = [masks.shape for (_, _, masks), _ in agent.call_args_list]
    assert buffer.action_masks.nbytes == 6 * 2**21 and shapes == [(3, 2**21)] * 2


class Cue(Probe):
    """Two steps that show -1, where the mask is the first of KINDS, or 1, where all is valid. The right actions pay 1
    in all: the first valid choice of every factor where -1 is shown, else the last. An invalid action is an error. The
    mask comes by `source`: info, method or entry. At an episode's end it is `final` (None: not told at all).
    """

    def __init__(self, source="info", kind="Discrete", final=0.0):
        super().__init__(self.pay, steps=2, end="t" if kind == "Discrete" else "c", varied=True)
        self.source, self.final = source, final
        self.action_space, self.sizes, masks, _ = KINDS[kind]
        self.valid = {-1: masks[0], 1: masks[2]}
        if source == "entry":
            self.observation_space = spaces.Dict(shown=NUMBER, action_mask=spaces.Box(0, 1, (sum(self.sizes),)))
        if source == "method":
            self.action_masks = self.mask

    def pay(self, shown, action):
        mask = np.split(self.valid[shown], np.cumsum(self.sizes)[:-1])
        chosen = np.ravel(action - getattr(self.action_space, "start", 0))
        assert all(part[place] for part, place in zip(mask, chosen)), f"{action} is invalid"
        right = 0 if shown < 0 else -1
        return all(np.flatnonzero(part)[right] == place for part, place in zip(mask, chosen)) / 2

    def mask(self):
        over = self.at == self.steps
        assert not over or self.source != "method", "asked for masks when the episode was over"
        return np.array([self.final] * sum(self.sizes) if over else self.valid[self.obs[0]], np.float32)

    def seen(self):
        if self.source == "entry":
            return {"shown": self.obs, "action_mask": self.mask()}, {}
        told = self.source == "info" and (self.at < self.steps or self.final is not None)
        return self.obs, {"action_mask": self.mask()} if told else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen()

    def step(self, action):
        _, reward, terminated, truncated, _ = super().step(action)
        obs, info = self.seen()
        return obs, reward, terminated, truncated, info


gym.register("Cue-v0", Cue, disable_env_checker=True)


@catches(
    "MaskedEnvs.rows, masks of the step before: masks != 0) -> getattr(self, 'now', masks) != 0); self.now = masks",
    "MaskedEnvs.rows, masks forgotten: masks != 0 -> masks >= 0",
    "MaskedEnvs.rows, final masks are looked at: np.flatnonzero(~dones) -> range(self.num_envs)",
    "MaskedEnvs.rows, masks of the first environment: self.mask(n, -> self.mask(0,",
    "MaskedEnvs.step, looked at where episodes are cut off: terminated | truncated), rewards -> terminated), rewards",
    'MaskedEnvs.step, masks of reset alone: and "action_mask" not in infos and -> and False and',
    'MaskedEnvs.mask, unset slots taken for zeros: and infos.get("_action_mask", np.ones(n + 1))[n] -> ',
    'MaskedEnvs.__init__, mask fed to the network: self.entries.pop("action_mask" -> self.entries.get("action_mask"',
)
def test_masks_from_every_source(script):
    """No invalid action reaches an environment, masks belong to the observations that they come with, a final
    observation's empty, foul or missing mask is no error, any other is, and no mask is fed to the network.
    """
    words = {"info": 'info["action_mask"]', "method": "a method action_masks()", "entry": "of a Dict observation"}
    for source, kind, final in product(words, KINDS, (0.0, math.nan, None)):
        kwargs = json.dumps({"source": source, "kind": kind, "final": final})
        args = script.Args(env_id="Cue-v0", env_kwargs=kwargs)
        with no_complaint(script):
            envs = script.make_envs(args, 3)
            agent = script.make_agent(args, envs)
            rng = np.random.default_rng(0)
            rows, _ = envs.reset(seed=1)
            ended = np.zeros(3, bool)
            assert envs.source.endswith(words[source]) and "action_mask" not in agent.entries
            for _ in range(16):
                obs, masks = agent.split(rows)
                expected = np.array(KINDS[kind][2], bool)[1 + obs[:, 0].astype(int)]
                assert (masks == expected | ended[:, None]).all()
                rows, _, terminated, truncated, _ = envs.step(agent.to_env(agent.sample(obs, masks, rng)))
                ended = terminated | truncated
    envs = script.make_envs(script.Args(env_id="Cue-v0"), 3)
    rows = lambda **infos: envs.rows(np.zeros(3), infos, np.zeros(3, bool))[:, 1:]
    told = rows(action_mask=np.eye(3), _action_mask=np.array([True, False, True]))
    close(told, [[1, 0, 0], [1, 1, 1], [0, 0, 1]])
    close(rows(), np.ones((3, 3)))
    of_factors = np.empty(3, object)
    of_factors[:] = [(np.eye(2)[0], np.ones(1))] * 3
    close(rows(action_mask=of_factors, _action_mask=np.ones(3, bool)), [[1, 0, 1]] * 3)
    step = envs.env.step
    envs.env.step = lambda actions: (*step(actions)[:4], {})
    obs_and_masks, _ = envs.reset(seed=1)
    told = ""
    try:
        envs.step(obs_and_masks[:, 1:].argmax(axis=1) + envs.single_action_space.start)
    except script.UserError as error:
        told = str(error)
    assert "Cue-v0: no action_mask in info after 1 steps" in told
    envs.steps = 0
    messages = "row 0: the action mask has values other than 0 and 1", "cannot reshape array of size 2 into shape (3,)"
    for foul, message in zip(([1, math.nan, 1], [1, 1]), messages):
        with pytest.raises(script.UserError) as error:
            rows(action_mask=np.array([foul] * 3), _action_mask=np.ones(3, bool))
        assert str(error.value) == f'Cue-v0, after 0 steps, masks 3 wide from info["action_mask"]: {message}'


@catches("MaskedEnvs.rows, an observation has a dimension: part.reshape(self.num_envs, -1) -> part")
def test_odd_environments(script):
    """What Gymnasium takes is taken; numbers beyond float32 are named; an error in the user's own method is his."""
    masked = lambda makers, num_envs: script.MaskedEnvs(vector_env(makers, num_envs), "Odd-v0")
    with mock.patch.object(tools, "vector_env", masked):
        with no_complaint(script):
            assert set(rehearse(script, Odd, **SHORT).episodes["return"]) == {2.0}
        with pytest.raises(script.UserError, match="none, after step 0: observation is NaN or infinite"):
            rehearse(script, lambda: Odd(1e300), **SHORT)
        with pytest.raises(ValueError, match="my own mistake"):
            rehearse(script, lambda: Odd(broken=True), **SHORT)


def test_a_process_for_each_environment(script):
    """The same rows, bit for bit, as in one process. Only masks from a method cannot be asked for there."""
    rows = []
    for async_envs in (False, True):
        envs = script.make_envs(script.Args(async_envs=async_envs), 2)
        agent = script.make_agent(script.Args(), envs)
        obs, _ = envs.reset(seed=5)
        rows.append([obs, *(envs.step(agent.act(obs))[0] for _ in range(9))])
        envs.close()
    assert np.array_equal(*rows) and rows[0][0].shape == (2, 7)


def test_returns_are_true_ones(script):
    """The first valid choice is right where -1 is shown, so returns are 0 or 1, though a wrapper doubles rewards."""
    args = script.Args(env_id="Cue-v0", wrappers=("run_worlds.Double",))
    agent = script.make_agent(args, script.make_envs(args, 1))
    agent.actor[-1].bias.data = torch.tensor([2.0, 1, 0])
    mean, std = script.evaluate(agent, args, 50)
    close(std**2, mean * (1 - mean))


class MaskedWalk(Walk):
    """A Walk in which all actions but one are valid; each place in it forbids another one."""

    action_space = spaces.Discrete(4)
    action_masks = lambda self: np.arange(4) != (self.name + self.episode + self.at) % 4


PLACES = [lambda i=i: MaskedWalk(PLANS[i], i) for i in (0, 1)]
TRAININGS = [  # which masks; other settings
    ({}, {"gae_lambda": 0.8, "normalize_reward": True, "total_timesteps": 40}),
    ({"naive_mask": True}, {"clip_vloss": True, "anneal_lr": False, "target_kl": 1e-9}),
    ({"no_mask": True}, {"norm_adv": False, "clip_reward": True, "max_grad_norm": 1e9}),
]


@cache
def plain_run(number):
    """A Run of ppo.py, which knows no masks; its logits are -1e9 where the place in the walk forbids an action."""
    make_agent = ppo.make_agent
    masks, options = TRAININGS[number]

    def mask_logits(actor, inputs, logits):
        invalid = torch.arange(4) == inputs[0].sum(1, keepdim=True) % 4
        unmasked = "no_mask" in masks or ("naive_mask" in masks and torch.is_grad_enabled())
        return logits if unmasked else logits.masked_fill(invalid, -1e9)

    def make_masking_agent(args, envs):
        agent = make_agent(args, envs)
        agent.actor.register_forward_hook(mask_logits)
        return agent

    with mock.patch.object(ppo, "make_agent", make_masking_agent):
        return rehearse(ppo, *PLACES, **SHORT_PPO | options)


@catches(
    "masked_ppo_loss, entropy lowered: - args.ent_coef -> + args.ent_coef",
    "masked_ppo_loss, value weighs 1: args.vf_coef * v_loss -> v_loss",
    "masked_ppo_loss, ratio inverted: log_probs - batch.old_log_prob -> batch.old_log_prob - log_probs",
    "MaskableRolloutBuffer.minibatches, reset rows learnt: ~self.reset_rows -> self.rewards < 99",
    "MaskableRolloutBuffer.scale_rewards, one end ends all: self.truncated[t], 0 -> self.truncated[t].any(), 0",
    "MaskableRolloutBuffer.scale_rewards, reset rows in the deviation: X[~self.reset_rows] -> X",
    "MaskableRolloutBuffer.scale_rewards, X begins anew: X = np -> self.rewards_so_far *= 0; X = np",
    "MaskableRolloutBuffer.explained_variance, of a critic of zeros: self.rows.old_values[played] -> 0",
    "MaskableRolloutBuffer.log_probs_and_values, the last observation twice: self.obs[-1] -> self.obs[-2]",
    "MaskedAgent.split, masks of the reset row: .astype(bool) -> .astype(bool) | (rows[:, :1] > 0)",
    "train, gradients add up: optimizer.zero_grad() -> 0",
    "train, last observation not stored: buffer.set_obs(args.num_steps, last_obs) -> 0",
    "train, masks of the next observation: reset_rows, masks) -> reset_rows, agent.split(obs_and_masks)[1])",
    "train, reset row that opens a rollout forgotten: for t in -> reset_rows = reset_rows & False\n        for t in",
    "train, the same noise in all steps: (obs, masks, rng) -> (obs, masks, np.random.default_rng(0))",
    "train, limit forgotten: > args.target_kl -> > 1e9",
    "MaskableRolloutBuffer.scale_rewards, signs not learnt: if args.clip_reward -> if False",
    "train, dropout when acting: agent.eval() -> 0",
    "train, no dropout in the loss: agent.train() -> 0",
    "make_masked_agent, dropout at first: .eval() -> ",
    "train, reported returns clipped: (obs_and_masks, rewards -> (obs_and_masks, np.sign(rewards)",
)
def test_training(script):
    """Masked PPO is the PPO of ppo.py, which test_ppo.py holds against the textbook, with logits of -1e9 where a mask
    says so: the same seed gives the same actions, returns, metrics and weights, over rollouts with ends and reset rows.
    """
    for number, (masks, options) in enumerate(TRAININGS):
        twin = plain_run(number)
        masked = lambda makers, num_envs: script.MaskedEnvs(vector_env(makers, num_envs), "Walk")
        with no_complaint(script), mock.patch.object(tools, "vector_env", masked):
            with watched_modes(script, "MaskedAgent", "masked_ppo_loss") as modes:
                run = rehearse(script, *PLACES, **SHORT | masks | options)
        assert modes == {("acts", False), ("learns", True)}
        assert run.step == twin.step and run.episodes == twin.episodes and run.num_episodes >= 4
        assert set(run.all_logged) == set(twin.all_logged)
        for name, metrics in twin.all_logged.items():
            close(run.all_logged[name], metrics, atol=1e-4)
        close(flat(run.agent), flat(twin.agent), atol=1e-4)


# ------------------------------------------------------------------------------------------ small worlds and whole runs

CUE = {
    "env_id": "Cue-v0",
    "num_envs": 8,
    "num_steps": 32,
    "num_minibatches": 4,
    "update_epochs": 4,
    "learning_rate": 5e-3,
    "gamma": 0.5,
    "ent_coef": 0.0,
}
CUE |= {"total_timesteps": 6_000, "eval_episodes": 50}
WORLDS = [  # settings, and the return that they must lead to; the best is 1 in Cue and 7.93, on average, in Taxi
    (CUE | {"env_kwargs": '{"source": "entry", "kind": "MultiDiscrete"}'}, 0.95),
    (CUE | {"env_kwargs": '{"source": "method", "kind": "MultiBinary"}', "normalize_reward": True}, 0.95),
    ({"eval_episodes": 500}, 7.3),
]


@pytest.mark.slow
@pytest.mark.parametrize("args, best", WORLDS)
def test_worlds_are_learnt(script, tmp_path, args, best):
    """With masks from each source, for each kind of actions."""
    quiet = {"progress": False, "eval_every": 10**9, "run_dir": str(tmp_path / "run")}
    assert script.train(script.tuned(**quiet | args))["eval_return_mean"] > best


RUN = "--env-id Cue-v0 --anneal-lr --num-envs 2 --num-steps 8 --num-minibatches 2 --hidden-sizes 8 --normalize-reward "
RUN += "--update-epochs 2 --total-timesteps 150 --checkpoint-every 60 --eval-every 90 --eval-episodes 3"


@catches(
    "train, the optimizer is not saved: optimizer=optimizer, -> ",
    "train, the scheduler is not saved: , scheduler=scheduler -> ",
)
def test_killed_resumed(script, tmp_path, monkeypatch, capsys):
    """A run that is killed and resumed ends as an unbroken one; it says where the masks come from."""
    kill_and_resume(script, RUN, 12, monkeypatch, tmp_path)
    assert 'action masks come from info["action_mask"]' in capsys.readouterr().out


def test_refused(script, tmp_path, monkeypatch, capsys):
    refused = {"--env-id CartPole-v1": "no action masks: neither the entry", "--env-id Pendulum-v1": "ppo.py takes Box"}
    refused |= {"--env-id Blackjack-v1 --no-mask": "no MaskedAgent", "--no-mask --naive-mask": "different ablations"}
    refused |= {"--num-envs 1 --num-steps 2 --num-minibatches 2": "num_minibatches must be at most"}
    refused |= {"--num-envs 1 --num-steps 2 --num-minibatches 1": "with norm_adv half of that"}
    refused |= {"--env-id run_worlds:Camera-v0": "MaskedAgent for picture", "--env-id run_worlds:Grey-v0": "(36, 36)"}
    refused |= {"--wrappers gymnasium.wrappers.NormalizeObservation": "use gymnasium.wrappers.RescaleObservation"}
    check_refused(script, refused, tmp_path, monkeypatch, capsys)
