"""Rollouts that other trainers wrote: a format is a mapping of columns, and little more.

`nbs/reference/59_other_trainers.ipynb` says which versions wrote these formats, and how to get a
file of each."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rlhf_nb.rollout import SIGNALS, Rollout
from rlhf_nb.runtime.errors import did_you_mean
from rlhf_nb.runtime.loading import loading
from rlhf_nb.runtime.terminal import harmless
from rlhf_nb.ui.run_files import (
    MEANS,
    episode_numbers,
    merged,
    rollout_files,
    spread,
)

Columns = dict[str, list[Any]]  # a table: each column has a value for each episode

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
TABLES = tuple(suffix for suffix in SUFFIXES if suffix != ".json")  # of a folder
EPISODE = ("prompt", "response", "step", "stopped", "scores", "raw_scores")  # a value an episode
TOKEN = ("tokens", "token_ids", "token_mask", *SIGNALS)  # a list an episode
TARGETS = (*EPISODE, *TOKEN)
TAKEN = {"episode", "prompt", "response", "length", "stopped", "kl", "score", "raw_score"}


# ---- The formats ----


def _plain(columns: Columns) -> Columns:
    return columns


def _nothing(_: Columns) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Format:
    "How a trainer calls what a rollout has."

    name: str
    needs: frozenset[str]  # columns by which it is recognized
    columns: Mapping[str, str]  # what a rollout calls it -> what the file calls it
    prepare: Callable[[Columns], Columns] = _plain  # before the columns are looked up
    more: Callable[[Columns], dict[str, str]] = _nothing  # columns whose names vary


def _trl_numbers(columns: Columns) -> list[str]:
    "What may be a reward in trl's table: columns of numbers that are not its own."
    fixed = {"step", "prompt", "completion", "advantage"}
    return [
        name
        for name, column in columns.items()
        if name not in fixed and any(math.isfinite(number(x)) for x in column[:64])
    ]


def _trl_scores(columns: Columns) -> dict[str, str]:
    "trl names a column after each reward function, so the name alone does not tell."
    numbers = _trl_numbers(columns)
    rewards = [name for name in numbers if "reward" in name.lower()]
    picked = (
        ["reward"] if "reward" in numbers else rewards or (numbers if len(numbers) == 1 else [])
    )
    return dict(scores="+".join(picked)) if picked else {}


def _trl_unscored(columns: Columns, mapping: Mapping[str, str]) -> list[str]:
    "A note on the numbers that are not in the score, and how to add them."
    scored = _parts(columns, mapping["scores"]) if "scores" in mapping else []
    numbers = [name for name in _trl_numbers(columns) if name not in mapping.values()]
    unused = [name for name in numbers if name not in scored]
    every = "+".join(name for name in columns if name in {*scored, *unused})
    option = harmless(f"--columns {shlex.quote(f'scores={every}')}")
    if scored and unused:
        add = f"To add {'it' if len(unused) == 1 else 'them'}"
        return [f"Not in the score: {_names(unused)}. {add}: {option}"]
    none = f"No score: no name tells which of these columns are rewards: {_names(unused)}"
    return [f"{none}. Give those that are, such as {option}"] if unused else []


def _nemo_rows(columns: Columns) -> Columns:
    "NeMo-RL writes batches of one, and the messages of an episode in one column."
    only = lambda x: x[0] if _is_list(x) and len(x) == 1 else x
    columns = {name: [only(x) for x in column] for name, column in columns.items()}
    messages = [x if _is_list(x) else [x] for x in columns.pop("content")]
    columns["prompt"] = [list(x[:-1]) for x in messages]
    columns["response"] = [list(x[-1:]) for x in messages]
    return columns


FORMATS = (
    Format(
        "verl",
        frozenset({"input", "output", "score", "step"}),
        dict(prompt="input", response="output", scores="score", step="step"),
    ),
    Format(
        "trl",
        frozenset({"prompt", "completion"}),
        dict(prompt="prompt", response="completion", step="step"),
        more=_trl_scores,
    ),
    Format(
        "trl (completions of PPO)",
        frozenset({"query", "model response"}),
        dict(prompt="query", response="model response", scores="score", step="step"),
    ),
    Format(
        "OpenRLHF (batch inference)",
        frozenset({"input", "output"}),
        dict(prompt="input", response="output", scores="reward"),
    ),
    Format(
        "OpenRLHF (generated samples)",
        frozenset({"global_step", "text", "reward"}),
        dict(response="text", scores="reward", step="global_step"),
    ),
    Format(
        "NeMo-RL",
        frozenset({"content", "rewards"}),
        dict(
            prompt="prompt",
            response="response",
            scores="rewards",
            token_ids="token_ids",
            token_mask="token_loss_mask",
            logprobs="prev_logprobs",
            engine_logprobs="generation_logprobs",
            advantages="advantages",
        ),
        prepare=_nemo_rows,
    ),
    Format(
        "the names of a rollout",
        frozenset({"response"}),
        dict(zip(TARGETS, TARGETS)),
    ),
)


def recognized(columns: Columns) -> Format | None:
    "The first format whose columns are all there."
    return next((one for one in FORMATS if one.needs <= set(columns)), None)


# ---- Values, whatever a file holds ----


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple)) or (hasattr(x, "tolist") and getattr(x, "ndim", 0) > 0)


def _listed(x: Any) -> Any:
    "Arrays of numpy as lists, and a list that a CSV file holds as text."
    if isinstance(x, str) and x[:1] == "[":
        try:
            return json.loads(x)
        except (ValueError, RecursionError):
            return x
    return x.tolist() if hasattr(x, "tolist") else x


def number(x: Any) -> float:
    "A number or a truth value, also one written as text; nan for anything else."
    if isinstance(x, str) and x.strip().lower() in ("true", "false"):
        return float(x.strip().lower() == "true")
    if isinstance(x, str) or (hasattr(x, "__float__") and getattr(x, "ndim", 0) == 0):
        try:
            return float(x)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError):
            pass
    return math.nan


def _numbers(values: list[Any]) -> Tensor:
    "A list of numbers; nan for what is none."
    try:
        plain = np.array(values, dtype=np.float64)  # fast, and refuses what is no number
    except (TypeError, ValueError, OverflowError):
        plain = np.zeros((0, 0))
    return torch.tensor(plain if plain.ndim == 1 else [number(v) for v in values])


def _total(values: Iterable[Any]) -> float:
    "The sum of those that are numbers; nan where none is."
    known = [x for x in map(number, values) if not math.isnan(x)]
    return sum(known) if known else math.nan


def _is_missing(x: Any) -> bool:
    return x is None or x is pd.NA or (isinstance(x, float) and math.isnan(x))


def _json(x: Any) -> str:
    try:
        return json.dumps(x, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "…"


def _message(x: Any, named: bool, depth: int = 0) -> str:
    "One message of a chat."
    if not isinstance(x, Mapping) or "content" not in x:
        return text_of(x, depth)
    content = x["content"]
    parts = content if _is_list(content) else [content]
    texts = [p["text"] if isinstance(p, Mapping) and "text" in p else p for p in parts]
    calls: Any = x.get("tool_calls")
    if not _is_missing(calls) and not (_is_list(calls) and len(calls) == 0):
        texts.append(_json(_listed(calls)))
    said = "\n".join(text_of(text, depth) for text in texts)
    return f"{text_of(x.get('role', 'message'))}: {said}" if named else said


def text_of(x: Any, depth: int = 0) -> str:
    "Text of whatever stands for one: a string, a chat of messages, anything else as JSON."
    if isinstance(x, str):
        return x
    if _is_missing(x):
        return ""
    if depth > 8:
        return "…"
    if _is_list(x):
        return "\n\n".join(_message(one, len(x) > 1, depth + 1) for one in x)
    if isinstance(x, Mapping):
        return _message(x, False, depth + 1) if "content" in x else _json(x)
    return str(x)


def _cell(x: Any) -> Any:
    "A value of a column that is shown beside the prompt."
    if isinstance(x, (bool, int, float)):
        return x
    if isinstance(x, bytes):
        return f"{len(x)} bytes"
    if _is_list(x) and len(x) > 8 and not any(isinstance(one, (str, Mapping)) for one in x[:8]):
        return f"a list of {len(x)}"
    return text_of(x) if not hasattr(x, "item") or _is_list(x) else x.item()


def words_of(text: str) -> list[str]:
    "A text in words, each with the blanks before it, so that together they are the text."
    return re.findall(r"\s*\S+(?:\s+\Z)?|\s+\Z", text)


_ENDED = dict(stop=True, eos=True, true=True, length=False, max_tokens=False, false=False)


def _stopped(x: Any) -> bool | None:
    "Whether an episode stopped by itself: a truth value, 0 or 1, or a finish reason."
    if isinstance(x, str) and x.strip().lower() in _ENDED:
        return _ENDED[x.strip().lower()]
    value = number(x)
    return bool(value) if value in (0.0, 1.0) else None


# ---- Reading a table ----


def _of_rows(rows: Sequence[Any]) -> Columns:
    "Objects as columns; what one of them lacks is None. Raises ValueError on anything else."
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"row {i} is no object but of type {type(row).__name__}")
    names = dict.fromkeys(str(name) for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _read_lines(raw: bytes, notes: list[str]) -> Columns:
    "JSON lines; a last line that was cut off is left out, and said."
    lines, rows = raw.split(b"\n"), list[dict[str, Any]]()
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8", "replace"))
            if not isinstance(row, dict):
                raise ValueError("a row is an object")
        except (ValueError, RecursionError) as error:
            if i == len(lines) and rows:
                notes.append(f"Line {i}, the last, is cut off and left out.")
                break
            raise ValueError(f"line {i} is not JSON ({error})") from None
        rows.append(row)
    return _of_rows(rows)


def _read_json(raw: bytes, notes: list[str]) -> Columns:
    "One JSON text: a list of objects, or a table as Weights & Biases writes it; else JSON lines."
    try:
        whole = json.loads(raw.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return _read_lines(raw, notes)
    if isinstance(whole, dict) and {"columns", "data"} <= set(whole):
        return _of_rows([dict(zip(map(str, whole["columns"]), row)) for row in whole["data"]])
    return _of_rows(whole if isinstance(whole, list) else [whole])


def _read_csv(raw: bytes) -> pd.DataFrame:
    "A CSV file, as text. Raises ValueError where a row has more fields than the header."
    # without index_col=False, an additional field shifts all columns; object is text as it is
    how: dict[str, Any] = dict(
        index_col=False, keep_default_na=False, dtype=object, encoding_errors="replace"
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(io.BytesIO(raw), **how)
    except pd.errors.ParserWarning:
        width = pd.read_csv(io.BytesIO(raw), nrows=0, **how).shape[1]
        rows = pd.read_csv(io.BytesIO(raw), header=None, skiprows=1, **how)
        row = int(rows.iloc[:, width:].fillna("").ne("").any(axis=1).to_numpy().argmax())
        fix = "name every column there, and quote a field that has a comma in it"
        raise ValueError(
            f"row {row} has more fields than the header, which has {width}: {fix}"
        ) from None


def _typed(texts: list[str]) -> list[Any]:
    "Numbers, and None for an empty field, if all are written as Python shows them; else the texts."

    def shown(text: str) -> Any:
        value = number(text)
        forms = (int(value), value, bool(value)) if math.isfinite(value) else ()
        return next((form for form in forms if str(form) == text), text)

    values = [shown(text) if text else None for text in texts]
    return texts if any(isinstance(value, str) for value in values) else values


def _of_frame(frame: pd.DataFrame) -> Columns:
    return {str(name): frame.iloc[:, i].tolist() for i, name in enumerate(frame.columns)}


def read_table(path: Path, notes: list[str] | None = None) -> Columns:
    """A file of episodes as columns; what was left out is added to `notes`. Raises ValueError, with
    the file's name, where it is damaged, empty or of another kind."""
    notes, kind = [] if notes is None else notes, path.suffix.lower()
    if not path.exists():
        raise ValueError(f"there is no file {path}: give one that is there.")
    if kind not in SUFFIXES:
        raise ValueError(
            f"{path} is no table of episodes: give a file that ends in {', '.join(SUFFIXES)}, a "
            "folder of them, or the output_dir of a run with save_rollouts=True."
        )
    try:
        if kind == ".parquet":
            columns = _of_frame(pd.read_parquet(path))
        else:
            raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
            if bad := len(re.findall("\ufffd", raw.decode("utf-8", "replace"))):
                notes.append(f"Bytes that are no UTF-8 are shown as \ufffd, {bad} times.")
            if kind == ".csv":
                columns = {k: _typed(x) for k, x in _of_frame(_read_csv(raw)).items()}
            else:
                whole = kind == ".json" or raw.lstrip()[:1] == b"["
                columns = (_read_json if whole else _read_lines)(raw, notes)
    except (ValueError, OSError, TypeError, NotImplementedError) as error:
        short = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} is damaged ({short}): copy it again, or leave it out.") from None
    if not any(map(len, columns.values())):
        raise ValueError(f"{path} has no episodes: give a file with some.")
    return columns


