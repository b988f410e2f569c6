"Rollouts to read: one, episode by episode, or a whole run with curves and another run beside it."

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from rlhf_nb.rollout import Rollout
from rlhf_nb.training.kept import is_foreign, rollout_files
from rlhf_nb.training.metrics import Metric, in_order
from rlhf_nb.ui import episodes as of
from rlhf_nb.ui.chart import curve_strip
from rlhf_nb.ui.episodes import Shown, episode_tokens, shown_of
from rlhf_nb.ui.explore import notebook_bundle
from rlhf_nb.ui.foreign import ForeignRun
from rlhf_nb.ui.html import element, fit_column, folded, number_text, percent, safe_prose, safe_text
from rlhf_nb.ui.reader import Reader, objective_for, packed_update, reader_head, write_reader
from rlhf_nb.ui.report import demo_report
from rlhf_nb.ui.run_files import RunFolder, Updates, log_or_means, ranges_of, spread
from rlhf_nb.ui.suspects import Suspect, run_suspects, suspects_of, two_views
from rlhf_nb.ui.viz import Html, signal_table, token_strip, token_strips, visible
from rlhf_nb.ui.what_if import check_chosen
from rlhf_nb.update import Objective

# ---- One rollout ----


def as_written(text: str, tag: str = "p") -> str:
    "A text with its own lines."
    return element(tag, safe_prose(text), style="white-space:pre-wrap")


def prompt_fold(rollout: Rollout, episode: int) -> str:
    "The prompt and its columns, fold."
    return folded("Prompt", *map(as_written, of.prompt_lines(rollout, episode)), class_="prompt")


def episode_markup(shown: Shown, episode: int, signal: str = "", fold: bool = False) -> str:
    "One episode: a strip of a signal, all signals, folded or not; of a long one the beginning."
    rollout = shown.rollout
    every = of.bracketed(rollout, episode, episode_tokens(rollout, episode))
    signals = {name: x[:MOST_SHOWN] for name, x in shown.signals(episode).items()}
    strip = token_strip(tokens := every[:MOST_SHOWN])
    if signal:
        pale, full = shown.scale(signal)
        name = signal + "; 99 % of this update is paler" * (full is not None)
        strip = token_strips(tokens, {signal: signals[signal]}, name=name, vmax=full, pale=pale)
    turns = "".join(
        element("p", element("strong", escape(x["facts"])))
        + as_written(x["said"])
        + as_written(x["answer"], "blockquote")
        for x in of.turns_told(rollout, episode)
    )
    table = str(signal_table(tokens, **signals)) if signals else ""
    if table and fold:
        table = folded("All signals", table)
    cut = f" · the first {MOST_SHOWN:,} follow, save_html() shows all" * (len(every) > MOST_SHOWN)
    facts = element("p", element("strong", escape(of.episode_facts(rollout, episode) + cut)))
    notes = [element("li", safe_text(note)) for note in of.notes_of(rollout)]
    read = folded("How this file was read", element("ul", *notes)) if notes else ""
    return "".join([facts, prompt_fold(rollout, episode), turns, strip, table, read])


class RolloutView(Html):
    "One episode as markup; in a live notebook a reader of all of them, and as a file of its own."

    shown: Shown
    place: dict[str, Any]
    objective: Objective | None = None  # chosen by the reader

    @property
    def name(self) -> str:
        "What a page is called that shows it."
        update = self.shown.rollout.info.get("update")
        return "Rollout" if update is None else f"Update {update}"

    @cached_property
    def reader(self) -> Reader:
        "The live widget, made at its first use; `reader.place` is where it is."
        update = self.shown.rollout.info.get("update")
        name = "Rollout" if update is None else str(update)
        head = reader_head(self.name, [dict(name=name, update=update)], self.place["signal"])
        load = lambda _: packed_update(self.shown, None, self.objective)
        return Reader(head, load, lambda *_: dict(found=[], completed=[]), self.place)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return notebook_bundle(self.reader, self._repr_html_(), repr(self), **kwargs)

    def save_html(
        self,
        path: str | Path,
        episodes: int | None = None,  # the first so many; None: all, which a what-if needs
    ) -> Path:
        "One file that needs no kernel and no network, at the place where the reader is."
        r = self.shown.rollout
        rows = None if episodes is None else range(min(episodes, len(r)))
        signal = next(iter(self.shown.names()), "")
        plain = "".join(episode_markup(self.shown, i, signal, True) for i in range(min(3, len(r))))
        packed = packed_update(self.shown, rows, self.objective)
        return write_reader(path, self.reader.head, [packed], self.reader.place, plain)


