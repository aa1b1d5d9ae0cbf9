"""ppo_masked.py: masked distributions, masks in the buffers, masks from all three sources, and whole runs.

The `check_…` functions take the implementation that they judge, so that faulty ones can be handed to them: each has to
be caught. What ppo_masked.py shares with ppo.py, character for character, is tested there.
"""

import copy
import csv
import json
import math
import os
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import gymnasium as gym
import hypothesis.extra.numpy as hnp
import masked_envs
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import ppo_masked
from ppo_masked import Args, MaskableDictRolloutBuffer, MaskableRolloutBuffer, MaskedCategorical, UserError

CASES = json.loads(Path(__file__).with_name("cases.json").read_text())["cases"]
SOURCE = Path(ppo_masked.__file__).read_bytes()
ACTION_SPACES = {
    "Discrete": spaces.Discrete(4),
    "Discrete from 5": spaces.Discrete(3, start=5),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiDiscrete 2 x 2": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "MultiBinary": spaces.MultiBinary(2),
}
every_action_space = pytest.mark.parametrize("action_space", ACTION_SPACES.values(), ids=ACTION_SPACES.keys())
SMALL = "--num-envs 4 --num-steps 32 --num-minibatches 4 --eval-episodes 4 --no-progress".split()


@pytest.fixture(autouse=True)
def one_thread():
    """`train` sets the number of threads of this process: put it back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def close(actual, expected, atol=1e-6):
    """AssertionError unless all numbers agree; shapes as well."""
    actual, expected = (torch.as_tensor(np.asarray(x), dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-6)


def bools(numbers):
    return torch.tensor(numbers, dtype=torch.bool)


def gradient(function, logits):
    """d function(logits).sum() / d logits."""
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(function(logits).sum(), logits)[0]


# ------------------------------------------------------------------------------------------- distributions, by hand


def check_one_valid(categorical):
    """One valid action: it is certain, whatever its logit. Log-probability 0, entropy 0, and nothing to learn from.

    A published version takes log(p_2 + tiny) of the probabilities before they are renormalised: softmax(1, 2, 3, 4)_2
    = e^-1 / (1 + e^-1 + e^-2 + e^-3) = 0.2369, of which the logarithm is -1.4402.
    """
    case = CASES["masked_categorical_one_valid"]
    logits, mask = torch.tensor([case["inputs"]["logits"]]).float(), bools([case["inputs"]["mask"]])
    expected, pi = case["expected"], categorical(logits, mask)
    assert pi.log_prob(torch.tensor([2])).item() == expected["log_prob_action2"]
    assert pi.entropy().item() == expected["entropy"]
    assert pi.mode().tolist() == [expected["mode"]] and pi.sample().tolist() == [expected["mode"]]
    for invalid in (0, 1, 3):
        assert pi.log_prob(torch.tensor([invalid])).item() <= expected["log_prob_invalid_at_most"]
    of_log_prob = gradient(lambda x: categorical(x, mask).log_prob(torch.tensor([2])), logits)
    of_entropy = gradient(lambda x: categorical(x, mask).entropy(), logits)
    assert of_log_prob.tolist() == of_entropy.tolist() == [[0, 0, 0, 0]]


def check_two_valid(categorical):
    """softmax(logits) = 0.1, 0.2, 0.3, 0.4, of which 0 and 2 are valid: 0.1 / 0.4 = 1/4 and 0.3 / 0.4 = 3/4.

    H = log 4 - 3/4 log 3 = 0.5623. d log p_0 / d l_b = [b = 0] - p_b = 3/4, -3/4 for the valid ones, and exactly 0 for
    the others. dH / d l_b = -p_b (log p_b + H): -1/4 (-1.3863 + 0.5623) = 0.2060 for b = 0, and minus that for b = 2.
    """
    case = CASES["masked_categorical_two_valid"]
    logits, mask = torch.tensor([case["inputs"]["logits"]]), bools([case["inputs"]["mask"]])
    expected, pi = case["expected"], categorical(logits, mask)
    for action, log_prob in expected["log_prob"].items():
        close(pi.log_prob(torch.tensor([int(action)])), [log_prob])
    close(pi.log_prob(torch.tensor([0])).exp() + pi.log_prob(torch.tensor([2])).exp(), [1])
    close(pi.entropy(), [expected["entropy"]])
    of_log_prob = gradient(lambda x: categorical(x, mask).log_prob(torch.tensor([0])), logits)
    close(of_log_prob, [expected["dlogprob0_dlogits"]])
    of_entropy = gradient(lambda x: categorical(x, mask).entropy(), logits)
    close(of_entropy, [[0.2059898, 0, -0.2059898, 0]])
    assert of_log_prob[0, [1, 3]].tolist() == of_entropy[0, [1, 3]].tolist() == [0, 0]  # exactly
    plain = categorical(logits, None)
    probs = [plain.log_prob(torch.tensor([action])).exp().item() for action in range(4)]
    close(probs, expected["after_unmask_probs"])


def check_factors(categorical):
    """All logits 0. MultiDiscrete [2, 3]: only 0 is valid of the first, 0 and 1 of the second: 1 and 1/2 each, joint
    log-probability log 1/2, entropy log 2. MultiBinary(2): the first bit may be both, the second only 1: the same.
    """
    for name, sizes in (("multidiscrete", [2, 3]), ("multibinary", [2, 2])):
        case = CASES["masked_multidiscrete_multibinary"]
        inputs, expected = case["inputs"][name], case["expected"][name]
        logits, mask = torch.zeros(1, sum(sizes)), bools([inputs["mask"]])
        action = torch.tensor([inputs["action"]])
        pi = categorical(logits, mask, sizes)
        close(pi.log_prob(action), [expected["log_prob"]])
        close(pi.entropy(), [expected["entropy"]])
        # The free factor: d log p_a / d l = 1 - 1/2 for the choice and -1/2 for the other one. All others: exactly 0.
        free = {"multidiscrete": [0, 0, -0.5, 0.5, 0], "multibinary": [-0.5, 0.5, 0, 0]}[name]
        assert gradient(lambda x, a=action, m=mask, s=sizes: categorical(x, m, s).log_prob(a), logits).tolist() == [
            free
        ]
        assert gradient(lambda x, m=mask, s=sizes: categorical(x, m, s).entropy(), logits).abs().max() < 1e-6
        draws = torch.cat([pi.sample() for _ in range(60)])
        assert (
            set(map(tuple, draws.tolist()))
            == {"multidiscrete": {(0, 0), (0, 1)}, "multibinary": {(0, 1), (1, 1)}}[name]
        )
    # Unequal logits: of the second factor (log 1, log 2, log 5), 0 and 2 are valid: 1/6 and 5/6; the first is 1/2, 1/2.
    logits = torch.tensor([[0, 0, 1, 2, 5.0]]).clamp(min=1e-30).log().nan_to_num()
    logits[0, :2] = 0
    pi = categorical(logits, bools([[1, 1, 1, 0, 1]]), [2, 3])
    close(pi.log_prob(torch.tensor([[1, 2]])), [math.log(0.5 * 5 / 6)])
    close(pi.entropy(), [math.log(2) + math.log(6) - 5 / 6 * math.log(5)])
    assert pi.mode()[0, 1] == 2


CHECKS = check_one_valid, check_two_valid, check_factors


@pytest.mark.parametrize("check", CHECKS)
def test_distributions_by_hand(check):
    """Fails if probabilities are not renormalised, a masked logit has a gradient, or a factor gets another's mask."""
    check(MaskedCategorical)


