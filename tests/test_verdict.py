"""What PPO gained: the first screen of a report, its picture, posts with their facts, and what the
reward model cannot see."""

import json
import random
import re
from dataclasses import replace

import pandas as pd
import pytest
from markup import Reader

from rlhf_nb.cli.demo_run import QUICK, DemoSettings, kind_of
from rlhf_nb.tldr import FACTS, gold_judge
from rlhf_nb.ui.facts import claims_of, facts_told, judged_text, marked_texts, post_with_facts
from rlhf_nb.ui.html import exact, number_text
from rlhf_nb.ui.verdict import (
    best_and_worst,
    blind_sentence,
    examples_section,
    gain_of,
    headline,
    near_chance,
    outcome_sentence,
    posts_section,
    spread_posts,
    subreddit_of,
)
from rlhf_nb.ui.viz import signed_number
from rlhf_nb.world import SUBREDDITS, edit_pair, mini_tldr

# ---- The first screen of a report: the gain, its picture, and what is said of the run ----


RATES = {("sft", 0.01): 0.2, ("ppo", 0.01): 0.9, ("sft", 1.0): 0.5, ("ppo", 1.0): 0.4}


def row(model, temperature, rate, malformed=0.0):
    counted = dict(posts=400, gold=3.0, covered=3.0, invented=0.001, malformed=malformed)
    near = dict(win_rate=rate, low=max(rate - 0.1, 0), high=min(rate + 0.05, 1))
    return dict(model=model, temperature=temperature, **near, **counted)


VERDICT = [row(*which, rate, 0.25 if which[1] == 1 else 0.0) for which, rate in RATES.items()]
PAIRED = [dict(temperature=0.01, difference=0.7, low=0.6, high=0.8, posts=400)]


@pytest.mark.parametrize(
    "sft, ppo, text",
    [(0.2, 0.9, "+70"), (0.9, 0.2, "−70"), (0.5, 0.5, "+0.0"), (0.5, 0.46, "−4.0")],
)
def test_the_gain_has_a_sign_and_no_more_digits_than_it_needs(sft, ppo, text):
    assert gain_of(row("sft", 1, sft), row("ppo", 1, ppo)) == text


# catches: a headline that keeps silent about the temperature at which the run is worse
def test_the_headline_has_both_temperatures_and_their_bad_form():
    page = headline(dict(verdict=VERDICT)).replace("&nbsp;", " ")
    assert page.index("+70") < page.index("prefers PPO") < page.index("temperature 1: −10 points")
    assert "from 50.0 % to 40.0 %. Bad form: 25.0 % of PPO" in page
    assert "Bad form: 0.0 % of PPO" in page and "0.00 → ≈0" not in page and "≈0 → ≈0" in page


# catches: what was measured on the usual run said of a quick one, or of one that nobody measured
@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, "seeds: 79.8 to 98.7 % in ten runs."),
        (QUICK, "seeds: 77.8 to 96.8 % in five quick runs."),
        (dict(kl_coef=0.0), "the rate moves by more."),
        (QUICK | dict(kl_coef=0.0), "the rate moves by more."),
    ],
)
def test_what_other_seeds_do_is_said_of_runs_of_that_kind(changes, said):
    kind = kind_of(replace(DemoSettings("elsewhere", 3), **changes))
    page = headline(dict(verdict=VERDICT, paired=PAIRED, kind=kind)).replace("&nbsp;", " ")
    assert f"{said}</bdi></p>" in page and page.count("runs.") <= 1


# catches: an interval drawn at another place than its numbers, a rate beside another model
def test_intervals_are_to_scale():
    table = Reader(headline(dict(verdict=VERDICT[::-1])))
    (rows,) = table.cells
    assert [[text for *_, text in row] for row in rows[1:]] == [
        ["SFT at 0.01", "20.0 %", "", "10.0–25.0 %"],
        ["PPO at 0.01", "90.0 %", "", "80.0–95.0 %"],
        ["SFT at 1", "50.0 %", "", "40.0–55.0 %"],
        ["PPO at 1", "40.0 %", "", "30.0–45.0 %"],
    ]
    bars = [a["style"] for a in table.all("span") if a.get("style", "").startswith("left")]
    for bar, rate in zip(bars, RATES.values(), strict=True):
        low, high = rate - 0.1, min(rate + 0.05, 1)
        assert bar == f"left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%"


