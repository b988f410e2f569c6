"""The first screen of a report: the gain, its picture, and what is said of the run."""

import re
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from rlhf_nb.cli.demo_run import QUICK, DemoSettings, kind_of
from rlhf_nb.ui.html import exact, number_text
from rlhf_nb.ui.verdict import EDGE, LEFT, WIDTH, gain_of, gain_picture, headline

RATES = {("sft", 0.01): 0.2, ("ppo", 0.01): 0.9, ("sft", 1.0): 0.5, ("ppo", 1.0): 0.4}


def row(model, temperature, rate, malformed=0.0):
    counted = dict(posts=400, gold=3.0, covered=3.0, invented=0.001, malformed=malformed)
    near = dict(win_rate=rate, low=max(rate - 0.1, 0), high=min(rate + 0.05, 1))
    return dict(model=model, temperature=temperature, **near, **counted)


VERDICT = [row(*which, rate, 0.25 if which[1] == 1 else 0.0) for which, rate in RATES.items()]
PAIRED = [dict(temperature=0.01, difference=0.7, low=0.6, high=0.8, posts=400)]


@pytest.mark.parametrize(
    "sft, ppo, text",
    [(0.2, 0.9, "+70"), (0.9, 0.2, "−70"), (0.5, 0.5, "+0.0"), (0.5, 0.46, "−4.0")],
)
def test_the_gain_has_a_sign_and_no_more_digits_than_it_needs(sft, ppo, text):
    assert gain_of(row("sft", 1, sft), row("ppo", 1, ppo)) == text


# catches: a headline that keeps silent about the temperature at which the run is worse
def test_the_headline_has_both_temperatures_and_their_bad_form():
    page = headline(dict(verdict=VERDICT)).replace("&nbsp;", " ")
    assert page.index("+70") < page.index("prefers PPO") < page.index("temperature 1: −10 points")
    assert "from 50.0 % to 40.0 %. Bad form: 25.0 % of PPO" in page
    assert "Bad form: 0.0 % of PPO" in page and "0.00 → ≈0" not in page and "≈0 → ≈0" in page


# catches: what was measured on the usual run said of a quick one, or of one that nobody measured
@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, "79.8 to 98.7 % in ten runs."),
        (QUICK, "89.2 to 97.2 % in five quick runs."),
        (dict(kl_coef=0.0), "the rate moves by more."),
        (QUICK | dict(kl_coef=0.0), "the rate moves by more."),
    ],
)
def test_what_other_seeds_do_is_said_of_runs_of_that_kind(changes, said):
    kind = kind_of(replace(DemoSettings("elsewhere", 3), **changes))
    page = headline(dict(verdict=VERDICT, paired=PAIRED, kind=kind)).replace("&nbsp;", " ")
    assert f"{said}</bdi></p>" in page and page.count("runs.") <= 1


# catches: an interval drawn at another place than its numbers, a model that only colour tells
def test_the_picture_is_to_scale():
    root = ElementTree.fromstring(gain_picture(VERDICT[::-1]))
    groups = list(root.iter("g"))
    assert [part.get("class") for part in groups] == ["sft", "ppo", "sft", "ppo"]
    for part, rate in zip(groups, RATES.values(), strict=True):
        x = [float(text) for text in re.findall(r"M([\d.]+) [\d.]+v", part.find("path").get("d"))]
        ends = [LEFT + WIDTH * end for end in (rate - 0.1, min(rate + 0.05, 1))]
        assert x == pytest.approx(ends, abs=0.06)
        mark = part.find("circle") if part.get("class") == "ppo" else part.find("rect")
        middle = float(mark.get("cx") or mark.get("x")) + (4.5 if mark.get("x") else 0)
        assert middle == pytest.approx(LEFT + WIDTH * rate, abs=0.06)
        assert f"{100 * rate:.1f} %" in [text.text for text in part.iter("text")]
    assert all(f"{100 * rate:.1f} % won" in root.get("aria-label") for rate in RATES.values())
    heads = [text.text for text in root.iter("text") if text.get("class") == "head"]
    assert heads == ["near-greedy, temperature 0.01", "sampled, temperature 1"]


def boxes(root):
    "Each text of a picture with what it covers, in the widest font that a page may have."
    for text in root.iter("text"):
        bold = "bold" if text.get("class") in ("head", "rate") else "normal"
        size = TextPath(
            (0, 0), text.text, 13, prop=FontProperties(family="DejaVu Sans", weight=bold)
        )
        box, x, y = size.get_extents(), float(text.get("x")), float(text.get("y"))
        left = x - {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")] * box.width
        yield text.text, left, left + box.width, y - box.y1, y - box.y0


# catches: a line through a heading or a rate, a rate that covers its mark, another text or nothing
@pytest.mark.parametrize("rates", [(0.231, 0.972), (0.449, 0.724), (0.0, 1.0), (0.31, 0.86)])
@pytest.mark.parametrize("half", [0.002, 0.04, 0.2])
def test_no_line_goes_through_a_text(rates, half):
    rows = [
        dict(
            model=model,
            temperature=t,
            win_rate=rate,
            low=max(rate - half, 0.0),
            high=min(rate + half, 1.0),
            malformed=1.0,
        )
        for t in (0.01, 1.0)
        for model, rate in zip(("sft", "ppo"), rates)
    ]
    root = ElementTree.fromstring(gain_picture(rows))
    lines = [
        tuple(map(float, part))
        for path in root.iter("path")
        if path.get("class") in ("grid", "half")
        for part in re.findall(r"M([\d.]+) ([\d.]+)V([\d.]+)", path.get("d"))
    ]
    bars = [
        (float(a), float(y), float(b))
        for path in root.iter("path")
        for a, y, b in re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)", path.get("d"))
    ]
    assert {x for x, *_ in lines} == {LEFT, LEFT + WIDTH / 2, LEFT + WIDTH} and len(bars) == 4
    found = [*boxes(root)]
    for name, left, right, top, bottom in found:
        assert left >= 0 and right <= EDGE, name
        for x, above, below in lines:
            assert not (left - 2 < x < right + 2 and above < bottom and below > top), (name, x)
        for a, y, b in bars:
            assert not (left < b and right > a and top < y < bottom), name
    for one, other in combinations(found, 2):
        apart = one[1] > other[2] or other[1] > one[2] or one[3] > other[4] or other[3] > one[4]
        assert apart, (one[0], other[0])


@pytest.mark.parametrize(
    "value, text", [(0.0, "0.00"), (0.004, "≈0"), (-0.004, "≈0"), (0.0051, "0.01"), (-1.5, "−1.50")]
)
def test_a_number_near_zero_is_not_zero(value, text):
    assert number_text(value) == text
    assert exact("≈0", 0.004) == '<span title="0.004">≈0</span>'
