"""Pairs of answers labelled by hand, kept as preferences, and what a reward model makes of them."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import ipywidgets as widgets
import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback

from rlhf_nb.evaluate import complete, wilson_interval
from rlhf_nb.masks import right_pad
from rlhf_nb.models import check_vocabulary, load_scorer, load_tokenizer, scorer_head, token_scores
from rlhf_nb.reward import (
    RewardConfig,
    RewardTrainer,
    encode_pairs,
    pair_texts,
    preference_metrics,
    score_texts,
)
from rlhf_nb.runtime.files import write_text_atomic
from rlhf_nb.sft import Turns, tokenizer_of
from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.controls import (
    action_button,
    labelled_control,
    notebook_bundle,
    restart_list,
    side_by_side,
    step_through,
)
from rlhf_nb.ui.explore import control
from rlhf_nb.ui.html import (
    breakable,
    data_table,
    on_white,
    safe_prose,
    safe_text,
    script_page,
)
from rlhf_nb.ui.viewer import Desk
from rlhf_nb.ui.viz import Html, signal_table, signed, token_strip, visible, visible_token


def draw_pairs(
    model: nn.Module,  # a policy
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset,  # column prompt; other columns come along
    response_length: int = 53,
    temperature: float = 1.0,
    seed: int = 0,
) -> Dataset:  # with columns answer_1 and answer_2
    "Two samples of a policy for every prompt; pairs that are equal, empty or cut off are left out."
    one, two = (
        complete(model, tokenizer, data["prompt"], response_length, temperature, seed=2 * seed + i)
        for i in range(2)
    )

    def fits(i: int) -> bool:
        return all(
            (
                one.stopped[i],
                two.stopped[i],
                one.texts[i],
                two.texts[i],
                one.texts[i] != two.texts[i],
            )
        )

    rows = [
        {**row, "answer_1": one.texts[i], "answer_2": two.texts[i]}
        for i, row in enumerate(data)
        if fits(i)
    ]
    if not rows:
        raise ValueError(
            f"of {len(data)} prompts none got two different answers that came to their end: raise "
            "response_length or temperature, or train the policy further."
        )
    return Dataset.from_list(rows)


@dataclass(frozen=True)
class Showing:
    "One pair as a person sees it."

    pair: int  # row of the data set
    left: int  # which of its answers, 0 or 1, is shown as answer 1
    again: bool  # the second time, the other way round


_PAIRS_APART = 3  # pairs at least between two showings of one


def showings(
    pairs: int,
    repeat_every: int = 8,  # after so many new pairs, one comes again; 0: none does
    seed: int = 0,
) -> list[Showing]:
    """Which pair when, and on which side. More pairs later do not change the beginning. Raises
    ValueError on too many repeats."""
    if repeat_every and repeat_every <= _PAIRS_APART:
        raise ValueError(
            f"repeat_every is {repeat_every}: give 0 for none, or at least {_PAIRS_APART + 1}, so "
            "that nobody remembers the side on which an answer was."
        )
    chance, order, once = random.Random(f"sides/{seed}"), [], []
    for pair in range(pairs):
        once.append(Showing(pair, chance.randrange(2), False))
        order.append(once[-1])
        if repeat_every and not (pair + 1) % repeat_every:
            old = once.pop(chance.randrange(len(once) - _PAIRS_APART))
            order.append(replace(old, left=1 - old.left, again=True))
    return order


def _is_turns(x: Any) -> bool:
    "Whether this is a text that is not empty, or a conversation."
    turn = lambda t: isinstance(t, Mapping) and {"role", "content"} <= set(t)
    return bool(x) and (isinstance(x, str) or (isinstance(x, Sequence) and all(map(turn, x))))


def _as_text(x: Turns | None) -> str:
    "A text, or a conversation line by line."
    if x is None or isinstance(x, str):
        return x or ""
    return "\n".join(f"{t['role']}: {t['content']}" for t in x)


def checked_pairs(
    data: Dataset | Sequence[Mapping[str, Any]], answers: tuple[str, str]
) -> list[dict[str, Any]]:
    """Prompt and answers of each row. Raises ValueError, naming the row, where nobody could label
    it."""
    pairs: list[dict[str, Any]] = []
    wanted = (
        f"give columns {answers[0]} and {answers[1]} (answers= says how they are called), and "
        "prompt"
    )
    for number, row in enumerate(data):
        if missing := [name for name in answers if name not in row]:
            raise ValueError(f"the data have columns {list(row)} and lack {missing}: {wanted}.")
        both = [row[name] for name in answers]
        for name, x in zip(("prompt", *answers), (row.get("prompt"), *both)):
            if not _is_turns(x) and not (name == "prompt" and x is None):
                raise ValueError(
                    f"row {number}: {name} is {x!r}: give a text that is not empty, or a "
                    "conversation; or drop the row."
                )
        if both[0] == both[1]:
            raise ValueError(f"row {number}: both answers are the same: drop the row.")
        pairs.append(dict(prompt=row.get("prompt"), answers=both))
    if not pairs:
        raise ValueError(f"there are 0 pairs to label: {wanted}.")
    return pairs


def _object_of(line: bytes) -> dict[str, Any] | None:
    "The JSON object on a whole line; None where it is something else, or torn."
    try:
        record = json.loads(line)
    except ValueError:  # of JSON, or of UTF-8
        return None
    return record if isinstance(record, dict) and line.endswith(b"\n") else None


class LabelFile:
    """JSON lines, each of them on the disk before `append` returns. A torn last line is skipped and
    then overwritten."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.size = self.torn = 0  # bytes of whole lines, and of a torn one behind them
        self.seen = self.stamp()

    def stamp(self) -> tuple[int, int]:
        "Bytes, and the time of the last write: they show that somebody else has written."
        state = self.path.stat() if self.path.exists() else None
        return (state.st_size, state.st_mtime_ns) if state else (0, 0)

    def read(self) -> list[dict[str, Any]]:
        "All whole lines. Raises ValueError on one in the middle that is no JSON object."
        self.seen = self.stamp()  # before it is read: what comes in between is noticed later
        raw = self.path.read_bytes() if self.path.exists() else b""
        lines, records, self.size = raw.splitlines(keepends=True), [], 0
        for number, line in enumerate(lines, 1):
            record = _object_of(line)
            if record is not None:
                records.append(record)
                self.size += len(line)
            elif number < len(lines):
                raise ValueError(
                    f"{self.path.name}, line {number} is no JSON object: {line[:60]!r}. Fix or "
                    "delete that line; all others are kept."
                )
        self.torn = len(raw) - self.size
        return records

    def append(self, record: Mapping[str, Any]) -> None:
        """One more line, in place of a torn one. Raises ValueError where somebody else has written
        meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.stamp() != self.seen:
            raise ValueError(
                f"{self.path.name} was written by somebody else since it was last written here: "
                "it is open elsewhere. This choice was not saved; close the other one and run "
                "this cell again."
            )
        try:
            with open(self.path, "r+b" if self.path.exists() else "wb") as file:
                file.seek(self.size)
                file.truncate()
                file.write(line := (json.dumps(record) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
            self.size, self.torn = self.size + len(line), 0
        finally:
            self.seen = self.stamp()


def verdict_sentence(row: Mapping[str, Any]) -> float:
    "Which of the data's two answers was better, 0 or 1; a tie is one half."
    return {"1": row["left"], "2": 1 - row["left"], "0": 0.5}[row["choice"]]


def _share(count: int, of: int) -> str:
    "A share with its 95 % interval, in words."
    if not of:
        return "none yet"
    low, high = wilson_interval(count / of, of)
    return f"{count} of {of} ({count / of:.0%}; 95 % interval {low:.0%} to {high:.0%})"


def _in_force(records: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    "The choices that were not taken back. Raises ValueError on a line that is none."
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(records, 1):
        if row.get("choice") == "undo" and rows:
            rows.pop()
        elif row.get("choice") in ("0", "1", "2") and {"pair", "left", "answers"} <= set(row):
            rows.append(dict(row))
        else:
            raise ValueError(
                f"{name}, line {number} is no choice of label_preferences: {str(row)[:80]}. Give "
                "the path of a file that it wrote, or of a new one."
            )
    return rows


@dataclass(frozen=True)
class Labels:
    """The choices of a file that are in force, in their order, and how reliable the person who made
    them is."""

    rows: list[dict[str, Any]]
    undone: int = 0  # choices that were taken back
    torn: int = 0  # bytes of a last line that was not written to its end

    @property
    def fresh(self) -> list[dict[str, Any]]:
        "Pairs at their first showing. Those shown again measure the person, and train nothing."
        return [row for row in self.rows if not row["again"]]

    def agreement(self) -> tuple[int, int]:
        "Pairs that got the same answer both times, of those shown twice."
        first = {row["pair"]: verdict_sentence(row) for row in self.fresh}
        again = [verdict_sentence(row) == first[row["pair"]] for row in self.rows if row["again"]]
        return sum(again), len(again)

    def first_taken(self) -> tuple[int, int]:
        "How often answer 1, the left or upper one, was taken, of all choices that were no tie."
        decided = [row["choice"] for row in self.rows if row["choice"] != "0"]
        return decided.count("1"), len(decided)

    def training(self) -> Dataset:
        """Columns chosen, rejected, pair, and prompt where there is one: first showings that were
        no tie. Raises ValueError where there is none."""
        rows = [row for row in self.fresh if row["choice"] != "0"]
        if not rows:
            raise ValueError(
                f"of {len(self.fresh)} labelled pairs {len(self.fresh)} are ties and none is "
                "decided: label more, or draw pairs that differ more."
            )
        names = ["prompt"] * (rows[0]["prompt"] is not None) + ["chosen", "rejected", "pair"]
        return Dataset.from_list([{name: row[name] for name in names} for row in rows])


def _report_lines(labels: Labels) -> dict[str, str]:
    "How reliable the labels are, question by question."
    decided = sum(row["choice"] != "0" for row in labels.fresh)
    seconds = [row["seconds"] for row in labels.rows if row.get("seconds") is not None]
    (same, twice), (first, of) = labels.agreement(), labels.first_taken()
    low, high = wilson_interval(first / of, of) if of else (0, 1)
    lean = (
        "" if low <= 0.5 <= high else ": the place seems to decide, so read both before you choose"
    )
    hasty = sum(x < 1 for x in seconds)
    lines = {
        "labelled": f"{len(labels.fresh)} pairs: {decided} decided, {len(labels.fresh) - decided} "
        "ties (kept in the "
        f"file, left out of training), {twice} shown again, {labels.undone} taken back",
        "time a pair": f"{median(seconds):.1f} s (median), {hasty} in under a second"
        if seconds
        else "none yet",
        "agreement with yourself": _share(same, twice),
        "answer 1 was taken": _share(first, of) + lean,
    }
    return lines | (
        {
            "torn": f"{labels.torn} bytes of a last line were not written to their end and are "
            "passed over"
        }
        if labels.torn
        else {}
    )


def read_labels(
    path: str | Path,  # of label_preferences
) -> Labels:
    "The choices of a file. Raises FileNotFoundError, or ValueError on a line that is no choice."
    file = LabelFile(path)
    if not file.path.exists():
        raise FileNotFoundError(f"there is no file {file.path}: label_preferences writes one.")
    records = file.read()
    rows = _in_force(records, file.path.name)
    return Labels(rows, (len(records) - len(rows)) // 2, file.torn)


def label_report(
    labels: Labels,
) -> Html:
    "How much was labelled, how long it took, how reliable it is."
    rows = list(_report_lines(labels).items())
    return Html(on_white(data_table("How good are these labels?", ["question", "answer"], rows)))


def load_preferences(
    path: str | Path,  # of label_preferences
) -> Dataset:  # prompt, chosen, rejected, pair; without prompt where there was none
    """The decided pairs of a file, as RewardTrainer takes them; ties, repeats and what was taken
    back are left out. `read_labels` counts them."""
    return read_labels(path).training()


def _in_order(pair: Mapping[str, Any], showing: Showing) -> list[Turns]:
    "The two answers of a pair as they are shown: answer 1 first."
    return pair["answers"][:: -1 if showing.left else 1]


def _continue(
    rows: Sequence[Mapping[str, Any]],
    order: Sequence[Showing],
    pairs: Sequence[Mapping[str, Any]],
    name: str,
) -> None:
    "Raises ValueError where the file was labelled on other pairs, or in another order."
    fix = "give the data, seed and repeat_every that it was begun with, or a path that is new"
    if len(rows) > len(order):
        raise ValueError(
            f"{name} has {len(rows)} choices and there are {len(order)} to make: {fix}."
        )
    for i, (row, showing) in enumerate(zip(rows, order)):
        if (row["pair"], row["left"], row["again"]) != (showing.pair, showing.left, showing.again):
            raise ValueError(
                f"choice {i + 1} in {name} is of pair {row['pair']}, and pair {showing.pair} "
                f"would be shown here, or its sides the other way round: {fix}."
            )
        pair = pairs[showing.pair]
        if [row.get("prompt"), row["answers"]] != [pair["prompt"], _in_order(pair, showing)]:
            raise ValueError(
                f"choice {i + 1} in {name} was made between other texts than row {showing.pair} "
                f"has: {fix}."
            )


class Labelling:
    "Pairs that wait for a choice, and the file of those that were made."

    def __init__(
        self,
        dataset: Dataset | Sequence[Mapping[str, Any]],
        path: str | Path,
        answers: tuple[str, str] = ("answer_1", "answer_2"),
        seed: int = 0,
        repeat_every: int = 8,
        clock: Callable[[], float] = time.monotonic,  # seconds
    ):
        self.pairs, self.file, self.clock = checked_pairs(dataset, answers), LabelFile(path), clock
        self.order, records = showings(len(self.pairs), repeat_every, seed), self.file.read()
        self.rows = _in_force(records, self.file.path.name)
        self.undone, self.since = (len(records) - len(self.rows)) // 2, clock()
        _continue(self.rows, self.order, self.pairs, self.file.path.name)

    @property
    def showing(self) -> Showing | None:
        "The next choice to make; None where all are made."
        return self.order[len(self.rows)] if len(self.rows) < len(self.order) else None

    @property
    def labels(self) -> Labels:
        "The choices so far."
        return Labels(self.rows, self.undone, self.file.torn)

    def shown(self) -> tuple[Turns | None, list[Turns]]:
        "The prompt and the two answers as they are shown. Raises ValueError where all are made."
        if self.showing is None:
            raise ValueError(f"all {len(self.order)} choices are made: no pair is shown.")
        pair = self.pairs[self.showing.pair]
        return pair["prompt"], _in_order(pair, self.showing)

    def choose(self, key: str) -> None:
        """1: answer 1 is better. 2: answer 2. 0: a tie. On the disk when it returns. Raises
        ValueError on another key, or where all are made."""
        at, now = self.showing, self.clock()
        if key not in ("0", "1", "2") or at is None:
            raise ValueError(
                f"key {key!r} after {len(self.rows)} of {len(self.order)} choices: give 1, 2 or 0 "
                "while a pair is shown."
            )
        prompt, both = self.shown()
        one, two = both
        sides: dict[str, tuple[Turns | None, Turns | None]]
        sides = {"1": (one, two), "2": (two, one), "0": (None, None)}
        chosen, rejected = sides[key]
        row = dict(
            prompt=prompt,
            chosen=chosen,
            rejected=rejected,
            answers=both,
            choice=key,
            pair=at.pair,
            left=at.left,
            again=at.again,
            seconds=round(now - self.since, 2),
        )
        self.file.append(row)
        self.rows, self.since = [*self.rows, row], now

    def undo(self) -> None:
        "Take the last choice back; its pair is shown again. Raises ValueError where there is none."
        if not self.rows:
            raise ValueError("there is no choice to take back.")
        self.file.append(
            dict(prompt=None, chosen=None, rejected=None, choice="undo", pair=self.rows[-1]["pair"])
        )
        self.rows, self.undone, self.since = self.rows[:-1], self.undone + 1, self.clock()


def _pane(name: str, text: str, width: str = "18em") -> str:
    "A text under its name, side by side with others where they fit."
    return (
        f'<section style="flex:1 1 {width};min-width:0;border:1px solid #767676;'
        'border-radius:4px;padding:4px 10px">'
        f'<h4 style="margin:2px 0;color:#111111">{escape(name)}</h4>'
        '<p style="white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.5;margin:2px 0">'
        f"{safe_prose(text)}</p></section>"
    )


def render_labelling(
    work: Labelling,
    note: str = "",  # what the last key did
) -> str:
    "The pair that waits for a choice, how far one is, and how good the labels are so far."
    done, total = len(work.rows), len(work.order)
    after = f" · {note}" if note else ""
    head = (
        f'<p role="status"><b>Choice {min(done + 1, total)} of {total}</b> · {done} saved in '
        f"{safe_text(work.file.path.name)}{safe_text(after)}</p>"
        f'<progress value="{done}" max="{total}" style="width:100%" aria-label="choices '
        'made"></progress>'
    )
    if work.showing is None:
        body = (
            f"<p><b>All {total} choices are made.</b> "
            f"load_preferences({safe_text(repr(work.file.path.name))}) gives them to "
            "RewardTrainer.</p>"
        )
    else:
        prompt, both = work.shown()
        question = _pane("Prompt", _as_text(prompt)) if prompt is not None else ""
        panes = "".join(_pane(f"Answer {i}", _as_text(text)) for i, text in enumerate(both, 1))
        body = (
            f'<div style="display:flex">{question}</div>'
            f'<div style="display:flex;flex-wrap:wrap;gap:8px;margin:8px 0">{panes}</div>'
        )
    report = (
        "<details><summary>How good are these "
        f"labels?</summary>{label_report(work.labels)}</details>"
    )
    return on_white(head + body + report)


def is_held_out(
    prompt: Turns | None,
    share: float = 0.25,  # of all prompts
    seed: int = 0,
) -> bool:
    "Whether labels on this prompt are kept for measuring: a hash decides, for good."
    digest = hashlib.sha256(f"{seed}/{json.dumps(prompt)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share


@dataclass(frozen=True)
class Refit:
    "A reward model of the labels so far, compared with them."

    model: PreTrainedModel
    table: pd.DataFrame  # a row a label: pair, prompt, chosen, rejected, margin, held_out
    seconds: float

    def right(self) -> tuple[int, int]:
        """Held-out labels that the model predicts, of all held-out labels; a tie of the scores
        counts as wrong."""
        held = self.table[self.table.held_out]
        return int((held.margin > 0).sum()), len(held)

    def disagreements(self) -> pd.DataFrame:
        """Labels that the model contradicts, the most confident first; sure is its probability of
        the other answer."""
        wrong = self.table[self.table.margin < 0].sort_values("margin", kind="stable")
        return wrong.assign(
            sure=torch.sigmoid(-torch.tensor(wrong.margin.to_numpy(dtype=float))).tolist()
        )

    def verdict(self) -> str:
        "Accuracy on held-out labels, against chance."
        right, of = self.right()
        if not of:
            return "no held-out label yet: nothing can be said of labels that it has not seen"
        low, high = wilson_interval(right / of, of)
        against = (
            "better than a coin"
            if low > 0.5
            else "worse than a coin: are the labels the wrong way round?"
            if high < 0.5
            else "not to be told from a coin (50 %)"
        )
        return f"{_share(right, of)} of held-out labels predicted, {against}"

    def _repr_html_(self) -> str:
        return render_refit(self)

    def __repr__(self) -> str:
        return f"Refit(trained on {int((~self.table.held_out).sum())} labels; {self.verdict()})"


def render_refit(
    refit: Refit,
    most: int = 8,  # disagreements that are shown
) -> Html:
    "What the model learned, and where it contradicts the person."
    wrong, trained = refit.disagreements(), int((~refit.table.held_out).sum())
    rows = [
        (
            int(row["pair"]),
            f"{row['sure']:.0%}",
            "held out" if row["held_out"] else "trained on",
            _as_text(row["chosen"]),
            _as_text(row["rejected"]),
        )
        for row in wrong.head(most).to_dict("records")
    ]
    heads = ["pair", "model is sure", "label was", "you chose", "the model prefers"]
    table = (
        data_table(
            f"The model disagrees with you on {len(wrong)} of {len(refit.table)} labels"
            f"{f'; the {most} most confident' if len(wrong) > most else ''}",
            heads,
            rows,
        )
        if rows
        else ""
    )
    return Html(
        on_white(
            f"<p><b>Refitted on {trained} labels in {refit.seconds:.1f} s:</b> "
            f"{safe_text(refit.verdict())}.</p>{table or '<p>It agrees with every label.</p>'}"
        )
    )


@contextmanager
def random_state_kept() -> Iterator[None]:
    "Leaves the random numbers of Python, numpy and torch as they were."
    ours = random.getstate()
    arrays = np.random.get_state()  # noqa: NPY002 (the global state is what training changes)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(arrays)  # noqa: NPY002


def margins_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset,
    max_length: int | None,
) -> list[float]:
    "Score of the chosen answer less that of the rejected one."
    prompts, *both = zip(*(pair_texts(row, tokenizer) for row in data))
    chosen, rejected = (
        score_texts(model, tokenizer, prompts, part, max_length=max_length) for part in both
    )
    return (chosen - rejected).tolist()


def quick_reward_args(output_dir: str) -> RewardConfig:
    """Eight passes with a large learning rate: for models of a few hundred thousand weights and
    labels of a few minutes."""
    return RewardConfig(
        output_dir,
        learning_rate=3e-3,
        per_device_train_batch_size=8,
        num_train_epochs=8,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )


def refit_reward_model(
    labels: Dataset,  # of load_preferences
    model: PreTrainedModel | str,  # to start from, as RewardTrainer takes it; it is not changed
    processing_class: PreTrainedTokenizerBase | str | None = None,
    args: RewardConfig | None = None,  # None: quick_reward_args
    held_out: float = 0.25,  # share of prompts that is never trained on
    seed: int = 0,  # which prompts those are
) -> Refit:
    """A reward model trained on the labels whose prompts are not held out. Raises ValueError on
    fewer than two of them."""
    held = [is_held_out(row.get("prompt") or row["chosen"], held_out, seed) for row in labels]
    train = labels.select([i for i, kept in enumerate(held) if not kept])
    if len(train) < 2:
        raise ValueError(
            f"of {len(labels)} decided labels {len(train)} may be trained on: label at least "
            f"{2 - len(train)} more pairs, or lower held_out ({held_out:g})."
        )
    start, tokenizer = time.monotonic(), tokenizer_of(model, processing_class)
    with random_state_kept(), tempfile.TemporaryDirectory() as folder:
        own = model if isinstance(model, str) else copy.deepcopy(model)
        settings = args or quick_reward_args(folder)
        trainer = RewardTrainer(own, settings, train, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    scorer = trainer.model
    if not isinstance(scorer, PreTrainedModel):
        raise TypeError(f"the trained model is a {type(scorer).__name__}: give a PreTrainedModel.")
    margins = margins_of(scorer, tokenizer, labels, settings.max_length)
    kept = [
        name for name in ("prompt", "chosen", "rejected", "pair") if name in labels.column_names
    ]
    table = pd.DataFrame(dict(pair=range(len(labels)))).assign(
        **{name: labels[name][:] for name in kept}
    )
    return Refit(scorer, table.assign(margin=margins, held_out=held), time.monotonic() - start)


_APART_SECONDS = 0.2  # a choice that comes sooner after another one was not made by a reader
_ENOUGH_PAIRS = 8  # decided pairs to refit on


class PreferenceDesk:
    "Pairs to choose from by key or button; every choice is on the disk at once."

    def __init__(
        self, work: Labelling, refit: Callable[[], Refit] | None = None, refit_every: int = 0
    ):
        self.work, self.refit, self.refit_every = work, refit, refit_every
        self.refitted: Refit | None = None
        self.note, self.pressed = "", -math.inf  # pressed: when the last key came

    # ---- What keys and buttons do ----

    def press(self, key: str) -> None:
        "What a key or a button does: 1, 2, 0, u."
        now, before, key = self.work.clock(), self.pressed, key.lower()
        self.pressed, rows = now, self.work.rows
        if now - before < _APART_SECONDS:
            self.note = f"“{key}” came at once after another key and was not counted"
        elif key == "u":
            if rows:
                self.work.undo()
            self.note = (
                "the last choice is taken back" if rows else "there is no choice to take back"
            )
        elif key not in ("0", "1", "2"):
            self.note = f"“{key}” is no key here: 1, 2, 0 (a tie), or u"
        elif self.work.showing is None:
            self.note = "all are made; u takes the last one back"
        else:
            self.work.choose(key)
            self.note = f"saved: {dict(zip('120', ('answer 1', 'answer 2', 'a tie')))[key]}"
            if self.refit_every and len(self.work.rows) % self.refit_every == 0:
                self.learn()

    def learn(self) -> None:
        "Refit now. Raises ValueError where there is no model."
        if self.refit is None:
            raise ValueError("there is nothing to refit: give label_preferences a model.")
        start, fresh = self.work.clock(), self.work.labels.fresh
        decided = sum(row["choice"] != "0" for row in fresh)
        if decided < _ENOUGH_PAIRS:
            self.note = f"{decided} decided pairs are too few to refit: {_ENOUGH_PAIRS} are wanted"
            return
        busy = f"refitting on {decided} decided pairs ..."
        self.desk.view.value = render_labelling(self.work, busy)
        self.refitted = self.refit()
        self.work.since += self.work.clock() - start
        self.note = f"refitted after {len(self.work.rows)} choices"

    def last_key(self) -> str:
        "The last choice, which the field shows."
        return self.work.rows[-1]["choice"] if self.work.rows else ""

    # ---- What is seen ----

    def draw(self, **state: Any) -> str:
        "The pair, and below it the result of the last refit."
        refitted = render_refit(self.refitted) if self.refitted else ""
        return render_labelling(self.work, self.note) + refitted

    @cached_property
    def field(self) -> widgets.Text:
        "The field that hears keys."
        return widgets.Text(
            value=self.last_key(),
            description="key",
            placeholder="1 2 0 u",
            tooltip="1: answer 1 is better. 2: answer 2. 0: a tie. u or Backspace: take back.",
        )

    @cached_property
    def buttons(self) -> dict[str, widgets.Button]:
        "What the keys do, for the mouse."
        names = {"1": "1 is better", "2": "2 is better", "0": "0 tie", "u": "undo (u)"}
        buttons = {
            key: action_button(name, partial(self.click, partial(self.press, key)))
            for key, name in names.items()
        }
        if self.refit:
            buttons["refit"] = action_button("refit now", partial(self.click, self.learn))
        return buttons

    @cached_property
    def desk(self) -> Desk:
        "Controls above the pair, made at their first use."
        line = side_by_side(self.field, *self.buttons.values())
        self.field.layout.width, self.field.style.description_width = "10em", "2.5em"
        return Desk(self.draw, dict(key=self.field), [line], self.typed)

    def typed(self, change: Any) -> None:
        "The field was written to: a digit behind the last choice, or the last choice removed."
        if change:
            self.act(partial(self.press, change["new"][-1:] or "u"))

    def act(self, press: Callable[[], None]) -> None:
        "Press, and then show the last choice in the field, whatever came of it."
        try:
            press()
        finally:
            self.field.value = self.last_key()

    def click(self, press: Callable[[], None]) -> None:
        "A button: what it does, then the cursor goes back into the field."
        with self.desk.still():
            self.desk.careful(partial(self.act, press))
        self.field.focus()

    def _repr_html_(self) -> str:
        return self.draw()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return notebook_bundle(self.desk.box, self.draw(), repr(self), **kwargs)

    def __repr__(self) -> str:
        return (
            f"{len(self.work.rows)} of {len(self.work.order)} choices in {self.work.file.path.name}"
        )


def label_preferences(
    dataset: Dataset | Sequence[Mapping[str, Any]],  # two answers a row; prompt, unless whole texts
    path: str | Path,  # JSON lines; where the file is there, it goes on
    answers: tuple[str, str] = ("answer_1", "answer_2"),  # columns: texts or conversations
    seed: int = 0,  # which answer is on which side
    repeat_every: int = 8,  # after so many pairs one comes again, swapped; 0: none does
    model: PreTrainedModel | str | None = None,  # to refit: policy or reward model; not changed
    processing_class: PreTrainedTokenizerBase | str | None = None,
    args: RewardConfig | None = None,  # of the refit; None: quick_reward_args
    refit_every: int = 0,  # choices; 0: when the button is pressed
    held_out: float = 0.25,  # share of prompts whose labels only measure
) -> PreferenceDesk:
    """Choose by 1, 2, 0 and u; every choice is saved at once. Raises ValueError on rows that cannot
    be labelled, or a file of others."""
    if refit_every and model is None:
        raise ValueError(
            f"refit_every is {refit_every} and there is no model to refit: give model and "
            "processing_class."
        )
    work = Labelling(dataset, path, answers, seed, repeat_every)
    if model is None:
        return PreferenceDesk(work, None, refit_every)
    start, tokenizer = model, tokenizer_of(model, processing_class)

    def refit() -> Refit:
        return refit_reward_model(work.labels.training(), start, tokenizer, args, held_out)

    return PreferenceDesk(work, refit, refit_every)


def _scorer(model: PreTrainedModel | str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    "A model that RewardTrainer makes. Raises ValueError on others."
    if not isinstance(model, str) and not hasattr(getattr(model, "config", None), "num_labels"):
        raise ValueError(
            f"model is a {type(model).__name__}: give a reward model as RewardTrainer makes it, "
            "or its folder."
        )
    model = load_scorer(model)
    scorer_head(model)
    check_vocabulary(model, tokenizer, "reward model")
    return model


@torch.no_grad()
def _running_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[int]],
    batch_size: int = 64,
) -> list[list[float]]:
    "The head's score at each token of each row. Padding is on the right."
    was_training, running = model.training, []
    model.eval()
    for start in range(0, len(rows), batch_size):
        ids, mask = right_pad(rows[start : start + batch_size], tokenizer.pad_token_id)
        scores = token_scores(model, ids.to(model.device), mask.to(model.device)).cpu()
        running += [row[keep].tolist() for row, keep in zip(scores, mask.bool())]
    model.train(was_training)
    return running


def _check_causal(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: list[int]
) -> None:
    "Raises ValueError where the score so far depends on what comes later."
    half = max(1, len(row) // 2)
    other = row[:half] + row[:1] * (len(row) - half)  # as long, so that rounding is the same
    score, changed = (
        scores[half - 1] for scores in _running_scores(model, tokenizer, [row, other])
    )
    loose = 1e-6 if next(model.parameters()).dtype == torch.float32 else 1e-2
    if not math.isclose(score, changed, rel_tol=loose, abs_tol=loose):
        raise ValueError(
            f"{type(model).__name__} reads both ways: its score after {half} tokens is "
            f"{score:.6g}, and {changed:.6g} where other words follow, so that there "
            "is no score so far. Give a reward model that is made from a causal model."
        )


@dataclass(frozen=True)
class ScoredPair:
    "Two answers, token by token, and the score of a reward model so far at each."

    number: int  # row of the data
    prompt: str
    tokens: tuple[list[str], list[str]]  # chosen and rejected; the stop token is the last
    scores: tuple[list[float], list[float]]
    start: float | None  # at the end of the prompt; None without one

    @property
    def margin(self) -> float:
        "Score of the chosen answer less that of the rejected one: below zero, the model is wrong."
        return self.scores[0][-1] - self.scores[1][-1]

    def changes(self, which: int) -> list[float]:
        "What each token did to the score; they add up to the score, from that of the prompt."
        scores = self.scores[which]
        return [now - before for before, now in zip([self.start or 0.0, *scores], scores)]

    @property
    def text(self) -> str:
        return "\n".join("".join(tokens) for tokens in self.tokens)


def _rows_of_ids(
    pairs: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> Dataset:
    """Columns chosen_ids and rejected_ids. Raises ValueError on an empty set, or on rows that
    cannot be scored."""
    if not len(pairs):
        raise ValueError("there are 0 pairs to look at: give at least one.")
    if {"chosen_ids", "rejected_ids"} <= set(pairs.column_names):
        for i, row in enumerate(pairs):
            if not row["chosen_ids"] or not row["rejected_ids"]:
                raise ValueError(f"row {i} has no ids: drop the row.")
        return pairs
    return encode_pairs(pairs, tokenizer, max_length)


def score_pairs(
    model: PreTrainedModel | str,  # a reward model made by RewardTrainer, or its folder
    processing_class: PreTrainedTokenizerBase | str,
    pairs: Dataset,  # prompt, chosen, rejected: texts or conversations; or ids of encode_pairs
    max_length: int | None = None,  # as in training
) -> list[ScoredPair]:
    """The running score of every answer. Raises ValueError on another kind of model, and on rows
    that RewardTrainer refuses."""
    tokenizer = load_tokenizer(processing_class)
    scorer, data = _scorer(model, tokenizer), _rows_of_ids(pairs, tokenizer, max_length)
    rows = [(list(one), list(two)) for one, two in zip(data["chosen_ids"], data["rejected_ids"])]
    _check_causal(scorer, tokenizer, rows[0][0])
    scores = _running_scores(scorer, tokenizer, [ids for both in rows for ids in both])
    text = lambda ids: str(tokenizer.decode(ids))
    scored: list[ScoredPair] = []
    for i, (one, two) in enumerate(rows):
        differ = (k for k, (a, b) in enumerate(zip(one, two)) if a != b)
        shared = next(differ, min(len(one), len(two)) - 1)
        first, second = scores[2 * i : 2 * i + 2]
        tokens = [text([t]) for t in one[shared:]], [text([t]) for t in two[shared:]]
        start = first[shared - 1] if shared else None
        running = first[shared:], second[shared:]
        scored.append(ScoredPair(i, text(one[:shared]), tokens, running, start))
    return scored


@dataclass(frozen=True)
class PairLook:
    "Which pairs, in which order, and what is shown of them."

    place: int = 1
    signal: str = "running score"  # or change
    sort: str = "worst mistakes first"
    only: str = "all"
    find: str = ""  # in prompt or answers, capitals or not


_PAIR_SIGNALS = ("running score", "change")
PAIR_SORTS: dict[str, Callable[[ScoredPair], float]] = {
    "worst mistakes first": lambda one: one.margin,
    "closest calls first": lambda one: abs(one.margin),
    "surest first": lambda one: -one.margin,
    "as given": lambda one: one.number,
}
_PAIR_FILTERS: dict[str, Callable[[ScoredPair], bool]] = {
    "all": lambda one: True,
    "mistakes": lambda one: not one.margin > 0,
    "right": lambda one: one.margin > 0,
}


def pair_order(
    pairs: Sequence[ScoredPair],
    look: PairLook,
) -> list[int]:  # places in `pairs`; those that tie keep their order
    "Filter, then sort. Raises ValueError on an order or a filter that is not there."
    if look.sort not in PAIR_SORTS or look.only not in _PAIR_FILTERS:
        raise ValueError(
            f"cannot sort by {look.sort!r} and keep {look.only!r}: there are {list(PAIR_SORTS)} "
            f"and {list(_PAIR_FILTERS)}."
        )
    kept = [
        i
        for i, one in enumerate(pairs)
        if _PAIR_FILTERS[look.only](one)
        and look.find.casefold() in f"Pair {one.number}\n{one.prompt}\n{one.text}".casefold()
    ]
    return sorted(
        kept, key=lambda i: (math.isnan(pairs[i].margin), PAIR_SORTS[look.sort](pairs[i]))
    )


def pair_summary(
    pairs: Sequence[ScoredPair],
) -> str:
    "How many pairs are in the right order, and how far apart the two are."
    chosen, rejected = (torch.tensor([one.scores[which][-1] for one in pairs]) for which in (0, 1))
    metrics = preference_metrics(chosen, rejected)
    right = int((chosen > rejected).sum())
    return (
        f"{len(pairs)} pairs · accuracy {_share(right, len(pairs))} · mean margin "
        f"{signed(metrics['margin'])}"
    )


def pair_facts(one: ScoredPair) -> str:
    "What is known of a pair as a whole."
    chosen, rejected = (signed(scores[-1]) for scores in one.scores)
    verdict = "right" if one.margin > 0 else "wrong"
    start = "" if one.start is None else f" · at the end of the prompt {signed(one.start)}"
    return (
        f"Pair {one.number} · {verdict}, margin {signed(one.margin)} · chosen {chosen}, "
        f"rejected {rejected}{start}"
    )


def _pair_numbers(one: ScoredPair, which: int) -> dict[str, list[float]]:
    "The numbers under the tokens of one answer, signal by signal."
    return {"running score": one.scores[which], "change": one.changes(which)}


def render_pair(
    one: ScoredPair,
    signal: str = "running score",  # or change
) -> str:
    "Both answers with a number under each token, on one scale, and the table of all numbers below."
    rows = [_pair_numbers(one, which) for which in (0, 1)]
    vmax = (
        max((abs(x) for row in rows for x in row[signal] if math.isfinite(x)), default=0.0) or None
    )
    parts: list[str] = [
        f"<p><b>{safe_text(pair_facts(one))}</b></p>",
        "<details><summary>Prompt</summary><p "
        f'style="white-space:pre-wrap">{safe_prose(one.prompt)}</p></details>',
    ]
    for name, tokens, row in zip(("Chosen", "Rejected"), one.tokens, rows):
        parts += [
            f"<h4>{name}</h4>",
            token_strip(tokens, row[signal], name=signal, vmax=vmax),
            f"<details><summary>{name}: all numbers</summary>"
            f"{signal_table(tokens, **{key: torch.tensor(x) for key, x in row.items()})}</details>",
        ]
    return "".join(parts)


def render_pairs(
    pairs: Sequence[ScoredPair],
    look: PairLook,
) -> str:
    "The summary, and the pair that is looked at."
    order, head = pair_order(pairs, look), f"<p>{safe_text(pair_summary(pairs))}</p>"
    place = max(1, min(look.place, len(order)))
    where = f"{place} of {len(order)} · {look.signal} · {look.sort}" + (
        "" if look.only == "all" else f" · {look.only}"
    )
    where += f" · with “{look.find}”" if look.find else ""
    if not order:
        return on_white(f"{head}<p>No pair is left of {len(pairs)}: {safe_text(where)}.</p>")
    note = (
        "Each number is what the reward head says if the text stopped there; only the last one, "
        "at the stop token, was trained."
    )
    shown = render_pair(pairs[order[place - 1]], look.signal)
    return on_white(f"{head}<p>{safe_text(where)}</p>{shown}<p>{note}</p>")


def pair_record(one: ScoredPair) -> dict[str, Any]:
    "One pair as the script reads it: texts with everything visible, numbers as they are written."
    plain = lambda numbers: " ".join(signed(float(x)) for x in numbers).replace("−", "-")
    return dict(
        facts=pair_facts(one),
        asked=visible(one.prompt).replace("↵\n", "\n"),
        text=visible(one.text),
        number=one.number,
        margin=one.margin if math.isfinite(one.margin) else None,
        tokens=[[visible_token(token) for token in tokens] for tokens in one.tokens],
        rows=[
            {name: plain(x) for name, x in _pair_numbers(one, which).items()} for which in (0, 1)
        ],
    )


class RewardView(Html):
    """One pair as markup; with controls over all of them in a live notebook, and as a file of its
    own."""

    pairs: list[ScoredPair]
    look: PairLook

    @cached_property
    def desk(self) -> Desk:
        "The controls, made at their first use."
        place = control("place", (1, max(2, len(self.pairs)), 1))
        placeholder = "in prompt or answers, or pair 7; Enter"
        controls = dict(
            place=place,
            signal=control("signal", list(_PAIR_SIGNALS)),
            sort=control("sort_by", list(PAIR_SORTS)),
            only=control("only", list(_PAIR_FILTERS)),
            find=labelled_control(widgets.Text, "find", "", placeholder=placeholder),
        )
        restart_list(place, len(self.pairs))
        steps = [
            action_button(name, partial(step_through, place, by))
            for name, by in (("◀ previous", -1), ("next ▶", 1))
        ]
        lines = [
            side_by_side(*steps, place, controls["find"]),
            *(side_by_side(controls[name]) for name in ("signal", "sort", "only")),
        ]
        listing = [controls[name] for name in ("sort", "only", "find")]

        def relist(change: Any) -> None:
            if change and change["owner"] in listing:
                restart_list(place, len(pair_order(self.pairs, self.seen())))

        def draw(**state: Any) -> str:
            return render_pairs(self.pairs, PairLook(**state))

        return Desk(draw, controls, lines, relist)

    @property
    def controls(self) -> dict[str, widgets.Widget]:
        "The controls by name, as an explorer has them."
        return self.desk.controls

    def seen(self) -> PairLook:
        "What the controls choose now."
        return PairLook(**self.desk.state()) if "desk" in vars(self) else self.look

    def _repr_html_(self) -> str:
        return str(self) if self.seen() == self.look else self.desk.view.value

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return notebook_bundle(self.desk.box, self._repr_html_(), repr(self), **kwargs)

    def save_html(self, path: str | Path, most: int = 200) -> Path:
        """One file that needs no kernel and no network: the pairs in the order that the controls
        choose, `most` of them."""
        look = self.seen()
        everything = pair_order(self.pairs, replace(look, find="", only="all"))
        order = [self.pairs[i] for i in everything[:most]]
        cut = len(order) < len(self.pairs)
        note = f" · the first {len(order)} of them are in this file" if cut else ""
        page = script_page(
            "pairs.html",
            asset("reader-tools.js") + asset("pairs.js"),
            dict(
                pairs=[pair_record(one) for one in order],
                signals=list(_PAIR_SIGNALS),
                signal=look.signal,
                sort=look.sort,
                only=look.only,
                find=look.find,
            ),
            summary=safe_text(pair_summary(self.pairs) + note),
            plain=breakable("".join(render_pair(one) for one in order[:3])),
        )
        write_text_atomic(path, page)
        return Path(path)


def reward_view(
    model: PreTrainedModel | str,  # a reward model made by RewardTrainer, or its folder
    processing_class: PreTrainedTokenizerBase | str,
    pairs: Dataset,  # prompt, chosen, rejected: texts or conversations; or ids of encode_pairs
    max_length: int | None = None,  # as in training
) -> RewardView:
    """The score along the tokens of both answers, worst mistakes first. Raises ValueError on other
    models, and on rows that RewardTrainer refuses."""
    scored = score_pairs(model, processing_class, pairs, max_length)
    seen = RewardView(render_pairs(scored, PairLook()))
    seen.pairs, seen.look = scored, PairLook()
    return seen
