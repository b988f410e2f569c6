"""Data sets by name, and their splits."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import random
import re
import textwrap
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
from datasets import (
    Dataset,
    DatasetDict,
    ReadInstruction,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetsError
from datasets.utils import logging
from transformers import PreTrainedTokenizerBase

from rlhf_nb.base.encoding import check_turns
from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.files import parse_json, read_jsonl
from rlhf_nb.cli.arguments import DataArguments, TrainDataArguments
from rlhf_nb.cli.environments import read_settings
from rlhf_nb.cli.quick import check_there
from rlhf_nb.real import everyday_requests
from rlhf_nb.reward import decided_pairs
from rlhf_nb.training.model_loading import drop_long_rows
from rlhf_nb.training.tasks import task_rows
from rlhf_nb.ui.foreign import MOST_COLUMNS
from rlhf_nb.world import edit_pairs, mini_tldr

KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
UNPACK: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
PACKED = (EOFError, zlib.error, lzma.LZMAError)  # and OSError without a number
EMBEDDED = ("mini_tldr", "everyday_requests", "guess_number")
UNREADABLE = (OSError, ValueError, LookupError, StopIteration, RecursionError, DatasetsError)
FIXES = dict(  # of a file that cannot be read
    json="fix the JSON, or write the file again with pandas' to_json",
    csv="quote fields that hold commas or line breaks, or write the file with pandas' to_csv",
    parquet="write it again, for example with pandas' to_parquet",
)


def beginners_guesses(n: int = 15, rows: int = 3_000, seed: int = 0) -> DatasetDict:
    "Prompts of guess_number, with a number drawn blindly as completion: data for an SFT start."
    prompt = f"Guess a number from 1 to {n}: low, high or right?"
    draw = random.Random(seed)
    data = [dict(prompt=prompt, completion=f" {draw.randint(1, n)}") for _ in range(rows)]
    return DatasetDict(train=Dataset.from_list(data), test=Dataset.from_list(data[:n]))


def load_embedded(name: str, seed: int, splits: Sequence[str]) -> DatasetDict:
    "An embedded data set. Of a split `name[:n]` the first n rows are made, and no more."
    if name == "everyday_requests":
        return everyday_requests()
    if name == "guess_number":
        return beginners_guesses(seed=seed)
    sizes = dict(train=24_000, validation=1_000, test=2_000)
    parts = [re.fullmatch(r"(\w+?)(?:\[:(\d+)\])?", split) for split in splits]
    if splits and all(parts):
        named = [m for m in parts if m and m[1] in sizes]
        wanted = {m[1]: min(int(m[2] or sizes[m[1]]), sizes[m[1]]) for m in named}
        sizes = {split: wanted.get(split, 1) for split in sizes}
    return mini_tldr(seed, **sizes)


def explain_unreadable(name: str, kind: str | None, error: Exception) -> ValueError:
    "What to raise where a data set cannot be loaded: what is wrong, and how to fix it."
    path, why = Path(name), textwrap.shorten(str(error.__cause__ or error), 300)
    if isinstance(error, PACKED) or (path.suffix in UNPACK and not getattr(error, "errno", 1)):
        return ValueError(f"--dataset_name {name}: it cannot be unpacked ({why}): copy it again.")
    other = getattr(error, "filename", None)  # the file itself was read before
    if kind and other and Path(other) != path:
        return ValueError(
            f"--dataset_name {name}: data sets are kept in {datasets.config.HF_DATASETS_CACHE}, "
            f"which cannot be written to ({why}). Set HF_HOME to a folder that can."
        )
    if kind and (not path.stat().st_size or "corresponds to no data" in why):
        return ValueError(
            f"--dataset_name {name}: the file has no rows. Give at least one, with a prompt."
        )
    if path.suffix == ".jsonl":
        read_jsonl(path)  # raises, and names the line
    if kind:
        return ValueError(
            f"--dataset_name {name}: it cannot be read as {kind} ({why.rstrip('.')}): "
            f"{FIXES[kind]}."
        )
    near = did_you_mean(name, EMBEDDED)
    return ValueError(f"--dataset_name {name}: no folder of save_to_disk: {why}.{near}")


class TooWide(ValueError):
    "A table of more columns than anybody waits for."


def check_width(name: str, kind: str, first: str) -> None:
    "Raises TooWide on the first line of a file that takes `datasets` minutes."
    row: Any = first.split(",") if kind == "csv" else None
    with suppress(ValueError):  # of JSON, which the reader of the file will name
        row = row or parse_json(first[: 2**24])
    row = row[0] if kind == "json" and isinstance(row, list) and row else row
    if isinstance(row, (list, dict)) and len(row) > MOST_COLUMNS:
        raise TooWide(
            f"--dataset_name {name} has {len(row):,} columns: keep those that are needed, "
            f"{MOST_COLUMNS:,} at most."
        )


def load_rows(
    name: str | None,  # as `--dataset_name`
    config: str | None = None,
    seed: int = 0,  # of what is embedded
    splits: Sequence[str] = (),  # those that are needed; none: all
) -> DatasetDict:
    "The splits by name. Raises ValueError where no data set has that name."
    if not name:
        raise ValueError(
            "--dataset_name is missing: give a name on the hub, a folder, a file, or "
            f"{' or '.join(EMBEDDED)}."
        )
    if name.startswith("reasoning_gym:"):
        _, task, *more = name.split(":", 2)
        found = read_settings(f"--dataset_name {name}", *more)
        return task_rows(task, **dict(seed=seed) | found)
    if name in EMBEDDED:
        return load_embedded(name, seed, splits)
    path = Path(name)
    unpack = UNPACK.get(path.suffix, open)
    kind = KINDS.get(path.suffix if unpack is open else path.with_suffix("").suffix)
    kind = None if kind == "parquet" and unpack is not open else kind  # it packs by itself
    check_there("--dataset_name", name)
    if path.is_file() and not kind:
        raise ValueError(
            f"--dataset_name {name}: a file whose name ends in {path.suffix or 'nothing'} is not "
            f"read. Convert it to one of {', '.join(KINDS)}, with a column prompt; text may "
            f"be packed ({', '.join(UNPACK)})."
        )
    saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # the error that follows has it all
    try:
        if kind in ("json", "csv"):
            lines = unpack(path, "rt", encoding="utf-8")
            check_width(name, kind, next(lines, ""))
            deque(lines, 0)  # Arrow would find other bytes later
        if kind:
            return load_dataset(kind, data_files={"train": str(path)})
        data = load_from_disk(name) if saved else load_dataset(name, config)
    except TooWide:
        raise
    except UnicodeDecodeError as error:
        lines = enumerate(unpack(path, "rb").read().split(b"\n"), 1)
        bad = next(i for i, line in lines if line.decode(errors="ignore").encode() != line)
        raise ValueError(
            f"--dataset_name {name}, line {bad}: the text is not UTF-8. Save the file as UTF-8; "
            f"from Latin-1, for example: iconv -f latin1 -t utf-8 {name} > utf8{path.suffix}"
        ) from error
    except (*PACKED, *UNREADABLE) as error:
        raise explain_unreadable(name, kind, error) from error
    finally:
        logging.set_verbosity(level)
    return DatasetDict(train=data) if isinstance(data, Dataset) else data


def take(data: DatasetDict, split: str, flag: str = "split") -> Dataset:
    "The rows of `train`, `train[:100]` or `train+test`. Raises ValueError where there are none."
    sizes = {name: len(rows) for name, rows in data.items()}
    try:
        parts = ReadInstruction.from_spec(split).to_absolute(sizes)
    except ValueError as error:
        near = did_you_mean(split.split("[")[0], data)
        raise ValueError(
            f"{flag} is {split!r} and the data set has the splits {', '.join(data)}: name one of "
            f"them, or a slice such as {next(iter(data))}[:100].{near}"
        ) from error
    parts = [part for part in parts if part.to > part.from_]
    if not parts:
        raise ValueError(f"{flag} is {split!r}, which has 0 rows: take more.")
    return concatenate_datasets([data[x.splitname].select(range(x.from_, x.to)) for x in parts])


def check_columns(name: str | None, rows: Dataset, *forms: tuple[str, ...]) -> None:
    "Raises ValueError where no form has all of its columns, before any model is loaded."
    there = rows.column_names
    if any(set(form) <= set(there) for form in forms):
        return
    named = [column for column in there if not column.startswith("__index_level")]  # of commas
    mark = next((mark for mark in ";\t|" if len(named) == 1 and mark in named[0]), None)
    if mark and name and name.endswith(".csv"):
        raise ValueError(
            f"--dataset_name {name}: its columns are separated by {mark!r}: use commas."
        )
    near = "".join(did_you_mean(column, there) for column in forms[0] if column not in there)
    raise ValueError(
        f"--dataset_name {name}: it has the columns {', '.join(there)}, and this needs "
        f"{', or '.join(' and '.join(form) for form in forms)}: rename them in the file.{near}"
    )


def check_prompt_column(name: str | None, rows: Dataset) -> None:
    "Raises ValueError on a prompt that is neither text nor a conversation."
    if "prompt" not in rows.column_names:
        return  # ids, which the trainer checks
    for i, prompt in enumerate(rows["prompt"][:]):
        if prompt == "":
            raise ValueError(f"--dataset_name {name}: prompt {i} is empty: remove the row.")
        if not isinstance(prompt, str):
            check_turns(prompt, f"--dataset_name {name}: prompt {i}")


def check_template(
    name: str | None,  # of the data set
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    fix: str = "--tokenizer_name_or_path with a template",
) -> None:
    "Raises ValueError on conversations that no chat template can write, before models are loaded."
    turns = ("prompt", "messages", "conversations", "completion", "chosen", "rejected")
    for column in turns:
        x = rows[0].get(column)
        if isinstance(x, list) and x and isinstance(x[0], dict) and not tokenizer.chat_template:
            raise ValueError(
                f"--dataset_name {name}: the column {column} holds conversations, and the "
                f"tokenizer has no chat template: give text, or {fix}."
            )


def drop_long(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    prompt: int | None,  # --max_prompt_length
    answer: int | None = None,  # --max_completion_length
) -> Dataset:
    "Rows that fit; prints how many were left out."
    if prompt is None and answer is None:
        return rows
    if any(isinstance(rows[0].get(name), list) for name in ("prompt", "completion", "chosen")):
        raise ValueError(
            "--max_prompt_length and --max_completion_length count the tokens of texts, and this "
            "data set has conversations: leave them out, and set --max_length."
        )
    kept = drop_long_rows(rows, tokenizer, prompt, answer)
    if len(kept) < len(rows) and os.environ.get("RANK", "0") == "0":
        print(f"left out {len(rows) - len(kept):,} of {len(rows):,} rows: too long")
    return kept


def pairs_of(rows: Dataset | None, data: DataArguments) -> Dataset | None:
    "Preferences: the rows (ties of a label file left out), or edit pairs of mini_tldr."
    if rows is None:
        return None
    if data.dataset_name == "mini_tldr":
        return edit_pairs(rows, data.dataset_seed)
    return decided_pairs(rows)


def splits_of(data: TrainDataArguments, hold_out: int = 0) -> tuple[Dataset, Dataset | None]:
    """Training and test rows; None where the data set has no test split and none was named, and
    nothing is held out: as many rows must be left to train on."""
    splits = load_rows(
        data.dataset_name,
        data.dataset_config,
        data.dataset_seed,
        (data.dataset_train_split, data.dataset_test_split),
    )
    train = take(splits, data.dataset_train_split, "--dataset_train_split")
    if data.dataset_test_split == "test" and "test" not in splits:
        left = len(train) - hold_out
        if not 0 < hold_out <= left:
            return train, None
        if os.environ.get("RANK", "0") == "0":
            print(f"there is no split test: the last {hold_out} training rows are held out")
        return train.select(range(left)), train.select(range(left, len(train)))
    return train, take(splits, data.dataset_test_split, "--dataset_test_split")
