"""The tests that touch what changed since `main`, for `make quick`.

    python tests/quick.py [BASE]     run them (BASE: main, or origin/main where there is no main)
    python tests/quick.py --list     only say what would run

A changed module is tried by the test files that import it by name, the most particular ones first
(a file that imports two of our modules before one that imports twenty), then by those that import
a module which does; a changed notebook by running it; a changed file of tests/ by itself, or by the
tests that import it; any other file by the tests that contain its name. What is slow or weekly, and
what does not fit into a minute, is not run, and named or counted at the end. So green here is a
good sign and no more: `make test` decides.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from conftest import LONG
from notebooks import exported

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "rlhf_nb"
FILES, PAGES = 6, 3  # that fit into a minute
# Rules over all files of the tree. They take seconds, and most changes can break one.
ALWAYS = ("test_house", "test_structure")


def changed(root: Path, base: str) -> list[str]:
    "Paths that differ from where this branch left the base: committed, not committed, and new."

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"quick: git {' '.join(words)} fails: {done.stderr.strip()}")
        return done.stdout

    start = git("merge-base", "HEAD", base).strip()
    names = git("diff", "--name-only", start) + git("ls-files", "-o", "--exclude-standard")
    return sorted(name for name in set(names.splitlines()) if (root / name).is_file())


def imported(name: str, text: str, modules: set[str]) -> set[str]:
    "Those of some modules, by dotted name, that a file imports: at its top or in a function."
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(name.split("/")[: -node.level]) if node.level else ""
            origin = ".".join(filter(None, (above, node.module)))
            names |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
    return names & modules


def module_of(name: str) -> str:
    "rlhf_nb/ui/viz.py -> rlhf_nb.ui.viz, rlhf_nb/ui/__init__.py -> rlhf_nb.ui, tests/forks.py -> forks"
    return (
        name.removeprefix("tests/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    )


def chosen(root: Path, names: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Test files that try the changed files by name, the most particular first; those that try a
    module which imports one of them; notebooks."""
    names = set(names)
    notebooks = sorted(name for name in names if name.endswith(".ipynb"))
    for name in notebooks:
        names |= {f"{PACKAGE}/{module}.py" for module in exported(root / name)}
    files = [*(root / PACKAGE).rglob("*.py"), *(root / "tests").glob("*.py")]
    sources = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in files}
    modules = {module_of(name) for name in sources}
    uses = {name: imported(name, text, modules) for name, text in sources.items()}
    tests = {name for name in sources if name.startswith("tests/test_")}
    helpers = {name for name in sources if name.startswith("tests/")} - tests

    def importers(of: set[str], among: Iterable[str]) -> set[str]:
        return {name for name in among if uses[name] & of}

    touched = {module_of(name) for name in names if name.endswith(".py")}
    while more := {module_of(name) for name in importers(touched, helpers)} - touched:
        touched |= more  # a helper of tests/ that uses what changed
    above = {module_of(name) for name in importers(touched, sources.keys() - tests)} - touched

    def in_order(found: set[str], of: set[str]) -> list[str]:
        named = {f"tests/test_{module.split('.')[-1]}.py" for module in of}
        key = lambda name: (name not in names, name not in named, len(uses[name]), name)
        return sorted(found | named & tests, key=key)

    others = {Path(name).name for name in names if not name.endswith((".py", ".ipynb"))}
    speak = {name for name in tests if any(other in sources[name] for other in others)}
    first = in_order(names & tests | importers(touched, tests) | speak, touched)
    second = in_order(importers(above, tests), above)
    return first, [name for name in second if name not in first], notebooks


def run(command: list[str]) -> bool:
    print("quick:", " ".join(Path(word).name if i == 0 else word for i, word in enumerate(command)))
    return subprocess.run(command, cwd=ROOT).returncode == 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("base", nargs="?", help="branch or commit to compare with (default: main)")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    asked = parser.parse_args(words)
    known = subprocess.run(
        ["git", "rev-parse", "-q", "--verify", "main"], cwd=ROOT, capture_output=True
    )
    base = asked.base or ("origin/main" if known.returncode else "main")
    names = changed(ROOT, base)
    if not names:
        print(f"quick: nothing differs from {base}")
        return 0
    first, second, pages = chosen(ROOT, names)
    tests = [name for name in [*first, *second] if Path(name).stem not in LONG][:FILES]
    always = [f"tests/{stem}.py" for stem in ALWAYS if f"tests/{stem}.py" not in tests]
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    pytest += ["-m", "not slow and not weekly", *always, *tests]
    nbdev = str(Path(sys.executable).with_name("nbdev_test"))
    commands = [pytest, *([nbdev, "--path", page] for page in pages[:PAGES])]
    if asked.list:
        print("\n".join(" ".join(command[1:]) for command in commands))
    failed = [] if asked.list else [command for command in commands if not run(command)]
    left = [name for name in [*first, *pages[PAGES:]] if name not in tests]
    more = len(set(second) - set(tests))
    print(f"quick: {len(names)} files differ from {base}. What concerns them and was not run:")
    print("\n".join(f"  {name}" for name in left) or "  no file that names them")
    print(f"  {more} files of tests that reach them through another module")
    print("  what is slow, weekly, or in the browser")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
