"The PPO losses against formulas written out again in numpy, and against hostile numbers."

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks

from rlhf_nb.losses import (
    explained_variance,
    policy_diagnostics,
    policy_loss,
    value_diagnostics,
    value_loss,
)

B, T = 3, 5


def random_batch(seed, dtype=torch.float64, batch=B, width=T):
    "Log-probs, old ones, advantages, a right-padded mask; some ratios are outside the clip range."
    g = torch.Generator().manual_seed(seed)
    logprobs, old = -torch.rand(2, batch, width, generator=g, dtype=dtype) * 2
    advantages = torch.randn(batch, width, generator=g, dtype=dtype)
    mask = torch.arange(width) < torch.randint(0, width + 1, (batch, 1), generator=g)
    return logprobs, old, advantages, mask


def numpy_policy_loss(logprobs, old, advantages, mask, low, high, dual):
    total = 0.0
    for lp, o, a, m in zip(*(x.numpy().ravel() for x in (logprobs, old, advantages, mask))):
        if not m:
            continue
        r = np.exp(lp - o)
        loss = max(-a * r, -a * min(max(r, 1 - low), 1 + high))
        total += min(loss, -dual * a) if dual is not None and a < 0 else loss
    return total


def numpy_value_loss(values, old, returns, mask, c):
    total = 0.0
    for v, o, r, m in zip(*(x.numpy().ravel() for x in (values, old, returns, mask))):
        if m:
            total += 0.5 * max((v - r) ** 2, (min(max(v, o - c), o + c) - r) ** 2)
    return total


# catches: minimum for maximum, a turned sign, cliprange_high read as 1 - or ignored, dual clip on
# good tokens, padding counted; the tie at ratio 1 or at a bound that gives half a gradient; a slope
# on the wrong side of the edge
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0, 0.9),
    st.one_of(st.none(), st.floats(0, 2)),
    st.one_of(st.none(), st.floats(1.1, 4)),
    st.integers(1, T),
    st.booleans(),
)
def test_policy_loss_and_its_gradient_are_the_formula(seed, low, high, dual, width, at_one):
    logprobs, old, advantages, mask = random_batch(seed, width=width)
    old = logprobs.clone() if at_one else old
    batch = logprobs, old, advantages, mask
    above = low if high is None else high
    wanted = numpy_policy_loss(*batch, low, above, dual)
    logprobs.requires_grad_()
    got = policy_loss(*batch, cliprange=low, cliprange_high=high, dual_clip=dual)
    assert got.item() == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    got.backward()
    r, a = (logprobs.detach() - old).exp().numpy(), advantages.numpy()
    gone = ((a > 0) & (r > 1 + above)) | ((a < 0) & (r < 1 - low))
    gone |= (a < 0) & (r > (np.inf if dual is None else dual))
    np.testing.assert_allclose(
        logprobs.grad.numpy(), np.where(mask.numpy() & ~gone, -a * r, 0), rtol=1e-9, atol=1e-12
    )


# catches: clipping round the return or round zero instead of round the old value; a missing half
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 2) | st.just(np.inf), st.integers(1, T))
def test_value_loss_is_the_formula(seed, c, width):
    batch = random_batch(seed, width=width)
    assert value_loss(*batch, cliprange_value=c).item() == pytest.approx(
        numpy_value_loss(*batch, c), rel=1e-9, abs=1e-9
    )


# catches: a ratio detached, a clamp that passes gradient, autograd through old log-probs
@pytest.mark.parametrize("options", [{}, {"cliprange_high": 0.4}, {"dual_clip": 1.5}])
def test_gradients(options):
    logprobs, old, advantages, mask = random_batch(5)
    logprobs.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, old, advantages, mask, **options), logprobs
    )
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, advantages, mask), logprobs)


# catches: loss * mask (0 * inf and 0 * nan), in value, gradient and diagnostics
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_padding_may_hold_anything(poison):
    clean = random_batch(11, torch.float32)
    mask = clean[3]
    assert 0 < mask.sum() < mask.numel()
    dirty = [x.masked_fill(~mask, poison) for x in clean[:3]]
    for loss in (policy_loss, value_loss):
        a, b = clean[0].clone().requires_grad_(), dirty[0].clone().requires_grad_()
        wanted, got = loss(a, *clean[1:]), loss(b, *dirty[1:], mask)
        wanted.backward(), got.backward()
        assert torch.equal(wanted, got) and torch.equal(a.grad, b.grad)
        assert (b.grad[~mask] == 0).all()
    for diagnostics in (policy_diagnostics, value_diagnostics):
        assert diagnostics(*clean) == diagnostics(*dirty, mask)
    assert explained_variance(clean[0], clean[2], mask) == explained_variance(
        dirty[0], dirty[2], mask
    )


# catches: a mean hidden in any of them; a statistic per row
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(6)), st.integers(1, 5))
def test_sums_survive_cutting_reordering_and_padding(seed, order, cut):
    batch = random_batch(seed, batch=6)
    shuffled = [x[list(order)] for x in batch]
    wider = [torch.nn.functional.pad(x, (0, 4)) for x in shuffled]
    parts = [[x[:cut] for x in wider], [x[cut:] for x in wider]]
    for f in (policy_loss, value_loss):
        assert sum(f(*part) for part in parts).item() == pytest.approx(
            f(*batch).item(), rel=1e-9, abs=1e-12
        )
    for f in (policy_diagnostics, value_diagnostics):
        whole, pieces = f(*batch), [f(*part) for part in parts]
        assert {k: sum(p[k] for p in pieces).item() for k in whole} == pytest.approx(
            {k: v.item() for k, v in whole.items()}, rel=1e-6, abs=1e-9
        )


