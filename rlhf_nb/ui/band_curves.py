"""A curve of a run over the band of other runs, as a small picture and as a sentence."""

from __future__ import annotations

import base64
import math
from html import escape

from rlhf_nb.runtime.metrics import metric_of
from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.curve_points import Points, thin, written
from rlhf_nb.ui.html import Html, element, safe_text, visible

MOST = 120  # points of a band's edge
COMPUTED = {  # from what was logged: name and unit
    "val/eos_share": ("responses that stopped by themselves", "share of responses"),
    "entropy gap": ("entropy as computed less as sampled", "nats per token"),
}


def sparse(points: Points) -> list[tuple[int, float]]:
    "About MOST points of a line without peaks of its own, first and last among them."
    step = math.ceil(len(points) / MOST)
    return [*points[:-1:step], points[-1]]


def within(value: float, low: float, high: float) -> float:
    "A value, or the edge of the picture that it lies behind."
    return min(max(value, low), high)


def view(line: Points, low: Points, median: Points, high: Points) -> tuple[float, float]:
    "Bottom and top of the picture: the curve and the median, and of the band what is near them."
    values = [y for _, y in (*line, *median) if math.isfinite(y)]
    edge = [y for _, y in (*low, *high) if math.isfinite(y)] or values
    reach = max(values) - min(values)
    bottom, top = min(values) - reach, max(values) + reach
    return min(max(bottom, min(edge)), *values), max(min(top, max(edge)), *values)


def band_svg(
    points: Points,  # the run's
    low: Points,
    median: Points,
    high: Points,
    left: int | None,  # the update at which the run left the band; None: it stayed inside
    unit: str,
) -> str:
    "The run as a line, the band behind it, the median dotted; a dashed mark where the run left."
    line = thin(points)
    (first, last), (bottom, top) = (line[0][0], line[-1][0]), view(line, low, median, high)
    x = lambda u: 56 + 196 * (u - first) / ((last - first) or 1)
    scale = lambda value: (within(value, bottom, top) - bottom) / ((top - bottom) or 1)
    y = lambda value: 114 - 84 * scale(value)
    drawn = lambda some: " ".join(f"{x(u):.1f},{y(value):.1f}" for u, value in some)
    largest = max(abs(bottom), abs(top))
    return asset("band.svg").format(
        style=asset("theme.css") + asset("curve.css") + asset("band.css"),
        band=drawn([*sparse(low), *reversed(sparse(high))]),
        median=drawn(sparse(median)),
        marks="" if left is None else f"M{x(left):.1f} 26V118",
        unit=escape(visible(unit)),
        left=first,
        right=last,
        high_y=round(y(top)) + 4,
        high=written(top, largest),
        low=written(bottom, largest) if top > bottom else "",
        points=drawn(line),
        x=x(last),
        y=y(line[-1][1]),
    )


def band_figure(
    metric: str,
    points: Points,
    band: tuple[Points, Points, Points],  # low, median, high
    left: int | None,
    note: str = "",  # below the name
) -> Html:
    "One metric: what it is, the picture, and whether it left its band."
    known = metric_of(metric)
    title, unit = COMPUTED.get(metric, (known.label, known.unit))
    where = "inside its band" if left is None else f"left its band at update {left:,}"
    points = [point for point in points if math.isfinite(point[1])]
    head = element("strong", safe_text(title))
    if title != metric:
        head = Html(head + " " + element("code", safe_text(metric)))
    state = element("span", where, class_=None if left is None else "out")
    parts = [head, element("br"), state, *([" · ", safe_text(note)] if note else [])]
    if not points:
        return element("figure", element("figcaption", head, ": no finite number."))
    picture = band_svg(points, *band, left, unit)
    ends = [written(points[i][1], max(abs(y) for _, y in points)) for i in (0, -1)]
    source = base64.b64encode(picture.encode()).decode()
    image = element(
        "img",
        alt=visible(f"{title}, {unit}: from {ends[0]} to {ends[1]}, {where}"),
        width=260,
        height=140,
        src=f"data:image/svg+xml;base64,{source}",
    )
    return element("figure", element("figcaption", *parts), image)
