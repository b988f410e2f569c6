"The form of answers, counted without a judge: length, ends, variety, repetition."

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhf_nb.training.completions import Completions


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    "All sequences of n words; a punctuation mark is a word."
    words = re.findall(r"\w+|[^\w\s]", text)
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def distinct_n(
    texts: Sequence[str],
    n: int,
) -> float:  # between 0 and 1; 0 if there is no n-gram
    "Different n-grams over all n-grams of all texts. Li et al. 2016."
    grams = [gram for text in texts for gram in _ngrams(text, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(
    text: str,
    n: int = 3,
) -> float:  # between 0 and 1; 0 if it has fewer than n words
    "Share of the n-grams of one answer that occurred earlier in it."
    grams = _ngrams(text, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def text_statistics(completions: Completions) -> dict[str, float]:
    """The form of a policy's answers: length in tokens, the rest as shares. Raises ValueError if
    there are none."""
    texts, count = completions.texts, len(completions.texts)
    if not count:
        raise ValueError("there are 0 completions: give at least one.")
    return dict(
        answers=count,
        length=sum(completions.lengths) / count,
        stopped=sum(completions.stopped) / count,
        empty=sum(not text.strip() for text in texts) / count,
        same=1 - len(set(texts)) / count,
        distinct_1=distinct_n(texts, 1),
        distinct_2=distinct_n(texts, 2),
        repetition=sum(map(repetition, texts)) / count,
    )
