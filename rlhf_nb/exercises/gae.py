"Exercises of the page on GAE."

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import dirty, lengths, normal, pick, ragged
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case, plain

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
        rewards, values = normal(g, *mask.shape), normal(g, *mask.shape)
        rewards, values = dirty(rewards, mask, dirt), dirty(values, mask, 1 - dirt)
        return dict(rewards=rewards, values=values, mask=mask, gamma=gamma, lam=lam)

    return [
        case(lengths(4, 2, 0, width=4), 7.0, 0.9, 0.5),
        case(lengths(3, 1, width=3), 2.0, pick(g, [0.5, 0.7, 0.8]), pick(g, [0.9, 0.95, 1.0])),
        case(ragged(g, 3, 5), math.nan, pick(g, [0.6, 0.95, 1.0]), pick(g, [0.3, 0.4, 0.7])),
        case(lengths(2, width=2), 0.0, 0.99, 0.95),
    ]


CLEAR = ("    values = torch.where(mask, values, 0.0)\n", "")
DIRTY = ("    rewards = torch.where(mask, rewards, 0.0)\n", "", *CLEAR)
LAST = "    return advantages\n"

GAE = Exercise(
    "my_gae",
    my_gae,
    _gae_cases,
    "Each token has its own surprise and a share of the later ones.",
    {
        "lam makes no difference: the step back is gamma * lam.": (
            "gamma * lam * later",
            "gamma * later",
        ),
        "gamma makes no difference: it belongs in the surprise and in the step back.": (
            "gamma * after",
            "after",
            "gamma * lam",
            "lam",
        ),
        "gamma is missing from the step back, which is gamma * lam, not lam alone.": (
            "gamma * lam",
            "lam",
        ),
        "gamma is missing from the surprise: delta = r + gamma * (V of the next token) - V.": (
            "gamma * after",
            "after",
        ),
        "gamma and lam are swapped: gamma discounts the next value, lam only the step back.": (
            "gamma * after",
            "lam * after",
        ),
        "lam is in the surprise too: the next value is multiplied by gamma alone.": (
            "gamma * after",
            "gamma * lam * after",
        ),
        "These are the surprises: nothing is passed back to earlier tokens yet.": (
            "+ gamma * lam * later",
            "",
        ),
        "V_t is where V_{t+1} belongs: the surprise compares the value of this token with the "
        "next token's.": (
            "gamma * after",
            "gamma * values",
        ),
        "The value of the next token is missing from the surprise: add gamma * V_{t+1}.": (
            "+ gamma * after ",
            "",
        ),
        "The value is not subtracted: delta = r + gamma * V_{t+1} - V_t.": (" - values\n", "\n"),
        "The two values are exchanged, and their signs with them: add V_{t+1}, subtract V_t.": (
            "+ gamma * after - values",
            "- gamma * after + values",
        ),
        "You start at the first token, so each token inherits from those before it. Start at "
        "the last and work towards the front.": (
            "reversed(range(deltas.shape[1]))",
            "range(deltas.shape[1])",
        ),
        "Padding leaks into real tokens: you cleared it after the recursion. Clear it before.": (
            *DIRTY,
            LAST,
            "    return torch.where(mask, advantages, 0.0)\n",
        ),
        "The mask makes no difference: clear values and rewards on padding first.": DIRTY,
        "The last real token of a short row uses a value on padding: after the end, the value "
        "is 0.": (
            *CLEAR,
            "- values\n",
            "- values\n    deltas = torch.where(mask, deltas, 0.0)\n",
        ),
        "The last token of a full row uses the value of the first, because roll wraps around: "
        "put a 0 there.": (
            "    after[:, :-1] = values[:, 1:]\n",
            "    after = values.roll(-1, 1)\n",
        ),
        "The last token of a full row uses its own value as the next one: after the end, the "
        "value is 0.": (
            "torch.zeros_like(values)",
            "values.clone()",
        ),
        "Zero times infinity is NaN: clear padding with torch.where, do not multiply by the "
        "mask.": (
            "torch.where(mask, rewards, 0.0)",
            "rewards * mask",
            "torch.where(mask, values, 0.0)",
            "values * mask",
        ),
        "These are the returns, A + V: the advantages are without the value.": (
            LAST,
            "    return advantages + values\n",
        ),
        "These are whitened. That comes later, because the returns need the advantages as they "
        "are.": (
            LAST,
            "    real = advantages[mask]\n    return torch.where(mask, (advantages - "
            "real.mean()) / (real.std() + 1e-8), 0.0)\n",
        ),
    },
)

