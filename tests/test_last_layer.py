"The last layer computes only what is read, and what is read stays the same."

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    ModernBertConfig,
    PreTrainedConfig,
    Trainer,
)

import rlhf_nb.reward
import rlhf_nb.sft
from rlhf_nb.base import last_layer
from rlhf_nb.masks import left_pad, right_pad
from rlhf_nb.models import response_values, scorer_from, sequence_scores, token_scores
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.training.model_loading import tiny_policy

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
FEWER = dict(num_key_value_heads=2)
STILL = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
HEADS = FEWER | dict(head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
# what a family needs beside SMALL; keys that heads share where nothing is said
MORE = dict(
    gemma=HEADS,
    gemma2=HEADS,
    gemma3_text=HEADS,
    gpt2=STILL | dict(n_inner=64),
    gpt_bigcode=STILL | dict(n_inner=64),
    gpt_neox={},
    mixtral=FEWER | dict(num_local_experts=4),
    phi={},
    phi3=FEWER | dict(resid_pdrop=0.0),
    qwen3=HEADS,
    qwen3_moe=HEADS | EXPERTS,
    starcoder2=FEWER | dict(residual_dropout=0.0),
)
# parts of the last layer: the output of attention and the MLP, and the queries where they are apart
PARTS = dict.fromkeys(last_layer.FAMILIES, 3) | dict(gpt_neox=2, gpt2=2, gpt_bigcode=2, phi3=2)
OTHERS = dict(
    opt=dict(ffn_dim=64, word_embed_proj_dim=32, dropout=0),
    gpt_oss=HEADS | dict(num_local_experts=4),  # its experts return a pair
    cohere2=FEWER,
)


def config_of(family: str, **more: object) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **SMALL | (MORE | OTHERS).get(family, FEWER) | more)


def body_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModel.from_config(config_of(family))


