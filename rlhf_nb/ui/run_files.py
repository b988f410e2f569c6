"""The files of a run: rollouts, log, completions."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from functools import cache, lru_cache
from itertools import groupby
from numbers import Real
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_nb.base.files import parse_json
from rlhf_nb.packing import score_sums
from rlhf_nb.rollout import Rollout
from rlhf_nb.training.kept import kept_rollouts, rollout_files
from rlhf_nb.training.logs import logged_rows
from rlhf_nb.training.metrics import LOG_NAMES
from rlhf_nb.training.saving import merge_rollouts

# ---- Files ----


def ppo_lines(metrics: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    "PPO's log entries, a row an episode count; where a stretch was done again, the last attempt."
    kept, limit = list[dict[str, float]](), math.inf
    for line in reversed(list(metrics)):
        numbers = {name: float(x) for name, x in line.items() if isinstance(x, Real)}
        episode = numbers.get("episode", math.nan)
        if line.get("stage", "ppo") == "ppo" and episode <= limit:
            kept.append(numbers)
            limit = episode
    frame = pd.DataFrame(kept[::-1], columns=None if kept else ["episode"]).astype(float)
    return frame.replace([math.inf, -math.inf], math.nan).groupby("episode", as_index=False).last()


def ranges_of(numbers: Iterable[int], most: int = 8) -> str:
    "`0 to 3, 7, 9 to 12`; of many runs the first and the last."
    # In a run, a number and its place are equally far apart.
    groups = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[x for _, x in pairs] for _, pairs in groups]
    words = [f"{x[0]} to {x[-1]}" if len(x) > 2 else ", ".join(map(str, x)) for x in runs]
    return ", ".join(words if len(words) <= most else [*words[: most - 1], "…", words[-1]])


_NUMBERS = "response_ids mask stopped kl scores raw_scores logprobs engine_logprobs".split()


def repetition_shares(ids: Tensor, mask: Tensor) -> Tensor:
    "Share [B] of each row's runs of three tokens that came before in it."
    if ids.shape[1] < 3:
        return torch.zeros(len(ids))
    base, real = int(ids.max()) + 1, mask[:, 2:].bool()
    runs = (ids[:, :-2] * base + ids[:, 1:-1]) * base + ids[:, 2:]
    runs = torch.where(real, runs, -1 - torch.arange(runs.shape[1])).sort(1).values
    again = ((runs[:, 1:] == runs[:, :-1]) & (runs[:, 1:] >= 0)).sum(1)
    return again / real.sum(1).clamp(min=1)


ENGINE_GAP = 0.5  # nats between sampler and trainer for the same token, far beyond rounding


def episode_numbers(tensors: Mapping[str, Any]) -> pd.DataFrame:
    "Length, stop, repetition, KL, scores and `apart` of each episode, from what a rollout has."
    mask = tensors["mask"].bool()
    frame = dict(length=mask.sum(1), repetition=repetition_shares(tensors["response_ids"], mask))
    if (stopped := tensors.get("stopped")) is not None:
        frame["stopped"] = stopped
    if (kl := tensors.get("kl")) is not None:
        frame["kl"] = kl.float().masked_fill(~mask, 0.0).sum(1)
    if (engine := tensors.get("engine_logprobs")) is not None and "logprobs" in tensors:
        gap = (engine.float() - tensors["logprobs"].float()).abs().masked_fill(~mask, 0.0)
        frame["apart"] = (gap > ENGINE_GAP).sum(1)
    raw, scores = tensors.get("raw_scores"), tensors.get("scores")
    if (score := raw if scores is None else scores) is not None:
        frame["score"] = score_sums(score).float()
    if raw is not None:
        frame["raw_score"] = score_sums(raw).float()
    return pd.DataFrame({name: x.numpy() for name, x in frame.items()})


def numbers_of(path: Path) -> pd.DataFrame:
    "The numbers of each episode in a file, no texts. Raises ValueError where it is damaged."
    try:
        with safe_open(path, "pt") as file:
            # A safetensors file has keys and cannot be iterated over.
            tensors = {name: file.get_tensor(name) for name in file.keys() if name in _NUMBERS}
            return episode_numbers(tensors)
    except (SafetensorError, OSError, LookupError) as error:
        how = "remove it, or look at another update"
        raise ValueError(f"{path} cannot be read ({error}): {how}.") from None


def spread(count: int, most: int) -> list[int]:
    "Some of `count` indices, the first and the last among them."
    n = min(count, most)
    return [round(i * (count - 1) / (n - 1)) for i in range(n)] if n > 1 else [count - 1][:count]


class Updates:
    "What a browser moves about in: the updates of a run, each read when it is wanted."

    path: Path
    counted: str = "tokens"  # or words
    files: Mapping[int, Any]  # the updates, in order
    log = pd.DataFrame()  # what was logged, a row an update; empty where nothing was

    def __init__(self) -> None:
        "What was read is kept: the last four updates, and of all the numbers and the prompts."
        self._rollouts = lru_cache(4)(lambda update, stamp: self._read(update))
        self._numbers = cache(lambda update, stamp: self._count(update))
        self._prompts = cache(lambda update, stamp: list(map(hash, self._texts(update))))

    def refresh(self) -> None:
        "Look for what is new."
        raise NotImplementedError

    def _stamp(self, update: int) -> Hashable:
        "Another one where the update was written anew."
        return update

    def _read(self, update: int) -> Rollout:
        raise NotImplementedError

    def _count(self, update: int) -> pd.DataFrame:
        return episode_numbers(vars(self.rollout(update)))

    def _texts(self, update: int) -> list[str]:
        return self.rollout(update).prompts

    def rollout(self, update: int) -> Rollout:
        "One update, all ranks."
        return self._rollouts(update, self._stamp(update))

    def numbers(self, updates: Iterable[int] | None = None) -> pd.DataFrame:
        "Length, score, KL and repetition of each episode of some or all updates, each read once."
        chosen = list(self.files if updates is None else updates)
        frames = [self._numbers(update, self._stamp(update)) for update in chosen]
        numbers = pd.concat(frames, keys=chosen, names=["update", "episode"])
        return numbers.reset_index()

    def again(self, prompt: str, most: int = 8) -> list[tuple[int, int]]:
        "Update and row of each time that a prompt was sampled, one an update; of many, some."
        hits = []
        for update in self.files:
            hashes = self._prompts(update, self._stamp(update))
            if hash(prompt) in hashes:
                hits.append((update, hashes.index(hash(prompt))))
        return [hits[i] for i in spread(len(hits), most)]

    def completions(self) -> dict[str, list[dict[str, str]]]:
        "What tables of completions hold, by prompt: which table, answer, score."
        return {}


class RunFolder(Updates):
    "The rollouts of a run, which may still be going on. Raises ValueError where it kept none."

    files: Mapping[int, list[Path]]

    def __init__(self, path: str | Path):
        super().__init__()
        self.path = Path(path)
        kept_rollouts(self.path)
        self.refresh()

    def refresh(self) -> None:
        "Look for new files, and for new lines of the log; a line without a step has an episode."
        self.files = rollout_files(self.path)
        logs = map(logged_rows, (self.path, self.path / "ppo"))
        frame, self.log = ppo_lines(next(filter(None, logs), [])), pd.DataFrame()
        if len(frame) and "step" in frame:
            batch = (frame["episode"] / frame["step"]).replace(math.inf, math.nan).median()
            by_episode = (frame["episode"] / batch).round()
            self.log = frame.assign(update=frame["step"].fillna(by_episode) - 1)

    def _stamp(self, update: int) -> Hashable:
        return update, *((file.name, file.stat().st_mtime_ns) for file in self.files[update])

    def _read(self, update: int) -> Rollout:
        return merge_rollouts([Rollout.load(file) for file in self.files[update]])

    def _count(self, update: int) -> pd.DataFrame:
        return pd.concat([numbers_of(file) for file in self.files[update]], ignore_index=True)

    def _texts(self, update: int) -> list[str]:
        texts: list[str] = []
        for file in self.files[update]:
            with safe_open(file, "pt") as opened:
                texts += parse_json(opened.metadata()["described"])["prompts"]
        return texts

    def completions(self) -> dict[str, list[dict[str, str]]]:
        tables = [*self.path.glob("completions/*.csv"), *self.path.glob("ppo/completions/*.csv")]
        rows: dict[str, list[dict[str, str]]] = {}
        for table in sorted(tables):
            frame = pd.read_csv(table, dtype=str, keep_default_na=False)
            if {"query", "model response"} <= set(frame):  # the first row of each prompt
                for row in frame.drop_duplicates("query").to_dict("records"):
                    its = dict(table=table.stem, answer=row["model response"])
                    its |= dict(score=row.get("score", ""))
                    rows.setdefault(row["query"], []).append(its)
        return rows


# Of the numbers of an update's episodes: what a trainer would have logged them as.
MEANS = dict(raw_score=LOG_NAMES["raw score"], kl=LOG_NAMES["KL"], length=LOG_NAMES["length"])


def log_or_means(run: Updates) -> pd.DataFrame:
    "What a run logged; where it logged nothing, means over the episodes of each update."
    if len(run.log):
        return run.log
    means = run.numbers().groupby("update").mean(numeric_only=True).reset_index()
    if "raw_score" not in means and "score" in means:
        means["raw_score"] = means["score"]
    return means.drop(columns=["episode", "score"], errors="ignore").rename(columns=MEANS)