def table_of(records: Any) -> Columns:
    "Columns of a list of objects, a DataFrame or a Dataset. Raises ValueError on anything else."
    if isinstance(records, pd.DataFrame):
        return _of_frame(records)
    if hasattr(records, "column_names") and hasattr(records, "to_dict"):  # datasets.Dataset
        return {str(name): list(column) for name, column in records.to_dict().items()}
    if isinstance(records, Mapping):
        raise ValueError("records is one object: give a list of them, one for each episode.")
    if not isinstance(records, Iterable):
        kinds = "a file, a list of objects, a DataFrame or a Dataset"
        raise ValueError(f"records is of type {type(records).__name__}: give {kinds}.")
    columns = _of_rows(list(records))
    if not columns:
        raise ValueError("records is empty: give one object for each episode.")
    return columns


def table_files(folder: Path, notes: list[str] | None = None) -> list[Path]:
    """The files of a folder of tables, or of its `completions`, in the order of their numbers. Of
    names that differ by more than numbers the most frequent; what was left out is added to `notes`.
    """
    every = [
        file
        for place in (folder, folder / "completions")
        for file in (sorted(place.iterdir()) if place.is_dir() else [])
        if file.is_file() and (file.suffix.lower() in TABLES or file.name.endswith(".table.json"))
    ]
    if not every:
        return []
    family = lambda file: re.sub(r"\d+", "#", file.name)
    of_place = [file for file in every if file.parent == every[0].parent]
    counts = Counter(map(family, of_place))  # beside a file an update lie others
    most = max(sorted(counts), key=lambda name: counts[name])
    files = [file for file in of_place if family(file) == most]
    files = sorted(files, key=lambda file: (file_number(file), file.name))
    others = [str(file.relative_to(folder)) for file in every if file not in files]
    if others and notes is not None:
        notes.append(
            f"Only files named like {quoted(files[0].name)} are read. Left out: "
            f"{counted(len(others), 'files')}, {_names(others, 3)}. To see one, open it by itself."
        )
    return files


