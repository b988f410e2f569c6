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
        "You cut the token that crosses top_p, so a confident row has none left: compare the "
        "sum before it.": (
            "p.cumsum(-1) - p >=",
            "p.cumsum(-1) >=",
        ),
        "You take the tokens in the order of the vocabulary: sort them, the likeliest first.": (
            "logits.sort(-1, descending=True)",
            "logits, torch.arange(logits.shape[-1]).expand_as(logits)",
        ),
        "You take the least likely tokens first: sort in descending order.": (
            "descending=True",
            "descending=False",
        ),
        "You return the logits sorted: keep the order of the vocabulary.": (
            f"logits.masked_fill({BACK}",
            "ordered.masked_fill(too_late",
        ),
        "You apply what was decided in sorted order to the vocabulary's order: scatter it back "
        "to each token's index.": (BACK, "too_late"),
        "gather goes the wrong way: scatter writes each decision back to the token's index.": (
            BACK,
            "too_late.gather(-1, order)",
        ),
        "The sorted logits are not put back: gather with order takes them from the wrong places. "
        "Use scatter, or gather with order.argsort(-1).": (
            f"logits.masked_fill({BACK}, -math.inf)",
            "ordered.masked_fill(too_late, -math.inf).gather(-1, order)",
        ),
        "The token that crosses top_p is cut, unless it is the first: compare the sum before each "
        "token.": (
            "p.cumsum(-1) - p >= top_p",
            "(p.cumsum(-1) > top_p) & (torch.arange(p.shape[-1]) > 0)",
        ),
        "Tokens are taken in the vocabulary's order, and the one that crosses top_p is cut: sort, "
        "the likeliest first, and compare the sum before each token.": (
            f"logits.masked_fill({BACK}, -math.inf)",
            "logits.masked_fill(logits.softmax(-1).cumsum(-1) >= top_p, -math.inf)",
        ),
        "A token is cut where its own probability is below 1 - top_p: the sum of the likelier "
        "ones is what counts.": (
            "p.cumsum(-1) - p >= top_p",
            "p < 1 - top_p",
        ),
        **{
            f"What is cut has a logit of {low}, which is finite: it needs minus infinity, -inf.": (
                "-math.inf",
                low,
            )
            for low in ("-1e4", "-1e9", "-1e10", "torch.finfo(logits.dtype).min")
        },
        "You ask whether each token alone reaches top_p: their sum has to.": (
            "p.cumsum(-1) - p >= top_p",
            "p < top_p",
        ),
        "You cut the tokens that should stay: the condition is the other way round.": (
            ">= top_p",
            "< top_p",
        ),
        "These are probabilities: return the logits.": (
            f"logits.masked_fill({BACK}, -math.inf)",
            f"logits.masked_fill({BACK}, -math.inf).softmax(-1)",
        ),
        "What you cut has a logit of 0, and can be sampled: it needs minus infinity, -inf.": (
            "-math.inf",
            "0.0",
        ),
        "You sum logits: take their softmax first.": (
            "ordered.softmax(-1)",
            "ordered",
        ),
        "You sum over the rows: take cumsum along the vocabulary, the last axis.": (
            "cumsum(-1)",
            "cumsum(0)",
        ),
        "The softmax is over the rows: take it over the vocabulary, the last axis.": (
            "softmax(-1)",
            "softmax(0)",
        ),
        "You sort the rows instead of the vocabulary: sort along the last axis.": (
            "logits.sort(-1",
            "logits.sort(0",
        ),
        "Each probability is added twice: subtract it from the running sum.": (
            "p.cumsum(-1) - p",
            "p.cumsum(-1) + p",
        ),
        "You keep only the likeliest token: several may be needed to reach top_p.": (
            "too_late = p.cumsum(-1) - p >= top_p",
            "too_late = p < p[:, :1]",
        ),
        "Nothing is cut: set what comes after top_p to -inf, by a mask of what is too late.": (
            BACK,
            "too_late & ~too_late",
        ),
    },
)
