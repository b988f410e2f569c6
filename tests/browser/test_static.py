"""What is read without a kernel: the files that `view`, `browse` and `rlhf-nb view` write, opened
from the disk, and the outputs that the notebooks keep.

Nothing may leave the file: all requests of a page are heard, and stopped. Controls are found and
worked as on the pages in JupyterLab (controls.py); beside that, what the keyboard does is looked
at once more by its meaning. The hostile rollout is read here and, live, in JupyterLab.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from controls import CUT, Widget, misfits, nameless, violations, widgets
from lab import Lab, Notebook
from notebooks import NOTEBOOKS
from playwright.sync_api import Page, expect
from test_browse import write
from test_turns import record, spoiled
from test_viewer import make, write_run

from rlhf_nb.cli.view import view_command
from rlhf_nb.masks import right_pad
from rlhf_nb.rollout import SIGNALS, Rollout, Sample, texts_of
from rlhf_nb.training.model_loading import train_bpe_tokenizer
from rlhf_nb.ui.loop import STEPS, loop_picture
from rlhf_nb.ui.viewer import browse, view
from rlhf_nb.ui.viz import signal_table, token_strip
from rlhf_nb.ui.what_if import what_if
from rlhf_nb.update import Objective

NARROW, WIDE = 800, 1280
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

    def __init__(self, page: Page):
        self.page, self.asked, self.faults = page, [], []
        page.on("request", lambda r: self.asked.append(r.url))
        page.on("websocket", lambda ws: self.asked.append(ws.url))
        page.on("pageerror", lambda e: self.faults.append(f"uncaught in the page: {e}"[:600]))
        page.on("console", lambda m: m.type == "error" and self.faults.append(m.text[:600]))
        page.on("dialog", lambda d: (self.faults.append(f"a dialog: {d.message}"), d.dismiss()))

    def open(self, path: Path) -> File:
        "Go to a file, and hear what it asks for from then on."
        self.path, self.url = path, path.resolve().as_uri()
        self.asked.clear(), self.faults.clear()
        self.go("#rollouts")
        self.body = Widget(self, self.page.query_selector("body"), 1)
        return self

    def go(self, place: str = "") -> None:
        "To a place of the file, as from elsewhere."
        self.page.goto("about:blank")
        self.page.goto(self.url + place)
        if self.page.locator("#app").count():
            self.page.wait_for_selector("#app:not([hidden])")

    def settle(self) -> None:
        "No kernel owes anything here."

    def examine(self, axe: str) -> None:
        self.page.evaluate(axe)

    def said(self) -> list[str]:
        "Requests but for the file and what is inside it, faults, and whether a text was executed."
        known = ("data:", self.url)
        out = [f"asked for {url[:200]}" for url in self.asked if not url.startswith(known)]
        ran = bool(self.page.evaluate("window.hacked"))
        return out + self.faults + ["a text was executed"] * ran

    def too_wide(self) -> list[str]:
        "What makes the page scroll sideways, or is cut off, in a narrow window."
        self.size(NARROW, 1000)
        widths = "(e => [e.clientWidth, e.scrollWidth])(document.documentElement)"
        there, needed = self.page.evaluate(widths)
        told = [f"{needed} px where there are {there}"] * (needed > there)
        told += self.body.root.evaluate(CUT)
        self.size(WIDE, 1000)
        return told

    def each(self, selector: str, script: str) -> list:
        return self.page.locator(selector).evaluate_all(script)

    def size(self, width: int, height: int) -> None:
        self.page.set_viewport_size(dict(width=width, height=height))

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

    # What a reader shows.

    def wait(self, text: str) -> None:
        "Until an episode is shown."
        expect(self.page.locator(".page > .facts")).to_contain_text(text)

    def episode(self) -> int:
        return int(self.text(".page > .facts").split("pisode ")[1].split()[0])

    def update(self) -> int:
        return int(self.text(".page > .facts").split("pdate ")[1].split(",")[0])

    def tokens(self) -> list[str]:
        return self.page.locator(".body > .text .token").all_inner_texts()

    def signals(self) -> list[str]:
        return self.each(".signals option", "all => all.map(e => e.value).filter(Boolean)")

    def signal(self) -> str:
        return self.page.locator(".signals").input_value()

    def listed(self) -> list[int]:
        "The episodes in the list, once all of them are drawn: what is out of sight comes last."
        self.page.wait_for_function(
            "() => document.querySelectorAll('.rows li').length === "
            "(parseInt(document.querySelector('.side .count').textContent) || 0)"
        )
        return [int(x) for x in self.each(".rows li", "all => all.map(e => e.dataset.id)")]

    def text(self, selector: str) -> str:
        return " ".join(self.page.inner_text(selector).split())


def rollout(count: int, width: int, seed: int = 0, update: int = 7, **texts: object) -> Rollout:
    "Whole episodes of made-up numbers, no two alike."
    lengths = [width - i % min(14, width) for i in range(count)]
    said = dict(
        prompts=[f"post {i} about word{i % 5}" for i in range(count)],
        responses=[f"answer {i}" for i in range(count)],
        tokens=[[f"w{i}.{t}" for t in range(n)] for i, n in enumerate(lengths)],
        info=dict(update=update, episode=count * update, kl_coef=0.05),
    )
    r = make(lengths, width, seed, **said | texts)
    engine = r.logprobs + 0.01 * r.engine_logprobs
    return what_if(r.with_(engine_logprobs=engine, raw_scores=3 * r.raw_scores), Objective())


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
    return write(folder, updates, make=make)


POST = (
    "SUBREDDIT: r/work\n\nTITLE: need some help\n\nPOST: my boss sold my tent. it was not easter. "
    "this was on monday. they were bored. i feel sad. should i sue?\n\nTL;DR:"
)


@pytest.fixture
def read(fresh: Callable[..., Page]) -> Iterator[Callable[[Path], File]]:
    "Opens files; at the end none of them may have asked for anything, or complained."
    opened: list[File] = []

    def make(path: Path) -> File:
        opened.append(File(fresh()).open(path))
        return opened[-1]

    yield make
    told = [f"{file.path.name}: {each}" for file in opened for each in file.said()]
    assert not told, told


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each: of a rollout of 64 episodes of 53 tokens, of a run, and what `rlhf-nb view`
    writes of a whole run."""
    folder = tmp_path_factory.mktemp("files")
    r = rollout(64, 53)
    run = run_of(folder / "run", 4, lambda u: rollout(6, 8, seed=u, update=u))
    whole = write_run(folder / "whole")
    view_command([str(whole), "--no-browser"])
    return dict(
        rollout=view(r, now=r.logprobs + 0.1 * r.values, entropy=r.values.abs()).save_html(
            folder / "rollout.html"
        ),
        run=browse(run).save_html(folder / "run.html"),
        demo=whole / "rollouts.html",
    )


# ---- What is in them ----


# catches: a control, or a box that scrolls and so cuts a line, on paper
@pytest.mark.parametrize("kind", ["rollout", "demo"])
def test_a_file_on_paper(files: dict[str, Path], read: Callable, kind: str):
    file = read(files[kind])
    file.press("t")
    file.page.emulate_media(media="print")
    shown = "all => all.filter(e => e.offsetHeight).map(e => e.outerHTML.slice(0, 200))"
    controls = "main :is(button:not(.suspects *), select, input, nav)"  # a suspect is a sentence
    assert not file.page.locator(controls).evaluate_all(shown)
    cut = """all => all.filter(e => e.offsetHeight && getComputedStyle(e).overflow !== 'visible'
        && (e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1)).map(e => e.className)"""
    assert not file.each("main *", cut)


# catches: pale ink, a table without headers, a field without a label, a page that is wider than a
# narrow window, scores of a report out of sight on a phone; a control that is dead, nameless, or for
# the mouse alone; an error on the way (`read` hears it)
@pytest.mark.parametrize("kind", ["rollout", "run", "demo"])
def test_a_file_is_sound(files: dict[str, Path], read: Callable, axe: str, kind: str):
    file = read(files[kind])
    assert not (told := nameless([file.body]) + file.body.beyond_tab()), told
    folds = file.page.query_selector_all("details:not([open]) > summary")
    for fold in folds:
        fold.evaluate("e => e.click()")  # an open menu may lie on the next one
    file.press(*"xebwt")  # what the menu has, chosen; what-if, then the table, opened as well
    for scheme, dark in (("light", False), ("dark", True)):
        file.page.emulate_media(color_scheme=scheme)
        ground = file.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark == all(int(x) < 64 for x in re.findall(r"\d+", ground)[:3]), ground
        for _ in range(1 + (kind == "demo")):
            file.press("r")  # the other view, where there is one
            file.examine(axe)
            assert not (told := violations([file.body]) + file.too_wide()), (scheme, told)
    file.press("r")
    file.size(400, 800)
    cards = file.page.locator(".post .wide")
    wider = cards.evaluate_all(
        "all => all.map(e => [e.clientWidth > 0, e.scrollWidth - e.clientWidth])"
    )
    assert wider == [[True, 0]] * (9 if kind == "demo" else 0), wider
    file.press("r")
    file.size(WIDE, 1000)
    for fold in folds:
        fold.evaluate("e => e.click()")
    file.press(*"txeb")
    assert len(file.body.controls()) > 2
    assert not (told := file.body.dead()), told


