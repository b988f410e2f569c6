"""Episodes of several turns, proven: nothing of a chosen token depends on what another wrote; the
faults that other libraries had are seen; the gradient in a world small enough to enumerate."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import Tensor

from rlhf_nb import ppo
from rlhf_nb.estimators import ESTIMATORS, loss_weights
from rlhf_nb.forward import Forwarded
from rlhf_nb.masks import whiten
from rlhf_nb.ppo import estimate_advantages, final_scores, ppo_loss
from rlhf_nb.rollout import Rollout
from rlhf_nb.turns import (
    check_paid_on,
    keep_chosen,
    paid_turns,
    pick_chosen,
    put_back,
    put_fields_back,
    reached_stops,
    tokens_per_target,
)
from rlhf_nb.update import Objective, engine_metrics, update_metrics

MEASURED = "logprobs ref_logprobs kl values engine_logprobs".split()
MADE = "rewards returns advantages valued scores raw_scores paid".split()
Plan = list[list[tuple[int, int]]]  # of each turn of each episode: tokens drawn, tokens observed


def side_by_side(rows: list, fill: Any = 0.0) -> Tensor:
    width = max(map(len, rows))
    made = torch.tensor([[*row] + [fill] * (width - len(row)) for row in rows])
    return made.double() if made.is_floating_point() else made


def record(plan: Plan, seed: int = 0, wide: bool = True) -> Rollout:
    "Random numbers. Not `wide`: of tokens that the policy drew alone, the others were never there."
    g = torch.Generator().manual_seed(seed)
    rows = [[(k, own) for k, n in enumerate(e) for own in [1] * n[0] + [0] * n[1]] for e in plan]
    keep = [[i for i, (_, own) in enumerate(row) if own or wide] for row in rows]
    numbers = lambda: torch.randn(len(rows), max(map(len, rows)), generator=g).tolist()
    pick = lambda x, fill=0.0: side_by_side([[r[i] for i in at] for r, at in zip(x, keep)], fill)
    paid = [row[: len(turns)] for row, turns in zip(numbers(), plan)]
    some = lambda *shape: torch.rand(*shape, generator=g) > 0.5
    return Rollout(
        prompt_ids=torch.zeros(len(plan), 1, dtype=torch.long),
        prompt_mask=torch.ones(len(plan), 1, dtype=torch.bool),
        response_ids=pick([[k for k, _ in row] for row in rows], 0),
        mask=pick([[True] * len(row) for row in rows], False),
        stopped=some(len(plan)),
        turn_stopped=some(len(plan), max(map(len, plan))),
        turn_rewards=side_by_side(paid),
        turn=pick([[k for k, _ in row] for row in rows], 0).short(),
        chosen=pick([[bool(own) for _, own in row] for row in rows], False) if wide else None,
        stop_reason=["terminated", "max_turns"] * (len(plan) // 2),
        columns={"info/won": [float(i) for i in range(len(plan))]},
        **{name: pick(numbers()) for name in MEASURED},
    )


def spoiled(r: Rollout, junk: float | None) -> Rollout:
    "With junk wherever the policy drew nothing."
    if junk is None or r.chosen is None:
        return r
    other, changed = ~r.chosen, {}
    for name in (*MEASURED, *MADE, "turn", "response_ids"):
        x = getattr(r, name)
        if x is not None and x.dim() == 2:
            wrong = junk if x.is_floating_point() else True if x.dtype == torch.bool else 9999
            changed[name] = x.masked_fill(other, wrong)
    return r.with_(**changed)


class Numbers(NamedTuple):
    "All that an update makes of a record, at chosen tokens."

    made: dict[str, Tensor]
    loss: Tensor
    gradients: list[Tensor]
    metrics: dict[str, float]


def numbers_of(r: Rollout, cfg: Objective, how: str, last: bool, junk: float | None) -> Numbers:
    "Scores, advantages, loss and metrics, in the order of the trainer."
    own, drawn, rows = r.policy_mask, keep_chosen(spoiled(r, junk)), torch.arange(len(r))
    critic = ESTIMATORS[cfg.advantage_estimator].critic
    raw = paid_turns(drawn)
    final = final_scores(raw.nan_to_num(0.0), reached_stops(drawn), cfg, None, None, drawn.mask)
    made = dict(raw_scores=raw.nan_to_num(0.0), scores=final, paid=~raw.isnan())
    r = spoiled(put_fields_back(r.with_(values=r.values if critic else None), **made), junk)
    ends = torch.linspace(-1, 1, len(r)).double().masked_fill(r.ended, 0.0) if last else None
    given = dict(num_generations=2, last_value=ends if critic else None)
    r = spoiled(estimate_advantages(r, cfg, **given), junk)
    moved = r.logprobs * 0.9 - 0.05, r.logprobs.cos(), None if r.values is None else r.values + 0.1
    leaves = [None if x is None else x.detach().requires_grad_() for x in moved]
    weights = loss_weights(own, rows, how, 7)
    per_value = tokens_per_target(r, rows, lambda x: x)
    loss, sums = ppo_loss(Forwarded(*leaves), r, cfg, weights=weights, value_weight=per_value)
    loss.backward()
    grads = [x.grad for x in leaves if x is not None and x.grad is not None]
    assert not any(g.masked_fill(own, 0.0).any() for g in grads), "learned where nothing was drawn"
    metrics = update_metrics(r, cfg, {k: float(x) for k, x in sums.items()}, [1.0])
    metrics |= engine_metrics(r, cfg)
    kept = {name: getattr(r, name) for name in MADE if getattr(r, name) is not None}
    kept = {name: pick_chosen(x, own) for name, x in kept.items()}
    return Numbers(kept, loss.detach(), [pick_chosen(g, own) for g in grads], dict(metrics))


@st.composite
def objectives(draw) -> Objective:
    name, kl_in = draw(st.sampled_from([*ESTIMATORS])), draw(st.sampled_from(["reward", "loss"]))
    kind, one = ESTIMATORS[name], lambda *x: draw(st.sampled_from(x))
    lambdas = dict(lam_value=one(None, 1.0), whiten_rewards=one(False, True)) if kind.critic else {}
    turns = dict(gamma_turn=one(1.0, 0.8)) if kind.critic else {}
    return Objective(
        advantage_estimator=name,
        kl_in=kl_in,
        kl_estimator=one("k3", "k2", "abs"),
        kl_coef=one(0.05, 1.0),
        gamma=1.0 if kind.by_turn else one(1.0, 0.9),
        lam_length_alpha=one(None, 0.3) if kind.critic and not kind.by_turn else None,
        importance_level=one("token", "sequence") if kind.group else "token",
        cliprange=one(0.2, 0.01),
        cliprange_high=one(None, 0.3),
        dual_clip=one(None, 1.5),
        entropy_coef=one(0.0, 0.1),
        importance_sampling_correction=one(True, False),
        importance_sampling_cap=one(2.0, None),
        importance_sampling_mode=one(
            "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
        ),
        missing_eos_penalty=one(None, 0.7),
        **lambdas | turns,
    )


a_turn = st.tuples(st.integers(1, 3), st.integers(0, 3))
an_episode = st.lists(a_turn, min_size=1, max_size=4)
plans = st.integers(1, 2).flatmap(lambda n: st.lists(an_episode, min_size=2 * n, max_size=2 * n))
aggregations = st.sampled_from(["token_mean", "sequence_mean", "constant"])
seeds, often = st.integers(0, 2**31 - 1), settings(max_examples=150, deadline=None)


# catches: each read of `mask` where `chosen` is meant: in scores, KL, rewards, GAE, discounts,
# whitening, targets, losses, clips, aggregations, importance weights, metrics
@often
@given(plans, seeds, objectives(), aggregations, st.booleans())
def test_without_its_observations_a_record_gives_the_same(plan, seed, cfg, how, last):
    whole, alone = (numbers_of(record(plan, seed, x), cfg, how, last, None) for x in (True, False))
    close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12, equal_nan=True)
    for part in whole.made | alone.made:
        close(whole.made[part], alone.made[part], msg=part)
    close(whole.loss, alone.loss)
    close(whole.gradients, alone.gradients)
    for name in whole.metrics | alone.metrics:
        close(whole.metrics[name], alone.metrics[name], msg=name)


# catches: a mask by which numbers are multiplied, since 0 x nan is nan, and each of those above
@often
@given(plans, seeds, objectives(), aggregations, st.sampled_from([math.nan, math.inf, -1e9]))
def test_junk_where_nothing_was_drawn_changes_no_bit(plan, seed, cfg, how, junk):
    clean, dirty = (numbers_of(record(plan, seed), cfg, how, True, x) for x in (None, junk))
    same = partial(torch.testing.assert_close, atol=0, rtol=0, equal_nan=True)
    same(clean.made, dirty.made)
    same((clean.loss, clean.gradients), (dirty.loss, dirty.gradients))
    same(clean.metrics, dirty.metrics)


# ---- What went wrong elsewhere: the right program, and a wrong one planted beside it ----


def of(chosen: list[int], **fields: Any) -> Rollout:
    "One episode, of which numbers are given; turns begin where the policy draws again."
    own = torch.tensor([chosen]).bool()
    begins = [i == 0 or (c and not chosen[i - 1]) for i, c in enumerate(chosen)]
    turn = torch.tensor([begins]).cumsum(1) - 1
    r = record([[(len(chosen), 0)]]).with_(chosen=own, turn=turn.short(), stop_reason=["max_turns"])
    zero = torch.zeros(1, len(chosen), dtype=torch.float64)
    shaped = {k: torch.tensor([x]) if isinstance(x, list) else x for k, x in fields.items()}
    return r.with_(**dict.fromkeys(["kl", "values", "scores"], zero) | shaped)


def returns_of(r: Rollout, last: Tensor | None = None, **how: Any) -> list[float]:
    "Targets of the value model."
    cfg = Objective(**dict(kl_coef=0.0) | how)
    return estimate_advantages(r, cfg, last_value=last).returns[0].tolist()


def advantages_of(r: Rollout, **how: Any) -> list[float]:
    "Not whitened."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "whiten", lambda x, mask, **_: x * mask)
        return estimate_advantages(r, Objective(**dict(kl_coef=0.0) | how)).advantages[0].tolist()


def all_read(r: Rollout) -> Rollout:
    "A program that does not know who wrote a token."
    return r.with_(chosen=None)


ROLL = of([1, 1, 0], scores=[0.0, 1.0, 0.0], values=[0.0, 0.0, 100.0])
MILES = of([1, 0, 0, 1], kl=[1.0] * 4)
UNCHARGED = MILES.with_(kl=MILES.kl * MILES.chosen)
CHARGED = dict(kl_coef=1.0, gamma=0.9, lam=1.0)
VERL = of([1, 1, 0, 0, 1, 1], scores=[0.0] * 5 + [1.0])
SHORT = of([1] * 4, scores=[0.0] * 3 + [1.0])
ZEROS = of([1, 0, 1, 0, 1], turn_rewards=[0.0, 0.0, 1.0])
ONES = of([1, 0, 1, 0], values=[1.0] * 4)
SKYRL = of([1, 1, 0, 1], scores=[0.0, 0.0, 0.0, 1.0])


def carried_over(r: Rollout) -> list[float]:
    "A recursion that goes over what was not drawn, with the reward on the observation at the end."
    advantage, out = 0.0, []
    for own, reward in reversed([*zip(r.chosen[0].tolist(), [0.0] * 6), (False, 1.0)]):
        advantage = reward + 0.95 * advantage if own else advantage
        out += [advantage] * own
    return out[::-1]


def refused(scores: Tensor, chosen: Tensor) -> bool:
    with pytest.raises(ValueError, match="token 1 of episode 0, which the environment wrote"):
        check_paid_on(scores, chosen, "f")
    return True


def gradient_of(r: Rollout, own: Tensor) -> float:
    "Of the loss at logits in front of tokens that were not drawn, the largest."
    logits = torch.zeros(2, 6, 5).requires_grad_()
    logprobs = logits.log_softmax(-1)[..., 1]
    read = r.with_(chosen=own, logprobs=logprobs.detach().double(), engine_logprobs=None)
    ppo_loss(Forwarded(logprobs, None, None), read, Objective())[0].backward()
    return float(logits.grad[~r.chosen].abs().max())


PARTS = [record([[(2, 1), (1, 3)], [(3, 2)]], 1), record([[(1, 2)], [(2, 2), (2, 1)]], 2)]
PARTS = [r.with_(scores=r.values.sin()) for r in PARTS]
LEARNED = record([[(2, 2), (1, 1)]] * 2).with_(advantages=torch.ones(2, 6))


def after_the_end(finished: Callable) -> list[float]:
    "The target of the last state by stop reason; V is 1 everywhere, and `context` was cut off."
    made = []
    for why in ("terminated", "truncated", "max_turns", "context"):
        r = ONES.with_(stop_reason=[why], stopped=torch.tensor([why != "context"]))
        after = torch.ones(1, dtype=torch.float64).masked_fill(finished(r), 0.0)
        made.append(returns_of(r, after)[2])
    return made


def turns_seen(r: Rollout) -> int:
    return int((~paid_turns(keep_chosen(r)).isnan()).sum())


def by_rank(work: Callable) -> list[float]:
    both = [x[r.chosen] for x, r in zip(on_ranks(work, *PARTS), PARTS)]
    return [torch.cat(both).mean().item(), torch.cat(both).std().item()]


def whitened(r: Rollout, reduce: Callable) -> Tensor:
    return estimate_advantages(r, Objective(), reduce=reduce).advantages


def whitened_with_observations(r: Rollout, reduce: Callable) -> Tensor:
    return whiten(estimate_advantages(all_read(r), Objective()).advantages, r.mask, reduce=reduce)


FAULTS: dict[str, tuple[Callable, list, Callable, list | None]] = {
    "GAE takes the value of a masked token": (
        lambda: advantages_of(ROLL),
        [0.95, 1.0, 0.0],
        lambda: (torch.tensor(advantages_of(all_read(ROLL))) * ROLL.chosen[0]).tolist(),
        [5.7, 6.0, 0.0],
    ),
    "observations discount": (
        lambda: returns_of(MILES, **CHARGED)[:1],
        [-1.9],
        lambda: returns_of(all_read(UNCHARGED), **CHARGED)[:1],
        [-1.729],
    ),
    "KL of observations charged": (
        lambda: returns_of(MILES, **CHARGED)[:1],
        [-1.9],
        lambda: returns_of(all_read(MILES), **CHARGED)[:1],
        [-3.439],
    ),
    "a reward on an observation is lost": (
        lambda: pick_chosen(torch.tensor([advantages_of(VERL)]), VERL.chosen)[0].tolist(),
        advantages_of(SHORT),
        lambda: carried_over(VERL),
        [0.0] * 4,
    ),
    "a score of a token that was not drawn": (
        lambda: [refused(torch.tensor([[math.nan, 1.0]]), torch.tensor([[True, False]]))],
        [True],
        lambda: [
            bool(pick_chosen(torch.tensor([[0.0, 1.0]]), torch.tensor([[True, False]])).any())
        ],
        [False],
    ),
    "observations are learned": (
        lambda: [gradient_of(LEARNED, LEARNED.chosen)],
        [0.0],
        lambda: [gradient_of(LEARNED, LEARNED.mask)],
        None,
    ),
    "the stop token taken for the end, and truncated for finished": (
        lambda: after_the_end(lambda r: r.ended),
        [0.0, 1.0, 1.0, 1.0],
        lambda: after_the_end(lambda r: r.stopped),
        [0.0, 0.0, 0.0, 1.0],
    ),
    "a turn that pays 0 is no turn": (
        lambda: [turns_seen(ZEROS), int(ZEROS.turn_counts)],
        [3, 3],
        lambda: [int((paid_turns(keep_chosen(ZEROS)).nan_to_num(0) != 0).sum()), 1],
        [1, 1],
    ),
    "advantages of turns at the last turn's places": (
        lambda: advantages_of(SKYRL, advantage_estimator="gae_turns", lam_turn=1.0),
        [1.0, 1.0, 0.0, 1.0],
        lambda: (torch.tensor(advantages_of(SKYRL, lam=1.0)) * (SKYRL.turn[0] == 1)).tolist(),
        [0.0, 0.0, 0.0, 1.0],
    ),
    "whitening over observations": (
        lambda: by_rank(whitened),
        [0.0, 1.0],
        lambda: by_rank(whitened_with_observations),
        None,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_went_wrong_elsewhere(fault):
    right, figures, wrong, published = FAULTS[fault]
    assert right() == pytest.approx(figures, abs=1e-6), fault
    assert wrong() != pytest.approx(figures, abs=1e-3), "the planted fault was not seen"
    assert published is None or wrong() == pytest.approx(published, abs=1e-6)


# catches: targets of an earlier estimator, which are left where another one has its own
def test_another_estimator_has_its_own_targets():
    r = of([1, 1, 0, 1, 1], scores=[0, 0, 0, 0, 1.0])
    by_turn = estimate_advantages(r, Objective(advantage_estimator="gae_turns"))
    assert by_turn.valued.sum() == 2 and estimate_advantages(by_turn, Objective()).valued is None


# ---- Two turns of at most two tokens, 0 and 1, of which 1 ends a turn: seven episodes ----

TURNS, OBSERVED = ([1], [0, 0], [0, 1]), {(1,): [0, 1], (0, 0): [1]}  # after 0 1 the world ends
EPISODES = [(a, b) for a in TURNS[:2] for b in TURNS] + [(TURNS[2],)]
COST = 0.3  # of a nat


class World(NamedTuple):
    r: Rollout
    chance: Tensor  # [B] of each episode
    logprobs: Tensor  # [B, T] with the gradient
    exact: Tensor  # the policy gradient
    weights: Tensor  # of the policy: two logits for each state


def world(exact_values: bool) -> World:
    g = torch.Generator().manual_seed(3)
    states: dict[tuple, int] = defaultdict(lambda: len(states))
    rows = []
    for episode in EPISODES:
        ids, own, turn = list[int](), list[bool](), list[int]()
        for k, drawn in enumerate(episode):
            seen = OBSERVED.get(tuple(drawn), []) if k == 0 else [0]
            ids += drawn + seen
            own += [True] * len(drawn) + [False] * len(seen)
            turn += [k] * (len(drawn) + len(seen))
        rows.append((ids, own, turn, [states[tuple(ids[:t])] for t in range(len(ids))]))
    ids, own, turn, at = (side_by_side([*x], 0).long() for x in zip(*rows))
    own, mask = own.bool(), side_by_side([[True] * len(row[0]) for row in rows], False)
    weights = torch.randn(len(states), 2, generator=g, dtype=torch.float64).requires_grad_()
    logprobs = weights.log_softmax(-1)[at, ids]
    of_policy = logprobs * own
    paid = torch.randn(len(rows), 2, generator=g, dtype=torch.float64)
    paid[:6, 0] = paid[[0, 0, 0, 3, 3, 3], 0]  # a turn is paid before the next is known
    paid[6, 1] = 0.0
    kl = of_policy - math.log(0.5) * own
    chance = of_policy.sum(1).exp()
    value = (chance * (paid.sum(1) - COST * kl.sum(1))).sum()
    (exact,) = torch.autograd.grad(value, weights, retain_graph=True)
    other = ["terminated"] * len(rows)
    wide = dict(values=torch.zeros(ids.shape).double(), stop_reason=other, chosen=own)
    r = record([[(1, 0)]] * 2).with_(
        prompt_ids=ids[:, :1],
        prompt_mask=own[:, :1],
        response_ids=ids,
        mask=mask,
        turn=turn.short(),
        turn_rewards=paid,
        logprobs=logprobs.detach(),
        kl=kl.detach(),
        ref_logprobs=None,
        engine_logprobs=None,
        columns={},
        **wide,
    )
    r = r.with_(scores=put_back(paid_turns(keep_chosen(r)).nan_to_num(0), own))
    to_go = (r.scores - COST * r.kl).flip(1).cumsum(1).flip(1)
    sums, chances = torch.zeros(2, len(states), dtype=torch.float64)
    for i, t in own.nonzero().tolist():
        sums[at[i, t]] += chance[i].detach() * to_go[i, t]
        chances[at[i, t]] += chance[i].detach()
    junk = lambda: torch.randn(ids.shape, generator=g, dtype=torch.float64)
    exact_of = sums / chances.clamp(min=1e-12)
    values = (exact_of if exact_values else torch.randn(len(states), generator=g).double())[at]
    spoil = lambda x: torch.where(own, x, 5 * junk())
    r = r.with_(values=spoil(values), kl=spoil(r.kl))
    return World(r, chance.detach(), logprobs, exact, weights)


def right(r: Rollout, cfg: Objective) -> Rollout:
    return estimate_advantages(r, cfg)


def learned(r: Rollout, cfg: Objective) -> Rollout:
    return right(all_read(r.with_(kl=r.kl * r.chosen)), cfg)


def apart(r: Rollout, cfg: Objective) -> Rollout:
    "Each turn as an episode of its own."
    parts = [r.chosen & (r.turn == k) for k in (0, 1)]
    return r.with_(advantages=sum(right(r.with_(chosen=x), cfg).advantages for x in parts))


def last_turn(r: Rollout, cfg: Objective) -> Rollout:
    return r.with_(advantages=right(r, cfg).advantages * (r.turn == r.turn_counts[:, None] - 1))


def unfinished(r: Rollout, cfg: Objective) -> Rollout:
    ends = r.mask.sum(1, keepdim=True) - 1
    return estimate_advantages(r, cfg, last_value=r.values.gather(1, ends)[:, 0])


# The fault; whether it is seen at lambda 1, and at 0.95 with the exact V. At lambda and gamma 1, GAE
# through observations telescopes: whatever their values are, they cancel.
SEEN: dict[str, tuple[Callable, bool, bool]] = {
    "none": (right, False, False),
    "GAE through observations": (
        lambda r, cfg: r.with_(advantages=learned(r, cfg).advantages),
        False,
        True,
    ),
    "KL of observations charged": (
        lambda r, cfg: r.with_(advantages=right(all_read(r), cfg).advantages),
        True,
        True,
    ),
    "observations learned": (learned, True, True),
    "rewards one token late": (
        lambda r, cfg: right(r.with_(scores=r.scores.roll(1, 1)), cfg),
        True,
        True,
    ),
    "mask shifted by one": (
        lambda r, cfg: right(r.with_(chosen=r.chosen.roll(1, 1) & r.mask), cfg),
        True,
        True,
    ),
    "each turn an episode": (apart, True, True),
    "the last turn alone": (last_turn, True, True),
    "finished, taken for truncated": (unfinished, True, True),
}


def gradient_gap(program: Callable, lam: float, **how: Any) -> float:
    "How far an update's gradient is from the exact one."
    made = world(exact_values=lam < 1)
    cfg = Objective(kl_coef=COST, lam=lam, lam_turn=lam, vf_coef=0.0, **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "whiten", lambda x, mask, **_: x * mask)
        r = program(made.r, cfg)
    now = Forwarded(made.logprobs, None, None)
    loss, _ = ppo_loss(now, r, cfg, weights=made.chance[:, None])
    (found,) = torch.autograd.grad(-loss, made.weights)
    return float((found - made.exact).abs().max())


# catches: each fault of the list, where it says; discounts, bootstraps and credit of turns
@pytest.mark.parametrize("lam", [1.0, 0.95])
@pytest.mark.parametrize("fault", SEEN)
def test_the_gradient_of_a_world_that_is_enumerated(fault, lam):
    program, *seen = SEEN[fault]
    gap = gradient_gap(program, lam)
    assert gap > 1e-3 if seen[lam < 1] else gap < 1e-6, gap
    if program is right:
        assert gradient_gap(right, lam, advantage_estimator="gae_turns") < 1e-6
        assert abs(world(True).chance.sum() - 1) < 1e-12
