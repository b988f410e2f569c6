"""The explorers of the site: `python docs/explorers.py` runs the pages that have one. It writes
what each shows, in every state of its grid, to docs/explorers; the site's build reads it there.

`--check` writes nothing: it draws a few states of each page again and fails where the file has
something else. Name pages to take these alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from collect import Project, has_explorer, text  # noqa: E402

SAMPLES = 12  # states that a check draws again
# Pages whose pictures are of runs that they make. A processor that rounds otherwise draws other
# tokens, and the runs are others: a check compares what each picture says it is and how it is
# drawn (colours, dashes, widths), not where its lines go, nor what a lesson says of the kept run.
TRAINED = ("47_metrics",)


def explorers_of(path: Path, trained: bool = False) -> Iterator[tuple[str, Any]]:
    """Runs a page, without its assertions if they are about runs that it makes: the explorers in a
    frame that its cells show, each with the id of its cell."""
    from IPython.core.inputtransformer2 import TransformerManager

    from rlhf_nb.ui.explore import Explorer

    python = TransformerManager()
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    last = max(i for i, cell in enumerate(cells) if has_explorer(cell))
    page = ModuleType("page")  # where the annotations of a page's classes are looked up
    sys.modules["page"], names = page, vars(page)
    os.chdir(path.parent)
    for cell in cells[: last + 1]:
        if cell["cell_type"] != "code" or "#| eval: false" in text(cell):
            continue
        body = ast.parse(python.transform_cell(text(cell))).body  # lines for the shell as calls
        body = [part for part in body if not (trained and isinstance(part, ast.Assert))]
        shown = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), cell["id"], "exec"), names)
        value = (
            eval(compile(ast.Expression(shown.value), cell["id"], "eval"), names) if shown else 0
        )
        if isinstance(value, Explorer) and value.title:
            yield cell["id"], value


def kind_of(picture: str) -> set[str]:
    "What a picture says that it shows, to those who do not see it, and in which styles."
    return {*re.findall('alt="[^"]*"', picture), *re.findall("style=%22.*?%22", picture)}


def stale(kept: dict[str, Any], explorer: Any, trained: bool = False) -> list[str]:
    "What a kept grid says otherwise than its explorer: its frame, its start, presets, some states."
    from rlhf_nb.ui.explore import markup, view_at

    dials = explorer.dials()
    frame = dict(explorer.framing(dials), cell=kept["cell"])
    told = [f"{name} is another" for name in frame if kept.get(name) != frame[name]]
    if told:
        return told
    dice = random.Random(0)
    states = [[dial.start for dial in dials], *(preset["at"] for preset in frame["presets"])]
    states += [[dice.randrange(len(dial.values)) for dial in dials] for _ in range(SAMPLES)]
    for state in states:
        values = {dial.name: dial.values[i] for dial, i in zip(dials, state)}
        there, now = view_at(kept, state), markup(explorer.render(**values), explorer.alt)
        if there != now and not (trained and kind_of(there) == kind_of(now) != set()):
            told.append(f"{values} is drawn otherwise")
    # Another processor rounds a tie the other way, or draws one token otherwise: in few states.
    return told if len(told) > len(states) // 8 else []


def write(project: Project, name: str) -> None:
    "Draw the grids of a page. A file that says the same already is left alone."
    from rlhf_nb.ui.explore import pack

    path = project.explorer_file(name)
    found = explorers_of(project.paths[name])
    grids = {cell: dict(explorer.grid(), cell=cell) for cell, explorer in found}
    if grids != project.explorers(name):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pack(list(grids.values())))
    states = sum(len(grid["views"]) for grid in grids.values())
    print(f"{name}: {states} states, {path.stat().st_size / 1000:.0f} kB", flush=True)


def check(project: Project, name: str) -> list[str]:
    "What the file of a page says otherwise than the page."
    kept, trained = project.explorers(name), name in TRAINED
    return [
        f"{name}, cell {cell}: {what}"
        for cell, explorer in explorers_of(project.paths[name], trained)
        for what in (stale(kept[cell], explorer, trained) if cell in kept else ["nothing is kept"])
    ]


def one(write_it: bool, name: str) -> None:
    "Write or check one page; exits with what to do."
    project = Project(HERE.parent)
    if write_it:
        write(project, name)
    elif told := check(project, name):
        sys.exit("\n".join([*told, f"Run `python docs/explorers.py {name}`."]))


def apart(write_it: bool, names: list[str]) -> bool:
    """Each page in a process of its own, as a page may set torch's seed or precision; forked from
    one that has imported what pages import. Whether all went well."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["matplotlib.pyplot", "rlhf_nb.trainer", "rlhf_nb.ui.explore"])
    good = True
    for name in names:
        process = context.Process(target=one, args=(write_it, name))
        process.start()
        process.join()
        good &= process.exitcode == 0
    return good


def main() -> None:
    project = Project(HERE.parent)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("pages", nargs="*", help="otherwise all that have an explorer")
    args = parser.parse_args()
    pages = args.pages or project.explorer_pages
    sys.exit(not apart(not args.check, pages))


if __name__ == "__main__":
    main()
