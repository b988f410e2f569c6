"""`rlhf-nb replay`: one update of a run again, with other settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import get_type_hints

from rlhf_nb.base.fields import Index, setting
from rlhf_nb.base.files import strict_json
from rlhf_nb.cli.help import About
from rlhf_nb.cli.parsing import Parser


@dataclass
class ReplayArguments:
    "Which update, and how it is printed."

    update: Index = setting(0, "The update, from 0: that of rollouts/update-0000N.")
    json: bool = setting(False, "Print the numbers as JSON instead of a table.")


ABOUT = About(
    usage="replay RUN --update N [--SETTING VALUE ...]",
    text="Does one update of a run again with other settings, and prints a table of its numbers as "
    "they were and as replayed. Nothing is sampled or judged, and it writes nothing. It needs the "
    "checkpoint before the update and its rollout (rlhf-nb ppo --save_steps 1 --save_rollouts, for "
    "update 0 --save_start; or rlhf-nb demo --save_steps 1). A setting that is not given stays as "
    "the run had it; with the run's own settings every number is what the run logged, bit for bit.",
    examples=(
        "rlhf-nb replay runs/ppo --update 7 --learning_rate 1e-5 --cliprange 0.1",
        "rlhf-nb replay runs/mini_tldr --update 7 --kl_coef 0.2",
    ),
    options={
        "update and output": ("run", "update", "json"),
        "settings of the update": (
            *("learning_rate", "cliprange", "num_ppo_epochs", "num_mini_batches", "vf_coef"),
            *("max_grad_norm", "entropy_coef", "target_kl", "weight_decay"),
        ),
        "settings of the rewards": ("kl_coef", "gamma", "lam", "missing_eos_penalty", "score_clip"),
        "help": ("help", "help_all"),
    },
)


def replay_parser() -> Parser:
    "Every option of `rlhf-nb replay`. A setting has no default: the run's is kept."
    from rlhf_nb.diagnose.replay import CHANGEABLE
    from rlhf_nb.trainer import PPOConfig

    hints = get_type_hints(PPOConfig, include_extras=True)
    help_of = {f.name: f.metadata for f in fields(PPOConfig)}
    changeable = [(x, hints[x], field(default=None, metadata=help_of[x])) for x in CHANGEABLE]
    parser = Parser(ABOUT, ReplayArguments, make_dataclass("Changeable", changeable))
    parser.add_argument("run", metavar="RUN", help="Folder of a run, before --options.")
    return parser


def replay_command(words: Sequence[str]) -> int:
    "`rlhf-nb replay`. Exit code 1 where the run's own settings do not give what the run logged."
    from accelerate import PartialState

    from rlhf_nb.diagnose.replay import check_names, replay
    from rlhf_nb.trainer import PPOConfig

    typed = [word[2:].partition("=")[0].replace("-", "_") for word in words if word[:2] == "--"]
    names = [name for name in typed if name in {f.name for f in fields(PPOConfig)}]
    check_names(names, "--")
    options = replay_parser().read(words)
    done = replay(options.run, options.update, **{name: getattr(options, name) for name in names})
    if PartialState().is_main_process:
        changed = {name: dict(was=old, now=new) for name, (old, new) in done.settings.items()}
        told = dict(settings=changed, same=done.same, was=done.was, now=done.now)
        print(strict_json(dict(update=done.update) | told) if options.json else done)
    return 1 if done.same is False else 0
