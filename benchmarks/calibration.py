"""Accuracy and calibration of the reward models of finished runs of `rlhf-nb demo`, on the pairs
held out from their training.

    python benchmarks/calibration.py runs/demo [more runs]

Accuracy is against the gold order, without noise; calibration against the labels, which are drawn
with noise as people's are: how often the preferred answer is the labelled one, by how sure the
model says it is. Prints a table and writes JSON and a plot under benchmarks/results/.
"""

import argparse
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from datasets import load_from_disk

from rlhf_nb.models import load_scorer, load_tokenizer
from rlhf_nb.reward import (
    calibration,
    calibration_error,
    calibration_plot,
    pair_accuracy,
    score_texts,
)

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, help="folders of finished runs of `rlhf-nb demo`"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, scores = [], []
    for run in options.runs:
        model, tokenizer, pairs = (
            load_scorer(str(run / "reward")),
            load_tokenizer(str(run / "reward")),
            load_from_disk(str(run / "pairs"))["test"],
        )
        chosen, rejected = (
            score_texts(model, tokenizer, pairs["prompt"], pairs[name])
            for name in ("chosen", "rejected")
        )
        scores.append((chosen, rejected))
        rows.append(
            dict(
                run=run.name,
                pairs=len(pairs),
                accuracy=pair_accuracy(model, tokenizer, pairs).float().mean().item(),
                labels=(chosen > rejected).float().mean().item(),
                calibration_error=calibration_error(calibration(chosen, rejected)),
            )
        )
        print(
            "{run}: {pairs} pairs, gold order {accuracy:.1%}, labels {labels:.1%}, expected "
            "calibration error {calibration_error:.3f}".format(**rows[-1])
        )
    for name in ("accuracy", "calibration_error"):
        found = [row[name] for row in rows]
        print(
            f"{name}: mean {statistics.mean(found):.3f}, from {min(found):.3f} to {max(found):.3f}"
        )
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / "calibration.json").write_text(json.dumps(rows, indent=1))
    calibration_plot(calibration(*(torch.cat(part) for part in zip(*scores)))).savefig(
        results / "calibration.png", dpi=120
    )


if __name__ == "__main__":
    main()
