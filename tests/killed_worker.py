"""A PPO run on two processes in which one may be killed: python killed_worker.py FOLDER OUT MOMENT,
where MOMENT is never, update-N or rollout-N. OUT with turns in its name: something answers."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from small_runs import OF_RANKS, TOLD, likes_a, untimed
from transformers import TrainerCallback
from worker_runs import arguments, leave

from rlhf_nb.environments import guess_number
from rlhf_nb.trainer import PPOConfig, PPOTrainer

folder, out, moment = Path(sys.argv[1]), Path(sys.argv[1], sys.argv[2]), sys.argv[3]
where, _, number = moment.partition("-")


def die() -> None:
    "No farewell, no clean-up: what the kernel does to a process that takes too much memory."
    if trainer.args.process_index != 1:
        return
    (out / f"killed-{moment}").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


class Axe(TrainerCallback):
    "Before the second optimizer step of an update."

    steps = 0

    def on_pre_optimizer_step(self, args, state, control, **_):
        Axe.steps = Axe.steps + 1 if trainer.update_count == int(number or -1) else 0
        if where == "update" and Axe.steps == 2:
            die()


def before_forward(*_) -> None:
    "In the middle of writing: after the third token."
    before_forward.calls = (
        before_forward.calls + 1
        if trainer.update_count == int(number or -1) and not torch.is_grad_enabled()
        else 0
    )
    if where == "rollout" and before_forward.calls == 3:
        die()


saves = dict(save_strategy="steps", save_steps=2, gradient_accumulation_steps=1)
how = dict(num_mini_batches=2, total_episodes=24, normalize_scores=True, kl_controller="adaptive")
turns = dict(environment_factory=guess_number(15, 3, 36, ("a", "b", "c")), max_turns=3)
turns = turns if "turns" in out.name else {}
how |= dict(response_length=2) if turns else {}
args = arguments(PPOConfig, out, **OF_RANKS | saves | how)
trainer = PPOTrainer(
    args,
    model=str(folder / "base"),
    reward_model=likes_a,
    train_dataset=Dataset.from_dict(dict(prompt=TOLD)),
    callbacks=[Axe()],
    **turns,
)
before_forward.calls = 0
trainer.model.policy.register_forward_pre_hook(before_forward)
trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")) or None)
if args.process_index == 0:
    logs = [untimed(log) for log in trainer.state.log_history]
    torch.save({k: x.clone() for k, x in trainer.model.state_dict().items()}, out / "weights.pt")
    (out / "done.json").write_text(json.dumps(logs))
leave()
