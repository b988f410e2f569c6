"""What the metrics of a healthy run look like: the one table of ranges, which the page on metrics
shows, and which the alarms, the other pages and `benchmarks/healthy_ranges.py` use."""

from __future__ import annotations

import math
from typing import NamedTuple

# Near-greedy, over ten runs of `rlhf-nb demo` (five seeds, twice): see nbs/results.ipynb.
SEEDS = dict(  # by the kind of run, which `rlhf_nb.cli.demo_run.kind_of` names
    usual="79.8 to 98.7 % in ten runs",
    quick="89.2 to 97.2 % in five quick runs",  # benchmarks/quick_demo.py
)

DEMO = "five runs of `rlhf-nb demo`, seeds 10 to 14 (`benchmarks/healthy_ranges.py`)"
DEFINED = "by definition"


class HealthyRange(NamedTuple):
    "What a metric is in a healthy run; a rule of thumb, and where it comes from."

    healthy: str
    otherwise: str  # what to do outside of it
    source: str
    low: float | None = None  # of single updates in which the policy learns
    high: float | None = None
    first: float | None = None  # in place of high, in the first of those updates


RANGES = {
    "objective/raw_scores": HealthyRange(
        "rises",
        "flat: look whether the judge tells answers apart at all; only then at `learning_rate`",
        DEFINED,
    ),
    "objective/kl": HealthyRange(
        "0 in the first update, then slowly up to a few nats; at most 10",
        "above 10: raise `kl_coef`, lower `learning_rate`; clearly negative: two temperatures or "
        "precisions are being compared",
        "0: by definition; up to 5 in " + DEMO + "; 10 is as far as the best of 60,000 samples",
        -0.1,
        10.0,
    ),
    "val/ratio": HealthyRange(
        "within 0.05 of 1",
        "further: sampling and update disagree (temperature, dropout, precision), or the steps are "
        "far too large",
        DEMO + "; single updates of 1.12 right after the value warm-up",
        0.95,
        1.05,
    ),
    "val/ratio_var": HealthyRange(
        "below 0.1",
        "some token became many times as likely: lower `learning_rate`",
        DEMO + "; single outliers far above it, which the clip takes out",
        0.0,
        0.1,
    ),
    "policy/approxkl_avg": HealthyRange(
        "below 0.05, falling with the learning rate",
        "higher: lower `learning_rate`, set `target_kl`; exactly 0: nothing is being learned",
        "up to 0.023 in " + DEMO + ", 0.05 in the page's run; 0.003 to 0.008 in the 160m run of "
        "[2403.17031](https://arxiv.org/abs/2403.17031)",
        0.0,
        0.05,
    ),
    "policy/clipfrac_avg": HealthyRange(
        "below 0.15; up to 0.25 in the first update in which the policy learns",
        "higher: lower `learning_rate`, take fewer `num_ppo_epochs`, set `target_kl`",
        "up to 0.06 in " + DEMO + "; 0.025 to 0.073 in the 160m run of "
        "[2403.17031](https://arxiv.org/abs/2403.17031); the rest: this page's run, on six seeds",
        0.0,
        0.15,
        0.25,
    ),
    "val/explained_variance": HealthyRange(
        "above 0 once the value model has warmed up, and rising",
        "below 0: set `value_warmup_updates`, raise `value_learning_rate`, start from the reward "
        "model",
        "0: no better than a constant, by definition; 0.9 at the end of " + DEMO,
        0.0,
        1.0,
    ),
    "policy/entropy_avg": HealthyRange(
        "falls slowly, to no less than a quarter of its start",
        "collapsing: raise `kl_coef`, or `entropy_coef` a little; read the answers",
        "a third or more of the start in " + DEMO,
    ),
    "val/num_eos_tokens": HealthyRange(
        "nearly all: 0.9 of the share at the start, or more",
        "few: set `missing_eos_penalty`, allow a longer `response_length`, ask whether the reward "
        "pays for length",
        "0.99 or more in " + DEMO,
    ),
    "tokens/response_length": HealthyRange(
        "settles, at most 2.25 times its start",
        "runs to `response_length` or to 1: the reward can be had by length alone",
        "up to twice the start in " + DEMO + ", which have four facts more to tell",
    ),
}


def healthy(metric: str, value: float, first: bool = False) -> bool:
    """Whether a value is inside the metric's range, `first`: in the first update in which the
    policy learns. A metric without numbers has none to leave."""
    found = RANGES[metric]
    low = -math.inf if found.low is None else found.low
    high = math.inf if found.high is None else found.high
    if first and found.first is not None:
        high = found.first
    return low <= value <= high


def ranges_table() -> str:  # Markdown
    "The table, a row a metric."
    head = ["| metric | healthy | if not | where the range comes from |", "|---|---|---|---|"]
    rows = [
        f"| `{name}` | {row.healthy} | {row.otherwise} | {row.source} |"
        for name, row in RANGES.items()
    ]
    return "\n".join(head + rows)
