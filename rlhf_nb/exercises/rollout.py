"The exercise of the page on the rollout."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import normal, pick
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case


def my_top_p(logits: Tensor, top_p: float) -> Tensor:
    ordered, order = logits.sort(-1, descending=True)
    p = ordered.softmax(-1)
    too_late = p.cumsum(-1) - p >= top_p
    return logits.masked_fill(too_late.scatter(-1, order, too_late), -math.inf)


def _top_p_cases(g: Generator) -> list[Case]:
    def case(rows: int, size: int, top_p: float) -> Case:
        return dict(logits=normal(g, rows, size, scale=1.5), top_p=top_p)

    p = torch.tensor([[0.10, 0.50, 0.15, 0.25], [0.05, 0.04, 0.80, 0.11]])
    return [
        dict(logits=p.log(), top_p=0.7),
        dict(logits=torch.tensor([[0.4, 0.35, 0.25]] * 3).log(), top_p=0.5),
        case(2, 5, pick(g, [0.3, 0.5])),
        case(2, 5, pick(g, [0.85, 0.9])),
        case(1, 4, 0.6),
        dict(logits=torch.tensor([[3.0, 1.0, 0.5]]), top_p=0.95),
    ]


BACK = "too_late.scatter(-1, order, too_late)"

TOP_P = Exercise(
    "my_top_p",
    my_top_p,
    _top_p_cases,
    "The smallest set of likeliest tokens that reaches top_p.",
    {
        "The token that crosses top_p is cut, so a sure row has none left: compare the sum "
        "before it.": (
            "p.cumsum(-1) - p >=",
            "p.cumsum(-1) >=",
        ),
        "Tokens are taken in the vocabulary's order: sort, the likeliest first.": (
            "logits.sort(-1, descending=True)",
            "logits, torch.arange(logits.shape[-1]).expand_as(logits)",
        ),
        "The least likely tokens come first: sort in descending order.": (
            "descending=True",
            "descending=False",
        ),
        "The logits come back sorted: token 0 must be token 0 still.": (
            f"logits.masked_fill({BACK}",
            "ordered.masked_fill(too_late",
        ),
        "The decision is not carried back: in sorted order it is for other tokens. scatter it to "
        "the index it came from.": (BACK, "too_late"),
        "gather takes the decision the wrong way: scatter writes it back to the index it came "
        "from.": (
            BACK,
            "too_late.gather(-1, order)",
        ),
        "Each token must reach top_p alone: it is their sum that has to.": (
            "p.cumsum(-1) - p >= top_p",
            "p < top_p",
        ),
        "The other tokens are cut: the condition is turned round.": (">= top_p", "< top_p"),
        "These are probabilities: return the logits.": (
            f"logits.masked_fill({BACK}, -math.inf)",
            f"logits.masked_fill({BACK}, -math.inf).softmax(-1)",
        ),
        "What is cut has a logit of 0, and can be drawn: it needs minus infinity, -inf.": (
            "-math.inf",
            "0.0",
        ),
        "The logits are not made probabilities: softmax them before you add up.": (
            "ordered.softmax(-1)",
            "ordered",
        ),
        "The probabilities are added down the rows: cumsum belongs along the vocabulary, the "
        "last axis.": (
            "cumsum(-1)",
            "cumsum(0)",
        ),
        "The softmax is over the rows: it belongs over the vocabulary, the last axis.": (
            "softmax(-1)",
            "softmax(0)",
        ),
        "The rows are sorted, and not the vocabulary: sort along the last axis.": (
            "logits.sort(-1",
            "logits.sort(0",
        ),
        "Each probability is added twice: subtract it from the cumulative sum.": (
            "p.cumsum(-1) - p",
            "p.cumsum(-1) + p",
        ),
        "The likeliest token is all that is left: top_p is a sum that several may reach.": (
            "too_late = p.cumsum(-1) - p >= top_p",
            "too_late = p < p[:, :1]",
        ),
        "Nothing is cut: what comes after top_p has -inf.": (BACK, "too_late & ~too_late"),
    },
)