# catches: a first screen without one of its three answers, rollouts below it and not a key away, an
# arrow that turns episodes that nobody sees, a link to an episode or a part of the result that ends
# elsewhere, a reload that leaves the view; an answer that moves when a panel opens, a chosen row or a
# tint out of sight, more sizes and weights of letters than five and eight
def test_a_result_and_its_rollouts_are_two_views(files: dict[str, Path], read: Callable):
    file = read(files["demo"])
    file.size(WIDE, 800)
    answer, board = file.page.locator(".body > .text"), file.page.locator(".board")
    file.press("n")
    assert (at := file.episode()) == 2  # after the suspect with which it begins
    file.press("r", "n", "ArrowDown")
    expect(answer).not_to_be_visible()
    for place in ("Did it work?", "What changed", "Where to look", "A typical post", "points"):
        expect(board.get_by_text(place).first).to_be_in_viewport(ratio=1)
    assert board.get_by_role("link").count() == 3
    box = board.bounding_box()
    assert box["y"] + box["height"] <= 800 and file.page.evaluate(LETTERS) == []
    file.page.reload()
    expect(board).to_be_visible()
    file.press("?")
    expect(file.page.get_by_text("closes what is open")).to_be_visible()
    file.press("?", "r")
    file.page.get_by_role("link", name="The worst summary").click()
    expect(file.page.get_by_role("heading", name="Worst:")).to_be_in_viewport()
    file.press("r")
    assert file.episode() == 1 != at  # a page that is opened anew begins at its suspect
    tops = []
    for keys in ("", "t", "w", "g", "s", "?", "n", "n"):
        file.press(*keys)
        tops.append(answer.bounding_box()["y"])
        expect(file.page.locator(".rows [aria-selected=true]")).to_be_in_viewport()
    assert len({*tops}) == 1 and tops[0] < 500 and file.page.evaluate("scrollY") == 0
    tint = "all => all.some(e => !e.style.backgroundColor.includes(' 0%'))"
    assert file.each(".body .token", tint) and file.page.evaluate(LETTERS) == []
    file.go("#update=2&episode=3")
    expect(answer).to_be_in_viewport()
    assert (file.update(), file.episode()) == (2, 3)


# Sizes and weights of the letters of a page, where there are more than five, or eight pairs.
LETTERS = """() => { const pairs = new Set(), sizes = new Set();
  for (const e of document.querySelectorAll('main *')) if ([...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) {
    const { fontSize, fontWeight } = getComputedStyle(e); sizes.add(fontSize); pairs.add(`${fontSize} ${fontWeight}`); }
  return sizes.size > 5 || pairs.size > 8 ? [...pairs].sort() : []; }"""


# ---- By keyboard, by what it means ----


# catches: keys that move by two or the wrong way, an end that is not followed by the beginning,
# tokens of another episode, a list that does not follow
def test_episodes_by_keyboard(files: dict[str, Path], read: Callable):
    file, r = read(files["rollout"]), rollout(64, 53)
    for keys, wanted in (
        (["ArrowRight"], 1),
        (["n", "n"], 3),
        (["p"], 2),
        (["ArrowUp"] * 3, 63),
        (["n"], 0),
        (["ArrowDown", "ArrowLeft", "p", "p"], 62),
    ):
        file.press(*keys)
        assert file.episode() == wanted
        assert file.page.locator(".rows [aria-selected=true]").get_attribute("data-id") == str(
            wanted
        )
    assert file.tokens() == r.tokens[62]
    file.page.locator('.rows [data-id="5"]').click()
    assert file.episode() == 5
    file.reach("Episodes", "listbox")
    file.press("ArrowDown")
    assert file.episode() == 6
    active = file.page.locator(".rows").get_attribute("aria-activedescendant")
    assert file.page.locator(f"#{active}").get_attribute("data-id") == "6"


# catches: a digit that chooses the neighbour, a button that changes its look and not the numbers, a
# strip of the signal that is behind the text, one that cannot be taken away, the largest of an
# answer for that of the update, one that loses its sign
def test_signals_by_keyboard(files: dict[str, Path], read: Callable):
    file, r = read(files["rollout"]), rollout(64, 53)
    names = file.signals()
    assert names[0] == "ratio - 1"  # the one that is shown first
    numbers = lambda: [
        token.get_attribute("data-number") for token in file.page.locator(".text .token").all()
    ]
    for name in ("values", "returns", "kl", "rewards"):
        file.press(str(names.index(name) + 1))
        assert file.signal() == name
        for told, x in zip(numbers(), getattr(r, name)[0].tolist(), strict=True):
            if told == "≈0":
                assert abs(x) < 0.005
            else:
                assert float(told.replace("−", "-")) == pytest.approx(x, abs=0.0051)
    kl = str(names.index("kl") + 1)
    file.press(kl, "b", str(names.index("advantages") + 1), "b", str(names.index("values") + 1))
    strips = lambda: file.each(
        ".body .token",
        "all => all.map(e => e.style.getPropertyValue('--beneath').match(/--(up|down)/g) ?? [])",
    )
    wanted = zip(r.kl[0].tolist(), r.advantages[0].tolist(), r.mask[0].tolist())
    assert strips() == [
        ["--up" if x > 0 else "--down" for x in two] for *two, real in wanted if real
    ]
    assert "Beneath, from the top: KL to the reference" in file.text(".head > .legend")
    file.press(kl, "b", "L")
    assert [len(one) for one in strips()] == [1] * len(strips())
    place = int(r.kl.abs().argmax())
    assert file.episode() == place // 53
    assert file.text(".bubble").startswith(f"w{place // 53}.{place % 53} token")


# catches: a scale for each answer, one outlier that bleaches all else, a scale that nobody tells, a
# negative number known by its colour alone, log-probs that are all blue, blue for a link or a fact
def test_one_scale_for_an_update(tmp_path: Path, read: Callable):
    r = rollout(2, 300).with_(objective=None, engine_logprobs=None)
    kl = torch.full((2, 300), 0.2) * r.mask
    kl[0, 7], kl[1, 1:] = 0.05, 0.05
    kl[0, 3], kl[:, 5] = 1000.0, -0.2
    now = r.logprobs + torch.where(torch.arange(300) % 2 == 0, 0.5, 0.01)
    seen = view(r.with_(kl=kl, logprobs=-r.values.abs(), advantages=r.mask.float()), now=now)
    file = read(seen.save_html(tmp_path / "scale.html"))
    colour = lambda t: (
        file.page.locator(".text .token")
        .nth(t)
        .evaluate("e => getComputedStyle(e).backgroundColor")
    )
    clipped = file.each(".text .clipped", "all => all.length")
    assert file.signal() == "ratio - 1" and 0 < clipped < 300
    file.press(str(file.signals().index("kl") + 1))
    first = [colour(t) for t in (0, 3, 5, 7)]
    assert file.text(".head > .legend") == "−0.20 0 +0.20. Bold: beyond it."
    assert file.page.locator(".text .below").count() == 1
    file.press("n")
    assert [colour(t) for t in (0, 0, 5, 7)] == first and len({*first}) == 3
    blue = first[2]
    file.press(str(file.signals().index("logprobs") + 1))
    assert file.page.locator(".head > .legend .falling").count() == 1
    assert not file.page.locator(".text .below").count()
    file.page.locator(".text .token").first.hover()
    share = 100 * math.exp(-abs(r.values[1, 0].item()))
    assert re.search(rf"log-prob −[\d.]+ \({share:.0f}", file.text(".bubble"))
    inks = "all => all.map(e => { const s = getComputedStyle(e); return [s.color, s.backgroundColor]; })"
    others = file.page.locator("summary, a, button, [aria-selected=true], .text .token")
    assert blue not in {one for both in others.evaluate_all(inks) for one in both}


