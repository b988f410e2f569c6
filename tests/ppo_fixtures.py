"What the tests of PPOTrainer share: prompts, a reward, and ways to look at a run."

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOTrainer

STOP = 1
PROMPTS = ["abc", "b", "cdefg", "ja", "hhhh", "efe"] * 4
TIMES = ("time/", "tokens/per_second", "eps", "train_")  # metrics that two runs never share
SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16)


def likes_c(prompts, responses, **columns):
    return [response.count("c") - 0.1 * len(response) for response in responses]


def need_deepspeed() -> None:
    "Skip where DeepSpeed cannot run on a CPU: it builds its communication when it first runs."
    pytest.importorskip(
        "deepspeed", reason="DeepSpeed is not installed: it is in the development set on Linux"
    )
    if not shutil.which(os.environ.get("CXX", "c++")):
        pytest.skip(
            "no C++ compiler, which DeepSpeed wants on a CPU: install g++, or name one in CXX"
        )


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}


def logs(trainer: PPOTrainer) -> list[dict]:
    return [log for log in trainer.state.log_history if "objective/kl" in log]


def untimed(log: dict) -> dict:
    return {name: value for name, value in log.items() if not name.startswith(TIMES)}


def unlike(a: dict, b: dict) -> list[str]:
    return [name for name in a if not torch.equal(a[name], b[name])]


def rollouts(trainer: PPOTrainer) -> list[Rollout]:
    return [
        Rollout.load(path)
        for path in sorted((Path(trainer.args.output_dir) / "rollouts").iterdir())
    ]


def scored(trainer: PPOTrainer) -> Rollout:
    return trainer.advantages(trainer.score(trainer.rollout(PROMPTS * 3)))


class Events(TrainerCallback):
    "Notes every event, and stops where told."

    def __init__(self, stop_at: int = -1):
        self.seen, self.stop_at = [], stop_at

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args, state, control, **kwargs):
            self.seen.append(name)
            if name == "on_step_end" and state.global_step == self.stop_at:
                control.should_training_stop = True
            return control

        return note
