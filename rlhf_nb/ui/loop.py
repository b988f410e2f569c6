"The loop of RLHF with PPO as a picture: large, or a strip with a step marked; rows in parts."

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rlhf_nb.ui.html import asset, element

# Light colours are attributes of the elements, so that they survive where style sheets are
# stripped. static/loop.css replaces them in a dark theme.
EDGE, PAPER, LINE, PLUS, MINUS = "#d0d7de", "#ffffff", "#7d8793", "#c2570c", "#1f5fa8"
INK, MUTED, ACCENT = "#1f2328", "#57606a", "#1f5fa8"
FILLS = {"box": PAPER, "box trained": "#dbe9f7", "box frozen": "#e9ecef", "card": "#f6f8fa"}
WIDTH = 800
Edge = tuple[str, float]


@dataclass(frozen=True)
class Step:
    "A step of the loop: what it is called, where the course builds it, and what it does."

    name: str
    page: str  # the notebook in nbs/course, without its extension
    title: str
    lines: str = ""

    @property
    def number(self) -> str:
        return self.page[:2]


STEPS = (
    Step("masks", "02_masks", "tokens", "one response: T tokens, then padding"),
    Step("prompts", "03_tldr", "prompts", "posts to summarise\nB prompts of P tokens"),
    Step("models", "04_models", "models"),
    Step("logprobs", "05_logprobs", "log-probs", "policy and reference:\nlog π and log π_{ref}"),
    Step("reward", "06_preferences", "reward", "the reward model gives\na response its score s"),
    Step("rollout", "07_rollout", "rollout", "the policy samples a\nresponse per prompt"),
    Step("kl", "08_kl", "KL", "how far from π_{ref}\nis π at each token?"),
    Step("shaping", "09_shaping", "shaping", "r_{t} = −β KL_{t}, and s\nadded at the end"),
    Step("gae", "10_gae", "GAE", "r_{t}, V_{t} → advantages\nA_{t} and returns R_{t}"),
    Step("losses", "11_losses", "losses", "for π: clipped ratio ρ_{t}\nfor V: distance to R_{t}"),
    Step("ppo", "12_ppo", "update", "epochs × minibatches\nof optimizer steps"),
    Step("training_loop", "13_training_loop", "training loop"),
    Step("evaluate", "14_evaluate", "evaluate", "a judge compares summaries of posts held out"),
)
BY_NAME = {step.name: step for step in STEPS}
SUMMARY = (
    "The RLHF-PPO loop. Prompts go to the policy, which samples responses (rollout). Policy and "
    "reference give log-probs, the reward model gives scores, and the KL penalty and the score are "
    "shaped into a reward per token. With the value model, GAE turns these into advantages and "
    "returns; clipped losses over epochs and minibatches update the policy, which samples again. "
    "The policy and the frozen reference start from the SFT model, the value model from the reward "
    "model, or from the policy with a new head. A judge evaluates apart from the loop."
)


class Picture(str):
    "An SVG that a notebook shows; in a terminal it is its text alternative."

    def _repr_svg_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        label = re.search(r'aria-label="([^"]*)"', self)
        return label[1] if label else "a picture"


# ---- Parts ----


def words(
    x: float, y: float, text: str, kind: str, size: float, anchor: str = "middle", color: str = ""
) -> str:
    "A line of text, in which `V_{t}` has a subscript. Titles are bold; the rest but text is muted."
    first, *rest = re.split(r"_\{(\w+)\}", text)
    inner = escape(first)
    for below, after in zip(rest[::2], rest[1::2], strict=True):
        inner += element("tspan", below, dy=3, font_size="75%")
        inner += element("tspan", escape(after), dy=-3)
    bold = kind.startswith("title")
    ink = color or (INK if bold or kind == "text" else MUTED)
    font = dict(fill=ink, text_anchor=anchor, font_weight=600 if bold else None)
    return element("text", inner, class_=kind, x=x, y=y, font_size=size, **font)


def rectangle(
    x: float, y: float, w: float, h: float, kind: str, edge: Edge = (LINE, 1), fill: str = ""
) -> str:
    "A rounded rectangle, and the colour and the width of its edge. Its fill is that of its kind."
    look = dict(fill=fill or FILLS[kind], stroke=edge[0], stroke_width=edge[1])
    return element("rect", class_=kind, x=x, y=y, width=w, height=h, rx=7, **look)


def arrow(points: Sequence[tuple[float, float]], dashed: bool = False) -> str:
    "A line through the points with a head at the last one; each part is horizontal or vertical."
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    back = x - 8 * dx, y - 8 * dy
    line = " ".join(f"{a:g},{b:g}" for a, b in [*points[:-1], back])
    sides = [(back[0] + s * 4.5 * dy, back[1] + s * 4.5 * dx) for s in (1, -1)]
    head = " ".join(f"{a:g},{b:g}" for a, b in [(x, y), *sides])
    stroke = dict(stroke=MUTED, stroke_width=1.6, stroke_dasharray="5 4" if dashed else None)
    shaft = element("polyline", class_="arrow", points=line, fill="none", **stroke)
    return shaft + element("polygon", class_="head", points=head, fill=MUTED)


