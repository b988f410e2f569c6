"""Episodes to read: the live widget and the saved file, which one script draws."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import anywidget
from traitlets import Dict

from rlhf_nb.runtime.files import write_text_atomic
from rlhf_nb.tldr import SLOT
from rlhf_nb.ui.assets import asset, module
from rlhf_nb.ui.html import breakable, script_page
from rlhf_nb.ui.viz import visible

SCRIPT = module("arithmetic.js", "reader.js")
STYLE = asset("theme.css") + asset("reader.css")


def head_of(
    title: str,
    updates: Sequence[Mapping[str, Any]],  # name, update (its number); run: 1 for another run
    signal: str,
    start: int = 0,  # index of the update that is shown first
    suspects: Sequence[Mapping[str, Any]] = (),  # sentence, update (an index), row or None
    curves: Sequence[Mapping[str, Any]] = (),  # name, unit, lines: each a run and its points
) -> dict[str, Any]:
    "What a reader knows before it opens an update. Texts are made visible here."
    return dict(
        title=visible(title),
        updates=[{**one, "name": visible(one["name"])} for one in updates],
        signal=signal,
        start=start,
        suspects=[{**one, "sentence": visible(one["sentence"])} for one in suspects],
        curves=list(curves),
        slots=dict(SLOT),
    )


class Reader(anywidget.AnyWidget):
    """A reader in a live notebook. `place` says where it is, and moves it: update (an index), row,
    signal, sort, down, find, only, above, recipe, panel."""

    _esm = SCRIPT
    _css = STYLE
    head = Dict().tag(sync=True)
    place = Dict().tag(sync=True)

    def __init__(
        self,
        head: Mapping[str, Any],
        load: Callable[[int], bytes],  # index of an update -> the update, packed
        again: Callable[[int, int], Mapping[str, Any]],  # index, row -> found and completed
        place: Mapping[str, Any],
        actions: Mapping[str, Callable[[], None]] | None = None,  # a button for each
    ):
        self._load, self._again, self.actions = load, again, dict(actions or {})
        super().__init__(head={**head, "actions": list(self.actions)}, place=dict(place))
        self.on_msg(self._answer)

    def _answer(self, _: Any, asked: Mapping[str, Any], __: Any) -> None:
        "Answer a question of the page; where that fails, the page says why."
        number = asked["number"]
        try:
            if "load" in asked:
                self.send(dict(answers=number), [self._load(asked["load"])])
            elif "again" in asked:
                self.send(dict(answers=number, value=self._again(*asked["again"])))
            else:
                self.actions[asked["act"]]()
                self.send(dict(answers=number, value=None))
        except Exception as error:
            self.send(dict(answers=number, error=f"{type(error).__name__}: {error}"))
            raise


def write_reader(
    path: str | Path,
    head: Mapping[str, Any],
    packed: Sequence[bytes],  # one for each update of the head
    place: Mapping[str, Any],
    plain: str,  # markup for where no script runs
    completed: Mapping[str, Any] | None = None,  # prompt -> rows of the tables of completions
) -> Path:
    "A page that reads episodes without a kernel or a network, written whole or not at all."
    updates = [
        {**one, "packed": base64.b64encode(whole).decode()}
        for one, whole in zip(head["updates"], packed, strict=True)
    ]
    page = script_page(
        "reader.html",
        SCRIPT,
        asset("page.css") + STYLE,
        {**head, "updates": updates, "place": dict(place), "completed": completed or {}},
        title=escape(head["title"]),
        plain=breakable(plain),
    )
    write_text_atomic(path, page)
    return Path(path)
