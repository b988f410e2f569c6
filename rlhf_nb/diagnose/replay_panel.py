"""The five settings of an update that people vary most, as controls above the update done again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from rlhf_nb.diagnose.replay import do_again, replayed
from rlhf_nb.diagnose.replay_record import record_of
from rlhf_nb.diagnose.replay_view import replay_markup
from rlhf_nb.ui.explore import Explorer
from rlhf_nb.ui.viz import Html

TIMES = (0.1, 0.3, 3.0, 10.0)  # of the run's own, for rates and coefficients
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)  # of the clip range
EPOCHS = (1, 2, 4, 8)


def choices(own: Any, others: Any) -> dict[str, Any]:
    "Labels and values: the run's own first, then the others in their order."
    rest = sorted({x for x in others if x != own})
    return {f"{own:g} (the run's)": own} | {f"{x:g}": x for x in rest}


def five_settings(was: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    "What to choose from for each of the five, the run's own value first."
    rows = was["per_device_train_batch_size"] * was["gradient_accumulation_steps"]
    times = lambda own, none: [float(f"{own * x:.3g}") for x in TIMES] if own else [none]
    return dict(
        learning_rate=choices(was["learning_rate"], times(was["learning_rate"], 1e-6)),
        kl_coef=choices(was["kl_coef"], [0.0, *times(was["kl_coef"], 0.05)]),
        cliprange=choices(was["cliprange"], SHARES),
        num_ppo_epochs=choices(was["num_ppo_epochs"], EPOCHS),
        num_mini_batches=choices(
            was["num_mini_batches"], [n for n in (1, 2, 4, 8) if not rows % n]
        ),
    )


def replay_panel(
    run: Any,  # as of `replay`
    update: int | None = None,
    *,
    model: Any = None,
    value_model: Any = None,
) -> Explorer:
    """An update of a run with five controls: each move does the update again. Raises ValueError as
    `replay` does."""
    record = record_of(run, update, model, value_model)
    was = do_again(record, {})
    specs: dict[str, Any] = five_settings(record.settings)

    @cache
    def drawn(**settings: Any) -> Html:
        return replay_markup(replayed(record, was, settings))

    worth: dict[str, dict[str, Any]] = {
        "a learning rate ten times as high": dict(
            learning_rate=float(f"{record.settings['learning_rate'] * 10:.3g}")
        ),
        "no KL penalty": dict(kl_coef=0.0),
        "one epoch": dict(num_ppo_epochs=1),
    }
    known = {
        name: values
        for name, values in worth.items()
        if all(x in specs[k].values() for k, x in values.items())
    }
    return Explorer(  # without a title: a site cannot draw its thousands of states beforehand
        drawn,
        question=f"Update {record.update} again: which setting moves the policy further on the "
        "same episodes, and which tokens?",
        presets=known,
        **specs,
    )
