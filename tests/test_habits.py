"""What a contributor meets besides the code: hooks, workflow, changelog, citation, templates and
the wheel."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import yaml
from check_tree import tree
from packaging.requirements import Requirement
from packaging.version import Version
from wheel_check import oldest, requirements, wheel_problems

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = (".github/workflows/test.yml", ".github/workflows/weekly.yml")


def settings() -> dict[str, str]:
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(parser["DEFAULT"])


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ---- pre-commit ----


# catches: a hook that knows no environment but .venv, or drops the files that git names
def test_a_hook_runs_in_the_environment_that_VENV_names(tmp_path):
    (tmp_path / "bin").mkdir()
    for tool in ("ruff", "mypy"):
        (tmp_path / "bin" / tool).write_text(f'#!/bin/sh\necho {tool} "$@"\n')
        (tmp_path / "bin" / tool).chmod(0o755)
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    said = {
        hook["id"]: subprocess.run(
            [*shlex.split(hook["entry"]), "a b.py"],
            env=os.environ | dict(VENV=str(tmp_path)),
            capture_output=True,
            text=True,
        ).stdout
        for hook in hooks
    }
    assert said["ruff-check"] == "ruff check --fix --force-exclude a b.py\n"
    assert said["ruff-format"] == "ruff format --force-exclude a b.py\n"
    assert said["mypy"] == "mypy\n"


# ---- The workflow ----


def workflow_problems(texts: list[str], min_python: str) -> list[str]:
    "Python versions that settings.ini doesn't name, and checks that no workflow runs."
    daily, weekly = (yaml.safe_load(text) for text in texts)
    jobs, problems = daily["jobs"] | weekly["jobs"], []
    if "cron" not in str(weekly[True]):  # YAML reads `on` as true
        problems.append("weekly: it has no schedule")
    tested = jobs["test"]["strategy"]["matrix"]["python"]
    wheels = jobs["wheel"]["strategy"]["matrix"]["include"]
    for name, pythons in dict(test=tested, wheel=[w["python"] for w in wheels]).items():
        if not all(isinstance(python, str) for python in pythons):
            problems.append(f"{name}: quote the Python versions, or 3.10 is read as 3.1")
        elif min(pythons, key=Version) != min_python:
            problems.append(f"{name}: the oldest Python isn't min_python, {min_python}")
        elif len(set(pythons)) < 2:
            problems.append(f"{name}: one Python alone is tested")
    if {w["versions"] for w in wheels} != {"tested", "oldest", "newest"}:
        problems.append("wheel: one of tested, oldest, newest is missing")
    for name in ("lint", "demo", "weekly"):
        steps = [step.get("with", {}) for step in jobs[name]["steps"]]
        used = [step["python-version"] for step in steps if "python-version" in step]
        if used != [min_python]:
            problems.append(f"{name}: runs on {used}, not on min_python")
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    return problems + [
        f"no job runs {command}"
        for command in ("make lint", ".ci/run", "make check-weekly", "python tests/wheel_check.py")
        if not any(run.startswith(command) for run in commands)
    ]


def test_the_workflow_tests_the_python_that_the_package_asks_for():
    assert workflow_problems([*map(read, WORKFLOWS)], settings()["min_python"]) == []


# ---- Versions and texts ----


def changelog_problems(text: str, version: str) -> list[str]:
    heads = re.findall(r"^## (\S+)", text, re.MULTILINE)
    releases = [head for head in heads if head != "Unreleased"]
    problems = [] if "Unreleased" not in heads[1:] else ["Unreleased isn't first"]
    if releases[:1] != [version]:
        problems.append(f"the newest release is {releases[:1]}, settings.ini has {version}")
    if releases != sorted(releases, key=Version, reverse=True):
        problems.append("not newest first")
    return problems


def test_versions_agree():
    version = settings()["version"]
    assert changelog_problems(read("CHANGELOG.md"), version) == []
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == version and citation["license"] == "Apache-2.0"
    assert citation["repository-code"] == settings()["git_url"] % settings()
    assert f'version__ = "{version}"' in read("rlhf_nb/__init__.py")


def test_the_only_address_is_that_of_the_settings():
    files = ["SECURITY.md", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md"]
    found = {m for f in files for m in re.findall(r"[\w.+-]+@[\w-]+\.[\w.-]*\w", read(f))}
    assert found == {settings()["author_email"]}


def test_every_target_that_is_named_exists():
    "In texts for contributors, each `make TARGET` is one of the Makefile's."
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    files = ["CONTRIBUTING.md", "CHANGELOG.md", ".github/pull_request_template.md", *WORKFLOWS]
    named = {m for f in files for m in re.findall(r"(?:`|run: |^)make ([a-z-]+)", read(f), re.M)}
    assert {"lint", "format", "check-wheel", "check-oldest"} <= named | targets
    assert named <= targets


# ---- The check of the wheel ----


def test_the_oldest_versions_are_the_lower_bounds():
    assert oldest(["torch>=2.6", "transformers>=5.20,<6"]) == ["torch==2.6", "transformers==5.20"]
    exact = oldest(requirements())
    assert len(exact) == len(settings()["requirements"].split())
    for line, requirement in zip(exact, map(Requirement, settings()["requirements"].split())):
        assert requirement.specifier.contains(line.partition("==")[2])


def test_setup_py_ships_types_and_recipes(tmp_path):
    "The wheel as setup.py builds it here: without the network, from a copy, as wheel_check does."
    for name, content in tree(ROOT).items():
        if name.startswith(("rlhf_nb/", "nbs/course/", "setup.py", "settings.ini", "README.md")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", "wheels"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert wheel_problems(names) == []
    recipes = {p.name for p in (ROOT / "rlhf_nb" / "recipes").iterdir()}
    assert recipes <= {Path(name).name for name in names}
