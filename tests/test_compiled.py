"""torch_compile: the layers of all four models, compiled once; the same update within 1e-6, the
same files, and nothing left behind for the next run."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate.utils import DynamoBackend
from peft import LoraConfig
from ppo_fixtures import PROMPTS, scored, weights
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
)

import rlhf_nb.rollout
from rlhf_nb.models import (
    _compiled,
    compile_layers,
    scorer_from,
    tiny_policy,
    train_tokenizer,
    uncompiled,
)
from rlhf_nb.rollout import sample
from rlhf_nb.trainer import PPOConfig, PPOTrainer

SMALL = dict(
    vocab_size=23,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
MODELS = dict(
    neox=GPTNeoXConfig(**SMALL, intermediate_size=64),
    llama=LlamaConfig(**SMALL, intermediate_size=64),
    gpt2=GPT2Config(**SMALL, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    opt=OPTConfig(**SMALL, ffn_dim=64, dropout=0.0),
)
TRACED = dict(
    torch_compile=True, torch_compile_backend="eager"
)  # traced by Dynamo, and run as it is: no C++ is written
PARTS = dict(micro_batch_tokens=48)  # so that an update has several


@pytest.fixture(autouse=True)
def alone():
    "Nothing traced before, nothing left for the tests that follow."
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model(name: str, kind=AutoModelForCausalLM, seed: int = 0):
    torch.manual_seed(seed)
    config = copy.deepcopy(MODELS[name])
    if kind is not AutoModelForCausalLM:
        config.num_labels, config.pad_token_id = 1, 0
    return kind.from_config(config)


def made(ppo, name: str = "llama", **more) -> PPOTrainer:
    return ppo(
        model=model(name),
        **dict(
            per_device_train_batch_size=24,
            gradient_accumulation_steps=1,
            total_episodes=72,
            response_length=9,
            learning_rate=0.01,
            num_ppo_epochs=2,
            **PARTS,
        )
        | more,
    )


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled_parts(model) -> list[str]:
    return [name for name, part in model.named_modules() if part._compiled_call_impl is not None]


# catches: a layer that computes something else, parts that were left out, another model's weights
# in a graph
def test_the_same_update_where_code_is_written(ppo):
    if not shutil.which(os.environ.get("CXX", "c++")):
        pytest.skip(
            "no C++ compiler, which torch.compile wants on a CPU: install g++, or name one in CXX"
        )
    linear = dict(
        optim="sgd", learning_rate=1.0, max_grad_norm=0.0, num_ppo_epochs=1
    )  # Adam makes a whole step of a gradient's last digit
    plain, quick = made(ppo, **linear), made(ppo, torch_compile=True, **linear)
    start = weights(plain)
    torch.manual_seed(0)
    r = scored(plain)
    found = [trainer.update(r) for trainer in (plain, quick)]
    assert graphs() > 0
    before, after = weights(plain), weights(quick)
    assert (
        max((before[name] - after[name]).abs().max() for name in before)
        <= 1e-6
        < 1e-3
        < max((before[name] - start[name]).abs().max() for name in before)
    )
    assert [x["val/ratio"] for x in found] == pytest.approx([found[0]["val/ratio"]] * 2, abs=1e-6)
    same = quick.rollout(PROMPTS * 3)
    assert (
        quick.update(quick.advantages(quick.score(same)))["policy/approxkl_avg"] < 1e-12
    )  # before any step of its own


# catches: a graph for each number of rows or each length, for each token that is sampled, for each
# model of a class
LORA = dict(peft_config=LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear"))


@pytest.mark.parametrize(
    "more",
    [
        dict(num_mini_batches=2),
        dict(activation_checkpointing=True),
        dict(share_value_trunk=True),
        dict(parts=LORA),
    ],
    ids=str,
)
def test_traced_once(ppo, more):
    plain, quick = made(ppo, **more), made(ppo, **TRACED, **more)
    told = []
    for trainer in (plain, quick):
        torch.manual_seed(0)
        for i in range(3):
            if trainer is quick and i == 2:
                seen = graphs()
            told.append(trainer.step())
    assert 0 < seen <= 24 and graphs() == seen and not counters["graph_break"]
    assert (
        max((a - b).abs().max() for a, b in zip(weights(plain).values(), weights(quick).values()))
        <= 1e-6
    )
    names = "objective/kl", "policy/approxkl_avg", "loss/value_avg", "policy/entropy_avg"
    assert [[log[name] for name in names] for log in told[:3]] == [
        pytest.approx([log[name] for name in names], abs=1e-5) for log in told[3:]
    ]


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_each_family(ppo, name):
    trainer = made(ppo, name, reward=model(name, AutoModelForSequenceClassification), **TRACED)
    pair, (judge, _) = trainer.model, *trainer.judges.values()
    assert all(
        one in _compiled and compiled_parts(one)
        for one in (pair.policy, pair.value, trainer.ref_model, judge)
    )
    assert {re.search(r"\d", part).group() for part in compiled_parts(pair.policy)} == {
        "0",
        "1",
    }  # the last one in pieces
    torch.manual_seed(0)
    assert trainer.step()["objective/kl"] == pytest.approx(0, abs=1e-6) and graphs() > 0


def test_a_copy_is_not_compiled():
    policy = model("llama")
    assert compile_layers(policy, backend="eager") == 2
    other = copy.deepcopy(policy)
    assert compiled_parts(policy) and not compiled_parts(other) and other not in _compiled
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.zero_()
    ids = torch.arange(4, 12)[None]
    assert not torch.allclose(policy(ids).logits, other(ids).logits)
    assert not compiled_parts(scorer_from(policy))


def test_a_model_without_layers_by_name():
    "Nothing is compiled, and nothing breaks."
    policy = model("llama")
    policy._no_split_modules = None
    assert compile_layers(policy, backend="eager") == 0 and not compiled_parts(policy)


def test_sampling_traces_nothing():
    policy = model("llama").eval()
    ids = torch.randint(2, 23, (4, 6))
    torch.manual_seed(0)
    plain = sample(policy, ids, torch.ones_like(ids), 8, 0)
    compile_layers(policy, backend="eager")
    before = graphs()
    torch.manual_seed(0)
    quick = sample(policy, ids, torch.ones_like(ids), 8, 0)
    assert graphs() == before and torch.equal(plain.response_ids, quick.response_ids)
    with uncompiled(policy), torch.no_grad():
        policy(ids)
    assert graphs() == before
    with torch.no_grad():
        policy(ids)
    assert graphs() > before  # and compiled again


@pytest.mark.parametrize("wrong", ["each shape", "each token"])
def test_wrong_ways_are_seen(monkeypatch, wrong):
    """Layers compiled for one shape, and sampling through compiled layers: the tests above would
    see both."""
    policy, plain = model("llama").eval(), torch.nn.Module.compile
    if wrong == "each shape":
        monkeypatch.setattr(
            torch.nn.Module, "compile", lambda part, **how: plain(part, **how | dict(dynamic=False))
        )
    compile_layers(policy, backend="eager")
    if wrong == "each token":
        monkeypatch.setattr(rlhf_nb.rollout, "uncompiled", lambda model: nullcontext())
        ids = torch.randint(2, 23, (4, 6))
        sample(policy, ids, torch.ones_like(ids), 8, 0)
        assert graphs() > 0
        return
    seen = []
    with torch.no_grad():
        for rows, columns in ((3, 8), (5, 9), (7, 12)):
            policy(torch.randint(2, 23, (rows, columns)))
            seen.append(graphs())
    assert seen[0] < seen[1] < seen[2]


def test_nothing_is_left_for_the_next_run(ppo, monkeypatch):
    """TrainingArguments writes into the environment, and the next Accelerate, of whatever trainer,
    would compile."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
        monkeypatch.delenv(name)
    quick = made(ppo, **TRACED)
    assert not [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]
    assert quick.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO
    plain = made(ppo)
    assert plain.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO and not compiled_parts(
        plain.model
    )
    plain.step()
    assert not graphs()


