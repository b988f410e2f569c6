"""Which weights learn, their data types, and a warning where 16-bit weights are trained.

bfloat16 has 8 significant bits and float16 has 11, so a step below 1/512 or 1/4096 of a weight
leaves it as it is. At a learning rate of 3e-6 that is nearly every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from rlhf_nb.base.sharding import zero3_is_live

logger = logging.get_logger(__name__)
HALF = (torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    "Its name without the module's."
    return str(dtype).removeprefix("torch.")


def find_unsaved(model: Any) -> list[str]:
    "Names of weights that learn outside a model's adapters, with which they would not be saved."
    configs = getattr(model, "peft_config", {})
    if not configs or zero3_is_live() or any(c.is_prompt_learning for c in configs.values()):
        return []
    from peft import get_peft_model_state_dict

    saved = [
        get_peft_model_state_dict(model, adapter_name=own, save_embedding_layers=False)
        for own in configs
    ]
    places = {weight.data_ptr() for weights in saved for weight in weights.values()}
    named = model.named_parameters()
    return [part for part, x in named if x.requires_grad and x.data_ptr() not in places]


def check_learns(model: Any, name: str = "model", prefix: str = "") -> None:
    """Raises ValueError where none of a model's weights learns, one of them is not saved, or an
    adapter is merged; the prefix is of the model's arguments."""
    if lost := find_unsaved(model):
        raise ValueError(
            f"{len(lost)} of the {name}'s weights learn outside its adapter and would not be saved "
            f"with it, such as {lost[0]}: freeze them, or name their module in modules_to_save."
        )
    if any(getattr(part, "merged", None) is True for part in model.modules()):
        raise ValueError(
            f"the {name}'s adapter is merged into its weights and would not learn: call "
            f"{prefix}model.unmerge_adapter()."
        )
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ValueError(
            f"none of the {name}'s weights learns: call {prefix}model.requires_grad_(True), or "
            f"give {prefix}peft_config to train an adapter."
        )


def half_trained(model: nn.Module) -> list[str]:
    "The 16-bit types of weights that learn."
    kinds = {p.dtype for p in model.parameters() if p.requires_grad and p.dtype in HALF}
    return sorted(map(dtype_name, kinds))


def warn_of_half(model: nn.Module) -> None:
    "Log it where weights would learn in 16 bits; DeepSpeed ZeRO-3 keeps them in float32 besides."
    if (half := half_trained(model)) and not zero3_is_live():
        logger.warning(
            f"weights that learn are in {' and '.join(half)}: at a small learning rate most of "
            "their steps round to nothing. Load the model with dtype=torch.float32; bf16=True "
            "still computes in 16 bits."
        )


def warn_of_warm_up(scheduler: Any, args: Any, steps: int) -> None:
    "Logs that a run ends before its learning rate is the one that was set."
    factor = getattr(scheduler, "lr_lambdas", [lambda step: 1.0])[0]
    warm_up = args.get_warmup_steps(steps)
    if warm_up >= steps > 0 and factor(steps - 1) < 1:
        logger.warning(
            f"the warm-up (warmup_steps) has {warm_up} steps and the run {steps}: it ends before "
            "the learning rate that was set. Lower warmup_steps (below 1: a share of all steps)."
        )
