"""What other settings would have made of a rollout, and which settings it was made with."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from rlhf_nb.gae import gae, returns_from
from rlhf_nb.kl import estimate_kl
from rlhf_nb.masks import whiten
from rlhf_nb.rollout import Rollout
from rlhf_nb.shaping import penalize_missing_eos, shape_rewards, slot_mask
from rlhf_nb.ui.episodes import filled


@dataclass(frozen=True)
class Recipe:
    "The settings between a scored rollout and its advantages."

    kl_coef: float = 0.05
    estimator: str = "k1"  # or k2, k3, abs; stored: the KL as it is in the rollout, such as `full`
    gamma: float = 1.0
    lam: float = 0.95
    missing_eos_penalty: float = 0.0
    cliprange: float = 0.2
    reward_slot: str = "last"
    whiten_rewards: bool = False
    scores_from: str = (
        "raw"  # what the penalty is subtracted from; stored: where scaling came first
    )


def what_if(
    rollout: Rollout,  # scored, with log-probs of policy and reference, and values
    recipe: Recipe,
) -> Rollout:  # the same with kl, scores, rewards, returns and advantages computed again
    """The trainer's third phase with other settings. Whitening is over this rollout alone. Raises
    ValueError on a rollout that lacks what it starts from."""
    r, values = rollout, filled(rollout, "values")
    if recipe.estimator == "stored":
        kl = filled(r, "kl")
    else:
        logprobs, ref_logprobs = filled(r, "logprobs"), filled(r, "ref_logprobs")
        kl = estimate_kl(logprobs, ref_logprobs, recipe.estimator).masked_fill(~r.mask, 0.0)
    before = filled(r, "raw_scores" if recipe.scores_from == "raw" else "scores")
    scores = penalize_missing_eos(before, r.stopped, recipe.missing_eos_penalty)
    slots = slot_mask(r.mask, recipe.reward_slot)
    rewards, _ = shape_rewards(scores, kl, r.mask, recipe.kl_coef, recipe.reward_slot)
    if recipe.whiten_rewards:
        rewards = whiten(rewards, slots, shift_mean=False)
    advantages = gae(rewards, values, slots, recipe.gamma, recipe.lam)
    return r.with_(
        kl=kl,
        scores=scores,
        rewards=rewards,
        returns=returns_from(advantages, values, slots),
        advantages=whiten(advantages * r.mask, r.mask),
    )


_GUESSES: tuple[tuple[str, list[dict[str, Any]]], ...] = (
    ("kl", [dict(estimator=name) for name in ("k1", "k2", "k3", "abs", "stored")]),
    (
        "rewards",
        [
            dict(reward_slot=slot, whiten_rewards=white)
            for white in (False, True)
            for slot in ("last", "after_eos")
        ],
    ),
    (
        "returns",
        [
            dict(gamma=gamma, lam=lam)
            for gamma in (1.0, 0.99, 0.95)
            for lam in (0.95, 1.0, 0.9, 0.97, 0.98, 0.99, 0.8, 0.0)
        ],
    ),
)


def _largest_difference(a: Tensor, b: Tensor) -> float:
    "The largest difference; infinite where an entry is not a number."
    return max(
        (a.float() - b.float()).abs().nan_to_num(math.inf, math.inf).flatten().tolist(), default=0.0
    )


def _penalties(rollout: Rollout) -> list[dict[str, Any]]:
    "What may have been subtracted from the scores of episodes that did not stop."
    stored: list[dict[str, Any]] = [dict(scores_from="stored", missing_eos_penalty=0.0)]
    if rollout.raw_scores is None:
        return stored
    cut = ~rollout.stopped.bool()
    lost = (rollout.raw_scores - filled(rollout, "scores"))[cut][:1].double().tolist()
    amounts = [0.0, *(round(x, 4) for x in lost if x > 0)]
    return [dict(scores_from="raw", missing_eos_penalty=x) for x in amounts] + stored


def lacking(rollout: Rollout) -> list[str]:
    "What is not there of all that `what_if` starts from and computes."
    wanted = "stopped logprobs ref_logprobs kl values scores rewards returns advantages".split()
    absent = [name for name in wanted if getattr(rollout, name) is None]
    return absent if len(rollout) else ["episodes"]


def replays(rollout: Rollout) -> bool:
    "Is everything there that `what_if` starts from, and everything that it computes?"
    return not lacking(rollout)


def recipe_of(rollout: Rollout) -> Recipe:
    """The settings that a rollout was made with, as far as its numbers tell; where several do
    equally well, the usual one."""
    known = {f.name: rollout.info[f.name] for f in fields(Recipe) if f.name in rollout.info}
    recipe = Recipe(**known)
    for name, choices in (("scores", _penalties(rollout)), *_GUESSES):
        stored, best, nearest = filled(rollout, name), math.inf, recipe
        for choice in choices:
            candidate = replace(recipe, **choice)
            off = _largest_difference(filled(what_if(rollout, candidate), name), stored)
            if off < best:
                best, nearest = off, candidate
            if best == 0:
                break
        recipe = nearest
    return recipe


_REPLAYED = ("rewards", "returns", "advantages")


def reproduces(rollout: Rollout, recipe: Recipe) -> tuple[bool, str]:
    "Whether the recipe gives the stored numbers, and a sentence that says so."
    again = what_if(rollout, recipe)
    off = {
        name: _largest_difference(filled(again, name), filled(rollout, name)) for name in _REPLAYED
    }
    settings = (
        f"kl_coef {recipe.kl_coef:.3g}, {recipe.estimator}, gamma {recipe.gamma:g}, lam "
        f"{recipe.lam:g}, EOS penalty {recipe.missing_eos_penalty:g}"
    )
    worst = max(off.values())
    if not worst:
        return (
            True,
            f"With {settings}, all stored rewards, returns and advantages come out exactly.",
        )
    if worst < 1e-4:
        return True, f"With {settings}, what is stored comes out within {worst:.0e}."
    lost = ", ".join(name for name in _REPLAYED if off[name] >= 1e-4)
    return False, (
        f"With {settings}, the stored {lost} do not come out: the run had a setting that its files "
        "do not tell. Before is what these settings make of it."
    )


def setting(name: str, x: Any) -> str:
    "A setting and its value, in words."
    return f"{name.replace('_', ' ')} {f'{x:.3g}' if isinstance(x, float) else x}"
