"""Advantage estimators, where the KL is charged, what a token weighs and what the ratio is of: each
against an implementation in numpy that loops, and in whole updates."""

from __future__ import annotations

import copy
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from pairs import pairwise
from peft import LoraConfig
from ppo_fixtures import PROMPTS, likes_c, logs, unlike, untimed, weights
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf_nb import cli
from rlhf_nb.cli.plan import plan_of
from rlhf_nb.cli.ppo import ppo_parser
from rlhf_nb.diagnose import by_hand
from rlhf_nb.diagnose.memory import MemoryPlan
from rlhf_nb.diagnose.preflight import LADDER, preflight
from rlhf_nb.estimators import (
    ESTIMATORS,
    Estimator,
    check_groups,
    dr_grpo,
    equal_groups,
    grpo,
    loss_weights,
    reinforce_pp,
    rloo,
    sequence_log_ratio,
)
from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.forward import Forwarded
from rlhf_nb.gae import gae, lambda_of
from rlhf_nb.masks import whiten
from rlhf_nb.ppo import estimate_advantages, ppo_loss, with_advantages
from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.training.config import PPOConfig
from rlhf_nb.ui.viewer import view
from rlhf_nb.update import Objective

NAMES = by_hand.BY_HAND  # of another one, preflight says that it has no copy
GROUPED = dict(rloo=rloo, grpo=grpo, dr_grpo=dr_grpo)
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
K, T, MOST = 4, 6, 7  # responses to a prompt, columns, response_length


def some_rollout(seed: int, dtype: torch.dtype = torch.float64) -> Rollout:
    "Three groups of four; padding holds NaN, and the last group earned the same everywhere."
    chance = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=chance, dtype=torch.float64).to(dtype)
    rows = 3 * K
    lengths = torch.randint(1, T + 1, (rows,), generator=chance)
    lengths[0], lengths[1] = 1, T
    mask = torch.arange(T) < lengths[:, None]
    real = lambda x: x.masked_fill(~mask, torch.nan)
    logprobs = draw(rows, T) - 3
    r = Rollout(
        torch.arange(3)[:, None].repeat_interleave(K, 0),
        torch.ones(rows, 1, dtype=torch.bool),
        torch.zeros(rows, T, dtype=torch.long),
        mask,
        stopped=lengths < T,
        logprobs=real(logprobs),
        ref_logprobs=real(logprobs + draw(rows, T) / 2),
        kl=real(draw(rows, T) / 3),
        values=draw(rows, T).masked_fill(~mask, 0.0),
        scores=draw(rows),
    )
    r.kl[2 * K :] = torch.where(mask, 0.0, torch.nan)[2 * K :]
    r.scores[2 * K :] = 0.1
    return r


# ---- The same in numpy, token by token ----


def rewards_in_numpy(r: Rollout, beta: float) -> list[np.ndarray]:
    "Of each response, its own tokens alone."
    rewards = []
    for kl, mask, score in zip(r.kl.numpy(), r.mask.numpy(), r.scores.numpy()):
        row = -beta * kl[mask].astype(np.float64)
        row[-1] += score
        rewards.append(row)
    return rewards


