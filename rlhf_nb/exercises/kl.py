"Exercises of the page on KL."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import dirty, draw_lengths, normal, one, ragged_mask, uniform
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "08_kl"

# ---- k3 ----


def my_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    x = torch.where(mask, logprobs - ref_logprobs, 0.0)
    return torch.expm1(-x) + x


def _k3_cases(g: Generator) -> list[Case]:
    def case(mask: Tensor, dirt: float) -> Case:
        logprobs, ref_logprobs = uniform(g, -3, -0.1, 2, *mask.shape)
        logprobs[0, 0] -= 13.0  # far from the reference, on both sides
        ref_logprobs[0, 1] -= 13.0
        logprobs, ref_logprobs = dirty(logprobs, mask, dirt), dirty(ref_logprobs, mask, -1.0)
        return dict(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)

    return [
        case(draw_lengths(3, 1, width=3), 0.0),
        case(draw_lengths(2, 0, 4, width=4), -1e4),
        case(ragged_mask(g, 3, 4), -math.inf),
    ]


EXPM1 = "torch.expm1(-x) + x"
WHERE = "torch.where(mask, logprobs - ref_logprobs, 0.0)"
BARE = "logprobs - ref_logprobs"

K3 = Exercise(
    my_k3,
    _k3_cases,
    "Never negative, right on average, and 0 on padding.",
    {
        "The log-ratio x is the wrong way round, with logprobs and ref_logprobs swapped: "
        "it is policy minus reference.": f"{BARE} → ref_logprobs - logprobs",
        "exp(-x) + x is 1 at x = 0: "
        "subtract 1, or use expm1.": "torch.where(mask, (-x).exp() + x, 0.0)",
        "exp(-x) + x is 1 at x = 0: subtract 1, or use expm1. Padding has that 1 too, and "
        "should be 0.": "(-x).exp() + x",
        "The last sign is wrong: add x.": "torch.expm1(-x) - x",
        "The minus sign in the exponent is missing: it is exp(-x).": "torch.expm1(x) + x",
        "x is not added: without it, the result can be negative.": "torch.expm1(-x)",
        "The sign is wrong: k3 is never negative.": "-x - torch.expm1(-x)",
        "That is k2, half the square of x: "
        "it agrees with k3 near zero, and only there.": "x.square() / 2",
        "That is k1, x itself: it is unbiased too, but can be negative.": "x",
        "Zero times infinity is NaN: use torch.where on x, "
        "do not multiply by the mask.": f"{WHERE} → {BARE}; {EXPM1} → (torch.expm1(-x) + x) * mask",
        "Padding has a KL: it should be 0 there, by the mask.": f"{WHERE} → {BARE}",
        "The numbers are right, but the gradient is NaN: you called torch.where after the "
        "exponential, which overflows on padding, and 0 times infinity is NaN in the backward "
        "pass. Mask "
        "x itself.": f"{WHERE} → {BARE}; {EXPM1} → torch.where(mask, torch.expm1(-x) + x, 0.0)",
        "Return one number per token, not a mean: "
        "the caller decides how to average.": "(torch.expm1(-x) + x).mean()",
        **{
            f"You clamp the log-ratio at {c}, so a token far from the reference costs too little "
            "and has no gradient.": f"{WHERE} → {WHERE}.clamp(-{c}, {c})"
            for c in (5, 10)
        },
        "You clamp the result at 10: beyond it k3 goes on rising, and a clamp has no "
        "gradient.": f"({EXPM1}).clamp(max=10)",
    },
    grads=("logprobs",),
)

# ---- The gradient of the KL of a response by the logits ----


def my_kl_gradient(logits: Tensor, ref_logits: Tensor, length: int) -> Tensor:
    logits = logits.clone().requires_grad_()
    logp, logq = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    chance = logp.exp()
    own = (chance * (logp - logq)).sum(-1)
    to_go = torch.zeros_like(own)
    for _ in range(length):
        to_go = own + chance @ to_go[1:]
    (gradient,) = torch.autograd.grad(to_go[0], logits)
    return gradient


def _kl_gradient_cases(g: Generator) -> list[Case]:
    def case(logits: Tensor, ref_logits: Tensor, length: int) -> Case:
        return dict(logits=logits, ref_logits=ref_logits, length=length)

    def draw_case(size: int, length: int) -> Case:
        return case(normal(g, size + 1, size), normal(g, size + 1, size), length)

    tree = torch.tensor([[0.0, 0.0], [2.0, -2.0], [0.0, 0.0]])  # of the page
    high = torch.tensor([[12.5, 12.0], [-12.0, -12.5], [0.5, 0.0]])
    return [
        case(tree, torch.zeros(3, 2), 2),
        case(high, torch.tensor([[30.0, -30.0]] * 3), 2),
        draw_case(2, 1),
        draw_case(one(g, 3, 5), 3),
        draw_case(3, one(g, 4, 6)),
    ]


OWN = "(chance * (logp - logq)).sum(-1)"
NEXT = "own + chance @ to_go[1:]"


