"Rungs on the log-probs: of sampling, of policy and reference, and the ratio before any step."

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_nb.diagnose.checks import Found, Rung, not_here
from rlhf_nb.diagnose.subject import Subject

SURPRISING = 5.0  # standard errors: one false alarm in about two million


def close(subject: Subject) -> float:
    "Most nats between two ways to compute a log-prob."
    return 1e-3 if subject.trainer.layout.in_float32(subject.trainer.model) else 0.1


def farthest(theirs: Tensor, ours: list[Tensor]) -> float:
    "The largest difference over real tokens."
    gaps = [(row[: len(x)].float() - x.to(row.device)).abs().max() for row, x in zip(theirs, ours)]
    worst = torch.stack(gaps).max().item()
    return worst if math.isfinite(worst) else math.inf


def sampling(subject: Subject) -> Found:
    "Whether sampled tokens are as surprising as the distribution that they are scored by says."
    args, hand = subject.args, subject.start.hand.policy
    if args.top_k or args.top_p < 1:
        return not_here("top_k or top_p truncates the distribution that tokens are drawn from")
    excess = sum((-x.logprobs - x.entropy).sum().item() for x in hand)
    error = math.sqrt(sum(x.surprise_var.sum().item() for x in hand))
    tokens = sum(len(x.logprobs) for x in hand)
    if error == 0:
        return not_here("every token has probability 1")
    found = f"{excess / tokens:+.3f} nats a token over the entropy, {excess / error:+.1f} "
    return Found(abs(excess / error) < SURPRISING, found + f"standard errors, {tokens} tokens")


def policy(subject: Subject) -> Found:
    "Log-probs of the rollout against those of the plain model, a row at a time."
    limit = close(subject)
    gaps = [
        farthest(seen.sampled.logprobs, [x.logprobs for x in seen.hand.policy])
        for seen in (subject.start, subject.moved)
    ]
    return Found(max(gaps) <= limit, f"{max(gaps):.1e} nats apart at most (allowed {limit:g})")


def reference(subject: Subject) -> Found:
    "The same of the reference."
    limit = close(subject)
    gaps = [
        farthest(seen.sampled.ref_logprobs, [x.logprobs for x in seen.hand.reference])
        for seen in (subject.start, subject.moved)
    ]
    return Found(max(gaps) <= limit, f"{max(gaps):.1e} nats apart at most (allowed {limit:g})")


def frozen(subject: Subject) -> Found:
    "That the reference holds weights of its own, which do not learn."
    trainer = subject.trainer
    if trainer.ref_model is None:
        return not_here("the reference is the policy without its adapter, see the KL at the start")
    parts = [*trainer.ref_model.parameters()]
    learned = {p.data_ptr() for p in trainer.pair.parameters() if p.requires_grad}
    shared = sum(p.data_ptr() in learned for p in parts)
    learns = sum(p.requires_grad for p in parts)
    dropping = any(part.training for part in trainer.ref_model.modules())
    mode = "train" if dropping else "eval"
    found = f"{shared} weight tensors shared with what is trained, {learns} that learn, in {mode}"
    return Found(not shared and not learns and not dropping, f"{found} mode")


def same_weights(subject: Subject) -> bool:
    "Whether policy and reference must agree: the reference is a copy, or an adapter is still 0."
    trainer = subject.trainer
    if trainer.ref_model is not None:
        theirs, ours = trainer.ref_model.state_dict(), trainer.policy.state_dict()
        same = theirs.keys() == ours.keys()
        return same and all(torch.equal(x.cpu(), ours[k].cpu()) for k, x in theirs.items())
    if subject.args.ref_adapter_name is not None:
        return False
    ends = [x for name, x in trainer.policy.named_parameters() if "lora_B" in name]
    return bool(ends) and not any(x.any() for x in ends)


def start(subject: Subject) -> Found:
    "The KL before any step."
    seen = subject.start
    gaps = (seen.sampled.logprobs - seen.sampled.ref_logprobs)[seen.sampled.mask]
    found = f"objective/kl {seen.metrics['objective/kl']:+.2e}, log-probs at most "
    found += f"{gaps.abs().max().item():.1e} apart"
    if not same_weights(subject):
        return not_here(f"policy and reference have different weights ({found})")
    limit = close(subject) / 10
    return Found(gaps.abs().max().item() <= limit, f"{found} (allowed {limit:g})")


