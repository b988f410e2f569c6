"""A comparison as markup: what left its band, what it looks like, every curve over its band."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from rlhf_nb.diagnose.compare import (
    HOW,
    NO_NORM,
    Comparison,
    Left,
    carried,
    ends,
)
from rlhf_nb.ui.band_curves import band_figure
from rlhf_nb.ui.html import (
    Html,
    data_table,
    element,
    number_text,
    safe_text,
    section_page,
    themed,
)

LAB = "nbs/labs/23_bug_museum.ipynb"


def short(value: float | None) -> str:
    "Three digits, or a dash."
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.3g}".replace("-", "−")


def left_row(line: Left) -> list[object]:
    "A metric that left its band: when, and what it was then."
    band = f"{short(line.low)} to {short(line.high)}"
    return [line.metric, line.update, short(line.value), band, "yes" if line.counts else "no norm"]


LEFT_HEADS = ["Metric", "Left at update", "Value then", "Band then", "Counts"]


def left_table(c: Comparison) -> str:
    "Every metric that left its band, the first first."
    rows = [left_row(line) for line in c.lines if line.update is not None]
    if not rows:
        return element("p", "None.")
    return data_table("", LEFT_HEADS, rows)


def suspect_rows(c: Comparison) -> list[list[str]]:
    "The bugs that the run deviates like."
    return [[f"case {s.case}", s.what, number_text(s.likeness)] for s in c.suspects]


SUSPECT_HEADS = ["Bug museum", "What is wrong there", "Likeness"]


def suspects_markup(c: Comparison) -> str:
    "The suspects, and what likeness means."
    if not c.suspects:
        return element("p", "None.")
    table = data_table("", SUSPECT_HEADS, suspect_rows(c))
    return table + element("p", safe_text(f"{HOW} The cases are those of {LAB}."))


def carried_rows(log: pd.DataFrame) -> list[list[str]]:
    "What must hold in any run, and whether it does."
    holds = {True: "yes", False: "look", None: "–"}
    return [
        [row["what"], row["expected"], row["measured"], holds[row["holds"]]] for row in carried(log)
    ]


def carried_table(c: Comparison) -> str:
    "What must hold in any run, and the note about bands."
    heads = ["What", "Expected in any run", "Measured", "Holds"]
    return element("p", safe_text(NO_NORM)) + data_table("", heads, carried_rows(c.log))


def figure_of(c: Comparison, line: Left) -> Html:
    "A metric's curve over its band."
    band = c.band[line.metric]
    steps = [int(step) for step in c.rows["step"]]
    points = lambda values: [(u, float(v)) for u, v in zip(steps, values)]
    lines = points(band.low), points(band.center), points(band.high)
    note = "" if line.counts else "no norm for this run"
    return band_figure(line.metric, points(c.rows[line.metric]), lines, line.update, note)


def curves_grid(c: Comparison) -> str:
    "Every metric, those that left first."
    figures = [figure_of(c, line) for line in c.lines]
    hint = (
        "Line: this run. Grey: from the lowest to the highest seed, made wider on both sides; "
        "dotted: their median. Dashed: where the run left."
    )
    return element("p", hint) + element("div", *figures, class_="bands")


def end_rows(c: Comparison) -> list[list[object]]:
    "The last tenth of each curve, beside the others' mean and its interval."
    interval = lambda row: f"{short(row['low'])} to {short(row['high'])}"
    return [
        [row["metric"], short(row["run"]), short(row["mean"]), interval(row), f"{row['runs']:g}"]
        for row in ends(c)
    ]


def sections(c: Comparison) -> Mapping[str, str]:
    "The parts of the page, by their headings."
    ends_heads = ["Metric", "This run", "Mean of the others", "95 % interval of the mean", "Runs"]
    absent = f" Not logged by this run: {', '.join(c.absent)}." if c.absent else ""
    opening = element("p", element("strong", safe_text(c.verdict))) + element(
        "p", safe_text(c.aligned + absent)
    )
    return {
        "Verdict": opening,
        "What left its band": left_table(c),
        "Looks like": suspects_markup(c),
        "Curves": curves_grid(c),
        "At the end": data_table("The last tenth of each curve", ends_heads, end_rows(c)),
        "What carries over": carried_table(c),
    }


def comparison_page(c: Comparison) -> str:
    "The whole as one page, without a script."
    title = f"{c.run}, against {c.against}"
    return section_page(title, "rlhf-nb compare", sections(c), ("compare.css",))


def comparison_markup(c: Comparison, *names: str) -> Html:
    "Some sections of the page for a notebook; none named: verdict, suspects and curves."
    parts: dict[str, Any] = dict(sections(c))
    chosen = names or ("Verdict", "Looks like", "Curves")
    return themed(*(parts[name] for name in chosen), sheets=("compare.css",))
