"What nobody reads is not worked out, and what is read stays the same."

from __future__ import annotations

import copy
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    ModernBertConfig,
    OPTConfig,
    Qwen3Config,
)

import rlhf_nb.models
import rlhf_nb.reward
import rlhf_nb.sft
from rlhf_nb.masks import left_pad, right_pad
from rlhf_nb.models import (
    read_at,
    response_values,
    scorer_from,
    sequence_scores,
    tiny_policy,
    token_scores,
)
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.sft import SFTConfig, SFTTrainer, TokenLossTrainer

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
FAMILIES = dict(
    neox=(GPTNeoXConfig(**SMALL), 2),
    llama=(LlamaConfig(**SMALL, **FEWER), 3),
    qwen3=(Qwen3Config(**SMALL, **FEWER, head_dim=8), 3),
    gemma2=(Gemma2Config(**SMALL, **FEWER, head_dim=8), 3),
    gpt2=(GPT2Config(**SMALL, n_inner=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), 2),
    mixtral=(MixtralConfig(**SMALL, **FEWER, num_local_experts=4), 3),
    opt=(OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, dropout=0), 0),
)


def body_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModel.from_config(copy.deepcopy(FAMILIES[name][0]))


def some_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    "Five rows, a mask with padding on the right, and seven places to read, of real tokens."
    ids = torch.randint(2, 40, (5, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(11) < torch.tensor([[11], [9], [4], [1], [7]])
    return ids, mask.long(), torch.tensor([0, 3, 10, 11 + 8, 22 + 3, 33, 44 + 2])


def asked(
    body: nn.Module, places: torch.Tensor | None, read: object = read_at
) -> list[torch.Tensor]:
    "The states that are read, and the gradients of a sum over them."
    ids, mask, wanted = some_rows()
    body.zero_grad()
    with read(body, places):
        states = body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    found = states.flatten(0, 1)[wanted]
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
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_read_stays_the_same(name):
    body, places = body_of(name), some_rows()[2]
    plain, spared = asked(body, None), asked(body, places)
    assert apart(plain, spared) <= 2e-6 and len(rlhf_nb.models._to_spare(body)) == FAMILIES[name][1]
    if name in ("llama", "qwen3", "neox"):
        with Rows(body) as seen, torch.no_grad(), read_at(body, places):
            body(input_ids=some_rows()[0], use_cache=False)
        few = dict(neox=3, llama=5, qwen3=5)[name]  # dense and two of the MLP; q, o and three
        assert (
            seen.count(7) == few
            and seen.count(55) == len(seen) - few
            and len(seen) == dict(neox=8, llama=14, qwen3=14)[name]
        )
    with read_at(body, None):
        assert not any(part._forward_hooks for part in body.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in body.modules())


# catches: an adapter that is passed by
def test_with_lora():
    policy = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["llama"][0]))
    adapted = get_peft_model(
        policy, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    body = adapted.get_base_model().get_decoder()
    plain, spared = asked(body, None), asked(body, some_rows()[2])
    assert (
        apart(plain, spared) <= 2e-6
        and sum(x.abs().max() > 0 for x in plain[1:]) >= 26
        and len(rlhf_nb.models._to_spare(body)) == 3
    )


def classifier(config) -> nn.Module:
    config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(config)


# catches: scores and values of another place
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_and_values(name):
    value = (
        classifier(copy.deepcopy(FAMILIES[name][0])).eval()
        if name != "neox"
        else scorer_from(AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[name][0]))).eval()
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
    batch, real = (
        (*left_pad(rows, 0), *right_pad(rows[::-1], 0)),
        torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1] * 7]).bool(),
    )
    plain, closed = (
        response_values(value, *batch, **more)[real] for more in ({}, dict(pad_to_multiple_of=1))
    )
    assert torch.allclose(plain, closed, atol=1e-6)


# ---- Where it is not safe ----


# catches: a layer that is called again in the backward pass, when nobody knows what was read
@pytest.mark.parametrize("name", ["neox", "llama", "gpt2"])
def test_not_under_checkpointing(name):
    body, places = body_of(name).train(), some_rows()[2]
    plain = asked(body, None)
    body.activation_checkpointing_enable()
    assert rlhf_nb.models._to_spare(body) == [] and apart(plain, asked(body, places)) <= 2e-6
    with torch.no_grad():
        assert apart(plain[:1], [asked_without_gradient(body.eval(), places)]) <= 2e-6
    assert rlhf_nb.models._to_spare(body) != []  # nothing is called again here


