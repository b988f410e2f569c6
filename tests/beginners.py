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


ROWS_ARE_NOT_VISITED_ONCE = "rows' own KLs"
AFTER_THE_CHOICE = "after the choice|column of the token itself|each token's own column"
NOT_SHIFTED = "mask is not shifted|value after the last token is 0"

BEGINNERS: dict[str, Beginner] = {
    "KL: a step too many": Beginner(
        checks.check_kl_gradient,
        kl_gradient(lambda own, p, n: (to_go(own, p, n + 1)[0],)),
        "one token too many",
    ),
    "KL: a step too few": Beginner(
        checks.check_kl_gradient,
        kl_gradient(lambda own, p, n: (visited(own, p, n - 1) + 0 * own.sum(),)),
        "one token too few",
    ),
    "KL: itself": Beginner(
        checks.check_kl_gradient,
        kl_gradient(lambda own, p, n: to_go(own, p, n)[0]),
        "is a KL.*gradient was wanted",
    ),
    "KL: of each row": Beginner(
        checks.check_kl_gradient, kl_gradient(to_go), "is a KL for each row.*gradient"
    ),
    "KL: own KLs": Beginner(
        checks.check_kl_gradient,
        kl_gradient(lambda own, p, n: own),
        "each row's own KL.*gradient",
    ),
    "KL: mean of own KLs": Beginner(
        checks.check_kl_gradient,
        kl_gradient(lambda own, p, n: (own.mean(),)),
        ROWS_ARE_NOT_VISITED_ONCE + ".*average",
    ),
    "KL: mean over where it begins": Beginner(
        checks.check_kl_gradient,
        kl_gradient(lambda own, p, n: (to_go(own, p, n).mean(),)),
        "begins with row 0.*factor",
    ),
    "gae: returns": Beginner(checks.check_gae, returns_as_advantages, "returns, A . V"),
    "gae: both": Beginner(checks.check_gae, advantages_and_returns, "tuple of 2|shape .2"),
    "values: at the token, [B, T]": Beginner(
        checks.check_values, values(lambda v, m: _of(m, v[:, 1:])), AFTER_THE_CHOICE
    ),
    "values: at the token, [B, T + 1]": Beginner(
        checks.check_values, values(after_padding_in_front), AFTER_THE_CHOICE
    ),
    "values: [B, T]": Beginner(
        checks.check_values, values(lambda v, m: _of(m, v[:, :-1])), "T . 1"
    ),
    "values: mask not shifted": Beginner(
        checks.check_values,
        values(lambda v, m: _of(torch.cat([m, beside(m, False)], 1), v)),
        NOT_SHIFTED,
    ),
    "values: false in front of the mask": Beginner(
        checks.check_values,
        values(lambda v, m: _of(torch.cat([beside(m, False), m], 1), v)),
        "V_0 is missing",
    ),
    "a prompt width of 3": Beginner(
        checks.check_values,
        lambda numbers, prompt_width, mask: checks.check_values.right(numbers, 3, mask),
        "raised RuntimeError|shape|the first at",
    ),
}
