"""Which settings one update can be done again with, and why the others are refused."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.fields import PHASES, settings_that_say
from rlhf_nb.estimators import ESTIMATORS
from rlhf_nb.trainer import PPOConfig
from rlhf_nb.training import compat

MAY_VARY = {*settings_that_say(PPOConfig, "update", "rewards")}
OF_BATCH = (
    "the number of episodes is that of the record: vary num_mini_batches, or "
    "per_device_train_batch_size (rows of a forward pass)"
)
REASONS = {  # why a setting cannot be varied, of those that may have a say in an update
    **{
        name: why
        for phase, why in PHASES.items()
        if why and phase != "run"
        for name in settings_that_say(PPOConfig, phase)
    },
    **{name: OF_BATCH for name in compat.SIZES if name.endswith("batch_size")},
    **{
        name: f"no run of PPO can have it: {why}"
        for why, names in compat.REFUSED.items()
        for name in names.split()
    },
}
NOWHERE = PHASES["run"] or ""
# What a trainer that does one update again is made without.
UNREPLAYED = {*settings_that_say(PPOConfig, "run", "refused", "compiler", "unreplayed")}


def settings_of(run: Mapping[str, Any]) -> dict[str, Any]:
    "All settings that a checkpoint's manifest records of its run."
    names = settings_that_say(PPOConfig, "names")
    named = {name: run[name] for name in names if name in run}
    return compat.with_new_names(named | run.get("settings", {}))


def check_settings(
    changes: Mapping[str, Any],  # what is asked for
    was: Mapping[str, Any],  # the run's settings
) -> None:
    "Raises ValueError on a setting that this update cannot be done again with, and says why."
    known = {f.name for f in fields(PPOConfig)} | set(REASONS)
    for name, value in changes.items():
        if name not in known:
            guess = did_you_mean(name, sorted(MAY_VARY))
            raise ValueError(f"there is no setting {name!r}.{guess} See rlhf-nb replay --help.")
        why = None if name in MAY_VARY else REASONS.get(name, NOWHERE)
        why = why or unfit(name, {**was, **changes}, was)
        if why and value != was.get(name):
            old = was.get(name)
            text = why.format(was="other settings" if old is None else f"{name} {old}")
            raise ValueError(f"{name} cannot be varied here: {text}.")
    # Made for what PPOConfig alone refuses, such as a number out of range.
    arguments({**was, **in_same_batch(changes, was)}, Path(tempfile.gettempdir()))


def unfit(name: str, now: Mapping[str, Any], was: Mapping[str, Any]) -> str | None:
    "Why a setting that may vary cannot have its new value here; None: it can."
    old, value = was.get(name), now[name]
    if name == "kl_estimator" and value == "full" != old:
        return "the exact sum over the vocabulary is not in the record: take k1, k2, k3 or abs"
    if name == "advantage_estimator" and critic_of(value) != critic_of(old):
        return (
            "the checkpoint's optimizer has or lacks a value model as the run did: take an "
            "estimator that agrees with it about the value model"
        )
    if name == "value_learning_rate" and (value is None) != (old is None):
        return (
            "the run had one rate for both models, or one each, and so has its optimizer's state: "
            "vary learning_rate, or vf_coef"
        )
    if name == "normalize_scores" and value and not old:
        return (
            "it needs the mean and spread of all scores so far, which this run did not keep, as it "
            "was off: only a new run shows it. Vary score_clip or kl_coef"
        )
    if name == "total_episodes" and (steps := now["max_steps"]) > 0:
        return (
            f"max_steps is {steps}, which alone decides how long the schedule is: vary max_steps, "
            "or set it to -1 as well"
        )
    return None


def critic_of(name: Any) -> bool:
    "Whether an estimator has a value model."
    return name in ESTIMATORS and ESTIMATORS[name].critic


def in_same_batch(changes: Mapping[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    "Rows of a forward pass and passes of a batch together make the episodes of the record."
    rows, passes = "per_device_train_batch_size", "gradient_accumulation_steps"
    total, made = was[rows] * was[passes], {**changes}
    for one, other in ((rows, passes), (passes, rows)):
        if one in changes and other not in changes:
            if not changes[one] > 0 or total % changes[one]:
                raise ValueError(
                    f"{one} is {changes[one]} and the record has {total} episodes on each device: "
                    f"give a divisor of {total}."
                )
            made[other] = total // changes[one]
    if made.get(rows, was[rows]) * made.get(passes, was[passes]) != total:
        raise ValueError(
            f"{rows} x {passes} is {made[rows] * made[passes]} and the record has {total} episodes "
            f"on each device: give one of the two, a divisor of {total}."
        )
    return made


def arguments(
    settings: Mapping[str, Any],  # of the run, with what is varied
    folder: Path,  # for what a trainer writes, not the run's
) -> PPOConfig:
    "Settings for a trainer that does one update and reports to nobody. Raises ValueError."
    defaults = {f.name: f.default for f in fields(PPOConfig) if f.init}
    names = defaults.keys() & settings.keys() - UNREPLAYED
    given = {name: settings[name] for name in names if settings[name] != defaults[name]}
    if not given.get("gradient_checkpointing"):  # an older name, which warns even where it is off
        given.pop("gradient_checkpointing", None)
    return PPOConfig(
        str(folder),
        **given,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        num_sample_generations=0,
    )
