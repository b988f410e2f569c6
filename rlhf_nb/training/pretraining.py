"""The value model fitted, before the first update, to rollouts that an earlier run kept. VC-PPO
(Yuan et al. 2025, arXiv 2503.01491) fits it so to what the starting policy wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_nb.base.opened import embedding_rows
from rlhf_nb.losses import explained_variance
from rlhf_nb.ppo import estimate_advantages, mini_batches
from rlhf_nb.rollout import TENSORS, Rollout, token_texts
from rlhf_nb.training.config import PPOConfig, refuse
from rlhf_nb.training.kept import left_out, rollout_files
from rlhf_nb.training.saving import merge_rollouts
from rlhf_nb.update import Objective, objective_at

SETTING = "value_pretrain_rollouts"


def rewards_to_go(r: Rollout, cfg: Objective) -> Rollout:
    """`returns` are the saved rewards from each token (or turn) on, discounted as in this run, and
    no value is in them (lambda 1). As old values they leave the value loss unclipped."""
    cfg = replace(cfg, lam=1.0, lam_turn=1.0, lam_value=None, lam_length_alpha=None)
    none, cfg = torch.zeros_like(r.rewards), replace(cfg, whiten_rewards=False)
    r = estimate_advantages(r.with_(scores=r.rewards, kl=none, values=none), cfg)
    return r.with_(values=r.returns)


def saved_episodes(args: PPOConfig, folder: str, tokenizer: Any, vocabulary: int) -> Rollout:
    """All episodes that a run kept, as one record. Raises ValueError where there are none, they
    have no rewards, or they are of another tokenizer."""
    files = [file for of_update in rollout_files(Path(folder)).values() for file in of_update]
    if not files:
        how = "give the output_dir of a run with save_rollouts (--save_rollouts)"
        refuse(args, SETTING, f"no rollouts are there; {how}.{left_out(Path(folder))}")
    r = merge_rollouts([Rollout.load(file) for file in files])
    if r.rewards is None or r.logprobs is None or r.rewards[r.policy_mask].isnan().any():
        refuse(args, SETTING, "no rewards are in it; save what trainer.advantages(...) returns")
    most, ids = max(r.prompt_ids.max(), r.response_ids.max()), r.response_ids[0][r.mask[0]]
    texts = token_texts(tokenizer, ids.tolist()) if most < vocabulary else [f"id {most}"]
    if most >= vocabulary or (r.chosen is None and r.tokens and r.tokens[0][: len(ids)] != texts):
        wanted = "take rollouts of a policy with this tokenizer"
        refuse(args, SETTING, f"it is of another tokenizer ({texts[:4]} here); {wanted}")
    return r


def pretrain_values(trainer: Any) -> None:
    """Once, before the first update, where value_pretrain_rollouts is set: steps like those of a
    value warm-up, at the peak learning rate. One in five episodes is measured and not fitted."""
    args, layout, folder = trainer.args, trainer.layout, trainer.args.value_pretrain_rollouts
    if folder is None or trainer.pretrained:
        return
    model, groups = trainer.prepare(), trainer.optimizer.param_groups
    r = saved_episodes(args, folder, trainer.processing_class, embedding_rows(trainer.policy))
    r = r.with_(**{x: y.to(layout.device) for x in TENSORS if (y := getattr(r, x)) is not None})
    r, number = rewards_to_go(r, objective_at(args, args.kl_coef)), torch.arange(len(r))

    def share(rows: Tensor, size: int) -> Rollout:  # of this rank: as many rows as of the others
        rows = rows[: len(rows) // size * size]
        if not len(rows):
            refuse(args, SETTING, f"a fifth of its {len(r)} episodes or the rest are under {size}")
        return r.select(rows[args.process_index :: args.world_size])

    fitted = share(number[number % 5 < 4], args.mini_batch_size)
    other = share(number[number % 5 == 4], args.world_size)

    @torch.no_grad()
    def explained() -> float:
        (values,) = trainer.forward.over(other, lambda part: (trainer.forward(model, part).values,))
        valued = other.policy_mask if other.valued is None else other.valued
        return float(explained_variance(values, other.returns, valued, reduce=layout.sum))

    before, rates = explained(), [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["initial_lr"]
    parts, seed = len(fitted) // args.local_mini_batch_size, args.seed + args.process_index
    model.train()
    trainer.update_count = -1  # before the updates, and so in a warm-up: the policy is left out
    for rows in mini_batches(len(fitted), args.value_pretrain_epochs, parts, seed):
        trainer.gradients(model, fitted, rows)
        trainer.optimizer_step(model)
    trainer.update_count, trainer.pretrained = 0, True
    for group, rate in zip(groups, rates):
        group["lr"] = rate
    after = explained()
    trainer.log({"pretrain/explained_before": before, "pretrain/explained_after": after})
    if trainer.is_world_process_zero():
        trainer.say(
            f"value model: {args.value_pretrain_epochs} epochs over rollouts in {folder}; explained"
            f" variance of one in five, which it did not fit: {before:.2f} -> {after:.2f}."
        )
