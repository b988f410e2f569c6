"Exercises of the labs."

from __future__ import annotations

from torch import Generator

from rlhf_nb.exercises.draw import one, pick, whole
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

# ---- The operations of an update ----


def my_update(weights: float, tokens: int, epochs: int, recomputed: bool) -> float:
    passes = 4 if recomputed else 3
    return epochs * passes * 2 * weights * tokens


def _update_cases(g: Generator) -> list[Case]:
    def case(weights: float, tokens: int, epochs: int) -> list[Case]:
        return [
            dict(weights=weights, tokens=tokens, epochs=epochs, recomputed=again)
            for again in (False, True)
        ]

    return [
        *case(7e9, 565, 4),
        *case(pick(g, [1e9, 3e9, 13e9]), one(g, 100, 2000), pick(g, [1, 2, 3])),
    ]


UPDATE = Exercise(
    "my_update",
    my_update,
    _update_cases,
    "Forward once, backward twice, and once more where activations are recomputed.",
    {
        "Each weight takes part in a multiplication and an addition: two operations per token, "
        "a factor of 2.": (
            " * 2 *",
            " *",
        ),
        "epochs makes no difference: every epoch runs forward and backward again.": (
            "epochs * passes",
            "passes",
        ),
        "tokens makes no difference: each token is multiplied by each weight.": (" * tokens", ""),
        "That is the forward pass alone: the backward pass costs twice as much again.": (
            "4 if recomputed else 3",
            "1",
        ),
        "That is the forward pass, twice if it is recomputed: the backward pass costs two "
        "forward passes more.": (
            "4 if recomputed else 3",
            "2 if recomputed else 1",
        ),
        "The backward pass computes two gradients, for the input and for the weights: it costs "
        "2 forward passes, not 1.": (
            "4 if recomputed else 3",
            "3 if recomputed else 2",
        ),
        "That is the backward pass alone: the forward pass is missing.": (
            "4 if recomputed else 3",
            "2",
        ),
        "recomputed makes no difference: you are right without it, and it adds one forward pass.": (
            "4 if recomputed else 3",
            "3",
        ),
        "recomputed makes no difference: without it, you count a forward pass too many.": (
            "4 if recomputed else 3",
            "4",
        ),
        "The condition is the other way round: add a forward pass if activations are recomputed.": (
            "4 if recomputed else 3",
            "3 if recomputed else 4",
        ),
        "Recomputing costs one forward pass, not all three again: 4 instead of 3.": (
            "4 if recomputed else 3",
            "6 if recomputed else 3",
        ),
    },
)

# ---- Rows into parts ----


def my_split(lengths: list[int], tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if parts and (len(parts[-1]) + 1) * lengths[i] <= tokens:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def _split_cases(g: Generator) -> list[Case]:
    def drawn(n: int) -> Case:
        different = (whole(g, 1, 3, n).cumsum(0))[whole(g, 0, n - 1, n).argsort()].tolist()
        return dict(lengths=different, tokens=one(g, 12, 24))

    return [
        dict(lengths=[9, 2, 3, 2, 4, 30], tokens=12),
        dict(lengths=[5, 5, 5, 5], tokens=10),
        dict(lengths=[7], tokens=3),
        dict(lengths=[1, 1, 1, 2], tokens=3),
        drawn(one(g, 5, 7)),
        drawn(one(g, 7, 9)),
    ]


FITS = "(len(parts[-1]) + 1) * lengths[i] <= tokens"
ORDER = "sorted(range(len(lengths)), key=lambda i: lengths[i])"

SPLIT = Exercise(
    "my_split",
    my_split,
    _split_cases,
    "Every row appears once, in as few parts as sorting by length allows.",
    {
        "You count real tokens only. Padding costs as much: a part costs its number of rows "
        "times its longest row.": (
            FITS,
            "sum(lengths[j] for j in parts[-1]) + lengths[i] <= tokens",
        ),
        "You take the rows in the order given, so short rows are padded to a long one: sort "
        "them first.": (
            ORDER,
            "range(len(lengths))",
            FITS,
            "(len(parts[-1]) + 1) * max(lengths[i], *(lengths[j] for j in parts[-1])) <= tokens",
        ),
        "You start with the longest row: start with the shortest, in ascending order.": (
            ORDER,
            "sorted(range(len(lengths)), key=lambda i: -lengths[i])",
            FITS,
            "(len(parts[-1]) + 1) * lengths[parts[-1][0]] <= tokens",
        ),
        "You check what the part costs before the new row is added: count it too, one row more.": (
            FITS,
            "len(parts[-1]) * lengths[i] <= tokens",
        ),
        "A part may cost exactly tokens: use <=, not <.": (FITS, FITS.replace("<=", "<")),
        "You treat tokens as a number of rows: a part costs its number of rows times its "
        "longest row.": (
            FITS,
            "len(parts[-1]) + 1 <= tokens",
        ),
        "Every row is in a part of its own: put as many in a part as fit.": (FITS, "False"),
        "All rows are in one part: it costs its number of rows times its longest row, and may "
        "cost no more than tokens.": (
            FITS,
            "True",
        ),
        "A row longer than the budget is lost, and nothing is learned from it: give it a part "
        "of its own.": (
            "return parts",
            "return [part for part in parts if lengths[part[-1]] <= tokens]",
        ),
        "You return positions in the sorted order: return the indices of the rows as given.": (
            "return parts",
            "places = iter(range(len(lengths)))\n    return [[next(places) for _ in part] for "
            "part in parts]",
        ),
        "You return lengths: return the indices of the rows.": (
            "return parts",
            "return [[lengths[i] for i in part] for part in parts]",
        ),
    },
)
