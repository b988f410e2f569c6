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
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.loading import pretrained_tokenizer
from rlhf_nb.base.terminal import harmless
from rlhf_nb.masks import on_tokens
from rlhf_nb.rollout import SIGNALS, Rollout, token_texts
from rlhf_nb.ui.run_files import Updates, episode_numbers, means_of, rollout_files

Row = dict[str, Any]  # an episode, by the names of a file's columns or of a rollout

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
TABLES = tuple(suffix for suffix in SUFFIXES if suffix != ".json")  # of a folder
TOKEN = ("tokens", "token_ids", "token_mask", *SIGNALS)  # a list an episode
SCORES = ("scores", "raw_scores")  # a number an episode, or a list
TARGETS = ("prompt", "response", "messages", "step", "stopped", *SCORES, *TOKEN)
TAKEN = {"episode", "prompt", "response", "length", "stopped", "kl", "score", "raw_score"}
TRUTHS = dict(true=1.0, false=0.0)
STOPS = TRUTHS | dict(stop=1.0, eos=1.0, length=0.0, max_tokens=0.0)

# What each trainer calls what a rollout has; "?" marks a column that its files may lack. A file is
# of the first format whose other columns it has. Of `messages` the last one is the response.
OURS = "the names of a rollout"
FORMATS: dict[str, dict[str, str]] = {
    "verl": dict(
        prompt="input",
        response="output",
        scores="score",
        step="step",
        raw_scores="?token_level_scores",
        rewards="?token_level_rewards",
        token_ids="?responses",
        token_mask="?response_mask",
    ),
    "trl": dict(prompt="prompt", response="completion", step="?step"),
    "trl (completions of PPO)": dict(
        prompt="query", response="model response", scores="?score", step="?step"
    ),
    "OpenRLHF (batch inference)": dict(prompt="input", response="output", scores="?reward"),
    "OpenRLHF (generated samples)": dict(response="text", scores="reward", step="global_step"),
    "NeMo-RL": dict(
        messages="content",
        scores="rewards",
        token_ids="?token_ids",
        token_mask="?token_loss_mask",
        logprobs="?prev_logprobs",
        engine_logprobs="?generation_logprobs",
        advantages="?advantages",
    ),
    OURS: {name: name if name == "response" else f"?{name}" for name in TARGETS},
}


# ---- Values, whatever a file holds ----


def _plain(x: Any) -> Any:
    "Arrays and numbers of numpy as those of Python; a list that a CSV file holds as text."
    if isinstance(x, str) and x[:1] == "[":
        try:
            return json.loads(x)
        except (ValueError, RecursionError):
            return x
    x = x.tolist() if hasattr(x, "tolist") else x
    return list(x) if isinstance(x, tuple) else x


def number(x: Any, words: Mapping[str, float] = TRUTHS) -> float:
    "A number or a truth value, also one written as text; nan for anything else."
    x = _plain(x)
    try:
        return float(words.get(x.strip().lower(), x) if isinstance(x, str) else x)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return math.nan


