"""The tests of the pages, put to the test: a page made here of widgets with one fault each, which
they must find, beside three without, of which they must say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import nbformat
import pytest
from controls import WAYS, Widget, nameless, photograph, violations, widgets
from lab import Lab, Notebook

# What is tested here changes with the tests alone, and a page of dead controls takes a minute.
pytestmark = pytest.mark.slow

SOUND = """
import ipywidgets as w
from rlhf_nb.ui.explore import control
def sound():
    said, n = w.HTML("<p>0</p>"), [0]
    def show(change): said.value = f"<p>{slider.value}, {choice.value}, {box.value}, {field.value}, {n[0]}</p>"
    def count(button): n[0] += 1; show(None)
    slider, choice, box = control("how_many", (0, 9, 3)), w.ToggleButtons(options=["tea", "milk"], description="which"), w.Checkbox(description="hot")
    field, button = w.Text(description="name"), w.Button(description="one more")
    for one in (slider, choice, box, field): one.observe(show, "value")
    button.on_click(count)
    return w.VBox([slider, choice, box, field, button, said])
sound()
"""
PLAIN = """
from html import escape
from IPython.display import HTML
page = '''<label>row <input type="range" max="9" value="3" onkeydown="event.stopPropagation()" oninput="this.nextElementSibling.value = this.value"><output>3</output></label>
<details><summary>more</summary><p>of it</p></details>'''
HTML(f'{page}<iframe title="the same in a frame" srcdoc="{escape(page)}"></iframe>')
"""
HEAD = (
    "import ipywidgets as w, threading\nsaid, n = w.HTML('<p>0</p>'), [0]\ndef fail(*given): "
    "said.value += '!'; raise RuntimeError('planted in %s')\n"
)
FAILING = {  # each in a cell of its own; the last one stops the page
    "observe": "one = w.IntSlider(description='x'); one.observe(fail, 'value'); w.VBox([one, "
    "said])",
    "on_click": "one = w.Button(description='press'); one.on_click(fail); w.VBox([one, said])",
    "interact": "w.interactive(lambda x, fail=w.fixed(fail): fail() if x else None, x=(0, 3, 1))",
    "an Output": "out, b = w.Output(), w.Checkbox(description='x')\ndef inside(change, out=out, "
    "fail=fail):\n    with out: fail()\nb.observe(inside, 'value'); w.VBox([b, said])",
    "a thread": "c = w.Checkbox(description='x'); c.observe(lambda change, fail=fail: "
    "threading.Thread(target=fail).start(), 'value'); w.VBox([c, said])",
    "an Explorer": "from rlhf_nb.ui.explore import Explorer\ndef draw(x, fail=fail): return fail() "
    "if x else '<p>none</p>'\nExplorer(draw, x=(0, 9, 0))",
    "a cell": "fail()",
}
HALF = """import ipywidgets as w
def widget(make, name="value"):
    said, n, one = w.HTML("<p>0</p>"), [0], make()
    def show(given): n[0] += 1; said.value = f"<p>{n[0]}</p>"
    one.on_click(show) if name == "click" else name and one.observe(show, name)
    return w.VBox([one, said])
