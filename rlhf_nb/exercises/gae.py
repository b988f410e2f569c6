"Exercises of the page on GAE."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import dirty, draw_lengths, far, normal, pick, ragged_mask
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "10_gae"

# ---- The recursion ----


def my_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    rewards = torch.where(mask, rewards, 0.0)
    values = torch.where(mask, values, 0.0)
    after = torch.zeros_like(values)
    after[:, :-1] = values[:, 1:]
    deltas = rewards + gamma * after - values
    advantages = torch.zeros_like(deltas)
    later = torch.zeros(len(deltas))
    for t in reversed(range(deltas.shape[1])):
        later = deltas[:, t] + gamma * lam * later
        advantages[:, t] = later
    return advantages


def _gae_cases(g: Generator) -> list[Case]:
    def case(mask: Tensor, dirt: float, gamma: float, lam: float) -> Case:
        rewards, values = far(normal(g, *mask.shape)), far(normal(g, *mask.shape)).roll(1, 1)
        rewards, values = dirty(rewards, mask, dirt), dirty(values, mask, 1 - dirt)
        return dict(rewards=rewards, values=values, mask=mask, gamma=gamma, lam=lam)

    return [
        case(draw_lengths(4, 2, 0, width=4), 7.0, 0.9, 0.5),
        case(draw_lengths(3, 1, width=3), 2.0, pick(g, [0.5, 0.7, 0.8]), pick(g, [0.9, 0.95, 1.0])),
        case(ragged_mask(g, 3, 5), math.nan, pick(g, [0.6, 0.95, 1.0]), pick(g, [0.3, 0.4, 0.7])),
        case(draw_lengths(2, width=2), 0.0, 0.99, 0.95),
    ]


CLEAR = "    values = torch.where(mask, values, 0.0)\n →"
DIRTY = f"    rewards = torch.where(mask, rewards, 0.0)\n →; {CLEAR}"
LAST = "    return advantages\n"

GAE = Exercise(
    my_gae,
    _gae_cases,
    "Each token has its own surprise and a share of the later ones.",
    {
        "lam makes no difference: "
        "the step back is gamma * lam.": "gamma * lam * later → gamma * later",
        "gamma makes no difference: it belongs "
        "in the surprise and in the step back.": "gamma * after → after; gamma * lam → lam",
        "gamma is missing from the step back, "
        "which is gamma * lam, not lam alone.": "gamma * lam → lam",
        "gamma is missing from the surprise: "
        "delta = r + gamma * (V of the next token) - V.": "gamma * after → after",
        "gamma and lam are swapped: "
        "gamma discounts the next value, lam only the step back.": "gamma * after → lam * after",
        "lam is in the surprise too: "
        "the next value is multiplied by gamma alone.": "gamma * after → gamma * lam * after",
        "These are the surprises: "
        "nothing is passed back to earlier tokens yet.": "+ gamma * lam * later →",
        "V_t is where V_{t+1} belongs: the surprise compares "
        "the value of this token with the next token's.": "gamma * after → gamma * values",
        "The value of the next token is missing from the surprise: "
        "add gamma * V_{t+1}.": "+ gamma * after - → -",
        "The value is not subtracted: delta = r + gamma * V_{t+1} - V_t.": "after - values → after",
        "The two values are exchanged, and their signs with them: "
        "add V_{t+1}, subtract V_t.": "+ gamma * after - values → - gamma * after + values",
        "You start at the first token, so each token inherits from those before it. Start at the "
        "last and work "
        "towards the front.": "reversed(range(deltas.shape[1])) → range(deltas.shape[1])",
        "Padding leaks into real tokens: you cleared it after the recursion. "
        "Clear it before.": f"{DIRTY}; {LAST} →     return torch.where(mask, advantages, 0.0)\n",
        "The mask makes no difference: clear values and rewards on padding first.": DIRTY,
        "The last real token of a short row uses a value on padding: after the end, the value "
        "is 0.": f"{CLEAR}; - values\n → - values\n    deltas = torch.where(mask, deltas, 0.0)\n",
        "The last token of a full row uses the value of the first, because roll wraps around: "
        "put a 0 there.": "    after[:, :-1] = values[:, 1:]\n →     after = values.roll(-1, 1)\n",
        "The last token of a full row uses its own value as the next one: "
        "after the end, the value is 0.": "torch.zeros_like(values) → values.clone()",
        "Zero times infinity is NaN: "
        "clear padding with torch.where, do not multiply by the mask.": (
            "torch.where(mask, rewards, 0.0) → rewards * mask; "
            "torch.where(mask, values, 0.0) → values * mask"
        ),
        "These are the returns, A + V: "
        "the advantages are without the value.": "advantages + values",
        "These are the returns, A + V, with the values on padding: "
        "the advantages are without the value.": (
            "    values = torch →     given = values\n    values = torch; "
            f"{LAST} →     return advantages + given\n"
        ),
        "These are whitened. "
        "That comes later, because the returns need the advantages as they are.": (
            f"{LAST} →     real = advantages[mask]\n    return torch.where(mask, "
            "(advantages - real.mean()) / (real.std() + 1e-8), 0.0)\n"
        ),
    },
)
