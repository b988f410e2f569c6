"""A run on any number of processes, one of which may send itself SIGTERM in its third step:
python stopped_worker.py FOLDER KIND MOMENT, where MOMENT is never or stop."""

import json
import os
import signal
import sys
from pathlib import Path

from datasets import Dataset
from small_runs import QUIET
from transformers import TrainerCallback
from worker_runs import RANKS

from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import tiny_policy, train_tokenizer

folder, kind, moment = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
prompts = [f"{'so ' * (i % 4)}tell {i} of {chr(97 + i % 20)}" for i in range(24)]
tokenizer = train_tokenizer(prompts)
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
policy = tiny_policy(tokenizer, 0, max_position_embeddings=32, **sizes)
settings = dict(
    output_dir=str(folder),
    save_steps=99,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4 // RANKS,
    max_steps=5,
    learning_rate=1e-2,
    seed=5,
    **QUIET,
)


class Sends(TrainerCallback):
    "On one rank alone."

    def on_substep_end(self, args, state, control, **_):
        if moment == "stop" and state.global_step == 2 and args.process_index == RANKS - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def counts_a(prompts, responses, **columns):
    return [float(response.count("a")) for response in responses]


if kind == "ppo":
    args = PPOConfig(response_length=6, temperature=1.0, num_sample_generations=0, **settings)
    data = Dataset.from_dict(dict(prompt=prompts))
    trainer = PPOTrainer(args, tokenizer, policy, reward_model=counts_a, train_dataset=data)
else:
    data = Dataset.from_dict(dict(prompt=prompts, completion=prompts[::-1]))
    trainer = SFTTrainer(policy, SFTConfig(**settings), data, processing_class=tokenizer)
trainer.add_callback(Sends())
trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)
if trainer.is_world_process_zero():
    logs = [log for log in trainer.state.log_history if "lr" in log or "loss" in log]
    done = dict(steps=[log["step"] for log in logs], changes=trainer.changes)
    (folder / "done.json").write_text(json.dumps(done))
os._exit(0)
