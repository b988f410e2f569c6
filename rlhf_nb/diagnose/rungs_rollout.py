"Rungs on a rollout: the data that it reads, its log-probs, its rewards, and its values."

from __future__ import annotations

import copy
import math
import random
import statistics
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from rlhf_nb.base.encoding import plain_ids, prompt_text, template_settings
from rlhf_nb.diagnose import by_hand
from rlhf_nb.diagnose.checks import Finding, Ladder, not_here
from rlhf_nb.diagnose.subject import (
    RARE,
    Observed,
    Subject,
    by_chance,
    close,
    compare_by_hand,
    farthest,
    relative_gap,
    row_gap,
)
from rlhf_nb.packing import on_tokens, score_sums
from rlhf_nb.rollout import Rollout
from rlhf_nb.sft import encode_rows
from rlhf_nb.ui.episodes import end_of

RUNGS = Ladder()


# ---- Data ----


def prompt_fault(tokenizer: Any, row: dict[str, Any], ids: list[int]) -> str:
    "What is wrong with the ids of a row's prompt; empty: nothing."
    text = prompt_text(row["prompt"], tokenizer, **template_settings(row))
    wanted = plain_ids([text], tokenizer)[0]
    front = ids[: len(ids) - len(wanted)]
    if not wanted or ids[-len(wanted) :] != wanted:
        return "does not end with the ids of its own text"
    if any(i not in tokenizer.all_special_ids for i in front):
        return f"has {len(front)} ids in front of its text that are no special tokens"
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        return "begins with BOS twice"
    return ""


@RUNGS.rung(
    "data: prompts",
    "the chat template, BOS in the texts, the side on which prompts are cut or padded",
)
def prompts(subject: Subject) -> Finding:
    """the ids of a prompt are those of its text, rendered once, BOS at most once, padding on the
    left: the policy goes on from the last id (definition)"""
    rows, tokenizer = subject.rows(32), subject.tokenizer
    batch = subject.trainer.data_collator(rows)
    ids, mask = batch["prompt_ids"], batch["prompt_mask"].bool()
    kept = [i[m].tolist() for i, m in zip(ids, mask)]
    shown = "\n".join(f"{k + 1}: {end_of(tokenizer.decode(kept[k]))}" for k in range(len(kept))[:3])
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        return Finding(False, f"padding to the right of a prompt\n{shown}")
    if "prompt" not in rows[0]:
        return Finding(True, f"ids as they are in the data set\n{shown}")
    faults = [prompt_fault(tokenizer, row, x) for row, x in zip(rows, kept)]
    bad = [k for k, fault in enumerate(faults) if fault]
    if bad:
        text = tokenizer.decode(kept[bad[0]])
        head = f"{len(bad)} of {len(rows)}: prompt {bad[0] + 1} {faults[bad[0]]}: {end_of(text)}"
        return Finding(False, f"{head}\n{shown}")
    return Finding(True, shown)


@RUNGS.rung(
    "data: lengths",
    "response_length, max_prompt_length, and the unit: tokens of this tokenizer",
)
def lengths(subject: Subject) -> Finding:
    """at most half of the references are longer than response_length, or the median answer is cut
    off (prompts beyond a model's positions are refused by the trainer)"""
    args, tokenizer = subject.args, subject.tokenizer
    batch = subject.trainer.data_collator(subject.rows(512))
    tokens = sorted(batch["prompt_mask"].sum(1).tolist())
    text = f"prompts {tokens[0]} to {tokens[-1]} tokens, median {statistics.median(tokens):g}"
    text += f", with the response at most {tokens[-1] + args.response_length}"
    cut = 0.0
    if subject.answers:
        answers = [answer for _, answer in subject.answers]
        sizes = [len(x) + 1 for x in plain_ids(answers, tokenizer)]
        cut = sum(n > args.response_length for n in sizes) / len(sizes)
        text += f"; {cut:.0%} of {len(sizes)} references are longer than response_length"
    return Finding(cut <= 0.5, text)


