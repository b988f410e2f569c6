"""Log-probs and entropy against numpy, the chunked path against the plain forward, for models of
many shapes."""

import copy
import math

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_nb import fast_logprobs as module
from rlhf_nb.base.opened import separable_model
from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.logprobs import response_logits, token_entropy, token_logprobs

SIZES = dict(
    vocab_size=37,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
KV = SIZES | dict(num_key_value_heads=2)
SHORT = dict(
    vocab_size=37, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
)
MODELS = {
    "Llama": KV,
    "GPTNeoX": SIZES,
    "GPT2": SHORT,
    "Qwen3": KV | dict(head_dim=8),
    "Bloom": dict(
        vocab_size=37, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),  # no position_ids
    "OPT": dict(
        vocab_size=37,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
    ),
    "Cohere": KV | dict(logit_scale=0.25),
    "Granite": KV | dict(logits_scaling=4.0),
    "Gemma2": KV | dict(head_dim=8, final_logit_softcapping=5.0),
    "HyperCLOVAX": KV | dict(logits_scaling=4.0),  # multiplies by it: must be used whole
}
WHOLE = {"HyperCLOVAX"}


def build(name, std=0.3, seed=0, **changes):
    "A tiny model with logits large enough for a scale or a cap to show, dropout off."
    torch.manual_seed(seed)
    config = getattr(tf, f"{name}Config")(**MODELS[name] | changes)
    for key in "resid_pdrop embd_pdrop attn_pdrop dropout attention_dropout hidden_dropout".split():
        if hasattr(config, key):
            setattr(config, key, 0.0)
    model = getattr(tf, f"{name}ForCausalLM", None) or getattr(tf, f"{name}LMHeadModel")
    model = model(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=std)
    return model.train()


@pytest.fixture
def batch():
    "Five rows, prompts of 1 to 7 tokens, responses of 0 to 6."
    torch.manual_seed(1)
    prompt_mask = torch.arange(7) >= tensor([[0], [2], [6], [3], [1]])
    mask = torch.arange(6) < tensor([[6], [1], [0], [3], [5]])
    return torch.randint(1, 37, (5, 7)), prompt_mask, torch.randint(1, 37, (5, 6)), mask


# catches: softmax over the wrong dimension, temperature after the softmax, log base 2, float32 lost
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 5))
def test_token_functions_against_numpy(seed, temperature):
    rng = np.random.default_rng(seed)
    logits, ids = 3 * rng.standard_normal((2, 4, 6)), rng.integers(0, 6, (2, 4))
    e = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    p = e / e.sum(-1, keepdims=True)
    got = token_logprobs(torch.from_numpy(logits), torch.from_numpy(ids), temperature).numpy()
    assert np.allclose(got, np.log(np.take_along_axis(p, ids[..., None], -1)[..., 0]))
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(p * np.log(p), -1)
    assert np.allclose(token_entropy(torch.from_numpy(logits), temperature).numpy(), entropy)
    assert (
        token_logprobs(torch.from_numpy(logits).float(), torch.from_numpy(ids)).dtype
        == torch.float32
    )


