"""A verifiable reward: PPO and GRPO on one task of reasoning-gym, by pass@k on unseen words.

    python benchmarks/verifiable.py --seeds 3 --out benchmarks/results/verifiable.json
    python benchmarks/verifiable.py --quick            does it run? seconds

`spell_backward` with words of three letters; a point for the whole word, none for anything else. A
model of two layers first imitates answers, then learns from as many samples by each estimator.
pass@k (Chen et al. 2021, 2107.03374, eq. 1) from 64 sampled answers to each unseen word. It needs
reasoning-gym: pip install 'rlhf_nb[tasks]'.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from math import comb
from pathlib import Path
from typing import Any

import common  # noqa: F401  sets the environment
import torch

from rlhf_nb.masks import left_pad
from rlhf_nb.rollout import sample
from rlhf_nb.sampling import Sampling
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import tiny_policy, train_bpe_tokenizer
from rlhf_nb.training.tasks import task_points, task_rows

SAMPLES, KS = 64, (1, 2, 4, 8, 16, 32, 64)
GROUPS = dict(gae=1, grpo=8)  # answers to one word
QUIET: dict[str, Any] = dict(
    use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, logging_strategy="no"
)


def whole_words(prompts: Any, responses: Any, **columns: Any) -> list[float]:
    "1 for an answer that is right, 0 for any other."
    return [float(points == 1) for points in task_points(prompts, responses, **columns)]


def pass_at(k: int, right: int) -> float:
    "The chance that k of the SAMPLES answers hold a right one."
    return 1 - comb(SAMPLES - right, k) / comb(SAMPLES, k)


@torch.no_grad()
def pass_rates(policy: Any, tokenizer: Any, rows: Any, seed: int) -> list[float]:
    "pass@k, a mean over words, for each of KS."
    how = Sampling(4, tokenizer.pad_token_id, [tokenizer.eos_token_id])
    draw, found = torch.Generator().manual_seed(seed), []
    for row in rows:
        many = {name: [x] * SAMPLES for name, x in row.items()}
        ids = left_pad(tokenizer(many["prompt"])["input_ids"], tokenizer.pad_token_id)
        written = sample(policy, *ids, how, draw).response_ids
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        found.append(int(sum(whole_words(many.pop("prompt"), texts, **many))))
    return [sum(pass_at(k, right) for right in found) / len(found) for k in KS]


def run(seed: int, updates: int, passes: float, size: int) -> list[dict]:
    "pass@k of one start, and of what each estimator makes of it."
    rows = task_rows("spell_backward", seed=seed, size=size, test=size // 3, max_word_len=3)
    known = {prompt.split()[-1] for prompt in rows["train"]["prompt"]}
    unseen = rows["test"].filter(lambda row: row["prompt"].split()[-1] not in known)
    tokenizer = train_bpe_tokenizer(rows["train"]["prompt"], 258)
    start = tiny_policy(tokenizer, seed, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    of_start = SFTConfig(
        tempfile.mkdtemp(),
        num_train_epochs=passes,
        learning_rate=3e-3,
        per_device_train_batch_size=32,
        seed=seed,
        **QUIET,
    )
    pairs = rows["train"].select_columns(["prompt", "completion"])
    SFTTrainer(start, of_start, train_dataset=pairs, processing_class=tokenizer).train()
    note = dict(seed=seed, words=len(unseen))
    lines = [note | dict(policy="start", passed=pass_rates(start, tokenizer, unseen, seed))]
    for estimator, group in GROUPS.items():
        args = PPOConfig(
            tempfile.mkdtemp(),
            advantage_estimator=estimator,
            num_generations=group,
            total_episodes=updates * 256,
            per_device_train_batch_size=256,
            num_mini_batches=4,
            num_ppo_epochs=2,
            response_length=4,
            temperature=1.0,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            kl_coef=0.0,
            num_sample_generations=0,
            seed=seed,
            **(dict(vf_coef=0.5) if estimator == "gae" else {}),
            **QUIET,
        )
        policy, began = copy.deepcopy(start), time.perf_counter()
        trainer = PPOTrainer(
            args, tokenizer, policy, reward_model=whole_words, train_dataset=rows["train"]
        )
        curve = [trainer.step()["objective/raw_scores"] for _ in range(updates)]
        took = dict(updates=updates, seconds=round(time.perf_counter() - began), curve=curve)
        passed = pass_rates(policy, tokenizer, unseen, seed)
        lines.append(note | dict(policy=estimator, passed=passed) | took)
    for line in lines:
        told = "  ".join(f"@{k} {x:.3f}" for k, x in zip(KS, line["passed"]))
        print(f"seed {seed} {line['policy']:6} {told}  {line.get('seconds', 0)} s", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (2, 0.1, 300) if given.quick else (given.updates, 6, 1500)
    lines = [
        line for seed in range(1 if given.quick else given.seeds) for line in run(seed, *sizes)
    ]
    if given.out:
        given.out.write_text(json.dumps(dict(k=KS, runs=lines), indent=1) + "\n")


if __name__ == "__main__":
    main()
