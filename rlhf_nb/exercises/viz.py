"Exercises of the page on renderers. Two of the answers are text."

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import between, normal, one, pick
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

# ---- The colour of a number ----


def my_tint(value: float, vmax: float) -> str:
    share = min(abs(value) / vmax, 1) if vmax > 0 else 0
    end = (96, 176, 112) if value > 0 else (138, 96, 200)
    return "#" + "".join(f"{round(255 + share * (c - 255)):02x}" for c in end)


def _tint_cases(g: Generator) -> list[Case]:
    fixed = [(-1.0, 1.0), (0.0, 1.0), (1.0, 1.0), (5.0, 1.0), (0.3, 2.0), (-0.3, 2.0), (0.0, 0.0)]
    drawn = [
        (sign * float(between(g, 0.1, 0.9, 1)) * vmax, vmax)
        for sign in (1, -1)
        for vmax in (pick(g, [0.5, 1.5]), pick(g, [3.0, 4.0]))
    ]
    return [dict(value=value, vmax=vmax) for value, vmax in fixed + drawn]


def _lower(x: Any) -> Any:
    return x.lower() if type(x) is str else x


LINE = "min(abs(value) / vmax, 1) if vmax > 0 else 0"

TINT = Exercise(
    "my_tint",
    my_tint,
    _tint_cases,
    "White at zero, one end for each sign, and a share that stays between 0 and 1.",
    {
        "Positive numbers are purple: the two ends are swapped. The sign of value chooses one.": (
            "if value > 0",
            "if value <= 0",
        ),
        "Zero has full colour, and the largest number has none: the share is the wrong way "
        "round.": (
            LINE,
            "1 - min(abs(value) / vmax, 1) if vmax > 0 else 0",
        ),
        "Beyond vmax a channel leaves the range from 0 to 255: clamp the share at 1, its "
        "maximum.": (
            LINE,
            "abs(value) / vmax if vmax > 0 else 0",
        ),
        "If vmax is 0 you divide by it: a row of zeros is white.": (
            LINE,
            "min(abs(value) / vmax, 1)",
        ),
        "If vmax is 0 the colour is full: a row of zeros is white.": (
            LINE,
            LINE.replace("else 0", "else 1"),
        ),
        "Beyond vmax a channel leaves the range from 0 to 255: clamp the share at 1. And vmax "
        "may be 0, for a row of zeros: do not divide by it.": (LINE, "abs(value) / vmax"),
        "vmax makes no difference: 0.3 has the same colour on every scale.": (
            LINE,
            "min(abs(value), 1)",
        ),
        "A negative value gives a negative share: take abs(value) for the share, and the sign "
        "for the end.": (
            LINE,
            LINE.replace("abs(value)", "value"),
        ),
        "Every number is green: the sign of value has to choose the end.": (
            "if value > 0",
            "if value > -1e9",
        ),
        "Every number is purple: the sign of value has to choose the end.": (
            "if value > 0",
            "if value > 1e9",
        ),
        "A channel or two is off by one: round the number, because int cuts off the fraction.": (
            "round(",
            "int(",
        ),
        "You start at black: at zero the colour is white, 255 in each channel.": (
            "255 + share * (c - 255)",
            "share * c",
        ),
        "The # is missing: a colour starts with it.": ('"#" + ', ""),
    },
    read=_lower,
)

# ---- A token on a page ----


def my_cell(token: str) -> str:
    seen = token.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥") or "∅"
    escaped = seen.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"<td>{escaped}</td>"


def _cell_cases(g: Generator) -> list[Case]:
    fixed = ["cat", "</s>", "a<b>c</b>", "AT&T", "&lt;", " cat", "\n", "\t", ""]
    drawn = ["".join(pick(g, "ab <>&\n\t") for _ in range(one(g, 4, 9))) for _ in range(2)]
    return [dict(token=token) for token in fixed + drawn]


SEEN = 'token.replace(" ", "␣").replace("\\n", "↵").replace("\\t", "⇥") or "∅"'
AMP = '.replace("&", "&amp;")'
ANGLES = '.replace("<", "&lt;").replace(">", "&gt;")'

