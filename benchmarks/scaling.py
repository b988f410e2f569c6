"""What a PPO update costs against prompt length, response length, batch and model size, phase by
phase.

    python benchmarks/scaling.py                      about 1.5 minutes
    python benchmarks/scaling.py --sweeps prompt response
    python benchmarks/scaling.py --quick              does it run? Seconds; the figures mean nothing

Whole updates of a real PPOTrainer (1 epoch, full responses, one micro-batch, float32). All points
of a sweep stand ready in one process and take turns, so that all meet the same moods of the
machine; medians of `--rounds` rounds after one that is not counted. What is varied starts from
hidden 128, 4 layers, vocabulary 4096, prompts of 64 tokens, 32 response tokens, 8 rows. All
prompts of a batch are equally long. Where one length is varied, the other is 8 tokens, so that it
hides little of the growth. Models grow in width; x is then the number of the policy's parameters
that a token is multiplied by: all but the embedding.

Attention is told apart by one more update of each point under torch's profiler: the time inside
attention kernels and inside the cache's growth (`aten::cat` while sampling: each token copies the
keys and values before it, which is attention's memory and quadratic like attention) is taken off
the phase's median. What the rest is to keep: no exponent above linear.

Exponents are slopes of least squares on log-log, over the upper half of a sweep's points: fixed
costs, which make small sizes look cheaper than linear, weigh least there, and what grows faster
than linear weighs most. Checked for each sweep: the largest exponent of any phase that has a share
of 5 % or more of the largest update is at most 1.1, attention aside; and, in the sweep of the
batch, where every length is fixed and even attention must be linear, with attention too.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import common
from common import COLOURS, PHASES, SMALL, at_most, environment, sized, title
from torch.profiler import ProfilerActivity, profile, record_function

BASE = SMALL | dict(prompts=[64, 64], response=32, batch=8, micro=8, epochs=1)
SWEEPS = {
    "prompt": [BASE | dict(prompts=[n, n], response=8) for n in (64, 128, 256, 512)],
    "response": [BASE | dict(response=n, prompts=[8, 8]) for n in (16, 32, 64, 128)],
    "batch": [BASE | dict(batch=n, micro=n) for n in (4, 8, 16, 32)],
    "model": [BASE | sized(hidden) for hidden in (64, 128, 256, 512)],
}
QUICK = BASE | dict(
    hidden=16, layers=1, heads=2, inner=32, vocab=64, prompts=[4, 4], response=4, batch=4, micro=4
)
LINEAR, COUNTS = (
    1.1,
    0.05,
)  # an exponent that still is linear; the share from which a phase's exponent is checked


# ---- Counting ----


def slope(x: list[float], y: list[float]) -> float:
    "Exponent of y ~ x^e: least squares on log-log."
    u, v = [[math.log(z) for z in side] for side in (x, y)]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    return sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v)) / sum(
        (a - mean_u) ** 2 for a in u
    )


def upper(points: list) -> list:
    "The larger half of a sweep, three points where there are as many."
    return points[-max(min(3, len(points)), math.ceil(len(points) / 2)) :]


def is_attention(name: str, phase: str) -> bool:
    "Attention, forward and backward, each with all that it calls; and the growth of its cache."
    backward = (
        name.startswith("aten::") and "scaled_dot_product" in name and name.endswith("_backward")
    )
    return (
        backward
        or name == "aten::scaled_dot_product_attention"
        or (phase == "rollout" and name == "aten::cat")
    )


def attention_seconds(events: list[tuple[str, int, int]]) -> dict[str, float]:
    """Time in attention by phase, from events (name, start, duration in ns) of an update whose
    phases are recorded as `phase: name`."""
    windows = {
        name.removeprefix("phase: "): (start, start + length)
        for name, start, length in events
        if name.startswith("phase: ")
    }
    return {
        phase: sum(
            length
            for name, start, length in events
            if low <= start < high and is_attention(name, phase)
        )
        / 1e9
        for phase, (low, high) in windows.items()
    }


class Point:
    "A trainer of one setting, and the seconds of its updates."

    def __init__(self, s: dict, folder: Path):
        self.s, self.clock, self.rounds = s, common.Clock(), []
        self.around: Callable[[str], Any] = self.clock
        kind = common.in_phases(lambda name: self.around(name))
        self.trainer = common.make_trainer(s, folder, kind)
        policy = self.trainer.model.policy
        self.parameters = (
            sum(p.numel() for p in policy.parameters())
            - policy.get_input_embeddings().weight.numel()
        )

    def turn(self, counted: bool) -> None:
        with common.dice(self.s):
            self.trainer.step()
        seconds = self.clock.read()
        if counted:
            self.rounds.append(seconds)

    def attention(self) -> dict[str, float]:
        "Of one update under the profiler."
        self.around = lambda name: record_function(f"phase: {name}")
        with common.dice(self.s), profile(activities=[ProfilerActivity.CPU]) as found:
            self.trainer.step()
        return attention_seconds(
            [
                (e.name(), e.start_ns(), e.duration_ns())
                for e in found.profiler.kineto_results.events()
            ]
        )

    def told(self) -> dict:
        seconds = {name: median(r[name] for r in self.rounds) for name in PHASES}
        attention = self.attention()
        return dict(
            setting=self.s,
            parameters=self.parameters,
            seconds=seconds,
            rounds=self.rounds,
            attention={name: min(attention[name], seconds[name]) for name in PHASES},
        )


def measure(settings: list[dict], rounds: int) -> list[dict]:
    "All points of a sweep, in turn."
    with tempfile.TemporaryDirectory() as folder:
        points = [Point(s, Path(folder) / str(i)) for i, s in enumerate(settings)]
        for i in range(1 + rounds):
            for point in points:
                point.turn(i > 0)
        return [point.told() for point in points]


# ---- Telling ----


def x_of(sweep: str, p: dict) -> int:
    "What a sweep varies."
    s = p["setting"]
    return dict(
        prompt=s["prompts"][0], response=s["response"], batch=s["batch"], model=p["parameters"]
    )[sweep]


def without(p: dict, phase: str) -> float:
    "Seconds of a phase, attention aside; never nothing, so that it has a logarithm."
    return max(p["seconds"][phase] - p["attention"][phase], 1e-9)


def exponents(sweep: str, points: list[dict]) -> dict[str, dict[str, float]]:
    """By phase: of all of it, and of what is not attention; and the phase's share of the largest
    update."""
    high = upper(points)
    x, whole = [x_of(sweep, p) for p in high], sum(points[-1]["seconds"].values())
    return {
        name: dict(
            all=slope(x, [p["seconds"][name] for p in high]),
            without=slope(x, [without(p, name) for p in high]),
            share=points[-1]["seconds"][name] / whole,
        )
        for name in PHASES
    }


def checks(results: dict) -> list[dict]:
    "The largest exponent of each sweep."
    found = []
    for sweep, fits in results["exponents"].items():
        matter = {name: fit for name, fit in fits.items() if fit["share"] >= COUNTS}
        for what in ("without", *(("all",) if sweep == "batch" else ())):
            name = max(matter, key=lambda name: matter[name][what])
            words = f"against {sweep}: exponent of {name}" + (
                ", attention aside" if what == "without" else ""
            )
            found.append(at_most(words, matter[name][what], LINEAR))
    return found


def table(results: dict) -> Any:
    "Milliseconds by phase (of which attention), and the exponents below them."
    from rich.table import Table

    shown = Table(
        title=title("One PPO update, ms (of which attention and its cache)", results),
        caption="Exponents: over the upper half of the points (of what is not attention).",
    )
    for name in ("varied", "", *PHASES):
        shown.add_column(name, justify="left" if name == "varied" else "right")
    for sweep, points in results["sweeps"].items():
        for i, p in enumerate(points):
            cells = [f"{1e3 * p['seconds'][n]:.0f} ({1e3 * p['attention'][n]:.0f})" for n in PHASES]
            shown.add_row(sweep if i == 0 else "", f"{x_of(sweep, p):,}", *cells)
        fits = results["exponents"][sweep]
        shown.add_row(
            "",
            "exponent",
            *(f"{fits[n]['all']:.2f} ({fits[n]['without']:.2f})" for n in PHASES),
            end_section=True,
            style="bold",
        )
    return shown


def draw(results: dict, figure: Any) -> None:
    "A panel for each sweep, seconds of each phase on log-log; dashed: without attention."
    panels = figure.subplots(1, len(results["sweeps"]), squeeze=False, sharey=True)[0]
    for panel, (sweep, points) in zip(panels, results["sweeps"].items()):
        x = [x_of(sweep, p) for p in points]
        for name, colour in zip(PHASES, COLOURS):
            panel.plot(
                x, [p["seconds"][name] for p in points], "o-", color=colour, ms=4, label=f"{name}"
            )
            panel.plot(x, [without(p, name) for p in points], "--", color=colour, lw=1)
        last = points[-1]["seconds"]["update"]
        panel.plot(x, [1.6 * last * n / x[-1] for n in x], ":", color="#999999", label="linear")
        panel.set(
            xscale="log",
            yscale="log",
            xticks=x,
            xticklabels=[f"{n / 1e6:.1f}M" if n >= 2e5 else f"{n:,}" for n in x],
        )
        panel.minorticks_off()
        words = dict(
            prompt="prompt tokens",
            response="response tokens",
            batch="rows",
            model="parameters, embedding aside",
        )
        common.plain(panel, f"by {sweep}", words[sweep], "")
    panels[0].set_ylabel("seconds (dashed: attention aside)")
    panels[0].legend(fontsize=7, frameon=False, loc=(0.03, 0.12))


def main(words: list[str] | None = None) -> dict:
    "Measure, write, print."
    parser = common.parser_of(__doc__, "scaling")
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="counted updates of each point, at least 5 (default 5)",
    )
    asked = common.parsed(parser, words)
    sweeps = {name: SWEEPS[name] for name in asked.sweeps}
    if asked.quick:
        asked.rounds, sweeps = (
            1,
            dict(
                batch=[QUICK, QUICK | dict(batch=6, micro=6)],
                response=[QUICK, QUICK | dict(response=8)],
            ),
        )
    results = dict(
        environment=environment(asked.under_load),
        quick=asked.quick,
        threads=asked.threads,
        sweeps={name: measure(sweep, asked.rounds) for name, sweep in sweeps.items()},
    )
    results["exponents"] = {
        name: exponents(name, points) for name, points in results["sweeps"].items()
    }
    results["checks"] = checks(results)
    return common.told(results, asked, [table(results)], draw, (1 + 3 * len(sweeps), 3.6))


if __name__ == "__main__":
    main()
