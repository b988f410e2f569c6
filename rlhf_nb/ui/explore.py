"Controls above a view that a pure function draws: live, or from states drawn beforehand."

from __future__ import annotations

import base64
import gzip
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from rlhf_nb.base.files import write_text_atomic
from rlhf_nb.ui.html import Html, asset, drawing, element, error_note, script_page

# ---- Controls that several views share ----


def action_button(name: str, act: Callable[[], None], tip: str = "") -> widgets.Button:
    "A button that runs `act`; `tip` explains it where its name does not."
    button = widgets.Button(description=name, tooltip=tip or name, layout=dict(width="auto"))
    button.on_click(lambda _: act())
    return button


def side_by_side(*group: widgets.Widget) -> widgets.HBox:
    "Controls on one line, which wraps where the page is narrow."
    for one in group:
        if isinstance(one, widgets.FloatSlider):
            one.layout.width, one.style.description_width = "22em", "6.5em"
        if isinstance(one, widgets.ToggleButtons):
            one.style.description_width = "5.5em"
    return widgets.HBox(list(group), layout=dict(flex_flow="row wrap", align_items="baseline"))


def notebook_bundle(live: widgets.Widget, html: str, text: str, **options: Any) -> dict[str, Any]:
    "What a notebook displays: the widget where there is a kernel, markup or text elsewhere."
    made = live._repr_mimebundle_(**options)
    data = made[0] if isinstance(made, tuple) else made  # anywidget's has metadata beside it
    return {**data, "text/html": html, "text/plain": text}


# ---- An explorer without a kernel ----


MOST_STATES = 450  # states of one grid
SYMBOLS = dict(gamma="γ", lam="λ")  # as pictures and formulas have them


def label_of(name: str) -> str:
    "What a reader sees of an argument's name."
    return " ".join(SYMBOLS.get(word, word) for word in name.split("_"))


@dataclass(frozen=True)
class Dial:
    "A control of the page: the values that it can take."

    name: str  # of the argument
    kind: str  # range, choice or check
    values: Sequence[Any]
    texts: Sequence[str]  # of the values, as they are read
    start: int  # which of them is set at first

    def select(self, which: Sequence[int]) -> Dial:
        "The same control with some of its values, the start among them."
        values, texts = ([its[i] for i in which] for its in (self.values, self.texts))
        return replace(self, values=values, texts=texts, start=list(which).index(self.start))

    def place(self, value: Any) -> int:
        "Where a value is. Raises ValueError if it is none of them."
        for i, mine in enumerate(self.values):
            same = self.kind == "range" and math.isclose(mine, value, rel_tol=0, abs_tol=1e-9)
            if same or mine == value:
                return i
        raise ValueError(f"{self.name} cannot be {value!r}: give one of {', '.join(self.texts)}.")


def thin_dials(
    dials: Sequence[Dial],
    needed: Mapping[str, set[int]],  # stops that a control keeps
    fixed: Collection[str] = (),  # controls that keep all
    most: int = MOST_STATES,
) -> list[Dial]:
    """The controls with at most `most` states. Only sliders lose stops: those with the most,
    evenly, never ends, start or what is needed. Raises ValueError where that is not enough."""

    def thin_dial(dial: Dial) -> Dial:
        count, last = counts.get(dial.name, 0), len(dial.values) - 1
        even = {round(i * last / (count - 1)) for i in range(count)} if count else range(last + 1)
        return dial.select(sorted({*even, dial.start, *needed.get(dial.name, ())}))

    free = [dial for dial in dials if dial.kind == "range" and dial.name not in fixed]
    counts = {dial.name: len(dial.values) for dial in free if len(dial.values) > 1}
    while (total := math.prod(len(thin_dial(dial).values) for dial in dials)) > most:
        able = [name for name, count in counts.items() if count > 2]
        if not able:
            raise ValueError(f"{total} states where {most} are the most: give fewer choices.")
        counts[max(able, key=counts.__getitem__)] -= 1
    return [thin_dial(dial) for dial in dials]


def view_at(grid: Mapping[str, Any], state: Sequence[int]) -> str:
    "The text of one state, as the page puts it together."
    at = 0
    for dial, i in zip(grid["dials"], state, strict=True):
        at = at * len(dial["texts"]) + i
    return "".join(grid["parts"][i] for i in grid["views"][at])


def pack(grid: Mapping[str, Any]) -> bytes:
    "A grid as a file: JSON, compressed."
    text = json.dumps(grid, ensure_ascii=False, separators=(",", ":"))
    return gzip.compress(text.encode(), 9, mtime=0)


