"""What a command answers at once, before torch and transformers are imported: its help, an option
that does not exist, options that are missing. tests/kept_pages.py writes what is kept for it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.terminal import harmless
from rlhf_nb.cli.help import help_text
from rlhf_nb.training.compat import CONFIG

COMPLETION = """_rlhf_nb() {{
  local words="{commands}"
  [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in
    {options}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _rlhf_nb rlhf-nb"""


@cache
def kept() -> dict[str, dict[str, Any]]:
    "Of each command: its page of help, the names of its own options, those that are required."
    return json.loads(Path(__file__).with_name("pages.json").read_text(encoding="utf-8"))


def their_names() -> list[str]:
    "Options of transformers.TrainingArguments, from the source that is installed: no import."
    spec = find_spec("transformers")
    source = Path(spec.origin).with_name("training_args.py") if spec and spec.origin else None
    text = source.read_text(encoding="utf-8") if source and source.is_file() else ""
    return re.findall(r"^    ([a-z]\w*): ", text, re.MULTILINE)


def suggestion(name: str, known: Iterable[str], of_ppo: bool, before: str = "") -> str:
    "What an unknown option is called here, or the nearest one."
    if of_ppo and name in CONFIG:
        return f" An older name: use {CONFIG[name]}"
    name = {"lr": "learning_rate"}.get(name, name)
    return did_you_mean(f"{before}{name}", [f"{before}{x}" for x in known])


def complaint_of(name: str, words: Sequence[str]) -> str:
    "What is wrong with the options, or nothing: then the command's own parser decides."
    own, flags = kept()[name], [w for w in words if w[:2] == "--" and w[2:] and " " not in w]
    typed = {w[2:].partition("=")[0].replace("-", "_"): w.partition("=")[0] for w in flags}
    known, ppo = [*own["names"]], name in ("ppo", "preflight", "replay")
    if own["trains"]:
        known += their_names()
    others = kept()["ppo"]["names"] + their_names() if name == "replay" else []
    for key, word in typed.items():
        if not {key, key.removeprefix("no_")} & {*known, *others}:
            return f"unrecognized arguments: {word}.{suggestion(key, known, ppo, '--')}"
    given = {*typed, *(w.partition(":")[0] for w in words)}
    if {"config", "dry_run", "help_all"} & given:
        return ""
    absent = []
    for option, remark in own["required"].items():
        others = remark.partition(", or ")[2]
        if not {option, *re.findall(r"\w+", others)} & given:
            absent.append(f"--{option} is missing" + f" (or {others})" * bool(others))
        given |= {*re.findall(r"\w+", others)}  # one of them is enough
    return "; ".join(absent)


def answer(name: str, words: Sequence[str]) -> int | None:
    "The exit code, where the words alone decide; None: the command runs."
    if {"-h", "--help"} & {*words} and not any(w.startswith("--config") for w in words):
        print(help_text(kept()[name]["page"]), end="")
        return 0
    if said := complaint_of(name, words):
        stop = "" if said.endswith("?") else "."
        line = f"rlhf-nb {name}: {said}{stop} See rlhf-nb {name} --help"
        print(harmless(line), file=sys.stderr)
        return 2
    return None


def completion(words: Sequence[str]) -> int:
    "`rlhf-nb completion bash`: prints what completes commands and their options."
    if [*words] != ["bash"]:
        print("rlhf-nb completion: give bash, the one shell that it knows.", file=sys.stderr)
        return 2
    options = {name: " ".join(f"--{x}" for x in own["names"]) for name, own in kept().items()}
    lines = "\n    ".join(f'{name}) words="{known}" ;;' for name, known in options.items())
    print(COMPLETION.format(commands=" ".join([*options, "launch"]), options=lines))
    return 0
