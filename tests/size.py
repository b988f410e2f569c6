"""How many lines the project has, held to a budget: `make size`.

A line counts where it is neither blank nor a comment alone. Of the package, static files of the
views count as its modules do, and nbdev's index does not. The budgets are in tests/size.json: they
are ceilings, and a change that needs more takes something away. Prints what each folder has, and by
how much that differs from `main`.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
COUNTED = {
    "package": ("rlhf_nb/", (".py", ".js", ".css", ".html")),
    "tests": ("tests/", (".py", ".js")),
    "benchmarks": ("benchmarks/", (".py",)),
}
COMMENTS = {".py": "#", ".js": "//", ".css": "/*", ".html": "<!--"}


def count(text: str, suffix: str) -> int:
    "Lines that are neither blank nor a comment alone."
    stripped = (line.strip() for line in text.splitlines())
    return sum(1 for line in stripped if line and not line.startswith(COMMENTS[suffix]))


def part_of(path: str) -> str | None:
    "Which budget a file counts against."
    for name, (folder, suffixes) in COUNTED.items():
        if path.startswith(folder) and path.endswith(suffixes) and "_modidx" not in path:
            return name
    return None


def totals(paths: list[str], read: Callable[[str], str]) -> dict[tuple[str, str], int]:
    "(budget, folder) -> lines."
    lines: Counter[tuple[str, str]] = Counter()
    for path in paths:
        if (part := part_of(path)) is not None:
            lines[part, str(Path(path).parent)] += count(read(path), Path(path).suffix)
    return lines


def git(*words: str) -> list[str]:
    "The lines of a git command's output; none where it fails, as outside a clone."
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if not done.returncode else []


def definitions(text: str) -> Iterator[tuple[str, str, int]]:
    "(kind, name, lines) of every class and function."
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            yield kind, node.name, count("\n".join(lines[node.lineno - 1 : node.end_lineno]), ".py")


def too_large(limits: dict[str, int], exempt: dict[str, str]) -> list[str]:
    """Modules, classes and functions over their limit. Modules of the algorithm and of training
    have one; classes and functions have theirs everywhere in the package."""
    found = []
    for file in sorted((ROOT / "rlhf_nb").rglob("*.py")):
        name, text = str(file.relative_to(ROOT)), file.read_text()
        if "_modidx" in name:
            continue
        sizes = [*definitions(text)]
        if file.parent == ROOT / "rlhf_nb" or file.parent.name == "training":
            sizes.append(("module", "", count(text, ".py")))
        found += [
            f"{name} {what}: {kind} of {n} lines, limit {limits[kind]}"
            for kind, what, n in sizes
            if n > limits[kind] and f"{name} {what}" not in exempt
        ]
    return found


def main() -> int:
    budget = json.loads((ROOT / "tests/size.json").read_text())
    tracked = git("ls-files", "--cached", "--others", "--exclude-standard")
    here = [path for path in tracked if (ROOT / path).is_file()]
    now = totals(here, lambda path: (ROOT / path).read_text())
    before = totals(
        git("ls-tree", "-r", "--name-only", "main"),
        lambda path: "\n".join(git("show", f"main:{path}")),
    )
    over = too_large(budget["limits"], budget["exempt"])
    for part, ceiling in budget["lines"].items():
        for folder in sorted({folder for p, folder in now | before if p == part}):
            n, change = now.get((part, folder), 0), ""
            if before:
                change = f"{n - before.get((part, folder), 0):+7,}" if before else ""
            print(f"{n:8,} {change}  {folder}")
        total = sum(n for (p, _), n in now.items() if p == part)
        print(f"{total:8,} of {ceiling:,} lines: {part}\n")
        if total > ceiling:
            over.append(f"{part}: {total:,} lines, budget {ceiling:,}")
    if not here:
        print("size: this is no clone of the repository, so nothing was counted", file=sys.stderr)
    for line in over:
        print(f"size: {line}", file=sys.stderr)
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
