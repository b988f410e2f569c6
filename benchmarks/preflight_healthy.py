"""How often `rlhf-nb preflight` fails on runs that are healthy.

    python benchmarks/preflight_healthy.py --runs 300 --output benchmarks/results/NAME.json

A policy of letters after SFT; in turn a trained reward model, a rule, and a number that the text
alone decides. The seed draws prompts and settings too. Seeds below 60 also save and load, which
takes most of the time.
"""

import random
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import HERE, environment, finish, parse, parser_of, table

sys.path.insert(0, str(HERE.parent / "tests"))
from datasets import Dataset
from small_models import letter_tokenizer
from small_runs import QUIET, RUN

from rlhf_nb.diagnose.preflight import LADDER, preflight
from rlhf_nb.exercises.museum import train_silently
from rlhf_nb.models import scorer_from
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import tiny_policy

KINDS = ("model", "rule", "noisy")
TOKENIZER = letter_tokenizer("abcdefghi ")
SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32)
SHORT = QUIET | dict(save_strategy="no", per_device_train_batch_size=16, learning_rate=1e-2)


def healthy(seed: int, folder: str) -> PPOTrainer:
    "A run that is wired up right, and not yet begun."
    draw, made = random.Random(seed), dict(seed=seed, output_dir=folder)
    letter = lambda likes: "c" if draw.random() < likes else draw.choice("abdefghi")
    text = lambda likes, n, gap=" ": gap.join(letter(likes) for _ in range(n))
    prompts = [text(0, draw.randint(1, 5), "") for _ in range(96)]
    good = [text(0.5, draw.randint(2, 4)) for _ in prompts]
    data = Dataset.from_dict(dict(prompt=prompts, completion=good))
    policy = tiny_policy(TOKENIZER, seed, **SIZES, initializer_range=draw.choice([0.05, 0.4, 0.8]))
    sft = SFTConfig(**SHORT | made, max_steps=draw.choice([12, 24]))
    train_silently(SFTTrainer(policy, sft, data, processing_class=TOKENIZER))
    bad = lambda: draw.choice(["a", text(0, 3), text(0.5, 9)])
    number = lambda text: random.Random(f"{seed}{text}").gauss(0, 1)
    judges: dict[str, Any] = dict(
        model=scorer_from(tiny_policy(TOKENIZER, 1000 + seed, **SIZES), seed),
        rule=lambda p, r, **_: [x.count("c") - 0.1 * len(x) for x in r],
        noisy=lambda p, r, **_: [number(a + x) + x.count("c") for a, x in zip(p, r)],
    )
    if (kind := KINDS[seed % 3]) == "model":
        pairs = [dict(prompt=p, chosen=g, rejected=bad()) for p, g in zip(prompts, good)] * 2
        how, rows = RewardConfig(**SHORT | made, max_steps=24), Dataset.from_list(pairs)
        train_silently(RewardTrainer(judges[kind], how, rows, processing_class=TOKENIZER))
    steps: dict[str, Any] = dict(num_mini_batches=draw.choice([1, 2]), num_ppo_epochs=2)
    steps |= dict(per_device_train_batch_size=draw.choice([4, 8]), total_episodes=640)
    steps |= dict(learning_rate=draw.choice([3e-4, 1e-3, 3e-3]), response_length=8)
    args = PPOConfig(**QUIET | RUN | made | steps, save_strategy="no")
    return PPOTrainer(args, TOKENIZER, policy, None, judges[kind], train_dataset=data)


def main(words: list[str] | None = None) -> dict:
    parser = parser_of(__doc__, "preflight_healthy")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    asked = parse(parser, words)
    machine, runs = environment(asked.under_load), []
    for seed in range(asked.seed, asked.seed + (3 if asked.quick else asked.runs)):
        with TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = time.perf_counter()
            rungs = [x for x in LADDER if seed < 60 or not x.name.startswith("state: ")]
            done = preflight(healthy(seed, str(Path(folder, "run"))), rungs=rungs, quiet=True)
            failed = {x.name: x.measured for x in done.checks if x.state == "failed"}
            took = round(time.perf_counter() - start, 2)
            runs.append(dict(seed=seed, kind=KINDS[seed % 3], failed=failed, seconds=took))
            print(runs[-1], flush=True)
    names = ["any", *sorted({name for one in runs for name in one["failed"]})]
    of = lambda kind: [
        [*x["failed"]] + ["any"] * bool(x["failed"]) for x in runs if x["kind"] == kind
    ]
    rows = [[x, *(f"{sum(x in y for y in of(k))} of {len(of(k))}" for k in KINDS)] for x in names]
    shown = table("Checks that failed, by what scores", ["", *KINDS], rows)
    return finish(dict(environment=machine, checks=[], runs=runs), asked, shown)


if __name__ == "__main__":
    main()
