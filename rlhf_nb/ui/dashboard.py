"""A run while it trains: its curves, its episodes, and three settings that may be changed."""

from __future__ import annotations

import base64
import contextvars
import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from numbers import Real
from pathlib import Path
from typing import Any

import ipywidgets as widgets
from IPython import get_ipython
from IPython.display import DisplayHandle, display
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging
from transformers.utils.notebook import NotebookProgressCallback

from rlhf_nb.kl import AdaptiveKLController
from rlhf_nb.rollout import SIGNALS, Rollout
from rlhf_nb.runtime.files import write_text_atomic
from rlhf_nb.runtime.notebook import forget_last_writer
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.ui.controls import action_button, notebook_bundle, side_by_side
from rlhf_nb.ui.episodes import episode_facts, episode_signals, episode_tokens
from rlhf_nb.ui.explore import control
from rlhf_nb.ui.html import PARAGRAPH, duration, error_note, on_white, safe_text, section_page
from rlhf_nb.ui.run_files import METRIC_COLUMNS
from rlhf_nb.ui.viz import Html, html_cell, html_table, token_strip, visible


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
        return "stopped" if self.after is None else f"paused for {duration(self.after)}"


@dataclass
class Run:
    "What is known of a run at this moment."

    name: str = "update"  # what a step of this trainer is called
    # waiting, running or paused; at last done, ended, stopped, interrupted, left or failed
    state: str = "waiting"
    update: int = 0  # how many are done
    total: int = 0
    batch: int = 0  # episodes in an update; 0 where there are none
    rate: float | None = None  # updates in a second, over the last thirty
    kl_coef: float | None = None  # of the next update, unless another one is requested
    requested: tuple[str, ...] = ()  # what was requested and has not happened yet
    note: str = ""  # about the controls
    error: str = ""
    last: Rollout | None = None  # of the last update
    # metric: its value after each update
    lines: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def add(self, update: int, numbers: dict[str, Any]) -> None:
        "Add the metrics of an update; what is not a number is left out."
        for name, value in numbers.items():
            if isinstance(value, Real):
                self.lines.setdefault(name, []).append((update, float(value)))


def state_sentence(run: Run) -> str:
    "The state of a run in words."
    of, whole = f"{run.name} {run.update:,} of {run.total:,}", f"{run.update:,} whole {run.name}s"
    return {
        "waiting": "No run yet: give this to a trainer as a callback, and call train().",
        "running": f"Running: {of} is done.",
        "paused": f"Paused after {of}. Go on, stop, or move kl_coef first.",
        "done": f"Done: all {run.total:,} {run.name}s.",
        "ended": f"Ended by another callback after {of}.",
        "stopped": f"Stopped by hand after {of}; what was trained is kept.",
        "interrupted": f"Interrupted after {whole}; the next one may be half made.",
        "left": f"Interrupted in the pause after {of}; nothing is half made.",
        "failed": f"Failed after {whole}: {run.error}",
    }[run.state]


def _progress(run: Run) -> str:
    "How far, how fast, how long still."
    if not run.total:
        return ""
    rows = run.batch or 1
    facts = [
        f"{run.update * rows:,} of {run.total * rows:,} "
        f"{'episodes' if run.batch else run.name + 's'}"
    ]
    if run.rate and run.state in ("running", "paused"):
        facts.append(
            f"{run.rate * rows:.3g} {'episodes' if run.batch else run.name + 's'} per second"
        )
        facts.append(f"{duration((run.total - run.update) / run.rate)} left")
    bar = (
        f'<progress max="{run.total}" value="{run.update}" aria-label="{run.name}s done" '
        'style="width:20em;max-width:100%;vertical-align:middle;color-scheme:light;'
        'accent-color:#1f5fa8"></progress>'
    )
    return f"{PARAGRAPH}{bar} {escape(' · '.join(facts))}</p>"


def head_line(run: Run) -> str:
    "State, progress, and what was requested."
    parts = [f"{PARAGRAPH}<strong>{safe_text(state_sentence(run))}</strong></p>", _progress(run)]
    when = (
        f" It happens when {run.name} {run.update + 1:,} is done." if run.state == "running" else ""
    )
    if run.requested:
        parts.append(f"{PARAGRAPH}Requested: {safe_text(', '.join(run.requested))}.{when}</p>")
    if run.note:
        parts.append(f'<p role="note" style="margin:4px 0">{safe_text(run.note)}</p>')
    return "".join(parts)


