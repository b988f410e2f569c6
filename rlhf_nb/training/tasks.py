"""Tasks of reasoning-gym (optional extra `tasks`): prompts, and each task's scorer as reward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from datasets import Dataset, DatasetDict

from rlhf_nb.base.errors import did_you_mean


@lru_cache(maxsize=8)
def load_task(
    told: str,  # JSON: its name, seed, size and settings
) -> Any:  # a data set of reasoning-gym
    "Raises ValueError without the package, and on a task or a setting that it does not have."
    given = json.loads(told)
    name = given.pop("name")
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"reasoning_gym:{name} needs the package reasoning-gym: pip install 'rlhf_nb[tasks]'."
        ) from error
    if name not in DATASETS:
        raise ValueError(
            f"reasoning_gym:{name}: there is no such task among its {len(DATASETS)}, such as "
            f"spell_backward.{did_you_mean(name, DATASETS)}"
        )
    try:
        return reasoning_gym.create_dataset(name, **given)
    except (TypeError, ValueError, AssertionError) as error:
        known = sorted(vars(DATASETS[name][1]()))
        raise ValueError(
            f"reasoning_gym:{name}: {error}. Its settings are {', '.join(known)}."
        ) from error


def task_rows(
    name: str,  # of a task of reasoning-gym
    seed: int = 0,
    size: int = 2_000,  # rows to train on
    test: int = 100,  # and to test on
    chat: bool = False,  # prompts are conversations, for models with a chat template
    **settings: Any,  # of the task
) -> DatasetDict:
    """Columns prompt, completion and reference (an answer), and those by which `task_points` knows
    the question."""
    told = json.dumps(dict(name=name, seed=seed, size=size + test, **settings))
    rows = []
    for place, entry in zip(range(size + test), load_task(told)):
        question, answer = entry["question"], str(entry["answer"])
        prompt: Any = [dict(role="user", content=question)] if chat else f"{question}\n"
        said: Any = [dict(role="assistant", content=answer)] if chat else answer
        known = dict(completion=said, reference=answer, task=told, task_place=place)
        rows.append(dict(prompt=prompt, **known))
    parts = dict(train=rows[:size], test=rows[size:])
    return DatasetDict({split: Dataset.from_list(part) for split, part in parts.items() if part})


def task_points(
    prompts: Sequence[str],
    responses: Sequence[str],
    task: Sequence[str] | None = None,
    task_place: Sequence[int] | None = None,
    **columns: Any,
) -> list[float]:
    """The task's own score, from 0 to 1, of what stands in <answer></answer>, or else of the whole
    response. Raises ValueError on prompts of another data set."""
    if task is None or task_place is None:
        raise ValueError(
            "the reward `reasoning_gym` needs prompts of its own: --dataset_name "
            "reasoning_gym:spell_backward, or another task."
        )
    points = []
    for response, told, place in zip(responses, task, task_place, strict=True):
        data = load_task(told)
        _, mark, answer = response.rpartition("<answer>")
        answer = answer.partition("</answer>")[0] if mark else response
        points.append(float(data.score_answer(answer.strip(), data[place])))
    return points
