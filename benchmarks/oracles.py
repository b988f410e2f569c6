"""Our functions against those of other libraries, on random rollouts in float64.

    pip install --no-deps verl==0.9.1 openrlhf==0.11.2 trl==1.12.0 cleanrl==0.4.8
    python benchmarks/oracles.py            the largest gap of each pair, and where they differ
    python benchmarks/oracles.py --write    the same into results/oracles.json, for the test

Nothing of theirs is imported, so that nothing else need be installed: functions, and the lines of
interest where they are part of a longer one, are cut out of the installed files by `ast` and run.
The same numbers are read with three masks: `full` rows, rows with `padding`, and rows with `holes`,
tokens that an environment wrote. What does not agree is shown by `differences`; see page 67.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import json
import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any, get_args

import common
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf_nb import estimators, losses
from rlhf_nb.gae import gae, returns_from
from rlhf_nb.kl import estimate_kl
from rlhf_nb.logprobs import token_entropy
from rlhf_nb.masks import whiten
from rlhf_nb.shaping import shape_rewards
from rlhf_nb.turns import check_paid_on, pick_chosen, put_back

NEEDED = {"verl": "0.9.1", "openrlhf": "0.11.2", "trl": "1.12.0", "cleanrl": "0.4.8"}
ROWS, WIDTH, SIZE, WORDS = 6, 5, 3, 4
GAMMA, LAM, COEF, CLIP, HIGH, DUAL, CAP = 0.9, 0.8, 0.1, 0.2, 0.28, 3.0, 1.2
STORED = common.HERE / "results/oracles.json"
OF_TOKENS = ["old", "ref", "engine", "new", "values", "new_values", "advantages", "returns"]
MASKS = {  # 1: a token that the policy drew
    "full": ["11111"] * 6,
    "padding": ["11111", "11100", "10000", "11110", "11000", "11111"],
    "holes": ["11011", "10010", "10000", "11001", "01110", "10101"],
}


# ---- Rollouts ----


def draw(seed: int = 0) -> dict[str, Tensor]:
    "Numbers with ten binary digits after the point, which float32 can hold too."
    dice = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple] = dict.fromkeys(OF_TOKENS, (ROWS, WIDTH))
    shapes |= dict(scores=(ROWS,), boot=(ROWS,), logits=(ROWS, WIDTH, WORDS))
    made = {k: torch.randn(s, generator=dice, dtype=torch.float64) for k, s in shapes.items()}
    for name in ("ref", "engine", "new"):  # near the policy that sampled
        made[name] = made["old"] + 0.5 * made[name]
    made["new"][0, :2] = made["old"][0, :2] + torch.tensor([2.0, -2.0])  # beyond every clip
    made["advantages"][0, :2] = torch.tensor([-1.5, -0.75])
    return {k: (x * 1024).round() / 1024 for k, x in made.items()}


def rollout(drawn: dict[str, Tensor], which: str) -> Space:
    "With its mask, and the rewards with and without KL on their tokens."
    mask = torch.tensor([[c == "1" for c in row] for row in MASKS[which]])
    x = Space(**drawn, mask=mask, real=mask.double())
    x.rewards, x.paid = (put_back(y, mask) for y in (beside(x).rewards, beside(x).paid))
    return x


def beside(x: Space) -> Space:
    "The chosen tokens of each row side by side, as the algorithm sees them."
    picked = {name: pick_chosen(getattr(x, name), x.mask) for name in [*OF_TOKENS, "mask"]}
    y = Space(**picked, scores=x.scores, boot=x.boot)
    y.logits = torch.stack([pick_chosen(part, x.mask) for part in x.logits.unbind(-1)], -1)
    kl = estimate_kl(y.old, y.ref, "k1")
    y.rewards, y.paid = (shape_rewards(x.scores, kl, y.mask, coef)[0] for coef in (COEF, 0.0))
    return y


# ---- Ours ----


def policy_by(how: str = "token_mean", weighing: Any = None, **clip: float) -> Callable:
    "The policy loss of a mini-batch, put together as `ppo_loss` does."

    def loss(x: Space) -> Tensor:
        # reduce: else the weights are float32
        weights = estimators.loss_weights(x.mask, torch.arange(ROWS), how, WIDTH, Tensor.double)
        if weighing:
            weights = weights * losses.importance_weights(x.old, x.engine, x.mask, CAP, weighing)
        loss = losses.policy_loss(x.new, x.old, x.advantages * weights, x.mask, CLIP, **clip)
        return loss / x.mask.sum()

    return loss


def gspo(x: Space) -> Tensor:
    of_row = estimators.sequence_log_ratio(x.new, x.old, x.mask)
    return policy_by("sequence_mean")(Space(**vars(x) | dict(new=of_row, old=0 * x.old)))


def of_kl(name: str) -> Callable:
    return lambda x: estimate_kl(x.old, x.ref, name)


def of_weights(mode: Any) -> Callable:
    return lambda x: losses.importance_weights(x.old, x.engine, x.mask, CAP, mode)


def of_group(f: Callable, **more: float) -> Callable:
    return lambda x: f(x.scores, SIZE, **more)[:, None] * x.mask


OURS: dict[str, Callable[[Space], Tensor]] = {
    "gae": lambda x: gae(x.rewards, x.values, x.mask, GAMMA, LAM),
    "gae, cut off": lambda x: gae(x.rewards, x.values, x.mask, GAMMA, LAM, x.boot),
    "returns": lambda x: returns_from(OURS["gae"](x), x.values, x.mask),
    "whitened": lambda x: whiten(x.advantages, x.mask),
    "rewards": lambda x: x.rewards,
    "rewards to go": lambda x: gae(x.rewards, 0 * x.values, x.mask, GAMMA, 1.0),
    "policy": policy_by(),
    "policy, dual clip": policy_by(cliprange_high=HIGH, dual_clip=DUAL),
    "policy, sequence_mean": policy_by("sequence_mean"),
    "policy, constant": policy_by("constant"),
    "policy, weighted": policy_by(weighing="token_truncate"),
    "policy, masked": policy_by(weighing="token_mask"),
    "gspo": gspo,
    "value": lambda x: (
        losses.value_loss(x.new_values, x.values, x.returns, x.mask, CLIP) / x.mask.sum()
    ),
    "entropy": lambda x: token_entropy(x.logits),
    **{name: of_kl(name) for name in ("k1", "k2", "k3", "abs")},
    **{f"weights, {mode}": of_weights(mode) for mode in get_args(losses.Weighing)},
    "rloo": of_group(estimators.rloo),
    "grpo, 1e-6": of_group(estimators.grpo, eps=1e-6),
    "grpo, 1e-9": of_group(estimators.grpo, eps=1e-9),
    "dr_grpo": of_group(estimators.dr_grpo),
    "reinforce_pp": lambda x: estimators.reinforce_pp(x.rewards, x.mask, GAMMA),
}


def ours(kind: str, x: Space) -> Tensor:
    "The numbers of chosen tokens in order, or one number."
    y = beside(x)
    return flat(OURS[kind](y), y.mask)


def flat(out: Tensor, mask: Tensor) -> Tensor:
    return (out[mask] if out.dim() == 2 else out.reshape(-1)).double()


# ---- Theirs, run out of their files ----


@cache
def read(library: str, file: str) -> tuple[ast.Module, str]:
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None or version(library) != NEEDED[library]:
        wanted = " ".join(f"{name}=={number}" for name, number in NEEDED.items())
        raise SystemExit(f"oracles.py runs code of {library}: pip install --no-deps {wanted}")
    path = Path(found.origin).parent / file
    return ast.parse(path.read_text()), str(path)


def execute(statements: list, path: str, given: dict) -> Space:
    space = dict(torch=torch, np=np, nn=nn, math=math, defaultdict=defaultdict) | given
    lazy = __future__.annotations.compiler_flag
    exec(compile(ast.Module(statements, []), path, "exec", lazy, True), space)
    return Space(**space)


def cut(library: str, file: str, names: str, **given: Any) -> Space:
    "Functions, classes and constants of these names, without their decorators."
    tree, path = read(library, file)
    kept = []
    for node in ast.walk(tree):
        target = vars(node).get("targets", [vars(node).get("target")])[0]
        name = vars(node).get("name") or (target and ast.unparse(target))
        if isinstance(node, ast.stmt) and name in names.split():
            vars(node)["decorator_list"] = []
            kept.append(node)
    return execute(kept, path, given)


def lines(library: str, file: str, first: str, last: str, **given: Any) -> Space:
    "Statements of one block, from the first that begins so to the last that does."
    tree, path = read(library, file)
    for node in ast.walk(tree):
        block = vars(node).get("body")
        texts = [ast.unparse(line) for line in block] if isinstance(block, list) else []
        starts = [i for i, text in enumerate(texts) if text.startswith(first)]
        ends = [i for i, text in enumerate(texts) if text.startswith(last)]
        if starts and ends:
            return execute(block[starts[0] : ends[-1] + 1], path, given)
    raise SystemExit(f"{path} has no lines from {first!r} to {last!r}: is it another version?")


class Settings(Space):
    "A library's configuration."

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def by_verl() -> dict[str, Callable]:
    "What begins with + is for `differences` alone."
    names = "masked_sum masked_mean masked_var masked_whiten clip_by_value entropy_from_logits"
    f = cut("verl", "utils/torch_functional.py", names)
    names = """agg_loss kl_penalty kl_penalty_forward compute_policy_loss_vanilla
    compute_policy_loss_gspo compute_value_loss compute_gae_advantage_return
    compute_rloo_outcome_advantage compute_grpo_outcome_advantage
    compute_reinforce_plus_plus_outcome_advantage"""
    given: dict[str, Any] = dict(verl_F=f, AlgoConfig=int, ActorConfig=Settings)
    v = cut("verl", "trainer/ppo/core_algos.py", names, **given)
    names = """SAFETY_BOUND TOKEN_LEVEL_ROLLOUT_RS_OPTIONS compute_rollout_correction_weights
    _parse_rollout_is_threshold _parse_rollout_rs_thresholds compute_rollout_rejection_mask"""
    logged = dict.fromkeys(["compute_is_metrics", "compute_rs_metrics"], lambda **_: {})
    given = logged | dict(verl_F=f, SUPPORTED_ROLLOUT_RS_OPTIONS={"token_k1"})
    w = cut("verl", "trainer/ppo/rollout_corr_helper.py", names, **given)
    given = dict(core_algos=v, masked_mean=f.masked_mean)
    penalty = cut("verl", "trainer/ppo/ray_trainer.py", "apply_kl_penalty", **given)

    def policy(x: Space, how: str = "token-mean", loss: str = "vanilla", w: Any = None, **clip):
        cfg = dict(clip_ratio=CLIP, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=1e9)
        cfg = Settings(**cfg | dict(global_batch_info={}) | clip)
        run = getattr(v, f"compute_policy_loss_{loss}")
        return run(x.old, x.new, x.advantages, x.real, how, cfg, w)[0]

    def rewards(x: Space) -> Tensor:
        batch = type("Batch", (dict,), dict(batch_size=[ROWS]))(response_mask=x.real)
        batch |= dict(old_log_probs=x.old, ref_log_prob=x.ref, token_level_scores=x.paid)
        control = Space(value=COEF, update=lambda **_: None)
        penalty.apply_kl_penalty(Space(batch=batch), control)
        return batch["token_level_rewards"]

    weigh = lambda x, how, cap: w.compute_rollout_correction_weights(
        x.old - x.engine, x.real, how, cap
    )[0]
    to_go = partial(v.compute_reinforce_plus_plus_outcome_advantage, config=Settings(gamma=GAMMA))
    both = f"1e-9_{CAP}"  # its masks have two bounds
    high = dict(clip_ratio_high=HIGH, clip_ratio_c=DUAL)
    returns = lambda x: v.compute_gae_advantage_return(x.rewards, x.values, x.real, GAMMA, LAM)[1]
    group = lambda x: (x.paid, x.real, np.arange(ROWS) // SIZE)
    kl = lambda how: lambda x: v.kl_penalty(x.old, x.ref, how)
    return {
        "gae": lambda x: returns(x) - x.values,
        "returns": returns,
        "whitened": lambda x: f.masked_whiten(x.advantages, x.real),
        "rewards": rewards,
        "rewards to go": lambda x: to_go(x.rewards, x.real)[1],
        "reinforce_pp": lambda x: to_go(x.rewards, x.real)[0],
        "policy": policy,
        "policy, dual clip": partial(policy, **high),
        "policy, sequence_mean": partial(policy, how="seq-mean-token-mean"),
        "policy, constant": partial(policy, how="seq-mean-token-sum-norm"),
        "policy, weighted": lambda x: policy(x, w=weigh(x, "token", CAP)),
        "policy, masked": lambda x: policy(x, w=weigh(x, "token", both)),
        "gspo": partial(policy, how="seq-mean-token-mean", loss="gspo"),
        "value": lambda x: v.compute_value_loss(x.new_values, x.returns, x.values, x.real, CLIP)[0],
        "entropy": lambda x: f.entropy_from_logits(x.logits),
        **{name: kl(name) for name in ("k1", "k2", "k3", "abs")},
        "weights, token_truncate": lambda x: weigh(x, "token", CAP),
        "weights, token_mask": lambda x: weigh(x, "token", both),
        "weights, sequence_truncate": lambda x: weigh(x, "sequence", CAP),
        "weights, sequence_mask": lambda x: weigh(x, "sequence", both),
        "rloo": lambda x: v.compute_rloo_outcome_advantage(*group(x))[0],
        "grpo, 1e-6": lambda x: v.compute_grpo_outcome_advantage(*group(x))[0],
        "dr_grpo": lambda x: v.compute_grpo_outcome_advantage(*group(x), 0, False)[0],
        "+gae": v.compute_gae_advantage_return,
        "+keep": w.compute_rollout_rejection_mask,
    }


def by_openrlhf() -> dict[str, Callable]:
    names = "masked_mean compute_approx_kl KL_IS_WEIGHT_CLIP compute_reward compute_entropy"
    u = cut("openrlhf", "models/utils.py", names)
    names = "aggregate_loss PolicyLoss ValueLoss"
    loss = cut("openrlhf", "models/loss.py", names, masked_mean=u.masked_mean)
    maker = "trainer/ppo_utils/experience_maker.py"
    m = cut("openrlhf", maker, "get_advantages_and_returns get_cumulative_returns")

    def policy(x: Space, **how: Any) -> Tensor:
        return loss.PolicyLoss(**how)(x.new, x.old, x.advantages, x.real, x.engine)[0]

    def settings(estimator: str) -> Space:
        chosen = Space(advantage=Space(estimator=estimator, no_std_norm=False))
        return Space(algo=chosen, rollout=Space(n_samples_per_prompt=SIZE))

    def group(x: Space, estimator: str) -> Tensor:
        begin = "if args.algo.advantage.estimator == 'rloo'"
        given = dict(args=settings(estimator), rewards=x.scores.reshape(-1, SIZE))
        return lines("openrlhf", maker, begin, begin, **given).rewards.reshape(-1, 1) * x.real

    def whitened(x: Space) -> Tensor:
        begin = "if args.algo.advantage.estimator in ['gae'"
        one = Space(advantages=x.advantages, action_mask=x.real)
        lines("openrlhf", maker, begin, begin, args=settings("gae"), experiences=[one])
        return one.advantages

    advantages = partial(m.get_advantages_and_returns, None)
    both = lambda x: advantages(x.values, x.rewards, x.real, GAMMA, LAM)
    kl = lambda how: lambda x: u.compute_approx_kl(x.old, x.ref, kl_estimator=how)
    weighed = dict(is_correction_level="token", is_correction_threshold=(0.0, CAP))
    return {
        "gae": lambda x: both(x)[0],
        "returns": lambda x: both(x)[1],
        "whitened": whitened,
        "rewards": lambda x: u.compute_reward(x.scores, COEF, x.old - x.ref, x.mask),
        "rewards to go": lambda x: m.get_cumulative_returns(None, x.rewards, x.real, GAMMA),
        "policy": policy,
        "policy, dual clip": partial(policy, clip_eps_high=HIGH, dual_clip=DUAL),
        "policy, sequence_mean": partial(policy, token_level_loss=False),
        "policy, weighted": partial(policy, **weighed, is_correction_mode="clip"),
        "policy, masked": partial(policy, **weighed),
        "gspo": partial(policy, policy_loss_type="gspo"),
        "value": lambda x: loss.ValueLoss(CLIP)(x.new_values, x.values, x.returns, x.real),
        "entropy": lambda x: u.compute_entropy(x.logits),
        **{name: kl(name) for name in ("k1", "k2", "k3")},
        "rloo": partial(group, estimator="rloo"),
        "grpo, 1e-9": partial(group, estimator="group_norm"),
        "dr_grpo": partial(group, estimator="dr_grpo"),
        "+gae": advantages,
    }


def by_trl() -> dict[str, Callable]:
    file = "experimental/ppo/ppo_trainer.py"
    f = cut("trl", file, "masked_mean masked_var masked_whiten")
    parts = vars(f) | dict(INVALID_LOGPROB=1.0, empty_cache=lambda: None)

    def shaped(x: Space, kl: str = "k1", gamma: float = GAMMA, lam: float = LAM) -> Space:
        args = Space(kl_coef=COEF, kl_estimator=kl, gamma=gamma, lam=lam, whiten_rewards=False)
        given = dict(args=args, logprobs=x.old, ref_logprobs=x.ref, values=x.values)
        given |= dict(scores=x.scores, responses=x.old, sequence_lengths=x.mask.sum(1) - 1)
        begins = "response_idxs = ", "advantages = torch.masked_fill"
        return lines("trl", file, *begins, **parts, **given)

    def update(x: Space) -> Space:
        beyond = torch.arange(x.mask.shape[1]) > x.mask.sum(1, keepdim=True)
        given = dict(args=Space(cliprange=CLIP, cliprange_value=CLIP), new_logprobs=x.new)
        given |= dict(micro_batch_inds=slice(None), padding_mask=~x.mask, padding_mask_p1=beyond)
        given |= dict(mb_logprobs=x.old.masked_fill(~x.mask, 1.0), mb_advantage=x.advantages)
        given |= dict(mb_values=x.values, mb_return=x.returns, logits=x.logits, context_length=1)
        given |= dict(vpred_temp=pad(x.new_values, (0, 1))[..., None])
        made = lines("trl", file, "new_logprobs = torch.masked", "pg_loss = ", **parts, **given)
        return lines("trl", file, "pg_clipfrac = ", "approxkl = ", **vars(made))

    return {
        "gae": lambda x: shaped(x).returns - shaped(x).values,
        "returns": lambda x: shaped(x).returns,
        "whitened": lambda x: f.masked_whiten(x.advantages, x.mask),
        "rewards": lambda x: shaped(x).rewards,
        "policy": lambda x: update(x).pg_loss,
        "value": lambda x: update(x).vf_loss,
        "entropy": lambda x: update(x).entropy,
        "k1": lambda x: shaped(x).kl,
        "k3": lambda x: shaped(x, "k3").kl,
        "+shaped": shaped,
        "+update": update,
    }


def by_cleanrl() -> dict[str, Callable]:
    def walked(x: Space, cut_off: bool = False) -> Space:
        "Steps by environments; behind the end of a row another episode begins."
        last = x.mask & ~pad(x.mask, (0, 1))[:, 1:]
        done = (last[:, -1] & (not cut_off)).double()
        args = Space(num_steps=WIDTH, gamma=GAMMA, gae_lambda=LAM)
        given = dict(args=args, rewards=x.rewards.T, values=x.values.T, device="cpu")
        given |= dict(dones=pad(last, (1, 0)).double().T, next_done=done, last_value=x.boot[None])
        begins = "advantages = torch.zeros_like", "returns = advantages + values"
        return lines("cleanrl", "ppo.py", *begins, **given)

    def update(x: Space, norm: bool = False) -> Space:
        b = Space(**{name: getattr(x, name)[x.mask] for name in OF_TOKENS})
        agent = dict(get_action=lambda *_: (0, b.new, b.new), get_value=lambda _: b.new_values)
        args = Space(norm_adv=norm, clip_coef=CLIP, clip_vloss=True, ent_coef=0, vf_coef=0)
        given = dict(agent=Space(**agent), args=args, minibatch_ind=slice(None))
        given |= dict(b_obs=b.old, b_actions=b.old, b_logprobs=b.old, b_values=b.values)
        given |= dict(b_advantages=b.advantages, b_returns=b.returns)
        begins = "mb_advantages = b_advantages", "loss = pg_loss"
        return lines("cleanrl", "ppo.py", *begins, **given)

    return {
        "gae": lambda x: walked(x).advantages.T,
        "gae, cut off": lambda x: walked(x, True).advantages.T,
        "returns": lambda x: walked(x).returns.T,
        "whitened": lambda x: update(x, True).mb_advantages,
        "policy": lambda x: update(x).pg_loss,
        "value": lambda x: update(x).v_loss,
    }


LIBRARIES = dict(verl=by_verl, openrlhf=by_openrlhf, trl=by_trl, cleanrl=by_cleanrl)


# ---- Side by side ----


def compare(made: dict[str, dict[str, Callable]]) -> list[dict]:
    "Each kind that a library has, on each mask that it can read."
    drawn, found = draw(), []
    asked = [
        (library, kind, which) for library in made for kind in made[library] for which in MASKS
    ]
    for library, kind, which in asked:
        no_holes = library in ("trl", "cleanrl") and which == "holes"
        if kind[0] == "+" or no_holes or (kind == "gae, cut off" and which != "full"):
            continue
        x = rollout(drawn, which)
        theirs = flat(made[library][kind](x), x.mask)
        gap = float((theirs - ours(kind, x)).abs().max())
        named = dict(kind=kind, library=library, rows=which)
        found.append(
            named | dict(gap=float(f"{gap:.1e}"), numbers=[float(f"{n:.15g}") for n in theirs])
        )
    return found


def few(mask: str, **fields: list[float]) -> Space:
    "One row, in float64; what is not given is 0, and the score 1."
    own = torch.tensor([[c == "1" for c in mask]])
    zero, one = torch.zeros(1, len(mask)).double(), torch.ones(1).double()
    x = Space(mask=own, real=own.double(), logits=torch.zeros(1, len(mask), 2), scores=one)
    given = {k: torch.tensor([row], dtype=torch.float64) for k, row in fields.items()}
    vars(x).update(dict.fromkeys([*OF_TOKENS, "rewards"], zero) | given)
    return x


def differences(made: dict[str, dict[str, Callable]]) -> dict[str, list]:
    "name -> theirs and ours, on an input of four numbers at most."
    verl, openrlhf, trl = (made[name] for name in ("verl", "openrlhf", "trl"))
    policy = lambda x: losses.policy_loss(x.new, x.old, x.advantages, x.mask) / x.mask.sum()
    moved = lambda x: losses.policy_diagnostics(x.new, x.old, x.advantages, x.mask)["approxkl"]
    beside = lambda x: [pick_chosen(y, x.mask) for y in (x.rewards, x.values, x.mask)]
    score, seen = few("110", rewards=[0, 1, 0]), few("110", new_values=[1, 1, 4], values=[1, 1, 4])
    step, burst = few("1000", new=[0.2, 0, 0, 0]), few("1", new=[800], advantages=[-1])
    turns, lost = few("1001", rewards=[0, 0, 0, 1]), few("110", rewards=[0, 0, 1])
    four, far, rare = few("1111", advantages=[1, 2, 3, 4]), few("1", old=[12]), few("1", ref=[3])
    near = Space(old=torch.tensor([[1e-4]]), ref=torch.zeros(1, 1))
    tied = Space(scores=torch.tensor([0.3, 0.3, 0.3 + 3e-8]), real=torch.ones(3, 1))
    five, bound = few("1", new=[math.log(5)], advantages=[-1]), few("1", old=[math.log(1.5)])
    with suppress(ValueError):
        check_paid_on(lost.rewards, lost.mask, "f")
        raise SystemExit("a reward on an observation was accepted")
    half = (1.0, 0.5)
    keep = losses.importance_weights(bound.old, bound.engine, bound.mask, 1.4, "token_mask") > 0
    pairs: dict[str, tuple] = {
        "trl: score": (
            trl["+shaped"](few("110"), "k1", *half).returns[0, :2],
            gae(*beside(score), *half),
        ),
        "trl: value loss": (trl["value"](seen), OURS["value"](seen)),
        "trl: approxkl": (trl["+update"](step).approxkl, moved(step)),
        "trl: ratio": (trl["policy"](burst), policy(burst)),
        "openrlhf: observations": (
            openrlhf["+gae"](turns.values, turns.rewards, turns.real, *half)[0][turns.mask],
            gae(*beside(turns), *half),
        ),
        "openrlhf: whitening": (openrlhf["whitened"](four), whiten(four.advantages, four.mask)),
        "openrlhf: KL": (openrlhf["k1"](far), OURS["k1"](far)),
        "openrlhf: groups": (openrlhf["grpo, 1e-9"](tied), estimators.grpo(tied.scores, 3)),
        "verl: k3": (verl["k3"](rare), OURS["k3"](rare)),
        "verl: small k3": (verl["k3"](near), OURS["k3"](near)),
        "verl: dual clip": (verl["policy, dual clip"](five), policy(five)),
        "verl: bounds": (verl["+keep"](bound.old, bound.real, "token_k1", "0.6_1.4")[0], keep),
        "verl: reward on an observation": (
            verl["+gae"](lost.rewards, lost.values, lost.real, 1.0, 1.0)[1][0, :2],
            torch.tensor(math.nan),  # refused
        ),
    }
    shown = lambda x: [
        float(f"{n:.7g}") if math.isfinite(n) else str(n) for n in x.double().flatten().tolist()
    ]
    return {name: [shown(a), shown(b)] for name, (a, b) in pairs.items()}


def main() -> None:
    parser = common.described_parser(__doc__ or "")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    made = {name: library() for name, library in LIBRARIES.items()}
    found, apart = compare(made), differences(made)
    for one in sorted(found, key=lambda one: -one["gap"]):
        print("{gap:.1e}  {kind:27} {library:9} {rows}".format(**one))
    for name, pair in apart.items():
        print(f"{name:31} theirs {pair[0]}, ours {pair[1]}")
    if asked.write:
        inputs = {name: x.tolist() for name, x in draw().items()}
        kept = dict(versions=NEEDED, inputs=inputs, results=found, differences=apart)
        STORED.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
        print(f"{STORED}: {STORED.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
