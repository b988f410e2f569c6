"What PPO gained, in words and as a picture; what a reward model cannot see; posts and summaries."

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

import pandas as pd

from rlhf_nb.evaluate import win_rate_interval
from rlhf_nb.tldr import SLOT, gold_judge
from rlhf_nb.training.metrics import SEEDS
from rlhf_nb.ui.facts import claims_of, facts_told, judged_text, post_with_facts
from rlhf_nb.ui.html import (
    Html,
    asset,
    data_table,
    element,
    missing_note,
    number_text,
    percent,
    points,
    safe_prose,
    safe_text,
)
from rlhf_nb.ui.viz import signed_number

# ---- Win rates and their intervals ----


def stretch(low: float, high: float, kind: str = "") -> Html:
    "A bar from 0 to 100 %, filled from low to high, its half marked; `kind` is one more CSS class."
    left, right = (100 * min(max(x, 0.0), 1.0) for x in (low, high))
    place = f"left:{left:.1f}%;width:{max(right - left, 0.7):.1f}%"
    bar, mark = element("span", style=place), element("span", class_="half")
    return element("span", bar, mark, class_=f"bar {kind}".strip(), aria_hidden="true")


Row = Mapping[str, Any]  # results.json, or of its verdict a model at a temperature


def gain_table(rows: Sequence[Row]) -> str:
    "What SFT and PPO won, a line a model and temperature."
    lines = [
        [
            f"{row['model'].upper()} at {row['temperature']:g}",
            percent(row["win_rate"]),
            stretch(row["low"], row["high"], kind=row["model"].lower()),
            f"{100 * row['low']:.1f}–{percent(row['high'])}",
        ]
        for row in rows
    ]
    caption = f"Won against the reference, of {max(row['posts'] for row in rows):,} test posts"
    heads = ["Model and temperature", "Won", "0 to 100 %", "95 % interval"]
    return data_table(caption, heads, lines, "gains")


# ---- The first screen of a report ----


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


def rates_sentence(sft: Row, ppo: Row, first: bool) -> str:
    "The rates at one temperature, the first time with what they are rates of; and bad form."
    before, after = percent(sft["win_rate"]), percent(ppo["win_rate"])
    gold = (
        "the gold judge, who knows the facts, prefers PPO's summary to the reference (the data "
        f"set's own) on {after} of {ppo['posts']:,} test posts, SFT's on {before}; a tie counts as "
        "half a win."
    )
    gain = f"{gain_of(sft, ppo)} points, from {before} to {after}."
    forms = [percent(row.get("malformed")) for row in (ppo, sft)]
    form = f"Bad form: {forms[0]} of PPO's summaries, {forms[1]} of SFT's."
    how = "Near-greedy" if ppo["temperature"] <= 0.1 else "Sampled"
    return f"{how}, temperature {ppo['temperature']:g}: {gold if first else gain} {form}"


def facts_sentence(sft: Row, ppo: Row) -> str:
    "Facts covered and invented."
    both = lambda name: f"{number_text(sft.get(name))} → {number_text(ppo.get(name))} a summary"
    return f"SFT → PPO: facts covered {both('covered')}, facts invented {both('invented')}."


def seeds_sentences(results: Mapping[str, Any], temperature: float) -> list[str]:
    "PPO minus SFT on the same posts, and what its interval does not know."
    lines, seeds = [], SEEDS.get(results.get("kind", ""))
    for row in results.get("paired", []):
        if row["temperature"] == temperature:
            gain, low, high = (points(row[name]) for name in ("difference", "low", "high"))
            lines.append(
                f"On the same posts PPO minus SFT: {gain} points (95 % paired interval {low} to "
                f"{high}). That is for this one run; between training seeds the rate moves by more."
            )
    return lines + [f"PPO's near-greedy rate over training seeds: {seeds}."] * bool(seeds)


