"The KL estimators against exact sums, the controllers against their formula, and hostile numbers."

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model
from torch import tensor

from rlhf_nb.kl import KL_ESTIMATORS, estimate_kl, full_kl, k1, k2, k3
from rlhf_nb.kl_control import AdaptiveKLController, FixedKLController, response_full_kl
from rlhf_nb.logprobs import response_logits


def exact(logp, logq):
    return float((np.exp(logp.numpy()) * (logp.numpy() - logq.numpy())).sum())


# catches: exp(x) - 1 - x and expm1(x) - x, both of which lose most digits below 1e-3 in float32; a
# wrong divisor late in the series, which float32 is too coarse to show
@pytest.mark.parametrize("dtype, near", [(np.float32, 2e-6), (np.float64, 1e-10)])
@settings(max_examples=200, deadline=None)
@given(st.one_of(st.floats(-30, 30), st.floats(-0.11, 0.11)).filter(lambda x: abs(x) > 1e-4))
def test_k3_keeps_its_digits(dtype, near, logr):
    x = dtype(logr)
    # the exact value of the number, in enough digits: a series near 0, expm1 elsewhere
    d = float(x)
    wanted = (
        sum(d**n / math.factorial(n) for n in range(2, 14)) if abs(d) < 0.5 else math.expm1(d) - d
    )
    ref = torch.from_numpy(np.array([x]))
    got = k3(torch.zeros_like(ref), ref).item()
    assert got == pytest.approx(wanted, rel=near)
    assert got >= 0


# catches: overflow (inf) on the right, a clamp that also cuts the finite answer on the left, NaN
# gradients
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_far_away_stays_finite(name):
    logprobs = tensor([0.0, -1e4, -1e4], requires_grad=True)
    kl = estimate_kl(logprobs, tensor([-1e4, 0.0, -1e4]), name)
    (grad,) = torch.autograd.grad(kl.sum(), logprobs)
    assert kl.isfinite().all() and grad.isfinite().all()
    assert kl[2] == 0 and not torch.signbit(kl[2])
    assert kl[0].item() == pytest.approx({"k1": 1e4, "k2": 5e7, "k3": 9999, "abs": 1e4}[name])


# catches: a subtraction in bf16, which has 8 bits
def test_bf16_is_widened_before_the_subtraction():
    logprobs = tensor([-100.0, -3.0, -100.0]).bfloat16()
    ref = tensor([-100.5, -3.015625, -3.015625]).bfloat16()
    for f in KL_ESTIMATORS.values():
        assert f(logprobs, ref).dtype == torch.float32
    assert torch.equal(k1(logprobs, ref), logprobs.float() - ref.float())


# catches: 0 * inf where the policy bans a token; temperature applied to one side or to the
# log-probs
def test_full_kl_hostile_and_tempered():
    banned = tensor([[1.0, 2.0, -math.inf]], requires_grad=True)
    kl = full_kl(banned, tensor([[1.0, 2.0, 0.0]]))
    (grad,) = torch.autograd.grad(kl.sum(), banned)
    assert kl.isfinite().all() and grad.isfinite().all()
    both = tensor([[1.0, 2.0, -math.inf]])
    assert full_kl(both, both) == 0
    logits, ref = torch.randn(2, 4, 9, dtype=torch.float64)
    p, q = (logits / 0.7).softmax(-1), (ref / 0.7).softmax(-1)
    assert torch.allclose(full_kl(logits, ref, 0.7), (p * (p / q).log()).sum(-1))
    assert full_kl(tensor([1e4, 0.0]), tensor([0.0, 1e4])).item() == pytest.approx(1e4)
    with pytest.raises(ValueError, match="temperature"):
        full_kl(logits, ref, 0.0)


def tiny(seed):
    how = dict(vocab_size=13, intermediate_size=16, initializer_range=0.5)
    return small_model("gpt_neox", seed, **how).eval()


@pytest.fixture
def batch():
    prompt_mask = torch.arange(4) >= tensor([[0], [2], [3]])
    mask = torch.arange(5) < tensor([[5], [0], [2]])
    torch.manual_seed(0)
    return torch.randint(13, (3, 4)), prompt_mask, torch.randint(13, (3, 5)), mask


