"""Tensors with a type and a shape and no data, on which a model's own code runs at once.

Private names used here: `torch._subclasses`, the module of `FakeTensorMode`, on which torch.compile
and torch.export trace a model; torch has no public module for it.
"""

from contextlib import AbstractContextManager

from torch._subclasses import FakeTensorMode


def make_fake_tensors() -> AbstractContextManager:
    "While it lasts, every new tensor has a type and a shape, and no data."
    return FakeTensorMode()