# catches: a number that the mouse alone can ask for, that of the next token, one that is rounded
def test_the_number_behind_a_token(files: dict[str, Path], read: Callable):
    file, r = read(files["rollout"]), rollout(64, 53)
    file.press(str(file.signals().index("values") + 1))
    told = lambda: file.text(".bubble").replace("−", "-")
    wanted = lambda t: f"value {r.values[0, t].item():.7g}"
    file.page.locator(".text .token").nth(7).hover()
    assert told().startswith("w0.7 token 8:") and wanted(7) in told()
    file.page.mouse.move(0, 0)
    assert file.page.locator(".bubble").is_hidden()
    file.page.locator(".text .token").first.focus()
    assert wanted(0) in told()
    file.press("ArrowRight", "ArrowRight")
    assert wanted(2) in told() and file.episode() == 0
    file.press("ArrowLeft")
    assert wanted(1) in told()


# catches: a replacement mark for a character of three tokens; a token of it that has no place and no
# number; a prompt as one string, with the marks of its template
def test_a_character_of_several_tokens_and_turns(tmp_path: Path, read: Callable):
    talk = [dict(role="user", content="Say <b>你好</b>."), dict(role="assistant", content="Yes?")]
    tokens = [["n", "ï", "", "你", "", "", "!", ""]]
    said = dict(prompts=["<|im|>x"], conversations=[talk], responses=["nï你!"], tokens=tokens)
    r = rollout(1, 8, **said)
    file = read(view(r).save_html(tmp_path / "one.html"))
    assert file.page.locator(".text .token").all_inner_texts() == [*"nï你!", ""]
    assert file.page.locator(".text .empty").count() == 1
    file.press(str(file.signals().index("values") + 1))
    file.page.locator(".text .token").first.focus()
    for name, its in (("n", [0]), ("ï", [1, 2]), ("你", [3, 4, 5]), ("!", [6]), ("∅", [7])):
        lines = file.page.locator(".bubble > div").all_inner_texts()
        for k, (t, told) in enumerate(zip(its, lines, strict=True)):
            part = f" (part {k + 1} of {len(its)})" if len(its) > 1 else ""
            assert told.startswith(f"{name}{part} token {t + 1}:")
            assert f"value {r.values[0, t].item():.7g}" in told.replace("−", "-")
        file.press("ArrowRight")
    assert file.page.locator(".turn").all_inner_texts() == [
        "user\nSay <b>你好</b>.",
        "assistant\nYes?",
    ]
    assert file.page.locator(".prompt details").text_content() == "As the model reads it<|im|>x"


# catches: a token that the policy did not write in the colour of one that it did, or taken for the
# largest of an answer
def test_masked_tokens(tmp_path: Path, read: Callable):
    row = dict(tokens=["a ", "<tool>", " b"], token_mask=[1, 0, 1], logprobs=[-1.0, -9.0, -2.0])
    file = read(view([row | dict(prompt="p")]).save_html(tmp_path / "one.html"))
    tokens = file.page.locator(".text .token")
    assert tokens.evaluate_all("all => all.map(e => e.classList.contains('masked'))") == [0, 1, 0]
    grounds = tokens.evaluate_all("all => all.map(e => getComputedStyle(e).backgroundColor)")
    assert grounds[1] == "rgba(0, 0, 0, 0)" != grounds[2]
    assert "Grey: masked" in file.text(".head > .legend")
    for key in "lL":  # the masked token's log-prob is the lowest
        file.press(key)
        assert file.text(".bubble").startswith("b token 3")


SCRIPTS = [
    "Code:\n```python\ndef f(n):\n\ti, j = [], 0\n    return [i  for i in range(n)]\n```\n∑ done",
    "| city | since |\n|------|-------|\n| 東京 | 1457 |\n\nBig. 🎉",
    "مرحبا بالعالم كله\nthen English, سلام inside",
    "नमस्ते क्षत्रिय ज्ञान",
    "你好！\u3000完成了。\n\n1. 首先",
    "👨\u200d👩\u200d👧 says 👋🏽 e\u0301",
    "",
    " ",
    "cut in a character: 茶",
]


def bytewise(texts: list[str]) -> tuple[Rollout, list[str]]:
    "Answers in tokens of a byte-level tokenizer, and their whole text; the last one is cut off."
    tokenizer = train_bpe_tokenizer(["a city since def return for i in range 你好 مرحبا"] * 9, 290)
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    rows[-1] = rows[-1][:-2]
    ids, mask = right_pad(rows, 0)
    drawn = Sample(ids, mask, torch.tensor([True] * (len(rows) - 1) + [False]))
    responses, tokens = texts_of(tokenizer, drawn, [tokenizer.eos_token_id])
    r = rollout(len(rows), ids.shape[1], tokens=tokens, responses=responses)
    r = r.with_(mask=mask, stopped=drawn.stopped, **{k: getattr(r, k) * mask for k in SIGNALS})
    return what_if(r, Objective()), [tokenizer.decode(row) for row in rows]


# catches: a token decoded by itself, a mark in the text's place, a blank that is lost or is a mark,
# words of a script from right to left in reverse, a search for what the page does not hold
def test_every_character_of_an_answer_is_there_in_reading_order(tmp_path: Path, read: Callable):
    r, texts = bytewise(SCRIPTS)
    file = read(view(r).save_html(tmp_path / "real.html"))
    find = file.page.get_by_label("Find")
    lefts = "all => all.map(e => e.getBoundingClientRect().left)"
    for i, text in enumerate(texts):
        assert file.episode() == i
        assert file.page.locator(".body > .text").evaluate("e => e.textContent") == text
        assert text == SCRIPTS[i] + "<eos>" or (i == len(texts) - 1 and text.endswith("\ufffd"))
        if i == 0:
            assert file.page.locator(".code .line").count() == 5
            blanks = file.page.locator(".text .blank").all_text_contents()
            assert len(blanks) > 5 and not "".join(blanks).strip(), blanks
        if i == 2:
            around = file.page.locator(".body > .text").bounding_box()
            for line, way in ((0, -1), (1, 1)):
                where = file.page.locator(".text .line").nth(line).locator(".token")
                steps = [way * (b - a) for a, b in pairwise(where.evaluate_all(lefts)[:8])]
                assert min(steps) >= 0 and max(steps) > 0, (line, steps)
                start = where.first.bounding_box()["x"] - around["x"]
                assert (start > around["width"] / 2) == (way < 0), line
        for word in text.removesuffix("<eos>").removesuffix("\ufffd").split("\n"):
            find.fill(word)
            assert i in file.listed(), word
        find.fill("")
        file.press("Escape", "n")


# catches: tokens that the world wrote in the length of what the policy wrote, and its KL; an end
# that is not told, or not found; turns sorted as text; a stop reason that no episode has; numbers
# for tokens that the policy did not write; a search without a match that no key leaves
def test_episodes_of_several_turns(tmp_path: Path, read: Callable):
    r = spoiled(record([[(2, 3), (1, 2)], [(1, 1)], [(1, 1)] * 11, [(3, 0)]]), 9.0)
    file = read(view(r).save_html(tmp_path / "one.html"))
    kl = f"{r.kl[0][r.chosen[0]].sum():+.2f}".replace("-", "−")
    assert f"KL {kl} nats · 3 tokens · 2 turns, terminated, lost" in file.text(".page > .facts")
    sort, only = file.page.get_by_label("Sort by"), file.page.get_by_label("Only")
    sort.select_option("turns")
    assert file.listed()[-1] == 2 and file.listed()[-2] == 0
    sort.select_option("tokens")
    assert file.listed() == [1, 0, 3, 2]
    assert not {"truncated", "context", "cut off"} & {*only.locator("option").all_inner_texts()}
    only.select_option("max_turns")
    assert file.listed() == [1, 3] and "1 turn, max_turns" in file.text(".page > .facts")
    for how, which in (("won", 1), ("lost", 0)):
        only.select_option(how)
        assert file.listed() == [which]
    file.page.locator(".text .masked").first.hover()
    assert "not written by the policy" in file.text(".bubble")
    file.page.get_by_label("Find").fill("no such text")
    file.press("Escape", "Escape")
    assert len(file.listed()) == 4


