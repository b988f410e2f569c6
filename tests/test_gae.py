"GAE: the sum of discounted surprises again in numpy float64, row by row."

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rlhf_nb.gae import gae, lambda_of, returns_from, td_errors
from rlhf_nb.masks import whiten


def a_batch(seed, T=7, dtype=torch.float64, junk=True):
    "Rows of every length from none to T, with junk on padding."
    g = torch.Generator().manual_seed(seed)
    lengths = torch.cat(
        [torch.tensor([0, 1, T - 1, T]), torch.randint(0, T + 1, (4,), generator=g)]
    )
    mask = torch.arange(T) < lengths[:, None]
    rewards, values = (torch.randn(len(lengths), T, generator=g, dtype=dtype) for _ in range(2))
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e4], dtype=dtype)
    if junk:
        rewards, values = (
            torch.where(mask, x, odd[torch.randint(0, 4, x.shape, generator=g)])
            for x in (rewards, values)
        )
    return rewards, values, mask


def brute_force(rewards, values, mask, gamma, lam, bootstrap=None):
    "A[t] = sum over l >= t of (gamma lam)^(l - t) delta[l], each row cut to its own length first."
    advantages = np.zeros(mask.shape)
    for b, length in enumerate(mask.sum(1).tolist()):
        r, v = rewards[b, :length].double().numpy(), values[b, :length].double().numpy()
        after = np.append(v[1:], 0.0 if bootstrap is None else bootstrap[b].item())[:length]
        delta = r + gamma * after - v
        for t in range(length):
            advantages[b, t] = sum((gamma * lam) ** (l - t) * delta[l] for l in range(t, length))
    return advantages


unit = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))


# catches: lam or gamma forgotten, 0 ** 0 taken as 0, an edge of the row read one off, padding that
# leaks, bootstrap misplaced
@given(seed=st.integers(0, 10**6), gamma=unit, lam=unit, cut=st.booleans())
@settings(max_examples=30, deadline=None)
def test_equals_the_brute_force_sum(seed, gamma, lam, cut):
    rewards, values, mask = a_batch(seed)
    bootstrap = torch.linspace(-1, 1, len(mask), dtype=torch.float64) if cut else None
    got = gae(rewards, values, mask, gamma, lam, bootstrap)
    np.testing.assert_allclose(
        got.numpy(), brute_force(rewards, values, mask, gamma, lam, bootstrap), atol=1e-10
    )


# catches: the lambda of another row, of the batch's mean length or of the padded width; alpha taken
# for 1 / alpha; a lambda below 0 for a short response
def test_each_response_has_the_lambda_of_its_length():
    rewards, values, mask = a_batch(3, T=40)
    lengths, alpha = mask.sum(1), 0.3
    lams = [max(0.0, 1 - 1 / (alpha * n)) if n else 0.0 for n in lengths.tolist()]
    assert_close(lambda_of(mask, alpha), torch.tensor(lams).double(), atol=1e-6, rtol=0)
    assert min(lams) == 0 < 0.9 < max(lams)
    want = np.concatenate(
        [
            brute_force(*(x[[i]] for x in (rewards, values, mask)), 0.9, lam)
            for i, lam in enumerate(lams)
        ]
    )
    got = gae(rewards, values, mask, 0.9, lambda_of(mask, alpha))
    np.testing.assert_allclose(got.numpy(), want, atol=1e-10)
    of_width = gae(rewards, values, mask, 0.9, lambda_of(torch.ones_like(mask), alpha))
    assert np.abs(of_width.numpy() - want).max() > 0.1  # a wrong program
    assert gae(ones, ones, ones.bool(), lam=torch.ones(2).double()).dtype == torch.float32


