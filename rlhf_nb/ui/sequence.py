"""Pictures of tokens in their columns: a padded batch, which column chose which token, and where
each model is read."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_nb.ui.loop import FROZEN, INK, PAPER, TRAINED, Picture, arrow, rectangle, sheet, words

PAD, HIGH, GAP = "", 28.0, 18.0  # padding; height of a box; between prompt and response


class Columns:
    "Where the columns of prompts and responses are, from left to right."

    def __init__(self, prompt: int, response: int, left: float):
        self.prompt, self.count = prompt, prompt + response
        self.left, self.width = left, (784 - left - GAP) / self.count

    def start(self, column: int) -> float:
        return self.left + self.width * column + (GAP if column >= self.prompt else 0)

    def middle(self, column: int) -> float:
        return self.start(column) + self.width / 2 - 2

    def box(self, column: int, y: float, text: str, fill: str = PAPER) -> str:
        "A box with a token in it; padding is grey, with a dot."
        kind = {PAPER: "box", TRAINED: "box trained"}.get(fill, "box frozen")
        if text == PAD:
            text, kind, fill = "·", "box frozen", FROZEN
        box = rectangle(self.start(column), y, self.width - 4, HIGH, kind, fill)
        return box + words(self.middle(column), y + 19, text, "token", 14, color=INK)

    def headings(self, y: float, prompt: str, response: str) -> str:
        "A line over the prompt's columns and one over the response's."
        ends = (0, self.prompt - 1), (self.prompt, self.count - 1)
        return "".join(
            words((self.middle(a) + self.middle(b)) / 2, y, text, "title", 14)
            for (a, b), text in zip(ends, (prompt, response), strict=True)
        )


def label(y: float, text: str, note: str = "") -> str:
    "What a line of boxes is, on its left."
    return words(14, y + 19 - 8 * bool(note), text, "token", 13, "start", INK) + (
        words(14, y + 26, note, "note", 11.5, "start") if note else ""
    )


def batch_picture(
    prompts: Sequence[Sequence[str]],  # tokens, one list an example
    responses: Sequence[Sequence[str]],
) -> Picture:
    "A batch as a rectangle: prompts padded on the left, responses on the right, the mask below."
    wide, long = max(map(len, prompts)), max(map(len, responses))
    at, parts = Columns(wide, long, 96), []
    parts.append(at.headings(24, "prompt, padded on the left", "response, padded on the right"))
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        y = 38 + 62.0 * i
        row = [PAD] * (wide - len(prompt)) + [*prompt, *response] + [PAD] * (long - len(response))
        parts += [label(y, f"example {i}"), words(14, y + 45, "mask", "note", 12, "start")]
        for column, token in enumerate(row):
            real = str(token != PAD).lower()
            parts.append(at.box(column, y, token))
            parts.append(words(at.middle(column), y + 45, real, "note", 12))
    told = "; ".join(f"{' '.join(p)} | {' '.join(r)}" for p, r in zip(prompts, responses))
    text = f"A padded batch, prompts on the left and responses on the right: {told}"
    return sheet(44 + 62 * len(prompts), text, *parts)


def choice_picture(
    prompt: Sequence[str],  # tokens; the empty string is padding
    response: Sequence[str],
) -> Picture:
    "Below each column the token that its logits choose: the one in the next column."
    at, row = Columns(len(prompt), len(response), 132), [*prompt, *response]
    first, last = len(prompt) - 1, len(row) - 2
    parts = [at.headings(24, "prompt", "response"), label(38, "the model reads")]
    parts.append(label(104, "its logits choose"))
    for column, token in enumerate(row):
        parts.append(at.box(column, 38, token))
        parts.append(words(at.middle(column), 152, f"column {column}", "note", 12))
        if token == PAD:
            continue
        if first <= column <= last:
            x = at.middle(column)
            parts += [arrow([(x, 68), (x, 102)]), at.box(column, 104, row[column + 1], TRAINED)]
        else:
            text = "the prompt" if column < first else "nothing"
            parts.append(words(at.middle(column), 123, text, "note", 12))
    text = (
        f"Columns {first} to {last} choose the {len(response)} response tokens: each column's "
        "logits choose the token in the next column."
    )
    return sheet(164, text, *parts)


def reading_picture(
    prompt: Sequence[str],  # tokens
    response: Sequence[str],
) -> Picture:
    "At which columns of one sequence policy, reference, value model and reward model are read."
    at, count = Columns(len(prompt), len(response), 160), len(response)
    first, end = len(prompt) - 1, len(prompt) + count - 1
    parts = [at.headings(24, "prompt x", "response y"), label(38, "tokens")]
    parts += [at.box(column, 38, token) for column, token in enumerate([*prompt, *response])]
    lines = (
        (84, "policy, reference", "log-prob of the next token", "log π_{%d}"),
        (122, "value model", "before each token", "V_{%d}"),
    )
    for y, name, note, form in lines:
        parts.append(label(y, name, note))
        parts += [at.box(first + t, y, form % t, TRAINED) for t in range(count)]
    parts.append(label(160, "reward model", "once, at the end") + at.box(end, 160, "s", TRAINED))
    text = (
        "Policy, reference and value model are read in the column before each response token; the "
        "reward model is read once, at the last token."
    )
    return sheet(202, text, *parts)
