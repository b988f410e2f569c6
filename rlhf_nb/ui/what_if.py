"What other settings would have made of a rollout that carries the objective it was made with."

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace
from typing import Any

from torch import Tensor

from rlhf_nb.base.fields import check_fields
from rlhf_nb.estimators import ESTIMATORS
from rlhf_nb.gae import gae
from rlhf_nb.kl import estimate_kl
from rlhf_nb.packing import on_tokens
from rlhf_nb.ppo import final_scores, with_advantages
from rlhf_nb.rollout import Rollout
from rlhf_nb.shaping import penalize_missing_eos
from rlhf_nb.turns import keep_chosen, put_fields_back, reached_stops
from rlhf_nb.ui.episodes import tensor_of
from rlhf_nb.update import Objective

UNKNOWN = (
    "The file does not say with which settings it was made: choose them in the what-if, or give "
    "--objective kl_coef=0.05,lam=0.95 (in Python, objective=Objective(...))."
)


def objective_of(rollout: Rollout) -> Objective | None:
    """The objective that a rollout carries. None where it carries none, or settings that are not
    known here. Raises ValueError on a value that a setting may not have."""
    if rollout.objective is None or not {*rollout.objective} <= {f.name for f in fields(Objective)}:
        return None
    objective = Objective(**rollout.objective)
    try:
        check_fields(objective)
    except ValueError as error:
        raise ValueError(f"the rollout's objective has a wrong value: {error}") from error
    return objective


def check_chosen(rollout: Rollout, chosen: Objective | None) -> None:
    "Raises ValueError where an objective is given for a rollout that carries its own."
    if chosen is not None and objective_of(rollout) is not None:
        fix = "leave objective out, and change settings in the view"
        raise ValueError(f"this rollout carries its own objective: {fix}.")


def unpenalized(rollout: Rollout, made: Objective | None) -> Tensor:  # [B], or [B, T] of tokens
    "Scores before the penalty for a missing stop token; raw ones where the objective is not known."
    scores, raw = tensor_of(rollout, "scores"), rollout.raw_scores
    if made is None:
        return scores if raw is None else raw
    if made.non_eos_penalty:
        return scores
    if made.normalize_scores or raw is None:  # the running mean is in no file
        charged = (made.missing_eos_penalty or 0.0) * ~reached_stops(rollout).bool()
        return scores + (charged if scores.dim() == 1 else on_tokens(charged, rollout.mask))
    made = replace(made, missing_eos_penalty=None)
    return final_scores(raw, reached_stops(rollout), made, mask=rollout.mask)


def why_not(rollout: Rollout, objective: Objective) -> str:
    "A sentence on why an objective cannot be tried on a rollout; empty where it can."
    made = objective_of(rollout) or objective
    for name in {made.advantage_estimator, objective.advantage_estimator}:
        if name not in ESTIMATORS or ESTIMATORS[name].compute is not gae:
            return f"advantage_estimator is {name}, and only gae is computed again."
    ended = tensor_of(rollout, "stopped") if rollout.turn is None else rollout.ended
    if made.bootstrap_truncated and not ended.all():
        after = "after each response cut off, which no rollout holds"
        return f"bootstrap_truncated took a value {after}."
    if objective.kl_estimator == "full" and made.kl_estimator != "full":
        return "kl_estimator full needs the whole vocabulary: the rollout has sampled tokens alone."
    of_scores = "normalize_scores score_clip non_eos_penalty penalty_reward_value".split()
    if moved := [x for x in of_scores if getattr(made, x) != getattr(objective, x)]:
        return f"{', '.join(moved)} made the scores, and only missing_eos_penalty is tried on them."
    return ""


def what_if(
    rollout: Rollout,  # scored, with log-probs of policy and reference, and values
    objective: Objective,
) -> Rollout:  # the same with kl, scores, rewards, returns and advantages computed again
    """The trainer's third phase with other settings. Whitening is over this rollout alone. Raises
    ValueError where the rollout does not hold what these settings need."""
    if why := why_not(rollout, objective):
        raise ValueError(f"{why} Change another setting of the rollout's own objective.")
    if rollout.chosen is not None:
        made = what_if(keep_chosen(rollout), objective)
        names = ("kl", "scores", "rewards", "returns", "advantages", "valued")
        back = put_fields_back(rollout, **{name: getattr(made, name) for name in names})
        return back.with_(objective=made.objective)
    r, values, stopped = rollout, tensor_of(rollout, "values"), reached_stops(rollout)
    kl = tensor_of(r, "kl")
    if objective.kl_estimator != "full":
        logprobs, ref_logprobs = tensor_of(r, "logprobs"), tensor_of(r, "ref_logprobs")
        kl = estimate_kl(logprobs, ref_logprobs, objective.kl_estimator).masked_fill(~r.mask, 0.0)
    before = unpenalized(r, objective_of(r) or objective)
    scores = penalize_missing_eos(before, stopped, objective.missing_eos_penalty or 0.0, r.mask)
    again = with_advantages(r.with_(kl=kl, scores=scores, values=values), objective)
    return again.with_(objective=asdict(objective))


def lacking(rollout: Rollout) -> list[str]:
    "What is not there of all that `what_if` starts from and computes."
    wanted = "stopped logprobs ref_logprobs kl values scores rewards returns advantages".split()
    absent = [name for name in wanted if getattr(rollout, name) is None]
    return absent if len(rollout) else ["episodes"]


_REPLAYED = ("rewards", "returns", "advantages")


def reproduces(rollout: Rollout, objective: Objective) -> tuple[bool, str]:
    "Whether the objective gives the stored numbers, and a sentence that says so."
    if why := why_not(rollout, objective):
        return False, why
    again, off = what_if(rollout, objective), dict[str, float]()
    for name in _REPLAYED:  # the largest difference; infinite where an entry is not a number
        gaps = tensor_of(again, name).float() - tensor_of(rollout, name).float()
        off[name] = max(gaps.abs().nan_to_num(math.inf, math.inf).flatten().tolist(), default=0.0)
    alpha = objective.lam_length_alpha
    lam = f"lam {objective.lam:g}" if alpha is None else f"lam_length_alpha {alpha:g}"
    settings = f"kl_coef {objective.kl_coef:.3g}, {objective.kl_estimator}, gamma "
    settings += f"{objective.gamma:g}, {lam}, EOS penalty {objective.missing_eos_penalty or 0:g}"
    chosen = " (chosen by you)" if objective_of(rollout) is None else ""
    worst = max(off.values())
    if not worst:
        exactly = "all stored rewards, returns and advantages come out exactly"
        return True, f"With {settings}{chosen}, {exactly}."
    if worst < 1e-4:
        return True, f"With {settings}{chosen}, what is stored comes out within {worst:.0e}."
    lost = ", ".join(name for name in _REPLAYED if off[name] >= 1e-4)
    why = "other settings made" if chosen else "several processes, or code of its own, made what"
    return False, f"With {settings}{chosen}, the stored {lost} do not come out: {why} it holds."


def page_recipe(objective: Objective) -> dict[str, Any]:
    "What a page computes with; a setting that is not there has no effect, and no control."
    recipe = {"kl_coef": objective.kl_coef} if objective.kl_in == "reward" else {}
    lam = "lam" if objective.lam_length_alpha is None else "lam_length_alpha"
    others = f"kl_estimator gamma {lam} lam_value whiten_rewards cliprange cliprange_high".split()
    recipe |= {name: getattr(objective, name) for name in others}
    if not objective.non_eos_penalty:
        recipe["missing_eos_penalty"] = objective.missing_eos_penalty or 0.0
    return recipe
