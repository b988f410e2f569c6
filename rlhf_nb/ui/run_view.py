"A run as it is now: its record, and its pages, drawn by pure functions. No widgets, no threads."

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from rlhf_nb.rollout import Rollout
from rlhf_nb.training.metrics import LOG_NAMES, in_order, metric_of
from rlhf_nb.ui import episodes as of
from rlhf_nb.ui import html
from rlhf_nb.ui.chart import Points, curve_picture, curve_svg, thin, value_text
from rlhf_nb.ui.html import element, safe_text
from rlhf_nb.ui.viz import Html, signed_number, visible, visible_token

# ---- The record ----


@dataclass(frozen=True)
class Change:
    "What somebody did to a run by hand."

    update: int  # the last one that it did not change
    what: str  # kl_coef, pause or stop
    before: float | None = None
    after: float | None = None  # of a pause: how many seconds

    def __str__(self) -> str:
        if self.what == "kl_coef":
            return f"kl_coef {self.before:.4g} → {self.after:.4g}"
        return "stopped" if self.after is None else f"paused for {html.duration(self.after)}"


STATES = {  # and the sentence for each
    "waiting": "No run yet: give this to a trainer as a callback, and call train().",
    "starting": "Starting: no {run.name} has begun yet.",
    "running": "Running: {of} is done.",
    "paused": "Paused after {of}. Go on, stop, or move kl_coef first.",
    "done": "Done: all {run.total:,} {run.name}s.",
    "ended": "Ended by another callback after {of}.",
    "stopped": "Stopped by hand after {of}; what was trained is kept.",
    "interrupted": "Interrupted after {whole}; the next one may be half made.",
    "left": "Interrupted in the pause after {of}; nothing is half made.",
    "failed": "Failed after {whole}: {run.error}",
}
COUNTERS = ("epoch", "step", "total_flos", "episode")  # in a log, beside its metrics


@dataclass
class Run:
    "What is known of a run at this moment."

    name: str = "update"  # what a step of this trainer is called
    state: str = "waiting"  # a key of STATES
    update: int = 0  # how many are done
    total: int = 0
    batch: int = 0  # episodes in an update; 0 where there are none
    rate: float | None = None  # updates in a second, over the last thirty
    kl_coef: float | None = None  # of the next update, unless another one is requested
    stopping: bool = False  # a stop was granted, and its update is being logged and saved
    error: str = ""
    last: Rollout | None = None  # of the last update
    lines: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # metric: its values
    changes: list[Change] = field(default_factory=list)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=31), repr=False)

    @property
    def going(self) -> bool:
        "Is there somebody who will grant a wish?"
        return self.state in ("starting", "running", "paused")

    def add(self, update: int, numbers: Mapping[str, Any]) -> None:
        "Add the metrics of an update; counters, totals and what is not a number are left out."
        for name, value in numbers.items():
            counts = name in COUNTERS or name.startswith(("train_", "steering/"))
            if isinstance(value, Real) and not counts:
                self.lines.setdefault(name, []).append((update, float(value)))

    def remember(self, line: Mapping[str, Any]) -> None:
        "Add a line of the log of a run that is resumed."
        at = line.get("step", 0)
        self.add(at, line)
        if "steering/kl_coef" in line:
            pair = line["steering/kl_coef_before"], line["steering/kl_coef"]
            self.changes.append(Change(at, "kl_coef", *pair))
        if "steering/stopped" in line:
            self.changes.append(Change(at, "stop"))

    def tick(self, seconds: float) -> None:
        "An update is over, at this reading of a clock. Pauses don't slow the rate."
        paused = sum(one.after or 0.0 for one in self.changes if one.what == "pause")
        self.times.append(seconds - paused)
        span = self.times[-1] - self.times[0]
        self.rate = (len(self.times) - 1) / span if span > 0 else None


def state_sentence(run: Run) -> str:
    "The state of a run in words."
    of, done = f"{run.name} {run.update:,} of {run.total:,}", f"{run.update:,} whole {run.name}s"
    return STATES[run.state].format(run=run, of=of, whole=done)


# ---- Its curves ----


def curve_figure(metric: str, points: Points, run: Run) -> str:
    "One metric: what it is, a picture, and the same in a sentence; shares in per cent."
    known = metric_of(metric)
    title, unit = known.label, known.unit.replace("share of ", "% of ")
    if known.is_share:
        points = [(update, 100 * value) for update, value in points]
    code = [" ", element("code", safe_text(metric))] * (title != metric)
    head, line = [element("strong", safe_text(title)), *code], thin(points)
    if not line:
        return element("figure", element("figcaption", *head, ": no finite number yet."))
    values, (last, now) = [y for _, y in line], line[-1]
    show = lambda value: value_text(value, max(map(abs, values)))
    marks = [one.update for one in run.changes if one.what == "kl_coef"]
    number = element("strong", show(now), title=f"{now!r} {unit}")
    after = f" after {run.name} {last:,}; lowest {show(min(values))}, highest {show(max(values))}"
    moved = any(line[0][0] <= u < last for u in marks)
    alt = visible(f"{title}, {unit}: {show(now)}{after}") + "; dashed: kl_coef was moved" * moved
    picture = curve_picture(curve_svg(line, marks, run.name, unit), alt)
    words = element("figcaption", *head, element("br"), number, safe_text(after))
    return element("figure", words, picture)


