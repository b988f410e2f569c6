"The exercise of the page on the dashboard."

from __future__ import annotations

from torch import Generator

from rlhf_nb.exercises.draw import one, pick
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case


def my_thin(values: list[float], size: int) -> list[float]:
    kept = []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        places = {part.index(min(part)), part.index(max(part))}
        kept += [part[i] for i in sorted(places)]
    return kept


def _thin_cases(g: Generator) -> list[Case]:
    def drawn(size: int) -> Case:
        n = size * one(g, 2, 3) + one(g, 1, size - 1)
        return dict(values=[float(one(g, -9, 9)) for _ in range(n)], size=size)

    return [
        dict(values=[1.0, 9.0, 2.0, 3.0, 0.0, 5.0, 4.0], size=3),
        dict(values=[5.0, 1.0, 1.0, 7.0, 7.0, 7.0], size=3),
        dict(values=[2.0, 1.0], size=1),
        dict(values=[1.0, 2.0, 3.0, 40.0, 2.0], size=5),
        dict(values=[5.0, 5.0, 1.0, *[5.0] * 6, 9.0, 5.0, 5.0], size=12),
        drawn(pick(g, [3, 4])),
        drawn(pick(g, [5, 6])),
    ]


PLACES = "{part.index(min(part)), part.index(max(part))}"
SORTED = "[part[i] for i in sorted(places)]"

THIN = Exercise(
    "my_thin",
    my_thin,
    _thin_cases,
    "No spike is lost, and the line keeps its outline.",
    {
        "You keep every size-th value and lose any spike between two of them: look at all "
        "values of a stretch.": (
            PLACES,
            "{0}",
        ),
        "You keep the last value of each stretch and lose any spike before it: look at all "
        "values of a stretch.": (
            PLACES,
            "{len(part) - 1}",
        ),
        "You keep only the largest value: an entropy that collapses for one update would be "
        "lost. Keep the min, too.": (
            PLACES,
            "{part.index(max(part))}",
        ),
        "You keep only the smallest value: a peak would be lost. Keep the max, too.": (
            PLACES,
            "{part.index(min(part))}",
        ),
        "You always put the smallest first: a peak that comes before a dip is drawn after it. "
        "Keep the values in order.": (
            SORTED,
            "[min(part), max(part)][: len(places)]",
        ),
        "You always put the smallest first: a peak that comes before a dip is drawn after it, "
        "and equal values come twice. Keep the values in order.": (
            SORTED,
            "[min(part), max(part)]",
        ),
        "Equal values come twice: a stretch in which all values are equal gives one.": (
            "sorted(places)",
            "sorted([part.index(min(part)), part.index(max(part))])",
        ),
        "You dropped the last stretch, which is shorter: it holds the newest values, which "
        "matter most.": (
            "range(0, len(values), size)",
            "range(0, len(values) - size + 1, size)",
        ),
        "You take the mean, which hides spikes: a 40 among ninety-nine values of 1 becomes 1.4.": (
            SORTED,
            "[sum(part) / len(part)]",
        ),
        "You return indices: return the values there.": (
            SORTED,
            "[start + i for i in sorted(places)]",
        ),
        "You keep the first and the last value of each stretch and lose any spike between "
        "them: look for min and max.": (
            PLACES,
            "{0, len(part) - 1}",
        ),
        "You return a list for each stretch: return one flat list.": (
            "kept += [part[i] for i in sorted(places)]",
            "kept.append([part[i] for i in sorted(places)])",
        ),
    },
    any_value=False,
)
