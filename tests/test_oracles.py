"""Our functions against the kept results of verl, OpenRLHF, trl and CleanRL, to 1e-12."""

import json
import statistics
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import oracles

KEPT = json.loads(oracles.STORED.read_text())
DRAWN = {name: torch.tensor(x, dtype=torch.float64) for name, x in KEPT["inputs"].items()}
OURS, ROUNDED = oracles.OURS, 2e-7  # their guards against 0, and what they compute in float32


rollout = cache(lambda rows: oracles.rollout(DRAWN, rows))


def gap(one: dict, kind: str = "") -> float:
    found = oracles.ours(kind or one["kind"], rollout(one["rows"]))
    wanted = torch.tensor(one["numbers"], dtype=torch.float64)
    return float((found - wanted).abs().max()) if found.shape == wanted.shape else torch.inf


# catches: any function that leaves the others, or that takes over what they do differently
def test_ours_are_theirs():
    for one in KEPT["results"]:
        where = f"{one['kind']} of {one['library']}, {one['rows']}"
        if one["gap"] > ROUNDED:
            assert gap(one) == pytest.approx(one["gap"], rel=0.06), where
        else:
            assert gap(one) <= (1e-12 if one["gap"] <= 1e-12 else ROUNDED), where
    equal = {one["kind"] for one in KEPT["results"] if one["gap"] <= 1e-12}
    guarded = {"whitened", "reinforce_pp", "gspo", "policy, sequence_mean"}
    assert equal | guarded == set(OURS) and len(KEPT["results"]) > 150


# catches: kept results that a wrong program meets too
@pytest.mark.parametrize("kind", OURS)
def test_every_other_program_is_seen(kind):
    kept = [one for one in KEPT["results"] if one["kind"] == kind and one["gap"] <= ROUNDED]
    for other in OURS.keys() - {kind}:
        assert max(gap(one, other) for one in kept) > 10 * ROUNDED, other


# catches: a difference that is none, or one whose input nobody can work out by hand
def test_where_they_differ():
    apart = KEPT["differences"]
    assert all(theirs != ours and len(ours) <= 4 for theirs, ours in apart.values())
    assert apart["trl: score"] == [[0.25, 0.5], [0.5, 1.0]]
    assert apart["openrlhf: observations"] == [[0.125, 1.0], [0.5, 1.0]]


# catches: a figure on the front page that the kept results do not give
def test_the_front_page_quotes_them():
    front = (Path(oracles.__file__).parents[1] / "README.md").read_text()
    gaps = [one["gap"] for one in KEPT["results"]]
    equal, near = (sum(gap <= most for gap in gaps) for most in (1e-12, ROUNDED))
    assert f"of {len(gaps)} comparisons {equal} equal to 1e-12 and {near - equal} to" in front
    control = json.loads((oracles.STORED.parent / "classic_control.json").read_text())
    for world in control["published"]:
        ours = [one["last_100"] for one in control["runs"] if one["world"] == world]
        assert f"{statistics.fmean(ours):.2f} ± {statistics.pstdev(ours):.2f}" in front
