"The pictures of the clipped loss: what they draw is what `policy_loss` computes."

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from matplotlib import pyplot as plt

from rlhf_nb.losses import policy_loss
from rlhf_nb.ui.pictures import clip_picture, loss_of, map_grid, push_map

CLIPS = [
    dict(cliprange=0.2),
    dict(cliprange=0.1, cliprange_high=0.28),
    dict(cliprange=0.2, dual_clip=3.0),
]


@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.3, 0.85, 1.0, 1.15, 1.25, 4.0])
def test_the_line_is_the_loss(ratio, advantage, clips):
    "catches: a picture that shows another loss than the package has"
    one = torch.ones(1, 1)
    loss = policy_loss((ratio * one).log(), 0 * one, advantage * one, one.bool(), **clips)
    assert loss_of(ratio, advantage, **clips) == pytest.approx(loss.item(), rel=1e-5)


def flat_bands(picture):
    "Start and width of each band without a gradient, in units of the ratio."
    root = ElementTree.fromstring(picture)
    found = [e for e in root.iter() if e.get("class") == "flat"]
    return [(float(e.get("x")), float(e.get("width"))) for e in found]


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
