"A ladder of checks on a trainer's own models, data and settings. It touches nothing of the run."

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from rlhf_nb.base.encoding import check_turns
from rlhf_nb.base.loading import no_bars
from rlhf_nb.base.random_state import random_state_kept
from rlhf_nb.diagnose import rungs_rollout, rungs_update
from rlhf_nb.diagnose.checks import Checks, Rung, climb
from rlhf_nb.diagnose.subject import Subject
from rlhf_nb.sft import quiet_bars
from rlhf_nb.trainer import PPOTrainer

LADDER: tuple[Rung, ...] = (*rungs_rollout.RUNGS, *rungs_update.RUNGS)
COLUMNS = ("prompt", "chosen", "rejected")  # of the user's pairs


def check_pairs(pairs: Iterable[Any] | None, name: str = "pairs") -> list[dict[str, Any]] | None:
    "The rows as dictionaries. Raises ValueError on none, or where a column or a prompt is wrong."
    if pairs is None:
        return None
    rows = list(pairs)
    if not rows:
        raise ValueError(f"{name} has no rows: give at least one, with {', '.join(COLUMNS)}.")
    for i, row in enumerate(rows):
        names = list(row) if isinstance(row, dict) else []
        texts = [x for x in names if x == "prompt" or isinstance(row[x], str)]
        wrong = [x for x in COLUMNS if x not in texts]
        if wrong:
            raise ValueError(
                f"{name}, row {i}: {wrong[0]} is missing or no text, and it has the columns "
                f"{', '.join(map(str, names)) or 'none'}: give {', '.join(COLUMNS)}, where chosen "
                "is a good answer and rejected a bad one."
            )
        if not isinstance(row["prompt"], str):
            check_turns(row["prompt"], f"{name}, row {i}: prompt")
    return rows


def preflight(
    trainer: PPOTrainer,
    pairs: Iterable[Any] | None = None,  # prompt, chosen (good) and rejected (bad) answers, texts
    rungs: Sequence[Rung] = LADDER,
    quiet: bool = False,  # True: no bar of progress
    since: float | None = None,  # of time.perf_counter: when what it took began; None: now
) -> Checks:
    """Is it wired up right? Checks of the trainer's own models, data and settings on copies of what
    is trained. Its weights, folder, random states and data order stay as they are. Raises
    ValueError without training prompts, under a launcher, and on pairs with other columns."""
    since, given = since or time.perf_counter(), check_pairs(pairs)
    subject, on = Subject(trainer, given), Console(stderr=True)
    with random_state_kept(), quiet_bars(True), no_bars(quiet=True):
        try:
            shown = not quiet and (on.is_terminal or on.is_jupyter)
            bar = track(rungs, "checks", console=on, transient=True, disable=not shown)
            done = climb(bar, subject)
        finally:
            subject.close()
    note = f"{trainer.describe()} Took {time.perf_counter() - since:.0f} s."
    name = Path(str(trainer.args.output_dir)).name
    return replace(done, title=f"Preflight of {name}", note=note)