# ---- What follows a row: nothing, or the value of what would have come ----


def my_deltas(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, bootstrap: Tensor
) -> Tensor:
    last = torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1
    after = torch.zeros_like(values)
    after[:, :-1] = values[:, 1:]
    after = torch.where(last, bootstrap[:, None], after)
    return torch.where(mask, rewards + gamma * after - values, 0.0)


def _deltas_cases(g: Generator) -> list[Case]:
    def case(mask: Tensor, dirt: float, gamma: float, *bootstrap: float) -> Case:
        rewards, values = normal(g, *mask.shape), normal(g, *mask.shape)
        drawn = normal(g, len(mask))
        return dict(
            rewards=dirty(rewards, mask, dirt),
            values=dirty(values, mask, 2 * dirt),
            mask=mask,
            gamma=gamma,
            bootstrap=torch.tensor(bootstrap) if bootstrap else drawn,
        )

    return [
        case(lengths(4, 2, 3, width=4), 9.0, 0.5, 3.0, 2.0, 0.0),
        case(lengths(2, 3, 0, width=4), 5.0, pick(g, [0.6, 0.7]), 1.5, -2.0, 4.0),
        case(ragged(g, 3, 4), math.nan, pick(g, [0.8, 0.9, 1.0])),
        case(lengths(3, width=3), 0.0, 0.95),
    ]


TAIL = "    return torch.where(mask, rewards + gamma * after - values, 0.0)\n"


def _bootstrap_elsewhere(case: Case, result: Any) -> bool | None:
    """Whether a token that is not the last real one is followed by the bootstrap, and the last one
    is not. What follows a token is its surprise less r - V, over gamma."""
    found, mask = plain(result), case["mask"]
    rows = (mask.sum(1) > 1) & (case["bootstrap"].abs() > 1e-3)
    if found is None or found.shape != mask.shape or not rows.any():
        return None
    after = (found - case["rewards"] + case["values"]) / case["gamma"]
    is_bootstrap = torch.isclose(after, case["bootstrap"][:, None].double(), atol=1e-4)
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    elsewhere = (is_bootstrap & mask & ~last)[rows].any()
    return bool(elsewhere and not (is_bootstrap & last)[rows].any())


DELTAS = Exercise(
    "my_deltas",
    my_deltas,
    _deltas_cases,
    "After the end comes 0, and after a cut the bootstrap.",
    {
        "bootstrap reaches no real token, so every row is treated as ended: is it missing, or is "
        "an index or a condition wrong?": (
            "last, bootstrap[:, None]",
            "last, 0.0",
        ),
        "Only a row that fills its columns gets the bootstrap: put it after the last real "
        "token, not after the last column.": (
            "    after = torch.where(last, bootstrap[:, None], after)\n",
            "    after[:, :-1] = torch.where(mask[:, 1:], values[:, 1:], 0.0)\n    after[:, -1] "
            "= bootstrap\n",
        ),
        "A short row uses a value on padding: what follows its last real token is its bootstrap.": (
            "    after = torch.where(last, bootstrap[:, None], after)\n",
            "    after[:, -1] = bootstrap\n",
        ),
        "The bootstrap is not discounted: it is one step ahead, like any next value, so gamma "
        "is missing there.": (
            "bootstrap[:, None]",
            "bootstrap[:, None] / gamma",
        ),
        "gamma is missing within the row: every next value is one step ahead, and discounted.": (
            "= values[:, 1:]",
            "= values[:, 1:] / gamma",
        ),
        "gamma makes no difference: discount both the next value and the bootstrap.": (
            "gamma * after",
            "after",
        ),
        "The last token uses its own value as the next one: use the bootstrap there.": (
            "bootstrap[:, None], after",
            "values, after",
        ),
        "The bootstrap is added after every token: only the last real token is followed by it.": (
            "torch.where(last, bootstrap[:, None], after)",
            "torch.where(last, bootstrap[:, None], after + bootstrap[:, None])",
        ),
        "The bootstrap replaces every next value: only the last real token is followed by it.": (
            "torch.where(last, bootstrap[:, None], after)",
            "bootstrap[:, None]",
        ),
        "V_t is where V_{t+1} belongs: the surprise compares the value of this token with the "
        "next token's.": (
            "    after[:, :-1] = values[:, 1:]\n",
            "    after = values\n",
        ),
        "Padding is not 0: clear it at the end, by the mask.": (
            TAIL,
            "    return rewards + gamma * after - values\n",
        ),
        "Zero times NaN is NaN: clear padding with torch.where, do not multiply by the mask.": (
            TAIL,
            "    return (rewards + gamma * after - values) * mask\n",
        ),
        "A row that fills its columns gets no bootstrap: its last token has no column after "
        "it, but the bootstrap follows it as in any other row.": (
            "torch.where(last, bootstrap[:, None], after)",
            "torch.where(last, torch.where(mask.all(1), 0.0, bootstrap)[:, None], after)",
        ),
    },
    traits={
        "The bootstrap follows the wrong token: it belongs after the last real one. Is an index "
        "off by one, or a condition the other way round?": _bootstrap_elsewhere,
    },
)

