"""Well-known faulty versions of what masks add to ppo.py: each must be caught, by name, by a check that passes here.

Those of what ppo_masked.py shares with ppo.py stand in test_ppo.py.
"""

from functools import partial

import numpy as np
import pytest
import torch

from tests.against_loops import test_ppo_masked as loops
from tests.by_hand import test_ppo_masked as by_hand
from tests.tools import by_name, mutant, passes

NEW_LOGITS = "torch.where(mask, logits, -torch.inf)"
LOG_PROBS = "self.log_probs = [factor.log_softmax(-1) for factor in logits.split(sizes, -1)]"
PUBLISHED = "zip(logits.split(sizes, -1), mask.split(sizes, -1))"
MULTIDISCRETE = partial(by_hand.test_factors, sizes=[2, 3], mask=[1, 0, 1, 1, 0], action=[0, 1],
                        gradient=[0, 0, -0.5, 0.5, 0])  # fmt: skip
NOTHING = partial(by_hand.test_refused, sizes=None, mask=[[1, 0, 0], [0, 0, 0]], words=r"row 1\b.* no valid")
NOTHING_IN_ONE = partial(by_hand.test_refused, sizes=[1, 2], mask=[[1, 0, 1], [1, 1, 1], [1, 0, 0]], words=r"row 2\b")
NAN = partial(by_hand.test_refused, sizes=None, mask=[[1, 1, 0], [1, 1, np.nan], [1, 1, 1]], words=r"row 1\b.* NaN")
NOTHING = partial(NOTHING, mask=[[1, 0, 0], [0, 0, 0], [1, 1, 1]])
SLOPE = partial(by_hand.test_any_slope_from_above, factor=1.01)
ROLLOUT = partial(by_hand.test_a_rollout_with_masks, buffer_class="MaskableRolloutBuffer", kind="MultiDiscrete")
DICT = partial(ROLLOUT, buffer_class="MaskableDictRolloutBuffer")
ROWS = np.array([[0, 0], [1, 0], [0, 1], [0, 0]], bool)
BATCHES = partial(loops.test_batches.hypothesis.inner_test, buffer_class="MaskableRolloutBuffer", kind="Discrete",
                  reset_rows=ROWS, size=4)  # fmt: skip
RATIO = partial(by_hand.test_the_first_ratio, naive_mask=False, ratio=1.0)
NAIVE = partial(by_hand.test_the_first_ratio, naive_mask=True, ratio=0.4)
INFO = partial(loops.test_masks_from_every_source, source="info", kind="discrete", observation="vector", final="zeros")
SILENT = partial(INFO, final=None)
METHOD = partial(INFO, source="method", final=None)
FOUL = partial(INFO, final="nan")
ENTRY = partial(INFO, source="entry", observation="dict")
ACTING = partial(loops.test_first_ratios_are_one, kind="discrete", observation="vector")
TRAINING = partial(loops.test_training, case={})