# catches: a list sorted as text, an order that does not turn round, a place in the middle of the
# new list; a search that looks at the prompt or at the answer alone, that minds capitals, or takes
# the text for a pattern; a filter that forgets the search; keys that move while one types
def test_sorting_and_finding_by_keyboard(files: dict[str, Path], read: Callable):
    file, r = read(files["rollout"]), rollout(64, 53)
    order = r.scores.argsort().tolist()
    sort, only = file.page.get_by_label("Sort by"), file.page.get_by_label("Only")
    file.press("n", "n")
    sort.select_option("score")
    assert file.listed() == order and file.episode() == order[0]
    file.reach("ascending")
    file.press("Enter")
    assert file.listed() == order[::-1] and file.episode() == order[-1]
    sort.select_option("tokens")
    lengths = [int(r.mask[i].sum()) for i in file.listed()]
    assert lengths == sorted(lengths, reverse=True)
    sort.select_option("episode")
    file.press("/")
    found = {"WORD3": 13, "w63.4": 1, "ref 12": 1, "(": 0, "no such text": 0, "": 64, "word3": 13}
    for text, count in found.items():
        file.press("Control+A", "Delete")
        file.page.keyboard.type(text)
        assert len(file.listed()) == count, text
        assert ("No episode matches: Esc" in file.text(".page > .facts")) == (count == 0)
    only.select_option("score above")
    file.page.get_by_label("above", exact=True).fill("0.5")
    wanted = [i for i in range(63, -1, -1) if i % 5 == 3 and r.scores[i] > 0.5]
    assert file.listed() == wanted
    only.select_option("cut off")
    rows = file.listed()
    assert len(rows) == 7 and len(file.signals()) == 11
    place = rows.index(file.episode())
    file.press("Escape", "n")
    assert file.episode() == rows[(place + 1) % 7]


# catches: a table that is closed again by the next step, a table of another episode, a token in a
# row of its neighbour, a row that is out of sight
def test_all_signals_stay_open(files: dict[str, Path], read: Callable):
    file, r = read(files["rollout"]), rollout(64, 53)
    file.press("t", "n")
    rows, names = file.page.locator(".panel tbody tr"), file.signals()
    expect(rows).to_have_count(len(r.tokens[1]))  # those out of sight come last
    assert rows.locator("th").all_inner_texts() == [
        f"{t + 1} {x}" for t, x in enumerate(r.tokens[1])
    ]
    heads = file.each(".panel thead th", "all => all.map(e => e.title)")
    assert heads[1:] == names
    assert {*names} == {*SIGNALS, "ratio - 1", "sampler - trainer", "entropy"}
    cell = rows.nth(40).locator("td").nth(names.index("values"))
    assert cell.get_attribute("title").replace("−", "-") == f"{r.values[1, 40].item():.7g}"
    file.page.locator(".text .token").nth(40).focus()
    here = file.page.locator(".panel tr.here")
    assert here.locator("th").inner_text() == f"41 {r.tokens[1][40]}"
    around, line = (x.bounding_box() for x in (file.page.locator(".panel .wide"), here))
    assert around["y"] < line["y"] < around["y"] + around["height"] - 20
    rows.nth(38).click()
    assert file.page.evaluate("document.activeElement.textContent") == r.tokens[1][38]
    assert here.count() == 1 and file.page.locator(".text .here").inner_text() == r.tokens[1][38]
    file.press("t")
    assert file.page.locator(".panel").is_hidden()
    file.press("?")
    assert "find in prompts" in file.text(".panel")
    file.press("Escape")
    assert file.page.locator(".panel").is_hidden()


# catches: an answer of 300 tokens that needs more than a window, code that is not in one column, a
# key that goes to the next token or to a small one
def test_a_long_answer(tmp_path: Path, read: Callable):
    line = "    x = [i, j]  # one more\n"
    r, _ = bytewise(["A word.\n```\n" + line * 9 + "```\n", "short"])
    advantages = torch.full_like(r.kl, 0.1) * r.mask
    advantages[0, [9, 60]], advantages[0, 100] = 5.0, -7.0
    r = r.with_(advantages=advantages, objective=None)
    file = read(view(r, signal="advantages").save_html(tmp_path / "long.html"))
    lefts = "all => all.map(e => e.querySelector('.token').getBoundingClientRect().left)"
    assert len({*file.each(".code .line", lefts)}) == 1
    assert int(r.mask[0].sum()) > 200 and file.page.locator(".text").bounding_box()["height"] < 320
    token = "[...document.querySelectorAll('.text .token')].indexOf(document.activeElement)"
    for wanted in (9, 60, 100, 9):
        file.press("l")
        assert file.page.evaluate(token) == wanted


# catches: other settings that are not computed, or with those of the run; a what-if that forgets
# the other episodes, whose whitening it needs; a difference the wrong way round; an answer shown more
# than once; numbers that stay when the panel is closed
def test_what_if_without_a_kernel(files: dict[str, Path], read: Callable):
    file, r = read(files["rollout"]), rollout(64, 53)
    file.press("w")
    assert "Nothing is changed" in file.text(".panel") and "come out" in file.text(".panel")
    for name, x in (("kl_coef", "0.3"), ("lam", "0.5")):
        file.page.locator(f".panel [data-setting={name}]").fill(x)
    new = what_if(r, Objective(kl_coef=0.3, lam=0.5))
    tokens = file.page.locator(".text .token")
    numbers = lambda: [
        float(x.replace("−", "-").replace("≈", ""))
        for x in tokens.evaluate_all("all => all.map(e => e.dataset.number)")
    ]
    difference = {k: getattr(new, k) - getattr(r, k) for k in ("rewards", "advantages")}
    for name in difference:
        file.page.locator(".signals").select_option(name)
        file.page.locator(".rows").focus()
        seen = (("after", getattr(new, name)), ("difference", difference[name]))
        for key, its in (*seen, ("before", getattr(r, name)), seen[0]):
            pressed = file.page.locator(".panel [role=group] [aria-pressed=true]")
            assert pressed.inner_text() == key
            assert numbers() == pytest.approx(its[0].tolist(), abs=0.0051), (name, key)
            file.press("d")
        file.press("d", "d")
    assert tokens.count() == 53  # once on the page
    assert "KL coefficient 0.05 → 0.3; λ (lam) 0.95 → 0.5" in file.text(".panel")
    turned = int(((r.advantages * new.advantages)[0] < 0).sum())
    assert f"{turned} of 53 tokens" in file.text(".panel")
    file.press("w")
    assert numbers() == pytest.approx(r.advantages[0].tolist(), abs=0.0051)
    file.press("w")
    file.reach("as it was")
    file.press("Enter")
    assert "Nothing is changed" in file.text(".panel")
    for key in ("w", "Escape"):  # what was shown before it was opened is shown again
        file.press("Escape")
        file.page.locator(".signals").select_option("kl")
        file.page.locator(".rows").focus()
        file.press("w")
        assert file.signal() == "advantages"
        file.press(key)
        assert file.signal() == "kl"


# catches: an answer to another prompt, best and worst turned round, a change that is not marked
def test_answers_to_the_same_prompt(tmp_path: Path, read: Callable):
    texts = [["my", "dog", "ran"], ["my", "cat", "ran"], ["a", "dog", "sat"]] * 2
    given = lambda u: rollout(
        6,
        3,
        seed=u,
        update=u,
        prompts=["same", "same", "other", "third", "fourth", "same"],
        tokens=texts,
        responses=[" ".join(words) for words in texts],
    ).with_(mask=torch.ones(6, 3).bool())
    file = read(browse(run_of(tmp_path / "run", 2, given)).save_html(tmp_path / "run.html"))
    file.press("g")
    file.page.wait_for_selector(".card >> nth=3")
    heads = file.page.locator(".card h2").all_inner_texts()
    assert heads == [f"update {u}, episode {e}" for u, e in ((1, 0), (1, 1), (1, 5), (0, 0))]
    scores = given(1).scores[[0, 1, 5]]
    facts = file.page.locator(".card .facts").all_inner_texts()
    assert [i for i, text in enumerate(facts) if "best" in text] == [int(scores.argmax())]
    assert [i for i, text in enumerate(facts) if "worst" in text] == [int(scores.argmin())]
    assert file.page.locator(".card").nth(1).locator(".changed").all_inner_texts() == ["cat"]
    assert file.page.locator(".card").nth(2).locator(".changed").all_inner_texts() == ["a", "sat"]
    file.page.locator(".card h2 button").nth(3).click()
    file.wait("Update 0, episode 0")


