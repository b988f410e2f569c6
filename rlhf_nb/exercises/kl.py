"Exercises of the page on KL."

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import between, dirty, lengths, normal, one, ragged
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

# ---- k3 ----


def my_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    logr = torch.where(mask, ref_logprobs - logprobs, 0.0)
    return torch.expm1(logr) - logr


def _k3_cases(g: Generator) -> list[Case]:
    def case(mask: Tensor, dirt: float) -> Case:
        logprobs = dirty(between(g, -3, -0.1, *mask.shape), mask, dirt)
        return dict(
            logprobs=logprobs,
            ref_logprobs=dirty(between(g, -3, -0.1, *mask.shape), mask, -1.0),
            mask=mask,
        )

    return [
        case(lengths(3, 1, width=3), 0.0),
        case(lengths(2, 0, 4, width=4), -1e4),
        case(ragged(g, 3, 4), -math.inf),
    ]


EXPM1 = "torch.expm1(logr) - logr"
WHERE = "torch.where(mask, ref_logprobs - logprobs, 0.0)"

K3 = Exercise(
    "my_k3",
    my_k3,
    _k3_cases,
    "Never negative, right on average, and 0 on padding.",
    {
        "logr is the wrong way round, logprobs and ref_logprobs are swapped: it is reference minus "
        "policy.": ("ref_logprobs - logprobs", "logprobs - ref_logprobs"),
        "exp(logr) - logr starts at 1: subtract 1, or use expm1.": (
            EXPM1,
            "torch.where(mask, logr.exp() - logr, 0.0)",
        ),
        "exp(logr) - logr starts at 1: subtract 1, or use expm1. The padding has that 1 too, and "
        "should be 0.": (EXPM1, "logr.exp() - logr"),
        "The last sign is turned: subtract logr.": (EXPM1, "torch.expm1(logr) + logr"),
        "logr is not subtracted: without it the number may be negative.": (
            EXPM1,
            "torch.expm1(logr)",
        ),
        "The sign is turned: k3 is never negative.": (EXPM1, "logr - torch.expm1(logr)"),
        "That is k2, half the square of logr: near zero they agree, and only there.": (
            EXPM1,
            "logr.square() / 2",
        ),
        "That is k1, minus logr: unbiased too, but of either sign.": (EXPM1, "-logr"),
        "Zero times infinity is NaN: use torch.where on logr, do not multiply by the mask.": (
            WHERE,
            "ref_logprobs - logprobs",
            EXPM1,
            "(torch.expm1(logr) - logr) * mask",
        ),
        "The padding has a KL: it should be 0 there, by the mask.": (
            WHERE,
            "ref_logprobs - logprobs",
        ),
        "The numbers are right, and the gradient is NaN: torch.where came after the exponential, "
        "which had overflowed on the padding, and 0 times infinity is NaN on the way back. Mask "
        "logr itself.": (
            WHERE,
            "ref_logprobs - logprobs",
            EXPM1,
            "torch.where(mask, torch.expm1(logr) - logr, 0.0)",
        ),
        "Return one number a token, not a mean: who averages decides how.": (
            EXPM1,
            "(torch.expm1(logr) - logr).mean()",
        ),
    },
    grads=("logprobs",),
)

# ---- The gradient of the exact KL by the logits ----


def my_kl_gradient(logits: Tensor, ref_logits: Tensor) -> Tensor:
    logp, logq = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    kl = (logp.exp() * (logp - logq)).sum()
    return logp.exp() * (logp - logq - kl)


def _kl_gradient_cases(g: Generator) -> list[Case]:
    def case(logits: Tensor, ref_logits: Tensor) -> Case:
        return dict(logits=logits, ref_logits=ref_logits)

    size = one(g, 3, 5)
    return [
        case(torch.tensor([0.0, math.log(3)]), torch.zeros(2)),
        case(torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0.5, 1.0, -2.0])),
        case(normal(g, size), normal(g, size)),
        case(normal(g, 4), normal(g, 4)),
    ]


def _estimated(kind: str, formula: Callable[[Tensor], Tensor]) -> Callable:
    """The average gradient of an estimator of the log-ratio x, as a detached reward or as a loss,
    over what the policy draws."""

    def answer(logits: Tensor, ref_logits: Tensor) -> Tensor:
        logits = logits.detach().clone().requires_grad_()
        logp = logits.log_softmax(-1)
        kl = formula(logp - ref_logits.log_softmax(-1))
        each = kl if kind == "loss" else kl.detach() * logp
        return torch.autograd.grad((logp.detach().exp() * each).sum(), logits)[0]

    return answer


HOME = "logp.exp() * (logp - logq - kl)"

KL_GRADIENT = Exercise(
    "my_kl_gradient",
    my_kl_gradient,
    _kl_gradient_cases,
    "k1 as a reward or k2 as a loss: for one token both pull home, exactly, on average.",
    {
        "All zeros: that is k1 as a loss. Detach it, times the log-prob.": _estimated(
            "loss", lambda x: x
        ),
        "k3 as a loss: that is the gradient of the KL the other way round, log π and log π_ref "
        "swapped.": _estimated("loss", lambda x: torch.expm1(-x) + x),
        "That is k3 as a reward: k1 belongs there.": _estimated(
            "reward", lambda x: torch.expm1(-x) + x
        ),
        "That is k2 as a reward: it belongs in the loss.": _estimated(
            "reward", lambda x: x.square() / 2
        ),
        "That is |log-ratio| as a loss: half its square is what pulls right.": _estimated(
            "loss", torch.abs
        ),
        "The square of the log-ratio as a loss is twice too large: take half of it.": _estimated(
            "loss", torch.square
        ),
        "The sign is turned: k1 is log policy minus log reference.": (
            HOME,
            "logp.exp() * (kl - logp + logq)",
        ),
        "It does not add up to 0, as a gradient by logits must: the KL is not subtracted from "
        "the log-ratio.": (
            HOME,
            "logp.exp() * (logp - logq)",
        ),
        "The KL is added, and it has to be subtracted: a gradient by logits adds up to 0.": (
            HOME,
            "logp.exp() * (logp - logq + kl)",
        ),
        "The policy's probabilities are missing as weights: multiply by them.": (
            HOME,
            "logp - logq - kl",
        ),
        "You weight by the reference's probabilities: the policy's belong there.": (
            HOME,
            "logq.exp() * (logp - logq - kl)",
        ),
        "The KL is a sum over the tokens, each with the policy's probability: you took the mean.": (
            ".sum()",
            ".mean()",
        ),
        "You add log π_ref in the KL: subtract it, because the log-ratio is a difference.": (
            "(logp - logq)).sum()",
            "(logp + logq)).sum()",
        ),
        "You add log π_ref to log π: subtract it, because the log-ratio is a difference.": (
            "(logp - logq - kl)",
            "(logp + logq - kl)",
        ),
        "The weights of the KL are log-probs: take their exponential, exp, for probabilities.": (
            "(logp.exp() * (logp - logq)).sum()",
            "(logp * (logp - logq)).sum()",
        ),
        "The weights of the gradient are log-probs: take their exponential, exp.": (
            "logp.exp() * (logp - logq - kl)",
            "logp * (logp - logq - kl)",
        ),
        "You left out log_softmax: logits have no scale until they are normalised.": (
            "logits.log_softmax(-1), ref_logits.log_softmax(-1)",
            "logits, ref_logits",
        ),
    },
)
