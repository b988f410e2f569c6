"""viewer: what a parser finds in the pages, with hostile text everywhere, with pieces missing, and
on rollouts filled half way."""

import json
import math
import re
from dataclasses import asdict, replace
from io import StringIO
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from markup import Reader
from packs import unpacked
from rich.console import Console
from test_turns import record

from rlhf_nb.cli.view import rollout_text, view_command
from rlhf_nb.gae import gae, returns_from
from rlhf_nb.kl import estimate_kl
from rlhf_nb.masks import whiten
from rlhf_nb.ppo import estimate_advantages, final_scores
from rlhf_nb.rollout import SIGNALS, Rollout
from rlhf_nb.shaping import penalize_missing_eos, shape_rewards
from rlhf_nb.turns import keep_chosen, paid_turns, put_fields_back, reached_stops
from rlhf_nb.ui.episodes import ONE_WAY, Shown, bracketed, paler
from rlhf_nb.ui.html import add_blanks, asset, element, themed_page
from rlhf_nb.ui.reader import packed_update
from rlhf_nb.ui.report import demo_report
from rlhf_nb.ui.run_files import ppo_lines, rollout_files
from rlhf_nb.ui.run_view import Run, episodes_markup
from rlhf_nb.ui.viewer import browse, view
from rlhf_nb.ui.viz import signed_number
from rlhf_nb.ui.what_if import objective_of, reproduces, what_if
from rlhf_nb.update import Objective

TAGS = set(
    """a bdi body br caption circle code dd details div dl dt figcaption figure g h1 h2 h3 h4 head html
    img li main mark meta nav p path polyline rect section small span strong style summary svg table
    tbody td text th thead title tr ul wbr""".split()
)
ATTRIBUTES = set(
    """alt aria-hidden aria-label aria-labelledby charset class content href http-equiv id lang name
    role scope src style tabindex title
    viewbox x y width height cx cy r d points text-anchor""".split()  # the last line: of an svg
)
HOSTILE = (
    "</td></style></title>\"'><script>alert(1)</script><img src=x "
    "onerror=alert(1)>&lt;\u202e\ud800\x00\n$x$"
)


def skeleton(reader):
    "Tags in order, tables left out: a longer token breaks a strip into more of them."
    return [tag for tag, _ in reader.seen if tag not in "table caption tr th td bdi wbr".split()]


def check(markup):
    """Holds for every page and view: known tags and attributes alone, nothing fetched, nothing run,
    tables with header scopes, no invisible character."""
    markup.encode("utf-8")
    assert not set("\u202e\x00") & set(markup)
    reader = Reader(markup)
    assert {tag for tag, _ in reader.seen} <= TAGS
    assert {name for _, attributes in reader.seen for name in attributes} <= ATTRIBUTES
    for tag, attributes in reader.seen:
        drawn = "data:image/svg+xml;base64,"
        assert attributes.get("src", drawn).startswith(drawn)
        assert re.fullmatch(r"#[\w=&-]+|rollouts[\w.%-]*\.html", attributes.get("href", "#s"))
        assert "url(" not in attributes.get("style", "")
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
        if tag == "img":
            assert len(attributes["alt"]) > 20
    assert "url(" not in reader.style and "@import" not in reader.style and "<" not in reader.style
    for table in reader.tables:
        assert len({len(row) for row in table}) == 1
    return reader


def check_page(text):
    "A whole page, its headings and links."
    reader = check(text)
    levels = [level for level, _ in reader.heads]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in pairwise(levels))
    assert all(text for _, text in reader.heads)
    ids = [attributes["id"] for _, attributes in reader.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {x["href"] for x in reader.all("a") if "=" not in x["href"]}
    assert links <= {"#rollouts"} | {f"#{i}" for i in ids}
    named = {section.get("aria-labelledby") for section in reader.all("section")}
    assert named - {None} <= set(ids)
    return reader


# ---------------------------------------------------------------- rollouts
def make(lengths=(3, 5, 0), width=5, seed=0, **changes):
    "A full rollout of made-up numbers."
    g, B = torch.Generator().manual_seed(seed), len(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    signals = {name: torch.randn(B, width, generator=g) * mask for name in SIGNALS}
    return Rollout(
        torch.ones(B, 4).long(),
        torch.ones(B, 4),
        torch.arange(B * width).view(B, width) * mask,
        mask,
        torch.arange(B) % 2 == 0,
        **signals,
        raw_scores=torch.randn(B, generator=g),
        scores=torch.randn(B, generator=g),
        prompts=[f"post {b}" for b in range(B)],
        responses=["w" for _ in lengths],
        tokens=[[f"w{t}" for t in range(n)] for n in lengths],
        columns={"reference": [f"ref {b}" for b in range(B)]},
        info=dict(update=7, episode=1792, kl_coef=0.05),
    ).with_(**changes)


TALK = [
    dict(role="system", content="Be kind."),
    dict(role="user", content=[dict(type="text", text="你好"), dict(type="image")]),
    dict(role="assistant", content=None, tool_calls=[dict(function=dict(name="clock"))]),
    dict(role="tool", content="12:00\n<b>sharp</b>"),
]


# catches: a prompt that a template has written, as one string with its marks; a text with a stray mark
# taken for turns
@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi\nthere<|im_end|>\n<|im_start|>assistant\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi\nthere<|eot_id|>",
    ],
)
def test_a_template_is_read_as_turns(text):
    header = unpacked(packed_update(Shown(make((3,), prompts=[text]))))[0]
    assert header["prompts"][0]["turns"] == [["system", "Be kind."], ["user", "Hi\nthere"]]
    assert header["prompts"][0]["text"] == text
    plain = unpacked(packed_update(Shown(make((3,), prompts=["what is <|im_start|> for?"]))))[0]
    assert "turns" not in plain["prompts"][0]


