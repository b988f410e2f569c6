"""The world and its judge: disjoint splits, one text for one seed, verdicts worked by hand, noise
that is Bradley-Terry."""

import json
import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_nb.tldr import CORE, EXTRA, FACTS, OPENINGS, SLOT, gold_judge
from rlhf_nb.world import (
    CLAUSES,
    DISTRACTORS,
    EDITS,
    TOLD,
    draw_facts,
    edit_pair,
    edit_pairs,
    mini_tldr,
    preference_pairs,
    prefers_first,
    probe_pairs,
    split_of,
    swap_fact,
    win_rate,
    write_post,
    write_summary,
    wrong_facts,
)

TRUTH = dict(
    who="boss", did="sold", what="car", when="monday", why="drunk", feeling="sad", question="leave"
)
PERFECT = "my boss sold my car on monday because they were drunk, i feel sad. should i leave?"
every_value = [value for values in FACTS.values() for value in values]


# ---- The world ----


# catches: splits drawn by row and not by story, a split that depends on the seed (one seed's test
# would be another's training)
def test_no_story_is_in_two_splits():
    owner = {}
    for seed in (0, 1):
        for split, rows in mini_tldr(seed, 400, 100, 100).items():
            for text in rows["facts"]:
                story = tuple(json.loads(text)[slot] for slot in CORE)
                assert owner.setdefault(story, split) == split == split_of(json.loads(text))
    assert set(owner.values()) == {"train", "validation", "test"}


# catches: a slot outside the key, which would let one split own whole values (then held-out words
# were never trained on)
def test_every_value_is_in_every_split():
    for split in ("train", "validation", "test"):
        rng = random.Random(0)
        assert {v for _ in range(3000) for v in draw_facts(rng, split).values()} == set(every_value)


# catches: hash(), set order or the global random state in the text; a split whose text depends on
# the size of another
def test_the_seed_is_the_text():
    random.seed(1)
    first = mini_tldr(7, 30, 5, 5)
    random.seed(2)
    assert [mini_tldr(7, 30, 5, 5)[s].to_list() for s in first] == [
        first[s].to_list() for s in first
    ]
    assert mini_tldr(7, 10, 9, 5)["train"].to_list() == first["train"].to_list()[:10]
    assert mini_tldr(7, 10, 9, 5)["test"].to_list() == first["test"].to_list()
    assert not set(mini_tldr(8, 30, 5, 5)["train"]["prompt"]) & set(first["train"]["prompt"])


def test_posts_have_the_form_of_the_hub(world):
    columns = ["prompt", "completion", "facts", "shown"]
    assert set(world) == {"train", "validation", "test"}
    assert all(rows.column_names == columns for rows in world.values())
    for row in world["train"]:
        assert re.fullmatch(r"SUBREDDIT: r/\w+\n\nTITLE: .+\n\nPOST: .+\n\nTL;DR:", row["prompt"])
        assert row["completion"].startswith(" ")


# catches: a fact that no sentence tells (then no policy could know it), a distractor that says the
# truth, `shown` that is not in the post
def test_the_post_tells_every_fact_and_what_is_shown():
    for seed in range(200):
        rng = random.Random(seed)
        facts = draw_facts(rng, "train")
        prompt, shown = write_post(facts, rng)
        words = re.findall(r"\w+", prompt.split("POST:")[1])
        assert set(facts.values()) <= set(words)
        assert set(shown.values()) <= set(words)
        assert all(shown[slot] != facts[slot] for slot in shown)
        assert set(words) & set(every_value) == set(facts.values()) | set(shown.values())


# ---- The judge ----


# catches: a value in two slots, or one that a clause, an opening or a distractor says anyway: the
# judge would count it
def test_words_of_facts_mean_one_thing():
    assert len(SLOT) == len(every_value)
    templates = [
        t for group in (TOLD, DISTRACTORS, CLAUSES) for texts in group.values() for t in texts
    ] + list(OPENINGS)
    assert not set(re.findall(r"\w+", re.sub(r"\{\w+\}", "", " ".join(templates)))) & set(SLOT)


