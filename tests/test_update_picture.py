"The pictures of an update: their boxes are the record's fields, the order of the rows, and the parts."

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import fields

from rlhf_nb import ppo
from rlhf_nb.ppo import mini_batches
from rlhf_nb.rollout import Rollout
from rlhf_nb.ui.loop import PHASES, parts_picture, record_picture, steps_picture


def texts(picture):
    return [e.text for e in ElementTree.fromstring(picture).iter() if e.tag.endswith("text")]


def boxes(picture, kind):
    root = ElementTree.fromstring(picture)
    return [float(e.get("width")) for e in root.iter() if e.get("class") == f"box {kind}".strip()]


def test_the_record_is_filled_as_in_the_package():
    "catches: a function or a field that was renamed and stayed in the picture"
    names = {field.name for field in fields(Rollout)}
    for name, _, _ in PHASES[1:]:
        assert hasattr(ppo, name)
    for _, made, _ in PHASES[:3]:
        assert set(re.findall(r"\w+", " ".join(made))) <= names
    drawn = texts(record_picture())
    assert {"final_scores", "with_advantages", "mini_batches", "ppo_loss"} <= set(drawn)


def test_steps_show_every_row_once_in_each_epoch():
    order = [rows.tolist() for rows in mini_batches(7, epochs=3, parts=2, seed=1)]
    drawn = texts(steps_picture(order, parts=2, rows=3))
    numbers = [int(text) for text in drawn if text.isdigit()]
    assert numbers == [row for step in order for row in step]
    assert [text for text in drawn if text.startswith("step")] == [f"step {i}" for i in range(1, 7)]
    # 7 rows: mini-batches of 4 and 3, so micro-batches of 3 + 1 and 3, in each of three epochs
    assert len(boxes(steps_picture(order, parts=2, rows=3), "trained")) == 3 * 3


def test_parts_are_as_wide_as_their_longest_row():
    picture = parts_picture([9, 3, 8, 4, 9, 2], [[5, 1, 3], [2, 0], [4]])
    assert repr(picture) == "one rectangle: 54 cells for 35 tokens; 3 parts: 39 cells."
    unit = max(boxes(picture, "frozen")) / 9
    wide = [round(width / unit) for width in boxes(picture, "frozen")]
    assert wide == [9] * 6 + [4, 4, 4, 9, 9, 9]
    real = [round(width / unit) for width in boxes(picture, "trained")]
    assert real == [9, 3, 8, 4, 9, 2, 2, 3, 4, 8, 9, 9]
