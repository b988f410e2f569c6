"""A whole run: its curves, its updates, their episodes, another run beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd

from rlhf_nb.rollout import Rollout
from rlhf_nb.ui.controls import action_button, notebook_bundle, restart_list, side_by_side
from rlhf_nb.ui.episodes import (
    Look,
    Shown,
    columns_of,
    episode_facts,
    episode_order,
    episode_signals,
    episode_tokens,
    shown_of,
    when,
)
from rlhf_nb.ui.explore import ChoiceSlider, control
from rlhf_nb.ui.html import data_table, on_white, safe_text
from rlhf_nb.ui.run_files import METRIC_COLUMNS, RunFolder, lines_of, spread
from rlhf_nb.ui.suspects import Suspect, episode_suspects, run_suspects, suspects_of
from rlhf_nb.ui.viewer import (
    LISTING,
    Desk,
    Shelf,
    choose_bounded_filter,
    look_controls,
    look_lines,
    prompt_fold,
    recipe_controls,
    recipe_lines,
    render_view,
    shelf_of,
    write_reader,
)
from rlhf_nb.ui.viz import token_strip, visible
from rlhf_nb.ui.what_if import Recipe, recipe_of, replays


def metric_curve(lines: Mapping[str, pd.DataFrame], metric: str, at: float) -> str:
    "One metric over the updates, a line a run, with a ring at `at`; a sentence says the same."
    drawn = {
        name: frame[["update", metric]].dropna() for name, frame in lines.items() if metric in frame
    }
    kept = {name: x for name, x in drawn.items() if len(x)}
    if not kept:
        return ""
    both = pd.concat(kept.values())
    (left, right), (low, high) = (
        (both[name].min(), both[name].max()) for name in ("update", metric)
    )
    share = lambda x, least, most: (x - least) / ((most - least) or 1)
    place = lambda u, y: (
        f"{60 + 560 * share(u, left, right):.1f}",
        f"{120 - 100 * share(y, low, high):.1f}",
    )
    parts, facts = [], []
    for (name, x), (ink, dash) in zip(kept.items(), (("#1f5fa8", ""), ("#b35000", "6 4"))):
        points = [place(u, y) for u, y in x.itertuples(index=False)]
        near = (x["update"] - at).abs().argmin()
        path, (cx, cy) = " ".join(map(",".join, points)), points[near]
        parts.append(
            f'<polyline fill="none" stroke="{ink}" stroke-width="2" stroke-dasharray="{dash}" '
            f'points="{path}"/>'
            f'<circle cx="{cx}" cy="{cy}" r="5" fill="#ffffff" stroke="{ink}" stroke-width="3"/>'
        )
        here, when = x[metric].iloc[near], x["update"].iloc[near]
        facts.append(f"{name}{' (dashed)' if dash else ''}: {here:.4g} at update {when:.0f}")
    return _plot("".join(parts), f"{metric} · {'; '.join(facts)}", (left, right, low, high))


def _plot(inside: str, sentence: str, ends: tuple[float, float, float, float]) -> str:
    "Lines in a frame whose ends are named, and a sentence below."
    left, right, low, high = ends
    labels = (
        (54, 24, "end", f"{high:.3g}"),
        (54, 122, "end", f"{low:.3g}"),
        (60, 136, "start", f"{left:.0f}"),
        (620, 136, "end", f"update {right:.0f}"),
    )
    words = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{side}">{text}</text>' for x, y, side, text in labels
    )
    return (
        '<figure style="margin:4px 0"><svg viewBox="0 0 640 140" '
        'style="width:640px;max-width:100%;height:auto" role="img" '
        f'aria-label="{escape(visible(sentence))}"><path d="M60 20V120H620" fill="none" '
        'stroke="#767676"/>'
        f'<g font-size="11" fill="#111111" font-family="sans-serif">{words}</g>{inside}</svg>'
        f"<figcaption>{safe_text(sentence)}</figcaption></figure>"
    )


def strips_of(items: Sequence[tuple[str, Rollout, int]], signal: str) -> str:
    "The same signal of several episodes, each under its name, on one scale."
    rows = [episode_signals(r, i).get(signal) for _, r, i in items]
    most = max(
        (abs(x) for row in rows if row is not None for x in row.tolist() if math.isfinite(x)),
        default=0.0,
    )
    parts = []
    for (name, r, i), row in zip(items, rows):
        label = signal if row is not None else "value"
        strip = token_strip(episode_tokens(r, i), row, name=label, vmax=most or None)
        head = f"<strong>{safe_text(name)}</strong> {safe_text(episode_facts(r, i))}"
        parts.append(f'<div style="min-width:0"><p>{head}</p>{strip}</div>')
    return "".join(parts)


def through_training(run: RunFolder, update: int, episode: int, signal: str) -> str:
    "What the run made of one prompt, early and late."
    r = run.rollout(update)
    if not r.prompts:
        return "<p>The texts of the prompts were not kept.</p>"
    prompt = r.prompts[episode]
    items = [(f"Update {u}.", run.rollout(u), row) for u, row in run.again(prompt)]
    answers = [
        [row["table"], row["answer"] or "(nothing)", row["score"]] for row in run.completed(prompt)
    ]
    heads = ["Table", "Answer", "Score"]
    table = data_table("Completions of this prompt", heads, answers) if answers else ""
    note = "" if len(items) > 1 or answers else "<p>This prompt was asked once.</p>"
    return f"<h4>The same prompt through training</h4>{strips_of(items, signal)}{table}{note}"


_COLUMNS = (
    "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(40rem,100%),1fr));gap:0 1.5rem"
)


def _beside(
    shown: Rollout, episode: int, run: RunFolder, update: int, signal: str, names: Sequence[str]
) -> str:
    """An episode beside the nearest update of another run: its row with the same prompt, or else
    the same row."""
    near = min(run.files, key=lambda other: abs(other - update))
    r = run.rollout(near)
    prompt = shown.prompts[episode] if shown.prompts else None
    row, same = min(episode, len(r) - 1), False
    if prompt is not None and prompt in r.prompts:
        row, same = r.prompts.index(prompt), True
    head = f"{names[1]}, update {near}: " + (
        "the same prompt" if same else "the same row, another prompt"
    )
    both = strips_of([(f"{names[0]}.", shown, episode), (f"{names[1]}.", r, row)], signal)
    fold = "" if same else prompt_fold(r, row)
    return f'<h4>{safe_text(head)}</h4><div style="{_COLUMNS}">{both}</div>{fold}'


def _update_controls(
    run: RunFolder, update: int, metrics: Mapping[str, str]
) -> dict[str, widgets.Widget]:
    "The controls of a browser that choose an update and what is shown of the run."
    slider = ChoiceSlider(
        options=list(run.files),
        value=update,
        description="update",
        tooltip="update",
        continuous_update=False,
    )
    made = dict(
        update=slider,
        metric=control("metric", metrics or {"none": "none"}),
        same_prompt=control("same_prompt", False),
    )
    made["metric"].description = "curve of"
    return made


def _chosen_updates(files: Sequence[int], updates: int | Sequence[int], odd: set[int]) -> list[int]:
    "Updates for a file, in order. Raises ValueError where the run keeps none of that number."
    if isinstance(updates, int):
        return sorted({files[i] for i in spread(len(files), updates)} | odd)
    if updates and {*updates} <= {*files}:
        return sorted({*updates})
    raise ValueError(
        f"updates is {updates}, and the run keeps {min(files)} to {max(files)}: give some of them."
    )


def _shelves_of(
    run: RunFolder, updates: int | Sequence[int], episodes: int
) -> tuple[list[Shelf], list[dict[str, Any]]]:
    """Some updates of a run, of each its first episodes and its suspects; and where the suspects
    are in them."""
    files, whole = list(run.files), run_suspects(run.log)
    near = {one: min(files, key=lambda update: abs(update - one.update)) for one in whole}
    chosen = _chosen_updates(files, updates, set(near.values()))
    jumps = [
        dict(name=visible(one.sentence), shelf=chosen.index(near[one]), place=0)
        for one in whole
        if near[one] in chosen
    ]
    odd = episode_suspects(run.numbers(chosen), episodes)
    shelves: list[Shelf] = []
    for update in chosen:
        shown = shown_of(run.rollout(update))
        here = [one for one in odd if one.update == update]
        suspects = [one.episode for one in here if one.episode is not None]
        rows = list(dict.fromkeys([*range(min(episodes, len(shown.rollout))), *suspects]))
        jumps += [
            dict(name=visible(one.sentence), shelf=len(shelves), place=rows.index(row))
            for one, row in zip(here, suspects)
        ]
        shelves.append(shelf_of(f"Update {update}", shown, rows, plain=1))
    return shelves, jumps


class RunBrowser:
    """A run to move about in, live in a notebook; a static page and a file of its own where there
    is no kernel."""

    def __init__(self, run: str | Path, other: str | Path | None = None):
        self.run, self.other = RunFolder(run), None if other is None else RunFolder(other)
        self.names = [x.path.resolve().name for x in (self.run, self.other) if x]
        self.update, self.note = max(self.run.files), ""
        self.suspects: list[Suspect] = []
        newest = self.run.rollout(self.update)
        self.base = recipe_of(newest) if replays(newest) else None
        signals = shown_of(newest).names()
        self.look = Look(signal=signals[0] if signals else "none")

    # ---- What is shown ----

    def lines(self) -> dict[str, pd.DataFrame]:
        "What each run logged; where it logged nothing, means over its rollouts."
        runs = {self.names[0]: self.run}
        if self.other:
            same = self.names[1] == self.names[0]
            runs[f"{self.names[1]} (other)" if same else self.names[1]] = self.other
        return lines_of(runs)

    def metrics(self) -> dict[str, str]:
        "Which curves there are, by a short name."
        logged = {str(column) for frame in self.lines().values() for column in frame.columns}
        return {name: column for name, column in METRIC_COLUMNS.items() if column in logged}

    def recipes(
        self, shown: Shown, settings: Mapping[str, Any]
    ) -> tuple[Recipe | None, Recipe | None]:
        "The settings of an update, and these with what was changed by hand."
        if self.base is None or not replays(shown.rollout):
            return None, None
        base = replace(self.base, kl_coef=shown.rollout.info.get("kl_coef", self.base.kl_coef))
        changed = {name: x for name, x in settings.items() if x != getattr(self.base, name)}
        return base, replace(base, **changed)

    def draw(self, update: int, metric: str, same_prompt: bool, **state: Any) -> str:
        "The markup of one update at some state of the controls."
        look = Look(**{f.name: state.pop(f.name) for f in fields(Look)})
        shown = shown_of(self.run.rollout(update))
        order = episode_order(columns_of(shown.rollout), look)
        odd = "".join(f"<li>{safe_text(one.sentence)}</li>" for one in self.suspects)
        parts = [
            f"<ol>{odd}</ol>" if odd else "<p>No suspects in what was read so far.</p>",
            f"<p>{safe_text(self.note)}</p>",
            metric_curve(self.lines(), metric, update),
            f"<h3>{safe_text(when(shown.rollout))}</h3>",
            render_view(shown, look, *self.recipes(shown, state)),
        ]
        if order:
            episode = order[max(1, min(look.place, len(order))) - 1]
            if self.other:
                parts.append(
                    _beside(shown.rollout, episode, self.other, update, look.signal, self.names)
                )
            if same_prompt:
                parts.append(through_training(self.run, update, episode, look.signal))
        return on_white("".join(parts))

    def _repr_html_(self) -> str:
        return self.desk.view.value

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return notebook_bundle(self.desk.box, self._repr_html_(), repr(self), **kwargs)

    def __repr__(self) -> str:
        files = self.run.files
        return (
            f"RunBrowser({' beside '.join(self.names)}: {len(files)} updates, {min(files)} to "
            f"{max(files)})"
        )

    # ---- Controls ----

    @cached_property
    def desk(self) -> Desk:
        "The controls, made at their first use."
        moves = _update_controls(self.run, self.update, self.metrics())
        looks = look_controls(shown_of(self.run.rollout(self.update)), self.look)
        recipe = recipe_controls(self.base, False) if self.base else {}
        steps = [
            action_button(name, partial(self._turn, by))
            for name, by in (("◀ update", -1), ("update ▶", 1))
        ]
        more = [
            action_button(name, partial(self._carefully, act), tip)
            for name, act, tip in (
                ("refresh", self.refresh, "look for new updates"),
                ("search every update", self.search, "find odd episodes in all updates"),
            )
        ]
        self.suspects = suspects_of(self.run, [self.update])
        self._list_suspects()
        lines = [
            side_by_side(*steps, moves["update"], *more),
            side_by_side(moves["metric"], moves["same_prompt"]),
            self._suspect_buttons,
            *look_lines(looks),
            *recipe_lines(recipe, self.base),
        ]
        controls = moves | looks | recipe
        return Desk(self.draw, controls, lines, partial(self._relist, controls))

    @cached_property
    def _suspect_buttons(self) -> widgets.HBox:
        "A button for each suspect."
        return widgets.HBox(layout=dict(flex_flow="row wrap"))

    def _list_suspects(self) -> None:
        "A button for each suspect, numbered as in the list of sentences."
        name = lambda one: (
            f"update {one.update}" + ("" if one.episode is None else f", episode {one.episode}")
        )
        self._suspect_buttons.children = [
            action_button(f"{i}: {name(one)}", partial(self.go, one), one.sentence)
            for i, one in enumerate(self.suspects, 1)
        ]

    @property
    def controls(self) -> dict[str, widgets.Widget]:
        "The controls by name, as an explorer has them."
        return self.desk.controls

    def _relist(self, controls: Mapping[str, widgets.Widget], change: Any) -> None:
        "Another list of episodes: back to its first, except that another update keeps the place."
        choose_bounded_filter(controls, change)
        update, place = controls["update"], controls["place"]
        moved = [update, *(controls[name] for name in LISTING)]
        if change and change["owner"] not in moved:
            return
        look = Look(**{f.name: controls[f.name].value for f in fields(Look)})
        count = len(episode_order(columns_of(self.run.rollout(update.value)), look))
        if not change or change["owner"] is update:
            place.max = max(1, count)
        else:
            restart_list(place, count)

    # ---- Moving about ----

    def _carefully(self, act: Callable[[], None]) -> None:
        self.desk.careful(act)

    def _turn(self, by: int) -> None:
        "On, or back, by an update; after the last comes the first."
        slider = self.controls["update"]
        slider.index = (slider.index + by) % len(slider.options)

    def go(self, suspect: Suspect) -> None:
        "Show a suspect: its update, and of that its episode or the best paid one."
        episode, controls = suspect.episode, self.controls
        aims = dict(
            update=min(self.run.files, key=lambda update: abs(update - suspect.update)),
            only="all",
            find="",
            sort="score" if episode is None and "score" in controls["sort"].options else "episode",
            descending=episode is None,
        )
        with self.desk.still():
            for name, aim in aims.items():
                controls[name].value = aim
        controls["place"].value = (
            1 if episode is None else episode + 1
        )  # the list is long enough now

    def _show_suspects(self, suspects: Sequence[Suspect], note: str) -> None:
        "Other suspects, and a note on what was read."
        self.suspects, self.note = list(suspects), note
        self._list_suspects()
        self.desk.update()

    def search(self) -> None:
        "Read the numbers of every update, and name the oddest episodes of all."
        suspects, files = suspects_of(self.run, None, 10), self.run.files
        self._show_suspects(
            suspects,
            f"{len(self.run.numbers()):,} episodes of {len(files)} updates were searched at "
            f"{datetime.now():%H:%M:%S}.",
        )

    def refresh(self) -> None:
        "Take in what the run has written since."
        had = len(self.run.files)
        for run in filter(None, (self.run, self.other)):
            run.refresh()
        slider = self.controls["update"]
        with self.desk.still():
            kept = slider.value
            slider.options = list(self.run.files)
            slider.value = kept if kept in self.run.files else max(self.run.files)
        self._show_suspects(
            suspects_of(self.run, [slider.value]),
            f"{len(self.run.files) - had} updates are new, seen at {datetime.now():%H:%M:%S}.",
        )

    def save_html(
        self,
        path: str | Path,
        updates: int | Sequence[int] = 8,  # how many, spread over the run; or which ones
        episodes: int = 8,  # the first so many of each
    ) -> Path:
        """One file that needs no kernel: some updates, of each its first episodes and its suspects,
        and the curves."""
        shelves, jumps = _shelves_of(self.run, updates, episodes)
        curves = "".join(
            metric_curve(self.lines(), metric, self.update) for metric in self.metrics().values()
        )
        above = f'<div class="figures">{curves}</div>'
        title = f"Rollouts of {' and '.join(self.names)}"
        start = len(shelves) - 1
        return write_reader(path, title, shelves, self.look.signal, start, jumps, above)


def browse(
    run: str | Path,  # folder of a run with save_rollouts, or of `rlhf-nb demo`, finished or not
    other: str | Path | None = None,  # another run, shown beside it
) -> RunBrowser:
    "Move through the rollouts of a run. Raises ValueError where it kept none."
    return RunBrowser(run, other)
