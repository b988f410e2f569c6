"""What a command answers at once, before torch and transformers are imported: its help, an option
that does not exist, options that are missing. tests/kept_pages.py writes what is kept for it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_nb.base.errors import did_you_mean
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


def suggestion(name: str, known: Collection[str], before: str = "") -> str:
    "What an unknown option is called here, or the nearest one."
    if name in CONFIG and "num_ppo_epochs" in known:  # of a command that does PPO
        return f" An older name: use {CONFIG[name]}."
    name = "learning_rate" if name == "lr" else name
    return did_you_mean(f"{before}{name}", [f"{before}{x}" for x in known])


def answered(name: str, words: Sequence[str]) -> bool:
    """Whether help was asked for, which is printed. Raises ValueError where options are unknown or
    missing; of what is left the command's own parser decides."""
    own, see = kept()[name], f"See rlhf-nb {name} --help"
    if {"-h", "--help"} & {*words} and not any(word.startswith("--config") for word in words):
        print(help_text(own["page"]), end="")
        return True
    known, given = [*own["names"]], {word.partition(":")[0] for word in words}
    if own["trains"]:
        known += their_names()
    for flag in (word.partition("=")[0] for word in words if re.match("--[^ ]", word)):
        given.add(key := flag[2:].replace("-", "_"))
        if not {key, key.removeprefix("no_")} & {*known, *own["refused"]}:
            raise ValueError(f"unrecognized arguments: {flag}.{suggestion(key, known, '--')} {see}")
    absent = [text for text, names in own["required"].items() if not {*names} & given]
    if absent and not {"config", "dry_run", "help_all"} & given:
        raise ValueError(f"{'; '.join(absent)}. {see}")
    return False