# catches: a wrong word in the colour of a right one, a fact that is left out and not named, or whose
# ink is pale
def test_facts_are_coloured_where_the_judge_knows_them(tmp_path: Path, read: Callable, axe: str):
    post = POST
    words = "my boss sold my lamp because they were bored".split()
    r = rollout(1, len(words), prompts=[post], responses=[" ".join(words)], tokens=[words])
    file = read(view(r).save_html(tmp_path / "facts.html"))
    told = lambda kind: file.page.locator(f".text .token.{kind}").all_inner_texts()
    assert told("covered") == ["boss", "sold", "bored"] and told("invented") == ["lamp"]
    marks = file.text(".claims")
    assert "covers 3 of 7" in marks and "invents lamp" in marks
    assert "leaves out what: tent, when: monday, feeling: sad, question: sue" in marks
    in_prompt = lambda kind: file.page.locator(f".prompt mark.{kind}").all_inner_texts()
    assert in_prompt("covered") == ["boss", "sold", "bored"]
    assert in_prompt("missing") == ["tent", "monday", "sad", "sue"]
    for scheme in ("light", "dark"):
        file.page.emulate_media(color_scheme=scheme)
        file.examine(axe)
        assert not (told := violations([file.body])), told
    plain = read(view(rollout(2, 3)).save_html(tmp_path / "plain.html"))
    assert not plain.page.locator("mark").count()
    run = run_of(tmp_path / "run", 1, lambda u: r.with_(info=dict(update=u)))
    (run / "completions").mkdir()
    (run / "completions" / "sft.csv").write_text(
        f'query,model response,score\n"{post}","<i>my boss</i> sold my lamp.",1.5\n'
    )
    file = read(browse(run).save_html(tmp_path / "run.html"))
    file.press("g")
    file.page.wait_for_selector(".panel mark")
    marks = file.page.locator(".panel mark")
    assert marks.all_inner_texts() == ["boss✓", "sold✓", "lamp✗"]
    assert marks.last.get_attribute("class") == "invented"
    assert "<i>my boss✓</i> sold✓ my lamp✗." in file.text(".panel")


# catches: a page that opens at an episode which nobody need look at, a suspect whose button leads
# elsewhere, or nowhere under a filter, a heading without suspects; log-probs that two programs see
# differently without a word, a KL below zero that raises no alarm
def test_the_page_opens_at_what_deserves_a_look(tmp_path: Path, read: Callable):
    def planted(u: int) -> Rollout:
        r = rollout(6, 50, seed=u, update=u)
        engine = r.engine_logprobs.clone()
        if u == 1:
            engine[4, [3, 20, 30]] -= 2.0
        return r.with_(engine_logprobs=engine)

    run = run_of(tmp_path / "run", 3, planted)
    log = run / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[2]["objective/kl"] = -49.0
    log.write_text("\n".join(map(json.dumps, lines)))
    file = read(browse(run).save_html(tmp_path / "run.html"))
    assert (file.update(), file.episode()) == (1, 4)
    assert file.text(".suspects summary") == "1 alarm · 1 unusual episode"
    told = file.page.locator(".suspects").text_content()
    assert "Alarm. Update 1, episode 4: sampler and trainer" in told and "3 of 46 tokens" in told
    assert "Update 2: mean KL is -49 nats" in told
    file.press(str(file.signals().index("sampler - trainer") + 1), "l")
    assert file.text(".bubble").startswith("w4.3 token 4:")
    assert "sampler minus trainer" in file.text(".signals option:checked")
    file.page.get_by_label("Find").fill("word1")
    file.press("Escape", ",")
    file.wait("Update 0,")
    file.page.locator(".suspects summary").click()
    file.page.locator(".suspects button", has_text="Update 1, episode 4").first.click()
    file.wait("Update 1, episode 4")
    assert len(file.listed()) == 6 and file.signal() == "kl"
    r = planted(1)
    costly = int(r.kl[4].argmax())
    expect(file.page.locator(".text .token").nth(costly)).to_be_focused()
    file.go("#update=1&episode=4&signal=kl&token=most")
    assert file.text(".bubble").startswith(f"w4.{costly} token")
    calm = read(view(rollout(2, 3)).save_html(tmp_path / "calm.html"))
    assert not calm.page.locator(".suspects").count()


# catches: a group of another prompt, a spread over all episodes, equal scores that are not marked or
# not counted, a group of one, groups that cannot be brought together or do not tell their spread
def test_groups_of_one_prompt(tmp_path: Path, read: Callable):
    r = rollout(7, 5, prompts=["a", "b", "a", "b", "a", "c", "c"])
    scores = torch.tensor([1.0, 0.5, 2.0, 0.5, 6.0, 3.0, 3.1])
    file = read(view(r.with_(scores=scores)).save_html(tmp_path / "groups.html"))
    told = lambda: file.text(".facts .group")
    assert told().startswith("· one of 3 answers to its prompt, scores +3.00 ± 2.65")
    for key, wanted in (("]", 2), ("]", 4), ("]", 0), ("[", 4)):
        file.press(key)
        assert file.episode() == wanted
    assert "3 groups of one prompt, 1 with equal scores" in file.text(".side .count")
    assert file.page.locator(".rows li", has_text="=").evaluate_all(
        "all => all.map(e => e.dataset.id)"
    ) == ["1", "3"]
    file.page.get_by_label("Only").select_option("groups of equal scores")
    assert file.listed() == [1, 3] and "all equal" in told()
    file.page.get_by_label("Only").select_option("all")
    for key, wanted in (
        ("group spread", [1, 3, 5, 6, 0, 2, 4]),
        ("group mean", [1, 3, 0, 2, 4, 5, 6]),
    ):
        file.page.get_by_label("Sort by").select_option(key)
        assert file.listed() == wanted  # a group is together
    assert "group +3.00 ± 2.65" in (file.page.text_content(".rows [data-id='0']") or "")
    file = read(view(rollout(2, 5)).save_html(tmp_path / "alone.html"))
    assert not file.page.locator(".group").count() and "group" not in file.text(".side")


# catches: a point at another episode's place, axes exchanged, a point that opens its neighbour
def test_a_plot_of_two_numbers(files: dict[str, Path], read: Callable):
    file, r = read(files["rollout"]), rollout(64, 53)
    file.press("s")
    file.page.locator(".panel").get_by_label("Along").select_option("KL")
    file.page.locator(".panel").get_by_label("Up").select_option("score")
    points = file.page.locator(".plot circle")
    assert points.count() == 64
    nearest = int(r.scores.argmax())
    at = points.evaluate_all(
        "all => all.map(e => [e.querySelector('title').textContent, +e.getAttribute('cx'), +e.getAttribute('cy')])"
    )
    kl = r.kl.sum(1)
    assert max(at, key=lambda one: one[1])[0].startswith(f"episode {int(kl.argmax())}:")
    top = min(at, key=lambda one: one[2])[0]
    assert top.startswith(f"episode {nearest}: KL ")
    points.nth([one[0] for one in at].index(top)).click()
    assert file.episode() == nearest and file.page.locator(".plot circle.mine").count() == 1


# catches: a reset that changes the answer and leaves the controls, which the next step then takes
# for a setting; controls that stay at another update's settings
def test_what_if_controls_show_what_is_computed(tmp_path: Path, read: Callable):
    coefs = (0.05, 0.2)
    given = lambda u: what_if(rollout(6, 8, seed=u, update=u), Objective(kl_coef=coefs[u])).with_(
        info=dict(update=u, kl_coef=coefs[u])
    )
    file = read(browse(run_of(tmp_path / "run", 2, given)).save_html(tmp_path / "run.html"))
    slider = lambda name: file.page.locator(f".panel [data-setting={name}]")
    shows = lambda name: (
        slider(name).input_value(),
        slider(name).locator("xpath=../output").inner_text(),
    )
    estimator = file.page.locator(".panel").get_by_label("KL estimator")
    file.press("w")
    slider("lam").fill("0")
    estimator.select_option("k3")
    assert "λ (lam) 0.95 → 0" in file.text(".panel") and shows("lam") == ("0", "0")
    file.reach("as it was")
    file.press("Enter")
    assert "Nothing is changed" in file.text(".panel")
    assert shows("lam") == ("0.95", "0.95") and estimator.input_value() == "k1"
    slider("gamma").fill("0.5")
    assert "γ (gamma) 1 → 0.5. " in file.text(".panel") and shows("lam") == ("0.95", "0.95")
    assert shows("kl_coef") == ("0.2", "0.2")
    file.reach("as it was")
    file.press(".")
    file.wait("Update 0,")
    assert shows("kl_coef") == ("0.05", "0.05") and shows("gamma") == ("0.5", "0.5")
    file.press("w")
    assert file.page.locator(".panel").is_hidden()


