"""Probes that compare an answer with an exercise's own mistakes and traits, more loosely than the
checker does at first: on easy cases, without padding, up to a factor, or by a property."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_nb.exercises.probe_scale import counts_of
from rlhf_nb.exercises.trial import Trial
from rlhf_nb.exercises.values import Raised, attempt, fresh, plain, same


def trait(t: Trial) -> str | None:
    "Every wrong result has a property that no right one has."
    for message, holds in t.exercise.traits.items():
        seen = [attempt(holds, t.cases[i], t.got[i]) for i in t.failing]
        known = [one for one in seen if one is not None]
        wanted = [attempt(holds, case, want) for case, want in zip(t.cases, t.want)]
        if known and all(one is True for one in known) and not any(one is True for one in wanted):
            return message
    return None


def on_easy(t: Trial) -> str | None:
    """A mistake of the catalogue together with another one, such as NaN that is let in: on easy
    cases, and without what is on padding, the results are those of the known mistake."""
    if _right_on_real_tokens(t):
        return None
    mine = [t.cleared(i, x) for i, x in enumerate(t.got)]
    for message, theirs in _known(t).items():
        if all(same(a, t.cleared(i, x)) for i, (a, x) in enumerate(zip(mine, theirs))):
            return message
    return None


def _right_on_real_tokens(t: Trial) -> bool:
    return all(
        same(t.cleared(i, a), t.cleared(i, b)) for i, (a, b) in enumerate(zip(t.got, t.want))
    )


def scaled(t: Trial) -> str | None:
    "A mistake of the catalogue, multiplied by a number: a mean in the place of a sum, say."
    if _right_on_real_tokens(t):
        return None
    mine = [plain(t.cleared(i, x)) for i, x in enumerate(t.got)]
    right = [plain(t.cleared(i, x)) for i, x in enumerate(t.want)]
    for message, theirs in _known(t).items():
        of_right = [_ratio(plain(t.cleared(i, x)), right[i]) for i, x in enumerate(theirs)]
        if None not in of_right:  # then the answer is a multiple of the right one, too
            continue
        factors = [_ratio(a, plain(t.cleared(i, x))) for i, (a, x) in enumerate(zip(mine, theirs))]
        known = [(f, t.cases[i]) for i, f in enumerate(factors) if f is not None]
        if len(known) < len(factors):
            continue
        counts = [lambda c: 1.0, *counts_of(t.cases[0]).values()]
        free = min((x.numel() for x in mine if x is not None), default=0) > 3
        if free or any(
            all(
                abs(f - known[0][0] * (count(c) / count(known[0][1])) ** power) < 1e-3 * abs(f)
                for f, c in known
            )
            for count in counts
            for power in (1, -1)
        ):
            return f"{message} (Your numbers are those of this mistake but for a factor.)"
    return None


def _known(t: Trial) -> dict[str, list[Any]]:
    "What the programs of the catalogue return on these cases, where they return something."
    found = {}
    for message in t.exercise.mistakes:
        program = t.exercise.wrong(message)
        results = [t.exercise.result(program, fresh(case)) for case in t.cases]
        if not any(isinstance(one, Raised) for one in results):
            found[message] = results
    return found


def _ratio(a: Tensor | None, b: Tensor | None) -> float | None:
    "The factor between two tensors of the same shape, if it is one, and not 0."
    if a is None or b is None or a.shape != b.shape:
        return None
    real = b.abs() > 1e-4
    if not bool(real.any()) or bool((a[~real].abs() > 1e-4).any()):
        return None
    ratio = a[real] / b[real]
    one = bool(torch.isfinite(ratio).all()) and bool(
        (ratio - ratio[0]).abs().max() < 1e-3 * ratio[0].abs()
    )
    return float(ratio[0]) if one else None
