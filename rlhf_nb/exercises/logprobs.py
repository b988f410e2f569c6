"Exercises of the page on log-probs."

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_nb.exercises import Task, clear

# ---- The log-prob of each response token ----


def _logprobs(
    start: int = -1, taken: int = 0, log: bool = True, exp: bool = False, padding: str = "where"
) -> Callable:
    """An answer that reads columns from prompt_width + start, and gathers the tokens from
    prompt_width + taken."""

    def answer(logits: Tensor, ids: Tensor, prompt_width: int, mask: Tensor) -> Tensor:
        width, first = mask.shape[1], prompt_width + start
        z = (logits.log_softmax(-1) if log else logits)[:, first : first + width]
        tokens = ids[:, prompt_width + taken :][:, :width, None]
        chosen = z.gather(-1, tokens).squeeze(-1)
        return clear(chosen.exp() if exp else chosen, mask, padding)

    return answer


def _logprobs_case(dirt: float) -> tuple:
    """Two rows, prompts of 3 and 2 tokens, responses of 4 and 2; `dirt` fills the columns that
    chose no token."""
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    logits = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    logits[:, -1], logits[1, 0], logits[1, 4:] = dirt, dirt, dirt
    return logits, torch.tensor([[1, 4, 2, 0, 3, 1, 4], [0, 3, 1, 2, 4, 0, 0]]), 3, mask


LOGPROBS = Task(
    _logprobs(),
    (_logprobs_case(9.0), _logprobs_case(math.nan)),
    "Each token from the column before it, and nothing from the padding.",
    {
        "You read the column of the token itself: that one chose the token after it.": _logprobs(
            start=0
        ),
        "One column too early: you skipped the last prompt column.": _logprobs(start=-2),
        "The columns are right and the tokens are not: you looked up the one before.": _logprobs(
            taken=-1
        ),
        "These are logits: subtract the log of the sum over the vocabulary.": _logprobs(log=False),
        "These are probabilities: PPO wants their logarithm.": _logprobs(exp=True),
        "Zero times NaN is NaN: choose with torch.where rather than multiply.": _logprobs(
            padding="times"
        ),
        "The padding still has log-probs: it should be 0, so that a sum is a sum.": _logprobs(
            padding="none"
        ),
    },
)

# ---- The mean entropy ----


def _entropy(
    power: int = -1, floor: float = -1e4, unit: float = 1.0, mean: str = "tokens"
) -> Callable:
    """An answer that multiplies the logits by temperature ** power, and averages in one of several
    ways."""

    def answer(logits: Tensor, mask: Tensor, temperature: float) -> Tensor:
        logp = (logits * temperature**power).log_softmax(-1)
        each = -(logp.exp() * logp.clamp(min=floor)).sum(-1) * unit
        clean, count = clear(each, mask), mask.sum(-1)
        return {
            "tokens": clean.sum() / count.sum(),
            "times": (each * mask).sum() / count.sum(),
            "columns": clean.mean(),
            "rows": (clean.sum(-1) / count).mean(),
            "raw": each.mean(),
        }[mean]

    return answer


def _entropy_case(dirt: float, banned: float) -> tuple:
    "Rows of 3 tokens and 1; `banned` is one token's logit, `dirt` is on the padding."
    logits = torch.tensor([[[0.0, 1.0, 2.0], [3.0, 0.0, 1.0], [1.0, 1.0, 4.0]]] * 2)
    logits[0, 1, 1], logits[1, 0], logits[1, 1:] = banned, torch.tensor([2.0, 2.0, 0.0]), dirt
    return logits, torch.tensor([[True, True, True], [True, False, False]]), 0.7


ENTROPY = Task(
    _entropy(),
    (_entropy_case(math.nan, 0.0), _entropy_case(5.0, -math.inf)),
    "In nats, at the sampler's temperature, over the tokens that are real.",
    {
        "You left the temperature out: the sampler divided its logits by it.": _entropy(power=0),
        "You multiplied by the temperature: divide, hotter is flatter.": _entropy(power=1),
        "The sign is turned: an entropy is never negative.": _entropy(unit=-1.0),
        "These are bits: use the natural logarithm, as all of this book.": _entropy(
            unit=1 / math.log(2)
        ),
        "A banned token gives NaN: 0 times -inf. It should add nothing.": _entropy(floor=-math.inf),
        "Zero times NaN is NaN: take the real tokens by the mask, do not multiply.": _entropy(
            mean="times"
        ),
        "You divided by all columns: count the real tokens.": _entropy(mean="columns"),
        "You averaged the rows' means: a token of a short row then weighs more.": _entropy(
            mean="rows"
        ),
        "You averaged over the padding too: use the mask.": _entropy(mean="raw"),
    },
)
