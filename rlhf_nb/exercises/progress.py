"""Which exercises were solved in this copy: a small file beside the notebooks.

A pass is recorded where a reader works, and neither in a test nor in CI.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

FILE = ".rlhf_nb_progress.json"


def path(start: Path | None = None) -> Path:
    """The file of the copy that a folder belongs to; the current folder if none is given.
    RLHF_NB_PROGRESS names another file. A copy is the nearest folder upwards that has such a file,
    settings.ini or .git, so that all its notebooks share one record; else the folder itself."""
    if os.environ.get("RLHF_NB_PROGRESS"):
        return Path(os.environ["RLHF_NB_PROGRESS"])
    here = start or Path.cwd()
    for folder in (here, *here.parents):
        if any((folder / name).exists() for name in (FILE, "settings.ini", ".git")):
            return folder / FILE
    return here / FILE


def solved(start: Path | None = None) -> dict[str, str]:
    "The name of each solved function, and the day on which a checker first accepted it."
    try:
        found = json.loads(path(start).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # nothing solved yet, or a damaged file: it is only a record
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def record(name: str, answer: Any) -> None:
    """Note that a reader's own function passed: the one that has its name where the reader works.
    A folder that cannot be written to is left alone."""
    asked = bool(os.environ.get("RLHF_NB_PROGRESS"))
    if not asked and (os.environ.get("CI") or "pytest" in sys.modules):
        return
    done = solved()
    if name in done or getattr(sys.modules.get("__main__"), name, None) is not answer:
        return
    target = path()
    part = target.with_suffix(".part")
    try:
        text = json.dumps({**done, name: date.today().isoformat()}, indent=1)
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, target)
    except OSError:  # a read-only copy: the verdict matters more than its record
        return
