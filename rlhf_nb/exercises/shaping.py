"Exercises of the page on shaping."

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_nb.exercises import Task, clear

# ---- Rewards: a price on each token, and one payment ----


def _payments(scores: Tensor, mask: Tensor, place: str) -> Tensor:
    "The scores [B] as [B, T]: on the last real token, or where people put them instead."
    column, last = torch.arange(mask.shape[1]), mask.sum(1, keepdim=True) - 1
    paid = {
        "last": column == last,
        "column": column == len(column) - 1,
        "index": column == last % len(column),
        "late": column == (last + 1).clamp(max=len(column) - 1),
        "every": mask,
        "nobody": mask & ~mask,
    }[place]
    return torch.where(paid, scores[:, None], 0.0)


def _shaping(
    unit: float = -1.0, coef: bool = True, place: str = "last", padding: str = "where"
) -> Callable:
    "An answer with some sign, coefficient, and token that is paid."

    def answer(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
        price = unit * (kl_coef if coef else 1.0) * kl
        return clear(price, mask, padding) + _payments(scores, mask, place)

    return answer


def _all_on_the_last(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    return _payments(scores - kl_coef * clear(kl, mask).sum(1), mask, "last")


def _last_for_free(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    last = _payments(torch.ones_like(scores), mask, "last") > 0
    return torch.where(last, scores[:, None], clear(-kl_coef * kl, mask))


def _shaping_case(*dirt: float) -> tuple:
    "Rows of 3, 5 and 0 tokens; `dirt` is what the padding holds."
    mask = torch.arange(5) < torch.tensor([[3], [5], [0]])
    kl = torch.tensor([[0.5, -1.0, 2.0, *dirt], [1.0, 0.25, 0.5, -0.75, 4.0], [*dirt, *dirt, 0.5]])
    return torch.tensor([3.0, -2.0, 7.0]), kl, mask, 0.5


SHAPING = Task(
    _shaping(),
    (_shaping_case(9.0, 8.0), _shaping_case(math.inf, math.nan)),
    "Each real token pays for its KL, and the last one collects the score.",
    {
        "The score is in the last column, also where that column is padding: look for the last "
        "real token.": _shaping(place="column"),
        "The score is one slot after the last real token: the stop token itself should get "
        "it.": _shaping(place="late"),
        "Every token collects the score: it is paid once a row.": _shaping(place="every"),
        "Nobody collects the score: add it to the last real token.": _shaping(place="nobody"),
        "A row without tokens is paid in its last column: its last index is -1, and -1 counts "
        "from the right. Compare columns rather than index.": _shaping(place="index"),
        "Drift from the reference is rewarded: the KL is a price, so it needs a minus.": _shaping(
            unit=1.0
        ),
        "kl_coef makes no difference: did you multiply the KL by it?": _shaping(coef=False),
        "Padding is charged for KL: nobody chose those tokens.": _shaping(padding="none"),
        "Zero times infinity is NaN: choose with torch.where rather than multiply by the "
        "mask.": _shaping(padding="times"),
        "All the KL is charged on the last token: let each token pay for its own, so that it "
        "learns which one it was.": _all_on_the_last,
        "The last token collects the score and pays no KL: add the score to its price, do not "
        "replace it.": _last_for_free,
    },
)

# ---- The clip and the penalty, which have an order ----


def _final_scores(
    low: float = -1.0,
    high: float = 1.0,
    unit: float = -1.0,
    charged: Callable[[Tensor], Tensor] = torch.logical_not,
) -> Callable:
    "An answer with some bounds, in units of score_clip, and some rows that pay the penalty."

    def answer(scores: Tensor, reached_stop: Tensor, score_clip: float, penalty: float) -> Tensor:
        clipped = scores.clamp(low * score_clip, high * score_clip)
        return clipped + unit * penalty * charged(reached_stop).float()

    return answer


FINAL_SCORES = Task(
    _final_scores(),
    (
        (
            torch.tensor([6.0, 6.0, -5.0, 0.5, 0.5]),
            torch.tensor([True, False, False, True, False]),
            3.0,
            1.0,
        ),
    ),
    "Clipped first, so that the penalty always counts.",
    {
        "You clipped last, so that the clip swallows the penalty of a very good response without "
        "an end: clip first.": lambda scores, stopped, clip, penalty: (
            scores - penalty * (~stopped).float()
        ).clamp(-clip, clip),
        "You replaced the score of a row that was cut off: that is the older trick. Subtract "
        "here.": lambda scores, stopped, clip, penalty: torch.where(
            stopped, scores.clamp(-clip, clip), -penalty
        ),
        "Rows without a stop token are paid for it: the penalty is subtracted.": _final_scores(
            unit=1.0
        ),
        "A row that was cut off costs nothing: subtract the penalty there.": _final_scores(
            unit=0.0
        ),
        "You charge the rows that did stop: turn the condition round.": _final_scores(
            charged=torch.clone
        ),
        "You charge every row: only one that did not stop pays.": _final_scores(
            charged=torch.ones_like
        ),
        "You clipped above and not below: -score_clip is a bound too.": _final_scores(
            low=-math.inf
        ),
        "Nothing is clipped: keep each score between -score_clip and score_clip.": _final_scores(
            low=-math.inf, high=math.inf
        ),
    },
)

# ---- Merging two sets of scores from three numbers each ----

Moments = tuple[int, float, float]  # count, mean, sum of squared distances from the mean


def _merge(
    share: Callable[[int, int], float] = lambda n_a, n_b: n_b / (n_a + n_b),
    between: Callable[..., float] = lambda d, n_a, n_b: d**2 * n_a * n_b / (n_a + n_b),
    old: float = 1.0,
    guard: bool = True,
) -> Callable[[Moments, Moments], Moments]:
    "An answer whose mean moves by `share` of the distance d, which adds between(d, ...) to M."

    def answer(a: Moments, b: Moments) -> Moments:
        (n_a, mean_a, m_a), (n_b, mean_b, m_b) = a, b
        if guard and n_b == 0:
            return a
        d = mean_b - mean_a
        step = d * share(n_a, n_b)
        return n_a + n_b, mean_a + step, old * m_a + m_b + between(d, n_a, n_b)

    return answer


MERGE = Task(
    _merge(),
    (
        ((2, 2.0, 2.0), (3, 7.0, 6.0)),
        ((4, 4.0, 18.0), (0, 0.0, 0.0)),
        ((0, 0.0, 0.0), (0, 0.0, 0.0)),
    ),
    "Three numbers are enough, however the scores were cut into batches.",
    {
        "You added the two M alone: how far the means lie apart is spread as well.": _merge(
            between=lambda d, n_a, n_b: 0.0
        ),
        "You took the middle of the two means: the larger set weighs more.": _merge(
            lambda n_a, n_b: 0.5
        ),
        "The weights of the mean are crossed: the step towards b is n_b / n.": _merge(
            lambda n_a, n_b: n_a / (n_a + n_b)
        ),
        "The distance of the means counts squared: M is a sum of squares.": _merge(
            between=lambda d, n_a, n_b: d * n_a * n_b / (n_a + n_b)
        ),
        "You took the distances of b from the old mean: the mean of both is nearer, so that the "
        "term is d ** 2 * n_a * n_b / n.": _merge(between=lambda d, n_a, n_b: d**2 * n_b),
        "The spread of the first set is lost: add its M.": _merge(old=0.0),
        "Two empty sets divide 0 by 0: give the first back where the second is empty.": _merge(
            guard=False
        ),
    },
)
