"""Fewer weights: LoRA with the policy as its own reference, a value head on the policy's trunk,
several answers to a prompt."""

import sys
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from ppo_fixtures import BEST, PROMPTS, begin, likes_c, logs, rollouts, unlike, untimed, weights
from transformers import AutoModelForCausalLM

from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.forward import ValueHead
from rlhf_nb.models import scorer_from
from rlhf_nb.reward import RewardTrainer
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.training.model_loading import load_policy, load_scorer

WORDS = ["cdefg", "ab", "jih", "hhi", "gab", "ccc", "dd", "eee"]


def lora(**changes) -> LoraConfig:
    return LoraConfig(
        **dict(r=2, target_modules=["query_key_value", "dense_h_to_4h"], task_type="CAUSAL_LM")
        | changes
    )


def for_value() -> LoraConfig:
    return lora(task_type="SEQ_CLS")


def told(trainer):
    return [untimed(log) for log in logs(trainer)]


@pytest.fixture
def sft(letters, small_args, base):
    "Makes an SFTTrainer with an adapter: `sft(config, ...settings)`."

    def make(config, model=None, **changes):
        rows = Dataset.from_dict(dict(prompt=["ab"] * 8, completion=WORDS))
        args = small_args(SFTConfig, **dict(max_steps=3) | changes)
        return SFTTrainer(
            model or base, args, rows, rows.select([1, 4]), letters, peft_config=config
        )

    return make


@pytest.fixture
def base(letters, tmp_path):
    "A policy in a folder, as people load one: an adapter's folder names it."
    begin(letters).save_pretrained(tmp_path / "base")
    letters.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


KINDS = dict(
    lora=lambda: dict(parts=dict(peft_config=lora())),
    both=lambda: dict(parts=dict(peft_config=lora(), value_peft_config=for_value())),
    trunk=lambda: dict(share_value_trunk=True),
    lora_on_trunk=lambda: dict(share_value_trunk=True, parts=dict(peft_config=lora())),
)


# ---- The reference is the policy with its adapter off ----


# catches: a reference that moves with the adapter, one that was forgotten (KL 0), a run that
# differs from one with a reference of its own
@pytest.mark.parametrize("estimator", ["k1", "full"])
def test_the_adapter_off_is_the_reference(ppo, letters, estimator):
    settings = dict(learning_rate=1e-2, kl_estimator=estimator, kl_coef=0.3, save_rollouts=True)
    alone = ppo.trained(parts=dict(peft_config=lora()), **settings)
    found = rollouts(alone)
    second = ppo.trained(parts=dict(peft_config=lora(), ref_model=begin(letters)), **settings)
    assert alone.ref_model is None and second.ref_model is not None
    for a, b in zip(found, rollouts(second)):
        assert a.responses == b.responses
        torch.testing.assert_close(a.ref_logprobs, b.ref_logprobs, atol=1e-6, rtol=0)
        torch.testing.assert_close(a.kl, b.kl, atol=1e-6, rtol=0)
    assert found[-1].kl.abs().max() > 1e-3 and not unlike(weights(alone), weights(second))


# catches: dropout of the adapter, another path through the wrapper in the rollout than in the
# update
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bf16", [False, True])
def test_learning_rate_zero_changes_nothing(ppo, kind, bf16):
    how = KINDS[kind]()
    for config in how.get("parts", {}).values():
        config.lora_dropout = 0.3
    for log in logs(
        ppo.trained(learning_rate=0.0, bf16=bf16, num_mini_batches=2, total_episodes=16, **how)
    ):
        assert log["policy/approxkl_avg"] < (1e-8 if bf16 else 1e-12)
        assert log["policy/clipfrac_avg"] == 0
        assert abs(log["objective/kl"]) < (1e-2 if bf16 else 1e-5)


