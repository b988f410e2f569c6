"""The checkers of the exercises: the right answer passes, each mistake is called by its own name,
and nothing else is.

`alike` below compares answers in numpy, apart from `same`, so that a checker whose comparison is
wrong cannot agree with itself.
"""

from __future__ import annotations

import ast
import copy
import html
import itertools
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from notebooks import NOTEBOOKS
from torch import tensor

from rlhf_nb import checks
from rlhf_nb.checks import EXERCISES, Exercise, Mistake, Verdict, difference, outcome, same
from rlhf_nb.exercises import Task

ROOT = Path(__file__).resolve().parent.parent
MODULES = [
    ROOT / "rlhf_nb" / "checks.py",
    *sorted((ROOT / "rlhf_nb" / "exercises").glob("*.py")),
]
NAMES = [one.name for one in EXERCISES]
each = pytest.mark.parametrize("exercise", EXERCISES, ids=NAMES)
each_mistake = pytest.mark.parametrize(
    "exercise, mistake",
    [(e, m) for e in EXERCISES for m in e.mistakes],
    ids=[f"{e.name}-{i}" for e in EXERCISES for i in range(len(e.mistakes))],
)


class Odd(Exception):
    "No answer raises this by itself."


def run(program, case):
    try:
        return program(*copy.deepcopy(case))
    except Exception as error:
        return error


def alike(a, b) -> bool:
    "Same shape and numbers, or the same kind of exception; written apart from `same`."
    if isinstance(a, Exception) or isinstance(b, Exception):
        return type(a) is type(b)
    if isinstance(a, (tuple, list)) or isinstance(b, (tuple, list)):
        return (
            isinstance(a, (tuple, list))
            and isinstance(b, (tuple, list))
            and len(a) == len(b)
            and all(map(alike, a, b))
        )
    if any(x is None or isinstance(x, str) for x in (a, b)):
        return type(a) is type(b) and a == b
    a, b = (
        np.asarray(x.detach() if isinstance(x, torch.Tensor) else x, dtype=float) for x in (a, b)
    )
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True))


def changed(x, number, word):
    "An outcome with `number` for each number or tensor in it and `word` for each text."
    if isinstance(x, Exception):
        raise x
    if isinstance(x, (tuple, list)):
        return type(x)(changed(one, number, word) for one in x)
    return word(x) if isinstance(x, str) else x if x is None else number(x)


def wider(x):
    """An outcome of another shape: a text becomes a list, a tuple one longer, a tensor or a number
    an axis richer."""
    if isinstance(x, Exception):
        raise x
    if isinstance(x, (tuple, list)):
        return (*x, x[0])
    return [x] if x is None or isinstance(x, str) else torch.as_tensor(x)[None]


def raises(*given):
    raise Odd("an odd error")


# kind of wrong answer, and how to make one of the right one
GENERIC = {
    "a little more": lambda right: (
        lambda *given: changed(
            right(*given), lambda x: torch.as_tensor(x).double() + 0.123, lambda s: s + "?"
        )
    ),
    "zeros": lambda right: (
        lambda *given: changed(
            right(*given), lambda x: torch.zeros_like(torch.as_tensor(x)), lambda s: ""
        )
    ),
    "a constant": lambda right: lambda *given: 7.77,
    "another shape": lambda right: lambda *given: wider(right(*given)),
    "None": lambda right: lambda *given: None,
    "an error": lambda right: raises,
}


# ---- Every exercise ----


def test_all_of_them_are_in_the_catalogue():
    """catches: a checker that stands in the module and in no test, and a name used twice, the
    second of which hides the first"""
    there = {id(x) for name, x in vars(checks).items() if isinstance(x, Exercise)}
    assert there == {id(one) for one in EXERCISES} and len(EXERCISES) == len(there) >= 3
    assert len(set(NAMES)) == len(NAMES)
    assert all(
        name.startswith("check_") and one.name.startswith("my_")
        for name, one in vars(checks).items()
        if isinstance(one, Exercise)
    )
    for path in MODULES:
        body = ast.parse(path.read_text()).body
        defined = Counter(n.name for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)))
        defined.update(
            t.id
            for n in body
            if isinstance(n, ast.Assign)
            for t in n.targets
            if isinstance(t, ast.Name)
        )
        assert [name for name, n in defined.items() if n > 1] == [], path.name