# catches: the template's marks where turns are wanted, a turn without text that ends the page, the
# text that the model read lost
def test_a_conversation_is_shown_turn_by_turn():
    r = make(conversations=[TALK, "a text", TALK[:1]], prompts=["<|im|>Be kind", "a text", "p"])
    prompts = unpacked(packed_update(Shown(r)))[0]["prompts"]
    assert [turn[0] for turn in prompts[0]["turns"]] == ["system", "user", "assistant", "tool"]
    assert prompts[0]["turns"][1][1].startswith("你好")
    assert prompts[0]["turns"][2][1] == '{"name": "clock"}'
    assert prompts[0]["text"] == "<|im|>Be kind" and "turns" not in prompts[1]
    page = str(view(r))
    assert "user: 你好" in page and "&lt;b&gt;sharp" in page and "<b>sharp" not in page
    out = Console(file=StringIO(), width=200)
    out.print(rollout_text(r))
    assert "system: Be kind." in out.file.getvalue() and "<|im|>" not in out.file.getvalue()


@settings(max_examples=40, deadline=None)
@given(st.sets(st.sampled_from(SIGNALS)), st.integers(0, 2), st.booleans(), st.booleans())
def test_view_shows_what_is_there(filled, episode, scored, named):
    # catches: a field that must be there, a row of a missing signal, numbers of another episode,
    # padding shown
    full = make()
    part = full.with_(**{name: getattr(full, name) if name in filled else None for name in SIGNALS})
    if not scored:
        part = part.with_(scores=None, raw_scores=None)
    if not named:
        part = part.with_(tokens=[], prompts=[], responses=[], columns={}, info={})
    reader = check(view(part, episode))
    n = int(full.mask[episode].sum())
    words = (
        [f"w{t}" for t in range(n)]
        if named
        else [str(i) for i in full.response_ids[episode, :n].tolist()]
    )
    if filled:
        assert reader.tables[-1] == [["", *words]] + [
            [name, *(signed_number(x) for x in getattr(full, name)[episode, :n].tolist())]
            for name in SIGNALS
            if name in filled
        ]
        first = next(name for name in ("kl", "advantages", "rewards", *SIGNALS) if name in filled)
        if n:
            assert reader.tables[0][1][0] == first
            assert [x for table in reader.tables[:-1] for x in table[0][1:]] == words
    facts = reader.text.split(" Prompt")[0]
    assert ("raw score" in facts) == scored and ("KL " in facts) == ("kl" in filled)
    assert f"{n} token" in facts
    there = f"reference: ref {episode}" in reader.text and f"post {episode}" in reader.text
    assert there == named


# catches: a notebook of 80 MB for one answer, a page without its end, a beginning that looks whole
def test_a_long_answer_begins_as_markup_and_is_whole_in_the_page():
    tokens = [f"t{i:04} " for i in range(1500)]
    shown = view(make((1500,), 1500, tokens=[tokens], responses=["".join(tokens)]))
    text = shown._repr_html_()
    assert "t0999" in text and "t1000" not in text
    assert "1500 tokens" in text and "the first 1,000 follow, save_html() shows all" in text
    assert "t1499" in unpacked(packed_update(shown.shown))[0]["answers"][0]
    assert "save_html" not in view(make())._repr_html_()


def test_view_facts_by_hand():
    # catches: a mean for the sum, padding in the KL, score and raw score exchanged, stopped and cut
    # off exchanged
    r = make().with_(
        kl=torch.tensor([[0.5, 0.25, -1.0, 9, 9], [0] * 5, [0] * 5]),
        scores=torch.tensor([1.5, 0, 0]),
        raw_scores=torch.tensor([-2.0, 0, 0]),
    )
    told = "Episode 0 of 3, update 7 · score +1.50 · raw score −2.00 · KL −0.25 nats · 3 tokens"
    assert f"{told} · stopped by itself" in view(r, 0)
    assert "cut off" in view(r, 1) and "0 tokens" in view(r, 2)


def test_view_of_any_signal_and_of_none():
    r = make()
    for name in SIGNALS:
        assert check(view(r, 1, name)).tables[0][1][0] == name
    bare = replace(r, **dict.fromkeys((*SIGNALS, "scores", "raw_scores")))
    assert check(view(bare, 1)).tables == [[["token", "w0", "w1", "w2", "w3", "w4"]]]
    with pytest.raises(ValueError, match="no signal 'kl'.*none yet"):
        view(bare, 1, "kl")
    with pytest.raises(ValueError, match=r"no signal 'entropy'.*'kl', 'advantages'"):
        view(r, 0, "entropy")
    for episode in (-1, 3):
        with pytest.raises(ValueError, match=f"no episode {episode}.*has 3"):
            view(r, episode)


def test_view_of_hostile_numbers():
    # catches: bfloat16 or gradients that refuse, a sum in half precision, nan that breaks the scale
    r = make((300,), 300)
    half = view(r.with_(kl=torch.full((1, 300), 1.01, dtype=torch.bfloat16, requires_grad=True)))
    assert f"KL {signed_number(300 * float(torch.tensor(1.01, dtype=torch.bfloat16)))} nats" in half
    odd = torch.tensor([[math.nan, math.inf, -math.inf, -1e4, 0.0]])
    assert check(view(make((5,)).with_(kl=odd, logprobs=odd))).tables[0][1] == [
        "kl",
        "nan",
        "+inf",
        "−inf",
        "−10,000",
        "0",
    ]


def test_padding_is_not_seen():
    # catches: padding shown, or counted in KL or scale
    r, names = make(), [name for name in SIGNALS if name != "rewards"]
    dirty = r.with_(**{name: torch.where(r.mask, getattr(r, name), 1e9) for name in names})
    for name in SIGNALS:
        assert [view(dirty, b, name) for b in range(3)] == [view(r, b, name) for b in range(3)]


def test_view_changes_nothing_and_prints():
    r = make()
    before = r.with_(**{name: getattr(r, name).clone() for name in SIGNALS})
    text = repr(view(r, 1))
    assert all(torch.equal(getattr(before, name), getattr(r, name)) for name in SIGNALS)
    assert text.startswith("Episode 1 of 3") and "advantages" in text
    assert "post 1" in text and "reference: ref 1" in text


