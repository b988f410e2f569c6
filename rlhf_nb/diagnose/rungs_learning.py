"Rungs on the update: its loss and gradient by hand, whether weights move, whether it learns."

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlhf_nb.diagnose import by_hand
from rlhf_nb.diagnose.checks import Found, Rung, not_here
from rlhf_nb.diagnose.rungs_logprobs import close
from rlhf_nb.diagnose.subject import LOOKED_AT, Observed, Subject
from rlhf_nb.trainer import PPOTrainer

EPISODES = 128  # that a trivial reward is learned from, about
UPDATES = 4, 16  # at least, at most
FEWEST = 32  # episodes: of fewer, chance decides what is learned (16 of 1 each: 3 of 8 seeds)
PLAIN: dict[str, Any] = dict(  # a trivial reward and nothing beside it
    missing_eos_penalty=None,
    non_eos_penalty=False,
    normalize_scores=False,
    score_clip=None,
    kl_coef=0.0,
    kl_controller="fixed",
    reward_aggregation="sum",
    reward_weights=None,
)


# ---- One update by hand ----


def loss_by_hand(seen: Observed) -> dict[str, float]:
    "Every logged mean of the losses, from readings of the models at a learning rate of 0."
    r, args, sums, tokens = seen.trained_on, seen.args, Counter[str](), 0
    lengths = [int(n) for n in r.mask.sum(1)]
    for step in seen.steps:
        rows = step.rows.tolist()
        among = [lengths[i] for i in rows]
        tokens += sum(among)
        for i in rows:
            sums.update(of_episode(seen, i, by_hand.weight_of(lengths[i], among, args)))
    names = dict(
        policy="loss/policy_avg",
        value="loss/value_avg",
        entropy="policy/entropy_avg",
        ratio="val/ratio",
        clipped="policy/clipfrac_avg",
        approxkl="policy/approxkl_avg",
    )
    found = {name: sums[key] / tokens for key, name in names.items()}
    if args.kl_in == "loss":
        found["loss/kl_avg"] = sums["kl"] / tokens
    return found


def of_episode(seen: Observed, i: int, weight: float) -> dict[str, float]:
    "What one episode adds."
    r, args, hand = seen.trained_on, seen.args, seen.hand
    n = int(r.mask[i].sum())
    values: tuple[Any, ...] = (None, None, None)
    if hand.values is not None:
        values = (hand.values[i][:n], r.values[i, :n], r.returns[i, :n])
    signals = r.ref_logprobs[i, :n], r.logprobs[i, :n], r.advantages[i, :n]
    sums = by_hand.sums_of(hand.policy[i], *signals, values, args, weight)
    return {name: x.item() for name, x in sums._asdict().items()}


def worst_of(ours: dict[str, float], theirs: dict[str, float]) -> tuple[float, str]:
    "The largest relative difference, and of which metric."
    gap = lambda name: abs(theirs[name] - ours[name]) / max(1.0, abs(ours[name]))
    known = {name: gap(name) for name in ours if name in theirs}
    missing = [name for name in ours if name not in theirs and ours[name] != 0]
    if missing:
        return math.inf, missing[0]
    name = max(known, key=lambda k: known[k] if math.isfinite(known[k]) else math.inf)
    return known[name], name


def loss(subject: Subject) -> Found:
    "The losses of an update whose old log-probs and values were shifted, by hand."
    seen, limit = subject.moved, close(subject)
    ours = loss_by_hand(seen)
    gap, name = worst_of(ours, seen.metrics)
    wanted = seen.args.num_ppo_epochs * seen.args.num_mini_batches
    found = f"{gap:.1e} apart at most, in {name} (allowed {limit:g}); "
    found += f"{len(seen.steps)} of {wanted} steps; "
    found += ", ".join(f"{k.split('/')[1]} {x:.3g}" for k, x in ours.items())
    uneven = uneven_epochs(seen)
    found += f"; {uneven} epochs do not have every episode once" if uneven else ""
    return Found(gap <= limit and len(seen.steps) == wanted and not uneven, found)


