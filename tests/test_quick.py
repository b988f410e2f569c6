"What `make quick` chooses for a change, in a small project and in this one."

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from quick import changed, chosen

FILES = {
    "rlhf_nb/__init__.py": "",
    "rlhf_nb/one.py": "",
    "rlhf_nb/ui/__init__.py": "",
    "rlhf_nb/ui/two.py": "from ..one import x",
    "tests/helper.py": "from rlhf_nb import one",
    "tests/test_one.py": "",
    "tests/test_wide.py": "import rlhf_nb.one, rlhf_nb.ui.two",
    "tests/test_late.py": "def test():\n    from rlhf_nb.one import x",
    "tests/test_helped.py": "import helper",
    "tests/test_two.py": "from rlhf_nb.ui import two; 'page.css'",
    "tests/test_none.py": "import rlhf_nb",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    cells = [dict(cell_type="code", source=["#| default_exp one"])]
    (tmp_path / "01_one.ipynb").write_text(json.dumps(dict(cells=cells)))
    return tmp_path


# catches: an import inside a function that is not seen, a helper of tests that hides who uses it,
# a relative import, a test that is found by its name alone, a notebook whose module is not tried
@pytest.mark.parametrize(
    "name, first, second",
    [
        ("rlhf_nb/one.py", ["one", "helped", "late", "wide"], ["two"]),
        ("01_one.ipynb", ["one", "helped", "late", "wide"], ["two"]),
        ("rlhf_nb/ui/two.py", ["two", "wide"], []),
        ("tests/helper.py", ["helped"], []),
        ("tests/test_none.py", ["none"], []),
        ("rlhf_nb/ui/static/page.css", ["two"], []),
        ("README.md", [], []),
    ],
)
def test_who_tries_what(project, name, first, second):
    assert chosen(project, [name]) == (
        [f"tests/test_{stem}.py" for stem in first],
        [f"tests/test_{stem}.py" for stem in second],
        [name] if name.endswith(".ipynb") else [],
    )


# catches: a file that is new to git, committed on the branch, or edited only, and is not seen
def test_what_has_changed(tmp_path):
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    git("init", "-b", "main")
    for name in ("same", "edited", "gone"):
        (tmp_path / name).write_text(name)
    git("add", ".")
    git("commit", "-m", "first")
    git("checkout", "-b", "branch")
    (tmp_path / "committed").write_text("")
    git("add", ".")
    git("commit", "-m", "second")
    (tmp_path / "edited").write_text("otherwise")
    (tmp_path / "gone").unlink()
    (tmp_path / "new").write_text("")
    assert changed(tmp_path, "main") == ["committed", "edited", "new"]
    with pytest.raises(SystemExit, match="no-such-branch"):
        changed(tmp_path, "no-such-branch")