@RUNGS.rung(
    "data: episodes",
    "stop_token, stop_token_id, the mask of the response, the pad token",
)
def episodes(subject: Subject) -> Finding:
    """the first stop token ends a response and counts, nothing behind it does (2403.17031;
    definition)"""
    r, sampling = subject.start.sampled, subject.trainer.sampling_settings
    if sampling.stop_strings is not None:
        return not_here("stop_strings end a response within a token's text")
    wrong = 0
    for i, (ids, mask) in enumerate(zip(r.response_ids.tolist(), r.mask.tolist())):
        ends = [t + 1 for t, token in enumerate(ids[: sum(mask)]) if token in sampling.stop_ids]
        n = ends[0] if ends else sampling.response_length
        right = mask == [t < n for t in range(len(mask))] and bool(r.stopped[i]) == bool(ends)
        wrong += not right or any(token != sampling.pad_id for token in ids[n:])
    text = f"{len(r) - wrong} of {len(r)} responses end at their first stop token, or at "
    text += f"{sampling.response_length} tokens, with nothing but padding behind"
    return Finding(not wrong, text)


@RUNGS.rung(
    "data: stop token",
    "whether SFT trained on the stop token (labels of -100 where pad is eos), stop_token, "
    "response_length",
)
def stop_token(subject: Subject) -> Finding:
    """at least one response of the whole run ends by itself, else the EOS penalty is a constant
    (2403.17031, 'EOS trick'); a token has a hundredth of its uniform probability, else
    training has suppressed it; the references keep it as a label"""
    start, sampling = subject.start, subject.trainer.sampling_settings
    share = start.sampled.stopped.float().mean().item()
    text = f"{share:.0%} of {len(start.sampled)} samples reached it"
    if sampling.stop_strings is not None:  # how likely they are is unknown
        return Finding(True, text) if share else not_here(f"{text}, which may be chance")
    rows = [x.all_logprobs[:, list(sampling.stop_ids)].exp().sum(1) for x in start.hand.policy]
    chance = torch.cat(rows).mean().item()
    uniform = len(sampling.stop_ids) / start.hand.policy[0].all_logprobs.shape[1]
    ended = sum(1 - (1 - p.clamp(max=1)).prod().item() for p in rows) / len(rows)
    of_run = ended * max(subject.args.total_episodes or 0, subject.args.batch_size)
    text += f"; probability {chance:.2g} a token (uniform {uniform:.2g}), about {of_run:,.1f}"
    text += " responses of the whole run"
    unlabelled = without_stop_label(subject)
    if unlabelled:
        text += f"; {unlabelled} references lose it in the labels of supervised fine-tuning"
    return Finding(of_run >= 1 and chance >= uniform / 100 and not unlabelled, text)


def without_stop_label(subject: Subject) -> int:
    "References whose stop token carries no label when `SFTTrainer` encodes them."
    known = [(row.get("prompt"), text) for row, text in subject.answers]
    pairs = [dict(prompt=x, completion=text) for x, text in known if isinstance(x, str)]
    eos = subject.tokenizer.eos_token_id
    if not pairs or eos is None:
        return 0
    labels = encode_rows(Dataset.from_list(pairs), subject.tokenizer)["labels"][:]
    return sum(row[-1] != eos for row in labels)


# ---- Log-probs ----

POWERS = 0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0, 4.0  # 1 / temperature: what else may have sampled


@RUNGS.rung(
    "log-probs: sampling",
    "temperature of the sampler and of the log-probs; repetition_penalty, top_k or another "
    "leftover of the model's generation config; the mode of the policy while it samples",
    needs=("data: episodes",),
)
def sampling(subject: Subject) -> Finding:
    """sampled tokens have the mean surprise that the scoring distribution predicts, its entropy: no
    other temperature explains them 7,000 times better (a likelihood ratio, whose mean is 1 where
    all is right, so that one run in 7,000 at most exceeds that by chance: Markov's inequality)"""
    hand = subject.start.hand.policy
    excess = sum((-x.logprobs - x.entropy).sum().item() for x in hand)
    error = math.sqrt(sum(x.surprise_var.sum().item() for x in hand))
    tokens = sum(len(x.logprobs) for x in hand)
    if error == 0:
        return not_here("every token has probability 1")
    better = torch.tensor([sum(gain_of(x, power) for x in hand) for power in POWERS])
    odds = better.logsumexp(0).item() - math.log(len(POWERS))
    text = f"{excess / tokens:+.3f} nats a token over the entropy, {excess / error:+.1f} standard "
    text += f"errors, {tokens} tokens; at best temperature x {1 / POWERS[int(better.argmax())]:.3g}"
    return Finding(odds < -math.log(RARE), f"{text} is e^{better.max():.1f} times as likely")


