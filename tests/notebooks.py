"The notebooks of the project by name, wherever below nbs/ each is. No two share a name or a number."

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def notebooks(nbs: Path = ROOT / "nbs") -> dict[str, Path]:
    "Name without .ipynb -> path, in the order of the names."
    paths = [path for path in nbs.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}


NOTEBOOKS = notebooks()
