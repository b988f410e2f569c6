"""`rlhf-nb sft`: supervised fine-tuning."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_nb.cli.arguments import (
    TRAINED,
    TRAINER_HELP,
    AnswerDataArguments,
    ScratchModelArguments,
    supervised_options,
)
from rlhf_nb.cli.data import check_columns, check_template, drop_long, splits_of
from rlhf_nb.cli.help import About
from rlhf_nb.cli.models import adapter_config, load_options, load_run_tokenizer, require_name
from rlhf_nb.cli.parsing import Parser
from rlhf_nb.cli.training import finish, in_folder
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.training.model_loading import (
    load_policy,
    tiny_policy,
    train_bpe_tokenizer,
    train_tokenizer,
)

ABOUT = About(
    usage="sft [--config FILE] [--OPTION VALUE ...]",
    text="Supervised fine-tuning: the model learns the completions, and the stop token after "
    "them. It needs a data set with the columns prompt and completion, and a causal language "
    "model (or --from_scratch). " + TRAINED,
    examples=(
        "rlhf-nb sft --dataset_name mini_tldr --from_scratch --output_dir runs/sft",
        "rlhf-nb sft --config tldr_pythia_1b.yaml --learning_rate 1e-5",
    ),
    options=supervised_options("model_name_or_path", "from_scratch", training=("packing",)),
    required={"dataset_name": "required", "model_name_or_path": "required, or --from_scratch"},
    help=TRAINER_HELP,
)


def sft_parser() -> Parser:
    "Every option of `rlhf-nb sft`."
    kinds = AnswerDataArguments, ScratchModelArguments, SFTConfig
    return Parser(ABOUT, *kinds, output_dir="runs/sft")


def starting_point(
    data: AnswerDataArguments, models: ScratchModelArguments, args: SFTConfig, rows: Dataset
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    "The model to fine-tune and its tokenizer: loaded, or made from nothing."
    if not models.from_scratch:
        tokenizer = load_run_tokenizer(models)
        if args.chat_template_path is None:
            check_template(data.dataset_name, rows, tokenizer, "--chat_template_path")
        with require_name("--model_name_or_path", models.model_name_or_path) as name:
            return load_policy(name, **load_options(models)), tokenizer
    if models.model_name_or_path:
        raise ValueError(
            "--from_scratch makes a model and --model_name_or_path loads one: leave one of them "
            "out."
        )
    for column in ("prompt", "completion"):
        for i, text in enumerate(rows[column][:]):
            if not isinstance(text, str):
                raise ValueError(
                    f"--from_scratch makes a tokenizer from text, and the {column} of row {i} is "
                    f"{reprlib.repr(text)}: give text. Conversations need --model_name_or_path and "
                    "a tokenizer with a chat template."
                )
    texts = [p + c for p, c in zip(rows["prompt"], rows["completion"])]
    if models.vocab_size is None:
        tokenizer = train_tokenizer(texts)
    else:
        tokenizer = train_bpe_tokenizer(texts, models.vocab_size)
    if models.hidden_size % models.num_attention_heads:
        raise ValueError(
            f"--hidden_size is {models.hidden_size} and --num_attention_heads "
            f"{models.num_attention_heads}: give a width that the heads divide."
        )
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    model = tiny_policy(tokenizer, args.seed, **{size: getattr(models, size) for size in sizes})
    return model, tokenizer


def sft_command(words: Sequence[str]) -> None:
    "`rlhf-nb sft`."
    data, models, args = sft_parser().settings(words)
    with in_folder(args):
        train, test = splits_of(data)
        others = ("messages",), ("conversations",), ("input_ids",), (args.dataset_text_field,)
        pairs = ("prompt", "completion")
        check_columns(data.dataset_name, train, pairs, *(() if models.from_scratch else others))
        model, tokenizer = starting_point(data, models, args, train)
        limits = data.max_prompt_length, data.max_completion_length
        trainer = SFTTrainer(
            model,
            args,
            drop_long(train, tokenizer, *limits),
            test and drop_long(test, tokenizer, *limits),
            tokenizer,
            peft_config=adapter_config(models, "CAUSAL_LM", models.use_peft),
        )
        finish(trainer, "sft", models.resume, "model and tokenizer")