# catches: p * log p with log 0, log-softmax in bf16, an offset of 1e4 that eats the digits of the
# entropy
def test_hostile_logits():
    logits = tensor([[0, 1e4, -1e4], [-math.inf, 0, 0], [1e4, 1e4, 1e4 - 1]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, tensor([0, 1, 2])), token_entropy(logits)
    assert logprobs.isfinite().all() and logprobs[0] == -1e4
    assert torch.allclose(entropy[:2], tensor([0.0, math.log(2)]))
    assert torch.allclose(entropy[2], token_entropy(tensor([1.0, 1.0, 0.0])), atol=1e-6)
    (grad,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)
    assert grad.isfinite().all()


# catches: off by one in either direction, padding that shifts positions or is attended to, prompt
# columns mixed in
@pytest.mark.parametrize("name", MODELS)
def test_batched_rows_equal_rows_alone(name, batch):
    prompt_ids, prompt_mask, response_ids, mask = batch
    model = build(name)
    got = response_logprobs(model, *batch, temperature=0.7)
    assert (separable_model(model) is None) == (name in WHOLE)
    for row in range(5):
        P, T = int(prompt_mask[row].sum()), int(mask[row].sum())
        ids = torch.cat([prompt_ids[row][prompt_mask[row]], response_ids[row, :T]])[None]
        with torch.no_grad():
            logp = (model(ids, use_cache=False).logits[0].double() / 0.7).log_softmax(-1)
        alone = tensor([logp[P - 1 + t, ids[0, P + t]] for t in range(T)])
        entropy = tensor([-(logp[P - 1 + t].exp() * logp[P - 1 + t]).sum() for t in range(T)])
        assert torch.allclose(got.logprobs[row, :T], alone.float(), atol=2e-4)
        assert torch.allclose(got.entropy[row, :T], entropy.float(), atol=2e-4)
    assert (got.logprobs[~mask] == 0).all() and (got.entropy[~mask] == 0).all()


# catches: a scale or cap forgotten in the chunked path, chunks that lose gradient or order, a
# checkpoint that recomputes something else
@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_gradients_equal_the_plain_forward(name, batch):
    response_ids, mask = batch[2:]
    weight = torch.randn(mask.shape)
    grads = []
    for chunk in (None, 37 * 4, 1):
        model = build(name)
        if chunk is None:
            logits = response_logits(model, *batch)
            logprobs = token_logprobs(logits, response_ids, 0.7)
            entropy = token_entropy(logits, 0.7)
        else:
            logprobs, entropy = response_logprobs(
                model, *batch, temperature=0.7, chunk_logits=chunk
            )
        loss = (weight * (logprobs + 0.1 * entropy))[mask].sum()
        loss.backward()
        grads.append([loss.detach()] + [p.grad for p in model.parameters() if p.grad is not None])
    for other in grads[1:]:
        assert len(other) == len(grads[0])
        for a, b in zip(grads[0], other):
            assert torch.allclose(a, b, atol=1e-3 * max(1.0, a.abs().max().item()))


# catches: rows written back in the wrong place, padding content or padding width that reaches a real
# token, pad ids outside the embedding that are looked up
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(4)), st.sampled_from([1, 100, 2**26]))
def test_padding_and_order_of_random_rows(seed, order, chunk):
    prompt_ids, prompt_mask, response_ids, mask = batch = random_rows(seed)
    T, pad = mask.shape[1], torch.nn.functional.pad
    dirty = prompt_ids.masked_fill(~prompt_mask, 10**6), response_ids.masked_fill(~mask, -100)
    wide = [pad(x, (3, 0)) for x in batch[:2]] + [pad(x, (0, 2)) for x in batch[2:]]
    for model in SHARED.values():
        read = lambda *rows, **how: response_logprobs(model, *rows, temperature=0.7, **how)  # noqa: B023
        with torch.no_grad():
            wanted, widened = read(*batch), read(*wide)
            moved = read(*[x[order] for x in batch], chunk_logits=chunk)
            unclean = read(dirty[0], prompt_mask, dirty[1], mask)
        for a, b, c, d in zip(wanted, moved, unclean, widened):
            assert torch.allclose(a[order], b, atol=1e-5) and torch.equal(a, c)
            assert torch.allclose(a, d[:, :T], atol=1e-4)
            assert (a[~mask] == 0).all() and (d[:, T:] == 0).all()


# catches: NaN from rows that attend to nothing, in value or gradient; an empty head call that drops
# the graph
def test_nothing_real(batch):
    model = build("Llama")
    got = response_logprobs(model, *batch[:3], torch.zeros_like(batch[3]))
    assert got.logprobs.abs().sum() == 0 and got.entropy.abs().sum() == 0
    (got.logprobs.sum() + got.entropy.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in model.parameters())


# catches: the vocabulary kept for backward after all
def test_no_vocabulary_is_kept(batch):
    model = build("Llama", vocab_size=3000)
    ids, real = torch.randint(3000, (8, 40)), torch.ones(8, 40, dtype=torch.bool)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (sizes.append((x.numel(), x.shape)), x)[1], lambda x: x
    ):
        response_logprobs(model, ids[:, :1], real[:, :1], ids, real, chunk_logits=3000 * 10)
    weights = {p.numel() for p in model.parameters()}
    assert max(n for n, _ in sizes if n not in weights) < 320 * 60


# catches: checkpointing that costs on models so small that one chunk holds everything
def test_small_models_are_not_recomputed(batch, monkeypatch):
    monkeypatch.setattr(module, "checkpoint", lambda *a, **k: pytest.fail("recomputed for nothing"))
    response_logprobs(build("Llama"), *batch)


# catches: a probe that changes what a resumed run would draw, or that trains or leaves a hook
# behind
def test_looking_into_a_model_leaves_no_trace(batch):
    model = build("GPT2")
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5
    before, state = torch.random.get_rng_state(), copy.deepcopy(model.state_dict())
    assert separable_model(model) is model  # dropout on, and still recognised
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values()))
    assert not any(part._forward_hooks for part in model.modules())
    assert all(p.grad is None for p in model.parameters())


# catches: a model taken at its word: something after the head, or before the body, that configs do
# not tell
@pytest.mark.parametrize(
    "trick", ["scales the logits", "shifts the tokens", "pads the vocabulary", "caps at a thousand"]
)
def test_a_forward_that_does_more_is_used_whole(trick, batch):
    class Tricky(tf.LlamaForCausalLM):
        def forward(self, input_ids=None, **kwargs):
            if trick == "shifts the tokens":
                input_ids = (input_ids + 1) % 37
            output = super().forward(input_ids=input_ids, **kwargs)
            if trick == "scales the logits":
                output.logits = output.logits * 0.9
            elif trick == "pads the vocabulary":
                output.logits = output.logits[..., :36]
            elif trick == "caps at a thousand":
                output.logits = 1000 * torch.tanh(output.logits / 1000)
            return output

    model = Tricky(tf.LlamaConfig(**KV))
    assert separable_model(model) is None
    mask, ids = batch[3], batch[2].clamp(max=35)
    got = response_logprobs(model, *batch[:2], ids, mask)
    logits = response_logits(model, *batch[:2], ids, mask)
    assert torch.allclose(got.logprobs[mask], token_logprobs(logits, ids)[mask], atol=1e-6)


