"""Code of others that may raise or hang while it answers: an environment.

Names with an underscore: `os._exit`, which ends a process whose main thread is in other code.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def watched(
    where: Callable[[], str],  # says which episode, and what it was doing
    seconds: float | None = None,  # None: it may take as long as it wants
) -> Iterator[None]:
    """Inside, an environment runs. Raises RuntimeError where it raises; where it takes longer, the
    process ends, since code in it cannot be interrupted."""

    def end() -> None:
        print(
            f"{where()}: no answer within environment_timeout = {seconds} seconds. The run "
            "ends here, and its last checkpoint is whole: resume it with another environment.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(124)

    timer = None if seconds is None else threading.Timer(seconds, end)
    try:
        if timer is not None:
            timer.daemon = True
            timer.start()
        yield
    except (Exception, SystemExit) as error:
        raise RuntimeError(
            f"{where()}: it raised {type(error).__name__}: {error}. Return an observation "
            "that says what was wrong with an action, or end the episode."
        ) from error
    finally:
        if timer is not None:
            timer.cancel()
