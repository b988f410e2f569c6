"""The checkers of the exercises: right answers pass in every style, each mistake of a catalogue is
called by its own name, and none of the wrong answers that `mutants` makes passes.

Cases are drawn anew in each run: a failing test prints the seed that it used.
"""

from __future__ import annotations

import ast
import copy
import html
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from beginners import BEGINNERS
from mutants import GENERIC, mutants
from torch import tensor

from rlhf_nb import checks
from rlhf_nb.checks import EXERCISES, Verdict
from rlhf_nb.exercises import progress as record
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.gae import GAE
from rlhf_nb.exercises.losses import POLICY_LOSS
from rlhf_nb.exercises.trial import Trial, put
from rlhf_nb.exercises.values import Raised, attempt, fresh, leaves, mapped, same

ROOT = Path(__file__).resolve().parent.parent
MODULES = [
    ROOT / "rlhf_nb" / "checks.py",
    *sorted((ROOT / "rlhf_nb" / "exercises").glob("*.py")),
]
MODULES.remove(ROOT / "rlhf_nb" / "exercises" / "museum.py")  # bugs of the package, no checkers
NAMES = [one.name for one in EXERCISES]
each = pytest.mark.parametrize("exercise", EXERCISES, ids=NAMES)

# Mutants that compute what the right answer computes, and why. Each is compared on 200 draws.
EQUIVALENT: dict[str, dict[str, str]] = {
    "my_loss": {"detach: chosen.detach()": "nothing flows through zeros_like"},
    "my_top_p": {
        "operator: p.cumsum(-1) - p >= top_p | p.cumsum(-1) - p >= top_p → "
        "p.cumsum(-1) - p > top_p": "they differ where a rounded sum is top_p to the last bit",
    },
    "my_posts_needed": {
        "operator: _width(rate, n) > width | _width(rate, n) > width → _width(rate, n) >= width": (
            "they differ where a width is the wanted one to the last bit"
        ),
    },
    "my_update": {"swap: tokens, epochs": "a product is the same in any order"},
    "my_largest": {
        "literal: 1 | 1 → 2": "one row always fits",
        "literal: high // 2 | 2 → 3": "a third of what does not fit is a lower end too",
    },
    "my_deltas": {
        "mask: mask.shape | mask → _ones(mask)": "a mask of ones has the same shape",
    },
    "my_advantages": {
        "mask: torch.zeros_like(mask) | mask → _ones(mask)": "zeros have the shape of either",
    },
    "my_rloo_loss": {
        "swap: logprobs, rewards": "with its baseline the loss is a covariance, which is symmetric",
    },
    "my_shaping": {
        "mask: mask.shape | mask → _ones(mask)": "a mask of ones has the same shape",
    },
    "my_entropy": {
        "literal: logp.clamp(min=-10000.0) | 10000.0 → 10001.0": "exp of either is 0",
        "literal: logp.clamp(min=-10000.0) | 10000.0 → 20000.0": "exp of either is 0",
        "detach: logp.clamp(min=-10000.0).detach()": "the gradient of a sum of probabilities is 0",
        "detach: logp.detach() (again)": "the gradient of a sum of probabilities is 0",
    },
    "my_logprobs": {
        "literal: torch.where(mask[:, :, None], logits[:, prompt_width - 1:-1], 0.0) | "
        "0.0 → 1.0": "any number will do: what comes of it is put to 0 at the end",
    },
    "my_merge": {"swap: a, b": "two sets together are the same, whichever comes first"},
    "my_tint": {"operator: value > 0 | value > 0 → value >= 0": "at 0 both ends give white"},
}


@pytest.fixture
def seed() -> int:
    drawn = random.SystemRandom().getrandbits(31)
    print(f"seed {drawn}")
    return drawn


def run(exercise, program, case):
    "What a program returns on a copy of a case, or what it raises."
    return exercise.result(program, fresh(case))


class Odd(Exception):
    "No answer raises this by itself."


def raises(*given):
    raise Odd("an odd error")


# ---- The catalogue as a whole ----


