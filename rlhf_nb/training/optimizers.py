"Optimizers and schedules that a user brings: what is inside, and whether they fit the models."

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import optimization

# schedules that a metric of an evaluation steps; GreedyLR is not in every release
BY_METRIC = (ReduceLROnPlateau, *filter(None, [getattr(optimization, "GreedyLR", None)]))


def inner_optimizer(optimizer: Any) -> Any:
    "The optimizer inside Accelerate's wrapper; any other itself."
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def check_optimizer(optimizer: Any, scheduler: Any, model: Any) -> None:
    """Raises ValueError where an optimizer of the user's own lacks weights that learn, or a
    schedule moves the learning rate of another one."""
    groups = getattr(optimizer, "param_groups", [])
    held = {id(p) for group in groups for p in group["params"]}
    learn = {name: p for name, p in model.named_parameters() if p.requires_grad}
    lacks = [name for name, p in learn.items() if id(p) not in held]
    if held and lacks:
        raise ValueError(
            f"the optimizer lacks {len(lacks)} of {len(learn)} tensors that learn, such as "
            f"{lacks[0]}: it was made before the trainer made them, or without them. Leave "
            "optimizers out and give optimizer_cls_and_kwargs=(torch.optim.AdamW, dict(lr=1e-5)), "
            "or set trainer.optimizer once the trainer is made."
        )
    if scheduler is not None and inner_optimizer(scheduler.optimizer) is not optimizer:
        raise ValueError(
            "the lr_scheduler is of another optimizer than the one that trains: give both as "
            "optimizers=(optimizer, lr_scheduler), or set lr_scheduler_type."
        )
    if scheduler is not None and scheduler.last_epoch > 0 and not any(x["lr"] for x in groups):
        raise ValueError(
            f"the lr_scheduler is at its end, after {scheduler.last_epoch} steps, with a learning "
            "rate of 0: give optimizers=(optimizer, None), and a new schedule is made."
        )


def check_rates(optimizer: Any, scheduler: Any) -> None:
    "Raises ValueError where a schedule that is yet to be made has no rate to begin with."
    groups = () if scheduler is not None else getattr(optimizer, "param_groups", ())
    if any(group["lr"] is None for group in groups):
        raise ValueError(
            "the optimizer's lr is None: give one; Adafactor, with relative_step=False."
        )
