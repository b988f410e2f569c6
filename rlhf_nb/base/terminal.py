"""Texts of models and of people on a terminal, where nothing in them may steer it."""

from __future__ import annotations

import errno
import logging
import os
import select
import unicodedata
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

KEPT = "\n\t\u200c\u200d"  # the last two: some scripts and emoji are written with them
STEERS = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode


def harmless(text: str) -> str:
    "The text with escapes in place of what moves a cursor, sets colours or turns the direction."
    plain = lambda c: c in KEPT or unicodedata.category(c) not in STEERS
    return "".join(c if plain(c) else ascii(c)[1:-1] for c in text)


def harmless_record(record: logging.LogRecord) -> bool:
    "A filter of a log that goes to a terminal."
    record.msg, record.args = harmless(record.getMessage()), ()
    return True


def terminal_text(text: str, console: Console) -> Text:
    "The same for Rich: no markup in it is read, and what the terminal's encoding lacks is escaped."
    encoding = console.encoding or "utf-8"
    return Text(harmless(text).encode(encoding, "backslashreplace").decode(encoding))


def let_go_of_gone(*fds: int) -> None:
    "Of these, what has lost its terminal or its reader goes nowhere from now on."
    asked = select.poll()
    for fd in fds:
        asked.register(fd, 0)
    for fd, what in asked.poll(0):
        if what & (select.POLLHUP | select.POLLERR):
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), fd)


def unbroken(stream: Any) -> None:
    "A stream of the process whose reader goes is no error: the command goes on without."

    def safe(write: Callable[..., Any], *what: Any) -> Any:
        try:
            return write(*what)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            let_go_of_gone(1, 2)
            os.write(2, b"\nnobody reads the output any more: it goes on without.\n")

    if not isinstance(stream.write, partial):  # a process may call several commands
        stream.write, stream.flush = partial(safe, stream.write), partial(safe, stream.flush)
