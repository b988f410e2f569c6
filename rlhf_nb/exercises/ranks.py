"""Threads that play the ranks of a run on several GPUs, where there is one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any


def reduce_on_threads(
    work: Callable[[Any, Callable], Any],  # called with a part and with reduce, which sums
    *parts: Any,  # what each rank holds
) -> list[Any]:  # what each rank returned
    "work(part, reduce) on one thread for each part; reduce(value) is its sum over the threads."
    meet = Barrier(len(parts), timeout=60)
    slots: list[Any] = [None] * len(parts)

    def rank(i: int) -> Any:
        def reduce(value: Any) -> Any:
            slots[i] = value
            meet.wait()
            total = sum(slots)
            meet.wait()
            return total

        return work(parts[i], reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(rank, range(len(parts))))
