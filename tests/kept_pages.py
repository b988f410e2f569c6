"""What rlhf_nb/cli/pages.json keeps, from the parsers: `python tests/kept_pages.py` writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from importlib import import_module
from math import isfinite
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from rlhf_nb.base.fields import ANY, INHERITED, options_of
from rlhf_nb.cli import COMMANDS
from rlhf_nb.cli.help import page_of
from rlhf_nb.cli.quick import FILES
from rlhf_nb.cli.quick import __file__ as QUICK

COMPLETION = """_rlhf_nb() {{
  local words="{commands} launch course"
  [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in
    {options}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _rlhf_nb rlhf-nb"""


def required_of(remarks: Mapping[str, str]) -> dict[str, list[str]]:
    "What is missing -> the names that are each enough."
    required: dict[str, list[str]] = {}
    for option, remark in remarks.items():
        others = remark.partition(", or ")[2]
        enough = [option, *re.findall(r"\w+", others)]
        if "required" in remark and not any(option in names for names in required.values()):
            required[f"--{option} is missing" + f" (or {others})" * bool(others)] = enough
    return required


def kept_hint(hint: Any) -> Any:
    "An annotation as `rlhf_nb.base.fields.annotation` reads it."
    if len(parts := options_of(hint)) > 1:
        return [*map(kept_hint, parts)]
    kind, of = get_origin(hint), get_args(hint)
    if kind is Annotated:
        ends = {f.name: getattr(of[1], f.name) for f in fields(of[1])}
        return {of[0].__name__: {k: x for k, x in ends.items() if isfinite(x)}}
    if kind is list:
        return {"list": kept_hint(of[0])}
    return of[0] if kind is Literal else None if hint is NoneType else hint.__name__


def values_of(
    known: Mapping, page: Mapping, theirs: Collection[str], hints: Mapping
) -> dict[str, dict]:
    "What a value may be: of numbers, of choices, and of options that name a file or a folder."
    shown = {flags[0].lstrip("-") for entries in page["groups"].values() for flags, _ in entries}
    shown |= {name for name, (hint, _) in INHERITED.items() if hint is not ANY}
    values = {}
    for name, action in known.items():
        if action.option_strings and (name in shown or name not in theirs):
            kind, choices = getattr(action.type, "__name__", ""), list(action.choices or [])
            how = dict(nargs="+") if action.nargs == "+" else {}
            how |= dict(type=kind) if kind.partition(" ")[0] in ("int", "float") else {}
            plain = choices and all(isinstance(x, str | None) for x in choices)
            how |= dict(choices=choices) if plain else {}
            how |= dict(hint=kept_hint(hints[name])) if "type" in how else {}
            if {*how} - {"nargs"} or FILES.match(name):
                values[name] = how
    return values


def kept_pages() -> dict:
    "Of each command: its page of help, the names of its own options, those that are required."
    pages = {}
    for name in COMMANDS:
        parser = getattr(import_module(f"rlhf_nb.cli.{name}"), f"{name}_parser")()
        flags = [x for x, action in parser.known.items() if action.option_strings]
        page = page_of(parser.about, parser.known, parser.theirs, False)
        pages[name] = dict(
            page=page,
            values=values_of(parser.known, page, parser.theirs, parser.ranges),
            section=parser.about.section or name,
            runs=name in ("plot", "view", "replay"),
            names=[x for x in flags if x not in parser.theirs],
            trains=name == "replay" or bool(parser.theirs),
            required=required_of(parser.about.required),
            refused=[],
        )
    pages["replay"]["refused"] = pages["ppo"]["names"]  # by the command itself, which says why
    lines = []
    for name, its in pages.items():
        shown = [flags[0][2:] for told in its["page"]["groups"].values() for flags, _ in told]
        words = " ".join(f"--{x}" for x in dict.fromkeys([*its["names"], *filter(None, shown)]))
        lines.append(f'{name}) words="{words}" ;;')
    made = COMPLETION.format(commands=" ".join(pages), options="\n    ".join(lines))
    return pages | dict(completion=made)


if __name__ == "__main__":
    with open(QUICK.replace("quick.py", "pages.json"), "w", encoding="utf-8") as file:
        file.write(json.dumps(kept_pages(), indent=1, ensure_ascii=False) + "\n")
