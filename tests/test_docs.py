"""The site: every page and every export is in it, nothing that is wrong goes through, and who
reads it asks nothing of a network.

The whole site is built once. What must fail is planted on small sites of three pages.
"""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from bs4 import BeautifulSoup, Tag
from markdown_it import MarkdownIt
from notebooks import NOTEBOOKS

ROOT = Path(__file__).resolve().parent.parent
LIB = "rlhf_nb"
sys.path.insert(0, str(ROOT / "docs"))
import links
import reference

PAGES = list(NOTEBOOKS)
SECTIONS = {"Start here": "nbs", "The course": "course", "Labs": "labs", "Reference": "reference"}
MODULES = sorted(
    path.stem for path in (ROOT / LIB).glob("*.py") if path.stem not in ("__init__", "_modidx")
)


def public(module: str) -> list[str]:
    "What a module exports; without `__all__`, the functions and classes that it defines."
    made = importlib.import_module(f"{LIB}.{module}")
    if hasattr(made, "__all__"):
        return made.__all__
    named = [(name, value) for name, value in vars(made).items() if not name.startswith("_")]
    return [
        name
        for name, value in named
        if (inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value)))
        and value.__module__ == made.__name__
    ]


PLAIN = [
    module
    for folder in ("training", "base", "cli", "ui", "exercises", "diagnose")
    for path in sorted((ROOT / LIB / folder).glob("*.py"))
    if not path.stem.startswith("__main")
    if public(module := f"{folder}.{path.stem}".removesuffix(".__init__"))
]


