"""Rollouts that other trainers wrote: a table of episodes, and a mapping of its columns. Of which
versions the formats are, and how to get a file: `nbs/reference/59_other_trainers.ipynb`."""

from __future__ import annotations

import fnmatch
import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pandas.errors import ParserWarning
from torch import Tensor

from rlhf_nb.base.files import parse_json
from rlhf_nb.base.loading import pretrained_tokenizer
from rlhf_nb.base.terminal import harmless
from rlhf_nb.packing import on_tokens
from rlhf_nb.rollout import SIGNALS, Rollout, token_texts
from rlhf_nb.training.kept import OF_FOLDER, SUFFIXES, file_number, table_files
from rlhf_nb.ui.run_files import Updates

Row = dict[str, Any]  # an episode, by the names of a file's columns or of a rollout
Given = Mapping[str, str] | None  # what a rollout calls it -> a column

TOKEN = ("tokens", "token_ids", "token_mask", *SIGNALS)  # a list an episode
SCORES = ("scores", "raw_scores")  # a number an episode, or a list
TARGETS = ("prompt", "response", "messages", "step", "stopped", *SCORES, *TOKEN)
MOST_COLUMNS = 10_000
TRUTHS = dict(true=1.0, false=0.0)
STOPS = TRUTHS | dict(stop=1.0, eos=1.0, length=0.0, max_tokens=0.0)


def parse_columns(words: Iterable[str]) -> dict[str, str]:
    "`prompt=question,response=answer` as a dictionary. Raises ValueError on a word without `=`."
    pairs = [pair.partition("=") for word in words for pair in word.split(",") if pair.strip()]
    if not all(equals for _, equals, _ in pairs):
        how = "write what it is and the column that has it, such as prompt=question,response=answer"
        raise ValueError(f"--columns has {words!r}: {how}. A sum is scores=a+b.")
    columns = {name.strip(): column.strip() for name, _, column in pairs}
    if len(columns) < len(pairs):
        raise ValueError(f"--columns has {words!r}: one of these is given twice. Keep one of them.")
    return columns


# What each trainer calls what a rollout has; "?" marks a column that its files may lack, and "*"
# stands for any letters: a sum. A file is of the first format whose other columns it has, and
# nothing else is looked at. Of `messages` the last one is the response.
OURS = "the names of a rollout"
_FORMATS = {
    "verl": "prompt=input,response=output,scores=score,step=step,raw_scores=?token_level_scores,"
    "rewards=?token_level_rewards,token_ids=?responses,token_mask=?response_mask",
    "trl": "prompt=prompt,response=completion,scores=?*[Rr]eward*,step=?step",
    "trl (completions of PPO)": "prompt=query,response=model response,scores=?score,step=?step",
    "OpenRLHF (batch inference)": "prompt=input,response=output,scores=?reward",
    "OpenRLHF (generated samples)": "response=text,scores=reward,step=global_step",
    "NeMo-RL": "messages=content,scores=rewards,token_ids=?token_ids,token_mask=?token_loss_mask,"
    "logprobs=?prev_logprobs,engine_logprobs=?generation_logprobs,advantages=?advantages",
    OURS: "response=response," + ",".join(f"{x}=?{x}" for x in TARGETS if x != "response"),
}
FORMATS = {name: parse_columns([columns]) for name, columns in _FORMATS.items()}


# ---- Values, whatever a file holds ----


def _plain(x: Any) -> Any:
    "Arrays and numbers of numpy as those of Python."
    x = x.tolist() if hasattr(x, "tolist") else x
    return list(x) if isinstance(x, tuple) else x


