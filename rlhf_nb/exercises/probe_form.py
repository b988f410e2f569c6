"""Probes of the form of a result: its arguments, its type, its shape, and whether it is finite."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import Tensor

from rlhf_nb.exercises.trial import (
    Change,
    Trial,
    changed,
    finite,
    is_float,
    masks_in,
    on_padding,
    put,
    without_empty_rows,
)
from rlhf_nb.exercises.values import Raised, close, fresh, leaves, parts, plain, same, shown

UNPACK = (
    "one of the functions that you call returns several results. Unpack them: "
    "first, second = function(...)."
)
MEANING = {  # what an error of torch or Python usually means here
    r"tuple": f"You use a tuple as a tensor: {UNPACK}",
    r"NoneType": "Something that you use is None: a function without a return, or an assignment "
    "of what works in place.",
    r"size of tensor .* must match|shape mismatch|broadcast": "Two tensors have shapes that do "
    "not fit together: print both. Does one need an axis more, as in x[:, None]?",
    r"out of bounds|out of range": "An index is larger than its axis.",
    r"does not require grad": "What you differentiate has no graph: it was made under no_grad, "
    "from a detached tensor, or without requires_grad_().",
    r"is not defined": "A name is unknown: is it spelled right, and was the cell that defines it "
    "run?",
}


def signature(t: Trial) -> str | None:
    "The function raises: does it take the right arguments, and what does the error mean?"
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
            f"Your function has to raise a {type(wanted.error).__name__} here: it raises a "
            f"{type(found.error).__name__}."
        )
    text = f"Your function raised {shown(found)}"
    text += "" if text.endswith((".", "!", "?")) else "."
    if not any(isinstance(t.mine(without_empty_rows(c)), Raised) for c in t.cases):
        return f"{text} The cause is a row without a real token."
    meant = [
        meaning
        for pattern, meaning in MEANING.items()
        if re.search(pattern, shown(found)) and isinstance(found.error, _OF_LIBRARIES)
    ]
    return " ".join([text, *meant[:1]])


_OF_LIBRARIES = (TypeError, AttributeError, RuntimeError, IndexError, NameError, ValueError)


def kind(t: Trial) -> str | None:
    "The result has the wrong type."
    got, want = t.got[t.worst], t.want[t.worst]
    if isinstance(want, Raised):
        return (
            f"Your function has to raise a {type(want.error).__name__} here: it returns a result."
        )
    if inspect.isgenerator(got):
        return "Your function is a generator: return the values themselves, without yield."
    if got is None:
        return f"Your function returned None instead of a {sort_of(want)}: is a return missing?"
    if isinstance(want, (tuple, dict)) or plain(want) is None:
        count = len(want) if isinstance(want, (tuple, list, dict)) else None
        several = parts(got)
        returned = f"your function returned a {type(got).__name__}."
        if isinstance(want, tuple) and (several is None or len(several) != count):
            return f"Return {count} results, as a tuple."
        if isinstance(want, list) and several is None:
            return f"Return a list: {returned}"
        if isinstance(want, dict) and not isinstance(got, dict):
            return f"Return a dict: {returned}"
        if isinstance(want, str) and not isinstance(got, str):
            return f"Return a string: {returned}"
    elif plain(got) is None and not (isinstance(want, list) and isinstance(got, (list, tuple))):
        return several_for_one(t) or (
            f"Return a tensor or a number: your function returned a {type(got).__name__}."
        )
    return None


def sort_of(want: Any) -> str:
    "What a result is, in a word."
    return "number" if isinstance(want, (int, float)) else type(want).__name__.lower()


def several_for_one(t: Trial) -> str | None:
    "Several tensors were returned where one was wanted."
    got, want = t.piece(t.got[t.worst]), t.piece(t.want[t.worst])
    if not isinstance(got, (tuple, list)) or not isinstance(want, Tensor) or len(got) < 2:
        return None
    each = [plain(one) for one in got]
    if not all(one is not None and one.ndim == want.ndim for one in each):
        return None
    if t.part is not None:
        return f"This is a {type(got).__name__} of {len(got)}, and one tensor was wanted: {UNPACK}"
    fits = [
        k
        for k in range(len(got))
        if all(
            isinstance(x, (tuple, list)) and len(x) > k and same(x[k], y)
            for x, y in zip(t.got, t.want)
        )
    ]
    which = f" Number {fits[0] + 1} of them is right: return that alone." if fits else ""
    return f"You return {len(got)} results, and one was wanted.{which}"


def chance(t: Trial) -> str | None:
    "The function returns something else when it is called again."
    if not same(t.exercise.result(t.answer, fresh(t.cases[t.worst])), t.got[t.worst]):
        return (
            "Your function returns a different result each time: it depends on chance, or on a "
            "variable that it changes."
        )
    return None


def shape(t: Trial) -> str | None:
    "The result has the wrong shape: which axis is missing, or too many?"
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
                    f"{text}: the numbers are right, but there is an axis of size 1 too many or "
                    "too few (squeeze, unsqueeze, keepdim)."
                )
            if a.ndim == 2 and close(a.T.reshape(b.shape), b):
                return f"{text}: rows and columns are exchanged."
        if a.ndim > b.ndim:
            return text + _reduction(t, i, a, b)
        if a.ndim < b.ndim:
            return f"{text}: you took a sum, mean or maximum over an axis that has to stay."
        return f"{text}."
    return None


def _reduction(t: Trial, i: int, a: Tensor, b: Tensor) -> str:
    "The sum or mean that makes a right, as the end of a sentence."
    for dim in range(a.ndim):
        for how, what in ((a.sum, "sum"), (a.mean, "mean")):
            if close(how(dim), b):
                return f": the {what} over dim {dim} is missing."
    if b.numel() == 1:
        mask = t.mask_of(i)
        real = a[mask] if mask is not None and mask.shape == a.shape else a
        for what, one in (("sum", real.sum()), ("mean", real.nanmean())):
            if close(one, b):
                return f": the {what} is missing" + (
                    ", over real tokens." if real is not a else "."
                )
    return "."


def not_finite(t: Trial) -> str | None:
    "NaN or infinity where a finite number is wanted: which of the inputs does it come from?"
    wanted = [plain(t.piece(x)) for x in t.want]
    if any(x is not None and bool(x.isinf().any()) for x in wanted) or _odd(t) is not True:
        return None
    for text, change in _causes(t):
        if _odd(t, change) is False:
            return text
    for name in t.scalars:
        for value in t.candidates(name):
            if _odd(t, put(name, value)) is False:
                return (
                    f"Your result is NaN or infinite unless {name} = {value:g}: look at what you "
                    f"do with {name}."
                )
    return (
        "Your result is NaN or infinite where a finite number is wanted: look for a division by 0, "
        "or the log of 0."
    )


def _causes(t: Trial) -> list[tuple[str, Change]]:
    "What may bring NaN or infinity, and the change that removes it. Two together come last."
    padding = (
        "NaN or infinity on padding gets into your result: 0 times infinity is NaN. Choose by the "
        "mask with torch.where instead of multiplying by it, and do so first."
    )
    empty = (
        "A row without a real token gives NaN, because 0 is divided by 0: keep the count at 1 or "
        "more, or leave out such rows."
    )
    clean: Change = lambda case: on_padding(case, 0.5)
    found: list[tuple[str, Change]] = []
    masked = any(map(masks_in, t.cases))
    if masked:
        found += [(padding, clean), (empty, without_empty_rows)]
    for name in t.tensors:
        count = lambda case, name=name: sum(
            int((~x.isfinite()).sum()) for x in filter(is_float, leaves(case[name]))
        )
        on_real = sum(count(clean(case)) for case in t.cases)
        if on_real:
            also = sum(map(count, t.cases)) > on_real
            found.append((_infinity_in(name, also), changed(name, finite)))
    if masked:
        found.append((f"{padding} {empty}", lambda case: without_empty_rows(clean(case))))
    return found


def _infinity_in(name: str, on_padding_too: bool) -> str:
    times = "find where you multiply it by 0, since 0 times infinity is NaN."
    if not on_padding_too:
        return f"Infinity in {name} gets into your result: {times}"
    return (
        f"NaN or infinity in {name} gets into your result, from padding and from real tokens. On "
        f"padding, choose by the mask first. On real tokens, {times}"
    )


def _odd(t: Trial, change: Change = lambda case: case) -> bool | None:
    """Whether the answer has NaN or infinity in changed cases where the right one has none. None
    where the right answer itself is not finite there."""
    found = False
    for i, case in enumerate(t.cases):
        a, b, before = (
            plain(x) for x in (t.mine(change(case)), t.right(change(case)), t.piece(t.want[i]))
        )
        was_finite = before is not None and bool(before.isfinite().all())
        if was_finite and (b is None or not bool(b.isfinite().all())):
            return None
        if a is None or b is None or a.shape != b.shape:
            continue
        if bool((a.isnan() & ~b.isnan()).any() or (a.isinf() & ~b.isinf()).any()):
            found = True
    return found