# catches: settings that the page makes up; a choice of the reader that is taken for the run's own,
# or that is not held against the stored numbers
def test_what_if_asks_where_the_file_does_not_say(tmp_path: Path, read: Callable):
    made = what_if(rollout(6, 8), Objective(lam=0.5, missing_eos_penalty=1.0))
    file = read(view(made.with_(objective=None)).save_html(tmp_path / "old.html"))
    file.press("w")
    shown = lambda: file.text(".panel")
    assert "does not say with which settings" in shown() and "do not come out" in shown()
    assert (
        "Chosen by you: KL coefficient 0.05; γ (gamma) 1; λ (lam) 0.95; missing EOS penalty 0"
        in shown()
    )
    for name, x in (("lam", "0.5"), ("missing_eos_penalty", "1")):
        file.page.locator(f".panel [data-setting={name}]").fill(x)
    assert "λ (lam) 0.5; missing EOS penalty 1; " in shown() and "numbers come out." in shown()
    file.reach("as it was")
    file.press("Enter")
    assert "λ (lam) 0.95; " in shown() and "do not come out" in shown()


def unaddressed(path: Path) -> Path:
    "The same page as a widget draws it: no key of the document reaches it, nor has it an address."
    page = path.read_text(encoding="utf-8")
    assert "address: true" in page
    page = re.sub("<meta http-equiv=[^>]*>", "", page.replace("address: true", "address: false"))
    path.with_name(f"live-{path.name}").write_text(page, encoding="utf-8")
    return path.with_name(f"live-{path.name}")


# catches: a focus that is lost where what has it is drawn anew, so that the next key means something
# else, or in a widget nothing
@pytest.mark.parametrize("live", [False, True])
def test_the_focus_is_not_lost(files: dict[str, Path], read: Callable, live: bool):
    file = read(unaddressed(files["run"]) if live else files["run"])
    token = lambda: file.each(".body > .text .token", "all => all.indexOf(document.activeElement)")
    file.page.locator(".body > .text .token").first.focus()
    for key, wanted in (
        ("ArrowRight", (3, 0, 1)),
        ("2", (3, 0, 1)),
        ("ArrowRight", (3, 0, 2)),
        ("n", (3, 1, 2)),
        (",", (2, 1, 2)),
        ("ArrowLeft", (2, 1, 1)),
    ):
        file.press(key)
        file.wait(f"Update {wanted[0]}, episode {wanted[1]}")
        assert (file.update(), file.episode(), token()) == wanted, key
    assert file.text(".bubble").startswith(file.tokens()[1])
    file.press("/")
    file.page.keyboard.type("word")
    file.press("Escape", "n")
    assert file.episode() == 2
    file.press("t")
    file.page.locator(".panel .wide").focus()
    for wanted in (3, 4):
        file.press("n")
        assert file.episode() == wanted
    file.press("g")
    file.page.locator(".card h2 button:not([disabled])").first.focus()
    file.press("Enter")
    file.wait("Update 0, episode 4")
    file.press("n")
    assert file.episode() == 5


# catches: an update that one cannot come to, or come back from; the first update shown where the
# last was meant; an address that forgets the episode, the update or the signal; a filter that turns
# a link, or a card, into one to another episode; a link to what the file has not that leads
# elsewhere without a word; a link without a tint that comes back with one
def test_updates_addresses_and_links(files: dict[str, Path], read: Callable):
    file = read(files["run"])
    said, find = file.page.locator(".bar .count"), file.page.get_by_label("Find")
    only, above = file.page.get_by_label("Only"), file.page.get_by_label("above", exact=True)
    to = lambda place: file.page.evaluate("place => { location.hash = place; }", place)
    assert file.update() == 3
    for key, wanted in ((",", 2), (".", 3), (".", 0), (",", 3)):
        file.press(key)
        file.wait(f"Update {wanted},")
    file.page.get_by_role("combobox", name="Update").select_option("1")
    assert file.update() == 1
    file.page.locator(".run > summary").click()
    box = file.page.locator(".curves svg").first.bounding_box()
    file.page.mouse.move(box["x"] + 2, box["y"] + 20)
    assert "at update 0" in file.text(".curves figure >> nth=0")  # before it is gone to
    file.page.mouse.click(box["x"] + 2, box["y"] + 20)
    assert file.update() == 0
    file.press(".", ".", "n", "n", "2")
    file.wait("Update 2, episode 2")
    signal = file.signal()
    file.page.wait_for_url("**#update=2&episode=2&*")  # it is written after the drawing
    file.go(file.page.url.removeprefix(file.url))
    file.wait("Update 2, episode 2")
    assert file.signal() == signal
    find.fill("post 3")
    assert file.episode() == 3
    to("#update=1&episode=2")
    file.wait("Update 1, episode 2")
    assert find.input_value() == "" and len(file.listed()) == 6
    scores = [rollout(6, 8, seed=u, update=u).scores for u in (0, 1)]
    low = int((scores[1] - scores[0]).argmax())  # the filter leaves it in update 1 alone
    to(f"#update=1&episode={low}")
    file.wait(f"Update 1, episode {low} ")
    only.select_option("score above")
    above.fill(f"{((scores[0] + scores[1])[low] / 2).item():.3f}")
    file.page.locator(".rows").focus()
    file.press("g")
    file.page.locator(".card button", has_text="update 0,").click()
    file.wait(f"Update 0, episode {low} ")
    assert len(file.listed()) == 6
    at = f"Update 0, episode {low} "
    for place, wanted, where in (
        ("#update=5&episode=3", "Update 5 is not in this file.", at),
        ("#update=0&episode=500", "Episode 500 is not in update 0 of this file.", at),
        ("#update=2&episode=500", "Episode 500 is not in update 2 of this file.", "Update 2, ep"),
        ("#update=%3Cb%3E", "The update of this address is not in this file.", "Update 2, ep"),
    ):
        to(place)
        expect(said).to_have_text(wanted)
        assert file.text(".page > .facts").startswith(where)
    file.page.locator(".rows").focus()
    file.press("n")
    expect(said).to_have_text("")
    file.page.locator(".signals").select_option("")
    expect(file.page).to_have_url(re.compile("signal=$"))
    file.go(file.page.url.removeprefix(file.url))
    assert file.signal() == ""
    file.go("#update=9&episode=2")
    expect(said).to_have_text("Update 9 is not in this file.")
    assert file.signal() and (file.update(), file.episode()) == (3, 0)


# catches: a curve with a point before the first update that has an axis of its own, few measurements
# that are drawn as a smooth line
def test_all_curves_have_one_axis(tmp_path: Path, read: Callable):
    run = run_of(tmp_path / "run", 4, lambda u: rollout(6, 8, seed=u, update=u))
    log = run / "metrics.jsonl"
    lines = [{"episode": 0}, *map(json.loads, log.read_text().splitlines())]
    for i in (0, 2):  # before the first update, and after update 1
        lines[i]["gold/win_rate"] = 0.2 + i / 10
    log.write_text("\n".join(map(json.dumps, lines)))
    file = read(browse(run).save_html(tmp_path / "run.html"))
    assert file.page.locator(".curves figure").first.locator(".dot0").count() == 2
    file.page.locator(".run > summary").click()
    gold = lambda: file.text(".curves figure >> nth=0")
    rings = lambda: [
        float(one.get_attribute("cx")) for one in file.page.locator(".curves .ring0").all()
    ]
    for update, told in ((1, "gold wins 40 %"), (0, "gold wins 20 % before the first update")):
        file.page.get_by_role("combobox", name="Update").select_option(str(update))
        file.wait(f"Update {update},")
        assert gold() == f"{told} 20 % → 40 %"
        assert rings() == pytest.approx([4 + 212 * update / 3] * 5, abs=0.01)


