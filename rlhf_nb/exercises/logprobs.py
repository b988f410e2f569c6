"Exercises of the page on log-probs."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import lengths, normal, pick, ragged, whole
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

# ---- The log-prob of each response token ----


def my_logprobs(logits: Tensor, ids: Tensor, prompt_width: int, mask: Tensor) -> Tensor:
    real = torch.where(mask[:, :, None], logits[:, prompt_width - 1 : -1], 0.0)
    logp = real.log_softmax(-1)
    tokens = ids[:, prompt_width:]
    found = logp.gather(-1, tokens[:, :, None]).squeeze(-1)
    return torch.where(mask, found, 0.0)


def _logprobs_cases(g: Generator) -> list[Case]:
    def case(prompt_width: int, mask: Tensor, dirt: float) -> Case:
        width = prompt_width + mask.shape[1]
        logits = normal(g, len(mask), width, 3)
        logits[:, prompt_width - 1 : -1][~mask] = dirt
        logits[:, -1] = dirt
        return dict(
            logits=logits,
            ids=whole(g, 0, 2, len(mask), width),
            prompt_width=prompt_width,
            mask=mask,
        )

    return [
        case(3, lengths(4, 2, width=4), 9.0),
        case(2, lengths(3, 0, width=3), 4.0),
        case(pick(g, [1, 4]), ragged(g, 3, 3), math.nan),
        case(2, lengths(2, width=2), 0.5),
    ]


REAL = "torch.where(mask[:, :, None], logits[:, prompt_width - 1 : -1], 0.0)"
TAKEN = "logp.gather(-1, tokens[:, :, None]).squeeze(-1)"

LOGPROBS = Exercise(
    "my_logprobs",
    my_logprobs,
    _logprobs_cases,
    "Each token from the column before it, and nothing from padding.",
    {
        "You read the column of the token itself, which is about the token after it: your "
        "index is off by one.": (
            "prompt_width - 1 : -1",
            "prompt_width:",
        ),
        "You read one column too early: the first response token is chosen in the last prompt "
        "column.": (
            "logits[:, prompt_width - 1 : -1]",
            "logits.roll(1, 1)[:, prompt_width - 1 : -1]",
        ),
        "The columns are right and the tokens are not: you looked up the tokens before.": (
            "ids[:, prompt_width:]",
            "ids[:, prompt_width - 1 : -1]",
        ),
        "These are logits: subtract the log of the sum over the vocabulary.": (
            ".log_softmax(-1)",
            "",
        ),
        "These are probabilities: take their logarithm.": (TAKEN, TAKEN + ".exp()"),
        "softmax gives probabilities: take log_softmax, their logarithm.": (
            "log_softmax(-1)",
            "softmax(-1)",
            "torch.where(mask, found, 0.0)",
            "torch.where(mask, found, 1.0)",
        ),
        "The softmax is over the columns: take it over the vocabulary, the last axis.": (
            "log_softmax(-1)",
            "log_softmax(1)",
        ),
        "The softmax is over the examples: take it over the vocabulary, the last axis.": (
            "log_softmax(-1)",
            "log_softmax(0)",
        ),
        "These are the log-probs of the likeliest token: gather that of the token in ids.": (
            TAKEN,
            "logp.amax(-1)",
        ),
        "Zero times NaN is NaN: choose by the mask with torch.where, do not multiply by it.": (
            REAL,
            "logits[:, prompt_width - 1 : -1]",
            "torch.where(mask, found, 0.0)",
            "found * mask",
        ),
        "The numbers are right and the gradient is NaN: NaN went through log_softmax before the "
        "mask chose. Choose the real columns of the logits first.": (
            REAL,
            "logits[:, prompt_width - 1 : -1]",
        ),
        "Padding still has log-probs: set it to 0, by the mask, so that the sum over a row is "
        "the response's log-prob.": (
            REAL,
            "logits[:, prompt_width - 1 : -1]",
            "torch.where(mask, found, 0.0)",
            "found",
        ),
        "The log-probs have no gradient: they are detached.": (TAKEN, TAKEN + ".detach()"),
    },
    grads=("logits",),
)