def kl(subject: Subject) -> Found:
    "The KL of each token by hand, where the policy was moved away from the reference."
    limit = close(subject)
    gaps = []
    for seen in (subject.start, subject.moved):
        rows = range(len(seen.sampled))
        ours = [torch.tensor(seen.hand.kl(i, subject.args.kl_estimator)) for i in rows]
        gaps.append(farthest(seen.sampled.kl, ours))
    mean = subject.moved.metrics["objective/kl"]
    found = (
        f"{max(gaps):.1e} nats apart at most (allowed {limit:g}); {mean:.2f} nats a response "
        "where the policy was changed a little"
    )
    return Found(max(gaps) <= limit, found)


def ratio(subject: Subject) -> Found:
    "Every ratio of an update with learning rate 0, and the weights after it."
    seen = subject.start
    name = "val/ratio"
    away, spread = abs(seen.metrics[name] - 1), seen.metrics["val/ratio_var"]
    approxkl = seen.metrics["policy/approxkl_avg"]
    exact = subject.trainer.layout.in_float32(subject.trainer.model)
    limit = 1e-8 if exact else 1e-5
    found = f"mean ratio {away:.1e} from 1, variance {spread:.1e}, approxkl {approxkl:.1e}, "
    found += f"clipfrac {seen.metrics['policy/clipfrac_avg']:g}; {seen.changed} weights changed"
    good = approxkl <= limit and spread <= 100 * limit and not seen.changed
    return Found(good and away <= 1e-2 * (limit / 1e-8) ** 0.25, found)


RUNGS = (
    Rung(
        "log-probs: sampling",
        sampling,
        "sampled tokens have the mean surprise that the scoring distribution predicts, its "
        "entropy, within 5 standard errors (law of large numbers; one false alarm in two million)",
        "temperature of the sampler and of the log-probs; repetition_penalty, top_k or another "
        "leftover of the model's generation config; the mode of the policy while it samples",
        needs=("data: episodes",),
    ),
    Rung(
        "log-probs: policy",
        policy,
        "log-probs of the rollout are those of the plain model on each row alone, at the sampling "
        "temperature, up to rounding: 1e-3 nats in float32 (measured: 1e-5), 0.1 in bf16",
        "temperature, position ids and attention mask of padded rows, an offset by one",
        needs=("data: episodes",),
    ),
    Rung(
        "log-probs: reference",
        reference,
        "the same of the reference in eval mode (1909.08593, section 2.2)",
        "dropout in the reference, its temperature, its adapter, which model it is",
        needs=("data: episodes",),
    ),
    Rung(
        "log-probs: reference frozen",
        frozen,
        "the reference stays what it is: no weight in common with the policy, none that learns, "
        "eval mode (definition)",
        "how ref_model was made: copy.deepcopy(policy).eval().requires_grad_(False)",
    ),
    Rung(
        "log-probs: KL at the start",
        start,
        "0 where policy and reference have the same weights (definition)",
        "dropout, precision or adapter of the two; a reference from another checkpoint",
        needs=("log-probs: policy", "log-probs: reference"),
    ),
    Rung(
        "log-probs: KL by hand",
        kl,
        "kl_estimator on each token's log-probs, policy over reference "
        "(joschu.net/blog/kl-approx.html)",
        "which of the two is subtracted, the estimator, the mask",
        needs=("log-probs: policy", "log-probs: reference"),
    ),
    Rung(
        "log-probs: ratio",
        ratio,
        "exactly 1 on every token before a step, dropout included, so approxkl below 1e-8 in "
        "float32 and 1e-5 in bf16 (1707.06347, eq. 6: the ratio is against what sampled)",
        "dropout in the policy, precision or padding that differ between rollout and update, a "
        "learning rate that is not the configured one",
        needs=("log-probs: policy",),
    ),
)
