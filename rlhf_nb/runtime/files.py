"""Text files that appear whole or not at all, and JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text_atomic(
    path: str | Path,
    text: str,
) -> None:
    "Write beside the file and rename, so that no reader ever sees half of it."
    beside = Path(f"{path}.partial")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def read_jsonl(
    path: str | Path,
) -> list[dict[str, Any]]:  # one for each line
    """Rows of a file of JSON lines. A last line that was cut off (a killed run) is skipped; any
    other broken line raises ValueError with the file and the line number."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}): fix or remove it"
            ) from error
    return rows


def append_jsonl(
    path: str | Path,
    row: dict[str, Any],
) -> None:
    "Add one line. A last line that was cut off is removed first."
    path = Path(path)
    if is_cut_off(path):
        write_text_atomic(path, "".join(json.dumps(kept) + "\n" for kept in read_jsonl(path)))
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def is_cut_off(path: Path) -> bool:
    "Does a file end within a line?"
    if not path.is_file() or not path.stat().st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