def as_number(x: Any, words: Mapping[str, float] = TRUTHS) -> float:
    "A number or a truth value, also one written as text; nan for anything else."
    x = _plain(x)
    try:
        return float(words.get(x.strip().lower(), x) if isinstance(x, str) else x)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def as_numbers(x: Any) -> list[float]:
    "Each of a list as `as_number` reads it; a single one as a list of one."
    x = x if isinstance(x, list) else [x]
    try:
        return np.array(x, dtype=np.float64).reshape(len(x)).tolist()  # quick for long lists
    except (TypeError, ValueError, OverflowError):
        return list(map(as_number, x))


def _string(x: Any) -> str:
    "A string as it is, nothing for what is missing, JSON for anything else."
    x = _plain(x)
    if isinstance(x, str):
        return x
    if x is None or x is pd.NA or x != x:
        return ""
    made_plain = lambda y: y.tolist() if hasattr(y, "tolist") else str(y)
    return json.dumps(x, default=made_plain, ensure_ascii=False)


def turns_of(x: Any) -> list[dict[str, str]]:
    "A chat of messages turn by turn; nothing where it is no chat."
    x, turns = _plain(x), []
    for one in x if isinstance(x, list) else [x]:
        if not isinstance(one, Mapping) or "content" not in one:
            return []
        content, calls = _plain(one["content"]), one.get("tool_calls")
        parts = [*content] if isinstance(content, list) else [content]
        parts = [p.get("text", p) if isinstance(p, Mapping) else p for p in parts]
        texts = map(_string, [*parts, calls] if calls is not None else parts)
        turns.append(dict(role=_string(one.get("role", "message")), content="\n".join(texts)))
    return turns


def text_of(x: Any) -> str:
    "Text of whatever stands for one: a string, a chat (with roles), anything else as JSON."
    if turns := turns_of(x):
        named = [f"{one['role']}: {one['content']}" for one in turns]
        return "\n\n".join(named) if len(named) > 1 else turns[0]["content"]
    x = _plain(x)
    return "\n\n".join(map(_string, x)) if isinstance(x, list) else _string(x)


def _cell(x: Any, most: int = 2_000) -> Any:
    "A value of a column that is shown beside the prompt; a long text is cut off."
    if x is None or isinstance(x := _plain(x), (bool, int, float)):
        return x
    text = text_of(x)
    return text if len(text) <= most else f"{text[:most]} …"


def words_of(text: str) -> list[str]:
    "A text in words, each with the blanks before it, so that together they are the text."
    return re.findall(r"\s*\S+(?:\s+\Z)?|\s+\Z", text)


def quoted(x: Any) -> str:
    "A name or a value in a sentence: short, and without what would steer a terminal."
    return harmless(repr(x))[:80]


def _names(columns: Iterable[str]) -> str:
    return ", ".join(map(quoted, columns))


# ---- Reading a table ----


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def table_of(records: Any, source: str = "records") -> list[Row]:
    "Rows of a list of objects, a DataFrame or a Dataset. Raises ValueError on anything else."
    rows: Any = records.to_dict("records") if isinstance(records, pd.DataFrame) else records
    rows = list(rows) if isinstance(rows, Iterable) else []  # of a mapping its names
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        wanted = "give a list of objects, one for each episode, a DataFrame or a Dataset"
        raise ValueError(f"{source} are no episodes: {wanted}.")
    rows = [{str(name): x for name, x in row.items()} for row in rows]
    if (columns := len(_columns(rows))) > MOST_COLUMNS:
        raise ValueError(f"{source} have {columns:,} columns: leave {MOST_COLUMNS:,} at most")
    return rows


def _json_rows(text: str, notes: list[str]) -> Any:
    """One JSON text, which may be a table of Weights & Biases; else JSON lines, the last of which
    may be half written. (Pandas would change types in a column with a gap.)"""
    try:
        table = parse_json(text)
    except ValueError:
        table, lines = [], text.split("\n")
        for i, line in enumerate(lines, 1):
            try:
                table += [parse_json(line)] if line.strip() else []
            except ValueError as error:
                if i < len(lines) or not table:
                    raise ValueError(f"line {i} is not JSON: {error}") from None
                notes.append(f"Line {i}, the last, is cut off and left out.")
    if isinstance(table, dict) and {"columns", "data"} <= set(table):
        table = [dict(zip(map(str, table["columns"]), row)) for row in table["data"]]
    return [table] if isinstance(table, dict) else table


