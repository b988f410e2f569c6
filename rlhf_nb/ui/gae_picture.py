"""How credit travels: bars of the surprises, arcs that fade on their way to earlier tokens, and the
advantages that add up below."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.html import element
from rlhf_nb.ui.loop import INK, LINE, WIDTH, Picture, sheet, words
from rlhf_nb.ui.viz import signed, visible_token

UP, DOWN = "#b35000", "#1f5fa8"  # above and below zero, as everywhere: orange and blue
BARS, ARCS, LABEL = 90.0, 84.0, 17.0  # heights of a row of bars, of the arcs, of a line of text
FAINT = 0.02  # an arc with less than this share is not drawn


def shares(
    deltas: Sequence[float],  # T surprises
    decay: float,  # gamma * lam
) -> list[list[float]]:  # row t: what each surprise adds to the advantage of token t
    "The terms of the sum in equation 16 of Schulman et al. 2016."
    T = range(len(deltas))
    return [[decay ** (j - t) * deltas[j] if j >= t else 0.0 for j in T] for t in T]


def side(value: float) -> str:
    return "up" if value > 0 else "down"


def bar(x: float, y: float, w: float, value: float, scale: float, opacity: float = 1.0) -> str:
    "A bar from the line y, upwards where the value is positive."
    h = abs(value) * scale
    look = dict(fill=UP if value > 0 else DOWN, opacity=f"{opacity:.2f}")
    place = dict(x=x - w / 2, y=y - h * (value > 0), width=w, height=h)
    rounded = {name: f"{number:.1f}" for name, number in place.items()}
    return element("rect", class_=side(value), **rounded, **look)


def line(kind: str, x0: float, x1: float, y: float, color: str, thick: float) -> str:
    d = f"M{x0:.1f} {y:.1f}H{x1:.1f}"
    return element("path", class_=kind, d=d, stroke=color, stroke_width=thick)


def arc(
    start: float, end: float, y: float, value: float, share: float, largest: float
) -> str:  # from the surprise at `start` to the token at `end`, as faint as its share is small
    "As wide as the surprise is large."
    color, low, high = (UP if value > 0 else DOWN), y + ARCS, y + ARCS / 2
    return element(
        "path",
        class_=f"from-{side(value)}",
        fill="none",
        stroke=color,
        stroke_linecap="round",
        d=f"M{start:.1f} {y:.1f}C{start:.1f} {high:.1f} {end:.1f} {high:.1f} {end:.1f} {low:.1f}",
        stroke_width=f"{1.5 + 6 * abs(value) / largest:.1f}",
        opacity=f"{share:.3f}",
    )


def stacked(
    x: float, y: float, w: float, terms: Sequence[float], opacities: Sequence[float], scale: float
) -> str:
    "The terms on top of each other, positive ones upwards and negative ones downwards."
    parts, top = [], {"up": y, "down": y}
    for term, opacity in zip(terms, opacities):
        if term:
            parts.append(bar(x, top[side(term)], w, term, scale, opacity))
            top[side(term)] -= term * scale
    return "".join(parts)


def panel(
    left: float,
    width: float,
    tokens: Sequence[str],
    deltas: Sequence[float],
    gamma: float,
    lam: float,
    scale: float,
    zeros: tuple[float, float],  # heights of the lines from which delta and A are drawn
    arcs_at: float,
    bottom: float,
) -> str:
    "Surprises, arcs and advantages for one lambda."
    decay, terms = gamma * lam, shares(deltas, gamma * lam)
    column = (width - 34) / len(tokens)
    at = [left + 30 + column * (t + 0.5) for t in range(len(tokens))]
    thick, largest = min(44.0, 0.5 * column), max(map(abs, deltas), default=0.0) or 1.0
    title = f"λ = {lam:g}" if gamma == 1 else f"γ = {gamma:g}, λ = {lam:g}"
    parts = [words(left + width / 2 + 13, 24, title, "title", 14)]
    for name, zero in zip("δA", zeros):
        parts.append(words(left + 14, zero + 5, name, "title", 16))
        parts.append(line("zero", left + 30, left + width - 4, zero, LINE, 1))
    for j, delta in enumerate(deltas):
        for t in range(j + 1):
            share = decay ** (j - t)
            if delta and share >= FAINT:
                parts.append(arc(at[j], at[t], arcs_at, delta, share, largest))
    for t, token in enumerate(tokens):
        fading = [max(0.2, decay ** (j - t)) if j >= t else 0.0 for j in range(len(deltas))]
        total, above = sum(terms[t]), zeros[0] - max(deltas[t], 0.0) * scale - 6
        net, edge = zeros[1] - total * scale, thick / 2 + 4
        parts += [
            words(at[t], above, signed(deltas[t]), "number", 12, color=INK),
            bar(at[t], zeros[0], thick, deltas[t], scale),
            words(at[t], arcs_at - 8, visible_token(token), "token", 12, color=INK),
            stacked(at[t], zeros[1], thick, terms[t], fading, scale),
            line("net", at[t] - edge, at[t] + edge, net, INK, 2.5),
            words(at[t], bottom, signed(total), "number", 13, color=INK),
        ]
    return "".join(parts)


def gae_picture(
    tokens: Sequence[str],  # T texts
    deltas: Sequence[float],  # T surprises, as `td_errors` returns them for one row
    lam: float | Sequence[float] = 0.95,  # several: one panel each, side by side
    gamma: float = 1.0,
) -> Picture:
    """Bars of delta above, bars of A below, and an arc from each surprise to each token that
    inherits from it: as wide as the surprise, as faint as its share (gamma lam)^l is small. The
    terms of A are stacked, and a line marks their sum. Raises ValueError on unequal lengths."""
    if len(tokens) != len(deltas) or not len(tokens):
        raise ValueError(f"{len(tokens)} tokens and {len(deltas)} surprises: give each token one.")
    deltas = [float(x) for x in deltas]
    lams = [float(x) for x in lam] if isinstance(lam, Sequence) else [float(lam)]
    rows = [deltas, *(term for x in lams for term in shares(deltas, gamma * x))]
    highs = [max(0.0, *deltas), max(sum(max(x, 0.0) for x in row) for row in rows[1:])]
    lows = [
        max(0.0, *(-x for x in deltas)),
        max(sum(max(-x, 0.0) for x in row) for row in rows[1:]),
    ]
    scale = BARS / (max(high + low for high, low in zip(highs, lows)) or 1.0)
    zero = 34 + LABEL + highs[0] * scale
    arcs_at = zero + lows[0] * scale + 2 * LABEL
    below = arcs_at + ARCS + 12 + highs[1] * scale
    bottom = below + lows[1] * scale + LABEL + 3
    width = (WIDTH - 20) / len(lams)
    panels = [
        panel(
            10 + width * i, width, tokens, deltas, gamma, x, scale, (zero, below), arcs_at, bottom
        )
        for i, x in enumerate(lams)
    ]
    sums = "; ".join(
        f"lambda {x:g}: {' '.join(signed(sum(row)) for row in shares(deltas, gamma * x))}"
        for x in lams
    )
    label = (
        f"Surprises of {', '.join(tokens)}: {' '.join(map(signed, deltas))}. Arcs pass each on to "
        f"the tokens before it, fading by (gamma lambda) a step. Advantages, {sums}."
    )
    return sheet(bottom + 13, label, element("style", asset("gae.css")), *panels)
