"Rungs on the rewards: what the judges say of good, bad and odd answers, and what is paid."

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_nb.diagnose import by_hand
from rlhf_nb.diagnose.checks import Found, Rung, not_here
from rlhf_nb.diagnose.rungs_logprobs import close
from rlhf_nb.diagnose.subject import Observed, Subject


def apart(a: Tensor, b: Tensor) -> float:
    "The largest difference, in units of the larger of 1 and the numbers themselves."
    a, b = a.double().cpu(), b.double().cpu()
    gaps = (a - b).abs() / b.abs().clamp(min=1.0)
    return gaps.max().item() if gaps.isfinite().all() else math.inf


def rows_apart(theirs: Tensor, ours: Sequence[Sequence[float]]) -> float:
    "The same of rows without their padding, whose rest must be 0."
    rows = [apart(theirs[i, : len(row)], torch.tensor(row)) for i, row in enumerate(ours) if row]
    rest = [theirs[i, len(row) :].abs().sum().item() for i, row in enumerate(ours)]
    return max(*rows, *rest)


def judges(subject: Subject) -> Found:
    "Scores of the rollout, of its rows one by one, in another order, and by the plain models."
    r, trainer = subject.start.scored, subject.trainer
    some = r.select(list(range(min(len(r), 16))))
    order = list(range(len(some)))[::-1]
    with torch.no_grad():
        batch = trainer.judges(some, trainer.forward)
        turned = trainer.judges(some.select(order), trainer.forward)
        alone = [trainer.judges(some.select([i]), trainer.forward) for i in order[::-1]]
    gaps = {}
    for name, scores in batch.items():
        one = torch.cat([x[name] for x in alone])
        gaps[name] = max(apart(turned[name].flip(0), scores), apart(one, scores))
        hand = subject.start.hand.scores.get(name)
        if hand is not None:
            gaps[name] = max(gaps[name], apart(scores, hand[: len(scores)]))
    limit = close(subject)
    found = ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
    found = f"{found} apart at most over batch, order and padding (allowed {limit:g})"
    if trainer.judges.tokenizer is None and subject.start.hand.scores:
        found += ", and from the plain model's head at the last token"
    return Found(max(gaps.values()) <= limit, found)


def raw_by_hand(seen: Observed, subject: Subject) -> Tensor | None:
    "The weighted sum of the judges' scores; None for an ensemble."
    if subject.trainer.judges.ensemble is not None:
        return None
    r, given = seen.scored, subject.trainer.judges
    with torch.no_grad():
        scores = given(r, subject.trainer.forward)
    return torch.stack([given.weights[name] * x.double() for name, x in scores.items()]).sum(0)


def scores(subject: Subject) -> Found:
    "The score of each response by hand: weights, normalisation, clip, EOS penalty."
    seen, args = subject.start, subject.args
    raw, r = raw_by_hand(seen, subject), seen.scored
    gap = 0.0 if raw is None else apart(r.raw_scores, raw)
    pairs = list(zip(r.raw_scores.tolist(), r.stopped.tolist()))
    ours = [by_hand.final_score(x, ended, args, *seen.moments) for x, ended in pairs]
    gap = max(gap, apart(r.scores, torch.tensor(ours)))
    limit = close(subject)
    found = f"{gap:.1e} apart at most (allowed {limit:g})"
    cut = 1 - r.stopped.float().mean().item()
    if args.missing_eos_penalty is not None or args.non_eos_penalty:
        found += f"; {cut:.0%} are charged for a missing stop token, which reverses "
        found += f"{reversed_pairs(r.raw_scores, r.scores):.0%} of the pairs of responses"
    return Found(gap <= limit, found)


def reversed_pairs(raw: Tensor, final: Tensor) -> float:
    "The share of pairs whose order the penalty changed."
    before, after = (x[:, None] - x[None] for x in (raw, final))
    decided = before != 0
    changed = (before.sign() != after.sign()) & decided
    return (changed.sum() / decided.sum().clamp(min=1)).item()


def spread(subject: Subject) -> Found:
    "How much the score differs between responses to one prompt, and between prompts."
    rows, k = subject.rows(8), max(4, subject.args.num_generations)
    again = [copy.deepcopy(row) for row in rows for _ in range(k)]
    groups = subject.score(again, subject.drawn(rows, k)).double().reshape(-1, k)
    within, between = groups.std(1).mean().item(), groups.mean(1).std().item()
    found = f"{within:.3g} between {k} responses to a prompt, {between:.3g} between "
    found += f"{len(rows)} prompts; mean {groups.mean().item():.3g}"
    return Found(within > 0 and math.isfinite(within), found)


# ---- Good and bad answers ----


def worse(text: str, how: str) -> str:
    "A bad version of a reference."
    if how == "empty":
        return ""
    if how == "repeated":
        return " ".join([text] * 3)
    words = text.split()
    random.Random(0).shuffle(words)
    return " ".join(words)


def compared(good: Tensor, bad: Tensor) -> tuple[int, int]:
    "How often the good answer wins, and loses."
    return int((good > bad).sum()), int((good < bad).sum())


def given_pairs(subject: Subject) -> Found:
    "The user's own good and bad answers."
    pairs = subject.pairs or []
    rows = [{k: x for k, x in pair.items() if k not in ("chosen", "rejected")} for pair in pairs]
    good, bad = (subject.score(rows, [x[name] for x in pairs]) for name in ("chosen", "rejected"))
    won, lost = compared(good, bad)
    found = f"{won} of {len(pairs)} pairs the right way round, {lost} the wrong way; mean "
    return Found(won > lost, f"{found}{good.mean():+.2f} against {bad.mean():+.2f}")


