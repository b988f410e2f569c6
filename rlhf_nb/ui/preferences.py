"""Pairs of answers labelled by hand, kept as preferences, and a reward model refitted on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ipywidgets as widgets
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_nb.reward import RewardConfig
from rlhf_nb.sft import load_processing_class
from rlhf_nb.training.prompts import turns_text
from rlhf_nb.ui import html
from rlhf_nb.ui.explore import action_button, notebook_bundle, side_by_side
from rlhf_nb.ui.preference_labels import Labelling, Labels, report_lines
from rlhf_nb.ui.refit import Refit, refit_reward_model, render_refit
from rlhf_nb.ui.viz import Html

SHEETS = ("sheet.css", "preferences.css")


def label_report(labels: Labels) -> Html:
    "How much was labelled, how long it took, how reliable it is."
    heads = "question", "How good are these labels?"
    table = html.data_table("", heads, list(report_lines(labels).items()))
    return html.themed_markup(html.sheet(table), sheets=SHEETS)


def _pane(name: str, text: str) -> Html:
    "A text under its name, side by side with others where they fit."
    words = html.element("p", html.safe_prose(text), class_="prose")
    return html.element("section", html.element("h4", html.safe_text(name)), words, class_="pane")


def render_labelling(work: Labelling, note: str = "") -> Html:
    "The pair that waits, how far one is, what the last key did (`note`), how good the labels are."
    done, total, name = len(work.rows), len(work.order), work.file.path.name
    place = html.element("b", f"Choice {min(done + 1, total)} of {total}")
    after = f" · {done} saved in {name}{f' · {note}' if note else ''}"
    parts = [html.element("p", place, html.safe_text(after), role="status")]
    parts.append(html.element("progress", value=done, max=total, aria_label="choices made"))
    if work.showing is None:
        over = html.element("b", f"All {total} choices are made.")
        then = html.safe_text(f" load_preferences({name!r}) gives them to RewardTrainer.")
        parts.append(html.element("p", over, then))
    else:
        prompt, both = work.answers()
        if prompt is not None:
            parts.append(_pane("Prompt", turns_text(prompt)))
        panes = [_pane(f"Answer {i}", turns_text(text)) for i, text in enumerate(both, 1)]
        parts.append(html.element("div", *panes, class_="panes"))
    table = html.data_table("", ["question", "answer"], list(report_lines(work.labels).items()))
    details = html.folded("How good are these labels?", table)
    return html.themed_markup(html.sheet(*parts, details), sheets=SHEETS)


_APART_SECONDS = 0.2  # a key that comes sooner after a pair was drawn was not pressed by a reader

_ENOUGH_PAIRS = 8  # decided pairs to refit on


class PreferenceDesk:
    "Pairs to choose from by key or button; every choice is on the disk at once."

    def __init__(self, work: Labelling, refit: Callable[[], Refit] | None, refit_every: int):
        self.work, self.refit, self.refit_every = work, refit, refit_every
        self.refitted: Refit | None = None
        self.view = widgets.HTML()  # the pair, and the last refit
        self.note, self.drawn = "", -math.inf  # drawn: when the view last answered a key
        self.busy = False  # while a key is answered, the field is written to from here

    # ---- What keys and buttons do ----

    def press(self, key: str) -> None:
        "What a key or a button does: 1, 2, 0, u."
        key, rows = key.lower(), self.work.rows
        if self.work.clock() - self.drawn < _APART_SECONDS:
            self.note = f"“{key}” came at once after another key and was not counted"
        elif key == "u":
            self.note = "there is no choice to take back"
            if rows:
                self.work.undo()
                self.note = "the last choice is taken back"
        elif key not in ("0", "1", "2"):
            self.note = f"“{key}” is no key here: 1, 2, 0 (a tie), or u"
        elif self.work.showing is None:
            self.note = "all are made; u takes the last one back"
        else:
            self.work.choose(key)
            self.note = f"saved: {dict(zip('120', ('answer 1', 'answer 2', 'a tie')))[key]}"
            if self.refit_every and len(self.work.rows) % self.refit_every == 0:
                self.learn()

    def learn(self) -> None:
        "Refit now. Raises ValueError where there is no model."
        if self.refit is None:
            raise ValueError("there is nothing to refit: give label_preferences a model.")
        start, fresh = self.work.clock(), self.work.labels.fresh
        decided = sum(row["choice"] != "0" for row in fresh)
        if decided < _ENOUGH_PAIRS:
            self.note = f"{decided} decided pairs are too few to refit: {_ENOUGH_PAIRS} are wanted"
            return
        self.view.value = render_labelling(self.work, f"refitting on {decided} decided pairs ...")
        self.refitted = self.refit()
        self.work.since += self.work.clock() - start
        self.note = f"refitted after {len(self.work.rows)} choices"

    def last_key(self) -> str:
        "The last choice, which the field shows."
        return self.work.rows[-1]["choice"] if self.work.rows else ""

    # ---- What is seen ----

    def draw(self) -> str:
        "The pair, and below it the result of the last refit."
        refitted = render_refit(self.refitted) if self.refitted else ""
        view = render_labelling(self.work, self.note) + refitted
        self.drawn = self.work.clock()
        return view

    @cached_property
    def field(self) -> widgets.Text:
        "The field that hears keys."
        tip = "1: answer 1 is better. 2: answer 2. 0: a tie. u or Backspace: take back."
        about = dict(description="key", placeholder="1 2 0 u", tooltip=tip)
        look = dict(layout=dict(width="10em"), style=dict(description_width="2.5em"))
        field = widgets.Text(self.last_key(), **about, **look)
        field.observe(self.take_key, names="value")
        return field

    @cached_property
    def buttons(self) -> dict[str, widgets.Button]:
        "What the keys do, for the mouse."
        names = {"1": "1 is better", "2": "2 is better", "0": "0 tie", "u": "undo (u)"}
        pressed = lambda key: partial(self.click, partial(self.press, key))
        buttons = {key: action_button(name, pressed(key)) for key, name in names.items()}
        if self.refit:
            buttons["refit"] = action_button("refit now", partial(self.click, self.learn))
        return buttons

    @cached_property
    def box(self) -> widgets.VBox:
        "Controls above the pair, made at their first use."
        line = side_by_side(self.field, *self.buttons.values())
        self.view.value = self.draw()
        return widgets.VBox([line, self.view])

    def take_key(self, change: Any) -> None:
        "The field was written to: a digit behind the last choice, or the last choice removed."
        self.act(partial(self.press, change["new"][-1:] or "u"))

    def act(self, press: Callable[[], None]) -> None:
        "Press, show the last choice in the field, and draw once; an error is shown instead."
        if self.busy:
            return
        self.busy, view = True, self.view.value
        try:
            press()
            view = self.draw()
        except Exception as error:
            view = html.error_note(error)
            raise
        finally:
            self.field.value, self.view.value, self.busy = self.last_key(), view, False

    def click(self, press: Callable[[], None]) -> None:
        "A button: what it does, then the cursor goes back into the field."
        self.act(press)
        self.field.focus()

    def _repr_html_(self) -> str:
        return self.draw()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return notebook_bundle(self.box, self.draw(), repr(self), **kwargs)

    def __repr__(self) -> str:
        work = self.work
        return f"{len(work.rows)} of {len(work.order)} choices in {work.file.path.name}"


def label_preferences(
    dataset: Dataset | Sequence[Mapping[str, Any]],  # two answers a row; prompt, unless whole texts
    path: str | Path,  # JSON lines; where the file is there, it goes on
    answers: tuple[str, str] = ("answer_1", "answer_2"),  # columns: texts or conversations
    seed: int = 0,  # which answer is on which side
    repeat_every: int = 8,  # after so many pairs one comes again, swapped; 0: none does
    model: PreTrainedModel | str | None = None,  # to refit: policy or reward model; not changed
    processing_class: PreTrainedTokenizerBase | str | None = None,
    args: RewardConfig | None = None,  # of the refit; None: quick_reward_args
    refit_every: int = 0,  # choices; 0: when the button is pressed
    held_out: float = 0.25,  # share of prompts whose labels only measure
) -> PreferenceDesk:
    "Choose by 1, 2, 0 and u; each choice is saved at once. ValueError on rows or a file of no use."
    if refit_every and model is None:
        fix = "give model and processing_class"
        raise ValueError(f"refit_every is {refit_every} and there is no model to refit: {fix}.")
    work = Labelling(dataset, path, answers, seed, repeat_every)
    if model is None:
        return PreferenceDesk(work, None, refit_every)
    start, tokenizer = model, load_processing_class(model, processing_class)

    def refit() -> Refit:
        return refit_reward_model(work.labels.training(), start, tokenizer, args, held_out)

    return PreferenceDesk(work, refit, refit_every)
