"Exercises of the page on evaluation."

from __future__ import annotations

import math

from torch import Generator

from rlhf_nb.exercises.draw import normal, one, two
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "14_evaluate"

# ---- The best of n, over all sets ----


def my_best_of_n(scores: list[float], n: int) -> float:
    ordered = sorted(scores)
    total = sum(math.comb(i, n - 1) * score for i, score in enumerate(ordered))
    return total / math.comb(len(scores), n)


def _best_of_n_cases(g: Generator) -> list[Case]:
    def case(size: int, n: int) -> Case:
        return dict(scores=[round(x, 2) for x in normal(g, size, scale=2.0).tolist()], n=n)

    few, many = two(g, [1, 3, 4])
    return [
        dict(scores=[10.0, 50.0, 20.0], n=2),
        dict(scores=[0.3, -1.0, 4.0, 2.5, 0.0], n=3),
        dict(scores=[-20.0, -70.0, -10.0, -30.0], n=1),
        case(one(g, 5, 7), 2),
        case(one(g, 5, 7), few),
        case(one(g, 5, 7), many),
    ]


WAYS = "math.comb(i, n - 1)"
SETS = "math.comb(len(scores), n)"

BEST_OF_N = Exercise(
    my_best_of_n,
    _best_of_n_cases,
    "You considered every set of n and sampled none.",
    {
        "You weighted the scores in the order in which they came: "
        "sort them, smallest first.": "sorted(scores) → scores",
        "You sorted the largest first: "
        "that is the smallest of n, not the largest.": "sorted(scores) → sorted(scores)[::-1]",
        "The score at index i, counted from 0, has i scores below it, not i + 1: your index is "
        "off by one, and your weights add up to more than 1.": f"{WAYS} → math.comb(i + 1, n - 1)",
        "The score at index i, counted from 0, has i scores below it, not i - 1: your index is off "
        "by one, and your weights "
        "add up to less than 1.": f"{WAYS} → (math.comb(i - 1, n - 1) if i else 0)",
        "The arguments of math.comb are swapped: "
        "math.comb(k, m) chooses m of k.": f"{WAYS} → math.comb(n - 1, i)",
        "You choose n of the scores below: "
        "choose n - 1, because the score itself is the n-th.": f"{WAYS} → math.comb(i, n)",
        "You choose n - 2 of the scores below, so you are off by one: "
        "n - 1 of them and the score itself make n.": f"{WAYS} → math.comb(i, max(n - 2, 0))",
        "That is the best of one set, "
        "the first n scores: average over all sets.": "max(scores[:n])",
        "That is the best of all scores: n makes no difference.": "max(scores)",
        "That is the mean of the scores: n makes no difference.": "sum(scores) / len(scores)",
        "That is the mean of the n largest scores: average, over all sets of n, the largest of "
        "each.": "sum(ordered[-n:]) / n",
        "You sampled with replacement: one answer can then fill a set alone, and "
        "the estimate is too low.": f"{WAYS} → ((i + 1) ** n - i**n); {SETS} → len(scores) ** n",
        "That is a sum: divide it by the number of sets (math.comb).": "total",
        "You divided by the number of scores: "
        "divide by the number of sets (math.comb).": f"{SETS} → len(scores)",
    },
)