def test_all_of_them_are_in_the_catalogue():
    """catches: a checker that is in the module and in no test, and a name used twice, the second of
    which hides the first"""
    there = {id(x) for x in vars(checks).values() if isinstance(x, Exercise)}
    assert there == {id(one) for one in EXERCISES} and len(EXERCISES) == len(there) >= 3
    assert len(set(NAMES)) == len(NAMES)
    assert all(
        name.startswith("check_") and one.name == one.right.__name__
        for name, one in vars(checks).items()
        if isinstance(one, Exercise)
    )
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


def test_the_catalogue_uses_nothing_that_it_checks():
    "catches: a right answer that is the package's own function, wrong together with it"
    for path in MODULES:
        imported = {
            "." * n.level + (n.module or "") if isinstance(n, ast.ImportFrom) else a.name
            for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(n, (ast.Import, ast.ImportFrom))
            for a in n.names
        }
        own = {n for n in imported if n.startswith((".exercises", "rlhf_nb.exercises"))}
        if path.name in ("engine.py", "progress.py"):  # they draw a verdict and a list
            own |= imported & {"rlhf_nb.ui.html"}
        outside = {name.split(".")[0] for name in imported - own}
        assert outside <= {*sys.stdlib_module_names, "torch"}, path.name


def test_the_wrong_programs_are_run_by_checkers_alone():
    "catches: a mistake of the catalogue that another module of the package takes for a function"
    for path in sorted((ROOT / "rlhf_nb").rglob("*.py")):
        if path in MODULES or path.name == "_modidx.py" or path.parent.name == "cli":
            continue
        text = path.read_text(encoding="utf-8")
        assert "rlhf_nb.exercises" not in text and "from .exercises" not in text, path.name


@each
def test_is_met_on_a_page(exercise):
    "catches: a checker that no reader ever meets"
    pages = [p for p in sorted((ROOT / "nbs").rglob("*.ipynb")) if p.stem != "30_checks"]
    name = next(name for name, one in vars(checks).items() if one is exercise)
    cells = (
        "".join(c["source"])
        for p in pages
        for c in json.loads(p.read_text(encoding="utf-8"))["cells"]
    )
    assert any(name in source and exercise.name in source for source in cells), (
        f"no page has a cell with {name}({exercise.name})"
    )


# ---- What passes ----


@each
def test_right_passes(exercise, seed):
    for k in range(20):
        verdict = exercise(exercise.right, seed + k)
        assert verdict and verdict.text == exercise.praise and not verdict.seen


@each
def test_cases_are_drawn_anew_and_differ(exercise, seed):
    """catches: cases of which a hard-coded answer knows the numbers; a hyperparameter that is the
    same in all of them"""
    first, *others = [exercise.draw(seed + k) for k in range(4)]
    assert len(first) >= 2 and all(first[0].keys() == other[0].keys() for other in others)
    code = exercise.right.__code__
    if exercise.use is None:
        assert tuple(first[0]) == code.co_varnames[: code.co_argcount]
    values = [[list(case.values()) for case in cases] for cases in (first, *others)]
    assert not all(
        same(values[0], other, 0.0) for other in values[1:]
    )  # few choices may agree once
    for name, value in first[0].items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            assert len({case[name] for case in first}) > 1, f"{name} never changes"


def as_list(x):
    "Tensors as lists, and numbers as they are."
    return x.tolist() if isinstance(x, torch.Tensor) else x


def as_numpy(x):
    return x.detach().numpy() if isinstance(x, torch.Tensor) else x


def as_scalar(x):
    "A number as numpy's own, or as a tensor with one axis."
    if isinstance(x, torch.Tensor) and x.ndim == 0:
        return x.reshape(1)
    if type(x) is float:
        return np.float32(x)
    return np.int64(x) if type(x) is int else x


