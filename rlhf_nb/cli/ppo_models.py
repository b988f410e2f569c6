"""The models of `rlhf-nb ppo`, from its options."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled

from rlhf_nb.cli.arguments import PPOModelArguments
from rlhf_nb.cli.models import in_dtype, load_options, require_name
from rlhf_nb.cli.scoring import REWARDS
from rlhf_nb.estimators import ESTIMATORS
from rlhf_nb.judges import ensemble_of, load_judge
from rlhf_nb.models import scorer_from, zero_head
from rlhf_nb.trainer import PPOConfig
from rlhf_nb.training.config import check_ensemble, check_estimator
from rlhf_nb.training.model_loading import (
    load_policy,
    load_reward_model,
    load_scorer,
    load_tokenizer,
)

DEFAULTS = {f.name: f.default for f in fields(PPOConfig)}


def policy_name(model_name_or_path: str | None, sft_model_path: str) -> str:
    """The policy to start from: sft_model_path where it was given, or else model_name_or_path.
    Raises ValueError where there is neither."""
    if sft_model_path != DEFAULTS["sft_model_path"]:
        return sft_model_path
    if model_name_or_path is None:
        raise ValueError(
            "--model_name_or_path is missing: give the policy to start from, such as the folder of "
            "`rlhf-nb sft`."
        )
    return model_name_or_path


def has_reward_model(models: PPOModelArguments, args: Any) -> bool:
    "False: reward functions or an environment alone. Raises ValueError where there is neither."
    given = args.reward_model_path != DEFAULTS["reward_model_path"]
    if not (given or models.reward_function or models.environment):
        raise ValueError(
            "--reward_model_path is missing: give a reward model, such as the folder of `rlhf-nb "
            f"reward`, or a --reward_function ({', '.join(REWARDS)}, or module:function), "
            "or an --environment."
        )
    return given


def check_models(models: PPOModelArguments, args: Any, dataset_name: str | None) -> None:
    """Raises ValueError on models and settings of a critic for an estimator that has none, and on
    reward models that do not go together, before one is loaded."""
    if (dataset_name or "").startswith("reasoning_gym:"):
        models.reward_function = models.reward_function or ["reasoning_gym"]
    of_critic = ("value_model_path", "zero_value_head", "value_use_peft")
    check_estimator(args, **{f"--{name}": getattr(models, name) for name in of_critic})
    check_ensemble(args)
    given = has_reward_model(models, args)
    if models.reward_ensemble and not given:
        raise ValueError("--reward_ensemble adds to --reward_model_path: give that too.")
    if ensemble := ensemble_of(args):
        members = given + len(models.reward_ensemble or [])
        ensemble.check((args.reward_weights or [1.0] * members)[:members])


def scorers(models: PPOModelArguments, args: PPOConfig) -> list[Any]:
    "The reward models; behind them come the reward functions, in the order of reward_weights."
    named = [("--reward_ensemble", name) for name in models.reward_ensemble or []]
    if has_reward_model(models, args):
        named.insert(0, ("--reward_model_path", args.reward_model_path))
    loaded = []
    for flag, name in named:
        with require_name(flag, name):
            loaded.append(in_dtype(load_judge(name, args.reward_level), models))
    return loaded


def reward_tokenizer_of(models: PPOModelArguments) -> PreTrainedTokenizerBase | None:
    "The reward model's own tokenizer, where it has one."
    if (name := models.reward_tokenizer_name_or_path) is None:
        return None
    with require_name("--reward_tokenizer_name_or_path", name):
        return load_tokenizer(name)


def value_model_of(
    models: PPOModelArguments, scorers: list[Any], policy: PreTrainedModel, args: PPOConfig
) -> Any:
    "The value model that the options describe; None: the trainer makes one."
    value: Any = None
    if not ESTIMATORS[args.advantage_estimator].critic:
        return value
    from_reward = (
        isinstance(next(iter(scorers), None), Module)
        and models.reward_tokenizer_name_or_path is None
        and args.reward_level == "response"
    )  # the same tokens mean the same to both
    if models.value_model_path is not None and args.share_value_trunk:
        value = models.value_model_path  # of a head alone
    elif models.value_model_path is not None:
        with require_name("--value_model_path", models.value_model_path):
            value = in_dtype(load_scorer(models.value_model_path), models)
    elif is_deepspeed_zero3_enabled() and not args.share_value_trunk:
        # ZeRO-3 splits weights over the processes as they are loaded: no model can be copied
        name = args.reward_model_path
        if not from_reward:
            name = policy_name(models.model_name_or_path, args.sft_model_path)
        value = in_dtype(load_reward_model(name, args.seed), models)
    if not models.zero_value_head:
        return value
    if value is None:
        value = copy.deepcopy(scorers[0]) if from_reward else scorer_from(policy, args.seed)
    return zero_head(value)


def reference_of(models: PPOModelArguments, name: str) -> PreTrainedModel | None:
    "None: the trainer copies the policy. Under ZeRO-3 it is loaded a second time."
    if models.use_peft or not is_deepspeed_zero3_enabled():
        return None
    return load_policy(name, **load_options(models))
