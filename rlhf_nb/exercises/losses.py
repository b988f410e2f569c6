"Exercises of the page on losses."

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_nb.exercises import Task, reduced

Choice = Callable[[Tensor, Tensor], Tensor]

# ---- The policy loss ----


def _policy_loss(
    choose: Choice = torch.maximum,
    reduce: str = "real",
    sign: int = 1,
    link: Callable[[Tensor], Tensor] = torch.exp,
    fixed: float | None = None,  # in the place of cliprange
) -> Callable:
    "A policy loss with parts that can be exchanged; by default it is right."

    def answer(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float
    ) -> Tensor:
        ratio, width = link(sign * (logprobs - old_logprobs)), fixed or cliprange
        plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - width, 1 + width)
        return reduced(choose(plain, clipped), mask, reduce)

    return answer


def _policy_case(dirt: float, cliprange: float) -> tuple:
    """Ratios on both sides of the range with advantages of both signs; `dirt` for log-probs on the
    padding."""
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    old = torch.tensor([[-1.0, -2.0, -1.5, -0.7], [-0.9, -3.0, dirt, dirt]])
    ratio = torch.tensor([[0.5, 1.5, 1.1, 1.7], [0.4, 0.9, 1.0, 1.0]])
    advantages = torch.tensor([[1.0, 2.0, -0.5, -1.5], [-0.8, 0.6, 7.0, 7.0]])
    return old + ratio.log(), old, advantages, mask, cliprange


POLICY_LOSS = Task(
    _policy_loss(),
    (_policy_case(-1.0, 0.2), _policy_case(-math.inf, 0.2), _policy_case(-1.0, 0.3)),
    "It stops a step that went far enough, and never one that has to come back.",
    {
        "Nothing is clipped: the ratio may run as far as it likes.": _policy_loss(
            lambda plain, clipped: plain
        ),
        "That is the smaller loss, the optimist's choice: take the maximum.": _policy_loss(
            torch.minimum
        ),
        "You clip whichever way it moved: a good token that became rarer gets no pull back. Take "
        "the maximum of both.": _policy_loss(lambda plain, clipped: clipped),
        "The sign of the result is turned: an optimizer goes downhill, so give the "
        "loss.": _policy_loss(lambda plain, clipped: -torch.maximum(plain, clipped)),
        "The ratio is upside down: now over then, logprobs - old_logprobs.": _policy_loss(sign=-1),
        "That is the log of the ratio: take its exponential.": _policy_loss(link=torch.clone),
        "Padding counts in your sum: choose the real tokens by the mask.": _policy_loss(
            reduce="all"
        ),
        "Zero times NaN is NaN: choose by the mask, do not multiply by it.": _policy_loss(
            reduce="times"
        ),
        "You return a mean: return the sum, the caller knows the count.": _policy_loss(
            reduce="mean"
        ),
        "You average row by row: a token in a short row weighs more. Return the sum.": _policy_loss(
            reduce="rows"
        ),
        "You wrote 0.2 into the function: use cliprange.": _policy_loss(fixed=0.2),
    },
)

# ---- The value loss ----


def _value_loss(
    choose: Choice = torch.maximum,
    around: Callable[[Tensor], Tensor] = torch.clone,  # of the old values: the centre of the clip
    half: float = 0.5,
    reduce: str = "real",
) -> Callable:
    "A value loss with parts that can be exchanged; by default it is right."

    def answer(
        values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float
    ) -> Tensor:
        centre = around(old_values)
        moved = values.clamp(centre - cliprange_value, centre + cliprange_value)
        errors = choose((values - returns) ** 2, (moved - returns) ** 2)
        return half * reduced(errors, mask, reduce)

    return answer


def _squared_late(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float
) -> Tensor:
    moved = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    return 0.5 * (torch.maximum(values - returns, moved - returns) ** 2)[mask].sum()


def _value_case(dirt: float) -> tuple:
    "Values that moved towards the return and away from it, up and down; `dirt` on the padding."
    return (
        torch.tensor([[1.0, -1.0, 0.6, -0.4], [0.1, dirt, dirt, dirt]]),
        torch.tensor([[0.0, 0.0, 0.5, 0.4], [0.7, 0.0, 0.0, 0.0]]),
        torch.tensor([[2.0, 2.0, 1.0, -1.5], [0.3, 1.0, 1.0, 1.0]]),
        torch.tensor([[True] * 4, [True, False, False, False]]),
        0.2,
    )


