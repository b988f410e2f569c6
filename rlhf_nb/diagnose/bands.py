"""What the metrics of a healthy run, and of runs with known bugs, looked like update by update over
several seeds. `bands.json` is made from kept results by `benchmarks/bands.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

DATA = Path(__file__).with_name("bands.json")
NOT_COMPARED = {"step", "episode", "epoch", "names a day", "total_flos"}  # counters, and no metric
APART = ("time/", "eps", "tokens/per_second", "train_", "gold/")  # of the machine, or of a judge
LAST = ("step", "episode", "lr", "objective/kl_coef")  # of a row's last update; the rest: its mean
SHORTEST = 3  # rows of a band: of fewer, no two in a row say anything
EOS, GAP = "val/eos_share", "entropy gap"  # computed from what is logged


def with_computed(log: pd.DataFrame) -> pd.DataFrame:
    """A log with two columns more, where it has what they need: the share of an update's responses
    that reached the stop token, and the entropy of a token less that of the tokens sampled."""
    log = log.copy()
    if {"val/num_eos_tokens", "episode"} <= set(log):  # a mean over the updates of a row
        each = log[[x for x in ("episode", "step") if x in log]]
        each = each.diff().fillna(each)
        log[EOS] = log["val/num_eos_tokens"] * each.get("step", 1) / each["episode"]
    parts = ["policy/entropy_avg", "objective/entropy", "tokens/response_length"]
    if set(parts) <= set(log):
        log[GAP] = log[parts[0]] - log[parts[1]] / log[parts[2]]
    return log.drop(columns="val/num_eos_tokens", errors="ignore")


def compared_metrics(log: pd.DataFrame) -> list[str]:
    "Those of a log that say something about the run, sorted."
    return sorted(
        name
        for name in map(str, log)
        if name not in NOT_COMPARED and not name.startswith(APART) and log[name].notna().any()
    )


def row_width(
    steps: ArrayLike,  # [R] the last update of each row
) -> int:
    "Updates of a usual row of a log."
    return int(np.median(np.diff(np.asarray(steps), prepend=0)))


def gathered(
    log: pd.DataFrame,
    row: np.ndarray,  # [len(log)] the row that each of its rows goes to, in order
) -> pd.DataFrame:
    """A log in fewer rows. A row is the mean of the updates since the row before, so several are
    one by their mean, weighted by their updates."""
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    if len(starts) == len(log):
        return log
    updates = np.diff(log["step"].to_numpy(float), prepend=0)[:, None]
    sums = np.add.reduceat(log.to_numpy(float) * updates, starts)
    means = pd.DataFrame(sums / np.add.reduceat(updates, starts), columns=log.columns)
    last = [name for name in LAST if name in log]
    means[last] = log[last].to_numpy()[np.append(starts[1:], len(log)) - 1]
    return means


@dataclass(frozen=True)
class Bands:
    "Several seeds of one recipe: for each metric, the rows of their logs, a column for each seed."

    name: str
    seeds: tuple[int, ...]
    values: Mapping[str, np.ndarray] = field(repr=False)  # metric -> [R, seeds]
    logged: tuple[int, ...] = field(default=(), repr=False)  # [R] updates; (): every one

    @property
    def steps(self) -> np.ndarray:  # [R]
        "The last update of each row."
        rows = max(map(len, self.values.values()))
        return np.array(self.logged or range(1, rows + 1))

    @property
    def updates(self) -> int:
        return int(self.steps[-1])

    @property
    def width(self) -> int:
        "Updates of a usual row."
        return row_width(self.steps)

    def without(self, seed: int) -> Bands:
        "The bands of the other seeds."
        others = [i for i, one in enumerate(self.seeds) if one != seed]
        left = {name: x[:, others] for name, x in self.values.items()}
        return replace(self, seeds=tuple(self.seeds[i] for i in others), values=left)

    def log_of(self, seed: int) -> pd.DataFrame:
        "One seed as a log."
        column = self.seeds.index(seed)
        log = pd.DataFrame({name: x[:, column] for name, x in self.values.items()})
        return log.assign(step=self.steps)


def bands_of(
    logs: Sequence[pd.DataFrame],  # of one recipe's seeds, as of `rlhf_nb.runtime.curves.read_log`;
    # without a step, a row is an update
    name: str = "others",
    seeds: Sequence[int] = (),
) -> Bands:
    """Bands of some runs, over the metrics that all of them have. A row ends at each update that
    all of them logged; what a run logged between is averaged. Raises ValueError where they logged
    fewer than 3 updates in common."""
    logs = [with_computed(log) for log in logs]
    logs = [log if "step" in log else log.assign(step=range(1, len(log) + 1)) for log in logs]
    steps = sorted(set.intersection(*({*log["step"].astype(int)} for log in logs)))
    if len(steps) < SHORTEST:
        every = " and ".join(map(str, sorted({row_width(log["step"]) for log in logs})))
        raise ValueError(
            f"the {name} logged {len(steps)} updates in common, with a row every {every} updates: "
            f"a band needs {SHORTEST} or more. Give runs with the same --logging_steps."
        )
    logs = [log[log["step"] <= steps[-1]] for log in logs]
    logs = [gathered(log, np.searchsorted(steps, log["step"])) for log in logs]
    shared = [m for m in compared_metrics(logs[0]) if all(m in log for log in logs)]
    values = {m: np.stack([log[m].to_numpy(float) for log in logs], 1) for m in shared}
    return Bands(name, tuple(seeds) or tuple(range(len(logs))), values, tuple(steps))


@cache
def kept() -> dict[str, Any]:
    "What bands.json holds."
    return json.loads(DATA.read_text(encoding="utf-8"))


def read_bands(name: str, one: Mapping[str, Any]) -> Bands:
    "An entry of bands.json."
    values = {metric: np.array(x, dtype=float).T for metric, x in one["metrics"].items()}
    return Bands(name, tuple(one["seeds"]), values)


def references() -> dict[str, Bands]:
    "The healthy runs that a run can be held against, by name."
    return {name: read_bands(name, one) for name, one in kept()["references"].items()}


def illnesses() -> dict[str, tuple[Bands, Bands]]:
    "Each bug of the museum: the runs that have it, and the healthy ones beside them."
    return {
        name: (read_bands(name, one["ill"]), read_bands(f"healthy beside {name}", one["healthy"]))
        for name, one in kept()["illnesses"].items()
    }
