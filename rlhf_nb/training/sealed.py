"""The trainers' base on `transformers.Trainer`: sealed checkpoints, exact resume, the hub. The
private names of Trainer that are used here and in the loop of updates, and why, are in
tests/test_structure.py, which names the one that another release lacks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length, rotate_checkpoints
from transformers.utils import logging

from rlhf_nb import __version__
from rlhf_nb.base.files import read_object
from rlhf_nb.base.loading import no_programs
from rlhf_nb.base.random_state import random_state_kept
from rlhf_nb.base.sharding import full_tensor, run_on_ranks, take_from_first_rank
from rlhf_nb.checkpoint import PARTIAL, load_weights, save_weights, seal, stage_folder, verify
from rlhf_nb.training.compat import add_metadata
from rlhf_nb.training.folders import (
    Stop,
    check_folder,
    check_shared_disk,
    earlier_logs,
    find_best,
    logs_in,
    lost_ranks,
    one_thread,
    report_early_end,
    run_lock,
    saving,
    set_aside,
    start_of,
    writing,
)
from rlhf_nb.training.hub import asking_for_repository, pushing
from rlhf_nb.training.optimizers import check_optimizer, check_rates, inner_optimizer
from rlhf_nb.training.precision import check_learns, warn_of_half, warn_of_warm_up
from rlhf_nb.training.resume import (
    apply_new_rates,
    changes_since,
    changes_text,
    fingerprint_model,
    fingerprint_sets,
    fingerprint_tokenizer,
    free_settings,
    naming_settings,
)
from rlhf_nb.training.saving import keep_pad_row, with_prefix

logger = logging.get_logger(__name__)
ENCODER = "prompt_encoder"  # of a PEFT model, which writes the virtual tokens that it makes alone
SUPPORTED = ">=5.20,<6"  # of transformers; settings.ini says the same


def check_version(release: str = transformers.__version__) -> None:
    "Raises ImportError on a release of transformers that this loop was not written for."
    major, minor = (int(part) for part in release.split(".")[:2])
    if not (5, 20) <= (major, minor) < (6, 0):
        raise ImportError(
            f"transformers {release} is installed, and rlhf_nb {__version__} works with "
            f"{SUPPORTED}: pip install 'transformers{SUPPORTED}'."
        )


check_version()


def check_finite(loss: Tensor, model: nn.Module, with_gradients: bool, step: int) -> None:
    "Raises FloatingPointError where a step's loss or gradient is not finite, and drops it."
    problem = "" if loss.isfinite() else f"loss is {loss.item()}"
    if not problem and with_gradients:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = full_tensor(nn.utils.get_total_norm(grads))
        problem = "" if norm.isfinite() else f"gradient has norm {norm.item()}"
    if problem:
        model.zero_grad()
        raise FloatingPointError(
            f"step {step}: the {problem}, so it was not taken. Lower learning_rate, or look at the "
            "data and the coefficients of the loss; the last checkpoint is whole."
        )


def warn_of_router(model: nn.Module, trainer: str) -> None:
    "Log it where a config asks for a loss of a router, for a trainer that adds none."
    configs = (getattr(part, "config", None) for part in model.modules())
    if any(getattr(config, "output_router_logits", False) for config in configs):
        why = f"{trainer} adds no loss of a router: nothing balances its experts"
        logger.warning_once(f"output_router_logits is set and {why}. Set it to False.")


def largest(accelerator: Any, number: int) -> int:
    "The largest of the ranks' numbers."
    return int(accelerator.gather(torch.tensor([number], device=accelerator.device)).max())


def check_rows(dataloader: Any) -> None:
    "Raises ValueError where a run would have no batch."
    if has_length(dataloader) and not len(dataloader):
        raise ValueError(
            "train_dataset has fewer rows than a batch, and dataloader_drop_last is True: give "
            "more rows, or a smaller per_device_train_batch_size."
        )


class OrderByLength(LengthGroupedSampler):
    """Trainer's sampler, which remembers its order, and can begin with one that it is given."""

    drawn: list[int] | None = None
    begin_with: list[int] | None = None

    def __iter__(self) -> Iterator[int]:
        order = self.begin_with or broadcast_object_list([list(super().__iter__())])[0]
        self.drawn, self.begin_with = order, None
        return iter(order)


