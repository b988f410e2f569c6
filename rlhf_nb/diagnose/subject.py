"What a preflight looks at: the user's trainer, and others beside it with copies of its models."

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, ProgressCallback

from rlhf_nb.diagnose import by_hand
from rlhf_nb.diagnose.checks import Finding
from rlhf_nb.forward import ValueHead
from rlhf_nb.judges import Answers
from rlhf_nb.rollout import Rollout, Sample
from rlhf_nb.sampling import Sampling
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.training.engines import Engine
from rlhf_nb.training.optimizers import inner_optimizer
from rlhf_nb.update import Metrics

SAMPLED = 64  # episodes of the exact copy, at most a whole update of the run
Tensors = dict[str, Tensor]  # by name
LOOKED_AT = 16  # episodes that are computed once more by hand
RARE = 1e-3 / 7  # chance of each of seven tests on samples to fail where all is right
SHIFT = 0.15  # of old log-probs and values, so that some ratios are clipped and some are not
QUIET: dict[str, Any] = dict(
    report_to=[],
    disable_tqdm=True,
    push_to_hub=False,
    eval_strategy="no",
    save_strategy="no",
    load_best_model_at_end=False,
    num_sample_generations=0,
    save_rollouts=False,
    logging_steps=1,
    resume_from_checkpoint=None,
    lr_scheduler_type="constant",
    warmup_steps=0,
    value_warmup_updates=0,
    value_pretrain_rollouts=None,
    target_kl=None,
)


@contextmanager
def modes(*models: Any) -> Iterator[None]:
    "Inside, models may be set to train or eval, frozen or not; behind it they are as they were."
    parts = [part for model in models if isinstance(model, nn.Module) for part in model.modules()]
    weights = [p for part in parts for p in part.parameters(recurse=False)]
    training, learning = [x.training for x in parts], [p.requires_grad for p in weights]
    try:
        yield
    finally:
        for part, was in zip(parts, training):
            part.training = was
        for weight, was in zip(weights, learning):
            weight.requires_grad_(was)


def frozen_models(trainer: PPOTrainer) -> list[Any]:
    "What a trainer beside shares with this one: reference and reward models."
    return [trainer.ref_model, *trainer.judges.models]


def same_dropout(models: nn.Module, like: nn.Module) -> None:
    "A trainer sets dropout to 0 where it is made: the copy has what the original has."
    for ours, theirs in zip(models.modules(), like.modules()):
        for name, x in vars(theirs).items():
            if isinstance(x, float) and ("dropout" in name or name == "p"):
                setattr(ours, name, x)


def add_noise(models: nn.Module, seed: int = 0, share: float = 0.05) -> None:
    "Move every weight that learns a little: policy and reference differ, and no value is 0."
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in models.parameters():
            if weight.requires_grad:
                size = weight.float().square().mean().sqrt().item() or 0.4
                noise = torch.randn(weight.shape, generator=draw) * (share * size)
                weight.add_(noise.to(weight.device, weight.dtype))


@torch.no_grad()
def gap_of(trainer: PPOTrainer, rows: list[Any], before: list[by_hand.Reading]) -> float:
    "How many nats a policy has moved, a mean over the tokens of some responses."
    with trainer.accelerator.autocast():
        policy, t = trainer.pair.policy, trainer.args.temperature
        now = [by_hand.forward_row(policy, p, response, t) for p, response in rows]
    gaps = [(a.logprobs - b.logprobs).abs() for a, b in zip(now, before)]
    return torch.cat(gaps).mean().item()


