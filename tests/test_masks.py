"""masks: formulas re-derived in numpy, padding that must not matter, ranks that must not matter,
hostile numbers."""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch.testing import assert_close

from rlhf_nb.masks import (
    left_pad,
    masked_mean,
    masked_sum,
    masked_var,
    response_mask,
    right_pad,
    whiten,
)
from rlhf_nb.packing import last_index, log_ratio, pack, position_ids, reached_stop

PAD, STOP = 0, 9
rows_of_ids = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=7), min_size=1, max_size=5)
quick = settings(max_examples=60, deadline=None)


@st.composite
def batches(draw, max_rows=5, max_cols=6):
    "Numbers [B, T] and any mask, all-false rows included."
    b, t = draw(st.integers(1, max_rows)), draw(st.integers(1, max_cols))
    seed = draw(st.integers(0, 2**31 - 1))
    g = torch.Generator().manual_seed(seed)
    return torch.randn(b, t, generator=g, dtype=torch.float64) * 3 + 1, torch.rand(
        b, t, generator=g
    ) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))


# ---------------------------------------------------------------- padding
@quick
@given(rows_of_ids)
def test_padding_is_undone_by_the_mask(rows):
    # catches: the wrong side, a mask made by comparing ids with pad_id (0 is drawn as a real id), a
    # width off by one
    for pad, side in ((left_pad, "left"), (right_pad, "right")):
        ids, mask = pad(rows, PAD)
        assert ids.dtype == torch.long and mask.dtype == torch.bool and ids.shape == mask.shape
        assert ids.shape[1] == max(map(len, rows))
        assert [i[m].tolist() for i, m in zip(ids, mask)] == rows
        assert (ids[~mask] == PAD).all()
        assert mask[:, -1 if side == "left" else 0].all()


@quick
@given(rows_of_ids, rows_of_ids, st.integers(0, 4))
def test_positions_do_not_move_with_padding(prompts, responses, extra):
    # catches: cumsum without the minus one, padding between or behind that counts on, a plain
    # arange
    n = min(len(prompts), len(responses))
    mask = torch.cat([left_pad(prompts[:n], PAD)[1], right_pad(responses[:n], PAD)[1]], 1)
    positions = position_ids(mask)
    for row, keep in zip(positions, mask):
        assert row[keep].tolist() == list(range(int(keep.sum()))) and (row[~keep] == 0).all()
    wider = torch.nn.functional.pad(mask, (extra, extra), value=False)
    assert torch.equal(position_ids(wider)[:, extra : extra + mask.shape[1]], positions)


