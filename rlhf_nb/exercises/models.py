"Exercises of the page on models."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import draw_lengths, far, normal, one, ragged_mask
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "04_models"

# ---- The value before each token ----


def my_values(numbers: Tensor, prompt_width: int, mask: Tensor) -> Tensor:
    columns = torch.arange(prompt_width - 1, numbers.shape[1])
    before = numbers[:, columns]
    real = torch.nn.functional.pad(mask, (1, 0), value=True)
    return torch.where(real, before, 0.0)


def _values_cases(g: Generator) -> list[Case]:
    def case(prompt_width: int, mask: Tensor, dirt: float) -> Case:
        numbers = normal(g, len(mask), prompt_width + mask.shape[1])
        numbers[numbers == 0] = 0.5  # a 0 is what belongs on padding
        far(numbers[:, prompt_width - 1 :])
        numbers[:, prompt_width:][~mask] = dirt
        return dict(numbers=numbers, prompt_width=prompt_width, mask=mask)

    return [
        case(3, draw_lengths(4, 2, width=4), 5.0),
        case(2, draw_lengths(3, 0, width=3), 0.5),
        case(1, draw_lengths(1, 2, width=3), math.inf),
        case(one(g, 2, 5), ragged_mask(g, 3, 3), math.nan),
    ]


BEFORE = "numbers[:, columns]"
REAL = "torch.nn.functional.pad(mask, (1, 0), value=True)"


VALUES = Exercise(
    my_values,
    _values_cases,
    "Each value from the column before its token, where the choice is still open.",
    {
        "You read the column of the token itself, where the model has seen the choice: your "
        "index is off by one.": "torch.where(mask, numbers[:, prompt_width:], 0.0)",
        "You read each token's own column, and put a 0 at the end: read V one column earlier.": (
            f"{BEFORE} → torch.nn.functional.pad(numbers[:, prompt_width:], (0, 1)); "
            f"{REAL} → torch.nn.functional.pad(mask, (0, 1))"
        ),
        "You read one column too early: "
        "the first value is in the last prompt column.": f"{BEFORE} → numbers[:, columns - 1]",
        "The value after the last token is missing: return one column more than there are "
        "tokens, T + 1.": "torch.where(mask, before[:, :-1], 0.0)",
        "The value after the last token is 0 here: it "
        "is read at the last token, so keep it.": f"{REAL} → torch.nn.functional.pad(mask, (0, 1))",
        "A response without a token still has V_0, which is read in the prompt: "
        "put a column of true in front of the mask.": f"{REAL} → torch.cat([mask[:, :1], mask], 1)",
        "Padding is not 0: clear it by the mask.": "before",
        "With infinity or NaN on padding you leave NaN there: replace it by 0, do not multiply "
        "by the mask.": "before * real",
        "Padding has to be 0, "
        "so that the sum over a row is the sum over its tokens.": "0.0) → 1.0)",
        "You return a column more than T + 1: "
        "the first is before the last prompt column, so an index is off by one.": (
            "prompt_width - 1, num → prompt_width - 2, num; torch.where(real, before, 0.0) → "
            "torch.where(torch.nn.functional.pad(real, (1, 0), value=True), before, 0.0)"
        ),
        "Your result includes values of the prompt: begin at column "
        "P - 1.": "torch.cat([numbers[:, :prompt_width - 1], torch.where(real, before, 0.0)], 1)",
        "You read the column of the token itself, where the model has seen the choice, and padding "
        "is not 0: read each value one column earlier.": "numbers[:, prompt_width:]",
        "You read the column of the token itself, where the model has seen the choice, and NaN on "
        "padding stays NaN: read each value one column earlier, "
        "and choose by the mask.": "numbers[:, prompt_width:] * mask",
        "You read each token's own column, and the last of them twice: read V one "
        "column earlier.": f"{BEFORE} → torch.cat([numbers[:, prompt_width:], numbers[:, -1:]], 1)",
        "The value after the last token is missing (return T + 1 columns), "
        "and padding is not 0.": "before[:, :-1]",
        "The mask is not shifted, and true at the end: put the column "
        "of true in front of it.": f"{REAL} → torch.nn.functional.pad(mask, (0, 1), value=True)",
        "The mask is not shifted, and its last column counts twice: "
        "put a column of true in front of it.": f"{REAL} → torch.cat([mask, mask[:, -1:]], 1)",
        "V_0 is missing: your first column is 0. The value before the first token belongs there; "
        "it is read in the "
        "last prompt column.": f"{REAL} → torch.nn.functional.pad(mask, (1, 0), value=False)",
    },
)