class Cutting:
    "An engine around another one: every other response stops early, so that there is padding."

    def __init__(self, engine: Engine, stop_ids: Sequence[int]):
        self.engine, self.stop_ids = engine, stop_ids

    def sync(self, model: nn.Module) -> None:
        "The other engine's."
        self.engine.sync(model)

    def generate(
        self, prompt_ids: Tensor, prompt_mask: Tensor, sampling: Sampling
    ) -> tuple[Sample, Tensor | None]:
        "What the other engine returns, cut."
        drawn, logprobs = self.engine.generate(prompt_ids, prompt_mask, sampling)
        ids, mask, stopped = (x.clone() for x in drawn)
        for i in range(1, len(ids), 2):
            n = min(1 + 3 * i % ids.shape[1], int(mask[i].sum()))
            if self.stop_ids and n < int(mask[i].sum()):
                ids[i, n - 1] = self.stop_ids[0]
                stopped[i] = True
            ids[i, n:], mask[i, n:] = sampling.pad_id, False
        return Sample(ids, mask, stopped), logprobs

    def close(self) -> None:
        "The other engine's."
        self.engine.close()


@dataclass(frozen=True)
class ByHand:
    "A list for each quantity, with an entry for each episode."

    policy: list[by_hand.Reading]
    reference: list[by_hand.Reading]
    values: list[Tensor] | None  # [n + 1]; None without a value model
    scores: Tensors  # [B], by the name of each reward model with a head that is known

    def kl(self, i: int, estimator: str) -> list[float]:
        "KL of the tokens of episode i."
        new, ref = self.policy[i], self.reference[i]
        if estimator == "full":
            p, q = new.all_logprobs, ref.all_logprobs
            return (p.exp() * (p - q).masked_fill(p.isneginf(), 0.0)).sum(1).tolist()
        return [by_hand.kl_of(x, estimator) for x in (new.logprobs - ref.logprobs).tolist()]


@dataclass
class Step:
    "One optimizer step: its rows, its gradient, and the same gradient by hand."

    rows: Tensor
    norm: float = math.nan
    norm_by_hand: float = math.nan
    gap: float = math.nan  # |gradient - by hand| over |by hand|


@dataclass(frozen=True)
class Observed:
    "One real update with learning rate 0, and what it was by hand."

    sampled: Rollout  # as `rollout` returned it
    scored: Rollout  # and `score`
    rollout: Rollout  # and `advantages`
    trained_on: Rollout  # the same with other old log-probs and values, if it was shifted
    hand: ByHand
    metrics: Metrics
    steps: list[Step]
    kl_coef: float
    moments: tuple[float, float]  # of the running scores, after them
    changed: int  # weights that a learning rate of 0 changed
    args: Any