def file_number(path: Path) -> int:
    "The last number of a file's name, 0 where it has none."
    found = re.findall(r"\d+", path.stem)
    return int(found[-1][-9:]) if found else 0


# ---- Which column is what ----


def quoted(x: Any) -> str:
    "A name or a value in a sentence: short, and without what would steer a terminal."
    return harmless(repr(x))[:80]


def parse_columns(words: Iterable[str]) -> dict[str, str]:
    "`prompt=question,response=answer` as a dictionary. Raises ValueError on a word without `=`."
    pairs = [pair for word in words for pair in word.split(",") if pair.strip()]
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(
                f"--columns has {pair!r}: write what it is, and the column that has it, such as "
                "prompt=question,response=answer."
            )
    split = [(name.strip(), column) for name, column in (pair.split("=", 1) for pair in pairs)]
    for name, many in Counter(name for name, _ in split).items():
        if many > 1:
            raise ValueError(
                f"--columns has {name} {many} times: give it one column, or a sum: a+b."
            )
    return dict(split)


def _names(names: Iterable[str], most: int = 60) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(quoted(name) for name in names[:most]) + more


def _parts(columns: Columns, column: str) -> list[str]:
    "The columns of which one is the sum: `a+b`, unless a column is called that."
    return [column] if column in columns or "+" not in column else column.split("+")