# ---------------------------------------------------------------- what if
def trained(seed=0, **chosen):
    "What the trainer's phases make, written out: the independent half of the comparison."
    o = Objective(**dict(kl_estimator="k1", kl_coef=0.05, gamma=1.0, lam=0.95) | chosen)
    r, raw = make((3, 5, 1, 4), seed=seed), torch.tensor([1.5, -2.0, 0.25, 3.0])
    scores = raw if o.score_clip is None else raw.clamp(-o.score_clip, o.score_clip)
    if o.missing_eos_penalty is not None:
        scores = penalize_missing_eos(scores, r.stopped, o.missing_eos_penalty)
    kl = estimate_kl(r.logprobs, r.ref_logprobs, o.kl_estimator).masked_fill(~r.mask, 0.0)
    rewards, _ = shape_rewards(scores, kl, r.mask, o.kl_coef if o.kl_in == "reward" else 0.0)
    if o.whiten_rewards:
        rewards = whiten(rewards, r.mask, shift_mean=False)
    plain = gae(rewards, r.values, r.mask, o.gamma, o.lam)
    lam = o.lam if o.lam_value is None else o.lam_value
    return r.with_(
        kl=kl,
        raw_scores=raw,
        scores=scores,
        rewards=rewards,
        returns=returns_from(gae(rewards, r.values, r.mask, o.gamma, lam), r.values, r.mask),
        advantages=whiten(plain * r.mask, r.mask),
        info=dict(update=1, kl_coef=o.kl_coef),
        objective=asdict(o),
    )


MADE = ("kl", "scores", "rewards", "returns", "advantages")
SETTINGS = [
    dict(),
    dict(kl_estimator="k3", kl_coef=0.3),
    dict(gamma=0.99, lam=0.9),
    dict(missing_eos_penalty=1.0),
    dict(kl_in="loss", kl_estimator="k3"),
    dict(whiten_rewards=True, lam=1.0),
    dict(lam_value=1.0, score_clip=1.0, missing_eos_penalty=0.5),
    dict(kl_estimator="abs", missing_eos_penalty=0.7, gamma=0.9123, lam=0.0456, kl_coef=0.0123),
]


@pytest.mark.parametrize("settings_", SETTINGS, ids=repr)
def test_the_objective_of_a_rollout_gives_its_numbers_back(settings_, tmp_path):
    # catches: a default that is not the trainer's, a penalty taken off twice, whitening of padding,
    # a setting that gets lost in the file
    r = Rollout.load(trained(**settings_).save(tmp_path / "r.safetensors"))
    carried = objective_of(r)
    assert {name: getattr(carried, name) for name in settings_} == settings_
    again = what_if(r, carried)
    assert again.objective == r.objective == asdict(carried)
    for name in MADE:
        assert torch.equal(getattr(again, name), getattr(r, name)), name
    # catches: a number that changes on its way, a column that belongs to the neighbour, an array
    # that could have been computed
    header, rows = unpacked(packed_update(view(r).shown))
    assert "advantages come out exactly" in header["told"]
    measured = {"logprobs", "ref_logprobs", "values"}
    assert set(rows) == {"widths", "engine_logprobs", *measured}
    for name in measured:
        assert rows[name] == [x[m].tolist() for x, m in zip(getattr(r, name), r.mask)]
    assert header["raw_scores"] == r.raw_scores.tolist() and header["scores"] == r.scores.tolist()
    offered = {name: x for name, x in header["recipe"].items() if name != "missing_eos_penalty"}
    assert offered.items() <= r.objective.items()
    assert ("kl_coef" in offered) == (r.objective["kl_in"] == "reward")


OBJECTIVES = st.fixed_dictionaries(
    dict(
        kl_estimator=st.sampled_from(["k1", "k2", "k3", "abs"]),
        kl_coef=st.sampled_from([0.0, 0.02, 0.5]),
        gamma=st.sampled_from([0.0, 0.9, 1.0]),
        lam=st.sampled_from([0.0, 0.95, 1.0]),
        missing_eos_penalty=st.sampled_from([None, 1.5]),
    )
)


@settings(max_examples=25, deadline=None)
@given(OBJECTIVES)
def test_what_if_is_what_the_trainer_would_have_made(chosen):
    # catches: a setting that is not passed on, or is mixed up with another
    wanted = trained(**chosen)
    new = what_if(trained(), objective_of(wanted))
    for name in MADE:
        assert torch.equal(getattr(new, name), getattr(wanted, name)), name


# catches: other settings tried over what was observed too; a penalty charged once an episode; a
# reward that is paid a turn late; a value behind the end where the world has ended
@pytest.mark.parametrize("estimator", ["gae", "gae_turns"])
def test_what_if_over_turns_is_what_the_trainer_would_have_made(estimator):
    r = record([[(2, 3), (1, 1), (3, 2)], [(1, 1)], [(2, 2), (2, 0)], [(1, 4), (1, 1)]])
    r = r.with_(stop_reason=["terminated"] * 4)
    made = dict(advantage_estimator=estimator, kl_coef=0.3, missing_eos_penalty=0.7)
    made |= dict(gamma=1.0 if estimator == "gae_turns" else 0.9, bootstrap_truncated=True)

    def trained(cfg: Objective) -> Rollout:
        drawn = keep_chosen(r)
        raw = paid_turns(drawn).nan_to_num(0.0)
        final = final_scores(raw, reached_stops(drawn), cfg, mask=drawn.mask)
        scored = put_fields_back(r, raw_scores=raw, scores=final, paid=~paid_turns(drawn).isnan())
        kl = estimate_kl(r.logprobs, r.ref_logprobs, cfg.kl_estimator).masked_fill(~r.chosen, 0.0)
        return estimate_advantages(scored.with_(kl=kl), cfg).with_(objective=asdict(cfg))

    was, cfg = trained(Objective(**made)), Objective(**made | dict(lam=0.5, lam_turn=0.5))
    assert reproduces(was, objective_of(was))[0]
    for wanted, new in ((was, objective_of(was)), (trained(cfg), cfg)):
        again = what_if(was, new)
        for name in MADE:
            assert torch.equal(getattr(again, name), getattr(wanted, name)), name
    if estimator == "gae_turns":
        return
    by_hand = torch.zeros_like(r.values)
    for e in range(len(r)):
        after = value = 0.0
        for t in reversed(r.chosen[e].nonzero()[:, 0].tolist()):
            k = int(r.turn[e, t])
            later = r.chosen[e, t + 1 :] & (r.turn[e, t + 1 :] == r.turn[e, t])
            pays = 0.0 if later.any() else r.turn_rewards[e, k] - 0.7 * ~r.turn_stopped[e, k]
            delta = pays - 0.3 * again.kl[e, t] + 0.9 * value - r.values[e, t]
            by_hand[e, t] = after = delta + 0.9 * 0.5 * after
            value = r.values[e, t]
    x = by_hand[r.chosen]
    assert torch.allclose(again.advantages[r.chosen], (x - x.mean()) / x.std(), atol=1e-6)
    text = str(rollout_text(was))
    assert f"{was.chosen[1].sum()} token · 1 turn, terminated" in text and "Turn 3 · reward" in text
    own, words = (
        was.chosen[0].tolist(),
        bracketed(was, 0, [f"w{t}" for t in range(was.chosen.shape[1])]),
    )
    apart = "".join(words).replace("]", "[").split("[")  # the policy's and the world's, in turn
    assert "".join(apart[1::2]) == "".join(f"w{t}" for t, x in enumerate(own) if not x) != ""


