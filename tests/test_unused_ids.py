"Ids that a model has an embedding for and its tokenizer no token: nothing draws them, and all that is computed leaves them out."

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from ppo_fixtures import PROMPTS
from small_models import STILL, small_model
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf_nb import fast_logprobs
from rlhf_nb.base.noise import check_steady
from rlhf_nb.base.opened import mask_ids, separable_model, unused_ids
from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.kl import full_kl
from rlhf_nb.kl_control import response_full_kl
from rlhf_nb.models import scorer_from
from rlhf_nb.rollout import Rollout
from rlhf_nb.training.build import _logits
from rlhf_nb.training.completions import complete
from rlhf_nb.training.engines import CachedEngine
from rlhf_nb.training.model_loading import load_policy

KNOWN, ROWS = 12, 40  # ids of `letters`, and of the models here
# a plain head, a scale of the logits, a cap on them (where -inf would become a number), a bias
FAMILIES = dict(llama={}, granite=dict(logits_scaling=0.5), phi={}, gpt2=STILL)
FAMILIES["gemma2"] = dict(head_dim=8, num_key_value_heads=2, final_logit_softcapping=5.0)


def wide(family: str) -> AutoModelForCausalLM:
    "A model that would draw the ids without a token two times in three."
    model = small_model(family, vocab_size=ROWS, **FAMILIES[family]).eval()
    for p in model.get_output_embeddings().parameters():
        nn.init.normal_(p, 0, 0.3)
    return model


def drawn() -> tuple[torch.Tensor, ...]:
    "Three rows of two and of four tokens, and their masks."
    ids, mask = torch.randint(2, KNOWN, (3, 6)), torch.ones(3, 6, dtype=torch.bool)
    return ids[:, :2], mask[:, :2], ids[:, 2:], mask[:, 2:]


def by_hand(model: nn.Module, r, temperature: float) -> torch.Tensor:  # [B, T, KNOWN]
    "Log-probs of the ids that have a token, from a model that was never masked, row by row."
    rows = []
    for ids, there, more in zip(r.prompt_ids, r.prompt_mask.bool(), r.response_ids):
        whole = torch.cat([ids[there], more])[None]
        logits = model(input_ids=whole).logits[0, there.sum() - 1 : -1, :KNOWN].float()
        rows.append((logits / temperature).log_softmax(-1))
    return torch.stack(rows)


# catches: no mask; one that the cap of Gemma's logits turns into a number; one in the sampler alone;
# one that a fused head, a temperature or the copy for the reference leaves out
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_they_have_no_probability_anywhere(ppo, family):
    plain = wide(family)
    how = dict(temperature=0.7, kl_estimator="full", share_value_trunk=family == "granite")
    judge = scorer_from(small_model("llama"), 1)  # which has no embedding of them
    trainer = ppo(judge, model=deepcopy(plain), **how)
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS * 3)))
    assert r.response_ids.max() < KNOWN
    wanted = by_hand(plain, r, 0.7)
    at = wanted.gather(-1, r.response_ids[..., None])[..., 0]
    torch.testing.assert_close(r.logprobs[r.mask], at[r.mask], rtol=0, atol=2e-6)
    torch.testing.assert_close(r.ref_logprobs[r.mask], at[r.mask], rtol=0, atol=2e-6)
    assert r.kl[r.mask].abs().max() < 1e-6
    for call in ("learn", "look"):
        out = response_logprobs(trainer.policy, *r.sequences, temperature=0.7, entropy=call)
        entropy = -(wanted.exp() * wanted).sum(-1)
        torch.testing.assert_close(out.entropy[r.mask], entropy[r.mask], rtol=0, atol=2e-6)


