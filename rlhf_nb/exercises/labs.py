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
        "A weight is multiplied and added: two operations for each token, a factor of 2.": (
            " * 2 *",
            " *",
        ),
        "epochs makes no difference: each epoch reads and learns anew.": (
            "epochs * passes",
            "passes",
        ),
        "tokens makes no difference: each token is multiplied with each weight.": (" * tokens", ""),
        "That is the forward pass. Backward costs twice as much again.": (
            "4 if recomputed else 3",
            "1",
        ),
        "That is the forward pass, twice where it is recomputed. Backward costs two forward "
        "passes.": (
            "4 if recomputed else 3",
            "2 if recomputed else 1",
        ),
        "Backward has two gradients, of the input and of the weights: it costs 2 forward passes, "
        "not 1.": (
            "4 if recomputed else 3",
            "3 if recomputed else 2",
        ),
        "That is the backward pass: the forward pass is missing.": ("4 if recomputed else 3", "2"),
        "recomputed makes no difference: right without it, and with it one more forward pass.": (
            "4 if recomputed else 3",
            "3",
        ),
        "recomputed makes no difference: nothing is recomputed, and you count a forward pass too "
        "many.": (
            "4 if recomputed else 3",
            "4",
        ),
        "The condition is turned round: one more forward pass where it is recomputed.": (
            "4 if recomputed else 3",
            "3 if recomputed else 4",
        ),
        "Recomputing costs a forward pass, not all three: 4 in place of 3.": (
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
    "Every row once, in as few parts as an order by length allows.",
    {
        "You add up real tokens. Padding costs as much: a part costs its rows times its longest "
        "row.": (
            FITS,
            "sum(lengths[j] for j in parts[-1]) + lengths[i] <= tokens",
        ),
        "You take rows as they come, so short rows pay for a long one beside them: sort them "
        "first.": (
            ORDER,
            "range(len(lengths))",
            FITS,
            "(len(parts[-1]) + 1) * max(lengths[i], *(lengths[j] for j in parts[-1])) <= tokens",
        ),
        "You start with the longest row: the shortest come first, in ascending order.": (
            ORDER,
            "sorted(range(len(lengths)), key=lambda i: -lengths[i])",
            FITS,
            "(len(parts[-1]) + 1) * lengths[parts[-1][0]] <= tokens",
        ),
        "You look at what the part costs without the row that comes. Count it in: one row more.": (
            FITS,
            "len(parts[-1]) * lengths[i] <= tokens",
        ),
        "A part may cost exactly tokens: at most is <=, not <.": (FITS, FITS.replace("<=", "<")),
        "tokens is a number of rows for you: a part costs its rows times its longest row.": (
            FITS,
            "len(parts[-1]) + 1 <= tokens",
        ),
        "Every row is a part alone: take as many as fit.": (FITS, "False"),
        "All rows are one part: it costs its rows times its longest row, tokens at most.": (
            FITS,
            "True",
        ),
        "A row longer than the budget is lost, and nothing is learnt from it: let it be a part "
        "alone.": (
            "return parts",
            "return [part for part in parts if lengths[part[-1]] <= tokens]",
        ),
        "Your numbers are places in the sorted order. Return the rows' own numbers.": (
            "return parts",
            "places = iter(range(len(lengths)))\n    return [[next(places) for _ in part] for "
            "part in parts]",
        ),
        "These are lengths: return the numbers of the rows.": (
            "return parts",
            "return [[lengths[i] for i in part] for part in parts]",
        ),
    },
)
