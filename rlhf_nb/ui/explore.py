"""A formula is a picture that holds still. Give it a slider, and it answers."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.controls import action_button, notebook_bundle
from rlhf_nb.ui.html import Html, drawing, element
from rlhf_nb.ui.states import MOST, Dial, drawn, page, shared, thinned


class _IntSlider(anywidget.AnyWidget, widgets.IntSlider):
    _esm = asset("slider.js")


class _FloatSlider(anywidget.AnyWidget, widgets.FloatSlider):
    _esm = asset("slider.js")


class ChoiceSlider(anywidget.AnyWidget, widgets.SelectionSlider):
    "A slider over a list of options."

    _esm = asset("slider.js")
    choices = traitlets.Tuple().tag(sync=True)  # the text of each option

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.observe(self._show_options, names="options")
        self._show_options()

    def _show_options(self, change: Any = None) -> None:
        "Send the texts of the options to the page."
        options = self.options
        named = options.items() if isinstance(options, Mapping) else options
        self.choices = tuple(
            str(option[0] if isinstance(option, tuple) else option) for option in named
        )


def control(
    name: str,  # of the argument; underscores become spaces
    spec: Any,  # (low, high, start), (low, high, start, step), a list or dict of choices, or a bool
) -> widgets.Widget:
    "A control for one argument. Raises ValueError if the specification is none of these."
    label = name.replace("_", " ")
    shared: dict[str, Any] = dict(
        description=label,
        tooltip=label,  # without it, the label's tooltip is "null"
        style=dict(description_width="11em"),
        layout=dict(width="29em"),
    )
    if isinstance(spec, bool):
        return widgets.Checkbox(value=spec, **shared)
    if (
        isinstance(spec, tuple)
        and len(spec) in (3, 4)
        and all(isinstance(x, (int, float)) for x in spec)
    ):
        low, high, start, *given = spec
        whole = all(isinstance(x, int) for x in spec)
        make = _IntSlider if whole else _FloatSlider
        step = given[0] if given else 1 if whole else (high - low) / 100
        return make(value=start, min=low, max=high, step=step, continuous_update=False, **shared)
    choices = spec.values() if isinstance(spec, Mapping) else spec if isinstance(spec, list) else ()
    if len(choices) and None not in choices:  # for ipywidgets, None means: nothing is chosen
        shared["style"]["button_width"] = "initial"
        # Otherwise the name takes a line of its own.
        shared["layout"] = dict(display="flex", flex_flow="row nowrap", align_items="baseline")
        return widgets.ToggleButtons(options=spec, **shared)
    raise ValueError(
        f"{name} is {spec!r}: give (low, high, start), (low, high, start, step), a list or dict of "
        "choices without None, or a truth value."
    )


def markup(
    view: str | Figure,
    alt: str = "",  # what the figure shows, in a sentence
) -> str:
    "Markup of a view; a figure becomes an inline image, and is closed."
    if view is None:
        raise ValueError(
            "the function that draws returned nothing: let it return markup or a figure."
        )
    if not isinstance(view, Figure):
        return str(view)
    file = io.StringIO()
    with plt.rc_context({"svg.hashsalt": "rlhf-nb"}):  # the same figure twice is the same text
        view.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(view)
    svg = re.sub(r"^.*?(?=<svg)|<!--.*?-->|\s+", " ", file.getvalue(), flags=re.S).lstrip()
    # A hundredth of a point: what differs from processor to processor goes, nothing that is seen.
    svg = re.sub(r"(?<!scale\()\b\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", svg)
    return drawing(svg, alt)


def dial(name: str, one: widgets.Widget) -> Dial:
    "The values that a control can take, and how each is read."
    if isinstance(one, widgets.Checkbox):
        return Dial(name, "check", (False, True), ("no", "yes"), int(one.value))
    if isinstance(one, (widgets.ToggleButtons, widgets.SelectionSlider)):
        options = one.options.items() if isinstance(one.options, Mapping) else one.options
        pairs = [pair if isinstance(pair, tuple) else (str(pair), pair) for pair in options]
        kind = "choice" if isinstance(one, widgets.ToggleButtons) else "range"
        return Dial(name, kind, [pair[1] for pair in pairs], [pair[0] for pair in pairs], one.index)
    steps = math.floor((one.max - one.min) / one.step + 1e-9)
    even = [round(one.min + i * one.step, 10) for i in range(steps + 1)]
    values = sorted({*even, one.value})
    return Dial(name, "range", values, [f"{value:g}" for value in values], values.index(one.value))


class Explorer:
    """A view that a pure function draws from the values of controls, in a frame: a title, the
    question that it answers, states worth a try and a way back."""

    title: str = ""
    question: str = ""
    presets: Mapping[str, Mapping[str, Any]] = {}
    stops: Mapping[str, Sequence[Any]] = {}

    def __init__(
        self,
        render: Callable[..., str | Figure],  # called with one keyword argument a control
        alt: str = "",  # what a figure shows, in a sentence
        title: str = "",
        question: str = "",  # what one can find out here
        presets: Mapping[str, Mapping[str, Any]]
        | None = None,  # name: values; the rest as at first
        stops: Mapping[str, Sequence[Any]] | None = None,  # of sliders, where no kernel draws
        **specs: Any,  # a specification for each argument of render, as `control` takes it
    ):
        self.render, self.alt, self.title, self.question = render, alt, title, question
        self.presets, self.stops = presets or {}, stops or {}
        self.controls = {name: control(name, spec) for name, spec in specs.items()}
        self.start = self.state()
        for values in [
            *self.presets.values(),
            *({n: x} for n, xs in self.stops.items() for x in xs),
        ]:
            self.places(values)
        self.view = widgets.HTML(layout=dict(flex="1 1 32em", min_width="0", overflow="auto"))
        for one in self.controls.values():
            one.observe(self.update, names="value")
        self.box = self.framed()
        self.update()

    def framed(self) -> widgets.VBox:
        "Title and question above; the controls beside the view where there is room."
        named = [
            action_button(name, partial(self.set, **{**self.start, **values}))
            for name, values in self.presets.items()
        ]
        buttons = widgets.HBox(
            [*named, action_button("Reset", self.reset)], layout=dict(flex_flow="row wrap")
        )
        column = widgets.VBox([buttons, *self.controls.values()], layout=dict(flex="0 1 auto"))
        body = widgets.HBox(
            [column, self.view], layout=dict(flex_flow="row wrap", align_items="flex-start")
        )
        style = widgets.HTML(element("style", asset("dials.css")), layout=dict(display="none"))
        box = widgets.VBox([style, *[widgets.HTML(self.head())] * bool(self.head()), body])
        return box.add_class("rlhf-dials")

    def head(self) -> str:
        "Title and question, as markup."
        if not self.title and not self.question:
            return ""
        title = element("b", escape(self.title)) + element("br") if self.title else ""
        return element("p", title, escape(self.question))

    def state(self) -> dict[str, Any]:
        "The values of the controls."
        return {name: one.value for name, one in self.controls.items()}

    def places(self, values: Mapping[str, Any]) -> dict[str, int]:
        """Where values are among those that their controls can take. Raises ValueError for an
        argument or a value that there is not."""
        if unknown := ", ".join(values.keys() - self.controls.keys()):
            raise ValueError(f"there is no control {unknown}: {', '.join(self.controls)} are here.")
        return {name: dial(name, self.controls[name]).place(x) for name, x in values.items()}

    def set(self, **values: Any) -> None:
        "Move some controls as one: the view is drawn once. Raises ValueError as `places` does."
        self.places(values)
        for one in self.controls.values():
            one.unobserve(self.update, names="value")
        try:
            for name, value in values.items():
                self.controls[name].value = value
        finally:
            for one in self.controls.values():
                one.observe(self.update, names="value")
        self.update()

    def reset(self) -> None:
        "All controls as they were at first."
        self.set(**self.start)

    def at(self, **values: Any) -> Html:
        """What the view shows with these values, and the others as at first. No control moves: a
        page can show a state and leave the reader's own alone."""
        self.places(values)
        return Html(markup(self.render(**{**self.start, **values}), self.alt))

    def update(self, change: Any = None) -> None:
        "Draw the view from the controls as they are set."
        try:
            self.view.value = markup(self.render(**self.state()), self.alt)
        except Exception as error:
            kind = element("b", type(error).__name__)
            self.view.value = element("p", kind, ": ", escape(str(error)), role="alert")
            raise

    def dials(self, most: int = MOST) -> list[Dial]:
        "The controls with the values that they have where no kernel draws."
        every = [dial(name, one) for name, one in self.controls.items()]
        every = [replace(one, start=one.place(self.start[one.name])) for one in every]
        asked = [self.places(values) for values in self.presets.values()]
        needed = {one.name: {at[one.name] for at in asked if one.name in at} for one in every}
        few = [
            one.kept(sorted({one.start, *needed[one.name], *map(one.place, self.stops[one.name])}))
            if one.name in self.stops
            else one
            for one in every
        ]
        kept = {name: places for name, places in needed.items() if name not in self.stops}
        return thinned(few, kept, fixed=self.stops.keys(), most=most)

    def framing(self, dials: Sequence[Dial]) -> dict[str, Any]:
        "What a page shows around the view."
        states = math.prod(len(one.values) for one in dials)
        at = lambda values: [one.place({**self.start, **values}[one.name]) for one in dials]
        return dict(
            title=self.title or "Explorer",
            question=self.question,
            note=f"Drawn beforehand, for {states} states. In the notebook, every value is drawn.",
            dials=[one.shown() for one in dials],
            presets=[dict(name=name, at=at(values)) for name, values in self.presets.items()],
        )

    def grid(self, most: int = MOST) -> dict[str, Any]:
        """What a page without a kernel shows: its frame, and what `render` makes of each of at most
        `most` states. Raises ValueError where choices alone make more."""
        dials = self.dials(most)
        views = drawn(lambda **state: markup(self.render(**state), self.alt), dials)
        return {**self.framing(dials), **shared(views)}

    def save_html(self, path: str | Path, most: int = MOST) -> Path:
        "Write one page that needs no kernel and no network."
        path = Path(path)
        path.write_text(page(self.grid(most)), encoding="utf-8")
        return path

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        values = " · ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in self.state().items()
        )
        static = f"{self.head()}{element('p', escape(values))}{self.view.value}"
        return notebook_bundle(self.box, static, f"Explorer({values})", **kwargs)
