"Exercises of the lab on what came after PPO."

from __future__ import annotations

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import pick, uniform
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "22_after_ppo"

# ---- What the others earned ----


def my_others(earned: Tensor, size: int) -> Tensor:
    groups = earned.unflatten(0, (-1, size))
    total = groups.sum(1, keepdim=True)
    return ((total - groups) / (size - 1)).flatten()


def _others_cases(g: Generator) -> list[Case]:
    def case(groups: int, size: int) -> Case:
        sign = (torch.arange(groups * size) // size % 2) * 2 - 1
        return dict(earned=uniform(g, 11, 40, groups * size) * sign, size=size)

    return [case(2, 4), case(pick(g, [2, 3]), 3), case(3, 2), case(1, 5)]


OTHERS = Exercise(
    my_others,
    _others_cases,
    "Each response is measured against what the others to its prompt earned.",
    {
        "That is the mean of the whole group: leave "
        "the response itself out.": "(total - groups) / (size - 1) → (total - 0 * groups) / size",
        "The response itself is missing from the sum and still in the count: "
        "divide by size - 1.": "(size - 1) → size",
        "The response itself is in the sum: "
        "subtract it before you divide by size - 1.": "(total - groups) → (total - 0 * groups)",
        "These are the advantages: "
        "give the baseline alone.": "return ((total → return (groups - (total",
        "The sign is wrong: the others' mean, not minus it.": "(total - groups) → (groups - total)",
        "You average over the whole batch: only responses to the same prompt are "
        "compared.": "(total - groups) / (size - 1) → (earned.sum() - groups) / (len(earned) - 1)",
        "A group is `size` responses in a row. "
        "You took responses that are far apart.": "(-1, size)) → (size, -1)).T",
        "You return sums: divide by the number of the others.": " / (size - 1) →",
    },
)
