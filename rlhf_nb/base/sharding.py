"""What every layer may ask of ranks and of weights that are sharded, by ZeRO-3 or by FSDP2. How
models are placed is in `training/layout.py`.

A private name used here (tests/test_structure.py names the one that a release misses)::

    transformers  PreTrainedModel._no_split_modules: which layers FSDP shards one by one
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from transformers.integrations import is_deepspeed_zero3_enabled


def _is_news(record: logging.LogRecord) -> bool:
    "DeepSpeed, which is imported where a model is saved, need not say that there is no GPU."
    return "Setting accelerator to CPU" not in record.getMessage()


logging.getLogger("DeepSpeed").addFilter(_is_news)

# ---- Ranks ----


def take_from_first_rank(x: Any) -> Any:
    "What the first rank has, on every rank."
    what = [x]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(what)
    return what[0]


def is_first_rank() -> bool:
    "Whether this process is the first, or the only one."
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def between_ranks(error: RuntimeError) -> bool:
    "Whether it comes from the connection between the ranks."
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


def run_on_ranks(here: bool, action: Callable[[], Any]) -> Any:
    """Run where `here`. Returns on every rank what it returned on the first, or raises on every
    rank what it raised on one, so that none waits for that one."""
    result = error = None
    if here:
        try:
            result = action()
        except (ValueError, OSError) as caught:
            error = caught
    outcomes = gather_object([(result, error)])
    for _, error in outcomes:
        if error is not None:
            raise error
    return outcomes[0][0]


# ---- Weights that are sharded ----


def is_sharded_by_deepspeed(model: nn.Module) -> bool:
    "Whether ZeRO-3 holds a part of some weight alone."
    return any(hasattr(p, "ds_id") for p in model.parameters())


def is_sharded(weight: Tensor) -> bool:
    "Whether this rank holds a part of it alone, under ZeRO-3 or FSDP2."
    return hasattr(weight, "ds_id") or isinstance(weight, DTensor)


def gather_weights(
    model: nn.Module | Sequence[Tensor],  # or some of its weights
    write: bool = False,  # keep changes
) -> AbstractContextManager:
    "Inside, the weights that ZeRO-3 sharded are whole."
    weights = [*(model.parameters() if isinstance(model, nn.Module) else model)]
    if not any(hasattr(weight, "ds_id") for weight in weights):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(weights, modifier_rank=0 if write else None)


def full_tensor(weight: Tensor) -> Tensor:
    "All of a weight that FSDP2 sharded, on this rank; any other as it is."
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def full_shape(weight: Tensor) -> torch.Size:
    "Its shape, all ranks' parts together."
    return getattr(weight, "ds_shape", weight.shape)


def load_full(model: nn.Module, state: dict[str, Tensor]) -> None:
    "`load_state_dict`, also into weights that FSDP2 sharded."
    if any(isinstance(weight, DTensor) for weight in model.parameters()):
        set_model_state_dict(model, {**state}, options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(state)


def zero3_is_live() -> bool:
    "Whether models that are made now are sharded at once."
    return is_deepspeed_zero3_enabled()


def layer_names(*models: nn.Module) -> list[str]:
    "Class names of the layers that FSDP shards one by one, as far as the models have them."
    parts = [part for model in models for part in model.modules()]
    named = {name for part in parts for name in getattr(part, "_no_split_modules", None) or ()}
    return sorted(named & {type(part).__name__ for part in parts})


def name_layers(pair: nn.Module) -> None:
    "Tell Accelerate which layers of a home-made wrapper FSDP shards one by one."
    pair._no_split_modules = layer_names(pair)  # type: ignore[assignment]  # read by Accelerate
