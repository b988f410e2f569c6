"""What is wrong with an answer that makes no known mistake, found by its properties.

Each probe changes something in the cases, runs the answer and the right one again, and names a
mistake if the two now agree, or if only one of them notices the change. The reader sees what the
first probe that finds something says. The probes are in the modules `probe_form` (type, shape,
NaN), `probe_known` (the exercise's own mistakes, compared loosely), `probe_arguments`,
`probe_scale` and `probe_places`; `trial` holds what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable

from rlhf_nb.exercises import (
    probe_arguments,
    probe_form,
    probe_known,
    probe_places,
    probe_scale,
)
from rlhf_nb.exercises.trial import Trial, on_easy_cases
from rlhf_nb.exercises.values import parts, same

Probe = Callable[[Trial], str | None]

FIRST: tuple[Probe, ...] = (
    probe_known.trait,
    probe_arguments.fails_at_others,
    probe_form.signature,
    probe_form.kind,
    probe_form.chance,
)
ON_HARD_CASES: tuple[Probe, ...] = (  # where the answer is right on easy ones
    probe_form.several_for_one,
    probe_form.shape,
    probe_form.not_finite,
    probe_places.place,
    probe_places.padding,
    probe_arguments.full_mask,
    probe_arguments.neutral,
    probe_arguments.empty_rows,
)
ON_EASY_CASES: tuple[Probe, ...] = (
    probe_known.on_easy,
    probe_form.several_for_one,
    probe_form.shape,
    probe_form.not_finite,
    probe_arguments.swapped,
    probe_arguments.ignored,
    probe_scale.transformed,
    probe_arguments.sign_of_argument,
    probe_scale.scaled,
    probe_scale.normalised,
    probe_arguments.constant,
    probe_known.scaled,
    probe_scale.multiple,
    probe_places.shifted,
    probe_places.place,
    probe_places.first_row,
    probe_arguments.full_mask,
    probe_arguments.neutral,
    probe_arguments.empty_rows,
    probe_places.padding,
    probe_places.region,
    probe_places.listed,
    probe_places.by_comparison,
)


def name(t: Trial) -> str:
    "The name of the mistake, or plainly what differs."
    for probe in FIRST:
        if text := probe(t):
            return text
    which = ""
    want = t.want[t.worst]
    if isinstance(want, tuple):
        several = parts(t.got[t.worst]) or []
        wrong = [i for i, (a, b) in enumerate(zip(several, want)) if not same(a, b)]
        t.part = wrong[0] if wrong else None
        names = t.exercise.results or [f"result {i + 1} of {len(want)}" for i in range(len(want))]
        which = f"In {names[wrong[0]]}: " if wrong else ""
    easy = on_easy_cases(t)
    for probe in ON_EASY_CASES if easy else ON_HARD_CASES:
        if text := probe(easy or t):
            return text if probe is probe_known.on_easy else which + text
    return which + probe_places.plainly(t)
