"""The arithmetic of saved pages against Python's, in a real browser."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page

from rlhf_nb.packing import on_tokens, score_sums
from rlhf_nb.rollout import TENSORS, Rollout
from rlhf_nb.ui.html import module
from rlhf_nb.ui.what_if import page_recipe, unpenalized, what_if
from rlhf_nb.update import Objective

ROLLOUTS = 1000
COMPUTED = ("kl", "scores", "rewards", "advantages", "returns")


def some_rollout(rng: random.Random) -> Rollout:
    "Random lengths, one token and full width among them; log-probs that differ by little or a lot."
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    batch, width = rng.randint(1, 6), rng.randint(1, 9)
    noise = lambda *shape: torch.randn(*shape, generator=generator)
    lengths = torch.randint(1, width + 1, (batch,), generator=generator)
    mask = torch.arange(width) < lengths[:, None]
    stopped = torch.rand(batch, generator=generator) < 0.7
    logprobs = -noise(batch, width).exp()
    ref_logprobs = logprobs + rng.choice([1e-4, 0.1, 3.0]) * noise(batch, width)
    scores = rng.choice([0.01, 1.0, 30.0]) * noise(batch)
    paid = mask if rng.random() < 0.3 else None  # each token has a score
    if paid is not None:
        scores = rng.choice([0.01, 1.0, 30.0]) * noise(batch, width) * mask
    charge = 0.5 * ~stopped
    ids = torch.ones(batch, width, dtype=torch.long)
    return Rollout(
        prompt_ids=ids,
        prompt_mask=ids.bool(),
        response_ids=ids,
        mask=mask,
        stopped=stopped,
        logprobs=logprobs * mask,
        ref_logprobs=ref_logprobs * mask,
        kl=(logprobs - ref_logprobs) * mask,
        values=noise(batch, width),
        raw_scores=scores,
        scores=scores - (charge if paid is None else on_tokens(charge, mask)),
        paid=paid,
    )


def some_objective(rng: random.Random) -> Objective:
    "Random settings, those at the ends of their ranges often."
    return Objective(
        kl_coef=rng.choice([0.0, 0.05, rng.random()]),
        kl_estimator=rng.choice(["k1", "k2", "k3", "abs", "full"]),
        kl_in=rng.choice(["reward", "reward", "loss"]),
        gamma=rng.choice([0.0, 1.0, rng.random()]),
        lam=rng.choice([0.0, 1.0, rng.random()]),
        lam_value=rng.choice([None, 1.0, rng.random()]),
        lam_length_alpha=rng.choice([None, None, 0.05, 0.5, 3 * rng.random() + 0.01]),
        missing_eos_penalty=rng.choice([None, 1.0]),
        whiten_rewards=rng.random() < 0.5,
        score_clip=rng.choice([None, 0.5]),
        normalize_scores=rng.random() < 0.3,
    )


def wide(rollout: Rollout) -> Rollout:
    "The same in float64."
    tensors = {name: getattr(rollout, name) for name in TENSORS}
    floats = {n: x.double() for n, x in tensors.items() if x is not None and x.is_floating_point()}
    return rollout.with_(**floats)


def as_script(rollout: Rollout, made: Objective) -> list[dict[str, Any]]:
    "Episodes as the script takes them."
    rows = dict(
        length=rollout.mask.sum(1), stopped=rollout.stopped,
        unpenalized=score_sums(unpenalized(wide(rollout), made)), logprobs=rollout.logprobs,
        refLogprobs=rollout.ref_logprobs, values=rollout.values, kl=rollout.kl,
    )  # fmt: skip
    if rollout.paid is not None:
        rows["earned"] = unpenalized(wide(rollout), made)
    return [{name: x[i].tolist() for name, x in rows.items()} for i in range(len(rollout))]


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    script = base64.b64encode(module("arithmetic.js").encode()).decode()
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.evaluate(
            "async src => { window.it = await import(src); }",
            f"data:text/javascript;base64,{script}",
        )
        yield page


@pytest.fixture(scope="module")
def cases() -> list[tuple[Rollout, Objective]]:
    rng = random.Random(25)
    drawn = [(some_rollout(rng), some_objective(rng)) for _ in range(ROLLOUTS)]
    # a clip of tokens' scores is refused
    return [(r, x if r.paid is None else replace(x, score_clip=None)) for r, x in drawn]


def answers(page: Page, cases: list[tuple[Rollout, Objective]]) -> list[list[dict[str, Any]]]:
    "What the script makes of each rollout."
    given = json.dumps([[as_script(r, x), page_recipe(x)] for r, x in cases])
    return json.loads(
        page.evaluate(
            "given => JSON.stringify(JSON.parse(given).map(([r, s]) => it.whatIf(r, s)))", given
        )
    )


@pytest.mark.parametrize("double, gap", [(True, 1e-9), (False, 1e-4)])  # the trainer's: float32
def test_a_thousand_rollouts(page: Page, cases: list[tuple[Rollout, Objective]], double, gap):
    worst = 0.0  # the largest difference of any number, relative to the largest of its tensor
    for (rollout, objective), got in zip(cases, answers(page, cases), strict=True):
        want = what_if(wide(rollout) if double else rollout, objective)
        for name in COMPUTED:
            numbers = getattr(want, name).double()
            numbers = score_sums(numbers) if name == "scores" else numbers
            mine = torch.tensor(
                [one["score" if name == "scores" else name] for one in got], dtype=torch.float64
            )
            off = (mine - numbers).abs().max() / max(1e-12, float(numbers.abs().max()))
            assert torch.isfinite(off), (name, objective)
            worst = max(worst, float(off))
    assert worst < gap
