"The exercise of the page on SFT."

from __future__ import annotations

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import draw_lengths, integers, one
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "37_sft"


def my_labels(ids: Tensor, mask: Tensor, prompt_lengths: Tensor) -> Tensor:
    completion = torch.arange(ids.shape[1]) >= prompt_lengths[:, None]
    return torch.where(mask & completion, ids, -100)


def _labels_cases(g: Generator) -> list[Case]:
    def case(starts: list[int], *rows: int, width: int) -> Case:
        mask = draw_lengths(*rows, width=width)
        ids = integers(g, 3, 8, *mask.shape).masked_fill(~mask, 9)
        for i, row in enumerate(rows):
            ids[i, row - 1] = 9 if row < width else 4
        return dict(ids=ids, mask=mask, prompt_lengths=torch.tensor(starts))

    first, second = one(g, 1, 3), one(g, 1, 2)
    return [
        case([3, 2], 6, 4, width=6),
        case([1, 3, 2], 5, 4, 3, width=5),
        case([first, second, 4], 5, 3, 6, width=6),
    ]


PUT = "torch.where(mask & completion, ids, -100)"

LABELS = Exercise(
    my_labels,
    _labels_cases,
    "The completions with their stop tokens, and nothing else.",
    {
        "The prompt counts: begin after it, at prompt_lengths.": "mask & completion → mask",
        "Nothing is left out: a token counts where two conditions hold together, that of the mask "
        "and that of prompt_lengths.": "ids",
        "Padding counts: use the mask as well.": "mask & completion → completion",
        "The stop token is missing: "
        "use the mask, not the pad id.": "mask & completion → mask & completion & (ids != 9)",
        "The first token of the completion is missing: "
        "the comparison with prompt_lengths is off by one.": ">= prompt → > prompt",
        "The last token of the prompt counts: the comparison with prompt_lengths "
        "is off by one.": ">= prompt_lengths[:, None] → >= prompt_lengths[:, None] - 1",
        "The completion is left out and the prompt counts: "
        "the condition is the other way round.": ">= prompt → < prompt",
        "The labels are shifted by one column: the model does that itself.": PUT + ".roll(-1, 1)",
        "You use one prompt length for the whole batch: "
        "each row has its own in prompt_lengths.": "prompt_lengths[:, None] → prompt_lengths[0]",
        "What does not count is 0, which is a token: "
        "use -100, which the loss leaves out.": "-100 → 0",
        "That is the mask of what counts: "
        "return the ids there, and -100 elsewhere.": "mask & completion",
    },
)