def test_the_catalogue_leans_on_nothing_that_it_checks():
    "catches: a right answer that is the package's own function, wrong together with it"
    for path in MODULES:
        imported = {
            "." * n.level + (n.module or "") if isinstance(n, ast.ImportFrom) else a.name
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, (ast.Import, ast.ImportFrom))
            for a in n.names
        }
        outside = {name.split(".")[0] for name in imported - {".exercises", "rlhf_nb.exercises"}}
        assert outside <= {*sys.stdlib_module_names, "torch"}, path.name


def test_the_wrong_programs_are_run_by_checkers_alone():
    "catches: a mistake of the catalogue that another module of the package takes for a function"
    for path in sorted((ROOT / "rlhf_nb").rglob("*.py")):
        if path in MODULES or path.name == "_modidx.py":
            continue
        assert "exercises" not in path.read_text(encoding="utf-8"), path.name
    tasks = [x for m in vars(checks).values() for x in getattr(m, "__dict__", {}).values()]
    tasks = [x for x in tasks if isinstance(x, Task)]
    assert len(tasks) == len(EXERCISES) and all(
        any(one.right is task.right for one in EXERCISES) for task in tasks
    )


@each
def test_is_asked_for_on_a_page(exercise):
    "catches: a checker that no reader ever meets"
    pages = [path for name, path in NOTEBOOKS.items() if name != "30_checks"]
    name = next(name for name, one in vars(checks).items() if one is exercise)
    code = (
        "".join(c["source"])
        for p in pages
        for c in json.loads(p.read_text(encoding="utf-8"))["cells"]
        if c["cell_type"] == "code"
    )
    assert any(f"{name}({exercise.name})" in source for source in code), (
        f"no page has a cell with {name}({exercise.name})"
    )


@each
def test_right_passes(exercise):
    said = exercise(exercise.right)
    assert said and said.ok and said.text == exercise.praise
    for case in exercise.cases:
        assert alike(run(exercise.right, case), run(exercise.right, case)), (
            "the right answer depends on chance"
        )


@each_mistake
def test_a_mistake_is_called_by_its_name(exercise, mistake):
    """catches: a case too kind to see it, or another mistake before it in the list that gives the
    same numbers"""
    said = exercise(mistake.wrong)
    assert not said and said.text == mistake.message


@each
def test_mistakes_can_be_told_apart(exercise):
    "catches: two entries that are one mistake; one that is right; a message used twice"
    assert len(exercise.mistakes) >= 3
    assert (
        len({exercise.praise, *(m.message for m in exercise.mistakes)})
        == len(exercise.mistakes) + 1
    )
    programs = [exercise.right, *(m.wrong for m in exercise.mistakes)]
    results = [[run(program, case) for case in exercise.cases] for program in programs]
    for (i, a), (j, b) in itertools.combinations(enumerate(results), 2):
        assert not all(map(alike, a, b)), (
            f"{exercise.name}: answers {i} and {j} agree on every case (0 is the right one)"
        )


@each
@pytest.mark.parametrize("kind", GENERIC)
def test_a_wrong_answer_of_no_kind(exercise, kind):
    """catches: cases on which nonsense is right, and a checker that gives some mistake's message to
    whatever it does not know"""
    answer = GENERIC[kind](exercise.right)
    got = [run(answer, case) for case in exercise.cases]
    said = exercise(answer)
    assert not said, f"{kind} passes"
    called = [m for m in exercise.mistakes if m.message == said.text]
    assert all(
        all(map(alike, got, [run(m.wrong, case) for case in exercise.cases])) for m in called
    )
    assert len(said.text) > 10 and said.text != exercise.praise
    if kind == "an error":
        assert "Odd" in said.text and "an odd error" in said.text


