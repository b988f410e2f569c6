"""One rollout, episode by episode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd
from torch import Tensor
from torch.nn.functional import pad

from rlhf_nb.losses import policy_diagnostics
from rlhf_nb.rollout import Rollout
from rlhf_nb.runtime.files import write_text_atomic
from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.controls import (
    action_button,
    labelled_control,
    notebook_bundle,
    restart_list,
    side_by_side,
    step_through,
)
from rlhf_nb.ui.episodes import (
    Look,
    Shown,
    columns_of,
    episode_facts,
    episode_order,
    episode_signals,
    episode_tokens,
    filled,
    filters,
    prompt_lines,
    shown_of,
    slots,
)
from rlhf_nb.ui.explore import Explorer, control
from rlhf_nb.ui.html import breakable, error_note, on_white, safe_prose, safe_text, script_page
from rlhf_nb.ui.viz import (
    Html,
    signal_table,
    signed,
    token_strip,
    token_strips,
    visible,
    visible_token,
)
from rlhf_nb.ui.what_if import Recipe, recipe_of, replays, reproduces, setting, what_if


def prompt_fold(rollout: Rollout, episode: int) -> str:
    "The prompt and its columns, folded."
    lines = "".join(
        f'<p style="white-space:pre-wrap">{safe_prose(line)}</p>'
        for line in prompt_lines(rollout, episode)
    )
    return f'<details class="prompt"><summary>Prompt</summary>{lines}</details>'


def episode_markup(
    rollout: Rollout,
    episode: int,
    strips: Mapping[str, float | None],
    fold: bool = False,
    signals: Mapping[str, Tensor] | None = None,
) -> str:
    """One episode: strips of some signals (name to full colour), and the table of all of them,
    folded or not."""
    tokens = episode_tokens(rollout, episode)
    signals = episode_signals(rollout, episode) if signals is None else signals
    below: list[str] = [
        token_strip(tokens, signals[name], name=name, vmax=vmax) for name, vmax in strips.items()
    ]
    table = str(signal_table(tokens, **signals)) if signals else ""
    if table and fold:
        table = f"<details><summary>All signals</summary>{table}</details>"
    facts = f"<p><strong>{escape(episode_facts(rollout, episode))}</strong></p>"
    prompt = prompt_fold(rollout, episode)
    return "".join([facts, prompt, *(below or [token_strip(tokens)]), table])


def what_if_markup(shown: Shown, episode: int, base: Recipe, recipe: Recipe) -> str:
    "What other settings would have made of an episode, beside what these made."
    r = shown.rollout
    reproduced, sentence = reproduces(r, base)
    changed = [
        f"{setting(f.name, getattr(base, f.name))} → {setting('', getattr(recipe, f.name)).strip()}"
        for f in fields(Recipe)
        if getattr(base, f.name) != getattr(recipe, f.name)
    ]
    if not changed:
        return f"<p><strong>What if:</strong> nothing is changed. {safe_text(sentence)}</p>"
    old, new = (r if reproduced else what_if(r, base)), what_if(r, recipe)
    n, tokens = slots(old, episode), episode_tokens(old, episode)
    pairs = {
        name: [filled(one, name)[episode, :n] for one in (old, new)]
        for name in ("rewards", "advantages")
    }
    if shown.now is not None:
        clipped = (
            replace(shown, rollout=one).extra(episode, its.cliprange)["clipped"]
            for one, its in ((old, base), (new, recipe))
        )
        pairs["clipped"] = [pad(x, (0, n - len(x))) for x in clipped]
    strips = "".join(
        token_strips(tokens, dict(before=before, after=after), name=name)
        for name, (before, after) in pairs.items()
    )
    tally = _tally(shown, old, new, base, recipe, episode)
    return (
        f"<p><strong>What if:</strong> {safe_text('; '.join(changed))}.</p>"
        f"<p>{safe_text(tally)}</p>{strips}<p>{safe_text(sentence)}</p>"
    )


def _tally(
    shown: Shown, old: Rollout, new: Rollout, base: Recipe, recipe: Recipe, episode: int
) -> str:
    "What the change comes to, in numbers."
    mask = old.mask[episode]
    before, after = (filled(r, "advantages")[episode] for r in (old, new))
    scores, rewards = (
        " → ".join(signed(float(filled(r, name)[episode].sum())) for r in (old, new))
        for name in ("scores", "rewards")
    )
    turned = int(((before * after < 0) & mask).sum())
    sentence = (
        f"Score {scores}; all rewards together {rewards}; {turned} of {int(mask.sum())} tokens "
        "have an advantage of the other sign."
    )
    if shown.now is None:
        return sentence
    metrics = [
        policy_diagnostics(
            shown.now, filled(r, "logprobs"), filled(r, "advantages"), r.mask, its.cliprange
        )
        for r, its in ((old, base), (new, recipe))
    ]
    shares = " → ".join(f"{float(one['clipfrac'] / one['tokens']):.1%}" for one in metrics)
    return f"{sentence} Clipped, of all tokens: {shares}."


def _place_in_list(look: Look, left: int, of: int) -> str:
    "In words: how far down which list, of which `left` episodes are left."
    parts = [f"{look.place} of {left}"]
    if look.sort != "episode" or look.descending:
        parts.append(f"sorted by {look.sort}, {'descending' if look.descending else 'ascending'}")
    if look.only != "all":
        parts.append(look.only + (f" {look.above:g}" if "above" in look.only else ""))
    if look.find:
        parts.append(f"with “{look.find}”")
    return " · ".join(parts) + (f" · {of - left} of {of} left out" if left < of else "")


def render_view(
    shown: Shown,
    look: Look,
    base: Recipe | None = None,  # the settings of the run; None: no what if
    recipe: Recipe | None = None,  # others; None: the same
) -> str:
    "One episode of a rollout, as it is looked at, and what other settings would have made of it."
    order = episode_order(columns_of(shown.rollout), look)
    look = replace(look, place=max(1, min(look.place, len(order))))
    if not order:
        return on_white(
            "<p>No episode is left: "
            f"{safe_text(_place_in_list(replace(look, place=0), 0, len(shown.rollout)))}.</p>"
        )
    episode = order[look.place - 1]
    recipe = recipe or base
    signals = shown.signals(episode, recipe.cliprange if recipe else 0.2)
    strips: dict[str, float | None] = {look.signal: None} if look.signal in signals else {}
    after = what_if_markup(shown, episode, base, recipe) if base and recipe else ""
    return on_white(
        f"<p>{safe_text(_place_in_list(look, len(order), len(shown.rollout)))}</p>"
        f"{episode_markup(shown.rollout, episode, strips, True, signals)}{after}"
    )


class Desk(Explorer):
    "An explorer that is given its controls, and how they are laid out."

    def __init__(
        self,
        render: Callable[..., str],  # called with one keyword argument a control
        controls: Mapping[str, widgets.Widget],
        above: Sequence[widgets.Widget] = (),  # the controls in their boxes; none: a column
        before: Callable[[Any], None] | None = None,  # what a control changes in others, first
    ):
        self.render, self.alt, self.controls, self.view = render, "", dict(controls), widgets.HTML()
        self.before, self.quiet = before, False
        for one in self.controls.values():
            one.observe(self.update, names="value")
        self.box = widgets.VBox([*(above or self.controls.values()), self.view])
        self.update()

    def update(self, change: Any = None) -> None:
        "Draw the view from the controls as they are set, once for all that one of them moves."
        if self.quiet:
            return
        self.quiet = True
        try:
            if self.before:
                self.careful(partial(self.before, change))
        finally:
            self.quiet = False
        super().update(change)

    def careful(self, act: Callable[[], Any]) -> None:
        "Do something; where it fails, the view says so, in place of what it showed."
        try:
            act()
        except Exception as error:
            self.view.value = error_note(error)
            raise

    @contextmanager
    def still(self) -> Iterator[None]:
        "Several controls move as one: drawn once, at the end."
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False
        self.update()


def look_controls(shown: Shown, look: Look) -> dict[str, widgets.Widget]:
    "A control for each field of a look."
    frame = columns_of(shown.rollout)
    made = dict(
        place=control("place", (1, max(2, len(frame)), look.place)),
        signal=control("signal", shown.names() or ["none"]),
        sort=control("sort", list(frame.columns)),
        descending=control("descending", look.descending),
        find=labelled_control(
            widgets.Text, "find", look.find, placeholder="in prompt or response, then Enter"
        ),
        only=control("only", list(filters(frame))),
        above=labelled_control(widgets.FloatText, "above", look.above, step=0.5),
    )
    for name in ("signal", "sort", "only"):
        if getattr(look, name) in made[name].options:
            made[name].value = getattr(look, name)
    made["sort"].description = "sort by"
    return made


def recipe_controls(recipe: Recipe, clips: bool) -> dict[str, widgets.Widget]:
    "A control for each setting that one may want otherwise."
    choices = ["k1", "k2", "k3", "abs"] + ["stored"] * (recipe.estimator == "stored")
    most = lambda x, least: max(least, 2.0 * x)
    made = dict(
        kl_coef=control("kl_coef", (0.0, most(recipe.kl_coef, 0.5), float(recipe.kl_coef), 0.01)),
        estimator=control("estimator", choices),
        gamma=control("gamma", (0.0, 1.0, float(recipe.gamma), 0.01)),
        lam=control("lam", (0.0, 1.0, float(recipe.lam), 0.01)),
        missing_eos_penalty=control(
            "EOS_penalty",
            (0.0, most(recipe.missing_eos_penalty, 5.0), float(recipe.missing_eos_penalty), 0.1),
        ),
    )
    if clips:
        made["cliprange"] = control("cliprange", (0.0, 1.0, float(recipe.cliprange), 0.01))
    made["estimator"].value = recipe.estimator
    for one in made.values():
        if isinstance(one, widgets.FloatSlider):
            one.readout_format = ".3g"
    return made


LISTING = ("sort", "descending", "find", "only", "above")  # fields that make another list


def look_lines(controls: Mapping[str, widgets.Widget]) -> list[widgets.HBox]:
    "The controls of a look, laid out."
    steps = [
        action_button(name, partial(step_through, controls["place"], by))
        for name, by in (("◀ previous", -1), ("next ▶", 1))
    ]
    rows = [[*steps, "place", "find"], ["signal"], ["sort", "descending"], ["only", "above"]]
    return [
        side_by_side(*(controls[one] if isinstance(one, str) else one for one in row))
        for row in rows
    ]


def recipe_lines(
    controls: Mapping[str, widgets.Widget], recipe: Recipe | None
) -> list[widgets.Widget]:
    "The controls of a recipe, laid out; none where there is none."
    if recipe is None:
        return []
    sliders = [one for one in controls.values() if isinstance(one, widgets.FloatSlider)]
    back = action_button(
        "as it was", partial(_restore, controls, recipe), "the settings of the run"
    )
    title = widgets.Label("What if", style=dict(font_weight="bold"))
    return [title, side_by_side(*sliders), side_by_side(controls["estimator"], back)]


def choose_bounded_filter(looks: Mapping[str, widgets.Widget], change: Any) -> None:
    """A bound that is typed in should count: where the chosen filter has none, choose the first
    filter that has."""
    bounded = [name for name in looks["only"].options if "above" in name]
    typed = change and change["owner"] is looks["above"]
    if typed and bounded and looks["only"].value not in bounded:
        looks["only"].value = bounded[0]


def _restore(controls: Mapping[str, widgets.Widget], recipe: Recipe) -> None:
    "Every setting as it was in the run."
    for name, one in controls.items():
        one.value = getattr(recipe, name)


def episode_data(shown: Shown, episode: int) -> dict[str, Any]:
    """One episode as the script reads it: texts with everything visible, numbers as they are
    written."""
    r = shown.rollout
    columns = {  # bool counts as a number here
        str(name): float(column[episode])
        for name, column in columns_of(r).items()
        if pd.api.types.is_numeric_dtype(column)
    }
    plain = lambda x: " ".join(signed(v) for v in x.tolist()).replace("−", "-")
    prompt = "\n".join(visible(text).replace("↵\n", "\n") for text in prompt_lines(r, episode))
    return dict(
        facts=episode_facts(r, episode),
        asked=prompt,
        text=visible(r.responses[episode]) if r.responses else "",
        tokens=[visible_token(text) for text in episode_tokens(r, episode)],
        rows={name: plain(x) for name, x in shown.signals(episode).items()},
        columns={name: x if math.isfinite(x) else None for name, x in columns.items()},
    )


@dataclass(frozen=True)
class Shelf:
    "Some episodes of one rollout, under a name."

    name: str
    episodes: list[dict[str, Any]]
    plain: str  # the first of them as markup, for where no script runs


def shelf_of(name: str, shown: Shown, order: Sequence[int], plain: int = 3) -> Shelf:
    "Episodes of a rollout, in an order; the first `plain` of them as markup too."
    strips: dict[str, float | None] = dict.fromkeys(shown.names()[:1])
    markup = "".join(
        episode_markup(shown.rollout, i, strips, True, shown.signals(i)) for i in order[:plain]
    )
    return Shelf(visible(name), [episode_data(shown, i) for i in order], breakable(markup))


def write_reader(
    path: str | Path,
    title: str,
    shelves: Sequence[Shelf],
    signal: str,
    start: int = 0,
    jumps: Sequence[Mapping[str, Any]] = (),
    above: str = "",
) -> Path:
    "A page that reads episodes, written whole or not at all."
    records = [dict(name=shelf.name, episodes=shelf.episodes) for shelf in shelves]
    names = "".join(f"<li>{safe_text(jump['name'])}</li>" for jump in jumps)
    episodes = "".join(f"<h2>{safe_text(shelf.name)}</h2>{shelf.plain}" for shelf in shelves)
    page = script_page(
        "reader.html",
        asset("reader-tools.js") + asset("reader.js"),
        dict(shelves=records, signal=signal, start=start, jumps=list(jumps)),
        title=escape(visible(title)),
        above=above,
        plain=(f"<ul>{names}</ul>" if names else "") + episodes,
    )
    write_text_atomic(path, page)
    return Path(path)


class RolloutView(Html):
    """One episode as markup; with controls over all of them in a live notebook, and as a file of
    its own."""

    shown: Shown
    look: Look

    @cached_property
    def base(self) -> Recipe | None:
        "The settings of the run; None where the rollout is filled half way."
        return recipe_of(self.shown.rollout) if replays(self.shown.rollout) else None

    def draw(self, **state: Any) -> str:
        "Markup at some state of the controls."
        look = Look(**{f.name: state.pop(f.name) for f in fields(Look) if f.name in state})
        recipe = replace(self.base, **state) if self.base else None
        return render_view(self.shown, look, self.base, recipe)

    @cached_property
    def desk(self) -> Desk:
        "The controls, made at their first use."
        looks = look_controls(self.shown, self.look)
        recipe = recipe_controls(self.base, self.shown.now is not None) if self.base else {}
        frame, place = columns_of(self.shown.rollout), looks["place"]
        restart_list(place, len(frame))
        place.value = self.look.place
        listing = [looks[name] for name in LISTING]

        def relist(change: Any) -> None:
            choose_bounded_filter(looks, change)
            if change and change["owner"] in listing:
                restart_list(place, len(episode_order(frame, self.seen())))

        lines = look_lines(looks) + recipe_lines(recipe, self.base)
        return Desk(self.draw, looks | recipe, lines, relist)

    @property
    def controls(self) -> dict[str, widgets.Widget]:
        "The controls by name, as an explorer has them."
        return self.desk.controls

    def seen(self) -> Look:
        "What the controls choose now."
        if "desk" not in vars(self):
            return self.look
        return Look(**{f.name: self.controls[f.name].value for f in fields(Look)})

    def _repr_html_(self) -> str:
        return str(self) if self.seen() == self.look else self.desk.view.value

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return notebook_bundle(self.desk.box, self._repr_html_(), repr(self), **kwargs)

    def save_html(self, path: str | Path, episodes: int = 64) -> Path:
        """One file that needs no kernel and no network: the first episodes in the order that the
        controls choose."""
        order = episode_order(columns_of(self.shown.rollout), self.seen())[:episodes]
        update = self.shown.rollout.info.get("update")
        title = "Rollout" + ("" if update is None else f" of update {update}")
        shelf = shelf_of(title, self.shown, order)
        return write_reader(path, title, [shelf], self.seen().signal)


def view(
    rollout: Rollout,
    episode: int = 0,  # which of its rows comes first
    signal: str | None = None,  # under the text; None: kl where it is there, else the first that is
    now: Tensor | Rollout | None = None,  # [B, T] log-probs of another policy for these tokens
    entropy: Tensor | None = None,  # [B, T] nats
) -> RolloutView:
    """One episode with all the signals it has, and the way to all others; `now` adds ratio and
    clipped. Raises ValueError on an episode or a signal that is not there."""
    if not 0 <= episode < len(rollout):
        raise ValueError(
            f"there is no episode {episode}: this rollout has {len(rollout)}, counted from 0."
        )
    shown = shown_of(rollout, now, entropy)
    there = shown.names()
    if signal is not None and signal not in there:
        raise ValueError(
            f"there is no signal {signal!r}: this rollout has {there or 'none yet'}. Later phases "
            "of the trainer fill the others."
        )
    signal = signal or next(iter(there), "")
    strips: dict[str, float | None] = {signal: None} if signal else {}
    markup = episode_markup(shown.rollout, episode, strips, False, shown.signals(episode))
    seen = RolloutView(on_white(markup))
    seen.shown, seen.look = shown, Look(place=episode + 1, signal=signal or "none")
    return seen
