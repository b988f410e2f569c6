"Episodes to read: an update as bytes, the live widget and the saved file, which one script draws."

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import pandas as pd
import torch
from torch import Tensor
from traitlets import Dict

from rlhf_nb.base.files import write_text_atomic
from rlhf_nb.packing import score_sums
from rlhf_nb.rollout import OWN, SIGNALS, Rollout
from rlhf_nb.tldr import SLOT, gold_judge
from rlhf_nb.training.prompts import turns_of
from rlhf_nb.ui import episodes
from rlhf_nb.ui.episodes import Shown, filled, notes_of, number_of
from rlhf_nb.ui.facts import facts_told
from rlhf_nb.ui.html import add_blanks, asset, breakable, module, script_page, visible
from rlhf_nb.ui.what_if import UNKNOWN, lacking, objective_of, page_recipe, reproduces, unpenalized
from rlhf_nb.update import Objective

# ---- An update as bytes ----


FOLLOWS = {"kl", "rewards", "advantages", "returns"}  # from the objective and what was measured
NO_PROMPT = "(the text of the prompt was not kept)"


def _columns(frame: pd.DataFrame) -> dict[str, list[Any]]:
    "What came with the prompts: numbers as they are, anything else as visible text."
    usual = {*OWN} - {"turns", "stop_reason"}
    columns: dict[str, list[Any]] = {}
    for name in (str(name) for name in frame.columns if name not in usual):
        if pd.api.types.is_numeric_dtype(given := frame[name]):
            columns[visible(name)] = _numbers(given)
        else:  # nan is not itself
            texts = ["" if x is None or x != x else str(x) for x in given.tolist()]
            columns[visible(name)] = list(map(visible, texts))
    return columns


def _numbers(x: Any) -> list[float | None]:
    "A number an episode; what JSON does not know becomes null."
    return [float(v) if math.isfinite(v) else None for v in x.tolist()]


def _stored_signals(shown: Shown, objective: Objective | None) -> dict[str, Tensor]:
    "The signals that a page cannot compute, by name."
    r, computed = shown.rollout, FOLLOWS if objective else set()
    if objective and objective.kl_estimator == "full":
        computed = computed - {"kl"}
    measured = {name: x for name, x in filled(r, SIGNALS).items() if name not in computed}
    masked = torch.tensor(its) if (its := r.info.get("masked")) else None
    if r.chosen is not None:
        masked = ~r.chosen
    more = dict(now=shown.now, entropy=shown.entropy, masked=masked)
    return measured | {name: x for name, x in more.items() if x is not None}


def _planes(x: np.ndarray) -> bytes:
    "Numbers with all their first bytes first, then all their second ones: they compress better so."
    return np.ascontiguousarray(x.view(np.uint8).reshape(-1, x.itemsize).T).tobytes()


def objective_for(
    shown: Shown,
    chosen: Objective | None = None,  # by the reader, for a rollout that carries none
) -> tuple[Objective | None, Objective | None, str]:
    "The objective that gives a rollout's numbers; what a page would ask for; a sentence on both."
    r = shown.rollout
    if absent := lacking(r):
        kept = f"The file has no {', '.join(absent)}."
        early = "This rollout was kept before its rewards and advantages were computed."
        return None, None, kept if notes_of(r) else early
    carried = objective_of(r)
    objective = carried or chosen
    if objective is None:
        kl_coef = number_of(r, "kl_coef")
        begin = Objective() if kl_coef is None or kl_coef < 0 else Objective(kl_coef=kl_coef)
        return None, begin, UNKNOWN
    reproduced, sentence = reproduces(r, objective)
    if r.chosen is not None:
        instead = (
            "What if does not work here for runs with several turns; use the what_if function."
        )
        return None, None, f"{sentence} {instead}"
    if reproduced:
        return objective, None, sentence
    return None, None if carried else objective, sentence