def picture_card(height: float, label: str, *parts: str) -> Picture:
    "The whole picture, on a card of its own colour so that it reads on white and on black."
    card = rectangle(1, 1, WIDTH - 2, height - 2, "card", (EDGE, 1))
    frame = dict(width=WIDTH, height=height, style=asset("loop.css"), label=escape(label))
    return Picture(asset("picture.svg").format(**frame, parts=card + "".join(parts)).rstrip())


def step_box(step: Step, x: float, y: float, w: float, h: float, marked: bool = False) -> str:
    "A step as a box: its page's number, its title and, where the box is high enough, its lines."
    small = h < 50
    fill, edge, color = (ACCENT, (INK, 2.5), PAPER) if marked else (PAPER, (LINE, 1), "")
    middle, baseline = (x + w / 2 + 7, y + h / 2 + 5) if small else (x + w / 2, y + 25)
    parts = [
        rectangle(x, y, w, h, "box", edge, fill),
        words(x + 8, y + h / 2 + 4 if small else y + 17, step.number, "page", 11, "start", color),
        words(middle, baseline, step.title, "title", 14 if small else 16, color=color),
    ]
    if not small:
        lines = enumerate(step.lines.splitlines())
        parts += [words(x + w / 2, y + 46 + 18 * i, line, "line", 13) for i, line in lines]
    return element("g", *parts, class_=f"step{' small' * small}{' marked' * marked}")


def loop_frame(x: float, y: float, w: float, h: float, marked: bool = False) -> str:
    "The frame around the steps that are repeated."
    frame = rectangle(x, y, w, h, "frame", (ACCENT, 3) if marked else (LINE, 1.2), "none")
    return element("g", frame, class_="around" + " marked" * marked)


# ---- The strip ----


def strip(marked: Step) -> Picture:
    "Two lines of steps that close to a loop, one of them marked. 800 by 108."
    w, h, top, bottom = 116.0, 30.0, 10.0, 68.0
    at = [10 + 132.8 * column for column in range(6)]
    places = dict(masks=(0, top), prompts=(1, top), rollout=(2, top), logprobs=(3, top))
    places |= dict(reward=(4, top), kl=(5, top), shaping=(5, bottom), gae=(4, bottom))
    places |= dict(losses=(3, bottom), ppo=(2, bottom), evaluate=(1, bottom), models=(0, bottom))
    box = lambda name, column, y: step_box(BY_NAME[name], at[column], y, w, h, name == marked.name)
    boxes = [box(name, *place) for name, place in places.items()]
    whole = marked.name == "training_loop"
    boxes.append(step_box(BY_NAME["training_loop"], 480, 43, 160, 22, whole))
    right = [arrow([(at[i] + w, top + 15), (at[i + 1], top + 15)]) for i in range(1, 5)]
    low = bottom + 15
    left = [arrow([(at[i], low), (at[i - 1] + w, low)], dashed=i == 2) for i in (5, 4, 3, 2)]
    first, last = at[2] + w / 2, at[5] + w / 2
    turns = arrow([(last, top + h), (last, bottom)]), arrow([(first, bottom), (first, top + h)])
    frame = loop_frame(at[2] - 6, 4, at[5] + w - at[2] + 12, 100, whole)
    label = "The RLHF-PPO loop: prompts, rollout, log-probs, reward, KL, shaping, GAE, losses, "
    label += f"update, and again; evaluation is apart. This page: {marked.title} ({marked.number})."
    return picture_card(108, label, frame, *right, *left, *turns, *boxes)


# ---- The large picture ----

MODELS = (
    ("policy π", "the SFT model,", "then trained", "box trained"),
    ("reference π_{ref}", "the SFT model,", "frozen", "box frozen"),
    ("reward model", "from comparisons,", "frozen", "box frozen"),
    ("value model V", "reward model or π,", "then trained", "box trained"),
)
RESPONSE = dict(she=-4, sold=-2, the=-7, car=-3, eos=26)  # token -> height of its reward's bar


def heading(x: float, y: float, step: Step) -> str:
    "A step's number and title where it has no box of its own."
    number = words(x, y, step.number, "page", 11, "start")
    return number + words(x + 20, y, step.title, "title heading", 16, "start")


def model_boxes(x: float, y: float) -> str:
    "What each of the four models starts from; tints tell the trained ones from the frozen ones."
    parts = []
    for i, (title, start, then, kind) in enumerate(MODELS):
        left = x + 147 * i
        box = rectangle(left, y, 137, 62, kind) + words(left + 68, y + 20, title, "title", 13)
        lines = words(left + 68, y + 39, start, "line", 12)
        lines += words(left + 68, y + 54, then, "line", 12)
        parts.append(element("g", box, lines, class_="model"))
    return "".join(parts)


