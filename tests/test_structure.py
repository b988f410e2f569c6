"""How the package is built, read from its source: which private names are used and where, how long
its functions and its lines of inheritance are, that no error is swallowed, and that markup is
written in one place. Each rule is shown a program that breaks it."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.state import GradientState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from transformers import Trainer

import rlhf_nb.training.sealed
from rlhf_nb.reward import RewardTrainer
from rlhf_nb.sft import SFTTrainer
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.training.sealed import check_version

PACKAGE = Path(rlhf_nb.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_modidx.py")
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]
TRAINER = (PACKAGE / "trainer.py").read_text(encoding="utf-8")
LOOP = [(PACKAGE / "training" / f"{x}.py").read_text(encoding="utf-8") for x in ("sealed", "loop")]
PHASES = ("rollout", "score", "advantages", "update")
# of transformers' Trainer, those that the two of LOOP use, and why
PRIVATE = {
    "_save_checkpoint": "a checkpoint is written beside its place, sealed, and then renamed",
    "_get_output_dir": "where Trainer writes while a checkpoint is staged",
    "_save": "what a saved folder holds: the policy alone, a model card",
    "_load_from_checkpoint": "a checkpoint is verified before it is loaded",
    "_load_best_model": "the best checkpoint is loaded as any other",
    "_load_optimizer_and_scheduler": "the run's own state comes back with the optimizer's",
    "_save_rng_state": "the order of an epoch that is under way, and what has yet to be logged",
    "_init_training_state": "where in which pass over a stream a resumed run goes on",
    "_load_rng_state": "put back after batches are skipped, not before",
    "_get_train_sampler": "rows of like length in an order that can be resumed",
    "_push_from_checkpoint": "a checkpoint is pushed under its final name",
    "_prepare_for_training": "optimizer and wrapped model for someone who steps by hand",
    "_prepare_inputs": "a batch on the device",
    "_run_epoch": "one pass over the data, where a step is an update",
    "_maybe_log_save_evaluate": "logs, evaluations and checkpoints when they are due",
    "_get_dataloader": "one rank's prompts of an update; all rows of an evaluation, in their order",
    "_get_eval_sampler": "the order of the rows that metrics of the user's own are given",
    "_created_lr_scheduler": "whether the schedule is one for the planned updates",
    "_get_learning_rate": "the learning rate that is logged",
    "_tr_loss": "the sum of losses behind the next log, and behind what a finished run returns",
    "_globalstep_last_logged": "how many steps the next log is over",
}


parsed = cache(ast.parse)


@cache
def read(name: str) -> str:
    return (PACKAGE / name).read_text(encoding="utf-8")


def breaking(rule: Callable[[str], Collection], names: list[str] = NAMES) -> dict[str, Collection]:
    "File -> what a rule finds in its source, for each file in which it finds something."
    assert names
    return {name: found for name in names if (found := rule(read(name)))}


PUBLIC = ("_", "_asdict", "_fields", "_make", "_replace")  # the last four are of named tuples


def private(name: str) -> bool:
    "Whether a leading underscore marks it; `__len__` and `_repr_html_` are for Python and Jupyter."
    jupyter = name.startswith("_repr_") and name.endswith("_")
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC and not jupyter


def own(node: ast.expr, classes: set[str]) -> bool:
    "Whether it is self, cls, super() or a class of the same module."
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in classes | {"self", "cls"}


def reached_into(source: str) -> dict[str, int]:
    "Private names of other objects, with the line of their first use."
    tree = parsed(source)
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    uses: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for part in filter(private, (node.module or "").split(".")):
                uses.setdefault(part, node.lineno)
        if isinstance(node, ast.Attribute) and private(node.attr) and not own(node.value, classes):
            uses.setdefault(node.attr, node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            by_name = node.func.id in ("getattr", "setattr", "hasattr") and len(node.args) > 1
            name = node.args[1] if by_name else None
            named = isinstance(name, ast.Constant) and private(str(name.value))
            if named and not own(node.args[0], classes):
                uses.setdefault(name.value, node.lineno)
    return uses


def imported(source: str) -> list[str]:
    "Private names that come from other modules of the package."
    return [
        f"{node.module or '.'}.{alias.name}"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.ImportFrom)
        and (node.level or (node.module or "").split(".")[0] == "rlhf_nb")
        for alias in node.names
        if private(alias.name)
    ]


def parents(sources: list[str]) -> dict[str, list[str]]:
    "The bases of each class, by their last names."
    nodes = [node for source in sources for node in ast.walk(parsed(source))]
    last = lambda base: ast.unparse(base).split("[")[0].split(".")[-1]
    return {n.name: [last(base) for base in n.bases] for n in nodes if isinstance(n, ast.ClassDef)}


def private_chain(name: str, bases: dict[str, list[str]]) -> int:
    "The most private classes in one line from a class upwards, itself included."
    above = max((private_chain(base, bases) for base in bases.get(name, [])), default=0)
    return above + private(name)


def between(kind: type, top: type) -> list[str]:
    "The classes from one to another above it, without the two."
    return [part.__name__ for part in kind.__mro__[1 : kind.__mro__.index(top)]]


def lengths(source: str) -> dict[str, int]:
    "Lines of each function as ruff formats it at 100 columns; blank lines and comments are free."
    formatter = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "100", "-"]
    done = subprocess.run(formatter, input=source, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    counted: dict[str, int] = {}

    def visit(node: ast.AST, inside: str) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, (ast.ClassDef, ast.FunctionDef)):
                name = f"{inside}{part.name}"
                if isinstance(part, ast.FunctionDef):
                    body = (x.strip() for x in lines[part.lineno - 1 : part.end_lineno])
                    counted[name] = sum(bool(x) and not x.startswith("#") for x in body)
                visit(part, f"{name}.")
            else:
                visit(part, inside)

    visit(ast.parse(done.stdout), "")
    return counted


def too_long(source: str) -> list[str]:
    "Functions over 50 lines, a constructor over 70, four phases over 170 together."
    counted = lengths(source)
    limit = lambda name: 70 if name.endswith(".__init__") else 50
    long = [f"{name}: {n} lines" for name, n in counted.items() if n > limit(name)]
    phases = sum(counted.get(f"PPOTrainer.{phase}", 0) for phase in PHASES)
    return long + ([f"the four phases: {phases} lines"] if phases > 170 else [])


def of_trainer() -> set[str]:
    "Private names of transformers' Trainer: methods, class attributes, and those it sets on itself."
    on_itself = {
        node.attr
        for node in ast.walk(parsed(inspect.getsource(Trainer)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return {name for name in (*dir(Trainer), *on_itself) if private(name)}


def trainers_own(source: str, classes: set[str]) -> set[str]:
    "Private names of Trainer that some classes of a module override, read, set or call."
    names: set[str] = set()
    for kind in ast.walk(parsed(source)):
        if not isinstance(kind, ast.ClassDef) or kind.name not in classes:
            continue
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            if isinstance(node, ast.Attribute) and own(node.value, set()):
                names.add(node.attr)
    return names & of_trainer()


BROAD = ("Exception", "BaseException", "builtins.Exception", "builtins.BaseException")
HANDED_ON = {  # handlers of any error that do not raise it, and what they do with it
    "diagnose/checks.py measure": "it is what the rung finds, which has failed",
    "exercises/values.py attempt": "it is the outcome of a learner's program, and is compared",
    "training/tools.py call": "the policy reads it, as what the tool answered",
    "ui/dashboard.py draw": "it is logged and shown; a dashboard must not end a training run",
    "ui/dashboard.py train": "it came up in a thread, and wait() raises it",
}


def swallowed(source: str) -> Iterator[str]:
    "Functions with a handler of every error there is, which does not raise it again."
    tree = parsed(source)
    functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = [kind is None or ast.unparse(kind) in BROAD for kind in kinds]
        if any(broad) and not any(isinstance(part, ast.Raise) for part in ast.walk(node)):
            around = [f.name for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
            yield around[-1] if around else "the module"


# ---- Private names ----


TIES = [name for name in NAMES if name.startswith(("training", "base")) or name == "ui/notebook.py"]


# catches: a private attribute of a library, or of another module, outside of the one place for it
def test_private_names_stay_where_libraries_are_tied_to():
    assert not breaking(reached_into, [name for name in NAMES if name not in TIES])


def unlisted(source: str) -> dict[str, int]:
    "Private names of others that no comment or docstring of the module names, nor `PRIVATE`."
    listed = "\n".join(line for line in source.splitlines() if line.lstrip().startswith("#"))
    for node in ast.walk(parsed(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef)):
            listed += ast.get_docstring(node) or ""
    if source in LOOP:
        listed += " ".join(PRIVATE)
    return {use: line for use, line in reached_into(source).items() if use not in listed}


# catches: a private name that is used there and not owned up to, where one reads what to look at
# when a library has a new release
def test_private_names_there_are_listed():
    assert not breaking(unlisted, TIES)
    assert unlisted("x._a, x._b  # _a\n# _b") == {"_a": 1}


def test_a_private_name_is_seen():
    for source in (
        "model._forward_hooks.clear()",
        "self.model._no_split_modules = []",
        "rlhf_nb.trainer._helper()",
        "def f(self): return other()._x",
        "getattr(trainer, '_tr_loss')",
        "setattr(model, '_x', 1)",
        "[x._y for x in models]",
        "from torch._subclasses import FakeTensorMode",
    ):
        assert reached_into(source), source
    assert not reached_into(
        "class A:\n def f(self, r): return self._x, super()._x, A._x, r._repr_html_(), r.__len__()"
    )


# catches: what the docstrings of layout and sharding promise, in a release that lacks one of them
def test_private_names_of_the_layout_are_there():
    for owner, name in (
        (GradientState, "_set_sync_gradients"),
        (FSDPModule, "_get_fsdp_state"),
        (FSDPState, "_lazy_init"),
        (transformers.PreTrainedModel, "_no_split_modules"),
        (torch.nn.Module(), "_forward_hooks"),
        (torch.nn.Module(), "_forward_pre_hooks"),
    ):
        said = read("training/layout.py") + read("base/sharding.py")
        assert hasattr(owner, name) and name in said, name


# catches: a helper of one module that another one has come to need, under its private name
def test_no_private_name_is_imported():
    assert not breaking(imported)
    for source in (
        "from rlhf_nb.masks import _places",
        "from .masks import pack, _places",
        "from . import _masks",
        "def f():\n    from rlhf_nb.training.loop import _order as order",
    ):
        assert imported(source), source


# ---- Sharded weights and ranks ----

SHARDING = {"ds_id", "ds_shape", "full_tensor", "DTensor", "GatheredParameters", "FSDPModule"}
BETWEEN_RANKS = ("deepspeed", "torch.distributed")


def of_sharding(source: str) -> set[str]:
    "What it knows of DeepSpeed, FSDP2 and torch.distributed from inside."
    known: set[str] = set()
    ours: set[str] = set()  # full_tensor is also a function of base/sharding.py
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).endswith("base.sharding"):
            ours |= {name.name for name in node.names}
        if isinstance(node, ast.Attribute):
            known |= {node.attr, ast.unparse(node)} & {*SHARDING, *BETWEEN_RANKS}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            known |= {node.value} & SHARDING
        elif isinstance(node, ast.Name):
            known |= {node.id} & SHARDING - ours
        elif isinstance(node, ast.Import):
            known |= {name.name for name in node.names if name.name.startswith(BETWEEN_RANKS)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(BETWEEN_RANKS):
            known.add(str(node.module))
    return known


# catches: a second place that has to be looked at when a layout, or a release of one, changes
def test_the_layout_alone_knows_how_weights_are_sharded():
    assert {*breaking(of_sharding)} == {"base/sharding.py", "training/layout.py"}
    for source in (
        "hasattr(p, 'ds_id')",
        "x.full_tensor()",
        "import deepspeed",
        "def f():\n    import deepspeed",
        "from torch.distributed.tensor import DTensor",
        "torch.distributed.barrier()",
    ):
        assert of_sharding(source), source
    assert not of_sharding(
        "from rlhf_nb.base.sharding import full_tensor, is_sharded\nis_sharded(full_tensor(x))"
    )


# ---- Classes and functions ----


# catches: a class cut into parents, `_Writes`, `_Samples`, `_Places`, that nobody else has
def test_no_private_chain_is_longer_than_two():
    bases = parents([path.read_text(encoding="utf-8") for path in FILES])
    assert {"PPOTrainer", "SealedTrainer"} < set(bases)
    assert not {name for name in bases if private_chain(name, bases) > 2}

    for most in (2, 3):
        line = ["Base", "_A", "_B", "_C"][: most + 1]
        source = "\n".join(f"class {b}({a}): pass" for a, b in pairwise(line))
        bases = parents([source, f"class Public(rows.{line[-1]}[int]): pass"])
        assert private_chain("Public", bases) == most


# catches: a third class between a trainer and Hugging Face's
def test_two_classes_at_most_are_between_a_trainer_and_transformers():
    assert between(PPOTrainer, Trainer) == ["UpdateTrainer", "SealedTrainer"]
    for kind in (SFTTrainer, RewardTrainer):
        assert between(kind, Trainer) == ["SealedTrainer"]

    class Third(PPOTrainer):
        pass

    class Fourth(Third):
        pass

    assert len(between(Fourth, Trainer)) == 4


# catches: a method that no longer fits on a screen
def test_functions_of_the_trainer_are_short():
    assert set(PHASES) <= {name.split(".")[-1] for name in lengths(TRAINER)}
    assert not too_long(TRAINER)


def some_function(lines: int, name: str = "f") -> str:
    return f"def {name}(self):\n" + "    x = 1\n" * (lines - 1)


def in_class(*functions: str) -> str:
    body = "\n".join(functions).replace("\n", "\n    ")
    return f"class PPOTrainer:\n    {body}"


@pytest.mark.parametrize(
    "source, long",
    [
        (some_function(50), 0),
        (some_function(51), 1),
        (some_function(50).replace("x = 1", "x = 1\n\n    # why", 3), 0),
        ("def f():\n" + "    " + "; ".join(["x = 1"] * 60), 1),
        (in_class(some_function(70, "__init__")), 0),
        (in_class(some_function(71, "__init__")), 1),
        (in_class(*(some_function(42, phase) for phase in PHASES)), 0),
        (in_class(*(some_function(43, phase) for phase in PHASES)), 1),
    ],
    ids=["50", "51", "comments", "dense", "init 70", "init 71", "phases 168", "phases 172"],
)
def test_a_long_function_is_seen(source, long):
    assert len(too_long(source)) == long


# ---- Trainer's private methods ----


# catches: a release of transformers that renames or drops one of them
def test_what_the_loop_needs_of_trainer_is_there():
    assert PRIVATE.keys() <= of_trainer() and all(PRIVATE.values())


LOOPS = {"SealedTrainer", "UpdateTrainer"}


# catches: a private method that is overridden or called and not listed, or listed and not used
def test_the_list_of_private_names_is_whole():
    assert trainers_own("\n".join(LOOP), LOOPS) == set(PRIVATE)


# catches: a trainer that goes round the loop and overrides a private method by itself
def test_trainers_leave_what_is_private_to_the_loop():
    of = {"trainer.py": PPOTrainer, "sft.py": SFTTrainer, "reward.py": RewardTrainer}
    kinds = {kind.__name__ for kind in of.values()}
    for name, kind in of.items():
        assert kind.__name__ in parents([read(name)])
        assert not trainers_own(read(name), kinds), name
    for source in (
        "def _save(self): pass",
        "def f(self): super()._save()",
        "def f(self): return self._get_learning_rate()",
        "def f(self): self._tr_loss += 1",
    ):
        assert trainers_own(f"class SealedTrainer(Trainer):\n    {source}", LOOPS), source


# catches: a first error in the middle of a run, under a release that this loop was not written for
def test_a_release_of_transformers_that_was_not_tried_is_refused():
    for release in ("4.57.0", "5.19.0", "6.0.0"):
        told = rf"transformers {release} .*works with >=5.20,<6: pip"
        with pytest.raises(ImportError, match=told):
            check_version(release)
    for release in ("5.20.0", "5.21.0.dev0", "5.99.1"):
        check_version(release)
    check_version()
    settings = PACKAGE.parent / "settings.ini"
    if settings.is_file():
        wanted = str(rlhf_nb.training.sealed.SUPPORTED)
        assert any(f"transformers{part}" in settings.read_text() for part in (wanted, ">=5.20,<6"))


# ---- Errors ----


# catches: an error that is taken for an answer, so that a run goes on with something else in silence
def test_no_error_is_swallowed():
    seen = [f"{name} {function}" for name in NAMES for function in swallowed(read(name))]
    assert sorted(seen) == sorted(HANDED_ON)


def test_a_swallowed_error_is_seen():
    for handler, seen in {
        "except: pass": True,
        "except Exception: return None": True,
        "except BaseException as error: print(error)": True,
        "except (ValueError, Exception): x = 1": True,
        "except ValueError: pass": False,
        "except Exception as e: raise ValueError from e": False,
    }.items():
        assert bool([*swallowed(f"def f():\n    try: g()\n    {handler}")]) == seen, handler


# ---- Markup, style sheets and scripts ----

KIT = "ui/html.py"  # element() and its kin; whole pages, style sheets and scripts are in ui/static
BREAK = "base/markdown.py"  # a line break in a table of Markdown is HTML's
TAGS = (
    "a article aside b bdi bdo blockquote body br button canvas caption circle code col dd defs "
    "details div dl dt ellipse em fieldset figcaption figure footer form g h[1-6] head header hr "
    "html i iframe image img input label legend li line link main mark meta nav ol option p path "
    "picture polygon polyline pre progress rect script section select small span strong style sub "
    "summary sup svg symbol table tbody td template text textarea tfoot th thead title tr tspan u "
    "ul use video wbr"
).replace(" ", "|")
PROPERTY = (
    r"(?:--\w|align|background|border|bottom|color|content|cursor|display|fill|flex|font|gap|grid|"
    r"height|left|line|list|margin|max|min|opacity|overflow|padding|position|right|stroke|text|"
    r"top|transform|vertical|white|width|z)[\w-]*\s*:"
)
FOREIGN = {
    "HTML": re.compile(rf"</?(?:{TAGS})(?=[\s>/]|$)|<!--|<!doctype", re.IGNORECASE),
    "CSS": re.compile(  # a rule, whose braces are no format's, or two declarations
        rf"\{{\s*{PROPERTY}(?![<>=+,.\d]*[a-z%]?\}})|(?:^|[\s;]){PROPERTY}[^;{{}}]+;\s*[\w-]+:"
    ),
    "JavaScript": re.compile(
        r"=>|===|\bfunction\b[ \w]*\([^)]*\) *\{|\b(?:const|let|var) [\w{}\[\], ]+ ?="
        r"|\b(?:document|window|console|Math)\.\w+|\.addEventListener\("
    ),
}


def foreign_lines(source: str) -> dict[str, set[int]]:
    """Lines of strings that hold HTML or SVG, CSS or JavaScript. Docstrings are none, nor are the
    patterns of `re`, which read markup."""
    nodes = [*ast.walk(parsed(source))]
    apart: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            apart |= {x.value for x in node.body[:1] if isinstance(x, ast.Expr)}
        elif isinstance(node, ast.Call) and re.fullmatch(r"re\.\w+", ast.unparse(node.func)):
            apart |= {part for pattern in node.args[:1] for part in ast.walk(pattern)}
    found: dict[str, set[int]] = {kind: set() for kind in FOREIGN}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in apart:
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            for kind, pattern in FOREIGN.items():
                if pattern.search(node.value):
                    found[kind] |= {*lines}
    return {kind: lines for kind, lines in found.items() if lines}


# catches: a view that writes tags by hand, and may forget to escape what is between them
def test_other_languages_are_not_in_strings():
    found = breaking(foreign_lines)
    kit, break_ = found.pop(KIT), found.pop(BREAK)
    assert not found
    assert kit.keys() == {"HTML"} and len(kit["HTML"]) <= 40
    assert break_.keys() == {"HTML"} and len(break_["HTML"]) == 1


def test_another_language_is_seen():
    for kind, source in (
        ("HTML", "x = '<div>'"),
        ("HTML", "x = f'<p class=\"{kind}\">{text}</p>'"),
        ("HTML", "def f():\n    return 'a<br>b'"),
        ("HTML", 'x = f"""\n<svg viewBox="0 0 1 1">{parts}\n"""'),
        ("HTML", "x = '<rect x=\"1\"/>'"),
        ("CSS", "x = '.card { color: red }'"),
        ("CSS", "x = f'td {{ padding: {wide}px }}'"),
        ("CSS", "x = 'color:inherit;padding:2px 6px'"),
        ("CSS", "x = f'background:{ground};color:inherit;margin:0'"),
        ("JavaScript", "x = 'const a = 1'"),
        ("JavaScript", "x = 'xs.map((x) => x + 1)'"),
        ("JavaScript", "x = 'export default function draw({ model, el }) {'"),
        ("JavaScript", "x = 'document.querySelector(name).focus()'"),
    ):
        assert kind in foreign_lines(source), source
    assert foreign_lines('x = """\n<ul>\n<li>\n"""\ny = "<p>"') == {"HTML": {1, 2, 3, 4, 5}}


def test_what_is_no_other_language_is_fine():
    for source in (
        "def f():\n    '''Writes <p>, const x = 1 and td { color: red }.'''",
        "tokens = ['<pad>', '<eos>', '</s>']",
        "re.findall(r'<td>(.*?)</td>', markup)",
        "f'a<b, {x} < {y}, <{name} with a mistake>'",
        "element('p', style=f'width:{share}%')",
        "'let it return markup, or give a function f(text)'",
        "f'<{name}>{text}</{name}>'",  # parts of a prompt for a judge
        "'{left:.1f} to {right:,}'.format(left=1, right=2)",
    ):
        assert not foreign_lines(source), source
