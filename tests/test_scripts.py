"""Scripts for trl's trainers. Those for PPO in `scripts/` keep the constructor calls of public ones;
here their import lines are changed, and nothing else. Each also runs on trl 1.12.0 as it is:

    python tests/scripts/NAME.py rows.jsonl SFT REWARD OUTPUT
"""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file

from rlhf_nb.models import scorer_from

SCRIPTS = Path(__file__).parent / "scripts"
FLAGS = """--dataset_name rows.jsonl --model_name_or_path sft --sft_model_path sft
--reward_model_path reward --output_dir out --per_device_train_batch_size 4 --total_episodes 8
--response_length 4 --learning_rate 1e-2 --missing_eos_penalty 1.0 --num_ppo_epochs 1
--report_to none --use_cpu True --bf16 False""".split()
PARSED = ("three_dataclasses",)  # it reads options; the others four paths


@pytest.fixture(scope="module")
def models(tmp_path_factory, letters):
    "Rows, a policy and a reward model in folders; the embeddings have rows to spare."
    folder = tmp_path_factory.mktemp("models")
    rows = [dict(prompt="abcdefg"[: 1 + i % 5]) for i in range(16)]
    texts = [dict(prompt=row["prompt"], completion="c") for row in rows]
    pairs = [dict(prompt=row["prompt"], chosen="c", rejected="d") for row in rows]
    for name, lines in dict(rows=rows, texts=texts, pairs=pairs).items():
        Dataset.from_list(lines).to_json(folder / f"{name}.jsonl")
    split = dict(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:10]))
    DatasetDict(split).save_to_disk(str(folder / "data"))
    from rlhf_nb.training.model_loading import tiny_policy

    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    policy = tiny_policy(letters, 0, **sizes, max_position_embeddings=64)
    policy.resize_token_embeddings(len(letters) + 4)
    for name, model in dict(sft=policy, reward=scorer_from(policy, 1)).items():
        model.save_pretrained(folder / name)
        letters.save_pretrained(folder / name)
    return folder


@pytest.fixture
def script(models, tmp_path, monkeypatch):
    "Run a script with its import lines changed, and other changes where they are given."

    def run(name, *flags, changes=(), text=None):
        shutil.copytree(models, tmp_path, dirs_exist_ok=True)
        monkeypatch.chdir(tmp_path)
        text = text or (SCRIPTS / f"{name}.py").read_text()
        text, lines = re.subn(r"(?m)^( *)from trl[\w.]* import", r"\1from rlhf_nb import", text)
        assert lines
        for old, new in changes:
            assert text.count(old) >= 1, old
            text = text.replace(old, new)
        assert not re.search(r"\btrl\b", "\n".join(re.findall("(?m)^ *(?:import|from) .*", text)))
        (tmp_path / "script.py").write_text(text)
        data = "data" if name == "published" else "rows.jsonl"
        words = [*FLAGS, *flags] if name in PARSED else flags or [data, "sft", "reward", "out"]
        monkeypatch.setattr(sys, "argv", ["script.py", *words])
        runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
        return tmp_path / "out"

    return run


def trained(folder: Path, start: Path) -> bool:
    "Whether the saved policy, or its adapter, has learned."
    adapter = folder / "adapter_model.safetensors"
    if adapter.is_file():
        return any(x.any() for name, x in load_file(adapter).items() if "lora_B" in name)
    new, old = (load_file(path / "model.safetensors") for path in (folder, start))
    assert new.keys() == old.keys()
    return any(x.shape == old[k].shape and not torch.equal(x, old[k]) for k, x in new.items())


# ---- Four calls of the PPO trainer ----

NO_PAD_ROW = ["--num_mini_batches", "1"]


# catches: a name, a default or an order of arguments that people's scripts rely on
@pytest.mark.parametrize("name", ["published", "three_dataclasses", "wrapped_adapter", "callback"])
def test_a_public_script_runs_with_its_import_lines_changed(name, script, models, capsys):
    out = script(name, *NO_PAD_ROW if name in PARSED else ())
    assert trained(out, models / "sft")
    shown = capsys.readouterr().out
    if name in ("published", "three_dataclasses"):
        assert "query" in shown and "model response" in shown
    if name == "published":
        tables = sorted((out / "completions").glob("*.csv"))
        assert [path.stem for path in tables] == [
            "update-00002-sample",
            "update-00004-eval",
            "update-00004-sample",
        ]
        assert len(pd.read_csv(tables[-1])) == 10
    assert (out / "completions").exists() == (name != "callback"), "tables where they are wanted"


# a pad token beyond the embedding, a reward by rules, a language model for a judge: test_brought.py


# ---- Three scripts for SFT and three for reward training ----

QUICK_START = """
from datasets import load_dataset
from trl import KINDConfig, KINDTrainer

trainer = KINDTrainer(
    model="MODEL",
    args=KINDConfig(output_dir="out", max_steps=2, learning_rate=1e-2, use_cpu=True, report_to="none"),
    train_dataset=load_dataset("json", data_files="DATA", split="train"),
)
trainer.train()
trainer.save_model("out")
"""
WITH_A_PARSER = """
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import KINDConfig, KINDTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

script, args, model = TrlParser((ScriptArguments, KINDConfig, ModelConfig)).parse_args_and_config()
data = load_dataset("json", data_files=script.dataset_name)
tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
trainer = KINDTrainer(
    model=model.model_name_or_path,
    args=args,
    train_dataset=data[script.dataset_train_split],
    eval_dataset=data["train"].select(range(4)) if args.eval_strategy != "no" else None,
    processing_class=tokenizer,
    peft_config=get_peft_config(model),
)
trainer.train()
if args.eval_strategy != "no":
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
trainer.save_model(args.output_dir)
"""
OPTIONS = """--model_name_or_path MODEL --dataset_name DATA --output_dir out --max_steps 2 --use_cpu True
--learning_rate 1e-2 --report_to none --eval_strategy EVAL --eval_steps 2""".split()


@pytest.mark.parametrize("how", ["quick start", "parser", "adapter"])
@pytest.mark.parametrize("kind", ["SFT", "Reward"])
def test_a_supervised_script_runs_with_its_import_lines_changed(kind, how, script, models):
    model, data = dict(SFT=("sft", "texts.jsonl"), Reward=("reward", "pairs.jsonl"))[kind]
    text = QUICK_START if how == "quick start" else WITH_A_PARSER
    names = dict(KIND=kind, MODEL=model, DATA=data, EVAL="no" if how == "adapter" else "steps")
    words = [names.get(word, word) for word in OPTIONS]
    if how == "adapter":
        task = dict(SFT="CAUSAL_LM", Reward="SEQ_CLS")[kind]
        words += ["--use_peft", "--lora_r", "4", "--lora_task_type", task]
    changes = [(old, new) for old, new in names.items() if old in text]
    out = script("", *words, text=text, changes=changes)
    assert trained(out, models / model)
    assert (out / "eval_results.json").exists() == (how == "parser")
