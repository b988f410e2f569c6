"A rung on what changes from one update to the next: rates, coefficients, shuffles, samples."

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import get_scheduler

from rlhf_nb.diagnose import by_hand
from rlhf_nb.diagnose.checks import Found, Rung
from rlhf_nb.diagnose.subject import LOOKED_AT, Subject, differing, fingerprint, inner_optimizer
from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOTrainer

UPDATES, EPOCHS = 3, 3  # the last update with SMALL as its target_kl, where the run has one
SMALL = 1e-12  # nats, below what a step moves the policy by
CLIP = 1e-2  # max_grad_norm at most, or most gradients are too short to be clipped
CERTAIN = 20.0  # nats of all samples: below, two draws may be the same by chance


@dataclass
class Seen:
    "What a few updates did."

    trainer: PPOTrainer
    rows: list[list[list[int]]] = field(default_factory=list)  # of each step of each update
    kls: list[list[float]] = field(default_factory=list)  # approxkl, likewise
    rates: list[list[list[float]]] = field(default_factory=list)  # of each group, likewise
    norms: list[float] = field(default_factory=list)  # of the gradients that are stepped with
    coefs: list[tuple[float, float]] = field(default_factory=list)  # kl_coef after, and by hand
    changed: list[int] = field(default_factory=list)  # weights of the policy, by each update


def copy_of(subject: Subject) -> PPOTrainer:
    "A trainer with the run's own schedules and small updates."
    own = subject.args
    trainer = subject.beside(
        max_steps=max(1, own.num_total_batches),
        lr_scheduler_type=own.lr_scheduler_type,
        warmup_steps=own.warmup_steps,
        value_warmup_updates=min(own.value_warmup_updates, UPDATES - 1),
        num_ppo_epochs=min(own.num_ppo_epochs, EPOCHS),
        max_grad_norm=min(own.max_grad_norm, CLIP),
        **subject.sizes(LOOKED_AT),
    )
    trainer.prepare()
    return trainer


def updates(trainer: PPOTrainer, batch: Any, target_kl: float | None) -> Seen:
    "A few updates, all on one batch."
    seen, args = Seen(trainer), trainer.args
    note_steps(seen)
    for k in range(UPDATES):
        args.target_kl = target_kl if k == UPDATES - 1 else None
        for steps in (seen.rows, seen.kls, seen.rates):
            cast(list, steps).append([])
        before, coef = fingerprint(trainer.policy), trainer.controller.value
        kl = trainer.step(batch)["objective/kl"]
        by_formula = by_hand.kl_coef_after(coef, kl, args.batch_size, args)
        seen.coefs.append((trainer.controller.value, by_formula))
        seen.changed.append(differing(before, trainer.policy))
    return seen


def note_steps(seen: Seen) -> None:
    "Each optimizer step of the trainer is written down from now on."
    trainer: Any = seen.trainer
    gradients = trainer.gradients

    def noted(model: Any, r: Rollout, rows: Tensor) -> dict[str, float]:
        sums = gradients(model, r, rows)
        seen.rows[-1].append(rows.tolist())
        seen.kls[-1].append(sums["approxkl"] / sums["tokens"])
        return sums

    def before(optimizer: Any, *_: Any) -> None:
        groups = optimizer.param_groups
        seen.rates[-1].append([float(group["lr"] or 0.0) for group in groups])
        grads = [p.grad for g in groups for p in g["params"] if p.grad is not None]
        seen.norms.append(math.sqrt(sum(x.double().square().sum().item() for x in grads)))

    trainer.gradients = noted
    inner_optimizer(trainer).register_step_pre_hook(before)


# ---- What is looked at; None: it does not apply ----


def samples(trainer: PPOTrainer, batch: Any) -> Found | None:
    "Two rollouts of one policy on the same prompts."
    first, args = trainer.rollout(batch), trainer.args
    if args.top_k or args.top_p < 1 or -first.logprobs[first.mask].sum() < CERTAIN:
        return None
    same = torch.equal(first.response_ids, trainer.rollout(batch).response_ids)
    return Found(not same, "the same samples in two rollouts" if same else "new samples")


