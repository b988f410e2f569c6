"""Every notebook in JupyterLab, in a real browser: its cells run, its widgets show, each control
is worked by keyboard and by mouse and must be answered.

Nothing here knows what is on a page: notebooks are found by glob, widgets and controls by looking
at what the page shows. The tests of a page come in the order of this file; the screenshots of each
widget are kept (see conftest.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from controls import Widget, nameless, photograph, still, violations, widgets
from lab import ROOT, Lab, Notebook
from notebooks import NOTEBOOKS

# A page that `make test` looks at too, with every kind of control and a fault that it plants; one
# that check-slow looks at. The others are weekly.
OFTEN, SLOW = "32_explore", "09_shaping"
MARKS = {OFTEN: [], SLOW: pytest.mark.slow}
PAGES = [pytest.param(name, marks=MARKS.get(name, pytest.mark.weekly)) for name in NOTEBOOKS]

# ---- What is let off, and why. Nothing else is; and what need not be let off any more fails too.
# ----

# (page, part of the message) of what the kernel says: why it is no fault.
PLANTED = {
    (
        "32_explore",
        "ValueError: this picture was never drawn",
    ): "the page plants it, to show what widgets.interactive keeps to itself"
}


def forgiven(told: str, page: str) -> bool:
    return any(page == where and part in told for where, part in PLANTED)


def lines(problems: list[str], page: str) -> str:
    "What is left of some complaints, for a reader."
    return "\n".join(f"{page}: {told}" for told in problems if not forgiven(told, page))


def path_of(name: str) -> str:
    "Where a page is, seen from nbs/."
    return NOTEBOOKS[name].relative_to(ROOT / "nbs").as_posix()


@pytest.fixture(scope="module", params=PAGES)
def notebook(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    "A page whose cells have all run."
    page = lab.notebook(path_of(request.param))
    page.bare()
    yield page
    lab.close(path_of(request.param))
    assert not (told := lab.traceback()), told  # of the server, or in a kernel's own log


@pytest.fixture(scope="module")
def shown(notebook: Notebook) -> list[Widget]:
    return widgets(notebook)


def page_of(notebook: Notebook) -> str:
    return Path(notebook.name).stem


# catches: a page that runs under nbdev_test but not in a kernel, and a kernel that dies on the way
def test_every_cell_runs(notebook: Notebook):
    assert not (told := lines(notebook.wire.faults(), page_of(notebook))), told
    assert not [
        text
        for text in notebook.page.locator(
            ".jp-Cell-outputArea [data-mime-type='application/vnd.jupyter.error'], "
            ".jp-RenderedText[data-mime-type*='stderr']"
        ).all_inner_texts()
        if "Traceback" in text and not forgiven(text, page_of(notebook))
    ]


# catches: a widget without its state, a view that stays empty or is cut off where the window is
# narrow, and a finder of widgets that is blind to one
def test_every_widget_is_rendered(notebook: Notebook, shown: list[Widget], pictures: Path):
    displayed = [w for w in shown if w.root.query_selector(".jupyter-widgets, .reader")]
    assert len(displayed) >= notebook.wire.views(), (
        f"{page_of(notebook)}: cells displayed {notebook.wire.views()} widgets, the page shows "
        f"{len(displayed)}."
    )
    for widget in shown:
        text = widget.root.inner_text()
        assert not any(
            said in text
            for said in ("Error displaying widget", "Loading widget", "Error creating widget")
        ), f"{page_of(notebook)}: {text}"
        assert all(widget.root.bounding_box()[side] > 8 for side in ("width", "height"))
    cut = []
    for theme in ("Dark", "Light"):
        notebook.theme(theme)
        for width in (800, 1280):
            cut += photograph(
                shown, width, f"{pictures}/{page_of(notebook)}-{{}}-{theme.lower()}-{width}.png"
            )
    assert not (told := lines(cut, page_of(notebook))), told


# catches: a control without a label, one that only a mouse can reach, a picture of a control
# without a name
def test_every_control_has_a_name_and_is_reached_by_tab(notebook: Notebook, shown: list[Widget]):
    problems = nameless(shown) + [told for widget in shown for told in widget.beyond_tab()]
    assert not (told := lines(problems, page_of(notebook))), told


# catches: pale text, a table without headers, a field without a label, in either theme
@pytest.mark.parametrize("theme", ["Dark", "Light"])
def test_axe_finds_nothing_serious(notebook: Notebook, shown: list[Widget], theme: str, axe: str):
    if not (looked_at := shown + still(notebook)):
        return
    notebook.theme(theme)
    notebook.unroll()
    notebook.examine(axe)
    problems = violations(looked_at)
    notebook.theme("Light")
    notebook.widen(1280, 1000)
    assert not (told := lines(problems, page_of(notebook))), told


# catches: a control that is connected to nothing, one that only the mouse or only the keyboard
# moves
def test_every_control_is_answered(notebook: Notebook, shown: list[Widget]):
    dead = [told for widget in shown for told in widget.dead()]
    assert not (told := lines(dead, page_of(notebook))), told


# catches: an exception in a handler, swallowed by the kernel's log, by `interact`, by an Output, or
# by Lab; a script of a page that fails; an asset from a network
def test_nothing_failed_in_silence(notebook: Notebook):
    notebook.settle()
    assert not (told := lines(notebook.wire.faults() + notebook.console, page_of(notebook))), told
    assert not notebook.strangers, f"{page_of(notebook)} asked a network: {notebook.strangers}"
    planted = [part for page, part in PLANTED if page == page_of(notebook)]
    assert all(any(part in told for told in notebook.wire.faults()) for part in planted), (
        f"{page_of(notebook)}: what PLANTED lets off did not happen: take it out."
    )
