"""A checker runs a reader's function on newly drawn cases, and compares it with a right answer.

If the two differ, it names the mistake where a wrong program of the exercise's own catalogue gives
the same results, and else says where the results differ first (`difference`). It also shows the
inputs, what was returned and what was wanted.
"""

from __future__ import annotations

import inspect
import random
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

import torch
from torch import Tensor

from rlhf_nb.base.random_state import random_state_kept
from rlhf_nb.exercises.difference import difference
from rlhf_nb.exercises.values import (
    Case,
    Raised,
    attempt,
    close,
    fresh,
    leaves,
    numbers,
    plain,
    same,
    show_short,
)
from rlhf_nb.ui.html import element, inline

# A mistake: what is returned instead, edits of the right answer ("old → new; old →"), or a program.
Wrong = str | Callable


@dataclass(frozen=True)
class Verdict:
    "The result of a check: true or false, a sentence, and for a wrong answer what was seen."

    ok: bool
    text: str  # the praise, or the name of the mistake
    seen: str = ""  # inputs, result and what was wanted, one a line
    begun: bool = True  # False: there is no answer yet, so none is wrong

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        mark = "✓" if self.ok else "✗" if self.begun else "○"
        return f"{mark} {self.text}" + (f"\n{self.seen}" if self.seen else "")

    def _repr_html_(self) -> str:
        # The page shows through: blue, orange, grey.
        ground = "#2882dc30" if self.ok else "#cc660030" if self.begun else "#80808026"
        mark = "✓ right" if self.ok else "✗ not yet" if self.begun else "○ your turn"
        text = f"{element('b', mark)} {escape(self.text)}"
        seen = element("pre", escape(self.seen), style=inline("seen")) if self.seen else ""
        return element("div", text, seen, style=inline("verdict", ground=ground))


def rewrite(right: Callable, edits: str) -> Callable:
    """The right answer with pieces of its source replaced, "old → new; old →", or with another
    expression in its last return."""
    source = textwrap.dedent(inspect.getsource(right))
    if " →" not in edits:
        edits = f"{source[source.rindex('return ') :]} → return {edits}\n"
    for edit in edits.split("; "):
        old, _, new = edit.partition(" →")
        if old not in source:
            raise ValueError(f"{old!r} does not occur in {right.__name__}: correct the edit.")
        source = source.replace(old, new[1:])
    scope = dict(right.__globals__)
    exec(compile(source, f"<{right.__name__} with a mistake>", "exec"), scope)
    return scope[right.__name__]


def _same_case(a: Case, b: Case) -> bool:
    return len(leaves(a)) == len(leaves(b)) and all(
        x.shape == y.shape and close(x.double(), y.double(), 0.0)
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else x is y or (type(x) is type(y) and x == y)
        for x, y in zip(leaves(a), leaves(b))
    )


