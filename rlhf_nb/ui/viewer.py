"""One rollout, episode by episode."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_nb.ppo import Objective
from rlhf_nb.rollout import Rollout
from rlhf_nb.ui.controls import notebook_bundle
from rlhf_nb.ui.episodes import (
    Shown,
    episode_facts,
    episode_signals,
    episode_tokens,
    notes_of,
    prompt_lines,
    shown_of,
)
from rlhf_nb.ui.foreign import ForeignRun
from rlhf_nb.ui.html import Html, contained, element, safe_prose, safe_text
from rlhf_nb.ui.packed import packed_update
from rlhf_nb.ui.reader import Reader, head_of, write_reader
from rlhf_nb.ui.viz import signal_table, token_strip
from rlhf_nb.ui.what_if import check_chosen


def prompt_fold(rollout: Rollout, episode: int) -> str:
    "The prompt and its columns, folded."
    lines = [
        element("p", safe_prose(line), style="white-space:pre-wrap")
        for line in prompt_lines(rollout, episode)
    ]
    return element("details", element("summary", "Prompt"), *lines, class_="prompt")


def episode_markup(
    rollout: Rollout,
    episode: int,
    strips: Mapping[str, float | None],
    fold: bool = False,
    signals: Mapping[str, Tensor] | None = None,
) -> str:
    """One episode: strips of some signals (name to full colour), and the table of all of them,
    folded or not."""
    tokens = episode_tokens(rollout, episode)
    signals = episode_signals(rollout, episode) if signals is None else signals
    below: list[str] = [
        token_strip(tokens, signals[name], name=name, vmax=vmax) for name, vmax in strips.items()
    ]
    table = str(signal_table(tokens, **signals)) if signals else ""
    if table and fold:
        table = element("details", element("summary", "All signals"), table)
    facts = element("p", element("strong", escape(episode_facts(rollout, episode))))
    prompt = prompt_fold(rollout, episode)
    notes = "".join(element("li", safe_text(note)) for note in notes_of(rollout))
    read = element("details", element("summary", "How this file was read"), element("ul", notes))
    below = below or [token_strip(tokens)]
    return "".join([facts, prompt, *below, table, read if notes else ""])


class RolloutView(Html):
    """One episode as markup; in a live notebook a reader of all of them, and as a file of its
    own."""

    shown: Shown
    place: dict[str, Any]
    objective: Objective | None = None  # chosen by the reader

    @property
    def name(self) -> str:
        "What a page is called that shows it."
        update = self.shown.rollout.info.get("update")
        return "Rollout" if update is None else f"Update {update}"

    @cached_property
    def reader(self) -> Reader:
        "The live widget, made at its first use; `reader.place` is where it is."
        update = self.shown.rollout.info.get("update")
        head = head_of(self.name, [dict(name=self.name, update=update)], self.place["signal"])
        return Reader(
            head,
            load=lambda _: packed_update(self.shown, None, self.objective),
            again=lambda *_: dict(found=[], completed=[]),
            place=self.place,
        )

    def _repr_html_(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return notebook_bundle(self.reader, self._repr_html_(), repr(self), **kwargs)

    def save_html(
        self,
        path: str | Path,
        episodes: int | None = None,  # the first so many; None: all, which a what-if needs
    ) -> Path:
        "One file that needs no kernel and no network, at the place where the reader is."
        r = self.shown.rollout
        rows = None if episodes is None else range(min(episodes, len(r)))
        strips: dict[str, float | None] = dict.fromkeys(self.shown.names()[:1])
        plain = "".join(
            episode_markup(r, i, strips, True, self.shown.signals(i)) for i in range(min(3, len(r)))
        )
        packed = packed_update(self.shown, rows, self.objective)
        return write_reader(path, self.reader.head, [packed], self.reader.place, plain)


def _opened(
    source: Any, columns: Mapping[str, str] | None, tokenizer: Any, update: int | None
) -> Rollout:
    "One update of a file or of records."
    if isinstance(source, (str, Path)) and Path(source).suffix == ".safetensors":
        return Rollout.load(source)
    run = ForeignRun(source, columns, tokenizer)
    there = list(run.files)
    if update is not None and update not in there:
        raise ValueError(f"there is no update {update}: {run.path} has {there}.")
    return run.rollout(there[-1] if update is None else update)


def view(
    rollout: Rollout | Any,  # or a file, a list of objects, a DataFrame, a Dataset of episodes
    episode: int = 0,  # which of its rows comes first
    signal: str | None = None,  # behind the text; None: kl where it is there, else the first
    now: Tensor | Rollout | None = None,  # [B, T] log-probs of another policy for these tokens
    entropy: Tensor | None = None,  # [B, T] nats
    columns: Mapping[str, str] | None = None,  # of a file: what a rollout calls it -> a column
    tokenizer: Any = None,  # of a file: with it, or its name, token ids become tokens
    update: int | None = None,  # of a file with several; None: the last
    objective: Objective | None = None,  # that it was made with, where the rollout does not say so
) -> RolloutView:
    """One episode with all the signals it has, and the way to all others; `now` adds ratio and
    clipped. Raises ValueError on an episode or a signal that is not there, and where a file cannot
    be read."""
    if not isinstance(rollout, Rollout):
        rollout = _opened(rollout, columns, tokenizer, update)
    if not 0 <= episode < len(rollout):
        raise ValueError(
            f"there is no episode {episode}: this rollout has {len(rollout)}, counted from 0."
        )
    shown = shown_of(rollout, now, entropy)
    there = shown.names()
    if signal is not None and signal not in there:
        raise ValueError(
            f"there is no signal {signal!r}: this rollout has {there or 'none yet'}. Later phases "
            "of the trainer fill the others."
        )
    signal = signal or next(iter(there), "")
    strips: dict[str, float | None] = {signal: None} if signal else {}
    markup = episode_markup(shown.rollout, episode, strips, False, shown.signals(episode))
    seen = RolloutView(contained(markup))
    seen.shown, seen.place = shown, dict(row=episode, signal=signal)
    check_chosen(shown.rollout, objective)
    seen.objective = objective
    return seen
