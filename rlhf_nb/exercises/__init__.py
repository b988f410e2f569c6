"""The exercises of the pages: for each a right answer, cases, and programs with known mistakes.

The wrong programs are part of the package on purpose: a checker of `rlhf_nb.checks` runs them
beside a reader's answer, and where the outcomes agree on every case it names the mistake. Nothing
else calls them. Nothing here uses the rest of the package, so that a right answer cannot be wrong
together with what it checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Task(NamedTuple):
    "What a checker needs to know of one exercise."

    right: Callable  # one answer
    cases: tuple[tuple, ...]  # arguments to try
    praise: str  # what the reader has understood
    mistakes: dict[str, Callable]  # what to say of a mistake: a program that makes it


def clear(x: Tensor, mask: Tensor, how: str = "where") -> Tensor:
    "x with 0 on the padding: by torch.where, or, wrongly, by a product or not at all."
    return {"where": torch.where(mask, x, 0.0), "times": x * mask, "none": x}[how]


def reduced(x: Tensor, mask: Tensor, how: str = "real") -> Tensor:
    "The sum over real tokens, or, wrongly, one of four other numbers."
    if how == "rows":
        return torch.stack([row[keep].mean() for row, keep in zip(x, mask)]).mean()
    real = x[mask]
    return dict(real=real.sum(), mean=real.mean(), all=x.sum(), times=(x * mask).sum())[how]
