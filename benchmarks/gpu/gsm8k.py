"""verl's published run on GSM8K: data, reward, and the points of a run drawn over theirs.

    python benchmarks/gpu/gsm8k.py --data runs/gsm8k/data      openai/gsm8k from the hub, 8,792 rows
    rlhf-nb ppo --config gsm8k.yaml                            40 steps, one GPU
    python benchmarks/gpu/gsm8k.py --draw runs/gsm8k/ppo       curve.png in the run's folder

Needs `pip install datasets matplotlib`. A prompt is a problem of the data set and the sentence that
asks for `#### ` before the answer; the reward is 1 where the last number behind `#### ` is right.
Step 9 of verl's log is after ten updates, which is our step 10.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

THEIRS = {10: 0.013, 40: 0.463, 50: 0.480, 110: 0.523, 435: 0.569}  # updates: share of the test set
ASKED = """Let's think step by step and output the final answer after "####"."""


def correct(
    prompts: list, responses: list[str], answer: list[str], **columns: object
) -> list[float]:
    "1 for the right number behind the last ####, else 0."
    found = [re.findall(r"#### (-?[0-9.,]+)", text) for text in responses]
    said = [numbers[-1].replace(",", "") if numbers else None for numbers in found]
    return [float(x == right) for x, right in zip(said, answer, strict=True)]


def row(problem: dict[str, str]) -> dict:
    "As the trainer reads it: one message, and the number."
    content = f"{problem['question']} {ASKED}"
    number = problem["answer"].split("####")[1].strip().replace(",", "")
    return dict(prompt=[dict(role="user", content=content)], answer=number)


def draw(folder: Path) -> Path:
    "The run's evaluations and verl's. Raises FileNotFoundError without a run."
    import matplotlib.pyplot as plt

    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    ours = {x["step"]: x["eval_score"] for x in log if "eval_score" in x}
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(list(THEIRS), list(THEIRS.values()), "s--", color="grey", label="verl, its log")
    axes.plot(list(ours), list(ours.values()), "o-", label="ours")
    axes.set(xlabel="updates", ylabel="right on the test set", xscale="log", ylim=(0, 1))
    axes.legend()
    figure.savefig(folder / "curve.png", dpi=150)
    return folder / "curve.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="folder to write the data set to")
    parser.add_argument("--draw", type=Path, help="folder of a run")
    asked = parser.parse_args()
    if asked.data:
        from datasets import load_dataset

        splits = load_dataset("openai/gsm8k", "main")
        splits.map(row, remove_columns=["question"]).save_to_disk(asked.data)
    if asked.draw:
        print(draw(asked.draw))


if __name__ == "__main__":
    main()
