"The exercise of the lab on credit."

from __future__ import annotations

from torch import Generator

from rlhf_nb.exercises.draw import integers, one, pick
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case

PAGE = "credit"

Steps = list[tuple[str, str]]  # slot and value, in the order in which they are told
VALUES = dict(
    when=["monday", "friday", "easter"],
    why=["drunk", "bored", "greedy"],
    feeling=["sad", "angry", "hurt"],
)


def my_step_rewards(told: Steps, facts: dict[str, str]) -> list[float]:
    rewards, now, before = [], {}, 0
    for slot, value in told:
        now[slot] = value
        points = sum(facts.get(s) == v for s, v in now.items())
        rewards.append(float(points - before))
        before = points
    return rewards


def _step_cases(g: Generator) -> list[Case]:
    facts = {slot: pick(g, values) for slot, values in VALUES.items()}
    slots = [[*facts][i] for i in integers(g, 0, 10**6, 3).argsort()]
    right = [(slot, facts[slot]) for slot in slots]
    wrong = [(s, pick(g, [v for v in VALUES[s] if v != facts[s]])) for s in slots]
    a, b, c = right
    texts = [
        [],
        [a],
        [wrong[0]],
        [a, b, c],
        [wrong[0], a, b],
        [a, wrong[0], b],
        [a, b, wrong[1], wrong[1], c],
        [wrong[0], b, wrong[0], c],
        [a] * one(g, 3, 9),  # a policy that says it again
        [a, wrong[0]] * one(g, 3, 6),  # takes it back and tells it again
        [b, *[wrong[0], a] * one(g, 2, 5)],
        [(right + wrong)[i] for i in integers(g, 0, 5, one(g, 6, 10)).tolist()],
    ]
    fewer = {slot: facts[slot] for slot in slots[:2]}  # nobody knows the third
    return [dict(told=text, facts=known) for known in (facts, fewer) for text in texts]


def _at_the_end(told: Steps, facts: dict[str, str]) -> list[float]:
    return [0.0] * (len(told) - 1) + [sum(my_step_rewards(told, facts))] * bool(told)


def _ahead(told: Steps, facts: dict[str, str]) -> list[float]:
    last = {slot: i for i, (slot, _) in enumerate(told)}
    return [float(last[s] == i and facts.get(s) == v) for i, (s, v) in enumerate(told)]


def _once(told: Steps, facts: dict[str, str]) -> list[float]:
    return [float(facts.get(x[0]) == x[1] and x not in told[:i]) for i, x in enumerate(told)]


def _to_go(told: Steps, facts: dict[str, str]) -> list[float]:
    steps = my_step_rewards(told, facts)
    return [sum(steps[i:]) for i in range(len(steps))]


PAID, RIGHT = "float(points - before)", "sum(facts.get(s) == v for s, v in now.items())"

STEP_REWARDS = Exercise(
    my_step_rewards,
    _step_cases,
    "What was paid so far is always what the text so far is worth: a loop earns nothing.",
    {
        "You pay each right mention, so a policy that says one fact again and again earns a point "
        "each time. Pay what the text is worth now, "
        "less what it was worth before.": f"{PAID} → float(facts.get(slot) == value)",
        "You pay the whole total at each step, so any further step earns it again: "
        "subtract the total before.": f"{PAID} → float(points)",
        "You pay progress and charge nothing for a relapse, so a policy that takes a fact back and "
        "tells it again earns a point a round: "
        "let the difference be negative.": f"{PAID} → max(0.0, points - before)",
        "You never take a point back: where a right fact is told and then replaced by a wrong one, "
        "you have paid more than the old reward.": _once,
        "You pay all at the end: the sum is right, and no step learns what it earned. Pay at each "
        "step.": _at_the_end,
        "You look ahead: a step is paid because of what comes after it, or is not paid because of "
        "it. A step's reward may depend on the text so far alone.": _ahead,
        "You pay one step late, and what the last step earned is lost: the reward of a step is in "
        "its own place.": "[0.0, *rewards][: len(rewards)]",
        "You pay after the end: there is one number for each step, so the list has the length of "
        "told.": "[0.0, *rewards]",
        "These are the rewards to go: the trainer adds up by itself. Give what each step "
        "earned.": _to_go,
        "The sum is not the old reward: a wrong value counts "
        "0, and not -1.": f"{RIGHT} → sum(1 if facts.get(s) == v else -1 for s, v in now.items())",
        "The sum is not the old reward: that is the number of facts, "
        "and you pay a share of them.": f"{PAID} → (points - before) / len(facts)",
        "told may name a slot that facts does not have: it earns nothing. "
        "Look it up with facts.get.": "facts.get(s) → facts[s]",
        "You compare None with None: a slot that nobody told and that facts does not have earns "
        "nothing.": f"{RIGHT} → sum(facts.get(s) == now.get(s) for s in VALUES)",
        "You compare None with None: a slot that facts does not have earns nothing the first "
        "time, and not -1.": (
            "now[slot] = value → old, now[slot] = now.get(slot), value; "
            f"{PAID} → float(facts.get(slot) == value) - float(facts.get(slot) == old)"
        ),
        "The sign is wrong: what the text is worth now, "
        "less what it was worth before.": f"{PAID} → float(before - points)",
    },
)