def rates(seen: Seen) -> Found | None:
    "The learning rate of every step, against the schedule that transformers makes."
    trainer, args = seen.trainer, seen.trainer.args
    inner, n = inner_optimizer(trainer), args.num_total_batches
    bases = [float(group["initial_lr"] or 0.0) for group in inner.param_groups]
    if type(trainer).create_scheduler is not PPOTrainer.create_scheduler or not all(bases):
        return None  # a schedule of the user's own, or an optimizer that finds its rate itself
    groups = [dict(params=[torch.zeros(1)], lr=base) for base in bases]
    other = torch.optim.SGD(groups, lr=inner.defaults.get("lr") or bases[0])
    how = args.get_warmup_steps(n), n, cast(Any, args.lr_scheduler_kwargs)
    plan, right = get_scheduler(args.lr_scheduler_type, other, *how), True
    for steps in seen.rates:
        wanted = [group["lr"] for group in other.param_groups]
        right &= all(
            math.isclose(a, b, rel_tol=1e-6) for step in steps for a, b in zip(step, wanted)
        )
        other.step()
        plan.step()
    shown = ", ".join(f"{step[0]:.6g}" for steps in seen.rates for step in steps[-1:])
    return Found(right, f"learning rates {shown}" + ("" if right else ", and scheduled are others"))


def orders(seen: Seen) -> Found | None:
    "Every epoch of the updates has an order of its own."
    args = seen.trainer.args
    if args.num_mini_batches == 1 or args.batch_size < 8:
        return None
    starts = range(0, args.num_mini_batches * args.num_ppo_epochs, args.num_mini_batches)
    epochs = [str(u[i : i + args.num_mini_batches]) for u in seen.rows for i in starts if u[i:]]
    return Found(len({*epochs}) == len(epochs), f"{len({*epochs})} orders in {len(epochs)} epochs")


def settings(seen: Seen) -> list[Found]:
    "Whether kl_controller, max_grad_norm, value_warmup_updates and target_kl do what they say."
    args, first = seen.trainer.args, seen.changed[: seen.trainer.args.value_warmup_updates]
    own, ours = (", ".join(f"{pair[i]:.4g}" for pair in seen.coefs) for i in (0, 1))
    right = all(math.isclose(*pair, rel_tol=1e-6) for pair in seen.coefs)
    found = [Found(right, f"kl_coef {own}, by hand {ours}")]
    limit, longest = args.max_grad_norm, max(seen.norms, default=0.0)
    if limit > 0 and not args.fp16:
        told = f"gradients of norm {longest:.3g} at most, clipped at {limit:.3g}"
        found.append(Found(longest <= 1.02 * limit, told))
    if first and seen.trainer.pair.value is not None:
        told = f"{max(first)} weights of the policy changed in the value warm-up"
        found.append(Found(not any(first), told))
    if args.target_kl is not None:
        late = sum(kl > args.target_kl for kl in seen.kls[-1][:-1])
        found.append(Found(not late, f"{late} steps after one above target_kl"))
    return found


def schedule(subject: Subject) -> Found:
    "All of these, over a few updates."
    trainer = copy_of(subject)
    batch = subject.batch(trainer.args.batch_size)
    drawn = samples(trainer, batch)
    seen = updates(trainer, batch, None if subject.args.target_kl is None else SMALL)
    looks = [x for x in (rates(seen), orders(seen), drawn, *settings(seen)) if x is not None]
    wrong = [x.measured for x in looks if not x.passed]
    told = "; ".join(wrong or [x.measured for x in looks])
    return Found(not wrong, f"wrong: {told}" if wrong else told)


RUNGS = (
    Rung(
        "learning: schedule",
        schedule,
        f"over {UPDATES} updates with the run's own schedules: one step of lr_scheduler_type an "
        "update, gradients no longer than max_grad_norm, another order of rows in each epoch and "
        "other samples in each rollout, kl_coef by its formula (1909.08593, section 2.2), a policy "
        "that stays in value_warmup_updates and no step after target_kl (definition)",
        "where the scheduler is stepped, seeds that do not depend on the update, the sign of the "
        "controller's error, settings that are read nowhere",
    ),
)
