"""Engines: one interface for the package's sampler and vLLM, the weights that they are given, and
the correction for log-probs that differ.

vLLM needs a GPU. Here a stand-in speaks its API (vllm_stand_in.py).
"""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import vllm_stand_in
from hypothesis import given, settings
from hypothesis import strategies as st
from ppo_fixtures import SIZES as PPO_SIZES
from ppo_fixtures import logs, loss_now, rollouts, unlike, untimed
from safetensors import safe_open
from small_models import small_model
from torch import nn, tensor
from torch.testing import assert_close
from transformers import StopStringCriteria

from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.losses import importance_weights, mismatch, policy_loss, value_loss
from rlhf_nb.masks import left_pad
from rlhf_nb.rollout import sample
from rlhf_nb.sampling import Sampling
from rlhf_nb.training import engines
from rlhf_nb.training.completions import complete
from rlhf_nb.training.model_loading import tiny_policy

SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32)
PROMPTS = [[2, 3, 4], [5], [6, 7, 8, 9], [2, 2]]


@pytest.fixture
def vllm(monkeypatch):
    "The stand-in, where `import vllm` finds it."
    for name, module in vllm_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")
    vllm_stand_in.LLM.made.clear()
    return vllm_stand_in


@pytest.fixture
def policy(letters):
    return tiny_policy(letters, 3, **SIZES)


@pytest.fixture
def engine(vllm, policy, letters):
    "In float32 so that it can be compared; `.core` is the stand-in's model."
    made = engines.VLLMEngine(policy, letters, dtype=torch.float32, max_model_length=32)
    made.core = made.llm.core
    yield made
    made.close()


def prompts():
    return left_pad(PROMPTS, 0)


def changed(model, seed=1):
    "Another policy of the same shape, in place."
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=chance))
    return model


# ---- What engines write ----


# catches: prompts handed over with their padding; rows in another order; a cut in another place; a
# stop token that is not kept; positions that count padding
def test_greedy_responses_equal_the_cached_samplers(engine, policy):
    how = Sampling(6, 0, stop_ids=(1, 4), temperature=1e-3)
    engine.sync(policy)
    got, logprobs = engine.generate(*prompts(), how)
    want = sample(policy, *prompts(), Sampling(6, 0, (1, 4), temperature=1e-8))
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert got.mask.shape == logprobs.shape == (4, 6)
    assert 0 < got.stopped.sum() < 4  # both ways to end are there


# catches: raw log-probs (before the temperature); the likeliest token's log-prob in place of the
# drawn one's; log-probs shifted by one; junk on the padding
def test_log_probs_are_those_of_the_draws(engine, policy):
    engine.sync(policy)
    for temperature in (0.7, 1.0, 1.6):
        drawn, logprobs = engine.generate(*prompts(), Sampling(6, 0, (1,), temperature))
        with torch.no_grad():
            ours = response_logprobs(
                policy, *prompts(), drawn.response_ids, drawn.mask, temperature
            ).logprobs
        assert_close(logprobs, ours, atol=1e-5, rtol=0)
        assert (logprobs[~drawn.mask] == 0).all()


# catches: a sync that does nothing after the first; keys and values of old weights; a source bound
# to a copy of the first weights
def test_weights_are_those_of_the_last_sync(engine, policy):
    how = Sampling(6, 0, (1,), 1.0)
    for seed in range(3):
        engine.sync(changed(policy, seed))
        drawn, logprobs = engine.generate(*prompts(), how)
        ours = response_logprobs(policy, *prompts(), drawn.response_ids, drawn.mask).logprobs
        assert_close(logprobs, ours.detach(), atol=1e-5, rtol=0)
    changed(policy, 9)  # an update, and a wrong program that forgets to sync
    drawn, logprobs = engine.generate(*prompts(), how)
    ours = response_logprobs(policy, *prompts(), drawn.response_ids, drawn.mask).logprobs.detach()
    assert (ours - logprobs).abs().max() > 1e-2


# catches: an engine with empty weights that writes anyway
def test_nothing_is_written_before_the_first_sync(engine):
    with pytest.raises(RuntimeError, match="call sync"):
        engine.generate(*prompts(), Sampling(4, 0))
    with pytest.raises(RuntimeError, match="call sync"):
        engines.CachedEngine().generate(*prompts(), Sampling(4, 0))