# catches: a fused head whose gradient is not that of the masked softmax; NaN from 0 * -inf
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_known_ids(family):
    plain = wide(family)
    model = deepcopy(plain)
    mask_ids(model, range(KNOWN, ROWS))
    r = Rollout(*drawn())
    out = response_logprobs(model, *r.sequences, temperature=0.7)
    (out.logprobs + out.entropy).sum().backward()
    wanted = by_hand(plain, r, 0.7)
    at = wanted.gather(-1, r.response_ids[..., None])[..., 0] - (wanted.exp() * wanted).sum(-1)
    at.sum().backward()
    for (name, a), b in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(
            a.grad, b.grad, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


@torch.no_grad()
def test_the_exact_kl_is_over_the_known_ids(letters):
    models = [wide("llama"), wide("llama")]
    nn.init.normal_(models[1].lm_head.weight, 0, 0.3)
    batch = drawn()
    ids = torch.cat([batch[0], batch[2]], 1)
    logits = [m(input_ids=ids).logits[:, 1:-1, :KNOWN] for m in models]
    for model in models:
        mask_ids(model, unused_ids(model, letters))
    torch.testing.assert_close(response_full_kl(*models, *batch), full_kl(*logits))


# catches: a mask that is saved, or that stays when another tokenizer comes; ids in the middle left out
def test_a_mask_is_of_the_tokenizer_and_is_not_saved(letters, tmp_path):
    model = wide("llama")
    assert unused_ids(model, letters) == [*range(KNOWN, ROWS)]
    ids = torch.arange(6)[None]
    plain = model(input_ids=ids).logits
    for masked in ([20, 39], [5]):
        mask_ids(model, masked)
        logits = model(input_ids=ids).logits
        assert logits[..., masked].isneginf().all() and logits.isneginf().sum() == 6 * len(masked)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(input_ids=ids).logits, plain, rtol=0, atol=0)
    mask_ids(model, [])
    torch.testing.assert_close(model(input_ids=ids).logits, plain, rtol=0, atol=0)


# catches: completions of ids without text; a mask, or a hook a call, that stays on the model for good
def test_completions_hold_tokens_alone(letters):
    model = wide("llama")
    for _ in range(2):
        made = complete(model, letters, PROMPTS, 8, temperature=1.0)
        assert max(x for row in made.ids for x in row) < KNOWN
        assert not hasattr(model, "masked_ids") and len(model._forward_hooks) <= 1


# catches: a mask of an earlier trainer that makes the trial of an adapter NaN, or the trial of packing
# one that nothing fails
def test_a_mask_goes_when_the_model_gets_another_trainer(ppo, letters):
    model = wide("llama")
    ppo(model=model)
    assert hasattr(model, "masked_ids")
    assert not hasattr(load_policy(model), "masked_ids")
    ppo(model=model)
    ppo(model=model, parts=dict(peft_config=LoraConfig(target_modules=["q_proj"])))


# catches: log-probs of -inf that make the difference of two passes NaN, and noise pass for none
def test_noise_is_still_found():
    model = wide("gpt2")
    model.transformer.drop.p = 0.5
    mask_ids(model, [20])
    with pytest.raises(ValueError, match="random while it trains"):
        check_steady(model, "policy", _logits)


# catches: the slow way for every model whose embedding is padded, which is most of them
def test_a_head_stays_fused(monkeypatch):
    model, calls = wide("llama"), []
    mask_ids(model, [20])
    real = fast_logprobs.fused_logprobs
    monkeypatch.setattr(fast_logprobs, "fused_logprobs", lambda *a: calls.append(1) or real(*a))
    response_logprobs(model, *drawn())
    assert separable_model(model) is model and calls


def own() -> SimpleNamespace:
    "An engine that somebody brought."
    inner = CachedEngine()
    return SimpleNamespace(sync=inner.sync, generate=inner.generate, close=inner.close)


def test_an_engine_that_may_draw_them_is_refused(ppo):
    trainer = ppo(model=wide("llama"))
    trainer.engine = own()
    with pytest.raises(
        ValueError, match="SimpleNamespace may draw them: have it leave out settings.unused_ids"
    ):
        trainer.train()
    trainer.engine.skips_unused_ids = True
    assert len(trainer.sampling_settings.unused_ids) == ROWS - KNOWN
    trainer.rollout(PROMPTS)
    trainer = ppo()  # none are unused
    trainer.engine = own()
    trainer.rollout(PROMPTS)
