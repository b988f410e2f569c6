"Memory: the plan of a PPO run, held to what the real code keeps, on a CPU."

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from datasets import Dataset
from marks import slow_but
from pairs import pairwise
from peft import LoraConfig
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig

import rlhf_nb.sampling
from rlhf_nb import cli
from rlhf_nb.base import last_layer
from rlhf_nb.cli import plan, ppo
from rlhf_nb.diagnose.memory import (
    FORMS,
    MemoryPlan,
    gathered_bytes,
    kv_cache,
    layer_activations,
    model_activations,
    model_size,
    states,
)
from rlhf_nb.forward import PolicyAndValue
from rlhf_nb.models import scorer_from
from rlhf_nb.rollout import sample
from rlhf_nb.sampling import Sampling
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import train_tokenizer

torch.set_num_threads(1)


def configs(h: int = 64, layers: int = 2, vocab: int = 500) -> dict:
    sizes = dict(hidden_size=h, num_hidden_layers=layers, num_attention_heads=4, vocab_size=vocab)
    more = dict(max_position_embeddings=128, bos_token_id=None, eos_token_id=1)
    still = dict(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    own = dict(
        gpt_neox=dict(intermediate_size=4 * h),
        llama=dict(intermediate_size=3 * h, num_key_value_heads=2),
        gpt2=still,
    )
    return {name: AutoConfig.for_model(name, **sizes, **more, **own[name]) for name in own}


SHAPES = ((64, 2, 4, 32, 32), (128, 3, 4, 48, 16))


def lora_of(wanted: bool = True) -> dict:
    return dict(peft_config=LoraConfig(task_type="CAUSAL_LM", r=8)) if wanted else {}


def kept(config, form: str, checkpointing: bool, rows: int, prompt: int, response: int) -> int:
    "Bytes saved for the backward pass of the update's call, each storage once, no parameters."
    policy = AutoModelForCausalLM.from_config(config)
    pair = PolicyAndValue(policy, scorer_from(policy)).train()
    pair.to(torch.bfloat16 if form == "bf16" else torch.float32)
    if checkpointing:
        pair.activation_checkpointing_enable()
    own, saved = {p.untyped_storage().data_ptr() for p in pair.parameters()}, {}

    def weigh(x):
        if (at := x.untyped_storage().data_ptr()) not in own:
            saved[at] = x
        return x

    ids = [torch.randint(3, config.vocab_size, (rows, n)) for n in (prompt, response)]
    masks = [torch.ones_like(x).bool() for x in ids]
    masks[0][0, 0] = False
    with torch.no_grad():
        pair(ids[0], masks[0], ids[1], masks[1], entropy="look", align=16)
    with (
        torch.autograd.graph.saved_tensors_hooks(weigh, lambda x: x),
        torch.autocast("cpu", enabled=form == "autocast"),
    ):
        pair(ids[0], masks[0], ids[1], masks[1], entropy="look", align=16)
    return sum(x.untyped_storage().nbytes() for x in saved.values())


# catches: a copy of autocast counted once where each matrix makes one, the mask left out, grouped
# keys not repeated, a gate forgotten
@pytest.mark.parametrize("shape", slow_but(SHAPES[:1], SHAPES))
def test_activations_are_those_that_are_kept(monkeypatch, shape):
    # what the last layer leaves out, the plan does not: with few layers that is much
    monkeypatch.setattr(last_layer, "position_wise", lambda body: [])
    wrong = []
    for name, form, again in product(configs(), FORMS, (False, True)):
        h, layers, rows, prompt, response = shape
        config, length = configs(h, layers)[name], prompt + response
        sizes = [model_size(config), model_size(config, scorer=True)]
        want = sum(
            model_activations(m, FORMS[form], rows, length, again, response + 1) for m in sizes
        )
        if form == "autocast":
            want += 2 * (sizes[0].vocab * h + h if again else sum(m.matrices for m in sizes))
        if name == "gpt2" and again:  # layers are given mask and positions
            want += 2 * rows * length * (length + 8)
        got = kept(config, form, again, rows, prompt, response)
        if abs(want / got - 1) > (0.05 if again else 0.02):
            wrong.append((name, form, again, shape, want, got))
    assert not wrong


# catches: one formula for all families: OPT's ReLU, Qwen's norms of heads, Gemma 2's attention, which
# keeps its matrix; a model of one layer, a body that the hook cannot run
def test_other_families_are_measured(monkeypatch):
    monkeypatch.setattr(last_layer, "position_wise", lambda body: [])
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=500)
    more = dict(intermediate_size=192, num_key_value_heads=2, head_dim=16)
    opt = dict(ffn_dim=192, word_embed_proj_dim=64, dropout=0.0)
    wrong = []
    gemma = more | dict(final_logit_softcapping=None)  # of the head, which is not measured here
    for name, own in dict(opt=opt, qwen3=more, gemma2=gemma).items():
        config = AutoConfig.for_model(name, **sizes | own)
        both = [model_size(config), model_size(config, scorer=True)]
        want = sum(model_activations(m, FORMS["float32"], 4, 64, False, 33) for m in both)
        got = kept(config, "float32", False, 4, 32, 32)
        if abs(want / got - 1) > 0.02:
            wrong.append((name, want, got))
    assert not wrong
    bytes_of = lambda size: layer_activations(size, FORMS["bf16"], 64)
    shapes = (sizes | more | dict(num_hidden_layers=n) for n in (1, 2))
    one, two = (model_size(AutoConfig.for_model("qwen3", **shape)) for shape in shapes)
    assert bytes_of(one) == bytes_of(two)
    experts = AutoConfig.for_model("mixtral", **sizes | more, num_local_experts=2)
    with pytest.raises(ValueError, match="MixtralModel does not run without numbers"):
        layer_activations(model_size(experts), FORMS["autocast"], 64)


