"""The page that `--help` prints: the options that matter, by headings, or every option."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass(frozen=True)
class About:
    "What `--help` says of a command."

    usage: str  # behind "rlhf-nb"
    text: str  # what it does, what it needs, what it writes
    examples: tuple[str, ...]
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of `--help`, by heading
    required: Mapping[str, str] = field(default_factory=dict)  # option -> "required", or a remark
    help: Mapping[str, str] = field(default_factory=dict)  # option -> a shorter text than its own
    section: str = ""  # of a recipe that the command reads; empty: that of its own name


def page_of(
    about: About,
    known: Mapping[str, argparse.Action],  # every option of the command, by name
    theirs: Collection[str],  # those that transformers.TrainingArguments declares
    everything: bool,  # --help-all
) -> dict[str, Any]:
    "What the help of a command shows: plain values, which pages.json keeps."
    headings = {title: list(names) for title, names in about.options.items()}
    rest = [name for name in known if not any(name in names for names in headings.values())]
    command = f"rlhf-nb {about.usage.split()[0]}"
    more = f"\n\n{command} --help-all shows every option." if rest else ""
    if not headings:
        rest.sort(key=lambda name: len(known[name].option_strings) > 0)  # positional ones first
        headings["options"], more = [name for name in rest if name != "help_all"], ""
    elif everything and rest:
        headings["other options"] = [name for name in rest if name not in theirs]
        headings["transformers.TrainingArguments"] = [name for name in rest if name in theirs]
    groups = {title: [entry(about, known[x]) for x in names] for title, names in headings.items()}
    end = "Examples:\n  " + "\n  ".join(about.examples) + ("" if everything else more)
    return dict(usage=f"rlhf-nb {about.usage}", text=about.text, end=end, groups=groups)


def help_text(page: Mapping[str, Any]) -> str:
    "The help, as wide as the terminal."
    shown = argparse.ArgumentParser(
        None,
        page["usage"],
        textwrap.fill(page["text"], min(100, shutil.get_terminal_size().columns - 2)),
        page["end"],
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=34),
        add_help=False,
    )
    for title, entries in page["groups"].items():
        group = shown.add_argument_group(title)
        for flags, how in entries:
            group.add_argument(*flags, **how)
    return shown.format_help()


def entry(about: About, action: argparse.Action) -> tuple[list[str], dict[str, Any]]:
    "One option of the page: its name and value, what it does, its default."
    name, default = action.dest, getattr(action.default, "value", action.default)
    remark = about.required.get(name, "")
    unset = default is None or default is False or default in ("", [], argparse.SUPPRESS)
    if not (unset or remark):
        words = default if isinstance(default, list) else [default]
        remark = f"default: {' '.join(map(str, words))}".replace("%", "%%")
    text = about.help.get(name) or action.help or ""
    how: dict[str, Any] = dict(help=f"{text} ({remark})" if remark else text)
    if action.nargs == 0 or action.const is True:
        also = [f"--no_{name}"] if default is True else []
        flags = action.option_strings if name == "help" else action.option_strings[:1]
        return [*flags, *also], how | dict(action="store_true")
    choices = "{" + ",".join(str(x or "none") for x in action.choices or []) + "}"
    kind, _, none = getattr(action.type, "__name__", "").partition(" or ")
    kind = dict(int="INT", float="NUMBER").get(kind, "TEXT") + f"|{none}" * bool(none)
    metavar = action.metavar or (choices if 2 < len(choices) < 60 else kind)
    how |= dict(metavar=metavar) | (dict(nargs=action.nargs) if action.nargs else {})
    return list(action.option_strings[:1]) or [name], how
