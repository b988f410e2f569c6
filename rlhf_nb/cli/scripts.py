"""What scripts parse beside a config: the data set, the model, and a parser that reads YAML. The
names are those of the published library, so that a script needs other import lines alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import yaml
from accelerate import PartialState
from transformers import BitsAndBytesConfig, HfArgumentParser

from rlhf_nb.base.fields import setting
from rlhf_nb.base.files import yaml_text
from rlhf_nb.cli.arguments import TrainDataArguments, TrainModelArguments
from rlhf_nb.cli.models import adapter_config
from rlhf_nb.models import copy_frozen

SIMPLE_CHAT_TEMPLATE = (  # a line for each turn, with its role before it
    "{% for turn in messages %}{{ turn.role | capitalize }}: {{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass
class ScriptArguments(TrainDataArguments):
    "Which data."

    dataset_streaming: bool = setting(False, "Load it as a stream; PPO needs it whole.")
    ignore_bias_buffers: bool = setting(False, "Of DDP, and without effect here.")


@dataclass
class ModelConfig(TrainModelArguments):
    "Which model, in which precision, with which adapter."

    model_revision: str = setting("main", "Branch, tag or commit.")
    trust_remote_code: ClassVar[bool] = False  # an option of SFTConfig and RewardConfig
    lora_target_parameters: list[str] | None = setting(None, "Parameters that get an adapter.")
    lora_modules_to_save: list[str] | None = setting(None, "Layers trained whole.")
    lora_task_type: str = setting("CAUSAL_LM", "SEQ_CLS for a reward model.")
    use_rslora: bool = setting(False, "Scale by lora_alpha over the root of lora_r.")
    use_dora: bool = setting(False, "Train magnitude and direction apart.")
    load_in_8bit: bool = setting(False, "Frozen weights in 8 bit, by bitsandbytes.")
    load_in_4bit: bool = setting(False, "Frozen weights in 4 bit, by bitsandbytes.")
    bnb_4bit_quant_type: str = setting("nf4", "nf4 or fp4.")
    use_bnb_nested_quant: bool = setting(False, "Quantise the constants too.")
    bnb_4bit_quant_storage: str | None = setting(None, "Data type that holds the 4 bit.")

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit are both set: keep one of them.")

    @property
    def torch_dtype(self) -> str | None:
        "As dtype was called before."
        return self.dtype


def get_peft_config(model_args: ModelConfig) -> Any:
    "A LoraConfig; None without use_peft."
    config = adapter_config(model_args, model_args.lora_task_type, model_args.use_peft)
    if config is not None:
        config.target_parameters = model_args.lora_target_parameters
        config.modules_to_save = model_args.lora_modules_to_save
        config.use_rslora, config.use_dora = model_args.use_rslora, model_args.use_dora
    return config


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    "For `from_pretrained`; None without load_in_8bit and load_in_4bit."
    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    if not model_args.load_in_4bit:
        return None
    named = model_args.dtype not in ("auto", None)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=getattr(torch, str(model_args.dtype)) if named else None,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def create_reference_model(model: Any) -> Any:
    "A frozen copy; PPOTrainer makes one where it is given no ref_model."
    return copy_frozen(model)


def get_kbit_device_map() -> dict[str, int] | None:
    "The whole model on this process's GPU; None without one."
    return {"": PartialState().local_process_index} if torch.cuda.is_available() else None


class TrlParser(HfArgumentParser):
    "`HfArgumentParser` with `--config FILE`: YAML below what is typed; `env:` sets variables."

    def parse_args_and_config(
        self, args: Sequence[str] | None = None, return_remaining_strings: bool = False
    ) -> tuple[Any, ...]:
        "The dataclasses, filled. Raises ValueError for a key of the file that is no option."
        words = list(sys.argv[1:] if args is None else args)
        if "--config" in words:
            at = words.index("--config")
            _, path, *typed = words[at:]
            try:
                if not isinstance(settings := yaml.safe_load(yaml_text(path)), dict):
                    raise ValueError("expected lines such as `kl_coef: 0.05`")
            except (yaml.YAMLError, ValueError) as error:
                raise ValueError(f"--config {path}: {error}.") from error
            for name, value in settings.pop("env", {}).items():
                os.environ[name] = str(value)
            lines = [(f"--{k}", x) for k, x in settings.items() if x is not None]
            values = [[k, *map(str, x)] if isinstance(x, list) else [f"{k}={x}"] for k, x in lines]
            words = [word for line in values for word in line] + words[:at] + typed
        return self.parse_args_into_dataclasses(
            words, return_remaining_strings=return_remaining_strings, look_for_args_file=False
        )
