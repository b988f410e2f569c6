"""How long a large run takes to open in the browser of runs, and to move about in.

    python benchmarks/viewer.py                       200 updates of 512 episodes of 53 tokens
    python benchmarks/viewer.py --updates 20 --episodes 64
    python benchmarks/viewer.py --browser             also in JupyterLab (playwright, Chromium)

Makes such a run from random numbers in a folder of its own (about 2 MB an update), opens it with
`browse` as a notebook would, controls and first picture included, and moves its slider. Prints
medians as JSON, times in seconds. In the browser, a time runs from the key that is pressed to the
last change of the page, kernel and drawing included.
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

from rlhf_nb.rollout import SIGNALS, Rollout
from rlhf_nb.ui.browser import browse
from rlhf_nb.ui.viewer import view

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
    return Rollout(
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


def measure(folder: Path, moves: int, repeats: int) -> dict[str, float]:
    "Medians. Every run is opened anew; every move goes to an update that was not read before."
    opening = lambda: browse(folder)._repr_mimebundle_()
    opened = [timed(opening) for _ in range(repeats)]
    browser = browse(folder)
    slider, updates = browser.controls["update"], list(browser.run.files)
    to = lambda update: timed(lambda: setattr(slider, "value", update))
    found = dict(
        open=median(opened),
        move=median(to(updates[i % (len(updates) - 1)]) for i in range(0, 7 * moves, 7)),
    )
    found["next_episode"] = median(
        timed(lambda i=i: setattr(browser.controls["place"], "value", i))
        for i in range(2, 2 + moves)
    )
    found["same_prompt_first"] = timed(
        lambda: setattr(browser.controls["same_prompt"], "value", True)
    )
    found["move_with_same_prompt"] = median(
        to(updates[i % (len(updates) - 1)]) for i in range(3, 3 + 7 * moves, 7)
    )
    found["search_every_update"] = timed(browser.search)
    found["save_run"] = timed(lambda: browser.save_html(folder / "run.html"))
    r = browser.run.rollout(updates[0])
    found["save_rollout"] = timed(lambda: view(r).save_html(folder / "rollout.html"))
    sizes = {name: (folder / f"{name}.html").stat().st_size for name in ("run", "rollout")}
    return {name: round(x, 4) for name, x in found.items()} | {
        f"bytes_{name}": x for name, x in sizes.items()
    }


CELLS = ("from rlhf_nb.ui.browser import browse", "browse({!r})")
CHANGED = """() => new Promise(done => {
  const view = document.querySelector('.jp-OutputArea-output .widget-html');
  const start = performance.now(), seconds = () => (performance.now() - start) / 1000;
  const answer = new MutationObserver(() => {
    answer.disconnect();
    requestAnimationFrame(() => setTimeout(() => done(seconds())));
  });
  answer.observe(view, {subtree: true, childList: true, characterData: true}); })"""


def measure_in_browser(folder: Path, moves: int) -> dict[str, float]:
    """The same two figures as a person has them: the cell run until its view stands, a key on the
    update slider until the view has changed."""
    import nbformat

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "browser"))
    from lab import serve

    pages = folder / "pages"
    pages.mkdir()
    cells = [nbformat.v4.new_code_cell(cell.format(str(folder))) for cell in CELLS]
    kernel = dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"))
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), pages / "run.ipynb")
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if chromium is None:
        raise SystemExit(
            "no Chromium is installed: leave --browser out, or install it (Debian: apt-get "
            "install chromium)"
        )
    with serve(folder / "lab", pages, chromium) as lab:
        opened = lab.notebook("run.ipynb")
        view = opened.page.locator(".jp-OutputArea-output .widget-html").first
        view.wait_for()

        def reopen() -> None:
            opened.page.evaluate(
                "jupyterapp.commands.execute('notebook:clear-all-cell-outputs').then(() => null)"
            )
            opened.page.wait_for_function(
                "() => !document.querySelector('.jp-OutputArea-output .widget-html')"
            )
            start = time.perf_counter()
            opened.page.evaluate(
                "jupyterapp.commands.execute('notebook:run-all-cells').then(() => null)"
            )
            view.wait_for()
            times.append(time.perf_counter() - start)
            opened.settle()

        times: list[float] = []
        for _ in range(3):
            reopen()
        handle = opened.page.locator("input[type=range]").first
        moved = []
        for _ in range(moves):
            handle.focus()
            opened.page.evaluate(f"() => {{ window.answer = ({CHANGED})(); }}")
            opened.page.keyboard.press("ArrowLeft")
            moved.append(opened.page.evaluate("() => window.answer"))
            opened.settle()
    return dict(
        browser_open=round(median(times), 4),
        browser_move=round(median(moved), 4),
        browser_move_most=round(max(moved), 4),
    )


def main() -> None:
    "Make, measure, print."
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in dict(updates=200, episodes=512, tokens=53, moves=15, repeats=3).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--browser", action="store_true", help="measure in JupyterLab too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = make(Path(place), args.updates, args.episodes, args.tokens)
        found = measure(folder, args.moves, args.repeats)
        if args.browser:
            found |= measure_in_browser(folder, args.moves)
    print(
        json.dumps(
            dict(
                vars(args),
                **found,
                cpus=os.cpu_count(),
                threads=torch.get_num_threads(),
                python=platform.python_version(),
            )
        )
    )


if __name__ == "__main__":
    main()
