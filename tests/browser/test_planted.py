"""The tests of the pages, put to the test: pages made here with one fault each, which they must
find, and a page without, on which they must find nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import nbformat
import pytest
from controls import Widget, nameless, photograph, violations, widgets
from lab import Lab, Notebook

SOUND = """
import ipywidgets as w
from rlhf_nb.ui.explore import control
said, n = w.HTML("<p>0</p>"), [0]
def show(change): said.value = f"<p>{slider.value}, {choice.value}, {box.value}, {field.value}, {n[0]}</p>"
def count(button): n[0] += 1; show(None)
slider, choice, box = control("how_many", (0, 9, 3)), w.ToggleButtons(options=["tea", "milk"], description="which"), w.Checkbox(description="hot")
field, button = w.Text(description="name"), w.Button(description="one more")
for one in (slider, choice, box, field): one.observe(show, "value")
button.on_click(count)
w.VBox([slider, choice, box, field, button, said])
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


@pytest.fixture(scope="module")
def run(lab: Lab) -> Iterator[Callable]:
    "Opens a page made of cells, `run(name, *cells)`, and has every control worked."
    opened: list[str] = []

    def make(name: str, *cells: str) -> tuple[Notebook, list[Widget], list[str]]:
        nb = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=KERNEL
        )
        nbformat.write(nb, lab.folder / f"planted-{name}.ipynb")
        opened.append(f"planted-{name}.ipynb")
        page = lab.notebook(opened[-1])
        found = widgets(page)
        access = nameless(found) + [told for widget in found for told in widget.beyond_tab()]
        return page, found, access + [told for widget in found for told in widget.dead()]

    yield make
    for name in opened:
        lab.close(name)
    lab.traceback()  # these were planted too


@pytest.fixture(scope="module")
def heard(run: Callable) -> list[str]:
    "What the tests of the pages hear of the page on which everything fails."
    page, _, _ = run("failing", *(HEAD % where + code for where, code in FAILING.items()))
    page.settle()
    return page.wire.faults()


@pytest.fixture(scope="module")
def lame(run: Callable) -> tuple[Notebook, list[Widget], list[str]]:
    return run("lame", HALF, *(code for code, *_ in [*LAME.values(), *UGLY.values()]))


@pytest.fixture(scope="module")
def seen(
    lame: tuple[Notebook, list[Widget], list[str]],
    axe: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[str]:
    "What is said of how that page looks."
    lame[0].examine(axe)
    return violations(lame[1]) + photograph(
        lame[1], 800, f"{tmp_path_factory.mktemp('lame')}/{{}}.png"
    )


# catches: tests of the pages that complain of everything, and a finder that sees ipywidgets alone
def test_a_sound_page_passes(run: Callable):
    page, found, told = run("sound", SOUND, PLAIN)
    kinds = [[c["kind"] for c in widget.controls()] for widget in found]
    assert (
        kinds
        == [
            ["range", "choice", "choice", "check", "text", "button"],
            ["range", "fold"],
            ["range", "fold"],
        ]
        and page.wire.views() == 1
    )
    told += page.wire.faults() + page.console + page.strangers
    assert not told


# catches: a handler whose exception nobody hears of. Each of these keeps it to itself in its own
# way, and the page looks well
@pytest.mark.parametrize("where", FAILING)
def test_an_exception_is_heard_wherever_it_is_swallowed(heard: list[str], where: str):
    assert any(f"planted in {where}" in told for told in heard), (
        f"an exception in {where} was not heard: {heard}"
    )


# catches: tests of the pages that let a dead, nameless or hidden control pass
@pytest.mark.parametrize("fault", LAME)
def test_a_lame_control_is_found(lame: tuple[Notebook, list[Widget], list[str]], fault: str):
    assert any(LAME[fault][1] in told for told in lame[2]), lame[2]


# catches: axe-core that is in the page and looks at nothing, or at that alone which is not scrolled
# away; a finder of what is cut off that finds nothing
@pytest.mark.parametrize("fault", UGLY)
def test_what_is_badly_drawn_is_found(seen: list[str], fault: str):
    _, *parts = UGLY[fault]
    assert any(all(part in told for part in parts) for told in seen), seen
