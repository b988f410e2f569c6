"""Rollouts that other trainers wrote: a table of episodes, and a mapping of its columns.

`nbs/reference/59_other_trainers.ipynb` says which versions wrote these formats, and how to get a
file of each."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.loading import pretrained_tokenizer
from rlhf_nb.base.terminal import harmless
from rlhf_nb.rollout import SIGNALS, Rollout, token_texts
from rlhf_nb.ui.run_files import MEANS, episode_numbers, rollout_files, spread

Row = dict[str, Any]  # an episode, by the names of a file's columns or of a rollout

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
TABLES = tuple(suffix for suffix in SUFFIXES if suffix != ".json")  # of a folder
TOKEN = ("tokens", "token_ids", "token_mask", *SIGNALS)  # a list an episode
TARGETS = ("prompt", "response", "step", "stopped", "scores", "raw_scores", *TOKEN)
TAKEN = {"episode", "prompt", "response", "length", "stopped", "kl", "score", "raw_score"}


# ---- The formats ----


@dataclass(frozen=True)
class Format:
    "How a trainer calls what a rollout has."

    name: str
    needs: frozenset[str]  # columns by which it is recognized
    columns: Mapping[str, str]  # what a rollout calls it -> what the file calls it


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
    ),
    Format("the names of a rollout", frozenset({"response"}), dict(zip(TARGETS, TARGETS))),
)


def recognized(rows: Sequence[Row]) -> Format | None:
    "The first format whose columns are all there."
    names = set(_columns(rows))
    return next((one for one in FORMATS if one.needs <= names), None)


def _nemo_row(row: Row) -> Row:
    "NeMo-RL writes batches of one, and the messages of an episode in one column."
    plain = {name: _plain(x) for name, x in row.items()}
    only = {k: x[0] if isinstance(x, list) and len(x) == 1 else x for k, x in plain.items()}
    messages = _plain(only.pop("content", None))
    messages = messages if isinstance(messages, list) else [messages]
    return only | dict(prompt=messages[:-1], response=messages[-1:])


def _trl_scores(rows: Sequence[Row], given: Mapping[str, str]) -> tuple[str, list[str]]:
    """The columns of rewards in trl's table, which names one after each reward function, and a note
    on other columns that may be rewards."""
    own = {"step", "prompt", "completion", "advantage"}
    own |= {column for name, column in given.items() if name != "scores"}
    numbers = [
        name
        for name in _columns(rows)
        if name not in own and any(math.isfinite(number(row.get(name))) for row in rows[:64])
    ]
    rewards = [name for name in numbers if "reward" in name.lower()]
    rewards = rewards or (numbers if len(numbers) == 1 else [])
    scores = given.get("scores", "reward" if "reward" in rewards else "+".join(rewards))
    unused = [name for name in numbers if name not in (scores, *scores.split("+"))]
    if not unused or given.get("scores") == "":
        return scores, []
    every = [x for x in numbers if x in (scores, *scores.split("+"), *unused)]
    option = harmless(f"--columns {shlex.quote('scores=' + '+'.join(every))}")
    why = "Not in the score" if scores else "No score: no name tells which columns are rewards"
    return scores, [f"{why}: {_names(unused)}. To add all: {option}"]


# ---- Values, whatever a file holds ----


def _plain(x: Any) -> Any:
    "Arrays and numbers of numpy as those of Python."
    x = x.tolist() if hasattr(x, "tolist") else x
    return list(x) if isinstance(x, tuple) else x


def _listed(x: Any) -> Any:
    "A list, also one that a CSV file holds as text."
    if isinstance(x, str) and x[:1] == "[":
        try:
            return json.loads(x)
        except (ValueError, RecursionError):
            return x
    return _plain(x)


def number(x: Any) -> float:
    "A number or a truth value, also one written as text; nan for anything else."
    x = _plain(x)
    if isinstance(x, str):
        x = dict(true=1.0, false=0.0).get(x.strip().lower(), x)
    try:
        return float(x)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return math.nan


def _numbers(values: list[Any]) -> Tensor:
    "A list of numbers; nan for what is none."
    try:
        plain = np.array(values, dtype=np.float64)  # fast, and refuses what is no number
    except (TypeError, ValueError, OverflowError):
        plain = np.zeros((0, 0))
    return torch.tensor(plain if plain.ndim == 1 else [number(v) for v in values])


def _is_missing(x: Any) -> bool:
    return x is None or x is pd.NA or (isinstance(x, float) and math.isnan(x))


def _json(x: Any) -> str:
    try:
        return json.dumps(x, default=_plain, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        return "…"


def _message(x: Any, named: bool, depth: int) -> str:
    "One message of a chat."
    if not isinstance(x, Mapping) or "content" not in x:
        return text_of(x, depth)
    content, calls = _plain(x["content"]), _plain(x.get("tool_calls"))
    parts = content if isinstance(content, list) else [content]
    texts = [p["text"] if isinstance(p, Mapping) and "text" in p else p for p in parts]
    if calls and not _is_missing(calls):
        texts.append(_json(calls))
    said = "\n".join(text_of(text, depth) for text in texts)
    return f"{text_of(x.get('role', 'message'))}: {said}" if named else said


def text_of(x: Any, depth: int = 0) -> str:
    "Text of whatever stands for one: a string, a chat of messages, anything else as JSON."
    x = _plain(x)
    if isinstance(x, str) or _is_missing(x):
        return x if isinstance(x, str) else ""
    if depth > 8:
        return "…"
    if isinstance(x, list):
        return "\n\n".join(_message(one, len(x) > 1, depth + 1) for one in x)
    if isinstance(x, Mapping):
        return _message(x, False, depth + 1) if "content" in x else _json(x)
    return str(x)


def _cell(x: Any) -> Any:
    "A value of a column that is shown beside the prompt."
    x = _plain(x)
    if isinstance(x, bytes):
        return f"{len(x)} bytes"
    if isinstance(x, list) and len(x) > 8 and not any(isinstance(i, (str, Mapping)) for i in x[:8]):
        return f"a list of {len(x)}"
    return x if x is None or isinstance(x, (bool, int, float)) else text_of(x)


def words_of(text: str) -> list[str]:
    "A text in words, each with the blanks before it, so that together they are the text."
    return re.findall(r"\s*\S+(?:\s+\Z)?|\s+\Z", text)


def _stopped(x: Any) -> bool | None:
    "Whether an episode stopped by itself: a truth value, 0 or 1, or a finish reason."
    reasons = dict(stop=1.0, eos=1.0, length=0.0, max_tokens=0.0)
    value = reasons.get(x.strip().lower()) if isinstance(x, str) else None
    value = number(x) if value is None else value
    return bool(value) if value in (0.0, 1.0) else None


def quoted(x: Any) -> str:
    "A name or a value in a sentence: short, and without what would steer a terminal."
    return harmless(repr(x))[:80]


def _names(names: Iterable[str], most: int = 60) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(quoted(name) for name in names[:most]) + more


# ---- Reading a table ----


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _checked(rows: Iterable[Any]) -> list[Row]:
    "Objects with names that are texts. Raises ValueError on anything else."
    rows = list(rows)
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"row {i} is no object but of type {type(row).__name__}")
    return [{str(name): x for name, x in row.items()} for row in rows]


def _json_rows(raw: bytes, notes: list[str]) -> list[Row]:
    """One JSON text, which may be a table of Weights & Biases; else JSON lines, where a last line
    that was cut off is left out with a note."""
    try:
        whole = json.loads(raw.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return _json_lines(raw.split(b"\n"), notes)
    if isinstance(whole, dict) and {"columns", "data"} <= set(whole):
        whole = [dict(zip(map(str, whole["columns"]), row)) for row in whole["data"]]
    return _checked(whole if isinstance(whole, list) else [whole])


def _json_lines(lines: Sequence[bytes], notes: list[str]) -> list[Row]:
    rows: list[Row] = []
    for i, line in enumerate(lines, 1):
        try:
            rows += _checked([json.loads(line.decode("utf-8", "replace"))] if line.strip() else [])
        except (ValueError, RecursionError) as error:
            if i < len(lines) or not rows:
                raise ValueError(f"line {i} is not JSON ({error})") from None
            notes.append(f"Line {i}, the last, is cut off and left out.")
    return rows


def _csv_rows(text: str) -> list[Row]:
    """The rows of a CSV file, as texts. Raises ValueError without a header, or where a row has more
    fields."""
    limit = csv.field_size_limit(2**31 - 1)  # an answer may be long
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        if not reader.fieldnames:
            raise ValueError("it has no header")
        lines = list(reader)
    except csv.Error as error:
        raise ValueError(str(error)) from None
    finally:
        csv.field_size_limit(limit)
    for i, line in enumerate(lines):
        if any(line.pop(None, [])):  # type: ignore[call-overload]
            raise ValueError(
                f"row {i} has more fields than the header, which has {len(line)}: name every "
                "column there, and quote a field that has a comma in it"
            )
    return [{name: x or None for name, x in line.items()} for line in lines]


def _frame_rows(frame: pd.DataFrame) -> list[Row]:
    columns = [frame.iloc[:, i].tolist() for i in range(frame.shape[1])]
    return [dict(zip(map(str, frame.columns), row)) for row in zip(*columns)]


def read_table(path: Path, notes: list[str] | None = None) -> list[Row]:
    """A file of episodes as rows; what was left out is added to `notes`. Raises ValueError, with
    the file's name, where it is damaged, empty or of another kind. Nothing is ever unpickled."""
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
            rows = _frame_rows(pd.read_parquet(path))
        else:
            raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
            if bad := raw.decode("utf-8", "replace").count("\ufffd"):
                notes.append(f"Bytes that are no UTF-8 are shown as \ufffd, {bad} times.")
            is_csv = kind == ".csv"
            rows = _csv_rows(raw.decode("utf-8", "replace")) if is_csv else _json_rows(raw, notes)
    except (ValueError, OSError, TypeError, NotImplementedError) as error:
        short = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} is damaged ({short}): copy it again, or leave it out.") from None
    if not rows:
        raise ValueError(f"{path} has no episodes: give a file with some.")
    return rows


