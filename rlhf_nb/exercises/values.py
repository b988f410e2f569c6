"""What a reader's function is given and what it returned: copied, run, compared and shown.

A reader may return anything, from a numpy number to an object that raises when it is compared, so
each conversion here answers None rather than raise.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Case = dict[str, Any]  # the arguments of one call, by name and in order


@dataclass(frozen=True)
class Raised:
    "An exception in the place of a result."

    error: BaseException


def map_numbers(x: Any, change: Callable[[Any], Any]) -> Any:
    "x with `change` applied to every tensor and number in its lists, tuples and dicts."
    if isinstance(x, dict):
        return {key: map_numbers(one, change) for key, one in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(map_numbers(one, change) for one in x)
    return change(x)


def leaves(x: Any) -> list[Any]:
    "Every tensor and number in x, in order."
    collected: list[Any] = []
    map_numbers(x, collected.append)
    return collected


def fresh(case: Case) -> Case:
    "A copy that a careless function may spoil."
    return map_numbers(case, lambda x: x.clone() if isinstance(x, Tensor) else copy.copy(x))


def attempt(program: Callable, *given: Any) -> Any:
    "What a program that may do anything returns; an exception is a result too."
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return program(*given)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a reader's program raises is compared and shown
        return Raised(error)


def numbers(x: Any) -> Tensor | None:
    "x as a tensor that keeps its graph, if torch.as_tensor can make one; else None."
    if isinstance(x, Tensor):
        return x
    if isinstance(x, str) or x is None or callable(x):
        return None
    if isinstance(x, (list, tuple)):
        if x and all(type(one) is float for one in x):  # as below, in a tenth of the time
            return torch.tensor(x, dtype=torch.float64)
        each = [numbers(one) for one in x]
        known = [one.double() for one in each if one is not None and not one.is_complex()]
        if len(known) < len(each) or len({one.shape for one in known}) > 1:
            return None
        return torch.stack(known) if known else torch.zeros(0)
    tensor = attempt(torch.as_tensor, x)
    return None if isinstance(tensor, Raised) else tensor


def plain(x: Any) -> Tensor | None:
    "The numbers of x as float64 without a graph, or None."
    tensor = numbers(x)
    if tensor is None or tensor.is_complex():
        return None
    double = attempt(lambda x: x.detach().cpu().double(), tensor)  # some tensors hold no data
    return None if isinstance(double, Raised) else double


def parts(x: Any) -> list[Any] | None:
    "The several results in x, also if they are the numbers of a vector; None where there is one."
    if isinstance(x, (tuple, list)):
        return list(x)
    tensor = numbers(x)
    return None if tensor is None or tensor.ndim != 1 else list(tensor)


def same(got: Any, want: Any, tolerance: float = 2e-5) -> bool:
    """Whether an answer is what was wanted. A tuple stands for several results; a number may have
    shape [] or [1]; an exception needs the same type."""
    if isinstance(got, Raised) or isinstance(want, Raised):
        return type(got) is type(want) and type(got.error) is type(want.error)
    if want is None or isinstance(want, str):
        return type(got) is type(want) and got == want
    if type(got) is type(want) and type(want) in (bool, int, float):  # needs no tensor
        near = type(want) is float and abs(got - want) <= tolerance * (1 + abs(want)) < torch.inf
        return near or got == want or (got != got and want != want)
    if isinstance(want, dict):
        if not isinstance(got, dict) or len(got) != len(want):
            return False
        return all(key in got and same(got[key], one, tolerance) for key, one in want.items())
    wanted = None if isinstance(want, tuple) else plain(want)
    if wanted is None:
        if not isinstance(want, (tuple, list)):
            return got is want
        several = parts(got)
        if several is None or len(several) != len(want):
            return False
        return all(same(a, b, tolerance) for a, b in zip(several, want))
    number = plain(got)
    return number is not None and close(number, wanted, tolerance)


def close(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> bool:
    "The same numbers in the same shape; one number alone may have any shape."
    if a.numel() == b.numel() == 1:
        a, b = a.reshape(()), b.reshape(())
    return a.shape == b.shape and torch.allclose(a, b, tolerance, tolerance, equal_nan=True)


def show_short(x: Any) -> str:
    "x in a line, short."
    if isinstance(x, Raised):
        return f"{type(x.error).__name__}: {_text(x.error, str)}"[:300]
    if isinstance(x, Tensor):
        return _tensor(x)
    if isinstance(x, bool) or x is None:
        return str(x)
    if isinstance(x, (list, tuple)) and len(x) <= 40:
        inner = ", ".join(show_short(one) for one in x)
        return f"({inner})" if isinstance(x, tuple) else f"[{inner}]"
    if isinstance(x, dict) and len(x) <= 40:
        return "{" + ", ".join(f"{_text(k, repr)}: {show_short(v)}" for k, v in x.items()) + "}"
    if isinstance(x, (int, float)):
        return f"{x:.5g}" if isinstance(x, float) else str(x)
    tensor = plain(x)
    return _text(x, repr)[:300] if tensor is None else _tensor(tensor)


def _text(x: Any, write: Callable[[Any], str]) -> str:
    written = attempt(write, x)
    return written if type(written) is str else f"a {type(x).__name__}"


def _tensor(x: Tensor) -> str:
    tensor = plain(x)
    if tensor is None or tensor.numel() > 60:
        return f"a tensor of shape {list(x.shape)}"
    integers = not x.is_floating_point()
    show = (lambda n: str(int(n))) if integers else (lambda n: f"{n:.5g}")
    if x.dtype == torch.bool:
        show = lambda n: str(bool(n))

    def text(y: Any) -> str:
        return "[" + ", ".join(map(text, y)) + "]" if isinstance(y, list) else show(y)

    return text(tensor.tolist())
