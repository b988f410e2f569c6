"""What is known of a rollout's episodes, and in which order one reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from rlhf_nb.base.encoding import Turns
from rlhf_nb.losses import policy_diagnostics
from rlhf_nb.packing import score_sums
from rlhf_nb.rollout import SIGNALS, TENSORS, Rollout
from rlhf_nb.training.prompts import turns_text
from rlhf_nb.ui.viz import signed_number

SIGNAL_NAMES = {  # as every view writes them
    "kl": "KL to the reference",
    "advantages": "advantage",
    "rewards": "reward paid",
    "values": "value",
    "returns": "return",
    "logprobs": "log-prob",
    "ref_logprobs": "log-prob of the reference",
    "engine_logprobs": "log-prob of the sampler",
    "sampler - trainer": "sampler minus trainer",
    "ratio - 1": "ratio new/old − 1",
}


def tensor_of(rollout: Rollout, name: str) -> Tensor:
    "One tensor of a rollout. Raises ValueError where it is not there yet."
    values = getattr(rollout, name)
    if values is None:
        raise ValueError(f"this rollout has no {name} yet: give one that a later phase has filled.")
    return values


def filled(rollout: Rollout, names: Iterable[str]) -> dict[str, Tensor]:
    "Those of some tensors that a rollout has, by name."
    return {name: x for name in names if (x := getattr(rollout, name)) is not None}


def episode_tokens(rollout: Rollout, episode: int) -> list[str]:
    "The text of each token; its id where the texts were not kept."
    n = int(rollout.mask[episode].sum())
    if rollout.tokens:
        return rollout.tokens[episode][:n]
    return [str(i) for i in rollout.response_ids[episode, :n].tolist()]


def bracketed(rollout: Rollout, episode: int, words: list[str]) -> list[str]:
    "The words of a response, with what the world answered in brackets."
    if rollout.chosen is None:
        return words
    own = [True, *rollout.chosen[episode, : len(words)].tolist(), True]
    sides = zip(own, own[1:], own[2:], words)
    return ["[" * (a and not b) + x + "]" * (c and not b) for a, b, c, x in sides]


def end_of(text: str, most: int = 160) -> str:
    "The end of a long text, from the beginning of a word."
    return text if len(text) <= most else f"… {text[-most:].split(maxsplit=1)[-1]}"


def episode_signals(rollout: Rollout, episode: int) -> dict[str, Tensor]:
    "Every signal that is filled, by name, for the tokens of one episode."
    n = int(rollout.mask[episode].sum())
    return {name: x[episode, :n].detach().float() for name, x in filled(rollout, SIGNALS).items()}


def episode_facts(rollout: Rollout, episode: int) -> str:
    "What is known of an episode as a whole, on one line."
    own, update = rollout.policy_mask[episode], rollout.info.get("update")
    place = "" if update is None else f", update {update}"
    facts = [f"Episode {episode} of {len(rollout)}{place}"]
    for name, values in (("score", rollout.scores), ("raw score", rollout.raw_scores)):
        if values is not None and math.isfinite(x := float(score_sums(values)[episode])):
            facts.append(f"{name} {signed_number(x)}")
    if rollout.kl is not None and math.isfinite(x := float(rollout.kl[episode][own].float().sum())):
        facts.append(f"KL {signed_number(x)} nats")
    drawn = int(own.sum())
    facts.append(f"{drawn} {unit_of(rollout)[: None if drawn != 1 else -1]}")
    if rollout.turn is not None:
        turns = int(rollout.turn_counts[episode])
        facts.append(f"{turns} turn{'s' * (turns != 1)}, {rollout.stop_reason[episode]}")
    elif rollout.stopped is not None:
        facts.append("stopped by itself" if rollout.stopped[episode] else "cut off")
    return " · ".join(facts)


def turns_told(rollout: Rollout, episode: int) -> list[dict[str, Any]]:
    "Of each turn what was written and answered, where both begin, its numbers; of one turn: []."
    if rollout.turn is None:
        return []
    r = rollout.select([episode])
    chosen: Any = r.chosen
    tokens, told = episode_tokens(r, 0), list[dict[str, Any]]()
    for k in range(int(r.turn_counts[0])):
        here = r.mask[0] & (r.turn[0] == k)
        drawn, read = ((here & x).nonzero()[:, 0].tolist() for x in (chosen[0], ~chosen[0]))
        numbers = dict(reward=float(r.turn_rewards[0, k]))
        for name, x in filled(r, ("values", "advantages")).items():
            numbers[dict(values="V before it").get(name, "advantage")] = float(x[0, drawn[0]])
        words = [f"Turn {k + 1}", *(f"{name} {signed_number(x)}" for name, x in numbers.items())]
        words.append("stopped by itself" if r.turn_stopped[0, k] else "cut off")
        said, answer = ("".join(tokens[t] for t in places) for places in (drawn, read))
        one = dict(at=drawn[0], end=drawn[-1] + 1, read=read[0] if read else None)
        told.append(one | dict(said=said, answer=answer, facts=" · ".join(words)))
    return told


def unit_of(rollout: Rollout) -> str:
    "What a response is counted in: tokens, or words where a file of another trainer has no tokens."
    return "words" if rollout.info.get("unit") == "words" else "tokens"


def notes_of(rollout: Rollout) -> list[str]:
    "How a file of another trainer was read, and what it lacks."
    notes = rollout.info.get("notes")
    return [str(note) for note in notes] if isinstance(notes, list) else []


def conversation_of(rollout: Rollout, episode: int) -> Turns | None:
    "The prompt of an episode as it was given, where it is a conversation."
    talk = rollout.conversations[episode] if rollout.conversations else None
    return None if isinstance(talk, str) else talk


def prompt_of(rollout: Rollout, episode: int) -> str:
    "The prompt to read: a text as it is, a conversation turn by turn."
    if talk := conversation_of(rollout, episode):
        return turns_text(talk)
    return rollout.prompts[episode] if rollout.prompts else "(the text of the prompt was not kept)"


def prompt_lines(rollout: Rollout, episode: int) -> list[str]:
    "The prompt, and the columns that came with it."
    columns = [f"{name}: {column[episode]}" for name, column in rollout.columns.items()]
    return [prompt_of(rollout, episode), *columns]


def clip_signals(rollout: Rollout, episode: int, now: Tensor) -> dict[str, Tensor]:
    """What another policy makes of an episode's tokens: ratio less 1, and +1 or -1 where PPO would
    clip it above or below: at the rollout's own cliprange, or 0.2."""
    old, made = tensor_of(rollout, "logprobs"), rollout.objective or {}
    clip = dict(cliprange=made.get("cliprange", 0.2), cliprange_high=made.get("cliprange_high"))
    given = now, old, old if rollout.advantages is None else rollout.advantages, rollout.mask
    n = int(rollout.mask[episode].sum())
    alone = [x[episode, :n, None, None] for x in given]  # each token as a batch of its own
    diagnostics = torch.vmap(partial(policy_diagnostics, **clip))(*alone) if n else {}
    ratio = diagnostics.get("ratio", torch.zeros(0)) - 1
    signals = {"ratio - 1": ratio}
    if rollout.advantages is not None:
        signals["clipped"] = diagnostics.get("clipfrac", ratio) * ratio.sign()
    return signals