WHOLE = dict(covered=7, malformed=False)
by_hand = {  # a summary, its points, and what the judge sees
    "perfect": (PERFECT, 7, WHOLE | dict(invented=0, repeated=0, rambling=False, stopped=True)),
    "three covered": ("my boss sold my car.", 3, dict(covered=3, malformed=False)),
    "one invented": ("my boss sold my bike.", 0, dict(covered=2, invented=1)),
    "repeated": (
        "my boss sold my car on monday on monday.",
        2,
        dict(covered=4, repeated=1, malformed=True),
    ),
    "a word out of place": ("my car sold my boss.", 2, dict(covered=3, malformed=True)),
    "a word of another kind": (
        "my boss sold my car on angry.",
        0,
        dict(covered=3, invented=1, malformed=True),
    ),
    "malformed": ("boss sold car monday", 3, dict(covered=4, malformed=True)),
    "rambling": (
        "so basically, my boss sold my car.",
        2.5,
        dict(covered=3, rambling=True, malformed=False),
    ),
    "cut off": ("my boss sold my car on monday", 1, dict(covered=4, malformed=True, stopped=False)),
    "cut off, but whole": (PERFECT, 5, WHOLE | dict(stopped=False)),
    "too long": (
        "my boss sold my car" + " you know" * 10,
        3 - 1 - 0.2 * 3,
        dict(covered=3, words=25, malformed=True),
    ),
    "empty": ("", -1, dict(covered=0, malformed=True, words=0)),
    "space around it": (f"  {PERFECT}\n", 7, WHOLE),
    "other case": ("My Boss sold my car.", 1, dict(covered=2, malformed=True)),
}


@pytest.mark.parametrize("name", by_hand)
def test_verdicts_by_hand(name):
    text, gold, seen = by_hand[name]
    verdict = gold_judge(text, TRUTH, seen.get("stopped", True))
    assert {field: getattr(verdict, field) for field in seen} == seen
    assert verdict.gold == pytest.approx(gold)


# catches: a judge that adds up what is right and never takes away; each of these would win against
# every reference
@pytest.mark.parametrize(
    "text",
    [
        " ".join(every_value),
        " ".join(every_value * 3),
        f"{PERFECT} {PERFECT}",
        " ".join([PERFECT] * 5),
        f"{PERFECT} {' '.join(every_value)}",
        "my boss sold my car because they were drunk and jealous and bored and tired",
        "boss " * 30,
        ". . . ?",
        "<eos><eos>",
        "TL;DR: " + PERFECT,
        "my boss my boss my boss sold my car.",
        "\x00\x00",
        "my boss sold my car." + "\n" * 500 + "x " * 100,
    ],
)
def test_no_trick_is_worth_a_perfect_summary(text):
    assert gold_judge(text, TRUTH).gold <= gold_judge(PERFECT, TRUTH).gold - 1


# catches: any string of the world's own words that scores above the best honest summary
@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*every_value, *"my on because they were , . i feel should ? so basically".split()]
        ),
        max_size=60,
    ).map(" ".join),
    st.booleans(),
)
def test_seven_is_the_most(text, stopped):
    verdict = gold_judge(text, TRUTH, stopped)
    assert verdict.gold <= 7
    assert verdict.covered <= 7
    assert verdict.covered + verdict.invented + verdict.repeated <= verdict.words


def test_what_the_grammar_writes_is_well_formed():
    for seed in range(100):
        rng = random.Random(seed)
        keep = [slot for slot in EXTRA if rng.random() < 0.5]
        verdict = gold_judge(write_summary(TRUTH, rng, keep, rng.choice(("", *OPENINGS))), TRUTH)
        assert (verdict.covered, verdict.invented, verdict.repeated, verdict.malformed) == (
            3 + len(keep),
            0,
            0,
            False,
        ) and verdict.words <= 22


def test_win_rate_by_hand():
    assert win_rate([1, 2, 3, 4], [0, 2, 4, 4]) == 0.5
    for ours, theirs in (([], []), ([1], [1, 2])):
        with pytest.raises(ValueError, match="one of each for every post"):
            win_rate(ours, theirs)


# ---- Labels ----


