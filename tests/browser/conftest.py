"""What the tests in the browser share: one Chromium, and one JupyterLab, for all of them, or for
each of pytest's workers. Tests that share a page go to one worker.

CHROMIUM names another browser than the first that is found; BROWSER_SCREENSHOTS is the folder in
which the pictures are kept; AXE the file of axe-core.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from lab import ROOT, Lab, drive, serve
from playwright.sync_api import Browser, BrowserContext, Page
from xdist.scheduler import LoadScopeScheduling

# Tests that share a page of their file with these alone; the others share one with all of the file.
SHARED = {
    "test_hostile_text_in_a_file": "hostile",
    "test_hostile_text_in_jupyterlab": "live",
    "test_the_live_reader_is_the_saved_one": "live",
    "test_kept_outputs": "kept",
    "test_bad_files_are_found": "bad",
    "test_a_front_end_that_is_not_heard_is_told_so": "deaf",
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    "The browser to drive, None where there is none."
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


def without(what: str, how: str, must: bool) -> None:
    "Skip, saying what is missing; fail where it must not be."
    told = f"{what} is missing, so nothing was tested here. {how}"
    pytest.fail(told, pytrace=False) if must else pytest.skip(told)


class Together(LoadScopeScheduling):
    "Hands out pages, and other groups of tests that share what takes seconds to make."

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        name, _, values = test.rstrip("]").partition("[")
        if file.endswith("test_pages.py"):
            return values.split("-")[0]
        return f"{file} {SHARED.get(name, '')}"


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Together:
    return Together(config, log)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    "A browser with an empty profile."
    if not (found := chromium()):
        without(
            "Chromium",
            "On Debian: apt-get install chromium; elsewhere name it: CHROMIUM=/path/to/it.",
            must=bool(os.environ.get("CI")),
        )
    with drive(found) as browser:
        yield browser


@pytest.fixture(scope="session")
def disk(browser: Browser) -> Iterator[BrowserContext]:
    "Where files are read; all else is kept off. A context for each file would cost two seconds."
    context = browser.new_context(viewport=dict(width=1280, height=1000), reduced_motion="reduce")
    context.route(lambda url: urlsplit(url).scheme not in ("file", "data"), lambda r: r.abort())
    yield context
    context.close()


@pytest.fixture
def fresh(disk: BrowserContext) -> Iterator[Callable[..., Page]]:
    "Makes empty pages, which a test has for itself."
    made: list[Page] = []

    def make(color_scheme: str = "light") -> Page:
        made.append(disk.new_page())
        made[-1].emulate_media(color_scheme=color_scheme)
        return made[-1]

    yield make
    for page in made:
        page.close()


@pytest.fixture(scope="session")
def lab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    "JupyterLab over a copy of nbs/, in front of it the browser."
    with serve(tmp_path_factory.mktemp("lab"), ROOT / "nbs", browser) as lab:
        yield lab
        told = lab.traceback()
    assert not told, told


@pytest.fixture(scope="session")
def axe() -> str:
    "The script of axe-core."
    path = Path(os.environ.get("AXE") or Path(sys.prefix, "axe.min.js"))
    if not path.is_file():
        without(
            "axe-core",
            "`make check-browser` fetches it where npm is.",
            must=bool(os.environ.get("CI")),
        )
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "Where the screenshots go."
    folder = Path(os.environ.get("BROWSER_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
