"""Docstrings of installed packages: what is read and what is not, splits without leaks, a tokenizer
for any text, and the whole pipeline on a slice."""

import gc
import os
import subprocess
import sys
import textwrap

import pytest
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rlhf_nb import tldr
from rlhf_nb.models import (
    drop_long_rows,
    scorer_from,
    tiny_policy,
    train_bpe_tokenizer,
)
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.tldr import (
    DOCSTRING_ASKS,
    docstring_pairs,
    docstrings,
    docstrings_in,
    source_files,
    words_from_prompt,
)
from rlhf_nb.trainer import PPOConfig, PPOTrainer

PACKAGES = [
    "asyncio",
    "email",
    "logging",
    "multiprocessing",
    "transformers",
    "torch",
    "datasets",
]  # all of them are required here


def plain(text):
    return " ".join(text.lower().split())


def write(folder, files):
    "Files below a folder; a dictionary of name and text or bytes."
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
    return folder


def functions(rows):
    "A module with a function for each (first line, body)."
    return "\n".join(
        f"def f{i}():\n    {first + chr(10) * 2 + body!r}" for i, (first, body) in enumerate(rows)
    )


# ---- What is read ----


# catches: a reader that imports (the module would end the process and leave a mark), or that asks
# importlib where a package lies
def test_nothing_is_imported(tmp_path):
    mark = tmp_path / "ran"
    line = next(f"Line {i}." for i in range(200) if _split_of(f"Line {i}.") == "train")
    write(
        tmp_path / "lib",
        {
            "trap/__init__.py": f"'''{line}\n\nThe body.'''\nopen({str(mark)!r}, "
            "'w').close()\nraise SystemExit(3)\n"
        },
    )
    rows = docstrings(train=1, validation=0, test=0, folders=[tmp_path / "lib"])["train"]
    assert rows.to_list() == [
        dict(prompt="The body." + DOCSTRING_ASKS, completion=" " + line, source="trap/__init__.py")
    ]
    assert not mark.exists() and "trap" not in sys.modules


def _split_of(line):
    "The split that the package gives a first line, found by asking it."
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), {"m.py": functions([(line, "A body.")])})
        for split in ("train", "validation", "test"):
            try:
                docstrings(**dict(train=0, validation=0, test=0) | {split: 1}, folders=[folder])
            except ValueError:
                continue
            return split


# catches: the top of a module alone; first lines that run on without an empty line; methods, async
# functions and branches left out; the order of a stack
def test_every_place_where_a_docstring_stands():
    module = '''
        """Module.

        It has a body.
        """
        if True:
            class Thing:
                """Thing.

                    indented code

                Two paragraphs.
                """
                def method(self):
                    """Runs on
                    in the second line.

                    So it is no row."""
                async def later(self):
                    "Later.\\n   \\nA line of spaces is an empty line."
        else:
            try: pass
            except ValueError:
                def handled(): "Handled.\\n\\n\\n\\nFar below."
            finally:
                def last():
                    "Half a row."
                    def inner(): "Inner.\\n\\nInside of a function."
        x = "No docstring.\\n\\nIt is a value."
    '''
    assert docstrings_in(textwrap.dedent(module)) == [
        ("Module.", "It has a body."),
        ("Thing.", "indented code\n\nTwo paragraphs."),
        ("Later.", "A line of spaces is an empty line."),
        ("Handled.", "Far below."),
        ("Inner.", "Inside of a function."),
    ]


# catches: one file of test data that ends the reading; text that no UTF-8 file and no tokenizer can
# hold; latin-1 read as UTF-8; warnings of other people's code
@pytest.mark.parametrize(
    "source, found",
    [
        (b"def broken(:", []),
        (b"x = 1\0", []),
        (b"\xff\xfe", []),
        (b"", []),
        (b"(" * 5000, []),
        (b"-" * 3000 + b"1", []),
        (b"-" * 20000 + b"1", []),
        (b"'A.\n\nB.'", []),
        (rb'"Half.\n\nA pair \ud800."', []),
        ('"Älter.\\n\\nÜber 日本."'.encode(), [("Älter.", "Über 日本.")]),
        ('# coding: latin-1\n"Älter.\\n\\nSchön."'.encode("latin-1"), [("Älter.", "Schön.")]),
        (b'"""Path.\r\n\r\nA \\d it is."""\r\n', [("Path.", r"A \d it is.")]),
    ],
    ids=[
        "syntax",
        "null",
        "encoding",
        "empty",
        "nesting",
        "recursion",
        "memory",
        "newline",
        "surrogate",
        "utf8",
        "latin1",
        "escape",
    ],
)
def test_hostile_files(source, found, recwarn):
    assert docstrings_in(source) == found and not recwarn.list