# catches: recomputed activations through which no gradient reaches an adapter
def test_gradients_reach_the_adapter_through_recomputed_activations(ppo):
    found = []
    for on in (False, True):  # Adam would make a step of the last digit of a gradient near zero
        trainer = ppo(
            parts=dict(peft_config=lora()),
            learning_rate=0.1,
            optim="sgd",
            activation_checkpointing=on,
        )
        before = weights(trainer)
        trainer.train()
        found.append(weights(trainer))
    for name, x in found[0].items():
        torch.testing.assert_close(found[1][name], x, atol=1e-5, rtol=1e-4)
    assert all(
        (found[0][name] - x).abs().max() > 1e-4 for name, x in before.items() if "lora_B" in name
    )


# catches: the wrong adapter trained, a reference adapter that learns, the two exchanged
def test_one_adapter_learns_and_another_is_the_reference(ppo, letters):
    def policy():
        torch.manual_seed(1)
        model = get_peft_model(begin(letters), lora(init_lora_weights=False), adapter_name="old")
        model.add_adapter("new", lora())
        return model

    trainer = ppo(
        model=policy(), model_adapter_name="new", ref_adapter_name="old", learning_rate=1e-2
    )
    before, r = weights(trainer), trainer.rollout(PROMPTS[:8])
    rows, fresh = (r.prompt_ids, r.prompt_mask, r.response_ids, r.mask), policy()
    fresh.set_adapter("old")
    torch.testing.assert_close(
        r.ref_logprobs, response_logprobs(fresh, *rows).logprobs, atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        r.logprobs, response_logprobs(begin(letters), *rows).logprobs, atol=1e-6, rtol=0
    )
    trainer.train()
    moved = [name for name in unlike(before, weights(trainer)) if name.startswith("policy.")]
    assert moved and all(".new." in name for name in moved)


# ---- Saving and going on ----


# catches: base weights in the adapter's folder, an adapter of before the training, one that cannot
# be merged, a folder without stop token; a checkpoint without the adapter, which going on needs
@pytest.mark.parametrize("merged", [False, True])
def test_the_adapter_alone_is_saved_and_merges(ppo, base, tmp_path, letters, merged):
    settings = dict(learning_rate=1e-2, save_merged=merged, save_strategy="steps", save_steps=3)
    trainer = ppo.trained(model=load_policy(base), parts=dict(peft_config=lora()), **settings)
    trainer.save_model(str(tmp_path / "saved"))
    names, ids = {path.name for path in (tmp_path / "saved").iterdir()}, torch.arange(12)[None]
    assert {"generation_config.json", "tokenizer.json", "README.md"} <= names
    assert ("model.safetensors" in names) == merged
    assert ({"adapter_model.safetensors", "adapter_config.json"} <= names) != merged
    kept = Path(trainer.args.output_dir) / "checkpoint-3" / "adapter_model.safetensors"
    assert kept.is_file() and isinstance(trainer.model.policy, PeftModel)
    wanted = trainer.model.policy(ids).logits
    assert (wanted - begin(letters)(ids).logits).abs().max() > 1e-3
    same = partial(torch.testing.assert_close, expected=wanted, atol=1e-5, rtol=0)
    if merged:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert again.generation_config.eos_token_id == 1
        return same(again(ids).logits)
    plain = AutoModelForCausalLM.from_pretrained(base)
    again = PeftModel.from_pretrained(plain, tmp_path / "saved")
    assert torch.equal(again(ids).logits, wanted)
    same(again.merge_and_unload()(ids).logits)
    same(load_policy(str(tmp_path / "saved"))(ids).logits)
    assert "library_name" in (tmp_path / "saved" / "README.md").read_text()


# catches: adapters, value adapters or a head on the trunk that no checkpoint holds, or that come
# back into the wrong place
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same_run(ppo, base, kind):
    settings = lambda: dict(
        total_episodes=24,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=2,
        model=load_policy(base),
        **KINDS[kind](),
    )
    whole, again = ppo(**settings()), ppo(**settings())
    whole.train()
    again.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
    assert told(whole) == told(again)
    assert len(told(again)) == 3
    assert not unlike(weights(whole), weights(again))


