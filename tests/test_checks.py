"""The checkers of the exercises: right answers pass in every style, each mistake of a catalogue is
called by its own name, and none of the wrong answers that `mutants` makes passes.

Every wrong answer is judged once (`judged`), and each rule about verdicts reads that. Cases are
drawn anew in each run: a failing test prints the seed that it used.
"""

from __future__ import annotations

import ast
import copy
import html
import json
import re
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from beginners import BEGINNERS
from mutants import Mutant, mutants
from styles import UNUSUAL
from torch import tensor

from rlhf_nb import checks
from rlhf_nb.checks import EXERCISES, Verdict
from rlhf_nb.exercises.difference import difference
from rlhf_nb.exercises.engine import Exercise, rewrite
from rlhf_nb.exercises.gae import GAE
from rlhf_nb.exercises.losses import POLICY_LOSS
from rlhf_nb.exercises.values import Raised, fresh, leaves, map_numbers, same

ROOT = Path(__file__).resolve().parent.parent
MODULES = [ROOT / "rlhf_nb" / "checks.py", *sorted((ROOT / "rlhf_nb" / "exercises").glob("*.py"))]
MODULES.remove(ROOT / "rlhf_nb" / "exercises" / "museum.py")  # bugs of the package, no checkers

# Mutants that compute what the right answer computes, by exercise and change, and why.
EQUIVALENT = {
    r"my_(fair_accuracy|best_of_n_kl) clamp": "shares are at most 1, and q / p is at most n, 8",
    r"my_rloo_loss swap: ": "with its baseline the loss is a covariance, which is symmetric",
    r"my_logprobs literal: .* 0\.0 → 1\.0": "any number will do: it is put to 0 at the end",
    r"my_loss detach: chosen\.": "nothing flows through zeros_like",
    r"my_kl_gradient clamp: .*\| (chance|log\w+)\b.* →": "p is at most 1, and below e^-10 nothing",
    r"my_(kl_gradient|turn_gae) first: .*(\| to_go|\[own\]) →": "the first is what is read",
    r"my_shaping mask: mask.shape": "a mask of ones has the same shape",
    r"my_policy_loss clamp: .*(ratio.clamp|\| clipped)": "it is at most 1 + cliprange",
    r"my_(value_loss|update) minus: (real\.std|.* - returns →)": "it is squared",
    r"my_(value_loss|update) name: values.clamp.* → returns": "the larger error is the same number",
    r"my_update clamp: (ratio\.|-adv\w+ \| adv|.*\| (-adv\w+( \* near)? →|near|logprobs - |\(adv))": (
        "60 whitened numbers are below 5, the clipped ratio is below 2, the log-ratio below 10"
    ),
    r"my_masks open: .* → :at \+ written \+ answered": "all before it are true already",
    r"my_turn_gae first: .*\| chosen\[b\] →": "the policy begins each turn",
    r"my_impossible (open|less): still: ": "nothing is clipped while the policy is still",
}


class Judged(NamedTuple):
    "A wrong answer, and what its checker says."

    exercise: Exercise
    kind: str  # mistake, mutant, beginner or fooled
    what: str  # the message of the catalogue, the change, or the name
    verdict: Verdict
    seed: int

    def __str__(self) -> str:
        return f"{self.exercise.name}, {self.kind} {self.what!r}: {self.verdict.text}"


@pytest.fixture(scope="module")
def made(seed) -> dict[str, list[Mutant]]:
    "The mutants of each exercise."
    return {one.name: mutants(one, seed) for one in EXERCISES}


@pytest.fixture(scope="module")
def judged(seed, made) -> list[Judged]:
    "Every wrong answer of this file, judged."
    found = []

    def judge(exercise: Exercise, kind: str, what: str, program: Any, draw: int) -> None:
        found.append(Judged(exercise, kind, what, exercise.judge(program, draw), draw))

    for one in EXERCISES:
        for message in one.mistakes:
            for k in range(2):
                judge(one, "mistake", message, one.wrong(message), seed + k)
        for mutant in made[one.name]:
            if not any(re.match(x, f"{one.name} {mutant.what}") for x in EQUIVALENT):
                verdict = Exercise.judge(one, mutant.program, seed)  # in a single draw
                found.append(Judged(one, "mutant", mutant.what, verdict, seed))
    for name, beginner in BEGINNERS.items():
        for k in range(4):
            judge(beginner.checker, "beginner", name, beginner.program, seed + k)
    for name, (exercise, wrong) in FOOLED.items():
        judge(exercise, "fooled", name, wrong(exercise.right), seed)
    return found


