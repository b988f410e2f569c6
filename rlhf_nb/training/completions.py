"Where the completions of an evaluation go: a file, the console, the trackers, and their means."

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from rlhf_nb.base.terminal import terminal_text
from rlhf_nb.training.reporting import report_table


@dataclass(frozen=True)
class ScoredCompletion:
    "What a policy wrote to one prompt, and what it earned."

    prompt: str  # as the table shows it
    text: str  # without the stop token
    stopped: bool  # whether the stop token was reached
    length: int  # in tokens, with the stop token
    score: float


def print_table(
    frame: pd.DataFrame,
    title: str = "",
    rows: int = 5,
    console: Console | None = None,
) -> None:
    """The first rows in the terminal, by Rich. Nothing in a text is read as markup, and control
    characters are shown as escapes."""
    console = console or Console()
    table = Table(title=terminal_text(title, console) if title else None, show_lines=True)
    for name in frame.columns:
        table.add_column(
            terminal_text(str(name), console),
            justify="right" if pd.api.types.is_numeric_dtype(frame[name]) else "left",
            overflow="fold",
        )
    for row in frame.head(rows).itertuples(index=False):
        texts = [f"{x:+.2f}" if isinstance(x, float) else str(x) for x in row]
        table.add_row(*[terminal_text(text, console) for text in texts])
    console.print(table)


def report_completions(
    trainer: Any,
    completions: list[ScoredCompletion],
    kind: str,  # "eval", "sample": of the names of metrics and file
    name: str,  # of the evaluation set, where there are several
) -> dict[str, float]:  # what was logged
    "Write, print and log completions of one evaluation set; returns their means."
    frame = pd.DataFrame(
        [(x.prompt, x.text, x.score) for x in completions],
        columns=["query", "model response", "score"],
    )
    step, of_set = trainer.state.global_step, f"-{name}" if name else ""
    if trainer.is_world_process_zero():
        folder = trainer.output_dir / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        frame.to_csv(folder / f"update-{step:05d}-{kind}{of_set}.csv", index=False)
        if not trainer.args.disable_tqdm:
            print_table(frame, f"completions ({kind}) after update {step}{of_set}")
    prefix = f"{kind}_{name}" if name else kind
    metrics = {
        f"{prefix}_score": frame["score"].mean(),
        f"{prefix}_length": sum(x.length for x in completions) / len(completions),
        f"{prefix}_stopped": sum(x.stopped for x in completions) / len(completions),
    }
    trainer.log(dict(metrics))
    report_table(trainer, f"completions-{kind}{of_set}", frame)
    return metrics
