"""What the commands ask for beside the trainers' own settings: data, models, adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from rlhf_nb.base.fields import Count, Index, Positive, Range, setting


@dataclass
class DataArguments:
    "Where the examples come from."

    dataset_name: str | None = setting(
        None,
        "A name on the hub, a folder of save_to_disk, a .json, .jsonl, .csv or .parquet file, or "
        "an embedded set: mini_tldr, everyday_requests, guess_number; or a task of reasoning-gym, "
        "which scores its answers itself: reasoning_gym:spell_backward, or with settings "
        "reasoning_gym:spell_backward:max_word_len=5,size=1000.",
    )
    dataset_config: str | None = setting(None, "Configuration of a data set on the hub.")
    dataset_test_split: str = setting(
        "test", "Split to evaluate on; a slice such as test[:100] works too."
    )
    dataset_seed: Index = setting(0, "Seed of the embedded data sets.")
    max_prompt_length: Count | None = setting(
        None, "Leave out examples with longer prompts (tokens)."
    )


@dataclass
class TrainDataArguments(DataArguments):
    "And those to train on."

    dataset_train_split: str = setting(
        "train", "Split to train on; a slice such as train[:1000] works too."
    )


@dataclass
class AnswerDataArguments(TrainDataArguments):
    "And how long their answers may be."

    max_completion_length: Count | None = setting(
        None, "Leave out examples with longer answers (tokens, the stop token included)."
    )


@dataclass
class ModelArguments:
    "Which model."

    model_name_or_path: str | None = setting(
        None, "The model to start from: a name on the hub, a folder, or a GGUF file."
    )
    tokenizer_name_or_path: str | None = setting(
        None, "The tokenizer, where it is not in the model's folder."
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = setting(
        "float32",
        "Data type of the weights; auto: as saved. (--bf16 trains float32 weights in mixed "
        "precision.)",
    )
    attn_implementation: str | None = setting(
        None, "eager, sdpa, flash_attention_2, ... None: transformers chooses."
    )


@dataclass
class TrainModelArguments(ModelArguments):
    "And how it is trained."

    use_peft: bool = setting(False, "Train a LoRA adapter instead of the weights.")
    lora_r: Count = setting(16, "Rank of the adapter.")
    lora_alpha: Count = setting(
        32, "Scale of the adapter: it is multiplied by lora_alpha / lora_r."
    )
    lora_dropout: Annotated[float, Range(least=0, below=1)] = setting(
        0.05, "Dropout before the adapter; PPO sets it to 0."
    )
    lora_target_modules: list[str] | None = setting(
        None, "Layers that get an adapter; all-linear: every one. None: peft's choice."
    )
    resume: bool = setting(
        False,
        "Go on from the last checkpoint in output_dir. (--resume_from_checkpoint FOLDER: from that "
        "one.)",
    )


@dataclass
class ScratchModelArguments(TrainModelArguments):
    "Or a model made here, small enough for a laptop."

    from_scratch: bool = setting(
        False,
        "Instead of loading a model, make a small GPT-NeoX with random weights, and a tokenizer "
        "from the training split.",
    )
    vocab_size: Annotated[int, Range(least=258)] | None = setting(
        None, "from_scratch: vocabulary, byte-level BPE. None: one token a word, for mini_tldr."
    )
    hidden_size: Count = setting(64, "from_scratch: width.")
    num_hidden_layers: Count = setting(2, "from_scratch: number of layers.")
    num_attention_heads: Count = setting(8, "from_scratch: attention heads.")
    max_position_embeddings: Count = setting(
        192, "from_scratch: maximum tokens of prompt and answer together."
    )


@dataclass
class RewardModelArguments(TrainModelArguments):
    "And where its zero is."

    center_rewards: bool = setting(
        False,
        "After training, shift the scores so that reference answers average zero (over the first "
        "1,000 training examples: completion, or else chosen).",
    )


@dataclass
class PPOModelArguments(TrainModelArguments):
    "And what scores. `sft_model_path` and `reward_model_path` are among PPO's own settings."

    reward_function: list[str] | None = setting(
        None,
        "module:function or file.py:function, called with prompts, responses and the data set's "
        "columns; or gold, sentiment. Several are added up (--reward_weights).",
    )
    environment: str | None = setting(
        None,
        "What answers, in episodes of several turns (--max_turns): guess_number or walk, with "
        "settings guess_number:n=15,turns=4; or module:Class or file.py:Class, made anew for each "
        "episode, with reset(**row) and step(action), or with methods that are tools.",
    )
    engine: str | None = setting(
        None,
        "Who samples: module:function or file.py:function, called with the settings, the policy "
        "and its tokenizer; it returns an Engine (nbs/reference/40_engines.ipynb). None: the "
        "package's own sampler, or vLLM (--use_vllm).",
    )
    reward_ensemble: list[str] | None = setting(
        None,
        "More reward models beside --reward_model_path: names or folders. --reward_aggregation "
        "says how their scores become one.",
    )
    reward_tokenizer_name_or_path: str | None = setting(
        None, "Tokenizer of the reward model, where it has its own."
    )
    value_model_path: str | None = setting(
        None, "Value model. None: made from the reward model, or else from the policy."
    )
    zero_value_head: bool = setting(False, "Start the value model with 0 for every token.")
    value_use_peft: bool = setting(False, "Train the value model by an adapter too.")
    dry_run: bool = setting(
        False, "Print the memory that the run needs on each GPU, and train nothing."
    )
    gpu_memory: Positive | None = setting(
        None, "dry_run: memory of a GPU in GiB. None: that of this machine's GPU."
    )
    layout: Literal["alone", "ddp", "zero2", "zero3", "fsdp2"] | None = setting(
        None, "dry_run: alone, ddp, zero2, zero3 or fsdp2. None: the launcher's."
    )
    num_processes: Count | None = setting(None, "dry_run: number of GPUs. None: the launcher's.")


# For `--help`: options of transformers.TrainingArguments, in a line each.
TRAINER_HELP = {
    "config": "YAML file of settings, or a recipe of the package; the command line overrides it.",
    "output_dir": "Folder for the model, its checkpoints and metrics.",
    "per_device_train_batch_size": "Examples in one forward and backward pass on each device.",
    "gradient_accumulation_steps": "Passes that are added up for one optimizer step.",
    "num_train_epochs": "Passes over the data set.",
    "warmup_steps": "Steps in which the learning rate rises from 0; below 1: a share of all steps.",
    "logging_steps": "Steps between two logs.",
    "save_steps": "Steps between two checkpoints.",
    "eval_strategy": "When to evaluate on the test split: no, steps (--eval_steps) or epoch.",
    "bf16": "Mixed precision in bfloat16.",
    "report_to": "Trackers: tensorboard, wandb, ... or all.",
    "seed": "Random seed.",
}
TRAINED = (
    "It writes the model, its tokenizer, a card, checkpoints (save_steps) and trainer_state.json "
    "with every metric into the output folder. --resume goes on from the last checkpoint."
)


def supervised_options(*model: str, training: Sequence[str]) -> dict[str, Sequence[str]]:
    "What --help lists of `sft` and `reward`: their options of model and training among the others."
    limits = ("max_prompt_length", "max_completion_length", "max_length")
    splits = ("dataset_train_split", "dataset_test_split")
    usual = ("num_train_epochs", "learning_rate", "warmup_steps")
    batch = ("per_device_train_batch_size", "gradient_accumulation_steps")
    return {
        "data and model": ("config", "dataset_name", *model, "output_dir", *splits, *limits),
        "training": (*usual, *batch, *training, "bf16", "use_peft", "seed"),
        "logs and checkpoints": "logging_steps eval_strategy save_steps report_to resume".split(),
        "help": ("help", "help_all"),
    }
