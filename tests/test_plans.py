"""The plans of the lab 26_tldr_pythia: its arithmetic by hand, what must grow with what, its
commands word by word.

The lab exports nothing, so its definitions are read from the notebook and run here.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from notebooks import NOTEBOOKS
from peft import LoraConfig
from transformers import GPTNeoXConfig

from rlhf_nb import cli
from rlhf_nb.cli import ppo
from rlhf_nb.diagnose.memory import MemoryPlan, model_size

PAGE = NOTEBOOKS["26_tldr_pythia"]
CELLS = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
KEPT = """
    MODELS H100 A100 OURS VLLM RUNS CHAT LARGE COMMANDS
    rehearsed lora adapters CHATTING WORDS ALL COLOURS ASSUMED
""".split()  # quick, and needed
SOURCE = "\n".join(
    ast.get_source_segment(code, node)
    for cell in CELLS
    if cell["cell_type"] == "code" and cell["id"] != "colab-setup"
    for code in ["".join(cell["source"])]
    for node in ast.parse(code).body
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))
    or (
        isinstance(node, ast.Assign)
        and {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)} & {*KEPT}
    )
)


names: dict = {"__name__": "plans"}
exec(compile(SOURCE, "26_tldr_pythia", "exec"), names)
page = SimpleNamespace(**names)
SMALL = GPTNeoXConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=2048,
)


def lora(task: str) -> LoraConfig:
    return LoraConfig(task_type=task, r=4)


def setup(layout="zero2", n=8, micro=4, steps=6, chunk=8, **more):
    return MemoryPlan(
        SMALL,
        more.pop("reward", SMALL),
        layout=layout,
        num_processes=n,
        prompt_length=100,
        response_length=20,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=steps,
        local_rollout_forward_batch_size=chunk,
        **more,
    )


SIZES = (
    "response_length",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "local_rollout_forward_batch_size",
)
P, V = model_size(SMALL).params, model_size(SMALL, scorer=True).params
LAYER = 12 * 64**2 + 13 * 64
F = 2 * 3 * LAYER * 120 + 4 * 3 * 64 * 120**2  # a body reads a row of 120 tokens
HEAD = 2 * 64 * 1000 * 20
near = pytest.approx


# ---- By hand ----


# catches: a weight is only multiplied, attention is linear, logits for all tokens, rows left out
def test_forward():
    size = replace(model_size(SMALL), layers=2, layer=100, heads=2, head_dim=3, hidden=6, vocab=10)
    assert (
        page.forward_flops(size, 3, 5, 2)
        == 3 * (2 * 2 * 100 * 5 + 4 * 2 * 2 * 3 * 25 + 2 * 6 * 10 * 2)
        == 10320
    )
    assert page.forward_flops(model_size(SMALL), 1, 120) == F
    assert page.forward_flops(model_size(SMALL), 1, 120, 20) == F + HEAD


# catches: backward costs one pass, recomputing is free, frozen weights have gradients, one epoch,
# no value model, no reference, a reward function is a model, half a chunk is none
def test_flops():
    both = F + HEAD + F
    assert page.local_rows(setup()) == 24 and page.chunks(setup()) == 3
    assert page.chunks(setup(chunk=7)) == 4 and page.chunks(setup(chunk=64)) == 1
    assert page.update_flops(setup()) == near(24 * 4 * 4 * both)
    assert page.update_flops(setup(activation_checkpointing=False)) == near(24 * 4 * 3 * both)
    assert page.update_flops(setup(num_mini_batches=2), epochs=1) == near(
        24 * 4 * both
    )  # smaller steps, the same rows
    assert page.update_flops(setup(share_value_trunk=True)) == near(24 * 4 * 4 * (F + HEAD))
    assert page.score_flops(setup()) == near(24 * (2 * (F + HEAD) + F + F))
    assert page.score_flops(setup(reward=None)) == near(24 * (2 * (F + HEAD) + F))
    assert page.score_flops(setup(share_value_trunk=True)) == near(24 * (2 * (F + HEAD) + F))
    thin = setup(peft_config=lora("CAUSAL_LM"), value_peft_config=lora("SEQ_CLS"))
    layer = sum(p for p in [thin.trained[0].layer])
    body = F + 2 * 3 * (layer - LAYER) * 120  # with the adapter's own
    assert page.update_flops(thin) == near(24 * 4 * 3 * (2 * body + HEAD), rel=1e-3)


# catches: the cache is free, the cache is full from the start, every row reads all weights,
# phases of a token are summed, more GPUs launch faster
def test_token():
    slow = page.Sampler(0.0, 3, False)
    engine = slow._replace(bf16=True, traffic=1)
    keys = lambda width: 2 * 2 * 110 * 3 * 64 * width  # half of the answer is written on average
    pace = 3.35e12 * 0.5
    reading = (2 * P + 3 * keys(2)) / pace
    for layout, gpu, sampler, gpus, wanted in (
        ("zero2", page.H100, page.OURS, 1, 3 * 8e-4),  # launching
        ("zero2", page.H100, page.OURS, 8, 3 * 8e-4),  # more GPUs launch no faster
        ("zero2", page.H100, slow, 1, reading),
        ("zero2", page.H100, slow, 4, reading / 4),
        ("ddp", page.H100, slow, 1, (2 * P + 3 * keys(4)) / pace),  # float32 keys
        ("ddp", page.H100, engine, 1, (2 * P + keys(2)) / pace),
        ("zero2", page.H100._replace(flops=1e9), slow, 1, 2 * P * 2 / 0.4e9),  # multiplying
    ):
        got = page.token_seconds(setup(layout), gpu, page.Shares(), sampler, 2, gpus=gpus)
        assert got == near(wanted), (layout, sampler, gpus)


# catches: a GPU sends to itself, an all-reduce goes one way, ZeRO-2's sum goes one way, DDP's
# gradients in 16 bits, always, backward finds the weights there, weights are fetched once an
# epoch, without gathering it costs the same, FSDP2 gathers the value model for sampling, FSDP2
# finds frozen models there, FSDP2 fetches embeddings for each chunk, the adapter's reference is
# free
def test_moved():
    "24 rows a GPU, 3 chunks, 6 micro-batches, 4 epochs, 8 GPUs."
    both, others = P + V, 7 / 8
    found = {layout: page.moved(setup(layout)) for layout in ("ddp", "zero2", "zero3", "fsdp2")}
    assert found["ddp"] == near(dict(rollout=0, score=0, update=others * 4 * 2 * 4 * both))
    assert found["zero2"] == near(dict(rollout=0, score=0, update=others * 2 * both * (2 * 24 + 4)))
    assert found["zero3"] == near(
        dict(
            rollout=others * 2 * P,
            score=others * 3 * 2 * (2 * both),
            update=others * 2 * 24 * 3 * both,
        )
    )
    # a body's layers; what is outside of a frozen model's layers comes once, not for each chunk
    inner = 3 * LAYER
    assert found["fsdp2"] == near(
        dict(
            rollout=others * 2 * (P + V - inner),
            score=others * 2 * (3 * both + 3 * 2 * inner + both - 2 * inner),
            update=others * 2 * (24 * 2 + 4) * both,
        )
    )
    assert page.moved(setup("zero3", ds3_gather_for_generation=False))["rollout"] == near(
        others * 2 * P * 20 * 3
    )
    assert page.moved(setup("fsdp2", ds3_gather_for_generation=False))["rollout"] == near(
        others * 2 * (both - 2 * inner + inner * 20 * 3)
    )
    assert page.moved(setup("alone", n=1)) == dict(rollout=0, score=0, update=0)
    assert page.moved(setup(num_mini_batches=2))["update"] == near(others * 2 * both * (2 * 24 + 8))
    thin = setup("zero3", peft_config=lora("CAUSAL_LM"), value_peft_config=lora("SEQ_CLS"))
    (policy, value), (reward,) = (
        thin.trained,
        thin.frozen,
    )  # the reference is the policy, asked twice
    assert page.moved(thin)["score"] == near(
        others * 3 * 2 * (2 * policy.params + value.params + reward.params)
    )


# catches: bytes counted as bits, both directions of a link, FLOP/s with sparsity
def test_machine():
    assert page.H100[:5] == near((989.5e12, 3.35e12, 450e9, 50e9, 80))
    assert page.A100[:5] == near((312e12, 2.039e12, 300e9, 25e9, 80))


# catches: wires in bits, every network is NVLink, the peak is reached, the last token is read,
# one sampling batch, servers get weights for nothing
def test_seconds():
    gpu = page.GPU(flops=1e12, bandwidth=1e12, link=1e9, network=1e8, memory=80, price=3.0)
    shares = page.Shares(0.5, 0.5, 0.5)
    found = page.seconds(setup("zero3"), gpu, shares, page.Sampler(1e-2, 3, False))
    sent = 7 / 8 * (2 * P + 3 * 2 * 2 * (P + V) + 2 * 24 * 3 * (P + V))
    prompts = 24 * (
        2 * 3 * LAYER * 100 + 4 * 3 * 64 * 100**2 + 2 * 64 * 1000
    )  # one word of each row's logits
    assert found == near(
        dict(
            prompts=prompts / 0.5e12,
            tokens=3 * 19 * 3 * 1e-2,
            score=page.score_flops(setup()) / 0.5e12,
            update=page.update_flops(setup()) / 0.5e12,
            wires=sent / 0.5e9,
        )
    )
    wide = page.seconds(setup("zero3", n=16), gpu, shares)["wires"]
    assert wide == near(sent * 8 / 7 * 15 / 16 / 0.5e8)  # out of the box: another wire
    served = page.seconds(setup("zero3"), gpu, shares, page.Sampler(1e-2, 1, True), servers=4)
    assert served["prompts"] == near(prompts * 8 / 4 / 0.5e12)
    assert served["tokens"] == near(19 * 3 * 1e-2)
    assert served["wires"] == near((sent - 7 / 8 * 2 * P) / 0.5e9 + 2 * P / 0.5e8)


# catches: servers are free, hours of one GPU, minutes
def test_bill():
    gpu = page.H100._replace(price=3.0)
    second = sum(page.seconds(setup(), gpu).values())
    found = page.estimate(setup(), 19_200, gpu)  # 100 updates of 8 x 24
    assert found == near(
        {
            "episodes/s": 192 / second,
            "hours": 100 * second / 3600,
            "GPU hours": 800 * second / 3600,
            "dollars": 2400 * second / 3600,
        }
    )
    served = page.estimate(setup(), 19_200, gpu, servers=8)
    assert served["GPU hours"] == near(16 * served["hours"])


# catches: a control that the picture does not follow, a plan that cannot be drawn, a bill that is
# another run's
@pytest.mark.slow
def test_the_picture_follows_the_controls():
    for name, (settings, episodes) in page.ALL.items():
        (axes,) = page.render(name, 0.4, 0.5, 0.8, 2.0).axes
        usual = page.estimate(MemoryPlan(**settings), episodes, page.H100._replace(price=2.0))
        assert (
            axes.get_title("left")
            == f"{usual['episodes/s']:.1f} episodes a second: {usual['hours']:,.0f} hours, "
            f"${usual['dollars']:,.0f}"
        )
        spent = page.seconds(MemoryPlan(**settings))
        assert [bar.get_width() for bar in axes.patches] == near([*spent.values()])
        page.plt.close("all")
    total = lambda *values: sum(
        bar.get_width() for bar in page.render("TL;DR 1B", *values, 2.0).axes[0].patches
    )
    assert total(0.2, 0.5, 0.8) > total(0.4, 0.5, 0.8) < total(0.4, 0.5, 1.6)
    assert total(0.4, 0.1, 0.05) > total(0.4, 0.5, 0.05)
    page.plt.close("all")


# ---- The commands ----


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    for name in ("WORLD_SIZE", "RANK", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


# catches: a flag that is none, a value that the program refuses, a recipe that is not there, a
# figure of the page that its command does not give
def test_every_command_is_understood(quiet):
    for name, command in page.COMMANDS.items():
        chosen = page.rehearsed[name]
        code, verdict = page.rehearse(command, SMALL)
        assert code == 0 and verdict.startswith("It fits"), name
        launched = launch_command_parser().parse_args(shlex.split(command)[2:])
        recipe = yaml.safe_load((cli.RECIPES / launched.config_file).read_text())
        assert launched.training_script == "ppo", name
        assert chosen["num_processes"] == recipe["num_processes"], name
        assert chosen["layout"] == Path(launched.config_file).stem, name
        # the run takes the options too, not only the plan
        data, models, args = ppo.ppo_parser().settings(launched.training_script_args)
        wanted = {key: x for key, x in chosen.items() if key in SIZES}
        assert {key: getattr(args, key) for key in SIZES} == wanted, name
        assert data.max_prompt_length == 512 and args.num_ppo_epochs == 4, name
        assert args.ds3_gather_for_generation == chosen.get("ds3_gather_for_generation", True), name
        adapted = chosen.get("peft_config") is not None
        assert (models.use_peft, models.value_use_peft) == (adapted, adapted), name
        episodes = 1_000_000 if data.dataset_name == "trl-lib/tldr" else 100_000
        assert args.total_episodes == episodes, name


# catches: a rehearsal that passes whatever is typed
def test_a_wrong_command_is_refused(quiet, capsys):
    wrong = page.COMMANDS["7B"].replace("--response_length", "--response_lenght")
    assert page.rehearse(wrong, SMALL) == (2, "")
    assert "Did you mean --response_length" in capsys.readouterr().err
    code, verdict = page.rehearse(page.COMMANDS["7B"].replace("zero3", "ddp"), page.MODELS["7B"])
    assert code == 1 and verdict.startswith("It does not fit")


# catches: flags for several boxes that the launcher does not have
def test_flags_for_more_boxes():
    (flags,) = re.findall(
        r"`(--num_machines [^`]+)`",
        "\n".join("".join(c["source"]) for c in CELLS if c["cell_type"] == "markdown"),
    )
    asked = launch_command_parser().parse_args([*shlex.split(flags), "-m", "rlhf_nb.cli", "ppo"])
    assert (
        asked.num_machines,
        asked.num_processes,
        asked.machine_rank,
        asked.main_process_port,
    ) == (8, 64, 0, 29500)
