# mypy: ignore-errors
"Checkers of the pages on evaluation and metrics, until they are rebuilt."

from __future__ import annotations

import math

from rlhf_nb.checks import Exercise, Mistake
from rlhf_nb.evaluate import wilson_interval


def textbook(rate, n):
    spread = 1.96 * (rate * (1 - rate) / n) ** 0.5
    return rate - spread, rate + spread


def fewest(rate, width, interval=wilson_interval):
    wide = lambda n: interval(rate, n)[1] - interval(rate, n)[0] > width
    return next(n for n in range(1, 100_000) if not wide(n))


mistakes = dict(
    half=(
        lambda rate, width: fewest(rate, 2 * width),
        "You measured from the middle to an end: from end to end is wanted.",
    ),
    textbook=(
        lambda rate, width: fewest(rate, width, textbook),
        "That is the textbook's interval: use wilson_interval.",
    ),
    coin=(
        lambda rate, width: fewest(0.5, width),
        "The rate makes no difference: a rate near 0 or 1 needs fewer posts.",
    ),
    one_less=(
        lambda rate, width: fewest(rate, width) - 1,
        "One post less than needed: that interval is still too wide.",
    ),
    round_numbers=(
        lambda rate, width: math.ceil(fewest(rate, width) / 100) * 100,
        "Enough, but not the fewest: step by one.",
    ),
)


def check_posts_needed(my_posts_needed):
    "Try a solution on three questions, and name its mistake."
    if not callable(my_posts_needed):
        return "Give the function itself."
    questions = [(0.6, 0.1), (0.9, 0.06), (0.75, 0.05)]
    got, want = ([f(*question) for question in questions] for f in (my_posts_needed, fewest))
    if got == want:
        return "Right: and that many posts is what the answer costs."
    for wrong, message in mistakes.values():
        if got == [wrong(*question) for question in questions]:
            return message
    return f"For a rate of 0.6 and a width of 0.1 you have {got[0]}: {want[0]} were wanted."


def weighted(scores, n, ways, total):
    "A sum over the sorted scores, with some rule for the weights."
    return sum(ways(i, n) * score for i, score in enumerate(sorted(scores))) / total(len(scores), n)


best_of = lambda scores, n: weighted(scores, n, lambda i, n: math.comb(i, n - 1), math.comb)
best_of_mistakes = dict(
    unsorted=(
        lambda scores, n: (
            sum(math.comb(i, n - 1) * s for i, s in enumerate(scores)) / math.comb(len(scores), n)
        ),
        "You weighted the scores as they came: sort them, smallest first.",
    ),
    downhill=(
        lambda scores, n: (
            sum(math.comb(i, n - 1) * s for i, s in enumerate(sorted(scores)[::-1]))
            / math.comb(len(scores), n)
        ),
        "You sorted the largest first: that is the worst of n.",
    ),
    shifted=(
        lambda scores, n: weighted(scores, n, lambda i, n: math.comb(i + 1, n - 1), math.comb),
        "Counted from 0, the score at place i has i below it, not i + 1: your weights add up to "
        "more than 1.",
    ),
    whole_sets=(
        lambda scores, n: weighted(scores, n, lambda i, n: math.comb(i, n), math.comb),
        "Only n - 1 of those below are chosen: the score itself is the n-th.",
    ),
    first_ones=(lambda scores, n: max(scores[:n]), "That is one set of n: all of them count."),
    all_of_them=(lambda scores, n: max(scores), "That is the best of all N, whatever n is."),
    put_back=(
        lambda scores, n: weighted(scores, n, lambda i, n: (i + 1) ** n - i**n, lambda N, n: N**n),
        "You drew with putting back: then one answer can fill a set alone, and the estimate is "
        "too low.",
    ),
)


def check_best_of_n(my_best_of_n):
    "Try a solution on three questions, and name its mistake."
    if not callable(my_best_of_n):
        return "Give the function itself."
    questions = [([1.0, 5.0, 2.0], 2), ([0.3, -1.0, 4.0, 2.5, 0.0], 3), ([2.0, 7.0, 1.0, 3.0], 1)]
    same = lambda f: all(
        abs(f(*question) - answer) < 1e-9 for question, answer in zip(questions, got)
    )
    got = [my_best_of_n(list(scores), n) for scores, n in questions]
    if same(best_of):
        return "Right: every set of n has been looked at, and none was drawn."
    for wrong, message in best_of_mistakes.values():
        if same(wrong):
            return message
    return f"For the scores 1, 5, 2 and n = 2 you have {got[0]}: 4 was wanted."


NAMES = (
    "val/ratio",
    "objective/kl",
    "policy/entropy_avg",
    "policy/clipfrac_avg",
    "val/explained_variance",
    "val/num_eos_tokens",
)


def diagnosis(log, by_ratio=False, at=0, least=0.1, always=False, late=True, few=44):
    "The right answer; each keyword makes a way of reading too fast of it."
    ratio, kl, entropy, clipfrac, explained, stopped = (list(log[name]) for name in NAMES)
    mismatch = abs(ratio[0] - 1) > 0.1 if by_ratio else abs(kl[at]) > least
    ill = dict(
        mismatch=mismatch,
        KL=kl[-1] > 8,
        entropy=entropy[-1] < 0.65 * entropy[0],
        clipping=max(clipfrac) > 0.25 and (always or not mismatch),
        value=min(explained[len(explained) // 2 if late else 0 :]) < -0.5,
        stops=stopped[-1] < few,
    )
    return [name for name, is_ill in ill.items() if is_ill]


def a_log(
    ratio=1.0,
    kl=(0.0, 1.0, 2.0, 3.0),
    entropy=(1.5, 1.4, 1.4, 1.3),
    clip=0.1,
    explained=(-3.0, -0.2, 0.1, 0.2),
    stopped=(63, 62, 60, 61),
):
    "A healthy log, but for what is given."
    return (
        dict(
            zip(
                NAMES,
                ([ratio] * 4, list(kl), list(entropy), [clip] * 4, list(explained), list(stopped)),
            )
        ),
    )


CASES = (
    a_log(),
    a_log(kl=(-2.0,) * 4, ratio=1.2, clip=0.3),
    a_log(ratio=1.2, clip=0.4),
    a_log(kl=(0.0, 5.0, 22.0, 60.0)),
    a_log(kl=(0.01, -0.1, 0.2, 0.1)),
    a_log(entropy=(1.5, 1.2, 0.8, 0.4)),
    a_log(explained=(-9.0, -4.0, -2.0, -1.0)),
    a_log(stopped=(63, 50, 30, 9)),
)
known = lambda **slip: lambda log: diagnosis(log, **slip)
check_diagnosis = Exercise(
    "my_diagnosis",
    diagnosis,
    CASES,
    (
        Mistake(
            known(late=False),
            "A fresh value head is wrong in the first update of every run: judge the second half.",
        ),
        Mistake(
            known(at=-1),
            "At last the KL is drift, as it should be: only in the first update must it be 0.",
        ),
        Mistake(
            known(by_ratio=True),
            "Large steps move val/ratio in the first update too, because it is a mean over all of "
            "its steps: the KL is taken before them.",
        ),
        Mistake(known(least=0.0), "A KL of 0.01 is rounding: allow for it."),
        Mistake(
            known(always=True),
            "With a mismatch tokens are clipped before any step: name the cause alone.",
        ),
        Mistake(
            known(few=1),
            "A run in which 9 of 64 answers stop is ill already: do not wait for zero.",
        ),
    ),
    "That is the reading that this page was about.",
)
