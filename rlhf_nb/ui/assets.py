"""Scripts, style sheets and page templates of the views, kept as files of their own languages."""

from __future__ import annotations

from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"


@cache
def asset(name: str) -> str:
    """The text of a file in `static`, such as `reader.css`. Raises FileNotFoundError if there is
    none of that name."""
    path = STATIC / name
    if not path.is_file():
        there = ", ".join(sorted(file.name for file in STATIC.iterdir()))
        raise FileNotFoundError(f"there is no asset {name!r}: give one of {there}.")
    return path.read_text(encoding="utf-8")