class Unnormalised(MaskedCategorical):
    """The published fault: masked probabilities are not renormalised, and are kept from 0 by a tiny number."""

    def __init__(self, logits, mask=None, sizes=None):
        super().__init__(logits, None, sizes)
        if mask is not None:
            masks = mask.split(sizes or [logits.shape[-1]], -1)
            self.log_probs = [(p.exp() * m).clamp(min=2**-23).log() for p, m in zip(self.log_probs, masks)]


class Additive(MaskedCategorical):
    """Adds -10 instead of ruling out: little is left of the probability, but something, and it has a gradient."""

    def __init__(self, logits, mask=None, sizes=None):
        super().__init__(logits if mask is None else logits - 10.0 * ~mask, None, sizes)


class Inverted(MaskedCategorical):
    """True means invalid."""

    def __init__(self, logits, mask=None, sizes=None):
        super().__init__(logits, None if mask is None else ~mask, sizes)


class Multiplied(MaskedCategorical):
    """Logits times mask: a masked logit of 0 is as good as any."""

    def __init__(self, logits, mask=None, sizes=None):
        super().__init__(logits if mask is None else logits * mask, None, sizes)


class WithInfinity(MaskedCategorical):
    """Minus infinity, whose product with probability 0 is NaN in the entropy."""

    def __init__(self, logits, mask=None, sizes=None):
        super().__init__(logits if mask is None else logits.masked_fill(~mask, -torch.inf), None, sizes)


class Reversed(MaskedCategorical):
    """The masks of the factors stand in the wrong order."""

    def __init__(self, logits, mask=None, sizes=None):
        if sizes is not None and mask is not None:
            mask = torch.cat(mask.split(sizes[::-1], -1)[::-1], -1)
        super().__init__(logits, mask, sizes)


FAULTY = Unnormalised, Additive, Inverted, Multiplied, WithInfinity, Reversed


@pytest.mark.parametrize("faulty", FAULTY)
def test_faulty_distributions_are_caught(faulty):
    """Fails if the numbers above would not notice a known mistake."""
    caught = 0
    for check in CHECKS:
        try:
            check(faulty)
        except (AssertionError, ValueError, RuntimeError):
            caught += 1
    assert caught


def test_published_faulty_numbers():
    """Fails if the faulty version above is not the published one: -1.4402 where 0 is right."""
    for name in ("masked_categorical_one_valid", "masked_categorical_two_valid"):
        case = CASES[name]
        pi = Unnormalised(torch.tensor([case["inputs"]["logits"]]).float(), bools([case["inputs"]["mask"]]))
        for action, wrong in case["known_wrong"]["unnormalised_log_prob"].items():
            close(pi.log_prob(torch.tensor([int(action)])), [wrong], 1e-5)


def test_without_mask_it_is_the_plain_distribution():
    """Fails if mask=None, or a mask of nothing but True, changes anything."""
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    peer, actions = torch.distributions.Categorical(logits=logits), torch.arange(5)
    for mask in (None, torch.ones(5, 7, dtype=torch.bool)):
        pi = MaskedCategorical(logits, mask)
        close(pi.log_prob(actions), peer.log_prob(actions))
        close(pi.entropy(), peer.entropy())
        assert torch.equal(pi.mode(), logits.argmax(1))


@pytest.mark.parametrize("sizes, mask, row", [
    (None, [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], 1),
    ([2, 3], [[1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 1, 0, 0, 0]], 2),
    ([2, 3], [[0, 0, 1, 1, 1], [1, 0, 0, 1, 0], [1, 1, 0, 0, 1]], 0),
])  # fmt: skip
def test_row_without_valid_action_is_named(sizes, mask, row):
    """Fails if an empty mask, or an empty factor of one, passes, or another row is named."""
    with pytest.raises(ValueError, match=rf"row {row}\b"):
        MaskedCategorical(torch.zeros(3, 5), bools(mask), sizes)


def test_masks_of_other_types():
    """Fails if only boolean tensors are understood as masks (environments give int8 arrays)."""
    for mask in (np.array([[1, 0, 1]], np.int8), [[True, False, True]], torch.tensor([[1.0, 0, 1]])):
        close(MaskedCategorical(torch.zeros(1, 3), mask).log_prob(torch.tensor([2])), [math.log(0.5)])


