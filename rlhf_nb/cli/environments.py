"""`--environment`: a world of the package with its settings, or one of the user's own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.cli.scoring import load_function
from rlhf_nb.environments import guess_number, walk

WORLDS: dict[str, Callable[..., Callable[[], Any]]] = dict(guess_number=guess_number, walk=walk)


def read_settings(what: str, text: str = "") -> dict[str, Any]:
    "Settings behind a name, n=15,turns=4: numbers, true and null as in JSON. Raises ValueError."
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{what}: {part!r} is no setting: write NAME:n=15,turns=4.")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def load_environment(name: str) -> Callable[[], Any]:
    "An environment_factory. Raises ValueError where there is no such world, or setting of it."
    what = f"--environment {name}"
    kind, _, text = name.partition(":")
    if kind not in WORLDS:
        return load_function("--environment", name, WORLDS)
    parameters = inspect.signature(WORLDS[kind]).parameters.values()
    known = {x.name: x.default for x in parameters if isinstance(x.default, int)}
    given = read_settings(what, text)
    for setting, value in given.items():
        if setting not in known:
            near = did_you_mean(setting, known)
            raise ValueError(f"{what}: {kind} has the settings {', '.join(known)}.{near}")
        if type(value) is not int or value < 1:
            raise ValueError(
                f"{what}: {setting} is {value!r}: give a whole number from 1, such as "
                f"{known[setting]}."
            )
    return partial(WORLDS[kind], **given)()
