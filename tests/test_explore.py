"""The explorers: what a control becomes, what a view becomes, and that moving the one redraws the
other and never in silence."""

from __future__ import annotations

import json
from urllib.parse import unquote
from xml.etree import ElementTree

import ipywidgets as widgets
import pytest
from markup import Reader
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from rlhf_nb.ui.explore import Explorer, control, dial, markup, pack, thin_dials

NASTY = '"><script>alert(1)</script>&'
SVG = "{http://www.w3.org/2000/svg}"
WIDGET = "application/vnd.jupyter.widget-view+json"


def line() -> Figure:
    figure, axis = plt.subplots(figsize=(2, 1))
    axis.plot([0, 1])
    return figure


# ---- Controls ----


# catches: start and bound exchanged; a step of 1 between 0.0 and 1.0; a slider of whole numbers
# where one bound is a fraction
@pytest.mark.parametrize(
    "spec, kind, value, low, high, step",
    [
        ((0, 10, 3), widgets.IntSlider, 3, 0, 10, 1),
        ((0, 10, 4, 2), widgets.IntSlider, 4, 0, 10, 2),
        ((-5, 5, 0), widgets.IntSlider, 0, -5, 5, 1),
        ((0.0, 1.0, 0.25), widgets.FloatSlider, 0.25, 0, 1, 0.01),
        ((0, 1, 0.5), widgets.FloatSlider, 0.5, 0, 1, 0.01),
        ((0.0, 2.0, 0.5, 0.5), widgets.FloatSlider, 0.5, 0, 2, 0.5),
        ((0, 10, 4, 0.5), widgets.FloatSlider, 4, 0, 10, 0.5),
    ],
)
def test_two_bounds_make_a_slider(spec, kind, value, low, high, step):
    made = control("kl_coef", spec)
    assert isinstance(made, kind) and (made.value, made.min, made.max) == (value, low, high)
    assert made.step == pytest.approx(step) and made.description == "kl coef"
    assert (
        made.continuous_update is False
    )  # a picture is drawn when the hand lets go, not at every pixel


# catches: a dict shown by its values or handing over its labels; a start other than the first; True
# taken for the number 1; an underscore that a screen reader reads out
def test_choices_make_buttons():
    listed = control("estimator", ["k1", "k2"])
    named = control("dual_clip", {"off": 0.0, "three": 3.0})
    # a native menu cannot be moved by the keyboard in JupyterLab
    assert type(listed) is type(named) is widgets.ToggleButtons
    assert listed.options == ("k1", "k2") and listed.value == "k1"
    assert named.label == "off" and named.value == 0.0
    named.label = "three"
    assert named.value == 3.0 and named.description == "dual clip"
    for value in (True, False):
        made = control("whiten", value)
        assert type(made) is widgets.Checkbox and made.value is value


TOO_FEW_OR_MANY = [(1, 2), (1,), (), (0, 1, 2, 3, 4), [], {}]
OF_NO_KIND = [("a", "b", "c"), (0, 1, None), "abc", None, 3, 0.5, {1, 2, 3}]


@pytest.mark.parametrize("spec", TOO_FEW_OR_MANY + OF_NO_KIND, ids=repr)
def test_no_control(spec):
    with pytest.raises(ValueError, match=r"seed is .*give \(low, high, start\)"):
        control("seed", spec)


# ---- Views ----


# catches: a figure that stays open and is drawn a second time by the notebook; an image in a file;
# memory that grows with each redraw
def test_a_figure_becomes_an_image_and_is_closed():
    before, figure = plt.get_fignums(), line()
    (image,) = Reader(markup(figure, "a line that rises")).all("img")
    assert plt.get_fignums() == before
    kind, drawing = image["src"].split(",", 1)
    assert image["alt"] == "a line that rises" and kind == "data:image/svg+xml"
    paths = [one.get("d") for one in ElementTree.fromstring(unquote(drawing)).iter(f"{SVG}path")]
    assert len(paths) > 5 and "#" not in drawing  # something was drawn; nothing ends the address


# catches: a date or a random name in an image, which makes every run of a page another file
def test_the_same_figure_is_the_same_text():
    assert markup(line(), "a line") == markup(line(), "a line")


# ---- Explorers ----


