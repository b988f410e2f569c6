"""`rlhf-nb view`: the episodes of a run, as a page or in the terminal."""

from __future__ import annotations

import time
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from rlhf_nb.base.fields import Count, setting
from rlhf_nb.base.files import DEMO_MARK, OVERWRITE, writable
from rlhf_nb.base.terminal import harmless
from rlhf_nb.cli.help import About
from rlhf_nb.cli.parsing import Parser
from rlhf_nb.training.kept import left_out, rollout_files

if TYPE_CHECKING:
    from rlhf_nb.rollout import Rollout
    from rlhf_nb.ui.viewer import RunBrowser
    from rlhf_nb.update import Objective


POLL = 2.0  # seconds between two looks at a run that trains


@dataclass
class ViewArguments:
    "What is shown, and where."

    update: list[int] | None = setting(
        None, "Updates to show; last: the last. None: 24 of them; in the terminal the last."
    )
    episodes: Count | None = setting(
        None, "Episodes of each update. None: all, as the page's what-if needs; in the terminal 8."
    )
    columns: str | None = setting(
        None,
        "Columns of another trainer's file: prompt=question,scores=reward. `step=` leaves one out.",
    )
    tokenizer: str | None = setting(
        None, "Name or folder of a tokenizer, with which a file's token ids become tokens."
    )
    objective: str | None = setting(
        None, "Settings of rollouts that do not say how they were made: kl_coef=0.1,lam=0.9."
    )
    output: str | None = setting(None, "The page. None: rollouts.html in RUN, or beside a file.")
    overwrite: bool = setting(False, OVERWRITE)
    terminal: bool = setting(False, "Print the episodes, and write nothing.")
    no_browser: bool = setting(False, "Write the page, and do not open it.")
    live: bool = setting(
        False, "Write the page again with each new update, until the run is done or Ctrl-C."
    )


ABOUT = About(
    usage="view RUN [RUN] [--OPTION VALUE ...]",
    text="Opens a run's rollouts, or two runs' side by side. It needs a folder of `rlhf-nb ppo "
    "--save_rollouts` or of `rlhf-nb demo`; or a file, or a folder with a file an update, that "
    "trl, verl, OpenRLHF or NeMo-RL wrote; or any JSONL, parquet or CSV with --columns. It writes "
    "one static page, rollouts.html, and opens it in the browser. A demo's begins with its result. "
    "--terminal prints and writes nothing.",
    examples=(
        "rlhf-nb view runs/ppo",
        "rlhf-nb view runs/ppo --terminal --update 3 --episodes 4",
        "rlhf-nb view runs/ppo runs/other",
        "rlhf-nb view verl/rollouts --output verl.html",
        "rlhf-nb view mine.jsonl --columns prompt=question,response=answer,scores=reward",
    ),
)


def view_parser() -> Parser:
    "Every option of `rlhf-nb view`."
    parser = Parser(ABOUT, ViewArguments)
    parser.add_argument("run", metavar="RUN", help="Folder of a run, or a file of episodes.")
    parser.add_argument("other", metavar="RUN", nargs="?", help="Another one, beside it.")
    return parser


def colour_tokens(tokens: Sequence[str], kl: Sequence[float]) -> Text:
    "Tokens that the policy likes more than the reference does in orange, less in blue."
    text = Text()
    for token, nats in zip(tokens, kl):
        style = "bold dark_orange" if nats > 0.5 else "bold dodger_blue2" if nats < -0.5 else ""
        text.append(harmless(token), style)
    return text


def rollout_text(rollout: Rollout, episodes: int = 8) -> Text:
    "The first episodes of a rollout, for a terminal: numbers, and under them the texts."
    from rlhf_nb.ui import episodes as of
    from rlhf_nb.ui.html import add_blanks

    parts = [Text(of.when(rollout), "italic")] if "update" in rollout.info else []
    for i in range(min(episodes, len(rollout))):
        response = rollout.responses[i] if rollout.responses else ""
        tokens = add_blanks(of.episode_tokens(rollout, i), response)
        kl = [0.0] * len(tokens) if rollout.kl is None else rollout.kl[i].tolist()
        parts.append(Text(of.episode_facts(rollout, i), "bold"))
        if rollout.prompts:
            parts.append(Text(harmless(of.end_of(of.prompt_of(rollout, i)).strip()), "dim"))
        for one in (told := of.turns_told(rollout, i)):
            own = slice(one["at"], one["end"])
            parts.append(Text(f"{one['facts']}\n", "italic") + colour_tokens(tokens[own], kl[own]))
            parts += [Text(harmless(one["answer"]).strip(), "dim")] if one["answer"] else []
        parts += [] if told else [colour_tokens(tokens, kl)]
    return Text("\n\n").join(parts)


