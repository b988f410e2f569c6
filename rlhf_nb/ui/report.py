"""One page with all that a run left behind."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from matplotlib.figure import Figure

from rlhf_nb.base.files import write_text_atomic
from rlhf_nb.rollout import Rollout
from rlhf_nb.training.metrics import Metric, in_order
from rlhf_nb.ui.chart import curve_picture, curve_svg, thin
from rlhf_nb.ui.episodes import (
    episode_facts,
    episode_signals,
    episode_tokens,
    prompt_lines,
    when,
)
from rlhf_nb.ui.facts import facts_told, missing_facts, post_with_facts, token_claims
from rlhf_nb.ui.html import (
    Html,
    data_table,
    duration,
    element,
    exact,
    missing_note,
    number_text,
    percent,
    safe_prose,
    safe_text,
    section_page,
    spaced,
    tinted_text,
)
from rlhf_nb.ui.reader import NO_PAGE, SavedPage, episode_link, saved_page, update_links
from rlhf_nb.ui.run_files import (
    Suspect,
    log_lines,
    merged,
    ppo_lines,
    read_json,
    rollout_files,
    run_suspects,
)
from rlhf_nb.ui.verdict import (
    blind_sentence,
    completions_of_run,
    examples_section,
    headline,
    outcome_sentence,
    paragraphs,
    posts_section,
)
from rlhf_nb.ui.verdict import compare_rates as compare_rates
from rlhf_nb.ui.viz import curves, signal_table

# ---- To make a run again ----


STAGES = ("sft", "pairs", "reward", "ppo")
SAME = ("command", "versions", "commit", "machine", "threads")


def made_of(folder: Path, results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    "What made each stage, as their manifests and results.json keep it."
    stages = {
        stage: read_json(folder / stage / "manifest.json").get("run", {}).get("made")
        for stage in STAGES
    }
    return {k: made for k, made in {**stages, "judge": results.get("made")}.items() if made}


def earlier_stages(made: Mapping[str, Mapping[str, Any]], last: str) -> str:
    "The stages that something else made than the one that is shown; empty where there is none."
    parts = []
    for stage, one in made.items():
        if differ := [name for name in SAME if one.get(name) != made[last].get(name)]:
            parts.append(f"{stage} ({one.get('date')}: other {', '.join(differ)})")
    return "; ".join(parts)


def reproduce_section(
    made: Mapping[str, Mapping[str, Any]],  # of `made_of`
    metrics: Iterable[Mapping[str, Any]],  # lines of metrics.jsonl
) -> str:
    "The command, the versions, the commit, the machine, the date and the time."
    if not made:
        return missing_note("This run kept no record of the command, the versions and the machine.")
    last = "ppo" if "ppo" in made else list(made)[-1]
    one = made[last]
    versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
    took = {
        line["stage"]: line["seconds"]
        for line in metrics
        if line.get("event") == "done" and "seconds" in line
    }
    rows: list[tuple[str, Any]] = [
        ("Command", element("code", safe_text(one["command"]))),
        ("Versions", versions),
        ("Commit", one.get("commit") or "the installed package: there is no checkout"),
        ("Machine", f"{one['machine']}; threads of torch: {one['threads']}"),
        ("Date", one["date"]),
        ("Time", f"{duration(sum(took.values()))} for all stages" if took else None),
    ]
    if differ := earlier_stages(made, last):
        rows.append(("Made otherwise", differ))
    return data_table("To make this run again", ["What", f"As stage {last} ran"], rows)


SHEETS = ("tints.css", "facts.css")  # after the report's own


def logged_panels(frame: pd.DataFrame) -> list[Metric]:
    "The metrics of the report that have numbers; the final score only where no raw one is logged."
    logged = {name for name in frame if frame[name].notna().any()}
    if "objective/raw_scores" in logged:
        logged.discard("objective/scores")
    return [metric for metric in in_order("report") if metric.name in logged]


def _title(metric: Metric) -> str:
    return metric.title[:1].upper() + metric.title[1:]


def _draw(frame: pd.DataFrame, panels: Sequence[Metric], ncols: int) -> Figure:
    "Panels with their units; shares in per cent, and one half marked on the win rate."
    figure = curves(frame, {_title(m): m.name for m in panels}, x="episode", ncols=ncols)
    for axis, metric in zip(figure.axes, panels):
        axis.set_ylabel(metric.unit)
        if metric.is_share:
            axis.yaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g} %")
        if metric.name == "gold/win_rate":
            axis.axhline(0.5, color="#555555", linewidth=0.8, linestyle=":")
    return figure


def run_curves(
    metrics: Iterable[Mapping[str, Any]],  # log entries; where they have a `stage`, those of ppo
) -> Figure:
    """Score, gold, KL, entropy, clipping, value and length over the episodes. Raises ValueError if
    nothing of it was logged."""
    frame = ppo_lines(metrics)
    panels = logged_panels(frame)
    if not panels:
        raise ValueError(
            "no curve to draw: no line of stage ppo has an `episode` and a metric. Run PPO first, "
            "or give trainer.state.log_history."
        )
    return _draw(frame, panels, ncols=3)


def _between(row: Mapping[str, float]) -> str:
    "An interval of shares."
    return f"{100 * row['low']:.1f} to {percent(row['high'])}"


def stretch(low: float, high: float, half: bool = True) -> Html:
    "A bar from 0 to 100 %, filled from low to high, with a mark at one half or none."
    left, right = (100 * min(max(x, 0.0), 1.0) for x in (low, high))
    place = f"left:{left:.1f}%;width:{max(right - left, 0.7):.1f}%"
    mark = element("span", class_="half") if half else ""
    return element("span", element("span", style=place), mark, class_="bar", aria_hidden="true")


def verdict_section(results: Mapping[str, Any]) -> str:
    "Everything that the gold judge counted."
    heads = [
        "Model",
        "Temperature",
        "Win rate",
        "95 % interval",
        "From 0 to 100 %",
        "Gold points",
        "Covered",
        "Invented",
        "Bad form",
        "Stopped",
        "Tokens",
    ]
    rows = [
        [
            row["model"].upper(),
            f"{row['temperature']:g}",
            percent(row["win_rate"]),
            _between(row),
            stretch(row["low"], row["high"]),
            *(
                exact(number_text(row.get(name)), row.get(name))
                for name in ("gold", "covered", "invented")
            ),
            *(percent(row.get(name)) for name in ("malformed", "stopped")),
            exact(number_text(row.get("length"), 1), row.get("length")),
        ]
        for row in results.get("verdict", [])
    ]
    return (
        data_table("Against the references, on test posts", heads, rows, "numbers")
        if rows
        else missing_note("No results yet: the stage judge writes results.json.")
    )


def story(frame: pd.DataFrame, metric: Metric) -> str:
    "What a curve shows, for those who cannot see it: where it starts and where it ends."
    line = frame.dropna(subset=[metric.name])
    values, episodes = line[metric.name], line["episode"]
    ends = [f"{values.iloc[i]:.3g} at episode {episodes.iloc[i]:,.0f}" for i in (0, -1)]
    return f"{_title(metric)} ({metric.unit}): {ends[0]}, {ends[1]}."


def _panel(frame: pd.DataFrame, metric: Metric, last: int) -> str:
    "One metric over the episodes, from 0 to the last of the run."
    line = frame.dropna(subset=[metric.name])
    values = ((100 if metric.is_share else 1) * line[metric.name]).tolist()
    unit = metric.unit.replace("share of ", "% of ")
    points = thin(list(zip(line["episode"].astype(int).tolist(), values)))
    drawn = curve_svg(points, (), "episode", unit, (0, last))
    picture = curve_picture(drawn, story(frame, metric))
    return element("figure", element("figcaption", element("strong", _title(metric))), picture)


def curve_panels(metrics: Sequence[Mapping[str, Any]], links: str = "") -> str:
    "A picture for each panel, and links to updates of it."
    frame = ppo_lines(metrics)
    last = int(frame["episode"].max()) if len(frame) else 0
    pictures = [_panel(frame, metric, last) for metric in logged_panels(frame)]
    if not pictures:
        return missing_note("No curves yet: the stage ppo has logged nothing.")
    hint = (
        "If the raw score goes on rising while gold turns down, the policy has found what the "
        "reward model likes and nobody else does. From update to update the score also moves with "
        "the prompts that were drawn."
    )
    return element("div", *pictures, class_="panels") + element("p", hint) + links


_STAGES = dict(
    world="write posts and references",
    sft="imitate the references",
    pairs="sample summaries, label pairs",
    reward="learn what was preferred",
    ppo="write what the reward model likes",
    judge="the gold judge reads test posts",
)


def times_section(metrics: Iterable[Mapping[str, Any]]) -> str:
    "How long each stage took; of a stage that was repeated, the last time."
    took = {
        line["stage"]: line["seconds"]
        for line in metrics
        if line.get("event") == "done" and "seconds" in line
    }
    if not took:
        return missing_note("No stage has finished yet.")
    total, rows = sum(took.values()) or 1.0, []
    for name in [*_STAGES, *(name for name in took if name not in _STAGES)]:
        cells = (
            [duration(took[name]), stretch(0, took[name] / total, half=False)]
            if name in took
            else ["not yet", ""]
        )
        rows.append([name, _STAGES.get(name, ""), *cells])
    return data_table(
        "Stages",
        ["Stage", "What it does", "Time", "Share of all"],
        [*rows, ["all", "", duration(sum(took.values())), ""]],
    )


def reward_section(results: Mapping[str, Any]) -> str:
    "Accuracy on held-out pairs and on the probe, in all and by kind."
    measured = results.get("reward") or {}
    tables: list[str] = []
    for caption, head, whole, parts in (
        ("Held-out pairs, by the gold order", "Kind of pair", "accuracy", "by_kind"),
        ("Probe: perfect, or one fact wrong", "Wrong fact", "probe", "probe_by_slot"),
    ):
        shares = {"all": measured.get(whole), **(measured.get(parts) or {})}
        rows = [
            [name, percent(share), stretch(0, share)]
            for name, share in shares.items()
            if share is not None
        ]
        if rows:
            tables.append(data_table(caption, [head, "Right", "From 0 to 100 %"], rows))
    if not tables:
        return missing_note(
            "No accuracy yet: the stage reward measures it, and judge writes it into results.json."
        )
    hint = (
        "The mark is at one half, which is chance. A fact near it is one that the reward model "
        "does not check: PPO has no reason to get it right."
    )
    return element("div", *tables, class_="pair") + element("p", hint)


def _first_middle_last(folder: Path) -> list[Rollout]:
    """The rollouts of the first, the middle and the last update (of one rank where there are
    several)."""
    files = sorted((folder / "ppo" / "rollouts").glob("update-*.safetensors"), reverse=True)
    paths = sorted({path.stem.split("-rank")[0]: path for path in files}.items())
    return (
        [Rollout.load(paths[i][1]) for i in sorted({0, (len(paths) - 1) // 2, len(paths) - 1})]
        if paths
        else []
    )


def _shared_rows(rollouts: Sequence[Rollout], count: int) -> list[list[int]]:
    "Which episodes of each: those of a prompt that all of them have, else the first ones."
    shared = [
        text
        for text in dict.fromkeys(rollouts[0].prompts)
        if all(text in r.prompts for r in rollouts)
    ][:count]
    return [
        [r.prompts.index(text) for text in shared] or list(range(min(count, len(r))))
        for r in rollouts
    ]


def _scale(rollouts: Sequence[Rollout], rows: Sequence[Sequence[int]], name: str) -> float | None:
    "The largest finite magnitude of a signal among the episodes shown; None where there is none."
    numbers = [
        x
        for r, part in zip(rollouts, rows)
        for i in part
        for x in episode_signals(r, i).get(name, [])
    ]
    return max((abs(float(x)) for x in numbers if math.isfinite(x) and x != 0), default=None)


SHOWN = dict(kl="KL", advantages="advantage")  # signals behind the words of an answer


def episode_card(
    rollout: Rollout,
    episode: int,
    scales: Mapping[str, float | None],  # signal -> full colour; None: it has no number but 0
    link: str = "",  # to the same episode elsewhere
) -> str:
    """An episode to read: post and answer as running text, once for each signal behind it, facts
    marked where the post tells them; all numbers folded."""
    tokens, signals = episode_tokens(rollout, episode), episode_signals(rollout, episode)
    answer = rollout.responses[episode] if rollout.responses else ""
    words = spaced(tokens, answer) if rollout.tokens else [f"{token} " for token in tokens]
    prompt, *columns = prompt_lines(rollout, episode)
    facts = facts_told(prompt)
    marks = token_claims(words, facts) if facts else ()
    head = element("p", element("strong", escape(episode_facts(rollout, episode))))
    post = element("p", post_with_facts(prompt, facts) if facts else safe_prose(prompt))
    parts = [head, element("div", post, class_="query")]
    for name in [name for name in scales if name in signals]:
        line = tinted_text(words, signals[name].tolist(), scales[name] or 0.0, name, marks)
        name_of = element("span", SHOWN[name], class_="of")
        parts.append(element("p", name_of, " ", line, class_="answer"))
    if not {*scales} & {*signals}:
        parts.append(element("p", safe_prose(answer or "".join(words)), class_="answer"))
    if facts:
        parts.append(element("p", missing_facts("".join(words), facts), class_="answer"))
    kept = "".join(element("p", safe_prose(line), class_="query") for line in columns)
    table = str(signal_table(tokens, **signals)) if signals else ""
    if table or kept:
        parts.append(element("details", element("summary", "All signals"), table, kept))
    return element("div", *parts, element("p", link) if link else "", class_="card episode")


def rollouts_section(
    rollouts: Sequence[Rollout],
    count: int = 3,
    page: SavedPage = NO_PAGE,
) -> str:
    "Some episodes of each rollout, with KL and advantage behind the words."
    if not rollouts:
        return missing_note("No rollouts yet: the stage ppo writes ppo/rollouts.")
    rows, parts = _shared_rows(rollouts, count), []
    scales = {name: _scale(rollouts, rows, name) for name in ("kl", "advantages")}
    for rollout, part in zip(rollouts, rows):
        update = rollout.info.get("update")
        cards = [episode_card(rollout, i, scales, episode_link(page, update, i)) for i in part]
        parts.append(element("h3", escape(when(rollout))) + "".join(cards))
    full = [f"{most:.3g} ({SHOWN[name]})" for name, most in scales.items() if most is not None]
    hint = (
        "Behind each word of an answer is its KL in nats (orange: the policy likes it more than "
        "the reference did; blue and underlined: less), and in the line below its advantage "
        "(orange: more of it, blue: less); the number on hover."
    )
    scale = f" The colours have one scale over all updates: full colour at {' and '.join(full)}."
    return element("p", hint + scale * bool(full)) + "".join(parts)


def next_steps(folder: Path, examples: bool) -> list[str]:
    "Links to the pages of rollouts that are beside the report, and the command that writes one."
    pages = sorted(path.name for path in folder.glob("rollouts*.html"))
    links = [
        element("a", safe_text(name), href=quote(name)) + ": the rollouts, token by token"
        for name in pages
    ]
    again = "writes that page again, or others" if pages else "writes a page of the rollouts"
    below = element("a", "The best and the worst summary", href="#s0") + ", with every fact marked"
    return [
        *links,
        element("code", "rlhf-nb view .")
        + f" in the folder of this report {again}: what PPO did to each summary, token by token",
        *([below] if examples else []),
    ]


# ---- A run of one's own: nobody judged it but its reward ----


def _number(metric: Metric, x: float) -> str:
    return f"{100 * x:.3g} %" if metric.is_share else f"{x:,.4g}"


def first_and_last(frame: pd.DataFrame) -> str:
    "What each metric was in the first update and is in the last."
    logged = [(metric, frame[metric.name].dropna()) for metric in logged_panels(frame)]
    rows = [
        (f"{_title(metric)}, {metric.unit}", *(_number(metric, x.iloc[i]) for i in (0, -1)))
        for metric, x in logged
    ]
    return data_table("", ["Metric", "First update", "Last update"], rows)


def own_opening(frame: pd.DataFrame, alarms: Sequence[Suspect]) -> str:
    "What became of a run that has no judge, in a few sentences."
    if not len(frame):
        return missing_note("Nothing was logged yet.")
    lines = [str(alarm.sentence) for alarm in alarms] or ["No alarm: nothing ran away or jumped."]
    lines.append(
        "No judge but the reward itself has read these answers. Read some of both ends, below, "
        "before you believe its rise."
    )
    return first_and_last(frame) + paragraphs([escape(line) for line in lines])


def own_sections(folder: Path, metrics: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    "The sections of the report of a run that `rlhf-nb demo` did not make."
    frame, page = ppo_lines(metrics), saved_page(folder)
    files = rollout_files(folder)
    picked = sorted({[*files][i] for i in (0, (len(files) - 1) // 2, -1)}) if files else []
    rollouts = [merged([Rollout.load(file) for file in files[update]]) for update in picked]
    counted = frame.assign(update=range(len(frame)))
    kept = missing_note("No rollouts were kept: train with save_rollouts=True to read them here.")
    return {
        "Result": own_opening(frame, run_suspects(counted) if len(frame) else []),
        "Curves": curve_panels(metrics, update_links(page, picked)),
        "Answers": rollouts_section(rollouts, page=page) if rollouts else kept,
    }


def _settings(settings: Mapping[str, Any]) -> str:
    "Every setting of the run."
    if not settings:
        return missing_note("settings.json is not there.")
    rows = [
        [name, value if isinstance(value, str) else json.dumps(value)]
        for name, value in settings.items()
    ]
    return data_table("As the run was started", ["Setting", "Value"], rows)


def report(
    folder: str | Path,  # of a run: the --output_dir of `rlhf-nb demo`
) -> Path:  # report.html in that folder
    """One page with all that a run left behind: verdict, curves, completions, rollouts; of a run of
    one's own, which nobody judged: first and last update, alarms, curves, answers. Raises
    ValueError on a folder that is no run."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("settings.json", "metrics.jsonl")):
        raise ValueError(
            f"{folder} is no run: settings.json and metrics.jsonl are both missing. Give the "
            "--output_dir of `rlhf-nb demo`, or run that first."
        )
    settings, results = read_json(folder / "settings.json"), read_json(folder / "results.json")
    metrics = log_lines(folder / "metrics.jsonl")
    completions = completions_of_run(folder)
    blind = [blind_sentence(results.get("reward") or {}), outcome_sentence(completions)]
    examples = examples_section(completions)
    steps = next_steps(folder, bool(examples))
    page, rollouts = saved_page(folder), _first_middle_last(folder)
    links = update_links(page, [rollout.info.get("update") for rollout in rollouts])
    sections = {
        "Verdict": headline(results, settings.get("quick", False), steps, blind),
        **({"Best and worst": examples} if examples else {}),
        "Results": verdict_section(results),
        "Curves": curve_panels(metrics, links),
        "Time": times_section(metrics),
        "Reward model": reward_section(results),
        "Completions side by side": posts_section(completions, page=page),
        "Rollouts": rollouts_section(rollouts, page=page),
        "To reproduce it": reproduce_section(made_of(folder, results), metrics),
        "Settings": _settings(settings),
    }
    demo = any((folder / name).is_file() for name in ("settings.json", "results.json"))
    own = not demo and {line.get("stage", "ppo") for line in metrics} <= {"ppo"}
    if own:
        sections = own_sections(folder, metrics)
    lead = [
        "PPO" if own else "PPO from preferences on the mini TL;DR world",
        *(
            f"{name} {settings[name]}"
            for name in ("seed", "kl_coef", "episodes")
            if name in settings
        ),
    ]
    title = f"Run report: {folder.resolve().name}"
    path = folder / "report.html"
    write_text_atomic(path, section_page(title, " · ".join(lead), sections, SHEETS))
    return path
