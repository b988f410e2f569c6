"""Text files that appear whole or not at all, JSON lines, and JSON of what data sets hold."""

from __future__ import annotations

import base64
import datetime
import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

OVERWRITE = "Write over a file that is there and that rlhf-nb did not write."
DEMO_MARK = "demo.json"  # in a folder that `rlhf-nb demo` wrote: the name of that run
CANNOT_WRITE = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO,
    errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOENT,
}  # fmt: skip


class Unwritten(OSError):
    "A file could not be written: which, why, and what to do."


def no_disk(error: BaseException) -> bool:
    "Whether a file could not be written; torch and safetensors have errors of their own for it."
    if isinstance(error, OSError):
        return isinstance(error, Unwritten) or error.errno in CANNOT_WRITE
    of_disk = r"os error (5|13|17|2[0178]|30|122)\b|file write failed|iostream error|unexpected pos"
    return bool(re.search(of_disk, str(error)))


def unwritten(error: BaseException, path: str | Path = "") -> str:
    "Which file could not be written, why and what to do, in one line."
    if isinstance(error, Unwritten):
        return str(error)
    where = f": {str(path)!r}" * bool(str(path) and not getattr(error, "filename", None))
    maybe = "read or " * (getattr(error, "errno", 0) in (errno.EACCES, errno.EPERM, errno.ENOENT))
    return (
        f"a file could not be {maybe}written ({' '.join(str(error).split())}{where}): free space, "
        "look at what is there, or give another path."
    )


@contextmanager
def written_to(path: str | Path) -> Iterator[None]:
    "Its folder is made. Raises Unwritten where it cannot be written, whatever library wrote."
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        yield
    except Exception as error:
        if not no_disk(error) or isinstance(error, Unwritten):
            raise
        raise Unwritten(unwritten(error, path)) from error


def check_place() -> str:
    "The working directory. Raises FileNotFoundError where it was deleted: no path is known then."
    with suppress(FileNotFoundError):
        return os.getcwd()
    raise FileNotFoundError("the working directory was deleted: cd (os.chdir) to one that exists.")


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    "Where to write: beside the file, whose place it takes when it is whole."
    beside = Path(f"{path}.partial")
    try:
        with written_to(path):
            yield beside
            os.replace(beside, path)
    except BaseException:  # Ctrl-C too
        beside.unlink(missing_ok=True)
        raise


