"""What somebody wishes of a run. Any thread may wish; the one that trains takes the wishes between
two updates, and nobody else does."""

from __future__ import annotations

import threading


class Wishes:
    "A pause, a stop and a coefficient that nobody has granted yet."

    def __init__(self) -> None:
        self._gate, self._lock = threading.Event(), threading.Lock()
        self.clear()

    def clear(self) -> None:
        "The run is over: nothing is wished any more, and nobody is held."
        self.kl_coef: float | None = None  # to be moved there; None: it stays
        self.stop = False
        self._gate.set()

    def pause(self) -> None:
        self._gate.clear()

    def go_on(self) -> None:
        self._gate.set()

    @property
    def pausing(self) -> bool:
        return not self._gate.is_set()

    def wait(self, seconds: float) -> bool:
        "Wait so long for the end of a pause. Is it over?"
        return self._gate.wait(seconds)

    def move_kl_coef(self, value: float | None) -> None:
        with self._lock:
            self.kl_coef = value

    def take_kl_coef(self) -> float | None:
        "The coefficient that is wished, which from now on is not."
        with self._lock:
            value, self.kl_coef = self.kl_coef, None
        return value
