"""The explorers of the site show what the pages' own functions draw today, and none is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_nb.ui.explore import Explorer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
from collect import Project, missing_explorers

SITE = Project(ROOT)
COURSE = ("01", "02", "05", "08", "09", "10", "11", "15")  # of the course, all have an explorer


# catches: an explorer without a title, which the site shows as a picture that holds still
def test_every_explorer_of_the_course_is_on_the_site():
    assert {name[:2] for name in SITE.explorer_pages} >= {*COURSE}
    for path in (ROOT / "docs" / "explorers").iterdir():
        assert path.name.removesuffix(".json.gz") in SITE.explorer_pages


# catches: a frame half filled, a preset that is the start, two that are the same
def test_an_explorer_has_a_question_and_three_presets():
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


def made(draw=lambda lam, kind: f"<p>{lam:.2f} {kind}</p>", **given) -> Explorer:
    settings = dict(title="Frame", presets=dict(none=dict(lam=0.0))) | given
    return Explorer(draw, lam=(0.0, 1.0, 0.5), kind=["k1", "k2"], **settings)


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
