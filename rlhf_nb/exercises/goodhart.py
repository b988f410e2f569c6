"Exercises of the lab on over-optimisation."

from __future__ import annotations

import math

from torch import Generator, Tensor, tensor

from rlhf_nb.exercises.draw import one, pick, uniform
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "21_goodhart"

# ---- The KL of the best of n ----


def my_best_of_n_kl(p: Tensor, n: int) -> Tensor:
    upto = p.cumsum(0)
    q = upto**n - (upto - p) ** n
    return (q * (q / p).log()).sum()


def _kl_cases(g: Generator) -> list[Case]:
    def draw_chances(answers: int) -> Tensor:
        weights = uniform(g, 0.5, 2.0, answers)
        return weights / weights.sum()

    return [
        dict(p=tensor([0.4, 0.3, 0.2, 0.1]), n=4),
        dict(p=draw_chances(3), n=1),
        dict(p=draw_chances(one(g, 4, 6)), n=pick(g, [2, 3, 5])),
        dict(p=draw_chances(one(g, 3, 5)), n=pick(g, [6, 7, 8])),
    ]


Q = "upto**n - (upto - p) ** n"

BEST_OF_N_KL = Exercise(
    my_best_of_n_kl,
    _kl_cases,
    "The probability that all n are at most this good, less that they are all worse.",
    {
        "That is the bound log n - (n-1)/n. It holds with equality only if no answer ever "
        "repeats: use the probabilities p.": lambda p, n: math.log(n) - (n - 1) / n,
        "You use F^n itself as the probability of an answer: that all n are at most this good. "
        "Subtract the probability that all n are worse.": f"{Q} → upto**n",
        "You use n p F^(n-1), which holds for answers so rare that none is drawn twice. "
        "Take F^n - (F - p)^n.": f"{Q} → n * p * upto ** (n - 1)",
        "You take the first answer for the best: p goes from the worst to the best, "
        "so add up from the front.": "p.cumsum(0) → p.flip(0).cumsum(0).flip(0)",
        "This is the KL the other way round, of the policy from the best of n: "
        "average log(q/p) over q.": "(q * (q / p).log()) → (p * (p / q).log())",
        "You average log(q/p) over p, the policy: "
        "the average is over q, the best of n.": "(q * (q / p).log()) → (p * (q / p).log())",
        "The sign is wrong: a KL is never negative. "
        "It is the mean of log q - log p.": "(q / p) → (p / q)",
        "That is the negative entropy of the best of n: "
        "divide q by p inside the logarithm.": "(q / p) → (q)",
        "You count one draw too few: all "
        "n answers are drawn from p.": f"{Q} → upto ** max(n - 1, 1) - (upto - p) ** max(n - 1, 1)",
        "You count one draw too many: "
        "n answers are drawn from p.": f"{Q} → upto ** (n + 1) - (upto - p) ** (n + 1)",
        "That is the mean over the answers: "
        "add up the terms, they are already weighted by q.": ".sum() → .mean()",
    },
)
