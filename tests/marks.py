"""Which cases of a test run in `make test`, and which later: what `slow` and `weekly` mean is in
pyproject.toml."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def marked(mark: str, *cases: Any) -> list:
    "All of them slow, or weekly."
    return [pytest.param(case, marks=getattr(pytest.mark, mark)) for case in cases]


def slow_but(quick: Iterable[Any], every: Iterable[Any]) -> list:
    "All but the quick ones are slow."
    quick = list(quick)
    return [x if x in quick else pytest.param(x, marks=pytest.mark.slow) for x in every]


def crossed(*axes: Sequence[Any]) -> list:
    """Every combination of one value from each axis. Those in which each value of the longest axis
    comes once, and of the others at least once, run always; the rest is weekly."""
    often = {tuple(i % len(axis) for axis in axes) for i in range(max(map(len, axes)))}
    assert all({at[k] for at in often} == set(range(len(axis))) for k, axis in enumerate(axes))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, at)),
            marks=() if at in often else pytest.mark.weekly,
            id="-".join(str(axis[i]) for axis, i in zip(axes, at)),
        )
        for at in product(*(range(len(axis)) for axis in axes))
    ]
