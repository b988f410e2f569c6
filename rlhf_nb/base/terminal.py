"""Texts of models and of people on a terminal, where nothing in them may steer it."""

from __future__ import annotations

import unicodedata

from rich.console import Console
from rich.text import Text

JOINERS = "\u200c\u200d"  # some scripts and emoji are written with them


def harmless(text: str) -> str:
    "The text with escapes in place of what moves a cursor, sets colours or turns the direction."
    steers = lambda c: (
        c not in JOINERS and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    )
    plain = (c if c in "\n\t" or not steers(c) else ascii(c)[1:-1] for c in text)
    return "".join(plain)


def terminal_text(text: str, console: Console) -> Text:
    "The same for Rich: no markup in it is read, and what the terminal's encoding lacks is escaped."
    encoding = console.encoding or "utf-8"
    return Text(harmless(text).encode(encoding, "backslashreplace").decode(encoding))
