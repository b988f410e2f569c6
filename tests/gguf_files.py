"A tiny Llama as a GGUF file, as llama.cpp's converter lays it out."

from pathlib import Path

import gguf
import numpy as np

WORDS = ["<pad>", "<|endoftext|>", *"abcdefghij", "ab"]
CHATML = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def write_gguf(path: Path, kind: str = "llama", tokenizer: bool = True) -> Path:
    "Hidden size 16, one layer, byte-level BPE; its pad token is its stop token."
    path.parent.mkdir(parents=True, exist_ok=True)
    out = gguf.GGUFWriter(str(path), kind)
    out.add_name("tiny")
    out.add_context_length(64)
    out.add_embedding_length(16)
    out.add_block_count(1)
    out.add_feed_forward_length(32)
    out.add_head_count(2)
    out.add_head_count_kv(2)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_rope_dimension_count(8)
    out.add_vocab_size(len(WORDS))
    if tokenizer:
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre("gpt-2")
        out.add_token_list(WORDS)
        out.add_token_types([3, 3, *[1] * 11])
        out.add_token_merges(["a b"])
        out.add_eos_token_id(1)
        out.add_bos_token_id(1)
        out.add_pad_token_id(1)
        out.add_chat_template(CHATML)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(WORDS), 16)}
    shapes |= {f"blk.0.attn_{part}": (16, 16) for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}": (32, 16) for part in ("gate", "up")}
    shapes |= {"blk.0.ffn_down": (16, 32)}
    for name, shape in shapes.items():
        out.add_tensor(f"{name}.weight", random.normal(0, 0.2, shape).astype(np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        out.add_tensor(f"{name}.weight", np.ones(16, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
