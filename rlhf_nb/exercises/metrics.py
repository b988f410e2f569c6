"The exercise of the page on metrics."

from __future__ import annotations

from torch import Generator

from rlhf_nb.exercises.draw import one, pick
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "47_metrics"

Log = dict[str, list[float]]


def my_diagnosis(log: Log) -> list[str]:
    kl, entropy = log["objective/kl"], log["policy/entropy_avg"]
    clipfrac, explained = log["policy/clipfrac_avg"], log["val/explained_variance"]
    mismatch = abs(kl[0]) > 0.1
    found = {
        "mismatch": mismatch,
        "KL": kl[-1] > 8,
        "entropy": entropy[-1] < 0.65 * entropy[0],
        "clipping": max(clipfrac) > 0.25 and not mismatch,
        "value": min(explained[len(explained) // 2 :]) < -0.5,
        "stops": log["val/num_eos_tokens"][-1] < 44,
    }
    return [name for name, ill in found.items() if ill]


def a_log(
    kl: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0),
    entropy: tuple[float, ...] = (1.5, 1.4, 1.4, 1.3),
    clipfrac: tuple[float, ...] = (0.1, 0.1, 0.1, 0.1),
    explained: tuple[float, ...] = (-3.0, -0.2, 0.1, 0.2),
    stopped: tuple[float, ...] = (63, 62, 60, 61),
    ratio: float = 1.0,
) -> Case:
    "A healthy log, but for what is given."
    return dict(
        log={
            "val/ratio": [ratio] * len(kl),
            "objective/kl": list(kl),
            "policy/entropy_avg": list(entropy),
            "policy/clipfrac_avg": list(clipfrac),
            "val/explained_variance": list(explained),
            "val/num_eos_tokens": list(stopped),
        }
    )


def _diagnosis_cases(g: Generator) -> list[Case]:
    near = lambda bound, off: bound + pick(g, (-off, off))

    def drawn() -> Case:
        n = one(g, 4, 6)
        filled = lambda *middle: (middle * n)[: n - 2]
        return a_log(
            kl=(pick(g, (-0.3, -0.09, 0.0, 0.09, 0.12)), *filled(9.0, 0.5), near(8.0, 0.2)),
            entropy=(1.6, *filled(0.7, 1.9), near(1.04, 0.02)),
            clipfrac=(0.1, *filled(near(0.25, 0.01), 0.2), 0.15),
            explained=tuple(
                near(-0.5, 0.05) if i == n // 2 else pick(g, (-0.2, 0.3)) - 3.0 * (i < n // 2)
                for i in range(n)
            ),
            stopped=(63, *filled(20.0, 64.0), float(pick(g, (43, 44, 45, 60)))),
            ratio=pick(g, (1.0, 1.2)),
        )

    return [
        a_log(),
        a_log(kl=(-2.0,) * 4, ratio=1.2, clipfrac=(0.3,) * 4),
        a_log(ratio=1.2, clipfrac=(0.4,) * 4),
        a_log(kl=(0.0, 5.0, 22.0, 60.0)),
        a_log(kl=(0.01, -0.1, 0.2, 0.1)),
        a_log(kl=(0.09, 9.0, 2.0, 7.9), entropy=(1.0, 0.5, 0.8, 0.66)),
        a_log(kl=(0.11, 1.0, 2.0, 8.1), entropy=(1.0, 0.5, 0.8, 0.64)),
        a_log(kl=(-0.11, 1.0, 2.0, 3.0)),
        a_log(entropy=(1.5, 1.2, 0.8, 0.4)),
        a_log(entropy=(2.0, 1.6, 1.4, 1.2)),
        a_log(clipfrac=(0.1, 0.26, 0.1, 0.1)),
        a_log(clipfrac=(0.6, 0.5, 0.1, 0.1)),
        a_log(clipfrac=(0.24, 0.1, 0.1, 0.1)),
        a_log(explained=(-9.0, -4.0, -2.0, -1.0)),
        a_log(explained=(-9.0, -4.0, 0.1, -0.7)),
        a_log(explained=(0.1, 0.0, -0.7, 0.1)),
        a_log(explained=(-9.0, -4.0, -0.51, 0.2)),
        a_log(explained=(-9.0, -4.0, -0.49, 0.2)),
        a_log(explained=(-9.0, -4.0, 0.49, 0.2), kl=(0.0, 1.0, 12.0, 3.0)),
        a_log(stopped=(63, 50, 30, 9)),
        a_log(stopped=(63, 20, 60, 44)),
        a_log(stopped=(63, 60, 60, 43)),
        a_log(
            kl=(0.1, 1.0, 2.0, 8.0),
            entropy=(1.0, 0.9, 0.9, 0.65),
            clipfrac=(0.25, 0.1, 0.1, 0.1),
            explained=(-3.0, -0.2, -0.5, 0.2),
            stopped=(63, 60, 60, 44),
        ),
        *(drawn() for _ in range(6)),
    ]


DIAGNOSIS = Exercise(
    "my_diagnosis",
    my_diagnosis,
    _diagnosis_cases,
    "You read the log as this page does.",
    {
        "A fresh value head is wrong in the first update of every run: look at the second half.": (
            "explained[len(explained) // 2 :]",
            "explained",
        ),
        "You judge the value model by its last update alone: look at the whole second half.": (
            "min(explained[len(explained) // 2 :])",
            "explained[-1]",
        ),
        "You judge the value model by its best update: a single bad one is enough, so take the "
        "min.": (
            "min(explained",
            "max(explained",
        ),
        "You judge the value model in the first half, where every fresh one is wrong: take the "
        "second.": (
            "len(explained) // 2 :",
            ": len(explained) // 2",
        ),
        "You look for a mismatch in the last update, where KL is drift, as it should be: it "
        "has to be 0 in the first update only.": (
            "abs(kl[0])",
            "abs(kl[-1])",
        ),
        "A negative KL in the first update is a mismatch too: take its abs.": (
            "abs(kl[0])",
            "kl[0]",
        ),
        "You look for a mismatch in every update: after the first, KL is drift, as it should be.": (
            "abs(kl[0])",
            "max(map(abs, kl))",
        ),
        "Large steps change val/ratio in the first update too, because it is a mean over all "
        "its steps: use the KL, which is measured before them.": (
            "abs(kl[0])",
            'abs(log["val/ratio"][0] - 1)',
        ),
        "A KL of 0.01 is rounding: allow for it.": ("> 0.1", "> 0.0"),
        "You use the largest KL of the run: use that of the last update.": (
            "kl[-1] > 8",
            "max(kl) > 8",
        ),
        "You use the mean KL of the run: use that of the last update.": (
            "kl[-1] > 8",
            "sum(kl) / len(kl) > 8",
        ),
        "Compare the entropy with that of the first update: 0.65 alone is not the bound.": (
            "0.65 * entropy[0]",
            "0.65",
        ),
        "You use the lowest entropy of the run: use that of the last update.": (
            "entropy[-1]",
            "min(entropy)",
        ),
        "With a mismatch, tokens are clipped before any step: name the cause alone, mismatch "
        "without clipping.": (
            " and not mismatch",
            "",
        ),
        "You use clipfrac of the last update alone: it must not be above 0.25 in any update.": (
            "max(clipfrac)",
            "clipfrac[-1]",
        ),
        "You use the mean clipfrac: it must not be above 0.25 in any update.": (
            "max(clipfrac)",
            "sum(clipfrac) / len(clipfrac)",
        ),
        "A run in which only 9 of 64 responses stop is ill already: do not wait until none "
        "stops.": (
            "< 44",
            "< 1",
        ),
        "You use the fewest stops of the run: use those of the last update.": (
            'log["val/num_eos_tokens"][-1]',
            'min(log["val/num_eos_tokens"])',
        ),
        "You find no log ill: compare each value with its bound.": (
            "if ill]",
            "if False]",
        ),
        "You name what is healthy: return what is ill.": ("if ill]", "if not ill]"),
    },
)