def built(root: Path, place: Path) -> subprocess.CompletedProcess:
    "Build as `make docs` does, into `place`/site."
    command = [
        sys.executable,
        ROOT / "docs" / "build.py",
        "--root",
        root,
        "--out",
        place / "site",
        "--work",
        place / "work",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    "The whole site and all plants, two at a time: name -> what came of it, and where it is."

    def build(root: Path, place: Path) -> tuple[subprocess.CompletedProcess, Path]:
        return built(root, place), place

    with ThreadPoolExecutor(2) as pool:
        futures = {"whole": pool.submit(build, ROOT, tmp_path_factory.mktemp("whole"))}
        for what, (pages, _) in PLANTS.items():
            place = tmp_path_factory.mktemp("small")
            futures[what] = pool.submit(build, small(place / "root", **pages), place)
        yield futures
        pool.shutdown(cancel_futures=True)


# ---- The whole site ----


@pytest.fixture(scope="session")
def site(builds) -> Path:
    "The site of this repository."
    done, place = builds["whole"].result()
    assert done.returncode == 0, done.stderr[-6000:]
    return place / "site"


@pytest.fixture(scope="session")
def soups(site: Path) -> dict[str, BeautifulSoup]:
    "Page -> what is on it."
    return {
        path.relative_to(site).with_suffix("").as_posix(): BeautifulSoup(
            path.read_text(encoding="utf-8"), "html.parser"
        )
        for path in links.pages(site)
    }


def said(part: Tag | str) -> str:
    "Words, with one space between them."
    return " ".join(re.sub(r"¶", "", part if isinstance(part, str) else part.get_text(" ")).split())


# catches: a notebook that is passed over, a menu in the order of the alphabet of its titles, a
# section that is not there, an index that lists itself twice
def test_the_menu_has_every_page_in_its_place(soups):
    menu = soups["index"].select_one(".sidebar-tree")
    found = {
        caption.get_text(): [
            a["href"].removesuffix(".html") for a in caption.find_next("ul").select("a")
        ]
        for caption in menu.select(".caption")
    }
    assert list(found)[:1] == ["Start here"]
    assert list(found)[-1] == "API"
    assert found["API"] == ["api/index", *(f"api/{m}" for m in [*in_order(), *PLAIN])]
    for section, folder in SECTIONS.items():
        names = [name for name in PAGES if NOTEBOOKS[name].parent.name == folder]
        wanted = sorted(names, key=lambda name: (name not in ("index", "course"), name))
        got = ["index" if name == "#" else name for name in found.get(section, [])]
        assert got == wanted, section
    assert set(soups) == {*PAGES, "api/index", *(f"api/{m}" for m in [*MODULES, *PLAIN])}


def in_order() -> list[str]:
    "Modules in the order of the notebooks that export them."
    named = [
        re.search(r"#\| default_exp (\w+)", NOTEBOOKS[name].read_text(encoding="utf-8"))
        for name in PAGES
    ]
    return [match[1] for match in named if match]


def cells_of(page: str) -> list[dict]:
    "A notebook's cells; of the front page those after its head, in whose place the landing stands."
    cells = json.loads(NOTEBOOKS[page].read_text(encoding="utf-8"))["cells"]
    if page == "index":
        first = next(i for i, cell in enumerate(cells) if "".join(cell["source"])[:3] == "## ")
        assert 2 < first < 8
        return cells[:1] + cells[first:]
    return cells


# catches: words that MyST takes for markup of its own and swallows (a line that begins with %, a
# role, a target), a cell that is dropped
def test_no_word_of_a_page_is_lost(soups):
    markdown = MarkdownIt("commonmark").enable("table")

    def words(text: str) -> str:
        return " ".join(re.findall(r"[A-Za-z]{2,}", html.unescape(re.sub(r"<[^>]+>", " ", text))))

    lost = []
    for page in PAGES:
        shown = words(str(soups[page].select_one("article")))
        texts = ["".join(c["source"]) for c in cells_of(page) if c["cell_type"] == "markdown"]
        for text in texts:
            parts = re.split(r"\$\$.*?\$\$|\$[^$\n]+\$|\n\n", text, flags=re.S)
            plain = [words(re.sub(r"\$[^$]*\$", "", markdown.render(part))) for part in parts]
            lost += [(page, part) for part in plain if part not in shown]
    assert not lost


# catches: a drawing that a reader who cannot see it is not told about
def test_the_picture_of_the_loop_has_its_words(soups):
    for page in PAGES:
        outputs = [o.get("data", {}) for cell in cells_of(page) for o in cell.get("outputs", [])]
        drawings = ["".join(data["image/svg+xml"]) for data in outputs if "image/svg+xml" in data]
        labels = [html.unescape(re.search(r'aria-label="([^"]*)"', d)[1]) for d in drawings]
        shown = soups[page].select("div.cell_output img[src$='.svg']")
        assert [img["alt"] for img in shown] == labels, page


# catches: code of a page that is not shown, directives that are, a hidden cell that is shown, an
# output that is lost
def test_the_code_of_a_page_is_shown(soups):
    for page in PAGES:
        soup = soups[page]
        shown = [cell.get_text().strip() for cell in soup.select("div.cell_input pre")]
        cells = [cell for cell in cells_of(page) if cell["cell_type"] == "code"]
        hidden = re.compile(r"^#\| *(default_exp|hide\b|echo: false)", re.M)
        seen = [text for cell in cells if not hidden.search(text := "".join(cell["source"]))]
        assert shown == [re.sub(r"^#\|.*\n?", "", s, flags=re.M).strip() for s in seen], page
        exported = [source for source in seen if re.search(r"^#\| *exports?\b", source, re.M)]
        assert len(soup.select("div.cell.tag_exported")) == len(exported), page
        assert bool(soup.select("div.cell_output")) == any(c["outputs"] for c in cells), page


# catches: an export that autodoc passes over (a constant, what is put together elsewhere), or a
# page that nobody made
def test_every_export_is_in_the_reference(soups):
    front = {a["href"] for a in soups["api/index"].select("article a")}
    for module in [*MODULES, *PLAIN]:
        names = public(module)
        ids = {part["id"] for part in soups[f"api/{module}"].select("dt[id]")}
        assert names and {f"{LIB}.{module}.{name}" for name in names} <= ids, module
        assert {f"{module}.html#{LIB}.{module}.{name}" for name in names} <= front, module


# catches: promises of the package itself that the front page of the reference forgets
def test_what_the_package_exports_is_on_the_front_page(soups):
    line = next(
        p for p in soups["api/index"].select("article p") if "itself one can import" in p.get_text()
    )
    assert {code.get_text() for code in line.select("a code")} == set(
        importlib.import_module(LIB).__all__
    )


def beside_parameters(module: str) -> Iterator[tuple[str, str]]:
    "Comments between `def` and body, of exported functions and methods that have a docstring."
    source = inspect.getsource(importlib.import_module(f"{LIB}.{module}"))
    comments = {
        t.start[0]: t.string.lstrip("# ")
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT
    }
    exported = public(module)
    for node in ast.parse(source).body:
        inside = (
            [node]
            if isinstance(node, ast.FunctionDef)
            else [part for part in getattr(node, "body", []) if isinstance(part, ast.FunctionDef)]
            if isinstance(node, ast.ClassDef)
            else []
        )
        for function in inside:
            if node.name in exported and (
                function is node
                or function.name == "__init__"
                or (not function.name.startswith("_") and ast.get_docstring(function))
            ):
                yield from (
                    (function.name, comments[line])
                    for line in range(function.lineno, function.body[0].lineno)
                    if line in comments and not comments[line].startswith("type: ignore")
                )


# catches: comments beside parameters that are not read: those alone on a line, those of the
# returned value, those of a class, those of inherited settings
def test_comments_beside_parameters_are_in_the_reference(soups):
    bare = lambda text: re.sub(r"[\s`]", "", text)
    lost = []
    for module in [*MODULES, *PLAIN]:
        shown = bare(soups[f"api/{module}"].select_one("article").get_text())
        said = beside_parameters(module)
        lost += [(module, name, comment) for name, comment in said if bare(comment) not in shown]
    assert not lost


# catches: settings declared in a private part of a class, a hundred arguments of transformers in
# place of ours, a method of ours that is missing, one of theirs
def test_a_class_is_shown_whole_and_alone(soups):
    from dataclasses import fields

    from rlhf_nb import PPOConfig

    page = soups["api/trainer"]
    config = soups["api/training.config"].find(id=f"{LIB}.training.config.PPOConfig").parent
    for field in fields(PPOConfig):
        if "help" in field.metadata and field.name in (
            "kl_coef",
            "temperature",
            "lam",
            "resize_embeddings",
        ):
            assert said(field.metadata["help"]) in said(config)
    assert "adam_beta1" not in config.get_text()
    assert "kl_coef: NotNegative = 0.05" in said(config).replace(" :", ":")
    methods = {
        dt["id"].rpartition(".")[2]
        for dt in soups["api/rollout"].select(f"dt[id^='{LIB}.rollout.Rollout.']")
    }
    shown = {"with_", "select", "sequences", "episodes", "by_token", "save", "load"}
    assert methods == shown | {"policy_mask", "ended", "turn_counts"}
    trainer = {
        dt["id"].rpartition(".")[2] for dt in page.select(f"dt[id^='{LIB}.trainer.PPOTrainer.']")
    }
    assert {"rollout", "score", "advantages", "update", "step"} <= trainer
    assert not {"compute_loss", "hyperparameter_search", "push_to_hub"} & trainer


# catches: [source] that leads nowhere, to another cell, or to the wrong notebook; a method that
# comes from a plain module, and leads elsewhere than to its line
def test_source_leads_to_the_cell_that_makes_it(soups):
    entries = [(m, entry) for m in MODULES for entry in soups[f"api/{m}"].select("dt[id]")]
    for module, entry in entries:
        name = entry["id"].removeprefix(f"{LIB}.{module}.").split(".")[-1]
        if of_plain := entry.select_one(f"a[href*='/blob/main/{LIB}/']"):
            path, line = of_plain["href"].partition("/blob/main/")[2].split("#L")
            assert path.split("/")[1] in (
                "training",
                "base",
                "cli",
                "ui",
                "exercises",
                "diagnose",
            ), entry["id"]
            near = (ROOT / path).read_text(encoding="utf-8").splitlines()[int(line) - 1 :][:3]
            assert re.search(rf"def {name}\b", "\n".join(near)), entry["id"]
            continue
        path, _, anchor = entry.select_one("a[href*='#cell-']")["href"].partition("#")
        cell = (
            soups[path.removeprefix("../").removesuffix(".html")]
            .find(id=anchor)
            .find_next("div", class_="cell")
        )
        assert "tag_exported" in cell["class"] and re.search(
            rf"\b{name}\b", cell.select_one("pre").get_text()
        ), entry["id"]


# catches: pages of the reference that do not say how a thing is made, notebooks that do not say
# what they make, names in prose that lead nowhere
def test_pages_and_reference_lead_to_each_other(soups):
    for page in PAGES:
        made = re.search(r"#\| default_exp (\w+)", NOTEBOOKS[page].read_text(encoding="utf-8"))
        if made:
            assert soups[page].select(f"article .about a[href='api/{made[1]}.html']"), page
            assert soups[f"api/{made[1]}"].select(f"article a[href='../{page}.html']"), page
        if page != "index":
            assert soups[page].select(
                f"article .about a[href$='/{NOTEBOOKS[page].relative_to(ROOT)}']"
            ), page
    assert soups["10_gae"].select(f"article p a[href='api/gae.html#{LIB}.gae.td_errors'] code")


# catches: an absolute path in a docstring's default, a constant or an output
def test_no_path_of_this_machine_is_in_it(site):
    here = "|".join(map(re.escape, (str(ROOT), str(site.parent))))
    assert not [
        (page.name, match)
        for page in links.pages(site)
        for match in re.findall(
            rf"(?:{here}|/home/\w+/|/tmp/\w)[^<\s]*", page.read_text(encoding="utf-8")
        )
    ], "display the name of a file alone, not its path"


# ---- What must not go through ----


def notebook(*cells: str | dict) -> dict:
    "Texts are cells of Markdown."
    made = [
        dict(cell_type="markdown", id=f"c{i}", metadata={}, source=cell)
        if isinstance(cell, str)
        else dict(id=f"c{i}", metadata={}, execution_count=None) | cell
        for i, cell in enumerate(cells)
    ]
    return dict(
        cells=made,
        metadata=dict(kernelspec=dict(display_name="python3", language="python", name="python3")),
        nbformat=4,
        nbformat_minor=5,
    )


def output(markup: str) -> dict:
    "A cell that displays markup."
    return dict(
        cell_type="code",
        source="x",
        outputs=[
            dict(
                output_type="display_data",
                data={"text/html": markup, "text/plain": "x"},
                metadata={},
            )
        ],
    )


def small(root: Path, **pages: dict) -> Path:
    "A repository without a package, with a file that git leaves out."
    (root / "nbs").mkdir(parents=True)
    shutil.copy(ROOT / "settings.ini", root)
    good = notebook(
        "# Good\n> A promise.",
        "## A part\n\n[a part](#a-part), [first](index.ipynb), [settings](../settings.ini), [a "
        "paper](https://arxiv.org/abs/1707.06347), $x^2$\n\n$$\\sum_t r_t$$",
    )
    for name, page in {
        "index": notebook("# First\n[good](01_good.ipynb#a-part)"),
        "01_good": good,
        **pages,
    }.items():
        path = root / "nbs" / f"{name.removeprefix('n')}.ipynb"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(page), encoding="utf-8")
    (root / "runs").mkdir()
    for path, text in {"runs/a.txt": "on this machine alone", ".gitignore": "runs/\n"}.items():
        (root / path).write_text(text)
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


