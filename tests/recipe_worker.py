"""One update as a user's script would make it, under whatever `accelerate launch` has set up:
recipe_worker.py FOLDER."""

import os
import sys

import transformers.training_args
from datasets import Dataset
from small_runs import likes_a

from rlhf_nb.trainer import PPOConfig, PPOTrainer

# the recipes ask for bf16; transformers wants to see a GPU first, unless use_cpu is set
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
folder, gpu = sys.argv[1], os.environ.get("RECIPE_ON") == "gpu"
deepspeed = "ACCELERATE_USE_DEEPSPEED" in os.environ  # use_cpu would turn it off, without a word
device = dict(ddp_backend="gloo", bf16=True) if deepspeed else dict(use_cpu=True)
args = PPOConfig(
    folder + "/out",
    **{} if gpu else device,
    report_to="none",
    per_device_train_batch_size=2,
    num_ppo_epochs=1,
    total_episodes=4,
    response_length=3,
    num_sample_generations=0,
    logging_steps=1,
    save_strategy="no",
)
trainer = PPOTrainer(
    args,
    model=folder + "/base",
    ref_model=folder + "/base",
    reward_model=likes_a,
    value_model=folder + "/scorer",
    train_dataset=Dataset.from_dict(dict(prompt=[f"tell {i} of a" for i in range(4)])),
)
trainer.train()
assert trainer.state.global_step == 1
trainer.accelerator.wait_for_everyone()
os._exit(0)  # gloo's threads now and then abort a process that takes itself apart
