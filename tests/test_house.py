"""The house keeps its walls: modules import downwards only, and every page has the shape that
readers count on.

Each rule is a function from a page (or a module) to a list of complaints.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import pytest
from notebooks import NOTEBOOKS, notebooks

ROOT = Path(__file__).resolve().parent.parent
LIB = "rlhf_nb"

# (page, rule): why this page need not keep this rule. Nothing else is let off.
EXEMPT = {
    ("index", "exports_its_module"): "a map: it exports nothing",
    ("index", "lessons_assert"): "the README: what it shows is asserted on other pages",
    ("map", "exports_its_module"): "a list of the pages: it exports nothing",
    ("results", "exports_its_module"): "figures and how they came about: it exports nothing",
    ("results", "lessons_assert"): "it shows the file that a benchmark wrote",
    ("00_tour", "exports_its_module"): "a walk through later parts: it exports nothing",
    ("01_policy_gradients", "exports_its_module"): "six words and exact sums: it exports nothing",
    ("course", "exports_its_module"): "the index of the course: it exports nothing",
    ("glossary", "exports_its_module"): "words and symbols: it exports nothing",
    ("symptoms", "exports_its_module"): "kept runs and what they show: it exports nothing",
    ("13_training_loop", "exports_its_module"): "the trainer is defined by reference/48_trainer",
    ("54_migration", "exports_its_module"): "names of other trainers: rlhf_nb/training/compat.py",
    ("53_cli", "exports_its_module"): "the command line in use: rlhf_nb/cli is written by hand",
    ("58_replay", "exports_its_module"): "a tool in use: rlhf_nb/diagnose is written by hand",
    ("59_other_trainers", "exports_its_module"): "the plain module ui/foreign in use",
    ("67_proof", "exports_its_module"): "functions of other pages, held to others' work",
}


# ---- Reading a page ----


@dataclass
class Cell:
    "One cell, and what the rules ask about it."

    kind: str
    source: str
    outputs: list
    id: str | None

    @cached_property
    def directives(self) -> set[str]:
        "`#| eval: false` -> {'eval: false'}; and `#| default_exp gae` -> 'default_exp' too."
        found = re.findall(r"^#\|\s*(.*?)\s*$", self.source, re.M)
        return {*found, *(text.split()[0] for text in found if text)}

    @cached_property
    def body(self) -> list[ast.stmt]:
        "Its statements; lines for the shell and magics are dropped."
        return ast.parse(re.sub(r"^(\s*)[!%].*$", r"\1pass", self.source, flags=re.M)).body

    @property
    def exports(self) -> bool:
        return bool(self.directives & {"export", "exports", "exporti"})

    @property
    def is_lesson(self) -> bool:
        "Seen by the reader, exported nowhere, and more than a directive."
        return (
            self.kind == "code"
            and not self.exports
            and not self.directives & {"hide", "default_exp"}
            and bool(self.body)
        )

    @property
    def is_imports(self) -> bool:
        return all(isinstance(s, (ast.Import, ast.ImportFrom)) for s in self.body)

    @property
    def asserts(self) -> bool:
        "An assert, or a call of test_..., check_..., assert_... or pytest.raises, anywhere in it."
        return any(
            isinstance(n, ast.Assert) or (isinstance(n, ast.Call) and is_check(n))
            for s in self.body
            for n in ast.walk(s)
        )

    def __str__(self) -> str:
        return (
            f"cell {self.id} "
            f"({self.source.strip().splitlines()[-1][:60] if self.source.strip() else 'empty'})"
        )


def is_check(call: ast.Call) -> bool:
    "Does this call check something?"
    name = ast.unparse(call.func).split(".")[-1]
    return (
        bool(re.match(r"test_|check_|assert_", name)) or ast.unparse(call.func) == "pytest.raises"
    )


class Page:
    "A notebook, read."

    def __init__(self, name: str, nb: dict, folder: str = "course"):
        self.name, self.nb, self.folder = name, nb, folder
        self.cells = [
            Cell(c["cell_type"], "".join(c["source"]), c.get("outputs", []), c.get("id"))
            for c in nb["cells"]
        ]
        self.code = [c for c in self.cells if c.kind == "code"]
        self.lessons = [c for c in self.code if c.is_lesson]


# ---- The rules of a page ----


def opens_with_a_promise(page: Page) -> list[str]:
    "`# Title`, an empty line, `> one line`."
    first = page.cells[0] if page.cells else None
    if (
        first
        and first.kind == "markdown"
        and re.match(r"# \S.*\n\s*\n?> \S.*(\n(?!>)|\Z)", first.source)
    ):
        return []
    return ["its first cell is not `# Title` and below it `> a promise of one line`"]


def exports_its_module(page: Page) -> list[str]:
    """`05_logprobs.ipynb` starts with `#| default_exp logprobs` in its second cell. A page of
    reference/ may also, or instead, add to a module that an earlier page begins, with `#| export
    logprobs`, or show a plain module of its name, as in rlhf_nb/ui/. Labs export nothing."""
    begun = [
        m for c in page.code for m in re.findall(r"^#\|\s*default_exp\s+(\S+)", c.source, re.M)
    ]
    added = {
        m for c in page.code for m in re.findall(r"^#\|\s*exports?\s+(\w+)\s*$", c.source, re.M)
    }
    if page.folder == "labs":
        problem = f"a lab exports {', '.join([*begun, *added])}: labs export nothing"
        return [problem] if begun or added else []
    second = page.cells[1].directives if len(page.cells) > 1 else set()
    few = len(added) <= (page.folder == "reference")
    if few and begun == [page.name[3:]] and "default_exp" in second:
        return []
    if page.folder == "reference" and not begun and len(added) == 1:
        return []
    plain = page.name[3:]
    places = [f"from {LIB}.{folder}.{plain} import" for folder in FOLDERS]
    shown = any(place in c.source for place in places for c in page.code)
    if page.folder == "reference" and not begun and not added and shown:
        return []
    return [
        f"its second cell is not `#| default_exp {page.name[3:]}` (begins: {begun or 'none'}, "
        f"adds to: {sorted(added) or 'none'})"
    ]


def exports_are_shown(page: Page) -> list[str]:
    """A public function or class is used by a lesson within the three code cells that follow its
    definition. A class may also be shown by a function that is annotated to return it: that is how
    readers meet a record."""
    defined = [
        (i, c, s)
        for i, c in enumerate(page.code)
        if c.exports
        for s in c.body
        if isinstance(s, (ast.FunctionDef, ast.ClassDef))
    ]
    problems = []
    for i, cell, node in defined:
        used = names_in(*[s for c in page.code[i + 1 : i + 4] if c.is_lesson for s in c.body])
        makers = {
            f.name
            for _, _, f in defined
            if isinstance(f, ast.FunctionDef) and f.returns and node.name in names_in(f.returns)
        }
        if isinstance(node, ast.FunctionDef):
            makers = set()
        if node.name[0] != "_" and not used & {node.name, *makers}:
            problems.append(
                f"{node.name} (cell {cell.id}) is not used within the next three code cells"
            )
    return problems


def names_in(*nodes: ast.AST) -> set[str]:
    "Names that stand in code; comments and strings do not count, unless they are an annotation."
    return {
        n.id if isinstance(n, ast.Name) else n.value
        for node in nodes
        for n in ast.walk(node)
        if isinstance(n, ast.Name) or (n is node and isinstance(n, ast.Constant))
    }


def lessons_assert(page: Page) -> list[str]:
    "A third of the lesson cells keep themselves honest."
    honest = sum(c.asserts for c in page.lessons)
    return (
        [f"{honest} of {len(page.lessons)} lesson cells assert something: a third is wanted"]
        if 3 * honest < len(page.lessons)
        else []
    )


def shows_a_value(cell: Cell) -> bool:
    """Does the cell end in an expression that Jupyter displays? A check displays nothing where it
    returns nothing; `;` asks for silence."""
    last = cell.body[-1]
    if not isinstance(last, ast.Expr) or cell.source.rstrip().endswith(";"):
        return False
    return not (
        (isinstance(last.value, ast.Call) and is_check(last.value))
        or (isinstance(last.value, ast.Constant) and last.value.value in (None, ...))
    )


def outputs_are_kept(page: Page) -> list[str]:
    "A page reads without a kernel: displayed values are there, and half of the lessons have one."
    runs = [c for c in page.lessons if "eval: false" not in c.directives]
    told = [c for c in runs if not c.is_imports]
    problems = [
        f"{c} ends in a value, and its output was not kept"
        for c in told
        if shows_a_value(c) and not c.outputs
    ]
    kept = sum(bool(c.outputs) for c in told)
    return problems + (
        [f"{kept} of {len(told)} lesson cells have an output: half is wanted"]
        if 2 * kept < len(told)
        else []
    )


def outputs_are_no_errors(page: Page) -> list[str]:
    "A page that stopped half way."
    return [
        f"{c} shows a traceback"
        for c in page.code
        if any(o["output_type"] == "error" for o in c.outputs)
    ]


def outputs_name_no_folder_of_a_machine(page: Page) -> list[str]:
    "The path of a temporary or a home folder means nothing to a reader: show the name alone."
    return [
        f"{c} shows {path}: show the file's name alone"
        for c in page.code
        for path in re.findall(r"(?:/tmp/|/home/\w+/|/root/)\w[^\s\"\\<]*", json.dumps(c.outputs))
    ]


def lines_fit(page: Page) -> list[str]:
    "120 columns, as wide as a page shows; a docstring or a style sheet may go to 150."

    def too_long(line: str) -> bool:
        text = max(re.findall(r'"[^"]*"|\'[^\']*\'|[^"\']*;[^"\']*}', line), key=len, default="")
        return len(line) > (150 if len(text) > 80 else 120)

    return [
        f"{c} has a line of {len(line)} columns ({line.strip()[:40]}...): 120 at most"
        for c in page.code
        for line in c.source.splitlines()
        if too_long(line)
    ]


def cells_have_ids(page: Page) -> list[str]:
    "Each its own, so that a diff follows a cell and not its place."
    ids = [c.id for c in page.cells]
    if None in ids:
        return [f"{ids.count(None)} cells have no id: run `nbdev_clean`"]
    return [
        f"cell id {i} is there twice: take one away and run `nbdev_clean`"
        for i in sorted({i for i in ids if ids.count(i) > 1})
    ]


def is_run_as_a_whole(page: Page) -> list[str]:
    "nbdev_test passes a page with `skip_exec: true` without running it."
    return (
        ["skip_exec takes it out of nbdev_test"]
        if any(re.search(r"^skip_exec:\s*true", c.source, re.M | re.I) for c in page.cells)
        else []
    )


RULES = [
    opens_with_a_promise,
    exports_its_module,
    exports_are_shown,
    lessons_assert,
    outputs_are_kept,
    outputs_are_no_errors,
    outputs_name_no_folder_of_a_machine,
    lines_fit,
    cells_have_ids,
    is_run_as_a_whole,
]
PAGES = [
    Page(path.stem, json.loads(path.read_text(encoding="utf-8")), path.parent.name)
    for path in NOTEBOOKS.values()
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_page(rule):
    found = {page.name: rule(page) for page in PAGES if (page.name, rule.__name__) not in EXEMPT}
    told = "".join(f"\n{name}: {'; '.join(what)}" for name, what in found.items() if what)
    assert found and not told, told


# catches: a page that is let off a rule and keeps it, or that is gone
def test_every_exemption_is_needed():
    page, rules = {page.name: page for page in PAGES}, {rule.__name__: rule for rule in RULES}
    needless = [(name, rule) for name, rule in EXEMPT if not rules[rule](page[name])]
    assert not needless, "take these out of EXEMPT"


def test_there_are_pages():
    "nbdev_test calls an empty folder a success."
    assert len(PAGES) >= 10
    folders = {path.parent.relative_to(ROOT / "nbs").as_posix() for path in NOTEBOOKS.values()}
    assert folders == {".", "course", "labs", "reference"}
    everywhere = [
        path.stem for path in (ROOT / "nbs").rglob("*.ipynb") if ".ipy" not in path.parent.name
    ]
    numbers = [name[:2] for name in everywhere if name[:2].isdigit()]
    assert len(numbers) == len(set(numbers)) and len(everywhere) == len(set(everywhere))


# ---- Modules import downwards ----

# Folders of plain modules, which no notebook exports.
FOLDERS = ("base", "training", "ui", "exercises", "diagnose", "cli")
# A module imports from its own layer and from those above it in this table.
LAYERS = {
    "the bottom": "base",
    "the algorithm": "checkpoint estimators fast_logprobs forward gae kl kl_control logprobs losses masks models moments packing ppo preferences reward_functions rollout sampling shaping tldr turns update world",
    "training": "environments judges playing scoring training",
    "what a user runs": "evaluate frontier gains judging real reward sft trainer",
    "the views": "ui",
    "checks of a run, and of a learner": "checks diagnose exercises",
    "the command line": "cli",
}
NAMED = {name: layer for layer, names in LAYERS.items() for name in names.split()}
ORDER = [*LAYERS]
DRAWING = {"IPython", "anywidget", "ipywidgets", "matplotlib"}  # imported by the views and above


# A page after the course teaches it; pages before it call it where an episode has several turns.
AFTER = {"turns"}


class Place(NamedTuple):
    "Where the page that begins a module is."

    folder: str  # course or reference
    number: int


def places(nbs: Path) -> dict[str, Place]:
    "Module -> the place of the page that begins it."
    return {
        name[3:]: Place(path.parent.name, int(name[:2]))
        for name, path in notebooks(nbs).items()
        if re.search(r"#\|\s*default_exp", path.read_text(encoding="utf-8"))
    }


@cache
def imported_modules(source: str, views: bool = True) -> set[str]:
    """Modules of this package that a module imports, wherever in it and however it is written, such
    as `base.files`; '' is the package itself, whose __init__ imports from every module. Without
    `views` what is shown in a notebook is left out: a `_repr_html_` that only asks a view."""
    tree, found = ast.parse(source), set()
    asking = [] if views else filter(asks_a_view, ast.walk(tree))
    shown = {line for node in asking for line in node.body}
    for node in ast.walk(tree):
        if node in shown:
            continue
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = LIB + ("." + node.module if node.module else "") if node.level else node.module
            folders = [LIB, *(f"{LIB}.{folder}" for folder in FOLDERS)]
            names = [f"{base}.{a.name}" for a in node.names] if base in folders else [base]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")
            and node.args
        ):
            names = [str(getattr(node.args[0], "value", ""))]
        else:
            continue
        found |= {name.partition(".")[2] for name in names if name.split(".")[0] == LIB}
    return {
        ".".join(name.split(".")[: 2 if name.split(".")[0] in FOLDERS else 1]) for name in found
    }


def asks_a_view(node: ast.AST) -> bool:
    "Whether it is a `_repr_html_` of two lines: an import, and what a function of it returns."
    if not isinstance(node, ast.FunctionDef) or node.name != "_repr_html_":
        return False
    return [type(line) for line in node.body] == [ast.ImportFrom, ast.Return]


def layer_of(module: str) -> int | None:
    "The place of its layer, from below; None where LAYERS has no place for it."
    layer = NAMED.get(module) or NAMED.get(module.split(".")[0])
    return None if layer is None else ORDER.index(layer)


def upward(name: str, source: str, place: dict[str, Place]) -> list[str]:
    """What a module imports that it must not. `name` is `gae`, or `base.files` of a plain
    module. Between the pages of one folder only lower numbers may be imported; between two
    folders, whatever makes no circle (test_modules_do_not_import_in_a_circle)."""
    problems, folder, own = [], name.split(".")[0], layer_of(name)
    if own is None:
        return [f"{name} is in no layer: enter it in LAYERS"]
    for other in sorted(imported_modules(source, views=False)):
        top, layer = other.split(".")[0], layer_of(other)
        if top.startswith("_"):
            continue
        if layer is not None and layer > own:
            problems.append(
                f"{name} ({ORDER[own]}) imports {other} ({ORDER[layer]}): imports go down only"
            )
        elif top in FOLDERS:
            continue
        elif top not in place:
            problems.append(
                f"{name} imports {other or 'the package itself'}, which is no module: import "
                "from the module that defines it"
            )
        elif (
            folder in place
            and place[top].folder == place[folder].folder
            and place[top].number >= place[folder].number
            and top not in AFTER
        ):
            problems.append(
                f"{name} ({place[name].number:02d}) imports {other} ({place[top].number:02d}): "
                "only lower numbers of its folder may be imported"
            )
    return problems


def a_cycle(imports: dict[str, set[str]]) -> list[str]:
    "Modules that import each other in a circle; none: []."
    left = {name: others & imports.keys() for name, others in imports.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def module_of(path: Path) -> str:
    "`rlhf_nb/base/files.py` -> base.files; a folder's __init__ has the folder's name."
    parts = path.relative_to(ROOT / LIB).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


EXPORTED = sorted(p for p in (ROOT / LIB).glob("*.py") if not p.name.startswith("_"))
PLAIN = sorted(p for folder in FOLDERS for p in (ROOT / LIB / folder).glob("*.py"))


def draws(name: str, source: str) -> list[str]:
    "Libraries that draw or make widgets, imported anywhere in a module below the views."
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).split(".")[0])
    below = (layer_of(name) or 0) < ORDER.index("the views")
    return [f"{name} imports {library}" for library in sorted(found & DRAWING) if below]


def test_imports_go_down():
    place = places(ROOT / "nbs")
    problems = [
        f"{path.name} has no notebook NN_{path.stem}.ipynb: export it from one, or put it into "
        f"{LIB}/training, {LIB}/ui or {LIB}/cli"
        for path in EXPORTED
        if path.stem not in place
    ]
    for path in (*EXPORTED, *PLAIN):
        text = path.read_text(encoding="utf-8")
        problems += upward(module_of(path), text, place) + draws(module_of(path), text)
    assert not problems, "\n" + "\n".join(problems)
    there = {*map(module_of, (*EXPORTED, *PLAIN)), *FOLDERS}
    assert NAMED.keys() <= there, NAMED.keys() - there


# catches: a circle that one import closes within a function, for annotations alone, or in what a
# notebook shows
def test_modules_do_not_import_in_a_circle():
    sources = {module_of(path): path.read_text(encoding="utf-8") for path in (*EXPORTED, *PLAIN)}
    circle = lambda more: a_cycle(
        {name: imported_modules(text + more.get(name, "")) for name, text in sources.items()}
    )
    assert circle({}) == []
    assert a_cycle(dict(a={"b"}, b={"c"}, c={"b", "os"}, d=set())) == ["a", "b", "c"]
    line = "from rlhf_nb.rollout import Rollout"
    for text in (f"def f():\n    {line}", f"if TYPE_CHECKING:\n    {line}"):
        assert {"rollout", "ui.shown", "ui.viz"} <= {*circle({"ui.viz": f"\n{text}\n"})}


# catches: a module that ruff does not format because its name fits the pattern of exported ones
def test_ruff_knows_which_modules_are_exported():
    config = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    patterns = re.findall(rf'"{LIB}/\{{([\w,]+)\}}\.py"', config)
    wanted = {path.stem for path in EXPORTED}
    assert patterns and all(set(pattern.split(",")) == wanted for pattern in patterns)


FEW = dict(
    masks=Place("course", 1),
    gae=Place("course", 11),
    trainer=Place("course", 15),
    forward=Place("reference", 41),
)


# catches: an import that is not seen where it is written in another way, or in a function; a view or
# a library that draws below the views; a page of the course that may not use one of the reference
def test_an_import_upwards_is_caught():
    for name, line in (
        ("gae", "from .trainer import PPOTrainer"),
        ("gae", "from . import masks, trainer"),
        ("gae", "import rlhf_nb.trainer as t"),
        ("gae", "def f():\n    from rlhf_nb import PPOTrainer"),
        ("gae", "import importlib\nimportlib.import_module('rlhf_nb.trainer')"),
        ("gae", "import rlhf_nb.cli.demo"),
        ("base.files", "from rlhf_nb.masks import whiten"),
        ("masks", "def _repr_html_(x):\n    from .ui.html import a\n    y = a(x)\n    return y"),
        ("unlisted", "import os"),
    ):
        assert len(upward(name, line, FEW)) == 1, (name, line)
    down = "import torch.nn\nfrom . import masks\nfrom .forward import Forward\n'rlhf_nb.trainer'"
    asks = "def _repr_html_(self):\n    from rlhf_nb.ui.shown import a\n    return a(self)"
    assert upward("gae", f"{down}\n{asks}", FEW) == [] and imported_modules(asks) == {"ui.shown"}
    line = "def f():\n    from IPython.display import display"
    assert len(draws("reward", line)) == 1 and not draws("ui.viz", line)
