"""Pictures of the pages on KL and on shaping: what an estimator measures, a response of two tokens
as a tree, and a score beside its prices. Each is a function from numbers to an SVG."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_nb.kl import ESTIMATORS, estimate_kl, full_kl
from rlhf_nb.ui import loop
from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.html import element
from rlhf_nb.ui.loop import INK, LINE, Picture, rectangle

# Light colours are attributes, so that they survive where style sheets are stripped; static/kl.css
# replaces them in a dark theme. Each colour comes with a dash or a sign as well.
STROKES = dict(blue="#1f5fa8", orange="#c2570c", ink=INK, grey="#57606a")
LINES = dict(k1=("blue", ""), k2=("orange", "7 3"), k3=("ink", "2 3"), abs=("grey", "9 3 2 3"))
Point = tuple[float, float]

# ---- Parts ----


def words(
    x: float, y: float, text: str, kind: str = "muted", size: float = 13, anchor: str = "start"
) -> str:
    "A line of text: a title is bold, text has the colour of ink, muted is grey."
    return loop.words(x, y, text, kind, size, anchor, INK if kind == "text" else "")


def line(points: Sequence[Point], color: str, dash: str = "", width: float = 1.8) -> str:
    "A line through the points, in one of STROKES."
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    stroke = dict(stroke=STROKES[color], stroke_width=width, stroke_dasharray=dash or None)
    return element("polyline", class_=color, points=path, fill="none", **stroke)


def axis(x0: float, x1: float, y: float) -> str:
    "A horizontal axis."
    ends = dict(x1=x0, x2=x1, y1=y, y2=y)
    return element("line", class_="axis", **ends, stroke=LINE, stroke_width=1)


def bar(x: float, y: float, width: float, height: float, color: str) -> str:
    "A filled bar, orange for what is above zero and blue for what is below."
    place = dict(x=x, y=f"{y:.1f}", width=width, height=f"{height:.1f}")
    return element("rect", class_=f"{color}-area", **place, fill=STROKES[color])


def sheet(height: float, label: str, *parts: str) -> Picture:
    return loop.sheet(height, label, element("style", asset("kl.css")), *parts)


# ---- Two distributions, and what four estimators make of samples ----

PLACES = torch.arange(-12, 12.1, 0.25, dtype=torch.float64)  # 97 tokens, on a line
BATCHES, BINS = 2000, 24


def bells(drift: float, temperature: float = 1.0) -> tuple[Tensor, Tensor, float]:
    """Log-probs of a policy around `drift` and of a reference around 0 on PLACES, float64, and the
    exact KL between them."""
    policy, ref = (-(PLACES - centre).square() / 2 for centre in (drift, 0.0))
    exact = full_kl(policy, ref, temperature).item()
    logprobs, ref_logprobs = ((x / temperature).log_softmax(-1) for x in (policy, ref))
    return logprobs, ref_logprobs, exact


def gap_panel(logprobs: Tensor, ref_logprobs: Tensor, drawn: Tensor) -> str:
    "Both distributions on a log scale; at each token of a batch, the gap between them."
    across = lambda at: 24 + 348 * (PLACES[at].item() + 5) / 10
    down = lambda value: 76 + 156 * -value / 13
    shown = [i for i in range(len(PLACES)) if abs(PLACES[i]) <= 5]
    parts = [axis(24, 372, 232)]
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
    parts = [axis(404, 776, 232)]
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
    each = {name: estimate_kl(logprobs, ref_logprobs, name) for name in ESTIMATORS}
    averages = {name: x[drawn].view(BATCHES, tokens).mean(1) for name, x in each.items()}
    legend, labels = [], []
    for i, (name, x) in enumerate(each.items()):
        mean = (logprobs.exp() * x).sum()
        noise = (logprobs.exp() * (x - mean).square()).sum().sqrt().item() / tokens**0.5
        bias = round(mean.item() - exact, 3) + 0.0
        left, y = 404 + 190 * (i % 2), 54 + 20 * (i // 2)
        labels.append(f"{name}: bias {bias:.2f}, noise {noise:.2f}")
        legend += [
            line([(left, y - 4), (left + 24, y - 4)], *LINES[name]),
            words(left + 30, y, labels[-1], "text", 12),
        ]
    some = "1 token" if tokens == 1 else f"{tokens} tokens"
    keys = (("ink", "", "log π", 24), ("grey", "5 3", "log π_{ref}", 110))
    return sheet(
        284,
        f"Policy and reference, {drift:g} apart; exact KL {exact:.3f}. Averages over {BATCHES:,} "
        f"batches of {some}: {'; '.join(labels)}.",
        words(24, 30, "k1 of a token: log π − log π_{ref}", "title", 15),
        *(line([(x, 50), (x + 24, 50)], color, dash) for color, dash, _, x in keys),
        *(words(x + 30, 54, text, "text", 12) for _, _, text, x in keys),
        gap_panel(logprobs, ref_logprobs, drawn[:tokens]),
        words(24, 270, f"{some}, drawn from π, and the sign of each gap", size=12),
        words(404, 30, f"estimates of the KL from {some}", "title", 15),
        *legend,
        histograms(averages, exact),
        words(404, 270, f"in nats; {BATCHES:,} batches, the tails cut off", size=12),
    )


# ---- A response of two tokens ----


def tree_picture(second: Sequence[float] = (2.0, -2.0)) -> Picture:
    """Two steps with two choices each. The first is even, as the reference is everywhere; after a
    come the logits `second`, after b another even choice."""
    later = full_kl(torch.tensor(second), torch.zeros(2)).item()
    chances = torch.tensor(second).softmax(-1).tolist()
    logits = ", ".join(f"{x:g}".replace("-", "−") for x in second)
    leaves = [(40, "aa", chances[0]), (84, "ab", chances[1]), (136, "ba", 0.5), (180, "bb", 0.5)]
    steps = [
        (62, "a", "after a", f"logits ({logits}): KL {later:.2f}", later),
        (158, "b", "after b", "even: KL 0", 0.0),
    ]
    parts = [
        rectangle(24, 84, 190, 52, "box"),
        words(119, 106, "first token", "title", 14, "middle"),
        words(119, 124, "even: KL 0", "text", 13, "middle"),
    ]
    for y, name, title, text, kl in steps:
        middle = (110 + y) / 2
        parts += [
            line([(214, 110), (300, y)], "ink", width=1.4),
            words(254, middle + (-8 if y < 110 else 18), f"{name}: ½", "text", 13, "middle"),
            rectangle(300, y - 26, 250, 52, "box"),
            words(425, y - 4, title, "title", 14, "middle"),
            words(425, y + 14, text, "text", 13, "middle"),
            bar(308, y + 18, 234 * kl / 0.7, 5, "orange"),
        ]
    for y, name, chance in leaves:
        start = 62 if y < 110 else 158
        parts += [
            line([(550, start), (636, y)], "ink", width=1.4),
            words(646, y + 5, f"{name}   {chance:.3f}", "text", 13),
        ]
    return sheet(
        220,
        f"Two steps with two choices. The first is even. After a the logits are ({logits}), a KL "
        f"of {later:.3f} from an even reference; after b the second step is even.",
        *parts,
        words(24, 206, "at the reference every choice is even", size=12),
        words(646, 206, "response, and π of its last token", size=12, anchor="middle"),
    )


# ---- A score, and what each token pays ----


def prices_picture(
    tokens: Sequence[str],
    kl: Tensor,  # [T] nats
    score: float,
    kl_coef: float,
) -> Picture:
    "What each token pays for its KL, the score on the last one, and the rewards that they make."
    prices = (-kl_coef * kl).tolist()
    step = 640 / len(tokens)
    signed = lambda x: f"{x:+.2f}".replace("-", "−") if abs(x) > 1e-9 else "0"
    parts = [
        words(24, 92, "−β KL_{t}", "text", 14),
        words(24, 162, "score s", "text", 14),
        words(24, 218, "reward r_{t}", "title", 14),
        axis(130, 780, 88),
        axis(130, 780, 176),
    ]
    labels = []
    for i, (token, price) in enumerate(zip(tokens, prices, strict=True)):
        middle, last = 140 + step * (i + 0.5), i == len(tokens) - 1
        reward = price + score * last
        height = 150 * abs(price)
        top, color = (88 - height, "orange") if price > 0 else (88, "blue")
        parts += [
            rectangle(middle - step / 2 + 3, 40, step - 6, 26, "box"),
            words(middle, 58, token, "text", 13, "middle"),
            bar(middle - 12, top, 24, height, color),
            words(middle, 102 + (height if price < 0 else 0), signed(price), "text", 12, "middle"),
            words(middle, 218, signed(reward), "title", 14, "middle"),
        ]
        if last:
            tone = "orange" if score > 0 else "blue"
            parts += [
                bar(middle - 12, 176 - 18 * max(score, 0), 24, 18 * abs(score), tone),
                words(middle + 18, 164, signed(score), "text", 12),
            ]
        labels.append(f"{token} {signed(reward)}")
    return sheet(
        236,
        f"A score of {score:g} and kl_coef {kl_coef:g} become one reward per token: "
        + ", ".join(labels),
        words(24, 26, "one score and a price per nat become a reward for every token", "title", 15),
        *parts,
    )
