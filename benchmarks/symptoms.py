"""Runs that are flat, collapse or drift, for the page of symptoms.

    python benchmarks/symptoms.py --output benchmarks/results/symptoms.json

The small run of the bug museum (`rlhf_nb.exercises.museum`), ten updates of 64 answers, with one
setting changed, or one bug planted; its log for each seed. One thread, about 8 seconds a run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from bug_museum import COLUMNS
from common import described_parser, environment

from rlhf_nb.exercises.museum import BUGS, SETTINGS, imitator, run

RUNS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "learning rate / 10": dict(learning_rate=1e-4),
    "learning rate x 10": dict(learning_rate=1e-2),
    "learning rate x 10, target_kl": dict(learning_rate=1e-2, target_kl=0.03),
    "entropy bonus": dict(entropy_coef=0.05),
    "kl_coef x 10": dict(kl_coef=1.5),
    "kl_coef 0": dict(kl_coef=0.0),
    "values that do not learn": dict(value_learning_rate=1e-6),
    "score with a minus": dict(bug="sign_of_the_score"),
    "score with a minus, learning rate / 10": dict(bug="sign_of_the_score", learning_rate=1e-4),
}


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--under_load", action="store_true", help="say that other work ran beside")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    machine = environment(args.under_load)
    torch.set_num_threads(1)
    policy, logs = imitator(), {}
    for name, changes in RUNS.items():
        logs[name] = []
        for seed in args.seeds:
            more = dict(changes)
            bug = more.pop("bug", None)
            log, rollouts = run(policy, BUGS[bug] if bug else None, seed=seed, **more)
            spread = [float(r.raw_scores.std()) for r in rollouts]
            kept = log[sorted(COLUMNS & {*log})].assign(seed=seed, **{"score spread": spread})
            logs[name] += kept.round(4).to_dict("records")
        last = [line["objective/scores"] for line in logs[name] if line["episode"] == 640]
        print(f"{name}: {last}", flush=True)
    found = dict(environment=machine, settings=SETTINGS, changes=RUNS, logs=logs)
    args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
