"""What the ranks exchange in one update, as PyTorch's profiler sees it: network_worker.py FOLDER.
The first rank prints numbers added up and numbers gathered, as JSON."""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from datasets import Dataset
from torch.profiler import ProfilerActivity, profile
from worker_runs import RANK, RANKS, arguments, leave

from rlhf_nb.trainer import PPOConfig, PPOTrainer

folder = Path(sys.argv[1])
sizes = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, num_mini_batches=2)
sizes |= dict(num_ppo_epochs=3, total_episodes=64, response_length=6, micro_batch_tokens=10**6)
sizes |= dict(local_rollout_forward_batch_size=4, num_sample_generations=0, save_strategy="no")
args = arguments(PPOConfig, folder / "out", ddp_backend="gloo", bf16=False, **sizes)
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
        numbers[event.name] += size * (RANKS if event.name == "gloo:all_gather" else 1)
if RANK == 0:
    (folder / "numbers.json").write_text(json.dumps(numbers))
leave()
