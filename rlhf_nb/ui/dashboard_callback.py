"""A callback that writes the record of a run, and grants between two updates what was wished."""

from __future__ import annotations

import copy
import time
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl

from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.ui.run_record import Change, Run, state_sentence
from rlhf_nb.ui.run_wishes import Wishes

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
        if not self.run.going:
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
        self._check("pause")
        self.wishes.pause()
        self.changed("wish")

    def go_on(self) -> None:
        "End a pause, or take one back that has not begun."
        self._check("go_on")
        self.wishes.go_on()
        self.changed("wish")

    def stop(self) -> None:
        """End the run when this update is done; train() returns as ever, and a checkpoint is
        written unless save_strategy is no."""
        self._check("stop")
        self.wishes.stop = True
        self.wishes.go_on()  # a paused run stops, too
        self.changed("wish")

    @property
    def kl_coef(self) -> float | None:
        """The coefficient as it is now; None where the trainer has none. Set it, and the next
        update has it."""
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

    def _hold(self) -> None:
        "Wait while a pause is wished, in short waits so that an interrupt comes through."
        if not self.wishes.pausing:
            return
        start, self.run.state = time.perf_counter(), "paused"
        self.changed("pause")
        while not self.wishes.wait(0.1):
            pass
        seconds, self.run.state = time.perf_counter() - start, "running"
        self.run.changes.append(Change(self.run.update, "pause", after=seconds))
        self.changed("pause")

    def _grant(self, control: TrainerControl) -> None:
        "Set what was requested; stop where that was requested and something is left to stop."
        run, wanted = self.run, self.wishes.take_kl_coef()
        if wanted is not None and self.trainer is not None:
            before = self.trainer.controller.value
            self.trainer.controller.set(wanted)
            line = {"steering/kl_coef": wanted, "steering/kl_coef_before": before}
            self._note(control, Change(run.update, "kl_coef", before, wanted), line)
        if self.wishes.stop and not run.stopping and run.update < run.total:
            run.stopping = True
            self._note(control, Change(run.update, "stop"), {"steering/stopped": 1.0})
            control.should_training_stop = control.should_log = True
            control.should_save = control.should_save or self.saves
        run.kl_coef = self.kl_coef

    def _note(self, control: TrainerControl, change: Change, line: dict[str, float]) -> None:
        "A change, in the record and in the log."
        self.run.changes.append(change)
        if self.trainer is not None:
            due = control.should_log  # logging resets what others requested for this update
            self.trainer.log(line)
            control.should_log = due

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
        kept = "" if self.trainer is None else "eval_"
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
        "Everything of an update is logged and saved: here a pause waits."
        self._hold()
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
