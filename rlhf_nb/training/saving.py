"What a run of PPO writes beside Trainer's own files: its policy, its value model, its rollouts."

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_nb.checkpoint import load_weights, save_policy, save_weights
from rlhf_nb.forward import PolicyAndValue
from rlhf_nb.rollout import Rollout
from rlhf_nb.training.folders import claim
from rlhf_nb.training.model_loading import merge_adapter


def with_prefix(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    "The weights under a prefix, without it."
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}


def save_pair(
    pair: PolicyAndValue,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    state: dict[str, Tensor] | None,  # of both, gathered from all ranks; None: as it is here
    stop_ids: Sequence[int],
    *,
    merge: bool,  # the adapter into the policy
    value: bool,  # the value model too, in value/
) -> None:
    "Write the policy alone, with tokenizer and generation config, and the value model beside it."
    policy, of_value = pair.policy, None
    if state is not None:
        of_value = with_prefix(state, "value.")
        state = with_prefix(state, "policy.")
    if merge and hasattr(policy, "peft_config"):
        policy = copy.deepcopy(policy)
        if state is not None:
            policy.load_state_dict(state)
        policy, state = merge_adapter(policy), None
    save_policy(policy, tokenizer, folder, state, stop_ids=stop_ids)
    if value and pair.value is not None:
        save_weights(pair.value, folder / "value", of_value)


def load_pair(pair: PolicyAndValue, folder: Path) -> None:
    "Put back what `save_pair` wrote."
    load_weights(pair.policy, folder)
    if pair.value is not None:
        load_weights(pair.value, folder / "value")


def save_rollout(r: Rollout, trainer: Any) -> None:
    "Under output_dir/rollouts, a file a rank."
    args, update, folder = trainer.args, trainer.update_count, trainer.output_dir / "rollouts"
    claim(folder, trainer)
    rank = f"-rank{args.process_index}" if args.world_size > 1 else ""
    r.save(folder / f"update-{update:05d}{rank}.safetensors")
