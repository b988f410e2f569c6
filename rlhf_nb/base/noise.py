"""What makes two forward passes over the same tokens differ while a model trains: dropout of every
kind, dropped layers, jitter of a router. PPO's ratio is 1 before the first step only without it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlhf_nb.base.opened import embedding_rows, unwrap
from rlhf_nb.base.random_state import random_state_kept

NAMES = re.compile("drop|jitter|noise")
ALWAYS_ON = re.compile("jitter|noise")  # eval() turns dropout off; a router may not ask
# mean difference, in standard deviations of the output: more than the order of sums can make
ROUNDING, COARSE_ROUNDING = 1e-5, 1e-2


def switch_off_noise(
    model: Any,
    names: re.Pattern[str] = NAMES,  # of the settings and classes that make noise
) -> Any:
    """The same model, its dropout, layer drop and router jitter set to 0: in its modules, in those
    of an adapter, and in the configs that modules read as they run (Falcon's `hidden_dropout`),
    which become the model's own copies and are saved with it."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(vars(module).get("config"), PreTrainedConfig):
            module.config = copy.deepcopy(module.config, copies)
            _turn_off(vars(module.config), names)
        _turn_off(vars(module), names)
        if names.search(type(module).__name__.lower()) and _is_on(getattr(module, "p", None)):
            module.p = 0.0  # as nn.Dropout and its like call it
    return model


def _turn_off(settings: dict[str, Any], names: re.Pattern[str]) -> None:
    "Set each probability or width of noise to 0; an adapter keeps a dictionary of them."
    for name, value in [*settings.items()]:
        if not names.search(name):
            continue
        if isinstance(value, dict):
            value.update({key: 0.0 for key, x in value.items() if _is_on(x)})
        elif _is_on(value):
            settings[name] = 0.0


def _is_on(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) <= 1


@torch.no_grad()
def check_steady(
    model: Any,
    what: str,  # that an error calls it, such as "policy"
    read: Callable[[Any, Tensor, Tensor], Tensor],  # its output for ids and a mask [B, L]
) -> None:
    """Raises ValueError where two forward passes of 16 tokens in training mode do not agree: noise
    that `switch_off_noise` does not know. Random state and mode are left as they were."""
    inner, was_training = unwrap(model), model.training
    ids = torch.arange(16, device=next(model.parameters()).device) % embedding_rows(inner)
    ids = ids.view(2, 8)
    forward = partial(read, model, ids, torch.ones_like(ids))
    model.train()
    try:
        with random_state_kept():
            first, second = forward(), forward()
            narrow = first.dtype in (torch.float16, torch.bfloat16)
            limit = COARSE_ROUNDING if narrow else ROUNDING
            known = first.isfinite()  # ids that are masked are not
            first, second = first[known].float(), second[known].float()
            gap = ((first - second).abs().mean() / first.std().clamp(min=1e-20)).item()
            if not gap > limit:  # NaN is for those who look at weights and losses
                return
            where = _first_that_differs(model, forward)
    finally:
        model.train(was_training)
    raise ValueError(
        f"the {what}, {type(inner).__name__}, is random while it trains: two forward passes over "
        f"the same tokens differ by {gap:.2g} standard deviations, so the ratio of an update would "
        f"not begin at 1. They differ first in {where}: set what it draws (dropout, jitter, noise, "
        "a random hash) to 0 in the model's config, or take another model."
    )


def _first_that_differs(model: nn.Module, forward: Callable[[], Tensor]) -> str:
    "The innermost module whose output is the first to differ between two passes, and its class."
    both = zip(_outputs(model, forward), _outputs(model, forward))
    names = (a for (a, x), (b, y) in both if a != b or not torch.equal(x, y))
    name = next(names, "")
    return f"{name or 'its forward'} ({type(model.get_submodule(name)).__name__})"


def _outputs(model: nn.Module, forward: Callable[[], Tensor]) -> list[tuple[str, Tensor]]:
    "What each module returns in one pass, in the order in which they return."
    outputs: list[tuple[str, Tensor]] = []

    def keep(name: str, output: Any) -> None:
        values = output if isinstance(output, (tuple, list)) else [output]
        outputs.extend((name, x.float().clone()) for x in values if isinstance(x, Tensor))

    handles = [
        module.register_forward_hook(lambda module, given, output, name=name: keep(name, output))
        for name, module in model.named_modules()
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return outputs