STYLES = {
    "numpy": lambda x: as_numpy(x),
    "lists": lambda x: as_list(x),
    "float64": lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
    "one number": as_scalar,
    "a list of tensors": lambda x: list(x) if isinstance(x, torch.Tensor) and x.ndim == 1 else x,
    "an array of numpy's": lambda x: (
        np.array(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else x
    ),
}
OF_GRADIENTS = {"float64", "one number", "a list of tensors"}  # a numpy array carries none


@each
@pytest.mark.parametrize("style", STYLES)
def test_right_in_another_style_passes(exercise, style, seed):
    if (exercise.grads and style not in OF_GRADIENTS) or exercise.use:
        return

    def answer(*given):
        found = exercise.right(*given)
        return found if found is None else mapped(found, STYLES[style])

    assert exercise(answer, seed), exercise(answer, seed)


@each
def test_several_results_may_be_a_list(exercise, seed):
    def answer(*given):
        found = exercise.right(*given)
        return list(found) if isinstance(found, tuple) else found

    assert exercise(answer, seed)


def gae_by_hand(rewards, values, mask, gamma, lam):
    "A loop over rows and tokens, in plain Python."
    rows = []
    for r, v, m in zip(rewards.tolist(), values.tolist(), mask.tolist()):
        n, row, later = sum(m), [0.0] * len(m), 0.0
        for t in reversed(range(n)):
            after = v[t + 1] if t + 1 < n else 0.0
            later = r[t] + gamma * after - v[t] + gamma * lam * later
            row[t] = later
        rows.append(row)
    return rows


def policy_loss_in_a_loop(logprobs, old_logprobs, advantages, mask, cliprange):
    total = torch.zeros(())
    for b, t in mask.nonzero().tolist():
        ratio = (logprobs[b, t] - old_logprobs[b, t]).exp()
        near = ratio.clamp(1 - cliprange, 1 + cliprange)
        total = total - torch.min(ratio * advantages[b, t], near * advantages[b, t])
    return total


def test_a_loop_is_as_good_as_a_vector(seed):
    assert GAE(gae_by_hand, seed) and POLICY_LOSS(policy_loss_in_a_loop, seed)


def test_upper_case_colours_pass(seed):
    tint = checks.check_tint
    assert tint(lambda value, vmax: tint.right(value, vmax).upper(), seed)


# ---- What fails, and what it is told ----


@each
def test_a_mistake_is_called_by_its_name(exercise, seed):
    """catches: a case too kind to see it, and another mistake before it in the list that gives the
    same numbers"""
    assert len(exercise.mistakes) >= 3
    assert len({exercise.praise, *exercise.mistakes}) == len(exercise.mistakes) + 1
    for message in exercise.mistakes:
        for k in range(2):
            assert exercise(exercise.wrong(message), seed + k).text == message


@each
@pytest.mark.slow
def test_a_mistake_is_called_by_its_name_in_every_draw(exercise, seed):
    """catches: cases that hide a mistake in one draw of fifty, as those of my_surrogate did, where
    no ratio may have been far enough from 1 for clipping to change it"""
    for k in range(50):
        for message in exercise.mistakes:
            assert exercise.judge(exercise.wrong(message), seed + k).text == message


def judged(exercise: Exercise, seed: int) -> tuple[list[str], list[tuple[str, str]], int]:
    "Mutants that pass; those that get another message, with it; and how many were wrong."
    passed, unnamed, count = [], [], 0
    for mutant in mutants(exercise, seed):
        if mutant.what in EQUIVALENT.get(exercise.name, ()):
            continue
        verdict = exercise.judge(mutant.program, seed)
        count += 1
        if verdict:
            passed.append(mutant.what)
        elif not mutant.named(verdict.text):
            unnamed.append((mutant.what, verdict.text))
    return passed, unnamed, count


@each
def test_no_wrong_answer_passes_and_most_are_named(exercise, seed):
    "catches: a wrong answer that passes, and an exercise that says what is wrong of few"
    passed, unnamed, count = judged(exercise, seed)
    assert passed == []
    assert len(unnamed) <= 0.6 * count, unnamed


def test_six_in_ten_of_all_wrong_answers_are_named(seed):
    found = [judged(exercise, seed) for exercise in EXERCISES]
    named, count = sum(n - len(unnamed) for _, unnamed, n in found), sum(n for _, _, n in found)
    print(f"{named} of {count} named")
    assert named >= 0.6 * count


@each
def test_mutants_that_compute_the_same(exercise, seed):
    "catches: an entry of EQUIVALENT that is wrong after all, or that no longer exists"
    listed = EQUIVALENT.get(exercise.name, {})
    made = {m.what: m for m in mutants(exercise, seed)}
    assert listed.keys() <= made.keys()
    cases = [case for k in range(200) for case in exercise.draw(seed + k)][: 200 if listed else 0]
    for what in listed:
        for case in cases:
            assert same(
                run(exercise, made[what].program, case), run(exercise, exercise.right, case)
            ), what


def test_words_are_held_against_the_kind_of_mistake():
    "catches: a test of names that takes any sentence"
    made = mutants(GAE, 0)
    frozen = next(m for m in made if m.what == "freeze: gamma = 0.9 everywhere")
    assert frozen.named("gamma makes no difference") and not frozen.named("lam makes none")
    assert not frozen.named("3 of 5 numbers are wrong. At [0, 1] you have 1, and gamma")
    assert {m.kind for m in made} >= {"freeze", "mask", "operator", "swap", "shift"}
    made = mutants(POLICY_LOSS, 0)
    assert {m.kind for m in made} >= {"detach", "reduction", "literal"}


@pytest.mark.parametrize("kind", BEGINNERS)
def test_a_beginners_mistake_is_named(kind, seed):
    "catches: a message that is generic, or that names another mistake than the one that was made"
    exercise, program, words = BEGINNERS[kind]
    for k in range(4):
        text = exercise.judge(program, seed + k).text
        assert re.search(words, text, re.IGNORECASE | re.DOTALL), text
        assert not any(one in text for one in (*GENERIC, "Right only where length = 0")), text


def test_every_trait_is_seen_in_a_beginners_answer(seed):
    "catches: a trait that no answer has, or that another message always precedes"
    seen = {(b.checker.name, b.checker.judge(b.program, seed).text) for b in BEGINNERS.values()}
    every = {(one.name, message) for one in EXERCISES for message in one.traits}
    assert every <= seen, every - seen


@each
def test_no_right_result_has_a_trait(exercise, seed):
    for case in exercise.draw(seed):
        found = run(exercise, exercise.right, case)
        assert not any(attempt(holds, case, found) is True for holds in exercise.traits.values())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_a_mask_may_be_made_of_integers(dtype, seed):
    masks = checks.check_response_mask
    assert masks(lambda ids, stop_ids: masks.right(ids, stop_ids).to(dtype), seed)


def test_two_failures_that_agree_mean_nothing(seed):
    """catches: "right only where length = 0", said because the answer and the right one raise the
    same error there"""
    exercise = checks.check_kl_gradient
    cases = exercise.draw(seed)
    results = [
        [run(exercise, program, c) for c in cases] for program in (torch.add, exercise.right)
    ]
    trial = Trial(exercise, lambda z, ref, n: 1 / n + z, cases, *results, [0], 0, seed)
    assert isinstance(trial.right(put("length", 0)(cases[0])), Raised)
    assert not trial.agrees(put("length", 0))


def constants(exercise: Exercise, seed: int):
    "For each case a function that returns the right result of that case, whatever it is given."
    for case in exercise.draw(seed):
        found = run(exercise, exercise.right, case)
        yield lambda *given, found=found: copy.deepcopy(found)


@each
def test_hard_coded_results_fail(exercise, seed):
    for answer in constants(exercise, seed):
        assert not exercise(answer, seed)


@each
def test_the_values_of_the_last_draw_fail(exercise, seed):
    "catches: an answer that has learned the cases of an earlier check by heart"
    if exercise.use:
        return
    known = [(case, run(exercise, exercise.right, case)) for case in exercise.draw(seed)]

    def answer(*given):
        return next((y for case, y in known if same(list(given), list(case.values()))), None)

    assert exercise(answer, seed) or exercise.grads
    assert not exercise(answer, seed + 1)


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
    found = logp.gather(-1, ids[:, prompt_width:, None]).squeeze(-1)
    return torch.where(mask, found, 0.0)


@pytest.mark.parametrize(
    "checker, late",
    [
        (checks.check_policy_loss, indexed_late),
        (checks.check_value_loss, squared_first),
        (checks.check_logprobs, softmax_first),
    ],
)
def test_a_loss_that_is_finite_and_not_its_gradient_is_told_so(checker, late, seed):
    """catches: a checker that calls such an answer right, because it looks at gradients only where
    padding is finite"""
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
FOOLED = {
    "a policy loss without a gradient": (
        checks.check_policy_loss,
        lambda right: lambda *given: right(*given).detach(),
    ),
    "a policy loss that indexes after exp": (
        checks.check_policy_loss,
        lambda right: indexed_late,
    ),
    "a value loss that indexes after the square": (
        checks.check_value_loss,
        lambda right: squared_first,
    ),
    "log-probs that choose after the softmax": (
        checks.check_logprobs,
        lambda right: softmax_first,
    ),
    "weights with a gradient": (
        checks.check_weights,
        lambda right: lambda lp, ep, m, cap: torch.where(m, (lp - ep).exp().clamp(max=cap), 0.0),
    ),
    "a cliprange in the value loss": (
        checks.check_value_loss,
        lambda right: lambda v, old, r, m, c: right(v, old, r, m, 0.2),
    ),
    "a gamma": (checks.check_gae, lambda right: lambda r, v, m, g, l: right(r, v, m, 0.9, l)),
    "a kl_coef": (checks.check_shaping, lambda right: lambda s, k, m, c: right(s, k, m, 0.5)),
    "a constant vector of scores": (
        checks.check_final_scores,
        lambda right: lambda s, stop, c, p: tensor([3.0, 2.0, -3.0, -4.0, 0.5, -0.5])[: len(s)],
    ),
    "the last tokens of one batch": (
        checks.check_last,
        lambda right: lambda s, m: tensor([2.0, 4.0, 3.0, 6.0]),
    ),
    "four for 1, 5, 2": (
        checks.check_best_of_n,
        lambda right: lambda scores, n: 4.0 if n == 2 else right(scores, n),
    ),
    "the posts of three questions": (
        checks.check_posts_needed,
        lambda right: lambda rate, width: {0.6: 89, 0.9: 64, 0.5: 1}.get(rate, 100),
    ),
    "an accuracy": (checks.check_fair, lambda right: lambda r, g: 13 / 30),
    "one row of logits": (checks.check_top_p, lambda right: lambda z, p: right(z, 0.7)),
    "34 rows": (checks.check_largest, lambda right: lambda fits: 34),
    **{
        f"a rule of a log: {name}": (
            checks.check_diagnosis,
            lambda right, name=name: lambda log: [x for x in right(log) if x != name],
        )
        for name in ("mismatch", "KL", "entropy", "clipping", "value", "stops")
    },
    "the six rules in another order": (
        checks.check_diagnosis,
        lambda right: lambda log: right(log)[::-1],
    ),
    "a diagnosis by the last update": (
        checks.check_diagnosis,
        lambda right: lambda log: right({name: [x[-1]] * len(x) for name, x in log.items()}),
    ),
    "a diagnosis by the means": (
        checks.check_diagnosis,
        lambda right: lambda log: right({k: [sum(x) / len(x)] * len(x) for k, x in log.items()}),
    ),
    "a healthy run": (checks.check_diagnosis, lambda right: lambda log: []),
}


@pytest.mark.parametrize("kind", FOOLED)
def test_what_passed_once_fails(kind, seed):
    exercise, made = FOOLED[kind]
    assert not exercise.judge(made(exercise.right), seed)


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
    "a class of tensors": torch.Tensor,
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
    "returns a class": lambda *given: int,
    "returns a function": lambda *given: raises,
    "returns an object": lambda *given: Unfriendly(),
    "returns objects": lambda *given: [Unfriendly(), Unfriendly()],
    "returns a dict": lambda *given: {"mean": 4.4},
    "returns a ragged list": lambda *given: [[1.0], [1.0, 2.0]],
    "returns nothing in a list": lambda *given: [],
    "returns its arguments": lambda *given: given,
    "returns its first argument": lambda *given: given[0],
    "returns complex numbers": lambda *given: torch.ones(2, dtype=torch.complex64),
    "returns a tensor without data": lambda *given: torch.ones(2, device="meta"),
    "returns booleans": lambda *given: torch.ones(3, 4, dtype=torch.bool),
    "returns NaN": lambda *given: float("nan"),
    "returns chance": lambda *given: torch.rand(()),
    "returns infinity": lambda *given: np.full((3, 4), np.inf),
    "returns a set": lambda *given: {1.0, 2.0},
    "returns an exception": lambda *given: ValueError("no"),
    "returns itself": lambda *given: WEIRD["returns itself"],
}


