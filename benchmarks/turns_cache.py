"""Sampling over turns: going on from the cache against reading every context again.

    python benchmarks/turns_cache.py            about 20 minutes on two threads
    python benchmarks/turns_cache.py --quick    does it run? Seconds; the figures mean nothing

A Llama of SmolLM2-135M's shape from random weights, in float32 on the CPU, 32 rows, prompts of 32
tokens, 8 turns of 32 tokens, each answered by 32. A round is one game by each, in turn, after a
short one that is not counted. Greedy, so that both draw the same ids, which is asserted.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import common  # noqa: F401  sets the environment
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf_nb.sampling import Sampling
from rlhf_nb.training.engines import CachedEngine, CachedTalk, Talk

SMOL = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, vocab_size=49152)
HEADS = dict(num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
QUICK = SMOL | dict(hidden_size=72, intermediate_size=96, num_hidden_layers=2, vocab_size=64)


def game(talk: Talk, turns: int, answers: torch.Tensor) -> list[list[int]]:
    "What is drawn over so many turns, each answered by the next answer of its row."
    rows = range(answers.shape[1])
    drawn: list[list[int]] = [[] for _ in rows]
    for turn in range(turns):
        sampled, _ = talk.write()
        new = [ids[keep].tolist() for ids, keep in zip(sampled.response_ids, sampled.mask)]
        drawn = [a + b for a, b in zip(drawn, new)]
        if turn + 1 < turns:
            talk.answer([*rows], [a + b.tolist() for a, b in zip(new, answers[turn])])
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    size = QUICK if given.quick else SMOL
    model = AutoModelForCausalLM.from_config(LlamaConfig(**size, **HEADS)).eval()
    turns, length = (3, 4) if given.quick else (8, 32)
    draw = lambda *shape: torch.randint(0, size["vocab_size"], shape)
    prompts, answers = draw(given.rows, 32).tolist(), draw(turns, given.rows, length)
    settings = Sampling(length, pad_id=0, temperature=0.01, top_k=1)
    engine, here = CachedEngine(given.rows), torch.device("cpu")
    engine.sync(model)
    sides = dict(
        again=lambda: Talk(engine.generate, prompts, settings, here),
        cached=lambda: CachedTalk(model, prompts, settings, here, given.rows),
    )
    game(sides["cached"](), 1, answers)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(given.rounds):
        drawn = {}
        for name, talk in sides.items():
            start = time.perf_counter()
            drawn[name] = game(talk(), turns, answers)
            seconds[name].append(time.perf_counter() - start)
        assert drawn["again"] == drawn["cached"]
        ratio = seconds["again"][-1] / seconds["cached"][-1]
        print(f"round {i + 1}: " + ", ".join(f"{k} {x[-1]:.1f} s" for k, x in seconds.items()))
        print(f"  ratio {ratio:.2f}", flush=True)
    ratios = [a / b for a, b in zip(*seconds.values())]
    print(f"ratio, median of {given.rounds} rounds: {median(ratios):.2f} (wanted: at least 2)")


if __name__ == "__main__":
    main()
