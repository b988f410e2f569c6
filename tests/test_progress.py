"""`rlhf-nb progress`: what it finds in notebooks that were saved and never run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_nb import cli
from rlhf_nb.checks import EXERCISES
from rlhf_nb.cli.exercise_pages import OPEN, SOLVED, UNCHECKED, found_in
from rlhf_nb.exercises import progress as record

ROOT = Path(__file__).resolve().parent.parent
STUB = "my_gae = None  # your turn\ncheck_gae(my_gae)"
ASKED = "## The recursion\n\n**Exercise** · medium · 10 minutes · why. Write `my_gae`."


def markdown(text: str) -> dict:
    return {"cell_type": "markdown", "source": text.splitlines(keepends=True), "metadata": {}}


def code(source: str, verdict: str = "") -> dict:
    "A cell, with the output that a checker leaves."
    shown = {"output_type": "execute_result", "data": {"text/plain": [verdict + "\n", "  x = 1"]}}
    cell = {"cell_type": "code", "source": source, "metadata": {}}
    return {**cell, "outputs": [shown] if verdict else []}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    "A folder of notebooks, and a function that saves one in it."
    monkeypatch.delenv("RLHF_NB_PROGRESS", raising=False)
    (tmp_path / "settings.ini").touch()

    def save(name, *cells):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"cells": list(cells), "nbformat": 4}), encoding="utf-8")
        return tmp_path

    return save


@pytest.mark.parametrize(
    "verdict, state",
    [
        ("", OPEN),
        ("○ my_gae is still None: write the function.", OPEN),
        ("✗ gamma and lam are swapped.", OPEN),
        ("✓ Each token has its own surprise.", SOLVED),
    ],
)
def test_a_kept_output_tells_what_is_solved(copy, verdict, state):
    folder = copy("course/10_gae.ipynb", markdown(ASKED), code(STUB, verdict))
    (one,) = found_in(folder)
    assert (one.page, one.exercise, one.minutes) == ("course/10_gae", "my_gae", 10)
    assert one.state == state and one.difficulty == "medium"


def test_a_recorded_pass_counts_without_an_output(copy):
    "catches: a pass that is lost when outputs are cleared, or when another folder is current"
    folder = copy("course/10_gae.ipynb", markdown(ASKED), code(STUB))
    (folder / record.FILE).write_text('{"my_gae": "2026-05-01"}', encoding="utf-8")
    for part in (folder, folder / "course"):
        (one,) = found_in(part)
        assert (one.state, one.day) == (SOLVED, "2026-05-01")


def test_exercises_without_a_checker_are_listed(copy):
    """catches: a lesson's check, of another function or before the exercise, that is taken for the
    reader's"""
    folder = copy(
        "1.ipynb",
        code("check_gae(my_other)", "✓ yes"),
        markdown("# A page\n\n## A part\n\n**Exercise** · easy · 5 minutes · it pays. Think."),
        markdown(ASKED),
        code("x = 1"),
        code(STUB, "✗ no"),
        code("check_gae(gae)", "✓ yes"),
    )
    first, second = found_in(folder)
    assert (first.exercise, first.state, first.minutes) == ("A part", UNCHECKED, 5)
    assert (second.exercise, second.state, second.minutes) == ("my_gae", OPEN, 10)


def test_checkpoints_of_jupyter_are_no_pages(copy):
    copy(".ipynb_checkpoints/1-checkpoint.ipynb", markdown(ASKED), code(STUB, "✓ yes"))
    folder = copy("1.ipynb", markdown(ASKED), code(STUB))
    assert [one.state for one in found_in(folder)] == [OPEN]


def test_every_exercise_of_the_book_is_found():
    "catches: a statement or a checker cell in a form that the command does not read"
    found = found_in(ROOT / "nbs")
    names = [one.exercise for one in found if one.state != UNCHECKED]
    assert sorted(names) == sorted(one.name for one in EXERCISES)
    assert all(one.exercise and 0 < one.minutes <= 60 for one in found)


def test_what_is_kept_in_the_repository_is_unsolved():
    "catches: a solved exercise that was committed"
    found = found_in(ROOT / "nbs")
    assert [one.exercise for one in found if one.state == SOLVED and not one.day] == []


def test_the_table_has_a_line_for_each_and_a_total(copy, capsys):
    folder = copy("course/10_gae.ipynb", markdown(ASKED), code(STUB, "✓ yes"))
    copy("course/11_losses.ipynb", markdown(ASKED), code(STUB.replace("gae", "loss"), "✗ no"))
    assert cli.main(["progress", str(folder)]) == 0
    out = capsys.readouterr().out
    for words in ("page", "minutes", "course/10_gae", "my_gae", "✓ solved", "· open"):
        assert words in out
    assert "1 of 2 solved, about 10 minutes to go" in out


def test_json_is_for_programs(copy, capsys):
    folder = copy("10_gae.ipynb", markdown(ASKED), code(STUB, "✓ yes"))
    assert cli.main(["progress", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["count"] == {SOLVED: 1, OPEN: 0, UNCHECKED: 0}
    assert printed["exercises"][0]["exercise"] == "my_gae"


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("nowhere", None, "nowhere is no folder: give the one that your notebooks are in"),
        (".", None, "has no notebook with an exercise"),
        (".", "{", "1.ipynb is no notebook that can be read"),
        (".", "[]", "1.ipynb is no notebook that can be read"),
        (".", '{"cells": [{}]}', "1.ipynb is no notebook that can be read"),
    ],
)
def test_a_folder_without_pages_is_one_line(tmp_path, monkeypatch, capsys, name, content, words):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "1.ipynb").write_text(content, encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    assert cli.main(["progress", name]) == 2
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and not out
    assert sorted(tmp_path.iterdir()) == before
