"Exercises of the page on KL."

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_nb.exercises import Task, clear

# ---- k3 ----


def _k3(
    formula: Callable[[Tensor], Tensor] = lambda logr: torch.expm1(logr) - logr,
    padding: str = "where",
    mean: bool = False,
) -> Callable:
    "An answer with some formula of logr."

    def answer(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        kl = clear(formula(ref_logprobs - logprobs), mask, padding)
        return kl.mean() if mean else kl

    return answer


def _k3_case(dirt: float) -> tuple:
    "Two rows of log-probs; on the padding the policy's are `dirt`."
    return (
        torch.tensor([[-1.4, -0.3, -2.0], [-0.9, dirt, dirt]]),
        torch.tensor([[-0.7, -0.7, -2.0], [-2.9, -1.0, -1.0]]),
        torch.tensor([[True, True, True], [True, False, False]]),
    )


K3 = Task(
    _k3(),
    (_k3_case(0.0), _k3_case(-1e4)),
    "Never negative, right on average, and 0 on padding.",
    {
        "logr is the wrong way round: reference minus policy.": _k3(lambda l: torch.expm1(-l) + l),
        "exp(logr) - logr starts at 1: subtract 1, or use expm1.": _k3(lambda l: l.exp() - l),
        "The last sign is turned: subtract logr.": _k3(lambda l: torch.expm1(l) + l),
        "The sign is turned: k3 is never negative.": _k3(lambda l: l - torch.expm1(l)),
        "That is k2, half the square: near zero they agree, and only there.": _k3(
            lambda l: l.square() / 2
        ),
        "That is k1: unbiased too, but of either sign.": _k3(lambda l: -l),
        "Zero times infinity is NaN: use torch.where on logr.": _k3(padding="times"),
        "The padding has a KL: it should be 0.": _k3(padding="none"),
        "Give one number a token: who averages decides how.": _k3(mean=True),
    },
)

# ---- The gradient of the exact KL by the logits ----


def _kl_gradient(logits: Tensor, ref_logits: Tensor) -> Tensor:
    logp, logq = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return logp.exp() * (logp - logq - (logp.exp() * (logp - logq)).sum())


def _expected_gradient(kind: str, formula: Callable[[Tensor], Tensor]) -> Callable:
    """The average gradient of an estimator of logr, as a detached reward or as a loss, over what
    the policy draws."""

    def answer(logits: Tensor, ref_logits: Tensor) -> Tensor:
        logits = logits.detach().clone().requires_grad_()
        logp = logits.log_softmax(-1)
        kl = formula(ref_logits.log_softmax(-1) - logp)
        each = kl if kind == "loss" else kl.detach() * logp
        return torch.autograd.grad((logp.detach().exp() * each).sum(), logits)[0]

    return answer


def _unbalanced(logits: Tensor, ref_logits: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return logp.exp() * (logp - ref_logits.log_softmax(-1))


KL_GRADIENT = Task(
    _kl_gradient,
    (
        (torch.tensor([0.0, math.log(3)]), torch.zeros(2)),
        (torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0.5, 1.0, -2.0])),
    ),
    "k1 as a reward or k2 as a loss: both pull home, exactly, on average.",
    {
        "All zeros: that is k1 as a loss. Detach it, times logp.": _expected_gradient(
            "loss", lambda l: -l
        ),
        "k3 as a loss: that is the gradient of the KL the other way round.": _expected_gradient(
            "loss", lambda l: torch.expm1(l) - l
        ),
        "That is k3 as a reward: k1 belongs there.": _expected_gradient(
            "reward", lambda l: torch.expm1(l) - l
        ),
        "That is k2 as a reward: it belongs in the loss.": _expected_gradient(
            "reward", lambda l: l.square() / 2
        ),
        "That is |logr| as a loss: half its square is what pulls right.": _expected_gradient(
            "loss", torch.abs
        ),
        "The sign is turned: k1 is log policy less log reference.": _expected_gradient(
            "reward", lambda l: l
        ),
        "It does not add up to 0, as a gradient by logits must: take the KL from log π - log "
        "ρ.": _unbalanced,
    },
)
