"""Help for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(
    word: str,  # as somebody typed it
    known: Iterable[str],
) -> str:  # " Did you mean kl_coef?", or nothing
    "The known word that begins like a cut-off one, is nearest to a misspelt one, or begins it."
    known = list(known)
    near = [name for name in known if word and name.startswith(word)]
    near = near or difflib.get_close_matches(word, known, 1)
    near = near or [name for name in known if len(name) > 2 and word.startswith(name)]
    return f" Did you mean {near[0]}?" if near else ""