@each
def test_no_function_at_all(exercise):
    said = exercise(None)
    assert not said and "NoneType" in said.text and "function" in said.text


def spoil(x) -> bool:
    "Change the first thing in x that can be changed in place; whether there was one."
    if isinstance(x, torch.Tensor) and x.numel():
        x.copy_(
            ~x
            if x.dtype == torch.bool
            else torch.where(x == 3, torch.full_like(x, 4), torch.full_like(x, 3))
        )
        return True
    if isinstance(x, dict):
        return any(map(spoil, x.values())) or not x.clear()
    if isinstance(x, list):
        return any(map(spoil, x)) or not x.append(0)
    return isinstance(x, tuple) and any(map(spoil, x))


@each
def test_arguments_stay_as_they_were(exercise):
    """catches: a checker that looks at the value alone; a right answer that changes what it was
    given; cases that wear out"""
    before = copy.deepcopy(exercise.cases)

    def careless(*given):
        found = exercise.right(*copy.deepcopy(given))
        spoil(given)
        return found

    if not any(spoil(copy.deepcopy(case)) for case in exercise.cases):
        pytest.skip("its arguments cannot be changed in place")
    said = exercise(careless)
    assert not said and "in place" in said.text
    assert exercise(exercise.right) and same(exercise.cases, before, 0.0)


# ---- What they are made of ----

ROWS, KEEP = (
    tensor([[1.0, 2.0, 3.0], [9.0, 7.0, 7.0]]),
    tensor([[True, True, True], [True, False, False]]),
)
TOY = Exercise(
    "my_mean",
    lambda x, mask: x[mask].mean(),
    ((ROWS, KEEP),),
    praise="Only real tokens count.",
    mistakes=(
        Mistake(lambda x, mask: x.mean(), "padding"),
        Mistake(lambda x, mask: (x * mask).sum() / x.numel(), "columns"),
    ),
)


def test_outcome():
    """catches: a case that is used up by the answer that ran first; an exception that ends the
    checker"""
    case = (tensor([1.0, 2.0]), [tensor([3.0])])
    assert outcome(lambda x, rest: x.add_(1).sum() + rest[0].zero_().sum(), case) == 5
    assert case[0].tolist() == [1, 2] and case[1][0].tolist() == [3]
    error = outcome(lambda x, rest: 1 / 0, case)
    assert isinstance(error, ZeroDivisionError)
    assert isinstance(outcome(lambda: 0, case), TypeError)  # it takes another number of arguments
    with pytest.raises(KeyboardInterrupt):
        outcome(lambda *given: (_ for _ in ()).throw(KeyboardInterrupt), case)


@pytest.mark.parametrize(
    "a, b, answer",
    [
        (tensor([1.0, 2.0]), tensor([1.0, 2.0 + 1e-6]), True),
        (tensor([1.0, 2.0]), tensor([1.0, 2.001]), False),
        (tensor(0.5), 0.5, True),
        (0.5, np.float64(0.5), True),
        (tensor([1.0]), tensor(1.0), False),
        (tensor([[1.0]]), tensor([1.0]), False),
        (torch.ones(2), torch.ones(3), False),
        (tensor([1, 2]), tensor([1.0, 2.0]), True),
        (tensor([True]), tensor([1]), True),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64), True),
        (math.nan, tensor(math.nan), True),
        (math.nan, 0.0, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.zeros(2, requires_grad=True), torch.zeros(2), True),
        ((1.0, tensor([2.0])), [1.0, tensor([2.0])], True),
        ((1.0,), (1.0, 1.0), False),
        ((1.0, 2.0), tensor([1.0, 2.0]), False),
        ((), (), True),
        (((1.0,), 2.0), ((1.5,), 2.0), False),
        ("a", "a", True),
        ("a", "b", False),
        ("1", 1, False),
        (None, None, True),
        (None, 0.0, False),
        (None, "None", False),
        (ValueError("a"), ValueError("b"), True),
        (ValueError("a"), TypeError("a"), False),
        (ValueError("a"), 1.0, False),
        (1.0, ValueError("a"), False),
        (KeyError("a"), LookupError("a"), False),
        (object(), 1.0, False),
        (lambda: 1, tensor(1.0), False),
    ],
    ids=lambda x: re.sub(" at 0x[0-9a-f]+", "", repr(x)),
)
def test_same(a, b, answer):
    assert same(a, b) is answer and same(b, a) is answer


