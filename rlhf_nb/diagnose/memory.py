"Where PPO's memory goes, by phase and by kind, from configs, before you need a GPU: see page 49."

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import pandas as pd
import torch
from torch import nn
from torch.func import functional_call
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    PreTrainedConfig,
)
from transformers.pytorch_utils import Conv1D

from rlhf_nb.base.fields import Count, Positive, check_fields
from rlhf_nb.base.opened import unwrap
from rlhf_nb.base.without_data import make_fake_tensors
from rlhf_nb.training.model_loading import add_adapter
from rlhf_nb.ui.html import element

GIB = 2**30  # about what GPUs are sold as: 80 "GB" are 80 GiB, minus what the driver uses


@dataclass(frozen=True, eq=False)
class ModelSize:
    "What a model's memory depends on. All counts are of numbers, not of bytes."

    params: int  # all weights
    trained: int  # weights that are trained
    matrices: int  # weights and biases of linear layers: autocast makes bf16 copies of these
    layer: int  # all weights of one decoder layer
    layers: int
    hidden: int
    heads: int
    head_dim: int
    middle: int  # numbers in the middle of the MLP: its width twice, with a gate three times
    vocab: int
    build: Callable[[int], nn.Module]  # with so many layers, on the meta device


_SIZES: dict[tuple, ModelSize] = {}


def model_size(
    config: PreTrainedConfig,  # of a causal language model
    scorer: bool = False,  # with a scalar head instead of the language model's
    adapter: Any = None,  # of peft, such as LoraConfig: then only the adapter is trained
) -> ModelSize:
    "Exact counts, from the model built on torch's meta device: shapes without numbers."
    key = (repr(config), scorer, repr(adapter))
    if key in _SIZES:
        return _SIZES[key]
    kind = AutoModelForSequenceClassification if scorer else AutoModelForCausalLM
    config, adapter = copy.deepcopy((config, adapter))
    text: Any = config.get_text_config()

    def build(layers: int) -> nn.Module:
        shape = copy.deepcopy(config)
        if scorer:
            shape.num_labels = 1
        if layers != text.num_hidden_layers:  # alike: one stands for all
            own = shape.get_text_config()
            own.num_hidden_layers = layers
            own.layer_types = (getattr(own, "layer_types", None) or [])[:1] * layers or None
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # between peft and transformers
            return add_adapter(kind.from_config(shape), copy.deepcopy(adapter))

    model, h, n = build(text.num_hidden_layers), text.hidden_size, text.num_hidden_layers
    count = lambda weights: sum(p.numel() for p in weights)
    linear = [m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D))]
    wide = [m.weight.shape for m in linear if min(m.weight.shape) >= h]  # an adapter's are thin
    sides = [max(shape) for shape in wide if text.vocab_size not in shape]
    _SIZES[key] = ModelSize(
        params=count(model.parameters()),
        trained=count(p for p in model.parameters() if p.requires_grad),
        matrices=count({p for m in linear for p in m.parameters(recurse=False)}),
        layer=count(build(2).parameters()) - count(build(1).parameters()),
        layers=n,
        hidden=h,
        heads=text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or h // text.num_attention_heads,
        middle=sum(side for side in sides if side == max(sides)) // n,
        vocab=text.vocab_size,
        build=build,
    )
    return _SIZES[key]


class Precision(NamedTuple):
    "Bytes per number, by where it is used."

    weights: int  # the weights that the model computes with
    matmul: int  # inputs and outputs of matrix products
    stream: int  # the residual stream
    autocast: bool  # float32 weights, of which bf16 copies are made


FORMS = {
    "float32": Precision(4, 4, 4, False),
    "autocast": Precision(4, 2, 4, True),
    "bf16": Precision(2, 2, 2, False),
}


