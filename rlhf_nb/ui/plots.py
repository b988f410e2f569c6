"""Figures of what the reward model and the evaluation measure."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlhf_nb.preferences import calibration_error
from rlhf_nb.ui.viz import curves


def _note(axis: Axes, text: str, at: tuple, shift: tuple[int, int], side: str = "left") -> None:
    axis.annotate(text, at, xytext=shift, textcoords="offset points", ha=side, fontsize=8)


def calibration_plot(table: pd.DataFrame) -> Figure:
    "Observed against predicted, from the table of `calibration`; a calibrated model: the diagonal."
    figure, axis = plt.subplots(figsize=(4.2, 3.6), layout="constrained")
    plt.close(figure)  # the caller shows it: once is enough
    axis.plot([0.5, 1], [0.5, 1], color="#777777", linestyle="--", label="perfectly calibrated")
    axis.plot(table.predicted, table.observed, color="#1f5fa8", marker="o", label="this model")
    for place in table.itertuples():
        _note(axis, f"{place.pairs:,}", (place.predicted, place.observed), (4, -11))
    axis.set(xlabel="predicted probability of being right", ylabel="observed share that was right")
    axis.set_title(f"calibration error {calibration_error(table):.3f}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure


def _name_tops(figure: Figure, columns: Sequence[str], points: pd.DataFrame, x: str) -> None:
    for axis, column in zip(figure.axes, columns):
        axis.margins(y=0.12)
        for _, line in points.dropna(subset=[x, column]).groupby("run", sort=False):
            top = line.iloc[line[column].to_numpy().argmax()]
            mark = next((name for name in ("n", "update") if pd.notna(top.get(name))), None)
            shift, side = ((-4, 3), "right") if mark == "n" else ((0, 6), "center")
            if mark:
                _note(axis, f"{mark} {int(top[mark])}", (top[x], top[column]), shift, side)


def plot_frontier(
    rows: pd.DataFrame,  # one row per checkpoint: kl; any of reward, gold, win_rate; update, run
    best_of: pd.DataFrame | None = None,  # the same for best-of-n, with a column n
) -> Figure:
    "Reward, gold and win rate against KL, a line a run, and best-of-n. Raises ValueError without."
    parts = [rows if "run" in rows else rows.assign(run="checkpoints")]
    if best_of is not None:
        parts.append(best_of.assign(run="best of n"))
    x, points = "KL, nats per response", pd.concat(parts, ignore_index=True)
    titles = dict(reward="Learned reward", gold="Gold points", win_rate="Win rate")
    columns = [name for name in titles if name in points]
    if "kl" not in points or not columns:
        raise ValueError(f"the columns are {list(points)}: give kl, and reward, gold or win_rate.")
    points = points.rename(columns={"kl": x})
    figure = curves(points, {titles[name]: name for name in columns}, x=x)
    _name_tops(figure, columns, points, x)
    return figure
