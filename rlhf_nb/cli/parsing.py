"""The parser of every command: fields of dataclasses as options, with a YAML recipe below them."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from rlhf_nb.base.fields import complaint, hints_of, names_of
from rlhf_nb.base.terminal import harmless
from rlhf_nb.cli.help import About, help_text, page_of
from rlhf_nb.cli.quick import ALONE, OPPOSITES, explain_choice, suggestion, unknown_key
from rlhf_nb.cli.recipes import read_recipe


def kinds_of(hint: Any) -> list[Any]:
    "The types that an annotation allows: `list[str] | None` -> [list, NoneType]."
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]
    return [get_origin(part) or part for part in parts]


def converter(kinds: list[Any], inner: Callable[[str], Any]) -> Callable[[str], Any]:
    """What a word means: as `inner` reads it, or None, or JSON, where the field may be that. `none`
    is None too, unless it may be a text that is meant."""
    made: Any = next((kind for kind in kinds if kind is dict or is_dataclass(kind)), None)
    optional = NoneType in kinds
    or_none = optional and (made is not None or not {str, list} & {*kinds})

    def convert(text: str) -> Any:
        if (optional and text == "None") or (or_none and text.lower() == "none"):
            return None
        if made and (text.startswith("{") or str not in kinds):
            return made(**json.loads(text))
        return inner(text)

    convert.__name__ = getattr(inner, "__name__", "value") + " or none" * or_none
    return convert


class ShowHelp(argparse.Action):
    "`--help` and `--help-all`."

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        everything = self.dest == "help_all"
        print(help_text(page_of(parser.about, parser.known, parser.theirs, everything)), end="")
        parser.exit()


class Parser(HfArgumentParser):
    "Options from dataclasses, `--config`, two lengths of help, and errors of one line."

    def __init__(self, about: About, *kinds: Any, **defaults: Any):
        self.about, self.recipe = about, ""
        self.known: dict[str, argparse.Action] = {}  # by the name of the field
        self.hints = {k: hint for kind in kinds for k, hint in get_type_hints(kind).items()}
        self.ranges = {k: hint for kind in kinds for k, hint in hints_of(kind).items()}
        parts = [part for kind in kinds for part in kind.__mro__]
        theirs = [part for part in parts if part.__module__.startswith("transformers.")]
        self.theirs = {name for part in theirs for name in inspect.get_annotations(part)}
        name = about.usage.split()[0]
        super().__init__(kinds, prog=f"rlhf-nb {name}", allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action=ShowHelp, nargs=0, help="show this page")
        self.add_argument("--help-all", action=ShowHelp, nargs=0, help="show every option")
        if any("config" in names for names in about.options.values()):
            self.add_argument("--config", metavar="FILE")
        self.set_defaults(**defaults)

    def add_argument(self, *flags: Any, **how: Any) -> argparse.Action:
        "HfArgumentParser's, where a field may also be None, or several values, or a dictionary."
        kinds = kinds_of(self.hints.get(flags[0].lstrip("-"), str))
        if how.get("type") is string_to_bool:
            how |= dict(nargs="?", const=True)  # `--bf16` alone, also where None is allowed
        if list in kinds:
            how["nargs"] = "+"
        if names := names_of(self.ranges.get(flags[0].lstrip("-"))):
            how.setdefault("choices", names)
        if "choices" in how and NoneType in kinds:
            how["choices"] = [*how["choices"], None]
        if "action" not in how:
            how["type"] = converter(kinds, how.get("type", str))
        action = super().add_argument(*flags, **how)
        self.known.setdefault(action.dest, action)
        return action

    def error(self, message: str) -> NoReturn:
        "What is wrong and how to fix it, on one line; exit code 2."
        if unknown := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            message += "." + suggestion(unknown[1][2:], self.known, "--")
        message = explain_choice(message, {k: x.choices or [] for k, x in self.known.items()})
        message = harmless(" ".join(f"{self.recipe}{message}".split()).rstrip("."))
        stop = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {message}{stop} See {self.prog} --help\n")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        "All options in one namespace: those typed, over the recipe, over the defaults."
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        first.add_argument("--config")
        try:
            path = first.parse_known_args(words)[0].config
        except argparse.ArgumentError as error:
            self.error(str(error))
        if path and "config" in self.known:
            self.recipe = f"{path}: "
            section = self.about.section or self.prog.split()[1]
            settings = self.values(read_recipe(path, section))
            without_help = [word for word in words if word not in ("-h", "--help", "--help-all")]
            self.recipe, now = "", vars(self.parse_args(without_help))
            flags = [w[2:].partition("=")[0] for w in without_help if w[:2] == "--"]
            typed = {x for w in flags if now.get(x := w.replace("-", "_")) not in (None, False)}
            for group in OPPOSITES:
                if typed & {*group.split()}:
                    settings = {k: x for k, x in settings.items() if k not in group.split()}
            self.set_defaults(**settings)
        options = self.parse_args(words)
        for name, hint in self.ranges.items():
            value = getattr(options, name, None)  # None: not given, or read as None where it may be
            if value is not None and (wrong := complaint(f"--{name}", value, hint)):
                self.error(wrong)
        return options

    def values(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        "The settings of a recipe as if each had been typed. Exits where one is no option."
        found: dict[str, Any] = {}
        for key, value in settings.items():
            name = key.replace("-", "_")
            if name in ALONE:
                self.error(f"{key} is for the command line alone: leave it out of the file")
            if name not in self.known:
                self.error(unknown_key(key, self.known))
            if value is None and NoneType not in kinds_of(self.hints.get(name, str)):
                self.error(f"{key} is null: give a value, or leave the line out")
            if isinstance(value, list) and self.known[name].nargs != "+":
                self.error(f"{key} takes one value, not a list")
            texts = [
                json.dumps(item) if isinstance(item, dict) else str(item)
                for item in (value if isinstance(value, list) else [value])
            ]
            typed = [getattr(self.parse_args([f"--{name}={text}"]), name) for text in texts]
            found[name] = [x for one in typed for x in one] if isinstance(value, list) else typed[0]
        return found

    def settings(self, words: Sequence[str]) -> list[Any]:
        "The dataclasses, filled. Exits on unknown words; a dataclass may raise ValueError."
        self.read(words)
        filled = self.parse_args_into_dataclasses(list(words), look_for_args_file=False)
        return list(filled[: len(list(self.dataclass_types))])