def uneven_epochs(seen: Observed) -> int:
    "How many epochs leave an episode out, or train on one twice."
    rows, parts = [step.rows.tolist() for step in seen.steps], seen.args.num_mini_batches
    epochs = [chain(*rows[i : i + parts]) for i in range(0, len(rows), parts)]
    return sum(sorted(epoch) != [*range(len(seen.trained_on))] for epoch in epochs)


def gradient(subject: Subject) -> Found:
    "The first two gradients of an update, against the loss by hand on the whole mini-batch."
    seen, limit = subject.moved, 5 * close(subject)
    if seen.args.fp16:
        return not_here("fp16 scales its gradients")
    steps = [step for step in seen.steps if not math.isnan(step.gap)]
    gap = max(step.gap for step in steps)
    parts = seen.args.gradient_accumulation_steps
    found = f"{gap:.1e} of its norm away at most (allowed {limit:g}), over {len(steps)} steps of "
    found += f"{parts // seen.args.num_mini_batches} micro-batches; norms "
    norms = [f"{k} {x:.3g} by hand {steps[0].norms_by_hand[k]:.3g}" for k, x in norms_of(steps[0])]
    return Found(gap <= limit, found + ", ".join(norms))


def norms_of(step: Any) -> list[tuple[str, float]]:
    "Policy's and value model's."
    return list(step.norms.items())


def metrics(subject: Subject) -> Found:
    "The means that are logged of a rollout, by hand."
    limit, worst = close(subject), (0.0, "objective/kl")
    for seen in (subject.start, subject.moved):
        worst = max(worst, worst_of(logged_by_hand(seen, subject), seen.metrics))
    return Found(worst[0] <= limit, f"{worst[0]:.1e} apart at most, in {worst[1]} ({limit:g})")


def logged_by_hand(seen: Observed, subject: Subject) -> dict[str, float]:
    "Means over episodes, of real tokens alone."
    r, rows = seen.trained_on, range(len(seen.trained_on))
    lengths = [int(n) for n in r.mask.sum(1)]
    mean = lambda numbers: sum(numbers) / len(rows)
    kl = mean([sum(seen.hand.kl(i, seen.args.kl_estimator)) for i in rows])
    score, price = mean(r.scores.tolist()), by_hand.price_in_rewards(seen.kl_coef, seen.args)
    return {
        "objective/kl": kl,
        "objective/entropy": mean([-r.logprobs[i, : lengths[i]].sum().item() for i in rows]),
        "objective/non_score_reward": -price * kl,
        "objective/rlhf_reward": score - price * kl,
        "objective/scores": score,
        "objective/raw_scores": mean(r.raw_scores.tolist()),
        "objective/kl_coef": seen.kl_coef,
        "val/num_eos_tokens": float(sum(r.stopped.tolist())),
        "tokens/response_length": mean(lengths),
    }


# ---- One real step ----


def groups(subject: Subject) -> Found:
    "Which weights the optimizer has, and at which rate."
    trainer, args = subject.beside(), subject.args
    trainer.prepare()
    rates = {id(p): g["lr"] for g in trainer.optimizer.param_groups for p in g["params"]}
    own = args.value_learning_rate
    wanted = dict(policy=args.learning_rate, value=args.learning_rate if own is None else own)
    parts, right = [], True
    for name, rate in wanted.items():
        model = getattr(trainer.pair, name)
        weights = [] if model is None else [p for p in model.parameters() if p.requires_grad]
        there = [rates.get(id(p)) for p in weights]
        right &= all(x is not None and math.isclose(x, rate) for x in there)
        listed = Counter("none" if x is None else f"{x:g}" for x in there)
        parts += [f"{name} {n} tensors at {x}" for x, n in listed.items()]
    if trainer.args.lr_scheduler_type != "constant" or subject.trainer.optimizer is not None:
        return not_here(f"the optimizer is the user's own ({', '.join(parts)})")
    return Found(right, f"{', '.join(parts)}; configured {wanted['policy']:g}, {wanted['value']:g}")


