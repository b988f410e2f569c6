"The first screen of a report: what PPO gained, at both temperatures, and what to do next."

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlhf_nb.runtime.metrics import SEEDS
from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.gain_picture import gain_picture, how_sampled
from rlhf_nb.ui.html import element, missing_note, number_text, percent, points, safe_text

Row = Mapping[str, Any]  # a model at a temperature, of the verdict in results.json


def compare_rates(sft: Mapping[str, float], ppo: Mapping[str, float]) -> str:
    "What two intervals allow one to say."
    if ppo["low"] > sft["high"]:
        return "PPO improved on SFT."
    if ppo["high"] < sft["low"]:
        return "PPO did worse than SFT."
    return "Too close to call: the intervals of SFT and PPO meet."


def judged_twice(results: Mapping[str, Any]) -> list[tuple[Row, Row]]:
    "SFT and PPO at each temperature at which both were judged, the lowest first."
    rows = {(row["model"], row["temperature"]): row for row in results.get("verdict", [])}
    both = sorted({t for _, t in rows if {("sft", t), ("ppo", t)} <= rows.keys()})
    return [(rows["sft", t], rows["ppo", t]) for t in both]


def gain_of(sft: Row, ppo: Row) -> str:
    "The gain in points, as it is written large: whole points, below ten one decimal."
    gain = ppo["win_rate"] - sft["win_rate"]
    return points(gain, 0 if abs(gain) >= 0.0995 else 1)


def win_sentence(sft: Row, ppo: Row) -> str:
    "What the gain is a gain in."
    return (
        f"{how_sampled(ppo['temperature']).capitalize()}: the gold judge, who knows the facts, "
        f"prefers PPO's summary to the reference on {percent(ppo['win_rate'])} of "
        f"{ppo['posts']:,} test posts, and SFT's on {percent(sft['win_rate'])}; a tie counts half."
    )


def form_sentence(sft: Row, ppo: Row) -> str:
    "How many summaries are not of the form that the world's summaries have."
    return (
        f"Bad form: {percent(ppo.get('malformed'))} of PPO's summaries, "
        f"{percent(sft.get('malformed'))} of SFT's."
    )


def facts_sentence(sft: Row, ppo: Row) -> str:
    "Facts covered and invented."
    parts = [
        f"facts {name} {number_text(sft.get(name))} → {number_text(ppo.get(name))} a summary"
        for name in ("covered", "invented")
    ]
    return f"SFT → PPO: {', '.join(parts)}."


def seeds_sentence(row: Mapping[str, float], kind: str) -> str:
    "PPO less SFT on the same posts, and what its interval does not know."
    gain, low, high = (points(row[name]) for name in ("difference", "low", "high"))
    between = (
        f"between training seeds PPO's near-greedy rate moves by more: {SEEDS[kind]}."
        if kind in SEEDS
        else "between training seeds the rate moves by more."
    )
    return (
        f"On the same posts PPO less SFT: {gain} points (95 % paired interval {low} to {high}). "
        f"That is for this one run; {between}"
    )


def win_sentences(results: Mapping[str, Any]) -> list[str]:
    "What the number is, and what it is at the other temperatures."
    (sft, ppo), *others = judged_twice(results)
    lines = [f"{win_sentence(sft, ppo)} {form_sentence(sft, ppo)}"]
    for low, high in others:
        lines.append(
            f"{how_sampled(high['temperature']).capitalize()}: {gain_of(low, high)} points, from "
            f"{percent(low['win_rate'])} to {percent(high['win_rate'])}. {form_sentence(low, high)}"
        )
    return lines


def small_print(results: Mapping[str, Any], quick: bool) -> list[str]:
    "Facts, the paired interval, and what kind of run it was."
    sft, ppo = judged_twice(results)[0]
    lines = [facts_sentence(sft, ppo)]
    paired = {row["temperature"]: row for row in results.get("paired", [])}
    if ppo["temperature"] in paired:
        lines.append(seeds_sentence(paired[ppo["temperature"]], results.get("kind", "")))
    if quick:
        lines.append(
            "This was a quick run, with fewer posts, labels and answers than the usual one."
        )
    return lines


def paragraphs(lines: Sequence[str], kind: str = "") -> str:
    "Sentences, a paragraph each; no line breaks before a per cent sign."
    text = lambda line: safe_text(line).replace(" %", "&nbsp;%")
    return "".join(element("p", text(line), class_=kind) for line in lines)


def headline(
    results: Mapping[str, Any],  # of results.json
    quick: bool = False,  # whether the run was a small one
    next_steps: Sequence[str] = (),  # markup, a line each
    blind: Sequence[str] = (),  # what the reward model cannot see
) -> str:
    "The gain at the lowest temperature, what it is, the other temperature, and what to do next."
    both = judged_twice(results)
    if not both:
        return missing_note(
            "No verdict yet: it comes with the last stage, judge, which reads SFT's and PPO's "
            "summaries of the test posts."
        )
    (sft, ppo), *_ = both
    return asset("gain.html").format(
        exact=escape(f"{100 * (ppo['win_rate'] - sft['win_rate']):.6g}"),
        gain=gain_of(sft, ppo),
        verdict=compare_rates(sft, ppo),
        sentences=paragraphs([*win_sentences(results), *(line for line in blind if line)])
        + paragraphs(small_print(results, quick), "small"),
        picture=gain_picture([row for pair in both for row in pair]),
        next=element("ul", *(element("li", line) for line in next_steps)),
    )