MISTAKES = {  # (where it is made, what catches it): {name: text that stands there -> what stands there in its place}
    ("MaskedCategorical.__init__", by_hand.test_two_valid_actions): {
        "mask ignored": f"{NEW_LOGITS} -> logits",
        "-10 added": f"{NEW_LOGITS} -> logits - 10.0 * ~mask",
        "True means invalid": f"{NEW_LOGITS} -> torch.where(mask, -torch.inf, logits)",
        "logits times mask": f"{NEW_LOGITS} -> logits * mask",
    },
    ("MaskedCategorical.__init__", by_hand.test_one_valid_action): {
        "published: zeros in the softmax, not renormalised": f"logits = {NEW_LOGITS}\n        {LOG_PROBS} -> "
        f"self.log_probs = [(f.softmax(-1) * m).clamp(min=2**-23).log() for f, m in {PUBLISHED}]",
    },
    ("MaskedCategorical.__init__", MULTIDISCRETE): {
        "masks of the factors in another order": f"logits = {NEW_LOGITS} -> "
        f"mask = torch.cat(mask.split([3, 2], -1)[::-1], -1); logits = {NEW_LOGITS}",
        "one softmax over all factors": "factor.log_softmax(-1) for factor in logits.split(sizes, -1) -> "
        "factor for factor in logits.log_softmax(-1).split(sizes, -1)",
    },
    ("MaskedCategorical.entropy", SLOPE): {
        "infinity in a slope": "torch.where(mask, log_probs, 0.0) -> "
        "torch.where(mask, log_probs, torch.finfo(log_probs.dtype).min)",
    },
    ("MaskedCategorical.entropy", by_hand.test_two_valid_actions): {
        "0 times infinity": "torch.where(mask, log_probs, 0.0) -> log_probs",
    },
    ("check_masks", NOTHING): {"nothing valid passes": "if not can_act.all() -> if False"},
    ("check_masks", NOTHING_IN_ONE): {"one factor is enough": "masks[:, first : first + size] -> masks"},
    ("check_masks", NAN): {"NaN is valid": "np.isnan(masks).any(): -> False:"},
    ("MaskableRolloutBuffer.__init__", BATCHES): {"masks as floats": "sum(self.sizes)), bool) -> sum(self.sizes)))"},
    ("MaskableRolloutBuffer.add", ROLLOUT): {
        "reset rows are checked": "masks[self.reset_rows[t]] = True -> pass",
        "masks not kept": "self.action_masks[t] = masks -> pass",
    },
    ("MaskableRolloutBuffer.add", loops.test_without_masks_all_is_valid): {
        "foul masks are kept": "check_masks(masks, self.sizes) -> pass",
        "old masks are kept": "np.ones_like(self.action_masks[t]) -> self.action_masks[t]",
    },
    ("MaskableRolloutBuffer.take", BATCHES): {
        "mask of the next row": "self.action_masks[steps, envs] -> np.roll(self.action_masks, -1, 0)[steps, envs]",
        "masks environment by environment": "self.action_masks[steps, envs] -> "
        "self.action_masks.swapaxes(0, 1).reshape(self.action_masks.shape)[steps, envs]",
    },
    ("MaskableRolloutBuffer.get", BATCHES): {
        "the rest is left out": "range(0, len(order), size) -> range(0, len(order) - size + 1, size)",
        "reset rows drawn": "np.argwhere(~self.reset_rows) -> np.argwhere(self.rewards > -1)",
    },
    ("MaskableRolloutBuffer.minibatches", by_hand.test_sizes_of_batches): {
        "fewer parts than asked": "np.array_split(order, num_minibatches) -> "
        "np.split(order, range(-(-len(order) // num_minibatches), len(order), -(-len(order) // num_minibatches)))",
        "empty parts": "if len(rows) > 0 -> if True",
    },
    ("MaskableRolloutBuffer.minibatches", TRAINING): {
        "reset rows learnt": "np.argwhere(~self.reset_rows) -> np.argwhere(self.rewards > -1)",
    },
    ("MaskableRolloutBuffer.log_probs_and_values", RATIO): {
        "old log-probs without masks": "masks[steps].flatten(0, 1)) -> None)",
    },
    ("MaskableRolloutBuffer.log_probs_and_values", loops.test_large_action_sets_are_evaluated_in_parts): {
        "all at once": "split(size) -> split(T)",
    },
    ("MaskableDictRolloutBuffer.observations", DICT): {
        "entries swapped": "zip(self.shapes, -> zip([*self.shapes][::-1],",
    },
    ("masked_ppo_loss", RATIO): {
        "learns without masks": "None if args.naive_mask else batch.action_masks -> None",
        "naive the wrong way round": "None if args.naive_mask else -> None if not args.naive_mask else",
    },
    ("masked_ppo_loss", NAIVE): {"naive variant has masks": "None if args.naive_mask else -> "},
    ("masked_ppo_loss", TRAINING): {
        "entropy lowered": "- args.ent_coef -> + args.ent_coef",
        "value weighs 1": "args.vf_coef * v_loss -> v_loss",
        "ratio inverted": "log_probs - batch.old_log_prob -> batch.old_log_prob - log_probs",
    },
    ("MaskedAgent.masked_logits", loops.test_deterministic_actions_are_the_likeliest_valid_ones): {
        "acts without masks": "np.where(masks, self.policy_output(obs), -np.inf) -> self.policy_output(obs)",
    },
    ("MaskedAgent.masked_logits", loops.test_draws_have_their_probabilities): {
        "acts where nothing is valid": "check_masks(masks, self.sizes) -> pass",
    },
    ("MaskedEnvs.masks", INFO): {
        "masks of the step before": "return masks != 0 -> self.late = getattr(self, 'now', masks != 0); "
        "self.now = masks != 0; return self.late",
        "masks forgotten": "masks != 0 -> masks >= 0",
        "empty masks of final observations": "told = ~ended -> told = ended | True",
    },
    ("MaskedEnvs.masks", FOUL): {"NaN of final observations": "told = ~ended -> told = ended | True"},
    ("MaskedEnvs.masks", SILENT): {
        "unset slots taken for zeros": 'infos.get("_action_mask", True) -> True; told |= True',
    },
    ("MaskedEnvs.masks", METHOD): {"asked when the episode is over": "told = ~ended -> told = ended | True"},
    ("MaskedEnvs.__init__", ENTRY): {
        "mask fed to the network": 'self.entries.pop("action_mask" -> self.entries.get("action_mask"',
    },
    ("train", TRAINING): {
        "gradients add up": "optimizer.zero_grad() -> 0",
        "last observation not stored": "buffer.set_obs(args.num_steps, last_obs) -> 0",
        "masks of the next observation": "obs_and_masks, rewards, terminated, truncated, _ = "
        "envs.step(agent.to_env(actions)) -> obs_and_masks, rewards, terminated, truncated, _ = "
        "envs.step(agent.to_env(actions)); masks = agent.split(obs_and_masks)[1]",
        "reset row that opens a rollout forgotten": "for t in -> reset_rows = reset_rows & False\n        for t in",
    },
}  # fmt: skip


@pytest.mark.parametrize("where, check, change", **by_name(MISTAKES))
def test_mistake_is_caught(script, where, check, change):
    """Fails if a known mistake passes the check that is there for it, or if the script does not pass this check."""
    assert passes(check, script)
    torch.manual_seed(0)
    faulty = mutant(script, where, *change.split(" -> "))
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError, RuntimeError, faulty.UserError)):
        check(faulty)
