"Right answers to the exercises, each written in an unusual style, by the names of their checkers."

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

F = nn.functional


def mask_in_loops(response_ids, stop_ids, keep=True):
    rows = []
    for row in response_ids.tolist():
        ends = [i for i, token in enumerate(row) if token in stop_ids]
        rows.append([(i <= (ends or [len(row)])[0]) == keep for i in range(len(row))])
    return rows


def logprobs_of_cross_entropy(logits, ids, prompt_width, mask):
    z = logits[:, prompt_width - 1 : -1].masked_fill(~mask[..., None], 0)
    return -F.cross_entropy(z.mT, ids[:, prompt_width:], reduction="none").masked_fill(~mask, 0)


def k3_in_place(logprobs, ref_logprobs, mask):
    x = logprobs.double().clone() - ref_logprobs
    x[~mask] = 0
    return (-x).exp() - 1 + x


def kl_of_every_response(logits, ref_logits, length):
    logits = logits.clone().requires_grad_()
    logp, logq, total = logits.log_softmax(1), ref_logits.log_softmax(1), 0.0
    for words in itertools.product(range(logits.shape[1]), repeat=length):
        before = [0, *(1 + word for word in words[:-1])]
        total = total + (p := logp[before, words].sum()).exp() * (p - logq[before, words].sum())
    return torch.autograd.grad(total, logits)[0]


def gae_of_sums(rewards, values, mask, gamma, lam):
    "Discounted from the first column, added from the last, and divided again."
    r, v = (torch.where(mask, x, 0).double() for x in (rewards, values))
    share = (gamma * lam) ** torch.arange(mask.shape[1])
    return (share * (r + gamma * F.pad(v, (0, 1))[:, 1:] - v)).flip(1).cumsum(1).flip(1) / share


def policy_in_loops(logprobs, old_logprobs, advantages, mask, cliprange):
    total = 0.0
    for b, t in mask.nonzero().tolist():
        ratio, gain = (logprobs[b, t] - old_logprobs[b, t]).exp(), float(advantages[b, t])
        stop = ratio > 1 + cliprange if gain > 0 else ratio < 1 - cliprange
        total = total - gain * (1 + math.copysign(cliprange, gain) if stop else ratio)
    return total


def value_of_a_mapped_token(values, old_values, returns, mask, cliprange_value):
    def error(v, old, target):
        near = old + torch.clip(v - old, -cliprange_value, cliprange_value)
        return torch.stack([v - target, near - target]).square().amax(0) / 2

    return torch.vmap(error)(values[mask], old_values[mask], returns[mask]).sum()


def masks_of_letters(episodes, width, by_turn):
    spell = lambda w, a: "v" + ("c" if by_turn else "v") * (w - 1) + "a" * a
    texts = ["".join(spell(*turn) for turn in turns).ljust(width) for turns in episodes]
    return [[[x in kind for x in text] for text in texts] for kind in ("vca", "vc", "v")]


def steps_from_the_start(told, facts):
    return np.diff([len(facts.items() & dict(told[:i]).items()) for i in range(len(told) + 1)])


def best_of_n_kl_in_numpy(p, n):
    q = np.diff(np.cumsum([0, *p.double().numpy()]) ** n)
    return float(q @ np.log(q / p.numpy()))


UNUSUAL: list[tuple[str, Callable]] = [
    ("rloo_loss", lambda lp, r: -((r - r.mean()) * (lp - lp.detach())).sum() / (len(r) - 1)),
    ("rloo_loss", lambda lp, r: ((r.mean() - r) * (lp - lp.detach()).exp()).sum() / (len(r) - 1)),
    ("surrogate", lambda new, old, a: torch.einsum("n,n->", (new - old).exp(), a) / len(a)),
    ("mean", lambda x, mask: statistics.fmean(x[mask].tolist() or [0.0])),
    ("response_mask", mask_in_loops),
    ("response_mask", lambda ids, ends: F.pad(sum(ids == x for x in ends).cumsum(1), (1, -1)) == 0),
    ("logprobs", logprobs_of_cross_entropy),
    ("loss", lambda good, bad: F.softplus(bad - good)),
    ("k3", k3_in_place),
    ("kl_gradient", kl_of_every_response),
    ("shaping", lambda s, kl, m, k: torch.where(m, (F.pad(m, (-1, 1)) < m) * s[:, None] - k * kl, 0)),
    ("gae", gae_of_sums),
    ("policy_loss", policy_in_loops),
    ("value_loss", value_of_a_mapped_token),
    ("best_of_n", lambda x, n: statistics.fmean(map(max, itertools.combinations(x, n)))),
    ("masks", masks_of_letters),
    ("best_of_n_kl", best_of_n_kl_in_numpy),
    ("others", lambda x, size: [(sum(g) - y) / (size - 1) for g in x.split(size) for y in g.tolist()]),
    ("labels", lambda ids, mask, n: [[x if m and i >= k else -100 for i, (x, m) in enumerate(zip(*r))]
                                     for *r, k in zip(ids.tolist(), mask.tolist(), n.tolist())]),
    ("step_rewards", steps_from_the_start),
]  # fmt: skip