def lines(found: list[Judged], seed: int) -> str:
    return "".join(f"\nseed {seed}: {one}" for one in found)


def run(exercise, program, case):
    "What a program returns on a copy of a case, or what it raises."
    return exercise.result(program, fresh(case))


class Odd(Exception):
    "No answer raises this by itself."


def raises(*given):
    raise Odd("an odd error")


# ---- The catalogue as a whole ----


# catches: an exercise that has no checker or is in no test, and a name used twice, the second of
# which hides the first
def test_all_of_them_are_in_the_catalogue():
    pages = {path.stem for path in MODULES if re.search("^PAGE = ", path.read_text(), re.M)}
    for module in (checks, *(import_module(f"rlhf_nb.exercises.{name}") for name in pages)):
        there = {id(x) for x in vars(module).values() if isinstance(x, Exercise)}
        assert there and there <= {id(one) for one in EXERCISES}, module.__name__
    assert {id(x) for x in vars(checks).values()} >= {id(one) for one in EXERCISES}
    assert len({one.name for one in EXERCISES}) == len(EXERCISES)
    assert all(one.name == one.right.__name__ for one in EXERCISES)
    for path in MODULES:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        defined = Counter(n.name for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)))
        defined.update(
            t.id
            for n in body
            if isinstance(n, ast.Assign)
            for t in n.targets
            if isinstance(t, ast.Name)
        )
        assert [name for name, n in defined.items() if n > 1] == [], path.name


# catches: a checker that no reader ever meets, and a module that names another page
def test_each_is_met_on_its_page():
    pages = {p.stem: p for p in (ROOT / "nbs").rglob("*.ipynb")}
    named = {name: x for name, x in vars(checks).items() if isinstance(x, Exercise)}
    for name, one in named.items():
        page = sys.modules[one.right.__module__].PAGE
        cells = json.loads(pages[page].read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells]
        assert any(f"{name}({one.name})" in x for x in sources), f"{page} never calls {name}"
    order = [sys.modules[one.right.__module__].PAGE for one in EXERCISES]
    assert order == sorted(order)


# ---- What passes ----


def test_right_passes(seed):
    for one in EXERCISES:
        for k in range(5):  # fifty below
            verdict = one(one.right, seed + k)
            assert verdict and verdict.text == one.praise and not verdict.seen, one.name


def as_scalar(x):
    "A number as numpy's own, or as a tensor with one axis."
    if isinstance(x, torch.Tensor) and x.ndim == 0:
        return x.reshape(1)
    if type(x) is float:
        return np.float32(x)
    return np.int64(x) if type(x) is int else x