# catches: chunks in the wrong order, policy and reference exchanged, padding not zero
@pytest.mark.parametrize("chunk", [1, 13, 40, 2**26])
def test_response_full_kl_is_the_sum_over_the_logits(batch, chunk):
    policy, ref = MODELS
    one = batch[0][:1, 3:], batch[1][:1, 3:], batch[2][:1, :1], batch[3][:1, :1]
    for rows in (batch, one):
        got = response_full_kl(policy, ref, *rows, temperature=0.7, chunk_logits=chunk)
        with torch.no_grad():
            wanted = full_kl(response_logits(policy, *rows), response_logits(ref, *rows), 0.7)
        mask = rows[3]
        assert torch.allclose(got[mask], wanted[mask], atol=1e-5) and got.shape == mask.shape
        assert (got[~mask] == 0).all() and not got.requires_grad


# catches: the context entered for the wrong model, or left before the reference's head
def test_reference_by_context(batch):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny(0),
        LoraConfig(r=2, target_modules=["query_key_value", "lm_head"], init_lora_weights=False),
    )
    model.eval()
    got = response_full_kl(model, model, *batch, ref_context=model.disable_adapter)
    with torch.no_grad():
        logits = response_logits(model, *batch)
        with model.disable_adapter():
            ref_logits = response_logits(model, *batch)
    assert torch.allclose(got[batch[3]], full_kl(logits, ref_logits)[batch[3]], atol=1e-5)
    assert got[batch[3]].max() > 1e-3


def test_nothing_real(batch):
    none = torch.zeros(3, 5, dtype=torch.bool)
    assert not response_full_kl(tiny(0), tiny(1), *batch[:3], none).any()


# catches: an absolute error, no clip, updates and episodes confused, a moving target
@settings(max_examples=50, deadline=None)
@given(st.floats(0.01, 1), st.floats(0.5, 20), st.floats(-1, 100), st.integers(1, 2000))
def test_adaptive_controller_is_the_formula(coef, target, kl, n):
    controller = AdaptiveKLController(coef, target, horizon=10_000)
    wanted = coef * (1 + np.clip((kl - target) / target, -0.2, 0.2) * n / 10_000)
    assert controller.update(kl, n) == pytest.approx(wanted) == controller.value


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_no_number_leaves_the_coefficient(bad):
    controller = AdaptiveKLController(0.1, 6.0, 10_000)
    with pytest.raises(ValueError, match="measured KL"):
        controller.update(bad, 100)
    assert controller.value == 0.1


def test_state_goes_through_json():
    import json

    a, b = AdaptiveKLController(0.1, 6.0, 10_000), AdaptiveKLController(0.9, 6.0, 10_000)
    a.update(9.0, 512)
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert a.update(3.0, 512) == b.update(3.0, 512)
    fixed = FixedKLController(0.3)
    fixed.load_state_dict(FixedKLController(0.05).state_dict())
    assert fixed.update(100.0, 512) == 0.05 == fixed.value


def random_logprobs(seed, rows=4, width=5):
    "Log-probs of policy and reference, and a mask with rows of every length, from none."
    g = torch.Generator().manual_seed(seed)
    logprobs, ref = -3 * torch.rand(2, rows, width, generator=g, dtype=torch.float64)
    return logprobs, ref, torch.arange(width) < torch.randint(width + 1, (rows, 1), generator=g)


FORMULAS = dict(k1=lambda l: -l, k2=lambda l: l**2 / 2, k3=lambda l: np.exp(l) - 1 - l, abs=np.abs)


# catches: an estimator that mixes columns or rows, a mean inside it, a wrong formula
@pytest.mark.parametrize("name", KL_ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(4)))
def test_estimators_against_numpy_token_by_token(name, seed, order):
    logprobs, ref, mask = random_logprobs(seed)
    wanted = FORMULAS[name](ref.numpy() - logprobs.numpy())
    got = estimate_kl(logprobs, ref, name)
    assert np.allclose(got.numpy(), wanted, atol=1e-9)
    assert torch.equal(estimate_kl(logprobs[order], ref[order], name), got[order])
    dirty = estimate_kl(logprobs.masked_fill(~mask, -1e4), ref.masked_fill(~mask, 0.0), name)
    assert torch.equal(dirty[mask], got[mask]) and dirty.isfinite().all()


# catches: padding whose gradient is NaN, which a mask after the estimator no longer takes away
@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_gradients_are_finite(name, dtype):
    logprobs, ref, mask = random_logprobs(3)
    logprobs = logprobs.masked_fill(~mask, -1e4).to(dtype).requires_grad_()
    kl = estimate_kl(logprobs, ref.masked_fill(~mask, 0.0).to(dtype), name)
    (grad,) = torch.autograd.grad((kl * mask).sum(), logprobs)
    assert kl.dtype == torch.float32 and grad.isfinite().all() and (grad[~mask] == 0).all()
    assert (kl * ~mask).sum().isfinite()  # many tokens at the cap still add up


