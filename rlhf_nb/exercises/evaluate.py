"Exercises of the page on evaluation."

from __future__ import annotations

import math

from torch import Generator

from rlhf_nb.exercises.draw import normal, one, pick, two
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

# ---- How many posts ----


def _ends(rate: float, n: int, z: float = 1.96) -> tuple[float, float]:
    "Of Wilson's interval."
    middle, spread = (
        rate + z * z / (2 * n),
        z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)),
    )
    scale = 1 + z * z / n
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def _width(rate: float, n: int) -> float:
    "From end to end of Wilson's interval."
    low, high = _ends(rate, n)
    return high - low


def _above(rate: float, n: int) -> float:
    "From the rate to the upper end of Wilson's interval."
    return _ends(rate, n)[1] - rate


def _textbook(rate: float, n: int) -> float:
    "From end to end of the interval that takes the rate for a normal number."
    return 2 * 1.96 * math.sqrt(rate * (1 - rate) / n)


def my_posts_needed(rate: float, width: float) -> int:
    n = 1
    while _width(rate, n) > width:
        n += 1
    return n


def _posts_needed_cases(g: Generator) -> list[Case]:
    return [
        dict(rate=0.6, width=0.2),
        dict(rate=0.9, width=0.15),
        dict(rate=0.5, width=0.95),
        dict(rate=pick(g, [0.3, 0.45, 0.55]), width=pick(g, [0.25, 0.3, 0.35])),
        dict(rate=pick(g, [0.7, 0.8, 0.85]), width=pick(g, [0.18, 0.22, 0.4])),
    ]


POSTS_NEEDED = Exercise(
    "my_posts_needed",
    my_posts_needed,
    _posts_needed_cases,
    "That is how many posts the answer costs.",
    {
        "You measured from the middle to one end: the width is from end to end. Half the width "
        "takes four times as many posts.": ("> width", "> 2 * width"),
        "You halved width: it is already from end to end.": ("> width", "> width / 2"),
        "You measured from the rate to the upper end, against half the width: Wilson's interval "
        "is not centred on the rate, so subtract its low end.": (
            "_width(rate, n) > width",
            "_above(rate, n) > width / 2",
        ),
        "You measured from the rate to the upper end: the width is from end to end.": (
            "_width(rate, n) > width",
            "_above(rate, n) > width",
        ),
        "That is the textbook interval: use wilson_interval.": ("_width(", "_textbook("),
        "rate makes no difference: a rate near 0 or 1 needs fewer posts than one half.": (
            "_width(rate",
            "_width(0.5",
        ),
        "One post too few: with that many the interval is still too wide, so the number is off "
        "by one.": (
            "return n",
            "return n - 1",
        ),
        "One post too many: with one less the interval is narrow enough, so the number is off "
        "by one.": (
            "return n",
            "return n + 1",
        ),
        "Enough posts, but not the fewest: increase n by one, not by ten.": (
            "n = 1",
            "n = 10",
            "n += 1",
            "n += 10",
        ),
        "Enough posts, but not the fewest: increase n by one, not by a hundred.": (
            "n = 1",
            "n = 100",
            "n += 1",
            "n += 100",
        ),
        "You double n: increase it by one to find the fewest.": ("n += 1", "n *= 2"),
        "That is the width of the interval: return the number of posts.": (
            "return n",
            "return _width(rate, n)",
        ),
    },
    any_value=False,
)

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
        dict(scores=[1.0, 5.0, 2.0], n=2),
        dict(scores=[0.3, -1.0, 4.0, 2.5, 0.0], n=3),
        dict(scores=[2.0, 7.0, 1.0, 3.0], n=1),
        case(one(g, 5, 7), 2),
        case(one(g, 5, 7), few),
        case(one(g, 5, 7), many),
    ]


WAYS = "math.comb(i, n - 1)"
SETS = "math.comb(len(scores), n)"

BEST_OF_N = Exercise(
    "my_best_of_n",
    my_best_of_n,
    _best_of_n_cases,
    "You considered every set of n and sampled none.",
    {
        "You weighted the scores in the order in which they came: sort them, smallest first.": (
            "sorted(scores)",
            "scores",
        ),
        "You sorted the largest first: that is the smallest of n, not the largest.": (
            "sorted(scores)",
            "sorted(scores)[::-1]",
        ),
        "The score at index i, counted from 0, has i scores below it, not i + 1: your index is "
        "off by one, and your weights add up to more than 1.": (WAYS, "math.comb(i + 1, n - 1)"),
        "The score at index i, counted from 0, has i scores below it, not i - 1: your index is "
        "off by one, and your weights add up to less than 1.": (
            WAYS,
            "(math.comb(i - 1, n - 1) if i else 0)",
        ),
        "The arguments of math.comb are swapped: math.comb(k, m) chooses m of k.": (
            WAYS,
            "math.comb(n - 1, i)",
        ),
        "You choose n of the scores below: choose n - 1, because the score itself is the n-th.": (
            WAYS,
            "math.comb(i, n)",
        ),
        "You choose n + 1 of the scores below: choose n - 1, because the score itself is the "
        "n-th.": (
            WAYS,
            "math.comb(i, n + 1)",
        ),
        "You choose n - 2 of the scores below, so you are off by one: n - 1 of them and the "
        "score itself make n.": (
            WAYS,
            "math.comb(i, max(n - 2, 0))",
        ),
        "You divide the number of sets by the score: multiply each score by it.": (
            "math.comb(i, n - 1) * score",
            "math.comb(i, n - 1) / score",
        ),
        "You multiply by the number of sets: divide by it.": (
            f"total / {SETS}",
            f"total * {SETS}",
        ),
        "That is the best of one set, the first n scores: average over all sets.": (
            f"total / {SETS}",
            "max(scores[:n])",
        ),
        "That is the best of all scores: n makes no difference.": (
            f"total / {SETS}",
            "max(scores)",
        ),
        "That is the mean of the scores: n makes no difference.": (
            f"total / {SETS}",
            "sum(scores) / len(scores)",
        ),
        "That is the mean of the n largest scores: average, over all sets of n, the largest of "
        "each.": (
            f"total / {SETS}",
            "sum(ordered[-n:]) / n",
        ),
        "You sampled with replacement: one answer can then fill a set alone, and the estimate "
        "is too low.": (
            WAYS,
            "((i + 1) ** n - i**n)",
            SETS,
            "len(scores) ** n",
        ),
        "That is a sum: divide it by the number of sets (math.comb).": (f"total / {SETS}", "total"),
        "You divided by the number of scores: divide by the number of sets (math.comb).": (
            SETS,
            "len(scores)",
        ),
    },
    any_value=False,
)