@pytest.mark.parametrize(
    "value, text", [(0.0, "0.00"), (0.004, "≈0"), (-0.004, "≈0"), (0.0051, "0.01"), (-1.5, "−1.50")]
)
def test_a_number_near_zero_is_not_zero(value, text):
    assert number_text(value) == text
    assert exact("≈0", 0.004) == '<span title="0.004">≈0</span>'


# ---- Texts of the mini world with their facts marked ----


TRUTH = {slot: values[0] for slot, values in FACTS.items()}  # roommate broke guitar on monday


# catches: a false claim on the colour of a true one, a colour with no sign beside it
def test_a_claim_has_its_slot_and_a_sign():
    view = marked_texts({"one": "my roommate broke my car on monday."}, TRUTH)
    assert view.count("<mark") == 4 and view.count("✓") == 3 and view.count("✗") == 1
    assert repr(view) == "one my roommate ✓who broke ✓did my car ✗what on monday ✓when."
    true, false = (part.split(";")[0] for part in (view.split("<mark")[1], view.split("<mark")[3]))
    assert true != false


# catches: text that becomes markup, a label that does
def test_text_stays_text():
    view = marked_texts({"<b>x": "<script>\u202e & monday"}, TRUTH)
    assert "<script>" not in view and "<b>x" not in view and "&lt;script&gt;" in view
    assert "⟨U+202E⟩" in view


# catches: paragraphs of a post run into each other
def test_lines_of_a_post_stay_lines():
    assert marked_texts({"post": "TITLE: a\n\nPOST: b"}, TRUTH).count("\n") == 2


# ---- Posts in a report, and what the reward model cannot see ----


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


# catches: what a policy's summaries lack most told in the fourth paragraph
def test_the_largest_failure_is_told_first(world):
    shares = dict(who=0.95, when=0.52)
    reward = dict(probe_by_slot=shares, probe_pairs=dict.fromkeys(shares, 286))
    frame = frame_of(world, [0.0] * 10).assign(text_ppo="my boss left")
    page = headline(dict(verdict=VERDICT, reward=reward), frame=frame)
    told = page.partition('class="told"')[2]
    places = [told.index(x) for x in ("leave out", "Bad form", "no better than guessing")]
    assert places == sorted(places) and "<p></p>" not in headline(dict(verdict=VERDICT))


# catches: a reference without its points, so that nobody sees who won; points that are made up where
# the post tells no facts
def test_the_reference_has_its_gold(world):
    def golds(frame):
        rows = re.findall(r"<tr>(.*?)</tr>", posts_section(frame), re.S)
        cells = [re.findall(r"<t[hd].*?><bdi>([^<]*)</bdi></t[hd]>", row, re.S) for row in rows]
        return [row[-1] for row in cells if row[:1] == ["Reference"]]

    frame = frame_of(world, [1.0, 2.0, 0.0])
    wanted = [
        signed_number(gold_judge(post["completion"], json.loads(post["facts"])).gold)
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
    assert shown.index("Best: +3.00") < shown.index("Worst: −2.00")
    assert examples_section(frame[:0][["query"]]) == ""
    assert "No post has" in headline(dict(verdict=VERDICT), frame=frame[:0])


def test_what_is_above_is_not_in_the_list_again(world):
    # catches: the best example once more as the first of the list, a list that is shorter for it,
    # posts that are counted from 1 where episodes are counted from 0
    frame = frame_of(world, [3.0, 1.0, -1.0, 0.0, 1.0])
    titles = lambda shown: re.findall(r"Post \d+ of 5(?=<)", shown)
    shown = posts_section(frame, first=3, above=best_and_worst(frame))
    assert not {"Post 0 of 5", "Post 2 of 5"} & {*titles(shown)} and len(titles(shown)) == 3
    assert "the best and the worst are above" in shown
    whole = posts_section(frame, first=5)
    assert sorted(titles(whole)) == [f"Post {i} of 5" for i in range(5)] and "above" not in whole
    assert "higher than SFT's on 3, equal on 1, lower on 1" in whole


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
    told = "when “why” or “when” is wrong: right in 52.0 % to 54.5 % of up to 286 pairs each"
    assert told in text and "who" not in text
    seen = dict(who=0.95, why=0.8)
    text = blind_sentence(dict(probe_by_slot=seen, probe_pairs=dict.fromkeys(seen, 286)))
    assert "beats guessing on every fact" in text and "“why” (80.0 % of 286 pairs)" in text
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
