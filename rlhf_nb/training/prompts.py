"Prompts from a data set: texts, conversations or ids, padded and checked before anything runs."

from __future__ import annotations

import inspect
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StopStringCriteria
from transformers.utils import logging

from rlhf_nb.base.encoding import (
    Turns,
    call_texts,
    encode_prompts,
    join_blocks,
    marked_pair,
    prompt_text,
    template_settings,
    turn_end,
)
from rlhf_nb.base.opened import unwrap
from rlhf_nb.masks import left_pad
from rlhf_nb.reward_functions import called_with
from rlhf_nb.training.model_loading import distinct_pad_id

logger = logging.get_logger(__name__)
PROMPT_COLUMNS = ("prompt", "input_ids", "attention_mask", "tools", "chat_template_kwargs")


def plain(x: Any) -> Any:
    "A tensor or array as a list or number; anything else as it is."
    return x.tolist() if hasattr(x, "tolist") else x


def list_ids(row: Any) -> list[Any]:
    "A row as a list of plain numbers; [None] where it is no row."
    row = plain(row)
    return [plain(x) for x in row] if isinstance(row, (list, tuple)) else [None]


def read_ids(
    columns: Mapping[str, Any],  # input_ids, and perhaps attention_mask
    tokenizer: PreTrainedTokenizerBase,
) -> list[list[int]]:
    """The ids of each prompt that count: those that the attention_mask names; without one, all but
    the pad token, or all where that is the stop token. Raises ValueError that names the prompt."""
    top = max([len(tokenizer) - 1, *tokenizer.added_tokens_decoder])
    pad = distinct_pad_id(tokenizer)
    masks, rows = columns.get("attention_mask"), []
    for i, given in enumerate(columns["input_ids"]):
        ids = list_ids(given)
        if not all(isinstance(x, int) and x is not True and 0 <= x <= top for x in ids):
            raise ValueError(
                f"prompt {i}: input_ids is {reprlib.repr(ids)}: give a list of ids from 0 to {top}."
            )
        kept = [x != pad for x in ids] if masks is None else list_ids(masks[i])
        ones = [j for j, x in enumerate(kept) if x]
        beside = masks is None or not ones or ones[-1] - ones[0] == len(ones) - 1
        if len(kept) != len(ids) or not all(x in (0, 1) for x in kept) or not beside:
            raise ValueError(
                f"prompt {i}: attention_mask is {reprlib.repr(kept)} for {len(ids)} ids: give a 0 "
                "or a 1 for each, the 1s side by side."
            )
        rows.append([ids[j] for j in ones])
    return rows


def read_prompts(
    columns: Mapping[str, Any],  # prompt, and what its template needs; or input_ids, attention_mask
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[str], list[list[int]]]:  # texts, and their ids without padding
    "Prompts as text and as ids. Raises ValueError where there are none, and on one that is wrong."
    if "input_ids" in columns:
        rows = read_ids(columns, tokenizer)
        return [str(tokenizer.decode(row)) for row in rows], rows
    if "prompt" not in columns:
        raise ValueError(
            f"the data set has columns {list(columns)} and no prompt: rename the column with the "
            "prompts, dataset.rename_column(..., 'prompt'), or give input_ids."
        )
    texts = [
        prompt_text(prompt, tokenizer, f"prompt {i}", **settings)
        for i, (prompt, settings) in enumerate(zip(columns["prompt"], settings_of(columns)))
    ]
    return texts, encode_prompts(texts, tokenizer)


def settings_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    "What each prompt gives to the chat template. Raises ValueError that names the prompt."
    rows = []
    for i, row in enumerate(zip(*columns.values())):
        try:
            rows.append(template_settings(dict(zip(columns, row))))
        except ValueError as error:
            raise ValueError(f"prompt {i}: {error}") from error
    return rows


