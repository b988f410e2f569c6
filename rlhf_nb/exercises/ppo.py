"The exercise of the page on the update."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import dirty, lengths, normal, pick, ragged
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case


def my_advantages(
    scores: Tensor,
    kl: Tensor,
    values: Tensor,
    mask: Tensor,
    kl_coef: float,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor, Tensor]:
    last = torch.zeros_like(mask)
    last[:, :-1] = mask[:, :-1] & ~mask[:, 1:]
    last[:, -1] = mask[:, -1]
    rewards = torch.where(mask, -kl_coef * kl, 0.0)
    rewards = rewards + torch.where(last, scores[:, None], 0.0)
    values = torch.where(mask, values, 0.0)
    after = torch.zeros_like(values)
    after[:, :-1] = values[:, 1:]
    deltas = rewards + gamma * after - values
    advantages = torch.zeros_like(deltas)
    later = torch.zeros(len(deltas))
    for t in reversed(range(deltas.shape[1])):
        later = deltas[:, t] + gamma * lam * later
        advantages[:, t] = later
    returns = advantages + values
    real = advantages[mask]
    whitened = torch.where(mask, (advantages - real.mean()) / real.std(), 0.0)
    return rewards, whitened, returns


def _advantages_cases(g: Generator) -> list[Case]:
    def case(mask: Tensor, dirt: float, kl_coef: float, gamma: float, lam: float) -> Case:
        kl = dirty(normal(g, *mask.shape, scale=0.5), mask, dirt)
        values = dirty(normal(g, *mask.shape), mask, 1 - dirt)
        scores = normal(g, len(mask), scale=2.0) + 1
        return dict(
            scores=scores, kl=kl, values=values, mask=mask, kl_coef=kl_coef, gamma=gamma, lam=lam
        )

    return [
        case(lengths(4, 2, 1, width=4), 7.0, 0.5, 0.9, 0.5),
        case(lengths(3, 1, 0, width=3), 3.0, pick(g, [0.1, 0.2]), 1.0, pick(g, [0.8, 0.95])),
        case(ragged(g, 3, 5), math.nan, pick(g, [0.3, 0.7]), pick(g, [0.6, 0.95]), 0.7),
    ]


DONE = "    return rewards, whitened, returns\n"
WHITE = "torch.where(mask, (advantages - real.mean()) / real.std(), 0.0)"
PRICE = "torch.where(mask, -kl_coef * kl, 0.0)"

ADVANTAGES = Exercise(
    "my_advantages",
    my_advantages,
    _advantages_cases,
    "Rewards, a whitened signal and targets, in the right order, and padding has no part in them.",
    {
        "The returns are made of whitened advantages: take the returns first, then whiten.": (
            DONE,
            "    return rewards, whitened, torch.where(mask, whitened + values, 0.0)\n",
        ),
        "The advantages are not whitened yet: mean 0 and standard deviation 1, over real tokens.": (
            DONE,
            "    return rewards, advantages, returns\n",
        ),
        "The sign of the KL is turned, which rewards drift from the reference: it is a price.": (
            "-kl_coef * kl",
            "kl_coef * kl",
        ),
        "kl_coef makes no difference: the price is kl_coef times the KL.": (
            "-kl_coef * kl",
            "-kl",
        ),
        "The KL is missing in the rewards: every token pays kl_coef times its KL.": (
            PRICE,
            "torch.zeros_like(kl)",
        ),
        "The score is missing in the rewards: it goes to the last real token of its row.": (
            "    rewards = rewards + torch.where(last, scores[:, None], 0.0)\n",
            "",
        ),
        "The score is on every token: it goes to the last real token of its row alone.": (
            "torch.where(last, scores",
            "torch.where(mask, scores",
        ),
        "The score is in the last column: it goes to the last real token, where the row ends.": (
            "    last[:, :-1] = mask[:, :-1] & ~mask[:, 1:]\n",
            "",
        ),
        "The sign of the score is turned: it is added to the reward.": (
            "rewards + torch.where(last",
            "rewards - torch.where(last",
        ),
        "Padding takes part in the whitening: use the mean and the spread of real tokens.": (
            "advantages[mask]",
            "advantages.reshape(-1)",
        ),
        "The zeros on padding were moved by the whitening: clear padding after it, by the mask.": (
            WHITE,
            "(advantages - real.mean()) / real.std()",
        ),
        "Each row was whitened by itself: whiten over the tokens of all rows, not row by row.": (
            WHITE,
            "torch.stack([torch.where(m, (a - a[m].mean()) / a[m].std(), 0.0) for a, m in "
            "zip(advantages, mask)])",
        ),
        "You divided by the spread and left the mean: subtract it, too.": (
            "(advantages - real.mean())",
            "advantages",
        ),
        "You subtracted the mean and left the spread: divide by the standard deviation.": (
            " / real.std()",
            "",
        ),
        "Your variance divides by n: the sample's spread takes n - 1.": (
            "real.std()",
            "real.std(correction=0)",
        ),
        "The returns are the advantages: a target is A + V.": (
            "returns = advantages + values",
            "returns = advantages",
        ),
        "The results are swapped: rewards first, then whitened advantages, then returns.": (
            DONE,
            "    return rewards, returns, whitened\n",
        ),
        "lam makes no difference: the step back is gamma * lam.": (
            "gamma * lam * later",
            "gamma * later",
        ),
        "gamma is missing in the surprise: delta is r + gamma * V of the next token - V.": (
            "gamma * after",
            "after",
        ),
        "gamma is missing in the step back, which is gamma * lam, not lam alone.": (
            "gamma * lam",
            "lam",
        ),
        "gamma and lam are swapped: gamma discounts the next value, lam only the step back.": (
            "gamma * after",
            "lam * after",
        ),
        "The values on padding were not cleared before the recursion: they leak into real "
        "tokens.": (
            "    values = torch.where(mask, values, 0.0)\n",
            "",
        ),
        "Zero times NaN is NaN: clear the padding with torch.where, do not multiply by the mask.": (
            "torch.where(mask, values, 0.0)",
            "values * mask",
            PRICE,
            "-kl_coef * kl * mask",
        ),
    },
    results=("rewards", "advantages", "returns"),
)
