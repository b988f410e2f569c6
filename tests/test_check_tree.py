"The cell that opens a page in Colab, run for real: the one thing that check_tree.py writes for readers."

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from notebooks import NOTEBOOKS

PAGE = NOTEBOOKS["10_gae"]

RUN_CELL = """
import json, os, sys, types
from IPython.core.interactiveshell import InteractiveShell
shell, asked = InteractiveShell.instance(), []
shell.register_magic_function(lambda line: asked.append((line, os.getcwd())), "line", "pip")
if {colab}:
    sys.modules["google.colab"] = types.ModuleType("google.colab")
for _ in range({times}):
    shell.run_cell({source!r}, silent=True).raise_error()
print(json.dumps([asked, os.getcwd()]))
"""


# catches: a cell that is no code, that installs on the reader's own machine, that clones elsewhere
# than it installs from, that fails where it is run again, that leaves a page far from its files.
# git, the clone and the shell are real; the address leads to a folder here, and pip, which needs an
# index, only writes down what it was asked.
@pytest.mark.parametrize("colab", [True, False])
def test_the_cell_for_colab(tmp_path, colab):
    repository, content = tmp_path / "repository", tmp_path / "content"
    folder = repository / "nbs" / PAGE.parent.name
    folder.mkdir(parents=True)
    content.mkdir()
    (folder / PAGE.name).write_text(PAGE.read_text())
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-qb", "main"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=repository, check=True)
    (cell,) = [c for c in json.loads(PAGE.read_text())["cells"] if c["id"] == "colab-setup"]
    env = os.environ | {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/rlhf-nb/rlhf_nb",
        "IPYTHONDIR": str(tmp_path),
        "GIT_ALLOW_PROTOCOL": "file",
    }
    source = "".join(cell["source"]).replace("/content", str(content))
    program = RUN_CELL.format(colab=colab, times=2, source=source)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=content, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    asked, where = json.loads(done.stdout.splitlines()[-1])
    if colab:
        assert asked == [["install --quiet ./rlhf_nb", str(content)]] * 2
        assert Path(where) == content / "rlhf_nb" / "nbs" / PAGE.parent.name
        assert (Path(where) / PAGE.name).is_file()
    else:
        assert not asked and Path(where) == content and not list(content.iterdir())
