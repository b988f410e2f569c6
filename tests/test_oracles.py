"""Our functions against the kept results of verl, OpenRLHF, trl and CleanRL, to 1e-12."""

import json
import statistics
import sys
from pathlib import Path

import pytest
import torch

from rlhf_nb import estimators, losses
from rlhf_nb.gae import gae
from rlhf_nb.kl import estimate_kl
from rlhf_nb.masks import whiten

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import oracles

KEPT = json.loads(oracles.STORED.read_text())
DRAWN = {name: torch.tensor(x, dtype=torch.float64) for name, x in KEPT["inputs"].items()}
OURS, ROUNDED = oracles.OURS, 2e-7  # their guards against 0, and what they compute in float32


def gap(one: dict, program=None) -> float:
    x = oracles.rollout(DRAWN, one["rows"])
    found = oracles.ours(one["kind"], x, program)
    return float((found - torch.tensor(one["numbers"], dtype=torch.float64)).abs().max())


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


WRONG = {
    "gae": lambda x: gae(x.rewards, x.values, x.mask, 0.9, 0.81),
    "gae, cut off": OURS["gae"],
    "returns": lambda x: whiten(OURS["gae"](x), x.mask) + x.values,
    "whitened": lambda x: whiten(x.advantages, x.mask, shift_mean=False),
    "rewards": lambda x: x.rewards.roll(1, 1),
    "rewards to go": lambda x: gae(x.rewards, 0 * x.values, x.mask, 0.9, 0.8),
    "policy": lambda x: losses.policy_loss(x.old, x.new, x.advantages, x.mask) / x.mask.sum(),
    "policy, dual clip": OURS["policy"],
    "policy, sequence_mean": OURS["policy"],
    "policy, constant": OURS["policy, sequence_mean"],
    "policy, weighted": OURS["policy, masked"],
    "policy, masked": OURS["policy"],
    "gspo": OURS["policy, sequence_mean"],
    "value": lambda x: (
        losses.value_loss(x.new_values, x.values, x.returns, x.mask, 0.3) / x.mask.sum()
    ),
    "entropy": lambda x: -x.logits.log_softmax(-1).mean(-1),
    "k1": lambda x: estimate_kl(x.ref, x.old, "k1"),
    "k2": lambda x: 2 * estimate_kl(x.old, x.ref, "k2"),
    "k3": lambda x: estimate_kl(x.ref, x.old, "k3"),
    "abs": OURS["k1"],
    "weights, token_truncate": OURS["weights, token_mask"],
    "weights, token_mask": OURS["weights, sequence_mask"],
    "weights, sequence_truncate": OURS["weights, token_truncate"],
    "weights, sequence_mask": OURS["weights, sequence_truncate"],
    "rloo": OURS["dr_grpo"],
    "grpo, 1e-6": lambda x: estimators.grpo(x.scores, 3, eps=1e-3)[:, None] * x.mask,
    "grpo, 1e-9": OURS["rloo"],
    "dr_grpo": OURS["rloo"],
    "reinforce_pp": OURS["rewards to go"],
}


# catches: kept results that a wrong program meets too
@pytest.mark.parametrize("kind", oracles.OURS)
def test_a_wrong_program_is_seen(kind):
    kept = [one for one in KEPT["results"] if one["kind"] == kind and one["gap"] <= ROUNDED]
    assert max(gap(one, WRONG[kind]) for one in kept) > 1e-4


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
