"""A run while it trains. Any thread may request a pause, a stop or a coefficient, and the one that
trains takes it between two updates. A callback writes the record, a panel shows it."""

from __future__ import annotations

import contextvars
import copy
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ipywidgets as widgets
from IPython import get_ipython
from IPython.display import DisplayHandle, display
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerControl
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging
from transformers.utils.notebook import NotebookProgressCallback

from rlhf_nb.base.files import write_text_atomic
from rlhf_nb.kl_control import AdaptiveKLController
from rlhf_nb.rollout import SIGNALS, Rollout
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.ui import episodes as of
from rlhf_nb.ui import run_view
from rlhf_nb.ui.explore import action_button, control, notebook_bundle, side_by_side
from rlhf_nb.ui.html import asset, element, error_note, folded, sheet, themed_page
from rlhf_nb.ui.notebook import forget_last_writer
from rlhf_nb.ui.run_view import VIEWER_CURVES, Change, Run, state_sentence

# ---- What is requested ----


class Wishes:
    "A pause, a stop and a coefficient that nobody has granted yet."

    def __init__(self) -> None:
        self._gate, self._lock = threading.Event(), threading.Lock()
        self.pause, self.go_on, self.wait = self._gate.clear, self._gate.set, self._gate.wait
        self.clear()

    def clear(self) -> None:
        "The run is over: nothing is wished any more, and nobody is held."
        self.kl_coef: float | None = None  # to be moved there; None: it stays
        self.stop = False
        self.go_on()

    @property
    def pausing(self) -> bool:
        return not self._gate.is_set()

    def move_kl_coef(self, value: float | None) -> None:
        with self._lock:
            self.kl_coef = value

    def take_kl_coef(self) -> float | None:
        "The coefficient that is wished, which from now on is not."
        with self._lock:
            value, self.kl_coef = self.kl_coef, None
        return value


# ---- What is granted ----


Event = Literal["begin", "wish", "update", "pause", "end"]