# catches: a place that is off by one, a token in another order, positions that go on into the next
# row, pad ids that reach an embedding, a mask where rows lie end to end
@given(rows_of_ids, st.data(), st.sampled_from([None, 1, 4, 16]), st.booleans())
@quick
def test_packed_rows_are_the_same_tokens(prompts, data, align, end_to_end):
    n = len(prompts)
    tokens = st.lists(st.integers(0, 12), min_size=1, max_size=7)
    responses = data.draw(st.lists(tokens, min_size=n, max_size=n))
    (prompt_ids, prompt_mask), (ids, mask) = left_pad(prompts, -100), right_pad(responses, -100)
    packed = pack(prompt_ids, prompt_mask, ids, mask, align, end_to_end)
    real = [p + r for p, r in zip(prompts, responses)]
    cells, positions = packed.input_ids.flatten(), packed.position_ids.flatten()
    assert packed.inputs["use_cache"] is False and (cells >= 0).all()
    assert packed.places.shape == (n, mask.shape[1] + 1)
    for prompt, response, places in zip(prompts, responses, packed.places.tolist()):
        assert cells[places[0]] == prompt[-1]
        assert cells[places[1 : len(response) + 1]].tolist() == response
        wanted = [len(prompt) - 1 + t for t in range(len(response) + 1)]
        assert positions[places[: len(response) + 1]].tolist() == wanted
    if end_to_end:
        assert packed.attention_mask is None and "attention_mask" not in packed.inputs
        assert packed.input_ids.shape[0] == 1 and cells.tolist() == [i for row in real for i in row]
        assert positions.tolist() == [i for row in real for i in range(len(row))]
        return
    width = packed.input_ids.shape[1]
    whole = prompt_mask.shape[1] + mask.shape[1]
    longest = max(map(len, real))
    assert width == (whole if align is None else min(whole, -(-longest // align) * align))
    for row, ids, seen in zip(real, packed.input_ids, packed.attention_mask.bool()):
        assert ids[seen].tolist() == row and (ids[~seen] == 0).all()
        assert align is None or seen.tolist() == sorted(seen.tolist(), reverse=True)


def test_an_attention_mask_of_integers_will_do():
    # catches: ~ on an int tensor, which gives -1 and -2
    assert position_ids(torch.tensor([[0, 1, 1, 0]])).tolist() == [[0, 0, 1, 0]]
    assert last_index(torch.tensor([[0, 1, 1, 0]])).tolist() == [2]
    assert masked_mean(torch.tensor([[7.0, 1.0, 3.0, 7.0]]), torch.tensor([[0, 1, 1, 0]])) == 2


# ---------------------------------------------------------------- stops
@quick
@given(rows_of_ids, st.sets(st.integers(0, 12), max_size=3))
def test_response_ends_with_its_first_stop(rows, stops):
    # catches: excluding the stop token, ending at the last stop, only one stop id honoured,
    # row-independent ends
    width = max(map(len, rows))
    ids = torch.tensor([row + [STOP] * (width - len(row)) for row in rows])
    mask, ended = response_mask(ids, list(stops)), reached_stop(ids, list(stops))
    last = last_index(mask)
    for i, row in enumerate(ids.tolist()):
        first = next((t for t, y in enumerate(row) if y in stops), None)
        n = width if first is None else first + 1
        assert mask[i].tolist() == [True] * n + [False] * (width - n)
        assert bool(ended[i]) == (first is not None) and int(last[i]) == n - 1


def test_last_index_with_holes_and_without_a_token():
    mask = torch.tensor([[False, True, False, True, False], [False] * 5, [True] * 5])
    assert last_index(mask).tolist() == [3, -1, 4] and last_index(mask).dtype == torch.long


# ---------------------------------------------------------------- sums
JUNK = st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30, 1.0])


@quick
@given(batches(), JUNK)
def test_statistics_are_those_of_numpy(batch, junk):
    # catches: biased variance, padding counted or multiplied by the mask, a per-row mean, float32
    # where float64 came in
    x, mask = batch
    real = x.numpy()[mask.numpy()]
    x = x.masked_fill(~mask, junk)
    mean, var = real.mean() if real.size else 0.0, real.var(ddof=1) if real.size > 1 else 0.0
    assert_close(masked_sum(x, mask), torch.tensor(real.sum()))
    assert_close(masked_mean(x, mask), torch.tensor(mean, dtype=x.dtype))
    assert_close(masked_var(x, mask), torch.tensor(var, dtype=x.dtype))
    assert masked_mean(x, mask).dtype == torch.float64


@quick
@given(batches(), JUNK)
def test_whitening_is_that_of_numpy(batch, junk):
    # catches: eps outside the root, biased std, shift_mean=False that divides the mean too, padding
    # left alone
    x, mask = batch
    real = x.numpy()[mask.numpy()]
    x = x.masked_fill(~mask, junk)
    for shift in (True, False):
        want = np.zeros(x.shape)
        if real.size:
            std = np.sqrt((real.var(ddof=1) if real.size > 1 else 0.0) + 1e-8)
            want[mask.numpy()] = (real - real.mean()) / std + (0 if shift else real.mean())
        assert_close(whiten(x, mask, shift_mean=shift), torch.tensor(want))


def everything(x, mask, reduce=None):
    return torch.stack(
        [masked_sum(x, mask, reduce), masked_mean(x, mask, reduce), masked_var(x, mask, reduce)]
    )


@quick
@given(batches(), st.data())
def test_the_split_over_ranks_does_not_matter(batch, data):
    # catches: mean of rank means, a variance about the rank's own mean, division before the reduce;
    # a rank may be all padding
    x, mask = batch
    cut = data.draw(st.integers(0, len(x)))
    parts = [(x[:cut], mask[:cut]), (x[cut:], mask[cut:])]
    for got in on_ranks(lambda p, reduce: everything(*p, reduce), *parts):
        assert_close(got, everything(x, mask))
    for shift in (True, False):
        work = partial(lambda shift, p, reduce: whiten(*p, shift, reduce), shift)
        assert_close(torch.cat(on_ranks(work, *parts)), whiten(x, mask, shift_mean=shift))


@pytest.mark.parametrize("far", [0.0, 1e4, -1e5])
def test_a_small_spread_far_from_zero(far):
    # catches: the mean of squares less the square of the mean, which in float32 has no digit left
    # here
    x, mask = far + torch.tensor([[-1.0, 0.0, 1.0, 7.0]]), torch.tensor([[True, True, True, False]])
    assert_close(masked_var(x, mask), torch.tensor(1.0))
    assert_close(whiten(x, mask), torch.tensor([[-1.0, 0.0, 1.0, 0.0]]), atol=1e-4, rtol=0)


def test_gradients():
    # catches: a detached mean or variance, a gradient that lands on padding
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(3, 4) < 0.7
    for f in (masked_sum, masked_mean, masked_var, whiten):
        assert torch.autograd.gradcheck(partial(f, mask=mask), x)
    assert torch.autograd.gradcheck(lambda x: whiten(x, mask, shift_mean=False), x)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf"), -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hostile_padding_gives_finite_gradients(junk, dtype):
    # catches: where() after the arithmetic, whose backward still is 0 * inf; a root of zero; 0 / 0; a
    # cast that cuts the graph, infinity in bfloat16 padding that comes back as nan
    statistics = masked_sum, masked_mean, masked_var, whiten
    for real, f in product((0, 1, 2, 5, 6), (*statistics, partial(whiten, shift_mean=False))):
        mask = (torch.arange(6) < real).view(2, 3)
        x = torch.linspace(-1e4, 3.0, 6).view(2, 3).masked_fill(~mask, junk).to(dtype)
        y = f(x.requires_grad_(), mask)
        assert y.isfinite().all()
        (y.float() * torch.arange(1.0, 1 + y.numel()).view(y.shape)).sum().backward()
        assert x.grad.dtype == dtype and x.grad.isfinite().all() and (x.grad[~mask] == 0).all()


def test_a_gradient_counts_the_tokens_of_all_ranks():
    # catches: a divisor that is this rank's own count
    x = torch.tensor([[1.0, 2.0, 5.0], [3.0, 4.0, 5.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    leaves = [x[:1].clone().requires_grad_(), x[1:].clone().requires_grad_()]
    for mean in on_ranks(
        lambda p, reduce: masked_mean(*p, reduce), *zip(leaves, (mask[:1], mask[1:]))
    ):
        mean.backward()
    assert_close(torch.cat([leaf.grad for leaf in leaves]), mask / 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_up_in_float32(dtype):
    # catches: a sum in the input's type: in bfloat16 a running count stops at 256, in float16 a sum
    # overflows at 65,504
    x, mask = torch.full((40, 100), 31.0, dtype=dtype), torch.ones(40, 100, dtype=torch.bool)
    assert masked_sum(x, mask) == 124_000 and masked_sum(x, mask).dtype == torch.float32
    assert masked_mean(x, mask) == 31 and masked_var(x, mask) == 0
    assert whiten(x, mask).dtype == dtype and (whiten(x, mask) == 0).all()
    assert (whiten(x, mask, shift_mean=False) == 31).all()


def test_integers_and_booleans_have_means():
    hits = torch.tensor([[True, False, True, True]])
    mask = torch.tensor([[True, True, True, False]])
    assert_close(masked_mean(hits, mask), torch.tensor(2 / 3))
    assert (
        whiten(torch.tensor([[1, 2, 4]]), torch.ones(1, 3, dtype=torch.bool)).dtype == torch.float32
    )


# ---------------------------------------------------------------- the log of a ratio
@pytest.mark.parametrize("dirt", [0.0, float("nan"), -math.inf, 1e4])
def test_a_log_ratio_by_hand(dirt):
    # catches: the wrong sign, -inf less -inf on padding, no cap or a one-sided one, padding that
    # carries a gradient
    mask = torch.tensor([[True, True, True, False]])
    new = torch.tensor([[-1.0, 0.0, -50.0, dirt]], requires_grad=True)
    old = torch.tensor([[-3.0, -50.0, 0.0, dirt]])
    assert log_ratio(new, old, mask, cap=20.0).tolist() == [[2.0, 20.0, -20.0, 0.0]]
    assert log_ratio(new, old, mask).tolist() == [[2.0, 50.0, -50.0, 0.0]]
    assert log_ratio(new[:, :3], old[:, :3]).tolist() == [[2.0, 50.0, -50.0]]
    log_ratio(new, old, mask, cap=20.0).sum().backward()
    assert new.grad.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_a_log_ratio_is_wide():
    # catches: bf16 kept, float64 narrowed by either side, a mask or a token that broadcasts
    narrow = torch.tensor([[-100.0, -3.015625]]).bfloat16()
    for x, dtype in ((narrow, torch.float32), (narrow.double(), torch.float64)):
        assert log_ratio(x, narrow).dtype == log_ratio(narrow, x).dtype == dtype
