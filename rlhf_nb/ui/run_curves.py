"""Curves of a run: what each metric is called, in which unit, and a small picture of it."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from html import escape

from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.html import element, number_text, safe_text
from rlhf_nb.ui.run_files import METRIC_COLUMNS
from rlhf_nb.ui.run_record import Run
from rlhf_nb.ui.viz import Html, visible

SHORT = {"kl_coef": "objective/kl_coef", **METRIC_COLUMNS}  # short names, and what is logged
METRICS = {  # what is logged: what it is, and its unit
    "objective/raw_scores": ("score", "reward per response"),
    "objective/scores": ("score after scaling and penalties", "reward per response"),
    "objective/kl": ("KL to the reference", "nats per response"),
    "objective/kl_coef": ("price of KL", "reward per nat"),
    "objective/non_score_reward": ("KL penalty", "reward per response"),
    "objective/rlhf_reward": ("score less the KL penalty", "reward per response"),
    "objective/entropy": ("entropy of a response, by its samples", "nats per response"),
    "policy/entropy_avg": ("entropy of a token, over the vocabulary", "nats per token"),
    "policy/approxkl_avg": ("KL to the policy that sampled", "nats per token"),
    "policy/clipfrac_avg": ("clipped", "share of tokens"),
    "policy/grad_norm": ("gradient before clipping", "norm"),
    "tokens/response_length": ("length", "tokens per response"),
    "tokens/per_second": ("speed", "tokens per second"),
    "val/clipfrac_avg": ("values clipped", "share of tokens"),
    "val/explained_variance": ("variance that the values explain", "share"),
    "val/ratio": ("probability over that of the sampling policy", "ratio"),
    "val/ratio_var": ("variance of that probability ratio", "squared ratio"),
    "val/num_eos_tokens": ("responses that stopped by themselves", "responses"),
    "val/eos_share": ("responses that stopped by themselves", "share of responses"),
    "entropy gap": ("entropy as computed less as sampled", "nats per token"),
    "loss/policy_avg": ("loss of the policy", "loss"),
    "loss/kl_avg": ("KL term of the loss", "nats per token"),
    "loss/value_avg": ("loss of the values", "loss"),
    "lr": ("learning rate", "step size"),
    "learning_rate": ("learning rate", "step size"),
    "loss": ("loss", "nats per token"),
    "gold/win_rate": ("wins, as the gold judge sees it", "share of answers"),
}
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


def curve_svg(line: Points, marks: Sequence[int], name: str, unit: str) -> str:
    "A line over the updates, its axes named, with dashed marks. `name` is what a step is called."
    (left, right), values = (line[0][0], line[-1][0]), [y for _, y in line]
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
        x=x(right),
        y=y(values[-1]),
    )


def curve_figure(metric: str, points: Points, run: Run) -> str:
    "One metric: what it is, a picture, and the same in a sentence."
    title, unit = METRICS.get(metric, (metric, "seconds" if "time/" in metric else metric))
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
    data = base64.b64encode(curve_svg(line, marks, run.name, unit).encode()).decode()
    picture = element(
        "img",
        alt=visible(f"{title}, {unit}: {show(now)}{after}") + "; dashed: kl_coef was moved" * moved,
        width=260,
        height=140,
        src=f"data:image/svg+xml;base64,{data}",
    )
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