KL_GRADIENT = Exercise(
    my_kl_gradient,
    _kl_gradient_cases,
    "Each token answers for its own KL and for where it leads. On average k1 in the reward "
    "does that too, and no token-by-token penalty in the loss does.",
    {
        "The KL that follows is weighted by detached probabilities: that is a KL, or k2, token by "
        "token in the loss, which forgets where an early token leads. "
        "Remove the detach.": f"{NEXT} → own + chance.detach() @ to_go[1:]",
        "A token's own KL is detached, so that only the KL that follows has a gradient: that is an "
        "exact KL in the reward. Remove the detach.": f"{NEXT} → own.detach() + chance @ to_go[1:]",
        "All zeros: that is k1 in the loss, whose gradient is 0 on average. "
        "The probabilities are detached, and the gradient has to flow through them.": (
            f"{OWN} → (chance.detach() * (logp - logq)).sum(-1); "
            f"{NEXT} → own + chance.detach() @ to_go[1:]"
        ),
        "That is k3 in the loss, token by token: the gradient of the KL the other way round, "
        "with log π and log π_ref swapped. It also forgets where an early token leads.": (
            f"{OWN} → (logq.exp() * (logq - logp)).sum(-1); "
            f"{NEXT} → own + chance.detach() @ to_go[1:]"
        ),
        "The KL is the other way round, with log π and log π_ref swapped: weight log π - "
        "log π_ref by the policy's probabilities.": f"{OWN} → (logq.exp() * (logq - logp)).sum(-1)",
        "That is k3 in the reward: far from the reference it pushes further away. k1 belongs "
        "there.": f"{OWN} → (chance * (torch.expm1(logq - logp) + logp - logq).detach()).sum(-1)",
        "That is k2 in the reward: "
        "k1 belongs there.": f"{OWN} → (chance * ((logp - logq).square() / 2).detach()).sum(-1)",
        "k2 has the right gradient for a token's own KL, but its value is the wrong weight for "
        "earlier tokens: "
        "use the KL itself.": f"{OWN} → (chance.detach() * (logp - logq).square() / 2).sum(-1)",
        "That is only the KL of the first token: "
        "length makes no difference.": "range(length) → range(1)",
        "That is one token too few, off by one: "
        "the loop runs length times.": "range(length) → range(length - 1)",
        "That is one token too few, off by one, and no KL at all for a response of one token: the "
        "loop runs "
        "length times.": "torch.zeros_like(own) → 0 * own; range(length) → range(length - 1)",
        "That is one token too many, off by one: "
        "the loop runs length times.": "range(length) → range(length + 1)",
        "That is the KL per token: "
        "you divided by length.": "to_go[0], log → to_go[0] / length, log",
        "Every row is counted as a beginning, by a sum: "
        "a response begins with row 0.": "to_go[0] → to_go.sum()",
        "The rows are shifted by one: row 1 + a comes after token a.": "to_go[1:] → to_go[:-1]",
        "The sign is wrong: "
        "the log-ratio is log π minus log π_ref.": "(logp - logq) → (logq - logp)",
        "You weight by the reference's probabilities: "
        "use the policy's.": "chance = logp.exp() → chance = logq.exp()",
        "Each row of logits is a distribution of its own: take log_softmax over the last axis, "
        "-1.": "logp, logq = logits.log_softmax(-1) → logp, logq = logits.log_softmax(0)",
        "Each row of ref_logits is a distribution of its own: take log_softmax "
        "over the last axis, -1.": "ref_logits.log_softmax(-1) → ref_logits.log_softmax(0)",
        "You took the softmax of logits, which gives probabilities: take log_softmax, "
        "for log-probs.": "logp, logq = logits.log_softmax → logp, logq = logits.softmax",
        "Your response begins in row 1: "
        "row 0 is the first, and row 1 comes after token 0.": "to_go[0] → to_go[1]",
        "log_softmax is missing: logits have to "
        "be normalised.": "logits.log_softmax(-1), ref_logits.log_softmax(-1) → logits, ref_logits",
        "That is the gradient of the rows' own KLs, added up: a response does not visit every row "
        "once. Follow it from row 0 for length tokens, "
        "and weight each row by the probability of reaching it.": "to_go[0], log → own.sum(), log",
        "That is the gradient of the rows' own KLs, averaged: a response does not visit every row "
        "equally often. Follow it from row 0 for length tokens, "
        "and weight each row by the probability of reaching it.": "to_go[0], log → own.mean(), log",
        "Every row is counted as a beginning, by a mean: a response begins with row 0, "
        "and a mean over rows is a factor besides.": "to_go[0] → to_go.mean()",
        "That is a KL, and its gradient was wanted, which has the shape of logits: let autograd "
        "differentiate the KL, or do it by hand.": "to_go[0].detach()",
        "That is a KL for each row where a response may begin, and the gradient of the first one "
        "was wanted, which has the shape of logits.": "to_go.detach()",
        "That is each row's own KL, and the gradient of the KL of a response was wanted, which has "
        "the shape of logits.": "own.detach()",
    },
)
