"""The explorers of the site show what the pages' own functions draw today, and none is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_nb.ui.explore import Explorer, pack

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
from collect import Project, missing_explorers
from explorers import stale

SITE = Project(ROOT)
COURSE = ("01", "02", "05", "08", "09", "10", "11")  # of the course, all have an explorer


def test_every_explorer_of_the_course_is_on_the_site():
    "catches: an explorer without a title, which the site shows as a picture that holds still"
    assert {name[:2] for name in SITE.explorer_pages} >= {*COURSE}
    for path in (ROOT / "docs" / "explorers").iterdir():
        assert path.name.removesuffix(".json.gz") in SITE.explorer_pages


def test_an_explorer_has_a_question_and_three_presets():
    "catches: a frame half filled, a preset that is the start, two that are the same"
    for name in SITE.explorer_pages:
        assert not missing_explorers(SITE, name)
        for grid in SITE.explorers(name).values():
            start = [dial["start"] for dial in grid["dials"]]
            states = [start, *(preset["at"] for preset in grid["presets"])]
            assert len(states) == 4 and len({*map(tuple, states)}) == 4, name
            assert grid["title"] and grid["question"].endswith("?"), name


def test_the_files_are_small():
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs" / "explorers").iterdir()}
    assert max(sizes.values()) < 150_000 and sum(sizes.values()) < 700_000, sizes


# catches: a function, a number or a control that was changed after the grid was drawn
@pytest.mark.slow  # as the site: it runs all of these pages
def test_what_is_kept_is_what_the_pages_draw():
    command = [sys.executable, ROOT / "docs" / "explorers.py", "--check", *SITE.explorer_pages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.slow
def test_a_page_that_fails_makes_the_check_fail():
    "catches: a check of several pages that forgets one that fails, or fails without its name"
    command = [sys.executable, ROOT / "docs" / "explorers.py", "--check", "no_page", "02_masks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "KeyError: 'no_page'" in done.stderr


def made(draw=lambda lam, kind: f"<p>{lam:.2f} {kind}</p>", **given) -> Explorer:
    settings = dict(title="Frame", presets=dict(none=dict(lam=0.0))) | given
    return Explorer(draw, lam=(0.0, 1.0, 0.5), kind=["k1", "k2"], **settings)


@pytest.mark.parametrize(
    "changed, told",
    [
        (made(), ""),
        (made(lambda lam, kind: f"<p>{lam:.2f} {kind} now</p>"), "is drawn otherwise"),
        (made(lambda lam, kind: f"<p>{lam * (kind == 'k1'):.2f} {kind}</p>"), "is drawn otherwise"),
        (made(title="Another"), "title is another"),
        (made(presets={}), "presets is another"),
        (made(stops=dict(lam=[0.0, 1.0])), "dials is another"),
    ],
)
def test_a_stale_grid_is_found(changed, told):
    "catches: a check that compares nothing, or the start alone"
    kept = dict(made().grid(), cell="a")
    found = stale(kept, changed)
    assert bool(found) == bool(told) and told in "".join(found)


def test_a_picture_of_another_run_of_the_same_is_not_stale():
    "catches: a check that fails on each new processor; one that then lets everything pass"

    def drawn(line: int, word: str = "", colour: str = "red") -> Explorer:
        path = f"<path d=%22M {line}%22 style=%22stroke: {colour}%22>"
        return made(lambda lam, kind: f'<img alt="{kind}{word}" src="{path}">')

    kept = dict(drawn(1).grid(), cell="a")
    assert stale(kept, drawn(2)) and not stale(kept, drawn(2), trained=True)
    assert stale(kept, drawn(2, " now"), trained=True)
    assert stale(kept, drawn(2, colour="blue"), trained=True)
    assert stale(kept, made(lambda lam, kind: "<p>no picture</p>"), trained=True)
    assert stale(dict(made().grid(), cell="a"), made(lambda lam, kind: "<p>b</p>"), trained=True)


def page(folder: Path, *cells: str) -> Project:
    "A repository of one page."
    (folder / "nbs").mkdir()
    (folder / "settings.ini").write_text("[DEFAULT]\nnbs_path = nbs\nlib_path = lib\n")
    made = [
        dict(cell_type="code", id=f"c{i}", source=source, outputs=[], metadata={})
        for i, source in enumerate(cells)
    ]
    (folder / "nbs" / "10_page.ipynb").write_text(json.dumps(dict(cells=made, metadata={})))
    return Project(folder)


def test_a_grid_that_is_missing_or_left_over_is_found(tmp_path):
    "catches: a page of the site whose explorer is dead, or moved by the states of another cell"
    framed = 'Explorer(\n    render,\n    title="Frame",\n)'
    project = page(tmp_path, framed, "Explorer(render, x=(0, 1, 0))", "title = 1")
    assert project.explorer_pages == ["10_page"]
    (told,) = missing_explorers(project, "10_page")
    assert "cell c0 is not drawn: run `python docs/explorers.py 10_page`" in told
    path = project.explorer_file("10_page")
    path.parent.mkdir(parents=True)
    path.write_bytes(pack([dict(cell="c0"), dict(cell="c2")]))
    (told,) = missing_explorers(project, "10_page")
    assert "no explorer in cell c2 any more" in told
