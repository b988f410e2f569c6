"""Before the GPU hours: a ladder of checks on a trainer's own models, data and settings, cheapest
first. Nothing of the run is touched."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import logging

from rlhf_nb.base.encoding import check_turns
from rlhf_nb.base.loading import no_bars
from rlhf_nb.base.random_state import random_state_kept
from rlhf_nb.diagnose import rungs_rollout, rungs_update
from rlhf_nb.diagnose.checks import Checks, Rung, climb, in_words
from rlhf_nb.diagnose.subject import LOOKED_AT, Subject
from rlhf_nb.sft import quiet_bars
from rlhf_nb.trainer import PPOTrainer

logger = logging.get_logger(__name__)
LADDER: tuple[Rung, ...] = (*rungs_rollout.RUNGS, *rungs_update.RUNGS)
COLUMNS = ("prompt", "chosen", "rejected")  # of the user's pairs


def check_pairs(
    pairs: Iterable[Any] | None,  # rows with prompt, chosen (good) and rejected (bad) answers
    name: str = "pairs",  # that an error calls them
) -> list[dict[str, Any]] | None:
    """The rows as dictionaries. Raises ValueError where there are none, a column is missing, or a
    prompt is neither text nor a conversation."""
    if pairs is None:
        return None
    rows = list(pairs)
    if not rows:
        raise ValueError(f"{name} has no rows: give at least one, with {', '.join(COLUMNS)}.")
    for i, row in enumerate(rows):
        names = list(row) if isinstance(row, dict) else []
        wrong = [x for x in COLUMNS if x not in names or (x != "prompt" and not is_text(row[x]))]
        if wrong:
            raise ValueError(
                f"{name}, row {i}: {wrong[0]} is missing or no text, and it has the columns "
                f"{', '.join(map(str, names)) or 'none'}: give {', '.join(COLUMNS)}, where chosen "
                "is a good answer and rejected a bad one."
            )
        if not is_text(row["prompt"]):
            check_turns(row["prompt"], f"{name}, row {i}: prompt")
    return rows


def is_text(x: Any) -> bool:
    "Whether it is a str."
    return isinstance(x, str)


class Price(NamedTuple):
    "What the whole ladder costs, about."

    seconds: float  # nan where it is not known
    memory: int  # bytes of the copies
    why: str = ""  # it is not known

    def __str__(self) -> str:
        time = f"about {self.seconds:.0f} s"
        if self.why:
            time = f"how long is not known, as a first update of a copy was stopped by {self.why}"
        return (
            f"preflight: {time}, and {rungs_update.gib(self.memory)} for copies of what is trained"
        )

    @property
    def expected(self) -> str:
        "For the note below the title."
        return "its price was not known" if self.why else f"{self.seconds:.0f} s were expected"


# What the ladder costs, in steps of LOOKED_AT episodes: 42 to 46 were measured for the trainer of
# page 57 on one thread. NEW_PROCESS: seconds to import transformers once more.
UNITS, NEW_PROCESS = 60.0, 8.0


def price_of(subject: Subject) -> Price:
    "From the time of one small rollout and update of a copy."
    seconds, why = math.nan, ""
    try:
        trainer = subject.still_copy(LOOKED_AT)
        trainer.prepare()
        start = time.perf_counter()
        trainer.step(subject.batch(trainer.args.batch_size))
        seconds = UNITS * (time.perf_counter() - start) + NEW_PROCESS
    except Exception as error:  # the rungs meet it again, and fail with it
        why = in_words(error)
    pair = subject.trainer.pair
    copies = 2 * rungs_update.bytes_of(pair) + 3 * rungs_update.bytes_of(pair, learned=True)
    return Price(seconds, copies, why)


def preflight(
    trainer: PPOTrainer,
    pairs: Iterable[Any] | None = None,  # prompt, chosen (good) and rejected (bad) answers, texts
    rungs: Sequence[Rung] = LADDER,
    quiet: bool = False,  # True: the price beforehand goes to the log
) -> Checks:
    """Is it wired up right? Checks of the trainer's own models, data and settings on copies of what
    is trained. Its weights, folder, random states and data order stay as they are. Raises
    ValueError without training prompts, under a launcher, and on pairs with other columns."""
    start, given = time.perf_counter(), check_pairs(pairs)
    of = "" if len(rungs) >= len(LADDER) else " of the whole ladder"
    subject = Subject(trainer, given)
    with random_state_kept(), quiet_bars(True), no_bars(quiet=True):
        try:
            price = price_of(subject)
            (logger.info if quiet else print)(f"{price}{of and ', the whole ladder'}")
            done = climb(rungs, subject)
        finally:
            subject.close()
    took = time.perf_counter() - start
    note = f"{trainer.describe()} Took {took:.0f} s; {price.expected}{of}."
    name = Path(str(trainer.args.output_dir)).name
    return replace(done, title=f"Preflight of {name}", note=note)
