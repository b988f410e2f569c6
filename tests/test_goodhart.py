"""The benchmark of the lab on over-optimisation: its estimate of the KL of best-of-n against exact
values, its measures, and its command on a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import goodhart

from rlhf_nb.frontier import best_of_n_kl

FOUR = np.array([0.4, 0.3, 0.2, 0.1])


def exact(p: np.ndarray, n: int) -> float:
    "KL of the best of n from p; the answers go from the worst to the best."
    upto = p.cumsum()
    q = upto**n - (upto - p) ** n
    return float((q * np.log(np.maximum(q, 1e-300) / p)).sum())


def pool(p: np.ndarray, posts: int = 400, answers: int = 256) -> tuple[np.ndarray, np.ndarray]:
    "Scores and log-probs of answers drawn from p; a log-prob tells answers apart."
    draw = np.random.default_rng(0).random((posts, answers))
    drawn = np.searchsorted(p.cumsum(), draw).clip(max=len(p) - 1)
    return drawn.astype(float), (np.log(p) - 1e-9 * np.arange(len(p)))[drawn]


DISTRIBUTIONS = dict(
    four=FOUR,
    rare=np.array([0.9, 0.09, 0.0099, 0.0001]),
    different=np.full(100_000, 1e-5),
    long_tail=np.random.default_rng(1).permutation(1 / np.arange(1, 3001)),
)


# catches: the bound in place of the KL, counts in place of probabilities (rare answers), a pool
# that is taken for the whole distribution (different answers)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("n", [1, 4, 16, 64, 256])
def test_kl_of_best_of_n(name, n):
    p = DISTRIBUTIONS[name] / DISTRIBUTIONS[name].sum()
    assert goodhart.pool_kl(pool(p)[0], n, pool(p)[1]) == pytest.approx(exact(p, n), abs=0.12)


def test_the_four_outcomes_of_the_bound():
    assert exact(FOUR, 256) == pytest.approx(2.30, abs=0.005)
    assert best_of_n_kl(256) == pytest.approx(4.55, abs=0.005)
    assert goodhart.pool_kl(pool(FOUR)[0], 256, pool(FOUR)[1]) == pytest.approx(2.30, abs=0.02)


# catches: answers with equal scores counted as one answer, each as the best of its level
def test_answers_that_score_alike_share_a_level():
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])  # the last three score alike
    scores, logprobs = pool(p)
    assert goodhart.pool_kl(np.minimum(scores, 2), 8, logprobs) == pytest.approx(
        exact(np.array([0.4, 0.3, 0.3]), 8), abs=0.02
    )


def test_length_is_paid_up_to_the_target():
    answers = ["", "word", "word " * goodhart.TARGET, "word " * (goodhart.TARGET + 2)]
    wanted = [0, 1 / goodhart.TARGET, 1, 1 - 2 / goodhart.TARGET]
    assert goodhart.length_reward([""] * 4, answers) == pytest.approx(wanted)


def test_averaged_weights():
    models = [nn.Linear(2, 1) for _ in range(4)]
    wanted = torch.stack([m.weight.detach().clone() for m in models]).mean(0)
    torch.testing.assert_close(goodhart.averaged(models).weight.detach(), wanted)


# catches: a command that stops half-way, that makes finished jobs again, or keeps no figures
@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    done, real = [], subprocess.run

    def here(command, **options):  # each job in this process: a new one takes seconds to import
        if command[0] != sys.executable:  # git is asked for the commit
            return real(command, **options)
        monkeypatch.setattr(sys, "argv", command[1:])
        done.append(command[-1])
        goodhart.main()
        return SimpleNamespace(returncode=0)

    threads = torch.get_num_threads()
    monkeypatch.setattr(subprocess, "run", here)
    words = ["goodhart", "--size", "tiny", "--seeds", "3", "--runs", str(tmp_path / "runs")]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", [*words, "--output", str(tmp_path / "kept.json")])
        goodhart.main()
    torch.set_num_threads(threads)
    assert done == ["base", "rewards", "pool", "32 labels", "min", "length"]
    found = json.loads((tmp_path / "kept.json").read_text())["seeds"]["3"]
    assert set(found) == set(done)
    best = found["pool"]["best_of"]
    assert {"16", "32 flipped", "warm", "min", "min, not centred", "gold"} <= set(best)
    proxies = [row["proxy"] for row in best["32"]["best_of"]]
    assert proxies == sorted(proxies)
    assert [row["n"] for row in best["32"]["best_of"]] == [1, 2, 4, 8]
    first = found["min"]["updates"][0]
    assert abs(first["kl"]) < 1e-4 and {"member/0", "member/1"} <= set(first)
    assert sum(bucket[0] for bucket in found["length"]["buckets"]) == 48
    assert not list((tmp_path / "runs").rglob("rollouts"))
    assert "32 labels" in capsys.readouterr().out


# catches: a page that shows fewer seeds than it names, or runs of a smaller size
def test_kept_results():
    path = BENCHMARKS / "results" / "goodhart.json"
    kept = json.loads(path.read_text())
    assert kept["size"] == "full" and path.stat().st_size < 400_000
    assert set(kept["seeds"]) == {"60", "61", "62", "63"}
    jobs = {"base", "rewards", "pool", *goodhart.ppo_runs(goodhart.SIZES["full"])}
    assert len(jobs) == 18
    for seed in ("61", "62", "63"):
        assert set(kept["seeds"][seed]) == jobs
        best = kept["seeds"][seed]["pool"]["best_of"]
        assert {f"{n}{more}" for n in (500, 2000, 8000) for more in ("", " flipped")} <= set(best)
        assert [row["n"] for row in best["2000"]["best_of"]] == [2**i for i in range(9)]