def read_table(path: Path, notes: list[str] | None = None) -> list[Row]:
    """A file of episodes as rows; a line that was left out is added to `notes`. Raises ValueError,
    with the file's name, where it cannot be read. Nothing is ever unpickled."""
    try:
        if not path.exists():
            raise ValueError("it is not there")
        match path.suffix.lower():
            case ".parquet":
                rows: Any = pd.read_parquet(path)
            case ".csv":  # every field as it was written
                how: Any = dict(dtype=str, keep_default_na=False, encoding_errors="replace")
                with warnings.catch_warnings():  # of fields that the header does not name
                    warnings.simplefilter("error", ParserWarning)
                    frame = pd.read_csv(path, index_col=False, **how).rename(columns=str.strip)
                rows = frame.astype(object).where(frame != "", None)
            case kind if kind in SUFFIXES:
                text = path.read_text(encoding="utf-8-sig", errors="replace")
                rows = _json_rows(text, [] if notes is None else notes)
            case _:
                raise ValueError(f"not one of {', '.join(SUFFIXES)}")
        return table_of(rows, "its rows")
    except (ValueError, OSError, TypeError, RuntimeError, ParserWarning) as error:
        why = " ".join(str(error).split())[:300]
        fix = f"give a table of episodes that ends in {', '.join(SUFFIXES)}, a folder of them, or "
        fix += "the output_dir of a run with save_rollouts=True"
        raise ValueError(f"{path} cannot be read ({why}): {fix}.") from None


# ---- Which column is what ----


def format_of(rows: Sequence[Row]) -> str | None:
    "The first format whose columns are all there."
    needs = {x: {c for c in known.values() if c[0] != "?"} for x, known in FORMATS.items()}
    return next((name for name in FORMATS if needs[name] <= {*_columns(rows)}), None)


def mapping_of(
    rows: Sequence[Row],
    given: Mapping[str, str] | None = None,  # beside a format's own, or in its place; "": none
    source: str = "records",  # for errors
    notes: list[str] | None = None,  # what one should know of the mapping is added
) -> dict[str, str]:  # what a rollout calls it -> a column
    """Which column is what; a score may be a sum, `a+b`. Raises ValueError where a name cannot be
    mapped, a column is not there, or nothing says which one is the response."""
    given, notes = dict(given or {}), [] if notes is None else notes
    columns, name = _columns(rows), format_of(rows)
    is_sum = lambda target, its: target == "scores" and its not in columns
    parts = lambda target, its: its.split("+") if is_sum(target, its) else [its]
    found = lambda its: "+".join(fnmatch.filter(columns, its.lstrip("?")))
    known = {target: x for target, its in FORMATS[name or OURS].items() if (x := found(its))}
    mapping = {target: column for target, column in (known | given).items() if column}
    missing = {its for pair in mapping.items() for its in parts(*pair)} - {*columns}
    unknown = [*({*given} - {*TARGETS}), *missing]
    if unknown or not {"response", "messages", "tokens", "token_ids"} & {*mapping}:
        none = "no format is known that it is of"
        unread = f"nothing is called {_names(unknown)}" if unknown else none
        how = "--columns prompt=question,response=answer,scores=reward"
        how = f"Write which of them is what, such as {how}, of {', '.join(TARGETS)}."
        raise ValueError(f"{source}: {unread}. It has the columns {_names(columns)}. {how}")
    if len(summed := parts("scores", mapping.get("scores", ""))) > 1:
        notes.append(f"scores is the sum of {_names(summed)}, with weights of 1.")
    read = "your mapping" if name is None or (given and name == OURS) else name
    pairs = ", ".join(f"{target} from {quoted(column)}" for target, column in mapping.items())
    notes.append(f"Read as {read}: {pairs}.")
    return mapping


