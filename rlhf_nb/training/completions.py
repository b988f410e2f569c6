"A policy's answers to an evaluation set; where they go: a file, the console, the trackers."

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from rlhf_nb.base.encoding import encode_prompts
from rlhf_nb.base.files import write_text_atomic
from rlhf_nb.base.opened import masked
from rlhf_nb.base.terminal import terminal_text
from rlhf_nb.masks import left_pad
from rlhf_nb.rollout import Rollout, Sampling, sample, texts_of
from rlhf_nb.training.engines import Engine
from rlhf_nb.training.folders import claim
from rlhf_nb.training.reporting import report_table
from rlhf_nb.turns import until_last_chosen


@dataclass(frozen=True)
class Completions:
    "A policy's answers, in the order of the prompts."

    prompts: list[str]
    texts: list[str]  # without the stop token
    stopped: list[bool]  # whether the stop token was reached
    lengths: list[int]  # in tokens, with the stop token
    ids: list[list[int]] = field(default_factory=list)  # of prompt and answer, as they were sampled
    scores: list[float] = field(default_factory=list)  # of whoever scored them
    # Where an environment answered:
    turns: list[int] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)  # what it paid, over all turns
    ends: list[str] = field(default_factory=list)  # why each episode ended
    environments: list[Any] = field(default_factory=list)  # until the answers are scored


def complete(
    model: nn.Module,  # a causal language model
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str] | Sequence[list[int]],  # texts, or their ids
    response_length: int = 53,  # maximum tokens
    temperature: float = 0.01,
    stop_ids: Sequence[int] | None = None,  # None: the tokenizer's EOS
    batch_size: int = 256,
    seed: int | None = None,  # of the sampling; None: torch's global random state
    stop_strings: StopStringCriteria | None = None,  # texts that end an answer
    on_batch: Callable[[], object] = lambda: None,  # called after each batch, to show progress
    engine: Engine | None = None,  # samples with these weights; None: the package's own sampler
) -> Completions:
    "Sample one answer to every prompt. Prompts of similar length share a batch."
    if not len(prompts):
        raise ValueError("there are 0 prompts to complete: give at least one.")
    stop_ids = [tokenizer.eos_token_id] if stop_ids is None else list(stop_ids)
    prompt_texts = [str(tokenizer.decode(x)) if isinstance(x, list) else x for x in prompts]
    rows = [x for x in prompts if isinstance(x, list)] or encode_prompts(prompt_texts, tokenizer)
    device, generator = next(model.parameters()).device, None
    if seed is not None:
        generator = torch.Generator(device).manual_seed(seed)
    how = response_length, tokenizer.pad_token_id, tuple(stop_ids), temperature
    order, was_training = sorted(range(len(rows)), key=lambda i: len(rows[i])), model.training
    answers: dict[int, tuple] = {}  # by prompt: text, whether it stopped, length, all ids
    model.eval()
    with masked(model, tokenizer) as unused:
        sampling = Sampling(*how, stop_strings=stop_strings, unused_ids=unused)
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            padded = left_pad([rows[i] for i in part], tokenizer.pad_token_id)
            ids, mask = (x.to(device) for x in padded)
            if engine is None:
                drawn = sample(model, ids, mask, sampling, generator)
            else:  # seeded by the global random state, which is restored if a seed is given
                with torch.random.fork_rng(devices=[], enabled=seed is not None):
                    if seed is not None:
                        torch.default_generator.manual_seed(seed + start)
                    drawn = engine.generate(ids, mask, sampling)[0]
            texts, _ = texts_of(tokenizer, drawn, stop_ids)
            lengths = drawn.mask.sum(1).tolist()
            token_ids = [
                rows[i] + x[:n].tolist() for i, x, n in zip(part, drawn.response_ids, lengths)
            ]
            answers |= dict(zip(part, zip(texts, drawn.stopped.tolist(), lengths, token_ids)))
            on_batch()
    model.train(was_training)
    in_order = [answers[i] for i in range(len(rows))]
    return Completions(prompt_texts, *(list(column) for column in zip(*in_order)))


def as_completions(
    begun: Mapping[str, Any],  # a batch of prompts, with what worlds began with
    drawn: Mapping[str, Any],  # fields of `Rollout`
) -> Completions:
    "Episodes as completions: all that was said behind each prompt, up to the policy's last word."
    r = until_last_chosen(Rollout(begun["prompt_ids"], begun["prompt_mask"], **drawn))
    both = zip(r.prompt_ids, r.prompt_mask.bool(), r.response_ids, r.mask)
    return Completions(
        begun["prompt"],
        r.responses,
        r.stopped.tolist(),
        r.mask.sum(1).tolist(),
        [ids[real].tolist() + more[mask].tolist() for ids, real, more, mask in both],
        turns=r.turn_counts.tolist(),
        returns=r.turn_rewards.sum(1).tolist(),
        ends=r.stop_reason,
        environments=r.environments,
    )


