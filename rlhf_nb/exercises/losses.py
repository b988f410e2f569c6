"Exercises of the page on losses."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import dirty, draw_lengths, normal, pick, ragged_mask, uniform
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "11_losses"

# ---- The policy loss ----


def my_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float
) -> Tensor:
    advantages = advantages[mask]
    ratio = torch.exp(logprobs[mask] - old_logprobs[mask])
    clipped = ratio.clamp(1 - cliprange, 1 + cliprange)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    return loss.sum()


OFF = 0.005  # so that nothing drawn is just on the edge of a clip, where gradients are a choice
FAR = (12.0, -30.0), (-12.0, 30.0), (1.0, 30.0), (-1.0, -30.0)  # log-ratio and advantage


def _policy_cases(g: Generator) -> list[Case]:
    def case(ratio: Tensor, advantages: Tensor, mask: Tensor, dirt: float, clip: float) -> Case:
        old = uniform(g, -3, -0.2, *mask.shape) - ratio.log().clamp(min=0)
        old = dirty(old, mask, dirt)
        new, advantages = dirty(old + ratio.log(), mask, dirt), dirty(advantages, mask, 7.0)
        given = dict(logprobs=new, old_logprobs=old, advantages=advantages, mask=mask)
        return given | dict(cliprange=clip)

    def draw_case(mask: Tensor, dirt: float, cliprange: float) -> Case:
        ratio, advantages = OFF + uniform(g, 0.3, 1.9, *mask.shape), normal(g, *mask.shape)
        return case(ratio, advantages, mask, dirt, cliprange)

    both = torch.tensor([[0.5, 1.5, 1.1, 1.7], [0.4, 0.9, 1.0, 1.0]])
    one = torch.ones(1, 1).bool()
    signs = torch.tensor([[1.0, 2.0, -0.5, -1.5], [-0.8, 0.6, 0.0, 0.0]])
    return [
        case(both, signs, draw_lengths(4, 2, width=4), -1.0, 0.2),
        draw_case(draw_lengths(4, 3, 0, width=4), -0.5, pick(g, [0.1, 0.15])),
        draw_case(ragged_mask(g, 3, 4), -math.inf, pick(g, [0.3, 0.4, 0.5])),
        draw_case(draw_lengths(3, width=3), 0.0, 0.3),
        # both edges count
        case(both, signs, draw_lengths(4, 2, width=4), 0.0, pick(g, [0.3, 0.4])),
        # large advantages, with ratios that count though they are very large or small
        *[case(torch.tensor([[x]]).exp(), torch.tensor([[a]]), one, 0.0, 0.2) for x, a in FAR],
    ]


POLICY_LOSS = Exercise(
    my_policy_loss,
    _policy_cases,
    "It stops a step that went far enough, and never one that has to come back.",
    {
        "Nothing is clipped: "
        "the ratio may move as far as it likes.": "-advantages * clipped → -advantages * ratio",
        "That is the smaller of the two losses: take the larger, the maximum.": "maximum → minimum",
        "You clip in both directions: a good token that became rarer is not pulled back. "
        "Take the maximum of the clipped and the unclipped loss.": (
            "torch.maximum(-advantages * ratio, -advantages * clipped) → -advantages * clipped"
        ),
        "The sign of the result is wrong: "
        "an optimizer minimises, so return the loss.": "return loss → return -loss",
        "The minus sign of the advantages is missing: "
        "the loss is -advantages * ratio.": "-advantages * → advantages *",
        "The ratio is upside down, with old and new swapped: its log is logprobs - old_logprobs.": (
            "logprobs[mask] - old_logprobs[mask] → old_logprobs[mask] - logprobs[mask]"
        ),
        "That is the log of the ratio: take its exponential.": (
            "torch.exp(logprobs[mask] - old_logprobs[mask]) → logprobs[mask] - old_logprobs[mask]"
        ),
        "You clip the log-ratio at 1 - cliprange and 1 + cliprange: clip the ratio, after exp.": (
            "ratio.clamp(1 - cliprange, 1 + cliprange) → "
            "ratio.log().clamp(1 - cliprange, 1 + cliprange).exp()"
        ),
        "You clip the log-ratio at -cliprange and cliprange: "
        "clip the ratio between 1 - cliprange and 1 + cliprange, which is not quite the same.": (
            "ratio.clamp(1 - cliprange, 1 + cliprange) → "
            "ratio.log().clamp(-cliprange, cliprange).exp()"
        ),
        "A one-sided clip: the lower bound, 1 - "
        "cliprange, is missing.": "clamp(1 - cliprange, 1 + cliprange) → clamp(max=1 + cliprange)",
        "A one-sided clip: the upper bound, 1 + "
        "cliprange, is missing.": "clamp(1 - cliprange, 1 + cliprange) → clamp(min=1 - cliprange)",
        "Padding counts in your sum: choose the real tokens by the mask.": "[mask] →",
        "The number is right and its gradient is NaN: you chose the real tokens after exp, and the "
        "gradient of -inf less -inf is NaN times 0. "
        "Choose them before.": "[mask] →; loss.sum() → loss[mask].sum()",
        "Zero times NaN is NaN: "
        "choose by the mask, do not multiply by it.": "[mask] →; loss.sum() → (loss * mask).sum()",
        "You return a mean: return the sum, "
        "which the caller divides by the number of tokens.": "loss.mean()",
        "You average row by row, so a token in a short row weighs more: return the sum.": (
            "torch.stack([row.sum() / max(len(row), 1) for row in "
            "loss.split(mask.sum(1).tolist())]).mean()"
        ),
        "Your loss has no gradient: the ratio is detached, so nothing can be learned from it.": (
            "torch.exp(logprobs[mask] - old_logprobs[mask]) → "
            "torch.exp(logprobs[mask] - old_logprobs[mask]).detach()"
        ),
        "The unclipped ratio is detached: the "
        "gradient has to flow through it.": "-advantages * ratio, → -advantages * ratio.detach(),",
    },
    grads=("logprobs",),
)

