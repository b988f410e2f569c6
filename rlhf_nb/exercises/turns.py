"Exercises of the page on turns."

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import dirty, normal, one, pick
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "15_turns"

Turns = list[tuple[int, int]]  # tokens of the policy, tokens of the answer

# ---- Who counts ----


def my_masks(episodes: list[Turns], width: int, by_turn: bool) -> tuple[Tensor, Tensor, Tensor]:
    mask, chosen, valued = torch.zeros(3, len(episodes), width, dtype=torch.bool)
    for b, turns in enumerate(episodes):
        at = 0
        for written, answered in turns:
            mask[b, at : at + written + answered] = True
            chosen[b, at : at + written] = True
            valued[b, at : at + (1 if by_turn else written)] = True
            at += written + answered
    return mask, chosen, valued


def _turns(g: Generator, count: int) -> Turns:
    "The last one has no answer: it ended the episode."
    return [(one(g, 1, 4), one(g, 1, 3) * (k + 1 < count)) for k in range(count)]


def _masks_cases(g: Generator) -> list[Case]:
    def case(by_turn: bool, padding: int, *episodes: Turns) -> Case:
        width = max(sum(map(sum, turns)) for turns in episodes) + padding
        return dict(episodes=list(episodes), width=width, by_turn=by_turn)

    return [
        case(False, 0, [(2, 1), (2, 1), (2, 0)], [(2, 0)]),
        case(True, 1, [(2, 1), (3, 2), (2, 2)], [], [(1, 1), (2, 0)]),
        case(False, one(g, 0, 2), _turns(g, 3), [], _turns(g, one(g, 1, 4))),
        case(True, one(g, 0, 2), _turns(g, one(g, 2, 4)), _turns(g, 2), [(3, 2)]),
    ]


REAL, CHOSEN = "at : at + written + answered] = True", "chosen[b, at : at + written]"
VALUED, FIRST = "(1 if by_turn else written)", "valued[b, at : at + (1 if by_turn else written)]"

MASKS = Exercise(
    my_masks,
    _masks_cases,
    "Models read the whole conversation, the policy learns its own words, and the value model has "
    "a target where a state is valued.",
    {
        "The policy would learn what the world says: chosen is true "
        "on what the policy drew alone.": f"{CHOSEN} → chosen[b, at : at + written + answered]",
        "The models would not read the answers: "
        "mask is true on every real token.": f"mask[b, {REAL} → mask[b, at : at + written] = True",
        "chosen is one token late: the last token of each turn is missing, and the "
        "first of the answer is in its place.": f"{CHOSEN} → chosen[b, at + 1 : at + written + 1]",
        "chosen is one token short: the last token of a turn, "
        "its stop token, was drawn too.": f"{CHOSEN} → chosen[b, at : at + written - 1]",
        "It is the other way round: chosen is what the policy drew, not "
        "what it was answered.": f"{CHOSEN} → chosen[b, at + written : at + written + answered]",
        "by_turn makes no difference to valued: with turns as "
        "actions only the first token of each turn has a target.": f"{VALUED} → written",
        "valued always has one token a turn: with tokens as actions it is chosen.": f"{VALUED} → 1",
        "valued is on the last token of a turn: the value is read before the turn's "
        "first.": f"{FIRST} → valued[b, at + (written - 1 if by_turn else 0) : at + written]",
        "valued is on the answer: the value in front of a turn stands at its first token.": (
            f"{FIRST} → "
            "valued[b, at + (written if by_turn else 0) : at + written + (1 if by_turn else 0)]"
        ),
        "valued has one token an episode: every turn begins with a state "
        "that is valued.": f"{FIRST} → valued[b, at : at + (at == 0 if by_turn else written)]",
        "Only the last turn is chosen: the earlier ones are the policy's too.": (
            "        for written →         chosen_from = sum(map(sum, "
            f"turns[:-1]))\n        for written; {CHOSEN} = True → {CHOSEN} = at >= chosen_from"
        ),
        "The answers are not counted, "
        "so that a later turn begins too early.": "at += written + answered → at += written",
        "mask is true on padding: "
        "a row ends with its last token.": f"mask[b, {REAL} → mask[b] = True",
        "The order is mask, chosen, valued.": "return mask, chosen → return chosen, mask",
    },
    results=("mask", "chosen", "valued"),
)

# ---- Credit over turns ----


def my_turn_gae(
    rewards: Tensor, values: Tensor, chosen: Tensor, turn: Tensor, gamma: float, lam: float
) -> Tensor:
    advantages = torch.zeros_like(values)
    for b in range(len(rewards)):
        later = after = torch.zeros(())
        for k in reversed(turn[b][chosen[b]].unique()):
            own = chosen[b] & (turn[b] == k)
            reward, value = rewards[b][own].sum(), values[b][own][0]
            later = reward + gamma * after - value + gamma * lam * later
            after = value
            advantages[b][own] = later
    return advantages