def asked_without_gradient(body: nn.Module, places: torch.Tensor) -> torch.Tensor:
    ids, mask, wanted = some_rows()
    with read_at(body, places):
        return body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state.flatten(
            0, 1
        )[wanted]


# catches: dropout that falls on other positions, somebody who listens and is told less, a wrapped
# layer, weights in parts
def test_not_where_it_would_show():
    def spares(change, name="llama"):
        body = body_of(name).train()
        change(body)
        return bool(rlhf_nb.models._to_spare(body))

    assert spares(lambda body: None)
    assert not spares(lambda body: body.layers[-1].mlp.add_module("drop", nn.Dropout(0.1)))
    assert spares(lambda body: body.layers[-1].mlp.add_module("drop", nn.Dropout(0.0)))
    assert not spares(
        lambda body: body.layers[-1].mlp.up_proj.register_forward_hook(lambda *_: None)
    )
    assert not spares(
        lambda body: body.layers[-1].self_attn.q_proj.register_forward_pre_hook(lambda *_: None)
    )
    assert not spares(
        lambda body: body.layers[-1].register_forward_hook(lambda *_: None)
    ) and spares(lambda body: body.register_forward_hook(lambda *_: None))
    assert not spares(lambda body: body.layers.__setitem__(-1, nn.Sequential(body.layers[-1])))
    assert not spares(lambda body: setattr(body.layers[-1].mlp.up_proj.weight, "ds_id", 3))


# catches: trust in a name: here each position of the MLP looks at those before it
def test_an_mlp_that_mixes_positions_is_found_out():
    body = body_of("llama")
    mlp = body.layers[-1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x.cumsum(1))
    assert (
        rlhf_nb.models._to_spare(body) == []
        and apart(asked(body, None), asked(body, some_rows()[2])) == 0.0
    )


# ---- The trainers that use it ----

WORDS = [f"w{i}" for i in range(30)]


@pytest.fixture(scope="module")
def told() -> tuple:
    "A tokenizer, prompts and completions of unlike lengths."
    from rlhf_nb.models import train_tokenizer

    texts = [" ".join(WORDS[(i * 7 + k * k) % 30] for k in range(2 + i % 9)) for i in range(24)]
    return train_tokenizer([" ".join(WORDS)]), texts, texts[5:] + texts[:5]


def gradients(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def sft_losses(told, folder, read=None, **how) -> tuple[list, list]:
    tokenizer, prompts, completions = told
    args = SFTConfig(
        str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=8,
        **how,
    )
    trainer = SFTTrainer(
        tiny_policy(tokenizer, 0),
        args,
        Dataset.from_dict(dict(prompt=prompts, completion=completions)),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    count = (batch["labels"][:, 1:] != -100).sum()
    found = []
    for kind in (TokenLossTrainer, SFTTrainer):
        loss = kind.compute_loss(trainer, trainer.model, dict(batch), num_items_in_batch=count)
        found.append(gradients(loss, trainer.model))
    return tuple(found)


# catches: a label too many or too few, columns that are off by one, another mean
@pytest.mark.parametrize("how", [dict(), dict(packing=True)], ids=str)
def test_fine_tuning_has_the_same_gradient(told, tmp_path, how):
    plain, spared = sft_losses(told, tmp_path, **how)
    assert len(plain) > 20 and apart(plain, spared) <= 1e-6


# catches: logits of the whole post
def test_fine_tuning_makes_logits_of_the_completion_alone(told, tmp_path):
    tokenizer = told[0]
    args = SFTConfig(
        str(tmp_path),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=4,
    )
    rows = Dataset.from_dict(dict(prompt=[" ".join(WORDS[:20])] * 4, completion=["w1 w2 w3"] * 4))
    trainer, seen = (
        SFTTrainer(tiny_policy(tokenizer, 0), args, rows, processing_class=tokenizer),
        [],
    )
    trainer.model.get_output_embeddings().register_forward_hook(
        lambda head, args, out: seen.append(out.shape[:2])
    )
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model, dict(batch))
    assert seen == [
        torch.Size([4, 5])
    ]  # three words and the stop token, and the one after it, which nobody counts


def reward_losses(told, folder, kind=RewardTrainer) -> tuple[list, list]:
    tokenizer, prompts, chosen = told
    data = Dataset.from_dict(dict(prompt=prompts, chosen=chosen, rejected=chosen[3:] + chosen[:3]))
    args = RewardConfig(
        str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=8,
    )
    trainer = kind(scorer_from(tiny_policy(tokenizer, 0)), args, data, processing_class=tokenizer)
    batch, found, module = (
        next(iter(trainer.get_train_dataloader())),
        [],
        sys.modules[kind.__module__],
    )
    for read in (lambda *_: nullcontext(), module.read_at):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "read_at", read)
            found.append(gradients(trainer.compute_loss(trainer.model, dict(batch)), trainer.model))
    return tuple(found)