def response_tokens(x: float, y: float) -> str:
    "One response: its tokens, its padding, and a bar for the reward of each token."
    parts = []
    for i, token in enumerate([*RESPONSE, "pad", "pad"]):
        left = x + 48 * i
        box = rectangle(left, y, 44, 22, "box frozen" if token == "pad" else "box")
        parts.append(element("g", box, words(left + 22, y + 15, token, "line", 12), class_="token"))
    zero = y + 54
    for i, height in enumerate(RESPONSE.values()):
        kind, fill = ("minus", MINUS) if height < 0 else ("plus", PLUS)
        place = dict(x=x + 48 * i + 12, y=zero - max(height, 0), width=20, height=abs(height))
        parts.append(element("rect", class_=kind, **place, fill=fill))
    note = words(x + 238, zero - 9, "r_{t}: a penalty on", "line", 12, "start")
    note += words(x + 238, zero + 6, "each, s on the last", "line", 12, "start")
    return "".join(parts) + note


def large() -> Picture:
    "The whole loop, with the models above it and the evaluation below. 800 by 536."
    w, h, top, bottom = 168.0, 80.0, 142.0, 348.0
    at = [24 + 194.5 * column for column in range(4)]
    above, below = ("rollout", "logprobs", "reward", "kl"), ("ppo", "losses", "gae", "shaping")
    boxes = [step_box(BY_NAME["prompts"], at[0], 20, w, h)]
    boxes += [step_box(BY_NAME[name], at[i], top, w, h) for i, name in enumerate(above)]
    boxes += [step_box(BY_NAME[name], at[i], bottom, w, h) for i, name in enumerate(below)]
    boxes.append(step_box(BY_NAME["training_loop"], at[3] + 8, 109, 160, 22))
    boxes.append(step_box(BY_NAME["evaluate"], at[0], 462, 2 * w + 26.5, 62))
    middle = at[0] + w / 2
    arrows = [
        *(arrow([(at[i] + w, top + 40), (at[i + 1], top + 40)]) for i in range(3)),
        *(arrow([(at[i + 1], bottom + 40), (at[i] + w, bottom + 40)]) for i in range(3)),
        arrow([(at[3] + w / 2, top + h), (at[3] + w / 2, bottom)]),
        arrow([(middle, bottom), (middle, top + h)]),
        arrow([(middle, 100), (middle, top)]),
        arrow([(middle, bottom + h), (middle, 462)], dashed=True),
    ]
    back = words(middle + 12, 280, "updated π and V,", "line", 13, "start")
    back += words(middle + 12, 298, "next batch", "line", 13, "start")
    models = heading(206, 32, BY_NAME["models"]) + model_boxes(206, 40)
    tokens = heading(290, 248, masks := BY_NAME["masks"])
    tokens += words(376, 248, masks.lines, "line", 13, "start") + response_tokens(290, 260)
    frame = loop_frame(12, 120, 776, 320)
    return picture_card(536, SUMMARY, frame, *arrows, *boxes, models, back, tokens)


# ---- In use ----


def loop_picture(
    step: str | None = None,  # its name or its page's: gae, tldr; None for the large picture
) -> Picture:
    "The loop as an SVG: large, or a strip with one step marked. Raises ValueError for no step."
    if step is None:
        return large()
    for one in STEPS:
        if step in (one.name, one.page, one.page[3:]):
            return strip(one)
    raise ValueError(f"there is no step {step!r}: give one of {', '.join(BY_NAME)}, or no name.")


# ---- Rows in parts ----


def parts_picture(
    lengths: Sequence[int],  # tokens of each row
    parts: Sequence[Sequence[int]],  # row indices of each part
) -> Picture:
    "The same rows as one rectangle and in parts; tokens are blue, padding is grey."
    longest, high = max(lengths), 18.0
    unit = (WIDTH / 2 - 70) / longest

    def block(x: float, y: float, rows: Sequence[int], width: int) -> str:
        "Some rows, padded to `width` cells."
        bars = []
        for i, row in enumerate(rows):
            at, n = y + (high + 3) * i, lengths[row]
            bars.append(words(x - 8, at + 13, str(row), "number", 12, "end"))
            bars.append(rectangle(x, at, unit * width, high, "box frozen"))
            bars.append(rectangle(x, at, unit * n, high, "box trained"))
            bars.append(words(x + unit * n / 2, at + 13, str(n), "number", 12, color=INK))
        return "".join(bars)

    left, right, top = 44.0, WIDTH / 2 + 44.0, 40.0
    drawn, y, cells = [block(left, top, range(len(lengths)), longest)], top, 0
    for rows in parts:
        width = max(lengths[row] for row in rows)
        drawn.append(block(right, y, rows, width))
        y += (high + 3) * len(rows) + 12
        cells += width * len(rows)
    joined = f"one rectangle: {len(lengths) * longest} cells for {sum(lengths)} tokens"
    split = f"{len(parts)} parts: {cells} cells"
    drawn.append(words(left, 24, joined, "number", 13, "start", INK))
    drawn.append(words(right, 24, split, "number", 13, "start", INK))
    return picture_card(max(y, top + (high + 3) * len(lengths)) + 6, f"{joined}; {split}.", *drawn)