def statements(
    results: Mapping[str, Any],  # of results.json
    quick: bool = False,  # whether the run was a small one
    frame: pd.DataFrame | None = None,  # of `completions_of_run`
) -> list[tuple[str, str]]:  # kind and text; empty without a verdict
    "What a demo came to, for log and page: `gain` and `verdict`, what is `told`, `small` print."
    both = judged_twice(results)
    if not both:
        return []
    sft, ppo = both[0]
    outcome = "" if frame is None else outcome_sentence(frame)
    rates = [rates_sentence(*pair, first=i == 0) for i, pair in enumerate(both)]
    told = [outcome, *rates, blind_sentence(results.get("reward") or {})]
    small = [facts_sentence(sft, ppo), *seeds_sentences(results, ppo["temperature"])]
    note = "This was a quick run, with fewer posts, labels and answers than the usual one."
    return [
        ("gain", gain_of(sft, ppo)),
        ("verdict", compare_rates(sft, ppo)),
        *(("told", text) for text in told if text),
        *(("small", text) for text in (*small, *[note] * quick)),
    ]


def headline(
    results: Row,
    quick: bool = False,
    frame: pd.DataFrame | None = None,
    looks: Mapping[str, str] | None = None,  # address -> what is to be seen there
) -> str:
    "`statements` as the first screen of a page: did it work, what changed, where to look."
    stated, both = statements(results, quick, frame), judged_twice(results)
    if not stated:
        return missing_note(
            "No verdict yet: it comes with the last stage, judge, which reads SFT's and PPO's "
            "summaries of the test posts."
        )
    (sft, ppo), (_, gain), (_, verdict), *others = both[0], *stated
    line = lambda text: element("p", safe_text(text).replace(" %", "&nbsp;%"))
    rates = first = next(text for _, text in others if "the gold judge" in text)
    for one, two in both[1:]:
        forms = percent(two.get("malformed")), percent(one.get("malformed"))
        first += f" At temperature {two['temperature']:g}: {forms[0]} and {forms[1]}."
    for row in results.get("paired", []):
        if row["temperature"] == ppo["temperature"]:
            first += f" 95 % interval of the gain: {points(row['low'])} to {points(row['high'])}."
    places = (looks or {}).items()
    links = [element("li", element("a", safe_text(text), href=href)) for href, text in places]
    return asset("gain.html").format(
        exact=escape(f"{100 * (ppo['win_rate'] - sft['win_rate']):.6g}"),
        gain=gain,
        verdict=verdict,
        first=line(first),
        others="".join(line(text) for _, text in others if text != rates),
        table=gain_table([row for pair in both for row in pair]),
        changed=typical_card(frame),
        looks="".join(links),
    )


# ---- What the reward model cannot see ----


def listed(words: Sequence[str]) -> str:
    "a, b and c."
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def near_chance(shares: Mapping[str, float], pairs: Mapping[str, int]) -> list[str]:
    """Slots whose 95 % interval contains one half: of the shares that were right on the probe, each
    of so many pairs. None where the numbers of pairs are not known."""
    interval = lambda share, n: win_rate_interval(share * n, 0, (1 - share) * n)
    between = {slot: interval(x, pairs[slot]) for slot, x in shares.items() if slot in pairs}
    return [slot for slot, (low, high) in between.items() if low <= 0.5 <= high]


def guessing(slots: Sequence[str]) -> str:
    "That wrong facts of these kinds are not noticed."
    wrong = " or ".join(f"“{slot}”" for slot in slots)
    return f"does no better than guessing when {wrong} is wrong"


