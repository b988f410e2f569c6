"Rungs on the update: loss and gradient by hand, learning, the next updates, what is kept of a run."

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, get_scheduler

from rlhf_nb.base.custom import linear_head
from rlhf_nb.diagnose import by_hand
from rlhf_nb.diagnose.checks import Finding, Ladder, not_here
from rlhf_nb.diagnose.subject import (
    LOOKED_AT,
    Observed,
    Subject,
    Tensors,
    changes,
    close,
    count_changes,
    episode_sums,
    weights_of,
)
from rlhf_nb.forward import PolicyAndValue
from rlhf_nb.packing import score_sums
from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.training.optimizers import inner_optimizer

RUNGS = Ladder()
EPISODES = 128  # that a trivial reward is learned from, about
UPDATES = 4, 16  # at least, at most
FEWEST = 32  # episodes: of fewer, chance decides what is learned (16 of 1 each: 3 of 8 seeds)
LEAD = 4  # tries that fail, more than those that do not
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


def loss_by_hand(observed: Observed) -> dict[str, float]:
    "Every logged mean of the losses, from readings of the models at a learning rate of 0."
    r, args, hand = observed.trained_on, observed.args, observed.hand
    sums, tokens = Counter[str](), 0
    for step in observed.steps:
        rows = step.rows.tolist()
        among = r.mask[rows].sum(1).tolist()
        tokens += sum(among)
        for i in rows:
            values = None if hand.values is None else hand.values[i]
            of_episode = episode_sums(r, i, hand.policy[i], values, args, among)
            sums.update({name: x.item() for name, x in of_episode._asdict().items()})
    names = dict(policy="loss/policy_avg", value="loss/value_avg", entropy="policy/entropy_avg")
    names |= dict(ratio="val/ratio", clipped="policy/clipfrac_avg", approxkl="policy/approxkl_avg")
    names |= dict(kl="loss/kl_avg") if args.kl_in == "loss" else {}
    return {name: sums[key] / tokens for key, name in names.items()}


def worst_of(ours: dict[str, float], theirs: dict[str, float]) -> tuple[float, str]:
    "The largest relative difference, and of which metric."
    gap = lambda name: abs(theirs[name] - ours[name]) / max(1.0, abs(ours[name]))
    known = {name: gap(name) for name in ours if name in theirs}
    missing = [name for name in ours if name not in theirs and ours[name] != 0]
    if missing:
        return math.inf, missing[0]
    name = max(known, key=lambda k: known[k] if math.isfinite(known[k]) else math.inf)
    return known[name], name


@RUNGS.rung(
    "learning: loss",
    "which log-probs the ratio is against, signs, masks, what the sum is divided by",
    needs=("log-probs: policy", "value model: returns", "value model: advantages"),
)
def loss(subject: Subject) -> Finding:
    """the clipped losses of 1707.06347 (eq. 7 and 9) and 2403.17031 (values) on every episode,
    where old log-probs and values were shifted so that some ratios are clipped; num_ppo_epochs x
    num_mini_batches steps, and every episode once in each epoch"""
    update, limit = subject.off_policy, close(subject)
    ours, uneven = loss_by_hand(update), uneven_epochs(update)
    gap, name = worst_of(ours, update.metrics)
    steps = update.args.num_ppo_epochs * update.args.num_mini_batches
    text = f"{gap:.1e} apart at most, in {name} (allowed {limit:g}); "
    text += f"{len(update.steps)} of {steps} steps; "
    text += ", ".join(f"{k.split('/')[1]} {x:.3g}" for k, x in ours.items())
    text += f"; {uneven} epochs do not have every episode once" if uneven else ""
    return Finding(gap <= limit and len(update.steps) == steps and not uneven, text)


def uneven_epochs(observed: Observed) -> int:
    "How many epochs leave an episode out, or train on one twice."
    rows, parts = [step.rows.tolist() for step in observed.steps], observed.args.num_mini_batches
    epochs = [chain(*rows[i : i + parts]) for i in range(0, len(rows), parts)]
    return sum(sorted(epoch) != [*range(len(observed.trained_on))] for epoch in epochs)


