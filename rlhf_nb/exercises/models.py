"Exercises of the page on models."

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import lengths, normal, one, ragged, whole
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case, close, plain

# ---- The number at the last real token ----


def my_last(scores: Tensor, mask: Tensor) -> Tensor:
    places = torch.arange(scores.shape[1])
    last = (places * mask).argmax(1, keepdim=True)
    return scores.gather(1, last).squeeze(1)


def _last_cases(g: Generator) -> list[Case]:
    def case(mask: Tensor, dirt: float) -> Case:
        scores = normal(g, *mask.shape, scale=3.0)
        return dict(scores=torch.where(mask, scores, torch.full_like(scores, dirt)), mask=mask)

    def drawn(rows: int, width: int) -> Tensor:
        "Rows of at least one token, on either side."
        right = lengths(*whole(g, 1, width, rows).tolist(), width=width)
        return torch.stack([row.flip(0) if i % 2 else row for i, row in enumerate(right)])

    both = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    return [
        case(both.bool(), 9.0),
        case(lengths(2, 3, width=3).flip(1), 8.0),
        case(lengths(3, 1, width=4), -7.0),
        case(drawn(3, 5), math.nan),
    ]


TAKEN = "scores.gather(1, last).squeeze(1)"

LAST = Exercise(
    "my_last",
    my_last,
    _last_cases,
    "The last real token, whichever side the padding is on.",
    {
        "This is the last column: in a row padded on the right, it is padding.": (
            TAKEN,
            "scores[:, -1]",
        ),
        "You use the count of real tokens: in a row padded on the left, it is not the index.": (
            "(places * mask).argmax(1, keepdim=True)",
            "mask.sum(1, keepdim=True) - 1",
        ),
        "One column late: the count of real tokens is the index of the token after the last one.": (
            "(places * mask).argmax(1, keepdim=True)",
            "mask.sum(1, keepdim=True).clamp(max=scores.shape[1] - 1)",
        ),
        "This is the first real token: argmax of a mask finds the first of several equals. "
        "Multiply the mask by the column numbers.": ("(places * mask)", "mask.long()"),
        "This is a mean over the tokens: only the last token has seen the whole response.": (
            TAKEN,
            "torch.where(mask, scores, 0.0).sum(1) / mask.sum(1)",
        ),
        "This is a sum over the tokens: only the last token has seen the whole response.": (
            TAKEN,
            "torch.where(mask, scores, 0.0).sum(1)",
        ),
        "This is the largest number of the row: take the number in the last real column.": (
            TAKEN,
            "scores.masked_fill(~mask, -torch.inf).amax(1)",
        ),
        "The mask makes no difference: padding counts as a token.": ("places * mask", "places"),
        "You return [B, 1], a list of one number for each row: remove the last axis.": (
            ".squeeze(1)",
            "",
        ),
        "You return the index of the column: return the number in it.": (TAKEN, "last.squeeze(1)"),
    },
)

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
        numbers[:, prompt_width:][~mask] = dirt
        return dict(numbers=numbers, prompt_width=prompt_width, mask=mask)

    return [
        case(3, lengths(4, 2, width=4), 5.0),
        case(2, lengths(3, 0, width=3), 0.5),
        case(1, lengths(1, 2, width=3), math.inf),
        case(one(g, 2, 5), ragged(g, 3, 3), math.nan),
    ]


BEFORE = "numbers[:, columns]"
REAL = "torch.nn.functional.pad(mask, (1, 0), value=True)"
KEPT = "torch.where(real, before, 0.0)"


def _reads(case: Case, result: Any, offset: int) -> bool | None:
    "Whether the result has, at each real token t, the number of column prompt_width + t + offset."
    found, mask = plain(result), case["mask"]
    if found is None or found.ndim != 2 or found.shape[1] < mask.shape[1] or not mask.any():
        return None
    start = case["prompt_width"] + offset
    read = case["numbers"][:, start : start + mask.shape[1]]
    return close(found[:, : mask.shape[1]][mask], read[mask].double())


