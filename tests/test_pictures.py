"""Pictures of the pages: what is drawn is what the functions compute, and text stays text."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import fields

import pytest
import torch
from matplotlib import pyplot as plt
from notebooks import NOTEBOOKS

from rlhf_nb import ppo
from rlhf_nb.gae import gae, td_errors
from rlhf_nb.kl import k3
from rlhf_nb.losses import policy_loss
from rlhf_nb.masks import left_pad, right_pad
from rlhf_nb.rollout import Rollout
from rlhf_nb.ui.loop import WIDTH, parts_picture
from rlhf_nb.ui.pictures import (
    batch_picture,
    bells,
    choice_picture,
    clip_picture,
    gae_picture,
    kl_picture,
    loss_of,
    map_grid,
    push_map,
    reading_picture,
    shares,
)
from rlhf_nb.ui.viz import signed_number

# ---- Pictures of tokens in columns: what is drawn is what the functions of the pages do ----


PROMPTS, RESPONSES = [["the", "cat"], ["why", "did", "it", "stop"]], [["sat", "STOP"], ["it", "<"]]
PICTURES = [
    batch_picture(PROMPTS, RESPONSES),
    choice_picture(["", "the", "cat"], ["sat", "down", "STOP"]),
    reading_picture(["where", "?"], ["on", "the", "mat"]),
]


def drawn(picture, kind):
    "Elements of a class, wherever they are; parsing fails on markup that is broken."
    root = ElementTree.fromstring(picture)
    return [element for element in root.iter() if element.get("class", "").startswith(kind)]


def sequence_texts(picture, kind):
    return ["".join(e.itertext()) for e in drawn(picture, kind) if e.tag.endswith("}text")]


# catches: a picture whose padding is on another side than that of left_pad and right_pad
def test_the_mask_in_the_picture_is_the_mask():
    left = left_pad([[1] * len(p) for p in PROMPTS], 0)[1]
    right = right_pad([[1] * len(r) for r in RESPONSES], 0)[1]
    notes = [text for text in sequence_texts(PICTURES[0], "note") if text in ("true", "false")]
    wanted = [x for p, r in zip(left.tolist(), right.tolist()) for x in p + r]
    assert [text == "true" for text in notes] == wanted


# catches: an arrow to the column's own token, and a column too many or too few
def test_each_response_token_is_chosen_once():
    shown = [x for x in sequence_texts(PICTURES[1], "token") if x in ("sat", "down", "STOP")]
    assert sorted(shown) == sorted(["sat", "down", "STOP"] * 2)
    assert "Columns 2 to 4" in PICTURES[1]
    assert sequence_texts(PICTURES[1], "note").count("nothing") == 1
    # values and log-probs one column before their tokens, the score once, at the last one
    boxes = drawn(PICTURES[2], "box trained")
    columns = sorted({float(e.get("x")) for e in boxes})
    places = {x: sum(float(e.get("x")) == x for e in boxes) for x in columns}
    assert list(places.values()) == [2, 2, 2, 1]


@pytest.mark.parametrize("picture", PICTURES, ids=["batch", "choice", "reading"])
def test_boxes_are_on_the_sheet_and_apart(picture):
    boxes = [
        (float(e.get("x")), float(e.get("y")), float(e.get("width")), float(e.get("height")))
        for e in ElementTree.fromstring(picture).iter()
        if e.tag.endswith("}rect") and e.get("class") != "card"
    ]
    assert all(x > 0 and x + w < WIDTH for x, _, w, _ in boxes)
    for i, (x, y, w, h) in enumerate(boxes):
        for a, b, c, d in boxes[:i]:
            assert x >= a + c or a >= x + w or y >= b + d or b >= y + h
    assert "aria-label" in picture and repr(picture)


# ---- The pictures of the pages on KL and shaping: their figures are those of the formulas ----


# catches: bias and noise of another sample size, or of another KL than the exact one
@pytest.mark.parametrize("drift, tokens", [(1.0, 16), (2.0, 4)])
def test_bias_and_noise_are_exact(drift, tokens):
    logp, logq, kl = bells(drift)
    assert kl == pytest.approx(drift**2 / 2)
    x = k3(logp, logq)
    mean = (logp.exp() * x).sum()
    noise = (logp.exp() * (x - mean).square()).sum().sqrt() / tokens**0.5
    told = repr(kl_picture(drift=drift, tokens=tokens))
    assert f"k1: bias 0.00, noise {drift / tokens**0.5:.2f}" in told
    assert f"k2: bias {drift**4 / 8:.2f}" in told and f"k3: bias 0.00, noise {noise:.2f}" in told


def test_a_seed_changes_the_tokens_and_a_temperature_the_kl():
    assert kl_picture(seed=0) == kl_picture(seed=0) != kl_picture(seed=1)
    assert "exact KL 0.250" in kl_picture(temperature=2.0)


# ---- The picture of GAE: what it draws is what the page computes ----


GAE_TOKENS = ["cat", "barked", "loudly", "STOP"]
REWARDS, VALUES = torch.tensor([[0.0, 0.0, -0.25, 1.0]]), torch.tensor([[0.5, 0.75, 0.25, 0.5]])
MASK = torch.ones(1, 4, dtype=torch.bool)


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.5), (0.5, 1.0), (0.9, 0.0), (1.0, 1.0)])
def test_the_terms_add_up_to_the_advantages(gamma, lam):
    deltas = td_errors(REWARDS, VALUES, MASK, gamma)[0].tolist()
    sums = [sum(terms) for terms in shares(deltas, gamma * lam)]
    assert sums == pytest.approx(gae(REWARDS, VALUES, MASK, gamma, lam)[0].tolist())
    assert [
        element.text for element in drawn(gae_picture(GAE_TOKENS, deltas, lam, gamma), "number")
    ] == [signed_number(x) for pair in zip(deltas, sums) for x in pair]


def test_arcs_fade_with_distance_and_are_as_wide_as_the_surprise():
    arcs = drawn(gae_picture(GAE_TOKENS, [0.25, -0.5, 0.0, 0.5], lam=0.5), "from-")
    assert len(arcs) == 1 + 2 + 0 + 4  # a surprise of 0 passes nothing on
    assert sorted({float(arc.get("opacity")) for arc in arcs}) == [0.125, 0.25, 0.5, 1.0]
    widths = {arc.get("class"): set() for arc in arcs}
    for arc in arcs:
        widths[arc.get("class")].add(float(arc.get("stroke-width")))
    assert widths == {"from-up": {4.5, 7.5}, "from-down": {7.5}}


# catches: bars of delta and A on different scales, or a negative one that points upwards
def test_bars_are_as_high_as_their_numbers():
    picture = gae_picture(["a", "b"], [1.0, -0.5], lam=0.0)
    bars = [(b.get("class"), float(b.get("height"))) for b in drawn(picture, ("up", "down"))]
    (_, high), _, (_, low), _ = bars
    assert bars == [("up", high), ("up", high), ("down", low), ("down", low)]
    assert high == pytest.approx(2 * low)
    up, _, down, _ = drawn(picture, ("up", "down"))
    assert float(up.get("y")) + high == pytest.approx(float(down.get("y")))  # the line of zero


# catches: a token that breaks the markup, a scale divided by 0
def test_any_token_and_any_number_can_be_drawn():
    drawn(gae_picture(["<b>&", "\n"], [0.0, 0.0]), "up")
    assert "⟨" not in gae_picture(["x"], [1e-9])
    assert not re.search("nan|inf", repr(gae_picture(["x"], [0.0])))
    with pytest.raises(ValueError, match="1 tokens and 2 surprises"):
        gae_picture(["x"], [0.0, 1.0])


# ---- The pictures of the clipped loss: what they draw is what `policy_loss` computes ----


CLIPS = [
    dict(cliprange=0.2),
    dict(cliprange=0.1, cliprange_high=0.28),
    dict(cliprange=0.2, dual_clip=3.0),
]


# catches: a picture that shows another loss than the package has
@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.3, 0.85, 1.0, 1.15, 1.25, 4.0])
def test_the_line_is_the_loss(ratio, advantage, clips):
    one = torch.ones(1, 1)
    loss = policy_loss((ratio * one).log(), 0 * one, advantage * one, one.bool(), **clips)
    assert loss_of(ratio, advantage, **clips) == pytest.approx(loss.item(), rel=1e-5)


def flat_bands(picture):
    "Start and width of each band without a gradient, in units of the ratio."
    return [(float(e.get("x")), float(e.get("width"))) for e in drawn(picture, "flat")]


def test_bands_are_where_the_gradient_is_zero():
    good, bad = flat_bands(clip_picture(cliprange=0.2, up_to=2))
    unit = (400 - 60) / 2
    assert good == pytest.approx((50 + 1.2 * unit, 0.8 * unit), abs=0.1)
    assert bad == pytest.approx((450, 0.8 * unit), abs=0.1)
    assert len(flat_bands(clip_picture(dual_clip=3.0, up_to=5))) == 3
    assert len(flat_bands(clip_picture(dual_clip=3.0, up_to=2))) == 2  # beyond what is shown
    assert "none below 0.7" in repr(clip_picture(cliprange=0.3))


def test_the_map_tells_tokens_that_move_from_the_others():
    across, upward = map_grid()
    assert across.shape == upward.shape == (60, 80)
    assert 0 < across.min() < across.max() < 2 and -3 < upward.min() < upward.max() < 3
    ratio, advantages = torch.tensor([0.5, 9.0]), torch.tensor([1.0, 1.0])
    figure = push_map(0 * across, ratio, advantages, torch.tensor([True, False]))
    dots, crosses = figure.axes[0].collections[-2:]
    assert dots.get_offsets().tolist() == [[0.5, 1.0]]
    assert crosses.get_offsets().tolist() == [[2.0, 1.0]]  # at the edge
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == [
        "moves",
        "no gradient",
    ]
    plt.close(figure)


# ---- An update: boxes are the fields of the record, the order of the rows, and their parts ----


def boxes(picture, kind):
    return [float(e.get("width")) for e in drawn(picture, f"box {kind}")]


# catches: a function or a field that was renamed and stayed in the table of the page
def test_the_record_is_filled_as_in_the_package():
    cells = json.loads(NOTEBOOKS["12_ppo"].read_text(encoding="utf-8"))["cells"]
    (table,) = [t for c in cells if "| what it adds to the record |" in (t := "".join(c["source"]))]
    named = set(re.findall(r"`(\w+)`", table))
    assert len(named) == 15 and named <= {field.name for field in fields(Rollout)} | {*vars(ppo)}


def test_parts_are_as_wide_as_their_longest_row():
    picture = parts_picture([9, 3, 8, 4, 9, 2], [[5, 1, 3], [2, 0], [4]])
    assert repr(picture) == "one rectangle: 54 cells for 35 tokens; 3 parts: 39 cells."
    unit = max(boxes(picture, "frozen")) / 9
    wide = [round(width / unit) for width in boxes(picture, "frozen")]
    assert wide == [9] * 6 + [4, 4, 4, 9, 9, 9]
    real = [round(width / unit) for width in boxes(picture, "trained")]
    assert real == [9, 3, 8, 4, 9, 2, 2, 3, 4, 8, 9, 9]