def view(
    # or a run's folder, a file, a list of objects, a DataFrame, a Dataset of episodes
    rollout: Rollout | Any,
    episode: int = 0,  # which of its rows comes first
    signal: str | None = None,  # behind the text; None: the ratio to `now`, else kl, else the first
    now: Tensor | Rollout | None = None,  # [B, T] log-probs of another policy for these tokens
    entropy: Tensor | None = None,  # [B, T] nats
    columns: Mapping[str, str] | None = None,  # of a file: what a rollout calls it -> a column
    tokenizer: Any = None,  # of a file: with it, or its name, token ids become tokens
    update: int | None = None,  # of a run or a file with several; None: the last
    objective: Objective | None = None,  # that it was made with, where the rollout does not say so
) -> RolloutView:
    """One episode with all its signals, and the way to all others; `now` adds ratio and clipped.
    Raises ValueError on an episode or a signal that is not there, or a file that cannot be read."""
    if isinstance(rollout, (str, Path)) and Path(rollout).suffix == ".safetensors":
        rollout = Rollout.load(rollout)
    elif not isinstance(rollout, Rollout):
        run = open_run(rollout, columns, tokenizer)
        updates = list(run.files)
        if update is not None and update not in updates:
            raise ValueError(f"there is no update {update}: {run.path} has {updates}.")
        rollout = run.rollout(updates[-1] if update is None else update)
    if not 0 <= episode < len(rollout):
        has = f"this rollout has {len(rollout)}, counted from 0"
        raise ValueError(f"there is no episode {episode}: {has}.")
    shown = shown_of(rollout, now, entropy)
    signals = shown.names()
    if signal is not None and signal not in signals:
        has = f"this rollout has {signals or 'none yet'}"
        later = "Later phases of the trainer fill the others."
        raise ValueError(f"there is no signal {signal!r}: {has}. {later}")
    signal = signal or ("ratio - 1" if now is not None else next(iter(signals), ""))
    page = RolloutView(fit_column(episode_markup(shown, episode, signal)))
    page.shown, page.place = shown, dict(row=episode, signal=signal)
    check_chosen(shown.rollout, objective)
    page.objective = objective
    return page


# ---- A run ----


def curves_of(
    lines: Mapping[str, pd.DataFrame],  # what each run logged, an update a row
    counted: str = "tokens",  # what lengths are counted in
) -> list[dict[str, Any]]:
    "The metrics that were logged, as curves over the updates: a line a run, all on one axis."
    finite = {run: x.replace([math.inf, -math.inf], math.nan) for run, x in lines.items()}
    logged: list[tuple[Metric, list[dict[str, Any]]]] = []
    for metric in in_order():
        drawn = [
            dict(run=run, which=i, points=frame[["update", metric.name]].dropna().values.tolist())
            for i, (run, frame) in enumerate(finite.items())
            if metric.name in frame
        ]
        if kept := [line for line in drawn if line["points"]]:
            logged.append((metric, kept))
    # A point before the first update is drawn at the left end of the axis.
    updates = [max(u, 0.0) for _, kept in logged for line in kept for u, _ in line["points"]]
    span = (min(updates, default=0.0), max(updates, default=0.0))
    return [_curve(metric, kept, span, counted) for metric, kept in logged]


