"""The exercises of a folder of notebooks, and which of them are solved there. Notebooks are read as
they are: nothing is run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_nb.exercises import progress
from rlhf_nb.exercises.course import EXERCISE

CHECK = re.compile(r"\bcheck_\w+\((my_\w+)\)")
HEADING = re.compile(r"^#+ (.+)", re.M)
STATES = SOLVED, OPEN, UNCHECKED = "solved", "open", "no checker"


@dataclass(frozen=True)
class Found:
    "One exercise of a notebook."

    page: str  # such as course/10_gae
    exercise: str  # the function that is asked for; without a checker, the heading above
    difficulty: str
    minutes: int
    state: str  # solved, open, or no checker
    day: str = ""  # on which it was solved, if that was recorded


def found_in(folder: Path) -> list[Found]:
    """The exercises of all notebooks in a folder, in the order of their names. An exercise is
    solved if its checker's kept output is a pass, or if the pass was recorded in this copy. Raises
    FileNotFoundError if there is no exercise, ValueError if a notebook is damaged."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is no folder: give the one that your notebooks are in, such as nbs/course"
        )
    days = progress.solved(folder.resolve())
    found = [
        one
        for path in sorted(folder.rglob("*.ipynb"))
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        for one in _in_notebook(path, folder, days)
    ]
    if not found:
        raise FileNotFoundError(
            f"{folder} has no notebook with an exercise: give the folder nbs of your copy, or a "
            "part of it, such as nbs/course"
        )
    return found


def _in_notebook(path: Path, folder: Path, days: dict[str, str]) -> Iterator[Found]:
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells]
        kinds = [cell["cell_type"] for cell in cells]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no notebook that can be read: {error!r}") from error
    page, heading, awaited = path.relative_to(folder).with_suffix("").as_posix(), "", None
    for cell, kind, source in zip(cells, kinds, sources):
        if kind == "markdown":
            for level in re.finditer(f"{HEADING.pattern}|{EXERCISE.pattern}", source, re.M):
                if level[1]:
                    heading = level[1]
                    continue
                if awaited:
                    yield awaited
                awaited = Found(page, heading, level[2], int(level[3]), UNCHECKED)
        elif awaited and (checked := CHECK.search(source)):
            name = checked[1]
            state = SOLVED if name in days or _passed(cell) else OPEN
            yield Found(page, name, awaited.difficulty, awaited.minutes, state, days.get(name, ""))
            awaited = None
    if awaited:
        yield awaited


def _passed(cell: dict[str, Any]) -> bool:
    "Whether the kept output of a cell is a verdict that accepts the answer."
    texts = [
        "".join(output.get("data", {}).get("text/plain", "")) for output in cell.get("outputs", [])
    ]
    return any(text.startswith("✓ ") for text in texts)
