"The exercise of the page on memory."

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Generator

from rlhf_nb.exercises.draw import one
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case


def asked(my_largest: Callable, limit: int) -> tuple[int, str]:
    "What a search finds where `limit` rows fit, and whether it asked no more often than need be."
    questions: list[int] = []

    def fits(n: int) -> bool:
        questions.append(n)
        if len(questions) > 3000:
            raise RuntimeError("fits was asked 3,000 times: the search never ends.")
        return n <= limit

    largest = my_largest(fits)
    budget = 2 * math.ceil(math.log2(limit + 1)) + 4
    return largest, "few questions" if len(questions) <= budget else "too many questions"


def my_largest(fits: Callable[[int], bool]) -> int:
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _largest_cases(g: Generator) -> list[Case]:
    limits = [34, 1, 64, 63, 2, one(g, 3, 30), one(g, 100, 400), one(g, 500, 2000)]
    return [dict(limit=limit) for limit in limits]


LARGEST = Exercise(
    "my_largest",
    my_largest,
    _largest_cases,
    "Doubled until it did not fit, then halved.",
    {
        "One too many: this is the first number that does not fit, and you want the last that "
        "does.": (
            "return low",
            "return high",
        ),
        "One too few: it is off by one, because the next number fits as well.": (
            "return low",
            "return low - 1",
        ),
        "That is a power of two that fits: keep halving the gap between it and the first that "
        "does not.": (
            "return low",
            "return 2 ** (low.bit_length() - 1)",
        ),
        "That is a power of two that does not fit: keep halving the gap below it.": (
            "return low",
            "return 2 ** low.bit_length()",
        ),
        "The number is right, but you call fits for every number: double until it does not "
        "fit, then halve the gap.": (
            "    low = high // 2\n",
            "    low, high = 1, 2\n    while fits(high):\n        low, high = high, high + 1\n",
        ),
        "That is the first number that does not fit, and you call fits for every number: you "
        "want the last that fits, so double until it does not fit, then halve the gap.": (
            "    low = high // 2\n",
            "    low, high = 1, 2\n    while fits(high):\n        low, high = high, high + 1\n   "
            " return high\n",
        ),
        "The lower end has to fit: divide high by 2, do not multiply it.": (
            "high // 2",
            "high * 2",
        ),
        "The search stops one step too early, off by one: go on until high is low + 1.": (
            "high - low > 1",
            "high - low > 2",
        ),
        "The halves are exchanged: if the middle fits, it becomes the lower end.": (
            "            low = middle\n        else:\n            high = middle",
            "            high = middle\n        else:\n            low = middle",
        ),
    },
    use=asked,
    results=("the largest that fits", "the number of questions"),
)
