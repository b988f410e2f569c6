"""The runs of the bug museum, healthy and with each bug planted.

    python benchmarks/bug_museum.py --output benchmarks/results/bug_museum.json

Each bug is a wrong function in the place of a right one (`rlhf_nb.exercises.museum`), planted in a
small run of ten updates on the mini world, over several seeds; beside it runs the same program
without it. Keeps the log of every run, and the first answers of the last rollout of the first seed.
One thread, about 8 seconds a run on a 2 GHz core: 45 runs with the default seeds, and 36 of one
update.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from common import described_parser

from rlhf_nb.exercises.museum import BUGS, imitator, plant_bug, right_day, run

COLUMNS = {
    "episode",
    "names a day",
    "entropy gap",
    "objective/scores",
    "objective/raw_scores",
    "objective/kl",
    "objective/entropy",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "policy/grad_norm",
    "loss/value_avg",
    "val/explained_variance",
    "val/num_eos_tokens",
    "tokens/response_length",
}
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)  # of the 32 responses of a mini-batch
OF = {  # what differs from the plain run: in the run with the bug, and in the healthy one
    "sign_of_the_kl": dict(kl_estimator="k3"),
    "part_of_the_truth": dict(reward=right_day),
}


def one(policy: Any, bug: str | None, seed: int, **changes: Any) -> tuple[list, list]:
    "Log and answers of one run."
    log, rollouts = run(policy, BUGS[bug] if bug else None, seed=seed, **changes)
    last = rollouts[-1]
    each = zip(last.responses[:4], last.raw_scores.tolist(), last.mask.sum(1).tolist())
    answers = [dict(response=text, score=score, tokens=n) for text, score, n in each]
    return log[sorted(COLUMNS)].round(4).assign(seed=seed).to_dict("records"), answers


def gradient(policy: Any, bug: str | None, rows: int, seed: int) -> dict[str, Any]:
    "The first update's mean gradient norm, its mini-batches in micro-batches of so many responses."
    log, _ = run(
        policy,
        BUGS[bug] if bug else None,
        seed=seed,
        total_episodes=64,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=64 // rows,
        value_warmup_updates=0,
        num_ppo_epochs=1,
    )
    norm = round(float(log["policy/grad_norm"][0]), 5)
    return {"bug": bug, "responses a micro-batch": rows, "seed": seed, "policy/grad_norm": norm}


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    policy = imitator()
    with plant_bug(BUGS["stop_is_padding"]):
        without_stop = imitator()
    runs: dict[str, Any] = {}

    def add(name: str, policy: Any, bug: str | None, **changes: Any) -> None:
        found = [one(policy, bug, seed, **changes) for seed in args.seeds]
        runs[name] = dict(log=[line for log, _ in found for line in log], answers=found[0][1])
        print(name, *(f"{log[-1]['objective/scores']:.2f}" for log, _ in found), flush=True)

    add("healthy", policy, None)
    for bug, changes in OF.items():
        add(f"healthy beside {bug}", policy, None, **changes)
    for bug in BUGS:
        if bug == "stop_is_padding":
            add(bug, without_stop, None)
        else:
            add(bug, policy, bug, **OF.get(bug, {}))
    cut = [
        gradient(policy, bug, rows, seed)
        for bug in (None, "mean_of_means")
        for rows in MICRO_BATCHES
        for seed in args.seeds
    ]
    kept = dict(seeds=args.seeds, runs=runs, micro_batches=cut)
    args.output.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
