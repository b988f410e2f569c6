"""The loop in one file, nbs/labs/ppo_in_one_file.py, against the trainer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from small_runs import QUIET, RUN

from rlhf_nb.models import response_values, scorer_from, zero_head
from rlhf_nb.ppo import mini_batches
from rlhf_nb.tldr import gold_judge
from rlhf_nb.trainer import PPOConfig, PPOTrainer

FILE = Path(__file__).parent.parent / "nbs" / "labs" / "ppo_in_one_file.py"


def file_with(old: str = "", new: str = "") -> Any:
    "The file as a module, some text of it changed, its mini-batches in the trainer's order."
    text, one = FILE.read_text(), ModuleType("one")
    assert old in text
    exec(text.replace(old, new) if old else text, vars(one))
    one.mini_batches = lambda *sizes: mini_batches(*sizes[:-1], sizes[-1] * 4099)
    return one


def start(one: Any) -> tuple[Any, Any, Any, list]:
    "Settings, tokenizer, policy, and the posts of three updates of 8."
    args = one.arguments().parse_args(["--response_length", "12", "--batch_size", "8"])
    tokenizer = one.AutoTokenizer.from_pretrained(args.policy)
    policy = one.AutoModelForCausalLM.from_pretrained(args.policy, dtype=torch.float64)
    return args, tokenizer, policy, one.posts_of(3, args.batch_size)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> PPOTrainer:
    "After three updates."
    args, tokenizer, policy, batches = start(file_with())
    facts = {post["prompt"]: json.loads(post["facts"]) for batch in batches for post in batch}

    def gold(prompts, responses, **columns):
        return [gold_judge(x, facts[p]).gold for p, x in zip(prompts, responses)]

    known = PPOConfig.__dataclass_fields__.keys() - {"output_dir"}
    settings = {name: x for name, x in vars(args).items() if name in known}
    trainer = PPOTrainer(
        PPOConfig(
            str(tmp_path_factory.mktemp("run")),
            total_episodes=24,
            lr_scheduler_type="constant",
            **QUIET | RUN | settings,
        ),
        tokenizer,
        policy,
        reward_model=gold,
        value_model=zero_head(scorer_from(policy)),
        train_dataset=[dict(prompt=prompt) for prompt in facts],
    )
    for i, batch in enumerate(batches):
        torch.manual_seed(i)
        trainer.step([post["prompt"] for post in batch])
    return trainer


def gap_to(trainer: PPOTrainer, one: Any) -> float:
    """By how much of 1 + |x| log-probs and values differ. (Not the weights: the bias of a key has
    no gradient, and Adam makes steps of its rounding.)"""
    args, tokenizer, policy, batches = start(one)
    ppo = one.PPO(args, tokenizer, policy, None)
    for i, batch in enumerate(batches):
        torch.manual_seed(i)
        r = ppo.rollout([post["prompt"] for post in batch])
        ppo.advantages(r, one.score(ppo, batch, r))
        ppo.update(r, i)
    assert r["kl"].abs().max() > 0.01  # it moves
    with torch.no_grad():
        pairs = [(ppo.logprobs(x, r["rows"]) for x in (policy, trainer.policy))]
        pairs.append(response_values(x, *r["rows"]) for x in (ppo.value, trainer.value_model))
        return max(float(((a - b) / (1 + b.abs())).abs().max()) for a, b in pairs)


WRONG = {
    "": (),
    "targets of what is whitened": ("from(advantages, r", "from(whiten(advantages, mask), r"),
    "gradients that are not clipped": ("args.max_grad_norm))", "1e9))"),
    "a KL that is not charged": ("mask, args.kl_coef)", "mask, 0.0)"),
    "no penalty": ("args.missing_eos_penalty)", "0.0)"),
    "values one token late": ("[:, :-1]  # V in", "[:, 1:]  # V in"),
    "a mean over rows": (") / mask.sum()", ") / len(mask)"),
}


# catches: any line of the loop that does otherwise than the trainer, of which WRONG has some
@pytest.mark.parametrize("name", WRONG)
def test_its_first_updates_are_the_trainers(name, trainer):
    gap = gap_to(trainer, file_with(*WRONG[name]))
    assert gap > 1e-4 if name else gap < 1e-12


# catches: a reader who scrolls, a trainer behind the loop
def test_it_is_short_and_imports_the_core_alone():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 200
    ours = {*re.findall(r"^from rlhf_nb\.(\S+) import", text, re.M)}
    core = "fast_logprobs gae kl losses masks models ppo rollout sampling shaping tldr world"
    assert ours == {*core.split()} and "import_module" not in text