"""
LAME = {  # a widget with one lame control, and what is said of it
    "deaf slider": (
        "widget(lambda: w.IntSlider(description='s'), '')",
        'slider "s" by keyboard: it moves, and nothing else changes',
    ),
    "deaf button": (
        "widget(lambda: w.Button(description='press'), '')",
        'button "press" by mouse: nothing happens',
    ),
    "deaf choice": (
        "widget(lambda: w.ToggleButtons(options=['a', 'b'], description='c'), '')",
        'choice "c: b" by keyboard: it moves, and nothing else changes',
    ),
    "stuck slider": (
        "widget(lambda: w.IntSlider(min=0, max=0, description='t'))",
        'slider "t" by mouse: it does not even move',
    ),
    "no label": ("widget(lambda: w.Text())", 'text "": no visible description.'),
    "an icon alone": (
        "widget(lambda: w.Button(icon='play'), 'click')",
        'button "": no accessible name',
    ),
    "a handle alone": (
        "widget(lambda: w.IntSlider(description='u'))",
        'slider "u": no accessible name',
    ),
    "no tab": (
        "widget(lambda: w.Checkbox(description='x', tabbable=False))",
        'check "x": not reached by Tab.',
    ),
}
UGLY = {  # a widget that is badly drawn, and a part of what is said of it
    "pale text": (
        "w.HTML('<p style=\"color:#bbb;background:#fff\">pale</p>')",
        "color-contrast",
        ">pale<",
    ),
    "white on white": (
        "w.HTML('<p style=\"color:#fff;background:#fff\">white</p>')",
        "color-contrast",
        ">white<",
    ),
    "pale text far down": (
        "w.HTML('<p>more</p>' * 99 + '<p style=\"color:#bbb;background:#fff\">deep</p>')",
        "color-contrast",
        ">deep<",
    ),
    "a short label": (
        "w.VBox([w.IntSlider(description='a label that is far too long for its place')])",
        "three dots",
        "a label that is far",
    ),
    "a wide table": (
        "w.VBox([w.HTML('<table><tr>' + '<td>cell</td>' * 99 + '</tr></table>')])",
        "cut off on the right",
        "cell",
    ),
}
KERNEL = dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"))


@dataclass
class Planted:
    "The page, its widgets worked (those that are ugly apart), and what was said of them."

    page: Notebook
    sound: list[Widget]
    lame: list[Widget]
    of_sound: list[str]  # and all that was heard until these were worked
    of_lame: list[str]
    faults: list[str]  # what its kernel said in the end


def worked(widgets: list[Widget]) -> list[str]:
    "What is said of their controls."
    return nameless(widgets) + [told for one in widgets for told in one.beyond_tab() + one.dead()]


@pytest.fixture(scope="module")
def planted(lab: Lab) -> Iterator[Planted]:
    cells = [SOUND, PLAIN, HALF, *(code for code, *_ in [*LAME.values(), *UGLY.values()])]
    cells += [HEAD % where + code for where, code in FAILING.items()]
    nb = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=KERNEL
    )
    nbformat.write(nb, lab.folder / "planted.ipynb")
    page = lab.notebook("planted.ipynb")
    first, plain, *lame, framed = widgets(page)  # those in a frame come last
    sound = [first, plain, framed]
    of_sound = worked(sound)
    page.settle()
    heard = page.wire.faults() + page.console + page.strangers
    of_sound += [told for told in heard if "planted in" not in told]  # some fail as they are made
    of_lame = worked(lame[: len(LAME)])
    for one in lame[len(LAME) + len(UGLY) :]:  # one touch is enough for an exception
        for control in one.controls():
            one.answers(control["key"], next(one.moves(control["key"], control["kind"], WAYS[0])))
    page.settle()
    yield Planted(page, sound, lame, of_sound, of_lame, page.wire.faults())
    lab.close("planted.ipynb")
    lab.traceback()  # these were planted too


@pytest.fixture(scope="module")
def seen(planted: Planted, axe: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    "What is said of how the widgets without and with a fault look."
    lame = planted.lame[: len(LAME) + len(UGLY)]
    planted.page.examine(axe)
    name = f"{tmp_path_factory.mktemp('lame')}/{{}}.png"
    assert not (told := violations(planted.sound)), told
    return violations(lame) + photograph(lame, 800, name)


# catches: tests of the pages that complain of everything, and a finder that sees ipywidgets alone
def test_sound_widgets_pass(planted: Planted, seen: list[str]):
    kinds = [[c["kind"] for c in widget.controls()] for widget in planted.sound]
    assert kinds == [
        ["range", "choice", "choice", "check", "text", "button"],
        ["range", "fold"],
        ["range", "fold"],
    ]
    assert len(planted.lame) + 1 == planted.page.wire.views()
    assert not planted.of_sound


# catches: a handler whose exception nobody hears of. Each of these keeps it to itself in its own
# way, and the page looks well
@pytest.mark.parametrize("where", FAILING)
def test_an_exception_is_heard_wherever_it_is_swallowed(planted: Planted, where: str):
    assert any(f"planted in {where}" in told for told in planted.faults), (
        f"an exception in {where} was not heard: {planted.faults}"
    )


# catches: tests of the pages that let a dead, nameless or hidden control pass
@pytest.mark.parametrize("fault", LAME)
def test_a_lame_control_is_found(planted: Planted, fault: str):
    assert any(LAME[fault][1] in told for told in planted.of_lame), planted.of_lame


# catches: axe-core that is in the page and looks at nothing, or at that alone which is not scrolled
# away; a finder of what is cut off that finds nothing
@pytest.mark.parametrize("fault", UGLY)
def test_what_is_badly_drawn_is_found(seen: list[str], fault: str):
    _, *parts = UGLY[fault]
    assert any(all(part in told for part in parts) for told in seen), seen