# catches: a cache of two bytes under autocast, a column too many, heads counted instead of key
# heads
def test_the_cache_is_the_samplers(monkeypatch):
    caches = []

    class Spy(DynamicCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            caches.append(self)

    monkeypatch.setattr(rlhf_nb.sampling, "DynamicCache", Spy)
    for name, form in product(configs(), ("float32", "autocast")):
        config = configs()[name]
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.autocast("cpu", enabled=form == "autocast"):
            sample(model, torch.randint(3, 500, (4, 8)), torch.ones(4, 8).bool(), Sampling(6, 0))
        got = sum(layer.keys.nbytes + layer.values.nbytes for layer in caches[-1].layers)
        assert got == kv_cache(model_size(config), FORMS[form], 4, 8 + 6 - 1), (name, form)


# ---- The whole of it, against the allocator ----


def peak_of(act) -> int:
    "Most bytes that were allocated at a time during the call, beyond those before."
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        act()
    events = sorted(
        (e.start_ns(), e.nbytes())
        for e in prof.profiler.kineto_results.events()
        if e.name() == "[memory]"
    )
    now = top = 0
    for _, size in events:
        top = max(top, now := now + size)
    return top


# catches: episodes of several turns planned as one response; observations that are drawn, or read by
# the head; an episode that is longer than the model, or shorter than a turn
def test_an_episode_is_planned_as_long_as_it_is():
    of = lambda **how: MemoryPlan(configs()["llama"], prompt_length=8, **how)
    turns = dict(response_length=4, max_turns=3)
    assert of(**turns).phases == of(response_length=12).phases
    known = of(**turns, max_episode_length=40)
    assert (known.length, known.drawn) == (48, 12)
    assert known.phases["rollout"]["cache"] == of(response_length=40).phases["rollout"]["cache"]
    update = lambda plan: plan.phases["update"]["activations"]
    assert update(of(**turns)) < update(known) < update(of(response_length=40))
    assert of(response_length=30, max_turns=8).length == 128  # its positions


# catches: logits of the policy forgotten while the value model goes backward, copies that outlive
# the forward pass, gradients or Adam of frozen weights
@pytest.mark.parametrize(
    "name, bf16, checkpointing, share, lora",
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (i > 2))
        for i, row in enumerate(pairwise([*configs()], *[(False, True)] * 4))
    ],
)
def test_the_plan_of_an_update_is_what_the_allocator_sees(
    name, bf16, checkpointing, share, lora, tmp_path
):
    words = ["a b c d e f g h " * 3] * 32
    tokenizer = train_tokenizer([*words, *(f"w{i}" for i in range(600))])
    config = configs(128, 3, len(tokenizer))[name]
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(config)
    shared = dict(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        response_length=32,
        activation_checkpointing=checkpointing,
        share_value_trunk=share,
    )
    of_run = dict(num_ppo_epochs=1, save_strategy="no", total_episodes=32, report_to="none")
    folder = dict(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True)
    trainer = PPOTrainer(
        PPOConfig(bf16=bf16, **shared, **of_run, **folder),
        tokenizer,
        policy,
        reward_model=scorer_from(policy),
        train_dataset=Dataset.from_dict(dict(prompt=words)),
        **lora_of(lora),
    )
    batch = trainer.next_batch()
    trainer.step(batch)  # the optimizer has its means now
    r = trainer.advantages(trainer.score(trainer.rollout(batch)))
    got = peak_of(lambda: trainer.update(r))
    precision, prompt = "bf16" if bf16 else "float32", r.prompt_ids.shape[1]
    more = dict(prompt_length=prompt, precision=precision) | lora_of(lora)
    rows = MemoryPlan(config, config, **shared, **more).phases["update"]
    want = sum(rows[row] for row in ("gradients", "copies", "activations", "logits"))
    assert abs(want / got - 1) < 0.15, (want, got)
    means = [x for state in trainer.optimizer.state.values() for x in state.values()]
    adam = sum(x.nbytes for x in means if x.numel() > 1)
    pair = trainer.accelerator.unwrap_model(trainer.model)
    judges = [trainer.reward_model] + ([] if lora else [trainer.ref_model])
    count = lambda *models: sum(p.nbytes for model in models for p in model.parameters())
    assert rows["optimizer"] == pytest.approx(adam, rel=2e-3)
    assert rows["frozen"] == count(*judges)
    assert rows["weights"] == pytest.approx(count(pair), rel=1e-3)


