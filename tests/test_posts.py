"""Posts in a report: which are shown, what their facts are, and what the reward model cannot see."""

import json
import random
import re

import pandas as pd
import pytest

from rlhf_nb.tldr import SUBREDDITS, edit_pair, gold_judge, mini_tldr
from rlhf_nb.ui.facts import claims_of, facts_told, judged_text, post_with_facts
from rlhf_nb.ui.verdict import (
    best_and_worst,
    blind_sentence,
    examples_section,
    most_harmed,
    near_chance,
    outcome_sentence,
    posts_section,
    spread_posts,
    subreddit_of,
)
from rlhf_nb.ui.viz import signed

HOSTILE = "</td><script>alert(1)</script>\u202e my boss\x00 <mark> "


@pytest.fixture(scope="module")
def world():
    return mini_tldr(5, 1, 1, 300)["test"]


# catches: a distractor taken for a fact, a fact that is counted twice or under another slot
def test_the_page_counts_what_the_judge_counts(world):
    rng, seen = random.Random(0), set()
    for post in world:
        facts, shown = json.loads(post["facts"]), json.loads(post["shown"])
        assert facts_told(post["prompt"]) == facts
        for text in (post["completion"], *edit_pair(facts, shown, rng)[:2]):
            verdict, claims = gold_judge(text, facts), claims_of(text, facts)
            assert (verdict.covered, verdict.invented) == (
                len(claims["covered"]),
                len(claims["invented"]),
            )
            assert len(claims["covered"]) + len(claims["missing"]) == len(facts)
            seen.add(bool(claims["invented"]))
            marked = judged_text(text, facts)
            assert marked.count("✗") == len(claims["invented"])
            assert marked.count("○") == len(claims["missing"])
    assert seen == {True, False}


def test_facts_of_a_post_are_bold_and_its_distractors_are_not(world):
    for post in world.select(range(50)):
        facts, shown = json.loads(post["facts"]), json.loads(post["shown"])
        bold = re.findall(r"<strong>(\w+)</strong>", post_with_facts(post["prompt"], facts))
        assert set(bold) == set(facts.values()) and not set(bold) & set(shown.values())


# catches: text of the world that becomes markup, or that turns the direction of the page
def test_marked_text_stays_text(world):
    facts = json.loads(world[0]["facts"])
    for view in (judged_text(HOSTILE, facts), post_with_facts(HOSTILE, facts)):
        assert "<script" not in view and "\u202e" not in view and "\x00" not in view
        assert view.startswith("<bdi>") and "&lt;mark&gt;" in view and "⟨U+202E⟩" in view


def frame_of(world, gains, start=3.0):
    "A table of completions: SFT's summary is the reference, PPO's gains so many gold points."
    rows = [
        dict(
            query=post["prompt"],
            reference=post["completion"],
            text_sft=post["completion"],
            text_ppo=post["completion"],
            score_sft=0.0,
            score_ppo=1.0,
            gold_sft=start,
            gold_ppo=start + gain,
        )
        for post, gain in zip(world, gains)
    ]
    return pd.DataFrame(rows)


# catches: a reference without its points, so that nobody sees who won; points that are made up where
# the post tells no facts
def test_the_reference_has_its_gold(world):
    def golds(frame):
        rows = re.findall(r"<tr>(.*?)</tr>", posts_section(frame), re.S)
        cells = [re.findall(r"<t[hd].*?><bdi>([^<]*)</bdi></t[hd]>", row, re.S) for row in rows]
        return [row[-1] for row in cells if row[:1] == ["Reference"]]

    frame = frame_of(world, [1.0, 2.0, 0.0])
    wanted = [
        signed(gold_judge(post["completion"], json.loads(post["facts"])).gold)
        for post in world.select(range(3))
    ]
    assert sorted(golds(frame)) == sorted(wanted)
    frame["query"] = ["a post", "of another", "world"]
    assert golds(frame) == ["–"] * 3


