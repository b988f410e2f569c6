"""What the functions of numbers share: what cannot be right is refused by the name of the argument,
nothing that is given is changed, and the exercises ask for what they compute."""

import math
from functools import partial

import pytest
import torch
from small_models import small_model

from rlhf_nb import checks, masks
from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.gae import gae, returns_from
from rlhf_nb.kl import estimate_kl, full_kl, k1
from rlhf_nb.kl_control import AdaptiveKLController, FixedKLController
from rlhf_nb.logprobs import response_logits, token_entropy, token_logprobs
from rlhf_nb.losses import (
    explained_variance,
    policy_diagnostics,
    policy_loss,
    value_diagnostics,
    value_loss,
)
from rlhf_nb.moments import RunningMoments
from rlhf_nb.packing import last_index, log_ratio, position_ids, reached_stop
from rlhf_nb.shaping import clip_scores, penalize_missing_eos, replace_missing_eos, shape_rewards

X, COLUMN, ROW = torch.ones(2, 3), torch.ones(2, 1), torch.ones(2)
MASK, ENDED, IDS = X.bool(), ROW.bool(), X.long()
HOLES = [torch.tensor([[True] * 3, row]) for row in ([True, False, True], [False, True, True])]
LEFT = torch.tensor([[False, True, True], [True] * 3])
loss, logp = partial(policy_loss, X, X, X), partial(response_logprobs, small_model("llama"))
adaptive = partial(AdaptiveKLController, 0.1)

REFUSED = {  # what the error must say: calls that it refuses
    "at least one": [(pad, [], 0) for pad in (masks.left_pad, masks.right_pad)],
    "row 1": [(pad, [[1], []], 0) for pad in (masks.left_pad, masks.right_pad)]
    + [(gae, X, X, mask) for mask in HOLES],
    "row 0": [(gae, X[:1], X[:1], torch.tensor([[0, 1, 1]]))],
    "pad_token": [(pad, [[1]], None) for pad in (masks.left_pad, masks.right_pad)],
    "eos_token_id": [
        (f, IDS, stops)
        for f in (masks.response_mask, reached_stop)
        for stops in (None, [None], 9, "eos", [9.0])
    ],
    r"\[2, 3\].*\[2, 1\]": [
        (f, X, COLUMN.bool())
        for f in (masks.masked_sum, masks.masked_mean, masks.masked_var, masks.whiten)
    ],
    r"\[2, 3\].*\[2, 1\].*one shape": [
        (log_ratio, X, COLUMN),
        (log_ratio, X, COLUMN, MASK),
        (log_ratio, X, X, MASK[:, :1]),
    ],
    "squeeze": [(gae, X, X[..., None], MASK), (shape_rewards, COLUMN, X, MASK, 0.1)],
    r"rewards \[1, 3\]": [(gae, X[:1], X, MASK)],
    "bootstrap": [(partial(gae, bootstrap=COLUMN), X, X, MASK)],
    "gamma": [(gae, X, X, MASK, gamma) for gamma in (1.1, math.nan)],
    "lam": [(gae, X, X, MASK, 1.0, lam) for lam in (-0.1, math.nan)],
    r"lam \[2, 3\]: give one number, or one for each row, \[2\]": [(gae, X, X, MASK, 1.0, X)],
    r"lam \[\]": [(gae, X, X, MASK, 1.0, torch.tensor(0.5))],
    r"lam\[1\]=1.5": [(gae, X, X, MASK, 1.0, torch.tensor([0.5, 1.5]))],
    r"lam\[1\]=nan": [(gae, X, X, MASK, 1.0, torch.tensor([0.5, math.nan]))],
    r"kl \[2, 1\]": [(shape_rewards, ROW, COLUMN, MASK, 0.1)],
    "kl_coef": [(shape_rewards, ROW, X, MASK, coef) for coef in (-0.1, math.nan, math.inf)]
    + [(FixedKLController, coef) for coef in (-0.1, math.nan)]
    + [(AdaptiveKLController, 0.0, 6, 100)],
    "kl_target": [(adaptive, 0, 100)],
    "kl_horizon": [(adaptive, 6, math.inf), (adaptive(6.0, horizon=10).update, 0.0, 512)],
    "missing_eos_penalty": [(penalize_missing_eos, ROW, ENDED, x) for x in (-1.0, math.nan)],
    "reached_stop": [(penalize_missing_eos, ROW, MASK, 1.0), (replace_missing_eos, X, MASK)],
    "penalty_reward_value": [(replace_missing_eos, ROW, ENDED, -math.inf)],
    "score_clip": [(clip_scores, ROW, clip) for clip in (0.0, math.nan)],
    "count": [(RunningMoments().load_state_dict, {"mean": 0.0})],
    "NaN or inf": [(RunningMoments().update, torch.tensor([1.0, math.inf, -math.inf]))],
    "temperature": [
        (f, *given, temperature)
        for f, given in ((token_logprobs, (X, IDS[:, 0])), (token_entropy, (X,)))
        for temperature in (0.0, -1.0, math.nan, math.inf)
    ],
    "pair": [(token_logprobs, torch.zeros(2, 3, 5), torch.zeros(2, 4).long())],
    r"\[B, T\]": [(logp, IDS, LEFT, IDS, MASK[:, :2])],
    "left": [
        (logp, IDS, LEFT.flip(1), IDS, MASK),
        (partial(response_logits, logp.args[0]), IDS[:, :0], LEFT[:, :0], IDS, MASK),
    ],
    "entropy is 'yes': give 'learn', 'look', or None": [
        (partial(logp, entropy="yes"), IDS, LEFT, IDS, MASK)
    ],
    "cliprange": [(partial(loss, cliprange=x), MASK) for x in (-0.1, 2.0, math.nan)],
    "cliprange_high": [(partial(loss, cliprange_high=-1.0), MASK)],
    "dual_clip": [(partial(loss, dual_clip=0.5), MASK)],
    "cliprange_value": [(partial(value_loss, cliprange_value=-1.0), X, X, X, MASK)],
    "mask": [(loss, MASK[:, :2])],
    "k1, k2, k3, abs.*full": [(estimate_kl, ROW, ROW, "kl")],
    "full_kl": [(estimate_kl, ROW, ROW, "full")],
    "one shape": [(k1, X, COLUMN)],
    "vocabulary": [(full_kl, X, torch.zeros(2, 4))],
}


