"""Which settings one update can be done again with, and why the others are refused."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from rlhf_nb.ppo import ESTIMATORS
from rlhf_nb.runtime import compat
from rlhf_nb.runtime.errors import did_you_mean
from rlhf_nb.runtime.resume import NAMING
from rlhf_nb.trainer import PPOConfig

# Settings that the optimizer steps read.
OF_UPDATE = set(
    "learning_rate value_learning_rate value_warmup_updates lr_scheduler_type lr_scheduler_kwargs "
    "warmup_steps total_episodes max_steps weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "max_grad_norm cliprange cliprange_high dual_clip cliprange_value vf_coef entropy_coef "
    "importance_level loss_aggregation kl_in num_ppo_epochs num_mini_batches target_kl "
    "vllm_importance_sampling_correction vllm_importance_sampling_cap per_device_train_batch_size "
    "gradient_accumulation_steps micro_batch_tokens trim_padding activation_checkpointing "
    "gradient_checkpointing gradient_checkpointing_kwargs bf16 fp16 tf32".split()
)
# Settings between the judge's score and the advantages: the record has all that they need.
OF_REWARDS = set(
    "kl_coef kl_estimator gamma lam lam_value missing_eos_penalty non_eos_penalty "
    "penalty_reward_value normalize_scores score_clip whiten_rewards bootstrap_truncated "
    "advantage_estimator".split()
)
MAY_VARY = OF_UPDATE | OF_REWARDS
REFUSED = {  # why, and the settings
    "it belongs to the sampling: these episodes were written with {was}, and nothing is sampled "
    "again. Only a new run shows another one": "temperature top_k top_p response_length "
    "stop_token stop_token_id stop_strings num_generations train_sampling_strategy packing "
    "local_rollout_forward_batch_size ds3_gather_for_generation dataloader_drop_last data_seed "
    "num_train_epochs use_vllm vllm_mode vllm_gpu_memory_utilization vllm_max_model_length "
    "vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port "
    "vllm_server_timeout vllm_group_port",
    "it belongs to the sampling and to the order of the rows: with another seed the run would have "
    "had other episodes. Only a new run shows that": "seed",
    "it belongs to the judges, which do not judge again: the record keeps the total of their "
    "scores. Vary missing_eos_penalty, score_clip or kl_coef": "reward_model_path reward_weights "
    "reward_aggregation reward_variance_coef reward_center",
    "it belongs to the models: the checkpoint's weights and its optimizer's state are of those "
    "that the run had": "sft_model_path share_value_trunk model_adapter_name ref_adapter_name "
    "resize_embeddings optim optim_args optim_target_modules",
    "the number of episodes is that of the record: vary num_mini_batches, or "
    "per_device_train_batch_size (rows of a forward pass)": "batch_size local_batch_size "
    "micro_batch_size mini_batch_size local_mini_batch_size",
    "it decides where and in which order numbers are computed, and so changes them by rounding "
    "alone: leave it out": "use_cpu full_determinism deepspeed fsdp "
    "fsdp_config accelerator_config ddp_backend ddp_bucket_cap_mb ddp_static_graph",
    "no run of PPO can have it: every batch has rows of a new length, so layers would be compiled "
    "again and again": "torch_compile torch_compile_backend torch_compile_mode",
    "it moves kl_coef after an update, and so changes the next one: vary kl_coef": "kl_controller "
    "kl_target kl_horizon",
    **{f"no run of PPO can have it: {why}": names for why, names in compat.REFUSED.items()},
}
REASONS = {name: why for why, names in REFUSED.items() for name in names.split()}
NOWHERE = "no number of one update depends on it: leave it out"

# What a trainer is made from again: PPO's own settings, and these of transformers.
THEIRS = set(
    "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 "
    "adam_beta2 adam_epsilon max_grad_norm optim optim_args optim_target_modules max_steps "
    "num_train_epochs per_device_train_batch_size gradient_accumulation_steps seed "
    "bf16 fp16 tf32 gradient_checkpointing gradient_checkpointing_kwargs use_cpu "
    "use_liger_kernel liger_kernel_config ddp_bucket_cap_mb ddp_find_unused_parameters".split()
)
UNUSED = set(  # of PPO's own: who samples, and what else is not in one update
    "use_vllm save_rollouts save_start num_sample_generations overwrite_output_dir resume_anyway "
    "ref_adapter_name logging_steps dataset_num_proc".split()
)


def settings_of(run: Mapping[str, Any]) -> dict[str, Any]:
    "All settings that a checkpoint's manifest records of its run."
    return {name: run[name] for name in NAMING if name in run} | run.get("settings", {})


def check_settings(
    changes: Mapping[str, Any],  # what is asked for
    was: Mapping[str, Any],  # the run's settings
) -> None:
    "Raises ValueError on a setting that this update cannot be done again with, and says why."
    known = {f.name for f in fields(PPOConfig)} | set(REASONS)
    for name, value in changes.items():
        if name not in known:
            guess = did_you_mean(name, sorted(MAY_VARY))
            raise ValueError(f"there is no setting {name!r}.{guess} See rlhf-nb replay --help.")
        why = None if name in MAY_VARY else REASONS.get(name, NOWHERE)
        why = why or unfit(name, {**was, **changes}, was)
        if why and value != was.get(name):
            old = was.get(name)
            text = why.format(was="other settings" if old is None else f"{name} {old}")
            raise ValueError(f"{name} cannot be varied here: {text}.")
    # Made for what PPOConfig alone refuses, such as a number out of range.
    arguments({**was, **in_same_batch(changes, was)}, Path(tempfile.gettempdir()))


def unfit(name: str, now: Mapping[str, Any], was: Mapping[str, Any]) -> str | None:
    "Why a setting that may vary cannot have its new value here; None: it can."
    old, value = was.get(name), now[name]
    if name == "kl_estimator" and value == "full" != old:
        return "the exact sum over the vocabulary is not in the record: take k1, k2, k3 or abs"
    if name == "advantage_estimator" and critic_of(value) != critic_of(old):
        return (
            "the checkpoint's optimizer has or lacks a value model as the run did: take an "
            "estimator that agrees with it about the value model"
        )
    if name == "value_learning_rate" and (value is None) != (old is None):
        return (
            "the run had one rate for both models, or one each, and so has its optimizer's state: "
            "vary learning_rate, or vf_coef"
        )
    if name == "normalize_scores" and value and not old:
        return (
            "it needs the mean and spread of all scores so far, which this run did not keep, as it "
            "was off: only a new run shows it. Vary score_clip or kl_coef"
        )
    if name == "total_episodes" and (steps := now["max_steps"]) > 0:
        return (
            f"max_steps is {steps}, which alone decides how long the schedule is: vary max_steps, "
            "or set it to -1 as well"
        )
    return None


def critic_of(name: Any) -> bool:
    "Whether an estimator has a value model."
    return name in ESTIMATORS and ESTIMATORS[name].critic


def in_same_batch(changes: Mapping[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    "Rows of a forward pass and passes of a batch together make the episodes of the record."
    rows, passes = "per_device_train_batch_size", "gradient_accumulation_steps"
    total, made = was[rows] * was[passes], {**changes}
    for one, other in ((rows, passes), (passes, rows)):
        if one in changes and other not in changes:
            if not changes[one] > 0 or total % changes[one]:
                raise ValueError(
                    f"{one} is {changes[one]} and the record has {total} episodes on each device: "
                    f"give a divisor of {total}."
                )
            made[other] = total // changes[one]
    if made.get(rows, was[rows]) * made.get(passes, was[passes]) != total:
        raise ValueError(
            f"{rows} x {passes} is {made[rows] * made[passes]} and the record has {total} episodes "
            f"on each device: give one of the two, a divisor of {total}."
        )
    return made


def arguments(
    settings: Mapping[str, Any],  # of the run, with what is varied
    folder: Path,  # for what a trainer writes, not the run's
) -> PPOConfig:
    "Settings for a trainer that does one update and reports to nobody. Raises ValueError."
    own = {f.name for f in fields(PPOConfig)} - {f.name for f in fields(TrainingArguments)}
    defaults = {f.name: f.default for f in fields(PPOConfig) if f.init}
    names = defaults.keys() & ((own - UNUSED) | THEIRS) & settings.keys()
    given = {name: settings[name] for name in names if settings[name] != defaults[name]}
    if not given.get("gradient_checkpointing"):  # an older name, which warns even where it is off
        given.pop("gradient_checkpointing", None)
    return PPOConfig(
        str(folder),
        **given,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        num_sample_generations=0,
    )