def mapping_of(
    columns: Columns,
    given: Mapping[str, str] | None = None,  # beside a format's own, or in its place; "": none
    source: str = "records",  # for errors
) -> tuple[str, Columns, dict[str, str]]:  # the format, the columns, and which of them is what
    """Which column is what. Raises ValueError where a name cannot be mapped, a column is not there,
    or nothing says which one is the response."""
    given = dict(given or {})
    for name in given:
        if name not in TARGETS:
            raise ValueError(
                f"--columns has {name!r}, which nothing is called.{did_you_mean(name, TARGETS)} "
                f"These can be mapped: {', '.join(TARGETS)}."
            )
    fits = recognized(columns)
    if fits is not None and (columns := fits.prepare(columns)) is not None:
        known = {**fits.columns, **fits.more(columns)}
    else:
        known = dict(zip(TARGETS, TARGETS))
    there = lambda column: all(part in columns for part in _parts(columns, column))
    given = {name: column if there(column) else column.strip() for name, column in given.items()}
    mapping = {name: column for name, column in known.items() if there(column)} | given
    mapping = {name: column for name, column in mapping.items() if column}
    for name, column in mapping.items():
        if not there(column) or (name != "scores" and column not in columns):
            raise ValueError(
                f"{source} has no column {quoted(column)} for {name}."
                f"{harmless(did_you_mean(column, list(columns)))} It has {_names(columns)}."
            )
    if not {"response", "tokens", "token_ids"} & set(mapping):
        raise ValueError(
            f"{source} is of no format known here: it has the columns {_names(columns)}. Say which "
            "of them is what, such as --columns prompt=question,response=answer,scores=reward. "
            f"These can be mapped: {', '.join(TARGETS)}."
        )
    own = bool(given) and (fits is None or fits.name.startswith("the names"))
    return ("your mapping" if own or fits is None else fits.name), columns, mapping