def test_samples_have_their_probabilities():
    """Fails if samples follow other probabilities. 20,000 draws of 1/4 and 3/4: the share lies within 5 deviations."""
    case, generator = CASES["masked_categorical_two_valid"], torch.Generator().manual_seed(3)
    logits, mask = torch.tensor(case["inputs"]["logits"]), bools(case["inputs"]["mask"])
    draws = MaskedCategorical(logits.expand(20_000, 4), mask.expand(20_000, 4)).sample(generator)
    shares = torch.bincount(draws, minlength=4) / 20_000
    assert shares[[1, 3]].tolist() == [0, 0]
    assert abs(shares[0] - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 20_000)


# ------------------------------------------------------------------------------- distributions, against slow loops


@st.composite
def masked_logits(draw):
    """(logits, mask, sizes), of one to three factors and rows; logits up to 1,000 apart; each factor has a choice."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    rows = draw(st.integers(1, 3))
    logits = draw(hnp.arrays(np.float64, (rows, sum(sizes)), elements=st.floats(-500, 500)))
    mask = draw(hnp.arrays(np.bool_, (rows, sum(sizes))))
    for end, size in zip(np.cumsum(sizes), sizes):
        for row in range(rows):
            if not mask[row, end - size : end].any():
                mask[row, draw(st.integers(end - size, end - 1))] = True
    return logits, mask, sizes


@given(masked_logits())
def test_distribution_against_loop(case):
    """Fails if any log-probability, entropy, mode or gradient is not that of a softmax over the valid choices alone."""
    logits, mask, sizes = case
    pi = MaskedCategorical(torch.tensor(logits), torch.tensor(mask), sizes)
    entropies, mode = pi.entropy(), pi.mode()
    for row in range(len(logits)):
        entropy, begin, log_probs = 0, 0, []
        for factor, size in enumerate(sizes):
            valid = [i for i in range(size) if mask[row, begin + i]]
            shifted = {i: logits[row, begin + i] - max(logits[row, begin + j] for j in valid) for i in valid}
            total = math.log(sum(math.exp(x) for x in shifted.values()))
            log_probs.append({i: x - total for i, x in shifted.items()})
            entropy -= sum(math.exp(p) * p for p in log_probs[-1].values())
            assert log_probs[-1][mode[row, factor].item()] == max(log_probs[-1].values())
            begin += size
        close(entropies[row], entropy, 1e-9)
        likeliest = [next(iter(p)) for p in log_probs]
        action = torch.tensor([likeliest] * len(logits))
        close(pi.log_prob(action)[row], sum(p[i] for p, i in zip(log_probs, likeliest)), 1e-9)
    draws = pi.sample()
    assert all(mask[row, sum(sizes[:f]) + draws[row, f]] for row in range(len(logits)) for f in range(len(sizes)))
    for function in (lambda p: p.entropy(), lambda p: p.log_prob(draws)):
        slope = gradient(lambda x: function(MaskedCategorical(x, torch.tensor(mask), sizes)), torch.tensor(logits))
        assert slope.isfinite().all() and (slope[~torch.tensor(mask)] == 0).all()


# -------------------------------------------------------------------------------------------------------- buffers


def counted(
    buffer_class=MaskableRolloutBuffer, num_steps=3, num_envs=2, action_space=ACTION_SPACES["Discrete"], **more
):
    """A full buffer whose observation in step t of environment e is 10 e + t, and every field of a row tells which.

    The mask of a row is its number in binary, the last choice of each factor set as well. Dict: two entries of it.
    """
    box = spaces.Box(-np.inf, np.inf, (1,))
    space = spaces.Dict(a=box, b=spaces.Discrete(1000)) if buffer_class is MaskableDictRolloutBuffer else box
    buffer = buffer_class(num_steps, num_envs, space, action_space, "cpu", 0.5, **more)
    for t in range(num_steps):
        obs = [{"a": n[:, None], "b": n} if buffer_class is MaskableDictRolloutBuffer else n[:, None]
               for n in (10.0 * np.arange(num_envs) + t, 10.0 * np.arange(num_envs) + t + 1)]  # fmt: skip
        number = (10 * np.arange(num_envs) + t)[:, None]
        zeros, no = np.zeros(num_envs), np.zeros(num_envs, bool)
        actions = number * np.ones(buffer.actions.shape[-1], int)
        buffer.add(obs[0], actions, zeros, no, no, no, obs[1], mask_of(number, ppo_masked.factor_sizes(action_space)))
    numbers = torch.as_tensor(10.0 * np.arange(num_envs) + np.arange(num_steps)[:, None], dtype=torch.float32)
    values = torch.cat([numbers, numbers[-1:] + 1])
    buffer.compute_returns(numbers + 1000, values)
    return buffer


def mask_of(number, sizes):
    """A mask that tells the number (…, 1) of a row."""
    mask = number >> np.arange(sum(sizes)) & 1
    mask[..., np.cumsum(sizes) - 1] = 1
    return mask


def check_rows(batch, sizes):
    """AssertionError unless every field of every row, mask included, is of the same row."""
    numbers = batch.old_values.int().numpy()
    observations = batch.observations if isinstance(batch.observations, dict) else {"a": batch.observations}
    for values in observations.values():
        close(values.reshape(-1), numbers)
    close(batch.actions[:, 0], numbers)
    close(batch.old_log_prob, numbers + 1000)
    close(batch.returns, batch.advantages + batch.old_values)
    assert batch.action_masks.dtype == torch.bool
    close(batch.action_masks, mask_of(numbers[:, None], sizes))


BUFFERS = {
    "array": (MaskableRolloutBuffer, ppo_masked.MaskableRolloutBufferSamples),
    "dict": (MaskableDictRolloutBuffer, ppo_masked.MaskableDictRolloutBufferSamples),
}
both_buffers = pytest.mark.parametrize("buffer_class, samples", BUFFERS.values(), ids=BUFFERS.keys())


def check_get(buffer_class, samples, action_space):
    """Batches of 4 out of 6 rows: 4 and 2; None: all; every row once; all fields, masks included, of the same row."""
    buffer, sizes = counted(buffer_class, action_space=action_space), ppo_masked.factor_sizes(action_space)
    flat = CASES["rollout_flatten_order"]["expected"]["flat"]
    for batch_size, lengths in ((4, [4, 2]), (None, [6]), (6, [6]), (7, [6]), (1, [1] * 6)):
        batches = list(buffer.get(batch_size))
        assert [len(batch.actions) for batch in batches] == lengths
        for batch in batches:
            assert isinstance(batch, samples)
            check_rows(batch, sizes)
        assert sorted(x.item() for batch in batches for x in batch.old_values) == sorted(flat)


@both_buffers
@every_action_space
def test_get(buffer_class, samples, action_space):
    """Fails if a row is lost or doubled, or if a mask comes with another row's observation."""
    check_get(buffer_class, samples, action_space)