def bad(text: str) -> dict:
    return dict(n02_bad=notebook("# Bad\n> A promise.", text))


# What is planted -> words of the complaint.
PLANTS = {
    "nothing": ({}, ""),
    "a notebook that is not there": (bad("[x](77_none.ipynb)"), "77_none"),
    "an anchor that is not there": (bad("[x](01_good.ipynb#another-part)"), "another-part"),
    "a file that is not there": (
        bad("[x](../benchmarks/none.py)"),
        "links to ../benchmarks/none.py",
    ),
    "a file that git leaves out": (bad("[x](../runs/a.txt)"), "links to ../runs/a.txt"),
    "a warning": (bad("#### Four levels down"), "Non-consecutive header level"),
    "a page in a folder without a section": (
        {"odd/extra": notebook("# Extra")},
        "odd/extra.ipynb has no place in the menu",
    ),
    "a link in an output": (
        dict(n02_bad=notebook("# Bad", output('<a href="gone.html">x</a>'))),
        "link to gone.html",
    ),
    "a picture from the web": (
        dict(n02_bad=notebook("# Bad", output('<img src="https://example.org/x.png" alt="x">'))),
        "asks nothing of a network",
    ),
    "a formula without an end": (bad("$$\\sum_t r_t"), "a formula that was not set"),
}


