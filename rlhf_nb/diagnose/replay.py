"""One update of a run again with other settings: the checkpoint before it and its saved rollout.
Nothing is sampled or judged. The run's own settings give what the run did, bit for bit."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.fields import facts_of, settings_that_say
from rlhf_nb.base.files import DEMO_MARK, checkpoints, read_object
from rlhf_nb.base.loading import no_bars
from rlhf_nb.base.random_state import random_state_kept
from rlhf_nb.checkpoint import MANIFEST, verify
from rlhf_nb.losses import policy_diagnostics
from rlhf_nb.ppo import final_scores
from rlhf_nb.rollout import TENSORS, Rollout
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.kept import kept_rollouts, left_out, rollout_files
from rlhf_nb.training.logs import logged_rows
from rlhf_nb.training.metrics import metric_of
from rlhf_nb.training.model_loading import load_policy, load_scorer, load_tokenizer
from rlhf_nb.training.resume import changes_text, saved_run
from rlhf_nb.turns import keep_chosen, put_fields_back, reached_stops
from rlhf_nb.ui.run_files import ranges_of
from rlhf_nb.update import charge

FIXED = {  # settings of an update whose other values need what checkpoint and rollout do not hold
    *("per_device_train_batch_size", "gradient_accumulation_steps", "total_episodes", "max_steps"),
    *("normalize_scores", "kl_estimator", "advantage_estimator", "value_learning_rate"),
}
CHANGEABLE = [x for x in settings_that_say(PPOConfig, "update", "rewards") if x not in FIXED]
UNUSED = {*settings_that_say(PPOConfig, "run", "refused", "compiler", "unreplayed")}
AFTER = {  # numbers of one forward pass after the update, in words
    "after/approxkl": "KL between the policy before and after the update",
    "after/clipfrac": "share of tokens that are clipped after it",
}


# ---- Settings ----


def check_names(names: Mapping[str, Any] | list[str], flag: str = "") -> None:
    "Raises ValueError on a setting that a replay does not read. `flag` is put before its name."
    for name in names:
        facts = facts_of(PPOConfig).get(name)
        if facts is None:
            raise ValueError(f"there is no setting {flag}{name}.{did_you_mean(name, CHANGEABLE)}")
        if name not in CHANGEABLE:
            why = f"an update does not read it ({', '.join(sorted(facts.words))})"
            if name in FIXED:
                why = "checkpoint and rollout hold only what the run's value of it needs"
            raise ValueError(f"{flag}{name} cannot be changed in a replay: {why}.")


def make_args(settings: Mapping[str, Any], folder: str) -> PPOConfig:
    "Settings of a trainer that does one update and reports to nobody. Raises ValueError."
    defaults = {f.name: f.default for f in fields(PPOConfig) if f.init}
    names = defaults.keys() & settings.keys() - UNUSED
    changed = {name: settings[name] for name in names if settings[name] != defaults[name]}
    if not changed.get("gradient_checkpointing"):  # an older name, which warns even where it is off
        changed.pop("gradient_checkpointing", None)
    quiet: dict[str, Any] = dict(report_to="none", save_strategy="no", num_sample_generations=0)
    return PPOConfig(folder, **changed, **quiet, disable_tqdm=True)


# ---- What the run keeps ----


def find_checkpoint(folder: Path, update: int) -> Path:
    "The checkpoint before an update. Raises ValueError where it or the rollout is not there."
    rollouts, saved = kept_rollouts(folder), {path.name for path in checkpoints(folder)}
    both = [k for k in rollouts if f"checkpoint-{k}" in saved]
    can = f" Updates that can be replayed: {ranges_of(both)}." if both else ""
    if update not in rollouts:
        why = left_out(folder, update) or " Train with save_rollouts (--save_rollouts)."
        raise ValueError(f"{folder} has no rollout of update {update}.{why}{can}")
    if f"checkpoint-{update}" not in saved:
        how = "save_start (--save_start)" if update == 0 else "save_steps=1 (--save_steps 1)"
        if (folder.parent / DEMO_MARK).is_file():
            how = f"`rlhf-nb demo --save_steps 1 --fresh --output_dir {quote(str(folder.parent))}`"
        raise ValueError(
            f"{folder} has no checkpoint-{update}, the state before it: train with {how}.{can}"
        )
    checkpoint = folder / f"checkpoint-{update}"
    verify(checkpoint)
    if not (checkpoint / "optimizer.pt").is_file():
        raise ValueError(
            f"{checkpoint} has no optimizer.pt: save_only_model, FSDP and DeepSpeed leave it out."
        )
    return checkpoint


def surroundings_of(checkpoint: Path) -> dict[str, Any]:
    "What the run computed with: precision, attention, micro-batches."
    return read_object(checkpoint / "ppo_state.json")["made"]


@contextmanager
def threads_of(checkpoint: Path) -> Iterator[None]:
    "As many CPU threads as the run had: another number adds up in another order."
    threads = torch.get_num_threads()
    torch.set_num_threads(surroundings_of(checkpoint)["threads"])
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def settings_of(checkpoint: Path) -> dict[str, Any]:
    "All settings that a checkpoint records of its run."
    run = saved_run(checkpoint)
    names = settings_that_say(PPOConfig, "names")
    return {name: run[name] for name in names if name in run} | run["settings"]


def load_model(
    load: Callable[..., Any],  # load_policy or load_scorer
    folder: Path,  # of the policy or the value model in a checkpoint
    model: Any,  # the run's, which is copied; None: the folder tells
    made: Mapping[str, Any],  # how it computed
) -> Any:
    "A model of a checkpoint. Raises ValueError where the folder alone does not tell what it is."
    if model is not None:
        return copy.deepcopy(model)
    how = dict(attn_implementation=made["attention"]) if made.get("attention") else {}
    path, name = folder / "adapter_config.json", str(folder)
    if adapter := read_object(path, {}):
        name = adapter.get("base_model_name_or_path", "")
    if not name or not (adapter or (folder / "config.json").is_file()):
        raise ValueError(
            f"{folder} does not tell which model it is of: make the run's PPOTrainer again, and "
            "give that to replay(trainer, ...) instead of the folder."
        )
    dtype = getattr(torch, made.get("dtype", "float32")) if adapter else "auto"
    model = load(name, dtype=dtype, **how)
    if adapter:
        from peft import PeftModel

        return PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in made.get("fixed", ()))
    return model


@dataclass(frozen=True)
class Source:
    "One update as a run's folder keeps it."

    update: int
    checkpoint: Path  # the state before it
    rollouts: list[Path]  # a file a rank
    settings: dict[str, Any]  # that it was done with
    logged: dict[str, float]  # of this update alone; empty: it was logged with others, or not yet
    trainer: PPOTrainer | None  # the run's; None: its folder alone is known

    def rollout(self, rank: int, ranks: int) -> Rollout:
        "A rank's episodes. Raises ValueError where the run had another number of ranks."
        if ranks != (made_by := len(self.rollouts)):
            raise ValueError(
                f"update {self.update} was made by {made_by} processes, and this is {ranks}: use "
                f"rlhf-nb launch --num_processes {made_by} replay ..."
            )
        return Rollout.load(self.rollouts[rank])

    def make_trainer(self, settings: Mapping[str, Any], folder: str) -> PPOTrainer:
        "A trainer without judges and data, in the state before the update."
        saved, run = self.checkpoint, self.trainer
        made, before = surroundings_of(saved), settings_of(saved)
        policy = load_model(load_policy, saved, run and run.policy, made["policy"])
        tokenizer = load_tokenizer(str(saved)) if run is None else run.processing_class
        value = None
        if (saved / "value").is_dir() and not settings["share_value_trunk"]:
            given = run and run.pair.value
            value = load_model(load_scorer, saved / "value", given, made["value"])
        args = make_args(settings, folder)
        played = Rollout.load(self.rollouts[0]).chosen is not None
        parts: Any = dict(value_model=value, environment_factory=NoWorld if played else None)
        trainer = PPOTrainer(args, tokenizer, policy, None, no_judge, **parts)
        trainer.restore(saved, {x for x in settings if before.get(x) != settings[x]})
        return trainer


def no_judge(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
    "In the place of a reward: the scores of a replay are in the rollout."
    raise RuntimeError("a replay uses the scores of the rollout.")


class NoWorld:
    "In the place of an environment: the turns of a replay are in the rollout."

    reset = step = no_judge


def source_of(run: str | Path | PPOTrainer, update: int) -> Source:
    "One update of a run. Raises FileNotFoundError or ValueError where the folder does not have it."
    trainer = run if isinstance(run, PPOTrainer) else None
    folder = Path(run.output_dir if isinstance(run, PPOTrainer) else run)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: give the output_dir of a run.")
    if (folder / "ppo" / "rollouts").is_dir():  # of a demo
        folder = folder / "ppo"
    checkpoint = find_checkpoint(folder, update)
    # A resume may have changed settings: those of this update are in the next checkpoint.
    sealed = [path for path in checkpoints(folder) if (path / MANIFEST).is_file()]
    later = [path for path in sealed if int(path.name.split("-")[1]) > update]
    settings, made = settings_of([*later, checkpoint][0]), surroundings_of(checkpoint)
    settings |= {x: made[x] for x in ("micro_batch_tokens", "trim_padding") if x in made}
    files, rows = rollout_files(folder)[update], logged_rows(folder)
    logged = {row["step"]: row for row in rows if "objective/kl" in row}
    line = logged.get(update + 1, {}) if update == 0 or update in logged else {}  # of it alone
    return Source(update, checkpoint, files, settings, line, trainer)


# ---- The update ----


def prepare_rollout(trainer: PPOTrainer, saved: Rollout) -> Rollout:
    "Scores, rewards and advantages from the judges' raw scores, as the trainer makes them."
    tensors = {name: x for name in TENSORS if (x := getattr(saved, name)) is not None}
    r = saved.with_(**{name: x.to(trainer.layout.device) for name, x in tensors.items()})
    args, drawn, settings = trainer.args, keep_chosen(r), (trainer.moments, trainer.layout.sum)
    scores = final_scores(drawn.raw_scores, reached_stops(drawn), args, *settings, drawn.mask)
    r = charge(put_fields_back(r, scores=scores), args, trainer.controller.value)
    return trainer.advantages(r)


@torch.no_grad()
def movement(trainer: PPOTrainer, r: Rollout) -> dict[str, float]:
    "KL between the policy before and after an update, and the share of tokens that it clips."
    forward, model = trainer.forward, trainer.model_wrapped
    (logprobs,) = forward.over(r, lambda part: forward(model, part)[:1])
    clip = trainer.args.cliprange, trainer.args.cliprange_high
    sums = policy_diagnostics(logprobs, r.logprobs, r.advantages, r.policy_mask, *clip)
    total = {name: trainer.layout.sum(x).item() for name, x in sums.items()}
    return {name: total[name.split("/")[1]] / total["tokens"] for name in AFTER}


def update_again(
    source: Source,
    changes: Mapping[str, Any],  # settings of it that change
) -> tuple[PPOTrainer, Rollout, dict[str, float]]:  # after the update; what it learned from
    "The update with some settings. Raises FloatingPointError where it diverges."
    quiet, threads = no_bars(quiet=True), threads_of(source.checkpoint)
    with quiet, threads, random_state_kept(), tempfile.TemporaryDirectory() as folder:
        trainer = source.make_trainer({**source.settings, **changes}, folder)
        saved = source.rollout(trainer.args.process_index, trainer.args.world_size)
        r = prepare_rollout(trainer, saved)
        return trainer, r, dict(trainer.update(r)) | movement(trainer, r)


# ---- Before and after ----


@dataclass(frozen=True)
class Replay:
    "The numbers of an update with the run's settings, and with others."

    update: int
    settings: dict[str, tuple[Any, Any]]  # that were changed: the run's value and the new one
    was: dict[str, float]
    now: dict[str, float]
    logged: dict[str, float]  # by the run; empty: not this update alone

    @property
    def same(self) -> bool | None:
        "Whether the run's settings give all that the run logged, in every bit; None: not logged."
        names = [name for name in self.logged if name in self.was]
        return all(self.logged[name] == self.was[name] for name in names) if names else None

    def __repr__(self) -> str:
        label = lambda name: AFTER.get(name) or metric_of(name).label
        rows = [(label(k), f"{self.was[k]:.4g}", f"{self.now[k]:.4g}") for k in self.now]
        rows = [("number", "as it was", "replayed"), *rows]
        gives = {True: "give", False: "do NOT give", None: "cannot be compared with"}[self.same]
        title = f"Update {self.update}: {changes_text(self.settings, PPOConfig) or 'unchanged'}"
        table = [f"{words:54}{was:>12}{now:>12}" for words, was, now in rows]
        verdict = f"The run's own settings {gives} what the run logged of this update, bit for bit."
        return "\n".join([title, *table, verdict])


def replay(
    run: str | Path | PPOTrainer,  # a folder with checkpoints and rollouts, or its trainer
    update: int,  # from 0: the k-th starts from checkpoint-k
    **settings: Any,  # of PPOConfig, those that change
) -> Replay:
    """One update of a run with its settings and others, from the same rollout. Raises ValueError on
    a setting that an update does not read, and where the run did not keep what is needed."""
    check_names(settings)
    source = source_of(run, update)
    old = source.settings
    changes = {name: x for name, x in settings.items() if x != old.get(name)}
    make_args({**old, **changes}, tempfile.gettempdir())  # refuses before there is any work
    was = update_again(source, {})[2]
    now = update_again(source, changes)[2] if changes else was
    pairs = {name: (old.get(name), x) for name, x in changes.items()}
    return Replay(update, pairs, was, now, source.logged)
