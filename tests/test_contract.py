"What people know from the published trainer, and what they see when they step by hand."

import dataclasses
import inspect

import pytest
from datasets import Dataset
from ppo_fixtures import PROMPTS, SIZES, rollouts, unlike, weights
from transformers import TrainingArguments

from rlhf_nb.diagnose.memory import MemoryPlan
from rlhf_nb.gae import gae, td_errors
from rlhf_nb.losses import policy_diagnostics, policy_loss, value_diagnostics, value_loss
from rlhf_nb.models import scorer_from
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import tiny_policy

# trl 1.12.0, trl.experimental.ppo.PPOConfig
PUBLISHED = {  # a setting, or several of one default
    "learning_rate": 3e-6,
    "dataset_num_proc total_episodes stop_token stop_token_id missing_eos_penalty": None,
    "model_adapter_name ref_adapter_name": None,
    "num_mini_batches": 1,
    "local_rollout_forward_batch_size": 64,
    "num_sample_generations logging_steps": 10,
    "response_length": 53,
    "temperature": 0.7,
    "sft_model_path reward_model_path": "EleutherAI/pythia-160m",
    "num_ppo_epochs": 4,
    "whiten_rewards push_to_hub": False,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "cliprange cliprange_value": 0.2,
    "vf_coef": 0.1,
    "gamma": 1.0,
    "lam": 0.95,
    "ds3_gather_for_generation": True,
}
NEW = {  # what is new leaves the published behaviour as it was
    "offload_frozen use_vllm vllm_enable_sleep_mode non_eos_penalty normalize_scores": False,
    "bootstrap_truncated share_value_trunk save_merged save_value_model resize_embeddings": False,
    "save_rollouts save_start overwrite_output_dir": False,
    "vllm_max_model_length score_clip cliprange_high dual_clip target_kl": None,
    "value_learning_rate stop_strings reward_weights trim_padding micro_batch_tokens": None,
    "resume_anyway lam_value lam_length_alpha max_episode_length environment_timeout": None,
    "reward_level": "response",
    "step_separator": "\n",
    "vllm_gpu_memory_utilization": 0.3,
    "importance_sampling_correction": True,
    "importance_sampling_cap": 2.0,
    "importance_sampling_mode": "token_truncate",
    "kl_controller": "fixed",
    "entropy_coef": 0.0,
    "value_warmup_updates": 0,
    "value_pretrain_rollouts": None,
    "value_pretrain_epochs": 4,
    "reward_variance_coef gamma_turn": 1.0,
    "num_generations": 1,
    "reward_aggregation": "sum",
    "reward_center": "group",
    "advantage_estimator": "gae",
    "kl_in": "reward",
    "loss_aggregation": "token_mean",
    "importance_level": "token",
    "lam_turn": 0.95,
    "max_turns": 8,
}
DEFAULTS = {name: x for names, x in (PUBLISHED | NEW).items() for name in names.split()}


# catches: a field that was renamed, a default that moved
def test_the_published_fields_and_defaults(tmp_path):
    args = PPOConfig(str(tmp_path), use_cpu=True)
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS
    ours = {f.name for f in dataclasses.fields(PPOConfig)} - {
        f.name for f in dataclasses.fields(TrainingArguments)
    }
    told = set(DEFAULTS) | {"penalty_reward_value", "kl_target", "kl_horizon"}
    assert ours <= told, f"fields that nothing is said of here: {ours - told}"


# catches: a default that is changed in the settings, and not in the function that a page calls, or
# not in the memory plan
def test_functions_have_the_defaults_of_the_settings():
    settings = {f.name: f.default for f in dataclasses.fields(PPOConfig)}
    del settings["activation_checkpointing"]  # None: as the machine is; the plan is of a GPU
    del settings["max_turns"]  # a plan is of one turn, unless something answers
    assert not [
        f"{function.__name__}({name}={given.default}), and the setting is {settings[name]}"
        for function in (
            policy_loss,
            policy_diagnostics,
            value_loss,
            value_diagnostics,
            gae,
            td_errors,
            MemoryPlan,
        )
        for name, given in inspect.signature(function).parameters.items()
        if given.default is not given.empty and given.default != settings.get(name, given.default)
    ]


# catches: a hardware default that is taken in silence, or one that overrides what the user said
@pytest.mark.parametrize(
    "settings, wanted",
    [
        ({}, ["float32", "activations kept"]),
        (dict(bf16=True, activation_checkpointing=True), ["bf16", "activations recomputed"]),
        (
            dict(num_mini_batches=2, num_ppo_epochs=3, total_episodes=24),
            ["3 updates of 8 responses", "3 epochs x 2 mini-batches of 4", "micro-batches of 4"],
        ),
    ],
)
def test_the_first_line_tells_what_runs(ppo, capsys, monkeypatch, settings, wanted):
    trainer = ppo(**dict(disable_tqdm=False, total_episodes=8) | settings)
    said = trainer.describe()
    for part in (*wanted, "one process", "cpu", "trained parameters: policy 3,"):
        assert part in said
    trainer.train()
    assert said in capsys.readouterr().out.splitlines()
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    assert "cpu (4 threads; small models may be faster on one" in trainer.describe()