# ---- Layouts, by the book ----


def plan_on(layout: str, reward=None, config=None, **more) -> MemoryPlan:
    config, n = config or configs()["llama"], 1 if layout == "alone" else 4
    spread = dict(layout=layout, num_processes=n, prompt_length=8)
    return MemoryPlan(config, reward or config, config, **spread, **more)


# catches: something divided that is whole, frozen models divided under ZeRO-2, whole under FSDP2,
# in float32 under DeepSpeed, DDP's buckets forgotten
def test_states_are_those_of_the_papers():
    config, n = configs()["llama"], 4
    policy, scorer = model_size(config).params, model_size(config, scorer=True).params
    bytes_of = dict(  # of a number, trained or frozen
        alone=dict(weights=4, frozen=4, gradients=4, optimizer=8),
        ddp=dict(weights=4, frozen=4, gradients=8, optimizer=8),
        zero2=dict(weights=2, frozen=2, gradients=2 / n, optimizer=12 / n),
        zero3=dict(weights=2 / n, frozen=2 / n, gradients=2 / n, optimizer=12 / n),
        fsdp2=dict(weights=4 / n, frozen=4 / n, gradients=4 / n, optimizer=8 / n),
    )
    for layout, rows in bytes_of.items():
        wanted = {row: each * (policy + scorer) for row, each in rows.items()}
        assert states(plan_on(layout)) == pytest.approx(wanted), layout
    for layout, more, each in (
        ("zero2", dict(dtype="bfloat16"), 2),
        ("ddp", dict(dtype="bfloat16"), 2),
        ("zero2", dict(precision="float32"), 4),
        ("fsdp2", dict(dtype="bfloat16"), 2 / n),
    ):
        held = states(plan_on(layout, **more))
        assert held["frozen"] == each * (policy + scorer), (layout, more)
    adapted = states(plan_on("zero3", **lora_of()))
    assert adapted["frozen"] == 2 * scorer / n  # the reference is the policy, its adapter off
    assert plan_on("zero3").phases["rollout"]["gathered"] == 2 * policy