# catches: a last layer that is spared at the very token which is read
def test_a_reward_model_has_the_same_gradient(told, tmp_path):
    plain, spared = reward_losses(told, tmp_path)
    assert len(plain) > 20 and apart(plain, spared) <= 1e-6


# catches: trust in every classifier: this one reads its first token
def test_a_classifier_that_reads_elsewhere_is_left_alone():
    known = classifier(LlamaConfig(**SMALL))
    other = classifier(ModernBertConfig(**SMALL, local_attention=4))
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 3, 4]])
    assert (
        rlhf_nb.reward._places_read(known, ids).tolist() == [2, 7]
        and rlhf_nb.reward._places_read(other, ids) is None
    )
    known.config.pad_token_id = None
    assert rlhf_nb.reward._places_read(known, ids) is None


# ---- Wrong programs ----

WRONG = {
    "keys too": (
        "models",
        '("q_proj", "o_proj", "dense", "c_proj")',
        '("q_proj", "k_proj", "o_proj", "dense", "c_proj")',
    ),
    "the place before": (
        "models",
        "args[0].flatten(0, 1).index_select(0, places)",
        "args[0].flatten(0, 1).index_select(0, (places - 1).clamp(min=0))",
    ),
    "put back in order": (
        "models",
        "everywhere.index_copy_(0, places, found[0])",
        "everywhere.index_copy_(0, torch.arange(len(places)), found[0])",
    ),
    "checkpointing forgotten": ("models", "if again or chance", "if chance"),
    "dropout forgotten": ("models", "if again or chance", "if again"),
    "listeners forgotten": ("models", "chance or heard", "chance"),
    "names trusted": (
        "models",
        "_spare[body] = _says_the_same(body, parts)",
        "_spare[body] = True",
    ),
    "one label less": ("sft", "counted.any(0).nonzero()[0])", "counted.any(0).nonzero()[0]) + 1"),
    "the token after": ("sft", "pad(counted, (0, 1))", "pad(counted, (1, 0))"),
    "the token before": ("reward", ".argmax(1) + rows", ".argmax(1) - 1 + rows"),
}


def wrong_module(name: str, old: str, new: str, monkeypatch) -> object:
    "A module of the package with one passage changed."
    plain = sys.modules[f"rlhf_nb.{name}"]
    text = Path(plain.__file__).read_text()
    assert text.count(old) == 1, (
        f"{old!r} stands {text.count(old)} times in {name}.py: name the passage anew"
    )
    wrong = importlib.util.module_from_spec(
        importlib.util.spec_from_loader(f"rlhf_nb.wrong_{name}", loader=None)
    )
    monkeypatch.setitem(sys.modules, wrong.__name__, wrong)
    exec(compile(text.replace(old, new), f"wrong_{name}.py", "exec"), wrong.__dict__)
    return wrong


# catches: tests above that would let these pass
@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_seen(name, told, tmp_path, monkeypatch):
    where, *passage = WRONG[name]
    wrong = wrong_module(where, *passage, monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        if where == "models":
            monkeypatch.setattr(rlhf_nb.models, "_to_spare", wrong._to_spare)
            monkeypatch.setattr(rlhf_nb.models, "_only_at", wrong._only_at)
            monkeypatch.setattr(sys.modules[__name__], "read_at", wrong.read_at)
            test_what_is_read_stays_the_same("llama")
            test_not_under_checkpointing("llama")
            test_not_where_it_would_show()
            test_an_mlp_that_mixes_positions_is_found_out()
        if where == "sft":
            monkeypatch.setattr(sys.modules[__name__], "SFTTrainer", wrong.SFTTrainer)
            monkeypatch.setattr(sys.modules[__name__], "TokenLossTrainer", wrong.TokenLossTrainer)
            test_fine_tuning_has_the_same_gradient(told, tmp_path, dict())
        if where == "reward":
            assert apart(*reward_losses(told, tmp_path, wrong.RewardTrainer)) <= 1e-6


# catches: a router that is heard at fewer positions than there are, so that the loss which balances
# the experts is another one, or none
def test_routers_that_are_asked_for_see_every_position():
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
        with read_at(model.base_model, some):
            found.append(
                gradients(
                    model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).aux_loss,
                    model,
                )
            )
    assert len(found[0]) > 4 and apart(*found) <= 1e-6
