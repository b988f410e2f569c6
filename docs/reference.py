"""What autodoc does not know of this project: comments beside parameters, docstrings that are
plain text, classes put together from private parts, and notebooks as the source.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import io
import json
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from collect import Project, assigned
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

LIB = "rlhf_nb"


# ---- Plain text to reStructuredText ----


def plain(line: str) -> str:
    """A line of a docstring or a comment: backticks are code, arXiv numbers are links, and nothing
    else has a meaning."""
    parts = re.split(r"(`[^`]+`|https?://\S+|arXiv:? ?\d{4}\.\d{4,5})", line)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\*|_`])", r"\\\1", parts[i])
    for i in range(1, len(parts), 2):
        if parts[i].startswith("`"):
            parts[i] = f"\\ `{parts[i]}`\\ "
        elif parts[i].startswith("arXiv"):
            parts[i] = f"`{parts[i]} <https://arxiv.org/abs/{parts[i][-10:].lstrip(': ')}>`__"
    return re.sub(r"^[-+.:#>]", r"\\\g<0>", "".join(parts))


# ---- Comments beside parameters ----


def remarks(source: str) -> dict[int, tuple[str, bool]]:
    "Line -> its comment, and whether the line has nothing else."
    lines = source.splitlines()
    return {
        t.start[0]: (t.string.lstrip("# "), lines[t.start[0] - 1].lstrip().startswith("#"))
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT
    }


def remark_at(found: dict[int, tuple[str, bool]], first: int, last: int) -> str:
    "The comment behind a parameter; otherwise those that stand alone above it."
    if last in found and not found[last][1]:
        return found[last][0]
    above: list[str] = []
    while (line := first - 1 - len(above)) in found and found[line][1]:
        above.insert(0, found[line][0])
    return " ".join(above)


def parameters(node: ast.FunctionDef) -> list[ast.arg]:
    "All of a function's, in their order."
    a = node.args
    return [
        *a.posonlyargs,
        *a.args,
        *filter(None, [a.vararg]),
        *a.kwonlyargs,
        *filter(None, [a.kwarg]),
    ]


def of_function(node: ast.FunctionDef, found: dict[int, tuple[str, bool]]) -> dict[str, str]:
    "Parameter -> its comment; what is returned is under `return`."
    end = node.returns.end_lineno if node.returns else None
    a = node.args
    given = zip(reversed([*a.posonlyargs, *a.args]), reversed(a.defaults))
    default = {arg.arg: value for arg, value in [*given, *zip(a.kwonlyargs, a.kw_defaults)]}
    last = {  # the line that ends a parameter: that of its default, where it has one
        arg: (default.get(arg.arg) or arg).end_lineno for arg in parameters(node)
    }
    said = {
        arg.arg: remark_at(found, arg.lineno, line) for arg, line in last.items() if line != end
    }
    if end:  # ruff may put the type on a line of its own, before `):  # the comment`
        behind = [found[line][0] for line in range(end, node.body[0].lineno) if line in found]
        said["return"] = " ".join(behind)
    return {name: words for name, words in said.items() if words}


@cache
def commented(module: str) -> dict[str, dict[str, str]]:
    """Qualified name -> the comments of its parameters or fields, for all functions and classes of
    a module."""
    source, said = inspect.getsource(importlib.import_module(module)), {}
    found = remarks(source)

    def visit(node: ast.AST, prefix: str) -> None:
        for child in getattr(node, "body", []):
            if isinstance(child, ast.FunctionDef):
                said[prefix + child.name] = of_function(child, found)
            if isinstance(child, ast.ClassDef):
                fields = [part for part in child.body if isinstance(part, ast.AnnAssign)]
                said[prefix + child.name] = {
                    ast.unparse(part.target): words
                    for part in fields
                    if (words := remark_at(found, part.lineno, part.end_lineno))
                }
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(source), "")
    return said


def own_parts(cls: type) -> list[type]:
    "The class and its ancestors in this package, the oldest first."
    return [part for part in reversed(cls.__mro__) if part.__module__.startswith(LIB)]


def comments_of(obj: Any) -> dict[str, str]:
    """What is said beside the parameters of a function, or beside the fields and the parameters of
    a class."""
    if not inspect.isclass(obj):
        f = inspect.unwrap(getattr(obj, "fget", None) or getattr(obj, "__func__", obj))
        return (
            commented(f.__module__).get(f.__qualname__, {})
            if getattr(f, "__module__", "").startswith(LIB)
            else {}
        )
    said: dict[str, str] = {}
    for part in own_parts(obj):
        said |= commented(part.__module__).get(part.__qualname__, {}) | commented(
            part.__module__
        ).get(f"{part.__qualname__}.__init__", {})
    if dataclasses.is_dataclass(obj):
        said |= {
            f.name: f.metadata["help"]
            for f in dataclasses.fields(obj)
            if f.name in own_fields(obj) and "help" in f.metadata
        }
    return said


# ---- Classes ----


def own_fields(cls: type) -> list[str]:
    """Fields of a dataclass or a named tuple that are declared in this package: of transformers'
    arguments there are a hundred more."""
    own = [name for part in own_parts(cls) for name in inspect.get_annotations(part)]
    return list(dict.fromkeys(name for name in own if not name.startswith("_")))


def field_text(cls: type, name: str) -> str:
    "`name: type = default`."
    parameter = inspect.signature(cls).parameters[name]
    empty, default = inspect.Parameter.empty, parameter.default
    if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        default = {f.name: f for f in dataclasses.fields(cls)}[name].default_factory()
    annotation = (
        parameter.annotation
        if isinstance(parameter.annotation, str)
        else inspect.formatannotation(parameter.annotation)
    )
    return f"{name}: {annotation}" + ("" if default is empty else f" = {default!r}")


def signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    written: str | None,
    returns: str | None,
) -> tuple[str, None] | None:
    "Of a dataclass the fields that are declared here, and dots where it inherits more."
    if what != "class" or not dataclasses.is_dataclass(obj):
        return None
    known = inspect.signature(obj).parameters
    names = [n for n in own_fields(obj) if n in known]
    more = [] if len(names) == len(known) else ["..."]
    return "(" + ", ".join([*more, *(field_text(obj, n) for n in names)]) + ")", None


def bases(app: Sphinx, name: str, obj: type, options: Any, found: list) -> None:
    "Private parts are left out: what they stand on is shown."
    seen = [
        part for part in obj.__mro__[1:] if not part.__name__.startswith("_") and part is not object
    ]
    found[:] = seen[:1] or [object]


def skipped(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    "Of a class's members: the methods and properties that this package wrote and explains."
    if what == "module":
        return None
    f = inspect.unwrap(getattr(obj, "fget", None) or getattr(obj, "__func__", obj))
    ours = inspect.isfunction(f) and f.__module__.startswith(LIB) and bool(f.__doc__)
    return skip or not ours


def parameters_of(obj: Any) -> set[str]:
    """Names that a caller can give. Of a dictionary and the like, which have no signature that
    Python knows, none."""
    try:
        return set(inspect.signature(obj).parameters) if callable(obj) else set()
    except ValueError:
        return set()


# ---- Values ----


@cache
def assignments(module: str) -> dict[str, tuple[str, str, int]]:
    "Name -> the expression, the comment behind it or above it, and the line."
    source = inspect.getsource(importlib.import_module(module))
    found, said = remarks(source), {}
    for node in ast.parse(source).body:
        for name in assigned(node):
            words = remark_at(found, node.lineno, node.end_lineno)
            alone = isinstance(
                getattr(node, "targets", [node])[0], (ast.Name, ast.AnnAssign)
            )  # not one of several, as in `a, b = ...`
            said[name] = (
                ast.unparse(node.value) if alone else "",
                "" if words.startswith("%%") else words,
                node.lineno,
            )
    return said


def value_text(module: str, name: str, obj: Any) -> list[str]:
    "What is said of a constant, and its value where that is short."
    expression, words, _ = assignments(module)[name]
    shown = [expression] + [repr(obj)] * (
        not re.search(r"<| at 0x|/", repr(obj))
    )  # no path of the machine that builds, no address in memory
    short = next(
        (
            f"``{text}``"
            for text in shown
            if text and len(text) <= 100 and not re.search(r"`|^_", text)
        ),
        "",
    )
    size = f"{type(obj).__name__} of {len(obj)}." if hasattr(type(obj), "__len__") else ""
    return [plain(words), "", short or plain(size)]


# ---- What is shown ----


def shown(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    "The docstring as plain text, and behind it the comments beside the parameters."
    if what == "data":
        module, _, short = name.rpartition(".")
        lines[:] = value_text(module, short, obj)
        return
    lines[:] = [
        line and " " * (len(line) - len(line.lstrip())) + plain(line.lstrip()) for line in lines
    ]
    if what == "module":
        return
    said, given = comments_of(obj), parameters_of(obj)
    lines += [
        "",
        *(
            f":{'param' if name in given else 'ivar'} {name}: {plain(words)}"
            for name, words in said.items()
            if name != "return"
        ),
    ]
    if "return" in said:
        lines.append(f":returns: {plain(said['return'])}")


# ---- Where it is made ----


@cache
def cells(module: str) -> list[tuple[int, str, str]]:
    "Where in the module each cell of a notebook begins: line, notebook, cell."
    lines = inspect.getsource(importlib.import_module(module)).splitlines()
    found = (
        (i, re.match(r"# %% \.\./nbs/(\S+)\.ipynb #(\w+)$", line))
        for i, line in enumerate(lines, 1)
    )
    return [(i, match[1].split("/")[-1], match[2]) for i, match in found if match]


def place(module: str, name: str) -> tuple[str, int] | None:
    "The module and the line in which a name is defined."
    if name in assignments(module):
        return module, assignments(module)[name][2]
    obj: Any = importlib.import_module(module)
    for part in name.split("."):
        obj = (
            inspect.getattr_static(obj, part)
            if inspect.isclass(obj) and part in dir(obj)
            else getattr(obj, part)
        )
    obj = inspect.unwrap(getattr(obj, "fget", None) or getattr(obj, "__func__", obj))
    return obj.__module__, inspect.getsourcelines(obj)[1]


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """The cell that exports a thing, seen from api/; of a module that is written by hand, its file
    in the repository."""
    if not info.get("fullname"):
        return None
    module, line = place(info["module"], info["fullname"])
    if not cells(module):
        file = Path(inspect.getfile(importlib.import_module(module)))
        package = Path(inspect.getfile(importlib.import_module(module.partition(".")[0])))
        return f"{Project(package.parents[1]).url(file)}#L{line}"
    above = [(page, cell) for start, page, cell in cells(module) if start <= line]
    return f"../{above[-1][0]}.html#cell-{above[-1][1]}" if above else None


# ---- From a page to the reference ----


@cache
def names_on(srcdir: str) -> dict[str, dict[str, str]]:
    "Page -> name -> where it is documented, as collect.py found them."
    return json.loads(Path(srcdir, "names.json").read_text(encoding="utf-8"))


def linked(app: Sphinx, doctree: nodes.document) -> None:
    """In prose, `masked_mean` leads to the reference: once in each section, on pages whose code
    makes or imports it."""
    known, seen = names_on(str(app.srcdir)).get(app.env.docname, {}), set()
    for dash in [part for part in doctree.findall(nodes.Text) if part == " -- "]:
        dash.parent.replace(dash, nodes.Text(" – "))  # Sphinx's own, behind a parameter
    for literal in list(doctree.findall(nodes.literal)):
        above = [
            part
            for part in ancestors(literal)
            if isinstance(part, (nodes.section, nodes.title, nodes.reference, pending_xref))
        ]
        key = (id(above[0]) if above else 0, name := literal.astext().removesuffix("()"))
        if name not in known or key in seen or (above and not isinstance(above[0], nodes.section)):
            continue
        seen.add(key)
        to = dict(
            refdomain="py",
            reftype="obj",
            reftarget=known[name],
            refdoc=app.env.docname,
            refwarn=True,
        )
        literal.replace_self(pending_xref("", literal.deepcopy(), **to))


def ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    "From the inside to the outside."
    while node := node.parent:
        yield node


def setup(app: Sphinx) -> dict[str, bool]:
    for event, handler in {
        "autodoc-process-docstring": shown,
        "autodoc-process-signature": signature,
        "autodoc-process-bases": bases,
        "autodoc-skip-member": skipped,
        "doctree-read": linked,
    }.items():
        app.connect(event, handler)
    return dict(parallel_read_safe=True, parallel_write_safe=True)
