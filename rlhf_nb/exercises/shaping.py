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
    "Each real token pays for its KL, and the last one gets the score.",
    {
        "The score is in the last column, even where that is padding: put it on the last real "
        "token.": (
            "== mask.sum(1, keepdim=True) - 1",
            "== mask.shape[1] - 1",
        ),
        "The score is one column after the last real token: put it on the stop token itself.": (
            "mask.sum(1, keepdim=True) - 1",
            "mask.sum(1, keepdim=True).clamp(max=mask.shape[1] - 1)",
        ),
        "The score is one token too early, an index off by one: put it on the last real token.": (
            "mask.sum(1, keepdim=True) - 1",
            "mask.sum(1, keepdim=True) - 2",
        ),
        "The score is one column too late, an index off by one: it is lost in a row that fills "
        "its columns.": (
            "mask.sum(1, keepdim=True) - 1",
            "mask.sum(1, keepdim=True)",
        ),
        "Every other token is paid 1: a token that is not the last gets 0.": (
            "scores[:, None], 0.0",
            "scores[:, None], 1.0",
        ),
        "The score is on the first token: put it on the last real one.": (
            LAST,
            "mask & (torch.arange(mask.shape[1]) == 0)",
        ),
        "Every token gets the score: it is paid once a row, on the last real token.": (
            PAID,
            "torch.where(mask, scores[:, None], 0.0)",
        ),
        "You spread the score over the tokens: it is paid once a row, on the last real token.": (
            PAID,
            "torch.where(mask, scores[:, None] / mask.sum(1, keepdim=True).clamp(min=1), 0.0)",
        ),
        "No token gets the score: add it to the last real token, by the mask.": (f" + {PAID}", ""),
        "Only the score is paid: subtract the price of the KL on every real token.": (
            f"price + {PAID}",
            PAID,
        ),
        "A row without tokens is paid in its last column: its last index is -1, which counts "
        "from the right. Compare column numbers instead of indexing.": (
            LAST,
            "torch.arange(mask.shape[1]) == (mask.sum(1, keepdim=True) - 1) % mask.shape[1]",
        ),
        "A row without tokens is paid in its first column: its last index is -1, and you "
        "clamped it to 0.": (
            "mask.sum(1, keepdim=True) - 1",
            "(mask.sum(1, keepdim=True) - 1).clamp(min=0)",
        ),
        "You reward drift from the reference: the KL is a price, so it needs a minus sign.": (
            "-kl_coef",
            "kl_coef",
        ),
        "The score is subtracted: its sign is wrong.": (
            PAID,
            PAID.replace("scores", "-scores"),
        ),
        "kl_coef makes no difference: multiply the KL by it.": ("-kl_coef * kl", "-kl"),
        "You divided the KL by kl_coef: multiply by it.": ("-kl_coef * kl", "-kl / kl_coef"),
        "kl_coef multiplies the scores too: it is the price of the KL alone.": (
            "scores[:, None]",
            "kl_coef * scores[:, None]",
        ),
        "Padding pays for its KL: nobody chose those tokens, so use the mask.": (
            "torch.where(mask, -kl_coef * kl, 0.0)",
            "-kl_coef * kl",
        ),
        "Zero times infinity is NaN: choose by the mask with torch.where, do not multiply by it.": (
            "torch.where(mask, -kl_coef * kl, 0.0)",
            "-kl_coef * kl * mask",
        ),
        "The last token pays for the KL of all: let each token pay for its own, so that it "
        "learns which one it was.": (
            RETURN,
            "    return torch.where(last, scores[:, None] + price.sum(1, keepdim=True), 0.0)\n",
        ),
        "The last token gets the score and pays no KL: add the score to its price instead of "
        "replacing it.": (
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
    beyond = torch.cat([normal(g, 4, scale=8.0), torch.tensor([9.0, -9.0])])  # every clip
    return [
        case([6.0, 6.0, -5.0, -5.0, 0.5, 0.5], both, 3.0, 1.0),
        case(normal(g, 6, scale=3.0), both, pick(g, [1.0, 2.0, 2.5]), pick(g, [0.5, 1.5, 2.0])),
        case(beyond, both, pick(g, [4.0, 5.0]), pick(g, [0.25, 3.0])),
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
        "You clipped last, so the clip swallows the penalty of a high score: clip first.": (
            CLIP,
            "scores",
            PENALISED,
            f"{PENALISED}.clamp(-score_clip, score_clip)",
        ),
        "You replaced the score of a response that did not stop, as an older trick does: "
        "subtract the penalty instead.": (
            "clipped - missing_eos_penalty)",
            "-missing_eos_penalty)",
        ),
        "You add the penalty to responses that did not stop: subtract it.": (
            "clipped - missing",
            "clipped + missing",
        ),
        "missing_eos_penalty makes no difference: a response that did not stop has to pay it.": (
            "clipped - missing_eos_penalty",
            "clipped",
        ),
        "You charge the responses that did stop: the condition on reached_stop is the other "
        "way round.": (
            "clipped, clipped - missing_eos_penalty",
            "clipped - missing_eos_penalty, clipped",
        ),
        "You charge every response: only those that did not stop pay, by reached_stop.": (
            PENALISED,
            "clipped - missing_eos_penalty",
        ),
        "A one-sided clip: you clip above and not below. -score_clip is a bound too.": (
            CLIP,
            "scores.clamp(max=score_clip)",
        ),
        "A one-sided clip: you clip below and not above. score_clip is a bound too.": (
            CLIP,
            "scores.clamp(min=-score_clip)",
        ),
        "Your lower bound is 0: scores may be negative, down to -score_clip.": (
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
    "Three numbers are enough, however the scores were divided into batches.",
    {
        "You only added the two M: the distance between the means is spread as well.": (
            BETWEEN,
            "",
        ),
        "You averaged the two means: the larger set weighs more, by n_a and n_b.": (
            "(n_a * mean_a + n_b * mean_b) / n",
            "(mean_a + mean_b) / 2",
        ),
        "The weights of the means are crossed, with n_a and n_b swapped: each mean is weighted "
        "by its own count.": (
            "(n_a * mean_a + n_b * mean_b) / n",
            "(n_b * mean_a + n_a * mean_b) / n",
        ),
        "The distance between the means is not squared: M is a sum of squares.": (
            BETWEEN,
            " + (mean_b - mean_a) * n_a * n_b / n",
        ),
        "You took the distances from mean_a: take them from the common mean, which is nearer. "
        "The term is d ** 2 * n_a * n_b / n.": (BETWEEN, " + n_b * (mean_b - mean_a) ** 2"),
        "The distances of the two means are not weighted: each counts n_a or n_b times.": (
            BETWEEN,
            " + (mean_a - mean) ** 2 + (mean_b - mean) ** 2",
        ),
        "M has only the distance of mean_a: add that of mean_b as well.": (
            " + n_b * (mean_b - mean) ** 2",
            "",
        ),
        "M has only the distance of mean_b: add that of mean_a as well.": (
            " + n_a * (mean_a - mean) ** 2",
            "",
        ),
        "You add the common mean to mean_a: subtract it, for the distance.": (
            "(mean_a - mean)",
            "(mean_a + mean)",
        ),
        "You add the common mean to mean_b: subtract it, for the distance.": (
            "(mean_b - mean)",
            "(mean_b + mean)",
        ),
        "You subtract the squared distance of mean_a from M: add it.": (
            "+ n_a * (mean_a - mean) ** 2",
            "- n_a * (mean_a - mean) ** 2",
        ),
        "You subtract the squared distance of mean_b from M: add it.": (
            "+ n_b * (mean_b - mean) ** 2",
            "- n_b * (mean_b - mean) ** 2",
        ),
        "The distance of mean_a is not squared: M is a sum of squares.": (
            "(mean_a - mean) ** 2",
            "(mean_a - mean) * 2",
        ),
        "The distance of mean_b is not squared: M is a sum of squares.": (
            "(mean_b - mean) ** 2",
            "(mean_b - mean) * 2",
        ),
        "You divide n_a by the squared distance: multiply, once for each score of a.": (
            "n_a * (mean_a - mean) ** 2",
            "n_a / (mean_a - mean) ** 2",
        ),
        "You divide n_b by the squared distance: multiply, once for each score of b.": (
            "n_b * (mean_b - mean) ** 2",
            "n_b / (mean_b - mean) ** 2",
        ),
        "The exponent of the distance of mean_a is too large: square it, because M is a sum of "
        "squares.": ("(mean_a - mean) ** 2", "(mean_a - mean) ** 3"),
        "The exponent of the distance of mean_b is too large: square it, because M is a sum of "
        "squares.": ("(mean_b - mean) ** 2", "(mean_b - mean) ** 3"),
        "You divide n_a by mean_a: multiply them, for the sum of the scores of a.": (
            "n_a * mean_a",
            "n_a / mean_a",
        ),
        "You divide n_b by mean_b: multiply them, for the sum of the scores of b.": (
            "n_b * mean_b",
            "n_b / mean_b",
        ),
        "You subtract one M from the other: add them.": ("m_a + m_b", "m_a - m_b"),
        "You subtract the sum of b from the sum of a: add them, n_a * mean_a + n_b * mean_b.": (
            "n_a * mean_a + n_b * mean_b",
            "n_a * mean_a - n_b * mean_b",
        ),
        "You return the sum of all scores: divide it by n, for the mean.": (
            "(n_a * mean_a + n_b * mean_b) / n",
            "n_a * mean_a + n_b * mean_b",
        ),
        "The condition is the other way round: return the first set as it is if n_b is 0.": (
            "n_b == 0",
            "n_b != 0",
        ),
        "The spread within the first set is lost: add its M.": ("m_a + m_b", "m_b"),
        "The spread within the second set is lost: add its M.": ("m_a + m_b", "m_a"),
        "That is a variance: M is the sum of squares, so do not divide it by n.": (
            "return n, mean, m_a + m_b" + BETWEEN,
            "return n, mean, (m_a + m_b" + BETWEEN + ") / n",
        ),
        "For two empty sets you divide 0 by 0: return the first if the second is empty.": (
            "    if n_b == 0:\n        return a\n",
            "",
        ),
        "The second set is lost: the count is n_a + n_b.": (
            "    n = n_a + n_b\n",
            "    return a\n",
        ),
    },
)
