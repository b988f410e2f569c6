"""`rlhf-nb reward`: a reward model from preferences."""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset

from rlhf_nb.cli.arguments import (
    TRAINED,
    TRAINER_HELP,
    AnswerDataArguments,
    RewardModelArguments,
    supervised_options,
)
from rlhf_nb.cli.data import check_columns, check_template, drop_long, pairs_of, splits_of
from rlhf_nb.cli.help import About
from rlhf_nb.cli.models import adapter_config, in_dtype, load_run_tokenizer, require_name
from rlhf_nb.cli.parsing import Parser
from rlhf_nb.cli.training import finish, in_folder
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.scoring import center_rewards
from rlhf_nb.training.model_loading import load_reward_model

ABOUT = About(
    usage="reward [--config FILE] [--OPTION VALUE ...]",
    text="A reward model from preferences (Bradley-Terry). It needs a data set with the columns "
    "prompt, chosen and rejected, and a model to start from: a causal language model gets a new "
    "head of one number. " + TRAINED,
    examples=(
        "rlhf-nb reward --dataset_name mini_tldr --model_name_or_path runs/sft --output_dir "
        "runs/reward",
        "rlhf-nb reward --dataset_name pairs.jsonl --model_name_or_path runs/sft --use_peft",
    ),
    options=supervised_options(
        "model_name_or_path", training=("center_rewards", "center_rewards_coefficient")
    ),
    required={"dataset_name": "required", "model_name_or_path": "required"},
    help=TRAINER_HELP,
)


def reward_parser() -> Parser:
    "Every option of `rlhf-nb reward`."
    kinds = AnswerDataArguments, RewardModelArguments, RewardConfig
    return Parser(ABOUT, *kinds, output_dir="runs/reward")


def references(train: Dataset) -> Dataset:
    "The first 1,000 answers that people wrote: the completions, or else what was chosen."
    if "completion" not in train.column_names:
        train = train.rename_column("chosen", "completion")
    return train.select(range(min(len(train), 1000)))


def reward_command(words: Sequence[str]) -> None:
    "`rlhf-nb reward`."
    data, models, args = reward_parser().settings(words)
    with in_folder(args):
        rows, held_out = splits_of(data)
        if data.dataset_name != "mini_tldr":
            texts, ids = ("chosen", "rejected"), ("chosen_ids", "rejected_ids")
            check_columns(data.dataset_name, rows, texts, ids)
            if models.center_rewards and not {"chosen", "completion"} & set(rows.column_names):
                raise ValueError(
                    f"--center_rewards: {data.dataset_name} has answers as token ids, and the mean "
                    "is taken over texts: leave --center_rewards out, and give --normalize_scores "
                    "to `rlhf-nb ppo`."
                )
        tokenizer = load_run_tokenizer(models)
        if args.chat_template_path is None:
            check_template(data.dataset_name, rows, tokenizer, "--chat_template_path")
        with require_name("--model_name_or_path", models.model_name_or_path, quiet=True) as name:
            model = in_dtype(load_reward_model(name, args.seed), models)
        if models.attn_implementation is not None:
            model.set_attn_implementation(models.attn_implementation)
        train, test = (
            pairs
            and drop_long(pairs, tokenizer, data.max_prompt_length, data.max_completion_length)
            for pairs in (pairs_of(rows, data), pairs_of(held_out, data))
        )
        trainer = RewardTrainer(
            model,
            args,
            train,
            test,
            tokenizer,
            peft_config=adapter_config(models, "SEQ_CLS", models.use_peft),
        )

        def center() -> str:
            if not models.center_rewards:
                return ""
            inner = trainer.accelerator.unwrap_model(trainer.model)
            centre = center_rewards(inner, tokenizer, references(rows), args.max_length)
            return f" (centred: {centre:+.2f} was subtracted from every score)"

        finish(trainer, "reward", models.resume, "reward model and tokenizer", center)
