"""Where a PPO update's time goes: by phase, by stage of the update, by kind of operation; and how
near it is to the machine's limit.

    python benchmarks/pipeline.py                     about 2 minutes
    python benchmarks/pipeline.py --hidden 128 --threads 2
    python benchmarks/pipeline.py --quick             does it run? Seconds; the figures mean nothing

Whole updates of a real PPOTrainer, Llama class, 4 layers, vocabulary 4096, prompts of 32 to 64
tokens, 48 response tokens, float32 on the CPU. So that no width takes long: 64 rows and 2 epochs
at hidden 64 and 128, 32 rows and 1 epoch at 256, 16 rows and 1 epoch at 512. Epochs are all alike:
shares of the phases are told for 4 of them, the trainer's default and that of `small` in
ppo_vs_trl.py. The sizes take turns; medians of `--rounds` rounds after one that is not counted.

Stages of the update are told apart by marks, not by a profiler: when a body starts and ends, when
the gradient reaches the log-probs and then each body, and around the optimizer (the norm of the
gradient and its clipping included). What is left is the loss, the metrics and the trainer's own
Python.

Roofline. Necessary FLOPs: every real token through both bodies, causal attention, the head on
response positions alone, times 3 for forward and backward; of the last layer, only keys and values
for every real token, the rest where a state is read. The machine's matrix rate is measured in the
same run with the same threads, before, between and after, best of many passes: products of these
very shapes, and one of 1024 x 1024 x 1024. The ratio is necessary FLOPs over update seconds over
rate.

What holds the rest: one more update phase under torch's profiler. Each operation's own time goes
to matrix products, attention, the vocabulary (softmax and log-probs: operations on a tensor with a
dimension of the vocabulary, the optimizer's excepted), the optimizer, the body's element-wise work
(embedding, norms, activations, rotary: tensors that end in a dimension of the model), or the loss
and masks. Operations that only make or view a tensor count as dispatch, and so does all time of
the update outside of operations: Python, autograd, dispatch. That time is taken from the
unprofiled median, since the profiler itself slows down what is not an operation.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import common
import torch
from common import (
    COLOURS,
    PHASES,
    SMALL,
    at_least,
    environment,
    necessary_flops,
    rate,
    shapes,
    sized,
    title,
)
from torch.profiler import ProfilerActivity, profile, record_function

WORK = {64: (64, 2), 128: (64, 2), 256: (32, 1), 512: (16, 1)}  # hidden -> rows, epochs
SETTINGS = {
    hidden: SMALL | sized(hidden) | dict(batch=rows, micro=rows, epochs=epochs)
    for hidden, (rows, epochs) in WORK.items()
}
QUICK = SMALL | dict(
    hidden=16,
    layers=1,
    heads=2,
    inner=32,
    vocab=64,
    prompts=[3, 6],
    response=8,
    batch=8,
    micro=8,
    epochs=1,
)
STAGES = {
    "bodies": "bodies",
    "head": "head and log-probs",
    "optimizer": "optimizer",
    "rest": "loss, metrics, the trainer's Python",
}
GROUPS = {
    "products": "matrix products",
    "attention": "attention",
    "vocabulary": "softmax and log-probs",
    "body": "element-wise of the body",
    "optimizer": "optimizer",
    "loss": "loss and masks",
    "dispatch": "Python and dispatch",
}
WANTED, FROM = 0.75, 128  # share of the matrix rate, from this width on
VIEWS = {
    f"aten::{name}"
    for name in (
        "view",
        "reshape",
        "_reshape_alias",
        "transpose",
        "t",
        "permute",
        "slice",
        "select",
        "as_strided",
        "expand",
        "expand_as",
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
        "empty",
        "empty_like",
        "empty_strided",
        "_unsafe_view",
        "unbind",
        "split",
        "narrow",
        "resize_",
        "set_",
        "result_type",
        "item",
        "_local_scalar_dense",
        "is_nonzero",
        "to",
        "lift_fresh",
    )
}
PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "matmul",
    "linear",
    "mv",
    "addmv",
    "dot",
    "mkldnn_linear",
    "mkl_linear",
)


# ---- Counting ----


def group(name: str, shapes: Iterable, s: dict, optimizing: bool) -> str:
    "What kind of work an operation is, by its name and the shapes of what it gets."
    if not name.startswith("aten::") or name in VIEWS:
        return "dispatch"
    if optimizing:
        return "optimizer"
    if name.removeprefix("aten::") in PRODUCTS:
        return "products"
    if "scaled_dot_product" in name:
        return "attention"
    if "embedding" in name:
        return "body"
    found = [
        tuple(x)
        for x in shapes
        if isinstance(x, (list, tuple)) and x and all(isinstance(n, int) for n in x)
    ]
    if any(s["vocab"] in x for x in found):
        return "vocabulary"
    head = s["hidden"] // s["heads"]
    if any(x[-1] in (s["hidden"], s["inner"], head, head // 2) and len(x) > 1 for x in found):
        return "body"
    return "loss"


def grouped(events: Iterable, s: dict) -> dict[str, float]:
    """Seconds of each kind of operation, from a profile of the update phase in which `stage:
    optimizer` is recorded."""
    found = defaultdict(float)
    for event in events:
        outer = event
        while outer is not None and outer.name != "stage: optimizer":
            outer = outer.cpu_parent
        found[group(event.name, event.input_shapes or (), s, outer is not None)] += (
            event.self_cpu_time_total / 1e6
        )
    return dict(found)


def shares(found: dict[str, float], seconds: float) -> dict[str, float]:
    """Of the update's seconds; what is in no operation is Python and dispatch. Operations that the
    profiler slowed down are scaled to fit."""
    work = {name: found.get(name, 0.0) for name in GROUPS if name != "dispatch"}
    whole = max(seconds, sum(work.values()))
    return {name: x / whole for name, x in work.items()} | dict(
        dispatch=1 - sum(work.values()) / whole
    )


def of_four(phases: dict[str, float], epochs: int) -> dict[str, float]:
    "Each phase's share of an update of 4 epochs, from one of other epochs."
    told = phases | dict(update=phases["update"] * 4 / epochs)
    return {name: x / sum(told.values()) for name, x in told.items()}


def staged(clock: common.Clock, around: Any) -> type:
    "Our trainer, its phases inside `around` and the stages of its update marked on a clock."

    class Staged(common.in_phases(around)):
        def update(self, r):
            clock.mark("rest")
            try:
                return super().update(r)
            finally:
                clock.mark(None)

        def make_forward(self):
            return MarkedForward(super().make_forward(), clock)

        def optimizer_step(self, model):
            clock.mark("optimizer")
            with record_function("stage: optimizer"):
                norm = super().optimizer_step(model)
            clock.mark("rest")
            return norm

    return Staged


class MarkedForward:
    "`trainer.forward`, with a mark before each call for a gradient and at the head's backward."

    def __init__(self, inner: Any, clock: common.Clock):
        self.inner, self.clock = inner, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *given, **options) -> Any:
        if torch.is_grad_enabled():
            self.clock.mark("rest")  # until now the backward pass of the micro-batch before ran
        outputs = self.inner(*given, **options)
        if outputs.logprobs.requires_grad:
            outputs.logprobs.register_hook(lambda _: self.clock.mark("head"))
        return outputs


def mark_bodies(trainer: Any, clock: common.Clock) -> None:
    """Marks where a body of policy or value model starts and ends, forward and backward, while
    gradients are wanted."""

    def starts(*_) -> None:
        if torch.is_grad_enabled():
            clock.mark("bodies")

    def ends(then: str):
        def hook(module, args, output) -> None:
            if not torch.is_grad_enabled():
                return
            clock.mark(then)
            if output.last_hidden_state.requires_grad:
                output.last_hidden_state.register_hook(lambda _: clock.mark("bodies"))

        return hook

    for model, then in (
        (trainer.model.policy.get_decoder(), "head"),
        (trainer.model.value.base_model, "rest"),
    ):
        model.register_forward_pre_hook(starts)
        model.register_forward_hook(ends(then))


# ---- Measuring ----


class Size:
    "A trainer of one size, and what its updates took."

    def __init__(self, s: dict, folder: Path):
        self.s, self.phases, self.stages, self.rounds, self.rates = (
            s,
            common.Clock(),
            common.Clock(),
            [],
            [],
        )
        self.trainer = common.make_trainer(s, folder, staged(self.stages, self.phases))
        mark_bodies(self.trainer, self.stages)

    def turn(self, counted: bool) -> None:
        with common.dice(self.s):
            self.trainer.step()
        found = dict(phases=self.phases.read(), stages=self.stages.read())
        if counted:
            self.rounds.append(found)

    def ask_rates(self, seconds: float) -> None:
        self.rates.append([rate(shapes(self.s), seconds), rate([[1024, 1024, 1024]], seconds)])

    def profiled(self) -> dict[str, float]:
        "Seconds by kind of operation, of one update phase."
        trainer = self.trainer
        with common.dice(self.s):
            r = trainer.advantages(trainer.score(trainer.rollout(trainer.next_batch())))
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            trainer.update(r)
        return grouped(found.events(), self.s)

    def told(self) -> dict:
        middle = lambda what, names: {
            name: median(r[what].get(name, 0.0) for r in self.rounds) for name in names
        }
        phases, flops, all_of_it = (
            middle("phases", PHASES),
            necessary_flops(self.s),
            necessary_flops(self.s, everywhere=True),
        )
        rates = dict(zip(("own_shapes", "large"), map(max, zip(*self.rates))))
        operations = self.profiled()
        return dict(
            setting=self.s,
            phases=phases,
            phase_shares=of_four(phases, self.s["epochs"]),
            stages=middle("stages", STAGES),
            rounds=self.rounds,
            necessary_gflop=flops / 1e9,
            rate=rates,
            share_of_rate={name: flops / phases["update"] / x for name, x in rates.items()},
            share_with_all_of_the_last_layer=all_of_it / phases["update"] / rates["own_shapes"],
            operations=operations,
            shares=shares(operations, phases["update"]),
        )


def measure(settings: list[dict], rounds: int, seconds: float) -> list[dict]:
    "All sizes, in turn."
    with tempfile.TemporaryDirectory() as folder:
        sizes = [Size(s, Path(folder) / str(i)) for i, s in enumerate(settings)]
        for i in range(1 + rounds):
            for size in sizes:
                if i in (0, (rounds + 1) // 2, rounds):
                    size.ask_rates(seconds)
                size.turn(i > 0)
        return [size.told() for size in sizes]


# ---- Telling ----


def checks(results: dict) -> list[dict]:
    "The share of the matrix rate, from the width on for which it is wanted; of both rates."
    words = dict(own_shapes="rate at these shapes", large="rate at 1024 cubed")
    return [
        at_least(
            f"hidden {r['setting']['hidden']}: update, of the {words[name]}", share, WANTED, ".0%"
        )
        for r in results["runs"]
        if r["setting"]["hidden"] >= FROM or results["quick"]
        for name, share in r["share_of_rate"].items()
    ]


def tables(results: dict) -> list:
    "Phases, stages and roofline; and what the update's time goes to."
    from rich.table import Table

    widths = [f"hidden {r['setting']['hidden']}" for r in results["runs"]]

    def made(text: str, note: str, *parts: list) -> Any:
        shown = Table(title=title(text, results), caption=note)
        for name in ("", *widths):
            shown.add_column(name, justify="right" if name else "left")
        for part in parts:
            for i, (name, cells) in enumerate(part):
                shown.add_row(name, *cells, end_section=i + 1 == len(part))
        return shown

    every = lambda of: [of(r) for r in results["runs"]]
    cell = lambda seconds, share: f"{seconds:.2f} s {share:4.0%}"
    phases = [
        (name, every(lambda r, name=name: cell(r["phases"][name], r["phase_shares"][name])))
        for name in PHASES
    ]
    stages = [
        (
            words,
            every(
                lambda r, name=name: cell(
                    r["stages"][name], r["stages"][name] / r["phases"]["update"]
                )
            ),
        )
        for name, words in STAGES.items()
    ]
    roof = [
        ("necessary GFLOP", every(lambda r: f"{r['necessary_gflop']:.0f}")),
        (
            "matrix rate, own shapes / 1024³, GFLOP/s",
            every(lambda r: " / ".join(f"{x / 1e9:.0f}" for x in r["rate"].values())),
        ),
        (
            "update, of these rates",
            every(lambda r: " / ".join(f"{x:.0%}" for x in r["share_of_rate"].values())),
        ),
        (
            "the same, had the last layer to be whole",
            every(lambda r: f"{r['share_with_all_of_the_last_layer']:.0%}"),
        ),
    ]
    kinds = [
        (words, every(lambda r, name=name: f"{r['shares'][name]:.1%}"))
        for name, words in GROUPS.items()
    ]
    ideal = [
        (
            "necessary FLOPs at the rate of these shapes",
            every(lambda r: f"{r['share_of_rate']['own_shapes']:.1%}"),
        )
    ]
    notes = (
        "Phases: seconds as measured, shares of an update of 4 epochs. Stages: of the update "
        "phase.",
        "The last row holds attention too. What products and attention have beyond it: padding, "
        "logits worked out again, and rates below that one.",
    )
    return [
        made("Where a PPO update's time goes", notes[0], phases, stages, roof),
        made("What the update phase does", notes[1], kinds, ideal),
    ]


def draw(results: dict, figure: Any) -> None:
    "Stacked bars: phases, stages, kinds of operation; and the roofline."
    panels, runs = figure.subplots(1, 4), results["runs"]
    names = [str(r["setting"]["hidden"]) for r in runs]

    def stacked(panel: Any, text: str, words: dict[str, str], of) -> None:
        low = [0.0] * len(runs)
        for (name, label), colour in zip(words.items(), COLOURS):
            parts = [of(r, name) for r in runs]
            panel.bar(names, parts, 0.7, low, color=colour, label=label)
            low = [a + b for a, b in zip(low, parts)]
        common.plain(panel, text, "hidden", "").set_ylim(0, 1)
        panel.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)

    stacked(
        panels[0],
        "phases (4 epochs)",
        {name: name for name in PHASES},
        lambda r, name: r["phase_shares"][name],
    )
    stacked(
        panels[1],
        "stages of the update",
        STAGES,
        lambda r, name: r["stages"][name] / sum(r["stages"].values()),
    )
    stacked(panels[2], "what the update does", GROUPS, lambda r, name: r["shares"][name])
    for k, (name, label) in enumerate(
        dict(own_shapes="at these shapes", large="at 1024 cubed").items()
    ):
        panels[3].plot(
            names,
            [r["share_of_rate"][name] for r in runs],
            "os"[k] + "-",
            color=COLOURS[k],
            label=f"of the rate {label}",
        )
    panels[3].axhline(WANTED, color="#999999", ls=":")
    common.plain(panels[3], "update, of the matrix rate", "hidden", "").set_ylim(0, 1.05)
    panels[3].legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)


def main(words: list[str] | None = None) -> dict:
    "Measure, write, print."
    parser = common.parser_of(__doc__, "pipeline")
    parser.add_argument("--hidden", nargs="+", type=int, choices=WORK, default=list(WORK))
    parser.add_argument(
        "--rounds", type=int, default=5, help="counted updates of each size, at least 5 (default 5)"
    )
    asked = common.parsed(parser, words)
    settings, seconds = [SETTINGS[hidden] for hidden in asked.hidden], 0.4
    if asked.quick:
        asked.rounds, seconds, settings = 1, 0.01, [QUICK, QUICK | dict(hidden=32)]
    results = dict(
        environment=environment(asked.under_load),
        quick=asked.quick,
        threads=asked.threads,
        runs=measure(settings, asked.rounds, seconds),
    )
    results["checks"] = checks(results)
    return common.told(results, asked, tables(results), draw, (11, 4.4))


if __name__ == "__main__":
    main()
