"Renderers of every page: a tensor of decimals hides what a signed, coloured token shows at once."

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite, isnan
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from torch import Tensor

from rlhf_nb.ui.html import SHADE, Html, element, inline, visible


def signed_number(value: float | int | bool | None) -> str:
    "A number of a cell: a float with its sign, but not 0; ≈0 where two decimals are; None: a gap."
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        text = f"{value:,}"
    elif isnan(value) or value == 0:
        text = f"{abs(value):.0f}"
    elif abs(value) < 0.005:
        text = "≈0"
    elif abs(value) < 1e6:
        text = f"{value:+,.2f}" if abs(value) < 1000 else f"{value:+,.0f}"
    else:
        text = f"{value:+.1e}"
    return text.replace("-", "−")


# The ends of the map and of a scale of one direction, and their opacity there.
BLUE, ORANGE, DEEP, FULL = "#2882dc", "#cc6600", "#7347c7", 0.5
RULE = "#80808073"  # between cells
CLEAR = "transparent"


def tint(
    value: float | None,  # the number behind the colour; None and nan have none
    vmax: float,  # magnitude of full colour; 0 gives none to anything
    pale: float | None = None,  # no colour here, full at vmax: a scale of one direction, violet
) -> str:  # "#rrggbbaa", or "transparent"
    "The one diverging map: blue below zero, orange above, paler near it; the page shines through."
    flat = vmax == pale if pale is not None else not vmax > 0 or value == 0
    if value is None or isnan(value) or flat:
        return CLEAR
    share = abs(value) / vmax if pale is None else (value - pale) / (vmax - pale)
    opacity = round(255 * FULL * min(max(share, 0.0), 1.0))
    colour = DEEP if pale is not None else ORANGE if value > 0 else BLUE
    return f"{colour}{opacity:02x}"


def visible_token(token: str) -> str:
    "A token as a header: as `visible`, ␣ for a space, ∅ for nothing, no blanks around a word."
    text = visible(token).replace("\n", "")
    return (text.strip(" ") or text).replace(" ", "␣") or "∅"


def html_cell(
    text: str,
    ground: str = CLEAR,  # colour behind the text, which the page's own text can be read on
    align: str = "right",
    scope: str | None = None,  # col or row: a header cell
    exact: float | None = None,  # the number that the text rounds: shown on hover
) -> str:
    "One table cell, its text escaped."
    tag, style = "th" if scope else "td", inline("cell", ground=ground, align=align, edge=RULE)
    return element(tag, element("bdi", escape(text)), scope=scope, style=style, title=exact)


def html_table(lines: Sequence[str], caption: str = "") -> str:
    "Rows, each a <tr> element, as a table, with a line of text above it."
    above = element("caption", escape(visible(caption)), style=inline("caption"))
    return element("table", above if caption else "", *lines, style=inline("table"))


def _scroll_box(*tables: str) -> Html:
    box = dict(tabindex=0, role="region", aria_label="table")
    return element("div", *tables, style="overflow-x:auto", **box)


def _html_row(name: str, cells: Sequence[str]) -> str:
    "One table row under the header `name`; the corner, which heads nothing, has no name."
    if not name:
        return element("tr", element("td"), *cells, style="background:none")
    return element("tr", html_cell(visible(name), SHADE, "center", "row"), *cells)


def _row(values: Sequence[float] | Tensor, name: str) -> list[float]:
    "One row of numbers, from a list, an array or a tensor [T] or [1, T]."
    row = torch.as_tensor(values)
    if row.dim() == 2 and row.shape[0] == 1:
        row = row[0]
    if row.dim() != 1:
        raise ValueError(f"{name} has shape {list(row.shape)}: give one row, such as {name}[0].")
    return row.tolist()


def _heads(
    tokens: Sequence[str], mask: Sequence[bool] | Tensor | None, rows: Mapping[str, list[float]]
) -> tuple[list[str], list[bool]]:
    "Text above each column; whether its token is real. Raises ValueError on unequal lengths."
    keep = [True] * len(tokens) if mask is None else [bool(m) for m in _row(mask, "mask")]
    lengths = dict(tokens=len(tokens), mask=len(keep)) | {x: len(row) for x, row in rows.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"lengths differ, {lengths}: give each one entry a token.")
    return [visible_token(token) if k else "·" for token, k in zip(tokens, keep)], keep


