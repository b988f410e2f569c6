"""`rlhf-nb replay`: one update of a run again, with other settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rlhf_nb.base.fields import Count, Index, setting
from rlhf_nb.base.files import strict_json, writable
from rlhf_nb.base.terminal import harmless
from rlhf_nb.cli.help import About
from rlhf_nb.cli.parsing import Parser

if TYPE_CHECKING:
    from rlhf_nb.diagnose.replay import Replay
    from rlhf_nb.diagnose.replay_outcome import Outcome


@dataclass
class ReplayArguments:
    "Which update, and what is shown of it."

    update: Index | None = setting(None, "The update, from 0: that of rollouts/update-0000N.")
    episodes: list[Index] | None = setting(
        None, "Episodes whose tokens are shown. None: those that moved most."
    )
    most_episodes: Count = setting(3, "How many of those.")
    output: str | None = setting(None, "Write a page with figures to this file as well.")
    json: bool = setting(False, "Print the numbers as JSON instead of tables.")
    model_name_or_path: str | None = setting(
        None, "Base of an adapter, or the policy's class, where the checkpoint does not tell."
    )
    value_model_path: str | None = setting(None, "The same of the value model.")


ABOUT = About(
    usage="replay RUN --update N [--SETTING VALUE ...]",
    text="Does one update of a run again with other settings, and shows it beside what it was: "
    "losses, KL moved, clipped share, ratios, explained variance, gradient norms, and what became "
    "likelier, token by token. Nothing is sampled or judged, and nothing of the run's folder is "
    "written. It needs the checkpoint before the update and its rollout (rlhf-nb ppo "
    "--save_steps 1 --save_rollouts; for update 0 --save_start). First it does the update with the "
    "run's own settings, which gives what the run did, bit for bit, or says where it does not. A "
    "setting that is not given stays as the run had it. A learning rate is the peak of the "
    "schedule.",
    examples=(
        "rlhf-nb replay runs/ppo --update 7 --learning_rate 1e-5 --cliprange 0.1",
        "rlhf-nb replay runs/ppo --update 7 --kl_coef 0.2 --output update7.html",
    ),
    options={
        "update and output": ("run", *(f.name for f in fields(ReplayArguments))),
        "settings of the update": (
            *("learning_rate", "cliprange", "num_ppo_epochs", "num_mini_batches", "vf_coef"),
            *("max_grad_norm", "entropy_coef", "target_kl", "weight_decay"),
        ),
        "settings of the rewards": ("kl_coef", "gamma", "lam", "missing_eos_penalty", "score_clip"),
        "help": ("help", "help_all"),
    },
)


def varied_settings() -> type:
    "The settings of PPOConfig that an update can be done again with, as a dataclass."
    from rlhf_nb.diagnose.replay_settings import MAY_VARY
    from rlhf_nb.trainer import PPOConfig

    hints, known = get_type_hints(PPOConfig, include_extras=True), fields(PPOConfig)
    # without a value of its own: what is not given stays as the run had it
    varied = [
        (f.name, hints[f.name], field(default=None, metadata=f.metadata))
        for f in known
        if f.name in MAY_VARY
    ]
    return make_dataclass("VariedSettings", varied)


def replay_parser() -> Parser:
    "Every option of `rlhf-nb replay`."
    parser = Parser(ABOUT, ReplayArguments, varied_settings())
    parser.ranges = {name: hint | None for name, hint in parser.ranges.items()}  # None: not given
    parser.add_argument("run", metavar="RUN", help="Folder of a run, before --options.")
    return parser


def named_settings(words: Sequence[str]) -> list[str]:
    "Names of PPO's settings among the words. Raises ValueError on one that cannot be varied."
    from rlhf_nb.diagnose.replay_settings import MAY_VARY, NOWHERE, REASONS
    from rlhf_nb.trainer import PPOConfig

    own = {f.name for f in fields(PPOConfig)} - {f.name for f in fields(ReplayArguments)}
    typed = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    named = [name.replace("-", "_") for name in typed]  # the parser takes both
    for name in named:
        if name in (own | set(REASONS)) - MAY_VARY:
            why = REASONS.get(name, NOWHERE).format(was="the run's own")
            raise ValueError(f"--{name} cannot be varied here: {why}.")
    return [name for name in dict.fromkeys(named) if name in MAY_VARY]


# ---- In the terminal ----


def number_table(replay: Replay) -> Table:
    "The numbers of the update, side by side."
    from rlhf_nb.diagnose.replay_outcome import shown_numbers
    from rlhf_nb.diagnose.replay_view import columns, short

    heads, outcomes = zip(*columns(replay), strict=True)
    table = Table(title=Text(f"Update {replay.record.update}: {replay.words}"), box=SIMPLE_HEAD)
    for name in ("number", *heads):
        table.add_column(name, justify="left" if name == "number" else "right")
    for _, words, numbers in shown_numbers(outcomes):
        table.add_row(words, *map(short, numbers))
    return table


def moved_text(outcome: Outcome, episode: int, most: float) -> Text:
    "A response: orange became likelier, blue less likely, by a quarter of `most` at least."
    from rlhf_nb.ui.episodes import episode_tokens
    from rlhf_nb.ui.html import add_blanks

    r, text = outcome.before, Text()
    words = add_blanks(episode_tokens(r, episode), r.responses[episode] if r.responses else "")
    for word, moved in zip(words, outcome.likelier[episode].tolist()):
        side = "bold dark_orange" if moved > 0 else "bold dodger_blue2"
        text.append(harmless(word), side if most and abs(moved) > most / 4 else "")
    return text


def token_table(replay: Replay, episodes: Sequence[int]) -> Table:
    "What became likelier, and what less likely, in the chosen episodes."
    from rlhf_nb.diagnose.replay_view import columns, short

    kinds = columns(replay)
    most = max(one.likelier[list(episodes)].abs().max().item() for _, one in kinds)
    title = f"Orange became likelier, blue less likely, by more than {short(most / 4)} nats"
    table = Table(title=Text(title), box=SIMPLE_HEAD, show_lines=True)
    for name in ("episode", *(name for name, _ in kinds)):
        table.add_column(name, overflow="fold")
    for episode in episodes:
        table.add_row(str(episode), *(moved_text(one, episode, most) for _, one in kinds))
    return table


def check_lines(replay: Replay) -> str:
    "One line a check of the update with the run's own settings."
    marks = {"passed": "ok", "failed": "DIFFERS"}
    lines = [
        f"  {marks.get(one.state, '--'):8}{one.name}: {one.measured}"
        for one in replay.checks.checks
    ]
    same = "what the run did, bit for bit" if replay.same else "not shown to be what the run did"
    return "\n".join([f"The run's own settings give {same}:", *lines, replay.elsewhere]).rstrip()


def as_json(replay: Replay) -> str:
    "Settings, checks and numbers."
    varied = {name: dict(was=old, now=new) for name, (old, new) in replay.settings.items()}
    was = dict(numbers=replay.was.numbers(), steps=replay.was.steps)
    now = dict(numbers=replay.now.numbers(), steps=replay.now.steps)
    return strict_json(
        dict(
            update=replay.record.update,
            settings=varied,
            same=replay.same,
            checks=replay.checks.as_json()["checks"],
            was=was,
            now=now,
        )
    )


def replay_command(words: Sequence[str]) -> int:
    "`rlhf-nb replay`. Exit code 1 where the run's own settings do not give what the run did."
    helped = {"-h", "--help", "--help-all"} & {*words}
    names: list[str] = [] if helped else named_settings(words)
    options = replay_parser().read(words)
    if options.output:
        writable(options.output, "--output")
    from accelerate import PartialState  # seconds that `--help` does not wait for

    from rlhf_nb.diagnose.replay import replay_of
    from rlhf_nb.diagnose.replay_outcome import most_moved
    from rlhf_nb.diagnose.replay_record import record_of

    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    models = dict(model=options.model_name_or_path, value_model=options.value_model_path)
    record = record_of(options.run, options.update, **models)
    record.check_episodes(options.episodes or [])
    done = replay_of(record, settings)
    differ = 1 if any(done.was.differences.values()) else 0
    if not PartialState().is_main_process:
        return differ
    outcomes = [done.was, done.now]
    episodes = options.episodes or most_moved(outcomes, options.most_episodes)
    if options.json:
        print(as_json(done))
    else:
        Console().print(Group(number_table(done), token_table(done, episodes)))
        print(check_lines(done))
    if options.output:
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        page = done.save_html(options.output, episodes)
        print(f"rlhf-nb replay: {page}", file=sys.stderr)
    return differ
