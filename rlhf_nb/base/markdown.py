"Parts of model cards in markdown: names and values cannot change the page around them."

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BREAK = "<br>"  # a new line within a cell of a table: markdown has none of its own


def inline_markdown(x: Any) -> str:
    "A value or name on one line, nothing in it read as markup."
    text = f"{x:.4g}" if isinstance(x, float) else " ".join(str(x).split())
    text = html.escape(text, quote=False).replace("|", "\\|").replace("`", "'")
    return text.replace("](", "] (")


def two_columns(rows: Mapping[str, Any]) -> str:
    "A table without a heading, a line for each entry."
    lines = [f"| {inline_markdown(k)} | {inline_markdown(x)} |" for k, x in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def on_hub(name: str) -> bool:
    "Whether a model's name can be one on the hub; a path is not."
    return bool(re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)) and not Path(name).exists()
