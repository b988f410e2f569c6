"The pictures of the pages on KL and shaping: their figures are those of the formulas."

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import tensor

from rlhf_nb.kl import k3
from rlhf_nb.ui.pictures import bells, kl_picture, prices_picture, tree_picture

TOKENS = ["cat", "<b>", "&", "STOP"]


def prices():
    return prices_picture(TOKENS, tensor([0.5, -0.25, 0.0, 0.25]), score=2.0, kl_coef=0.2)


# catches: markup that a browser does not parse, numbers that are nan, a picture without words
@pytest.mark.parametrize(
    "picture",
    [
        kl_picture(),
        kl_picture(drift=0.0),
        kl_picture(drift=2.5, temperature=0.5, tokens=1, seed=3),
        kl_picture(tokens=256),
        tree_picture(),
        tree_picture((0.0, 0.0)),
        prices(),
    ],
)
def test_is_a_drawing_with_its_words(picture):
    root = ElementTree.fromstring(picture)
    assert root.get("role") == "img" and len(root.get("aria-label")) > 40
    assert repr(picture) == str(root.get("aria-label")).replace("&", "&amp;").replace(
        "<", "&lt;"
    ).replace(">", "&gt;")
    numbers = [
        float(x) for e in root.iter() for x in re.findall(r"-?\d+\.?\d*", e.get("points", ""))
    ]
    assert all(-1 <= x <= 801 for x in numbers) and "nan" not in picture


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


def test_rewards_are_prices_and_one_score():
    assert "cat −0.10, &lt;b&gt; +0.05, &amp; 0, STOP +1.95" in repr(prices())
    with pytest.raises(ValueError, match="zip"):
        prices_picture(TOKENS, torch.zeros(3), 1.0, 0.1)
