"""A tokenizer for any text, trained on the docstrings of the standard library."""

import ast
import sysconfig
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rlhf_nb.training.model_loading import drop_long_rows, train_bpe_tokenizer

PACKAGES = ["asyncio", "email", "logging", "multiprocessing"]


# ---- A tokenizer for any text ----


@pytest.fixture(scope="module")
def real():
    "Docstrings that have a first line and a body: the body is the prompt."
    rows = []
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(x for name in PACKAGES for x in library.glob(f"{name}/**/*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                line, _, body = (ast.get_docstring(node) or "").partition("\n\n")
                if body:
                    rows.append(dict(prompt=body + "\n\nSummary:", completion=f" {line}"))
    return Dataset.from_list(rows[:600])


@pytest.fixture(scope="module")
def bpe(real):
    return train_bpe_tokenizer([p + c for p, c in zip(real["prompt"], real["completion"])], 512)


# catches: an added space in front, a clean-up of " ," on decoding, an unknown token, <eos> in a
# text read as the stop token, normalisation, lost \r or NUL
@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",))))
@example(text=" a , b ' s . don 't\r\n\t\x00 ")
@example(text="<eos><pad> <eos>")
@example(text="e\u0301 é ﬁ \u2028\ufeff👩\u200d👧 日本")
def test_any_text_comes_back(bpe, text):
    ids = bpe(text, add_special_tokens=False)["input_ids"]
    assert (
        bpe.decode(ids)
        == bpe.decode(ids, skip_special_tokens=True)
        == bpe.batch_decode([ids])[0]
        == text
    )
    assert not {bpe.pad_token_id, bpe.eos_token_id, None} & set(ids)


# catches: pad equal to stop, padding on the right, a vocabulary of another size than was asked for,
# a tokenizer that forgets its settings in a folder
def test_the_tokenizer_is_one_for_ppo(bpe, tmp_path):
    assert (len(bpe), bpe.pad_token, bpe.eos_token, bpe.padding_side, bpe.unk_token) == (
        512,
        "<pad>",
        "<eos>",
        "left",
        None,
    )
    bpe.save_pretrained(tmp_path)
    again, text = AutoTokenizer.from_pretrained(tmp_path), " <eos> , x"
    assert again(text)["input_ids"] == bpe(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text
    assert again(["a", " the value"], padding=True)["input_ids"][0][0] == bpe.pad_token_id
    assert bpe.decode([*bpe("a")["input_ids"], bpe.eos_token_id], skip_special_tokens=True) == "a"
    with pytest.raises(ValueError, match="at least 258"):
        train_bpe_tokenizer(["a"], 257)


# catches: merges that depend on the order of a hash table
def test_the_texts_are_the_tokenizer(real, bpe):
    texts = [p + c for p, c in zip(real["prompt"], real["completion"])]
    assert (
        train_bpe_tokenizer(iter(texts), 512).get_vocab()
        == bpe.get_vocab()
        != train_bpe_tokenizer(texts[:50], 512).get_vocab()
    )


# catches: limits that leave no place for the stop token, pairs judged by one half, a limit of None
# taken for none at all
def test_long_rows_are_dropped(real, bpe):
    count = lambda text: len(bpe(text)["input_ids"])
    assert drop_long_rows(real, bpe, prompt=64, answer=16).to_list() == [
        row for row in real if count(row["prompt"]) <= 64 and count(row["completion"]) + 1 <= 16
    ]
    lines = real["completion"][:]
    pairs = real.add_column("chosen", lines).add_column("rejected", lines[::-1])
    pairs = pairs.remove_columns("completion")
    assert drop_long_rows(pairs, bpe, answer=24).to_list() == [
        row for row in pairs if max(count(row["chosen"]), count(row["rejected"])) < 24
    ]
    assert drop_long_rows(pairs, bpe).to_list() == pairs.to_list()
    with pytest.raises(ValueError, match=r"none of \d+ rows .*prompt=1 "):
        drop_long_rows(real, bpe, prompt=1)
