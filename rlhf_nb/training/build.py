"Which models take part in PPO, from what a user gave: names, folders, objects or nothing."

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from rlhf_nb.base.custom import CustomScorer, check_head
from rlhf_nb.base.loading import explain_load_errors, pretrained_tokenizer
from rlhf_nb.base.noise import ALWAYS_ON, check_steady, switch_off_noise
from rlhf_nb.base.opened import (
    accepted_inputs,
    embedding_rows,
    mask_ids,
    separable_model,
    unused_ids,
)
from rlhf_nb.base.sharding import zero3_is_live
from rlhf_nb.checkpoint import load_weights
from rlhf_nb.estimators import ESTIMATORS
from rlhf_nb.forward import PolicyAndValue, ValueHead
from rlhf_nb.judges import Judges
from rlhf_nb.models import copy_frozen, scorer_from, token_scores
from rlhf_nb.sampling import has_cache
from rlhf_nb.training.config import PPOConfig
from rlhf_nb.training.layout import Layout, Placed
from rlhf_nb.training.model_loading import (
    add_adapter,
    add_pad_row,
    check_embeddings,
    check_vocabulary,
    distinct_pad_id,
    fit_embeddings,
    grow_embedding,
    load_policy,
    load_scorer,
    merge_adapter,
    set_pad_token,
)
from rlhf_nb.training.precision import check_learns, dtype_name
from rlhf_nb.training.reference import needs_reference

logger = logging.get_logger(__name__)
PADDED = 128  # embeddings are often padded to a multiple of it


def build_policy(
    args: PPOConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | str, adapter: Any
) -> Any:
    "The policy, with the adapter that is to be trained. Raises ValueError where nothing learns."
    policy = add_adapter(fit_of(args)(load_policy(model), tokenizer), adapter, args.seed)
    mask_ids(policy, unused_ids(policy, tokenizer))
    choose_adapter(policy, args)
    check_learns(policy, "policy")
    return policy


def build_reference(
    args: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    policy: Any,
    model: PreTrainedModel | str,  # that the policy came from
    ref_model: PreTrainedModel | str | None,
) -> nn.Module | None:  # None: the policy with its adapter off
    """The reference, frozen: the one that is given, or a copy of the policy as it starts. Raises
    ValueError on the policy itself."""
    if ref_model is model and isinstance(model, nn.Module):  # the same name twice is fine
        raise ValueError(
            "model and ref_model are the same object, so the KL would always be 0: leave ref_model "
            "out, and a frozen copy is made."
        )
    if ref_model is not None:
        reference = load_policy(ref_model, dtype=policy.dtype)
        check_same_ids(reference, tokenizer, embedding_rows(policy), "reference model")
        reference = fit_of(args)(reference, tokenizer)
        reference.eval().requires_grad_(False)
        if reference.dtype != policy.dtype:
            logger.warning(
                f"ref_model is in {dtype_name(reference.dtype)} and the policy in "
                f"{dtype_name(policy.dtype)}: the KL is not 0 before training, but about 0.003 "
                "nats a token. Load both in the same precision."
            )
    elif args.ref_adapter_name is None and (
        not hasattr(policy, "peft_config") or needs_reference(policy)
    ):
        reference = once_more("ref_model", model, lambda: copy_frozen(policy), load_policy)
    else:
        return None
    mask_ids(reference, unused_ids(reference, tokenizer))
    return switch_off_noise(reference, ALWAYS_ON)


def fit_judges(
    args: PPOConfig, tokenizer: PreTrainedTokenizerBase, judges: Judges, vocabulary: int
) -> None:
    """Fit the reward models to the policy's ids, or to their own tokenizer's. Raises ValueError
    where a model reads other ids than it is given."""
    own = judges.tokenizer is not None  # they read text, not the policy's ids
    for judge in judges.models:
        if not own:
            if args.resize_embeddings:
                grow_embedding(judge, vocabulary)
            check_same_ids(judge, tokenizer, vocabulary, "reward model")
            add_pad_row(judge, tokenizer)
        check_vocabulary(judge, judges.tokenizer or tokenizer, "reward model")