def table_of(records: Any) -> list[Row]:
    "Rows of a list of objects, a DataFrame or a Dataset. Raises ValueError on anything else."
    if isinstance(records, Mapping):
        raise ValueError("records is one object: give a list of them, one for each episode.")
    if not isinstance(records, Iterable):
        kinds = "a file, a list of objects, a DataFrame or a Dataset"
        raise ValueError(f"records is of type {type(records).__name__}: give {kinds}.")
    rows = _frame_rows(records) if isinstance(records, pd.DataFrame) else _checked(records)
    if not rows:
        raise ValueError("records is empty: give one object for each episode.")
    return rows


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
    family = lambda file: (file.parent, re.sub(r"\d+", "#", file.name))
    counts = Counter(family(file) for file in every if file.parent == every[0].parent)
    most = max(sorted(counts), key=lambda name: counts[name])
    files = [file for file in every if family(file) == most]
    others = [str(file.relative_to(folder)) for file in every if file not in files]
    files.sort(key=lambda file: (file_number(file), file.name))
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


def counted(n: int, things: str) -> str:
    "`1 word`, `2 words`."
    return f"{n} {things[:-1] if n == 1 else things}"


# ---- Which column is what ----


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


def mapping_of(
    rows: Sequence[Row],
    given: Mapping[str, str] | None = None,  # beside a format's own, or in its place; "": none
    source: str = "records",  # for errors
    notes: list[str] | None = None,  # what one should know of the mapping is added
) -> tuple[str, list[Row], dict[str, str]]:  # the format, the rows, and which column is what
    """Which column is what. Raises ValueError where a name cannot be mapped, a column is not there,
    or nothing says which one is the response."""
    given, notes = dict(given or {}), [] if notes is None else notes
    for name in given:
        if name not in TARGETS:
            raise ValueError(
                f"--columns has {name!r}, which nothing is called.{did_you_mean(name, TARGETS)} "
                f"These can be mapped: {', '.join(TARGETS)}."
            )
    fits, rows = recognized(rows), list(rows)
    known = dict(fits.columns if fits else zip(TARGETS, TARGETS))
    if fits and fits.name == "NeMo-RL":
        rows = [_nemo_row(row) for row in rows]
    columns = _columns(rows)
    there = lambda column: all(part in columns for part in _parts(columns, column))
    given = {name: column if there(column) else column.strip() for name, column in given.items()}
    if fits and fits.name == "trl":
        known["scores"], more = _trl_scores(rows, given)
        notes += more
    mapping = {name: column for name, column in known.items() if there(column)} | given
    mapping = {name: column for name, column in mapping.items() if column}
    for name, column in mapping.items():
        if not there(column) or (name != "scores" and column not in columns):
            raise ValueError(
                f"{source} has no column {quoted(column)} for {name}."
                f"{harmless(did_you_mean(column, columns))} It has {_names(columns)}."
            )
    if not {"response", "tokens", "token_ids"} & set(mapping):
        raise ValueError(
            f"{source} is of no format known here: it has the columns {_names(columns)}. Say which "
            "of them is what, such as --columns prompt=question,response=answer,scores=reward. "
            f"These can be mapped: {', '.join(TARGETS)}."
        )
    if len(parts := _parts(columns, mapping.get("scores", ""))) > 1:
        notes.append(f"scores is the sum of {_names(parts)}, with weights of 1.")
    own = fits is None or (bool(given) and fits.name.startswith("the names"))
    read = "your mapping" if own or fits is None else fits.name
    notes.append(
        f"Read as {read}: {', '.join(f'{k} from {quoted(v)}' for k, v in mapping.items())}."
    )
    return read, rows, mapping


