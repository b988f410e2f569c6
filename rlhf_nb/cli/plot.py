"""`rlhf-nb plot`: the metrics of several runs in one figure."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_nb.base.fields import Count, setting
from rlhf_nb.base.files import OVERWRITE, writable, write_text_atomic
from rlhf_nb.base.terminal import harmless
from rlhf_nb.cli.help import About
from rlhf_nb.cli.parsing import Parser

if TYPE_CHECKING:
    from rlhf_nb.training.logs import Log


@dataclass
class PlotArguments:
    "What is drawn, and where it goes."

    metrics: list[str] | None = setting(
        None, "Patterns of metrics, as 'val/*'. None: the main ones that moved; '*': all there are."
    )
    group: list[str] | None = setting(
        None,
        "A name for each run; those of one name are averaged. None: the path without its seed.",
    )
    output: str = setting("plot", "OUTPUT.png and OUTPUT.svg are written.")
    overwrite: bool = setting(False, OVERWRITE)
    ncols: Count = setting(4, "Panels side by side.")


ABOUT = About(
    usage="plot RUN [RUN ...] [--OPTION VALUE ...]",
    text="Draws what runs logged, by episode. Runs whose names differ in nothing but the seed "
    "become one line: the mean, in a band from the least to the most of them. It needs folders "
    "with metrics.jsonl or trainer_state.json, writes OUTPUT.png and OUTPUT.svg, and prints the "
    "last values: score, KL, length and entropy, or what --metrics names. A run that ended early "
    "is drawn as far as it is, and a run that logged NaN leaves a gap; a line names both.",
    examples=(
        "rlhf-nb plot runs/ppo_seed0 runs/ppo_seed1 runs/ppo_seed2 --output ppo",
        "rlhf-nb plot runs/a runs/b --metrics 'objective/*' val/ratio --group 'kl 0.05' 'kl 0'",
    ),
)


def plot_parser() -> Parser:
    "Every option of `rlhf-nb plot`."
    parser = Parser(ABOUT, PlotArguments)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Folders of runs, before --options.")
    return parser


def remarks(logs: Mapping[str, Log], metrics: Sequence[str]) -> list[str]:
    "A line for each run that is not finished, and for each that logged NaN."
    from rlhf_nb.training.logs import planned_updates
    from rlhf_nb.ui.plot_runs import axis_of, line_of

    said = []
    for run, log in logs.items():
        done, planned = int(log[-1]["step"]), planned_updates(Path(run))
        if planned and done < planned:
            said.append(f"{run} is not finished: {done} of {planned} updates.")
        x = axis_of([log])
        lines = {metric: line_of(log, metric, x) for metric in metrics}
        ill = {metric: line.index[line.isna()][0] for metric, line in lines.items() if line.hasnans}
        if ill:
            first = min(ill, key=lambda metric: ill[metric])
            more = f", and {len(ill) - 1} more metrics" if len(ill) > 1 else ""
            said.append(f"{run} logged NaN: {first} from {x} {ill[first]:g} on{more}.")
    return said


def plot_command(words: Sequence[str]) -> None:
    "`rlhf-nb plot`."
    options = plot_parser().read(words)
    options.output = re.sub(r"^\.$|\.(png|svg)$", "", options.output) or "plot"
    from matplotlib import rc_context  # seconds that `--help` does not wait for

    from rlhf_nb.training.logs import steps_of
    from rlhf_nb.training.metrics import LOG_NAMES
    from rlhf_nb.ui.plot_runs import choose_metrics, group_runs, last_values, plot_runs

    for kind in ("png", "svg"):
        writable(f"{options.output}.{kind}", "--output", options.overwrite)
    groups = group_runs(options.runs, options.group)
    of_run = {run: steps_of(run) for runs in groups.values() for run in runs}
    logs = {name: [of_run[run] for run in runs] for name, runs in groups.items()}
    metrics = choose_metrics([*of_run.values()], options.metrics)
    every = choose_metrics([*of_run.values()], options.metrics or ["*"])
    said = remarks(of_run, every)  # damaged settings are named before anything is written
    figure, output = plot_runs(logs, metrics, options.ncols), Path(options.output)
    svg: dict[str, Any] = dict(metadata=dict(Date=None, Creator="rlhf_nb"))
    png: dict[str, Any] = dict(metadata=dict(Software="rlhf_nb"), dpi=130)
    with rc_context({"svg.hashsalt": "rlhf_nb"}):  # the same figure is the same bytes
        for kind, how in (("png", png), ("svg", svg)):
            figure.savefig(drawn := io.BytesIO(), format=kind, **how)
            write_text_atomic(f"{output}.{kind}", drawn.getvalue())
    main = [LOG_NAMES[name] for name in ("score", "KL", "length", "entropy")]
    short = metrics if options.metrics else [m for m in main if m in metrics] or metrics
    last = last_values(logs, ["episode", *short])
    last = last.map(lambda x: f"{x:.4g}" if isinstance(x, float) else harmless(str(x)))
    print(f"Last values\n{last.to_string(index=False)}")
    for line in said:
        print(harmless(line))
    if twice := len(options.runs) - len(of_run):
        print(f"{twice} of the runs were given before, and are left out.")
    where = harmless(f"{output}.png and {output}.svg")
    n, m = len(metrics), len(of_run)
    all_of_them = "" if options.metrics else "; --metrics '*' draws all"
    runs = f"{m} run{'s' * (m != 1)}"
    print(f"rlhf-nb plot: {n} metric{'s' * (n != 1)} of {runs} in {where}{all_of_them}")