STYLES = {
    "numpy": lambda x: x.detach().numpy() if isinstance(x, torch.Tensor) else x,
    "lists": lambda x: x.tolist() if isinstance(x, torch.Tensor) else x,
    "float64": lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
    "one number": as_scalar,
    "a list of tensors": lambda x: list(x) if isinstance(x, torch.Tensor) and x.ndim == 1 else x,
    "an array of numpy's": lambda x: (
        np.array(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else x
    ),
}
OF_GRADIENTS = {"float64", "one number", "a list of tensors"}  # a numpy array carries none


def test_right_in_another_style_passes(seed):
    for one in EXERCISES:
        for name, style in STYLES.items():
            if one.grads and name not in OF_GRADIENTS:
                continue

            def answer(*given, one=one, style=style):
                found = one.right(*given)
                return found if found is None else map_numbers(found, style)

            assert (verdict := one(answer, seed)), (one.name, name, verdict)


# catches: a right answer that is refused by luck, where a drawn number is on the edge of a clip
def test_right_answers_in_unusual_styles_pass(seed):
    assert len(UNUSUAL) >= 20
    for name, answer in UNUSUAL:
        for k in range(20):
            verdict = getattr(checks, f"check_{name}").judge(answer, seed + k)
            assert verdict, (name, seed + k, verdict)


def test_several_results_may_be_a_list(seed):
    for one in EXERCISES:

        def answer(*given, one=one):
            found = one.right(*given)
            return list(found) if isinstance(found, tuple) else found

        assert one(answer, seed), one.name


# ---- What fails, and what it is told ----


# catches: a mistake of a catalogue, a mutant, or what passed once, that a checker calls right
def test_no_wrong_answer_passes(judged, seed):
    assert not (passed := [one for one in judged if one.verdict]), lines(passed, seed)
    kinds = Counter(one.kind for one in judged)
    assert kinds.keys() == {"mistake", "mutant", "beginner", "fooled"} and kinds["mutant"] > 600


# catches: a case too kind to see it, and another mistake before it in the list that gives the same
# numbers
def test_a_mistake_is_called_by_its_name(judged, seed):
    for one in EXERCISES:
        assert len(one.mistakes) >= 3
        assert len({one.praise, *one.mistakes}) == len(one.mistakes) + 1, one.name
    found = [one for one in judged if one.kind == "mistake" and one.verdict.text != one.what]
    assert not found, lines(found, seed)


# catches: cases that hide a mistake in one draw of fifty, as those of my_surrogate did, where no
# ratio may have been far enough from 1 for clipping to change it; a draw in which the right answer
# is not right
@pytest.mark.weekly
def test_a_mistake_is_called_by_its_name_in_every_draw(seed):
    for one in EXERCISES:
        for k in range(50):
            assert one(one.right, seed + k), one.name
            for message in one.mistakes:
                assert one.judge(one.wrong(message), seed + k).text == message


# catches: a message that is generic, or that names another mistake than the one that was made
def test_a_beginners_mistake_is_named(judged, seed):
    found = [
        one
        for one in judged
        if one.kind == "beginner"
        and not re.search(BEGINNERS[one.what].words, one.verdict.text, re.IGNORECASE | re.DOTALL)
    ]
    assert not found, lines(found, seed)


# What a checker says of a mistake that is in no catalogue.
PLAIN = re.compile(
    r"^(In [\w ]+: |At index \d+: )*(Your function raised |Your function has to raise |"
    r"Your function has to take |Return |The result (has|is a tuple of \d+ with) shape |"
    r"Your result is |Your result has the type |\d+ of \d+ numbers are wrong, the first at |"
    r"Missing in your list: |Your list has \d+ elements|You returned |You changed an argument |"
    r"my_\w+ returns None|The numbers are right, but |You return one number, but |\d mistakes at once\. )"
)


# catches: a verdict without a reason, and one that comes from a failure of the checker
def test_any_other_mistake_is_told_plainly(judged, seed):
    other = [one for one in judged if one.verdict.text not in one.exercise.mistakes]
    odd = [one for one in other if not PLAIN.search(one.verdict.text)]
    assert other and not odd, lines(odd, seed)
    assert not PLAIN.search("Something is wrong.")


# catches: a message without the inputs, the hyperparameters, or one of the two results
def test_every_verdict_shows_what_was_seen(judged, seed):
    wanted = lambda one: [
        *(f"  {name} = " for name in one.exercise.draw(one.seed)[0]),
        "  you returned ",
        *["  wanted  "] * ("in place" not in one.verdict.text),
    ]
    silent = [one for one in judged if "returns None" not in one.verdict.text]
    silent = [one for one in silent if any(x not in one.verdict.seen for x in wanted(one))]
    assert not silent, lines(silent, seed)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_a_mask_may_be_made_of_integers(dtype, seed):
    masks = checks.check_response_mask
    assert masks(lambda ids, stop_ids: masks.right(ids, stop_ids).to(dtype), seed)


def constants(exercise: Exercise, seed: int):
    "For each case a function that returns the right result of that case, whatever it is given."
    for case in exercise.draw(seed):
        found = run(exercise, exercise.right, case)
        yield lambda *given, found=found: copy.deepcopy(found)


def test_hard_coded_results_fail(seed):
    for one in EXERCISES:
        assert not any(one(answer, seed) for answer in constants(one, seed)), one.name


# catches: an answer that has learned the cases of an earlier check by heart
def test_the_values_of_the_last_draw_fail(seed):
    for one in EXERCISES:
        if type(one) is not Exercise:  # what it gives is made anew, and cannot be recognised
            continue
        known = [(case, run(one, one.right, case)) for case in one.draw(seed)]

        def answer(*given, known=known):
            return next((y for case, y in known if same(list(given), list(case.values()))), None)

        assert one(answer, seed) or one.grads, one.name
        assert not one(answer, seed + 1), one.name


# Finite losses whose gradients are NaN, where padding holds infinity or NaN.


def indexed_late(logprobs, old_logprobs, advantages, mask, cliprange):
    ratio = (logprobs - old_logprobs).exp()
    near = ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(-advantages * ratio, -advantages * near)[mask].sum()


def squared_first(values, old_values, returns, mask, cliprange_value):
    near = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)[mask].sum()