@dataclass(frozen=True, eq=False)
class Exercise:
    """A checker: call it with your function. `cases` draws the arguments of a few calls from a
    generator, in the order in which the function takes them."""

    right: Callable  # one answer, as a reader would write it; its name is that of theirs
    cases: Callable[[torch.Generator], list[Case]]
    praise: str  # what the reader has understood
    mistakes: Mapping[str, Wrong]  # the message for a mistake: a program that makes it
    grads: tuple[str, ...] = ()  # the arguments whose gradients are compared
    results: tuple[str, ...] = ()  # the names of several results
    valued: bool = True  # False: the gradients alone matter, and how many numbers there are
    _programs: dict[str, Callable] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        "Of the function that the reader writes."
        return self.right.__name__

    def __call__(self, answer: Any, seed: int | None = None) -> Verdict:
        "Whether the answer is right, and if not, which mistake it makes. Never raises."
        seed = random.SystemRandom().getrandbits(31) if seed is None else seed
        with random_state_kept():
            verdict = attempt(self.judge, answer, seed)
        if not isinstance(verdict, Raised):
            return verdict
        return Verdict(False, f"Your function made the checker itself fail: {show_short(verdict)}")

    def judge(self, answer: Any, seed: int) -> Verdict:
        "The verdict on one draw. It raises only where the checker is wrong."
        if answer is None:
            todo = f"{self.name} is still None: write the function, then run this cell again."
            return Verdict(False, todo, begun=False)
        refused = self._no_function(answer)
        return Verdict(False, refused) if refused else self._judge(answer, self.draw(seed), seed)

    def draw(self, seed: int) -> list[Case]:
        "The cases of one check."
        return self.cases(torch.Generator().manual_seed(seed))

    def wrong(self, message: str) -> Callable:
        "The program of the catalogue that makes a mistake."
        if message not in self._programs:
            wrong = self.mistakes[message]
            self._programs[message] = wrong if callable(wrong) else rewrite(self.right, wrong)
        return self._programs[message]

    def _no_function(self, answer: Any) -> str:
        if inspect.isclass(answer) or not callable(answer):
            kind = f"class {answer.__name__}" if inspect.isclass(answer) else type(answer).__name__
            return f"Give the function itself, without calling it: you gave a {kind}."
        return ""

    def _judge(self, answer: Callable, cases: list[Case], seed: int) -> Verdict:
        spoiled = "You changed an argument in place, and the caller needs it unchanged: copy it."
        got = []
        for case in cases:
            given = fresh(case)
            got.append(self.result(answer, given))
            if not _same_case(given, case):
                return Verdict(False, spoiled, self._show_case(case, got[-1]))
        if all(one is None for one in got):
            todo = f"{self.name} returns None: write its body, then run this cell again."
            return Verdict(False, todo, begun=False)
        want = [self.result(self.right, fresh(case)) for case in cases]
        failing = [i for i in range(len(cases)) if not self.alike(got[i], want[i])]
        weights = [i for i in range(len(cases)) if not failing and self.flows(cases[i])]
        by = lambda program, i: self.gradients(program, cases[i])
        failing += [i for i in weights if not _same_gradients(by(answer, i), by(self.right, i))]
        if not failing:
            return Verdict(True, self.praise)
        worst = min(failing, key=lambda i: (not _finite(cases[i]), _size(cases[i])))
        seen = self._show_case(cases[worst], got[worst], want[worst], bool(weights) and answer)
        for message in self.mistakes:
            if self._agree(self.wrong(message), answer, cases, got, bool(weights)):
                return Verdict(False, message, seen)
        if weights:
            return Verdict(False, self._gradient_mistake(answer, cases[worst]), seen)
        text = self._misfit(answer) if isinstance(got[worst], Raised) else ""
        return Verdict(False, text or difference(got[worst], want[worst], self.results), seen)

    def _misfit(self, answer: Callable) -> str:
        "What a function that cannot take the arguments has to take."
        names = list(inspect.signature(self.right).parameters)
        try:
            inspect.signature(answer).bind(*names)
        except TypeError:
            return f"Your function has to take {len(names)} arguments: {', '.join(names)}."
        except ValueError:  # it has no signature that can be read
            pass
        return ""

    def result(self, program: Callable, given: Case) -> Any:
        "What a program returns on a case, as it is compared."
        return attempt(program, *given.values())

    def alike(self, a: Any, b: Any) -> bool:
        "Whether two results are the same, as far as the exercise says what they are."
        x, y = plain(a), plain(b)
        if self.valued or x is None or y is None:
            return same(a, b)
        return x.numel() == y.numel()

    def _agree(
        self, program: Callable, answer: Callable, cases: list[Case], got: list[Any], padded: bool
    ) -> bool:
        """Whether a program of the catalogue does what the answer does, gradients included: those
        of infinite padding (`padded`) only where no number is wrong."""
        if not all(self.alike(self.result(program, fresh(c)), x) for c, x in zip(cases, got)):
            return False
        return all(
            _same_gradients(self.gradients(program, c), self.gradients(answer, c))
            for c in cases
            if self.flows(c) and (padded or _finite(c))
        )

    # ---- Gradients ----

    def flows(self, case: Case) -> bool:
        """Whether gradients are compared on this case: where those of the right answer are finite,
        with infinity on padding too."""
        if not self.grads:
            return False
        right = self.gradients(self.right, case)
        return right is not None and _finite(right)

    def gradients(self, program: Callable, case: Case) -> dict[str, Tensor] | None:
        """The gradients of a randomly weighted sum of the results; None where the program fails.
        An argument that nothing flows to has zeros."""
        given = fresh(case)
        inputs = {name: [x for x in leaves(given[name]) if _is_float(x)] for name in self.grads}
        every = [x for xs in inputs.values() for x in xs]
        for one in every:
            one.requires_grad_()
        result = self.result(program, given)
        if isinstance(result, Raised):
            return None
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for part in result if isinstance(result, (tuple, list)) else [result]:
            number = numbers(part)
            if number is None or not number.requires_grad:
                continue
            weight = torch.rand(number.numel(), generator=generator, dtype=torch.float64) + 0.5
            total = total + (weight * number.double().reshape(-1)).sum()
        try:
            grads = torch.autograd.grad(total, every, allow_unused=True)
        except RuntimeError:  # changed in place after it was used
            return None
        rest = iter(torch.zeros_like(x) if one is None else one for x, one in zip(every, grads))
        flat = {name: [next(rest) for _ in xs] for name, xs in inputs.items()}
        return {
            name: xs[0] if len(xs) == 1 else torch.cat([x.reshape(-1) for x in xs])
            for name, xs in flat.items()
        }

    def _gradient_mistake(self, answer: Callable, case: Case) -> str:
        got, want = self.gradients(answer, case), self.gradients(self.right, case)
        but = "The numbers are right, but" if self.valued else "You return one number, but"
        if got is None or want is None:
            return (
                f"{but} your function fails on tensors that need a gradient: "
                "stay within torch, and change nothing in place."
            )
        if not _finite(got):
            return (
                f"{but} a gradient is NaN or infinite: what is infinite on "
                "padding has to be left out before it is computed with, not after."
            )
        name = next(n for n in self.grads if not same(got[n], want[n], 1e-4))
        if not bool(got[name].any()):
            return (
                f"{but} no gradient reaches {name}: look for a detach too "
                "many, or for no_grad, item, tolist or numpy on the way."
            )
        why = ", because of a detach too many or one that is missing" * self.valued
        where = difference(got[name], want[name])
        return f"{but} the gradient with respect to {name} is wrong{why}. {where}"

    # ---- What is shown ----

    def _show_case(
        self, case: Case, got: Any, want: Any = None, gradients: Callable | bool = False
    ) -> str:
        lines = [f"{name} = {show_short(x)}" for name, x in case.items()]
        lines.append(f"you returned {show_short(got)}")
        if want is not None:
            lines.append(f"wanted       {show_short(want)}")
        if gradients and callable(gradients):
            yours, right = self.gradients(gradients, case), self.gradients(self.right, case)
            for name in self.grads:
                lines.append(f"your gradient for {name}: {show_short(yours and yours[name])}")
                lines.append(f"wanted: {show_short(right and right[name])}")
        return "\n".join(f"  {line}" for line in lines)


def _size(case: Case) -> int:
    return sum(x.numel() if isinstance(x, Tensor) else 1 for x in leaves(case))


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _finite(case: Case) -> bool:
    return all(bool(x.isfinite().all()) for x in filter(_is_float, leaves(case)))


def _same_gradients(a: dict[str, Tensor] | None, b: dict[str, Tensor] | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(same(a[name], b[name], 1e-4) for name in b)
