"Exercises of the page on masks."

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_nb.exercises import Task, clear

# ---- The mean over real tokens ----

_ROWS = torch.tensor([[1.0, 2.0, 3.0], [9.0, 0.0, 0.0]])
_KEEP = torch.tensor([[True, True, True], [True, False, False]])


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    return clear(x, mask).sum() / mask.sum().clamp(min=1)


MEAN = Task(
    _mean,
    (
        (_ROWS, _KEEP),
        (_ROWS.masked_fill(~_KEEP, math.inf), _KEEP),
        (_ROWS, torch.zeros(2, 3, dtype=torch.bool)),
    ),
    "Every real token weighs the same, and padding weighs nothing, whatever value it holds.",
    {
        "The mask does nothing here: the padding goes into your mean.": lambda x, m: x.mean(),
        "You divided by 6. Two of those six are padding: count the trues of "
        "the mask.": lambda x, m: clear(x, m).mean(),
        "You divided by 6. Two of those six are padding: count the trues of the mask. And 0 times "
        "infinity is no number: replace the padding, do not multiply "
        "it by zero.": lambda x, m: (x * m).mean(),
        "With infinity on the padding you return nan, since 0 times infinity is no number: "
        "replace the padding, do not multiply "
        "it by zero.": lambda x, m: (x * m).sum() / m.sum().clamp(min=1),
        "Right while the padding is tame and a token is real, and wrong twice elsewhere: 0 "
        "times infinity is nan, so replace the padding; 0 divided by 0 is nan too, so keep the "
        "count at 1 or more.": lambda x, m: (x * m).sum() / m.sum(),
        "With no real token at all you divide 0 by 0: keep the count at 1 or more.": lambda x, m: x[
            m
        ].mean(),
        "You averaged the rows first (2 and 9 make 5.5). That is the sequence mean: let every "
        "token weigh the same.": lambda x, m: torch.stack(
            [_mean(*row) for row in zip(x, m)]
        ).mean(),
        "You averaged the rows first (2 and 9 make 5.5). That is the sequence mean: let every "
        "token weigh the same. A row without a token would have no mean at all.": lambda x, m: (
            torch.stack([row[keep].mean() for row, keep in zip(x, m)]).mean()
        ),
    },
)

# ---- Where a response ends ----


def _stops(ids: Tensor, stop_ids: list[int]) -> Tensor:
    return torch.isin(ids, torch.tensor(stop_ids))


def _response_mask(ids: Tensor, stop_ids: list[int]) -> Tensor:
    is_stop = _stops(ids, stop_ids).long()
    return is_stop.cumsum(1) - is_stop == 0


def _to_the_last_stop(ids: Tensor, stop_ids: list[int]) -> Tensor:
    is_stop = _stops(ids, stop_ids)
    return (is_stop.flip(1).cumsum(1).flip(1) > 0) | ~is_stop.any(1, keepdim=True)


def _to_argmax(ids: Tensor, stop_ids: list[int]) -> Tensor:
    first = _stops(ids, stop_ids).int().argmax(1, keepdim=True)
    return torch.arange(ids.shape[1]) <= first


RESPONSE_MASK = Task(
    _response_mask,
    (
        (torch.tensor([[7, 9, 8, 9], [7, 7, 8, 8], [9, 7, 7, 7]]), [9]),
        (torch.tensor([[7, 4, 8, 9], [7, 9, 4, 8]]), [9, 4]),
    ),
    "Up to the first stop token and including it; without one, to the end.",
    {
        "You leave out the stop token. The policy chose it, and learns from it when to stop: a "
        "token is out if a stop token came *before* it.": lambda ids, stop_ids: (
            _stops(ids, stop_ids).cumsum(1) == 0
        ),
        "You leave out stop tokens alone, and keep what was drawn after them: count how many "
        "have come so far.": lambda ids, stop_ids: ~_stops(ids, stop_ids),
        "You go on to the last stop token of the row: the first one ends it.": _to_the_last_stop,
        "You go on behind the first stop token, to just before the second: a token stays if *no* "
        "stop token came before it.": lambda ids, stop_ids: _stops(ids, stop_ids).cumsum(1) <= 1,
        "You look for the first of stop_ids alone: any of them ends a row.": lambda ids, stop_ids: (
            _response_mask(ids, stop_ids[:1])
        ),
        "argmax of a row without a true is 0, so a response that never stopped is cut to one "
        "token: such a row is true throughout.": _to_argmax,
    },
)

# ---- Whitening over ranks ----


def _whiten(
    mean: Callable[[list[Tensor]], Tensor] = lambda real: torch.cat(real).mean(),
    var: Callable[[list[Tensor]], Tensor] = lambda real: torch.cat(real).var(),
    alone: str = "",  # what each rank takes from its own tokens: "mean", "var" or both
    padding: str = "where",
    counted: bool = False,  # the padding too
) -> Callable:
    "An answer that subtracts mean(real tokens by rank) and divides by the root of var(them)."

    def answer(parts: list[Tensor], masks: list[Tensor]) -> tuple[Tensor, ...]:
        real = [x.flatten() if counted else x[mask] for x, mask in zip(parts, masks)]
        white = []
        for x, mask, own in zip(parts, masks, real):
            centre = own.mean() if "mean" in alone else mean(real)
            spread = own.var() if "var" in alone else var(real)
            white.append(clear((x - centre) / (spread + 1e-8).sqrt(), mask, padding))
        return tuple(white)

    return answer


def _mean_of_means(real: list[Tensor]) -> Tensor:
    return torch.stack([x.mean() for x in real]).mean()


def _about_the_mean_of_means(real: list[Tensor]) -> Tensor:
    every = torch.cat(real)
    return (every - _mean_of_means(real)).square().sum() / (len(every) - 1)


_MASKS = [
    torch.tensor([[True, True, True], [True, True, False]]),
    torch.tensor([[True, True, False]]),
]
_PARTS = [torch.tensor([[-1.0, 0.0, 1.0], [2.0, -3.0, 50.0]]), torch.tensor([[4.0, 8.0, -70.0]])]
WHITEN_RANKS = Task(
    _whiten(),
    (
        (_PARTS, _MASKS),
        ([x.masked_fill(~mask, math.inf) for x, mask in zip(_PARTS, _MASKS)], _MASKS),
    ),
    "One mean and one variance over all real tokens of all ranks: how the batch was divided does "
    "not show.",
    {
        "Each rank is whitened by itself, so a rank whose tokens did better than those of "
        "another looks just like it: add up over all ranks first.": _whiten(alone="mean var"),
        "Your mean is the mean of the ranks' means: a rank with few tokens counts as much as one "
        "with many. Add up sums and counts, and divide last.": _whiten(
            _mean_of_means, _about_the_mean_of_means
        ),
        "The mean is that of all ranks, but each rank divides by its own spread.": _whiten(
            alone="var"
        ),
        "You averaged the ranks' variances. That leaves out how far apart the ranks are: take the "
        "squares about the common mean.": _whiten(
            var=lambda real: torch.stack([x.var() for x in real]).mean()
        ),
        "You divided the squares by N: this page divides by N - 1.": _whiten(
            var=lambda real: torch.cat(real).var(correction=0)
        ),
        "Padding goes into your mean and variance: choose by the mask first.": _whiten(
            counted=True
        ),
        "Real tokens are right, but the padding is not zero afterwards.": _whiten(padding="none"),
        "With infinity on the padding you leave nan there: replace it by zero, do not "
        "multiply.": _whiten(padding="times"),
    },
)
