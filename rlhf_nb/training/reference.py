"The policy that the KL is measured from: a frozen model, or the policy with its adapter off."

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_nb.base.sharding import gather_weights
from rlhf_nb.forward import Forward
from rlhf_nb.kl_control import response_full_kl
from rlhf_nb.rollout import Rollout
from rlhf_nb.training.layout import Measure, Placed

# What a weight of an adapter is while the adapter changes nothing, as a new one of that kind does.
# Of other kinds, such as FourierFT, that is not known.
NEUTRAL = dict(lora_B=0.0, lora_embedding_A=0.0, ia3_l=1.0, vera_lambda_b=0.0, hada_w2_b=0.0)


def needs_reference(policy: Any) -> bool:
    """Whether the policy with its adapter off is no reference: weights outside the adapter learn,
    or the adapter may change the policy already; see NEUTRAL."""
    name, known = policy.active_adapter, False
    for part, weight in policy.named_parameters():
        parts = part.split(".")
        if name not in parts and weight.requires_grad:
            return True
        kinds = NEUTRAL.keys() & parts if name in parts else ()
        known = known or bool(kinds)
        with gather_weights([weight] * len(kinds)):
            if any((weight != NEUTRAL[kind]).any() for kind in kinds):
                return True
    for part in policy.modules():
        copies, own = getattr(part, "modules_to_save", {}), getattr(part, "original_module", None)
        if isinstance(own, nn.Module) and name in copies:
            pairs = [*zip(own.parameters(), copies[name].parameters())]
            with gather_weights([weight for pair in pairs for weight in pair]):
                if not all(torch.equal(a, b) for a, b in pairs):
                    return True
    return not known


@contextmanager
def as_reference(policy: Any, adapter: str | None) -> Iterator[None]:
    "Inside, the policy is its own reference: its adapter off, or the named one on."
    if adapter is None:
        with policy.disable_adapter():
            yield
        return
    own = policy.active_adapter
    policy.set_adapter(adapter)
    try:
        yield
    finally:
        policy.set_adapter(own)


class Reference:
    """Runs the policy that the KL is measured from: a frozen model, or the policy that is trained
    with its adapter off or another one on."""

    def __init__(
        self,
        policy: Callable[[], Any],  # returns the policy that is trained
        adapter: str | None,  # that the reference has; None: none
        placed: Placed | None,  # a frozen model; None: the policy
    ):
        self.policy, self.adapter, self.placed = policy, adapter, placed

    def __call__(self, measure: Measure) -> Any:
        "`measure(reference)`."
        if self.placed is not None:
            return self.placed(measure)
        with as_reference(self.policy(), self.adapter):
            return measure(self.policy())

    def full_kl(self, forward: Forward, r: Rollout) -> Tensor:  # [B, T] nats, zero on padding
        "KL per token, summed over the vocabulary."
        policy = self.policy()
        off = nullcontext if self.placed else partial(as_reference, policy, self.adapter)

        def exact(model: nn.Module, part: Rollout) -> tuple[Tensor]:
            how: Any = dict(temperature=forward.temperature, ref_context=off, chosen=part.chosen)
            return (response_full_kl(policy, model, *part.sequences, **how),)

        over = lambda model: forward.over(r, partial(exact, model))[0]
        return over(policy) if self.placed is None else self.placed(over)
