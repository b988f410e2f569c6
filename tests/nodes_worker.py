"""What two machines agree on before they train, one process each: python nodes_worker.py."""

import os
from functools import partial
from pathlib import Path

import torch
from transformers import TrainingArguments

from rlhf_nb.base.sharding import on_ranks
from rlhf_nb.checkpoint import MANIFEST
from rlhf_nb.training.nodes import common_checkpoint, count_machines

rank = int(os.environ["RANK"])
os.environ |= dict(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
here, apart = Path(os.getcwd()) / "both", Path(os.getcwd()) / f"machine-{rank}"


def error_of(action):
    try:
        action()
    except (ValueError, OSError) as error:
        return str(error)


def machines(folder, by_first=False, **settings):
    args = TrainingArguments(str(folder), use_cpu=True, report_to="none", **settings)
    folder.mkdir(parents=True, exist_ok=True)
    return count_machines(args, by_first)


assert machines(here) == 2 and machines(apart, save_strategy="no") == 2
assert machines(apart, save_on_each_node=True) == 2
assert not any(path.name.startswith(".") for path in [*here.iterdir(), *apart.iterdir()])
for words, folder, settings in (
    (["do not share it", "save_on_each_node=True"], apart, {}),
    (["2 machines share it", "leave save_on_each_node out"], here, dict(save_on_each_node=True)),
    (["FSDP writes on the first"], apart, dict(save_on_each_node=True, by_first=True)),
):
    said = error_of(partial(machines, folder, **settings))
    assert said and all(word in said for word in words) and "\n" not in said, (words, said)


def add(*steps):
    for step in steps:
        (apart / f"checkpoint-{step}").mkdir()
        (apart / f"checkpoint-{step}" / MANIFEST).touch()


start = lambda start=True: common_checkpoint(apart, start, 2)
assert start() is True and start(None) is None  # nobody has one: what one machine would do
add(2)
add(*[10] * (rank == 0))
(apart / "checkpoint-12").mkdir()  # never finished
assert start() == str(apart / "checkpoint-2"), "not the last that both have"
assert start(True if rank == 0 else None) == str(apart / "checkpoint-2")
assert start(None if rank == 0 else True) is None
assert start(str(apart / "checkpoint-2")) == str(apart / "checkpoint-2")
said = error_of(lambda: start(str(apart / "checkpoint-10")))
assert "rank 0 has checkpoint-10 and rank 1, on another machine, no checkpoint" in said, said


def fails():
    if rank:
        raise ValueError("of rank 1")
    return "fine"


assert error_of(lambda: on_ranks(True, fails)) == "of rank 1"
assert on_ranks(rank == 0, fails) == "fine"
print("right", flush=True)
torch.distributed.barrier()
os._exit(0)