@lru_cache
def row_bytes(size: ModelSize, form: Precision, n: int, layers: int, cached: bool = False) -> int:
    """Bytes that one more row of n tokens adds to what a body with so many layers keeps for
    its backward pass, each storage once; or to its cache. The body's own code runs on tensors
    without data, with attention by sdpa. Raises ValueError where it cannot."""
    body = unwrap(size.build(max(layers, 1))).base_model.eval()
    for part in [*body.modules()]:
        if isinstance(part, nn.ModuleList) and not layers:
            del part[:]
    dtype = torch.bfloat16 if form.weights == 2 else torch.float32
    kept: list[dict[int, Any]] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[-1][id(x.untyped_storage())] = x.untyped_storage()
        return x

    with make_fake_tensors(), torch.autocast("cpu", torch.bfloat16, enabled=form.autocast):
        tensors: dict[str, Any] = {}
        for name, x in body.named_buffers():
            tensors[name] = torch.empty(x.shape, dtype=x.dtype)
        for name, x in body.named_parameters():
            tensors[name] = nn.Parameter(torch.empty(x.shape, dtype=dtype), x.requires_grad)
        width = body.get_input_embeddings().embedding_dim
        for rows in (1, 2):
            kept.append({})
            cache: Any = DynamicCache() if cached else None
            batch = dict(
                inputs_embeds=torch.empty(rows, n, width, dtype=dtype, requires_grad=True),
                attention_mask=torch.ones(rows, 1, n, n).bool(),
                position_ids=torch.zeros(rows, n).long(),
                past_key_values=cache,
                use_cache=cached,
            )
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
            try:
                with hooks, torch.set_grad_enabled(not cached):
                    functional_call(body, tensors, kwargs=batch)
            except (RuntimeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{type(body).__name__} does not run without numbers, so its activations are "
                    "unknown: plan for a dense decoder of its size, such as a Llama."
                ) from error
            for layer in cache.layers if cached else []:
                keep(layer.keys), keep(layer.values)
    one, two = (sum(x.nbytes() for x in storages.values()) for storages in kept)
    return two - one


def layer_activations(size: ModelSize, form: Precision, length: int) -> int:
    "Bytes that one decoder layer keeps of a row of so many tokens."
    return row_bytes(size, form, length, 2) - row_bytes(size, form, length, 1)


def model_activations(
    size: ModelSize, form: Precision, rows: int, length: int, recompute: bool, read: int
) -> int:
    """Bytes that a body keeps for its backward pass: its layers, or with activation checkpointing
    their inputs; the last norm; the inputs of the head at the positions that are read."""
    layer = form.stream * size.hidden * length
    layers = size.layers * (layer if recompute else layer_activations(size, form, length))
    return rows * (layers + row_bytes(size, form, length, 0) + form.matmul * size.hidden * read)


CHUNK = 2**26  # the default of response_logprobs: chunk_logits


