"""An explorer without a kernel: what Python drew for every state of a grid, and a page that shows
the one that its controls name."""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from rlhf_nb.ui.assets import asset

MOST = 450  # states of one grid


@dataclass(frozen=True)
class Dial:
    "A control of the page: the values that it can take."

    name: str  # of the argument
    kind: str  # range, choice or check
    values: Sequence[Any]
    texts: Sequence[str]  # of the values, as they are read
    start: int  # which of them is set at first

    def kept(self, which: Sequence[int]) -> Dial:
        "The same control with some of its values, the start among them."
        return replace(
            self,
            values=[self.values[i] for i in which],
            texts=[self.texts[i] for i in which],
            start=list(which).index(self.start),
        )

    def shown(self) -> dict[str, Any]:
        "What the page needs of it."
        label = self.name.replace("_", " ")
        return dict(label=label, kind=self.kind, texts=list(self.texts), start=self.start)

    def place(self, value: Any) -> int:
        "Where a value is. Raises ValueError if it is none of them."
        near = [
            i
            for i, mine in enumerate(self.values)
            if mine == value
            or (self.kind == "range" and math.isclose(mine, value, rel_tol=0, abs_tol=1e-9))
        ]
        if not near:
            raise ValueError(
                f"{self.name} cannot be {value!r}: give one of {', '.join(self.texts)}."
            )
        return near[0]


def thinned(
    dials: Sequence[Dial],
    needed: Mapping[str, set[int]],  # stops that a control keeps
    fixed: Collection[str] = (),  # controls that keep all
    most: int = MOST,
) -> list[Dial]:
    """The controls with so few stops that they have no more than `most` states. Only sliders lose
    stops: those with the most, evenly, and never their ends, their start or what is needed. Raises
    ValueError where that is not enough."""

    def thin(dial: Dial) -> Dial:
        count, last = counts.get(dial.name, 0), len(dial.values) - 1
        even = {round(i * last / (count - 1)) for i in range(count)} if count else range(last + 1)
        return dial.kept(sorted({*even, dial.start, *needed.get(dial.name, ())}))

    counts = {
        dial.name: len(dial.values)
        for dial in dials
        if dial.kind == "range" and dial.name not in fixed and len(dial.values) > 1
    }
    while (total := math.prod(len(thin(dial).values) for dial in dials)) > most:
        able = [name for name, count in counts.items() if count > 2]
        if not able:
            raise ValueError(f"{total} states where {most} are the most: give fewer choices.")
        counts[max(able, key=counts.__getitem__)] -= 1
    return [thin(dial) for dial in dials]


def drawn(render: Callable[..., str], dials: Sequence[Dial]) -> list[str]:
    "What `render` makes of every state, the last control moving fastest."
    names = [dial.name for dial in dials]
    return [
        render(**dict(zip(names, values)))
        for values in itertools.product(*(dial.values for dial in dials))
    ]


def shared(views: Sequence[str]) -> dict[str, Any]:
    """Texts as lists of places in one list of parts, each of them kept once: tags, mostly, which a
    picture has in common with its neighbours."""
    places: dict[str, int] = {}
    rows = [
        [places.setdefault(part, len(places)) for part in re.findall(r"[^>]*>|[^>]+$", view)]
        for view in views
    ]
    return dict(parts=list(places), views=rows)


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


def unpack(data: bytes) -> dict[str, Any]:
    return json.loads(gzip.decompress(data))


def start_of(grid: Mapping[str, Any]) -> list[int]:
    "The state that is shown first."
    return [dial["start"] for dial in grid["dials"]]


def frame(grid: Mapping[str, Any]) -> str:
    """An explorer in a page that has static/explorers.js and static/explorers.css: its start as
    markup, which is all that a reader without scripts gets, and the states behind it."""
    said = " · ".join(f"{dial['label']} {dial['texts'][dial['start']]}" for dial in grid["dials"])
    return asset("explorer.html").format(
        title=escape(grid["title"]),
        question=escape(grid["question"]),
        note=escape(grid["note"]),
        said=escape(said),
        view=view_at(grid, start_of(grid)),
        states=base64.b64encode(pack(grid)).decode(),
    )


def page(grid: Mapping[str, Any]) -> str:
    """A whole page with one explorer. It names its script's hash, so that a browser runs no other,
    and asks for nothing."""
    script = asset("explorers.js")
    return asset("explorer-page.html").format(
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=escape(grid["title"]),
        style=asset("theme.css") + asset("explorers.css"),
        script=script,
        body=frame(grid),
    )
