"""Pages as a reader runs them: with their slow cells, and at full size. nbdev_test leaves out cells
marked `#| slow`, and some pages are smaller while it runs them (IN_TEST)."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from notebooks import NOTEBOOKS

# Everybody's first page is run for every change, the others weekly.
FIRST = "00_tour"
SHORTER = re.compile(r'"#\| ?slow|IN_TEST')
SHORT = [name for name, path in NOTEBOOKS.items() if SHORTER.search(path.read_text("utf-8"))]
PROGRAM = """
import os, sys
from pathlib import Path
from execnb.shell import CaptureShell
from nbdev.process import NBProcessor

page, ran = Path(sys.argv[1]), []
def left_out(cell):
    marks = getattr(cell, "directives_", None) or {}
    never = cell.cell_type != "code" or "gpu" in marks or "notest" in marks
    never = never or marks.get("eval:", [""])[0].lower() == "false"
    ran.append("slow" in marks and not never)
    return never

notebook, shell = NBProcessor(page, process=True).nb, CaptureShell(page)
os.chdir(page.parent)
try:
    shell.run_all(notebook, exc_stop=True, preproc=left_out)
except Exception:
    sys.exit(shell.prettytb(fname=page))
print("slow cells:", sum(ran))
"""


def run(path) -> subprocess.CompletedProcess:
    not_a_readers = ("IN_TEST", "HF_DATASETS_DISABLE_PROGRESS_BARS")  # the tests set the second
    env = {name: value for name, value in os.environ.items() if name not in not_a_readers}
    command = [sys.executable, "-c", PROGRAM, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=3600, env=env)


# catches: a slow cell, or an assertion on a run of full size, that holds no more
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == FIRST else pytest.param(name, marks=pytest.mark.weekly) for name in SHORT],
)
def test_a_page_at_full_length(name):
    done = run(NOTEBOOKS[name])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    marked = len(re.findall(r'"#\| ?slow', NOTEBOOKS[name].read_text("utf-8")))
    assert f"slow cells: {marked}" in done.stdout
