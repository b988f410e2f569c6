"""The clipped loss in pictures: the loss of one token over its ratio, and a map of where the loss
pushes a log-prob, with the tokens of a batch on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.html import element
from rlhf_nb.ui.loop import INK, LINE, MUTED, WIDTH, Picture, sheet, words
from rlhf_nb.ui.viz import signed

CLIPPED, DUAL, FLAT = "#1f5fa8", "#b35000", "#dfe3e8"
TOP, HEIGHT = 48.0, 190.0  # of the area in which the lines are


def loss_of(
    ratio: float,
    advantage: float,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> float:
    "The clipped loss of one token; Schulman et al. 2017, eq. 7."
    high = cliprange if cliprange_high is None else cliprange_high
    near = min(max(ratio, 1 - cliprange), 1 + high)
    loss = max(-advantage * ratio, -advantage * near)
    if dual_clip is not None and advantage < 0:
        loss = min(loss, -dual_clip * advantage)
    return loss


def path(kind: str, points: list[tuple[float, float]], color: str, thick: float, dash: str) -> str:
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    stroke = dict(stroke=color, stroke_width=thick, stroke_linejoin="round")
    return element("path", class_=kind, d=d, fill="none", **stroke, stroke_dasharray=dash or None)


def push_arrow(x: float, y: float, way: int) -> str:
    "A short arrow to the right (more likely) or to the left."
    tip = x + 26 * way
    return path(
        "push",
        [(x, y), (tip, y), (tip - 7 * way, y - 5), (tip, y), (tip - 7 * way, y + 5)],
        INK,
        2,
        "",
    )


def half(
    left: float,
    advantage: int,
    up_to: float,
    loss: Callable[[float], float],
    edges: list[tuple[float, float]],  # intervals of the ratio in which nothing pulls
    dual: Callable[[float], float] | None,
) -> str:
    "The loss of a good token, or of a bad one."
    width = WIDTH / 2 - 60
    x = lambda ratio: left + width * ratio / up_to
    highest = 0.0 if advantage > 0 else up_to
    y = lambda value: TOP + HEIGHT * (0.06 + 0.88 * (highest - value) / up_to)
    parts: list[str] = []
    for low, high in edges:
        start, end = x(low), x(min(high, up_to))
        place = dict(x=f"{start:.1f}", y=TOP, width=f"{end - start:.1f}", height=HEIGHT)
        parts.append(element("rect", class_="flat", **place, fill=FLAT))
        label_y = TOP + (HEIGHT - 10 if advantage > 0 else 18)
        edge = high if low == 0 else low
        parts.append(words(x(edge), TOP - 3, f"{edge:g}", "number", 11, color=MUTED))
        if end - start < 80:  # too narrow for its label
            continue
        parts.append(words((start + end) / 2, label_y, "no gradient", "number", 12, color=MUTED))
    ratios = [up_to * i / 200 for i in range(201)]
    parts += [
        path("axis", [(x(0), TOP), (x(0), TOP + HEIGHT), (x(up_to), TOP + HEIGHT)], LINE, 1, ""),
        path("plain", [(x(r), y(-advantage * r)) for r in ratios], MUTED, 1.5, "4 4"),
        path("clipped", [(x(r), y(loss(r))) for r in ratios], CLIPPED, 3, ""),
    ]
    if dual is not None:
        parts.append(path("dual", [(x(r), y(dual(r))) for r in ratios], DUAL, 3, "7 4"))
    kind = "good" if advantage > 0 else "bad"
    title = f"a {kind} token, A = {advantage:+d}".replace("-", "−")
    parts.append(words(x(up_to / 2), 26, title, "number", 14, color=INK))
    for i in range(int(up_to) + 1):
        parts.append(words(x(i), TOP + HEIGHT + 17, str(i), "number", 12))
    parts.append(words(x(up_to / 2), TOP + HEIGHT + 34, "ratio ρ_{t}", "number", 12))
    centre = dict(cx=f"{x(1):.1f}", cy=f"{y(-advantage):.1f}")
    parts.append(element("circle", class_="point", **centre, r=5, fill=INK))
    parts.append(push_arrow(x(1) + 11 * advantage, y(-advantage), advantage))
    return "".join(parts)


def clip_picture(
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,  # drawn as a third line
    up_to: float = 2.0,  # the largest ratio shown
) -> Picture:
    """The loss of a good and of a bad token over the ratio: unclipped (dashed), clipped, and where
    the gradient is zero. The dot is a token before the first step; its arrow says where it is
    pushed."""
    high = cliprange if cliprange_high is None else cliprange_high
    halves = []
    for left, advantage in ((50.0, 1), (50.0 + WIDTH / 2, -1)):
        edges = [(1 + high, up_to)] if advantage > 0 else [(0.0, 1 - cliprange)]
        if advantage < 0 and dual_clip is not None and dual_clip < up_to:
            edges.append((dual_clip, up_to))
        loss = lambda r, a=advantage: loss_of(r, a, cliprange, cliprange_high)
        dual = (
            None
            if dual_clip is None
            else lambda r, a=advantage: loss_of(r, a, cliprange, cliprange_high, dual_clip)
        )
        halves.append(half(left, advantage, up_to, loss, edges, dual))
        halves.append(words(left - 14, TOP + 12, "loss", "number", 12, "end"))
    label = (
        f"The policy loss over the ratio. A good token has no gradient above {1 + high:g}, a bad "
        f"one none below {1 - cliprange:g}"
        + ("." if dual_clip is None else f", and with the dual clip none above {dual_clip:g}.")
    )
    return sheet(TOP + HEIGHT + 46, label, element("style", asset("clip.css")), *halves)


# ---- The map ----


def map_grid() -> tuple[Tensor, Tensor]:  # ratios and advantages, [60, 80] each
    "The points of the map: ratios from 0 to 2 along the bottom, advantages from -3 to 3 upwards."
    across, upward = torch.meshgrid(
        (torch.arange(80) + 0.5) / 40, (torch.arange(60) + 0.5) / 10 - 3, indexing="xy"
    )
    return across, upward


def push_map(
    push: Tensor,  # [60, 80] at the points of `map_grid`: above zero pushes the log-prob up
    ratio: Tensor,  # [N] of tokens to draw on it
    advantages: Tensor,  # [N]
    moves: Tensor,  # [N] true where a token still has a gradient
) -> Figure:
    """Where the loss pushes up (orange), down (blue) or not at all (hatched); tokens are dots, or
    crosses where nothing pushes them any more."""
    ends = ["#7ab0e8", "#ffffff", "#f4a259"]
    colours = LinearSegmentedColormap.from_list("signed", ends)
    figure, axis = plt.subplots(figsize=(6, 3.4))
    shown = axis.imshow(
        push.numpy(),
        cmap=colours,
        vmin=-4,
        vmax=4,
        origin="lower",
        aspect="auto",
        extent=(0, 2, -3, 3),
    )
    flat = (push == 0).float().numpy()
    axis.contourf(
        *(x.numpy() for x in map_grid()), flat, levels=[0.5, 2], colors="none", hatches=["///"]
    )
    for where, mark, label in ((moves, "o", "moves"), (~moves, "x", "no gradient")):
        at = ratio[where].clamp(max=2).numpy(), advantages[where].numpy()
        axis.scatter(*at, s=22, marker=mark, color="#222222", label=label, clip_on=False)
    axis.set(xlabel="ratio (2 and more at the edge)", ylabel="advantage", xlim=(0, 2), ylim=(-3, 3))
    axis.set_title("Where the loss pushes a log-prob", fontsize=10)
    axis.legend(loc="upper left", fontsize=8)
    write = lambda value, _: signed(float(value))
    figure.colorbar(shown, label="push on the log-prob", format=write)
    return figure