def gain_of(x: by_hand.Reading, power: float) -> float:
    "How many nats likelier a response is where every probability is raised to a power."
    scale = (power * x.all_logprobs.double()).logsumexp(1).sum().item()
    return (power - 1) * x.logprobs.double().sum().item() - scale


@RUNGS.rung(
    "log-probs: policy",
    "temperature, position ids and attention mask of padded rows, an offset by one",
    needs=("data: episodes",),
)
def policy(subject: Subject) -> Finding:
    """log-probs of the rollout are those of the plain model on each row alone, at the sampling
    temperature, up to rounding: 1e-3 nats in float32 (measured: 1e-5), 0.1 in bf16"""
    by_model = lambda x: farthest(x.sampled.logprobs, [y.logprobs for y in x.hand.policy])
    return compare_by_hand(subject, by_model, " nats")


@RUNGS.rung(
    "log-probs: reference",
    "dropout in the reference, its temperature, its adapter, which model it is",
    needs=("data: episodes",),
)
def reference(subject: Subject) -> Finding:
    "the same of the reference in eval mode (1909.08593, section 2.2)"
    by_model = lambda x: farthest(x.sampled.ref_logprobs, [y.logprobs for y in x.hand.reference])
    return compare_by_hand(subject, by_model, " nats")


@RUNGS.rung(
    "log-probs: reference frozen",
    "how ref_model was made: copy.deepcopy(policy).eval().requires_grad_(False)",
)
def reference_weights(subject: Subject) -> Finding:
    """the reference stays what it is: no weight in common with the policy, none that learns, eval
    mode (definition)"""
    trainer = subject.trainer
    if trainer.ref_model is None:
        return not_here("the reference is the policy without its adapter")
    parts = [*trainer.ref_model.parameters()]
    learned = {p.data_ptr() for p in trainer.pair.parameters() if p.requires_grad}
    shared = sum(p.data_ptr() in learned for p in parts)
    learns = sum(p.requires_grad for p in parts)
    dropping = any(part.training for part in trainer.ref_model.modules())
    mode = "train" if dropping else "eval"
    text = f"{shared} weight tensors shared with what is trained, {learns} that learn, in {mode}"
    return Finding(not shared and not learns and not dropping, f"{text} mode")


@RUNGS.rung(
    "log-probs: KL by hand",
    "which of the two is subtracted, the estimator, the mask",
    needs=("log-probs: policy", "log-probs: reference"),
)
def kl(subject: Subject) -> Finding:
    "kl_estimator on each token's log-probs, policy over reference (joschu.net/blog/kl-approx.html)"
    estimator = subject.args.kl_estimator
    by_formula = lambda x: [torch.tensor(x.hand.kl(i, estimator)) for i in range(len(x.sampled))]
    return compare_by_hand(subject, lambda x: farthest(x.sampled.kl, by_formula(x)), " nats")


@RUNGS.rung(
    "log-probs: ratio",
    "dropout in the policy, precision or padding that differ between rollout and update, a "
    "learning rate that is not the configured one",
    needs=("log-probs: policy",),
)
def ratio(subject: Subject) -> Finding:
    """exactly 1 on every token before a step, dropout included, so approxkl below 1e-8 in float32
    and 1e-5 in bf16 (1707.06347, eq. 6: the ratio is against what sampled)"""
    metrics, changed = subject.start.metrics, subject.start.changed
    away, spread = abs(metrics["val/ratio"] - 1), metrics["val/ratio_var"]
    approxkl = metrics["policy/approxkl_avg"]
    limit = 1e-8 if subject.trainer.layout.in_float32(subject.trainer.model) else 1e-5
    text = f"mean ratio {away:.1e} from 1, variance {spread:.1e}, approxkl {approxkl:.1e}, "
    text += f"clipfrac {metrics['policy/clipfrac_avg']:g}; {changed} weights changed"
    good = approxkl <= limit and spread <= 100 * limit and not changed
    return Finding(good and away <= 1e-2 * (limit / 1e-8) ** 0.25, text)


# ---- Rewards ----


