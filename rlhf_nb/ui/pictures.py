"Pictures, drawn from numbers: a padded batch, the KL, how credit travels, and the clipped loss."

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from rlhf_nb.kl import KL_ESTIMATORS, estimate_kl, full_kl
from rlhf_nb.ui.html import asset, element
from rlhf_nb.ui.loop import INK, LINE, MUTED, WIDTH, Picture, arrow, picture_card, rectangle, words
from rlhf_nb.ui.viz import signed_number, visible_token

# ---- Tokens in their columns ----


PAD, HIGH, GAP = "", 28.0, 18.0  # padding; height of a box; between prompt and response
TRAINED = "box trained"  # of what is computed


class Columns:
    "Where the columns of prompts and responses are, from left to right."

    def __init__(self, prompt: int, response: int, left: float):
        self.prompt, self.count = prompt, prompt + response
        self.left, self.width = left, (784 - left - GAP) / self.count

    def start(self, column: int) -> float:
        return self.left + self.width * column + (GAP if column >= self.prompt else 0)

    def middle(self, column: int) -> float:
        return self.start(column) + self.width / 2 - 2

    def box(self, column: int, y: float, text: str, kind: str = "box") -> str:
        "A box with a token in it; padding is grey, with a dot."
        if text == PAD:
            text, kind = "·", "box frozen"
        box = rectangle(self.start(column), y, self.width - 4, HIGH, kind)
        return box + words(self.middle(column), y + 19, text, "token", 14, color=INK)

    def headings(self, y: float, prompt: str, response: str) -> str:
        "A line over the prompt's columns and one over the response's."
        ends = (0, self.prompt - 1), (self.prompt, self.count - 1)
        middles = [(self.middle(a) + self.middle(b)) / 2 for a, b in ends]
        return "".join(words(x, y, s, "title", 14) for x, s in zip(middles, (prompt, response)))


def label(y: float, text: str, note: str = "") -> str:
    "What a line of boxes is, on its left."
    name = words(14, y + 19 - 8 * bool(note), text, "token", 13, "start", INK)
    return name + (words(14, y + 26, note, "note", 11.5, "start") if note else "")


def batch_picture(
    prompts: Sequence[Sequence[str]],  # tokens, one list an example
    responses: Sequence[Sequence[str]],
) -> Picture:
    "A batch as a rectangle: prompts padded on the left, responses on the right, the mask below."
    wide, long = max(map(len, prompts)), max(map(len, responses))
    at, parts = Columns(wide, long, 96), []
    parts.append(at.headings(24, "prompt, padded on the left", "response, padded on the right"))
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        y = 38 + 62.0 * i
        row = [PAD] * (wide - len(prompt)) + [*prompt, *response] + [PAD] * (long - len(response))
        parts += [label(y, f"example {i}"), words(14, y + 45, "mask", "note", 12, "start")]
        for column, token in enumerate(row):
            real = str(token != PAD).lower()
            parts.append(at.box(column, y, token))
            parts.append(words(at.middle(column), y + 45, real, "note", 12))
    rows = "; ".join(f"{' '.join(p)} | {' '.join(r)}" for p, r in zip(prompts, responses))
    text = f"A padded batch, prompts on the left and responses on the right: {rows}"
    return picture_card(44 + 62 * len(prompts), text, *parts)


def choice_picture(prompt: Sequence[str], response: Sequence[str]) -> Picture:
    "Below each token the one that its logits choose: the next. The empty string is padding."
    at, row = Columns(len(prompt), len(response), 132), [*prompt, *response]
    first, last = len(prompt) - 1, len(row) - 2
    parts = [at.headings(24, "prompt", "response"), label(38, "the model reads")]
    parts.append(label(104, "its logits choose"))
    for column, token in enumerate(row):
        parts.append(at.box(column, 38, token))
        parts.append(words(at.middle(column), 152, f"column {column}", "note", 12))
        if token == PAD:
            continue
        if first <= column <= last:
            x = at.middle(column)
            parts += [arrow([(x, 68), (x, 102)]), at.box(column, 104, row[column + 1], TRAINED)]
        else:
            text = "the prompt" if column < first else "nothing"
            parts.append(words(at.middle(column), 123, text, "note", 12))
    text = f"Columns {first} to {last} choose the {len(response)} response tokens: each column's "
    text += "logits choose the token in the next column."
    return picture_card(164, text, *parts)


