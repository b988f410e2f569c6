"What an exercise's cases are drawn from: numbers of two digits after the point, short to read."

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Generator, Tensor

T = TypeVar("T")


def normal(g: Generator, *shape: int, scale: float = 1.0) -> Tensor:
    "Normal numbers, rounded."
    return (torch.randn(shape, generator=g) * scale * 100).round() / 100


def uniform(g: Generator, low: float, high: float, *shape: int) -> Tensor:
    "Uniform numbers, rounded."
    return ((low + (high - low) * torch.rand(shape, generator=g)) * 100).round() / 100


def integers(g: Generator, low: int, high: int, *shape: int) -> Tensor:
    "Integers from low to high, both included."
    return torch.randint(low, high + 1, shape, generator=g)


def one(g: Generator, low: int, high: int) -> int:
    "One integer from low to high, both included."
    return int(integers(g, low, high))


def pick(g: Generator, options: Sequence[T]) -> T:
    "One of several."
    return options[one(g, 0, len(options) - 1)]


def two(g: Generator, options: Sequence[T]) -> tuple[T, T]:
    "Two different ones of several."
    i, j = torch.randperm(len(options), generator=g)[:2].tolist()
    return options[i], options[j]


def far(x: Tensor) -> Tensor:
    "x [B, T] with 25 and -25 in front, which a clamp at 10 would change."
    x[0, :2] = torch.tensor([25.0, -25.0])
    return x


def draw_lengths(*rows: int, width: int) -> Tensor:
    "The mask [B, width] of responses of these lengths."
    return torch.arange(width) < torch.tensor(rows)[:, None]


def ragged_mask(g: Generator, rows: int, width: int) -> Tensor:
    """A mask of responses: one fills its row, one has a single token less, the others are random;
    the last one is empty."""
    each = [width, width - 1, *integers(g, 1, width, max(rows - 2, 0)).tolist()]
    each[rows - 1] = 0
    order = [0] if rows == 1 else [*torch.randperm(rows - 1, generator=g).tolist(), rows - 1]
    return draw_lengths(*(each[i] for i in order), width=width)


def dirty(x: Tensor, mask: Tensor, dirt: float = math.nan) -> Tensor:
    "x with dirt on the padding."
    return torch.where(mask, x, torch.full_like(x, dirt))