class RunCallback(TrainerCallback):
    "Watches any trainer; pause, stop and kl_coef may be requested from any thread."

    def __init__(self) -> None:
        self.run, self.wishes = Run(), Wishes()
        self.trainer: PPOTrainer | None = None  # None: another kind of trainer, or none
        self.ranks, self.saves = 1, False

    def changed(self, event: Event) -> None:
        "Something has happened to the run. For those who show it."

    # ---- Requests, from any thread ----

    def _check(self, what: str) -> None:
        "Raises RuntimeError where nobody would grant it."
        if self.run.going and self.ranks == 1:
            return
        why = f"this run has {self.ranks} processes: this one alone would obey. Stop it, and start "
        why += "again from its checkpoint with another PPOConfig."
        if not self.run.going:
            so_far = state_sentence(self.run)
            why = f"no run is going on. {so_far} Ask while train() runs; before it, set PPOConfig."
        raise RuntimeError(f"{what} was requested, and {why}")

    def pause(self) -> None:
        "Wait when this update is done, until `go_on` or `stop`."
        self._check("pause")
        self.wishes.pause()
        self.changed("wish")

    def go_on(self) -> None:
        "End a pause, or take one back that has not begun."
        self._check("go_on")
        self.wishes.go_on()
        self.changed("wish")

    def stop(self) -> None:
        "End the run when this update is done, with a checkpoint unless save_strategy is no."
        self._check("stop")
        self.wishes.stop = True
        self.wishes.go_on()  # a paused run stops, too
        self.changed("wish")

    @property
    def kl_coef(self) -> float | None:
        "The coefficient now; None where the trainer has none. Set it, and the next update has it."
        return None if self.trainer is None else self.trainer.controller.value

    @kl_coef.setter
    def kl_coef(self, wanted: float) -> None:
        self._check("kl_coef")
        if self.trainer is None:
            raise RuntimeError("kl_coef was requested, and this trainer has none: PPOTrainer has.")
        trial = copy.copy(self.trainer.controller)
        trial.set(wanted)  # it refuses what the real one would refuse
        moves = trial.value != self.trainer.controller.value
        self.wishes.move_kl_coef(trial.value if moves else None)
        self.changed("wish")

    @property
    def requested(self) -> tuple[str, ...]:
        "In words: what was requested and has not happened yet."
        wishes, run = self.wishes, self.run
        value = wishes.kl_coef
        return (
            *(["pause"] if wishes.pausing and run.state != "paused" else []),
            *(["stop"] if wishes.stop and not run.stopping else []),
            *([] if value is None else [f"kl_coef {value:.4g}"]),
        )

    # ---- Between two updates ----

    def _grant(self, control: TrainerControl) -> None:
        "Set what was requested; stop where that was requested and something is left to stop."
        run, wanted = self.run, self.wishes.take_kl_coef()
        due, line = control.should_log, dict[str, float]()
        if wanted is not None and self.trainer is not None:
            before = self.trainer.controller.value
            self.trainer.controller.set(wanted)
            run.changes.append(Change(run.update, "kl_coef", before, wanted))
            line = {"steering/kl_coef": wanted, "steering/kl_coef_before": before}
        if self.wishes.stop and not run.stopping and run.update < run.total:
            run.stopping = due = control.should_training_stop = True
            run.changes.append(Change(run.update, "stop"))
            line["steering/stopped"] = 1.0
            control.should_save = control.should_save or self.saves
        if line and self.trainer is not None:
            self.trainer.log(line)
        control.should_log = due  # logging resets what others requested for this update
        run.kl_coef = self.kl_coef

    # ---- What a trainer reports ----

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        "A fresh record; of a run that is resumed, what its checkpoint remembers."
        if self.trainer is not None and self.trainer.state is not state:
            self.trainer = None
        ppo, steps = self.trainer is not None, (state.global_step, state.max_steps)
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.ranks, self.saves = args.world_size, args.save_strategy != "no"
        batch = rows * args.world_size if ppo else 0
        self.run = Run("update" if ppo else "step", "running", *steps, batch, kl_coef=self.kl_coef)
        for line in state.log_history:
            self.run.remember(line)
        self.run.tick(time.perf_counter())
        self.changed("begin")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        "Where a trainer that is not PPO can wait."
        if self.trainer is None:
            self.ppo_between(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        "A step is over: requests are granted, before its checkpoint is written."
        self.run.update = state.global_step
        self.run.tick(time.perf_counter())
        self._grant(control)
        self.changed("update")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        "Evaluations of any trainer, and everything that is logged by one that is not PPO."
        kept = "" if self.trainer is None else ("eval_", "sample_")
        ours = {name: x for name, x in (logs or {}).items() if name.startswith(kept)}
        if ours and self.run.going:
            self.run.add(state.global_step, ours)
            self.changed("update")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        "The end that was planned, or a stop."
        done = "done" if state.global_step >= state.max_steps else "ended"
        self._end("stopped" if self.run.stopping else done)

    def ppo_begin(self, trainer: PPOTrainer) -> None:
        "PPOTrainer says who it is."
        self.trainer = trainer

    def ppo_update(self, rollout: Rollout, metrics: dict[str, float]) -> None:
        "An update, by train() or by hand."
        at = self.run.update + 1
        self.run.last = rollout
        self.run.add(at, metrics)
        if self.run.state == "waiting":
            self.run.update = at

    def ppo_between(self, control: TrainerControl) -> None:
        "Everything of an update is logged and saved: here a pause waits, open to an interrupt."
        if self.wishes.pausing:
            start, self.run.state = time.perf_counter(), "paused"
            self.changed("pause")
            while not self.wishes.wait(0.1):
                pass
            seconds, self.run.state = time.perf_counter() - start, "running"
            self.run.changes.append(Change(self.run.update, "pause", after=seconds))
            self.changed("pause")
        self._grant(control)

    def ppo_end(self, error: BaseException) -> None:
        "The end that was not planned."
        between = "left" if self.run.state == "paused" else "interrupted"
        self._end(between if isinstance(error, KeyboardInterrupt) else "failed", error)

    def _end(self, state: str, error: BaseException | None = None) -> None:
        self.run.state = state
        self.run.error = "" if error is None else f"{type(error).__name__}: {error}"
        self.wishes.clear()
        self.changed("end")


# ---- The panel ----


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
    "Controls above a view. Clicks come on any thread; a lock lets one of them write a widget."

    def __init__(self, board: LiveDashboard):
        self.board = board
        self.lock, self.heard, self.note = threading.RLock(), False, ""
        self.synced = math.nan  # what the slider was last set to from here
        clicked = lambda act: partial(self._click, act)
        toggle = lambda: board.go_on() if board.wishes.pausing else board.pause()
        self.hold = action_button("pause", clicked(toggle), "when this update is done")
        tip = "end when this update is done, and keep all"
        self.stop = action_button("stop", clicked(board.stop), tip)
        self.slider = control("kl_coef", (0.0, 0.5, 0.05, 0.005))
        self.slider.readout_format = ".3g"
        self.signal = control("signal", [(of.SIGNAL_NAMES[name], name) for name in SHOWN])
        self.signal.value = board.signal
        self.curves = control("curves", ["few", "all"])
        self.beat = widgets.Play(min=0, max=1, layout=dict(display="none"))
        self.head, self.view = widgets.HTML(), widgets.HTML()
        self.set_range()
        self.slider.observe(self._slide, names="value")
        self.beat.observe(self._answer, names="value")
        for one in (self.signal, self.curves):
            one.observe(lambda change: self._carefully(self.show_body), names="value")
        steering = self.hold, self.stop, self.slider
        for one in (*steering, self.signal, self.curves, self.beat):
            forget_last_writer(one)
        style = element("style", *map(asset, ("theme.css", *run_view.SHEETS)))
        hidden = [widgets.HTML(style, layout=dict(display="none")), self.beat]
        controls = side_by_side(*steering), *map(side_by_side, (self.signal, self.curves))
        self.box = widgets.VBox([*hidden, self.head, *controls, self.view])

    # ---- What is clicked ----

    def _click(self, act: Callable[[], None]) -> None:
        self.heard = True
        if self.board.run.going:
            return self._carefully(act)
        self.note = LATE
        self.show_head()

    def _carefully(self, act: Callable[[], None]) -> None:
        "Do it; where it fails, say so above the controls."
        self.note = ""
        try:
            act()
        except Exception as error:
            self.note = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.show_head()

    def _slide(self, change: dict[str, Any]) -> None:
        if self.board.run.going and self.board.trainer is not None:
            self._carefully(partial(setattr, self.board, "kl_coef", change["new"]))

    # ---- Does the front end hear, while a cell trains? ----

    def _answer(self, change: dict[str, Any]) -> None:
        if change["new"] == 1:
            self.heard, self.note = True, self.note.replace(NOT_HEARD, "")
            self.show_head()

    def listen(self, seconds: float = 1.0, times: int = 6) -> None:
        "Let the hidden player play a step, and say so where no front end sends it back."
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

    def show_head(self) -> None:
        "What was requested, and what can be now: there is no control for what is not there."
        with self.lock:
            board, run = self.board, self.board.run
            steers = run.going and board.trainer is not None
            more = len(run.lines) > len(run_view.chosen_curves(run, board.curves))
            self.hold.description = "go on" if board.wishes.pausing else "pause"
            self.signal.layout.display = "flex" if run.batch else "none"
            self.curves.layout.display = "flex" if more else "none"
            self.slider.layout.display = None if steers else "none"
            for one in (self.hold, self.stop, self.slider):
                one.disabled = not run.going or board.ranks > 1
            value = board.kl_coef  # which the slider may not have set
            if board.wishes.kl_coef is None and value is not None and value != self.synced:
                self.slider.value = self.synced = value
            head = run_view.head_line(run, board.requested, self.note)
            self.head.value = element("div", sheet(head), class_="rlhf")

    def show_body(self) -> None:
        "Curves, changes and episodes."
        with self.lock:
            board = self.board
            names = board.curves if self.curves.value == "few" else None
            body = run_view.body_markup(board.run, names, self.signal.value, board.episodes)
            self.view.value = element("div", sheet(body), class_="rlhf")


# ---- All of it ----


logger = logging.get_logger(__name__)


class LiveDashboard(RunCallback):
    "A callback that shows a run as it trains; a hand may pause, stop and steer it between updates."

    def __init__(
        self,
        curves: Sequence[str] = VIEWER_CURVES,  # short names, of the viewer; or names of the log
        episodes: int = 2,  # of each update, from its first
        signal: str = "advantages",  # behind their tokens
        every: float = 1.0,  # seconds between two drawings, at least
        live: bool = True,  # False: it listens, and is shown when `show()` is called
    ):
        if signal not in SHOWN:
            raise ValueError(f"signal is {signal!r}: give one of {', '.join(SHOWN)}.")
        if isinstance(curves, str):
            raise ValueError(f"curves is {curves!r}: give a list of names, [{curves!r}].")
        for name, value in dict(episodes=episodes, every=every).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: give 0 or more.")
        super().__init__()
        self.live, self.curves, self.episodes = live, list(curves), int(episodes)
        self.signal, self.every = signal, every
        self.panel: Panel | None = None  # made when somebody looks
        self.handle: DisplayHandle | None = None
        self.drawn = self.seconds = 0.0  # when last; all drawings of this run together
        self.beside: Future[TrainOutput] | None = None  # a run in a thread of its own

    # ---- What is seen ----

    @property
    def box(self) -> widgets.VBox:
        "The widgets: controls and views, made when somebody looks."
        if self.panel is None:
            self.panel = Panel(self)
        return self.panel.box

    def show(self) -> None:
        "Display it here; it is drawn from now on, and written once more at the end of the run."
        self.handle = display(self, display_id=True)

    def draw(self, now: bool = False) -> None:
        "Write everything, unless it was drawn a moment ago or nobody looks."
        start, panel = time.perf_counter(), self.panel
        if panel is None or not (now or start - self.drawn >= self.every):
            return
        try:
            panel.show_head()
            panel.show_body()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            logger.warning(f"the dashboard could not draw ({why}); training goes on.")
            panel.view.value = error_note(error)
        self.drawn = time.perf_counter()
        self.seconds += self.drawn - start

    def _shell(self) -> Any:
        "The shell of a notebook; None elsewhere, and where nothing is to be shown."
        shell = get_ipython() if self.live else None
        return shell if getattr(shell, "kernel", None) is not None else None

    def _repr_html_(self) -> str:
        return run_view.render_run(self.run, self.curves, self.signal, self.episodes)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return notebook_bundle(self.box, self._repr_html_(), repr(self), **kwargs)

    def __repr__(self) -> str:
        return f"LiveDashboard({state_sentence(self.run)})"

    def save_html(self, path: str | Path) -> Path:
        "The run as it is now, in one file that needs no kernel and no network."
        run, title = self.run, "A run, watched"
        body = run_view.body_markup(run, self.curves, self.signal, self.episodes)
        others = folded("All curves", run_view.curves_markup(run, None))
        box = sheet(run_view.head_line(run), body, others)
        page = f"{title}: {state_sentence(run)}", element("h1", title), box
        write_text_atomic(path, themed_page(*page, sheets=run_view.SHEETS))
        return Path(path)

    # ---- What happens to the run ----

    def changed(self, event: Event) -> None:
        "Show it; of the end the last picture."
        if event == "begin":
            self._begin()
        elif event != "wish":
            self.draw(now=event != "update")
        elif self.panel is not None:
            self.panel.show_head()
        if event == "end":
            self._keep()
            shell = self._shell()
            if shell is not None and self._cell_over in shell.events.callbacks["post_run_cell"]:
                shell.events.unregister("post_run_cell", self._cell_over)

    def ppo_begin(self, trainer: PPOTrainer) -> None:
        "The dashboard takes the place of the progress bar where it can be seen."
        super().ppo_begin(trainer)
        if self._shell() is not None:
            for kind in (NotebookProgressCallback, ProgressCallback, PrinterCallback):
                trainer.remove_callback(kind)

    def _begin(self) -> None:
        shell = self._shell() if self.ranks == 1 else None
        self.drawn = self.seconds = 0.0
        if shell is not None and not self._running_beside():
            if self.trainer is None and threading.current_thread() is threading.main_thread():
                shell.events.register("post_run_cell", self._cell_over)
            self.show()
        if self.panel is not None:
            self.panel.heard, self.panel.note = False, ""
            self.panel.set_range()
            if shell is not None:
                threading.Thread(target=self.panel.listen, daemon=True).start()
        self.draw(now=True)

    def _keep(self) -> None:
        "Write it once more where it was displayed: what a notebook keeps."
        if self.handle is not None:
            self.handle.update(self)

    def _cell_over(self, result: Any) -> None:
        "The cell is over and the trainer, which is not PPO, did not report it: it broke off."
        error = result.error_in_exec or result.error_before_exec
        if self.run.going:
            self.ppo_end(error or RuntimeError("the cell ended before the run"))

    # ---- A run in a thread of its own ----

    def _running_beside(self) -> bool:
        return self.beside is not None and not self.beside.done()

    def start(self, trainer: Trainer, resume_from_checkpoint: str | bool | None = None) -> None:
        "Train beside the cells, with every kernel. Raises RuntimeError while a run is going on."
        if self._running_beside():
            so_far = state_sentence(self.run)
            raise RuntimeError(f"a run is going on. {so_far} Call wait() or stop() first.")
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self.trainer = trainer if isinstance(trainer, PPOTrainer) else None
        self.run, self.beside = Run(state="starting"), Future()

        def train(future: Future[TrainOutput]) -> None:
            try:
                future.set_result(trainer.train(resume_from_checkpoint=resume_from_checkpoint))
            except BaseException as error:
                if self.run.going:
                    self.ppo_end(error)
                future.set_exception(error)  # wait() raises it

        if self._shell() is not None:
            self.show()
        in_context = contextvars.copy_context().run
        threading.Thread(target=in_context, daemon=True, args=(train, self.beside)).start()

    def wait(self, seconds: float | None = None) -> TrainOutput:
        "What train() returned, or raises its error; TimeoutError where it is not over by then."
        if self.beside is None:
            raise RuntimeError("there is nothing to wait for: call start(trainer) first.")
        try:
            self.beside.exception(seconds)
        except TimeoutError:
            so_far = state_sentence(self.run)
            raise TimeoutError(f"{seconds} seconds are over. {so_far} It goes on.") from None
        self._keep()  # not every front end keeps what the thread wrote after its cell was over
        return self.beside.result()
