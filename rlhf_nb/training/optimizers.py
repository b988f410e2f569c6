"Optimizers and schedules that a user brings: what is inside, and whether they fit the models."

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import optimization
from transformers.utils import logging

logger = logging.get_logger(__name__)
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


def warn_of_warm_up(scheduler: Any, warm_up: int, steps: int) -> None:
    "Logs that a run ends before its learning rate is the one that was set."
    factor = getattr(scheduler, "lr_lambdas", [lambda step: 1.0])[0]
    if warm_up >= steps > 0 and (reached := factor(steps - 1)) < 1:
        logger.warning(
            f"the warm-up (warmup_steps) has {warm_up} steps and the run {steps}: the learning "
            f"rate ends at {reached:.0%} of the one that was set. Lower warmup_steps (below 1 it "
            "is a share of all steps), or train longer."
        )