def test_same_has_a_tolerance():
    """catches: a tolerance of no use (in_place is asked with 0) or one relative alone (zeros are
    compared too)"""
    assert (
        same(1.0, 1.1, 0.2)
        and not same(1.0, 1.1, 0.0)
        and not same(tensor([1.0]), tensor([1.0 + 2e-7]), 0.0)
    )
    assert (
        same(0.0, 5e-6) and not same(0.0, 5e-5) and same(1e6, 1e6 + 5) and not same(1e6, 1e6 + 50)
    )
    assert not same((0.0, (1.0,)), (0.0, (1.1,)), 0.01) and same((0.0, (1.0,)), (0.0, (1.1,)), 0.2)


@pytest.mark.parametrize(
    "got, want, said",
    [
        (tensor([1.0, 2.0]), tensor([1.0, 3.0]), "At [1] you have 2, and 3 was wanted."),
        (
            tensor([[1.0, 2.0], [4.0, 5.0]]),
            tensor([[1.0, 2.0], [3.0, 3.0]]),
            "At [1, 0] you have 4, and 3 was wanted.",
        ),
        (tensor([math.nan, 1.0]), tensor([math.nan, 2.0]), "At [1] you have 1, and 2 was wanted."),
        (tensor([math.nan]), tensor([2.0]), "At [0] you have nan, and 2 was wanted."),
        (torch.ones(2, 1), torch.ones(2), "The answer has shape [2, 1], and [2] was wanted."),
        (1.5, tensor(0.25), "The answer is 1.5, and 0.25 was wanted."),
        (tensor(1.5, requires_grad=True), 0.25, "The answer is 1.5, and 0.25 was wanted."),
        (None, tensor(1.0), "Return a tensor or a number: NoneType came."),
        ({}, 1.0, "Return a tensor or a number: dict came."),
        (tensor([1.0, 2.0]), (1.0, 2.0), "Return 2 values, as a tuple."),
        ((1.0,), (1.0, 2.0), "Return 2 values, as a tuple."),
        ((1.0, 5.0), (1.0, 2.0), "The answer is 5, and 2 was wanted."),
        ((1.0, (2.0, 3.0)), (1.0, (2.0, 4.0)), "The answer is 3, and 4 was wanted."),
    ],
    ids=repr,
)
def test_difference(got, want, said):
    """catches: the first place instead of the first wrong one; got and wanted exchanged; NaN beside
    NaN called a difference"""
    assert difference(got, want) == said


@pytest.mark.parametrize(
    "answer",
    [
        lambda x, mask: [x[mask].mean()],
        lambda x, mask: x[mask].mean().item(),
        lambda x, mask: "4.4",
        lambda x, mask: {"mean": 4.4},
        lambda x, mask: (x[mask].mean(), 0),
        lambda x, mask: x[mask],
    ],
)
def test_a_checker_never_fails_itself(answer):
    "catches: an answer of an unforeseen kind that ends in a traceback from inside the checker"
    said = TOY(answer)
    assert isinstance(said, Verdict) and (said.ok or len(said.text) > 10)


def only(right, *case):
    return Exercise("my_answer", right, (case,), (), "yes")


def test_a_list_where_a_tensor_was_wanted():
    "catches: the right numbers as a list, which are no tensor, and have no first difference"
    said = only(lambda x: 2 * x, tensor([1.0, 2.0]))(lambda x: (2 * x).tolist())
    assert not said and "list" in said.text


