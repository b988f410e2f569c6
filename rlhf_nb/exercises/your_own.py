"The exercise of the lab on your own data."

from __future__ import annotations

from torch import Generator

from rlhf_nb.exercises.draw import one, pick, whole
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "24_your_own"

NOUNS = "device tensor axis label path graph colour memory shape token buffer handle".split()
OTHERS = "return the of for a given set current new each from with".split()


def my_topic(name: list[str], answer: list[str], longest: int) -> float:
    others = set(answer) - set(name)
    if len(answer) > longest or len(others) < 2:
        return 0.0
    share = len(set(name) & set(answer)) / len(set(name))
    return share * len(set(answer)) / len(answer)


def _topic_cases(g: Generator) -> list[Case]:
    order = whole(g, 0, 10**6, len(NOUNS)).argsort().tolist()
    nouns = [NOUNS[i] for i in order]
    begin = one(g, 0, len(OTHERS) - 5)
    others = OTHERS[begin : begin + 5]
    name, known = nouns[: pick(g, [3, 4])], nouns[: pick(g, [1, 2])]
    whole_name = [*others[:2], *name]
    longest = one(g, 9, 12)
    return [
        dict(name=name, answer=[*others[:3], *known], longest=longest),
        dict(name=name, answer=whole_name, longest=longest),
        dict(name=name, answer=[*others[:1], *name], longest=longest),
        dict(name=name, answer=[*others[:1], *known, *others[:1]], longest=longest),
        dict(name=name, answer=name, longest=longest),
        dict(name=name, answer=[], longest=longest),
        dict(name=name, answer=[*others[:2], *known * 3], longest=longest),
        dict(name=name, answer=[*others[:2], *known * 12], longest=longest),
        dict(name=name, answer=[*others[:2], *nouns[4:6], *known], longest=longest),
        dict(name=name, answer=[*others, *known], longest=len(known) + 5),
        dict(name=name, answer=[*others, *known], longest=len(known) + 4),
        dict(name=name, answer=[*nouns, *others], longest=longest),
        dict(name=[*known, *known], answer=whole_name, longest=longest + 1),
    ]


HITS, SIZE = "len(set(name) & set(answer))", "len(set(name))"
LONG, FEW = "len(answer) > longest", "len(others) < 2"
NEW = "len(set(answer)) / len(answer)"

TOPIC = Exercise(
    "my_topic",
    my_topic,
    _topic_cases,
    "Saying nothing, saying everything and saying it again earn less than a good answer.",
    {
        "An endless list of words gets full marks: an answer of more than longest words earns 0.": (
            f"{LONG} or ",
            "",
        ),
        "An answer of exactly longest words is still allowed: use >, not >=.": (
            LONG,
            "len(answer) >= longest",
        ),
        "You count different words against longest: a word that is repeated makes the answer "
        "longer too.": (LONG, "len(set(answer)) > longest"),
        "The name alone gets full marks: an answer needs two different words that are not in the "
        "name.": (f" or {FEW}", " or not answer"),
        "One other word is too few: an answer needs two different ones that are not in the name.": (
            FEW,
            "len(others) < 1",
        ),
        "Two different words that are not in the name are enough: you ask for three.": (
            FEW,
            "len(others) < 3",
        ),
        "You count a word that is not in the name each time it is repeated: two different ones "
        "are needed.": (
            "set(answer) - set(name)",
            "[word for word in answer if word not in name]",
        ),
        "Repeating costs nothing: multiply by the share of different words in the answer.": (
            f" * {NEW}",
            "",
        ),
        "You divide by the words of the answer alone, so the shortest answer wins: divide by the "
        "different words of the name.": (f"/ {SIZE}", "/ len(set(answer))"),
        "A word of the name pays each time it is repeated: count it once.": (
            HITS,
            "sum(word in name for word in answer)",
        ),
        "A name that repeats a word is longer than its different words: divide by the number of "
        "different ones.": (f"/ {SIZE}", "/ len(name)"),
        "You return a count, so long names pay more: divide by the different words of the name.": (
            f" / {SIZE}",
            "",
        ),
        "You weigh the answer by both lengths (F1), so a short and vague answer beats a full one: "
        "divide by the different words of the name alone.": (
            f"{HITS} / {SIZE}",
            "2 * len(set(name) & set(answer)) / (len(set(name)) + len(set(answer)))",
        ),
        "You return the words of the name that are missing: return the share that is there.": (
            HITS,
            "len(set(name) - set(answer))",
        ),
        "Any word of the name gets full marks: return the share of its different words.": (
            f"{HITS} / {SIZE}",
            "float(bool(set(name) & set(answer)))",
        ),
    },
)
