"""What a setting is, said beside its field: the part of a run that it belongs to. And what it may
be: types with a range, read from its annotation, and one check of all fields before a run."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from functools import lru_cache, reduce
from inspect import cleandoc
from math import inf, isfinite
from numbers import Integral, Real
from operator import or_
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


@dataclass(frozen=True)
class Facts:
    "What a setting is. Raises ValueError on a phase that is not one of PHASES."

    phase: str
    names: bool = False  # it names a run: a checkpoint of another value belongs to another run
    place: bool = False  # it says where something is or goes: a resume neither compares nor logs it
    rounds: bool = False  # after its change the same numbers are added up in another order
    critic: bool = False  # only GAE and its value model read it
    unlisted: bool = False  # it is not on the model card
    unreplayed: bool = False  # a trainer that does one update again is made without it

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"no phase {self.phase!r}: give one of {', '.join(PHASES)}.")

    @property
    def words(self) -> set[str]:
        "The phase, and the names of what else holds."
        return {self.phase, *(name for name, holds in vars(self).items() if holds is True)}


class Setting(Field):
    """A field that keeps the facts of its setting. They are no metadata, all of which
    `HfArgumentParser` hands to argparse, which refuses a name that it does not know."""

    __slots__ = ("facts",)

    def __init__(self, plain: Field, facts: Facts):
        for name in Field.__slots__:
            setattr(self, name, getattr(plain, name))
        self.facts = facts


def setting(
    default: Any,
    help: str,  # which `rlhf-nb COMMAND --help` prints
    facts: Facts | str = "",  # of a trainer's settings; the phase, if that is all
) -> Any:
    "A field of a configuration, with what is to be known of it."
    plain = field(default=default, metadata={"help": help})
    return Setting(plain, Facts(facts) if isinstance(facts, str) else facts) if facts else plain


ANY = object()  # no range of ours: what transformers' own annotation allows
# Fields of transformers.TrainingArguments: their range, which it does not state, and what they are.
INHERITED: dict[str, tuple[Any, Facts]] = dict(
    per_device_train_batch_size=(Count, Facts("update", rounds=True)),
    gradient_accumulation_steps=(Count, Facts("update", rounds=True)),
    max_steps=(Count | Literal[-1], Facts("update")),
    learning_rate=(NotNegative, Facts("update")),
    warmup_steps=(NotNegative, Facts("update")),
    weight_decay=(NotNegative, Facts("update")),
    adam_beta1=(Decay, Facts("update")),
    adam_beta2=(Decay, Facts("update")),
    adam_epsilon=(NotNegative, Facts("update")),
    max_grad_norm=(NotNegative, Facts("update")),
    num_train_epochs=(Positive, Facts("sampling")),
    train_sampling_strategy=(
        Literal["random", "sequential", "group_by_length", "batch_rebalance"],
        Facts("sampling", names=True),
    ),
    data_seed=(Seed | None, Facts("sampling", names=True)),
    seed=(Seed, Facts("seeds", names=True)),
    label_smoothing_factor=(Share, Facts("refused")),
    torch_empty_cache_steps=(Count | None, Facts("refused")),
    logging_steps=(Positive, Facts("run")),
    eval_steps=(Positive | None, Facts("run")),
    eval_delay=(NotNegative, Facts("run")),
    per_device_eval_batch_size=(Count, Facts("run")),
    eval_accumulation_steps=(Count | None, Facts("run")),
    save_steps=(Positive, Facts("run")),
    save_total_limit=(Count | None, Facts("run")),
    dataloader_num_workers=(Index, Facts("run")),
    dataloader_prefetch_factor=(Count | None, Facts("run")),
    ddp_timeout=(Count, Facts("run")),
)
for facts, names in {
    Facts("update"): (
        "lr_scheduler_type lr_scheduler_kwargs activation_checkpointing gradient_checkpointing "
        "gradient_checkpointing_kwargs"
    ),
    Facts("update", rounds=True): "bf16 fp16 tf32",
    Facts("sampling", names=True): "dataloader_drop_last",
    Facts("models", names=True): "optim",
    Facts("models"): "optim_args optim_target_modules",
    Facts("layout"): "use_cpu ddp_bucket_cap_mb ddp_find_unused_parameters",
    Facts("layout", unreplayed=True): (
        "full_determinism accelerator_config ddp_backend ddp_static_graph fsdp fsdp_config "
        "deepspeed"
    ),
    Facts("compiler"): "torch_compile torch_compile_backend torch_compile_mode",
    Facts("run", place=True): "output_dir run_name hub_token resume_from_checkpoint local_rank",
    Facts("refused"): (
        "bf16_full_eval fp16_full_eval use_liger_kernel liger_kernel_config neftune_noise_alpha "
        "auto_find_batch_size include_num_input_tokens_seen ignore_data_skip parallelism_config "
        "debug"
    ),
    Facts("run"): (
        "activation_checkpointing_kwargs average_tokens_across_devices use_cache logging_strategy "
        "logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica "
        "disable_tqdm report_to project trackio_space_id trackio_bucket_id "
        "trackio_static_space_id eval_strategy prediction_loss_only eval_on_start "
        "eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics "
        "save_only_model save_strategy save_on_each_node enable_jit_checkpoint push_to_hub "
        "hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
        "load_best_model_at_end metric_for_best_model greater_is_better "
        "restore_callback_states_from_checkpoint dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order "
        "remove_unused_columns label_names length_column_name ddp_broadcast_buffers "
        "skip_memory_metrics do_train do_eval do_predict"
    ),
}.items():
    INHERITED |= dict.fromkeys(names.split(), (ANY, facts))


@lru_cache
def facts_of(kind: type) -> dict[str, Facts]:
    """What each setting of a configuration is. A field that says nothing, of a user's subclass or
    of a newer transformers, is of the run around the training."""
    known = {f.name: getattr(f, "facts", Facts("run")) for f in fields(kind)}
    return known | {name: facts for name, (_, facts) in INHERITED.items() if name in known}


def settings_that_say(kind: type, *words: str) -> list[str]:
    "The settings of a configuration that say one of these of themselves, in their order."
    return [name for name, facts in facts_of(kind).items() if facts.words & {*words}]


def explain_settings(kind: type) -> type:
    "Class decorator: the docstring lists the package's own settings, by phase, with their help."
    ours = (part.__annotations__ for part in kind.__mro__ if part.__module__.startswith("rlhf_nb"))
    own, facts = set[str]().union(*ours), facts_of(kind)
    phases: dict[str, list[str]] = {}
    for f in fields(kind):
        if f.name in own:
            text = f"      {f.name} = {f.default!r}: {f.metadata['help']}"
            phases.setdefault(facts[f.name].phase, []).append(text)
    parts = ("\n".join([f"{phase}:", *lines]) for phase, lines in phases.items())
    kind.__doc__ = "\n\n".join([cleandoc(kind.__doc__ or ""), *parts])
    return kind


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
    ranges = {name: known for name, (known, _) in INHERITED.items() if known is not ANY}
    if "per_device_train_batch_size" in hints:
        hints |= {name: known for name, known in ranges.items() if name in hints}
    return {name: hint for name, hint in hints.items() if name not in CONVERTED}


def annotation(kept: Any) -> Any:
    """What rlhf_nb/cli/pages.json keeps of an annotation: "int", "float", a value or None for
    itself, {"int": its range}, {"list": its items}, and [one, or another] of these."""
    if isinstance(kept, list):
        return reduce(or_, map(annotation, kept))
    if isinstance(kept, dict):
        ((kind, of),) = kept.items()
        many: Any = list
        return many[annotation(of)] if kind == "list" else Annotated[annotation(kind), Range(**of)]
    return dict(int=int, float=float).get(kept, Literal[kept])


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


def describe_allowed(hint: Any) -> str:
    "What an annotation allows."
    if len(options := options_of(hint)) > 1:
        return ", or ".join(map(describe_allowed, options))
    hint = options[0]
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if known := names_of(hint):
        shown = ", ".join(map(str, known[:8])) + ", ..." * (len(known) > 8)
        return shown if len(known) == 1 else f"one of {shown}"
    if kind is Annotated:
        return f"{describe_allowed(parts[0])} {parts[1]}"
    if kind is list:
        return f"a list, each item {describe_allowed(parts[0])}" if parts else "a list"
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
    return f"{name} is {reprlib.repr(value)}: give {describe_allowed(hint)}.{near}"


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
