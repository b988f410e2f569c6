"""`rlhf-nb plot`: the metrics of several runs in one figure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_nb.cli.help import About
from rlhf_nb.cli.parsing import Parser
from rlhf_nb.runtime.fields import Count, setting


@dataclass
class PlotArguments:
    "What is drawn, and where it goes."

    metrics: list[str] | None = setting(
        None, "Patterns of metrics. None: objective/* policy/* loss/* val/*, or all there are."
    )
    group: list[str] | None = setting(
        None,
        "A name for each run; runs of the same name are averaged. None: their paths without the "
        "seed.",
    )
    output: str = setting("plot", "OUTPUT.png and OUTPUT.svg are written.")
    ncols: Count = setting(4, "Panels side by side.")


ABOUT = About(
    usage="plot RUN [RUN ...] [--OPTION VALUE ...]",
    text="Draws what runs logged, by episode. Runs whose names differ in nothing but the seed "
    "become one line: the mean, with a 95 % interval over the seeds (Student's t). It needs "
    "folders with trainer_state.json (or metrics.jsonl, which `rlhf-nb demo` writes), and writes "
    "OUTPUT.png and OUTPUT.svg.",
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


def plot_command(words: Sequence[str]) -> None:
    "`rlhf-nb plot`."
    options = plot_parser().read(words)
    from matplotlib import rc_context  # seconds that `--help` does not wait for

    from rlhf_nb.runtime.curves import choose_metrics, group_runs, plot_runs, read_log

    groups = group_runs(options.runs, options.group)
    logs = {name: [read_log(run) for run in runs] for name, runs in groups.items()}
    metrics = choose_metrics([log for runs in logs.values() for log in runs], options.metrics)
    figure, output = plot_runs(logs, metrics, options.ncols), Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "rlhf_nb"}):  # the same figure is the same bytes
        figure.savefig(f"{output}.png.partial", format="png", dpi=130)
        figure.savefig(f"{output}.svg.partial", format="svg", metadata={"Date": None})
    for kind in ("png", "svg"):
        os.replace(f"{output}.{kind}.partial", f"{output}.{kind}")
    print(
        f"rlhf-nb plot: {len(metrics)} metrics of {len(options.runs)} runs in {output}.png and "
        f"{output}.svg"
    )