def some_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    "Five rows, a mask with padding on the right, and seven places to read, of real tokens."
    ids = torch.randint(2, 40, (5, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(11) < torch.tensor([[11], [9], [4], [1], [7]])
    return ids, mask.long(), torch.tensor([0, 3, 10, 11 + 8, 22 + 3, 33, 44 + 2])


def read(body: nn.Module, places: torch.Tensor | None) -> list[torch.Tensor]:
    "The states that are read, and the gradients of a sum over them."
    ids, mask, wanted = some_rows()
    body.zero_grad()
    with last_layer.read_at(body, places):
        states = body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    states = states.flatten(0, 1)[wanted]
    (states * torch.linspace(-1, 2, states.numel()).view_as(states)).sum().backward()
    return [
        states.detach(),
        *(torch.zeros(()) if p.grad is None else p.grad.clone() for p in body.parameters()),
    ]


def apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    "The largest difference, of the largest number of each tensor."
    return max(
        ((x - y).abs().max() / x.abs().max().clamp(min=1.0)).item()
        for x, y in zip(a, b, strict=True)
    )


class Rows:
    "How many positions each part of the last layer works on."

    def __init__(self, body: nn.Module):
        self.seen, self.body = [], body

    def __enter__(self) -> list[int]:
        plain, self.kept = nn.functional.linear, nn.functional.linear

        def linear(x, *more):
            self.seen.append(x.numel() // x.shape[-1])
            return plain(x, *more)

        nn.functional.linear = linear
        return self.seen

    def __exit__(self, *_):
        nn.functional.linear = self.kept


# ---- The same where it is read, less elsewhere ----


# catches: a part that looks at other positions, states put back in another place, gradients that
# are lost or counted twice, and work that is done all the same
@pytest.mark.parametrize("name", sorted(last_layer.FAMILIES))
def test_what_is_read_stays_the_same(name):
    body, places = body_of(name), some_rows()[2]
    plain, spared = read(body, None), read(body, places)
    assert apart(plain, spared) <= 2e-6 and sum(x.abs().sum() > 0 for x in plain[1:]) > 10
    assert len(last_layer.position_wise(body)) == PARTS[name]
    if name in ("llama", "qwen3", "gpt_neox"):
        with Rows(body) as seen, torch.no_grad(), last_layer.read_at(body, places):
            body(input_ids=some_rows()[0], use_cache=False)
        few = dict(gpt_neox=3, llama=5, qwen3=5)[name]  # dense and two of the MLP; q, o and three
        assert seen.count(7) == few
        assert seen.count(55) == len(seen) - few
        assert len(seen) == dict(gpt_neox=8, llama=14, qwen3=14)[name]
    with last_layer.read_at(body, None):
        assert not any(part._forward_hooks for part in body.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in body.modules())


# catches: a family that nobody has compared, taken apart by the names of its parts
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_left_alone(name):
    assert name not in last_layer.FAMILIES
    body = body_of(name)
    assert last_layer.position_wise(body) == []
    with last_layer.read_at(body, some_rows()[2]):
        assert not any(part._forward_hooks for part in body.modules())
    assert apart(read(body, None), read(body, some_rows()[2])) == 0.0


# catches: an adapter that is passed by
def test_with_lora():
    policy = AutoModelForCausalLM.from_config(config_of("llama"))
    adapted = get_peft_model(
        policy, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    body = adapted.get_base_model().get_decoder()
    plain, spared = read(body, None), read(body, some_rows()[2])
    assert apart(plain, spared) <= 2e-6
    assert sum(x.abs().max() > 0 for x in plain[1:]) >= 26
    assert len(last_layer.position_wise(body)) == 3


def classifier(config) -> nn.Module:
    config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(config)


# catches: scores and values of another place
@pytest.mark.parametrize("name", sorted(last_layer.FAMILIES - {"cohere", "granite"}))  # no scorers
def test_scores_and_values(name):
    value = (
        classifier(config_of(name)).eval()
        if name != "gpt_neox"
        else scorer_from(AutoModelForCausalLM.from_config(config_of(name))).eval()
    )
    rows = [[5, 6, 7, 8, 9, 3], [4], [7, 7, 2]]
    for pad in (left_pad, right_pad):
        ids, mask = pad(rows, 0)
        last = [int(row.nonzero().max()) for row in mask]
        assert torch.allclose(
            sequence_scores(value, ids, mask),
            token_scores(value, ids, mask)[range(3), last],
            atol=1e-6,
        )
    batch = (*left_pad(rows, 0), *right_pad(rows[::-1], 0))
    real = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1] * 7]).bool()
    plain, closed = (response_values(value, *batch, align=align) for align in (None, 1))
    assert torch.allclose(plain[real], closed[real], atol=1e-6)
    assert plain[~real].abs().sum() == closed[~real].abs().sum() == 0
    ids, mask = torch.cat([batch[0], batch[2]], 1), torch.cat([batch[1], batch[3]], 1)
    whole = token_scores(value, ids, mask)[:, batch[0].shape[1] - 1 :]
    assert torch.allclose(plain[real], whole[real], atol=1e-6)


# ---- Where it is not safe ----


# catches: a layer that is called again in the backward pass, when nobody knows what was read
@pytest.mark.parametrize("name", ["gpt_neox", "llama", "gpt2"])
def test_not_under_checkpointing(name):
    body, places = body_of(name).train(), some_rows()[2]
    plain = read(body, None)
    body.activation_checkpointing_enable()
    assert last_layer.position_wise(body) == [] and apart(plain, read(body, places)) <= 2e-6
    with torch.no_grad():
        assert apart(plain[:1], [read_without_gradient(body.eval(), places)]) <= 2e-6
    assert last_layer.position_wise(body) != []  # nothing is called again here


def read_without_gradient(body: nn.Module, places: torch.Tensor) -> torch.Tensor:
    ids, mask, wanted = some_rows()
    with last_layer.read_at(body, places):
        return body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state.flatten(
            0, 1
        )[wanted]


# catches: dropout that falls on other positions, a hook that sees fewer positions, a wrapped layer,
# sharded weights
def test_not_where_it_would_show():
    def spares(change, name="llama"):
        body = body_of(name).train()
        change(body)
        return bool(last_layer.position_wise(body))

    assert spares(lambda body: None)
    assert not spares(lambda body: body.layers[-1].mlp.add_module("drop", nn.Dropout(0.1)))
    assert spares(lambda body: body.layers[-1].mlp.add_module("drop", nn.Dropout(0.0)))
    assert not spares(
        lambda body: body.layers[-1].mlp.up_proj.register_forward_hook(lambda *_: None)
    )
    assert not spares(
        lambda body: body.layers[-1].self_attn.q_proj.register_forward_pre_hook(lambda *_: None)
    )
    assert not spares(lambda body: body.layers[-1].register_forward_hook(lambda *_: None))
    assert spares(lambda body: body.register_forward_hook(lambda *_: None))
    assert not spares(lambda body: body.layers.__setitem__(-1, nn.Sequential(body.layers[-1])))
    assert not spares(lambda body: setattr(body.layers[-1].mlp.up_proj.weight, "ds_id", 3))


# ---- The trainers that use it ----

WORDS = [f"w{i}" for i in range(30)]


@pytest.fixture(scope="module")
def texts() -> tuple:
    "A tokenizer, prompts and completions of unlike lengths."
    from rlhf_nb.training.model_loading import train_tokenizer

    rows = [" ".join(WORDS[(i * 7 + k * k) % 30] for k in range(2 + i % 9)) for i in range(24)]
    return train_tokenizer([" ".join(WORDS)]), rows, rows[5:] + rows[:5]


def gradients(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def sft_losses(texts, small_args, **how) -> tuple[list, list]:
    tokenizer, prompts, completions = texts
    args = small_args(SFTConfig, per_device_train_batch_size=8, **how)
    trainer = SFTTrainer(
        tiny_policy(tokenizer, 0),
        args,
        Dataset.from_dict(dict(prompt=prompts, completion=completions)),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    count = (batch["labels"][:, 1:] != -100).sum()
    found = []
    for kind in (Trainer, SFTTrainer):
        loss = kind.compute_loss(trainer, trainer.model, dict(batch), num_items_in_batch=count)
        found.append(gradients(loss, trainer.model))
    return tuple(found)


# catches: a label too many or too few, columns that are off by one, another mean
@pytest.mark.parametrize("how", [dict(), dict(packing=True)], ids=str)
def test_fine_tuning_has_the_same_gradient(texts, small_args, how):
    plain, spared = sft_losses(texts, small_args, **how)
    assert len(plain) > 20 and apart(plain, spared) <= 1e-6


# catches: logits of the whole post
def test_fine_tuning_makes_logits_of_the_completion_alone(texts, small_args):
    tokenizer = texts[0]
    args = small_args(SFTConfig, per_device_train_batch_size=4)
    rows = Dataset.from_dict(dict(prompt=[" ".join(WORDS[:20])] * 4, completion=["w1 w2 w3"] * 4))
    trainer = SFTTrainer(tiny_policy(tokenizer, 0), args, rows, processing_class=tokenizer)
    seen = []
    trainer.model.get_output_embeddings().register_forward_hook(
        lambda head, args, out: seen.append(out.shape[:2])
    )
    trainer.compute_loss(trainer.model, dict(next(iter(trainer.get_train_dataloader()))))
    # three words and the stop token, and the one after it, which nobody counts
    assert seen == [torch.Size([4, 5])]


def reward_losses(texts, small_args) -> tuple[list, list]:
    tokenizer, prompts, chosen = texts
    data = Dataset.from_dict(dict(prompt=prompts, chosen=chosen, rejected=chosen[3:] + chosen[:3]))
    args = small_args(RewardConfig, per_device_train_batch_size=8)
    scorer = scorer_from(tiny_policy(tokenizer, 0))
    trainer = RewardTrainer(scorer, args, data, processing_class=tokenizer)
    batch, found = next(iter(trainer.get_train_dataloader())), []
    for read in (lambda *_: nullcontext(), rlhf_nb.reward.read_at):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rlhf_nb.reward, "read_at", read)
            found.append(gradients(trainer.compute_loss(trainer.model, dict(batch)), trainer.model))
    return tuple(found)


# catches: a last layer that is spared at the very token which is read
def test_a_reward_model_has_the_same_gradient(texts, small_args):
    plain, spared = reward_losses(texts, small_args)
    assert len(plain) > 20 and apart(plain, spared) <= 1e-6


# catches: trust in every classifier: this one reads its first token
def test_a_classifier_that_reads_elsewhere_is_left_alone(monkeypatch):
    known = classifier(LlamaConfig(**SMALL))
    other = classifier(ModernBertConfig(**SMALL, local_attention=4))
    ids, read = torch.tensor([[5, 6, 7, 0], [8, 9, 3, 4]]), []
    monkeypatch.setattr(
        rlhf_nb.reward, "read_at", lambda body, places: nullcontext(read.append(places))
    )
    for model in (known, other):
        with rlhf_nb.reward.reading_last(model, ids, ids != 0):
            pass
    assert read[0].tolist() == [2, 7] and read[1] is None


# catches: a router that sees fewer positions than there are, so that the loss which balances
# the experts is another one, or none
def test_routers_that_are_read_see_every_position():
    ids, mask, places = some_rows()
    found = []
    for some in (None, places):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            MixtralConfig(
                **SMALL,
                **FEWER,
                num_local_experts=4,
                output_router_logits=True,
                router_aux_loss_coef=0.5,
            )
        )
        with last_layer.read_at(model.base_model, some):
            found.append(
                gradients(
                    model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).aux_loss,
                    model,
                )
            )
    assert len(found[0]) > 4 and apart(*found) <= 1e-6
