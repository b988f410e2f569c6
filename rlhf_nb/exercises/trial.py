"""A wrong answer beside the right one, and the changes of a case that show where they differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf_nb.exercises.values import Case, Raised, fresh, leaves, mapped, parts, plain, same

Change = Callable[[Case], Case]
Trait = Callable[[Case, Any], "bool | None"]  # of a result; None where a case does not show it


class Judged(Protocol):
    "What a probe needs from an exercise."

    @property
    def right(self) -> Callable: ...

    @property
    def results(self) -> tuple[str, ...]: ...

    @property
    def any_value(self) -> bool: ...

    @property
    def mistakes(self) -> Mapping[str, Any]: ...

    @property
    def traits(self) -> Mapping[str, Trait]: ...

    def wrong(self, message: str) -> Callable: ...

    def draw(self, seed: int) -> list[Case]: ...

    def result(self, program: Callable, given: Case) -> Any: ...


@dataclass
class Trial:
    "A wrong answer and the right one, run on the same cases."

    exercise: Judged
    answer: Callable
    cases: list[Case]
    got: list[Any]
    want: list[Any]
    failing: list[int]  # the indices of the cases with a wrong result
    worst: int  # the index of the case that is shown
    seed: int
    part: int | None = None  # if there are several results, the one that is examined

    def mine(self, case: Case) -> Any:
        "The answer's result on another case."
        return self.piece(self.exercise.result(self.answer, fresh(case)))

    def right(self, case: Case) -> Any:
        "The right result on another case."
        return self.piece(self.exercise.result(self.exercise.right, fresh(case)))

    def piece(self, found: Any) -> Any:
        "The examined part of a result."
        if self.part is None or isinstance(found, Raised):
            return found
        several = parts(found)
        return several[self.part] if several and len(several) > self.part else found

    def agrees(self, change: Change, beside: Change | None = None) -> bool:
        """Whether, on changed cases, the answer returns what the right one does on the same cases,
        or on those that `beside` makes. False if a change makes the right answer fail, or makes
        its finite result infinite: two failures that agree mean nothing."""
        for i in [*self.failing, *range(len(self.cases))]:
            want = self.right((beside or change)(self.cases[i]))
            if _breaks(want, self.piece(self.want[i])):
                return False
            if not same(self.mine(change(self.cases[i])), want):
                return False
        return True

    def agrees_and_tells(self, change: Change) -> bool:
        "Whether the answer agrees on changed cases, and the right result is not 0 on all of them."
        found = [self.right(change(case)) for case in self.cases]
        tells = lambda x: (y := plain(x)) is None or bool(y.nan_to_num().any())
        return any(not isinstance(x, Raised) and tells(x) for x in found) and self.agrees(change)

    @cached_property
    def taken(self) -> list[str]:
        """The arguments that the function itself takes. A case may hold others, for the program
        that runs the function."""
        names = inspect.signature(self.exercise.right).parameters
        return [name for name in self.cases[0] if name in names]

    @cached_property
    def scalars(self) -> list[str]:
        "The names of hyperparameters: numbers that are neither bool nor in a tensor."
        return [
            name
            for name, x in self.cases[0].items()
            if isinstance(x, (int, float)) and not isinstance(x, bool) and name in self.taken
        ]

    @cached_property
    def tensors(self) -> list[str]:
        "The names of arguments that hold tensors of floats."
        return [name for name, x in self.cases[0].items() if any(map(is_float, leaves(x)))]

    @cached_property
    def masks(self) -> list[str]:
        "The names of masks."
        return [name for name, x in self.cases[0].items() if "mask" in name and is_mask(x)]

    @cached_property
    def seen(self) -> dict[str, list[float]]:
        "Every value that a hyperparameter takes in a few draws."
        more = [case for k in range(6) for case in self.exercise.draw(self.seed + 1 + k)]
        every = [*self.cases, *more]
        return {name: list(dict.fromkeys(case[name] for case in every)) for name in self.scalars}

    def candidates(self, name: str) -> list[float]:
        "Values of a hyperparameter that an answer may have instead of its name."
        if name not in self.scalars:
            return []
        if not self.exercise.any_value:
            return self.seen[name]
        whole = all(isinstance(x, int) for x in self.seen[name])
        return list(
            dict.fromkeys([1, 0, *self.seen[name]] if whole else [1.0, 0.0, *self.seen[name]])
        )

    @cached_property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        "Results and right results as tensors of the same shape, where they can be compared."
        found = []
        for got, want in zip(self.got, self.want):
            a, b = plain(self.piece(got)), plain(self.piece(want))
            if a is not None and b is not None and b.numel():
                if a.numel() == b.numel() == 1:
                    a, b = a.reshape(1), b.reshape(1)
                if a.shape == b.shape:
                    found.append((a, b))
        return found

    @property
    def comparable(self) -> bool:
        "Whether every result can be compared number by number."
        return len(self.pairs) == len(self.cases)

    def mask_of(self, i: int) -> Tensor | None:
        "The mask of a case, if it has one."
        mask = self.cases[i][self.masks[0]] if self.masks else None
        return mask if isinstance(mask, Tensor) else None

    def cleared(self, i: int, found: Any) -> Any:
        "A result with 0 on padding, if it has the shape of the mask."
        mask, x = self.mask_of(i), plain(self.piece(found))
        if mask is None or x is None or x.shape != mask.shape:
            return self.piece(found)
        return torch.where(mask, x, 0.0)


def _breaks(changed: Any, before: Any) -> bool:
    "Whether a right result fails, or is no longer finite, after a change."
    if isinstance(changed, Raised):
        return not isinstance(before, Raised)
    a, b = plain(changed), plain(before)
    if a is None or b is None or not bool(b.isfinite().all()):
        return False
    return not bool(a.isfinite().all())


def is_float(x: Any) -> bool:
    "Whether x is a tensor of floats."
    return isinstance(x, Tensor) and x.is_floating_point()


def is_mask(x: Any) -> bool:
    "Whether x is a tensor of booleans."
    return isinstance(x, Tensor) and x.dtype == torch.bool


def masks_in(case: Case) -> list[Tensor]:
    "The masks of a case: booleans beside other tensors in a list, or with that name."
    return [
        mask
        for name, x in case.items()
        for mask in filter(is_mask, leaves(x))
        if "mask" in name or x is not mask
    ]


# ---- Changes of a case ----


def put(name: str, value: Any) -> Change:
    "The case with another value of one argument."
    return lambda case: {**case, name: value}


def changed(name: str, how: Callable[[Any], Any]) -> Change:
    "The case with one argument changed."
    return lambda case: {**case, name: mapped(case[name], how)}


def finite(x: Any) -> Any:
    "x with 0.5 in the place of NaN and infinity."
    return torch.where(x.isfinite(), x, torch.full_like(x, 0.5)) if is_float(x) else x


def on_padding(case: Case, value: float) -> Case:
    """The case with `value` wherever a mask is false, in each tensor of floats that has its shape.
    With several masks, the i-th tensor goes with the i-th mask."""
    masks = masks_in(case)
    floats = [x for x in leaves(case) if is_float(x)]
    if not masks or (len(masks) > 1 and len(masks) != len(floats)):
        return case
    mask_of = {id(x): masks[i if len(masks) > 1 else 0] for i, x in enumerate(floats)}

    def fill(x: Any) -> Any:
        mask = mask_of.get(id(x))
        if mask is None or x.shape[: mask.ndim] != mask.shape:
            return x
        keep = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        return torch.where(keep, x, torch.full_like(x, value))

    return mapped(case, fill)


def without_empty_rows(case: Case) -> Case:
    "The case without the rows, and without the pairs of a list, whose mask is all false."
    case = {name: _without_empty_pairs(x) for name, x in case.items()}
    mask = next((x for x in masks_in(case) if x.ndim == 2), None)
    if mask is None or bool(mask.any(1).all()) or not bool(mask.any()):
        return case
    keep = mask.any(1)
    return {
        name: x[keep] if isinstance(x, Tensor) and x.ndim and len(x) == len(keep) else x
        for name, x in case.items()
    }


def _without_empty_pairs(x: Any) -> Any:
    if not isinstance(x, list) or not all(isinstance(y, tuple) for y in x):
        return x
    masks = lambda pair: list(filter(is_mask, leaves(pair)))
    return [y for y in x if not masks(y) or any(bool(mask.any()) for mask in masks(y))]


def easy(case: Case) -> Case:
    "The case without what is hard in it: empty rows, and numbers other than 0 on padding."
    return mapped(on_padding(without_empty_rows(case), 0.0), finite)


def on_easy_cases(t: Trial) -> Trial | None:
    "The trial on easy cases, if the answer is wrong there too."
    judged, cases = t.exercise, [easy(case) for case in t.cases]
    got = [judged.result(t.answer, fresh(c)) for c in cases]
    want = [judged.result(judged.right, fresh(c)) for c in cases]
    trial = Trial(judged, t.answer, cases, got, want, [], 0, t.seed, t.part)
    trial.failing = [
        i for i, (a, b) in enumerate(zip(got, want)) if not same(trial.piece(a), trial.piece(b))
    ]
    trial.worst = trial.failing[0] if trial.failing else 0
    return trial if trial.failing else None
