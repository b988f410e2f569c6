"""Wrong answers made from a right one, by changes of its syntax tree.

Each mutant has one change: a hyperparameter frozen, a number changed, a detach added or removed, a
mask dropped, a reduction changed, an operator flipped, two arguments swapped, an index shifted. Of
those that are made everywhere (`_anywhere`) there are too many: some of them, others in each run.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import itertools
import random
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_nb.exercises.engine import Exercise
from rlhf_nb.exercises.values import Raised, map_numbers


def others(text: str) -> dict[str, tuple[str, ...]]:
    "From words such as mean:sum, or sum:mean,amax where there are two."
    pairs = (word.split(":") for word in text.split())
    return {name: tuple(instead.split(",")) for name, instead in pairs}


FLIPS: dict[type, tuple[type, ...]] = {
    getattr(ast, name): tuple(getattr(ast, x) for x in instead)
    for name, instead in others(
        """Add:Sub Sub:Add Mult:Div Div:Mult FloorDiv:Mult Pow:Mult BitAnd:BitOr BitOr:BitAnd And:Or
        Or:And Lt:LtE,Gt LtE:Lt,GtE Gt:GtE,Lt GtE:Gt,LtE Eq:NotEq NotEq:Eq In:NotIn NotIn:In"""
    ).items()
}
REDUCTIONS = others(
    """sum:mean,amax mean:sum amax:amin amin:amax max:min min:max argmax:argmin argmin:argmax
    maximum:minimum minimum:maximum any:all all:any var:std std:var cumsum:cumprod
    softmax:log_softmax log_softmax:softmax ceil:floor floor:ceil sorted:list"""
)
DIMMED = {*"cat stack sum mean amax amin any all cumsum softmax log_softmax argmax".split()}


@dataclass(frozen=True)
class Mutant:
    "A right answer with one change."

    kind: str
    what: str  # the change, as source: old → new
    program: Callable


class NoMutant(Exception):
    "A change that turned out to be of another kind."


def _call(name: str, *given: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(given), [])


def _edits(tree: ast.FunctionDef, case: dict[str, Any]) -> Iterator[tuple[str, int, Any, ast.AST]]:
    "Each change as: its kind, the index of a node in ast.walk, the new node, and its expression."
    nodes = list(ast.walk(tree))
    parent = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    scalars = {k for k, x in case.items() if isinstance(x, (int, float, str))}
    masks = {k for k, x in case.items() if isinstance(x, Tensor) and x.dtype == torch.bool}

    def around(node: ast.AST) -> ast.AST:
        "The expression that a change of this node shows in."
        up = parent[node]
        while isinstance(up, (ast.Tuple, ast.Slice, ast.UnaryOp, ast.keyword, ast.List)):
            up = parent[up]
        return up if isinstance(up, ast.expr) else node

    def in_a_slice(node: ast.AST) -> bool:
        up = parent.get(node)
        while isinstance(up, (ast.UnaryOp, ast.Tuple, ast.BinOp)):
            node, up = up, parent.get(up)
        return isinstance(up, ast.Slice) or (isinstance(up, ast.Subscript) and up.slice is node)

    for i, node in enumerate(nodes):
        make = lambda new: copy.deepcopy(new)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id in scalars:
                yield "freeze", i, ast.Constant(case[node.id]), ast.Name(node.id, ast.Load())
            if node.id in masks:
                yield "mask", i, _call("_ones", make(node)), around(node)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            kind = "shift" if in_a_slice(node) else "literal"
            up = parent[node]
            if isinstance(up, ast.UnaryOp):
                up = parent[up]
            of = up if isinstance(up, ast.keyword) else None
            in_call = parent[of] if of is not None else up
            if isinstance(in_call, ast.Call) and getattr(in_call.func, "attr", "") in DIMMED:
                kind = "reduction"
            yield kind, i, ast.Constant(node.value + 1), around(node)
            if isinstance(node.value, float) and node.value not in (0.0, 1.0):
                yield kind, i, ast.Constant(node.value * 2), around(node)
            if kind == "shift" or node.value == 1:
                yield kind, i, ast.Constant(node.value - 1), around(node)
        op = node.op if isinstance(node, (ast.BinOp, ast.BoolOp)) else None
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            op = node.ops[0]
        for new in FLIPS.get(type(op), ()):
            other: Any = make(node)
            if isinstance(node, ast.Compare):
                other.ops = [new()]
            else:
                other.op = new()
            yield "operator", i, other, node
        if isinstance(op, ast.Mult):
            yield "mask", i, _call("_unmasked", make(node.left), make(node.right)), node
        if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
            yield "operator", i, make(node.operand), node
        if isinstance(node, ast.IfExp):
            yield "operator", i, make(node.body), node
            yield "operator", i, make(node.orelse), node
        if (
            isinstance(node, ast.Subscript)
            and not isinstance(node.slice, (ast.Constant, ast.Slice))
            and isinstance(node.ctx, ast.Load)
        ):
            yield "mask", i, _call("_all", make(node.value), _as_value(node.slice)), node
        if isinstance(node, ast.Call):
            yield from _calls(node, i)


def _anywhere(tree: ast.FunctionDef) -> Iterator[tuple[str, int, Any, ast.AST]]:
    "A call around an expression, a name for another, an open slice, a statement left out."
    nodes = list(ast.walk(tree))
    parent = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    names = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    names |= {one.arg for one in tree.args.args}
    shapes = [x for x in nodes if re.match(r"len\(|torch\.zeros|[^\n]+\.shape$", ast.unparse(x))]
    of_a_shape = {inner for x in shapes for inner in ast.walk(x)}
    kinds = ast.BinOp, ast.UnaryOp, ast.Call, ast.Subscript, ast.Name, ast.Compare
    for i, x in enumerate(nodes):
        if x in of_a_shape or not isinstance(getattr(x, "ctx", ast.Load()), ast.Load):
            continue
        up = parent[x] if isinstance(parent.get(x), ast.expr) else x
        for name in AROUND if isinstance(x, kinds) else ():
            yield name[1:], i, _call(name, copy.deepcopy(x)), up
        for name in sorted(names - {x.id}) if isinstance(x, ast.Name) and x.id in names else ():
            yield "name", i, ast.Name(name, ast.Load()), up
        new: Any = copy.deepcopy(x)
        for end in ("lower", "upper") if isinstance(x, ast.Slice) else ():
            if getattr(x, end):
                new = copy.copy(x)
                setattr(new, end, None)
                yield "open", i, new, x
        if isinstance(x, (ast.Assign, ast.AugAssign)):
            yield "drop", i, ast.Pass(), x
        if isinstance(x, ast.With):
            yield "drop", i, ast.If(ast.Constant(True), new.body, []), x
        if isinstance(x, ast.For):
            new.body.append(ast.Break())
            yield "break", i, new, x


def _around(of: Callable[[Any], bool], change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        if not of(x):
            raise NoMutant
        return change(x)

    return call


AROUND: dict[str, Callable[[Any], Any]] = {
    "_clamp": _around(lambda x: _is_float(x), lambda x: x.clamp(-10, 10)),
    "_minus": _around(lambda x: _is_float(x), lambda x: -x),
    "_first": _around(lambda x: isinstance(x, Tensor) and x.ndim > 0, lambda x: x[:1].expand_as(x)),
    "_not": _around(lambda x: _is_bool(x), lambda x: ~x),
    "_more": _around(lambda x: type(x) is int, lambda x: x + 1),
    "_less": _around(lambda x: type(x) is int, lambda x: x - 1),
}
MANY = 40  # of each exercise


def _as_value(node: ast.expr) -> ast.expr:
    sliced = any(isinstance(n, ast.Slice) for n in ast.walk(node))
    return ast.Constant(None) if sliced else copy.deepcopy(node)


def _calls(node: ast.Call, i: int) -> Iterator[tuple[str, int, Any, ast.AST]]:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))

    def renamed(new: str) -> ast.Call:
        other = copy.deepcopy(node)
        if isinstance(other.func, ast.Attribute):
            other.func.attr = new
        else:
            other.func.id = new
        return other

    of = node.func.value if isinstance(node.func, ast.Attribute) else None
    known = of is not None or name in ("max", "min", "sorted", "any", "all")
    for new in REDUCTIONS.get(name, ()) if known else ():
        yield "reduction", i, renamed(new), node
    dimmed = name in DIMMED - {"cat", "stack", "cumsum"} and of is not None
    if dimmed and (node.args or node.keywords):
        other = copy.deepcopy(node)
        other.args = other.args[:1] if ast.unparse(of) == "torch" else []
        other.keywords = [k for k in other.keywords if k.arg not in ("dim", "keepdim")]
        yield "reduction", i, other, node
    if name == "clamp":
        for kept in range(2) if len(node.args) == 2 else ():
            bound = ast.keyword(("min", "max")[kept], copy.deepcopy(node.args[kept]))
            yield "reduction", i, ast.Call(copy.deepcopy(node.func), [], [bound]), node
        if len(node.args) + len(node.keywords) == 1:
            yield "reduction", i, copy.deepcopy(of), node
    plain = ("flip", "abs", "log", "exp", "sqrt", "square", "round", "float")
    if name in plain and of is not None and ast.unparse(of) not in ("torch", "math"):
        yield "reduction" if name != "flip" else "shift", i, copy.deepcopy(of), node
    if name == "where" and len(node.args) == 3:
        yield "mask", i, copy.deepcopy(node.args[1]), node
    if name == "masked_fill":
        yield "mask", i, copy.deepcopy(of), node
    if name == "detach" and of is not None:
        yield "detach", i, copy.deepcopy(of), node


def _detached_everywhere(tree: ast.FunctionDef) -> Iterator[tuple[int, ast.expr]]:
    "A detach around each expression."
    for i, node in enumerate(ast.walk(tree)):
        loaded = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if loaded and isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Call, ast.Subscript, ast.Name)):
            yield i, _call("_detached", copy.deepcopy(node))


class _Put(ast.NodeTransformer):
    "The tree with another node in the place of one."

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else super().visit(node)


def _program(right: Callable, tree: ast.FunctionDef, helpers: dict[str, Any]) -> Callable:
    scope = {**right.__globals__, **helpers}
    module = ast.fix_missing_locations(ast.Module([tree], []))
    exec(compile(module, f"<mutant of {tree.name}>", "exec"), scope)
    return scope[tree.name]


def _ones(mask: Tensor) -> Tensor:
    return torch.ones_like(mask)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _is_bool(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool


def _unmasked(a: Any, b: Any) -> Any:
    if _is_bool(b):
        return a
    if _is_bool(a):
        return b
    raise NoMutant


def _all(x: Any, index: Any) -> Any:
    if not _is_bool(index) or not isinstance(x, Tensor):
        raise NoMutant
    return x.reshape(-1, *x.shape[index.ndim :])


def mutants(exercise: Exercise, seed: int, many: int = MANY) -> list[Mutant]:
    "The mutants of the right answer that run on some case of one draw."
    right, cases, grads = exercise.right, exercise.draw(seed), exercise.grads
    tree = ast.parse(textwrap.dedent(inspect.getsource(right))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    tree.returns, tree.decorator_list = None, []
    for node in ast.walk(tree):
        for annotated in [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.AnnAssign)]:
            assert annotated.value is not None
            plain = ast.Assign([annotated.target], annotated.value)
            node.body[node.body.index(annotated)] = plain  # type: ignore[attr-defined]
    for one in tree.args.args:
        one.annotation = None
    names = [one.arg for one in tree.args.args]
    case = {name: x for name, x in cases[0].items() if name in names}
    found: dict[str, Mutant] = {}

    def add(kind: str, what: str, program: Callable) -> None:
        while what in found:
            what += " (again)"
        if runs(exercise, program, cases):
            found[what] = Mutant(kind, what, program)

    helpers = {"_ones": _ones, "_unmasked": _unmasked, "_all": _all, **AROUND}
    anywhere = list(_anywhere(tree))
    some = random.Random(seed).sample(anywhere, min(many, len(anywhere)))
    for kind, i, new, around in [*_edits(tree, case), *some]:
        other = copy.deepcopy(tree)
        old = list(ast.walk(other))[i]
        changed = _Put(old, new).visit(other)
        what = f"{kind}: {ast.unparse(around)} | {ast.unparse(old)} → {ast.unparse(new)}"
        add(kind, what, _program(right, changed, helpers))
    for name, x in case.items():  # every use of a hyperparameter frozen at once
        if isinstance(x, (int, float, str)):
            position = list(case).index(name)
            frozen = lambda *given, k=position, x=x: right(*given[:k], x, *given[k + 1 :])
            add("freeze", f"freeze: {name} = {x!r} everywhere", frozen)
    for one, two in itertools.combinations(case, 2):
        a, b = case[one], case[two]
        if type(a) is type(b) and (
            not isinstance(a, Tensor) or (a.dtype == b.dtype and a.shape == b.shape)
        ):
            j, k = list(case).index(one), list(case).index(two)

            def swapped(*given: Any, j: int = j, k: int = k) -> Any:
                given = list(given)
                given[j], given[k] = given[k], given[j]
                return right(*given)

            add("swap", f"swap: {one}, {two}", swapped)
    flows = [exercise.gradients(right, one) for one in cases if exercise.flows(one)]
    if any(bool(grad.any()) for found_here in flows for grad in (found_here or {}).values()):
        for i, new in _detached_everywhere(tree):
            other = copy.deepcopy(tree)
            old = list(ast.walk(other))[i]
            matters: list[bool] = []

            def _detached(x: Any, matters: list[bool] = matters) -> Any:
                if not isinstance(x, Tensor):
                    return x
                matters.append(x.requires_grad)
                return x.detach()

            changed = _program(right, _Put(old, new).visit(other), {"_detached": _detached})
            for one in cases:
                given = copy.deepcopy(one)
                for k in grads:
                    map_numbers(given[k], lambda x: x.requires_grad_() if _is_float(x) else x)
                with contextlib.suppress(Exception):
                    exercise.result(changed, given)
            if any(matters):  # a detach of what carries no gradient is no change
                add("detach", f"detach: {ast.unparse(old)}.detach()", changed)
    return list(found.values())


def runs(exercise: Exercise, program: Callable, cases: list[dict[str, Any]]) -> bool:
    "Whether a program gives a result on some case, and ends on all: else it is no wrong answer."
    some = False
    for case in cases:
        found = exercise.result(lambda *given: ended(program, *given), copy.deepcopy(case))
        if isinstance(found, Raised) and isinstance(found.error, (NoMutant, Endless)):
            return False
        some = some or not isinstance(found, Raised)
    return some


class Endless(BaseException):
    "A loop that does not end."


def ended(program: Callable, *given: Any) -> Any:
    "What a program returns, if it takes fewer than 20,000 steps."
    steps = itertools.count()

    def step(frame: Any, event: str, arg: Any) -> Any:
        if next(steps) > 20_000:
            raise Endless
        return step if frame.f_code.co_filename.startswith("<mutant") else None

    before = sys.gettrace()
    sys.settrace(step)
    try:
        return program(*given)
    finally:
        sys.settrace(before)
