"""Small files that a run writes: text that is replaced in one move, and JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text_atomic(path: str | Path, text: str) -> None:
    """Write a file beside `path` and rename it to `path`: a reader sees the old text or the new
    text, never half of one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def append_jsonl(path: str | Path, row: Any) -> None:
    """Add one line. After a line that was cut short (a killed run) it starts on a line of its
    own."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        torn = file.seek(0, os.SEEK_END) > 0
        if torn:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")


def read_jsonl(path: str | Path) -> list[Any]:
    """The rows of a file of JSON lines; none where there is no file. A last line that was cut short
    is skipped. Raises ValueError on any other line that is not JSON, naming file and line."""
    path, rows = Path(path), []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):  # no newline after it: the writer was stopped in the middle
                break
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}): correct the line or delete it."
            ) from error
    return rows
