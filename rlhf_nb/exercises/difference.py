"""What is wrong with a result that no known mistake gives, in a sentence: an error, a type, a
shape, NaN, or the first place where it differs from what was wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_nb.exercises.values import Raised, numbers, parts, plain, same, show_short


def difference(got: Any, want: Any, names: Sequence[str] = ()) -> str:
    "The sentence. `names` are those of several results."
    if isinstance(got, Raised) or isinstance(want, Raised):
        return _error(got, want)
    if isinstance(want, tuple):
        several = parts(got)
        if several is None or len(several) != len(want):
            return f"Return {len(want)} results, as a tuple: you returned {_kind(got)}."
        i = next(i for i, (a, b) in enumerate(zip(several, want)) if not same(a, b))
        which = names[i] if names else f"result {i + 1} of {len(want)}"
        return f"In {which}: {difference(several[i], want[i])}"
    texts = isinstance(got, list) and any(isinstance(x, str) for x in got)
    wanted = None if isinstance(want, list) and texts else plain(want)
    if wanted is not None:
        return _numbers(got, wanted)
    if type(got) is not type(want):
        return f"You returned {_kind(got)}, and {_kind(want)} was wanted."
    if isinstance(want, list):
        return _list(got, want)
    return f"You returned {show_short(got)}, and {show_short(want)} was wanted."


def _error(got: Any, want: Any) -> str:
    if not isinstance(want, Raised):
        text = f"Your function raised {show_short(got)}"
        return text if text.endswith((".", "!", "?")) else text + "."
    does = f"it raises {_kind(got.error)}" if isinstance(got, Raised) else "it returns a result"
    return f"Your function has to raise {_kind(want.error)} here: {does}."


def _kind(x: Any) -> str:
    "What a result is, in a word or two."
    if x is None:
        return "None"
    if isinstance(x, (tuple, list)):
        return f"a {type(x).__name__} of {len(x)}"
    article = "an" if type(x).__name__[0].lower() in "aeiou" else "a"
    return f"{article} {type(x).__name__}"


def _numbers(got: Any, wanted: Tensor) -> str:
    "Where numbers are wanted."
    sort = "tensor" if wanted.ndim else "number"
    result = plain(got)
    if result is None:
        return f"Return a {sort}: you returned {_kind(got)}" + (
            ", with no return?" if got is None else "."
        )
    if result.shape != wanted.shape and not result.numel() == wanted.numel() == 1:
        what = f"is {_kind(got)} with" if isinstance(got, tuple) else "has"
        return f"The result {what} shape {list(result.shape)}, and {list(wanted.shape)} was wanted."
    result = result.reshape(wanted.shape)
    odd = ~result.isfinite() & wanted.isfinite()
    wrong = ~torch.isclose(result, wanted, atol=2e-5, rtol=2e-5, equal_nan=True)
    place = (odd if odd.any() else wrong).nonzero()[0].tolist()
    at = f" at {place}" if place else ""
    have, need = (f"{float(x[tuple(place)]):.5g}" for x in (result, wanted))
    if odd.any():
        return (
            f"Your result is {have}{at}, and {need} was wanted: look for 0 times infinity, which "
            "is NaN, and for a division by 0."
        )
    own = numbers(got)
    if own is not None and not own.is_floating_point() and not wanted.equal(wanted.round()):
        return (
            f"Your result has the type {own.dtype}, which has no fractions: you have {have}{at}, "
            f"and {need} was wanted."
        )
    if not place:
        return f"Your result is {have}, and {need} was wanted."
    count = f"{int(wrong.sum())} of {wrong.numel()} numbers are wrong, the first"
    return f"{count}{at}: you have {have}, and {need} was wanted."


def _list(got: list[Any], want: list[Any]) -> str:
    if all(isinstance(x, str) for x in [*got, *want]):
        missing, extra = ([x for x in a if x not in b] for a, b in ((want, got), (got, want)))
        if missing or extra:
            return (
                f"Missing in your list: {', '.join(missing) or 'nothing'}. "
                f"Too much: {', '.join(extra) or 'nothing'}."
            )
    if len(got) != len(want):
        return f"Your list has {len(got)} elements, and {len(want)} were wanted."
    i = next(i for i, (a, b) in enumerate(zip(got, want)) if not same(a, b))
    return f"At index {i}: {difference(got[i], want[i])}"
