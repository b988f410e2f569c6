"Which facts a reward model does not check, and what PPO made of that."

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from rlhf_nb.evaluate import wilson_interval
from rlhf_nb.tldr import SLOT
from rlhf_nb.ui.facts import claims_of, facts_told
from rlhf_nb.ui.html import percent

KINDS = {  # of pairs, in words
    "sample": "two samples of the SFT model",
    "swap": "summaries with one fact wrong",
    "drop": "summaries with one fact left out",
    "opening": "summaries with an idle opening",
    "repeat": "summaries that say something twice",
}


def listed(words: Sequence[str]) -> str:
    "a, b and c."
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def near_chance(
    shares: Mapping[str, float],  # right answers on the probe, a share for each slot
    pairs: Mapping[str, int],  # how many pairs each is of
) -> list[str]:
    "Slots whose 95 % interval contains one half."
    between = {slot: wilson_interval(share, pairs[slot]) for slot, share in shares.items()}
    return [slot for slot, (low, high) in between.items() if low <= 0.5 <= high]


def blind_sentence(
    measured: Mapping[str, Any],  # `reward` in results.json
) -> str:  # empty where the probe was not run
    "What the reward model cannot see, from the probe: a perfect summary against one wrong fact."
    shares, pairs = measured.get("probe_by_slot") or {}, measured.get("probe_pairs") or {}
    if not shares:
        return ""
    return f"{_of_facts(shares, pairs)}{_of_kinds(measured.get('by_kind') or {})}"


def _of_kinds(shares: Mapping[str, float]) -> str:  # right answers, by kind of pair
    "The kind of held-out pair that it gets wrong most."
    if not shares:
        return ""
    weakest = min(shares, key=lambda kind: shares[kind])
    what = KINDS.get(weakest, f"pairs of kind “{weakest}”")
    return f" Of all held-out pairs it is weakest on {what}: right in {percent(shares[weakest])}."


def _of_facts(shares: Mapping[str, float], pairs: Mapping[str, int]) -> str:
    "The facts on which it guesses, or the one on which it is weakest."
    weakest = min(shares, key=lambda slot: shares[slot])
    start = "Shown a perfect summary and a copy with one fact wrong, the reward model"
    if set(pairs) != set(shares):
        return (
            f"{start} is weakest on “{weakest}”: right in {percent(shares[weakest])}, where "
            "guessing gives 50 %."
        )
    blind = near_chance(shares, pairs)
    if not blind:
        return (
            f"{start} beats guessing on every fact; it is weakest on “{weakest}” "
            f"({percent(shares[weakest])} of {pairs[weakest]:,} pairs)."
        )
    rates, sizes = sorted(shares[slot] for slot in blind), [pairs[slot] for slot in blind]
    span = percent(rates[0]) + (f" to {percent(rates[-1])}" if len(rates) > 1 else "")
    each = f"{max(sizes):,} pairs" if len(set(sizes)) == 1 else f"about {max(sizes):,} pairs each"
    return (
        f"{start} cannot be told from guessing on {listed([f'“{slot}”' for slot in blind])}: right "
        f"in {span} of {each}, and the 95 % interval contains 50 %."
    )


def outcome_sentence(frame: pd.DataFrame) -> str:
    "Which fact PPO's summaries leave out most, and which they get wrong most; empty without facts."
    if "text_ppo" not in frame:
        return ""
    told = frame[frame["text_ppo"].notna()]
    facts = [facts_told(post) for post in told["query"]]
    judged = [(claims_of(text, x), x) for text, x in zip(told["text_ppo"], facts) if x]
    if not judged:
        return ""
    slots = list(judged[0][1])
    left = {slot: sum(slot in claims["missing"] for claims, _ in judged) for slot in slots}
    wrong = {
        slot: sum(slot in {SLOT[word] for word in claims["invented"]} for claims, _ in judged)
        for slot in slots
    }
    parts = []
    for counts, what in ((left, "leave out “{}”"), (wrong, "get “{}” wrong")):
        slot = max(slots, key=lambda name: counts[name])
        if counts[slot]:
            parts.append(f"{what.format(slot)} most often ({counts[slot]:,} of {len(judged):,})")
    return f"PPO's near-greedy summaries {listed(parts)}." if parts else ""
