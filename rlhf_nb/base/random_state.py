"The generators that training, a replay or a check must leave as they were."

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Inside, generators may be seeded and drawn from; afterwards those of Python, numpy and torch
    are as they were, also where an error ended it."""
    own, of_torch = random.getstate(), torch.get_rng_state()
    of_numpy = np.random.get_state()  # noqa: NPY002 (the global state is what others draw from)
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(own)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_rng_state(of_torch)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)
