"The frozen layers below the first one that learns run once a row, and nothing else changes."

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from ppo_fixtures import PROMPTS, SIZES, logs, untimed, weights
from test_last_layer import apart, config_of
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import rlhf_nb.trainer
from rlhf_nb.base import last_layer
from rlhf_nb.base.lower_layers import frozen_layers, layers_of, lower_layers_once
from rlhf_nb.base.opened import body_of
from rlhf_nb.packing import Packed, pack
from rlhf_nb.training.model_loading import tiny_policy

OFTEN = ("gemma3_text", "gpt2", "gpt_neox", "llama", "mixtral")
EXPERTS = ("mixtral", "qwen3_moe")  # in float32 only


def lora(model, layers: str = "23", **changes) -> LoraConfig:
    "An adapter for every linear part of some layers."
    linear = torch.nn.Linear, Conv1D
    names = [
        name
        for name, part in model.named_modules()
        if isinstance(part, linear) and re.search(rf"\b(layers|h)\.[{layers}]\.", name)
    ]
    return LoraConfig(r=2, target_modules=names, init_lora_weights=False, **changes)


def adapted(family: str, layers: str = "23", **changes):
    "Four layers with adapters on the last two."
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, num_hidden_layers=4))
    model = get_peft_model(model, lora(model, layers, **changes))
    return model if family in EXPERTS else model.double()


def rows(*order: int) -> tuple[Packed, Tensor]:
    "Some of four rows, in an order, and which of their tokens are real."
    lengths = torch.tensor([7, 3, 5, 2])[list(order)]
    real = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    ids = torch.where(real, torch.arange(2, 38).view(4, 9)[list(order), : real.shape[1]], 0)
    return pack(ids[:, :1], real[:, :1], ids[:, 1:], real[:, 1:], align=1), real


def outputs(model, *order: int) -> list[Tensor]:
    "States of real tokens, and gradients of a sum over them."
    packed, real = rows(*order)
    body = body_of(model)
    model.zero_grad()
    states = body(**packed.inputs).last_hidden_state[real]
    (states * torch.linspace(-1, 2, states.numel()).view_as(states)).sum().backward()
    learning = [w for w in model.parameters() if w.requires_grad]
    return [states.detach(), *(w.grad.clone() for w in learning if w.grad is not None)]


# catches: states of another row or of padding, lower layers that run all the same, hooks that stay
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.weekly)
        for name in sorted(last_layer.FAMILIES)
    ],
)
def test_states_and_gradients_stay_the_same(family):
    model = adapted(family)
    body = body_of(model)
    orders = [(0, 1, 2, 3), (3, 0), (1,), (2, 1)]
    plain = [outputs(model, *order) for order in orders]
    calls: list[int] = []
    layers = layers_of(body)
    forward = type(layers[0]).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(layers[0]), "forward", lambda s, *a, **k: calls.append(s) or forward(s, *a, **k)
        )
        with lower_layers_once(model) as kept:
            once = [outputs(model, *order) for order in orders]
    assert frozen_layers(body) == 2 and len(kept.states) == 4
    assert [calls.count(layer) for layer in layers] == [1, 1, 4, 4]
    assert max(apart(a, b) for a, b in zip(plain, once)) <= (3e-5 if family in EXPERTS else 1e-9)
    assert not any(m._forward_pre_hooks or "forward" in vars(m) for m in body.modules())


# catches: layers left out below an adapter, a trained embedding, dropout, an unknown family
def test_what_changes_is_not_skipped():
    count = lambda *a, **k: frozen_layers(body_of(adapted("llama", *a, **k)))
    assert [count(layers) for layers in ("13", "0123", "3")] == [1, 0, 3]
    assert count(modules_to_save=["embed_tokens"]) == 0
    body = body_of(adapted("llama"))
    layers_of(body)[1].mlp.act_fn = torch.nn.Dropout(0.1)
    assert frozen_layers(body) == 0
    other = adapted("llama", "0")  # frozen, as the adapter of a reference is
    other.add_adapter("second", lora(other.get_base_model(), "2"))
    other.set_adapter("second")
    assert frozen_layers(body_of(other)) == 0
    assert frozen_layers(body_of(adapted("llama").merge_and_unload())) == 0


# catches: an update that is another one, sampling that reads kept states, memory that stays
def test_a_run_is_the_same(ppo, letters, monkeypatch):
    upper = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=r".*layers\.1\..*query_key_value")
    settings = dict(learning_rate=1e-2, share_value_trunk=True, parts=dict(peft_config=upper))

    def run(once):
        monkeypatch.setattr(rlhf_nb.trainer, "lower_layers_once", once)
        trainer = ppo.trained(
            model=tiny_policy(letters, 0, **SIZES | dict(num_hidden_layers=2)), **settings
        )
        return weights(trainer), [untimed(log) for log in logs(trainer)]

    read = []

    @contextlib.contextmanager
    def counted(model):
        with lower_layers_once(model) as kept:
            yield
        read.append(len(kept.states))

    plain, fast = run(contextlib.nullcontext), run(counted)
    assert read == [8, 8, 8] and len(PROMPTS) >= 8
    for a, b in zip(plain[1], fast[1], strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    assert all(torch.allclose(plain[0][n], fast[0][n], atol=1e-5) for n in plain[0])
