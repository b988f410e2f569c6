"""`rlhf-nb`: one program from the first imitation to the verdict. A module for each command."""

from __future__ import annotations

import io
import logging
import os
import sys
import textwrap
import time
from importlib import import_module
from pathlib import Path

from rlhf_nb import __version__
from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.files import check_place, no_disk, unwritten
from rlhf_nb.base.terminal import harmless, harmless_record, unbroken
from rlhf_nb.cli.quick import answered, kept

__all__ = ["COMMANDS", "RECIPES", "main"]

STARTED = time.perf_counter()
RECIPES = Path(__file__).parent.parent / "recipes"  # settings and launcher files of the package
COMMANDS = {  # name -> its line in `rlhf-nb --help`; each is `<name>_command` in its own module
    "sft": "learn to answer as the references do",
    "reward": "learn which of two answers people prefer",
    "preflight": "check models, data and settings of a ppo run before it starts",
    "ppo": "write what is preferred, and stay near the starting point",
    "judge": "measure how often the answers beat the references",
    "plot": "draw the metrics of several runs and seeds, a panel for each metric",
    "view": "read the episodes of a run, token by token",
    "replay": "do one update of a run again with other settings, and see what they change",
    "demo": "the whole of RLHF on embedded data, in minutes on a CPU",
}
MORE = {
    "course": "copy the notebooks of the course into a FOLDER, to run them there",
    "launch": "accelerate launch of a COMMAND on several GPUs, with recipes by their names",
    "completion": '`eval "$(rlhf-nb completion bash)"` completes commands and options',
}
STOPPED = {  # what Ctrl-C leaves behind
    "demo": "Finished stages are kept; the same command goes on from there.",
    "judge": "Verdicts that were paid for are in --cache.",
    **dict.fromkeys(
        ("sft", "reward", "ppo"),
        "Where there are checkpoints in the output folder, --resume goes on from the last.",
    ),
}


def overview() -> str:
    "What `rlhf-nb --help` prints."
    recipes = ", ".join(sorted(path.name for path in RECIPES.glob("*.yaml")))
    more = (
        "`rlhf-nb COMMAND --help` explains a command. On several GPUs: rlhf-nb launch "
        "--config_file ddp.yaml COMMAND ... Recipes of the package, in "
        f"{RECIPES}: {recipes}."
    )
    head = "usage: rlhf-nb COMMAND [--OPTION VALUE ...]\n\nLearn, run and trust RLHF with PPO.\n"
    lines = [f"  {name:{max(map(len, MORE))}}  {line}" for name, line in (COMMANDS | MORE).items()]
    return "\n".join([head, *lines, "", textwrap.fill(more, width=100, break_on_hyphens=False)])


def main(words: list[str] | None = None) -> int:
    """The program. Exit code: 0 done, 1 diverged or will not fit, 2 wrong options or input, 130
    interrupted. An error is one line; RLHF_NB_DEBUG=1 in the environment shows its traceback."""
    words = sys.argv[1:] if words is None else list(words)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an ASCII terminal shows the rest as escapes
            stream.reconfigure(errors="backslashreplace")
            if os.name == "posix" and stream in (sys.__stdout__, sys.__stderr__):
                unbroken(stream)
    if words[:1] == ["help"]:  # `help`, `help ppo`
        words = [*words[1:2], "--help"]
    name = words[0] if words else ""
    if name in ("", "-h", "--help"):
        print(overview())
        if not name:
            print("rlhf-nb: give a COMMAND. See rlhf-nb --help", file=sys.stderr)
        return 0 if name else 2
    if name in ("-V", "--version"):
        print(f"rlhf-nb {__version__}")
        return 0
    if name == "completion":
        print(kept()["completion"])
        return 0
    if name not in (*COMMANDS, "launch", "course"):
        known = did_you_mean(name, [*COMMANDS, *MORE, "train"]).replace(
            "train", "sft, reward or ppo"
        )
        known = known or f" Commands: {', '.join([*COMMANDS, *MORE])}."
        print(f"rlhf-nb: there is no command {name!r}.{known} See rlhf-nb --help", file=sys.stderr)
        return 2
    if logging.lastResort is not None:  # where warnings go
        logging.lastResort.addFilter(harmless_record)
    try:
        check_place()
        if name in COMMANDS and answered(name, words[1:]):
            return 0
        module = import_module(f"rlhf_nb.cli.{'recipes' if name == 'launch' else name}")
        run = getattr(module, f"{name}_command" if name in COMMANDS else name)
        return run(words[1:]) or 0
    except KeyboardInterrupt as error:
        of_training = str(error) if name in ("sft", "reward", "ppo") else ""  # says what is there
        left = of_training or f"stopped. {STOPPED.get(name, '')}".rstrip()
        print(harmless(f"\nrlhf-nb {name}: {left}"), file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, FloatingPointError, RuntimeError) as error:
        if os.environ.get("RLHF_NB_DEBUG"):  # the traceback too
            raise
        text = " ".join(str(error).split())
        if no_disk(error):
            text = f"{unwritten(error)} {STOPPED.get(name, '')}".rstrip()
        print(harmless(f"rlhf-nb {name}: {text}"), file=sys.stderr)
        return 1 if isinstance(error, FloatingPointError) else 2
