"""The numbers of action masks, worked out by hand: a lesson to be read beside ppo_masked.py.

What the script shares with ppo.py (returns, advantages, losses, statistics) is in test_ppo.py.
"""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.tools import IN_ORDER, close

NUMBER = spaces.Box(-np.inf, np.inf, (1,))  # an observation of one number
log = lambda *numbers: torch.tensor([numbers]).log()
bools = lambda *numbers: torch.tensor([numbers]) > 0
LOGITS, MASK = log(0.1, 0.2, 0.3, 0.4), bools(1, 0, 1, 0)  # actions 0 and 2 are valid


def slope(function, logits, factor=1.0):
    """d (factor * function(logits)) / d logits."""
    logits = logits.clone().requires_grad_()
    (factor * function(logits)).sum().backward()
    return logits.grad


def test_one_valid_action(script):
    """It is certain, whatever its logit: log-prob 0, entropy 0, nothing to learn. (With mere zeros in the softmax of
    1, 2, 3, 4, it would be log 0.2369 = -1.44.) Fails if the valid rest is not renormalised.
    """
    logits, mask = torch.tensor([[1.0, 2, 3, 4]]), bools(0, 0, 1, 0)
    pi = script.MaskedCategorical(logits, mask)
    assert pi.log_prob(torch.tensor([2])).item() == pi.entropy().item() == 0
    assert pi.mode().item() == pi.sample().item() == 2
    for invalid in (0, 1, 3):
        assert pi.log_prob(torch.tensor([invalid])).item() == -math.inf
    log_prob = lambda x: script.MaskedCategorical(x, mask).log_prob(torch.tensor([2]))
    entropy = lambda x: script.MaskedCategorical(x, mask).entropy()
    assert slope(log_prob, logits).tolist() == slope(entropy, logits).tolist() == [[0, 0, 0, 0]]


