"""A causal language model taken apart into its body and its head, where that is safe.

Log-probs of long vocabularies need the last hidden states and the head apart. Models that change
states between the two, or that a wrapper must see whole, are called whole.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from rlhf_nb.base.fused import logit_scale
from rlhf_nb.base.sharding import is_sharded_by_deepspeed

# Private names used here: `_attn_implementation` of a config of transformers; `_orig_mod` of
# torch.compile; `_forward_hooks` of torch's nn.Module.

logger = logging.get_logger(__name__)
# Where torch.compile, DDP and DeepSpeed, and PEFT's two kinds of layers keep what they wrap.
WRAPPED = ("_orig_mod", "module", "base_layer", "original_module")
PACKED_ATTENTION = ("flash_attention_2", "flash_attention_3", "flex_attention")
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# of the logits' standard deviation, on average: another order of sums stays below, in 32 bit (TF32
# too) and in less
ROUNDING, COARSE_ROUNDING = 0.005, 0.25


@dataclass
class Findings:
    "What calls of a model have shown; None: it was not tried."

    separable: bool | None = None  # its body and its head, one after the other, give its logits
    cached: bool | None = None  # it can be sampled with a cache
    continues: bool | None = None  # turns go on from one cache, in which shorter rows have holes
    mixes_rows: bool = False  # rows that lie end to end see each other


_findings: WeakKeyDictionary[PreTrainedModel, Findings] = WeakKeyDictionary()


def reads_end_to_end(model: nn.Module) -> bool:
    """Whether transformers' attention for this model tells rows that lie end to end apart by their
    position ids, without a mask of N x N; a convolution or a recurrent layer would not. Another
    model of its type that was tried counts as well."""
    config = getattr(model, "config", None)
    packed = getattr(config, "_attn_implementation", None) in PACKED_ATTENTION
    attends = {*(getattr(config, "layer_types", None) or ())} <= ATTENTION_LAYERS
    mixing = {other.config.model_type for other, found in _findings.items() if found.mixes_rows}
    return packed and attends and getattr(config, "model_type", None) not in mixing


def attention_of(model: Any) -> str | None:
    "transformers' name for how a model's attention is computed; None: it names none."
    config = getattr(unwrap(model), "config", None)
    return getattr(config, "_attn_implementation", None)


def embedding_rows(model: Any) -> int:
    "How many ids a transformers model has an embedding for."
    return unwrap(model.get_input_embeddings()).num_embeddings


def unused_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    "The ids that a model has an embedding for and its tokenizer no token: their text is empty."
    used = {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder}
    return [i for i in range(embedding_rows(model)) if i not in used]


def mask_ids(model: Any, ids: Sequence[int]) -> None:
    """From now on these ids, and no others, have no probability: logits are -inf in the model's
    forward, in `project` and in a fused head. Nothing of it is saved."""
    inner = unwrap(model)
    if hasattr(inner, "masked_ids"):
        del inner.masked_ids
    if not len(ids):
        return
    mask = torch.zeros(embedding_rows(model), device=next(inner.parameters()).device)
    mask[list(ids)] = -math.inf
    inner.register_buffer("masked_ids", mask, persistent=False)
    if _mask_logits not in inner._forward_hooks.values():
        inner.register_forward_hook(_mask_logits)


def _mask_logits(model: nn.Module, args: tuple, output: Any) -> None:
    # in place: the logits of a whole batch are the largest tensor there is
    if (mask := getattr(model, "masked_ids", None)) is not None:
        logits = output[0] if isinstance(output, tuple) else output.logits
        logits += mask.to(logits.dtype)


@contextmanager
def masked(model: Any, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    "Inside, ids without a token are masked, as they are in a trainer's policy; yields them."
    ids = unused_ids(model, tokenizer)
    if hasattr(unwrap(model), "masked_ids"):
        yield ids
        return
    mask_ids(model, ids)
    try:
        yield ids
    finally:
        mask_ids(model, [])


def unwrap(module: Any) -> Any:
    """What DDP, DeepSpeed, torch.compile or PEFT was put around, to read its signature and sizes:
    a transformers model, or a layer. The wrapper is still what gets called."""
    while True:
        if hasattr(module, "get_base_model"):
            inner = module.get_base_model()
        else:
            parts = (getattr(module, name, None) for name in WRAPPED)
            inner = next((part for part in parts if isinstance(part, nn.Module)), None)
        if inner is None or inner is module:
            return module
        module = inner


def accepted_inputs(forward: Callable, inputs: dict[str, Any]) -> dict[str, Any]:
    "Those inputs that a forward takes; all of them where it takes any."
    takes = inspect.signature(forward).parameters
    if "input_ids" not in takes:  # (*args, **kwargs): it passes on what it gets
        return inputs
    return {name: value for name, value in inputs.items() if name in takes}


def uses_cache(
    model: Any,
    gap: Callable[[Any, bool], float],  # of logits with a cache, or without, from those of one row
) -> bool:
    """Whether to sample with a cache, found out once a model, in float32 where it can be. Raises
    ValueError on a model whose logits are wrong without one, too."""
    inner = unwrap(model)
    if not isinstance(inner, PreTrainedModel):
        return True
    found = _findings.setdefault(inner, Findings())
    if found.cached is None:
        with _exactly(model, inner) as limit:
            found.cached = _try_cache(partial(gap, model), limit, type(inner).__name__)
            found.mixes_rows = reads_end_to_end(inner) and not _rows_apart(inner)
    return found.cached


@contextmanager
def _exactly(model: Any, inner: PreTrainedModel) -> Iterator[float]:
    "Inside, a model is in eval and, where it can be, in float32; yields what rounding may add."
    weight, was_training = next(model.parameters()), model.training
    flash = "flash" in str(getattr(inner.config, "_attn_implementation", ""))
    fine = weight.itemsize >= 4 and not flash
    model.eval()  # a layer that recomputes its activations refuses a cache while it trains
    try:
        with torch.autocast(weight.device.type, enabled=False) if fine else nullcontext():
            yield ROUNDING if fine else COARSE_ROUNDING
    finally:
        model.train(was_training)


WINDOWS = "sliding_window", "attention_chunk_size", "window_size"  # the last of GPT-Neo
FAILURES = AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError


def continues_cache(model: Any, gap: Callable[[Any], float]) -> bool:
    """Whether turns go on from one cache, found out once a model. A sliding window counts the holes
    that shorter rows leave in it, so a model that has one does not."""
    inner = unwrap(model)
    if not isinstance(inner, PreTrainedModel):
        return True
    found = _findings.setdefault(inner, Findings())
    if found.continues is None:
        config = inner.config.get_text_config()
        window = any(getattr(config, name, None) for name in WINDOWS)
        found.continues = not window and _probe_turns(model, inner, gap)
    return found.continues


def _probe_turns(model: Any, inner: PreTrainedModel, gap: Callable[[Any], float]) -> bool:
    "Whether a second turn has the logits of reading everything again, logged."
    with _exactly(model, inner) as limit:
        try:
            apart = gap(model)
        except FAILURES as error:
            apart = math.inf
            logger.info(f"{type(inner).__name__}: {type(error).__name__}: {error}")
    if apart > limit:
        logger.warning(
            f"{type(inner).__name__}: a second turn cannot go on from the cache of the first "
            f"(logits {apart:.2f} standard deviations off, limit {limit}): contexts are read again "
            "from their beginning, which is slower."
        )
    return apart <= limit


def _try_cache(gap: Callable[[bool], float], limit: float, name: str) -> bool:
    "With a cache if that is right, or without. Raises ValueError where neither is."
    reasons: list[str] = []
    for cached in (True, False):
        try:
            apart = gap(cached)
            reason = f"logits are {apart:.2f} standard deviations off"
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            apart, reason = math.inf, f"{type(error).__name__}: {' '.join(str(error).split())}"
        if apart <= limit:
            if not cached:
                logger.warning(
                    f"{name} cannot be sampled with a cache ({reasons[0]}): whole rows are read "
                    "for each token, which is slower."
                )
            return cached
        reasons.append(reason)
    raise ValueError(
        f"{name} cannot be sampled: what it predicts depends on padding or on later tokens "
        f"({reasons[-1]}). Give a causal language model; BERT and the like need is_decoder=True "
        "in their config."
    )


@torch.no_grad()
def _rows_apart(model: PreTrainedModel) -> bool:
    "Whether the second of two rows that lie end to end has the states that it has alone."
    body, device = body_of(model), next(model.parameters()).device
    if body is None:  # it is called whole, and never end to end
        return True
    ids = torch.arange(7, device=device)[None] % embedding_rows(model)
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=device)
    both, alone = (
        body(input_ids=ids[:, i:], position_ids=places[:, i:], use_cache=False).last_hidden_state
        for i in (0, 3)
    )
    return bool((both[:, 3:] - alone).abs().mean() <= COARSE_ROUNDING * alone.std())


def masks_left_padding(model: Any) -> bool:
    """Whether rows padded on the left read as they do alone: false for a model that is sampled
    without a cache, and for others of its class."""
    uncached = {type(other) for other, found in _findings.items() if found.cached is False}
    return type(unwrap(model)) not in uncached


def separable_model(model: Any) -> PreTrainedModel | None:
    """The transformers model to take apart into body and head; None: it must be called whole.

    Plain transformers models, and LoRA around one; never one whose head DeepSpeed ZeRO-3 or FSDP
    has sharded. Body and head are compared with the model's own forward once; it is logged."""
    model = model.get_base_model() if _is_lora(model) else model
    if not isinstance(model, PreTrainedModel) or hasattr(model, "unshard"):
        return None
    head = model.get_output_embeddings()
    if head is None or is_sharded_by_deepspeed(head):
        return None
    found = _findings.setdefault(model, Findings())
    if found.separable is None:
        found.separable, name = heads_agree(model), type(model).__name__
        if found.separable:
            logger.info(f"{name}: its body and head, one after the other, give its own logits.")
        else:
            logger.warning(
                f"{name}: its body and head, one after the other, do not give its own logits, so "
                "it is called whole and all logits are kept."
            )
    return model if found.separable else None