@RUNGS.rung(
    "learning: gradient",
    "the division by micro-batches instead of tokens, zero_grad, vf_coef, a detached part",
    needs=("learning: loss",),
)
def gradient(subject: Subject) -> Finding:
    """that of the mini-batch's loss per token, however it is cut into micro-batches, and nothing
    left of the step before (definition; rounding as of the log-probs)"""
    update, limit = subject.off_policy, 5 * close(subject)
    if update.args.fp16:
        return not_here("fp16 scales its gradients")
    steps = [step for step in update.steps if not math.isnan(step.gap)]
    gap = max(step.gap for step in steps)
    parts = update.args.gradient_accumulation_steps
    text = f"{gap:.1e} of its norm away at most (allowed {limit:g}), over {len(steps)} steps of "
    text += f"{parts // update.args.num_mini_batches} micro-batches; "
    first = steps[0]
    text += f"norm {first.norm:.3g}, by hand {first.norm_by_hand:.3g}"
    return Finding(gap <= limit, text)


@RUNGS.rung(
    "learning: metrics",
    "padding that is counted, kl_coef after the controller moved it, signs",
    needs=("log-probs: policy", "log-probs: KL by hand"),
)
def metrics(subject: Subject) -> Finding:
    "means over episodes, of real tokens alone (definition)"
    limit, worst = close(subject), (0.0, "objective/kl")
    for observed in (subject.start, subject.off_policy):
        worst = max(worst, worst_of(logged_by_hand(observed, subject), observed.metrics))
    return Finding(worst[0] <= limit, f"{worst[0]:.1e} apart at most, in {worst[1]} ({limit:g})")


def logged_by_hand(observed: Observed, subject: Subject) -> dict[str, float]:
    "Means over episodes, of real tokens alone."
    r, rows = observed.trained_on, range(len(observed.trained_on))
    lengths = [int(n) for n in r.mask.sum(1)]
    mean = lambda numbers: sum(numbers) / len(rows)
    kl = mean([sum(observed.hand.kl(i, observed.args.kl_estimator)) for i in rows])
    score = mean(score_sums(r.scores).tolist())
    price = by_hand.price_in_rewards(observed.kl_coef, observed.args)
    return {
        "objective/kl": kl,
        "objective/entropy": mean([-r.logprobs[i, : lengths[i]].sum().item() for i in rows]),
        "objective/non_score_reward": -price * kl,
        "objective/rlhf_reward": score - price * kl,
        "objective/scores": score,
        "objective/raw_scores": mean(score_sums(r.raw_scores).tolist()),
        "objective/kl_coef": observed.kl_coef,
        "val/num_eos_tokens": float(sum(r.stopped.tolist())),
        "tokens/response_length": mean(lengths),
    }


# ---- One real step ----


@RUNGS.rung(
    "learning: optimizer",
    "learning_rate, value_learning_rate, the parameter groups of an optimizer of your own",
)
def groups(subject: Subject) -> Finding:
    """every weight that learns is in the optimizer, at the configured learning rate of its model
    (definition)"""
    trainer, args = subject.beside(), subject.args
    trainer.prepare()
    rates = {id(p): g["lr"] for g in trainer.optimizer.param_groups for p in g["params"]}
    own = args.value_learning_rate
    wanted = dict(policy=args.learning_rate, value=args.learning_rate if own is None else own)
    parts, right = [], True
    for name, rate in wanted.items():
        model = getattr(trainer.pair, name)
        learn = [] if model is None else [p for p in model.parameters() if p.requires_grad]
        given = [rates.get(id(p)) for p in learn]
        right &= all(x is not None and math.isclose(x, rate) for x in given)
        listed = Counter("none" if x is None else f"{x:g}" for x in given)
        parts += [f"{name} {n} tensors at {x}" for x, n in listed.items()]
    if trainer.args.lr_scheduler_type != "constant" or subject.trainer.optimizer is not None:
        return not_here(f"the optimizer is the user's own ({', '.join(parts)})")
    configured = f"configured {wanted['policy']:g}, {wanted['value']:g}"
    return Finding(right, f"{', '.join(parts)}; {configured}")


def moved_shares(pair: PolicyAndValue, moved: Tensors, had: Tensors) -> dict[str, float]:
    "Share of the weights with a gradient that moved, in policy and value model."
    shares = {}
    for part, model in dict(policy=pair.policy, value=pair.value).items():
        names = [k for k in had if k.startswith(f"{part}.")]
        if names or model is not None:
            count = sum(int(had[k].sum()) for k in names)
            shares[part] = sum(int((moved[k] & had[k]).sum()) for k in names) / max(1, count)
    return shares