def moved_shares(
    trainer: PPOTrainer, before: dict[str, Tensor], seen: dict[str, Tensor]
) -> dict[str, float]:
    "Of policy and value model, the share of the weights with a gradient that moved."
    shares = {}
    for part in ("policy", "value"):
        pairs = [
            (before[k], p, seen[k])
            for k, p in trainer.pair.named_parameters()
            if k.startswith(f"{part}.") and k in seen
        ]
        had = sum(int(g.sum()) for _, _, g in pairs)
        moved = sum(int(((a != p.detach().cpu()) & g).sum()) for a, p, g in pairs)
        if had or getattr(trainer.pair, part) is not None:
            shares[part] = moved / had if had else 0.0
    return shares


def one_update(subject: Subject) -> tuple[dict[str, float], dict[str, list[float]], float]:
    """Shares of the weights with a gradient that moved; norms of each step, of policy and value;
    and the largest change of the reference."""
    trainer: Any = subject.beside(**subject.sizes(LOOKED_AT))
    trainer.prepare()
    before = {k: p.detach().cpu().clone() for k, p in trainer.pair.named_parameters()}
    had: dict[str, Tensor] = {}
    norms: dict[str, list[float]] = dict(policy=[], value=[])
    step = trainer.optimizer_step

    def noted(model: Any) -> float:
        squares = dict.fromkeys(norms, 0.0)
        for name, p in trainer.pair.named_parameters():
            if p.grad is not None:
                there = p.grad.detach().cpu() != 0
                had[name] = had[name] | there if name in had else there
                squares[name.split(".")[0]] += p.grad.double().square().sum().item()
        for name, square in squares.items():
            norms[name].append(math.sqrt(square))
        return step(model)

    trainer.optimizer_step = noted
    reference = trainer.ref_model
    kept = [] if reference is None else [p.detach().clone() for p in reference.parameters()]
    trainer.step(subject.batch(trainer.args.batch_size))
    away = [(a - b).abs().max().item() for a, b in zip(kept, parameters_of(reference))]
    return moved_shares(trainer, before, had), norms, max(away, default=0.0)


def parameters_of(model: Any) -> list[Tensor]:
    "None where there is no model."
    return [] if model is None else [p.detach() for p in model.parameters()]


def move(subject: Subject) -> Found:
    "The share of weights that one update moves in their precision."
    shares, norms, away = one_update(subject)
    limit = subject.args.max_grad_norm
    found = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    found += " of the weights with a gradient moved; gradient norms "
    found += ", ".join(f"{k} {x[0]:.3g} to {x[-1]:.3g}" for k, x in norms.items() if k in shares)
    found += f", clipped at {limit:g}" if limit > 0 else ", not clipped"
    found += f"; the reference moved by {away:g}" if away else ""
    return Found(min(shares.values()) >= 0.5 and not away, found)


# ---- A reward that anything learns ----


def wanted_token(subject: Subject) -> tuple[int, str] | None:
    """The commonest token with a text of its own that some responses lack. One of two or more
    letters that no other token spells as well, if there is one, as the reward counts the text."""
    r, stops = subject.start.sampled, subject.trainer.sampling_settings.stop_ids
    ids = [i for i, _ in Counter(r.response_ids[r.mask].tolist()).most_common() if i not in stops]
    texts = {i: subject.tokenizer.decode([i]).strip() for i in ids}
    lacked = {i: not ((r.response_ids == i) & r.mask).any(1).all() for i in ids}
    found = [(i, texts[i]) for i in ids if texts[i] and lacked[i]]
    alone = (
        x for x in found if len(x[1]) > 1 and sum(x[1] in text for text in texts.values()) == 1
    )
    return next(alone, found[0] if found else None)