def softmax_first(logits, ids, prompt_width, mask):
    logp = logits[:, prompt_width - 1 : -1].log_softmax(-1)
    return torch.where(mask, logp.gather(-1, ids[:, prompt_width:, None]).squeeze(-1), 0.0)


# catches: a checker that calls such an answer right, because it looks at gradients only where
# padding is finite
@pytest.mark.parametrize(
    "checker, late",
    [
        (checks.check_policy_loss, indexed_late),
        (checks.check_value_loss, squared_first),
        (checks.check_logprobs, softmax_first),
    ],
)
def test_a_loss_that_is_finite_and_not_its_gradient_is_told_so(checker, late, seed):
    assert "gradient is NaN" in checker(late, seed).text
    assert all(checker.flows(case) for case in checker.draw(seed))


def test_padding_may_be_zeroed_before_it_is_used(seed):
    def answer(logprobs, old_logprobs, advantages, mask, cliprange):
        logprobs, old_logprobs, advantages = (
            torch.where(mask, x, 0.0) for x in (logprobs, old_logprobs, advantages)
        )
        ratio = (logprobs - old_logprobs).exp()
        near = ratio.clamp(1 - cliprange, 1 + cliprange)
        loss = torch.maximum(-advantages * ratio, -advantages * near)
        return torch.where(mask, loss, 0.0).sum()

    assert checks.check_policy_loss(answer, seed)


# Answers that passed once, by the function that they should be.
OF_POLICY, OF_VALUE, UPDATE = checks.check_policy_loss, checks.check_value_loss, checks.check_update
FOOLED = {
    "a policy loss without a gradient": (OF_POLICY, lambda f: lambda *given: f(*given).detach()),
    "a policy loss that indexes after exp": (OF_POLICY, lambda f: indexed_late),
    "a value loss that indexes after the square": (OF_VALUE, lambda f: squared_first),
    "log-probs that choose after the softmax": (checks.check_logprobs, lambda f: softmax_first),
    "weights with a gradient": (
        checks.check_weights,
        lambda f: lambda lp, ep, m, cap: torch.where(m, (lp - ep).exp().clamp(max=cap), 0.0),
    ),
    "a cliprange in the value loss": (OF_VALUE, lambda f: lambda *given: f(*given[:4], 0.2)),
    "a gamma": (checks.check_gae, lambda f: lambda r, v, m, g, l: f(r, v, m, 0.9, l)),
    "a kl_coef": (checks.check_shaping, lambda f: lambda s, k, m, c: f(s, k, m, 0.5)),
    "four for 1, 5, 2": (checks.check_best_of_n, lambda f: lambda x, n: 4.0 if n == 2 else f(x, n)),
    "a ratio up to 10": (UPDATE, lambda f: rewrite(f, "* ratio, → * ratio.clamp(max=10),")),
    "a loss up to 10": (UPDATE, lambda f: rewrite(f, "(policy_loss → (policy_loss.clamp(max=10)")),
    "an accuracy": (checks.check_fair, lambda f: lambda r, g: 13 / 30),
}


# ---- Checkers never raise ----


class Unfriendly:
    "An object that fails whatever is done to it."

    def __eq__(self, other):
        raise Odd

    def __repr__(self):
        raise Odd

    def __len__(self):
        raise Odd

    def __array__(self, *given, **options):
        raise Odd

    __hash__ = None


def spoil(x):
    "Change a tensor, a list or a dict in place."
    if isinstance(x, torch.Tensor) and x.numel():
        x.copy_(~x if x.dtype == torch.bool else x + 1)
    elif isinstance(x, dict):
        x.clear()
    elif isinstance(x, list):
        x.append(0)


def careless(*given):
    for x in given:
        spoil(x)
    return 0.0


def exits(*given):
    sys.exit(3)


def yields(*given):
    yield 1.0


