"""Combinations of options in which every two values meet: a fault that needs two settings at once is
seen with a tenth of the runs that all combinations take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any


def pairwise(
    *axes: tuple | list, allowed: Callable[..., bool] = lambda *row: True
) -> list[tuple[Any, ...]]:
    """Rows of one value of each axis. Every pair of values that some allowed row has is in one of
    them; the same call gives the same rows."""
    whole = [
        places
        for places in itertools.product(*(range(len(axis)) for axis in axes))
        if allowed(*(axis[i] for axis, i in zip(axes, places)))
    ]
    pairs = {places: set(itertools.combinations(enumerate(places), 2)) for places in whole}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(whole, key=lambda places: len(pairs[places] & missing)))
        missing -= pairs[chosen[-1]]
    return [tuple(axis[i] for axis, i in zip(axes, places)) for places in chosen]
