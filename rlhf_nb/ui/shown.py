"""What a notebook shows of records that are made below the views. Their `_repr_html_` asks here, so
that a run which shows nothing loads no view."""

from __future__ import annotations

from html import escape

import pandas as pd

from rlhf_nb.evaluate import JudgeReport
from rlhf_nb.ppo import Metrics
from rlhf_nb.rollout import Rollout
from rlhf_nb.ui.html import Html, element
from rlhf_nb.ui.viz import episode_table


def rollout_markup(rollout: Rollout) -> Html:
    "The first episodes of a rollout, without prompts and columns."
    shown = rollout.episodes().drop(columns=["prompt", *rollout.columns], errors="ignore").head(8)
    rows = [{str(k): v for k, v in row.items()} for row in shown.to_dict("records")]
    return episode_table(rows, title=repr(rollout), of=len(rollout))


def metrics_markup(metrics: Metrics) -> str:
    "What an update logged, by group."
    rows = [(*name.rpartition("/")[::2], value) for name, value in metrics.items()]
    frame = pd.DataFrame(rows, columns=["group", "metric", "value"])
    return frame.to_html(index=False, float_format=lambda x: f"{x:.4g}")


def judged_markup(report: JudgeReport) -> Html:
    "A win rate below what is needed to judge it."
    *lines, last = map(escape, str(report).split("\n"))
    return element("p", element("br").join([*lines, element("b", last)]))
