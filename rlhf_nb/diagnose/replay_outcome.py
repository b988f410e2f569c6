"""What an update did: its metrics, its optimizer steps, and how likely each token is after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_nb.losses import explained_variance, policy_diagnostics
from rlhf_nb.rollout import Rollout
from rlhf_nb.ui.episodes import tensor_of
from rlhf_nb.update import Metrics

SHOWN = {  # a number of an update: its name in words
    "objective/scores": "score, penalties included",
    "objective/kl_coef": "kl_coef",
    "lr": "learning rate of this update",
    "loss/policy_avg": "policy loss",
    "loss/value_avg": "value loss",
    "policy/approxkl_avg": "approxkl, mean over the steps",
    "policy/clipfrac_avg": "clipped share of tokens",
    "val/clipfrac_avg": "clipped share of values",
    "val/ratio": "ratio, mean over the steps",
    "policy/grad_norm": "gradient norm before clipping",
    "policy/entropy_avg": "entropy, nats per token",
}
AFTER = {
    "after/approxkl": "KL moved: approxkl after the update",
    "after/clipfrac": "tokens outside the clip range after it",
    "after/ratio_largest": "largest ratio after it",
    "val/explained_variance": "explained variance of the values before",
    "after/explained_variance": "explained variance of the values after",
    "steps": "optimizer steps",
}


@dataclass(frozen=True)
class Outcome:
    "One update, done."

    metrics: Metrics  # as the run logs them
    steps: list[dict[str, float]]  # of each optimizer step: means over its tokens, and grad_norm
    before: Rollout  # what it learnt from: of all ranks, with log-probs and values before it
    after: Rollout  # the same with log-probs and values after it
    clip: tuple[float, float | None]  # cliprange, cliprange_high
    seconds: float = 0.0
    device: str = "cpu"
    differences: dict[str, list[str]] = field(default_factory=dict)  # from the run, by check

    @property
    def likelier(self) -> Tensor:
        "Log-prob of each token after the update less before it [B, T], nats; zero on padding."
        moved = tensor_of(self.after, "logprobs") - tensor_of(self.before, "logprobs")
        return moved.masked_fill(~self.before.mask, 0.0)

    @property
    def ratios(self) -> Tensor:
        "Probability after over probability before, of each real token."
        return self.likelier[self.before.mask].exp()

    def numbers(self) -> dict[str, float]:
        "Metrics of the update, and what one forward pass after it shows."
        r, new = self.before, tensor_of(self.after, "logprobs")
        sums = policy_diagnostics(new, r.logprobs, r.advantages, r.mask, *self.clip)
        low, high = self.clip[0], self.clip[1] or self.clip[0]
        outside = (self.ratios < 1 - low) | (self.ratios > 1 + high)
        numbers: dict[str, float] = dict(self.metrics)
        numbers["after/approxkl"] = (sums["approxkl"] / sums["tokens"]).item()
        numbers["after/clipfrac"] = outside.double().mean().item()
        numbers["after/ratio_largest"] = self.ratios.max().item()
        numbers["steps"] = len(self.steps)
        if r.values is not None:
            now = explained_variance(self.after.values, r.returns, r.mask)
            numbers["after/explained_variance"] = now.item()
        return numbers


def shown_numbers(outcomes: Sequence[Outcome]) -> list[tuple[str, str, list[float | None]]]:
    "The rows of a table: name, words, and the number of each outcome."
    every = [one.numbers() for one in outcomes]
    names: Mapping[str, Any] = SHOWN | AFTER
    return [
        (name, words, [numbers.get(name) for numbers in every])
        for name, words in names.items()
        if any(name in numbers for numbers in every)
    ]


def most_moved(outcomes: Sequence[Outcome], count: int = 3) -> list[int]:
    "The episodes in which the most became likelier or less likely, in nats a token."
    total = sum((one.likelier.abs().sum(1) for one in outcomes), torch.zeros(()))
    lengths = outcomes[0].before.mask.sum(1).clamp(min=1)
    return (total / lengths).argsort(descending=True)[:count].tolist()
