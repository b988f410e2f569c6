"""Tokens per second of the rollout alone: our sampler, transformers' `generate`, and its
`generate_batch` (continuous batching).

    python benchmarks/sampler.py                      about 3 minutes
    python benchmarks/sampler.py --batches 64 --lengths early
    python benchmarks/sampler.py --quick              does it run? Seconds; the figures mean nothing

The policy, prompts (32 to 64 tokens) and lengths (48, or a geometric law with mean 16, cut off at
48) are those of `small` and `early` in ppo_vs_trl.py, in float32 on the CPU, temperature 1, no
top-k, no top-p. A round is one batch by each of the three, in turn, after one that is not counted.

- ours: `CachedEngine.generate`, as PPOTrainer calls it, the whole batch at once.
- generate: `model.generate` on the same left-padded batch.
- generate_batch: its manager, made and started once and not timed (as shipped it makes one a call,
  which takes seconds), with a page of the cache for each row, no prefixes shared, and at most 32
  rows (the best of 8, 16, 32, 64: `--at_a_time`) and 256 tokens at a time.

Asserted in every round: each side wrote all responses, with the lengths asked for (`Dice`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import common
import torch
from common import EOS, PAD, SMALL, response_lengths

from rlhf_nb.masks import left_pad

SETTINGS = {"full": SMALL, "early": SMALL | dict(mean_length=16)}
QUICK = dict(hidden=16, layers=1, heads=2, inner=32, vocab=64, prompts=[3, 6], response=8)


# ---- The three ----


def never_ends(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    "torch.multinomial that draws neither the pad nor the stop token."

    def drawn(probs: torch.Tensor, num_samples: int = 1, **given: Any) -> torch.Tensor:
        ids = draw(probs, num_samples, **given)
        return torch.where(ids <= EOS, ids + 2, ids)

    return drawn


def generation(s: dict, eos: int) -> Any:
    "Temperature 1, no top-k, no top-p."
    from transformers import GenerationConfig

    ids = dict(eos_token_id=eos, pad_token_id=PAD)
    how = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    return GenerationConfig(max_new_tokens=s["response"], **how, **ids)


def ours(model: Any, prompts: list[list[int]], s: dict) -> Callable[[], list[list[int]]]:
    "The sampler of the trainer."
    from rlhf_nb.sampling import Sampling
    from rlhf_nb.training.engines import CachedEngine

    ids, mask = left_pad(prompts, PAD)
    engine, how = CachedEngine(len(prompts), nullcontext), Sampling(s["response"], PAD, (EOS,), 1.0)
    engine.sync(model)

    def write() -> list[list[int]]:
        drawn, _ = engine.generate(ids, mask, how)
        return [row[keep].tolist() for row, keep in zip(drawn.response_ids, drawn.mask)]

    return write


def generate(model: Any, prompts: list[list[int]], s: dict) -> Callable[[], list[list[int]]]:
    "transformers' own, on a padded batch."
    ids, mask = left_pad(prompts, PAD)

    def write() -> list[list[int]]:
        rows = model.generate(
            input_ids=ids, attention_mask=mask.long(), generation_config=generation(s, EOS)
        )
        return [row[row != PAD].tolist() for row in rows[:, ids.shape[1] :]]

    return write


class Continuous:
    "transformers' continuous batching, ready, with attention of its own; closed, its thread ends."

    def __init__(self, model: Any, prompts: list[list[int]], s: dict, at_a_time: int):
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        page, rows = max(16, max(s["prompts"]) + s["response"]), min(at_a_time, len(prompts))
        sizes = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=rows + 2,
            max_requests_per_batch=rows,
            max_batch_tokens=max(256, rows + max(s["prompts"])),
            allow_block_sharing=False,
        )
        self.prompts = prompts
        self.manager = model.init_continuous_batching(
            generation_config=generation(s, -1), continuous_batching_config=sizes
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
    write: Callable[[], list[list[int]]], drawing: AbstractContextManager, seed: int
) -> tuple[dict[str, float], list[list[int]]]:
    "Seconds, and what was written, while something stands for what draws."
    with drawing:
        torch.manual_seed(seed)
        start = time.perf_counter()
        rows = write()
        return dict(seconds=time.perf_counter() - start), rows


def measure(s: dict, rounds: int, at_a_time: int) -> dict:
    "Rounds of one setting, and what they come to."
    policy, apart = (common.make_model(s, "policy").eval() for _ in range(2))
    prompts, lengths = common.make_prompts(s)["input_ids"], response_lengths(s)
    continuous = Continuous(apart, prompts, s, at_a_time)  # it sets the attention of its model
    sides: dict[str, tuple] = dict(
        ours=(ours(policy, prompts, s), lambda i: common.dice(s, i, "ours")),
        generate=(generate(policy, prompts, s), lambda i: common.dice(s, i, "generate")),
        generate_batch=(
            lambda: continuous.write(lengths),
            lambda i: common.drawing(torch, "multinomial", never_ends),
        ),
    )
    found: dict[str, list[dict]] = {side: [] for side in sides}
    try:
        for i in range(1 + rounds):
            for side, (write, drawing) in sides.items():
                took, rows = timed(write, drawing(i), i)
                check_lengths(side, rows, lengths)
                found[side] += [took] * bool(i)
    finally:
        continuous.close()
    count, middle = sum(lengths), common.medians(found, "seconds")
    return dict(
        setting=s,
        tokens=count,
        seconds={side: [x["seconds"] for x in rounds] for side, rounds in found.items()},
        tokens_per_second={side: count / x for side, x in middle.items()},
        times_faster=common.times_ours(found, "seconds"),
    )


# ---- Telling ----


def checks(results: dict) -> list[dict]:
    "Ahead of both, everywhere."
    return [
        common.check(
            f"{r['name']}, batch {r['setting']['batch']}: times {side}", times, "at least", 1.0
        )
        for r in results["runs"]
        for side, times in r["times_faster"].items()
    ]


def table(results: dict) -> Any:
    "A row for each setting."
    heads = ["lengths", "batch", "ours", "generate", "×", "generate_batch", "×"]
    rows = []
    for r in results["runs"]:
        speed, times = r["tokens_per_second"], r["times_faster"]
        pairs = [(f"{speed[side]:,.0f}", f"{x:.2f}") for side, x in times.items()]
        figures = [f"{speed['ours']:,.0f}", *(text for pair in pairs for text in pair)]
        rows.append([r["name"], str(r["setting"]["batch"]), *figures])
    title = common.title("The rollout alone, tokens per second", results)
    return common.table(title, heads, rows, "×: how many times faster ours is.")


def main(words: list[str] | None = None) -> dict:
    "Measure, write, print."
    parser = common.parser_of(__doc__, "sampler", rounds=5)
    add = parser.add_argument
    add("--batches", nargs="+", type=int, default=[16, 64, 256])
    add("--lengths", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    add("--at_a_time", type=int, default=32, help="most rows of a step of continuous batching")
    asked = common.parse(parser, words)
    if min(asked.at_a_time, *asked.batches) < 1:
        parser.error("--at_a_time and --batches: give positive numbers of rows")
    if asked.quick:
        asked.batches, asked.rounds = [4], 1
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    made = common.environment(asked.under_load)
    results: dict = dict(environment=made, quick=asked.quick, threads=asked.threads)
    results |= dict(at_a_time=asked.at_a_time, runs=[])
    for name in asked.lengths:
        for batch in asked.batches:
            s = SETTINGS[name] | dict(batch=batch, micro=batch)
            if asked.quick:
                s |= QUICK | dict(mean_length=s["mean_length"] and 4)
            results["runs"].append(dict(name=name, **measure(s, asked.rounds, asked.at_a_time)))
    results["checks"] = checks(results)
    return common.finish(results, asked, table(results))


if __name__ == "__main__":
    main()
