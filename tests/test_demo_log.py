"""The end of the demo's log: what is in it, that it is short, and that no text steers the terminal."""

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from markup import Reader
from rich.console import Console

from rlhf_nb.cli.demo_log import claims_text, posts_table, print_end, short_post
from rlhf_nb.ui.verdict import headline, statements
from rlhf_nb.world import mini_tldr


@pytest.fixture(scope="module")
def world():
    return mini_tldr(5, 1, 1, 30)["test"]


def judged(model, temperature, rate, malformed=0.0):
    return dict(
        model=model,
        temperature=temperature,
        win_rate=rate,
        low=rate - 0.02,
        high=rate + 0.02,
        posts=400,
        malformed=malformed,
    )


RESULTS = dict(
    kind="quick",
    verdict=[
        judged("sft", 0.01, 0.231),
        judged("sft", 1.0, 0.449),
        judged("ppo", 0.01, 0.972),
        judged("ppo", 1.0, 0.71, 0.15),
    ],
)


def table_of(world, ppo=None):
    return pd.DataFrame(
        dict(
            query=world["prompt"], text_sft=world["completion"], text_ppo=ppo or world["completion"]
        )
    )


class Ascii(io.TextIOWrapper):
    "A terminal that has no other characters."


def printed(frame, width=80, encoding="utf-8"):
    raw = io.BytesIO()
    stream = Ascii(raw, encoding=encoding)
    console = Console(file=stream, width=width, force_terminal=False)
    print_end(console, RESULTS, frame, True, 47.2, Path("my run"), Path("my run/rollouts.html"))
    stream.flush()
    return raw.getvalue().decode(encoding)


# catches: a listing that grows with the posts, a headline that leaves out the other temperature
def test_the_end_is_one_screen(world):
    text = printed(table_of(world))
    lines = text.splitlines()
    assert len(lines) < 60 and "3 of 30 test posts" in text
    assert lines[-3:] == [
        "All stages: 47.2 s. What to do next:",
        "  open 'my run/rollouts.html'",
        "  rlhf-nb plot 'my run'",
    ]
    told = " ".join(text.split())
    assert "+74 points. PPO improved on SFT." in told
    assert "Sampled, temperature 1: +26 points, from 44.9 % to 71.0 %." in told
    assert "Bad form: 15.0 % of PPO's summaries, 0.0 % of SFT's." in told
    assert "77.8 to 96.8 % in five quick runs" in told
    # catches: a sentence of the page that the log leaves out, or the other way round
    page = Reader(headline(RESULTS, quick=True)).text.replace("\xa0", " ")
    for kind, sentence in statements(RESULTS, quick=True):
        assert sentence in told and sentence in page, kind
    assert "five quick runs" not in str(statements(RESULTS | dict(kind="")))


def test_the_posts_are_of_different_subreddits(world):
    text = printed(table_of(world), width=160)
    heads = [word for word in text.split() if word.startswith("r/") and word.endswith(":")]
    assert len(heads) == len({*heads}) == 3


def test_a_post_without_its_frame(world):
    short = short_post(world[0]["prompt"])
    assert short.startswith("r/") and "TITLE" not in short and "TL;DR" not in short
    assert "\n" not in short and short_post("anything") == "anything"


# catches: a wrong fact with the sign of a right one, a sign that only colour gives
def test_facts_bear_their_signs(world):
    facts = json.loads(world[0]["facts"])
    wrong = "monday" if facts["when"] != "monday" else "easter"
    text = claims_text(f"my {facts['who']} on {wrong}", facts, Console(file=io.StringIO()))
    assert f"{facts['who']}✓" in text.plain and f"{wrong}✗" in text.plain
    assert "missing: did, what, when" in text.plain.replace("\n", " ")
    styles = {text.plain[s.start : s.end]: str(s.style) for s in text.spans}
    assert "blue" in styles[f"{facts['who']}✓"] and "orange" in styles[f"{wrong}✗"]


# catches: a summary that clears the screen or turns its direction, a terminal without a tick
def test_hostile_text_and_plain_terminals(world):
    hostile = ["\x1b[2Jmy [bold]boss[/bold]\u202e \x00"] * len(world)
    text = printed(table_of(world, hostile), width=120)
    assert "\x1b" not in text and "\u202e" not in text and "\x00" not in text
    assert "[bold]boss" in text.replace("✗", "").replace("✓", "")
    plain = printed(table_of(world, hostile), encoding="ascii")
    assert "+" in plain and "\\u2713" not in plain
    assert posts_table(table_of(world)[:1], Console(file=io.StringIO())).row_count == 1
