"Curves of runs: a line for each setting with the spread over its seeds, a panel for each metric."

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.training.logs import Log
from rlhf_nb.training.metrics import in_order, metric_of

# Values of the last update alone; any other is the mean over the updates since the line before.
AT_ONCE = ("lr", "learning_rate", "objective/kl_coef", "eval_*", "sample_*", "gold/*")


def group_runs(runs: Sequence[str], groups: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Folders of runs to average, each once, by name: its own of `groups`, else the path without
    the seed. ValueError where there are more or fewer names than runs."""
    if groups and len(groups) != len(runs):
        count = f"{len(groups)} names for {len(runs)} runs"
        raise ValueError(f"--group has {count}: give one for each.")
    paths = [Path(run).as_posix() for run in runs]
    plain = [re.sub(r"[-_.]?seed[-_=]?\d+", "", path).strip("/") or path for path in paths]
    parents = [Path(path).parent for path in plain]
    shared = os.path.commonpath(parents) if len(set(plain)) > 1 else str(parents[0])
    names = groups or [os.path.relpath(path, shared or ".") for path in plain]
    firsts = {Path(run).resolve(): i for i, run in reversed([*enumerate(runs)])}
    found: dict[str, list[str]] = {}
    for i in sorted(firsts.values()):
        found.setdefault(names[i], []).append(runs[i])
    return found


def choose_metrics(logs: Sequence[Log], patterns: Sequence[str] | None = None) -> list[str]:
    """Metrics that match, in the order of the patterns; without, the viewer's that moved, or all
    that did. ValueError where a pattern matches nothing."""
    known = sorted({name for log in logs for row in log for name in row})
    known = [name for name in known if name not in ("step", "episode", "epoch")]
    if patterns is None:
        moved = lambda name: len({row[name] for log in logs for row in log if name in row}) > 1
        main = [metric.name for metric in in_order() if metric.name in known]
        return list(filter(moved, main)) or list(filter(moved, known)) or known
    matches = {p: [name for name in known if fnmatch(name, p)] for p in patterns}
    if empty := next((p for p, match in matches.items() if not match), None):
        hint = f"{did_you_mean(empty, known)} There are: {', '.join(known)}."
        raise ValueError(f"--metrics {empty} matches nothing that was logged.{hint}")
    return list(dict.fromkeys(name for match in matches.values() for name in match))


def line_of(log: Log, metric: str, x: str) -> pd.Series:
    "One metric where it was logged, by episode or step; what is no finite number is NaN."
    line = pd.Series({row[x]: row[metric] for row in log if metric in row}, dtype=float)
    return line.sort_index().where(np.isfinite)


def thin_line(line: pd.Series, places: Sequence[float], at_once: bool) -> pd.Series:
    """A line at some of its points, in order. A value is the mean since the point before (unless
    it is of one update, `at_once`), so several are one by their mean, weighted by their episodes.
    What comes after the last point is left out."""
    places = [x for x in places if x in line.index]
    if at_once or len(places) == len(line):
        return line.loc[places]
    line = line[line.index <= places[-1]]
    width = np.diff(line.index, prepend=0.0).clip(1e-9)  # an update 0 weighs nothing beside others
    row = np.searchsorted(places, line.index)
    return pd.Series(np.bincount(row, line * width) / np.bincount(row, width), index=places)


def over_runs(logs: Sequence[Log], metric: str, x: str) -> pd.DataFrame:
    """Mean, least, most, runs of a metric over episode or step, where all runs that went so far
    have a point; a run that ended early is as far as it is. NaN where one of them logged NaN, no
    row where none logged it. ValueError where they share no point."""
    lines = [line for log in logs if len(line := line_of(log, metric, x))]
    if not lines:
        return pd.DataFrame(columns=["mean", "least", "most", "runs"], dtype=float)
    shared = lambda x: all(x in line.index or x > line.index[-1] for line in lines)
    places = sorted(filter(shared, {x for line in lines for x in line.index}))
    at_once = any(fnmatch(metric, p) for p in AT_ONCE)
    if not all(line.index.isin(places).any() for line in lines):
        fix = "give each run a name of its own with --group, or the same --logging_steps"
        raise ValueError(f"the runs of one line logged {metric} at no common {x}: {fix}.")
    columns = [thin_line(line, places, at_once).rename(i) for i, line in enumerate(lines)]
    table = pd.concat(columns, axis=1).sort_index()
    logged = pd.concat([column.notna() for column in columns], axis=1).sort_index()
    spread = table.agg(["mean", "min", "max"], axis=1).set_axis(["mean", "least", "most"], axis=1)
    return spread.mask(logged.eq(False).any(axis=1)).assign(runs=logged.notna().sum(axis=1))


def axis_of(logs: Sequence[Log]) -> str:
    "What curves are drawn over: episodes, where all runs logged them, else steps."
    return "episode" if all("episode" in log[-1] for log in logs) else "step"


def last_values(logs: Mapping[str, Sequence[Log]], metrics: Sequence[str]) -> pd.DataFrame:
    """The last value of each metric, over the seeds of a name: metric, name, mean, least, most,
    runs. NaN where one of them logged NaN."""
    rows = []
    for metric in metrics:
        for name, runs in logs.items():
            last = [line.iloc[-1] for log in runs if len(line := line_of(log, metric, "step"))]
            if last:
                three = dict(mean=np.mean(last), least=np.min(last), most=np.max(last))
                rows.append(dict(metric=metric, name=name, **three, runs=len(last)))
    return pd.DataFrame(rows, columns=["metric", "name", "mean", "least", "most", "runs"])


def plot_runs(
    logs: Mapping[str, Sequence[Log]],  # name -> the logs of its seeds
    metrics: Sequence[str],
    ncols: int = 4,
) -> Figure:
    """A panel for each metric, a line for each name: the mean of its runs, and a band from the
    least to the most where there are several. A line has a gap where a run logged NaN."""
    x = axis_of([log for runs in logs.values() for log in runs])
    lines = {(name, m): over_runs(runs, m, x) for name, runs in logs.items() for m in metrics}
    labels = {
        name: name if len(runs) == 1 else f"{name} ({len(runs)} runs)"
        for name, runs in logs.items()
        if any(len(lines[name, m]) for m in metrics)
    }
    title = lambda m: f"{known.short[0]}\n{m}" if (known := metric_of(m)).short else m
    drawn = {title(m): [(label, lines[name, m]) for name, label in labels.items()] for m in metrics}
    several = any(len(runs) > 1 for runs in logs.values())
    band = "mean of the runs, in a band from the least to the most" if several else None
    from rlhf_nb.ui.viz import panels  # seconds, for torch, that a line in the terminal spares

    return panels(drawn, x, ncols, band)
