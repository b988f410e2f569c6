"Which files of a folder are rollouts: a run's, or tables of episodes that another trainer wrote."

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlhf_nb.base.terminal import harmless

SUFFIXES = (".jsonl", ".ndjson", ".parquet", ".csv", ".json")
OF_FOLDER = (*SUFFIXES[:-1], ".table.json")  # other JSON in a folder is settings


def _is_complete(path: Path, fresh: float = 60.0) -> bool:
    "Is a file complete? Only young ones are opened: an old one that is damaged raises when read."
    if time.time() - path.stat().st_mtime > fresh:
        return path.stat().st_size > 0
    try:
        with safe_open(path, "np"):
            return True
    except (SafetensorError, OSError):
        return False


_FILE = re.compile(r"update-(\d+)(?:-rank(\d+))?\.safetensors")


def _named(path: Path) -> list[tuple[Path, int, int]]:
    "Each file of a run's rollouts, with its update and its rank."
    stages = (path / "ppo", path / "ppo.partial", path)  # a demo that trains has the second
    folders = (*(stage / "rollouts" for stage in stages), path)
    found = next((its for x in folders if x.is_dir() and (its := sorted(x.iterdir()))), [])
    names = [(file, _FILE.fullmatch(file.name)) for file in found]
    return [(file, int(name[1]), int(name[2] or 0)) for file, name in names if name]


def rollout_files(path: Path) -> dict[int, list[Path]]:
    "The rollout files of a run, by update, ranks in order; what is being written is left out."
    files: dict[int, dict[int, Path]] = {}
    for file, update, rank in _named(path):
        if _is_complete(file):
            files.setdefault(update, {})[rank] = file
    ranks = max((len(parts) for parts in files.values()), default=0)
    if files and len(files[max(files)]) < ranks:
        del files[max(files)]
    return {update: [its[rank] for rank in sorted(its)] for update, its in sorted(files.items())}


def left_out(path: Path, update: int | None = None) -> str:
    "A sentence on the first file, of an update or of all, that `rollout_files` leaves out, if any."
    there = rollout_files(path)
    left = [file for file, its, _ in _named(path) if update in (None, its) and its not in there]
    why = "damaged, or not yet written as a whole" if left and left[0].stat().st_size else "empty"
    return f" {left[0].name} is left out: it is {why}." if left else ""


def kept_rollouts(run: Path) -> dict[int, list[Path]]:
    "`rollout_files`. Raises ValueError where there are none."
    if files := rollout_files(run):
        return files
    left = left_out(run)
    why = " that can be read" * bool(left) if run.exists() else ", as it is not there"
    raise ValueError(
        f"{run} keeps no rollouts{why}: give the output_dir of a run with save_rollouts=True, or "
        f"of `rlhf-nb demo`.{left}"
    )


def file_number(path: Path) -> int:
    "The last number of a file's name, 0 where it has none."
    return int(["0", *re.findall(r"\d+", path.stem)][-1][-9:])


def table_files(folder: Path, notes: list[str] | None = None) -> list[Path]:
    """The files of a folder of tables, or of its `completions`, in the order of their numbers. Of
    names that differ by more than numbers the most frequent; that there are others is a note."""
    suits = lambda file: file.is_file() and file.name.lower().endswith(OF_FOLDER)
    inside = [sorted(filter(suits, folder.glob(what))) for what in ("*", "completions/*")]
    shape = lambda file: re.sub(r"\d+", "#", file.name)
    shapes = Counter(map(shape, inside[0] or inside[1])).most_common()
    files = [file for file in inside[0] or inside[1] if shape(file) == shapes[0][0]]
    if (others := sum(map(len, inside)) - len(files)) and notes is not None:
        name = harmless(repr(files[0].name))
        notes.append(f"Only files named like {name} are read, not {others} more.")
    return sorted(files, key=lambda file: (file_number(file), file.name))


def is_foreign(source: Any) -> bool:
    "Records, a file, or a folder of tables that is no run of this package."
    if not isinstance(source, (str, Path)):
        return True
    path = Path(source)
    own = any((path / name).exists() for name in ("metrics.jsonl", "settings.json", "ppo"))
    if path.is_dir():
        return not own and not rollout_files(path) and bool(table_files(path))
    return path.exists() or path.suffix.lower() in SUFFIXES
