"""One table of healthy ranges: what uses it agrees with it."""

from __future__ import annotations

import inspect
import math

import pytest
from test_metrics_page import rows_of, sources

from rlhf_nb.evaluate import hacking_alarms
from rlhf_nb.runtime.ranges import RANGES, healthy, ranges_table


# catches: an alarm at another threshold than the table has
def test_alarms_have_the_thresholds_of_the_table():
    default = {
        name: parameter.default
        for name, parameter in inspect.signature(hacking_alarms).parameters.items()
    }
    assert default["kl_most"] == RANGES["objective/kl"].high
    assert f"{default['length_ratio']:g} times" in RANGES["tokens/response_length"].healthy
    assert f"{default['stopped_ratio']:g} of" in RANGES["val/num_eos_tokens"].healthy
    assert default["entropy_ratio"] == 0.25 and "quarter" in RANGES["policy/entropy_avg"].healthy


# catches: a range without its source, with its ends exchanged, or a bar that breaks the table
def test_every_range_says_where_it_comes_from():
    assert len(RANGES) >= 8
    for name, row in RANGES.items():
        assert row.healthy and row.otherwise and row.source, name
        assert row.low is None or row.low < row.high
    lines = ranges_table().splitlines()
    assert len(lines) == len(RANGES) + 2 and {line.count("|") for line in lines} == {5}


# catches: an open end that excludes, NaN taken for health, ends that do not belong to the range
@pytest.mark.parametrize(
    "metric, value, wanted",
    [
        ("policy/clipfrac_avg", 0.15, True),
        ("policy/clipfrac_avg", 0.151, False),
        ("val/explained_variance", -0.02, False),
        ("objective/kl", -1.9, False),
        ("objective/kl", math.nan, False),
        ("policy/entropy_avg", 1e9, True),
    ],
)
def test_healthy(metric, value, wanted):
    assert healthy(metric, value) == wanted


# catches: the page on metrics with numbers of its own for a metric that is in the table
def test_the_page_refers_to_the_table():
    rows = {row[0].strip("`"): row[2] for text in sources("markdown") for row in rows_of(text)}
    assert {name: rows[name] for name in RANGES} == dict.fromkeys(RANGES, "range")
