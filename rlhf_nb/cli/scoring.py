"""Reward functions, and other functions of the user's own, by name."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.cli.quick import check_there
from rlhf_nb.real import Sentiment
from rlhf_nb.tldr import gold_judge
from rlhf_nb.training.tasks import task_points


def gold_points(
    prompts: Sequence[str],
    responses: Sequence[str],
    facts: Sequence[str] | None = None,  # the truth of each post, as JSON
    **columns: Any,
) -> list[float]:
    "The gold judge of mini_tldr as a reward. Raises ValueError without facts."
    if facts is None:
        raise ValueError("the reward `gold` needs the column facts: use --dataset_name mini_tldr.")
    return [
        gold_judge(text, json.loads(truth)).gold
        for text, truth in zip(responses, facts, strict=True)
    ]


REWARDS: dict[str, Callable[[], Callable[..., list[float]]]] = {
    "gold": lambda: gold_points,
    "sentiment": Sentiment,
    "reasoning_gym": lambda: task_points,
}  # every other by module:function


def module_at(place: str) -> ModuleType:
    "A module, by its name or its file, imported. Raises ModuleNotFoundError, FileNotFoundError."
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"{place} is no file of Python")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, os.getcwd())  # as `python -m` does, so that the user's own modules are there
    try:
        return importlib.import_module(place)
    finally:
        sys.path.remove(os.getcwd())


def load_function(option: str, name: str, known: Iterable[str] = ()) -> Callable[..., Any]:
    "What module:function or file.py:function names. Raises ValueError where there is none."
    place, _, attribute = name.rpartition(":")
    if not place:
        others = f", or one of {', '.join(known)}" if known else ""
        raise ValueError(
            f"{option} {name}: give module:function or file.py:function{others}."
            f"{did_you_mean(name, known)}"
        )
    check_there(option, name)
    try:
        module = module_at(place)
    except Exception as error:  # whatever the file does as it is imported
        kind = "" if isinstance(error, (ImportError, OSError)) else f"{type(error).__name__}: "
        raise ValueError(f"{option} {name}: {kind}{error}.") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [one for one in dir(module) if callable(getattr(module, one))]
        what = f" ({attribute} is {type(function).__name__})" * (function is not None)
        raise ValueError(
            f"{option} {name}: {place} has no function "
            f"{attribute}{what}.{did_you_mean(attribute, functions)}"
        )
    return function


def load_reward_function(name: str) -> Callable[..., list[float]]:
    "One of REWARDS, or as `load_function`. Raises ValueError where there is none."
    if name in REWARDS:
        return REWARDS[name]()
    return name_errors(load_function("--reward_function", name, REWARDS), name)


def name_errors(function: Callable[..., list[float]], name: str) -> Callable[..., list[float]]:
    "The same function; an error in it becomes a RuntimeError that names its line."

    @wraps(function)
    def call(*args: Any, **columns: Any) -> list[float]:
        try:
            return function(*args, **columns)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise RuntimeError(
                f"reward function {name} failed: {type(error).__name__}: {error} ({at.filename}, "
                f"line {at.lineno}). RLHF_NB_DEBUG=1 shows the traceback."
            ) from error

    return call
