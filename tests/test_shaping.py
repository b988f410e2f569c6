"""Shaping: formulas again in numpy, row by row."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch.testing import assert_close

from rlhf_nb.moments import RunningMoments, batch_moments, merge_moments
from rlhf_nb.packing import reached_stop
from rlhf_nb.shaping import clip_scores, penalize_missing_eos, replace_missing_eos, shape_rewards


def a_batch(seed, T=7, dtype=torch.float64):
    "Rows of every length from none to T, with junk on padding."
    g = torch.Generator().manual_seed(seed)
    lengths = torch.cat(
        [torch.tensor([0, 1, T - 1, T]), torch.randint(0, T + 1, (4,), generator=g)]
    )
    mask = torch.arange(T) < lengths[:, None]
    kl = torch.randn(len(lengths), T, generator=g, dtype=dtype)
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e4], dtype=dtype)[
        torch.randint(0, 4, kl.shape, generator=g)
    ]
    return torch.randn(len(lengths), generator=g, dtype=dtype), torch.where(mask, kl, junk), mask


def by_hand(scores, kl, mask, kl_coef):
    "One row at a time, with plain indices."
    rewards = np.zeros(mask.shape)
    for b, length in enumerate(mask.sum(1).tolist()):
        rewards[b, :length] = -kl_coef * kl[b, :length].numpy()
        if length:
            rewards[b, length - 1] += scores[b].item()
    return rewards


# catches: wrong sign, wrong slot, a score for an empty row, padding that leaks, -1 used as an index
@given(seed=st.integers(0, 10**6), kl_coef=st.floats(0, 2))
@settings(max_examples=30, deadline=None)
def test_rewards_equal_the_row_by_row_formula(seed, kl_coef):
    scores, kl, mask = a_batch(seed)
    rewards, non_score = shape_rewards(scores, kl, mask, kl_coef)
    np.testing.assert_allclose(rewards.numpy(), by_hand(scores, kl, mask, kl_coef), atol=1e-12)
    np.testing.assert_allclose(
        non_score.numpy(), by_hand(scores * 0, kl, mask, kl_coef), atol=1e-12
    )
    assert (rewards[~mask] == 0).all() and not mask[0].any()  # the empty row


JUNK = st.sampled_from([0.0, 1.0, -1e4, 3e38, math.inf, -math.inf, math.nan])


# catches: a score for a batch without a token, T of 1, an overflow of the KL of a log-prob of -1e4
# or of a bf16 tensor
def test_hostile_numbers():
    none = torch.zeros(2, 3, dtype=torch.bool)
    one = torch.tensor([[False] * 3, [True, False, False]])
    nans = torch.full((2, 3), math.nan)
    assert (shape_rewards(torch.tensor([1.0, math.nan]), nans, none, 0.1)[0] == 0).all()
    four, two = torch.tensor([4.0]), torch.tensor([[2.0]])
    assert shape_rewards(four, two, torch.ones(1, 1), 0.5)[0].tolist() == [[3.0]]
    kl = nans.clone()
    kl[1, 0] = 1e4  # k1 of log-probs 0 and -1e4
    assert shape_rewards(torch.tensor([math.inf, 1.0]), kl, one, 0.05)[0].tolist() == [
        [0.0] * 3,
        [-499.0, 0.0, 0.0],
    ]
    kl = torch.full((1, 2), 5e7, dtype=torch.bfloat16)  # k2 of the same
    none = torch.zeros(1, dtype=torch.bfloat16)
    assert shape_rewards(none, kl, torch.ones(1, 2), 0.05)[0].isfinite().all()
    assert RunningMoments().normalize(torch.tensor([1e30])).isfinite().all()


# catches: a penalty that asks for the tokenizer's EOS (trl 3750): here 7 ends a response, or 8, and
# 2 is any token
def test_the_penalty_follows_the_stop_token_of_the_run():
    ids = torch.tensor([[4, 5, 7, 2], [4, 2, 5, 4], [8, 0, 0, 0]])
    assert penalize_missing_eos(torch.zeros(3), reached_stop(ids, [7, 8]), 1.0).tolist() == [
        0.0,
        -1.0,
        0.0,
    ]
    assert penalize_missing_eos(torch.zeros(3), reached_stop(ids, []), 1.0).tolist() == [-1.0] * 3


# catches: results that share memory with each other
def test_results_are_apart():
    rewards, non_score = shape_rewards(*a_batch(9), 0.1)
    before = non_score.clone()
    rewards.zero_()
    assert torch.equal(non_score, before)


# catches: arithmetic in bf16, where 256 - 0.5 is 256, and integer scores that swallow a penalty of
# 0.5
def test_bf16_and_whole_numbers_keep_their_digits():
    mask = torch.ones(1, 1, dtype=torch.bool)
    scores = torch.tensor([256.0], dtype=torch.bfloat16)
    kl = torch.tensor([[0.5]], dtype=torch.bfloat16)
    assert shape_rewards(scores, kl, mask, 1.0)[0].item() == 255.5
    assert penalize_missing_eos(scores, ~mask[:, 0], 0.5).item() == 255.5
    assert penalize_missing_eos(torch.tensor([3]), ~mask[:, 0], 0.5).item() == 2.5
    assert RunningMoments(2, 0.5, 1.0).normalize(scores).item() == 255.5
    assert replace_missing_eos(torch.tensor([3]), ~mask[:, 0], -0.5).item() == -0.5
    assert shape_rewards(scores * 0, kl, mask, 0.1)[0].item() == pytest.approx(-0.05, abs=1e-8)
    assert replace_missing_eos(scores, ~mask[:, 0], -0.3).item() == pytest.approx(-0.3, abs=1e-7)


# catches: a detach on the way of a differentiable KL, and an in-place step that breaks autograd
def test_gradcheck():
    scores, kl, mask = a_batch(15, T=4)
    leaves = [scores.requires_grad_(), kl.where(mask, 0.5).requires_grad_()]
    assert torch.autograd.gradcheck(partial(shape_rewards, mask=mask, kl_coef=0.3), leaves)
    stopped, moments = mask[:, -1], RunningMoments(4, 0.5, 12.0)
    for f in (
        lambda s: penalize_missing_eos(s, stopped, 1.0),
        lambda s: replace_missing_eos(s, stopped),
        lambda s: clip_scores(s, 0.6),
        moments.normalize,
    ):
        assert torch.autograd.gradcheck(f, leaves[:1])


# catches: 0 * inf in the backward pass
def test_gradient_skips_padding():
    scores, kl, mask = a_batch(11)
    scores.requires_grad_(), kl.requires_grad_()
    shape_rewards(scores, kl, mask, 0.1)[0].sum().backward()
    assert_close(kl.grad, -0.1 * mask.double())
    assert_close(scores.grad, mask.any(1).double())


# catches: ~mask on a 0/1 integer mask, which is -1 and -2
def test_masks_of_numbers_are_taken_as_masks():
    scores, kl, mask = a_batch(13)
    assert torch.equal(
        shape_rewards(scores, kl, mask.long(), 0.1)[0], shape_rewards(scores, kl, mask, 0.1)[0]
    )


# catches: the two tricks mixed up, and the condition turned round
def test_penalty_and_replacement():
    scores, stopped = torch.tensor([1.0, -4.0, 2.0]), torch.tensor([True, False, False])
    assert penalize_missing_eos(scores, stopped, 1.5).tolist() == [1.0, -5.5, 0.5]
    assert replace_missing_eos(scores, stopped, -3.0).tolist() == [1.0, -3.0, -3.0]
    assert replace_missing_eos(scores, stopped).tolist() == [1.0, -1.0, -1.0]
    assert clip_scores(scores, 1.5).tolist() == [1.0, -1.5, 1.5]


# catches: E[x^2] - E[x]^2 (which the offset ruins), a forgotten cross term, empty batches, n
# instead of n - 1
@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), max_size=6), st.floats(-1e6, 1e6))
@settings(max_examples=60, deadline=None)
def test_moments_equal_numpy_however_the_batches_are_cut(batches, offset):
    batches = [[x + offset for x in batch] for batch in batches]
    moments, everything = RunningMoments(), np.array([x for batch in batches for x in batch])
    for batch in batches:
        moments.update(torch.tensor(batch, dtype=torch.float64))
    assert moments.count == len(everything)
    if len(everything):
        assert moments.mean == pytest.approx(everything.mean(), rel=1e-12, abs=1e-9)
    if len(everything) > 1:
        assert moments.std == pytest.approx(everything.std(ddof=1), rel=1e-6, abs=1e-7)
    else:
        assert moments.std == 1.0


# catches: weights on the wrong side, and a division by zero
def test_merging_is_symmetric_and_nothing_is_neutral():
    a, b = (3, 1.0, 2.0), (5, -2.0, 4.0)
    assert merge_moments(a, b) == pytest.approx(merge_moments(b, a))
    assert merge_moments((0, 0.0, 0.0), a) == a == merge_moments(a, (0, 0.0, 0.0))
    assert merge_moments((0, 0.0, 0.0), (0, 0.0, 0.0)) == (0, 0.0, 0.0)


# catches: a mean of rank means, deviations from the rank's own mean, and a rank without scores that
# deadlocks the rest
def test_ranks_of_any_size_agree_with_one():
    x = torch.randn(11, generator=torch.Generator().manual_seed(0)) + 50
    want = batch_moments(x)
    for parts in [(x[:5], x[5:]), (x[:0], x[:10], x[10:])]:
        got = on_ranks(batch_moments, *parts)
        assert all(moments == pytest.approx(want, rel=1e-9) for moments in got)
        assert len(set(got)) == 1


# catches: a check on the rank's own numbers, which leaves the others waiting for ever
def test_all_ranks_raise_when_one_holds_a_nan():
    def work(part, reduce):
        try:
            return batch_moments(part, reduce)
        except ValueError as error:
            return str(error)

    messages = on_ranks(work, torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))
    assert all("NaN" in text for text in messages)


# catches: a half-done update
def test_a_refused_batch_leaves_the_state_alone():
    moments = RunningMoments(4, 1.0, 2.0)
    with pytest.raises(ValueError):
        moments.update(torch.tensor([math.nan]))
    assert moments == RunningMoments(4, 1.0, 2.0)


# catches: division by a zero spread, and scaling before there is a spread
def test_normalize():
    x = torch.tensor([3.0, 3.0])
    assert RunningMoments().normalize(x).tolist() == [3.0, 3.0]
    one = RunningMoments()
    one.update(torch.tensor([5.0]))
    assert one.normalize(x).tolist() == [-2.0, -2.0]
    flat = RunningMoments()
    for _ in range(3):
        flat.update(torch.full((7,), 0.1))
    assert flat.normalize(torch.full((2,), 0.1)).tolist() == [0.0, 0.0]
    assert flat.normalize(torch.tensor([1.0])).isfinite().all()


# catches: state kept in float32 tensors or rounded on the way
def test_state_survives_json_and_goes_on_bit_for_bit():
    g = torch.Generator().manual_seed(1)
    straight, first = RunningMoments(), RunningMoments()
    batches = [torch.randn(5, generator=g) for _ in range(4)]
    for x in batches:
        straight.update(x)
    for x in batches[:2]:
        first.update(x)
    resumed = RunningMoments()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for x in batches[2:]:
        resumed.update(x)
    assert resumed == straight
