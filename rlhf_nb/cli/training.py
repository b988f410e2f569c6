"""What sft, reward and ppo share: the output folder, and the end of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import Trainer, TrainingArguments

from rlhf_nb.base.files import whole_file
from rlhf_nb.base.terminal import harmless
from rlhf_nb.cli.models import no_bars
from rlhf_nb.sft import quiet_bars


@contextmanager
def in_folder(args: TrainingArguments, keep: bool = True) -> Iterator[None]:
    "A new output folder that is empty is removed: after an error, and where it is not to be kept."
    output, done = Path(args.output_dir or "."), False
    new = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        with no_bars(), quiet_bars(bool(args.disable_tqdm)):
            yield
        done = True
    finally:
        for folder in new if not (keep and done) else ():
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def checkpoint_of(args: TrainingArguments, resume: bool) -> str | bool | None:
    "Where to go on from: None for a fresh start, True for the last checkpoint, or a folder."
    start = args.resume_from_checkpoint
    if start in (None, "False"):
        return resume or None
    return start == "True" or start


def finish(
    trainer: Trainer,
    command: str,
    resume: bool,
    written: str,  # what the folder then holds, for the last line
    then: Callable[[], str] = lambda: "",  # runs after training; its text is added to `written`
) -> None:
    "Train, evaluate, save, and print what was written where."
    args, folder = trainer.args, Path(trainer.args.output_dir or ".")
    trainer.train(resume_from_checkpoint=checkpoint_of(args, resume))
    written += then()
    if args.eval_strategy != "no":
        trainer.evaluate()
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        with whole_file(folder / "trainer_state.json") as beside:
            trainer.state.save_to_json(str(beside))
        where = f"{written} in {folder}, every metric in {folder / 'trainer_state.json'}"
        print(harmless(f"rlhf-nb {command}: {trainer.state.global_step} steps; {where}"))
    trainer.accelerator.end_training()
    if args.world_size > 1:
        time.sleep(1)  # threads of the backend still want Python's lock for a moment
