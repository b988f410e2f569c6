"""`rlhf-nb ppo --dry_run`: the memory that a run needs, before anything is loaded."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig

from rlhf_nb.base.loading import from_where
from rlhf_nb.cli.arguments import PPOModelArguments
from rlhf_nb.cli.models import adapter_config, no_bars
from rlhf_nb.cli.ppo_models import check_critic, check_judges, has_reward_model, policy_name
from rlhf_nb.diagnose.memory import MemoryPlan, PPOSetup, plan_memory
from rlhf_nb.estimators import ESTIMATORS


def config_of(
    flag: str,  # the option, such as --model_name_or_path
    name: str,  # its value
) -> PretrainedConfig:
    "A model's config; no weights are read. Raises OSError where there is none."
    folder, adapter = Path(name), Path(name) / "adapter_config.json"
    if adapter.is_file() and not (folder / "config.json").is_file():
        return config_of(flag, json.loads(adapter.read_text())["base_model_name_or_path"])
    place = from_where(name)
    if folder.is_dir() and not (folder / "config.json").is_file() and "gguf_file" not in place:
        raise OSError(
            f"{flag} {name}: the folder has no config.json. Give one that has; weights are not "
            "needed."
        )
    try:
        return AutoConfig.from_pretrained(**place)
    except OSError as error:
        raise OSError(
            f"{flag} {name}: no folder has that name, its config.json is not in the cache of the "
            "hub, and the hub did not give it. Check the name and the network, or give a folder "
            "with a config.json; weights are not needed."
        ) from error


def layout_of(options: Namespace) -> tuple[str, int]:
    "Layout and number of GPUs, from the launcher or the options. ValueError where they differ."
    env = os.environ
    is_on = lambda name: env.get(name, "").lower() in ("1", "true", "yes")
    launched = "ddp" if int(env.get("WORLD_SIZE", 1)) > 1 else "alone"
    if is_on("ACCELERATE_USE_FSDP"):
        launched = "fsdp2"
    if is_on("ACCELERATE_USE_DEEPSPEED"):
        launched = f"zero{env.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    if "WORLD_SIZE" in env:
        running: dict[str, Any] = dict(layout=launched, num_processes=int(env["WORLD_SIZE"]))
        for name, value in running.items():
            if (given := getattr(options, name)) not in (None, value):
                raise ValueError(
                    f"--{name} is {given} and the launcher has {value}: leave out the option, or "
                    "the launcher."
                )
        return launched, running["num_processes"]
    if launched == "alone" and (options.num_processes or 1) > 1:
        launched = "ddp"
    layout = options.layout or launched
    if layout != "alone" and options.num_processes is None:
        raise ValueError(f"--layout is {layout}: give the number of GPUs too, --num_processes 8.")
    return layout, options.num_processes or 1


def precision_of(options: Namespace) -> dict[str, Any]:
    "The run's precision; where the options leave it open, bf16 with recomputation on a GPU."
    bf16 = options.bf16 if options.bf16 is not None else not options.use_cpu and not options.fp16
    recompute = (options.activation_checkpointing, options.gradient_checkpointing)
    return dict(
        precision="bf16" if bf16 else "fp16" if options.fp16 else "float32",
        activation_checkpointing=any(recompute)
        if recompute != (None, None)
        else not options.use_cpu,
    )


def vllm_share(options: Namespace) -> float:
    "The share of each GPU that vLLM takes beside the trainer."
    return options.vllm_gpu_memory_utilization if options.use_vllm else 0.0


def gpu_memory_of(options: Namespace) -> float | None:
    "GiB of a GPU that are left to the trainer; None where no GPU is known."
    whole = options.gpu_memory
    if whole is None and not options.use_cpu and torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory / 2**30
    return whole and round(whole * (1 - vllm_share(options)), 1)


def plan_of(options: Namespace) -> MemoryPlan:
    "The plan of a run. Raises ValueError and OSError as the run would."
    models = PPOModelArguments(
        **{f.name: getattr(options, f.name) for f in fields(PPOModelArguments)}
    )
    check_critic(models, options)
    check_judges(models, options)
    name = policy_name(models.model_name_or_path, options.sft_model_path)
    policy = config_of("--model_name_or_path", name)
    reward, value = None, None
    if has_reward_model(options.reward_model_path, models.reward_function):
        reward = config_of("--reward_model_path", options.reward_model_path)
    more = [config_of("--reward_ensemble", path) for path in models.reward_ensemble or []]
    if models.value_model_path:
        value = config_of("--value_model_path", models.value_model_path)
    layout, processes = layout_of(options)
    dtype = str(getattr(policy, "dtype", None)) if models.dtype == "auto" else models.dtype
    half = dtype.split(".")[-1] in ("bfloat16", "float16")
    positions = getattr(policy, "max_position_embeddings", None) or 10**9
    # what the plan has under the run's own name, and what is worked out
    settings: dict[str, Any] = {
        f.name: getattr(options, f.name, f.default) for f in fields(PPOSetup)
    }
    settings |= precision_of(options) | dict(
        policy=policy,
        reward=reward,
        value=value,
        layout=layout,
        num_processes=processes,
        prompt_length=options.max_prompt_length
        or max(1, min(512, positions - options.response_length)),
        dtype="bfloat16" if half else "float32",
        gpu_memory=gpu_memory_of(options),
        peft_config=adapter_config(models, "CAUSAL_LM", models.use_peft),
        value_peft_config=adapter_config(models, "SEQ_CLS", models.value_use_peft),
        critic=ESTIMATORS[options.advantage_estimator].critic,
        more_rewards=tuple(more),
    )
    return plan_memory(**settings)


def _table(plan: MemoryPlan) -> Table:
    frame = plan.frame()
    table = Table(title="GiB on each GPU", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for phase in frame:
        table.add_column(str(phase), justify="right")
    for row, numbers in frame.iterrows():
        table.add_row(str(row), *(f"{x:.2f}" for x in numbers))
    return table


def dry_run(options: Namespace) -> int:
    "Print what the run needs. Returns the exit code: 1 where it does not fit the GPU, else 0."
    if os.environ.get("RANK", "0") != "0":
        return 0  # one process prints for all; a launcher ends the others where one fails
    with no_bars():
        plan = plan_of(options)
    setup, (policy, value, _) = plan.setup, plan.setup.sizes
    head = "a layer on the policy" if setup.critic else "none"
    count = lambda size: f"{size.trained:,} of {size.params:,}" if size else head
    assumed = "" if options.max_prompt_length else " (assumed: set --max_prompt_length)"
    memory = "recomputed" if setup.activation_checkpointing else "kept"
    width = None if sys.stdout.isatty() else 110
    console = Console(file=sys.stdout, force_jupyter=False, width=width, highlight=False)
    console.print(
        f"PPO, planned and not run: {setup.layout}, {setup.num_processes} process(es), "
        f"{setup.precision}, weights loaded in {setup.dtype}, activations {memory}; "
        f"micro-batches of {setup.per_device_train_batch_size}, prompts of {setup.prompt_length} "
        f"tokens{assumed}, responses of {setup.response_length}; trained parameters: policy "
        f"{count(policy)}, value model {count(value)}."
    )
    if share := vllm_share(options):
        console.print(
            f"vLLM takes {share:.0%} of each GPU (--vllm_gpu_memory_utilization); the plan counts "
            "with the rest."
        )
    console.print(_table(plan))
    console.print(plan.verdict)
    return 1 if plan.fits is False else 0