# catches: a checkpoint of the tokens that an encoder puts out, and not of the encoder
@pytest.mark.parametrize(
    "make",
    [
        lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8),
        lambda: peft.PrefixTuningConfig(
            num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8
        ),
        lambda: peft.CPTConfig(
            "CAUSAL_LM", cpt_token_ids=[2, 3], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 4]
        ),
    ],
)
def test_virtual_tokens_go_on_and_the_best_are_back(sft, make, tmp_path):
    def run(folder, best=False, resume=None):
        often = dict(BEST, load_best_model_at_end=best)
        sizes = dict(output_dir=str(tmp_path / folder), max_steps=4, per_device_train_batch_size=4)
        trainer = sft(make(), **often, **sizes, learning_rate=0.2)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("whole")
    again = run("whole", resume=str(tmp_path / "whole" / "checkpoint-2"))
    assert not unlike(weights(whole), weights(again))
    trainer = run("best", best=True)
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert trainer.evaluate()["eval_loss"] == min(losses) and len({*losses}) == 4


STARTS = dict(
    pissa=lambda: lora(init_lora_weights="pissa"),
    olora=lambda: lora(init_lora_weights="olora"),
    bias=lambda: lora(bias="all"),
    tokens=lambda: lora(trainable_token_indices=[1, 2]),
    ia3=lambda: peft.IA3Config(target_modules=["query_key_value"], feedforward_modules=[]),
)


# catches: a trial of the folder that leaves its noise in the weights, that stops what learned, or
# that refuses what comes back
@pytest.mark.parametrize("kind", STARTS)
def test_the_folder_has_what_was_trained(sft, base, kind, tmp_path):
    trainer, ids = sft(STARTS[kind]()), torch.arange(12)[None]
    fresh = load_policy(base)(ids).logits
    torch.testing.assert_close(trainer.model(ids).logits, fresh, atol=1e-5, rtol=0)
    learn = {name for name, x in trainer.model.named_parameters() if x.requires_grad}
    assert learn and (kind != "bias" or any(name.endswith("bias") for name in learn))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = PeftModel.from_pretrained(load_policy(base), tmp_path / "saved")
    assert (again(ids).logits - trainer.model(ids).logits).abs().max() <= 1e-6


WRONG = [  # what each adapter is refused for
    (lambda: lora(init_lora_weights="pissa_niter_4", task_type=None), "pissa_niter_4'.* at random"),
    (lambda: lora(alora_invocation_tokens=[3, 4], task_type=None), "alora_invocation_tokens"),
    (lambda: peft.PolyConfig(r=2, target_modules=["query_key_value"]), "of PolyConfig does not"),
]


# catches: an adapter that the folder does not give back, at one door alone
@pytest.mark.parametrize("make, named", WRONG)
def test_what_would_not_come_back_is_refused(ppo, sft, base, make, named):
    def reward():
        scorer = scorer_from(load_policy(base), 1)
        RewardTrainer(scorer, processing_class=base, peft_config=make())

    def given():
        return get_peft_model(load_policy(base), make())

    def loaded():
        given().save_pretrained(Path(base) / "adapter")
        load_policy(str(Path(base) / "adapter"))

    doors = [lambda: sft(make()), lambda: ppo(parts=dict(peft_config=make())), reward]
    if "Poly" not in named:  # of a given one, and of a folder, the kind is known alone
        doors += [loaded, lambda: sft(None, given()), lambda: ppo(model=given())]
    for door in doors:
        with pytest.raises(ValueError, match=named):
            door()


# catches: a trial of an adapter that changes nothing yet
def test_an_adapter_is_moved_before_it_is_compared(sft, monkeypatch):
    def empty(bare, folder):
        return get_peft_model(bare, lora())

    monkeypatch.setattr(PeftModel, "from_pretrained", empty)
    with pytest.raises(ValueError, match="LoraConfig does not come back .*outputs are .* off"):
        sft(lora())


# catches: a loss of nan, and the learning rate blamed for it
def test_dora_on_a_row_of_zeros_is_named(sft, base):
    model = load_policy(base)
    torch.nn.init.zeros_(model.base_model.layers[0].attention.query_key_value.weight[3])
    with pytest.raises(ValueError, match="DoRA .*row 3 of .*query_key_value is 0"):
        sft(lora(use_dora=True), model)


