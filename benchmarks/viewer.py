"""How long a run takes to open and to read: as a live widget, and as one saved file.

    python benchmarks/viewer.py --browser              24 updates of 256 episodes
    python benchmarks/viewer.py --run runs/demo --browser
    python benchmarks/viewer.py --updates 200 --episodes 512 --tokens 53

Without --run, a run is made of random words and numbers. Prints medians as JSON, times in seconds.
In Chromium (playwright), a time runs from the navigation, the key or the step of a slider to the
last change of the page, drawing included.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from rlhf_nb.ppo import Objective
from rlhf_nb.rollout import SIGNALS, Rollout
from rlhf_nb.ui.browser import browse
from rlhf_nb.ui.what_if import what_if

WORDS = "the cat dog bird sat ran sang on a mat and was very happy today .".split()


def rollout(update: int, episodes: int, tokens: int) -> Rollout:
    "Episodes of random words and numbers; a tenth of the prompts come again in every update."
    g = torch.Generator().manual_seed(update)
    lengths = torch.randint(tokens // 2, tokens + 1, (episodes,), generator=g)
    mask = torch.arange(tokens) < lengths[:, None]
    ids = torch.randint(len(WORDS), (episodes, tokens), generator=g) * mask
    texts = [[WORDS[i] for i in row[:n]] for row, n in zip(ids.tolist(), lengths.tolist())]
    signals = {name: torch.randn(episodes, tokens, generator=g) * mask for name in SIGNALS}
    post = "SUBREDDIT: r/pets POST: " + "my cat sat on a mat and was very happy . " * 6
    made = Rollout(
        torch.ones(episodes, 64).long(),
        torch.ones(episodes, 64).long(),
        ids,
        mask,
        lengths < tokens,
        **signals,
        raw_scores=torch.randn(episodes, generator=g),
        scores=torch.randn(episodes, generator=g),
        prompts=[f"{post}{i if i % 10 == 0 else (update, i)}" for i in range(episodes)],
        responses=[" ".join(row) for row in texts],
        tokens=texts,
        info=dict(update=update, episode=update * episodes, kl_coef=0.05),
    )
    return what_if(made, Objective())


def make(folder: Path, updates: int, episodes: int, tokens: int) -> Path:
    "The files of a run: its rollouts and its log."
    (folder / "rollouts").mkdir()
    lines = []
    for update in range(updates):
        r = rollout(update, episodes, tokens)
        r.save(folder / "rollouts" / f"update-{update:05d}.safetensors")
        lines.append(
            {
                "stage": "ppo",
                "step": update + 1,
                "episode": (update + 1) * episodes,
                "objective/raw_scores": update / 100,
                "objective/kl": update / 10,
                "tokens/response_length": float(r.mask.sum(1).float().mean()),
                "policy/entropy_avg": 2.0,
            }
        )
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def timed(act) -> float:
    "Seconds that a call takes."
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def measure(folder: Path, page: Path, moves: int, repeats: int) -> dict[str, float]:
    "Medians. Every run is opened anew; every update that is loaded was not read before."
    opening = lambda: browse(folder)._repr_mimebundle_()
    opened = [timed(opening) for _ in range(repeats)]
    browser = browse(folder)
    updates = browser.updates()
    steps = [updates[7 * i % len(updates)] for i in range(moves)]
    found = dict(
        open=median(opened), load=median(timed(lambda x=x: browser.load(x)) for x in steps)
    )
    found["same_prompt"] = timed(lambda: browser.again(0, 0))
    found["search_every_update"] = timed(browser.search)
    found["save_run"] = timed(lambda: browser.save_html(page))
    return {name: round(x, 4) for name, x in found.items()} | dict(bytes=page.stat().st_size)


KEYS = {"episode": "n", "update": ",", "signal": "2", "table": "t", "what_if": "w"}
SLIDER = "[data-setting=lam]"  # of the what-if panel: every step computes a whole update again


def chromium() -> str:
    "The browser that is driven."
    names = ("chromium", "chromium-browser", "google-chrome")
    if found := next(filter(None, map(shutil.which, names)), None):
        return found
    raise SystemExit(
        "no Chromium is installed: leave --browser out, or install it (Debian: apt-get install "
        "chromium)"
    )


def measure_file(page: Path, moves: int) -> dict[str, float]:
    """The saved file in Chromium: from the navigation until the first episode stands, and from a
    key until the next picture is due. Every request but that for the file itself is counted."""
    from playwright.sync_api import sync_playwright

    found: dict[str, float] = {}
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium()) as browser,
    ):
        opened, asked = [], []
        for _ in range(5):
            tab = browser.new_page(viewport=dict(width=1280, height=900))
            tab.on("request", lambda request: asked.append(request.url))
            start = time.perf_counter()
            tab.goto(page.resolve().as_uri())
            tab.wait_for_selector("#app:not([hidden]) .token")
            opened.append(time.perf_counter() - start)
        found["file_open"] = median(opened)
        for name, key in KEYS.items():
            took = [
                tab.evaluate(PRESS, key) for _ in range(2 * moves if name == "episode" else moves)
            ]
            found[f"file_key_{name}"] = median(took)
            found[f"file_key_{name}_most"] = max(took)
        if not tab.locator(SLIDER).is_visible():
            tab.evaluate(PRESS, KEYS["what_if"])
        if tab.locator(SLIDER).is_visible():  # not where a run's numbers cannot be computed again
            took = [tab.evaluate(STEP, SLIDER) for _ in range(moves)]
            found["file_key_slider"], found["file_key_slider_most"] = median(took), max(took)
        found["file_requests"] = len(asked) - 5
    return {name: round(x, 4) for name, x in found.items()}


TIMED = """given => new Promise(done => {
  const start = performance.now();
  const answer = new MutationObserver(() => {
    answer.disconnect();
    requestAnimationFrame(() => setTimeout(() => done((performance.now() - start) / 1000)));
  });
  const all = {subtree: true, childList: true, attributes: true};
  answer.observe(document.querySelector(".reader"), all);
  ACT })"""
PRESS = TIMED.replace(
    "ACT",
    "document.querySelector('.rows').dispatchEvent("
    "new KeyboardEvent('keydown', {key: given, bubbles: true}));",
)
STEP = TIMED.replace(  # the focus first, as where an arrow key moves a slider
    "ACT",
    "const slider = document.querySelector(given); slider.focus(); slider.stepDown();"
    "slider.dispatchEvent(new Event('input', {bubbles: true}));",
)
CELLS = ("from rlhf_nb.ui.browser import browse", "browse({!r})")


def measure_in_jupyter(folder: Path, moves: int) -> dict[str, float]:
    """The live widget: the cell run until its first episode stands, and a key until the episode of
    another update does, which the kernel sends."""
    import nbformat

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "browser"))
    from lab import serve

    with tempfile.TemporaryDirectory() as place:
        pages = Path(place) / "pages"
        pages.mkdir()
        cells = [nbformat.v4.new_code_cell(cell.format(str(folder))) for cell in CELLS]
        kernel = dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"))
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), pages / "run.ipynb")
        with serve(Path(place) / "lab", pages, chromium()) as lab:
            opened = lab.notebook("run.ipynb")
            token = opened.page.locator(".reader .token").first
            token.wait_for()
            run = lambda command: opened.page.evaluate(
                f"jupyterapp.commands.execute('notebook:{command}').then(() => null)"
            )
            times = []
            for _ in range(3):
                run("clear-all-cell-outputs")
                token.wait_for(state="detached")
                start = time.perf_counter()
                run("run-all-cells")
                token.wait_for()
                times.append(time.perf_counter() - start)
                opened.settle()
            moved = []
            facts = opened.page.locator(".reader .page > .facts")
            for _ in range(moves):
                before, start = facts.inner_text(), time.perf_counter()
                opened.page.locator(".reader .rows").focus()
                opened.page.keyboard.press(",")
                while facts.inner_text() == before:
                    pass
                moved.append(time.perf_counter() - start)
    return dict(
        live_open=round(median(times), 4),
        live_update=round(median(moved), 4),
        live_update_most=round(max(moved), 4),
    )


def main() -> None:
    "Make, measure, print."
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = dict(updates=24, episodes=256, tokens=24, moves=15, repeats=3)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--run", type=Path, help="a run of yours, in place of a made-up one")
    parser.add_argument("--browser", action="store_true", help="measure in Chromium too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, page = args.run, Path(place) / "rollouts.html"
        if folder is None:
            folder = make(Path(place), args.updates, args.episodes, args.tokens)
        found = measure(folder, page, args.moves, args.repeats)
        if args.browser:
            found |= measure_file(page, args.moves) | measure_in_jupyter(
                folder.resolve(), args.moves
            )
    print(
        json.dumps(
            dict(
                {
                    name: None if x is None else str(x) if name == "run" else x
                    for name, x in vars(args).items()
                },
                **found,
                cpus=os.cpu_count(),
                threads=torch.get_num_threads(),
                python=platform.python_version(),
            )
        )
    )


if __name__ == "__main__":
    main()
