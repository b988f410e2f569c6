"""A run while it trains: its curves, its episodes, and three settings that may be changed."""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ipywidgets as widgets
from IPython import get_ipython
from IPython.display import DisplayHandle, display
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging
from transformers.utils.notebook import NotebookProgressCallback

from rlhf_nb.runtime.files import write_text_atomic
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.ui.controls import notebook_bundle
from rlhf_nb.ui.dashboard_callback import Event, RunCallback
from rlhf_nb.ui.dashboard_panel import SHOWN, Panel
from rlhf_nb.ui.html import element, error_note, sheet, themed_page
from rlhf_nb.ui.run_curves import curves_markup
from rlhf_nb.ui.run_markup import SHEETS, body_markup, head_line, render_run
from rlhf_nb.ui.run_record import Run, state_sentence

logger = logging.get_logger(__name__)


class LiveDashboard(RunCallback):
    """A callback that shows a run while it trains, and lets a hand pause, stop and steer it between
    two updates."""

    def __init__(
        self,
        curves: Sequence[str] = ("KL", "entropy", "length", "score"),  # short names, or of the log
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
            self.panel = Panel(self, self.curves, self.episodes, self.signal)
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
            logger.warning(
                f"the dashboard could not draw ({type(error).__name__}: {error}); training goes on."
            )
            panel.view.value = error_note(error)
        self.drawn = time.perf_counter()
        self.seconds += self.drawn - start

    def _shell(self) -> Any:
        "The shell of a notebook; None elsewhere, and where nothing is to be shown."
        shell = get_ipython() if self.live else None
        return shell if getattr(shell, "kernel", None) is not None else None

    def _repr_html_(self) -> str:
        return render_run(self.run, self.curves, self.signal, self.episodes)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return notebook_bundle(self.box, self._repr_html_(), repr(self), **kwargs)

    def __repr__(self) -> str:
        return f"LiveDashboard({state_sentence(self.run)})"

    def save_html(self, path: str | Path) -> Path:
        "The run as it is now, in one file that needs no kernel and no network."
        run, heading = self.run, element("h1", "A run, watched")
        body = body_markup(run, self.curves, self.signal, self.episodes)
        others = element("details", element("summary", "All curves"), curves_markup(run, None))
        box = sheet(head_line(run), body, others)
        page = themed_page(f"A run, watched: {state_sentence(run)}", heading, box, sheets=SHEETS)
        write_text_atomic(path, page)
        return Path(path)

    # ---- What happens to the run ----

    def changed(self, event: Event) -> None:
        "Show it."
        if event == "begin":
            self._begin()
        elif event == "end":
            self._end_of_run()
        elif event == "wish" and self.panel is not None:
            self.panel.show_head()
        elif event != "wish":
            self.draw(now=event == "pause")

    def ppo_begin(self, trainer: PPOTrainer) -> None:
        "The dashboard takes the place of the progress bar where it can be seen."
        super().ppo_begin(trainer)
        if self._shell() is not None:
            for kind in (NotebookProgressCallback, ProgressCallback, PrinterCallback):
                trainer.remove_callback(kind)

    def _begin(self) -> None:
        "Show it where there is someone to look."
        shell = self._shell() if self.ranks == 1 else None
        self.drawn = self.seconds = 0.0
        if shell is not None and not self._running_beside():
            here = threading.current_thread() is threading.main_thread()
            if self.trainer is None and here:
                shell.events.register("post_run_cell", self._cell_over)
            self.show()
        if self.panel is not None:
            self.panel.begin()
            if shell is not None:
                threading.Thread(target=self.panel.listen, daemon=True).start()
        self.draw(now=True)

    def _end_of_run(self) -> None:
        "The last picture."
        self.draw(now=True)
        if self.handle is not None:
            self.handle.update(self)
        shell = self._shell()
        if shell is not None and self._cell_over in shell.events.callbacks["post_run_cell"]:
            shell.events.unregister("post_run_cell", self._cell_over)

    def _cell_over(self, result: Any) -> None:
        "The cell is over and the trainer, which is not PPO, did not report it: it broke off."
        error = result.error_in_exec or result.error_before_exec
        if self.run.going:
            self.ppo_end(error or RuntimeError("the cell ended before the run"))

    # ---- A run in a thread of its own ----

    def _running_beside(self) -> bool:
        return self.beside is not None and not self.beside.done()

    def start(self, trainer: Trainer, resume_from_checkpoint: str | bool | None = None) -> None:
        """Train beside the cells; works with every kernel. Raises RuntimeError while a run is going
        on."""
        if self._running_beside():
            raise RuntimeError(
                f"a run is going on. {state_sentence(self.run)} Call wait() or stop() first."
            )
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
        """What train() returned; its error is raised here. Raises TimeoutError where the run is not
        over by then."""
        if self.beside is None:
            raise RuntimeError("there is nothing to wait for: call start(trainer) first.")
        try:
            self.beside.exception(seconds)
        except TimeoutError:
            raise TimeoutError(
                f"{seconds} seconds are over. {state_sentence(self.run)} It goes on."
            ) from None
        # What the thread wrote after its cell was over is not kept by every front end.
        if self.handle is not None:
            self.handle.update(self)
        return self.beside.result()