def test_what_does_not_come_out_is_said():
    # catches: "exactly" where it is not; numbers of other settings taken for those of the run
    r = trained()
    odd = r.with_(advantages=r.advantages * 1.5 + 0.1)  # whitened over other ranks too
    header, rows = unpacked(packed_update(view(odd).shown))
    assert header["recipe"] is None is header["asks"]
    assert "stored advantages do not come out: several processes" in header["told"]
    assert np.allclose(rows["advantages"][1], odd.advantages[1, :5])
    near = unpacked(packed_update(view(r.with_(advantages=r.advantages + 1e-6 * r.mask)).shown))[0]
    assert "within" in near["told"] and near["recipe"]
    full = r.with_(objective=r.objective | dict(kl_estimator="full"), kl=r.kl.abs() * 3)
    header, rows = unpacked(packed_update(view(what_if(full, objective_of(full))).shown))
    assert header["recipe"]["kl_estimator"] == "full" and "kl" in rows and "rewards" not in rows
    scaled = r.with_(
        scores=r.raw_scores / 3 - 2.0 * ~r.stopped,
        objective=r.objective | dict(normalize_scores=True, missing_eos_penalty=2.0),
    )
    free = what_if(scaled, replace(objective_of(scaled), missing_eos_penalty=None))
    assert torch.allclose(free.scores, r.raw_scores / 3, atol=1e-6)


@pytest.mark.parametrize(
    "carried, tried, why",
    [
        (dict(advantage_estimator="rloo"), {}, "advantage_estimator is rloo"),
        ({}, dict(advantage_estimator="rloo"), "advantage_estimator is rloo"),
        (dict(bootstrap_truncated=True), {}, "bootstrap_truncated took"),
        ({}, dict(kl_estimator="full"), "the whole vocabulary"),
        ({}, dict(normalize_scores=True, score_clip=1.0), "normalize_scores, score_clip made"),
    ],
)
def test_what_a_rollout_does_not_hold_is_not_made_up(carried, tried, why):
    # catches: a setting that is ignored without a word
    r = trained()
    r = r.with_(objective=r.objective | carried)
    with pytest.raises(ValueError, match=why):
        what_if(r, replace(objective_of(r), **tried))
    if carried:
        header, _ = unpacked(packed_update(view(r).shown))
        assert header["recipe"] is None and why in header["told"]


def test_a_rollout_without_an_objective_asks_for_it():
    # catches: settings that are guessed; a choice that is taken for what the run said
    r = trained(kl_coef=0.1, missing_eos_penalty=1.0, lam=0.7)
    for old in (r.with_(objective=None), r.with_(objective=r.objective | dict(gone=1))):
        assert objective_of(old) is None
        header, rows = unpacked(packed_update(view(old).shown))
        assert header["recipe"] is None and header["told"].startswith("The file does not say")
        assert header["asks"]["kl_coef"] == 0.1 and header["asks"]["lam"] == 0.95  # the default
        assert header["unpenalized"] == r.raw_scores.tolist() and "advantages" in rows
        for chosen, fits in ((objective_of(r), True), (Objective(), False)):
            seen = view(old, objective=chosen)
            header, _ = unpacked(packed_update(seen.shown, None, seen.objective))
            assert "(chosen by you)" in header["told"] and bool(header["recipe"]) == fits
            assert (header["asks"] is None) == fits
            assert ("do not come out" in header["told"]) != fits
    with pytest.raises(ValueError, match="carries its own"):
        view(r, objective=Objective())


def test_some_episodes_are_packed_with_all_their_signals():
    # catches: a what-if over half an update, whose whitening would be another
    r = trained()
    header, rows = unpacked(packed_update(view(r).shown, [3, 0]))
    assert header["recipe"] is None and header["episodes"] == [3, 0] and header["of"] == 4
    assert {"kl", "rewards", "advantages", "returns"} <= set(rows)
    assert rows["advantages"][0] == r.advantages[3, :4].tolist()


@pytest.mark.parametrize(
    "tokens, text, wanted",
    [
        (["the", "cat", "<eos>"], " the cat", [" the", " cat", "<eos>"]),
        ([" the", " cat"], " the cat", [" the", " cat"]),
        (["a", ".", "b"], "a. b", ["a", ".", " b"]),
        (["a", "\n", "b"], "a\nb", ["a", "\n", "b"]),
        (["\ufffd", "\ufffd", "x"], "\u00e9x", ["\ufffd", "\ufffd", "x"]),
        ([], "", []),
        (["", "a"], "a", ["", "a"]),
        (["", "x", "x"], "x  x", ["", "x", "  x"]),
        (["<b>", "b"], "b", ["<b>", "b"]),
        (["\ufffd", "is", "a"], "\u00e9 is a", ["\ufffd", " is", " a"]),
    ],
)
def test_tokens_become_running_text(tokens, text, wanted):
    # catches: words without spaces between, a space twice, a stop token that is searched for, a token
    # that is lost or twice, and a byte of half a letter after which nothing fits
    assert add_blanks(tokens, text) == wanted


