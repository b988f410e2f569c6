"""Is my run normal? Its curves held against those of healthy seeds: when each metric leaves its
band, and which bugs of the museum a run deviates like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rlhf_nb.diagnose.bands import (
    EOS,
    GAP,
    LAST,
    SHORTEST,
    Bands,
    bands_of,
    compared_metrics,
    gathered,
    illnesses,
    kept,
    references,
    row_width,
    with_computed,
)
from rlhf_nb.runtime.curves import mean_and_interval, planned_updates, read_log, read_object
from rlhf_nb.runtime.errors import did_you_mean
from rlhf_nb.runtime.metrics import RANGES, healthy

WIDER = 2.0  # spreads by which a band is wider, on each side, than the seeds' range
FEWEST = 2  # runs whose range is a band
ENOUGH = 5  # of fewer, many a healthy run leaves some band
APPROXKL = "policy/approxkl_avg"  # 0 while the value model learns alone
PATIENCE = 2  # rows of the bands in a row that a metric is outside before it has left
FARTHEST = 10.0  # spreads; a deviation beyond counts as this
SHOWN = 3  # suspects
# Likeness of a suspect: of the healthy runs, each against the others of its recipe, one in thirty
# comes as near to some bug; of ten bugs every run does (tests/test_compare.py counts both).
ALIKE = 0.45
CARRIES = {  # metrics that mean the same in any run with a KL penalty, and what they do
    "val/ratio": "1 while nothing was learned yet, then near it",
    APPROXKL: "0 while nothing was learned yet, then small",
    "policy/clipfrac_avg": "0 while nothing was learned yet, then small",
    "val/explained_variance": "about 0 at first, then towards 1",
    EOS: "nearly all",
    GAP: "about 0: both are estimates of the same entropy",
}
NO_NORM = (
    "Bands of a small world are no norm for a large model. What carries over: the ratio is 1 and "
    "the KL 0 before anything is learned, few tokens are clipped, nearly all responses stop, the "
    "values explain more and more. What does not: scores and losses (the unit of your reward), "
    "the level of KL and entropy and the length (your vocabulary and task), gradient norms (the "
    "size of the model), learning rate and price of KL (settings)."
)
HOW = (
    "Likeness is the cosine between two lists of deviations, over metrics and updates: this run's, "
    "and the mean of the runs with that bug. A deviation is from the median of the healthy runs, "
    f"in units of their spread, and no more than {FARTHEST:g}. 1: the same shape; 0: nothing in "
    f"common. From {ALIKE} on a bug is named: a suspect, not a verdict."
)
NO_LOG = (
    "A log is the trainer_state.json that `rlhf-nb ppo` writes at its end and into each checkpoint "
    "(--save_strategy steps --save_steps 1 keeps it during the run, --logging_steps 1 every "
    "update), that trainer.save_state() writes in a script, or the metrics.jsonl of `rlhf-nb demo`"
)


class Edges(NamedTuple):
    "The band of a metric, row by row."

    center: np.ndarray  # [R] median of the seeds
    spread: np.ndarray  # [R] the unit of a deviation
    low: np.ndarray  # [R]
    high: np.ndarray  # [R]


def edges(values: np.ndarray) -> Edges:  # [R, seeds]
    """Median and range of the seeds, and the range made wider by WIDER spreads. A spread is half
    the range, at least half the run's median; where the seeds agree exactly, a hundredth of the
    largest median."""
    center, low, high = (f(values, axis=1) for f in (np.nanmedian, np.nanmin, np.nanmax))
    half, largest = (high - low) / 2, float(np.nanmax(np.abs(center)))
    agree = half <= 1e-4 * largest
    usual = float(np.median(half[~agree])) if (~agree).any() else 0.0
    spread = np.where(agree, 0.01 * largest + 1e-9, np.maximum(half, usual))
    return Edges(center, spread, low - WIDER * spread, high + WIDER * spread)


def warm_up(approxkl: np.ndarray | None) -> int:
    "Updates at the start in which the policy did not learn; 0 where it never did, or none logged."
    learned = np.flatnonzero(approxkl > 1e-7) if approxkl is not None else np.array([])
    return int(learned[0]) if len(learned) else 0


def places(
    count: int,  # updates that the run is to have
    length: int,  # updates of the bands
    warm: tuple[int, int] = (0, 0),  # updates of each in which the value model learned alone
) -> np.ndarray:  # [count]
    "Where a run's updates are on the bands, by share: warm-up on warm-up, the rest on the rest."
    ours, theirs = warm if all(warm) else (0, 0)
    first = np.linspace(0, theirs - 1, ours) if ours else np.zeros(0)
    return np.concatenate([first, np.linspace(theirs, length - 1, count - ours)])


def at(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    "A line of the bands [U] between its updates."
    return np.interp(places, np.arange(len(values)), values)


def along(
    edges: Edges,  # of the bands' rows
    theirs: np.ndarray,  # [R] the last update of each of these
    ours: np.ndarray,  # [r] of each row of a run
    where: np.ndarray,  # [U] places of the run's updates on the bands
    last: bool = False,  # whether a row is the value at its last update, and not a mean
) -> Edges:  # [r]
    "The band at a run's rows: its mean over the updates since the row before."
    if last:
        return Edges(*(np.interp(where[ours - 1], theirs - 1, line) for line in edges))
    first = np.append(0, theirs[:-1])  # a row of the bands is level, from its first update on
    knots = np.stack([first, theirs - 1], 1).ravel()
    starts, updates = np.append(0, ours[:-1]), np.diff(ours, prepend=0)
    lines = (np.interp(where, knots, np.repeat(line, 2)) for line in edges)
    return Edges(*(np.add.reduceat(line, starts) / updates for line in lines))


# ---- What left its band ----


@dataclass(frozen=True)
class Left:
    "One metric of the run against its band."

    metric: str
    update: int | None  # at which it left its band; None: it stayed inside
    value: float | None  # then
    low: float | None
    high: float | None
    counts: bool  # whether the bands are a norm for it in this run


def first_outside(outside: Iterable[bool], patience: int) -> int | None:
    "Where the first stretch of `patience` trues begins; one that the end cuts off is none."
    run = 0
    for i, out in enumerate(outside):
        run = run + 1 if out else 0
        if run == patience:
            return i - patience + 1
    return None


def left(metric: str, log: pd.DataFrame, band: Edges, patience: int, counts: bool) -> Left:
    "When a metric left its band; a value that is no number is outside."
    line = log[metric].to_numpy(float)
    inside = (line >= band.low) & (line <= band.high)
    i = first_outside(~inside & ~np.isnan(band.center), min(patience, len(line)))
    if i is None:
        return Left(metric, None, None, None, None, counts)
    value, low, high = (float(x[i]) for x in (line, band.low, band.high))
    return Left(metric, int(log["step"].iloc[i]), value, low, high, counts)


# ---- What it looks like ----


@dataclass(frozen=True)
class Suspect:
    "A bug of the museum, and how much the run deviates like the runs that have it."

    name: str
    case: int  # of the lab
    what: str
    likeness: float  # up to 1


def deviations(values: np.ndarray, band: Edges) -> np.ndarray:  # [U] or [U, runs], like values
    "In units of the healthy runs' spread."
    columns = (-1, *[1] * (values.ndim - 1))
    z = (values - band.center.reshape(columns)) / band.spread.reshape(columns)
    return np.clip(np.nan_to_num(z, nan=FARTHEST), -FARTHEST, FARTHEST)


def profile(ill: Bands, beside: Bands) -> dict[str, np.ndarray]:  # metric -> [U]
    "How runs with a bug deviate from the healthy ones beside them."
    shared = [m for m in ill.values if m in beside.values]
    return {m: deviations(ill.values[m], edges(beside.values[m])).mean(1) for m in shared}


def likeness(
    run: dict[str, np.ndarray],  # metric -> deviations [U]
    other: dict[str, np.ndarray],
    share: np.ndarray,  # [U] of the other's updates, 0 to 1, at the run's
) -> float:
    """The cosine between two profiles, over the metrics that both have. 0 where one of them
    deviates in nothing."""
    shared = [m for m in run if m in other]
    if not shared:
        return 0.0
    ours = np.concatenate([run[m] for m in shared])
    theirs = np.concatenate([at(share * (len(other[m]) - 1), other[m]) for m in shared])
    size = float(np.linalg.norm(ours) * np.linalg.norm(theirs))
    return float(ours @ theirs) / size if size else 0.0


def ranked(
    run: dict[str, np.ndarray],  # metric -> deviations [U]
    share: np.ndarray,  # [U] where its updates are in a case's runs
    cases: Mapping[str, tuple[Bands, Bands]],
) -> list[Suspect]:
    "Every bug, the most alike first."
    known = kept()["illnesses"]
    found = [
        Suspect(
            name, known[name]["case"], known[name]["what"], likeness(run, profile(*pair), share)
        )
        for name, pair in cases.items()
    ]
    return sorted(found, key=lambda one: -one.likeness)


# ---- The whole ----


@dataclass(frozen=True)
class Comparison:
    "A run against bands."

    run: str
    against: str
    updates: int  # up to the last that it logged
    planned: int
    by_share: bool  # how they were aligned: by the share of the run, or update by update
    norm: bool  # whether the bands are those of the same recipe
    lines: tuple[Left, ...]  # those that left first
    suspects: tuple[Suspect, ...]  # the most alike first; none where all is inside
    absent: tuple[str, ...]  # metrics of the bands that the run did not log
    log: pd.DataFrame = field(repr=False)
    rows: pd.DataFrame = field(repr=False)  # the log in rows no narrower than those of the bands
    band: Mapping[str, Edges] = field(repr=False)  # metric -> at these rows
    bands: Bands = field(repr=False)
    left_out: tuple[str, ...] = ()  # OTHER runs that were the run itself, or given before

    @property
    def outside(self) -> list[Left]:
        "The metrics that left a band that is a norm for them."
        return [line for line in self.lines if line.counts and line.update is not None]

    @property
    def verdict(self) -> str:
        "The whole in a sentence."
        counted = sum(line.counts for line in self.lines)
        if not counted and len(self.bands.seeds) >= FEWEST:
            return (
                "The run logged no metric that means the same in another recipe: give OTHER runs "
                "of its own."
            )
        if not counted:
            return (
                f"One other run makes no band: give {FEWEST} or more to see what leaves it. The "
                "curves are side by side."
            )
        if not self.outside:
            return f"All of {counted} metrics stayed inside their bands: no suspects."
        first = self.outside[0]
        alike = "" if self.suspects else " No bug of the museum looks like it."
        return (
            f"{len(self.outside)} of {counted} metrics left their bands, {first.metric} first, at "
            f"update {first.update}.{alike}"
        )

    @property
    def aligned(self) -> str:
        "How, in a sentence."
        how = (
            "by the share of the run that is done (the value model's warm-up on that of the bands)"
            if self.by_share
            else "update by update"
        )
        size = f"{self.bands.updates} updates and {len(self.bands.seeds)} seeds"
        few = (
            f" Bands of fewer than {ENOUGH} runs are narrow: many a healthy run leaves one."
            if FEWEST <= len(self.bands.seeds) < ENOUGH
            else ""
        )
        own = f"{self.updates} of {self.planned}" if self.planned > self.updates else self.updates
        ours, theirs = row_width(self.log["step"]), self.bands.width
        often = lambda n: "every update" if n == 1 else f"every {n} updates"
        means = (
            f" The run was logged {often(ours)}, the bands {often(theirs)}: each point is a mean "
            f"over {max(ours, theirs)}."
            if max(ours, theirs) > 1
            else ""
        )
        out = ", ".join(self.left_out)
        out = f" Left out, as the run itself or given twice: {out}." if out else ""
        return f"{own} updates against bands of {size}, aligned {how}.{means}{few}{out}"

    def as_json(self) -> dict[str, Any]:
        "For `--json`."
        frames = ("log", "rows", "band", "bands")
        parts = {k: v for k, v in vars(self).items() if k not in frames}
        parts["lines"] = [asdict(line) for line in self.lines]
        parts["suspects"] = [asdict(one) for one in self.suspects]
        shared = dict(verdict=self.verdict, aligned=self.aligned, how=HOW, note=NO_NORM)
        return parts | shared | dict(carries=carried(self.log), ends=ends(self))


def same_recipe(run: Path, command_settings: dict[str, Any]) -> bool:
    """Whether a demo wrote the run's folder, with these settings. Raises ValueError where its
    settings.json is damaged."""
    settings = read_object(run / "settings.json")
    return bool(command_settings) and command_settings.items() <= settings.items()


def places_of(log: pd.DataFrame, bands: Bands, by_share: bool, planned: int) -> np.ndarray:
    "Where each update up to the last of a log is on the bands, from 0."
    steps, kl = log["step"].to_numpy(int), APPROXKL
    if not by_share:
        return np.minimum(np.arange(steps[-1]), bands.updates - 1.0)
    ours = warm_up(log[kl].to_numpy(float) if kl in log else None)
    theirs = warm_up(np.nanmedian(bands.values[kl], 1) if kl in bands.values else None)
    warm = [int(x[rows - 1]) if rows else 0 for x, rows in ((steps, ours), (bands.steps, theirs))]
    return places(planned, bands.updates, (warm[0], warm[1]))[: steps[-1]]


def held_against(
    log: pd.DataFrame,  # as of `read_log`
    bands: Bands,
    name: str = "run",
    norm: bool = True,  # False: only metrics that carry over count
    cases: Mapping[str, tuple[Bands, Bands]] | None = None,  # None: those of the museum
    by_share: bool | None = None,  # None: where the lengths differ
    planned: int | None = None,  # updates that the run is to have; None: those that it logged
) -> Comparison:
    "A log against bands, and the bugs that it deviates like. Raises ValueError: nothing shared."
    log = with_computed(log)
    metrics = [m for m in bands.values if m in log]
    if not metrics:
        raise ValueError(
            f"{name} logged none of the metrics of {bands.name}, {', '.join(bands.values)}: give a "
            "run of PPO."
        )
    done = int(log["step"].max())
    planned = max(done, planned or 0)
    by_share = planned != bands.updates if by_share is None else by_share
    where = places_of(log, bands, by_share, planned)
    rows = gathered(log, (log["step"].to_numpy(int) - 1) // bands.width)
    ours, theirs = rows["step"].to_numpy(int), bands.steps
    band = {m: along(edges(bands.values[m]), theirs, ours, where, m in LAST) for m in metrics}
    several = len(bands.seeds) >= FEWEST
    counts = {m: several and (norm or m in CARRIES) for m in metrics}
    lines_each = len(rows) / done * planned / len(theirs) if by_share else 1
    patience = PATIENCE * max(1, round(lines_each))
    stayed = (None, None, None, None, False)
    lines = [
        left(m, rows, band[m], patience, counts[m]) if several else Left(m, *stayed)
        for m in metrics
    ]
    lines.sort(key=lambda one: (one.update is None, not one.counts, one.update or 0))
    run = {m: deviations(rows[m].to_numpy(float), band[m]) for m in metrics if counts[m]}
    ill = any(line.counts and line.update is not None for line in lines)
    share = where[ours - 1] / max(1, bands.updates - 1)
    found = ranked(run, share, illnesses() if cases is None else cases) if ill else []
    suspects = tuple(one for one in found[:SHOWN] if one.likeness >= ALIKE)
    absent = tuple(m for m in bands.values if m not in metrics)
    size, data = (done, planned, by_share, norm), (log, rows, band, bands)
    return Comparison(name, bands.name, *size, tuple(lines), suspects, absent, *data)


def logged(run: str | Path) -> pd.DataFrame:
    "What a run logged. Raises ValueError where it kept nothing, with what would have kept it."
    if not Path(run).is_dir():
        raise ValueError(f"{run} is no folder: give the --output_dir of a command that trains.")
    try:
        log = read_log(run)
    except ValueError as error:
        text = str(error).replace("cannot be drawn", "cannot be compared")
        damaged = "damaged" in text or "is not JSON" in text
        raise ValueError(text if damaged else f"{text} {NO_LOG}.") from error
    own = [
        name
        for name in map(str, log)
        if name.startswith(("objective/", "policy/", "val/", "loss/"))
    ]
    if own:  # lines that a judge wrote between the updates have none of them
        log = log.dropna(subset=own, how="all")
    return log.reset_index(drop=True)


def logged_like(other: str | Path, log: pd.DataFrame, run: str | Path) -> pd.DataFrame:
    "The log of another run. Raises ValueError where it is too short, or has nothing in common."
    theirs = logged(other)
    if len(theirs) < SHORTEST:
        raise ValueError(
            f"{other} logged {len(theirs)} updates: a band needs runs of {SHORTEST} or more."
        )
    ours = compared_metrics(with_computed(log))
    if not set(ours) & set(compared_metrics(with_computed(theirs))):
        raise ValueError(
            f"{other} logged none of the metrics of {run}, which are {', '.join(ours)}: give runs "
            "of PPO."
        )
    return theirs


def others_once(
    run: str | Path, others: Sequence[str | Path]
) -> tuple[list[str | Path], tuple[str, ...]]:
    """The others without the run itself, each once, and those left out. Raises ValueError where
    nothing is left."""
    seen = {Path(run).resolve()}
    once: list[str | Path] = []
    out: list[str] = []
    for one in others:
        if Path(one).resolve() in seen:
            out.append(str(one))
        else:
            once.append(one)
        seen.add(Path(one).resolve())
    if not once:
        raise ValueError(
            f"the OTHER runs are {run} itself, which can't be held against itself: give the "
            "folders of other seeds."
        )
    return once, tuple(out)


def compare(
    run: str | Path,  # a folder
    others: Sequence[str | Path] = (),  # runs whose range is the band; none: a reference
    reference: str | None = None,  # None: the one whose recipe the run has, else `reference`
) -> Comparison:
    """A run against the bands of a reference, or of other runs, each once and without the run
    itself. Raises ValueError on a run without a log, a damaged file, an unknown reference, or
    others of which nothing is left or which logged too few updates in common."""
    log, planned = logged(run), planned_updates(Path(run))
    if others:
        once, out = others_once(run, others)
        bands = bands_of([logged_like(one, log, run) for one in once])
        return replace(held_against(log, bands, str(run), planned=planned), left_out=out)
    known, made = references(), kept()["references"]
    alike = [name for name in known if same_recipe(Path(run), made[name]["settings"])]
    reference = reference or (alike or ["reference"])[0]
    if reference not in known:
        hint = did_you_mean(reference, known)
        raise ValueError(f"the reference is {reference!r}.{hint} There are: {', '.join(known)}.")
    same = reference in alike
    norm = same or not made[reference]["settings"]  # one without settings was named on purpose
    by_share = False if same else None
    return held_against(log, known[reference], str(run), norm, by_share=by_share, planned=planned)


# ---- What holds for any run, and the ends of the curves ----


def carried(log: pd.DataFrame) -> list[dict[str, Any]]:
    """What must hold in any run, and what this one did: the first update, then the healthy ranges.
    `holds` is None where the log does not tell: a mean of several updates is not the first."""
    first, rows = log.iloc[0], []
    for metric, start, near in (("objective/kl", 0.0, 0.01), ("val/ratio", 1.0, 0.05)):
        if metric in log:
            value, alone = float(first[metric]), first["step"] == 1
            holds = bool(abs(value - start) <= near) if alone else None
            measured = f"{value:.3g}" if alone else "not logged alone; --logging_steps 1 shows it"
            what = f"{metric}, first update"
            rows.append(dict(what=what, expected=f"{start:g}", measured=measured, holds=holds))
    since = warm_up(log[APPROXKL].to_numpy(float) if APPROXKL in log else None)
    for metric, known in RANGES.items():
        if metric in log and known.low is not None:
            values = log[metric].iloc[since:]
            beyond = [not healthy(metric, x, first=i == 0) for i, x in enumerate(values)]
            at_first = "" if known.first is None else f" (at first {known.first:g})"
            rows.append(
                dict(
                    what=f"{metric}, once the policy learns" if since else metric,
                    expected=f"{known.low:g} to {known.high:g}{at_first}, but for single updates",
                    measured=f"outside in {sum(beyond)} of {len(values)} updates",
                    holds=first_outside(beyond, PATIENCE) is None,
                )
            )
    return rows


def over_seeds(values: pd.DataFrame) -> pd.DataFrame:
    "Mean and interval over runs: that of `gains.mean_interval`, without its imports."
    return mean_and_interval(values)


def ends(comparison: Comparison) -> list[dict[str, Any]]:
    """The last tenth of each curve as far as the run is: its mean, and the others' with its
    interval."""
    bands, log = comparison.bands, comparison.log
    here = places_of(log, bands, comparison.by_share, comparison.planned)[-1]
    until = int(np.searchsorted(bands.steps, here + 1)) + 1
    tail = lambda x: x[-max(1, len(x) // 10) :].mean(0)
    metrics = [line.metric for line in comparison.lines]
    frame = pd.DataFrame({m: tail(bands.values[m][:until]) for m in metrics}).T
    summary = over_seeds(frame)
    found = [dict(zip(map(str, summary), row)) for row in summary.to_numpy(float).tolist()]
    own = [float(tail(comparison.rows[m].to_numpy(float))) for m in metrics]
    return [dict(metric=m, run=x) | row for m, x, row in zip(metrics, own, found)]


def stays_inside(bands: Bands, seeds: Iterable[int] | None = None) -> dict[int, list[str]]:
    "Each seed against the bands of the others: the metrics that left."
    return {
        seed: [
            line.metric
            for line in held_against(bands.log_of(seed), bands.without(seed), cases={}).outside
        ]
        for seed in seeds or bands.seeds
    }