# catches: a change to the numbers of the page
def test_by_hand():
    rewards, values = torch.tensor([[0.0, 0.0, -0.25, 1.0]]), torch.tensor([[0.5, 0.75, 0.25, 0.5]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert td_errors(rewards, values, mask).tolist() == [[0.25, -0.5, 0.0, 0.5]]
    assert gae(rewards, values, mask, lam=0.5).tolist() == [[0.0625, -0.375, 0.25, 0.5]]
    assert td_errors(rewards, values, mask, gamma=0.5).tolist() == [[-0.125, -0.625, -0.25, 0.5]]
    assert gae(rewards[:, 3:], values[:, 3:], mask[:, 3:]).tolist() == [[0.5]]


# catches: NaN from a batch or a row without tokens, from one real token, and from decay underflow
# in a long row
def test_hostile_numbers():
    nans, none = torch.full((2, 3), math.nan), torch.zeros(2, 3, dtype=torch.bool)
    assert (gae(nans, nans, none, bootstrap=torch.full((2,), math.nan)) == 0).all()
    one = none.clone()
    one[1, 0] = True
    rewards, values = nans.clone(), nans.clone()
    rewards[1, 0], values[1, 0] = -1e4, 1e4
    advantages = gae(rewards, values, one)
    assert advantages.tolist() == [[0.0] * 3, [-2e4, 0.0, 0.0]]
    assert returns_from(advantages, values, one).tolist() == [[0.0] * 3, [-1e4, 0.0, 0.0]]
    assert whiten(advantages, one).isfinite().all()  # one token has no spread
    long = torch.ones(1, 2048)
    decayed = gae(long, 0 * long, long.bool(), 0.5, 0.5)
    assert decayed[0, 0].item() == pytest.approx(4 / 3, abs=1e-6) and decayed.isfinite().all()
    bf16 = [x.bfloat16().requires_grad_() for x in (rewards, values)]
    gae(*bf16, one).square().sum().backward()
    assert all(x.grad.isfinite().all() for x in bf16)


# catches: targets of another recursion: G[t] = r[t] + gamma ((1 - lam) V[t+1] + lam G[t+1]), Sutton
# and Barto eq. 12.20
@given(seed=st.integers(0, 10**6), gamma=unit, lam=unit)
@settings(max_examples=30, deadline=None)
def test_returns_are_the_lambda_return(seed, gamma, lam):
    rewards, values, mask = a_batch(seed)
    got = returns_from(gae(rewards, values, mask, gamma, lam), values, mask)
    assert (got[~mask] == 0).all()
    for b, length in enumerate(mask.sum(1).tolist()):
        G, V = 0.0, 0.0
        for t in reversed(range(length)):
            G = rewards[b, t].item() + gamma * ((1 - lam) * V + lam * G)
            V = values[b, t].item()
            assert got[b, t].item() == pytest.approx(G, abs=1e-10)


# catches: an in-place step that breaks autograd, and 0 * inf in the backward pass
def test_gradients():
    rewards, values, mask = a_batch(9, T=4, junk=False)
    bootstrap = torch.linspace(-1, 1, len(mask), dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (rewards, values, bootstrap)]
    assert torch.autograd.gradcheck(lambda r, v, b: gae(r, v, mask, 0.9, 0.8, b), leaves)
    rewards, values, mask = a_batch(9, T=4)
    rewards.requires_grad_(), values.requires_grad_()
    advantages = gae(rewards, values, mask)
    (advantages.square().sum() + returns_from(advantages, values, mask).square().sum()).backward()
    for grad in (rewards.grad, values.grad):
        assert grad.isfinite().all() and (grad[~mask] == 0).all()


# catches: a recursion in bf16: 1 / 256 added 256 times to 1 would stay 1
def test_bf16_is_added_up_in_float32():
    T = 257
    rewards = torch.full((1, T), 1 / 256, dtype=torch.bfloat16)
    rewards[0, -1] = 1.0
    values, mask = torch.zeros(1, T, dtype=torch.bfloat16), torch.ones(1, T, dtype=torch.bool)
    advantages = gae(rewards, values, mask, lam=1.0)
    assert advantages.dtype == torch.float32
    assert advantages[0, 0].item() == pytest.approx(2.0, abs=1e-6)
    assert returns_from(gae(rewards, values, mask, lam=1.0), values, mask).dtype == torch.float32


# catches: ~mask on a 0/1 integer mask, which is -1 and -2
def test_masks_of_numbers_are_taken_as_masks():
    rewards, values, mask = a_batch(11)
    bootstrap = torch.ones(len(mask))
    assert torch.equal(
        gae(rewards, values, mask.long(), bootstrap=bootstrap),
        gae(rewards, values, mask, bootstrap=bootstrap),
    )
    assert torch.equal(gae(rewards, values, mask.float()), gae(rewards, values, mask))


ones = torch.ones(2, 3)
