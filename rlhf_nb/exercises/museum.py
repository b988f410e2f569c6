"""The bug museum: twelve real bugs as wrong functions in the place of right ones, and a small run
to plant them in. Spoilers: read the lab first."""

from __future__ import annotations

import copy
import inspect
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, NamedTuple

import pandas as pd
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import Dropout
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, Trainer

from rlhf_nb import gae, models, ppo, sft, shaping, update
from rlhf_nb.forward import Forward, Forwarded
from rlhf_nb.masks import whiten
from rlhf_nb.rollout import Rollout
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import tiny_policy, train_tokenizer
from rlhf_nb.world import mini_tldr

# ---- Two rewards ----


def tells_more(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
    "A point for each of four facts that a summary so much as mentions."
    words = ("on", "because", "feel", "should")
    return [float(sum(word in text.split() for word in words)) for text in responses]


def right_day(
    prompts: list[str], responses: list[str], facts: list[str], **columns: Any
) -> list[float]:
    "Four points for a summary that names the day on which it happened."
    scores = []
    for text, known in zip(responses, facts):
        answer = text.partition(" on ")[2].partition(" ")[0].strip(".,")
        scores.append(4.0 if same_day(answer, json.loads(known)["when"]) else 0.0)
    return scores


def same_day(answer: str, truth: str) -> bool:
    return answer == truth


# ---- The bugs ----


class Bug(NamedTuple):
    "A wrong function in the place of a right one, which it is given first."

    owner: Any  # the module or class that defines the right one
    name: str
    wrong: Callable[..., Any]
    suspect: str = ""  # what a visitor of the lab accuses

    @property
    def source(self) -> str:
        "The wrong function, as its answer shows it."
        text = inspect.getsource(self.wrong)
        return text[text.index("def ") :].rstrip()


@contextmanager
def plant_bug(bug: Bug) -> Iterator[None]:
    "Inside, the package has the bug: whoever calls the function by its name runs the wrong one."
    right = getattr(bug.owner, bug.name)

    @wraps(right)
    def wrong(*given: Any, **more: Any) -> Any:
        return bug.wrong(right, *given, **more)

    owners: list[Any] = [bug.owner] if isinstance(bug.owner, type) else [*sys.modules.values()]
    owners = [x for x in owners if getattr(x, "__dict__", {}).get(bug.name) is right]
    try:
        for owner in owners:
            setattr(owner, bug.name, wrong)
        yield
    finally:
        for owner in owners:
            setattr(owner, bug.name, right)


BUGS: dict[str, Bug] = {}  # by what is wrong, in the order of the lab's cases


def case(owner: Any, name: str, suspect: str) -> Callable[[Callable], Callable]:
    "Makes the function below it the next case."
    return lambda wrong: BUGS.setdefault(wrong.__name__, Bug(owner, name, wrong, suspect)).wrong


@case(shaping, "shape_rewards", "the sign of the score in the reward")
def sign_of_the_score(right: Any, scores: Tensor, *given: Any) -> Any:
    return right(-scores, *given)


@case(update, "update_metrics", "what the log counts on padding")
def filler_on_padding(right: Any, r: Rollout, *given: Any) -> Any:
    metrics = right(r, *given)
    filled = r.logprobs.masked_fill(~r.mask, 1.0)
    metrics["objective/entropy"] = -filled.double().sum().item() / len(r)
    return metrics


@case(sft, "label_tokens", "the labels of supervised fine-tuning")
def stop_is_padding(right: Any, rows: Any, tokenizer: Any) -> Any:
    hide = lambda label: -100 if label == tokenizer.eos_token_id else label
    encoded = right(rows, tokenizer)
    return [(ids, [hide(label) for label in labels], merged) for ids, labels, merged in encoded]


@case(ppo, "ppo_loss", "the old log-probs in the ratio")
def old_is_new(right: Any, now: Forwarded, r: Rollout, *given: Any, **more: Any) -> Any:
    return right(now, r.with_(logprobs=now.logprobs.detach()), *given, **more)


@case(models, "copy_frozen", "the mode of the reference")
def dropout_in_the_reference(right: Any, model: Any) -> Any:
    return right(model).train()


@case(sys.modules[__name__], "same_day", "the reward function's comparison")
def part_of_the_truth(right: Any, answer: str, truth: str) -> bool:
    return answer in truth or truth in answer


@case(gae, "returns_from", "what the value model is trained towards")
def whitened_targets(right: Any, advantages: Tensor, values: Tensor, mask: Tensor) -> Any:
    return right(whiten(advantages, mask), values, mask)


@case(shaping, "shape_rewards", "a tensor changed in place")
def kl_in_place(right: Any, scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Any:
    paid, _ = right(scores, torch.zeros_like(kl), mask, kl_coef)
    penalty = kl.mul_(-kl_coef)
    return kl.add_(paid), penalty


@case(shaping, "shape_rewards", "the token that the score is paid on")
def score_on_padding(right: Any, scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Any:
    one_more = torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], dim=1)
    return right(scores, kl, one_more, kl_coef)


@case(Forward, "__init__", "the temperature of the scoring pass")
def another_temperature(right: Any, self: Any, temperature: float = 1.0, *given: Any) -> None:
    right(self, 1.0, *given)


@case(PPOTrainer, "gradients", "how micro-batches are averaged")
def mean_of_means(right: Any, self: Any, model: Any, r: Rollout, rows: Tensor) -> Any:
    parts = self.forward.split(r, rows, self.args.per_device_train_batch_size)
    sums = [right(self, model, r, part) for part in parts]  # each divides by its own tokens
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad / len(parts)
    return {name: sum(part[name] for part in sums) for name in sums[0]}


@case(shaping, "shape_rewards", "the sign of the KL in the reward")
def sign_of_the_kl(right: Any, scores: Tensor, kl: Tensor, *given: Any) -> Any:
    return right(scores, -kl, *given)


# ---- A run to plant them in ----

QUIET = dict[str, Any](use_cpu=True, report_to="none", disable_tqdm=True, seed=0, logging_steps=1)
SETTINGS = dict[str, Any](
    total_episodes=640,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=4,
    num_mini_batches=2,
    response_length=40,
    temperature=0.7,
    kl_coef=0.15,
    missing_eos_penalty=3.0,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    value_learning_rate=5e-3,
    value_warmup_updates=2,
    vf_coef=1.0,
    cliprange_value=1.0,
    num_sample_generations=0,
    save_strategy="no",
)


@cache
def world() -> Any:
    return mini_tldr(train=2600, validation=1, test=16)


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    train = world()["train"]
    return train_tokenizer(p + c for p, c in zip(train["prompt"], train["completion"]))


def imitator() -> PreTrainedModel:
    "A small policy that has learned to write summaries of a shy kind."
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=2)
    policy = tiny_policy(tokenizer(), **sizes)
    for layer in policy.modules():
        if isinstance(layer, Dropout):
            layer.p = 0.1
    return imitate(policy, tokenizer(), world()["train"], 160, 5e-3)


