"Exercises of the page on shaping."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import between, dirty, lengths, normal, one, pick, ragged
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

# ---- Rewards: a price on each token, and one payment ----


def my_shaping(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    price = torch.where(mask, -kl_coef * kl, 0.0)
    last = torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1
    return price + torch.where(last, scores[:, None], 0.0)


def _shaping_cases(g: Generator) -> list[Case]:
    def case(mask: Tensor, dirt: float, kl_coef: float) -> Case:
        kl = dirty(normal(g, *mask.shape), mask, dirt)
        scores = between(g, 1, 4, len(mask)) * torch.tensor([1.0, -1.0, 1.0])[: len(mask)]
        return dict(scores=scores, kl=kl, mask=mask, kl_coef=kl_coef)

    return [
        case(lengths(3, 4, 0, width=4), 9.0, 0.5),
        case(lengths(1, 3, width=3), 2.0, pick(g, [0.1, 0.2])),
        case(ragged(g, 3, 4), math.nan, pick(g, [0.3, 0.7, 0.8])),
        case(lengths(3, 2, 0, width=3), -math.inf, 1.0),
    ]


PAID = "torch.where(last, scores[:, None], 0.0)"
LAST = "torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1"
RETURN = f"    return price + {PAID}\n"

SHAPING = Exercise(
    "my_shaping",
    my_shaping,
    _shaping_cases,
    "Each real token pays for its KL, and the last one collects the score.",
    {
        "The score is in the last column, also where that column is padding: look for the last "
        "real token.": (
            "== mask.sum(1, keepdim=True) - 1",
            "== mask.shape[1] - 1",
        ),
        "The score is one slot after the last real token: the stop token itself should get it.": (
            "mask.sum(1, keepdim=True) - 1",
            "mask.sum(1, keepdim=True).clamp(max=mask.shape[1] - 1)",
        ),
        "The score is one token too early, an index off by one: pay it to the last real one.": (
            "mask.sum(1, keepdim=True) - 1",
            "mask.sum(1, keepdim=True) - 2",
        ),
        "The score is one slot too late, an index off by one: it is lost where a row fills its "
        "columns.": (
            "mask.sum(1, keepdim=True) - 1",
            "mask.sum(1, keepdim=True)",
        ),
        "Every other token is paid 1: what is not the last token collects 0.": (
            "scores[:, None], 0.0",
            "scores[:, None], 1.0",
        ),
        "The score is on the first token: pay it to the last real one.": (
            LAST,
            "mask & (torch.arange(mask.shape[1]) == 0)",
        ),
        "Every token collects the score: it is paid once a row, on the last real token.": (
            PAID,
            "torch.where(mask, scores[:, None], 0.0)",
        ),
        "The score is spread over the tokens: it is paid once a row, on the last real token.": (
            PAID,
            "torch.where(mask, scores[:, None] / mask.sum(1, keepdim=True).clamp(min=1), 0.0)",
        ),
        "Nobody collects the score: add the scores to the last real token.": (f" + {PAID}", ""),
        "Only the score is paid: the KL has its price on every real token.": (
            f"price + {PAID}",
            PAID,
        ),
        "A row without tokens is paid in its last column: its last index is -1, and -1 counts "
        "from the right. Compare columns, do not index.": (
            LAST,
            "torch.arange(mask.shape[1]) == (mask.sum(1, keepdim=True) - 1) % mask.shape[1]",
        ),
        "A row without tokens is paid in its first column: its last index is -1, and it is "
        "clamped to 0.": (
            "mask.sum(1, keepdim=True) - 1",
            "(mask.sum(1, keepdim=True) - 1).clamp(min=0)",
        ),
        "Drift from the reference is rewarded: the KL is a price, so it needs a minus sign.": (
            "-kl_coef",
            "kl_coef",
        ),
        "The score is charged and not paid: its sign is turned.": (
            PAID,
            PAID.replace("scores", "-scores"),
        ),
        "kl_coef makes no difference: did you multiply the KL by it?": ("-kl_coef * kl", "-kl"),
        "You divided the KL by kl_coef: multiply by it.": ("-kl_coef * kl", "-kl / kl_coef"),
        "kl_coef multiplies the scores too: it is the price of the KL alone.": (
            "scores[:, None]",
            "kl_coef * scores[:, None]",
        ),
        "Padding is charged for KL: nobody chose those tokens.": (
            "torch.where(mask, -kl_coef * kl, 0.0)",
            "-kl_coef * kl",
        ),
        "Zero times infinity is NaN: choose with torch.where, do not multiply by the mask.": (
            "torch.where(mask, -kl_coef * kl, 0.0)",
            "-kl_coef * kl * mask",
        ),
        "All the KL is charged on the last token: let each token pay for its own, so that it "
        "learns which one it was.": (
            RETURN,
            "    return torch.where(last, scores[:, None] + price.sum(1, keepdim=True), 0.0)\n",
        ),
        "The last token collects the score and pays no KL: add the score to its price, do not "
        "replace it.": (
            RETURN,
            "    return torch.where(last, scores[:, None], price)\n",
        ),
    },
)

# ---- The clip and the penalty, which have an order ----


def my_final_scores(
    scores: Tensor, reached_stop: Tensor, score_clip: float, missing_eos_penalty: float
) -> Tensor:
    clipped = scores.clamp(-score_clip, score_clip)
    return torch.where(reached_stop, clipped, clipped - missing_eos_penalty)


def _final_scores_cases(g: Generator) -> list[Case]:
    def case(
        scores: list[float] | Tensor, stopped: list[bool], clip: float, penalty: float
    ) -> Case:
        return dict(
            scores=torch.as_tensor(scores),
            reached_stop=torch.tensor(stopped),
            score_clip=clip,
            missing_eos_penalty=penalty,
        )

    both = [True, False, True, False, True, False]
    return [
        case([6.0, 6.0, -5.0, -5.0, 0.5, 0.5], both, 3.0, 1.0),
        case(normal(g, 6, scale=3.0), both, pick(g, [1.0, 2.0, 2.5]), pick(g, [0.5, 1.5, 2.0])),
        case(normal(g, 6, scale=8.0), both, pick(g, [4.0, 5.0]), pick(g, [0.25, 3.0])),
        case([2.0, -2.0], [True, True], 5.0, 1.0),
    ]


CLIP = "scores.clamp(-score_clip, score_clip)"
PENALISED = "torch.where(reached_stop, clipped, clipped - missing_eos_penalty)"

FINAL_SCORES = Exercise(
    "my_final_scores",
    my_final_scores,
    _final_scores_cases,
    "Clipped first, so that the penalty always counts.",
    {
        "You clipped last, so that the clip swallows the penalty of a very good response without "
        "an end: clip first.": (
            CLIP,
            "scores",
            PENALISED,
            f"{PENALISED}.clamp(-score_clip, score_clip)",
        ),
        "You replaced the score of a row that was cut off: that is the older trick. Subtract the "
        "penalty here.": (
            "clipped - missing_eos_penalty)",
            "-missing_eos_penalty)",
        ),
        "Rows without a stop token are paid for it: the penalty is subtracted.": (
            "clipped - missing",
            "clipped + missing",
        ),
        "missing_eos_penalty makes no difference: a row that was cut off has to pay it.": (
            "clipped - missing_eos_penalty",
            "clipped",
        ),
        "You charge the rows that did stop: turn the condition round, by reached_stop.": (
            "clipped, clipped - missing_eos_penalty",
            "clipped - missing_eos_penalty, clipped",
        ),
        "You charge every row: only one that did not stop pays, by reached_stop.": (
            PENALISED,
            "clipped - missing_eos_penalty",
        ),
        "A one-sided clip: you clipped above and not below. -score_clip is a bound too.": (
            CLIP,
            "scores.clamp(max=score_clip)",
        ),
        "A one-sided clip: you clipped below and not above. score_clip is a bound too.": (
            CLIP,
            "scores.clamp(min=-score_clip)",
        ),
        "The lower bound is 0: a bad score is negative, down to -score_clip.": (
            CLIP,
            "scores.clamp(0, score_clip)",
        ),
        "Nothing is clipped: keep each score between -score_clip and score_clip.": (CLIP, "scores"),
        "score_clip and missing_eos_penalty are swapped.": (
            CLIP,
            "scores.clamp(-missing_eos_penalty, missing_eos_penalty)",
            "clipped - missing_eos_penalty",
            "clipped - score_clip",
        ),
    },
)

# ---- Merging two sets of scores from three numbers each ----

Moments = tuple[int, float, float]  # count, mean, sum of squared distances from the mean


def my_merge(a: Moments, b: Moments) -> Moments:
    (n_a, mean_a, m_a), (n_b, mean_b, m_b) = a, b
    if n_b == 0:
        return a
    n = n_a + n_b
    mean = (n_a * mean_a + n_b * mean_b) / n
    return n, mean, m_a + m_b + n_a * (mean_a - mean) ** 2 + n_b * (mean_b - mean) ** 2


def _merge_cases(g: Generator) -> list[Case]:
    def drawn() -> Moments:
        n = one(g, 1, 6)
        return n, float(normal(g, 1, scale=3.0)), float(between(g, 0.5, 6, 1)) if n > 1 else 0.0

    return [
        dict(a=(2, 2.0, 2.0), b=(3, 7.0, 6.0)),
        dict(a=(4, 4.0, 18.0), b=(0, 0.0, 0.0)),
        dict(a=(0, 0.0, 0.0), b=(0, 0.0, 0.0)),
        dict(a=(0, 0.0, 0.0), b=(3, -1.0, 5.0)),
        dict(a=drawn(), b=drawn()),
        dict(a=drawn(), b=drawn()),
    ]


BETWEEN = " + n_a * (mean_a - mean) ** 2 + n_b * (mean_b - mean) ** 2"

MERGE = Exercise(
    "my_merge",
    my_merge,
    _merge_cases,
    "Three numbers are enough, however the scores were cut into batches.",
    {
        "You added the two M alone: how far the means lie apart is spread as well.": (BETWEEN, ""),
        "You took the middle of the two means: the larger set weighs more, by n_a and n_b.": (
            "(n_a * mean_a + n_b * mean_b) / n",
            "(mean_a + mean_b) / 2",
        ),
        "The weights of the mean are crossed, n_a and n_b swapped: the step towards b is n_b / "
        "n.": (
            "(n_a * mean_a + n_b * mean_b) / n",
            "(n_b * mean_a + n_a * mean_b) / n",
        ),
        "The distance of the means counts squared: M is a sum of squares.": (
            BETWEEN,
            " + (mean_b - mean_a) * n_a * n_b / n",
        ),
        "You took the distances of b from the old mean: the mean of both is nearer, so that the "
        "term is d ** 2 * n_a * n_b / n.": (BETWEEN, " + n_b * (mean_b - mean_a) ** 2"),
        "The distances of the two means are not weighted: each counts n_a or n_b times.": (
            BETWEEN,
            " + (mean_a - mean) ** 2 + (mean_b - mean) ** 2",
        ),
        "Only the distance of a is in M: that of b counts as well.": (
            " + n_b * (mean_b - mean) ** 2",
            "",
        ),
        "Only the distance of b is in M: that of a counts as well.": (
            " + n_a * (mean_a - mean) ** 2",
            "",
        ),
        "You add the common mean where the distance from it is wanted: subtract it from mean_a.": (
            "(mean_a - mean)",
            "(mean_a + mean)",
        ),
        "You add the common mean where the distance from it is wanted: subtract it from mean_b.": (
            "(mean_b - mean)",
            "(mean_b + mean)",
        ),
        "You subtract the distances of mean_a: every distance adds to M.": (
            "+ n_a * (mean_a - mean) ** 2",
            "- n_a * (mean_a - mean) ** 2",
        ),
        "You subtract the distances of mean_b: every distance adds to M.": (
            "+ n_b * (mean_b - mean) ** 2",
            "- n_b * (mean_b - mean) ** 2",
        ),
        "The distance of mean_a counts squared: M is a sum of squares.": (
            "(mean_a - mean) ** 2",
            "(mean_a - mean) * 2",
        ),
        "The distance of mean_b counts squared: M is a sum of squares.": (
            "(mean_b - mean) ** 2",
            "(mean_b - mean) * 2",
        ),
        "n_a is divided by the squared distance: it multiplies it, once for each score of a.": (
            "n_a * (mean_a - mean) ** 2",
            "n_a / (mean_a - mean) ** 2",
        ),
        "n_b is divided by the squared distance: it multiplies it, once for each score of b.": (
            "n_b * (mean_b - mean) ** 2",
            "n_b / (mean_b - mean) ** 2",
        ),
        "The distance of mean_a counts squared, and the exponent is larger: M is a sum of "
        "squares.": ("(mean_a - mean) ** 2", "(mean_a - mean) ** 3"),
        "The distance of mean_b counts squared, and the exponent is larger: M is a sum of "
        "squares.": ("(mean_b - mean) ** 2", "(mean_b - mean) ** 3"),
        "n_a is divided by mean_a: the scores of a sum to n_a times their mean.": (
            "n_a * mean_a",
            "n_a / mean_a",
        ),
        "n_b is divided by mean_b: the scores of b sum to n_b times their mean.": (
            "n_b * mean_b",
            "n_b / mean_b",
        ),
        "You subtract the two M: both add to that of the whole.": ("m_a + m_b", "m_a - m_b"),
        "You subtract the two means where they are added up, each n_a or n_b times.": (
            "n_a * mean_a + n_b * mean_b",
            "n_a * mean_a - n_b * mean_b",
        ),
        "A sum of all scores is not divided by their number n: the mean is missing.": (
            "(n_a * mean_a + n_b * mean_b) / n",
            "n_a * mean_a + n_b * mean_b",
        ),
        "The condition is turned round: where n_b is 0 the first set is returned as it is.": (
            "n_b == 0",
            "n_b != 0",
        ),
        "The spread of the first set is lost: add its M.": ("m_a + m_b", "m_b"),
        "The spread of the second set is lost: add its M.": ("m_a + m_b", "m_a"),
        "That is a variance, and M is the sum of squares: do not divide by n.": (
            "return n, mean, m_a + m_b" + BETWEEN,
            "return n, mean, (m_a + m_b" + BETWEEN + ") / n",
        ),
        "Two empty sets divide 0 by 0: return the first where the second is empty.": (
            "    if n_b == 0:\n        return a\n",
            "",
        ),
        "The second set is lost: the count is n_a + n_b.": (
            "    n = n_a + n_b\n",
            "    return a\n",
        ),
    },
)
