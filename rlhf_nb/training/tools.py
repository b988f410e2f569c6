"""Environments whose turns are calls of tools, as those of trl: every public method is a tool.
Calls are read in the Hermes form, <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from rlhf_nb.base.encoding import render

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FORM = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    "What the chat template shows of a tool. Raises ValueError where it does not describe itself."
    name = getattr(tool, "__qualname__", repr(tool))
    try:
        if inspect.iscoroutinefunction(tool):
            raise ValueError("it is asynchronous, which is not supported")
        return dict(get_json_schema(tool))
    except Exception as error:  # transformers has several of its own
        raise ValueError(
            f"{name} cannot be a tool: {error}. Give every argument a type, and a docstring with a "
            "section Args: that describes each; a method that is no tool begins with _."
        ) from error


class ToolEnvironment:
    "An environment in Gymnasium's terms, of one without `step`; a turn without a call ends it."

    role = "tool"  # observes

    def __init__(
        self,
        inner: Any,  # with reset, public methods, and perhaps get_reward; None: tools alone
        tools: Sequence[Callable[..., Any]] = (),  # functions beside the methods
    ):
        own = [] if inner is None else inspect.getmembers(inner, inspect.ismethod)
        public = [x for name, x in own if name[0] != "_" and name not in ("reset", "get_reward")]
        both: list[Any] = [*public, *tools]
        names = [tool.__name__ for tool in both]
        self.inner, self.named = inner, dict(zip(names, both))
        if not both or len(self.named) < len(both):
            raise ValueError(
                f"environment_factory made {inner!r}, which has no step and the tools {names}: "
                "give it step(action), or public methods, each with a name of its own."
            )
        self.schemas = [schema_of(tool) for tool in self.named.values()]
        self.calls = self.errors = 0
        self.reset = (lambda: None) if inner is None else inner.reset
        if hasattr(inner, "get_reward"):
            self.get_reward = inner.get_reward

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        "All calls of a turn, outside its thoughts, make one observation."
        calls = CALL.findall(action.rpartition("</think>")[2])
        said = "\n".join(map(self.call, calls))
        return said, 0.0, not calls, False, dict(calls=self.calls, call_errors=self.errors)

    def call(self, text: str) -> str:
        "What the tool returned, or what was wrong with the call."
        self.calls += 1
        try:
            tool, arguments = self.read(text)
            return str(tool(**arguments))
        except Exception as error:  # whatever a tool does: the policy reads it
            self.errors += 1
            return f"error: {type(error).__name__}: {error}"

    def read(self, text: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        "A tool and its arguments. Raises ValueError or TypeError that says what is wrong."
        call = json.loads(text)
        if not isinstance(call, Mapping) or not isinstance(call.get("arguments"), Mapping):
            raise ValueError(f"write {FORM}")
        if (tool := self.named.get(str(call.get("name")))) is None:
            raise ValueError(f"no tool {call.get('name')!r}: there are {', '.join(self.named)}")
        inspect.signature(tool).bind(**call["arguments"])
        return tool, dict(call["arguments"])

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        "What the chat template gets: the tools, behind those of the row."
        return {**given, "tools": [*given.get("tools", ()), *self.schemas]}

    def check_template(
        self, prompt: Any, tokenizer: PreTrainedTokenizerBase, **settings: Any
    ) -> None:
        """Raises ValueError where a conversation's template does not show the tools, or writes
        calls in another form than Hermes. A text prompt describes its tools itself."""
        if isinstance(prompt, str):
            return
        name, mark = [*self.named][-1], "Uvwx"  # stands for an argument; no template has it
        call = dict(id="0" * 9, type="function", function=dict(name=name, arguments=dict(x=mark)))
        called = [*prompt, dict(role="assistant", content="", tool_calls=[call])]
        text = render(called, tokenizer, "a conversation with a call", **settings)
        calls = [x for x in CALL.findall(text) if mark in x]
        try:
            read = [json.loads(x) for x in calls]
        except ValueError:
            read = []
        if read != [dict(name=name, arguments=dict(x=mark))]:
            around = text[max(0, text.find(mark) - 80) :] if mark in text else "nothing"
            raise ValueError(
                f"the chat_template writes a call of a tool as {around!r}, and calls are read in "
                f"the Hermes form alone (Qwen, SmolLM): {FORM}. Other forms are not supported: set "
                "another tokenizer.chat_template, or give an environment with step(action)."
            )


def as_environment(made: Any, tools: Sequence[Callable[..., Any]] = ()) -> Any:
    "The object itself where it has `step`. Raises ValueError on tools beside that."
    if not hasattr(made, "step") and (tools or hasattr(made, "reset")):
        return ToolEnvironment(made, tools)
    if tools:
        raise ValueError(
            f"tools are given, and environment_factory made {made!r}, whose step reads what the "
            "policy writes: leave out tools, or give an environment without step."
        )
    return made


def inner_of(environment: Any) -> Any:
    "What the user's factory made."
    return environment.inner if isinstance(environment, ToolEnvironment) else environment
