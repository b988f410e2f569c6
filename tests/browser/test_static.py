"""What is read without a kernel: the files that `view`, `browse` and `rlhf-nb view` write, opened
from the disk, and the outputs that the notebooks keep.

Nothing may leave the file: all requests of a page are heard, and stopped. Controls are found and
worked as on the pages in JupyterLab (controls.py); beside that, what the keyboard does is looked
at once more by its meaning. The hostile rollout is read here and, live, in JupyterLab.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest
import torch
from controls import CUT, Widget, nameless, violations, widgets
from lab import Lab
from notebooks import NOTEBOOKS
from playwright.sync_api import Browser
from test_viewer import write_run

from rlhf_nb.cli.view import view_command
from rlhf_nb.rollout import SIGNALS, Rollout
from rlhf_nb.ui.browser import browse
from rlhf_nb.ui.viewer import view
from rlhf_nb.ui.what_if import Recipe, what_if

NARROW, WIDE = 800, 1280
KERNEL = dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"))
# Each of these would be seen to have run, to have fetched, or to have stretched the page.
SCRIPT = "</script></style></textarea><script>window.hacked = 1; alert(1)</script>"
IMAGE = '<img src=http://example.invalid/x.png onerror="window.hacked = 1">'
EVIL = [
    SCRIPT,
    IMAGE,
    "'\"><svg onload='window.hacked = 1'>",
    "{{constructor.constructor('window.hacked = 1')()}}",
    "javascript:window.hacked=1",
    "line\r\nline\u2028line\ttab",
    "\u202eabc\u202c",
    "\u0645\u0631\u062d\u0628\u0627\u200f",
    "a" * 10_000,
    b"\xff\xfe\x80half \xf0\x9f".decode("utf-8", "replace"),
    "\ud83d",
    "&lt;b&gt; &amp; <b>",
    "]]><!--",
    "",
    " ",
    "$\\frac{1}{2}$",
]


# ---- What is looked at ----


class File:
    """A file in the browser, with all that it asked for, complained of, or asked the reader. Stands
    in for a notebook where controls are worked."""

    def __init__(self, browser: Browser, path: Path, width: int = WIDE):
        self.path, self.url, self.context = (
            path,
            path.resolve().as_uri(),
            browser.new_context(viewport=dict(width=width, height=1000), reduced_motion="reduce"),
        )
        self.page, self.asked, self.faults = self.context.new_page(), [], []
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.on("websocket", lambda ws: self.asked.append(ws.url))
        self.page.on(
            "pageerror", lambda error: self.faults.append(f"uncaught in the page: {error}"[:600])
        )
        self.page.on("console", lambda m: m.type == "error" and self.faults.append(m.text[:600]))
        self.page.on(
            "dialog",
            lambda dialog: (self.faults.append(f"a dialog: {dialog.message}"), dialog.dismiss()),
        )
        self.context.route(
            lambda url: urlsplit(url).scheme not in ("file", "data"), lambda route: route.abort()
        )
        self.page.goto(self.url)
        self.body = Widget(self, self.page.query_selector("body"), 1)

    def settle(self) -> None:
        "No kernel owes anything here."

    def examine(self, axe: str) -> None:
        self.page.evaluate(axe)

    def said(self) -> list[str]:
        """Requests but for the file itself and what lies inside it, faults, and whether a text was
        executed."""
        out = [
            f"asked for {url[:200]}"
            for url in self.asked
            if url.split("#")[0] != self.url and not url.startswith("data:")
        ]
        return (
            out + self.faults + ["a text was executed"] * bool(self.page.evaluate("window.hacked"))
        )

    def too_wide(self) -> list[str]:
        "What makes the page scroll sideways, or is cut off, in a narrow window."
        self.page.set_viewport_size(dict(width=NARROW, height=1000))
        least = self.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        told = [f"{least[0]} px where there are {least[1]}"] * (
            least[0] > least[1]
        ) + self.body.root.evaluate(CUT)
        self.page.set_viewport_size(dict(width=WIDE, height=1000))
        return told

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def reach(self, name: str, role: str = "button") -> None:
        "Come to a control by Tab alone."
        wanted = self.page.get_by_role(role, name=name, exact=True).element_handle()
        self.page.evaluate("document.activeElement.blur()")
        for _ in range(200):
            self.page.keyboard.press("Tab")
            if wanted.evaluate("e => e === document.activeElement"):
                return
        raise AssertionError(f"Tab does not come to {role} {name!r}")

    def text(self, selector: str) -> str:
        return " ".join(self.page.inner_text(selector).split())


def rollout(count: int, width: int, seed: int = 0, update: int = 7, **texts: object) -> Rollout:
    "Whole episodes of made-up numbers, no two alike."
    g, lengths = (
        torch.Generator().manual_seed(seed),
        torch.tensor([width - i % min(14, width) for i in range(count)]),
    )
    mask = torch.arange(width) < lengths[:, None]
    numbers = lambda *shape: torch.randn(*shape, generator=g)
    said = dict(
        prompts=[f"post {i} about word{i % 5}" for i in range(count)],
        responses=[f"answer {i}" for i in range(count)],
        columns=dict(reference=[f"ref {i}" for i in range(count)]),
        tokens=[[f"w{i}.{t}" for t in range(n)] for i, n in enumerate(lengths.tolist())],
    )
    r = Rollout(
        torch.ones(count, 4).long(),
        torch.ones(count, 4),
        torch.arange(count * width).view(count, width) * mask,
        mask,
        torch.arange(count) % 2 == 0,
        **{name: numbers(count, width) * mask for name in SIGNALS},
        raw_scores=numbers(count) * 3,
        scores=numbers(count),
        **said | texts,
        info=dict(update=update, episode=count * update, kl_coef=0.05),
    )
    return what_if(r, Recipe())


def hostile(update: int = 7) -> Rollout:
    "Every kind of bad text in every place that holds text."
    n = len(EVIL)
    turned = [[EVIL[(i + t) % n] for t in range(n)] for i in range(n)]
    r = rollout(
        n,
        n,
        update=update,
        prompts=list(EVIL),
        responses=EVIL[1:] + EVIL[:1],
        columns={IMAGE: EVIL[2:] + EVIL[:2]},
        tokens=turned,
    )
    return r.with_(tokens=[row[:k] for row, k in zip(turned, r.mask.sum(1).tolist())])


def run_of(folder: Path, updates: int, make: Callable[[int], Rollout]) -> Path:
    "A run that kept its rollouts, and logged a line an update."
    (folder / "rollouts").mkdir(parents=True)
    for u in range(updates):
        make(u).save(folder / "rollouts" / f"update-{u:05d}.safetensors")
    lines = [
        {
            "stage": "ppo",
            "step": u + 1,
            "episode": 6 * (u + 1),
            "objective/raw_scores": float(u),
            "objective/kl": 2.0 * u,
            "tokens/response_length": 7.0 + u,
        }
        for u in range(updates)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.fixture
def read(browser: Browser) -> Iterator[Callable[[Path], File]]:
    "Opens files; at the end none of them may have asked for anything, or complained."
    opened: list[File] = []

    def make(path: Path) -> File:
        opened.append(File(browser, path))
        return opened[-1]

    yield make
    told = [f"{file.path.name}: {each}" for file in opened for each in file.said()]
    for file in opened:
        file.context.close()
    assert not told, told


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each: of a rollout of 64 episodes of 53 tokens, of a run, and what `rlhf-nb view`
    writes of a whole run."""
    folder = tmp_path_factory.mktemp("files")
    r = rollout(64, 53)
    run = run_of(folder / "run", 4, lambda u: rollout(6, 8, seed=u, update=u))
    whole = write_run(folder / "whole", curves=True)
    view_command([str(whole), "--no-browser"])
    return dict(
        rollout=view(r, now=r.logprobs + 0.1 * r.values, entropy=r.values.abs()).save_html(
            folder / "rollout.html"
        ),
        run=browse(run).save_html(folder / "run.html"),
        command=whole / "rollouts.html",
        report=whole / "report.html",
    )


