"The exercise of the page on preferences."

from __future__ import annotations

from torch import Generator

from rlhf_nb.exercises.draw import one, pick
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case


def my_lean(seen: list[tuple[str, bool]]) -> float:
    without = [key == "1" for key, decided in seen if not decided]
    return sum(without) / len(without)


def _lean_cases(g: Generator) -> list[Case]:
    def case(keys: str, decided: str) -> Case:
        return dict(seen=[(key, mark == "x") for key, mark in zip(keys, decided)])

    def drawn(n: int) -> Case:
        keys = "".join(pick(g, "112") for _ in range(n))
        return case("12" + keys, ".x" + "".join(pick(g, ".x") for _ in range(n)))

    return [
        case("1211222", ".x.xx.x"),
        case("11212", "xx.x."),
        case("2211", "..x."),
        drawn(one(g, 4, 7)),
        drawn(one(g, 8, 12)),
    ]


SHARE = "sum(without) / len(without)"

LEAN = Exercise(
    "my_lean",
    my_lean,
    _lean_cases,
    "A habit shows where there is no reason, and only there.",
    {
        "All choices are in your share: keep those without a reason, not decided.": (
            " if not decided",
            "",
        ),
        "That is the share where she had a reason: keep the others, not decided.": (
            "not decided",
            "decided",
        ),
        "You divide by all choices: divide by the number of those without a reason.": (
            "len(without)",
            "len(seen)",
        ),
        "That is the share of right answers: key 1 is the left one.": ('"1"', '"2"'),
        "That is a number of choices: divide by the number of those without a reason.": (
            SHARE,
            "sum(without)",
        ),
        "You divide by the choices that had a reason: divide by the number of those without.": (
            SHARE,
            "sum(without) / max(len(seen) - len(without), 1)",
        ),
        "That is the share of left answers that had no reason: the other way round, of those "
        "without a reason.": (
            SHARE,
            'sum(without) / max(sum(key == "1" for key, _ in seen), 1)',
        ),
    },
)
