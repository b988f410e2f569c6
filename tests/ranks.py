"Ranks as threads, for functions that are given the sum over ranks."

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier


def on_ranks(work: Callable, *parts: object) -> list:
    "work(part, reduce) on one thread for each part; reduce sums over the threads."
    meet, slots = Barrier(len(parts), timeout=20), [None] * len(parts)

    def rank(i):
        def reduce(value):
            slots[i] = value
            meet.wait()
            total = value + sum(s.detach() for j, s in enumerate(slots) if j != i)
            meet.wait()
            return total

        return work(parts[i], reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(rank, range(len(parts))))