def episode_of(row: Row, mapping: Mapping[str, str]) -> Row:
    """A row by the names of a rollout; columns that nothing was mapped to are its `columns`. Where
    there is a mask, lists of numbers are the answer's, and `masked` is true on what it leaves out
    between two of the answer's tokens: the output of a tool, a turn of the user."""
    others = {column: x for column, x in row.items() if column not in mapping.values()}
    values = {name: row.get(column) for name, column in mapping.items()} | dict(columns=others)
    if "scores" in mapping and mapping["scores"] not in row:  # a sum, or absent in this row
        parts = [as_number(row.get(part)) for part in mapping["scores"].split("+")]
        known = [x for x in parts if not math.isnan(x)]
        values["scores"] = sum(known) if known else None
    if "messages" in values:
        talk = _plain(values.pop("messages"))
        talk = talk if isinstance(talk, list) else [talk]
        values |= dict(prompt=talk[:-1], response=talk[-1:])
    if "token_mask" in values:  # of prompt, answer and padding, from the first one to the last
        ones = "".join("01"[x > 0] for x in as_numbers(_plain(values.pop("token_mask"))))
        end = ones.rfind("1") + 1  # of messages the last alone is the answer
        start = max(0, ones.find("1")) if "messages" not in mapping else ones.rfind("0", 0, end) + 1
        for name in {*TOKEN, *SCORES} & {*values}:
            x = _plain(values[name])
            values[name] = x[start:end] if isinstance(x, list) else x
        values["masked"] = [x == "0" for x in ones[start:end]]
    return values


def episodes_of(
    rows: Sequence[Row],
    given: Given = None,
    source: str = "records",
    notes: list[str] | None = None,
) -> list[Row]:
    "The rows of a table by the names of a rollout; the arguments are those of `mapping_of`."
    mapping = mapping_of(rows, given, source, notes)
    if format_of(rows) == "NeMo-RL":  # it writes batches of one
        alone = lambda x: x[0] if isinstance(x := _plain(x), list) and len(x) == 1 else x
        rows = [{name: alone(x) for name, x in row.items()} for row in rows]
    return [episode_of(row, mapping) for row in rows]


# ---- Episodes as a rollout ----


def _note(notes: list[str], name: str, bad: Sequence[int], why: str) -> None:
    if bad:
        rows = ", ".join(map(str, bad[:5])) + " and others" * (len(bad) > 5)
        notes.append(f"{name}: not shown in episode{'s' * (len(bad) > 1)} {rows}: {why}.")


def _tensor(values: list[Any], name: str, lengths: list[int], unit: str, notes: list[str]) -> Any:
    """Numbers [B, T] of lists that fit their episodes, with zeros of padding or without; nan where
    one does not. None where none does and, of words, where one does not: the others do by chance.
    Scores are [B], and sums of lists, where one does not fit."""
    given = list(map(_plain, values))
    lists, rows = list(map(as_numbers, given)), range(len(given))
    fits = lambda its, n: len(its) == n or (unit == "tokens" and len(its) > n and not any(its[n:]))
    bad = [i for i in rows if not (isinstance(given[i], list) and fits(lists[i], lengths[i]))]
    if name in SCORES and (bad or not all(np.isfinite(its).all() for its in lists)):
        sums = [sum(its) if its else math.nan for its in lists]
        x = torch.tensor(sums, dtype=torch.float64).float()
        _note(notes, name, [i for i in rows if not x[i].isfinite()], "no number")
        if any(isinstance(one, list) for one in given):
            notes.append(f"{name}: some lists do not fit the {unit}: sums are shown.")
        return None if x.isnan().all() else x
    bad = list(rows) if unit == "words" and bad else bad
    _note(notes, name, bad, f"give a list of one number for each of its {unit}, in all episodes")
    x = torch.zeros(len(rows), max(1, *lengths))
    for i, n in enumerate(lengths):
        x[i, :n] = math.nan if i in bad else torch.tensor(lists[i][:n])
    return None if len(bad) == len(rows) else x


