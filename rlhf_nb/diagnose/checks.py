"""A ladder of checks: each says what it measured, what was expected, and what to look at when it
fails; a check that needs another one which failed is skipped, and says so."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rlhf_nb.base.files import write_text_atomic
from rlhf_nb.base.terminal import harmless
from rlhf_nb.ui.html import Html, data_table, element, safe_text, section_page, sheet, themed_markup

SIGNS = {"passed": "✓", "failed": "✗", "skipped": "↷", "not measured": "–"}  # beside each colour


@dataclass(frozen=True)
class Check:
    "What came of one rung of the ladder."

    name: str
    passed: bool | None  # None: it does not apply in this setting. False where it was skipped, too
    skipped: bool
    measured: str
    expected: str  # and why, with its source
    advice: str  # what to look at when it fails

    @property
    def state(self) -> str:
        "passed, failed, skipped, or not measured."
        if self.passed is None:
            return "not measured"
        return "skipped" if self.skipped else "passed" if self.passed else "failed"


class Finding(NamedTuple):
    "What a rung measured; `passed` is None where there is nothing to measure in this setting."

    passed: bool | None
    measured: str


def not_here(why: str) -> Finding:
    "What a rung returns that does not apply: neither passed nor failed."
    return Finding(None, f"not measured here: {why}")


Measure = Callable[[Any], Finding]


@dataclass(frozen=True)
class Rung:
    "One check of the ladder."

    name: str
    measure: Measure
    expected: str
    advice: str
    needs: Sequence[str] = ()  # names of rungs without which this one says nothing


class Ladder(list[Rung]):
    "Rungs in their order."

    def rung(self, name: str, advice: str, needs: Sequence[str] = ()) -> Callable[..., Measure]:
        "Makes the function below it the next rung; its docstring is what is expected, and why."

        def enter(measure: Measure) -> Measure:
            expected = " ".join((measure.__doc__ or "").split())
            self.append(Rung(name, measure, expected, advice, needs))
            return measure

        return enter


@dataclass(frozen=True)
class Checks:
    "The checks of a ladder, cheapest first."

    checks: tuple[Check, ...]
    title: str = "Checks"
    note: str = ""  # a line below the title, such as what they cost

    @property
    def passed(self) -> bool:
        "Whether none failed; what was skipped because another one failed has not passed."
        return all(check.passed is not False for check in self.checks)

    @property
    def summary(self) -> str:
        "How many passed, failed, were skipped, were not measured."
        counts = Counter(check.state for check in self.checks)
        return ", ".join(f"{counts[state]} {state}" for state in SIGNS if counts[state])

    def __getitem__(self, name: str) -> Check:
        "The check of that name. Raises KeyError."
        return {check.name: check for check in self.checks}[name]

    def as_json(self) -> dict[str, Any]:
        "For `--json`."
        return dict(passed=self.passed, checks=[asdict(check) for check in self.checks])

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        "Sign and state, name, what was measured, what is expected, and what to do if it failed."
        rows = []
        for check in self.checks:
            state = f"{SIGNS[check.state]} {check.state}"
            advice = check.advice if check.state == "failed" else ""
            rows.append((state, check.name, check.measured, check.expected, advice))
        return rows

    def page(self) -> str:
        "A whole page, in the style of a demo's result, with what failed first."
        opening = "".join(element("p", safe_text(x)) for x in (self.verdict, self.note) if x)
        heads = ("State", "Check", "Measured", "Expected, and why", "If it fails, look at")
        rows = [(*row[:4], check.advice) for row, check in zip(self.rows(), self.checks)]
        rows.sort(key=lambda row: "failed" not in row[0])
        sections = {"Verdict": opening, "Every check": table_of(heads, rows)}
        return section_page(self.title, self.summary, sections)

    @property
    def verdict(self) -> str:
        "In one sentence."
        failed = [check.name for check in self.checks if check.state == "failed"]
        if failed:
            return f"Not passed: look at {failed[0]} first ({self.summary})."
        return f"Passed ({self.summary})."

    def save_html(self, path: str | Path) -> Path:
        "Write the page."
        write_text_atomic(path, self.page())
        return Path(path)

    def _repr_html_(self) -> str:
        lead = [element("p", safe_text(x)) for x in (self.verdict, self.note) if x]
        heads, rows = ("State", "Check", "Measured", "Expected, and why", "Look at"), self.rows()
        columns = 5 if any(row[4] for row in rows) else 4
        table = table_of(heads[:columns], [row[:columns] for row in rows])
        body = sheet(element("h3", safe_text(self.title)), *lead, table)
        return themed_markup(body, sheets=("sheet.css", "checks.css"))

    def __rich__(self) -> Table:
        table = Table(title=self.title, caption=self.verdict, box=SIMPLE_HEAD, show_lines=True)
        for name in ("", "check", "measured", "expected; if it failed, what to look at"):
            table.add_column(name, overflow="fold")
        colours = {"passed": "green", "failed": "bold red"}
        for check, (state, name, measured, expected, advice) in zip(self.checks, self.rows()):
            why = Text(harmless(expected))
            if advice:
                why.append(f"\n→ {harmless(advice)}", "bold")
            sign = Text(state, colours.get(check.state, "dim"))
            table.add_row(sign, Text(name), Text(harmless(measured)), why)
        return table


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    "Rows of text as a table whose cells keep their lines."
    lines = lambda text: Html(element("br").join(map(safe_text, str(text).split("\n"))))
    return data_table("", heads, [[row[0], *map(lines, row[1:])] for row in rows], "checks")


def climb(rungs: Iterable[Rung], subject: Any) -> Checks:
    "Measure each rung on the subject, in order. A rung that raises an Exception has failed."
    done: dict[str, Check] = {}
    for rung in rungs:
        lacking = [name for name in rung.needs if name in done and done[name].passed is False]
        if lacking:
            finding = Finding(False, f"skipped: it needs {', '.join(lacking)}")
        else:
            finding = measure(rung, subject)
        texts = finding.measured, rung.expected, rung.advice
        done[rung.name] = Check(rung.name, finding.passed, bool(lacking), *texts)
    return Checks(tuple(done.values()))


def measure(rung: Rung, subject: Any) -> Finding:
    "What the rung finds: an error of what it runs, too."
    try:
        return rung.measure(subject)
    except Exception as error:  # of the user's models and functions: any, and always shown
        return Finding(False, f"stopped by {in_words(error)}")


def in_words(error: Exception) -> str:
    "An error in one line, and where it was raised."
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    if len(frames) <= 2:  # by the rung itself
        return text
    last = frames[-1]
    return f"{text} (in {last.name}, {Path(last.filename).name} line {last.lineno})"
