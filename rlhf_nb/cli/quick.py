"""What a command answers at once, before torch and transformers are imported: its help, options
that do not exist or are missing, values of the wrong kind or out of range, also in a recipe, files
and folders that are not there or hold something else. tests/kept_pages.py writes what it knows."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.files import check_folder, check_saved
from rlhf_nb.cli.help import help_text
from rlhf_nb.training.compat import CONFIG
from rlhf_nb.training.kept import is_foreign, kept_rollouts
from rlhf_nb.training.logs import steps_of


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


def unknown_key(key: str, known: Collection[str]) -> str:
    "What is wrong with a line of a recipe that sets no option."
    return f"unknown key {key!r}.{suggestion(key, [x for x in known if x not in ALONE])}"


def check_there(flag: str, value: str) -> None:
    "Raises FileNotFoundError where a value can only name a file or a folder, and there is none."
    place, option = value.rpartition(":")[0], flag.lstrip("-")
    packed = re.fullmatch(r".*\.(jsonl?|csv|parquet)(\.(gz|bz2|xz))?", value)
    file = place if place.endswith(".py") else value if packed and DATA.match(option) else ""
    if file and not Path(file).is_file():
        raise FileNotFoundError(f"{flag} {value}: there is no such file.")
    if option == "judge_model" and not Path(value).is_dir():  # else it is an endpoint's name
        beside = len(Path(value).parts) > 1 and Path(value).parent.is_dir()
        if Path(value).expanduser().is_absolute() or value.startswith(".") or beside:
            raise FileNotFoundError(f"{flag} {value}: there is no such folder.")
    if MODELS.match(option):
        check_folder(value, f"{flag} {value}: ")
        check_saved(value, "tokenizer" if "tokenizer" in flag else "model", f"{flag} {value}: ")


DATA = re.compile("dataset_name$|preflight_pairs$")
ALONE = ("config", "help", "help_all")  # of the command line
# One setting of a line on the command line replaces the others of a recipe.
OPPOSITES = (
    "missing_eos_penalty non_eos_penalty, stop_token stop_token_id stop_strings, bf16 fp16, "
    "total_episodes max_steps num_train_epochs, activation_checkpointing gradient_checkpointing"
).split(",")
MODELS = re.compile(".*_path$|reward_ensemble$|tokenizer$")
FILES = re.compile(
    f"{DATA.pattern}|{MODELS.pattern}|(reward_function|environment|engine|config|judge_model)$"
)


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


def check_values(name: str, names: list[str], flags: set[str], words: Sequence[str]) -> None:
    "Raises ValueError on the first value that is wrong by itself, typed or in a recipe."
    from rlhf_nb.base.fields import annotation, complaint  # which `--help` does not wait for
    from rlhf_nb.cli.recipes import read_recipe  # which needs what is above

    own, see = kept()[name], f"See rlhf-nb {name} --help"
    how: Any = dict(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser = argparse.ArgumentParser(**how, argument_default=argparse.SUPPRESS)
    for option, value in own["values"].items():
        both = dict.fromkeys((f"--{option}", f"--{option.replace('_', '-')}"))
        how = {k: value[k] for k in ("nargs", "choices") if k in value}
        parser.add_argument(*both, **how, type=number(value.get("type", "")))

    def read(words: Sequence[str], place: str = "") -> dict[str, Any]:
        try:
            return vars(parser.parse_known_args(words)[0])
        except argparse.ArgumentError as error:
            choices = {k: value.get("choices") for k, value in own["values"].items()}
            wrong = explain_choice(str(error), choices).rstrip(".")
            raise ValueError(f"{place}{wrong}{'' if wrong[-1] == '?' else '.'} {see}") from None

    given = read(words)
    if path := given.pop("config", None):
        settings = read_recipe(path, own["section"])
        for key in settings:
            if key.replace("-", "_") not in names:
                raise ValueError(f"{path}: {unknown_key(key, names)} {see}")
        typed = [f"--{key}={x}" for key, x in settings.items() if isinstance(x, str)]
        over = {x for group in OPPOSITES if {*group.split()} & flags for x in group.split()}
        recipe = read(typed, f"{path}: ")
        given = {k: x for k, x in recipe.items() if k not in over} | given
    for option, value in given.items():
        hint = None if value in (None, [None]) else own["values"][option].get("hint")
        if hint and (wrong := complaint(f"--{option}", value, annotation(hint))):
            raise ValueError(f"{wrong} {see}")
        if FILES.match(option) and "--dry_run" not in words:
            for one in value if isinstance(value, list) else [value or ""]:
                check_there(f"--{option}", one)


def check_run(name: str, run: str, later: bool) -> None:
    """Raises FileNotFoundError or ValueError where a folder is not there, or not of a run; `later`:
    columns or a tokenizer are given to read it by, or its first update is waited for."""
    if not Path(run).exists():
        raise FileNotFoundError(f"there is no folder {run}: give the output_dir of a run.")
    if name == "plot":
        steps_of(run)
    elif not (name == "view" and (later or is_foreign(run))):
        kept_rollouts(Path(run))


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
    if "config" in own["names"] and re.search(r"\.ya?ml$", recipe := "".join(words[:1])):
        raise ValueError(f"a recipe is given by --config: rlhf-nb {name} --config {recipe}")
    absent = [text for text, names in own["required"].items() if not {*names} & given]
    if absent and not {"config", "dry_run", "help_all"} & given:
        raise ValueError(f"{'; '.join(absent)}. {see}")
    if not {"-h", "help", "help_all"} & given:
        check_values(name, known, given, words)
        for run in takewhile(lambda word: word[:1] != "-", words) if own["runs"] else ():
            check_run(
                name, run, any(re.match("--(columns|tokenizer|live)", word) for word in words)
            )
    return False
