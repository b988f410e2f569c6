"""What a user gets who installs the package and nothing else: imports that need no nbdev and no
network, and requirements that are true."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from configparser import ConfigParser
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import find_packages

ROOT = Path(__file__).resolve().parent.parent
LIB = "rlhf_nb"

# Imported, and not in settings.ini because one of its requirements cannot do without it: which.
BROUGHT = {
    "numpy": "transformers",
    "safetensors": "transformers",
    "tokenizers": "transformers",
    "tqdm": "transformers",
    "yaml": "transformers",
    "huggingface_hub": "transformers",
    "IPython": "ipywidgets",
    "traitlets": "ipywidgets",
}

# Imported where they are used, never at the top of a module, and not asked for by settings.ini:
# why.
OPTIONAL = {
    "deepspeed": "only under `accelerate launch --use_deepspeed`",
    "vllm": "only as a sampling engine",
}


# ---- In a process of its own: import everything, with nbdev out of reach and the network cut ----

LONELY = """
import importlib, json, pkgutil, socket, sys

def refuse(*args, **kwargs): raise SystemExit(f'asked the network for {args[1:] or args}')

for name in ('nbdev', 'fastcore', 'execnb', 'ghapi', 'pytest', 'hypothesis'):
    sys.modules[name] = None
for name in ('connect', 'connect_ex'): setattr(socket.socket, name, refuse)
for name in ('create_connection', 'getaddrinfo', 'gethostbyname'): setattr(socket, name, refuse)

package, failed = importlib.import_module(sys.argv[1]), {}

def try_to(load, name):
    try: return load()
    except BaseException as error: failed[name] = repr(error)  # also SystemExit

try_to(lambda: importlib.import_module(package.__name__ + '.cli').main(['--help']), 'cli')
drawing = 'matplotlib ipywidgets anywidget IPython pandas httpx'.split()
heavy = [name for name in ('torch', 'transformers', 'datasets', *drawing) if name in sys.modules]
for name in sys.argv[2:]: importlib.import_module(name)  # whatever these load is not ours
before = set(sys.modules)
try_to(lambda: importlib.import_module(package.__name__ + '.trainer'), 'trainer')
views = package.__name__ + '.ui'
drawn = [m for m in sys.modules if m in drawing or m.startswith(views) if m not in before]
promised = getattr(package, '__all__', [])
absent = [n for n in promised if n not in dir(package)
    or getattr(try_to(lambda: getattr(package, n), n), '__name__', None) != n]
modules = pkgutil.walk_packages(package.__path__, package.__name__ + '.', onerror=lambda name: None)
for name in [module.name for module in modules]:
    if not name.endswith('.__main__'): try_to(lambda: importlib.import_module(name), name)
