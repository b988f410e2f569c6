"""The kit of the views: assets that are shipped, text that cannot become markup, controls that name
themselves."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import ipywidgets as widgets
import pytest

from rlhf_nb.ui.explore import action_button, notebook_bundle, side_by_side
from rlhf_nb.ui.html import (
    STATIC,
    asset,
    breakable,
    data_table,
    duration,
    error_note,
    safe_text,
    section_page,
)
from rlhf_nb.ui.loop import STEPS, loop_picture
from rlhf_nb.ui.viz import Html

HOSTILE = "</script><script>alert(1)</script>\u202e"


# catches: an asset that the code names and nobody ships, or one that nobody uses
def test_every_asset_is_used_and_every_used_one_is_there():
    package = STATIC.parent.parent
    code = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    named = set(re.findall(r"""(?:asset|script_page)\(\s*["']([\w.-]+)["']""", code))
    named |= set(re.findall(r"""["']([\w-]+\.(?:css|js))["']""", code))  # lists of them, too
    assert named == {path.name for path in STATIC.iterdir()}
    assert '"ui/static/*"' in (package.parent / "setup.py").read_text(encoding="utf-8")


def test_an_asset_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match=r"no asset 'reader\.ccs'.*reader\.css"):
        asset("reader.ccs")


# catches: text that becomes markup in a cell, a title, an error or the data of a script
@pytest.mark.parametrize(
    "markup",
    [
        safe_text(HOSTILE),
        error_note(ValueError(HOSTILE)),
        data_table(HOSTILE, [HOSTILE], [[HOSTILE, HOSTILE]]),
        section_page(HOSTILE, HOSTILE, {HOSTILE: "", f"2{HOSTILE}": ""}),
    ],
)
def test_text_stays_text(markup):
    assert "<script" not in markup and "</script" not in markup


def test_html_goes_into_a_table_as_it_is_and_none_is_a_dash():
    table = data_table("", ["a", "b"], [["x", Html("<i>y</i>")], ["z", None]])
    assert "<i>y</i>" in table and "–" in table and 'scope="row"' in table


# catches: an entity or a tag that a break splits
def test_long_words_break_between_characters():
    word = "&amp;" * 40
    broken = breakable(f"<p>{word} short</p>")
    assert broken.replace("<wbr>", "") == f"<p>{word} short</p>" and broken.count("<wbr>") == 1
    assert re.fullmatch(r"<p>(&amp;|<wbr>)+ short</p>", broken)


@pytest.mark.parametrize(
    "seconds, text", [(5.2, "5.2 s"), (59.94, "1 min 0 s"), (119.9, "2 min 0 s"), (0, "0.0 s")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_controls_have_names_and_a_line_wraps():
    pressed = []
    button = action_button("go", lambda: pressed.append(1), "to the next one")
    find = widgets.Text("x", description="find")
    button.click()
    line = side_by_side(button, find)
    assert pressed == [1] and button.tooltip == "to the next one" and find.description == "find"
    assert line.children == (button, find) and "wrap" in line.layout.flex_flow
    bundle = notebook_bundle(line, "<p>html</p>", "text")
    assert bundle["text/html"] == "<p>html</p>" and bundle["text/plain"] == "text"
    assert "application/vnd.jupyter.widget-view+json" in bundle


# ---- The picture of the loop; its texts and colours: tests/browser/test_static.py ----


def elements(picture, kind):
    "Every element of a kind, with the classes of the group that it is in."
    for part in ElementTree.fromstring(picture).iter():
        for child in part:
            if child.tag.endswith(f"}}{kind}"):
                yield child, part.get("class", "").split()


def edges(box):
    "Left, top, right, bottom."
    x, y, w, h = (float(box.get(name)) for name in ("x", "y", "width", "height"))
    return x, y, x + w, y + h


def overlap(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def on_edge(point, box):
    (x, y), (left, top, right, bottom) = point, box
    within = left <= x <= right and top <= y <= bottom
    return within and (x in (left, right) or y in (top, bottom))


def boxes(picture):
    return [edges(rect) for rect, _ in elements(picture, "rect") if "box" in rect.get("class")]


# catches: boxes that cover one another, an arrow that runs through a box or ends nowhere
@pytest.mark.parametrize("step", [None, "gae"])
def test_boxes_of_the_loop_do_not_overlap_and_arrows_run_between_them(step):
    picture = loop_picture(step)
    for one, other in combinations(boxes(picture), 2):
        assert not overlap(one, other)
    arrows = [line.get("points") for line, _ in elements(picture, "polyline")]
    heads = [head.get("points").split()[0] for head, _ in elements(picture, "polygon")]
    assert len(arrows) == len(heads) >= 10
    for points, head in zip(arrows, heads, strict=True):
        path = [tuple(map(float, point.split(","))) for point in [*points.split(), head]]
        for (x0, y0), (x1, y1) in pairwise(path):
            assert x0 == x1 or y0 == y1
            line = min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)
            assert not any(overlap(line, box) for box in boxes(picture))
        touched = [any(on_edge(end, box) for box in boxes(picture)) for end in (path[0], path[-1])]
        assert touched == [True, True]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_strip_marks_its_step_and_says_so(step):
    picture = loop_picture(step.name)
    assert picture == loop_picture(step.page) == loop_picture(step.page[3:])
    root = ElementTree.fromstring(picture)
    assert [
        "".join(text.itertext())
        for text, kinds in elements(picture, "text")
        if "marked" in kinds and text.get("class") == "title"
    ] == [step.title] and float(root.get("height")) <= 110
    assert root.get("role") == "img" and f"This page: {step.title}" in root.get("aria-label")
    assert repr(picture) == root.get("aria-label") and picture._repr_svg_() == picture
    titles = [
        "".join(t.itertext()) for t, _ in elements(picture, "text") if t.get("class") == "title"
    ]
    assert sorted(titles) == sorted(other.title for other in STEPS)


def test_the_large_picture_has_every_step_and_no_mark():
    picture = loop_picture()
    text = " ".join("".join(text.itertext()) for text, _ in elements(picture, "text"))
    assert all(step.title in text and step.number in text for step in STEPS)
    assert all(tag.get("fill") for tag, _ in elements(picture, "rect"))  # without style sheets, too
    assert "marked" not in re.sub(r"<style>.*?</style>", "", picture, flags=re.S)
    label = ElementTree.fromstring(picture).get("aria-label")
    assert all(word in label for word in ("SFT", "rollout", "KL", "GAE", "judge"))


def test_a_step_that_is_not_in_the_loop_is_named():
    with pytest.raises(ValueError, match="no step 'critic'.*masks, prompts.*evaluate"):
        loop_picture("critic")


# catches: a page that was renumbered while the picture kept its old number
def test_the_steps_are_the_pages_of_the_course():
    pages = {path.stem for path in (STATIC.parents[2] / "nbs" / "course").glob("[0-9]*.ipynb")}
    about_the_whole = {"00_tour", "01_policy_gradients", "15_turns"}
    assert pages - about_the_whole <= {step.page for step in STEPS}