def _curve(
    metric: Metric, lines: Sequence[dict[str, Any]], span: tuple[float, float], counted: str
) -> dict[str, Any]:
    about, unit = f"{metric.title}, {metric.unit}", metric.sign
    if unit == "tokens":
        about, unit = about.replace("tokens", counted), counted
    points = [point for line in lines for point in line["points"]]
    steps, values = [max(u, 0.0) for u, _ in points], [value for _, value in points]

    def show(value: float) -> str:
        return percent(value) if metric.is_share else f"{number_text(value)} {unit}".strip()

    values_text = f"{show(min(values))} to {show(max(values))}"
    title = f"{about}, updates {min(steps):g} to {max(steps):g}: {values_text}"
    svg = curve_strip({line["which"]: line["points"] for line in lines}, span, title)
    return dict(name=metric.short[0], about=about, unit=unit, lines=list(lines), svg=svg)


MOST_SHOWN = 1_000  # tokens of an episode as markup; the reader has all of them
MOST_TOKENS = 4_000_000  # tokens in one file, at about 14 bytes each


def _chosen_updates(files: Sequence[int], updates: int | Sequence[int], odd: set[int]) -> list[int]:
    "Updates for a file, in order. Raises ValueError where the run keeps none of that number."
    if isinstance(updates, int):
        return sorted({files[i] for i in spread(len(files), updates)} | odd)
    if updates and {*updates} <= {*files}:
        return sorted({*updates})
    kept = ranges_of(files)
    raise ValueError(f"updates is {updates}, and the run keeps {kept}: give some of them.")


def nearest(updates: Iterable[int], update: int) -> int:
    "The update nearest to another one."
    return min(updates, key=lambda other: abs(other - update))


def open_run(source: Any, columns: Mapping[str, str] | None, tokenizer: Any) -> Updates:
    "The updates of a run's folder, of files of another trainer, or of records."
    described = columns is not None or tokenizer is not None
    if is_foreign(source) or (described and not rollout_files(Path(source))):
        return ForeignRun(source, columns, tokenizer)
    return RunFolder(source)