def test_a_strip_has_the_scale_of_its_update():
    # catches: a scale for each episode, the largest number as full colour, zeros or padding in the
    # quantile, a signal that is not stored without a scale, log-probs that are all blue or deep where
    # they are likely; the same in the browser: test_static
    assert paler(torch.arange(-100.0, 101)) == 100 == paler(torch.tensor([100.0]))
    assert paler(torch.cat([torch.full((199,), 0.2), torch.tensor([9.0])])) == pytest.approx(0.2)
    assert paler(torch.zeros(3)) == 0 == paler(torch.tensor([math.nan])) == paler(torch.zeros(0))
    assert paler(torch.tensor([5.0, 1.0] * 2**14)) == 5  # every second one
    r = trained()
    last = r.kl.clone()
    last[1, 0] = 7.0
    scale = "full colour at 7<"
    seen = [view(r.with_(kl=last), episode, signal="kl") for episode in range(len(r))]
    assert all("kl; 99 % of this update is paler" in x and scale in x for x in seen)
    now = view(r, now=r.logprobs + math.log(1.5), entropy=r.mask * 4.0)
    assert "ratio - 1; 99 % of this update is paler: full colour at 0.5<" in now
    assert now.shown.scale("entropy") == (4, 4) and now.shown.scale("clipped") == (None, 1)
    assert "background:#7347c7" not in view(r, entropy=r.mask * 4.0, signal="entropy")
    run = Run(update=1, total=1, batch=4, last=r.with_(kl=last))
    assert "full colour at 7.00, 99 % of this update is paler" in episodes_markup(run, "kl", 1)
    assert "full colour" in view(r.with_(kl=0 * r.kl), signal="kl")
    rare = r.logprobs.clone()
    rare[0, :3] = torch.tensor([-0.01, -5.0, -9.0])
    strip = view(r.with_(logprobs=rare), signal="logprobs").split("<table")[1]
    pale, full = Shown(r.with_(logprobs=rare)).scale("logprobs")
    assert f"no colour at {pale:.3g}, full colour at {full:.3g}<" in strip and full == -9
    grounds = re.findall(r"background:(#7347c7(\w\w)|transparent)", strip)
    depths = [int(depth or "0", 16) for _, depth in grounds]
    assert depths[:3] == sorted(depths[:3]) and depths[2] == 128 == max(depths)
    table = re.search(r"ONE_WAY = \{(.*?)\}", asset("reader.js"))
    assert table and {k: int(x) for k, x in re.findall(r"(\w+): (-?1)", table[1])} == ONE_WAY


def test_ratio_and_clipped_by_hand():
    # catches: the ratio upside down, a clip that ignores the sign of the advantage, cliprange not
    # passed on
    r = trained().with_(advantages=torch.tensor([[1.0, 1, -1, 0, 0], [-1] * 5, [1] * 5, [1] * 5]))
    up = r.logprobs + math.log(1.5)
    shown = view(r, now=up).shown
    assert torch.allclose(shown.signals(0)["ratio - 1"], torch.tensor(0.5))
    assert shown.signals(0)["clipped"].tolist() == [1, 1, 0]
    for wide in (dict(cliprange=0.6), dict(cliprange_high=0.6)):
        wider = view(r.with_(objective=r.objective | wide), now=up).shown
        assert wider.signals(0)["clipped"].tolist() == [0, 0, 0]
    down = view(r, now=r.with_(logprobs=r.logprobs - math.log(2))).shown
    assert down.signals(0)["clipped"].tolist() == [0, 0, -1]
    assert down.signals(1)["clipped"].tolist() == [-1] * 5
    with pytest.raises(ValueError, match="rollout of other responses"):
        view(r, now=r.with_(response_ids=r.response_ids + 1))
    with pytest.raises(ValueError, match=r"entropy has shape \[2\]"):
        view(r, entropy=torch.ones(2))
    assert view(r, entropy=r.values.abs(), signal="entropy").startswith("<div")


# ---------------------------------------------------------------- the live view
def ask(reader, **question):
    "What the kernel answers to a question of the page."
    sent = []
    reader.send = lambda content, buffers=None: sent.append((content, buffers))
    reader._handle_custom_msg(dict(question, number=7), [])
    (content, buffers) = sent[0]
    assert content["answers"] == 7
    return buffers[0] if buffers else content


def test_the_live_reader_is_given_the_update_that_it_asks_for():
    seen = view(trained(), episode=2, signal="values")
    assert seen.reader.place == dict(row=2, signal="values")
    assert ask(seen.reader, load=0) == packed_update(seen.shown)
    assert ask(seen.reader, again=[0, 1])["value"] == dict(found=[], completed=[])


@pytest.mark.parametrize("lengths, filled", [((1,), True), ((0,), True), ((3, 2), False)])
def test_views_of_little(tmp_path, lengths, filled):
    r = make(lengths)
    if not filled:
        r = r.with_(**dict.fromkeys(SIGNALS), scores=None, raw_scores=None)
        r = r.with_(tokens=[], prompts=[], responses=[], columns={}, info={})
    _, data = read_page(view(r).save_html(tmp_path / "x.html"))
    header, rows = unpacked(data["updates"][0]["packed"])
    follows = {"kl", "rewards", "advantages", "returns"} if header["recipe"] else set()
    assert header["lengths"] == r.mask.sum(1).tolist()
    assert set(rows) - {"widths"} == (set(SIGNALS) - follows if filled else set())


