"""One update in pictures: which function adds which field to the record, and how the rows of a
rollout become optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_nb.ui.loop import (
    ACCENT,
    FROZEN,
    INK,
    LINE,
    PAPER,
    TRAINED,
    WIDTH,
    Picture,
    arrow,
    group,
    rectangle,
    sheet,
    words,
)

# A function, what it makes, and the page with the arithmetic.
PHASES = (
    ("the rollout", ("response_ids, mask", "logprobs, kl, values", "raw_scores, stopped"), ""),
    ("final_scores", ("scores",), "what it earned"),
    ("with_advantages", ("rewards", "returns", "advantages"), "who deserves it"),
    ("mini_batches", ("row indices",), "which rows, when"),
    ("ppo_loss", ("the loss,", "sums to log"), "what to minimise"),
)


def record_picture() -> Picture:
    "The functions of an update from left to right, and what each adds to the record."
    width, gap, top = 136.0, 24.0, 34.0
    parts = []
    for i, (name, made, why) in enumerate(PHASES):
        x = 12 + i * (width + gap)
        fill = FROZEN if i == 0 else TRAINED
        box = rectangle(x, top, width, 30, "box frozen" if i == 0 else "box trained", fill)
        parts.append(
            group("step", box, words(x + width / 2, top + 20, name, "number", 13, color=INK))
        )
        parts.append(words(x + width / 2, top - 10, why, "number", 12))
        for row, text in enumerate(made):
            parts.append(words(x + width / 2, top + 52 + 18 * row, text, "number", 12, color=INK))
        if i:
            parts.append(arrow([(x - gap, top + 15), (x, top + 15)]))
    last, first = 12 + 4 * (width + gap) + width / 2, 12 + 3 * (width + gap) + width / 2
    bottom = top + 118
    parts.append(arrow([(last, top + 84), (last, bottom), (first, bottom), (first, top + 62)]))
    parts.append(words((first + last) / 2, bottom - 8, "optimizer step, next rows", "number", 12))
    label = "One update: " + "; ".join(
        f"{name}{' (' + why + ')' if why else ''}: {' '.join(made)}" for name, made, why in PHASES
    )
    return sheet(
        bottom + 14, f"{label}. The last two repeat, with an optimizer step each time.", *parts
    )


def steps_picture(
    order: Sequence[Sequence[int]],  # row indices of each optimizer step
    parts: int,  # mini-batches of an epoch
    rows: int,  # most rows of a micro-batch
) -> Picture:
    """A line for each epoch, a box for each mini-batch, which is one optimizer step, and in it a
    darker box for each micro-batch, with the rows that are in it."""
    epochs = [order[i : i + parts] for i in range(0, len(order), parts)]
    n = sum(len(step) for step in epochs[0])
    cell = min(34.0, (WIDTH - 110 - 26 * parts) / n)
    drawn, y = [], 34.0
    for e, steps in enumerate(epochs):
        x = 90.0
        drawn.append(words(14, y + 30, f"epoch {e + 1}", "number", 13, "start", INK))
        for s, step in enumerate(steps):
            micro = [step[i : i + rows] for i in range(0, len(step), rows)]
            width = cell * len(step) + 6 * len(micro) + 6
            drawn.append(rectangle(x, y, width, 52, "box", PAPER, ACCENT, 1.6))
            title = f"step {e * parts + s + 1}"
            drawn.append(words(x + width / 2, y - 6, title, "number", 12))
            left = x + 6
            for part in micro:
                drawn.append(
                    rectangle(left, y + 8, cell * len(part), 36, "box trained", TRAINED, LINE)
                )
                for i, row in enumerate(part):
                    at = left + cell * (i + 0.5)
                    drawn.append(words(at, y + 31, str(row), "number", 13, color=INK))
                left += cell * len(part) + 6
            x += width + 14
        y += 86
    notes = (
        "wide box: a mini-batch, one optimizer step",
        "narrow box: a micro-batch, what fits",
        "into memory at once",
        "number: a row of the rollout",
    )
    if x + 280 < WIDTH:  # room beside the boxes
        for i, note in enumerate(notes):
            drawn.append(words(x + 12, 58 + 19 * i, note, "number", 12, "start"))
    label = (
        f"{n} rows, {len(epochs)} epochs of {parts} mini-batches, micro-batches of up to {rows}: "
        + "; ".join(f"step {i + 1}: rows {', '.join(map(str, s))}" for i, s in enumerate(order))
    )
    return sheet(y - 20, label, *drawn)


def parts_picture(
    lengths: Sequence[int],  # tokens of each row
    parts: Sequence[Sequence[int]],  # row indices of each part
) -> Picture:
    "The same rows as one rectangle and in parts; tokens are blue, padding is grey."
    longest, high = max(lengths), 18.0
    unit = (WIDTH / 2 - 70) / longest

    def block(x: float, y: float, rows: Sequence[int], width: int) -> str:
        "Some rows, padded to `width` cells."
        bars = []
        for i, row in enumerate(rows):
            at, n = y + (high + 3) * i, lengths[row]
            bars.append(words(x - 8, at + 13, str(row), "number", 12, "end"))
            bars.append(rectangle(x, at, unit * width, high, "box frozen", FROZEN, LINE))
            bars.append(rectangle(x, at, unit * n, high, "box trained", TRAINED, LINE))
            bars.append(words(x + unit * n / 2, at + 13, str(n), "number", 12, color=INK))
        return "".join(bars)

    left, right, top = 44.0, WIDTH / 2 + 44.0, 40.0
    drawn, y, cells = [block(left, top, range(len(lengths)), longest)], top, 0
    for rows in parts:
        width = max(lengths[row] for row in rows)
        drawn.append(block(right, y, rows, width))
        y += (high + 3) * len(rows) + 12
        cells += width * len(rows)
    whole = f"one rectangle: {len(lengths) * longest} cells for {sum(lengths)} tokens"
    split = f"{len(parts)} parts: {cells} cells"
    drawn.append(words(left, 24, whole, "number", 13, "start", INK))
    drawn.append(words(right, 24, split, "number", 13, "start", INK))
    return sheet(max(y, top + (high + 3) * len(lengths)) + 6, f"{whole}; {split}.", *drawn)
