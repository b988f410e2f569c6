"""How much of the package one default `trainer.step()` enters: functions, and lines as formatted.

    python benchmarks/step_size.py

A tiny Llama with a reward model, every setting at its default, one step by hand on a CPU, watched
by `sys.setprofile`. Lines are those of each named function of the package that was entered, its
signature and docstring counted, blank lines and comments not; a function inside another counts
with it. Prints a table a module, and one a method of the trainer with --functions.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from common import described_parser
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

import rlhf_nb
from rlhf_nb.models import scorer_from
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import train_tokenizer
from rlhf_nb.world import mini_tldr

PACKAGE = Path(rlhf_nb.__file__).parent


def tiny_trainer(folder: str, **settings: Any) -> PPOTrainer:
    "A Llama of two layers and its reward model; what is not given is at its default."
    world = mini_tldr(0, 160, 20, 40)
    tokenizer = train_tokenizer([*world["train"]["prompt"], *world["train"]["completion"]])
    set_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    policy = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer),
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **sizes,
        )
    )
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


def functions(seen: set[CodeType]) -> dict[tuple[str, str], int]:
    "(module, qualified name) -> lines, of named functions that are not inside another."
    named = [code for code in seen if "<" not in code.co_qualname]
    where = lambda code: str(Path(code.co_filename).relative_to(PACKAGE).with_suffix(""))
    return {(where(code), code.co_qualname): lines_of(code) for code in named}


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--functions", action="store_true", help="list every function too")
    with tempfile.TemporaryDirectory() as folder:
        counts = functions(entered(tiny_trainer(folder)))
    modules: dict[str, list[int]] = defaultdict(list)
    for (module, _), lines in counts.items():
        modules[module].append(lines)
    if parser.parse_args().functions:
        for (module, name), lines in sorted(
            counts.items(), key=lambda item: (item[0][0], -item[1])
        ):
            print(f"{lines:5} {module}.{name}")
    for module, sizes in sorted(modules.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(sizes):5} lines, {len(sizes):3} functions  {module}")
    print(f"{sum(counts.values()):5} lines, {len(counts):3} functions  in all")


if __name__ == "__main__":
    main()
