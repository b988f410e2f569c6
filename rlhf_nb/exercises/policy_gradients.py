"Exercises of the page on policy gradients."

from __future__ import annotations

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import normal, one, uniform
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "01_policy_gradients"

# ---- REINFORCE with a baseline from the other samples ----


def my_rloo_loss(logprobs: Tensor, rewards: Tensor) -> Tensor:
    baseline = (rewards.sum() - rewards) / (len(rewards) - 1)
    advantages = rewards - baseline
    return -(advantages * logprobs).mean()


def _rloo_cases(g: Generator) -> list[Case]:
    def case(count: int, shift: float) -> Case:
        rewards = normal(g, count) + shift
        return dict(logprobs=uniform(g, -4, -0.1, count), rewards=rewards)

    wide = dict(logprobs=torch.tensor([-14.0, -0.5]), rewards=uniform(g, 15, 30, 2))
    wide["rewards"][1] *= -1
    return [case(3, 0.0), case(2, 1.0), case(one(g, 4, 6), -5.0), wide]


RLOO_LOSS = Exercise(
    my_rloo_loss,
    _rloo_cases,
    "The gradient of REINFORCE, with a baseline that needs no second model.",
    {
        "The sign is wrong: "
        "an optimizer minimises, so the loss is minus the objective.": "return -( → return (",
        "There is no baseline: "
        "subtract from each reward the mean of the others.": "rewards - baseline → rewards",
        "The baseline is the mean of all rewards and includes the response's own: take the mean "
        "of the other N - 1.": "(rewards.sum() - rewards) / (len(rewards) - 1) → rewards.mean()",
        "The sum of the other rewards is divided by N: "
        "there are N - 1 of them.": "(len(rewards) - 1) → len(rewards)",
        "The sum of all rewards is divided by N - 1: "
        "leave out the response's own reward.": "(rewards.sum() - rewards) → rewards.sum()",
        "The baseline is not divided: "
        "you subtract the sum of the other rewards, not their mean.": " / (len(rewards) - 1) →",
        "The baseline is added: subtract it.": "rewards - baseline → rewards + baseline",
        "You return a sum: "
        "return the mean over the responses.": "logprobs).mean() → logprobs).sum()",
        "The advantages are divided by their standard deviation, as in GRPO: RLOO does not "
        "divide them.": "advantages * logprobs → advantages / (rewards.std() + 1e-8) * logprobs",
        "These are probabilities: REINFORCE uses "
        "the gradient of the log-probs.": "advantages * logprobs → advantages * logprobs.exp()",
        "You return the loss of each response: return their mean.": "logprobs).mean() → logprobs)",
        "The log-probs have lost their gradient: only the advantages are constants. "
        "Remove the detach.": "advantages * logprobs → advantages * logprobs.detach()",
    },
    grads=("logprobs",),
    valued=False,
)

# ---- Samples of an older policy ----


def my_surrogate(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = torch.exp(logprobs - old_logprobs)
    return (ratio * advantages).mean()


def _surrogate_cases(g: Generator) -> list[Case]:
    def case(change: Tensor, advantages: Tensor) -> Case:
        old = uniform(g, -3, -0.8, len(change)) - change.clamp(min=0)
        return dict(logprobs=old + change, old_logprobs=old, advantages=advantages)

    def draw_case(count: int, scale: float) -> Case:
        return case(normal(g, count, scale=scale), normal(g, count) + 0.3)

    # One sample became much likelier and was a good one: clipping would change it, in every draw.
    clipped = case(uniform(g, 0.3, 0.8, 1), uniform(g, 0.4, 1.4, 1))
    wide = [case(torch.tensor([x]), torch.tensor([-25.0])) for x in (12.0, -12.0)]
    return [draw_case(3, 0.6), draw_case(one(g, 4, 6), 0.4), clipped, draw_case(2, 0.0), *wide]


SURROGATE = Exercise(
    my_surrogate,
    _surrogate_cases,
    "Old samples, weighted by their ratio, give the objective of the new policy.",
    {
        "The ratio is missing: samples of the old "
        "policy count as if the new one had sampled them.": "ratio * advantages → advantages",
        "The ratio is upside down, with the two log-probs swapped: "
        "it is new over old.": "logprobs - old_logprobs → old_logprobs - logprobs",
        "That is the log of the ratio: "
        "take its exponential.": "torch.exp(logprobs - old_logprobs) → logprobs - old_logprobs",
        "You divide log-probs: the ratio is one of probabilities, the exponential of a "
        "difference of log-probs.": "torch.exp(logprobs - old_logprobs) → logprobs / old_logprobs",
        "The weight is the new probability alone: "
        "divide it by the old one.": "logprobs - old_logprobs) → logprobs)",
        "You divide by the sum of the ratios, which makes the estimate biased: divide by the "
        "number of samples.": "(ratio * advantages).sum() / ratio.sum()",
        "You return a sum: "
        "return the mean over the samples.": "advantages).mean() → advantages).sum()",
        "You return a value for each sample: "
        "return their mean.": "advantages).mean() → advantages)",
        "The sign is wrong: this is the objective, to be maximised. "
        "A loss would be minus that.": "return ( → return -(",
        "The ratio is clipped: that comes two sections later, and it is biased on purpose.": (
            "ratio * advantages → "
            "torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)"
        ),
        "The ratio is detached, so the objective has no gradient: "
        "remove the detach.": "ratio * advantages → ratio.detach() * advantages",
        "You detach the ratio and differentiate the log-prob: differentiate the ratio itself.": (
            "ratio * advantages → "
            "ratio.detach() * advantages + advantages * (logprobs - logprobs.detach())"
        ),
    },
    grads=("logprobs",),
)
