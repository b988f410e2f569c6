"""How long a page of rollouts takes to open, and to step, in Chromium without a window.

    python benchmarks/open_page.py                   # pages of 12 and 21 updates of 256 answers
    python benchmarks/open_page.py --updates 2

Milliseconds until the first answer is drawn, until the next episode is, and until another update
is: medians of seven pages opened in turn, of four steps and three updates on each.
"""

import os
import random
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from string import ascii_lowercase
from tempfile import TemporaryDirectory
from typing import Any

from common import HERE, environment, finish, parse, parser_of, table

sys.path.insert(0, str(HERE.parent / "tests"))
from playwright.sync_api import Browser, sync_playwright
from test_browse import write
from test_viewer import make

from rlhf_nb.ui.viewer import browse
from rlhf_nb.ui.what_if import what_if
from rlhf_nb.update import Objective

PRESS = """key => new Promise(done => {
  const facts = document.querySelector('.page > .facts'), was = facts.textContent;
  const start = performance.now(), end = () => done(performance.now() - start);
  const look = () => facts.textContent === was ? setTimeout(look, 1)
    : requestAnimationFrame(() => setTimeout(end));
  document.body.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  look();
})"""
WHAT = dict(open="first answer", n="next episode", **{",": "another update"})


def update_of(update: int, rows: int = 256) -> Any:
    "Answers of 150 to 300 words of letters, with numbers that say nothing."
    draw = random.Random(update)
    words = ["".join(draw.choices(ascii_lowercase, k=draw.randint(2, 6))) for _ in range(150)]
    text = lambda n: [f" {word}" for word in draw.choices(words, k=n)]
    tokens = [text(draw.randint(150, 300)) for _ in range(rows)]
    told = dict(prompts=["".join(text(60)) for _ in tokens], responses=[*map("".join, tokens)])
    told |= dict(tokens=tokens, info=dict(update=update, episode=rows * update, kl_coef=0.05))
    r = make([len(x) for x in tokens], 300, update, columns={}, **told)
    return what_if(r, Objective())


def opened(browser: Browser, page: Path) -> dict[str, list[float]]:
    "Milliseconds of each thing."
    tab, start = browser.new_page(viewport=dict(width=1280, height=900)), time.perf_counter()
    tab.goto(f"{page.as_uri()}#rollouts")
    tab.wait_for_selector("#app:not([hidden]) .body .token")
    found: dict[str, list[float]] = dict(open=[1000 * (time.perf_counter() - start)])
    for key, times in (("n", 4), (",", 3)):
        found[key] = []
        for _ in range(times):
            tab.wait_for_timeout(600)  # what the page does ahead is done
            found[key].append(tab.evaluate(PRESS, key))
    tab.close()
    return found


def main(words: list[str] | None = None) -> dict:
    parser = parser_of(__doc__, "open_page", rounds=7)
    parser.add_argument("--updates", type=int, nargs="+", default=[12, 21])
    asked = parse(parser, words)
    machine, pages, found = environment(asked.under_load), {}, {}
    where = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with TemporaryDirectory() as folder, sync_playwright() as p:
        for n in [2] if asked.quick else asked.updates:
            run = write(Path(folder, f"run-{n}"), n, make=update_of)
            pages[n] = browse(run).save_html(Path(folder, f"{n}.html"), updates=n)
        browser = p.chromium.launch(executable_path=where, args=["--no-sandbox", "--disable-gpu"])
        rounds = [{n: opened(browser, x) for n, x in pages.items()} for _ in range(asked.rounds)]
        for n, page in pages.items():
            times = {WHAT[x]: [t for one in rounds for t in one[n][x]] for x in WHAT}
            middle = {name: round(median(its), 1) for name, its in times.items()}
            found[n] = dict(megabytes=round(page.stat().st_size / 1e6, 1)) | middle
        machine["chromium"] = browser.version
    rows = [[f"{n} updates", *map(str, one.values())] for n, one in found.items()]
    shown = table("Milliseconds, medians", ["", "MB", *WHAT.values()], rows)
    return finish(dict(environment=machine, checks=[], pages=found), asked, shown)


if __name__ == "__main__":
    main()
