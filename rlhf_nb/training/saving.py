"""What a run of PPO writes beside Trainer's own files: its policy, its value model, its rollouts,
which can be found again."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from rlhf_nb.base.files import read_object
from rlhf_nb.checkpoint import load_weights, save_policy, save_weights
from rlhf_nb.forward import PolicyAndValue
from rlhf_nb.packing import last_token, on_tokens
from rlhf_nb.rollout import TENSORS, Rollout
from rlhf_nb.training.folders import claim
from rlhf_nb.training.kept import kept_rollouts
from rlhf_nb.training.model_loading import merge_adapter
from rlhf_nb.turns import BESIDE


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


PAD_ROW_LOST = {"youtu"}  # models that transformers loads with 0 in that row of the embedding


def keep_pad_row(folder: Path) -> None:
    "Leaves the pad token to the tokenizer and the generation config where its row would be lost."
    config = read_object(file) if (file := folder / "config.json").is_file() else {}
    if config.get("model_type") in PAD_ROW_LOST:
        file.write_text(json.dumps(config | dict(pad_token_id=None), indent=2), encoding="utf-8")


def save_rollout(r: Rollout, trainer: Any) -> None:
    "Under output_dir/rollouts, a file a rank."
    args, update, folder = trainer.args, trainer.update_count, trainer.output_dir / "rollouts"
    claim(folder, trainer)
    rank = f"-rank{args.process_index}" if args.world_size > 1 else ""
    r.save(folder / f"update-{update:05d}{rank}.safetensors")


def rollouts(
    run: str | Path,  # output_dir of a run with save_rollouts=True
    tokens: bool = False,  # a row per token instead of one per episode
) -> pd.DataFrame:  # first columns: update, episode (its place in the update, ranks in order)
    "The episodes of all updates of a run. Raises ValueError where it kept none."
    frames = []
    for update, files in kept_rollouts(Path(run)).items():
        r = merge_rollouts([Rollout.load(file) for file in files])
        first = pd.DataFrame(dict(update=update, episode=range(len(r))))
        frame = r.by_token() if tokens else r.episodes().rename(columns=dict(update="data/update"))
        frames.append(first.merge(frame) if tokens else pd.concat([first, frame], axis=1))
    return pd.concat(frames, ignore_index=True)


def _with_tokens_paid(r: Rollout) -> Rollout:
    "The scores of responses as those of their last tokens."
    scores = {"raw_scores": r.raw_scores, "scores": r.scores}
    spread = {name: on_tokens(x, r.mask) for name, x in scores.items() if x is not None}
    return r.with_(paid=last_token(r.mask) if r.paid is None else r.paid, **spread)


def merge_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """The parts of one update as one rollout; prompts padded on the left, responses on the right.
    What one part lacks is nan in its episodes; truth values are absent if one part lacks them."""
    if len(parts) == 1:
        return parts[0]
    if any(r.paid is not None for r in parts):  # then all have scores of tokens
        parts = [_with_tokens_paid(r) for r in parts]
    response = max(r.mask.shape[1] for r in parts)

    def join_tensors(name: str) -> Tensor | None:
        given = [x for r in parts if (x := getattr(r, name)) is not None]
        if not given or (len(given) < len(parts) and not given[0].is_floating_point()):
            return None
        left = name.startswith("prompt")
        width = max(x.shape[1] for x in given) if name in BESIDE else response

        def pad_to_widest(r: Rollout) -> Tensor:
            if (x := getattr(r, name)) is None:
                x = torch.where(r.mask.bool(), math.nan, 0.0)
                x = x if given[0].dim() == 2 else torch.full((len(r),), math.nan)
            if x.dim() == 1:
                return x
            missing = width - x.shape[1]
            return pad(x, (missing, 0) if left else (0, missing))

        return torch.cat([pad_to_widest(r) for r in parts])

    texts = {
        name: [x for r in parts for x in getattr(r, name) or [""] * len(r)]
        for name in "prompts conversations settings responses tokens stop_reason".split()
        if any(getattr(r, name) for r in parts)
    }
    columns = {
        name: [x for r in parts for x in r.columns.get(name, [None] * len(r))]
        for name in dict.fromkeys(name for r in parts for name in r.columns)
    }
    tensors = {name: join_tensors(name) for name in TENSORS}
    return parts[0].with_(**tensors, **texts, columns=columns)