def build_critic(
    args: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    policy: Any,
    judges: Judges,
    reward_model: Any,  # as the trainer was given it
    value_model: Any,  # a model, a name or folder, or None
    adapter: Any,
) -> Any:  # None where the estimator needs none
    """The value model: the one that is given, or a copy of the reward model, or the policy's body
    with a fresh head. Raises ValueError where it does not fit."""
    if isinstance(value_model, nn.Module) and any(value_model is x for x in judges.given):
        raise ValueError(
            "reward_model and value_model are the same object, and the reward model is never "
            "trained: leave value_model out, and a copy is made."
        )
    if not ESTIMATORS[args.advantage_estimator].critic:  # its settings were refused before
        return None
    if args.share_value_trunk:
        return build_head(policy, value_model, adapter)
    if value_model is None:
        own = judges.tokenizer is not None
        like: Any = judges.models[0] if judges.models and not own else None
        if isinstance(like, CustomScorer) or judges.level != "response":
            like = None  # it may be a rule, and not learn; or it classifies tokens
        first = reward_model[0] if isinstance(reward_model, (list, tuple)) else reward_model
        value_model = once_more(
            "value_model",
            None if like is None else first,
            lambda: trainable(grown(policy, args.seed) if like is None else deepcopy(like)),
            load_scorer,
        )
    scorer, vocabulary = load_scorer(value_model), embedding_rows(policy)
    if args.resize_embeddings:
        grow_embedding(scorer, vocabulary)
    check_same_ids(scorer, tokenizer, vocabulary, "value model")
    scorer = set_pad_token(add_pad_row(scorer, tokenizer), tokenizer)
    check_vocabulary(scorer, tokenizer, "value model")
    value = check_head(add_adapter(scorer, adapter, args.seed), "value model")
    check_learns(value, "value model", "value_")
    return value


def build_head(policy: Any, saved: Any, adapter: Any) -> ValueHead:
    "A value head on the policy's body, from the folder that is given. Raises ValueError."
    if adapter is not None:
        raise ValueError(
            "share_value_trunk is set and a value_peft_config is given: leave one of them out; "
            "the value head is one layer on the policy's body and needs no adapter."
        )
    head = ValueHead(policy)
    if isinstance(saved, (str, Path)) and not (Path(saved) / "config.json").exists():
        with explain_load_errors(str(saved), "value head"):
            load_weights(head, saved)
    elif saved is not None:
        raise ValueError(
            "share_value_trunk is set and a value_model is given: leave one of them out, or "
            "give the folder of a value head, as save_value_model writes it."
        )
    return head


def fit_of(args: PPOConfig) -> Callable[[Any, PreTrainedTokenizerBase], Any]:
    "What is done with a policy's embeddings: fitted to the tokenizer, or checked."
    return fit_embeddings if args.resize_embeddings else check_embeddings


def fix_of(role: str) -> str:
    "What to do about a model of other ids."
    by_text = (
        " Or give its tokenizer as reward_processing_class (--reward_tokenizer_name_or_path), and "
        "it reads texts instead of the policy's ids."
    )
    return "Use one that has the policy's." + by_text * (role == "reward model")


def check_same_ids(
    judge: Any,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,  # ids that the policy has an embedding for
    role: str,  # of the model
) -> None:
    """Raises ValueError where a model was saved with a tokenizer that gives other ids to the same
    tokens, or has other tokens; without one, where it knows far more ids."""
    name, other = getattr(judge, "name_or_path", ""), None
    if name:
        with suppress(OSError, ValueError):  # it has none, or the folder is gone
            other = pretrained_tokenizer(name)
    if other is None:
        _check_as_many(judge, vocabulary, role)
        return
    ours, theirs = (
        {token: i for token, i in words.get_vocab().items() if i != distinct_pad_id(words)}
        for words in (tokenizer, other)
    )
    both = ours.keys() & theirs.keys()
    moved = [token for token in both if ours[token] != theirs[token]]
    if moved or len(both) < 0.9 * min(len(ours), len(theirs)):
        what = f"gives {moved[0]!r} another id" if moved else "has other tokens"
        raise ValueError(
            f"the {role} in {name} has a tokenizer of its own: it {what}. {fix_of(role)}"
        )


def _check_as_many(judge: Any, vocabulary: int, role: str) -> None:
    "Raises ValueError where a model without a tokenizer has more ids than padding explains."
    rows = embedding_rows(judge)
    if rows <= vocabulary or isinstance(judge, CustomScorer):
        return
    what = (
        f"the {role} has an embedding for {rows} ids and the policy for {vocabulary}, and "
        "there is no tokenizer beside it to compare"
    )
    if rows <= math.ceil(vocabulary / PADDED) * PADDED:
        logger.warning(f"{what}: it is taken for the same vocabulary, padded.")
        return
    raise ValueError(f"{what}: it was probably trained with another vocabulary. {fix_of(role)}")


def readers(pair: PolicyAndValue, judges: Judges) -> list[tuple[str, Any]]:
    "The models that read the policy's ids, prompt and response, by name."
    own = pair.value is not None and not isinstance(pair.value, ValueHead)
    value = [("value model", pair.value)] if own else []
    of_judges = judges.models if judges.tokenizer is None else []
    return [("policy", pair.policy), *(("reward model", judge) for judge in of_judges), *value]


