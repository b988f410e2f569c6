"Where the completions of an evaluation go: a file, the console, the trackers, and their means."

from __future__ import annotations

from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from rlhf_nb.base.terminal import terminal_text
from rlhf_nb.training.reporting import report_table


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
    frame: pd.DataFrame,  # one row per completion, with its score
    lengths: list[int],
    stopped: list[bool],
    kind: str,  # "eval", "sample": of the names of metrics and file
    name: str,  # of the evaluation set, where there are several
) -> dict[str, float]:  # what was logged
    "Write, print and log completions of one evaluation set; returns their means."
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
        f"{prefix}_length": sum(lengths) / len(lengths),
        f"{prefix}_stopped": sum(stopped) / len(stopped),
    }
    trainer.log(dict(metrics))
    report_table(trainer, f"completions-{kind}{of_set}", frame)
    return metrics