# catches: an adapter on another, of which the folder holds the outer one alone
def test_one_adapter_at_a_time(ppo, sft, base):
    def given(times=1):
        model = load_policy(base)
        for _ in range(times):
            model = get_peft_model(model, lora())
        return model

    for door in (
        lambda: sft(lora(), given()),
        lambda: sft(None, given(2)),
        lambda: ppo(model=given(2)),
        lambda: RewardTrainer(given(), processing_class=base, peft_config=for_value()),
    ):
        with pytest.raises(ValueError, match="already has an adapter"):
            door()


# ---- The value model ----


# catches: an adapter that begins with whatever the global random state gives
def test_the_seed_decides_how_an_adapter_begins(ppo):
    begins = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        begins.append(
            weights(ppo(seed=seed, parts=dict(peft_config=lora(), value_peft_config=for_value())))
        )
    assert not unlike(begins[0], begins[1]) and any(
        "lora_A" in name and name.startswith("policy.") for name in unlike(begins[0], begins[2])
    )


# catches: a config that peft writes into, so that the second trainer finds another one than the
# user made
def test_one_config_serves_two_trainers(ppo):
    # peft fills in what is left open
    configs = [LoraConfig(r=2, task_type=task) for task in ("CAUSAL_LM", "SEQ_CLS")]
    before = [config.to_dict() for config in configs]
    first, second = (
        ppo(parts=dict(peft_config=configs[0], value_peft_config=configs[1])) for _ in range(2)
    )
    assert [config.to_dict() for config in configs] == before
    assert before[1]["modules_to_save"] is None
    assert first.model.value.peft_config["default"] is not second.model.value.peft_config["default"]
    assert not unlike(weights(first), weights(second))


def test_the_value_model_has_an_adapter_of_its_own(ppo):
    trainer = ppo(learning_rate=1e-2, parts=dict(peft_config=lora(), value_peft_config=for_value()))
    before = weights(trainer)
    trainer.train()
    moved = [name for name in unlike(before, weights(trainer)) if name.startswith("value.")]
    assert any("lora_A" in name for name in moved)
    assert any("score" in name for name in moved)
    assert all("lora_" in name or "modules_to_save" in name for name in moved)


# catches: a second pass through the trunk, values of another column, a head that nobody trains
def test_a_head_on_the_trunk(ppo):
    trainer = ppo(share_value_trunk=True, learning_rate=1e-2, num_ppo_epochs=4)
    calls = []
    assert isinstance(trainer.model.value, ValueHead)
    assert sum(p.numel() for p in trainer.model.value.parameters()) == 16
    torch.nn.init.normal_(trainer.model.value.score.weight)
    r = trainer.rollout(PROMPTS[:8])
    for b in range(8):
        prompt, answer = r.prompt_ids[b][r.prompt_mask[b]], r.response_ids[b][r.mask[b]]
        hidden = trainer.model.policy.base_model(
            torch.cat([prompt, answer])[None]
        ).last_hidden_state[0]
        torch.testing.assert_close(
            r.values[b, : len(answer)],
            trainer.model.value.score(hidden)[len(prompt) - 1 : -1, 0].detach(),
            atol=1e-5,
            rtol=0,
        )
    before = weights(trainer)
    handle = trainer.model.policy.base_model.register_forward_hook(
        lambda *found: calls.append(torch.is_grad_enabled())
    )
    trainer.update(trainer.advantages(trainer.score(r)))
    handle.remove()
    # 4 epochs of 2 micro-batches
    assert sum(calls) == 4 * 2 and "value.score.weight" in unlike(before, weights(trainer))


def test_the_value_loss_moves_the_trunk_after_the_warm_up(ppo):
    for updates, moves in ((1, False), (0, True)):
        trainer = ppo(share_value_trunk=True, value_warmup_updates=updates, learning_rate=1e-2)
        torch.nn.init.normal_(trainer.model.value.score.weight)
        before = weights(trainer)
        trainer.step(PROMPTS[:8])
        moved = unlike(before, weights(trainer))
        assert "value.score.weight" in moved
        assert any(name.startswith("policy.") for name in moved) == moves