def write_text_atomic(path: str | Path, text: str | bytes) -> None:
    """The file is there whole or not at all. A link stays, and its target is written; a device or
    a pipe is written to."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    with written_to(path):
        if os.path.exists(path) and not os.path.isfile(path):
            Path(path).write_bytes(data)
            return
        with whole_file(os.path.realpath(path)) as beside:
            beside.write_bytes(data)


def writable(
    path: str | Path,
    option: str,  # that gave it, such as "--output"
    overwrite: bool = False,  # somebody else's file
    ours: bytes = b"rlhf",  # what the beginning of a file that we wrote has in it
) -> None:
    """Raises ValueError where a file cannot be written, before the work that is to be written. An
    existing one is written again only if it is empty, or this package wrote it."""
    if os.path.isdir(path):
        raise ValueError(f"{option} {path} is a folder: give a file, such as {Path(path, 'FILE')}.")
    if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe is written to
        return
    path = Path(os.path.realpath(path))
    if path.is_file() and not overwrite:
        with open(path, "rb") as file:
            if (start := file.read(65_536)) and ours not in start:
                raise ValueError(
                    f"{option} {path} exists, and rlhf-nb did not write it: give another name, or "
                    "--overwrite."
                )
    existing = next(folder for folder in path.parents if folder.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ValueError(
            f"{option} {path}: {existing} is no folder that can be written to. Give another path."
        )


MOST_LEVELS = 100  # of lists and objects within each other
MOST_YAML = 2**16  # characters of a YAML file


def check_folder(name: str, before: str = "") -> None:
    "Raises FileNotFoundError where a model's name can only be that of a folder, and there is none."
    of_folder = re.match(r"[~./\\]|\w:|.*/$|.*/.*/", name) and not name.endswith(".gguf")
    if of_folder and not Path(name).exists():
        raise FileNotFoundError(f"{before}there is no folder {name}: give one that was saved to.")


SAVED = dict(
    model=["config.json", "adapter_config.json", "*.gguf"],
    adapter=["adapter_config.json"],
    **{"value head": ["model.safetensors"]},
    tokenizer=["tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken*", "*.gguf"],
)


def check_saved(name: str, what: str, before: str = "") -> None:
    "Raises FileNotFoundError where a folder holds no such model, adapter, head or tokenizer."
    folder = Path(name)
    if folder.is_dir() and not any(any(folder.glob(file)) for file in SAVED[what]):
        inside = sorted({p.parent.name for file in SAVED[what] for p in folder.glob(f"*/{file}")})
        such = f" In it, these have one: {', '.join(inside)}." if inside else ""
        raise FileNotFoundError(
            f"{before}{name} has no {SAVED[what][0]}: give the folder that a {what} was saved to."
            f"{such}"
        )


def parse_json(text: str | bytes, **how: Any) -> Any:
    "As `json.loads`. Raises ValueError also where whoever walks through it would run out of stack."
    try:
        value = json.loads(text, **how)
        inside, levels = [value], 0
        while inside := [x for x in inside if isinstance(x, (dict, list))]:
            inside = [y for x in inside for y in (x.values() if isinstance(x, dict) else x)]
            if (levels := levels + 1) > MOST_LEVELS:
                raise RecursionError
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep") from None
    return value


def read_object(path: Path, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    "The object of a JSON file; `absent` where there is none. Raises ValueError naming a bad file."
    if absent is not None and not path.is_file():
        return absent
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, and an object was expected")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): fix or remove it.") from error
    return value


def yaml_text(path: str | Path) -> str:
    "The text of a YAML file. Raises ValueError if deep, or long with its aliases written out."
    import yaml

    @cache
    def length(x: Any) -> int:  # of a node, a pair of them or a text
        x = getattr(x, "value", x)
        return len(x) if isinstance(x, str) else 1 + sum(map(length, x))

    with open(path, encoding="utf-8") as file, suppress(RecursionError):
        text = file.read(MOST_YAML + 1)
        if len(text) <= MOST_YAML >= length(yaml.compose(text, yaml.SafeLoader) or ""):
            return text
    raise ValueError("it is deep, or long with its aliases written out: give a file of settings")


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:  # one for each line
    """Rows of a file of JSON lines. A last line that was cut off (a killed run) is skipped; any
    other broken line raises ValueError with the file and the line number."""
    lines = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError("a row is an object")
            rows.append(row)
        except ValueError as error:
            if number == len(lines):
                break
            why = f"line {number} is not JSON ({error}): fix or remove it"
            raise ValueError(f"{path}, {why}") from error
    return rows


def checkpoints(folder: Path) -> list[Path]:
    "Folders with a checkpoint's name, oldest step first, whole or not."
    named = [p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(named, key=lambda path: int(path.name.split("-")[1]))


def log_history(
    path: Path,  # a trainer_state.json
) -> list[dict[str, Any]]:
    "What a run logged. Raises ValueError where the file is damaged."
    rows = read_object(path).get("log_history")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is damaged (its log_history is no list of objects): remove it")
    return rows


def append_jsonl(path: str | Path, row: dict[str, Any]) -> None:
    "Add one line. A last line that was cut off is removed first."
    path = Path(path)
    if is_cut_off(path):
        write_text_atomic(path, "".join(json.dumps(kept) + "\n" for kept in read_jsonl(path)))
    with written_to(path), open(path, "a", encoding="utf-8") as file:
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
        return {f"${kind}": _escape(x.tolist()), "dtype": str(x.dtype).removeprefix("torch.")}
    return x.tolist() if hasattr(x, "tolist") else str(x)  # numbers of numpy have it


def _escape(x: Any) -> Any:
    "The same, where names that begin with $ begin with one more: those of `_tag` have one."
    if isinstance(x, dict):
        names = (f"${k}" if isinstance(k, str) and k.startswith("$") else k for k in x)
        return dict(zip(names, map(_escape, x.values())))
    return [*map(_escape, x)] if isinstance(x, (list, tuple)) else x


def _untag(x: dict[str, Any]) -> Any:
    "What `_escape` and `_tag` were given."
    first: tuple[str, Any] = next(iter(x.items()), ("", None))
    kind, value = first[0].removeprefix("$"), first[1]
    if kind == first[0] or kind.startswith("$"):
        return {k[1:] if k.startswith("$$") else k: y for k, y in x.items()}
    with suppress(LookupError, TypeError, ValueError):  # the user's own, of an earlier version
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
    return json.dumps(_escape(x), default=_tag)


def from_json(text: str) -> Any:
    "What `to_json` was given."
    return parse_json(text, object_hook=_untag)
