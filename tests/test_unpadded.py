"""Rows end to end: no padding goes into a model, no row reads another, and states and gradients are
those of the rectangle."""

from __future__ import annotations

import copy
import importlib.util
import inspect

import pytest
import torch
from peft import LoraConfig, get_peft_model
from ppo_fixtures import logs, untimed, weights
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen3Config,
)

import rlhf_nb.models as models
from rlhf_nb.logprobs import response_logprobs
from rlhf_nb.masks import position_ids
from rlhf_nb.models import compile_layers, response_values, scorer_from, states_at

SMALL = dict(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
    initializer_range=0.2,
)
FEWER, STILL = dict(num_key_value_heads=2), dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
PLAIN = dict(
    neox=GPTNeoXConfig(**SMALL),
    llama=LlamaConfig(**SMALL),
    shared_keys=LlamaConfig(**SMALL, **FEWER),
    qwen2=Qwen2Config(**SMALL, **FEWER),
    qwen3=Qwen3Config(**SMALL, **FEWER, head_dim=8),
    mistral=MistralConfig(**SMALL, **FEWER, sliding_window=None),
    gemma=GemmaConfig(**SMALL, **FEWER, head_dim=8),
    gpt2=GPT2Config(**SMALL, n_inner=64, **STILL),
    opt=OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, dropout=0),
    phi=PhiConfig(**SMALL),
    phi3=Phi3Config(**SMALL),
    mixtral=MixtralConfig(**SMALL, **FEWER, num_local_experts=4),
    olmo2=Olmo2Config(**SMALL),
    cohere=CohereConfig(**SMALL),
    granite=GraniteConfig(**SMALL),
)
BENT = dict(
    window=MistralConfig(**SMALL, **FEWER, sliding_window=3),
    some_windows=Gemma3TextConfig(**SMALL, **FEWER, head_dim=8),
    caps=Gemma2Config(**SMALL, **FEWER, head_dim=8),
    wide_window=PhimoeConfig(
        **SMALL, **FEWER, num_local_experts=2, sliding_window=64
    ),  # by its mask alone, and wider than a trial's rows
    state=MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2),
    chance=GPT2Config(**SMALL, n_inner=64),
    chance_in_attention=LlamaConfig(**SMALL, attention_dropout=0.1),
    written_out=LlamaConfig(**SMALL, attn_implementation="eager"),
)


def body_of(config) -> nn.Module:
    torch.manual_seed(0)
    return AutoModel.from_config(copy.deepcopy(config))


def question(shift: int = 0) -> tuple[dict, torch.Tensor, torch.Tensor]:
    "Five rows, what of them is real, and seven places to read."
    ids = torch.randint(2, 40, (5, 11), generator=torch.Generator().manual_seed(1))
    real = torch.arange(11) < torch.tensor([[11], [9], [4], [1], [7]])
    asked = dict(
        input_ids=ids.where(real, torch.full_like(ids, shift)),
        attention_mask=real.long(),
        position_ids=position_ids(real),
        use_cache=False,
    )
    return asked, real, torch.tensor([0, 3, 10, 11 + 8, 22 + 3, 33, 44 + 2])


def answer(body: nn.Module, unpadded: bool) -> list[torch.Tensor]:
    "The states at those places, and the gradients of a sum over them."
    asked, real, places = question()
    asked = {
        name: x for name, x in asked.items() if name in inspect.signature(body.forward).parameters
    }
    body.zero_grad()
    found = states_at(body, asked, real, places, unpadded)
    (found * torch.linspace(-1, 2, found.numel()).view_as(found)).sum().backward()
    return [
        found.detach(),
        *(torch.zeros(()) if p.grad is None else p.grad.clone() for p in body.parameters()),
    ]


def apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    "The largest difference, of the largest number of each tensor."
    return max(
        ((x - y).abs().max() / x.abs().max().clamp(min=1.0)).item()
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture
def positions(monkeypatch) -> list[torch.Size]:
    "The shape of what each body is asked, from now on."
    seen, plain = [], models._end_to_end_of

    def note(asked, real):
        flat = plain(asked, real)
        seen.append(flat["input_ids"].shape)
        return flat

    monkeypatch.setattr(models, "_end_to_end_of", note)
    return seen


# ---- One body ----

IN_FLOAT32 = ("gemma", "cohere", "mixtral")  # their norms or experts, whatever the weights are


# catches: a row that reads another, positions that go on, padding that brings a gradient, keys that
# are shared by heads and are not, a family that is refused without need
@pytest.mark.parametrize(
    "name, dtype, near",
    [(name, torch.float32, 2e-6) for name in PLAIN]
    + [(name, torch.float64, 1e-12) for name in PLAIN if name not in IN_FLOAT32],
)
def test_the_same_states_and_gradients(name, dtype, near, positions):
    body = body_of(PLAIN[name]).to(dtype)
    padded, found = answer(body, False), answer(body, True)
    assert apart(padded, found) < near and positions == [
        torch.Size([1, 10]),
        torch.Size([1, 32]),
    ]  # asked once on trial: 2 + 5 + 3 tokens
    assert (
        body.config._attn_implementation == "sdpa" and sum(p.abs().sum() > 0 for p in found[1:]) > 5
    )


# catches: attention with a window, a cap, a state or a number drawn, taken for plain
@pytest.mark.parametrize("name", BENT)
def test_where_it_is_not_safe_the_rectangle_is_read(name, positions):
    body = body_of(BENT[name])
    assert not models._reads_end_to_end(body)
    if "chance" in name:
        return
    before = len(positions)  # a window is found out on trial
    assert apart(answer(body, False), answer(body, True)) == 0 and len(positions) == before


# catches: a listener who finds other rows than it was told of, a layer called again in the backward
# pass or written by a compiler, a config that not all parts share
def test_here_and_now(positions):
    body = body_of(PLAIN["llama"])
    assert models._reads_end_to_end(body)
    listen = body.layers[0].register_forward_hook(lambda *_: None)
    assert not models._reads_end_to_end(body)
    listen.remove()
    body.layers[1].gradient_checkpointing = True
    assert not models._reads_end_to_end(body)
    body.layers[1].gradient_checkpointing = False
    body.layers[1].self_attn.config = copy.deepcopy(body.config)
    assert not models._reads_end_to_end(body)
    body.layers[1].self_attn.config = body.config
    assert models._reads_end_to_end(body) and len(positions) == 1
    whole = AutoModelForCausalLM.from_config(copy.deepcopy(PLAIN["llama"]))
    compile_layers(whole, backend="eager")
    assert not models._reads_end_to_end(whole.model)


def leaking(module, query, key, value, attention_mask, **how):
    "Wrong: the whole line is one row."
    return nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=how.get("scaling")
    ).transpose(1, 2), None


# catches: a trial that lets a leak pass, and one that leaves the body changed when it fails
def test_a_leak_is_found_on_trial(monkeypatch):
    monkeypatch.setattr(models, "_row_by_row", leaking)
    body = body_of(PLAIN["llama"])
    assert not models._says_the_same_unpadded(body) and not models._reads_end_to_end(body)

    def fails(*args, **how):
        raise RuntimeError("no")

    monkeypatch.setattr(models, "_row_by_row", fails)
    body = body_of(PLAIN["neox"])
    with pytest.raises(RuntimeError):
        models._says_the_same_unpadded(body)
    assert not models._reads_end_to_end(body) and body.config._attn_implementation == "sdpa"


