"""Log-probs and entropies of a plain linear head, block by block, without keeping the logits.

The backward pass computes each block's logits again, so peak memory is a block and not
tokens x vocabulary. Worth 16 % of a whole update at a vocabulary of 8,192 on a CPU, 4 % at 1,024.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# Private names used here: the hooks of torch's nn.Module (`_forward_hooks`, `_forward_pre_hooks`,
# `_backward_hooks`, `_backward_pre_hooks`), which has no public way to ask whether there are any.
# Logits at a time on a CPU: 4 MB, what its cache holds, but of 128 rows at least, since each block
# reads the whole weight: at a vocabulary of 49,153, 21 rows a block take twice as long (lab 25).
# On a GPU a whole chunk.
BLOCK, ROWS = 2**20, 128
LOWEST = -1e4  # exp(-1e4) is 0, and 0 * -1e4 is 0, where 0 * -inf would be NaN


class Head(NamedTuple):
    "A linear head, and what the model multiplies its logits by."

    weight: Tensor  # [V, hidden]
    bias: Tensor | None  # [V]
    scale: float


def logit_scale(config: Any) -> float:
    "What a model multiplies its logits by: Cohere names the factor, Granite its inverse."
    scale = getattr(config, "logit_scale", None) or 1.0
    return scale / (getattr(config, "logits_scaling", None) or 1.0)


def plain_head(model: Any) -> Head | None:
    "The head as a matrix; None where it is capped, adapted, quantised, hooked or sharded."
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    hooks = head._forward_hooks, head._forward_pre_hooks, head._backward_hooks
    hooked = any(hooks) or head._backward_pre_hooks or "forward" in vars(head)
    parts = any(type(p) is not nn.Parameter for p in head.parameters())
    capped = getattr(config, "final_logit_softcapping", None) is not None
    if type(head) is not nn.Linear or hooked or parts or capped:
        return None
    bias = masked_bias(model, head.bias) if hasattr(model, "masked_ids") else head.bias
    return Head(head.weight, bias, logit_scale(config))


def masked_bias(model: Any, bias: Tensor | None) -> Tensor:
    "A head's bias, -inf at the ids of `mask_ids`."
    return model.masked_ids if bias is None else bias + model.masked_ids


def fused_logprobs(
    states: Tensor,  # [N, hidden]
    head: Head,
    ids: Tensor,  # [N] the tokens that were chosen
    temperature: float,
    rows: int,  # most states at a time
    entropy: str | None,  # "learn": with a gradient; "look": its value alone; None: not at all
) -> tuple[Tensor, Tensor | None]:
    "Log-probs [N], and entropies [N] where wanted; as `chunked_logprobs`, in place and by hand."
    weight, bias, device = head.weight, head.bias, states.device.type
    if torch.is_autocast_enabled(device) and states.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        states, weight = states.to(dtype), weight.to(dtype)
    if device == "cpu" and weight.dtype in (torch.float32, torch.float64):
        rows = min(rows, max(ROWS, BLOCK // len(weight)))  # not in bf16: sums over blocks round
    return _Fused.apply(states, weight, bias, ids, temperature / head.scale, rows, entropy)


class _Fused(torch.autograd.Function):
    "With z = (W h + b) / divisor: log p = z[id] - log sum exp z, and H = -sum p log p."

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        divisor: float,
        rows: int,
        entropy: str | None,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, totals, entropies = [], [], []
        with torch.autocast(states.device.type, enabled=False):
            for block, chosen in zip(states.split(rows), ids.split(rows)):
                z = _logits(block, weight, bias, divisor)
                top = z.amax(1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)
                at_chosen = z.gather(1, chosen[:, None]).squeeze(1)
                z.sub_(top)  # in place: a block is in memory once, or twice with an entropy
                exps = z.exp() if entropy else z.exp_()
                sums = exps.sum(1)
                if entropy:
                    mean = z.clamp_(min=LOWEST).mul_(exps).sum(1) / sums
                    entropies.append(sums.log() - mean)
                totals.append(sums.log() + top.squeeze(1))
                logprobs.append(at_chosen - totals[-1])
                del z, exps  # before the next block is made
        certainty = torch.cat(entropies) if entropies else None
        ctx.save_for_backward(
            states, weight, bias, ids, torch.cat(totals), certainty if entropy == "learn" else None
        )
        ctx.divisor, ctx.rows = divisor, rows
        if entropy == "look":
            ctx.mark_non_differentiable(certainty)
        return torch.cat(logprobs), certainty

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Any) -> tuple[Any, ...]:
        states, weight, bias, ids, totals, entropies = ctx.saved_tensors
        inputs = zip((states, weight, bias), ctx.needs_input_grad)
        grads = [torch.zeros_like(x) if wanted else None for x, wanted in inputs]
        with torch.autocast(states.device.type, enabled=False):
            for a in range(0, len(states), ctx.rows):
                block = slice(a, a + ctx.rows)
                of_chosen = grad[block, None]
                of_z = _logits(states[block], weight, bias, ctx.divisor).sub_(totals[block, None])
                if entropies is None:  # d log p / dz = [chosen] - p
                    of_z.exp_().mul_(-of_chosen)
                else:  # and d H / dz = -p (log p + H)
                    p = of_z.exp()
                    of_z.clamp_(min=LOWEST).add_(entropies[block, None])
                    of_z.mul_(-grad_entropy[block, None]).sub_(of_chosen).mul_(p)
                    del p
                of_z.scatter_add_(1, ids[block, None], of_chosen.to(of_z.dtype))
                of_z = of_z.div_(ctx.divisor).to(weight.dtype)
                if grads[0] is not None:
                    grads[0][block] = of_z @ weight
                if grads[1] is not None:
                    grads[1].addmm_(of_z.T, states[block])
                if grads[2] is not None:
                    grads[2].add_(of_z.sum(0))
                del of_z  # before the next block is made
        return *grads, *[None] * 4


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, divisor: float) -> Tensor:
    "[n, V] in float32 or wider, in one piece of memory where possible."
    z = linear(states, weight, bias if bias is None else bias.to(weight.dtype))
    z = z if z.dtype == torch.float64 else z.float()
    return z if divisor == 1.0 else z.div_(divisor)
