"""A ladder of checks: each says what it measured, what was expected, and what to look at when it
fails; a check that needs another one which failed is skipped, and says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Check:
    "What one rung of the ladder found."

    name: str
    passed: bool  # False where it was skipped, too
    skipped: bool
    measured: str
    expected: str  # and why, with its source
    advice: str  # what to look at when it fails


class Found(NamedTuple):
    "What a rung measured."

    passed: bool
    measured: str


@dataclass(frozen=True)
class Rung:
    "One check of the ladder."

    name: str
    measure: Callable[[Any], Found]
    expected: str
    advice: str
    needs: Sequence[str] = ()  # names of rungs without which this one says nothing


@dataclass(frozen=True)
class Checks:
    "The checks of a ladder, cheapest first."

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        "Whether none failed; what was skipped because another one failed has not passed."
        return all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        "For `--json`."
        return dict(passed=self.passed, checks=[asdict(check) for check in self.checks])


def climb(rungs: Iterable[Rung], subject: Any) -> Checks:
    "Measure each rung on the subject, in order."
    done: dict[str, Check] = {}
    for rung in rungs:
        lacking = [name for name in rung.needs if not done[name].passed]
        if lacking:
            found = Found(False, f"skipped: it needs {', '.join(lacking)}")
        else:
            found = rung.measure(subject)
        done[rung.name] = Check(
            rung.name, found.passed, bool(lacking), found.measured, rung.expected, rung.advice
        )
    return Checks(tuple(done.values()))
