"""What a notebook shows of records that are made below the views. Their `_repr_html_` asks here, so
that a run which shows nothing loads no view. It takes plain data, and knows no record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

from rlhf_nb.ui.html import Html, element
from rlhf_nb.ui.viz import episode_table


def rollout_markup(
    title: str,
    episodes: Sequence[Mapping[Any, Any]],  # column -> value, each
) -> Html:
    "The first episodes of a rollout, without prompts."
    rows = [{str(k): x for k, x in row.items() if k != "prompt"} for row in episodes[:8]]
    return episode_table(rows, title=title, of=len(episodes))


def metrics_markup(metrics: Mapping[str, float]) -> str:
    "What an update logged, by group."
    rows = [(*name.rpartition("/")[::2], value) for name, value in metrics.items()]
    frame = pd.DataFrame(rows, columns=["group", "metric", "value"])
    return frame.to_html(index=False, float_format=lambda x: f"{x:.4g}")


def win_rate_markup(report: str) -> Html:
    "A win rate, the last line of its report, below what is needed to judge it."
    *lines, last = map(escape, report.split("\n"))
    return element("p", element("br").join([*lines, element("b", last)]))
