"""`rlhf-nb progress`: the exercises of the notebooks, and which of them are solved."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_nb.base.fields import setting
from rlhf_nb.base.terminal import harmless
from rlhf_nb.cli.exercise_pages import SOLVED, STATES, UNCHECKED, Found, found_in
from rlhf_nb.cli.help import About
from rlhf_nb.cli.parsing import Parser

MARKS = {SOLVED: ("✓", "green"), UNCHECKED: ("–", "dim")}  # others are open


@dataclass
class ProgressArguments:
    "How the list is printed."

    json: bool = setting(False, "Print JSON instead of a table.")


ABOUT = About(
    usage="progress [FOLDER] [--json]",
    text="Lists the exercises of your copy of the notebooks: page, difficulty, minutes, and "
    "whether you have solved them. It needs the notebooks alone, saved, and runs nothing: an "
    "exercise is solved if the kept output of its checker is a pass, or if your copy's "
    ".rlhf_nb_progress.json has recorded one. Some exercises have no checker. It writes nothing.",
    examples=("rlhf-nb progress", "rlhf-nb progress nbs/course", "rlhf-nb progress nbs --json"),
)


def progress_parser() -> Parser:
    "Every option of `rlhf-nb progress`."
    parser = Parser(ABOUT, ProgressArguments)
    parser.add_argument(
        "folder", nargs="?", default=".", metavar="FOLDER", help="Folder of the notebooks."
    )
    return parser


def total_of(found: Sequence[Found]) -> str:
    "How many exercises are solved, and the minutes of the rest."
    checked = [one for one in found if one.state != UNCHECKED]
    solved = sum(one.state == SOLVED for one in checked)
    left = sum(one.minutes for one in checked if one.state != SOLVED)
    alone = len(found) - len(checked)
    rest = f", about {left} minutes to go" if left else ""
    more = f"; {alone} more without a checker" if alone else ""
    return f"{solved} of {len(checked)} solved{rest}{more}"


def progress_table(found: Sequence[Found]) -> Table:
    "The exercises, a line for each."
    table = Table(box=SIMPLE_HEAD, caption=total_of(found), caption_justify="left")
    for name in ("page", "exercise", "difficulty", "minutes", "state"):
        side: Literal["left", "right"] = "right" if name == "minutes" else "left"
        table.add_column(name, justify=side, no_wrap=True, overflow="ellipsis")
    page = ""
    for one in found:
        mark, style = MARKS.get(one.state, ("·", ""))
        table.add_row(
            Text(harmless(one.page) if one.page != page else ""),
            Text(harmless(one.exercise)),
            one.difficulty,
            str(one.minutes),
            Text(f"{mark} {one.state} {one.day}".rstrip(), style),
        )
        page = one.page
    return table


def progress_command(words: Sequence[str]) -> None:
    "`rlhf-nb progress`."
    options = progress_parser().read(words)
    found = found_in(Path(options.folder))
    if options.json:
        count = {state: sum(one.state == state for one in found) for state in STATES}
        print(json.dumps({"exercises": [asdict(one) for one in found], "count": count}, indent=1))
    else:
        wide = None if sys.stdout.isatty() else 110
        console = Console(file=sys.stdout, force_jupyter=False, width=wide)
        console.print(progress_table(found))
