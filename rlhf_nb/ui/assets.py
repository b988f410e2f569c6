"""Scripts, style sheets and page templates of the views, kept as files of their own languages."""

from __future__ import annotations

import re
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


@cache
def module(*names: str) -> str:
    """Some scripts of `static` as one self-contained module, in their order: a file that is sent to
    somebody has nothing beside it to import, nor has a widget."""
    joined = "\n".join(asset(name) for name in names)
    return re.sub(r'^import \{[^}]*\} from "\./[\w-]+\.js";\n', "", joined, flags=re.MULTILINE)
