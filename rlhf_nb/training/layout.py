"""How the models are spread over devices and processes: the only module that knows Accelerate,
DeepSpeed, FSDP2 and torch.distributed from inside.

Private names used here, and why (tests/test_structure.py names the one that a release misses)::

    Accelerate    GradientState._set_sync_gradients: gradients are exchanged with the last
                  micro-batch of a mini-batch, which Accelerate's own counter does not know
    FSDP2         FSDPModule._get_fsdp_state()._lazy_init(): a part is called before its root
    torch         nn.Module._forward_hooks, _forward_pre_hooks: DeepSpeed's are off while sampling
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from rlhf_nb.base.sharding import gather_weights, layer_names

Measure = Callable[[Any], Any]  # what is done with a model: `measure(model)`
Placed = Callable[[Measure], Any]  # a frozen model: `placed(measure)` is `measure(model)`


# ---- Weights that are sharded ----


@contextmanager
def unshard_all(
    model: nn.Module,
    but: nn.Module | None = None,  # a part whose layers stay sharded
) -> Iterator[None]:
    """Inside, the weights of an FSDP2 model are whole on every rank, whichever part is called;
    another model is left as it is."""
    left = set() if but is None else set(but.modules())
    parts = [part for part in model.modules() if isinstance(part, FSDPModule) and part not in left]
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()  # else the first part called takes itself for the root
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)


def unshard_root(model: nn.Module) -> AbstractContextManager:
    """Inside, a model that is itself an FSDP2 root is whole; under a `Frozen` wrapper, whose layers
    fetch themselves, and anywhere else nothing changes."""
    return unshard_all(model) if isinstance(model, FSDPModule) else nullcontext()


@contextmanager
def layer_by_layer(model: nn.Module) -> Iterator[None]:
    """Inside, any part of an FSDP2 model can be called: what is outside its layers is whole, a
    layer while it computes."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model._get_fsdp_state()._lazy_init()
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


@contextmanager
def match_calls(
    model: nn.Module,  # a transformers model, or its body
    count: Callable[[int], int],  # sums a number over the ranks
    device: torch.device | str,  # of its inputs
) -> Iterator[None]:
    """Inside, every rank calls the model as often as the one that calls it most, since sharded
    weights are fetched by all ranks together: a rank that is done runs it on one token."""

    def announce(module: nn.Module, args: tuple) -> None:
        count(1)

    handle = model.register_forward_pre_hook(announce, prepend=True)  # before anything is fetched
    try:
        yield
    finally:
        handle.remove()
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    while count(0):
        with torch.no_grad():
            model(input_ids=token, use_cache=False)


@contextmanager
def disable_hooks(model: nn.Module, library: str) -> Iterator[None]:
    "Inside, a library's forward hooks are off: DeepSpeed's would shard layers after each token."
    kept, module = [], lambda hook: getattr(hook, "__module__", "") or ""
    for part in model.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            theirs = [key for key, hook in hooks.items() if module(hook).startswith(library)]
            if theirs:
                kept.append((hooks, dict(hooks)))
            for key in theirs:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


# ---- Models that nobody trains ----


class Offloaded:
    "A frozen model whose weights are in host memory, on the device only `with offloaded: ...`."

    def __init__(
        self,
        model: nn.Module,  # its weights go to the host at once; buffers, which are small, stay
        device: torch.device | str,  # where it computes
        fetch: Callable[[Tensor], Tensor] | None = None,  # brings one weight there; None: a copy
    ):
        self.depth = 0  # it may be entered again inside
        self.fetch = fetch or (lambda weight: weight.to(device, non_blocking=True))
        pinned = torch.device(device).type == "cuda"
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        self.weights = [
            (p, p.data.cpu().pin_memory() if pinned else p.data.cpu()) for p in model.parameters()
        ]
        self.drop()

    def drop(self) -> None:
        for parameter, kept in self.weights:
            parameter.data = kept

    def __enter__(self) -> None:
        if not self.depth:
            for parameter, kept in self.weights:
                parameter.data = self.fetch(kept)
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.drop()


