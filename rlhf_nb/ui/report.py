"""What a demo left behind beside its rollouts: the first screen of its page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf_nb.base.files import DEMO_MARK, read_object
from rlhf_nb.training.logs import logged_rows
from rlhf_nb.training.metrics import Metric, in_order
from rlhf_nb.ui.html import (
    data_table,
    element,
    exact,
    missing_note,
    number_text,
    percent,
    sections_markup,
)
from rlhf_nb.ui.run_files import ppo_lines
from rlhf_nb.ui.run_view import Run, curves_markup
from rlhf_nb.ui.verdict import (
    best_and_worst,
    completions_of_run,
    examples_section,
    headline,
    posts_section,
    stretch,
)


def logged_panels(frame: pd.DataFrame) -> list[Metric]:
    "The metrics of the report that have numbers; the final score only where no raw one is logged."
    logged = {name for name in frame if frame[name].notna().any()}
    if "objective/raw_scores" in logged:
        logged.discard("objective/scores")
    return [metric for metric in in_order("report") if metric.name in logged]


def verdict_section(results: Mapping[str, Any]) -> str:
    "What the gold judge counted beside the wins and bad form of the headline."
    heads = ["Model", "Temperature", "Gold points", "Covered", "Invented", "Stopped", "Tokens"]
    number = lambda value, digits=2: exact(number_text(value, digits), value)
    rows = [
        [
            row["model"].upper(),
            f"{row['temperature']:g}",
            *(number(row.get(name)) for name in ("gold", "covered", "invented")),
            percent(row.get("stopped")),
            number(row.get("length"), 1),
        ]
        for row in results.get("verdict", [])
    ]
    if not rows:
        return missing_note("No results yet: the stage judge writes results.json.")
    return data_table("What a summary holds, on test posts", heads, rows, "numbers")


def curve_panels(metrics: Iterable[Mapping[str, Any]]) -> str:
    "The dashboard's curves of what PPO logged, over the episodes."
    frame = ppo_lines(metrics)
    logged = {m.name: frame[["episode", m.name]].dropna().values for m in logged_panels(frame)}
    lines = {name: [(int(x), float(y)) for x, y in line] for name, line in logged.items()}
    if not lines:
        return missing_note("No curves yet: the stage ppo has logged nothing.")
    turned = (
        "If the raw score goes on rising while gold turns down, the policy has found what the "
        "reward model likes and nobody else does. "
    )
    moves = "From update to update the score also moves with the prompts that were drawn."
    hint = turned * any("gold" in name for name in lines) + moves
    drawn = Run("episode", lines=lines)
    return curves_markup(drawn, None, (0, int(frame["episode"].max()))) + element("p", hint)


def reward_section(results: Mapping[str, Any]) -> str:
    "Accuracy on held-out pairs and on the probe, in all and by kind."
    measured = results.get("reward") or {}
    tables: list[str] = []
    for caption, head, whole, parts in (
        ("Held-out pairs, by the gold order", "Kind of pair", "accuracy", "by_kind"),
        ("Probe: perfect, or one fact wrong", "Wrong fact", "probe", "probe_by_slot"),
    ):
        shares = {"all": measured.get(whole), **(measured.get(parts) or {})}
        rows = [[name, percent(x), stretch(0, x)] for name, x in shares.items() if x is not None]
        if rows:
            tables.append(data_table(caption, [head, "Right", "From 0 to 100 %"], rows, "rates"))
    if not tables:
        who = "the stage reward measures it, and judge writes it into results.json"
        return missing_note(f"No accuracy yet: {who}.")
    hint = (
        "The mark is at one half, which is chance. A fact near it is one that the reward model "
        "does not check: PPO has no reason to get it right."
    )
    return element("div", *tables, class_="pair") + element("p", hint)


def demo_report(folder: Path) -> str:
    """Result, best and worst, curves and completions of a demo, as the markup above its rollouts.
    What is still to come is said in its place. Empty where no `rlhf-nb demo` wrote the folder."""
    if not (folder / DEMO_MARK).is_file():
        return ""
    settings, results = (read_object(folder / f"{x}.json", {}) for x in ("settings", "results"))
    completions = completions_of_run(folder)
    examples = examples_section(completions)
    above = best_and_worst(completions) if examples else ()
    sections = {
        "Verdict": headline(results, settings.get("quick", False), completions),
        **({"Best and worst": examples} if examples else {}),
        "Results": verdict_section(results),
        "Curves": curve_panels(logged_rows(folder)),
        "Reward model": reward_section(results),
        "Completions side by side": posts_section(completions, above=above),
        "Rollouts": element("p", "What the policy wrote in each update, token by token."),
    }
    known = [name for name in ("seed", "kl_coef", "episodes") if name in settings]
    lead = ["PPO from preferences on the mini TL;DR world"]
    lead += [f"{name} {settings[name]}" for name in known]
    return element("div", sections_markup(" · ".join(lead), sections), class_="rlhf report")
