"Exercises of the lab on over-optimisation."

from __future__ import annotations

import math

from torch import Generator, Tensor, tensor

from rlhf_nb.exercises.draw import between, normal, one, pick
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "21_goodhart"

# ---- The KL of the best of n ----


def my_best_of_n_kl(p: Tensor, n: int) -> Tensor:
    upto = p.cumsum(0)
    q = upto**n - (upto - p) ** n
    return (q * (q / p).log()).sum()


def _kl_cases(g: Generator) -> list[Case]:
    def drawn(answers: int) -> Tensor:
        weights = between(g, 0.5, 2.0, answers)
        return weights / weights.sum()

    return [
        dict(p=tensor([0.4, 0.3, 0.2, 0.1]), n=4),
        dict(p=drawn(3), n=1),
        dict(p=drawn(one(g, 4, 6)), n=pick(g, [2, 3, 5])),
        dict(p=drawn(one(g, 3, 5)), n=pick(g, [6, 7, 8])),
    ]


Q = "upto**n - (upto - p) ** n"

BEST_OF_N_KL = Exercise(
    "my_best_of_n_kl",
    my_best_of_n_kl,
    _kl_cases,
    "The probability that all n are at most this good, less that they are all worse.",
    {
        "That is the bound log n - (n-1)/n. It holds with equality only if no answer ever "
        "repeats: use the probabilities p.": lambda p, n: math.log(n) - (n - 1) / n,
        "You use F^n itself as the probability of an answer: that all n are at most this good. "
        "Subtract the probability that all n are worse.": (Q, "upto**n"),
        "You use n p F^(n-1), which holds for answers so rare that none is drawn twice. Take "
        "F^n - (F - p)^n.": (Q, "n * p * upto ** (n - 1)"),
        "You take the first answer for the best: p goes from the worst to the best, so add up "
        "from the front.": ("p.cumsum(0)", "p.flip(0).cumsum(0).flip(0)"),
        "This is the KL the other way round, of the policy from the best of n: average "
        "log(q/p) over q.": ("(q * (q / p).log())", "(p * (p / q).log())"),
        "You average log(q/p) over p, the policy: the average is over q, the best of n.": (
            "(q * (q / p).log())",
            "(p * (q / p).log())",
        ),
        "The sign is wrong: a KL is never negative. It is the mean of log q - log p.": (
            "(q / p)",
            "(p / q)",
        ),
        "That is the negative entropy of the best of n: divide q by p inside the logarithm.": (
            "(q / p)",
            "(q)",
        ),
        "You count one draw too few: all n answers are drawn from p.": (
            Q,
            "upto ** max(n - 1, 1) - (upto - p) ** max(n - 1, 1)",
        ),
        "You count one draw too many: n answers are drawn from p.": (
            Q,
            "upto ** (n + 1) - (upto - p) ** (n + 1)",
        ),
        "That is the mean over the answers: add up the terms, they are already weighted by q.": (
            ".sum()",
            ".mean()",
        ),
        "You weight nothing: each term log(q/p) counts with its probability q.": (
            "(q * (q / p).log())",
            "(q / p).log()",
        ),
    },
)

# ---- A cautious ensemble ----


def my_cautious(scores: Tensor, centers: Tensor, coef: float) -> Tensor:
    moved = scores - centers + centers.mean(0)
    mean = moved.mean(0)
    return mean - coef * ((moved - mean) ** 2).mean(0)


def _cautious_cases(g: Generator) -> list[Case]:
    def case(members: int, answers: int, coef: float) -> Case:
        centers = normal(g, members, answers, scale=2.0)
        return dict(scores=centers + normal(g, members, answers), centers=centers, coef=coef)

    return [
        dict(
            scores=tensor([[1.0, 3.0], [-2.0, -4.0]]),
            centers=tensor([[0.0, 0.0], [-4.0, -6.0]]),
            coef=0.5,
        ),
        case(3, 4, pick(g, [0.25, 0.75])),
        case(4, 3, pick(g, [1.5, 2.0])),
    ]


MOVED = "scores - centers + centers.mean(0)"
CHARGE = "((moved - mean) ** 2).mean(0)"

CAUTIOUS = Exercise(
    "my_cautious",
    my_cautious,
    _cautious_cases,
    "The members' zeros are gone, and only what they disagree about costs.",
    {
        "The members are not centred: a member's zero is arbitrary for each prompt, and its "
        "distance from the others' is no doubt about the answer. Subtract its center.": (
            MOVED,
            "scores",
        ),
        "You subtract the mean center from every member, which moves them all alike: subtract "
        "each member's own.": (MOVED, "scores - centers.mean(0)"),
        "You take one center for each member: it has one for each answer, since its zero is "
        "another for each prompt.": (
            MOVED,
            "scores - centers.mean(1, keepdim=True) + centers.mean()",
        ),
        "The scores have lost their level: add the mean of the centers back.": (
            MOVED,
            "scores - centers",
        ),
        "You add the centers to the scores instead of subtracting them.": (
            MOVED,
            "scores + centers - centers.mean(0)",
        ),
        "You return the mean: subtract coef times the variance.": (" - coef * " + CHARGE, ""),
        "The sign is wrong, and disagreement is rewarded: subtract the variance.": (
            "mean - coef",
            "mean + coef",
        ),
        "That is the standard deviation: square it.": (CHARGE, CHARGE + ".sqrt()"),
        "You divide by M - 1. Here the variance is the plain mean of the squares over the M "
        "members.": (CHARGE, "moved.var(0)"),
        "You sum the squares over the members: take their mean.": (
            CHARGE,
            "((moved - mean) ** 2).sum(0)",
        ),
        "You take mean and variance over the answers: take both over the members, dimension 0.": (
            "moved.mean(0)",
            "moved.mean(1, keepdim=True)",
            CHARGE,
            "((moved - mean) ** 2).mean(0)",
            "return mean - ",
            "return moved.mean(0) - ",
        ),
        "coef makes no difference: it multiplies the variance.": ("coef * ", ""),
        "You multiply the mean by coef too: it multiplies the variance only.": (
            "mean - coef * " + CHARGE,
            "coef * (mean - " + CHARGE + ")",
        ),
    },
)
