"Where a condition on a number stops being true: the ends of intervals that have no formula."

from __future__ import annotations

from collections.abc import Callable


def last_that_fits(fits: Callable[[float], bool], inside: float, outside: float) -> float:
    "The last number that fits on the way from `inside`, which does, to `outside`; by halving."
    if fits(outside):
        return outside
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if fits(middle) else (inside, middle)
    return inside