def _largest(row: list[float], keep: list[bool]) -> float:
    "The largest finite magnitude among real tokens, which gets full colour; 0 if there is none."
    return max((abs(v) for v, k in zip(row, keep) if k and isfinite(v)), default=0.0)


def _value_cell(value: object, ground: str = CLEAR) -> str:
    "A number (right, signed; a rounded one shows all of itself on hover), or anything as text."
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and value.ndim == 0:
        value = value.item()
    if value is not None and not isinstance(value, (bool, int, float)):
        return html_cell(visible(str(value)), align="left")
    rounded = isinstance(value, float) and isfinite(value) and value != 0
    return html_cell(signed_number(value), ground, exact=value if rounded else None)


def _number_cells(row: list[float], keep: list[bool], vmax: float, pale: float | None) -> list[str]:
    "Coloured, signed cells; counts and truth values have no colour."
    ground = lambda v: tint(v, vmax, pale) if isinstance(v, float) else CLEAR
    return [_value_cell(v, ground(v)) if k else html_cell("·") for v, k in zip(row, keep)]


def signal_table(
    tokens: Sequence[str] | None = None,  # T texts; None: the places 0 .. T-1
    mask: Tensor | None = None,  # [T] or [1, T], true on real tokens; None: all of them
    **signals: Tensor,  # [T] or [1, T] each, under the name its row shall carry
) -> Html:
    "A row a signal, a column a token. Raises ValueError on unequal lengths, or more than one row."
    if not signals:
        example = "signal_table(reward=rewards[0])"
        raise ValueError(f"no signal to show: give at least one, for example {example}.")
    rows = {name: _row(values, name) for name, values in signals.items()}
    if tokens is None:
        tokens = [str(t) for t in range(len(next(iter(rows.values()))))]
    heads, keep = _heads(tokens, mask, rows)
    lines = [_html_row("", [html_cell(text, SHADE, "center", "col") for text in heads])]
    cells = lambda row: _number_cells(row, keep, _largest(row, keep), None)
    lines += [_html_row(name, cells(row)) for name, row in rows.items()]
    return _scroll_box(html_table(lines, "" if all(keep) else "· is padding"))


def break_lines(widths: list[int], limit: int = 76) -> list[list[int]]:
    "Indices of the tokens on each line, so that no line is wider than `limit` characters."
    lines: list[list[int]] = [[]]
    used = 0
    for i, width in enumerate(widths):
        if lines[-1] and used + width > limit:
            lines.append([])
            used = 0
        lines[-1].append(i)
        used += width
    return lines


def token_strips(
    tokens: Sequence[str],  # T texts
    rows: Mapping[str, Sequence[float] | Tensor],  # each T numbers, or [1, T], under its name
    mask: Sequence[bool] | Tensor | None = None,  # T, true on real tokens; None: all of them
    name: str = "value",  # what the numbers are
    vmax: float | None = None,  # magnitude of full colour; None: the largest in view
    pale: float | None = None,  # of a scale of one direction: where there is no colour
) -> Html:
    "A text with numbers beneath its tokens, on one scale. ValueError on unequal lengths, bad vmax."
    if vmax is not None and pale is None and not (isfinite(vmax) and vmax > 0):
        raise ValueError(f"vmax is {vmax}: give a positive number, or None.")
    numbers = {label: [float(v) for v in _row(x, label)] for label, x in rows.items()}
    heads, keep = _heads(tokens, mask, numbers)
    if (scale := vmax) is None:
        scale = max((_largest(row, keep) for row in numbers.values()), default=0.0)
    none = "" if pale is None else f"no colour at {pale:.3g}, "
    lines = [("token", [html_cell(text, SHADE, "center", "col") for text in heads])]
    lines += [(label, _number_cells(row, keep, scale, pale)) for label, row in numbers.items()]
    tables: list[str] = []
    for at in break_lines([max(len(text), 5) + 2 for text in heads]):
        caption = f"{name}: {none}full colour at {scale:.3g}" if numbers and not tables else ""
        part = [_html_row(label, [cells[i] for i in at]) for label, cells in lines]
        tables.append(html_table(part, caption))
    return _scroll_box(*tables)