# ---- The mean entropy ----


def my_entropy(logits: Tensor, mask: Tensor, temperature: float) -> Tensor:
    logp = (logits[mask] / temperature).log_softmax(-1)
    return -(logp.exp() * logp.clamp(min=-1e4)).sum(-1).mean()


def _entropy_cases(g: Generator) -> list[Case]:
    def case(mask: Tensor, temperature: float, dirt: float, banned: float = 0.5) -> Case:
        logits = normal(g, *mask.shape, 3, scale=2.0)
        logits[0, 0, 1] = banned
        logits[~mask] = dirt
        return dict(logits=logits, mask=mask, temperature=temperature)

    return [
        case(lengths(3, 1, width=3), 0.7, math.nan),
        case(lengths(2, 3, 0, width=3), pick(g, [0.5, 0.6]), 5.0, -math.inf),
        case(ragged(g, 3, 4), pick(g, [1.5, 2.0]), 3.0),
        case(lengths(2, width=2), 1.0, 0.0),
    ]


PLOGP = "(logp.exp() * logp.clamp(min=-1e4))"
MEAN = "-(logp.exp() * logp.clamp(min=-1e4)).sum(-1).mean()"
EACH = "    logp = (torch.where(mask[:, :, None], logits, 0.0) / temperature).log_softmax(-1)\n"
OWN = "    logp = (logits[mask] / temperature).log_softmax(-1)\n"

ENTROPY = Exercise(
    "my_entropy",
    my_entropy,
    _entropy_cases,
    "In nats, at the sampler's temperature, over real tokens.",
    {
        "The temperature makes no difference: divide the logits by it, as the sampler does.": (
            " / temperature",
            "",
        ),
        "You multiplied by the temperature: divide by it. A higher temperature makes the "
        "distribution flatter.": (
            " / temperature",
            " * temperature",
        ),
        "The sign is wrong: an entropy is never negative.": ("return -", "return "),
        "These are bits: use the natural logarithm, a constant factor of log 2.": (
            MEAN,
            MEAN + " / 0.6931471805599453",
        ),
        "A banned token gives NaN: its probability 0 times its log-prob -inf. It should add "
        "nothing.": (".clamp(min=-1e4)", ""),
        "Zero times NaN is NaN: choose the real tokens by the mask, do not multiply by it.": (
            OWN,
            "    logp = (logits / temperature).log_softmax(-1)\n",
            MEAN,
            "-(" + PLOGP + ".sum(-1) * mask).sum() / mask.sum()",
        ),
        "You divided by the number of all columns: count the real tokens, by the mask.": (
            OWN,
            EACH,
            MEAN,
            "-(" + PLOGP + ".sum(-1) * mask).sum() / mask.numel()",
        ),
        "You averaged the means of the rows: a token in a short row then weighs more.": (
            OWN,
            EACH,
            MEAN,
            "-(("
            + PLOGP
            + ".sum(-1) * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / mask.any(1).sum()",
        ),
        "You averaged over padding too: use the mask.": ("logits[mask]", "logits"),
        "You averaged over all positions: the logits on padding are cleared, but their entropy "
        "still counts. Average over real tokens, by the mask.": (
            OWN,
            EACH,
            MEAN,
            "-" + PLOGP + ".sum(-1).mean()",
        ),
        "That is the surprise of the likeliest token: an entropy is a sum over the whole "
        "vocabulary, each token's surprise times its probability.": (MEAN, "-logp.amax(-1).mean()"),
        "You averaged over the vocabulary: an entropy is a sum over the vocabulary.": (
            ".sum(-1).mean()",
            ".mean()",
        ),
        "The entropy has no gradient: it is detached.": (MEAN, MEAN + ".detach()"),
    },
    grads=("logits",),
)
