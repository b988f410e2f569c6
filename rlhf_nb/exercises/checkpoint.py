"The exercise of the page on checkpoints: a small run that is cut off and goes on."

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from rlhf_nb.exercises.draw import one
from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Case


class Run:
    "Four things change in a step: weights, optimizer moments, random state, place in the data."

    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model, self.place = torch.nn.Linear(3, 1), 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def steps(self, n: int) -> Tensor:
        for _ in range(n):
            x = self.data[self.place % 8] + 0.1 * torch.randn(3)
            (self.model(x) - x.sum()).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.place += 1
        return self.model.weight.detach().clone()


def resume(state: dict[str, Any]) -> Run:
    "As a new process would, with another seed, load what there is."
    run = Run(seed=99)
    state = copy.deepcopy(state)
    if "model" in state:
        run.model.load_state_dict(state["model"])
    if "optimizer" in state:
        run.optimizer.load_state_dict(state["optimizer"])
    if "rng" in state:
        torch.set_rng_state(state["rng"])
    run.place = state.get("place", 0)
    return run


def cut_off(my_state: Callable, seed: int, before: int, after: int) -> Tensor:
    "The weights of a run that took its state after some steps, went on, and was resumed from it."
    run = Run(seed)
    run.steps(before)
    state = my_state(run)
    if not isinstance(state, dict):
        raise TypeError(f"return a dictionary: a {type(state).__name__} came.")
    run.steps(after)
    return resume(state).steps(after)


def my_state(run: Run) -> dict[str, Any]:
    state = dict(
        model=run.model.state_dict(),
        optimizer=run.optimizer.state_dict(),
        rng=torch.get_rng_state(),
        place=run.place,
    )
    return copy.deepcopy(state)


def _state_cases(g: Generator) -> list[Case]:
    return [
        dict(seed=0, before=3, after=2),
        dict(seed=one(g, 1, 1000), before=one(g, 1, 2), after=3),
    ]


def live(part: str) -> tuple[str, str]:
    "The edit that gives one part away without a copy."
    return "copy.deepcopy(state)", f"{{**copy.deepcopy(state), '{part}': state['{part}']}}"


STATE = Exercise(
    "my_state",
    my_state,
    _state_cases,
    "It continues as if it had never stopped.",
    {
        "The resumed run starts without the weights: the key is model.": ("model=", "weights="),
        "The resumed run starts without the optimizer's moments: the key is optimizer.": (
            "optimizer=",
            "adam=",
        ),
        "The resumed run starts without the random state: the key is rng.": ("rng=", "seed="),
        "The resumed run starts without its place in the data: the key is place.": (
            "place=run",
            "step=run",
        ),
        "The dictionary is empty: it needs model, optimizer, rng and place.": (
            "copy.deepcopy(state)",
            "{}",
        ),
        "The dictionary holds the weights alone: optimizer, rng and place are missing.": (
            "copy.deepcopy(state)",
            "dict(model=copy.deepcopy(state['model']))",
        ),
        "The resumed run starts without the optimizer's moments and without the random state.": (
            "optimizer=",
            "adam=",
            "rng=",
            "seed=",
        ),
        "The weights are not copied: state_dict() returns the live tensors, which go on "
        "training. Copy them.": live("model"),
        "The optimizer's moments are not copied: state_dict() returns the live tensors, which "
        "go on training. Copy them.": live("optimizer"),
        "Nothing is copied: state_dict() returns the live tensors, which go on training.": (
            "copy.deepcopy(state)",
            "state",
        ),
        "The random state comes from a new seed, not from the run.": (
            "torch.get_rng_state()",
            "torch.Generator().manual_seed(0).get_state()",
        ),
        "The place is one step behind the run: an index is off by one.": (
            "place=run.place",
            "place=run.place - 1",
        ),
    },
    use=cut_off,
)
