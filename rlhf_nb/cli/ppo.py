"""`rlhf-nb ppo`: proximal policy optimisation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from rlhf_nb.cli.arguments import TRAINED, TRAINER_HELP, PPOModelArguments, TrainDataArguments
from rlhf_nb.cli.data import (
    check_columns,
    check_prompt_column,
    check_template,
    drop_long,
    splits_of,
)
from rlhf_nb.cli.environments import load_environment
from rlhf_nb.cli.help import About
from rlhf_nb.cli.models import adapter_config, load_options, load_run_tokenizer, require_name
from rlhf_nb.cli.parsing import Parser
from rlhf_nb.cli.plan import dry_run
from rlhf_nb.cli.ppo_models import (
    check_models,
    policy_name,
    reference_of,
    reward_tokenizer_of,
    scorers,
    value_model_of,
)
from rlhf_nb.cli.scoring import load_function, load_reward_function
from rlhf_nb.cli.training import finish, in_folder
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.engines import Engine
from rlhf_nb.training.model_loading import load_policy

ABOUT = About(
    usage="ppo [--config FILE] [--OPTION VALUE ...]",
    text="Proximal policy optimisation of a language model. It needs a data set with the column "
    "prompt, a policy, and something that scores its answers: a reward model "
    "(--reward_model_path), functions (--reward_function), or an environment that answers "
    "turn by turn and pays (--environment); several are added up. With --save_rollouts every "
    "update's episodes are kept for `rlhf-nb view`. " + TRAINED,
    examples=(
        "rlhf-nb ppo --config mini_tldr.yaml --kl_coef 0.02 --output_dir runs/ppo",
        "rlhf-nb launch --config_file zero2.yaml ppo --config tldr_pythia_1b.yaml",
    ),
    options={
        "data and models": (
            "config dataset_name model_name_or_path reward_model_path reward_function output_dir "
            "dataset_train_split max_prompt_length"
        ).split(),
        "responses": (
            "response_length temperature stop_token missing_eos_penalty environment max_turns"
        ).split(),
        "training": (
            "total_episodes learning_rate kl_coef num_ppo_epochs num_mini_batches "
            "per_device_train_batch_size gradient_accumulation_steps bf16 use_peft seed"
        ).split(),
        "logs and checkpoints": ("save_rollouts", "save_steps", "report_to", "resume", "dry_run"),
        "help": ("help", "help_all"),
    },
    required={
        "dataset_name": "required",
        "model_name_or_path": "required, or --sft_model_path",
        "reward_model_path": "required, or --reward_function, --environment or reasoning_gym:NAME",
        "reward_function": "required, or --reward_model_path or --environment",
    },
    help=TRAINER_HELP
    | {
        "reward_model_path": "The reward model: a name on the hub, or a folder.",
        "model_name_or_path": "The policy to start from: a name on the hub, or a folder.",
        "environment": "What answers: guess_number:n=15,turns=4, walk, or file.py:Class.",
        "stop_token": "eos: a response ends at the tokenizer's EOS token.",
        "per_device_train_batch_size": "Responses in one forward and backward pass on each device.",
    },
)


def ppo_parser() -> Parser:
    "Every option of `rlhf-nb ppo`."
    return Parser(ABOUT, TrainDataArguments, PPOModelArguments, PPOConfig, output_dir="runs/ppo")


def trainer_of(data: TrainDataArguments, models: PPOModelArguments, args: PPOConfig) -> PPOTrainer:
    "The trainer that the options describe. Raises ValueError and OSError on wrong ones."
    check_models(models, args, data.dataset_name)
    functions = [load_reward_function(name) for name in models.reward_function or []]
    if models.engine and args.use_vllm:
        raise ValueError("--engine and --use_vllm both say who samples: leave one of them out.")
    make_engine = load_function("--engine", models.engine) if models.engine else None
    factory = load_environment(models.environment) if models.environment else None
    name = policy_name(models.model_name_or_path, args.sft_model_path)
    given = "model_name_or_path" if name == models.model_name_or_path else "sft_model_path"
    models.model_name_or_path = models.model_name_or_path or name
    train, test = splits_of(data, hold_out=100)
    check_columns(data.dataset_name, train, ("prompt",), ("input_ids",))
    check_prompt_column(data.dataset_name, train)
    copy.copy(args).set_sizes(len(train))  # before models are loaded; the trainer counts again
    tokenizer = load_run_tokenizer(models)
    check_template(data.dataset_name, train, tokenizer)
    judges = [*scorers(models, args), *functions]
    with require_name(f"--{given}", name):
        policy = load_policy(name, **load_options(models))
    trainer = PPOTrainer(
        args,
        tokenizer,
        policy,
        reference_of(models, name),
        judges or None,
        train_dataset=drop_long(train, tokenizer, data.max_prompt_length),
        eval_dataset=test and drop_long(test, tokenizer, data.max_prompt_length),
        value_model=value_model_of(models, judges, policy, args),
        reward_processing_class=reward_tokenizer_of(models),
        peft_config=adapter_config(models, "CAUSAL_LM", models.use_peft),
        value_peft_config=adapter_config(models, "SEQ_CLS", models.value_use_peft),
        environment_factory=factory,
    )
    if make_engine is not None:
        trainer.engine = make_engine(trainer.args, trainer.pair.policy, tokenizer)
        if not isinstance(trainer.engine, Engine):
            raise ValueError(
                f"--engine {models.engine} returned a {type(trainer.engine).__name__}: return an "
                "object with sync, generate and close, as rlhf_nb.training.engines.Engine has them."
            )
    return trainer


def ppo_command(words: Sequence[str]) -> int | None:
    "`rlhf-nb ppo`. With --dry_run it returns an exit code, and trains nothing."
    options = ppo_parser().read(words)
    if options.dry_run:  # before PPOConfig, which checks what this machine can do
        return dry_run(options)
    data, models, args = ppo_parser().settings(words)
    with in_folder(args):
        trainer = trainer_of(data, models, args)
        kept = f" (rollouts in {Path(args.output_dir) / 'rollouts'})" if args.save_rollouts else ""
        finish(trainer, "ppo", models.resume, f"policy, tokenizer and model card{kept}")
    return None