def _steps(columns: Columns, column: str, source: str) -> list[int]:
    "The update of each episode. Raises ValueError where one is no whole number."
    steps = []
    for i, x in enumerate(columns[column]):
        value = number(x)
        if not (math.isfinite(value) and value == int(value)):
            raise ValueError(
                f"{source}, row {i}: {quoted(column)} is {quoted(x)}, and an update is a whole "
                "number. Map another column to step, or none: --columns step="
            )
        steps.append(int(value))
    return steps


# ---- A table as rollouts ----


def _last_run(mask: Sequence[Any]) -> slice:
    "Where the last run of ones is: the answer, in a sequence of prompt, answer and padding."
    ones = [i for i, x in enumerate(mask) if number(x) > 0]
    start = end = ones[-1] + 1 if ones else 0
    while start and number(mask[start - 1]) > 0:
        start -= 1
    return slice(start, end)


def counted(n: int, things: str) -> str:
    "`1 word`, `2 words`."
    return f"{n} {things[:-1] if n == 1 else things}"


@dataclass
class _Update:
    "The episodes of one update while they become a rollout."

    columns: Columns
    rows: Sequence[int]
    mapping: Mapping[str, str]
    notes: list[str]
    first: int = 0  # number of its first episode: other files of the update may come before it

    def told(self, rows: Sequence[tuple[int, str]], most: int = 5) -> str:
        "Some of its episodes, each with what is wrong with it."
        told = ", ".join(f"{self.first + row} ({why})" for row, why in rows[:most])
        told = f"episode{'s' * (len(rows) > 1)} {told}"
        return told + (f" and {len(rows) - most} more" if len(rows) > most else "")

    def column(self, target: str) -> list[Any] | None:
        if target not in self.mapping:
            return None
        column = self.columns[self.mapping[target]]
        return [column[i] for i in self.rows]

    def texts(self, target: str) -> list[str]:
        return [text_of(x) for x in self.column(target) or []]

    def episode_numbers(self, target: str) -> Tensor | None:
        "A number an episode; None where there is none at all."
        if target not in self.mapping:
            return None
        parts = _parts(self.columns, self.mapping[target])
        values = [_total(self.columns[part][i] for part in parts) for i in self.rows]
        if len(parts) > 1:
            self.notes.append(f"{target} is the sum of {_names(parts)}, with weights of 1.")
        bad = [(row, "no number") for row, x in enumerate(values) if math.isnan(x)]
        if len(bad) == len(values):
            self.notes.append(
                f"{target}: the column {_names(parts)} holds no number, so none is shown."
            )
            return None
        if bad:
            self.notes.append(f"{target}: not in {self.told(bad)}.")
        numbers = torch.tensor(values, dtype=torch.float64).float()
        huge = [(row, f"{values[row]:g}") for row, x in enumerate(numbers.isinf()) if x]
        if huge:
            self.notes.append(f"{target}: infinite, or too large, in {self.told(huge)}.")
        return numbers

    def token_lists(self, target: str, spans: Sequence[slice] | None) -> list[Any]:
        lists = [_listed(x) for x in self.column(target) or []]
        cut = lambda x, span: x[span] if isinstance(x, list) else x
        return lists if spans is None else [cut(x, span) for x, span in zip(lists, spans)]

    def signal(
        self, target: str, lengths: Sequence[int], spans: Sequence[slice] | None, unit: str
    ) -> Tensor | None:
        "A number a token [B, T], nan where an episode has another count of them."
        if target not in self.mapping:
            return None
        x, bad = torch.zeros(len(lengths), max(1, *lengths)), []
        for row, values in enumerate(self.token_lists(target, spans)):
            n = lengths[row]
            if isinstance(values, list) and len(values) == n:
                x[row, :n] = _numbers(values)
            else:
                x[row, :n] = math.nan
                held = counted(len(values), "numbers") if isinstance(values, list) else "no list"
                bad.append((row, f"{held} for {counted(n, unit)}"))
        if bad:
            self.notes.append(f"{target}: not shown in {self.told(bad)}.")
        by_chance = unit == "words" and len(bad) > len(lengths) / 2
        if by_chance and len(bad) < len(lengths):
            self.notes.append(f"{target}: it fits the others by chance, so it is shown in none.")
        return None if by_chance or len(bad) == len(lengths) else x

    def others(self) -> dict[str, list[Any]]:
        "Columns that nothing was mapped to."
        used = {part for x in self.mapping.values() for part in _parts(self.columns, x)}
        single = [x for x in self.mapping.values() if len(_parts(self.columns, x)) == 1]
        shown = [name for name in self.columns if name not in used or name not in single]
        free = lambda name: f"{name} (of the file)" if name in TAKEN else name
        return {free(name): [_cell(self.columns[name][i]) for i in self.rows] for name in shown}