def _both_of_tokens(made: dict[str, Any], mask: Tensor) -> dict[str, Any]:
    "If one kind of scores is of tokens, so is the other: the rest is on the last token. 0 is none."
    known = {name: made[name] for name in SCORES[::-1] if made[name] is not None}
    of_tokens = next((x for x in known.values() if x.dim() == 2), None)
    if of_tokens is None:
        return made
    spread = lambda x: x if x.dim() == 2 else of_tokens + on_tokens(x - of_tokens.sum(1), mask)
    return made | {name: spread(x) for name, x in known.items()} | dict(paid=of_tokens != 0)


def _ids(x: Any, known: int) -> list[int] | None:
    "Token ids; None where there is no list of whole numbers from 0, below `known`."
    x = _plain(x)
    numbers = as_numbers(x) if isinstance(x, list) else [-1.0]
    right = all(0 <= i < known and i == int(i) for i in numbers)
    return [int(i) for i in numbers] if right else None


def _tokens(
    episodes: Sequence[Row], responses: list[str], tokenizer: Any, notes: list[str]
) -> tuple[str, list[list[str]], Tensor]:
    "What is counted, tokens or words; those of each response; ids [B, T], or numbers of words."
    known = len(tokenizer) if hasattr(tokenizer, "__len__") else 2**31
    ids = [_ids(one.get("token_ids"), known) for one in episodes]
    bad = [i for i, its in enumerate(ids) if its is None and "token_ids" in episodes[i]]
    _note(notes, "token_ids", bad, f"give whole numbers from 0, below {known}")
    texts: list[Any] = [_plain(one.get("tokens")) for one in episodes]
    if tokenizer is not None and not any(texts):
        texts = [its and list(token_texts(tokenizer, its)) for its in ids]
    elif any(ids) and not any(texts):
        notes.append("Its token ids become tokens with a tokenizer: --tokenizer NAME.")
    cut = lambda x, text: list(map(text_of, x)) if isinstance(x, list) else words_of(text)
    tokens = list(map(cut, texts, responses))
    words: dict[str, int] = {}
    out = torch.zeros(len(tokens), max(1, *map(len, tokens)), dtype=torch.long)
    for i, (its, listed, own) in enumerate(zip(tokens, texts, ids)):
        if not listed or own is None or len(own) != len(its):
            own = [words.setdefault(word.strip(), len(words)) for word in its]
        out[i, : len(its)] = torch.tensor(own, dtype=torch.long)
    return "tokens" if any(texts) else "words", tokens, out


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
    unit, tokens, response_ids = _tokens(episodes, responses, tokenizer, notes)
    lengths = [len(row) for row in tokens]
    mask = torch.arange(max(1, *lengths)) < torch.tensor(lengths)[:, None]
    made: dict[str, Any] = dict.fromkeys((*SIGNALS, *SCORES, "stopped"))
    for name in [name for name in (*SIGNALS, *SCORES) if name in targets]:
        made[name] = _tensor(column(name), name, lengths, unit, notes)
    stops = [as_number(x, STOPS) for x in column("stopped")]
    bad = [i for i, x in enumerate(stops) if x not in (0, 1)]
    _note(notes, "stopped", bad, "give true or false, stop or length, in all episodes")
    made["stopped"] = torch.tensor(stops).bool() if stops and not bad else None
    if made["kl"] is None and made["logprobs"] is not None and made["ref_logprobs"] is not None:
        made["kl"] = made["logprobs"] - made["ref_logprobs"]
        notes.append("kl is logprobs less ref_logprobs (k1).")
    masked = torch.zeros_like(mask)
    for row, (one, n) in enumerate(zip(episodes, lengths)):
        if unit == "tokens" and len(its := one.get("masked", [])) == n:
            masked[row, :n] = torch.tensor(its)
    info: dict[str, Any] = dict(update=update, unit=unit, notes=notes)
    if masked.any():
        info["masked"] = masked.tolist()
        notes.append("Grey tokens are masked: nothing is learned from them, and their KL is 0.")
        made["kl"] = None if made["kl"] is None else made["kl"].masked_fill(masked, 0.0)
    absent = [name for name, x in made.items() if x is None and name != "raw_scores"]
    notes.append(f"Not in this file: {', '.join(absent)}." if absent else "Nothing is missing.")
    empty: Any = torch.zeros(len(episodes), 0, dtype=torch.long)
    others = [one.get("columns", {}) for one in episodes]
    tensors = empty, empty.bool(), response_ids, mask
    return Rollout(
        *tensors,
        **_both_of_tokens(made, mask),
        prompts=list(map(text_of, column("prompt"))),
        conversations=[turns_of(x) or text_of(x) for x in column("prompt")],
        responses=responses if "response" in targets else ["".join(row) for row in tokens],
        tokens=tokens,
        columns={x: [_cell(one.get(x)) for one in others] for x in _columns(others)},
        info=info,
    )