def test_a_truncated_row_bootstraps_from_the_head_on_the_trunk(ppo):
    trainer = ppo(share_value_trunk=True, bootstrap_truncated=True)
    torch.nn.init.normal_(trainer.model.value.score.weight)
    r = trainer.score(trainer.rollout(PROMPTS[:8]))
    after = trainer.last_values(r)
    for b in range(8):
        ids = torch.cat([r.prompt_ids[b][r.prompt_mask[b]], r.response_ids[b][r.mask[b]]])[None]
        wanted = (
            0.0
            if r.stopped[b]
            else trainer.model.value.score(trainer.model.policy.base_model(ids).last_hidden_state)[
                0, -1, 0
            ].item()
        )
        assert after[b].item() == pytest.approx(wanted, abs=1e-5)


# catches: a value model that starts from an adapter's names, or from a judge that is an adapter's
# folder and not merged
def test_what_is_grown_from_an_adapter(letters, base, tmp_path):
    policy = get_peft_model(load_policy(base), lora(init_lora_weights=False))
    value, plain = scorer_from(policy, 3), scorer_from(load_policy(base), 3)
    for (name, a), b in zip(value.state_dict().items(), plain.state_dict().values()):
        assert torch.equal(a, b), name
    reward = get_peft_model(
        scorer_from(load_policy(base), 1),
        LoraConfig(
            r=2, target_modules=["query_key_value"], task_type="SEQ_CLS", init_lora_weights=False
        ),
    )
    scorer_from(load_policy(base), 1).save_pretrained(tmp_path / "scorer")
    reward.peft_config["default"].base_model_name_or_path = str(tmp_path / "scorer")
    reward.save_pretrained(tmp_path / "reward")
    again, ids = load_scorer(str(tmp_path / "reward")), torch.arange(2, 12)[None]
    torch.testing.assert_close(again(ids).logits, reward(ids).logits, atol=1e-5, rtol=0)


# ---- Several answers to a prompt ----


# catches: prompts that are repeated and columns that are not, batches n times too large, a run n
# times too long
def test_several_answers_to_each_prompt(ppo):
    seen = []

    def judge(prompts, responses, place, **_):
        seen.append((prompts, place))
        return likes_c(prompts, responses)

    trainer = ppo.trained(
        judge,
        data=Dataset.from_dict(dict(prompt=PROMPTS[:12], place=range(12))),
        num_generations=4,
        total_episodes=None,
        num_train_epochs=1,
        save_rollouts=True,
    )
    assert trainer.state.global_step == 12 * 4 // 8
    assert all(len(r) == 8 for r in rollouts(trainer))
    assert logs(trainer)[-1]["episode"] == 48
    for prompts, place in seen:
        assert place == [p for p in place[::4] for _ in range(4)]
        assert prompts == [PROMPTS[p] for p in place]
    assert any(len(set(r.responses[:4])) > 1 for r in rollouts(trainer))
    assert sorted(p for _, place in seen for p in place[::4]) == list(range(12))


# ---- Bad input ----


def test_what_cannot_be_is_named(ppo, letters):
    adapted = lambda: get_peft_model(begin(letters), lora())
    given = dict(share_value_trunk=True, parts=dict(value_model=scorer_from(begin(letters))))
    for how, named in (
        (dict(model=adapted(), parts=dict(peft_config=lora())), "already has an adapter"),
        (dict(model=adapted(), model_adapter_name="mine"), r"_name is 'mine' .*\['default'\]"),
        (dict(ref_adapter_name="old"), r"ref_adapter_name is 'old' and the policy has .*\[\]"),
        (given, "share_value_trunk is set and a value_model is given"),
    ):
        with pytest.raises(ValueError, match=named):
            ppo(**how)


def test_a_missing_library_is_named(ppo, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="pip install peft"):
        ppo(parts=dict(peft_config=lora()))
