"""The course as a table: its pages, and how long each takes to read and to work through. All of it
is computed from the notebooks, so that it cannot go stale."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

WORDS, LINES = 200, 20  # that are read in a minute
EXERCISE = re.compile(r"^\*\*Exercise\*\* · (easy|medium|hard) · (\d+) minutes · (\S.*)", re.M)


class Page(NamedTuple):
    "A page of the course, and its minutes."

    name: str  # 10_gae
    title: str
    promise: str  # the line below the title
    reading: float
    exercises: int


def source_of(page: dict[str, Any], kind: str) -> list[str]:
    "The sources of a notebook's cells of one kind, `code` or `markdown`."
    return ["".join(c["source"]) for c in page["cells"] if c["cell_type"] == kind]


def reading_minutes(page: dict[str, Any]) -> float:
    """Words / 200 + lines of code / 20, over all cells of a notebook, folded ones too. Blank lines
    and directives (`#| export`) are not counted."""
    words = sum(len(text.split()) for text in source_of(page, "markdown"))
    lines = [line.strip() for code in source_of(page, "code") for line in code.splitlines()]
    return words / WORDS + sum(bool(x) and not x.startswith("#|") for x in lines) / LINES


def exercise_minutes(page: dict[str, Any]) -> int:
    "The sum of what the exercises of a notebook announce: `**Exercise** · easy · 5 minutes · why`."
    found = (EXERCISE.findall(text) for text in source_of(page, "markdown"))
    return sum(int(minutes) for exercises in found for _, minutes, _ in exercises)


def course_pages(
    folder: str | Path,  # nbs/course; in a notebook of the course, "."
) -> list[Page]:
    "The numbered pages of a folder in their order. Raises FileNotFoundError if there are none."
    pages = []
    for path in sorted(Path(folder).glob("[0-9][0-9]_*.ipynb")):
        page = json.loads(path.read_text(encoding="utf-8"))
        title, _, promise = source_of(page, "markdown")[0].partition("\n")
        promise = promise.strip().removeprefix("> ").partition("\n")[0]
        reading, exercises = reading_minutes(page), exercise_minutes(page)
        pages.append(Page(path.stem, title.removeprefix("# "), promise, reading, exercises))
    if not pages:
        raise FileNotFoundError(f"{folder} has no pages of the course: give the folder nbs/course.")
    return pages


def course_table(
    folder: str | Path,  # as for `course_pages`
) -> str:
    "The course in Markdown: a line for each page with its minutes, and their sums."
    pages = course_pages(folder)
    lines = [
        f"| {p.name[:2]} | [{p.title}]({p.name}.ipynb) | {p.promise} | {p.reading:.0f} |"
        f" {p.exercises or '–'} |"
        for p in pages
    ]
    reading, exercises = sum(p.reading for p in pages), sum(p.exercises for p in pages)
    total = f"| | **all of it** | | **{reading:.0f}** | **{exercises}** |"
    head = "| | page | what it does | minutes to read | minutes for its exercises |"
    return "\n".join([head, "|---|---|---|---|---|", *lines, total])