# ---- What is in them ----

ONE_OF_EACH = pytest.mark.parametrize("kind", ["rollout", "run", "command", "report"])


# catches: a file that grows with its markup, or holds a script, a font or a picture that it could
# fetch
def test_64_episodes_of_53_tokens_with_all_signals_are_small(
    files: dict[str, Path], read: Callable
):
    assert files["rollout"].stat().st_size < 2_000_000
    names = read(files["rollout"]).page.locator("#signals button").all_inner_texts()
    assert {name.split(maxsplit=1)[1] for name in names} == {
        *SIGNALS,
        "ratio - 1",
        "clipped",
        "entropy",
    }


# catches: a control of a file that is dead, nameless, or for the mouse alone; an error on the way
# (`read` hears it)
@ONE_OF_EACH
def test_every_control_of_a_file_is_answered(files: dict[str, Path], read: Callable, kind: str):
    file = read(files[kind])
    assert not (told := nameless([file.body]) + file.body.beyond_tab()), told
    assert len(file.body.controls()) > 2
    if kind == "report":
        return  # its folds are the browser's own
    assert not (told := file.body.dead()), told


# catches: pale ink, a table without headers, a field without a label, a page that is wider than a
# narrow window
@ONE_OF_EACH
def test_axe_finds_nothing_serious_in_a_file(
    files: dict[str, Path], read: Callable, axe: str, kind: str
):
    file = read(files[kind])
    for fold in file.page.locator("details > summary").all():
        fold.click()
    file.examine(axe)
    assert not (told := violations([file.body]) + file.too_wide()), told


