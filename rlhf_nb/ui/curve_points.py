"""The points and numbers of a small picture of a curve."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf_nb.ui.html import number_text

Points = Sequence[tuple[int, float]]  # update and value, in order


def thin(points: Points, most: int = 240) -> list[tuple[int, float]]:
    """About `most` points with the same outline: first, last, and the smallest and largest of each
    stretch. nan and inf go."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) <= most:
        return points
    size, kept = math.ceil(len(points) / (most // 2)), {points[0], points[-1]}
    for at in range(0, len(points), size):
        stretch = points[at : at + size]
        kept |= {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
    return sorted(kept)


def written(value: float, largest: float) -> str:
    "A number of a curve: two decimals, or two digits where all of the curve is below 0.05."
    if value == 0:
        return "0"
    if largest < 0.05:
        return f"{value:.2g}".replace("-", "−") if abs(value) >= largest / 200 else "≈0"
    return number_text(value, 2 if largest < 10_000 else 0)
