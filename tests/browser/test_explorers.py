"""Explorers without a kernel, in a browser: every control moves by the keyboard, and what is shown
is what Python draws for that state."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from controls import violations
from playwright.sync_api import Browser, Locator, Page
from test_static import File
from torch import tensor

from rlhf_nb.gae import gae, td_errors
from rlhf_nb.ui.explore import Explorer, view_at
from rlhf_nb.ui.pictures import gae_picture
from rlhf_nb.ui.viz import Html, signal_table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from collect import Project

SITE = Project(ROOT)
TOKENS = ["<b>a</b>", "</script>", "STOP"]
# Markup as a browser writes it: attributes quoted, entities resolved.
AS_WRITTEN = "text => { const box = document.createElement('div'); box.innerHTML = text; return box.innerHTML; }"


def credit(lam: float, ending: str, table: bool) -> str:
    "The picture of the page on GAE, of a response with markup in its tokens."
    rewards, values = tensor([[0.0, -0.25, 1.0]]), tensor([[0.5, 0.75, 0.25]])
    mask = tensor([[True, True, ending == "stopped"]])
    batch = rewards, values, mask, 1.0
    delta, A = td_errors(*batch), gae(*batch, lam)
    picture = gae_picture(TOKENS[: int(mask.sum())], delta[mask].tolist(), lam)
    return Html(picture + (signal_table(TOKENS, mask, delta=delta, A=A) if table else ""))


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    return Explorer(
        credit,
        title="Who gets the <credit>",
        question="How far back?",
        presets={
            "next step": dict(lam=0.0),
            "in full": dict(lam=1.0),
            "cut": dict(ending="cut off", table=False),
        },
        lam=(0.0, 1.0, 0.95, 0.05),
        ending=["stopped", "cut off"],
        table=True,
    )


@pytest.fixture
def opened(fresh: Callable[..., Page]) -> Callable[..., File]:
    return lambda path, color_scheme="light": File(fresh(color_scheme)).open(path)


@pytest.fixture
def page(opened: Callable, explorer: Explorer, tmp_path: Path) -> File:
    return opened(explorer.save_html(tmp_path / "page.html"))


def root_of(page: File, at: int = 0) -> Locator:
    "An explorer, once its controls are there."
    root = page.page.locator(".rlhf-explorer").nth(at)
    root.get_by_role("button", name="Reset").wait_for()
    return root


def written(page: File, markup: str) -> str:
    return page.page.evaluate(AS_WRITTEN, markup)


def to(root: Locator, dials: Sequence[dict], state: Sequence[int]) -> None:
    "Set every control by the keyboard, as a reader without a mouse does."
    for dial, at in zip(dials, state, strict=True):
        if dial["kind"] == "range":
            slider = root.locator(".controls").get_by_label(dial["label"], exact=True)
            slider.press("Home")
            for _ in range(at):
                slider.press("ArrowRight")
            assert slider.get_attribute("aria-valuetext") == dial["texts"][at]
        elif dial["kind"] == "check":
            box = root.locator(".controls").get_by_label(dial["label"], exact=True)
            if box.is_checked() != bool(at):
                box.press("Space")
        else:
            group = root.get_by_role("group", name=dial["label"], exact=True)
            for _ in dial["texts"]:
                if not group.get_by_role("radio").nth(at).is_checked():
                    group.locator("input:checked").press("ArrowRight")
    assert root.get_attribute("data-state") == " ".join(map(str, state))


def shown(root: Locator) -> str:
    return root.locator(".view").inner_html()


# catches: a state that shows another's picture, an order of states other than Python's, a number
# lost on the way, markup in a token that becomes an element, a request, a script that is not allowed
def test_the_page_shows_what_python_draws(page: File, explorer: Explorer):
    root, dials, dice = root_of(page), explorer.grid()["dials"], random.Random(0)
    assert shown(root) == written(page, credit(0.95, "stopped", True))
    seen = set()
    for _ in range(8):
        state = [dice.randrange(len(dial["texts"])) for dial in dials]
        to(root, dials, state)
        wanted = credit(0.05 * state[0], ["stopped", "cut off"][state[1]], bool(state[2]))
        assert shown(root) == written(page, wanted), state
        seen.add(shown(root))
    assert len(seen) > 6 and not page.said()
    assert not root.locator(".view b").filter(has_text="a").count()


# catches: a preset or a reset that leads elsewhere, that forgets a control, or that is marked as
# chosen when it is not; a change that a screen reader is not told of, or that interrupts it at every
# step
def test_presets_and_reset(page: File):
    root = root_of(page)
    said = root.get_by_role("status")
    assert said.inner_text() == ""
    root.locator(".controls").get_by_label("λ", exact=True).press("Home")
    assert said.inner_text() == ""
    page.page.wait_for_function("e => e.textContent", arg=said.element_handle())
    assert "Advantages, lambda 0:" in said.inner_text()
    for name, wanted in {
        "in full": (1.0, "stopped", True),
        "cut": (0.95, "cut off", False),
        "next step": (0.0, "stopped", True),
        "Reset": (0.95, "stopped", True),
    }.items():
        root.get_by_role("button", name=name).press("Enter")
        assert shown(root) == written(page, credit(*wanted)), name
        pressed = root.locator("button[aria-pressed=true]").all_inner_texts()
        assert pressed == [name] * (name != "Reset")
        assert root.locator(".controls").get_by_label("table", exact=True).is_checked() == wanted[2]


# catches: words too pale in one of the themes, a control without a name, a page that scrolls
# sideways where it is narrow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_frame_in_both_themes(
    opened: Callable, explorer: Explorer, tmp_path: Path, axe: str, theme: str
):
    page = opened(explorer.save_html(tmp_path / "page.html"), theme)
    root_of(page)
    page.examine(axe)
    assert not (told := violations([page.body])), told
    page.page.set_viewport_size(dict(width=400, height=900))
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 400


# catches: a drawing, live or kept, that goes by the system's theme where the page has one of its own,
# one that is turned over twice, a plot that stays white
@pytest.mark.parametrize("system, turned", [("light", True), ("dark", False)])
def test_a_dark_page_has_dark_pictures(
    opened: Callable, explorer: Explorer, tmp_path: Path, system: str, turned: bool
):
    kept = explorer._repr_mimebundle_()["text/html"]  # what a notebook shows without a kernel
    shown = kept.removesuffix("</div>") + "<img></div>"
    live = tmp_path / "live.html"
    live.write_text(f"<!doctype html><body data-jp-theme-light=false>{shown}</body>")
    page = opened(live, color_scheme=system).page
    filtered = lambda name: page.locator(name).first.evaluate("e => getComputedStyle(e).filter")
    assert (filtered("svg") != "none") == turned and "invert" in filtered("img")
    page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    assert (filtered("svg") != "none") != turned and filtered("img") == "none"
    saved = opened(explorer.save_html(tmp_path / "page.html"), color_scheme=system)
    root_of(saved), saved.page.evaluate("document.body.dataset.theme = 'dark'")
    page = saved.page
    assert (filtered(".view svg") != "none") == turned


# catches: an empty frame where no script runs
def test_it_reads_without_a_script(browser: Browser, explorer: Explorer, tmp_path: Path):
    path = explorer.save_html(tmp_path / "page.html")
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(path.resolve().as_uri())
        text = page.locator("main").inner_text()
        assert "λ 0.95 · ending stopped · table yes" in text and "the <credit>" in text
        assert page.locator(".view svg").is_visible()


# ---- The site ----


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, ROOT / "docs" / "build.py", "--out", place / "site"]
    done = subprocess.run(
        [*command, "--work", place / "work"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return place / "site"


# catches: a page of the site whose explorer is dead, or shows other states than those kept, which
# tests/test_kept_explorers.py compares with the page's own functions
@pytest.mark.weekly
@pytest.mark.parametrize("name", SITE.explorer_pages)
def test_the_explorers_of_the_site(opened: Callable, site: Path, name: str):
    page = opened(site / f"{name}.html")
    for at, grid in enumerate(SITE.explorers(name).values()):
        root, dials, dice = root_of(page, at), grid["dials"], random.Random(1)
        for _ in range(4):
            state = [dice.randrange(len(dial["texts"])) for dial in dials]
            to(root, dials, state)
            assert shown(root) == written(page, view_at(grid, state)), state
    assert not [told for told in page.said() if not told.startswith("asked for file:")]