# ---------------------------------------------------------------- the static file
def read_page(path):
    """A static page and its data. That it asks for nothing, and that its policy lets its script run,
    is seen in the browser; here, that the script makes no markup of text."""
    page = Reader(path.read_text(encoding="utf-8"))
    assert [attributes for attributes, _ in page.scripts] == [
        {"type": "application/json", "id": "rlhf-reader-data"},
        {"type": "module"},
    ]
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    styles = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert policy.startswith(f"{styles}; script-src 'sha256-")
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\("
    assert not re.search(makers, page.scripts[1][1])
    return page, json.loads(page.scripts[0][1])


def test_a_static_file_of_70_episodes_with_all_signals(tmp_path):
    # catches: a file that grows with its markup; signals left out; a page that is empty without a
    # script. Numbers and texts: tests/browser/test_static.py
    r = make([40 + i % 14 for i in range(70)], 53)
    seen = view(r, now=r.logprobs + 0.1, entropy=r.values.abs())
    path = seen.save_html(tmp_path / "r.html")
    page, data = read_page(path)
    assert path.stat().st_size < 2_000_000 and not list(tmp_path.glob("*.partial"))
    header, rows = unpacked(data["updates"][0]["packed"])
    assert header["of"] == len(header["episodes"]) == 70
    assert set(rows) == {*SIGNALS, "widths", "now", "entropy"}  # made-up numbers: nothing follows
    assert all(text in page.text for text in ("Episode 0 of 70", "Episode 2 of 70", "post 0"))
    few = read_page(seen.save_html(tmp_path / "few.html", episodes=2))[1]
    assert unpacked(few["updates"][0]["packed"])[0]["episodes"] == [0, 1]


def test_a_static_file_opens_at_the_place_of_the_reader(tmp_path):
    seen = view(trained())
    seen.reader.place = dict(row=3, signal="values", sort="score", down=True)
    _, data = read_page(seen.save_html(tmp_path / "r.html"))
    assert data["place"] == dict(row=3, signal="values", sort="score", down=True)


def test_hostile_text_in_views():
    # catches: markup made of text, half characters that cannot be written, a word of 10,000 letters
    # on one line; in files: tests/browser/test_static.py
    evil, long = HOSTILE + "\ufffd<!--<script>", "a" * 10_000
    r = make(
        (3, 5, 0),
        prompts=[evil, long, evil],
        responses=[evil, long, ""],
        tokens=[[evil] * 3, [long, evil, "\u202eabc", "", "\n"], []],
        columns={evil: [evil] * 3},
        info=dict(update="</script><b>"),
    )
    for episode in range(3):
        markup = view(r, episode)
        calm = view(make(responses=["", "", ""], columns={"c": ["d"] * 3}), episode)
        assert skeleton(check(markup)) == skeleton(check(calm))
    assert max(len(word) for word in re.split(r"<[^>]*>|\s", view(r, 1))) < 200
    assert view(r, 1).count("<wbr>") > 400


# ---------------------------------------------------------------- curves
def ppo(episode, **more):
    return {
        "stage": "ppo",
        "step": episode // 8,
        "episode": episode,
        "objective/scores": 0.0,
        "objective/raw_scores": episode / 8,
        "objective/kl": episode / 4,
        "objective/entropy": 9.0,
        "policy/clipfrac_avg": 0.1,
        "val/explained_variance": 0.5,
        "tokens/response_length": 12.0,
        **more,
    }


def gold(episode, rate=0.5):
    verdict = {"gold/win_rate": rate, "gold/covered": 3.0, "gold/invented": 0.1}
    return dict(stage="ppo", episode=episode) | verdict


def points(log, metric="objective/kl"):
    return ppo_lines(log)[["episode", metric]].dropna().values.tolist()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_the_last_attempt_counts(lengths, data):
    # a run that is set back a few times, against a simulation that forgets what it goes back over;
    # catches: first wins, means, zigzag
    log, truth, at = [], {}, 0
    for attempt, n in enumerate(lengths):
        at = data.draw(st.integers(0, at))
        truth = {e: v for e, v in truth.items() if e <= at}
        for _ in range(n):
            at += 1
            log.append({"episode": 8 * at, "objective/kl": 100.0 * attempt + at})
            truth[at] = 100.0 * attempt + at
    assert points(log) == [[8 * e, v] for e, v in sorted(truth.items())]


def test_curves_survive_bad_lines_and_refuse_nothing():
    # catches: nan as an episode that hides all others, inf that breaks an axis, text among the
    # numbers, other stages mixed in
    metrics = [
        {"stage": "reward", "step": 5, "episode": 3, "objective/kl": 77.0},
        gold(0, 0.25),
        ppo(8),
        ppo(16, **{"objective/kl": math.inf}),
        ppo(48),
        ppo(math.nan),
        ppo(24, note="text", **{"objective/entropy": None}),
        {"stage": "ppo", "episode": "x"},
    ]
    assert points(metrics) == [[8, 2], [24, 6]]
    assert points(metrics, "objective/entropy") == [[8, 9], [16, 9]]
    assert points(metrics, "gold/win_rate") == [[0, 0.25]]
    assert not len(ppo_lines([{"stage": "sft", "step": 1, "loss": 2.0}]))


# ---------------------------------------------------------------- the report
JUDGED = dict(
    posts=2000, gold=4.0, covered=5.0, invented=0.1, malformed=0.01, stopped=0.99, length=17.0
)


def judged(*row):
    return dict(zip(("model", "temperature", "win_rate", "low", "high"), row)) | JUDGED


def write_run(folder, word=lambda text: text, updates=5):
    "A whole run folder; `word` may make its texts hostile."
    (folder / "completions").mkdir(parents=True)
    (folder / "ppo" / "rollouts").mkdir(parents=True)
    (folder / "demo.json").write_text('{"demo": "a1b2"}')
    chosen = dict(seed=3, quick=False, kl_coef=0.05, list=[1, 2]) | {word("note"): word("value")}
    (folder / "settings.json").write_text(json.dumps(chosen))
    metrics = [gold(0), *(ppo(8 * u) for u in range(1, 5)), gold(32)]
    done = [
        dict(stage=stage, event="done", seconds=s)
        for stage, s in dict(
            world=1, sft=70, pairs=2.25, reward=3, ppo=400, judge=5, sft2=1
        ).items()
    ] + [dict(stage="sft", event="done", seconds=62.0)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics + done)) + "\n")
    reward = dict(
        accuracy=0.75,
        by_kind={word("swap"): 0.8, "drop": 0.7},
        probe=0.66,
        probe_by_slot={"who": 0.9, word("when"): 0.5},
        probe_pairs={"who": 90, word("when"): 90},
    )
    verdict = [
        judged("sft", 1.0, 0.41, 0.39, 0.43),
        judged("sft", 0.01, 0.423, 0.401, 0.445),
        judged("ppo", 0.01, 0.801, 0.783, 0.818),
        judged("ppo", 1.0, 0.61, 0.59, 0.63),
    ]
    (folder / "results.json").write_text(json.dumps(dict(reward=reward, verdict=verdict)))
    for who, golds in (("sft", range(12)), ("ppo", [5] * 12)):
        put = lambda text: (
            word(text).replace("\ud800", "").replace("\x00", "")
        )  # what a CSV file can hold
        rows = [
            {
                "query": put(f"post {i // 2}"),
                "model response": put(f"{who} {i}"),
                "score": i / 4,
                "gold": g,
                "reference": put(f" ref {i // 2}"),
            }
            for i, g in enumerate(golds)
        ]
        pd.DataFrame(rows).to_csv(folder / "completions" / f"{who}.csv", index=False)
    for u in range(updates):
        make(
            (3, 5, 2, 4),
            seed=u,
            tokens=[[word("w")] * n for n in (3, 5, 2, 4)],
            prompts=[word(f"prompt {u}/{b}") for b in range(4)],
            columns={word("c"): [word("d")] * 4},
            info=dict(update=u, episode=8 * u, kl_coef=0.05),
        ).save(folder / "ppo" / "rollouts" / f"update-{u:05d}.safetensors")
    return folder


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "my run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("whole") / "my run")