def advantages_in_numpy(r: Rollout, cfg: Objective, beta: float) -> list[np.ndarray]:
    rewards = rewards_in_numpy(r, beta if cfg.kl_in == "reward" else 0.0)
    lengths, name = [len(row) for row in rewards], cfg.advantage_estimator
    if name in GROUPED:
        earned = np.array([row.sum() for row in rewards])
        found = []
        for i, own in enumerate(earned):
            group = [j for j in range(len(earned)) if j // K == i // K]
            others = np.mean([earned[j] for j in group if j != i])
            mean = np.mean([earned[j] for j in group])
            deviation = np.sqrt(sum((earned[j] - mean) ** 2 for j in group) / (K - 1))
            scaled = (own - mean) / (deviation + 1e-4)
            found.append(dict(rloo=own - others, grpo=scaled, dr_grpo=own - mean)[name])
        return [np.full(n, a) for n, a in zip(lengths, found)]
    assert name in ("gae", "reinforce_pp"), f"no numbers in numpy for {name}"
    values = r.values.numpy() if name == "gae" else np.zeros(r.mask.shape)
    lam, rows = cfg.lam if name == "gae" else 1.0, []
    for row, v in zip(rewards, values):
        delta = row + cfg.gamma * np.append(v[1 : len(row)], 0.0) - v[: len(row)]
        rows.append(
            [
                sum((cfg.gamma * lam) ** (k - t) * delta[k] for k in range(t, len(row)))
                for t in range(len(row))
            ]
        )
    flat = np.concatenate(rows)
    return [(np.array(row) - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8) for row in rows]


def padded(rows: list[np.ndarray]) -> torch.Tensor:
    wide = torch.zeros(len(rows), T, dtype=torch.float64)
    for i, row in enumerate(rows):
        wide[i, : len(row)] = torch.as_tensor(row)
    return wide


def loss_in_numpy(new: np.ndarray, r: Rollout, cfg: Objective) -> float:
    "What the policy minimises, divided and all."
    losses = []
    for i, mask in enumerate(r.mask.numpy()):
        x, old = new[i][mask], r.logprobs[i].numpy()[mask]
        ratio = np.exp(x - old)
        if cfg.importance_level == "sequence":
            ratio = np.full(len(x), np.prod(ratio) ** (1 / len(x)))
        a = r.advantages[i].numpy()[mask]
        high = cfg.cliprange if cfg.cliprange_high is None else cfg.cliprange_high
        loss = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - cfg.cliprange, 1 + high))
        if cfg.kl_in == "loss":
            gap = x - r.ref_logprobs[i].numpy()[mask]
            each = {"k2": gap**2 / 2, "k3": np.exp(-gap) - 1 + gap, "abs": abs(gap)}
            loss = loss + cfg.kl_coef * each[cfg.kl_estimator]
        losses.append(loss)
    if cfg.loss_aggregation == "token_mean":
        return np.concatenate(losses).mean()
    if cfg.loss_aggregation == "sequence_mean":
        return np.mean([loss.mean() for loss in losses])
    return sum(loss.sum() for loss in losses) / (len(losses) * MOST)