def test_names_of_the_fields():
    """Fails if a field of the samples is renamed or moved."""
    names = "observations", "actions", "old_values", "old_log_prob", "advantages", "returns", "action_masks"
    for _, samples in BUFFERS.values():
        assert samples._fields == names
    assert [samples.__name__ for _, samples in BUFFERS.values()] == [
        "MaskableRolloutBufferSamples", "MaskableDictRolloutBufferSamples"]  # fmt: skip


class NoShuffle:
    """A generator that leaves rows in their order."""

    def permutation(self, rows):
        return rows


@both_buffers
def test_flat_batches_are_time_major(buffer_class, samples):
    """Fails if batches are flattened environment by environment (0, 1, 2, 10, 11, 12)."""
    (batch,) = counted(buffer_class).get(None, NoShuffle())
    assert batch.old_values.tolist() == CASES["rollout_flatten_order"]["expected"]["flat"]
    check_rows(batch, [4])


def test_order_is_random_and_repeatable():
    """Fails if get does not shuffle, gives the same order twice, or another order for the same generator."""
    buffer = counted(num_steps=20)
    orders = [torch.cat([b.old_values for b in buffer.get(7, rng)]).tolist()
              for rng in (np.random.default_rng(1), np.random.default_rng(1), None, None)]  # fmt: skip
    assert orders[0] == orders[1] and orders[2] != orders[3] != orders[0] != sorted(orders[0])


class MaskOfNextRow(MaskableRolloutBuffer):
    """Stores the mask of the next observation."""

    def add(self, *step):
        super().add(*step)
        self.action_masks = np.roll(self.action_masks, -1, 0) if self.row == 0 else self.action_masks


class EnvironmentMajorMasks(MaskableRolloutBuffer):
    """Flattens the masks in another order than everything else."""

    def tensors(self, *names):
        tensors = super().tensors(*names)
        if "action_masks" in names:
            tensors[-1] = tensors[-1].swapaxes(0, 1).reshape(tensors[-1].shape)
        return tensors


class DropsLast(MaskableRolloutBuffer):
    """Leaves out the last, short batch."""

    def get(self, batch_size=None, rng=None):
        return (b for b in super().get(batch_size, rng) if batch_size is None or len(b.actions) == batch_size)