# catches: one seed for all rows (n answers to a prompt that are one answer); no seed (a run that
# cannot be repeated)
def test_rows_differ_and_a_run_repeats(engine, policy):
    engine.sync(policy)
    same = [x[:1].repeat(8, 1) for x in prompts()]
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(engine.generate(*same, Sampling(6, 0, (), 1.5))[0].response_ids)
    assert torch.equal(*runs) and len({tuple(row) for row in runs[0].tolist()}) > 4


# catches: the tokenizer's EOS ending rows where the run has another stop token; a penalty from a
# generation config; max length ignored
def test_only_our_own_rules_end_a_row(engine, policy):
    engine.sync(policy)
    torch.manual_seed(0)
    drawn, _ = engine.generate(*[x.repeat(6, 1) for x in prompts()], Sampling(8, 0, (4,), 2.0))
    ended = drawn.response_ids.gather(1, drawn.mask.sum(1, keepdim=True) - 1)[:, 0]
    # an EOS in the middle of a row
    assert (drawn.response_ids[:, :-1] == 1)[drawn.mask[:, 1:]].any()
    assert torch.equal(drawn.stopped, ended == 4) and (drawn.mask.sum(1)[~drawn.stopped] == 8).all()


def test_a_text_ends_a_row(engine, policy, letters):
    criteria = StopStringCriteria(letters, ["c"])
    engine.sync(policy)
    got, _ = engine.generate(*prompts(), Sampling(6, 0, (), 1e-3, stop_strings=criteria))
    want = sample(policy, *prompts(), Sampling(6, 0, temperature=1e-8, stop_strings=criteria))
    assert all(torch.equal(a, b) for a, b in zip(got, want)) and got.stopped.any()


# catches: the cached engine not being the sampler bit for bit; batches that drop rows
def test_the_cached_engine_is_the_sampler(policy):
    engine = engines.CachedEngine(rows=3)
    engine.sync(policy)
    torch.manual_seed(0)
    got, logprobs = engine.generate(*prompts(), Sampling(5, 0, (1,), 0.8, top_k=5))
    torch.manual_seed(0)
    parts = [
        sample(policy, *(x[rows] for x in prompts()), Sampling(5, 0, (1,), 0.8, 5))
        for rows in (slice(3), slice(3, 4))
    ]
    assert logprobs is None
    assert all(torch.equal(a, b) for a, b in zip(got, map(torch.cat, zip(*parts))))


# catches: an engine that stays on the GPU; one that is used, or given weights, while it sleeps
def test_it_sleeps_between_rollouts(vllm, policy, letters):
    engine = engines.VLLMEngine(policy, letters, dtype=torch.float32, sleep=True)
    for _ in range(2):
        engine.sync(policy)
        engine.generate(*prompts(), Sampling(3, 0))
        assert engine.llm.core.asleep
    assert (
        engine.llm.calls
        == "reload_weights generate sleep wake_up reload_weights generate sleep".split()
    )
    engine.generate(*prompts(), Sampling(3, 0))  # the same weights once more
    assert engine.llm.calls[-3:] == ["wake_up", "generate", "sleep"]


# ---- Answers that do not fit the request ----

HOW = Sampling(4, 0, stop_ids=(1,))
GOOD = engines.Answer([5, 1], [-1.0, -2.0], "stop")


@pytest.mark.parametrize(
    "answers, match",
    [
        ([GOOD], "1 responses to 2 prompts"),
        ([GOOD] * 3, "3 responses to 2 prompts"),
        ([GOOD, GOOD._replace(logprobs=None)], "row 1 has 2 tokens and no log-probs"),
        ([GOOD, GOOD._replace(logprobs=[-1.0])], "2 tokens and 1 log-probs"),
        ([GOOD, GOOD._replace(logprobs=[-1.0, math.nan])], "not finite"),
        ([GOOD, GOOD._replace(logprobs=[-1.0, None])], "not finite"),
        ([GOOD, GOOD._replace(token_ids=[], logprobs=[])], "row 1 has 0 tokens"),
        ([GOOD, engines.Answer([5] * 5, [-1.0] * 5, "length")], "has 5 tokens, expected 1 to 4"),
        ([GOOD, engines.Answer([5, 6], [-1.0] * 2, "stop")], "stopped at token 6"),
        ([GOOD, engines.Answer([5, 1], [-1.0] * 2, "length")], "continues after"),
        ([GOOD, engines.Answer([1, 5], [-1.0] * 2, "stop")], "continues after"),
        ([GOOD, engines.Answer([5], [-1.0], "abort")], "ended with 'abort'"),
        ([GOOD, engines.Answer([5], [-1.0], None)], "ended with None"),
    ],
)
def test_a_bad_answer_is_refused(answers, match):
    with pytest.raises(ValueError, match=match):
        engines.collect(answers, 2, HOW)