def frame(grid: Mapping[str, Any]) -> str:
    "For a page with explorers.js and explorers.css: its start as markup, and all states behind it."
    said = " · ".join(f"{dial['label']} {dial['texts'][dial['start']]}" for dial in grid["dials"])
    return asset("explorer.html").format(
        **{name: escape(grid[name]) for name in ("title", "question", "note")},
        said=escape(said),
        view=view_at(grid, [dial["start"] for dial in grid["dials"]]),
        states=base64.b64encode(pack(grid)).decode(),
    )


def page(grid: Mapping[str, Any]) -> str:
    "A whole page with one explorer, which runs its own script alone and asks for nothing."
    script, style = asset("explorers.js"), asset("theme.css") + asset("explorers.css")
    return script_page("explorer-page.html", grid["title"], script, style, {}, body=frame(grid))


# ---- An explorer ----


class _IntSlider(anywidget.AnyWidget, widgets.IntSlider):
    _esm = asset("slider.js")


class _FloatSlider(anywidget.AnyWidget, widgets.FloatSlider):
    _esm = asset("slider.js")


def control(
    name: str,  # of the argument; underscores become spaces
    spec: Any,  # (low, high, start), (low, high, start, step), a list or dict of choices, or a bool
) -> widgets.Widget:
    "A control for one argument. Raises ValueError if the specification is none of these."
    label = label_of(name)
    shared: dict[str, Any] = dict(description=label, tooltip=label)  # else its tooltip is "null"
    shared |= dict(style=dict(description_width="initial"), layout=dict(width="20em"))
    if isinstance(spec, bool):
        return widgets.Checkbox(value=spec, **shared)
    numbers = isinstance(spec, tuple) and all(isinstance(x, (int, float)) for x in spec)
    if numbers and len(spec) in (3, 4):
        low, high, start, *given = spec
        integers = all(isinstance(x, int) for x in spec)
        make = _IntSlider if integers else _FloatSlider
        step = given[0] if given else 1 if integers else (high - low) / 100
        return make(value=start, min=low, max=high, step=step, continuous_update=False, **shared)
    choices = spec.values() if isinstance(spec, Mapping) else spec if isinstance(spec, list) else ()
    if len(choices) and None not in choices:  # for ipywidgets, None means: nothing is chosen
        shared["style"]["button_width"] = "initial"
        # Otherwise the name takes a line of its own.
        shared["layout"] = dict(display="flex", flex_flow="row nowrap", align_items="baseline")
        return widgets.ToggleButtons(options=spec, **shared)
    wanted = "(low, high, start), (low, high, start, step), a list or dict of choices without None"
    raise ValueError(f"{name} is {spec!r}: give {wanted}, or a truth value.")


def markup(view: str | Figure, alt: str = "") -> str:
    "Markup of a view; a figure becomes an inline image that `alt` describes, and is closed."
    if view is None:
        raise ValueError("the function that draws returned nothing: return markup or a figure.")
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
    if isinstance(one, widgets.ToggleButtons):
        options = one.options.items() if isinstance(one.options, Mapping) else one.options
        pairs = [pair if isinstance(pair, tuple) else (str(pair), pair) for pair in options]
        return Dial(name, "choice", [x for _, x in pairs], [text for text, _ in pairs], one.index)
    steps = math.floor((one.max - one.min) / one.step + 1e-9)
    even = [round(one.min + i * one.step, 10) for i in range(steps + 1)]
    values = sorted({*even, one.value})
    return Dial(name, "range", values, [f"{value:g}" for value in values], values.index(one.value))


