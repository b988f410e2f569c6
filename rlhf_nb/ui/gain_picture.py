"SFT and PPO drawn against each other: two win rates with their intervals, at each temperature."

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlhf_nb.ui.html import Html, element, percent

LEFT, WIDTH, EDGE = 44, 252, 420  # of the scale from 0 to 100 %; the right edge of the picture
BLOCK, ROW = 84, 26  # height of a temperature, and of a model in it


def how_sampled(temperature: float) -> str:
    "A temperature in words: what is nearly the likeliest token is called near-greedy."
    return f"{'near-greedy' if temperature <= 0.1 else 'sampled'}, temperature {temperature:g}"


def _words(x: float, y: float, text: str, side: str = "start", kind: str = "") -> str:
    return element("text", escape(text), x=x, y=y, text_anchor=side, class_=kind)


def _line(row: Mapping[str, Any], y: float) -> str:
    "One model: its interval as a bar, its win rate as a mark with the number beside it."
    model = str(row["model"]).lower()
    low, rate, high = (
        LEFT + WIDTH * min(max(row[name], 0.0), 1.0) for name in ("low", "win_rate", "high")
    )
    beside = (high + 9, "start") if row["high"] < 0.78 else (low - 9, "end")
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
        _words(beside[0], y + 4.5, percent(row["win_rate"]), beside[1], "rate"),
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
    parts = [
        element("path", class_="grid", d=f"M{x} 22V{bottom}")
        + _words(x, bottom + 16, text, "middle")
        for x, text in ((LEFT, "0 %"), (LEFT + WIDTH, "100 %"))
    ]
    half = LEFT + WIDTH // 2
    parts += [
        element("path", class_="half", d=f"M{half} 22V{bottom}"),
        _words(half, bottom + 16, "50 %: as the references", "middle"),
        _words(EDGE - 4, 14, "bad form", "end"),
        _words(LEFT, 14, "test posts won, 95 % interval"),
    ]
    for i, temperature in enumerate(temperatures):
        top = 44 + BLOCK * i
        parts.append(_words(LEFT + 5, top, how_sampled(temperature), kind="head"))
        there = {row["model"]: row for row in rows if row["temperature"] == temperature}
        for j, model in enumerate(name for name in ("sft", "ppo") if name in there):
            parts.append(_line(there[model], top + 18 + ROW * j))
    size, label = f"0 0 {EDGE} {bottom + 24}", gain_sentence(rows)
    return element("svg", *parts, class_="gain-picture", viewBox=size, role="img", aria_label=label)
