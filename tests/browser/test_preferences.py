"""Labelling by keyboard in real JupyterLab: 1, 2, 0, u and Backspace in the field, buttons by Tab,
Space and Enter, and what is in the file after each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from controls import nameless, violations, widgets
from lab import Lab, Notebook
from test_dashboard import SLABS

CODE = """
from rlhf_nb.ui import preferences
preferences._APART_SECONDS = 0.6  # a busy machine needs more than 0.2 s to bring the next key
rows = [dict(prompt=f"post {i} <script>alert(1)</script>", answer_1=f"first of {i} <b>", answer_2=f"second of {i}") for i in range(24)]
preferences.label_preferences(rows, "by_keyboard.jsonl")
"""
APART = 620  # ms: a key that comes within 0.6 s of the last one is not a reader's


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator[Notebook]:
    yield lab.notebook("labelling.ipynb", CODE)
    lab.close("labelling.ipynb")


@pytest.fixture(scope="module")
def file(lab: Lab) -> Path:
    return lab.folder / "by_keyboard.jsonl"


def choices(file: Path) -> str:
    "What is on the disk: a letter a line, u for undo."
    return (
        "".join(json.loads(line)["choice"][0] for line in file.read_text().splitlines())
        if file.exists()
        else ""
    )


def press(page: Notebook, *keys: str) -> None:
    "One after the other, as slowly as somebody who reads."
    for key in keys:
        page.page.wait_for_timeout(APART)
        page.page.keyboard.press(key)
        page.settle()


def key_field(page: Notebook):
    return page.page.get_by_label("key", exact=True)


def cell_types(page: Notebook) -> list[str]:
    return page.page.evaluate(
        "[...jupyterapp.shell.currentWidget.content.model.cells].map(c => c.type)"
    )


# catches: keys that Lab eats, a choice that is saved later or not at all, a Backspace that nobody
# hears, a view that stays
def test_keys_choose_and_take_back(page: Notebook, file: Path):
    key_field(page).focus()
    press(page, "1")
    page.page.get_by_text("Choice 2 of 27").wait_for()
    press(page, "2", "0")
    assert choices(file) == "120" and key_field(page).input_value() == "0"
    press(page, "Backspace", "u")
    assert choices(file) == "120uu" and key_field(page).input_value() == "1"
    page.page.get_by_text("Choice 2 of 27").wait_for()
    press(page, "x")
    page.page.get_by_text("is no key here").wait_for()
    assert choices(file) == "120uu" and cell_types(page) == ["code"]


# catches: a key held down, or a double click, that labels pairs which nobody has seen
def test_a_key_held_down_counts_once(page: Notebook, file: Path):
    before = choices(file)
    page.page.wait_for_timeout(APART)
    key_field(page).focus()
    for _ in range(8):
        page.page.keyboard.press("2")
    page.settle()
    assert choices(file) == before + "2" and key_field(page).input_value() == "2"
    page.page.wait_for_timeout(APART)
    page.page.get_by_role("button", name="1 is better").dblclick()
    page.settle()
    assert choices(file) == before + "21"


# catches: buttons without a keyboard; a focus that stays on the button, where the next digit is
# lost
@pytest.mark.parametrize("key", ["Space", "Enter"])
def test_buttons_by_tab_and_then_digits(page: Notebook, file: Path, key: str):
    before = choices(file)
    key_field(page).focus()
    press(page, "Tab", "Tab", key)  # past the first button: 2 is better
    assert choices(file) == before + "2"
    assert page.page.evaluate("document.activeElement.tagName") == "INPUT"
    press(page, "1", "0")
    assert choices(file) == before + "210" and cell_types(page) == ["code"]


# catches: hostile text that becomes markup, a control without a name, a handler that fails in
# silence, and pale text
def test_the_widget_is_sound(page: Notebook, axe: str):
    found = widgets(page)
    assert len(found) == 1
    assert not page.page.locator(".jp-OutputArea script, .jp-OutputArea section b").count()
    for theme in ("Dark", "Light"):
        page.theme(theme)
        page.examine(axe)
        assert not violations(found)
        assert not (slabs := page.page.evaluate(SLABS, theme)), slabs
    assert not nameless(found) + found[0].beyond_tab()
    assert not page.wire.faults() + page.console + page.strangers


# catches: a page that begins anew when its kernel does
def test_a_new_kernel_goes_on(page: Notebook, file: Path):
    key_field(page).focus()
    press(page, "1")
    before = choices(file)
    page.page.evaluate("jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    page.page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')")
    page.page.get_by_text("saved in by_keyboard.jsonl").last.wait_for()
    page.settle()
    left = len(before) - 2 * before.count("u")
    page.page.get_by_text(f"Choice {left + 1} of 27 · {left} saved").wait_for()
    key_field(page).focus()
    press(page, "Backspace")
    assert choices(file) == before + "u"