# ---- A file, a folder or records as a run ----


class ForeignRun(Updates):
    "Updates of a file, a folder with a file an update, or records. Raises ValueError."

    def __init__(
        self,
        source: Any,  # path of a file or folder; or a list of objects, a DataFrame, a Dataset
        columns: Mapping[str, str] | None = None,  # what a rollout calls it -> a column
        tokenizer: Any = None,  # a tokenizer, or the name of one
    ):
        is_path = isinstance(source, (str, Path))
        self.records = None if is_path else table_of(source)
        self.path = Path(source if is_path else "records")
        self.columns = columns
        named = isinstance(tokenizer, str)
        self.tokenizer = pretrained_tokenizer(tokenizer) if named else tokenizer
        self.refresh()

    def refresh(self) -> None:
        "Read it again."
        super().__init__()  # nothing is kept of what was read before
        self._taken: dict[int, tuple[list[Row], list[str]]] = {}  # episodes and notes
        self._left_out: list[str] = []  # notes on files that are not read
        if self.records is not None:
            self._take(self.records, 0, "records", [])
        folder = self.records is None and self.path.is_dir()
        files = table_files(self.path, self._left_out) if folder else [self.path]
        for file in files if self.records is None else ():
            notes: list[str] = []
            try:
                rows = read_table(file, notes)
            except ValueError:
                if file != files[-1] or len(files) == 1:
                    raise
                why = "cannot be read and is left out: it may not be complete yet."
                self._left_out.append(f"{quoted(file.name)} {why}")
            else:
                self._take(rows, file_number(file), str(file), notes)
        if not self._taken:
            raise ValueError(f"{self.path} has no file that ends in {', '.join(OF_FOLDER)}.")
        self.files = dict.fromkeys(sorted(self._taken))
        self.counted = self.rollout(min(self.files)).info["unit"]

    def _take(self, rows: Sequence[Row], update: int, source: str, notes: list[str]) -> None:
        for i, one in enumerate(episodes_of(rows, self.columns, source, notes)):
            step = as_number(given := one.get("step", update))
            if not step.is_integer():
                why = f"its step is {quoted(given)}: give a whole number, or none (--columns step=)"
                raise ValueError(f"{source}, row {i}: {why}.")
            episodes, its = self._taken.setdefault(int(step), ([], []))
            episodes.append(one)
            its += [note for note in notes if note not in its]

    def _read(self, update: int) -> Rollout:
        episodes, notes = self._taken[update]
        return rollout_from(episodes, update, notes + self._left_out, self.tokenizer)
