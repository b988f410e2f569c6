"""viz: what a parser (not a regular expression) finds in the markup, what a colour-blind or blind
reader gets, what the figures hold."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from markup import Reader, texts

from rlhf_nb.ui.viz import (
    Html,
    curves,
    episode_table,
    signal_table,
    signed_number,
    tint,
    token_strip,
    visible,
    visible_token,
)

quick = settings(max_examples=60, deadline=None)
ALLOWED = {"div", "table", "caption", "tr", "th", "td", "bdi"}
ATTRIBUTES = {"style", "scope", "tabindex", "role", "aria-label", "title"}
ODD = [*"ab <>&\"'/=\n\t\r\x00\x1b\u202e\u2066\u200b\xa0\u2028\u2029\ufffdש🐈", "<b>", "</td>"]
nasty = st.lists(st.sampled_from(ODD), max_size=8).map("".join)
numbers = st.floats(-1e6, 1e6) | st.sampled_from(
    [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-9, -1e-300]
)


def style(cell):
    return dict(part.split(":", 1) for part in cell[1].get("style", "").split(";") if part)


def check_markup(shown):
    """Holds for every renderer: known tags and attributes alone, headers with a scope, readable
    colours, nothing fetched, no lone surrogate."""
    assert isinstance(shown, Html) and isinstance(shown, str) and type(shown._repr_html_()) is str
    reader = Reader(shown)
    assert {tag for tag, _ in reader.seen} <= ALLOWED
    assert {name for _, attributes in reader.seen for name in attributes} <= ATTRIBUTES
    assert "url(" not in "".join(attributes.get("style", "") for _, attributes in reader.seen)
    for table in reader.cells:
        assert len({len(row) for row in table}) == 1
        for cell in (cell for row in table for cell in row):
            if cell[0] == "th":
                assert cell[1]["scope"] in ("row", "col")
            if cell[2]:
                assert style(cell)["color"] == "inherit"  # of the page's theme, light or dark
        assert [cell[1].get("scope") for cell in table[0][1:]] == ["col"] * (len(table[0]) - 1)
        assert all(row[0][1].get("scope") == "row" for row in table[1:])
    shown.encode("utf-8"), repr(shown).encode("utf-8")
    assert not set("\u202e\u2066\u200b\x00\x1b") & set(shown + repr(shown))
    return reader


@quick
@given(numbers, st.floats(0, 1e6))
def test_colour_is_the_formula(value, vmax):
    # catches: an unclamped channel, ends swapped, nan or inf through round(), 0 / 0, a map that is
    # not linear. That ink on it can be read: tests/browser/test_static.py
    colour = tint(value, vmax)
    if vmax == 0 or value != value or value == 0:
        assert colour == "transparent"
    elif colour != "transparent":
        assert colour[:7] == ("#cc6600" if value > 0 else "#2882dc")
    if vmax > 0 and value == value:
        got = 0 if colour == "transparent" else int(colour[7:], 16)
        assert abs(got - 127.5 * min(abs(value) / vmax, 1)) <= 0.5 + 1e-9


@quick
@given(numbers)
def test_a_number_keeps_its_sign(value):
    # catches: "-0.00", a sign lost in rounding, a hyphen for a minus, nan with a sign
    text = signed_number(value)
    if 0 < abs(value) < 0.005:
        assert text == "≈0"
    elif value > 0:
        assert text[0] == "+"
    elif value < 0:
        assert text[0] == "−"
    else:
        assert text in ("0", "nan")
    assert "-" not in text
    if np.isfinite(value) and abs(value) >= 0.005:
        read = float(text.replace("−", "-").replace(",", ""))
        assert read == pytest.approx(value, abs=0.0051 if abs(value) < 1000 else 0.51, rel=1e-9)


@pytest.mark.parametrize(
    "values, texts",
    [
        ((None, True, 0, 0.0, -3, 12345), ["", "true", "0", "0", "−3", "12,345"]),
        ((0.005, 0.0049, -0.5, 999.994), ["+0.01", "≈0", "−0.50", "+999.99"]),
        ((1234.5, -1e6, 12_345_678.0), ["+1,234", "−1.0e+06", "+1.2e+07"]),
    ],
)
def test_numbers_by_hand(values, texts):
    assert [*map(signed_number, values)] == texts


@quick
@given(nasty)
def test_nothing_invisible_is_left(text):
    # catches: a forgotten category (format, control, separators, surrogates), an empty header
    token = visible_token(text)
    assert token and token.isprintable() and " " not in token and "\n" not in token
    assert visible(text).replace("\n", "").isprintable()


def test_characters_that_people_write_stay():
    # catches: escaping the joiners of emoji and of Persian, or letters of right-to-left scripts
    for text in ("👩‍👧", "می‌خواهم", "שלום", "naïve café", '<s> & "x"'):
        assert visible(text) == text
    assert visible("a\nb\tc") == "a↵\nb⇥c" and visible_token("\u202e") == "⟨U+202E⟩"


# ---------------------------------------------------------------- strip and table
@quick
@given(st.lists(st.tuples(nasty, numbers, st.booleans()), max_size=30), nasty)
def test_strip_holds_every_token_and_number_in_order(items, name):
    # catches: unescaped text or name, a token lost at a line break, numbers under the wrong token,
    # padding shown
    tokens, values, mask = map(list, zip(*items)) if items else ([], [], [])
    reader = check_markup(token_strip(tokens, values, mask, name=name or "value"))
    assert all(len(table) == 2 for table in reader.cells)
    heads = [text for table in reader.cells for text in texts(table)[0][1:]]
    below = [text for table in reader.cells for text in texts(table)[1][1:]]
    assert heads == [visible_token(t) if k else "·" for t, k in zip(tokens, mask)]
    assert below == [
        signed_number(float(np.float32(v))) if k else "·" for v, k in zip(values, mask)
    ]
    for table in reader.cells:
        for cell, text in zip(table[1][1:], texts(table)[1][1:]):
            if text[0] in "·n0":
                assert style(cell)["background"] == "transparent"
            exact = float(cell[1].get("title", 0))  # a rounded number is whole on hover
            assert not text.startswith("≈") or 0 < abs(exact) <= 0.005  # seven digits of a float32


@quick
@given(st.lists(st.tuples(nasty, numbers, st.booleans()), min_size=1, max_size=12), numbers, nasty)
def test_padding_never_shows(items, junk, pad):
    # catches: a pad token's text or number that reaches the page, a scale or a line break that
    # depends on it
    tokens, values, mask = map(list, zip(*items))
    dirty = (
        [v if k else junk for v, k in zip(values, mask)],
        [t if k else pad for t, k in zip(tokens, mask)],
    )
    values, shown = torch.tensor(values), torch.tensor(mask)
    assert token_strip(dirty[1], dirty[0], mask) == token_strip(tokens, values, mask)
    assert signal_table(dirty[1], shown, x=torch.tensor(dirty[0])) == signal_table(
        tokens, shown, x=values
    )


def test_renderers_are_pure():
    # catches: an argument changed in place, markup that depends on what was drawn before
    values, mask = torch.tensor([1.0, float("inf")]), torch.tensor([True, False])
    draw = lambda: (
        token_strip(["a", "\n"], values, mask),
        signal_table(["a", "b"], mask, x=values),
    )
    first = draw()
    token_strip(["z"], [1e9], vmax=3.0)
    assert first == draw() and values.tolist() == [1.0, float("inf")]
    assert mask.tolist() == [True, False]


def test_strip_breaks_lines_like_text():
    reader = check_markup(token_strip(["word"] * 50, [0.1] * 50))
    widths = [len(table[0]) - 1 for table in reader.cells]
    assert sum(widths) == 50 and max(widths) <= 12 and len(widths) >= 4
    assert (
        len(check_markup(token_strip(["x" * 300, "y"], [1.0, 2.0])).cells) == 2
    )  # catches: an empty first line


def test_strip_scale():
    # catches: padding in the scale, nan as the scale, vmax ignored, whole numbers left uncoloured
    full = "#cc660080"
    assert full in token_strip(["a", "b"], [1.0, 1e9], [True, False])
    assert full in token_strip(["a", "b"], [1.0, float("nan")])
    assert full in token_strip(["a"], [float("inf")], vmax=1.0)
    assert full not in token_strip(["a"], [1.0], vmax=10.0)
    assert full in token_strip(["a", "b"], [0, 1])
    assert "+1.00" in token_strip(["a", "b"], [0, 1])
    for bad in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="vmax"):
            token_strip(["a"], [1.0], vmax=bad)


def test_strip_without_numbers_and_without_tokens():
    reader = check_markup(token_strip(["a", "b"]))
    assert texts(reader.cells[0]) == [["token", "a", "b"]] and not reader.captions
    check_markup(token_strip([], []))


@quick
@given(st.lists(st.tuples(nasty, numbers, numbers, st.booleans()), min_size=1, max_size=12))
def test_signal_table_is_the_numbers(items):
    # catches: rows and columns mixed up, one colour scale for all rows, padding that sets it
    tokens, a, b, mask = map(list, zip(*items))
    a, b = torch.tensor([a], dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    table = check_markup(signal_table(tokens, torch.tensor([mask]), first=a, second=b)).cells[0]
    assert texts(table)[0] == [""] + [visible_token(t) if k else "·" for t, k in zip(tokens, mask)]
    for line, name, row in zip(table[1:], ("first", "second"), (a[0], b)):
        assert [cell[2] for cell in line] == [name] + [
            signed_number(v) if k else "·" for v, k in zip(row.tolist(), mask)
        ]
        real = [abs(v) for v, k in zip(row.tolist(), mask) if k and np.isfinite(v)]
        assert [style(c)["background"] for c in line[1:]] == [
            tint(v, max(real, default=0)) if k else "transparent"
            for v, k in zip(row.tolist(), mask)
        ]


def test_signals_of_every_kind():
    # catches: bfloat16 or a gradient that numpy refuses, ids drawn as signals
    x = torch.tensor([0.5, -1.0], dtype=torch.bfloat16, requires_grad=True)
    shown = check_markup(
        signal_table(
            half=x,
            ids=torch.tensor([7, 11]),
            mask_row=torch.tensor([True, False]),
            plain=[0.25, 2.0],
            array=np.array([1.0, 2.0]),
        )
    )
    assert texts(shown.cells[0]) == [
        ["", "0", "1"],
        ["half", "+0.50", "−1.00"],
        ["ids", "7", "11"],
        ["mask_row", "true", "false"],
        ["plain", "+0.25", "+2.00"],
        ["array", "+1.00", "+2.00"],
    ]
    plain = {style(c)["background"] for row in shown.cells[0][2:4] for c in row[1:]}
    assert plain == {"transparent"}
    assert x.requires_grad and x.dtype == torch.bfloat16


def test_what_does_not_fit_is_refused_with_a_mend():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"reward has shape \[2, 3\].*reward\[0\]"):
        signal_table(reward=x)
    with pytest.raises(ValueError, match="'value': 2"):
        signal_table(reward=x[0], value=x[0, :2])
    with pytest.raises(ValueError, match="'tokens': 1"):
        signal_table(["a"], reward=x[0])
    with pytest.raises(ValueError, match="'mask': 2"):
        token_strip(["a"] * 3, x[0], mask=[True, False])
    with pytest.raises(ValueError, match="at least one"):
        signal_table(["a"])


def test_plain_text_is_the_same_table():
    # catches: markup or escapes in the text, columns that do not line up
    assert repr(
        signal_table(
            ["<s>", " a"],
            torch.tensor([True, False]),
            reward=torch.tensor([0.5, 9.0]),
            kl=torch.tensor([-10.25, 9.0]),
        )
    ).splitlines() == [
        "· is padding",
        "           <s>  ·",
        "reward   +0.50  ·",
        "    kl  −10.25  ·",
    ]
    assert repr(Html("<b>bold</b> &amp; plain")) == "bold & plain" and repr(Html("")) == ""


# ---------------------------------------------------------------- episodes
@quick
@given(
    st.lists(
        st.builds(lambda q, s, n: dict(query=q, score=s, n=n), nasty, numbers, st.integers(-5, 5)),
        min_size=1,
        max_size=6,
    ),
    nasty,
)
def test_episode_table_drops_and_changes_nothing(rows, title):
    before = [dict(row) for row in rows]
    reader = check_markup(episode_table(rows, title=title))
    assert texts(reader.cells[0]) == [["", "query", "score", "n"]] + [
        [str(i), visible(r["query"]), signed_number(r["score"]), signed_number(r["n"])]
        for i, r in enumerate(rows)
    ]
    assert repr(rows) == repr(before)


def test_episode_table_values_and_columns():
    # catches: numpy and tensor scalars shown as text, a missing value that shifts the row, a
    # hundred rows cut to some
    rows = [dict(a=np.float32(-0.5), b=torch.tensor(2.0), c=None), dict(a=np.int64(3), d=[1, 2])]
    table = check_markup(episode_table(rows)).cells[0]
    assert texts(table) == [
        ["", "a", "b", "c", "d"],
        ["0", "−0.50", "+2.00", "", ""],
        ["1", "3", "", "", "[1, 2]"],
    ]
    assert style(table[1][1])["text-align"] == "right"
    assert style(table[2][4])["text-align"] == "left"
    assert texts(check_markup(episode_table(rows, ["b", "a"])).cells[0])[0] == ["", "b", "a"]
    assert len(check_markup(episode_table([dict(a=1.0)] * 300)).cells[0]) == 301
    assert "0 rows" in check_markup(episode_table([])).captions[0]
    with pytest.raises(ValueError, match="'score'.*'a', 'b'"):
        episode_table(rows, ["score"])


def test_episode_table_says_how_many_there_are():
    # catches: the first rows of many passed off as all of them
    rows = [dict(a=1.0)] * 2
    assert [
        check_markup(episode_table(rows, of=of, title="T")).captions[0] for of in (None, 2, 12345)
    ] == ["T (2 rows)", "T (2 rows)", "T (first 2 of 12,345 rows)"]
    assert check_markup(episode_table(rows[:1])).captions == ["1 row"]


# ---------------------------------------------------------------- curves
def logs():
    return pd.DataFrame(
        [
            dict(run=run, seed=seed, episode=e, kl=k * e + seed, lr=0.1 if e % 2 else np.nan)
            for run, k in (("low", 1.0), ("high", 2.0))
            for seed in (0, 1, 5)
            for e in (3, 1, 2)
        ]
    )


def test_curves_draw_means_and_bands():
    # catches: a mean over runs as well, x unsorted, a band of something else than the range, run
    # names lost
    axis = curves(logs(), ["kl"]).axes[0]
    low, high = axis.get_lines()
    assert (low.get_label(), high.get_label()) == (
        "low",
        "high",
    ) and low.get_linestyle() != high.get_linestyle()
    np.testing.assert_allclose(low.get_xydata(), [[1, 3], [2, 4], [3, 5]])
    np.testing.assert_allclose(high.get_ydata(), [4, 6, 8])
    band = axis.collections[0].get_paths()[0].vertices
    assert {tuple(v) for v in band} >= {(1.0, 1.0), (1.0, 6.0), (3.0, 3.0), (3.0, 8.0)}


def test_curves_leave_gaps_out_and_smooth_nothing():
    frame = logs().query("run == 'low' and seed == 0").drop(columns="run")
    axes = curves(frame, {"learning rate": "lr", "KL": "kl"}, title="one run").axes
    assert [a.get_title() for a in axes] == ["learning rate", "KL"]
    assert axes[0].get_xlabel() == "episode"
    assert axes[0].get_lines()[0].get_xdata().tolist() == [1, 3] and not axes[1].collections
    assert axes[1].get_lines()[0].get_ydata().tolist() == [1, 2, 3]


def test_curves_leave_nothing_behind_and_can_be_saved(tmp_path):
    # catches: a figure that pyplot shows a second time, empty panels, a title or a tick that cannot
    # be drawn
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    figure = curves(
        logs().assign(episode=lambda f: f.episode * 100_000),
        ["kl", "lr", "seed", "episode"],
        ncols=3,
    )
    assert plt.get_fignums() == before and len(figure.axes) == 4
    figure.savefig(tmp_path / "curves.png")
    assert "300,000" in {t.get_text() for t in figure.axes[0].get_xticklabels()}


def test_curves_refuse_what_is_not_there():
    for columns, x in ((["nope"], "episode"), (["kl"], "step"), ([], "episode")):
        with pytest.raises(ValueError, match="'kl'"):
            curves(logs(), columns, x=x)


def test_curves_survive_an_empty_metric():
    curves(logs().assign(never=np.nan), ["never", "kl"]).canvas.draw()
