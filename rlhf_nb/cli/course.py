"`rlhf-nb course`: the notebooks of the course, in a folder of one's own."

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.metadata import metadata
from pathlib import Path
from shlex import quote

from rlhf_nb.base.terminal import harmless

USAGE = "usage: rlhf-nb course FOLDER\n\nCopies the notebooks of the course into FOLDER."
PACKAGE = Path(__file__).parents[1]
PLACES = PACKAGE / "course", PACKAGE.parent / "nbs" / "course"  # of the wheel, of a clone


def course(words: Sequence[str]) -> int:
    "`rlhf-nb course`. Raises ValueError where a notebook would be overwritten, or none came along."
    if len(words) != 1 or words[0].startswith("-") or not words[0].strip():
        print(USAGE)
        return 0 if {*words} & {"-h", "--help"} else 2
    folder, pages = Path(words[0]), [page for place in PLACES for page in place.glob("*.ipynb")]
    if not pages:
        raise ValueError(f"none came along: they are at {metadata('rlhf_nb')['Home-page']}.")
    if taken := [page.name for page in pages if (folder / page.name).exists()]:
        raise ValueError(f"{folder} holds {taken[0]}, which may be yours: give another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for page in pages:
        shutil.copy(page, folder)
    first = quote(str(folder / min(page.name for page in pages)))
    print(harmless(f"rlhf-nb course: {len(pages)} notebooks. Begin with: jupyter lab {first}"))
    return 0