@RUNGS.rung(
    "rewards: judges",
    "padding side and pad token of the reward model, dropout in it, the token that its score is "
    "read at, a reward function that looks at its neighbours or draws random numbers",
)
def judges(subject: Subject) -> Finding:
    """a response has the same score alone, in any order and padding, and it is what the plain
    reward model's head says after the last token (2009.01325; rounding as of the log-probs)"""
    trainer, hand, limit = subject.trainer, subject.start.hand.scores, close(subject)
    r = subject.start.scored.select(list(range(min(len(subject.start.scored), 16))))
    order = list(range(len(r)))
    with torch.no_grad():
        batch = judge_scores(subject, r)
        turned = judge_scores(subject, r.select(order[::-1]))
        alone = [judge_scores(subject, r.select([i])) for i in order]
    gaps = {}
    for name, scores in batch.items():
        others = [turned[name].flip(0), torch.cat([x[name] for x in alone])]
        gaps[name] = max(relative_gap(x, scores) for x in others)
        if name in hand:
            gaps[name] = max(gaps[name], relative_gap(score_sums(scores), hand[name][: len(r)]))
    text = ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
    text = f"{text} apart at most over batch, order and padding (allowed {limit:g})"
    if trainer.judges.tokenizer is None and hand:
        text += ", and from the plain model's head at the last token"
    if left := [name for name in trainer.judges.members if name not in hand]:
        of = "texts" if trainer.judges.tokenizer is not None else f"{trainer.judges.level}s"
        text += f"; not run as a plain model: {', '.join(left)}, whose scores are of {of}"
    return Finding(max(gaps.values()) <= limit, text)


def judge_scores(subject: Subject, r: Rollout) -> dict[str, Tensor]:  # [B, T] by judge
    "Scores of tokens, 0 where there is none; that of a response is on its last token."
    trainer = subject.trainer
    columns = {k: x for k, x in r.columns.items() if not k.startswith("score/")}  # of a judge
    scores = trainer.judges(r.with_(columns=columns), trainer.forward, subject.tokenizer)
    return {name: on_tokens(x, r.mask).nan_to_num(0.0) for name, x in scores.items()}


def score_rows(scores: Tensor, r: Rollout) -> list[list[float]]:
    "The score of each response, or those of its tokens."
    if scores.dim() == 1:
        return scores[:, None].tolist()
    return [row[real].tolist() for row, real in zip(scores, r.mask.bool())]


def raw_by_hand(observed: Observed, subject: Subject) -> Tensor | None:  # [B, T]
    "The weighted sum of the judges' scores; None for an ensemble."
    judges = subject.trainer.judges
    if judges.ensemble is not None:
        return None
    with torch.no_grad():
        scores = judge_scores(subject, observed.scored)
    return torch.stack([judges.weights[name] * x.double() for name, x in scores.items()]).sum(0)


@RUNGS.rung(
    "rewards: scores",
    "reward_weights, normalize_scores, score_clip, missing_eos_penalty and its sign",
    needs=("rewards: judges", "data: episodes"),
)
def scores(subject: Subject) -> Finding:
    """weighted sum of the judges, normalised, clipped, less missing_eos_penalty where a response
    was cut off (2403.17031)"""
    observed, args, limit = subject.start, subject.args, close(subject)
    raw, r = raw_by_hand(observed, subject), observed.scored
    pairs = zip(score_rows(r.raw_scores, r), r.stopped.tolist())
    ours = [by_hand.final_scores(x, ended, args, *observed.moments) for x, ended in pairs]
    gap = row_gap(r.scores if r.scores.dim() == 2 else r.scores[:, None], ours)
    gap = gap if raw is None else max(gap, relative_gap(on_tokens(r.raw_scores, r.mask), raw))
    text = f"{gap:.1e} apart at most (allowed {limit:g})"
    if args.missing_eos_penalty is not None or args.non_eos_penalty:
        text += f"; {1 - r.stopped.float().mean().item():.0%} are charged for a missing stop token"
    return Finding(gap <= limit, text)


def worsen(text: str, kind: str) -> str:
    "A bad version of a reference."
    words = text.split()
    random.Random(0).shuffle(words)
    return dict(empty="", repeated=" ".join([text] * 3), shuffled=" ".join(words))[kind]


def wins(good: Tensor, bad: Tensor) -> tuple[int, int]:
    "How often the good answer wins, and loses."
    return int((good > bad).sum()), int((good < bad).sum())