# catches: a picture of a page that nobody has looked at
@ONE_OF_EACH
def test_pictures_of_a_file(files: dict[str, Path], read: Callable, pictures: Path, kind: str):
    file = read(files[kind])
    for width in (NARROW, WIDE):
        file.page.set_viewport_size(dict(width=width, height=1000))
        file.page.screenshot(path=pictures / f"file-{kind}-{width}.png", full_page=True)


# ---- By keyboard, by what it means ----


# catches: keys that move by two or the wrong way, an end that is not followed by the beginning, a
# number under the wrong token
def test_episodes_by_keyboard(files: dict[str, Path], read: Callable):
    file, r = read(files["rollout"]), rollout(64, 53)
    where = lambda: (file.text("#where"), file.text("#facts").split(" of ")[0])
    for keys, wanted in (
        (["ArrowRight"], 2),
        (["n", "n"], 4),
        (["p"], 3),
        (["ArrowLeft"] * 3, 64),
        (["n"], 1),
    ):
        file.press(*keys)
        assert where() == (f"{wanted} of 64", f"Episode {wanted - 1}")
    for name, key, wanted in (
        ("next ▶", "Enter", 2),
        ("next ▶", "Space", 3),
        ("◀ previous", "Enter", 2),
    ):
        file.reach(name)
        file.press(key)
        assert where() == (f"{wanted} of 64", f"Episode {wanted - 1}")
    file.reach("Go to", "slider")
    file.press("End", "ArrowLeft")
    assert where() == ("63 of 64", "Episode 62")
    assert file.page.locator("#strip li bdi").all_inner_texts() == r.tokens[62]


# catches: a digit that chooses the neighbour, a button that changes its look and not the numbers,
# the focus lost when the buttons are made anew
def test_signals_by_keyboard(files: dict[str, Path], read: Callable):
    file, r = read(files["rollout"]), rollout(64, 53)
    names = [
        text.split(maxsplit=1)[1] for text in file.page.locator("#signals button").all_inner_texts()
    ]

    def shown(name: str) -> bool:
        numbers = [
            float(text.replace("−", "-"))
            for text in file.page.locator("#strip li b").all_inner_texts()
        ]
        return numbers == pytest.approx(
            getattr(r, name)[0].tolist(), abs=0.0051
        ) and file.page.locator("#signals [aria-pressed=true]").inner_text().endswith(f" {name}")

    for name in ("values", "returns", "kl"):
        file.press(str(names.index(name) + 1))
        assert shown(name)
    file.reach(f"{names.index('rewards') + 1} rewards")
    file.press("Space")
    assert shown("rewards") and file.page.evaluate("document.activeElement.textContent").endswith(
        "rewards"
    )


# catches: a list sorted as text, a second press that does not turn it round, a place in the middle
# of the new list
def test_sorting_by_keyboard(files: dict[str, Path], read: Callable):
    file, r = read(files["rollout"]), rollout(64, 53)
    order = r.scores.argsort().tolist()
    file.press("n", "n")
    for first, last, arrow in ((order[0], order[-1], ""), (order[-1], order[0], " ↑")):
        file.reach(f"score{arrow}")
        file.press("Enter")
        assert file.text("#where") == "1 of 64" and file.text("#facts").startswith(
            f"Episode {first} of"
        )
        file.page.evaluate("document.activeElement.blur()")
        file.press("p")
        assert file.text("#facts").startswith(f"Episode {last} of")
        file.press("n")


