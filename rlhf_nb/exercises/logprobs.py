"Exercises of the page on log-probs."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import draw_lengths, far, integers, normal, pick, ragged_mask
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "05_logprobs"

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
        ids = integers(g, 0, 2, len(mask), width)
        far(logits[:, prompt_width - 1])
        ids[0, prompt_width] = 1
        return dict(logits=logits, ids=ids, prompt_width=prompt_width, mask=mask)

    return [
        case(3, draw_lengths(4, 2, width=4), 9.0),
        case(2, draw_lengths(3, 0, width=3), 4.0),
        case(pick(g, [1, 4]), ragged_mask(g, 3, 3), math.nan),
        case(2, draw_lengths(2, width=2), 0.5),
    ]


REAL = "torch.where(mask[:, :, None], logits[:, prompt_width - 1 : -1], 0.0)"
TAKEN = "logp.gather(-1, tokens[:, :, None]).squeeze(-1)"

LOGPROBS = Exercise(
    my_logprobs,
    _logprobs_cases,
    "Each token from the column before it, and nothing from padding.",
    {
        "You read the column of the token itself, which is about the token after it: "
        "your index is off by one.": "prompt_width - 1 : -1 → prompt_width:",
        "You read one column too early: the first response token is chosen in the last prompt "
        "column.": "logits[:, prompt_width - 1 : -1] → logits.roll(1, 1)[:, prompt_width - 1 : -1]",
        "The columns are right and the tokens are not: "
        "you looked up the tokens before.": "ids[:, prompt_width:] → ids[:, prompt_width - 1 : -1]",
        "These are logits: subtract the log of the sum over the vocabulary.": ".log_softmax(-1) →",
        "These are probabilities: take their logarithm.": f"{TAKEN} → {TAKEN}.exp()",
        "softmax gives probabilities: take log_softmax, their logarithm.": (
            "log_softmax(-1) → softmax(-1); "
            "torch.where(mask, found, 0.0) → torch.where(mask, found, 1.0)"
        ),
        "The softmax is over the columns: "
        "take it over the vocabulary, the last axis.": "log_softmax(-1) → log_softmax(1)",
        "The softmax is over the examples: "
        "take it over the vocabulary, the last axis.": "log_softmax(-1) → log_softmax(0)",
        "These are the log-probs of the likeliest token: "
        "gather that of the token in ids.": f"{TAKEN} → logp.amax(-1)",
        "Zero times NaN is NaN: choose by the mask with torch.where, do not multiply by it.": (
            f"{REAL} → logits[:, prompt_width - 1 : -1]; "
            "torch.where(mask, found, 0.0) → found * mask"
        ),
        "The numbers are right and the gradient is NaN: NaN went through log_softmax before the "
        "mask chose. Choose the real "
        "columns of the logits first.": f"{REAL} → logits[:, prompt_width - 1 : -1]",
        "Padding still has log-probs: "
        "set it to 0, by the mask, so that the sum over a row is the response's log-prob.": (
            f"{REAL} → logits[:, prompt_width - 1 : -1]; torch.where(mask, found, 0.0) → found"
        ),
        "The log-probs have no gradient: they are detached.": f"{TAKEN} → {TAKEN}.detach()",
    },
    grads=("logits",),
)
