"""A saved policy in a process that knows nothing but its folder: `python reload.py SETTINGS`, where
SETTINGS is JSON with folder, prompts (ids), tokens and device. Prints ids and texts as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def greedy(policy: Any, prompts: list[list[int]], tokens: int, device: Any) -> list[list[int]]:
    "The likeliest next tokens after each prompt, a row at a time and without a cache."
    responses = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(tokens):
            logits = policy(input_ids=torch.tensor([ids], device=device)).logits
            ids.append(int(logits[0, -1].argmax()))
        responses.append(ids[len(prompt) :])
    return responses


def write(
    folder: str,
    prompts: list[list[int]],
    tokens: int,  # of each response
    device: str,
) -> dict[str, Any]:
    "What the saved policy writes, as ids and as text."
    policy: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    responses = greedy(policy.to(device).eval(), prompts, tokens, device)
    return dict(ids=responses, texts=[tokenizer.decode(ids) for ids in responses])


if __name__ == "__main__":
    print(json.dumps(write(**json.loads(sys.argv[1]))))