def parse_objective(text: str) -> Objective:
    "`kl_coef=0.1,lam=0.9` as an objective. Exits where a part is no setting of it."
    from rlhf_nb.update import Objective

    typed = [f"--{pair.strip()}" for pair in text.split(",") if pair.strip()]
    parser = Parser(ABOUT, Objective)
    parser.recipe = f"--objective {text}: "
    read = vars(parser.read(typed))
    return Objective(**{f.name: read[f.name] for f in fields(Objective)})


def show(page: Path, no_browser: bool) -> None:
    "Open a page in the browser, where that is wanted, and print where it is."
    opened = no_browser or webbrowser.open(page.resolve().as_uri())
    unseen = "" if opened else " (no browser was found: open it yourself)"
    print(f"rlhf-nb view: {harmless(str(page))}{unseen}")


def wait_for_first(folder: Path) -> None:
    "Where a demo has not come to its first update, wait for it."
    waits = lambda: (folder / DEMO_MARK).is_file() and not rollout_files(folder)
    if waits():
        print("rlhf-nb view: a demo before its first update: waiting for it", flush=True)
    while waits():
        time.sleep(POLL)


def follow(browser: RunBrowser, last: int, write: Callable[[], object]) -> None:
    "Write the page again after each new update, until the run is done or somebody stops it."
    from rlhf_nb.training.logs import planned_updates

    run = browser.run.path
    judged = lambda: not (run / DEMO_MARK).is_file() or (run / "results.json").is_file()
    seen = last, judged()
    with suppress(KeyboardInterrupt):
        while seen[0] + 1 != planned_updates(run) or not seen[1]:
            time.sleep(POLL)
            try:
                browser.run.refresh()
                if seen < (now := (max(browser.run.files, default=-1), judged())):
                    write()
                    what = "the result" if seen[0] == now[0] else f"update {now[0]}"
                    seen = now
                    print(f"rlhf-nb view: {what} is in the page: reload it", flush=True)
            except (FileNotFoundError, ValueError) as error:  # a demo moves a stage that is over
                print(f"rlhf-nb view: {harmless(str(error))}; once more", flush=True)


def view_command(words: Sequence[str]) -> None:
    "`rlhf-nb view`."
    parser = view_parser()
    both = zip(["", *words], words)
    options = parser.read(["-1" if pair == ("--update", "last") else pair[1] for pair in both])
    if options.terminal and (options.output or options.other):
        what = "writes nothing: leave out --output" if options.output else "shows one run: give one"
        parser.error(f"--terminal {what}")
    folder, tokenizer = Path(options.run), None
    if folder.suffix == ".html" and folder.is_file():
        return show(folder, options.no_browser)
    name = f"{folder.stem}-rollouts.html" if folder.is_file() else "rollouts.html"
    beside = folder.parent if folder.is_file() else folder
    path = Path(options.output or beside / name)
    if not options.terminal and beside.exists():
        if path.resolve() == folder.resolve() and folder.is_file():
            parser.error(f"--output {path} is the file that is read: give another one")
        writable(path, "--output", options.overwrite)
    from rlhf_nb.base.loading import pretrained_tokenizer  # seconds that `--help` does not wait for
    from rlhf_nb.cli.models import require_name
    from rlhf_nb.ui.episodes import notes_of
    from rlhf_nb.ui.foreign import parse_columns
    from rlhf_nb.ui.run_files import ranges_of
    from rlhf_nb.ui.viewer import browse

    columns = None if options.columns is None else parse_columns([options.columns])
    for name in ("columns", "tokenizer"):
        if getattr(options, name) is not None and rollout_files(folder):
            parser.error(
                f"--{name} is for files of other trainers, and {folder} has rollouts of rlhf-nb, "
                "which hold their columns and tokens: leave it out"
            )
    if options.tokenizer is not None:
        with require_name("--tokenizer", options.tokenizer) as name:
            tokenizer = pretrained_tokenizer(name)
    objective = None if options.objective is None else parse_objective(options.objective)
    if options.live:
        wait_for_first(folder)
    browser = browse(options.run, options.other, columns, tokenizer, objective)
    last = max(browser.run.files)
    options.update = options.update and [last if k == -1 else k for k in options.update]
    if missing := sorted({*(options.update or [])} - {*browser.run.files}):
        parser.error(
            f"--update is {missing[0]} and {folder} keeps {ranges_of(browser.run.files)}: "
            f"give one of them.{left_out(folder, missing[0])}"
        )
    if options.terminal:
        for update in options.update or [last]:
            rollout = browser.run.rollout(update)
            Console(highlight=False).print(rollout_text(rollout, options.episodes or 8))
            for note in notes_of(rollout):
                print(harmless(note))
        return
    write = partial(browser.save_html, path, options.update or 24, options.episodes)
    write()
    told = notes_of(browser.run.rollout((options.update or [last])[-1]))
    for note in (left_out(folder), browser.asks(), *told):
        print(f"rlhf-nb view: {harmless(note.strip())}\n" * bool(note), end="")
    show(path, options.no_browser)
    if options.live:
        follow(browser, last, write)
