"""What people give that cannot be right: settings, data, models, files, words on the command line.
Each is refused before any work, on one line that names it and says what to give; none is taken for
something else."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import io
import json
import logging
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from ppo_fixtures import PROMPTS, SIZES, likes_c
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import TrainingArguments

from rlhf_nb import cli
from rlhf_nb.base.fields import (
    CONVERTED,
    INHERITED,
    Count,
    Facts,
    Setting,
    describe_allowed,
    facts_of,
    hints_of,
    setting,
    settings_that_say,
)
from rlhf_nb.base.files import append_jsonl
from rlhf_nb.base.terminal import harmless
from rlhf_nb.checkpoint import model_card
from rlhf_nb.models import scorer_from
from rlhf_nb.reward import RewardConfig, RewardTrainer, reward_card
from rlhf_nb.rollout import Rollout
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.training.compat import REFUSED
from rlhf_nb.training.completions import print_table
from rlhf_nb.training.config import PPOConfig
from rlhf_nb.training.model_loading import load_tokenizer, tiny_policy, train_tokenizer
from rlhf_nb.training.prompts import as_data, collate_prompts

nan, inf = math.nan, math.inf


# ---- Settings ----

# Settings of one range, and what none of them may be: of any configuration, and of PPO below.
WRONG: dict[str, list] = {
    "learning_rate": ["1e-6", None, nan, inf, -1e-6, True, [1e-6]],
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_steps": [
        *("4", None, 0, -4, 2.5, True)
    ],
    "num_train_epochs": ["3", None, 0, -1, nan, inf],
    "max_grad_norm weight_decay label_smoothing_factor adam_epsilon": ["1.0", None, nan, -1.0],
    "adam_beta1": [None, 1.0, nan],
    "warmup_steps": ["10", None, -5, nan],
    "logging_steps save_steps": ["10", 0, -1, nan],
    "eval_steps save_total_limit": [0, -1],
    "seed": ["0", None, 1.5, True, -1, 2**40],
    "bf16 use_cpu": ["no", "False", 1],
    "lr_scheduler_type optim eval_strategy train_sampling_strategy log_level": ["sometimes"],
    "output_dir run_name": [5],
}
WRONG_OF_PPO: dict[str, list] = {
    "kl_coef": ["0.05", None, nan, inf, -1.0, True, [0.05], {}],
    "response_length num_ppo_epochs num_mini_batches num_generations kl_horizon": [
        *("53", None, 0, -5, 5.0, True)
    ],
    "total_episodes micro_batch_tokens local_rollout_forward_batch_size": ["100", 0, -5, 1e3],
    "num_sample_generations value_warmup_updates": ["5", None, -1],
    "value_pretrain_epochs": ["5", None, 0],
    "temperature": [0.0, -1.0, nan, inf, 1e-30],
    "cliprange": [0.0, nan, 5.0],
    "score_clip target_kl kl_target": [0.0, -1.0, nan, inf],
    "cliprange_value vf_coef entropy_coef reward_variance_coef": [None, nan, inf, -0.1],
    "missing_eos_penalty value_learning_rate": [-1.0, nan, inf],
    "cliprange_high": [nan, -1.0],
    "dual_clip": [1.0, nan, inf],
    "gamma lam": ["1", None, 1.5, -0.1, nan],
    "kl_estimator kl_controller reward_aggregation": [None, 1, "K1", ["k1"]],
    "penalty_reward_value": [None, nan],
    "normalize_scores whiten_rewards share_value_trunk": [None, 1, "no", "False"],
    "stop_token": [1, "<eos>"],
    "stop_token_id": ["1", 1.0, True, [1, "a"], -1],
    "stop_strings": ["ab", [None], [1]],
    "reward_weights": [1.0, "1", ["1"], [nan]],
    "reward_center sft_model_path": [None, 5],
    "vllm_gpu_memory_utilization": [0.0, 2.0],
}
WRONG_OF: dict[type, dict[str, list]] = {
    PPOConfig: WRONG_OF_PPO,
    SFTConfig: {"max_length": ["10", 0, -1, 5.0, True]},
    RewardConfig: {
        "max_length": ["10", 0, -1, 5.0, True],
        "center_rewards_coefficient": ["0.1", nan, -1.0, True],
    },
}
ALLOWED = {  # what an error must say besides
    "max_length": "give a whole number of at least 1, or",
    "center_rewards_coefficient": "give .*of at least 0",
}


def wrong_refusal(act: Callable[[], object], complaint: str) -> str:
    "What is wrong with how `act()` is refused: a ValueError of one line, like `complaint`; else ''."
    try:
        act()
    except ValueError as error:
        text = str(error)
        return "" if re.search(complaint, text) and "\n" not in text else f"it says {text!r}"
    except Exception as error:
        return f"it fails: {error!r}"
    return "it is taken"


# catches: a string that is compared with a number, a field that nobody names, a NaN that passes
# every comparison, a batch of 0 rows that divides
@pytest.mark.parametrize("kind", WRONG_OF)
def test_a_wrong_setting_is_named_with_what_it_may_be(kind):
    given = dict(output_dir="unused", use_cpu=True, report_to="none")
    bad = [
        f"{name}={value!r}: {what}"
        for names, values in (WRONG | WRONG_OF[kind]).items()
        for name in names.split()
        for value in values
        if (
            what := wrong_refusal(
                lambda: kind(**given | {name: value}),  # noqa: B023
                rf"^{name} is .*: {ALLOWED.get(name, 'give .*')}.*\.",
            )
        )
    ]
    assert not bad, "\n".join(bad)


# catches: a check that refuses numbers of numpy, an int where a float is wanted, a path, a tuple
@pytest.mark.parametrize(
    "name, value",
    [
        ("seed", np.int64(3)),
        ("kl_coef", 0),
        ("kl_coef", np.float32(0.5)),
        ("response_length", np.int32(5)),
        ("whiten_rewards", np.bool_(True)),
        ("stop_token_id", 1),
        ("stop_token_id", [1, 5]),
        ("warmup_steps", 0.1),
        ("lr_scheduler_type", "cosine"),
        ("reward_weights", (1.0,)),
        ("report_to", []),
        ("max_steps", -1),
        ("bf16", None),
        ("lr_scheduler_kwargs", {}),
    ],
)
def test_what_is_right_in_another_type_is_taken(name, value, tmp_path):
    settings = dict(report_to="none", use_cpu=True) | {name: value}
    args = PPOConfig(output_dir=tmp_path, **settings)
    assert type(getattr(args, name)).__module__ in ("builtins", "transformers.trainer_utils")
    assert dataclasses.replace(args) is not None  # what TrainingArguments put there is taken again


# catches: a new setting that no list has: refused on resume, varied in a replay, or neither
def test_every_setting_says_what_it_is():
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    assert INHERITED.keys() == inherited
    for kind in (PPOConfig, SFTConfig, RewardConfig):
        own = [f for f in dataclasses.fields(kind) if f.name not in inherited]
        silent = [f.name for f in own if not isinstance(f, Setting)]
        assert not silent, f"give these of {kind.__name__} a phase: setting(default, help, facts)"
        refused = {name for names in REFUSED.values() for name in names.split()}
        assert refused == {*settings_that_say(kind, "refused")}
    for text in ("rewards update", "names", "reward"):  # two phases, none, a word misspelt
        with pytest.raises(ValueError, match="^no phase '.*': give one of update, rewards"):
            setting(1.0, "A help.", text)

    @dataclasses.dataclass
    class Mine(PPOConfig):
        own: int = 0
        kl_coef: float = 0.1
        named: int = setting(0, "A help.", Facts("judges", names=True))

    facts = facts_of(Mine)
    assert facts["own"] == facts["kl_coef"] == Facts("run")
    assert facts["named"].words == {"judges", "names"}
    assert facts["lam"] == facts_of(PPOConfig)["lam"]
    assert settings_that_say(Mine, "names")[-1] == "named"


# catches: a range that another release's TrainingArguments has no field for; a subclass's own
# annotation that cannot be read here
def test_ranges_are_of_fields_that_exist():
    assert not INHERITED.keys() - hints_of(SFTConfig).keys() - {*CONVERTED}
    assert describe_allowed(Count | None) == "a whole number of at least 1, or None"

    @dataclasses.dataclass
    class Mine(PPOConfig):
        own: NotHere = None  # noqa: F821

    assert Mine("unused", use_cpu=True, report_to="none").own is None
    with pytest.raises(ValueError, match="^kl_coef is"):
        Mine("unused", use_cpu=True, kl_coef="1")


# ---- Prompts ----

IDS, PLAIN = [[2, 3, 4]] * 24, "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def told(x: object) -> list:
    "A conversation of one turn, for every prompt."
    return [[x]] * 24


ROWS = [  # columns, what the error must say after the name of the argument
    (dict(prompt=[*PROMPTS[:-1], None]), "prompt 23 is None: give text"),
    (dict(prompt=[nan] * 24), "prompt 0 is nan"),
    (dict(prompt=[["a", "b"]] * 24), r"prompt 0 is \['a', 'b'\]: give text, or turns"),
    (dict(prompt=[[]] * 24), r"prompt 0 is \[\]"),
    (dict(prompt=[dict(text="a")] * 24), "prompt 0 is {"),
    (dict(prompt=[*PROMPTS[:-1], ""]), "prompt 23 is empty"),
    (dict(prompt=[*PROMPTS[:-1], "a" * 40]), "prompt 23 has 40 tokens; with response_length 5"),
    (dict(prompt=told(dict(content="a"))), "prompt 0 has the turn .* whose role"),
    (dict(prompt=told(dict(role="user", content=None))), "whose role or content"),
    (dict(prompt=told({"from": "human", "value": "a"})), "whose role or content"),
    (dict(prompt=told(dict(role="user", content="a"))), "no chat_template: set"),
    (dict(text=PROMPTS), "columns .'text'. and no prompt"),
    (dict(prompt=[]), "0 prompts"),
    (dict(input_ids=[*IDS[:-1], [2, 99]]), "prompt 23: input_ids is .2, 99.: .* from 0 to 11"),
    (dict(input_ids=[*IDS[:-1], [2, -1]]), "prompt 23: input_ids"),
    (dict(input_ids=[[2.5, 3.0]] * 24), "prompt 0: input_ids"),
    (dict(input_ids=[[[2, 3]]] * 24), "prompt 0: input_ids"),
    (dict(input_ids=[*IDS[:-1], None]), "prompt 23: input_ids"),
    (dict(input_ids=[*IDS[:-1], []]), "prompt 23 is empty"),
    (dict(input_ids=[*IDS[:-1], [0, 0]]), "prompt 23 is empty"),
    (dict(input_ids=IDS, attention_mask=[[1, 1]] * 24), "attention_mask is .1, 1. for 3 ids"),
    (dict(input_ids=IDS, attention_mask=[[2] * 3] * 24), "attention_mask"),
    (dict(input_ids=IDS, attention_mask=[[1, 0, 1]] * 24), "the 1s side by side"),
    (dict(input_ids=IDS, attention_mask=[None] * 24), "attention_mask"),
    (dict(input_ids=IDS, attention_mask=[[0] * 3] * 24), "prompt 0 is empty"),
    (dict(input_ids=IDS, prompt=PROMPTS), "prompt 1 is 'b' and its input_ids are 'abc': remove"),
    (dict(prompt=PROMPTS, prompts=PROMPTS), "multiple values for argument 'prompts'"),
]


# catches: a row that reaches the chat template, the tokenizer or the embedding as it is; a mask
# that cuts ids off in silence; evaluation prompts that nobody looks at
@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_a_wrong_prompt_is_named(ppo, letters, name):
    model, bad = tiny_policy(letters, 0, **SIZES), []
    for columns, complaint in ROWS:
        letters.chat_template = None if "chat_template" in complaint else PLAIN
        data = Dataset.from_dict(columns)
        given = dict(data=data) if name == "train_dataset" else dict(parts={name: data})
        try:
            what = wrong_refusal(
                lambda: ppo(model=model, **given),  # noqa: B023
                rf"^{name}: .*{complaint}",
            )
        finally:
            letters.chat_template = None
        bad += [f"{complaint}: {what}"] * bool(what)
    assert not bad, "\n".join(bad)


def prompts_in(kind: str) -> object:
    "The same prompts in another container."
    data = Dataset.from_dict(dict(prompt=PROMPTS))
    return {
        "frame": pd.DataFrame(dict(prompt=PROMPTS)),
        "texts": list(PROMPTS),
        "rows": [dict(prompt=p) for p in PROMPTS],
        "columns": dict(prompt=PROMPTS),
        "torch": data.with_format("torch"),
        "stream": data.to_iterable_dataset(),
        "splits": DatasetDict(train=data, test=data),
        "generator": (dict(prompt=p) for p in PROMPTS),
        "text": "abc",
        "path": Path("prompts.jsonl"),
        "number": 7,
        "tensor": torch.ones(8, 3, dtype=torch.long),
        "numbers": [1, 2, 3] * 8,
        "mixed": ["a", 1] * 12,
        "unequal": dict(prompt=PROMPTS, x=[1]),
    }[kind]


def test_prompts_in_another_container_train_the_same_policy(ppo):
    plain = ppo.trained(num_ppo_epochs=1, total_episodes=16)
    for kind in ("frame", "texts", "rows", "columns", "torch"):
        other = ppo.trained(num_ppo_epochs=1, total_episodes=16, data=prompts_in(kind))
        pairs = zip(*(x.model.parameters() for x in (plain, other)))
        assert all(torch.equal(a, b) for a, b in pairs), kind


@pytest.mark.parametrize(
    "kind, complaint",
    [
        ("stream", "is a stream .*Dataset.from_list"),
        ("splits", r"has the splits train, test: give one of them, such as data\['train'\]"),
        *[(kind, "give a list of prompts") for kind in ("generator", "text", "path", "number")],
        ("tensor", "give a list of prompts"),
        ("numbers", "prompt 0 is 1"),
        ("mixed", "of several types"),
        ("unequal", "columns of one length"),
    ],
)
def test_what_holds_no_prompts_is_named(ppo, kind, complaint):
    with pytest.raises(ValueError, match=f"^train_dataset.*{complaint}"):
        ppo(data=prompts_in(kind))


# ---- A step by hand ----


BATCHES = [
    ([], "0 prompts"),
    ([*PROMPTS[:7], None], "prompt 7 is None"),
    ("abcdefgh", "the batch is 'abcdefgh': give a list of prompts"),
    (dict(prompt="abcdefgh"), "give a list of prompts"),
    ([PROMPTS[:8]], "prompt 0 is"),
    (["", *PROMPTS[:7]], "row 0 holds no token"),
    (["a" * 40] * 8, "prompt 0 has 40 tokens; with response_length 5"),
    (dict(prompt=PROMPTS[:8], x=[1, 2]), "columns of one length"),
    (dict(input_ids=torch.ones(8, 2).long(), attention_mask=torch.ones(8, 3)), "for 2 ids"),
    ([*PROMPTS[:3], "a\ud800", *PROMPTS[:4]], "text 3 has a lone surrogate .*: remove it"),
]


def test_a_wrong_batch_is_named(ppo):
    trainer = ppo()
    bad = [
        f"{batch!r}: {what}"
        for batch, complaint in BATCHES
        if (what := wrong_refusal(lambda: trainer.step(batch), complaint))  # noqa: B023
    ]
    assert not bad, "\n".join(bad)


def test_batches_in_several_forms_are_taken(ppo, letters):
    trainer, few = ppo(), PROMPTS[:8]
    forms = (
        few,
        dict(prompt=few),
        [dict(prompt=p) for p in few],
        Dataset.from_dict(dict(prompt=few)),
        dict(input_ids=[letters(p)["input_ids"] for p in few]),
    )
    assert [trainer.rollout(batch).prompts for batch in forms] == [few] * 5


# ---- Stops and judges ----


def test_a_tokenizer_without_eos_needs_a_stop(ppo, letters):
    eos, letters.eos_token = letters.eos_token, None
    try:
        with pytest.raises(ValueError, match="no EOS token.*stop_token_id"):
            ppo()
        assert ppo(stop_token_id=[1]).sampling_settings.stop_ids == (1,)
    finally:
        letters.eos_token = eos


@pytest.mark.parametrize("text", ["b", "zzz"])
def test_a_stop_text_that_cannot_be_searched_for_is_refused(ppo, text):
    words = train_tokenizer(["a b c d e f g h i j"])
    with pytest.raises(ValueError, match="^stop_strings is .*: give stop_token_id"):
        ppo(
            model=tiny_policy(words, 0, **SIZES),
            parts=dict(processing_class=words),
            data=["a b c"] * 8,
            stop_strings=[text],
        )


def strict(prompts, responses):
    return [0.0] * len(prompts)


@pytest.mark.parametrize(
    "reward, complaint",
    [
        (5, "reward_model is 5: give a model"),
        (dict(a=likes_c), "reward_model is {"),
        ([likes_c, None], "reward_model is None"),
        (strict, "reward function strict.* unexpected keyword argument 'extra'"),
        (lambda texts: [0.0] * len(texts), r"lambda>\(texts\) is called as f\(prompts,"),
    ],
)
def test_what_cannot_judge_is_refused(ppo, reward, complaint):
    with pytest.raises(ValueError, match=complaint):
        ppo(reward, data=Dataset.from_dict(dict(prompt=PROMPTS, extra=PROMPTS)))


# ---- Work that would be none ----

PAIRS = dict(prompt=PROMPTS, chosen=["ab"] * 24, rejected=["c"] * 24, completion=["ab"] * 24)


@pytest.mark.parametrize("kind, config", [(SFTTrainer, SFTConfig), (RewardTrainer, RewardConfig)])
def test_a_supervised_run_that_would_do_nothing_is_refused(kind, config, letters, small_args):
    model, data = scorer_from(tiny_policy(letters, 0, **SIZES), 0), Dataset.from_dict(PAIRS)
    if kind is SFTTrainer:
        model = tiny_policy(letters, 0, **SIZES)
    args = small_args(config, max_steps=1, dataloader_drop_last=True)
    given = dict(processing_class=letters)
    with pytest.raises(ValueError, match="none of the model's weights learns"):
        kind(model.requires_grad_(False), args, data, **given).train()
    with pytest.raises(ValueError, match="train_dataset has fewer rows than a batch"):
        kind(model.requires_grad_(True), args, data.select(range(2)), **given).train()


SUPERVISED = [  # columns or data, what the error must say
    (dict(prompt=list(range(24))), "row 0: the prompt is 0: give text"),
    (dict(prompt=[*PROMPTS[:-1], None]), "row 23"),
    (dict(chosen=[nan] * 24, completion=[nan] * 24), "row 0: the answer is nan: give text"),
    (dict(chosen=[["a"]] * 24, completion=[["a"]] * 24), r"row 0: the answer is \['a'\]"),
    (dict(prompt=told(dict(content="a"))), "row 0: the prompt has the turn"),
    (dict(prompt=told(dict(role="user", content="a"))), "no chat_template"),
    ({name: [] for name in PAIRS}, "train_dataset has 0 rows"),
    (5, "train_dataset is 5"),
    ("rows.jsonl", "train_dataset is 'rows.jsonl'"),
]


@pytest.mark.parametrize("kind, config", [(SFTTrainer, SFTConfig), (RewardTrainer, RewardConfig)])
def test_wrong_rows_of_supervised_training_are_named(kind, config, letters, small_args):
    model, args, bad = tiny_policy(letters, 0, **SIZES), small_args(config), []
    for changes, complaint in SUPERVISED:
        data = Dataset.from_dict(PAIRS | changes) if isinstance(changes, dict) else changes
        make = lambda: kind(model, args, data, processing_class=letters)  # noqa: B023
        what = wrong_refusal(make, complaint)
        bad += [f"{complaint}: {what}"] * bool(what)
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("kind, config", [(SFTTrainer, SFTConfig), (RewardTrainer, RewardConfig)])
def test_what_is_no_part_of_supervised_training_is_named(kind, config, letters, small_args):
    data, model = Dataset.from_dict(PAIRS), tiny_policy(letters, 0, **SIZES)
    with pytest.raises(TypeError, match="args is dict: give"):
        kind(model, {}, data, processing_class=letters)
    with pytest.raises(TypeError, match="is 5: give a model"):
        kind(5, small_args(config), data, processing_class=letters)
    with pytest.raises(TypeError, match="processing_class is int"):
        kind(model, small_args(config), data, processing_class=3)
    eos, letters.eos_token = letters.eos_token, None
    try:
        with pytest.raises(ValueError, match="no EOS token"):
            kind(model, small_args(config), data, processing_class=letters)
    finally:
        letters.eos_token = eos


def test_a_tokenizer_that_is_none(tmp_path, letters):
    tiny_policy(letters, 0, **SIZES).save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(TypeError, match="processing_class is int: give a tokenizer"):
        load_tokenizer(3)
    with pytest.raises(TypeError, match=r"args is dict: give PPOConfig\(output_dir"):
        PPOTrainer({}, letters)


# ---- Files ----


@pytest.fixture(scope="module")
def rollout(tmp_path_factory) -> Path:
    "A file of two episodes."
    mask, ids = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool(), torch.ones(2, 3).long()
    made = Rollout(ids, mask, ids, mask, torch.tensor([False, True]), kl=torch.zeros(2, 3))
    texts = dict(prompts=["a", "b"], responses=["abc", "d"], tokens=[["a", "b", "c"], ["d"]])
    return made.with_(**texts).save(tmp_path_factory.mktemp("kept") / "update-00000.safetensors")


DAMAGE = {  # what is done to tensors, lists or header of a file
    "no described": lambda t, d, h: h.pop("described"),
    "no JSON": lambda t, d, h: h.update(described="{"),
    "a list": lambda t, d, h: h.update(described="[]"),
    "a tensor less": lambda t, d, h: t.pop("mask"),
    "a tensor more": lambda t, d, h: t.update(other=torch.ones(3)),
    "another shape": lambda t, d, h: t.update(kl=torch.ones(2, 2)),
    "flat": lambda t, d, h: t.update(mask=torch.ones(6).bool()),
    "fewer prompts": lambda t, d, h: d.update(prompts=["a"]),
    "numbers for texts": lambda t, d, h: d.update(responses=[1, 2]),
    "fewer tokens": lambda t, d, h: d.update(tokens=[["a"], ["b"]]),
    "columns a list": lambda t, d, h: d.update(columns=[1]),
    "a short column": lambda t, d, h: d.update(columns=dict(x=[1])),
    "info a list": lambda t, d, h: d.update(info=[1]),
    "deep": lambda t, d, h: h.update(described="[" * 10**5),
    "a field more": lambda t, d, h: d.update(other=1),
}


def test_a_damaged_rollout_is_named(rollout, tmp_path):
    damaged, bad = tmp_path / rollout.name, []
    for how, damage in DAMAGE.items():
        with safe_open(rollout, "pt") as file:
            header = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        before = header["described"]
        lists = json.loads(before)
        damage(tensors, lists, header)
        if header.get("described") == before:
            header["described"] = json.dumps(lists)
        save_file(tensors, damaged, metadata=header)
        complaint = rf"{rollout.name} is damaged \(.*\): use another"
        what = wrong_refusal(lambda: Rollout.load(damaged), complaint)
        bad += [f"{how}: {what}"] * bool(what)
    assert not bad, "\n".join(bad)


def test_what_is_no_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        Rollout.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Rollout.load(tmp_path / "nowhere")


# ---- Words on the command line ----


@pytest.fixture(scope="module")
def parts(tmp_path_factory, letters) -> Path:
    "Models and files, whole and broken."
    folder = tmp_path_factory.mktemp("parts")
    policy = tiny_policy(letters, 0, **SIZES)
    for name, model in dict(sft=policy, rm=scorer_from(policy, 0)).items():
        model.save_pretrained(folder / name)
        letters.save_pretrained(folder / name)
    shutil.copytree(folder / "sft", folder / "torn")
    weights = folder / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    shutil.copytree(folder / "sft", folder / "config")
    (folder / "config" / "config.json").write_text("{")
    policy.save_pretrained(folder / "bare")
    (folder / "empty").mkdir()
    rows = [json.dumps(dict(prompt=p, completion="ab")) for p in PROMPTS]
    pair = json.dumps(dict(prompt="a", chosen="b", rejected=None))
    for name, text in {
        "rows.jsonl": "\n".join(rows),
        "broken.jsonl": "\n".join([*rows[:5], "{oops", *rows[6:]]),
        "none.jsonl": "",
        "lists.jsonl": "[1]\n" * 9,
        "other.jsonl": '{"body": "a"}\n' * 9,
        "pair.jsonl": (pair + "\n") * 9,
        "bad.json": "{",
        "bad.csv": 'a,b\n"x',
        "bad.parquet": "PAR1",
        "note.txt": "hello",
        "null.yaml": "response_length: null",
        "tab.yaml": "a:\n\t- b",
        "tag.yaml": "kl_coef: !!python/object:os.system x",
        "r.py": "def out(p, r, **c): raise KeyError('x')\nx = 5",
        "syntax.py": "def f(:",
        "zero.py": "1 / 0",
        "help.yaml": "help: true",
        "halp.yaml": "halp: true",
    }.items():
        (folder / name).write_text(text)
    packed = gzip.compress("".join(map(chr, range(0x4E00, 0x5E00))).encode())
    (folder / "cut.jsonl.gz").write_bytes(packed[:-20])
    (folder / "bit.jsonl.gz").write_bytes(packed[:50] + b"\xff" * 50 + packed[100:])
    for name in ("bare.jsonl.gz", "bare.jsonl.bz2", "bare.jsonl.xz"):
        (folder / name).write_text("hello")
    for name, text in dict(fresh="hello", hollow="").items():
        (folder / name / "rollouts").mkdir(parents=True)
        (damaged := folder / name / "rollouts" / "update-00000.safetensors").write_text(text)
        os.utime(damaged, (time.time() + 3600,) * 2)  # as it is just now, however long this takes
    (folder / "latin.jsonl").write_bytes('{"prompt": "\xe9"}\n'.encode("latin-1") * 9)
    deep = '{"prompt": "a", "x": ' + "[" * 2000 + "]" * 2000 + "}"
    (folder / "deep.jsonl").write_text(f"{deep}\n")
    for name, state in dict(hist='{"log_history": 5}', list="[]", json="{").items():
        (folder / f"run-{name}").mkdir()
        (folder / f"run-{name}" / "trainer_state.json").write_text(state)
    return folder


PPO = (
    "ppo --dataset_name rows.jsonl --model_name_or_path sft --reward_model_path rm --output_dir out "
    "--total_episodes 8 --response_length 4 --use_cpu --report_to none --disable_tqdm "
    "--per_device_train_batch_size 8 --save_strategy no --num_sample_generations 0 "
)
SFT = "sft --dataset_name rows.jsonl --model_name_or_path sft --output_dir out --use_cpu "
JUDGE = "judge --dataset_name rows.jsonl --model_name_or_path sft --judge_model rm --use_cpu "
LINES = [  # words, what the line must say
    *[
        (f"{command}--dataset_name {name}", name)
        for name in ("none.jsonl", "lists.jsonl", "bad.json", "bad.csv", "bad.parquet", "note.txt")
        for command in (SFT, PPO)
    ],
    (SFT + "--dataset_name broken.jsonl", "broken.jsonl, line 6 is not JSON"),
    (SFT + "--dataset_name deep.jsonl", "deep.jsonl, line 1 is not JSON (it is nested"),
    (SFT + "--dataset_name latin.jsonl", "latin.jsonl, line 1"),
    *[
        (f"{SFT}--dataset_name {name}", f"{name}: it cannot be unpacked (")
        for name in "cut.jsonl.gz bit.jsonl.gz bare.jsonl.gz bare.jsonl.bz2 bare.jsonl.xz".split()
    ],
    (SFT + "--dataset_name nofile.jsonl", "no such file"),
    (SFT + "--dataset_name sft", "dataset_name sft"),
    (SFT + "--dataset_name '[red]x[/red]'", "[red]x[/red]"),
    (SFT + "--dataset_name mini_tldrr", "Did you mean mini_tldr?"),
    (SFT + "--dataset_name other.jsonl", "completion"),
    (PPO + "--dataset_name other.jsonl", "needs prompt, or input_ids"),
    (SFT.replace("sft ", "reward ", 1) + "--dataset_name pair.jsonl", "row 0"),
    *[
        (f"{command}--model_name_or_path {name}", f"--model_name_or_path {name}")
        for name in ("nowhere", "empty", "torn", "config", "bare", "a/b/c", "'[bold]'")
        for command in (SFT, PPO)
        if name != "bare" and name != "'[bold]'"
    ],
    (SFT + "--model_name_or_path bare", "has no tokenizer"),
    (SFT + "--model_name_or_path '[bold]'", "[bold]"),
    *[(PPO + f"--reward_model_path {x}", f"--reward_model_path {x}") for x in ("nowhere", "torn")],
    *[(JUDGE + f"--judge_model {name}", name) for name in ("torn", "empty")],
    (PPO + "--value_model_path torn", "--value_model_path torn"),
    (PPO + "--reward_tokenizer_name_or_path nowhere", "--reward_tokenizer_name_or_path nowhere"),
    (PPO + "--tokenizer_name_or_path empty", "--tokenizer_name_or_path empty"),
    (PPO + "--reward_function r.py:out", "failed: KeyError: 'x' ("),
    (PPO + "--reward_function r.py:x", "has no function x"),
    (PPO + "--reward_function syntax.py:f", "SyntaxError"),
    (PPO + "--reward_function zero.py:f", "ZeroDivisionError"),
    (PPO + "--config null.yaml", "response_length"),
    (PPO + "--config tab.yaml", "tab.yaml"),
    (PPO + "--config tag.yaml", "kl_coef"),
    (PPO + "--optim adamm", "(choose from adamw_torch, "),
    (PPO + "--stop_token x", "stop_token"),
    (PPO + "--lora_dropout 2 --use_peft", "--lora_dropout is 2.0"),
    (PPO + "--use_vllm", "vLLM cannot be imported"),
    (PPO + "--resume_from_checkpoint nowhere", "nowhere"),
    (PPO + "--output_dir rows.jsonl/x", "could not be written ([Errno 17] File exists: "),
    (SFT + "--output_dir /proc/x/y", "could not be read or written ([Errno 2] No such file"),
    (PPO + "--config help.yaml", "help.yaml: help is for the command line alone: leave it out"),
    (PPO + "--config halp.yaml", "halp.yaml: unknown key 'halp'. See rlhf-nb"),
    (
        SFT.replace("--model_name_or_path sft", "--from_scratch") + "--hidden_size 15",
        "--hidden_size is 15",
    ),
    (JUDGE + "--prices 1", "--prices is [1.0]: give two"),
    (JUDGE + "--output empty", "--output empty is a folder"),
    ("view empty", "empty keeps no rollouts"),
    ("view fresh", "update-00000.safetensors is left out: it is damaged, or not yet"),
    ("view hollow", "hollow keeps no rollouts that can be read"),
    ("view hollow --terminal", "update-00000.safetensors is left out: it is empty"),
    *[(f"plot run-{name}", f"run-{name}") for name in ("hist", "list", "json")],
    ("demo --batch 0", "--batch is 0"),
    ("demo --output_dir rows.jsonl", "could not be written ([Errno 17] File exists: 'rows.jsonl')"),
]


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


# catches: a traceback, a page of somebody else's advice, an option that is not named, a folder or a
# half-written file that a refused command leaves
@pytest.mark.parametrize("line, named", LINES)
def test_a_refused_command_says_why_on_one_line(parts, monkeypatch, capsys, line, named):
    monkeypatch.chdir(parts)
    before = files_in(parts)
    try:
        code = cli.main(shlex.split(line))
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    assert code in (1, 2) and "Traceback" not in said
    assert said.startswith("rlhf-nb ") and said.count("\n") == 1 and len(said) < 700, said
    assert named in said and files_in(parts) == before


# catches: "[Errno 2]" alone, or a file that is said to be missing, where no path means anything
@pytest.mark.parametrize("line", ["plot x", "view x", "preflight", "demo --quick", PPO])
def test_a_deleted_working_directory_is_named(ppo, tmp_path, monkeypatch, capsys, line):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(shlex.split(line)) == 2
    name, said = line.split()[0], "the working directory was deleted: cd (os.chdir) to one that"
    assert capsys.readouterr().err == f"rlhf-nb {name}: {said} exists.\n"
    with pytest.raises(FileNotFoundError, match="the working directory was deleted"):
        ppo(output_dir="run")


# catches: a bare error of Python's or of the trainer's, and one that only speaks of space
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_takes_no_file_is_named(ppo, rollout, tmp_path, monkeypatch, number):
    def refuse(path, *_):
        raise OSError(number, os.strerror(number), str(path))

    r, folder = Rollout.load(rollout), tmp_path / "new"
    monkeypatch.setattr("os.mkdir", refuse)
    for use in (
        lambda: ppo(output_dir=str(folder)),
        lambda: r.save(folder / "r.safetensors"),
        lambda: append_jsonl(folder / "log.jsonl", {}),
    ):
        with pytest.raises(OSError, match=r"^a file could not be .*written \(.*new'\): .* give an"):
            use()


# ---- Terminals, markup and cards ----


def test_nothing_in_a_text_steers_the_terminal():
    assert harmless("a\x1b[2Jb\x07\u202ec") == "a\\x1b[2Jb\\x07\\u202ec"
    assert harmless("plain é 漢字 👩\u200d🚀\n\tx") == "plain é 漢字 👩\u200d🚀\n\tx"
    out = io.StringIO()
    texts = ["\x1b[31mred", "[bold]bold[/bold]", "\u202eabc", "a\rb"]
    console = Console(file=out, width=60, force_terminal=False)
    print_table(pd.DataFrame({"[red]text": texts}), "after [dim]x", console=console)
    shown = out.getvalue()
    assert "\x1b" not in shown and "\r" not in shown and "\u202e" not in shown
    for text in ("\\x1b[31mred", "[bold]bold[/bold]", "\\u202eabc", "[red]text", "after [dim]x"):
        assert text in shown


# catches: a path, a text or a unit that is printed as it is, and a warning of a log with one
def test_what_others_wrote_steers_no_terminal(parts, rollout, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(parts)
    evil = "\x1b[2J\x07\u202e"
    run = str(tmp_path / evil)
    r = Rollout.load(rollout).with_(responses=[evil, ""], info=dict(unit=evil))
    print(r, [r])
    for words in (
        [*shlex.split(PPO), "--output_dir", run],
        ["plot", run, "--group", "a", "--output", f"{run}/drawn"],
        ["view", f"nowhere{evil}"],
    ):
        cli.main(words)
    warning = dict(msg="now in %s", args=(run,), levelno=logging.WARNING)
    logging.lastResort.handle(logging.makeLogRecord(warning))
    shown = "".join(capsys.readouterr())
    assert not set("\x1b\x07\u202e") & set(shown)
    assert shown.count(r"\x1b[2J\x07\u202e") == 9, shown


@pytest.fixture
def strange(tmp_path, rollout) -> Path:
    "A folder with a run whose texts no ASCII terminal can show."
    kept = tmp_path / "run" / "rollouts"
    kept.mkdir(parents=True)
    texts = dict(responses=["é – 漢", "\x1b[2J"], tokens=[["é ", "– ", "漢"], ["\x1b[2J"]])
    Rollout.load(rollout).with_(**texts).save(kept / rollout.name)
    return tmp_path


# catches: a character that the terminal's encoding lacks, which ends a run in the middle
@pytest.mark.parametrize("words", [["view", "run", "--terminal"], ["no\u2013command"]])
def test_an_ascii_terminal_will_do(strange, words):
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_nb.cli", *words],
        cwd=strange,
        env=os.environ | dict(LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0"),
        capture_output=True,
        timeout=120,
    )
    assert b"Traceback" not in done.stderr and b"\x1b" not in done.stdout
    assert done.returncode == (0 if words[0] == "view" else 2)
    said = (done.stdout + done.stderr).decode("ascii")
    assert ("\\xe9 \\u2013 \\u6f22" in said) == (words[0] == "view")


@pytest.mark.parametrize(
    "name", ["a|b", "a\nb: c", "---\nx: [", "`x`<script>", "[x](http://y)", "a: 'b", "-"]
)
def test_a_name_cannot_change_a_card(name):
    for card in (
        model_card(name, {"note": name}, {name: 1.0}, name, {name: {name: name}}),
        reward_card(name, {"note": name}, {name: 1.0}, name),
    ):
        head, body = card.removeprefix("---\n").split("\n---\n", 1)
        assert (yaml.safe_load(head)["tags"] and "base_model" not in head) or name == "-"
        assert "<script>" not in body and "](http://y" not in body.replace("](https://github", "")
        tables = [line for line in body.splitlines() if line.startswith("|")]
        assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in tables)
        assert sum(line.startswith("# ") for line in body.splitlines()) == 1


# catches: each of these found in the middle of a run, or never
@pytest.mark.parametrize(
    "reward, rows, complaint",
    [
        (lambda p, r: torch.tensor([True] * len(r)), dict(prompt=PROMPTS), r"tensor\(True\)"),
        (likes_c, {"prompt": PROMPTS, "score/x": PROMPTS}, "'score/x' has a name of the trainer"),
    ],
)
def test_columns_and_scores_that_would_fail_late(ppo, reward, rows, complaint):
    with pytest.raises(ValueError, match=complaint):
        ppo(reward, data=Dataset.from_dict(rows)).step()
    with pytest.raises(ValueError, match="missing .*'answer'"):
        ppo(lambda prompts, responses, answer: [], eval_strategy="epoch").train()


@pytest.mark.parametrize("role", ["reference", "value"])
def test_a_model_of_another_vocabulary_is_refused(ppo, letters, role):
    other = tiny_policy(letters, 0, **SIZES)
    other.resize_token_embeddings(303)
    model = scorer_from(other, 0) if role == "value" else other
    with pytest.raises(ValueError, match=f"{role} model has an embedding for 303 ids"):
        ppo(parts={"value_model" if role == "value" else "ref_model": model})


# catches: the columns of the first row alone
def test_a_column_that_the_first_row_lacks_is_kept(letters):
    rows = [dict(prompt="a"), dict(prompt="b", margin=2.0)]
    assert as_data(rows)["margin"][:] == [None, 2.0]
    assert collate_prompts(rows, letters)["columns"]["margin"] == [None, 2.0]
