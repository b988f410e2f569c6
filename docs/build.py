"""Build the site: `python docs/build.py`. A warning, a link that leads nowhere, a page without a
place: each fails it.

The site needs no network to be read. The pages as Sphinx is given them lie in _proc/site until the
next build.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
HINT = (
    "Sphinx says above what is wrong. 40003 in `NN_name.ipynb:40003` is line 3 of cell 4 of "
    "_proc/site/NN_name.ipynb, which is the notebook as readers of the "
    "site see it, without hidden cells. Fix the notebook and build again."
)


def check_free(out: Path) -> None:
    "Is this a place for a site? Raises Wrong for a folder that holds something else."
    from collect import Wrong

    if out.exists() and any(out.iterdir()) and not (out / ".buildinfo").exists():
        raise Wrong(
            [f"{out} is there and holds no site: name another folder with --out, or empty it."]
        )


def build(root: Path, out: Path, work: Path) -> None:
    """Collect the pages, have Sphinx make a site of them in `work`, look at every link of it, and
    only then put it where `out` is. Raises Wrong."""
    from collect import Wrong, collect
    from links import faults

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    check_free(out)
    pages, site = work / "site", work / "html"
    shutil.rmtree(site, ignore_errors=True)
    collect(root, pages)
    from sphinx.cmd.build import (
        main as sphinx,
    )  # a second to import: what collect complains of is told at once

    if sphinx(
        [
            "-q",
            "-E",
            "-W",
            "--keep-going",
            "-c",
            str(HERE),
            "-d",
            str(work / "doctrees"),
            str(pages),
            str(site),
        ]
    ):
        raise Wrong([HINT])
    if (root / "docs" / "landing.html").is_file():
        from hero import write_page

        write_page(site / "_static" / "hero.html")
    if found := faults(site):
        raise Wrong(found)
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(site, out)


def main() -> None:
    from collect import Project, Wrong

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the repository")
    parser.add_argument(
        "--out", type=Path, help="where the site goes; otherwise doc_path of settings.ini"
    )
    parser.add_argument("--work", type=Path, help="where the collected pages go; otherwise _proc")
    args = parser.parse_args()
    root = args.root.resolve()
    try:
        build(
            root,
            (args.out or root / Project(root).settings["doc_path"]).resolve(),
            (args.work or root / "_proc").resolve(),
        )
    except Wrong as error:
        sys.exit("\n".join(["make docs: the site is not built.", *error.complaints]))


if __name__ == "__main__":
    main()
