"""What trl's own tests of its PPO trainer check (tests/experimental/test_ppo_trainer.py and
test_modeling_value_head.py there), on models made here. Each test below is named for the one whose
behaviour it checks; those of parts that exist in trl alone are listed with the reason."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

import rlhf_nb
from rlhf_nb import PPOConfig, PPOTrainer
from rlhf_nb.engines import CachedEngine
from rlhf_nb.masks import masked_mean, masked_var, whiten
from rlhf_nb.models import ValueHead, load_policy, scorer_from
from rlhf_nb.rollout import Sampling

# Of AutoModelForCausalLMWithValueHead and AutoModelForSeq2SeqLMWithValueHead, wrappers that trl's
# own trainer no longer uses: importing one here names what to use (test_compat.py).
WRAPPERS = {
    "test_value_head test_value_head_shape test_value_head_init_random test_value_head_not_str": (
        "the wrapper's v_head; ours is ValueHead, which starts at zero on purpose"
    ),
    "test_from_save_trl test_from_save_trl_sharded": "the wrapper's own files; a checkpoint here",
    "test_from_save_transformers test_from_save_transformers_sharded": (
        "the policy is a transformers model and is saved as one"
    ),
    "test_inference": "the wrapper returns three things; PolicyAndValue returns its own three",
    "test_dropout_config test_dropout_kwargs": "dropout of the wrapper's head; ours has none",
    "test_generate": "the wrapper passes it on; the policy is the model itself",
    "test_transformers_bf16_kwargs": "the wrapper passes it on to from_pretrained",
    "test_push_to_hub": "skipped in trl itself; test_compat.py pushes to a stand-in",
    "test_create_peft_model test_create_peft_model_from_config test_peft_requires_grad": (
        "the wrapper around a PeftModel; the trainer takes one as it is"
    ),
    "test_create_bnb_peft_model_from_config": "the same with bitsandbytes, on a GPU",
    "test_shared_layers": "layers that policy and reference share; the reference here is whole",
}

SMALL = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)
LORA = dict(r=4, lora_alpha=8, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")


def qwen(tokenizer, seed: int = 0):
    torch.manual_seed(seed)
    ids = dict(eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    config = Qwen2Config(vocab_size=len(tokenizer) + 4, **SMALL, **ids)
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture
def ppo(tmp_path, letters):
    def make(peft_config=None, model=None, rows=17, **settings):
        ids = [[2 + i % 8, 3 + i % 5, 1] for i in range(rows)]  # a prompt ends with EOS there
        data = Dataset.from_dict(dict(input_ids=ids, attention_mask=[[1] * 3] * rows))
        model = model or qwen(letters)
        reference = None if peft_config or isinstance(model, PeftModel) else qwen(letters)
        args = PPOConfig(
            output_dir=str(tmp_path / "run"),
            per_device_eval_batch_size=2,
            **dict(per_device_train_batch_size=4, num_ppo_epochs=2, response_length=6) | settings,
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            save_strategy="no",
        )
        return PPOTrainer(
            args=args,
            processing_class=letters,
            model=model,
            ref_model=reference,
            reward_model=scorer_from(qwen(letters, 1), 1),
            value_model=scorer_from(qwen(letters, 2), 2),
            train_dataset=data,
            eval_dataset=data.select(range(3)),
            peft_config=peft_config,
        )

    return make


def copies(model) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def moved(model, before: dict[str, torch.Tensor]) -> list[str]:
    after = dict(model.named_parameters())
    return [name for name, x in before.items() if name in after and not torch.equal(x, after[name])]


# ---- TestBatchGeneration ----


@pytest.mark.parametrize("rows", [3, 64])
def test_mini_batch_generation_and_test_single_batch_generation(rows, letters):
    prompts = torch.randint(2, 10, (7, 4))
    engine = CachedEngine(rows)
    engine.sync(qwen(letters).eval())
    how = Sampling(9, letters.pad_token_id, (1,), 0.5)
    sampled, _ = engine.generate(prompts, torch.ones_like(prompts, dtype=torch.bool), how)
    assert len(sampled.response_ids) == 7 and 0 < sampled.response_ids.shape[1] <= 9
    assert sampled.mask.shape == sampled.response_ids.shape and sampled.mask[:, 0].all()


# ---- TestCore ----

X, MASK = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 1, 0])


def test_masked_mean():
    assert masked_mean(X, MASK) == X[1:3].mean()


def test_masked_var():
    assert masked_var(X, MASK) == X[1:3].var()


def test_masked_whiten():
    white = (X[1:3] - X[1:3].mean()) * torch.rsqrt(X[1:3].var() + 1e-8)
    torch.testing.assert_close(whiten(X, MASK)[1:3], white)


# ---- Statistics ----


# catches: micro-batches of 4 and 2 rows whose means count the same
def test_uneven_micro_batch_stats_are_pooled(ppo):
    same = dict(num_mini_batches=2, num_ppo_epochs=1, total_episodes=12, response_length=4)
    uneven = ppo(per_device_train_batch_size=4, gradient_accumulation_steps=3, **same)
    whole = ppo(per_device_train_batch_size=12, **same)
    for trainer in (uneven, whole):
        trainer.train()
    logged = [trainer.state.log_history[0] for trainer in (uneven, whole)]
    for name in logged[0]:
        if name.startswith(("loss/", "policy/", "val/")):
            assert logged[0][name] == pytest.approx(logged[1][name], rel=1e-4, abs=1e-6), name


def test_ratio_var_ignores_unwritten_stats(ppo):
    trainer = ppo(
        learning_rate=0.0,
        gradient_accumulation_steps=3,
        num_mini_batches=2,
        num_ppo_epochs=1,
        total_episodes=12,
        response_length=4,
        num_sample_generations=0,
    )
    trainer.train()
    assert trainer.state.log_history[0]["val/ratio_var"] == pytest.approx(0.0, abs=1e-12)


# ---- TestPPOTrainer ----


def test_basic_training(ppo):
    trainer = ppo(num_train_epochs=1.0)
    policy, value = copies(trainer.model.policy), copies(trainer.model.value_model)
    trainer.train()
    assert moved(trainer.model.policy, policy) and moved(trainer.model.value_model, value)
    assert list((trainer.output_dir / "completions").iterdir())


def test_peft_training(ppo, letters):
    trainer = ppo(LoraConfig(**LORA), num_train_epochs=1.0)
    policy, value = copies(trainer.model.policy), copies(trainer.model.value_model)
    trainer.train()
    changed = moved(trainer.model.policy, policy)
    assert changed and all("lora" in name for name in changed)
    assert moved(trainer.model.value_model, value)
    assert any(x.any() for name, x in trainer.model.policy.named_parameters() if "lora_B" in name)


# What its constructor refuses.
@pytest.mark.parametrize("config", [dict(r=4), "lora"])
def test_peft_config_is_of_peft(config, ppo):
    with pytest.raises(TypeError, match="peft_config is (dict|str): give a configuration of peft"):
        ppo(config)


def test_a_peft_model_takes_no_second_adapter(ppo, letters):
    with pytest.raises(
        ValueError, match="already has an adapter and peft_config would add another"
    ):
        ppo(LoraConfig(**LORA), model=get_peft_model(qwen(letters), LoraConfig(**LORA)))


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(stop_token="eos", stop_token_id=3), "stop_token"),
        (dict(stop_token="period"), "stop_token"),
        (dict(kl_estimator="k4"), "kl_estimator"),
        (dict(num_mini_batches=3), "num_mini_batches"),
    ],
)
def test_settings_that_its_constructor_refuses(settings, message, ppo):
    with pytest.raises(ValueError, match=message):
        ppo(**settings)


# ---- TestPeftModel and TestReferenceModel: what of them is not the wrapper's ----


def test_check_peft_model_nb_trainable_params(ppo, letters):
    policy = get_peft_model(qwen(letters), LoraConfig(**LORA))
    count = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    trained = [p for p in ppo(model=policy).policy.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == count > 0
    whole = ppo().policy
    assert all(p.requires_grad for p in whole.parameters())


def test_save_pretrained_peft_and_test_load_pretrained_peft(ppo, letters, tmp_path):
    trainer = ppo(LoraConfig(**LORA), total_episodes=4)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    again = PeftModel.from_pretrained(qwen(letters), tmp_path / "adapter")
    saved = {n: x for n, x in again.named_parameters() if "lora" in n}
    for name, x in trainer.policy.named_parameters():
        if "lora" in name:
            torch.testing.assert_close(x, saved[name])


def test_continue_training_peft_model(ppo, letters, tmp_path):
    get_peft_model(qwen(letters), LoraConfig(**LORA)).save_pretrained(tmp_path / "adapter")
    policy = PeftModel.from_pretrained(qwen(letters), tmp_path / "adapter", is_trainable=True)
    trainer = ppo(model=policy, total_episodes=8)
    before = copies(trainer.policy)
    trainer.train()
    assert any("lora" in name for name in moved(trainer.policy, before))


def test_independent_reference(ppo, letters):
    model = qwen(letters)
    reference = rlhf_nb.create_reference_model(model)
    before = copies(reference)
    assert not moved(model, before) and not any(p.requires_grad for p in reference.parameters())
    trainer = ppo(model=model, total_episodes=4, learning_rate=1e-2)
    trainer.ref_model, kept = reference, copies(reference)
    trainer.train()
    assert moved(trainer.policy, before) and not moved(reference, kept)


# ---- A head for values, as far as ours has one ----


def test_value_head_shape_and_start(letters):
    head = ValueHead(qwen(letters))
    assert head.score.weight.shape == (1, 16) and not head.score.weight.any()


def test_transformers_bf16_kwargs(letters, tmp_path):
    qwen(letters).to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_policy(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load_policy(str(tmp_path)).dtype == torch.float32  # what trains


def test_every_wrapper_is_named():
    for name in ("AutoModelForCausalLMWithValueHead", "AutoModelForSeq2SeqLMWithValueHead"):
        with pytest.raises(ImportError, match="use AutoModelForCausalLM of transformers"):
            getattr(rlhf_nb, name)
    listed = [name for names in WRAPPERS for name in names.split()]
    assert len(listed) == len(set(listed)) and all(why for why in WRAPPERS.values())