def sets_of(data: Any) -> dict[str, Any]:
    "Evaluation sets by name; one alone has none, and None is no set."
    return data if isinstance(data, dict) else {} if data is None else {"": data}


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    "Rows as columns; None where a row lacks one."
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def collate_prompts(
    rows: list[dict],  # each with a prompt or input_ids, and perhaps other columns
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:  # prompt_ids, prompt_mask [B, P]; prompt, conversations, settings; columns
    "Prompts padded on the left, the other columns beside them."
    columns = columns_of(rows)
    texts, rows_of_ids = read_prompts(columns, tokenizer)
    ids, mask = left_pad(rows_of_ids, tokenizer.pad_token_id)
    others = {name: column for name, column in columns.items() if name not in PROMPT_COLUMNS}
    given = columns.get("prompt", ())
    talks = [x for x in given if not isinstance(x, str)] and list(given)  # of any prompt
    batch = dict(prompt_ids=ids, prompt_mask=mask, prompt=texts, conversations=talks)
    batch["as_text"] = ["prompt" in columns] * len(rows)
    return batch | dict(settings=settings_of(columns) if talks else [], columns=others)


def turns_of(talk: Turns | None) -> list[tuple[str, str]]:
    "Role and text of each turn of a conversation, with the tools that it calls; of a text none."
    if talk is None or isinstance(talk, str):
        return []
    turns: list[tuple[str, str]] = []
    for turn in talk:
        content, calls = turn.get("content"), turn.get("tool_calls") or []
        if isinstance(content, (list, tuple)):  # parts, of which some may be no text
            content = "".join(str(part.get("text", part)) for part in content)
        called = [json.dumps(x.get("function", x), ensure_ascii=False) for x in calls]
        said = [*([] if content is None else [str(content)]), *called]
        turns.append((str(turn.get("role", "")), "\n".join(said)))
    return turns


def turns_text(talk: Turns | None) -> str:
    "A text, or a conversation turn by turn."
    lines = [f"{role}: {text}" for role, text in turns_of(talk)]
    return talk if isinstance(talk, str) else "\n".join(lines)


def as_batch(
    batch: Any,  # of `collate_prompts`, of another collator; a list of prompts, or of rows
    tokenizer: PreTrainedTokenizerBase,
    times: int = 1,  # each prompt so often, side by side, with its columns
    check: Callable[[list[int]], None] = lambda lengths: None,  # of the prompts' lengths
) -> dict[str, Any]:  # as of `collate_prompts`
    "Whatever a step is called with, as one batch of prompts. Raises ValueError on anything else."
    if not isinstance(batch, Mapping) or "prompt_ids" not in batch:
        rows = rows_of(batch)
        if not rows:
            raise ValueError("the batch has 0 prompts: give at least one.")
        batch = collate_prompts(rows, tokenizer)
        check(batch["prompt_mask"].sum(1).tolist())
    return dict(batch) if times == 1 else repeat_prompts(batch, times)


def rows_of(batch: Any, name: str = "the batch") -> list[dict[str, Any]]:
    "Columns, or a list of prompts or rows, row by row. Raises ValueError where it is none of them."
    if isinstance(batch, Dataset):
        batch = batch[:]
    if isinstance(batch, Mapping):
        lists = {k: x if isinstance(x, str) else plain(x) for k, x in batch.items()}
        lengths = {len(x) if isinstance(x, (list, tuple)) else None for x in lists.values()}
        if len(lengths) == 1 and None not in lengths:
            return [dict(zip(lists, row)) for row in zip(*lists.values())]
    elif isinstance(batch, (list, tuple)):
        return [dict(x) if is_row(x) else dict(prompt=x) for x in batch]
    raise ValueError(
        f"{name} is {reprlib.repr(batch)}: give a list of prompts, or columns of one length such "
        "as dict(prompt=['Once upon a time'])."
    )


def is_row(x: Any) -> bool:
    "Whether it has columns; a turn of a conversation has a role."
    return isinstance(x, Mapping) and "role" not in x


def as_data(data: Any, name: str = "the data set") -> Any:
    """Prompts in any container as a Dataset, several sets as a dictionary of them, None as it is.
    Raises ValueError that names the argument."""
    if data is None or isinstance(data, Dataset):
        return data
    if isinstance(data, (IterableDataset, torch.utils.data.IterableDataset)):
        raise ValueError(
            f"{name} is a stream ({type(data).__name__}), and a run must know how many prompts it "
            "has: give a Dataset, such as Dataset.from_list(list(stream.take(10_000)))."
        )
    if isinstance(data, pd.DataFrame):
        data = data.to_dict("list")
    elif isinstance(data, torch.utils.data.Dataset):
        data = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
    rows = lambda x: (
        isinstance(x, (Dataset, pd.DataFrame)) or (isinstance(x, list) and is_row(x[0]))
    )
    if isinstance(data, Mapping) and data and all(len(x) and rows(x) for x in data.values()):
        return {split: as_data(x, f"{name}[{split!r}]") for split, x in data.items()}
    talks = lambda x: isinstance(x, list) and bool(x) and not is_row(x[0])
    joined = lambda x: join_blocks(call_texts(x)) if isinstance(x[0], Mapping) else call_texts(x)
    plain_rows = [{k: plain(x) for k, x in row.items()} for row in rows_of(data, name)]
    for change in (call_texts, joined):
        rows_given = [{k: change(x) if talks(x) else x for k, x in r.items()} for r in plain_rows]
        try:
            return Dataset.from_dict(columns_of(rows_given))
        except (ValueError, TypeError) as error:  # of Arrow
            problem = error
    raise ValueError(
        f"{name} has a column of several types, or text with lone surrogates ({problem}): give "
        "texts, or conversations, without them."
    ) from problem


def repeat_prompts(batch: Mapping[str, Any], times: int) -> dict[str, Any]:
    "Each prompt so often, side by side, with its columns."

    def repeat(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.repeat_interleave(times, 0)
        return [item for item in x for _ in range(times)]

    columns = {name: repeat(column) for name, column in batch.get("columns", {}).items()}
    others = {name: repeat(x) for name, x in batch.items() if name != "columns"}
    return {**others, "columns": columns}


def prompt_columns(data: Dataset) -> dict[str, Any]:
    "The columns that hold the prompts, as lists; where there are none, the names of the others."
    columns = {name: data[name][:] for name in PROMPT_COLUMNS if name in data.column_names}
    known = {"prompt", "input_ids"} & {*columns}
    return columns if known else dict.fromkeys(data.column_names)


def check_prompts(
    data: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    check: Callable[[list[int]], None],
    functions: Mapping[str, Callable],
) -> None:
    """Raises ValueError on no prompts, one that is wrong, ids that are not those of the text beside
    them, and columns that a reward function does not take."""
    if not len(data):
        raise ValueError("the data set has 0 prompts: give at least one batch of them.")
    columns = prompt_columns(data)
    texts, rows = read_prompts(columns, tokenizer)
    check([len(ids) for ids in rows])
    if "prompt" in columns and "input_ids" in columns:
        text_columns = {k: x for k, x in columns.items() if not k.endswith(("ids", "mask"))}
        of_text = read_prompts(text_columns, tokenizer)[1]
        bare = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        for i, (ours, ids) in enumerate(zip(rows, of_text)):
            if ours != ids and bare(ours) != bare(ids):
                raise ValueError(
                    f"prompt {i} is {reprlib.repr(columns['prompt'][i])} and its input_ids are "
                    f"{reprlib.repr(texts[i])}: remove one of the two columns."
                )
    if taken := [name for name in data.column_names if name.startswith("score/")]:
        raise ValueError(f"the column {taken[0]!r} has a name of the trainer's own: rename it.")
    check_taken(data, functions)


def check_taken(data: Dataset, functions: Mapping[str, Callable], complete: bool = False) -> None:
    """Raises ValueError on columns that a reward function does not take; and, where they must be
    complete, on one that it needs and that is not there."""
    others = dict.fromkeys(sorted(set(data.column_names) - {*PROMPT_COLUMNS}))
    for name, function in functions.items():
        signature = inspect.signature(function)
        made = dict.fromkeys({"response_ids", "offsets", "environments"} & {*signature.parameters})
        first, named = called_with(function, [], [])
        try:
            bind = signature.bind if complete else signature.bind_partial
            bind(*first, **named, **(made | others))
        except TypeError as error:
            raise ValueError(
                f"reward function {name}{signature} is called as f(prompts, responses, **columns), "
                f"or as in trl f(completions, **columns), with the columns {[*others]}: {error}. "
                "Give it these arguments; rename, add or remove columns, or take **columns."
            ) from error


@dataclass(frozen=True)
class PromptReader:
    "Loads the prompts of a run, and checks them against its models and its reward functions."

    tokenizer: PreTrainedTokenizerBase
    models: list[tuple[str, Any]]  # that read the prompts, by name
    answer: int  # tokens of a response
    functions: Mapping[str, Callable]  # that get the other columns, by name

    def check_lengths(self, lengths: list[int]) -> None:
        "Raises ValueError on an empty prompt, and one that leaves a model no positions to answer."
        if not min(lengths):
            raise ValueError(f"prompt {lengths.index(0)} is empty: drop it with dataset.filter.")
        for name, model in self.models:
            config = unwrap(model).config.get_text_config()
            positions = getattr(config, "max_position_embeddings", None)
            if positions and max(lengths) + self.answer > positions:
                raise ValueError(
                    f"prompt {lengths.index(max(lengths))} has {max(lengths)} tokens; with "
                    f"response_length {self.answer} that is more than the {positions} positions of "
                    f"the {name}: shorten the prompts or response_length."
                )

    def load(self, data: Any, name: str) -> Any:
        "As of `as_data`. Raises ValueError that names the argument and what is wrong in it."
        loaded = as_data(data, name)
        if isinstance(loaded, dict) and name == "train_dataset":
            raise ValueError(
                f"{name} has the splits {', '.join(loaded)}: give one of them, such as "
                f"data[{next(iter(loaded))!r}]."
            )
        for split, rows in sets_of(loaded).items():
            try:
                check_prompts(rows, self.tokenizer, self.check_lengths, self.functions)
            except ValueError as error:
                raise ValueError(f"{name}{f'[{split!r}]' if split else ''}: {error}") from error
        return loaded


def stop_tokens(
    tokenizer: PreTrainedTokenizerBase,
    given: Sequence[int] | None,  # None: the tokenizer's EOS, and what the policy has beside it
    policy: Any,
) -> tuple[int, ...]:
    "The ids that end a response. Raises ValueError where the tokenizer does not know them."
    if given is not None:
        if not given or not all(0 <= i < len(tokenizer) for i in given):
            raise ValueError(
                f"stop_token_id is {', '.join(map(str, given)) or 'empty'} and the tokenizer has "
                f"ids 0 to {len(tokenizer) - 1}: give one of them, or several."
            )
        return tuple(given)
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError(
            "the tokenizer has no EOS token, so no response would end: set tokenizer.eos_token, or "
            "stop_token_id or stop_strings."
        )
    ends = getattr(getattr(unwrap(policy), "generation_config", None), "eos_token_id", None)
    several = ends if isinstance(ends, (list, tuple)) and eos in ends else ()  # of chat models
    return tuple(dict.fromkeys([eos, *several]))


def warn_of_turns(data: Any, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
    "Logs that a chat template ends a turn by a token that does not end a response."
    first = data[0] if isinstance(data, Dataset) and "prompt" in data.column_names else {}
    if not stop_ids or isinstance(first.get("prompt", ""), str):
        return
    asks = [dict(role="user", content="a")]  # some templates write a system turn in prompts alone
    mark = turn_end(marked_pair(asks, "a", tokenizer, **template_settings(first)).text, tokenizer)
    if mark and tokenizer.convert_tokens_to_ids(mark) not in stop_ids:
        logger.warning(
            f"the chat template ends a turn by {mark!r}, and a response goes on behind it, to "
            f"{tokenizer.decode(stop_ids[0])!r}. If {mark!r} is to end it, set "
            f"stop_token_id={tokenizer.convert_tokens_to_ids(mark)}."
        )


def stop_texts(
    tokenizer: PreTrainedTokenizerBase, strings: list[str] | None
) -> StopStringCriteria | None:
    "What ends a response at one of these texts. Raises ValueError where no tokens can write one."
    try:
        return StopStringCriteria(tokenizer, strings) if strings else None
    except ValueError as error:
        raise ValueError(
            f"stop_strings is {strings}, and the tokenizer's vocabulary cannot be searched for "
            "tokens that write one of them: give stop_token_id."
        ) from error