def numeric_slope(f, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    slope = np.zeros_like(x)
    for place in zip(*mask.nonzero()):
        up, down = x.copy(), x.copy()
        up[place] += 1e-5
        down[place] -= 1e-5
        slope[place] = (f(up) - f(down)) / 2e-5
    return slope


def objective(**settings) -> Objective:
    if settings.get("kl_in") == "loss":
        settings.setdefault("kl_estimator", "k3")
    return Objective(**dict(kl_coef=0.3) | settings)


# ---- Advantages ----


# catches: a group read across prompts, the wrong deviation, a KL in both places or in neither,
# padding that is counted, a second whitening
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_those_of_numpy(name, kl_in, seed):
    gamma = 0.9 if name in ("gae", "reinforce_pp") else 1.0
    cfg = objective(advantage_estimator=name, kl_in=kl_in, gamma=gamma)
    for dtype in (torch.float64, torch.float32):
        r = some_rollout(seed, dtype)
        got = estimate_advantages(r, cfg, num_generations=K)
        wanted = padded(advantages_in_numpy(r, cfg, 0.3))
        torch.testing.assert_close(got.advantages.double(), wanted, atol=1e-6, rtol=1e-6)
        assert (got.returns is None) == (name != "gae")
        rewards = rewards_in_numpy(r, 0.3 * (kl_in == "reward"))
        torch.testing.assert_close(got.rewards.double(), padded(rewards), atol=1e-6, rtol=1e-6)


def test_a_group_that_is_all_equal_teaches_nothing():
    for n, estimator in product((2, 3, 4, 7), GROUPED.values()):
        for score in (0.1, -1 / 3, 1e6 + 0.1, 0.0):
            assert not estimator(torch.full((2 * n,), score), n).any()
        nearly = torch.full((n,), 0.7)
        nearly[0] += 1e-7  # the last digit of a reward model
        assert estimator(nearly, n).abs().max() < 1e-2


def test_groups_are_of_one_prompt():
    r = some_rollout(0)
    check_groups(r, K)
    check_groups(r, 2)
    for rows, size in ((torch.arange(11), K), (torch.arange(12).roll(1), K), (torch.arange(12), 3)):
        with pytest.raises(ValueError, match="num_generations"):
            check_groups(r.select(rows), size)
        with pytest.raises(ValueError, match="num_generations"):
            cfg = objective(advantage_estimator="grpo")
            estimate_advantages(r.select(rows), cfg, num_generations=size)
    left = r.with_(prompt_mask=r.prompt_mask.clone(), prompt_ids=torch.zeros(12, 1))
    left.prompt_mask[1] = False  # the same ids, and one of them is padding
    with pytest.raises(ValueError, match="num_generations"):
        check_groups(left, K)
    for size in (1, 5):
        with pytest.raises(ValueError, match="whole groups of 2 or more"):
            rloo(torch.ones(12), size)


# catches: targets with the policy's lambda, advantages with the critic's
@pytest.mark.parametrize("lam_value", [0.0, 0.5, 1.0])
def test_targets_have_their_own_lambda(lam_value):
    r = some_rollout(2)
    plain, own = (with_advantages(r, objective(lam=0.7, lam_value=x)) for x in (None, lam_value))
    same = with_advantages(r, objective(lam=lam_value))
    assert torch.equal(own.advantages, plain.advantages) and torch.equal(own.returns, same.returns)
    assert not torch.equal(own.returns, plain.returns)
    if lam_value == 1:
        to_go = [row[::-1].cumsum()[::-1].copy() for row in rewards_in_numpy(r, 0.3)]
        torch.testing.assert_close(own.returns, padded(to_go))


# catches: a critic with a lambda of its own for which a response that was cut off ends in nothing
def test_targets_with_their_own_lambda_go_on_after_the_last_token():
    r, after = some_rollout(2), torch.linspace(1, 2, 3 * K).double()
    own = with_advantages(r, objective(lam=0.7, lam_value=0.5), last_value=after)
    same = with_advantages(r, objective(lam=0.5), last_value=after)
    assert torch.equal(own.returns, same.returns)


# catches: the length's lambda in the targets of a critic that has its own, lam still in use beside it
def test_lambda_of_the_length():
    r = some_rollout(2)
    by_length = lambda **more: with_advantages(r, objective(lam_length_alpha=0.8, **more))
    rewards, *rest = by_length().rewards, r.values, r.mask
    own = gae(rewards, *rest, objective().gamma, lambda_of(r.mask, 0.8))
    torch.testing.assert_close(by_length(lam=0.1).returns, torch.where(r.mask, own + r.values, 0))
    torch.testing.assert_close(by_length(lam=0.1).advantages, whiten(own, r.mask))
    assert torch.equal(by_length(lam_value=1.0).advantages, by_length().advantages)
    to_go = with_advantages(r, objective(lam_value=1.0)).returns
    assert torch.equal(by_length(lam_value=1.0).returns, to_go)


# ---- The loss ----

LOSSES = pairwise(
    AGGREGATIONS,
    ("token", "sequence"),
    ("reward", "k2", "k3", "abs"),
    ("grpo", "reinforce_pp"),
    allowed=lambda how, level, kl, name: (level, name) != ("sequence", "reinforce_pp"),
)


def whole_loss(r, new, cfg, parts=None, reduce=lambda x: x):
    "The loss of a mini-batch of all rows, in parts, as the trainer adds it up."
    rows = torch.arange(len(r))
    weight = loss_weights(r.mask, rows, cfg.loss_aggregation, MOST, reduce)
    total, sums = 0.0, {}
    for part in parts or [rows]:
        now = Forwarded(new[part], None, None)
        loss, logged = ppo_loss(now, r.select(part), cfg, weights=weight[part])
        total = total + loss / r.mask.sum()
        sums = {name: sums.get(name, 0) + x for name, x in logged.items()}
    return total, sums


def a_loss(how, level, kl, name, seed=0):
    cfg = objective(
        advantage_estimator=name,
        loss_aggregation=how,
        importance_level=level,
        cliprange=0.15,
        cliprange_high=0.25,
        **({} if kl == "reward" else dict(kl_in="loss", kl_estimator=kl)),
    )
    r = estimate_advantages(some_rollout(seed), cfg, num_generations=K)
    chance = torch.Generator().manual_seed(99)
    new = r.logprobs + 0.3 * torch.randn(r.mask.shape, generator=chance, dtype=torch.float64)
    return cfg, r, new.requires_grad_()


# catches: a mean of means of micro-batches, a clip on the wrong side, a KL that is detached, charged
# twice or not weighed, a sum for the mean of a response's log-ratios, NaN that comes from padding
@pytest.mark.parametrize("how, level, kl, name", LOSSES)
def test_the_loss_is_that_of_numpy(how, level, kl, name):
    cfg, r, new = a_loss(how, level, kl, name)
    loss, sums = whole_loss(r, new, cfg, list(torch.arange(12).split([1, 5, 6])))
    loss.backward()
    f = lambda x: loss_in_numpy(x, r, cfg)
    found = new.detach().numpy()
    assert loss.item() == pytest.approx(f(found), abs=1e-6)
    np.testing.assert_allclose(new.grad, numeric_slope(f, found, r.mask.numpy()), atol=1e-6)
    assert new.grad[r.mask].any() and not new.grad[~r.mask].any()
    assert ("kl" in sums) == (kl != "reward") and "value" not in sums


# catches: metrics of the other ratio; an approxkl that target_kl would wait for in vain
def test_metrics_are_of_the_ratio_in_use():
    cfg, r, new = a_loss("sequence_mean", "sequence", "reward", "grpo")
    sums = whole_loss(r, new, cfg)[1]
    tokens = whole_loss(r, *a_loss("sequence_mean", "token", "reward", "grpo")[2::-2])[1]
    ratios = sequence_log_ratio(new, r.logprobs, r.mask).exp()[r.mask]
    assert sums["ratio"] == pytest.approx(ratios.sum().item())
    assert sums["ratio_sq"] == pytest.approx(ratios.square().sum().item())
    a = r.advantages[r.mask]
    out = torch.where(a > 0, ratios > 1.25, ratios < 0.85) & (a != 0)
    assert 0 < sums["clipfrac"] == out.sum() != tokens["clipfrac"]
    assert sums["approxkl"] == tokens["approxkl"] and sums["tokens"] == r.mask.sum()


# catches: counts of one rank in what a token weighs
def test_what_a_token_weighs_counts_all_ranks():
    r = some_rollout(0)
    halves = [r.mask[:5], r.mask[5:]]
    for how in AGGREGATIONS:
        whole = loss_weights(r.mask, torch.arange(12), how, MOST)
        counts = torch.stack([r.mask.sum(), torch.tensor(12)])
        parts = [
            loss_weights(mask, torch.arange(len(mask)), how, MOST, lambda _, all_=counts: all_)
            for mask in halves
        ]
        assert torch.equal(torch.cat(parts), whole)
        apart = [loss_weights(mask, torch.arange(len(mask)), how, MOST) for mask in halves]
        assert torch.equal(torch.cat(apart), whole) == (how == "token_mean")
    assert not loss_weights(torch.zeros(2, 3, dtype=torch.bool), torch.arange(2), how, 3).any()


# catches: a default that is not what it was, by a bit
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_defaults_change_no_bit(dtype):
    r = some_rollout(3, dtype)
    cfg = Objective()
    ready = estimate_advantages(r, cfg, num_generations=K)
    assert torch.equal(ready.advantages, with_advantages(r, cfg).advantages)
    new = (r.logprobs + 0.1).requires_grad_()
    now = Forwarded(new, None, r.values + 0.5)
    weight = loss_weights(r.mask, torch.arange(12), "token_mean", MOST)
    plain, plain_sums = ppo_loss(now, ready, cfg)
    loss, sums = ppo_loss(now, ready, cfg, weights=weight)
    assert torch.equal(plain, loss) and sums.keys() == plain_sums.keys()
    assert all(torch.equal(sums[name], plain_sums[name]) for name in sums)
    assert torch.equal(*(torch.autograd.grad(x, new)[0] for x in (plain, loss)))


# ---- Whole updates ----

SEQUENCES = dict(loss_aggregation="sequence_mean")
NARROW = dict(cliprange=3e-3, cliprange_high=4e-3)
METHODS = {
    "rloo": dict(advantage_estimator="rloo"),
    "grpo": dict(advantage_estimator="grpo", kl_in="loss", kl_estimator="k3", **SEQUENCES),
    "dr_grpo": dict(advantage_estimator="dr_grpo", loss_aggregation="constant", kl_coef=0.0),
    "reinforce_pp": dict(advantage_estimator="reinforce_pp"),
    "gspo": dict(advantage_estimator="grpo", importance_level="sequence", **SEQUENCES, **NARROW),
    "gae": dict(kl_in="loss", kl_estimator="k2", lam_value=1.0, gamma=0.9, lam=0.8, **SEQUENCES),
}


def settings_of(name: str, **more) -> dict:
    return METHODS[name] | dict(num_generations=2, missing_eos_penalty=0.5) | more


def by_sgd(name: str, **more) -> dict:
    "One step that shows the gradient."
    how = dict(optim="sgd", learning_rate=0.1, max_grad_norm=0.0, lr_scheduler_type="constant")
    return settings_of(name, **how | dict(num_ppo_epochs=1, temperature=0.8) | more)


def ready_to_learn(trainer) -> Rollout:
    return trainer.advantages(trainer.score(trainer.rollout(PROMPTS[:12])))


def step_in_numpy(policy, r: Rollout, args: PPOConfig, beta: float) -> dict[str, torch.Tensor]:
    "The policy's weights after one step of the plain formula, written once more."
    new = response_logprobs(policy, *r.sequences, temperature=0.8).logprobs
    gap = (new - r.logprobs) * r.mask
    count = r.mask.sum(1, keepdim=True)
    if args.importance_level == "sequence":
        gap = (gap.sum(1, keepdim=True) / count).expand(r.mask.shape)
    high = args.cliprange if args.cliprange_high is None else args.cliprange_high
    ratio = gap.exp()
    loss = torch.maximum(
        -r.advantages * ratio, -r.advantages * ratio.clamp(1 - args.cliprange, 1 + high)
    )
    if args.kl_in == "loss":
        x = (new - r.ref_logprobs) * r.mask
        k = x.square() / 2 if args.kl_estimator == "k2" else (-x).exp() - 1 + x
        loss = loss + beta * k
    of_row = (loss * r.mask).sum(1)
    mean = {
        "token_mean": of_row.sum() / r.mask.sum(),
        "sequence_mean": (of_row / count[:, 0]).mean(),
        "constant": of_row.sum() / (len(r) * args.response_length),
    }[args.loss_aggregation]
    mean.backward()
    return {name: p.detach() - 0.1 * p.grad for name, p in policy.named_parameters()}


# catches: a setting that does not reach the update, a division by the wrong number, a critic that
# is built, trained or logged all the same
@pytest.mark.parametrize("name", METHODS)
def test_a_whole_update(ppo, name):
    trainer = ppo(**by_sgd(name))
    beta = 4 * trainer.args.kl_coef  # as an adaptive controller may have moved it
    trainer.controller.set(beta)
    for weight in trainer.policy.parameters():  # away from the reference, so that the KL counts
        weight.data *= 1.1
    r = ready_to_learn(trainer)
    policy, args = copy.deepcopy(trainer.policy), trainer.args
    critic = name == "gae"
    assert len(r) == 24 and (trainer.pair.value is not None) == critic == (r.values is not None)
    if args.advantage_estimator in ("gae", "reinforce_pp"):
        wanted = padded(advantages_in_numpy(r, args, beta))[:, : r.mask.shape[1]]
        torch.testing.assert_close(r.advantages.double(), wanted, atol=1e-5, rtol=0)
    metrics = trainer.update(r)
    stepped = step_in_numpy(policy, r, args, beta)
    assert any(not torch.equal(p, stepped[n]) for n, p in policy.named_parameters())
    for part, weight in trainer.policy.named_parameters():
        torch.testing.assert_close(weight.data, stepped[part], atol=1e-6, rtol=0)
    of_critic = {"loss/value_avg", "val/clipfrac_avg", "val/explained_variance"}
    assert of_critic & metrics.keys() == (of_critic if critic else set())
    assert ("loss/kl_avg" in metrics) == (args.kl_in == "loss")
    charged = beta * metrics["objective/kl"] * (args.kl_in == "reward")
    assert metrics["objective/kl_coef"] == beta and metrics["objective/kl"] != 0
    assert metrics["objective/non_score_reward"] == pytest.approx(-charged)
    assert metrics["objective/rlhf_reward"] == pytest.approx(metrics["objective/scores"] - charged)
    assert ("no value model" in trainer.describe()) != critic
    learns = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert learns >= {id(p) for p in trainer.policy.parameters()}
    assert critic or learns == {id(p) for p in trainer.model.parameters()}


# catches: responses counted for prompts, rows of two prompts as a group, two groups of one prompt as
# one, scores of tokens compared one by one, padding of a prompt compared, the metric without groups
def test_groups_whose_scores_are_equal_are_counted(ppo):
    prompts = torch.tensor([[0, 4], [9, 4], [0, 4], [0, 4], [4, 4], [4, 4], [5, 4]])
    seen = torch.tensor([[False, True]] * 4 + [[True, True]] * 3)  # left of the first is padding
    scores = torch.tensor([0.1, 0.1, 2.0, 2.0, 3.0, 5.0, 5.0])
    r = some_rollout(0).select(list(range(7)))
    r = r.with_(prompt_ids=prompts, prompt_mask=seen, scores=scores)
    of = lambda rows: equal_groups(r.select(rows), 2).tolist()
    assert of([0, 1, 2, 3, 4, 5, 6]) == [True, True, False]
    assert of([1, 2, 3, 4, 5, 6]) == [False] and of([6]) == []  # 3 and 4, 5 and 6 are no group
    halves = torch.stack([scores / 2, scores / 2, 0 * scores], 1)
    halves[1] = torch.tensor([0.0, 0.0, 0.1])
    assert equal_groups(r.with_(scores=halves), 2).tolist() == [True, True, False]
    trainer = ppo(**by_sgd("grpo"))
    ready, groups = ready_to_learn(trainer), len(PROMPTS[:12])
    for k in (0, 3, groups):
        scores = torch.arange(float(len(ready)))
        scores[: 2 * k] = 0.5
        logged = trainer.update(trainer.advantages(ready.with_(scores=scores)))
        assert logged["objective/equal_groups"] == k / groups
    plain = ppo(**by_sgd("reinforce_pp"))
    assert "objective/equal_groups" not in plain.update(ready_to_learn(plain))


def test_metrics_of_the_objective_keep_their_meaning(ppo):
    one = ppo(**by_sgd("grpo", learning_rate=0.0, kl_estimator="k3"))
    two = ppo(**by_sgd("grpo", learning_rate=0.0, kl_estimator="k3", kl_in="reward"))
    for trainer in (one, two):
        for weight in trainer.policy.parameters():
            weight.data *= 1.1
    r = one.score(one.rollout(PROMPTS[:12]))
    a, b = (trainer.update(trainer.advantages(r)) for trainer in (one, two))
    assert a["objective/kl"] > 0 and a["loss/kl_avg"] > 0
    charged = ("objective/non_score_reward", "objective/rlhf_reward")  # where it is in the rewards
    for name in a.keys() - {*charged}:
        if name.startswith(("objective/", "tokens/resp", "val/")):
            assert a[name] == pytest.approx(b[name]), name
    price = b["objective/kl_coef"] * b["objective/kl"]
    assert [a[name] for name in charged] == [0, a["objective/scores"]]
    assert [b[name] for name in charged] == pytest.approx([-price, b["objective/scores"] - price])
    # at the weights of the rollout, as a mean of means over responses
    real = torch.where(r.mask, r.kl, 0.0).sum(1) / r.mask.sum(1)
    assert a["loss/kl_avg"] == pytest.approx(real.mean().item(), rel=1e-5)


# catches: a loss that changes with the micro-batch or the packing
@pytest.mark.parametrize("name", METHODS)
def test_micro_batches_and_packing_change_nothing(ppo, name):
    found, r = {}, None
    for how in (
        dict(per_device_train_batch_size=24, trim_padding=False, gradient_accumulation_steps=1),
        dict(per_device_train_batch_size=2, trim_padding=True, gradient_accumulation_steps=12),
        dict(per_device_train_batch_size=1, trim_padding=True, gradient_accumulation_steps=24),
        dict(per_device_train_batch_size=8, micro_batch_tokens=20, gradient_accumulation_steps=3),
    ):
        trainer = ppo(**by_sgd(name, num_mini_batches=3, total_episodes=24) | how)
        r = ready_to_learn(trainer) if r is None else r
        found[str(how)] = trainer.update(r), weights(trainer)
    (metrics, state), *others = found.values()
    assert len(set(r.mask.sum(1).tolist())) > 1
    for other_metrics, other in others:
        assert untimed(other_metrics) == pytest.approx(untimed(metrics), abs=1e-5, rel=1e-4)
        for part in state:
            torch.testing.assert_close(other[part], state[part], atol=1e-6, rtol=0)


# catches: a run that another draw, another group or a lost value model would make different
@pytest.mark.parametrize("name", METHODS)
def test_a_run_resumes_bit_for_bit(ppo, name, tmp_path):
    settings = settings_of(
        name, total_episodes=24, save_strategy="steps", save_steps=1, num_mini_batches=2
    )
    whole, again = ppo(**settings), ppo(**settings)
    whole.train()
    folder = Path(whole.args.output_dir) / "checkpoint-2"
    again.train(resume_from_checkpoint=str(folder))
    assert again.state.global_step == 3 and not unlike(weights(whole), weights(again))
    assert [untimed(log) for log in logs(again)] == [untimed(log) for log in logs(whole)]
    assert (folder / "value").exists() == (name == "gae")
    run = json.loads((folder / "manifest.json").read_text())["run"]
    assert ("value_model" in run) == (name == "gae")
    whole.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not unlike(loaded.state_dict(), whole.policy.state_dict())
    assert ("| value |" in (tmp_path / "saved" / "README.md").read_text()) == (name == "gae")


def test_a_run_of_another_objective_is_refused(ppo):
    settings = dict(total_episodes=16, save_strategy="steps", save_steps=1)
    whole = ppo.trained(**settings_of("grpo", **settings))
    folder = str(Path(whole.args.output_dir) / "checkpoint-1")
    for changed, text in (
        (dict(advantage_estimator="rloo"), "its advantage_estimator is 'grpo'"),
        (dict(kl_in="reward"), "its kl_in is 'loss'"),
        (dict(loss_aggregation="constant"), "its loss_aggregation is 'sequence_mean'"),
        (dict(importance_level="sequence"), "its importance_level is 'token'"),
    ):
        with pytest.raises(ValueError, match=text):
            ppo(**settings_of("grpo", **settings) | changed).train(resume_from_checkpoint=folder)


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_an_adapter_learns_without_a_critic(ppo, name):
    lora = LoraConfig(r=2, target_modules=["query_key_value"], task_type="CAUSAL_LM")
    trainer = ppo(parts=dict(peft_config=lora), **settings_of(name, save_rollouts=True))
    before = weights(trainer)
    trainer.train()
    assert trainer.ref_model is None and len(unlike(before, weights(trainer))) > 0
    assert all("lora" in part for part in unlike(before, weights(trainer)))
    kept = Rollout.load(sorted((Path(trainer.args.output_dir) / "rollouts").iterdir())[-1])
    assert kept.values is None and kept.returns is None and kept.advantages is not None
    assert "advantage" in view(kept)._repr_html_() and "value" not in kept.by_token()


# catches: a group that the end of the data cuts in two
@pytest.mark.parametrize("prompts", [3, 5, 7])
def test_groups_are_whole_at_the_end_of_the_data(ppo, prompts):
    data = Dataset.from_dict(dict(prompt=PROMPTS[:prompts]))
    more = dict(num_generations=4, dataloader_drop_last=False, save_rollouts=True)
    trainer = ppo(data=data, **settings_of("rloo") | more | dict(num_train_epochs=1))
    trainer.args.set_sizes(prompts)
    trainer.train()
    for path in sorted((Path(trainer.args.output_dir) / "rollouts").iterdir()):
        check_groups(Rollout.load(path), 4)


# ---- One of your own ----


def best_or_nothing(earned: torch.Tensor, size: int) -> torch.Tensor:
    "A made-up estimator: the best response of a group gets 1, the others share -1."
    groups = earned.unflatten(0, (-1, size))
    best = groups == groups.max(1, keepdim=True).values
    return (torch.where(best, 1.0, 0.0) - best.float().mean(1, keepdim=True)).flatten()


def to_the_end(rewards, values, mask, gamma, lam, last_value=None):
    "Another one, with a critic: the rewards to go less the value, whatever lambda is."
    return gae(rewards, values, mask, gamma, 1.0, last_value)


OWN = dict(
    group=(Estimator(best_or_nothing, group=True), dict(num_generations=4)),
    tokens=(Estimator(lambda *given: reinforce_pp(*given).clamp(-1.0, 1.0)), {}),
    critic=(Estimator(to_the_end, critic=True), {}),
)


# catches: a reader with a list of its own, an unknown estimator that is checked as if it were GRPO,
# or counted as passed
@pytest.mark.parametrize("kind", OWN)
def test_an_estimator_of_ones_own_needs_a_function_and_a_row(kind, ppo, monkeypatch):
    estimator, more = OWN[kind]
    monkeypatch.setitem(ESTIMATORS, "mine", estimator)
    assert ppo_parser().read(["--advantage_estimator", "mine"]).advantage_estimator == "mine"
    settings = dict(advantage_estimator="mine", gradient_accumulation_steps=4) | more
    trainer = ppo(total_episodes=640, **settings)
    assert (trainer.pair.value is not None) == estimator.critic
    rungs = [x for x in LADDER if not x.name.startswith("state")]
    checks = {x.name: x for x in preflight(trainer, rungs=rungs, quiet=True).checks}
    assert [(x.name, x.measured) for x in checks.values() if x.passed is False] == []
    why = "not measured here: advantage_estimator 'mine' has no copy by hand"
    assert checks["value model: advantages"].passed is None
    assert checks["value model: advantages"].measured == why
    assert (checks["value model: returns"].measured == why) == estimator.critic
    assert checks["rewards: per token"].passed
    trainer = ppo.trained(total_episodes=32, save_strategy="no", **settings)
    assert trainer.state.global_step > 0
    with pytest.raises(ValueError, match=f"one of {', '.join(ESTIMATORS)}"):
        PPOConfig("unused", advantage_estimator="theirs", use_cpu=True)


# ---- Bad input ----

LEAVE = "advantage_estimator 'rloo' has no value model; leave it out"
OF_A_CRITIC = dict(lam=0.9, lam_value=1.0, vf_coef=0.5, cliprange_value=0.1)
OF_A_CRITIC |= dict(whiten_rewards=True, bootstrap_truncated=True, share_value_trunk=True)
OF_A_CRITIC |= dict(value_learning_rate=1e-4, value_warmup_updates=1, value_pretrain_rollouts="a")
BAD = [
    *[
        (dict(advantage_estimator=name), f"num_generations is 1: {name} compares")
        for name in GROUPED
    ],
    *[
        (dict(advantage_estimator=name, num_generations=2, gamma=0.9), "gamma is 0.9: ")
        for name in GROUPED
    ],
    *[
        (
            dict(advantage_estimator="rloo", num_generations=2) | {name: x},
            f"{name} is {x!r}: {LEAVE}",
        )
        for name, x in OF_A_CRITIC.items()
    ],
    (dict(importance_level="sequence"), "importance_level is 'sequence': one ratio"),
    (
        dict(importance_level="sequence", advantage_estimator="reinforce_pp"),
        "importance_level is 'sequence': .* that reinforce_pp gives to each token; take .* rloo",
    ),
    (dict(kl_in="loss"), "kl_estimator is 'k1': .* 0 on average; take k2 or k3"),
    (dict(kl_in="loss", kl_estimator="full"), "kl_estimator is 'full': .* take k2 or k3"),
    (
        dict(advantage_estimator="grpo", num_generations=3),
        "num_generations is 3: .* = 8 responses do not divide",
    ),
    (
        dict(advantage_estimator="ppo"),
        "advantage_estimator is 'ppo': give one of gae, gae_turns, rloo",
    ),
    (dict(kl_in="both"), "kl_in is 'both'"),
    (dict(loss_aggregation="mean"), "loss_aggregation is 'mean'"),
    (dict(importance_level="word"), "importance_level is 'word'"),
    (dict(lam_value=1.5), "lam_value is 1.5"),
    (dict(lam_length_alpha=0), "lam_length_alpha is 0"),
    (
        dict(lam_length_alpha=0.05, advantage_estimator="rloo", num_generations=2),
        "lam_length_alpha is 0.05",
    ),
]


@pytest.mark.parametrize("settings, complaint", BAD, ids=lambda x: str(x)[:60])
def test_bad_settings_are_named(tmp_path, settings, complaint):
    sizes = dict(per_device_train_batch_size=8, use_cpu=True)
    with pytest.raises(ValueError, match=complaint):
        PPOConfig(str(tmp_path), **sizes | settings)


@pytest.mark.parametrize("part", ["value_model", "value_peft_config"])
def test_a_model_that_nothing_would_train_is_refused_before_any_is_loaded(tmp_path, part):
    args = PPOConfig(
        str(tmp_path), use_cpu=True, advantage_estimator="rloo", num_generations=2, report_to="none"
    )
    with pytest.raises(ValueError, match=f"{part} is given: advantage_estimator 'rloo' has no"):
        PPOTrainer(args, model="no such folder", reward_model=likes_c, **{part: "whatever"})


# ---- The command line and the plan ----


@pytest.fixture
def shape(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    LlamaConfig(max_position_embeddings=4096).save_pretrained("shape")
    return "--model_name_or_path shape --reward_model_path shape --dry_run"


# catches: a plan with a critic that the run has not, options that are not there, settings that the
# plan takes and the run refuses
def test_the_command_line_knows_the_estimators(shape, capsys):
    read = lambda more: plan_of(ppo_parser().read(f"{shape} {more}".split()))
    grouped = "--advantage_estimator grpo --num_generations 4"
    with_critic, without = read(""), read(grouped)
    assert with_critic.critic and not without.critic
    assert without.peak < 0.7 * with_critic.peak
    assert cli.main(f"ppo {shape} {grouped} --gpu_memory 80".split()) == 1
    said = capsys.readouterr().out
    assert "value model none" in said and "share_value_trunk" not in said
    for more, complaint in (
        ("--advantage_estimator grpo", "num_generations is 1"),
        (f"{grouped} --value_model_path shape", "--value_model_path is given"),
        (f"{grouped} --value_use_peft", "--value_use_peft is given"),
        (f"{grouped} --zero_value_head", "--zero_value_head is given"),
        (f"{grouped} --vf_coef 0.5", "vf_coef is 0.5"),
        ("--kl_in loss", "kl_estimator is 'k1'"),
    ):
        for words in (f"ppo {shape} {more}", f"ppo {shape.replace('--dry_run', '')} {more}"):
            words += " --dataset_name nowhere" * ("--dry_run" not in words)
            assert cli.main(words.split()) == 2, words
            assert complaint in capsys.readouterr().err, words
    with pytest.raises(SystemExit):
        cli.main("ppo --help-all".split())
    said = capsys.readouterr().out
    for name in ("advantage_estimator", "kl_in", "loss_aggregation", "importance_level"):
        assert f"--{name}" in said
    assert "--lam_value" in said


# catches: the head of a critic on the trunk counted where there is none
def test_the_plan_without_a_critic():
    config = LlamaConfig(max_position_embeddings=4096)
    none, head = (
        MemoryPlan(config, config, **more)
        for more in (dict(critic=False), dict(share_value_trunk=True))
    )
    assert none.trained == head.trained and len(none.trained) == 1
    assert 0 < head.peak - none.peak < 1e6  # a layer of 4096 numbers
    for layout in ("zero2", "zero3", "fsdp2", "ddp"):
        spread = dict(layout=layout, num_processes=8)
        whole = MemoryPlan(config, config, **spread)
        assert MemoryPlan(config, config, critic=False, **spread).peak < whole.peak