@each
def test_no_answer_makes_a_checker_raise(exercise, seed):
    for kind, answer in WEIRD.items():
        verdict = exercise.judge(answer, seed)
        assert isinstance(verdict, Verdict) and not verdict, kind
        assert len(verdict.text) > 10 and repr(verdict) and verdict._repr_html_(), kind


@each
def test_arguments_stay_as_they_were(exercise, seed):
    "catches: a checker that looks at the value alone; a right answer that changes its arguments"
    if not any(isinstance(x, (torch.Tensor, list, dict)) for x in exercise.draw(seed)[0].values()):
        return

    def answer(*given):
        found = exercise.right(*copy.deepcopy(given))
        careless(*given)
        return found

    assert "in place" in exercise(answer, seed).text
    for case in exercise.draw(seed):
        given = fresh(case)
        exercise.right(*given.values())
        assert same(leaves(given), leaves(case), 0.0)


def test_a_checker_that_fails_says_so(monkeypatch):
    "catches: a traceback from inside the checker in a reader's notebook"
    monkeypatch.setattr("rlhf_nb.exercises.probes.name", raises)
    verdict = GAE(lambda *given: 3.0, 0)
    assert not verdict and "checker itself" in verdict.text and "Odd" in verdict.text


def test_the_user_may_interrupt():
    def answer(*given):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GAE(answer)


