"""The checks of the tree, on small projects of their own: one that is in order, and one for each
way of not being."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from check_tree import check_colab, check_export, check_readme, check_widgets, main, relink

ROOT = Path(__file__).resolve().parent.parent
PNG = base64.b64encode(b"\x89PNG not really").decode()


def cell(id: str, source: str, **data) -> dict:
    if not source.startswith(("#|", "1")):
        return dict(cell_type="markdown", id=id, metadata={}, source=[source])
    outputs = (
        [dict(output_type="execute_result", execution_count=None, metadata={}, data=data)]
        if data
        else []
    )
    return dict(
        cell_type="code",
        execution_count=None,
        id=id,
        metadata={},
        outputs=outputs,
        source=source.splitlines(True),
    )


def write(path: Path, *cells: dict, **metadata) -> None:
    nb = dict(cells=list(cells), metadata=metadata, nbformat=4, nbformat_minor=5)
    path.write_text(json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + "\n")


def run(command: str, folder: Path) -> None:
    subprocess.run(
        [str(Path(sys.executable).with_name(command))], cwd=folder, check=True, capture_output=True
    )


@pytest.fixture(scope="session")
def in_order(tmp_path_factory) -> Path:
    "A project with one module and an index, exported, cleaned, with its README, known to git."
    root = tmp_path_factory.mktemp("project")
    for name in ("settings.ini", "setup.py", ".gitignore"):
        shutil.copy(ROOT / name, root)
    for name in ("nbs", "rlhf_nb"):
        (root / name).mkdir()
    write(
        root / "nbs/01_one.ipynb",
        cell("a", "# One\n\n> A one."),
        cell("b", "#| default_exp one"),
        cell("c", "#| export\nONE = 1"),
    )
    write(
        root / "nbs/index.ipynb",
        cell("a", "# The house\n\n> Its map. [one](01_one.ipynb), [top](../setup.py)"),
        cell("b", "1 + 1", **{"text/plain": "2"}),
        cell("c", "#| hide\nsecret"),
        cell("d", "#| echo: false\nunseen", **{"image/png": PNG, "text/plain": "<Figure>"}),
    )
    run("nbdev_export", root)
    run("nbdev_clean", root)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    assert check_readme(root, write=True) == []
    return root


@pytest.fixture
def project(in_order, tmp_path) -> Path:
    return Path(shutil.copytree(in_order, tmp_path / "copy"))


def test_a_tree_in_order(project):
    assert [check(project) for check in (check_export, check_widgets, check_readme)] == [[], [], []]


def by_hand(root):
    (root / "rlhf_nb/one.py").write_text((root / "rlhf_nb/one.py").read_text() + "\nTWO = 2\n")


def not_exported(root):
    write(
        root / "nbs/02_two.ipynb",
        cell("a", "# Two\n\n> A two."),
        cell("b", "#| default_exp two"),
        cell("c", "#| export\nTWO = 2"),
    )


def orphan(root):
    (root / "nbs/01_one.ipynb").unlink()


def not_clean(root):
    (root / "nbs/01_one.ipynb").write_text(
        (root / "nbs/01_one.ipynb")
        .read_text()
        .replace('"metadata": {},', '"metadata": {"tags": []},', 1)
    )


def unreadable(root):
    (root / "nbs/02_two.ipynb").write_text("<<<<<<< HEAD\n")


@pytest.mark.parametrize(
    "fault, complaints",
    [
        (by_hand, ["not what the notebooks say: rlhf_nb/one.py."]),
        (not_exported, ["not what the notebooks say: rlhf_nb/_modidx.py, rlhf_nb/two.py."]),
        (
            orphan,
            [
                "not what the notebooks say: rlhf_nb/_modidx.py.",
                "exported, but no notebook makes it any more: rlhf_nb/one.py.",
            ],
        ),
        (not_clean, ["not clean: nbs/01_one.ipynb."]),
        (unreadable, ["nbdev_export fails"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_tree_out_of_order(project, fault, complaints):
    fault(project)
    before = {p: p.read_bytes() for p in project.rglob("*") if p.is_file()}
    found = check_export(project)
    assert [f[: len(c)] for f, c in zip(found, complaints)] == complaints and len(found) == len(
        complaints
    )
    assert before == {p: p.read_bytes() for p in project.rglob("*") if p.is_file()}, (
        "a check must not touch what it checks"
    )


def test_without_git(project):
    shutil.rmtree(project / ".git")
    assert check_export(project) == []
    by_hand(project)
    assert len(check_export(project)) == 1


def test_widget_state(project):
    write(
        project / "nbs/02_two.ipynb",
        cell("a", "# Two"),
        widgets={"application/vnd.jupyter.widget-state+json": {}},
    )
    assert [p.split()[0] for p in check_widgets(project)] == ["nbs/02_two.ipynb"]
    assert check_widgets(project, write=True) == [] and check_widgets(project) == []


# catches: a widget kept without its model, which a reader of the page sees as an error; and a repair
# that takes the static view with it
def test_a_widget_without_its_state(project):
    view = {
        "application/vnd.jupyter.widget-view+json": dict(model_id="x"),
        "text/html": "<p>still here</p>",
    }
    write(project / "nbs/02_two.ipynb", cell("a", "# Two"), cell("b", "1 + 1", **view))
    assert "output of cell b" in check_widgets(project)[0]
    assert check_widgets(project, write=True) == [] and check_widgets(project) == []
    kept = json.loads((project / "nbs/02_two.ipynb").read_text())["cells"][1]["outputs"][0]["data"]
    assert kept == {"text/html": "<p>still here</p>"}


def test_readme(project):
    text = (project / "README.md").read_text()
    assert text.startswith("# The house\n\n> Its map. [one](nbs/01_one.ipynb), [top](setup.py)\n")
    assert (
        "```python\n1 + 1\n```" in text
        and "secret" not in text
        and "unseen" not in text
        and "#|" not in text
    )
    (image,) = (project / "README_files").iterdir()
    assert (
        f"](README_files/{image.name})" in text
        and base64.b64encode(image.read_bytes()).decode() == PNG
    )


def edit_readme(root):
    (root / "README.md").write_text("# The house\n")


def edit_index(root):
    (root / "nbs/index.ipynb").write_text(
        (root / "nbs/index.ipynb").read_text().replace("Its map", "The map")
    )


def drop_image(root):
    next((root / "README_files").iterdir()).unlink()


def old_image(root):
    (root / "README_files/old.png").write_bytes(b"")


@pytest.mark.parametrize(
    "fault, name",
    [
        (edit_readme, "README.md"),
        (edit_index, "README.md"),
        (drop_image, "README_files/"),
        (old_image, "README_files/old.png"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_readme_out_of_date(project, fault, name):
    fault(project)
    (problem,) = check_readme(project)
    assert f"not what nbs/index.ipynb says: {name}" in problem and "make readme" in problem
    check_readme(project, write=True)
    assert check_readme(project) == []


def test_a_dead_link_and_no_index(project):
    (project / "nbs/01_one.ipynb").unlink()
    assert check_readme(project) == [
        "nbs/index.ipynb points to nbs/01_one.ipynb, which is not there: fix the link."
    ]
    (project / "nbs/index.ipynb").unlink()
    assert "is missing" in check_readme(project)[0]


# catches: a picture for dark pages alone, which no Markdown link names
@pytest.mark.parametrize("name", ["src", "srcset"])
def test_a_dead_picture(project, name):
    index = project / "nbs/index.ipynb"
    text = index.read_text().replace("Its map", f"Its map <img {name}='gone.gif'>")
    index.write_text(text)
    (problem, _) = check_readme(project)
    assert problem == "nbs/index.ipynb points to nbs/gone.gif, which is not there: fix the link."


@pytest.mark.parametrize(
    "text, moved",
    [
        ("[a](01_a.ipynb#x) ![b](images/b.png)", "[a](nbs/01_a.ipynb#x) ![b](nbs/images/b.png)"),
        ('[a](../tests "T") [b](./b.md)', '[a](tests "T") [b](nbs/b.md)'),
        ("<img src=\"b.png\"> <a href='../c'>", "<img src=\"nbs/b.png\"> <a href='c'>"),
        ('<source srcset="../b.gif">', '<source srcset="b.gif">'),
        *[
            (same, same)
            for same in (
                "[a](https://b.c/d)",
                "[a](#b)",
                "[a](mailto:b)",
                "f(x)[0](y z)",
                "(a.ipynb)",
                "![a](attachment:a.png)",
            )
        ],
    ],
)
def test_links_move_with_the_page(text, moved):
    assert relink(text) == moved


def test_the_command(project, capsys, monkeypatch):
    "One line for each thing to do, on stderr, and exit code 1."
    monkeypatch.setattr(sys, "argv", ["check_tree.py", "readme", "--root", str(project)])
    assert main() == 0
    edit_readme(project)
    assert main() == 1
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["check_tree.py", "export", "--write"])
    with pytest.raises(SystemExit):
        main()


# ---- Colab ----

COURSE = ("nbs/course/01_one.ipynb", "nbs/labs/20_two.ipynb", "nbs/course/words.ipynb")


@pytest.fixture
def pages(project) -> Path:
    "The project, with a page of the course, a lab, and a page without code."
    for name in COURSE:
        (project / name).parent.mkdir(exist_ok=True)
        code = [] if "words" in name else [cell("b", "1 + 1")]
        write(project / name, cell("a", "# One\n\n> A one."), *code)
    subprocess.run(["git", "add", "-A"], cwd=project, check=True)
    return project


# catches: a page without the cells, a page that moved, an address of another place, and a second
# pair of cells where there is one
def test_pages_open_in_colab(pages):
    assert [said.split()[0] for said in check_colab(pages)] == list(COURSE[:2])
    check_colab(pages, write=True)
    assert not check_colab(pages) and not check_export(pages)
    page = pages / COURSE[0]
    nb = json.loads(page.read_text())
    assert [one["id"] for one in nb["cells"]] == ["a", "colab-link", "colab-setup", "b"]
    assert (
        "github/rlhf-nb/rlhf_nb/blob/main/nbs/course/01_one.ipynb)" in nb["cells"][1]["source"][0]
    )
    ini = pages / "settings.ini"
    ini.write_text(ini.read_text().replace("branch = main", "branch = next"))
    assert len(check_colab(pages)) == 2
    check_colab(pages, write=True)
    nb = json.loads(page.read_text())
    assert len(nb["cells"]) == 4 and "--branch next" in "".join(nb["cells"][2]["source"])
    page.rename(page.with_name("02_one.ipynb"))
    assert check_colab(pages)[0].startswith("nbs/course/02_one.ipynb")
    ini.write_text(ini.read_text().replace("https://github.com/", "https://example.org/"))
    with pytest.raises(ValueError, match=r"example\.org.*Colab opens pages of github\.com"):
        check_colab(pages)


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
# git, the clone and the shell are real; the address leads to this project's folder, and pip, which
# needs an index, only writes down what it was asked.
@pytest.mark.parametrize("colab", [True, False])
def test_the_cell_for_colab(pages, tmp_path, colab):
    check_colab(pages, write=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "-A"], cwd=pages, check=True)
    subprocess.run([*git, "commit", "-qm", "x"], cwd=pages, check=True)
    subprocess.run(["git", "branch", "-M", "main"], cwd=pages, check=True)
    nb = json.loads((pages / COURSE[1]).read_text())
    content = tmp_path / "content"
    content.mkdir()
    source = "".join(nb["cells"][2]["source"]).replace("/content", str(content))
    env = os.environ | {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{pages}.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/rlhf-nb/rlhf_nb",
    }
    env |= {"IPYTHONDIR": str(tmp_path), "GIT_ALLOW_PROTOCOL": "file"}
    done = subprocess.run(
        [sys.executable, "-c", RUN_CELL.format(colab=colab, times=2, source=source)],
        cwd=content,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    asked, where = json.loads(done.stdout.splitlines()[-1])
    if colab:
        assert asked == [["install --quiet ./rlhf_nb", str(content)]] * 2
        assert Path(where) == content / "rlhf_nb" / "nbs" / "labs"
        assert (Path(where) / "20_two.ipynb").is_file()
    else:
        assert not asked and Path(where) == content and not list(content.iterdir())