def _after_the_choice(case: Case, result: Any) -> bool | None:
    return _reads(case, result, 0)


def _one_column_short(case: Case, result: Any) -> bool | None:
    found = plain(result)
    return _reads(case, result, -1) and found is not None and found.shape == case["mask"].shape


def _wide(case: Case, result: Any) -> Tensor | None:
    "The result, if it has T + 1 columns."
    found, width = plain(result), case["mask"].shape[1] + 1
    return found if found is not None and found.ndim == 2 and found.shape[1] == width else None


def _mask_not_shifted(case: Case, result: Any) -> bool | None:
    "Right at each real token, and 0 where the value after the last real token belongs."
    found, mask = _wide(case, result), case["mask"]
    short = (mask.sum(1) < mask.shape[1]) & mask.any(1)
    if found is None or not short.any():
        return None if found is not None else False
    after = found[short, mask[short].sum(1)]
    return _reads(case, result, -1) and not bool(after.any())


def _nothing_in_front(case: Case, result: Any) -> bool:
    found = _wide(case, result)
    return found is not None and not bool(found[:, 0].any())


VALUES = Exercise(
    "my_values",
    my_values,
    _values_cases,
    "Each value from the column before its token, where the choice is still open.",
    {
        "You read the column of the token itself, where the model has seen the choice: your "
        "index is off by one.": (
            KEPT,
            "torch.where(mask, numbers[:, prompt_width:], 0.0)",
        ),
        "You read each token's own column, and put a 0 at the end: read V one column earlier.": (
            BEFORE,
            "torch.nn.functional.pad(numbers[:, prompt_width:], (0, 1))",
            REAL,
            "torch.nn.functional.pad(mask, (0, 1))",
        ),
        "You read one column too early: the first value is in the last prompt column.": (
            BEFORE,
            "numbers[:, columns - 1]",
        ),
        "The value after the last token is missing: return one column more than there are "
        "tokens, T + 1.": (
            KEPT,
            "torch.where(mask, before[:, :-1], 0.0)",
        ),
        "The value after the last token is 0 here: it is read at the last token, so keep it.": (
            REAL,
            "torch.nn.functional.pad(mask, (0, 1))",
        ),
        "A response without a token still has V_0, which is read in the prompt: put a column "
        "of true in front of the mask.": (
            REAL,
            "torch.cat([mask[:, :1], mask], 1)",
        ),
        "Padding is not 0: clear it by the mask.": (KEPT, "before"),
        "With infinity or NaN on padding you leave NaN there: replace it by 0, do not multiply "
        "by the mask.": (KEPT, "before * real"),
        "Padding has to be 0, so that the sum over a row is the sum over its tokens.": (
            "0.0)",
            "1.0)",
        ),
        "You return a column more than T + 1: the first is before the last prompt column, so "
        "an index is off by one.": (
            "torch.arange(prompt_width - 1, ",
            "torch.arange(prompt_width - 2, ",
            "torch.where(real, before, 0.0)",
            "torch.where(torch.nn.functional.pad(real, (1, 0), value=True), before, 0.0)",
        ),
        "Your result includes values of the prompt: begin at column P - 1.": (
            KEPT,
            "torch.cat([numbers[:, :prompt_width - 1], torch.where(real, before, 0.0)], 1)",
        ),
    },
    traits={
        "You read after the choice: at the token itself the model has already seen it. Read each "
        "value one column earlier, before its token.": _after_the_choice,
        "One column is missing: the values before the tokens are right, but the value after "
        "the last token belongs to the result too, which has T + 1 columns.": _one_column_short,
        "The mask is not shifted: it has a column for each token, and your result has one column "
        "more. Put a column of true in front of the mask, not after it.": _mask_not_shifted,
        "V_0 is missing: your first column is 0. The value before the first token belongs "
        "there; it is read in the last prompt column.": _nothing_in_front,
    },
)
