"Nothing random is left in a training forward: what is known is off, and a probe finds the rest."

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from datasets import Dataset
from ppo_fixtures import likes_c
from small_models import small_config
from torch import nn
from transformers import AutoModelForCausalLM as Causal
from transformers import AutoModelForSequenceClassification as Scorer
from transformers import DbrxConfig

from rlhf_nb.base.noise import check_steady, switch_off_noise
from rlhf_nb.models import scorer_from, token_scores
from rlhf_nb.reward import RewardConfig, RewardTrainer

LAYERS = dict(num_hidden_layers=2)
EXPERTS = dict(num_local_experts=2, num_key_value_heads=1, intermediate_size=16, **LAYERS)
ROUTED = dict(num_experts_per_tok=2, input_jitter_noise=0.5, router_jitter_noise=0.5)
DROPS = dict(num_hidden_layers=4, ffn_dim=16, word_embed_proj_dim=16, dropout=0.0, layerdrop=0.5)
NOISY = dict(
    falcon=small_config("falcon", **LAYERS, hidden_dropout=0.3, attention_dropout=0.3),
    mixtral=small_config("mixtral", **EXPERTS, num_experts_per_tok=1, router_jitter_noise=0.5),
    phimoe=small_config("phimoe", **EXPERTS, **ROUTED),
    opt=small_config("opt", **DROPS),
    dbrx=DbrxConfig(
        vocab_size=12,
        pad_token_id=0,
        eos_token_id=1,
        d_model=16,
        n_heads=2,
        n_layers=1,
        attn_config=dict(kv_n_heads=1, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=16, moe_num_experts=2, moe_top_k=1, moe_jitter_eps=0.5),
        resid_pdrop=0.3,
    ),
)


def noisy(family: str) -> nn.Module:
    torch.manual_seed(0)
    return Causal.from_config(NOISY[family])


# catches: dropout that is read from the config, jitter of a router, dropped layers: the old list
# knew attributes with "dropout" in their name, and the ratio of Falcon's first step was 1.11; a
# reference that keeps the jitter, by which PhiMoE chooses its experts without training too
@pytest.mark.parametrize("family", NOISY)
def test_the_first_ratio_is_1_whatever_noise_the_model_was_made_with(ppo, family):
    trainer = ppo(likes_c, model=noisy(family), share_value_trunk=family == "dbrx")
    r = trainer.advantages(trainer.score(trainer.rollout(["ab", "c", "def", "ab"])))
    again = trainer.forward(trainer.prepare().train(), r)
    torch.testing.assert_close(again.logprobs[r.mask], r.logprobs[r.mask], rtol=0, atol=1e-6)
    torch.testing.assert_close(again.values[r.mask], r.values[r.mask], rtol=0, atol=1e-6)
    torch.testing.assert_close(r.ref_logprobs[r.mask], r.logprobs[r.mask], rtol=0, atol=1e-6)


def logits(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, attention_mask=mask).logits


def shaken(model: nn.Module, width: float) -> nn.Module:
    "The same model; its first layer draws what no name tells."

    def shake(module: nn.Module, given: tuple, output: torch.Tensor) -> torch.Tensor:
        return output + width * torch.randn_like(output) if module.training else output

    next(x for n, x in model.named_modules() if n.endswith(".0.mlp")).register_forward_hook(shake)
    return model


# catches: a probe that is not there, too coarse, only of the policy, or that moves random numbers
def test_a_probe_finds_what_no_list_knows(ppo):
    policy = ppo().policy
    value, before = scorer_from(policy), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"policy, GPTNeoXForCausalLM, .*layers\.0\.mlp \(GPTNeoX"):
        ppo(model=shaken(deepcopy(policy), 1e-3))
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=r"value model, GPTNeoXForSequenceClassification"):
        ppo(parts=dict(value_model=shaken(deepcopy(value), 1e-3)))
    check_steady(value.eval(), "value model", token_scores)
    assert not value.training


def test_the_reward_trainer_is_probed_too(small_args, letters):
    pairs = Dataset.from_dict(dict(prompt=["a"] * 4, chosen=["b"] * 4, rejected=["c"] * 4))
    given = deepcopy(NOISY["falcon"])
    given.num_labels = 1
    model = Scorer.from_config(given)

    def make(**settings):
        args = small_args(RewardConfig, **settings)
        return RewardTrainer(model, args, pairs, processing_class=letters)

    assert make().model.config.hidden_dropout == 0
    assert given.hidden_dropout == 0.3  # which other models may have been made with
    shaken(model, 1e-2)
    with pytest.raises(ValueError, match="reward model, Falcon.*random while it trains"):
        make()
    make(disable_dropout=False)  # noise is wanted


# catches: probabilities of an adapter's kinds that are kept by the adapter's name
def test_noise_of_an_adapter_is_off():
    peft = pytest.importorskip("peft")
    loha = peft.LoHaConfig(target_modules=["dense_h_to_4h"], r=2, rank_dropout=0.5)
    model = peft.get_peft_model(switch_off_noise(noisy("falcon")), loha)
    for name, p in model.named_parameters():
        if "hada" in name:
            nn.init.normal_(p)
    with pytest.raises(ValueError, match="is random"):
        check_steady(model, "policy", logits)
    check_steady(switch_off_noise(model), "policy", logits)