class Subject:
    "The trainer of a preflight, some prompts, and trainers of its own beside it."

    def __init__(self, trainer: PPOTrainer, pairs: list[dict[str, str]] | None = None):
        if trainer.train_dataset is None:
            raise ValueError(
                "the trainer has no train_dataset, which has the prompts: give it one."
            )
        if trainer.player is not None:
            raise ValueError(
                "a preflight does not play, and computes by hand what has one turn: check models, "
                "data and settings with a reward function in place of environment and tools."
            )
        if trainer.args.world_size > 1 or not trainer.layout.in_place:
            raise ValueError(
                f"a preflight runs in one process, and this is {trainer.layout.describe()}: run it "
                "without the launcher, on one device, before the run of several."
            )
        self.trainer, self.pairs, self.args = trainer, pairs, trainer.args
        self.tokenizer: Any = trainer.processing_class
        name = "rlhf_nb-preflight-"
        self.held = tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True)
        self.folder = Path(self.held.name)
        self.trainers = 0  # made beside it so far

    def close(self) -> None:
        "Remove what trainers beside it wrote."
        self.held.cleanup()

    # ---- data ----

    def rows(self, count: int) -> list[dict[str, Any]]:
        "Training rows, spread over the data set."
        data = self.trainer.train_dataset
        count = min(count, len(data))
        return [data[i * len(data) // count] for i in range(count)]

    def batch(self, episodes: int) -> dict[str, Any]:
        "Prompts for about so many episodes, as the trainer's collator makes them."
        k = self.args.num_generations
        return self.trainer.data_collator(self.rows(max(1, episodes // k)))

    @cached_property
    def answers(self) -> list[tuple[dict[str, Any], str]]:
        "Training rows with their reference answer (the first of several), where there is one."
        names = ("completion", "reference", "summary", "answer", "chosen")
        name = next((x for x in names if x in self.trainer.train_dataset.column_names), None)
        rows = [] if name is None else self.rows(SAMPLED)
        texts = [text_in(row[name]) if name else "" for row in rows]
        return [(row, x) for row, x in zip(rows, texts) if x.strip()]

    def prompt_texts(self, rows: list[dict[str, Any]]) -> list[str]:
        "Prompts of some rows, as the policy reads them."
        return list(self.trainer.data_collator(rows)["prompt"])

    def score(self, rows: list[dict[str, Any]], answers: list[str], ended: bool = True) -> Tensor:
        "The judges' weighted scores [N] of texts."
        names = ("prompt", "input_ids", "attention_mask")
        columns = {k: [row[k] for row in rows] for k in rows[0] if k not in names}
        judges, stopped = self.trainer.judges, [ended] * len(rows)
        given = Answers(self.prompt_texts(rows), answers, stopped, columns=columns)
        with torch.no_grad(), modes(*judges.models):
            return judges.score_answers(given, self.tokenizer)

    @property
    def positions(self) -> int:
        "The fewest that a model has; a million where none has a limit."
        configs = [self.trainer.pair.config.get_text_config()]
        return min(getattr(x, "max_position_embeddings", None) or 10**6 for x in configs)

    def sample_texts(self, rows: list[dict[str, Any]], k: int, seed: int) -> list[str]:
        "Texts of k responses to each prompt, side by side."
        rest = dict[str, Any](num_generations=k, num_mini_batches=1, seed=seed)
        rest |= dict(gradient_accumulation_steps=1)
        rest |= dict(per_device_train_batch_size=len(rows) * k)
        trainer = self.beside(own_optimizer=False, **rest)
        trainer.prepare()
        return trainer.rollout(trainer.data_collator(rows)).responses

    # ---- trainers beside it ----

    def beside(self, reward: Any = None, own_optimizer: bool = True, **changes: Any) -> PPOTrainer:
        """A trainer with copies of policy and value model, the same reference, judges and settings
        but for `changes`, and its own folder and order of the data. A copy of the optimizer keeps
        its rates; own_optimizer=False: a new one, at those of the settings."""
        given, args = self.trainer, copy.copy(self.args)
        self.trainers += 1
        folder = str(self.folder / f"run-{self.trainers}")
        for name, value in (QUIET | dict(output_dir=folder) | changes).items():
            setattr(args, name, value)
        if args.max_steps <= 0:
            args.total_episodes = max(args.total_episodes or 0, args.batch_size)
        optimizer = inner_optimizer(given.optimizer) if own_optimizer else None
        if optimizer is not None:
            args.value_learning_rate = None  # it has a group for it
        pair, optimizer = copy.deepcopy((given.pair, optimizer))
        own_head = isinstance(pair.value, ValueHead)
        judges = list(given.judges.judges.values())
        with modes(*frozen_models(given)):
            made = type(given)(
                args,
                self.tokenizer,
                pair.policy,
                cast(Any, given.ref_model),
                judges if reward is None else reward,
                train_dataset=given.train_dataset,
                value_model=None if own_head else pair.value,
                data_collator=given.data_collator,
                optimizers=(optimizer, None),
                reward_processing_class=given.judges.tokenizer if reward is None else None,
            )
        if own_head:
            made.pair.value.load_state_dict(pair.value.state_dict())
        if given.ref_model is None:  # the policy has moved since, and its adapter with it
            made.ref_model = made.reference.placed = None
        if type(given.engine) is not type(made.engine):  # one of the user's own; it is synced anew
            made.engine = given.engine
        same_dropout(made.pair, given.pair)
        made.controller.value = given.controller.value
        made.moments = copy.deepcopy(given.moments)
        for callback in (PrinterCallback, ProgressCallback):
            made.remove_callback(callback)
        return made

    def sizes(self, episodes: int) -> dict[str, Any]:
        "Settings of an update of about so many episodes, two micro-batches in each mini-batch."
        unit = math.lcm(self.args.num_generations, self.args.num_mini_batches)
        batch = max(1, episodes // unit) * unit
        part = max(1, batch // self.args.num_mini_batches // 2)
        while batch % part:
            part -= 1
        return dict(per_device_train_batch_size=part, gradient_accumulation_steps=batch // part)

    # ---- one update, observed ----

    @cached_property
    def start(self) -> Observed:
        "An update of an exact copy, with learning rate 0."
        trainer = self.still_copy(SAMPLED if self.args.batch_size >= SAMPLED else LOOKED_AT)
        return observe(trainer, self.batch(trainer.args.batch_size), shift=0.0)

    @cached_property
    def off_policy(self) -> Observed:
        "The same where the policy has moved away from the reference, and from the old log-probs."
        trainer, start = self.still_copy(LOOKED_AT), self.start
        rows = by_hand.rows_of(start.sampled)[:4]
        for seed in range(16):
            add_noise(trainer.pair, seed)
            if gap_of(trainer, rows, start.hand.policy) > SHIFT:
                break
        trainer.engine = cast(Any, Cutting(trainer.engine, trainer.sampling_settings.stop_ids))
        return observe(trainer, self.batch(trainer.args.batch_size), shift=SHIFT)

    @property
    def two_updates(self) -> dict[str, Any]:
        "Settings of a run of two updates with a checkpoint after each, and the run's own schedule."
        return dict(
            max_steps=2,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=None,
            save_only_model=False,
            lr_scheduler_type=self.args.lr_scheduler_type,
            **self.sizes(LOOKED_AT),
        )

    @cached_property
    def short_run(self) -> tuple[PPOTrainer, Path]:
        "A run of two updates with a checkpoint after each, and its folder."
        trainer = self.beside(**self.two_updates)
        trainer.train()
        return trainer, trainer.output_dir

    def still_copy(self, episodes: int) -> PPOTrainer:
        "A trainer beside it that learns nothing."
        rate = None if self.args.value_learning_rate is None else 0.0
        epochs = min(self.args.num_ppo_epochs, 2)
        changes = dict(learning_rate=0.0, value_learning_rate=rate, num_ppo_epochs=epochs)
        return self.beside(own_optimizer=False, **changes, **self.sizes(episodes))


def text_in(answer: Any) -> str:
    "A reference answer as text: of several texts the first, of a conversation its last turn."
    if isinstance(answer, list) and answer:
        answer = answer[0] if isinstance(answer[0], str) else answer[-1]
    if isinstance(answer, dict):
        answer = answer.get("content")
    return answer if isinstance(answer, str) else ""


def weights_of(model: nn.Module | None) -> Tensors:
    "The weights, copied; none where there is no model."
    named = [] if model is None else model.named_parameters()
    return {name: p.detach().cpu().clone() for name, p in named}


def changes(before: Tensors, model: nn.Module | None) -> Tensors:
    "Which numbers of each weight are other ones now."
    return {name: x != before[name] for name, x in weights_of(model).items()}


def count_changes(before: Tensors, model: nn.Module) -> int:
    "How many numbers are other ones now."
    return sum(int(x.sum()) for x in changes(before, model).values())


def perturb(r: Rollout, size: float) -> Rollout:
    "Other old log-probs and values, as if the models had moved since."
    draw = torch.Generator().manual_seed(1)
    noise = lambda x: (torch.randn(x.shape, generator=draw) * size).to(x.device)
    real = r.mask.float()
    changed = r.with_(logprobs=r.logprobs + noise(real) * real)
    return changed if r.values is None else changed.with_(values=r.values + 2 * noise(real) * real)


def observe(trainer: PPOTrainer, batch: Any, shift: float) -> Observed:
    "Rollout, scores, advantages and update of a trainer beside the run, and all of it by hand."
    trainer.prepare()
    before = weights_of(trainer.pair)
    kl_coef = trainer.controller.value
    sampled = trainer.rollout(batch)
    kept = copy.deepcopy(sampled)
    scored = trainer.score(sampled)
    if shift:  # a judge that gives everything the same would hide where and how a score is paid
        draw = torch.Generator().manual_seed(2)
        noise = torch.randn(scored.scores.shape, generator=draw).to(scored.scores)
        noise = noise if scored.paid is None else noise * scored.paid
        scored = scored.with_(scores=scored.scores + noise)
    moments = trainer.moments.mean, trainer.moments.std
    r = trainer.advantages(scored)
    hand = read_by_hand(trainer, kept)
    trained_on = perturb(r, shift) if shift else r
    steps = watch(trainer, trained_on, 2 if shift else 0)
    metrics = trainer.update(trained_on)
    made = hand, metrics, steps, kl_coef, moments, count_changes(before, trainer.pair)
    return Observed(kept, scored, r, trained_on, *made, trainer.args)


@torch.no_grad()
def read_by_hand(trainer: PPOTrainer, r: Rollout) -> ByHand:
    "Every model on every episode alone."
    rows, temperature = by_hand.rows_of(r), trainer.args.temperature
    each = lambda model: [by_hand.forward_row(model, *row, temperature) for row in rows]
    with modes(trainer.pair, *frozen_models(trainer)), trainer.accelerator.autocast():
        trainer.pair.eval()
        policy = each(trainer.pair.policy)
        reference = reference_by_hand(trainer, each)
        values = [values_by_hand(trainer, *row) for row in rows]
        own = trainer.judges.tokenizer is not None  # it reads texts: see the rung of the judges
        scores = {
            name: torch.stack([by_hand.scores_along(judge.eval(), *row)[-1] for row in rows])
            for name, judge in trainer.judges.judges.items()
            if isinstance(judge, nn.Module) and not own and trainer.judges.level == "response"
        }
    none = trainer.pair.value is None
    return ByHand(policy, reference, None if none else values, scores)


def reference_by_hand(trainer: PPOTrainer, each: Any) -> list[by_hand.Reading]:
    "Readings of the reference model, or of the policy under peft's own switch."
    policy: Any = trainer.pair.policy
    if trainer.ref_model is not None:
        return trainer.reference(lambda model: each(model.eval()))
    if (name := trainer.args.ref_adapter_name) is None:
        with policy.disable_adapter():
            return each(policy)
    own = policy.active_adapter
    policy.set_adapter(name)
    readings = each(policy.eval())
    policy.set_adapter(own)
    return readings


def values_by_hand(trainer: PPOTrainer, prompt: Tensor, response: Tensor) -> Tensor:  # [n + 1]
    "Before each token of a response and after the last; nothing without a value model."
    value, policy = trainer.pair.value, by_hand.plain_model(trainer.pair.policy)
    if value is None:
        return torch.zeros(0)
    if isinstance(value, ValueHead):
        hidden = by_hand.hidden_after(policy.get_decoder(), prompt, response)
        return value.score(hidden.to(value.score.weight.dtype)).float()[len(prompt) - 1 :, 0]
    return by_hand.scores_along(value, prompt, response)


# ---- Gradients ----


def watch(trainer: Any, r: Rollout, count: int) -> list[Step]:
    "The list fills with the optimizer steps of the next update; the first `count` by hand as well."
    steps: list[Step] = []
    gradients, step = trainer.gradients, trainer.optimizer_step

    def record(model: nn.Module, given: Rollout, rows: Tensor) -> Any:
        steps.append(Step(rows))
        return gradients(model, given, rows)

    def step_and_compare(model: nn.Module) -> float:
        if len(steps) <= count:
            compare_gradients(trainer, r, steps[-1])
        return step(model)

    trainer.gradients, trainer.optimizer_step = record, step_and_compare
    return steps


def norm_of(grads: dict[int, Tensor]) -> float:
    "Norm of a gradient."
    return math.sqrt(sum(x.double().square().sum().item() for x in grads.values()))


def pop_gradients(trainer: PPOTrainer) -> dict[int, Tensor]:
    "The gradient that the models hold, which then hold none."
    grads = {id(p): p.grad for p in trainer.pair.parameters() if p.grad is not None}
    for p in trainer.pair.parameters():
        p.grad = None
    return grads


def compare_gradients(trainer: PPOTrainer, r: Rollout, step: Step) -> None:
    "Write into the step how far its gradient is from one that is computed by hand."
    theirs = pop_gradients(trainer)
    with modes(trainer.pair), trainer.accelerator.autocast():
        trainer.pair.eval()
        loss_by_hand(trainer, r, step.rows.tolist()).backward()
    ours = pop_gradients(trainer)
    for p in trainer.pair.parameters():
        p.grad = theirs.get(id(p))
    step.norm, step.norm_by_hand = norm_of(theirs), norm_of(ours)
    zero = torch.zeros(())
    away = {k: theirs.get(k, zero) - ours.get(k, zero) for k in theirs.keys() | ours.keys()}
    step.gap = norm_of(away) / max(step.norm_by_hand, 1e-12)


def loss_by_hand(trainer: PPOTrainer, r: Rollout, rows: list[int]) -> Tensor:
    "The loss of a mini-batch, from the models as they are."
    args, among, sums = trainer.args, r.mask[rows].sum(1).tolist(), []
    for i in rows:
        row = by_hand.rows_of(r.select([i]))[0]
        values = None if r.values is None else values_by_hand(trainer, *row)
        now = by_hand.forward_row(trainer.pair.policy, *row, args.temperature)
        sums.append(episode_sums(r, i, now, values, args, among))
    return by_hand.total_loss(sums, sum(among), args, trainer.controller.value)


def episode_sums(
    r: Rollout,
    i: int,
    now: by_hand.Reading,
    values: Tensor | None,  # by hand; None without a value model
    args: Any,
    among: list[int],  # tokens of each response of its mini-batch
) -> by_hand.Sums:
    "What one episode adds to the loss of a mini-batch."
    n = int(r.mask[i].sum())
    critic: tuple[Any, Any, Any] = (None, None, None)
    if values is not None:
        critic = values[:n], r.values[i, :n], r.returns[i, :n]
    signals = r.ref_logprobs[i, :n], r.logprobs[i, :n], r.advantages[i, :n]
    return by_hand.sums_of(now, *signals, critic, args, by_hand.weight_of(n, among, args))


# ---- How far two ways to compute a number are apart, and what chance may do ----


def by_chance(more: int, fewer: int) -> float:
    "How likely a fair coin shows one side so often, or more often."
    n = more + fewer
    return sum(math.comb(n, k) for k in range(more, n + 1)) / 2**n


def close(subject: Subject) -> float:
    "Most nats between two ways to compute a log-prob."
    return 1e-3 if subject.trainer.layout.in_float32(subject.trainer.model) else 0.1


def farthest(theirs: Tensor, ours: list[Tensor]) -> float:
    "The largest difference over real tokens."
    gaps = [(row[: len(x)].float() - x.to(row.device)).abs().max() for row, x in zip(theirs, ours)]
    worst = torch.stack(gaps).max().item()
    return worst if math.isfinite(worst) else math.inf


def relative_gap(a: Tensor, b: Tensor) -> float:
    "The largest difference, in units of the larger of 1 and the numbers themselves."
    a, b = a.double().cpu(), b.double().cpu()
    gaps = (a - b).abs() / b.abs().clamp(min=1.0)
    return gaps.max().item() if gaps.isfinite().all() else math.inf


def row_gap(theirs: Tensor, ours: Sequence[Sequence[float]]) -> float:
    "The same of rows without their padding, whose rest must be 0."
    rows = [relative_gap(theirs[i, : len(x)], torch.tensor(x)) for i, x in enumerate(ours) if x]
    rest = [theirs[i, len(row) :].abs().sum().item() for i, row in enumerate(ours)]
    return max(*rows, *rest)


def compare_by_hand(
    subject: Subject,
    gap: Callable[[Observed], float],  # of one observed update, from what is computed by hand
    nats: str = "",
    slack: float = 1.0,  # times the rounding of a log-prob
) -> Finding:
    "Both updates that were observed, against the same by hand."
    worst, limit = max(gap(x) for x in (subject.start, subject.off_policy)), slack * close(subject)
    return Finding(worst <= limit, f"{worst:.1e}{nats} apart at most (allowed {limit:g})")
