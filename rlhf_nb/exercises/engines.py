"The exercise of the page on other engines."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import dirty, draw_lengths, one, pick, uniform
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "40_engines"


def my_weights(logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    gap = logprobs - engine_logprobs
    weights = gap.exp().clamp(max=cap)
    return torch.where(mask, weights, 0.0).detach()


def _weights_cases(g: Generator) -> list[Case]:
    def case(mask: Tensor, dirt: float, cap: float) -> Case:
        theirs = uniform(g, -3, -0.2, *mask.shape)
        theirs[0, 0] -= 13.0
        ours = theirs + uniform(g, -1.5, 1.5, *mask.shape)
        ours[0, :2] = theirs[0, :2] + torch.tensor([3.5, -12.0])
        ours, theirs = dirty(ours, mask, dirt), dirty(theirs, mask, dirt)
        return dict(logprobs=ours, engine_logprobs=theirs, mask=mask, cap=cap)

    return [
        case(draw_lengths(3, 2, width=3), -1.0, 2.0),
        case(draw_lengths(4, 1, 0, width=4), -9.0, pick(g, [1.5, 2.5])),
        case(draw_lengths(3, one(g, 1, 3), 0, width=3), -math.inf, pick(g, [12.0, 15.0])),
    ]


CUT = ".clamp(max=cap)"

WEIGHTS = Exercise(
    my_weights,
    _weights_cases,
    "What was sampled too often counts less, and no token counts for more than the cap.",
    {
        "The ratio is upside down, with the two swapped: it is the trainer's probability over the "
        "engine's, logprobs "
        "- engine_logprobs.": "logprobs - engine_logprobs → engine_logprobs - logprobs",
        "That is the log of the weight: take its exponential.": "gap.exp() → gap",
        "cap makes no difference, and nothing is truncated: a weight is at most cap.": f"{CUT} →",
        "You clip the log of the weight at cap: "
        "take the exponential first.": "gap.exp().clamp(max=cap) → gap.clamp(max=cap).exp()",
        "You raise small weights too: a token that the engine samples too often must count less. "
        "Truncate from above alone, without a lower bound.": f"{CUT} → .clamp(1 / cap, cap)",
        "You raise small weights to cap: cap is the largest that a weight may be, "
        "a maximum and no minimum.": f"{CUT} → .clamp(min=cap)",
        "You cap the weights at 1: they may be as large as cap.": f"{CUT} → .clamp(max=1.0)",
        "You drop tokens beyond the cap: truncating keeps them, with the "
        "weight cap.": "gap.exp().clamp(max=cap) → torch.where(gap.exp() > cap, 0.0, gap.exp())",
        "Zero times NaN is NaN: choose by the mask, "
        "do not multiply by it.": "torch.where(mask, weights, 0.0) → (weights * mask)",
        "Padding has the weight 1, the exponential of 0: it should be 0 there, by the mask.": (
            "gap = logprobs - engine_logprobs → gap = torch.where(mask, "
            "logprobs - engine_logprobs, 0.0); torch.where(mask, weights, 0.0) → weights"
        ),
        "Padding has a weight: "
        "it should be 0 there, by the mask.": "torch.where(mask, weights, 0.0) → weights",
        "You scale the weights to mean 1: each is a ratio, as it is.": (
            "torch.where(mask, weights, 0.0) → "
            "torch.where(mask, weights / weights[mask].mean(), 0.0)"
        ),
        "The weights carry a gradient, and should be constants of the loss: "
        "a detach is missing.": ".detach() →",
    },
    grads=("logprobs",),
)