@pytest.fixture
def framed():
    "An explorer in a frame, and the states that its render was called with."
    calls = []

    def render(**state):
        calls.append(state)
        return f"<p>{state['steps']} {state['kind']} {state['on']}</p>"

    explorer = Explorer(
        render,
        title="Steps & kinds",
        question="How <far>?",
        presets={"far": dict(steps=9), "other": dict(kind="k2", on=False), "none": dict(steps=0)},
        steps=(0, 9, 4),
        kind=["k1", "k2"],
        on=True,
    )
    return explorer, calls


def test_moving_a_control_redraws(framed):
    "catches: a control that nobody watches; a view one step behind; a redraw without a change"
    explorer, calls = framed
    assert calls == [dict(steps=4, kind="k1", on=True)] == [explorer.state()]
    assert explorer.view.value == "<p>4 k1 True</p>"
    assert list(explorer.controls) == ["steps", "kind", "on"]
    for name, value in dict(steps=7, kind="k2", on=False).items():
        explorer.controls[name].value = value
        assert calls[-1][name] == value == explorer.state()[name]
    assert calls[-1] == dict(steps=7, kind="k2", on=False)
    assert explorer.view.value == "<p>7 k2 False</p>" and len(calls) == 4
    explorer.controls["steps"].value = 7
    explorer.controls["steps"].description = "another word"
    assert len(calls) == 4


def test_a_figure_carries_its_sentence():
    explorer = Explorer(lambda x: line(), alt=NASTY, x=(0, 9, 1))
    before = plt.get_fignums()
    for value in (2, 3, 4):
        explorer.controls["x"].value = value
    assert Reader(explorer.view.value).all("img")[0]["alt"] == NASTY and plt.get_fignums() == before


# catches: the old picture left standing; an error swallowed, so that a broken page passes its test;
# markup in a message
def test_an_error_shows_and_is_raised():
    def render(x):
        if x == 3:
            raise ValueError(NASTY)
        return f"<p>{x}</p>"

    explorer = Explorer(render, x=(0, 9, 1))
    with pytest.raises(ValueError):
        explorer.controls["x"].value = 3
    seen = Reader(explorer.view.value)
    assert "ValueError" in explorer.view.value and "<p>1</p>" not in explorer.view.value
    assert "<script" not in explorer.view.value
    assert [tag for tag, _ in seen.seen if tag != "img"] == ["p", "b", "bdi"]
    assert 'role="alert"' in explorer.view.value
    explorer.controls["x"].value = 4  # and it goes on
    assert explorer.view.value == "<p>4</p>"


# catches: a page that is empty where nothing runs; a state one move old; labels with underscores; a
# title that is markup
def test_it_reads_without_a_kernel(framed):
    explorer, _ = framed
    bundle = explorer._repr_mimebundle_()
    assert json.dumps(bundle) and bundle[WIDGET]["model_id"] == explorer.box.model_id
    assert "steps 4 · kind k1 · on True" in bundle["text/plain"]
    for steps in (4, 8):
        explorer.controls["steps"].value = steps
        kept = explorer._repr_mimebundle_()["text/html"]
        assert f"steps {steps} · kind k1 · on True" in kept and f"<p>{steps} k1 True</p>" in kept
        assert "Steps &amp; kinds" in kept and "How &lt;far&gt;?" in kept
    assert (
        "kl coef 0.5"
        in Explorer(lambda kl_coef: "", kl_coef=(0.0, 1.0, 0.5))._repr_mimebundle_(
            include=None, exclude=None
        )["text/html"]
    )


def test_a_state_in_words_is_escaped():
    explorer = Explorer(lambda who: "<em>view</em>", who=[NASTY, "b"])
    shown = explorer._repr_mimebundle_()["text/html"]
    assert "<script" not in shown and "&lt;script&gt;" in shown
    assert shown.endswith("<em>view</em></div>")
    assert [tag for tag, _ in Reader(shown).seen] == ["div", "style", "p", "em"]


# ---- The frame ----


def buttons(explorer):
    "Name -> button, of the frame."
    row = explorer.box.children[-1].children[0]
    return {button.description: button for button in row.children}


