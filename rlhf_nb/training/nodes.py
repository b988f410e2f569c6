"""A run on several machines: whether they share a disk, what all of them resume from, where models
are written, and what is said when a machine is gone."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import PreTrainedModel, TrainingArguments

from rlhf_nb.base.sharding import between_ranks, is_first_rank, of_first_rank, on_ranks
from rlhf_nb.checkpoint import MANIFEST
from rlhf_nb.training.folders import checkpoints, what_is_safe


def count_machines(
    args: TrainingArguments,
    by_first: bool,  # the first rank writes what all of them hold in parts, as under FSDP
) -> int:
    """How many there are. Raises ValueError where they would write over each other's files, or
    where parts of a checkpoint would be on another machine."""
    machines = sum(gather_object([args.local_process_index == 0]))
    if machines == 1:
        return 1
    folder = Path(str(args.output_dir))
    mark = folder / f".{of_first_rank(uuid.uuid4().hex)}"
    on_ranks(is_first_rank(), mark.touch)
    shared = all(gather_object([mark.exists()]))
    on_ranks(is_first_rank(), mark.unlink)
    each, problem = args.save_on_each_node, ""
    if each and shared:
        problem = "share it, and would write over each other's files: leave save_on_each_node out"
    elif each and by_first:
        problem = (
            "do not share it, and FSDP writes on the first alone: put it on a disk that they "
            "share, and leave save_on_each_node out"
        )
    elif not each and not shared and args.save_strategy != "no":
        problem = (
            "do not share it, so that parts of a checkpoint would be missing: put it on a disk "
            "that they share, or set save_on_each_node=True, or save_strategy='no'"
        )
    if problem:
        raise ValueError(
            f"save_on_each_node is {each} and output_dir is {folder}; the {machines} machines "
            f"{problem}."
        )
    return machines


def common_checkpoint(
    folder: Path,  # output_dir
    start: str | bool | None,  # True: the last one in output_dir
    machines: int,
) -> str | bool | None:
    """What to go on from; of several machines' checkpoints the last that all have. Raises
    ValueError on all ranks where a machine lacks it."""
    first = of_first_rank(start)  # a script may look for it on each machine
    start = first and (start or first)
    if not start or machines == 1:
        return start
    candidates = checkpoints(folder) if start is True else [Path(start)]
    of_ranks = gather_object([[path.name for path in candidates if (path / MANIFEST).is_file()]])
    common = [name for name in of_ranks[0] if all(name in names for names in of_ranks)]
    if common:
        return str(folder / common[-1]) if start is True else start
    for rank, names in enumerate(of_ranks):
        if names != of_ranks[0]:
            has = [(theirs or ["no checkpoint"])[-1] for theirs in (of_ranks[0], names)]
            raise ValueError(
                f"resume_from_checkpoint is {start} and output_dir is {folder}: there, rank 0 has "
                f"{has[0]} and rank {rank}, on another machine, {has[1]}. Put the folder on a disk "
                "that all machines share, or train with save_on_each_node=True."
            )
    return start


@contextmanager
def writing_models(here: bool) -> Iterator[None]:
    """Inside, this rank writes the models that it saves. transformers leaves that to the first rank
    of all, whatever save_on_each_node is."""
    theirs: Any = PreTrainedModel.should_save_on_this_rank
    saver: Any = PreTrainedModel
    if here:
        saver.should_save_on_this_rank = lambda model, is_main_process: is_main_process
    try:
        yield
    finally:
        saver.should_save_on_this_rank = theirs


@contextmanager
def lost_ranks(args: TrainingArguments, step: Callable[[], int]) -> Iterator[None]:
    "Raises ConnectionError, in one line, where the connection to another rank is gone."
    try:
        yield
    except RuntimeError as error:
        if args.world_size == 1 or not between_ranks(error):
            raise
        reason = re.split(r"\.\s|\n", str(error))[0]
        raise ConnectionError(
            f"rank {args.process_index} of {args.world_size} lost the others after step {step()}: "
            "one of them has ended, or did not answer within ddp_timeout; see what it printed "
            f"last ({reason}). {what_is_safe(Path(str(args.output_dir)))}"
        ) from error
