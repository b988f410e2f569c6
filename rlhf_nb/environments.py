"""Small worlds whose best possible play is known: a number to guess, and a map to walk."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Step = tuple[str, float, bool, bool, dict[str, Any]]


class GuessNumber:
    "The world thinks of a number, and says of each guess whether it is low, high or right."

    def __init__(self, n: int, turns: int, base: int, answers: tuple[str, str, str]):
        self.n, self.turns, self.base, self.answers = n, turns, base, answers

    def reset(self, secret: int | None = None, seed: int = 0) -> None:
        "The number is a row's column `secret`, or drawn from the seed."
        self.secret = random.Random(seed).randint(1, self.n) if secret is None else int(secret)
        self.guesses = 0

    def step(self, action: str) -> Step:
        "Pays 1 for the number, and ends; what is no number is answered, and costs a turn."
        self.guesses += 1
        try:
            guess = int(action.strip(), self.base)
        except ValueError:
            guess = None
        won = guess == self.secret
        low, high, right = self.answers
        said = right if won else "?" if guess is None else low if guess < self.secret else high
        ended = won or self.guesses == self.turns
        return said, float(won), ended, False, dict(guesses=self.guesses, won=won)


def guess_number(
    n: int = 15,
    turns: int = 4,
    base: int = 10,  # in which guesses are written
    answers: tuple[str, str, str] = ("low", "high", "right"),
) -> Callable[[], GuessNumber]:
    """A number from 1 to n in so many turns. Bisection is best: it wins min(1, (2 ** turns - 1) /
    n) of all games."""
    return lambda: GuessNumber(n, turns, base, answers)


def bisect(
    n: int,
    secret: int,
    turns: int,
) -> list[int]:  # the guesses of best play, the last one right if there were enough turns
    "What an expert guesses."
    low, high, guesses = 1, n, list[int]()
    while len(guesses) < turns and (not guesses or guesses[-1] != secret):
        guesses.append((low + high) // 2)
        low, high = (guesses[-1] + 1, high) if guesses[-1] < secret else (low, guesses[-1] - 1)
    return guesses


class Walk:
    "A square map. The policy goes north, south, east or west, and is told where the goal is."

    def __init__(self, size: int, turns: int):
        self.size, self.turns = size, turns

    def reset(self, seed: int = 0) -> str:
        "Start and goal are drawn from the seed, and differ."
        draw = random.Random(seed)
        places = [(x, y) for x in range(self.size) for y in range(self.size)]
        self.place, self.goal = draw.sample(places, 2)
        self.steps = 0
        return self.look()

    def look(self) -> str:
        "Where the goal is: steps to the east and to the north."
        east, north = (a - b for a, b in zip(self.goal, self.place))
        return f"{east:+d}{north:+d}"

    def step(self, action: str) -> Step:
        "Pays 1 at the goal. A wall, and what is no direction, cost a turn."
        self.steps += 1
        ways = dict(n=(0, 1), s=(0, -1), e=(1, 0), w=(-1, 0))
        way = ways.get(action.strip().lower()[:1], (0, 0))
        east, north = (min(max(a + b, 0), self.size - 1) for a, b in zip(self.place, way))
        self.place = east, north
        won = self.place == self.goal
        ended = won or self.steps == self.turns
        return self.look(), float(won), ended, False, dict(steps=self.steps, won=won)


def walk(
    size: int = 3,
    turns: int = 4,
) -> Callable[[], Walk]:
    """A map of size x size. With turns of at least 2 (size - 1), best play always wins: each turn
    brings the goal one step nearer."""
    return lambda: Walk(size, turns)
