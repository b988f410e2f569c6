"What a notebook shows while PPO trains, in place of Trainer's table of losses. It loads IPython."

from __future__ import annotations

from typing import Any

from transformers.utils import notebook


class UpdateTracker(notebook.NotebookTrainingTracker):
    "A bar, and what was logged."

    state: Any  # of the trainer

    def display(self) -> None:
        child = self.child_bar  # of an evaluation
        self.html_code = notebook.html_progress_bar(self.value, self.total, "", self.label)
        self.html_code += child.html_code if child and child.value < child.total else ""
        if self.output is None:
            self.output = notebook.disp.display(self, display_id=True)
        else:
            self.output.update(self)

    def __repr__(self) -> str:
        return f"PPO {self.label}"

    def _repr_html_(self) -> str:
        from rlhf_nb.ui.shown import updates_markup  # a view, when something is shown

        return updates_markup(self.html_code, self.state.log_history)


class UpdateTable(notebook.NotebookProgressCallback):
    "Shows the progress of a run of PPO: a bar, the metrics to look at first, an alarm."

    training_tracker: Any
    # what an evaluation measured was logged before
    on_evaluate = notebook.NotebookProgressCallback.on_predict  # type: ignore[assignment]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.training_tracker = UpdateTracker(state.max_steps)
        self.training_tracker.state = state
        self.training_tracker.update(state.global_step)

    def on_log(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        if self.training_tracker is not None:
            self.training_tracker.display()


def show_updates(trainer: Any) -> None:
    "Put it in the place of what transformers shows, if that is there."
    if trainer.pop_callback(notebook.NotebookProgressCallback) is not None:
        trainer.add_callback(UpdateTable())
