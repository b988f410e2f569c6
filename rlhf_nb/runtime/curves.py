"""Curves of runs: what they logged, averaged over seeds, a panel for each metric."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rlhf_nb.runtime.errors import did_you_mean
from rlhf_nb.runtime.files import log_history, read_jsonl

METRICS = ("objective/*", "policy/*", "loss/*", "val/*")  # those of the published report


@lru_cache(maxsize=1024)
def t_quantile(
    freedom: float,  # n - 1
    share: float = 0.95,  # probability between -t and t
) -> float:
    "Student's t. Raises ValueError below one degree of freedom."
    if freedom < 1:
        raise ValueError(f"freedom is {freedom}: give at least two runs.")
    angle = np.linspace(0, math.pi / 2, 20_001)  # x = sqrt(freedom) tan(angle)
    density = np.cos(angle) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(np.interp(share * area[-1], area, angle))


def mean_and_interval(
    values: pd.DataFrame,  # a column for each run, a row for each x; NaN: no value
) -> pd.DataFrame:  # mean, low, high, runs
    "Mean over the runs and its 95 % interval; NaN where there is one run."
    n = values.count(axis=1)
    t = n.map({k: t_quantile(k - 1) for k in range(2, values.shape[1] + 1)})
    half = t * values.std(axis=1) / n**0.5
    mean = values.mean(axis=1)
    return values.iloc[:, :0].assign(mean=mean, low=mean - half, high=mean + half, runs=n)


def newest_state(run: Path) -> Path | None:
    """The trainer_state.json of a run, or of its newest checkpoint where that went further: a
    resumed run writes its own at the end."""
    last = re.compile(r"checkpoint-(\d+)$")
    saved = {
        int(found[1]): path
        for path in run.glob("checkpoint-*/trainer_state.json")
        if (found := last.match(path.parent.name))
    }
    newest = saved[max(saved)] if saved else None
    own = run / "trainer_state.json"
    if not own.is_file():
        return newest
    logged = lambda state: max((row.get("step", 0) for row in log_history(state)), default=0)
    return newest if newest and 0 < logged(own) < logged(newest) else own


def read_object(path: Path) -> dict[str, Any]:
    "The object of a JSON file; empty where there is no file. Raises ValueError naming a bad file."
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, and an object was expected")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): fix or remove it.") from error
    return found


def planned_updates(run: Path) -> int | None:
    """Updates that a run was to have, of its state or of the settings of `rlhf-nb demo`; None where
    neither names them. Raises ValueError with the file that is damaged."""
    path = newest_state(run) or run / "settings.json"
    found = read_object(path)
    names = ("max_steps",) if path.name == "trainer_state.json" else ("episodes", "batch")
    counts = [found.get(name) or 0 for name in names]
    for name, count in zip(names, counts):
        if not isinstance(count, int) or count < 0:
            raise ValueError(
                f"{path}: {name} is {count!r}, and a whole number of 0 or more was expected. "
                f"Correct it, or remove {name} from the file."
            )
    if not all(counts):
        return None
    return counts[0] // counts[1] if len(counts) == 2 else counts[0]


def logged_rows(run: Path) -> list[dict[str, Any]]:
    """What a run's trainer_state.json holds, that of its newest checkpoint, or its metrics.jsonl.
    Raises ValueError where there is none of them."""
    if state := newest_state(run):
        return log_history(state)
    if not (run / "metrics.jsonl").is_file():
        raise ValueError(
            "it has neither trainer_state.json nor metrics.jsonl. Give the --output_dir of a "
            "command that trains"
        )
    rows = read_jsonl(run / "metrics.jsonl")
    return [row for row in rows if row.get("stage", "ppo") == "ppo"]


def read_log(
    run: str | Path,  # a folder
) -> pd.DataFrame:  # a row for each step, with the episode count where it was logged
    "What a run logged. Raises ValueError where it logged nothing."
    try:
        numbers = [
            {name: float(v) for name, v in row.items() if isinstance(v, int | float)}
            for row in logged_rows(Path(run))
        ]
        frame = pd.DataFrame([row for row in numbers if "step" in row])
        if not len(frame):
            raise ValueError("it has logged nothing yet")
    except (ValueError, KeyError) as error:
        raise ValueError(f"{run} cannot be drawn: {error}.") from error
    frame = frame.groupby("step", as_index=False).last()
    return frame.dropna(subset=["episode"]) if "episode" in frame else frame


def group_runs(
    runs: Sequence[str],  # folders
    groups: Sequence[str] | None = None,  # a name for each; None: its path without the seed
) -> dict[str, list[str]]:  # name -> the runs to average
    "Runs that differ in nothing but the seed. Raises ValueError where names and runs do not match."
    if groups and len(groups) != len(runs):
        raise ValueError(
            f"--group has {len(groups)} names for {len(runs)} runs: give one for each."
        )
    paths = [Path(run).as_posix() for run in runs]
    plain = [re.sub(r"[-_.]?seed[-_=]?\d+", "", path).strip("/") or path for path in paths]
    parents = [Path(path).parent for path in plain]
    shared = os.path.commonpath(parents) if len(set(plain)) > 1 else str(parents[0])
    names = groups or [os.path.relpath(path, shared or ".") for path in plain]
    return {
        name: [run for run, other in zip(runs, names) if other == name]
        for name in dict.fromkeys(names)
    }


def choose_metrics(
    logs: Sequence[pd.DataFrame],  # as of `read_log`
    patterns: Sequence[str] | None = None,  # None: METRICS, or all where none of these was logged
) -> list[str]:
    "Metrics that match, in the order of the patterns. ValueError where a pattern matches nothing."
    known = sorted({str(name) for log in logs for name in log} - {"step", "episode", "epoch"})
    matches = {p: [name for name in known if fnmatch(name, p)] for p in patterns or METRICS}
    if patterns is None and not any(matches.values()):
        return known
    if empty := next((p for p, match in matches.items() if not match and patterns), None):
        raise ValueError(
            f"--metrics {empty} matches nothing that was logged.{did_you_mean(empty, known)} There "
            f"are: {', '.join(known)}."
        )
    return list(dict.fromkeys(name for match in matches.values() for name in match))


def over_runs(
    logs: Sequence[pd.DataFrame],
    metric: str,
    x: str,  # episode or step
) -> pd.DataFrame | None:  # as of `mean_and_interval`; None where no run logged it
    "One metric of several runs."
    columns = [log.set_index(x)[metric].rename(i) for i, log in enumerate(logs) if metric in log]
    if not columns:
        return None
    return mean_and_interval(pd.concat(columns, axis=1).sort_index().dropna(how="all"))


def plot_runs(
    logs: Mapping[str, Sequence[pd.DataFrame]],  # name -> the logs of its seeds, as of `read_log`
    metrics: Sequence[str],
    ncols: int = 4,
) -> Figure:
    """A panel for each metric, a line for each name: the mean of its runs, and the 95 % interval
    (Student's t) where there are several."""
    x = "episode" if all("episode" in log for runs in logs.values() for log in runs) else "step"
    lines = {(name, m): over_runs(runs, m, x) for name, runs in logs.items() for m in metrics}
    labels = {
        name: name if len(runs) == 1 else f"{name} ({len(runs)} runs)"
        for name, runs in logs.items()
    }
    means = [
        line["mean"].rename(metric).reset_index().assign(run=labels[name])
        for (name, metric), line in lines.items()
        if line is not None
    ]
    several = any(len(runs) > 1 for runs in logs.values())
    from rlhf_nb.ui.viz import curves  # seconds, for torch, that reading a log does not wait for

    figure = curves(
        pd.concat(means, ignore_index=True),
        list(metrics),
        x=x,
        ncols=ncols,
        title="mean of the runs, and its 95 % interval (Student's t)" if several else None,
    )
    colours = [line.get_color() for line in figure.axes[0].get_lines()]
    for axis, metric in zip(figure.axes, metrics):
        for name, colour in zip(logs, colours):
            if (line := lines[name, metric]) is not None:
                axis.fill_between(
                    line.index, line["low"], line["high"], color=colour, alpha=0.2, linewidth=0
                )
    return figure