# catches: the standard library's own site-packages read as a package of it, tests of a package by
# prefix (`js` for `json`), paths in the names
def test_where_files_lie(tmp_path):
    write(
        tmp_path / "std",
        {"json/decoder.py": "", "js.py": "", "site-packages/torch/nn.py": "", "json/data.txt": ""},
    )
    write(tmp_path / "site", {"torch/nn.py": "", "json/decoder.py": "1", "json2/a.py": ""})
    folders = [tmp_path / "std", str(tmp_path / "site")]
    assert sorted(source_files(folders=folders)) == [
        "js.py",
        "json/decoder.py",
        "json2/a.py",
        "torch/nn.py",
    ]
    assert source_files(["json", "js"], folders) == {
        "json/decoder.py": str(tmp_path / "std/json/decoder.py"),
        "js.py": str(tmp_path / "std/js.py"),
    }
    with pytest.raises(ValueError, match=r"no Python file of \['jsn'\].*names"):
        source_files(["json", "jsn"], folders)
    with pytest.raises(ValueError, match="a list of names"):
        source_files("json", folders)


# ---- The data set ----


@pytest.fixture(scope="module")
def real():
    "A slice of what is installed."
    return docstrings(0, 600, 40, 40, packages=PACKAGES, max_prompt=300, max_completion=80)


# catches: a split by row or by module (copied lines and bodies leak), keys that differ by case or
# spacing, limits that are ignored, a prompt without its end
def test_splits_share_no_text(real):
    assert {split: rows.num_rows for split, rows in real.items()} == dict(
        train=600, validation=40, test=40
    )
    owner = {}
    for split, rows in real.items():
        for row in rows:
            assert set(row) == {"prompt", "completion", "source"} and row["prompt"].endswith(
                DOCSTRING_ASKS
            )
            body = row["prompt"].removesuffix(DOCSTRING_ASKS)
            assert (
                0 < len(body) <= 300
                and 1 < len(row["completion"]) <= 81
                and row["completion"][0] == " "
                and row["source"].split("/")[0] in PACKAGES
            )
            for text in (body, row["completion"]):
                assert owner.setdefault(plain(text), split) == split


# catches: a split that looks at the body alone or the line alone (the bridge leaks), duplicates
# thrown out, a split that depends on the seed or on hash()
def test_duplicates_stay_together(tmp_path):
    line = {
        split: next(f"Line {i}." for i in range(200) if _split_of(f"Line {i}.") == split)
        for split in ("train", "test")
    }
    rows = [
        (line["train"], "Same."),
        (line["train"], "Same."),
        (line["train"].upper().replace(" ", "  "), "Other."),
        (line["test"], " same. "),
        (line["test"], "Own."),
    ]
    write(tmp_path, {"m.py": functions(rows)})
    for seed in (0, 1):
        found = docstrings(seed, 3, 0, 1, folders=[tmp_path])
        assert [row["prompt"].removesuffix(DOCSTRING_ASKS) for row in found["train"]] == [
            "Same.",
            "Same.",
            "Other.",
        ]
        assert found["test"]["completion"][:] == [" " + line["test"]] and found["test"]["prompt"][
            0
        ].startswith("Own.")
    with pytest.raises(
        ValueError, match="requested: .*'test': 2.*1 Python files gave .*'test': 1.*request fewer"
    ):
        docstrings(0, 3, 0, 2, folders=[tmp_path])