def test_chance_is_left_as_it_was():
    "catches: a check after which the notebook's random numbers are other ones"
    torch.manual_seed(1)
    wanted = torch.rand(2)
    torch.manual_seed(1)
    GAE(lambda *given: torch.rand(3), 0)
    assert torch.equal(torch.rand(2), wanted)


# ---- What is shown ----


def test_a_wrong_answer_shows_what_was_seen():
    "catches: a message without the inputs, the hyperparameters, or one of the two results"
    verdict = GAE(lambda r, v, m, gamma, lam: r, 0)
    for word in ("rewards = [", "mask = [", "gamma = ", "lam = ", "you returned [", "wanted  "):
        assert word in verdict.seen
    assert verdict.seen in repr(verdict) and html.escape(verdict.seen) in verdict._repr_html_()
    verdict = POLICY_LOSS(lambda *given: POLICY_LOSS.right(*given).detach(), 0)
    assert "gradient" in verdict.text and "your gradient for logprobs: [[0" in verdict.seen


def test_an_error_is_shown():
    verdict = GAE(raises, 0)
    assert "Odd: an odd error" in verdict.text and "rewards = [" in verdict.seen


def test_a_signature_is_named():
    assert "rewards, values, mask, gamma, lam" in GAE(lambda a, b: a, 0).text


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda r, v, m, g, l: GAE.right(r, v, m, l, g), "gamma and lam are swapped"),
        (lambda r, v, m, g, l: GAE.right(r, v, m, 0.99, l), "gamma makes no difference"),
        (lambda r, v, m, g, l: -GAE.right(r, v, m, g, l), "sign"),
        (lambda r, v, m, g, l: 2 * GAE.right(r, v, m, g, l), "2 times"),
        (lambda r, v, m, g, l: GAE.right(r, v, m, g, l)[:, :, None], "axis"),
        (lambda r, v, m, g, l: GAE.right(r, v, m, g, l).sum(1), "shape"),
        (lambda r, v, m, g, l: GAE.right(r, v, m, g, l) + 0.5, "off by one constant"),
        (lambda r, v, m, g, l: GAE.right(r, v, m, g, l).roll(1, 1), "shifted"),
    ],
    ids=["swapped", "frozen", "sign", "twice", "axis", "shape", "constant", "shifted"],
)
def test_what_a_property_names(wrong, words, seed):
    assert words in GAE(wrong, seed).text


