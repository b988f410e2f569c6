"""What a command answers at once, before torch and transformers are imported: its help, an option
that does not exist, options that are missing. tests/kept_pages.py writes what is kept for it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.terminal import harmless
from rlhf_nb.cli.help import help_text
from rlhf_nb.training.compat import CONFIG


def kept() -> dict[str, Any]:
    "Of each command: its page of help, the names of its own options, those that are required."
    return json.loads(Path(__file__).with_name("pages.json").read_text(encoding="utf-8"))


def their_names() -> list[str]:
    "Options of transformers.TrainingArguments, from the source that is installed: no import."
    origin = str(getattr(find_spec("transformers"), "origin", ""))
    source = Path(origin).parent / "training_args.py"
    return re.findall(r"^    ([a-z]\w*): ", source.read_text(encoding="utf-8"), re.MULTILINE)


def suggestion(name: str, known: Iterable[str], of_ppo: bool, before: str = "") -> str:
    "What an unknown option is called here, or the nearest one."
    if of_ppo and name in CONFIG:
        return f" An older name: use {CONFIG[name]}"
    name = "learning_rate" if name == "lr" else name
    return did_you_mean(f"{before}{name}", [f"{before}{x}" for x in known])


def complaint_of(name: str, words: Sequence[str]) -> str:
    "What is wrong with the options, or nothing: then the command's own parser decides."
    own, of_ppo = kept()[name], name in ("ppo", "preflight", "replay")
    flags = [word.partition("=")[0] for word in words if re.match("--[^ ]", word)]
    known = own["names"] + (their_names() if own["trains"] else [])
    refused = kept()["ppo"]["names"] + their_names() if name == "replay" else []  # by the command
    given = {word.partition(":")[0] for word in words}
    for flag in flags:
        key = flag[2:].replace("-", "_")
        if not {key, key.removeprefix("no_")} & {*known, *refused}:
            return f"unrecognized arguments: {flag}.{suggestion(key, known, of_ppo, '--')}"
        given.add(key)
    absent = []
    for option, remark in own["required"].items():
        others = remark.partition(", or ")[2]
        if not {option, *re.findall(r"\w+", others)} & given:
            absent.append(f"--{option} is missing" + f" (or {others})" * bool(others))
        given |= {*re.findall(r"\w+", others)}  # one of them is enough
    return "" if {"config", "dry_run", "help_all"} & given else "; ".join(absent)


def answer(name: str, words: Sequence[str]) -> int | None:
    "The exit code, where the words alone decide; None: the command runs."
    if {"-h", "--help"} & {*words} and not any(word.startswith("--config") for word in words):
        print(help_text(kept()[name]["page"]), end="")
        return 0
    if said := complaint_of(name, words):
        said += "" if said.endswith("?") else "."
        print(harmless(f"rlhf-nb {name}: {said} See rlhf-nb {name} --help"), file=sys.stderr)
    return 2 if said else None