def find_misplaced(pair: PolicyAndValue, moved: Tensors, had: Tensors) -> list[str]:
    "What learns and has no gradient, and what moved and does not learn, in words."
    weights = dict(pair.named_parameters())
    left = [k for k, p in weights.items() if p.requires_grad and k not in had]
    strayed = [k for k, p in weights.items() if not p.requires_grad and moved[k].any()]
    pairs = (left, "tensors learn and had no gradient"), (strayed, "frozen tensors moved")
    odd = [f"{len(names)} {what}, such as {names[0]}" for names, what in pairs if names]
    value = pair.value
    if value is not None and not any(p.requires_grad for p in scorer_parameters(value)):
        odd.append("the value model's head does not learn")
    return odd


def scorer_parameters(value: Any) -> list[Any]:
    "Those of a value model's head; of another module, all of them."
    head = linear_head(value)
    return [*(value if head is None else head).parameters()] or [*value.parameters()]


def one_update(subject: Subject) -> tuple[dict[str, float], list[float], list[str]]:
    "Shares of weights that moved; each gradient's norm; what moved that should not, or could not."
    trainer: Any = subject.beside(**subject.sizes(LOOKED_AT))
    trainer.prepare()
    pair, reference, step = trainer.pair, trainer.ref_model, trainer.optimizer_step
    before, kept = weights_of(pair), weights_of(reference)
    had, norms = Tensors(), list[float]()

    def record(model: Any) -> float:
        for name, p in pair.named_parameters():
            if p.grad is not None:
                had[name] = had.get(name, False) | (p.grad.detach().cpu() != 0)
        norms.append(step(model))
        return norms[-1]

    trainer.optimizer_step = record
    trainer.step(subject.batch(trainer.args.batch_size))
    moved, away = changes(before, pair), changes(kept, reference)
    odd = find_misplaced(pair, moved, had)
    odd += ["the reference moved"] if any(x.any() for x in away.values()) else []
    return moved_shares(pair, moved, had), norms, odd


@RUNGS.rung(
    "learning: weights move",
    "weights in bfloat16 with a small learning rate: keep them in float32 and set bf16; a model "
    "that is missing in the optimizer; an adapter whose weights no forward pass reads",
)
def move(subject: Subject) -> Finding:
    """at least half of the weights that have a gradient are other numbers after one update: in
    bfloat16 a step below 1/512 of a weight is rounded away (8 bits of precision); all that learns
    has a gradient, the head of the value model too; the reference and all that is frozen stay"""
    shares, norms, odd = one_update(subject)
    limit = subject.args.max_grad_norm
    text = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    text += " of the weights with a gradient moved; "
    text += f"gradient norms {norms[0]:.3g} to {norms[-1]:.3g}"
    text += f", clipped at {limit:g}" if limit > 0 else ", not clipped"
    text = "; ".join([text, *odd])
    return Finding(min(shares.values()) >= 0.5 and not odd, text)


# ---- A reward that anything learns ----


def wanted_token(subject: Subject) -> int | None:
    "The commonest token that some responses lack, and that does not end one."
    r, stops = subject.start.sampled, subject.trainer.sampling_settings.stop_ids
    counted = Counter(r.response_ids[r.mask].tolist()).most_common()
    everywhere = lambda i: ((r.response_ids == i) & r.mask).any(1).all()
    return next((i for i, _ in counted if i not in stops and not everywhere(i)), None)


