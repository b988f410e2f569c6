"""One run in a folder at a time."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows, where two runs in one folder are not noticed
    fcntl = None  # type: ignore[assignment]

LOCK = "_run.lock"
_held: set[Path] = set()  # of this process: the system's lock holds off other processes alone


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder is this run's alone meanwhile. Raises ValueError where another run is in it. The
    system drops the lock of a process that ends, however it ends."""
    path, file = (folder / LOCK).resolve(), None
    if path in _held:  # opened and closed once more, it would be dropped
        owner = "this process"
    else:
        folder.mkdir(parents=True, exist_ok=True)
        file, owner = _lock(path)
    if owner:
        raise ValueError(
            f"another run is in {folder} ({owner}): wait for its end, or give another output_dir."
        )
    _held.add(path)
    try:
        yield
    finally:
        _held.discard(path)
        path.unlink(missing_ok=True)
        if file is not None:
            file.close()


def _lock(path: Path) -> tuple[Any, str]:
    "The open file that holds the lock; or nothing, and who holds it."
    while fcntl is not None:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  # it stays open
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
                return file, ""
        except FileNotFoundError:
            pass  # a run that ended between the two lines took it away: once more
        except OSError as error:
            file.seek(0)
            owner = file.read() or "another process"
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.close()
                return None, owner
            print(f"{path} cannot be locked ({error}): two runs are not noticed.", file=sys.stderr)
            return file, ""
        file.close()
    return None, ""
