"Exercises of the page on the reward model."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import integers, normal, one
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "06_preferences"

# ---- The loss of a pair ----


def my_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    return torch.logaddexp(torch.zeros_like(chosen), rejected - chosen)


def _loss_cases(g: Generator) -> list[Case]:
    return [
        dict(chosen=torch.tensor([2.0, 0.5, -1.0]), rejected=torch.tensor([0.5, 0.5, 1.0])),
        dict(chosen=torch.tensor([-150.0, 60.0]), rejected=torch.tensor([50.0, -60.0])),
        dict(chosen=normal(g, 4, scale=2.0), rejected=normal(g, 4, scale=2.0)),
        dict(chosen=normal(g, 1), rejected=normal(g, 1)),
    ]


LOSS_OF = "torch.logaddexp(torch.zeros_like(chosen), rejected - chosen)"

LOSS = Exercise(
    my_loss,
    _loss_cases,
    "The negative log-likelihood of each choice, however wrong the model is.",
    {
        "The rejected answer is preferred, because chosen and rejected are swapped: "
        "take chosen minus rejected.": "rejected - chosen → chosen - rejected",
        "This is the log-likelihood: the loss is minus that.": "return torch → return -torch",
        "This is a probability: "
        "the log-likelihood is its logarithm.": "torch.sigmoid(chosen - rejected)",
        "This is minus a probability: take the logarithm of the probability, then the minus "
        "sign.": "-torch.sigmoid(chosen - rejected)",
        "For a pair in very wrong order the loss is infinite: a tiny sigmoid is rounded to 0 "
        "before its logarithm is taken, or a large exponential overflows. Use logaddexp or "
        "logsigmoid.": "-torch.sigmoid(chosen - rejected).log()",
        "The rejected answer is preferred, and a large exponential overflows: take chosen minus "
        "rejected, with logaddexp or logsigmoid.": "torch.log(1 + torch.exp(chosen - rejected))",
        **{
            f"{guard} inside the logarithm caps the loss at {-math.log(float(guard)):.1f}, however "
            "wrong the model is, and leaves no gradient there: logaddexp and logsigmoid need no "
            "such guard.": f"-(torch.sigmoid(chosen - rejected) + {guard}).log()"
            for guard in ("1e-12", "1e-10", "1e-9", "1e-8", "1e-7", "1e-6")
        },
        "You judge each score alone: only their difference counts.": (
            "-torch.nn.functional.logsigmoid(chosen) - torch.nn.functional.logsigmoid(-rejected)"
        ),
        "That is a hinge loss, which is 0 beyond a margin: "
        "the negative log-likelihood never is.": "(1 + rejected - chosen).clamp(min=0)",
        "That is a difference of scores: the probability of the choice is the sigmoid of the "
        "difference.": "rejected - chosen",
        "You return one number, the mean: return one for each pair.": LOSS_OF + ".mean()",
        "You return one number, the sum: return one for each pair.": LOSS_OF + ".sum()",
        "The loss has no gradient: it is detached.": LOSS_OF + ".detach()",
    },
    grads=("chosen", "rejected"),
)

# ---- An accuracy that length cannot win ----


def my_fair_accuracy(right: Tensor, gap: Tensor) -> Tensor:
    longer = right[gap > 0].float().mean()
    shorter = right[gap < 0].float().mean()
    return (longer + shorter) / 2


def _fair_accuracy_cases(g: Generator) -> list[Case]:
    def case(n: int) -> Case:
        gap = integers(g, -2, 2, n).float()
        gap[:4] = torch.tensor([1.0, -1.0, 0.0, 3.0])
        return dict(right=torch.rand(n, generator=g) < 0.5, gap=gap)

    fixed = [3.0, 1.0, 2.0, 5.0, 1.0, 0.0, 0.0, 0.0, -2.0, -1.0, -1.0]
    return [
        dict(right=torch.tensor([1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0]) > 0, gap=torch.tensor(fixed)),
        dict(
            right=torch.tensor([0, 1, 1, 0, 1]) > 0, gap=torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
        ),
        case(one(g, 5, 7)),
        case(one(g, 8, 12)),
    ]


BOTH = "(longer + shorter) / 2"

FAIR = Exercise(
    my_fair_accuracy,
    _fair_accuracy_cases,
    "A rule about length alone gets one half, whichever way it goes.",
    {
        "This is the plain accuracy: gap makes no difference, so the larger group outweighs "
        "the other.": "right.float().mean()",
        "You leave out ties, but pool the groups: take the mean of each, then the mean of the "
        "two.": "right[gap != 0].float().mean()",
        "You use only pairs whose better answer is longer, gap > 0: take the mean of both "
        "groups.": "longer",
        "You use only pairs whose better answer is shorter, gap < 0: take the mean of both "
        "groups.": "shorter",
        "Ties count as shorter: leave out a gap of 0.": "gap < 0 → gap <= 0",
        "Ties count as longer: leave out a gap of 0.": "gap > 0 → gap >= 0",
        "Ties count as longer and as shorter: "
        "leave out a gap of 0.": "gap > 0 → gap >= 0; gap < 0 → gap <= 0",
        "Each group is divided by the number of all pairs: divide by "
        "its own.": "((right & (gap > 0)).float().mean() + (right & (gap < 0)).float().mean()) / 2",
        "This is the sum of the two means: halve it.": "longer + shorter",
        "This is half the difference of the two means: add them.": "(longer - shorter) / 2",
        "You count the pairs of each group: take their mean.": "float().mean() → float().sum()",
        "This is the share of wrong ones: "
        "right is true for a pair in the right order.": f"1 - {BOTH}",
        "You weight the pairs by the size of their gap: every pair of a group weighs the same.": (
            "((right * gap.clamp(min=0)).sum() / gap.clamp(min=0).sum() + (right * "
            "gap.clamp(max=0)).sum() / gap.clamp(max=0).sum()) / 2"
        ),
    },
)