def _parts(columns: Sequence[str], column: str) -> list[str]:
    "The columns of which one is the sum: `a+b`, unless a column is called that."
    return [column] if column in columns or "+" not in column else column.split("+")


@dataclass(frozen=True)
class Episode:
    "A row, by the names of a rollout; and its columns that nothing was mapped to."

    values: Row
    others: Row


def episode_of(row: Row, mapping: Mapping[str, str]) -> Episode:
    "A row by a mapping of columns; lists of numbers end with the answer where there is a mask."
    values = {name: row.get(column) for name, column in mapping.items()}
    if "scores" in mapping and mapping["scores"] not in row:
        parts = [number(row.get(part)) for part in mapping["scores"].split("+")]
        known = [x for x in parts if not math.isnan(x)]
        values["scores"] = sum(known) if known else None
    if "token_mask" in values:
        span = _last_run(_listed(values.pop("token_mask")))
        for name in {*TOKEN} & {*values}:
            x = _listed(values[name])
            values[name] = x[span] if isinstance(x, list) else x
    return Episode(values, {k: x for k, x in row.items() if k not in mapping.values()})


def _last_run(mask: Any) -> slice:
    "Where the last run of ones is: the answer, in a sequence of prompt, answer and padding."
    mask = mask if isinstance(mask, list) else []
    ones = [i for i, x in enumerate(mask) if number(x) > 0]
    start = end = ones[-1] + 1 if ones else 0
    while start and number(mask[start - 1]) > 0:
        start -= 1
    return slice(start, end)


