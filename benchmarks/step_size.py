"""How much of the package one default `trainer.step()` enters: functions, and lines as formatted.

    python benchmarks/step_size.py

A tiny GPT-NeoX with a reward model, every setting at its default, one step on a CPU, watched
by `sys.setprofile`. Lines are those of each named function of the package that was entered, its
signature and docstring counted, blank lines and comments not; one inside another counts with it.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from common import described_parser

import rlhf_nb
from rlhf_nb.models import scorer_from
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import tiny_policy, train_tokenizer
from rlhf_nb.world import mini_tldr

PACKAGE = Path(rlhf_nb.__file__).parent


def tiny_trainer(folder: str, **settings: Any) -> PPOTrainer:
    "A GPT-NeoX of two layers and its reward model; what is not given is at its default."
    world = mini_tldr(0, 160, 20, 40)
    tokenizer = train_tokenizer([*world["train"]["prompt"], *world["train"]["completion"]])
    policy = tiny_policy(tokenizer, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    args = PPOConfig(folder, use_cpu=True, report_to="none", disable_tqdm=True, **settings)
    data, reward = world["train"].select_columns(["prompt"]), scorer_from(policy, 1)
    return PPOTrainer(args, tokenizer, policy, reward_model=reward, train_dataset=data)


def entered(trainer: PPOTrainer) -> set[CodeType]:
    "Code objects of the package that one step enters, comprehensions and lambdas among them."
    seen: set[CodeType] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            seen.add(frame.f_code)

    sys.setprofile(watch)
    try:
        trainer.step()
    finally:
        sys.setprofile(None)
    return seen


def lines_of(code: CodeType) -> int:
    "Its lines, without blank ones and those that hold a comment alone."
    source = inspect.getsource(code).splitlines()
    return sum(1 for line in source if line.strip() and not line.strip().startswith("#"))


def main() -> None:
    described_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = entered(tiny_trainer(folder))
    where = lambda code: str(Path(code.co_filename).relative_to(PACKAGE).with_suffix(""))
    named = [code for code in seen if "<" not in code.co_qualname]  # and not inside another
    counts = sorted((where(code), -lines_of(code), code.co_qualname) for code in named)
    for module, lines, name in counts:
        print(f"{-lines:5} {module}.{name}")
    print(f"{-sum(x[1] for x in counts):5} lines, {len(counts):3} functions in all")


if __name__ == "__main__":
    main()
