"""What a demo left behind beside its rollouts: the first screen of its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf_nb.base.files import DEMO_MARK, read_object
from rlhf_nb.training.logs import trained_again
from rlhf_nb.ui.html import (
    data_table,
    element,
    exact,
    folded,
    missing_note,
    number_text,
    percent,
    safe_text,
)
from rlhf_nb.ui.suspects import Suspect
from rlhf_nb.ui.verdict import (
    best_and_worst,
    completions_of_run,
    examples_section,
    guessing,
    headline,
    near_chance,
    posts_section,
    stretch,
)
from rlhf_nb.ui.viz import signed_number


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


def looks_of(
    results: Mapping[str, Any], frame: pd.DataFrame, suspects: Sequence[Suspect]
) -> dict[str, str]:
    "Three places that deserve a look: address -> why."
    looks: dict[str, str] = {}
    of_run, of_episodes = (
        [x for x in suspects if (x.episode is None) == whole] for whole in (1, 0)
    )
    for one in [*of_run[:1], *of_episodes[:1]]:
        row = "" if one.episode is None else f"&episode={one.episode}"
        row += "&signal=kl&token=most" * (", most on “" in one.sentence)
        looks[f"#update={one.update}{row}"] = one.sentence
    if {"gold_sft", "gold_ppo"} <= set(frame.columns) and (pair := best_and_worst(frame))[1:]:
        gain = signed_number(float((frame["gold_ppo"] - frame["gold_sft"])[pair[1]]))
        looks["#best"] = f"The worst summary: {gain} gold points against SFT's"
    measured = results.get("reward") or {}
    if blind := near_chance(measured.get("probe_by_slot") or {}, measured.get("probe_pairs") or {}):
        looks["#reward"] = f"The reward model {guessing(blind)}"
    return dict([*looks.items(), ("#rollouts", "The rollouts, token by token")][:3])


def demo_report(folder: Path, suspects: Sequence[Suspect] = ()) -> str:
    """Result, best and worst, curves and completions of a demo, as the markup beside its rollouts.
    What is still to come is said in its place. Empty where no `rlhf-nb demo` wrote the folder."""
    if not (folder / DEMO_MARK).is_file():
        return ""
    if trained_again(folder):
        return missing_note("Another run wrote into ppo since: results.json is of the one before.")
    settings, results = (read_object(folder / f"{x}.json", {}) for x in ("settings", "results"))
    completions = completions_of_run(folder)
    examples = examples_section(completions)
    above = best_and_worst(completions) if examples else ()
    looks = looks_of(results, completions, suspects)
    first = headline(results, settings.get("quick", False), completions, looks)
    folds = {
        **({"Best and worst summary": ("best", examples)} if examples else {}),
        "What a summary holds": ("results", verdict_section(results)),
        "Reward model": ("reward", reward_section(results)),
        "Summaries side by side": ("posts", posts_section(completions, above=above)),
    }
    known = [name for name in ("seed", "kl_coef", "episodes") if name in settings]
    lead = ["PPO from preferences on the mini TL;DR world"]
    lead += [f"{name} {settings[name]}" for name in known]
    more = [
        folded(str(element("h2", name)), element("div", markup, id=key))
        for name, (key, markup) in folds.items()
    ]
    told = element("p", safe_text(" · ".join(lead)), class_="lead")
    return element("div", told, first, *more, class_="rlhf report")