def user_pairs(subject: Subject) -> Finding:
    "The user's own good and bad answers."
    pairs = subject.pairs or []
    rows = [{k: x for k, x in pair.items() if k not in ("chosen", "rejected")} for pair in pairs]
    good, bad = (subject.score(rows, [x[name] for x in pairs]) for name in ("chosen", "rejected"))
    won, lost = wins(good, bad)
    text = f"{won} of {len(pairs)} pairs the right way round, {lost} the wrong way; mean "
    text += f"{good.mean():+.2f} against {bad.mean():+.2f}"
    if 0 < won <= lost and by_chance(lost, won) > RARE:
        return not_here(f"{text}: so few may be chance, give more pairs")
    return Finding(won > lost, text)


@RUNGS.rung(
    "rewards: pairs",
    "the reward function's comparison, the column it compares with, the labels of the reward "
    "model's pairs",
    needs=("rewards: judges",),
)
def pairs(subject: Subject) -> Finding:
    """the good answer wins more often than it loses; a reference is not beaten by an empty answer
    or by its own words shuffled more often than a fair coin would in one run of 7,000; where
    shuffled words are worse, an empty answer is no match for it. Beaten by itself three times over:
    a note that a reward model may pay for length"""
    if subject.pairs:
        return user_pairs(subject)
    if not subject.answers:
        return not_here("no --preflight_pairs, and no reference answers in the data set")
    rows, answers = map(list, zip(*subject.answers))
    good, models, counts = subject.score(rows, answers), subject.trainer.judges.models, {}
    for kind in ("empty", "shuffled", "repeated"):
        counts[kind] = wins(good, subject.score(rows, [worsen(x, kind) for x in answers]))
    parts = [f"{kind} {won} won, {lost} lost" for kind, (won, lost) in counts.items()]
    text = f"{len(answers)} references against spoilt ones: {'; '.join(parts)}"
    if not any(map(sum, counts.values())):
        return not_here(f"{text}: all have the same score, give --preflight_pairs")
    liked = [kind for kind in counts if by_chance(*counts[kind][::-1]) <= RARE]
    if faults := [kind for kind in liked if kind != "repeated"]:
        return Finding(False, f"{text}. Preferred: {', '.join(faults)}")
    text += ". A note: it may pay for length" * (models != [] and "repeated" in liked)
    won, lost = counts["shuffled"]
    # words count, and having none is no worse
    as_good = not sum(counts["empty"]) and by_chance(won, lost) <= RARE
    return Finding(not as_good, text + ". Empty answers earn what references earn" * as_good)


