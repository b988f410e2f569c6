"""The settings of PPO: what `transformers.TrainingArguments` has, the objective, and the run around
it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Annotated, Any, Literal

import torch
from transformers import TrainingArguments
from transformers.utils import logging

from rlhf_nb.base.fields import (
    Count,
    Facts,
    Index,
    NotNegative,
    Positive,
    Range,
    check_fields,
    explain_settings,
    setting,
    settings_that_say,
)
from rlhf_nb.estimators import ESTIMATORS
from rlhf_nb.training.compat import check_refused, check_sizes, old_names
from rlhf_nb.update import Objective

logger = logging.get_logger(__name__)
BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # schedules that look at an evaluation


@dataclass
class CheckedArguments(TrainingArguments):
    """`transformers.TrainingArguments`, its fields checked before they are used, and how a run and
    its folder go together."""

    overwrite_output_dir: bool = setting(
        False,
        "A fresh run deletes the checkpoints of an earlier run in output_dir. Otherwise it is "
        "refused there.",
        Facts("run", place=True, unlisted=True, unreplayed=True),
    )
    resume_anyway: list[str] | None = setting(
        None,
        "Names of differences that do not stop a resume, such as train_dataset; the model card "
        "names them.",
        Facts("run", place=True, unlisted=True, unreplayed=True),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.learning_rate == 0:
            logger.warning_once("learning_rate is 0: nothing will be learned.")
        super().__post_init__()
        if self.lr_scheduler_type in BY_METRIC:  # they are for a loss, unless told
            given: Any = self.lr_scheduler_kwargs or {}
            self.lr_scheduler_kwargs = dict(mode="max" if self.greater_is_better else "min") | given


def check_args(args: Any, kind: type) -> None:
    "Raises TypeError where a trainer is given other settings than its own."
    if not isinstance(args, kind):
        raise TypeError(f"args is {type(args).__name__}: give {kind.__name__}(output_dir=...).")


@explain_settings
@old_names
@dataclass
class PPOConfig(Objective, CheckedArguments):
    """`transformers.TrainingArguments`, `Objective`, and what a run of PPO needs more. A step, as
    in `save_steps`, is one update. Raises ValueError that names the field and the fix."""

    # Sampling
    total_episodes: Count | None = setting(
        None,
        "Responses sampled in the whole run. None: num_train_epochs times the data set.",
        "update",
    )
    response_length: Count = setting(
        53, "Most tokens of a response.", Facts("sampling", names=True)
    )
    num_generations: Count = setting(
        1,
        "Responses to each prompt of an update; batch_size counts responses.",
        Facts("sampling", names=True),
    )
    temperature: Annotated[float, Range(least=1e-3)] = setting(
        0.7, "Of the sampling, and of every log-prob.", Facts("sampling", names=True)
    )
    stop_token: Literal["eos"] | None = setting(
        None,
        "'eos': a response ends at the tokenizer's EOS token. None means the same unless "
        "stop_token_id or stop_strings is set.",
        Facts("sampling", place=True),
    )
    stop_token_id: list[Index] | None = setting(
        None, "A response ends at this token, or at one of these.", Facts("sampling", place=True)
    )
    stop_strings: list[str] | None = setting(
        None, "A response ends where one of these texts is complete.", Facts("sampling", names=True)
    )

    # Turns
    max_turns: Count = setting(
        8, "Most turns of an episode, where an environment answers.", Facts("sampling", names=True)
    )
    max_episode_length: Count | None = setting(
        None,
        "Most tokens of an episode behind its prompt, the policy's and the environment's. None: as "
        "many as the models have positions for.",
        Facts("sampling", names=True),
    )
    environment_timeout: Positive | None = setting(
        None,
        "Seconds that an environment may take for one answer; then the run ends. None: no limit.",
        Facts("sampling", unreplayed=True),
    )

    # The run
    learning_rate: NotNegative = setting(3e-06, "Peak learning rate of the policy.")
    value_learning_rate: NotNegative | None = setting(
        None,
        "Peak learning rate of the value model. None: that of the policy.",
        Facts("update", critic=True),
    )
    value_warmup_updates: Index = setting(
        0, "First updates that train the value model alone.", Facts("update", critic=True)
    )
    value_pretrain_rollouts: str | None = setting(
        None,
        "Folder of a run that kept its rollouts (save_rollouts): before the first update the value "
        "model alone is fitted to their rewards to go.",
        Facts("run", place=True, critic=True, unreplayed=True),
    )
    value_pretrain_epochs: Count = setting(
        4, "Passes over those rollouts.", Facts("run", critic=True, unreplayed=True)
    )
    num_sample_generations: Index = setting(
        10,
        "How often in the run evaluation prompts are completed and shown. 0: never.",
        Facts("run", unreplayed=True),
    )
    save_rollouts: bool = setting(
        False,
        "Keep each update's rollout as a file under output_dir/rollouts.",
        Facts("run", unreplayed=True),
    )
    save_start: bool = setting(
        False,
        "Keep the state before the first update as well, as checkpoint-0: `rlhf-nb replay` needs "
        "it for update 0.",
        Facts("run", unreplayed=True),
    )
    logging_steps: Positive = setting(
        10, "Updates between two logs; the last update is always logged."
    )
    dataloader_drop_last: bool = setting(
        True, "The last prompts of an epoch that do not fill a batch are left out."
    )
    dataset_num_proc: Count | None = setting(
        None,
        "Kept for scripts of the published trainer, and without effect: prompts are tokenised "
        "batch by batch.",
        Facts("run", unlisted=True, unreplayed=True),
    )

    # Models
    sft_model_path: str = setting(
        "EleutherAI/pythia-160m",
        "Policy and reference, if the trainer is given none.",
        Facts("models", place=True, unlisted=True),
    )
    reward_model_path: str = setting(
        "EleutherAI/pythia-160m",
        "Reward and value model, if the trainer is given none.",
        Facts("judges", place=True, unlisted=True),
    )
    reward_weights: list[float] | None = setting(
        None,
        "Weight of each judge, if there are several. None: 1 each.",
        Facts("judges", place=True),
    )
    reward_aggregation: Literal["sum", "mean", "min", "mean_minus_variance"] = setting(
        "sum",
        "How several reward models become one score: sum (weighted), or mean, min, "
        "mean_minus_variance of an ensemble. Reward functions are added to it.",
        Facts("judges", place=True),
    )
    reward_variance_coef: NotNegative = setting(
        1.0,
        "Charge for the members' variance under mean_minus_variance.",
        Facts("judges", place=True),
    )
    reward_center: str = setting(
        "group",
        "What an ensemble's members are centred on for min and mean_minus_variance: group (their "
        "mean over num_generations), a column with a known answer to each prompt, or none.",
        Facts("judges", place=True),
    )
    reward_level: Literal["response", "token", "step"] = setting(
        "response",
        "What reward models judge. response: the end; token: each token, by a token classifier "
        "with one label; step: what step_separator ends, by one with two labels, the second for "
        "right, as PRMTrainer of trl makes it.",
        Facts("judges", names=True),
    )
    step_separator: str = setting(
        "\n", "What ends a step for reward_level='step'.", Facts("judges", names=True)
    )
    share_value_trunk: bool = setting(
        False,
        "The value model is one layer on the policy's own hidden states.",
        Facts("models", critic=True),
    )
    model_adapter_name: str | None = setting(
        None, "The adapter to train, where the policy brings several.", Facts("models", names=True)
    )
    ref_adapter_name: str | None = setting(
        None,
        "The adapter that is the reference. None: the policy's adapter off.",
        Facts("models", names=True, unreplayed=True),
    )
    resize_embeddings: bool = setting(
        False,
        "Grow the models' embeddings where the tokenizer has ids beyond them; otherwise that is "
        "an error.",
        "models",
    )
    save_merged: bool = setting(
        False,
        "save_model writes the policy with its adapter merged into the weights.",
        Facts("run", unreplayed=True),
    )
    save_value_model: bool = setting(
        False,
        "save_model writes the value model too, to the folder value in it: another run starts from "
        "it by value_model (--value_model_path).",
        Facts("run", critic=True, unreplayed=True),
    )

    # Memory and speed
    bf16: bool | None = setting(  # type: ignore[assignment]  # None: decided by the device
        None, "Mixed precision in bfloat16. None: where a GPU does it, unless fp16."
    )
    activation_checkpointing: bool | None = setting(
        None, "Recompute activations in the backward. None: on a GPU."
    )
    local_rollout_forward_batch_size: Count = setting(
        64,
        "Rows in one forward pass without gradient, and in one sampling batch.",
        Facts("sampling", rounds=True),
    )
    trim_padding: bool | None = setting(
        None,
        "Put rows of like length together and leave padding out of the models. None: in float32, "
        "and where attention reads rows end to end. In bfloat16 rectangles it costs the exact "
        "agreement of rollout and update.",
        Facts("update", rounds=True),
    )
    micro_batch_tokens: Count | None = setting(
        None,
        "With trim_padding, most positions of a forward pass, beside the limits on rows. None: on "
        "a CPU what suits its caches, 3 * 2**16 over the model's width for each thread; elsewhere "
        "no limit. Not used under DeepSpeed, which counts micro-batches itself.",
        Facts("update", rounds=True),
    )
    offload_frozen: bool = setting(
        False,
        "Keep reference and reward model in host memory except while they run. Under ZeRO-3, use "
        "offload_param_device of its configuration.",
        "layout",
    )
    ds3_gather_for_generation: bool = setting(
        True,
        "Under DeepSpeed ZeRO-3 and FSDP2, gather the policy's weights once for a rollout. False:"
        " layer by layer at each token, for models that do not fit.",
        "sampling",
    )
    torch_compile: bool = setting(
        False,
        "Refused: every batch has rows of a new length, so layers would be compiled again and "
        "again.",
    )

    # vLLM
    use_vllm: bool = setting(
        False,
        "Sample with vLLM (release 0.33, in this process, on each rank's GPU) instead of the "
        "package's own sampler.",
        Facts("sampling", rounds=True, unreplayed=True),
    )
    vllm_gpu_memory_utilization: Annotated[float, Range(above=0, most=1)] = setting(
        0.3, "Share of the GPU's memory for vLLM's weights and cache.", "sampling"
    )
    vllm_max_model_length: Count | None = setting(
        None, "Most tokens of prompt and response. None: the model's positions.", "sampling"
    )
    vllm_enable_sleep_mode: bool = setting(
        False,
        "vLLM leaves the GPU between rollouts; its weights wait in the host's memory.",
        "sampling",
    )

    def __post_init__(self) -> None:
        if self.torch_compile or self.torch_compile_backend or self.torch_compile_mode:
            raise ValueError(
                "torch_compile is True: every batch has rows of a new length, so layers would be "
                "compiled again and again, and whole updates got no faster. Leave it out."
            )
        on_gpu = torch.cuda.is_available() and not self.use_cpu
        if self.bf16 is None:
            self.bf16 = on_gpu and not self.fp16 and torch.cuda.is_bf16_supported()
        if self.activation_checkpointing is None and self.gradient_checkpointing is None:
            self.activation_checkpointing = on_gpu
        if isinstance(self.stop_token_id, Integral):
            self.stop_token_id = [self.stop_token_id]
        by_metric = self.load_best_model_at_end or self.lr_scheduler_type in BY_METRIC
        if by_metric and self.metric_for_best_model is None:
            self.metric_for_best_model = "eval_score"
        super().__post_init__()
        check_refused(self)
        check_config(self)
        self.set_sizes(None)

    def set_sizes(self, prompts: int | None) -> None:
        """Fill in the sizes that follow from the number of processes and of prompts (None: no
        training data). Raises ValueError where they do not make a batch."""
        self.local_batch_size = self.per_device_train_batch_size * self.gradient_accumulation_steps
        self.batch_size = self.local_batch_size * self.world_size
        self.micro_batch_size = self.per_device_train_batch_size * self.world_size
        self.local_mini_batch_size = self.local_batch_size // self.num_mini_batches
        self.mini_batch_size = self.batch_size // self.num_mini_batches
        self.num_total_batches = max(self.max_steps, 0)
        if self.max_steps <= 0 and self.total_episodes is not None:
            self.num_total_batches = self.updates_for(self.total_episodes, prompts)
        check_sizes(self)
        if prompts is None:
            return
        if prompts < (wanted := self.batch_size // self.num_generations):
            raise ValueError(
                f"the data set has {prompts} prompts and one update takes {wanted}: lower "
                "per_device_train_batch_size or gradient_accumulation_steps, or give more prompts."
            )
        rest = math.ceil(prompts % wanted * self.num_generations / self.world_size)
        if 0 < rest < self.num_mini_batches and not self.dataloader_drop_last:
            raise ValueError(
                f"the last batch of the data set has {rest} responses, fewer than "
                f"num_mini_batches = {self.num_mini_batches}: leave dataloader_drop_last at True, "
                f"or take a multiple of {wanted} prompts."
            )
        if self.total_episodes is None:
            self.total_episodes = int(self.num_train_epochs * prompts * self.num_generations)
            return self.set_sizes(prompts)  # now that the length of the run is known
        if self.value_warmup_updates >= self.num_total_batches:
            raise ValueError(
                f"value_warmup_updates is {self.value_warmup_updates} and the run has "
                f"{self.num_total_batches} updates, so the policy would not learn: lower it, or "
                "raise total_episodes."
            )
        if self.batch_size * self.response_length == 1:
            raise ValueError(
                "an update is one token: its advantage less its own mean is 0, and nothing would "
                "be learned. Raise response_length or per_device_train_batch_size."
            )

    def updates_for(self, episodes: int, prompts: int | None) -> int:
        "Updates that sample so many; with prompts left over, the last of an epoch is smaller."
        if self.dataloader_drop_last or prompts is None:
            return math.ceil(episodes / self.batch_size)
        epochs, rest = divmod(episodes, prompts * self.num_generations)
        per_epoch = math.ceil(prompts * self.num_generations / self.batch_size)
        return epochs * per_epoch + math.ceil(rest / self.batch_size)

    def recipe(self) -> dict[str, Any]:
        "Every setting of PPO, and those of TrainingArguments that matter, for a model card."
        own = {f.name for f in fields(PPOConfig)} - {f.name for f in fields(TrainingArguments)}
        own -= {*settings_that_say(PPOConfig, "unlisted")}
        names = [*RECIPE, *(f.name for f in fields(self) if f.name in own)]
        settings = {name: getattr(self, name, None) for name in names}
        return {name: getattr(x, "value", x) for name, x in settings.items() if x is not None}


RECIPE = (
    "learning_rate lr_scheduler_type optim max_grad_norm weight_decay bf16 "
    "per_device_train_batch_size gradient_accumulation_steps world_size batch_size mini_batch_size"
).split()


def refuse(args: PPOConfig, name: str, wanted: str) -> None:
    "Raises ValueError that names a field, its value, and what it should be."
    raise ValueError(f"{name} is {getattr(args, name)!r}: {wanted}.")


def check_config(args: PPOConfig) -> None:
    """What no field says of itself: settings that exclude or need each other. Raises ValueError,
    naming the field and the fix, before any work is lost."""
    if args.stop_strings is not None and not all(args.stop_strings or [""]):
        refuse(args, "stop_strings", "give texts of at least one character, or None")
    if args.kl_controller == "fixed" and args.kl_target != Objective.kl_target:
        wanted = "it needs kl_controller='adaptive'; leave it out for a fixed kl_coef"
        refuse(args, "kl_target", wanted)
    if sum(x is not None for x in (args.stop_token, args.stop_token_id, args.stop_strings)) > 1:
        refuse(args, "stop_token", "set one of stop_token, stop_token_id and stop_strings, not two")
    if args.missing_eos_penalty is not None and args.non_eos_penalty:
        wanted = "set missing_eos_penalty (subtracts) or non_eos_penalty (replaces), not both"
        refuse(args, "non_eos_penalty", wanted)
    local = args.per_device_train_batch_size * args.gradient_accumulation_steps
    for name, what in (("num_generations", "responses"), ("num_mini_batches", "rows")):
        if local % getattr(args, name):
            refuse(
                args,
                name,
                f"per_device_train_batch_size x gradient_accumulation_steps = {local} {what} do "
                f"not divide into it; take a divisor of {local}",
            )
    if args.value_pretrain_rollouts is not None and not args.vf_coef:
        refuse(args, "vf_coef", "the value model learns nothing of value_pretrain_rollouts")
    check_estimator(args)
    check_ensemble(args)
    check_level(args)
    if args.use_vllm and args.temperature < 0.01:
        refuse(args, "temperature", "vLLM samples greedily below 0.01: give a higher one")


def check_estimator(
    args: Any,  # PPOConfig, or its fields on a command line
    **of_critic: Any,  # whatever else was given for a value model, by name
) -> None:
    "Settings of an estimator that exclude or need each other. Raises ValueError."
    name = args.advantage_estimator
    estimator = ESTIMATORS[name]
    if estimator.group and args.num_generations == 1:
        wanted = f"{name} compares the responses to one prompt; give 2 or more, such as 4"
        refuse(args, "num_generations", wanted)
    if estimator.group and args.gamma != 1:
        refuse(args, "gamma", f"{name} has one advantage for a whole response; leave it at 1")
    if not estimator.critic:
        no_critic = (
            f"advantage_estimator {name!r} has no value model; leave it out, or take "
            "advantage_estimator='gae'"
        )
        defaults = {f.name: f.default for f in fields(PPOConfig)}
        for setting_name in settings_that_say(PPOConfig, "critic"):
            if getattr(args, setting_name) != defaults[setting_name]:
                refuse(args, setting_name, no_critic)
        for part, given in of_critic.items():
            if given:
                raise ValueError(f"{part} is given: {no_critic}.")
    for setting_name, default in (("gamma", 1.0), ("lam_length_alpha", None)):
        if estimator.by_turn and getattr(args, setting_name) != default:
            wanted = f"{name} has gamma_turn and lam_turn in its place; leave it at {default}"
            refuse(args, setting_name, wanted)
    if args.importance_level == "sequence" and not estimator.group:
        grouped = ", ".join(name for name, estimator in ESTIMATORS.items() if estimator.group)
        wanted = (
            f"one ratio for a whole response would mix the advantages that {name} gives to each "
            f"token; take advantage_estimator {grouped}, or importance_level='token'"
        )
        refuse(args, "importance_level", wanted)
    if args.kl_in == "loss" and args.kl_estimator in NO_GRADIENT:
        wanted = f"kl_in='loss' needs its gradient, and {NO_GRADIENT[args.kl_estimator]}"
        refuse(args, "kl_estimator", f"{wanted}; take k2 or k3, or kl_in='reward'")


NO_GRADIENT = {  # estimators that cannot be in the loss, and why
    "k1": "that of k1 is 0 on average",
    "full": "the exact sum is computed without one",
}


def check_ensemble(args: Any) -> None:  # PPOConfig, or its fields on a command line
    "Settings of several reward models that need each other. Raises ValueError."
    cautious = args.reward_aggregation in ("min", "mean_minus_variance")
    if cautious and args.reward_center == "group" and args.num_generations < 2:
        wanted = (
            "with one response to a prompt there is no group to centre the reward models on. Set "
            "num_generations to 2 or more, or name a column with a known answer to each prompt, or "
            "give 'none' (each model's zero then counts as an opinion)"
        )
        refuse(args, "reward_center", wanted)
    if args.reward_variance_coef != 1.0 and args.reward_aggregation != "mean_minus_variance":
        wanted = "it needs reward_aggregation='mean_minus_variance'; leave it out otherwise"
        refuse(args, "reward_variance_coef", wanted)


def check_level(args: Any) -> None:  # PPOConfig, or its fields on a command line
    "Settings of rewards for tokens and steps. Raises ValueError."
    if not args.step_separator:
        refuse(args, "step_separator", "give the text that ends a step, such as a newline")
    if args.step_separator != "\n" and args.reward_level != "step":
        refuse(args, "step_separator", "it needs reward_level='step'; leave it out otherwise")
    if args.reward_level == "response":
        return
    if args.score_clip is not None:
        wanted = (
            "it bounds one judgement of a response, and clipped token by token their sum has no "
            "bound. Leave it out, or leave reward_level at 'response'"
        )
        refuse(args, "score_clip", wanted)
    if args.reward_aggregation != "sum":
        wanted = "it is for scores of whole responses; leave it at 'sum' with reward_level"
        refuse(args, "reward_aggregation", wanted)
