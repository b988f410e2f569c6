"The exercise of the page on preferences."

from __future__ import annotations

from rlhf_nb.exercises import Task

Seen = list[tuple[str, bool]]  # a labeller's keys, and whether there was a reason for each


def _lean(seen: Seen) -> float:
    without = [key == "1" for key, decided in seen if not decided]
    return sum(without) / len(without)


def _case(keys: str, decided: str) -> tuple[Seen]:
    return ([(key, mark == "x") for key, mark in zip(keys, decided)],)


LEAN = Task(
    _lean,
    (_case("1211222", ".x.xx.x"), _case("11212", "xx.x.")),
    "A habit shows where there is no reason, and only there.",
    {
        "All choices are in your share: keep those without a reason.": lambda seen: (
            sum(key == "1" for key, _ in seen) / len(seen)
        ),
        "That is the share where she had a reason: keep the others.": lambda seen: (
            sum(key == "1" for key, d in seen if d) / sum(d for _, d in seen)
        ),
        "You divide by all choices: divide by those without a reason.": lambda seen: (
            sum(key == "1" and not d for key, d in seen) / len(seen)
        ),
        "That is the share of right answers: key 1 is the left one.": lambda seen: 1 - _lean(seen),
    },
)
