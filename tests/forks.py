"""Programs run as processes of their own, without seconds of imports for each: a server that has
imported everything forks them, and they are alone from there on.

What a launcher does beyond that is tested with a launcher: torchrun in
test_two_processes_killed.py, `accelerate launch` in test_two_processes_cli.py and
test_recipes_launch.py.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from subprocess import CompletedProcess

import yaml

RECIPES = Path(__file__).resolve().parents[1] / "rlhf_nb" / "recipes"

processes = multiprocessing.get_context("forkserver")
# Accelerate imports DeepSpeed wherever it is installed; a module that is not there is passed over.
PRELOADED = ["rlhf_nb.trainer", "rlhf_nb.reward", "rlhf_nb.sft", "peft", "deepspeed"]
processes.set_forkserver_preload(PRELOADED)


def import_and_freeze() -> None:
    """All that training imports, out of the garbage collector's sight: each train() of Accelerate's
    collects, which is most of the time of a tiny run."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.collect()
    gc.freeze()


def begin(program: str, words: list[str], folder: Path, output: str, env: dict[str, str]) -> None:
    "In the new process: its folder, environment, output into a file, and the program as a script."
    gc.freeze()  # what the server imported, see above
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = [program, *words]
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # as at the end of any program; multiprocessing leaves them out


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def layout(name: str) -> dict[str, str]:
    "What `accelerate launch` makes of one of the package's own files, for two processes on a CPU."
    if name == "ddp":
        return dict(ACCELERATE_USE_CPU="true")
    found = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    if name == "fsdp2":
        return dict(ACCELERATE_USE_FSDP="true") | {
            key.upper(): str(value).lower() if isinstance(value, bool) else str(value)
            for key, value in found["fsdp_config"].items()
        }
    of = {key: str(value).lower() for key, value in found["deepspeed_config"].items()}
    return dict(
        ACCELERATE_USE_DEEPSPEED="true",
        DS_ACCELERATOR="cpu",
        ACCELERATE_DEEPSPEED_ZERO_STAGE=of["zero_stage"],
        ACCELERATE_DEEPSPEED_ZERO3_INIT=of["zero3_init_flag"],
        ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL=of.get("zero3_save_16bit_model", "false"),
    )


def ranks_of(count: int) -> list[dict[str, str]]:
    "What torchrun puts into the environment of each process; nothing for one alone."
    if count == 1:
        return [{}]
    shared = dict(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
    )
    return [shared | dict(RANK=str(r), LOCAL_RANK=str(r)) for r in range(count)]


def run(
    program: str | Path, *words: str, folder: Path, ranks: int = 1, timeout: float = 900, **env: str
) -> CompletedProcess:
    """Run a program in `folder`, in `ranks` processes that know of one another, until all have
    ended: exit codes as `args`, the first that is not 0 as `returncode`, and what was written to
    either stream as `stdout`. Where one fails, the others get a minute to end too.
    """
    outputs = [folder / f"output-{rank}" for rank in range(ranks)]
    given = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="") | env
    started = [
        processes.Process(
            target=begin,
            args=(str(program), list(words), folder, str(output), given | own),
            daemon=True,
        )
        for output, own in zip(outputs, ranks_of(ranks), strict=True)
    ]
    for process in started:
        process.start()
    until = time.monotonic() + timeout
    while any(process.is_alive() for process in started) and time.monotonic() < until:
        next((p for p in started if p.is_alive()), started[0]).join(0.2)
        if any(process.exitcode for process in started):
            until = min(until, time.monotonic() + 60)
    for process in started:
        process.kill()
        process.join()
    codes = [process.exitcode for process in started]
    text = "".join(output.read_text() for output in outputs)
    return CompletedProcess(codes, next((code for code in codes if code), 0), text, text)
