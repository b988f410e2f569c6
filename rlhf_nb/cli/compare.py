"""`rlhf-nb compare`: a run's curves over the bands of healthy runs, and the bugs they look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_nb.cli.help import About
from rlhf_nb.cli.parsing import Parser
from rlhf_nb.runtime.fields import setting
from rlhf_nb.runtime.files import strict_json, writable, write_text_atomic
from rlhf_nb.runtime.terminal import harmless

if TYPE_CHECKING:
    from rlhf_nb.diagnose.compare import Comparison


@dataclass
class CompareArguments:
    "What is written."

    output: str | None = setting(None, "The page. None: compare.html in the folder of RUN.")
    json: bool = setting(False, "Print everything as JSON, and write no page.")


ABOUT = About(
    usage="compare RUN [OTHER ...] [--with NAME] [--OPTION VALUE ...]",
    text="Holds what a run logged against the bands of healthy seeds, kept ones or the range of "
    "OTHER runs: when each metric leaves its band, and which bugs of the museum the run deviates "
    "like, as suspects and not as a verdict. Bands of a small world are no norm for a large model; "
    "the page says which metrics carry over. It needs folders with trainer_state.json (or the "
    "metrics.jsonl of `rlhf-nb demo`), prints a table, and writes compare.html.",
    examples=(
        "rlhf-nb compare runs/mini_tldr",
        "rlhf-nb compare runs/ppo runs/seeds/* --output compare.html",
    ),
)


def compare_parser() -> Parser:
    "Every option of `rlhf-nb compare`."
    parser = Parser(ABOUT, CompareArguments)
    parser.add_argument("run", metavar="RUN", help="Folder of a run, before --options.")
    parser.add_argument(
        "others", nargs="*", default=[], metavar="OTHER", help="Runs to hold it against, 5 or more."
    )
    parser.add_argument(
        "--with",
        dest="reference",
        metavar="NAME",
        help="Kept bands, each of several seeds: reference, `rlhf-nb demo`; quick, `rlhf-nb demo "
        "--quick`; short, half of a quick demo; museum, the healthy runs of the bug museum. "
        "Without OTHER runs: those of the run's own recipe, else reference.",
    )
    return parser


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    "Texts as a table for a terminal."
    made = Table(title=Text(title), box=SIMPLE_HEAD, title_justify="left")
    for i, head in enumerate(heads):
        made.add_column(head, overflow="fold", no_wrap=i == 0)
    for row in rows:
        made.add_row(*(Text(harmless(str(cell))) for cell in row))
    return made


def show(found: Comparison, console: Console) -> None:
    "The verdict, what left its band, the suspects and what carries over."
    from rlhf_nb.diagnose import compare_page as page
    from rlhf_nb.diagnose.compare import HOW, NO_NORM

    say = lambda text: console.print(harmless(text), markup=False, highlight=False)
    say(f"{found.aligned}\n{found.verdict}")
    if gone := [page.left_row(line) for line in found.lines if line.update is not None]:
        console.print(table("What left its band", page.LEFT_HEADS, gone))
    if found.suspects:
        console.print(table("Suspects", page.SUSPECT_HEADS, page.suspect_rows(found)))
        say(HOW)
    rows = page.carried_rows(found.log)
    console.print(table("In any run", ["What", "Expected", "Measured", "Holds"], rows))
    say(NO_NORM)


def compare_command(words: Sequence[str]) -> None:
    "`rlhf-nb compare`."
    parser = compare_parser()
    options = parser.read(words)
    if options.others and options.reference:
        parser.error(
            f"--with is {options.reference} and there are OTHER runs: give the one or the other"
        )
    from rlhf_nb.diagnose.compare import compare  # seconds that `--help` does not wait for
    from rlhf_nb.diagnose.compare_page import comparison_page

    output = Path(options.output or Path(options.run) / "compare.html")
    if options.output:
        writable(output, "--output")
    found = compare(options.run, options.others, options.reference)
    if options.json:
        print(strict_json(found.as_json()))
        return
    show(found, Console())
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(output, comparison_page(found))
    print(f"rlhf-nb compare: {output}")
