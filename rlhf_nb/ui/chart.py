"""The chart of every view in HTML: a curve as an SVG, its axes named."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from html import escape

from rlhf_nb.ui.html import asset, element, number_text, visible

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


def curve_svg(
    line: Points,
    marks: Sequence[int],  # dashed
    name: str,  # what a step is called
    unit: str,
    span: tuple[int, int] | None = None,  # of the steps; None: from the first to the last point
) -> str:
    "A line over the updates, its axes named."
    left, right = span or (line[0][0], line[-1][0])
    values = [y for _, y in line]
    low, high, largest = min(values), max(values), max(map(abs, values))
    x = lambda u: 56 + 196 * (u - left) / ((right - left) or 1)
    y = lambda value: 114 - 84 * ((value - low) / (high - low) if high > low else 0.5)
    return asset("curve.svg").format(
        style=asset("theme.css") + asset("curve.css"),  # an image inherits none
        marks="".join(f"M{x(u + 0.5):.1f} 26V118" for u in marks if left <= u < right),
        unit=escape(visible(unit)),
        name=escape(name),
        left=left,
        right=right,
        high_y=round(y(high)) + 4,
        high=written(high, largest),
        low=written(low, largest) if high > low else "",
        points=" ".join(f"{x(u):.1f},{y(value):.1f}" for u, value in line),
        x=x(line[-1][0]),
        y=y(values[-1]),
    )


def curve_picture(svg: str, description: str) -> str:
    "A curve inside a page, as an image of its own that follows the page's theme."
    data = base64.b64encode(svg.encode()).decode()
    source = f"data:image/svg+xml;base64,{data}"
    return element("img", alt=description, width=260, height=140, src=source)
