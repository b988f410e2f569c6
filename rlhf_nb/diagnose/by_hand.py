"""PPO once more, as loops over plain numbers and models called on one row without padding: slow,
short, and made of nothing that training uses, so that a fault there shows as a difference here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_nb.rollout import Rollout

Row = list[float]


class Reading(NamedTuple):
    "What a language model says of one response of n tokens."

    logprobs: Tensor  # [n] of its tokens, nats, at the sampling temperature
    entropy: Tensor  # [n]
    surprise_var: Tensor  # [n] variance of -log p of a token drawn there
    all_logprobs: Tensor  # [n, V]


def rows_of(r: Rollout) -> list[tuple[Tensor, Tensor]]:
    "Prompt and response of each episode, without padding."
    kept = zip(r.prompt_ids, r.prompt_mask.bool(), r.response_ids, r.mask.bool())
    return [(ids[real], response[real_response]) for ids, real, response, real_response in kept]


def forward_row(model: Any, prompt: Tensor, response: Tensor, temperature: float) -> Reading:
    "One forward of the plain model on one row."
    ids = torch.cat([prompt, response])[None]
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    logp = (logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    p = logp.exp()
    surprise = (-logp).masked_fill(p == 0, 0.0)
    entropy = (p * surprise).sum(-1)
    spread = (p * (surprise - entropy[:, None]).square()).sum(-1)
    return Reading(logp.gather(1, response[:, None])[:, 0], entropy, spread, logp)


def hidden_after(body: nn.Module, *parts: Tensor) -> Tensor:
    "Last hidden states [L, hidden] of a model's body on one row."
    ids = torch.cat(parts)[None]
    return body(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]


def plain_model(model: Any) -> Any:
    "The transformers model, its adapter in place."
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_of(model: Any) -> Any:
    "The layer that makes a score of a hidden state."
    heads = (getattr(model, name, None) for name in ("score", "classifier", "v_head"))
    return next(head for head in heads if head is not None)


def scores_along(model: Any, prompt: Tensor, response: Tensor) -> Tensor:  # [n + 1]
    "What a scorer says before each token of the response, and after the last one."
    inner = plain_model(model)
    hidden = hidden_after(inner.base_model, prompt, response)
    center = getattr(inner.config, "reward_center", 0.0)
    return head_of(inner)(hidden).float()[len(prompt) - 1 :, 0] - center


# ---- From a score to advantages ----


def kl_of(x: float, estimator: str) -> float:
    "An estimate for one token from x = log pi - log ref. joschu.net/blog/kl-approx.html"
    return dict(k1=x, k2=x * x / 2, k3=math.exp(-x) - 1 + x, abs=abs(x))[estimator]


def final_scores(raw: Row, stopped: bool, args: Any, mean: float, std: float) -> Row:
    """Normalised, clipped, charged for a missing stop token: the score of a response, alone in its
    row, or one for each token, where the mean and the charge are on the last."""
    scores = list(raw)
    if args.normalize_scores:
        scores = [x / max(std, 1e-8) for x in [*scores[:-1], scores[-1] - mean]]
    if args.score_clip is not None:
        scores = [max(-args.score_clip, min(args.score_clip, x)) for x in scores]
    if not stopped and args.missing_eos_penalty is not None:
        scores[-1] -= args.missing_eos_penalty
    if not stopped and args.non_eos_penalty:
        scores[-1] = args.penalty_reward_value
    return scores


def rewards_of(kl: Row, scores: Row, kl_coef: float) -> Row:
    "Every token pays for its KL, and is paid its score; one for the response is on the last."
    rewards = [-kl_coef * x for x in kl]
    for back in range(1, len(scores) + 1):
        rewards[-back] += scores[-back]
    return rewards


def price_in_rewards(kl_coef: float, args: Any) -> float:
    "What a nat costs there: nothing, where the loss is charged for it."
    return 0.0 if args.kl_in == "loss" else kl_coef


def gae_of(rewards: Row, values: Row, after: float, gamma: float, lam: float) -> Row:
    "Backwards through one row. Schulman et al. 2016, eq. 16."
    advantage = 0.0
    advantages: Row = []
    for reward, value in zip(reversed(rewards), reversed(values)):
        advantage = reward + gamma * after - value + gamma * lam * advantage
        after = value
        advantages.insert(0, advantage)
    return advantages


def moments(rows: Sequence[Row]) -> tuple[float, float]:
    "Mean and unbiased variance of all numbers."
    numbers = [x for row in rows for x in row]
    mean = sum(numbers) / len(numbers)
    return mean, sum((x - mean) ** 2 for x in numbers) / max(len(numbers) - 1, 1)


def whiten(rows: Sequence[Row], keep_mean: bool = False) -> list[Row]:
    "In units of their standard deviation."
    mean, var = moments(rows)
    return [[(x - mean) / math.sqrt(var + 1e-8) + keep_mean * mean for x in row] for row in rows]


def kl_coef_after(kl_coef: float, kl: float, episodes: int, args: Any) -> float:
    "kl_coef after an update whose mean KL was kl. 1909.08593, section 2.2."
    if args.kl_controller != "adaptive":
        return kl_coef
    error = max(-0.2, min(0.2, (kl - args.kl_target) / args.kl_target))
    return kl_coef * (1 + error * episodes / args.kl_horizon)


BY_HAND = "gae", "rloo", "grpo", "dr_grpo", "reinforce_pp"  # whose advantages are done by hand


class Targets(NamedTuple):
    "A row for each episode."

    rewards: list[Row]
    advantages: list[Row] | None  # None for an estimator that is not in BY_HAND
    returns: list[Row] | None  # None without a value model


def targets_of(
    kl: Sequence[Row],  # of the tokens
    scores: Sequence[Row],  # of the episode or of its tokens, penalties included
    values: Sequence[Row] | None,  # before each token, and after the last
    stopped: Sequence[bool],
    args: Any,  # PPOConfig
    kl_coef: float,
    steps: Sequence[Sequence[int]] | None = None,  # the tokens that a judge scored; None: none
) -> Targets:
    "Rewards, advantages and returns of a batch, row by row."
    rewards = [rewards_of(*row, price_in_rewards(kl_coef, args)) for row in zip(kl, scores)]
    used = whiten(rewards, keep_mean=True) if args.whiten_rewards else rewards
    if args.advantage_estimator not in BY_HAND:
        return Targets(used, None, None)
    if args.advantage_estimator == "grpo" and steps is not None:
        return Targets(rewards, step_advantages(rewards, steps, args.num_generations), None)
    if args.advantage_estimator != "gae":
        return Targets(rewards, group_advantages(rewards, [len(row) for row in kl], args), None)
    plain, returns = [], []
    for row, row_values, n, ended in zip(used, values or (), map(len, kl), stopped):
        along = row_values[:n]
        after = row_values[n] if args.bootstrap_truncated and not ended else 0.0
        lam, alpha = args.lam, args.lam_length_alpha
        if alpha is not None:
            lam = min(1.0, max(0.0, 1 - 1 / (alpha * n)))
        plain.append(gae_of(row, along, after, args.gamma, lam))
        lam = lam if args.lam_value is None else args.lam_value
        target = gae_of(row, along, after, args.gamma, lam)
        returns.append([a + v for a, v in zip(target, along)])
    return Targets(used, whiten(plain), returns)


def group_advantages(rewards: Sequence[Row], lengths: Sequence[int], args: Any) -> list[Row]:
    "Advantages without a value model: 2402.14740, 2402.03300, 2503.20783, 2501.03262."
    if args.advantage_estimator == "reinforce_pp":
        return whiten([gae_of(row, [0.0] * len(row), 0.0, args.gamma, 1.0) for row in rewards])
    earned, k = [sum(row) for row in rewards], args.num_generations
    advantages = []
    for i, n in enumerate(lengths):
        group = earned[i // k * k : i // k * k + k]
        mean = sum(group) / k
        scale = {"rloo": k / (k - 1), "dr_grpo": 1.0}.get(args.advantage_estimator)
        if scale is None:
            scale = 1 / (math.sqrt(moments([group])[1]) + 1e-4)
        advantages.append([(earned[i] - mean) * scale] * n)
    return advantages


def step_advantages(rewards: Sequence[Row], steps: Sequence[Sequence[int]], k: int) -> list[Row]:
    "Each step in units of its group; of a token, all that end at it or later. 2402.03300, 4.1.3."
    advantages = [[0.0] * len(row) for row in rewards]
    for start in range(0, len(rewards), k):
        earned: list[tuple[int, int, float]] = []  # row, last token, and what the step earns
        for i in range(start, start + k):
            ends, first = [*steps[i]] or [len(rewards[i]) - 1], 0
            for end in ends:
                behind = len(rewards[i]) if end == ends[-1] else end + 1
                earned.append((i, end, sum(rewards[i][first:behind])))
                first = behind
        mean, var = moments([[x for *_, x in earned]])
        for i, end, x in earned:
            for t in range(end + 1):
                advantages[i][t] += (x - mean) / (math.sqrt(var) + 1e-4)
    return advantages


# ---- The loss ----


class Sums(NamedTuple):
    "What one episode adds to the loss, and to what is logged."

    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor
    ratio: Tensor
    clipped: Tensor
    approxkl: Tensor


def worst(a: Tensor, ratio: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    "The clipped loss of each token, and where the clip decides. 1707.06347, eq. 7; 1912.09729."
    high = args.cliprange if args.cliprange_high is None else args.cliprange_high
    near = torch.where(ratio > 1 + high, 1 + high, ratio)
    near = torch.where(ratio < 1 - args.cliprange, 1 - args.cliprange, near)
    loss, clipped = -torch.minimum(a * ratio, a * near), a * near < a * ratio
    if args.dual_clip is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -args.dual_clip * a), loss)
    return loss, clipped


def sums_of(
    new: Reading,
    ref: Tensor,  # [n]
    old: Tensor,  # [n] log-probs that the ratio is taken against
    advantages: Tensor,  # [n]
    critic: tuple[Any, Any, Any],  # values now, old values, returns, [m] each; None without
    args: Any,
    weight: float,  # of the tokens of this response
) -> Sums:
    "Policy loss, value loss and what is logged, over one episode."
    x = new.logprobs - old
    ratio = x.mean().exp().expand(len(x)) if args.importance_level == "sequence" else x.exp()
    loss, clipped = worst(advantages * weight, ratio, args)
    value = loss.new_zeros(())
    values, old_values, returns = critic
    if values is not None:
        low, high = old_values - args.cliprange_value, old_values + args.cliprange_value
        near = torch.maximum(torch.minimum(values, high), low)
        errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        value = errors.sum() / 2
    kl = loss.new_zeros(())
    if args.kl_in == "loss":
        gap = new.logprobs - ref
        kind = dict(k2=gap**2 / 2, k3=(-gap).exp() - 1 + gap, abs=gap.abs())
        kl = weight * kind[args.kl_estimator].sum()
    summands = (loss, value, new.entropy, kl, ratio, clipped.float(), x.square() / 2)
    return Sums(*(part.sum() for part in summands))


def weight_of(length: int, lengths: Sequence[int], args: Any) -> float:
    "Weight of a response's tokens in a sum that is divided by the mini-batch's tokens."
    if args.loss_aggregation == "token_mean":
        return 1.0
    own = length if args.loss_aggregation == "sequence_mean" else args.response_length
    return sum(lengths) / (len(lengths) * own)


def total_loss(sums: Sequence[Sums], tokens: int, args: Any, kl_coef: float) -> Tensor:
    "Loss of a mini-batch: policy + vf_coef value - entropy_coef entropy, per token."
    add: Callable[[str], Tensor] = lambda name: torch.stack([getattr(s, name) for s in sums]).sum()
    policy = add("policy") - args.entropy_coef * add("entropy") + kl_coef * add("kl")
    return (policy + args.vf_coef * add("value")) / tokens
