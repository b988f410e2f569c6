"Exercises of the page on shaping."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import dirty, draw_lengths, normal, pick, ragged_mask, uniform
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "09_shaping"

# ---- Rewards: a price on each token, and one payment ----


def my_shaping(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    price = torch.where(mask, -kl_coef * kl, 0.0)
    last = torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1
    return price + torch.where(last, scores[:, None], 0.0)


def _shaping_cases(g: Generator) -> list[Case]:
    def case(mask: Tensor, dirt: float, kl_coef: float) -> Case:
        kl = normal(g, *mask.shape)
        kl[:2, 0] = torch.tensor([60.0, -60.0])
        kl = dirty(kl, mask, dirt)
        scores = uniform(g, 11, 40, len(mask)) * torch.tensor([1.0, -1.0, 1.0])[: len(mask)]
        return dict(scores=scores, kl=kl, mask=mask, kl_coef=kl_coef)

    return [
        case(draw_lengths(3, 4, 0, width=4), 9.0, 0.5),
        case(draw_lengths(1, 3, width=3), 2.0, pick(g, [0.1, 0.2])),
        case(ragged_mask(g, 3, 4), math.nan, pick(g, [0.3, 0.7, 0.8])),
        case(draw_lengths(3, 2, 0, width=3), -math.inf, 1.0),
    ]


PAID = "torch.where(last, scores[:, None], 0.0)"
LAST = "torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1"

SHAPING = Exercise(
    my_shaping,
    _shaping_cases,
    "Each real token pays for its KL, and the last one gets the score.",
    {
        "The score is in the last column, even where that is padding: "
        "put it on the last real token.": "== mask.sum(1, keepdim=True) - 1 → == mask.shape[1] - 1",
        "The score is one column after the last real token: put it on the stop token itself.": (
            "mask.sum(1, keepdim=True) - 1 → mask.sum(1, keepdim=True).clamp(max=mask.shape[1] - 1)"
        ),
        "The score is one token too early, an index off by one: put it "
        "on the last real token.": "mask.sum(1, keepdim=True) - 1 → mask.sum(1, keepdim=True) - 2",
        "The score is one column too late, an index off by one: it is lost in a "
        "row that fills its columns.": "mask.sum(1, keepdim=True) - 1 → mask.sum(1, keepdim=True)",
        "The score is on the first token: "
        "put it on the last real one.": f"{LAST} → mask & (torch.arange(mask.shape[1]) == 0)",
        "Every token gets the score: it is paid once a row, "
        "on the last real token.": f"{PAID} → torch.where(mask, scores[:, None], 0.0)",
        "You spread the score over the tokens: it is paid once a row, on the last real token.": (
            f"{PAID} → "
            "torch.where(mask, scores[:, None] / mask.sum(1, keepdim=True).clamp(min=1), 0.0)"
        ),
        "No token gets the score: add it to the last real token, by the mask.": f" + {PAID} →",
        "Only the score is paid: subtract the price of the KL on every real token.": PAID,
        "A row without tokens is paid in its last column: its last index is -1, "
        "which counts from the right. Compare column numbers instead of indexing.": (
            f"{LAST} → "
            "torch.arange(mask.shape[1]) == (mask.sum(1, keepdim=True) - 1) % mask.shape[1]"
        ),
        "A row without tokens is paid in its first column: its last index is -1, and you clamped "
        "it to 0.": "mask.sum(1, keepdim=True) - 1 → (mask.sum(1, keepdim=True) - 1).clamp(min=0)",
        "You reward drift from the reference: "
        "the KL is a price, so it needs a minus sign.": "-kl_coef → kl_coef",
        "The score is subtracted: its sign is wrong.": "scores[:, None] → -scores[:, None]",
        "kl_coef makes no difference: multiply the KL by it.": "-kl_coef * kl → -kl",
        "kl_coef multiplies the scores too: "
        "it is the price of the KL alone.": "scores[:, None] → kl_coef * scores[:, None]",
        "Padding pays for its KL: nobody chose those tokens, "
        "so use the mask.": "torch.where(mask, -kl_coef * kl, 0.0) → -kl_coef * kl",
        "Zero times infinity is NaN: choose by the mask with torch.where, "
        "do not multiply by it.": "torch.where(mask, -kl_coef * kl, 0.0) → -kl_coef * kl * mask",
        "The last token pays for the KL of all: let each token pay for its own, so that it learns "
        "which one it was.": "torch.where(last, scores[:, None] + price.sum(1, keepdim=True), 0.0)",
        "The last token gets the score and pays no KL: add the score to its price instead of "
        "replacing it.": "torch.where(last, scores[:, None], price)",
    },
)