# Signals of a scale of one direction, and whether a low or a high number is deep; as in reader.js.
ONE_WAY = dict(logprobs=-1, ref_logprobs=-1, engine_logprobs=-1, values=1, returns=1, entropy=1)


def paler(numbers: Tensor, share: float = 0.99, most: int = 2**14, signed: bool = False) -> float:
    "The magnitude below which this share of some numbers is, zeros aside; `signed`: the number."
    x = numbers[:: -(-len(numbers) // most) or 1]
    x = x if signed else x[x != 0].abs()
    x = x[x.isfinite()].sort().values
    return float(x[min(len(x) - 1, int(share * len(x)))]) if len(x) else 0.0


@dataclass(frozen=True)
class Shown:
    "A rollout, and what else is known of its tokens."

    rollout: Rollout
    now: Tensor | None = None  # [B, T] log-probs of another policy
    entropy: Tensor | None = None  # [B, T] nats

    def signals(self, episode: int) -> dict[str, Tensor]:
        "All signals of one episode."
        signals = episode_signals(self.rollout, episode)
        if self.now is not None:
            signals |= clip_signals(self.rollout, episode, self.now)
        if self.entropy is not None:
            n = int(self.rollout.mask[episode].sum())
            signals["entropy"] = self.entropy[episode, :n].float()
        return signals

    def scale(self, name: str) -> tuple[float | None, float | None]:
        """Where this update has no colour and where full colour, as in reader.js: (None, magnitude)
        of a scale around zero; None for full where all are 0."""
        r, of = self.rollout, {"entropy": self.entropy, "clipped": self.rollout.mask}
        if self.now is not None:
            of["ratio - 1"] = (self.now - tensor_of(r, "logprobs")).expm1()
        x = of.get(name)
        x = (tensor_of(r, name) if x is None else x)[r.mask.bool()].float()
        if way := ONE_WAY.get(name):
            ends = paler(x, 0.01, signed=True), paler(x, signed=True)
            return ends if way > 0 else ends[::-1]
        return None, paler(x) or None

    def names(self) -> list[str]:
        "Which signals there are, those that are looked at most in front."
        stored = filled(self.rollout, ("kl", "advantages", "rewards", *SIGNALS))
        return list(stored | (self.signals(0) if len(self.rollout) else {}))


def shown_of(
    rollout: Rollout, now: Tensor | Rollout | None = None, entropy: Tensor | None = None
) -> Shown:
    "All of it on the CPU. Raises ValueError where a shape does not fit."
    tensors = {name: x.detach().cpu() for name, x in filled(rollout, TENSORS).items()}
    if isinstance(now, Rollout):
        if not torch.equal(now.response_ids.cpu(), tensors["response_ids"]):
            raise ValueError("now is a rollout of other responses: give one of the same tokens.")
        now = now.logprobs
    if now is not None and rollout.logprobs is None:
        raise ValueError("this rollout has no logprobs to compare with: leave now out.")
    for name, given in dict(now=now, entropy=entropy).items():
        if given is not None and given.shape != rollout.mask.shape:
            wanted = f"{list(rollout.mask.shape)}, a number a response token"
            raise ValueError(f"{name} has shape {list(given.shape)}: give {wanted}.")
    here = lambda x: None if x is None else x.detach().cpu().float()
    return Shown(rollout.with_(**tensors), here(now), here(entropy))


def columns_of(rollout: Rollout) -> pd.DataFrame:
    """What is known of each episode beside its texts, one row for each. Half of a surrogate pair,
    which no table can hold, becomes a question mark."""
    storable = lambda x: x.encode("utf-8", "replace").decode() if isinstance(x, str) else x
    columns = {storable(name): list(map(storable, x)) for name, x in rollout.columns.items()}
    return rollout.with_(prompts=[], responses=[], columns=columns).episodes()


def when(rollout: Rollout) -> str:
    "Where in the run a rollout was taken."
    parts = [f"Update {rollout.info.get('update', '?')}"]
    for name, wording in (("episode", "after {:,} episodes"), ("kl_coef", "kl_coef {:.3g}")):
        if (number := number_of(rollout, name)) is not None:
            parts.append(wording.format(number))
    return ", ".join(parts)


def number_of(rollout: Rollout, name: str) -> float | None:
    "A number of the rollout's info, also where it was kept as text; None: there is none."
    try:
        number = float(rollout.info.get(name, math.nan))
    except (TypeError, ValueError):
        return None
    whole = int(number) if number.is_integer() else number
    return whole if math.isfinite(number) else None