# catches: a build that goes through whatever is wrong, that fails whatever is right, that fails
# without a word, or leaves half a site behind
@pytest.mark.parametrize("what", PLANTS)
def test_what_is_wrong_does_not_go_through(builds, what):
    done, place = builds[what].result()
    assert bool(done.returncode) == (what != "nothing"), done.stderr[-3000:]
    assert PLANTS[what][1] in done.stderr and "Traceback" not in done.stderr
    assert (place / "site" / "index.html").exists() == (what == "nothing")


# catches: a link into the repository that stays relative, a heading that cannot be linked to
def test_links_of_a_good_page_lead_where_they_should(builds):
    page = (builds["nothing"].result()[1] / "site" / "01_good.html").read_text(encoding="utf-8")
    assert 'href="https://github.com/rlhf-nb/rlhf_nb/blob/main/settings.ini"' in page
    assert 'href="#a-part"' in page
    assert 'href="index.html"' in page


# catches: a folder of somebody's work that is removed to make room
def test_a_folder_that_is_no_site_is_left_alone(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "thesis.txt").write_text("mine")
    done = built(small(tmp_path / "root"), tmp_path)
    assert done.returncode
    assert "holds no site" in done.stderr
    assert (tmp_path / "site" / "thesis.txt").read_text() == "mine"