# catches: another default, a high side that does not reach the diagnostics
def test_the_high_side_reaches_the_diagnostics():
    one = torch.ones(1, 1)
    args = (1.25 * one).log(), 0 * one, one, one.bool()
    assert policy_diagnostics(*args)["clipfrac"] == 1
    assert policy_diagnostics(*args, cliprange_high=0.3)["clipfrac"] == 0


def test_diagnostics_keep_no_graph():
    logprobs, old, advantages, mask = random_batch(0)
    logprobs.requires_grad_()
    assert not any(
        x.requires_grad for x in policy_diagnostics(logprobs, old, advantages, mask).values()
    )


# catches: exp overflow to inf, then inf - inf or 0 * inf; a log-prob of -1e4 among ordinary ones that
# takes its neighbours' gradients with it
@pytest.mark.parametrize("now, then", [(1, 0), (-1, 0), (0, 1), (0, -1), (-1, -1)])
@pytest.mark.parametrize("size", [90.0, 1e4, 1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_log_ratio_beyond_all_numbers(now, then, size, advantage):
    logprobs = torch.tensor([[now * size, 0.1]], requires_grad=True)
    args = logprobs, torch.tensor([[then * size, 0.0]]), torch.tensor([[advantage, 1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    for options in ({}, {"dual_clip": 3.0}):
        loss = policy_loss(*args, mask, **options)
        (grad,) = torch.autograd.grad(loss, logprobs)
        assert loss.isfinite() and grad.isfinite().all()
        assert grad[0, 1].item() == pytest.approx(-math.exp(0.1))
    assert all(x.isfinite() for x in policy_diagnostics(*args, mask).values())


def test_nothing_real():
    logprobs = torch.randn(2, 3, requires_grad=True)
    args = (torch.randn(2, 3), torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    for f in (policy_loss, value_loss):
        loss = f(logprobs, *args)
        (grad,) = torch.autograd.grad(loss, logprobs)
        assert loss == 0 and (grad == 0).all()
    for n in (0, 1):  # one return does not vary
        assert explained_variance(logprobs, args[1], (torch.arange(6) < n).view(2, 3)) == 0


# catches: variance per row, a biased mix of the two variances, NaN where the returns are constant,
# ranks averaged instead of added
def test_explained_variance():
    values, _, returns, mask = random_batch(4, batch=6)
    v, r = values[mask].numpy(), returns[mask].numpy()
    of_rows = lambda rows, reduce=None: explained_variance(
        values[rows], returns[rows], mask[rows], reduce
    )
    found = [of_rows(slice(None)), *on_ranks(of_rows, slice(0, 2), slice(2, 6))]
    assert [x.item() for x in found] == pytest.approx([1 - np.var(r - v) / np.var(r)] * 3)
    assert explained_variance(values, torch.full_like(values, 0.3), mask) == 0


# catches: clipfrac of the value as "moved out of the range", whichever error was the larger;
# error_sq halved or clipped
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 0.9), st.one_of(st.none(), st.floats(0, 2))
)
def test_diagnostics_are_the_formulas(seed, c, low, high):
    a, b, x, mask = random_batch(seed)
    v, o, r, m = (y.numpy() for y in (a, b, x, mask))
    got = {k: y.item() for k, y in value_diagnostics(a, b, x, mask, c).items()}
    near = np.clip(v, o - c, o + c)
    assert got == pytest.approx(
        dict(
            clipfrac=(((near - r) ** 2 > (v - r) ** 2) & m).sum(),
            error_sq=((v - r)[m] ** 2).sum(),
            tokens=m.sum(),
        )
    )
    got = {k: y.item() for k, y in policy_diagnostics(a, b, x, mask, low, high).items()}
    ratio, top = np.exp(v - o), 1 + (low if high is None else high)
    gone = ((r > 0) & (ratio > top)) | ((r < 0) & (ratio < 1 - low))
    assert got == pytest.approx(
        dict(
            ratio=ratio[m].sum(),
            ratio_sq=(ratio[m] ** 2).sum(),
            clipfrac=(gone & m).sum(),
            approxkl=((v - o)[m] ** 2 / 2).sum(),
            tokens=m.sum(),
        ),
        rel=1e-5,
    )


# catches: a ratio rounded to bf16 (1.0 and 1.003 are one number there), a loss in bf16
def test_bf16_inputs_are_as_good_as_their_numbers():
    batch = [x.bfloat16() for x in random_batch(17, batch=40, width=30)[:3]] + [
        random_batch(17, batch=40, width=30)[3]
    ]
    exact = [x.double() for x in batch[:3]] + [batch[3]]
    for f in (policy_loss, value_loss):
        x = batch[0].clone().requires_grad_()
        got = f(x, *batch[1:])
        got.backward()
        assert got.dtype == torch.float32
        assert got.item() == pytest.approx(f(*exact).item(), rel=1e-4, abs=1e-3)
        assert x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all()
    for f in (policy_diagnostics, value_diagnostics):
        assert {k: v.item() for k, v in f(*batch).items()} == pytest.approx(
            {k: v.item() for k, v in f(*exact).items()}, rel=1e-4
        )
    assert explained_variance(batch[0], batch[2], batch[3]).item() == pytest.approx(
        explained_variance(exact[0], exact[2], exact[3]).item(), rel=1e-4
    )
