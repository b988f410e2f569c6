"Exercises of the page on masks."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import dirty, draw_lengths, integers, normal, pick, ragged_mask, uniform
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "02_masks"

# ---- The mean over real tokens ----


def my_mean(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


def _mean_cases(g: Generator) -> list[Case]:
    def case(mask: Tensor, dirt: float) -> Case:
        return dict(x=dirty(normal(g, *mask.shape) + 1, mask, dirt), mask=mask)

    rows = torch.tensor([[10.0, 20.0, 30.0], [90.0, 0.0, 0.0]])
    alone = draw_lengths(0, 1, width=3)  # one token, and its value is never 0
    return [
        dict(x=rows, mask=draw_lengths(3, 1, width=3)),
        case(draw_lengths(4, 2, 1, width=4), 5.0),
        case(ragged_mask(g, 3, 4), math.inf),
        case(draw_lengths(0, 0, width=3), 7.0),
        dict(x=dirty(uniform(g, -40, -20, 2, 3), alone, 0.0), mask=alone),
    ]


ROWS = "torch.where(mask, x, 0.0).sum(1) / mask.sum(1).clamp(min=1)"

MEAN = Exercise(
    my_mean,
    _mean_cases,
    "Every real token weighs the same, and padding weighs nothing, whatever is on it.",
    {
        "The mask makes no difference: padding counts in your mean.": "x.mean()",
        "You divided by the number of all columns, padding included: count the real tokens, by "
        "the mask.": "torch.where(mask, x, 0.0).mean()",
        "You divided by the number of all columns, padding included: count the real tokens, by "
        "the mask. And 0 times infinity is NaN: replace what is on padding, do not multiply it "
        "by zero.": "(x * mask).mean()",
        "With infinity on padding you return NaN, because 0 times infinity is NaN: replace what is "
        "on padding, by the mask, "
        "do not multiply it by zero.": "torch.where(mask, x, 0.0) → (x * mask)",
        "Two cases are wrong. With infinity on padding, 0 times infinity is NaN: replace what "
        "is on padding. Without any real token, 0 divided by 0 is NaN: keep the count at 1 or "
        "more.": "(x * mask).sum() / mask.sum()",
        "Without any real token you divide 0 by 0: keep the count at 1 or more.": "x[mask].mean()",
        "You return the sum: divide by the number of real tokens.": "x[mask].sum()",
        "You averaged each row first. That is the sequence mean: give every token the same "
        "weight.": f"({ROWS}).mean()",
        "You averaged each row that has a token first. That is the sequence mean: give every "
        "token the same weight.": f"({ROWS}).sum() / mask.any(1).sum().clamp(min=1)",
        "You averaged each row first. That is the sequence mean: give every token the same weight. "
        "Besides, a row without a token "
        "has no mean.": "torch.stack([row[keep].mean() for row, keep in zip(x, mask)]).mean()",
    },
)

# ---- Where a response ends ----


def my_response_mask(response_ids: Tensor, stop_ids: list[int]) -> Tensor:
    is_stop = torch.isin(response_ids, torch.tensor(stop_ids)).long()
    return is_stop.cumsum(1) - is_stop == 0


def _response_mask_cases(g: Generator) -> list[Case]:
    def case(rows: list[list[int]] | Tensor, *stop_ids: int) -> Case:
        return dict(response_ids=torch.as_tensor(rows), stop_ids=list(stop_ids))

    return [
        case([[7, 9, 8, 9], [7, 7, 8, 8], [9, 7, 7, 7]], 9),
        case([[7, 4, 8, 9], [7, 9, 4, 8]], 9, 4),
        case([[9, 9, 9], [8, 8, 9]], 9),
        case(integers(g, 3, 6, 4, 5), *pick(g, [(3,), (4, 6), (5, 3)])),
        case(integers(g, 1, 3, 3, 6), *pick(g, [(1,), (2,), (1, 2)])),
    ]


RESPONSE_MASK = Exercise(
    my_response_mask,
    _response_mask_cases,
    "Up to and including the first stop token; without one, to the end.",
    {
        "You leave out the stop token. The policy chose it, and learns from it when to stop: "
        "leave out a token only if a stop token came before it.": "is_stop.cumsum(1) == 0",
        "You leave out the stop tokens alone, and keep what was sampled after them: count how "
        "many have come so far.": "is_stop == 0",
        "You go on to the last stop token of the row: the first one "
        "ends it.": "(is_stop.flip(1).cumsum(1).flip(1) > 0) | (is_stop.sum(1, keepdim=True) == 0)",
        "You go on after the first stop token, until just before the second: a token stays if "
        "no stop token came before it.": "is_stop.cumsum(1) <= 1",
        "You look only for the first of stop_ids: "
        "any of them ends a row.": "stop_ids) → stop_ids[:1])",
        "argmax of a row without a true is 0, so a response that never stopped is cut to one "
        "token: such a row has to be true "
        "throughout.": "torch.arange(response_ids.shape[1]) <= is_stop.argmax(1, keepdim=True)",
        "It is the other way round: true is for the tokens that count, "
        "up to the stop token.": "is_stop.cumsum(1) - is_stop != 0",
        "One token too many: the token after the first stop token is not part of the response.": (
            "(is_stop.cumsum(1) - is_stop).roll(1, 1) * (torch.arange(response_ids.shape[1]) > "
            "0) == 0"
        ),
        "The count runs down the columns: "
        "count the stop tokens along each row.": "cumsum(1) → cumsum(0)",
        "Everything is true: what was sampled after a stop token is padding.": "is_stop >= 0",
    },
)
