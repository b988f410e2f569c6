"What the tests of PPOTrainer share: prompts, a reward, and ways to look at a run."

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from small_runs import TIMES, TOLD, likes_c, untimed  # noqa: F401
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

from rlhf_nb.checkpoint import MANIFEST, verify
from rlhf_nb.models import scorer_from
from rlhf_nb.ppo import ppo_loss
from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.training.model_loading import tiny_policy, train_tokenizer

STOP = 1
PROMPTS = ["abc", "b", "cdefg", "ja", "hhhh", "efe"] * 4
SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16)


def begin(letters: PreTrainedTokenizerBase, seed: int = 0) -> PreTrainedModel:
    "The policy that runs of letters begin with."
    return tiny_policy(letters, seed, **SIZES)


def saved_base(folder: Path, texts: Iterable[str], positions: int = 16, **sizes) -> PreTrainedModel:
    "A tiny policy and a scorer grown from it, in folder/base and folder/scorer, with a tokenizer."
    tokenizer = train_tokenizer(texts)
    policy = tiny_policy(tokenizer, 0, **SIZES | dict(max_position_embeddings=positions) | sizes)
    for name, model in dict(base=policy, scorer=scorer_from(policy, 3)).items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return policy


class Runs:
    "A pickle of it runs code."

    def __reduce__(self):
        return print, ("it ran",)


def need_deepspeed() -> None:
    "Skip where DeepSpeed cannot run on a CPU: it builds its communication when it first runs."
    pytest.importorskip(
        "deepspeed", reason="DeepSpeed is not installed: the development set has it"
    )
    if not shutil.which(os.environ.get("CXX", "c++")):
        pytest.skip("no C++ compiler, which DeepSpeed wants: install g++, or name one in CXX")


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}


def logs(trainer: PPOTrainer) -> list[dict]:
    return [log for log in trainer.state.log_history if "objective/kl" in log]


def unlike(a: dict, b: dict) -> list[str]:
    return [name for name in a if not torch.equal(a[name], b[name])]


def rollouts(trainer: PPOTrainer) -> list[Rollout]:
    return [
        Rollout.load(path)
        for path in sorted((Path(trainer.args.output_dir) / "rollouts").iterdir())
    ]


def scored(trainer: PPOTrainer) -> Rollout:
    return trainer.advantages(trainer.score(trainer.rollout(PROMPTS * 3)))


def loss_now(trainer: PPOTrainer, r: Rollout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    "Loss and sums of a rollout as one micro-batch of the models as they are."
    entropy = "learn" if trainer.args.entropy_coef else "look"
    return ppo_loss(trainer.forward(trainer.model_wrapped, r, entropy), r, trainer.args)


BEST = dict(  # a run that is evaluated and saved at each step, and ends with its best weights
    save_strategy="steps",
    save_steps=1,
    eval_strategy="steps",
    eval_steps=1,
    load_best_model_at_end=True,
)


def check_best(trainer: Trainer, metric: str, largest: bool) -> None:
    "After a run with BEST: the best step's folder is named and whole, and its weights are back."
    seen = {log["step"]: log[metric] for log in trainer.state.log_history if metric in log}
    best = (max if largest else min)(seen, key=lambda step: seen[step])
    assert len(set(seen.values())) > 1 and best < max(seen), f"the last step was the best: {seen}"
    folder = Path(trainer.args.output_dir) / f"checkpoint-{best}"
    assert trainer.state.best_model_checkpoint == str(folder)
    for path in folder.parent.glob("checkpoint-*"):
        verify(path)
        state = json.loads((path / "trainer_state.json").read_text())
        assert Path(state["best_model_checkpoint"]).parent == folder.parent
    model = getattr(trainer.model, "policy", trainer.model)
    assert not unlike(type(model).from_pretrained(folder).state_dict(), model.state_dict())


def damage(folder: Path, how: str) -> str:
    "Spoil a checkpoint; what the refusal must match."
    file = folder / ("optimizer.pt" if how == "truncated" else "model.safetensors")
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    if how == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    if how == "missing":
        file.unlink()
    if how == "unsealed":
        (folder / MANIFEST).unlink()
        return rf"{folder.name} has no {MANIFEST}: it is not a checkpoint"
    return rf"{folder.name} is damaged: {file.name}"


def check_damaged(trained: Callable[..., Trainer]) -> None:
    """A run of three steps resumes from its first checkpoint; where the last one that is there is
    damaged, however it is, it does not go back to the first in silence."""
    settings = dict(max_steps=3, save_strategy="steps", save_steps=1)
    whole = trained(**settings)
    whole.train()
    folder = Path(whole.args.output_dir)
    paths = sorted(folder.glob("checkpoint-*"))
    assert [path.name for path in paths] == [f"checkpoint-{step}" for step in (1, 2, 3)]
    for path in paths:
        verify(path)
    second, spare = folder / "checkpoint-2", folder.with_name("spare")
    second.rename(spare)
    shutil.rmtree(folder / "checkpoint-3")
    for how in ("truncated", "changed", "missing", "unsealed"):
        shutil.rmtree(second, ignore_errors=True)
        shutil.copytree(spare, second)
        named, other = damage(second, how), trained(**settings)
        before = weights(other)
        with pytest.raises(ValueError, match=named):
            # one that was never finished is skipped, unless it is named
            other.train(resume_from_checkpoint=str(second) if how == "unsealed" else True)
        assert not unlike(before, weights(other))
    again = trained(**settings)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert not unlike(weights(whole), weights(again))


def check_adapter(make: Callable[..., Trainer], folder: Path, wrong: str) -> Trainer:
    """An adapter that is trained, resumed and saved alone by `make(peft_config, ...settings)`; another
    task's is refused, and the configuration that was given stays as it was."""
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match=f"task_type='{wrong}'"):
        make(peft.LoraConfig(task_type=wrong))
    config = peft.LoraConfig(r=2, target_modules=["query_key_value"])
    settings = dict(max_steps=4, save_strategy="steps", save_steps=2, learning_rate=1e-1)
    whole, again = (make(config, per_device_train_batch_size=4, **settings) for _ in range(2))
    whole.train()
    again.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    assert not unlike(weights(whole), weights(again)) and config.task_type is None
    whole.save_model(str(folder))
    names = {path.name for path in folder.iterdir()}
    assert "adapter_model.safetensors" in names and not {"model.safetensors", "config.json"} & names
    assert "library_name: peft" in (folder / "README.md").read_text()
    return whole


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
