"""The commands of `rlhf-nb`: flags that reach their fields, files that flags override, refusals of
one line, and the pipeline as people type it."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import Mock

import forks
import numpy as np
import pandas as pd
import pytest
import yaml
from datasets import Dataset, DatasetDict
from kept_pages import kept_pages
from loopback import Endpoint
from packs import unpacked

import rlhf_nb
from rlhf_nb import cli
from rlhf_nb.base.fields import fits
from rlhf_nb.cli import arguments, data, judge, ppo, quick, reward, scoring, sft, view
from rlhf_nb.cli.parsing import kinds_of
from rlhf_nb.cli.recipes import read_recipe
from rlhf_nb.training.logs import read_log, steps_of
from rlhf_nb.ui import plot_runs
from rlhf_nb.ui.episodes import end_of

ROOT = Path(__file__).resolve().parent.parent
TRAINED = ("sft", "reward", "ppo")
SETTINGS = (*TRAINED, "judge")
LONG_HELP = (*TRAINED, "preflight")  # two lengths of it
PARSERS = {
    name: getattr(import_module(f"rlhf_nb.cli.{name}"), f"{name}_parser") for name in cli.COMMANDS
}


def parse(name: str, words: list[str]) -> list:
    "The dataclasses of a command, filled."
    return PARSERS[name]().settings(words)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, request):
    "Every test stands in an empty folder of its own, except those that share the run."
    if "run" not in request.fixturenames:
        monkeypatch.chdir(tmp_path)


def say(capsys, line: str | list[str]) -> tuple[int, str, str]:
    "Exit code, standard output and the last line of standard error."
    try:
        code = cli.main(shlex.split(line) if isinstance(line, str) else line)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out, (said.err.splitlines() or [""])[-1]


# ---- Every flag ----


def other(field: dataclasses.Field, hint: object, parser) -> tuple[list[str], object]:
    "Words for a value that is not the default, and that value."
    kinds, action = kinds_of(hint), parser.known[field.name]
    default = action.default
    if get_origin(parser.ranges.get(field.name)) is Literal:
        hint = parser.ranges[field.name]
    if get_origin(hint) is Literal or action.choices:
        choices = get_args(hint) if get_origin(hint) is Literal else action.choices
        value = next(str(x) for x in choices if x != default)
        return [value], value
    enum = next((k for k in kinds if isinstance(k, type) and issubclass(k, Enum)), None)
    if enum:
        value = next(x for x in enum if x != default)
        return [value.value], value.value
    made = next((k for k in kinds if k is dict or dataclasses.is_dataclass(k)), None)
    if made:
        return ['{"tp_size": 2}'], made(tp_size=2)
    if bool in kinds:
        return ["False" if default is True else "True"], default is not True
    if list in kinds:
        inner = next(get_args(x)[0] for x in (*get_args(hint), hint) if get_origin(x) is list)
        if issubclass(inner, Enum):
            return [x.value for x in inner][:1], list(inner)[:1]
        values = {float: [0.5, 2.0], int: [5, 6]}.get(inner, ["one", "two"])
        return [str(x) for x in values], values
    for kind, few in ((int, (7, 300)), (float, (3e-7, 1.5))):
        if kind in kinds:
            value = next(x for x in few if fits(x, parser.ranges[field.name]))
            return [str(value)], value
    return ["some words"], "some words"


def only_one(hint: object) -> bool:
    "Whether a field is there to refuse all values but its default."
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    fixed = lambda x: x in (None, NoneType) or (get_origin(x) is Literal and len(get_args(x)) == 1)
    return all(map(fixed, parts))


def wanted_of(name: str) -> tuple[list, dict[str, tuple[list[str], object]]]:
    parser, found = PARSERS[name](), {}
    kinds = parser.dataclass_types
    for kind in kinds:
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.init and not only_one(hints[field.name]):
                found[field.name] = other(field, hints[field.name], parser)
    return kinds, found


def values_of(parsed) -> dict[str, object]:
    return {f.name: getattr(x, f.name) for x in parsed for f in dataclasses.fields(x) if f.init}


# catches: a field without a flag, two flags on one field, a value of the wrong type, a key of a
# file that is dropped, a hyphen that is not understood
@pytest.mark.parametrize("how", ["words", "file", "hyphens"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_flag_reaches_its_field(name, how, monkeypatch):
    kinds, wanted = wanted_of(name)
    for kind in kinds:
        # combinations are the trainers' matter
        monkeypatch.setattr(kind, "__post_init__", lambda self: None, raising=False)
    before = values_of(parse(name, []))
    if how == "file":
        settings = {k: words if len(words) > 1 else words[0] for k, (words, _) in wanted.items()}
        settings |= {
            key: json.loads(words[0])
            for key, (words, _) in wanted.items()
            if words[0].startswith("{")
        }
        Path("all.yaml").write_text(yaml.safe_dump(settings))
        words = ["--config", "all.yaml"]
    else:
        flag = (lambda key: "--" + key.replace("_", "-")) if how == "hyphens" else "--{}".format
        words = [word for key, (values, _) in wanted.items() for word in (flag(key), *values)]
    found = values_of(parse(name, words))
    fixed = set(found) - set(wanted)  # such a field has one value
    assert set(wanted) <= set(found) and len(found) > (20 if name == "judge" else 120)
    assert len(fixed) <= 11 and all(found[key] == before[key] for key in fixed)
    listed = {"report_to", "optim_target_modules", "label_names"}
    for key, (_, value) in wanted.items():
        assert found[key] == value or (key in listed and found[key] == [value]), (
            key,
            value,
            found[key],
        )
        assert found[key] != before[key], key


# catches: --bf16 alone refused because the field may also be None, `--flag False` read as true
@pytest.mark.parametrize("name", SETTINGS)
def test_yes_or_no_alone_or_with_a_value(name):
    hints = {}
    for kind in PARSERS[name]().dataclass_types:
        hints |= get_type_hints(kind)
    flags = [key for key, hint in hints.items() if bool in kinds_of(hint)]
    parser = PARSERS[name]()
    assert len(flags) >= 2
    for key in flags:
        for words, value in (([], True), (["True"], True), (["false"], False), (["no"], False)):
            assert getattr(parser.parse_args([f"--{key}", *words]), key) is value, (key, words)
    assert {"use_peft", "bf16", "resume"} <= set(flags) if name in TRAINED else "one_order" in flags


def test_none_can_be_typed_where_the_field_may_be_none():
    Path("a.yaml").write_text("missing_eos_penalty: 1.0\nvalue_learning_rate: 1e-3\n")
    *_, args = parse("ppo", "--config a.yaml --missing_eos_penalty None".split())
    assert args.missing_eos_penalty is None and args.value_learning_rate == 1e-3
    *_, asked = parse("judge", ["--cache", "None"])
    assert asked.cache is None
    # catches: `none` refused for a number, or taken for None where it is a text
    words = "--config a.yaml --missing_eos_penalty none --target_kl None --stop_token none"
    *_, args = parse("ppo", f"{words} --stop_strings none --report_to none".split())
    assert (args.missing_eos_penalty, args.target_kl, args.stop_token) == (None, None, None)
    assert args.stop_strings == ["none"] and args.report_to in ("none", ["none"], [])


# catches: a help that does not tell that an option may be switched off
@pytest.mark.parametrize("name", ["ppo", "replay"])
def test_the_help_and_the_errors_name_none(name, capsys):
    with pytest.raises(SystemExit):
        PARSERS[name]().read(["--help"])
    printed = capsys.readouterr().out
    assert "--missing_eos_penalty NUMBER|none" in printed and "--kl_coef NUMBER " in printed
    with pytest.raises(SystemExit):
        PARSERS[name]().read(["--missing_eos_penalty", "many"])
    assert "invalid float or none value: 'many'" in capsys.readouterr().err


# ---- The published commands, names apart ----


RECIPES = {
    "mini_tldr": SETTINGS,
    "tldr_pythia_1b": SETTINGS,
    "dummy": ("ppo",),
    "guess_number": ("sft", "ppo"),
    "smollm2_positive": ("ppo",),
    "smollm2_learnt": ("reward", "ppo"),
    "gsm8k": ("ppo",),
}


@pytest.mark.parametrize(
    "recipe, name", [(recipe, name) for recipe, names in RECIPES.items() for name in names]
)
def test_recipes_parse(recipe, name):
    settings = read_recipe(recipe, name)
    more = ["--use_cpu"] * (name != "judge")  # bf16 wants a GPU, or a word that there is none
    words = [
        word
        for key, value in settings.items()
        for word in (f"--{key}", *(value if isinstance(value, list) else [value]))
    ]
    found = values_of(parse(name, ["--config", f"{recipe}.yaml", *more]))
    strip = lambda values: {key: value for key, value in values.items() if key != "run_name"}
    assert len(settings) > 3 and strip(found) == strip(values_of(parse(name, words + more)))


def test_the_launchers_say_what_they_are_called():
    from accelerate.commands.config.config_args import load_config_from_file

    kinds = dict(ddp="MULTI_GPU", fsdp2="FSDP", zero2="DEEPSPEED", zero3="DEEPSPEED")
    assert {p.stem for p in cli.RECIPES.glob("*.yaml")} == {*RECIPES, *kinds}
    for name, kind in kinds.items():
        path = cli.RECIPES / f"{name}.yaml"
        config = load_config_from_file(str(path))
        first = next(line for line in path.read_text().splitlines() if not line.startswith("#"))
        assert config.distributed_type == kind and config.num_processes == 8
        assert first == "num_processes: 8"
        if kind == "DEEPSPEED":
            assert config.deepspeed_config["zero_stage"] == int(name[-1])
        if kind == "FSDP":
            assert config.fsdp_config["fsdp_version"] == 2
    assert '"recipes/*"' in (ROOT / "setup.py").read_text()


# ---- A file of settings ----


# catches: a file that beats the line, an order that matters, a section of another command that
# leaks in
def test_flags_override_the_file():
    Path("a.yaml").write_text(
        "kl_coef: 0.1\nsave_strategy: no\nnum_ppo_epochs: 2\nppo:\n  kl_coef: 0.2\n  "
        "reward_weights: [1, -2]\nsft:\n  max_length: 9\n"
    )
    for words in ("--config a.yaml --num_ppo_epochs 3", "--num_ppo_epochs=3 --config=a.yaml"):
        *_, args = parse("ppo", words.split())
        assert (args.kl_coef, args.num_ppo_epochs, args.save_strategy) == (0.2, 3, "no")
        assert args.reward_weights == [1.0, -2.0]


@pytest.mark.parametrize(
    "text, said",
    [
        ("kl_coeff: 1", "unknown key 'kl_coeff'. Did you mean kl_coef?"),
        ("ppo:\n  learnin_rate: 1", "Did you mean learning_rate?"),
        ("num_ppo_epochs: 1.5", "invalid int value: '1.5'"),
        ("lr_scheduler_type: linaer", "invalid choice"),
        ("kl_coef: [1, 2]", "kl_coef takes one value"),
        ("kl_coef: -1", "kl_coef is -1.0: give a finite number"),
        ("kl_coef: null", "kl_coef is null: give a value, or leave the line out"),
        ("- kl_coef", "expected lines such as"),
        ("a: [", "a.yaml"),
        ("a: " + "[" * 10**4, "a.yaml: it is deep, or long with its"),
        ("kl_coef: 1\nkl_coef: 2", "kl_coef is set twice"),
        ("bf16: perhaps", "Truthy value expected: got perhaps"),
    ],
)
def test_a_file_that_cannot_be(capsys, text, said):
    Path("a.yaml").write_text(text)
    code, out, err = say(capsys, "ppo --config a.yaml --output_dir run")
    assert code == 2 and said in err and err.startswith("rlhf-nb ppo: ") and out == ""
    assert os.listdir() == ["a.yaml"]


def test_a_file_that_is_not_there(capsys):
    code, _, err = say(capsys, "ppo --config mini_tdlr.yaml")
    assert code == 2 and "Did you mean mini_tldr.yaml?" in err


# ---- Refusals ----


@pytest.fixture(scope="session")
def parts(tmp_path_factory, tokenizer, tiny, world):
    "A policy, a reward model and some files, for tests that look and do not touch."
    from rlhf_nb.models import scorer_from

    folder = tmp_path_factory.mktemp("parts")
    tiny().save_pretrained(folder / "sft")
    scorer_from(tiny()).save_pretrained(folder / "reward")
    for name in ("sft", "reward"):
        tokenizer.save_pretrained(folder / name)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}')
    rows = world["train"].select(range(24)).to_pandas()
    rows.to_json(folder / "rows.jsonl", orient="records", lines=True)
    rows[["prompt"]].to_json(folder / "prompts.jsonl", orient="records", lines=True)
    rows.assign(chosen=rows.completion, rejected=rows.completion)[
        ["prompt", "chosen", "rejected"]
    ].to_json(folder / "equal.jsonl", orient="records", lines=True)
    Dataset.from_dict(dict(chosen_ids=[[2, 3]] * 3, rejected_ids=[[2, 4]] * 3)).to_json(
        folder / "pair_ids.jsonl", orient="records", lines=True
    )
    return folder


COMMON = "--use_cpu --disable_tqdm --output_dir run"
SHORT_FOR = dict(  # in the lines below
    OUT=COMMON,
    SFT="--model_name_or_path {p}/sft",
    ROWS="--dataset_name {p}/rows.jsonl",
    PROMPTS="--dataset_name {p}/prompts.jsonl",
    RM="--reward_model_path {p}/reward",
    BY="--dataset_name {p}/rows.jsonl --model_name_or_path {p}/sft --reward_function",
)
BAD_LINES = {  # words: what is said. Files and folders that cannot be read are in test_border
    "sft ROWS OUT": "--model_name_or_path is missing",
    "sft SFT OUT": "--dataset_name is missing",
    "sft ROWS --dataset_train_split trian SFT OUT": "Did you mean train?",
    "sft ROWS --dataset_train_split train[30:] SFT OUT": "0 rows",
    "sft PROMPTS SFT OUT": "columns prompt, and this needs prompt and completion, or messages",
    "sft PROMPTS --from_scratch OUT": "columns prompt, and this needs prompt and completion:",
    "sft ROWS SFT --from_scratch OUT": "leave one of them out",
    "sft ROWS SFT --max_prompt_length 2 OUT": "none of 24 rows fits",
    "sft ROWS SFT --resume OUT": "There is no whole checkpoint",
    "sft ROWS SFT --learnin_rate 1 OUT": "Did you mean --learning_rate?",
    "reward ROWS SFT OUT": "needs chosen and rejected, or chosen_ids and rejected_ids: rename them",
    "reward --dataset_name {p}/pair_ids.jsonl SFT --center_rewards OUT": (
        "answers as token ids, and the mean is taken over texts"
    ),
    "reward --dataset_name {p}/equal.jsonl SFT OUT": "row 0: chosen and rejected are the same",
    "ppo ROWS SFT OUT": "--reward_model_path is missing",
    "ppo BY gold --per_device_train_batch_size 64 OUT": "24 prompts and one update takes 64",
    "ppo PROMPTS SFT --reward_function gold --response_length 4 OUT": "needs the column facts",
    "ppo BY golt OUT": "Did you mean gold?",
    "ppo --dataset_name no/set SFT --reward_function no.py:f OUT": "no.py",
    "ppo BY nothing:here OUT": "No module named 'nothing'",
    "ppo BY math:pi OUT": "math has no function pi (pi is float).",
    "ppo": "--dataset_name is missing; --model_name_or_path is missing (or --sft_model_path); --rew",
    "reward --lr 1": "Did you mean --learning_rate?",
    "trian": "Did you mean sft, reward or ppo?",
    "ppo BY gold --kl_coef x": "invalid float value: 'x'",
    "ppo BY gold OUT extra": "unrecognized arguments: extra",
    "ppo --kl 1": "Did you mean --kl_coef?",
    "ppo ROWS SFT RM --reward_aggregation min --reward_center completion OUT": (
        "needs two reward models or more, and there is 1"
    ),
    "ppo ROWS SFT RM --reward_ensemble {p}/rewrd OUT": "--reward_ensemble",
    "judge PROMPTS SFT --judge_model gold": "lacks ['completion']",
    "judge --dataset_name {p}/equal.jsonl SFT --opponent_name_or_path {p}/sft --judge_model gold": (
        "needs the column facts"
    ),
    "judge ROWS SFT --judge_model gold --num_examples 25": "is 25 and the split has 24",
    "judge ROWS SFT --cache None": "set OPENAI_API_KEY, or give a server of your own (base_url=, or",
    "judge ROWS --model_name_or_path {p} --judge_model gold": "In it, these have one: reward, sft.",
    "plot {p} {p}/. --group x": "--group has 1 names for 2 runs",
    "plot a --ncols 0": "--ncols is 0",
    "view": "RUN",
    "veiw a": "Did you mean view?",
    "": "COMMAND",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_input_is_one_line_and_leaves_nothing(parts, capsys, monkeypatch, line):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    words = " ".join(SHORT_FOR.get(word, word) for word in line.split(" "))
    code, _, err = say(capsys, words.format(p=parts))
    assert code == 2 and BAD_LINES[line] in err and err.startswith("rlhf-nb"), err
    assert os.listdir() == []


# catches: a user's own mistake told without the line that failed, or as a page of our own calls
def test_a_reward_function_that_fails_names_its_line(parts, capsys, monkeypatch):
    Path("mine.py").write_text(
        "def f(prompts, responses, **columns): return [int(r) for r in responses]\ndef "
        "short(prompts, responses, **columns): return [1.0]"
    )
    line = (
        f"ppo --dataset_name {parts}/rows.jsonl --model_name_or_path {parts}/sft "
        f"--per_device_train_batch_size 8 --response_length 3 {COMMON} --reward_function mine.py:"
    )
    code, _, err = say(capsys, line + "f")
    assert code == 2 and "reward function mine.py:f failed: ValueError: invalid literal" in err
    assert "mine.py, line 1)" in err and "RLHF_NB_DEBUG=1" in err
    monkeypatch.setenv("RLHF_NB_DEBUG", "1")
    with pytest.raises(RuntimeError, match="mine.py:f failed") as caught:
        cli.main(shlex.split(line + "f"))
    assert isinstance(caught.value.__cause__, ValueError)
    monkeypatch.delenv("RLHF_NB_DEBUG")
    code, _, err = say(capsys, line + "short")
    assert code == 2 and "returned 1 scores for 8 responses" in err


def test_reward_functions_by_name(monkeypatch):
    Path("here_only.py").write_text(
        "def f(prompts, responses, **columns): return [len(columns)] * len(responses)"
    )
    for name in ("here_only:f", "here_only.py:f", str(Path("here_only.py").resolve()) + ":f"):
        assert scoring.load_reward_function(name)(["p"], ["r"], a=[1], b=[2]) == [2]
    assert os.getcwd() not in sys.path
    facts = "who=boss did=sold what=car when=monday why=tired feeling=sad question=sue"
    truth = json.dumps(dict(fact.split("=") for fact in facts.split()))
    assert scoring.load_reward_function("gold")(
        ["p", "p"], [" my boss sold my car.", " my boss sold my tent."], facts=[truth, truth]
    ) == [3.0, 0.0]


# catches: an engine that is named and does not sample, one that vLLM replaces, and one that is none
def test_an_engine_by_name_is_what_samples(parts, capsys):
    Path("mine.py").write_text(
        "from pathlib import Path\nfrom rlhf_nb.training.engines import CachedEngine\n"
        "class Noted(CachedEngine):\n"
        "    def generate(self, ids, mask, settings):\n"
        "        Path('sampled').open('a').write(f'{len(ids)} ')\n"
        "        return super().generate(ids, mask, settings)\n"
        "def make(args, policy, tokenizer):\n"
        "    assert args.response_length == 3 and tokenizer.eos_token and policy.config\n"
        "    return Noted(8)\n"
        "def nothing(args, policy, tokenizer): return args\n"
    )
    line = (
        f"ppo --dataset_name {parts}/rows.jsonl --model_name_or_path {parts}/sft --max_steps 1 "
        "--per_device_train_batch_size 8 --response_length 3 --reward_function ones.py:ones "
        f"{COMMON} --output_dir run --engine "
    )
    Path("ones.py").write_text("def ones(prompts, responses, **c): return [1.0] * len(responses)")
    assert say(capsys, line + "mine.py:make --num_sample_generations 0")[0] == 0
    assert Path("sampled").read_text() == "8 "
    for words, said in (
        ("mine.py:nothing", "mine.py:nothing returned a PPOConfig: "),
        ("mine.py:none", "mine.py has no function none"),
        ("mine", "give module:function or file.py:function"),
        ("mine.py:make --use_vllm", "--engine and --use_vllm both say who samples"),
    ):
        code, _, err = say(capsys, line + words + " --overwrite_output_dir")
        assert code == 2 and said in err, err


# ---- What a trainer is given ----


class Stop(Exception):
    pass


def given(monkeypatch, name: str, line: str) -> dict:
    "The arguments that the command makes its trainer with."
    import inspect

    module, kind = dict(
        sft=(sft, "SFTTrainer"), reward=(reward, "RewardTrainer"), ppo=(ppo, "PPOTrainer")
    )[name]
    seen, true = {}, getattr(module, kind)

    def watch(*args, **kwargs):
        seen.update(inspect.signature(true).bind(*args, **kwargs).arguments)
        raise Stop

    monkeypatch.setattr(module, kind, watch)
    with pytest.raises(Stop):
        cli.main(shlex.split(f"{name} {line} {COMMON}"))
    assert not Path("run").exists()
    return seen


# catches: a value model or an adapter that was asked for and is not passed, weights in another
# order than reward_weights, the wrong one of two policies
def test_ppo_is_given_what_the_flags_say(parts, monkeypatch, tmp_path):
    import torch

    from rlhf_nb.models import scorer_head
    from rlhf_nb.training.model_loading import load_policy

    other = load_policy(str(parts / "sft"))
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(2)
    other.save_pretrained(tmp_path / "other")
    Path("own.py").write_text("def own(prompts, responses, **columns): return [0] * len(prompts)")
    line = (
        f"--dataset_name {parts}/rows.jsonl --dataset_test_split train[:5] --model_name_or_path "
        f"{parts}/sft --sft_model_path {tmp_path}/other --reward_function gold own.py:own "
        f"--reward_model_path {parts}/reward --reward_tokenizer_name_or_path {parts}/reward "
        "--zero_value_head --use_peft --lora_r 3 --lora_alpha 5 --lora_target_modules all-linear"
    )
    shutil.rmtree("run", ignore_errors=True)
    seen = given(monkeypatch, "ppo", line)
    assert torch.equal(
        seen["model"].get_output_embeddings().weight, other.get_output_embeddings().weight
    )
    assert [getattr(judge, "__name__", "model") for judge in seen["reward_model"]] == [
        "model",
        "gold_points",
        "own",
    ]
    assert scorer_head(seen["value_model"]).weight.abs().max() == 0
    assert scorer_head(seen["reward_model"][0]).weight.abs().max() > 0
    lora = seen["peft_config"]
    assert (
        lora.r,
        lora.lora_alpha,
        lora.target_modules,
        lora.task_type,
        seen["value_peft_config"],
    ) == (3, 5, "all-linear", "CAUSAL_LM", None)
    assert len(seen["train_dataset"]) == 24 and len(seen["eval_dataset"]) == 5
    assert seen["reward_processing_class"].name_or_path == f"{parts}/reward"
    assert "facts" in seen["train_dataset"].column_names


# catches: a dtype that is not passed on, an adapter without its task, rows that are too long kept,
# pairs made of the wrong split
def test_sft_and_reward_are_given_what_the_flags_say(parts, monkeypatch, capsys):
    import torch

    from rlhf_nb.training.model_loading import load_tokenizer

    rows = pd.read_json(parts / "rows.jsonl", lines=True)
    lengths = [
        len(ids) for ids in load_tokenizer(str(parts / "sft"))(rows.prompt.tolist())["input_ids"]
    ]
    most = sorted(lengths)[11]
    seen = given(
        monkeypatch,
        "sft",
        f"--dataset_name {parts}/rows.jsonl --model_name_or_path {parts}/sft --dtype bfloat16 "
        f"--attn_implementation eager --max_prompt_length {most}",
    )
    assert seen["model"].dtype == torch.bfloat16
    assert seen["model"].config._attn_implementation == "eager"
    assert seen["eval_dataset"] is None
    assert len(seen["train_dataset"]) == sum(n <= most for n in lengths) < 24
    assert "too long" in capsys.readouterr().out
    seen = given(
        monkeypatch,
        "reward",
        "--dataset_name mini_tldr --dataset_train_split train[:7] --dataset_test_split test[:3] "
        f"--dataset_seed 5 --model_name_or_path {parts}/sft --use_peft --dtype bfloat16",
    )
    from rlhf_nb.world import edit_pairs, mini_tldr

    world = mini_tldr(5, 7, 1, 3)
    assert seen["train_dataset"].to_list() == edit_pairs(world["train"], 5).to_list()
    assert len(seen["eval_dataset"]) == 3
    assert seen["model"].dtype == torch.bfloat16
    assert seen["peft_config"].task_type == "SEQ_CLS" and seen["model"].config.num_labels == 1


# catches: --resume that is parsed and not passed on; Ctrl-C with a traceback
@pytest.mark.parametrize(
    "more, start",
    [
        ("", None),
        ("--resume", True),
        ("--resume_from_checkpoint there", "there"),
        ("--resume_from_checkpoint True", True),
        ("--resume False", None),
    ],
)
def test_resume_reaches_train(parts, monkeypatch, capsys, more, start):
    from rlhf_nb.training.sealed import SealedTrainer

    seen = []

    def train(self, resume_from_checkpoint=None):
        seen.append(resume_from_checkpoint)
        raise KeyboardInterrupt(*(["stopped after step 4. It is whole."] if start is True else []))

    monkeypatch.setattr(SealedTrainer, "train", train)
    code, _, err = say(
        capsys,
        f"sft --dataset_name {parts}/rows.jsonl --model_name_or_path {parts}/sft {COMMON} {more}",
    )
    left = "sft: stopped after step 4. It is whole." if start is True else "--resume goes on"
    assert (code, seen) == (130, [start]) and left in err and not Path("run").exists()


# catches: a loss that ran away told as bad words (exit 2), or with a traceback
def test_a_run_that_diverges_ends_with_one(parts, monkeypatch, capsys):
    from rlhf_nb.trainer import PPOTrainer

    def train(self, **given):
        raise FloatingPointError("the loss of update 3 is nan")

    monkeypatch.setattr(PPOTrainer, "train", train)
    code, _, err = say(
        capsys,
        f"ppo --dataset_name {parts}/rows.jsonl --model_name_or_path {parts}/sft "
        f"--reward_function gold {COMMON}",
    )
    assert (code, err) == (1, "rlhf-nb ppo: the loss of update 3 is nan")


# ---- Rows ----


# catches: a kind of file that is read as another, a slice that the embedded sets ignore or that
# shifts their rows
def test_rows_come_from_everywhere(parts, tmp_path):
    from rlhf_nb.world import mini_tldr

    frame = pd.DataFrame(
        dict(prompt=["one", 'zwei, "quoted"', "три\nlines"], completion=[" a", " b", " c"])
    )
    frame.to_json("a.json", orient="records")
    frame.to_json("a.jsonl", orient="records", lines=True)
    frame.to_csv("a.csv", index=False)
    frame.to_parquet("a.parquet")
    DatasetDict(train=Dataset.from_pandas(frame), test=Dataset.from_pandas(frame[:1])).save_to_disk(
        "both"
    )
    Dataset.from_pandas(frame).save_to_disk("one")
    for name in ("a.json", "a.jsonl", "a.csv", "a.parquet", "both", "one"):
        assert data.take(data.load_rows(name), "train").to_pandas().equals(frame), name
    assert len(data.take(data.load_rows("both"), "train+test[:1]")) == 4
    assert data.take(data.load_rows("one"), "train[1:]")["completion"][:] == [" b", " c"]
    assert data.take(data.load_rows("one"), "train[-1:]")["completion"][:] == [" c"]
    loaded = data.load_rows("mini_tldr", None, 3, ["train[:9]", "test"])
    for split, n in (("train[:9]", 9), ("test", 2000)):
        rows = data.take(loaded, split)
        assert len(rows) == n
        assert rows["prompt"][:9] == mini_tldr(3, 9, 1, 9)[split.split("[")[0]]["prompt"][:9]
    assert data.load_rows("mini_tldr", None, 0, ["train[1%:2%]"]).num_rows == dict(
        train=24_000, validation=1_000, test=2_000
    )


# catches: a file of labels that stops at its first tie, or one whose choice that was taken back is
# learned
def test_a_file_of_labels_gives_its_decided_pairs(parts, tmp_path, monkeypatch):
    from rlhf_nb.ui.preference_labels import Labelling, load_preferences

    monkeypatch.chdir(tmp_path)
    work = Labelling(
        [dict(prompt=f"p{i}", answer_1=f"a{i}", answer_2=f"b{i}") for i in range(12)],
        "labels.jsonl",
        repeat_every=4,
    )
    for key in "102212102":
        work.choose(key)
    work.undo()
    assert any(row["again"] for row in work.rows)
    rows = data.pairs_of(
        data.take(data.load_rows("labels.jsonl"), "train"), data.TrainDataArguments("labels.jsonl")
    )
    names = ["prompt", "chosen", "rejected"]
    assert (
        rows.select_columns(names)[:] == load_preferences("labels.jsonl").select_columns(names)[:]
        and 3 < len(rows) < 8
    )


# ---- judge ----


@pytest.fixture
def endpoint():
    "Prefers the answer with the mark, but for the first 33 prompts; counts what it is asked."
    asked = []

    def reply(text):
        asked.append(text)
        number = int(re.search(r"number (\d+)", text)[1])
        first = "REFERENCE" in text.split("<first>")[1].split("</first>")[0]
        return "1" if first != (number < 33) else "2"

    with Endpoint(reply) as made:
        made.asked = asked
        yield made


# catches: answers and references that change places, verdicts that are asked for (and paid) twice,
# an interval that is missing
def test_the_published_judging_run(parts, capsys, endpoint, monkeypatch):
    rows = [
        dict(prompt=f"number {i} . my boss sold my car . TL;DR:", completion=" REFERENCE")
        for i in range(100)
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    line = (
        f"judge --model_name_or_path {parts}/sft --judge_model gpt-4o-mini --num_examples 100 "
        "--dataset_name rows.jsonl --response_length 4 --prices 1000 1000 --output out/all.csv"
    )
    code, out, _ = say(capsys, line)
    assert code == 0 and "cost 2.2000" in out and len(endpoint.asked) == 200
    assert out.splitlines()[-1] == "Model win rate: 33.00% (95% interval 24.6 to 42.7)"
    assert len(Path("judgings.jsonl").read_text().splitlines()) == 200
    table = pd.read_csv("out/all.csv", keep_default_na=False)
    assert table["verdict"].tolist() == [1.0] * 33 + [0.0] * 67
    assert set(table["compared with"]) == {" REFERENCE"}
    code, out, _ = say(capsys, line + " --one_order")
    assert code == 0 and len(endpoint.asked) == 200
    assert out.splitlines()[-1].startswith("Model win rate: 33.00%")


def test_other_judges(parts, capsys):
    both = (
        f"judge --model_name_or_path {parts}/sft --dataset_name {parts}/rows.jsonl "
        "--response_length 6 --batch_size 7 --judge_model "
    )
    code, out, _ = say(capsys, both + "gold")
    assert code == 0
    assert re.search(r"^Model win rate: [\d.]+% \(95% interval", out.splitlines()[-1])
    assert "gold judge" in out
    assert "Pairs: 24" in out
    code, out, _ = say(capsys, both + f"{parts}/reward --opponent_name_or_path {parts}/sft")
    assert (
        code == 0 and out.splitlines()[-1].startswith("Model win rate: 50.00%") and "ties 24" in out
    )  # a model against itself


# catches: the policy's marks as text in what a reward model with its own template reads, tools that
# no template sees, the end mark of a reference as part of what it answers
def test_a_reward_model_judges_conversations_in_its_own_template(
    parts, capsys, tokenizer, tmp_path, monkeypatch
):
    from rlhf_nb.judges import load_judge
    from rlhf_nb.scoring import score_ids

    turns = "{% for m in messages %}{{ ' POST: ' + m.content + ' r/end' }}{% endfor %}"
    ours, own = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    ours.chat_template = "{{ tools[0].name }}" + turns
    ours.chat_template += "{{ ' POST: ' if add_generation_prompt }}"
    own.chat_template = (
        "{{ tools[0].name }} TITLE: {{ messages | map(attribute='content') | join(' ') }}"
    )
    for name, words in (("sft", ours), ("reward", own)):
        shutil.copytree(parts / name, tmp_path / name)
        words.save_pretrained(tmp_path / name)
    answers = ["my boss sold my car .", "my dog"] * 3
    turn = lambda role, content: dict(role=role, content=content)
    rows = [
        dict(
            prompt=[turn("user", f"my dog sold {i}")],
            completion=[turn("assistant", answer)],
            tools=[dict(name="boss" if i % 2 else "car")],
        )
        for i, answer in enumerate(answers)
    ]
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    seen, judge_pairs = [], judge.judge_pairs
    record = lambda *given, **named: seen.append(given) or judge_pairs(*given, **named)
    monkeypatch.setattr(judge, "judge_pairs", record)
    line = f"judge --model_name_or_path {tmp_path}/sft --judge_model {tmp_path}/reward --use_cpu "
    line += "--dataset_name talks.jsonl --response_length 4 --output out.csv"
    code, _, error = say(capsys, line)
    assert code == 0, error
    table = pd.read_csv("out.csv", keep_default_na=False)
    assert table["compared with"].tolist() == answers
    how = lambda row: dict(tools=row["tools"], tokenize=False)
    queries = [
        ours.apply_chat_template(row["prompt"], add_generation_prompt=True, **how(row))
        for row in rows
    ]
    assert seen[0][1] == queries and "boss POST: my dog sold 1" in queries[1]
    assert table["query"].tolist() == [f"user: my dog sold {i}" for i in range(6)]
    scores = []
    for row, response, answer, ends in zip(rows, table["model response"], answers, seen[0][5]):
        texts = [
            own.apply_chat_template([*row["prompt"], turn("assistant", said)], **how(row))
            for said in (response, answer)
        ]
        scores.append([own(x)["input_ids"] + [own.eos_token_id] * e for x, e in zip(texts, ends)])
    model = load_judge(str(tmp_path / "reward"))
    mine, theirs = (score_ids(model, [*ids], own.pad_token_id) for ids in zip(*scores))
    assert table["verdict"].tolist() == (mine > theirs).float().tolist()
    assert (mine - theirs).abs().min() > 1e-4


# catches: a full disk that takes the verdict with the file
def test_a_judges_report_outlives_its_file(parts, capsys):
    line = f"judge --model_name_or_path {parts}/sft --dataset_name {parts}/rows.jsonl --use_cpu "
    line += f"--judge_model {parts}/reward --response_length 4 --output /dev/full"
    code, shown, error = say(capsys, line)
    assert code == 2 and "Model win rate" in shown and "No space left on device" in error


# ---- plot ----


# catches: values left out where one run stopped early or logged less often, a mean of two means that
# is not weighted, a learning rate that is averaged, the end of a run after the last shared point
def test_runs_are_averaged_where_all_have_a_point():
    log = lambda metric, points: [{"episode": float(x), metric: y} for x, y in points.items()]
    every = {64: 1.0, 128: 3, 192: 5, 256: 7}
    runs = [log("loss", every), log("loss", {128: 4.0, 256: 8}), log("loss", {64: 0.0, 128: 6})]
    found = plot_runs.over_runs(runs, "loss", "episode")
    assert found.index.tolist() == [128, 256] and found["runs"].tolist() == [3, 2]
    assert found["mean"].tolist() == [(2 + 4 + 3) / 3, 7]
    assert found["least"].tolist() == [2, 6] and found["most"].tolist() == [4, 8]
    uneven = [log("loss", {64: 1.0, 192: 4, 256: 9}), log("loss", {192: 0.0, 256: 0})]
    assert plot_runs.over_runs(uneven, "loss", "episode")["most"].tolist() == [3, 9]
    rates = [log("lr", every), log("lr", {128: 4.0, 256: 8})]
    assert plot_runs.over_runs(rates, "lr", "episode")["least"].tolist() == [3, 7]
    assert plot_runs.over_runs(runs, "val/ratio", "episode").empty
    apart = [log("loss", {2: 1.0, 4: 1}), log("loss", {3: 1.0})]
    with pytest.raises(ValueError, match="no common episode: .*--group"):
        plot_runs.over_runs(apart, "loss", "episode")


# catches: updates that are dropped, or a seed that is, because they are ill
def test_a_run_that_turned_to_nan_leaves_a_gap():
    for seed, scores in enumerate([[1.0, 2, 3, 4], [3.0, math.nan, math.inf, 6]]):
        write_run(f"a_seed{seed}", scores)
    logs = {"a": [steps_of(f"a_seed{seed}") for seed in range(2)]}
    found = plot_runs.over_runs(logs["a"], "objective/scores", "episode")
    assert found["runs"].tolist() == [2] * 4 and found.index.tolist() == [64, 128, 192, 256]
    assert np.isnan(found.loc[[128, 192], ["mean", "least", "most"]]).all(axis=None)
    drawn = plot_runs.plot_runs(logs, ["objective/scores"]).axes[0].get_lines()[0].get_ydata()
    assert np.array_equal(drawn, [2, math.nan, math.nan, 5], equal_nan=True)
    log = [{"step": 1.0, "episode": 4.0, "kl": 1.0}, {"step": 2.0, "episode": 8.0, "kl": math.nan}]
    last = plot_runs.last_values({"a": [log, log[:1]]}, ["kl", "episode"])
    assert last["mean"].isna().tolist() == [True, False] and last["least"].tolist()[1] == 4
    coarse = [{"step": 2.0, "episode": 8.0, "kl": 2.0}]  # a NaN that a sum would hide
    assert plot_runs.over_runs([log, coarse], "kl", "episode")["mean"].isna().all()


def write_run(folder, scores, name="trainer_state.json", start=64):
    Path(folder).mkdir(parents=True, exist_ok=True)
    history = []
    for step, score in enumerate(scores, 1):
        row = {"objective/scores": score, "val/ratio": 1.0, "loss/policy_avg": 0.1}
        history.append(row | {"episode": start * step, "step": step, "time/update": 2.0})
        history.append({"eval_score": score / 2, "step": step, "epoch": 0.5})
    Path(folder, name).write_text(json.dumps(dict(log_history=history)))


# catches: the log of an old checkpoint, checkpoint-9 taken for newer than checkpoint-10, an
# evaluation that becomes a row of its own
def test_a_log_is_read(tmp_path):
    write_run("run/checkpoint-9", [1.0])
    write_run("run/checkpoint-10", [1.0, 2.0])
    assert read_log("run")["objective/scores"].tolist() == [1, 2]
    write_run("run", [1.0, 2.0, 3.0])
    log = read_log("run")
    assert log["episode"].tolist() == [64, 128, 192]
    assert log["eval_score"].tolist() == [0.5, 1.0, 1.5]
    Path("demo").mkdir()
    Path("demo/metrics.jsonl").write_text(
        '{"stage": "sft", "step": 1, "loss": 9}\n{"stage": "ppo", "step": 1, "episode": 32, '
        '"objective/kl": 1}\n{"stage": "ppo", "step": 1, "episode": 32, "gold/win_rate": '
        '0.5}\n{"st'
    )
    assert read_log("demo").to_dict("records") == [
        {"step": 1.0, "episode": 32.0, "objective/kl": 1.0, "gold/win_rate": 0.5}
    ]
    for text in ('{"log_history": []}', "half a fi", "{}"):
        Path("run/trainer_state.json").write_text(text)
        with pytest.raises(ValueError, match="run cannot be drawn"):
            read_log("run")


# catches: the log of before a run was resumed, a state that is behind metrics.jsonl; a folder that
# somebody named checkpoint-best
def test_the_log_that_went_furthest():
    write_run("run", [1.0, 2, 3, 4])
    write_run("run/checkpoint-3", [1.0, 2, 3])
    write_run("run/checkpoint-best", [1.0, 2])
    assert read_log("run")["objective/scores"].tolist() == [1, 2, 3, 4]
    write_run("run/checkpoint-9", [9.0] * 9)
    assert len(read_log("run")) == 9
    rows = [
        dict(step=step, episode=64 * step, loss=attempt)
        for attempt, step in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)]
    ]
    Path("run/metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_log("run")["loss"].tolist() == [1, 1, 2, 3]
    rows.append(dict(step=3, episode=192, loss=4))  # it went back, and is not as far again
    Path("run/metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_log("run")["loss"].tolist() == [1, 1, 4]


@pytest.mark.parametrize(
    "runs, groups",
    [
        (["runs/a_seed0", "runs/a_seed1", "runs/b_seed0"], dict(a=2, b=1)),
        (["a/seed1", "a/seed22", "b/seed1/"], dict(a=2, b=1)),
        (["x/ppo", "y/ppo"], {"x/ppo": 1, "y/ppo": 1}),
        (["runs/a"], dict(a=1)),
        (["seed_1", "seed_2"], None),
        (["a-seed=3", "a.seed4"], dict(a=2)),
        (["/r/a_seed1", "/r/a_seed2"], dict(a=2)),
        (["a", "a_long"], dict(a=1, a_long=1)),
    ],
)
def test_runs_are_grouped_by_all_but_the_seed(runs, groups):
    found = plot_runs.group_runs(runs)
    assert [run for group in found.values() for run in group] == runs
    if groups:
        assert {name: len(group) for name, group in found.items()} == groups


# catches: panels in another order, a band of a single run, the mean of something else, an axis that
# is not episodes
def test_the_figure():
    for name, scores in dict(a_seed0=[1.0, 2, 3], a_seed1=[3.0, 4, 5], b=[7.0, 8, 9]).items():
        write_run(name, scores)
    logs = {
        name: [steps_of(run) for run in runs]
        for name, runs in plot_runs.group_runs(["a_seed0", "a_seed1", "b"]).items()
    }
    figure = plot_runs.plot_runs(logs, ["val/ratio", "objective/scores"])
    assert [axis.get_title() for axis in figure.axes] == ["val/ratio", "objective/scores"]
    assert "from the least to the most" in figure.get_suptitle()
    axis = figure.axes[1]
    assert [line.get_ydata().tolist() for line in axis.get_lines()] == [[2, 3, 4], [7, 8, 9]]
    assert axis.get_xlabel() == "episode"
    assert axis.get_lines()[0].get_xdata().tolist() == [64, 128, 192]
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max(), len(axis.collections)) == (1, 5, 1)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a (2 runs)", "b"]
    assert plot_runs.plot_runs({"b": logs["b"]}, ["val/ratio"]).get_suptitle() == ""


def test_the_plot_command(capsys):
    for seed, scores in enumerate([[1.0, 2, 3], [3.0, 4, 5]]):
        write_run(f"a_seed{seed}", scores)
    code, out, _ = say(capsys, "plot a_seed0 a_seed1 --output figures/all")
    assert code == 0
    assert Path("figures/all.png").read_bytes()[:4] == b"\x89PNG"
    assert "2 metrics of 2 runs in figures/all.png" in out and "'*' draws all" in out
    assert sorted(os.listdir("figures")) == ["all.png", "all.svg"]
    first = Path("figures/all.svg").read_text()
    assert say(capsys, "plot a_seed0 a_seed1 --output figures/all.png")[0] == 0
    assert Path("figures/all.svg").read_text() == first  # the same bytes again
    chosen = plot_runs.choose_metrics([steps_of("a_seed0")], ["*_score", "objective/*"])
    assert chosen == ["eval_score", "objective/scores"]
    code, _, err = say(capsys, "plot a_seed0 --metrics objectiv/scores")
    assert code == 2 and "Did you mean objective/scores?" in err


# catches: a run that counts twice, last values of another update, an unfinished or an ill run without
# a word, a name that colours the terminal
def test_what_plot_prints(capsys):
    write_run("a_seed0", [1.0, 2, 3])
    write_run("a_seed1", [5.0, math.nan])
    Path("link").symlink_to("a_seed0")
    state = json.loads(Path("a_seed1/trainer_state.json").read_text())
    Path("a_seed1/trainer_state.json").write_text(json.dumps(state | dict(max_steps=3)))
    code, out, _ = say(capsys, "plot a_seed0 a_seed1 a_seed0 link --metrics objective/*")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and ["metric", "name", "mean", "least", "most", "runs"] in lines
    assert ["episode", "a", "160", "128", "192", "2"] in lines
    assert ["objective/scores", "a", "nan", "nan", "nan", "2"] in lines
    assert "a_seed1 is not finished: 2 of 3 updates." in out and "a_seed0 is not" not in out
    assert "a_seed1 logged NaN: objective/scores from episode 128 on." in out
    assert "2 of the runs were given before" in out and "1 metric of 2 runs" in out
    write_run("\x1b[31m", [1.0])
    assert "\x1b[31m" not in say(capsys, "plot a_seed0 \x1b[31m --group a b\x1b[31m")[1]


@pytest.mark.parametrize(
    "files, says",
    [
        ({}, "neither metrics.jsonl nor trainer_state.json"),
        ({"metrics.jsonl": '{"step": 1}\n{"step"\n{"step": 3}\n'}, "line 2 is not JSON"),
        ({"metrics.jsonl": '{"a":' * 10**5 + "\n{}\n"}, "line 1 is not JSON (it is nested more"),
        ({"trainer_state.json": "{"}, "run/trainer_state.json is damaged"),
        ({"trainer_state.json": "[" * 10**5}, "run/trainer_state.json is damaged (it is nested"),
        (
            {"metrics.jsonl": '{"step": 1, "loss": 2}\n', "settings.json": "{"},
            "settings.json is dam",
        ),
        ({"metrics.jsonl": '{"step": 1, "loss": 2}\n', "settings.json": "[1]"}, "holds a list"),
        (
            {"trainer_state.json": '{"log_history": [{"step": 1, "a": 2}], "max_steps": "many"}'},
            "run/trainer_state.json: max_steps is 'many'",
        ),
    ],
)
def test_a_damaged_run_is_named_by_plot(files, says, capsys):
    Path("run").mkdir()
    for name, text in files.items():
        Path("run", name).write_text(text)
    code, _, err = say(capsys, "plot run")
    assert code == 2 and says in err and "\n" not in err


LOGGED = '{"step": 1, "loss": 2}\n'


# catches: a traceback of a step that is none, a figure of 100,000 panels, lines left out in silence
@pytest.mark.parametrize(
    "line",
    [
        *('{"step": "x"}', '{"step": [1]}', '{"step": null}', '{"step": 1e400}'),
        f'{{"step": 2, "episode": {10**400}}}',
        json.dumps(dict.fromkeys(["step", *map(str, range(1000))], 2)),
    ],
    ids=lambda line: line[:20],
)
@pytest.mark.parametrize("kept", ["metrics.jsonl", "trainer_state.json"])
def test_lines_that_are_no_log_are_counted(line, kept, capsys):
    rows = [LOGGED, line, LOGGED.replace("1", "3")]
    text = "\n".join(rows) if kept == "metrics.jsonl" else f'{{"log_history": [{",".join(rows)}]}}'
    for folder in ("run", "run/checkpoint-1"):
        Path(folder).mkdir()
        Path(folder, kept).write_text(text)
    with pytest.warns(UserWarning, match="run.*: 1 lines of its log are left out"):
        code, out, _ = say(capsys, "plot run")
    assert code == 0 and "1 metric of 1 run in" in out


# ---- view ----


def page_of_view():
    "The page that `rlhf-nb view run` wrote, and its data."
    page = Path("run/rollouts.html").read_text()
    return page, json.loads(page.split('id="rlhf-reader-data">')[1].split("</script")[0])


@pytest.mark.parametrize(
    "text, shown",
    [("a short one", "a short one"), ("w" * 10 + " tail" * 40, "… " + " ".join(["tail"] * 31))],
)
def test_prompts_are_cut_between_words(text, shown):
    assert end_of(text) == shown


# catches: a second run that is left out, a page that stays behind a run that goes on
def test_view_of_two_runs_and_of_one_that_trains(ppo, capsys, monkeypatch):
    for name in ("run", "other"):
        ppo.trained(save_rollouts=True, output_dir=str(Path(name).resolve()))
    assert say(capsys, "view run other --no-browser")[0] == 0
    assert [x.get("run") for x in page_of_view()[1]["updates"]] == [None] * 3 + [1] * 3
    kept, late = sorted(Path("run/rollouts").iterdir())[2], Path("late")
    kept.rename(late)

    def wait(seconds):
        if not late.exists():
            raise KeyboardInterrupt
        late.rename(kept)

    monkeypatch.setattr(view.time, "sleep", wait)
    code, out, _ = say(capsys, "view run --live --no-browser")
    assert code == 0 and "update 2 is in the page" in out and len(page_of_view()[1]["updates"]) == 3


# catches: text of a model that runs as script, one update of three, a browser that opens unasked,
# ranks left out or shown twice
def test_view(ppo, capsys, monkeypatch):
    ppo.trained(save_rollouts=True, output_dir=str(Path("run").resolve()))
    path = sorted(Path("run/rollouts").iterdir())[1]
    from rlhf_nb.rollout import Rollout

    r = Rollout.load(path)
    r.with_(
        prompts=["<script>alert(1)</script>"] * len(r),
        responses=["<b>bold</b>"] * len(r),
        tokens=[["<b>", "[red]", *row[2:]] for row in r.tokens],
    ).save(path)
    opened = []
    monkeypatch.setattr(view.webbrowser, "open", lambda address: opened.append(address) or True)
    code, out, _ = say(capsys, "view run --episodes 2")
    page, data = page_of_view()
    assert code == 0
    again = say(capsys, "view run/rollouts.html")  # the page itself is opened, and stays
    assert again == (0, "rlhf-nb view: run/rollouts.html\n", "")
    assert opened == [Path("run/rollouts.html").resolve().as_uri()] * 2
    assert "run/rollouts.html" in out and page.count("<script") == 2 and "<b>bold" not in page
    assert [one["name"] for one in data["updates"]] == ["0", "1", "2"]
    assert "Content-Security-Policy" in page
    header, _ = unpacked(data["updates"][1]["packed"])
    assert header["episodes"] == [0, 1] and "<b>" in header["answers"][0]
    assert say(capsys, "view run --no-browser --update 0 2")[0] == 0 and len(opened) == 2
    _, data = page_of_view()
    assert [one["name"] for one in data["updates"]] == ["0", "2"]
    header, _ = unpacked(data["updates"][0]["packed"])
    assert len(header["episodes"]) == header["of"] and header["recipe"]  # all, for a what-if
    assert "carries its own" in say(capsys, "view run --no-browser --objective lam=0.5")[2]
    for file in Path("run/rollouts").iterdir():
        old = Rollout.load(file)
        old.with_(objective=None).save(file)
    assert "does not say with which settings" in say(capsys, "view run --no-browser")[1]
    out = say(capsys, "view run --no-browser --objective lam=0.5,kl_coef=0.5")[1]
    assert "kl_coef 0.5, k1, gamma 1, lam 0.5, EOS penalty 0 (chosen by you)" in out
    made = ",".join(f"{k}={old.objective[k]}" for k in ("lam", "kl_coef"))
    assert "does not say" not in say(capsys, f"view run --no-browser --objective {made}")[1]
    for wrong in ("lamm=0.5", "lam=2"):
        code, _, err = say(capsys, f"view run --no-browser --objective {wrong}")
        assert code and "lam" in err
    Path("run/rollouts.html").unlink()
    code, out, _ = say(capsys, "view run --terminal --update 1 --episodes 3")
    assert code == 0 and "Update 1" in out and "[red]" in out
    assert not Path("run/rollouts.html").exists()
    assert "--terminal shows one run" in say(capsys, "view run run --terminal")[2]
    assert "--objective lamm=1: unrec" in say(capsys, "view run --terminal --objective lamm=1")[2]
    assert out.count("stopped") + out.count("cut off") == 3
    for more in ("", " --update last"):
        code, out, _ = say(capsys, "view run --terminal" + more)
        assert code == 0 and "Update 2" in out and "Update 1" not in out
    code, _, err = say(capsys, "view run --update 7")
    assert code == 2 and "keeps 0 to 2" in err
    Path("ranks/rollouts").mkdir(parents=True)
    for rank in (0, 1, 10):
        shutil.copy(path, f"ranks/rollouts/update-00000-rank{rank}.safetensors")
    code, out, _ = say(capsys, "view ranks --terminal --episodes 1000")
    assert code == 0 and out.count("stopped") + out.count("cut off") == 3 * len(r)
    path.write_bytes(path.read_bytes()[:1000])
    assert f"{path.name} is left out: it is damaged" in say(capsys, "view run --no-browser")[1]


# catches: a demo whose page leaves out what it came to; a second page beside it; the result and the
# curves of a demo over the rollouts of a run that was written into its folder later
def test_the_page_of_a_demo_begins_with_its_result(ppo, capsys):
    ppo(save_rollouts=True, output_dir=str(Path("run/ppo").resolve())).train()
    capsys.readouterr()
    for name in ("demo.json", "ppo/manifest.json"):
        Path("run", name).write_text("{}")
    code, out, _ = say(capsys, "view run --no-browser --output result.html")
    assert (code, out) == (0, "rlhf-nb view: result.html\n")
    assert not list(Path("run").glob("*.html"))
    page = Path("result.html").read_text()
    assert page.index("<h1>Run run</h1>") < page.index("No verdict yet") < page.index('id="app"')
    assert "cannot be drawn: it has logged nothing" in say(capsys, "plot run")[2]
    Path("run/ppo/manifest.json").unlink()
    assert say(capsys, "plot run")[0] == say(capsys, "view run --no-browser")[0] == 0
    assert "Another run wrote into ppo since" in Path("run/rollouts.html").read_text()


# ---- Help ----


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_help_teaches(capsys, name):
    about, parser = PARSERS[name]().about, PARSERS[name]()
    assert all(example.split()[:2] == ["rlhf-nb", name] for example in about.examples[:1])
    code, out, _ = say(capsys, f"{name} --help")
    plain = " ".join(out.split())
    assert code == 0 and all(example in plain for example in about.examples)
    assert "needs" in plain and "rite" in plain + about.text
    code, every, _ = say(capsys, f"{name} --help-all")
    options = {f.name for x in parser.dataclass_types for f in dataclasses.fields(x) if f.init}
    assert code == 0 and all(f"--{key}" in every for key in options)
    assert ("transformers.TrainingArguments:" in every) is (name in LONG_HELP)
    assert all(f"--{key}" in out for key in options) is (name not in (*LONG_HELP, "replay"))


# catches: 781 lines of help, an option that must be given and does not say so, a default left out
@pytest.mark.parametrize("name", LONG_HELP)
def test_help_shows_the_options_that_matter(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = say(capsys, f"{name} --help")
    shown = re.findall(r"^  (?:-h, )?--(\S+)", out, re.M)
    assert 20 <= len(shown) <= 32 and len(out.splitlines()) < 80
    for option in ("dataset_name", "model_name_or_path"):
        assert "(required" in out.split(f"--{option} ")[1].split("\n  --")[0]
    assert "(default: " in out and f"rlhf-nb {name} --help-all" in out
    assert len(re.findall(r"^[a-z ]+:$", out, re.M)) >= 4
    assert "keep_forward_gib" not in out and "torch_compile" not in out


# catches: help that shows defaults which the recipe has changed
def test_help_beside_a_recipe_shows_what_it_sets(capsys):
    _, out, _ = say(capsys, "ppo --config mini_tldr.yaml --help")
    assert re.search(r"--response_length INT\s+.*\(default: 32\)", out)


WRONG = (  # what is typed, and behind # a recipe
    "--seed x, --kl_estimator k9, --kl_coef -1, --cliprange 0, --temperature nan, --max-turns 0, "
    "--stop_token_id 3 -4, --total_episodes 0, --lora_dropout 1, --max_steps 0, --seed 4294967296, "
    "--lam 1#kl_coef: -1, #kl-coff: 1, #kl_coef: x, --lam 1#ppo: {max_steps: 0}"
).split(", ")
FINE = ["--total-episodes 7#max_steps: 0", "--kl_coef=0#kl_coef: -1", "--max_steps -1"]


# catches: a range in two places, a message that depends on how soon it comes, a right value refused
@pytest.mark.parametrize("line", [*WRONG, *FINE])
def test_wrong_values_are_named_alike_and_at_once(line, capsys):
    words, _, text = line.partition("#")
    Path("r.yaml").write_text(text)
    typed = ["--dataset-name", "reasoning_gym:x", "--sft_model_path=y", *words.split()]
    typed += ["--config", "r.yaml"] if text else []
    soon = ""
    try:
        assert quick.answered("ppo", typed) is False
    except ValueError as error:
        soon = f"rlhf-nb ppo: {error}\n"
    with suppress(SystemExit):
        PARSERS["ppo"]().read(typed)
    assert capsys.readouterr().err == soon and bool(soon) is (line in WRONG)


# catches: kept pages of help that are not those of the parsers, a command that waits for seconds of
# imports before it answers, an option of transformers that is refused because no one kept its name
def test_what_is_answered_at_once(capsys, monkeypatch, tmp_path):
    assert quick.kept() == json.loads(json.dumps(kept_pages())), "python tests/kept_pages.py"
    assert PARSERS["ppo"]().theirs <= {*quick.their_names()}
    loaded = "assert not {'torch', 'transformers', 'pandas'} & {*sys.modules}"
    enough = ["--dataset-name", "reasoning_gym:x", "--sft_model_path=y"]
    (tmp_path / "wrong.yaml").write_text("kl_coff: 1")
    wrong = f"""--kl_coef -1, --config no.yaml, --config {tmp_path}/wrong.yaml, --gamma, --gamma x,
        --reward_function no.py:f, --value_model_path no/, --reward_model_path docs"""
    lines = "judge --nope, plot docs, plot no, view docs, view docs no, replay docs, preflight"
    lines += ", ppo r.yaml, judge --dataset_name x --model_name_or_path y --judge_model ./no"
    ask = [["ppo", *enough, *x.split()] for x in wrong.split(",")]
    ask += map(str.split, lines.split(","))
    for words, code in (["ppo", "--help"], 0), (["demo", "-h"], 0), *((x, 2) for x in ask):
        code = f"import sys; from rlhf_nb.cli import main; assert main({words}) == {code}; {loaded}"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
    assert quick.answered("ppo", [*enough, "--max_steps", "7", "--target_kl=none"]) is False
    for words in ([__file__, "--update", "last"], [str(tmp_path), "--live"]):
        assert quick.answered("view", words) is False
    monkeypatch.setattr(quick, "check_values", lambda *_: None)
    for name in cli.COMMANDS:
        typed = [x for a in PARSERS[name]().known.values() for x in a.option_strings]
        typed = [x for x in typed if "help" not in x and x != "-h"]
        assert quick.answered(name, [*typed, "-- no option", "--help-all"]) is False, name
    code, out, _ = say(capsys, "completion bash")
    assert code == 0 and "--kl_coef" in out and "rlhf-nb" in out.splitlines()[-1]


def test_the_program_alone(capsys):
    code, out, err = say(capsys, "")
    assert code == 2 and all(f"  {name} " in out for name in cli.COMMANDS) and "COMMAND" in err
    for flag in ("--version", "-V"):
        code, out, err = say(capsys, flag)
        assert (code, out, err) == (0, f"rlhf-nb {rlhf_nb.__version__}\n", "")
    for words, same in (("help", "--help"), ("help ppo", "ppo --help")):
        assert say(capsys, words) == say(capsys, same)


# ---- The pipeline, as it is typed ----

TYPED = (
    """
