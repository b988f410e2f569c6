"""What the metrics of a healthy run, and of runs with known bugs, looked like update by update over
several seeds. `bands.json` is made from kept results by `benchmarks/bands.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

DATA = Path(__file__).with_name("bands.json")
NOT_COMPARED = {"step", "episode", "epoch", "names a day", "total_flos"}  # counters, and no metric
APART = ("time/", "eps", "tokens/per_second", "train_", "gold/")  # of the machine, or of a judge
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


@dataclass(frozen=True)
class Bands:
    "Several seeds of one recipe: for each metric, a row an update and a column a seed."

    name: str
    seeds: tuple[int, ...]
    values: Mapping[str, np.ndarray] = field(repr=False)  # metric -> [updates, seeds]

    @property
    def updates(self) -> int:
        return max(map(len, self.values.values()))

    def without(self, seed: int) -> Bands:
        "The bands of the other seeds."
        others = [i for i, one in enumerate(self.seeds) if one != seed]
        left = {name: x[:, others] for name, x in self.values.items()}
        return Bands(self.name, tuple(self.seeds[i] for i in others), left)

    def log_of(self, seed: int) -> pd.DataFrame:
        "One seed as a log: a row an update."
        column = self.seeds.index(seed)
        log = pd.DataFrame({name: x[:, column] for name, x in self.values.items()})
        return log.assign(step=np.arange(1, len(log) + 1))


def bands_of(
    logs: Sequence[pd.DataFrame],  # of one recipe's seeds, as of `rlhf_nb.runtime.curves.read_log`
    name: str = "others",
    seeds: Sequence[int] = (),
) -> Bands:
    "Bands of some runs, over the updates and metrics that all of them have."
    logs = [with_computed(log) for log in logs]
    updates = min(map(len, logs))
    shared = [m for m in compared_metrics(logs[0]) if all(m in log for log in logs)]
    values = {m: np.stack([log[m].to_numpy(float)[:updates] for log in logs], 1) for m in shared}
    return Bands(name, tuple(seeds) or tuple(range(len(logs))), values)


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
