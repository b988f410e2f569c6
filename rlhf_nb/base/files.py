"""Text files that appear whole or not at all, JSON lines, and JSON of what data sets hold."""

from __future__ import annotations

import base64
import datetime
import json
import os
from pathlib import Path
from typing import Any

DEMO_MARK = "demo.json"  # in a folder that `rlhf-nb demo` wrote: the name of that run


def write_text_atomic(path: str | Path, text: str) -> None:
    "Write beside the file and rename, so that no reader ever sees half of it."
    beside = Path(f"{path}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except BaseException:  # Ctrl-C too
        beside.unlink(missing_ok=True)
        raise


def writable(
    path: str | Path,
    option: str,  # that gave it, such as "--output"
) -> None:
    """Raises ValueError where no page can be written, before the work that is to be written. An
    existing file is written again only if it is a page."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: give a file, such as {path / 'page.html'}.")
    if path.is_file() and path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(
            f"{option} {path} exists, and is no page: give another name, or delete it."
        )
    existing = next(folder for folder in path.parents if folder.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ValueError(
            f"{option} {path}: {existing} is no folder that can be written to. Give another path."
        )


def read_jsonl(
    path: str | Path,
) -> list[dict[str, Any]]:  # one for each line
    """Rows of a file of JSON lines. A last line that was cut off (a killed run) is skipped; any
    other broken line raises ValueError with the file and the line number."""
    lines = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("a row is an object")
            rows.append(row)
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}): fix or remove it"
            ) from error
    return rows


def log_history(
    path: Path,  # a trainer_state.json
) -> list[dict[str, Any]]:
    "What a run logged. Raises ValueError where the file is damaged."
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("its log_history is no list of objects")
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it") from error
    return rows


def append_jsonl(path: str | Path, row: dict[str, Any]) -> None:
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


TIMES = {kind.__name__: kind for kind in (datetime.datetime, datetime.date, datetime.time)}


def _tag(x: Any) -> Any:
    "What JSON does not know, as an object of one name."
    kind = type(x).__name__
    if kind in TIMES:
        return {f"${kind}": x.isoformat()}
    if isinstance(x, bytes):
        return {"$bytes": base64.b64encode(x).decode()}
    if kind in ("Tensor", "ndarray"):
        return {f"${kind}": x.tolist(), "dtype": str(x.dtype).removeprefix("torch.")}
    return x.tolist() if hasattr(x, "tolist") else str(x)  # numbers of numpy have it


def _untag(x: dict[str, Any]) -> Any:
    "What `_tag` was given."
    first: tuple[str, Any] = next(iter(x.items()), ("", None))
    kind, value = first[0].removeprefix("$"), first[1]
    if kind == first[0]:
        return x
    if kind in TIMES:
        return TIMES[kind].fromisoformat(value)
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "Tensor":
        import torch  # seconds that the command line does not wait for

        return torch.tensor(value, dtype=getattr(torch, x["dtype"]))
    if kind == "ndarray":
        import numpy as np

        return np.array(value, dtype=x["dtype"])
    return x


def strict_json(x: Any) -> str:
    "JSON for other programs: null for NaN and infinity, which the standard does not have."
    return json.dumps(json.loads(json.dumps(x), parse_constant=lambda _: None), indent=1)


def to_json(x: Any) -> str:
    "JSON, also of dates, bytes, tensors and arrays; anything else becomes its text."
    return json.dumps(x, default=_tag)


def from_json(text: str) -> Any:
    "What `to_json` was given."
    return json.loads(text, object_hook=_untag)
