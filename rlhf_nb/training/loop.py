"""The loop of updates on `transformers.Trainer`: a step is one whole update, and logs, evaluations,
checkpoints and callbacks come after updates. Trainer's private names that are used here are listed
in tests/test_structure.py."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback, SchedulerType
from transformers.trainer import skip_first_batches
from transformers.trainer_utils import set_seed
from transformers.utils import is_in_notebook, logging

from rlhf_nb.base.files import append_jsonl, read_object, write_text_atomic
from rlhf_nb.base.loading import no_programs
from rlhf_nb.base.opened import unwrap
from rlhf_nb.base.terminal import harmless
from rlhf_nb.forward import PolicyAndValue
from rlhf_nb.moments import RunningMoments
from rlhf_nb.sampling import Sampling
from rlhf_nb.training.alarms import alarms_of
from rlhf_nb.training.build import check_value_rate, split_groups
from rlhf_nb.training.compat import published_attribute
from rlhf_nb.training.completions import print_change
from rlhf_nb.training.config import PPOConfig
from rlhf_nb.training.folders import check_folder
from rlhf_nb.training.layout import Layout
from rlhf_nb.training.logs import log_line
from rlhf_nb.training.metrics import combine
from rlhf_nb.training.optimizers import BY_METRIC
from rlhf_nb.training.parts import make_controller, make_forward
from rlhf_nb.training.pretraining import pretrain_values
from rlhf_nb.training.prompts import check_taken, sets_of, warn_of_turns
from rlhf_nb.training.reporting import describe_run, ppo_card
from rlhf_nb.training.resume import identify_ppo, surroundings
from rlhf_nb.training.saving import load_pair, save_pair
from rlhf_nb.training.sealed import SealedTrainer, warn_of_router

logger = logging.get_logger(__name__)


def show_logs(trainer: Any) -> None:
    "A table in a notebook, lines in a terminal: not losses, nor a dictionary of all metrics."
    if is_in_notebook():
        from rlhf_nb.training.progress import show_updates

        show_updates(trainer)
    for callback in trainer.callback_handler.callbacks:
        if type(callback) in (ProgressCallback, PrinterCallback):
            vars(callback)["on_log"] = write_line


def write_line(_: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
    "What a callback of transformers does with a log, in the place of its own."
    if state.is_world_process_zero:
        tqdm.write(log_line(logs or {}, state.global_step))


class UpdateTrainer(SealedTrainer):
    """A Trainer whose step is one whole update of a batch of prompts: `step(batch)` returns its
    metrics, and everything that Trainer does by steps is done by updates. It trains a policy and,
    with a critic, a value model."""

    args: PPOConfig
    model: Any  # policy and value model, and under FSDP2 what is put around them
    train_dataset: Any
    optimizer: Any
    lr_scheduler: Any
    update_count = 0
    episode_count = 0  # of all ranks; the last update of an epoch may have fewer than batch_size
    processing_class: PreTrainedTokenizerBase
    sampling_settings: Sampling  # how responses are drawn, and what ends them
    batches: Iterator | None = None  # of someone who steps by hand
    pretrained = False  # the value model, by value_pretrain_rollouts, here or in a checkpoint

    def __init__(self, pair: PolicyAndValue, args: PPOConfig, **given: Any):
        self.since_log: dict[str, list[float]] = defaultdict(list)  # metrics of these updates
        self.controller, self.moments = make_controller(args), RunningMoments()
        super().__init__(pair, args, **given)
        warn_of_router(pair, type(self).__name__)
        show_logs(self)
        check_folder(self.args, dict(ref_model=self.ref_model) | self.judges.judges)
        self.layout = Layout(self.accelerator, args.offload_frozen)
        self.forward = make_forward(args, pair, self.layout)
        prompts = self.train_dataset
        self.args.set_sizes(None if prompts is None else len(prompts))

    def __getattr__(self, name: str) -> Any:
        "What the published trainer has by another name."
        return published_attribute(self, name)

    def __repr__(self) -> str:
        return self.describe() if "layout" in vars(self) else super().__repr__()

    def _prepare_for_training(self, *given: Any) -> Any:
        prepared = super()._prepare_for_training(*given)
        self.count_episodes()
        return prepared

    def count_episodes(self) -> None:
        "Callbacks read state.episode."
        vars(self.state)["episode"] = self.episode_count

    @property
    def pair(self) -> PolicyAndValue:
        "Policy and value model, without what the layout puts around them."
        return unwrap(self.model)

    @property
    def policy(self) -> Any:
        return self.pair.policy

    # ---- for subclasses ----

    def step(self, batch: Any = None) -> Any:
        "One update; returns its metrics, with the value of its loss as `.loss`."
        raise NotImplementedError

    def responses(self, prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor:
        "Ids [B, T] of a response to each prompt, as an update would sample them."
        raise NotImplementedError

    def predict(self, *given: Any, **more: Any) -> Any:
        "Trainer's: a response to each prompt, the same ones for the same seed and update."
        with self.layout.stream(self.args.seed, self.update_count):
            return super().predict(*given, **more)

    def prediction_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> tuple:
        "For `predict`: a response to each prompt."
        return None, self.responses(inputs["prompt_ids"], inputs["prompt_mask"]), None

    def between_updates(self) -> None:
        "After each update, before it is logged."

    def begin(self) -> None:
        "Where save_start is set, the state before the first update is a checkpoint as well."
        super().begin()
        pretrain_values(self)
        if self.args.save_start and not self.state.global_step:
            self._save_checkpoint(self.model_wrapped, None)

    # ---- stepping by hand ----

    def restore(self, checkpoint: Path, changed: Iterable[str] = ()) -> None:
        """Models, optimizer, schedule and the run's own state as a checkpoint has them, and nothing
        of sampling or data; `changed` names settings that are other than the checkpoint's."""
        with no_programs(checkpoint):
            self._load_from_checkpoint(str(checkpoint))
            self.prepare()
            self.changed = set(changed)
            self._load_optimizer_and_scheduler(str(checkpoint))
        self.resumed_from = None  # that is for `train`

    def prepare(self) -> nn.Module:
        "Make optimizer and schedule and wrap the model, as `train` would; once. Returns the model."
        if not self.prepared:
            updates, given = self.args.num_total_batches, self.train_dataset is not None
            if not updates:
                self.args.lr_scheduler_type = SchedulerType.CONSTANT_WITH_WARMUP
                logger.warning(
                    "without train_dataset, total_episodes or max_steps the length of the run is "
                    "unknown: the learning rate stays where it is."
                )
            if self.args.activation_checkpointing or self.args.gradient_checkpointing:
                self.model.activation_checkpointing_enable()
            batches = self.get_train_dataloader() if given else None
            self._prepare_for_training(updates, batches, None)
        return self.model_wrapped

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        "Trainer's; the value model's parameters get their own learning rate where it is set."
        made = self.optimizer is None
        if not made and not self.prepared:  # one that was set since the trainer was made
            check_value_rate(self.args, self.optimizer)
        super().create_optimizer(model)
        if made and self.args.value_learning_rate is not None:
            split_groups(self.optimizer, self.model.value, self.args.value_learning_rate)
        return self.optimizer

    def next_batch(self) -> Any:
        "The next batch for someone who steps by hand; after the last, the first of a new order."
        batch = next(self.batches, None) if self.batches is not None else None
        if batch is None:
            self.batches = iter(self.get_train_dataloader())
            batch = next(self.batches)
        return batch

    def notify(self, event: str, *what: Any) -> None:
        "Call that method of every callback that has it: events that Trainer does not know."
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, event):
                getattr(callback, event)(*what)

    def learning_rate(self) -> float:
        "Of the next optimizer step."
        return self._get_learning_rate()

    def step_schedule(self) -> None:
        "Once an update, not past its end; Trainer's evaluation steps one that waits for a metric."
        planned, rate = self.args.num_total_batches, self.learning_rate()
        ended = self._created_lr_scheduler and self.update_count >= planned > 0
        if ended and self.update_count == planned and rate != self.args.learning_rate:
            logger.warning(
                f"update {planned} is past the schedule of {planned} updates: the learning rate "
                f"stays at {rate:.3g}. Raise total_episodes or max_steps, or set "
                "lr_scheduler_type='constant'."
            )
        if not ended and not isinstance(self.lr_scheduler, BY_METRIC):
            self.lr_scheduler.step()

    # ---- the loop, in Trainer's terms ----

    def train(self, *given: Any, **more: Any) -> Any:
        "`Trainer.train`; its first line is that of `describe`. Callbacks hear how it ends."
        if self.is_world_process_zero():
            self.say(self.describe())
            stops = self.sampling_settings.stop_ids
            warn_of_turns(self.train_dataset, self.processing_class, stops)
        self.notify("ppo_begin", self)
        set_seed(self.args.seed)  # whatever was drawn since the trainer was made
        try:
            result = super().train(*given, **more)
        except BaseException as error:
            self.notify("ppo_end", error)
            raise
        if not is_in_notebook() and self.is_world_process_zero():  # a notebook shows it before
            if not self.args.disable_tqdm:
                print_change(self.output_dir / "completions")
            for alarm in alarms_of(self.state.log_history)[:1]:
                print(harmless(f"Alarm. {alarm}"))
        return result

    def say(self, text: str) -> None:
        "A line that a user sees, or a log where there are no bars."
        (logger.info if self.args.disable_tqdm else print)(harmless(text))

    def describe(self) -> str:
        "What runs, on what, and in which precision."
        return describe_run(self)

    def get_train_dataloader(self) -> Any:
        "One rank's prompts of an update, shuffled by the seed."
        if self.train_dataset is None:
            raise ValueError("there is no train_dataset: give one, or call step(prompts).")
        prompts = self.args.local_batch_size // self.args.num_generations
        return self._get_dataloader(
            self.train_dataset,
            "Training",
            prompts,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def set_initial_training_values(
        self, args: Any, dataloader: Any
    ) -> tuple[int, int, int, int, int, int | None, int]:
        "Trainer's sizes, where a step is an update. Raises ValueError where it could not evaluate."
        for data in sets_of(self.eval_dataset if args.eval_strategy != "no" else None).values():
            check_taken(data, self.prompts.functions, complete=True)
        per_epoch, updates = len(dataloader), args.num_total_batches
        episodes, epochs = updates * args.batch_size, math.ceil(updates / per_epoch)
        prompts = len(self.train_dataset)
        return epochs, per_epoch, prompts, episodes, args.batch_size, per_epoch, updates

    def _run_epoch(  # type: ignore[override]  # new arguments of later releases are taken as **_
        self,
        model: nn.Module,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        resume_from_checkpoint: str | None = None,
        epochs_trained: int = 0,
        steps_trained_in_current_epoch: int = 0,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
        start_time: float = 0.0,
        **_: Any,
    ) -> None:
        "One pass over the prompts, an update a batch."
        args, skip = self.args, 0
        if hasattr(train_dataloader, "set_epoch"):
            train_dataloader.set_epoch(epoch)
        resuming = epoch == epochs_trained and resume_from_checkpoint is not None
        if resuming:
            skip = self.state.global_step % steps_in_epoch
            if not skip:  # a new epoch draws its order from it
                self._load_rng_state(resume_from_checkpoint)
        batches = iter(skip_first_batches(train_dataloader, skip) if skip else train_dataloader)
        report = partial(
            self._maybe_log_save_evaluate,
            grad_norm=None,
            model=model,
            trial=trial,
            epoch=epoch,
            ignore_keys_for_eval=ignore_keys_for_eval,
            start_time=start_time,
        )
        for i in range(skip, steps_in_epoch):
            if self.state.global_step >= self.state.max_steps:  # the run was finished before
                break
            batch = next(batches)
            if resuming and skip and i == skip:
                self._load_rng_state(resume_from_checkpoint)
            self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
            self._timed_step(batch)
            self.state.epoch = epoch + (i + 1) / steps_in_epoch
            self.control = self.callback_handler.on_step_end(args, self.state, self.control)
            should_log = self.control.should_log
            self.between_updates()
            self.control.should_log |= should_log  # a log of completions takes it back
            finished = self.state.global_step >= self.state.max_steps
            ending = self.control.should_training_stop or finished
            self.control.should_log |= ending  # what was measured since the last log is not lost
            report(self._tr_loss)
            if not ending:
                self.notify("ppo_between", self.control)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.control.should_training_stop |= self.state.global_step >= self.state.max_steps
        self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
        report(self._tr_loss)

    def _timed_step(self, batch: Any) -> None:
        "One update, counted."
        start = time.perf_counter()
        metrics = self.step(batch)
        metrics["eps"] = metrics.episodes / (time.perf_counter() - start)
        self.state.global_step += 1
        self.count_episodes()
        self._tr_loss += metrics.loss
        for name, value in metrics.items():
            self.since_log[name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Where Trainer logs its loss, each metric of the updates since the last log, by `combine`.
        Every log is a line of metrics.jsonl too."""
        if "loss" in logs and self.since_log:
            logs = {name: combine(name, values) for name, values in self.since_log.items()}
            self.since_log = defaultdict(list)
        super().log(logs, start_time)
        if self.is_world_process_zero():
            append_jsonl(self.output_dir / "metrics.jsonl", self.state.log_history[-1])

    # ---- what is saved ----

    def named_models(self) -> dict[str, Any]:
        "Policy, value model, reference, judges, tokenizers and stop tokens, for `identity`."
        return identify_ppo(self)

    def card(self, folder: Path) -> str:
        return ppo_card(self, self.output_dir.name)

    def write_model(self, folder: Path, state: dict[str, Tensor] | None) -> None:
        """The policy alone, with tokenizer and generation config; in a checkpoint, and where
        save_value_model is set, the value model too, in value/."""
        whole = self.stage is not None  # a checkpoint
        save_pair(
            self.pair,
            self.processing_class,
            folder,
            state,
            self.sampling_settings.stop_ids,
            merge=self.args.save_merged and not whole,
            value=self.args.save_value_model or whole,
        )

    def read_model(self, folder: Path, model: Any) -> None:
        load_pair(model, folder)

    def run_state(self) -> dict[str, Any]:
        "What changes from update to update beside the weights, as JSON."
        return dict(
            controller=self.controller.state_dict(),
            moments=self.moments.state_dict(),
            made=surroundings(self.pair, self.forward, self.layout.device),
            update_count=self.update_count,
            episode_count=self.episode_count,
            since_log=self.since_log,
        )

    def write_state(self, folder: Path) -> None:
        (folder / "ppo_state.json").write_text(json.dumps(self.run_state()))

    def read_state(self, folder: Path) -> None:
        state = read_object(folder / "ppo_state.json")
        needed = {"update_count", "episode_count", "since_log", "controller", "moments"}
        if missing := ", ".join(sorted(needed - state.keys())):
            text = f"{folder}/ppo_state.json lacks {missing}: another version saved it"
            raise ValueError(f"{text}. Go on with that one, or begin a run with its model.")
        self.update_count, self.pretrained = state["update_count"], True
        self.episode_count = state["episode_count"]
        self.since_log = defaultdict(list, state["since_log"])
        self.controller.load_state_dict(state["controller"])
        if "kl_coef" in self.changed:
            self.controller.set(self.args.kl_coef)
        self.moments.load_state_dict(state["moments"])
        if self.is_world_process_zero():  # later lines are of steps that are done again
            rows = (json.dumps(row) + "\n" for row in self.state.log_history)
            write_text_atomic(self.output_dir / "metrics.jsonl", "".join(rows))
