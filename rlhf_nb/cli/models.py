"""Models, tokenizers and adapters by name. An error names the option that the name came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_nb.base.loading import no_bars
from rlhf_nb.cli.arguments import ModelArguments, TrainModelArguments
from rlhf_nb.training.model_loading import load_tokenizer


@contextmanager
def require_name(flag: str, name: str | None, quiet: bool = False) -> Iterator[str]:
    "The name, to load from. Raises ValueError where there is none; an error gets the option."
    if not name:
        raise ValueError(f"{flag} is missing: give a name on the hub, or a folder.")
    try:
        with no_bars(quiet):
            yield name
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{flag} {name}: {error}") from error


def load_options(models: ModelArguments) -> dict[str, Any]:
    "Data type and attention, as `from_pretrained` takes them."
    dtype = models.dtype if models.dtype == "auto" else getattr(torch, models.dtype)
    if models.attn_implementation is None:
        return dict(dtype=dtype)
    return dict(dtype=dtype, attn_implementation=models.attn_implementation)


def in_dtype(model: Any, models: ModelArguments) -> Any:
    "The model in the data type that --dtype names."
    return model if models.dtype == "auto" else model.to(load_options(models)["dtype"])


def adapter_config(models: TrainModelArguments, task: str, wanted: bool) -> Any:
    "A LoraConfig for a task_type of peft, where wanted. Raises ValueError where peft is missing."
    if not wanted:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError("--use_peft needs peft: pip install peft, or leave it out.") from error
    layers: Any = models.lora_target_modules
    if layers is not None and len(layers) == 1 and not layers[0].isidentifier():
        layers = layers[0]  # all-linear, or a pattern for whole names
    return LoraConfig(
        task_type=task,
        r=models.lora_r,
        lora_alpha=models.lora_alpha,
        lora_dropout=models.lora_dropout,
        target_modules=layers,
    )


def load_run_tokenizer(models: ModelArguments) -> PreTrainedTokenizerBase:
    "The tokenizer that is named, or the one in the model's folder."
    name, flag = models.tokenizer_name_or_path, "--tokenizer_name_or_path"
    if not name:
        name, flag = models.model_name_or_path, "--model_name_or_path"
    with require_name(flag, name) as known:
        return load_tokenizer(known)
