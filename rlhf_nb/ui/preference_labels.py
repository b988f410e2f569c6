"""Pairs to choose from, the file of the choices, and how reliable they are. No widgets."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_nb.base.encoding import Turns
from rlhf_nb.base.files import parse_json
from rlhf_nb.evaluate import win_rate_interval
from rlhf_nb.training.completions import complete
from rlhf_nb.training.prompts import turns_text
from rlhf_nb.ui.html import percent

Rows = Sequence[Mapping[str, Any]]


def draw_pairs(
    model: nn.Module,  # a policy
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset,  # column prompt; other columns come along
    response_length: int = 53,
    temperature: float = 1.0,
    seed: int = 0,
) -> Dataset:  # with columns answer_1 and answer_2
    "Two samples of a policy for every prompt; pairs that are equal, empty or cut off are left out."
    how = data["prompt"], response_length, temperature
    one, two = (complete(model, tokenizer, *how, seed=2 * seed + i) for i in range(2))
    drawn = zip(data, one.texts, two.texts, one.stopped, two.stopped)
    rows = [
        {**row, "answer_1": first, "answer_2": second}
        for row, first, second, *stopped in drawn
        if all(stopped) and first and second and first != second
    ]
    if not rows:
        fix = "raise response_length or temperature, or train the policy further"
        raise ValueError(f"of {len(data)} prompts none got two different answers that end: {fix}.")
    return Dataset.from_list(rows)


@dataclass(frozen=True)
class Showing:
    "One pair as a person sees it."

    pair: int  # row of the data set
    left: int  # which of its answers, 0 or 1, is shown as answer 1
    again: bool  # the second time, the other way round

    def answers(self, pair: Mapping[str, Any]) -> list[Turns]:
        return pair["answers"][:: -1 if self.left else 1]


_PAIRS_APART = 3  # pairs at least between two showings of one


def showings(
    pairs: int,
    repeat_every: int = 8,  # after so many new pairs, one comes again; 0: none does
    seed: int = 0,
) -> list[Showing]:
    "Which pair when, and on which side; more pairs do not change the beginning. Raises ValueError."
    if repeat_every and repeat_every <= _PAIRS_APART:
        raise ValueError(f"repeat_every is {repeat_every}: give 0, or more than {_PAIRS_APART}.")
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


def checked_pairs(data: Dataset | Rows, answers: tuple[str, str]) -> list[dict[str, Any]]:
    "Prompt and answers of each row. Raises ValueError, naming it, where nobody could label it."
    pairs: list[dict[str, Any]] = []
    wanted = f"give columns {' and '.join(answers)} (answers= says how they are called), and prompt"
    for number, row in enumerate(data):
        if missing := [name for name in answers if name not in row]:
            raise ValueError(f"the data have columns {list(row)} and lack {missing}: {wanted}.")
        both = [row[name] for name in answers]
        for name, x in zip(("prompt", *answers), (row.get("prompt"), *both)):
            if not _is_turns(x) and not (name == "prompt" and x is None):
                fix = "give a text that is not empty, or a conversation; or drop the row"
                raise ValueError(f"row {number}: {name} is {x!r}: {fix}.")
        if both[0] == both[1]:
            raise ValueError(f"row {number}: both answers are the same: drop the row.")
        pairs.append(dict(prompt=row.get("prompt"), answers=both))
    if not pairs:
        raise ValueError(f"there are 0 pairs to label: {wanted}.")
    return pairs


class LabelFile:
    "JSON lines, each on the disk before `append` returns. A torn last line is overwritten."

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
        lines, records = raw.splitlines(keepends=True), list[Any]()
        for line in lines:
            try:
                record = parse_json(line)
            except ValueError:  # of JSON, or of UTF-8
                record = None
            records.append(record if isinstance(record, dict) and line[-1:] == b"\n" else None)
        if None in records[:-1]:
            bad = records.index(None)
            why = f"line {bad + 1} is no JSON object: {lines[bad][:60]!r}"
            raise ValueError(f"{self.path.name}, {why}. Fix or delete it; all others are kept.")
        self.torn = len(lines[-1]) if records[-1:] == [None] else 0
        self.size = len(raw) - self.torn
        return [record for record in records if record is not None]

    def append(self, record: Mapping[str, Any]) -> None:
        "One more line, in place of a torn one. ValueError where somebody else has written since."
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.stamp() != self.seen:
            why = "was since written by somebody else: it is open elsewhere. This was not saved"
            raise ValueError(f"{self.path.name} {why}; close the other one, run this cell again.")
        try:
            with open(self.path, "ab") as file:
                file.truncate(self.size)
                file.write(line := (json.dumps(record) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
            self.size, self.torn = self.size + len(line), 0
        finally:
            self.seen = self.stamp()


def verdict_sentence(row: Mapping[str, Any]) -> float:
    "Which of the data's two answers was better, 0 or 1; a tie is one half."
    return {"1": row["left"], "2": 1 - row["left"], "0": 0.5}[row["choice"]]


def share_sentence(count: int, of: int) -> str:
    "A share with its 95 % interval, in words."
    if not of:
        return "none yet"
    low, high = win_rate_interval(count, 0, of - count)
    share, least, most = (percent(x, 0) for x in (count / of, low, high))
    return f"{count} of {of} ({share}; 95 % interval {least} to {most})"


@dataclass(frozen=True)
class Labels:
    "The choices of a file that are in force, in order, and how reliable the person is."

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
        "Columns chosen, rejected, pair, perhaps prompt: first showings, no ties. Or ValueError."
        rows = [row for row in self.fresh if row["choice"] != "0"]
        if not rows:
            fix = "label more, or draw pairs that differ more"
            raise ValueError(f"of {len(self.fresh)} labelled pairs none is decided: {fix}.")
        names = ["prompt"] * (rows[0]["prompt"] is not None) + ["chosen", "rejected", "pair"]
        return Dataset.from_list([{name: row[name] for name in names} for row in rows])


def report_lines(labels: Labels) -> dict[str, str]:
    "How reliable the labels are, question by question."
    decided = sum(row["choice"] != "0" for row in labels.fresh)
    seconds = [row["seconds"] for row in labels.rows if row.get("seconds") is not None]
    (same, twice), (first, of) = labels.agreement(), labels.first_taken()
    low, high = win_rate_interval(first, 0, of - first) if of else (0, 1)
    lean = ": the place seems to decide, so read both before you choose" * (not low <= 0.5 <= high)
    hasty = sum(x < 1 for x in seconds)
    pace = f"{median(seconds):.1f} s (median), {hasty} in under a second" if seconds else "none yet"
    lines = {
        "labelled": f"{len(labels.fresh)} pairs: {decided} decided, {len(labels.fresh) - decided} "
        "ties (kept in the file, left out of training), "
        f"{twice} shown again, {labels.undone} taken back",
        "time a pair": pace,
        "agreement with yourself": share_sentence(same, twice),
        "answer 1 was taken": share_sentence(first, of) + lean,
    }
    if torn := labels.torn:
        lines["torn"] = f"{torn} bytes of a last line were not written to their end: passed over"
    return lines


def _labels_in(file: LabelFile) -> Labels:
    "The choices that were not taken back. Raises ValueError on a line that is none."
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(records := file.read(), 1):
        if row.get("choice") == "undo" and rows:
            rows.pop()
        elif row.get("choice") in ("0", "1", "2") and {"pair", "left", "answers"} <= set(row):
            rows.append(dict(row))
        else:
            why = f"line {number} is no choice of label_preferences: {str(row)[:80]}"
            raise ValueError(f"{file.path.name}, {why}. Give a file that it wrote, or a new one.")
    return Labels(rows, (len(records) - len(rows)) // 2, file.torn)


def read_labels(path: str | Path) -> Labels:
    "The choices of a file of `label_preferences`. Raises FileNotFoundError or ValueError."
    file = LabelFile(path)
    if not file.path.exists():
        raise FileNotFoundError(f"there is no file {file.path}: label_preferences writes one.")
    return _labels_in(file)


def load_preferences(path: str | Path) -> Dataset:
    "Pairs for RewardTrainer: chosen, rejected, pair, prompt. No tie, no repeat, none taken back."
    return read_labels(path).training()


class PersonJudge:
    "The choices of a file of `label_preferences`, for `judge_pairs`. Raises as `read_labels` does."

    name = "a person"

    def __init__(self, path: str | Path):
        self.rows = read_labels(path).fresh
        self.verdicts: dict[tuple[str, ...], float] = {}
        for row in self.rows:
            prompt, one, two = map(turns_text, (row["prompt"], *row["answers"]))
            verdict = {"1": 0.0, "2": 1.0, "0": 0.5}[row["choice"]]
            self.verdicts |= {(prompt, one, two): verdict, (prompt, two, one): 1 - verdict}

    def usage(self) -> str:
        "How many pairs were judged, for a report."
        return f"{len(self.rows)} pairs were judged by a person"

    def __call__(
        self, prompts: list[str], pairs: list[tuple[str, str]], **columns: list
    ) -> list[float | None]:
        "0: the first answer is better. 1: the second. 0.5: a tie, or the same. None: unknown."
        judged = lambda x, one, two: 0.5 if one == two else self.verdicts.get((x, one, two))
        return [judged(prompt, *pair) for prompt, pair in zip(prompts, pairs, strict=True)]


def _continue(rows: Rows, order: Sequence[Showing], pairs: Rows, name: str) -> None:
    "Raises ValueError where the file was labelled on other pairs, or in another order."
    fix = "give the data, seed and repeat_every that it was begun with, or a path that is new"
    if len(rows) > len(order):
        made = f"{len(rows)} choices and there are {len(order)} to make"
        raise ValueError(f"{name} has {made}: {fix}.")
    for i, (row, showing) in enumerate(zip(rows, order)):
        pair, choice = pairs[showing.pair], f"choice {i + 1} in {name}"
        if any(row[key] != x for key, x in asdict(showing).items()):
            other = f"pair {showing.pair} would be shown here, or its sides the other way round"
            raise ValueError(f"{choice} is of pair {row['pair']}, and {other}: {fix}.")
        if [row.get("prompt"), row["answers"]] != [pair["prompt"], showing.answers(pair)]:
            why = f"was made between other texts than row {showing.pair} has"
            raise ValueError(f"{choice} {why}: {fix}.")


class Labelling:
    "Pairs that wait for a choice, and the file of those that were made."

    def __init__(
        self,
        dataset: Dataset | Rows,
        path: str | Path,
        answers: tuple[str, str] = ("answer_1", "answer_2"),
        seed: int = 0,
        repeat_every: int = 8,
        clock: Callable[[], float] = time.monotonic,  # seconds
    ):
        self.pairs, self.file, self.clock = checked_pairs(dataset, answers), LabelFile(path), clock
        self.order, made = showings(len(self.pairs), repeat_every, seed), _labels_in(self.file)
        self.rows, self.undone, self.since = made.rows, made.undone, clock()
        _continue(self.rows, self.order, self.pairs, self.file.path.name)

    @property
    def showing(self) -> Showing | None:
        "The next choice to make; None where all are made."
        return self.order[len(self.rows)] if len(self.rows) < len(self.order) else None

    @property
    def labels(self) -> Labels:
        "The choices so far."
        return Labels(self.rows, self.undone, self.file.torn)

    def answers(self) -> tuple[Turns | None, list[Turns]]:
        "The prompt and the two answers as they are shown. Raises ValueError where all are made."
        if self.showing is None:
            raise ValueError(f"all {len(self.order)} choices are made: no pair is shown.")
        pair = self.pairs[self.showing.pair]
        return pair["prompt"], self.showing.answers(pair)

    def choose(self, key: str) -> None:
        "1: answer 1 is better. 2: answer 2. 0: a tie. It is on the disk then. Or ValueError."
        at, now = self.showing, self.clock()
        if key not in ("0", "1", "2") or at is None:
            made = f"after {len(self.rows)} of {len(self.order)} choices"
            raise ValueError(f"key {key!r} {made}: give 1, 2 or 0 while a pair is shown.")
        prompt, both = self.answers()
        sides: dict[str, Any] = {"1": both, "2": both[::-1], "0": (None, None)}
        chosen, rejected = sides[key]
        row: dict[str, Any] = dict(prompt=prompt, chosen=chosen, rejected=rejected, answers=both)
        row |= dict(choice=key, **asdict(at), seconds=round(now - self.since, 2))
        self.file.append(row)
        self.rows, self.since = [*self.rows, row], now

    def undo(self) -> None:
        "Take the last choice back; its pair is shown again. Raises ValueError where there is none."
        if not self.rows:
            raise ValueError("there is no choice to take back.")
        none: dict[str, Any] = dict(prompt=None, chosen=None, rejected=None)
        self.file.append(none | dict(choice="undo", pair=self.rows[-1]["pair"]))
        self.rows, self.undone, self.since = self.rows[:-1], self.undone + 1, self.clock()
