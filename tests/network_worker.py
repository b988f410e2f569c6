"""What the ranks exchange in one update, as PyTorch's profiler sees it: network_worker.py FOLDER.
The first rank prints numbers added up and numbers gathered, as JSON."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.profiler import ProfilerActivity, profile

from rlhf_nb.trainer import PPOConfig, PPOTrainer

folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
deepspeed = "ACCELERATE_USE_DEEPSPEED" in os.environ  # use_cpu would turn it off, without a word
args = PPOConfig(
    str(folder / "out"),
    use_cpu=not deepspeed,
    ddp_backend="gloo",
    bf16=False,
    report_to="none",
    disable_tqdm=True,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    num_mini_batches=2,
    num_ppo_epochs=3,
    local_rollout_forward_batch_size=4,
    micro_batch_tokens=10**6,
    total_episodes=64,
    response_length=6,
    num_sample_generations=0,
    save_strategy="no",
)
if "ACCELERATE_USE_FSDP" in os.environ:  # Accelerate gives FSDP to GPUs only
    _ = args.device
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
trainer = PPOTrainer(
    args,
    model=str(folder / "base"),
    reward_model=str(folder / "scorer"),
    train_dataset=Dataset.from_dict(dict(prompt=[f"tell {i} of a" for i in range(64)])),
)
trainer.step()  # what happens once is over
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
    trainer.step()
numbers: Counter = Counter()
for event in seen.events():
    size = max((torch.Size(shape).numel() for shape in event.input_shapes if shape), default=0)
    if size > 200 and event.name in ("gloo:all_reduce", "gloo:all_gather"):  # less: metrics
        numbers[event.name] += size * (ranks if event.name == "gloo:all_gather" else 1)
if rank == 0:
    (folder / "numbers.json").write_text(json.dumps(numbers))
torch.distributed.barrier()
os._exit(0)