def result_of(folder):
    "What stands above the rollouts of a demo, looked at as a page of its own."
    return check_page(themed_page("x", element("h1", "x"), demo_report(folder)))


def cards_of(reader):
    "The tables of completions, the best and the worst first, without the typical one."
    tables = [x for x in reader.tables if x[0] == ["From", "Summary", "Raw score", "Gold"]]
    return tables["the median gain" in reader.text :]


def test_report_has_it_all(whole):
    reader = result_of(whole)
    text = reader.text
    assert "missing" not in {a.get("class") for _, a in reader.seen}
    heads = "Did it work?/What changed/Where to look/More figures/Best and worst summary/What a summary "
    heads += "holds/Reward model/Summaries side by side"
    assert "/".join(head for level, head in reader.heads if level == 2) == heads
    assert "+38 percentage points of posts won PPO improved on SFT." in text
    assert reader.all("p")[1]["title"] == "37.8"
    assert "on 80.1 % of 2,000 test posts, SFT's on 42.3 %" in text
    assert "Sampled, temperature 1: +20 points, from 41.0 % to 61.0 %." in text
    assert text.count("Bad form: 1.0 % of PPO's summaries, 1.0 % of SFT's.") == 2
    gains, results, *after = [x for x in reader.tables if x not in cards_of(reader)]
    assert [row[1::2] for row in gains[1:]] == [
        ["42.3 %", "40.1–44.5 %"],
        ["80.1 %", "78.3–81.8 %"],
        ["41.0 %", "39.0–43.0 %"],
        ["61.0 %", "59.0–63.0 %"],
    ]
    # catches: the win rate and its interval in a second table
    assert text.count("40.1") == 1 and [row[:3] for row in results[1:]] == [
        ["SFT", "1", "4.00"],
        ["SFT", "0.01", "4.00"],
        ["PPO", "0.01", "4.00"],
        ["PPO", "1", "4.00"],
    ]
    read = [["|".join(row[:2]) for row in table[1:]] for table in after[:2]]
    assert read[0] == ["all|75.0 %", "swap|80.0 %", "drop|70.0 %"]
    assert read[1] == ["all|66.0 %", "who|90.0 %", "when|50.0 %"]


def test_report_is_the_same_each_time(run):
    # catches: dates, random ids, an order that depends on hashing
    pages = [browse(run).save_html(run / name).read_bytes() for name in ("a.html", "b.html")]
    assert pages[0] == pages[1]


def test_report_is_no_wider_open_to_hostile_text(run, tmp_path):
    # catches: one place that forgets to escape: the tags of the page must not depend on the texts
    evil = write_run(tmp_path / "<b>evil & co", lambda text: text + HOSTILE)
    reader, calm = (read_page(browse(x).save_html(tmp_path / "x.html"))[0] for x in (evil, run))
    assert skeleton(reader) == skeleton(calm)
    assert reader.text.count("<script>alert(1)</script>") > 40 and "<b>evil & co" in reader.text


PIECES = {"results.json": "No verdict yet", "completions": "No completions yet"}


@pytest.mark.parametrize("piece", PIECES)
def test_missing_pieces_are_said(run, piece):
    (run / piece).rename(run.parent / "gone")
    reader = result_of(run)
    assert PIECES[piece] in reader.text
    missing = sum(a.get("class") == "missing" for _, a in reader.seen)
    assert missing == {"results.json": 3, "completions": 2}[piece]


def test_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "demo.json").write_text("{}")
    assert len([a for _, a in result_of(tmp_path).seen if a.get("class") == "missing"]) == 4
    (tmp_path / "metrics.jsonl").write_text(
        '{"stage": "world", "event": "done", "seconds": 2}\n{"stage": "sft", "st'
    )  # killed in the middle of a line
    assert "No verdict yet" in result_of(tmp_path).text


def test_a_damaged_file_is_named(run):
    (run / "results.json").write_text('{"reward": ')
    with pytest.raises(ValueError, match=r"results\.json is damaged.*fix or remove it"):
        demo_report(run)
    (run / "results.json").unlink()
    (run / "completions" / "ppo.csv").write_text("query,model response\na,b\n")
    with pytest.raises(ValueError, match=r"csv lacks the columns \['gold', 'reference', 'score'\]"):
        demo_report(run)


