"""Run the layers below the first one that learns once for each row of an update.

With adapters on the upper layers alone, policy, reference and every epoch read the same states
from the layers below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_nb.base.last_layer import FAMILIES
from rlhf_nb.base.opened import body_of
from rlhf_nb.base.sharding import is_sharded


def layers_of(body: Any) -> nn.ModuleList:
    "The layers of a transformers model without its head."
    return getattr(body, "layers", None) or getattr(body, "h", None) or nn.ModuleList()


def frozen_layers(body: Any) -> int:
    """How many of the first layers return the same states in every forward pass of an update: no
    weight learns in or before them, and they have no adapter and no dropout. 0: none is skipped."""
    layers = layers_of(body)
    learns = [any(weight.requires_grad for weight in layer.parameters()) for layer in layers]
    if True not in learns or getattr(body.config, "model_type", None) not in FAMILIES:
        return 0
    count = learns.index(True)
    above = {id(part) for layer in layers[count:] for part in layer.modules()}
    below = [part for part in body.modules() if id(part) not in above]
    weights = [weight for part in below for weight in part.parameters(recurse=False)]
    adapted = any(hasattr(part, "base_layer") for part in below)
    random = any(isinstance(part, nn.Dropout) and part.p > 0 for part in below)
    recomputed = any(getattr(part, "gradient_checkpointing", False) for part in body.modules())
    replaced = any("forward" in vars(layer) for layer in layers[:count])
    unsafe = adapted or random or recomputed or replaced
    return 0 if unsafe or any(w.requires_grad or is_sharded(w) for w in weights) else count


class LowerStates:
    "What the first layer that learns reads, for each row of token ids that the body was given."

    def __init__(self) -> None:
        self.states: dict[bytes, Tensor] = {}  # ids -> [tokens, hidden]
        self.rows: list[bytes] = []  # of the present call; none in a call that is left alone
        self.mask = torch.empty(0)  # [B, L] of the present call
        self.known = False  # whether the states of all of its rows are kept

    def begin(self, body: nn.Module, args: tuple, inputs: dict[str, Any]) -> None:
        "Before the body: which rows are these?"
        mask, alone = inputs.get("attention_mask"), inputs.get("use_cache") is not False
        self.rows, self.known = [], False
        if args or alone or mask is None or mask.dim() != 2 or "input_ids" not in inputs:
            return
        self.mask = mask.bool()
        ids = inputs["input_ids"].cpu().numpy()
        self.rows = [row[real].tobytes() for row, real in zip(ids, self.mask.cpu().numpy())]
        self.known = all(row in self.states for row in self.rows)

    def skip(self, forward: Callable, hidden: Tensor, *args: Any, **inputs: Any) -> Tensor:
        "In place of a lower layer's forward."
        return hidden if self.known else forward(hidden, *args, **inputs)

    def enter(self, layer: nn.Module, args: tuple) -> tuple:
        "Before the first layer that learns: its input, as it was the first time."
        hidden = args[0]
        if self.known:
            hidden = hidden.detach().clone()
            hidden[self.mask] = torch.cat([self.states[row] for row in self.rows])
        else:
            for row, states, real in zip(self.rows, hidden.detach(), self.mask):
                self.states[row] = states[real]
        return hidden, *args[1:]


@contextmanager
def lower_layers_once(model: Any) -> Iterator[LowerStates]:
    """Inside, the frozen lower layers of a model run once for each row of token ids; calls with a
    cache, which sample, are left alone. Changes nothing where `frozen_layers` is 0."""
    body, kept = body_of(model), LowerStates()
    with ExitStack() as undo:
        if body is not None and (count := frozen_layers(body)):
            layers = layers_of(body)
            hook = body.register_forward_pre_hook(kept.begin, with_kwargs=True)
            undo.callback(hook.remove)
            undo.callback(layers[count].register_forward_pre_hook(kept.enter).remove)
            for layer in layers[:count]:
                layer.forward = partial(kept.skip, layer.forward)
                undo.callback(vars(layer).pop, "forward")
        yield kept