class Wrapper(torch.nn.Module):
    "Passes attributes through, as an engine does: nobody may reach past its forward."

    def __init__(self, module):
        super().__init__()
        self.module, self.calls = module, 0

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.module(*args, **kwargs)


# catches: DDP, FSDP or an engine bypassed (no gradient reduction), or a wrapper whose signature
# hides logits_to_keep
def test_a_wrapper_is_called_itself(batch):
    inner = build("Llama")
    outer = Wrapper(inner)
    a, b = response_logprobs(inner, *batch), response_logprobs(outer, *batch)
    assert outer.calls == 1 and separable_model(outer) is None
    assert torch.allclose(a.logprobs, b.logprobs, atol=1e-5)
    seen = []
    inner.lm_head.register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    response_logits(outer, *batch)
    assert seen == [7]  # T + 1 columns, not P + T


# catches: position_ids dropped where a decorated forward hides its signature
def test_a_forward_without_a_signature_gets_everything(batch):
    class Opaque(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    inner = build("GPT2")
    assert torch.allclose(
        response_logprobs(Opaque(inner), *batch).logprobs,
        response_logprobs(inner, *batch).logprobs,
        atol=1e-5,
    )


# catches: an adapter that is skipped, or cannot be turned off
def test_lora(batch):
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    base = build("Llama").eval()
    plain = response_logprobs(base, *batch)
    model = get_peft_model(
        copy.deepcopy(base),
        LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False),
    ).eval()
    assert separable_model(model) is model.get_base_model()
    assert separable_model(Wrapper(model)) is None
    got, logits, mask = response_logprobs(model, *batch), response_logits(model, *batch), batch[3]
    assert torch.allclose(got.logprobs[mask], token_logprobs(logits, batch[2])[mask], atol=1e-5)
    assert not torch.allclose(got.logprobs, plain.logprobs, atol=1e-3)
    with model.disable_adapter():
        assert torch.allclose(response_logprobs(model, *batch).logprobs, plain.logprobs, atol=1e-5)
    prompt_tuned = get_peft_model(
        copy.deepcopy(base), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    assert separable_model(prompt_tuned) is None


def random_rows(seed, rows=4):
    "Rows with prompts of 1 to 5 tokens and responses of 0 to 4, and their masks."
    g = torch.Generator().manual_seed(seed)
    start, end = torch.randint(5, (rows, 1), generator=g), torch.randint(5, (rows, 1), generator=g)
    prompt_ids, response_ids = torch.randint(1, 37, (2, rows, 5), generator=g)
    return prompt_ids, torch.arange(5) >= start, response_ids[:, :4], torch.arange(4) < end


SHARED = {name: build(name).eval() for name in ("Llama", "Cohere")}


# catches: a squeeze that eats a dimension of one, after which the subtraction broadcasts
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 3), (3,), (1,), ()])
def test_short_shapes_stay(shape):
    logits = torch.randn(*shape, 5, generator=torch.Generator().manual_seed(0))
    got = token_logprobs(logits, torch.full(shape, 2))
    assert got.shape == shape and torch.allclose(got, logits.log_softmax(-1)[..., 2])
    assert token_entropy(logits).shape == shape


# catches: a sum over the vocabulary in bf16, whose 8 bits stop counting long before 5,000 small
# terms are added
def test_bf16_logits_are_added_up_in_float32():
    logits = torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    p = (logits.double() / 0.7).softmax(-1)
    assert token_entropy(logits, 0.7).dtype == torch.float32
    assert torch.allclose(token_entropy(logits, 0.7).double(), -(p * p.log()).sum(-1), atol=1e-4)
    ids = torch.full((2, 3), 17)
    assert torch.allclose(token_logprobs(logits, ids, 0.7).double(), p[..., 17].log(), atol=1e-4)


# catches: a bound that is off (entropy above log V or below 0), a gradient that turns NaN where
# probabilities underflow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([-1e4, -50.0, 0.0, 1.0, 50.0, 1e4]), min_size=2, max_size=6),
    st.floats(0.05, 20),
)
def test_entropy_stays_between_its_bounds(row, temperature):
    logits = tensor(row, requires_grad=True)
    entropy = token_entropy(logits, temperature)
    logprobs = token_logprobs(
        logits.expand(len(row), len(row)), torch.arange(len(row)), temperature
    )
    (grad,) = torch.autograd.grad(entropy + logprobs.sum(), logits)
    assert -1e-6 <= entropy.item() <= math.log(len(row)) + 1e-6 and grad.isfinite().all()
    assert logprobs.isfinite().all() and (logprobs <= 1e-6).all()
    # of float32 numbers as large as these logits
    spacing = 2**-22 * max(map(abs, row)) / temperature
    assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-5 + spacing)
