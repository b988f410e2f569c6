"Exercises of the lab on what came after PPO."

from __future__ import annotations

from torch import Generator, Tensor, tensor

from rlhf_nb.exercises.draw import normal, one, pick, whole
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "22_after_ppo"

# ---- What the others earned ----


def my_others(earned: Tensor, size: int) -> Tensor:
    groups = earned.unflatten(0, (-1, size))
    total = groups.sum(1, keepdim=True)
    return ((total - groups) / (size - 1)).flatten()


def _others_cases(g: Generator) -> list[Case]:
    def case(groups: int, size: int) -> Case:
        return dict(earned=normal(g, groups * size, scale=2.0), size=size)

    return [case(2, 4), case(pick(g, [2, 3]), 3), case(3, 2), case(1, 5)]


OTHERS = Exercise(
    "my_others",
    my_others,
    _others_cases,
    "Each response is measured against what the others to its prompt earned.",
    {
        "That is the mean of the whole group: leave the response itself out.": (
            "(total - groups) / (size - 1)",
            "(total - 0 * groups) / size",
        ),
        "The response itself is missing from the sum and still in the count: divide by size - 1.": (
            "(size - 1)",
            "size",
        ),
        "The response itself is in the sum: subtract it before you divide by size - 1.": (
            "(total - groups)",
            "(total - 0 * groups)",
        ),
        "These are the advantages: give the baseline alone.": (
            "return (",
            "return (groups - ",
        ),
        "The sign is wrong: the others' mean, not minus it.": (
            "(total - groups)",
            "(groups - total)",
        ),
        "You average over the whole batch: only responses to the same prompt are compared.": (
            "(total - groups) / (size - 1)",
            "(earned.sum() - groups) / (len(earned) - 1)",
        ),
        "A group is `size` responses in a row. You took responses that are far apart.": (
            "(-1, size))",
            "(size, -1)).T",
        ),
        "You return sums: divide by the number of the others.": (" / (size - 1)", ""),
    },
)

# ---- The soft penalty for overlong answers ----


def my_overlong(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    over = lengths - (limit - buffer)
    return -(over / buffer).clamp(0, 1)


def _overlong_cases(g: Generator) -> list[Case]:
    def case(limit: int, buffer: int) -> Case:
        start = limit - buffer
        fixed = [0, start, start + 1, limit - 1, limit, limit + 1, limit + buffer + 3]
        drawn = whole(g, start + 1, limit - 1, 3).tolist()
        return dict(lengths=tensor(fixed + drawn), limit=limit, buffer=buffer)

    return [case(20, 8), case(one(g, 40, 60), pick(g, [10, 12, 16])), case(one(g, 25, 35), 5)]


OVERLONG = Exercise(
    "my_overlong",
    my_overlong,
    _overlong_cases,
    "Free up to the buffer, a ramp through it, and -1 from the limit on.",
    {
        "A penalty is negative: it is added to the score.": ("return -(", "return ("),
        "Beyond the limit the penalty goes on growing: it stays at -1.": (
            "clamp(0, 1)",
            "clamp(min=0)",
        ),
        "Short answers earn a bonus: below the buffer the penalty is 0.": (
            "clamp(0, 1)",
            "clamp(max=1)",
        ),
        "It neither starts at 0 nor ends at -1: cut it off at both ends.": (".clamp(0, 1)", ""),
        "Your ramp starts at the limit: it should end there, and start at limit - buffer.": (
            "lengths - (limit - buffer)",
            "lengths - limit",
        ),
        "Your ramp starts at buffer: that is its width. It starts at limit - buffer.": (
            "lengths - (limit - buffer)",
            "lengths - buffer",
        ),
        "Your ramp runs from buffer to limit: it should start at limit - buffer.": (
            "over / buffer",
            "(lengths - buffer) / (limit - buffer)",
        ),
        "Your ramp is too flat: it rises over buffer tokens, so divide by buffer.": (
            "over / buffer",
            "over / limit",
        ),
        "That is a step at limit - buffer, without the ramp.": (
            "(over / buffer).clamp(0, 1)",
            "(over > 0).float()",
        ),
        "That is a step at the limit, which is what the ramp is there to soften.": (
            "(over / buffer).clamp(0, 1)",
            "(lengths >= limit).float()",
        ),
    },
)