class FloatMasks(MaskableRolloutBuffer):
    """Stores masks as floats."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.action_masks = self.action_masks.astype(np.float32)


@pytest.mark.parametrize("faulty", [MaskOfNextRow, EnvironmentMajorMasks, DropsLast, FloatMasks])
def test_faulty_buffers_are_caught(faulty):
    """Fails if the check above would not notice masks of other rows, lost rows, or masks that are no booleans."""
    with pytest.raises(AssertionError):
        check_get(faulty, ppo_masked.MaskableRolloutBufferSamples, ACTION_SPACES["Discrete"])


@both_buffers
def test_without_masks_all_is_valid(buffer_class, samples):
    """Fails if action_masks=None keeps what the rollout before had stored."""
    buffer = counted(buffer_class, num_steps=1)
    obs = {"a": np.zeros((2, 1)), "b": np.zeros(2)} if buffer_class is MaskableDictRolloutBuffer else np.zeros((2, 1))
    no = np.zeros(2, bool)
    assert not buffer.action_masks.all()
    buffer.add(obs, np.zeros((2, 1)), np.zeros(2), no, no, no, obs)
    assert buffer.action_masks.all()


@given(hnp.arrays(np.bool_, st.tuples(st.integers(1, 6), st.integers(1, 3))), st.integers(1, 7))
def test_reset_rows_are_never_in_a_batch(reset_rows, batch_size):
    """Fails if a reset row comes out, or a real row does not. An all-zero mask in a reset row is no error."""
    buffer = counted(num_steps=len(reset_rows), num_envs=reset_rows.shape[1])
    no, zeros = np.zeros(reset_rows.shape[1], bool), np.zeros(reset_rows.shape[1])
    for t, row in enumerate(reset_rows):
        obs = (10.0 * np.arange(len(row)) + t)[:, None]
        buffer.add(obs, obs, zeros, no, no, row, obs, ~row[:, None] * mask_of(obs.astype(int), [4]))
    numbers = 10 * np.arange(reset_rows.shape[1]) + np.arange(len(reset_rows))[:, None]
    batches = list(buffer.get(batch_size))
    assert sorted(x.item() for b in batches for x in b.observations[:, 0]) == sorted(numbers[~reset_rows].tolist())
    assert all(len(b.actions) == batch_size for b in batches[:-1])
    for b in batches:
        check_rows(b, [4])
    assert buffer.action_masks[reset_rows].all()
    for parts in (1, 2, 3):  # the same for learning
        rows = torch.cat(
            [torch.zeros(0), *(b.obs[0][:, 0] for b in buffer.minibatches(parts, np.random.default_rng(0)))]
        )
        assert sorted(rows.tolist()) == sorted(numbers[~reset_rows].tolist())


def test_large_action_sets_stay_small():
    """50,000 actions x 16 environments x 128 steps are 102 MB of booleans; with all of filling and reading them, under
    300 MB. Fails if masks are stored wider than a byte, or if a float copy (410 MB) of all of them is ever made.
    """
    actions, num_envs, num_steps = 50_000, 16, 128
    tracemalloc.start()
    buffer = MaskableRolloutBuffer(num_steps, num_envs, spaces.Box(-1, 1, (4,)), spaces.Discrete(actions))
    assert buffer.action_masks.nbytes <= actions * num_envs * num_steps
    obs, no, masks = np.zeros((num_envs, 4)), np.zeros(num_envs, bool), np.zeros((num_envs, actions), bool)
    masks[:, ::7] = True
    for _ in range(num_steps):
        buffer.add(obs, np.zeros((num_envs, 1)), np.zeros(num_envs), no, no, no, obs, masks)
    buffer.compute_returns(torch.zeros(num_steps, num_envs), torch.zeros(num_steps + 1, num_envs))
    rows, made, index = 0, [], torch.Tensor.__getitem__
    with pytest.MonkeyPatch.context() as patch:  # what torch makes is not seen by tracemalloc
        patch.setattr(torch.Tensor, "__getitem__", lambda self, key: made.append(index(self, key)) or made[-1])
        for batch in buffer.get(256):
            assert batch.action_masks.dtype == torch.bool
            rows += len(batch.action_masks)
            assert sum(tensor.nbytes for tensor in made) < 2 * 256 * actions  # of this batch
            made.clear()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == num_envs * num_steps
    assert peak < 150e6  # with a batch of 13 MB in torch far from 300


def test_evaluating_large_action_sets_goes_in_parts():
    """Fails if the logits of a whole rollout, 4 bytes per choice, are asked for at once."""
    buffer = MaskableRolloutBuffer(64, 4, spaces.Box(-1, 1, (1,)), spaces.Discrete(50_000))
    sizes = []

    def agent(obs_and_masks, actions):
        sizes.append(len(actions))
        assert obs_and_masks[1] is None or obs_and_masks[1].dtype == torch.bool
        return (torch.zeros(len(actions)),) * 3

    log_probs, values = buffer.evaluate(agent)
    assert log_probs.shape == (64, 4) and values.shape == (65, 4)
    assert max(sizes) * 50_000 * 4 < 20e6 and sum(sizes) == 65 * 4


# ---------------------------------------------------------------------------------------------------------- agent


def environments(num_envs=3, **kwargs):
    """(Args, MaskedEnvs) of Cue environments."""
    args = Args(env_id="masked_envs:Cue-v0", env_kwargs=json.dumps(kwargs), num_envs=num_envs, num_steps=16)
    return args, ppo_masked.make_envs(args, num_envs)


def rollout(args, envs, rollouts=1):
    """(agent, buffer) after whole rollouts, played as `train` does; every action is checked by the environment."""
    agent = ppo_masked.make_agent(args, envs)
    agent.flat.add_(torch.randn(agent.flat.shape, generator=torch.Generator().manual_seed(0)), alpha=0.3)
    buffer, rng = ppo_masked.make_masked_buffer(args, agent), np.random.default_rng(0)
    rows, _ = envs.reset(seed=1)
    resets = np.zeros(envs.num_envs, bool)
    for _ in range(rollouts * args.num_steps):
        obs, masks = agent.split(rows)
        actions = agent.sample(obs, masks, rng)
        rows, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
        buffer.add(obs, actions, rewards, terminated, truncated, resets, agent.split(rows)[0], masks)
        resets = terminated | truncated
    return agent, buffer


KINDS = [
    (kind, observation) for kind in ("discrete", "multidiscrete", "multibinary") for observation in ("vector", "dict")
]


@pytest.mark.parametrize("source", ["info", "method", "entry"])
@pytest.mark.parametrize("kind, observation", [*KINDS, ("discrete", "number")])
@pytest.mark.parametrize("final", ["zeros", None])
def test_masks_from_every_source(source, kind, observation, final):
    """Fails if an invalid action reaches an environment, if masks belong to other observations than those they come
    with, if a final observation's empty or missing mask is taken for an error, or if the mask is fed to the network.
    """
    args, envs = environments(source=source, kind=kind, observation=observation, final=final)
    assert {"info": "info[", "method": "action_masks()", "entry": "Dict observation"}[source] in envs.source
    assert "action_mask" not in envs.entries
    agent, buffer = rollout(args, envs, 3)
    coins = buffer.obs[:-1, ..., 0].astype(int) if observation != "number" else (buffer.obs[:-1] - 3).astype(int) // 2
    coins = coins.reshape(args.num_steps, args.num_envs)
    expected = np.array(masked_envs.MASKS[kind], bool)[coins]
    real = ~buffer.reset_rows
    assert (buffer.action_masks[real] == expected[real]).all()
    assert 0 < (~real).sum() < real.sum() and buffer.action_masks[~real].all()


def test_masks_of_a_native_vector_environment():
    """Fails if a vector environment's own action_masks() is not found, or if its rows go to the wrong slots."""
    args = Args(env_id="masked_envs:NativeCue-v0", num_envs=3, num_steps=16)
    envs = ppo_masked.make_envs(args, args.num_envs)
    assert isinstance(envs.unwrapped, masked_envs.NativeCues) and envs.source == "a method action_masks()"
    _, buffer = rollout(args, envs, 3)
    expected = np.array(masked_envs.MASKS["discrete"], bool)[buffer.obs[:-1, ..., 0].astype(int)]
    assert (buffer.action_masks == expected)[~buffer.reset_rows].all() and buffer.action_masks[buffer.reset_rows].all()


FIND_MASKS = ppo_masked.MaskedEnvs.masks


def of_the_step_before(envs, obs, infos, ended):
    """Masks that lag behind by one step."""
    now = FIND_MASKS(envs, obs, infos, ended)
    before, envs.before = getattr(envs, "before", now), now
    return before


def empty_at_the_end(envs, obs, infos, ended):
    """The empty masks of final observations as they are."""
    masks = FIND_MASKS(envs, obs, infos, ended)
    masks[ended] = infos["action_mask"][ended] if "action_mask" in infos else True
    return masks


def of_unset_slots_too(envs, obs, infos, ended):
    """Does not look at `_action_mask`: what was not set is taken for all zeros."""
    return FIND_MASKS(envs, obs, infos | {"_action_mask": slice(None)} if infos else infos, np.zeros_like(ended))