def _turn_gae_cases(g: Generator) -> list[Case]:
    def case(episodes: list[Turns], padding: int, dirt: float, gamma: float, lam: float) -> Case:
        width = max(sum(map(sum, turns)) for turns in episodes) + padding
        chosen = my_masks(episodes, width, False)[1]
        turn = torch.zeros(chosen.shape, dtype=torch.long)
        for b, turns in enumerate(episodes):
            numbers = [k for k, sizes in enumerate(turns) for _ in range(sum(sizes))]
            turn[b, : len(numbers)] = torch.tensor(numbers, dtype=torch.long)
        rewards, values = normal(g, 2, *chosen.shape)
        rewards[0], values[0] = rewards[0] + 20, values[0] - 30
        rewards[-1], values[-1] = rewards[-1] - 20, values[-1] + 30
        rewards, values = dirty(rewards, chosen, dirt), dirty(values, chosen, 1 - dirt)
        return dict(rewards=rewards, values=values, chosen=chosen, turn=turn, gamma=gamma, lam=lam)

    return [
        case([[(2, 0)], [(2, 1), (1, 2), (2, 0)]], 0, 7.0, 0.9, 0.5),
        case([_turns(g, 3), [], _turns(g, 2)], 1, math.nan, pick(g, [0.5, 0.7]), 0.95),
        case([_turns(g, 4), [(3, 1), (2, 2)]], 2, 2.0, 0.8, pick(g, [0.3, 0.6, 0.9])),
    ]


SUM, VALUE = "rewards[b][own].sum()", "values[b][own][0]"

TURN_GAE = Exercise(
    my_turn_gae,
    _turn_gae_cases,
    "A turn is one action: one reward, one value, and one advantage for all of its tokens.",
    {
        "The answers take part: a turn's number is on the answer to it as well, "
        "so look at chosen tokens alone.": "chosen[b] & (turn[b] == k) → turn[b] == k",
        "Only the reward of a turn's last token is counted: "
        "a turn earns the sum of its tokens'.": f"{SUM} → rewards[b][own][-1]",
        "You average the rewards of a turn: add them up.": f"{SUM} → rewards[b][own].mean()",
        "You read V at the last token of a turn: the state is what stands before the turn, "
        "at its first token.": f"{VALUE} → values[b][own][-1]",
        "You average V over a turn: "
        "it is read once, at the first token.": f"{VALUE} → values[b][own].mean()",
        "lam makes no difference: the step back is gamma * lam.": "gamma * lam → gamma",
        "gamma makes no difference: it belongs "
        "in the surprise and in the step back.": "gamma * after → after; gamma * lam → lam",
        "gamma is missing from the step back.": "gamma * lam * later → lam * later",
        "gamma is missing from the surprise: "
        "it discounts the value of the next turn.": "gamma * after → after",
        "Nothing is passed back: "
        "every turn has its own surprise alone.": " + gamma * lam * later →",
        "The value in front of the turn is not subtracted.": " - value + →  +",
        "The value of the next turn is missing from the surprise.": " + gamma * after →",
        "You start at the first turn: credit goes back, so "
        "start at the last.": "reversed(turn[b][chosen[b]].unique()) → turn[b][chosen[b]].unique()",
        "Only the last token of each turn has an advantage: all tokens of "
        "a turn share it.": "advantages[b][own] = later → advantages[b, own.nonzero()[-1]] = later",
        "Only the last turn has an advantage: a win is passed back to the turns before it.": (
            "advantages[b][own] = later → "
            "advantages[b][own] = later if k == turn[b][chosen[b]].max() else 0.0"
        ),
        "The advantage stands on the answers too: it is 0 wherever "
        "nothing was chosen.": "advantages[b][own] = later → advantages[b][turn[b] == k] = later",
        "These are the returns, A + V: "
        "leave the value out.": "advantages[b][own] = later → advantages[b][own] = later + value",
        "An episode inherits from the one before it: begin each row with nothing.": (
            "    for b in range(len(rewards)):\n        later = after = torch.zeros(())\n → "
            "    later = after = torch.zeros(())\n    for b in range(len(rewards)):\n"
        ),
        "That is GAE of tokens: here a turn is one step, however long it is.": (
            "for k in reversed(turn[b][chosen[b]].unique()) → for k in "
            "reversed(chosen[b].nonzero()[:, 0]); "
            "chosen[b] & (turn[b] == k) → torch.arange(len(chosen[b])) == k"
        ),
    },
)