def _stops(update: _Update) -> Tensor | None:
    "Which episodes stopped by themselves; None where that is not known of each."
    found = [_stopped(x) for x in update.column("stopped") or []]
    if not found or None in found:
        if bad := [(row, "neither") for row, x in enumerate(found) if x is None]:
            update.notes.append(f"stopped: not known of {update.told(bad)}, so of none.")
        return None
    return torch.tensor(found)


def _token_ids(update: _Update, spans: Sequence[slice] | None) -> list[Any]:
    "The token ids of each episode; -1 for what is none, and a note."
    bad, lists = [], update.token_lists("token_ids", spans)
    for row, given in enumerate(lists):
        if isinstance(given, list):
            values = [number(x) for x in given]
            ids = [int(x) if 0 <= x < 2**31 and x == int(x) else -1 for x in values]
            lists[row] = ids
            if -1 in ids:
                bad.append((row, quoted(given[ids.index(-1)])))
    if bad:
        column = quoted(update.mapping["token_ids"])
        update.notes.append(f"token_ids: {column} holds what is no token id in {update.told(bad)}.")
    return lists


def _tokens(
    update: _Update, responses: list[str], spans: Sequence[slice] | None, tokenizer: Any
) -> tuple[list[list[str]], list[Any], str]:
    "The tokens of each episode, their ids where the file has them, and what they are."
    ids = _token_ids(update, spans)
    texts = update.token_lists("tokens", spans)
    if ids and tokenizer is not None and not texts:
        given = {i for row in ids if isinstance(row, list) for i in row}
        known = {i: str(tokenizer.decode([i])) if i >= 0 else "\ufffd" for i in given}
        strange = [i for i, text in known.items() if not text and i >= len(tokenizer)]
        if strange:
            update.notes.append(f"token_ids: {strange[0]} is no token of the tokenizer: no text.")
        texts = [[known[i] for i in row] if isinstance(row, list) else None for row in ids]
    if not texts:
        if ids and set(SIGNALS) & set(update.mapping):
            update.notes.append("Its token ids become tokens with a tokenizer: --tokenizer NAME.")
        return [words_of(text) for text in responses], [], "words"
    none = [(row, "its words are") for row, x in enumerate(texts) if not isinstance(x, list)]
    if none:
        update.notes.append(f"tokens: not a list in {update.told(none)}.")
    tokens = [
        [text_of(t) for t in x] if isinstance(x, list) else words_of(text)
        for x, text in zip(texts, responses)
    ]
    return tokens, ids, "tokens"


def _padded_ids(tokens: Sequence[Sequence[str]], ids: Sequence[Any], width: int) -> Tensor:
    "Token ids [B, T]; where the file has none, the number of each word of this update."
    words = [str.strip(word) for row in tokens for word in row]
    numbers = {word: i for i, word in enumerate(dict.fromkeys(words))}
    numbered = iter([numbers[word] for word in words])
    out = torch.zeros(len(tokens), width, dtype=torch.long)
    for row, its in enumerate(tokens):
        counted = list(islice(numbered, len(its)))
        own = ids[row] if ids and isinstance(ids[row], list) else []
        given = own if len(own) == len(its) and -1 not in own else counted
        out[row, : len(its)] = torch.tensor(given, dtype=torch.long)
    return out