def blind_sentence(
    measured: Mapping[str, Any],  # `reward` in results.json
) -> str:  # empty where the probe was not run
    "On which facts of the probe (a perfect summary, one fact wrong) a reward model guesses."
    shares, pairs = measured.get("probe_by_slot") or {}, measured.get("probe_pairs") or {}
    if not shares or shares.keys() != pairs.keys():
        return ""
    text = "Shown a perfect summary and a copy with one fact wrong, the reward model"
    weakest = min(shares, key=lambda slot: shares[slot])
    if blind := near_chance(shares, pairs):
        rates, most = sorted(shares[slot] for slot in blind), max(pairs[slot] for slot in blind)
        span = percent(rates[0]) + f" to {percent(rates[-1])}" * (len(rates) > 1)
        text += (
            f" {guessing(blind)}: right in {span} of up to {most:,} pairs each, "
            "and the 95 % interval contains 50 %."
        )
    else:
        text += (
            f" beats guessing on every fact; it is weakest on “{weakest}” "
            f"({percent(shares[weakest])} of {pairs[weakest]:,} pairs)."
        )
    return text


def outcome_sentence(frame: pd.DataFrame) -> str:
    "Which fact PPO's summaries leave out most, and which they get wrong most; empty without facts."
    if "text_ppo" not in frame:
        return ""
    answered = frame[frame["text_ppo"].notna()]
    facts = [facts_told(post) for post in answered["query"]]
    judged = [(claims_of(text, x), x) for text, x in zip(answered["text_ppo"], facts) if x]
    if not judged:
        return ""
    slots = list(judged[0][1])
    left = Counter(slot for claims, _ in judged for slot in claims["missing"])
    wrong = Counter(slot for claims, _ in judged for slot in {SLOT[x] for x in claims["invented"]})
    parts = []
    for counts, what in ((left, "leave out “{}”"), (wrong, "get “{}” wrong")):
        slot = max(slots, key=lambda name: counts[name])
        if counts[slot]:
            parts.append(f"{what.format(slot)} most often ({counts[slot]:,} of {len(judged):,})")
    return f"PPO's near-greedy summaries {listed(parts)}." if parts else ""


# ---- Posts and their summaries ----


def completions_of_run(folder: Path) -> pd.DataFrame:
    "Tables of completions side by side: query, reference; by model `text_…`, `score_…`, `gold_…`."
    parts, wanted = [], {"query", "model response", "score", "gold", "reference"}
    for name in ("sft", "ppo"):
        path = folder / "completions" / f"{name}.csv"
        if not path.is_file():
            continue
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        if absent := wanted - set(frame.columns):
            why = "delete it and run the stage judge again"
            raise ValueError(f"{path} lacks the columns {sorted(absent)}: {why}.")
        frame["nth"] = frame.groupby("query").cumcount()
        frame = frame.set_index(["query", "nth", "reference"])
        numbers = frame[["score", "gold"]].apply(pd.to_numeric, errors="coerce")
        parts.append(numbers.assign(text=frame["model response"]).add_suffix(f"_{name}"))
    return pd.concat(parts, axis=1, sort=False).reset_index() if parts else pd.DataFrame()


def subreddit_of(post: str) -> str:
    "What a post was sent to; empty where it does not say."
    match = re.match(r"SUBREDDIT: r/(\w+)", post)
    return match[1] if match else ""


def spread_posts(posts: Sequence[str], count: int) -> list[int]:
    "The first post of each subreddit in the order given, then the second of each, and so on."
    names = pd.Series([subreddit_of(post) for post in posts], dtype=str)
    nth = names.groupby(names).cumcount()
    return sorted(range(len(posts)), key=lambda i: (nth[i], i))[:count]


def best_and_worst(frame: pd.DataFrame) -> list[int]:
    """The post on which PPO gained most gold points over SFT, and the one on which it gained least.
    Of equals the first in the table; the second from another subreddit where that can be."""
    gain = (frame["gold_ppo"] - frame["gold_sft"]).dropna().sort_values(kind="stable")
    if len(gain) < 2:
        return gain.index.tolist()
    best = gain.index[gain == gain.iloc[-1]].min()
    least = sorted(i for i in gain.index[gain == gain[gain.index != best].iloc[0]] if i != best)
    name = frame["query"].map(subreddit_of)
    other = [i for i in least if name[i] != name[best]]
    return [best, (other or least)[0]]