class Frozen(nn.Module):
    """A wrapper for a model that nobody trains: `frozen(measure)` is `measure(model)`. It is the
    root whose forward FSDP2 hooks into, so the model itself stays what it was."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, measure: Measure) -> Any:
        return measure(self.model)


def sharded_frozen(
    model: nn.Module,  # weights and all; it is changed in place
    **options: Any,  # of `fully_shard`: mesh, mp_policy, offload_policy
) -> Frozen:
    "Spread a frozen model over the ranks, layer by layer; nothing stays whole after a call."
    names, wrapper = set(layer_names(model)), Frozen(model)
    for part in reversed([*model.modules()]):  # a layer inside another comes first
        if type(part).__name__ in names:
            fully_shard(part, reshard_after_forward=True, **options)
    fully_shard(wrapper, reshard_after_forward=True, **options)
    return wrapper


# ---- The layout of a run ----


class Layout:
    """What the launcher asked for: one process, DDP, FSDP2, DeepSpeed ZeRO-2 or ZeRO-3. Raises
    RuntimeError where something else runs."""

    def __init__(self, accelerator: Accelerator, offload_frozen: bool = False):
        self.accelerator, self.offload_frozen = accelerator, offload_frozen
        self.device, self.processes = accelerator.device, accelerator.num_processes
        state = accelerator.state
        self.deepspeed: Any = getattr(state, "deepspeed_plugin", None)
        self.fsdp: Any = getattr(state, "fsdp_plugin", None)
        self.fsdp2 = bool(accelerator.is_fsdp2)
        self.in_place = self.deepspeed is None and self.fsdp is None  # without being prepared
        self.fixed_parts = self.deepspeed is not None  # their number is in its config
        self.zero3 = self.deepspeed is not None and self.deepspeed.zero_stage == 3
        self.in_parts = self.zero3 or self.fsdp2  # a layer's weights are fetched when it is called
        self.check()
        fsdp: Any = self.fsdp
        if self.fsdp2 and fsdp.mixed_precision_policy is not None:
            # FSDP2 computes in bf16 where it is told to; log-probs and values stay float32
            policy = replace(fsdp.mixed_precision_policy, output_dtype=None)
            fsdp.mixed_precision_policy = policy

    def describe(self) -> str:
        "Ranks and layout, in words and by Accelerate's name for it."
        n, kind = self.processes, self.accelerator.distributed_type.value
        name = "DDP" if n > 1 else ""
        if self.fsdp is not None:
            name = "FSDP2" if self.fsdp2 else "FSDP1"
        if self.deepspeed is not None:
            name = f"DeepSpeed ZeRO-{self.deepspeed.zero_stage}"
        ranks = "one process" if n == 1 else f"{n} processes"
        return f"{ranks}, {name} ({kind})" if name else ranks

    def check(self) -> None:
        "Raises RuntimeError where the launcher asked for something that does not run."
        runs = self.describe()
        world = int(os.environ.get("WORLD_SIZE", 1))
        for name, present in (
            ("ACCELERATE_USE_DEEPSPEED", self.deepspeed is not None),
            ("ACCELERATE_USE_FSDP", self.fsdp is not None),
            ("WORLD_SIZE", world == self.processes),
        ):
            asked = os.environ.get(name, "").lower() in ("1", "true", "yes")
            if not present and (asked or name == "WORLD_SIZE"):
                raise RuntimeError(
                    f"{name} is {os.environ[name]!r} and what runs is {runs}: the request took no "
                    "effect. On a CPU, use_cpu and ACCELERATE_USE_CPU turn DeepSpeed off; check "
                    "that the library is installed, and launch with `accelerate launch` or "
                    "torchrun."
                )
        # these two variables are what Accelerate's launcher of several processes leaves behind
        several = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
        if several and "WORLD_SIZE" not in os.environ and self.processes == 1:
            raise RuntimeError(
                f"`accelerate launch` was to start several processes and what runs is {runs}: with "
                "--cpu it starts one alone. Set ACCELERATE_USE_CPU=true and launch with "
                "--multi_gpu --num_processes N, which starts N on the CPU too."
            )

    def check_warm_up(self, given: int | str | None, weight_decay: float) -> None:
        "Raises ValueError on a value warm-up, or pretraining, that would move the policy too."
        if given and weight_decay and self.deepspeed is not None:
            raise ValueError(
                f"value_warmup_updates, or value_pretrain_rollouts, is {given} and weight_decay "
                f"{weight_decay:g}: DeepSpeed "
                "steps all weights together, so the policy would decay in the warm-up. Set one of "
                "them to 0."
            )

    def check_ready(self, prepared: bool) -> None:
        "Raises RuntimeError where the trained models have yet to be sharded or cast."
        if not prepared and not self.in_place:
            raise RuntimeError(
                f"under {self.describe()} the models are not in place yet: call trainer.prepare() "
                "before the first rollout, or trainer.step()."
            )

    # ---- over ranks ----

    def sum(self, x: Tensor) -> Tensor:
        "A sum over all ranks."
        return self.accelerator.reduce(x, reduction="sum") if self.processes > 1 else x

    def count(self, n: int) -> int:
        "A sum of counts over all ranks."
        return int(self.sum(torch.tensor(n, device=self.device)))

    def largest(self, x: Tensor) -> Tensor:
        "The largest number that any rank has."
        return (self.accelerator.gather(x) if self.processes > 1 else x).max()

    def most(self, n: int) -> int:
        "The largest of the ranks' counts."
        if self.processes == 1:  # no tensor, for which a GPU would wait
            return n
        return int(self.largest(torch.tensor([n], device=self.device)))

    # ---- frozen models ----

    def place(self, model: nn.Module) -> Placed:
        """Put a frozen model where it belongs: on this device, sharded over all ranks, or in host
        memory. Returns `placed`: `placed(measure)` is `measure(model)`, with the model there."""
        if self.zero3:
            return self._place_zero3(model)
        if self.deepspeed is not None:
            model = model.to(self.deepspeed_dtype() or next(model.parameters()).dtype)
        if self.fsdp2:
            return sharded_frozen(model, **self._sharding())
        if not self.offload_frozen:
            model.to(self.device)
            return lambda measure: measure(model)
        offloaded = Offloaded(model, self.device)

        def placed(measure: Measure) -> Any:
            with offloaded:
                return measure(model)

        return placed

    def _place_zero3(self, model: nn.Module) -> Placed:
        "Sharded over all ranks by a DeepSpeed engine without an optimizer."
        if self.offload_frozen:
            raise ValueError(
                "offload_frozen is set and DeepSpeed ZeRO-3 runs, which keeps weights where its "
                "own configuration says: set offload_param_device: cpu there, and leave "
                "offload_frozen out."
            )
        import deepspeed

        config = copy.deepcopy(self.deepspeed.deepspeed_config)
        for part in ("optimizer", "scheduler", "train_batch_size"):
            config.pop(part, None)
        config |= dict(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
        placed = deepspeed.initialize(model=model.eval(), config=config)[0].module
        return lambda measure: measure(placed)

    def _sharding(self) -> dict[str, Any]:
        "How FSDP2 spreads the trained models: over which ranks, in which precision."
        mesh, policy = self.accelerator.state.device_mesh, self.fsdp.mixed_precision_policy
        options: dict[str, Any] = {} if policy is None else dict(mp_policy=policy)
        if mesh is not None:
            options["mesh"] = mesh[tuple(self.accelerator.parallelism_config.fsdp_dim_names)]
        if self.offload_frozen:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        return options

    def deepspeed_dtype(self) -> torch.dtype | None:
        "What DeepSpeed casts the trained weights to; None: it leaves them."
        if self.deepspeed is None:
            return None
        config = self.deepspeed.deepspeed_config
        kinds = dict(bf16=torch.bfloat16, fp16=torch.float16)
        on = [kind for name, kind in kinds.items() if config.get(name, {}).get("enabled") is True]
        return on[0] if on else None

    def in_float32(self, model: nn.Module) -> bool:
        "Whether the trained model computes in float32 or wider."
        wide = next(model.parameters()).dtype in (torch.float32, torch.float64)
        mixed = self.accelerator.mixed_precision != "no"
        return wide and not mixed and self.deepspeed_dtype() is None

    # ---- trained models ----

    @contextmanager
    def sampling(
        self,
        policy: nn.Module,
        value: nn.Module,  # its layers stay sharded
        wrapped: nn.Module,  # both, inside of what the layout puts around them
        gather: bool = True,  # gather the weights once; False: layer by layer at each token
    ) -> Iterator[None]:
        "Inside, the policy can be called by itself, token after token, in the update's precision."
        with ExitStack() as inside:
            inside.enter_context(self.accelerator.autocast())
            if self.in_parts and not gather:
                inside.enter_context(layer_by_layer(wrapped))
                inside.enter_context(self.in_step(policy))
            elif not self.in_place:
                weights = gather_weights(policy) if self.zero3 else unshard_all(wrapped, but=value)
                inside.enter_context(weights)
                inside.enter_context(disable_hooks(policy, "deepspeed"))
            yield

    @contextmanager
    def stream(self, *key: int) -> Iterator[None]:
        "Inside, each rank has random numbers of its own, the same ones for the same key."
        seed = random.Random(f"{key} {self.accelerator.process_index}").getrandbits(63)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    def own_stream(self, *key: int) -> AbstractContextManager:
        "The same where there are several ranks; in a run of one process nothing changes."
        return self.stream(*key) if self.processes > 1 else nullcontext()

    def known_everywhere(self, columns: dict[str, Any], kind: str) -> dict[str, Any]:
        "Without the columns whose names begin so and that another rank lacks."
        if self.processes == 1:
            return columns
        names = [name for name in columns if name.startswith(kind)]
        missing = {*names} - set.intersection(*map(set, gather_object([names])))
        return {name: x for name, x in columns.items() if name not in missing}

    def in_step(self, model: nn.Module) -> AbstractContextManager:
        "Inside, all ranks call a sharded model equally often."
        return match_calls(model, self.count, self.device) if self.in_parts else nullcontext()

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager:
        "Around a micro-batch: gradients are exchanged between ranks with the last one alone."
        self.accelerator.gradient_state._set_sync_gradients(last)
        if last or self.deepspeed is not None:  # DeepSpeed looks at the flag itself
            return nullcontext()
        return self.accelerator.no_sync(model)

    def backward(self, loss: Tensor) -> None:
        "Backward of this rank's share of a loss: the ranks' gradients are added up, not averaged."
        unscaled = dict(scale_wrt_gas=False) if self.deepspeed is not None else {}
        self.accelerator.backward(loss * self.processes, **unscaled)

    def clip_gradients(self, model: Any, max_norm: float) -> float:
        "Clip to that norm over all ranks, and return the norm before."
        norm = self.accelerator.clip_grad_norm_(model.parameters(), max_norm)
        return float(norm) if norm is not None else model.get_global_grad_norm()