# catches: a search that looks at the prompt or at the answer alone, that minds capitals, or takes
# the text for a pattern; a filter that forgets the search; keys that move while one types
def test_finding_and_filtering_by_keyboard(files: dict[str, Path], read: Callable):
    file = read(files["rollout"])
    file.reach("Find", "searchbox")
    for text, count in (
        ("WORD3", 13),
        ("answer 63", 1),
        ("ref 12", 1),
        ("(", 0),
        ("no such text", 0),
        ("n1.", 0),
        ("", 64),
    ):
        file.press("Control+A", "Delete")
        file.page.keyboard.type(text)
        assert file.text("#where") == f"{min(1, count)} of {count}", text
        assert ("No episode is left" in file.text("#facts")) == (count == 0)
    file.page.keyboard.type("word3")
    file.reach("no stop token", "checkbox")
    file.press("Space")
    assert file.text("#where") == "1 of 7"
    file.press("n")
    assert file.text("#facts").startswith("Episode 13 of") and file.text("#where") == "2 of 7"


# catches: an update that one cannot come to, or come back from; a suspect whose button leads
# elsewhere; the first update shown where the last was meant
def test_updates_by_keyboard(files: dict[str, Path], read: Callable):
    file = read(files["run"])
    update = lambda: int(file.text("#facts").split("update ")[1].split()[0])
    assert update() == 3
    for key, wanted in ((",", 2), (".", 3), (".", 0), (",", 3)):
        file.press(key)
        assert update() == wanted
    file.reach("Update 1")
    file.press("Enter")
    assert update() == 1
    file.press("n")
    assert file.text("#facts").startswith("Episode 1 of")


# catches: a fold that is closed again by the next step, a table of another episode
def test_all_signals_stay_open(files: dict[str, Path], read: Callable):
    file, r = read(files["rollout"]), rollout(64, 53)
    file.page.locator("#all > summary").focus()
    file.press("Enter")
    file.page.wait_for_selector("#table table")
    file.press("n")
    assert file.page.locator("#table thead th").all_inner_texts() == r.tokens[1]
    assert {*file.page.locator("#table tbody th").all_inner_texts()} == {
        *SIGNALS,
        "ratio - 1",
        "clipped",
        "entropy",
    }


# ---- Hostile text ----


# catches: text that becomes markup, runs, fetches, ends the data of a page, reorders its
# neighbours, or makes the page scroll sideways
@pytest.mark.parametrize("kind", ["rollout", "run", "command"])
def test_hostile_text_in_a_file(tmp_path: Path, read: Callable, axe: str, kind: str):
    run = run_of(tmp_path / SCRIPT.replace("/", "_")[:60], 3, hostile)
    if kind == "command":
        view_command([str(run), "--no-browser"])
    path = {
        "rollout": lambda: view(hostile()).save_html(tmp_path / "evil.html"),
        "run": lambda: browse(run).save_html(tmp_path / "run.html"),
        "command": lambda: run / "rollouts.html",
    }[kind]()
    file = read(path)
    for fold in file.page.locator("details > summary").all():
        fold.click()
    seen = set()
    for _ in EVIL:
        seen |= {*file.page.locator("#strip li bdi").all_inner_texts()}
        assert not file.too_wide() and not file.said()
        file.press("n")
    assert (
        SCRIPT in {text.replace("␣", " ") for text in seen}
        and "a" * 10_000 in seen
        and any("\ufffd" in text for text in seen)
    )
    assert any("⟨U+202E⟩" in text for text in seen) and not any("\u202e" in text for text in seen)
    file.examine(axe)
    assert not (told := violations([file.body])), told
    assert not file.page.locator("#app script, #app img, #app svg, #app b b, #plain script").count()


LIVE = """
import torch
from rlhf_nb.rollout import Rollout
from rlhf_nb.ui.browser import browse
from rlhf_nb.ui.viewer import view
view(Rollout.load({path!r}))
"""