VALUE_LOSS = Task(
    _value_loss(),
    (_value_case(9.0), _value_case(math.inf)),
    "The worse of two errors: what went too far waits, what went astray comes back.",
    {
        "Nothing is clipped: that is the squared error alone.": _value_loss(
            lambda plain, moved: plain
        ),
        "The smaller error lets a value that ran away go: take the larger.": _value_loss(
            torch.minimum
        ),
        "Only the clipped error: a value that moved away from its return gets no pull back. Take "
        "the larger of both.": _value_loss(lambda plain, moved: moved),
        "You clip the value itself: clip how far it moved, around the old value.": _value_loss(
            around=torch.zeros_like
        ),
        "You took the maximum of signed errors, and squared that: square first.": _squared_late,
        "The half is missing: the gradient is twice what vf_coef was set for.": _value_loss(
            half=1.0
        ),
        "Padding counts in your sum: choose the real tokens by the mask.": _value_loss(
            reduce="all"
        ),
        "Zero times infinity is NaN: choose by the mask, do not multiply by it.": _value_loss(
            reduce="times"
        ),
        "You return a mean: return the sum, the caller knows the count.": _value_loss(
            reduce="mean"
        ),
    },
)

# ---- One number of several micro-batches ----

MicroBatches = list[tuple[Tensor, Tensor]]  # a loss per token and its mask, of each


def _tokens(micro_batches: MicroBatches) -> int:
    return sum(int(mask.sum()) for _, mask in micro_batches)


def _minibatch_loss(
    reduce: str = "real", divide: Callable[[MicroBatches], float] = _tokens
) -> Callable[[MicroBatches], Tensor]:
    """An answer that makes one number of each micro-batch, adds them, and divides by
    divide(micro_batches)."""

    def answer(micro_batches: MicroBatches) -> Tensor:
        numbers = [reduced(loss, mask, reduce) for loss, mask in micro_batches]
        return torch.stack(numbers).sum() / divide(micro_batches)

    return answer


def _minibatch_case(dirt: float, *lengths: tuple[int, ...]) -> tuple:
    """A micro-batch for each tuple of row lengths, with losses that all differ; `dirt` on the
    padding."""
    micro_batches = []
    for i, rows in enumerate(lengths):
        mask = torch.arange(4) < torch.tensor(rows)[:, None]
        loss = (torch.arange(mask.numel()).view(mask.shape) - 2.5 * i) ** 2 / 8
        micro_batches.append((loss.masked_fill(~mask, dirt), mask))
    return (micro_batches,)


MINIBATCH_LOSS = Task(
    _minibatch_loss(),
    (_minibatch_case(5.0, (1, 3), (4, 2)), _minibatch_case(math.nan, (4,), (0,), (2,))),
    "Every real token weighs the same, however the batch was cut.",
    {
        "A mean of means: a token in a small micro-batch weighs more. Add everything, then divide "
        "once.": _minibatch_loss("mean", len),
        "You add up means: the loss grows with the number of micro-batches. Divide once, by all "
        "real tokens.": _minibatch_loss("mean", lambda micro_batches: 1),
        "A mean of row means: a token in a short row weighs more. Divide by tokens, not "
        "rows.": _minibatch_loss("rows", len),
        "You divided by the number of micro-batches: divide by the real tokens.": _minibatch_loss(
            divide=len
        ),
        "A sum: divide it by the real tokens of all micro-batches.": _minibatch_loss(
            divide=lambda micro_batches: 1
        ),
        "You divided by every column, padding included: count the mask.": _minibatch_loss(
            divide=lambda micro_batches: sum(mask.numel() for _, mask in micro_batches)
        ),
        "You divided by the tokens of the last micro-batch: count those of all.": _minibatch_loss(
            divide=lambda micro_batches: _tokens(micro_batches[-1:])
        ),
        "The padding's loss is in the sum: choose by the mask.": _minibatch_loss("all"),
        "Zero times NaN is NaN: choose by the mask.": _minibatch_loss("times"),
    },
)