# ---- Targets and whitening: two results, and an order ----


def my_targets(advantages: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    real = advantages[mask]
    whitened = (advantages - real.mean()) / real.std()
    returns = advantages + values
    return torch.where(mask, whitened, 0.0), torch.where(mask, returns, 0.0)


def _targets_cases(g: Generator) -> list[Case]:
    def case(mask: Tensor, dirt: float, scale: float) -> Case:
        advantages = normal(g, *mask.shape, scale=scale) + 0.5
        values = dirty(normal(g, *mask.shape), mask, dirt)
        return dict(advantages=dirty(advantages, mask, 0.0), values=values, mask=mask)

    return [
        case(lengths(4, 2, width=4), 9.0, 2.0),
        case(lengths(3, 1, 0, width=3), 4.0, 0.4),
        case(ragged(g, 3, 4), math.nan, 3.0),
    ]


WHITE = "(advantages - real.mean()) / real.std()"
BOTH = "    return torch.where(mask, whitened, 0.0), torch.where(mask, returns, 0.0)\n"

TARGETS = Exercise(
    "my_targets",
    my_targets,
    _targets_cases,
    "The returns are as they came, and the advantages on one scale.",
    {
        "The returns are computed from whitened advantages: compute the returns first, then "
        "whiten.": (
            "advantages + values",
            "whitened + values",
        ),
        "These returns are the advantages: add V.": ("advantages + values", "advantages"),
        "The sign is wrong: the value was too low by A, so add A to it.": (
            "advantages + values",
            "values - advantages",
        ),
        "The sign of the values is wrong: the returns are A + V, so add the values.": (
            "advantages + values",
            "advantages - values",
        ),
        "The two results are swapped: return the whitened advantages first, then the returns.": (
            BOTH,
            "    return torch.where(mask, returns, 0.0), torch.where(mask, whitened, 0.0)\n",
        ),
        "The advantages are not whitened: they need mean 0 and standard deviation 1.": (
            WHITE,
            "advantages",
        ),
        "The zeros on padding are part of your mean and standard deviation: whiten over real "
        "tokens, by the mask.": (
            "advantages[mask]",
            "advantages.reshape(-1)",
        ),
        "Each row is whitened by itself, so a good row looks like a bad one. Whiten over all "
        "tokens, not row by row.": (
            "    whitened = (advantages - real.mean()) / real.std()\n",
            "    whitened = torch.stack([(a - a[m].mean()) / a[m].std() for a, m in "
            "zip(advantages, mask)])\n",
        ),
        "You divided by the standard deviation without subtracting the mean: subtract it first.": (
            WHITE,
            "advantages / real.std()",
        ),
        "You subtracted the mean and did not divide by the standard deviation.": (
            WHITE,
            "advantages - real.mean()",
        ),
        "You divided by the variance: divide by its square root, the standard deviation.": (
            "real.std()",
            "real.var()",
        ),
        "Your variance divides by n: divide by n - 1, the correction for a sample, or the "
        "spread comes out too small.": (
            "real.std()",
            "real.std(correction=0)",
        ),
        "Padding is no longer 0 after whitening, because the mean was subtracted there too: "
        "clear it by the mask.": (
            "torch.where(mask, whitened, 0.0)",
            "whitened",
        ),
        "Zero times NaN is NaN: clear padding with torch.where, do not multiply by the mask.": (
            BOTH,
            "    return whitened * mask, returns * mask\n",
        ),
    },
)