class BetweenSteps(TrainerCallback):
    """Where a run stops that was sent a signal: a step is complete there, with its logs, and no
    order of an epoch has been drawn that a resumed run would draw again."""

    first = False  # the next step is the first of its epoch

    def __init__(self, trainer: SealedTrainer):
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **given: Any) -> None:
        self.trainer.begin()

    def on_epoch_begin(self, *_: Any, **given: Any) -> None:
        self.trainer.save_if_stopped()
        self.first = True

    def on_step_begin(self, *_: Any, **given: Any) -> None:
        if not self.first:
            self.trainer.save_if_stopped()
        self.first = False


def bring_up(folder: Path) -> None:
    "What is in a folder, one level up, and the folder away."
    for path in list(folder.iterdir()):
        path.rename(folder.parent / path.name)
    folder.rmdir()


def pending_of(folder: Path, rank: int) -> dict[str, Any]:
    "What a rank had yet to log at a checkpoint; nothing where there were fewer ranks."
    file = folder / f"pending_{rank}.pt"
    return torch.load(file, weights_only=True) if file.is_file() else {}


def place_in_stream(checkpoint: Path) -> tuple[int, int]:
    "Passes over a stream before a checkpoint, and steps of the one under way."
    saved = read_object(checkpoint / "trainer_state.json")
    passes, share = divmod(saved["epoch"], 1)
    return int(passes), round(share * saved["max_steps"])