@pytest.mark.parametrize(
    "field, value",
    [
        ("response_length", 0),
        ("temperature", 0.0),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
    ],
)
def test_settings_that_nobody_could_carry_out(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**dict(response_length=4, pad_id=0) | {field: value})


# ---- vLLM that is missing, or another ----


def test_a_missing_vllm_says_how_to_install_it(monkeypatch, policy, letters):
    monkeypatch.setitem(sys.modules, "vllm", None)
    for make in (lambda: engines.VLLMEngine(policy, letters), engines.vllm_module):
        with pytest.raises(ImportError, match="pip install 'vllm==0.33.*'.*use_vllm=False"):
            make()


@pytest.mark.parametrize("version", ["0.32.0", "0.3.30", "0.330.1", "1.33.0"])
def test_another_release_is_refused(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "vllm", vllm_stand_in.modules(version)["vllm"])
    with pytest.raises(ImportError, match=f"installed is vLLM {version}, .* written for 0.33"):
        engines.vllm_module()


# catches: a setting left to the model's generation config
def test_every_sampling_default_of_vllm_is_named():
    assert {
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
    } <= set(engines.request(Sampling(4, 0, (1,), 0.7), 3))
    assert engines.request(Sampling(4, 0, temperature=0.005), 3)["temperature"] == 0
    assert engines.request(Sampling(4, 0, temperature=0.01), 3)["temperature"] == 0.01


# catches: the likeliest token's log-prob for the drawn one's, where an engine returns several; a
# token that is not in the table of its position
def test_the_drawn_tokens_log_prob_is_looked_up():
    tables = [
        {7: vllm_stand_in.Logprob(-0.1, 1), 5: vllm_stand_in.Logprob(-3.0, 2)},
        {1: vllm_stand_in.Logprob(-2.0, 4)},
    ]
    one = vllm_stand_in.CompletionOutput(0, "", [5, 1], tables, "stop")
    assert engines.answer_of(one) == engines.Answer([5, 1], [-3.0, -2.0], "stop")
    assert (
        engines.answer_of(replace(one, token_ids=[6, 1])).logprobs
        is engines.answer_of(replace(one, logprobs=tables[:1])).logprobs
        is None
    )


# ---- Weights ----


# catches: LoRA left out, added twice, or scaled wrongly; merging in place; names that no checkpoint
# has; a saved module taken from its frozen copy
@pytest.mark.parametrize(
    "more", [dict(), dict(modules_to_save=["lm_head"]), dict(lora_alpha=64, use_rslora=True)]
)
def test_weights_with_an_adapter_are_the_merged_ones(policy, engine, more):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        policy,
        LoraConfig(
            **dict(
                r=2, target_modules=["query_key_value", "dense_4h_to_h"], init_lora_weights=False
            )
            | more
        ),
    )
    changed(
        nn.ModuleList(
            [m for name, m in adapted.named_modules() if name.endswith("modules_to_save.default")]
        )
    )
    before = {name: x.clone() for name, x in adapted.state_dict().items()}
    engine.sync(adapted)
    merged = copy.deepcopy(adapted).merge_and_unload()
    assert all(torch.equal(x, before[name]) for name, x in adapted.state_dict().items())
    for name, x in merged.named_parameters():
        assert_close(engine.core.model.get_parameter(name), x, msg=name)
    with adapted.disable_adapter():
        assert_close(
            dict(engines.policy_weights(adapted))["gpt_neox.layers.0.mlp.dense_4h_to_h.weight"],
            adapted.get_base_model()
            .gpt_neox.layers[0]
            .mlp.dense_4h_to_h.base_layer.weight.detach(),
        )


