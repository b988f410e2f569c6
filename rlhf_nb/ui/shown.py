"""What a notebook shows of records that are made below the views. Their `_repr_html_` asks here, so
that a run which shows nothing loads no view. It takes plain data, and knows no record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from rlhf_nb.training.alarms import alarms_of
from rlhf_nb.training.logs import PROGRESS
from rlhf_nb.ui.html import Html, element, number_text, percent
from rlhf_nb.ui.viz import episode_table


def rollout_markup(title: str, episodes: Sequence[Mapping[Any, Any]]) -> Html:
    "The first episodes of a rollout, without prompts."
    rows = [{str(k): x for k, x in row.items() if k != "prompt"} for row in episodes[:8]]
    return episode_table(rows, title=title, of=len(episodes))


def metrics_markup(metrics: Mapping[str, float]) -> str:
    "What an update logged, by group."
    rows = [(*name.rpartition("/")[::2], value) for name, value in metrics.items()]
    frame = pd.DataFrame(rows, columns=["group", "metric", "value"])
    return frame.to_html(index=False, float_format=lambda x: f"{x:.4g}")


def updates_markup(bar: str, logs: Sequence[Mapping[str, Any]], most: int = 12) -> Html:
    "The progress of a run, of what it logged: a bar, a table, an alarm."
    table, more, alarms = "", "", alarms_of(logs)
    if any("objective/kl" in log for log in logs):
        steps = pd.DataFrame(logs).groupby("step", as_index=False).first()
        names = [*PROGRESS, *(name for name in map(str, steps) if name.endswith("_score"))]
        places = np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int)
        shown = steps.iloc[places].filter(names).rename(columns=PROGRESS)
        how: dict[str, Any] = dict(formatters={"clip fraction": percent}, float_format=number_text)
        table = shown.to_html(index=False, na_rep="–", **how)
        more = f"{len(shown)} of {len(steps)} logs. " * (len(steps) > most)
    lines = [element("p", element("b", "▲ Alarm. "), escape(str(alarm))) for alarm in alarms[:1]]
    return element("div", bar, table, *lines, element("p", more, _MORE))


_MORE = (
    "Curves and episodes as it trains: callbacks=[rlhf_nb.LiveDashboard()]. Afterwards, with "
    "save_rollouts=True: rlhf_nb.browse(output_dir)."
)


def win_rate_markup(report: str) -> Html:
    "A win rate, the last line of its report, below what is needed to judge it."
    *lines, last = map(escape, report.split("\n"))
    return element("p", element("br").join([*lines, element("b", last)]))
