"Every exercise, found by itself: a module of this folder with a PAGE is one page's exercises."

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import rlhf_nb.exercises
from rlhf_nb.exercises.engine import Exercise

APART = {"museum"}  # plants bugs in the package, loads all of it, and has no checker


def checkers() -> dict[str, Exercise]:
    "The exercises in the order of the pages. `GAE` of a module is `check_gae` here."
    rows = []
    for info in iter_modules(rlhf_nb.exercises.__path__):
        if info.name not in APART:
            names = vars(import_module(f"rlhf_nb.exercises.{info.name}"))
            ours = [(k, x) for k, x in names.items() if isinstance(x, Exercise)]
            rows += [(names["PAGE"], f"check_{k.lower()}", x) for k, x in ours]
    return {name: one for _, name, one in sorted(rows, key=lambda x: x[0])}
