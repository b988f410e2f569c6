"""The course as a table: its path, what is beside it, and how long each page takes to read and to
work through. All of it is computed from the notebooks, so that it cannot go stale."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

# Words, lines and cells of printed tables that are read in a minute; minutes for each of the others
WORDS, LINES, CELLS, PICTURE, FORMULA, PREDICT = 180, 15, 100, 0.5, 1, 1.5
EXERCISE = re.compile(r"^\*\*Exercise\*\* · (easy|medium|hard) · (\d+) minutes · (\S.*)", re.M)
PATH = {  # the parts of the path, and the numbers of their pages, in the order of reading
    "a tour": ("00",),
    "policy gradients": ("01",),
    "shapes": ("02", "04", "05"),
    "the reward model": ("06",),
    "the price of leaving": ("08", "09"),
    "who deserves it": ("10",),
    "a careful step": ("11",),
    "write the loop": ("13",),
    "did it work?": ("14",),
}
MORE = re.compile(r"## More\b")  # what is below this heading of a page is beside the path
# To run each page of the path, in order: of a processor, on one thread
SECONDS = (51, 7, 8, 8, 8, 37, 8, 8, 8, 9, 26, 9)


class Page(NamedTuple):
    "A page of the course, and its minutes: those above its heading `## More`, and those below."

    name: str  # 10_gae
    title: str
    promise: str  # the line below the title
    reading: float  # and to look and think
    exercises: int
    more: float  # to read and to work through


def source_of(page: dict[str, Any], kind: str) -> list[str]:
    "The sources of a notebook's cells of one kind, `code` or `markdown`."
    return ["".join(c["source"]) for c in page["cells"] if c["cell_type"] == kind]


def at_more(
    page: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:  # what is above its heading `## More`; the rest
    "A page of the path in two. Without that heading, the second part has no cells."
    cells = page["cells"]
    texts = ["".join(c["source"]) * (c["cell_type"] == "markdown") for c in cells]
    i = next((i for i, text in enumerate(texts) if MORE.match(text)), len(cells))
    return page | {"cells": cells[:i]}, page | {"cells": cells[i:]}


def reading_minutes(page: dict[str, Any], a_minute: tuple[int, int] = (WORDS, LINES)) -> float:
    """Words, and lines of code, by those of a minute, over a whole notebook, folded ones too. Blank
    lines, directives (`#| export`) and Colab's first cell are not counted."""
    words = sum(len(text.split()) for text in source_of(page, "markdown"))
    codes = (code for code in source_of(page, "code") if "google.colab" not in code)
    lines = [line.strip() for code in codes for line in code.splitlines()]
    code = sum(bool(x) and not x.startswith("#|") for x in lines)
    return words / a_minute[0] + code / a_minute[1]


def thinking_minutes(page: dict[str, Any]) -> float:
    "What words and lines leave out: kept pictures, cells of kept tables, formulas, each *Predict*."
    kept = [o.get("data", {}) for c in page["cells"] for o in c.get("outputs", [])]
    drawn = ("".join(x.get("image/svg+xml", "png" * ("image/png" in x))) for x in kept)
    pictures = sum(bool(x) and "The RLHF-PPO loop:" not in x for x in drawn)
    cells = sum("".join(x.get("text/html", "")).count("/td") for x in kept)
    text = "".join(source_of(page, "markdown"))
    formulas, predicts = text.count("$$") / 2, text.count("*Predict.*")
    return pictures * PICTURE + cells / CELLS + formulas * FORMULA + predicts * PREDICT


def exercise_minutes(page: dict[str, Any]) -> int:
    "The sum of what the exercises of a notebook announce: `**Exercise** · easy · 5 minutes · why`."
    text = "\n\n".join(source_of(page, "markdown"))
    return sum(int(minutes) for _, minutes, _ in EXERCISE.findall(text))


def course_pages(
    folder: str | Path,  # nbs/course; in a notebook of the course, "."
) -> list[Page]:
    "The numbered pages of a folder in their order. Raises FileNotFoundError if there are none."
    pages = []
    for path in sorted(Path(folder).glob("[0-9][0-9]_*.ipynb")):
        page = json.loads(path.read_text(encoding="utf-8"))
        title, _, promise = source_of(page, "markdown")[0].partition("\n")
        title, promise = title.removeprefix("# "), promise.strip().removeprefix("> ")
        above, more = at_more(page)
        reading, beside = (reading_minutes(x) + thinking_minutes(x) for x in (above, more))
        doing, beside = exercise_minutes(above), beside + exercise_minutes(more)
        pages.append(Page(path.stem, title, promise.partition("\n")[0], reading, doing, beside))
    if not pages:
        raise FileNotFoundError(f"{folder} has no pages of the course: give the folder nbs/course.")
    return pages


def path_pages(folder: str | Path) -> list[Page]:
    "The pages of the path, in the order of reading."
    pages = {page.name[:2]: page for page in course_pages(folder)}
    return [pages[x] for numbers in PATH.values() for x in numbers if x in pages]


def _link_to(page: Page) -> str:
    return f"[{page.name[:2]} {page.title}]({page.name}.ipynb)"


def path_table(folder: str | Path) -> str:
    "The path in Markdown: a line for each page with its minutes, and their sums."
    parts = {numbers[0]: part for part, numbers in PATH.items()}
    pages = path_pages(folder)
    lines = [
        f"| {i} | {parts.get(p.name[:2], '')} | {_link_to(p)} | {p.promise} |"
        f" {p.reading:.0f} | {p.exercises or '–'} | {p.more:.0f} | {seconds} |"
        for i, (p, seconds) in enumerate(zip(pages, SECONDS), 1)
    ]
    reading, exercises, more = (sum(x) for x in list(zip(*pages))[3:])
    both = f"| | **{reading + exercises:.0f} minutes in all** | | |"
    total = f"{both} **{reading:.0f}** | **{exercises}** | {more:.0f} | {sum(SECONDS)} |"
    head = "| step | part | page | what it does | to read | exercises | more | seconds to run |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *lines, total])


def beside_table(folder: str | Path) -> str:
    "The pages beside the path in Markdown, with their minutes."
    path = path_pages(folder)
    lines = [
        f"| {_link_to(p)} | {p.promise} | {p.reading + p.exercises + p.more:.0f} |"
        for p in course_pages(folder)
        if p not in path
    ]
    return "\n".join(["| page | what it does | minutes |", "|---|---|---|", *lines])
