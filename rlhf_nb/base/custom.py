"""Which modules can be a reward or value model: sequence classifiers, and modules of one's own in
the form of the published PPO trainer, whose `base_model_prefix` names a body and whose
`score(hidden_states)` gives a number for each token."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf_nb.base.opened import unwrap

HEADS = ("score", "classifier", "v_head")


def linear_head(model: Any) -> nn.Linear | None:
    "The layer that turns a hidden state into one number; under an adapter it is wrapped."
    for name in HEADS:
        head = getattr(unwrap(model), name, None)
        if isinstance(unwrap(head), (nn.Linear, nn.Identity)):
            return head
    return None


def check_head(model: Any, name: str) -> Any:  # the same
    """Raises ValueError where a reward or value model's adapter learns under a head that does not,
    or that is no part of the adapter and would not be saved with it."""
    around = next((part.given for part in model.modules() if isinstance(part, ScoredBody)), model)
    inner = unwrap(around)
    body = getattr(inner, "base_model_prefix", "")  # beside it, all that has weights is head
    parts = [part for part, x in inner.named_children() if part != body and [*x.parameters()]]
    own = {*getattr(model, "peft_config", ()), *getattr(around, "peft_config", ())}  # adapters
    learn = [{*part.split(".")} for part, x in model.named_parameters() if x.requires_grad]
    if own and learn and parts and not any(own & names and {*parts} & names for names in learn):
        raise ValueError(
            f"the {name}'s head does not learn with its adapter, or would not be saved with it: "
            f"give the adapter's config modules_to_save={parts}."
        )
    return model


def body_weights(model: Any, like: nn.Module) -> dict[str, Tensor]:
    "The weights of a model's body under the names that a body without an adapter has."
    around = re.compile(r"\.(base_layer|original_module|token_adapter)\b")  # what peft adds
    weights, names = model.base_model.state_dict(), like.state_dict().keys()
    plain = {around.sub("", name): weight for name, weight in weights.items()}
    return {name: weight for name, weight in plain.items() if name in names}


def as_scorer(model: Any) -> Any:
    "A sequence classifier as it is, another module in one's place. Raises ValueError on any other."
    judged = isinstance(unwrap(model), (PreTrainedModel, CustomScorer))
    known = judged and linear_head(model) is not None
    return model if known else CustomScorer(model)


class ScoredBody(nn.Module):
    "Body and score of a module; its scores are where a body has its hidden states."

    def __init__(self, given: Any):
        super().__init__()
        self.given = given

    @property
    def body(self) -> Any:
        return getattr(self.given, self.given.base_model_prefix)

    def forward(
        self,
        input_ids: Tensor,  # [B, L]
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        output = self.body(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            return_dict=True,
            output_hidden_states=True,
            use_cache=use_cache,
        )
        scores = self.given.score(output.hidden_states[-1])
        if scores.shape != (*input_ids.shape, 1):
            raise ValueError(
                f"score of {type(self.given).__name__} returned {list(scores.shape)} for "
                f"{list(input_ids.shape)} tokens: return a number for each, [B, T, 1]."
            )
        return SimpleNamespace(last_hidden_state=scores)


class CustomScorer(nn.Module):
    "A module of one's own in the place of a sequence classifier. Raises ValueError on other forms."

    def __init__(self, given: Any):
        super().__init__()
        body = getattr(given, getattr(given, "base_model_prefix", None) or "", None)
        if body is None or body is given or not callable(getattr(given, "score", None)):
            raise ValueError(
                f"{type(given).__name__} is no reward model and no value model: it is no sequence "
                "classifier, and has no score(hidden_states) beside a body that base_model_prefix "
                "names. Give one of these, or give a function f(prompts, responses, **columns)."
            )
        self.base_model, self.score = ScoredBody(given), nn.Identity()
        config = getattr(body, "config", None)
        self.config = config if isinstance(config, PreTrainedConfig) else PreTrainedConfig()

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), torch.float32)

    def get_input_embeddings(self) -> Any:
        "The body's; one without may read any id."
        get = getattr(self.base_model.body, "get_input_embeddings", None)
        return SimpleNamespace(num_embeddings=2**31) if get is None else get()

    def resize_token_embeddings(self, rows: int) -> None:
        self.base_model.body.resize_token_embeddings(rows)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        self.base_model.body.activation_checkpointing_enable(**kwargs)