print(json.dumps(dict(file=package.__file__, heavy=heavy, drawn=drawn, absent=absent, failed=failed)))
"""


UNDER_A_TRAINER = (
    "accelerate datasets huggingface_hub.errors torch transformers transformers.trainer"
)


def import_alone(name: str, folder: Path, below: str = "") -> dict:
    """Import a package that lies in a folder, and every module of it: where it is, what its command
    line loaded of what is heavy, what its trainer loaded of what draws beyond `below`, what it
    promises and has not, and the modules that failed."""
    done = subprocess.run(
        [sys.executable, "-c", LONELY, name, *below.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone() -> dict:
    return import_alone(LIB, ROOT, UNDER_A_TRAINER)


def test_import_needs_neither_nbdev_nor_network(alone):
    assert not alone["failed"], alone["failed"]
    assert Path(alone["file"]).parent == ROOT / LIB


# catches: a package that imports torch to print its help, or a notebook's widgets before anybody
# asks for the dashboard; a name that is promised and not there
def test_the_package_opens_its_rooms_when_asked(alone):
    assert not alone["heavy"] and not alone["absent"], alone
    import rlhf_nb

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rlhf_nb.nothing


# catches: seconds and megabytes for pictures that a run on a cluster never draws
def test_a_trainer_loads_nothing_that_draws(alone):
    assert alone["drawn"] == []


WRONG = dict(  # a module, and what is seen
    patch=("from fastcore.basics import patch", "'fastcore' is not a package"),
    exporter=("import nbdev", "import of nbdev halted"),
    runner=("import execnb.nbio", "'execnb' is not a package"),
    socket=("import socket\nsocket.create_connection(('127.0.0.1', 9))", "asked the network"),
    url=(
        "import urllib.request\ntry: urllib.request.urlopen('http://localhost:9')\nexcept "
        "OSError: pass",
        "asked the network",
    ),
    quiet=(
        "import socket\ntry: socket.socket().connect(('127.0.0.1', 9))\nexcept Exception: pass",
        "asked the network",
    ),
    cli=("import wrong.heavy", ""),
)


# ---- The requirements ----

installed_by = cache(packages_distributions)  # import name -> distributions


def settings() -> dict:
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]


def wanted(text: str) -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(Requirement, text.split())}


def imports(
    source: str,
) -> tuple[
    set[str], set[str]
]:  # what is imported when the module is, and what only later, in a function or a try
    "Top-level names of other packages that a module imports."
    eager, lazy = set(), set()

    def look(node: ast.AST, where: set[str]) -> None:
        if isinstance(node, ast.Import):
            where.update(a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            where.add(node.module.split(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Try, ast.If)):
            where = lazy
        for child in ast.iter_child_nodes(node):
            look(child, where)

    look(ast.parse(source), eager)
    own = sys.stdlib_module_names | {LIB, "__future__"}
    return eager - own, lazy - own


def unmet(source: str, requirements: str, extras: str = "") -> list[str]:
    "Imports that settings.ini does not bring; later ones may be of an extra, or OPTIONAL."
    eager, lazy = imports(source)

    def covered(name: str, asked: dict) -> bool:
        return BROUGHT.get(name) in asked or any(
            canonicalize_name(d) in asked for d in installed_by().get(name, [name])
        )

    return sorted(
        [n for n in eager if not covered(n, wanted(requirements))]
        + [
            n
            for n in lazy - eager
            if n not in OPTIONAL and not covered(n, wanted(requirements + " " + extras))
        ]
    )


def brings(distribution: str) -> set[str]:  # what is always installed with it
    return {
        canonicalize_name(r.name)
        for r in map(Requirement, requires(distribution) or [])
        if r.marker is None
    }


def test_what_is_brought_along_is():
    required = wanted(settings()["requirements"])
    for name, bringer in BROUGHT.items():
        assert bringer in required
        assert {canonicalize_name(d) for d in installed_by()[name]} & brings(bringer), name
        assert "peft" not in brings(bringer)


def test_every_import_is_asked_for():
    cfg = settings()
    extras = (cfg[f"{name}_requirements"] for name in ("peft", "real", "tasks"))
    asked = cfg["requirements"], " ".join(extras)
    missing = {
        path.relative_to(ROOT).as_posix(): names
        for path in (ROOT / LIB).rglob("*.py")
        if (names := unmet(path.read_text(encoding="utf-8"), *asked))
    }
    assert not missing, (
        f"{missing}: import from what is required already, or add it to settings.ini"
    )


# catches: a folder of plain modules that an installation leaves out
def test_every_folder_of_modules_is_installed():
    include = ["rlhf_nb", "rlhf_nb.*"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / LIB).rglob("*.py")}
    assert folders == set(find_packages(str(ROOT), include=include))
    assert f"find_packages(include={json.dumps(include)})" in (ROOT / "setup.py").read_text()


def test_make_asks_for_the_python_that_the_package_asks_for():
    major, minor = settings()["min_python"].split(".")
    assert f"sys.version_info < ({major}, {minor})" in (ROOT / "Makefile").read_text()


# ---- constraints.txt ----


def constraint_problems(constraints: str, requirements: str) -> list[str]:
    "One exact version a line, no place to fetch it from, within each bound of settings.ini."
    lines = [line for line in constraints.splitlines() if line.strip() and not line.startswith("#")]
    problems = [
        f"not one exact public version: {line}"
        for line in lines
        if not re.fullmatch(r"[\w.-]+==[\w.]+(; .+)?", line)
    ]
    pins = {
        canonicalize_name(line.partition("==")[0]): line.partition("==")[2].partition(";")[0]
        for line in lines
        if "==" in line
    }
    for name, requirement in wanted(requirements).items():
        if name not in pins:
            problems.append(f"{name} has no tested version")
        elif not requirement.specifier.contains(Version(pins[name])):
            problems.append(f"{name}=={pins[name]} is not {requirement}")
        if not requirement.specifier:
            problems.append(f"{name} has no lower bound in settings.ini")
    return problems


def test_constraints_fit_the_requirements():
    cfg = settings()
    asked = " ".join(
        cfg[key]
        for key in (
            "requirements",
            *(f"{kind}_requirements" for kind in ("dev", "docs", "peft", "real")),
        )
    )
    assert constraint_problems((ROOT / "constraints.txt").read_text(), asked) == []


def test_the_next_major_release_of_transformers_is_refused():
    "The trainers override methods of its Trainer: a major release may change them."
    allowed = wanted(settings()["requirements"])["transformers"].specifier
    assert allowed.contains("5.20.0") and allowed.contains("5.99") and not allowed.contains("6.0.0")


def test_the_oldest_pandas_is_one_that_pyarrow_accepts():
    "pandas 2.2.0 brings NumPy 1.26, which pyarrow refuses."
    assert not wanted(settings()["requirements"])["pandas"].specifier.contains("2.2.2")
