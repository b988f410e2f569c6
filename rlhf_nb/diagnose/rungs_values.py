"Rungs on the value model: what it reads, what it is trained towards, whether it can learn."

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_nb.diagnose import by_hand
from rlhf_nb.diagnose.checks import Found, Rung, not_here
from rlhf_nb.diagnose.rungs_logprobs import close
from rlhf_nb.diagnose.rungs_rewards import rows_apart, targets
from rlhf_nb.diagnose.subject import Observed, Subject
from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOTrainer

EPISODES = 8  # that are learned by heart
STEPS, EPOCHS = 200, 20  # optimizer steps at most, and between two looks
RATE = 0.3  # learning rate times width, the first of two that are tried
WANTED = 0.9  # explained variance after them
NO_VALUE = "advantage_estimator has no value model"


def unknown(subject: Subject) -> str:
    "Why there is nothing to compare an estimator's numbers with; empty where there is."
    name = subject.args.advantage_estimator
    return "" if name in by_hand.ESTIMATORS else f"advantage_estimator {name!r} has no copy by hand"


def seen_values(seen: Observed) -> list[list[float]]:
    "By hand, on the real tokens."
    lengths = seen.sampled.mask.sum(1).tolist()
    return [x[:n].tolist() for x, n in zip(seen.hand.values or (), lengths)]


def values(subject: Subject) -> Found:
    "Values of the rollout against those of the plain model, a row at a time."
    if subject.start.hand.values is None:
        return not_here(NO_VALUE)
    both = subject.start, subject.moved
    gap = max(rows_apart(seen.sampled.values, seen_values(seen)) for seen in both)
    limit = close(subject)
    return Found(gap <= limit, f"{gap:.1e} apart at most (allowed {limit:g})")


def advantages(subject: Subject) -> Found:
    "Advantages by hand."
    if why := unknown(subject):
        return not_here(why)
    both = subject.start, subject.moved
    gap = max(rows_apart(x.rollout.advantages, targets(x, subject).advantages or []) for x in both)
    limit = 3 * close(subject)
    return Found(gap <= limit, f"{gap:.1e} apart at most (allowed {limit:g})")


def returns(subject: Subject) -> Found:
    "What the value model is trained towards, by hand."
    if subject.start.hand.values is None:
        return not_here(NO_VALUE)
    if why := unknown(subject):
        return not_here(why)
    both = subject.start, subject.moved
    gap = max(rows_apart(x.rollout.returns, targets(x, subject).returns or []) for x in both)
    limit = close(subject)
    return Found(gap <= limit, f"{gap:.1e} apart at most (allowed {limit:g})")


def explained(values: Tensor, returns: Tensor) -> float:
    "1 - var(returns - values) / var(returns)."
    return 1 - ((returns - values).var() / returns.var().clamp(min=1e-12)).item()


def fits(subject: Subject) -> Found:
    "Whether the value model can learn the returns of one batch, by the trainer's own update."
    if subject.start.hand.values is None:
        return not_here(NO_VALUE)
    seen = distinct(subject.start.rollout)
    real = seen.mask
    if seen.returns[real].std() < 1e-6:
        return not_here("all returns of the batch are equal")
    scale = "values {:+.2f} ± {:.2f}, returns {:+.2f} ± {:.2f}".format(
        *(f(x[real]).item() for x in (seen.values, seen.returns) for f in (torch.mean, torch.std))
    )
    width, tries = subject.trainer.pair.config.get_text_config().hidden_size, []
    for rate in (RATE / width, RATE / width / 10):
        best, steps = fitted(subject, seen, rate)
        tries.append(f"explained variance {best:.2f} after {steps} steps at {rate:.1g}")
        if best > WANTED:
            break
    return Found(best > WANTED, f"{', '.join(tries)}, {len(seen)} episodes; {scale}")


def distinct(r: Rollout) -> Rollout:
    "A few episodes of other prompts each: nothing can tell two answers to one apart at its start."
    prompts = r.prompt_ids.masked_fill(~r.prompt_mask.bool(), -1)
    first = {tuple(row): i for i, row in reversed([*enumerate(prompts.tolist())])}
    return r.select(sorted(first.values())[:EPISODES])


def fitted(subject: Subject, seen: Rollout, rate: float) -> tuple[float, int]:
    "The best explained variance while a value model is fitted, and the steps that it took."
    trainer, best, steps = taught(subject, rate), -torch.inf, 0
    while best <= WANTED and steps < STEPS:
        now = after_fit(trainer, seen)
        best, steps = max(best, explained(now[seen.mask], seen.returns[seen.mask])), steps + EPOCHS
    return best, steps


def taught(subject: Subject, rate: float) -> PPOTrainer:
    "A trainer that fits its value model to the returns, and gives the policy nothing to do."
    changes = dict(
        learning_rate=rate,
        value_learning_rate=None,
        num_ppo_epochs=EPOCHS,
        num_mini_batches=1,
        num_generations=1,
        per_device_train_batch_size=EPISODES,
        gradient_accumulation_steps=1,
        vf_coef=1.0,
        cliprange_value=1e6,
        kl_coef=0.0,
        kl_controller="fixed",
        kl_in="reward",
        entropy_coef=0.0,
    )
    return subject.beside(own_optimizer=False, **changes)


def after_fit(trainer: PPOTrainer, seen: Rollout) -> Tensor:
    "Values [B, T] after one more update on the batch, without an advantage to follow."
    trainer.prepare()
    trainer.update(seen.with_(advantages=torch.zeros_like(seen.rewards)))
    with torch.no_grad():
        measure: Any = lambda some: trainer.forward(trainer.pair, some)[2:]
        return trainer.forward.over(seen, measure)[0]


RUNGS = (
    Rung(
        "value model: values",
        values,
        "V of a token is the plain value model's number before that token is read, and 0 on "
        "padding (1506.02438, section 3; rounding as of the log-probs)",
        "an offset by one, positions and mask of padded rows, the head, dropout",
        needs=("data: episodes",),
    ),
    Rung(
        "value model: advantages",
        advantages,
        "the estimator's formula, whitened over real tokens (GAE: 1506.02438, eq. 16; others by "
        "their papers)",
        "gamma, lam, what follows the last token, whitening over padding, groups of a prompt",
        needs=("rewards: per token", "value model: values"),
    ),
    Rung(
        "value model: returns",
        returns,
        "advantage before whitening, plus value (1506.02438; 2403.17031)",
        "targets made of whitened advantages, lam_value, bootstrap_truncated",
        needs=("rewards: per token", "value model: values"),
    ),
    Rung(
        "value model: fits a batch",
        fits,
        f"explained variance above {WANTED} within {STEPS} steps at one of two learning rates: a "
        "model with more weights than the batch has tokens can learn the batch by heart",
        "whether its weights are in the optimizer and get a gradient, a frozen body, its "
        "precision, values far from the scale of the returns",
        needs=("value model: returns",),
    ),
)