def test_a_verdict_is_true_or_false():
    good, bad = Verdict(True, "yes"), Verdict(False, "no")
    assert bool(good) is True and bool(bad) is False and good.ok and not bad.ok
    assert repr(good) == "✓ yes" and repr(bad) == "✗ no"
    todo = GAE(None)  # catches: a page that was only opened, read as one that fails
    assert not todo and repr(todo).startswith("○ my_gae is still None")
    assert "○ your turn" in todo._repr_html_() and "not yet" not in todo._repr_html_()


@pytest.mark.parametrize("ok", [True, False])
def test_a_verdict_is_escaped(ok):
    """catches: markup from an answer's own error message that runs in the page; a verdict told by
    its colour alone"""
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
        (np.float64(0.5), 0.5, True),
        (tensor([1.0]), tensor(1.0), True),
        (tensor([[1.0]]), tensor([1.0]), True),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2, 1), torch.ones(2), False),
        ([1.0, 2.0], tensor([1.0, 2.0]), True),
        ([[1.0], [2.0]], tensor([[1.0], [2.0]]), True),
        ([tensor([1.0]), tensor([2.0])], tensor([[1.0], [2.0]]), True),
        (np.ones((2, 2)), torch.ones(2, 2), True),
        (tensor([1, 2]), tensor([1.0, 2.0]), True),
        (tensor([1]), tensor([True]), True),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2), True),
        (float("nan"), tensor(float("nan")), True),
        (0.0, float("nan"), False),
        (float("inf"), float("inf"), True),
        (float("-inf"), float("inf"), False),
        ([1.0, tensor([2.0])], (1.0, tensor([2.0])), True),
        (tensor([1.0, 2.0]), (1.0, 2.0), True),
        ((1.0,), (1.0, 1.0), False),
        (((1.0,), 2.0), ((1.5,), 2.0), False),
        ("a", "a", True),
        ("a", "b", False),
        (1, "1", False),
        ("1", 1, False),
        (None, None, True),
        (0.0, None, False),
        (None, 0.0, False),
        ({"a": 1.0}, {"a": 1.0}, True),
        ({"a": 1.0, "b": 2.0}, {"a": 1.0}, False),
        ([[0, 1], [2]], [[0, 1], [2]], True),
        ([[0, 1], [3]], [[0, 1], [2]], False),
        ([[0, 1], 2], [[0, 1], [2]], True),
        (Unfriendly, 1.0, False),
    ],
)
def test_same(got, want, answer):
    assert same(got, want) is answer