class RunBrowser:
    "A run to move about in, live in a notebook; a static page and a file where there is no kernel."

    def __init__(self, run: Updates, other: Updates | None, objective: Objective | None):
        self.run, self.other, self.objective = run, other, objective
        self.runs = [run, other] if other else [run]
        self.names = [x.path.resolve().name for x in self.runs]
        newest = max(run.files)
        check_chosen(run.rollout(newest), objective)
        names = shown_of(run.rollout(newest)).names()
        self.signal = "advantages" if "advantages" in names else names[0] if names else ""
        self.suspects = suspects_of(self.run, [newest])

    # ---- What is shown ----

    def updates(self, *chosen: Iterable[int]) -> list[dict[str, Any]]:
        "Updates of each run as a reader lists them, all or those that are chosen."
        mine, *theirs = chosen or [run.files for run in self.runs]
        of_other = dict(run=1, runName=self.names[-1])
        listed: list[dict[str, Any]] = [dict(name=str(u), update=u) for u in mine]
        return listed + [dict(name=str(u), update=u, **of_other) for its in theirs for u in its]

    def rollout_of(self, one: Mapping[str, Any]) -> Rollout:
        "The rollout of one of `updates`."
        return self.runs[one.get("run", 0)].rollout(one["update"])

    def head(self, updates: Sequence[Mapping[str, Any]], odd: Sequence[Suspect]) -> dict[str, Any]:
        "What a reader knows before it opens an update."
        mine = [one["update"] for one in updates if "run" not in one]
        place = lambda update: mine.index(nearest(mine, update))
        row = lambda one: one.episode if one.update in mine else None
        jumps = [dict(sentence=x.sentence, update=place(x.update), row=row(x)) for x in odd]
        title = f"Rollouts of {' and '.join(self.names)}"
        lines: dict[str, pd.DataFrame] = {}
        for name, run in zip(self.names, self.runs):
            lines[name + " (other)" * (name in lines)] = log_or_means(run)
        curves = curves_of(lines, self.run.counted)
        return reader_head(title, updates, self.signal, len(mine) - 1, jumps, curves)

    def load(self, one: Mapping[str, Any]) -> bytes:
        "One of `updates`, packed."
        return packed_update(shown_of(self.rollout_of(one)), None, self.objective)

    def asks(self) -> str:
        "A sentence where a what-if has to ask for the objective of the newest update; else empty."
        newest = shown_of(self.run.rollout(max(self.run.files)))
        _, asks, sentence = objective_for(newest, self.objective)
        return sentence if asks else ""

    def again(self, index: int, row: int) -> dict[str, Any]:
        "Where else a prompt was answered, as indices into `updates` and rows; and its completions."
        listed = self.updates()
        if not (prompts := self.rollout_of(listed[index]).prompts):
            return dict(found=[], completed=[])
        place = {(x.get("run", 0), x["update"]): i for i, x in enumerate(listed)}
        runs = enumerate(self.runs)
        hits = [(which, *hit) for which, run in runs for hit in run.again(prompts[row])]
        places = [(place[which, update], hit) for which, update, hit in hits]
        return dict(found=places, completed=self.run.completions().get(prompts[row], []))

    @cached_property
    def reader(self) -> Reader:
        "The live widget, made at its first use; `reader.place` is where it is."
        head, place = self.head(self.updates(), self.suspects), dict(signal=self.signal)
        actions = {"refresh": self.refresh, "search every update": self.search}
        return Reader(head, lambda i: self.load(self.updates()[i]), self.again, place, actions)

    def plain(self) -> str:
        "Markup for where nothing moves: the suspects, and the newest update's first episode."
        shown = shown_of(self.run.rollout(max(self.run.files)))
        odd = [element("li", safe_text(one.sentence)) for one in self.suspects]
        first = element("p", "Suspects:") + element("ul", *odd) if odd else ""
        head = element("h3", safe_text(of.when(shown.rollout)))
        return first + head + episode_markup(shown, 0, self.signal, True)

    def _repr_html_(self) -> str:
        return fit_column(self.plain())

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return notebook_bundle(self.reader, self._repr_html_(), repr(self), **kwargs)

    def __repr__(self) -> str:
        files, names = self.run.files, " beside ".join(self.names)
        return f"RunBrowser({names}: {len(files)} updates, {min(files)} to {max(files)})"

    # ---- Moving about ----

    def go(self, suspect: Suspect) -> None:
        "Show a suspect: its update, and of that its episode or the best paid one."
        mine = list(self.run.files)
        if (row := suspect.episode) is None:
            there: dict[str, Any] = dict(row=-1, sort="score", down=True)
        else:
            there = dict(row=row, sort="episode", down=False)
        update = mine.index(nearest(mine, suspect.update))
        there |= dict(update=update, find="", only="all")
        self.reader.place = self.reader.place | there  # another object: the page is told

    def with_token(self, suspect: Suspect) -> Suspect:
        "An episode's suspect with the token that holds most of its KL."
        if suspect.episode is None:
            return suspect
        r = self.run.rollout(suspect.update)
        if r.kl is None or not r.tokens:
            return suspect
        tokens = episode_tokens(r, suspect.episode)
        row = r.kl[suspect.episode, : len(tokens)].float()  # what pads it is 0, and may be most
        token = visible(tokens[most := int(row.argmax())]).strip()
        told = f", most on “{token}” (KL {row[most]:+.2f})" if row[most] >= 0.005 else ""
        return replace(suspect, sentence=suspect.sentence + told)

    def search(self) -> None:
        "Read the numbers of every update, and name the oddest episodes of all."
        self.suspects = suspects_of(self.run, None, 10)
        odd = sum(one.episode is not None for one in self.suspects)
        count = f"unusual episodes: {odd}" if odd else "no unusual episode"
        self._show(f"Every update was searched, {count}.", ["refresh"])

    def refresh(self) -> None:
        "Take in what the run has written since."
        known = len(self.updates())
        for run in self.runs:
            run.refresh()
        self.suspects = suspects_of(self.run, [max(self.run.files)])
        self._show(f"New updates: {len(self.updates()) - known}.", list(self.reader.actions))

    def _show(self, said: str, actions: Sequence[str]) -> None:
        "Tell the live widget what there is now, what was done, and which buttons are left."
        head = self.head(self.updates(), self.suspects)
        again = self.reader.head.get("again", 0) + 1  # so that the page asks for updates anew
        self.reader.head = {**head, "said": said, "actions": actions, "again": again}

    def save_html(
        self,
        path: str | Path,
        updates: int | Sequence[int] = 24,  # how many, spread over the run; or which ones
        episodes: int | None = None,  # the first so many of each; None: all, as a what-if needs
    ) -> Path:
        "One file that needs no kernel: updates, suspects and curves, below the result of a demo."
        files = list(self.run.files)
        log = log_or_means(self.run)
        of_run = run_suspects(log, counted=self.run.counted)
        odd = {nearest(files, one.update) for one in of_run}
        chosen, why, some = _chosen_updates(files, updates, odd), "", isinstance(updates, int)
        tokens = int(self.run.numbers(chosen)["length"].sum())
        if some and episodes is None and tokens > MOST_TOKENS:
            hold = f"{len(chosen)} hold {tokens:,} {self.run.counted}"
            why = f": {hold}, and a file takes {MOST_TOKENS:,}"
            chosen = _chosen_updates(files, max(1, len(chosen) * MOST_TOKENS // tokens), odd)
        said = f"{len(chosen)} of {len(files)} updates are in this file{why}. --update has others."
        said *= some and len(chosen) < len(files)
        suspects = [self.with_token(one) for one in suspects_of(self.run, chosen)]
        alarms = of_run or two_views(self.run.numbers(chosen))
        theirs = [{nearest(run.files, u) for u in chosen} for run in self.runs[1:]]
        listed = self.updates(chosen, *map(sorted, theirs))
        packed, prompts = [], set()
        for one in listed:
            shown = shown_of(self.rollout_of(one))
            rows = None
            if episodes is not None:
                here = [x.episode for x in suspects if x.update == one["update"]]
                far = [x for x in here if x is not None and "run" not in one]
                rows = list(dict.fromkeys([*range(min(episodes, len(shown.rollout))), *far]))
            packed.append(packed_update(shown, rows, self.objective))
            prompts.update(shown.rollout.prompts)
        completed = self.run.completions().items()
        shown_again = {visible(text, lines=True): its for text, its in completed if text in prompts}
        calm = len(log) >= 6 and not alarms  # an alarm compares two means of three updates
        head = self.head(listed, suspects) | dict(said=said, calm=calm)
        if above := demo_report(self.run.path, suspects):
            head["title"] = visible(f"Run {' and '.join(self.names)}")
        place = dict(signal=self.signal)
        return write_reader(path, head, packed, place, self.plain(), shown_again, above)


def browse(
    # folder of a run with save_rollouts, or of `rlhf-nb demo`, finished or not; or a file, a folder
    # of files, or records of another trainer
    run: str | Path | Any,
    other: str | Path | Any = None,  # another run, shown beside it
    columns: Mapping[str, str] | None = None,  # of a file: what a rollout calls it -> a column
    tokenizer: Any = None,  # of a file: with it, or its name, token ids become tokens
    objective: Objective | None = None,  # of rollouts that do not say how they were made
) -> RunBrowser:
    "Move through the rollouts of a run. Raises ValueError where it kept none."
    beside = None if other is None else open_run(other, columns, tokenizer)
    return RunBrowser(open_run(run, columns, tokenizer), beside, objective)