# catches: os.walk's order, hash() or the global random state in the text; a smaller set that is not
# the beginning of a larger one; a collector left off
def test_the_seed_is_the_text():
    small = dict(packages=["email", "asyncio", "logging"])
    first, less = docstrings(3, 60, 5, 5, **small), docstrings(3, 20, 5, 0, **small)
    code = f"""import importlib.util, sys
spec = importlib.util.spec_from_file_location("alone", {tldr.__file__!r})
sys.modules["alone"] = module = importlib.util.module_from_spec(spec)  # the one file: the rest of the package is slow to import
spec.loader.exec_module(module)
print([row for rows in module.docstrings(3, 60, 5, 5, **{small!r}).values() for row in rows['prompt']])"""
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | dict(PYTHONHASHSEED="1"),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.strip() == str([row for rows in first.values() for row in rows["prompt"]])
    assert (
        less["train"].to_list() == first["train"].to_list()[:20]
        and less["validation"].to_list() == first["validation"].to_list()
        and less["test"].num_rows == 0
    )
    assert (
        docstrings(4, 60, 5, 5, **small)["train"].to_list() != first["train"].to_list()
        and gc.isenabled()
    )


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(train=-1), "not negative"),
        (dict(packages=["no_such_package"]), "no_such_package"),
        (dict(max_prompt=1), "raise max_prompt"),
        (dict(packages=["json"]), "read more packages"),
    ],
    ids=["negative", "package", "limit", "few"],
)
def test_what_cannot_be_had_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        docstrings(**dict(train=50, validation=0, test=0, packages=["json", "logging"]) | given)
    assert gc.isenabled()


# catches: a rejected line that is the chosen one or another line of the same body, lines of another
# split, pairs that lengths give away, a global random state
def test_pairs(real):
    pairs = docstring_pairs(real["train"])
    assert (
        pairs["prompt"][:] == real["train"]["prompt"][:]
        and pairs["chosen"][:] == real["train"]["completion"][:]
    )
    written = {}
    for row in real["train"]:
        written.setdefault(plain(row["prompt"]), set()).add(plain(row["completion"]))
    assert all(
        plain(row["rejected"]) not in written[plain(row["prompt"])] for row in pairs
    ) and set(pairs["rejected"]) <= set(pairs["chosen"])
    assert 0.4 < sum(len(row["chosen"]) > len(row["rejected"]) for row in pairs) / len(pairs) < 0.6
    rows = [
        dict(prompt=f"Body {i}.", completion=" Often." if i else " Once.") for i in range(9)
    ] + [dict(prompt="body  0.", completion=" Often.")]
    with pytest.raises(ValueError, match="all 2 first lines"):
        docstring_pairs(Dataset.from_list(rows))
    assert (
        docstring_pairs(Dataset.from_list(rows[:9]))["rejected"][:] == [" Often."] + [" Once."] * 8
    )
    assert (
        docstring_pairs(real["train"]).to_list()
        == pairs.to_list()
        != docstring_pairs(real["train"], seed=1).to_list()
    )


# catches: an endless draw where every line was written under one body
def test_pairs_that_cannot_be_made(real):
    with pytest.raises(ValueError, match="1 first lines of these 2 rows.*give more rows"):
        docstring_pairs(real["train"].select([0, 0]))


# catches: repeats that count, the prompt's last line as a source of words, a division by zero,
# another order than the given one
def test_words_from_prompt():
    prompts = ["Two words" + DOCSTRING_ASKS, "one two three four five SIX seven"]
    assert words_from_prompt(
        prompts, [" two two summary", "one two three four five six seven eight"], source=["a", "b"]
    ) == [1 / 6, 7 / 8]
    assert words_from_prompt(prompts, ["", "?!"]) == [0, 0] and words_from_prompt(
        prompts[:1], [" two, words."], least=2
    ) == [1]


# ---- The tokenizer ----


@pytest.fixture(scope="module")
def bpe(real):
    return train_bpe_tokenizer(
        [p + c for p, c in zip(real["train"]["prompt"], real["train"]["completion"])], 512
    )


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
    assert (
        again(text)["input_ids"] == bpe(text)["input_ids"]
        and again.decode(again(text)["input_ids"]) == text
    )
    assert again(["a", " the value"], padding=True)["input_ids"][0][0] == bpe.pad_token_id
    assert bpe.decode([*bpe("a")["input_ids"], bpe.eos_token_id], skip_special_tokens=True) == "a"
    with pytest.raises(ValueError, match="at least 258"):
        train_bpe_tokenizer(["a"], 257)