def share_of(token: int) -> Callable[..., list[float]]:
    "A reward: the share of a response's tokens that are this one."

    def share(
        prompts: list[str], responses: list[str], response_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        return [10.0 * ids.count(token) / max(1, len(ids)) for ids in response_ids]

    return share


def probability(trainer: PPOTrainer, rows: list[tuple[Tensor, Tensor]], token: int) -> float:
    "A token's probability, a mean over the places of some responses."
    with torch.no_grad(), trainer.accelerator.autocast():
        read = [by_hand.forward_row(trainer.policy, *row, trainer.args.temperature) for row in rows]
    return torch.cat([x.all_logprobs[:, token] for x in read]).double().exp().mean().item()


@RUNGS.rung(
    "learning: trivial reward",
    "learning_rate, the sign of the loss or of advantages, max_grad_norm, the number of episodes "
    "in an update",
    needs=("learning: weights move",),
)
def trivial(subject: Subject) -> Finding:
    """more of a token whose share is the reward, after some updates at the configured learning
    rate: the policy gradient theorem (Sutton et al. 1999), on a reward that needs no insight; where
    it is less, other samples are drawn: four tries more than not must fail (by chance in one run of
    7,000, if one try in ten does)"""
    if (token := wanted_token(subject)) is None:
        return not_here("no token of the responses is left out by some of them")
    lead = 0  # tries in which it is more, less those in which it isn't
    for tried in count(1):
        found = learns(subject, token, subject.args.seed + tried - 1)
        lead += 1 if found.passed else -1
        if found.passed is None or lead in (1, -LEAD):
            break
    return Finding(found.passed, f"{found.measured}; try {tried}" if tried > 1 else found.measured)


def learns(subject: Subject, token: int, seed: int) -> Finding:
    "Whether the token is likelier after some updates with these samples."
    spelled = subject.tokenizer.decode([token])
    size = subject.args.batch_size if subject.args.batch_size <= 64 else 64
    trainer: Any = subject.beside(share_of(token), seed=seed, **PLAIN, **subject.sizes(size))
    updates = min(UPDATES[1], max(UPDATES[0], math.ceil(EPISODES / trainer.args.batch_size)))
    if updates * trainer.args.batch_size < FEWEST:
        return not_here(f"{updates} updates of {trainer.args.batch_size} are too few episodes")
    rows = by_hand.rows_of(subject.start.sampled)[:LOOKED_AT]
    before = probability(trainer, rows, token)
    scores = [trainer.step()["objective/scores"] for _ in range(updates)]
    after = probability(trainer, rows, token)
    text = f"probability of {spelled!r} {before:.4g} to {after:.4g} ({after / before - 1:+.2%}) in "
    text += f"{updates} updates of {trainer.args.batch_size}; its share in responses "
    text += f"{scores[0] / 10:.1%} to {scores[-1] / 10:.1%}"
    return Finding(after > before, text)


# ---- From one update to the next ----

SCHEDULED = 3  # updates, the last one with SMALL as its target_kl, where the run has one
EPOCHS = 3  # of each, at most
SMALL = 1e-12  # nats, below what a step moves the policy by
CLIP = 1e-2  # max_grad_norm at most, or most gradients are too short to be clipped
CERTAIN = 20.0  # nats of all samples: below, two draws may be the same by chance


@dataclass
class UpdateTrace:
    "What a few updates did."

    trainer: PPOTrainer
    rows: list[list[list[int]]] = field(default_factory=list)  # of each step of each update
    kls: list[list[float]] = field(default_factory=list)  # approxkl, likewise
    rates: list[list[list[float]]] = field(default_factory=list)  # of each group, likewise
    norms: list[float] = field(default_factory=list)  # of the gradients that are stepped with
    coefs: list[tuple[float, float]] = field(default_factory=list)  # kl_coef after, and by hand
    changed: list[int] = field(default_factory=list)  # weights of the policy, by each update


def copy_of(subject: Subject) -> PPOTrainer:
    "A trainer with the run's own schedules and small updates."
    own = subject.args
    trainer = subject.beside(
        max_steps=max(1, own.num_total_batches),
        lr_scheduler_type=own.lr_scheduler_type,
        warmup_steps=own.warmup_steps,
        value_warmup_updates=min(own.value_warmup_updates, SCHEDULED - 1),
        num_ppo_epochs=min(own.num_ppo_epochs, EPOCHS),
        max_grad_norm=min(own.max_grad_norm, CLIP),
        **subject.sizes(LOOKED_AT),
    )
    trainer.prepare()
    return trainer


def updates(trainer: PPOTrainer, batch: Any, target_kl: float | None) -> UpdateTrace:
    "A few updates, all on one batch."
    run, args = UpdateTrace(trainer), trainer.args
    note_steps(run)
    for k in range(SCHEDULED):
        args.target_kl = target_kl if k == SCHEDULED - 1 else None
        for steps in (run.rows, run.kls, run.rates):
            cast(list, steps).append([])
        before, coef = weights_of(trainer.policy), trainer.controller.value
        kl = trainer.step(batch)["objective/kl"]
        by_formula = by_hand.kl_coef_after(coef, kl, args.batch_size, args)
        run.coefs.append((trainer.controller.value, by_formula))
        run.changed.append(count_changes(before, trainer.policy))
    return run


def note_steps(run: UpdateTrace) -> None:
    "Each optimizer step of the trainer is written down from now on."
    trainer: Any = run.trainer
    gradients = trainer.gradients

    def record(model: Any, r: Rollout, rows: Tensor) -> dict[str, float]:
        sums = gradients(model, r, rows)
        run.rows[-1].append(rows.tolist())
        run.kls[-1].append(sums["approxkl"] / sums["tokens"])
        return sums

    def before(optimizer: Any, *_: Any) -> None:
        groups = optimizer.param_groups
        run.rates[-1].append([float(group["lr"] or 0.0) for group in groups])
        grads = [p.grad for g in groups for p in g["params"] if p.grad is not None]
        run.norms.append(math.sqrt(sum(x.double().square().sum().item() for x in grads)))

    trainer.gradients = record
    inner_optimizer(trainer.optimizer).register_step_pre_hook(before)


# ---- What is looked at; None: it does not apply ----


def samples(trainer: PPOTrainer, batch: Any) -> Finding | None:
    "Two rollouts of one policy on the same prompts."
    first = trainer.rollout(batch)
    if -first.logprobs[first.mask].sum() < CERTAIN:
        return None
    same = torch.equal(first.response_ids, trainer.rollout(batch).response_ids)
    return Finding(not same, "the same samples in two rollouts" if same else "new samples")


def rates(run: UpdateTrace) -> Finding | None:
    "The learning rate of every step, against the schedule that transformers makes."
    trainer, args = run.trainer, run.trainer.args
    inner, n = inner_optimizer(trainer.optimizer), args.num_total_batches
    bases = [float(group["initial_lr"] or 0.0) for group in inner.param_groups]
    if type(trainer).create_scheduler is not PPOTrainer.create_scheduler or not all(bases):
        return None  # a schedule of the user's own, or an optimizer that finds its rate itself
    groups = [dict(params=[torch.zeros(1)], lr=base) for base in bases]
    other = torch.optim.SGD(groups, lr=inner.defaults.get("lr") or bases[0])
    planned = args.get_warmup_steps(n), n, cast(Any, args.lr_scheduler_kwargs)
    plan, right = get_scheduler(args.lr_scheduler_type, other, *planned), True
    for steps in run.rates:
        due = [group["lr"] for group in other.param_groups]
        right &= all(math.isclose(a, b, rel_tol=1e-6) for step in steps for a, b in zip(step, due))
        other.step()
        plan.step()
    shown = ", ".join(f"{step[0]:.6g}" for steps in run.rates for step in steps[-1:])
    return Finding(right, f"learning rates {shown}" + ", and scheduled are others" * (not right))


def orders(run: UpdateTrace) -> Finding | None:
    "Every epoch of the updates has an order of its own."
    args = run.trainer.args
    if args.num_mini_batches == 1 or args.batch_size < 8:
        return None
    starts = range(0, args.num_mini_batches * args.num_ppo_epochs, args.num_mini_batches)
    epochs = [str(u[i : i + args.num_mini_batches]) for u in run.rows for i in starts if u[i:]]
    different = len({*epochs})
    return Finding(different == len(epochs), f"{different} orders in {len(epochs)} epochs")


def settings(run: UpdateTrace) -> list[Finding]:
    "Whether kl_controller, max_grad_norm, value_warmup_updates and target_kl do what they say."
    args, first = run.trainer.args, run.changed[: run.trainer.args.value_warmup_updates]
    own, ours = (", ".join(f"{pair[i]:.4g}" for pair in run.coefs) for i in (0, 1))
    right = all(math.isclose(*pair, rel_tol=1e-6) for pair in run.coefs)
    findings = [Finding(right, f"kl_coef {own}, by hand {ours}")]
    limit, longest = args.max_grad_norm, max(run.norms, default=0.0)
    if limit > 0 and not args.fp16:
        text = f"gradients of norm {longest:.3g} at most, clipped at {limit:.3g}"
        findings.append(Finding(longest <= 1.02 * limit, text))
    if first and run.trainer.pair.value is not None:
        text = f"{max(first)} weights of the policy changed in the value warm-up"
        findings.append(Finding(not any(first), text))
    if args.target_kl is not None:
        late = sum(kl > args.target_kl for kl in run.kls[-1][:-1])
        findings.append(Finding(not late, f"{late} steps after one above target_kl"))
    return findings


@RUNGS.rung(
    "learning: schedule",
    "where the scheduler is stepped, seeds that do not depend on the update, the sign of the "
    "controller's error, settings that are read nowhere",
)
def schedule(subject: Subject) -> Finding:
    """over 3 updates with the run's own schedules: one step of lr_scheduler_type an update,
    gradients no longer than max_grad_norm, another order of rows in each epoch and other samples in
    each rollout, kl_coef by its formula (1909.08593, section 2.2), a policy that stays in
    value_warmup_updates and no step after target_kl (definition)"""
    trainer = copy_of(subject)
    batch = subject.batch(trainer.args.batch_size)
    drawn = samples(trainer, batch)
    run = updates(trainer, batch, None if subject.args.target_kl is None else SMALL)
    looks = [x for x in (rates(run), orders(run), drawn, *settings(run)) if x is not None]
    wrong = [x.measured for x in looks if not x.passed]
    text = "; ".join(wrong or [x.measured for x in looks])
    return Finding(not wrong, f"wrong: {text}" if wrong else text)


# ---- What is kept ----

GREEDY = 16  # tokens


def base_of_adapter(policy: Any) -> str | None:
    "Where an adapter's base model can be loaded from; None: nowhere."
    name = policy.get_base_model().name_or_path
    return name if name and (Path(name).exists() or "/" in name) else None


@RUNGS.rung(
    "state: resume",
    "what the checkpoint holds: value model, optimizer, random states, controller, running "
    "moments, position in the data; a reward function that draws random numbers",
)
def resume(subject: Subject) -> Finding:
    """one update, a checkpoint, and one more update are bit for bit two updates (definition; on a
    GPU, kernels that are not deterministic may differ)"""
    trainer, folder = subject.short_run
    again = subject.beside(**subject.two_updates)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    pairs = zip(trainer.pair.named_parameters(), again.pair.named_parameters())
    other = [name for (name, a), (_, b) in pairs if not torch.equal(a, b)]
    logs = [log_of(x) for x in (trainer, again)]
    unlike = [k for k, x in logs[0].items() if logs[1].get(k) != x]
    size = sum(1 for _ in trainer.pair.parameters())
    text = f"{size - len(other)} of {size} weight tensors and {len(logs[0]) - len(unlike)} of "
    text += f"{len(logs[0])} metrics are bit for bit the same"
    odd = (other + unlike)[:3]
    return Finding(not other and not unlike, text + (f"; not {', '.join(odd)}" if odd else ""))


def log_of(trainer: PPOTrainer) -> dict[str, float]:
    "The last update's metrics, without its times."
    last = [log for log in trainer.state.log_history if "objective/kl" in log][-1]
    timed = ("time/", "tokens/per_second", "eps")
    return {k: x for k, x in last.items() if not k.startswith(timed)}


@torch.no_grad()
def greedy(policy: Any, prompts: list[list[int]]) -> list[list[int]]:
    "The likeliest next tokens after each prompt, a row at a time and without a cache."
    responses = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(GREEDY):
            logits = policy(input_ids=torch.tensor([ids], device=policy.device)).logits
            ids.append(int(logits[0, -1].argmax()))
        responses.append(ids[len(prompt) :])
    return responses


@RUNGS.rung(
    "state: reload",
    "tied weights, an adapter's base, a dtype or config that is not saved, resized embeddings",
    needs=("state: resume",),
)
def text_after_reload(subject: Subject) -> Finding:
    "a saved policy writes the same greedy text once it is loaded again (definition)"
    trainer = subject.short_run[0]
    policy, folder = trainer.policy, str(subject.folder / "saved")
    adapter = hasattr(policy, "peft_config") and not subject.args.save_merged
    if adapter and base_of_adapter(policy) is None:
        return not_here("the adapter's base model was made in memory: it cannot be loaded")
    trainer.save_model(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    positions = max(1, subject.positions - GREEDY)
    prompts = [p.tolist()[-positions:] for p, _ in by_hand.rows_of(subject.start.sampled)[:2]]
    ours, theirs = (greedy(x.eval(), prompts) for x in (policy, loaded.to(trainer.args.device)))
    same, text = sum(a == b for a, b in zip(ours, theirs)), subject.tokenizer.decode(theirs[0])
    return Finding(same == len(ours), f"{same} of {len(ours)} texts are the same: {text!r}")