# catches: a value model gathered for sampling, its embeddings forgotten, gathering that FSDP2 does
# not leave out, a frozen model's layers all whole
def test_what_fsdp2_has_whole_for_a_while():
    config, big = configs(layers=4)["llama"], configs(128, 6)["llama"]
    policy, value, judge = model_size(config), model_size(config, True), model_size(big, True)
    whole = lambda phase, *reward, **more: gathered_bytes(
        plan_on("fsdp2", *reward, config=config, **more), phase
    )
    outside = lambda m: m.params - m.layers * m.layer
    running = lambda *models: 2 * sum(outside(m) + 2 * m.layer for m in models)
    assert whole("rollout") == 2 * (policy.params + outside(value))
    spread = whole("rollout", ds3_gather_for_generation=False)
    assert spread == running(policy) + 2 * outside(value)
    assert whole("rollout", share_value_trunk=True) == 2 * policy.params
    assert whole("score") == running(policy, value)
    assert whole("score", big) == max(running(judge), running(policy, value))


# catches: frozen models on the GPU between calls, one that runs and takes no memory, both there at
# once, the smaller one, bytes as loaded under ZeRO-2
def test_offloaded_models_are_there_while_they_run():
    size = model_size(configs()["llama"]).params  # the reference is the larger: its head is wide
    for layout, dtype, each in (
        ("alone", "float32", 4),
        ("ddp", "bfloat16", 2),
        ("zero2", "float32", 2),
        ("fsdp2", "float32", 4 / 4),  # two layers are all of this one
    ):
        phases = plan_on(layout, dtype=dtype, offload_frozen=True).phases
        wanted = dict(rollout=0, score=each * size, update=0)
        assert {name: rows["frozen"] for name, rows in phases.items()} == wanted, layout


# catches: an adapter configuration of the caller that is changed in place
def test_what_is_given_stays_as_it_was():
    lora, config = LoraConfig(task_type="CAUSAL_LM"), configs()["gpt_neox"]
    before = repr(lora), config.to_dict()
    plan_on("alone", config=config, peft_config=lora)
    assert (repr(lora), config.to_dict()) == before


# catches: bytes that are called GiB, in the sentence or in the table
def test_the_verdict_and_the_table_are_in_gib():
    plan = plan_on("alone", gpu_memory=80.0)
    peak = plan.peak / 2**30
    assert f" {peak:.1f} GiB" in plan.verdict and f"; {80 - peak:.1f} of 80" in plan.verdict
    assert plan.frame().loc["sum"].max() == pytest.approx(peak)


def test_what_cannot_be_is_refused():
    for wrong, said in (
        (dict(layout="zero4"), "give one of alone"),
        (dict(num_processes=2), "alone is one GPU"),
        (dict(layout="zero3", offload_frozen=True), "offload_param_device: cpu"),
        (dict(response_length=0), "at least 1"),
        (dict(gpu_memory=-1.0), "a finite number above 0"),
        (dict(prompt_length=120), "128 positions"),
        (dict(dtype="int8"), "float32, bfloat16"),
    ):
        with pytest.raises(ValueError, match=said):
            MemoryPlan(configs()["gpt_neox"], **dict(prompt_length=8) | wrong)


# ---- The command line ----


