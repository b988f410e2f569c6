"""A saved policy in a process that knows nothing but its folder: `python reload.py SETTINGS`, where
SETTINGS is JSON with folder, prompts (ids), tokens and device. Prints ids and texts as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def written(
    folder: str,
    prompts: list[list[int]],
    tokens: int,  # of each response
    device: str,
) -> dict[str, Any]:
    "The likeliest next tokens after each prompt, as ids and as text."
    policy: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    policy.to(device).eval()
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(tokens):
            with torch.no_grad():
                logits = policy(input_ids=torch.tensor([ids], device=device)).logits
            ids.append(int(logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return dict(ids=found, texts=[tokenizer.decode(ids) for ids in found])


if __name__ == "__main__":
    print(json.dumps(written(**json.loads(sys.argv[1]))))
