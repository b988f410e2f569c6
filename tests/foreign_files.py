"""Small files as other trainers write them, made from the descriptions of their formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def verl(folder: Path, updates: int = 3, n: int = 4) -> Path:
    "`trainer.rollout_data_dir`: a file an update, named after it."
    for step in range(1, updates + 1):
        rows = [
            dict(
                input=f"user\nWhat is {i} + {step}?\nassistant\n",
                output=f"It is {i + step} .",
                gts=str(i + step),
                score=float(i % 2),
                step=step,
                acc=bool(i % 2),
            )
            for i in range(n)
        ]
        write_lines(folder / f"{step}.jsonl", rows)
    return folder


def trl(folder: Path, updates: int = 2, chat: bool = True, rewards: int = 2) -> Path:
    "GRPO with `log_completions`: `completions/completions_00001.parquet`, a file a logging step."
    (folder / "completions").mkdir(parents=True)
    said = lambda role, text: [dict(role=role, content=text)] if chat else text
    for step in range(1, updates + 1):
        pd.DataFrame(
            dict(
                step=[step] * 4,
                prompt=[said("user", f"sum {i // 2}") for i in range(4)],
                completion=[said("assistant", f"well {i} I think") for i in range(4)],
                accuracy_reward=[0.0, 1.0, None, 1.0],
                **(dict(format_reward=[0.5, 0.5, 0.25, 0.0]) if rewards > 1 else {}),
                answer_length=[3, 3, 3, 3],
                advantage=[-1.0, 1.0, 0.0, 0.0],
            )
        ).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")
    return folder


def trl_ppo(path: Path) -> Path:
    "The table of completions of trl's PPO, as CSV."
    rows = dict(query=["a, b", "c"], score=[0.5, -1.25])
    pd.DataFrame({**rows, "model response": ['say "hi"\nthere', ""]}).to_csv(path, index=False)
    return path


def openrlhf(path: Path) -> Path:
    "`openrlhf.cli.batch_inference` with `--eval_task rm`."
    rows = [dict(input=f"ask {i}", output=f"say {i}</s>", reward=i / 2) for i in range(3)]
    return write_lines(path, rows)


def openrlhf_samples(path: Path) -> Path:
    "`train/generated_samples`, a table as Weights & Biases keeps it."
    data = [[step, f"ask {step} say {step}", step / 10] for step in (1, 2, 3)]
    table = dict(columns=["global_step", "text", "reward"], data=data, ncols=3, nrows=3)
    path.write_text(json.dumps(table))
    return path


def nemo(folder: Path, updates: int = 2) -> Path:
    "`train_data_step1.jsonl` in the log folder; every value in a list of one, as batches of one."
    for step in range(1, updates + 1):
        rows = []
        for i in range(3):
            answer = [30 + k for k in range(i + 2)]
            ids = [11, 12, *answer, *[0] * (3 - i)]  # padded to the longest of the batch
            at = [0, 0, *[1] * len(answer), *[0] * (3 - i)]
            logprobs = [-0.1 * k * m for k, m in enumerate(at)]
            rows.append(
                dict(
                    content=[["user asks", " ".join(f"w{k}" for k in answer)]],
                    rewards=[float(i)],
                    input_lengths=[2 + len(answer)],
                    token_ids=[ids],
                    token_loss_mask=[at],
                    sample_loss_mask=[1.0],
                    advantages=[[0.5 * m for m in at]],
                    generation_logprobs=[[x - 0.01 * m for x, m in zip(logprobs, at)]],
                    prev_logprobs=[logprobs],
                    idx=i,
                )
            )
        write_lines(folder / f"train_data_step{step}.jsonl", rows)
    chat = [dict(role="user", content="asks"), dict(role="assistant", content="says")]
    write_lines(folder / "val_data_step1.jsonl", [dict(content=[chat], rewards=[1.0], idx=0)])
    return folder


class Tokenizer:
    "Stands in for a tokenizer of those ids."

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" w{i}" for i in ids)