@pytest.fixture
def shape(tmp_path, monkeypatch) -> str:
    "A folder with a config and nothing else, and no launcher."
    for name in ("WORLD_SIZE", "RANK", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    LlamaConfig(max_position_embeddings=4096).save_pretrained("shape")
    return "--model_name_or_path shape --reward_model_path shape --dry_run"


def outputs(capsys, words: str) -> tuple[int, str]:
    "Exit code, and all that was printed."
    code, printed = cli.main(f"ppo {words}".split()), capsys.readouterr()
    return code, " ".join((printed.out + printed.err).split())


# catches: weights looked for, an exit code of 0 where it does not fit, a folder made for a run that
# is none, an error that does not say what to give
def test_dry_run(shape, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for more, code, *printed in (
        ("--gpu_memory 80", 1, "planned and not run: alone, 1 process(es)", "Less of it: --use"),
        ("--gpu_memory 80 --layout zero3 --num_processes 8", 0, "zero3, 8", "It fits"),
        ("--use_cpu", 0, "Give gpu_memory"),
        ("--layout zero3", 2, "--num_processes 8"),
        ("--layout zero3 --num_processes 8 --offload_frozen", 2, "offload_param_device: cpu"),
        ("--model_name_or_path nobody/nothing", 2, "nobody/nothing cannot be loaded"),
        ("--model_name_or_path .", 2, ". has no config.json: give the folder"),
    ):
        got = outputs(capsys, f"{shape} {more}")
        assert got[0] == code and all(text in got[1] for text in printed), (more, got)
    code, printed = outputs(capsys, "--model_name_or_path shape --dry_run")
    assert code == 2 and "--reward_model_path is missing" in printed
    assert [p.name for p in tmp_path.iterdir()] == ["shape"]
    (tmp_path / "adapter").mkdir()
    written = json.dumps(dict(base_model_name_or_path="shape"))
    (tmp_path / "adapter" / "adapter_config.json").write_text(written)
    assert plan.planned_config("adapter").hidden_size == 4096


# catches: settings that do not reach the plan
def test_options_reach_the_plan(shape, capsys):
    for more, wanted in {
        "--bf16 False --dtype bfloat16": dict(precision="float32", dtype="bfloat16"),
        "--per_device_train_batch_size 3": dict(per_device_train_batch_size=3),
        "--max_prompt_length 77": dict(prompt_length=77),
        "--share_value_trunk": dict(share_value_trunk=True),
        "--use_cpu": dict(activation_checkpointing=False, offload_frozen=False),
        "--activation_checkpointing False": dict(activation_checkpointing=False),
        "--offload_frozen": dict(offload_frozen=True, activation_checkpointing=True),
        "--use_peft": dict(value_peft_config=None),
    }.items():
        setup = plan.plan_of(ppo.ppo_parser().read(f"{shape} {more}".split()))
        assert {name: getattr(setup, name) for name in wanted} == wanted, more
        assert (setup.peft_config is not None) == ("--use_peft" in more)
    played = "--model_name_or_path shape --dry_run --environment walk --max_turns 3"
    for more, said in {
        "": "episodes of 159 behind them (without what is answered: set --max_episode_length), 3",
        "--max_episode_length 200": "episodes of 200 behind them, 3 turns with responses of 53",
    }.items():
        assert said in outputs(capsys, f"{played} {more}")[1]
    assert "episodes" not in outputs(capsys, f"{shape} --max_turns 3")[1]
    given = f"{shape} --reward_function gold".split()
    assert plan.plan_of(ppo.ppo_parser().read(given)).reward is not None


# catches: a launcher's layout overlooked, a flag that contradicts it, every rank printing, a rank
# that fails before the first has printed
def test_dry_run_under_a_launcher(shape, capsys, monkeypatch):
    zero3 = dict(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE="3")
    fsdp2 = dict(ACCELERATE_USE_DEEPSPEED="", ACCELERATE_USE_FSDP="true")
    for environment, more, code, printed in (
        (zero3, "", 1, "zero3, 8 process(es)"),
        (zero3, "--layout fsdp2", 2, "the launcher has zero3"),
        (fsdp2, "", 1, "fsdp2, 8 process(es)"),
    ):
        for name, value in (environment | dict(WORLD_SIZE="8")).items():
            monkeypatch.setenv(name, value)
        got = outputs(capsys, f"{shape} --gpu_memory 24 {more}")
        assert got[0] == code and printed in got[1], (environment, got)
    monkeypatch.setenv("RANK", "1")
    assert outputs(capsys, f"{shape} --gpu_memory 24") == (0, "")
