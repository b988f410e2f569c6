"What texts of the mini world claim, and whether it is true."

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape

from rlhf_nb.tldr import FACTS, SLOT
from rlhf_nb.ui.html import Html, element, inline, visible
from rlhf_nb.ui.viz import tint
from rlhf_nb.world import TOLD

_VALUES = {slot: f"(?P<{slot}>{'|'.join(values)})" for slot, values in FACTS.items()}
_TOLD = [
    re.compile(re.escape(sentence).replace(r"\{", "{").replace(r"\}", "}").format(**_VALUES))
    for sentences in TOLD.values()
    for sentence in sentences
]


def facts_told(post: str) -> dict[str, str] | None:
    "The facts that a post of the mini world tells, a value for each slot; None for any other text."
    facts: dict[str, str] = {}
    for pattern in _TOLD:
        if match := pattern.search(post):
            facts |= match.groupdict()
    return facts if len(facts) == len(FACTS) else None


TRUE, FALSE = (tint(-0.7, 1.0), "✓"), (tint(0.7, 1.0), "✗")  # blue, orange


def marked_texts(texts: Mapping[str, str], facts: Mapping[str, str]) -> Html:
    """Each text under its label. A word that claims a fact is followed by its slot: with a tick on
    blue where it is true, with a cross on orange where it is not."""

    def mark_word(word: str) -> str:
        slot = SLOT.get(word)
        if slot is None:
            return escape(word if word == "\n" else visible(word))
        ground, sign = TRUE if facts.get(slot) == word else FALSE
        after = element("small", f"{sign}{slot}")
        return element("mark", f"{escape(word)} ", after, style=inline("claim", ground=ground))

    blocks = []
    for label, text in texts.items():
        lines = re.sub(r"\n+", "\n", text.strip())
        body = "".join(map(mark_word, re.split(r"(\w+|\n)", lines)))
        head = element("b", escape(label))
        blocks.append(element("p", head, "\n", body, style=inline("claims")))
    return Html("".join(blocks))


def claims_of(summary: str, facts: Mapping[str, str]) -> dict[str, list[str]]:
    "What the gold judge counts in a summary: words `covered` and `invented`, slots `missing`."
    stated = dict.fromkeys(word for word in re.findall(r"\w+", summary) if word in SLOT)
    covered = [word for word in stated if facts[SLOT[word]] == word]
    stated_slots = {SLOT[word] for word in covered}
    invented = [word for word in stated if word not in covered]
    missing = [slot for slot in facts if slot not in stated_slots]
    return dict(covered=covered, invented=invented, missing=missing)


def _with_marks(text: str, mark: Callable[[str], str]) -> Html:
    "Escaped text, its words marked, in an element that keeps its direction to itself."
    return element("bdi", *map(mark, re.split(r"(\w+)", visible(text, lines=True))))


def post_with_facts(post: str, facts: Mapping[str, str]) -> Html:
    "A post without its empty lines, its facts in bold; what its distractors say is not."
    true, lines = set(facts.values()), re.sub(r"\n+", "\n", post)
    bold = lambda word: element("strong", word) if word in true else escape(word)
    return _with_marks(lines, bold)


def judged_text(summary: str, facts: Mapping[str, str]) -> Html:
    "A summary, its facts marked as covered (✓) or invented (✗); then those that are missing (○)."
    claims = claims_of(summary, facts)

    def mark(word: str) -> str:
        if word in claims["covered"]:
            about = f"{SLOT[word]}: covered"
            return element("mark", f"{word}✓", class_="fact covered", title=about)
        if word in claims["invented"]:
            about = f"{SLOT[word]}: is {facts[SLOT[word]]}"
            return element("mark", f"{word}✗", class_="fact invented", title=about)
        return escape(word)

    left = [f"○ {slot}: {escape(facts[slot])}" for slot in claims["missing"]]
    missing = [element("mark", text, class_="fact missing") for text in left]
    after = element("span", f"missing: {' '.join(missing)}", class_="misses") if missing else ""
    return Html(_with_marks(summary, mark) + after)