def changed_settings(run: Run) -> str:
    "Every change, and when; nothing where nobody touched the run."
    if not run.changes:
        return ""
    heads = [html_cell(head, "#eeeeee", "left", "col") for head in (f"After {run.name}", "What")]
    rows = [
        html_cell(f"{one.update:,}", scope="row") + html_cell(str(one), align="left")
        for one in run.changes
    ]
    table = html_table([f"<tr>{row}</tr>" for row in ("".join(heads), *rows)])
    return f"{PARAGRAPH}<strong>Changed by hand</strong></p>{table}"


def thin(
    points: Sequence[tuple[int, float]],  # update and value, in order
    most: int = 240,  # about so many are left
) -> list[tuple[int, float]]:
    """Fewer points with the same outline: first, last, and the smallest and largest of each
    stretch. nan and inf go."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) <= most:
        return points
    size, kept = math.ceil(len(points) / (most // 2)), {points[0], points[-1]}
    for at in range(0, len(points), size):
        stretch = points[at : at + size]
        kept |= {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
    return sorted(kept)


def _svg(line: Sequence[tuple[int, float]], marks: Sequence[int]) -> str:
    "A line over the updates, with dashed marks."
    (left, right), values = (line[0][0], line[-1][0]), [y for _, y in line]
    low, high = min(values), max(values)
    x = lambda u: 62 + 246 * (u - left) / ((right - left) or 1)
    y = lambda value: 96 - 84 * ((value - low) / (high - low) if high > low else 0.5)
    path = " ".join(f"{x(u):.1f},{y(value):.1f}" for u, value in line)
    words = (
        (58, 16, "end", f"{high:.3g}"),
        (58, 100, "end", f"{low:.3g}"),
        (62, 114, "start", f"{left:,}"),
        (308, 114, "end", f"{right:,}"),
    )
    text = "".join(
        f'<text x="{at}" y="{down}" text-anchor="{side}">{label}</text>'
        for at, down, side, label in words
    )
    dashes = "".join(
        f'<path d="M{x(u + 0.5):.1f} 8V100" stroke="#b35000" stroke-dasharray="4 3"/>'
        for u in marks
        if left <= u < right
    )
    end = f'<circle cx="{x(right):.1f}" cy="{y(values[-1]):.1f}" r="3" fill="#1f5fa8"/>'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="320" height="120" viewBox="0 0 320 120">'
        f'<path d="M62 8V100H308" fill="none" stroke="#767676"/>{dashes}<g font-size="11" '
        'fill="#111111" '
        f'font-family="sans-serif">{text}</g><polyline fill="none" stroke="#1f5fa8" '
        'stroke-width="2" '
        f'points="{path}"/>{end}</svg>'
    )


def metric_panel(title: str, points: Sequence[tuple[int, float]], run: Run) -> str:
    "One metric: a picture, and the same in a sentence."
    line = thin(points)
    if not line:
        return f"<p>{safe_text(title)}: no finite number yet.</p>"
    values, (last, now) = [y for _, y in line], line[-1]
    marks = [one.update for one in run.changes if one.what == "kl_coef"]
    sentence = (
        f"{title}: {now:.4g} after {run.name} {last:,}; lowest {min(values):.4g}, highest "
        f"{max(values):.4g}"
    )
    if any(line[0][0] <= u < last for u in marks):
        sentence += "; dashed: kl_coef was moved"
    data = base64.b64encode(_svg(line, marks).encode()).decode()
    return (
        f'<figure style="margin:0"><img alt="{escape(visible(sentence))}" width="320" height="120" '
        'style="max-width:100%" '
        f'src="data:image/svg+xml;base64,{data}"><figcaption>{safe_text(sentence)}</figcaption></figure>'
    )


_GRID = (
    "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(260px,100%),1fr));gap:8px 16px"
)
_SHORT = {"kl_coef": "objective/kl_coef", **METRIC_COLUMNS}


def _chosen_panels(run: Run, names: Sequence[str] | None) -> dict[str, str]:
    "Title and metric of each panel; None: all that there are."
    if names is None:
        return {name: name for name in list(run.lines)}  # a thread may be adding to it
    wanted = {name: _SHORT.get(name, name) for name in names}
    if run.lines and not any(metric in run.lines for metric in wanted.values()):
        return {name: name for name in list(run.lines)[:4]}
    return wanted


def _panels(run: Run, names: Sequence[str] | None) -> str:
    "A panel for each metric; a sentence for one that was never logged."
    if not run.lines:
        return f"<p>No curves yet: they begin with the first {run.name}.</p>"
    chosen = _chosen_panels(run, names)
    there = [
        metric_panel(title, run.lines[metric], run)
        for title, metric in chosen.items()
        if metric in run.lines
    ]
    absent = [title for title, metric in chosen.items() if metric not in run.lines]
    note = (
        f"<p>Never logged: {safe_text(', '.join(absent))}. There are "
        f"{safe_text(', '.join(run.lines))}.</p>"
        if absent
        else ""
    )
    return f'<div style="{_GRID}">{"".join(there)}</div>{note}'


def _episodes(run: Run, signal: str, count: int) -> str:
    "The first episodes of the last update, one signal under each."
    r = run.last
    if r is None:
        return f"<p>No episodes yet: they come with the first {run.name}.</p>" if run.batch else ""
    rows = range(min(count, len(r)))
    numbers = [episode_signals(r, i).get(signal) for i in rows]
    most = max(
        (abs(x) for row in numbers if row is not None for x in row.tolist() if math.isfinite(x)),
        default=0.0,
    )
    parts = []
    for i, row in zip(rows, numbers):
        text = r.prompts[i] if r.prompts else ""
        prompt = safe_text(text[-160:])
        label = signal if row is not None else "value"
        strip: str = token_strip(episode_tokens(r, i), row, name=label, vmax=most or None)
        # A dark theme would make the caption white.
        strip = strip.replace('<caption style="', '<caption style="color:#111111;')
        parts.append(
            f"{PARAGRAPH}<strong>{safe_text(episode_facts(r, i))}</strong></p>"
            f"<p>{'… ' if len(text) > 160 else ''}{prompt}</p>{strip}"
        )
    return "".join(parts)


def render_run(
    run: Run,
    names: Sequence[str] | None = ("KL", "entropy", "length", "score"),  # metrics; None: all
    signal: str = "advantages",  # under the tokens
    episodes: int = 2,  # of the last update
) -> Html:
    "A run as it is now, readable without a kernel."
    return Html(
        on_white(
            head_line(run)
            + _panels(run, names)
            + changed_settings(run)
            + _episodes(run, signal, episodes)
        )
    )


@dataclass
class Steering:
    """What was requested and has not happened yet, and how it happens. Any thread may request; the
    training thread fulfils."""

    kl_coef: float | None = None
    stop: bool = False
    stopped: bool = False  # in this run
    gate: threading.Event = field(default_factory=threading.Event)  # set: the run may go on
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.gate.set()

    def names(self, run: Run) -> tuple[str, ...]:
        "In words, without what has happened already."
        with self.lock:
            pause = not self.gate.is_set() and run.state != "paused"
            return (
                *(["pause"] if pause else []),
                *(["stop"] if self.stop and not self.stopped else []),
                *([] if self.kl_coef is None else [f"kl_coef {self.kl_coef:.4g}"]),
            )

    def fulfil(
        self, run: Run, trainer: PPOTrainer | None, control: TrainerControl, saves: bool
    ) -> None:
        "Set what was requested; stop where that was requested and something is left to stop."
        with self.lock:
            wanted, self.kl_coef = self.kl_coef, None
        if wanted is not None and trainer is not None:
            before = trainer.controller.value
            trainer.controller.set(wanted)
            line = {"steering/kl_coef": wanted, "steering/kl_coef_before": before}
            _record(run, trainer, control, Change(run.update, "kl_coef", before, wanted), line)
        if self.stop and not self.stopped and run.update < run.total:
            self.stopped = True
            _record(run, trainer, control, Change(run.update, "stop"), {"steering/stopped": 1.0})
            control.should_training_stop = control.should_log = True
            control.should_save = control.should_save or saves

    def hold(self, run: Run, draw: Callable[[], None]) -> float:
        """Wait while the gate is closed, in short waits so that an interrupt comes through. The
        seconds that it took."""
        if self.gate.is_set():
            return 0.0
        start, run.state = time.perf_counter(), "paused"
        draw()
        while not self.gate.wait(0.1):
            pass
        seconds = time.perf_counter() - start
        run.state = "running"
        run.changes.append(Change(run.update, "pause", after=seconds))
        draw()
        return seconds

    def clear(self) -> None:
        "The run is over."
        self.kl_coef, self.stop = None, False
        self.gate.set()


def _record(
    run: Run,
    trainer: PPOTrainer | None,
    control: TrainerControl,
    change: Change,
    line: dict[str, float],
) -> None:
    "A change, in the record and in the log."
    run.changes.append(change)
    if trainer is not None:
        due = control.should_log  # logging resets what others requested for this update
        trainer.log(line)
        control.should_log = due


def _is_metric(name: str) -> bool:
    "Is an entry of a log a metric, and no counter or total?"
    counters = ("epoch", "step", "total_flos", "episode")
    return name not in counters and not name.startswith(("train_", "steering/"))


def _metrics_in(line: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in line.items() if _is_metric(name)}


def remember(run: Run, line: dict[str, Any]) -> None:
    "Add a line of an earlier log to a record."
    at = line.get("step", 0)
    run.add(at, _metrics_in(line))
    if "steering/kl_coef" in line:
        pair = line["steering/kl_coef_before"], line["steering/kl_coef"]
        run.changes.append(Change(at, "kl_coef", *pair))
    if "steering/stopped" in line:
        run.changes.append(Change(at, "stop"))


class _Pace:
    "Updates a second over the last thirty, pauses left out."

    def __init__(self) -> None:
        self.paused = 0.0  # seconds
        self.ticks: deque[float] = deque(maxlen=31)

    def tick(self) -> float | None:
        "An update is over: the rate; None after the first."
        self.ticks.append(time.perf_counter() - self.paused)
        span = self.ticks[-1] - self.ticks[0]
        return (len(self.ticks) - 1) / span if span > 0 else None


_NOT_HEARD = (
    "Clicks do not reach this run: while a cell trains, this kernel or front end delivers them "
    "only when it is over. "
    "To stop, interrupt the kernel. To steer, train beside the cells the next time, "
    "dashboard.start(trainer), and "
    "use the controls, or dashboard.pause(), .stop() and .kl_coef = 0.1 from another cell."
)

# The log-probs of another engine are there only where one is used: view() shows them.
_SIGNALS_SHOWN = tuple(name for name in SIGNALS if name != "engine_logprobs")


class _Panel:
    "The live part: controls above a view. A lock keeps two threads from writing one widget."

    def __init__(self, signal: str, lock: threading.RLock, acts: dict[str, Callable[..., None]]):
        self.lock, self.synced = lock, math.nan  # synced: what the slider was last set to from here
        self.hold = action_button("pause", acts["hold"], "wait when this update is done")
        self.stop = action_button(
            "stop", acts["stop"], "end when this update is done, and keep all"
        )
        self.slider = control("kl_coef", (0.0, 0.5, 0.05, 0.005))
        self.slider.readout_format = ".3g"
        self.signal = control("signal", list(_SIGNALS_SHOWN))
        self.curves = control("curves", ["few", "all"])
        self.signal.value = signal
        self.beat = widgets.Play(min=0, max=1, layout=dict(display="none"))
        self.head, self.view = widgets.HTML(), widgets.HTML()
        self.slider.observe(acts["slide"], names="value")
        self.beat.observe(acts["beat"], names="value")
        for one in (self.signal, self.curves):
            one.observe(acts["look"], names="value")
        for one in (self.hold, self.stop, self.slider, self.signal, self.curves, self.beat):
            forget_last_writer(one)
        buttons = side_by_side(self.hold, self.stop, self.slider)
        choices = side_by_side(self.signal), side_by_side(self.curves)
        self.box = widgets.VBox([self.head, buttons, *choices, self.view, self.beat])

    def put(self, view: widgets.HTML, markup: str) -> None:
        with self.lock:
            view.value = on_white(markup)

    def set_range(self, start: float, zero: bool) -> None:
        "The slider's range: to ten times where it starts, in steps of a tenth, from 0 if allowed."
        step = float(f"{start / 10:.1g}") if start else 0.005
        least = 0.0 if zero else step
        with self.slider.hold_trait_notifications():
            self.slider.max, self.slider.min, self.slider.step = 100 * step, least, step
            self.slider.value = self.synced = max(start, least)

    def set_controls(self, run: Run, going: bool, more: bool, steers: bool, over: bool) -> None:
        """No control for what is not there: episodes, more curves than are shown, a coefficient
        that can be moved."""
        self.hold.description = "pause" if going else "go on"
        for one, there, display_as in (
            (self.signal, run.batch, "flex"),
            (self.curves, more, "flex"),
            (self.slider, steers, None),
        ):
            one.layout.display = display_as if there else "none"
        for one in (self.hold, self.stop, self.slider):
            one.disabled = over

    def sync(self, kl_coef: float | None) -> None:
        "Move the slider to a coefficient that was not set by it."
        if kl_coef is not None and kl_coef != self.synced:
            self.slider.value = self.synced = kl_coef

    def ask_front_end(self) -> None:
        "Let the player play one step, which the front end sends back."
        self.beat.playing, self.beat.value = False, 0
        self.beat.playing = True


logger = logging.get_logger(__name__)


class _Screen:
    """A dashboard as it is seen: its widgets, its place in a notebook, and how often it is drawn.
    Clicks come on any thread."""

    def __init__(self, dashboard: LiveDashboard):
        self.dashboard = dashboard
        self.panel: _Panel | None = None  # made when somebody looks
        self.handle: DisplayHandle | None = None
        self.drawn = self.seconds = 0.0
        self.placed = self.heard = False

    def controls(self) -> _Panel:
        "Controls and views, made when somebody looks."
        if self.panel is None:
            acts: dict[str, Callable[..., None]] = dict(
                hold=partial(self._click, self._pause_or_go),
                stop=partial(self._click, self.dashboard.stop),
                slide=self._slide,
                beat=self._answer,
                look=lambda change: self._carefully(self._show_body),
            )
            self.panel = _Panel(self.dashboard.signal, self.dashboard.steering.lock, acts)
            self._set_range(self.panel)
        return self.panel

    def _set_range(self, panel: _Panel) -> None:
        trainer = self.dashboard.trainer
        adaptive = trainer and isinstance(trainer.controller, AdaptiveKLController)
        panel.set_range(self.dashboard.kl_coef or 0.0, zero=not adaptive)

    def _click(self, act: Callable[[], None]) -> None:
        "A button was pressed."
        self.heard = True
        if self.dashboard.run.state in ("running", "paused"):
            return self._carefully(act)
        self.dashboard.run.note = "That click came when no run was going on, so it did nothing."
        self.show_head()

    def _carefully(self, act: Callable[[], None]) -> None:
        "Do it; where it fails, say so above the controls."
        try:
            act()
        except Exception as error:
            self.dashboard.run.note = f"{type(error).__name__}: {error}"
            raise
        else:
            self.dashboard.run.note = ""
        finally:
            self.show_head()

    def _pause_or_go(self) -> None:
        going = self.dashboard.steering.gate.is_set()
        (self.dashboard.pause if going else self.dashboard.go_on)()

    def _slide(self, change: dict[str, Any]) -> None:
        dashboard = self.dashboard
        if dashboard.run.state in ("running", "paused") and dashboard.trainer is not None:
            self._carefully(partial(setattr, dashboard, "kl_coef", change["new"]))

    def _answer(self, change: dict[str, Any]) -> None:
        "The front end answers."
        if change["new"] == 1:
            run, self.heard = self.dashboard.run, True
            run.note = run.note.replace(_NOT_HEARD, "")
            self.show_head()

    def _listen(self, seconds: float = 1.0, times: int = 6) -> None:
        """Request a sign from the front end, now and then; say so where none comes. Runs in a
        thread of its own."""
        run = self.dashboard.run
        for _ in range(times):
            if self.heard or run.state not in ("running", "paused"):
                return
            self.controls().ask_front_end()
            time.sleep(seconds)
        if not self.heard and run.state in ("running", "paused"):
            run.note = _NOT_HEARD
            self.show_head()

    def show_head(self) -> None:
        "What was requested, and what can be requested now."
        with self.dashboard.steering.lock:
            run, steering, panel = self.dashboard.run, self.dashboard.steering, self.panel
            run.requested = steering.names(run)
            if panel is None:
                return
            on = run.state in ("running", "paused")
            panel.set_controls(
                run,
                going=steering.gate.is_set(),
                more=len(run.lines) > len(_chosen_panels(run, self.dashboard.curves)),
                steers=self.dashboard.trainer is not None and on,
                over=not on or self.dashboard.ranks > 1,
            )
            if steering.kl_coef is None:
                panel.sync(self.dashboard.kl_coef)
            panel.put(panel.head, head_line(run))

    def body(self) -> str:
        panel = self.controls()
        names = self.dashboard.curves if panel.curves.value == "few" else None
        episodes = _episodes(self.dashboard.run, panel.signal.value, self.dashboard.episodes)
        return _panels(self.dashboard.run, names) + changed_settings(self.dashboard.run) + episodes

    def _show_body(self) -> None:
        panel = self.controls()
        panel.put(panel.view, self.body())

    def draw(self, now: bool = False) -> None:
        "Write everything, unless it was drawn a moment ago or nobody looks."
        start, panel = time.perf_counter(), self.panel
        if panel is None or not (now or start - self.drawn >= self.dashboard.every):
            if now:
                self.show_head()
            return
        try:
            self.show_head()
            self._show_body()
        except Exception as error:
            logger.warning(
                f"the dashboard could not draw ({type(error).__name__}: {error}); training goes on."
            )
            panel.view.value = error_note(error)
        self.drawn = time.perf_counter()
        self.seconds += self.drawn - start

    def shell(self) -> Any:
        "The shell of a notebook; None elsewhere, and where nothing is to be shown."
        shell = get_ipython() if self.dashboard.live else None
        return shell if getattr(shell, "kernel", None) is not None else None

    def show(self) -> None:
        "Display it here; it is drawn from now on, and written once more at the end of the run."
        self.controls()
        self.handle = display(self.dashboard, display_id=True)

    def begin(self, state: TrainerState) -> None:
        "Show it where there is someone to look."
        alone = state.is_world_process_zero and self.dashboard.ranks == 1
        shell, self.drawn = self.shell() if alone else None, 0.0
        self.heard, self.seconds = False, 0.0
        if shell is not None and not self.placed:
            here = threading.current_thread() is threading.main_thread()
            if self.dashboard.trainer is None and here:
                shell.events.register("post_run_cell", self._cell_over)
            self.show()
        if self.panel is not None:
            self._set_range(self.panel)
        self.draw(now=True)
        if shell is not None:
            threading.Thread(target=self._listen, daemon=True).start()

    def end(self) -> None:
        "The last picture."
        self.placed = False
        self.draw(now=True)
        if self.handle is not None:
            self.handle.update(self.dashboard)
        shell = self.shell()
        if shell is not None and self._cell_over in shell.events.callbacks["post_run_cell"]:
            shell.events.unregister("post_run_cell", self._cell_over)

    def _cell_over(self, result: Any) -> None:
        "The cell is over and the trainer, which is not PPO, did not report it: it broke off."
        error = result.error_in_exec or result.error_before_exec
        if self.dashboard.run.state in ("running", "paused"):
            self.dashboard.ppo_end(error or RuntimeError("the cell ended before the run"))


class _Background:
    "A training in a thread of its own, and what came of it."

    def __init__(self, train: Callable[[], TrainOutput], failed: Callable[[BaseException], None]):
        self.train, self.failed = train, failed
        self.outcome: TrainOutput | BaseException = RuntimeError("the run is not over")
        run_in_context = contextvars.copy_context().run
        self.thread = threading.Thread(target=run_in_context, daemon=True, args=(self._run,))

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    def _run(self) -> None:
        try:
            self.outcome = self.train()
        except BaseException as error:
            self.outcome = error  # wait() raises it
            self.failed(error)

    def join(self, seconds: float | None) -> bool:
        "Wait, in short steps so that an interrupt comes through. Is it over?"
        end = math.inf if seconds is None else time.monotonic() + seconds
        while self.alive and time.monotonic() < end:
            self.thread.join(0.1)
        return not self.alive


class LiveDashboard(TrainerCallback):
    """A callback that shows a run while it trains, and lets a hand pause, stop and steer it between
    two updates."""

    def __init__(
        self,
        curves: Sequence[str] = ("KL", "entropy", "length", "score"),  # short names, or of the log
        episodes: int = 2,  # of each update, from its first
        signal: str = "advantages",  # under their tokens
        every: float = 1.0,  # seconds between two drawings, at least
        live: bool = True,  # False: it listens, and is shown when `show()` is called
    ):
        if signal not in _SIGNALS_SHOWN:
            raise ValueError(f"signal is {signal!r}: give one of {', '.join(_SIGNALS_SHOWN)}.")
        if isinstance(curves, str):
            raise ValueError(f"curves is {curves!r}: give a list of names, [{curves!r}].")
        for name, value in dict(episodes=episodes, every=every).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: give 0 or more.")
        self.live, self.curves, self.episodes = live, list(curves), int(episodes)
        self.signal, self.every = signal, every
        self.run, self.ranks, self._saves = Run(), 1, False
        self.trainer: PPOTrainer | None = None
        self.steering, self.screen = Steering(), _Screen(self)
        self._pace, self._state = _Pace(), TrainerState()
        self._background: _Background | None = None

    # ---- Requests, from any thread ----

    def _check_request(self, what: str) -> None:
        "Raises RuntimeError where nobody would fulfil it."
        starting = (
            self._background is not None and self._background.alive and self.run.state == "waiting"
        )
        if self.run.state not in ("running", "paused") and not starting:
            raise RuntimeError(
                f"{what} was requested, and no run is going on. {state_sentence(self.run)} Ask "
                "while train() runs; before it, set PPOConfig."
            )
        if self.ranks > 1:
            raise RuntimeError(
                f"{what} was requested, and this run has {self.ranks} processes: this one alone "
                "would obey. Stop it, and start again from its checkpoint with another PPOConfig."
            )

    def pause(self) -> None:
        "Wait when this update is done, until `go_on` or `stop`."
        self._check_request("pause")
        self.steering.gate.clear()
        self.screen.show_head()

    def go_on(self) -> None:
        "End a pause, or take one back that has not begun."
        self._check_request("go_on")
        self.steering.gate.set()
        self.screen.show_head()

    def stop(self) -> None:
        """End the run when this update is done; train() returns as ever, and a checkpoint is
        written unless save_strategy is no."""
        self._check_request("stop")
        self.steering.stop = True
        self.steering.gate.set()
        self.screen.show_head()

    @property
    def kl_coef(self) -> float | None:
        """The coefficient as it is now; None where the trainer has none. Set it, and the next
        update has it."""
        return None if self.trainer is None else self.trainer.controller.value

    @kl_coef.setter
    def kl_coef(self, wanted: float) -> None:
        self._check_request("kl_coef")
        if self.trainer is None:
            raise RuntimeError("kl_coef was requested, and this trainer has none: PPOTrainer has.")
        trial = copy.copy(self.trainer.controller)
        trial.set(wanted)  # it refuses what the real one would refuse
        with self.steering.lock:
            changes = trial.value != self.trainer.controller.value
            self.steering.kl_coef = trial.value if changes else None
        self.screen.show_head()

    # ---- What a trainer reports ----

    def _hold(self) -> None:
        self._pace.paused += self.steering.hold(self.run, partial(self.screen.draw, now=True))

    def _fulfil(self, control: TrainerControl) -> None:
        self.steering.fulfil(self.run, self.trainer, control, self._saves)
        self.run.kl_coef = self.kl_coef

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        "A fresh record; of a run that is resumed, what its checkpoint remembers."
        if self.trainer is not None and self.trainer.state is not state:
            self.trainer = None
        self._state, self.ranks, self._saves = state, args.world_size, args.save_strategy != "no"
        self._pace, self.steering.stopped = _Pace(), False
        ppo = self.trainer is not None
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        batch = rows * args.world_size if ppo else 0
        name, steps = "update" if ppo else "step", (state.global_step, state.max_steps)
        self.run = Run(name, "running", *steps, batch, kl_coef=self.kl_coef)
        for line in state.log_history:
            remember(self.run, line)
        self.run.rate = self._pace.tick()
        self.screen.begin(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        "Where a trainer that is not PPO can wait."
        if self.trainer is None:
            self._hold()
            self._fulfil(control)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        "A step is over: requests are fulfilled, before its checkpoint is written."
        self.run.update = state.global_step
        self.run.rate = self._pace.tick()
        self._fulfil(control)
        self.screen.draw()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        "Evaluations of any trainer, and everything that is logged by one that is not PPO."
        if self.run.state not in ("running", "paused"):
            return
        ours = _metrics_in(logs or {})
        if self.trainer is not None:
            ours = {name: x for name, x in ours.items() if name.startswith("eval_")}
        self.run.add(state.global_step, ours)
        if ours:
            self.screen.draw()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        "The end that was planned, or a stop."
        done = "done" if state.global_step >= state.max_steps else "ended"
        self._end("stopped" if self.steering.stopped else done)

    def ppo_begin(self, trainer: PPOTrainer) -> None:
        "The dashboard takes the place of the progress bar where it can be seen."
        self.trainer = trainer
        if self.screen.shell() is not None:
            for kind in (NotebookProgressCallback, ProgressCallback, PrinterCallback):
                trainer.remove_callback(kind)

    def ppo_update(self, rollout: Rollout, metrics: dict[str, float]) -> None:
        "An update, by train() or by hand."
        running = self.run.state == "running"
        at = 1 + (self._state.global_step if running else self.run.update)
        self.run.last = rollout
        self.run.add(at, _metrics_in(metrics))
        if self.run.state == "waiting":
            self.run.update = at

    def ppo_between(self, control: TrainerControl) -> None:
        "Everything of an update is logged and saved: here a pause waits."
        self._hold()
        self._fulfil(control)

    def ppo_end(self, error: BaseException) -> None:
        "The end that was not planned."
        between = "left" if self.run.state == "paused" else "interrupted"
        self._end(between if isinstance(error, KeyboardInterrupt) else "failed", error)

    def _end(self, state: str, error: BaseException | None = None) -> None:
        self.run.state, self.run.note = state, ""
        self.run.error = "" if error is None else f"{type(error).__name__}: {error}"
        self.steering.clear()
        self.screen.end()

    # ---- A run in a thread of its own ----

    def start(self, trainer: Trainer, resume_from_checkpoint: str | bool | None = None) -> None:
        """Train beside the cells; works with every kernel. Raises RuntimeError while a run is going
        on."""
        if self._background is not None and self._background.alive:
            raise RuntimeError(
                f"a run is going on. {state_sentence(self.run)} Call wait() or stop() first."
            )
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self.run, self.trainer = Run(), trainer if isinstance(trainer, PPOTrainer) else None
        self.screen.placed = self.screen.shell() is not None
        train = partial(trainer.train, resume_from_checkpoint=resume_from_checkpoint)
        self._background = _Background(train, self._broke_off)
        if self.screen.placed:
            self.screen.show()
        self._background.thread.start()

    def _broke_off(self, error: BaseException) -> None:
        if self.run.state in ("waiting", "running", "paused"):
            self.ppo_end(error)

    def wait(self, seconds: float | None = None) -> TrainOutput:
        """What train() returned; its error is raised here. Raises TimeoutError where the run is not
        over by then."""
        if self._background is None:
            raise RuntimeError("there is nothing to wait for: call start(trainer) first.")
        if not self._background.join(seconds):
            raise TimeoutError(
                f"{seconds} seconds are over. {state_sentence(self.run)} It goes on."
            )
        # What the thread wrote after its cell was over is not kept by every front end.
        if self.screen.handle is not None:
            self.screen.handle.update(self)
        if isinstance(self._background.outcome, BaseException):
            raise self._background.outcome
        return self._background.outcome

    # ---- What is seen ----

    @property
    def box(self) -> widgets.VBox:
        "The widgets: controls and views, made when somebody looks."
        return self.screen.controls().box

    @property
    def seconds(self) -> float:
        "What all drawings of this run took together."
        return self.screen.seconds

    def draw(self, now: bool = False) -> None:
        "Write everything, unless it was drawn a moment ago or nobody looks."
        self.screen.draw(now)

    def show(self) -> None:
        "Display it here; it is drawn from now on, and written once more at the end of the run."
        self.screen.show()

    def _repr_html_(self) -> str:
        return render_run(self.run, self.curves, self.signal, self.episodes)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return notebook_bundle(self.box, self._repr_html_(), repr(self), **kwargs)

    def __repr__(self) -> str:
        return f"LiveDashboard({state_sentence(self.run)})"

    def save_html(self, path: str | Path) -> Path:
        "The run as it is now, in one file that needs no kernel and no network."
        run = self.run
        sections = {
            "State": head_line(run),
            "Changed by hand": changed_settings(run) or "<p>Nothing.</p>",
            "Curves": _panels(run, None),
            "Episodes": _episodes(run, self.signal, self.episodes),
        }
        write_text_atomic(path, section_page("A run, watched", state_sentence(run), sections))
        return Path(path)
