"The exercise of the page on the update."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import dirty, lengths, normal, pick, ragged
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "12_ppo"


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
    "Rewards, a whitened signal and targets, in the right order, and untouched by padding.",
    {
        "The returns are computed from whitened advantages: compute the returns first, then "
        "whiten.": (
            DONE,
            "    return rewards, whitened, torch.where(mask, whitened + values, 0.0)\n",
        ),
        "The advantages are not whitened: they need mean 0 and standard deviation 1 over real "
        "tokens.": (
            DONE,
            "    return rewards, advantages, returns\n",
        ),
        "The sign of the KL is wrong, so drift from the reference is rewarded: the KL is a "
        "price.": (
            "-kl_coef * kl",
            "kl_coef * kl",
        ),
        "kl_coef makes no difference: the price is kl_coef times the KL.": (
            "-kl_coef * kl",
            "-kl",
        ),
        "The KL is missing from the rewards: every token pays kl_coef times its KL.": (
            PRICE,
            "torch.zeros_like(kl)",
        ),
        "The score is missing from the rewards: add it to the last real token of its row.": (
            "    rewards = rewards + torch.where(last, scores[:, None], 0.0)\n",
            "",
        ),
        "The score is on every token: add it to the last real token of its row alone.": (
            "torch.where(last, scores",
            "torch.where(mask, scores",
        ),
        "The score is in the last column: add it to the last real token, where the row ends.": (
            "    last[:, :-1] = mask[:, :-1] & ~mask[:, 1:]\n",
            "",
        ),
        "The sign of the score is wrong: add it to the reward.": (
            "rewards + torch.where(last",
            "rewards - torch.where(last",
        ),
        "Padding counts in the whitening: use the mean and the standard deviation of real "
        "tokens, by the mask.": (
            "advantages[mask]",
            "advantages.reshape(-1)",
        ),
        "Whitening moved the zeros on padding: clear padding after it, by the mask.": (
            WHITE,
            "(advantages - real.mean()) / real.std()",
        ),
        "Each row is whitened by itself: whiten over the tokens of all rows, not row by row.": (
            WHITE,
            "torch.stack([torch.where(m, (a - a[m].mean()) / a[m].std(), 0.0) for a, m in "
            "zip(advantages, mask)])",
        ),
        "You divided by the standard deviation without subtracting the mean: subtract it first.": (
            "(advantages - real.mean())",
            "advantages",
        ),
        "You subtracted the mean and did not divide by the standard deviation.": (
            " / real.std()",
            "",
        ),
        "Your variance divides by n: the variance of a sample divides by n - 1.": (
            "real.std()",
            "real.std(correction=0)",
        ),
        "The returns are the advantages: a return is A + V.": (
            "returns = advantages + values",
            "returns = advantages",
        ),
        "The results are swapped: return rewards first, then whitened advantages, then returns.": (
            DONE,
            "    return rewards, returns, whitened\n",
        ),
        "lam makes no difference: the step back is gamma * lam.": (
            "gamma * lam * later",
            "gamma * later",
        ),
        "gamma is missing from the surprise: delta = r + gamma * (V of the next token) - V.": (
            "gamma * after",
            "after",
        ),
        "gamma is missing from the step back, which is gamma * lam, not lam alone.": (
            "gamma * lam",
            "lam",
        ),
        "gamma and lam are swapped: gamma discounts the next value, lam only the step back.": (
            "gamma * after",
            "lam * after",
        ),
        "The values on padding are not cleared before the recursion, and leak into real "
        "tokens: use the mask.": (
            "    values = torch.where(mask, values, 0.0)\n",
            "",
        ),
        "Zero times NaN is NaN: clear padding with torch.where, do not multiply by the mask.": (
            "torch.where(mask, values, 0.0)",
            "values * mask",
            PRICE,
            "-kl_coef * kl * mask",
        ),
        "The rewards are whitened: only the advantages are.": (
            "    values = torch.where(mask, values, 0.0)\n",
            "    paid = rewards[mask]\n    rewards = torch.where(mask, (rewards - paid.mean()) / "
            "paid.std(), 0.0)\n    values = torch.where(mask, values, 0.0)\n",
        ),
        "The rewards that you return are divided by their standard deviation: return them as they "
        "are.": (DONE, "    return rewards / rewards[mask].std(), whitened, returns\n"),
    },
    results=("rewards", "advantages", "returns"),
)
