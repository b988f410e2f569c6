"The ends of intervals: Student's t, and what has no formula."

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=1024)
def t_quantile(
    freedom: float,  # n - 1
    share: float = 0.95,  # probability between -t and t
) -> float:
    "Student's t. Raises ValueError below one degree of freedom."
    if freedom < 1:
        raise ValueError(f"freedom is {freedom}: give at least two runs.")
    angle = np.linspace(0, math.pi / 2, 20_001)  # x = sqrt(freedom) tan(angle)
    density = np.cos(angle) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(np.interp(share * area[-1], area, angle))


def last_that_fits(fits: Callable[[float], bool], inside: float, outside: float) -> float:
    "The last number that fits on the way from `inside`, which does, to `outside`; by halving."
    if fits(outside):
        return outside
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if fits(middle) else (inside, middle)
    return inside