class SealedTrainer(Trainer):
    """Hugging Face's Trainer, with checkpoints that appear complete or not at all, a resume that
    goes on as if nothing had happened or says what is different, a folder for one run alone, and a
    hub that may be away. What a subclass may say: `identity`, `write_model`, `read_model`,
    `write_state`, `read_state`, `pending`, `restore_pending`, `card`."""

    stage: Path | None = None  # where a checkpoint is written, while it is
    order: OrderByLength | None = None
    named: dict[str, Any] | None = None  # `identity`, as the run began
    stop: Stop | None = None  # while it trains
    eval_collator: Any = None  # of batches that do not train; None: that of training
    saved_step = 0  # of the last checkpoint
    resumed_from: Path | None = None
    fresh_groups: list[dict[str, Any]]  # of the optimizer, before a checkpoint is loaded

    def __init__(self, model: Any, args: TrainingArguments, **given: Any):
        args = copy.copy(args)  # the one given may serve another trainer
        check_folder(args, dict(model=model))
        args.remove_unused_columns = False  # the collators take what they need
        if args.device.type == "cpu":  # where torch warns that it does nothing
            args.dataloader_pin_memory = False
        warn_of_half(model)
        super().__init__(model, args, **given)
        self.optimizer = inner_optimizer(self.optimizer)  # it may be of a trainer before this one
        check_optimizer(self.optimizer, self.lr_scheduler, model)
        self.changed: set[str] = set()  # names of what is other than in the checkpoint
        self.changes: dict[str, str] = {}  # all resumes' changes, in words
        self.earlier = logs_in(self.output_dir)  # of a run before this one
        self.add_callback(BetweenSteps(self))

    @property
    def output_dir(self) -> Path:
        "Where the run writes; TrainingArguments always has one."
        return Path(str(self.args.output_dir))

    @property
    def prepared(self) -> bool:
        "Whether optimizer and model are as `train` wraps them."
        return isinstance(self.optimizer, AcceleratedOptimizer)

    def training_step(self, model: nn.Module, *given: Any, **more: Any) -> Tensor:
        "Trainer's. Raises FloatingPointError on a loss or a gradient that is not finite."
        loss = super().training_step(model, *given, **more)
        complete = self.accelerator.sync_gradients and not self.args.fp16  # fp16 skips such a step
        check_finite(loss, model, complete, self.state.global_step + 1)
        return loss

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple:
        "Trainer's. Raises ValueError where a run would do nothing."
        check_learns(self.model)
        check_rows(dataloader)
        return super().set_initial_training_values(args, dataloader)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *given: Any) -> tuple:
        """The micro-batches of a step. What is left at the end of a stream and fills none is left
        out: Trainer would add its gradient to the first step of the next pass."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, *given)
        complete = len(batches) == num_batches or has_length(self.train_dataset)
        return (batches, items) if complete else ([], None)

    # ---- for subclasses ----

    def identity(self) -> dict[str, Any]:
        "What names a run, by name: a checkpoint of a run with another identity is refused."
        names = dict(batch_size=self.get_total_train_batch_size(self.args)) | self.named_models()
        sets = fingerprint_sets(self.train_dataset, self.eval_dataset)
        return naming_settings(self.args) | names | sets

    def named_models(self) -> dict[str, Any]:
        "The models' and the tokenizer's part of it."
        names = dict(processing_class=fingerprint_tokenizer(self.processing_class))
        return names | fingerprint_model("model", self.model)

    def pending(self) -> dict[str, Any]:
        "Tensors that this rank has yet to log."
        return {}

    def restore_pending(self, pending: dict[str, Any]) -> None:
        "Put back what `pending` gave."

    def card(self, folder: Path) -> str | None:
        "The model card of a folder; None: Trainer's own."
        return None

    def write_model(self, folder: Path, state: dict[str, Tensor] | None) -> None:
        "Write what a user loads, on the rank that saves; `state` holds weights gathered from all."
        super()._save(str(folder), state)
        encoder, own = getattr(self.model, ENCODER, None), with_prefix(state or {}, f"{ENCODER}.")
        if self.stage is not None and encoder is not None:
            save_weights(encoder, folder / ENCODER, own or None)

    def read_model(self, folder: Path, model: Any) -> None:
        "Put back what `write_model` wrote."
        if (folder / ENCODER).is_dir():
            return load_weights(getattr(model, ENCODER), folder / ENCODER)
        complete = isinstance(model, PreTrainedModel) and (folder / "config.json").is_file()
        if not complete or self.is_fsdp_enabled:  # an adapter, or shards
            return super()._load_from_checkpoint(str(folder), model)
        load_weights(model, folder)

    def write_state(self, folder: Path) -> None:
        "Write what the run needs beside Trainer's own state, on the rank that saves."

    def read_state(self, folder: Path) -> None:
        "Put back what `write_state` wrote, on every rank."

    def to_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        "A batch where the model is."
        return {**self._prepare_inputs(inputs)}

    # ---- saving ----

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        args, folder = self.args, Path(output_dir or self.output_dir)
        if not args.should_save:
            return
        with saving(folder, args, self.stage is not None) as staged:
            self.write_model(staged, state_dict)
            keep_pad_row(staged)
            if (card := self.card(folder)) is not None:
                (staged / "README.md").write_text(card, encoding="utf-8")

    # by position its arguments are the published trainer's, and not Trainer's
    def create_model_card(  # type: ignore[override]
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        **more: Any,  # of Trainer's own card
    ) -> None:
        "The same card in output_dir, for a push to the hub."
        folder, card = self.output_dir, self.card(self.output_dir)
        if card is None:
            more |= dict(dataset_tags=dataset_name, dataset=dataset_name) if dataset_name else {}
            super().create_model_card(model_name=model_name, tags=tags, **more)
        elif self.is_world_process_zero():
            card = add_metadata(card, model_name, dataset_name or more.get("dataset"), tags)
            (folder / "README.md").write_text(card, encoding="utf-8")

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.stage or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        "Trainer's checkpoint and the run's own state; it appears complete or not at all."
        final = Path(super()._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        main, beside = self.args.should_save, final.with_name(final.name + PARTIAL)
        with stage_folder(final) if main else nullcontext(beside) as folder:
            self.accelerator.wait_for_everyone()  # the folder is there
            self.stage = folder
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.stage = None
            if self.state.best_model_checkpoint == str(folder / final.name):
                self.state.best_model_checkpoint = str(final)
            self.accelerator.wait_for_everyone()  # every rank's random state is in it
            if main:
                self._complete(folder, folder / final.name)
        self.accelerator.wait_for_everyone()  # it has its name
        if main:
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
            rotate_checkpoints(str(final.parent), limit, best, use_mtime=True)
        self.saved_step = self.state.global_step
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _complete(self, folder: Path, inner: Path) -> None:
        "Add the run's own state to what Trainer wrote one level down, bring it up, and seal it."
        self.state.save_to_json(str(inner / "trainer_state.json"))  # it names the best checkpoint
        self.write_state(inner)
        bring_up(inner)
        self.named = self.named or self.identity()
        seal(folder, **self.named, settings=free_settings(self.args), changes=self.changes)

    # ---- a run in its folder ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *given: Any, **more: Any
    ) -> Any:
        """Trainer's, in a folder that is this run's alone. Raises ValueError where another run is
        in it, OSError where it takes no more; Ctrl-C and SIGTERM save a checkpoint first."""
        args, folder, stop = self.args, self.output_dir, Stop(self.args.save_strategy != "no")
        with one_thread(folder), ExitStack() as inside:
            inside.enter_context(report_early_end(folder, stop))
            inside.enter_context(lost_ranks(args, lambda: self.state.global_step))
            check_shared_disk(args)
            start = take_from_first_rank(resume_from_checkpoint)
            run_on_ranks(args.should_save, lambda: inside.enter_context(run_lock(folder)))
            self.named, overwrite = self.identity(), getattr(args, "overwrite_output_dir", False)
            begin = partial(start_of, folder, start, overwrite, earlier_logs(folder, self))
            resume = run_on_ranks(args.should_save, begin)
            if resume is not None:
                inside.enter_context(no_programs(resume))
                run_on_ranks(True, partial(self.check_checkpoint, Path(resume)))
                run_on_ranks(args.should_save, partial(set_aside, folder, Path(resume)))
            self.stop, self.saved_step = stop, 0
            try:
                output = super().train(resume, *given, **more)
                self.save_if_stopped()
                return output
            finally:
                self.stop, self.earlier = None, logs_in(folder)

    def _run_epoch(self, *given: Any, **more: Any) -> None:
        "Trainer's, which would make one more step of a run that was finished before."
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*given, **more)
        self.control.should_training_stop = True

    def save_if_stopped(self) -> None:
        "Between two steps: after a signal to any rank, save, and raise KeyboardInterrupt."
        if self.stop is not None:
            self.stop.number = largest(self.accelerator, self.stop.number)
        if self.stop is None or not self.stop.number:
            return
        if self.state.global_step not in (0, self.saved_step):
            self._save_checkpoint(self.model_wrapped, None)
        raise KeyboardInterrupt(f"after step {self.state.global_step}")

    # ---- resuming ----

    def check_checkpoint(self, folder: Path) -> None:
        "Log what differs from a checkpoint, for the card too. Raises ValueError on what may not."
        changes, self.changes = changes_since(folder, self.named or {}, self.args)
        self.changed = set(changes)
        if changes:
            text = changes_text(changes, type(self.args))
            self.changes[f"after step {folder.name.removeprefix('checkpoint-')}"] = text
            if self.is_world_process_zero():
                logger.warning(f"resumed from {folder.name} with {text}.")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        inner = self.accelerator.unwrap_model(model or self.model)
        self.read_model(Path(resume_from_checkpoint), inner)

    def _load_best_model(self) -> None:
        verify(folder := Path(str(self.state.best_model_checkpoint)))
        if self.is_deepspeed_enabled:
            return super()._load_best_model()
        self._load_from_checkpoint(str(folder))

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        "Trainer's. Raises ValueError where one that was set since lacks weights that learn."
        if isinstance(self.optimizer, torch.optim.Optimizer) and not self.prepared:
            check_optimizer(self.optimizer, self.lr_scheduler, model or self.model)
        return super().create_optimizer(*([] if model is None else [model]))

    def create_scheduler(self, num_training_steps: int, *given: Any, **more: Any) -> Any:
        "Trainer's; what this run's settings make of the optimizer is kept for a resume."
        check_rates(self.optimizer, self.lr_scheduler)
        scheduler: Any = super().create_scheduler(num_training_steps, *given, **more)
        if self.args.warmup_steps:
            warn_of_warm_up(scheduler, self.args, num_training_steps)
        optimizer = getattr(scheduler, "optimizer", None)
        self.fresh_groups = [{**group} for group in getattr(optimizer, "param_groups", ())]
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self.changed and self.fresh_groups:
            apply_new_rates(self.lr_scheduler, self.fresh_groups, self.changed)
        self.resumed_from = Path(checkpoint)
        self.read_state(self.resumed_from)
        order = take_from_first_rank(pending_of(self.resumed_from, 0).get("order"))
        if self.order is not None and order is not None:
            self.order.begin_with = order.tolist()

    def _init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Passes over the data, and micro-batches of the one under way. Of a stream, which Trainer
        takes for a single pass of max_steps, they are counted in the checkpoint's epoch."""
        place = super()._init_training_state(max_steps, per_epoch, epochs, checkpoint, trial)
        if checkpoint is None or has_length(self.train_dataset) or self.args.ignore_data_skip:
            return place
        passes, steps = place_in_stream(Path(checkpoint))
        return passes, steps * self.args.gradient_accumulation_steps

    def begin(self) -> None:
        "Before the first step: when to log and save, and what a resumed run had yet to log."
        if self.resumed_from is None:
            return
        self.state.compute_steps(self.args, self.state.max_steps)  # of now, not of the checkpoint
        find_best(self.state, self.output_dir)
        pending = pending_of(self.resumed_from, self.args.process_index)
        self.resumed_from = None
        if "tr_loss" in pending:
            self._tr_loss = pending["tr_loss"].to(self.args.device)
            self._globalstep_last_logged = pending["last_logged"]
            self.restore_pending(pending)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        pending = {**self.pending(), "tr_loss": self._tr_loss.cpu()}
        pending["last_logged"] = self._globalstep_last_logged
        epoch = self.state.epoch or 0.0
        if self.order is not None and epoch != int(epoch):
            pending["order"] = torch.tensor(self.order.drawn)
        torch.save(pending, Path(output_dir) / f"pending_{self.args.process_index}.pt")

    evaluate = random_state_kept()(Trainer.evaluate)  # the run goes on as if nobody had looked
    predict = random_state_kept()(Trainer.predict)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if type(sampler) is not LengthGroupedSampler:
            return sampler
        lengths = list(sampler.lengths)  # a column of a data set is slow to read row by row
        self.order = OrderByLength(sampler.batch_size, lengths=lengths, generator=sampler.generator)
        return self.order

    def _get_dataloader(self, *given: Any, **more: Any) -> Any:
        "Trainer's; an evaluation reads all rows, by a collator of its own where there is one."
        args, drop, own = self.args, self.args.dataloader_drop_last, self.data_collator
        if not more.get("is_training", False):
            args.dataloader_drop_last = False
            self.data_collator = self.eval_collator or own
        try:
            return super()._get_dataloader(*given, **more)
        finally:
            args.dataloader_drop_last, self.data_collator = drop, own

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        "Trainer's; where metrics of the user's own read the predictions, rows in the order given."
        own = getattr(self, "own_metrics", None) is not None and has_length(eval_dataset)
        return SequentialSampler(eval_dataset) if own else super()._get_eval_sampler(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        "Trainer's, in the order given, whatever the sampling strategy: predictions go by row."
        size = self.args.eval_batch_size
        return self._get_dataloader(test_dataset, "test", size, SequentialSampler)

    # ---- the hub ----

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        "Make the repository. Raises ConnectionError with the fix where the hub does not answer."
        with asking_for_repository():
            super().init_hf_repo(token, private)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        "Save the model, then push it where push_to_hub is set; a failed push is logged."
        with writing(self.output_dir, output_dir or self.output_dir, self.model):
            super().save_model(output_dir, _internal_call=True)
        if self.args.push_to_hub and not _internal_call:
            with pushing(self.args):
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.stage is None:  # else the folder must have its final name first
            with pushing(self.args):
                super()._push_from_checkpoint(checkpoint_folder)