# catches: lines of two runs of which nothing says which is whose, or their colour alone; the other run's line drawn as the first one's
def test_two_runs_are_told_apart(tmp_path: Path, read: Callable):
    runs = [
        run_of(tmp_path / name, 3, lambda u, s=s: rollout(6, 8, seed=u + s, update=u))
        for name, s in (("the-first-of-two-runs", 0), ("the-second-of-two-runs", 9))
    ]
    with (runs[1] / "metrics.jsonl").open("a") as log:
        log.write("\n" + json.dumps({"episode": 18, "gold/win_rate": 0.5}))
    file = read(browse(*runs).save_html(tmp_path / "two.html"))
    file.page.locator(".run > summary").click()
    figure = file.page.locator(".curves figure").nth(1)
    style = "(e, part) => { const s = getComputedStyle(e, part); return [s.color, s.stroke, s.borderTopStyle, s.borderTopColor]; }"
    for i, (run, mark) in enumerate(zip(runs, ("solid", "dashed"))):
        line = figure.locator(f"polyline.line{i}").evaluate(style)[1]
        said = figure.locator("figcaption > span").nth(i)
        assert run.name in said.inner_text() and said.evaluate(style)[0] == line
        assert said.evaluate(style, "::before")[2:] == [mark, line]
    alone = file.page.locator(".curves figure", has_text="gold wins")
    assert runs[1].name in alone.inner_text() and alone.locator(".line1, .ring1").count() == 2
    assert not alone.locator(".line0, .ring0").count()


# catches: a panel that leaves no room to read it, or that runs over its own buttons; a key that is
# dead on a slider, or that a select takes for its own
def test_panels_and_keys(tmp_path: Path, files: dict[str, Path], read: Callable):
    several = record([[(2, 3), (1, 2), (1, 1), (1, 0)]] * 4)
    for path in (files["demo"], view(several).save_html(tmp_path / "turns.html")):
        file = read(path)
        file.go("#rollouts" * (path == files["demo"]))
        file.size(WIDE, 800)
        for key in "twgsm?":
            file.press(key)
            assert file.page.locator(".panel").bounding_box()["height"] >= 260, key
            file.press("Escape")
    file.press("?")
    assert {*"nplLjkbexd/rtwgsm"} - {*re.findall(r"\b\w\b|/", file.text(".panel"))} == {"r"}
    file.size(420, 800)
    file.press("t")
    bar = file.page.locator(".dock > .bar")
    over = "(e, at) => e.contains(document.elementFromPoint(at.x + 20, at.y + 10))"
    assert bar.evaluate(over, bar.bounding_box())
    file = read(files["rollout"])
    file.press("w")
    file.page.locator(".panel [data-setting=lam]").focus()
    file.press("n")
    file.page.locator(".signals").focus()
    file.press("n")
    assert file.episode() == 2 and file.signal() == "advantages"


# catches: a note on another episode, one that the list does not mark or a reload forgets, half a line
def test_notes_are_kept_marked_and_saved(files: dict[str, Path], read: Callable):
    file = read(files["run"])
    file.press("n", "m")
    file.page.keyboard.type("odd: {end}")
    assert "Kept in this browser" in file.text(".panel") and file.episode() == 1
    file.press("Escape", ",")
    file.wait("Update 2,")
    marked = lambda: file.each(".rows li", "all => all.map(e => e.textContent.includes('✎'))")
    assert file.listed() and not any(marked())
    file.page.reload()
    file.wait("Update 2,")
    file.press(".")
    file.wait("Update 3,")
    assert file.listed() and marked() == [False, True] + [False] * 4
    file.page.get_by_text("More", exact=True).click()
    with file.page.expect_download() as saved:
        file.page.get_by_role("button", name="Save the notes").click()
    (line,) = Path(saved.value.path()).read_text(encoding="utf-8").splitlines()
    r = rollout(6, 8, seed=3, update=3)
    wanted = dict(update=3, episode=1, prompt=r.prompts[1], note="odd: {end}")
    assert wanted.items() <= json.loads(line).items() and {"answer", "score"} <= {*json.loads(line)}


# catches: texts from outside that are taken for names which every object has
def test_a_prompt_that_is_the_name_of_a_method(tmp_path: Path, read: Callable):
    names = ["constructor", "toString", "__proto__", "hasOwnProperty", "valueOf", "plain"]
    run = run_of(tmp_path / "run", 2, lambda u: rollout(6, 8, seed=u, update=u, prompts=[*names]))
    (run / "completions").mkdir()
    (run / "completions" / "sft.csv").write_text(
        "query,model response,score\n__proto__,an answer,1.5\n"
    )
    file = read(browse(run).save_html(tmp_path / "run.html"))
    file.press("g")
    for i, name in enumerate(names):
        file.wait(f"episode {i} ")
        expect(file.page.locator(".card")).to_have_count(2)
        expect(file.page.locator(".panel .legend")).to_contain_text("Dotted")
        assert ("an answer" in file.text(".panel")) == (name == "__proto__"), name
        assert not file.said()
        file.press("n")


# catches: a share that is small and not 0 shown as 0.0 %; a rounded number that does not tell the
# exact one
def test_rounded_numbers_tell_the_exact_ones(tmp_path: Path, read: Callable):
    given = lambda u: rollout(6, 8, seed=u, update=u)
    run = run_of(tmp_path / "run", 2, given)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line, share in zip(lines, (0.0, 0.00027)):
        line["policy/clipfrac_avg"] = share
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    file = read(browse(run).save_html(tmp_path / "run.html"))
    file.page.locator(".run > summary").click()
    caption = file.page.locator("figcaption", has_text="clip fraction")
    told = lambda: (" ".join(caption.inner_text().split()), caption.get_attribute("title"))
    assert told() == ("clip fraction ≈0 % 0 % → ≈0 %", "clip fraction, share of tokens: 0.027 %")
    r = given(1)
    number = lambda x: f"{x.item():.7g}".replace("-", "−")
    score, kl = file.each(".page > .facts span[title]", "all => all.map(e => e.title)")
    assert score == number(r.scores[0])
    assert float(kl.replace("−", "-")) == pytest.approx(r.kl[0].sum().item(), abs=1e-5)
    file.press(",")
    file.wait("Update 0,")
    assert told()[0] == "clip fraction 0 % 0 % → ≈0 %"


# catches: the last word of an answer drawn as the stop token that the file does not keep
def test_a_word_is_no_stop_token(tmp_path: Path, read: Callable):
    lasts = ["ran", "<eos>", "</s>", "<|endoftext|>", "[EOS]", "a<b"]
    tokens = [["my", "dog", last] for last in lasts]
    r = rollout(6, 3, tokens=tokens, responses=[" ".join(words) for words in tokens])
    r = r.with_(mask=torch.ones(6, 3).bool(), stopped=torch.ones(6).bool())
    file = read(view(r).save_html(tmp_path / "ends.html"))
    for last in lasts:
        wanted = [] if last in ("ran", "a<b") else [last]
        assert file.page.locator(".body > .text .end").all_inner_texts() == wanted
        file.press("n")


# ---- Hostile text ----


# catches: text that becomes markup, runs, fetches, ends the data of a page, reorders its
# neighbours, or makes the page scroll sideways
def test_hostile_text_in_a_file(tmp_path: Path, read: Callable, axe: str):
    run = run_of(tmp_path / SCRIPT.replace("/", "_")[:60], 3, hostile)
    file = read(browse(run).save_html(tmp_path / "run.html"))
    for fold in file.page.locator("details > summary").all():
        fold.evaluate("e => e.click()")
    seen = set()
    for _ in EVIL:
        seen |= {*file.tokens()}
        assert not file.too_wide() and not file.said()
        file.press("n")
    assert SCRIPT in seen and "a" * 10_000 in seen and any("\ufffd" in text for text in seen)
    assert any("⟨U+202E⟩" in text for text in seen) and not any("\u202e" in text for text in seen)
    file.examine(axe)
    assert not (told := violations([file.body])), told
    assert not file.page.locator("#app script, #app img, #app svg svg, #app b b, #plain").count()


# catches: a zero, a mark or a filter for what the file does not tell; panels that need what is absent
@pytest.mark.slow
def test_a_file_of_another_trainer_without_signals(tmp_path: Path, read: Callable):
    rows = [dict(prompt="p", response="a b", step=u) for u in (1, 2) for _ in range(2)]
    file = read(browse(rows).save_html(tmp_path / "bare.html"))
    group = "· one of 2 answers to its prompt ◀▶"
    assert file.text(".page > .facts") == f"Update 2, episode 0 of 2 · 2 words {group}"
    assert file.listed() and not {"■", "✂", "–", "KL"} & set(file.text(".rows").split())
    only = file.page.get_by_label("Only").locator("option")
    sort = file.page.get_by_label("Sort by").locator("option")
    assert only.all_inner_texts() == ["all"] and sort.all_inner_texts() == ["episode", "words"]
    for key in "twg?":
        file.press(key)
        assert not file.said() and file.page.locator(".panel").is_visible()
        if key == "w":
            assert "The file has no stopped, logprobs" in file.text(".panel")
        if key == "g":
            file.page.get_by_text("1, episode 0").wait_for()
            assert "score" not in file.text(".cards") and "2 words" in file.text(".cards")


