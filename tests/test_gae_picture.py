"The picture of GAE: what it draws is what the page computes."

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from rlhf_nb.gae import gae, td_errors
from rlhf_nb.ui.pictures import gae_picture, shares
from rlhf_nb.ui.viz import signed

TOKENS = ["cat", "barked", "loudly", "STOP"]
REWARDS, VALUES = torch.tensor([[0.0, 0.0, -0.25, 1.0]]), torch.tensor([[0.5, 0.75, 0.25, 0.5]])
MASK = torch.ones(1, 4, dtype=torch.bool)


def drawn(picture, kind):
    "Elements of a class, wherever they are; parsing fails on markup that is broken."
    return [
        element
        for element in ElementTree.fromstring(picture).iter()
        if element.get("class", "").startswith(kind)
    ]


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.5), (0.5, 1.0), (0.9, 0.0), (1.0, 1.0)])
def test_the_terms_add_up_to_the_advantages(gamma, lam):
    "catches: a share of the wrong distance, or one that goes to later tokens"
    deltas = td_errors(REWARDS, VALUES, MASK, gamma)[0].tolist()
    sums = [sum(terms) for terms in shares(deltas, gamma * lam)]
    assert sums == pytest.approx(gae(REWARDS, VALUES, MASK, gamma, lam)[0].tolist())
    numbers = [element.text for element in drawn(gae_picture(TOKENS, deltas, lam, gamma), "number")]
    assert numbers == [signed(x) for pair in zip(deltas, sums) for x in pair]


def test_arcs_fade_with_distance_and_are_as_wide_as_the_surprise():
    arcs = drawn(gae_picture(TOKENS, [0.25, -0.5, 0.0, 0.5], lam=0.5), "from-")
    assert len(arcs) == 1 + 2 + 0 + 4  # a surprise of 0 passes nothing on
    faint = sorted({float(arc.get("opacity")) for arc in arcs})
    assert faint == [0.125, 0.25, 0.5, 1.0]
    widths = {arc.get("class"): set() for arc in arcs}
    for arc in arcs:
        widths[arc.get("class")].add(float(arc.get("stroke-width")))
    assert widths == {"from-up": {4.5, 7.5}, "from-down": {7.5}}


def test_bars_are_as_high_as_their_numbers():
    "catches: bars of delta and A on different scales, or a negative one that points upwards"
    picture = gae_picture(["a", "b"], [1.0, -0.5], lam=0.0)
    bars = [(b.get("class"), float(b.get("height"))) for b in drawn(picture, ("up", "down"))]
    (_, high), _, (_, low), _ = bars
    assert bars == [("up", high), ("up", high), ("down", low), ("down", low)]
    assert high == pytest.approx(2 * low)
    up, _, down, _ = drawn(picture, ("up", "down"))
    assert float(up.get("y")) + high == pytest.approx(float(down.get("y")))  # the line of zero


def test_several_lambdas_are_panels_side_by_side():
    picture = gae_picture(TOKENS, [0.25, -0.5, 0.0, 0.5], lam=[0, 0.95, 1])
    titles = [element.text for element in drawn(picture, "title")]
    assert [title for title in titles if "λ" in title] == ["λ = 0", "λ = 0.95", "λ = 1"]
    assert "lambda 1: +0.25 0 +0.50 +0.50" in repr(picture)  # what a terminal and a reader get


def test_any_token_and_any_number_can_be_drawn():
    "catches: a token that breaks the markup, a scale divided by 0"
    drawn(gae_picture(["<b>&", "\n"], [0.0, 0.0]), "up")
    assert "⟨" not in gae_picture(["x"], [1e-9]) and not re.search(
        "nan|inf", repr(gae_picture(["x"], [0.0]))
    )
    with pytest.raises(ValueError, match="1 tokens and 2 surprises"):
        gae_picture(["x"], [0.0, 1.0])
