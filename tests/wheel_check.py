"""What a user gets who runs `pip install` and has no checkout: the wheel, in an empty virtual
environment, run from another folder. pytest does not collect this file; make does:

    make check-wheel         wheel_check.py tested   the versions in constraints.txt
    make check-oldest        wheel_check.py oldest   the lower bounds in settings.ini
                             wheel_check.py newest   whatever the package index has today
    make check-wheel-quick   wheel_check.py quick    the packages of the Python that runs it

Each builds the wheel from a clean copy of the tree, installs it, checks what came with it, runs
`rlhf-nb demo --quick`, and prints how long each part took. It needs a package index, and disk for
one installation (3 GB; 9 where pip brings torch with CUDA) in a temporary folder, which it removes.
`quick` installs the wheel alone and looks for all else where it is already: it needs neither, and
sees a file that the wheel lacks, but not a requirement that settings.ini lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from configparser import ConfigParser
from contextlib import contextmanager
from pathlib import Path

from check_tree import tree

ROOT = Path(__file__).resolve().parent.parent
LIB = "rlhf_nb"
DEVELOPMENT = {"nbdev", "fastcore", "execnb", "ghapi", "pytest"}  # no user should get these
SHIPPED = [
    f"{LIB}/{x}" for x in ("py.typed", "recipes/", "__init__.py", "course/00_tour")
]  # no user goes without these
OFFLINE = dict(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
    TQDM_DISABLE="1",
)


def requirements(root: Path = ROOT) -> list[str]:
    "`requirements` of settings.ini, one string for each."
    parser = ConfigParser(delimiters=["="])
    parser.read(root / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]["requirements"].split()


def oldest(requirements: Sequence[str]) -> list[str]:
    """`torch>=2.6` becomes `torch==2.6`, for each.

    Raises ValueError for a requirement without exactly one lower bound: a bound that nobody wrote
    down is one that nobody can check.
    """
    exact = []
    for requirement in requirements:
        name, found, bounds = requirement.partition(">=")
        if not found or ">=" in bounds:
            raise ValueError(
                f"`requirements` in settings.ini has {requirement!r}: write one lower bound, like "
                f"'{name.strip()}>=1.2'"
            )
        exact.append(f"{name}=={bounds.partition(',')[0]}")
    return exact


def wheel_problems(names: Sequence[str]) -> list[str]:
    "What is missing in the wheel, and what should not be in it."
    missing = [s for s in SHIPPED if not any(name.startswith(s) for name in names)]
    foreign = [n for n in names if not n.startswith((f"{LIB}/", f"{LIB}-"))]
    return [f"the wheel lacks {name}: see package_data in setup.py" for name in missing] + [
        f"the wheel has {name}, outside {LIB}/" for name in foreign
    ]


@contextmanager
def timed(what: str, times: dict[str, float]) -> Iterator[None]:
    "Print what is being done, and keep how many seconds it took."
    print(f"wheel_check: {what}", flush=True)
    start = time.perf_counter()
    yield
    times[what] = time.perf_counter() - start


def run(*command: str | Path, **options) -> str:
    "Run a command. Returns its standard output, or ends the check with all it printed."
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    if done.returncode:
        tail = (done.stdout + done.stderr)[-6000:]
        sys.exit(f"{tail}\nwheel_check: this command failed: {' '.join(map(str, command))}")
    return done.stdout


def build(folder: Path, python: str, *options: str) -> Path:
    """Build the wheel, from a copy of what git knows: setuptools would take stale modules from a
    `build/` folder that an earlier build left behind."""
    for name, content in tree(ROOT).items():
        path = folder / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    run(*pip, *options, "--wheel-dir", folder / "wheels", folder / "source")
    (wheel,) = (folder / "wheels").glob("*.whl")
    return wheel


def installed_alone(pip: Sequence[str | Path]) -> None:
    "Exit unless the requirements are met, and no tool of development came with the package."
    run(*pip, "check")
    installed = {
        p["name"].lower(): p["version"] for p in json.loads(run(*pip, "list", "--format=json"))
    }
    if unwanted := DEVELOPMENT & installed.keys():
        sys.exit(f"wheel_check: {', '.join(sorted(unwanted))} came with it: see settings.ini")
    print(
        "  "
        + " ".join(f"{r.split('>=')[0]}=={installed[r.split('>=')[0]]}" for r in requirements())
    )


def borrow(bin: Path, python: str) -> None:
    """Let an environment import the packages of another Python. Its own come first, and a package
    that is installed there as a link to its checkout (`pip install -e`) is not found."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, other = (Path(run(p, "-c", where).strip()) for p in (bin / "python", python))
    (own / "borrowed.pth").write_text(f"{other}\n")


def check(versions: str, python: str, folder: Path) -> dict[str, float]:
    "Build, install, look and run. Returns the seconds that each part took."
    times: dict[str, float] = {}
    with timed("build the wheel", times):
        wheel = build(folder, python, *(["--no-build-isolation"] if versions == "quick" else []))
    with zipfile.ZipFile(wheel) as archive:
        if problems := wheel_problems(archive.namelist()):
            sys.exit("\n".join(problems))

    what = {
        "tested": ["-c", str(ROOT / "constraints.txt")],
        "oldest": oldest(requirements()),
        "newest": [],
        "quick": ["--no-deps", "--no-index"],
    }[versions]
    with timed(f"install it, with the {versions} versions", times):
        run(python, "-m", "venv", folder / "venv")
        bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        pip = [bin / "python", "-m", "pip", "--disable-pip-version-check"]
        run(*pip, "install", "--quiet", "--no-cache-dir", wheel, *what)
    if versions == "quick":
        borrow(bin, python)
    else:
        installed_alone(pip)

    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    bare = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | OFFLINE
    place = run(
        bin / "python", "-c", f"import {LIB}; print({LIB}.__file__)", cwd=elsewhere, env=bare
    )
    if not Path(place.strip()).resolve().is_relative_to((folder / "venv").resolve()):
        sys.exit(f"wheel_check: {LIB} was imported from {place.strip()}, not from the wheel")
    with timed("rlhf-nb demo --quick", times):
        run(bin / "rlhf-nb", "demo", "--quick", cwd=elsewhere, env=bare)
    if not list(elsewhere.rglob("rollouts.html")):
        sys.exit("wheel_check: the demo ended without an error, and wrote no rollouts.html")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", choices=["tested", "oldest", "newest", "quick"])
    parser.add_argument("--python", default=sys.executable, help="the Python to install into")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wheel_check_") as folder:
        times = check(args.versions, args.python, Path(folder))
    print(f"wheel_check: the demo runs with the {args.versions} versions, from the wheel alone")
    for what, seconds in times.items():
        print(f"  {seconds:6.0f} s  {what}")


if __name__ == "__main__":
    main()