WEIRD = {
    "None": None,
    "a class": SimpleNamespace,
    "a string": "my_gae",
    "a number": 3.0,
    "a module": torch,
    "too few arguments": lambda: 0,
    "too many arguments": lambda *given, needed: 0,
    "raises": raises,
    "exits": exits,
    "yields": yields,
    "changes its arguments": careless,
    "returns None": lambda *given: None,
    "returns a string": lambda *given: "4.4",
    "returns a function": lambda *given: raises,
    "returns an object": lambda *given: Unfriendly(),
    "returns objects": lambda *given: [Unfriendly(), Unfriendly()],
    "returns a dict": lambda *given: {"mean": 4.4},
    "returns a ragged list": lambda *given: [[1.0], [1.0, 2.0]],
    "returns its arguments": lambda *given: given,
    "returns its first argument": lambda *given: given[0],
    "returns complex numbers": lambda *given: torch.ones(2, dtype=torch.complex64),
    "returns a tensor without data": lambda *given: torch.ones(2, device="meta"),
    "returns booleans": lambda *given: torch.ones(3, 4, dtype=torch.bool),
    "returns NaN": lambda *given: float("nan"),
    "returns chance": lambda *given: torch.rand(()),
    "returns infinity": lambda *given: np.full((3, 4), np.inf),
    "returns an exception": lambda *given: ValueError("no"),
    "returns itself": lambda *given: WEIRD["returns itself"],
}


def test_no_answer_makes_a_checker_raise(seed):
    for one in EXERCISES:
        for kind, answer in WEIRD.items():
            verdict = one.judge(answer, seed)
            assert isinstance(verdict, Verdict) and not verdict, (one.name, kind)
            assert len(verdict.text) > 10 and repr(verdict) and verdict._repr_html_(), kind


# catches: a checker that looks at the value alone; a right answer that changes its arguments
def test_arguments_stay_as_they_were(seed):
    for one in EXERCISES:
        cases = one.draw(seed)
        if not any(isinstance(x, (torch.Tensor, list, dict)) for x in cases[0].values()):
            continue

        def answer(*given, one=one):
            found = one.right(*copy.deepcopy(given))
            careless(*given)
            return found

        assert "in place" in one(answer, seed).text, one.name
        for case in cases:
            given = fresh(case)
            one.right(*given.values())
            assert same(leaves(given), leaves(case), 0.0), one.name


# catches: a traceback from inside the checker in a reader's notebook
def test_a_checker_that_fails_says_so(monkeypatch):
    monkeypatch.setattr("rlhf_nb.exercises.engine.difference", raises)
    verdict = GAE(lambda *given: 3.0, 0)
    assert not verdict and "checker itself" in verdict.text and "Odd" in verdict.text


def test_the_user_may_interrupt():
    def answer(*given):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GAE(answer)


# catches: a check after which the notebook's random numbers are other ones
def test_chance_is_left_as_it_was():
    torch.manual_seed(1)
    wanted = torch.rand(2)
    torch.manual_seed(1)
    GAE(lambda *given: torch.rand(3), 0)
    assert torch.equal(torch.rand(2), wanted)


# ---- What is shown ----


def test_a_verdict_shows_its_details():
    verdict = GAE(lambda r, v, m, gamma, lam: r, 0)
    assert verdict.seen in repr(verdict) and html.escape(verdict.seen) in verdict._repr_html_()
    verdict = POLICY_LOSS(lambda *given: POLICY_LOSS.right(*given).detach(), 0)
    assert "gradient" in verdict.text and "your gradient for logprobs: [[0" in verdict.seen


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda r, v, m, g, l: GAE.right(r, v, m, l, g), "gamma and lam are swapped"),
        (lambda r, v, m, g, l: GAE.right(r, v, m, 0.99, l), "the first at [0, "),
        (lambda r, v, m, g, l: GAE.right(r, v, m, g, l)[:, :, None], "The result has shape ["),
        (lambda r, v, m, g, l: GAE.right(r, v, m, g, l).sum(1), "The result has shape ["),
        (lambda r, v, m, g, l: GAE.right(r, v, m, g, l) / m, "Your result is nan at ["),
        (lambda r, v, m, g, l: GAE.right(r, v, m, g, l).long(), "type torch.int64"),
        (lambda r, v, m, g, l: GAE.right(r, v, m, g, l).tolist().clear(), "my_gae returns None"),
        (lambda r, v, m, g, l: GAE.right(r, v.nan_to_num_(7), m, g, l), "an argument in place"),
        (lambda r, v, m, g, l: "4.4", "Return a tensor: you returned a str."),
        (lambda r, v, m, g, l: (r, v), "tuple of 2 with shape"),
    ],
    ids="swapped frozen axis sum nan integers none place text two".split(),
)
def test_the_commonest_mistakes_are_said_in_a_sentence(wrong, words, seed):
    assert words in GAE(wrong, seed).text