# catches: a page that is built, and that no menu leads to
def test_a_page_left_out_of_the_menu_is_told(tmp_path):
    (tmp_path / "index.html").write_text('<a href="a.html">a</a>')
    for name in ("a", "b"):
        (tmp_path / f"{name}.html").write_text("<p>x</p>")
    assert links.left_out(tmp_path) == ["b.html: no entry of the menu leads to this page"]


# catches: a pattern that lets a mistyped address through, or stops at a good one
def test_the_form_of_an_address():
    for href, good in (
        ("https://arxiv.org/abs/1707.06347", True),
        ("https://arxiv.org/abs/2403.17031v2", True),
        ("https://en.wikipedia.org/wiki/Bias_(statistics)", True),
        ("http://127.0.0.1:8888/lab", True),
        ("mailto:a@b.org", True),
        ("https://arxiv.org/1707.06347", False),
        ("ftp://example.org/a", False),
        ("https://example.org/a).", False),
        ("javascript:alert(1)", False),
    ):
        assert bool(links.ill_formed(href)) == (not good), href


# catches: `|x|`, `*x*`, `x_` or a dash in front read as markup; an arXiv number that is no link
@pytest.mark.parametrize(
    "text, markup",
    [
        ("|logr|: a distance", r"\|logr\|: a distance"),
        ("-logr: unbiased", r"\-logr: unbiased"),
        ("(gamma * lam)^l", r"(gamma \* lam)^l"),
        ("with_ and x_", r"with\_ and x\_"),
        ("arXiv 2403.17031", "`arXiv 2403.17031 <https://arxiv.org/abs/2403.17031>`__"),
        ("see https://a.org/b_*c", "see https://a.org/b_*c"),
    ],
)
def test_a_docstring_is_plain_text(text, markup):
    assert reference.plain(text) == markup


# ---- In a browser, without a network ----

FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync".split()
FLAGS += "--disable-background-networking --disable-component-update".split()
# Cells of tables whose text is hard to read on what lies behind it, layer by layer.
PALE = """() => {
  const rgba = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n }
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1)
  const light = c => { const [r, g, b] = c.map(x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b }
  const behind = e => e ? over(rgba(getComputedStyle(e).backgroundColor), behind(e.parentElement)) : [255, 255, 255, 1]
  return [...document.querySelectorAll('.output.text_html :is(td, th, mark)')].filter(e => e.innerText.trim()).map(e => {
    const ground = behind(e), ink = over(rgba(getComputedStyle(e).color), ground)
    const [low, high] = [light(ink), light(ground)].sort((a, b) => a - b)
    return [(high + 0.05) / (low + 0.05), e.innerText]
  }).filter(([contrast]) => contrast < 4.5)
}"""
# Whether the drawings in outputs that have no colours of their own for a dark theme lie on white paper.
PAPER = """() => [...document.querySelectorAll('.output.text_html:has(svg, img)')].filter(e => !e.querySelector('.rlhf-explorer, .rlhf'))
    .map(e => getComputedStyle(e).backgroundColor === 'rgb(255, 255, 255)')"""


