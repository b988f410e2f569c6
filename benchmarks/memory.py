"""Peak memory of a PPO update on a CPU: by parameters, batch, tokens and vocabulary, phase by
phase.

    python benchmarks/memory.py                       about 1.5 minutes
    python benchmarks/memory.py --sweeps vocabulary
    python benchmarks/memory.py --quick               does it run? Seconds; the figures mean nothing

One whole update of a real PPOTrainer (rollout, score, advantages, 2 epochs of optimizer steps, so
that the second meets the optimizer's state) at each point, in float32, in a process of its own.
What is varied starts from `small` of ppo_vs_trl.py, 64 rows in one micro-batch; 24 response tokens
where the vocabulary is varied.

Counted are live tensor bytes, each storage once, with the peak of each phase: exact, and the same
in every run. Beside it is the process's peak resident memory, less what it held before the models.
A storage of [vocabulary, hidden] is an embedding, a head, or one's gradient or optimizer state, and
counted by itself; other tensors of the vocabulary hold logits. Checked: none is larger than one
chunk (while sampling, a row for each response); without embeddings and heads, the peak at 151,936
words is at most 1.2 times that at 32,000.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import resource
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import torch
from common import SMALL, sized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BASE = SMALL | dict(epochs=2)
SWEEPS = {
    "parameters": [BASE | sized(hidden) for hidden in (64, 128, 256)],
    "batch": [BASE | dict(batch=n, micro=n) for n in (16, 32, 64)],
    "tokens": [BASE | dict(response=n) for n in (24, 48, 96)],
    "vocabulary": [BASE | dict(vocab=n, response=24) for n in (4_096, 32_000, 151_936)],
}
QUICK = BASE | dict(
    hidden=16, layers=1, heads=2, inner=32, vocab=64, prompts=[3, 6], response=6, batch=8, micro=8
)  # as many tokens as words would be mistaken
GROWTH = 1.2  # wanted at most, from the second largest vocabulary to the largest


# ---- Counting ----


class Ledger(TorchDispatchMode):
    "Bytes of live storages: `weights` [vocabulary, hidden], other `logits`, and the `rest`."

    def __init__(self, vocab: int, hidden: int):
        super().__init__()
        self.vocab, self.hidden, self.alive = vocab, hidden, {}
        self.now = dict(weights=0, logits=0, rest=0)
        self.begin()

    def begin(self) -> None:
        "A new phase: peaks start from what is alive."
        self.peak, self.total = dict(self.now), sum(self.now.values())
        self.weights = self.now["weights"]
        self.most_logits, self.largest = self.now["logits"], 0

    def account(self, x: torch.Tensor) -> str:
        "By the shape that a storage is first seen in."
        if tuple(x.shape) == (self.vocab, self.hidden):
            return "weights"
        return "logits" if self.vocab in x.shape and x.dim() > 1 else "rest"

    def hold(self, x: torch.Tensor) -> None:
        "Count a storage that was not seen before, until it ends."
        storage, account = x.untyped_storage(), self.account(x)
        key = storage._cdata
        # a transposed weight is no logits
        known = self.alive[key][0] if key in self.alive else account
        if account == known == "logits":
            self.largest = max(self.largest, min(x.numel(), storage.nbytes() // x.element_size()))
        if key in self.alive or not storage.nbytes():
            return

        def ended(_, key=key) -> None:
            account, size, _ = self.alive.pop(key)
            self.now[account] -= size

        self.alive[key] = account, storage.nbytes(), weakref.ref(storage, ended)
        self.now[account] += storage.nbytes()
        self.compare()

    def compare(self) -> None:
        "Keep what is larger than before; `peak`: when logits and rest together are largest."
        if self.now["logits"] + self.now["rest"] > self.peak["logits"] + self.peak["rest"]:
            self.peak = dict(self.now)
        self.total = max(self.total, sum(self.now.values()))
        self.most_logits = max(self.most_logits, self.now["logits"])
        self.weights = max(self.weights, self.now["weights"])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.hold(x)
        return out

    def told(self) -> dict[str, int]:
        "Of this phase, bytes; `largest` is the number of elements of the largest tensor of logits."
        return dict(
            aside=self.peak["logits"] + self.peak["rest"],
            logits=self.most_logits,
            weights=self.weights,
            total=self.total,
            largest=self.largest,
        )


def resident() -> int:
    "Bytes of this process in memory, now; where that is not told, its peak."
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return peak_resident()
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_resident() -> int:
    return round(common.peak_mib() * 2**20)


def models_of(trainer: Any) -> list[torch.nn.Module]:
    return [trainer.model, trainer.ref_model, *trainer.judges.judges.values()]


def needed(trainer: Any, shape: tuple[int, int]) -> int:
    "Bytes of embeddings and heads, and of gradients and Adam's two moments where they learn."
    return sum(
        p.nbytes * (4 if p.requires_grad else 1)
        for m in models_of(trainer)
        for p in m.parameters()
        if tuple(p.shape) == shape
    )


def chunk(s: dict) -> int:
    "Most logits in one tensor: a chunk of the log-probs, or a row a response while sampled."
    from rlhf_nb.fast_logprobs import response_logprobs

    limit = inspect.signature(response_logprobs).parameters["chunk_logits"].default
    return max(limit // s["vocab"], s["batch"]) * s["vocab"]


def point(s: dict) -> dict:
    "One update at one setting, in this process."
    torch.set_num_threads(1)
    before, phases, ledger = resident(), {}, Ledger(s["vocab"], s["hidden"])

    @contextmanager
    def around(name: str) -> Iterator[None]:
        ledger.begin()
        with ledger:
            yield
        phases[name] = ledger.told()

    with tempfile.TemporaryDirectory() as folder, common.dice(s):
        trainer = common.make_trainer(s, Path(folder), common.in_phases(around))
        for m in models_of(trainer):
            for x in (*m.parameters(), *m.buffers()):
                ledger.hold(x)
        trainer.step()
        return dict(
            setting=s,
            phases=phases,
            parameters=sum(p.numel() for p in trainer.model.policy.parameters()),
            vocabulary_weights_needed=needed(trainer, (s["vocab"], s["hidden"])),
            chunk=chunk(s),
            peak=max(p["aside"] for p in phases.values()),
            resident=peak_resident() - before,
        )


def points(settings: list[dict], workers: int) -> list[dict]:
    "Each in a process of its own, two at a time where there are two cores: memory does not mind."
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "common", "rlhf_nb.trainer", "transformers.models.llama.modeling_llama"]
    )
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        return list(pool.map(point, settings))


# ---- Telling ----


def x_of(sweep: str, p: dict) -> int:
    "What a sweep varies."
    s = p["setting"]
    return dict(
        parameters=p["parameters"],
        batch=s["batch"],
        tokens=s["batch"] * s["response"],
        vocabulary=s["vocab"],
    )[sweep]


def checks(results: dict) -> list[dict]:
    "No logits larger than a chunk, at any point; the growth with the vocabulary."
    found = [p for sweep in results["sweeps"].values() for p in sweep]
    worst = max(phase["largest"] / p["chunk"] for p in found for phase in p["phases"].values())
    what = "largest tensor of logits, in chunks, over all points"
    kept = [common.check(what, worst, "at most", 1.0, ".3f")]
    if len(by_vocab := results["sweeps"].get("vocabulary", [])) > 1:
        low, high = by_vocab[-2:]
        words = f"{high['setting']['vocab']:,} words to {low['setting']['vocab']:,}"
        what, growth = f"peak without embedding and head, {words}", high["peak"] / low["peak"]
        kept.append(common.check(what, growth, "at most", GROWTH))
    return kept


def table(results: dict) -> Any:
    "A row for each point, MiB."
    heads = ["varied", "", "rollout", "score", "update", "aside", "logits", "chunks", "process"]
    mib, rows = lambda x: f"{x / 2**20:.0f}", []
    for sweep, found in results["sweeps"].items():
        for p in found:
            most = lambda what, p=p: max(phase[what] for phase in p["phases"].values())
            phases = [mib(p["phases"][name]["aside"]) for name in ("rollout", "score", "update")]
            vocabulary = [mib(most("weights")), mib(most("logits"))]
            chunks = f"{most('largest') / p['chunk']:.2f}"
            figures = [*phases, *vocabulary, chunks, mib(p["resident"])]
            rows.append([sweep, f"{x_of(sweep, p):,}", *figures])
    return common.table(
        common.title("Peak memory of one update, MiB of live tensors", results),
        heads,
        rows,
        "Phases: without embedding and head, their gradients and moments, which are the next "
        "column. Logits: most alive at once, and the largest tensor in chunks. "
        "Process: its peak less what it held before the models were made.",
    )


def main(words: list[str] | None = None) -> dict:
    "Measure, write, print."
    parser, workers = common.parser_of(__doc__, "memory"), min(2, os.cpu_count() or 1)
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--workers", type=int, default=workers, help="processes at a time")
    asked = common.parse(parser, words)
    if asked.workers < 1:
        parser.error(f"--workers is {asked.workers}: give a positive number")
    sweeps = {name: SWEEPS[name] for name in asked.sweeps}
    if asked.quick:
        sweeps = dict(vocabulary=[QUICK, QUICK | dict(vocab=128)])
    # the start of all sweeps is measured once
    settings = list({json.dumps(s): s for sweep in sweeps.values() for s in sweep}.values())
    found = {json.dumps(p["setting"]): p for p in points(settings, asked.workers)}
    results = dict(
        environment=common.environment(asked.under_load),
        quick=asked.quick,
        sweeps={name: [found[json.dumps(s)] for s in sweep] for name, sweep in sweeps.items()},
    )
    results["checks"] = checks(results)
    return common.finish(results, asked, table(results))


if __name__ == "__main__":
    main()