def grown(policy: Any, seed: int) -> PreTrainedModel:
    "A value model from the policy's body as it starts."
    adapted = hasattr(policy, "peft_config") and needs_reference(policy)
    return scorer_from(merge_adapter(deepcopy(policy)) if adapted else policy, seed)


def trainable(model: Any) -> nn.Module:
    "The same model, to be trained, in float32 or wider."
    return model.requires_grad_(True).train().to(torch.promote_types(model.dtype, torch.float32))


def once_more(
    name: str,
    given: Any,  # the name or folder that the first one came from, or an object
    copy_it: Callable[[], Any],
    load: Callable[[str], Any],
) -> Any:
    "A second model like the first: a copy; under ZeRO-3, which shards weights at once, a load."
    if not zero3_is_live():
        return copy_it()
    if isinstance(given, str):
        return load(given).requires_grad_(name != "ref_model")
    raise ValueError(
        f"under DeepSpeed ZeRO-3 a model's weights are sharded and cannot be copied: give {name}, "
        "or the model that it is made from, by its name or folder."
    )


def choose_adapter(policy: Any, args: PPOConfig) -> None:
    "Switch on the adapter that is to be trained. Raises ValueError where a named one is missing."
    known = list(getattr(policy, "peft_config", {}))
    for name in ("model_adapter_name", "ref_adapter_name"):
        given = getattr(args, name)
        if given is not None and given not in known:
            raise ValueError(
                f"{name} is {given!r} and the policy has the adapters {known}: name one of them, "
                "or load it first, model.load_adapter(folder, adapter_name=...)."
            )
    if args.model_adapter_name is not None:
        policy.set_adapter(args.model_adapter_name)


def try_models(args: PPOConfig, pair: PolicyAndValue, reference: Placed, layout: Layout) -> None:
    """Find out now, and not in the first rollout, how the policy is to be sampled, whether heads
    can be taken off, and whether training mode is random. Raises ValueError on a policy that cannot
    be sampled, or left out of a step where the settings want that, and on a model that is random;
    under DeepSpeed and FSDP, where none can be called before it is prepared, none is."""
    warm_up = args.value_warmup_updates or args.value_pretrain_rollouts
    layout.check_warm_up(warm_up, args.weight_decay)
    if not layout.in_place:
        return
    with layout.accelerator.autocast():  # some attention refuses float32
        has_cache(pair.policy)
        separable_model(pair.policy)
        reference(separable_model)
        check_steady(pair.policy, "policy", _logits)
        if pair.value is not None and not isinstance(pair.value, ValueHead):
            check_steady(pair.value, "value model", token_scores)


def _logits(policy: Any, ids: Tensor, mask: Tensor) -> Tensor:
    inputs = dict(input_ids=ids, attention_mask=mask, use_cache=False)
    return policy(**accepted_inputs(policy.forward, inputs)).logits


def check_given(args: PPOConfig, model: Any, peft_config: Any, optimizer: Any) -> None:
    "Raises ValueError on an adapter that PPO cannot train, and on a rate that would be ignored."
    check_value_rate(args, optimizer)
    for config in (peft_config, getattr(model, "active_peft_config", None)):
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"the policy's adapter is of {type(config).__name__}, which puts virtual tokens in "
                "front of a text; PPO reads and samples text without them. Give an adapter inside "
                "the layers, such as LoraConfig(r=8); SFTTrainer trains either kind."
            )
    if hasattr(model, "peft_config") and not hasattr(model, "get_base_model"):
        raise ValueError(
            "the policy has an adapter of transformers' own (add_adapter): give a model of "
            "peft.get_peft_model, or the model without it and peft_config=LoraConfig(r=8)."
        )


def check_value_rate(args: PPOConfig, optimizer: Any) -> None:
    "Raises ValueError on a value_learning_rate that an optimizer of the user's own would ignore."
    if optimizer is not None and args.value_learning_rate is not None:
        raise ValueError(
            f"value_learning_rate is {args.value_learning_rate} and an optimizer is given, which "
            "has its own rates: leave value_learning_rate out and give the value model's "
            "parameters a group of their own, or give optimizer_cls_and_kwargs instead."
        )


def split_groups(optimizer: torch.optim.Optimizer, value: nn.Module, lr: float) -> None:
    "Give the value model's parameters a learning rate of their own."
    of_value, groups = {id(p) for p in value.parameters()}, optimizer.param_groups[:]
    for group in groups:
        theirs = [p for p in group["params"] if id(p) in of_value]
        group["params"] = [p for p in group["params"] if id(p) not in of_value]
        if theirs:
            same = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}
            optimizer.add_param_group({**same, "params": theirs, "lr": lr})
