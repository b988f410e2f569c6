"""Probes of a result that is the right one, transformed, scaled or moved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_nb.exercises.trial import Trial, masks_in
from rlhf_nb.exercises.values import Case, close

_TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "The sign of your result is wrong: it is minus what was wanted.": lambda x: -x,
    "Your result is the exponential of what was wanted: there is an exp too many, or a log is "
    "missing.": torch.exp,
    "Your result is the logarithm of what was wanted: there is a log too many, or an exp is "
    "missing.": torch.log,
    "Your result is the square of what was wanted: a square root is missing.": torch.square,
    "Your result is the square root of what was wanted: there is a sqrt too many, or a square is "
    "missing.": torch.sqrt,
    "Your result is 1 divided by what was wanted: the division is upside down.": torch.reciprocal,
    "Your result is 1 minus what was wanted: it is the other share, so a condition is the other "
    "way round.": lambda x: 1 - x,
    "Your result is the absolute value of what was wanted: there is an abs too many.": torch.abs,
    "Your result is 0 where a negative number was wanted: there is a clamp at 0 too many.": (
        lambda x: x.clamp(min=0)
    ),
    "Your result is 0 where a positive number was wanted: there is a clamp at 0 too many.": (
        lambda x: x.clamp(max=0)
    ),
    "Your result is rounded: keep the fraction.": torch.round,
    "Your result is cut to whole numbers: keep the fraction.": torch.trunc,
    "Your result is in bits: use the natural logarithm.": lambda x: x / math.log(2),
    "Your result is in reverse order along the last axis.": lambda x: x.flip(-1),
    "Your rows are in reverse order.": lambda x: x.flip(0),
    "Your result is a running sum of what was wanted: there is a cumsum too many.": (
        lambda x: x.cumsum(-1)
    ),
    "Your result is sorted: keep the order.": lambda x: x.sort(-1).values,
    "Your result is the other way round: it is true where false was wanted, and false where true "
    "was wanted.": lambda x: (x == 0).double(),
}


def transformed(t: Trial) -> str | None:
    "The result is a known function of what was wanted."
    if not t.comparable:
        return None
    for text, transform in _TRANSFORMS.items():
        if all(close(a, transform(b)) for a, b in t.pairs):
            return text
    return None


def scaled(t: Trial) -> str | None:
    "The result is a multiple of what was wanted, or off by a constant."
    if not t.comparable:
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
    gaps = [one for one in offsets if one is not None]
    return _offset(gaps, t) if len(gaps) == len(offsets) else None


def _offset(gaps: list[float], t: Trial) -> str | None:
    "What is added to every number, if it is one constant or a hyperparameter."
    if max(gaps) - min(gaps) < 1e-4:
        return (
            f"Your result is off by one constant, {gaps[0]:+.4g} everywhere: a number too many is "
            "added, or one is missing."
        )
    for name in t.scalars:
        for sign in (1, -1):
            if all(abs(g - sign * c[name]) < 1e-4 for g, c in zip(gaps, t.cases)):
                return (
                    f"Your result is {'larger' if sign > 0 else 'smaller'} by {name} everywhere: "
                    f"{name} is added or subtracted once too often, or not at all."
                )
    return None


def _factor(known: list[tuple[float, Case]], t: Trial) -> str | None:
    "What every number is multiplied by, if it is one constant, a hyperparameter or a count."
    first = known[0][0]
    if all(abs(f - first) <= 1e-3 * abs(first) for f, _ in known):
        if abs(first - 1) < 1e-3:
            return None
        extra = "a half is missing" if abs(first - 2) < 1e-3 else ""
        extra = "it is halved" if abs(first - 0.5) < 1e-3 else extra
        extra = "the sign is wrong too" if first < 0 else extra
        return (
            f"Your result is {first:.4g} times what was wanted in every case: a constant factor is "
            "wrong" + (f" ({extra})." if extra else ".")
        )
    for name in t.scalars:
        if all(abs(f - float(c[name])) < 1e-3 * abs(f) for f, c in known):
            return (
                f"Your result is {name} times what was wanted: you multiply by {name} once too "
                "often, or do not divide by it."
            )
        if all(c[name] and abs(f - 1 / float(c[name])) < 1e-3 * abs(f) for f, c in known):
            return f"Your result has to be multiplied by {name}: that factor is missing."
    return _of_counts(known, t)


def _of_counts(known: list[tuple[float, Case]], t: Trial) -> str | None:
    "A mean over something else, or a sum in the place of a mean."
    counts = counts_of(t.cases[0])
    near = lambda f, x: abs(f - x) < 1e-3 * abs(f)
    for what, count in counts.items():
        for sign in (1.0, -1.0):
            if all(near(f, sign * count(c)) for f, c in known):
                return (
                    "Your result is the sum where a mean is wanted: divide by the number of "
                    f"{what}."
                )
            if all(near(f, sign / count(c)) for f, c in known):
                return (
                    "Your result is the mean where a sum is wanted: do not divide by the number of "
                    f"{what}."
                )
    for what, count in counts.items():
        if all(near(f, count(c) ** 2) for f, c in known):
            return f"You multiply by the number of {what} where you have to divide by it."
        if all(abs(f * count(c) ** 2 - 1) < 1e-3 for f, c in known):
            return f"You divide by the number of {what} where you have to multiply by it."
    names = list(counts.items())
    for (what, count), (other, divisor) in [(a, b) for a in names for b in names if a is not b]:
        if all(divisor(c) and near(f, count(c) / divisor(c)) for f, c in known):
            return (
                f"You divided by the number of {other}: divide the sum by the number of {what}, "
                "for a mean over those."
            )
    return None


def counts_of(case: Case) -> dict[str, Callable[[Case], float]]:
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


def multiple(t: Trial) -> str | None:
    "The result is a multiple of what was wanted, another one in each case."
    factors = []
    for a, b in t.pairs if t.comparable else []:
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
        f"{factors[1]:.3g} times in another: you multiply or divide by the wrong number."
    )


def normalised(t: Trial) -> str | None:
    "The real tokens are those that were wanted after a mean was subtracted or a spread divided by."
    if not t.comparable or not t.masks:
        return None
    found = []
    for i, (a, b) in enumerate(t.pairs):
        mask = t.mask_of(i)
        if mask is None or mask.shape != b.shape:
            return None
        a, b = a[mask], b[mask]
        if len(b) > 1 and float(b.std()) > 1e-3:
            found.append((a, b))
    for text, how in _NORMS.items():
        for n in (1, 0):
            if found and all(close(a, how(b, n), 1e-4) for a, b in found):
                return text
    return None


_NORMS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "This is whitened: its mean is 0 and its standard deviation 1 over real tokens. It has to stay "
    "as it is.": lambda x, n: (x - x.mean()) / x.std(correction=n),
    "The mean was subtracted from this: it has to stay as it is.": lambda x, n: x - x.mean(),
    "This was divided by its standard deviation: it has to stay as it is.": (
        lambda x, n: x / x.std(correction=n)
    ),
}
