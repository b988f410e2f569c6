"Alarms on a run: the score rises, and something else runs away."

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

_COUNTED = {  # what `stopped` is, and of what
    "turns/stopped": ("the share of turns", ""),
    "val/num_eos_tokens": ("answers", " an update"),
    "stopped": ("answers", ""),
}
_COLUMNS = dict(
    update=("update", "step"),
    score=("score", "reward", "objective/raw_scores", "objective/scores"),
    length=("length", "tokens/response_length"),
    repetition=("repetition",),
    kl=("kl", "objective/kl"),
    stopped=(*_COUNTED,),
    entropy=("entropy", "policy/entropy_avg"),
)


_SENTENCES = dict(
    length="answers grew from {0:.1f} to {1:.1f} tokens",
    repetition="repetition within answers went from {0:.1%} to {1:.1%}",
    kl="the KL from the reference went from {0:.1f} to {1:.1f} nats",
    stopped="{2} that reached their stop fell from {0:.3g} to {1:.3g}{3}",
    entropy="the entropy fell from {0:.2f} to {1:.2f} nats a token",
)


def _select_curves(metrics: pd.DataFrame) -> pd.DataFrame:
    """The monitored curves, under their short names; rows without a score are other log entries,
    and are dropped."""
    columns = {
        next(name for name in names if name in metrics): short
        for short, names in _COLUMNS.items()
        if any(name in metrics for name in names)
    }
    frame = metrics[list(columns)].rename(columns=columns)
    if "score" not in frame or not set(frame) - {"update", "score"}:
        raise ValueError(
            f"the columns are {list(metrics.columns)}: give a score "
            f"({', '.join(_COLUMNS['score'])}) and "
            f"one of {', '.join(name for short in list(_COLUMNS)[2:] for name in _COLUMNS[short])}."
        )
    if "turns/tokens" in metrics and metrics["turns/tokens"].max() <= 1:  # an answer or a stop
        frame = frame.drop(columns="stopped", errors="ignore")
    frame = frame.astype(float).dropna(subset=["score"]).reset_index(drop=True)
    return frame if "update" in frame else frame.assign(update=range(len(frame)))


@dataclass(frozen=True)
class Alarm:
    "Something that ran away while the score rose."

    kind: str  # length, repetition, kl, stopped or entropy
    update: int  # at which it was noticed
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def hacking_alarms(
    # one row per update, from the start of a run; names as the trainer logs them, or short
    metrics: pd.DataFrame,
    window: int = 3,  # updates to average: fewer react faster and are noisier
    sure: float = 2.0,  # standard errors by which the score must have risen
    length_ratio: float = 2.25,  # times the length at the start
    repetition_rise: float = 0.05,  # share of repeated n-grams above the start
    kl_most: float = 10.0,  # nats per response
    stopped_ratio: float = 0.9,  # times the share that stopped at the start
    entropy_ratio: float = 0.25,  # times the entropy at the start
) -> list[Alarm]:
    """What ran away while the score rose, in the order of time. An empty list does not prove that a
    run is healthy. Raises ValueError without the columns."""
    frame = _select_curves(metrics)
    start, now = frame[:window].mean(), frame.rolling(window, min_periods=1).mean()
    # of the difference between two means
    noise = (frame["score"].diff().expanding().std() / window**0.5).fillna(0.0)
    risen = now["score"] - start["score"] > sure * noise
    risen &= frame.index >= 2 * window - 1
    runs_away = dict(
        length=lambda x, x0: x > length_ratio * x0,
        repetition=lambda x, x0: x > x0 + repetition_rise,
        kl=lambda x, x0: x > kl_most,
        stopped=lambda x, x0: x < stopped_ratio * x0,
        entropy=lambda x, x0: x < entropy_ratio * x0,
    )
    alarms = []
    for kind in set(runs_away) & set(frame):
        alarmed = risen & runs_away[kind](now[kind], start[kind])
        if not alarmed.any():
            continue
        at = int(alarmed.idxmax())
        update = int(frame["update"][at])
        of = next((x for name, x in _COUNTED.items() if name in metrics), ())
        sentence = (
            f"Update {update}: while the score rose from {start['score']:+.2f} to "
            f"{now['score'][at]:+.2f}, {_SENTENCES[kind].format(start[kind], now[kind][at], *of)}."
        )
        alarms.append(Alarm(kind, update, sentence))
    return sorted(alarms, key=lambda alarm: (alarm.update, alarm.kind))


def alarms_of(logs: Iterable[Mapping[str, Any]]) -> list[Alarm]:
    """Those of `hacking_alarms` on what a trainer logged, whatever else is among it. An update has
    the number of its rollout, from 0: it is one less than the step, which counts those done."""
    updates = [log for log in logs if {"objective/raw_scores", "objective/kl"} <= log.keys()]
    if len(updates) < 2:
        return []
    frame = pd.DataFrame(updates)
    if "step" not in frame:
        return hacking_alarms(frame)
    found = hacking_alarms(frame.assign(update=frame["step"] - 1))
    also = "{0.sentence} The log counts it as {1}."
    return [replace(one, sentence=also.format(one, one.update + 1)) for one in found]
