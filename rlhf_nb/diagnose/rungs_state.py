"Rungs on what is kept: a saved policy in a new process, a resumed run, room on disk and device."

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from rlhf_nb.diagnose import by_hand
from rlhf_nb.diagnose.checks import Found, Rung, not_here
from rlhf_nb.diagnose.subject import Subject
from rlhf_nb.trainer import PPOTrainer

GREEDY = 16  # tokens
READER = Path(__file__).with_name("reload.py")


def greedy(policy: Any, prompts: list[list[int]], device: Any) -> list[list[int]]:
    "The likeliest next tokens, a row at a time and without a cache."
    written = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(GREEDY):
            with torch.no_grad():
                logits = policy(input_ids=torch.tensor([ids], device=device)).logits
            ids.append(int(logits[0, -1].argmax()))
        written.append(ids[len(prompt) :])
    return written


def base_of_adapter(policy: Any) -> str | None:
    "Where an adapter's base model can be loaded from; None: nowhere."
    name = policy.get_base_model().name_or_path
    return name if name and (Path(name).exists() or "/" in name) else None


def reload(subject: Subject) -> Found:
    "The text that a saved policy writes in a new process."
    trainer = subject.trained[0]
    policy = trainer.policy
    adapter = hasattr(policy, "peft_config") and not subject.args.save_merged
    if adapter and base_of_adapter(policy) is None:
        return not_here("the adapter's base model was made in memory: no process can load it")
    folder = subject.folder / "saved"
    trainer.save_model(str(folder))
    room = max(1, subject.positions - GREEDY)
    prompts = [p.tolist()[-room:] for p, _ in by_hand.rows_of(subject.start.sampled)[:2]]
    policy.eval()
    ours, device = greedy(policy, prompts, trainer.args.device), str(trainer.args.device)
    given = json.dumps(dict(folder=str(folder), prompts=prompts, tokens=GREEDY, device=device))
    words = [sys.executable, str(READER), given]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        return Found(False, f"the new process stopped: {done.stderr.strip().splitlines()[-1]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    same = sum(a == b for a, b in zip(ours, theirs["ids"]))
    shown = theirs["texts"][0]
    return Found(same == len(ours), f"{same} of {len(ours)} texts are the same: {shown!r}")


def resume(subject: Subject) -> Found:
    "Two updates at once, against one, a checkpoint, and another one."
    whole, folder = subject.trained
    again = subject.beside(**subject.two_updates)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    pairs = zip(whole.pair.named_parameters(), again.pair.named_parameters())
    other = [name for (name, a), (_, b) in pairs if not torch.equal(a, b)]
    logs = [log_of(trainer) for trainer in (whole, again)]
    unlike = [k for k, x in logs[0].items() if logs[1].get(k) != x]
    size = sum(1 for _ in whole.pair.parameters())
    found = f"{size - len(other)} of {size} weight tensors and {len(logs[0]) - len(unlike)} of "
    found += f"{len(logs[0])} metrics are bit for bit the same"
    odd = (other + unlike)[:3]
    return Found(not other and not unlike, found + (f"; not {', '.join(odd)}" if odd else ""))


def log_of(trainer: PPOTrainer) -> dict[str, float]:
    "The last update's metrics, without its times."
    last = [log for log in trainer.state.log_history if "objective/kl" in log][-1]
    timed = ("time/", "tokens/per_second", "eps")
    return {k: x for k, x in last.items() if not k.startswith(timed)}


def files_in(folder: Path) -> int:
    "Bytes."
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def checkpoints_of(args: Any, updates: int) -> int:
    "How many a run leaves at most."
    if str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
        return 0
    every = args.save_steps if args.save_steps >= 1 else max(1, args.save_steps * updates)
    made = math.ceil(updates / every)
    return min(made, args.save_total_limit or made) + 1  # one is written before another goes


def nearest(path: Path) -> Path:
    "The folder, or the first above it that is there."
    return next(x for x in (path, *path.absolute().parents) if x.exists())


def room(subject: Subject) -> Found:
    "Disk for the checkpoints and rollouts of the whole run; memory for weights and optimizer."
    args, folder = subject.args, subject.trained[1]
    updates = max(1, args.num_total_batches)
    disk = files_in(folder / "checkpoint-1") * checkpoints_of(args, updates)
    disk += files_in(subject.folder / "saved") if (subject.folder / "saved").exists() else 0
    if args.save_rollouts:
        r = subject.start.rollout
        kept = files_in_file(r.save(subject.folder / "one.safetensors"))
        disk += int(kept / len(r) * args.batch_size * updates)
    free = shutil.disk_usage(nearest(Path(str(args.output_dir)))).free
    memory, there = memory_of(subject), memory_there(subject)
    found = f"disk {gib(disk)} of {gib(free)} free; memory {gib(memory)} of {gib(there)} for "
    found += "weights, gradients and optimizer, activations not counted"
    return Found(disk < free and memory < there, found)


def files_in_file(path: Path) -> int:
    "Bytes."
    return path.stat().st_size


def gib(size: float) -> str:
    "Bytes as people write them."
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def bytes_of(*models: Any) -> int:
    "Of weights."
    return sum(
        p.numel() * p.element_size() for m in models if m is not None for p in m.parameters()
    )


def memory_of(subject: Subject) -> int:
    "Weights of all models; gradient and two moments of those that learn."
    trainer = subject.trainer
    learn = [p for p in trainer.pair.parameters() if p.requires_grad]
    trained = sum(p.numel() * p.element_size() for p in learn)
    models = trainer.pair, trainer.ref_model, *trainer.judges.models
    return bytes_of(*models) + 3 * trained


def memory_there(subject: Subject) -> int:
    "Of the device."
    device = subject.trainer.args.device
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


RUNGS = (
    Rung(
        "state: resume",
        resume,
        "one update, a checkpoint, and one more update are bit for bit two updates (definition; on "
        "a GPU, kernels that are not deterministic may differ)",
        "what the checkpoint holds: value model, optimizer, random states, controller, running "
        "moments, position in the data; a reward function that draws random numbers",
    ),
    Rung(
        "state: reload",
        reload,
        "a saved policy writes the same greedy text in a new process (definition)",
        "tied weights, an adapter's base, a dtype or config that is not saved, resized embeddings",
        needs=("state: resume",),
    ),
    Rung(
        "state: room",
        room,
        "less than there is: checkpoints (save_total_limit), rollouts, models with gradients and "
        "Adam's two moments (1412.6980)",
        "save_steps, save_total_limit, save_rollouts; rlhf-nb ppo --dry_run plans memory with "
        "activations",
    ),
)
