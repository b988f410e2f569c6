"Prompts from a data set: texts, conversations or ids, padded and checked before anything runs."

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_nb.masks import left_pad
from rlhf_nb.models import encode_prompts, inside

PROMPT_COLUMNS = ("prompt", "input_ids", "attention_mask")


def read_prompts(
    columns: Mapping[str, Any],  # prompt: texts or conversations; or input_ids, attention_mask
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[str], list[list[int]]]:  # texts, and their ids without padding
    "Prompts as text and as ids. Raises ValueError where there are none."
    if "input_ids" in columns:
        rows = [list(row) for row in columns["input_ids"]]
        real = columns.get("attention_mask")
        if real is None:
            real = [[i != tokenizer.pad_token_id for i in row] for row in rows]
        rows = [[int(i) for i, keep in zip(row, kept) if keep] for row, kept in zip(rows, real)]
        return [str(tokenizer.decode(row)) for row in rows], rows
    if "prompt" not in columns:
        raise ValueError(
            f"the data set has columns {list(columns)} and no prompt: rename the column with the "
            "prompts, dataset.rename_column(..., 'prompt'), or give input_ids."
        )
    opened: dict[str, Any] = dict(tokenize=False, add_generation_prompt=True)
    texts = [
        x if isinstance(x, str) else str(tokenizer.apply_chat_template(x, **opened))
        for x in columns["prompt"]
    ]
    return texts, encode_prompts(texts, tokenizer)


def as_data(data: Any) -> Any:
    "Rows as a Dataset: lists of dictionaries and torch's data sets too; or several, by name."
    if data is None or hasattr(data, "column_names"):
        return dict(data) if isinstance(data, dict) else data
    if isinstance(data, Mapping):
        return {name: as_data(rows) for name, rows in data.items()}
    rows = [data[i] for i in range(len(data))]
    if not all(isinstance(row, Mapping) for row in rows):
        raise TypeError(
            f"the data set is {type(data).__name__} of {type(rows[0]).__name__}: give a Dataset, "
            "or a list of dictionaries such as {'prompt': 'Once upon a time'}."
        )
    plain = lambda x: x.tolist() if isinstance(x, Tensor) else x
    return Dataset.from_list([{name: plain(x) for name, x in row.items()} for row in rows])


def sets_of(data: Any) -> dict[str, Any]:
    "Evaluation sets by name; one alone has none, and None is no set."
    return data if isinstance(data, dict) else {} if data is None else {"": data}


def collate_prompts(
    rows: list[dict],  # each with a prompt or input_ids, and perhaps other columns
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:  # prompt_ids, prompt_mask [B, P]; prompt; columns
    "Prompts padded on the left, the other columns beside them."
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    texts, rows_of_ids = read_prompts(columns, tokenizer)
    ids, mask = left_pad(rows_of_ids, tokenizer.pad_token_id)
    others = {name: column for name, column in columns.items() if name not in PROMPT_COLUMNS}
    return dict(prompt_ids=ids, prompt_mask=mask, prompt=texts, columns=others)


def as_batch(
    batch: Mapping[str, Any] | Sequence[str],  # of `collate_prompts`, of another collator, or texts
    tokenizer: PreTrainedTokenizerBase,
    times: int = 1,  # each prompt so often, side by side, with its columns
) -> dict[str, Any]:  # as of `collate_prompts`
    "Whatever a step is called with, as one batch of prompts."
    if not isinstance(batch, Mapping):
        batch = collate_prompts([dict(prompt=x) for x in batch], tokenizer)
    if "prompt_ids" not in batch:  # of a collator of the user's own
        lists = {name: x.tolist() if isinstance(x, Tensor) else [*x] for name, x in batch.items()}
        rows = [dict(zip(lists, row)) for row in zip(*lists.values())]
        batch = collate_prompts(rows, tokenizer)
    return dict(batch) if times == 1 else repeated(batch, times)


def repeated(batch: Mapping[str, Any], times: int) -> dict[str, Any]:
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
    return columns or dict.fromkeys(data.column_names)


def check_prompts(
    data: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
    models: Iterable[tuple[str, Any]],  # that read them, by name
    response_length: int,
) -> None:
    """Raises ValueError on no prompts, an empty one, or one that leaves no positions to answer in
    one of the models."""
    if data is None:
        return
    if not len(data):
        raise ValueError("the data set has 0 prompts: give at least one batch of them.")
    lengths = [len(ids) for ids in read_prompts(prompt_columns(data), tokenizer)[1]]
    if not min(lengths):
        raise ValueError(f"prompt {lengths.index(0)} is empty: drop it with dataset.filter.")
    for name, model in models:
        positions = getattr(inside(model).config.get_text_config(), "max_position_embeddings", None)
        if positions and max(lengths) + response_length > positions:
            raise ValueError(
                f"prompt {lengths.index(max(lengths))} has {max(lengths)} tokens; with "
                f"response_length {response_length} that is more than the {positions} positions of "
                f"the {name}: shorten the prompts or response_length."
            )


def stop_tokens(
    tokenizer: PreTrainedTokenizerBase,
    given: Sequence[int] | None,  # None: the tokenizer's EOS, and what the policy has beside it
    policy: Any,
) -> tuple[int, ...]:
    """The ids that end a response. Raises ValueError where the tokenizer does not know the ones
    given."""
    if given is not None:
        if not given or not all(0 <= i < len(tokenizer) for i in given):
            raise ValueError(
                f"stop_token_id is {', '.join(map(str, given)) or 'empty'} and the tokenizer has "
                f"ids 0 to {len(tokenizer) - 1}: give one of them, or several."
            )
        return tuple(given)
    eos = tokenizer.eos_token_id
    ends = getattr(getattr(inside(policy), "generation_config", None), "eos_token_id", None)
    several = ends if isinstance(ends, (list, tuple)) and eos in ends else ()  # of chat models
    return tuple(dict.fromkeys([eos, *several]))
