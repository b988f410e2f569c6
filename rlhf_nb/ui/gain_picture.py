"SFT and PPO drawn against each other: two win rates with their intervals, at each temperature."

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlhf_nb.ui.html import Html, element, percent

LEFT, WIDTH, EDGE = 44, 252, 420  # of the scale from 0 to 100 %; the right edge of the picture
BLOCK, ROW = 84, 26  # height of a temperature, and of a model in it
HEAD, FIRST = 44, 62  # baseline of the first heading, and the middle of the first model
MARKS = tuple(LEFT + WIDTH * share for share in (0.0, 0.5, 1.0))  # the upright lines
RATE = 60  # as wide as a rate can be, in the widest font that a page may have


def how_sampled(temperature: float) -> str:
    "A temperature in words: what is nearly the likeliest token is called near-greedy."
    return f"{'near-greedy' if temperature <= 0.1 else 'sampled'}, temperature {temperature:g}"


def _words(x: float, y: float, text: str, side: str = "start", kind: str = "") -> str:
    return element("text", escape(text), x=x, y=y, text_anchor=side, class_=kind)


def beside(low: float, high: float) -> tuple[float, str]:
    """Where the rate of an interval is written, and its text anchor: on the right or on the left
    between two lines where it fits, else where there is room and a line gives way."""
    right, left = (high + 9, "start"), (low - 9, "end")
    between = low - 9 - RATE >= LEFT + 3, high + 9 + RATE <= LEFT + WIDTH - 3
    if between[1] and not crossed(*right):
        return right
    if between[0] and (high + 9 + 2 * RATE > EDGE - 4 or not crossed(*left)):
        return left
    return right


def crossed(x: float, side: str) -> list[float]:
    "The upright lines that a rate at this place would touch."
    start = x if side == "start" else x - RATE
    return [line for line in MARKS if start - 4 < line < start + RATE + 4]


def _ends(row: Mapping[str, Any]) -> list[float]:
    "Where an interval begins, its rate is, and it ends."
    share = (min(max(row[name], 0.0), 1.0) for name in ("low", "win_rate", "high"))
    return [LEFT + WIDTH * x for x in share]


def _upright(x: float, gaps: Sequence[float], bottom: float, kind: str) -> str:
    "A line from top to bottom, broken where text is: `gaps` are the middles of rows."
    path, y = "", 22.0
    for gap in sorted(gaps):
        path += f"M{x:g} {y:g}V{gap - 10:g}" * (gap - y > 22)  # no stumps
        y = gap + 10
    return element("path", class_=kind, d=f"{path}M{x:g} {y:g}V{bottom:g}")


def _line(row: Mapping[str, Any], y: float) -> str:
    "One model: its interval as a bar, its win rate as a mark with the number beside it."
    model = str(row["model"]).lower()
    low, rate, high = _ends(row)
    place, side = beside(low, high)
    mark = (
        element("circle", cx=f"{rate:.1f}", cy=y, r=5.5)
        if model == "ppo"
        else element("rect", x=f"{rate - 4.5:.1f}", y=y - 4.5, width=9, height=9)
    )
    interval = f"M{low:.1f} {y}H{high:.1f}M{low:.1f} {y - 5}v10M{high:.1f} {y - 5}v10"
    return element(
        "g",
        _words(LEFT - 8, y + 4.5, model.upper(), "end", "name"),
        element("path", d=interval),
        mark,
        _words(place, y + 4.5, percent(row["win_rate"]), side, "rate"),
        _words(EDGE - 4, y + 4.5, percent(row.get("malformed")), "end"),
        class_=model,
    )


def gain_sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    "All numbers of the picture."
    return ". ".join(
        f"{row['model'].upper()}, {how_sampled(row['temperature'])}: {percent(row['win_rate'])} "
        f"won, 95 % interval {percent(row['low'])} to {percent(row['high'])}, bad form "
        f"{percent(row.get('malformed'))}"
        for row in rows
    )


def gain_picture(
    rows: Sequence[Mapping[str, Any]],  # of the verdict in results.json
) -> Html:
    "SFT (square) and PPO (circle) with their intervals, lowest temperature first."
    temperatures = sorted({row["temperature"] for row in rows})
    bottom = 26 + BLOCK * len(temperatures)
    parts: list[str] = []
    gaps: dict[float, list[float]] = {x: [] for x in MARKS}  # where a line gives way to text
    for i, temperature in enumerate(temperatures):
        parts.append(_words(LEFT + 5, HEAD + BLOCK * i, how_sampled(temperature), kind="head"))
        gaps[MARKS[1]].append(HEAD - 4.5 + BLOCK * i)
        there = {row["model"]: row for row in rows if row["temperature"] == temperature}
        for j, model in enumerate(name for name in ("sft", "ppo") if name in there):
            y = FIRST + BLOCK * i + ROW * j
            parts.append(_line(there[model], y))
            low, _, high = _ends(there[model])
            for x in crossed(*beside(low, high)):
                gaps[x].append(y)
    names = (("0 %", "grid"), ("50 %: as the references", "half"), ("100 %", "grid"))
    lines = [
        _upright(x, gaps[x], bottom, kind) + _words(x, bottom + 16, text, "middle")
        for x, (text, kind) in zip(MARKS, names)
    ]
    lines += [
        _words(EDGE - 4, 14, "bad form", "end"),
        _words(LEFT, 14, "test posts won, 95 % interval"),
    ]
    parts = lines + parts  # what is drawn last is in front
    size, label = f"0 0 {EDGE} {bottom + 24}", gain_sentence(rows)
    return element("svg", *parts, class_="gain-picture", viewBox=size, role="img", aria_label=label)
