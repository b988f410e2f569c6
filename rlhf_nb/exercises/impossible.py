"The exercise of the bug museum."

from __future__ import annotations

from torch import Generator

from rlhf_nb.exercises.draw import one, pick
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "23_bug_museum"


def my_impossible(log: dict[str, list[float]], still: int) -> list[str]:
    entropy, kl, clipfrac = log["entropy"], log["kl"], log["clipfrac"]
    found = {
        "entropy": min(entropy) < 0,
        "kl": max(abs(x) for x in kl[: still + 1]) > 0.001,
        "clipfrac": max(clipfrac[still:]) == 0,
    }
    return [name for name, ill in found.items() if ill]


def a_log(
    still: int = 2,
    entropy: tuple[float, ...] = (10.0, 11.0, 9.0, 8.0, 6.0),
    kl: tuple[float, ...] = (0.0, 0.0, 0.0, 1.1, 2.4),
    clipfrac: tuple[float, ...] = (0.0, 0.0, 0.2, 0.1, 0.1),
) -> Case:
    "A healthy log, but for what is given."
    log = {"entropy": list(entropy), "kl": list(kl), "clipfrac": list(clipfrac)}
    return dict(log=log, still=still)


def _impossible_cases(g: Generator) -> list[Case]:
    def draw_case() -> Case:
        n = one(g, 4, 7)
        still = one(g, 1, n - 2)
        off = pick(g, (0.0, 0.0005, -0.4, 0.3))
        at = one(g, 0, still)
        kl = [0.0] * (still + 1) + [0.5 + i for i in range(n - still - 1)]
        kl[at] = off
        entropy = [9.0 - i for i in range(n)]
        entropy[one(g, 0, n - 1)] = pick(g, (0.3, -0.3, 4.0))
        cut = [0.0] * still + [pick(g, (0.0, 0.2)) for _ in range(n - still)]
        return a_log(still, tuple(entropy), tuple(kl), tuple(cut))

    dead = (0.0,) * 5
    return [
        a_log(),
        a_log(entropy=(10.0, 11.0, -0.01, 8.0, 6.0)),
        a_log(entropy=(10.0, 0.1, 0.5, 0.0, 6.0)),
        a_log(kl=(0.3, 0.0, 0.0, 1.1, 2.4)),
        a_log(kl=(0.0, 0.0, 0.3, 1.1, 2.4)),
        a_log(kl=(0.0, -0.3, 0.0, 1.1, 2.4)),
        a_log(kl=(0.0, 0.3, -0.3, 1.1, 2.4)),
        a_log(kl=(0.0, 0.0005, -0.0004, -0.2, 0.4)),
        a_log(clipfrac=dead),
        a_log(clipfrac=(0.0, 0.0, 0.0, 0.0, 0.1)),
        a_log(clipfrac=(0.0, 0.0, 0.1, 0.0, 0.0)),
        a_log(clipfrac=(0.0, 0.0, 0.004, 0.0, 0.002)),
        a_log(kl=(0.0, 0.0, 0.0, 0.0, 2.4)),
        a_log(still=1, kl=(0.0, 0.0, 0.9, 1.1, 2.4), clipfrac=(0.0, 0.2, 0.1, 0.1, 0.0)),
        a_log(still=1, kl=(0.0, 0.2, 0.9, 1.1, 2.4), clipfrac=dead),
        a_log(still=1, kl=(0.0, 0.0, 0.9, 1.1, 2.4), clipfrac=(0.0, 0.2, 0.0, 0.0, 0.0)),
        a_log(kl=(0.0, 0.001, -0.001, 1.1, 2.4)),
        a_log(kl=(0.0, 0.0, 0.0015, 1.1, 2.4)),
        a_log(entropy=(1.0, 1.0, 1.0, 1.0, -0.5), kl=(0.4,) * 5, clipfrac=dead),
        draw_case(),
        draw_case(),
        draw_case(),
    ]


ENTROPY = "min(entropy) < 0"
DEAD = "max(clipfrac[still:]) == 0"

IMPOSSIBLE = Exercise(
    my_impossible,
    _impossible_cases,
    "A number that cannot be is found without knowing what healthy looks like.",
    {
        "You stop one update too early with the KL: the answers of update "
        "still + 1 were written before the policy took its first step.": "still + 1 → still",
        "You go one update too far with the KL: behind update still + 1 the policy has moved, "
        "and then a KL may be anything.": "still + 1 → still + 2",
        "You ask for a KL of 0 in all updates: "
        "later it is what the score costs.": "kl[: still + 1] → kl",
        "You look at the first update alone: "
        "the KL must be 0 up to update still + 1.": "kl[: still + 1] → kl[:1]",
        "A KL below 0 at the start is as impossible as one above: "
        "take the absolute value.": "abs(x) → x",
        "You add up the early KLs, so that +0.3 and -0.3 "
        "cancel: look at each.": "max(abs(x) for x in kl[: still + 1]) → abs(sum(kl[: still + 1]))",
        "A KL of 0.0005 at the start is rounding: allow 0.001.": "> 0.001 → != 0",
        "A KL of exactly 0.001 is allowed: use >, not >=.": "> 0.001 → >= 0.001",
        "You look at the last entropy alone: "
        "it may be below 0 anywhere.": "min(entropy) → entropy[-1]",
        "An entropy of 0 is possible: "
        "a policy that is quite sure. Use <, not <=.": f"{ENTROPY} → min(entropy) <= 0",
        "You take the mean of the entropies, "
        "which hides one that is below 0.": f"{ENTROPY} → sum(entropy) < 0",
        "A clip fraction of 0 while only the value model learns is right: "
        "look at the updates behind it.": f"{DEAD} → min(clipfrac) == 0",
        "One update in which nothing is clipped can be: "
        "clipfrac cannot be 0 in all of them.": f"{DEAD} → min(clipfrac[still:]) == 0",
        "A small clip fraction is no zero: "
        "compare with 0 exactly.": f"{DEAD} → max(clipfrac[still:]) < 0.01",
        "You look at the last update's clip fraction alone: "
        "look at all behind the first still.": f"{DEAD} → clipfrac[-1] == 0",
        "You return the numbers that are possible.": "if ill → if not ill",
        "You return the first name only: return all, in the order entropy, kl, clipfrac.": (
            "for name, ill in found.items() if ill] → for name, ill in found.items() if ill][:1]"
        ),
        "The order is entropy, kl, clipfrac.": "sorted(name for name, ill in found.items() if ill)",
    },
)
