"""Two processes under DDP, layers compiled or not: the same run. python compiled_worker.py FOLDER,
by torchrun."""

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from torch._dynamo.utils import counters

from rlhf_nb.trainer import PPOConfig, PPOTrainer

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])


def run(out: str, **more) -> tuple[dict, dict[str, torch.Tensor]]:
    """What two updates told, and the weights after them; rows of other lengths on each rank. Adam
    would make much of the last bit of a small gradient."""
    args = PPOConfig(
        str(folder / out),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=6,
        total_episodes=48,
        response_length=9,
        temperature=1.0,
        learning_rate=0.1,
        optim="sgd",
        num_ppo_epochs=2,
        num_sample_generations=0,
        micro_batch_tokens=40,
        **more,
    )
    data = Dataset.from_dict(dict(prompt=[f"tell {i} " * (1 + i % 3) for i in range(12)]))
    trainer = PPOTrainer(
        args, model=str(folder / "base"), reward_model=str(folder / "scorer"), train_dataset=data
    )
    torch.manual_seed(rank)
    told = [trainer.step() for _ in range(2)][-1]
    return {
        name: x for name, x in told.items() if not name.startswith(("time/", "tokens/per"))
    }, trainer.model.state_dict()


(plain, before), (quick, after) = (
    run("plain"),
    run("quick", torch_compile=True, torch_compile_backend="eager"),
)
assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"], counters
assert (
    list(before) == list(after)
    and max((before[name] - after[name]).abs().max() for name in before) <= 1e-6
)
for name, value in plain.items():
    assert abs(value - quick[name]) <= 1e-5, (name, value, quick[name])
if rank == 0:
    print("right", flush=True)
torch.distributed.barrier()
os._exit(0)  # all is asserted; gloo's threads now and then abort a process that takes itself apart
