"""Chat templates come with models, and are programs. Here is the sandbox that renders them, and
ends: it counts turns of loops, calls, and what a product repeats. It does not count text that
doubles by `~`, `+` or a block of `set`, and filters that pad to a width."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from transformers.utils import chat_template_utils

# Private use of transformers: its module `chat_template_utils` makes its environment from the name
# ImmutableSandboxedEnvironment, which `bound_templates` replaces for the whole process.

MOST_STEPS = 10**6


class _Counting(CodeGenerator):
    "Each loop goes through `Bounded.counted`."

    def visit_For(self, node: Any, frame: Any) -> None:
        node.iter = nodes.Call(nodes.EnvironmentAttribute("counted"), [node.iter], [], None, None)
        super().visit_For(node, frame)


class Bounded(ImmutableSandboxedEnvironment):
    "Raises SecurityError where a rendering takes more than MOST_STEPS steps."

    code_generator_class = _Counting
    intercepted_binops = frozenset({"*", "**"})

    def spend(self, context: Any, steps: float) -> None:
        context.steps = getattr(context, "steps", 0) + steps
        if context.steps > MOST_STEPS:
            raise SecurityError(f"its loops or products take more than {MOST_STEPS:,} steps")

    @pass_context
    def counted(self, context: Any, items: Iterable[Any]) -> Iterable[Any]:
        for item in items:
            self.spend(context, 1)
            yield item

    def call(self, context: Any, thing: Any, *given: Any, **named: Any) -> Any:
        self.spend(context, 10)
        return super().call(context, thing, *given, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        x, y = (len(v) if hasattr(v, "__len__") else abs(v) for v in (left, right))
        whole = isinstance(left, int) and isinstance(right, int) and operator == "*"
        self.spend(context, x.bit_length() + y.bit_length() if whole else x * y)
        return super().call_binop(context, operator, left, right)


def bound_templates() -> None:
    "From now on transformers renders every chat template in this sandbox."
    chat_template_utils.ImmutableSandboxedEnvironment = Bounded  # type: ignore[misc]