# catches: an estimator whose gradient is not the one of its formula: a detach, a clamp that bites
# too early, series and expm1 mixed up
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 2))
def test_which_gradient_follows_the_kl(seed, scale):
    z, ref = scale * torch.randn(
        2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    z.requires_grad_()
    logq, p = ref.log_softmax(-1), z.detach().softmax(-1)

    def in_reward(name):
        logp = z.log_softmax(-1)
        return torch.autograd.grad((p * estimate_kl(logp, logq, name).detach() * logp).sum(), z)[0]

    def in_loss(name):
        return torch.autograd.grad((p * estimate_kl(z.log_softmax(-1), logq, name)).sum(), z)[0]

    logr = logq - p.log()
    home = p * (-logr + (p * logr).sum())  # d KL(p, q) / d z, by hand
    other = p - logq.exp()  # d KL(q, p) / d z, by hand
    near = dict(atol=1e-10)
    assert torch.allclose(torch.autograd.grad(full_kl(z, ref), z)[0], home, **near)
    assert torch.allclose(in_reward("k1"), home, **near)
    assert torch.allclose(in_loss("k2"), home, **near)
    assert torch.allclose(in_loss("k3"), other, atol=1e-8) and in_loss("k1").abs().max() < 1e-10
    assert torch.allclose(in_reward("k3"), home - other, atol=1e-8)


# catches: other figures than those of the page, whose first choice is even and leads to a KL
def test_two_even_choices_and_one_that_is_not():
    first = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    second = tensor([2.0, -2.0], dtype=torch.float64, requires_grad=True)
    even = torch.zeros(2, dtype=torch.float64)
    one, two, after_b = (x.log_softmax(-1) for x in (first, second, even))
    logp = torch.stack([one[[0, 0, 1, 1]], torch.cat([two, after_b])], 1)
    p, x = logp.detach().sum(1, keepdim=True).exp(), logp - math.log(0.5)

    def grads(loss):
        a, b = torch.autograd.grad(loss, (first, second), retain_graph=True)
        return [round(a[0].item(), 3), round(2 * b[0].item(), 3)]

    def in_reward(kl):
        return grads((p * kl.detach().flip(1).cumsum(1).flip(1) * logp).sum())

    ref = torch.full_like(logp, math.log(0.5))
    assert grads((logp.sum(1).exp() * x.sum(1)).sum()) == [0.151, 0.071]
    assert in_reward(k1(logp, ref)) == [0.151, 0.071]
    assert in_reward(k3(logp, ref)) == [0.151, -0.411]
    assert grads((p * k2(logp, ref)).sum()) == [0.0, 0.071]
    assert grads((p[:, 0] * k2(logp.sum(1), ref.sum(1))).sum()) == [0.151, 0.071]


# catches: a sum over the vocabulary in bf16
def test_full_kl_of_bf16_logits():
    logits, ref = torch.randn(2, 2, 3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    p, q = logits.double().softmax(-1), ref.double().softmax(-1)
    assert full_kl(logits, ref).dtype == torch.float32
    assert torch.allclose(full_kl(logits, ref).double(), (p * (p / q).log()).sum(-1), atol=1e-4)


# catches: rows or micro-batches that leak into each other, padding content that reaches the models
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.permutations(range(4)))
def test_response_full_kl_of_random_rows(seed, at, order):
    g = torch.Generator().manual_seed(seed)
    prompt_mask = torch.arange(3) >= torch.randint(3, (4, 1), generator=g)
    mask = random_logprobs(seed)[2]
    prompt_ids = torch.randint(13, (4, 3), generator=g)
    response_ids = torch.randint(13, (4, 5), generator=g)
    batch = (prompt_ids, prompt_mask, response_ids, mask)
    whole = response_full_kl(*MODELS, *batch, chunk_logits=26)
    parts = [
        response_full_kl(*MODELS, *[x[rows] for x in batch])
        for rows in (slice(0, at), slice(at, 4))
    ]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-5)
    assert (whole[~mask] == 0).all()
    assert (whole >= -1e-6).all()
    assert torch.allclose(
        response_full_kl(*MODELS, *[x[order] for x in batch]), whole[order], atol=1e-5
    )
    dirty = (
        prompt_ids.masked_fill(~prompt_mask, 10**6),
        prompt_mask,
        response_ids.masked_fill(~mask, -7),
        mask,
    )
    assert torch.equal(response_full_kl(*MODELS, *dirty, chunk_logits=26), whole)


MODELS = tiny(0), tiny(1)
