"""The bug museum: twelve real bugs as lines of this package that are replaced, and a small run to
plant them in. Spoilers: read the lab first."""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import random
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import pandas as pd
from torch.nn import Dropout
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback

from rlhf_nb.forward import Forward
from rlhf_nb.models import frozen, tiny_policy, train_tokenizer
from rlhf_nb.ppo import ppo_loss, update_metrics, with_advantages
from rlhf_nb.rollout import Rollout
from rlhf_nb.sft import SFTConfig, SFTTrainer, piece_ids
from rlhf_nb.shaping import shape_rewards
from rlhf_nb.tldr import mini_tldr
from rlhf_nb.trainer import PPOConfig, PPOTrainer

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
        truth = json.loads(known)["when"]
        scores.append(4.0 if truth == answer else 0.0)
    return scores


# ---- The bugs ----


class Bug(NamedTuple):
    "Lines of one function, and what they are in a program that has the bug."

    function: Callable
    right: str
    wrong: str


BUGS = dict(  # by what is wrong, in the order of the lab's cases
    sign_of_the_score=Bug(
        shape_rewards,
        "    return non_score_rewards + torch.where(paid, scores[:, None], 0.0), non_score_rewards",
        "    return non_score_rewards - torch.where(paid, scores[:, None], 0.0), non_score_rewards",
    ),
    filler_on_padding=Bug(
        update_metrics,
        "total(real(-r.logprobs)) / episodes",
        "total(-r.logprobs.masked_fill(~r.mask, 1.0)) / episodes",
    ),
    stop_is_padding=Bug(piece_ids, "[(stop, stop)]", "[(stop, -100)]"),
    old_is_new=Bug(
        ppo_loss,
        "    clip = cfg.cliprange, cfg.cliprange_high\n",
        "    clip = cfg.cliprange, cfg.cliprange_high\n"
        "    r = r.with_(logprobs=now.logprobs.detach())\n",
    ),
    dropout_in_the_reference=Bug(
        frozen, "copy.deepcopy(model).eval()", "copy.deepcopy(model).train()"
    ),
    part_of_the_truth=Bug(
        right_day,
        "4.0 if truth == answer else 0.0",
        "4.0 if truth in answer or answer in truth else 0.0",
    ),
    whitened_targets=Bug(
        with_advantages,
        "gae(rewards, r.values, r.mask, cfg.gamma, cfg.lam, last_value)",
        "whiten(gae(rewards, r.values, r.mask, cfg.gamma, cfg.lam, last_value), r.mask)",
    ),
    kl_in_place=Bug(
        shape_rewards,
        """\
    non_score_rewards = -kl_coef * only_real(kl, mask)
    return non_score_rewards + torch.where(paid, scores[:, None], 0.0), non_score_rewards""",
        """\
    non_score_rewards = kl.mul_(-kl_coef)
    return kl.add_(torch.where(paid, scores[:, None], 0.0)), non_score_rewards""",
    ),
    score_on_padding=Bug(
        shape_rewards,
        "    paid = column == last_index(mask)[:, None]"
        "  # -1, which is no column, for a row without tokens",
        "    paid = column == (last_index(mask)[:, None] + 1).clamp(max=mask.shape[1] - 1)",
    ),
    another_temperature=Bug(
        Forward.__init__,
        "self.temperature, self.rows, self.tokens = temperature, rows, tokens",
        "self.temperature, self.rows, self.tokens = 1.0, rows, tokens",
    ),
    mean_of_means=Bug(
        PPOTrainer.gradients,
        "self.layout.backward(loss / tokens)",
        'self.layout.backward(loss / logged["tokens"] / len(parts))',
    ),
    sign_of_the_kl=Bug(
        shape_rewards,
        "non_score_rewards = -kl_coef * only_real(kl, mask)",
        "non_score_rewards = kl_coef * only_real(kl, mask)",
    ),
)


def rewritten(bug: Bug) -> tuple[str, str]:
    "The function's source, and the source with the bug in it."
    source = inspect.getsource(inspect.unwrap(bug.function))
    if source.count(bug.right) != 1:
        raise ValueError(
            f"{bug.function.__qualname__} has {source.count(bug.right)} times {bug.right!r}: the "
            "function was changed, so write the bug anew for its present source."
        )
    return source, source.replace(bug.right, bug.wrong)


def diff_of(bug: Bug) -> str:
    "The bug as a unified diff, as its answer shows it."
    right, wrong = (textwrap.dedent(text).splitlines() for text in rewritten(bug))
    return "\n".join(list(difflib.unified_diff(right, wrong, lineterm="", n=0))[3:])


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    "Inside, the package has the bug: the function runs other code, for whoever calls it."
    function: Any = inspect.unwrap(bug.function)
    made: dict[str, Any] = {}
    exec(textwrap.dedent(rewritten(bug)[1]), function.__globals__, made)
    whole = function.__code__
    function.__code__ = inspect.unwrap(made[function.__name__]).__code__
    try:
        yield
    finally:
        function.__code__ = whole


# ---- A run to plant them in ----

QUIET: dict[str, Any] = dict(
    use_cpu=True, report_to="none", disable_tqdm=True, seed=0, logging_steps=1
)
SETTINGS: dict[str, Any] = dict(
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
    trainer = SFTTrainer(
        policy,
        SFTConfig(
            tempfile.mkdtemp(),
            learning_rate=5e-3,
            per_device_train_batch_size=32,
            max_steps=160,
            save_strategy="no",
            **QUIET,
        ),
        world()["train"].select_columns(["prompt", "completion"]),
        processing_class=tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.model


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

    with planted(bug) if bug else nullcontext():
        trainer = Keeps(
            PPOConfig(tempfile.mkdtemp(), **{**QUIET, **SETTINGS, **changes}),
            tokenizer(),
            copy.deepcopy(policy).requires_grad_(True),
            reward_model=reward,
            train_dataset=world()["train"].select_columns(["prompt", "facts"]),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    log = pd.DataFrame([log for log in trainer.state.log_history if "objective/kl" in log])
    log["names a day"] = [sum(" on " in text for text in r.responses) / len(r) for r in rollouts]
    log["entropy gap"] = (
        log["policy/entropy_avg"] - log["objective/entropy"] / log["tokens/response_length"]
    )
    return log, rollouts


# ---- The line-up ----

SUSPECTS = dict(  # what a visitor may accuse, by the bug's name
    sign_of_the_score="the sign of the score in the reward",
    filler_on_padding="what the log counts on padding",
    stop_is_padding="the labels of supervised fine-tuning",
    old_is_new="the old log-probs in the ratio",
    dropout_in_the_reference="the mode of the reference",
    part_of_the_truth="the reward function's comparison",
    whitened_targets="what the value model is trained towards",
    kl_in_place="a tensor changed in place",
    score_on_padding="the token that the score is paid on",
    another_temperature="the temperature of the scoring pass",
    mean_of_means="how micro-batches are averaged",
    sign_of_the_kl="the sign of the KL in the reward",
)


def lineup(visit: int) -> list[int]:
    "The numbers of the cases in another order, the same for the same visit."
    return random.Random(visit).sample(range(1, len(BUGS) + 1), len(BUGS))


def verdict(
    number: int,  # of the case, from 1
    accused: str,  # one of SUSPECTS' texts
) -> str:
    "What a visitor is told: the diff where the accusation is right."
    name = list(BUGS)[number - 1]
    if SUSPECTS[name] != accused:
        return f"Not {accused}: with that bug, the curves would look otherwise."
    return f"Yes, {accused}. This is case {number}:\n{diff_of(BUGS[name])}"