CELL = Exercise(
    "my_cell",
    my_cell,
    _cell_cases,
    "Every token can be seen, and none of them can be taken for markup.",
    {
        "Nothing is escaped: to a browser </s> is a tag, and it shows nothing.": (
            "seen" + AMP + ANGLES,
            "seen",
        ),
        "You escape only < and >: the token &lt; is then shown as <. Escape & too.": (AMP, ""),
        "You escape only &: < and > are what a browser takes for a tag.": (ANGLES, ""),
        "You escape & last, and with it the & of your own &lt;: escape it first.": (
            AMP + ANGLES,
            ANGLES + AMP,
        ),
        "You escaped your own <td> as well: escape the token, then put the cell around it.": (
            AMP + ANGLES,
            "",
            'f"<td>{escaped}</td>"',
            'f"<td>{escaped}</td>"' + AMP + ANGLES,
        ),
        "You remove tags from the text. What a model wrote has to be visible: escape it.": (
            "    seen = ",
            '    while "<" in token and ">" in token[token.index("<") :]:\n        token = '
            'token[: token.index("<")] + token[token.index("<") :].split(">", 1)[1]\n    seen = ',
        ),
        "You strip white space: ' cat' and 'cat' are different tokens, and now look the same.": (
            " = token",
            " = token.strip()",
        ),
        "A token that decodes to nothing leaves an empty cell: write ∅.": (' or "∅"', ""),
        "Spaces, line breaks, tabs and empty tokens cannot be seen: write ␣, ↵, ⇥ and ∅.": (
            SEEN,
            "token",
        ),
        "Spaces cannot be seen: write ␣.": ('.replace(" ", "␣")', ""),
        "Line breaks cannot be seen: write ↵.": ('.replace("\\n", "↵")', ""),
        "Tabs cannot be seen: write ⇥.": ('.replace("\\t", "⇥")', ""),
        "The cell around the token is missing: write <td>, the token, </td>.": (
            'f"<td>{escaped}</td>"',
            "escaped",
        ),
    },
)

# ---- The number that gets full colour ----


def my_vmax(values: Tensor, mask: Tensor) -> Tensor:
    real = values[mask & values.isfinite()]
    return real.abs().amax() if len(real) else torch.tensor(0.0)


def _vmax_cases(g: Generator) -> list[Case]:
    def case(values: list[float] | Tensor, real: int) -> Case:
        values = torch.as_tensor(values)
        return dict(values=values, mask=torch.arange(len(values)) < real)

    drawn = normal(g, 6)
    drawn[4] = 9.0
    return [
        case([0.5, -3.0, 1.0, 50.0, math.inf], 3),
        case([0.5, -3.0, math.inf, 50.0, 60.0], 3),
        case([0.5, math.nan, 1.0, 50.0, 60.0], 3),
        case([0.5, -3.0], 0),
        case(drawn, 4),
        case(-drawn.abs(), one(g, 2, 4)),
    ]


REAL = "values[mask & values.isfinite()]"
LARGEST = "real.abs().amax() if len(real) else torch.tensor(0.0)"

VMAX = Exercise(
    "my_vmax",
    my_vmax,
    _vmax_cases,
    "The largest magnitude among real, finite numbers; 0 where there is none.",
    {
        "The mask makes no difference, so infinity on padding sets your scale.": (
            REAL,
            "values",
        ),
        "Padding sets your scale (50 in the first case), so every real token looks white: use "
        "the mask.": (
            REAL,
            "values[values.isfinite()]",
        ),
        "You take the largest number, but -3 is far from zero too: take absolute values.": (
            "real.abs()",
            "real",
        ),
        "You take the smallest absolute value: full colour is for the largest.": ("amax", "amin"),
        "That is a mean: full colour is for the largest absolute value.": ("amax", "mean"),
        "One infinite or NaN value sets the scale, and all others lose their colour.": (
            REAL,
            "values[mask]",
        ),
        "Two cases are missing: an infinite or NaN value, which must not set the scale, and a "
        "row without a real token, which has no maximum.": (
            REAL,
            "values[mask]",
            LARGEST,
            "real.abs().amax()",
        ),
        "Infinity times zero is NaN, so padding sets your scale after all: choose the real, "
        "finite values instead of multiplying by the mask.": (REAL, "values * mask"),
        "A row without a real token has no maximum: return 0.": (
            LARGEST,
            "real.abs().amax()",
        ),
    },
)