def test_adapters_that_are_no_plain_lora_are_refused(policy):
    from peft import IA3Config, LoraConfig, get_peft_model

    for config in (
        LoraConfig(r=2, target_modules=["query_key_value"], use_dora=True),
        IA3Config(target_modules=["query_key_value"], feedforward_modules=[]),
    ):
        with pytest.raises(ValueError, match="plain LoRA"):
            list(engines.policy_weights(get_peft_model(copy.deepcopy(policy), config)))


# catches: parts sent for wholes under FSDP2; another dtype than was declared
def test_weights_in_parts_are_sent_whole(policy, tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    want = {name: x.detach().clone() for name, x in policy.named_parameters()}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        fully_shard(policy, mesh=init_device_mesh("cpu", (1,)))
        assert all(hasattr(x, "full_tensor") for x in policy.parameters())
        got = dict(engines.policy_weights(policy, torch.bfloat16))
        assert not any(hasattr(x, "full_tensor") for x in got.values()) and len(got) == len(want)
        for name, x in got.items():
            assert torch.equal(x, want[name.replace("embed_out", "lm_head")].bfloat16()), name
    finally:
        dist.destroy_process_group()


# catches: the names of memory where a checkpoint has others; a wrapper's name in front of a
# weight's; weights that carry a gradient
def test_names_are_those_of_a_checkpoint(policy, tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    policy.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = sorted(file.keys())
    assert "embed_out.weight" in names  # and lm_head.weight in memory
    policy.gpt_neox.layers[0] = checkpoint_wrapper(policy.gpt_neox.layers[0])
    assert sorted(name for name, _ in engines.policy_weights(policy)) == names
    assert not any(x.requires_grad for _, x in engines.policy_weights(policy))


# ---- The correction ----


def real(shape, low=-30.0, high=0.0):
    return st.integers(0, 2**31 - 1).map(
        lambda seed: torch.empty(shape).uniform_(
            low, high, generator=torch.Generator().manual_seed(seed)
        )
    )


# catches: upside down; no exponential; truncated from below too; dropped where it should be capped;
# padding that counts
def test_weights_by_hand():
    ours = tensor([[0.4, 0.2, 0.3, 0.5]]).log()
    theirs = tensor([[0.5, 0.2, 0.1, 0.1]]).log()
    mask = tensor([[True, True, True, False]])
    assert_close(importance_weights(ours, theirs, mask), tensor([[0.8, 1.0, 2.0, 0.0]]))
    assert_close(importance_weights(ours, theirs, mask, cap=None), tensor([[0.8, 1.0, 3.0, 0.0]]))
    for mode, wanted in dict(  # 0.8 * 1 * 3 = 2.4
        token_mask=[0.8, 1.0, 0.0, 0.0],
        sequence_truncate=[2.0, 2.0, 2.0, 0.0],
        sequence_mask=[0.0, 0.0, 0.0, 0.0],
    ).items():
        assert_close(importance_weights(ours, theirs, mask, 2.0, mode), tensor([wanted]))
    assert importance_weights(ours, theirs, mask, 2.5, "sequence_mask")[0, 0] > 2.39
    assert mismatch(ours, theirs, mask, 2.0, "sequence_mask")["capped"] == 3
    sums = mismatch(ours, theirs, mask)
    kl = sum(p / q - 1 - math.log(p / q) for p, q in ((0.4, 0.5), (0.2, 0.2), (0.3, 0.1)))
    for name, want in dict(
        weight=3.8, capped=1.0, tokens=3.0, weight_max=3.0, kl=kl, gap=math.log(1.25) + math.log(3)
    ).items():
        assert_close(sums[name], tensor(float(want)), msg=name)


# catches: any weight but pi / mu: the weighted mean under the engine must be the trainer's mean,
# exactly, without truncation
@given(real((6, 9), -4, 4), real((6, 9), -4, 4), real((6, 9), -5, 5))
@settings(max_examples=40, deadline=None)
def test_unbiased_without_truncation(theirs, ours, worth):
    theirs = theirs.double().log_softmax(-1)
    ours = ours.double().log_softmax(-1)
    every = torch.ones(6, 9).bool()
    under_engine = (theirs.exp() * importance_weights(ours, theirs, every, cap=None) * worth).sum(
        -1
    )
    assert_close(under_engine, (ours.exp() * worth).sum(-1))
    capped = importance_weights(ours, theirs, every, cap=1.5)
    assert (capped <= 1.5).all() and ((theirs.exp() * capped).sum(-1) <= 1 + 1e-9).all()


# catches: padding that reaches a weight or a sum; NaN of -inf less -inf; infinity of a large gap;
# bf16 differences of bf16 numbers
@given(real((3, 5)), real((3, 5)), st.sampled_from([0.0, 99.0, -math.inf, math.nan]))
@settings(max_examples=30, deadline=None)
def test_padding_and_hostile_numbers_do_no_harm(ours, theirs, dirt):
    mask = torch.arange(5) < tensor([[5], [2], [0]])
    clean, dirty = (
        (importance_weights(*given), mismatch(*given))
        for given in (
            (ours, theirs, mask),
            (ours.masked_fill(~mask, dirt), theirs.masked_fill(~mask, dirt), mask),
        )
    )
    assert_close(clean, dirty)
    assert torch.isfinite(importance_weights(ours * 1e4, theirs, mask, None)).all()
    assert importance_weights(ours.bfloat16(), theirs.bfloat16(), mask).dtype == torch.float32
    assert torch.isfinite(
        torch.stack(list(mismatch(tensor([[0.0]]), tensor([[0.0]]), tensor([[False]])).values()))
    ).all()


def test_the_weight_has_no_gradient_and_bad_input_is_refused():
    ours = torch.zeros(1, 2, requires_grad=True)
    assert not importance_weights(ours, torch.ones(1, 2), torch.ones(1, 2).bool()).requires_grad
    with pytest.raises(ValueError, match=r"cap is 0"):
        importance_weights(ours, ours, torch.ones(1, 2).bool(), 0)
    with pytest.raises(ValueError, match="mode is 'sequence': give one of token_truncate"):
        importance_weights(ours, ours, torch.ones(1, 2).bool(), mode="sequence")
    with pytest.raises(ValueError, match=r"one shape \[B, T\]"):
        importance_weights(ours, ours[:, :1], torch.ones(1, 2).bool())


# catches: weighting the ratio (which moves the clip range) in place of the loss
@given(real((4, 6), -1, 1), real((4, 6), -1, 1), real((4, 6), -3, 3), st.sampled_from([None, 3.0]))
@settings(max_examples=30, deadline=None)
def test_a_weighted_advantage_weighs_the_clipped_loss(gap, mismatched, advantages, dual):
    old, mask = torch.full((4, 6), -2.0), torch.ones(4, 6).bool()
    w = importance_weights(old, old - mismatched, mask)
    weighted = policy_loss(old + gap, old, w * advantages, mask, dual_clip=dual)
    by_token = sum(
        w[i, j]
        * policy_loss(
            *(x[i, j].view(1, 1) for x in (old + gap, old, advantages, mask)), dual_clip=dual
        )
        for i in range(4)
        for j in range(6)
    )
    assert_close(weighted, by_token, atol=1e-4, rtol=1e-4)


# ---- In the trainer ----


@pytest.fixture
def run(ppo, letters):
    "A trainer that samples with the engine that `make(policy)` gives."

    def trainer(make=None, **changes):
        made = ppo(save_rollouts=True, learning_rate=1e-2, **changes)
        if make is not None:
            made.engine = make(made.model.policy)
        return made

    return trainer


def colocated(letters):
    return lambda policy: engines.VLLMEngine(policy, letters, dtype=torch.float32)


# catches: an engine that is not given the weights of every update; weights that are not near 1
# where nothing differs
def test_a_run_with_vllm_samples_from_every_updates_policy(vllm, run, letters):
    trainer = run(colocated(letters), total_episodes=32)
    trainer.train()
    history = logs(trainer)
    assert len(history) == 4 and trainer.engine.llm.calls == ["reload_weights", "generate"] * 4
    for log in history:
        assert abs(log["sampling/weight"] - 1) < 1e-5
        assert log["sampling/kl"] < 1e-9
        assert log["sampling/weight_max"] < 1 + 1e-4
        assert log["sampling/capped"] == 0
    assert all(log["policy/grad_norm"] > 0 for log in history)


# catches: vLLM drawing what has no token; log-probs of it from before the bias
def test_vllm_leaves_out_ids_without_a_token(vllm, run, letters):
    wide = small_model("gpt_neox", vocab_size=40)
    trainer = run(colocated(letters), model=wide, total_episodes=16)
    trainer.train()
    assert max(log["sampling/kl"] for log in logs(trainer)) < 1e-9
    assert max(int(r.response_ids.max()) for r in rollouts(trainer)) < 12
    bad = engines.Answer([2, 20], [-1.0, -1.0], "length")
    with pytest.raises(ValueError, match="row 0 has the id 20, which has no token"):
        engines.collect([bad], 1, trainer.sampling_settings)


class Forgets(engines.VLLMEngine):
    "Wrong: only the first sync counts."

    def sync(self, model):
        if not self.synced:
            super().sync(model)


def test_a_forgotten_sync_shows(vllm, run, letters):
    kl = {}
    for kind in (engines.VLLMEngine, Forgets):
        trainer = run(partial(kind, tokenizer=letters, dtype=torch.float32), total_episodes=32)
        trainer.train()
        kl[kind] = [log["sampling/kl"] for log in logs(trainer)]
    assert max(kl[engines.VLLMEngine]) < 1e-9 < 1e-5 < kl[Forgets][-1] and kl[Forgets][0] < 1e-9


# catches: a correction that does not reach the gradient; one that is on where it is not wanted
def test_the_correction_reaches_the_gradient(vllm, run, letters):
    class Off(engines.VLLMEngine):
        "Weights of its own: far from the trainer's."

        def sync(self, model):
            super().sync(changed(copy.deepcopy(model)))

    after = {}
    for name, kind in dict(right=engines.VLLMEngine, off=Off).items():
        make = partial(kind, tokenizer=letters, dtype=torch.float32)
        trainer = run(make, total_episodes=8, num_ppo_epochs=1)
        torch.manual_seed(0)
        r = trainer.advantages(trainer.score(trainer.rollout(trainer.train_dataset["prompt"][:8])))
        loss, _ = loss_now(trainer, r)
        w = importance_weights(r.logprobs, r.engine_logprobs, r.mask)
        by_hand = policy_loss(
            r.logprobs, r.logprobs, w * r.advantages, r.mask
        ) + trainer.args.vf_coef * value_loss(
            r.values, r.values, r.returns, r.mask, trainer.args.cliprange_value
        )
        assert_close(loss.detach(), by_hand, atol=1e-4, rtol=1e-4)
        after[name] = (w[r.mask] - 1).abs().max().item()
    assert after["right"] < 1e-4 and after["off"] > 0.1


# catches: rows out of order, a temperature or a stop that the engine is not given, a global random
# state that an evaluation moves on
def test_an_engine_completes_as_the_own_sampler_does(vllm, letters):
    policy = changed(tiny_policy(letters, 0, **PPO_SIZES)).eval()
    engine = engines.VLLMEngine(policy, letters, dtype=torch.float32)
    prompts = [f"{'a b ' * (i % 3)}c d" for i in range(7)]
    engine.sync(policy)
    ask = lambda temperature, **how: complete(
        policy, letters, prompts, 5, temperature, batch_size=3, **how
    )
    assert ask(1e-3, engine=engine) == ask(1e-6)  # below 0.01 an engine samples greedily
    before = torch.get_rng_state()
    one, same, other = (ask(1.0, engine=engine, seed=seed) for seed in (0, 0, 1))
    assert one == same != other and torch.equal(before, torch.get_rng_state())
    assert engine.llm.calls.count("generate") == 4 * 3  # batches
    twice = complete(
        policy, letters, ["c d"] * 6, 5, 1.0, batch_size=3, seed=0, engine=engine
    ).texts
    assert twice[:3] != twice[3:]  # the next batch has other seeds
    # without a seed of its own it takes the global random state's, as the own sampler does
    ask(1.0, engine=engine)
    assert not torch.equal(before, torch.get_rng_state())


# catches: completions by the package's own sampler, slow and beside the engine in memory, or by the
# engine with the weights of the last rollout
def test_vllm_writes_the_completions_too(vllm, ppo):
    trainer = ppo.trained(use_vllm=True, learning_rate=1e-2, total_episodes=16)
    assert trainer.engine.llm.calls == ["reload_weights", "generate"] * 2
    stale = {name: x.clone() for name, x in trainer.engine.llm.core.model.state_dict().items()}
    before = torch.get_rng_state()
    calls = []
    handle = trainer.model.policy.register_forward_hook(lambda *_: calls.append(1))
    metrics = trainer.evaluate()
    handle.remove()
    assert trainer.engine.llm.calls == ["reload_weights", "generate"] * 3
    assert not calls
    assert torch.equal(before, torch.get_rng_state())
    assert unlike(stale, trainer.engine.llm.core.model.state_dict())
    assert {"eval_score", "eval_length", "eval_stopped"} <= set(metrics)
    assert trainer.evaluator.rows_at_a_time(500) == 500
    assert len(trainer.callback_handler.eval_dataloader) == 1


# catches: an engine of our own that changes what a run does
def test_the_cached_engine_changes_nothing(run, ppo):
    own, plain = run(lambda policy: engines.CachedEngine(64)), ppo(learning_rate=1e-2)
    for trainer in (own, plain):
        trainer.train()
    assert [untimed(log) for log in logs(own)] == [untimed(log) for log in logs(plain)]
    assert not any(name.startswith("sampling/") for log in logs(own) for name in log)


class TestSettings:
    @pytest.mark.parametrize(
        "changes, match",
        [
            (dict(importance_sampling_cap=0.0), "importance_sampling_cap"),
            (dict(temperature=0.005), "temperature"),
            (dict(vllm_gpu_memory_utilization=1.5), "vllm_gpu_memory_utilization"),
        ],
    )
    def test_bad_ones_are_refused_by_name(self, ppo, changes, match):
        with pytest.raises(ValueError, match=f"^{match} is"):
            ppo(use_vllm=True, **changes)

    # catches: a server that is asked for, and an engine in the process that is taken in silence
    def test_a_server_is_no_setting(self, ppo):
        with pytest.raises(TypeError, match="PPOConfig has no vllm_mode"):
            ppo(use_vllm=True, vllm_mode="server")

    # catches: a distribution that draws and another that is scored
    @pytest.mark.parametrize("how", [dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1)])
    def test_truncated_sampling_is_refused(self, ppo, how):
        with pytest.raises(TypeError, match="PPO draws from all tokens, which it scores under"):
            ppo(**how)

    # catches: settings that are read by nobody
    def test_each_is_honoured(self, vllm, ppo):
        trainer = ppo(
            use_vllm=True,
            vllm_gpu_memory_utilization=0.2,
            vllm_max_model_length=12,
            vllm_enable_sleep_mode=True,
        )
        assert vllm.LLM.made[-1] is trainer.engine.llm
        assert trainer.engine.llm.sleeps
        assert trainer.engine.dtype == torch.float32
        assert trainer.engine.llm.given == dict(gpu_memory_utilization=0.2, max_model_len=12)

    def test_the_correction_can_be_turned_off(self, vllm, ppo):
        losses = {}
        for on in (True, False):
            trainer = ppo(
                use_vllm=True, importance_sampling_correction=on, importance_sampling_cap=None
            )
            torch.manual_seed(0)
            r = trainer.advantages(
                trainer.score(trainer.rollout(trainer.train_dataset["prompt"][:8]))
            )
            praised = r.mask & (r.advantages > 0)  # whitened advantages add up to 0: not all alike
            r = r.with_(engine_logprobs=r.engine_logprobs - 0.5 * praised)
            losses[on] = loss_now(trainer, r)[0]
        assert losses[True] < losses[False] - 0.01

    # catches: log-probs of the engine that are not kept with the rollout, or go to the reward
    # function
    def test_the_rollout_keeps_the_engines_log_probs(self, vllm, ppo, tmp_path):
        seen = []

        def reward(prompts, responses, **columns):
            seen.append(set(columns))
            return [0.0] * len(responses)

        trainer = ppo(reward, use_vllm=True)
        r = trainer.score(trainer.rollout(trainer.train_dataset["prompt"][:8]))
        assert_close(r.engine_logprobs, r.logprobs.masked_fill(~r.mask, 0.0), atol=1e-5, rtol=0)
        again = type(r).load(r.save(tmp_path / "r.safetensors"))
        assert torch.equal(again.engine_logprobs, r.engine_logprobs)
        assert "engine_logprobs" in again.by_token()
        assert seen == [set()]
        assert torch.equal(r.select([2, 0]).engine_logprobs, r.engine_logprobs[[2, 0]])
