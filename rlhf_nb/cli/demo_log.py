"The end of the demo's log: three posts, what PPO gained, and what to do next."

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_nb.base.terminal import terminal_text
from rlhf_nb.ui.facts import claims_of, facts_told
from rlhf_nb.ui.html import duration
from rlhf_nb.ui.verdict import spread_posts, statements

STYLES = dict(covered="bold dodger_blue2", invented="bold dark_orange")


def signs_of(console: Console) -> dict[str, str]:
    "The sign behind a fact, beside its colour: what the terminal's encoding has."
    try:
        "✓✗".encode(console.encoding or "utf-8")
    except UnicodeEncodeError:
        return dict(covered="+", invented="!")
    return dict(covered="✓", invented="✗")


def short_post(post: str) -> str:
    "Where a post was sent and what it tells, without its title and its empty lines."
    found = re.match(r"SUBREDDIT: (r/\w+)\n+TITLE: .*\n+POST: (.*)", post, re.DOTALL)
    if not found:
        return post
    story = re.sub(r"\n+(TL;DR:\s*$)?", " ", found[2]).strip()
    return f"{found[1]}: {story}"


def claims_text(summary: str, facts: Mapping[str, str], console: Console) -> Text:
    "A summary whose facts are marked as covered or invented, and the number of those it misses."
    claims, signs, text = claims_of(summary, facts), signs_of(console), Text()
    for word in re.split(r"(\w+)", summary):
        kind = next((kind for kind in STYLES if word in claims[kind]), "")
        marked = word + signs.get(kind, "")
        text.append(str(terminal_text(marked, console)), STYLES.get(kind))
    if claims["missing"]:
        text.append(f"\nmissing: {', '.join(claims['missing'])}", "dim")
    return text


def posts_table(frame: pd.DataFrame, console: Console, count: int = 3) -> Table:
    "Some posts, each of another subreddit, with the summaries of SFT and PPO side by side."
    signs = signs_of(console)
    table = Table(
        box=SIMPLE_HEAD,
        show_lines=True,
        pad_edge=False,
        expand=True,
        title=f"{min(count, len(frame))} of {len(frame):,} test posts, near-greedy: facts covered "
        f"{signs['covered']}, invented {signs['invented']}",
    )
    for name, ratio in (("post", 4), ("SFT", 3), ("PPO", 4)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for i in spread_posts(frame["query"].tolist(), count):
        post, facts = frame["query"][i], facts_told(frame["query"][i])
        texts = [frame[f"text_{model}"][i].strip() for model in ("sft", "ppo")]
        table.add_row(
            terminal_text(short_post(post), console),
            *(
                claims_text(text, facts, console) if facts else terminal_text(text, console)
                for text in texts
            ),
        )
    return table


def print_end(
    console: Console,
    results: Mapping[str, Any],
    frame: pd.DataFrame,  # of `completions_of_run`
    quick: bool,  # whether the run was a small one
    seconds: float,  # of all stages, in whichever call they ran
    folder: Path,
    page: Path,  # its result and its rollouts
) -> None:
    "Three posts, what they came to, the time and the two next steps."
    console.print(posts_table(frame, console))
    (_, gain), (_, verdict), *others = statements(results, quick, frame)
    console.print(terminal_text(f"{gain} points. {verdict}", console), style="bold")
    for kind, text in others:
        console.print(terminal_text(text, console), style="dim" if kind == "small" else "")
    told = (
        f"\nAll stages: {duration(seconds)}. What to do next:\n"
        f"  open {shlex.quote(str(page))}\n"
        f"  rlhf-nb plot {shlex.quote(str(folder))}"
    )
    console.print(terminal_text(told, console), soft_wrap=True)