@RUNGS.rung(
    "rewards: odd answers",
    "divisions by the length of an answer, an answer that is cut to max_length",
)
def edges(subject: Subject) -> Finding:
    """a finite number for an empty, a cut and a very long answer: the policy will write all of them
    (definition)"""
    r, rows = subject.start.scored, subject.rows(8)
    answers = [r.responses[i % len(r)] or "a" for i in range(len(rows))]
    if subject.answers:
        rows, answers = map(list, zip(*subject.answers[:8]))
    longest = 8 * subject.args.response_length
    cases = dict(
        empty=([""] * len(rows), True),
        whole=(answers, True),
        cut=([x[: len(x) // 2] for x in answers], False),
        long=([" ".join([x] * 8)[:longest] for x in answers], False),
    )
    scores = {name: subject.score(rows, *case) for name, case in cases.items()}
    shown = ", ".join(f"{name} {x.mean():+.2f}" for name, x in scores.items())
    finite = all(bool(x.isfinite().all()) for x in scores.values())
    return Finding(finite, f"mean score: {shown}; sampled {score_sums(r.raw_scores).mean():+.2f}")


@RUNGS.rung(
    "rewards: spread",
    "temperature, response_length, a reward that depends on the prompt alone or is nearly always "
    "the same",
)
def spread(subject: Subject) -> Finding:
    """above 0 between responses to one prompt: without a difference nothing is preferred, and
    advantages are noise (definition of the advantage); where some are all the same, eight times as
    many are drawn: a reward that one response in 29 earns is missed in one run of 7,000"""
    rows, k = subject.rows(8), max(4, subject.args.num_generations)
    again = [copy.deepcopy(row) for row in rows for _ in range(k)]
    drawn = lambda n: subject.score(again, subject.sample_texts(rows, k, subject.args.seed + n))
    groups, n = drawn(0).double().reshape(-1, k), 1
    while (groups == groups[:, :1]).all() and (n := n + 1) <= 8:
        groups = torch.cat([groups, drawn(n).double().reshape(-1, k)], 1)
    within, between = groups.std(1).mean().item(), groups.mean(1).std().item()
    text = f"{within:.3g} between {groups.shape[1]} responses to a prompt, {between:.3g} between "
    text += f"{len(rows)} prompts; mean {groups.mean().item():.3g}"
    if not within and subject.answers:
        rows, answers = map(list, zip(*subject.answers))
        if (subject.score(rows, answers) != subject.score(rows, [""] * len(rows))).any():
            return not_here(f"{text}: no sample earns anything else, and references do")
    return Finding(within > 0 and math.isfinite(within), text)


@RUNGS.rung(
    "rewards: per token",
    "the signs of score and KL, the token that is paid, tensors changed in place, whitening",
    needs=("log-probs: KL by hand", "rewards: scores"),
)
def token_rewards(subject: Subject) -> Finding:
    "-kl_coef times the KL on every token, and the score on the last one (1909.08593, eq. 2)"
    by_formula = lambda x: row_gap(x.rollout.rewards, targets(x).rewards)
    passed, text = compare_by_hand(subject, by_formula)
    both = subject.start, subject.off_policy
    if all(torch.equal(x.sampled.kl, x.rollout.kl) for x in both):
        return Finding(passed, text)
    return Finding(False, f"{text}; the KL was changed in place")


def targets(observed: Observed) -> by_hand.Targets:
    "Rewards, advantages and returns of an observed rollout, by hand."
    args, hand, rows = observed.args, observed.hand, range(len(observed.sampled))
    scored, steps = observed.scored, None
    if scored.paid is not None:
        ends = scored.paid | (scored.scores != 0)
        steps = [row.nonzero()[:, 0].tolist() for row in ends]
    values: Any = None if hand.values is None else [x.tolist() for x in hand.values]
    return by_hand.targets_of(
        [hand.kl(i, args.kl_estimator) for i in rows],
        score_rows(scored.scores, scored),
        values,
        observed.sampled.stopped.tolist(),
        args,
        observed.kl_coef,
        steps,
    )


# ---- Value model ----

NO_VALUE = "advantage_estimator has no value model"


def why_unknown(subject: Subject) -> str:
    "Why there is nothing to compare an estimator's numbers with; empty where there is."
    name = subject.args.advantage_estimator
    return "" if name in by_hand.BY_HAND else f"advantage_estimator {name!r} has no copy by hand"


def real_values(observed: Observed) -> list[list[float]]:
    "By hand, on the real tokens."
    lengths = observed.sampled.mask.sum(1).tolist()
    return [x[:n].tolist() for x, n in zip(observed.hand.values or (), lengths)]


@RUNGS.rung(
    "value model: values",
    "an offset by one, positions and mask of padded rows, the head, dropout",
    needs=("data: episodes",),
)
def values(subject: Subject) -> Finding:
    """V of a token is the plain value model's number before that token is read, and 0 on padding
    (1506.02438, section 3; rounding as of the log-probs)"""
    if subject.start.hand.values is None:
        return not_here(NO_VALUE)
    return compare_by_hand(subject, lambda x: row_gap(x.sampled.values, real_values(x)))


@RUNGS.rung(
    "value model: advantages",
    "gamma, lam, what follows the last token, whitening over padding, groups of a prompt",
    needs=("rewards: per token", "value model: values"),
)
def advantages(subject: Subject) -> Finding:
    """the estimator's formula, whitened over real tokens (GAE: 1506.02438, eq. 16; others by their
    papers)"""
    if why := why_unknown(subject):
        return not_here(why)
    by_formula = lambda x: row_gap(x.rollout.advantages, targets(x).advantages or [])
    return compare_by_hand(subject, by_formula, slack=3)


@RUNGS.rung(
    "value model: returns",
    "targets made of whitened advantages, lam_value, bootstrap_truncated",
    needs=("rewards: per token", "value model: values"),
)
def returns(subject: Subject) -> Finding:
    "advantage before whitening, plus value (1506.02438; 2403.17031)"
    if why := NO_VALUE if subject.start.hand.values is None else why_unknown(subject):
        return not_here(why)
    return compare_by_hand(subject, lambda x: row_gap(x.rollout.returns, targets(x).returns or []))