def all_valid(envs, obs, infos, ended):
    """Forgets the masks."""
    return np.ones_like(FIND_MASKS(envs, obs, infos, ended))


@pytest.mark.parametrize(
    "faulty, final",
    [(of_the_step_before, "zeros"), (empty_at_the_end, "zeros"), (of_unset_slots_too, None), (all_valid, "zeros")],
)
def test_faulty_masks_are_caught(faulty, final, monkeypatch):
    """Fails if the test above would not notice masks of other steps, missing ones, or empty ones at the end."""
    monkeypatch.setattr(ppo_masked.MaskedEnvs, "masks", faulty)
    with pytest.raises((ValueError, AssertionError)):
        test_masks_from_every_source("info", "discrete", "vector", final)


@pytest.mark.parametrize("kind, observation", [*KINDS, ("discrete", "number")])
def test_first_ratios_are_one(kind, observation):
    """Fails if acting and learning see different masks, observations or weights: on the first minibatch pi = mu."""
    agent, buffer = rollout(*environments(kind=kind, observation=observation), 2)
    log_probs, values = buffer.evaluate(agent)
    assert (log_probs <= 0).all() and (log_probs > -100).all()  # no action was invalid
    buffer.compute_returns(log_probs, values)
    for batch in buffer.minibatches(3, np.random.default_rng(0)):
        log_probs, _, values = agent(batch.obs, batch.actions)
        close((log_probs - batch.log_probs).exp().detach(), torch.ones(len(log_probs)))
        close(values.detach(), batch.values, 1e-5)


def test_naive_mask_learns_without_masks():
    """Fails if --naive-mask learns with masks, or acts without them: ratios are the share of the valid."""
    args, envs = environments()
    args.naive_mask = True
    agent, buffer = rollout(args, envs)  # whose environments refuse invalid actions
    buffer.compute_returns(*buffer.evaluate(agent))
    for batch in buffer.minibatches(2, np.random.default_rng(0)):
        obs, masks = batch.obs
        assert masks is None
        ratios = (agent(batch.obs, batch.actions)[0] - batch.log_probs).exp()
        share = agent.actor([obs]).softmax(1)
        valid = share[:, [0, 2]].sum(1) * (obs[:, 0] == 0) + share[:, 1:].sum(1) * (obs[:, 0] == 1)
        close(ratios.detach(), valid.detach(), 1e-5)
        assert (ratios < 0.99).all()


def test_no_mask_ignores_masks():
    """Fails if --no-mask still looks at a mask, or feeds the entry of that name to the network."""
    for source in ("info", "method", "entry", "nothing"):
        args = Args(env_id="masked_envs:Cue-v0", env_kwargs=json.dumps({"source": source, "lenient": True}), num_envs=3,
                    num_steps=64, no_mask=True)  # fmt: skip
        envs = ppo_masked.make_envs(args, 3)
        assert "action_mask" not in envs.entries
        _, buffer = rollout(args, envs)
        assert buffer.action_masks.all() and set(buffer.actions.ravel()) == {0, 1, 2, 3}


def test_masked_logits_learn_nothing():
    """Fails if a gradient step moves the logits of actions that were invalid in the whole batch."""
    args, envs = environments()
    agent, buffer = rollout(args, envs)
    buffer.action_masks[..., 1] = False
    buffer.action_masks[..., 2] = True
    buffer.actions[:] = 2
    buffer.compute_returns(*buffer.evaluate(agent))
    before = copy.deepcopy(agent.actor.rest[-1])
    ppo_masked.learn(agent, ppo_masked.Adam(agent.flat), buffer, 1e-2, args, np.random.default_rng(0))
    after = agent.actor.rest[-1]
    moved = (after.weight != before.weight).any(1) | (after.bias != before.bias)
    assert not moved[1] and moved[2]


@pytest.mark.parametrize("kind, observation", [*KINDS, ("discrete", "number")])
def test_acting_in_numpy_equals_torch(kind, observation):
    """Fails if acting in NumPy and the network that learns disagree."""
    agent, buffer = rollout(*environments(kind=kind, observation=observation))
    obs = buffer.observations(buffer.tensors("obs")[0].flatten(0, 1))
    expected = agent.actor([obs[name] for name in agent.entries] if isinstance(obs, dict) else [obs])
    arrays = {k: v.numpy() for k, v in obs.items()} if isinstance(obs, dict) else obs.numpy()
    close(agent.policy_output(arrays), expected.detach(), 1e-4)


def test_lookup_is_a_linear_layer_on_one_hot_vectors():
    """Fails if the encoder of discrete numbers, several or from another start, is not what it stands for."""
    rng = np.random.default_rng(0)
    for space in (spaces.Discrete(5, start=2), spaces.MultiDiscrete([3, 4], start=[1, -2])):
        encoder = ppo_masked.Encoder(space, 8, torch.Generator().manual_seed(0))
        for _ in range(10):
            space.seed(int(rng.integers(100)))
            x = space.sample()
            one_hot = torch.as_tensor(spaces.flatten(space, x)).float()
            expected = (one_hot @ encoder.weight + encoder.bias).tanh()
            batch = np.asarray(x, np.float32).reshape(1, -1)
            close(encoder(torch.as_tensor(batch))[0].detach(), expected.detach())
            close(
                encoder.numpy(batch, *(p.detach().numpy() for p in (encoder.weight, encoder.bias)))[0],
                expected.detach(),
            )


