"""The one chart of all views in HTML, as an SVG: with its axes named, or as a strip."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from rlhf_nb.ui.html import asset, element, number_text, visible

Points = Sequence[tuple[float, float]]  # update and value, in order


def thin(points: Points, most: int = 240) -> list[tuple[float, float]]:
    "About `most` points, the smallest and largest of each stretch among them. nan and inf go."
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) <= most:
        return points
    size, kept = math.ceil(len(points) / (most // 2)), {points[0], points[-1]}
    for at in range(0, len(points), size):
        stretch = points[at : at + size]
        kept |= {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
    return sorted(kept)


def value_text(value: float, largest: float) -> str:
    "A number of a curve: two decimals, or two digits where all of the curve is below 0.05."
    if value == 0:
        return "0"
    if largest < 0.05:
        return f"{value:.2g}".replace("-", "−") if abs(value) >= largest / 200 else "≈0"
    return number_text(value, 2 if largest < 10_000 else 0)


# Left, right, top and bottom of the rectangle that lines have for themselves.
CHART = (56, 252, 30, 114)  # of curve.svg, with room for numbers, a unit and a name
STRIP = (4, 216, 6, 58)  # of strip.svg, for a page that has words and numbers beside it
FEW_MARKS = 12  # measurements, each of which is marked
Place = Callable[[float], float]  # of a step or a value, in the picture


def draw_lines(
    lines: Mapping[int, Points], span: tuple[float, float], area: tuple[int, int, int, int]
) -> tuple[str, Place, Place]:
    """The line of each run, by its place among them, with a ring at its last point, on one scale; a
    point before the span is at its start. And where a step and a value are."""
    values = [value for line in lines.values() for _, value in line]
    (first, last), low, high = span, min(values), max(values)
    left, right, top, bottom = area

    def along(value: float, low: float, high: float, start: int, end: int) -> float:
        share = (max(value, low) - low) / (high - low) if high > low else 0.5
        return start + (end - start) * share

    x = lambda step: along(step, first, last, left, right)
    y = lambda value: along(value, low, high, bottom, top)
    parts = []
    for i, line in lines.items():
        corners = " ".join(f"{x(u):.2f},{y(value):.2f}" for u, value in line)
        place = dict(cx=f"{x(line[-1][0]):.2f}", cy=f"{y(line[-1][1]):.2f}")
        parts.append(element("polyline", points=corners, class_=f"line{i}"))
        parts.append(element("circle", **place, r=4, class_=f"ring{i}"))
    return "".join(parts), x, y


def curve_svg(line: Points, marks: Sequence[int], name: str, unit: str) -> str:
    "A line over updates, or what `name` calls them, its axes named; dashed at the marks."
    left, right = line[0][0], line[-1][0]
    values = [y for _, y in line]
    low, high, largest = min(values), max(values), max(map(abs, values))
    drawn, x, y = draw_lines({0: line}, (left, right), CHART)
    texts = dict(left=left, right=right, name=escape(name), unit=escape(visible(unit)))
    texts |= dict(high=value_text(high, largest), low=value_text(low, largest) * (high > low))
    return asset("curve.svg").format(
        style=asset("theme.css") + asset("curve.css"),  # an image inherits none
        marks="".join(f"M{x(u + 0.5):.1f} 26V118" for u in marks if left <= u < right),
        high_y=round(y(high)) + 4,
        lines=drawn,
        **texts,
    )


def curve_strip(
    lines: Mapping[int, Points], span: tuple[float, float], title: str, alone: bool = False
) -> str:
    """Lines of several runs above an axis without numbers; `reader.js` moves the rings along them.
    Alone it is an image, which inherits no style."""
    style = element("style", asset("theme.css"), asset("curve.css")) if alone else ""
    drawn, x, y = draw_lines(lines, span, STRIP)
    dots = [
        element("circle", cx=x(u), cy=y(value), r=2, class_=f"dot{i}")
        for i, line in lines.items()
        if len(line) <= FEW_MARKS
        for u, value in line
    ]
    parts = dict(theme="rlhf" * alone, style=style, lines="".join(dots) + drawn)
    return asset("strip.svg").format(title=escape(visible(title)), **parts)


def curve_picture(svg: str, description: str, width: int = 260, height: int = 140) -> str:
    "A curve inside a page, as an image of its own that follows the page's theme."
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    return element("img", alt=description, width=width, height=height, src=source)
