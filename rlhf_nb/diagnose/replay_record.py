"""What a run keeps of one update: the checkpoint before it, its rollout, and what came after it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_nb.checkpoint import MANIFEST, verify
from rlhf_nb.diagnose.replay_settings import settings_of
from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.folders import checkpoints
from rlhf_nb.training.logs import logged_rows
from rlhf_nb.training.model_loading import load_policy, load_scorer, load_tokenizer
from rlhf_nb.training.resume import saved_run
from rlhf_nb.ui.run_files import left_out, ranges_of, rollout_files


@dataclass(frozen=True)
class Record:
    "One update of a run, as the run's folder keeps it. Nothing here is written."

    folder: Path
    update: int
    checkpoint: Path  # the state before it
    rollouts: list[Path]  # a file a rank
    settings: dict[str, Any]  # that it was done with
    changed: set[str]  # of them, those that are other than the checkpoint's: a resume changed them
    after: Path | None  # the checkpoint after it
    line: dict[str, Any] | None  # what was logged of it alone
    model: Any = None  # the policy, or an adapter's base, where the folder cannot tell
    value_model: Any = None
    processing_class: PreTrainedTokenizerBase | None = None

    @property
    def made(self) -> dict[str, Any]:
        "What the run computed with; empty for a checkpoint that does not record it."
        return json.loads((self.checkpoint / "ppo_state.json").read_text()).get("made", {})

    def rollout(self, rank: int = 0, ranks: int = 1) -> Rollout:
        "A rank's episodes. Raises ValueError where the run had another number of ranks."
        if ranks != len(self.rollouts):
            raise ValueError(
                f"update {self.update} was made by {len(self.rollouts)} processes, which shuffle "
                f"their own episodes and add up their gradients, and this is {ranks}: start "
                f"{len(self.rollouts)}, as with rlhf-nb launch --num_processes "
                f"{len(self.rollouts)} -m rlhf_nb.cli replay ..."
            )
        return Rollout.load(self.rollouts[rank])

    def check_episodes(self, chosen: Sequence[int]) -> None:
        "Raises ValueError on an episode that the update does not have."
        count = sum(len(Rollout.load(file)) for file in self.rollouts) if chosen else 0
        if wrong := [i for i in chosen if not 0 <= i < count]:
            raise ValueError(
                f"there is no episode {wrong[0]}: update {self.update} has {count}. Give some of 0 "
                f"to {count - 1}."
            )


def folder_of(run: Path) -> Path:
    "Where a run keeps checkpoints and rollouts: its folder, or `ppo` in that of a demo."
    if not run.is_dir():
        raise FileNotFoundError(f"there is no folder {run}: give the output_dir of a run.")
    inner = run / "ppo"
    return inner if (inner / "rollouts").is_dir() and not (run / "rollouts").is_dir() else run


def check_kept(folder: Path, update: int | None) -> None:
    "Raises ValueError where an update's checkpoint or rollout is not there; it says what keeps it."
    rollouts, saved = rollout_files(folder), {p.name: p for p in checkpoints(folder)}
    if not rollouts and (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} is a checkpoint: give its run, {folder.absolute().parent}.")
    if not rollouts:
        raise ValueError(
            f"{folder} keeps no rollouts, so there are no episodes to learn from again: train with "
            "save_rollouts=True (--save_rollouts)."
        )
    replayable = [k for k in rollouts if f"checkpoint-{k}" in saved]
    can = f" Updates that can be replayed: {', '.join(map(str, replayable))}." if replayable else ""
    if update is None:
        raise ValueError(f"no update is given: say which, --update N.{can}")
    if update not in rollouts:
        there_are = f"{folder} keeps the rollouts of updates {ranges_of(rollouts)}, not {update}."
        raise ValueError(there_are + left_out(folder, update))
    if update == 0 and "checkpoint-0" not in saved:
        raise ValueError(
            f"{folder} has no checkpoint-0, the state before the first update: a run keeps it with "
            f"save_start=True (--save_start).{can}"
        )
    if f"checkpoint-{update}" not in saved:
        raise ValueError(
            f"{folder} has no checkpoint-{update}, the state before update {update}: a run keeps "
            "one after every update with save_strategy='steps' and save_steps=1 (--save_steps 1), "
            f"and without save_total_limit, which deletes the oldest.{can}"
        )


def check_state(checkpoint: Path) -> None:
    "Raises ValueError on a checkpoint that is damaged, of another version, or without a state."
    verify(checkpoint)
    settings = saved_run(checkpoint).get("settings")
    if not settings or not (checkpoint / "ppo_state.json").is_file():
        raise ValueError(
            f"{checkpoint} does not record the settings of a run of PPO: it is of another trainer "
            "or of an older version of rlhf_nb. Replay it with the version that wrote it."
        )
    if settings.get("save_only_model"):
        raise ValueError(
            f"{checkpoint} was saved with save_only_model: it lacks the optimizer's state. Train "
            "without it."
        )
    if not (checkpoint / "optimizer.pt").is_file():
        raise ValueError(
            f"{checkpoint} has the optimizer's state in parts, as FSDP and DeepSpeed write it: an "
            "update is replayed on one process, or on several under DDP."
        )


def check_later(checkpoint: Path) -> None:
    "The same of one after the update, which a replay can do without."
    try:
        check_state(checkpoint)
    except ValueError as error:
        raise ValueError(
            f"{error} Or move {checkpoint} out of the run's folder: it is after this update, which "
            "is then replayed without being compared with it."
        ) from error


def logged(folder: Path, update: int) -> dict[str, Any] | None:
    "The line of one update alone; None: it was logged together with others, or not yet."
    rows = logged_rows(folder)
    of_step = {row["step"]: row for row in rows if "objective/kl" in row and "step" in row}
    alone = update == 0 or update in of_step
    return of_step.get(update + 1) if alone else None


def record_of(
    run: Any,  # the folder of a run, or a PPOTrainer
    update: int | None,
    model: Any = None,
    value_model: Any = None,
) -> Record:
    """One update of a run. Raises FileNotFoundError or ValueError where the folder does not have
    it, and says which setting keeps it."""
    own: dict[str, Any] = dict(model=model, value_model=value_model)
    if isinstance(run, PPOTrainer):
        own = dict(processing_class=run.processing_class, model=model or run.policy)
        own["value_model"] = value_model or run.pair.value
        run = run.output_dir
    folder = folder_of(Path(run))
    check_kept(folder, update)
    assert update is not None
    checkpoint, saved = folder / f"checkpoint-{update}", checkpoints(folder)
    check_state(checkpoint)
    # a resume may have changed settings: what was done next is in the next checkpoint
    later = [path for path in saved if int(path.name.split("-")[1]) > update]
    if later:
        check_later(later[0])
    before = settings_of(saved_run(checkpoint))
    settings = settings_of(saved_run(later[0])) if later else before
    after = folder / f"checkpoint-{update + 1}"
    return Record(
        folder=folder,
        update=update,
        checkpoint=checkpoint,
        rollouts=rollout_files(folder)[update],
        settings=settings,
        changed={name for name in settings if before.get(name) != settings[name]},
        after=after if after in later else None,
        line=logged(folder, update),
        **own,
    )


# ---- The trainer again ----


def no_judge(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
    "In the place of a reward: the scores of a replay are in the record."
    raise RuntimeError("a replay uses the scores of the record, and nothing was to be judged.")


OPTIONS = dict(model="--model_name_or_path", value_model="--value_model_path")


def loaded(
    load: Callable[..., Any],  # load_policy or load_scorer
    folder: Path,  # of the policy or the value model in a checkpoint
    given: Any,  # a model, or the name of an adapter's base; None: the folder tells
    made: Mapping[str, Any],  # how it computed
    argument: str,
) -> Any:
    "A model of a checkpoint. Raises ValueError where the folder alone does not tell what it is."
    options = {k: v for k, v in (("attn_implementation", made.get("attention")),) if v}
    of_adapter = (folder / "adapter_config.json").is_file()
    model = given
    if given is not None and not isinstance(given, (str, Path)):
        model = copy.deepcopy(given)
    elif of_adapter:
        name = given or json.loads((folder / "adapter_config.json").read_text()).get(
            "base_model_name_or_path"
        )
        if not name:
            raise ValueError(
                f"{folder} is an adapter, and the model under it had no name: give that as "
                f"{argument} ({OPTIONS[argument]})."
            )
        model = load(name, dtype=getattr(torch, made.get("dtype", "float32")), **options)
    elif (folder / "config.json").is_file():
        if given is not None:
            raise ValueError(
                f"{folder} has a whole model, so {given} would not be used: leave {argument} out "
                f"({OPTIONS[argument]})."
            )
        model = load(str(folder), dtype="auto", **options)
    if model is None:
        raise ValueError(
            f"{folder} does not tell what the {argument} was: give one like it as {argument}; its "
            "weights come from the checkpoint."
        )
    if of_adapter and not hasattr(model, "peft_config"):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    elif made and given is None:
        for name, weight in model.named_parameters():
            weight.requires_grad_(name not in made["fixed"])
    return model


def trainer_of(record: Record, args: PPOConfig) -> PPOTrainer:
    """A trainer for the update, without judges and data; the checkpoint is yet to be restored.
    Raises ValueError where the models cannot be made again from the folder."""
    made, folder = record.made, record.checkpoint
    value, has_value = None, (folder / "value").is_dir()
    policy = loaded(load_policy, folder, record.model, made.get("policy", {}), "model")
    if has_value and not args.share_value_trunk:
        value_made = made.get("value", {})
        value = loaded(load_scorer, folder / "value", record.value_model, value_made, "value_model")
    tokenizer = record.processing_class or load_tokenizer(str(folder))
    return PPOTrainer(args, tokenizer, policy, None, no_judge, value_model=value)