def logits_bytes(size: ModelSize, tokens: int, copies: float = 2) -> float:
    "The chunk of logits [tokens, V] in float32 that `response_logprobs` holds at a time."
    return 4 * copies * size.vocab * min(tokens, max(1, CHUNK // size.vocab))


def kv_cache(size: ModelSize, form: Precision, rows: int, length: int) -> int:
    "Bytes of keys and values of all layers. The last token is never read: it is no column."
    return rows * length * size.layers * row_bytes(size, form, 1, 1, cached=True)


LayoutName = Literal["alone", "ddp", "zero2", "zero3", "fsdp2"]
LAYOUTS = get_args(LayoutName)
_SHARD = "--use_peft --value_use_peft, or a layout that shards it (zero2, zero3, fsdp2)"
_BATCH = "a smaller --per_device_train_batch_size, or --activation_checkpointing"
LESS = dict(  # the rows of a plan, and what to type for less of one
    weights="--share_value_trunk, --use_peft, or zero3 or fsdp2",
    frozen="--offload_frozen, or zero3 or fsdp2",
    optimizer=_SHARD,
    gradients=_SHARD,
    copies="--dtype bfloat16, or --activation_checkpointing",
    gathered="--ds3_gather_for_generation False, which samples slowly",
    cache="a smaller --local_rollout_forward_batch_size",
    activations=_BATCH,
    logits=_BATCH,
    allowance="a larger GPU",
)
CONTEXT = 0.6 * GIB  # of CUDA
NCCL = 1.0 * GIB  # its buffers, with several GPUs
FRAGMENTS = 0.1  # share of temporary memory lost to fragmentation


@dataclass
class MemoryPlan:
    """What a PPO run needs on each GPU, by phase and kind, from configs alone. What a run has too
    has its name here. Raises ValueError, naming field and fix, where the run would be refused."""

    policy: PreTrainedConfig  # of a causal language model; no weights are read
    reward: PreTrainedConfig | None = None  # None: the reward is a function
    value: PreTrainedConfig | None = None  # None: like the reward model, or else like the policy
    layout: LayoutName = "alone"
    num_processes: Count = 1  # GPUs
    prompt_length: Count = 512  # tokens, of the longest prompt of a batch
    response_length: Count = 53  # of one turn
    max_turns: Count = 1  # more than 1: an environment answers
    max_episode_length: Count | None = None  # tokens behind the prompt; None: answers are unknown
    per_device_train_batch_size: Count = 8  # rows of a micro-batch
    gradient_accumulation_steps: Count = 1
    num_mini_batches: Count = 1
    local_rollout_forward_batch_size: Count = 64
    # bf16 is autocast over the weights' own dtype
    precision: Literal["bf16", "fp16", "float32"] = "bf16"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the loaded weights
    activation_checkpointing: bool = True
    share_value_trunk: bool = False
    peft_config: object = None  # of the policy; the reference is then its adapter off
    value_peft_config: object = None
    ds3_gather_for_generation: bool = True
    gpu_memory: Positive | None = None  # GiB of a GPU; None: unknown
    offload_frozen: bool = False  # reference and reward model stay in host memory
    critic: bool = True  # False: an advantage_estimator that trains no value model
    more_rewards: tuple[PreTrainedConfig, ...] = ()  # the other members of an ensemble

    def __post_init__(self) -> None:
        check_fields(self)
        most = self.max_turns * self.response_length  # None: those of the policy alone
        positions = getattr(self.policy, "max_position_embeddings", None) or 10**9
        episode = min(self.max_episode_length or most, positions - self.prompt_length)
        self.episode = max(self.response_length, episode)
        self.drawn = min(most, self.episode)  # by the policy
        self.length = self.prompt_length + self.episode
        if self.layout == "alone" and self.num_processes > 1:
            raise ValueError("num_processes: alone is one GPU; give another layout.")
        if self.layout == "zero3" and self.offload_frozen:
            raise ValueError("offload_frozen: DeepSpeed has offload_param_device: cpu for ZeRO-3.")
        if self.length > positions:
            raise ValueError(
                f"prompt_length and response_length are {self.length} tokens, and the model has "
                f"{positions} positions: shorten one of them."
            )
        steps = self.gradient_accumulation_steps
        # of a forward pass without gradient; backward passes of an optimizer step
        batch = self.per_device_train_batch_size * steps
        self.rows = min(self.local_rollout_forward_batch_size, batch)
        self.micro_batches = max(1, steps // self.num_mini_batches)
        # DeepSpeed and FSDP2 compute with bf16 weights, DDP by autocast
        mixed = self.dtype == "float32" and self.layout in ("alone", "ddp")
        whole = self.precision == self.dtype == "float32"
        self.form = FORMS["float32" if whole else "autocast" if mixed else "bf16"]
        shapes = [(self.policy, False, self.peft_config)]
        if self.critic and not self.share_value_trunk:
            value = self.value or self.reward or self.policy
            shapes.append((value, True, self.value_peft_config))
        self.trained = [model_size(*shape) for shape in shapes]  # policy, value model
        self.bare = [model_size(*shape[:2]) for shape in shapes]  # without adapters
        rewards = [x for x in (self.reward, *self.more_rewards) if x is not None]
        self.frozen = [model_size(self.policy)] * (self.peft_config is None)
        self.frozen += [model_size(reward, True) for reward in rewards]
        self.phases = {name: _phase(self, name) for name in ("rollout", "score", "update")}
        self.totals = {name: sum(rows.values()) for name, rows in self.phases.items()}
        self.phase = max(self.totals, key=lambda name: self.totals[name])  # the largest
        self.peak, rows = self.totals[self.phase], self.phases[self.phase]
        self.dominates = max(rows, key=lambda row: rows[row])  # the largest row of that phase
        size = self.gpu_memory
        self.fits = None if size is None else self.peak <= size * GIB

    @property
    def verdict(self) -> str:
        "The result in a sentence."
        of_it, size = self.phases[self.phase][self.dominates] / GIB, self.gpu_memory
        summary = (
            f"peak {self.peak / GIB:.1f} GiB on each GPU, in the {self.phase}; most of it: "
            f"{self.dominates} ({of_it:.1f} GiB)"
        )
        if size is None:
            return f"{summary}. Give gpu_memory, in GiB, to see whether it fits."
        left = size - self.peak / GIB
        if self.fits:
            return f"It fits: {summary}; {left:.1f} of {size:g} GiB are left."
        over = f"that is {-left:.1f} GiB more than the GPU's {size:g}"
        return f"It does not fit: {summary}; {over}. Less of it: {LESS[self.dominates]}."

    def frame(self) -> pd.DataFrame:
        "GiB on each GPU: a row for each kind, a column for each phase."
        frame = pd.DataFrame(self.phases).reindex([*LESS]).dropna(how="all").fillna(0.0)
        return pd.concat([frame, frame.sum().to_frame("sum").T]) / GIB

    def _repr_html_(self) -> str:
        table = self.frame().to_html(float_format="{:.2f}".format)
        return f"{table}{element('p', self.verdict)}"


def _outside(size: ModelSize, layers: int = 0) -> int:
    "Embeddings, last norm and head, and so many layers: FSDP2 has two whole of a model that runs."
    return size.params - size.layer * (size.layers - layers)


def states(plan: MemoryPlan, phase: str = "update") -> dict[str, float]:
    "Bytes that stay on a GPU, and the gradients; Rajbhandari et al. 2020, section 3, for ZeRO."
    n, b, layout, half = plan.num_processes, plan.form.weights, plan.layout, plan.dtype != "float32"
    numbers, w = sum(m.params for m in plan.frozen), 2 if half else 4
    if plan.offload_frozen:  # the largest is placed while it runs
        placed = [_outside(m, 2) if layout == "fsdp2" else m.params for m in plan.frozen]
        numbers = max(placed, default=0) if phase == "score" else 0
    numbers *= b if layout in ("zero2", "zero3") else w
    held = dict(frozen=numbers / (n if layout in ("zero3", "fsdp2") else 1))
    held |= dict(weights=0.0, optimizer=0.0, gradients=0.0)
    counts = [(m.params, m.trained) for m in plan.trained]
    if plan.critic and plan.share_value_trunk:
        counts.append((plan.trained[0].hidden,) * 2)  # a layer on the policy
    for params, learns in counts:
        # an adapter is float32, whatever it is added to
        g = 2 if half and learns == params else 4
        weights, gradients, optimizer = dict(
            alone=(w, g, 2 * g),
            ddp=(w, 2 * g, 2 * g),  # its buckets hold the gradients again
            zero2=(b, b / n, 12 / n),
            zero3=(b / n, b / n, 12 / n),
            fsdp2=(4 / n, 4 / n, 8 / n),
        )[layout]
        if phase != "update":
            gradients = g if layout == "ddp" else 0  # its buckets are never freed
        held["weights"] += weights * params
        held["gradients"] += gradients * learns
        held["optimizer"] += optimizer * learns
    return held


def gathered_bytes(plan: MemoryPlan, phase: str) -> float:
    "Bytes of weights and gradients that are whole on a GPU for a while, and DeepSpeed's buckets."
    (policy, *value), b = plan.trained, plan.form.weights
    weights, learns = (sum(getattr(m, x) for m in plan.trained) for x in ("params", "trained"))
    whole = phase == "rollout" and plan.ds3_gather_for_generation
    # reduce_bucket_size; stage3_max_live_parameters and stage3_prefetch_bucket_size
    bucket = min(learns, 5e8) if phase == "update" else 0
    live = policy.params if whole else min(weights, 1e9 + 5e7)
    if plan.layout != "fsdp2":
        return b * dict(zero2=bucket, zero3=bucket + live).get(plan.layout, 0)
    if phase == "rollout":  # embeddings and heads of both models are one group
        return b * (sum(map(_outside, value)) + (policy.params if whole else _outside(policy, 2)))
    unit = sum(_outside(m, 2) for m in plan.trained)
    if phase == "score":
        return b * max([unit, *(_outside(m, 2) for m in plan.frozen)])  # one after the other
    # whole gradients are kept until the last micro-batch
    return b * (unit + unit * learns / weights + (learns if plan.micro_batches > 1 else 0))


def _copies(plan: MemoryPlan, phase: str) -> float:
    "The bf16 copies of matrices that autocast keeps; of trained ones, only in the forward pass."
    running = plan.trained[:1] if phase == "rollout" else plan.trained
    if phase != "update" or plan.activation_checkpointing:
        running = [m for m in running if m.trained == m.params]
    return 2 * sum(m.matrices for m in running) if plan.form.autocast else 0


def _logits(plan: MemoryPlan, rows: int, whole: int, copies: int) -> float:
    "Two copies of a chunk; ZeRO-3: `whole` times all logits [B, 2 T + 1, V], `copies` of a chunk."
    policy, tokens = plan.trained[0], rows * plan.drawn
    if plan.layout != "zero3":
        return logits_bytes(policy, tokens)
    every = plan.form.matmul * policy.vocab * rows * (2 * plan.episode + 1)
    return whole * every + logits_bytes(policy, tokens, copies)


def _without_gradient(plan: MemoryPlan, phase: str) -> dict[str, float]:
    "Of rollout and score: a layer holds the residual stream twice, and its MLP's middle."
    policy, form, rows = plan.trained[0], plan.form, plan.rows
    layer = lambda m: rows * (2 * form.stream * m.hidden + form.matmul * m.middle)
    if phase == "score":
        widest = max(map(layer, [policy, *plan.frozen]))
        return dict(activations=widest * plan.length, logits=_logits(plan, rows, 1, 5))
    return dict(
        cache=kv_cache(policy, form, rows, plan.length - 1),
        activations=layer(policy) * plan.prompt_length,
        logits=4 * 4 * rows * policy.vocab,
    )


def _with_gradient(plan: MemoryPlan) -> dict[str, float]:
    "The largest of three moments: the head; the end of the forward pass; a layer's backward."
    policy, rows, form = plan.trained[0], plan.per_device_train_batch_size, plan.form
    n, read = plan.length, plan.drawn + 1  # before each token, after the last
    zero3, recompute = plan.layout == "zero3", plan.activation_checkpointing
    reads = [n if zero3 and m is policy else read for m in plan.trained]
    both = zip(plan.trained, reads)
    first, *of_value = (model_activations(m, form, rows, n, recompute, k) for m, k in both)
    chunked = rows * plan.drawn > CHUNK // policy.vocab  # each is recomputed then
    held = _logits(plan, rows, 1, 0 if chunked else 4) if zero3 else 0
    layer: float = 2 * rows * n * form.stream * policy.hidden
    copies = last_copies = _copies(plan, "update")
    if recompute:  # inputs of frozen matrices are there for a while too
        layer += rows * max(layer_activations(m, form, n) for m in plan.bare)
        last_copies = 2 * policy.layer if form.autocast else 0
    kept = first + sum(of_value)
    moments: list[dict[str, float]] = [
        dict(activations=first, copies=copies, logits=_logits(plan, rows, 2, 6)),
        dict(activations=kept, copies=copies, logits=held),
        dict(activations=kept + layer, copies=last_copies, logits=held if of_value else 0),
    ]
    return max(moments, key=lambda moment: sum(moment.values()))


def _phase(plan: MemoryPlan, name: str) -> dict[str, float]:
    moving = dict(copies=_copies(plan, name), gathered=gathered_bytes(plan, name))
    moving |= _with_gradient(plan) if name == "update" else _without_gradient(plan, name)
    lost = FRAGMENTS * sum(moving.values()) + CONTEXT + NCCL * (plan.num_processes > 1)
    return states(plan, name) | moving | dict(allowance=lost)
