"""What one PPO update takes of a GPU's memory, against what `rlhf-nb ppo --dry_run` said it would
take.

    python benchmarks/gpu_memory.py            pythia-1b's shape, with and without recomputed
                                                activations: minutes, one GPU of 80 GB
    python benchmarks/gpu_memory.py --micro 4  smaller micro-batches, for a smaller GPU
    python benchmarks/gpu_memory.py --cpu      pythia-160m's shape in float32 on a CPU: 5 minutes
                                                with --threads 2, 8 GiB
    python benchmarks/gpu_memory.py --quick    does it run? Tiny models on a CPU, and figures that
                                                mean nothing

NOT YET RUN on a GPU: none was at hand. When it has been, keep the JSON file it writes and take
this paragraph out.

Policy, value model, reward model and reference of the shape of pythia-1b with random weights
(nothing is downloaded), prompts of 512 tokens, responses of 53, 16 episodes in micro-batches of 8,
bf16. Two updates by a real PPOTrainer; the second, which meets the optimizer's state, is measured,
phase by phase. The trainer's rollout samples and then asks policy, reference and value model, so
that it stands against the larger of the plan's rollout and score; its score asks the reward model.

Measured: the most that torch had allocated at a time in each phase, against the plan's rows
without its allowance; and the most that torch had reserved, with what the CUDA context took beside
it, against the plan's peak, allowance included. Both wanted within 15 %. On a CPU live tensor
bytes stand for the first (`Ledger` of memory.py), and there is nothing to stand for the second.
There the trainer is told to go the way that it goes on a GPU by itself: rows as they are padded,
and no forward pass kept from the rollout for the update.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import torch
from common import COLOURS, SMALL, at_most, environment, title
from memory import Ledger

PYTHIA = SMALL | dict(
    family="neox",
    hidden=2048,
    layers=16,
    heads=8,
    inner=8192,
    vocab=50304,
    prompts=[512, 512],
    response=53,
    batch=16,
    micro=8,
    epochs=1,
    device="cuda",
)
ON_CPU = PYTHIA | dict(hidden=768, layers=12, heads=12, inner=3072, batch=4, micro=2, device="cpu")
QUICK = PYTHIA | dict(
    hidden=64,
    layers=2,
    heads=2,
    inner=256,
    vocab=512,
    prompts=[32, 32],
    response=16,
    batch=8,
    micro=4,
    device="cpu",
)
OF_PLAN = dict(
    rollout=("rollout", "score"), score=("score",), update=("update",)
)  # the trainer's phase, and the plan's
OFF = 0.15  # wanted at most, of what was measured


def planned(s: dict, checkpointing: bool, gpu: float | None) -> Any:
    "The plan, as --dry_run makes it."
    from rlhf_nb.memory import plan_memory

    policy, reward, value = (common.make_config(s, name) for name in ("policy", "reward", "value"))
    return plan_memory(
        policy,
        reward,
        value,
        prompt_length=max(s["prompts"]),
        response_length=s["response"],
        per_device_train_batch_size=s["micro"],
        gradient_accumulation_steps=s["batch"] // s["micro"],
        local_rollout_forward_batch_size=s["batch"],
        precision="bf16" if s["device"] == "cuda" else "float32",
        activation_checkpointing=checkpointing,
        gpu_memory=gpu,
    )


def point(s: dict, checkpointing: bool, threads: int) -> dict:
    """Two updates in this process; bytes of the second by phase, the plan's, and those of the whole
    process on the GPU."""
    torch.set_num_threads(threads)
    gpu, ledger, phases = s["device"] == "cuda", Ledger(s["vocab"], s["hidden"]), {}

    @contextmanager
    def around(name: str) -> Iterator[None]:
        if gpu:
            torch.cuda.reset_peak_memory_stats()
            yield
            phases[name] = torch.cuda.max_memory_allocated()
        else:
            ledger.begin()
            with ledger:
                yield
            phases[name] = ledger.told()["total"]

    with tempfile.TemporaryDirectory() as folder, common.dice(s):
        trainer = common.make_trainer(
            s,
            Path(folder),
            common.in_phases(around),
            activation_checkpointing=checkpointing,
            trim_padding=False,
        )
        for m in (
            trainer.model,
            trainer.ref_model,
            *trainer.judges.judges.values(),
        ):
            for x in (*m.parameters(), *m.buffers()):
                ledger.hold(x)
        for _ in range(2):
            trainer.step()
        whole = None
        if gpu:
            free, size = torch.cuda.mem_get_info()
            context = size - free - torch.cuda.memory_reserved()
            whole = dict(
                reserved=torch.cuda.max_memory_reserved(),
                context=context,
                gpu=size,
                name=torch.cuda.get_device_name(),
            )
    plan = planned(s, checkpointing, whole and whole["gpu"] / 2**30)
    rows = {
        name: {row: x for row, x in plan.phases[name].items() if row != "allowance"}
        for name in plan.phases
    }
    return dict(
        setting=s,
        checkpointing=checkpointing,
        whole=whole,
        peak_planned=plan.peak,
        verdict=plan.verdict,
        rows=rows,
        measured={name: phases[name] for name in OF_PLAN},
        planned={
            name: max(sum(rows[of].values()) for of in those) for name, those in OF_PLAN.items()
        },
    )


def points(s: dict, threads: int) -> list[dict]:
    """With and without recomputed activations, one after the other, on a GPU each in a process of
    its own."""
    if s["device"] == "cpu":
        return [point(s, checkpointing, threads) for checkpointing in (True, False)]
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        return [
            pool.submit(point, s, checkpointing, threads).result()
            for checkpointing in (True, False)
        ]


# ---- Telling ----


def checks(results: dict) -> list[dict]:
    "How far the plan's largest phase is off, and, on a GPU, its peak with the allowance."
    found = []
    for p in results["points"]:
        which = "recomputed activations" if p["checkpointing"] else "kept activations"
        off = max(p["planned"].values()) / max(p["measured"].values()) - 1
        found.append(at_most(f"{which}: plan's tensors, off by", abs(off), OFF, ".1%"))
        if p["whole"]:
            off = p["peak_planned"] / (p["whole"]["reserved"] + p["whole"]["context"]) - 1
            found.append(
                at_most(f"{which}: plan's peak, allowance included, off by", abs(off), OFF, ".1%")
            )
    return found


def table(results: dict) -> Any:
    "A row for each phase, GiB."
    from rich.table import Table

    shown = Table(title=title("One PPO update, GiB: planned and measured", results))
    for column in ("activations", "phase", "planned", "measured", "off"):
        shown.add_column(column, justify="left" if column == "phase" else "right")
    gib = lambda x: f"{x / 2**30:.3g}"
    for p in results["points"]:
        for i, name in enumerate(OF_PLAN):
            want, got = p["planned"][name], p["measured"][name]
            shown.add_row(
                "" if i else "recomputed" if p["checkpointing"] else "kept",
                name,
                gib(want),
                gib(got),
                f"{want / got - 1:+.0%}",
            )
        if p["whole"]:
            got = p["whole"]["reserved"] + p["whole"]["context"]
            shown.add_row(
                "",
                "all, with allowance",
                gib(p["peak_planned"]),
                gib(got),
                f"{p['peak_planned'] / got - 1:+.0%}",
            )
        shown.add_section()
    return shown


def draw(results: dict, figure: Any) -> None:
    "Planned rows of the update as a stack, what was measured beside it."
    from rlhf_nb.memory import ROWS

    panels = figure.subplots(1, 2, sharey=True)
    for panel, p in zip(panels, results["points"]):
        below = 0.0
        for (name, x), colour in zip(p["rows"]["update"].items(), COLOURS * 2):
            if x:
                panel.bar("planned", x / 2**30, bottom=below, color=colour, label=ROWS[name])
            below += x / 2**30
        panel.bar(
            "measured",
            p["measured"]["update"] / 2**30,
            color="white",
            edgecolor="black",
            hatch="//",
        )
        common.plain(
            panel, "activations " + ("recomputed" if p["checkpointing"] else "kept"), "", ""
        )
    panels[0].set_ylabel("GiB in the update")
    handles = {
        name: handle for panel in panels for handle, name in zip(*panel.get_legend_handles_labels())
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside right center", fontsize=7, frameon=False
    )


def main(words: list[str] | None = None) -> dict:
    "Measure, write, print."
    parser = common.parser_of(__doc__, "gpu_memory")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="a smaller model, pythia-160m's shape, in float32 on this CPU",
    )
    parser.add_argument(
        "--micro",
        type=int,
        help="rows of a micro-batch, a divisor of 16 (default 8; of 4 and 2 with --cpu)",
    )
    asked = common.parsed(parser, words)
    s = (QUICK if asked.quick else ON_CPU if asked.cpu else PYTHIA) | (
        dict(micro=asked.micro) if asked.micro else {}
    )
    if asked.micro is not None and not (asked.micro > 0 and s["batch"] % asked.micro == 0):
        parser.error(f"--micro is {asked.micro}: give a divisor of {s['batch']}")
    if not (s["device"] == "cpu" or torch.cuda.is_available()):
        parser.error(
            "torch sees no GPU: run this where there is one, or take --cpu for a smaller model on "
            "this CPU"
        )
    if asked.cpu and asked.output == parser.get_default("output"):
        asked.output = asked.output.with_name("gpu_memory_cpu.json")
    results = dict(
        environment=environment(asked.under_load),
        quick=asked.quick,
        points=points(s, asked.threads),
    )
    results["checks"] = checks(results)
    return common.told(results, asked, [table(results)], draw, (8, 3.6))


if __name__ == "__main__":
    main()
