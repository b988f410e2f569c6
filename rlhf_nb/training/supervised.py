"""What supervised fine-tuning and reward training share: settings, the tokenizer that belongs to a
model, and data of any container through one encoding."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, TypeVar

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging

from rlhf_nb.base.encoding import turn_end
from rlhf_nb.base.fields import Count, setting
from rlhf_nb.base.loading import pretrained_tokenizer
from rlhf_nb.training.config import CheckedArguments, check_args
from rlhf_nb.training.model_loading import load_tokenizer
from rlhf_nb.training.prompts import as_data

logger = logging.get_logger(__name__)


@dataclass
class SupervisedConfig(CheckedArguments):
    "`transformers.TrainingArguments` and what `SFTTrainer` and `RewardTrainer` need more."

    max_length: Count | None = setting(
        None,
        "Most tokens of prompt and answer together; the prompt is cut on its left. None: no limit.",
        "data",
    )
    logging_steps: float = setting(10, "Steps between two logs.")
    train_sampling_strategy: str = setting(
        "group_by_length", "Rows of like length share a batch: little padding."
    )
    length_column_name: str = setting("length", "Column with the tokens of a row.")
    dataset_num_proc: Count | None = setting(None, "Processes that tokenise the data.", "run")
    pad_to_multiple_of: Count | None = setting(
        None, "Batches are padded to a multiple of this.", "data"
    )
    eos_token: str | None = setting(
        None, "The token that ends a text. None: the tokenizer's own.", "data"
    )
    pad_token: str | None = setting(None, "The pad token. None: the tokenizer's own.", "data")
    chat_template_path: str | None = setting(
        None, "A .jinja file, or the name of a tokenizer whose chat template is taken.", "data"
    )
    model_init_kwargs: dict[str, Any] | str | None = setting(
        None, "For from_pretrained, where the model is given by name.", "models"
    )
    trust_remote_code: bool = setting(
        False, "Run code from the folder of a model given by name.", "models"
    )
    activation_offloading: Literal[False] = setting(
        False, "Use gradient_checkpointing instead.", "update"
    )

    batch_eval_metrics: Literal[False] = setting(
        False, "Metrics are of a whole evaluation.", "update"
    )
    eval_do_concat_batches: Literal[True] = setting(
        True, "Metrics are of a whole evaluation.", "update"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        config: Any = self.accelerator_config
        if config.dispatch_batches is None:  # each rank reads its own part of a stream
            config.dispatch_batches = False

    def loading(self, quantization_config: Any = None) -> dict[str, Any]:
        "What `from_pretrained` gets."
        given = self.model_init_kwargs or {}
        given = json.loads(given) if isinstance(given, str) else given
        more = dict(quantization_config=quantization_config) if quantization_config else {}
        return dict(trust_remote_code=self.trust_remote_code, **given) | more


C = TypeVar("C", bound=SupervisedConfig)
T = TypeVar("T")


def config_of(kind: type[C], args: TrainingArguments | None, folder: str) -> C:
    "The settings given, as the trainer's own kind."
    if isinstance(args, kind):
        return args
    if args is None:
        return kind(output_dir=folder)
    check_args(args, TrainingArguments if isinstance(args, TrainingArguments) else kind)
    return kind(**{f.name: getattr(args, f.name) for f in fields(args) if f.init})


def tokenizer_with(
    args: SupervisedConfig, given: PreTrainedTokenizerBase | str
) -> PreTrainedTokenizerBase:
    """A tokenizer, or the one of that name, with the tokens and the template of the settings.
    Raises ValueError on a token that it does not have."""
    options = {x: y for x, y in args.loading().items() if x in ("revision", "trust_remote_code")}
    tokenizer: Any = given
    if isinstance(given, str):
        tokenizer = pretrained_tokenizer(given, padding_side="left", **options)
    for name in ("eos_token", "pad_token"):
        if (token := getattr(args, name)) is not None:
            if token not in tokenizer.get_vocab():
                raise ValueError(f"{name} is {token!r}: give a token that the tokenizer has.")
            setattr(tokenizer, name, token)
    if (path := args.chat_template_path) is not None:
        template = Path(path).read_text("utf-8") if Path(path).is_file() else None
        tokenizer.chat_template = template or pretrained_tokenizer(path).chat_template
    if getattr(tokenizer, "eos_token", "") is None:  # what is no tokenizer is refused below
        raise ValueError(
            "the tokenizer has no EOS token, so no answer would end: set tokenizer.eos_token, or "
            "eos_token in the settings."
        )
    return load_tokenizer(tokenizer)


def column_names(data: Any) -> list[str]:
    "Also of a stream, which may know them from its first row alone."
    return list(data.column_names or next(iter(data), {}))


def number_errors(number: int, function: Callable[..., T], *given: Any, **named: Any) -> T:
    "What the function returns; a ValueError gets the number of the row."
    try:
        return function(*given, **named)
    except ValueError as error:
        raise ValueError(f"row {number}: {error}") from None


def map_rows(
    data: Any,  # a Dataset or an IterableDataset
    encode: Callable[[dict[str, list], list[int]], dict[str, list]],  # of columns and row numbers
    num_proc: int | None = None,
) -> Any:
    "The data with new columns in place of all others."
    options: dict[str, Any] = dict(num_proc=num_proc) if isinstance(data, Dataset) else {}
    if isinstance(data, Dataset) and not data.cache_files:  # in memory: nothing to find again by
        options["new_fingerprint"] = token_hex(8)  # a hash of code and tokenizer, half a second
    options |= dict(batched=True, with_indices=True, remove_columns=column_names(data))
    return data.with_format(None).map(encode, **options)


def warn_of_end(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    "Logs that the template ends a turn by another token than EOS, where a text shows it."
    if mark := turn_end(text, tokenizer):
        logger.warning_once(
            f"the chat template ends a turn by {mark!r}, and the tokenizer's EOS is "
            f"{tokenizer.eos_token!r}: an answer is learned with both, and a model stops at EOS "
            f"alone. If {mark!r} is to end it, set eos_token={mark!r}."
        )


def log_counts(data: Any) -> Any:
    """The data without the columns said, learned and merged, after their sums are logged: answers
    of the assistant, those that have labels, and rows whose answer begins inside a token. A stream
    is read later: nothing is known yet."""
    names = [name for name in ("said", "learned", "merged") if name in column_names(data)]
    if not isinstance(data, Dataset):
        return data.remove_columns(names)
    sums = {name: sum(data[name]) for name in names}
    if sums.get("said", 0) > sums.get("learned", 0):
        logger.warning(
            f"{sums['learned']:,} of {sums['said']:,} answers are learned from: the chat template "
            "leaves the others out, or max_length cuts them off."
        )
    elif sums.get("said", 0) > len(data):
        logger.info(f"all {sums['said']:,} answers are learned from")
    if sums.get("merged"):
        logger.warning(
            f"in {sums['merged']:,} of {len(data):,} rows the answer begins inside a token, which "
            "counts as the answer's. PPO samples behind a prompt that is tokenized alone: end the "
            "prompts where a token ends, such as before a space, or at a mark."
        )
    return data.remove_columns(names) if names else data


def map_sets(data: Any, encode: Callable[[Any], Any], name: str, several: bool = True) -> Any:
    "Data encoded, or each of a dictionary of them. Raises TypeError on anything else."
    if data is None or (isinstance(data, str) and several):  # a name: one encoded before
        return data
    if isinstance(data, dict) and several:
        return {k: map_sets(x, encode, f"{name}[{k!r}]", False) for k, x in data.items()}
    if isinstance(data, dict):
        split, first = next(iter(data.items()), ("train", None))
        columns = isinstance(first, (list, tuple))
        fix = f"Dataset.from_dict({name})" if columns else f"{name}[{split!r}]"
        raise TypeError(f"{name} is a {type(data).__name__}: give a Dataset, such as {fix}.")
    rows = data if isinstance(data, IterableDataset) else as_data(data, name)
    if not isinstance(rows, IterableDataset) and not len(rows):
        raise ValueError(f"{name} has 0 rows: give at least one.")
    return encode(rows)


def check_ids(row: list, tokenizer: PreTrainedTokenizerBase) -> None:
    "Raises ValueError on a row of ids that is empty, or has one that the tokenizer lacks."
    wrong = [i for i in row or [None] if type(i) is not int or not 0 <= i < len(tokenizer)]
    if wrong:
        raise ValueError(
            f"it has the id {wrong[0]}: the tokenizer's are 0 to {len(tokenizer) - 1}."
        )


def cut_prompt(
    ids: list[int],
    room: int,  # tokens that it may have
    kept: int = 0,  # first tokens that stay, such as BOS
) -> list[int]:
    "A prompt, cut on its left where it must be."
    over, kept = len(ids) - room, min(kept, room)
    return ids if over <= 0 else [*ids[:kept], *ids[kept + over :]]


def answer_ids(
    prompt: list[int],
    answer: list[int],  # with its stop token
    max_length: int | None = None,
    bos: int = 0,  # first tokens of the prompt that are never cut
) -> list[int]:
    "Prompt and answer, the prompt cut on its left if necessary. Raises ValueError on long answers."
    if max_length is None:
        return prompt + answer
    if len(answer) >= max_length:
        raise ValueError(
            f"an answer has {len(answer)} tokens with its stop token, max_length is {max_length}: "
            "raise max_length or drop the row."
        )
    return cut_prompt(prompt, max_length - len(answer), bos) + answer


def check_finite(metrics: dict[str, float], name: str) -> None:
    "Raises FloatingPointError where the loss of an evaluation is no number."
    if not math.isfinite(metrics.get(name, 0.0)):
        raise FloatingPointError(
            f"{name} is {metrics[name]}: weights or scores are not finite. Go back to an earlier "
            "checkpoint and lower learning_rate."
        )
