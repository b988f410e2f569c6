"""Controls above a picture, laid out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ipywidgets as widgets

from rlhf_nb.ui.explore import Explorer
from rlhf_nb.ui.html import error_note


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