# ---- Progress ----


@pytest.fixture
def file(tmp_path, monkeypatch):
    "A record of its own, where it is written in a test too."
    path = tmp_path / "solved.json"
    monkeypatch.setenv("RLHF_NB_PROGRESS", str(path))
    return path


def test_progress_is_recorded_for_the_readers_own_function(file, monkeypatch):
    """catches: a pass of a lesson's function, of a wrong answer or of the catalogue's own that counts
    as the reader's"""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "my_gae", GAE.right, raising=False)
    assert GAE(gae_by_hand) and not file.exists()
    assert GAE(GAE.right) and list(json.loads(file.read_text())) == ["my_gae"]
    monkeypatch.setattr(main, "my_policy_loss", raises, raising=False)
    assert not POLICY_LOSS(raises) and list(record.solved()) == ["my_gae"]
    shown = repr(checks.progress())
    assert "✓ my_gae" in shown and f"1 of {len(EXERCISES)} solved" in shown
    assert "· my_policy_loss" in shown and "my_policy_loss" in checks.progress()._repr_html_()


def test_a_test_writes_nothing(tmp_path, monkeypatch):
    "catches: a record that a test run or CI leaves in the working tree"
    monkeypatch.delenv("RLHF_NB_PROGRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "my_gae", GAE.right, raising=False)
    assert GAE(GAE.right) and list(tmp_path.iterdir()) == []


def test_all_notebooks_of_a_copy_share_a_record(tmp_path, monkeypatch):
    monkeypatch.delenv("RLHF_NB_PROGRESS", raising=False)
    (tmp_path / "settings.ini").touch()
    (tmp_path / "nbs" / "course").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "nbs" / "course")
    assert record.path() == tmp_path / record.FILE
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert record.FILE in ignored


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"my_gae": 3}'])
def test_a_damaged_record_is_no_error(file, content):
    file.write_text(content)
    assert isinstance(record.solved(), dict) and repr(checks.progress())