# catches: silent broadcasting (a [B, 1] mask that is counted once, a value with a last dimension of
# one), holes in the mask, one lambda for each token taken for one for each row, a check of the first
# row alone, a coefficient that turns negative and rewards distance, errors that do not name the field
@pytest.mark.parametrize("says", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(says):
    for call, *given in REFUSED[says]:
        with pytest.raises(ValueError, match=says):
            call(*given)


# catches: KL shaped in the tensor that is logged (slime 2114), values zeroed in the tensor that the
# value loss clips against
def test_arguments_stay_as_they_were():
    torch.manual_seed(0)
    x, y, z = torch.randn(3, 2, 3)
    mask, rows, prompts = torch.tensor([[True] * 3, [True, False, False]]), [[1], [2, 3]], 5 * IDS
    given = (x, y, z, mask, prompts, LEFT)
    before = [one.clone() for one in given]
    for f in (masks.masked_sum, masks.masked_mean, masks.masked_var, masks.whiten):
        f(x, mask)
    position_ids(mask), last_index(mask), masks.left_pad(rows, 0), masks.right_pad(rows, 0)
    shape_rewards(x[:, 0], y, mask, 0.1)
    penalize_missing_eos(x[:, 0], ENDED, 1.0), replace_missing_eos(x[:, 0], ~ENDED)
    clip_scores(x[:, 0], 0.1), RunningMoments(2, 0.0, 1.0).normalize(x[:, 0])
    returns_from(gae(x, y, mask), y, mask), explained_variance(x, z, mask)
    for f in (policy_loss, value_loss, policy_diagnostics, value_diagnostics):
        f(x, y, z, mask)
    logp(prompts, LEFT, prompts, mask)
    assert all(torch.equal(*pair) for pair in zip(given, before)) and rows == [[1], [2, 3]]


# catches: a catalogue that teaches something else than what the trainer does: the two were written
# apart
def test_the_package_passes_its_own_exercises():
    assert checks.check_mean(masks.masked_mean) and checks.check_response_mask(masks.response_mask)
    assert checks.check_gae(gae) and checks.check_shaping(lambda *x: shape_rewards(*x)[0])
    assert checks.check_policy_loss(policy_loss) and checks.check_value_loss(value_loss)
