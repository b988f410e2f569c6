"The exercise of the page on posts and summaries."

from __future__ import annotations

import re

import torch
from torch import Generator

from rlhf_nb.exercises.draw import one, pick
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "03_tldr"

# Some of the page's facts, each with its slot: the page has more of them.
FACTS = dict(
    who=["boss", "sister", "uncle"],
    did=["sold", "lost", "painted"],
    what=["car", "bike", "phone"],
    when=["monday", "easter", "friday"],
    why=["careless", "bored", "jealous"],
    feeling=["sad", "angry", "hurt"],
    question=["leave", "call", "pay"],
)
SLOT = {value: slot for slot, values in FACTS.items() for value in values}


def my_points(summary: str, facts: dict[str, str]) -> int:
    stated = {word for word in re.findall(r"\w+", summary) if word in SLOT}
    right = {word for word in stated if facts[SLOT[word]] == word}
    return len(right) - 2 * len(stated - right)


def _points_cases(g: Generator) -> list[Case]:
    truth = dict(
        who="boss",
        did="sold",
        what="car",
        when="monday",
        why="careless",
        feeling="sad",
        question="leave",
    )

    def drawn() -> Case:
        facts = {slot: pick(g, values) for slot, values in FACTS.items()}
        told = [pick(g, values) for values in FACTS.values() if one(g, 0, 3)]
        told += [pick(g, list(facts.values())) for _ in range(2)]
        order = torch.randperm(len(told), generator=g).tolist()
        return dict(summary="my " + ", ".join(told[i] for i in order) + ".", facts=facts)

    fixed = [
        "my boss sold my car on monday.",
        "my boss sold my bike because they were careless.",
        "my boss. my boss.",
        "my uncle sold my car, i feel angry.",
        "my boss sold my car. should i leave?",
        "",
        "bike, bike, bike",
        "my boss sold my car, no, my bike.",
    ]
    return [dict(summary=text, facts=dict(truth)) for text in fixed] + [drawn(), drawn(), drawn()]


POINTS = Exercise(
    "my_points",
    my_points,
    _points_cases,
    "Whole words, each counted once, and an invention costs two.",
    {
        "You counted `car` in `careless`: compare whole words, not parts of the string.": (
            'word for word in re.findall(r"\\w+", summary) if word in SLOT',
            "word for word in SLOT if word in summary",
        ),
        "`monday.` is not `monday`: splitting at spaces leaves the full stop on the word.": (
            're.findall(r"\\w+", summary)',
            "summary.split()",
        ),
        "A repeated fact counts twice, so a policy would repeat it for ever: use a set.": (
            'stated = {word for word in re.findall(r"\\w+", summary) if word in SLOT}',
            'stated = [word for word in re.findall(r"\\w+", summary) if word in SLOT]',
            "right = {word for word in stated if facts[SLOT[word]] == word}",
            "right = [word for word in stated if facts[SLOT[word]] == word]",
            "len(stated - right)",
            "(len(stated) - len(right))",
        ),
        "Inventions are free, so naming every word of the world would win: subtract two points "
        "for each.": (
            " - 2 * len(stated - right)",
            "",
        ),
        "An invention costs one point, as much as a fact brings: it costs two.": ("2 * len", "len"),
        "Inventions add points: their sign is wrong.": ("- 2 *", "+ 2 *"),
        "Every word that names a fact brings a point, true or not: compare it with facts.": (
            "len(right) - 2 * len(stated - right)",
            "len(stated)",
        ),
        "`my` and `on` cost points too: only words in SLOT claim a fact, the others are free.": (
            " if word in SLOT",
            "",
            "if facts[SLOT[word]] == word",
            "if word in facts.values()",
        ),
        "Not every word is in SLOT, and the keys of facts are slots: look up only words of SLOT, "
        "and compare each with facts[SLOT[word]].": (" if word in SLOT", ""),
        "Words are compared with the names of the slots, the keys of facts: the true word of a "
        "slot is facts[slot].": ("facts[SLOT[word]] == word", "word in facts"),
        "Inventions are free, and `car` counts in `careless`: compare whole words, and subtract "
        "two points for each invention.": (
            'word for word in re.findall(r"\\w+", summary) if word in SLOT',
            "word for word in SLOT if word in summary",
            " - 2 * len(stated - right)",
            "",
        ),
        "Only the first word of a slot counts, and later inventions are free: look at every "
        "word.": (
            '{word for word in re.findall(r"\\w+", summary) if word in SLOT}',
            "set({SLOT[word]: word for word in reversed(re.findall(r'\\w+', summary)) if word in "
            "SLOT}.values())",
        ),
        "Only the last word of a slot counts, and earlier inventions are free: look at every "
        "word.": (
            '{word for word in re.findall(r"\\w+", summary) if word in SLOT}',
            "set({SLOT[word]: word for word in re.findall(r'\\w+', summary) if word in "
            "SLOT}.values())",
        ),
        "True words count as inventions: the condition is the other way round.": (
            "== word",
            "!= word",
        ),
        "Facts that are not mentioned cost points: only inventions do.": (
            "2 * len(stated - right)",
            "2 * len(stated - right) - (len(facts) - len(right))",
        ),
    },
)
