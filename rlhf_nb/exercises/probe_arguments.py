"""Probes of what an answer does with its arguments: ignored, swapped, negated, or constant."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from rlhf_nb.exercises.trial import Change, Trial, changed, is_float, is_mask, on_padding, put
from rlhf_nb.exercises.trial import without_empty_rows as without_empty
from rlhf_nb.exercises.values import Raised, leaves, same


def ignored(t: Trial) -> str | None:
    "A change of an argument leaves the result as it is."
    silent = []
    for name in t.taken:
        changes = list(_others(t, name))
        mine, right = _noticed(t, changes) if changes else (True, True)
        if right and not mine:
            silent.append(name)
    if not silent:
        return None
    every = [name for name in t.taken if list(_others(t, name))]
    if len(silent) == len(every) > 1:
        return f"Your result is always the same: {', '.join(silent)} make no difference to it."
    for name in silent:
        for value in t.candidates(name):
            if all(same(t.piece(g), t.right({**c, name: value})) for c, g in zip(t.cases, t.got)):
                return (
                    f"{name} makes no difference: your result is always that of {name} = "
                    f"{value:g}. Did you write a constant instead of {name}"
                    + (f", or leave {name} out?" if value in (0, 1) else "?")
                )
    names = " and ".join([", ".join(silent[:-1]), silent[-1]] if len(silent) > 1 else silent)
    make = "make" if len(silent) > 1 else "makes"
    return f"{names} {make} no difference to your result, and should."


def _others(t: Trial, name: str) -> Iterator[Change]:
    "Changes of one argument alone."
    first = t.cases[0][name]
    if name in t.scalars:
        for value in t.seen[name][:6]:
            yield put(name, value)
    elif isinstance(first, bool):
        yield lambda case: {**case, name: not case[name]}
    elif any(map(is_mask, leaves(first))):
        yield changed(name, lambda x: torch.ones_like(x) if is_mask(x) else x)
        yield changed(name, lambda x: torch.zeros_like(x) if is_mask(x) else x)
        yield changed(name, lambda x: x.roll(1, -1) if is_mask(x) else x)
    elif any(map(is_float, leaves(first))):
        yield changed(name, lambda x: 2 * x + 0.3 if is_float(x) else x)
        yield changed(name, lambda x: x.roll(1, 0) if is_float(x) and x.ndim else x)
    elif any(isinstance(x, Tensor) for x in leaves(first)):
        yield changed(name, lambda x: x.roll(1, -1) if isinstance(x, Tensor) and x.ndim else x)
        yield changed(name, lambda x: x.flip(0) if isinstance(x, Tensor) and x.ndim else x)
    elif isinstance(first, (str, list, tuple)):
        for other in {repr(c[name]): c[name] for c in t.cases}.values():
            yield put(name, other)


def _noticed(t: Trial, changes: list[Change]) -> tuple[bool, bool]:
    "Whether some change made a difference to the answer, and to the right one."
    mine = right = False
    for case, got, want in zip(t.cases, t.got, t.want):
        for change in changes:
            other = change(case)
            right = right or not same(t.right(other), t.piece(want))
            mine = mine or not same(t.mine(other), t.piece(got))
            if mine:
                return mine, right
    return mine, right


def swapped(t: Trial) -> str | None:
    "Right where two arguments change places."
    for one, two in combinations(t.taken, 2):
        swap = lambda case: {**case, one: case[two], two: case[one]}  # noqa: B023
        if any(_alike(c[one], c[two]) for c in t.cases) and t.agrees(lambda c: c, swap):
            return (
                f"{one} and {two} are swapped: with the two exchanged, your result would be right."
            )
    return None


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape
    return type(a) is type(b)


def constant(t: Trial) -> str | None:
    "Right at one value of a hyperparameter, and wrong at the others."
    for name in t.scalars:
        for value in t.candidates(name):
            if value == 0 or not t.agrees(put(name, value)):
                continue
            if value == 1:
                return (
                    f"Right only where {name} = 1: {name} is missing somewhere, or you multiply or "
                    "divide by it once too often."
                )
            return (
                f"Right only where {name} = {value:g}: did you write that constant instead of "
                f"{name}?"
            )
    return None


def fails_at_others(t: Trial) -> str | None:
    "Right in every case with one value of a hyperparameter; raises an error with another value."
    draws = [t.exercise.draw(t.seed + 1 + k) for k in range(3)] if t.scalars else []
    cases = [*t.cases, *(case for draw in draws for case in draw)]
    mine = [t.mine(case) for case in cases]
    right = [same(one, t.right(case)) for one, case in zip(mine, cases)]
    for name in t.scalars if any(isinstance(one, Raised) for one in mine) else []:
        fine = {case[name] for case in cases}
        fine -= {case[name] for case, ok in zip(cases, right) if not ok}
        if len(fine) == 1 and len({case[name] for case in cases}) > 1:
            value = fine.pop()
            return (
                f"Right only where {name} = {value:g}, and it fails elsewhere: did you write that "
                f"constant instead of {name}?"
            )
    return None


def sign_of_argument(t: Trial) -> str | None:
    "Right where an argument has the other sign."
    for name in [*t.tensors, *(t.scalars if t.exercise.any_value else [])]:
        negate = changed(name, lambda x: -x if is_float(x) or isinstance(x, (int, float)) else x)
        if t.agrees(lambda c: c, negate):
            return (
                f"The sign of {name} is wrong: you add it where it has to be subtracted, or "
                "subtract it where it has to be added."
            )
    return None


def full_mask(t: Trial) -> str | None:
    "Right where the mask is all true."
    if t.masks:
        whole = changed(t.masks[0], lambda x: torch.ones_like(x) if is_mask(x) else x)
        if t.agrees(lambda c: on_padding(whole(c), 0.5)):
            return (
                "Right if no token is padding, and wrong with padding: does padding count in a sum "
                "or mean? Look at the mask, and at what follows the last real token."
            )
    return None


def neutral(t: Trial) -> str | None:
    "Right where one argument is 0, or the same everywhere: the mistake is in what is done with it."
    for name in t.scalars if t.exercise.any_value else []:
        if t.agrees_and_tells(put(name, 0)):
            return f"Right only where {name} = 0: the mistake is in what you do with {name}."
    for name in t.tensors:
        zero = changed(name, lambda x: torch.zeros_like(x) if is_float(x) else x)
        if t.agrees_and_tells(zero):
            return f"Right only where {name} is 0: the mistake is in what you do with {name}."
    for name in t.tensors:
        if t.agrees(changed(name, lambda x: torch.ones_like(x) if is_float(x) else x)):
            return (
                f"Right only where all of {name} is the same number: you take the wrong elements "
                f"of {name}, or average them wrongly."
            )
    return None


def empty_rows(t: Trial) -> str | None:
    "Right without the rows that have no real token."
    if t.agrees(without_empty):
        return (
            "Wrong only with a row that has no real token: an all-padding row has to count for "
            "nothing."
        )
    return None
