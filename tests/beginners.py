"""Wrong answers that beginners gave, in their own style: not edits of the right answer, and often
with a second mistake beside the one that matters. Each has the words that its message must have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_nb import checks
from rlhf_nb.exercises.engine import Exercise


class Beginner(NamedTuple):
    "A wrong answer, and a pattern that its message must match."

    checker: Exercise
    program: Callable
    words: str  # as a regular expression, whatever the case


def _of(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0)


# ---- The gradient of the KL ----


def kl_gradient(of: Callable) -> Callable:
    "An answer that differentiates, or returns, `of(own, chance, length)`."

    def answer(logits, ref_logits, length):
        logits = logits.clone().requires_grad_()
        logp, logq = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        found = of((logp.exp() * (logp - logq)).sum(-1), logp.exp(), length)
        if isinstance(found, tuple):
            return torch.autograd.grad(found[0], logits)[0]
        return found.detach()

    return answer


def to_go(own, chance, length):
    later = torch.zeros_like(own)
    for _ in range(length):
        later = own + chance @ later[1:]
    return later


def visited(own, chance, length):
    "The KL, from how likely each row is reached, step by step."
    reached, total = torch.eye(len(own))[0], 0.0
    for _ in range(length):
        total = total + (reached * own).sum()
        reached = torch.cat([torch.zeros(1), reached @ chance])
    return total


# ---- GAE ----


def returns_as_advantages(rewards, values, mask, gamma, lam):
    return checks.check_gae.right(rewards, values, mask, gamma, lam) + values


def advantages_and_returns(rewards, values, mask, gamma, lam):
    advantages = checks.check_gae.right(rewards, values, mask, gamma, lam)
    return advantages, advantages + _of(mask, values)


# ---- Values ----


def values(of: Callable) -> Callable:
    "An answer that returns `of(numbers in the columns from the last prompt column on, mask)`."
    return lambda numbers, prompt_width, mask: of(numbers[:, prompt_width - 1 :], mask)


def beside(mask: Tensor, real: bool) -> Tensor:
    return torch.full((len(mask), 1), real)


def after_padding_in_front(v, mask):
    shown = torch.cat([v[:, 1:], v[:, -1:]], 1)
    return _of(torch.cat([beside(mask, True), mask], 1), shown)


AFTER_THE_CHOICE = "after the choice|column of the token itself|each token's own column"
NOT_SHIFTED = "mask is not shifted|value after the last token is 0"


def of_kl(words: str, of: Callable) -> Beginner:
    return Beginner(checks.check_kl_gradient, kl_gradient(of), words)


def of_values(words: str, of: Callable) -> Beginner:
    return Beginner(checks.check_values, values(of), words)


def a_prompt_width_of_3(numbers, prompt_width, mask):
    return checks.check_values.right(numbers, 3, mask)


BEGINNERS: dict[str, Beginner] = {
    "KL: a step too many": of_kl(
        "one token too many", lambda own, p, n: (to_go(own, p, n + 1)[0],)
    ),
    "KL: a step too few": of_kl(
        "one token too few", lambda own, p, n: (visited(own, p, n - 1) + 0 * own.sum(),)
    ),
    "KL: itself": of_kl("is a KL.*gradient was wanted", lambda own, p, n: to_go(own, p, n)[0]),
    "KL: of each row": of_kl("is a KL for each row.*gradient", to_go),
    "KL: own KLs": of_kl("each row's own KL.*gradient", lambda own, p, n: own),
    "KL: mean of own KLs": of_kl("rows' own KLs.*average", lambda own, p, n: (own.mean(),)),
    "KL: mean over where it begins": of_kl(
        "begins with row 0.*factor", lambda own, p, n: (to_go(own, p, n).mean(),)
    ),
    "gae: returns": Beginner(checks.check_gae, returns_as_advantages, "returns, A . V"),
    "gae: both": Beginner(checks.check_gae, advantages_and_returns, "tuple of 2|shape .2"),
    "values: at the token, [B, T]": of_values(AFTER_THE_CHOICE, lambda v, m: _of(m, v[:, 1:])),
    "values: at the token, [B, T + 1]": of_values(AFTER_THE_CHOICE, after_padding_in_front),
    "values: [B, T]": of_values("T . 1", lambda v, m: _of(m, v[:, :-1])),
    "values: mask not shifted": of_values(
        NOT_SHIFTED, lambda v, m: _of(torch.cat([m, beside(m, False)], 1), v)
    ),
    "values: false in front of the mask": of_values(
        "V_0 is missing", lambda v, m: _of(torch.cat([beside(m, False), m], 1), v)
    ),
    "a prompt width of 3": Beginner(
        checks.check_values, a_prompt_width_of_3, "raised RuntimeError|shape|the first at"
    ),
}
