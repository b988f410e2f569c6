"""Files that appear whole, and JSON lines that a killed run has cut off."""

from __future__ import annotations

import json
import math

import pytest

from rlhf_nb.base.files import (
    append_jsonl,
    parse_json,
    read_jsonl,
    strict_json,
    writable,
    write_text_atomic,
    yaml_text,
)


# catches: a file that is empty for a moment, half a file after an error, a temporary file left over
def test_text_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    write_text_atomic(path, "один\n")
    assert path.read_text(encoding="utf-8") == "один\n" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(UnicodeEncodeError):
        write_text_atomic(path, "half\ud800")
    assert path.read_text(encoding="utf-8") == "один\n"
    with pytest.raises(OSError):
        write_text_atomic(tmp_path, "in the place of a folder")
    assert list(tmp_path.iterdir()) == [path] and not tmp_path.with_suffix(".partial").exists()


# catches: work that is done before it turns out that its page cannot be written
def test_a_path_that_cannot_be_written_is_named_with_its_option(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("theirs")
    with pytest.raises(ValueError, match="--output .*file exists, and rlhf-nb did not write it"):
        writable(tmp_path / "file", "--output")
    (tmp_path / "old.HTML").touch()
    writable(tmp_path / "old.HTML", "--output")
    writable(tmp_path / "new" / "folder" / "page.html", "--output")
    with pytest.raises(ValueError, match="--output .* is a folder: give a file, such as "):
        writable(tmp_path, "--output")
    with pytest.raises(ValueError, match="--output .*page.html: .*file is no folder that can be"):
        writable(tmp_path / "file" / "page.html", "--output")
    monkeypatch.setattr("os.access", lambda *given: False)
    with pytest.raises(ValueError, match="is no folder that can be written to"):
        writable(tmp_path / "page.html", "--output")


# catches: JSON that jq and JavaScript refuse
def test_json_for_other_programs_has_no_nan():
    numbers = dict(a=[1.5, math.nan, -math.inf], b=dict(c=math.inf), d="NaN")
    assert json.loads(strict_json(numbers), parse_constant=pytest.fail) == dict(
        a=[1.5, None, None], b=dict(c=None), d="NaN"
    )


# catches: a row that is lost because its line has no end, a torn line that stops the run, one that
# the next row is written onto
@pytest.mark.parametrize(
    "text, rows",
    [
        ("", []),
        ('{"a": 1}\n{"a": 2}\n', [1, 2]),
        ('{"a": 1}\n\n{"a": 2}', [1, 2]),
        ('{"a": 1}\n{"a"', [1]),
        ('{"a', []),
    ],
)
def test_a_last_line_that_was_cut_off_is_skipped(tmp_path, text, rows):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    assert [row["a"] for row in read_jsonl(path)] == rows
    append_jsonl(path, dict(a=9))
    assert [row["a"] for row in read_jsonl(path)] == [*rows, 9]
    append_jsonl(tmp_path / "new.jsonl", dict(a=1))
    assert read_jsonl(tmp_path / "new.jsonl") == [dict(a=1)]


# catches: a broken line in the middle that is skipped in silence, an error that does not say where
def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\nhalf\n{"a": 2}\n')
    with pytest.raises(ValueError, match="a.jsonl, line 3 is not JSON"):
        read_jsonl(path)


LAUGHS = "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9))


# catches: what is small on disk and fills the memory, a circle, a stack that overflows
@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 lol\n" + LAUGHS,
        f"a: &a {'y' * 9000}\nb: [{', '.join(['*a'] * 9)}]",
        *("a: &a [*a]", "a: " + "{b: " * 5000, "\n".join(" " * i + "a:" for i in range(300))),
        "a: " + "y" * 2**16,
    ],
    ids=["laughs", "repeats", "circle", "deep", "indented", "long"],
)
def test_settings_are_small(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match="its aliases written out: give a file of settings"):
        yaml_text(tmp_path / "a.yaml")


def test_usual_settings_are_read(tmp_path):
    for text in ("", "# nothing\n", "a: &a [1, 2]\nb: [*a, *a]\nc: {d: 4}\n"):
        (tmp_path / "a.yaml").write_text(text)
        assert yaml_text(tmp_path / "a.yaml") == text


# catches: depth that json reads and the next walk through it does not
def test_json_is_not_deep():
    assert parse_json("[" * 100 + "]" * 100)
    for text in ("[" * 101 + "]" * 101, '{"a":' * 400 + "1" + "}" * 400, "[" * 10**5):
        with pytest.raises(ValueError, match="nested more than 100 levels"):
            parse_json(text)
