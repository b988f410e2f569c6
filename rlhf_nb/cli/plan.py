"""`rlhf-nb ppo --dry_run`: the memory that a run needs, before anything is loaded."""

from __future__ import annotations

import os
import textwrap
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from rlhf_nb.base.files import read_object
from rlhf_nb.base.loading import explain_load_errors, from_where
from rlhf_nb.cli.arguments import PPOModelArguments
from rlhf_nb.cli.models import adapter_config, no_bars
from rlhf_nb.cli.ppo_models import check_models, has_reward_model, policy_name
from rlhf_nb.diagnose.memory import MemoryPlan
from rlhf_nb.estimators import ESTIMATORS


def planned_config(name: str) -> PretrainedConfig:
    "The config of a model; no weights are read. Raises OSError where there is none."
    adapter = Path(name) / "adapter_config.json"
    if adapter.is_file() and not (Path(name) / "config.json").is_file():
        return planned_config(read_object(adapter)["base_model_name_or_path"])
    with explain_load_errors(name):
        return AutoConfig.from_pretrained(**from_where(name))


def layout_of(options: Namespace) -> tuple[str, int]:
    "Layout and number of GPUs, from the launcher or the options. ValueError where they differ."
    env, asked = os.environ, (options.layout, options.num_processes)
    is_on = lambda name: env.get(name, "").lower() in ("1", "true", "yes")
    n = int(env.get("WORLD_SIZE", options.num_processes or 1))
    layout = "ddp" if n > 1 else "alone"
    if is_on("ACCELERATE_USE_FSDP"):
        layout = "fsdp2"
    if is_on("ACCELERATE_USE_DEEPSPEED"):
        layout = f"zero{env.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    if "WORLD_SIZE" not in env:
        layout = options.layout or layout
        if layout != "alone" and options.num_processes is None:
            raise ValueError(f"--layout is {layout}: give the number of GPUs, --num_processes 8.")
    elif any(option not in (None, running) for option, running in zip(asked, (layout, n))):
        raise ValueError(
            f"the launcher has {layout} on {n} process(es): leave out --layout and "
            "--num_processes, or the launcher."
        )
    return layout, n


def gpu_memory_of(options: Namespace) -> float | None:
    "GiB of a GPU that vLLM leaves to the trainer; None where no GPU is known."
    whole = options.gpu_memory
    if whole is None and not options.use_cpu and torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory / 2**30
    taken = options.vllm_gpu_memory_utilization if options.use_vllm else 0.0
    return whole and round(whole * (1 - taken), 1)


def plan_of(options: Namespace) -> MemoryPlan:
    "The plan of a run. Raises ValueError and OSError as the run would."
    names = [f.name for f in fields(PPOModelArguments)]
    models = PPOModelArguments(**{name: getattr(options, name) for name in names})
    check_models(models, options, options.dataset_name)
    find = lambda name: planned_config(name) if name else None
    policy = planned_config(policy_name(models.model_name_or_path, options.sft_model_path))
    judged = has_reward_model(models, options)
    layout, processes = layout_of(options)
    dtype = str(getattr(policy, "dtype", None)) if models.dtype == "auto" else models.dtype
    half = dtype.split(".")[-1] in ("bfloat16", "float16")
    positions = getattr(policy, "max_position_embeddings", None) or 10**9
    turns = options.max_turns if models.environment else 1
    most = models.environment and options.max_episode_length
    # where the options leave it open, bf16 with recomputation on a GPU
    bf16 = options.bf16 if options.bf16 is not None else not options.use_cpu and not options.fp16
    recompute = {options.activation_checkpointing, options.gradient_checkpointing} - {None}
    # what the plan has under the run's own name, and what is worked out
    settings: dict[str, Any] = {
        f.name: getattr(options, f.name, f.default) for f in fields(MemoryPlan)
    } | dict(
        policy=policy,
        reward=find(judged and options.reward_model_path),
        value=find(models.value_model_path),
        layout=layout,
        num_processes=processes,
        prompt_length=options.max_prompt_length
        or max(1, min(512, positions - (most or turns * options.response_length))),
        max_turns=turns,
        max_episode_length=most or None,
        precision="bf16" if bf16 else "fp16" if options.fp16 else "float32",
        activation_checkpointing=any(recompute) if recompute else not options.use_cpu,
        dtype="bfloat16" if half else "float32",
        gpu_memory=gpu_memory_of(options),
        peft_config=adapter_config(models, "CAUSAL_LM", models.use_peft),
        value_peft_config=adapter_config(models, "SEQ_CLS", models.value_use_peft),
        critic=ESTIMATORS[options.advantage_estimator].critic,
        more_rewards=tuple(map(planned_config, models.reward_ensemble or [])),
    )
    return MemoryPlan(**settings)


def dry_run(options: Namespace) -> int:
    "Print what the run needs. Returns the exit code: 1 where it does not fit the GPU, else 0."
    if os.environ.get("RANK", "0") != "0":
        return 0  # one process prints for all; a launcher ends the others where one fails
    with no_bars():
        plan = plan_of(options)
    policy, *value = [f"{m.trained:,} of {m.params:,}" for m in plan.trained]
    head = "a layer on the policy" if plan.critic else "none"
    unknown = " (without what is answered: set --max_episode_length)"
    left_out = unknown * (plan.max_episode_length is None)
    played = f"episodes of {plan.episode} behind them{left_out}, {plan.max_turns} turns with "
    assumed = "" if options.max_prompt_length else " (assumed: set --max_prompt_length)"
    summary = (
        f"PPO, planned and not run: {plan.layout}, {plan.num_processes} process(es), "
        f"{plan.precision}, weights loaded in {plan.dtype}, activations "
        f"{'recomputed' if plan.activation_checkpointing else 'kept'}; micro-batches of "
        f"{plan.per_device_train_batch_size}, prompts of {plan.prompt_length} tokens{assumed}, "
        f"{played * (plan.max_turns > 1)}responses of {plan.response_length}; trained "
        f"parameters: policy {policy}, value model {value[0] if value else head}."
    )
    print(textwrap.fill(summary, 100))
    if options.use_vllm:
        print("The plan counts with what vLLM leaves of each GPU (--vllm_gpu_memory_utilization).")
    print(f"\nGiB on each GPU\n{plan.frame().to_string(float_format='{:.2f}'.format)}\n")
    print(plan.verdict)
    return 1 if plan.fits is False else 0
