"""The live part of a dashboard: controls above a view. It draws the record of a run by pure
functions, and sets wishes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ipywidgets as widgets

from rlhf_nb.kl import AdaptiveKLController
from rlhf_nb.rollout import SIGNALS
from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.controls import action_button, side_by_side
from rlhf_nb.ui.dashboard_callback import RunCallback
from rlhf_nb.ui.explore import control
from rlhf_nb.ui.html import element, sheet
from rlhf_nb.ui.notebook import forget_last_writer
from rlhf_nb.ui.run_curves import chosen_curves
from rlhf_nb.ui.run_markup import SHEETS, body_markup, head_line

# The log-probs of another engine are there only where one is used: view() shows them.
SHOWN = tuple(name for name in SIGNALS if name != "engine_logprobs")
NOT_HEARD = (
    "Clicks do not reach this run: while a cell trains, this kernel or front end delivers them "
    "only when it is over. To stop, interrupt the kernel. To steer, train beside the cells the "
    "next time, dashboard.start(trainer), and use the controls, or dashboard.pause(), .stop() and "
    ".kl_coef = 0.1 from another cell."
)
LATE = "That click came when no run was going on, so it did nothing."


class Panel:
    """Controls above a view. Clicks come on any thread; a lock keeps two of them from writing one
    widget."""

    def __init__(self, board: RunCallback, curves: Sequence[str], episodes: int, signal: str):
        self.board, self.few, self.episodes = board, curves, episodes
        self.lock, self.heard, self.note = threading.RLock(), False, ""
        self.synced = math.nan  # what the slider was last set to from here
        clicked = lambda act: partial(self._click, act)
        self.hold = action_button("pause", clicked(self._pause_or_go), "when this update is done")
        self.stop = action_button(
            "stop", clicked(board.stop), "end when this update is done, and keep all"
        )
        self.slider = control("kl_coef", (0.0, 0.5, 0.05, 0.005))
        self.slider.readout_format = ".3g"
        self.signal = control("signal", list(SHOWN))
        self.curves = control("curves", ["few", "all"])
        self.signal.value = signal
        self.beat = widgets.Play(min=0, max=1, layout=dict(display="none"))
        self.head, self.view = widgets.HTML(), widgets.HTML()
        self.set_range()
        self.slider.observe(self._slide, names="value")
        self.beat.observe(self._answer, names="value")
        for one in (self.signal, self.curves):
            one.observe(lambda change: self._carefully(self.show_body), names="value")
        for one in (self.hold, self.stop, self.slider, self.signal, self.curves, self.beat):
            forget_last_writer(one)
        style = element("style", *map(asset, ("theme.css", *SHEETS)))
        hidden = [widgets.HTML(style, layout=dict(display="none")), self.beat]
        buttons = side_by_side(self.hold, self.stop, self.slider)
        choices = side_by_side(self.signal), side_by_side(self.curves)
        self.box = widgets.VBox([*hidden, self.head, buttons, *choices, self.view])

    # ---- What is clicked ----

    def _click(self, act: Callable[[], None]) -> None:
        self.heard = True
        if self.board.run.going:
            return self._carefully(act)
        self.note = LATE
        self.show_head()

    def _carefully(self, act: Callable[[], None]) -> None:
        "Do it; where it fails, say so above the controls."
        try:
            act()
        except Exception as error:
            self.note = f"{type(error).__name__}: {error}"
            raise
        else:
            self.note = ""
        finally:
            self.show_head()

    def _pause_or_go(self) -> None:
        (self.board.go_on if self.board.wishes.pausing else self.board.pause)()

    def _slide(self, change: dict[str, Any]) -> None:
        if self.board.run.going and self.board.trainer is not None:
            self._carefully(partial(setattr, self.board, "kl_coef", change["new"]))

    # ---- Does the front end hear, while a cell trains? ----

    def _answer(self, change: dict[str, Any]) -> None:
        if change["new"] == 1:
            self.heard, self.note = True, self.note.replace(NOT_HEARD, "")
            self.show_head()

    def listen(self, seconds: float = 1.0, times: int = 6) -> None:
        """Let the hidden player play a step, which a front end that hears sends back; say so where
        nothing comes back. Runs in a thread of its own."""
        run = self.board.run
        for _ in range(times):
            if self.heard or not run.going:
                return
            self.beat.playing, self.beat.value = False, 0
            self.beat.playing = True
            time.sleep(seconds)
        if not self.heard and run.going:
            self.note = NOT_HEARD
            self.show_head()

    # ---- What is shown ----

    def set_range(self) -> None:
        "The slider's range: to ten times where it starts, in steps of a tenth, from 0 if allowed."
        start, trainer = self.board.kl_coef or 0.0, self.board.trainer
        step = float(f"{start / 10:.1g}") if start else 0.005
        adaptive = trainer is not None and isinstance(trainer.controller, AdaptiveKLController)
        least = step if adaptive else 0.0
        with self.slider.hold_trait_notifications():
            self.slider.max, self.slider.min, self.slider.step = 100 * step, least, step
            self.slider.value = self.synced = max(start, least)

    def _sync(self) -> None:
        "Move the slider to a coefficient that was not set by it."
        value = self.board.kl_coef
        if self.board.wishes.kl_coef is None and value is not None and value != self.synced:
            self.slider.value = self.synced = value

    def show_head(self) -> None:
        """What was requested, and what can be requested now: no control for what is not there,
        episodes, more curves than are shown, a coefficient that can be moved."""
        with self.lock:
            board, run = self.board, self.board.run
            steers = run.going and board.trainer is not None
            more = len(run.lines) > len(chosen_curves(run, self.few))
            self.hold.description = "go on" if board.wishes.pausing else "pause"
            for one, there, display_as in (
                (self.signal, run.batch, "flex"),
                (self.curves, more, "flex"),
                (self.slider, steers, None),
            ):
                one.layout.display = display_as if there else "none"
            for one in (self.hold, self.stop, self.slider):
                one.disabled = not run.going or board.ranks > 1
            self._sync()
            head = head_line(run, board.requested, self.note)
            self.head.value = element("div", sheet(head), class_="rlhf")

    def show_body(self) -> None:
        "Curves, changes and episodes."
        with self.lock:
            names = self.few if self.curves.value == "few" else None
            body = body_markup(self.board.run, names, self.signal.value, self.episodes)
            self.view.value = element("div", sheet(body), class_="rlhf")

    def begin(self) -> None:
        "A run begins."
        self.heard, self.note = False, ""
        self.set_range()
