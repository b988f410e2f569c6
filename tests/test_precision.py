"""Trained weights are float32, whatever their folder was saved in; a warning where they are not."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from datasets import Dataset
from ppo_fixtures import SIZES, likes_c

import rlhf_nb.base.opened
from rlhf_nb.models import scorer_from
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.training.model_loading import load_policy, load_reward_model, load_scorer, tiny_policy

BF16, WIDE = torch.bfloat16, {torch.float32}


@pytest.fixture
def folders(letters, tmp_path):
    "A policy and a reward model that were saved in bfloat16, as most on the hub are."
    policy = tiny_policy(letters, 0, **SIZES)
    for name, model in dict(policy=policy, reward=scorer_from(policy, 3)).items():
        model.to(BF16).save_pretrained(tmp_path / name)
        letters.save_pretrained(tmp_path / name)
    return {name: str(tmp_path / name) for name in ("policy", "reward")}


@pytest.fixture
def warnings(monkeypatch):
    "Warnings of the package, whoever listens to its loggers."
    lines: list[str] = []
    for name in ("precision", "build"):
        logger = logging.getLogger(f"rlhf_nb.training.{name}")
        monkeypatch.setattr(logger, "warning", lines.append)
    return lines


def learning(model) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters() if p.requires_grad}


# catches: a checkpoint's own 16 bits taken over, where transformers' default has its way
@pytest.mark.parametrize("load", [load_policy, load_scorer, load_reward_model])
def test_a_name_gives_float32(folders, load):
    name = folders["policy" if load is load_policy else "reward"]
    assert {p.dtype for p in load(name).parameters()} == WIDE
    if load is not load_reward_model:
        assert load(name, dtype="auto").dtype == load(name, dtype=BF16).dtype == BF16


# catches: a policy, a reference or a value model (grown from a reward model that stays as it was
# saved) in 16 bits; a warning where there is nothing to warn of
@pytest.mark.parametrize("settings", [{}, dict(bf16=True), dict(share_value_trunk=True)])
def test_ppo_by_name_trains_float32(ppo, folders, warnings, settings):
    trainer = ppo(folders["reward"], model=folders["policy"], **settings)
    assert learning(trainer.model) == WIDE and trainer.ref_model.dtype == torch.float32
    assert trainer.reward_model.dtype == BF16 and not warnings
    assert "weights that learn" not in trainer.describe()
    before = [p.detach().clone() for p in trainer.policy.parameters()]
    trainer.step()
    moved = [(a != b).sum() for a, b in zip(before, trainer.policy.parameters())]
    assert sum(moved) / sum(p.numel() for p in before) > 0.5


# catches: a value model grown from a policy that is in 16 bits by request
def test_the_value_model_of_a_16_bit_policy_is_float32(ppo, folders, warnings):
    trainer = ppo(likes_c, model=load_policy(folders["policy"], dtype=BF16))
    assert learning(trainer.pair.value) == WIDE and learning(trainer.policy) == {BF16}
    assert len(warnings) == 1 and "weights that learn are in bfloat16" in warnings[0]
    assert "weights that learn in bfloat16" in trainer.describe()


# catches: a reference by name in another precision than the policy; one by request in silence
def test_the_reference_has_the_policys_precision(ppo, folders, warnings):
    by_name = ppo(likes_c, model=folders["policy"], parts=dict(ref_model=folders["policy"]))
    assert by_name.ref_model.dtype == torch.float32 and not warnings
    assert not by_name.rollout(["ab", "c"]).kl.any()
    coarse = load_policy(folders["policy"], dtype=BF16)
    trainer = ppo(likes_c, model=folders["policy"], parts=dict(ref_model=coarse))
    assert len(warnings) == 1
    assert "ref_model is in bfloat16 and the policy in float32" in warnings[0]
    assert trainer.rollout(["ab", "c"]).kl.any()


def trained(kind, given, letters, small_args):
    "SFT or reward training of one step."
    if kind is SFTTrainer:
        args = small_args(SFTConfig, max_steps=1)
        rows = dict(prompt=["ab"] * 4, completion=["c"] * 4)
    else:
        args = small_args(RewardConfig, max_steps=1)
        rows = dict(prompt=["ab"] * 4, chosen=["c"] * 4, rejected=["d"] * 4)
    trainer = kind(given, args, Dataset.from_dict(rows), processing_class=letters)
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind, name", [(SFTTrainer, "policy"), (RewardTrainer, "reward")])
def test_the_other_trainers_too(folders, letters, small_args, warnings, kind, name):
    assert learning(trained(kind, folders[name], letters, small_args).model) == WIDE
    assert not warnings
    load = load_policy if kind is SFTTrainer else load_scorer
    coarse = copy.deepcopy(load(folders[name], dtype=BF16))
    assert learning(trained(kind, coarse, letters, small_args).model) == {BF16}
    assert len(warnings) == 1 and "dtype=torch.float32" in warnings[0]


# catches: body and head compared in float32 before a run that computes in 16 bits, where flash
# attention refuses float32 and rounding is another one
def test_heads_are_tried_in_the_precision_of_the_run(ppo, monkeypatch):
    seen = []

    def agrees(model):
        seen.append(torch.is_autocast_enabled("cpu"))
        return True

    monkeypatch.setattr(rlhf_nb.base.opened, "heads_agree", agrees)
    for bf16 in (False, True):
        trainer = ppo(likes_c, bf16=bf16)
        assert seen == [bf16] * 2  # policy and reference, before the first rollout
        trainer.step()
        assert seen == [bf16] * 2
        seen.clear()
