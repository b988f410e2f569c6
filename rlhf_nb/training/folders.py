"""A run's folder: never two runs mixed in it, and what is left of one that ends early."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import nn
from transformers import TrainerState, TrainingArguments
from transformers.utils import logging

from rlhf_nb.base.files import DEMO_MARK, check_place, checkpoints, no_disk, unwritten, written_to
from rlhf_nb.base.sharding import (
    between_ranks,
    full_shape,
    is_first_rank,
    run_on_ranks,
    take_from_first_rank,
)
from rlhf_nb.base.terminal import harmless, let_go_of_gone
from rlhf_nb.checkpoint import MANIFEST, PARTIAL, stage_folder

logger = logging.get_logger(__name__)
LOCK, OWNER = "_run.lock", "_run.owner"
LOGS = ("metrics.jsonl", "trainer_state.json", "rollouts", "completions")
WEIGHTS = ("model*.safetensors*", "adapter_model*", "pytorch_model*.bin*")
MODEL = (*WEIGHTS, "*config.json", "tokenizer*", "README.md", MANIFEST, "value")  # and vocabularies
WROTE: dict[Path, Any] = {}  # folder or log -> args of the trainer that wrote it last
SAVED: dict[Path, Any] = {}  # folder -> args of the trainer that saved a model there
ONE_THREAD, TRAINING = threading.RLock(), list[Path]()  # the folders of the one that holds it
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP}  # a disk that has no locks
ENDS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
AGAIN = 2.0  # seconds after which a second signal counts: a launcher passes the first one on


# ---- Whose it is ----


@contextmanager
def one_thread(folder: Path) -> Iterator[None]:
    "Raises RuntimeError where another thread trains: both would draw torch's random numbers."
    if not ONE_THREAD.acquire(blocking=False):
        raise RuntimeError(
            f"{folder} cannot train while another thread trains in {TRAINING[-1]}: both draw from "
            "torch's random numbers. Train one after the other, or in processes of their own."
        )
    TRAINING.append(folder)
    try:
        yield
    finally:
        TRAINING.pop()
        ONE_THREAD.release()


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """The folder is this run's alone meanwhile. Raises ValueError where another run is in it. The
    system drops the lock of a process that ends, however it ends."""
    with written_to(folder / LOCK):
        lock, owner = FileLock(folder / LOCK), folder / OWNER
    try:
        lock.acquire(blocking=False)
    except Timeout:
        holder = owner.read_text(encoding="utf-8") if owner.exists() else "another process"
        raise ValueError(
            f"another run is in {folder} ({holder}): wait for its end, or give another output_dir."
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning(f"{folder / LOCK} cannot be locked ({error}): two runs are not noticed.")
    try:
        with written_to(owner):
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # Windows keeps an open file; the folder may be gone
            (folder / LOCK).unlink(missing_ok=True)
            owner.unlink(missing_ok=True)
        lock.release()


def check_shared_disk(args: TrainingArguments) -> None:
    "Raises ValueError on all ranks where machines do not share output_dir."
    folder = Path(str(args.output_dir))
    if args.save_on_each_node:
        raise ValueError(
            f"save_on_each_node is True and output_dir is {folder}: a run has one folder. Leave "
            "save_on_each_node out, and put output_dir on a disk that all machines share."
        )
    if sum(gather_object([args.local_process_index == 0])) == 1:
        return
    mark = folder / f".{take_from_first_rank(uuid.uuid4().hex)}"
    run_on_ranks(is_first_rank(), mark.touch)
    shared = all(gather_object([mark.exists()]))
    run_on_ranks(is_first_rank(), mark.unlink)
    if not shared and args.save_strategy != "no":
        raise ValueError(
            f"output_dir is {folder}, which the machines of this run do not share: parts of a "
            "checkpoint would be missing. Put it on a disk that all machines share, or set "
            "save_strategy='no'."
        )


# ---- What is in it ----


def last_checkpoint(folder: Path) -> Path | None:
    "The newest one that was finished; a line names each that was not."
    unfinished = [*folder.glob(f"checkpoint-*{PARTIAL}")]
    candidates = checkpoints(folder)
    while candidates and not (candidates[-1] / MANIFEST).is_file():
        unfinished.append(candidates.pop())
    for path in unfinished:
        logger.warning(f"{path} was never finished, and is skipped.")
    return candidates[-1] if candidates else None


def what_is_safe(folder: Path) -> str:
    "A sentence for someone whose run has just ended early."
    if (folder.parent / DEMO_MARK).is_file():  # its folder goes, and what was before stays
        return f"Finished stages are in {folder.parent}: the same rlhf-nb demo command goes on."
    complete = [path for path in checkpoints(folder) if (path / MANIFEST).is_file()]
    if complete:
        return (
            f"The last whole checkpoint is {complete[-1]}: train(resume_from_checkpoint=True), "
            "--resume on the command line, goes on from it."
        )
    return f"There is no whole checkpoint in {folder}, so there is nothing to resume."


def start_of(
    folder: Path,  # output_dir
    resume: str | bool | None,
    overwrite: bool,
    earlier: Iterable[Path] = (),  # logs that were there before this run
) -> str | None:
    """The checkpoint to begin with; None: a fresh run, in a folder without an older one. Raises
    ValueError where there is no such checkpoint, or an older run has left some."""
    if resume is True:
        last = last_checkpoint(folder)
        if last is None:
            raise ValueError(f"{what_is_safe(folder)} Start without resume_from_checkpoint.")
        return str(last)
    if resume and not Path(resume).is_dir():
        text = f"resume_from_checkpoint is {str(resume)!r}, and there is no such folder"
        raise ValueError(f"{text}: give a checkpoint's path, or True (--resume) for the last one.")
    if resume and Path(resume).resolve().parent == folder.resolve():
        return str(resume)
    older = checkpoints(folder)
    if older and not overwrite:
        raise ValueError(
            f"{folder} holds an earlier run ({', '.join(path.name for path in older)}). To delete "
            "it and begin again, set overwrite_output_dir=True (--overwrite_output_dir); to go on, "
            "call train(resume_from_checkpoint=True) (--resume); or give another output_dir."
        )
    if foreign := [p for p in older if p.is_symlink() or not (p / MANIFEST).is_file()]:
        raise ValueError(f"{foreign[0]} was not written by this package: move it, or delete it.")
    for path in older:
        shutil.rmtree(path)
        logger.warning(f"overwrite_output_dir: deleted {path}.")
    move_aside(folder, {*earlier, *model_in(folder)})
    return str(resume) if resume else None


def logs_in(folder: Path) -> list[Path]:
    "What runs add to from step to step, beside their checkpoints."
    return [path for path in map(folder.joinpath, LOGS) if path.exists()]


def earlier_logs(folder: Path, trainer: Any) -> list[Path]:
    "Logs that a trainer which begins there has not written, by hand or in a run before."
    by_hand = trainer.state.log_history or getattr(trainer, "update_count", 0)
    last = WROTE.get(folder.resolve(), trainer.args if by_hand else None)
    for path in (folder, *map(folder.joinpath, LOGS)):
        WROTE[path.resolve()] = trainer.args
    return trainer.earlier if last is trainer.args else logs_in(folder)


def claim(place: Path, trainer: Any) -> None:
    """Rollouts or completions that a trainer has not written are moved aside before it writes by
    hand. Raises ValueError where another run is in the folder."""
    if WROTE.get(place.resolve()) is trainer.args:
        return

    def begin() -> None:
        with run_lock(place.parent):
            move_aside(place.parent, [place])

    run_on_ranks(trainer.args.should_save, begin)
    WROTE[place.resolve()] = WROTE[place.parent.resolve()] = trainer.args
    trainer.earlier = [path for path in trainer.earlier if path != place]


def model_in(folder: Path) -> set[Path]:
    "The files of a saved model; none where there are no weights."
    found = any(any(folder.glob(pattern)) for pattern in WEIGHTS)
    return {path for pattern in MODEL for path in folder.glob(pattern)} if found else set()


def move_aside(folder: Path, paths: Iterable[Path]) -> None:
    "What an earlier run has left goes into a folder of its own, and a line names it."
    if paths := sorted(path for path in paths if path.exists()):
        aside = beside(folder / "earlier")
        aside.mkdir()
        for path in paths:
            path.rename(aside / path.name)
        names = ", ".join(path.name for path in paths)
        logger.warning(f"{names} of an earlier run: now in {aside}.")


@contextmanager
def saving(folder: Path, owner: Any, staged: bool) -> Iterator[Path]:
    """Where to write a model: beside that of the folder, unless what is there is staged already.
    When it is whole, it takes its place, weights first; one that another wrote is moved aside."""
    if staged:
        yield folder
        return
    with stage_folder(folder / "_save") as beside:
        yield beside
    new = sorted((folder / "_save").iterdir(), key=lambda path: path.suffix != ".safetensors")
    targets = [folder / path.name for path in new]
    if SAVED.get(folder.resolve()) is not owner or model_in(folder) - {*targets}:
        move_aside(folder, {*model_in(folder), *targets})
    for path, target in zip(new, targets):
        if target.is_dir():
            shutil.rmtree(target)
        path.rename(target)
    (folder / "_save").rmdir()
    SAVED[folder.resolve()] = owner


def check_folder(args: TrainingArguments, models: Mapping[str, Any]) -> None:
    """output_dir is made absolute, whatever chdir comes later. Raises ValueError for a name that
    is no text, and where a run would write over, or delete, what an input was loaded from."""
    check_place()
    args.output_dir = os.path.abspath(str(args.output_dir))
    folder = Path(args.output_dir).resolve()
    if str(folder) != str(folder).encode(errors="ignore").decode():
        raise ValueError(f"output_dir is {str(folder)!a}, which is no UTF-8: give another name.")
    deleted = checkpoints(folder) if getattr(args, "overwrite_output_dir", False) else []
    for name, model in models.items():
        parts = model.modules() if isinstance(model, nn.Module) else ()
        for source in {str(x) for p in parts if (x := getattr(p, "name_or_path", None))}:
            read = Path(source).resolve()
            if read.is_dir() and {read, read.parent} & {folder, *deleted}:
                raise ValueError(
                    f"output_dir is {folder}, and {name} was loaded from {source}: the run would "
                    "write over it. Give another output_dir."
                )
    if args.should_save:
        with written_to(folder):
            folder.mkdir(parents=True, exist_ok=True)


def find_best(state: TrainerState, folder: Path) -> None:
    "The best checkpoint of a resumed run, whose folder may have moved since."
    best = folder / Path(state.best_model_checkpoint or "none").name
    if best.is_dir():
        state.best_model_checkpoint = str(best)


def beside(path: Path) -> Path:
    "The path with a number that is free."
    return next(p for n in count(1) if not (p := path.with_name(f"{path.name}-{n}")).exists())


def set_aside(folder: Path, resume: Path) -> None:
    "Checkpoints later than the one that a run begins with are of other steps: they are renamed."
    name = resume.name if resume.resolve().parent == folder.resolve() else ""
    names = [path.name for path in checkpoints(folder)]
    for later in names[names.index(name) + 1 :] if name in names else []:
        aside = (folder / later).rename(beside(folder / f"{later}.later"))
        logger.warning(f"{folder / later} is later than {name}: it is {aside.name} now.")


# ---- A run that ends early ----


class Stop:
    """Ctrl-C, SIGTERM and SIGHUP, while a run trains in the main thread: the first lets the step
    finish, for a checkpoint; a second one, or the first of a run that saves none, ends at once."""

    def __init__(self, saves: bool):
        self.saves, self.number, self.since = saves, 0, 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        usual: dict[int, Any] = dict.fromkeys(ENDS, signal.SIG_DFL)
        usual[signal.SIGINT] = signal.default_int_handler
        if threading.current_thread() is threading.main_thread():
            for number, handler in usual.items():
                if signal.getsignal(number) is handler:
                    self.before[number] = signal.signal(number, self.hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def hear(self, number: int, frame: FrameType | None) -> None:
        "A signal has come."
        if self.number and time.monotonic() - self.since < AGAIN:
            return
        if number not in (signal.SIGINT, signal.SIGTERM):  # SIGHUP: the terminal may be gone
            let_go_of_gone(1, 2)
        if self.number or not self.saves:
            self.number = number
            raise KeyboardInterrupt
        self.number, self.since = number, time.monotonic()
        if is_first_rank():
            name = signal.Signals(number).name
            line = f"\n{name}: stopping after this step, with a checkpoint; again: at once.\n"
            os.write(2, line.encode())


@contextmanager
def report_early_end(folder: Path, stop: Stop) -> Iterator[None]:
    """An interrupt and a disk that takes no more end with one line that names what is safe. Raises
    KeyboardInterrupt, SystemExit (143 after SIGTERM, 129 after SIGHUP) or OSError."""
    try:
        with writing(folder), stop:
            yield
    except KeyboardInterrupt as error:
        saves = "" if stop.saves else " No checkpoint is written, since save_strategy is 'no'."
        text = f"stopped{f' {error}' if str(error) else ' in the middle of a step'}.{saves} "
        text += what_is_safe(folder)
        if stop.number in ENDS:
            if is_first_rank():
                os.write(2, harmless(f"\n{signal.Signals(stop.number).name}: {text}\n").encode())
            raise SystemExit(128 + stop.number) from error
        raise KeyboardInterrupt(text) from error


@contextmanager
def writing(
    folder: Path,  # of the run
    to: str | Path = "",  # where a model is saved
    model: nn.Module | None = None,
) -> Iterator[None]:
    "Raises OSError, with what is safe, where a disk takes no more."
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not no_disk(error):
            raise
        saved, cause = getattr(model, "policy", model), error.__cause__ or error
        learn = [p for p in saved.parameters() if p.requires_grad] if saved is not None else []
        room = sum(math.prod(full_shape(p)) * p.element_size() for p in learn) / 2**20
        needs = f" {to} needs {room:,.1f} MiB." if to else ""
        raise OSError(f"{unwritten(error)}{needs} {what_is_safe(folder)}") from cause


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
