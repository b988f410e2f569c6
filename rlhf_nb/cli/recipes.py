"""Settings in a YAML file: read as the text that one would type."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import yaml

from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.files import yaml_text
from rlhf_nb.cli import COMMANDS, RECIPES


def recipe_file(path: str, flag: str) -> Path:
    "A YAML file, or a recipe of the package by its name. Raises FileNotFoundError."
    places = (Path(path), RECIPES / path, RECIPES / f"{path}.yaml")
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        known = sorted(recipe.name for recipe in RECIPES.glob("*.yaml"))
        raise FileNotFoundError(
            f"{flag} {path}: there is no such file.{did_you_mean(path, known)} Recipes of the "
            f"package: {', '.join(known)}."
        )
    return file


def launch(words: Sequence[str]) -> int:
    """`accelerate launch` of a command or a script; --config_file may be a recipe of the package by
    its name. What stopped one of the processes was told by it: here is only its exit code."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    flag = "--config_file"
    split = [word.split("=", 1) if word.startswith(f"{flag}=") else [word] for word in words]
    words = [word for part in split for word in part]
    if flag in words[:-1]:
        at = words.index(flag) + 1
        words[at] = str(recipe_file(words[at], flag))
    options = launch_command_parser().parse_args(words)
    if options.training_script in COMMANDS and not Path(options.training_script).exists():
        options.training_script_args.insert(0, options.training_script)
        options.training_script, options.module = "rlhf_nb.cli", True
    try:
        launch_command(options)
    except CalledProcessError as error:
        return error.returncode
    return 0


def read_recipe(path: str, command: str) -> dict[str, Any]:
    """The settings of one command: the lines at the left margin, and over them those of its own
    section. Raises FileNotFoundError, or ValueError where the file is no mapping."""
    file = recipe_file(path, "--config")
    try:
        root = yaml.compose(yaml_text(file), yaml.SafeLoader)
        lines = lines_of(root) if root else {}
        sections = {
            name: lines_of(lines.pop(name))
            for name in COMMANDS
            if isinstance(lines.get(name), yaml.MappingNode)
        }
        return {key: value_of(node) for key, node in (lines | sections.get(command, {})).items()}
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"--config {path}: {error}") from error


def lines_of(node: yaml.Node) -> dict[str, yaml.Node]:
    "The lines of a YAML mapping. Raises ValueError for anything else, or a key that comes twice."
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("expected lines such as `kl_coef: 0.05`")
    lines: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(
                f"line {key.start_mark.line + 1}: a list or a mapping is the name of a setting. "
                "Write lines such as `kl_coef: 0.05`, and a list behind the colon"
            )
        if key.value in lines:
            raise ValueError(f"{key.value} is set twice: keep one of them")
        lines[key.value] = value
    return lines


def value_of(node: yaml.Node) -> Any:
    """Text as it was typed, so that the parser alone decides what is a number (YAML takes 3e-6 for
    text, and `no` for False); a list of texts; None; or a nested mapping, as YAML reads it."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag.endswith(":null") else node.value
    if isinstance(node, yaml.SequenceNode):
        return [value_of(item) for item in node.value]
    lines_of(node)  # its keys are names
    return yaml.safe_load(yaml.serialize(node))