class Explorer:
    "A view that a pure function draws from controls, with title, question, presets, a way back."

    def __init__(
        self,
        render: Callable[..., str | Figure],  # called with one keyword argument a control
        alt: str = "",  # what a figure shows, in a sentence
        title: str = "",
        question: str = "",  # what one can find out here
        presets: Mapping[str, Mapping[str, Any]] | None = None,  # name: values; others as at first
        stops: Mapping[str, Sequence[Any]] | None = None,  # of sliders, where no kernel draws
        **specs: Any,  # a specification for each argument of render, as `control` takes it
    ):
        self.render, self.alt, self.title, self.question = render, alt, title, question
        self.presets, self.stops, self.moving = presets or {}, stops or {}, False
        self.controls = {name: control(name, spec) for name, spec in specs.items()}
        self.start = self.state()
        self.first = {name: dial(name, one) for name, one in self.controls.items()}
        alone = [{name: x} for name, its in self.stops.items() for x in its]
        for values in [*self.presets.values(), *alone]:
            self.places(values)
        self.view = widgets.HTML(layout=dict(min_width="0", overflow="auto"))
        for one in self.controls.values():
            one.observe(self.update, names="value")
        moves = {name: {**self.start, **values} for name, values in self.presets.items()}
        named = [action_button(name, partial(self.set, **values)) for name, values in moves.items()]
        wrap = dict(flex_flow="row wrap")
        buttons = widgets.HBox([*named, action_button("Reset", self.reset)], layout=wrap)
        controls = widgets.HBox([*self.controls.values()], layout=wrap)
        body = widgets.VBox([buttons, controls, self.view])
        style = widgets.HTML(element("style", asset("dials.css")), layout=dict(display="none"))
        box = widgets.VBox([style, *[widgets.HTML(self.head())] * bool(self.head()), body])
        self.box = box.add_class("rlhf-dials")
        self.update()

    def head(self) -> str:
        "Title and question, as markup."
        title = element("b", escape(self.title)) + element("br") if self.title else ""
        return element("p", title, escape(self.question)) if title or self.question else ""

    def state(self) -> dict[str, Any]:
        "The values of the controls."
        return {name: one.value for name, one in self.controls.items()}

    def places(self, values: Mapping[str, Any]) -> dict[str, int]:
        "Where values are among those of their controls. Raises ValueError on others."
        if unknown := ", ".join(values.keys() - self.controls.keys()):
            raise ValueError(f"there is no control {unknown}: {', '.join(self.controls)} are here.")
        return {name: self.first[name].place(x) for name, x in values.items()}

    def set(self, **values: Any) -> None:
        "Move some controls as one: the view is drawn once. Raises ValueError as `places` does."
        self.places(values)
        self.moving = True
        try:
            for name, value in values.items():
                self.controls[name].value = value
        finally:
            self.moving = False
        self.update()

    def reset(self) -> None:
        "All controls as they were at first."
        self.set(**self.start)

    def at(self, **values: Any) -> Html:
        "What the view shows with these values, and others as at first. No control moves."
        self.places(values)
        return Html(markup(self.render(**{**self.start, **values}), self.alt))

    def update(self, change: Any = None) -> None:
        "Draw the view from the controls as they are set, unless more of them will move."
        if self.moving:
            return
        try:
            self.view.value = markup(self.render(**self.state()), self.alt)
        except Exception as error:
            self.view.value = error_note(error)
            raise

    def dials(self, most: int = MOST_STATES) -> list[Dial]:
        "The controls with the values that they have where no kernel draws."
        every = [*self.first.values()]
        asked = [self.places(values) for values in self.presets.values()]
        needed = {one.name: {at[one.name] for at in asked if one.name in at} for one in every}
        for i, one in enumerate(every):
            if one.name in self.stops:
                kept = {*needed.pop(one.name), *map(one.place, self.stops[one.name])}
                every[i] = one.select(sorted({one.start, *kept}))
        return thin_dials(every, needed, fixed=self.stops.keys(), most=most)

    def framing(self, dials: Sequence[Dial]) -> dict[str, Any]:
        "What a page shows around the view."
        states = math.prod(len(one.values) for one in dials)
        at = lambda values: [one.place({**self.start, **values}[one.name]) for one in dials]
        told = lambda x: dict(kind=x.kind, texts=[*x.texts], start=x.start)
        return dict(
            title=self.title or "Explorer",
            question=self.question,
            note=f"Drawn beforehand, for {states} states. In the notebook, every value is drawn.",
            dials=[dict(label=label_of(x.name), **told(x)) for x in dials],
            presets=[dict(name=name, at=at(values)) for name, values in self.presets.items()],
        )

    def grid(self, most: int = MOST_STATES) -> dict[str, Any]:
        "What a page without a kernel shows, in at most so many states. Or ValueError."
        dials = self.dials(most)  # the last one moves fastest
        states = itertools.product(*(one.values for one in dials))
        drawn = [markup(self.render(**dict(zip(self.controls, x))), self.alt) for x in states]
        parts: dict[str, int] = {}  # tags, which neighbours have in common, and their places
        tags = [re.findall(r"[^>]*>|[^>]+$", view) for view in drawn]
        views = [[parts.setdefault(tag, len(parts)) for tag in view] for view in tags]
        return {**self.framing(dials), "parts": list(parts), "views": views}

    def save_html(self, path: str | Path, most: int = MOST_STATES) -> Path:
        "Write one page that needs no kernel and no network."
        write_text_atomic(path, page(self.grid(most)))
        return Path(path)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        values = " · ".join(f"{label_of(n)} {x}" for n, x in self.state().items())
        said = f"{self.head()}{element('p', escape(values))}{self.view.value}"
        static = element("div", element("style", asset("dials.css")), said, class_="rlhf-dials")
        return notebook_bundle(self.box, static, f"Explorer({values})", **kwargs)
