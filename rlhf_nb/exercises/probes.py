"""What is wrong with an answer that is no known mistake, found out by properties.

Each probe changes something in the cases, runs the answer and the right one again, and names the
mistake if the two then agree, or if only one of them notices. The first probe that finds something
is what the reader is told.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf_nb.exercises.values import (
    Case,
    Raised,
    close,
    fresh,
    leaves,
    mapped,
    parts,
    plain,
    same,
    shown,
)

Change = Callable[[Case], Case]


class Judged(Protocol):
    "What a probe needs of an exercise."

    @property
    def right(self) -> Callable: ...

    @property
    def results(self) -> tuple[str, ...]: ...

    @property
    def any_value(self) -> bool: ...

    def draw(self, seed: int) -> list[Case]: ...

    def result(self, program: Callable, given: Case) -> Any: ...


@dataclass
class Trial:
    "A wrong answer beside the right one, on the cases where it was seen."

    exercise: Judged
    answer: Callable
    cases: list[Case]
    got: list[Any]
    want: list[Any]
    failing: list[int]  # the indices of cases with another result
    worst: int  # the one that is shown
    seed: int
    part: int | None = None  # of several results, the one that is looked at
    _right: dict[Any, Any] = field(default_factory=dict)

    def mine(self, case: Case) -> Any:
        return self.piece(self.exercise.result(self.answer, fresh(case)))

    def right(self, case: Case) -> Any:
        return self.piece(self.exercise.result(self.exercise.right, fresh(case)))

    def piece(self, found: Any) -> Any:
        if self.part is None or isinstance(found, Raised):
            return found
        several = parts(found)
        return several[self.part] if several and len(several) > self.part else found

    def agrees(self, change: Change, beside: Change | None = None) -> bool:
        """Whether the answer on changed cases is what the right one is on the same cases, or on
        those that `beside` makes."""
        order = [self.cases[i] for i in self.failing] + self.cases
        return all(
            same(self.mine(change(case)), self.right((beside or change)(case))) for case in order
        )

    def agrees_and_says(self, change: Change) -> bool:
        "Whether the answer agrees on changed cases, and the right one is not 0 on all of them."
        found = [self.right(change(case)) for case in self.cases]
        says = lambda x: (y := plain(x)) is None or bool(y.nan_to_num().any())
        return any(not isinstance(x, Raised) and says(x) for x in found) and self.agrees(change)

    @cached_property
    def taken(self) -> list[str]:
        "The arguments that the function itself takes: some exercises run it in a program."
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
        return [name for name, x in self.cases[0].items() if any(map(_is_float, leaves(x)))]

    @cached_property
    def masks(self) -> list[str]:
        return [name for name, x in self.cases[0].items() if "mask" in name and _is_mask(x)]

    @cached_property
    def seen(self) -> dict[str, list[float]]:
        "Every value that a hyperparameter takes in a few draws."
        more = [case for k in range(6) for case in self.exercise.draw(self.seed + 1 + k)]
        every = [*self.cases, *more]
        return {name: list(dict.fromkeys(case[name] for case in every)) for name in self.scalars}

    @cached_property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        "The result and what was wanted, as tensors of one shape, where they can be compared."
        found = []
        for got, want in zip(self.got, self.want):
            a, b = plain(self.piece(got)), plain(self.piece(want))
            if a is not None and b is not None and b.numel():
                if a.numel() == b.numel() == 1:
                    a, b = a.reshape(1), b.reshape(1)
                if a.shape == b.shape:
                    found.append((a, b))
        return found


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool


def masks_in(case: Case) -> list[Tensor]:
    "The masks of a case: booleans beside other tensors in a list, or with that name."
    return [
        mask
        for name, x in case.items()
        for mask in filter(_is_mask, leaves(x))
        if "mask" in name or x is not mask
    ]


def put(name: str, value: Any) -> Change:
    "The case with another value of one argument."
    return lambda case: {**case, name: value}


def changed(name: str, how: Callable[[Any], Any]) -> Change:
    "The case with one argument changed."
    return lambda case: {**case, name: mapped(case[name], how)}


def on_padding(case: Case, value: float) -> Case:
    """The case with `value` wherever a mask is false in a tensor of floats of its shape. Each
    tensor goes with the only mask, or with the mask of its own index."""
    masks = masks_in(case)
    floats = [x for x in leaves(case) if _is_float(x)]
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
    "The case without the rows whose mask is all false."
    mask = next((x for x in masks_in(case) if x.ndim == 2), None)
    if mask is None or bool(mask.any(1).all()) or not bool(mask.any()):
        return case
    keep = mask.any(1)
    return {
        name: x[keep] if isinstance(x, Tensor) and x.ndim and len(x) == len(keep) else x
        for name, x in case.items()
    }


# ---- The probes: each returns a sentence, or nothing ----


def _signature(t: Trial) -> str | None:
    found = t.got[t.worst]
    if not isinstance(found, Raised):
        return None
    names = list(inspect.signature(t.exercise.right).parameters)
    try:
        inspect.signature(t.answer).bind(*names)
    except TypeError:
        return f"Your function has to take {len(names)} arguments: {', '.join(names)}."
    except ValueError:
        pass
    wanted = t.want[t.worst]
    if isinstance(wanted, Raised):
        return (
            f"An error was wanted here, a {type(wanted.error).__name__}: yours is a "
            f"{type(found.error).__name__}."
        )
    return f"It raised {shown(found)}" + _where_it_fails(t)


def _where_it_fails(t: Trial) -> str:
    if not any(isinstance(t.mine(without_empty_rows(c)), Raised) for c in t.cases):
        return " That comes from the row without a real token."
    return ""


def _kind(t: Trial) -> str | None:
    got, want = t.got[t.worst], t.want[t.worst]
    if isinstance(want, Raised):
        return f"An error was wanted here, a {type(want.error).__name__}, and a result came."
    if inspect.isgenerator(got):
        return "It returned a generator: return the values themselves, without yield."
    if got is None:
        return f"It returned None, and a {_sort(want)} was wanted: is a return missing?"
    if isinstance(want, (tuple, dict)) or plain(want) is None:
        count = len(want) if isinstance(want, (tuple, list, dict)) else None
        several = parts(got)
        if isinstance(want, tuple) and (several is None or len(several) != count):
            return f"Return {count} results, as a tuple."
        if isinstance(want, list) and several is None:
            return f"Return a list: a {type(got).__name__} came."
        if isinstance(want, dict) and not isinstance(got, dict):
            return f"Return a dict: a {type(got).__name__} came."
        if isinstance(want, str) and not isinstance(got, str):
            return f"Return a string: a {type(got).__name__} came."
    elif plain(got) is None and not (isinstance(want, list) and isinstance(got, (list, tuple))):
        return f"Return a tensor or a number: a {type(got).__name__} came."
    return None


def _sort(want: Any) -> str:
    return "number" if isinstance(want, (int, float)) else type(want).__name__.lower()


def _chance(t: Trial) -> str | None:
    if not same(t.exercise.result(t.answer, fresh(t.cases[t.worst])), t.got[t.worst]):
        return (
            "Your function gives another result each time: it depends on chance, or on a variable "
            "that it keeps."
        )
    return None


def _shape(t: Trial) -> str | None:
    for i in t.failing:
        if isinstance(t.piece(t.want[i]), list):
            return None
        a, b = plain(t.piece(t.got[i])), plain(t.piece(t.want[i]))
        if a is None or b is None or a.shape == b.shape or a.numel() == b.numel() == 1:
            continue
        text = f"The result has shape {list(a.shape)}, and {list(b.shape)} was wanted"
        if a.numel() == b.numel():
            if close(a.reshape(b.shape), b):
                return (
                    f"{text}: the numbers are right, but an axis is too many or too few (squeeze "
                    "or keepdim)."
                )
            if a.ndim == 2 and close(a.T.reshape(b.shape), b):
                return f"{text}: rows and columns are exchanged."
        if a.ndim > b.ndim:
            for dim in range(a.ndim):
                for how, what in ((a.sum, "sum"), (a.mean, "mean")):
                    if close(how(dim), b):
                        return f"{text}: take the {what} over dim {dim}, which is missing."
            if b.numel() == 1 and close(a.sum(), b):
                return f"{text}: the sum is missing."
            if b.numel() == 1 and close(a.nanmean(), b):
                return f"{text}: the mean is missing."
        if a.ndim < b.ndim:
            return f"{text}: you took a sum, mean or maximum over an axis that has to stay."
        return f"{text}."
    return None


def _not_finite(t: Trial) -> str | None:
    def odd(change: Change) -> bool:
        for case in t.cases:
            a, b = plain(t.mine(change(case))), plain(t.right(change(case)))
            if a is None or b is None or a.shape != b.shape:
                continue
            if bool((a.isnan() & ~b.isnan()).any() or (a.isinf() & ~b.isinf()).any()):
                return True
        return False

    wanted = [plain(t.piece(x)) for x in t.want]
    if any(x is not None and bool(x.isinf().any()) for x in wanted) or not odd(lambda c: c):
        return None
    if not odd(lambda c: on_padding(c, 0.5)):
        return (
            "NaN or infinity on the padding gets into your result: 0 times infinity is NaN, so "
            "choose by the mask (torch.where), do not multiply by it, and do it first."
        )
    if not odd(without_empty_rows):
        return (
            "A row without a real token gives NaN: 0 divided by 0. Keep the count at 1 or more, or "
            "choose the rows that have tokens."
        )
    for name in t.scalars:
        for value in _candidates(t, name):
            if not odd(put(name, value)):
                return (
                    f"Your result is NaN or infinite, unless {name} = {value:g}: look at what "
                    f"{name} does there."
                )
    for name in t.tensors:
        if not odd(changed(name, _finite)):
            return (
                f"NaN or infinity in {name} gets into your result, where a finite number is wanted."
            )
    return (
        "Your result is NaN or infinite where a finite number is wanted: a division by 0, or the "
        "log of 0."
    )


def _finite(x: Any) -> Any:
    return torch.where(x.isfinite(), x, torch.full_like(x, 0.5)) if _is_float(x) else x


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


def _ignored(t: Trial) -> str | None:
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
        for value in _candidates(t, name):
            if all(same(t.piece(g), t.right({**c, name: value})) for c, g in zip(t.cases, t.got)):
                return (
                    f"{name} makes no difference: your result is always that of "
                    f"{name} = {value:g}, "
                    f"so a constant is written where {name} belongs"
                    + (f", or {name} is missing." if value in (0, 1) else ".")
                )
    text = " and ".join(silent)
    return (
        f"{text} {'make' if len(silent) > 1 else 'makes'} no difference to your result: a change "
        f"of {text} has to change it."
    )


def _others(t: Trial, name: str) -> Iterator[Change]:
    "Changes of one argument alone."
    first = t.cases[0][name]
    if name in t.scalars:
        for value in t.seen[name][:6]:
            yield put(name, value)
    elif isinstance(first, bool):
        yield lambda case: {**case, name: not case[name]}
    elif any(map(_is_mask, leaves(first))):
        yield changed(name, lambda x: torch.ones_like(x) if _is_mask(x) else x)
        yield changed(name, lambda x: torch.zeros_like(x) if _is_mask(x) else x)
        yield changed(name, lambda x: x.roll(1, -1) if _is_mask(x) else x)
    elif any(map(_is_float, leaves(first))):
        yield changed(name, lambda x: 2 * x + 0.3 if _is_float(x) else x)
        yield changed(name, lambda x: x.roll(1, 0) if _is_float(x) and x.ndim else x)
    elif any(isinstance(x, Tensor) for x in leaves(first)):
        yield changed(name, lambda x: x.roll(1, -1) if isinstance(x, Tensor) and x.ndim else x)
        yield changed(name, lambda x: x.flip(0) if isinstance(x, Tensor) and x.ndim else x)
    elif isinstance(first, (str, list, tuple)):
        for other in {repr(c[name]): c[name] for c in t.cases}.values():
            yield put(name, other)


def _candidates(t: Trial, name: str) -> list[float]:
    if name not in t.scalars:
        return []
    if not t.exercise.any_value:
        return t.seen[name]
    whole = all(isinstance(x, int) for x in t.seen[name])
    return list(dict.fromkeys([1, 0, *t.seen[name]] if whole else [1.0, 0.0, *t.seen[name]]))


def _swapped(t: Trial) -> str | None:
    for one, two in combinations(t.taken, 2):
        swap = lambda case: {**case, one: case[two], two: case[one]}  # noqa: B023
        if any(_alike(c[one], c[two]) for c in t.cases) and t.agrees(lambda c: c, swap):
            return f"{one} and {two} are swapped: your result is right where they change places."
    return None


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape
    return type(a) is type(b)


_TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "The sign of your result is turned: it is minus what was wanted.": lambda x: -x,
    "Your result is the exponential of what was wanted: exp is too much, or log is "
    "missing.": torch.exp,
    "Your result is the logarithm of what was wanted: log is too much, or exp is "
    "missing.": torch.log,
    "Your result is the square of what was wanted: its root is missing.": torch.square,
    "Your result is the root of what was wanted: a sqrt too much, or a square is "
    "missing.": torch.sqrt,
    "Your result is 1 divided by what was wanted: the division is upside down.": torch.reciprocal,
    "Your result is 1 minus what was wanted: the other share, so a condition is turned "
    "round.": lambda x: 1 - x,
    "Your result is what was wanted without its sign: an absolute value too much.": torch.abs,
    "Your result has 0 where a negative number was wanted: a clamp at 0 too much.": lambda x: (
        x.clamp(min=0)
    ),
    "Your result has 0 where a positive number was wanted: a clamp at 0 too much.": lambda x: (
        x.clamp(max=0)
    ),
    "Your result is rounded: keep the fraction.": torch.round,
    "Your result is cut to whole numbers: keep the fraction.": torch.trunc,
    "Your result is in bits: use the natural logarithm.": lambda x: x / math.log(2),
    "Your result runs backwards: the order along the last axis is turned round.": lambda x: x.flip(
        -1
    ),
    "Your rows are in reverse order.": lambda x: x.flip(0),
    "Your result is a running sum of what was wanted: a cumsum too much.": lambda x: x.cumsum(-1),
    "Your result is sorted: keep the order.": lambda x: x.sort(-1).values,
    "Your result is turned round: true where false was wanted, and false where true was "
    "wanted.": lambda x: (x == 0).double(),
}


def _transformed(t: Trial) -> str | None:
    if not _whole(t):
        return None
    for text, transform in _TRANSFORMS.items():
        if all(close(a, transform(b)) for a, b in t.pairs):
            return text
    return None


def _whole(t: Trial) -> bool:
    "Whether every result can be compared number by number."
    return len(t.pairs) == len(t.cases)


def _scaled(t: Trial) -> str | None:
    "The result is a multiple of what was wanted, or off by a constant."
    if not _whole(t):
        return None
    factors, offsets = [], []
    for a, b in t.pairs:
        real = b.abs() > 1e-4
        ratio = a[real] / b[real]
        uniform = ratio.numel() and bool(a[~real].abs().le(1e-4).all())
        uniform = uniform and bool((ratio - ratio[0]).abs().le(1e-4 * ratio[0].abs() + 1e-7).all())
        factors.append(float(ratio[0]) if uniform else None if real.any() else math.nan)
        gap = (a - b).reshape(-1)
        offsets.append(float(gap[0]) if bool((gap - gap[0]).abs().le(1e-4).all()) else None)
    known = [(f, c) for f, c in zip(factors, t.cases) if f is None or not math.isnan(f)]
    uniform_in = [(f, c) for f, c in known if f is not None]
    if uniform_in and len(uniform_in) == len(known) and (text := _factor(uniform_in, t)):
        return text
    if all(one is not None for one in offsets):
        gaps = [one for one in offsets if one is not None]
        if max(gaps) - min(gaps) < 1e-4:
            return (
                f"Your result is off by one constant: {gaps[0]:+.4g} everywhere. A number is added "
                "too much, or one is missing."
            )
        for name in t.scalars:
            for sign in (1, -1):
                if all(abs(g - sign * c[name]) < 1e-4 for g, c in zip(gaps, t.cases)):
                    return (
                        f"Your result is {'larger' if sign > 0 else 'smaller'} by {name} "
                        f"everywhere: {name} is added or subtracted once too often, or not at all."
                    )
    return None


def _factor(known: list[tuple[float, Case]], t: Trial) -> str | None:
    first = known[0][0]
    if all(abs(f - first) <= 1e-3 * abs(first) for f, _ in known):
        if abs(first - 1) < 1e-3:
            return None
        extra = "the half is missing" if abs(first - 2) < 1e-3 else ""
        extra = "it is halved" if abs(first - 0.5) < 1e-3 else extra
        extra = "the sign is turned too" if first < 0 else extra
        return (
            f"Your result is {first:.4g} times what was wanted, in every case: a constant "
            "factor is wrong" + (f" ({extra})." if extra else ".")
        )
    for name in t.scalars:
        for power, text in ((1, "once too often, or not divided by"), (-1, "missing as a factor")):
            if all(c[name] and abs(f - float(c[name]) ** power) < 1e-3 * abs(f) for f, c in known):
                return (
                    f"Your result is {'' if power > 0 else '1 / '}{name} times what was wanted: "
                    f"{name} is {text}."
                )
    for what, count in _counts(t.cases[0]).items():
        for power in (1, -1):
            for off in (1.0, -1.0):
                if all(abs(f - off * count(c) ** power) < 1e-3 * abs(f) for f, c in known):
                    if power > 0:
                        return (
                            "Your result is the sum where a mean is wanted: divide by the number "
                            f"of {what}."
                        )
                    return (
                        "Your result is the mean where a sum is wanted: do not divide by the "
                        f"number of {what}."
                    )
    for what, count in _counts(t.cases[0]).items():
        if all(abs(f - count(c) ** 2) < 1e-3 * abs(f) for f, c in known):
            return f"You multiply by the number of {what} where you have to divide by it."
        if all(abs(f * count(c) ** 2 - 1) < 1e-3 for f, c in known):
            return f"You divide by the number of {what} where you have to multiply by it."
    names = list(_counts(t.cases[0]).items())
    for (what, count), (other, divisor) in [(a, b) for a in names for b in names if a is not b]:
        if all(divisor(c) and abs(f - count(c) / divisor(c)) < 1e-3 * abs(f) for f, c in known):
            return (
                f"You divided by the number of {other}: divide the sum by the number of {what}. "
                "The mean is over those."
            )
    return None


def _multiple(t: Trial) -> str | None:
    "The result is a multiple of what was wanted, another one in each case."
    factors = []
    for a, b in t.pairs if _whole(t) else []:
        real = b.abs() > 1e-3
        if int(real.sum()) > 1 and not bool(a[~real].abs().gt(1e-3).any()):
            ratio = a[real] / b[real]
            if bool((ratio - ratio[0]).abs().le(1e-3 * ratio[0].abs()).all()):
                factors.append(float(ratio[0]))
                continue
        return None
    if len(factors) < 2:
        return None
    return (
        f"Your result is {factors[0]:.3g} times what was wanted in one case and "
        f"{factors[1]:.3g} times in "
        "another: what you multiply or divide by is wrong."
    )


def _counts(case: Case) -> dict[str, Callable[[Case], float]]:
    "What a mean may be over."

    def over(f: Callable[[Tensor], float], least: float = 1.0) -> Callable[[Case], float]:
        return lambda c: max(sum(float(f(m)) for m in masks_in(c)), least)

    def of(name: str, f: Callable[[Any], float]) -> Callable[[Case], float]:
        return lambda c: float(f(c[name]))

    if masks_in(case):
        return {
            "real tokens": over(lambda m: float(m.sum())),
            "all columns, padding included": over(Tensor.numel),
            "rows": over(len),
            "rows with a real token": over(lambda m: float(m.any(-1).sum())),
            "real tokens less 1": lambda c: max(over(lambda m: float(m.sum()))(c) - 1, 1.0),
            "masks": over(lambda m: 1.0),
        }
    size = lambda x: x.numel() if isinstance(x, Tensor) else len(x)
    found: dict[str, Callable[[Case], float]] = {}
    for name, x in case.items():
        if isinstance(x, (Tensor, list, tuple)):
            found[f"elements of {name}"] = of(name, size)
            found[f"elements of {name} less 1"] = of(name, lambda x: size(x) - 1)
        if isinstance(x, Tensor) and x.ndim > 1:
            found[f"rows of {name}"] = of(name, len)
            found[f"columns of {name}"] = of(name, lambda x: x.shape[-1])
    return found


def _constant(t: Trial) -> str | None:
    "Right at one value of a hyperparameter, and wrong at the others."
    for name in t.scalars:
        for value in _candidates(t, name):
            if value == 0 or not t.agrees(put(name, value)):
                continue
            if value == 1:
                return (
                    f"Right only where {name} = 1: somewhere {name} is missing, or it is "
                    "multiplied or "
                    "divided by once too often."
                )
            return (
                f"Right only where {name} = {value:g}: that constant is written where {name} "
                "belongs."
            )
    return None


def _sign_of_argument(t: Trial) -> str | None:
    for name in [*t.tensors, *(t.scalars if t.exercise.any_value else [])]:
        negate = changed(name, lambda x: -x if _is_float(x) or isinstance(x, (int, float)) else x)
        if t.agrees(lambda c: c, negate):
            return (
                f"The sign of {name} is turned: where it is added it has to be subtracted, or the "
                "other way round."
            )
    return None


def _padding(t: Trial) -> str | None:
    "What is on the padding changes the result."
    if not any(map(masks_in, t.cases)):
        return None
    leaks = only_padding = False
    for case in t.cases:
        one, two = on_padding(case, 0.5), on_padding(case, -1.75)
        if not same(t.right(one), t.right(two)):
            continue
        a, b = t.mine(one), t.mine(two)
        if same(a, b):
            continue
        x, y = plain(a), plain(b)
        mask = case[t.masks[0]] if t.masks else None
        if not isinstance(mask, Tensor) or x is None or y is None or x.shape != mask.shape:
            leaks = True
        elif close(torch.where(mask, x, 0.0), torch.where(mask, y, 0.0)):
            only_padding = True
        else:
            leaks = True
    if leaks:
        return (
            "Padding leaks into your result: it changes with what is on the padding. Choose by the "
            "mask before you add up, shift or multiply."
        )
    if only_padding:
        return "The padding is not 0 in your result: clear it at the end, by the mask."
    if t.agrees(lambda c: on_padding(c, 0.0)):
        return "Right only where the padding holds 0: the mask is missing somewhere."
    return None


def _first_row(t: Trial) -> str | None:
    rows = [(a, b) for a, b in t.pairs if b.ndim and len(b) > 1]
    if rows and len(rows) == len(t.cases) and all(close(a[:1], b[:1]) for a, b in rows):
        return "Only the first row is right: the others need the same, each with its own numbers."
    return None


def _shifted(t: Trial) -> str | None:
    wide = [(a, b) for a, b in t.pairs if b.ndim and b.shape[-1] > 2]
    if not _whole(t) or not wide:
        return None
    for step, text in ((1, "right"), (-1, "left")):
        if all(
            close(a[..., 1:], b[..., :-1]) if step > 0 else close(a[..., :-1], b[..., 1:])
            for a, b in wide
        ):
            return f"Your result is shifted by one column to the {text}: an index is off by one."
    return None


def _neutral(t: Trial) -> str | None:
    "Right where one argument holds one number alone: the mistake is in what is done with it."
    for name in t.scalars if t.exercise.any_value else []:
        if t.agrees_and_says(put(name, 0)):
            return f"Right only where {name} = 0: the mistake is in what you do with {name}."
    for name in t.tensors:
        zero = changed(name, lambda x: torch.zeros_like(x) if _is_float(x) else x)
        if t.agrees_and_says(zero):
            return f"Right only where {name} is 0: the mistake is in what you do with {name}."
    for name in t.tensors:
        if t.agrees(changed(name, lambda x: torch.ones_like(x) if _is_float(x) else x)):
            return (
                f"Right only where {name} is the same everywhere: the mistake is which "
                f"element of {name} you "
                "take, or how you average."
            )
    if t.masks:
        whole = changed(t.masks[0], lambda x: torch.ones_like(x) if _is_mask(x) else x)
        if t.agrees(lambda c: on_padding(whole(c), 0.5)):
            return (
                "Right where no token is padding, wrong with padding: look at the mask, at short "
                "rows, and at what follows the last real token."
            )
    if t.agrees(without_empty_rows):
        return (
            "Wrong only with a row that has no real token: an all-padding row counts for nothing."
        )
    return None


def _place(t: Trial) -> str | None:
    "Which elements are wrong, if that says something."
    cells = []
    for i, (a, b) in enumerate(t.pairs if _whole(t) else []):
        mask = t.cases[i][t.masks[0]] if t.masks else None
        wrong = ~torch.isclose(a, b, atol=2e-5, rtol=2e-5, equal_nan=True)
        if wrong.any():
            cells.append((wrong, mask if isinstance(mask, Tensor) else None, b))
    if not cells or any(wrong.ndim != 2 for wrong, _, _ in cells):
        return _place_in_a_vector([wrong for wrong, _, _ in cells])

    def only(where: Callable[[Tensor, Tensor], Tensor]) -> bool:
        return all(
            m is not None and m.shape == w.shape and not bool((w & ~where(w, m)).any())
            for w, m, _ in cells
        )

    if only(lambda w, m: ~m):
        return "The padding is wrong in your result: it has to be 0 there, by the mask."
    if only(lambda w, m: m & (m.flip(1).cumsum(1).flip(1) == 1)):
        return "Only the last real token of a row is wrong: look at what follows it."
    if only(lambda w, m: m & (m.cumsum(1) == 1)):
        return "Only the first real token of a row is wrong: look at what is before it."
    column = lambda k: all(not bool((w & ~_column(w, k)).any()) for w, _, _ in cells)
    if column(-1):
        return "Only the last column is wrong: look at the end, where nothing follows."
    if column(0):
        return "Only the first column is wrong: look at the beginning."
    if all(not bool(w[:, -1].any()) for w, _, _ in cells):
        return (
            "The last column is right and those before it are not: look at what is passed back, "
            "or at an index that is off by one."
        )
    return None


def _column(x: Tensor, k: int) -> Tensor:
    found = torch.zeros_like(x)
    found[:, k] = True
    return found


def _cells(t: Trial) -> Iterator[tuple[bool, dict[str, Tensor]]]:
    """For each element of the result whether it is wrong, and the numbers of the arguments there.
    If the result is one number over a mask, each token is looked at by itself."""
    for case, got, want in zip(t.cases, t.got, t.want):
        a, b = plain(t.piece(got)), plain(t.piece(want))
        if a is None or b is None or a.shape != b.shape:
            continue
        mask = case[t.masks[0]] if t.masks and isinstance(case[t.masks[0]], Tensor) else None
        if b.numel() > 1:
            wrong = ~torch.isclose(a, b, atol=2e-5, rtol=2e-5, equal_nan=True)
            if mask is not None and mask.shape == wrong.shape:
                places = mask.nonzero().tolist()
            else:
                places = (wrong == wrong).nonzero().tolist()
            is_wrong = lambda place: bool(wrong[tuple(place)])  # noqa: B023
            shape = wrong.shape
        elif mask is not None and mask.ndim == 2:
            places, shape = mask.nonzero().tolist(), mask.shape

            def is_wrong(place: list[int], case: Case = case, mask: Tensor = mask) -> bool:
                only = torch.zeros_like(mask)
                only[tuple(place)] = True
                single = {**case, t.masks[0]: only}
                return not same(t.mine(single), t.right(single))
        else:
            continue
        beside = {
            name: x
            for name, x in case.items()
            if isinstance(x, Tensor) and x.shape == shape and name not in t.masks[:1]
        }
        for place in places:
            yield is_wrong(place), {name: x[tuple(place)] for name, x in beside.items()}


def _region(t: Trial) -> str | None:
    "What the arguments have in common where the result is wrong."
    cells = list(_cells(t))
    wrong = [at for bad, at in cells if bad]
    fine = [at for bad, at in cells if not bad]
    if len(wrong) < 2 or len(fine) < 2 or not wrong[0]:
        return None
    tests: dict[str, Callable[[dict[str, Tensor]], bool]] = {}

    def add(text: str, one: str, two: str, test: Callable[[Tensor, Tensor], Tensor]) -> None:
        tests[text] = lambda at: bool(test(at[one], at[two]))

    for name, x in wrong[0].items():
        if x.dtype == torch.bool:
            add(f"{name} is true", name, name, lambda x, _: x)
            add(f"{name} is false", name, name, lambda x, _: ~x)
        else:
            add(f"{name} is positive", name, name, lambda x, _: x > 0)
            add(f"{name} is negative", name, name, lambda x, _: x < 0)
    for one, two in combinations([n for n, x in wrong[0].items() if _is_float(x)], 2):
        add(f"{one} is larger than {two}", one, two, torch.gt)
        add(f"{one} is smaller than {two}", one, two, torch.lt)
    single = [(text, (test,)) for text, test in tests.items()]
    double = [(f"{a} and {b}", (f, g)) for (a, f), (b, g) in combinations(tests.items(), 2)]
    for text, each in [*single, *double]:
        if all(test(at) for test in each for at in wrong):
            elsewhere = sum(all(test(at) for test in each) for at in fine)
            if elsewhere <= 0.7 * len(fine):
                return f"Wrong only where {text}."
    return None


def _place_in_a_vector(cells: list[Tensor]) -> str | None:
    if not cells or any(w.ndim != 1 or len(w) < 2 for w in cells):
        return None
    if all(int(w.sum()) == 1 and bool(w[-1]) for w in cells):
        return "Only the last number is wrong: an index is off by one, or the end is left out."
    if all(int(w.sum()) == 1 and bool(w[0]) for w in cells):
        return (
            "Only the first number is wrong: an index is off by one, or the beginning is left out."
        )
    return None


def _by_comparison(t: Trial) -> str | None:
    "Too large or too small throughout."
    if not t.pairs or not _whole(t):
        return None
    gap = torch.cat([(a - b).reshape(-1) for a, b in t.pairs]).nan_to_num()
    wrong = gap.abs() > 2e-5
    if len(t.failing) > 1 or int(wrong.sum()) > 2:
        if bool((gap[wrong] > 0).all()):
            return (
                "Your result is too large wherever it is wrong: something is added or not "
                "subtracted, or a maximum, bound or condition is wrong."
            )
        if bool((gap[wrong] < 0).all()):
            return (
                "Your result is too small wherever it is wrong: something is subtracted or not "
                "added, or a minimum, bound or condition is wrong."
            )
    return None


def _listed(t: Trial) -> str | None:
    "What is missing in a list, or too much."
    missing, extra = set(), set()
    for i in t.failing:
        got, want = t.piece(t.got[i]), t.piece(t.want[i])
        if not isinstance(want, list) or not isinstance(got, (list, tuple)):
            return None
        if want and not all(isinstance(x, str) for x in want):
            return f"Your list has {len(got)} elements where {len(want)} were wanted: " + (
                "something is left out."
                if len(got) < len(want)
                else "something is in it twice or too much."
                if len(got) > len(want)
                else "their order, or which ones are taken, is wrong."
            )
        names = [x for x in got if isinstance(x, str)]
        missing |= {x for x in want if x not in names}
        extra |= {x for x in names if x not in want}
    if len(missing | extra) == 1:
        name = next(iter(missing | extra))
        said = (
            "is missing where it belongs, so its bound is too far off"
            if not extra
            else "is there where it does not belong, so its bound is too near"
            if not missing
            else "is there where it does not belong, and missing where it does"
        )
        return (
            f"Only {name!r} is wrong in your lists: it {said}, its condition is another one, or it "
            "is taken from the wrong place (an index) of the log."
        )
    if missing or extra:
        return (
            f"Missing in your lists: {', '.join(sorted(missing)) or 'nothing'}. Too much: "
            f"{', '.join(sorted(extra)) or 'nothing'}."
        )
    return "Your lists hold what they should, in another order." if t.failing else None


def _plainly(t: Trial) -> str:
    "Where the results differ first, for want of a name."
    a, b = plain(t.piece(t.got[t.worst])), plain(t.piece(t.want[t.worst]))
    if a is None or b is None or a.shape != b.shape:
        return "Your result is not what was wanted, for these inputs."
    if not b.ndim:
        return f"Your result is {float(a):.5g}, and {float(b):.5g} was wanted, for these inputs."
    wrong = ~torch.isclose(a, b, atol=2e-5, rtol=2e-5, equal_nan=True)
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} numbers are wrong. At {list(place)} you have "
        f"{float(a[place]):.5g}, and {float(b[place]):.5g} was wanted."
    )


def _tame(case: Case) -> Case:
    "The case without what is hard in it: rows without a token, and numbers on the padding."
    easy = on_padding(without_empty_rows(case), 0.0)
    return mapped(easy, _finite)


def _tamed(t: Trial) -> Trial | None:
    "The trial on easy cases, if the answer is wrong there too."
    judged, cases = t.exercise, [_tame(case) for case in t.cases]
    got = [judged.result(t.answer, fresh(c)) for c in cases]
    want = [judged.result(judged.right, fresh(c)) for c in cases]
    easy = Trial(judged, t.answer, cases, got, want, [], 0, t.seed, t.part)
    easy.failing = [
        i for i, (a, b) in enumerate(zip(got, want)) if not same(easy.piece(a), easy.piece(b))
    ]
    easy.worst = easy.failing[0] if easy.failing else 0
    return easy if easy.failing else None


FIRST = (_signature, _kind, _chance)
ON_HARD_CASES = (_shape, _not_finite, _place, _padding, _neutral)  # where easy ones are right
ON_EASY_CASES = (
    _shape,
    _not_finite,
    _swapped,
    _ignored,
    _transformed,
    _sign_of_argument,
    _scaled,
    _constant,
    _multiple,
    _shifted,
    _place,
    _first_row,
    _neutral,
    _padding,
    _region,
    _listed,
    _by_comparison,
)


def name(t: Trial) -> str:
    "The name of the mistake, or plainly what differs."
    for probe in FIRST:
        if text := probe(t):
            return text
    which = ""
    want = t.want[t.worst]
    if isinstance(want, tuple):
        several = parts(t.got[t.worst]) or []
        wrong = [i for i, (a, b) in enumerate(zip(several, want)) if not same(a, b)]
        t.part = wrong[0] if wrong else None
        names = t.exercise.results or [f"result {i + 1} of {len(want)}" for i in range(len(want))]
        which = f"In {names[wrong[0]]}: " if wrong else ""
    tamed = _tamed(t)
    for probe in ON_EASY_CASES if tamed else ON_HARD_CASES:
        if text := probe(tamed or t):
            return which + text
    return which + _plainly(t)