# catches: merges that depend on the order of a hash table
def test_the_texts_are_the_tokenizer(real, bpe):
    texts = [p + c for p, c in zip(real["train"]["prompt"], real["train"]["completion"])]
    assert (
        train_bpe_tokenizer(iter(texts), 512).get_vocab()
        == bpe.get_vocab()
        != train_bpe_tokenizer(texts[:50], 512).get_vocab()
    )


# catches: limits that leave no place for the stop token, pairs judged by one half, a limit of None
# taken for none at all
def test_long_rows_are_dropped(real, bpe):
    count = lambda text: len(bpe(text)["input_ids"])
    kept = drop_long_rows(real["train"], bpe, prompt=64, answer=16)
    assert kept.to_list() == [
        row
        for row in real["train"]
        if count(row["prompt"]) <= 64 and count(row["completion"]) + 1 <= 16
    ]
    pairs = docstring_pairs(real["train"])
    assert drop_long_rows(pairs, bpe, answer=24).to_list() == [
        row for row in pairs if max(count(row["chosen"]), count(row["rejected"])) < 24
    ]
    assert drop_long_rows(pairs, bpe).to_list() == pairs.to_list()
    with pytest.raises(ValueError, match=r"none of 600 rows .*prompt=1 "):
        drop_long_rows(real["train"], bpe, prompt=1)


# ---- The whole pipeline, on a slice ----

SIZES = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)


@pytest.fixture(scope="module")
def tuned(real, bpe, tmp_path_factory):
    """A small model that has imitated for a few steps, its rows, and the losses on held-out rows
    before and after."""
    fits = {split: drop_long_rows(rows, bpe, prompt=96, answer=32) for split, rows in real.items()}
    policy = tiny_policy(bpe, 0, **SIZES)
    args = SFTConfig(
        output_dir=str(tmp_path_factory.mktemp("sft")),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        max_steps=50,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        seed=0,
    )
    trainer = SFTTrainer(policy, args, fits["train"], fits["test"], bpe)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return policy, fits, before, trainer.evaluate()["eval_loss"]


# catches: labels on prompt or padding (a loss that falls by less), rows whose completion does not
# belong to the prompt's end, a tokenizer that the model does not fit
def test_imitation_learns(tuned):
    _, _, before, after = tuned
    assert 5.8 < before < 7.2 and after < before - 1.5  # log 512 is 6.24; 4.0 was seen


# catches: chosen and rejected exchanged, pairs that the encoding loses
def test_a_reward_model_learns_its_pairs(tuned, bpe, small_args):
    policy, fits, _, _ = tuned
    pairs = docstring_pairs(fits["train"].select(range(64)))
    args = small_args(
        RewardConfig, max_steps=30, per_device_train_batch_size=32, learning_rate=1e-2
    )
    trainer = RewardTrainer(scorer_from(policy), args, pairs, pairs, bpe)
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.75


# catches: a reward with the wrong sign, prompts over the positions, columns that do not reach the
# function, padding of the wrong side: nothing rises then
@pytest.mark.slow
def test_ppo_raises_its_score(tuned, bpe, small_args):
    policy, fits, _, _ = tuned
    args = small_args(
        PPOConfig,
        total_episodes=64 * 12,
        per_device_train_batch_size=64,
        num_ppo_epochs=4,
        learning_rate=3e-3,
        response_length=12,
        temperature=1.0,
        normalize_scores=True,
        num_sample_generations=0,
        lr_scheduler_type="constant",
        seed=0,
    )
    trainer = PPOTrainer(
        args, bpe, policy, reward_model=words_from_prompt, train_dataset=fits["train"]
    )
    trainer.train()
    scores = [
        log["objective/raw_scores"]
        for log in trainer.state.log_history
        if "objective/raw_scores" in log
    ]
    assert len(scores) == 12 and sum(scores[-3:]) > 1.4 * sum(scores[:3])