# catches: the first six of the file, which may all be of one subreddit; a choice by the outcome
def test_posts_are_spread_over_subreddits(world):
    names = [subreddit_of(post) for post in world["prompt"]]
    chosen = spread_posts(world["prompt"], 6)
    assert {names[i] for i in chosen} == set(SUBREDDITS)
    assert all(names.index(names[i]) == i for i in chosen) and chosen == sorted(chosen)
    more = spread_posts(world["prompt"], 9)
    assert more[:6] == chosen and len({*more}) == 9
    assert spread_posts(["no head", "nor here", "SUBREDDIT: r/x"], 2) == [0, 2]
    assert spread_posts([], 6) == []


def test_the_best_and_the_worst_follow_the_rule(world):
    gains = [1.0, 3.0, 3.0, -2.0, 0.0, -2.0]
    frame = frame_of(world, gains)
    frame["query"] = [f"SUBREDDIT: r/{name} {i}" for i, name in enumerate("aabbba")]
    assert best_and_worst(frame) == [1, 3]
    frame.loc[5, "query"], frame.loc[3, "query"] = "SUBREDDIT: r/c", "SUBREDDIT: r/a 3"
    assert best_and_worst(frame) == [1, 5]  # as bad, and from another subreddit
    assert best_and_worst(frame[:1]) == [0] and best_and_worst(frame[:0]) == []
    even = frame_of(world, [2.0] * 4)
    assert len({*best_and_worst(even)}) == 2 and best_and_worst(even)[0] == 0
    shown = examples_section(frame_of(world, gains))
    assert (
        shown.index("Best: +3.00") < shown.index("Worst: −2.00")
        and examples_section(frame[:0][["query"]]) == ""
    )


def test_harm_is_shown_worst_first_and_spread_only_among_equals(world):
    frame = frame_of(world, [-1.0, -1.0, -3.0, -1.0, 2.0])
    frame["query"] = [f"SUBREDDIT: r/{name} {i}" for i, name in enumerate("aaaba")]
    assert most_harmed(frame, 3) == [2, 0, 3] and most_harmed(frame, 9) == [2, 0, 3, 1]
    assert "Where PPO did most harm" in posts_section(frame)


# catches: "cannot see" said of a fact that is seen, or of a small sample as of a large one
@pytest.mark.parametrize(
    "share, pairs, blind",
    [(0.545, 286, True), (0.545, 2000, False), (0.9, 10, False), (0.4, 9, True)],
)
def test_near_chance_depends_on_the_number_of_pairs(share, pairs, blind):
    assert bool(near_chance(dict(why=share), dict(why=pairs))) is blind


def test_the_blind_spot_is_named_with_its_numbers():
    shares = dict(who=0.95, why=0.545, when=0.52)
    text = blind_sentence(dict(probe_by_slot=shares, probe_pairs=dict.fromkeys(shares, 286)))
    assert "guessing on “why” and “when”: right in 52.0 % to 54.5 % of 286 pairs" in text
    assert "who" not in text
    seen = dict(who=0.95, why=0.8)
    text = blind_sentence(dict(probe_by_slot=seen, probe_pairs=dict.fromkeys(seen, 286)))
    assert "beats guessing on every fact" in text and "“why” (80.0 % of 286 pairs)" in text
    old = blind_sentence(dict(probe_by_slot=shares))  # a run that kept no number of pairs
    assert "weakest on “when”: right in 52.0 %" in old and "cannot" not in old
    assert blind_sentence({}) == ""


def test_what_ppo_leaves_out_and_gets_wrong_is_counted(world):
    frame, facts = frame_of(world, [0.0] * 10), json.loads(world[0]["facts"])
    core = [json.loads(post["facts"]) for post in world.select(range(10))]
    frame["text_ppo"] = [
        f"my {x['who']} {x['did']} my {x['what']} on {x['when']} because they were {x['why']}. "
        f"should i {x['question']}?"
        for x in core
    ]
    assert outcome_sentence(frame) == (
        "PPO's near-greedy summaries leave out “feeling” most often (10 of 10)."
    )
    wrong = "monday" if facts["when"] != "monday" else "easter"
    frame.loc[0, "text_ppo"] = frame.loc[0, "text_ppo"].replace(facts["when"], wrong)
    assert outcome_sentence(frame).endswith("(10 of 10) and get “when” wrong most often (1 of 10).")
    assert outcome_sentence(pd.DataFrame(dict(query=["x"], text_ppo=["y"]))) == ""
    assert outcome_sentence(pd.DataFrame()) == ""
