"The exercise of the page on reading episodes."

from __future__ import annotations

from torch import Generator

from rlhf_nb.exercises.draw import between, pick
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

Interval = tuple[float, float]  # its low and its high end


def my_compare(sft: Interval, ppo: Interval) -> str:
    if ppo[0] > sft[1]:
        return "better"
    if ppo[1] < sft[0]:
        return "worse"
    return "open"


def _compare_cases(g: Generator) -> list[Case]:
    def drawn(gap: float) -> Case:
        start, one, two = (
            float(between(g, low, high, 1)) for low, high in ((0.2, 0.5), (0.02, 0.1), (0.02, 0.1))
        )
        low, high = (start, start + one), (start + one + gap, start + one + gap + two)
        return dict(sft=low, ppo=high) if pick(g, (True, False)) else dict(sft=high, ppo=low)

    pairs = [
        ((0.30, 0.34), (0.50, 0.54)),
        ((0.50, 0.54), (0.30, 0.34)),
        ((0.30, 0.34), (0.33, 0.37)),
        ((0.33, 0.37), (0.30, 0.34)),
        ((0.30, 0.50), (0.35, 0.40)),
        ((0.35, 0.40), (0.30, 0.50)),
        ((0.30, 0.34), (0.345, 0.40)),
        ((0.345, 0.40), (0.30, 0.34)),
        ((0.30, 0.34), (0.34, 0.40)),
        ((0.34, 0.40), (0.30, 0.34)),
    ]
    fixed = [dict(sft=sft, ppo=ppo) for sft, ppo in pairs]
    return [*fixed, *(drawn(gap) for gap in (0.01, 0.03, 0.1, -0.01, -0.015))]


UP, DOWN = "ppo[0] > sft[1]", "ppo[1] < sft[0]"

COMPARE = Exercise(
    "my_compare",
    my_compare,
    _compare_cases,
    "Better or worse if the intervals are apart, and open if they meet.",
    {
        "Better and worse are swapped: the answer is about PPO.": (
            UP,
            "sft[0] > ppo[1]",
            DOWN,
            "sft[1] < ppo[0]",
        ),
        "You compare the middles: if the intervals meet, the answer is open.": (
            UP,
            "sum(ppo) > sum(sft)",
            DOWN,
            "sum(ppo) < sum(sft)",
        ),
        "PPO's low end must be above SFT's high end, not above its low end.": (
            UP,
            "ppo[0] > sft[0]",
        ),
        "PPO's high end must be below SFT's low end, not below its high end.": (
            DOWN,
            "ppo[1] < sft[1]",
        ),
        "You compare low end with low end and high end with high end: PPO's low end must be "
        "above SFT's high end, or its high end below SFT's low end.": (
            UP,
            "ppo[0] > sft[0]",
            DOWN,
            "ppo[1] < sft[1]",
        ),
        "You compare PPO's high end with SFT's: its low end must be above SFT's high end.": (
            UP,
            "ppo[1] > sft[1]",
        ),
        "You compare PPO's low end with SFT's: its high end must be below SFT's low end.": (
            DOWN,
            "ppo[0] < sft[0]",
        ),
        "You compare PPO's high end with SFT's low end: overlapping intervals show no gain.": (
            UP,
            "ppo[1] > sft[0]",
        ),
        "Intervals that touch at their ends meet, so the answer is open: compare with > and <, "
        "not >= and <=.": (
            UP,
            "ppo[0] >= sft[1]",
            DOWN,
            "ppo[1] <= sft[0]",
        ),
        "You never answer worse: a loss counts too.": (DOWN, "False"),
        "You never answer better: a gain counts too.": (UP, "False"),
        "You always answer open: compare the ends of the two intervals.": (
            UP,
            "False",
            DOWN,
            "False",
        ),
        "You call intervals that meet worse: the answer is open.": (
            'return "open"',
            'return "worse"',
        ),
    },
)
