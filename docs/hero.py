"""The rollout that the site's first page and the README show.

    python docs/hero.py data runs/mini_tldr     docs/hero.json, from a whole run of `rlhf-nb demo`
    python docs/hero.py picture runs/mini_tldr  docs/static/viewer.gif and viewer-dark.gif, from
                                                the page of that run, with Chromium

hero.json holds three updates, all their episodes, as a saved file holds them; the page around them
is written with the script as it is whenever the site is built.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE / "hero.json"
STATIC = HERE / "static"
PICTURES = dict(light=STATIC / "viewer.gif", dark=STATIC / "viewer-dark.gif")
SHARES = (0.0, 0.3, 1.0)  # of the run, at which an update is kept
WIDTH, HEIGHT, COLOURS = 1100, 700, 96


def write_data(run: Path) -> None:
    "Three updates of a run, from its beginning to its end."
    from rlhf_nb.ui.viewer import browse

    browser = browse(run)
    files = list(browser.run.files)
    updates = browser.updates([files[round(share * (len(files) - 1))] for share in SHARES])
    head = browser.head(updates, []) | dict(title="One run of rlhf-nb demo")
    packed = [base64.b64encode(browser.load(one)).decode() for one in updates]
    text = json.dumps(dict(head=head, packed=packed), ensure_ascii=False, indent=0)
    DATA.write_text(text + "\n", encoding="utf-8")


def write_page(path: Path) -> Path:
    "The page of hero.json: the saved file that `browse(...).save_html` writes, in short."
    from rlhf_nb.ui.reader import write_reader

    kept = json.loads(DATA.read_text(encoding="utf-8"))
    packed = [base64.b64decode(one) for one in kept["packed"]]
    place = dict(sort="score", down=True, row=-1, signal="kl")
    return write_reader(path, kept["head"], packed, place, "<p>This page needs JavaScript.</p>")


STEPS = (  # a key, or an action by name; milliseconds that the picture stays
    ("", 2200),
    ("w", 1200),
    ("lam", 2600),
    ("result", 4000),
)


def frames_of(tab: Any, page: Path) -> list[Any]:
    "A picture after each step."
    from PIL import Image

    frames = []
    tab.goto(f"{page.as_uri()}#rollouts")
    tab.wait_for_selector("#app:not([hidden]) .token")
    for step, _ in STEPS:
        if step == "lam":
            tab.locator(".panel [data-setting=lam]").fill("0")
        elif step == "result":
            tab.locator(".views a").first.click()
        elif step:
            tab.mouse.move(0, 0)
            tab.keyboard.press(step)
        tab.wait_for_timeout(300)
        shot = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
        frames.append(shot.quantize(COLOURS, dither=Image.Dither.NONE))
    return frames


def write_pictures(run: Path) -> None:
    """An answer tinted by its advantages, the same with lambda at 0, and what PPO did to a typical
    answer: on a light page and on a dark one."""
    from playwright.sync_api import sync_playwright

    from rlhf_nb.ui.viewer import browse

    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        sys.exit("no Chromium is installed: on Debian, apt-get install chromium.")
    times = [time for _, time in STEPS]
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        page = browse(run).save_html(Path(place) / "run.html")
        browser = playwright.chromium.launch(executable_path=chromium)
        for scheme, path in PICTURES.items():
            size = dict(width=WIDTH, height=HEIGHT)
            first, *more = frames_of(browser.new_page(viewport=size, color_scheme=scheme), page)
            first.save(path, save_all=True, append_images=more, duration=times, loop=0)
            print(f"{path.name}: {len(times)} pictures, {path.stat().st_size / 1000:.0f} kB")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    for name in ("data", "picture"):
        what.add_parser(name).add_argument("run", type=Path, help="folder of `rlhf-nb demo`")
    args = parser.parse_args()
    if args.what == "data":
        write_data(args.run)
    else:
        write_pictures(args.run)


if __name__ == "__main__":
    main()