# catches: the same in the live viewer and in the live browser, where ipywidgets and Lab read the
# text as well
def test_hostile_text_in_jupyterlab(lab: Lab, axe: str, tmp_path: Path):
    run = run_of(tmp_path / "run", 2, hostile)
    cells = [
        LIVE.format(path=str(run / "rollouts" / "update-00001.safetensors")),
        f"browse({str(run)!r})",
    ]
    nbformat.write(
        nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=KERNEL
        ),
        lab.folder / "hostile.ipynb",
    )
    page = lab.notebook("hostile.ipynb")
    dialogs: list[str] = []
    page.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    found = widgets(page)
    assert len(found) == 2
    page.widen(NARROW, 3000)
    for widget in found:
        seen = ""
        for _ in EVIL:
            for fold in widget.root.query_selector_all("details:not([open]) > summary"):
                fold.click()
            seen += widget.root.inner_text().replace("␣", " ")
            assert not (told := widget.root.evaluate(CUT)), told
            button = next(c["key"] for c in widget.controls() if "next" in c["key"])
            widget.element(button).focus()
            page.page.keyboard.press("Enter")
            page.settle()
        assert (
            SCRIPT in seen
            and "a" * 10_000 in seen.replace("\n", "")
            and "⟨U+202E⟩" in seen
            and "\ufffd" in seen
            and "\u202e" not in seen
        )
        assert not widget.root.query_selector_all("script, .widget-html-content img")
    page.examine(axe)
    told = violations(found) + page.wire.faults() + page.console + page.strangers
    assert not told and not dialogs and not page.page.evaluate("window.hacked"), told
    page.close()


# ---- What the notebooks keep ----


# catches: a kept output that runs a script, fetches something, or cannot be read without colours, a
# kernel or good eyes
@pytest.mark.parametrize("name", list(NOTEBOOKS))
def test_kept_outputs(tmp_path: Path, read: Callable, axe: str, name: str):
    cells = json.loads(NOTEBOOKS[name].read_text(encoding="utf-8"))["cells"]
    kept = [
        "".join(output.get("data", {}).get("text/html", ""))
        for cell in cells
        for output in cell.get("outputs", [])
    ]
    path = tmp_path / "kept.html"
    frame = (
        '<!doctype html><html lang="en"><head><meta '
        'charset="utf-8"><title>kept</title></head><body><main>{}</main></body></html>'
    )
    path.write_text(
        frame.format(
            "".join(
                '<div style="overflow-x:auto" tabindex="0" role="region" aria-label="output '
                f'{i}">{markup}</div>'
                for i, markup in enumerate(kept)
                if markup
            )
        ),
        encoding="utf-8",
    )
    file = read(path)
    file.examine(axe)
    assert not (told := violations([file.body])), f"{name}: {told}"


# ---- The tests of the files, put to the test ----

BAD = {  # what is wrong with a file, and a part of what is said of it
    "fetches": (
        "<img alt='' src='http://example.invalid/x.png'>",
        "asked for http://example.invalid",
    ),
    "calls": (
        "<script>fetch('http://example.invalid/count')</script>",
        "asked for http://example.invalid/count",
    ),
    "throws": (
        "<button onclick='throw new Error(\"planted\")'>press</button>",
        "uncaught in the page: planted",
    ),
    "executes": ("<img alt='' src='data:,' onerror='window.hacked = 1'>", "a text was executed"),
    "asks": ("<script>alert(1)</script>", "a dialog: 1"),
    "is wide": (f"<p>{'a' * 10_000}</p>", "px where there are"),
    "is dead": ("<button>press</button>", 'button "press" by keyboard: nothing happens'),
    "is pale": ("<p style='color:#bbb'>pale</p>", "color-contrast"),
}


# catches: tests of the files that pass whatever a file does
@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_found(browser: Browser, axe: str, tmp_path: Path, fault: str):
    markup, wanted = BAD[fault]
    path = tmp_path / "bad.html"
    path.write_text(
        '<!doctype html><html lang="en"><head><meta '
        f'charset="utf-8"><title>bad</title></head><body><main><p>text</p>{markup}</main></body></html>'
    )
    file = File(browser, path)
    file.examine(axe)
    told = file.body.dead() + violations([file.body]) + file.too_wide() + file.said()
    file.context.close()
    assert any(wanted in one for one in told), told
