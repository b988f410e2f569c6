"""What scripts for trl's PPO trainers call things, and what each is called here: of 1.12, of
PPOv2Trainer, and of the PPOTrainer of 0.11. Nothing in this module trains."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any

import yaml

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.markdown import inline_markdown


def renames(pairs: str) -> dict[str, str]:
    "'old=new old=new' as a dictionary."
    return dict(pair.split("=") for pair in pairs.split())


VALUE = (
    "AutoModelForCausalLM of transformers: PPOTrainer makes the value model itself, "
    "value_model=... is your own, share_value_trunk=True is one layer on the policy"
)
OUT = "leave it out: it is not needed here"
ALL_TOKENS = (
    "leave it out: PPO draws from all tokens, which it scores under. Those that are never drawn "
    "would lose probability whatever is paid (course page 05, 'A truncated sampler')"
)
IMPORTS = renames("PPOv2Trainer=PPOTrainer PPOv2Config=PPOConfig") | {  # names that scripts import
    "AutoModelForCausalLMWithValueHead": VALUE,
    "AutoModelForSeq2SeqLMWithValueHead": VALUE + "; encoder-decoder models are not supported",
    "PreTrainedModelWrapper": VALUE,
    "respond_to_batch": "trainer.rollout(prompts)",
    "LengthSampler": "response_length of PPOConfig",
    "SIMPLE_QUERY_CHAT_TEMPLATE": "SIMPLE_CHAT_TEMPLATE",
    "get_dataset": "load_dataset of datasets",
    "set_seed": "set_seed of transformers",
    **{
        f"{name.upper()}{kind}": f"PPO{kind} with advantage_estimator='{name}' of PPOConfig"
        for name in ("grpo", "rloo")
        for kind in ("Trainer", "Config")
    },
}
TRAINER = renames(  # keywords of PPOTrainer
    "config=args tokenizer=processing_class policy=model ref_policy=ref_model "
    "dataset=train_dataset reward_fn=reward_model reward_funcs=reward_model "
    "training_data_collator=data_collator policy_model=model ref_policy_model=ref_model"
) | {
    "optimizer": "optimizer_cls_and_kwargs=(torch.optim.AdamW, dict(lr=3e-6)), which trains policy "
    "and value model",
    "lr_scheduler": "lr_scheduler_type of PPOConfig; one of your own goes with your own optimizer, "
    "once the trainer is made: trainer.optimizer = ..., trainer.lr_scheduler = ...",
    "num_shared_layers": "share_value_trunk of PPOConfig",
    "compute_metrics": "a reward function: it scores the completions of an evaluation too",
}
CONFIG = renames(  # fields of PPOConfig
    "base_model=sft_model_path init_kl_coef=kl_coef beta=kl_coef target=kl_target "
    "horizon=kl_horizon ppo_epochs=num_ppo_epochs num_updates=max_steps steps=total_episodes "
    "forward_batch_size=local_rollout_forward_batch_size early_stopping=target_kl "
    "backward_batch_size=per_device_train_batch_size use_score_scaling=normalize_scores "
    "use_score_norm=normalize_scores max_new_tokens=response_length log_with=report_to "
    "max_completion_length=response_length truncate_token=stop_token exp_name=run_name "
    "truncate_token_id=stop_token_id task_name=run_name tracker_project_name=project "
    "evaluation_strategy=eval_strategy no_cuda=use_cpu group_by_length=train_sampling_strategy"
) | {
    "model_name": "sft_model_path, or model of PPOTrainer",
    "reward_model": "reward_model_path, or reward_model of PPOTrainer",
    "query_dataset": "train_dataset of PPOTrainer",
    "kl_penalty": "kl_estimator: kl is k1, mse is k2, abs and full have the same names",
    "adap_kl_ctrl": "kl_controller='adaptive'",
    "is_peft_model": "peft_config of PPOTrainer",
    "is_encoder_decoder": "leave it out: encoder-decoder models are not supported",
    "reward_slot": "leave it out: the score is on the last token of the response",
    **dict.fromkeys(("top_k", "top_p", "min_p"), ALL_TOKENS),
    "optimize_cuda_cache": OUT,
    "optimize_device_cache": OUT,
    "save_safetensors": OUT,
    "sanity_check": "total_episodes, for a short run",
    "warmup_ratio": "warmup_steps; below 1 it is a share of all steps",
}
KEYWORDS = dict(PPOTrainer=TRAINER, PPOConfig=CONFIG)
SIZES = (  # fields of PPOConfig that follow from others
    "world_size micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size "
    "num_total_batches"
).split()
METHODS = {  # of a trainer of 0.11
    "generate": "trainer.rollout(prompts)",
    "log_stats": "trainer.step(prompts), which returns the metrics; trainer.train() logs them",
    "save_pretrained": "trainer.save_model(folder)",
    "compute_rewards": "trainer.score(rollout)",
    "current_device": "trainer.args.device",
}
ATTRIBUTES: dict[str, Callable[[Any], Any]] = {  # of a trainer of 1.12, by another name here
    "reward_model": lambda trainer: alone(trainer.judges.judges.values()),
    "policy_model": lambda trainer: trainer.pair.policy,
    "value_model": lambda trainer: trainer.pair.value,
    "dataloader": lambda trainer: trainer.get_train_dataloader(),
    "train_dataset_len": lambda trainer: len(trainer.train_dataset),
    "is_peft_model": lambda trainer: hasattr(trainer.policy, "peft_config"),
    "stop_token_id": lambda trainer: one_or_all(trainer.sampling_settings.stop_ids),
}
REFUSED = {  # what TrainingArguments has and PPO does not do, by the reason
    "noise in the embeddings moves the ratio away from 1": "neftune_noise_alpha",
    "PPO's losses have no labels": "label_smoothing_factor use_liger_kernel liger_kernel_config",
    "the batch belongs to the objective (rlhf-nb ppo --dry_run finds one that fits)": (
        "auto_find_batch_size"
    ),
    "tokens/per_second and episode are logged instead": "include_num_input_tokens_seen",
    "its memory is in use in every phase": "torch_empty_cache_steps",
    "completions are sampled in the precision of the run": "bf16_full_eval fp16_full_eval",
    "a resumed run goes on with the prompts that are next": "ignore_data_skip",
    "its forward passes take masks, which the tool cannot read": "debug",
    "its layouts are DDP, FSDP2 and DeepSpeed ZeRO": "parallelism_config",
}
OPTIMIZERS = ("layerwise", "lomo", "schedule_free")  # that step in the backward, or have two modes


def alone(judges: Iterable[Any]) -> Any:
    "The judge, where there is one; else None."
    judges = list(judges)
    return judges[0] if len(judges) == 1 else None


def one_or_all(ids: Sequence[int]) -> int | list[int] | None:
    "The stop token; a list where there are several, None where there is none."
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def sentence(old: str, new: str) -> str:
    "What an error says of an old name."
    return f"no {old}: {new if new.startswith('leave') else f'use {new}'}"


def no_import(name: str) -> ImportError | None:
    "The error of `from rlhf_nb import NAME` for a name of another release."
    return ImportError(f"rlhf_nb has {sentence(name, IMPORTS[name])}.") if name in IMPORTS else None


def old_names(kind: type) -> type:
    """Class decorator: a keyword that the class does not have raises a TypeError that says what it
    is called here. The sizes that PPOConfig computes may be given, and are compared later."""
    made: Callable[..., None] = vars(kind)["__init__"]
    known = inspect.signature(made).parameters
    renamed = KEYWORDS[kind.__name__]
    computed = SIZES if renamed is CONFIG else []

    @wraps(made)
    def check(self: Any, *given: Any, **named: Any) -> None:
        others = [name for name in named if name not in known and name not in computed]
        if old := [sentence(name, renamed[name]) for name in others if name in renamed]:
            raise TypeError(f"{kind.__name__} has {'; '.join(old)}.")
        if others:
            near = did_you_mean(others[0], known)
            raise TypeError(f"{kind.__name__} has no {others[0]}.{near}")
        if computed:
            self.given_sizes = {name: named.pop(name) for name in computed if name in named}
        made(self, *given, **named)

    kind.__init__ = check  # type: ignore[misc]
    return kind


def published_attribute(trainer: Any, name: str) -> Any:
    """An attribute of the published trainer. Raises AttributeError, with the new name for one of
    its methods in older releases."""
    if name in ATTRIBUTES:
        return ATTRIBUTES[name](trainer)
    kind = type(trainer).__name__
    if name in METHODS:
        raise AttributeError(f"{kind} has {sentence(name, METHODS[name])}.")
    raise AttributeError(f"{kind!r} object has no attribute {name!r}")


def add_metadata(
    card: str,
    name: str | None,
    data: str | list[str] | None,  # data sets
    tags: str | list[str] | None,
) -> str:
    "The same model card with another title, and data sets and tags for the hub."
    listed = lambda x: [x] if isinstance(x, str) else list(x or [])
    _, head, body = card.split("---\n", 2)
    metadata = yaml.safe_load(head)
    if data:
        metadata["datasets"] = listed(data)
    metadata["tags"] = [*dict.fromkeys(metadata.get("tags", []) + listed(tags))]
    if name:
        body = re.sub(r"(?m)^# .*", lambda _: f"# {inline_markdown(name)}", body, count=1)
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n{body}"


def refuse_step() -> None:
    "Raises TypeError for `step(queries, responses, scores)`."
    raise TypeError(
        "step(queries, responses, scores) is of an older trainer: step(prompts) samples the "
        "responses itself and scores them with the trainer's reward_model, which may be a function "
        "f(prompts, responses, **columns)."
    )


def check_sizes(args: Any) -> None:
    "Raises ValueError where a size that follows from others was given another value."
    for name, given in getattr(args, "given_sizes", {}).items():
        computed = getattr(args, name)
        unknown = name == "num_total_batches" and not computed  # until there is a data set
        if given is not None and given != computed and not unknown:
            raise ValueError(
                f"{name} is {given!r} and follows from other settings: per_device_train_batch_size,"
                " gradient_accumulation_steps, num_mini_batches, total_episodes and the number of "
                f"processes make it {computed}. Set those, and leave it out."
            )


def check_refused(args: Any) -> None:
    "Raises ValueError for a setting of TrainingArguments that PPO cannot honour."

    def refuse(name: str, why: str) -> None:
        given = getattr(args, name)
        given = getattr(given, "value", given)
        raise ValueError(f"{name} is {given!r}, which PPO cannot do: {why}.")

    default = {field.name: field.default for field in fields(args)}
    for why, names in REFUSED.items():
        for name in names.split():
            given = getattr(args, name, None)
            if given and given != default[name]:
                refuse(name, f"{why}. Leave it at {default[name]!r}")
    if any(part in str(getattr(args.optim, "value", args.optim)) for part in OPTIMIZERS):
        refuse("optim", "it steps in the backward pass or has modes of its own. Take adamw_torch")
    shares = ("split_batches", "dispatch_batches")
    if any(getattr(args.accelerator_config, name, None) for name in shares):
        refuse("accelerator_config", f"{', '.join(shares)}: each process reads its own prompts")
