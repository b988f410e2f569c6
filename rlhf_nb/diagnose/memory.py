"""Where PPO's memory goes, by phase and by kind, computed from configs before you need a GPU. Page
49 uses it."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, get_args

import pandas as pd
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    PreTrainedConfig,
)
from transformers.pytorch_utils import Conv1D

from rlhf_nb.base.fields import Count, Positive, check_fields
from rlhf_nb.base.opened import unwrap
from rlhf_nb.base.without_data import without_data
from rlhf_nb.training.model_loading import add_adapter
from rlhf_nb.ui.html import element

GIB = 2**30  # about what GPUs are sold as: 80 "GB" are 80 GiB, minus what the driver uses


def _count(model: nn.Module, learning: bool = False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not learning)


def _on_meta(config: PreTrainedConfig, scorer: bool, adapter: Any) -> nn.Module:
    config = copy.deepcopy(config)
    if scorer:
        config.num_labels = 1
    kind = AutoModelForSequenceClassification if scorer else AutoModelForCausalLM
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between peft and transformers, not ours
        return add_adapter(kind.from_config(config), copy.deepcopy(adapter))  # peft writes into it


def _layers(body: Any) -> nn.ModuleList:
    n = body.config.num_hidden_layers
    lists = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == n]
    if not lists:
        raise ValueError(
            f"{type(body).__name__} has no list of {n} layers: give the config of a causal "
            "language model, such as LlamaConfig, GPTNeoXConfig or GPT2Config."
        )
    return max(lists, key=_count)


@dataclass(frozen=True)
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
    model: nn.Module = field(repr=False, compare=False)  # on the meta device


def model_size(
    config: PreTrainedConfig,  # of a causal language model
    scorer: bool = False,  # with a scalar head instead of the language model's
    adapter: Any = None,  # of peft, such as LoraConfig: then only the adapter is trained
) -> ModelSize:
    """Exact counts, from the model built on torch's meta device: shapes without numbers. Raises
    ValueError on other configs."""
    key = json.dumps(
        [type(config).__name__, config.to_json_string(use_diff=False), scorer, repr(adapter)]
    )
    if key not in _SIZES:
        model, config = _on_meta(config, scorer, adapter), config.get_text_config()
        body = unwrap(model).base_model
        linear = [m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D))]
        layers, heads = _layers(body), config.num_attention_heads
        own = {p for m in linear for p in m.parameters(recurse=False)}  # a tied one once
        wide = [p.shape for p in layers[0].parameters() if p.dim() == 2]
        sides = [max(s) for s in wide if min(s) >= config.hidden_size]  # an adapter's are thin
        _SIZES[key] = ModelSize(
            params=_count(model),
            trained=_count(model, learning=True),
            matrices=sum(p.numel() for p in own),
            layer=_count(layers[0]),
            layers=len(layers),
            hidden=config.hidden_size,
            heads=heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            middle=sum(n for n in sides if n == max(sides)),
            vocab=config.vocab_size,
            model=model,
        )
    return _SIZES[key]


_SIZES: dict[str, ModelSize] = {}


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


class TokenBytes(NamedTuple):
    "Bytes for each token, as measured."

    layer: float  # that one layer keeps for its backward pass
    mask: float  # and this for each token of the row: the mask is [B, 1, L, L]
    outside: float  # kept outside of the layers, by the last norm
    cache: float  # one layer's keys and values


def _kept(body: Any, length: int, states: torch.Tensor) -> float:
    "Bytes that a forward pass over states [1, L, H] keeps: each storage once, and no weights."
    mask, at = torch.ones(1, 1, length, length).bool(), torch.zeros(1, length).long()
    weights, kept = {(*sorted(p.shape),) for p in body.parameters()}, {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if (*sorted(x.shape),) not in weights:  # nor autocast's copy of one, transposed or not
            kept[id(x.untyped_storage())] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        body(inputs_embeds=states, attention_mask=mask, position_ids=at, use_cache=False)
    return sum(x.nbytes() for x in kept.values()) / length


@lru_cache
def token_bytes(
    model: nn.Module,  # on the meta device: `size.model`
    form: Precision,
) -> TokenBytes:
    "What a body keeps, with attention by sdpa: it is run without layers, with one, and with two."
    body = unwrap(copy.deepcopy(model)).base_model.eval()
    layers, dtype = _layers(body), torch.bfloat16 if form.weights == 2 else torch.float32
    one = max(layers, key=lambda layer: _count(layer, learning=True))
    if len(layers) == 1:
        body.config.num_hidden_layers = 2
        body.config.layer_types = 2 * (getattr(body.config, "layer_types", None) or [])
    del layers[:]
    try:
        with without_data(), torch.autocast("cpu", torch.bfloat16, enabled=form.autocast):
            for part in [*body.modules(), *one.modules()]:
                for name, x in [*part.named_parameters(recurse=False)]:
                    new = torch.empty(x.shape, dtype=dtype)
                    setattr(part, name, nn.Parameter(new, x.requires_grad))
                for name, x in [*part.named_buffers(recurse=False)]:
                    setattr(part, name, torch.empty(x.shape, dtype=x.dtype))
            width, kept = body.get_input_embeddings().embedding_dim, {}
            for depth, length in ((0, 101), (1, 101), (2, 101), (2, 103)):  # no matrix is that long
                layers.extend([one] * (depth - len(layers)))
                states = torch.empty(1, length, width, dtype=dtype, requires_grad=True)
                kept[depth, length] = _kept(body, length, states)
            cache: Any = DynamicCache()
            del layers[1:]
            with torch.no_grad():
                body(inputs_embeds=states, past_key_values=cache, use_cache=True)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{type(body).__name__} does not run without numbers, so its activations are unknown: "
            "plan for a dense decoder of its size, such as a Llama."
        ) from error
    mask = (kept[2, 103] - kept[2, 101]) / 2 / 2  # two layers, two tokens
    written = [x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None]
    stored = sum(x.nbytes for x in written) / 103
    return TokenBytes(kept[2, 101] - kept[1, 101] - 101 * mask, mask, kept[0, 101], stored)


def layer_activations(size: ModelSize, form: Precision, length: int) -> float:
    "Bytes for each token that one decoder layer keeps, in a row of so many tokens."
    each = token_bytes(size.model, form)
    return each.layer + each.mask * length


def model_activations(
    size: ModelSize,
    form: Precision,
    rows: int,  # of a micro-batch
    length: int,  # tokens of a row, prompt and response
    checkpointing: bool,  # each layer keeps only its input
    read: int | None = None,  # positions of a row that are read; None: all
) -> float:  # bytes
    "What a whole body keeps: its layers, the last norm, and the inputs of the head."
    read = length if read is None else read
    layers = size.layers * layer_activations(size, form, length)
    if checkpointing:
        layers = size.layers * form.stream * size.hidden
    outside = token_bytes(size.model, form).outside
    return rows * (length * (layers + outside) + form.matmul * size.hidden * read)


CHUNK = 2**26  # the default of response_logprobs: chunk_logits


def logits_bytes(
    size: ModelSize,
    tokens: int,  # response tokens of a micro-batch
    copies: float = 2,  # float32 copies of [tokens, V] held at a time
) -> float:
    "The chunk of logits that `response_logprobs` holds at a time."
    return 4 * copies * size.vocab * min(tokens, max(1, CHUNK // size.vocab))


def kv_cache(
    size: ModelSize,
    form: Precision,
    rows: int,
    length: int,  # columns: prompt and response without the last token, which is never read
) -> float:  # bytes
    "Keys and values of all layers."
    return rows * length * size.layers * token_bytes(size.model, form).cache


LayoutName = Literal["alone", "ddp", "zero2", "zero3", "fsdp2"]
LAYOUTS = get_args(LayoutName)


@dataclass(frozen=True)
class PPOSetup:
    """All that the memory of a PPO run depends on. What a run has too has its name there. Raises
    ValueError, naming the field and the fix, where the run would be refused too."""

    policy: PreTrainedConfig  # of a causal language model; no weights are read
    reward: PreTrainedConfig | None = None  # None: the reward is a function
    value: PreTrainedConfig | None = None  # None: like the reward model, or else like the policy
    layout: LayoutName = "alone"
    num_processes: Count = 1  # GPUs
    prompt_length: Count = 512  # tokens, of the longest prompt of a batch
    response_length: Count = 53
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
        positions = getattr(self.policy, "max_position_embeddings", None) or self.length
        if self.layout == "alone" and self.num_processes > 1:
            raise ValueError(
                f"num_processes is {self.num_processes}: alone is one GPU; give layout='ddp', "
                "'zero2', 'zero3' or 'fsdp2'."
            )
        if self.layout == "zero3" and self.offload_frozen:
            raise ValueError(
                "offload_frozen is True: DeepSpeed ZeRO-3 places weights by its own configuration; "
                "set offload_param_device: cpu there, and leave offload_frozen out."
            )
        if self.length > positions:
            raise ValueError(
                f"prompt_length is {self.prompt_length}: with response_length "
                f"{self.response_length} that is more than the model's {positions} positions; "
                "shorten one of them."
            )

    @property
    def length(self) -> int:
        return self.prompt_length + self.response_length

    @property
    def local_rows(self) -> int:
        "Rows of an update on each GPU."
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def rows(self) -> int:
        "Rows of a forward pass without gradient, and of a sampling batch."
        return min(self.local_rollout_forward_batch_size, self.local_rows)

    @property
    def micro_batches(self) -> int:
        "Backward passes of an optimizer step."
        return max(1, self.gradient_accumulation_steps // self.num_mini_batches)

    @property
    def form(self) -> Precision:
        """How the two trained models compute. DeepSpeed and FSDP2 compute with bf16 weights, DDP by
        autocast."""
        if self.precision == "float32" and self.dtype == "float32":
            return FORMS["float32"]
        mixed = self.dtype == "float32" and self.layout in ("alone", "ddp")
        return FORMS["autocast" if mixed else "bf16"]

    @property
    def frozen_width(self) -> int:
        "Bytes of a frozen weight: as loaded; under DeepSpeed as its engine computes."
        if self.layout in ("zero2", "zero3"):
            return self.form.weights
        return 2 if self.dtype == "bfloat16" else 4

    @cached_property
    def sizes(self) -> tuple[ModelSize, ModelSize | None, list[ModelSize]]:
        "Policy, value model (None: a layer on the policy, or none), and frozen models."
        value = None
        if self.critic and not self.share_value_trunk:
            config = self.value or self.reward or self.policy
            value = model_size(config, True, self.value_peft_config)
        frozen = [] if self.peft_config is not None else [model_size(self.policy)]
        rewards = [self.reward, *self.more_rewards]
        frozen += [model_size(reward, True) for reward in rewards if reward is not None]
        return model_size(self.policy, adapter=self.peft_config), value, frozen

    @property
    def trained(self) -> list[ModelSize]:
        "The models that are trained."
        return [model for model in self.sizes[:2] if model is not None]


def states(setup: PPOSetup) -> dict[str, float]:
    """Bytes that stay on each GPU from update to update, and the gradients; Rajbhandari et al.
    2020, section 3, for ZeRO."""
    policy, value, frozen = setup.sizes
    n, layout, trained = setup.num_processes, setup.layout, setup.trained
    weights = sum(m.params for m in trained)
    learns = sum(m.trained for m in trained) + (0 if value or not setup.critic else policy.hidden)
    still = 0 if setup.offload_frozen else setup.frozen_width * sum(m.params for m in frozen)
    if layout in ("zero2", "zero3"):
        b, part = setup.form.weights, n if layout == "zero3" else 1
        held = dict(weights=b * weights / part, gradients=b * learns / n, optimizer=12 * learns / n)
        return held | dict(frozen=still / part)
    if layout == "fsdp2":
        held = dict(weights=4 * weights, gradients=4 * learns, optimizer=8 * learns, frozen=still)
        return {row: held[row] / n for row in held}
    width, moved = 4, 4 * learns
    if setup.dtype == "bfloat16":  # an adapter is float32, whatever it is added to
        width = 2
        moved = sum(m.trained * (4 if m.trained < m.params else 2) for m in trained)
    # DDP copies gradients into buckets
    gradients = moved * (2 if layout == "ddp" else 1)
    return dict(weights=width * weights, gradients=gradients, optimizer=2 * moved, frozen=still)


def _unit(size: ModelSize) -> int:
    "What FSDP2 holds whole of a model that runs: embeddings, head, a layer and the next one."
    return size.params - size.layer * (size.layers - 2)


def gathered(setup: PPOSetup, phase: str) -> float:
    """Bytes of weights and gradients that are temporarily whole on a GPU, in addition to their
    shards; buckets of DeepSpeed."""
    policy, value, frozen = setup.sizes
    b, trained, gathers = setup.form.weights, setup.trained, setup.ds3_gather_for_generation
    weights, learns = sum(m.params for m in trained), sum(m.trained for m in trained)
    bucket = b * min(learns, 5e8) if phase == "update" else 0  # reduce_bucket_size
    if setup.layout == "zero2":
        return bucket
    if setup.layout == "zero3":
        if phase == "rollout" and gathers:
            return b * policy.params
        # stage3_max_live_parameters, stage3_prefetch_bucket_size
        return b * min(weights, 1e9 + 5e7) + bucket
    if setup.layout != "fsdp2":
        return 0
    if phase == "rollout":  # embeddings and heads of both models are one group
        head = value.params - value.layer * value.layers if value else 0
        return b * (head + (policy.params if gathers else _unit(policy)))
    unit = sum(map(_unit, trained))
    if phase == "score":
        return b * max([unit, *map(_unit, frozen)])  # one after the other
    # whole gradients are kept until the last micro-batch
    whole = learns if setup.micro_batches > 1 else 0
    return b * (unit + unit * learns / weights + whole)


def _copies(setup: PPOSetup, phase: str) -> float:
    """The bf16 copies of matrices that autocast keeps: of trained ones, until the forward pass is
    over; without checkpointing of all, for the backward pass."""
    running = setup.trained[:1] if phase == "rollout" else setup.trained
    if phase != "update" or setup.activation_checkpointing:
        running = [m for m in running if m.trained == m.params]
    return 2 * sum(m.matrices for m in running) if setup.form.autocast else 0


def _passing(size: ModelSize, form: Precision, tokens: int) -> float:
    "What a layer holds without a gradient: the residual stream twice, and its MLP's middle."
    return tokens * (2 * form.stream * size.hidden + form.matmul * size.middle)


def _logits(setup: PPOSetup, rows: int, whole: int, copies: int) -> float:
    """Two copies of a chunk. ZeRO-3 does not run body and head separately: there `whole` times all
    logits [B, 2 T + 1, V], and `copies` of a chunk."""
    policy, tokens = setup.sizes[0], rows * setup.response_length
    if setup.layout != "zero3":
        return logits_bytes(policy, tokens)
    every = setup.form.matmul * policy.vocab * rows * (2 * setup.response_length + 1)
    return whole * every + logits_bytes(policy, tokens, copies)


def _rollout(setup: PPOSetup) -> dict[str, float]:
    policy, rows = setup.sizes[0], setup.rows
    return dict(
        kv=kv_cache(policy, setup.form, rows, setup.length - 1),
        activations=_passing(policy, setup.form, rows * setup.prompt_length),
        logits=4 * 4 * rows * policy.vocab,
    )


def _score(setup: PPOSetup) -> dict[str, float]:
    policy, _, frozen = setup.sizes
    widest = max(_passing(m, setup.form, setup.rows * setup.length) for m in [policy, *frozen])
    return dict(activations=widest, logits=_logits(setup, setup.rows, 1, 5))


def _update(setup: PPOSetup) -> dict[str, float]:
    "The largest of three moments: the head; the end of the forward pass; a layer's backward."
    policy, rows, form = setup.sizes[0], setup.per_device_train_batch_size, setup.form
    n, read = rows * setup.length, setup.response_length + 1  # before each token, after the last
    zero3, recompute = setup.layout == "zero3", setup.activation_checkpointing
    first, *of_value = [
        model_activations(m, form, rows, setup.length, recompute, positions)
        for m, positions in zip(setup.trained, (setup.length if zero3 else read, read))
    ]
    chunked = rows * setup.response_length > CHUNK // policy.vocab  # each is recomputed then
    held = _logits(setup, rows, 1, 0 if chunked else 4) if zero3 else 0
    layer: float = 2 * n * form.stream * policy.hidden
    copies = last_copies = _copies(setup, "update")
    if recompute:  # inputs of frozen matrices are there for a while too
        bare = replace(setup, peft_config=None, value_peft_config=None)
        layer += n * max(layer_activations(m, form, setup.length) for m in bare.trained)
        last_copies = 2 * policy.layer if form.autocast else 0
    kept = first + sum(of_value)
    moments = [
        dict(activations=first, copies=copies, logits=_logits(setup, rows, 2, 6)),
        dict(activations=kept, copies=copies, logits=held),
        dict(activations=kept + layer, copies=last_copies, logits=held if of_value else 0),
    ]
    return max(moments, key=lambda moment: sum(moment.values()))


ROWS = dict(
    weights="weights: policy, value model",
    frozen="weights: reference, reward model",
    optimizer="optimizer",
    gradients="gradients",
    copies="bf16 copies of weights",
    gathered="gathered weights, buckets",
    kv="KV cache",
    activations="activations",
    logits="logits",
    allowance="allowance (not measured)",
)
_SHARD = "--use_peft --value_use_peft, or a layout that shards it (zero2, zero3, fsdp2)"
_BATCH = "a smaller --per_device_train_batch_size, or --activation_checkpointing"
LESS = dict(  # what to type, by row
    weights="--share_value_trunk, --use_peft, or zero3 or fsdp2",
    frozen="--offload_frozen, or zero3 or fsdp2",
    optimizer=_SHARD,
    gradients=_SHARD,
    copies="--dtype bfloat16, or --activation_checkpointing",
    gathered="--ds3_gather_for_generation False, which samples slowly",
    kv="a smaller --local_rollout_forward_batch_size",
    activations=_BATCH,
    logits=_BATCH,
    allowance="a larger GPU",
)
CONTEXT = 0.6 * GIB  # of CUDA
NCCL = 1.0 * GIB  # its buffers, with several GPUs
FRAGMENTS = 0.1  # share of temporary memory lost to fragmentation


@dataclass(frozen=True)
class MemoryPlan:
    "Bytes on each GPU by phase and kind, and whether they fit."

    setup: PPOSetup

    @cached_property
    def phases(self) -> dict[str, dict[str, float]]:
        "Phase -> row of the table -> bytes."
        return {name: _phase(self.setup, name) for name in ("rollout", "score", "update")}

    @property
    def totals(self) -> dict[str, float]:
        "Bytes of each phase."
        return {name: sum(rows.values()) for name, rows in self.phases.items()}

    @property
    def phase(self) -> str:
        "The largest phase."
        return max(self.totals, key=lambda name: self.totals[name])

    @property
    def peak(self) -> float:
        "Bytes of the largest phase."
        return self.totals[self.phase]

    @property
    def dominates(self) -> str:
        "The largest row of the largest phase."
        rows = self.phases[self.phase]
        return max(rows, key=lambda name: rows[name])

    @property
    def fits(self) -> bool | None:
        "Whether it fits; None if no GPU memory was given."
        return None if self.setup.gpu_memory is None else self.peak <= self.setup.gpu_memory * GIB

    @property
    def verdict(self) -> str:
        "The result in a sentence."
        of_it = self.phases[self.phase][self.dominates] / GIB
        summary = (
            f"peak {self.peak / GIB:.1f} GiB on each GPU, in the {self.phase}; most of it: "
            f"{ROWS[self.dominates]} ({of_it:.1f} GiB)"
        )
        size = self.setup.gpu_memory
        if size is None:
            return f"{summary}. Give gpu_memory, in GiB, to see whether it fits."
        left = size - self.peak / GIB
        if self.fits:
            return f"It fits: {summary}; {left:.1f} of {size:g} GiB are left."
        over = f"that is {-left:.1f} GiB more than the GPU's {size:g}"
        return f"It does not fit: {summary}; {over}. Less of it: {LESS[self.dominates]}."

    def frame(self) -> pd.DataFrame:
        "GiB on each GPU: a row for each kind, a column for each phase."
        frame = pd.DataFrame(self.phases).reindex([*ROWS]).dropna(how="all").fillna(0.0)
        frame = frame.rename(index=ROWS)
        return pd.concat([frame, frame.sum().to_frame("sum").T]) / GIB

    def _repr_html_(self) -> str:
        table = self.frame().to_html(float_format="{:.2f}".format)
        return f"{table}{element('p', self.verdict)}"


def _phase(setup: PPOSetup, name: str) -> dict[str, float]:
    rows, n = states(setup), setup.num_processes
    if name != "update":
        rows["gradients"] *= 0.5 if setup.layout == "ddp" else 0  # its buckets are never freed
    if name == "score" and setup.offload_frozen:  # the largest is placed while it runs
        placed = [_unit(m) / n if setup.layout == "fsdp2" else m.params for m in setup.sizes[2]]
        rows["frozen"] = setup.frozen_width * max(placed, default=0)
    needs = dict(rollout=_rollout, score=_score, update=_update)[name](setup)
    moving = dict(copies=_copies(setup, name), gathered=gathered(setup, name)) | needs
    lost = FRAGMENTS * sum(moving.values()) + CONTEXT + (NCCL if n > 1 else 0)
    every = rows | moving | dict(allowance=lost)
    return {row: every[row] for row in ROWS if row in every}


def plan_memory(
    policy: PreTrainedConfig,
    reward: PreTrainedConfig | None = None,
    value: PreTrainedConfig | None = None,
    **settings: Any,  # the other fields of PPOSetup
) -> MemoryPlan:
    """What a PPO run needs on each GPU, from configs alone. Raises ValueError, naming the field and
    the fix."""
    return MemoryPlan(PPOSetup(policy, reward, value, **settings))
