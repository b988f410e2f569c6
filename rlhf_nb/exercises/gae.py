"Exercises of the page on GAE."

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_nb.exercises import Task, clear

# ---- The recursion ----


def _next(values: Tensor) -> Tensor:
    "The value one step ahead; 0 after the last column."
    return torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)


def _pass_back(deltas: Tensor, decay: float) -> Tensor:
    "A from delta by walking from the last column to the first."
    advantages = deltas.clone()
    for t in reversed(range(deltas.shape[1] - 1)):
        advantages[:, t] += decay * advantages[:, t + 1]
    return advantages


def _pass_forward(deltas: Tensor, decay: float) -> Tensor:
    return _pass_back(deltas.flip(1), decay).flip(1)


def _gae(
    discount: Callable[[float, float], float] = lambda gamma, lam: gamma,
    decay: Callable[[float, float], float] = lambda gamma, lam: gamma * lam,
    walk: Callable[[Tensor, float], Tensor] = _pass_back,
    after: Callable[[Tensor, Tensor], Tensor] = lambda values, mask: _next(clear(values, mask)),
    first: str = "where",  # how padding is cleared in the deltas
    last: str = "where",  # and in the result
) -> Callable:
    "An answer of right pieces, or of pieces that people put in their place."

    def answer(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
        deltas = rewards + discount(gamma, lam) * after(values, mask) - values
        return clear(walk(clear(deltas, mask, first), decay(gamma, lam)), mask, last)

    return answer


def _returns(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    return _gae()(rewards, values, mask, gamma, lam) + clear(values, mask)


def _whitened(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    advantages = _gae()(rewards, values, mask, gamma, lam)
    real = advantages[mask]
    return clear((advantages - real.mean()) / real.std(), mask)


def _gae_case(*dirt: float) -> tuple:
    "Rows of 5, 3 and 0 tokens; `dirt` is what the padding holds."
    rewards = [[0.5, -1.0, 2.0, 0.25, 1.0], [-0.5, 1.5, 1.0, *dirt], [*dirt, *dirt, 1.0]]
    values = [[1.0, 0.5, -0.25, 2.0, 0.75], [0.25, -1.0, 0.5, *dirt[::-1]], [*dirt, *dirt, 2.0]]
    mask = torch.arange(5) < torch.tensor([[5], [3], [0]])
    return torch.tensor(rewards), torch.tensor(values), mask, 0.9, 0.5


GAE = Task(
    _gae(),
    (_gae_case(3.0, 7.0), _gae_case(math.inf, math.nan)),
    "Each token has its own surprise and its share of the later ones.",
    {
        "lam makes no difference: the step back is gamma * lam.": _gae(
            decay=lambda gamma, lam: gamma
        ),
        "gamma makes no difference: it belongs in the surprise and in the step back.": _gae(
            discount=lambda gamma, lam: 1.0, decay=lambda gamma, lam: lam
        ),
        "The step back is lam alone: it is gamma * lam.": _gae(decay=lambda gamma, lam: lam),
        "These are the surprises: nothing is passed back to earlier tokens yet.": _gae(
            decay=lambda gamma, lam: 0.0
        ),
        "Tokens inherit from those before them: start at the last token and walk to the "
        "front.": _gae(walk=_pass_forward),
        "Padding leaks into real tokens: it was cleared after the recursion, and must be cleared "
        "before.": _gae(after=lambda values, mask: _next(values), first="none"),
        "The mask makes no difference: clear values and surprises on padding first.": _gae(
            after=lambda values, mask: _next(values), first="none", last="none"
        ),
        "The last real token of a short row sees a value on padding: after the end, the value is "
        "0.": _gae(after=lambda values, mask: _next(values)),
        "The last token of a full row sees the value of the first: roll wraps around, so put a 0 "
        "there.": _gae(after=lambda values, mask: clear(values, mask).roll(-1, 1)),
        "Zero times infinity is NaN: clear the padding with torch.where, do not multiply by the "
        "mask.": _gae(after=lambda values, mask: _next(values * mask), first="times", last="none"),
        "These are the returns, A + V: an advantage is without the value.": _returns,
        "These are whitened: that comes later, because the returns need the advantages as they "
        "are.": _whitened,
    },
)

# ---- What follows a row: nothing, or the value model's word ----

End = Callable[[Tensor, Tensor, float, Tensor], Tensor]  # of values, is_last, gamma, bootstrap


def _at_end(amount: Callable[[Tensor, float, Tensor], Tensor]) -> End:
    "amount(values, gamma, bootstrap) on the last real token, 0 elsewhere."
    return lambda v, is_last, g, b: torch.where(is_last, amount(v, g, b[:, None]), 0.0)


_bootstrapped = _at_end(lambda v, g, b: g * b.expand_as(v))


def _deltas(
    end: End = _bootstrapped,
    inside: bool = True,  # gamma within the row
    padding: str = "where",
) -> Callable:
    "An answer that adds end(...) for what follows the last real token."

    def answer(
        rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, bootstrap: Tensor
    ) -> Tensor:
        clean = clear(values, mask, padding)
        is_last = torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1
        step = (gamma if inside else 1.0) * _next(clean)
        after = step + end(values, is_last, gamma, bootstrap)
        return clear(rewards + after - clean, mask, padding)

    return answer


def _in_the_last_column(v: Tensor, is_last: Tensor, g: float, b: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(v[:, 1:]), g * b[:, None]], 1)


def _on_the_padding(v: Tensor, is_last: Tensor, g: float, b: Tensor) -> Tensor:
    return torch.where(is_last, g * torch.cat([v[:, 1:], b[:, None]], 1), 0.0)


def _deltas_case(dirt: float) -> tuple:
    "Rows of 4, 2 and 3 tokens, the last of which ended by itself; `dirt` is on the padding."
    rewards = [[0.5, -1.0, 2.0, 1.0], [-0.5, 1.5, dirt, dirt], [0.25, 0.0, 1.0, dirt]]
    values = [[1.0, 0.5, -0.25, 2.0], [0.25, -1.0, dirt, dirt], [0.75, 0.5, 1.25, dirt]]
    mask = torch.arange(4) < torch.tensor([[4], [2], [3]])
    return torch.tensor(rewards), torch.tensor(values), mask, 0.5, torch.tensor([3.0, 2.0, 0.0])


DELTAS = Task(
    _deltas(),
    (_deltas_case(9.0), _deltas_case(math.nan)),
    "After the end comes 0, and after a cut the bootstrap.",
    {
        "bootstrap makes no difference: every row is taken as ended.": _deltas(
            _at_end(lambda v, g, b: torch.zeros_like(v))
        ),
        "Only a row that fills its columns is bootstrapped: the place is after the last real "
        "token, not after the last column.": _deltas(_in_the_last_column),
        "A short row sees a value on padding: what follows it is its bootstrap.": _deltas(
            _on_the_padding
        ),
        "The bootstrap is not discounted: it is one step ahead like any other value, so it costs "
        "a gamma.": _deltas(_at_end(lambda v, g, b: b.expand_as(v))),
        "The last token is followed by its own value: take the bootstrap there.": _deltas(
            _at_end(lambda v, g, b: g * v)
        ),
        "Every token gets the bootstrap: only the last real one looks behind the end.": _deltas(
            lambda v, is_last, g, b: (g * b)[:, None].expand_as(v)
        ),
        "gamma is missing within the row: every value that is one step ahead is "
        "discounted.": _deltas(inside=False),
        "Zero times NaN is NaN: clear the padding with torch.where.": _deltas(padding="times"),
    },
)

# ---- Targets and whitening: two results, and an order ----


def _targets(
    target: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda a, w, v: a + v,
    over: str = "tokens",
    centre: bool = True,
    spread: Callable[[Tensor], Tensor] = lambda x: (x.var() + 1e-8).sqrt(),
    padding: tuple[str, str] = ("where", "where"),  # of the advantages and the returns
) -> Callable:
    """An answer whose returns are target(advantages, whitened, values), whitened over tokens,
    columns or rows."""

    def answer(advantages: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        def measured(f: Callable[[Tensor], Tensor]) -> Tensor:
            if over == "rows":
                return torch.stack([f(x[m]) for x, m in zip(advantages, mask)])[:, None]
            return f(advantages if over == "columns" else advantages[mask])

        mean = measured(torch.mean) if centre else 0.0
        whitened = (advantages - mean) / measured(spread)
        returns = target(advantages, whitened, values)
        return clear(whitened, mask, padding[0]), clear(returns, mask, padding[1])

    return answer


def _targets_case(dirt: float) -> tuple:
    return (
        torch.tensor([[0.5, -1.0, 2.0, 1.0], [-0.5, 3.0, 0.0, 0.0]]),
        torch.tensor([[1.0, 0.5, -0.25, 2.0], [0.25, -1.0, dirt, dirt]]),
        torch.arange(4) < torch.tensor([[4], [2]]),
    )


TARGETS = Task(
    _targets(),
    (_targets_case(9.0), _targets_case(math.nan)),
    "Targets as they are, and advantages on one scale.",
    {
        "The returns are made of whitened advantages: take the returns first, then "
        "whiten.": _targets(lambda a, w, v: w + v),
        "Returns without the value are advantages: add V.": _targets(lambda a, w, v: a),
        "The sign is turned: the value was too low by A, so add it.": _targets(
            lambda a, w, v: v - a
        ),
        "The advantages are not whitened: mean 0 and standard deviation 1.": _targets(
            centre=False, spread=lambda x: torch.ones(())
        ),
        "The zeros on padding took part in the mean and the spread: whiten over real "
        "tokens.": _targets(over="columns"),
        "Each row was whitened by itself: a good row and a bad one then look alike. Whiten over "
        "all tokens.": _targets(over="rows"),
        "You divided by the spread and left the mean: subtract it.": _targets(centre=False),
        "You divided by the variance: take its root.": _targets(spread=torch.var),
        "Padding is no longer 0 after whitening, since the mean was taken off there too: clear "
        "it.": _targets(padding=("none", "where")),
        "Zero times NaN is NaN: clear the padding with torch.where.": _targets(
            padding=("times", "times")
        ),
    },
)