def rollout_from(
    columns: Columns,
    rows: Sequence[int],  # its episodes
    mapping: Mapping[str, str],  # what a rollout calls it -> a column
    update: int = 0,
    notes: Sequence[str] = (),  # what was left out before
    tokenizer: Any = None,  # with it, token ids become tokens
    first: int = 0,  # number of its first episode in the notes
) -> Rollout:
    """Some episodes of a table as a rollout. What the table lacks is None there; a text without
    tokens is cut into words. `info["notes"]` says what did not fit, and where."""
    its = _Update(columns, rows, mapping, list(notes), first)
    responses, prompts = its.texts("response"), its.texts("prompt")
    masks = its.token_lists("token_mask", None)
    spans = [_last_run(x if isinstance(x, list) else []) for x in masks] or None
    blank = responses or [""] * len(rows)
    tokens, ids, unit = _tokens(its, blank, spans, tokenizer)
    lengths = [len(row) for row in tokens]
    width = max(1, *lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    signals: dict[str, Any] = {name: its.signal(name, lengths, spans, unit) for name in SIGNALS}
    if signals["kl"] is None and None not in (
        both := [signals["logprobs"], signals["ref_logprobs"]]
    ):
        signals["kl"] = both[0] - both[1]
        its.notes.append("kl is logprobs less ref_logprobs (k1).")
    scores: Any = its.episode_numbers("scores")
    raw: Any = its.episode_numbers("raw_scores")
    stopped: Any = _stops(its)
    none = torch.zeros(len(rows), 0, dtype=torch.long)
    absent = [name for name, x in signals.items() if x is None]
    absent += ["scores"] * (scores is None) + ["stopped"] * (stopped is None)
    its.notes.append(f"Not in this file: {', '.join(absent)}." if absent else "Nothing is missing.")
    return Rollout(
        none,
        none.bool(),
        _padded_ids(tokens, ids, width),
        mask,
        stopped,
        **signals,
        scores=scores,
        raw_scores=raw,
        prompts=prompts,
        responses=responses or ["".join(row) for row in tokens],
        tokens=tokens,
        columns=its.others(),
        info=dict(update=update, unit=unit, notes=its.notes),
    )


# ---- A file, a folder or records as a run ----


def is_foreign(source: Any) -> bool:
    "Records, a file, or a folder of tables that is no run of this package."
    if not isinstance(source, (str, Path)):
        return True
    path = Path(source)
    own = any((path / name).exists() for name in ("metrics.jsonl", "settings.json", "ppo"))
    if path.is_dir():
        return not own and not rollout_files(path) and bool(table_files(path))
    return path.exists() or path.suffix.lower() in SUFFIXES


def load_tokenizer(name: str) -> Any:
    "A tokenizer by name or folder. Raises OSError or ValueError, in one line, where there is none."
    from transformers import AutoTokenizer

    with loading(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(name)


def _notes_of_files(notes: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    "The notes on each file of an update; what does not hold for all of them names its files."
    files: dict[str, list[str]] = {}
    for some, name in zip(notes, names):
        for note in dict.fromkeys(some):
            files.setdefault(note, []).append(name)
    return [
        note if len(its) == len(names) else f"{_names(its, 3)}: {note}"
        for note, its in files.items()
    ]


def _is_young(path: Path, fresh: float = 60.0) -> bool:
    return time.time() - path.stat().st_mtime < fresh


class ForeignRun:
    """Updates of a file, a folder with a file an update, or records, as `RunFolder` has those of a
    run. Raises ValueError where they cannot be read."""

    def __init__(
        self,
        source: Any,  # path of a file or folder; or a list of objects, a DataFrame, a Dataset
        columns: Mapping[str, str] | None = None,  # what a rollout calls it -> a column
        tokenizer: Any = None,  # a tokenizer, or the name of one
    ):
        self.of_file = isinstance(source, (str, Path))
        self.records = list(source) if isinstance(source, Iterator) else source
        self.path = Path(source if self.of_file else "records")
        self.columns = columns
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.refresh()

    def refresh(self) -> None:
        "Read it again."
        self._rollouts: dict[int, Rollout] = {}
        self._numbers: dict[int, pd.DataFrame] = {}
        self._parts: dict[int, list[tuple[Columns, list[int], dict[str, str], list[str], str]]] = {}
        self._left_out: list[str] = []  # notes on files that are not read
        if not self.of_file:
            self._take(table_of(self.records), 0, "records", [])
        else:
            files = table_files(self.path, self._left_out) if self.path.is_dir() else [self.path]
            for file in files:
                notes: list[str] = []
                try:
                    columns = read_table(file, notes)
                except ValueError:
                    if len(files) > 1 and _is_young(file):
                        self._left_out.append(
                            f"{quoted(file.name)} cannot be read and is left out: it may still be "
                            "being written. Open it again later."
                        )
                        continue
                    raise
                self._take(columns, file_number(file), str(file), notes)
            if not self._parts:
                kinds = ", ".join(TABLES)
                left_out = " ".join(["", *self._left_out])
                raise ValueError(
                    f"{self.path} has no file of episodes: give some of {kinds}.{left_out}"
                )
        self._log: pd.DataFrame | None = None

    def _take(self, columns: Columns, update: int, source: str, notes: list[str]) -> None:
        "Add one table."
        name, columns, mapping = mapping_of(columns, self.columns, source)
        if name == "trl" and "scores" not in (self.columns or {}):
            notes = [*notes, *_trl_unscored(columns, mapping)]
        rows: dict[int, list[int]] = {}
        count = len(next(iter(columns.values())))
        steps = _steps(columns, mapping["step"], source) if "step" in mapping else [update] * count
        for i, step in enumerate(steps):
            rows.setdefault(step, []).append(i)
        read = f"Read as {name}: " + ", ".join(f"{k} from {quoted(v)}" for k, v in mapping.items())
        for step, some in rows.items():
            part = (columns, some, mapping, [f"{read}.", *notes], Path(source).name)
            self._parts.setdefault(step, []).append(part)

    @property
    def counted(self) -> str:
        "Words, where neither tokens nor a tokenizer for their ids are there."
        found = {
            k for parts in self._parts.values() for _, _, mapping, *_ in parts for k in mapping
        }
        known = "tokens" in found or (self.tokenizer is not None and "token_ids" in found)
        return "tokens" if known else "words"

    @property
    def files(self) -> dict[int, Any]:
        "The updates, in order."
        return dict.fromkeys(sorted(self._parts))

    def rollout(self, update: int) -> Rollout:
        "One update; the last four are kept."
        if update not in self._rollouts:
            parts, first = list[Rollout](), 0
            for columns, rows, mapping, notes, _ in self._parts[update]:
                how = (mapping, update, notes, self.tokenizer, first)
                parts.append(rollout_from(columns, rows, *how))
                first += len(rows)
            whole, names = merged(parts), [name for *_, name in self._parts[update]]
            told = _notes_of_files([r.info["notes"] for r in parts], names) + self._left_out
            if whole.stopped is None and any(r.stopped is not None for r in parts):
                told.append("stopped: not known of every episode, so of none.")
            self._rollouts[update] = whole.with_(info={**whole.info, "notes": told})
            for old in list(self._rollouts)[:-4]:
                del self._rollouts[old]
        return self._rollouts[update]

    def numbers(self, updates: Iterable[int] | None = None) -> pd.DataFrame:
        "Length, score, KL and repetition of each episode of some updates, or of all."
        frames = []
        for update in self.files if updates is None else updates:
            if update not in self._numbers:
                frame = episode_numbers(vars(self.rollout(update)))
                self._numbers[update] = frame.assign(update=update, episode=range(len(frame)))
            frames.append(self._numbers[update])
        return pd.concat(frames, ignore_index=True)

    @property
    def log(self) -> pd.DataFrame:
        "Means of each update, as a trainer would have logged them."
        if self._log is None:
            means = self.numbers().groupby("update").mean(numeric_only=True).reset_index()
            if "raw_score" not in means and "score" in means:
                means["raw_score"] = means["score"]
            self._log = means.drop(columns=["episode", "score"], errors="ignore").rename(
                columns=MEANS
            )
        return self._log

    def again(self, prompt: str, most: int = 8) -> list[tuple[int, int]]:
        "Update and row of each time that a prompt was sampled, one an update."
        hits = []
        for update in self.files:
            row = 0
            for columns, rows, mapping, *_ in self._parts[update]:
                texts = columns[mapping["prompt"]] if "prompt" in mapping else []
                found = next(
                    (i for i, k in enumerate(rows) if texts and text_of(texts[k]) == prompt), None
                )
                if found is not None:
                    hits.append((update, row + found))
                    break
                row += len(rows)
        return [hits[i] for i in spread(len(hits), most)]

    def completions(self) -> dict[str, list[dict[str, str]]]:
        "There are no tables of completions beside a table of episodes."
        return {}

    def completed(self, prompt: str) -> list[dict[str, str]]:
        "The same for one prompt."
        return []