# catches: a label by the sign alone, a noise that multiplies, first and second exchanged
@pytest.mark.parametrize("gap, noise", [(0.0, 1.0), (1.0, 1.0), (-1.0, 1.0), (2.0, 4.0), (3, 1.0)])
def test_labels_follow_bradley_terry(gap, noise):
    rng, n, wanted = random.Random(0), 20_000, 1 / (1 + math.exp(-gap / noise))
    share = sum(prefers_first(gap + 5, 5, rng, noise) for _ in range(n)) / n
    assert abs(share - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / n) + 1e-9


# catches: exp of a large number: the docstring promises that labels are right as the noise goes to
# 0
@pytest.mark.parametrize("noise", [1.0, 1e-3, 1e-9])
def test_little_noise_labels_rightly(noise):
    rng = random.Random(0)
    assert prefers_first(500, -500, rng, noise) and not prefers_first(-500, 500, rng, noise)


# catches: an edit that changes nothing the judge sees (a pair that teaches noise), a kind that is
# not what it says
@pytest.mark.parametrize("kind", sorted(set(EDITS)))
def test_every_edit_pair_differs_in_gold(kind):
    sides = set()
    for seed in range(400):
        rng = random.Random(seed)
        facts = draw_facts(rng, "train")
        _, shown = write_post(facts, rng)
        a, b, said = edit_pair(facts, shown, rng, [kind])
        gold = [gold_judge(text, facts).gold for text in (a, b)]
        assert a != b and gold[0] != gold[1]
        # nothing to drop: one of the facts is swapped
        assert said == kind or (kind == "drop" and said == "swap")
        sides.add(gold[0] > gold[1])
    assert sides == {True, False}


def test_pairs_carry_gold_and_noise(world):
    pairs = edit_pairs(world["train"], seed=0)
    assert pairs.column_names == "prompt chosen rejected kind gold_chosen gold_rejected".split()
    assert len(pairs) == len(world["train"])
    assert (
        pairs.to_list()
        == edit_pairs(world["train"], seed=0).to_list()
        != edit_pairs(world["train"], seed=1).to_list()
    )
    wrong = sum(c < r for c, r in zip(pairs["gold_chosen"], pairs["gold_rejected"])) / len(pairs)
    assert 0.01 < wrong < 0.25  # most gaps are 3 points, at which one label in twenty is wrong
    sure = edit_pairs(world["train"], seed=0, noise=0.05)
    assert all(c > r for c, r in zip(sure["gold_chosen"], sure["gold_rejected"]))
    for pair, post in zip(pairs, world["train"]):
        assert pair["gold_chosen"] == gold_judge(pair["chosen"], json.loads(post["facts"])).gold


# catches: two unstopped answers judged as if they had stopped
def test_sample_pairs_know_who_stopped(world):
    posts = world["train"].select(range(20))
    pairs = preference_pairs(
        posts, [("my boss sold my car.",) * 2 + ("sample",)] * 20, [(True, False)] * 20
    )
    assert all(abs(c - r) == 2 for c, r in zip(pairs["gold_chosen"], pairs["gold_rejected"]))


# catches: a probe whose wrong side is right, or wrong in more than one fact, or that leaves out a
# slot
def test_the_probe_changes_one_fact(world):
    pairs = probe_pairs(world["test"])
    assert set(pairs["kind"]) == set(FACTS)
    for pair, post in zip(pairs, world["test"]):
        good, bad = (
            gold_judge(pair[side], json.loads(post["facts"])) for side in ("chosen", "rejected")
        )
        assert (good.covered, good.invented, bad.covered, bad.invented) == (7, 0, 6, 1)
        assert not bad.malformed
        assert sum(a != b for a, b in zip(pair["chosen"].split(), pair["rejected"].split())) == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(list(FACTS)))
def test_a_swapped_fact_is_wrong(seed, slot):
    rng = random.Random(seed)
    shown = {slot: wrong_facts(TRUTH, rng)[slot]} if seed % 2 else {}
    changed = swap_fact(TRUTH, shown, [slot], rng)
    assert {name for name in TRUTH if changed[name] != TRUTH[name]} == {slot}
    assert changed[slot] in FACTS[slot]