def _answers(r: Rollout, rows: Sequence[int]) -> tuple[list[str], np.ndarray]:
    "Answers as running text, and the width of each token in them, in units of JavaScript's texts."
    answers: list[str] = []
    widths: list[int] = []
    shown = cache(lambda piece: (x := visible(piece, lines=True), len(x.encode("utf-16")) // 2 - 1))
    for e in rows:
        pieces = add_blanks(episodes.episode_tokens(r, e), r.responses[e] if r.responses else "")
        texts, units = zip(*map(shown, pieces)) if pieces else ((), ())
        answers.append("".join(texts))
        widths += units
    return answers, np.array(widths, dtype=np.uint32)


def packed_update(
    shown: Shown,
    rows: Sequence[int] | None = None,  # None: all; of some, nothing can be computed again
    chosen: Objective | None = None,  # by the reader, for a rollout that carries none
) -> bytes:
    "An update, compressed, for reader.js: a JSON header behind its length, float32 in planes."
    r = shown.rollout
    rows = range(len(r)) if rows is None else rows
    objective, asks, note = objective_for(shown, chosen)
    if len(rows) < len(r):
        objective = asks = None
        note = "Advantages are whitened over a whole update, and some episodes are left out."
    n = r.mask.sum(1)
    prompts: dict[str, tuple[int, dict[str, Any]]] = {}  # its place, and what is shown of it
    asked = [r.prompts[e] if r.prompts else NO_PROMPT for e in rows]
    answers, widths = _answers(r, rows)
    for e, prompt in zip(rows, asked):
        if prompt not in prompts:
            prompts[prompt] = len(prompts), _prompt(prompt, r, e)
    marks = [_turn_marks(r, e) for e in rows]
    signals, scores = _stored_signals(shown, objective), filled(r, ("raw_scores", "scores"))
    if objective or asks:
        scores["unpenalized"] = unpenalized(r, objective)
        if scores["unpenalized"].dim() == 2:
            signals["earned"] = scores["unpenalized"]
    arrays = [("widths", widths)]
    for name, x in signals.items():
        row = [x[e, : int(n[e])].detach().float() for e in rows]
        arrays.append((name, torch.cat(row).numpy() if row else np.zeros(0, np.float32)))
    picked = list(rows)
    header = dict(
        update=number_of(r, "update"),
        when=visible(episodes.when(r)),
        episodes=picked,
        of=len(r),
        lengths=n[picked].tolist(),
        stopped=None if r.stopped is None else [bool(x) for x in r.stopped[picked].tolist()],
        answers=answers,
        prompts=[its for _, its in prompts.values()],
        asked=[prompts[prompt][0] for prompt in asked],
        columns={k: [x[e] for e in rows] for k, x in _columns(episodes.columns_of(r)).items()},
        recipe=page_recipe(objective) if objective else None,
        asks=page_recipe(asks) if asks else None,
        clip={k: x for k, x in (r.objective or {}).items() if k in ("cliprange", "cliprange_high")},
        told=note,
        bad_form=[_bad_form(r, e) for e in rows],
        turn_marks=marks if any(marks) else None,
        unit=episodes.unit_of(r),
        notes=list(map(visible, notes_of(r))),
        arrays=[[name, x.size] for name, x in arrays],
        **{name: _numbers(score_sums(x)[picked]) for name, x in scores.items()},
    )
    text = json.dumps(header, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    body = b"".join(_planes(x) for _, x in arrays)
    return gzip.compress(len(text).to_bytes(4, "little") + text + body, 9, mtime=0)


def _bad_form(r: Rollout, episode: int) -> bool | None:
    "Whether the gold judge finds an answer malformed; None where it does not know the prompt."
    facts = facts_told(r.prompts[episode]) if r.prompts else None
    return gold_judge(r.responses[episode], facts).malformed if facts and r.responses else None


def _turn_marks(r: Rollout, episode: int) -> list[dict[str, Any]]:
    "Where a turn, or what answers it, begins in the response, and what is said of it."
    told = episodes.turns_told(r, episode)
    marks = [dict(at=one["at"], text=one["facts"], world=False) for one in told]
    worlds = [dict(at=one["read"], text="Reply", world=True) for one in told]
    marks += [one for one in worlds if one["at"] is not None]
    return sorted(marks, key=lambda one: one["at"])


CHAT = re.compile(  # a turn as common chat templates write it
    r"(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>)(\w+)(?:<\|end_header_id\|>)?\n+"
    r"(.*?)(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|\Z)",
    re.DOTALL,
)


def _prompt(text: str, r: Rollout, episode: int) -> dict[str, Any]:
    "A prompt as it is shown, the turns of a conversation, and facts that the gold judge knows."
    facts: Mapping[str, str] | None = facts_told(text)
    found = [(role, said) for role, said in CHAT.findall(text) if said]
    turns = turns_of(episodes.conversation_of(r, episode)) or found
    shown = partial(visible, lines=True)
    more = dict(facts=facts, turns=[[*map(shown, turn)] for turn in turns])
    return dict(text=shown(text)) | {name: x for name, x in more.items() if x}


# ---- Widget and file ----


SCRIPT = module("arithmetic.js", "reader.js")
STYLE = asset("theme.css") + asset("reader.css")


def reader_head(
    title: str,
    updates: Sequence[Mapping[str, Any]],  # name, update (its number); run: 1 for another run
    signal: str,
    start: int = 0,  # index of the update that is shown first
    suspects: Sequence[Mapping[str, Any]] = (),  # sentence, update (an index), row or None
    curves: Sequence[Mapping[str, Any]] = (),  # name, unit, lines: each a run and its points
) -> dict[str, Any]:
    "What a reader knows before it opens an update. Texts are made visible here."
    return dict(
        title=visible(title),
        updates=[{**one, "name": visible(one["name"])} for one in updates],
        signal=signal,
        start=start,
        suspects=[{**one, "sentence": visible(one["sentence"])} for one in suspects],
        curves=list(curves),
        slots=dict(SLOT),
        names=episodes.SIGNAL_NAMES,
    )


class Reader(anywidget.AnyWidget):
    """A reader in a live notebook. `place` says where it is, and moves it: update (an index), row,
    signal, sort, down, find, only, above, recipe, panel, beneath."""

    _esm = SCRIPT
    _css = STYLE
    head = Dict().tag(sync=True)
    place = Dict().tag(sync=True)

    def __init__(
        self,
        head: Mapping[str, Any],
        load: Callable[[int], bytes],  # index of an update -> the update, packed
        again: Callable[[int, int], Mapping[str, Any]],  # index, row -> found and completed
        place: Mapping[str, Any],
        actions: Mapping[str, Callable[[], None]] | None = None,  # a button for each
    ):
        self._load, self._again, self.actions = load, again, dict(actions or {})
        super().__init__(head={**head, "actions": list(self.actions)}, place=dict(place))
        self.on_msg(self._answer)

    def _answer(self, _: Any, asked: Mapping[str, Any], __: Any) -> None:
        "Answer a question of the page; where that fails, the page says why."
        number = asked["number"]
        try:
            if "load" in asked:
                self.send(dict(answers=number), [self._load(asked["load"])])
            elif "again" in asked:
                self.send(dict(answers=number, value=self._again(*asked["again"])))
            else:
                self.actions[asked["act"]]()
                self.send(dict(answers=number, value=None))
        except Exception as error:
            self.send(dict(answers=number, error=f"{type(error).__name__}: {error}"))
            raise


def write_reader(
    path: str | Path,
    head: Mapping[str, Any],
    packed: Sequence[bytes],  # one for each update of the head
    place: Mapping[str, Any],
    plain: str,  # markup for where no script runs
    completed: Mapping[str, Any] | None = None,  # prompt -> rows of the tables of completions
    above: str = "",  # markup above the episodes: the report of a demo
) -> Path:
    "A page that reads episodes without a kernel or a network, written whole or not at all."
    texts = [dict(packed=base64.b64encode(data).decode()) for data in packed]
    updates = [one | text for one, text in zip(head["updates"], texts, strict=True)]
    page = script_page(
        "reader.html",
        head["title"],
        SCRIPT,
        asset("page.css") + STYLE + f".report {{{asset('report.css')}}}" * bool(above),
        {**head, "updates": updates, "place": dict(place), "completed": completed or {}},
        above=above,
        views=asset("views.html") * bool(above),
        plain=breakable(plain),
    )
    write_text_atomic(path, page)
    return Path(path)