def test_two_valid_actions(script):
    """0.1 / 0.4 = 1/4 and 0.3 / 0.4 = 3/4. H = log 4 - 3/4 log 3 = 0.562335.

    d log p_0 / d l_b = [b = 0] - p_b = 3/4, -3/4; dH / d l_b = -p_b (log p_b + H): -1/4 (-1.3863 + 0.5623) = 0.205990
    and minus that. Fails if an invalid logit counts, or has a gradient of anything but exactly zero.
    """
    pi = script.MaskedCategorical(LOGITS, MASK)
    close(pi.log_prob(torch.tensor([0])), [math.log(0.25)])
    close(pi.log_prob(torch.tensor([2])), [math.log(0.75)])
    close(pi.entropy(), [0.562335])
    assert pi.mode().item() == 2
    of_log_prob = slope(lambda x: script.MaskedCategorical(x, MASK).log_prob(torch.tensor([0])), LOGITS)
    close(of_log_prob, [[0.75, 0, -0.75, 0]])
    assert of_log_prob[~MASK].tolist() == [0, 0]
    plain = script.MaskedCategorical(LOGITS)  # without a mask all is valid
    close(torch.stack([plain.log_prob(torch.tensor([a])).exp() for a in range(4)]).ravel(), [0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("factor", [1.0, 1.01, -1.01, 100.0])
def test_any_slope_from_above(script, factor):
    """The slopes of the last test, so many times. Fails if a masked log-prob, times a slope above 1, overflows: then
    infinity times probability 0 is NaN.
    """
    actual = slope(lambda x: script.MaskedCategorical(x, MASK).entropy(), LOGITS, factor)
    close(actual, factor * np.array([[0.205990, 0, -0.205990, 0]]), atol=1e-4)
    assert actual[~MASK].tolist() == [0, 0]


@pytest.mark.parametrize("sizes, mask, action, gradient", [
    ([2, 3], [1, 0, 1, 1, 0], [0, 1], [0, 0, -0.5, 0.5, 0]),  # MultiDiscrete: 0 of the first; 0 or 1 of the second
    ([2, 2], [1, 1, 0, 1], [1, 1], [-0.5, 0.5, 0, 0]),  # MultiBinary: the first bit is free, the second must be 1
])  # fmt: skip
def test_factors(script, sizes, mask, action, gradient):
    """All logits 0: log-prob log 1 + log 1/2, entropy 0 + log 2. d log p_a / d l = 1 - 1/2 and 0 - 1/2 in the free
    factor. Fails if a factor gets another's mask, or if there is one softmax over all factors.
    """
    logits, mask, action = torch.zeros(1, sum(sizes)), bools(*mask), torch.tensor([action])
    pi = script.MaskedCategorical(logits, mask, sizes)
    close(pi.log_prob(action), [math.log(0.5)])
    close(pi.entropy(), [math.log(2)])
    assert slope(lambda x: script.MaskedCategorical(x, mask, sizes).log_prob(action), logits).tolist() == [gradient]
    draws = torch.cat([pi.sample() for _ in range(60)])
    assert len(set(map(tuple, draws.tolist()))) == 2  # both values of the free factor, one of the other


@pytest.mark.parametrize("sizes, mask, words", [
    (None, [[1, 0, 0], [0, 0, 0], [0, 0, 0]], r"row 1\b.* no valid action"),
    ([1, 2], [[1, 0, 1], [1, 1, 1], [1, 0, 0]], r"row 2\b.* no valid action"),  # of the second factor
    ([1, 2], [[0, 1, 1], [1, 0, 0], [1, 1, 1]], r"row 0\b.* no valid action"),
    (None, [[1, 1, 0], [1, 1, math.nan], [1, 1, 1]], r"row 1\b.* NaN"),
])  # fmt: skip
def test_refused(script, sizes, mask, words):
    """Fails if a mask that leaves nothing passes, if a NaN counts as valid, or if another row is named."""
    with pytest.raises(ValueError, match=words):
        script.MaskedCategorical(torch.zeros(3, 3), torch.tensor(mask), sizes)


KINDS = {  # action space; masks of the three real rows; actions, of which each is valid
    "Discrete": (spaces.Discrete(3), [[1, 0, 1], [0, 1, 0], [1, 1, 1]], [[2], [1], [0]]),
    "MultiDiscrete": (
        spaces.MultiDiscrete([2, 3]),
        [[1, 0, 1, 1, 0], [0, 1, 0, 0, 1], [1, 1, 1, 1, 1]],
        [[0, 1], [1, 2], [1, 0]],
    ),
    "MultiBinary": (spaces.MultiBinary(2), [[1, 1, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1]], [[0, 1], [1, 0], [1, 1]]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffer_class", ["MaskableRolloutBuffer", "MaskableDictRolloutBuffer"])
def test_a_rollout_with_masks(script, buffer_class, kind):
    """V(s) = s, gamma = 1/2. Returns 1 + 6/2 = 4; 2 + 8/2 = 6, cut off at s = 8; -; 3 + 4/2 = 5. In a Dict, s and 10 s
    are the entries. Fails if a mask goes with another row, or if the nonsense in the reset row is looked at.
    """
    space, masks, actions = KINDS[kind]
    no_mask = np.full(len(masks[0]), math.nan)
    rows = [  # s, r, truncated, reset row, mask, action
        (1, 1, False, False, masks[0], actions[0]),
        (2, 2, True, False, masks[1], actions[1]),
        (8, 0, False, True, no_mask, actions[0]),  # the last observation of the episode; what is done is ignored
        (3, 3, False, False, masks[2], actions[2]),
    ]
    is_dict = buffer_class == "MaskableDictRolloutBuffer"
    observation = lambda s: {"a": [[s]], "b": [10 * s]} if is_dict else [[s]]
    observation_space = spaces.Dict(a=NUMBER, b=spaces.Discrete(90)) if is_dict else NUMBER
    buffer = getattr(script, buffer_class)(4, 1, observation_space, space)
    for t, (s, reward, truncated, reset_row, mask, action) in enumerate(rows):
        buffer.add(t, observation(s), [action], reward, False, truncated, [reset_row], [mask])
    buffer.set_obs(4, observation(4))
    values = torch.tensor([[1.0], [2], [8], [3], [4]])
    log_probs = -values[:-1]
    buffer.compute_advantages(log_probs, values, log_probs, script.Args(estimator="vanilla", gamma=0.5))
    (batch,) = buffer.get(batch_size=None, rng=IN_ORDER)
    assert type(batch) is getattr(script, f"{buffer_class}Samples")
    close((batch.observations["a"] if is_dict else batch.observations).ravel(), [1, 2, 3])
    if is_dict:
        close(batch.observations["b"], [10, 20, 30])
    close(batch.actions, actions)
    close(batch.old_values, [1, 2, 3])
    close(batch.old_log_prob, [-1, -2, -3])
    close(batch.advantages, [3, 4, 2])
    close(batch.returns, [4, 6, 5])
    assert batch.action_masks.dtype == torch.bool and batch.action_masks.int().tolist() == masks
    assert buffer.action_masks[2].all()


def test_sizes_of_batches(script):
    """8 rows, one of them a reset row: 7 in 4 minibatches are 2 + 2 + 2 + 1; in batches of 3 they are 3 + 3 + 1.

    Fails if there are fewer minibatches than asked though there are rows enough, or if one is empty.
    """
    buffer = script.MaskableRolloutBuffer(8, 1, NUMBER, spaces.Discrete(2))
    buffer.reset_rows[3] = True
    buffer.compute_advantages(torch.zeros(8, 1), torch.zeros(9, 1), torch.zeros(8, 1), script.Args())
    sizes = lambda batches: [len(batch.actions) for batch in batches]
    assert sizes(buffer.minibatches(4, IN_ORDER)) == [2, 2, 2, 1]
    assert sizes(buffer.minibatches(5, IN_ORDER)) == [2, 2, 1, 1, 1]  # with 2 rows in each but the last, 4 parts
    assert sizes(buffer.minibatches(8, IN_ORDER)) == [1] * 7
    assert (sizes(buffer.get(3)), sizes(buffer.get())) == ([3, 3, 1], [7])


@pytest.mark.parametrize("naive_mask, ratio", [(False, 1.0), (True, 0.4)])
def test_the_first_ratio(script, naive_mask, ratio):
    """The policy has not moved: r = 1, no KL, nothing clipped. The naive variant, which learns without masks, has
    pi/pi_old = 0.1 / (1/4) = 0.3 / (3/4) = 0.4 and a KL of 0.4 - 1 - log 0.4. Advantages 1 and -1, not normalised: the
    surrogate is 0.4 for the first and clipped to -0.8 for the second. Fails if acting and learning see different masks.
    """
    args = script.Args(naive_mask=naive_mask, norm_adv=False, ent_coef=0.0, vf_coef=0.0)
    agent = script.MaskedAgent({"observation": NUMBER}, spaces.Discrete(4), args)
    agent.actor.rest[-1].bias.data = LOGITS[0]  # all there is where observations are 0; and V = 0
    buffer = script.MaskableRolloutBuffer(1, 2, NUMBER, spaces.Discrete(4))
    buffer.add(0, np.zeros((2, 1)), [[0], [2]], [1, -1], True, False, False, [[1, 0, 1, 0]] * 2)
    log_probs, values = buffer.log_probs_and_values(agent)
    close(log_probs, [[math.log(0.25), math.log(0.75)]])
    buffer.compute_advantages(log_probs, values, log_probs, args)
    (batch,) = buffer.minibatches(1, IN_ORDER)
    loss, figures = script.masked_ppo_loss(agent, batch, args)
    close(figures["approx_kl"], ratio - 1 - math.log(ratio))
    close(figures["clip_fraction"], float(naive_mask))
    close(loss, -(0.4 - 0.8) / 2 if naive_mask else 0.0)
    loss.backward()
    gradient = agent.actor.rest[-1].bias.grad
    if naive_mask:  # of the first alone: -0.4 / 2 (1[a] - pi)
        close(gradient, -0.2 * np.array([0.9, -0.2, -0.3, -0.4]))
    else:  # of both: -1/2 (3/4, -3/4) + 1/2 (-1/4, 1/4); nothing is learnt of what was invalid
        close(gradient, [-0.5, 0, 0.5, 0])
        assert gradient[[1, 3]].tolist() == [0, 0]
