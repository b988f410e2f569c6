"Exercises of the page on renderers. Two of the answers are text."

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_nb.exercises import Task

# ---- The colour of a number ----

_PURPLE, _GREEN = (138, 96, 200), (96, 176, 112)


def _clamped(value: float, vmax: float) -> float:
    return min(abs(value) / vmax, 1) if vmax > 0 else 0


def _tint(
    share: Callable[[float, float], float] = _clamped,
    sign: Callable[[float], float] = lambda value: value,
    whole: Callable[[float], int] = round,
) -> Callable[[float, float], str]:
    "An answer that goes share(value, vmax) of the way from white to the end of sign(value)."

    def answer(value: float, vmax: float) -> str:
        end, part = _GREEN if sign(value) > 0 else _PURPLE, share(value, vmax)
        return "#" + "".join(f"{whole(255 + part * (channel - 255)):02x}" for channel in end)

    return answer


TINT = Task(
    _tint(),
    ((-1.0, 1.0), (0.0, 1.0), (1.0, 1.0), (5.0, 1.0), (0.3, 2.0), (-0.3, 2.0), (0.0, 0.0)),
    "White at zero, one end for each sign, and a share that stays between 0 and 1.",
    {
        "Positive is purple: the two ends are swapped.": _tint(sign=lambda value: -value),
        "Zero has full colour, and the largest number none: the share runs the wrong way.": _tint(
            lambda value, vmax: 1 - _clamped(value, vmax) if vmax > 0 else 0
        ),
        "Beyond vmax a channel leaves the range from 0 to 255: clamp the share at 1.": _tint(
            lambda value, vmax: abs(value) / vmax if vmax > 0 else 0
        ),
        "A row of zeros has vmax 0, and you divide by it: make that row white.": _tint(
            lambda value, vmax: min(abs(value) / vmax, 1)
        ),
        "Beyond vmax a channel leaves the range from 0 to 255: clamp the share at 1. And a row of "
        "zeros has vmax 0: do not divide by it.": _tint(lambda value, vmax: abs(value) / vmax),
        "vmax does nothing here: 0.3 has the same colour on every scale.": _tint(
            lambda value, vmax: min(abs(value), 1)
        ),
        "Every number goes to green: the sign has to choose the end.": _tint(sign=abs),
        "You are off by one in a channel or two: int cuts the fraction off, round does not.": _tint(
            whole=int
        ),
    },
)

# ---- A token on a page ----


def _seen(token: str) -> str:
    return token.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥") or "∅"


def _angles(text: str) -> str:
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _escaped(text: str) -> str:
    return _angles(text.replace("&", "&amp;"))


def _cell(token: str) -> str:
    return f"<td>{_escaped(_seen(token))}</td>"


def _without_tags(token: str) -> str:
    while "<" in token and ">" in token:
        token = token[: token.index("<")] + token[token.index(">") + 1 :]
    return _cell(token)


CELL = Task(
    _cell,
    (("cat",), ("</s>",), ("a<b>c</b>",), ("AT&T",), ("&lt;",), (" cat",), ("\n",), ("\t",), ("",)),
    "Every token can be seen, and none of them can be taken for markup.",
    {
        "Nothing is escaped: to a browser </s> is a tag, and it shows nothing.": lambda token: (
            f"<td>{_seen(token)}</td>"
        ),
        "You escape < and > alone: the token &lt; is then shown as <. Escape & "
        "too.": lambda token: f"<td>{_angles(_seen(token))}</td>",
        "You escape & last, and with it the & of your own &lt;: escape it first.": lambda token: (
            f"<td>{_angles(_seen(token)).replace('&', '&amp;')}</td>"
        ),
        "You escaped your own <td> as well: escape the token, then put the cell around "
        "it.": lambda token: _escaped(f"<td>{_seen(token)}</td>"),
        "You take tags out of the text. What a model wrote has to be seen: escape "
        "it.": _without_tags,
        "You strip white space: ' cat' and 'cat' are two tokens, and look like "
        "one.": lambda token: _cell(token.strip()),
        "A token that decodes to nothing leaves an empty cell: write ∅.": lambda token: (
            _cell(token) if token else "<td></td>"
        ),
        "Spaces, line breaks, tabs and empty tokens cannot be seen: write ␣, ↵, ⇥ and "
        "∅.": lambda token: f"<td>{_escaped(token)}</td>",
    },
)

# ---- The number that gets full colour ----


def _vmax(
    keep: Callable[[Tensor, Tensor], Tensor] = lambda x, mask: mask & x.isfinite(),
    size: Callable[[Tensor], Tensor] = torch.abs,
    empty: bool = True,  # 0 where there is nothing to choose from
) -> Callable[[Tensor, Tensor], Tensor]:
    def answer(values: Tensor, mask: Tensor) -> Tensor:
        real = values[keep(values, mask)]
        return size(real).max() if len(real) or not empty else torch.tensor(0.0)

    return answer


_MASK = torch.tensor([True, True, True, False, False])
VMAX = Task(
    _vmax(),
    (
        (torch.tensor([0.5, -3.0, 1.0, 50.0, math.inf]), _MASK),
        (torch.tensor([0.5, -3.0, math.inf, 50.0, 60.0]), _MASK),
        (torch.tensor([0.5, math.nan, 1.0, 50.0, 60.0]), _MASK),
        (torch.tensor([0.5, -3.0]), torch.zeros(2, dtype=torch.bool)),
    ),
    "The largest magnitude among real, finite numbers; 0 where there is none.",
    {
        "The mask does nothing here, so an infinity on the padding sets your "
        "scale.": lambda values, mask: values.abs().max(),
        "Padding sets your scale (50 in the first case): every real token would look white.": _vmax(
            lambda x, mask: x.isfinite()
        ),
        "You take the largest number, and -3 is far from zero too: take magnitudes.": _vmax(
            size=torch.clone
        ),
        "One infinite or nan value sets the scale, and all the others lose their colour.": _vmax(
            lambda x, mask: mask
        ),
        "Two cases are missing: a value that is infinite or nan, which must not set the scale, and "
        "a row without a real token, where max has nothing to choose "
        "from.": _vmax(lambda x, mask: mask, empty=False),
        "Infinity times zero is nan, and so the padding sets your scale after all: choose the "
        "real and finite values, do not "
        "multiply.": lambda values, mask: (values * mask).abs().max(),
        "In a row without a real token max has nothing to choose from: return 0.": _vmax(
            empty=False
        ),
    },
)