# catches: a second copy of the module, whose attention is found under the same name and knows
# nothing of these rows
def test_a_module_that_was_imported_twice(positions):
    body, (asked, real, places) = body_of(PLAIN["llama"]), question()
    states_at(body, asked, real, places)
    spec = importlib.util.spec_from_file_location("rlhf_nb.models_again", models.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    for way in (again.states_at, states_at):
        assert torch.equal(way(body, asked, real, places), states_at(body, asked, real, places))
    assert again._reads_end_to_end(body) and models._reads_end_to_end(body_of(PLAIN["neox"]))
    assert [shape[1] for shape in positions] == [
        10,
        32,
        32,
        32,
        32,
        10,
    ]  # the copy counts for itself


# catches: padding that is looked up after all, or that brings a number through the rectangle of
# attention
def test_padding_can_hold_anything():
    body = body_of(PLAIN["llama"])
    (asked, real, places), (other, _, _) = question(0), question(39)
    with torch.no_grad():
        body.embed_tokens.weight[39] = torch.nan
        body.embed_tokens.weight[asked["input_ids"][real].unique()] = 0.1
        found = [states_at(body, which, real, places) for which in (asked, other)]
    assert torch.equal(*found) and found[0].isfinite().all()


# ---- Log-probs and values ----


def batch() -> tuple[torch.Tensor, ...]:
    "Prompts of 1 to 9 tokens, responses of 1 to 7, -100 on padding."
    draw = torch.Generator().manual_seed(2)
    lengths = [torch.randint(1, most + 1, (6, 1), generator=draw) for most in (9, 7)]
    prompt_mask, mask = torch.arange(9) >= 9 - lengths[0], torch.arange(7) < lengths[1]
    ids = [
        torch.randint(2, 40, m.shape, generator=draw).masked_fill(~m, -100)
        for m in (prompt_mask, mask)
    ]
    return ids[0], prompt_mask, ids[1], mask


# catches: a place that is read in the rectangle and not in the line, and rows of a mini-batch whose
# last bits would depend on who stands beside them
@pytest.mark.parametrize("dtype, near", [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("lora", [False, True])
def test_logprobs_and_values(positions, lora, dtype, near):
    torch.manual_seed(0)
    policy, rows = (
        AutoModelForCausalLM.from_config(copy.deepcopy(PLAIN["llama"])).to(dtype),
        batch(),
    )
    value = scorer_from(policy, 3)
    if lora:
        policy = get_peft_model(
            policy,
            LoraConfig(
                r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False
            ),
        )
    plain, tight, wide = (
        response_logprobs(policy, *rows, pad_to_multiple_of=m).logprobs for m in (None, 1, 16)
    )
    assert (tight - plain).abs().max() < near and (wide - plain).abs().max() < near
    tokens = int(rows[1].sum() + rows[3].sum()) - 6  # each row without its last
    assert positions[1:] == [torch.Size([1, tokens])]
    del positions[:]
    values = [
        response_values(value, *rows, pad_to_multiple_of=m, after_last=last)[:, :7][rows[3]]
        for m, last in ((None, True), (1, False), (1, True), (16, False))
    ]
    assert all((each - values[0]).abs().max() < 2e-6 for each in values[1:])
    assert positions[1:] == [torch.Size([1, tokens]), torch.Size([1, tokens + 6])]


# ---- A run ----

TOGETHER = dict(
    per_device_train_batch_size=8, gradient_accumulation_steps=1
)  # rollout and step take the same rows


# catches: an update that is not that of the rectangle, a run in which it is never done, and rows
# whose last bits would depend on their company in rollout and step
@pytest.mark.parametrize(
    "changes, end_to_end",
    [
        (TOGETHER, True),
        (TOGETHER | dict(kl_estimator="full", keep_forward_gib=0.0), True),
        ({}, False),
        (TOGETHER | dict(num_mini_batches=2), False),
        (TOGETHER | dict(reward_slot="after_eos"), True),
    ],
)
def test_a_run(ppo, positions, changes, end_to_end):
    def run(**more):
        trainer = ppo(
            num_ppo_epochs=2, optim="sgd", learning_rate=0.1, **changes | more
        )  # Adam makes much of the last bit of a small gradient
        del positions[:]
        trainer.train()
        return trainer, len(positions)

    (one, lines), (other, none) = run(), run(trim_padding=False)
    assert none == 0 and (lines > 10 if end_to_end else lines == 0)
    assert (
        max((a - b).abs().max() for a, b in zip(weights(one).values(), weights(other).values()))
        < 1e-6
    )
    for ours, theirs in zip(logs(one), logs(other), strict=True):
        assert untimed(ours) == pytest.approx(untimed(theirs), abs=2e-5, rel=2e-5)
