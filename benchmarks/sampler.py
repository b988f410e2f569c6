"""Tokens per second of the rollout alone: our sampler, transformers' `generate`, and its
`generate_batch` (continuous batching).

    python benchmarks/sampler.py                      about 3 minutes
    python benchmarks/sampler.py --batches 64 --lengths early
    python benchmarks/sampler.py --quick              does it run? Seconds; the figures mean nothing

The policy, prompts (32 to 64 tokens) and lengths (48, or a geometric law with mean 16, cut off at
48) are those of `small` and `early` in ppo_vs_trl.py, in float32 on the CPU, temperature 1, no
top-k, no top-p. A round is one batch by each of the three, in turn, so that all meet the same
moods of the machine; medians of `--rounds` rounds after one that is not counted; ratios are
medians of the rounds' own.

- ours: `CachedEngine.generate`, as PPOTrainer calls it, the whole batch at once.
- generate: `model.generate` on the same left-padded batch, with the stop and pad token as the
peer's trainer gives them.
- generate_batch: its manager, made and started once and not timed, prompts without padding put in
and responses taken out as
  `generate_batch` does in its own loop. As shipped it also makes and starts a manager on every
  call, with a cache of 60 % of the machine's free memory, which takes seconds. Here it is set up
  for this work: a page of the cache for each row, no prefixes shared, since there are none, and at
  most 32 rows and 256 tokens at a time. On a CPU each of its steps masks all queries against all
  keys of all rows, so that all 256 at once would take it 4 times as long; 32 was the best of 8,
  16, 32, 64 (`--at_a_time`).

Lengths are the same on all sides. For the first two, dice around what they draw with (`Dice` in
common.py; `rollout.draw_tokens` and `torch.multinomial`) decide when a row ends; continuous
batching is told the length of each request (`max_new_tokens`), which costs it nothing, and draws
under a stand-in that only keeps stop and pad token from being drawn. Asserted in every round: each
side wrote all responses, with the lengths asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import common
import torch
from common import (
    EOS,
    PAD,
    SMALL,
    Dice,
    at_least,
    environment,
    response_lengths,
    title,
)

SETTINGS = {"full": SMALL, "early": SMALL | dict(mean_length=16)}
QUICK = dict(hidden=16, layers=1, heads=2, inner=32, vocab=64, prompts=[3, 6], response=8)
OTHERS = ("generate", "generate_batch")


# ---- The three ----


class NeverEnds:
    "torch.multinomial that draws neither the pad nor the stop token."

    def __init__(self, draw: Callable[..., torch.Tensor]):
        self.draw = draw

    def __call__(self, probs: torch.Tensor, num_samples: int = 1, **given) -> torch.Tensor:
        drawn = self.draw(probs, num_samples, **given)
        return torch.where(drawn <= EOS, drawn + 2, drawn)


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    "Ids and mask [B, P], padding on the left."
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    return ids, torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts])


def ours(model: Any, prompts: list[list[int]], s: dict) -> Callable[[], list[list[int]]]:
    "The sampler of the trainer."
    from rlhf_nb.rollout import Sampling
    from rlhf_nb.training.engines import CachedEngine

    engine, (ids, mask), how = (
        CachedEngine(len(prompts), nullcontext),
        padded(prompts),
        Sampling(s["response"], PAD, (EOS,), 1.0),
    )
    engine.sync(model)

    def write() -> list[list[int]]:
        drawn, _ = engine.generate(ids, mask, how)
        return [row[keep].tolist() for row, keep in zip(drawn.response_ids, drawn.mask)]

    return write


def generate(model: Any, prompts: list[list[int]], s: dict) -> Callable[[], list[list[int]]]:
    "transformers' own, on a padded batch."
    from transformers import GenerationConfig

    how = GenerationConfig(
        max_new_tokens=s["response"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    ids, mask = padded(prompts)

    def write() -> list[list[int]]:
        rows = model.generate(input_ids=ids, attention_mask=mask.long(), generation_config=how)[
            :, ids.shape[1] :
        ]
        return [row[row != PAD].tolist() for row in rows]

    return write


class Continuous:
    """transformers' continuous batching, ready; closed, its thread ends. Its attention is set for
    it while it writes."""

    def __init__(self, model: Any, prompts: list[list[int]], s: dict, at_a_time: int):
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        how = GenerationConfig(
            max_new_tokens=s["response"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=-1,
            pad_token_id=PAD,
        )
        page, rows = max(16, max(s["prompts"]) + s["response"]), min(at_a_time, len(prompts))
        sizes = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=rows + 2,
            max_requests_per_batch=rows,
            max_batch_tokens=max(256, rows + max(s["prompts"])),
            allow_block_sharing=False,
        )
        self.prompts, self.manager = (
            prompts,
            model.init_continuous_batching(generation_config=how, continuous_batching_config=sizes),
        )
        self.manager.start()

    def write(self, lengths: list[int]) -> list[list[int]]:
        names = [
            self.manager.add_request(p, max_new_tokens=n) for p, n in zip(self.prompts, lengths)
        ]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            answer = self.manager.get_result(timeout=1)
            if answer is None and not self.manager.is_running():
                raise RuntimeError("continuous batching ended early: its log above says why")
            if answer is None:
                continue
            if answer.error is not None:
                raise RuntimeError(f"continuous batching refused a request: {answer.error}")
            if answer.is_finished():
                found[answer.request_id] = answer.generated_tokens
        return [found[name] for name in names]

    def close(self) -> None:
        self.manager.stop(block=True, timeout=30)
        self.manager.destroy()


# ---- Measuring ----


def check_lengths(side: str, rows: list[list[int]], wanted: list[int]) -> None:
    "Raises AssertionError where a side wrote more, less, or other lengths than were asked for."
    found = [len(row) for row in rows]
    assert sorted(found) == sorted(wanted), (
        f"{side} wrote {len(found)} responses, {sum(found)} tokens, wanted {len(wanted)} and "
        f"{sum(wanted)}, lengths {sorted(found)[:8]}..., wanted {sorted(wanted)[:8]}..."
    )


def timed(
    write: Callable[[], list[list[int]]], where: Any, name: str, around: Callable, seed: int
) -> tuple[float, list[list[int]]]:
    "Seconds, and what was written, while `around(draw)` stands for what draws, `where.name`."
    plain = getattr(where, name)
    setattr(where, name, around(plain))
    torch.manual_seed(seed)
    try:
        start = time.perf_counter()
        rows = write()
        return time.perf_counter() - start, rows
    finally:
        setattr(where, name, plain)


def measure(s: dict, rounds: int, at_a_time: int) -> dict:
    "Rounds of one setting, and what they come to."
    from rlhf_nb import rollout

    policy, prompts, lengths = (
        common.make_model(s, "policy").eval(),
        common.make_prompts(s)["input_ids"],
        response_lengths(s),
    )
    apart = common.make_model(
        s, "policy"
    ).eval()  # the same weights: continuous batching sets the attention of its model
    continuous = Continuous(apart, prompts, s, at_a_time)
    seconds: dict[str, list[float]] = dict(ours=[], generate=[], generate_batch=[])
    draws = dict(ours=(rollout, "draw_tokens"), generate=(torch, "multinomial"))
    try:
        for i in range(1 + rounds):
            written = {}
            for side, make in (("ours", ours), ("generate", generate)):
                dice = lambda draw, i=i: Dice(draw, lengths, s["response"], i)
                took, written[side] = timed(make(policy, prompts, s), *draws[side], dice, i)
                if i:
                    seconds[side].append(took)
            took, written["generate_batch"] = timed(
                lambda: continuous.write(lengths), torch, "multinomial", NeverEnds, i
            )
            if i:
                seconds["generate_batch"].append(took)
            for side, rows in written.items():
                check_lengths(side, rows, lengths)
    finally:
        continuous.close()
    return dict(setting=s, tokens=sum(lengths), seconds=seconds, **summary(seconds, sum(lengths)))


def summary(seconds: dict[str, list[float]], count: int) -> dict:
    "Medians; ratios of the same rounds."
    return dict(
        tokens_per_second={side: count / median(times) for side, times in seconds.items()},
        times_faster={
            side: median(theirs / mine for mine, theirs in zip(seconds["ours"], seconds[side]))
            for side in OTHERS
        },
    )


# ---- Telling ----


def checks(results: dict) -> list[dict]:
    "Ahead of both, everywhere."
    return [
        at_least(
            f"{r['name']}, batch {r['setting']['batch']}: times {side}",
            r["times_faster"][side],
            1.0,
        )
        for r in results["runs"]
        for side in OTHERS
    ]


def table(results: dict) -> Any:
    "A row for each setting."
    from rich.table import Table

    shown = Table(
        title=title("The rollout alone, tokens per second", results),
        caption="×: how many times faster ours is.",
    )
    for name in ("lengths", "batch", "ours", "generate", "×", "generate_batch", "×"):
        shown.add_column(name, justify="left" if name == "lengths" else "right")
    for r in results["runs"]:
        speed, times = r["tokens_per_second"], r["times_faster"]
        shown.add_row(
            r["name"],
            str(r["setting"]["batch"]),
            f"{speed['ours']:,.0f}",
            f"{speed['generate']:,.0f}",
            f"{times['generate']:.2f}",
            f"{speed['generate_batch']:,.0f}",
            f"{times['generate_batch']:.2f}",
        )
    return shown


def main(words: list[str] | None = None) -> dict:
    "Measure, write, print."
    parser = common.parser_of(__doc__, "sampler")
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--lengths", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument(
        "--rounds", type=int, default=5, help="counted batches of each side, at least 5 (default 5)"
    )
    parser.add_argument(
        "--at_a_time",
        type=int,
        default=32,
        help="most rows of a step of continuous batching (default 32)",
    )
    asked = common.parsed(parser, words)
    if asked.at_a_time < 1:
        parser.error(f"--at_a_time is {asked.at_a_time}: give a positive number of rows")
    if min(asked.batches) < 1:
        parser.error(f"--batches is {asked.batches}: give positive numbers of rows")
    if asked.quick:
        asked.batches, asked.rounds = [4], 1
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    results = dict(
        environment=environment(asked.under_load),
        quick=asked.quick,
        threads=asked.threads,
        at_a_time=asked.at_a_time,
        runs=[],
    )
    for name in asked.lengths:
        for batch in asked.batches:
            s = SETTINGS[name] | dict(batch=batch, micro=batch)
            if asked.quick:
                s |= QUICK | dict(mean_length=s["mean_length"] and 4)
            results["runs"].append(dict(name=name, **measure(s, asked.rounds, asked.at_a_time)))
    results["checks"] = checks(results)
    return common.told(results, asked, table(results))


if __name__ == "__main__":
    main()
