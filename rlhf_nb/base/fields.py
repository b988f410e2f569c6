"""What a setting is, said beside its field: the part of a run that it belongs to. And what it may
be: types with a range, read from its annotation, and one check of all fields before a run."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import lru_cache
from math import inf, isfinite
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from rlhf_nb.base.errors import did_you_mean


@dataclass(frozen=True)
class Range:
    "Which numbers a setting may be."

    least: float = -inf
    above: float = -inf
    most: float = inf
    below: float = inf

    def __contains__(self, x: float) -> bool:
        return self.above < x < self.below and self.least <= x <= self.most

    def __str__(self) -> str:
        ends = dict(above=self.above, below=self.below)
        ends |= {"of at least": self.least, "up to": self.most}
        return ", ".join(f"{word} {x:.10g}" for word, x in ends.items() if isfinite(x))


@dataclass(frozen=True, eq=False)
class Among:
    "Which texts a setting may be: the names in a table, which may grow."

    names: Mapping[str, Any]

    def __contains__(self, x: object) -> bool:
        return x in self.names


Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
Count = Annotated[int, Range(least=1)]
Index = Annotated[int, Range(least=0)]  # 0, 1, 2, ...
Seed = Annotated[int, Range(least=0, below=2**32)]  # as numpy takes it
Decay = Annotated[float, Range(least=0, below=1)]
# ---- What a setting is ----

PHASES = (  # the part of a run that a setting belongs to
    "update",  # the optimizer steps
    "rewards",  # from the judge's score to the advantages
    "sampling",
    "seeds",  # of the sampling, and of the order of the rows
    "judges",
    "models",
    "layout",  # where and in which order numbers are computed, and so only how they are rounded
    "controller",  # it moves kl_coef after an update
    "compiler",  # of every batch's new length; no run of PPO can have it
    "run",  # logs, files, evaluation
    "data",  # of supervised training: which texts, and which of their tokens count
    "refused",  # what PPO cannot do: the reasons are in `compat.REFUSED`
)
# What else a setting may say of itself.
MARKS = {
    "names": "it names a run: a checkpoint of another value belongs to another run",
    "place": "it says where something is or goes: a resume neither compares nor logs it",
    "rounds": "after its change the same numbers are added up in another order",
    "critic": "only GAE and its value model read it",
    "unlisted": "it is not on the model card",
    "unreplayed": "a trainer that does one update again is made without it",
}


class Help(str):
    """A help text that carries what the setting is. It is a text because `HfArgumentParser` hands
    all metadata of a field to argparse, which refuses a name that it does not know."""

    facts: frozenset[str]


def as_facts(text: str) -> frozenset[str]:
    "'rewards names' as a set: one phase, and any marks. Raises ValueError on anything else."
    words = text.split()
    if sum(word in PHASES for word in words) != 1 or not {*words} <= {*PHASES, *MARKS}:
        raise ValueError(
            f"a setting says {text!r} of itself: give one of {', '.join(PHASES)}, and any of "
            f"{', '.join(MARKS)}."
        )
    return frozenset(words)


def setting(
    default: Any,
    help: str,  # which `rlhf-nb COMMAND --help` prints
    facts: str = "",  # of a trainer's settings: one of PHASES, and any of MARKS
) -> Any:
    "A field of a configuration, with what is to be known of it."
    text = Help(help)
    if facts:
        text.facts = as_facts(facts)
    return field(default=default, metadata={"help": text})


ANY = object()  # no range of ours: what transformers' own annotation allows
# Fields of transformers.TrainingArguments: their range, which it does not state, and what they are.
INHERITED: dict[str, tuple[Any, str]] = dict(
    per_device_train_batch_size=(Count, "update rounds"),
    gradient_accumulation_steps=(Count, "update rounds"),
    max_steps=(Count | Literal[-1], "update"),
    learning_rate=(NotNegative, "update"),
    lr_scheduler_type=(ANY, "update"),
    lr_scheduler_kwargs=(ANY, "update"),
    warmup_steps=(NotNegative, "update"),
    weight_decay=(NotNegative, "update"),
    adam_beta1=(Decay, "update"),
    adam_beta2=(Decay, "update"),
    adam_epsilon=(NotNegative, "update"),
    max_grad_norm=(NotNegative, "update"),
    bf16=(ANY, "update rounds"),
    fp16=(ANY, "update rounds"),
    tf32=(ANY, "update rounds"),
    activation_checkpointing=(ANY, "update"),
    gradient_checkpointing=(ANY, "update"),  # the older name
    gradient_checkpointing_kwargs=(ANY, "update"),
    num_train_epochs=(Positive, "sampling"),
    dataloader_drop_last=(ANY, "sampling names"),
    train_sampling_strategy=(
        Literal["random", "sequential", "group_by_length", "batch_rebalance"],
        "sampling names",
    ),
    data_seed=(Seed | None, "sampling names"),
    seed=(Seed, "seeds names"),
    optim=(ANY, "models names"),
    optim_args=(ANY, "models"),
    optim_target_modules=(ANY, "models"),
    use_cpu=(ANY, "layout"),
    full_determinism=(ANY, "layout unreplayed"),
    accelerator_config=(ANY, "layout unreplayed"),
    ddp_backend=(ANY, "layout unreplayed"),
    ddp_bucket_cap_mb=(ANY, "layout"),
    ddp_find_unused_parameters=(ANY, "layout"),
    ddp_static_graph=(ANY, "layout unreplayed"),
    fsdp=(ANY, "layout unreplayed"),
    fsdp_config=(ANY, "layout unreplayed"),
    deepspeed=(ANY, "layout unreplayed"),
    torch_compile=(ANY, "compiler"),
    torch_compile_backend=(ANY, "compiler"),
    torch_compile_mode=(ANY, "compiler"),
    label_smoothing_factor=(Share, "refused"),
    torch_empty_cache_steps=(Count | None, "refused"),
    output_dir=(ANY, "run place"),
    run_name=(ANY, "run place"),
    hub_token=(ANY, "run place"),
    resume_from_checkpoint=(ANY, "run place"),
    local_rank=(ANY, "run place"),
    logging_steps=(Positive, "run"),
    eval_steps=(Positive | None, "run"),
    eval_delay=(NotNegative, "run"),
    per_device_eval_batch_size=(Count, "run"),
    eval_accumulation_steps=(Count | None, "run"),
    save_steps=(Positive, "run"),
    save_total_limit=(Count | None, "run"),
    dataloader_num_workers=(Index, "run"),
    dataloader_prefetch_factor=(Count | None, "run"),
    ddp_timeout=(Count, "run"),
)
for names, facts in (
    (
        "bf16_full_eval fp16_full_eval use_liger_kernel liger_kernel_config neftune_noise_alpha "
        "auto_find_batch_size include_num_input_tokens_seen ignore_data_skip parallelism_config "
        "debug",
        "refused",
    ),
    (
        "activation_checkpointing_kwargs average_tokens_across_devices use_cache logging_strategy "
        "logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica "
        "disable_tqdm report_to project trackio_space_id trackio_bucket_id trackio_static_space_id "
        "eval_strategy prediction_loss_only eval_on_start eval_do_concat_batches "
        "eval_use_gather_object include_for_metrics batch_eval_metrics save_only_model "
        "save_strategy save_on_each_node enable_jit_checkpoint push_to_hub hub_private_repo "
        "hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end "
        "metric_for_best_model greater_is_better restore_callback_states_from_checkpoint "
        "dataloader_pin_memory dataloader_persistent_workers dataloader_multiprocessing_context "
        "dataloader_in_order remove_unused_columns label_names length_column_name "
        "ddp_broadcast_buffers skip_memory_metrics do_train do_eval "
        "do_predict",
        "run",
    ),
):
    INHERITED |= dict.fromkeys(names.split(), (ANY, facts))


@lru_cache
def facts_of(kind: type) -> dict[str, frozenset[str]]:
    """What each setting of a configuration is. A field that says nothing, of a user's subclass or
    of a newer transformers, is of the run around the training."""

    def facts(name: str, help: Any) -> frozenset[str]:
        if name in INHERITED:
            return as_facts(INHERITED[name][1])
        return getattr(help, "facts", as_facts("run"))

    return {f.name: facts(f.name, f.metadata.get("help")) for f in fields(kind)}


def settings_that_say(kind: type, *words: str) -> list[str]:
    "The settings of a configuration that say one of these of themselves, in their order."
    return [name for name, facts in facts_of(kind).items() if facts & {*words}]


# ---- What a setting may be ----

CONVERTED = ("fsdp", "debug", "accelerator_config")  # TrainingArguments puts other types there
NAMES: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    dict: "a dictionary",
    NoneType: "None",
}


@lru_cache
def hints_of(kind: type) -> dict[str, Any]:
    "The annotation of each field, its range included; a user's subclass may add what it likes."
    known = (part for part in kind.__mro__ if part.__module__.startswith(("rlhf_nb", "transf")))
    own = next(known, kind)
    hints = get_type_hints(own, include_extras=True)
    for f in fields(own):
        if "choices" in f.metadata:
            more = (None,) if f.default is None else ()
            hints[f.name] = Literal[*f.metadata["choices"], *more]
    inherits = "per_device_train_batch_size" in hints
    ranges = {name: known for name, (known, _) in INHERITED.items() if known is not ANY}
    if inherits:
        hints |= {name: known for name, known in ranges.items() if name in hints}
    return {name: hint for name, hint in hints.items() if name not in CONVERTED}


def options_of(hint: Any) -> list[Any]:
    "The types that an annotation allows; a text beside an enumeration must be one of its values."
    parts = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    named = any(isinstance(part, type) and issubclass(part, Enum) for part in parts)
    return [part for part in parts if not (named and part is str)]


def fits(value: Any, hint: Any) -> bool:
    "Whether a value has the type, and is in the range, of an annotation."
    if len(options := options_of(hint)) > 1:
        return any(fits(value, option) for option in options)
    hint = options[0]
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return fits(value, parts[0]) and value in parts[1]
    if kind is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if not isinstance(kind, type):
        return True
    if kind in (int, float):
        number = isinstance(value, Integral if kind is int else Real)
        return number and not isinstance(value, bool) and isfinite(value)
    if kind is list:
        return isinstance(value, (list, tuple)) and all(fits(x, *parts) for x in value if parts)
    if issubclass(kind, Enum):
        return isinstance(value, kind) or value in names_of(kind)
    also: dict[Any, Any] = {bool: np.bool_, str: PathLike, dict: Mapping}
    return isinstance(value, (kind, also.get(kind, kind)))


def allowed(hint: Any) -> str:
    "What an annotation allows."
    if len(options := options_of(hint)) > 1:
        return ", or ".join(map(allowed, options))
    hint = options[0]
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if known := names_of(hint):
        shown = ", ".join(map(str, known[:8])) + ", ..." * (len(known) > 8)
        return shown if len(known) == 1 else f"one of {shown}"
    if kind is Annotated:
        return f"{allowed(parts[0])} {parts[1]}"
    if kind is list:
        return f"a list, each item {allowed(parts[0])}" if parts else "a list"
    return NAMES.get(kind, f"a {getattr(kind, '__name__', kind)}")


def names_of(hint: Any) -> list[Any]:
    "The values of a Literal, an enumeration or a table; of anything else none."
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) is Annotated and isinstance(among := get_args(hint)[1], Among):
        return list(among.names)
    return [x.value for x in hint] if isinstance(hint, type) and issubclass(hint, Enum) else []


def complaint(name: str, value: Any, hint: Any) -> str | None:
    "What is wrong with a setting and what it may be, in a line; None where nothing is."
    if fits(value, hint):
        return None
    known = [str(x) for option in options_of(hint) for x in names_of(option)]
    near = did_you_mean(value, known) if isinstance(value, str) else ""
    return f"{name} is {reprlib.repr(value)}: give {allowed(hint)}.{near}"


def check_fields(
    config: Any,  # a dataclass, filled
    flag: str = "",  # in front of a name: "--" on the command line
) -> None:
    """Raises ValueError that names the first field with a wrong type, or outside its range. Numbers
    of numpy become Python's."""
    kind: Any = type(config)
    for name, hint in hints_of(kind).items():
        value = getattr(config, name, None)
        if isinstance(value, np.generic):
            object.__setattr__(config, name, value := value.item())  # also of a frozen one
        if (wrong := complaint(flag + name, value, hint)) is not None:
            raise ValueError(wrong)
