"""How often the intervals of `rlhf_nb.gains` hold the truth, in experiments where it is known.

    python benchmarks/coverage.py    # 2,000 experiments a cell: six minutes of a core
    python benchmarks/coverage.py --experiments 100    # a look

Each experiment trains nothing: it draws runs from a world shaped like ours, and posts for each run,
and hands them to the functions. A world has the mean and the spread of the seeds that
`mini_tldr_seeds.json` and `quick_demo.json` keep, what the posts add to that spread taken off:
rates are beta distributed, those of a seed's two runs as correlated as the kept ones, and the
posts that two runs win overlap half way from chance to as far as they can. One world is made to
break every interval: one run in three collapses, as with few labels. Writes
benchmarks/results/coverage.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import environment

from rlhf_nb.evaluate import paired_interval
from rlhf_nb.gains import (
    Floats,
    crossed_gain,
    interquartile_mean,
    mean_interval,
    paired_gain,
    probability_of_improvement,
    rate_interval,
    seed_rates,
    two_level_interval,
    unpaired_gain,
)

HERE = Path(__file__).parent
SIZE = 100_000  # runs of a population
OVERLAP = 0.5  # of the posts that two runs win: 0 by chance, 1 as far as they can
SEEDS = (3, 5, 10)
Ends = tuple[float, float]


class World(NamedTuple):
    "True rates of all runs there are, smallest first, and how an experiment draws from them."

    ours: Floats  # [SIZE]
    theirs: Floats
    correlation: float  # of the two runs of a seed, before they take the shape of the rates
    posts: int


class Drawn(NamedTuple):
    "What an experiment sees."

    ours: list[Floats]  # [S][N] outcomes
    theirs: list[Floats]  # of the same seeds, on the same posts
    others: list[Floats]  # of theirs with other seeds, on posts of their own


def population(rng: np.random.Generator, mean: float, spread: float) -> Floats:
    "Runs whose rates have this mean and standard deviation."
    count = mean * (1 - mean) / spread**2 - 1
    return np.sort(rng.beta(mean * count, (1 - mean) * count, SIZE))


def true_spread(rates: Floats, posts: int) -> float:
    "Standard deviation between runs without what the posts add; at least a tenth of a point."
    noise = float((rates * (1 - rates)).mean()) / posts
    return math.sqrt(max(float(rates.var(ddof=1)) - noise, 1e-6))


def kept_rates(name: str, model: str) -> Floats:
    "Near-greedy (`ppo@0.01`) or other win rates of the seeds of a kept benchmark."
    kept = json.loads((HERE / "results" / f"{name}.json").read_text())
    if name == "mini_tldr_seeds":
        return np.array([run["verdict"][model]["win_rate"] for run in kept["default"].values()])
    which, temperature = model.split("@")
    return np.array(
        [
            row["win_rate"]
            for run in kept["runs"]
            for row in run["rows"]
            if (row["model"], row["temperature"]) == (which, float(temperature))
        ]
    )


def shaped(rng: np.random.Generator, ours: Floats, theirs: Floats, posts: int) -> World:
    "A world like these seeds."
    made = [population(rng, float(x.mean()), true_spread(x, posts)) for x in (ours, theirs)]
    together = float(np.corrcoef(ours, theirs)[0, 1])
    return World(made[0], made[1], float(np.clip(together, 0, 0.95)), posts)


def worlds(rng: np.random.Generator) -> dict[str, World]:
    "All of them, by name."
    demo, quick = "mini_tldr_seeds", "quick_demo"
    of = {
        "demo, near-greedy": (demo, "ppo@0.01", demo, "sft@0.01", 2000),
        "demo, temperature 1": (demo, "ppo@1", demo, "sft@1", 2000),
        "quick demo, near-greedy": (quick, "ppo@0.01", quick, "sft@0.01", 400),
        "two recipes near 100 %": (quick, "ppo@0.01", demo, "ppo@0.01", 400),
    }
    made = {
        name: shaped(rng, kept_rates(a, b), kept_rates(c, d), posts)
        for name, (a, b, c, d, posts) in of.items()
    }
    fallen = rng.random(SIZE) < 1 / 3
    broken = np.where(
        fallen,
        rng.permutation(population(rng, 0.01, 0.005)),
        rng.permutation(population(rng, 0.97, 0.02)),
    )
    made["one run in three collapses"] = World(
        np.sort(broken), population(rng, 0.25, 0.009), 0.0, 400
    )
    return made


def rates_of(rng: np.random.Generator, world: World, seeds: int) -> tuple[Floats, Floats]:
    "True rates of the two runs of each seed."
    z = rng.standard_normal((2, seeds))
    z[1] = world.correlation * z[0] + math.sqrt(1 - world.correlation**2) * z[1]
    at = [[0.5 * math.erfc(-x / math.sqrt(2)) for x in row] for row in z]
    places = np.minimum((np.array(at) * SIZE).astype(int), SIZE - 1)
    return world.ours[places[0]], world.theirs[places[1]]


def judged(rng: np.random.Generator, a: Floats, b: Floats, posts: int) -> list[list[Floats]]:
    "Outcomes of two runs of each seed on the same posts, in any order of the posts."
    both = a * b + OVERLAP * (np.minimum(a, b) - a * b)
    shares = np.stack([both, a - both, b - both, 1 - a - b + both], -1).clip(0)
    counts = rng.multinomial(posts, shares / shares.sum(-1, keepdims=True))
    ours, theirs = np.array([1.0, 1, 0, 0]), np.array([1.0, 0, 1, 0])
    return [[np.repeat(x, row) for row in counts] for x in (ours, theirs)]


def experiment(rng: np.random.Generator, world: World, seeds: int) -> Drawn:
    "What one experiment sees."
    ours, theirs = judged(rng, *rates_of(rng, world, seeds), world.posts)
    _, others = judged(rng, *rates_of(rng, world, seeds), world.posts)
    return Drawn(ours, theirs, others)


def less(drawn: Drawn) -> list[Floats]:
    "Ours less theirs, on each post."
    return [a - b for a, b in zip(drawn.ours, drawn.theirs)]


def mean(rates: Floats) -> Floats:
    "Of the last axis."
    return rates.mean(-1)


def smallest_to_largest(rates: Floats) -> Ends:
    "The range, which tables show beside a mean."
    return float(rates.min()), float(rates.max())


def pooled(drawn: Drawn) -> Ends:
    "The mistake: the posts of all seeds as if they were of one run."
    return paired_interval(
        np.concatenate(drawn.ours).tolist(), np.concatenate(drawn.theirs).tolist()
    )


def ends(estimate: Any) -> Ends:
    "Of an Estimate."
    return estimate.low, estimate.high


# what is estimated -> method -> the interval from what an experiment sees
METHODS: dict[str, dict[str, Callable[[Drawn], Ends]]] = {
    "mean of one group": {
        "rate_interval": lambda d: ends(rate_interval(seed_rates(d.ours))),
        "mean_interval": lambda d: ends(mean_interval(seed_rates(d.ours))),
        "two_level_interval": lambda d: ends(two_level_interval(d.ours, mean, 1000)),
        "smallest to largest": lambda d: smallest_to_largest(seed_rates(d.ours)),
    },
    "gain, paired seeds": {
        "paired_gain": lambda d: ends(paired_gain(seed_rates(d.ours), seed_rates(d.theirs))),
        "two_level_interval": lambda d: ends(two_level_interval(less(d), mean, 1000)),
        "unpaired_gain": lambda d: ends(unpaired_gain(seed_rates(d.ours), seed_rates(d.theirs))),
        "posts of all seeds pooled": pooled,
    },
    "gain, other seeds": {
        "unpaired_gain": lambda d: ends(unpaired_gain(seed_rates(d.ours), seed_rates(d.others))),
    },
    "interquartile mean": {
        "two_level_interval": lambda d: ends(two_level_interval(d.ours, interquartile_mean, 1000)),
    },
    "probability of improvement": {
        "probability_of_improvement": lambda d: ends(
            probability_of_improvement(seed_rates(d.ours), seed_rates(d.others))
        ),
    },
}


def truths(rng: np.random.Generator, world: World) -> dict[str, float]:
    "What the intervals should hold, over all runs there are."
    gain = float(world.ours.mean() - world.theirs.mean())
    a, b = (rng.binomial(world.posts, rng.permutation(x)) for x in (world.ours, world.theirs))
    return {
        "mean of one group": float(world.ours.mean()),
        "gain, paired seeds": gain,
        "gain, other seeds": gain,
        "interquartile mean": float(interquartile_mean(world.ours)),
        "probability of improvement": float(np.mean(np.sign(a - b) / 2 + 0.5)),
    }


def tally(found: list[Ends], truth: float) -> dict[str, float]:
    "How often intervals hold the truth, and how wide they are."
    low, high = np.array(found).T
    held = float(np.mean((low <= truth) & (truth <= high)))
    return dict(
        covered=round(held, 4),
        standard_error=round(math.sqrt(held * (1 - held) / len(found)), 4),
        width=round(float(np.median(high - low)), 4),
    )


def own_posts(rng: np.random.Generator, experiments: int) -> list[dict[str, Any]]:
    "Every world, number of seeds and method; the posts of a seed are its own."
    rows = []
    for name, world in worlds(rng).items():
        truth = truths(rng, world)
        for seeds in SEEDS:
            drawn = [experiment(rng, world, seeds) for _ in range(experiments)]
            for what, methods in METHODS.items():
                for method, interval in methods.items():
                    cell = tally([interval(one) for one in drawn], truth[what])
                    rows.append(dict(world=name, what=what, method=method, seeds=seeds, **cell))
            told(rows[-sum(map(len, METHODS.values())) :])
    return rows


def on_shared_posts(rng: np.random.Generator, size: int, spread: float, easy: Floats) -> Floats:
    "Log-odds of a run's wins on each post: the run's own, and what the post does to all runs."
    return 0.5 + spread * rng.standard_normal((size, 1)) + easy


def shared_posts(
    rng: np.random.Generator, experiments: int, posts: int = 100
) -> list[dict[str, Any]]:
    """All runs on the same few posts, which the two groups find hard each in its own way: an
    interval that looks at seeds alone holds for these posts, not for others."""
    share = lambda x: 1 / (1 + np.exp(-x))
    wide = rng.standard_normal((2, SIZE))
    truth = float(
        share(0.5 + math.hypot(0.2, 1) * wide[0]).mean()
        - share(0.1 + math.hypot(0.2, 1) * wide[1]).mean()
    )
    rows = []
    for seeds in SEEDS:
        found: dict[str, list[Ends]] = {"paired_gain": [], "crossed_gain": []}
        for _ in range(experiments):
            easy = rng.standard_normal((2, posts))
            odds = [on_shared_posts(rng, seeds, 0.2, easy[0])]
            odds.append(on_shared_posts(rng, seeds, 0.2, easy[1]) - 0.4)
            a, b = (1.0 * (rng.random((seeds, posts)) < share(x)) for x in odds)
            found["paired_gain"].append(ends(paired_gain(a.mean(1), b.mean(1))))
            found["crossed_gain"].append(ends(crossed_gain(a, b)))
        rows += [
            dict(
                world=f"{posts} posts, the same for all runs",
                what="gain, paired seeds",
                method=method,
                seeds=seeds,
                **tally(some, truth),
            )
            for method, some in found.items()
        ]
        told(rows[-2:])
    return rows


def told(rows: list[dict[str, Any]]) -> None:
    "A line each."
    for row in rows:
        print(
            f"{row['world']:28} {row['what']:28} {row['method']:28} {row['seeds']:3} seeds: "
            f"{row['covered']:.1%}, width {row['width']:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiments", type=int, default=2000, help="of every cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "coverage.json")
    options = parser.parse_args()
    start, rng = time.perf_counter(), np.random.default_rng(options.seed)
    where = environment(os.getloadavg()[0] > 1.5) | dict(numpy=np.__version__)
    rows = shared_posts(rng, options.experiments) + own_posts(rng, options.experiments)
    kept = dict(
        command=f"python benchmarks/coverage.py --experiments {options.experiments}"
        f" --seed {options.seed}",
        environment=where,
        experiments=options.experiments,
        seconds=round(time.perf_counter() - start),
        rows=rows,
    )
    options.output.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
