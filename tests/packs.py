"""What a page opens, opened here: the other end of `rlhf_nb.ui.reader`."""

from __future__ import annotations

import base64
import gzip
import json
from itertools import pairwise
from typing import Any

import numpy as np


def unpacked(packed: bytes | str) -> tuple[dict[str, Any], dict[str, list[list[float]]]]:
    "The header of a packed update, and each signal that is stored, a row an episode."
    whole = gzip.decompress(base64.b64decode(packed) if isinstance(packed, str) else packed)
    start = 4 + int.from_bytes(whole[:4], "little")
    header, at, rows = json.loads(whole[4:start]), start, {}
    for name, count in header["arrays"]:
        kind = np.uint32 if name == "widths" else np.float32
        planes = np.frombuffer(whole, np.uint8, 4 * count, at).reshape(4, count)
        numbers = np.ascontiguousarray(planes.T).view(kind)[:, 0].tolist()
        ends = np.cumsum(header["lengths"]).tolist()
        rows[name] = [numbers[b - n : b] for n, b in zip(header["lengths"], ends)]
        at += 4 * count
    assert at == len(whole)
    return header, rows


def pieces(packed: bytes | str) -> list[list[str]]:
    "The tokens of each episode as running text."
    header, rows = unpacked(packed)
    units = [text.encode("utf-16-le") for text in header["answers"]]  # as JavaScript counts them
    ends = [np.cumsum([0, *row], dtype=int).tolist() for row in rows["widths"]]
    return [
        [text[2 * a : 2 * b].decode("utf-16-le") for a, b in pairwise(end)]
        for text, end in zip(units, ends)
    ]
