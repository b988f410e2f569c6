"""Probes of where a result is wrong: on padding, in a column, or where a condition holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import torch
from torch import Tensor

from rlhf_nb.exercises.trial import Trial, is_float, masks_in, on_padding
from rlhf_nb.exercises.values import Case, close, plain, same


def padding(t: Trial) -> str | None:
    "The numbers on padding change the result, or padding is not 0 in it."
    if not any(map(masks_in, t.cases)):
        return None
    leaks = only_padding = False
    for case in t.cases:
        one, two = on_padding(case, 0.5), on_padding(case, -1.75)
        if not same(t.right(one), t.right(two)):
            continue
        a, b = t.mine(one), t.mine(two)
        if same(a, b):
            continue
        x, y = plain(a), plain(b)
        mask = case[t.masks[0]] if t.masks else None
        if not isinstance(mask, Tensor) or x is None or y is None or x.shape != mask.shape:
            leaks = True
        elif close(torch.where(mask, x, 0.0), torch.where(mask, y, 0.0)):
            only_padding = True
        else:
            leaks = True
    if leaks:
        return (
            "Padding leaks into your result, which changes with the numbers on padding: choose by "
            "the mask before you sum, shift or multiply."
        )
    if only_padding:
        return "Padding is not 0 in your result: set it to 0 at the end, by the mask."
    if t.agrees(lambda c: on_padding(c, 0.0)):
        return "Right only where padding holds 0: the mask is missing somewhere."
    return None


def first_row(t: Trial) -> str | None:
    rows = [(a, b) for a, b in t.pairs if b.ndim and len(b) > 1]
    if rows and len(rows) == len(t.cases) and all(close(a[:1], b[:1]) for a, b in rows):
        return "Only the first row is right: do the same for the others, each with its own numbers."
    return None


def shifted(t: Trial) -> str | None:
    wide = [(a, b) for a, b in t.pairs if b.ndim and b.shape[-1] > 2]
    if not t.comparable or not wide:
        return None
    for step, text in ((1, "right"), (-1, "left")):
        if all(
            close(a[..., 1:], b[..., :-1]) if step > 0 else close(a[..., :-1], b[..., 1:])
            for a, b in wide
        ):
            return f"Your result is shifted by one column to the {text}: an index is off by one."
    return None


def place(t: Trial) -> str | None:
    "Which elements are wrong, if that says something."
    cells = []
    for i, (a, b) in enumerate(t.pairs if t.comparable else []):
        mask = t.cases[i][t.masks[0]] if t.masks else None
        wrong = ~torch.isclose(a, b, atol=2e-5, rtol=2e-5, equal_nan=True)
        if wrong.any():
            cells.append((wrong, mask if isinstance(mask, Tensor) else None, b))
    if not cells or any(wrong.ndim != 2 for wrong, _, _ in cells):
        return _place_in_a_vector([wrong for wrong, _, _ in cells])

    def only(where: Callable[[Tensor, Tensor], Tensor]) -> bool:
        return all(
            m is not None and m.shape == w.shape and not bool((w & ~where(w, m)).any())
            for w, m, _ in cells
        )

    if only(lambda w, m: ~m):
        return "Your result is wrong on padding: it has to be 0 there, by the mask."
    if only(lambda w, m: m & (m.flip(1).cumsum(1).flip(1) == 1)):
        return "Only the last real token of a row is wrong: what follows it?"
    if only(lambda w, m: m & (m.cumsum(1) == 1)):
        return "Only the first real token of a row is wrong: what comes before it?"
    column = lambda k: all(not bool((w & ~_column(w, k)).any()) for w, _, _ in cells)
    if column(-1):
        return "Only the last column is wrong: nothing follows it, so how do you treat the end?"
    if column(0):
        return "Only the first column is wrong: how do you treat the beginning?"
    if all(not bool(w[:, -1].any()) for w, _, _ in cells):
        return (
            "The last column is right and those before it are wrong: look at what each takes from "
            "later ones, or for an index that is off by one."
        )
    return None


def _column(x: Tensor, k: int) -> Tensor:
    found = torch.zeros_like(x)
    found[:, k] = True
    return found


def _place_in_a_vector(cells: list[Tensor]) -> str | None:
    if not cells or any(w.ndim != 1 or len(w) < 2 for w in cells):
        return None
    if all(int(w.sum()) == 1 and bool(w[-1]) for w in cells):
        return "Only the last number is wrong: an index is off by one, or the end is missing."
    if all(int(w.sum()) == 1 and bool(w[0]) for w in cells):
        return (
            "Only the first number is wrong: an index is off by one, or the beginning is missing."
        )
    return None


def cells_of(t: Trial) -> Iterator[tuple[bool, dict[str, Tensor]]]:
    """For each element of the result whether it is wrong, and the numbers of the arguments there.
    If the result is one number over a mask, each token is looked at by itself."""
    for case, got, want in zip(t.cases, t.got, t.want):
        a, b = plain(t.piece(got)), plain(t.piece(want))
        if a is None or b is None or a.shape != b.shape:
            continue
        mask = case[t.masks[0]] if t.masks and isinstance(case[t.masks[0]], Tensor) else None
        if b.numel() > 1:
            wrong = ~torch.isclose(a, b, atol=2e-5, rtol=2e-5, equal_nan=True)
            if mask is not None and mask.shape == wrong.shape:
                places = mask.nonzero().tolist()
            else:
                places = (wrong == wrong).nonzero().tolist()
            is_wrong = lambda place: bool(wrong[tuple(place)])  # noqa: B023
            shape = wrong.shape
        elif mask is not None and mask.ndim == 2:
            places, shape = mask.nonzero().tolist(), mask.shape

            def is_wrong(place: list[int], case: Case = case, mask: Tensor = mask) -> bool:
                only = torch.zeros_like(mask)
                only[tuple(place)] = True
                single = {**case, t.masks[0]: only}
                return not same(t.mine(single), t.right(single))
        else:
            continue
        beside = {
            name: x
            for name, x in case.items()
            if isinstance(x, Tensor) and x.shape == shape and name not in t.masks[:1]
        }
        for place in places:
            yield is_wrong(place), {name: x[tuple(place)] for name, x in beside.items()}


def region(t: Trial) -> str | None:
    "What the arguments have in common where the result is wrong."
    cells = list(cells_of(t))
    wrong = [at for bad, at in cells if bad]
    fine = [at for bad, at in cells if not bad]
    if len(wrong) < 2 or len(fine) < 2 or not wrong[0]:
        return None
    tests: dict[str, Callable[[dict[str, Tensor]], bool]] = {}

    def add(text: str, one: str, two: str, test: Callable[[Tensor, Tensor], Tensor]) -> None:
        tests[text] = lambda at: bool(test(at[one], at[two]))

    for name, x in wrong[0].items():
        if x.dtype == torch.bool:
            add(f"{name} is true", name, name, lambda x, _: x)
            add(f"{name} is false", name, name, lambda x, _: ~x)
        else:
            add(f"{name} is positive", name, name, lambda x, _: x > 0)
            add(f"{name} is negative", name, name, lambda x, _: x < 0)
    for one, two in combinations([n for n, x in wrong[0].items() if is_float(x)], 2):
        add(f"{one} is larger than {two}", one, two, torch.gt)
        add(f"{one} is smaller than {two}", one, two, torch.lt)
    single = [(text, (test,)) for text, test in tests.items()]
    double = [(f"{a} and {b}", (f, g)) for (a, f), (b, g) in combinations(tests.items(), 2)]
    for text, each in [*single, *double]:
        if all(test(at) for test in each for at in wrong):
            elsewhere = sum(all(test(at) for test in each) for at in fine)
            if elsewhere <= 0.7 * len(fine):
                return f"Wrong only where {text}."
    return None


def by_comparison(t: Trial) -> str | None:
    "Too large or too small throughout."
    if not t.pairs or not t.comparable:
        return None
    gap = torch.cat([(a - b).reshape(-1) for a, b in t.pairs]).nan_to_num()
    wrong = gap.abs() > 2e-5
    if len(t.failing) > 1 or int(wrong.sum()) > 2:
        if bool((gap[wrong] > 0).all()):
            return (
                "Your result is too large wherever it is wrong: you add too much or subtract too "
                "little, or a maximum, a bound or a condition is wrong."
            )
        if bool((gap[wrong] < 0).all()):
            return (
                "Your result is too small wherever it is wrong: you subtract too much or add too "
                "little, or a minimum, a bound or a condition is wrong."
            )
    return None


def listed(t: Trial) -> str | None:
    "What is missing in a list, or too much."
    missing, extra = set(), set()
    for i in t.failing:
        got, want = t.piece(t.got[i]), t.piece(t.want[i])
        if not isinstance(want, list) or not isinstance(got, (list, tuple)):
            return None
        if want and not all(isinstance(x, str) for x in want):
            return f"Your list has {len(got)} elements, and {len(want)} were wanted: " + (
                "something is missing."
                if len(got) < len(want)
                else "something is in it that should not be, or is in it twice."
                if len(got) > len(want)
                else "the elements, or their order, are wrong."
            )
        names = [x for x in got if isinstance(x, str)]
        missing |= {x for x in want if x not in names}
        extra |= {x for x in names if x not in want}
    if len(missing | extra) == 1:
        name = next(iter(missing | extra))
        said = (
            "it is sometimes missing, so its bound is too strict"
            if not extra
            else "it is there too often, so its bound is too loose"
            if not missing
            else "it is sometimes missing, and sometimes there where it should not be"
        )
        return (
            f"Only {name!r} is wrong in your lists: {said}, its condition is wrong, or you read "
            "the wrong entry (an index) of the log."
        )
    if missing or extra:
        return (
            f"Missing in your lists: {', '.join(sorted(missing)) or 'nothing'}. Too much: "
            f"{', '.join(sorted(extra)) or 'nothing'}."
        )
    return "Your lists hold the right elements in the wrong order." if t.failing else None


def plainly(t: Trial) -> str:
    "Where the results differ first, for want of a name."
    a, b = plain(t.piece(t.got[t.worst])), plain(t.piece(t.want[t.worst]))
    if a is None or b is None or a.shape != b.shape:
        return "Your result is not what was wanted for these inputs."
    if not b.ndim:
        return f"Your result is {float(a):.5g}, and {float(b):.5g} was wanted for these inputs."
    wrong = ~torch.isclose(a, b, atol=2e-5, rtol=2e-5, equal_nan=True)
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} numbers are wrong. At {list(place)} you have "
        f"{float(a[place]):.5g}, and {float(b[place]):.5g} was wanted."
    )
