"Posts of a run with the summaries that SFT and PPO wrote of them."

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf_nb.tldr import gold_judge
from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.facts import facts_told, judged_text, post_with_facts
from rlhf_nb.ui.html import data_table, element, missing_note, safe_prose
from rlhf_nb.ui.places import NO_PAGE, SavedPage, page_link, prompt_link
from rlhf_nb.ui.viz import signed


def completions_of_run(folder: Path) -> pd.DataFrame:
    """Both tables of completions side by side: query, reference, and for each model there is
    `text_…`, `score_…`, `gold_…`."""
    parts, wanted = [], {"query", "model response", "score", "gold", "reference"}
    for name in ("sft", "ppo"):
        path = folder / "completions" / f"{name}.csv"
        if not path.is_file():
            continue
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        if absent := wanted - set(frame.columns):
            raise ValueError(
                f"{path} lacks the columns {sorted(absent)}: delete it and run the stage judge "
                "again."
            )
        for column in ("score", "gold"):
            frame[column] = pd.to_numeric(frame[column], errors="coerce")
        frame["nth"] = frame.groupby("query").cumcount()
        frame = frame.rename(
            columns={
                "model response": f"text_{name}",
                "score": f"score_{name}",
                "gold": f"gold_{name}",
            }
        )
        parts.append(frame.set_index(["query", "nth", "reference"]))
    return pd.concat(parts, axis=1, sort=False).reset_index() if parts else pd.DataFrame()


def subreddit_of(post: str) -> str:
    "What a post was sent to; empty where it does not say."
    found = re.match(r"SUBREDDIT: r/(\w+)", post)
    return found[1] if found else ""


def spread_posts(posts: Sequence[str], count: int) -> list[int]:
    """The first post of each subreddit in the order given, then the second of each, until there are
    enough. The choice depends on the posts alone."""
    names = pd.Series([subreddit_of(post) for post in posts], dtype=str)
    nth = names.groupby(names).cumcount()
    return sorted(range(len(posts)), key=lambda i: (nth[i], i))[:count]


def most_harmed(frame: pd.DataFrame, count: int) -> list[int]:
    """The posts on which PPO lost most gold points to SFT. Equal losses are taken from one
    subreddit after another, in the order of the table."""
    gain = frame["gold_ppo"] - frame["gold_sft"]
    lost = pd.DataFrame(dict(gain=gain, name=frame["query"].map(subreddit_of)))[gain < 0]
    lost["nth"] = lost.groupby(["gain", "name"]).cumcount()
    return lost.sort_values(["gain", "nth"], kind="stable").index[:count].tolist()


def best_and_worst(frame: pd.DataFrame) -> list[int]:
    """The post on which PPO gained most gold points over SFT, and the one on which it gained least.
    Of equals the first in the table; the second from another subreddit where that can be."""
    gain = (frame["gold_ppo"] - frame["gold_sft"]).dropna().sort_values(kind="stable")
    if len(gain) < 2:
        return gain.index.tolist()
    best = gain.index[gain == gain.iloc[-1]].min()
    least = sorted(i for i in gain.index[gain == gain[gain.index != best].iloc[0]] if i != best)
    other = [
        i for i in least if subreddit_of(frame["query"][i]) != subreddit_of(frame["query"][best])
    ]
    return [best, (other or least)[0]]


def post_card(title: str, row: Mapping[str, Any], level: int = 4, page: SavedPage = NO_PAGE) -> str:
    "One post and the summaries of it; its facts are marked where the text tells them."
    facts = facts_told(str(row["query"]))

    def number(name: str) -> str | None:
        return signed(float(row[name])) if pd.notna(row[name]) else None

    def line(who: str, text: str, *numbers: str | None) -> list[Any]:
        return [who, judged_text(text, facts) if facts else text or "(nothing)", *numbers]

    reference = str(row["reference"]).strip()
    gold = signed(gold_judge(reference, facts).gold) if facts else None  # written to be complete
    lines = [line("Reference", reference, None, gold)]
    for who in ("sft", "ppo"):
        if pd.notna(row.get(f"text_{who}")):
            text = row[f"text_{who}"].strip()
            lines.append(line(who.upper(), text, number(f"score_{who}"), number(f"gold_{who}")))
    table = data_table("", ["From", "Summary", "Score", "Gold"], lines)
    query = post_with_facts(row["query"], facts) if facts else safe_prose(row["query"])
    link = element("p", found) if (found := prompt_link(page, row["query"])) else ""
    return asset("post.html").format(
        level=level, title=escape(title), query=query, table=table, link=link
    )


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    "A table as one dictionary a row."
    return [{str(name): x for name, x in row.items()} for row in frame.to_dict("records")]


def examples_section(frame: pd.DataFrame) -> str:
    """The best and the worst summary, by a rule that is written there. Empty where one model has no
    completions."""
    if not {"gold_sft", "gold_ppo"} <= set(frame.columns):
        return ""
    gain, rows = frame["gold_ppo"] - frame["gold_sft"], rows_of(frame)
    names = ("Best", "Worst")
    cards = "".join(
        post_card(f"{name}: {signed(float(gain[i]))} gold points, PPO less SFT", rows[i], 3)
        for name, i in zip(names, best_and_worst(frame))
    )
    return asset("examples.html").format(count=len(frame), legend=asset("legend.html"), cards=cards)


def elsewhere(frame: pd.DataFrame, page: SavedPage) -> str:
    "Where to read rollouts, if no post of the table is among those of a page."
    if not page.name or any(prompt_link(page, post) for post in frame["query"].unique()):
        return ""
    link = page_link(page, page.name)
    return element("p", "The rollouts are of other posts, those of training: see ", link, ".")


def posts_section(
    frame: pd.DataFrame, first: int = 6, worst: int = 3, page: SavedPage = NO_PAGE
) -> str:
    "Some posts with all their summaries, and a count over all of them."
    if not len(frame):
        return missing_note(
            "No completions yet: the stage judge writes completions/sft.csv and "
            "completions/ppo.csv."
        )
    n, rows = f"{len(frame):,}", rows_of(frame)
    unpicked = "".join(
        post_card(f"Post {i + 1:,} of {n}", rows[i], page=page)
        for i in spread_posts(frame["query"].tolist(), first)
    )
    unpicked = asset("posts.html").format(first=first, legend=asset("legend.html"), cards=unpicked)
    if not {"gold_sft", "gold_ppo"} <= set(frame.columns):
        return missing_note("Only one of the two models has completions so far.") + unpicked
    gain = frame["gold_ppo"] - frame["gold_sft"]
    higher, equal, lower = (f"{x.sum():,}" for x in (gain > 0, gain == 0, gain < 0))
    counts = element(
        "p",
        f"Of {n} posts PPO's gold points are higher than SFT's on {higher}, equal on {equal}, "
        f"lower on {lower}.",
    )
    harm = "".join(
        post_card(f"Post {i + 1:,} of {n}: {signed(float(gain[i]))} points", rows[i], page=page)
        for i in most_harmed(frame, worst)
    ) or element("p", "Nowhere: it lost points on no post.")
    worse = element("h3", "Where PPO did most harm")
    return f"{counts}{elsewhere(frame, page)}{unpicked}{worse}{harm}"
