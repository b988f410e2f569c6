"""Rows of like length together, padding left out, or rows end to end: the same numbers as the
rectangle."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import crossed
from ppo_fixtures import PROMPTS, logs, scored, untimed, weights
from test_last_layer import apart
from torch import tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

import rlhf_nb.fast_logprobs
import rlhf_nb.forward
import rlhf_nb.models
import rlhf_nb.ppo
import rlhf_nb.trainer
from rlhf_nb.base.opened import PACKED_ATTENTION, reads_end_to_end
from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.forward import Forward, PolicyAndValue, ValueHead, micro_batches
from rlhf_nb.models import response_values, scorer_from
from rlhf_nb.packing import Packed, pack
from rlhf_nb.rollout import Rollout

SMALL = dict(
    vocab_size=23,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
MODELS = dict(
    neox=GPTNeoXConfig(**SMALL, intermediate_size=64),
    llama=LlamaConfig(**SMALL, intermediate_size=64),
    qwen2=Qwen2Config(**SMALL, intermediate_size=64, num_key_value_heads=2),
    gpt2=GPT2Config(**SMALL, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
)


def rows(seed=0, n=6, prompt=19, response=14) -> tuple[torch.Tensor, ...]:
    "Prompts of 1 to 19 tokens, responses of 1 to 14, and ids on padding that no embedding has."
    draw = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(1, most + 1, (n, 1), generator=draw) for most in (prompt, response)]
    prompt_mask = torch.arange(prompt) >= prompt - lengths[0]
    mask = torch.arange(response) < lengths[1]
    ids = [
        torch.randint(2, 23, m.shape, generator=draw).masked_fill(~m, -100)
        for m in (prompt_mask, mask)
    ]
    return ids[0], prompt_mask, ids[1], mask


# ---- Closing up ----


# catches: a place that is off by one, padding that is read, positions that padding moves, a value
# after the end that is not there
@pytest.mark.parametrize("multiple", [1, 4, 16])
@pytest.mark.parametrize("name", MODELS)
def test_closed_up_rows_give_the_same(name, multiple):
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]))
    value, batch = scorer_from(policy), rows()
    mask = batch[3]
    one_more = torch.cat([torch.ones(6, 1, dtype=torch.bool), mask], 1)
    for pair in (PolicyAndValue(policy, value), PolicyAndValue(policy, ValueHead(policy))):
        torch.nn.init.normal_(pair.value.score.weight)
        found = []
        for closing in ({}, dict(align=multiple)):
            pair.zero_grad()
            logprobs, entropy, values = pair(*batch, entropy="learn", **closing)
            ((logprobs * torch.arange(14) + entropy + values)[mask]).sum().backward()
            found.append(
                [logprobs, entropy, values[mask]]
                + [p.grad for p in pair.parameters() if p.grad is not None]
            )
        assert len(found[0]) > 20
        for a, b in zip(*found):
            assert (a - b).abs().max() <= 1e-5 * max(1.0, a.abs().max())
    plain, closed = (
        response_values(value, *batch, **closing) for closing in ({}, dict(align=multiple))
    )
    assert (plain - closed).abs().max() < 1e-5
    assert plain[~one_more].abs().sum() == closed[~one_more].abs().sum() == 0


# ---- Rows end to end ----


@pytest.fixture
def end_to_end(monkeypatch) -> list[torch.Size]:
    """From now on every model reads rows end to end, as one with flash attention does: sdpa tells
    them apart by their position ids as well. The shapes of what each body reads."""
    shapes: list[torch.Size] = []

    def note(*given, **more) -> Packed:
        packed = pack(*given, **more)
        shapes.append(packed.input_ids.shape)
        return packed

    for module in (rlhf_nb.models, rlhf_nb.fast_logprobs, rlhf_nb.forward):
        monkeypatch.setattr(module, "reads_end_to_end", lambda model: True)
        monkeypatch.setattr(module, "pack", note)
    return shapes


def sharp(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    "A policy whose attention and logits are far from even, so that a leak would show."
    torch.manual_seed(0)
    config = copy.deepcopy(MODELS[name])
    config.initializer_range = 0.2
    return AutoModelForCausalLM.from_config(config).to(dtype)


def measured(pair: PolicyAndValue, batch: tuple, align: int | None) -> list[torch.Tensor]:
    "Log-probs, entropy, values and all gradients of a loss on the real tokens."
    mask = batch[3]
    pair.zero_grad()
    logprobs, entropy, values = pair(*batch, entropy="learn", align=align)
    pulls = torch.linspace(-1, 2, mask.numel()).view_as(mask)
    ((logprobs * pulls + entropy + values * pulls.flip(0))[mask]).mean().backward()
    gradients = [p.grad.clone() for p in pair.parameters() if p.grad is not None]
    return [logprobs.detach(), entropy.detach(), values.detach()[mask], *gradients]


# catches: a row that reads the one before it, positions that go on, a place that is read in the
# rectangle and not in the line, padding that a model still computes
@pytest.mark.parametrize("dtype, near", [(torch.float32, 2e-6), (torch.float64, 2e-6)], ids=str)
@pytest.mark.parametrize("trunk", [False, True])
@pytest.mark.parametrize("name", ["neox", "llama", "qwen2"])
def test_rows_end_to_end_give_the_same(name, trunk, dtype, near, end_to_end):
    policy = sharp(name, dtype)
    batch = rows()
    pair = PolicyAndValue(policy, ValueHead(policy) if trunk else scorer_from(policy, 3).to(dtype))
    torch.nn.init.normal_(pair.value.score.weight)
    plain = measured(pair, batch, None)
    assert {shape[0] for shape in end_to_end} == {6}
    end_to_end.clear()
    line = measured(pair, batch, 16)
    tokens = int(batch[1].sum() + batch[3].sum())
    assert len(plain) > 20 and set(end_to_end) == {torch.Size([1, tokens])}
    assert apart(plain, line) < near


# catches: a slice of rows whose numbers depend on which rows are beside them
@pytest.mark.parametrize("name", ["neox", "llama", "qwen2"])
def test_a_row_does_not_depend_on_its_neighbours(name, end_to_end):
    policy = sharp(name)
    value, batch = scorer_from(policy, 3), rows()
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    for measure in (
        lambda *some: response_logprobs(policy, *some, align=1).logprobs,
        lambda *some: response_values(value, *some, align=1),
    ):
        together, shuffled = measure(*batch), measure(*[x[order] for x in batch])
        alone = torch.cat([measure(*[x[i : i + 1] for x in batch]) for i in range(6)])
        assert (together - alone).abs().max() < 2e-6
        assert (together[order] - shuffled).abs().max() < 2e-6


# catches: a mask of N x N where attention is written out, or a flash kernel that is not made use of
def test_who_reads_rows_end_to_end():
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS["llama"]))
    for name in ("sdpa", "eager", *PACKED_ATTENTION):
        model.config._attn_implementation = name
        assert reads_end_to_end(model) == (name in PACKED_ATTENTION)
        assert reads_end_to_end(model.model) == reads_end_to_end(model)
    assert not reads_end_to_end(torch.nn.Linear(2, 2))


# catches: a window that counts the tokens of the rows before
def test_a_window_is_that_of_the_row(end_to_end):
    torch.manual_seed(0)
    config = MistralConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, sliding_window=3)
    policy = AutoModelForCausalLM.from_config(config)
    pair, batch = PolicyAndValue(policy, ValueHead(policy)), rows()
    assert apart(measured(pair, batch, None), measured(pair, batch, 1)) < 2e-6


# catches: padding that is looked up after all, or that brings a number through attention
def test_padding_can_hold_anything(end_to_end):
    torch.manual_seed(0)
    policy, batch = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS["llama"])), rows()
    clean = response_logprobs(policy, *batch, align=1).logprobs
    with torch.no_grad():
        policy.model.embed_tokens.weight[0] = torch.nan  # what `pack` writes on padding
    assert torch.equal(clean, response_logprobs(policy, *batch, align=1).logprobs)


# catches: an update that is not that of the rectangle, a run in which rows never lie end to end
@pytest.mark.parametrize("more", [dict(), dict(kl_estimator="full")], ids=str)
def test_a_run_end_to_end(ppo, more, end_to_end):
    def run(**how):
        # Adam would make much of the last bit of a small gradient
        trainer = ppo(num_ppo_epochs=2, optim="sgd", learning_rate=0.1, **more, **how)
        end_to_end.clear()
        trainer.train()
        return trainer, sum(shape[0] == 1 for shape in end_to_end)

    (one, lines), (other, none) = run(trim_padding=True), run(trim_padding=False)
    assert lines > 10 and none == 0
    ours, theirs = weights(one), weights(other)
    assert max((ours[name] - theirs[name]).abs().max() for name in ours) < 2e-6
    for a, b in zip(logs(one), logs(other), strict=True):
        assert untimed(a) == pytest.approx(untimed(b), abs=2e-5, rel=2e-5)


# ---- Which rows go together ----


# catches: a row twice or never, a part that outgrows its limits, a short row beside a long one,
# fewer parts than another rank has
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 200)),
    st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
def test_every_row_is_in_one_part(lengths, most, budget, at_least):
    lengths = tensor(lengths)
    parts = micro_batches(lengths, most, budget, at_least)
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(lengths)))
    ordered = [lengths[i].item() for part in parts for i in part.tolist()]
    assert ordered == sorted(ordered) and len(parts) >= min(at_least, len(lengths))
    for part in parts:
        assert 1 <= len(part) <= most
        assert budget is None or len(part) == 1 or len(part) * lengths[part].max() <= budget
    if at_least == 1 and budget is None:
        assert len(parts) == -(-len(lengths) // most)


# catches: a rank that outgrows the limit of tokens where another one has more parts
def test_a_rank_with_more_parts_than_it_needs_keeps_to_its_limit():
    mask = torch.arange(20) < tensor([2] * 8 + [20] * 4)[:, None]
    r = Rollout(mask[:, :0].long(), mask[:, :0], mask.long(), mask, mask.any(1))
    parts = Forward(tokens=24, most=lambda n: n + 1).split(r, torch.arange(12), 12)
    assert [p.tolist() for p in parts] == [[*range(4)], [*range(4, 8)], [8], [9], [10], [11]]


# ---- Updates ----


def updated(ppo, r=None, name="neox", **settings) -> tuple:
    "A rollout of unlike lengths (sampled once), the weights after an update, and what it told."
    torch.manual_seed(0)
    trainer = ppo(
        model=AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name])),
        optim="sgd",
        learning_rate=0.1,
        response_length=9,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=6,
        total_episodes=48,
        entropy_coef=0.01,
        **settings,
    )
    if r is None:
        r = scored(trainer).select(torch.arange(24))
    told = trainer.update(r)
    return r, weights(trainer), untimed(told)


def check_same(a: tuple, b: tuple) -> None:
    for name in a[1]:
        assert (a[1][name] - b[1][name]).abs().max() <= 1e-6, name
    assert a[2].keys() == b[2].keys()
    for name in a[2]:
        assert a[2][name] == pytest.approx(b[2][name], rel=1e-4, abs=1e-5), name


# catches: rows left out, counted twice or normalised by the tokens of their part, values of another
# token
@pytest.mark.parametrize(
    "name, more",
    crossed(
        ["neox", "llama"],
        [
            dict(),
            dict(num_mini_batches=3),
            dict(share_value_trunk=True),
            dict(micro_batch_tokens=20),
            dict(micro_batch_tokens=10**6, num_ppo_epochs=1),
            dict(bootstrap_truncated=True, num_mini_batches=2),
        ],
    ),
)
def test_an_update_is_the_same(ppo, name, more):
    plain = updated(ppo, name=name, **more, trim_padding=False)
    assert len(set((plain[0].prompt_mask.sum(1) + plain[0].mask.sum(1)).tolist())) > 3
    check_same(plain, updated(ppo, plain[0], name=name, **more | dict(trim_padding=True)))
    check_same(plain, updated(ppo, plain[0], name=name, **more))  # float32: on by itself


# catches: rows that meet other rows in the update than in the rollout, and add up in another order
@pytest.mark.parametrize(
    "name, sizes",
    crossed(
        list(MODELS),
        [
            dict(),
            dict(num_mini_batches=3),
            dict(local_rollout_forward_batch_size=3),
            dict(micro_batch_tokens=17, num_mini_batches=2),
        ],
    ),
)
def test_rollout_and_update_agree_to_the_bit(ppo, name, sizes):
    found, measure = [], rlhf_nb.ppo.policy_diagnostics

    def watch(logprobs, old, advantages, mask, *more):
        found.append((logprobs - old)[mask].abs().max().item())
        return measure(logprobs, old, advantages, mask, *more)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)  # logits as large as those of trained models
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlhf_nb.ppo, "policy_diagnostics", watch)
        trainer = ppo.trained(
            model=model,
            learning_rate=0.0,
            per_device_train_batch_size=6,
            gradient_accumulation_steps=4,
            total_episodes=24,
            response_length=9,
            num_ppo_epochs=2,
            trim_padding=True,
            **sizes,
        )
    assert len(found) >= 8 and max(found) <= 1e-6
    assert abs(logs(trainer)[-1]["val/ratio"] - 1) <= 1e-6


# catches: padding computed in float32, or left out where rollout and update would no longer agree
# without being asked
@pytest.mark.parametrize(
    "how, trims",
    [
        (dict(), True),
        (dict(bf16=True), False),
        (dict(bf16=True, trim_padding=True), True),
        (dict(trim_padding=False), False),
    ],
    ids=str,
)
def test_what_a_model_is_given(ppo, how, trims):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS["neox"]))
    how = how | dict(model=model, response_length=24, local_rollout_forward_batch_size=4)
    trainer, seen = ppo(**how), []
    trainer.model.policy.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape) if torch.is_grad_enabled() else None
    )
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS)))
    trainer.update(r)
    width = r.prompt_ids.shape[1] + r.response_ids.shape[1]
    assert seen and trims == (min(shape[1] for shape in seen) == 16 < width)
    if not trims:
        assert {shape[1] for shape in seen} == {width}


# catches: a positive number that is not asked for, said too late or without its name
def test_a_budget_is_positive(ppo):
    with pytest.raises(ValueError, match="micro_batch_tokens is 0: give a whole number of at"):
        ppo(micro_batch_tokens=0)