def test_deterministic_actions_are_the_likeliest_valid_ones():
    """Fails if the mode is of all actions, valid or not."""
    args, envs = environments()
    agent = ppo_masked.make_agent(args, envs)
    agent.flat.zero_()
    agent.actor.rest[-1].bias.data.copy_(torch.tensor([1.0, 4, 2, 3]))
    obs = np.zeros((3, 2), np.float32)
    masks = np.array([[1, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], bool)
    assert agent.sample(obs, masks).ravel().tolist() == [2, 1, 0]
    assert agent.act(np.concatenate([obs, masks], 1)).tolist() == [1, 0, -1]  # the space starts at -1


def test_actions_are_drawn_with_their_probabilities():
    """Fails if acting does not follow the renormalised probabilities: 1/4 and 3/4, within 5 deviations."""
    args, envs = environments()
    agent = ppo_masked.make_agent(args, envs)
    agent.flat.zero_()
    agent.actor.rest[-1].bias.data.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]).log())
    masks = np.tile(np.array([1, 0, 1, 0], bool), (20_000, 1))
    draws = agent.sample(np.zeros((20_000, 2), np.float32), masks, np.random.default_rng(0)).ravel()
    assert set(draws) == {0, 2} and abs((draws == 0).mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 20_000)


# ------------------------------------------------------------------------------------------------------ whole runs

CUE = dict(env_id="masked_envs:Cue-v0", num_envs=8, num_steps=32, num_minibatches=4, learning_rate=5e-3, gamma=0.5)
CUE |= dict(ent_coef=0.0, total_timesteps=6_000, eval_every=10**9, eval_episodes=50, torch_threads=1, progress=False)


