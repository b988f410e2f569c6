"""From your own data to a judged policy: the questions in their order, and the command of each
answer, as one picture."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from rlhf_nb.ui.html import element
from rlhf_nb.ui.loop import ACCENT, INK, WIDTH, Picture, arrow, group, rectangle, sheet, words

PPO = "rlhf-nb ppo --dataset_name data.jsonl --model_name_or_path runs/sft "
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Branch:
    "An answer to a question, and the command to run."

    answer: str
    command: str
    leaves: str  # what the command writes; empty: it only prints


@dataclass(frozen=True)
class Question:
    "A question, in lines, and its branches."

    lines: tuple[str, ...]
    branches: tuple[Branch, ...]


QUESTIONS = (
    Question(
        ("1. Are there answers", "that people wrote?"),
        (
            Branch(
                "yes, and a model to start from",
                "rlhf-nb sft --dataset_name data.jsonl --model_name_or_path MODEL --output_dir "
                "runs/sft",
                "runs/sft/model.safetensors",
            ),
            Branch(
                "yes, and no model: a small one from nothing",
                "rlhf-nb sft --dataset_name data.jsonl --from_scratch --vocab_size 2048 "
                "--learning_rate 3e-3 --output_dir runs/sft",
                "runs/sft/model.safetensors",
            ),
            Branch(
                "no: a chat model as it is, on conversations",
                "rlhf-nb ppo --dataset_name chat.jsonl --model_name_or_path CHAT_MODEL "
                "--reward_function reward.py:score --save_rollouts --output_dir runs/chat",
                "runs/chat/model.safetensors",
            ),
        ),
    ),
    Question(
        ("2. What says that an", "answer is better?"),
        (
            Branch(
                "preferences: train a reward model",
                "rlhf-nb reward --dataset_name pairs.jsonl --model_name_or_path runs/sft "
                "--output_dir runs/reward",
                "runs/reward/model.safetensors",
            ),
            Branch(
                "and a judge for the end: a second reward model, on pairs kept apart",
                "rlhf-nb reward --dataset_name kept_pairs.jsonl --model_name_or_path runs/sft "
                "--output_dir runs/judge",
                "runs/judge/model.safetensors",
            ),
            Branch(
                "a judge (a model at an endpoint): collect its verdicts, make pairs of them",
                "rlhf-nb judge --dataset_name data.jsonl --model_name_or_path runs/sft "
                "--temperature 1 --judge_model NAME --judge_base_url URL --output verdicts.csv",
                "verdicts.csv",
            ),
            Branch(
                "a function: nothing to train. Test it by hand, then look at memory",
                PPO + "--reward_function reward.py:score --dry_run --gpu_memory 24",
                "",
            ),
        ),
    ),
    Question(
        ("3. How is the", "policy trained?"),
        (
            Branch(
                "by the reward model",
                PPO + "--reward_model_path runs/reward --save_rollouts --output_dir runs/ppo",
                "runs/ppo/rollouts",
            ),
            Branch(
                "by the function",
                PPO + "--reward_function reward.py:score --save_rollouts --output_dir runs/ppo",
                "runs/ppo/rollouts",
            ),
            Branch(
                "by both",
                PPO + "--reward_model_path runs/reward --reward_function reward.py:score "
                "--reward_weights 1 0.5 --save_rollouts --output_dir runs/ppo",
                "runs/ppo/rollouts",
            ),
            Branch(
                "in less memory: several answers to a prompt in place of a value model",
                PPO + "--reward_function reward.py:score --advantage_estimator rloo "
                "--num_generations 4 --output_dir runs/rloo",
                "runs/rloo/model.safetensors",
            ),
            Branch(
                "in less memory still: an adapter, merged at the end",
                PPO + "--reward_function reward.py:score --use_peft --save_merged --output_dir "
                "runs/merged",
                "runs/merged/model.safetensors",
            ),
        ),
    ),
    Question(
        ("4. Is it better,", "and at what?"),
        (
            Branch(
                "read the answers of every update",
                "rlhf-nb view runs/ppo --no_browser",
                "runs/ppo/rollouts.html",
            ),
            Branch(
                "see the curves",
                "rlhf-nb plot runs/ppo --output curves",
                "curves.svg",
            ),
            Branch(
                "against the start, by a judge that training never used",
                "rlhf-nb judge --dataset_name test.jsonl --model_name_or_path runs/ppo "
                "--opponent_name_or_path runs/sft --judge_model runs/judge --output wins.csv",
                "wins.csv",
            ),
        ),
    ),
)


def code(x: float, y: float, text: str) -> str:
    "A line of a command."
    font = {"font_size": 11, "fill": INK, "xml:space": "preserve", "style": f"font-family:{MONO}"}
    return element("text", escape(text), x=x, y=y, **font)


def command_lines(command: str, width: int = 82) -> list[str]:
    "A command in lines; an option stays beside its values."
    first, *options = re.split(r" (?=--)", command)
    lines = [first]
    for option in options:
        if len(lines[-1]) + 1 + len(option) <= width:
            lines[-1] += f" {option}"
        else:
            lines.append(f"    {option}")
    return lines


def branch_box(branch: Branch, x: float, y: float, w: float) -> tuple[str, float]:
    "An answer above its command, and the height of the box."
    lines = command_lines(branch.command)
    height = 30 + 15 * len(lines)
    parts = [
        rectangle(x, y, w, height, "box"),
        words(x + 10, y + 18, branch.answer, "title", 13, "start"),
        *(code(x + 10, y + 35 + 15 * i, line) for i, line in enumerate(lines)),
    ]
    return group("branch", *parts), height


def own_data_tree() -> Picture:
    "The questions from the top down, and beside each its branches with their commands, as an SVG."
    left, wide, right = 14.0, 166.0, 208.0
    y, parts, starts = 14.0, [], []
    for question in QUESTIONS:
        top, tall = y, 20 + 18 * len(question.lines)
        for branch in question.branches:
            box, height = branch_box(branch, right, y, WIDTH - right - 14)
            middle = y + height / 2 if y > top else top + tall / 2
            bend = (left + wide + right) / 2
            start = (left + wide, top + tall / 2)
            parts += [
                arrow([start, (bend, start[1]), (bend, middle), (right, middle)]),
                box,
            ]
            y += height + 7
        starts.append((top, tall))
        parts.append(rectangle(left, top, wide, tall, "box", stroke=ACCENT, thick=1.6))
        parts += [
            words(left + 10, top + 23 + 18 * i, line, "title", 13, "start")
            for i, line in enumerate(question.lines)
        ]
        y += 13
    x = left + wide / 2
    down = [arrow([(x, top + tall), (x, below)]) for (top, tall), (below, _) in pairwise(starts)]
    label = " ".join(
        f"{' '.join(question.lines)} "
        + " ".join(f"{branch.answer}: {branch.command}." for branch in question.branches)
        for question in QUESTIONS
    )
    return sheet(y - 6, f"From your data to a judged policy. {label}", *down, *parts)