@pytest.fixture(scope="session")
def browser() -> Iterator:
    "Chromium."
    found = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if not found:
        told = (
            "Chromium is missing, so the site was not looked at. On Debian: apt-get install "
            "chromium; elsewhere name it: CHROMIUM=/path/to/it."
        )
        pytest.fail(told, pytrace=False) if os.environ.get("CI") else pytest.skip(told)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=found, args=FLAGS)
        yield chromium
        chromium.close()


def opened(browser, address: str, theme: str = "light"):
    "The page, what it asked for that is no file, what failed or was an error in the console."
    page = browser.new_context(
        offline=True, color_scheme=theme, viewport=dict(width=1280, height=900)
    ).new_page()
    asked, failed = [], []
    page.on(
        "request",
        lambda r: urlsplit(r.url).scheme not in ("file", "data", "blob") and asked.append(r.url),
    )
    page.on("requestfailed", lambda r: failed.append(r.url))
    page.on("console", lambda m: m.type == "error" and failed.append(m.text))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(address, wait_until="load")
    return page, asked, failed


# catches: fonts, scripts or MathJax from the web; formulas that stay TeX, or are set in a font that
# is not there; a page wider than a phone; cells that are hard to read in a light or in a dark theme
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "name",
    ["index", "00_tour", "08_kl", "10_gae", "48_trainer", "50_viewer", "api/kl", "api/trainer"],
)
def test_a_page_asks_nothing_of_a_network(site, browser, name, theme):
    page, asked, failed = opened(browser, (site / f"{name}.html").as_uri(), theme)
    try:
        formulas = page.locator(".math").count()
        if formulas:
            page.wait_for_function(
                "n => document.querySelectorAll('mjx-container').length >= n", arg=formulas
            )
            page.evaluate("document.fonts.ready.then(() => true)")
            assert page.evaluate(
                "[...document.fonts].some(f => f.family.includes('MJX') && f.status === 'loaded')"
            )
            assert not page.locator("mjx-merror").count()
        assert bool(formulas) == (name in ("00_tour", "08_kl", "10_gae", "48_trainer", "50_viewer"))
        prose = "".join(page.locator("article :is(p, li, td, div.math)").all_inner_texts())
        assert "$$" not in prose and "\\(" not in prose
        assert page.evaluate(PALE) == []
        if name == "10_gae":  # as many as there are, or the line above looked at nothing
            assert page.locator(".output.text_html td").count() > 100
        for width in (1280, 800, 400):
            page.set_viewport_size(dict(width=width, height=900))
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert asked == [] and failed == []
    finally:
        page.context.close()


# catches: a drawing with black letters on a black page; paper under what has colours for the dark
@pytest.mark.parametrize("name, drawings", [("32_explore", True), ("51_dashboard", False)])
def test_a_drawing_lies_on_white_paper_and_a_themed_one_does_not(site, browser, name, drawings):
    page, *_ = opened(browser, (site / f"{name}.html").as_uri(), "dark")
    try:
        lies = page.evaluate(PAPER)
        assert bool(lies) == drawings and all(lies)
        themed = page.locator(".output.text_html:has(.rlhf)")
        assert bool(themed.count()) != drawings
        grounds = themed.evaluate_all("all => all.map(e => getComputedStyle(e).backgroundColor)")
        assert "rgb(255, 255, 255)" not in grounds
    finally:
        page.context.close()


# catches: an index that is fetched, which a page from disk may not do; a search that finds nothing
def test_search_works_from_disk(site, browser):
    page, asked, failed = opened(browser, (site / "08_kl.html").as_uri())
    try:
        page.fill("input[name=q]", "AdaptiveKLController")
        page.keyboard.press("Enter")
        page.wait_for_selector("#search-results ul.search li")
        page.wait_for_function(
            "document.querySelector('#search-results').innerText.includes('finished')"
        )
        assert f"api/kl_control.html#{LIB}.kl_control.AdaptiveKLController" in "".join(
            a.get_attribute("href") for a in page.locator("#search-results a").all()
        )
        assert asked == [] and failed == []
    finally:
        page.context.close()
