"Models of transformers too small to wait for; their ids are those of the tokenizer `letters`."

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

IDS = dict(vocab_size=12, pad_token_id=0, eos_token_id=1, bos_token_id=None)
WIDTHS = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
STILL = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # GPT-2 without dropout


def small_config(family: str, **more: object) -> PreTrainedConfig:
    "Of a family by its model_type. GPT-2 takes the sizes by the names of the others."
    return AutoConfig.for_model(family, **IDS | WIDTHS | dict(max_position_embeddings=32) | more)


def small_model(family: str, seed: int = 0, **more: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(small_config(family, **more))