# ---- The value loss ----


def my_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float
) -> Tensor:
    values, old_values, returns = values[mask], old_values[mask], returns[mask]
    near = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    loss = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return 0.5 * loss.sum()


def _value_cases(g: Generator) -> list[Case]:
    def case(
        values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, dirt: float, cliprange: float
    ) -> Case:
        given = dict(values=dirty(values, mask, dirt), old_values=old, returns=returns, mask=mask)
        return given | dict(cliprange_value=cliprange)

    def draw_case(mask: Tensor, dirt: float, cliprange: float) -> Case:
        old = normal(g, *mask.shape)
        moved, returns = normal(g, *mask.shape, scale=0.7), normal(g, *mask.shape, scale=1.5)
        return case(old + moved + OFF, old, returns, mask, dirt, cliprange)

    far = torch.tensor([[[23.0, 17.0, 23.0]], [[20.0, 20.0, 20.0]], [[40.0, 5.0, -40.0]]])
    values, old, returns = torch.cat([far, -far], 2)
    return [
        case(
            torch.tensor([[1.0, -1.0, 0.6, -0.4], [0.1, 0.0, 0.0, 0.0]]),
            torch.tensor([[0.0, 0.0, 0.5, 0.4], [0.7, 0.0, 0.0, 0.0]]),
            torch.tensor([[2.0, 2.0, 1.0, -1.5], [0.3, 1.0, 1.0, 1.0]]),
            draw_lengths(4, 1, width=4),
            9.0,
            0.2,
        ),
        draw_case(draw_lengths(4, 3, 0, width=4), 3.0, pick(g, [0.1, 0.15])),
        draw_case(ragged_mask(g, 3, 4), math.inf, pick(g, [0.3, 0.4, 0.5])),
        draw_case(draw_lengths(3, width=3), 0.0, 0.3),
        # both edges count on both sides of 0, whatever was drawn above
        case(values, old, returns, draw_lengths(6, width=6), 0.0, pick(g, [0.3, 0.4])),
    ]


NEAR = "values.clamp(old_values - cliprange_value, old_values + cliprange_value)"
WORSE = "torch.maximum((values - returns) ** 2, (near - returns) ** 2)"

VALUE_LOSS = Exercise(
    my_value_loss,
    _value_cases,
    "The worse of two errors: a value that moved too far waits, and one that moved the "
    "wrong way comes back.",
    {
        "Nothing is clipped: "
        "that is the plain squared error.": f"{WORSE} → (values - returns) ** 2",
        "You take the smaller error, so a value that ran away is not pulled back: "
        "take the larger, the maximum.": "maximum → minimum",
        "You take only the clipped error: a value that moved away from its return is not "
        "pulled back. Take the larger of both, the maximum.": f"{WORSE} → (near - returns) ** 2",
        "You clip the value itself: clip how far "
        "it moved from the old value.": f"{NEAR} → values.clamp(-cliprange_value, cliprange_value)",
        "The values are swapped: you clip the old value around the new one. Clip the new value "
        "around the old "
        "one.": f"{NEAR} → old_values.clamp(values - cliprange_value, values + cliprange_value)",
        "A one-sided clip: the lower bound, old_values - "
        "cliprange_value, is missing.": f"{NEAR} → values.clamp(max=old_values + cliprange_value)",
        "A one-sided clip: the upper bound, old_values + "
        "cliprange_value, is missing.": f"{NEAR} → values.clamp(min=old_values - cliprange_value)",
        "You took the maximum of the signed errors and squared "
        "that: square first.": f"{WORSE} → torch.maximum(values - returns, near - returns) ** 2",
        "These are absolute errors: square "
        "them.": f"{WORSE} → torch.maximum((values - returns).abs(), (near - returns).abs())",
        "The factor of one half is missing: "
        "the gradient is twice what vf_coef is meant for.": "0.5 * loss → loss",
        "Padding counts in your sum: choose the real tokens by the mask.": "[mask] →",
        "The number is right and its gradient is NaN: you chose the real tokens after squaring, "
        "and infinity times 0 is NaN. "
        "Choose them before.": "[mask] →; loss.sum() → loss[mask].sum()",
        "Zero times infinity is NaN: "
        "choose by the mask, do not multiply by it.": "[mask] →; loss.sum() → (loss * mask).sum()",
        "You return a mean: return the sum, "
        "which the caller divides by the number of tokens.": "loss.sum() → loss.mean()",
        "The clipped value is detached: near the old value the gradient "
        "has to flow through it too. Beyond the clip it is 0 anyway.": f"{NEAR} → {NEAR}.detach()",
        "Your loss has no gradient: the values are detached, "
        "so nothing can be learned from it.": "loss.sum() → loss.sum().detach()",
    },
    grads=("values",),
)
