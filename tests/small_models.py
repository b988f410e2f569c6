"Models of transformers too small to wait for; their ids are those of the tokenizer `letters`."

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

IDS = dict(vocab_size=12, pad_token_id=0, eos_token_id=1, bos_token_id=None)
WIDTHS = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
STILL = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # GPT-2 without dropout


def small_config(family: str, **more: object) -> PreTrainedConfig:
    "Of a family by its model_type. GPT-2 takes the sizes by the names of the others."
    return AutoConfig.for_model(family, **IDS | WIDTHS | dict(max_position_embeddings=32) | more)


def small_model(family: str, seed: int = 0, **more: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(small_config(family, **more))


def letter_tokenizer(letters: str) -> PreTrainedTokenizerFast:
    "Of single letters: <pad> is 0, <eos> is 1, the first letter 2."
    known = {word: i for i, word in enumerate(["<pad>", "<eos>", *letters])}
    inner = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    ends = dict(pad_token="<pad>", eos_token="<eos>")
    return PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **ends)
