"""Controls that several views share, and how they are laid out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as widgets


def labelled_control(
    kind: type[widgets.Widget], name: str, value: Any, **more: Any
) -> widgets.Widget:
    "A control of another kind than `explore.control` makes, in the same style."
    return kind(
        value=value,
        description=name,
        tooltip=name,
        continuous_update=False,
        style=dict(description_width="11em"),
        layout=dict(width="29em"),
        **more,
    )


def action_button(name: str, act: Callable[[], None], tip: str = "") -> widgets.Button:
    "A button that runs `act`; `tip` explains it where its name does not."
    button = widgets.Button(description=name, tooltip=tip or name, layout=dict(width="auto"))
    button.on_click(lambda _: act())
    return button


def step_through(place: widgets.IntSlider, by: int) -> None:
    "Move a slider over a list that starts at 1; after the last entry comes the first."
    place.value = (place.value - 1 + by) % place.max + 1


def restart_list(place: widgets.IntSlider, count: int) -> None:
    "Back to the first entry of a list that has changed and now has `count` of them."
    place.value, place.max = 1, max(1, count)


def side_by_side(*group: widgets.Widget) -> widgets.HBox:
    "Controls on one line, which wraps where the page is narrow."
    wide = (
        widgets.FloatSlider,
        widgets.IntSlider,
        widgets.SelectionSlider,
        widgets.Text,
        widgets.FloatText,
    )
    for one in group:
        if isinstance(one, wide):
            one.layout.width, one.style.description_width = "22em", "6.5em"
        if isinstance(one, widgets.ToggleButtons):
            one.style.description_width = "5.5em"
        if isinstance(one, widgets.Checkbox):
            one.layout.width, one.indent = "auto", False
    return widgets.HBox(list(group), layout=dict(flex_flow="row wrap", align_items="baseline"))


def notebook_bundle(live: widgets.Widget, html: str, text: str, **options: Any) -> dict[str, Any]:
    """What a notebook displays: the widget where there is a kernel, markup or text elsewhere.
    `_repr_mimebundle_` is IPython's display protocol, which every widget has."""
    made = live._repr_mimebundle_(**options)
    data = made[0] if isinstance(made, tuple) else made  # anywidget's has metadata beside it
    return {**data, "text/html": html, "text/plain": text}
