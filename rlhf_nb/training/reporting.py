"""What a run shows of itself to others: tables for trackers, the text of its model card, its first
line."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers import Trainer
from transformers.integrations import (
    CometCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)

from rlhf_nb import __version__
from rlhf_nb.base.markdown import BREAK
from rlhf_nb.checkpoint import model_card
from rlhf_nb.forward import ValueHead
from rlhf_nb.training.precision import half_trained
from rlhf_nb.training.prompts import sets_of
from rlhf_nb.training.resume import fingerprint_data

# Private names used here: the trackers behind transformers' callbacks (`_wandb`, `_experiment`,
# `_trackio`, `_initialized`), which offer no public way to log a table; `_name_or_path` of a
# config.


def markdown_table(frame: pd.DataFrame, rows: int = 20) -> str:
    "The first rows as a table in markdown; nothing in a cell is read as markup."

    def line(row: Sequence[Any]) -> str:
        cells = [html.escape(str(cell)).replace("|", "&#124;") for cell in row]
        return f"| {' | '.join(cells)} |".replace("\n", BREAK)

    body = [line(row) for row in frame.head(rows).itertuples(index=False)]
    return "\n".join([line(list(frame.columns)), "|---" * len(frame.columns) + "|", *body])


def report_table(trainer: Trainer, name: str, frame: pd.DataFrame) -> None:
    "Hand a table to each tracker that has begun."
    if not trainer.is_world_process_zero():
        return
    step = trainer.state.global_step
    for to in trainer.callback_handler.callbacks:
        if isinstance(to, TensorBoardCallback) and to.tb_writer is not None:
            to.tb_writer.add_text(name, markdown_table(frame), step)
        if isinstance(to, WandbCallback) and to._initialized:
            table = to._wandb.Table(dataframe=frame)
            to._wandb.log({name: table, "train/global_step": step})
        if isinstance(to, CometCallback) and to._experiment is not None:
            to._experiment.log_table(f"{name}-{step:05d}.csv", frame)
        if isinstance(to, TrackioCallback) and to._initialized:
            to._trackio.log({name: to._trackio.Table(dataframe=frame)}, step=step)


def model_name(model: nn.Module) -> str:
    "Where a model came from; of a folder, its last part: a path means nothing on another machine."
    name = getattr(model.config, "_name_or_path", "") or "from scratch"
    return Path(name).name if Path(name).exists() else name


def reference_name(trainer: Any) -> str:
    "Which policy the KL is measured from."
    if trainer.ref_model is None:
        adapter = trainer.args.ref_adapter_name
        return "the policy, its adapter off" if adapter is None else f"the adapter {adapter}"
    name = model_name(trainer.ref_model)
    return name if trainer.ref_given else f"a frozen copy of the policy as it starts ({name})"


def hub_name(model: nn.Module) -> str:
    "The model's name on the hub; empty for a folder or a model made from scratch."
    name = getattr(model.config, "_name_or_path", "") or ""
    return "" if Path(name).exists() else name


def parameter_counts(model: nn.Module) -> str:
    "'trained of all', in digits."
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return f"{sum(n for n, trained in sizes if trained):,} of {sum(n for n, _ in sizes):,}"


def software() -> dict[str, str]:
    "Versions that a card names."
    others = ("torch", "transformers", "accelerate")
    return dict(rlhf_nb=__version__, **{name: version(name) for name in others})


def describe_run(trainer: Any) -> str:
    "What runs, on what, and in which precision, in one line."
    args, pair, layout = trainer.args, trainer.pair, trainer.layout
    device = layout.device.type
    if device == "cuda":
        device = f"{device} ({torch.cuda.get_device_name(layout.device)})"
    if device == "cpu" and (threads := torch.get_num_threads()) > 1:
        device += f" ({threads} threads; small models may be faster on one: OMP_NUM_THREADS=1)"
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "float32"
    if layout.in_place and (half := half_trained(pair)):  # DeepSpeed keeps float32 besides
        precision += f" (weights that learn in {' and '.join(half)})"
    recomputed = args.activation_checkpointing or args.gradient_checkpointing
    memory = "recomputed" if recomputed else "kept"
    if args.offload_frozen:
        memory += ", reference and reward model in host memory between uses"
    engine = "sampling by vLLM; " if args.use_vllm else ""
    critic = "no value model" if pair.value is None else "value model "
    if pair.value is not None:
        critic += parameter_counts(pair.value)
    return (
        f"PPO: {args.num_total_batches} updates of {args.batch_size} responses, each "
        f"{args.num_ppo_epochs} epochs x {args.num_mini_batches} mini-batches of "
        f"{args.mini_batch_size}, micro-batches of {args.per_device_train_batch_size}; "
        f"{layout.describe()}, {device}, {precision}, activations {memory}; {engine}"
        f"reference: {reference_name(trainer)}; "
        f"trained parameters: policy {parameter_counts(pair.policy)}, {critic}."
    )


def ppo_card(trainer: Any, name: str) -> str:
    "The model card of a run, from the run itself."
    args, pair = trainer.args, trainer.pair
    data: dict[str, str] = {}
    models = dict(policy=model_name(pair.policy))
    models["reference"] = reference_name(trainer)
    for judge, weight in trainer.judges.weights.items():
        model = trainer.judges.judges[judge]
        kind = model_name(model) if isinstance(model, nn.Module) else "a function"
        models[f"reward: {judge}, weight {weight:g}"] = kind
    if pair.value is not None:
        head = isinstance(pair.value, ValueHead)
        models["value"] = "a layer on the policy" if head else model_name(pair.value)
    held = {f"evaluation {k}".strip(): x for k, x in sets_of(trainer.eval_dataset).items()}
    for split, rows in dict(training=trainer.train_dataset, **held).items():
        if rows is not None:
            data[split] = f"{len(rows)} prompts, columns {', '.join(rows.column_names)}"
    if trainer.train_dataset is not None:
        data["training rows (sha256)"] = fingerprint_data(trainer.train_dataset) or "streamed"
    data["seed"] = f"{args.seed} (order of the data: {args.data_seed or args.seed})"
    shown = "objective/ policy/ val/ tokens/response eval_ sample_ episode steering/".split()
    results = {
        metric: x
        for log in trainer.state.log_history
        for metric, x in log.items()
        if metric.startswith(tuple(shown))
    }
    sections: dict[str, dict[str, Any]] = dict(Models=models, Data=data, Software=software())
    if trainer.changes:
        sections["Changed when it was resumed"] = trainer.changes
    return model_card(name, args.recipe(), results, models["policy"], sections)
