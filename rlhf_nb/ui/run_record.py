"""The record of a run that trains: what has happened so far. No widgets, no threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from rlhf_nb.rollout import Rollout
from rlhf_nb.ui.html import duration


@dataclass(frozen=True)
class Change:
    "What somebody did to a run by hand."

    update: int  # the last one that it did not change
    what: str  # kl_coef, pause or stop
    before: float | None = None
    after: float | None = None  # of a pause: how many seconds

    def __str__(self) -> str:
        if self.what == "kl_coef":
            return f"kl_coef {self.before:.4g} → {self.after:.4g}"
        return "stopped" if self.after is None else f"paused for {duration(self.after)}"


STATES = {  # and the sentence for each
    "waiting": "No run yet: give this to a trainer as a callback, and call train().",
    "starting": "Starting: no {name} has begun yet.",
    "running": "Running: {of} is done.",
    "paused": "Paused after {of}. Go on, stop, or move kl_coef first.",
    "done": "Done: all {total:,} {name}s.",
    "ended": "Ended by another callback after {of}.",
    "stopped": "Stopped by hand after {of}; what was trained is kept.",
    "interrupted": "Interrupted after {whole}; the next one may be half made.",
    "left": "Interrupted in the pause after {of}; nothing is half made.",
    "failed": "Failed after {whole}: {error}",
}
COUNTERS = ("epoch", "step", "total_flos", "episode")  # in a log, beside its metrics


@dataclass
class Run:
    "What is known of a run at this moment."

    name: str = "update"  # what a step of this trainer is called
    state: str = "waiting"  # a key of STATES
    update: int = 0  # how many are done
    total: int = 0
    batch: int = 0  # episodes in an update; 0 where there are none
    rate: float | None = None  # updates in a second, over the last thirty
    kl_coef: float | None = None  # of the next update, unless another one is requested
    stopping: bool = False  # a stop was granted, and its update is being logged and saved
    error: str = ""
    last: Rollout | None = None  # of the last update
    lines: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # metric: its values
    changes: list[Change] = field(default_factory=list)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=31), repr=False)

    @property
    def going(self) -> bool:
        "Is there somebody who will grant a wish?"
        return self.state in ("starting", "running", "paused")

    def add(self, update: int, numbers: Mapping[str, Any]) -> None:
        "Add the metrics of an update; counters, totals and what is not a number are left out."
        for name, value in numbers.items():
            counts = name in COUNTERS or name.startswith(("train_", "steering/"))
            if isinstance(value, Real) and not counts:
                self.lines.setdefault(name, []).append((update, float(value)))

    def remember(self, line: Mapping[str, Any]) -> None:
        "Add a line of the log of a run that is resumed."
        at = line.get("step", 0)
        self.add(at, line)
        if "steering/kl_coef" in line:
            pair = line["steering/kl_coef_before"], line["steering/kl_coef"]
            self.changes.append(Change(at, "kl_coef", *pair))
        if "steering/stopped" in line:
            self.changes.append(Change(at, "stop"))

    def tick(self, seconds: float) -> None:
        "An update is over, at this reading of a clock. Pauses don't slow the rate."
        paused = sum(one.after or 0.0 for one in self.changes if one.what == "pause")
        self.times.append(seconds - paused)
        span = self.times[-1] - self.times[0]
        self.rate = (len(self.times) - 1) / span if span > 0 else None


def state_sentence(run: Run) -> str:
    "The state of a run in words."
    of, whole = f"{run.name} {run.update:,} of {run.total:,}", f"{run.update:,} whole {run.name}s"
    return STATES[run.state].format(
        name=run.name, total=run.total, of=of, whole=whole, error=run.error
    )