def pairs(subject: Subject) -> Found:
    "Good against bad answers: the user's, or references against spoilt ones."
    if subject.pairs:
        return given_pairs(subject)
    if not subject.answers:
        return not_here("no --preflight_pairs, and no reference answers in the data set")
    rows, texts = map(list, zip(*subject.answers))
    good, models, counts = subject.score(rows, texts), subject.trainer.judges.models, {}
    for how in ("empty", "shuffled", "repeated"):
        bad = subject.score(rows, [worse(text, how) for text in texts])
        counts[how] = compared(good, bad)
    parts = [f"{how} {won} won, {lost} lost" for how, (won, lost) in counts.items()]
    found = f"{len(texts)} references against spoilt ones: {'; '.join(parts)}"
    if not any(map(sum, counts.values())):
        return not_here(f"{found}: all have the same score, give --preflight_pairs")
    judged = [how for how in counts if how != "repeated" or models]
    faults = [how for how in judged if counts[how][0] < counts[how][1]]
    if faults:
        return Found(False, f"{found}. Preferred: {', '.join(faults)}")
    won, lost = counts["shuffled"]
    as_good = not sum(counts["empty"]) and won > lost  # words count, and having none is no worse
    return Found(not as_good, found + ". Empty answers earn what references earn" * as_good)


def edges(subject: Subject) -> Found:
    "What an empty, a cut, and a very long answer get."
    r, rows = subject.start.scored, subject.rows(8)
    texts = [r.responses[i % len(r)] or "a" for i in range(len(rows))]
    if subject.answers:
        rows, texts = map(list, zip(*subject.answers[:8]))
    cases = dict(
        empty=([""] * len(rows), True),
        whole=(texts, True),
        cut=([text[: len(text) // 2] for text in texts], False),
        long=([" ".join([text] * 8)[: 8 * subject.args.response_length] for text in texts], False),
    )
    found = {name: subject.score(rows, *case) for name, case in cases.items()}
    shown = ", ".join(f"{name} {x.mean():+.2f}" for name, x in found.items())
    finite = all(bool(x.isfinite().all()) for x in found.values())
    return Found(finite, f"mean score: {shown}; sampled {r.raw_scores.mean():+.2f}")


# ---- What is paid ----


def paid(subject: Subject) -> Found:
    "The reward of each token by hand, and whether its KL is still what it was."
    gaps, touched = [], False
    for seen in (subject.start, subject.moved):
        gaps.append(rows_apart(seen.rollout.rewards, targets(seen, subject).rewards))
        touched |= not torch.equal(seen.sampled.kl, seen.rollout.kl)
    limit = close(subject)
    found = f"{max(gaps):.1e} apart at most (allowed {limit:g})"
    found += "; the KL was changed in place" if touched else ""
    return Found(max(gaps) <= limit and not touched, found)


def targets(seen: Observed, subject: Subject) -> by_hand.Targets:
    "Rewards, advantages and returns of an observed rollout, by hand."
    r, args, rows = seen.sampled, seen.args, range(len(seen.sampled))
    values: Any = None if seen.hand.values is None else [x.tolist() for x in seen.hand.values]
    return by_hand.targets_of(
        [seen.hand.kl(i, args.kl_estimator) for i in rows],
        seen.scored.scores.tolist(),
        values,
        r.stopped.tolist(),
        args,
        seen.kl_coef,
    )


RUNGS = (
    Rung(
        "rewards: judges",
        judges,
        "a response has the same score alone, in any order and padding, and it is what the plain "
        "reward model's head says after the last token (2009.01325; rounding as of the log-probs)",
        "padding side and pad token of the reward model, dropout in it, the token that its score "
        "is read at, a reward function that looks at its neighbours or draws random numbers",
    ),
    Rung(
        "rewards: scores",
        scores,
        "weighted sum of the judges, normalised, clipped, less missing_eos_penalty where a "
        "response was cut off (2403.17031)",
        "reward_weights, normalize_scores, score_clip, missing_eos_penalty and its sign",
        needs=("rewards: judges", "data: episodes"),
    ),
    Rung(
        "rewards: pairs",
        pairs,
        "the good answer wins more often than it loses; a reference is not beaten by an empty "
        "answer, by its own words shuffled, nor (for a reward model) by itself three times over: "
        "chance is one half; where shuffled words are worse, an empty answer is no match for it",
        "the reward function's comparison, the column it compares with, the labels of the reward "
        "model's pairs",
        needs=("rewards: judges",),
    ),
    Rung(
        "rewards: odd answers",
        edges,
        "a finite number for an empty, a cut and a very long answer: the policy will write all of "
        "them (definition)",
        "divisions by the length of an answer, an answer that is cut to max_length",
    ),
    Rung(
        "rewards: spread",
        spread,
        "above 0 between responses to one prompt: without a difference nothing is preferred, and "
        "advantages are noise (definition of the advantage)",
        "temperature, response_length, a reward that depends on the prompt alone or is nearly "
        "always the same",
    ),
    Rung(
        "rewards: per token",
        paid,
        "-kl_coef times the KL on every token, and the score on the last one (1909.08593, eq. 2)",
        "the signs of score and KL, the token that is paid, tensors changed in place, whitening",
        needs=("log-probs: KL by hand", "rewards: scores"),
    ),
)