def reading_picture(prompt: Sequence[str], response: Sequence[str]) -> Picture:
    "At which tokens of one sequence policy, reference, value model and reward model are read."
    at, count = Columns(len(prompt), len(response), 160), len(response)
    first, end = len(prompt) - 1, len(prompt) + count - 1
    parts = [at.headings(24, "prompt x", "response y"), label(38, "tokens")]
    parts += [at.box(column, 38, token) for column, token in enumerate([*prompt, *response])]
    read = 84, "policy, reference", "log-prob of the next token", "log π_{%d}"
    for y, name, note, form in (read, (122, "value model", "before each token", "V_{%d}")):
        parts.append(label(y, name, note))
        parts += [at.box(first + t, y, form % t, TRAINED) for t in range(count)]
    parts.append(label(160, "reward model", "once, at the end") + at.box(end, 160, "s", TRAINED))
    text = "Policy, reference and value model are read in the column before each response token; "
    text += "the reward model is read once, at the last token."
    return picture_card(202, text, *parts)


# ---- The KL and its estimators ----


# Light colours are attributes, so that they survive where style sheets are stripped; static/kl.css
# replaces them in a dark theme. Each colour comes with a dash or a sign as well.
STROKES = dict(blue="#1f5fa8", orange="#c2570c", ink=INK, grey="#57606a")
LINES = dict(k1=("blue", ""), k2=("orange", "7 3"), k3=("ink", "2 3"), abs=("grey", "9 3 2 3"))
AXIS = dict(y1=232, y2=232, stroke=LINE, stroke_width=1)
Point = tuple[float, float]


def line(points: Sequence[Point], color: str, dash: str = "", width: float = 1.8) -> str:
    "A line through the points, in one of STROKES."
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    stroke = dict(stroke=STROKES[color], stroke_width=width, stroke_dasharray=dash or None)
    return element("polyline", class_=color, points=path, fill="none", **stroke)


# ---- Two distributions, and what four estimators make of samples ----

PLACES = torch.arange(-12, 12.1, 0.25, dtype=torch.float64)  # 97 tokens, on a line
BATCHES, BINS = 2000, 24


def bells(drift: float, temperature: float = 1.0) -> tuple[Tensor, Tensor, float]:
    "Log-probs of a policy around `drift` and a reference around 0 on PLACES, float64; exact KL."
    policy, ref = (-(PLACES - centre).square() / 2 for centre in (drift, 0.0))
    exact = full_kl(policy, ref, temperature).item()
    logprobs, ref_logprobs = ((x / temperature).log_softmax(-1) for x in (policy, ref))
    return logprobs, ref_logprobs, exact


def gap_panel(logprobs: Tensor, ref_logprobs: Tensor, drawn: Tensor) -> str:
    "Both distributions on a log scale; at each token of a batch, the gap between them."
    across = lambda at: 24 + 348 * (PLACES[at].item() + 5) / 10
    down = lambda value: 76 + 156 * -value / 13
    shown = [i for i in range(len(PLACES)) if abs(PLACES[i]) <= 5]
    parts: list[str] = [element("line", class_="axis", x1=24, x2=372, **AXIS)]
    for at in drawn.unique().tolist():
        gap = (logprobs[at] - ref_logprobs[at]).item()
        if at not in shown or gap == 0:
            continue
        x, ends = across(at), sorted(down(logs[at].item()) for logs in (logprobs, ref_logprobs))
        parts.append(line([(x, ends[0]), (x, min(ends[1], 232))], "orange" if gap > 0 else "blue"))
        parts.append(words(x, 246, "+" if gap > 0 else "−", "text", 12, "middle"))
    for logs, color, dash in ((ref_logprobs, "grey", "5 3"), (logprobs, "ink", "")):
        points = [(across(i), down(logs[i].item())) for i in shown]
        parts.append(line([point for point in points if point[1] <= 232], color, dash, 1.5))
    return "".join(parts)


def histograms(averages: dict[str, Tensor], exact: float) -> str:
    "One stepped line for each estimator, and a vertical line at the exact KL."
    every = torch.cat(list(averages.values()))
    low, high = min(every.quantile(0.002).item(), exact), max(every.quantile(0.99).item(), exact)
    low, high = (low, high) if high - low > 1e-6 else (low - 0.5, high + 0.5)
    counts = {name: torch.histc(x, BINS, low, high).tolist() for name, x in averages.items()}
    tallest, step = max(map(max, counts.values())), 372 / BINS
    parts: list[str] = [element("line", class_="axis", x1=404, x2=776, **AXIS)]
    for name, count in counts.items():
        steps: list[Point] = [(404, 232)]
        for i, n in enumerate(count):
            y = 232 - 136 * n / tallest
            steps += [(404 + step * i, y), (404 + step * (i + 1), y)]
        parts.append(line([*steps, (776, 232)], *LINES[name]))
    x = 404 + 372 * (exact - low) / (high - low)
    label = words(min(max(x, 430), 750), 248, f"exact {exact:.2f}", "text", 12, "middle")
    return "".join(parts) + line([(x, 88), (x, 232)], "ink", width=1) + label