def _json(x: Any) -> str:
    try:
        return json.dumps(x, default=_plain, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        return "…"


def text_of(x: Any, named: bool = False, depth: int = 0) -> str:
    """Text of whatever stands for one: a string, a chat of messages (each with its role where there
    are several), anything else as JSON."""
    x = x if isinstance(x, str) else _plain(x)
    if x is None or x is pd.NA or (isinstance(x, float) and math.isnan(x)):
        return ""
    if isinstance(x, str) or depth > 16:
        return x if isinstance(x, str) else "…"
    if isinstance(x, list):
        return "\n\n".join(text_of(one, len(x) > 1, depth + 1) for one in x)
    if not isinstance(x, Mapping) or "content" not in x:
        return _json(x) if isinstance(x, Mapping) else str(x)
    content, calls = _plain(x["content"]), _plain(x.get("tool_calls"))
    parts = content if isinstance(content, list) else [content]
    parts = [p["text"] if isinstance(p, Mapping) and "text" in p else p for p in parts]
    parts += [_json(calls)] if calls and isinstance(calls, list) else []
    text = "\n".join(text_of(part, False, depth + 1) for part in parts)
    return f"{text_of(x.get('role', 'message'))}: {text}" if named else text


def _talk(x: Any) -> str | list[dict[str, str]]:
    "A chat of messages turn by turn; any other prompt as its text."
    turns: Any = x if isinstance(x, str) else _plain(x)
    said = turns if isinstance(turns, list) else [turns]
    if not all(isinstance(one, Mapping) and "content" in one for one in said):
        return text_of(x)
    return [dict(role=text_of(one.get("role", "message")), content=text_of(one)) for one in said]


def _cell(x: Any) -> Any:
    "A value of a column that is shown beside the prompt."
    x = x if isinstance(x, str) else _plain(x)
    if isinstance(x, bytes):
        return f"{len(x)} bytes"
    if isinstance(x, list) and len(x) > 8 and not any(isinstance(i, (str, Mapping)) for i in x[:8]):
        return f"a list of {len(x)}"
    return x if x is None or isinstance(x, (bool, int, float)) else text_of(x)


def words_of(text: str) -> list[str]:
    "A text in words, each with the blanks before it, so that together they are the text."
    return re.findall(r"\s*\S+(?:\s+\Z)?|\s+\Z", text)


def quoted(x: Any) -> str:
    "A name or a value in a sentence: short, and without what would steer a terminal."
    return harmless(repr(x))[:80]


def _names(names: Iterable[str], most: int = 60) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(quoted(name) for name in names[:most]) + more


def counted(n: int, things: str) -> str:
    "`1 word`, `2 words`."
    return f"{n} {things[:-1] if n == 1 else things}"


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


def _json_rows(text: str, notes: list[str]) -> list[Row]:
    """One JSON text, which may be a table of Weights & Biases; else JSON lines, where a last line
    that was cut off is left out with a note."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole, lines = [], text.split("\n")
        for i, line in enumerate(lines, 1):
            try:
                whole += _checked([json.loads(line)] if line.strip() else [])
            except (ValueError, RecursionError) as error:
                if i < len(lines) or not whole:
                    raise ValueError(f"line {i} is not JSON ({error})") from None
                notes.append(f"Line {i}, the last, is cut off and left out.")
    if isinstance(whole, dict) and {"columns", "data"} <= set(whole):
        whole = [dict(zip(map(str, whole["columns"]), row)) for row in whole["data"]]
    return _checked(whole if isinstance(whole, list) else [whole])


def _csv_rows(text: str) -> list[Row]:
    "The rows of a CSV file, as texts. Raises ValueError where a row has too many fields."
    limit = csv.field_size_limit(2**31 - 1)  # an answer may be long
    try:
        lines = list(csv.DictReader(io.StringIO(text, newline="")))
    finally:
        csv.field_size_limit(limit)
    for i, line in enumerate(lines):
        if any(line.pop(None, [])):  # type: ignore[call-overload]
            raise ValueError(
                f"row {i} has more fields than the header, which has {len(line)}: name every "
                "column there, and quote a field that has a comma in it"
            )
    return [{name.strip(): x or None for name, x in line.items()} for line in lines]


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
            text = path.read_bytes().removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
            if bad := text.count("\ufffd"):
                notes.append(f"Bytes that are no UTF-8 are shown as \ufffd, {bad} times.")
            rows = _csv_rows(text) if kind == ".csv" else _json_rows(text, notes)
    except (ValueError, OSError, TypeError, NotImplementedError, csv.Error) as error:
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
    family = lambda file: (file.parent != folder, re.sub(r"\d+", "#", file.name))
    kept = (*TABLES, ".table.json")
    every = [file for file in (*folder.glob("*"), *folder.glob("completions/*")) if file.is_file()]
    every = sorted(file for file in every if file.name.lower().endswith(kept))
    counts = Counter(family(file) for file in every)
    most = min(counts, key=lambda name: (name[0], -counts[name], name[1]), default=None)
    files = [file for file in every if family(file) == most]
    others = [str(file.relative_to(folder)) for file in every if file not in files]
    if others and notes is not None:
        notes.append(
            f"Only files named like {quoted(files[0].name)} are read. Left out: "
            f"{counted(len(others), 'files')}, {_names(others, 3)}. To see one, open it by itself."
        )
    return sorted(files, key=lambda file: (file_number(file), file.name))


def file_number(path: Path) -> int:
    "The last number of a file's name, 0 where it has none."
    return int(["0", *re.findall(r"\d+", path.stem)][-1][-9:])


# ---- Which column is what ----


def parse_columns(words: Iterable[str]) -> dict[str, str]:
    "`prompt=question,response=answer` as a dictionary. Raises ValueError on a word without `=`."
    given: dict[str, str] = {}
    for pair in (pair for word in words for pair in word.split(",") if pair.strip()):
        name, equals, column = pair.partition("=")
        if not equals:
            raise ValueError(
                f"--columns has {pair!r}: write what it is, and the column that has it, such as "
                "prompt=question,response=answer."
            )
        if (name := name.strip()) in given:
            raise ValueError(f"--columns has {name} twice: give it one column, or a sum: a+b.")
        given[name] = column.strip()
    return given


def recognized(rows: Sequence[Row]) -> str | None:
    "The first format whose columns are all there."
    needs = {x: {c for c in known.values() if c[0] != "?"} for x, known in FORMATS.items()}
    return next((name for name in FORMATS if needs[name] <= {*_columns(rows)}), None)


def _trl_scores(rows: Sequence[Row], own: set[str], notes: list[str]) -> str:
    """The columns of rewards in trl's table, which names one after each reward function. A note
    names other numbers, which may be rewards too."""
    is_number = lambda name: any(math.isfinite(number(row.get(name))) for row in rows[:64])
    numbers = [name for name in _columns(rows) if name not in own and is_number(name)]
    rewards = [name for name in numbers if "reward" in name.lower()]
    rewards = ["reward"] if "reward" in rewards else rewards or numbers[: len(numbers) == 1]
    if unused := [name for name in numbers if name not in rewards]:
        option = harmless(f"--columns {shlex.quote('scores=' + '+'.join(numbers))}")
        notes.append(f"Not in the score: {_names(unused)}. To add all: {option}")
    return "+".join(rewards)


def mapping_of(
    rows: Sequence[Row],
    given: Mapping[str, str] | None = None,  # beside a format's own, or in its place; "": none
    source: str = "records",  # for errors
    notes: list[str] | None = None,  # what one should know of the mapping is added
) -> dict[str, str]:  # what a rollout calls it -> a column
    """Which column is what. Raises ValueError where a name cannot be mapped, a column is not there,
    or nothing says which one is the response."""
    given, notes = dict(given or {}), [] if notes is None else notes
    can, columns, name = ", ".join(TARGETS), _columns(rows), recognized(rows)
    parts = lambda target, column: (  # a score may be a sum, unless a column is called that
        column.split("+") if target == "scores" and column not in columns else [column]
    )
    has = lambda target, column: {*parts(target, column)} <= {*columns}
    known = {target: column.lstrip("?") for target, column in FORMATS[name or OURS].items()}
    if name == "trl" and "scores" not in given:
        own = {"step", "prompt", "completion", "advantage", *given.values()}
        known["scores"] = _trl_scores(rows, own, notes)
    known = {target: column for target, column in known.items() if has(target, column)} | given
    mapping = {target: column for target, column in known.items() if column}
    for target, column in known.items():
        if target not in TARGETS:
            raise ValueError(
                f"--columns has {target!r}, which nothing is called."
                f"{did_you_mean(target, TARGETS)} These can be mapped: {can}."
            )
        if column and not has(target, column):
            raise ValueError(
                f"{source} has no column {quoted(column)} for {target}."
                f"{harmless(did_you_mean(column, columns))} It has {_names(columns)}."
            )
    if not {"response", "messages", "tokens", "token_ids"} & set(mapping):
        raise ValueError(
            f"{source} is of no format known here: it has the columns {_names(columns)}. Say which "
            "of them is what, such as --columns prompt=question,response=answer,scores=reward. "
            f"These can be mapped: {can}."
        )
    if len(summed := parts("scores", mapping.get("scores", ""))) > 1:
        notes.append(f"scores is the sum of {_names(summed)}, with weights of 1.")
    read = "your mapping" if name is None or (given and name == OURS) else name
    told = ", ".join(f"{target} from {quoted(column)}" for target, column in mapping.items())
    notes.append(f"Read as {read}: {told}.")
    return mapping


def episode_of(row: Row, mapping: Mapping[str, str]) -> Row:
    """A row by the names of a rollout; columns that nothing was mapped to are its `columns`. Where
    there is a mask, lists of numbers are the answer's, and `masked` is true on what it leaves out
    between two of the answer's tokens: the output of a tool, a turn of the user."""
    others = {column: x for column, x in row.items() if column not in mapping.values()}
    values = {name: row.get(column) for name, column in mapping.items()} | dict(columns=others)
    if "scores" in mapping and mapping["scores"] not in row:
        parts = [number(row.get(part)) for part in mapping["scores"].split("+")]
        known = [x for x in parts if not math.isnan(x)]
        values["scores"] = sum(known) if known else None
    if "messages" in values:
        talk = _plain(values.pop("messages"))
        talk = talk if isinstance(talk, list) else [talk]
        values |= dict(prompt=talk[:-1], response=talk[-1:])
    if "token_mask" in values:  # of prompt, answer and padding, from the first one to the last
        mask = _plain(values.pop("token_mask"))
        ones = "".join("01"[number(x) > 0] for x in mask) if isinstance(mask, list) else ""
        end = ones.rfind("1") + 1  # of messages the last alone is the answer
        start = max(0, ones.find("1")) if "messages" not in mapping else ones.rfind("0", 0, end) + 1
        for name in {*TOKEN, *SCORES} & {*values}:
            x = _plain(values[name])
            values[name] = x[start:end] if isinstance(x, list) else x
        values["masked"] = [x == "0" for x in ones[start:end]]
    return values


def episodes_of(
    rows: Sequence[Row],
    given: Mapping[str, str] | None = None,
    source: str = "records",
    notes: list[str] | None = None,
) -> list[Row]:
    "The rows of a table by the names of a rollout; the arguments are those of `mapping_of`."
    mapping = mapping_of(rows, given, source, notes)
    if recognized(rows) == "NeMo-RL":  # it writes batches of one
        alone = lambda x: x[0] if isinstance(x := _plain(x), list) and len(x) == 1 else x
        rows = [{name: alone(x) for name, x in row.items()} for row in rows]
    return [episode_of(row, mapping) for row in rows]


# ---- Episodes as a rollout ----


def _note(notes: list[str], sentence: str, bad: Sequence[tuple[int, str]], most: int = 5) -> None:
    "A note on some episodes, each with what is wrong with it."
    if bad:
        told = ", ".join(f"{row} ({why})" for row, why in bad[:most])
        more = f" and {len(bad) - most} more" if len(bad) > most else ""
        notes.append(sentence.format(f"episode{'s' * (len(bad) > 1)} {told}{more}"))


def _scores(values: Sequence[Any], target: str, notes: list[str]) -> Tensor | None:
    "A number an episode; None where there is none at all."
    x = torch.tensor([number(one) for one in values], dtype=torch.float64).float()
    bad = [(i, quoted(one)) for i, one in enumerate(values) if not x[i].isfinite()]
    _note(notes, f"{target}: no number, or too large a one, in {{}}.", bad)
    return None if x.isnan().all() else x


def _score(
    values: Sequence[Any], target: str, lengths: Sequence[int], unit: str, notes: list[str]
) -> Tensor | None:
    """Scores [B]; [B, T] of lists with a number for each token, which may go on with zeros for
    padding, where each fits its episode. A single number is a score of one token."""
    rows = list(map(_plain, values))
    lists = [list(map(number, row if isinstance(row, list) else [row])) for row in rows]
    alone = [x for row, its in zip(rows, lists) if not isinstance(row, list) for x in its]
    if len(alone) == len(rows) or not all(map(math.isfinite, alone)):
        return _scores(values, target, notes)
    fits = lambda its, n: len(its) >= n and all(map(math.isfinite, its)) and not any(its[n:])
    if all(map(fits, lists, lengths)):
        width = max(1, *lengths)
        return torch.tensor([its[:n] + [0.0] * (width - n) for its, n in zip(lists, lengths)])
    notes.append(
        f"{target}: some lists do not have a number for each of the {unit}: sums are shown."
    )
    return _scores([sum(its) for its in lists], target, notes)


def _both_of_tokens(made: dict[str, Any], mask: Tensor) -> dict[str, Any]:
    """Where one kind of scores is of tokens, so is the other: what the sums differ by is on the
    last token. A score of 0 is none."""
    known = {name: made[name] for name in ("raw_scores", "scores") if made[name] is not None}
    of_tokens = next((x for x in known.values() if x.dim() == 2), None)
    if of_tokens is None:
        return made
    for name, x in known.items():
        if x.dim() == 1:
            known[name] = of_tokens + on_tokens(x - of_tokens.sum(1), mask)
    return made | known | dict(paid=of_tokens != 0)


def _stops(values: Sequence[Any], notes: list[str]) -> Tensor | None:
    "Which episodes stopped by themselves; None where that is not known of each."
    stops = [number(x, STOPS) for x in values]
    bad = [(row, quoted(values[row])) for row, x in enumerate(stops) if x not in (0.0, 1.0)]
    _note(notes, "stopped: not known of {}, so of none.", bad)
    return None if bad else torch.tensor(stops).bool()


def _signal(
    values: Sequence[Any], target: str, lengths: Sequence[int], unit: str, notes: list[str]
) -> Tensor | None:
    """Numbers [B, T]; nan where a list does not fit its episode. None where none fits, or where
    words and not tokens are counted and most lists do not fit: the others do by chance."""
    x, bad = torch.zeros(len(lengths), max(1, *lengths)), []
    for row, (given, n) in enumerate(zip(map(_plain, values), lengths)):
        if isinstance(given, list) and len(given) == n:
            try:
                x[row, :n] = torch.from_numpy(np.array(given, dtype=np.float64))
            except (TypeError, ValueError, OverflowError, RuntimeError):  # not all are numbers
                x[row, :n] = torch.tensor([number(v) for v in given])
        else:
            x[row, :n] = math.nan
            held = counted(len(given), "numbers") if isinstance(given, list) else "no list"
            bad.append((row, f"{held} for {counted(n, unit)}"))
    _note(notes, f"{target}: not shown in {{}}.", bad)
    by_chance = unit == "words" and len(lengths) > len(bad) > len(lengths) / 2
    if by_chance:
        notes.append(f"{target}: it fits the others by chance, so it is shown in none.")
    return None if by_chance or len(bad) == len(lengths) else x


def _token_ids(values: Sequence[Any], notes: list[str]) -> list[list[int] | None]:
    "The token ids of each episode; all -1, and a note, where one is no id."
    ids, bad = [], []
    for i, given in enumerate(map(_plain, values)):
        numbers = list(map(number, given)) if isinstance(given, list) else None
        wrong = [j for j, x in enumerate(numbers or []) if not (0 <= x < 2**31 and x == int(x))]
        bad += [(i, quoted(given[j])) for j in wrong[:1]]
        ids.append(None if numbers is None else [-1 if wrong else int(x) for x in numbers])
    _note(notes, "token_ids: its column holds what is no token id in {}.", bad)
    return ids


def _decoded(ids: Sequence[list[int] | None], tokenizer: Any, notes: list[str]) -> list[Any]:
    "Token ids as texts; None where there are none."
    given = {i for row in ids for i in row or [] if i >= 0}
    if strange := [i for i in given if not tokenizer.decode([i]) and i >= len(tokenizer)]:
        notes.append(f"token_ids: {strange[0]} is no token of the tokenizer: no text.")
    decoded = lambda row: ["\ufffd"] * len(row) if -1 in row else token_texts(tokenizer, row)
    return [None if row is None else decoded(row) for row in ids]


def _padded_ids(tokens: Sequence[list[str]], ids: Sequence[list[int] | None], T: int) -> Tensor:
    "Token ids [B, T]; where the file has none, the number of each word of this update."
    words: dict[str, int] = {}
    out = torch.zeros(len(tokens), T, dtype=torch.long)
    for i, its in enumerate(tokens):
        own = ids[i] if ids else None
        if own is None or len(own) != len(its) or -1 in own:
            own = [words.setdefault(word.strip(), len(words)) for word in its]
        out[i, : len(its)] = torch.tensor(own, dtype=torch.long)
    return out


def rollout_from(
    episodes: Sequence[Row],  # by the names of a rollout
    update: int = 0,
    notes: Sequence[str] = (),  # what was left out before
    tokenizer: Any = None,  # with it, token ids become tokens
) -> Rollout:
    """Some episodes as a rollout. What none of them has is None there; a text without tokens is cut
    into words. `info["notes"]` says what did not fit, and where."""
    notes, targets = list(notes), _columns(episodes)
    column = lambda name: [one.get(name) for one in episodes] if name in targets else []
    responses = [text_of(x) for x in column("response")] or [""] * len(episodes)
    ids, texts = _token_ids(column("token_ids"), notes), list(map(_plain, column("tokens")))
    if ids and tokenizer is not None and not texts:
        texts = _decoded(ids, tokenizer, notes)
    unit = "tokens" if texts else "words"
    if ids and not texts and {*SIGNALS} & {*targets}:
        notes.append("Its token ids become tokens with a tokenizer: --tokenizer NAME.")
    if "tokens" in targets:
        wordy = [(i, "its words are") for i, x in enumerate(texts) if not isinstance(x, list)]
        _note(notes, "tokens: not a list in {}.", wordy)
    tokens = [
        list(map(text_of, x)) if isinstance(x, list) else words_of(text)
        for x, text in zip(texts or [None] * len(episodes), responses)
    ]
    lengths = [len(row) for row in tokens]
    mask = torch.arange(max(1, *lengths)) < torch.tensor(lengths)[:, None]
    made: dict[str, Any] = dict.fromkeys((*SIGNALS, *SCORES, "stopped"))
    for name in [name for name in made if name in targets]:
        if name == "stopped":
            made[name] = _stops(column(name), notes)
        elif name in SIGNALS:
            made[name] = _signal(column(name), name, lengths, unit, notes)
        else:
            made[name] = _score(column(name), name, lengths, unit, notes)
    if made["kl"] is None and made["logprobs"] is not None and made["ref_logprobs"] is not None:
        made["kl"] = made["logprobs"] - made["ref_logprobs"]
        notes.append("kl is logprobs less ref_logprobs (k1).")
    masked = torch.zeros_like(mask)
    for row, (one, n) in enumerate(zip(episodes, lengths)):
        if texts and len(its := one.get("masked", [])) == n:
            masked[row, :n] = torch.tensor(its)
    if masked.any():
        notes.append("Grey tokens are masked: nothing is learnt from them, and their KL is 0.")
        made["kl"] = None if made["kl"] is None else made["kl"].masked_fill(masked, 0.0)
    absent = [name for name, x in made.items() if x is None and name != "raw_scores"]
    notes.append(f"Not in this file: {', '.join(absent)}." if absent else "Nothing is missing.")
    made = _both_of_tokens(made, mask)
    empty: Any = torch.zeros(len(episodes), 0, dtype=torch.long)
    others = [one.get("columns", {}) for one in episodes]
    return Rollout(
        empty,
        empty.bool(),
        _padded_ids(tokens, ids if texts else [], mask.shape[1]),
        mask,
        **made,
        prompts=list(map(text_of, column("prompt"))),
        conversations=list(map(_talk, column("prompt"))),
        responses=responses if "response" in targets else ["".join(row) for row in tokens],
        tokens=tokens,
        columns={
            f"{name} (of the file)" if name in TAKEN else name: [_cell(x.get(name)) for x in others]
            for name in _columns(others)
        },
        info=dict(update=update, unit=unit, notes=notes)
        | (dict(masked=masked.tolist()) if masked.any() else {}),
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


class ForeignRun(Updates):
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
        super().__init__()  # nothing is kept of what was read before
        self._episodes: dict[int, list[Row]] = {}
        self._notes: dict[int, list[str]] = {}
        self._left_out: list[str] = []  # notes on files that are not read
        if not self.of_file:
            self._take(table_of(self.records), 0, "records", [])
        files = [self.path] if self.of_file else []
        if self.of_file and self.path.is_dir():
            files = table_files(self.path, self._left_out)
        for file in files:
            notes: list[str] = []
            try:
                rows = read_table(file, notes)
            except ValueError:
                if len(files) == 1 or time.time() - file.stat().st_mtime > 60:
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
        self.files = dict.fromkeys(sorted(self._episodes))

    def _take(self, rows: Sequence[Row], update: int, source: str, notes: list[str]) -> None:
        "Add one table."
        for i, one in enumerate(episodes_of(rows, self.columns, source, notes)):
            step = number(given := one.get("step", update))
            if not (math.isfinite(step) and step == int(step)):
                raise ValueError(
                    f"{source}, row {i}: its step is {quoted(given)}, and an update is a whole "
                    "number. Map another column to step, or none: --columns step="
                )
            self._episodes.setdefault(int(step), []).append(one)
            its = self._notes.setdefault(int(step), [])
            its += [note for note in notes if note not in its]

    @property
    def counted(self) -> str:  # type: ignore[override]
        "Words, where neither tokens nor a tokenizer for their ids are there."
        its = {name for some in self._episodes.values() for name in _columns(some)}
        known = "tokens" in its or (self.tokenizer is not None and "token_ids" in its)
        return "tokens" if known else "words"

    @property
    def log(self) -> pd.DataFrame:  # type: ignore[override]
        "Means of each update, as a trainer would have logged them."
        return means_of(self)

    def _read(self, update: int) -> Rollout:
        notes = self._notes[update] + self._left_out
        return rollout_from(self._episodes[update], update, notes, self.tokenizer)

    def _count(self, update: int) -> pd.DataFrame:
        return episode_numbers(vars(self.rollout(update)))

    def _texts(self, update: int) -> list[str]:
        return [text_of(one.get("prompt")) for one in self._episodes[update]]
