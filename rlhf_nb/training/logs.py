"What a run logged: the one reader of metrics.jsonl and trainer_state.json."

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_nb.base.files import DEMO_MARK, checkpoints, log_history, read_jsonl, read_object

if TYPE_CHECKING:
    import pandas as pd

MOST_NAMES = 500  # that a run logs
PROGRESS = {  # metric of the log -> what a table and a line of progress call it
    "step": "update",
    "objective/raw_scores": "score",
    "objective/kl": "KL (nats)",
    "tokens/response_length": "length (tokens)",
    "policy/clipfrac_avg": "clip fraction",
}
Log = list[dict[str, float]]  # a row for each step, with what was logged at it, NaN included


def log_line(log: Mapping[str, Any], step: int) -> str:
    "What was logged, for a terminal: of an update the metrics to look at first, else all of it."
    names = PROGRESS if "objective/kl" in log else {x: x for x in log if x != "epoch"}
    numbers = (f"{names[x]} {log[x]:.4g}" for x in names if isinstance(log.get(x), Real))
    return f"update {step}: {', '.join(numbers)}"


def newest_state(run: Path) -> Path | None:
    """The trainer_state.json of a run, or of its newest checkpoint where that went further: a
    resumed run writes its own at the end."""
    states = (folder / "trainer_state.json" for folder in reversed(checkpoints(run)))
    newest = next(filter(Path.exists, states), None)
    own = run / "trainer_state.json"
    if not own.is_file():
        return newest
    rows = lambda state: _readable(log_history(state), state)
    logged = lambda state: max((row.get("step", 0) for row in rows(state)), default=0)
    return newest if newest and 0 < logged(own) < logged(newest) else own


def planned_updates(run: Path) -> int | None:
    """Updates that a run was to have, of its state or of the settings of `rlhf-nb demo`; None where
    neither names them. Raises ValueError with the file that is damaged."""
    path = newest_state(run) or run / "settings.json"
    state = read_object(path, {})
    names = ("max_steps",) if path.name == "trainer_state.json" else ("episodes", "batch")
    counts = [state.get(name) or 0 for name in names]
    for name, count in zip(names, counts):
        if not isinstance(count, int) or count < 0:
            raise ValueError(
                f"{path}: {name} is {count!r}, and a whole number of 0 or more was expected. "
                f"Correct it, or remove {name} from the file."
            )
    if not all(counts):
        return None
    return counts[0] // counts[1] if len(counts) == 2 else counts[0]


def _readable(lines: list[dict[str, Any]], run: Path) -> list[dict[str, Any]]:
    "The lines whose numbers are numbers; a warning counts the others."
    kept, names = [], set[str]()
    for row in lines:
        with suppress(TypeError, OverflowError):
            step, _ = row.get("step", 0), [float(x) for x in row.values() if isinstance(x, int)]
            if math.isfinite(step) and len(names | row.keys()) <= MOST_NAMES:
                kept.append(row)
                names.update(row)
    if left_out := len(lines) - len(kept):
        why = f"their step is no number, or there are over {MOST_NAMES} names"
        warnings.warn(f"{run}: {left_out} lines of its log are left out: {why}.", stacklevel=3)
    return kept


def trained_again(demo: Path) -> bool:
    "Whether another run logged into a demo's `ppo`, which the demo had sealed, since then."
    ppo = demo / "ppo"
    again = (ppo / "metrics.jsonl").is_file() and not (ppo / "manifest.json").is_file()
    return again and (demo / DEMO_MARK).is_file()


def logged_rows(run: Path) -> list[dict[str, Any]]:
    """The lines of PPO, or of the one command that wrote the folder; none where it logged nothing.
    They are those of metrics.jsonl, which a resumed run cuts back to its checkpoint, else of
    trainer_state.json. Where the steps go back, a stretch was done again: the last attempt counts.
    Raises ValueError naming a damaged file."""
    run = run / "ppo" if trained_again(run) else run
    own, state = run / "metrics.jsonl", newest_state(run)
    lines = read_jsonl(own) if own.is_file() else []
    lines = _readable(lines or (log_history(state) if state else []), run)
    kept, limit = [], math.inf
    for row in reversed([row for row in lines if row.get("stage", "ppo") == "ppo"]):
        step = row.get("step", limit)
        if step <= limit:
            kept.append(row)
            limit = step
    return kept[::-1]


def steps_of(
    run: str | Path,  # a folder
) -> Log:
    "What a run logged, by step. Raises ValueError where it logged nothing, or a file is damaged."
    steps: dict[float, dict[str, float]] = {}
    try:
        for row in logged_rows(Path(run)):
            if "step" in row:
                numbers = {name: float(v) for name, v in row.items() if isinstance(v, int | float)}
                steps.setdefault(row["step"], {}).update(numbers)
        if not steps:
            raise ValueError(
                "it has logged nothing yet, or has neither metrics.jsonl nor trainer_state.json. "
                "Give the --output_dir of a command that trains"
            )
    except ValueError as error:
        raise ValueError(f"{run} cannot be drawn: {error}.") from error
    rows = [steps[step] for step in sorted(steps)]
    return [row for row in rows if "episode" in row] or rows


def read_log(
    run: str | Path,  # a folder
) -> pd.DataFrame:  # a row for each step, with the episode count where it was logged
    "`steps_of` a run as a table; NaN where a step did not log a metric."
    import pandas as pd  # which the command line does not wait for

    return pd.DataFrame(steps_of(run))
