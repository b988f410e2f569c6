"""Intervals over seeds and posts: numbers worked out by hand, tables of any textbook, independent
loops, and the wrong programs that these tests catch."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from rlhf_nb import gains
from rlhf_nb.evaluate import paired_interval
from rlhf_nb.gains import t_quantile

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
sys.path.insert(0, str(RESULTS.parent))

import mini_tldr_seeds
import quick_demo

MODELS = ("ppo@0.01", "sft@0.01")
MORE = dict(covered=3.0, invented=0.1, length=9.0)
QUICK = [
    dict(model=model, temperature=t, win_rate=rate, malformed=0.01, **MORE)
    for t, *rates in ((0.01, 0.2, 0.9), (1.0, 0.4, 0.6))
    for model, rate in zip(("sft", "ppo"), rates)
]
OURS, THEIRS = [0.7, 0.8, 0.9], [0.4, 0.6, 0.5]


def ends(estimate):
    return estimate.value, estimate.low, estimate.high


# ---- by hand ----


# catches: a normal quantile where there are three runs, n instead of n - 1
def test_students_t():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 29: 2.045, 120: 1.980}
    assert all(abs(t_quantile(k) - t) < 6e-4 for k, t in table.items())  # of any textbook
    assert abs(t_quantile(5, 0.99) - 4.032) < 6e-4
    with pytest.raises(ValueError, match="at least two runs"):
        t_quantile(0)


# catches: a normal quantile, a standard deviation over S, an interval of the runs instead of their
# mean; the slope of the log-odds forgotten or upside down, the interval of their mean; an interval
# of two groups where the seeds are paired
def test_intervals_by_hand():
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert ends(gains.mean_interval(OURS)) == pytest.approx((0.8, 0.8 - half, 0.8 + half))
    assert ends(gains.paired_gain(OURS, THEIRS)) == pytest.approx((0.3, 0.3 - half, 0.3 + half))
    slope, expit = half / (0.8 * 0.2), lambda x: 1 / (1 + math.exp(-x))
    wanted = (0.8, expit(math.log(4) - slope), expit(math.log(4) + slope))
    assert ends(gains.rate_interval(OURS)) == pytest.approx(wanted)


# catches: ends outside of 0 and 1, and an overflow, where one run is at the end
@pytest.mark.parametrize("rates", [[1, 1, 0.99], [0, 0, 1e-6], [0, 1], [1, 0.999999, 1]])
def test_rate_interval_stays_inside(rates):
    found = gains.rate_interval(rates)
    assert 0 <= found.low <= found.value <= found.high <= 1 and found.low < found.high


def by_loops(d):
    "Mean squares of a table, cell by cell."
    S, N = len(d), len(d[0])
    mean = sum(map(sum, d)) / (S * N)
    rows = [sum(row) / N for row in d]
    columns = [sum(row[n] for row in d) / S for n in range(N)]
    seeds = N * sum((r - mean) ** 2 for r in rows) / (S - 1)
    posts = S * sum((c - mean) ** 2 for c in columns) / (N - 1)
    rest = sum((d[s][n] - rows[s] - columns[n] + mean) ** 2 for s in range(S) for n in range(N)) / (
        (S - 1) * (N - 1)
    )
    return mean, seeds, posts, rest


# catches: rows and columns confused, a mean square over the wrong count, posts that make the
# interval narrower
@pytest.mark.parametrize("seed", range(4))
def test_crossed_gain_against_loops(seed):
    rng = np.random.default_rng(seed)
    easy = rng.normal(0, 0.3, 20)
    a = 1.0 * (rng.random((4, 20)) < 0.6 + easy)
    b = 1.0 * (rng.random((4, 20)) < 0.4 - easy)
    mean, seeds, posts, rest = by_loops((a - b).tolist())
    both = seeds + max(0.0, posts - rest)
    half = t_quantile(both**2 / (seeds**2 / 3)) * math.sqrt(both / 80)
    found = gains.crossed_gain(a, b)
    assert ends(found) == pytest.approx((mean, max(-1, mean - half), min(1, mean + half)))


# catches: an interval of shared posts that differs from the paired one where posts add nothing
def test_crossed_gain_is_paired_gain_without_an_effect_of_posts():
    a, b = np.array([[1, 1], [1, 1]]), np.array([[0, 1], [0, 0]])
    assert ends(gains.crossed_gain(a, b)) == ends(gains.paired_gain(a.mean(1), b.mean(1)))


# ---- plan ----


def spread_by(seeds, spread):
    "Runs with this standard deviation."
    x = np.arange(seeds) - (seeds - 1) / 2
    return spread * x / x.std(ddof=1)


# catches: z in place of t, one side, the wrong count of groups. Tables of power: 17 and 64 a group
# for one and for half a standard deviation, 34 pairs for half a one
@pytest.mark.parametrize(
    "gain, groups, wanted", [(1, 2, 17), (0.5, 2, 64), (0.5, 1, 34), (1, 1, 10), (0.2, 2, 394)]
)
def test_seeds_needed_are_those_of_the_tables(gain, groups, wanted):
    enough, short = (gains.plan(spread_by(n, 1), gain, groups) for n in (wanted, wanted - 1))
    assert enough.needed == short.needed == wanted
    assert enough.visible <= gain < short.visible


# catches: power by a shifted t where the noncentral one is needed
@pytest.mark.parametrize("seeds, gain", [(3, 0.1), (3, 0.25), (5, 0.1)])
def test_power_against_experiments(seeds, gain):
    d = np.random.default_rng(0).normal(gain, 0.08, (40_000, seeds))
    half = t_quantile(seeds - 1) * d.std(1, ddof=1) / math.sqrt(seeds)
    seen = np.mean(np.abs(d.mean(1)) > half)
    assert gains.power(gain / 0.08 * math.sqrt(seeds), seeds - 1) == pytest.approx(seen, abs=0.01)


def test_power_without_a_gain_is_five_per_cent():
    assert gains.power(0, 2) == pytest.approx(0.05, abs=1e-4)
    assert gains.power(0, 50) == pytest.approx(0.05, abs=1e-4)


# catches: a plan in shares where points are said, another group's count
def test_a_plan_reads_as_a_sentence():
    found = gains.plan([0.6, 0.68, 0.76])
    assert found.spread == pytest.approx(0.08) and found.seeds == 3
    said = f"differences above {100 * found.visible:.1f} points"
    assert "With 3 seeds of this spread (8.0 points)" in str(found) and said in str(found)
    assert f"for 5 points you need {found.needed} seeds" in str(found)
    assert gains.plan(spread_by(9, 0.08)).needed == found.needed
    assert gains.plan([0.5, 0.5]).needed == 2


# catches: "you need 2 seeds" of runs that say nothing about it, with and without rounding
@pytest.mark.parametrize("same", [[0.5] * 3, [0.6] * 3, [0.1] * 3])
def test_a_plan_of_equal_runs_says_that_it_knows_nothing(same):
    found = str(gains.plan(same))
    assert "3 seeds without any spread say nothing" in found and "you need" not in found


# ---- what says nothing, and what is refused ----


def test_one_run_says_nothing_of_seeds():
    for one in (
        gains.mean_interval([0.8]),
        gains.rate_interval([0.8]),
        gains.paired_gain([0.8], [0.5]),
        gains.crossed_gain([[1, 0, 1]], [[0, 0, 1]]),
    ):
        assert math.isnan(one.low) and math.isnan(one.high)
        assert "one run says nothing of other seeds" in str(one)


def test_equal_values_are_not_believed():
    for same in (
        gains.mean_interval([2, 2, 2]),
        gains.rate_interval([1, 1, 1]),
        gains.paired_gain([0.5, 0.6], [0.25, 0.35]),
        gains.crossed_gain([[1, 1], [1, 1]], [[0, 0], [0, 0]]),
        gains.mean_interval([0.1] * 3),  # from here on with a spread of 1e-17 or so, by rounding
        gains.mean_interval([0.1e9] * 3),
        gains.rate_interval([0.1] * 3),
        gains.paired_gain([0.7, 0.8, 0.9], [0.6, 0.7, 0.8]),
    ):
        assert same.low == pytest.approx(same.value) == same.high
        assert "do not trust it" in str(same)


# catches: a tolerance that takes small numbers, or small differences between runs, for none
def test_a_small_spread_is_believed():
    for small in (
        gains.mean_interval([1e-12, 2e-12, 4e-12]),
        gains.mean_interval([1e6, 1e6 + 1, 1e6 - 1]),
        gains.paired_gain([0.5001, 0.5], [0.5, 0.5]),
    ):
        assert small.low < small.high and "do not trust it" not in str(small)


NAN = math.nan
REFUSED = [
    (lambda: gains.mean_interval([1, NAN]), r"values\[1\] is nan"),
    (lambda: gains.rate_interval([0.5, math.inf]), r"rates\[1\] is inf"),
    (lambda: gains.rate_interval([0.5, 92.8]), r"rates\[1\] is 92.8.*between 0 and 1"),
    (lambda: gains.paired_gain([0.5, NAN], [0.5, 0.5]), r"ours\[1\] is nan"),
    (lambda: gains.paired_gain([0.5], [NAN]), r"theirs\[0\] is nan"),
    (lambda: gains.paired_gain([0.5, 0.6], [0.5]), "2 and 1 runs.*the same order"),
    (lambda: gains.mean_interval([]), "one number for each run"),
    (lambda: gains.mean_interval([[1, 2]]), "one number for each run"),
    (lambda: gains.seed_rates([]), "outcomes has shape"),
    (lambda: gains.seed_rates([[1], []]), "run 1 has shape"),
    (lambda: gains.seed_rates([[1, 0], [1, None]]), r"run 1\[1\] is nan"),
    (lambda: gains.crossed_gain([[1, 0]], [[1, 0, 1]]), r"\(1, 2\), theirs \(1, 3\)"),
    (lambda: gains.crossed_gain([[1, NAN]], [[1, 0]]), r"run 0\[1\] is nan"),
    (lambda: gains.plan([0.5]), "one run"),
    (lambda: gains.plan([0.5, 0.6], 0), "wanted is 0: give a gain above 0"),
    (lambda: gains.plan([0.5, 0.6], NAN), "wanted is nan"),
    (lambda: gains.plan([0.5, 0.6], 1e-4), "more than 10,000"),
    (lambda: gains.plan([0.5, math.inf]), r"rates\[1\] is inf"),
    (lambda: gains.plan([0.5, 0.6], groups=0), "groups is 0: give 2 .* or 1"),
    (lambda: gains.plan([0.5, 0.6], groups=3), "groups is 3: give 2 .* or 1"),
]


@pytest.mark.parametrize("call, said", REFUSED)
def test_bad_input_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()


# ---- as kept ----


# catches: a table made by hand, or from other figures
def test_tables_are_made_from_the_kept_figures():
    old = json.loads((RESULTS / "mini_tldr_seeds.json").read_text())
    text = mini_tldr_seeds.table(old["default"], old["no_kl"], old["few_labels"], old["date"])
    assert (RESULTS / "mini_tldr_seeds.md").read_text() == text
    rates = [[r["verdict"][m]["win_rate"] for r in old["default"].values()] for m in MODELS]
    gain, group = gains.paired_gain(*rates), gains.rate_interval(rates[0])
    assert f"{100 * gain.value:.1f} ({100 * gain.low:.1f} to {100 * gain.high:.1f}; " in text
    readme = (RESULTS.parents[1] / "README.md").read_text()
    assert f"mean: {100 * group.low:.0f} to {100 * group.high:.0f} %)" in readme
    quick = json.loads((RESULTS / "quick_demo.json").read_text())
    said = quick_demo.over_seeds(quick["runs"])
    assert quick["over_seeds"] == said
    page = (RESULTS.parents[1] / "nbs" / "results.ipynb").read_text()
    for name, text in (
        ("gain at temperature 0.01", "gains 64.9 points near-greedy (95 % interval 55.0 to 74.8)"),
        ("gain at temperature 1", "19.4 at temperature 1 (15.3 to 23.5)"),
        ("rise of bad form at temperature 1", "bad form rises by 0.5 points (0.0 to 1.0)"),
        ("bad form at temperature 1", "from 0.5 to 1.0 %"),
        ("facts invented at temperature 1", "invented facts from 0.08 to 0.11 a summary"),
        ("tokens at temperature 1", "13.5 tokens instead of 10.8"),
        ("facts covered at temperature 1", "4.6 facts instead of 3.8"),
    ):
        told = re.findall(r"\d+\.\d+", said[name])
        assert text in page and {*re.findall(r"\d+\.\d+", text)} <= {*told}, name


# catches: an interval made of one seed
def test_a_table_of_one_seed_has_no_interval():
    old = json.loads((RESULTS / "mini_tldr_seeds.json").read_text())
    text = mini_tldr_seeds.table({"10": old["default"]["10"]}, {}, {}, "today")
    assert "| 96.2 (one seed) |" in text and "nan" not in text and "differences above" not in text
    assert [x for x in quick_demo.over_seeds([{"rows": QUICK}]) if "gain" in x or "plan" in x] == [
        "gain at temperature 0.01",
        "gain at temperature 1",
    ]


# catches: posts that count as seeds, and an interval by seeds that holds less than it says
@pytest.mark.parametrize("wrong", [False, True])
def test_pooled_posts_lose_what_seeds_keep(wrong):
    rng, held, rounds = np.random.default_rng(3), 0, 400
    for _ in range(rounds):
        a, b = rng.normal(0.70, 0.08, 3), rng.normal(0.45, 0.02, 3)
        ours, theirs = ([1.0 * (rng.random(200) < rate) for rate in group] for group in (a, b))
        if wrong:
            low, high = paired_interval(*(np.concatenate(x).tolist() for x in (ours, theirs)))
        else:
            rates = gains.seed_rates(ours), gains.seed_rates(theirs)
            _, low, high, *_ = gains.paired_gain(*rates)
        held += low < 0.25 < high
    assert held / rounds < 0.85 if wrong else 0.92 < held / rounds < 0.98