@pytest.mark.parametrize("source, kind, observation", [
    ("info", "discrete", "number"), ("method", "multidiscrete", "vector"), ("entry", "multibinary", "dict"),
    ("entry", "discrete", "vector"),
])  # fmt: skip
def test_every_source_learns(source, kind, observation, tmp_path):
    """Fails if learning does not work with masks from one of the sources, one of the action spaces or Dicts.

    The best return is 1. The right action of each factor depends on both coins, and at random it is met at most half
    of the time.
    """
    kwargs = json.dumps({"source": source, "kind": kind, "observation": observation})
    final = ppo_masked.train(Args(**CUE, env_kwargs=kwargs, run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] > 0.95


NEEDLE = dict(env_id="masked_envs:Needle-v0", num_envs=8, num_steps=128, num_minibatches=8, update_epochs=40)
NEEDLE |= dict(learning_rate=3e-3, gamma=0.0, ent_coef=0.0, hidden_sizes=(512,), total_timesteps=1_950)
NEEDLE |= dict(eval_every=10**9, eval_episodes=20, torch_threads=1, progress=False)


@pytest.mark.parametrize("seed", [1, 2])
def test_70_actions_of_which_55_are_invalid(seed, tmp_path):
    """At least 90 of 100 within 2,048 steps. Fails if masks are not used in learning (see the next test)."""
    args = Args(**NEEDLE, seed=seed, run_dir=str(tmp_path / "run"))
    final = ppo_masked.train(args)
    assert final["eval_return_mean"] >= 90 and final["global_step"] <= 2048


def test_naive_mask_learns_worse(tmp_path):
    """Fails if the ablation is no ablation."""
    final = ppo_masked.train(Args(**NEEDLE, naive_mask=True, run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] < 85


def test_taxi_in_a_notebook(tmp_path, monkeypatch, capsys):
    """Fails if Taxi's masks are not found, if the run does not say so, or if load or evaluate do not work."""
    monkeypatch.chdir(tmp_path)
    args = Args(total_timesteps=3_000, eval_episodes=4, progress=False)
    assert args.env_id == "Taxi-v4"
    final = ppo_masked.train(args)
    assert 'action masks come from info["action_mask"]' in capsys.readouterr().out
    (run_dir,) = Path("runs").iterdir()
    agent = ppo_masked.load(run_dir, "last")
    assert ppo_masked.evaluate(agent, agent.args, 4, args.seed + ppo_masked.EVALUATION)[0] == final["eval_return_mean"]


@pytest.mark.slow
def test_taxi_is_learned(tmp_path):
    """Fails if Taxi is not learned nearly to its optimum, 7.93 on average (over 500 episodes: ± 0.12)."""
    final = ppo_masked.train(Args(eval_episodes=500, progress=False, run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] >= 7.3 and final["global_step"] < 305_000


@pytest.mark.slow
def test_compiled_it_learns(tmp_path):
    """Fails if the compiled loss, masks included, is another one."""
    kwargs = json.dumps({"kind": "multidiscrete"})
    final = ppo_masked.train(Args(**CUE, env_kwargs=kwargs, compile=True, run_dir=str(tmp_path / "run")))
    assert final["eval_return_mean"] > 0.95


def shell(folder, *flags, code=0):
    """Run `python ppo_masked.py flags…` in `folder`, expect the exit code, return the finished process."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "SDL_VIDEODRIVER": "dummy"}
    command = [sys.executable, "ppo_masked.py", *map(str, flags)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def figures(run_dir):
    """metrics.csv without the columns that hold times."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in ("seconds", "sps")} for row in csv.DictReader(file)]


@pytest.fixture
def alone(tmp_path):
    """An empty folder with nothing but ppo_masked.py in it."""
    (tmp_path / "ppo_masked.py").write_bytes(SOURCE)
    return tmp_path


def test_copied_alone_it_runs_resumes_and_evaluates(alone):
    """Fails if it imports a sibling, if a run that is broken off and resumed differs in one bit from an unbroken one,
    or if saved weights do not play as they did.
    """
    flags = [*SMALL, "--total-timesteps", 2000, "--checkpoint-every", 500, "--eval-every", 1000]
    done = shell(alone, *flags, "--run-dir", "one")
    assert sorted(path.name for path in alone.iterdir()) == ["one", "ppo_masked.py"]
    assert done.stderr == "" and 'info["action_mask"]' in done.stdout
    shell(alone, *flags, "--run-dir", "two")
    assert figures(alone / "one") == figures(alone / "two")  # same seed, same run
    # Break off after 1,000 steps: what a killed process leaves behind, for it saves at the same steps.
    code = "import ppo_masked, sys; full = ppo_masked.save_checkpoint\n"
    code += "def save(run_dir, args, run, *rest, **parts):\n    full(run_dir, args, run, *rest, **parts)\n"
    code += "    if run.step > 1000: sys.exit(9)\n"
    code += "ppo_masked.save_checkpoint = save; sys.argv[0] = 'ppo_masked.py'; ppo_masked.main()"
    command = [sys.executable, "-c", code, *map(str, flags), "--run-dir", "broken"]
    assert subprocess.run(command, cwd=alone, capture_output=True, text=True).returncode == 9
    assert len(figures(alone / "broken")) < len(figures(alone / "one"))
    shell(alone, "--resume", "broken", "--no-progress")
    assert figures(alone / "one") == figures(alone / "broken")
    states = [torch.load(alone / name / "checkpoint.pt", weights_only=True) for name in ("one", "two", "broken")]
    for name, tensor in states[0]["agent"].items():
        assert all(torch.equal(tensor, state["agent"][name]) for state in states), name
    assert states[0]["episodes"] == states[2]["episodes"] and states[0]["rng"] == states[2]["rng"]
    assert torch.equal(states[0]["obs"], states[2]["obs"])
    summary = json.loads((alone / "one" / "summary.json").read_text())
    line = shell(alone, "--evaluate", "one", "--model", "last").stdout
    assert f"{summary['eval_return_mean']:.2f} ± {summary['eval_return_std']:.2f}" in line


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(alone, kills=6):
    """Fails if a checkpoint lacks anything that the rest of the run depends on (masks included), or is half written."""
    flags = [*SMALL, "--total-timesteps", 4000 * kills, "--checkpoint-every", 256, "--normalize-reward"]
    shell(alone, *flags, "--run-dir", "unbroken")
    rng, checkpoint, argv, stamp = (
        random.Random(kills),
        alone / "killed/checkpoint.pt",
        [*flags, "--run-dir", "killed"],
        0,
    )
    for _ in range(kills):
        command = [sys.executable, "ppo_masked.py", *map(str, argv)]
        process = subprocess.Popen(
            command, cwd=alone, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        while process.poll() is None and (not checkpoint.exists() or checkpoint.stat().st_mtime_ns == stamp):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.2))
        assert process.poll() is None, "it finished before it could be killed"
        process.kill()
        process.wait()
        stamp, argv = checkpoint.stat().st_mtime_ns, ["--resume", "killed", "--no-progress"]
    shell(alone, *argv)
    assert figures(alone / "unbroken") == figures(alone / "killed")
    states = [torch.load(alone / name / "checkpoint.pt", weights_only=True) for name in ("unbroken", "killed")]
    assert all(torch.equal(tensor, states[1]["agent"][name]) for name, tensor in states[0]["agent"].items())
    assert states[0]["evaluations"] == states[1]["evaluations"]


@pytest.fixture
def complaint(monkeypatch, tmp_path, capfd):
    """complaint(flags): the one line on stderr that these flags must lead to; nothing may be written."""

    def call(*flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["ppo_masked.py", *flags])
        with pytest.raises(SystemExit) as stop:
            ppo_masked.main()
        err = capfd.readouterr().err
        assert stop.value.code == 2 and err.count("\n") == 1 and "Traceback" not in err, err
        assert not list(tmp_path.iterdir())
        return err

    return call


@pytest.mark.parametrize("flags, words", [
    ("--env-id CartPole-v1", ["action_mask", 'info["action_mask"]', "action_masks()"]),
    ("--env-id Pendulum-v1", ["Box", "ppo.py"]),
    ("--env-id masked_envs:Cue-v0 --env-kwargs {\"source\":\"nothing\"}", ["Dict", "info", "action_masks()"]),
    ("--env-id masked_envs:Cue-v0 --env-kwargs {\"observation\":\"text\"}", ["mission", "--wrappers"]),
    ("--env-id masked_envs:Cue-v0 --env-kwargs {\"observation\":\"image\"}", ["observation", "--wrappers"]),
    ("--no-mask --naive-mask", ["no_mask", "naive_mask"]),
    ("--device nonsense", ["nonsense"]),
    ("--num-envs 3 --num-steps 5 --num-minibatches 4", ["num_minibatches"]),
    ("--env-id Taxy-v4", ["Taxy-v4"]),
    ("--no-masks", ["masks"]),
])  # fmt: skip
def test_bad_input(flags, words, complaint):
    """Fails if bad input ends in a traceback, or the message does not name what is wrong."""
    err = complaint(*flags.split())
    assert all(word in err for word in words), err


def test_row_without_valid_action_ends_the_run(tmp_path):
    """Fails if an environment that leaves no action is not named, with step and row: a ValueError, and plain."""
    kwargs = json.dumps({"bad_at": 5})
    with pytest.raises(ValueError, match=r"Cue-v0, step \d+: row 0\b.*no valid action") as error:
        ppo_masked.train(Args(**CUE, env_kwargs=kwargs, run_dir=str(tmp_path / "run")))
    assert isinstance(error.value, UserError)


class Narrow(gym.Wrapper):
    """Gives masks that are too short."""

    def action_masks(self):
        return [True, True]


def test_mask_of_a_wrong_width():
    """Fails if a mask of another width than the actions' is stretched instead of refused."""
    args = Args(env_id="CartPole-v1", wrappers=("test_ppo_masked.Narrow", "gymnasium.wrappers.TimeAwareObservation"))
    assert "action_masks()" in ppo_masked.make_envs(args, 2).source
    args = Args(env_id="Acrobot-v1", wrappers=("test_ppo_masked.Narrow",))
    envs = ppo_masked.make_envs(args, 2)
    with pytest.raises(UserError, match="3 wide.* 2"):
        envs.reset(seed=1)


def test_importing_does_nothing(alone):
    """Fails if importing seeds, writes or starts anything."""
    code = (
        "import numpy, random, torch; numpy.random.seed(1); torch.manual_seed(1); random.seed(1); a = torch.rand(1)\n"
    )
    code += "torch.manual_seed(1); import ppo_masked; assert torch.rand(1) == a and not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-B", "-c", code], cwd=alone, check=True)
    assert [path.name for path in alone.iterdir()] == ["ppo_masked.py"]
