"""The kit of the views: assets that are shipped, text that cannot become markup, controls that name
themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ipywidgets as widgets
import pytest

from rlhf_nb.explore import ChoiceSlider
from rlhf_nb.ui.assets import STATIC, asset
from rlhf_nb.ui.controls import (
    action_button,
    labelled_control,
    notebook_bundle,
    restart_list,
    side_by_side,
    step_through,
)
from rlhf_nb.ui.html import (
    breakable,
    data_table,
    duration,
    error_note,
    safe_text,
    script_page,
    section_page,
)
from rlhf_nb.viz import Html

HOSTILE = "</script><script>alert(1)</script>\u202e"


# catches: an asset that the code names and nobody ships, or one that nobody uses
def test_every_asset_is_used_and_every_used_one_is_there():
    package = STATIC.parent.parent
    code = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    named = set(re.findall(r'(?:asset|script_page)\(\s*"([\w.-]+)"', code))
    assert named == {path.name for path in STATIC.iterdir()}
    setup = (package.parent / "setup.py").read_text(encoding="utf-8")
    assert '"ui/static/*"' in setup


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


def test_data_cannot_end_their_script():
    page = script_page("pairs.html", "1;", dict(text=HOSTILE), summary="", plain="")
    assert page.count("</script") == 2
    data = re.search(r'id="data">(.*?)</script>', page, re.S)[1]
    assert json.loads(data) == dict(text=HOSTILE)


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


def test_a_list_is_stepped_through_and_started_again():
    place = widgets.IntSlider(min=1, max=3, value=3)
    step_through(place, 1)
    assert place.value == 1
    step_through(place, -1)
    assert place.value == 3
    restart_list(place, 0)
    assert (place.value, place.max) == (1, 1)


def test_controls_have_names_and_a_line_wraps():
    pressed = []
    button = action_button("go", lambda: pressed.append(1), "to the next one")
    find = labelled_control(widgets.Text, "find", "x")
    button.click()
    line = side_by_side(button, find)
    assert pressed == [1] and button.tooltip == "to the next one" and find.description == "find"
    assert line.children == (button, find) and "wrap" in line.layout.flex_flow
    bundle = notebook_bundle(line, "<p>html</p>", "text")
    assert bundle["text/html"] == "<p>html</p>" and bundle["text/plain"] == "text"
    assert "application/vnd.jupyter.widget-view+json" in bundle


# catches: a slider that shows the texts of a list that it no longer has
@pytest.mark.parametrize(
    "options, texts",
    [([3, 5], ("3", "5")), ([("low", 1), ("high", 2)], ("low", "high")), ({"a": 1}, ("a",))],
)
def test_the_texts_of_a_choice_slider_follow_its_options(options, texts):
    slider = ChoiceSlider(options=["one", "two", "three"], description="n")
    assert slider.choices == ("one", "two", "three")
    slider.options = options
    assert slider.choices == texts
    assert "choices" in slider.keys and Path(STATIC, "slider.js").read_text().count("choices") > 2
