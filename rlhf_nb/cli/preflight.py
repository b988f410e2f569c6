"""`rlhf-nb preflight`: is a run of `rlhf-nb ppo` wired up right, before it starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from rlhf_nb.base.fields import setting
from rlhf_nb.base.files import OVERWRITE, strict_json, writable
from rlhf_nb.base.terminal import harmless
from rlhf_nb.cli import STARTED
from rlhf_nb.cli.arguments import PPOModelArguments, TrainDataArguments
from rlhf_nb.cli.data import load_rows, take
from rlhf_nb.cli.help import About
from rlhf_nb.cli.parsing import Parser
from rlhf_nb.cli.ppo import ABOUT as OF_PPO
from rlhf_nb.cli.ppo import trainer_of
from rlhf_nb.cli.training import in_folder
from rlhf_nb.trainer import PPOConfig


@dataclass
class PreflightArguments:
    "What is checked besides, and where the checks go."

    preflight_pairs: str | None = setting(
        None,
        "Good and bad answers, which the rewards must tell apart: a file (or data set) with the "
        "columns prompt, chosen, rejected. None: references of the data set against spoilt ones.",
    )
    output: str = setting("preflight.html", "The page that is written; 'none': no page.")
    overwrite: bool = setting(False, OVERWRITE)
    json: bool = setting(False, "Print JSON instead of a table.")


ABOUT = About(
    usage="preflight [--config FILE] [--OPTION VALUE ...]",
    text="A ladder of checks on the models, data and settings of a run of `rlhf-nb ppo`, cheapest "
    "first: data, log-probs, rewards, value model, learning, state. It needs what `ppo` needs and "
    "takes its options, works on copies and leaves the run's folder, seed and data order alone. It "
    "writes one page. Exit code 1: a check failed.",
    examples=(
        "rlhf-nb preflight --config mini_tldr.yaml",
        "rlhf-nb preflight --config mini_tldr.yaml --preflight_pairs pairs.jsonl --json",
    ),
    options={
        "preflight": ("preflight_pairs", "output", "overwrite", "json"),
        **{name: x for name, x in OF_PPO.options.items() if not name.startswith("logs")},
    },
    required=OF_PPO.required,
    help=OF_PPO.help,
    section="ppo",
)


def preflight_parser() -> Parser:
    "Every option of `rlhf-nb preflight`."
    kinds = PreflightArguments, TrainDataArguments, PPOModelArguments, PPOConfig
    return Parser(ABOUT, *kinds, output_dir="runs/ppo")


def pairs_of(name: str | None) -> list[Any] | None:
    "The rows of --preflight_pairs. Raises ValueError and OSError on what cannot be read."
    if name is None:
        return None
    try:
        return [*take(load_rows(name), "train", "--preflight_pairs")]
    except (ValueError, OSError) as error:
        raise type(error)(str(error).replace("--dataset_name", "--preflight_pairs")) from error


def preflight_command(words: Sequence[str]) -> int:
    "`rlhf-nb preflight`."
    from rlhf_nb.diagnose.preflight import check_pairs, preflight

    how, data, models, args = preflight_parser().settings(words)
    if models.dry_run:
        raise ValueError("--dry_run plans memory and runs nothing: give it to `rlhf-nb ppo`.")
    if how.output != "none":
        writable(how.output, "--output", how.overwrite)
    pairs = check_pairs(pairs_of(how.preflight_pairs), f"--preflight_pairs {how.preflight_pairs}")
    # the checks alone go to the output
    with in_folder(args, keep=False), redirect_stdout(sys.stderr):
        done = preflight(trainer_of(data, models, args), pairs, since=STARTED)
    if how.json:
        print(strict_json(done.as_json()))
    else:
        wide = None if sys.stdout.isatty() else 140
        Console(file=sys.stdout, width=wide).print(done)
    if how.output != "none":
        print(harmless(f"rlhf-nb preflight: {done.save_html(how.output)}"), file=sys.stderr)
    return 0 if done.passed else 1
