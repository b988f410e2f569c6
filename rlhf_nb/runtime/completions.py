"Where the completions of an evaluation go: a file, the console, the trackers, and their means."

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_nb.evaluate import Completions, completions_table, print_table
from rlhf_nb.runtime.reporting import report_table


def report_completions(
    trainer: Any,
    completions: Completions,
    scores: Sequence[float],
    prefix: str,  # of the metrics
    name: str,  # of the evaluation set, where there are several
) -> dict[str, float]:  # what was logged
    "Write, print and log completions of one evaluation set; returns their means."
    frame, step = completions_table(completions, list(scores)), trainer.state.global_step
    prefix, of_set = (f"{prefix}_{name}", f"-{name}") if name else (prefix, "")
    if trainer.is_world_process_zero():
        folder = trainer.output_dir / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        frame.to_csv(folder / f"update-{step:05d}{of_set}.csv", index=False)
        if not trainer.args.disable_tqdm:
            print_table(frame, f"completions after update {step}{of_set}")
    metrics = {
        f"{prefix}_score": frame["score"].mean(),
        f"{prefix}_length": sum(completions.lengths) / len(completions.lengths),
        f"{prefix}_stopped": sum(completions.stopped) / len(completions.stopped),
    }
    trainer.log(dict(metrics))
    report_table(trainer, f"completions{of_set}", frame)
    return metrics