def join_parts(parts: Sequence[Completions]) -> Completions:
    "One after the other."
    names = [column.name for column in fields(Completions)]
    return Completions(**{k: [x for part in parts for x in getattr(part, k)] for k in names})


def join_ranks(
    parts: Sequence[Completions],  # of n ranks: prompts 0, n, 2n, ...; 1, n + 1, ...; and so on
) -> Completions:
    "All completions in order. Raises ValueError if the parts cannot come from one list."
    n, sizes = len(parts), [len(part.texts) for part in parts]
    if sorted(sizes, reverse=True) != sizes or sizes[0] - sizes[-1] > 1:
        raise ValueError(
            f"parts of {sizes} completions are not every {n}-th one of one list: give one part "
            "per rank, in order."
        )

    def join(name: str) -> list[Any]:
        columns = [getattr(part, name) for part in parts]
        return [columns[i % n][i // n] for i in range(sum(map(len, columns)))]

    return Completions(**{column.name: join(column.name) for column in fields(Completions)})


def completions_table(
    completions: Completions,  # with their scores
) -> pd.DataFrame:  # columns query, model response, score
    "The table that an evaluation shows, logs and saves."
    columns: dict[str, list] = {"query": completions.prompts, "model response": completions.texts}
    if completions.turns:
        columns |= {"turns": completions.turns, "end": completions.ends}
    return pd.DataFrame(columns | {"score": completions.scores})


def print_change(folder: Path) -> None:
    "The answers to two prompts in the first and the last table of samples, where there are two."
    if len(tables := sorted(folder.glob("update-*-sample.csv"))) < 2:
        return
    ends = tables[0], tables[-1]
    first, last = (pd.read_csv(x, keep_default_na=False).drop_duplicates("query") for x in ends)
    before, after = (f" after update {int(x.stem.split('-')[1])}" for x in ends)
    both = first.merge(last, on="query", suffixes=(before, after))
    shown = [f"{name}{when}" for when in (before, after) for name in ("model response", "score")]
    print_table(both[["query", *shown]], rows=2)


def print_table(
    frame: pd.DataFrame, title: str = "", rows: int = 5, console: Console | None = None
) -> None:
    """The first rows in the terminal, by Rich. Nothing in a text is read as markup, and control
    characters are shown as escapes."""
    console = console or Console()
    table = Table(show_lines=True)
    for name in frame.columns:
        table.add_column(
            terminal_text(str(name), console),
            justify="right" if pd.api.types.is_numeric_dtype(frame[name]) else "left",
            overflow="fold",
        )
    for row in frame.head(rows).itertuples(index=False):
        texts = [f"{x:+.2f}" if isinstance(x, float) else str(x) for x in row]
        table.add_row(*[terminal_text(text, console) for text in texts])
    console.print(*[terminal_text(title, console)] * bool(title), table, sep="\n", soft_wrap=False)


def report_completions(
    trainer: Any,
    completions: Completions,  # with their scores
    kind: str,  # "eval", "sample": of the names of metrics and file
    name: str,  # of the evaluation set, where there are several
) -> dict[str, float]:  # what was logged
    "Write, print and log completions of one evaluation set; returns their means."
    frame, of_set = completions_table(completions), f"-{name}" if name else ""
    step = trainer.state.global_step
    claim(folder := trainer.output_dir / "completions", trainer)
    if trainer.is_world_process_zero():
        file = folder / f"update-{step:05d}-{kind}{of_set}.csv"
        write_text_atomic(file, frame.to_csv(index=False))
        if not (trainer.args.disable_tqdm and trainer.is_in_train):  # asked for, or with bars
            where = f"completions/{file.name}"
            print_table(frame, f"completions ({kind}) after update {step}{of_set}, all in {where}")
    prefix = f"{kind}_{name}" if name else kind
    metrics = {
        f"{prefix}_score": float(frame["score"].mean()),
        f"{prefix}_length": sum(completions.lengths) / len(frame),
        f"{prefix}_stopped": sum(completions.stopped) / len(frame),
    }
    if completions.turns:
        metrics[f"{prefix}_turns"] = sum(completions.turns) / len(frame)
        metrics[f"{prefix}_return"] = sum(completions.returns) / len(frame)
    trainer.log(dict(metrics))
    report_table(trainer, f"completions-{kind}{of_set}", frame)
    return metrics