@pytest.mark.parametrize(
    "right, case, answer, wanted",
    [
        (lambda x: f"<{x}>", "a", lambda x: f"[{x}]", "<a>"),
        (lambda x: 1 / x, 0, lambda x: 5.0, "ZeroDivisionError"),
    ],
)
def test_what_was_wanted_is_not_always_a_number(right, case, answer, wanted):
    """catches: 'return a tensor or a number' to whoever returned the wrong text, or no error where
    one was wanted"""
    assert wanted in only(right, case)(answer).text


@pytest.mark.parametrize(
    "right, case",
    [
        (lambda x, f: f(x), (1.0, abs)),
        (lambda x: x["a"], ({"a": tensor(1.0)},)),
        (lambda x: {"a": x}, (1.0,)),
    ],
)
def test_functions_and_dicts(right, case):
    """catches: an exercise with a `reduce` among its arguments, of which every answer is told that
    it changed them"""
    assert only(right, *case)(right)


def test_an_exercise_says_what_it_saw():
    """catches: a verdict by the first case alone; the order of in-place and error; a known mistake
    called unknown"""
    assert TOY(lambda x, mask: (x * mask).sum() / mask.sum()).text == "Only real tokens count."
    assert (
        TOY(lambda x, mask: x.mean()).text == "padding"
        and TOY(lambda x, mask: (x * mask).mean()).text == "columns"
    )
    unknown = TOY(lambda x, mask: x[mask].mean() + 1)
    assert (
        not unknown
        and unknown.text == "No mistake that I know. The answer is 4.75, and 3.75 was wanted."
    )
    assert TOY(raises).text == "It raised Odd: an odd error"
    assert "in place" in TOY(lambda x, mask: x.mul_(mask).sum() / mask.sum()).text

    def breaks_and_raises(x, mask):
        x.zero_()
        raise Odd

    assert "in place" in TOY(breaks_and_raises).text
    two = Exercise(
        "my_abs",
        abs,
        ((tensor([1.0]),), (tensor([-1.0]),)),
        (Mistake(lambda x: x, "nothing"),),
        "yes",
    )
    assert (
        two(abs)
        and two(lambda x: x).text == "nothing"
        and two(lambda x: -x).text.startswith("No mistake that I know")
    )


def test_an_exception_can_be_the_right_answer():
    """catches: an answer that raises called wrong where the right one raises too, or right where it
    does not"""
    half = Exercise(
        "my_half",
        lambda x: 1 / x,
        ((2,), (0,)),
        (Mistake(lambda x: 1 / x if x else math.inf, "no error"),),
        "yes",
    )
    assert (
        half(lambda x: 1.0 / x)
        and half(lambda x: 1 / x if x else math.inf).text == "no error"
        and "Odd" in half(raises).text
    )

    def other(x):
        if x == 0:
            raise ValueError("x is 0")
        return 1 / x

    assert not half(other) and "ValueError" in half(other).text


def test_a_verdict_is_true_or_false():
    good, bad = Verdict(True, "yes"), Verdict(False, "no")
    assert bool(good) is True and bool(bad) is False and good.ok and not bad.ok
    assert repr(good) == "✓ yes" and repr(bad) == "✗ no"


@pytest.mark.parametrize("ok", [True, False])
def test_a_verdict_is_escaped(ok):
    """catches: markup from an answer's own error message that runs in the page; a verdict told by
    its colour alone"""
    nasty = '<script>alert("x")</script> & <b>'
    shown = Verdict(ok, nasty)._repr_html_()
    assert (
        "<script" not in shown and html.escape(nasty) in shown and nasty in repr(Verdict(ok, nasty))
    )
    assert ("✓ right" in shown) is ok and ("✗ not yet" in shown) is not ok


def test_what_an_answer_says_is_escaped():
    def nasty(x, mask):
        raise Odd("<img src=x onerror=alert(1)>")

    shown = TOY(nasty)._repr_html_()
    assert "<img" not in shown and "&lt;img" in shown