# catches: a preset that leaves the other controls where they were, a reset to some other state, a
# picture for each control that a preset moves, a control that is deaf afterwards
def test_presets_and_reset_move_all_controls_and_draw_once(framed):
    explorer, calls = framed
    assert list(buttons(explorer)) == ["far", "other", "none", "Reset"]
    explorer.controls["on"].value = False
    del calls[:]
    for name, wanted in {
        "far": dict(steps=9, kind="k1", on=True),
        "other": dict(steps=4, kind="k2", on=False),
        "Reset": dict(steps=4, kind="k1", on=True),
    }.items():
        buttons(explorer)[name].click()
        assert calls == [wanted] == [explorer.state()], name
        del calls[:]
    explorer.controls["steps"].value = 5
    assert calls == [dict(steps=5, kind="k1", on=True)]
    (odd := Explorer(lambda x: str(x), x=(0, 9, 1, 2))).set(x=4)
    assert odd.reset() is None and odd.state() == dict(x=1)  # off its steps


# catches: a page that leaves its explorer, or the reader's own state, somewhere else
def test_a_state_is_shown_without_moving_anything(framed):
    explorer, _ = framed
    explorer.set(steps=7)
    assert explorer.at(kind="k2") == "<p>4 k2 True</p>"
    assert explorer.state()["steps"] == 7 and explorer.view.value == "<p>7 k1 True</p>"


# catches: a preset with a mistyped name, or a value that a slider would cut off in silence
@pytest.mark.parametrize("wrong", [dict(stepz=1), dict(steps=10), dict(kind="k3"), dict(on=2)])
def test_a_state_that_there_is_not(wrong):
    given = dict(steps=(0, 9, 4), kind=["k1", "k2"], on=True)
    explorer = Explorer(lambda **state: "", **given)
    for act in (explorer.set, explorer.at):
        with pytest.raises(ValueError, match="there is no control stepz|cannot be"):
            act(**wrong)
    with pytest.raises(ValueError):
        Explorer(lambda **state: "", presets={"wrong": wrong}, **given)
    assert explorer.state() == dict(steps=4, kind="k1", on=True)


# ---- Without a kernel ----


# catches: a last stop lost to rounding, labels in place of values, a start off the steps
def test_what_a_control_can_be():
    wanted = {
        "lam": ((0.0, 1.0, 0.95, 0.05), 21, 19, "0.15", 0.15),
        "x": ((0, 10, 5, 4), 4, 2, "8", 8),  # 0 4 5 8: the start is none of the steps
        "dual": ({"off": 0.0, "three": 3.0}, 2, 0, "three", 3.0),
        "on": (True, 2, 1, "yes", True),
    }
    for name, (spec, count, start, text, value) in wanted.items():
        made = dial(name, control(name, spec))
        assert (len(made.values), made.start) == (count, start), name
        assert made.texts[made.place(value)] == text


# catches: a grid larger than it may be, a start, an end or a preset's value that is not in it, a
# choice that is dropped
def test_thinned_sliders_keep_what_is_needed():
    specs = dict(a=(0, 100, 37), b=(0, 100, 50), c=["x", "y"])
    dials = [dial(name, control(name, spec)) for name, spec in specs.items()]
    a, b, c = thin_dials(dials, dict(a={61}), most=100)
    assert {0, 37, 61, 100} <= {*a.values} and {0, 50, 100} <= {*b.values}
    assert a.values[a.start] == 37 and c.values == ["x", "y"]
    assert 60 < len(a.values) * len(b.values) * 2 <= 100
    with pytest.raises(ValueError, match="fewer choices"):
        thin_dials(dials, {}, most=10)


def test_stops_are_the_stops_of_the_page():
    explorer = Explorer(
        lambda x: f"<p>{x}</p>", presets=dict(p=dict(x=7)), stops=dict(x=[0, 50]), x=(0, 100, 3)
    )
    assert [one.values for one in explorer.dials()] == [[0, 3, 7, 50]]


def test_parts_are_kept_once():
    views = [f"<table>{'<td>same</td>' * 500}<td>{i}</td></table>" for i in range(300)]
    explorer = Explorer(lambda x: views[x], x=(0, 299, 0))
    assert len(explorer.grid()["parts"]) < 1 + 2 + 300 + 2
    assert len(pack(explorer.grid())) < len("".join(views)) / 200