def _is_lora(model: Any) -> bool:
    "A PEFT wrapper that only changed layers inside: its inner model can be called as it is."
    names = {kind.__name__ for kind in type(model).__mro__}  # peft may not be installed
    configs = model.peft_config.values() if "PeftModel" in names else ()
    return any(configs) and all(
        c.peft_type == "LORA" and not getattr(c, "alora_invocation_tokens", None) for c in configs
    )


def project(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    "Hidden states to logits as the model does it: scale (Cohere, Granite), cap (Gemma 2)."
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    scale, cap = logit_scale(config), getattr(config, "final_logit_softcapping", None)
    masked = hasattr(model, "masked_ids")

    def logits(hidden: Tensor) -> Tensor:
        z = head(hidden) if scale == 1.0 else head(hidden) * scale
        z = z if cap is None else torch.tanh(z / cap) * cap
        return z + model.masked_ids.to(z.dtype) if masked else z

    return logits


def body_of(model: Any) -> PreTrainedModel | None:
    "The part of the model that gives the last hidden states; None: it names none."
    inner = unwrap(model)
    body = inner.get_decoder() if hasattr(inner, "get_decoder") else None
    return body if isinstance(body, PreTrainedModel) and body is not inner else None


def heads_agree(model: PreTrainedModel) -> bool:
    """Whether body and head, one after the other, give the model's own logits, on large hidden
    states. Leaves no trace, random state included."""
    body = body_of(model)
    if body is None:
        return False
    head, captured = model.get_output_embeddings(), []

    def enlarge(body: nn.Module, args: tuple, output: Any) -> Any:
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None or hidden.shape[-1] != head.weight.shape[-1]:
            return output
        noise = torch.Generator().manual_seed(0)
        hidden = torch.randn(output.last_hidden_state.shape, generator=noise)
        hidden = hidden.to(output.last_hidden_state)
        hidden = hidden * (200 / head(hidden).abs().max())
        captured.extend([output.last_hidden_state, project(model)(hidden)])
        output.last_hidden_state = hidden
        return output

    device = head.weight.device
    inputs = dict(
        input_ids=torch.zeros(1, 2, dtype=torch.long, device=device),
        attention_mask=torch.ones(1, 2, dtype=torch.long, device=device),
        position_ids=torch.arange(2, device=device)[None],
        use_cache=False,
    )

    def forward(part: nn.Module) -> Any:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            return part(**accepted_inputs(part.forward, inputs))  # the same dropout both times

    handle = body.register_forward_hook(enlarge)
    try:
        logits = forward(model).logits
    finally:
        handle.remove()
    states = getattr(forward(body), "last_hidden_state", None)
    if len(captured) != 2 or states is None:
        return False
    near = partial(torch.allclose, rtol=1e-3, atol=1e-3)
    pairs = zip(captured, (states, logits))
    return all(a.shape == b.shape and near(a.float(), b.float()) for a, b in pairs)