def post_card(title: str, row: Mapping[str, Any], level: int = 4) -> str:
    "One post and the summaries of it; its facts are marked where the text tells them."
    facts = facts_told(str(row["query"]))

    def number(name: str) -> str | None:
        return signed_number(float(row[name])) if pd.notna(row[name]) else None

    def line(who: str, text: str, *numbers: str | None) -> list[Any]:
        return [who, judged_text(text, facts) if facts else text or "(nothing)", *numbers]

    reference = str(row["reference"]).strip()
    gold = signed_number(gold_judge(reference, facts).gold) if facts else None
    lines = [line("Reference", reference, None, gold)]
    for who in ("sft", "ppo"):
        if pd.notna(row.get(f"text_{who}")):
            text = row[f"text_{who}"].strip()
            lines.append(line(who.upper(), text, number(f"score_{who}"), number(f"gold_{who}")))
    table = data_table("", ["From", "Summary", "Raw score", "Gold"], lines)
    table = element("div", table, class_="wide", tabindex=0, role="region", aria_label=title)
    query = post_with_facts(row["query"], facts) if facts else safe_prose(row["query"])
    return asset("post.html").format(level=level, title=escape(title), query=query, table=table)


def typical_card(frame: pd.DataFrame | None) -> str:
    "One post before and after: the one whose gain in gold points is the median."
    if frame is None or not {"gold_sft", "gold_ppo"} <= set(frame.columns):
        return missing_note("No completions of both models yet.")
    gain = (frame["gold_ppo"] - frame["gold_sft"]).dropna().sort_values(kind="stable")
    if not len(gain):
        return missing_note("No post has answers of both models.")
    at = gain.index[len(gain) // 2]
    title = f"A typical post: {signed_number(float(gain[at]))} gold points, the median gain"
    row = {str(name): value for name, value in frame.loc[at].items()}
    return asset("legend.html") + post_card(title, row, 3)


def examples_section(frame: pd.DataFrame) -> str:
    "The best and the worst summary, by a rule that it states. Empty if a model has no completions."
    if not {"gold_sft", "gold_ppo"} <= set(frame.columns):
        return ""
    gain, rows = frame["gold_ppo"] - frame["gold_sft"], cast(list, frame.to_dict("records"))
    cards = "".join(
        post_card(f"{name}: {signed_number(float(gain[i]))} gold points, PPO minus SFT", rows[i], 3)
        for name, i in zip(("Best", "Worst"), best_and_worst(frame))
    )
    return asset("examples.html").format(count=len(frame), legend=asset("legend.html"), cards=cards)


def posts_section(
    frame: pd.DataFrame,
    first: int = 6,
    above: Sequence[int] = (),  # posts that `examples_section` shows
) -> str:
    "Some posts with all their summaries, and a count over all of them."
    if not len(frame):
        return missing_note(
            "No completions yet: the stage judge writes completions/sft.csv and "
            "completions/ppo.csv."
        )
    n, rows = f"{len(frame):,}", cast(list, frame.to_dict("records"))
    order = spread_posts(frame["query"].tolist(), first + len(above))
    new = [i for i in order if i not in above][:first]
    cards = "".join(post_card(f"Post {i:,} of {n}", rows[i]) for i in new)
    said = dict(first=first, above="; the best and the worst are above" * bool(above))
    legend = "" if above else asset("legend.html")  # which `examples_section` has
    unpicked = asset("posts.html").format(legend=legend, cards=cards, **said)
    if not {"gold_sft", "gold_ppo"} <= set(frame.columns):
        return missing_note("Only one of the two models has completions so far.") + unpicked
    gain = frame["gold_ppo"] - frame["gold_sft"]
    higher, equal, lower = (f"{x.sum():,}" for x in (gain > 0, gain == 0, gain < 0))
    counts = (
        f"Of {n} posts PPO's gold points are higher than SFT's on {higher}, equal on {equal}, "
        f"lower on {lower}."
    )
    return f"{element('p', counts)}{unpicked}"