# ---- Episodes as a rollout ----


def _told(bad: Sequence[tuple[int, str]], most: int = 5) -> str:
    "Some episodes, each with what is wrong with it."
    told = ", ".join(f"{row} ({why})" for row, why in bad[:most])
    return f"episode{'s' * (len(bad) > 1)} {told}" + f" and {len(bad) - most} more" * (
        len(bad) > most
    )


def _scores(values: Sequence[Any], target: str, notes: list[str]) -> Tensor | None:
    "A number an episode; None where there is none at all."
    numbers = torch.tensor([number(x) for x in values], dtype=torch.float64)
    bad = [(row, "no number") for row, x in enumerate(numbers.isnan()) if x]
    if len(bad) == len(values):
        notes.append(f"{target}: its column holds no number, so none is shown.")
        return None
    if bad:
        notes.append(f"{target}: not in {_told(bad)}.")
    huge = [(row, f"{numbers[row]:g}") for row, x in enumerate(numbers.float().isinf()) if x]
    if huge:
        notes.append(f"{target}: infinite, or too large, in {_told(huge)}.")
    return numbers.float()


def _stops(values: Sequence[Any], notes: list[str]) -> Tensor | None:
    "Which episodes stopped by themselves; None where that is not known of each."
    found = [_stopped(_plain(x)) for x in values]
    if bad := [(row, "neither") for row, x in enumerate(found) if x is None]:
        notes.append(f"stopped: not known of {_told(bad)}, so of none.")
        return None
    return torch.tensor(found)


def _signal(
    values: Sequence[Any], target: str, lengths: Sequence[int], unit: str, notes: list[str]
) -> Tensor | None:
    """Numbers [B, T]; nan where a list does not fit its episode. None where none fits, or where
    words and not tokens are counted and most lists do not fit: the others do by chance."""
    x, bad = torch.zeros(len(lengths), max(1, *lengths)), []
    for row, (given, n) in enumerate(zip(map(_listed, values), lengths)):
        fits = isinstance(given, list) and len(given) == n
        x[row, :n] = _numbers(given) if fits else math.nan
        if not fits:
            held = counted(len(given), "numbers") if isinstance(given, list) else "no list"
            bad.append((row, f"{held} for {counted(n, unit)}"))
    if bad:
        notes.append(f"{target}: not shown in {_told(bad)}.")
    by_chance = unit == "words" and len(bad) > len(lengths) / 2
    if by_chance and len(bad) < len(lengths):
        notes.append(f"{target}: it fits the others by chance, so it is shown in none.")
    return None if by_chance or len(bad) == len(lengths) else x