# catches: a launcher's request that is dropped in silence, which costs a night on one GPU of eight
@pytest.mark.parametrize(
    "name, value",
    [("ACCELERATE_USE_DEEPSPEED", "true"), ("ACCELERATE_USE_FSDP", "true"), ("WORLD_SIZE", "2")],
)
def test_a_layout_that_did_not_come_is_an_error(ppo, monkeypatch, name, value):
    trainer = ppo()
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=f"{name} is '{value}' and what runs is one process"):
        trainer.layout.check()


# catches: two processes asked for, and one that runs without a word; the launch itself is in
# test_two_processes_cli.py
def test_one_process_of_several_is_an_error(ppo, monkeypatch):
    trainer = ppo()
    trainer.layout.check()
    for name, value in dict(ACCELERATE_MIXED_PRECISION="no", MASTER_ADDR="127.0.0.1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="what runs is one process.* launch with --multi_gpu"):
        trainer.layout.check()


# catches: a part that is taken as an object only
def test_every_model_may_be_a_folder(ppo, letters, tmp_path):
    parts = dict(
        policy=tiny_policy(letters, 0, **SIZES),
        ref=tiny_policy(letters, 1, **SIZES),
        reward=scorer_from(tiny_policy(letters, 2, **SIZES), 2),
        value=scorer_from(tiny_policy(letters, 3, **SIZES), 3),
    )
    for name, model in parts.items():
        model.save_pretrained(tmp_path / name)
        letters.save_pretrained(tmp_path / name)

    def trained(**how) -> PPOTrainer:
        return ppo.trained(
            how["reward"],
            model=how["policy"],
            parts=dict(ref_model=how["ref"], value_model=how["value"])
            | ({} if how["tokenizer"] else dict(processing_class=None)),
            save_rollouts=True,
            total_episodes=16,
        )

    by_name = trained(**{name: str(tmp_path / name) for name in parts}, tokenizer=False)
    found = rollouts(by_name)
    by_object = trained(**parts, tokenizer=True)
    assert not unlike(weights(by_name), weights(by_object))
    assert [r.raw_scores.tolist() for r in found] == [
        r.raw_scores.tolist() for r in rollouts(by_object)
    ] and found[0].kl.abs().max() > 1e-3


# ---- By hand ----


# catches: a step that wants a batch, the same batch twice, an order that the seed has no say in
def test_steps_without_a_batch_walk_through_the_prompts(ppo):
    seen = []

    def judge(prompts, responses, **_):
        seen.extend(prompts)
        return [0.0] * len(responses)

    data = Dataset.from_dict(dict(prompt=[f"{a}{b}" for a in "abcdef" for b in "ghij"]))
    trainer = ppo(judge, data=data)
    for _ in range(4):
        metrics = trainer.step()
    assert sorted(seen[:24]) == sorted(data["prompt"])
    assert seen[:24] != data["prompt"]
    assert len(seen) == 32
    assert metrics["episode"] == 32


def test_what_comes_back_shows_itself(ppo):
    trainer = ppo()
    r = trainer.score(trainer.rollout(PROMPTS[:8]))
    lines = str(r).splitlines()
    assert lines[0] == repr(r)
    assert len(lines) == 10
    assert {"prompt", "response", "length", "stopped", "kl", "score"} <= set(lines[1].split())
    assert "<table" in r._repr_html_()
    metrics = trainer.update(trainer.advantages(r))
    assert "<table" in metrics._repr_html_()
    assert "approxkl_avg" in metrics._repr_html_()
    assert isinstance(metrics, dict)


# catches: a copy of weights that lie in parts, which is a model of empty tensors
@pytest.mark.parametrize(
    "reward", [lambda prompts, responses, **_: [0.0] * len(responses), "model"]
)
def test_under_zero3_what_cannot_be_copied_is_named(ppo, letters, tmp_path, monkeypatch, reward):
    monkeypatch.setattr("rlhf_nb.training.build.zero3_is_live", lambda: True)
    with pytest.raises(ValueError, match="under DeepSpeed ZeRO-3 .* give ref_model"):
        ppo()
    if reward == "model":
        reward = scorer_from(tiny_policy(letters, 2, **SIZES), 2)
    with pytest.raises(ValueError, match="under DeepSpeed ZeRO-3 .* give value_model"):
        ppo(reward, parts=dict(ref_model=tiny_policy(letters, 1, **SIZES)))
