"""Curves of a run: a small picture of each metric, and the same in words."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from rlhf_nb.runtime.metrics import SHORT, metric_of
from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.curve_points import Points, written
from rlhf_nb.ui.curve_points import thin as thin
from rlhf_nb.ui.html import element, safe_text
from rlhf_nb.ui.run_record import Run
from rlhf_nb.ui.viz import Html, visible


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


def curve_figure(metric: str, points: Points, run: Run) -> str:
    "One metric: what it is, a picture, and the same in a sentence."
    known = metric_of(metric)
    title, unit = known.label, known.unit
    head = element("strong", safe_text(title))
    if title != metric:
        head = Html(head + " " + element("code", safe_text(metric)))
    line = thin(points)
    if not line:
        return element("figure", element("figcaption", head, ": no finite number yet."))
    values, (last, now) = [y for _, y in line], line[-1]
    show = lambda value: written(value, max(map(abs, values)))
    marks = [one.update for one in run.changes if one.what == "kl_coef"]
    number = element("b", show(now), title=f"{now!r} {unit}")
    after = f" after {run.name} {last:,}; lowest {show(min(values))}, highest {show(max(values))}"
    moved = any(line[0][0] <= u < last for u in marks)
    told = visible(f"{title}, {unit}: {show(now)}{after}") + "; dashed: kl_coef was moved" * moved
    picture = curve_picture(curve_svg(line, marks, run.name, unit), told)
    return element(
        "figure", element("figcaption", head, element("br"), number, safe_text(after)), picture
    )


def chosen_curves(run: Run, names: Sequence[str] | None) -> list[str]:
    """The metrics of some short or logged names. None: all that there are; if none of them was
    logged, the first four."""
    there = list(run.lines)  # a thread may be adding to it
    if names is None:
        return there
    wanted = [SHORT.get(name, name) for name in names]
    return wanted if not there or set(wanted) & set(there) else there[:4]


def curves_markup(run: Run, names: Sequence[str] | None) -> str:
    "A figure for each metric; a sentence for one that was never logged."
    if not run.lines:
        return element("p", f"No curves yet: they begin with the first {run.name}.")
    chosen = chosen_curves(run, names)
    there = [curve_figure(name, run.lines[name], run) for name in chosen if name in run.lines]
    absent = ", ".join(name for name in chosen if name not in run.lines)
    note = f"Never logged: {absent}. There are {', '.join(run.lines)}."
    return element("div", *there, class_="curves") + (
        element("p", safe_text(note), class_="quiet") if absent else ""
    )