@pytest.mark.parametrize(
    "sft, ppo, said",
    [
        ((0.40, 0.44), (0.45, 0.49), "PPO improved"),
        ((0.45, 0.49), (0.40, 0.44), "did worse than SFT"),
        ((0.40, 0.44), (0.43, 0.47), "Too close to call"),
        ((0.40, 0.44), (0.44, 0.48), "Too close to call"),
        ((0.1, 0.9), (0.45, 0.5), "Too close to call"),
    ],
)
def test_the_verdict(run, sft, ppo, said):
    # catches: middles compared, the other temperature, better and worse exchanged
    rows = [
        judged("ppo", 0.01, sum(ppo) / 2, *ppo),
        judged("ppo", 1.0, 0.99, 0.98, 1.0),
        judged("sft", 1.0, 0.01, 0.0, 0.02),
        judged("sft", 0.01, sum(sft) / 2, *sft),
    ]
    (run / "results.json").write_text(json.dumps(dict(verdict=rows)))
    text = result_of(run).text.split("What changed")[0]
    assert said in text and "On the same posts" not in text
    paired = [dict(temperature=t, difference=t / 10, low=-t, high=t) for t in (1.0, 0.01)]
    (run / "results.json").write_text(json.dumps(dict(verdict=rows, paired=paired)))
    text = result_of(run).text.split("What changed")[0]
    assert "95 % interval of the gain: −1.0 to +1.0" in text
    assert "That is for this one run; between training seeds" in result_of(run).text
    (run / "results.json").write_text(json.dumps(dict(verdict=rows[2:])))
    assert "No verdict yet" in result_of(run).text


def test_completions_stand_beside_the_right_post(run):
    # catches: posts sorted, joined by text alone (each query is there twice), the worst ones picked
    # upside down
    reader = result_of(run)
    best, worst, *cards = cards_of(reader)
    assert [best[3][1], worst[3][1]] == ["ppo 0", "ppo 11"]
    titles = [text for level, text in reader.heads if level == 4]
    assert titles == [f"Post {i} of 12" for i in range(1, 7)]  # 0 was the best, 11 the worst
    for title, card in zip(titles, cards):
        i = int(title.split()[1].rstrip(":"))
        assert card[1:] == [
            ["Reference", f"ref {i // 2}", "–", "–"],
            ["SFT", f"sft {i}", signed_number(i / 4), signed_number(float(i))],
            ["PPO", f"ppo {i}", signed_number(i / 4), "+5.00"],
        ]
    assert "higher than SFT's on 5, equal on 1, lower on 6" in reader.text
    pd.read_csv(run / "completions" / "ppo.csv")[:3].to_csv(
        run / "completions" / "ppo.csv", index=False
    )
    reader = result_of(run)
    cards = [table[1:] for table in cards_of(reader)]
    assert [[row[1] for row in card[1:]] for card in cards] == [
        ["sft 0", "ppo 0"],
        ["sft 2", "ppo 2"],
        ["sft 1", "ppo 1"],
        *([f"sft {i}"] for i in range(3, 8)),
    ]


def test_completions_keep_odd_texts(run):
    # catches: "NA", "" or "007" read as a gap or a number; rows of one table alone lost
    frame = pd.DataFrame(
        {
            "query": ["NA", "q", "r"],
            "model response": ["007", "", "nan"],
            "score": [1.0, 2.0, np.nan],
            "gold": [1, 2, 3],
            "reference": ["None", "null", "x"],
        }
    )
    frame.to_csv(run / "completions" / "sft.csv", index=False)
    frame[:2].iloc[::-1].to_csv(run / "completions" / "ppo.csv", index=False)
    cards = [table[1:] for table in cards_of(result_of(run))]
    assert [card[0][1] for card in cards] == ["None", "null", "x"] and [
        card[1][1:] for card in cards
    ] == [["007", "+1.00", "+1.00"], ["(nothing)", "+2.00", "+2.00"], ["nan", "–", "+3.00"]]
    assert [len(card) for card in cards] == [3, 3, 2]
    (run / "completions" / "ppo.csv").unlink()
    assert "Only one of the two models" in result_of(run).text


# catches: two meanings of “episode” in one text, a number near zero that is written as zero, a
# score that nobody knows, an answer squeezed into a column
def test_the_terminal_speaks_as_the_page_does():
    r = make((3, 5), info=dict(update=9, episode=1152))
    kl, scores = torch.zeros(2, 5), torch.tensor([-1.5, math.nan])
    kl[0, 0] = 0.001
    first, one, *_, two, asked, said = str(rollout_text(r.with_(kl=kl, scores=scores))).split(
        "\n\n"
    )
    assert first == "Update 9, after 1,152 episodes"
    assert "score −1.50" in one and "KL ≈0 nats" in one and " score" not in two.split("raw")[0]
    assert "KL 0 nats" in two and (asked, said) == ("post 1", "w0w1w2w3w4")
    assert str(rollout_text(r.with_(info={}))).startswith("Episode 0 of 2 · score")
    code = ["def f", "(", "):", "\n    ", "return", " [],", " ", "0"]
    narrow = Console(file=StringIO(), width=80)
    narrow.print(rollout_text(make((8,), 8, tokens=[code], responses=["".join(code)])))
    assert narrow.file.getvalue().endswith("def f():\n    return [], 0\n")


# catches: a result of a run that no judge has read; a page of `rlhf-nb view` that keeps quiet about a
# jump, or that there was none, or lacks one end of the run
def test_a_run_of_ones_own_has_no_result(tmp_path):
    write_run(tmp_path)
    (tmp_path / "demo.json").unlink()
    (tmp_path / "results.json").write_text("[]")  # of another tool
    for last, odd in ((9.0, ["Jump. Update 5: KL went from 1.2 to 9"]), (1.2, []), (1.3, [])):
        for file in (tmp_path / "ppo" / "rollouts").glob("*") if last == 1.3 else ():
            Rollout.load(file).with_(engine_logprobs=None).save(file)  # an alarm of both samplers
        lines = [
            {"step": u + 1, "episode": 8 * (u + 1), "objective/kl": x, "objective/raw_scores": 0.1}
            for u, x in enumerate([1.0, 1.1, 1.2, 1.3, 1.2, last])
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        view_command([str(tmp_path), "--no-browser"])
        page, data = read_page(tmp_path / "rollouts.html")
        told = [one["sentence"] for one in data["suspects"] if one["row"] is None]
        assert [x.startswith(one) for x, one in zip(told, odd, strict=True)] == [True] * len(odd), (
            told
        )
        assert data["calm"] == (last == 1.3) and data["said"] == ""
        assert [curve["name"] for curve in data["curves"]] == ["raw score", "KL"]
        shown = [one["update"] for one in data["updates"]]
        assert {min(shown), max(shown)} == {min(u := rollout_files(tmp_path)), max(u)}
        assert demo_report(tmp_path) == "" and not page.all("img")
