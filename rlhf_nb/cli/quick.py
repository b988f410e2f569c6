"""What a command answers at once, before torch and transformers are imported: its help, options
that do not exist or are missing, values that are no number or none of the choices, files and
folders that are not there. tests/kept_pages.py writes what is kept for it."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.files import check_folder
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


def check_there(flag: str, value: str) -> None:
    "Raises FileNotFoundError where a value can only name a file or a folder, and there is none."
    place, option = value.rpartition(":")[0], flag.lstrip("-")
    packed = re.fullmatch(r".*\.(jsonl?|csv|parquet)(\.(gz|bz2|xz))?", value)
    file = place if place.endswith(".py") else value if packed and DATA.match(option) else ""
    if file and not Path(file).is_file():
        raise FileNotFoundError(f"{flag} {value}: there is no such file.")
    if MODELS.match(option):
        check_folder(value, f"{flag} {value}: ")


DATA = re.compile("dataset_name$|preflight_pairs$")
MODELS = re.compile(".*_path$|reward_ensemble$|tokenizer$")
FILES = re.compile(f"{DATA.pattern}|{MODELS.pattern}|(reward_function|environment|engine|config)$")


def number(kind: str) -> Callable[[str], Any]:
    "What reads a word: kind is int or float, or either with ` or none`; empty: any text."
    read: Any = dict(int=int, float=float).get(kind.partition(" ")[0], str)

    def convert(text: str) -> Any:
        return None if text in ("None", "none", "last") else read(text)

    convert.__name__ = kind
    return convert


def explain_choice(message: str, choices: Mapping[str, Any]) -> str:
    "argparse's message, where it names choices: some of them, and the nearest one."
    if wrong := re.match(r"argument --(\w+).*: invalid choice: '([^']*)'", message):
        names = list(map(str, choices[wrong[1]]))
        some = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
        message = re.sub(r"\(choose from .*", f"(choose from {some})", message, flags=re.DOTALL)
        message += "." + did_you_mean(wrong[2], names)
    return message


def check_values(values: Mapping[str, dict[str, Any]], words: Sequence[str], see: str) -> None:
    "Raises ValueError on the first value that is wrong by itself."
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, how in values.items():
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*flags, **how | dict(type=number(how.get("type", ""))))
    try:
        given = vars(parser.parse_known_args(words)[0])
    except argparse.ArgumentError as error:
        wrong = explain_choice(str(error), {k: how.get("choices") for k, how in values.items()})
        raise ValueError(f"{wrong.rstrip('.')}{'' if wrong.endswith('?') else '.'} {see}") from None
    if path := given.pop("config", None):
        from rlhf_nb.cli.recipes import recipe_file  # which needs what is above

        recipe_file(path, "--config")
    for name in () if "--dry_run" in words else filter(FILES.match, given):
        for value in given[name] if isinstance(given[name], list) else [given[name] or ""]:
            check_there(f"--{name}", value)


def answered(name: str, words: Sequence[str]) -> bool:
    """Whether help was asked for, which is printed. Raises ValueError where options are unknown or
    missing; of what is left the command's own parser decides."""
    own, see = kept()[name], f"See rlhf-nb {name} --help"
    if {"-h", "--help"} & {*words} and not any(word.startswith("--config") for word in words):
        print(help_text(own["page"]), end="")
        return True
    if name in ("view", "replay") and words and not Path(words[0]).exists() and words[0][0] != "-":
        raise FileNotFoundError(f"there is no folder {words[0]}: give the output_dir of a run.")
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
    check_values(own["values"], words, see)
    return False