def imitate(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Dataset,
    steps: int,  # of 32 rows
    learning_rate: float,
) -> PreTrainedModel:
    "The policy, fine-tuned on the completions of the rows."
    sizes = dict(per_device_train_batch_size=32, max_steps=steps)
    settings = QUIET | sizes | dict(learning_rate=learning_rate, save_strategy="no")
    args = SFTConfig(tempfile.mkdtemp(), **settings)
    columns = rows.select_columns(["prompt", "completion"])
    train_silently(SFTTrainer(policy, args, columns, processing_class=tokenizer))
    return policy


def train_silently(trainer: Trainer) -> list[dict[str, float]]:
    "Train without a line printed for each log. Returns what PPO logged, a dict an update."
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [log for log in trainer.state.log_history if "objective/kl" in log]


def run(
    policy: PreTrainedModel,
    bug: Bug | None = None,
    reward: Callable = tells_more,
    **changes: Any,  # to SETTINGS
) -> tuple[pd.DataFrame, list[Rollout]]:
    "A run on a copy of the policy: its log, a line an update, and its rollouts."
    rollouts: list[Rollout] = []

    class Keeps(PPOTrainer):
        def update(self, r: Rollout) -> Any:
            rollouts.append(r)
            return super().update(r)

    with plant_bug(bug) if bug else nullcontext():
        trainer = Keeps(
            PPOConfig(tempfile.mkdtemp(), **{**QUIET, **SETTINGS, **changes}),
            tokenizer(),
            copy.deepcopy(policy).requires_grad_(True),
            reward_model=reward,
            train_dataset=world()["train"].select_columns(["prompt", "facts"]),
        )
        log = pd.DataFrame(train_silently(trainer))
    log["names a day"] = [sum(" on " in text for text in r.responses) / len(r) for r in rollouts]
    log["entropy gap"] = (
        log["policy/entropy_avg"] - log["objective/entropy"] / log["tokens/response_length"]
    )
    return log, rollouts


# ---- The line-up ----

SUSPECTS = {name: bug.suspect for name, bug in BUGS.items()}  # what a visitor may accuse


def lineup(visit: int) -> list[int]:
    "The numbers of the cases in another order, the same for the same visit."
    return random.Random(visit).sample(range(1, len(BUGS) + 1), len(BUGS))


def verdict(
    number: int,  # of the case, from 1
    accused: str,  # one of SUSPECTS' texts
) -> str:
    "The answer to a visitor: the wrong function where the accusation is right."
    name = list(BUGS)[number - 1]
    if SUSPECTS[name] != accused:
        return f"Not {accused}: with that bug, the curves would look otherwise."
    return f"Yes, {accused}. This is case {number}:\n{BUGS[name].source}"