Names = Sequence[str] | None  # of metrics; None: all
VIEWER_CURVES = tuple(metric.short[0] for metric in in_order())  # those that are logged


def chosen_curves(run: Run, names: Names) -> list[str]:
    "The metrics of some names. None: all; if none of them was logged, the first four."
    logged = list(run.lines)  # a thread may be adding to it
    if names is None:
        return logged
    wanted = [LOG_NAMES.get(name, name) for name in names]
    wanted = [name for name in wanted if name in logged or tuple(names) != VIEWER_CURVES]
    return wanted if not logged or set(wanted) & set(logged) else logged[:4]


def curves_markup(run: Run, names: Names) -> str:
    "A figure for each metric; a sentence for one that was never logged."
    if not run.lines:
        return element("p", f"No curves yet: they begin with the first {run.name}.")
    chosen = chosen_curves(run, names)
    figures = [curve_figure(name, run.lines[name], run) for name in chosen if name in run.lines]
    absent = ", ".join(name for name in chosen if name not in run.lines)
    note = safe_text(f"Never logged: {absent}. There are {', '.join(run.lines)}.")
    below = element("p", note, class_="quiet") if absent else ""
    return element("div", *figures, class_="curves") + below


# ---- Its pages ----


SHEETS = ("sheet.css", "tints.css", "dashboard.css")


def progress_line(run: Run) -> str:
    "How far, how fast, how long still."
    if not run.total:
        return ""
    rows, unit = run.batch or 1, "episodes" if run.batch else f"{run.name}s"
    facts = [f"{run.update * rows:,} of {run.total * rows:,} {unit}"]
    if run.rate and run.going:
        facts.append(f"{run.rate * rows:.3g} {unit} per second")
        facts.append(f"{html.duration((run.total - run.update) / run.rate)} left")
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


def run_episode_markup(r: Rollout, i: int, signal: str, most: float) -> str:
    "One episode: what is known of it, the end of its prompt, and its response under one signal."
    prompt, tokens = (of.end_of(of.prompt_of(r, i)) if r.prompts else ""), of.episode_tokens(r, i)
    parts = [element("p", element("strong", safe_text(of.episode_facts(r, i))))]
    parts.append(element("p", safe_text(prompt), class_="quiet"))
    row = of.episode_signals(r, i).get(signal)
    values = [0.0] * len(tokens) if row is None else row.tolist()
    words = of.bracketed(r, i, html.add_blanks(tokens, r.responses[i]) if r.responses else tokens)
    parts.append(element("p", html.tinted_text(words, values, most, signal), class_="answer"))
    if row is not None:
        cells = [(visible_token(token), signed_number(x)) for token, x in zip(tokens, values)]
        numbers = html.data_table("", ["Token", signal], cells)
        parts.append(html.folded(f"{signal} as numbers", numbers))
    return element("div", *parts, class_="episode")


def episodes_markup(run: Run, signal: str, count: int) -> str:
    "The first episodes of the last update, on one scale of colour."
    r = run.last
    if r is None:
        text = f"No episodes yet: they come with the first {run.name}."
        return element("p", text) if run.batch else ""
    rows = range(min(count, len(r)))
    values = getattr(r, signal, None)
    most = 0.0 if values is None else of.paler(values[r.mask.bool()].float())
    scale = f"{of.SIGNAL_NAMES.get(signal, signal)}: orange above zero, blue and underlined below; "
    scale += f"full colour at {most:.2f}, 99 % of this update is paler."
    head = element("h3", "The last update's first episodes") + element("p", scale, class_="quiet")
    return head * bool(rows) + "".join(run_episode_markup(r, i, signal, most) for i in rows)


def body_markup(run: Run, names: Names, signal: str, episodes: int) -> str:
    "All that is below the controls: curves, what was changed by hand, episodes."
    parts = [curves_markup(run, names)]
    if run.changes:
        rows = [(f"{one.update:,}", str(one)) for one in run.changes]
        moved = any(one.what == "kl_coef" for one in run.changes)
        parts.append(element("h3", "Changed by hand" + "; dashed in the curves" * moved))
        parts.append(html.data_table("", [f"After {run.name}", "What"], rows))
    return "".join([*parts, episodes_markup(run, signal, episodes)])


def render_run(
    run: Run,
    names: Names = VIEWER_CURVES,  # metrics, as in the viewer; None: all
    signal: str = "advantages",  # behind the tokens
    episodes: int = 2,  # of the last update
) -> Html:
    "A run as it is now, readable without a kernel."
    body = body_markup(run, names, signal, episodes)
    return html.themed_markup(html.sheet(head_line(run), body), sheets=SHEETS)
