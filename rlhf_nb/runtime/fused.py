"""Log-probs and entropies of a plain linear head, block by block, without keeping the logits.

The backward pass computes each block's logits again, so peak memory is a block and not
tokens x vocabulary. One function, `fused_logprobs`, used where `plain_head` finds a plain matrix.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Private names used here: the hooks of torch's nn.Module (`_forward_hooks`, `_forward_pre_hooks`,
# `_backward_hooks`, `_backward_pre_hooks`), which has no public way to ask whether there are any.
BLOCK = 2**20  # logits at a time on a CPU, 4 MB: what its cache holds; on a GPU a whole chunk


class Head(NamedTuple):
    "A linear head, and what the model multiplies its logits by."

    weight: Tensor  # [V, hidden]
    bias: Tensor | None  # [V]
    scale: float


def logit_scale(config: Any) -> float:
    "What a model multiplies its logits by: Cohere names the factor, Granite its inverse."
    return (getattr(config, "logit_scale", None) or 1.0) / (
        getattr(config, "logits_scaling", None) or 1.0
    )


def plain_head(model: nn.Module) -> Head | None:
    "The head as a matrix; None where it is capped, adapted, quantised, hooked or sharded."
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    hooked = any(
        (
            head._forward_hooks,
            head._forward_pre_hooks,
            head._backward_hooks,
            head._backward_pre_hooks,
        )
    )
    if type(head) is not nn.Linear or hooked or "forward" in vars(head):
        return None
    if any(type(p) is not nn.Parameter for p in head.parameters()):
        return None
    if getattr(config, "final_logit_softcapping", None) is not None:
        return None
    return Head(head.weight, head.bias, logit_scale(config))


def fused_logprobs(
    states: Tensor,  # [N, hidden]
    head: Head,
    ids: Tensor,  # [N] the tokens that were chosen
    temperature: float,
    rows: int,  # most states at a time
    entropy: str | None,  # "learn": with a gradient; "look": its value alone; None: not at all
) -> tuple[Tensor, Tensor | None]:
    "Log-probs [N], and entropies [N] where wanted."
    states, weight, bias = _autocast(states, head.weight, head.bias)
    columns = len(weight)
    if weight.dtype in (torch.float32, torch.float64) and states.device.type == "cpu":
        rows = min(rows, max(256, BLOCK // columns))  # a bf16 sum over many blocks would be rounded
        columns = min(columns, max(256, BLOCK // rows))
    return _Fused.apply(
        states, weight, bias, ids, head.scale, temperature, (rows, columns), entropy
    )


def _autocast(states: Tensor, *weights: Tensor | None) -> list[Any]:
    "What autocast makes of the arguments of a matrix product."
    device = states.device.type
    if not torch.is_autocast_enabled(device):
        return [states, *weights]
    dtype = torch.get_autocast_dtype(device)
    return [x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in (states, *weights)]


def _logits(
    states: Tensor, weight: Tensor, bias: Tensor | None, scale: float, temperature: float
) -> Tensor:
    "Logits over temperature [n, V], float32 or wider, in one piece of memory where possible."
    z = nn.functional.linear(states, weight, bias)
    if scale != 1.0:
        z.mul_(scale)
    if z.dtype != torch.float64:
        z = z.float()
    return z if temperature == 1.0 else z.div_(temperature)


def _columns(ids: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    "Which ids are columns of z, and a valid column for each."
    return (ids >= 0) & (ids < z.shape[1]), ids.clamp(0, z.shape[1] - 1)[:, None]


class _Slice(NamedTuple):
    "What one slice of the vocabulary contributes, [n] each."

    chosen: Tensor  # the chosen logit, -inf where the token is in another slice
    total: Tensor  # log of the sum of exponentials
    entropy: Tensor | None  # within the slice


def _measure(z: Tensor, ids: Tensor, with_entropy: bool) -> _Slice:
    "Of logits z [n, V], which are overwritten."
    here, columns = _columns(ids, z)
    chosen = z.gather(1, columns).squeeze(1).masked_fill(~here, -math.inf)
    top = z.amax(1, keepdim=True)
    top = top.masked_fill(top.abs() == math.inf, 0.0)
    z.sub_(top)
    if not with_entropy:
        return _Slice(chosen, (z.exp_().sum(1, keepdim=True).log_() + top).squeeze(1), None)
    exps = z.exp()
    sums = exps.sum(1, keepdim=True)
    mean = z.clamp_(min=-1e4).mul_(exps).sum(1, keepdim=True) / sums  # 0 * -inf would be NaN
    log_sums = sums.log()
    return _Slice(chosen, (log_sums + top).squeeze(1), (log_sums - mean).squeeze(1))


def _join(slices: list[_Slice]) -> _Slice:
    "The whole vocabulary from its slices."
    if len(slices) == 1:
        return slices[0]
    totals = torch.stack([part.total for part in slices])
    chosen, total = torch.stack([part.chosen for part in slices]).amax(0), totals.logsumexp(0)
    entropies = [part.entropy for part in slices if part.entropy is not None]
    if not entropies:
        return _Slice(chosen, total, None)
    share = (totals - total).exp()
    within = torch.stack(entropies) - (totals - total)
    return _Slice(chosen, total, (share * within.masked_fill(share == 0, 0.0)).sum(0))


def _logit_gradient(
    z: Tensor,
    ids: Tensor,
    total: Tensor,
    entropy: Tensor | None,
    grad: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    "Gradient of logits z [n, V], which are overwritten, from those of log-probs and entropy [n]."
    z.sub_(total[:, None])
    if grad_entropy is None or entropy is None:
        assert grad is not None  # one of the two arrives
        z.exp_().mul_(-grad[:, None])
    else:  # p * (-grad - grad_entropy * (log p + H))
        probs = z.exp()
        z.clamp_(min=-1e4).add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad is not None:
            z.sub_(grad[:, None])
        z.mul_(probs)
    if grad is None:
        return z
    here, columns = _columns(ids, z)
    return z.scatter_add_(1, columns, (grad * here)[:, None])


class _Fused(torch.autograd.Function):
    "Log-probs and entropy [N] of states [N, hidden]; backward computes each block's logits again."

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        scale: float,
        temperature: float,
        size: tuple[int, int],
        entropy: str | None,
    ) -> tuple[Tensor, Tensor | None]:
        rows, columns = size
        parts = []
        with torch.autocast(states.device.type, enabled=False):
            for some, some_ids in zip(states.split(rows), ids.split(rows)):
                slices = []
                for a in range(0, len(weight), columns):
                    part = slice(a, a + columns)
                    some_bias = None if bias is None else bias[part]
                    z = _logits(some, weight[part], some_bias, scale, temperature)
                    slices.append(_measure(z, some_ids - a, entropy is not None))
                parts.append(_join(slices))
        total = torch.cat([part.total for part in parts])
        logprobs = torch.cat([part.chosen for part in parts]) - total
        entropies = [part.entropy for part in parts if part.entropy is not None]
        measured = torch.cat(entropies) if entropies else None
        ctx.save_for_backward(
            states, weight, bias, ids, total, measured if entropy == "learn" else None
        )
        ctx.settings = scale, temperature, size
        ctx.set_materialize_grads(False)
        if entropy == "look":
            ctx.mark_non_differentiable(measured)
        return logprobs, measured

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        states, weight, bias, *kept = ctx.saved_tensors
        scale, temperature, (rows, columns) = ctx.settings
        grads = [
            torch.zeros_like(x) if wanted else None
            for x, wanted in zip((states, weight, bias), ctx.needs_input_grad)
        ]
        if grad is None and grad_entropy is None:
            return *grads, *[None] * 5
        blocks = product(range(0, len(states), rows), range(0, len(weight), columns))
        with torch.autocast(states.device.type, enabled=False):
            for a, b in blocks:
                some, part = slice(a, a + rows), slice(b, b + columns)
                ids, *rest = [None if x is None else x[some] for x in (*kept, grad, grad_entropy)]
                some_bias = None if bias is None else bias[part]
                z = _logits(states[some], weight[part], some_bias, scale, temperature)
                z = _logit_gradient(z, ids - b, *rest)
                z = (z if temperature == 1.0 else z.div_(temperature)).to(weight.dtype)
                if scale != 1.0:
                    z.mul_(scale)
                if grads[0] is not None:
                    grads[0][some].addmm_(z, weight[part])
                if grads[1] is not None:
                    grads[1][part].addmm_(z.T, states[some])
                if grads[2] is not None:
                    grads[2][part].add_(z.sum(0))
                del z  # before the next block is made
        return *grads, *[None] * 5