def token_strip(
    tokens: Sequence[str],  # T texts
    values: Sequence[float] | Tensor | None = None,  # T numbers, or [1, T]; None: the text alone
    mask: Sequence[bool] | Tensor | None = None,  # T, true on real tokens; None: all of them
    name: str = "value",  # what the numbers are
    vmax: float | None = None,  # magnitude of full colour; None: the largest in view
) -> Html:
    "A text with a number beneath every token. Raises ValueError on unequal lengths or a bad vmax."
    return token_strips(tokens, {} if values is None else {name: values}, mask, name, vmax)


_LINES = [("#1f5fa8", "-"), ("#b35000", "--"), ("#333333", ":"), ("#7a4a9e", "-.")]


def panels(
    lines: Mapping[str, Sequence[tuple[str | None, pd.DataFrame]]],  # title -> each run's numbers
    x: str,  # what is along the bottom
    ncols: int = 3,  # panels side by side
    title: str | None = None,  # above all of them
) -> Figure:
    "One panel a title; a run's mean at each x, a band from `least` to `most`. NaN is a gap."
    ncols = min(ncols, len(lines))
    nrows = -(-len(lines) // ncols)
    figure = plt.figure(figsize=(4 * ncols, 2.7 * nrows + 0.4), layout="constrained")
    plt.close(figure)  # the caller shows it: once is enough
    for place, (label, runs) in enumerate(lines.items(), 1):
        axis = figure.add_subplot(nrows, ncols, place)
        for i, (run, at) in enumerate(runs):
            colour, dashes = _LINES[i % len(_LINES)]
            mark = "." if at["mean"].count() <= 30 else ""
            axis.plot(at.index, at["mean"], color=colour, ls=dashes, marker=mark, label=run)
            if (at["most"] > at["least"]).any():
                low, high = at["least"], at["most"]
                axis.fill_between(at.index, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.set(title=label, xlabel=x)
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    handles, names = figure.axes[0].get_legend_handles_labels()  # of runs that have a name
    if names:
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(title or "")
    return figure


def curves(
    frame: pd.DataFrame,  # one line a log entry; gaps are left out
    columns: Sequence[str] | Mapping[str, str],  # metrics to draw, or {label: metric}
    x: str = "episode",  # the column along the bottom
    ncols: int = 3,  # panels side by side
    title: str | None = None,  # above all of them
) -> Figure:
    "One panel a metric; a line a `run`, a band over its seeds. ValueError on an absent column."
    titles = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    absent = [name for name in (x, *titles.values()) if name not in frame]
    if absent or not titles:
        raise ValueError(f"cannot draw {absent or 'no column'}: name some of {list(frame)}.")
    runs: Any = frame.groupby("run", sort=False) if "run" in frame else [(None, frame)]

    def numbers(part: pd.DataFrame, column: str) -> Any:
        values = part.dropna(subset=[x, column]).groupby(x)[column]
        return values.agg(mean="mean", least="min", most="max")

    of_runs = lambda column: [(run, numbers(part, column)) for run, part in runs]
    return panels({key: of_runs(name) for key, name in titles.items()}, x, ncols, title)


def episode_table(
    rows: Sequence[Mapping[str, object]],  # one mapping an episode, column to value
    columns: Sequence[str] | None = None,  # which, in which order; None: all, as they first appear
    title: str | None = None,  # above the table
    of: int | None = None,  # how many there are, where these are the first of more
) -> Html:
    "Completions or rollouts as a table; gaps are empty. Raises ValueError on a column no row has."
    known = list(dict.fromkeys(name for row in rows for name in row))
    columns = known if columns is None else list(columns)
    absent = [name for name in columns if rows and name not in known]
    if absent:
        raise ValueError(f"no row has {absent}: the columns are {known}.")
    lines = [_html_row("", [html_cell(visible(name), SHADE, "center", "col") for name in columns])]
    cells = [[_value_cell(row.get(name)) for name in columns] for row in rows]
    lines += [_html_row(str(i), row) for i, row in enumerate(cells)]
    count = f"{len(rows)} row{'s' * (len(rows) != 1)}"
    if of not in (None, len(rows)):
        count = f"first {len(rows)} of {of:,} rows"
    return _scroll_box(html_table(lines, f"{title} ({count})" if title else count))
