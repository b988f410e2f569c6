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
        "Your share is of all choices: keep those without a reason, where decided is false.": (
            " if not decided",
            "",
        ),
        "That is the share among choices with a reason: keep the others, where decided is false.": (
            "not decided",
            "decided",
        ),
        "You divide by all choices: divide by the number of those without a reason.": (
            "len(without)",
            "len(seen)",
        ),
        "That is the share of right answers: key 1 is for the left one.": ('"1"', '"2"'),
        "That is a number of choices: divide by the number of those without a reason.": (
            SHARE,
            "sum(without)",
        ),
        "You divide by the number of choices with a reason: divide by the number of those "
        "without.": (
            SHARE,
            "sum(without) / max(len(seen) - len(without), 1)",
        ),
        "That is the share without a reason among left answers: take the share of left answers "
        "among those without a reason.": (
            SHARE,
            'sum(without) / max(sum(key == "1" for key, _ in seen), 1)',
        ),
    },
)