def share_of(text: str) -> Callable[..., list[float]]:
    "A reward: the share of a response's characters that spell this text."

    def share(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        return [10.0 * x.count(text) * len(text) / max(1, len(x)) for x in responses]

    return share


def probability(trainer: PPOTrainer, rows: list[tuple[Tensor, Tensor]], token: int) -> float:
    "Of the token, a mean over the places of some responses."
    with torch.no_grad(), trainer.accelerator.autocast():
        read = [by_hand.read(trainer.policy, *row, trainer.args.temperature) for row in rows]
    return torch.cat([x.all_logprobs[:, token] for x in read]).double().exp().mean().item()


def trivial(subject: Subject) -> Found:
    "A token that is rewarded becomes likelier at the places of the first responses."
    chosen = wanted_token(subject)
    if chosen is None:
        return not_here("no token of the responses is left out by some of them")
    token, text = chosen
    size = subject.args.batch_size if subject.args.batch_size <= 64 else 64
    trainer: Any = subject.beside(share_of(text), **PLAIN, **subject.sizes(size))
    updates = min(UPDATES[1], max(UPDATES[0], math.ceil(EPISODES / trainer.args.batch_size)))
    if updates * trainer.args.batch_size < FEWEST:
        return not_here(f"{updates} updates of {trainer.args.batch_size} are too few episodes")
    rows = by_hand.rows_of(subject.start.sampled)[:LOOKED_AT]
    before = probability(trainer, rows, token)
    scores = [trainer.step()["objective/scores"] for _ in range(updates)]
    after = probability(trainer, rows, token)
    found = f"probability of {text!r} {before:.4g} to {after:.4g} ({after / before - 1:+.2%}) in "
    found += f"{updates} updates of {trainer.args.batch_size}; its share in responses "
    found += f"{scores[0] / 10:.1%} to {scores[-1] / 10:.1%}"
    return Found(after > before, found)


RUNGS = (
    Rung(
        "learning: loss",
        loss,
        "the clipped losses of 1707.06347 (eq. 7 and 9) and 2403.17031 (values) on every episode, "
        "where old log-probs and values were shifted so that some ratios are clipped; "
        "num_ppo_epochs x num_mini_batches steps, and every episode once in each epoch",
        "which log-probs the ratio is against, signs, masks, what the sum is divided by",
        needs=("log-probs: policy", "value model: returns", "value model: advantages"),
    ),
    Rung(
        "learning: gradient",
        gradient,
        "that of the mini-batch's loss per token, however it is cut into micro-batches, and "
        "nothing left of the step before (definition; rounding as of the log-probs)",
        "the division by micro-batches instead of tokens, zero_grad, vf_coef, a detached part",
        needs=("learning: loss",),
    ),
    Rung(
        "learning: metrics",
        metrics,
        "means over episodes, of real tokens alone (definition)",
        "padding that is counted, kl_coef after the controller moved it, signs",
        needs=("log-probs: policy", "log-probs: KL by hand"),
    ),
    Rung(
        "learning: optimizer",
        groups,
        "every weight that learns is in the optimizer, at the configured learning rate of its "
        "model (definition)",
        "learning_rate, value_learning_rate, the parameter groups of an optimizer of your own",
    ),
    Rung(
        "learning: weights move",
        move,
        "at least half of the weights that have a gradient are other numbers after one update: in "
        "bfloat16 a step below 1/512 of a weight is rounded away (8 bits of precision); the "
        "reference stays",
        "weights in bfloat16 with a small learning rate: keep them in float32 and set bf16; a "
        "model that is missing in the optimizer",
    ),
    Rung(
        "learning: trivial reward",
        trivial,
        "more of a token whose share is the reward, within some updates at the configured learning "
        "rate: the policy gradient theorem (Sutton et al. 1999), on a reward that needs no insight",
        "learning_rate, the sign of the loss or of advantages, max_grad_norm, the number of "
        "episodes in an update",
        needs=("learning: weights move",),
    ),
)