def test_what_a_launcher_said_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    PPOConfig(str(tmp_path), use_cpu=True, report_to="none", **TRACED)
    assert (
        os.environ["ACCELERATE_DYNAMO_BACKEND"] == "NO"
        and "ACCELERATE_DYNAMO_MODE" not in os.environ
    )


def test_files_are_those_of_a_plain_run(ppo, tmp_path):
    "Saved names, a checkpoint, and a plain run that goes on from it."
    quick = made(
        ppo, output_dir=str(tmp_path / "quick"), save_strategy="steps", save_steps=1, **TRACED
    )
    quick.train()
    quick.save_model(str(tmp_path / "model"))
    found, wanted = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict(),
        quick.model.policy.state_dict(),
    )
    assert list(found) == list(model("llama").state_dict()) and all(
        torch.equal(found[name], wanted[name]) for name in found
    )
    plain = made(ppo, output_dir=str(tmp_path / "plain"), save_strategy="no")
    plain.train(resume_from_checkpoint=str(tmp_path / "quick" / "checkpoint-2"))
    assert (
        max((a - b).abs().max() for a, b in zip(weights(plain).values(), weights(quick).values()))
        <= 1e-6
    )


def test_the_first_line_says_so(ppo):
    assert (
        "layers compiled by eager" in made(ppo, **TRACED).describe()
        and "compiled" not in made(ppo).describe()
    )


# catches: a graph of one rank alone, gradients that DDP's hooks do not see
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_two_processes(tmp_path):
    tokenizer = train_tokenizer([f"tell {i} of it" for i in range(24)])
    policy = tiny_policy(
        tokenizer,
        0,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    for name, part in dict(base=policy, scorer=scorer_from(policy, 3)).items():
        part.save_pretrained(tmp_path / name)
    for name in ("base", "scorer"):
        tokenizer.save_pretrained(tmp_path / name)
    worker = str(Path(__file__).with_name("compiled_worker.py"))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            worker,
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        env=dict(
            os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true"
        ),
    )
    assert done.returncode == 0 and "right" in done.stdout, done.stderr[-4000:]


# under real ones: parts_worker.py
@pytest.mark.parametrize("how", ["deepspeed", "fsdp"])
def test_refused_where_layers_lie_in_parts(ppo, monkeypatch, how):
    trainer = made(ppo)
    trainer.args.torch_compile, trainer.args.torch_compile_backend = True, "eager"
    monkeypatch.setattr(trainer, f"is_{how}_enabled", True)
    monkeypatch.setattr(trainer, "_layout", lambda: "two processes, in parts")
    with pytest.raises(
        ValueError,
        match="torch_compile is set and what runs is two processes, in parts: .* Leave "
        "torch_compile out",
    ):
        trainer._compile()


def test_refused_without_a_compiler(ppo, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError,
        match="wants a C\\+\\+ compiler on a CPU and there is no no-such-compiler: install",
    ):
        made(ppo, torch_compile=True)