sft --dataset_name mini_tldr --dataset_train_split train[:96] --dataset_test_split test[:16] --from_scratch --hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2 --num_train_epochs 2 --learning_rate 1e-2 --eval_strategy epoch --logging_steps 5 {common} --output_dir sft
reward --dataset_name mini_tldr --dataset_train_split train[:64] --dataset_test_split test[:16] --model_name_or_path sft --num_train_epochs 1 --learning_rate 1e-3 --center_rewards --eval_strategy epoch --logging_steps 4 {common} --output_dir reward
ppo --dataset_name mini_tldr --dataset_train_split train[:64] --dataset_test_split test[:8] --learning_rate 3e-6 --num_ppo_epochs 1 --num_mini_batches 1 --per_device_train_batch_size 16 --gradient_accumulation_steps 1 --total_episodes 48 --model_name_or_path sft --sft_model_path sft --reward_model_path reward --missing_eos_penalty 1.0 --response_length 12 --stop_token eos --local_rollout_forward_batch_size 16 --logging_steps 1 --save_rollouts {common} --output_dir ppo_seed0
ppo --config again.yaml --seed 1 --output_dir ppo_seed1
judge --model_name_or_path ppo_seed0 --dataset_name mini_tldr --judge_model gold --num_examples 20 --response_length 12
plot ppo_seed0 ppo_seed1 --output curves
view ppo_seed0 --no-browser
""".format(common="--use_cpu --disable_tqdm --seed 0")
    .strip()
    .splitlines()
)

AGAIN = dict(dataset_train_split="train[:64]", dataset_test_split="test[:8]")
AGAIN |= dict(dataset_name="mini_tldr", model_name_or_path="sft", reward_model_path="reward")
AGAIN |= dict(non_eos_penalty=True, penalty_reward_value=-1, response_length=12)
AGAIN |= dict(per_device_train_batch_size=16, total_episodes=48, num_ppo_epochs=1, logging_steps=1)
AGAIN |= dict.fromkeys(("save_rollouts", "use_cpu", "disable_tqdm"), True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "The folder in which all seven lines were typed, and what they said."
    folder = tmp_path_factory.mktemp("typed")
    (folder / "again.yaml").write_text(yaml.safe_dump(AGAIN))
    program = (
        "import os, shlex\nfrom rlhf_nb.cli import main\n"
        "os.dup2(os.open('errors', os.O_WRONLY | os.O_CREAT), 2)\n"
        "for line in open('typed').read().splitlines():\n    print('>>>', line[:8], flush=True)\n"
        "    assert main(shlex.split(line)) == 0, line"
    )
    (folder / "typed").write_text("\n".join(TYPED))
    (folder / "typed.py").write_text(program)
    done = forks.run(folder / "typed.py", folder=folder, COLUMNS="100")
    assert done.returncode == 0, (folder / "errors").read_text()[-3000:]
    return folder, done.stdout


# catches: a command that works in a test and not when it is typed, a folder that the next command
# cannot use, files that are promised and not there
def test_the_pipeline_as_it_is_typed(run):
    folder, out = run
    parts = re.split(r"^>>> .*$", out, flags=re.M)[1:]
    for part, name in zip(parts, ("sft", "reward", "ppo_seed0", "ppo_seed1")):
        last = part.splitlines()[-1]
        assert f"/{name}, every metric in" in last and f"/{name}/trainer_state.json" in last
        assert not [
            f
            for f in ("model.safetensors", "config.json", "tokenizer.json", "trainer_state.json")
            if not (folder / name / f).is_file()
        ]
    assert re.match(r"Model win rate: [\d.]+% \(95% interval", parts[4].splitlines()[-1])
    assert "curves.png" in parts[5]
    assert "ppo_seed0/rollouts.html" in parts[6]
    history = json.loads((folder / "reward" / "trainer_state.json").read_text())["log_history"]
    assert any("eval_accuracy" in row for row in history)
    assert "was subtracted from every score" in parts[1]
    assert len(list((folder / "ppo_seed1" / "rollouts").iterdir())) == 3
    assert (folder / "curves.svg").is_file()
    assert not list(folder.rglob("*.partial"))
    from rlhf_nb.rollout import Rollout

    first = Rollout.load(folder / "ppo_seed1" / "rollouts" / "update-00000.safetensors")
    # the EOS trick in its other form
    assert (first.scores[~first.stopped] == -1).all() and (~first.stopped).any()


LONELY = """
import json, torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
found = {}
for name, kind, more in (("ppo_seed0", AutoModelForCausalLM, {}), ("reward", AutoModelForSequenceClassification, dict(num_labels=1))):
    tokenizer, model = AutoTokenizer.from_pretrained(name), kind.from_pretrained(name, **more)
    ids = tokenizer("my boss sold my car . i feel sad", return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad(): found[name] = model(input_ids=ids).logits.flatten().tolist()
    found[name + "/centre"] = getattr(model.config, "reward_center", 0.0)
json.dump(found, open("lonely.json", "w"))
"""
ALONE = "\nimport sys\nassert not [name for name in sys.modules if name.startswith('rlhf_nb')]"


# catches: a folder that only this package can read, weights that are not those that were trained, a
# centre that is lost
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_was_saved_loads_with_transformers_alone(run, monkeypatch, alone):
    import torch

    from rlhf_nb.models import sequence_scores
    from rlhf_nb.training.model_loading import load_policy, load_scorer, load_tokenizer

    folder, _ = run
    if alone:
        subprocess.run([sys.executable, "-c", LONELY + ALONE], cwd=folder, check=True, timeout=900)
    else:
        monkeypatch.chdir(folder)
        exec(LONELY, {})
    found = json.loads((folder / "lonely.json").read_text())
    ids = torch.tensor(
        [
            load_tokenizer(str(folder / "sft"))(
                "my boss sold my car . i feel sad", add_special_tokens=False
            )["input_ids"]
        ]
    )
    with torch.no_grad():
        logits = load_policy(str(folder / "ppo_seed0"))(input_ids=ids).logits.flatten()
        score = sequence_scores(
            load_scorer(str(folder / "reward")), ids, torch.ones_like(ids).bool()
        )
    assert torch.allclose(logits, torch.tensor(found["ppo_seed0"]), atol=1e-6)
    assert found["reward/centre"] != 0
    assert abs(found["reward"][-1] - found["reward/centre"] - float(score)) < 1e-6
    assert not torch.equal(logits, load_policy(str(folder / "sft"))(input_ids=ids).logits.flatten())


# ---- Commands of the published documentation, with our names in place ----


# catches: a recipe whose setting stays beside its opposite, which was typed
@pytest.mark.parametrize(
    "recipe, typed, value",
    [
        ("missing_eos_penalty: 1.0", "--non_eos_penalty", True),
        ("non_eos_penalty: true", "--missing_eos_penalty 2", 2.0),
        ("stop_token: eos", "--stop_token_id 5", [5]),
        ("stop_strings: [a, b]", "--stop_token=eos", "eos"),
        ("total_episodes: 64", "--num_train_epochs 2", 2.0),
        ("max_steps: 3", "--total_episodes 64", 64),
    ],
)
def test_an_option_replaces_its_opposite_in_a_recipe(tmp_path, recipe, typed, value):
    gone, name = recipe.split(":")[0], re.match(r"--(\w+)", typed)[1]
    (tmp_path / "r.yaml").write_text(f"{recipe}\nkl_coef: 0.25\n")
    words = ["--config", str(tmp_path / "r.yaml"), "--output_dir", "o", *typed.split()]
    options = ppo.ppo_parser().read(words)
    assert getattr(options, name) == value and options.kl_coef == 0.25
    assert getattr(options, gone) == ppo.ppo_parser().read(["--output_dir", "o"]).__dict__[gone]
    kept = ppo.ppo_parser().read([*words[:4], "--kl_coef", "0.5"])
    assert vars(kept)[gone] != vars(options)[gone]


def test_a_switch_that_is_off_replaces_nothing(tmp_path):
    (tmp_path / "r.yaml").write_text("missing_eos_penalty: 1.0\n")
    words = ["--config", str(tmp_path / "r.yaml"), "--output_dir", "o"]
    words += ["--non_eos_penalty", "False"]
    assert ppo.ppo_parser().read(words).missing_eos_penalty == 1.0


def test_rows_are_held_out_where_there_is_no_test_split(tmp_path, capsys):
    rows = Dataset.from_list([dict(prompt=str(i)) for i in range(250)])
    rows.to_json(tmp_path / "rows.jsonl")
    options = arguments.TrainDataArguments(dataset_name=str(tmp_path / "rows.jsonl"))
    train, test = data.splits_of(options, hold_out=100)
    assert (len(train), test["prompt"][0], test["prompt"][-1]) == (150, "150", "249")
    assert "the last 100 training rows are held out" in capsys.readouterr().out
    assert data.splits_of(options)[1] is None  # of sft and reward, which have no use for them
    options.dataset_train_split = "train[:199]"
    train, test = data.splits_of(options, hold_out=100)
    assert len(train) == 199 and test is None


@pytest.mark.parametrize("name", ["ppo_tldr", "ppo.py", "ppo_tldr.py"])
def test_a_script_of_the_documentation_suggests_its_command(capsys, name):
    code, _, err = say(capsys, name)
    assert code == 2 and "Did you mean ppo?" in err


def test_launch_knows_commands_and_recipes_by_name(monkeypatch, capsys, tmp_path):
    seen = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", seen.append)
    monkeypatch.chdir(tmp_path)
    for words in ("--config_file zero2 ppo", "--config_file=zero2.yaml -m rlhf_nb.cli ppo"):
        code, *_ = say(capsys, f"launch {words} --config tldr_pythia_1b.yaml")
        assert code == 0 and seen[-1].config_file == str(cli.RECIPES / "zero2.yaml")
        assert seen[-1].training_script == "rlhf_nb.cli" and seen[-1].module
        assert seen[-1].training_script_args == ["ppo", "--config", "tldr_pythia_1b.yaml"]
    code, _, err = say(capsys, "launch --config_file zero4.yaml ppo")
    assert code == 2 and "there is no such file. Did you mean zero" in err
    failed = subprocess.CalledProcessError(3, "ppo")
    monkeypatch.setattr("accelerate.commands.launch.launch_command", Mock(side_effect=failed))
    assert say(capsys, "launch ppo") == (3, "", "")


@pytest.mark.parametrize(
    "old, new", [("--ppo_epochs", "num_ppo_epochs"), ("--init_kl_coef", "kl_coef")]
)
def test_an_old_option_names_the_new_one(capsys, old, new):
    with pytest.raises(SystemExit):
        ppo.ppo_parser().read([old, "4"])
    assert f"{old} 4. An older name: use {new}. See rlhf-nb ppo --help" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ppo.ppo_parser().values({old.lstrip("-"): "4"})
    assert f"An older name: use {new}. See" in capsys.readouterr().err
