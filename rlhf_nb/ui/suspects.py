"""What in a run deserves a look: alarms, jumps, and episodes that are far from the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pandas as pd

from rlhf_nb.training.alarms import hacking_alarms
from rlhf_nb.training.metrics import LOG_NAMES
from rlhf_nb.ui.run_files import ENGINE_GAP, Updates, log_or_means


@dataclass(frozen=True)
class Suspect:
    "Something that deserves a look."

    update: int
    episode: int | None  # None: the update as a whole
    sentence: str


_ODD: dict[str, Callable[[float], str]] = dict(  # of `episode_numbers`, and how it is said
    kl=lambda x: f"KL {x:.3g} nats",
    length=lambda x: f"length {x:.0f} tokens",
    repetition=lambda x: f"repetition {100 * x:.0f} %",
)


def within_updates(numbers: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """How far each number is from the mean of its update, in standard deviations within updates,
    pooled over all of them: an update in which nearly all are alike has no tiny unit of its own."""
    means = numbers.groupby("update")[columns].transform("mean")
    groups = len(numbers["update"].unique())
    spread = ((numbers[columns] - means) ** 2).sum() / max(1, len(numbers) - groups)
    z = (numbers[columns] - means) / spread**0.5
    return z.replace([math.inf, -math.inf], 0.0).fillna(0.0)


def episode_suspects(
    numbers: pd.DataFrame,  # a row an episode: update, episode, score, kl, length, repetition
    most: int = 6,
    far: float = 2.5,  # standard deviations within updates, above the mean of its own
) -> list[Suspect]:  # the oddest first
    "Episodes that are paid more than most of their update and are far out in one of _ODD."
    odd = [name for name in _ODD if name in numbers]
    if "score" not in numbers or not odd:
        return []
    z = within_updates(numbers, ["score", *odd])
    farthest = z[odd].max(axis=1)
    picked = farthest[(z["score"] > 1) & (farthest > far)]
    picked = picked.sort_values(ascending=False, kind="stable").head(most)

    def suspect(row: dict[str, float], its: dict[str, float]) -> Suspect:
        update, episode = int(row["update"]), int(row["episode"])
        facts = ", ".join(f"{_ODD[x](row[x])} ({its[x]:+.1f} sd)" for x in odd if its[x] > far)
        paid = f"score {row['score']:+.2f} ({its['score']:+.1f} sd)"
        return Suspect(update, episode, f"Update {update}, episode {episode}: {paid}, {facts}")

    return [suspect(dict(numbers.loc[i]), dict(z.loc[i])) for i in picked.index]


def two_views(numbers: pd.DataFrame) -> list[Suspect]:
    "The episode with most tokens that sampler and trainer see apart, where one in 500 is."
    apart = numbers["apart"] if "apart" in numbers else numbers["length"] * 0
    if not (share := apart.sum() / max(1, numbers["length"].sum())) > 1 / 500:
        return []
    columns = ["update", "episode", "apart", "length"]
    update, episode, count, length = map(int, numbers[columns].to_numpy()[apart.argmax()])
    gap = f"sampler and trainer are {ENGINE_GAP} nats and more apart on {count} of {length} tokens"
    gap += f", and on {100 * share:.2g} % of all"
    return [Suspect(update, episode, f"Alarm. Update {update}, episode {episode}: {gap}")]


def _jump(name: str, line: pd.DataFrame, column: str) -> list[Suspect]:
    "The largest step of a metric, where it is eight times the usual one."
    values, updates = line[column].tolist(), line["update"].tolist()
    steps = line[column].diff().abs()
    if len(line) < 5 or not steps.max() > 8 * steps.median() > 0:
        return []
    at = steps.tolist().index(steps.max())
    went = f"{name} went from {values[at - 1]:.3g} to {values[at]:.3g} in one update"
    return [Suspect(int(updates[at]), None, f"Jump. Update {updates[at]:.0f}: {went}")]


def run_suspects(
    log: pd.DataFrame,  # a row an update, with `update` and metrics as the trainer names them
    counted: str = "tokens",  # what lengths are counted in
) -> list[Suspect]:  # alarms, then jumps
    "Updates at which something ran away or jumped."
    watched = ("score", "KL", "length", "entropy")
    logged = {name: LOG_NAMES[name] for name in watched if LOG_NAMES[name] in log}
    alarms = hacking_alarms(log) if "score" in logged and len(logged) > 1 else []
    sentence = lambda alarm: f"Alarm. {alarm.sentence}".replace(" tokens.", f" {counted}.")
    suspects = [Suspect(alarm.update, None, sentence(alarm)) for alarm in alarms]
    below = log[log[kl] < -0.5] if (kl := LOG_NAMES["KL"]) in log else log[:0]
    for row in below.to_dict("records")[-1:]:
        negative = f"Alarm. Update {row['update']:.0f}: mean KL is {row[kl]:.3g} nats. If that is "
        negative += "not the noise of few answers, log-probs of sampler, trainer or reference are "
        negative += "not of the same policy or text"
        suspects.insert(0, Suspect(int(row["update"]), None, negative))
    for name, column in logged.items():
        suspects += _jump(name, log.dropna(subset=[column]), column)
    return suspects


def suspects_of(run: Updates, updates: Iterable[int] | None, most: int = 6) -> list[Suspect]:
    "Suspects of the run as a whole, then of the episodes of some updates (None: of all)."
    of_run, numbers = run_suspects(log_or_means(run), counted=run.counted), run.numbers(updates)
    return two_views(numbers) + of_run + episode_suspects(numbers, most)