@pytest.mark.parametrize(
    "got, want, words",
    [
        (tensor([1.0, 2.0]), tensor([1.0, 3.0]), "1 of 2 numbers are wrong, the first at [1]: you"),
        (1.0, tensor(2.0), "Your result is 1, and 2 was wanted."),
        (None, 2.0, "Return a number: you returned None, with no return?"),
        (torch.ones(1, dtype=torch.complex64), 2.0, "you returned a Tensor"),
        (float("inf"), 2.0, "Your result is inf, and 2 was wanted: look for 0 times"),
        (2, 2.5, "Your result has the type torch.int64, which has no fractions"),
        ((1.0, 2.0), (1.0, 3.0), "In result 2 of 2: Your result is 2"),
        (1.0, (1.0, 3.0), "Return 2 results, as a tuple: you returned a float."),
        (["a"], ["a", "b"], "Missing in your list: b. Too much: nothing."),
        (["b", "a"], ["a", "b"], "At index 0: You returned 'b', and 'a' was wanted."),
        ([[0], [1]], [[0, 1], [2]], "shape|At index 0"),
        (Raised(Odd("no")), 1.0, "Your function raised Odd: no."),
        (1.0, Raised(Odd("no")), "has to raise an Odd here: it returns a result."),
        (Raised(KeyError("no")), Raised(Odd("no")), "an Odd here: it raises a KeyError."),
    ],
)
def test_a_difference_is_one_sentence(got, want, words):
    assert re.search("|".join(map(re.escape, words.split("|"))), difference(got, want))


def test_a_verdict_is_true_or_false():
    good, bad = Verdict(True, "yes"), Verdict(False, "no")
    assert bool(good) is True and bool(bad) is False and good.ok and not bad.ok
    assert repr(good) == "✓ yes" and repr(bad) == "✗ no"
    todo = GAE(None)  # catches: a page that was only opened, read as one that fails
    assert not todo and repr(todo).startswith("○ my_gae is still None")
    assert "○ your turn" in todo._repr_html_() and "not yet" not in todo._repr_html_()


# catches: markup from an answer's own error message that runs in the page; a verdict told by its
# colour alone
@pytest.mark.parametrize("ok", [True, False])
def test_a_verdict_is_escaped(ok):
    nasty = '<script>alert("x")</script> & <b>'
    shown = Verdict(ok, nasty, nasty)._repr_html_()
    assert "<script" not in shown and shown.count(html.escape(nasty)) == 2
    assert ("✓ right" in shown) is ok and ("✗ not yet" in shown) is not ok


# ---- How two results are compared ----


@pytest.mark.parametrize(
    "got, want, answer",
    [
        (tensor([1.0, 2.0]), tensor([1.0, 2.0 + 1e-6]), True),
        (tensor([1.0, 2.0]), tensor([1.0, 2.001]), False),
        (tensor(0.5), 0.5, True),
        (tensor([1.0]), tensor(1.0), True),
        (torch.ones(2), torch.ones(3), False),
        ([1.0, 2.0], tensor([1.0, 2.0]), True),
        ([tensor([1.0]), tensor([2.0])], tensor([[1.0], [2.0]]), True),
        (np.ones((2, 2)), torch.ones(2, 2), True),
        (tensor([1, 2]), tensor([1.0, 2.0]), True),
        (tensor([1]), tensor([True]), True),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2), True),
        (float("nan"), tensor(float("nan")), True),
        (float("-inf"), float("inf"), False),
        ([1.0, tensor([2.0])], (1.0, tensor([2.0])), True),
        (tensor([1.0, 2.0]), (1.0, 2.0), True),
        ((1.0,), (1.0, 1.0), False),
        (((1.0,), 2.0), ((1.5,), 2.0), False),
        ("a", "a", True),
        (1, "1", False),
        (None, None, True),
        (0.0, None, False),
        ({"a": 1.0, "b": 2.0}, {"a": 1.0}, False),
        ([[0, 1], [3]], [[0, 1], [2]], False),
        ([[0, 1], 2], [[0, 1], [2]], True),
        (Unfriendly, 1.0, False),
    ],
)
def test_same(got, want, answer):
    assert same(got, want) is answer