def _token_ids(values: Sequence[Any], notes: list[str]) -> list[list[int] | None]:
    "The token ids of each episode; -1 for what is none, and a note."
    ids, bad = list[list[int] | None](), []
    for row, given in enumerate(map(_listed, values)):
        given = given if isinstance(given, list) else None
        as_id = lambda x: int(x) if 0 <= x < 2**31 and x == int(x) else -1
        ids.append(None if given is None else [as_id(number(x)) for x in given])
        if given is not None and -1 in (its := ids[-1] or []):
            bad.append((row, quoted(given[its.index(-1)])))
    if bad:
        notes.append(f"token_ids: its column holds what is no token id in {_told(bad)}.")
    return ids


def _decoded(ids: Sequence[list[int] | None], tokenizer: Any, notes: list[str]) -> list[Any]:
    "Token ids as texts."
    given = {i for row in ids for i in row or []}
    known = {i: str(tokenizer.decode([i])) if i >= 0 else "\ufffd" for i in given}
    strange = [i for i, text in known.items() if not text and i >= len(tokenizer)]
    if strange:
        notes.append(f"token_ids: {strange[0]} is no token of the tokenizer: no text.")
    alone = lambda row: [known[i] for i in row]  # where one is no token
    texts = lambda row: alone(row) if min(row, default=0) < 0 else token_texts(tokenizer, row)
    return [None if row is None else texts(row) for row in ids]


def rollout_from(
    episodes: Sequence[Episode],
    update: int = 0,
    notes: Sequence[str] = (),  # what was left out before
    tokenizer: Any = None,  # with it, token ids become tokens
) -> Rollout:
    """Some episodes as a rollout. What none of them has is None there; a text without tokens is cut
    into words. `info["notes"]` says what did not fit, and where."""
    notes, targets = list(notes), {name for one in episodes for name in one.values}
    column = lambda name: [one.values.get(name) for one in episodes] if name in targets else []
    responses = [text_of(one.values.get("response")) for one in episodes]
    ids, texts = _token_ids(column("token_ids"), notes), list(map(_listed, column("tokens")))
    if ids and tokenizer is not None and not texts:
        texts = _decoded(ids, tokenizer, notes)
    unit = "tokens" if texts else "words"
    if ids and not texts and {*SIGNALS} & targets:
        notes.append("Its token ids become tokens with a tokenizer: --tokenizer NAME.")
    if none := [(i, "its words are") for i, x in enumerate(texts) if not isinstance(x, list)]:
        notes.append(f"tokens: not a list in {_told(none)}.")
    tokens = [
        list(map(text_of, x)) if isinstance(x, list) else words_of(text)
        for x, text in zip(texts or [None] * len(episodes), responses)
    ]
    lengths = [len(row) for row in tokens]
    mask = torch.arange(max(1, *lengths)) < torch.tensor(lengths)[:, None]
    signals: dict[str, Any] = {
        name: _signal(column(name), name, lengths, unit, notes) if name in targets else None
        for name in SIGNALS
    }
    logprobs, ref_logprobs = signals["logprobs"], signals["ref_logprobs"]
    if signals["kl"] is None and logprobs is not None and ref_logprobs is not None:
        signals["kl"] = logprobs - ref_logprobs
        notes.append("kl is logprobs less ref_logprobs (k1).")
    scores, raw = (
        _scores(column(name), name, notes) if name in targets else None
        for name in ("scores", "raw_scores")
    )
    stopped = _stops(column("stopped"), notes) if "stopped" in targets else None
    absent = [
        name for name, x in (signals | dict(scores=scores, stopped=stopped)).items() if x is None
    ]
    notes.append(f"Not in this file: {', '.join(absent)}." if absent else "Nothing is missing.")
    others = dict.fromkeys(name for one in episodes for name in one.others)
    none_there: Any = torch.zeros(len(episodes), 0, dtype=torch.long)
    made: dict[str, Any] = dict(scores=scores, raw_scores=raw, stopped=stopped, **signals)
    return Rollout(
        none_there,
        none_there.bool(),
        _padded_ids(tokens, ids if texts else [], mask),
        mask,
        **made,
        prompts=list(map(text_of, column("prompt"))),
        responses=responses if "response" in targets else ["".join(row) for row in tokens],
        tokens=tokens,
        columns={
            f"{name} (of the file)" if name in TAKEN else name: [
                _cell(one.others.get(name)) for one in episodes
            ]
            for name in others
        },
        info=dict(update=update, unit=unit, notes=notes),
    )