LIVE = """
from rlhf_nb.rollout import Rollout
from rlhf_nb.ui.viewer import browse, view
view(Rollout.load({path!r}))
"""


@pytest.fixture(scope="module")
def live(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    "A page of three live readers: two of hostile text, and one of plain text."
    folder = tmp_path_factory.mktemp("live")
    bad = run_of(folder / "bad", 2, hostile)
    good = run_of(folder / "good", 3, lambda u: rollout(6, 8, seed=u, update=u))
    cells = [
        LIVE.format(path=str(bad / "rollouts" / "update-00001.safetensors")),
        f"browse({str(bad)!r})",
        f"browse({str(good)!r})",
    ]
    page = lab.notebook("live.ipynb", *cells)
    page.dialogs = []
    page.page.on("dialog", lambda dialog: (page.dialogs.append(dialog.message), dialog.dismiss()))
    yield page
    lab.close("live.ipynb")


# catches: the same in the live viewer and in the live browser, where ipywidgets and Lab read the
# text as well
def test_hostile_text_in_jupyterlab(live: Notebook, axe: str):
    page, found = live, widgets(live)
    assert len(found) == 3
    page.widen(NARROW, 3000)
    for widget in found[:2]:
        seen = ""
        for fold in widget.root.query_selector_all("details:not([open]) > summary"):
            fold.evaluate("e => e.click()")
        for _ in EVIL:
            seen += widget.root.inner_text()
            assert not (told := widget.root.evaluate(CUT)), told
            widget.root.query_selector(".rows").focus()
            page.page.keyboard.press("n")
            page.settle()
        assert SCRIPT in seen and "a" * 10_000 in seen.replace("\n", "") and "⟨U+202E⟩" in seen
        assert "\ufffd" in seen and "\u202e" not in seen
        assert not widget.root.query_selector_all("script, .reader img")
    page.examine(axe)
    told = violations(found) + page.wire.faults() + page.console + page.strangers
    assert not told and not page.dialogs and not page.page.evaluate("window.hacked"), told


# catches: a widget that does not ask the kernel for another update, a place that Python does not
# hear of or cannot set, keys that JupyterLab takes for itself, a button that loses the focus
def test_the_live_reader_is_the_saved_one(live: Notebook):
    page, reader = live.page, live.page.locator(".reader").last
    live.widen(WIDE, 1000)
    facts = reader.locator(".page > .facts")
    expect(facts).to_contain_text("Update 2, episode 0")
    reader.locator(".rows").focus()
    for key, wanted in ((",", "Update 1, episode 0"), ("n", "Update 1, episode 1"), ("t", "")):
        page.keyboard.press(key)
        expect(facts).to_contain_text(wanted)
    expect(reader.locator(".panel tbody th").first).to_have_text("1 w1.0")
    texts = reader.locator(".body > .text .token").all_inner_texts()
    assert texts == rollout(6, 8, seed=1, update=1).tokens[1]
    page.keyboard.press("m")
    page.keyboard.type("n . t")
    expect(reader.locator(".rows [aria-selected=true]")).to_contain_text("✎")
    page.keyboard.press("Escape")
    bar, told = reader.locator(".bar").first, reader.locator(".bar .count")
    for name, said, kept in (
        ("refresh", "New updates: 0.", bar.get_by_role("button", name="refresh")),
        ("search every update", "Every update was searched", bar.get_by_role("combobox")),
    ):
        bar.get_by_role("button", name=name).press("Enter")
        expect(told).to_contain_text(said)
        expect(kept).to_be_focused()
        expect(facts).to_contain_text("Update 1, episode 1")


# ---- What the notebooks keep ----


KEPT = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kept</title></head>'
    "<body><main>{}</main></body></html>"
)


def kept_outputs(name: str) -> str:
    "The markup that a notebook keeps, each output in a region of its own."
    cells = json.loads(NOTEBOOKS[name].read_text(encoding="utf-8"))["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return "".join(
        f'<div style="overflow-x:auto" tabindex="0" role="region" aria-label="output {i}">'
        f"{markup}</div>"
        for i, markup in enumerate("".join(data.get("text/html", "")) for data in outputs)
        if markup
    )


# catches: a kept output that runs a script, fetches something, or cannot be read without colours, a
# kernel or good eyes
def test_kept_outputs(tmp_path: Path, fresh: Callable[..., Page], axe: str):
    path, file, told, looked_at = tmp_path / "kept.html", File(fresh()), [], 0
    for name in NOTEBOOKS:
        if not (markup := kept_outputs(name)):
            continue
        path.write_text(KEPT.format(markup), encoding="utf-8")
        file.open(path).examine(axe)
        told += [f"{name}: {each}" for each in violations([file.body]) + file.said()]
        looked_at += 1
    assert not told, "\n".join(told)
    assert looked_at > len(NOTEBOOKS) / 2


# Texts that stick out of their box, or of the sheet, or are as pale or as dark as their box.
MISPLACED = """svg => [...svg.querySelectorAll('text')].filter(e => e.getClientRects().length).flatMap(e => {
  const home = e.parentNode.querySelector(':scope > rect') ?? svg, a = e.getBoundingClientRect(), b = home.getBoundingClientRect();
  const light = e => getComputedStyle(e).fill.match(/[0-9.]+/g).slice(0, 3).reduce((sum, x) => sum + Number(x), 0) / 765;
  return a.left < b.left || a.right > b.right || home !== svg && Math.abs(light(e) - light(home)) < 0.4 ? [e.textContent] : []; })"""


# catches: a label that has grown out of its box, on a wide or on a narrow screen; a picture that is
# dark on dark in a dark theme
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_loop_fits_and_reads(tmp_path: Path, read: Callable, scheme: str):
    path = tmp_path / "loop.html"
    shown = [loop_picture(), *(loop_picture(step.name) for step in STEPS)]
    path.write_text(KEPT.format("".join(shown)), encoding="utf-8")
    file = read(path)
    file.page.emulate_media(color_scheme=scheme)
    for width in (WIDE, 400):
        file.size(width, 900)
        for svg in file.page.locator("svg").all():
            assert not (told := svg.evaluate(MISPLACED)), told


# catches: a tint of tokens on which the ink of a light or a dark page is pale
def test_ink_on_full_colour_can_be_read(tmp_path: Path, read: Callable, axe: str):
    tokens, numbers = ["up", "down", "none"], [1.0, -1.0, 0.0]
    markup = token_strip(tokens, numbers) + signal_table(tokens, x=torch.tensor(numbers))
    path, shown = tmp_path / "strips.html", ""
    for ink, paper in (("#16191d", "#fff"), ("#cfd0d0", "#131416"), ("#e0e0e0", "#111")):
        shown += f"<div style='color:{ink};background:{paper}'>{markup}</div>"
    path.write_text(KEPT.format(shown), encoding="utf-8")
    file = read(path)
    file.examine(axe)
    assert not (told := violations([file.body])), told


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
    "is deaf": (
        "<label>row <input type=range></label>",
        'range "row" by mouse: it moves, and nothing else changes',
    ),
    "has no label": ("<input aria-label='x'>", "no visible description"),
    "is an icon alone": ("<button>\ue000</button>", "no accessible name (role button)"),
    "is out of reach": ("<button tabindex=-1>press</button>", "not reached by Tab"),
    "is cut": (
        "<button style='width:30px;overflow:hidden;text-overflow:ellipsis'>a long name</button>",
        "three dots at the end of: a long name",
    ),
    "is white on white": ("<p style='color:#fff;background:#fff'>white</p>", "color-contrast"),
    "is pale": ("<p style='color:#bbb'>pale</p>", "color-contrast"),
}


# catches: tests of the files that pass whatever a file does
def test_bad_files_are_found(fresh: Callable[..., Page], axe: str, tmp_path: Path):
    path, file, unseen = tmp_path / "bad.html", File(fresh()), {}
    for fault, (markup, wanted) in BAD.items():
        path.write_text(KEPT.format(f"<p>text</p>{markup}"))
        file.open(path).examine(axe)
        told = nameless([file.body]) + file.body.beyond_tab() + misfits([file.body], NARROW)
        told += file.body.dead() + violations([file.body]) + file.too_wide() + file.said()
        if not any(wanted in one for one in told):
            unseen[fault] = told
    assert not unseen
