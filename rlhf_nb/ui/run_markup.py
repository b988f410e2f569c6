"""A run as it is now, drawn from its record by pure functions: the live panel, what a notebook
keeps and the saved file show the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf_nb.rollout import Rollout
from rlhf_nb.ui.episodes import episode_facts, episode_signals, episode_tokens
from rlhf_nb.ui.html import (
    duration,
    element,
    plain_table,
    safe_text,
    sheet,
    spaced,
    themed,
    tinted_text,
)
from rlhf_nb.ui.run_curves import curves_markup
from rlhf_nb.ui.run_record import Run, state_sentence
from rlhf_nb.ui.viz import Html, signed, visible_token

SHEETS = ("sheet.css", "tints.css", "dashboard.css")


def progress_line(run: Run) -> str:
    "How far, how fast, how long still."
    if not run.total:
        return ""
    rows, unit = run.batch or 1, "episodes" if run.batch else f"{run.name}s"
    facts = [f"{run.update * rows:,} of {run.total * rows:,} {unit}"]
    if run.rate and run.going:
        facts.append(f"{run.rate * rows:.3g} {unit} per second")
        facts.append(f"{duration((run.total - run.update) / run.rate)} left")
    bar = element("progress", max=run.total, value=run.update, aria_label=f"{run.name}s done")
    return element("p", bar, " ", " · ".join(facts))


def head_line(run: Run, requested: Sequence[str] = (), note: str = "") -> str:
    "State, progress, what was requested, and a note about the controls."
    parts = [element("p", element("strong", safe_text(state_sentence(run)))), progress_line(run)]
    if requested:
        when = f" It happens when {run.name} {run.update + 1:,} is done."
        wishes = f"Requested: {', '.join(requested)}."
        parts.append(element("p", safe_text(wishes), when if run.state == "running" else ""))
    if note:
        parts.append(element("p", safe_text(note), role="note"))
    return "".join(parts)


def changed_settings(run: Run) -> str:
    "Every change, and when; nothing where nobody touched the run."
    if not run.changes:
        return ""
    rows = [(f"{one.update:,}", str(one)) for one in run.changes]
    moved = any(one.what == "kl_coef" for one in run.changes)
    head = element("h3", "Changed by hand" + "; dashed in the curves" * moved)
    return head + plain_table([f"After {run.name}", "What"], rows)


def episode_markup(r: Rollout, i: int, signal: str, most: float) -> str:
    "One episode: what is known of it, the end of its prompt, and its response under one signal."
    prompt, tokens = (r.prompts[i] if r.prompts else ""), episode_tokens(r, i)
    if len(prompt) > 160:
        prompt = "… " + prompt[-160:].partition(" ")[2]
    parts = [
        element("p", element("strong", safe_text(episode_facts(r, i)))),
        element("p", safe_text(prompt), class_="quiet"),
    ]
    row = episode_signals(r, i).get(signal)
    values = [0.0] * len(tokens) if row is None else row.tolist()
    words = spaced(tokens, r.responses[i]) if r.responses else tokens
    parts.append(element("p", tinted_text(words, values, most, signal), class_="answer"))
    if row is not None:
        cells = [(visible_token(token), signed(x)) for token, x in zip(tokens, values)]
        table = plain_table(["Token", signal], cells)
        summary = element("summary", f"{signal} as numbers")
        parts.append(element("details", summary, table))
    return element("div", *parts, class_="episode")


def episodes_markup(run: Run, signal: str, count: int) -> str:
    "The first episodes of the last update, on one scale of colour."
    r = run.last
    if r is None:
        text = f"No episodes yet: they come with the first {run.name}."
        return element("p", text) if run.batch else ""
    rows = range(min(count, len(r)))
    numbers = [episode_signals(r, i).get(signal) for i in rows]
    finite = [abs(x) for row in numbers if row is not None for x in row.tolist()]
    most = max(filter(math.isfinite, finite), default=0.0)
    scale = f"{signal}: orange above zero, blue and underlined below; full colour at {most:.2f}."
    head = element("h3", "The last update's first episodes") + element("p", scale, class_="quiet")
    return head * bool(rows) + "".join(episode_markup(r, i, signal, most) for i in rows)


def body_markup(run: Run, names: Sequence[str] | None, signal: str, episodes: int) -> str:
    "All that is below the controls."
    return (
        curves_markup(run, names) + changed_settings(run) + episodes_markup(run, signal, episodes)
    )


def render_run(
    run: Run,
    names: Sequence[str] | None = ("KL", "entropy", "length", "score"),  # metrics; None: all
    signal: str = "advantages",  # behind the tokens
    episodes: int = 2,  # of the last update
) -> Html:
    "A run as it is now, readable without a kernel."
    body = body_markup(run, names, signal, episodes)
    return themed(sheet(head_line(run), body), sheets=SHEETS)
