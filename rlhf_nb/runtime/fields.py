"""What a setting may be: types with a range, read from a configuration's own annotations, and one
check of all its fields before anything runs."""

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

from rlhf_nb.runtime.errors import did_you_mean


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
Port = Annotated[int, Range(least=1, most=65535)]
Seed = Annotated[int, Range(least=0, below=2**32)]  # as numpy takes it
Decay = Annotated[float, Range(least=0, below=1)]
INHERITED: dict[str, Any] = dict(  # of transformers.TrainingArguments, which states no ranges
    per_device_train_batch_size=Count,
    per_device_eval_batch_size=Count,
    gradient_accumulation_steps=Count,
    eval_accumulation_steps=Count | None,
    num_train_epochs=Positive,
    max_steps=Count | Literal[-1],
    learning_rate=NotNegative,
    weight_decay=NotNegative,
    adam_beta1=Decay,
    adam_beta2=Decay,
    adam_epsilon=NotNegative,
    max_grad_norm=NotNegative,
    warmup_steps=NotNegative,
    label_smoothing_factor=Share,
    logging_steps=Positive,
    save_steps=Positive,
    eval_steps=Positive | None,
    eval_delay=NotNegative,
    save_total_limit=Count | None,
    train_sampling_strategy=Literal["random", "sequential", "group_by_length", "batch_rebalance"],
    torch_empty_cache_steps=Count | None,
    dataloader_num_workers=Index,
    dataloader_prefetch_factor=Count | None,
    ddp_timeout=Count,
    seed=Seed,
    data_seed=Seed | None,
)
CONVERTED = ("fsdp", "debug", "accelerator_config")  # TrainingArguments puts other types there
NAMES: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    dict: "a dictionary",
    NoneType: "None",
}


def setting(default: Any, help: str) -> Any:
    "A field of a configuration with its help text, which `rlhf-nb COMMAND --help` prints."
    return field(default=default, metadata={"help": help})


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
    return {
        name: INHERITED.get(name, hint) if inherits else hint
        for name, hint in hints.items()
        if name not in CONVERTED
    }


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


def in_words(hint: Any) -> str:
    "What an annotation allows."
    if len(options := options_of(hint)) > 1:
        return ", or ".join(map(in_words, options))
    hint = options[0]
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if known := names_of(hint):
        shown = ", ".join(map(str, known[:8])) + ", ..." * (len(known) > 8)
        return shown if len(known) == 1 else f"one of {shown}"
    if kind is Annotated:
        return f"{in_words(parts[0])} {parts[1]}"
    if kind is list:
        return f"a list, each item {in_words(parts[0])}" if parts else "a list"
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
    return f"{name} is {reprlib.repr(value)}: give {in_words(hint)}.{near}"


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
