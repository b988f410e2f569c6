"""Losses and metrics of 20 settings, two updates each: equal before and after a change?

    python benchmarks/same_numbers.py --write before.json      # on the old code
    python benchmarks/same_numbers.py --against before.json    # on the new code

A tiny GPT-NeoX with a reward model, on a CPU. Times are left out. Prints the largest difference of
each setting, and exits with 1 where one is above 1e-6.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import described_parser
from step_size import tiny_trainer

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "k2": dict(kl_estimator="k2"),
    "k3": dict(kl_estimator="k3"),
    "full": dict(kl_estimator="full"),
    "kl in loss": dict(kl_in="loss", kl_estimator="k3"),
    "adaptive": dict(kl_controller="adaptive", kl_target=1.0),
    "missing eos": dict(missing_eos_penalty=1.0, stop_token="eos"),
    "non eos": dict(non_eos_penalty=True, stop_token="eos"),
    "normalized": dict(normalize_scores=True, score_clip=2.0),
    "whitened": dict(whiten_rewards=True),
    "gamma": dict(gamma=0.95, lam=0.9),
    "bootstrap": dict(bootstrap_truncated=True),
    "mini-batches": dict(num_mini_batches=2, num_ppo_epochs=2),
    "accumulation": dict(per_device_train_batch_size=4, gradient_accumulation_steps=4),
    "entropy": dict(entropy_coef=0.01, cliprange_high=0.3),
    "shared trunk": dict(share_value_trunk=True),
    "rloo": dict(advantage_estimator="rloo", num_generations=2),
    "grpo": dict(advantage_estimator="grpo", num_generations=2),
    "reinforce_pp": dict(advantage_estimator="reinforce_pp"),
    "target_kl": dict(target_kl=0.01, temperature=1.0, learning_rate=1e-3),
}


def run(settings: dict[str, Any]) -> list[dict[str, float]]:
    "Metrics of two updates."
    common = dict(bf16=False, save_strategy="no", logging_steps=1, num_sample_generations=0)
    sizes = dict(
        per_device_train_batch_size=16, response_length=16, learning_rate=1e-3, max_steps=2
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny_trainer(folder, **common | sizes | settings)
        trainer.train()
        return [row for row in trainer.state.log_history if "objective/kl" in row]


def timed(name: str) -> bool:
    return name.startswith(("time/", "tokens/per_second")) or name == "eps"


def difference(old: list[dict[str, float]], new: list[dict[str, float]]) -> float:
    "The largest one; infinite where a metric is missing."
    if len(old) != len(new) or any(a.keys() ^ b.keys() for a, b in zip(old, new)):
        return math.inf
    pairs = ((a[name], b[name]) for a, b in zip(old, new) for name in a if not timed(name))
    return max(0.0 if x == y or (x != x and y != y) else abs(x - y) for x, y in pairs)


def main() -> int:
    parser = described_parser(__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: run(settings) for name, settings in SETTINGS.items()}
    if given.write:
        given.write.write_text(json.dumps(results))
    worst = 0.0
    if given.against:
        old = json.loads(given.against.read_text())
        for name, rows in results.items():
            print(f"{(gap := difference(old[name], rows)):.1e}  {name}")
            worst = max(worst, gap)
    return int(worst > 1e-6)


if __name__ == "__main__":
    sys.exit(main())