def kl_picture(
    drift: float = 1.0,  # how far the policy's bell curve is from the reference's
    temperature: float = 1.0,  # what both sets of logits are divided by
    tokens: int = 16,  # drawn from the policy for each estimate
    seed: int = 0,
) -> Picture:
    """A policy, its reference and the gaps between them at one batch of tokens; beside it, the
    averages of four estimators over 2,000 such batches, with their bias and noise."""
    logprobs, ref_logprobs, exact = bells(drift, temperature)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(logprobs.exp(), BATCHES * tokens, True, generator=generator)
    each = {name: estimate_kl(logprobs, ref_logprobs, name) for name in KL_ESTIMATORS}
    averages = {name: x[drawn].view(BATCHES, tokens).mean(1) for name, x in each.items()}
    legend, labels = [], []
    for i, (name, x) in enumerate(each.items()):
        mean = (logprobs.exp() * x).sum()
        noise = (logprobs.exp() * (x - mean).square()).sum().sqrt().item() / tokens**0.5
        bias = round(mean.item() - exact, 3) + 0.0
        left, y = 404 + 190 * (i % 2), 54 + 20 * (i // 2)
        labels.append(f"{name}: bias {bias:.2f}, noise {noise:.2f}")
        legend.append(line([(left, y - 4), (left + 24, y - 4)], *LINES[name]))
        legend.append(words(left + 30, y, labels[-1], "text", 12, "start"))
    count = "1 token" if tokens == 1 else f"{tokens} tokens"
    keys = (("ink", "", "log π", 24), ("grey", "5 3", "log π_{ref}", 110))
    return picture_card(
        284,
        f"Policy and reference, {drift:g} apart; exact KL {exact:.3f}. Averages over {BATCHES:,} "
        f"batches of {count}: {'; '.join(labels)}.",
        element("style", asset("kl.css")),
        words(24, 30, "k1 of a token: log π − log π_{ref}", "title", 15, "start"),
        *(line([(x, 50), (x + 24, 50)], color, dash) for color, dash, _, x in keys),
        *(words(x + 30, 54, text, "text", 12, "start") for _, _, text, x in keys),
        gap_panel(logprobs, ref_logprobs, drawn[:tokens]),
        words(24, 270, f"{count}, drawn from π, and the sign of each gap", "muted", 12, "start"),
        words(404, 30, f"estimates of the KL from {count}", "title", 15, "start"),
        *legend,
        histograms(averages, exact),
        words(404, 270, f"in nats; {BATCHES:,} batches, the tails cut off", "muted", 12, "start"),
    )


# ---- How credit travels ----


SIDES = dict(up="#b35000", down="#1f5fa8")  # of zero, as everywhere: orange and blue
BARS, ARCS, LABEL = 90.0, 84.0, 17.0  # heights of a row of bars, of the arcs, of a line of text
FAINT = 0.02  # an arc with less than this share is not drawn


def shares(deltas: Sequence[float], decay: float) -> list[list[float]]:
    """Row t is what each surprise adds to the advantage of token t: the terms of the sum in
    equation 16 of Schulman et al. 2016, decaying by gamma * lam."""
    T = range(len(deltas))
    return [[decay ** (j - t) * deltas[j] if j >= t else 0.0 for j in T] for t in T]


def side(value: float) -> str:
    return "up" if value > 0 else "down"


def signed_bar(x: float, y: float, w: float, value: float, scale: float, alpha: float = 1.0) -> str:
    "A bar from the line y, upwards where the value is positive."
    h = abs(value) * scale
    place = dict(x=x - w / 2, y=y - h * (value > 0), width=w, height=h)
    look = {name: f"{number:.1f}" for name, number in place.items()}
    look |= dict(fill=SIDES[side(value)], opacity=f"{alpha:.2f}")
    return element("rect", class_=side(value), **look)


def rule(kind: str, x0: float, x1: float, y: float, color: str, thick: float) -> str:
    d = f"M{x0:.1f} {y:.1f}H{x1:.1f}"
    return element("path", class_=kind, d=d, stroke=color, stroke_width=thick)


def arc(start: float, end: float, y: float, value: float, share: float, largest: float) -> str:
    "From a surprise to a token, as wide as the surprise is large, as faint as its share is small."
    low, high = y + ARCS, y + ARCS / 2
    d = f"M{start:.1f} {y:.1f}C{start:.1f} {high:.1f} {end:.1f} {high:.1f} {end:.1f} {low:.1f}"
    stroke = dict(fill="none", stroke=SIDES[side(value)], stroke_linecap="round")
    look = dict(stroke_width=f"{1.5 + 6 * abs(value) / largest:.1f}", opacity=f"{share:.3f}")
    return element("path", class_=f"from-{side(value)}", **stroke, d=d, **look)


def panel(
    left: float,
    width: float,
    tokens: Sequence[str],
    deltas: Sequence[float],
    gamma: float,
    lam: float,
    heights: tuple[float, Point, float, float],  # of 1, of where delta, A, arcs and totals are
) -> str:
    "Surprises, arcs and advantages for one lambda."
    scale, zeros, arcs_at, bottom = heights
    decay, terms = gamma * lam, shares(deltas, gamma * lam)
    column = (width - 34) / len(tokens)
    at = [left + 30 + column * (t + 0.5) for t in range(len(tokens))]
    thick, largest = min(44.0, 0.5 * column), max(map(abs, deltas), default=0.0) or 1.0
    title = f"λ = {lam:g}" if gamma == 1 else f"γ = {gamma:g}, λ = {lam:g}"
    parts = [words(left + width / 2 + 13, 24, title, "title", 14)]
    for name, zero in zip("δA", zeros):
        parts.append(words(left + 14, zero + 5, name, "title", 16))
        parts.append(rule("zero", left + 30, left + width - 4, zero, LINE, 1))
    for j, delta in enumerate(deltas):
        for t in range(j + 1):
            share = decay ** (j - t)
            if delta and share >= FAINT:
                parts.append(arc(at[j], at[t], arcs_at, delta, share, largest))
    for t, token in enumerate(tokens):
        total, above = sum(terms[t]), zeros[0] - max(deltas[t], 0.0) * scale - 6
        net, edge = zeros[1] - total * scale, thick / 2 + 4
        parts += [
            words(at[t], above, signed_number(deltas[t]), "number", 12, color=INK),
            signed_bar(at[t], zeros[0], thick, deltas[t], scale),
            words(at[t], arcs_at - 8, visible_token(token), "token", 12, color=INK),
        ]
        top = {"up": zeros[1], "down": zeros[1]}  # of what is stacked so far
        for j, term in enumerate(terms[t]):
            if term:
                opacity = max(0.2, decay ** (j - t))
                parts.append(signed_bar(at[t], top[side(term)], thick, term, scale, opacity))
                top[side(term)] -= term * scale
        parts.append(rule("net", at[t] - edge, at[t] + edge, net, INK, 2.5))
        parts.append(words(at[t], bottom, signed_number(total), "number", 13, color=INK))
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
    above = lambda row, sign=1: sum(max(sign * x, 0.0) for x in row)
    highs = [max(0.0, *deltas), max(map(above, rows[1:]))]
    lows = [max(0.0, *(-x for x in deltas)), max(above(row, -1) for row in rows[1:])]
    scale = BARS / (max(high + low for high, low in zip(highs, lows)) or 1.0)
    zero = 34 + LABEL + highs[0] * scale
    arcs_at = zero + lows[0] * scale + 2 * LABEL
    below = arcs_at + ARCS + 12 + highs[1] * scale
    bottom = below + lows[1] * scale + LABEL + 3
    width = (WIDTH - 20) / len(lams)
    lefts = [10 + width * i for i in range(len(lams))]
    rest = scale, (zero, below), arcs_at, bottom
    panels = [panel(x, width, tokens, deltas, gamma, y, rest) for x, y in zip(lefts, lams)]
    sums = lambda x: " ".join(signed_number(sum(row)) for row in shares(deltas, gamma * x))
    told = "; ".join(f"lambda {x:g}: {sums(x)}" for x in lams)
    label = f"Surprises of {', '.join(tokens)}: {' '.join(map(signed_number, deltas))}. Arcs pass "
    label += "each on to the tokens before it, fading by (gamma lambda) a step. "
    label += f"Advantages, {told}."
    return picture_card(bottom + 13, label, element("style", asset("gae.css")), *panels)


# ---- The clipped loss ----


CLIPPED, DUAL, FLAT = "#1f5fa8", "#b35000", "#dfe3e8"
TOP, HEIGHT = 48.0, 190.0  # of the area in which the lines are
Loss = Callable[[float], float]  # over the ratio


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


def half(
    left: float, advantage: int, up_to: float, loss: Loss, edges: list[Point], dual: Loss | None
) -> str:
    "The loss of a good token, or of a bad one; edges are where nothing pulls, from ratio to ratio."
    x = lambda ratio: left + (WIDTH / 2 - 60) * ratio / up_to
    highest = 0.0 if advantage > 0 else up_to
    y = lambda value: TOP + HEIGHT * (0.06 + 0.88 * (highest - value) / up_to)
    parts: list[str] = []
    for low, high in edges:
        start, end = x(low), x(min(high, up_to))
        place = dict(x=f"{start:.1f}", y=TOP, width=f"{end - start:.1f}", height=HEIGHT)
        parts.append(element("rect", class_="flat", **place, fill=FLAT))
        edge = high if low == 0 else low
        parts.append(words(x(edge), TOP - 3, f"{edge:g}", "number", 11))
        if end - start >= 80:  # there is room for a label
            label_y = TOP + (HEIGHT - 10 if advantage > 0 else 18)
            parts.append(words((start + end) / 2, label_y, "no gradient", "number", 12))
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
    start, tip, back = (x(1) + far * advantage for far in (11, 37, 30))  # right: more likely
    level = y(-advantage)
    arrow = [(start, level), (tip, level), (back, level - 5), (tip, level), (back, level + 5)]
    parts.append(path("push", arrow, INK, 2, ""))
    return "".join(parts)


def clip_picture(
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,  # drawn as a third line
    up_to: float = 2.0,  # the largest ratio shown
) -> Picture:
    """The loss of a good and of a bad token over the ratio: unclipped (dashed), clipped, and where
    the gradient is zero. The dot is a token before the first step; its arrow is the push."""
    high = cliprange if cliprange_high is None else cliprange_high
    halves = []
    for left, advantage in ((50.0, 1), (50.0 + WIDTH / 2, -1)):
        edges = [(1 + high, up_to)] if advantage > 0 else [(0.0, 1 - cliprange)]
        if advantage < 0 and dual_clip is not None and dual_clip < up_to:
            edges.append((dual_clip, up_to))
        loss = partial(loss_of, advantage=advantage, cliprange=cliprange, cliprange_high=high)
        dual = None if dual_clip is None else partial(loss, dual_clip=dual_clip)
        halves.append(half(left, advantage, up_to, loss, edges, dual))
        halves.append(words(left - 14, TOP + 12, "loss", "number", 12, "end"))
    also = "" if dual_clip is None else f", and with the dual clip none above {dual_clip:g}"
    label = f"The policy loss over the ratio. A good token has no gradient above {1 + high:g}, a "
    label += f"bad one none below {1 - cliprange:g}{also}."
    return picture_card(TOP + HEIGHT + 46, label, element("style", asset("clip.css")), *halves)


# ---- The map ----


def map_grid() -> tuple[Tensor, Tensor]:  # ratios and advantages, [60, 80] each
    "The points of the map: ratios from 0 to 2 along the bottom, advantages from -3 to 3 upwards."
    sides = (torch.arange(80) + 0.5) / 40, (torch.arange(60) + 0.5) / 10 - 3
    across, upward = torch.meshgrid(*sides, indexing="xy")
    return across, upward


def push_map(
    push: Tensor,  # [60, 80] at the points of `map_grid`: above zero pushes the log-prob up
    ratio: Tensor,  # [N] of tokens to draw on it
    advantages: Tensor,  # [N]
    moves: Tensor,  # [N] true where a token still has a gradient
) -> Figure:
    "Where the loss pushes up (orange), down (blue), not at all (hatched); tokens: dots or crosses."
    colours = LinearSegmentedColormap.from_list("signed", ["#7ab0e8", "#ffffff", "#f4a259"])
    figure, axis = plt.subplots(figsize=(6, 3.4))
    place: dict[str, Any] = dict(origin="lower", aspect="auto", extent=(0, 2, -3, 3))
    shown = axis.imshow(push.numpy(), cmap=colours, vmin=-4, vmax=4, **place)
    points = (*map_grid(), (push == 0).float())
    axis.contourf(*map(Tensor.numpy, points), levels=[0.5, 2], colors="none", hatches=["///"])
    for where, mark, label in ((moves, "o", "moves"), (~moves, "x", "no gradient")):
        at = ratio[where].clamp(max=2).numpy(), advantages[where].numpy()
        axis.scatter(*at, s=22, marker=mark, color="#222222", label=label, clip_on=False)
    axis.set(xlabel="ratio (2 and more at the edge)", ylabel="advantage", xlim=(0, 2), ylim=(-3, 3))
    axis.set_title("Where the loss pushes a log-prob", fontsize=10)
    axis.legend(loc="upper left", fontsize=8)
    write = lambda value, _: signed_number(float(value))
    figure.colorbar(shown, label="push on the log-prob", format=write)
    return figure
