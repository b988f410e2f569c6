"""A formula is a picture that holds still. Give it a slider, and it answers."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.controls import notebook_bundle


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
    file = io.BytesIO()
    view.savefig(file, format="png", dpi=100, bbox_inches="tight")
    plt.close(view)
    data = base64.b64encode(file.getvalue()).decode()
    return (
        f'<img alt="{html.escape(alt)}" style="max-width:100%" src="data:image/png;base64,{data}">'
    )


class Explorer:
    "Controls above a view that a pure function draws from their values."

    def __init__(
        self,
        render: Callable[..., str | Figure],  # called with one keyword argument a control
        alt: str = "",  # what a figure shows, in a sentence
        **specs: Any,  # a specification for each argument of render, as `control` takes it
    ):
        self.render, self.alt = render, alt
        self.controls = {name: control(name, spec) for name, spec in specs.items()}
        self.view = widgets.HTML()
        for one in self.controls.values():
            one.observe(self.update, names="value")
        self.box = widgets.VBox([*self.controls.values(), self.view])
        self.update()

    def state(self) -> dict[str, Any]:
        "The values of the controls."
        return {name: one.value for name, one in self.controls.items()}

    def update(self, change: Any = None) -> None:
        "Draw the view from the controls as they are set."
        try:
            self.view.value = markup(self.render(**self.state()), self.alt)
        except Exception as error:
            self.view.value = (
                f'<p role="alert"><b>{type(error).__name__}</b>: {html.escape(str(error))}</p>'
            )
            raise

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        values = " · ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in self.state().items()
        )
        static = f"<p>{html.escape(values)}</p>{self.view.value}"
        return notebook_bundle(self.box, static, f"Explorer({values})", **kwargs)
