"""Proves the adapter for vLLM on a machine with a GPU: `python benchmarks/vllm_check.py`.

NOT YET RUN on a GPU: the adapter (rlhf_nb/training/engines.py) was written against the published
API of vLLM 0.33 and is tested against a stand-in that speaks it (tests/vllm_stand_in.py).

What it needs: pip install "vllm==0.33.*" (which brings torch 2.14 and wants transformers below
5.21, so 5.20 beside this package), one GPU.

What it checks, each a line that says so or stops with an error: greedy responses against the
package's own sampler (the share of rows that are equal, and the first token of every row); the
engine's log-probs against the trainer's (mean gap, mean weight, largest weight); a changed policy
arrives by sync; stop tokens and length; seconds for a rollout, ours and vLLM's. A Pythia-160m's
shape with random weights: nothing is downloaded.
"""

from __future__ import annotations

import time

import torch
from common import described_parser, make_config, wait_for
from transformers import AutoModelForCausalLM

from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.losses import mismatch
from rlhf_nb.masks import left_pad
from rlhf_nb.sampling import Sampling
from rlhf_nb.training.engines import CachedEngine, VLLMEngine
from rlhf_nb.training.model_loading import train_tokenizer

SHAPE = dict(
    family="neox", vocab=50304, hidden=768, layers=12, heads=12, inner=3072, prompts=[512],
    response=1536,
)  # fmt: skip


def a_policy(dtype: torch.dtype):
    "Random weights, larger than the default: sure enough for greedy responses to be compared."
    torch.manual_seed(0)
    config = make_config(SHAPE, "policy")
    config.initializer_range, config.bos_token_id, config.eos_token_id = 0.08, 0, 0
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def timed(work):
    wait_for("cuda")
    start = time.perf_counter()
    done = work()
    wait_for("cuda")
    return done, time.perf_counter() - start


def compare(policy, drawn, said, rows, temperature) -> dict[str, float]:
    "How far the engine's log-probs are from the trainer's, per token."
    with torch.no_grad():
        parts = [
            response_logprobs(policy, *part, temperature).logprobs
            for part in zip(*(x.split(16) for x in (*rows, drawn.response_ids, drawn.mask)))
        ]
    found = mismatch(torch.cat(parts), said, drawn.mask, cap=None)
    return {name: (found[name] / found["tokens"]).item() for name in ("gap", "weight", "kl")} | {
        "weight_max": found["weight_max"].item()
    }


def check(policy, engine, rows: int, limits: dict[str, float]) -> dict[str, float]:
    "Everything, for one engine. Raises AssertionError where it is not as it should be."
    device, chance = policy.device, torch.Generator().manual_seed(1)
    ids = [
        torch.randint(1, 50000, (int(n),), generator=chance).tolist()
        for n in torch.randint(100, 512, (rows,), generator=chance)
    ]
    prompts = tuple(x.to(device) for x in left_pad(ids, 0))
    ours = CachedEngine(rows)
    ours.sync(policy)
    _, first = timed(lambda: engine.sync(policy))
    table = dict(first_sync_s=first)

    theirs, _ = engine.generate(*prompts, Sampling(53, 0, temperature=0.005))
    mine, _ = ours.generate(*prompts, Sampling(53, 0, temperature=1e-6))
    equal = theirs.response_ids == mine.response_ids
    table["greedy_first_tokens_equal"] = equal[:, 0].float().mean().item()
    table["greedy_rows_equal"] = equal.all(1).float().mean().item()
    assert table["greedy_first_tokens_equal"] >= 0.95, table

    how = Sampling(53, 0, stop_ids=tuple(range(1, 1000)), temperature=0.7)
    (drawn, said), table["vllm_rollout_s"] = timed(lambda: engine.generate(*prompts, how))
    _, table["cached_rollout_s"] = timed(lambda: ours.generate(*prompts, how))
    assert 0 < drawn.stopped.sum() < rows and (drawn.mask.sum(1)[~drawn.stopped] == 53).all()
    table |= compare(policy, drawn, said, prompts, 0.7)
    assert table["gap"] < limits["gap"] and abs(table["weight"] - 1) < limits["weight"], table

    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    stale = compare(policy, *engine.generate(*prompts, how), prompts, 0.7)
    _, table["sync_s"] = timed(lambda: engine.sync(policy))
    fresh = compare(policy, *engine.generate(*prompts, how), prompts, 0.7)
    assert stale["gap"] > 5 * fresh["gap"] and fresh["gap"] < limits["gap"], (stale, fresh)
    return table | {"gap_without_sync": stale["gap"], "gap_with_sync": fresh["gap"]}


def main() -> None:
    args = described_parser(__doc__)
    args.add_argument("--rows", type=int, default=64)
    args.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    args.add_argument("--sleep", action="store_true", help="leave the GPU between rollouts")
    given = args.parse_args()
    dtype = getattr(torch, given.dtype)
    policy = a_policy(dtype).cuda().eval()
    tokenizer = train_tokenizer(["a few words for a tokenizer that nobody asks"])
    engine = VLLMEngine(policy, tokenizer, dtype, max_model_length=1024, sleep=given.sleep)
    limits = dict(
        bfloat16=dict(gap=0.1, weight=0.02),
        float16=dict(gap=0.02, weight=0.01),
        float32=dict(gap=0.01, weight=0.01),
    )[given.dtype]
    try:
        table = check(policy, engine, given.rows, limits)
    finally:
        engine.close()
    print(f"vLLM, {given.dtype}, {given.rows} rows, {torch.cuda.get_device_name()}")
    for name, value in table.items():
        print(f"{name:28s}{value:.5g}")


if __name__ == "__main__":
    main()
