"""Pictures of tokens in columns: what is drawn is what the functions of the pages do."""

from xml.etree import ElementTree

import pytest

from rlhf_nb.masks import left_pad, right_pad
from rlhf_nb.ui.loop import WIDTH
from rlhf_nb.ui.pictures import batch_picture, choice_picture, reading_picture

PROMPTS, RESPONSES = [["the", "cat"], ["why", "did", "it", "stop"]], [["sat", "STOP"], ["it", "<"]]
PICTURES = [
    batch_picture(PROMPTS, RESPONSES),
    choice_picture(["", "the", "cat"], ["sat", "down", "STOP"]),
    reading_picture(["where", "?"], ["on", "the", "mat"]),
]


def texts(picture, kind):
    root = ElementTree.fromstring(picture)
    found = [e for e in root.iter() if e.tag.endswith("}text") and e.get("class") == kind]
    return ["".join(e.itertext()) for e in found]


# catches: a picture whose padding is on another side than that of left_pad and right_pad
def test_the_mask_in_the_picture_is_the_mask():
    left = left_pad([[1] * len(p) for p in PROMPTS], 0)[1]
    right = right_pad([[1] * len(r) for r in RESPONSES], 0)[1]
    drawn = [text == "true" for text in texts(PICTURES[0], "note") if text in ("true", "false")]
    assert drawn == [x for p, r in zip(left.tolist(), right.tolist()) for x in p + r]


# catches: an arrow to the column's own token, and a column too many or too few
def test_each_response_token_is_chosen_once():
    shown = [text for text in texts(PICTURES[1], "token") if text in ("sat", "down", "STOP")]
    assert sorted(shown) == sorted(["sat", "down", "STOP"] * 2)
    assert "Columns 2 to 4" in PICTURES[1] and texts(PICTURES[1], "note").count("nothing") == 1
    # values and log-probs one column before their tokens, the score once, at the last one
    boxes = [
        e for e in ElementTree.fromstring(PICTURES[2]).iter() if e.get("class") == "box trained"
    ]
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
