"What the workers of several processes share: where they are, their arguments, their end."

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from small_runs import QUIET
from torch import nn

RANKS, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
DEEPSPEED, FSDP = (f"ACCELERATE_USE_{name}" in os.environ for name in ("DEEPSPEED", "FSDP"))
STAGE = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")


def arguments(kind: type, out: Path, **settings):
    "Of a run on CPUs; use_cpu would turn DeepSpeed off, without a word."
    device = dict(use_cpu=False, ddp_backend="gloo") if DEEPSPEED else dict(use_cpu=True)
    args = kind(str(out), **QUIET | device | settings)
    if FSDP:  # Accelerate gives it to GPUs only, and DDP on a CPU: it is told that these are GPUs
        args.device
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args


def adapter(task: str | None = None, **how) -> LoraConfig:
    targets = ["query_key_value", "dense_h_to_4h"]
    return LoraConfig(**dict(r=2, target_modules=targets, task_type=task) | how)


def everything(model: nn.Module) -> torch.Tensor:
    "All weights, whole; but for the head that an adapter put aside."
    whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p
    gathered = contextlib.nullcontext()
    if STAGE == "3":
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(model.parameters()))
    with gathered:
        named = [(n, p) for n, p in model.named_parameters() if "original_module" not in n]
        return torch.cat([whole(p.detach()).flatten().clone() for _, p in named])


def leave(said: str = "") -> None:
    "All is asserted; gloo's threads now and then abort a process that takes itself apart."
    if RANK == 0:
        print(said, flush=True)
    if RANKS > 1:
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