def _padded_ids(
    tokens: Sequence[list[str]], ids: Sequence[list[int] | None], mask: Tensor
) -> Tensor:
    "Token ids [B, T]; where the file has none, the number of each word of this update."
    numbers: dict[str, int] = {}
    out = torch.zeros(mask.shape, dtype=torch.long)
    for i, its in enumerate(tokens):
        own = (ids[i] if ids else None) or []
        words = [numbers.setdefault(word.strip(), len(numbers)) for word in its]
        out[i, : len(its)] = torch.tensor(own if len(own) == len(its) and -1 not in own else words)
    return out


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
        self.tokenizer = (
            pretrained_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        )
        self.refresh()

    def refresh(self) -> None:
        "Read it again."
        self._rollouts: dict[int, Rollout] = {}
        self._numbers: dict[int, pd.DataFrame] = {}
        self._episodes: dict[int, list[Episode]] = {}
        self._notes: dict[int, list[str]] = {}
        self._left_out: list[str] = []  # notes on files that are not read
        if not self.of_file:
            return self._take(table_of(self.records), 0, "records", [])
        files = table_files(self.path, self._left_out) if self.path.is_dir() else [self.path]
        for file in files:
            notes: list[str] = []
            try:
                rows = read_table(file, notes)
            except ValueError:
                if len(files) == 1 or not _is_young(file):
                    raise
                self._left_out.append(
                    f"{quoted(file.name)} cannot be read and is left out: it may not be "
                    "complete yet. Open it again later."
                )
            else:
                named = [f"{quoted(file.name)}: {note}" for note in notes]
                self._take(rows, file_number(file), str(file), named)
        if not self._episodes:
            told = " ".join([f"give some of {', '.join(TABLES)}.", *self._left_out])
            raise ValueError(f"{self.path} has no file of episodes: {told}")

    def _take(self, rows: Sequence[Row], update: int, source: str, notes: list[str]) -> None:
        "Add one table."
        _, rows, mapping = mapping_of(rows, self.columns, source, notes)
        steps = set()
        for i, row in enumerate(rows):
            step = number(row.get(mapping["step"])) if "step" in mapping else update
            if not (math.isfinite(step) and step == int(step)):
                raise ValueError(
                    f"{source}, row {i}: {quoted(mapping['step'])} is "
                    f"{quoted(row.get(mapping['step']))}, and an update is a whole number. Map "
                    "another column to step, or none: --columns step="
                )
            steps.add(int(step))
            self._episodes.setdefault(int(step), []).append(episode_of(row, mapping))
        for one in steps:
            self._notes.setdefault(one, []).extend(notes)

    @property
    def counted(self) -> str:
        "Words, where neither tokens nor a tokenizer for their ids are there."
        its = {name for some in self._episodes.values() for one in some for name in one.values}
        known = "tokens" in its or (self.tokenizer is not None and "token_ids" in its)
        return "tokens" if known else "words"

    @property
    def files(self) -> dict[int, Any]:
        "The updates, in order."
        return dict.fromkeys(sorted(self._episodes))

    def rollout(self, update: int) -> Rollout:
        "One update; the last four are kept."
        if update not in self._rollouts:
            notes = [*dict.fromkeys(self._notes[update]), *self._left_out]
            r = rollout_from(self._episodes[update], update, notes, self.tokenizer)
            self._rollouts[update] = r
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
        means = self.numbers().groupby("update").mean(numeric_only=True).reset_index()
        if "raw_score" not in means and "score" in means:
            means["raw_score"] = means["score"]
        return means.drop(columns=["episode", "score"], errors="ignore").rename(columns=MEANS)

    def again(self, prompt: str, most: int = 8) -> list[tuple[int, int]]:
        "Update and row of each time that a prompt was sampled, one an update."
        hits = []
        for update in self.files:
            texts = [text_of(one.values.get("prompt")) for one in self._episodes[update]]
            if prompt in texts:
                hits.append((update, texts.index(prompt)))
        return [hits[i] for i in spread(len(hits), most)]

    def completions(self) -> dict[str, list[dict[str, str]]]:
        "There are no tables of completions beside a table of episodes."
        return {}

    def completed(self, prompt: str) -> list[dict[str, str]]:
        "The same for one prompt."
        return []
