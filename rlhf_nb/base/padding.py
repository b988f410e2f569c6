"""What the page on masks takes for granted: rows that can be padded, and where a stop token is."""

from __future__ import annotations

import torch
from torch import Tensor


def check_rows(rows: list[list[int]], pad_id: int) -> None:
    "Refuse what cannot be padded, and say how to fix it."
    if pad_id is None:
        raise ValueError(
            "pad_id is None: the tokenizer has no padding token. Give it one of its own, "
            "for example tokenizer.add_special_tokens({'pad_token': '[PAD]'})."
        )
    if len(rows) == 0:
        raise ValueError("rows is empty: give at least one list of token ids.")
    for i, row in enumerate(rows):
        if len(row) == 0:
            raise ValueError(
                f"row {i} holds no token: drop the row, or start it with the tokenizer's bos token."
            )


def stop_places(response_ids: Tensor, stop_ids: list[int]) -> Tensor:
    "[B, T] true on every stop token. Raises ValueError where stop_ids is not a list of ints."
    listed = isinstance(stop_ids, (list, tuple, set))
    if not (listed and all(isinstance(i, int) for i in stop_ids)):
        raise ValueError(
            f"stop_ids is {stop_ids!r}: give a list of token ids, "
            "for example [tokenizer.eos_token_id], or [] for none."
        )
    stops = torch.tensor(list(stop_ids), dtype=torch.long, device=response_ids.device)
    return torch.isin(response_ids, stops)
