"What texts of the mini world claim, and whether it is true."

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from rlhf_nb.tldr import FACTS, SLOT, TOLD
from rlhf_nb.ui.viz import Html, visible

_TOLD = [
    re.compile(
        re.escape(sentence)
        .replace(r"\{", "{")
        .replace(r"\}", "}")
        .format(**{slot: f"(?P<{slot}>{'|'.join(values)})" for slot, values in FACTS.items()})
    )
    for sentences in TOLD.values()
    for sentence in sentences
]


def facts_told(post: str) -> dict[str, str] | None:
    """The facts that a post of the mini world tells, a value for each slot; its distractors use
    other sentences. None for any other text."""
    facts: dict[str, str] = {}
    for pattern in _TOLD:
        if found := pattern.search(post):
            facts |= found.groupdict()
    return facts if len(facts) == len(FACTS) else None


TRUE, FALSE = ("#cfe3f8", "✓"), ("#fbd9b5", "✗")


def marked_texts(
    texts: Mapping[str, str],  # label -> a post or a summary
    facts: Mapping[str, str],  # the truth, a value for each slot
) -> Html:
    """Each text under its label. A word that claims a fact is followed by its slot: with a tick on
    blue where it is true, with a cross on orange where it is not."""

    def marked(word: str) -> str:
        slot = SLOT.get(word)
        if slot is None:
            return escape(word if word == "\n" else visible(word))
        ground, sign = TRUE if facts.get(slot) == word else FALSE
        return (
            f'<mark style="background:{ground};color:#111;padding:0 3px;border-radius:3px">'
            f"{escape(word)} <small>{sign}{slot}</small></mark>"
        )

    blocks = []
    for label, text in texts.items():
        lines = re.sub(r"\n+", "\n", text.strip())
        body = "".join(map(marked, re.split(r"(\w+|\n)", lines)))
        blocks.append(
            f'<p style="margin:0 0 10px;white-space:pre-wrap;line-height:1.7;max-width:80ch">'
            f"<b>{escape(label)}</b>\n{body}</p>"
        )
    return Html("".join(blocks))
